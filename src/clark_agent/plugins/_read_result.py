"""read_result: the tool with which a model reads and searches results that were kept aside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

from clark_agent._kept_text import Found, KeptDamaged, KeptText, OpenKept
from clark_agent._untrusted import mark_untrusted
from clark_agent.errors import ModelRetry, ToolValidationError
from clark_agent.tools.base import AgentTool, ToolContext, ToolResult
from clark_agent.tools.repair import repair_arguments

__all__ = ["ReadResult", "read_result_tool"]

_PLACES = 20
_AROUND = 80
_LONGEST_WORDS = 200
_SEARCH_SECONDS = 5.0

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

    def validate(self, args: Any) -> Any:
        """Return the arguments, repaired, or raise `ToolValidationError`."""
        args = repair_arguments(args, _PARAMETERS)
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
        return args

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        """Read in a thread: a store may have to wait for a network."""
        opened, page = ctx.find_kept(args["id"])

        def answer() -> str:
            return _answer(args, opened, page, lambda: ctx.signal.cancelled)

        return ToolResult.text(await asyncio.to_thread(answer))


@cache
def read_result_tool(name: str) -> ReadResult:
    """The tool of this name. All configs share it: it finds its settings through its context."""
    return ReadResult(name)


_KINDS: dict[str, type] = {"id": str, "start": int, "end": int, "lines": bool, "search": str}
_NAMES = {str: "a text", int: "a whole number", bool: "true or false"}


def _answer(args: Any, opened: OpenKept, page: int, is_cancelled: Callable[[], bool]) -> str:
    try:
        return _part_or_places(args, opened(), page, is_cancelled)
    except LookupError:
        problem = "is not kept any more"
    except KeptDamaged as error:
        problem = f"cannot be read: {error}"
    raise ModelRetry(f"the result {args['id']} {problem}; call its tool again")


def _part_or_places(args: Any, text: KeptText, page: int, is_cancelled: Callable[[], bool]) -> str:
    in_lines = bool(args.get("lines"))
    first, last = args.get("start"), args.get("end")
    start = 0 if first is None else text.start_of(first) if in_lines else first
    stop = text.characters
    if last is not None:
        stop = text.start_of(last + 1) if in_lines else min(last, stop)
    if start >= text.characters or stop <= start:
        unit = "line" if in_lines else "character"
        raise ModelRetry(
            f"there is nothing from {unit} {first or 0:,} to "
            f"{'the end' if last is None else f'{last:,}'}: the "
            f"result has {text.characters:,} characters and {text.lines:,} lines"
        )
    if args.get("search") is None:
        return _page(text, start, stop, page, in_lines=in_lines)
    return _places(text, args["search"], start, stop, page, is_cancelled, in_lines=in_lines)


def _page(text: KeptText, start: int, wanted: int, page: int, *, in_lines: bool) -> str:
    stop = min(wanted, start + page)
    if in_lines and stop < wanted:  # whole lines, unless one is longer than a page
        begin = text.start_of(text.line_at(stop))
        stop = begin if begin > start else stop
    lines = f"lines {text.line_at(start):,} to {text.line_at(stop - 1):,} of {text.lines:,}"
    more = "" if stop >= text.characters else f" Next: {_start(text, stop, in_lines=in_lines)}."
    if stop < wanted:
        more = f" This is as much as fits.{more}"
    part = text.part(start, stop)
    shown = mark_untrusted(part) if text.is_untrusted else part
    of = f"Characters {start:,} to {stop:,} of {text.characters:,} ({lines})."
    return f"{of}{more}\n{shown}"


def _start(text: KeptText, at: int, *, in_lines: bool) -> str:
    """How to go on from a character, in the unit that was asked for if that is possible."""
    if not in_lines:
        return f"start={at}"
    line = text.line_at(at)
    return f"start={line}" if text.start_of(line) == at else f"start={at}, lines=false"


def _places(
    text: KeptText,
    words: str,
    start: int,
    stop: int,
    page: int,
    is_cancelled: Callable[[], bool],
    *,
    in_lines: bool,
) -> str:
    most = max(1, min(_PLACES, page // (2 * _AROUND + len(words) + 60)))
    until = time.monotonic() + _SEARCH_SECONDS

    def ends() -> bool:
        return text.searched >= stop or time.monotonic() >= until or is_cancelled()

    found = [*islice(text.find(words, start, around=_AROUND, is_cancelled=ends), most + 1)]
    places = [place for place in found if place.start < stop]
    more, searched = "", stop if len(found) > len(places) else min(text.searched, stop)
    if len(places) > most:
        at = places[most].start
        begin = text.start_of(places[most].line)
        del places[most:]
        if in_lines and begin > places[-1].start:
            at = begin
        more = f" There are more: {_start(text, at, in_lines=in_lines)}."
    elif searched < stop:
        following = _start(text, searched, in_lines=in_lines)
        more = f" The search took too long, and ended at character {searched:,}. Next: {following}."
    if not places:
        return f"Not found from character {start:,} to {searched:,}, whatever the case.{more}"
    listed = "\n".join([_line(place) for place in places])
    shown = mark_untrusted(listed) if text.is_untrusted else listed
    count = "1 place" if len(places) == 1 else f"{len(places)} places"
    return f"{count} from character {start:,} on.{more}\n{shown}"


def _line(place: Found) -> str:
    excerpt = " ".join(place.excerpt.split())
    return f"character {place.start} (line {place.line}): …{excerpt}…"
