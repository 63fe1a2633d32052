"""What a tool gives back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clark_agent import ImageContent, TextContent, ToolResult
from clark_agent.messages import encode_json


def test_text_terminal_and_error() -> None:
    blocks = (TextContent("x"),)
    assert ToolResult.text("x") == ToolResult(blocks)
    assert ToolResult.terminal("x") == ToolResult(blocks, terminate=True)
    assert ToolResult.error("x") == ToolResult(blocks, is_error=True)


@pytest.mark.parametrize("make", [ToolResult.text, ToolResult.terminal, ToolResult.error])
def test_each_may_carry_details(make: Callable[..., ToolResult]) -> None:
    details = {"rows": 3}
    result = make("x", details=details)
    assert result.details is details


def test_narration_is_trimmed() -> None:
    result = ToolResult.error("x", details=1)
    told = result.with_narration("  Looked it up.\n")
    assert told == ToolResult(result.content, True, 1, False, "Looked it up.")
    assert result.narration is None


@pytest.mark.parametrize("blank", ["", " \n"])
def test_blank_narration_changes_nothing(blank: str) -> None:
    told = ToolResult.text("x").with_narration("said")
    assert told.with_narration(blank) == told


def test_plain_text_leaves_images_out() -> None:
    result = ToolResult((TextContent("a"), ImageContent("data:,x"), TextContent("b")))
    assert result.plain_text == "ab"
    assert ToolResult(()).plain_text == ""


@pytest.mark.parametrize(
    ("result", "written"),
    [
        (ToolResult(()), '{"content":[]}'),
        (ToolResult.text("x"), '{"content":[{"type":"text","text":"x"}]}'),
        (
            ToolResult((), True, {"b": None}, True, "n"),
            '{"content":[],"is_error":true,"details":{"b":null},"terminate":true,"narration":"n"}',
        ),
    ],
)
def test_written_form(result: ToolResult, written: str) -> None:
    assert encode_json(result).decode() == written
