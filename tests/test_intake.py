"""Values from outside: every block and chunk there is gets in, repaired where it needs repair."""

from __future__ import annotations

import logging
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from msgspec import Struct

from clark_agent import (
    AssistantMessage,
    ImageContent,
    ProviderContent,
    StopReason,
    TextContent,
    ToolResult,
    ToolResultMessage,
    UserMessage,
)
from clark_agent.errors import ToolContractError
from clark_agent.intake import accept_answer, accept_chunk, accept_message, accept_result
from clark_agent.messages import decode_json, encode_json
from clark_agent.stream import AnnotationChunk, BlockChunk, ReasoningDetailsChunk, StreamChunk
from clark_agent.types import Annotation, AssistantBlock, ToolResultBlock, UserBlock
from tests.strategies import messages

HALF = "a\ud83d"
REPAIRED = "a\ufffd"
LOOP: list[Any] = []
LOOP.append(LOOP)


class Opaque:
    def __repr__(self) -> str:
        return f"<opaque {HALF}>"


OPEN = {"text": HALF, HALF: [HALF, {"deep": (HALF,)}], "object": Opaque(), "loop": LOOP}


def dirty(kind: type[Struct]) -> Any:
    """A struct whose texts no encoder accepts and whose open fields JSON cannot hold."""
    return kind(**{field.name: _dirty(field.type) for field in msgspec.structs.fields(kind)})


def _dirty(kind: Any) -> Any:
    if kind is Any:
        return OPEN
    options = get_args(kind) or (kind,)
    if kind == tuple[Any, ...]:
        return (OPEN,)
    if str in options:
        return HALF
    for option in options:
        if isinstance(option, type) and issubclass(option, Struct):
            return dirty(option)
    return 0


def check_written(value: Any, kind: Any) -> None:
    """It can be written, and what is read again is the same."""
    written = encode_json(value)
    assert decode_json(written, kind) == value
    assert REPAIRED.encode() in written
    assert b"<opaque" in written or b'"object"' not in written


ASSISTANT = get_args(AssistantBlock)
USER = get_args(UserBlock)
CHUNKS = get_args(StreamChunk)
WHOLE = (ReasoningDetailsChunk, BlockChunk, AnnotationChunk)


@pytest.mark.parametrize("kind", ASSISTANT, ids=lambda kind: kind.__name__)
def test_every_block_of_an_answer_is_repaired(kind: Any) -> None:
    given = AssistantMessage((dirty(kind),), StopReason.END_TURN)
    accepted = accept_answer(given)
    check_written(accepted, AssistantMessage)
    assert type(accepted.content[0]) is kind
    assert accept_answer(accepted) is accepted, "what is fine stays"


@pytest.mark.parametrize("kind", USER, ids=lambda kind: kind.__name__)
def test_every_block_of_a_user_and_of_a_tool_is_repaired(kind: Any) -> None:
    assert get_args(ToolResultBlock) == USER
    blocks = (dirty(kind),)
    for message in (UserMessage(blocks), ToolResultMessage("i", "n", blocks)):
        accepted = accept_message(message)
        check_written(accepted, type(message))
        assert accept_message(accepted) is accepted
    check_written(accept_result(ToolResult(blocks), "a tool").content, tuple[UserBlock, ...])


@pytest.mark.parametrize("kind", CHUNKS, ids=lambda kind: kind.__name__)
def test_every_chunk_is_accepted(kind: Any) -> None:
    given = dirty(kind)
    accepted = accept_chunk(given)
    assert type(accepted) is kind
    if kind in WHOLE:
        check_written(accepted, kind)
    else:
        assert accepted is given, "the other half of the character may come next"
    assert accept_chunk(accepted) is accepted


def test_annotations_are_repaired() -> None:
    given = AssistantMessage((TextContent("a"),), StopReason.END_TURN)
    notes: Any = [dirty(Annotation), Annotation("url", start=-1, end=3)]
    accepted = accept_answer(msgspec.structs.replace(given, annotations=notes))
    check_written(accepted, AssistantMessage)
    assert accepted.annotations[1] == Annotation("url", end=3), "as str.find says that it is absent"
    assert accept_answer(accepted) is accepted


@given(messages())
def test_a_message_that_is_fine_stays(message: Any) -> None:
    assert accept_message(message) is message


def test_what_json_cannot_hold_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    block = ProviderContent("p", {"object": Opaque()})
    with caplog.at_level(logging.WARNING):
        accept_chunk(BlockChunk(block))
    assert "ProviderContent.data cannot be written as JSON" in caplog.text


NONSENSE: Any = 7


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (UserMessage((ProviderContent("p", {}),)), "content holds"),  # type: ignore[arg-type]
        (AssistantMessage((ImageContent(NONSENSE),), StopReason.OTHER), "ImageContent.source"),
        (
            AssistantMessage((ProviderContent(NONSENSE, 1),), StopReason.OTHER),
            "ProviderContent.pro",
        ),
        (AssistantMessage((), StopReason.OTHER, annotations=NONSENSE), "annotations must be"),
        (
            AssistantMessage((), StopReason.OTHER, annotations=(NONSENSE,)),
            "expected an Annotation",
        ),
        (
            AssistantMessage((), StopReason.OTHER, annotations=(Annotation("url", url=NONSENSE),)),
            "Annotation.url must be a str",
        ),
        (
            AssistantMessage(
                (),
                StopReason.OTHER,
                annotations=(Annotation("url", start="7"),),  # type: ignore[arg-type]
            ),
            "Annotation.start must be an int",
        ),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(message: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        accept_message(message)


@pytest.mark.parametrize("chunk", [BlockChunk(NONSENSE), AnnotationChunk(NONSENSE), NONSENSE])
def test_a_chunk_of_nothing_is_refused(chunk: Any) -> None:
    with pytest.raises(TypeError, match="7"):
        accept_chunk(chunk)


def test_a_tool_has_no_items_of_a_provider() -> None:
    with pytest.raises(ToolContractError, match="FileContent; not a ProviderContent"):
        accept_result(ToolResult((ProviderContent("p", 1),)), "a tool")  # type: ignore[arg-type]
