"""A run as HTML for a notebook: `RunResult` shows itself with it.

Plain elements that fold by themselves, because notebooks remove scripts and style sheets. All texts
are escaped, long ones are cut, and no image is loaded from elsewhere. It needs no extra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, assert_never

import msgspec

from clark_agent._text import well_formed
from clark_agent.result import RunResult
from clark_agent.types import (
    AgentMessage,
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
    Usage,
    UserBlock,
    UserMessage,
)

__all__ = ["result_html"]

_LONGEST_TEXT = 4_000
_LONGEST_IMAGE = 1_000_000
_MOST_MESSAGES = 200
_RASTER = re.compile(r"data:image/(?:png|jpeg|gif|webp|avif);base64,[A-Za-z0-9+/=\s]*")

_BOX = "border:1px solid rgba(128,128,128,.4);border-radius:8px;padding:.6em .9em;max-width:60em"
_SMALL = "font-size:.9em;opacity:.75"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;margin:.3em 0"
_CODE = f"{_TEXT};padding:.4em .6em;border-radius:6px;background:rgba(128,128,128,.12)"
_WRONG = "color:#c0392b;font-weight:600"


def result_html(result: RunResult[Any]) -> str:
    """Return the messages of a run, folded by calls, below a line about the run."""
    messages = result.messages
    parts = [f'<div class="clark-agent-run" style="{_BOX}">', _head(result)]
    left = len(messages) - _MOST_MESSAGES
    if left > 0:
        parts.append(_line(f"The first {left:,} messages are left out.", _SMALL))
        messages = messages[left:]
    results = {m.tool_call_id: m for m in messages if isinstance(m, ToolResultMessage)}
    shown: set[str] = set()
    for message in messages:
        parts += _message(message, results, shown)
    for request in result.waiting:
        parts.append(_line(f"⏸ {request.tool_name} waits: {request.needs}", _WRONG))
    parts.append("</div>")
    return "\n".join(parts)


def _head(result: RunResult[Any]) -> str:
    answers = [m for m in result.messages if isinstance(m, AssistantMessage)]
    facts = [
        f"{len(answers):,} {'answer' if len(answers) == 1 else 'answers'}",
        _tokens(result.tree_usage if result.tree_usage != Usage() else result.usage),
    ]
    if (cost := result.tree_cost) is not None:
        facts.append(f"${cost:,.4f}")
    outcome = escape(result.outcome.replace("_", " "))
    return f'<div><b>{outcome}</b> <span style="{_SMALL}">{escape(" · ".join(facts))}</span></div>'


def _tokens(usage: Usage) -> str:
    cached = usage.cache_read_input_tokens
    given = usage.input_tokens + cached + usage.cache_creation_input_tokens
    hint = f" ({cached:,} cached)" if cached else ""
    return f"{given:,} tokens in{hint}, {usage.output_tokens:,} out"


def _message(
    message: AgentMessage, results: Mapping[str, ToolResultMessage], shown: set[str]
) -> Iterator[str]:
    match message:
        case SystemMessage():
            yield _said("System", _text(message.content))
        case UserMessage():
            blocks = message.content
            given = (TextContent(blocks),) if isinstance(blocks, str) else blocks
            yield _said("User", "".join(_block(block) for block in given))
        case AssistantMessage():
            yield _said("Assistant", "".join(_answer(message, results, shown)))
        case ToolResultMessage():
            if message.tool_call_id not in shown:  # its call is not here
                yield _result(message)
        case CustomMessage():
            yield _fold(message.kind, _code(_json(message.payload)))
        case _:
            assert_never(message)


def _answer(
    message: AssistantMessage, results: Mapping[str, ToolResultMessage], shown: set[str]
) -> Iterator[str]:
    for block in message.content:
        match block:
            case TextContent():
                yield _text(block.text)
            case ThinkingContent() | ReasoningContent():
                yield _fold("Thinking", _text(block.text))
            case ReasoningDetailsContent():
                pass
            case ImageContent():
                yield _block(block)
            case ProviderContent():
                yield _fold(block.provider, _code(_json(block.data)))
            case ToolCall():
                shown.add(block.id)
                yield _call(block, results.get(block.id))
            case _:
                assert_never(block)
    if message.error_message:
        yield _line(message.error_message, _WRONG)


def _call(call: ToolCall, result: ToolResultMessage | None) -> str:
    sign = "…" if result is None else "✗" if result.is_error else "✓"
    style = _WRONG if result is not None and result.is_error else ""
    arguments = _json(call.arguments)
    summary = f'<span style="{style}">{sign}</span> <code>{_cut(call.name, 80)}</code> '
    summary += f'<span style="{_SMALL}">{_cut(" ".join(arguments.split()), 120)}</span>'
    body = _code(arguments) + ("" if result is None else _result(result))
    return f"<details><summary>{summary}</summary>{body}</details>"


def _result(result: ToolResultMessage) -> str:
    title = f"Error of {result.tool_name}" if result.is_error else f"Result of {result.tool_name}"
    body = "".join(_block(block, is_code=True) for block in result.content)
    return _line(title, _WRONG if result.is_error else _SMALL) + body


def _block(block: UserBlock, *, is_code: bool = False) -> str:
    match block:
        case TextContent():
            return _code(block.text) if is_code else _text(block.text)
        case ImageContent():
            source = block.source
            if len(source) <= _LONGEST_IMAGE and _RASTER.fullmatch(source):
                alt = _cut(block.alt or "image", 200)
                return f'<img src="{escape(source)}" alt="{alt}" style="max-width:100%">'
            return _line(f"[image: {block.alt or block.media_type or ''}]", _SMALL)
        case FileContent():
            return _line(f"[file: {block.name or block.media_type or ''}]", _SMALL)
        case _:
            assert_never(block)


def _said(who: str, body: str) -> str:
    return f'<div style="margin-top:.6em"><div style="{_SMALL}">{who}</div>{body}</div>'


def _fold(title: str, body: str) -> str:
    return f'<details><summary style="{_SMALL}">{_cut(title, 80)}</summary>{body}</details>'


def _line(text: str, style: str) -> str:
    return f'<div style="{style}">{_cut(text, 400)}</div>'


def _text(text: str) -> str:
    return f'<div style="{_TEXT}">{_cut(text, _LONGEST_TEXT)}</div>' if text.strip() else ""


def _code(text: str) -> str:
    return f'<pre style="{_CODE}">{_cut(text, _LONGEST_TEXT)}</pre>'


def _cut(text: str, most: int) -> str:
    """The text, escaped, and cut if it is long."""
    shown = escape(well_formed(text[:most]))
    left = len(text) - most
    return shown if left <= 0 else f"{shown}… ({left:,} more characters)"


def _json(value: object) -> str:
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    except (TypeError, ValueError, RecursionError):
        return repr(value)
