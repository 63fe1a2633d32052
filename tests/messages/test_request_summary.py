"""A summary tells the dimensions of a request and not a word of its text."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    StopReason,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    ToolSchema,
    UserMessage,
)
from clark_agent.events import ProviderRequestPrepared
from clark_agent.messages import (
    ProviderContentCounts,
    ProviderMessageCounts,
    ProviderRequestSummary,
    encode_json,
)
from tests.strategies import TEXT, tool_schemas, transcripts

MARKER = "XYZZY"


def prepared(
    messages: list[AgentMessage],
    tools: list[ToolSchema] | None = None,
    system_prompt: str = "",
    model_id: str | None = None,
) -> ProviderRequestPrepared:
    return ProviderRequestPrepared(
        iteration=2,
        model_id=model_id,
        system_prompt=system_prompt,
        messages=messages,
        tools=tools or [],
        temperature=0.5,
        max_output_tokens=100,
    )


def summary_of(event: ProviderRequestPrepared) -> ProviderRequestSummary:
    return ProviderRequestSummary.from_event(event)


marked = TEXT.map(lambda text: text + MARKER)


@given(transcripts(marked), st.lists(tool_schemas(marked, st.just("look")), max_size=2), marked)
@settings(max_examples=120)
def test_nothing_that_was_said_is_in_a_summary(
    messages: list[AgentMessage], tools: list[ToolSchema], prompt: str
) -> None:
    event = prepared(messages, tools, prompt)
    assert MARKER.encode() in encode_json(event)
    assert MARKER.encode() not in encode_json(summary_of(event))


@given(transcripts(), st.lists(tool_schemas(), max_size=2), TEXT)
def test_counts_and_sizes(
    messages: list[AgentMessage], tools: list[ToolSchema], prompt: str
) -> None:
    summary = summary_of(prepared(messages, tools, prompt))
    assert summary.system_prompt_chars == len(prompt)
    assert summary.system_prompt_bytes == len(prompt.encode())
    assert summary.message_count == len(messages)
    counts = summary.message_counts
    kinds = (SystemMessage, UserMessage, AssistantMessage, ToolResultMessage, CustomMessage)
    assert counts == ProviderMessageCounts(
        *[len([m for m in messages if isinstance(m, kind)]) for kind in kinds]
    )
    assert summary.tool_names == tuple(tool.name for tool in tools)
    assert summary.tool_count == len(tools)
    assert summary.tool_schema_bytes == sum(
        len(tool.name.encode()) + len(tool.description.encode()) + len(encode_json(tool.parameters))
        for tool in tools
    )


# No two kinds occur equally often with and without, so that a count of the wrong ones shows.
BLOCKS = (
    TextContent("é"),
    ImageContent("x", "image/png"),
    ImageContent("x"),
    ImageContent("x"),
    FileContent("data:application/pdf,x", name="secret.pdf"),
)

EVERYTHING: list[AgentMessage] = [
    SystemMessage("é!"),
    UserMessage("ab"),
    UserMessage(BLOCKS),
    AssistantMessage(
        (
            TextContent("a"),
            ThinkingContent("bc"),
            ThinkingContent("d"),
            ReasoningContent("efgh"),
            ReasoningDetailsContent(({"a": "é"}, 1)),
            ToolCall("id", "look", {"a": "a long argument"}),
            ImageContent("data:image/png,x", "image/png"),
            ProviderContent("anthropic", {"a": 1}),
        ),
        StopReason.ERROR,
        "failed",
    ),
    *[AssistantMessage((), StopReason.OTHER)] * 2,
    ToolResultMessage("id", "look", BLOCKS, is_error=True),
    ToolResultMessage("id", "look", (TextContent("abc"),), details={"not": "counted"}),
    ToolResultMessage("id", "look", ()),
    CustomMessage("a kind", [None, "é"]),
]


def test_every_kind_of_block_is_counted() -> None:
    assert summary_of(prepared(EVERYTHING)).content_counts == ProviderContentCounts(
        system_message_bytes=3,
        user_text_blocks=2,
        user_text_bytes=4,
        user_image_blocks=3,
        user_image_with_media_type=1,
        assistant_text_blocks=1,
        assistant_text_bytes=1,
        assistant_thinking_blocks=2,
        assistant_thinking_bytes=3,
        assistant_reasoning_blocks=1,
        assistant_reasoning_bytes=4,
        assistant_reasoning_detail_blocks=1,
        assistant_reasoning_detail_bytes=len('[{"a":"é"},1]'.encode()),
        assistant_tool_call_blocks=1,
        assistant_error_messages=1,
        tool_result_text_blocks=2,
        tool_result_text_bytes=5,
        tool_result_image_blocks=3,
        tool_result_error_messages=1,
        custom_payload_bytes=len('[null,"é"]'.encode()),
        user_file_blocks=1,
        assistant_image_blocks=1,
        assistant_provider_blocks=1,
        assistant_provider_bytes=len('{"a":1}'),
        tool_result_file_blocks=1,
    )


def test_counts_of_rare_blocks_are_written_only_where_there_are_some() -> None:
    counts = msgspec.to_builtins(ProviderContentCounts(assistant_image_blocks=2))
    assert counts["assistant_image_blocks"] == 2
    assert counts["custom_payload_bytes"] == 0
    assert "user_file_blocks" not in counts


@pytest.mark.parametrize(
    ("message", "role"),
    [
        (SystemMessage(""), "system"),
        (UserMessage(""), "user"),
        (AssistantMessage.from_text(""), "assistant"),
        (ToolResultMessage("", "", ()), "tool_result"),
        (CustomMessage(""), "custom"),
    ],
)
def test_the_role_of_the_last_message(message: AgentMessage, role: str) -> None:
    assert summary_of(prepared([UserMessage(""), message])).last_message_role == role


@pytest.mark.parametrize(
    ("model_id", "told"), [(None, None), ("", None), (" \n", None), (" large-1 ", "large-1")]
)
def test_the_model_is_named_unless_it_is_blank(model_id: str | None, told: str | None) -> None:
    assert summary_of(prepared([], model_id=model_id)).model_id == told


def test_the_rest_of_the_request_is_told() -> None:
    summary = summary_of(prepared([]))
    assert (summary.iteration, summary.temperature, summary.max_output_tokens) == (2, 0.5, 100)
    assert summary.last_message_role is None


def test_a_lone_surrogate_in_a_prompt_does_not_stop_the_log() -> None:
    assert summary_of(prepared([], system_prompt="\ud800")).system_prompt_bytes == 3
