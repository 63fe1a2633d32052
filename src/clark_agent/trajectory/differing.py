"""Where two logs part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from clark_agent.run_log.log import encode_entry
from clark_agent.run_log.records import Record, RunResumed
from clark_agent.run_log.store import RunStore
from clark_agent.wire import encode_json

__all__ = ["Difference", "diff", "first_difference"]


class Difference(Struct, frozen=True):
    """The first place where two runs are not the same."""

    seq: int
    """The number of the record."""
    turn: int
    kind: str
    """What kind of record it is in the first run."""
    path: str
    """Where in it."""
    first: Any
    second: Any

    def __str__(self) -> str:
        where = f"in turn {self.turn}" if self.turn else "at the beginning"
        return (
            f"{where}, record {self.seq} ({self.kind}): {self.path or 'all of it'} was "
            f"{_shown(self.first)} and is {_shown(self.second)}"
        )


def diff(store: RunStore, first: str, second: str) -> Difference | None:
    """Where two runs part; None when they are the same but for times and names.

    Print it: it is a sentence.
    """
    mine, theirs = store.load(first).records, store.load(second).records
    return first_difference(mine, theirs, of_one_run=False)


def first_difference(
    first: Sequence[Record], second: Sequence[Record], *, of_one_run: bool = True
) -> Difference | None:
    """Where the entries of two logs part first; times and ids of the runs do not matter."""
    mine = [record for record in first if not isinstance(record.entry, RunResumed)]
    theirs = [record for record in second if not isinstance(record.entry, RunResumed)]
    turn = 0
    for index in range(max(len(mine), len(theirs))):
        left = mine[index] if index < len(mine) else None
        right = theirs[index] if index < len(theirs) else None
        if left is not None and right is not None and left.entry == right.entry:
            turn = getattr(left.entry, "turn", turn)
            continue
        known = left or right
        assert known is not None
        found = _difference(
            _plain(left, of_one_run=of_one_run), _plain(right, of_one_run=of_one_run)
        )
        if found is not None:
            kind = str(known.entry.__struct_config__.tag)
            return Difference(known.seq, getattr(known.entry, "turn", turn), kind, *found)
        turn = getattr(known.entry, "turn", turn)
    return None


_OF_A_RUN = frozenset({"timestamp", "time", "digest", "identity", "tool_call_id"})


_CALL_PIECE = 5


def _plain(record: Record | None, *, of_one_run: bool) -> Any:
    if record is None:
        return None
    entry = msgspec.json.decode(encode_entry(record.entry))
    return entry if of_one_run else _without(entry)


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        is_call = value.get("type") == "tool_call"
        names = [name for name in value if name not in _OF_A_RUN and not (is_call and name == "id")]
        return {name: _without(value[name]) for name in names}
    if isinstance(value, (list, tuple)):
        if len(value) == _CALL_PIECE and value[0] == "call":
            return [*value[:2], *value[3:]]  # a piece of a call without its id
        return [_without(part) for part in value]
    return value


def _difference(first: Any, second: Any, path: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(first, dict) and isinstance(second, dict):
        for name in [*first, *[name for name in second if name not in first]]:
            here = f"{path}.{name}" if path else name
            if found := _difference(first.get(name), second.get(name), here):
                return found
        return None
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        for index in range(max(len(first), len(second))):
            left = first[index] if index < len(first) else None
            right = second[index] if index < len(second) else None
            if found := _difference(left, right, f"{path}[{index}]"):
                return found
        return None
    return None if first == second else (path, first, second)


def _shown(value: Any) -> str:
    text = "nothing" if value is None else encode_json(value).decode(errors="replace")
    return text if len(text) <= 160 else text[:159] + "…"
