"""Two runs side by side."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.run_log.diff import Difference, first_difference
from clark_agent.run_log.fold import fold
from clark_agent.run_log.store import LoadedRun, RunStore
from clark_agent.types import AgentMessage, AssistantMessage, ToolCall, ToolResultMessage
from clark_agent.view.parts import Parts, one_line
from clark_agent.view.shapes import DifferenceView, DiffRow, DiffView, RunRow

__all__ = ["Compared", "compare", "diff_view", "difference_view"]

_BEFORE = 2
"""How many common messages are shown before the first difference."""


class Compared(Struct, frozen=True):
    """Two transcripts, and where they part."""

    a: tuple[AgentMessage, ...]
    b: tuple[AgentMessage, ...]
    common: int
    difference: Difference | None


def compare(store: RunStore, a: str, b: str) -> Compared:
    """Compare two runs: their records, and their transcripts with the history that they began with.

    Raises `RunNotFound`, and `LogDamaged` or `DecodeError`.
    """
    first, second = store.load(a), store.load(b)
    left, right = _transcript(first), _transcript(second)
    pairs = zip(left, right, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: _is_same(*pair), pairs))
    difference = first_difference(first.records, second.records, of_one_run=False)
    return Compared(left, right, common, difference)


def _transcript(loaded: LoadedRun) -> tuple[AgentMessage, ...]:
    folded = fold(loaded)
    return (*folded.began.history, *folded.messages)


def _is_same(a: AgentMessage, b: AgentMessage) -> bool:
    return a is b or _plain(a) == _plain(b)


def _plain(message: AgentMessage) -> AgentMessage:
    """The message without what differs from run to run: times, ids of calls, and usage."""
    match message:
        case AssistantMessage(content=content):
            blocks = [replace(b, id="") if isinstance(b, ToolCall) else b for b in content]
            return replace(message, timestamp=None, usage=None, content=tuple(blocks))
        case ToolResultMessage():
            return replace(message, timestamp=None, tool_call_id="")
        case _:
            return replace(message, timestamp=None)


def diff_view(compared: Compared, a: RunRow, b: RunRow, start: int | None, limit: int) -> DiffView:
    """Return a page of the comparison."""
    longest = max(len(compared.a), len(compared.b))
    start = max(0, compared.common - _BEFORE) if start is None else start
    rows = [_row(compared, index) for index in range(start, min(longest, start + limit))]
    return DiffView(
        a=a,
        b=b,
        difference=difference_view(compared.difference),
        common=compared.common,
        a_total=len(compared.a),
        b_total=len(compared.b),
        rows=tuple(rows),
        next=start + limit if start + limit < longest else None,
    )


def _row(compared: Compared, index: int) -> DiffRow:
    parts = Parts()
    views = [
        parts.message(side[index], index, 0, f"transcript.{index}") if index < len(side) else None
        for side in (compared.a, compared.b)
    ]
    is_same = index < min(len(compared.a), len(compared.b)) and _is_same(
        compared.a[index], compared.b[index]
    )
    return DiffRow(index, views[0], views[1], is_same)


def difference_view(found: Difference | None) -> DifferenceView | None:
    """Return a difference as the page gets it."""
    if found is None:
        return None
    parts = Parts()

    def shown(value: Any) -> Any:
        return replace(parts.readable(value, None, ""), path=None)

    return DifferenceView(
        seq=found.seq,
        turn=found.turn,
        kind=found.kind,
        path=found.path,
        first=shown(found.first),
        second=shown(found.second),
        text=one_line(str(found), 1000),
        run_id=found.run_id,
    )
