"""Turns of a transcript as plain text: for a model that summarises them, or reads them again."""

from __future__ import annotations

from collections.abc import Iterable

from clark_agent.messages.wire import encode_json
from clark_agent.plugins.tool_result_budget import clip
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolResultMessage,
    UserMessage,
)

__all__ = ["text_of", "texts_of"]

_LEAST = 200
"""The least number of characters of a message when a text must be short."""


def text_of(message: AgentMessage) -> str:
    """A message with its speaker; empty for messages that no model gets."""
    match message:
        case UserMessage():
            return f"User: {message.plain_text}"
        case SystemMessage():
            return f"System: {message.plain_text}"
        case AssistantMessage():
            calls = [f"{call.name}({_arguments(call)})" for call in message.tool_calls]
            said = [text for text in [message.plain_text.strip()] if text]
            return "Assistant: " + "\n".join([*said, *[f"[calls {call}]" for call in calls]])
        case ToolResultMessage():
            kind = "Error" if message.is_error else "Result"
            return f"{kind} of {message.tool_name}: {message.plain_text}"
        case _:
            return ""


def _arguments(call: ToolCall) -> str:
    return encode_json(call.arguments).decode("utf-8", "replace")


def texts_of(messages: Iterable[AgentMessage], max_chars: int) -> str:
    """Messages as one text of about this length at most: the longest ones are clipped."""
    texts = [text for message in messages if (text := text_of(message))]
    cap = _cap([len(text) for text in texts], max_chars)
    return "\n\n".join([text if len(text) <= cap else clip(text, cap) for text in texts])


def _cap(sizes: list[int], room: int) -> int:
    """How long each text may be so that all fit: short ones leave their share to the others."""
    left, cap = room, max(sizes, default=0)
    for count, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        if size * count > left:
            cap = left // count
            break
        left -= size
    return max(cap, _LEAST)
