"""Reads a log in pages: some records from a place on, however long the log is.

A `LogPlace` lies between two records. `read_page` returns the records behind it, as many as fit
into a number of records and bytes, and the place behind these. It checks them as
`RunStore.load` does. So who keeps a place now and then can read any part of a log again, and what
is new, without the rest.

Stores may offer this as methods, as all stores of this package do:

- ``read_page(run_id, place, *, records, size)``: as the function here;
- ``tail_from(run_id, place)``: as `RunStore.tail`, from a place on;
- ``read_end(run_id, *, records, size)``: the last records, unchecked: some may be missing.

For a store without them, `RunStore.load` and `RunStore.tail` do the same with more work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from clark_agent.run_log.records import Record
from clark_agent.run_log.store import LogProblem, RunStore, RunTail

__all__ = ["START", "LogPage", "LogPlace", "page_of", "read_end", "read_page", "tail_from"]


class LogPlace(Struct, frozen=True):
    """A place between two records. Take it from a `LogPage`: only ``seq`` means something."""

    seq: int = -1
    """The number of the record before it; -1 at the beginning."""
    checksum: int = 0
    """That of the record before it."""
    byte: int = 0
    """Where the next record begins, if the store has a file for each run."""
    line: int = 0
    """How many lines come before it there."""
    is_in_line: bool = False
    """Whether the line break of the record before it was still missing."""

    @classmethod
    def behind(
        cls, record: Record, byte: int = 0, line: int = 0, *, is_in_line: bool = False
    ) -> LogPlace:
        """Return the place behind a record."""
        checksum = 0 if record.crc is None else int(record.crc, 16)
        return cls(record.seq, checksum, byte, line, is_in_line)


START = LogPlace()
"""The beginning of a log."""


class LogPage(Struct, frozen=True, kw_only=True):
    """Some records of a run."""

    records: tuple[Record, ...]
    end: LogPlace
    """The place behind them."""
    is_end: bool
    """Whether there are no more yet."""
    problem: LogProblem | None = None
    """What is wrong with the next record. Nothing behind it can be read."""
    bytes_read: int = 0
    size: int | None = None
    """The size of the whole log in bytes, if the store knows it."""


def read_page(
    store: RunStore,
    run_id: str,
    place: LogPlace = START,
    *,
    records: int = 100,
    size: int = 1 << 18,
) -> LogPage:
    """Return the records behind a place: at most so many, and about so many bytes, but at least one
    if there is one. Raises `RunNotFound`, and `LogDamaged` if the log ends before the place.
    """
    own: Callable[..., LogPage] | None = getattr(store, "read_page", None)
    if own is not None:
        return own(run_id, place, records=records, size=size)
    loaded = store.load(run_id)
    problem = loaded.problems[0] if loaded.problems else None
    intact = [r for r in loaded.records if problem is None or r.seq < problem.seq]
    return page_of(intact, place, records, problem)


def page_of(
    every: Sequence[Record], place: LogPlace, records: int, problem: LogProblem | None = None
) -> LogPage:
    """Return a page of records that are in memory, all from the first one on."""
    start = 0 if place.seq < 0 or not every else place.seq - every[0].seq + 1
    found = tuple(every[start : start + records])
    is_end = start + len(found) >= len(every)
    end = LogPlace.behind(found[-1]) if found else place
    return LogPage(records=found, end=end, is_end=is_end, problem=problem if is_end else None)


def read_end(
    store: RunStore, run_id: str, *, records: int = 20, size: int = 1 << 16
) -> Sequence[Record]:
    """Return the last records: at most so many, and about so many bytes. Those that cannot be read
    are left out. Raises `RunNotFound`.
    """
    own: Callable[..., Sequence[Record]] | None = getattr(store, "read_end", None)
    if own is not None:
        return own(run_id, records=records, size=size)
    return store.load(run_id).records[-records:]


def tail_from(store: RunStore, run_id: str, place: LogPlace) -> RunTail:
    """Return a reader of the records behind a place, and of those to come. Raises `RunNotFound`."""
    own: Any = getattr(store, "tail_from", None)
    if own is not None:
        tail: RunTail = own(run_id, place)
        return tail
    return store.tail(run_id, after=place.seq)
