"""Where runs are kept: the interface of a store, and what it tells about a run.

A store keeps the records of many runs, each run's in order. It does not look into them beyond what
it needs to find them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from clark_agent.errors import ClarkAgentError
from clark_agent.run_log.records import Record

__all__ = [
    "LoadedRun",
    "LogProblem",
    "RunAppender",
    "RunBusy",
    "RunExists",
    "RunNotFound",
    "RunStore",
    "RunStoreError",
    "RunSummary",
]


class RunStoreError(ClarkAgentError):
    """A store cannot do what it was asked; ``run_id`` says for which run."""

    def __init__(self, text: str, run_id: str | None = None) -> None:
        super().__init__(text)
        self.run_id = run_id


class RunNotFound(RunStoreError):
    """The store has no such run."""


class RunExists(RunStoreError):
    """The store has a run of that id already."""


class RunBusy(RunStoreError):
    """Somebody else is writing to the run."""


class LogProblem(Struct, frozen=True):
    """Something in a log that cannot be read: where (``line 12``, ``record 12``), and why."""

    where: str
    reason: str
    data: str
    """As much of it as can be shown."""


class LoadedRun(Struct, frozen=True):
    """Everything of a run that can be read."""

    run_id: str
    records: tuple[Record, ...]
    problems: tuple[LogProblem, ...] = ()
    """What could not be read, except a torn end."""
    is_torn: bool = False
    """Whether the last record was cut off in the middle of being written. It is not among the
    records; nothing that it says has happened."""


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

    Contract: what was appended is in the operating system's hands when `flush` returns, and on the
    disk if ``sync`` was asked for. Any of these may raise `OSError` or the like; then nothing of
    what was appended since the last flush is promised (a later flush, or `close`, may still write
    it), and what was flushed before stays readable.
    """

    def append(self, record: Record, data: bytes, /) -> None:
        """Take a record, and its JSON on one line."""
        ...

    def flush(self, *, sync: bool) -> None:
        """Hand everything on."""
        ...

    def close(self) -> None:
        """Flush, and let others write. Closing twice is harmless."""
        ...


class RunStore(Protocol):
    """Keeps runs. Safe to use from several threads and processes at once.

    A run is there from its first flush on. How it stands is told by its last record.
    """

    def create(self, run_id: str) -> RunAppender:
        """Begin a run. Raises `RunExists`."""
        ...

    def reopen(self, run_id: str) -> RunAppender:
        """Go on with a run; a torn last record is cut off. Raises `RunNotFound` or `RunBusy`."""
        ...

    def load(self, run_id: str) -> LoadedRun:
        """Read a run, also one that is being written. Raises `RunNotFound`."""
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
