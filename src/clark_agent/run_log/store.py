"""The interface of a store of runs, and what it reports about a run.

A store keeps the records of many runs, each run's in order. It does not interpret them beyond what
it needs to find them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from msgspec import Struct

from clark_agent.run_log.mail import Mail
from clark_agent.run_log.records import Record

__all__ = [
    "LoadedRun",
    "LogProblem",
    "RunAppender",
    "RunStore",
    "RunSummary",
    "RunTail",
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
    """A `clark_agent.LoopOutcome`, ``failed``, or None while the run has not ended. It is
    ``suspended`` until the run is resumed, whether or not its requests are decided.
    """


class RunAppender(Protocol):
    """Writes one run. There is at most one appender for a run, across all processes.

    Contract: records are kept in the order in which they were appended, and never without those
    before it. `append`, `flush` and `close` do not block; a store that has to wait for a lock, a
    disk or a network does so in the background, and `barrier` waits for it. If something cannot be
    kept, any of these may raise `OSError` or a similar error, `barrier` at the latest. Then nothing
    that was appended since the last barrier is guaranteed (a later barrier, or `close`, may still
    keep it), and earlier records stay readable. Only one thread uses an appender at a time.

    If the store has `RunStore.kept`, its appenders have ``keep(name, pieces)``: it keeps a result
    that is too large for the model, in place of what the name had. The pieces are there before any
    record that is appended after them. It may raise; then nothing is kept, and the log is intact.
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


class RunTail(Protocol):
    """Reads one run as it grows. Only one task uses it at a time.

    Contract: nothing here blocks for long. `read` costs what is new, not the length of the log.
    """

    def read(self) -> Sequence[Record]:
        """Return the records since the last call, in order. If there are many, return the first of
        them: call it until it returns none. Raises `LogDamaged`.
        """
        ...

    def read_live(self) -> Sequence[bytes]:
        """Return what `RunStore.publish` was called with since the last call, or a part of it."""
        ...

    def wait(self, seconds: float) -> Awaitable[None]:
        """Wait until there may be something new, at most this long."""
        ...

    def close(self) -> None:
        """Release what it holds. Closing twice is harmless."""
        ...


class RunStore(Protocol):
    """Keeps runs. Safe to use from several threads, event loops and processes at once.

    A run exists once its first records are written. Its last record shows its state. A store that
    cannot decide at once whether a run may be written (because its storage is remote) may raise the
    errors of `create` and `reopen` from the first `RunAppender.barrier`.

    A store may read logs in pages; see `clark_agent.run_log.pages`.

    A store whose storage is remote may have more, as `clark_agent.run_log.postgres` does:

    - ``is_remote = True``: reading may wait for a network, and is done in threads.
    - ``has_mail(run_id)``: False if no message has come since the last call. Does not wait.
    - ``runs_waiting(assignee)``: the outermost runs with open requests of an assignee.
    - ``is_lost`` of an appender: True once another process has taken the run over. The run then
      lets go. A commit raises `clark_agent.errors.RunTakenOver`.
    - ``wakes(run_id)`` of an appender: called before a decision is committed, with the outermost
      run, which may go on.

    A store of files may have ``unreadable()``: the names of those that the last listing could not
    read.

    A store may keep large results (see `clark_agent.plugins.LargeResults`). Then it has
    ``kept(run_id, name, start, stop)``, which returns the pieces from one number up to another, or
    nothing if the run has no result of that name; and its appenders have ``keep``. The results are
    deleted with their run. Without these methods, results are kept in the memory of the process.
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
        outcome: str | None = None,
        limit: int | None = None,
    ) -> Sequence[RunSummary]:
        """Return the runs, newest first; those of one conversation, the children of one run, or
        those with one outcome.
        """
        ...

    def tail(self, run_id: str, *, after: int = -1) -> RunTail:
        """Return a reader of the records after this number, and of those to come. Raises
        `RunNotFound`.
        """
        ...

    def post(self, run_id: str, mail: Mail) -> bool:
        """Put a message into the mailbox of a run, whether or not a process works on the run.

        Once this returns, the message survives the death of the process. Returns False, and keeps
        nothing, if the mailbox has a message with the same id. Raises `RunNotFound`.
        """
        ...

    def mail(self, run_id: str, *, after: int = 0) -> Sequence[Mail]:
        """Return the messages in the mailbox of a run, without the first ``after`` of them, in the
        order in which they were posted. Quick if there is nothing: runs call it several times a
        second.
        """
        ...

    def publish(self, run_id: str, data: bytes) -> None:
        """Show something to the tails of the run that exist now, without keeping it: best effort.
        Does not block and does not raise.
        """
        ...
