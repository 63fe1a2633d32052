"""The parts of items: texts, blocks and messages, as the page shows them.

Long texts are cut. Their address in the log goes with them: the number of the record, and a path in
its entry. `part_at` finds what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from clark_agent.messages.wire import encode_json
from clark_agent.plugins.compaction import Mark, mark_of
from clark_agent.tools.base import ToolResult
from clark_agent.tools.kept import KeptResult
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
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    detect_arg_parse_error,
)
from clark_agent.view import items
from clark_agent.view.items import Block, MessageView, Text, Tokens
from clark_agent.waiting import WaitingRequest

__all__ = [
    "IMAGE_TYPES",
    "KEPT",
    "Parts",
    "json_text",
    "one_line",
    "part_at",
    "source_of",
    "tokens_of",
]

_CUT = 4000
"""How many characters of a text are shown."""
KEPT = "kept"
"""The path of the text of a result that is kept aside."""
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""The images that a page shows. Others, such as SVG, may contain programs."""
_Content: TypeAlias = (
    TextContent
    | ThinkingContent
    | ReasoningContent
    | ReasoningDetailsContent
    | ToolCall
    | ImageContent
    | FileContent
    | ProviderContent
)


def tokens_of(usage: Usage) -> Tokens:
    """Return token counts as the page gets them."""
    return Tokens(
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_input_tokens,
        usage.cache_creation_input_tokens,
    )


def json_text(value: Any) -> str:
    """Return a value as indented JSON."""
    try:
        return msgspec.json.format(encode_json(value), indent=2).decode()
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def one_line(text: str, most: int) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 1] + "…"


def part_at(value: Any, path: str) -> Any:
    """Return what is at a path in an entry, or in anything that is JSON; all of it for an empty
    path. Raises `LookupError`.
    """
    found = msgspec.to_builtins(value)
    for step in path.split(".") if path else ():
        if isinstance(found, (list, tuple)):
            if not step.isdecimal() or int(step) >= len(found):
                raise LookupError(path)
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            raise LookupError(path)
    return found


