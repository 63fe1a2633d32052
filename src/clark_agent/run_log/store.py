"""Where runs are kept: the interface of a store, and what it tells about a run.

A store keeps the records of many runs, each run's in order. It does not look into them beyond what
it needs to find them again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from msgspec import Struct

from clark_agent.run_log.records import Record

__all__ = [
    "LoadedRun",
    "LogProblem",
    "RunAppender",
    "RunStore",
    "RunSummary",
]


class LogProblem(Struct, frozen=True):
    """A record that is not there as it was written: where (``line 12, byte 3456``), and why."""

    where: str
    reason: str
    data: str
    """As much of it as can be shown."""
    seq: int
    """The number that the record has, or should have."""
    is_newer: bool = False
    """Whether it is intact, and of a version that this one cannot read."""


class LoadedRun(Struct, frozen=True):
    """Everything of a run that can be read."""

    run_id: str
    records: tuple[Record, ...]
    problems: tuple[LogProblem, ...] = ()
    """What could not be read, except a torn end."""
    is_torn: bool = False
    """Whether the last record was cut off in the middle of being written. It is not among the
    records; nothing that it says has happened."""
    unchecked: int = 0
    """How many records, from the first on, have no checksum: version 1 has written them. Damage to
    them may go unnoticed."""


class RunSummary(Struct, frozen=True, kw_only=True):
    """What a store can say of a run without reading all of it."""

    run_id: str
    parent_run_id: str | None = None
    depth: int = 0
    conversation_id: str | None = None
    began_at: int
    last_at: int
    """The time of the newest record."""
    records: int
    outcome: str | None = None
    """How it ended: a `clark_agent.LoopOutcome`, ``failed``, or None while it has not."""


class RunAppender(Protocol):
    """Writes one run. There is never more than one for a run, in all processes.

    Contract: records are kept in the order in which they were appended, and none without those
    before it. `append`, `flush` and `close` do not wait for anybody else; a store that has to wait,
    for a lock, a disk or a network, does so behind them, and `barrier` waits for the store. When
    something cannot be kept, any of these may raise `OSError` or the like, `barrier` at the latest;
    then nothing that was appended since the last barrier is promised (a later one, or `close`, may
    still keep it), and what was there before stays readable. One thread uses an appender at a time.
    """

    def append(self, record: Record, data: bytes, /) -> None:
        """Take a record, and its JSON on one line, which is what `RunStore.load` has to check."""
        ...

    def flush(self, *, sync: bool) -> None:
        """Start to hand on everything that was appended: to the operating system, so that it
        survives the death of the process; with ``sync``, to the disk.
        """
        ...

    def barrier(self) -> Awaitable[None]:
        """Flush, and wait until everything that was appended is handed on as it was asked for.

        What a record announces must not begin before. If the wait is cancelled the store goes on.
        """
        ...

    def close(self) -> None:
        """Flush, and let others write as soon as all is handed on, which `barrier` waits for also
        after this. Closing twice is harmless.
        """
        ...


class RunStore(Protocol):
    """Keeps runs. Safe to use from several threads, event loops and processes at once.

    A run is there when its first records are handed on. How it stands is told by its last record.
    A store that cannot tell at once whether a run may be written (its storage is far away) may
    raise what `create` and `reopen` raise from the first `RunAppender.barrier`.
    """

    def create(self, run_id: str) -> RunAppender:
        """Begin a run. Raises `RunExists`."""
        ...

    def reopen(self, run_id: str, *, after: int) -> RunAppender:
        """Go on with a run behind the record of this number, which is the last that was read.

        Takes the run for this writer alone, then looks whether that record is still the last: of
        several that have read the same log, one gets the run. A torn last record is cut off. Raises
        `RunNotFound` or `RunBusy`.
        """
        ...

    def load(self, run_id: str) -> LoadedRun:
        """Read a run, also one that is being written; `clark_agent.run_log.reader.LogReader` does
        the work. Raises `RunNotFound`.
        """
        ...

    def runs(
        self,
        *,
        conversation_id: str | None = None,
        parent_run_id: str | None = None,
        limit: int | None = None,
    ) -> Sequence[RunSummary]:
        """The runs, newest first; those of one conversation, or the children of one run."""
        ...
