"""A conversation in the forms that others read: OpenAI's and Anthropic's messages, and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, assert_never

import msgspec

from clark_agent.history import repair_history
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
    ToolResultBlock,
    ToolResultMessage,
    UserBlock,
    UserMessage,
)

__all__ = ["to_anthropic_messages", "to_markdown", "to_openai_messages"]


def _sound(messages: Iterable[AgentMessage]) -> Sequence[AgentMessage]:
    return repair_history([m for m in messages if not isinstance(m, CustomMessage)]).messages


def _arguments(call: ToolCall) -> dict[str, Any]:
    return call.arguments if isinstance(call.arguments, dict) else {"value": call.arguments}


def to_openai_messages(
    messages: Iterable[AgentMessage], system_prompt: str = ""
) -> list[dict[str, Any]]:
    """The conversation as Chat Completions takes it. Reasoning, items of a provider and custom
    messages are left out; a word stands for a picture that the model made.
    """
    written: list[dict[str, Any]] = []
    if system_prompt:
        written.append({"role": "system", "content": system_prompt})
    for message in _sound(messages):
        match message:
            case SystemMessage():
                written.append({"role": "system", "content": message.content})
            case UserMessage():
                written.append({"role": "user", "content": _openai_content(message)})
            case AssistantMessage():
                written.append(_openai_assistant(message))
            case ToolResultMessage():
                result = {"role": "tool", "tool_call_id": message.tool_call_id}
                written.append({**result, "content": message.plain_text})
            case CustomMessage():
                pass
            case _:
                assert_never(message)
    return written


def _openai_content(message: UserMessage) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    return [_openai_part(block) for block in message.content]


def _openai_part(block: UserBlock) -> dict[str, Any]:
    match block:
        case TextContent():
            return {"type": "text", "text": block.text}
        case ImageContent():
            return {"type": "image_url", "image_url": {"url": block.source}}
        case FileContent():
            named = {"filename": block.name} if block.name else {}
            return {"type": "file", "file": {**named, "file_data": block.source}}
        case _:
            assert_never(block)


def _openai_assistant(message: AssistantMessage) -> dict[str, Any]:
    text = _text_and_pictures(message)
    written: dict[str, Any] = {"role": "assistant", "content": text}
    if message.tool_calls:
        written["content"] = text or None
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": msgspec.json.encode(_arguments(call)).decode(),
                },
            }
            for call in message.tool_calls
        ]
    return written


def to_anthropic_messages(messages: Iterable[AgentMessage]) -> list[dict[str, Any]]:
    """The conversation as Anthropic's Messages takes it: results in a user's message, roles by
    turns.

    System messages become a user's, in tags; reasoning, items of a provider and custom messages are
    left out; a word stands for a picture that the model made.
    """
    written: list[dict[str, Any]] = []
    for message in _sound(messages):
        match message:
            case SystemMessage():
                text = f"<system>\n{message.content}\n</system>"
                _add(written, "user", [{"type": "text", "text": text}])
            case UserMessage():
                content = message.content
                blocks = (TextContent(content),) if isinstance(content, str) else content
                _add(written, "user", _anthropic_blocks(blocks))
            case AssistantMessage():
                _add(written, "assistant", _anthropic_assistant(message))
            case ToolResultMessage():
                result: dict[str, Any] = {
                    "type": "tool_result",
                    "tool_use_id": message.tool_call_id,
                    "content": _anthropic_blocks(message.content),
                }
                if message.is_error:
                    result["is_error"] = True
                _add(written, "user", [result])
            case CustomMessage():
                pass
            case _:
                assert_never(message)
    return written


def _add(written: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]]) -> None:
    if not blocks:
        return
    if written and written[-1]["role"] == role:
        written[-1]["content"] += blocks
    else:
        written.append({"role": role, "content": blocks})


def _anthropic_blocks(blocks: Iterable[ToolResultBlock]) -> list[dict[str, Any]]:
    """The blocks, without those that the API refuses: texts with nothing in them."""
    return [
        _anthropic_block(block)
        for block in blocks
        if not isinstance(block, TextContent) or block.text.strip()
    ]


def _anthropic_block(block: ToolResultBlock) -> dict[str, Any]:
    if isinstance(block, TextContent):
        return {"type": "text", "text": block.text}
    kind = "document" if isinstance(block, FileContent) else "image"
    if block.source.startswith("data:"):
        head, _, data = block.source.partition(",")
        media_type = head.removeprefix("data:").partition(";")[0] or block.media_type
        source = {"type": "base64", "media_type": media_type, "data": data}
    else:
        source = {"type": "url", "url": block.source}
    return {"type": kind, "source": source}


def _text_and_pictures(message: AssistantMessage) -> str:
    """What the model said, with a word for each picture that it made."""
    blocks = [b for b in message.content if isinstance(b, (TextContent, ImageContent))]
    return "".join([b.text if isinstance(b, TextContent) else _placeholder(b) for b in blocks])


def _placeholder(image: ImageContent) -> str:
    return f"[image: {image.alt}]" if image.alt else "[image]"


def _anthropic_assistant(message: AssistantMessage) -> list[dict[str, Any]]:
    text = _text_and_pictures(message)
    said = [{"type": "text", "text": text}] if text.strip() else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(call)}
        for call in message.tool_calls
    ]
    return [*said, *calls]


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
            return ["## Assistant", *_said(message)]
        case ToolResultMessage():
            failed = ", failed" if message.is_error else ""
            text = "\n".join([_shown(block) for block in message.content])
            return [f"### Result of `{message.tool_name}`{failed}", _fenced(text, "")]
        case CustomMessage():
            payload = msgspec.json.format(msgspec.json.encode(message.payload), indent=2)
            return [f"### {message.kind}", _fenced(payload.decode(), "json")]
        case _:
            assert_never(message)


def _said(message: AssistantMessage) -> list[str]:
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
