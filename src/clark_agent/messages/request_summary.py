"""The shape of a request to the model, without its text: safe to log.

Only counts, sizes and names; no prompt, no message, no image address, no schema.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, assert_never

import msgspec
from msgspec import Struct, field

from clark_agent.events import ProviderRequestPrepared
from clark_agent.types import (
    AgentMessage,
    AssistantBlock,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UserBlock,
    UserMessage,
)

__all__ = ["ProviderContentCounts", "ProviderMessageCounts", "ProviderRequestSummary"]


class ProviderMessageCounts(Struct, frozen=True):
    """How many messages of each role a request has."""

    system: int = 0
    user: int = 0
    assistant: int = 0
    tool_result: int = 0
    custom: int = 0


# With `omit_defaults` a plain default is omitted, but one from a factory is written.
_ALWAYS: int = field(default_factory=int)


class ProviderContentCounts(Struct, frozen=True, omit_defaults=True):
    """How many blocks of each kind a request has, and how many bytes they take.

    Counts of blocks that most requests do not have are omitted from the JSON when they are 0.
    """

    system_message_bytes: int = _ALWAYS
    user_text_blocks: int = _ALWAYS
    user_text_bytes: int = _ALWAYS
    user_image_blocks: int = _ALWAYS
    user_image_with_media_type: int = _ALWAYS
    assistant_text_blocks: int = _ALWAYS
    assistant_text_bytes: int = _ALWAYS
    assistant_thinking_blocks: int = _ALWAYS
    assistant_thinking_bytes: int = _ALWAYS
    assistant_reasoning_blocks: int = _ALWAYS
    assistant_reasoning_bytes: int = _ALWAYS
    assistant_reasoning_detail_blocks: int = _ALWAYS
    assistant_reasoning_detail_bytes: int = _ALWAYS
    assistant_tool_call_blocks: int = _ALWAYS
    assistant_error_messages: int = _ALWAYS
    tool_result_text_blocks: int = _ALWAYS
    tool_result_text_bytes: int = _ALWAYS
    tool_result_image_blocks: int = _ALWAYS
    tool_result_error_messages: int = _ALWAYS
    custom_payload_bytes: int = _ALWAYS
    user_file_blocks: int = 0
    assistant_image_blocks: int = 0
    assistant_provider_blocks: int = 0
    assistant_provider_bytes: int = 0
    tool_result_file_blocks: int = 0


class ProviderRequestSummary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The dimensions of a request."""

    iteration: int
    model_id: str | None = None
    temperature: float | None = None
    max_output_tokens: int | None = None
    system_prompt_bytes: int
    system_prompt_chars: int
    message_count: int
    message_counts: ProviderMessageCounts
    content_counts: ProviderContentCounts
    tool_count: int
    tool_names: tuple[str, ...]
    tool_schema_bytes: int
    last_message_role: str | None = None

    @classmethod
    def from_event(cls, request: ProviderRequestPrepared) -> ProviderRequestSummary:
        """Summarize the request of an event."""
        messages, tools = request.messages, request.tools
        return cls(
            iteration=request.iteration,
            model_id=(request.model_id or "").strip() or None,
            temperature=request.temperature,
            max_output_tokens=request.max_output_tokens,
            system_prompt_bytes=_size(request.system_prompt),
            system_prompt_chars=len(request.system_prompt),
            message_count=len(messages),
            message_counts=ProviderMessageCounts(**Counter(map(_role, messages))),
            content_counts=_count_content(messages),
            tool_count=len(tools),
            tool_names=tuple([tool.name for tool in tools]),
            tool_schema_bytes=sum(
                [_size(t.name) + _size(t.description) + _json_size(t.parameters) for t in tools]
            ),
            last_message_role=_role(messages[-1]) if messages else None,
        )


def _role(message: AgentMessage) -> str:
    role = message.__struct_config__.tag
    assert isinstance(role, str)
    return role


def _count_content(messages: Sequence[AgentMessage]) -> ProviderContentCounts:
    counts: Counter[str] = Counter()
    for message in messages:
        match message:
            case SystemMessage():
                counts["system_message_bytes"] += _size(message.content)
            case UserMessage(content=str(text)):
                _count_blocks(counts, "user", [TextContent(text)])
            case UserMessage(content=tuple(blocks)):
                _count_blocks(counts, "user", blocks)
            case AssistantMessage():
                counts["assistant_error_messages"] += message.error_message is not None
                _count_blocks(counts, "assistant", message.content)
            case ToolResultMessage():
                counts["tool_result_error_messages"] += message.is_error
                _count_blocks(counts, "tool_result", message.content)
            case CustomMessage():
                counts["custom_payload_bytes"] += _json_size(message.payload)
            case _:
                raise TypeError(f"not a message: {message!r}")
    for role in ("tool_result", "assistant"):
        del counts[f"{role}_image_with_media_type"]  # reported only for users
    return ProviderContentCounts(**counts)


def _count_blocks(
    counts: Counter[str], role: str, blocks: Iterable[AssistantBlock | UserBlock]
) -> None:
    for block in blocks:
        match block:
            case TextContent() | ThinkingContent() | ReasoningContent():
                kind = block.__struct_config__.tag
                counts[f"{role}_{kind}_blocks"] += 1
                counts[f"{role}_{kind}_bytes"] += _size(block.text)
            case ReasoningDetailsContent():
                counts[f"{role}_reasoning_detail_blocks"] += 1
                counts[f"{role}_reasoning_detail_bytes"] += _json_size(block.details)
            case ImageContent():
                counts[f"{role}_image_blocks"] += 1
                counts[f"{role}_image_with_media_type"] += block.media_type is not None
            case FileContent():
                counts[f"{role}_file_blocks"] += 1
            case ProviderContent():
                counts[f"{role}_provider_blocks"] += 1
                counts[f"{role}_provider_bytes"] += _json_size(block.data)
            case ToolCall():
                counts[f"{role}_tool_call_blocks"] += 1
            case _:
                assert_never(block)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _json_size(value: Any) -> int:
    return len(msgspec.json.encode(value))
