"""The interface of a store of runs, and what it reports about a run.

A store keeps the records of many runs, each run's in order. It does not interpret them beyond what
it needs to find them.
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
    """A damaged record: where it is (``line 12, byte 3456``), and what is wrong."""

    where: str
    reason: str
    data: str
    """As much of the data as can be shown."""
    seq: int
    """The number that the record has, or should have."""
    is_newer: bool = False
    """Whether it is intact, but of a version that this one cannot read."""


class LoadedRun(Struct, frozen=True):
    """The readable content of a run."""

    run_id: str
    records: tuple[Record, ...]
    problems: tuple[LogProblem, ...] = ()
    """What could not be read, except a torn end."""
    is_torn: bool = False
    """Whether the write of the last record was interrupted. It is not among the records, and what
    it announces has not happened.
    """
    unchecked: int = 0
    """How many records, from the first on, have no checksum because version 1 wrote them. Damage to
    them may go unnoticed.
    """


class RunSummary(Struct, frozen=True, kw_only=True):
    """What a store knows about a run without reading all of it."""

    run_id: str
    parent_run_id: str | None = None
    depth: int = 0
    conversation_id: str | None = None
    began_at: int
    last_at: int
    """The time of the newest record."""
    records: int
    outcome: str | None = None
    """A `clark_agent.LoopOutcome`, ``failed``, or None while the run has not ended."""


class RunAppender(Protocol):
    """Writes one run. There is at most one appender for a run, across all processes.

    Contract: records are kept in the order in which they were appended, and never without those
    before it. `append`, `flush` and `close` do not block; a store that has to wait for a lock, a
    disk or a network does so in the background, and `barrier` waits for it. If something cannot be
    kept, any of these may raise `OSError` or a similar error, `barrier` at the latest. Then nothing
    that was appended since the last barrier is guaranteed (a later barrier, or `close`, may still
    keep it), and earlier records stay readable. Only one thread uses an appender at a time.
    """

    def append(self, record: Record, data: bytes, /) -> None:
        """Buffer a record, with its JSON on one line. `RunStore.load` must check this JSON."""
        ...

    def flush(self, *, sync: bool) -> None:
        """Start to write everything that was appended: to the operating system, so that it survives
        the death of the process; with ``sync``, to the disk.
        """
        ...

    def barrier(self) -> Awaitable[None]:
        """Flush, and wait until everything that was appended is written as requested.

        What a record announces must not start earlier. If the wait is cancelled, the store still
        writes.
        """
        ...

    def close(self) -> None:
        """Flush, and let others write once everything is written. `barrier` waits for that, even
        after this call. Closing twice is harmless.
        """
        ...


class RunStore(Protocol):
    """Keeps runs. Safe to use from several threads, event loops and processes at once.

    A run exists once its first records are written. Its last record shows its state. A store that
    cannot decide at once whether a run may be written (because its storage is remote) may raise the
    errors of `create` and `reopen` from the first `RunAppender.barrier`.
    """

    def create(self, run_id: str) -> RunAppender:
        """Create a run. Raises `RunExists`."""
        ...

    def reopen(self, run_id: str, *, after: int) -> RunAppender:
        """Continue a run after the record of this number, the last one that was read.

        Locks the run for this writer, then checks that the record is still the last: if several
        writers have read the same log, one gets the run. A torn last record is cut off. Raises
        `RunNotFound` or `RunBusy`.
        """
        ...

    def load(self, run_id: str) -> LoadedRun:
        """Read a run, even while it is written. Use `clark_agent.run_log.reader.LogReader`. Raises
        `RunNotFound`.
        """
        ...

    def runs(
        self,
        *,
        conversation_id: str | None = None,
        parent_run_id: str | None = None,
        limit: int | None = None,
    ) -> Sequence[RunSummary]:
        """Return the runs, newest first; those of one conversation, or the children of one run."""
        ...
