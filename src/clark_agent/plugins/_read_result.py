"""read_result: the tool with which a model reads and searches results that were kept aside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

from clark_agent._kept_text import Found, KeptText, ReadPieces
from clark_agent._untrusted import mark_untrusted
from clark_agent.errors import ModelRetry, ToolValidationError
from clark_agent.tools.base import AgentTool, ToolContext, ToolResult

__all__ = ["ReadResult", "read_result_tool"]

_PLACES = 20
_AROUND = 80
_LONGEST_WORDS = 200

_PARAMETERS = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "The id in the shortened result."},
        "start": {"type": "integer", "description": "First character (from 0), or first line."},
        "end": {"type": "integer", "description": "Where to stop. Default: as far as a page goes."},
        "lines": {"type": "boolean", "description": "start and end are lines, counted from 1."},
        "search": {"type": "string", "description": "List places with this text, from start on."},
    },
    "required": ["id"],
    "additionalProperties": False,
}


class ReadResult(AgentTool):
    """Reads a part of a result that was too large, or searches it. Use `read_result_tool`."""

    description = "Reads or searches a tool result that was too large to be shown as a whole."
    parameters_schema = _PARAMETERS
    reads_only = True
    idempotent = True

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__()

    def validate(self, args: Any) -> None:
        """Check the arguments."""
        known: dict[str, Any] = _PARAMETERS["properties"]  # type: ignore[assignment]
        if not isinstance(args, dict) or not isinstance(args.get("id"), str):
            raise ToolValidationError("give the id of the result, as a text")
        for name, value in args.items():
            if name not in known:
                raise ToolValidationError(f"there is no parameter {name!r}; use {', '.join(known)}")
            kind = _KINDS[name]
            if value is not None and (
                not isinstance(value, kind) or (kind is int and isinstance(value, bool))
            ):
                raise ToolValidationError(f"{name} must be {_NAMES[kind]}, not {value!r}")
        words = args.get("search")
        if words is not None and not 0 < len(words) <= _LONGEST_WORDS:
            raise ToolValidationError(f"search must have 1 to {_LONGEST_WORDS} characters")
        for name in ("start", "end"):
            if (args.get(name) or 0) < 0:
                raise ToolValidationError(f"{name} must not be negative")

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        """Read in a thread: a store may have to wait for a network."""
        read, page = ctx.find_kept(args["id"])

        def answer() -> str:
            return _answer(args, read, page, lambda: ctx.signal.cancelled)

        return ToolResult.text(await asyncio.to_thread(answer))


@cache
def read_result_tool(name: str) -> ReadResult:
    """The tool of this name. All configs share it: it finds its settings through its context."""
    return ReadResult(name)


_KINDS: dict[str, type] = {"id": str, "start": int, "end": int, "lines": bool, "search": str}
_NAMES = {str: "a text", int: "a whole number", bool: "true or false"}


def _answer(args: Any, read: ReadPieces, page: int, is_cancelled: Callable[[], bool]) -> str:
    try:
        text = KeptText(read)
    except LookupError:
        raise ModelRetry(
            f"the result {args['id']} is not kept any more; call its tool again"
        ) from None
    is_in_lines = bool(args.get("lines"))
    first, last = args.get("start"), args.get("end")
    start = 0 if first is None else text.start_of(first) if is_in_lines else first
    stop = text.characters
    if last is not None:
        stop = text.start_of(last + 1) if is_in_lines else min(last, stop)
    if start >= text.characters or stop <= start:
        raise ModelRetry(
            f"there is nothing from {first or 0:,} to {'the end' if last is None else last}: the "
            f"result has {text.characters:,} characters and {text.lines:,} lines"
        )
    if args.get("search") is not None:
        return _places(text, args["search"], start, stop, page, is_cancelled)
    return _page(text, start, min(stop, start + page), stop)


def _page(text: KeptText, start: int, stop: int, wanted: int) -> str:
    lines = f"lines {text.line_at(start):,} to {text.line_at(stop - 1):,} of {text.lines:,}"
    more = "" if stop >= text.characters else f" Next: start={stop}."
    if stop < wanted:
        more = f" This is as much as fits.{more}"
    part = text.part(start, stop)
    shown = mark_untrusted(part) if text.is_untrusted else part
    of = f"Characters {start:,} to {stop:,} of {text.characters:,} ({lines})."
    return f"{of}{more}\n{shown}"


def _places(
    text: KeptText,
    words: str,
    start: int,
    stop: int,
    page: int,
    is_cancelled: Callable[[], bool],
) -> str:
    most = max(1, min(_PLACES, page // (2 * _AROUND + len(words) + 60)))
    found = text.find(words, start, around=_AROUND, is_cancelled=is_cancelled)
    places = [place for place in islice(found, most + 1) if place.start < stop]
    if not places:
        return f"Not found from character {start:,} to {stop:,}, whatever the case."
    more = ""
    if len(places) > most:
        more = f" There are more: start={places[most].start}."
        del places[most:]
    listed = "\n".join([_line(place) for place in places])
    shown = mark_untrusted(listed) if text.is_untrusted else listed
    count = "1 place" if len(places) == 1 else f"{len(places)} places"
    return f"{count} from character {start:,} on.{more}\n{shown}"


def _line(place: Found) -> str:
    excerpt = " ".join(place.excerpt.split())
    return f"character {place.start} (line {place.line}): …{excerpt}…"
