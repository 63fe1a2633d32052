"""MemoryStore: runs that last as long as the process. For tests, and for replays."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from threading import Lock

from msgspec.structs import force_setattr

from clark_agent._finished import FINISHED
from clark_agent._threads import call_in_loop
from clark_agent.errors import LogDamaged, RunBusy, RunExists, RunNotFound, RunStoreError
from clark_agent.run_log._checksums import checksum_in
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.pages import LogPage, LogPlace, page_of
from clark_agent.run_log.reader import outcome_of
from clark_agent.run_log.records import Record, RunBegan
from clark_agent.run_log.store import LoadedRun, RunSummary

__all__ = ["MemoryStore"]


class MemoryStore:
    """Keeps runs in memory."""

    def __init__(self) -> None:
        self._runs: dict[str, list[Record]] = {}
        self._busy: set[str] = set()
        self._mail: dict[str, dict[str, Mail]] = {}
        self._kept: dict[str, dict[str, tuple[bytes, ...]]] = {}
        self._tails: dict[str, tuple[MemoryTail, ...]] = {}
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
        return MemoryAppender(
            records,
            lambda: self._busy.discard(run_id),
            lambda: self._wake(run_id),
            self._kept.setdefault(run_id, {}),
        )

    def load(self, run_id: str) -> LoadedRun:
        """Read a run. Raises `RunNotFound`."""
        return LoadedRun(run_id, tuple(self._find(run_id)))

    def runs(
        self,
        *,
        conversation_id: str | None = None,
        parent_run_id: str | None = None,
        outcome: str | None = None,
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
            and (outcome is None or run.outcome == outcome)
        ]
        found.reverse()
        found.sort(key=lambda run: run.began_at, reverse=True)
        return found[:limit]

    def tail(self, run_id: str, *, after: int = -1) -> MemoryTail:
        """Return a reader of the records after this number, and of those to come. Raises
        `RunNotFound`.
        """
        tail = MemoryTail(self, self._find(run_id), run_id, after)
        with self._lock:
            self._tails[run_id] = (*self._tails.get(run_id, ()), tail)
        return tail

    def read_page(self, run_id: str, place: LogPlace, *, records: int, size: int) -> LogPage:
        """Return the records behind a place: at most so many. Raises `RunNotFound`."""
        every = self._find(run_id)
        if place.seq > every[-1].seq:
            reason = "records that were read before are missing"
            raise LogDamaged(run_id, place.seq, reason, path=f"record {every[-1].seq}")
        return page_of(every, place, records)

    def read_end(self, run_id: str, *, records: int, size: int) -> list[Record]:
        """Return the last records: at most so many."""
        return self._find(run_id)[-records:]

    def tail_from(self, run_id: str, place: LogPlace) -> MemoryTail:
        """Return a reader of the records behind a place, and of those to come."""
        return self.tail(run_id, after=place.seq)

    def forget(self, tail: MemoryTail) -> None:
        """Let a tail go that was closed."""
        with self._lock:
            left = tuple([each for each in self._tails.pop(tail.run_id, ()) if each is not tail])
            if left:
                self._tails[tail.run_id] = left

    def _wake(self, run_id: str) -> None:
        for tail in self._tails.get(run_id, ()):
            tail.wake()

    def post(self, run_id: str, mail: Mail) -> bool:
        """Put a message into the mailbox of a run. Return False if it has one with the same id.
        Raises `RunNotFound`.
        """
        self._find(run_id)
        with self._lock:
            box = self._mail.setdefault(run_id, {})
            if mail.id in box:
                return False
            box[mail.id] = mail
            return True

    def mail(self, run_id: str, *, after: int = 0) -> Sequence[Mail]:
        """Return the messages in the mailbox of a run, without the first ``after`` of them."""
        if run_id not in self._mail:
            return ()
        with self._lock:
            return [*self._mail[run_id].values()][after:]

    def kept(self, run_id: str, name: str, start: int, stop: int) -> Sequence[bytes]:
        """Return pieces of a large result; nothing if the run has none of that name."""
        return self._kept.get(run_id, {}).get(name, ())[start:stop]

    def publish(self, run_id: str, data: bytes) -> None:
        """Show something to the tails of the run that exist now."""
        for tail in self._tails.get(run_id, ()):
            tail.live.append(data)
            tail.wake()

    def cut(self, run_id: str, count: int) -> None:
        """Keep only the first ``count`` records of a run."""
        del self._find(run_id)[count:]

    def extend(self, run_id: str, records: Iterable[Record]) -> None:
        """Add records to a run as they are."""
        self._find(run_id).extend(records)

    def _find(self, run_id: str) -> list[Record]:
        records = self._runs.get(run_id)
        if not records:
            raise RunNotFound(run_id)
        return records


class MemoryAppender:
    """Appends to a list."""

    def __init__(
        self,
        records: list[Record],
        release: Callable[[], None],
        wake: Callable[[], None] = lambda: None,
        kept: dict[str, tuple[bytes, ...]] | None = None,
    ) -> None:
        self._wake = wake
        self._kept = {} if kept is None else kept
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

    def keep(self, name: str, pieces: Sequence[bytes]) -> None:
        """Keep a large result."""
        self._kept[name] = tuple(pieces)

    def flush(self, *, sync: bool) -> None:
        """Make the buffered records visible."""
        if self._waiting:
            self._records += self._waiting
            self._waiting.clear()
            self._wake()

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


class MemoryTail:
    """Reads a list as it grows. Whoever appends to it, on any thread, wakes the waiting task."""

    def __init__(self, store: MemoryStore, records: list[Record], run_id: str, after: int) -> None:
        self._store = store
        self._records = records
        self.run_id = run_id
        self._after = after
        self._at = 0
        self.live: deque[bytes] = deque(maxlen=_LIVE)
        """What was published and not read."""
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def read(self) -> Sequence[Record]:
        """Return the records since the last call. Raises `LogDamaged` if some were cut off."""
        end = len(self._records)
        if end < self._at:
            reason = "records that were read before are missing"
            raise LogDamaged(self.run_id, end, reason, path=f"record {end}")
        new, self._at = self._records[self._at : end], end
        return [record for record in new if record.seq > self._after]

    def read_live(self) -> Sequence[bytes]:
        """Return what was published since the last call."""
        found: list[bytes] = []
        while self.live:
            found.append(self.live.popleft())
        return found

    async def wait(self, seconds: float) -> None:
        """Wait until there may be something new, at most this long."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiter = loop, waiter
        try:
            # Checked after the waiter is set: whoever appends later wakes it.
            if len(self._records) == self._at and not self.live:
                await asyncio.wait([waiter], timeout=seconds)
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Wake the waiting task. Called on any thread."""
        waiting = self._waiter
        if waiting is not None:
            call_in_loop(waiting[0], _settle, waiting[1])

    def close(self) -> None:
        """Take no more."""
        self._store.forget(self)


_LIVE = 2000
"""How much that was published a tail keeps."""


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


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
