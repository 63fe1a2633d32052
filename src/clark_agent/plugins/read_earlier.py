"""read_earlier: a tool with which a model reads turns again that its requests no longer have."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from msgspec.structs import replace

from clark_agent.plugins._compacted import mark_of, turns_of
from clark_agent.plugins._turn_text import text_of
from clark_agent.tools import AgentTool, ToolContext, ToolHistoryPolicy, ToolResult
from clark_agent.types import AgentMessage, AssistantMessage, ToolCall, ToolResultMessage

__all__ = ["READ_EARLIER", "ReadEarlier"]

_PAGE = 8_000
"""How many characters a result has at most, about."""
_FOUND = 20
"""How many turns a search shows."""
_AROUND = 120
"""How many characters it shows on both sides of the words."""
_ECHOED = 200
"""How many characters of the words are repeated if nothing was found."""

_RANGE = r"\s*(\d{1,18})\s*(?:(?:-|–|to)\s*(\d{1,18})\s*)?"

_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "words": {"type": "string", "description": "Words that must all occur in a message."},
        "turns": {"type": "string", "description": "A turn or a range of turns: 12, 12-15."},
        "page": {"type": "integer", "minimum": 1, "default": 1},
    },
    "additionalProperties": False,
}


class ReadEarlier(AgentTool):
    """Searches the transcript of the run, with its history, and reads turns of it, page by page.

    A turn is one answer of the model with the results of its calls. Turn 0 is what comes before the
    first answer. Turns are counted over the whole conversation.
    """

    name = "read_earlier"
    description = (
        "Read earlier turns of this conversation again, word for word, also those that were "
        "replaced by a summary or left out. Give `words` to find the turns in which they occur, or "
        "`turns` (such as 12 or 12-15) to read these; a long text has several pages."
    )
    parameters_schema = _PARAMETERS
    reads_only = True
    idempotent = True
    history_policy = ToolHistoryPolicy(compactable_result=True)

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        """Search, or read."""
        words, turns = str(args.get("words") or ""), args.get("turns")
        messages = ctx.messages
        if words.strip():
            return ToolResult.text(found(before_call(messages, ctx.tool_call_id), words))
        asked = re.fullmatch(_RANGE, "" if turns is None else str(turns))
        if asked is None:
            return ToolResult.error("Give words to search for, or turns such as 12 or 12-15.")
        first = int(asked[1])
        last = first if asked[2] is None else int(asked[2])
        page = args.get("page")
        try:
            return read(messages, first, last, 1 if page is None else int(page))
        except (ValueError, OverflowError):
            return ToolResult.error("The page is not a number, or too large.")


def before_call(messages: Sequence[AgentMessage], call_id: str) -> Sequence[AgentMessage]:
    """The messages before the answer that made this call."""
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if isinstance(message, AssistantMessage):
            is_own = any(call.id == call_id for call in message.tool_calls)
            return messages[:index] if is_own else messages
    return messages


def numbered(messages: Sequence[AgentMessage]) -> list[range]:
    """The messages of each turn. Turn 0 is what comes before the first answer."""
    turns = list(turns_of(messages, 0, len(messages)))
    if turns and isinstance(messages[0], AssistantMessage):
        turns.insert(0, range(0))
    return turns


def found(messages: Sequence[AgentMessage], words: str) -> str:
    """The turns with a message that has all the words, newest first. Calls of this tool, which have
    the words too, and their results do not count.
    """
    wanted = [word.lower() for word in words.split()]
    turns = numbered(messages)
    lines: list[str] = []
    count = 0
    for number in range(len(turns) - 1, -1, -1):
        shown = [line for n in turns[number] if (line := _excerpt(messages[n], wanted))]
        count += bool(shown)
        if shown and count <= _FOUND:
            lines += [f"turn {number}: {line}" for line in shown]
    if not lines:
        return f"No message has all of these words: {_shortened(' '.join(wanted))}."
    more = [f"… and {count - _FOUND} more turns. Use other words."] if count > _FOUND else []
    return _clipped("\n".join([*lines, *more]))


def _excerpt(message: AgentMessage, wanted: Sequence[str]) -> str:
    if mark_of(message) is not None or _is_own(message):
        return ""
    if isinstance(message, AssistantMessage):
        message = replace(message, content=tuple([b for b in message.content if not _is_own(b)]))
    text = " ".join(text_of(message).split())
    lower = text.lower()
    if not lower or not all(word in lower for word in wanted):
        return ""
    place = _place(text, lower, lower.index(wanted[0]))
    start, end = max(0, place - _AROUND), place + len(wanted[0]) + _AROUND
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def _is_own(item: object) -> bool:
    """Whether it is a call of this tool, or the result of one."""
    if isinstance(item, ToolCall):
        return item.name == ReadEarlier.name
    return isinstance(item, ToolResultMessage) and item.tool_name == ReadEarlier.name


def _place(text: str, lower: str, at: int) -> int:
    """Where a character of the text in lower case is in the text: some become several."""
    if len(lower) == len(text):
        return at
    return bisect_right(list(accumulate([len(character.lower()) for character in text])), at)


def _shortened(text: str) -> str:
    return text if len(text) <= _ECHOED else f"{text[:_ECHOED]}…"


def _clipped(text: str) -> str:
    return text if len(text) <= _PAGE else f"{text[:_PAGE]}\n… Use other words."


def read(messages: Sequence[AgentMessage], first: int, last: int, page: int) -> ToolResult:
    """A page of the turns."""
    turns = numbered(messages)
    if first >= len(turns) or last < first:
        return ToolResult.error(f"There are the turns 0 to {len(turns) - 1}, not {first}-{last}.")
    shown = range(first, min(last, len(turns) - 1) + 1)
    texts = [
        f"--- turn {number} ---\n\n"
        + "\n\n".join([text for n in turns[number] if (text := text_of(messages[n]))])
        for number in shown
    ]
    text = "\n\n".join(texts)
    pages = max(1, -(-len(text) // _PAGE))
    if not 1 <= page <= pages:
        return ToolResult.error(f"There are the pages 1 to {pages}, not {page}.")
    part = text[(page - 1) * _PAGE : page * _PAGE]
    return ToolResult.text(part if pages == 1 else f"{part}\n\n[page {page} of {pages}]")


READ_EARLIER = ReadEarlier()
"""The tool. It keeps nothing, so all runs share it."""
