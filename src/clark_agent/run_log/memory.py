"""MemoryStore: runs that last as long as the process. For tests, and for replays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from threading import Lock

from msgspec.structs import force_setattr

from clark_agent._finished import FINISHED
from clark_agent.errors import RunBusy, RunExists, RunNotFound, RunStoreError
from clark_agent.run_log._checksums import checksum_in
from clark_agent.run_log.reader import outcome_of
from clark_agent.run_log.records import Record, RunBegan
from clark_agent.run_log.store import LoadedRun, RunSummary

__all__ = ["MemoryStore"]


class MemoryStore:
    """Keeps runs in memory."""

    def __init__(self) -> None:
        self._runs: dict[str, list[Record]] = {}
        self._busy: set[str] = set()
        self._lock = Lock()

    def create(self, run_id: str) -> MemoryAppender:
        """Create a run. Raises `RunExists`."""
        with self._lock:
            if run_id in self._busy or self._runs.get(run_id):
                raise RunExists(run_id)
            return self._opened(run_id, self._runs.setdefault(run_id, []))

    def reopen(self, run_id: str, *, after: int) -> MemoryAppender:
        """Continue a run after its last record. Raises `RunNotFound` or `RunBusy`."""
        with self._lock:
            if run_id in self._busy:
                raise RunBusy(run_id)
            records = self._find(run_id)
            if records[-1].seq != after:
                raise RunBusy.changed(run_id, records[-1].seq, after)
            return self._opened(run_id, records)

    def _opened(self, run_id: str, records: list[Record]) -> MemoryAppender:
        self._busy.add(run_id)
        return MemoryAppender(records, lambda: self._busy.discard(run_id))

    def load(self, run_id: str) -> LoadedRun:
        """Read a run. Raises `RunNotFound`."""
        return LoadedRun(run_id, tuple(self._find(run_id)))

    def runs(
        self,
        *,
        conversation_id: str | None = None,
        parent_run_id: str | None = None,
        limit: int | None = None,
    ) -> list[RunSummary]:
        """Return the runs, newest first."""
        runs = list(self._runs.items())
        found = [summary_of(run_id, records) for run_id, records in runs if records]
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
        """Keep only the first ``count`` records of a run."""
        del self._find(run_id)[count:]

    def _find(self, run_id: str) -> list[Record]:
        records = self._runs.get(run_id)
        if not records:
            raise RunNotFound(run_id)
        return records


class MemoryAppender:
    """Appends to a list."""

    def __init__(self, records: list[Record], release: Callable[[], None]) -> None:
        self._records = records
        self._waiting: list[Record] = []
        self._release = release
        self._is_closed = False

    def append(self, record: Record, data: bytes, /) -> None:
        """Buffer a record."""
        if self._is_closed:
            raise RunStoreError("the log of the run is closed", record.run)
        if (checksum := checksum_in(data)) is not None:  # as a reader of the JSON would get it
            force_setattr(record, "crc", f"{checksum:08x}")
        self._waiting.append(record)

    def flush(self, *, sync: bool) -> None:
        """Make the buffered records visible."""
        self._records += self._waiting
        self._waiting.clear()

    def barrier(self) -> Awaitable[None]:
        """Make the buffered records visible."""
        self.flush(sync=False)
        return FINISHED

    def close(self) -> None:
        """Let others write."""
        if not self._is_closed:
            self.flush(sync=False)
            self._is_closed = True
            self._release()


def summary_of(run_id: str, records: list[Record]) -> RunSummary:
    """Return the summary of a run for a listing."""
    first, last = records[0], records[-1]
    began = first.entry
    identity = began.identity if isinstance(began, RunBegan) else None
    return RunSummary(
        run_id=run_id,
        parent_run_id=None if identity is None else identity.parent_run_id,
        depth=0 if identity is None else identity.depth,
        conversation_id=None if identity is None else identity.conversation_id,
        began_at=first.at,
        last_at=last.at,
        records=len(records),
        outcome=outcome_of(last.entry),
    )
