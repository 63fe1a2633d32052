"""MemoryStore: runs that end with the process. For tests, and for replays."""

from __future__ import annotations

from collections.abc import Callable

from clark_agent.run_log.records import Record, RunBegan, RunEnded, RunFailed
from clark_agent.run_log.store import (
    LoadedRun,
    RunBusy,
    RunExists,
    RunNotFound,
    RunStoreError,
    RunSummary,
)

__all__ = ["MemoryStore"]


class MemoryStore:
    """Keeps runs in memory."""

    def __init__(self) -> None:
        self._runs: dict[str, list[Record]] = {}
        self._busy: set[str] = set()

    def create(self, run_id: str) -> MemoryAppender:
        """Begin a run."""
        if run_id in self._runs:
            raise RunExists(f"there is a run {run_id!r} already", run_id)
        self._runs[run_id] = []
        return self.reopen(run_id)

    def reopen(self, run_id: str) -> MemoryAppender:
        """Go on with a run."""
        records = self._find(run_id)
        if run_id in self._busy:
            raise RunBusy(f"the run {run_id!r} is being written", run_id)
        self._busy.add(run_id)
        return MemoryAppender(records, lambda: self._busy.discard(run_id))

    def load(self, run_id: str) -> LoadedRun:
        """Read a run."""
        return LoadedRun(run_id, tuple(self._find(run_id)))

    def runs(
        self,
        *,
        conversation_id: str | None = None,
        parent_run_id: str | None = None,
        limit: int | None = None,
    ) -> list[RunSummary]:
        """The runs, newest first."""
        found = [summary_of(run_id, records) for run_id, records in self._runs.items() if records]
        found = [
            run
            for run in found
            if (conversation_id is None or run.conversation_id == conversation_id)
            and (parent_run_id is None or run.parent_run_id == parent_run_id)
        ]
        found.reverse()
        found.sort(key=lambda run: run.began_at, reverse=True)
        return found[:limit]

    def cut(self, run_id: str, count: int) -> None:
        """Forget all but the first so many records of a run."""
        del self._find(run_id)[count:]

    def _find(self, run_id: str) -> list[Record]:
        try:
            return self._runs[run_id]
        except KeyError:
            raise RunNotFound(f"there is no run {run_id!r}", run_id) from None


class MemoryAppender:
    """Appends to a list."""

    def __init__(self, records: list[Record], release: Callable[[], None]) -> None:
        self._records = records
        self._waiting: list[Record] = []
        self._release = release
        self._is_closed = False

    def append(self, record: Record, data: bytes, /) -> None:
        """Take a record."""
        if self._is_closed:
            raise RunStoreError("the log of the run is closed", record.run)
        self._waiting.append(record)

    def flush(self, *, sync: bool) -> None:
        """Make what was taken visible."""
        self._records += self._waiting
        self._waiting.clear()

    def close(self) -> None:
        """Let others write."""
        if not self._is_closed:
            self.flush(sync=False)
            self._is_closed = True
            self._release()


def summary_of(run_id: str, records: list[Record]) -> RunSummary:
    """What a list of runs says of one."""
    first, last = records[0], records[-1]
    began = first.entry
    identity = began.identity if isinstance(began, RunBegan) else None
    outcome: str | None = None
    if isinstance(last.entry, RunEnded):
        outcome = last.entry.outcome
    elif isinstance(last.entry, RunFailed):
        outcome = "failed"
    return RunSummary(
        run_id=run_id,
        parent_run_id=None if identity is None else identity.parent_run_id,
        depth=0 if identity is None else identity.depth,
        conversation_id=None if identity is None else identity.conversation_id,
        began_at=first.at,
        last_at=last.at,
        records=len(records),
        outcome=outcome,
    )