class Parts:
    """Makes the parts of items: texts, blocks, messages."""

    def __init__(
        self,
        most: int | None = _CUT,
        *,
        inline: bool = False,
        read_kept: Callable[[str, int], str] | None = None,
    ) -> None:
        """Create it: texts are cut after ``most`` characters; ``inline`` puts images into the
        items. ``read_kept`` returns the beginning of a result that is kept aside, by its name and
        up to a number of characters, to have it in the items.
        """
        self._most = most
        self._inline = inline
        self._read_kept = read_kept

    def text(self, text: str, at: int | None, path: str) -> Text:
        """A text, or its beginning."""
        if self._most is None or len(text) <= self._most:
            return Text(text, len(text))
        return Text(text[: self._most], len(text), at, None if at is None else path)

    def json(self, value: Any, at: int | None, path: str) -> Text:
        """A value as JSON, or the beginning of that."""
        return self.text(json_text(value), at, path)

    def message(self, message: AgentMessage, index: int, at: int | None, path: str) -> MessageView:
        """A message of a transcript."""
        view = MessageView(index, message.role, (), message.timestamp)
        match message:
            case ToolResultMessage():
                return replace(
                    view,
                    blocks=self.blocks(message.content, at, f"{path}.content"),
                    call_id=message.tool_call_id,
                    name=message.tool_name,
                    is_error=message.is_error,
                )
            case CustomMessage() if (mark := mark_of(message)) is not None:
                compaction = self._compaction(mark, at, f"{path}.payload.text")
                return replace(view, blocks=(compaction,), name=message.kind)
            case CustomMessage():
                data = self.json(message.payload, at, f"{path}.payload")
                block = items.OtherBlock(message.kind, data)
                return replace(view, blocks=(block,), name=message.kind)
            case AssistantMessage():
                is_error = message.error_message is not None
                blocks = self.blocks(message.content, at, f"{path}.content")
                return replace(view, blocks=blocks, is_error=is_error)
            case _ if isinstance(message.content, str):
                text = self.text(message.content, at, f"{path}.content")
                return replace(view, blocks=(items.TextBlock("text", text),))
            case _:
                return replace(view, blocks=self.blocks(message.content, at, f"{path}.content"))

    def messages(
        self, messages: Iterable[AgentMessage], at: int | None, path: str, first: int = 0
    ) -> tuple[MessageView, ...]:
        """Messages in a list."""
        return tuple(
            [self.message(m, first + n, at, f"{path}.{n}") for n, m in enumerate(messages)]
        )

    def blocks(self, content: Iterable[_Content], at: int | None, path: str) -> tuple[Block, ...]:
        """The blocks of a message."""
        found: list[Block] = []
        position = 0
        for number, block in enumerate(content):
            found.append(self._block(block, position, at, f"{path}.{number}"))
            position += isinstance(block, ToolCall)
        return tuple(found)

    def _block(self, block: _Content, position: int, at: int | None, path: str) -> Block:
        match block:
            case TextContent(text):
                return items.TextBlock("text", self.text(text, at, f"{path}.text"))
            case ThinkingContent(text):
                return items.TextBlock("thinking", self.text(text, at, f"{path}.text"))
            case ReasoningContent(text):
                return items.TextBlock("reasoning", self.text(text, at, f"{path}.text"))
            case ReasoningDetailsContent(details):
                data = self.json(details, at, f"{path}.details")
                return items.OtherBlock("reasoning_details", data)
            case ProviderContent(provider, data):
                return items.OtherBlock(provider, self.json(data, at, f"{path}.data"))
            case ToolCall():
                return self._call(block, position, at, path)
            case ImageContent():
                return self._image(block, at, path)
            case FileContent(source, media_type, name):
                is_here = source.startswith("data:")
                size = (len(source) - source.find(",") - 1) * 3 // 4 if is_here else None
                url = None if is_here else source[:_CUT]
                return items.FileBlock(name, media_type, size, url)

    def _call(self, call: ToolCall, position: int, at: int | None, path: str) -> items.CallBlock:
        wrong = detect_arg_parse_error(call.arguments)
        if wrong is not None:
            raw = self.text(wrong[1], at, f"{path}.arguments.__clark_arg_raw")
            summary = one_line(wrong[1], 120)
            return items.CallBlock(position, call.id, call.name, raw, False, summary)
        arguments = self.json(call.arguments, at, f"{path}.arguments")
        summary = _summary(call.arguments)
        return items.CallBlock(position, call.id, call.name, arguments, True, summary)

    def _image(self, image: ImageContent, at: int | None, path: str) -> items.ImageBlock:
        kind, alt, source = image.media_type, image.alt, image.source
        if not source.startswith("data:"):
            return items.ImageBlock(kind, alt, None, None, None, source[:_CUT])
        declared = source[5:100].partition(",")[0].partition(";")[0].lower()
        if declared not in IMAGE_TYPES:
            return items.ImageBlock(kind or declared, alt, None, None, None, None)
        if self._inline:
            return items.ImageBlock(declared, alt, None, None, source, None)
        return items.ImageBlock(declared, alt, at, f"{path}.source", None, None)

    def _compaction(self, mark: Mark, at: int | None, path: str) -> items.CompactionBlock:
        return items.CompactionBlock(
            first_turn=mark.first_turn,
            last_turn=mark.last_turn,
            messages=mark.messages,
            tokens_before=mark.tokens_before,
            tokens_after=mark.tokens_after,
            has_summary=mark.has_summary,
            merges=mark.merges,
            text=self.text(mark.text, at, path),
        )

    # --- results and requests -------------------------------------------------------------------

    def result(self, result: ToolResult, at: int, path: str) -> items.Result:
        """The result of a call."""
        details: Any = result.details
        diff = details.get("diff") if isinstance(details, dict) else None
        return items.Result(
            blocks=self.blocks(result.content, at, f"{path}.content"),
            is_error=result.is_error,
            narration=result.narration,
            diff=self.text(diff, at, f"{path}.details.diff") if isinstance(diff, str) else None,
            details=None if details is None else self.json(details, at, f"{path}.details"),
            terminate=result.terminate,
        )

    def kept(self, kept: KeptResult, at: int) -> items.Kept:
        """What is kept aside of a result."""
        if not kept.texts:
            return items.Kept(None, len(kept.data))
        text = ""
        if self._read_kept is not None and self._most is not None:
            text = self._read_kept(kept.name, self._most)
        return items.Kept(Text(text, sum(kept.texts), at, KEPT), len(kept.data))

    def decisions(
        self, decisions: Iterable[dict[str, Any]], at: int
    ) -> tuple[items.HookDecision, ...]:
        """What plugins decided."""
        return tuple([self._decision(each, at, n) for n, each in enumerate(decisions)])

    def _decision(self, given: dict[str, Any], at: int, number: int) -> items.HookDecision:
        more = {name: value for name, value in given.items() if name not in ("plugin", "decision")}
        data = self.json(more, at, f"decisions.{number}") if more else None
        return items.HookDecision(str(given.get("plugin")), str(given.get("decision")), data)

    def waiting(self, request: WaitingRequest, at: int | None = None) -> items.Waiting:
        """A request that waits; ``at`` is the record that says so."""
        asked = request.request
        text = None if asked is None else self.readable(asked, at, "request.request")
        return items.Waiting(
            request_id=request.request_id,
            run_id=request.run_id,
            root_run_id=request.root_run_id,
            turn=request.turn,
            position=request.position,
            call_id=request.tool_call_id,
            tool_name=request.tool_name,
            arguments=self.json(request.arguments, at, "request.arguments"),
            asked_by=request.asked_by,
            needs=request.needs,
            request=text,
            assignee=request.assignee,
            asked_at=request.asked_at,
            expires_at=request.expires_at,
            until=request.until,
            event=request.event,
        )

    def readable(self, value: Any, at: int | None, path: str) -> Text:
        """A value as text, if it is one, or as JSON."""
        is_text = isinstance(value, str)
        return self.text(value, at, path) if is_text else self.json(value, at, path)


def _summary(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        return one_line(_short(arguments), 120)
    return one_line(", ".join([f"{key}={_short(value)}" for key, value in arguments.items()]), 120)


def _short(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:59] + "…")
    return one_line(encode_json(value).decode(), 60)


def source_of(annotation: Annotation) -> items.Source:
    """Return what an answer quotes, as the page gets it."""
    url = None if annotation.url is None else annotation.url[:_CUT]
    title = None if annotation.title is None else annotation.title[:500]
    quote = None if annotation.quote is None else annotation.quote[:_CUT]
    return items.Source(annotation.kind, title, url, quote)
