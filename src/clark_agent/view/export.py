"""One run as one file that opens anywhere: the page, with the data of the run in it.

    with open("run.html", "w", encoding="utf-8") as file:
        left_out = write_run(store, run_id, file)

The log is read in pages and written as it is read, so the memory that this takes does not grow with
it. The size of the file is bounded: what does not fit is left out, and the file says so. Child runs
are in it, too. The page in the file loads nothing, and asks no server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import msgspec

from clark_agent._kept_text import KeptText
from clark_agent._text import well_formed
from clark_agent._version import __version__
from clark_agent.clock import now_ms
from clark_agent.errors import DecodeError
from clark_agent.run_log.kept import pieces_of
from clark_agent.run_log.pages import START
from clark_agent.run_log.store import RunStore
from clark_agent.view.index import LogIndex
from clark_agent.view.page import json_for_script, one_file
from clark_agent.view.parts import Parts, one_line
from clark_agent.view.reading import Reading
from clark_agent.view.requests import request_view, sent_requests
from clark_agent.view.timeline import Timeline

__all__ = ["MOST_BYTES", "write_run"]

MOST_BYTES = 50_000_000
"""How large a file may be, about."""
_LONGEST_TEXT = 200_000
_MOST_RUNS = 500
_MOST_TURNS = 100_000
_KEPT = 4
"""One part in so many of what is left is kept for what follows."""


def write_run(
    store: RunStore, run_id: str, file: TextIO, *, most_bytes: int = MOST_BYTES
) -> tuple[str, ...]:
    """Write a run with its child runs. Return what was left out, as sentences.

    Raises `RunNotFound`. A damaged log is exported up to its damage.
    """
    export = _Export(store, most_bytes)
    view, _ = export.reading.whole_run(run_id)
    title = one_line(view.run.task or run_id, 80)
    for piece in one_file(f"{title} · clark-agent", export.data(run_id)):
        file.write(well_formed(piece))
    return tuple(export.omitted)


class _Export:
    """Makes the JSON of a file, in pieces, and counts it."""

    def __init__(self, store: RunStore, most: int) -> None:
        self.reading = Reading(store)
        self._store = store
        self.omitted: list[str] = []
        self._left = most
        self._turn = 0
        """The last turn of which items were written."""

    def data(self, root: str) -> Iterator[str]:
        """The run, and those below it."""
        yield '{"runs":{'
        waiting, seen = deque([root]), {root}
        while waiting and self._left > 0 and len(seen) - len(waiting) < _MOST_RUNS:
            run_id = waiting.popleft()
            view, index = self.reading.whole_run(run_id)
            for child in view.children:
                if child.run.run_id not in seen:
                    seen.add(child.run.run_id)
                    waiting.append(child.run.run_id)
            comma = "" if run_id == root else ","
            yield f"{comma}{_json(run_id)}:{{{self._member('view', view)},"
            yield from self._items(index)
            yield from self._requests(index)
            yield "}"
        if waiting:
            self.omitted.append(f"{_count(len(waiting), 'child run')} left out.")
        yield f"}},{self._member('session', self._session(root))}}}"

    def _session(self, root: str) -> dict[str, object]:
        return {
            "version": __version__,
            "root": root,
            "omitted": self.omitted,
            "exported_at": now_ms(),
            "can_write": False,
            "can_run": False,
            "can_replay": False,
            "why_not": "This is a file: decide with clark-agent view or clark-agent decide.",
        }

    def _member(self, name: str, value: object) -> str:
        json = f'"{name}":{_json(value)}'
        self._left -= len(json)
        return json

    def _items(self, index: LogIndex) -> Iterator[str]:
        """The items with whole texts and images, as many as fit, and the turns."""
        most = self._left - self._left // _KEPT

        def read_kept(name: str, most: int) -> str:
            try:
                return KeptText(pieces_of(self._store, index.run_id, name)).part(0, most)
            except LookupError:  # the store has it no more
                return ""

        parts = Parts(_LONGEST_TEXT, inline=True, read_kept=read_kept)
        timeline, comma, self._turn = Timeline(parts), "", 0
        yield '"items":['
        with suppress(DecodeError):  # the head says where the log is damaged
            for record in index.records_from(START, index.last_seq):
                item = timeline.take(record)
                json = _json(item)
                if len(json) > most:
                    place = f"from record {record.seq:,} in turn {item.turn} on"
                    self.omitted.append(
                        f"The run {index.run_id} is left out {place}: the file would be too large."
                    )
                    break
                most -= len(json)
                self._left -= len(json)
                self._turn = item.turn
                yield comma + json
                comma = ","
        rows = [row for row in index.turn_rows(0, _MOST_TURNS) if row.turn <= self._turn]
        yield f"],{self._member('turns', rows)},"

    def _requests(self, index: LogIndex) -> Iterator[str]:
        """What the model saw in each turn, as far as it was new."""
        most = self._left - self._left // _KEPT
        parts, comma, shown = Parts(inline=True), "", None
        yield '"requests":['
        with suppress(DecodeError):
            for sent in sent_requests(index):
                if sent.turn > self._turn:
                    break
                view = msgspec.to_builtins(request_view(index.run_id, sent, None, 100, parts=parts))
                front = [view.pop(name) for name in ("system_prompt", "tools", "settings")]
                view["front"] = None if front == shown else front
                json = _json(view)
                if len(json) > most:
                    self.omitted.append(
                        f"The requests of {index.run_id} are left out from turn {sent.turn} on."
                    )
                    break
                most -= len(json)
                self._left -= len(json)
                shown = front
                yield comma + json
                comma = ","
        yield "]"


def _count(count: int, noun: str) -> str:
    return f"1 {noun} is" if count == 1 else f"{count:,} {noun}s are"


def _json(value: object) -> str:
    return json_for_script(msgspec.json.encode(value).decode())
