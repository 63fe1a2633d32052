"""Exports a conversation: as OpenAI's or Anthropic's messages, or as Markdown.

The transports write the formats of providers. They are loaded when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

import msgspec

from clark_agent.stream import StreamRequest
from clark_agent.types import (
    AgentMessage,
    Annotation,
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

__all__ = ["to_anthropic_messages", "to_markdown", "to_openai_messages"]


def to_openai_messages(
    messages: Iterable[AgentMessage], system_prompt: str = ""
) -> list[dict[str, Any]]:
    """The conversation in the format of Chat Completions.

    It is what `clark_agent.transports.OpenAIChat` would send: calls and results in pairs, and
    images of results or of the model in a user message after them. Reasoning, items of a provider,
    custom messages and answers that were cut off by a failure are omitted. Raises
    `clark_agent.errors.TransportError` for a file that the API does not accept.
    """
    from clark_agent.transports.dialects import OPENAI
    from clark_agent.transports.http.reasoning_transfer import ReasoningTarget
    from clark_agent.transports.openai_chat import chat_messages

    return chat_messages(
        _request(messages, system_prompt), OPENAI, model="", target=ReasoningTarget()
    )


def to_anthropic_messages(messages: Iterable[AgentMessage]) -> list[dict[str, Any]]:
    """The conversation in the format of Anthropic's Messages: results in a user message, roles
    alternating.

    It is what `clark_agent.transports.Anthropic` would send, except that all system messages become
    user messages, in tags. Reasoning, items of a provider, custom messages and answers that were
    cut off by a failure are omitted. Raises `clark_agent.errors.TransportError` for a file that the
    API does not accept.
    """
    from clark_agent.transports.anthropic_messages import MessagesWriter
    from clark_agent.transports.http.reasoning_transfer import ReasoningTarget

    writer = MessagesWriter(frozenset())
    writer.write_all(_request(messages), ReasoningTarget(), "")
    written = writer.messages
    opening = [
        {"type": "text", "text": f"<system>\n{block['text']}\n</system>"} for block in writer.system
    ]
    if opening and written and written[0]["role"] == "user":
        written[0]["content"][:0] = opening
    elif opening:
        written.insert(0, {"role": "user", "content": opening})
    return written


def _request(messages: Iterable[AgentMessage], system_prompt: str = "") -> StreamRequest:
    return StreamRequest(system_prompt=system_prompt, messages=tuple(messages), tools=())


# --- for people -------------------------------------------------------------------------------


def to_markdown(
    messages: Iterable[AgentMessage], *, title: str = "Conversation", system_prompt: str = ""
) -> str:
    """The conversation as a page for people; thoughts and reasoning are quoted."""
    parts = [f"# {title}"]
    if system_prompt:
        parts += ["## System", system_prompt]
    for message in messages:
        parts += _page_of(message)
    return "\n\n".join(parts) + "\n"


def _page_of(message: AgentMessage) -> list[str]:
    match message:
        case SystemMessage():
            return ["## System", message.content]
        case UserMessage():
            blocks = message.content
            texts = [blocks] if isinstance(blocks, str) else [_shown(block) for block in blocks]
            return ["## User", *texts]
        case AssistantMessage():
            return ["## Assistant", *_blocks_of(message)]
        case ToolResultMessage():
            failed = ", failed" if message.is_error else ""
            text = "\n".join([_shown(block) for block in message.content])
            return [f"### Result of `{message.tool_name}`{failed}", _fenced(text, "")]
        case CustomMessage():
            payload = msgspec.json.format(msgspec.json.encode(message.payload), indent=2)
            return [f"### {message.kind}", _fenced(payload.decode(), "json")]
        case _:
            assert_never(message)


def _blocks_of(message: AssistantMessage) -> list[str]:
    parts: list[str] = []
    for block in message.content:
        match block:
            case TextContent():
                parts.append(block.text)
            case ThinkingContent() | ReasoningContent():
                parts.append("\n".join([f"> {line}" for line in block.text.splitlines()]))
            case ReasoningDetailsContent():
                pass
            case ImageContent():
                parts.append(_shown(block))
            case ProviderContent():
                data = msgspec.json.format(msgspec.json.encode(block.data), indent=2)
                parts += [f"Item of {block.provider}:", _fenced(data.decode(), "json")]
            case ToolCall():
                arguments = msgspec.json.format(msgspec.json.encode(block.arguments), indent=2)
                parts += [f"Calls `{block.name}`:", _fenced(arguments.decode(), "json")]
            case _:
                assert_never(block)
    sources = [note for note in message.annotations if note.url or note.title]
    return [*parts, *dict.fromkeys([_source(note) for note in sources])]


def _source(note: Annotation) -> str:
    return (
        f"Source: [{note.title or note.url}]({note.url})" if note.url else f"Source: {note.title}"
    )


def _shown(block: UserBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    source = block.source if not block.source.startswith("data:") else "embedded"
    if isinstance(block, FileContent):
        return f"[{block.name or 'file'}]({source})"
    return f"![{block.alt or 'image'}]({source})"


def _fenced(text: str, language: str) -> str:
    """A code block, with a fence longer than any in the text."""
    longest = max([len(run) for run in _runs(text)], default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _runs(text: str) -> list[str]:
    return [run for line in text.splitlines() if (run := line.strip()[: _ticks(line.strip())])]


def _ticks(line: str) -> int:
    return len(line) - len(line.lstrip("`"))
