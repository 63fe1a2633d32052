"""Content has the conventions' form, and every text in it is redacted, whatever the messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import ValidationError

from clark_agent.otel.content import Content
from clark_agent.otel.conventions import OUTPUT_MESSAGES
from clark_agent.stream import StreamRequest, ToolSchema
from clark_agent.types import (
    AgentMessage,
    AssistantBlock,
    AssistantMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UserMessage,
)
from tests.otel.content_schema import check_content
from tests.strategies import messages

MARK = "§"
# Besides texts a part has these: names and ids that the conventions or the run define.
_FIXED = {"type", "id", "name", "role", "modality", "finish_reason"}


def texts(value: Any, key: str = "") -> list[str]:
    """The strings of JSON that are content."""
    if isinstance(value, dict):
        return [text for name, each in value.items() for text in texts(each, name)]
    if isinstance(value, list):
        return [text for each in value for text in texts(each, key)]
    return [value] if isinstance(value, str) and key not in _FIXED else []


@given(st.lists(messages(), max_size=4))
def test_every_message_has_its_form_and_every_text_is_redacted(said: list[AgentMessage]) -> None:
    content = Content(lambda text: MARK)
    request = StreamRequest(system_prompt="secret", messages=said)
    found = content.of_request(request)
    for name, value in {**found, **content.of_run(said)}.items():
        check_content(name, value)
    written = json.loads(found["gen_ai.input.messages"])
    assert [message["role"] for message in written] == [_role(message) for message in said]
    for message in written:
        assert all(isinstance(part["type"], str) for part in message["parts"])
    assert {*texts(written)} <= {MARK}
    assert json.loads(found["gen_ai.system_instructions"]) == [{"type": "text", "content": MARK}]


def test_numbers_are_redacted_as_text() -> None:
    given = {"card": 4111111111111111, "pin": 12.5, "n": [7, True, None], "at": -4e300}
    asked: list[str] = []

    def redact(text: str) -> str:
        asked.append(text)
        return "***" if text.startswith("4111") or text == "12.5" else text

    found = json.loads(Content(redact).of_arguments(given)["gen_ai.tool.call.arguments"])
    assert found == {"card": "***", "pin": "***", "n": [7, True, None], "at": -4e300}
    assert asked == ["card", "4111111111111111", "pin", "12.5", "n", "7", "at", "-4e+300"]
    plain = json.loads(Content().of_arguments(given)["gen_ai.tool.call.arguments"])
    assert plain == given


def test_keys_that_become_the_same_lose_no_value() -> None:
    given = {"a": "1", "*** (2)": "2", "b": "3", "c": "4"}
    content = Content(lambda text: "***" if text in "abc" else text)
    found = json.loads(content.of_arguments(given)["gen_ai.tool.call.arguments"])
    assert found == {"***": "1", "*** (2)": "2", "*** (3)": "3", "*** (4)": "4"}


@pytest.mark.parametrize(
    "block",
    [
        ImageContent("https://example.com/secret.png", "image/secret"),
        ImageContent("data:image/secret;base64,AAAA"),
        FileContent("data:secret/x;base64,AAAA", "secret/y"),
    ],
)
def test_the_types_of_images_and_files_are_redacted(block: Any) -> None:
    found = Content(lambda text: MARK).of_request(
        StreamRequest(system_prompt="", messages=[UserMessage((block,))])
    )
    assert "secret" not in str(found)


def _role(message: Any) -> str:
    return "tool" if isinstance(message, ToolResultMessage) else str(message.role)


def test_the_parts_are_those_of_the_conventions() -> None:
    content = Content()
    call = ToolCall("c1", "find", {"what": ["tea"]})
    answer = AssistantMessage(
        (ThinkingContent("hm"), ReasoningContent("so"), TextContent("Yes."), call),
        StopReason.TOOL_USE,
    )
    picture = ImageContent("data:image/png;base64,AAAA")
    sound = FileContent("https://example.com/a.mp3", "audio/mpeg")
    asked = UserMessage((TextContent("This?"), picture, sound))
    result = ToolResultMessage("c1", "find", (TextContent("found"),))
    assert content.messages([asked, answer, result]) == [
        {
            "role": "user",
            "parts": [
                {"type": "text", "content": "This?"},
                {
                    "type": "blob",
                    "modality": "image",
                    "mime_type": "image/png",
                    "content": "",
                },
                {
                    "type": "uri",
                    "modality": "audio",
                    "mime_type": "audio/mpeg",
                    "uri": "https://example.com/a.mp3",
                },
            ],
        },
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "reasoning", "content": "so"},
                {"type": "text", "content": "Yes."},
                {"type": "tool_call", "id": "c1", "name": "find", "arguments": {"what": ["tea"]}},
            ],
        },
        {
            "role": "tool",
            "parts": [
                {
                    "type": "tool_call_response",
                    "id": "c1",
                    "response": [{"type": "text", "content": "found"}],
                }
            ],
        },
    ]


def test_every_kind_of_block_has_a_form() -> None:
    calls: tuple[AssistantBlock, ...] = (
        ReasoningDetailsContent(({"data": "x"},)),
        ProviderContent("openai", {"type": "web_search_call"}),
        ImageContent("https://example.com/a.png"),
        TextContent("Yes."),
    )
    answer = AssistantMessage(calls, StopReason.OTHER)
    written = check_content("gen_ai.output.messages", Content().of_answer(answer)[OUTPUT_MESSAGES])
    assert [part["type"] for part in written[0]["parts"]] == [
        "reasoning_details",
        "provider",
        "uri",
        "text",
    ]
    assert written[0]["finish_reason"] == "other"


@pytest.mark.parametrize(
    "damaged",
    [
        [{"role": "user", "parts": [{"type": "txt", "content": "Hi"}]}],
        [{"role": "user", "parts": [{"type": "text", "text": "Hi"}]}],
        [{"role": "user", "parts": "Hi"}],
        [{"role": "user", "parts": [{"type": "uri", "modality": "image", "uri": "data:,x"}]}],
        [{"role": "tool", "parts": [{"type": "tool_call_response", "result": "x"}]}],
        [{"role": "assistant", "parts": []}],  # no reason why it ended
    ],
)
def test_the_schemas_find_what_is_wrong(damaged: Any) -> None:
    with pytest.raises(ValidationError):
        check_content(OUTPUT_MESSAGES, json.dumps(damaged))


def test_tools_are_defined_as_the_conventions_say() -> None:
    tool = ToolSchema("find", "Find it.", {"type": "object"})
    found = Content().of_request(StreamRequest(system_prompt="", messages=(), tools=(tool,)))
    assert json.loads(found["gen_ai.tool.definitions"]) == [
        {
            "type": "function",
            "name": "find",
            "description": "Find it.",
            "parameters": {"type": "object"},
        }
    ]
    assert "gen_ai.system_instructions" not in found
