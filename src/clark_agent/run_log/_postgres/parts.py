"""What one process needs of a store: its threads and connections, and who waits for news."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, Full, Queue
from threading import Lock, Thread
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

import psycopg

from clark_agent.errors import RunStoreError
from clark_agent.run_log._postgres.connecting import Connector, Pool, store_error
from clark_agent.run_log._postgres.keeping import ALIVE, Keeper
from clark_agent.run_log._postgres.schema import qualified
from clark_agent.run_log._postgres.writing import Appender, GroupWriter
from clark_agent.run_log.pages import START, LogPlace
from clark_agent.run_log.reader import LogReader
from clark_agent.run_log.records import Record

if TYPE_CHECKING:
    from clark_agent.clock import Clock

__all__ = ["Parts"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_BATCH = 500
_CUT = (
    psycopg.errors.AdminShutdown,
    psycopg.errors.CrashShutdown,
    psycopg.errors.IdleSessionTimeout,
    psycopg.errors.ReadOnlySqlTransaction,  # the connection leads to a server that is a replica now
)
_PAUSES = (0.0, 0.05, 0.1, 0.2)
"""How many seconds to wait after each connection that the server has closed."""
_LOOK_EVERY = 1.0
"""How often a tail looks for news while it cannot hear of them."""
_MOST_LIVE = 256
"""How many deltas may wait to be published; more are dropped."""
_LONGEST_LIVE = 5600
"""How many bytes of a delta fit into an announcement, which is in base 64."""

_ABANDONED = f"""
    SELECT run_id FROM {{s}}.runs r
    WHERE outcome IS NULL AND depth = 0 AND last_seq >= 0 AND NOT {ALIVE}
    ORDER BY n LIMIT %(limit)s
"""
_READ = """
    SELECT last_seq, seq, data FROM {s}.runs LEFT JOIN LATERAL (
        SELECT seq, data FROM {s}.records WHERE records.n = runs.n AND seq >= %s
        ORDER BY seq LIMIT %s
    ) r ON true WHERE runs.n = %s ORDER BY seq
"""


class Parts:
    """The threads and connections of a process, started when they are needed."""

    def __init__(
        self,
        connector: Connector,
        lease: float,
        clock: Clock | None,
        patience: float,
        connections: int,
        *,
        in_groups: bool,
    ) -> None:
        self._process = os.getpid()
        self.keeper = Keeper(connector, lease, clock)
        self.writer = GroupWriter(connector, self.keeper, patience=patience, in_groups=in_groups)
        self.abandoned, self.alive = _ABANDONED, ALIVE
        self.read_statement = qualified(_READ, connector.schema).encode()
        self._pool = Pool(connector, connections)
        self._lock = Lock()
        self._tails: dict[int, WeakSet[Tail]] = {}
        self._publisher = _Publisher(connector, self.keeper)
        self.keeper.on_news = self._heard
        self.keeper.on_live = self._heard_live
        self.keeper.on_connected = self._may_have_missed

    def close(self) -> None:
        """End the threads, and close the connections. Those of another process are left alone."""
        if os.getpid() != self._process:
            return
        self.writer.stop()
        self._publisher.stop()
        self.keeper.stop()
        self._may_have_missed()  # those who follow a run look for themselves from now on
        self._pool.close()

    # --- reading --------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Generator[psycopg.Connection]:
        """Yield a connection of the pool."""
        try:
            with self._pool.connection() as connection:
                yield connection
        except (psycopg.Error, OSError) as error:
            raise store_error(error) from error

    def read(self, work: Callable[[psycopg.Connection], _T]) -> _T:
        """Call it with a connection; again, if the server closes the connection meanwhile."""
        for pause in _PAUSES:
            connection: psycopg.Connection | None = None
            try:
                with self.reading() as connection:
                    return work(connection)
            except RunStoreError as error:
                was_cut = connection is not None and connection.closed
                if not was_cut and not isinstance(error.__cause__, _CUT):
                    raise
            self._pool.close()  # the idle ones are likely to be closed as well
            time.sleep(pause)
        with self.reading() as connection:
            return work(connection)

    # --- writing and following ------------------------------------------------------------------

    def appender(self, run_id: str, after: int | None, *, keeps: object) -> Appender:
        """Return a writer of a run."""
        return Appender(self.writer, run_id, after, keeps=keeps)

    def tail(
        self, run_id: str, number: int, after: int, *, keeps: object, place: LogPlace = START
    ) -> Tail:
        """Return a reader of a run as it grows."""
        tail = Tail(self, run_id, number, after, keeps, place)
        with self._lock:
            self._tails.setdefault(number, WeakSet()).add(tail)
        self.keeper.start()
        return tail

    def forget(self, tail: Tail) -> None:
        """Drop a tail that was closed."""
        with self._lock:
            tails = self._tails.get(tail.number)
            if tails is not None:
                tails.discard(tail)
                if not tails:
                    del self._tails[tail.number]

    def publish(self, run_id: str, data: bytes) -> None:
        """Show something to the tails of a run, if it is not too much."""
        number = self.keeper.number_of(run_id)
        if number is not None and len(data) <= _LONGEST_LIVE:
            self._publisher.put(f"{number} {base64.b64encode(data).decode()}")

    def has_mail(self, run_id: str) -> bool:
        """Return whether a message may have come for a run of this process."""
        number = self.keeper.number_of(run_id)
        if number is None or not self.keeper.is_listening:
            return True
        return self.keeper.take_mail(number)

    # --- called by the thread that listens ------------------------------------------------------

    def _heard(self, payload: str) -> None:
        what, _, rest = payload.partition(" ")
        number = int(rest.partition(" ")[0])
        if what == "m":
            self.keeper.note_mail(number)
        for tail in list(self._tails.get(number, ())):
            tail.wake()

    def _heard_live(self, payload: str) -> None:
        number, _, data = payload.partition(" ")
        for tail in list(self._tails.get(int(number), ())):
            tail.show(base64.b64decode(data))

    def _may_have_missed(self) -> None:
        with self._lock:
            tails = [tail for some in self._tails.values() for tail in some]
        for tail in tails:
            tail.wake()


class _Publisher:
    """Announces deltas, from a thread of its own. If they come too fast, some are dropped."""

    def __init__(self, connector: Connector, keeper: Keeper) -> None:
        self._connector = connector
        self._keeper = keeper
        self._queue: Queue[str | None] = Queue(_MOST_LIVE)
        self._thread: Thread | None = None
        self._lock = Lock()

    def put(self, payload: str) -> None:
        """Announce it soon, or drop it."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = Thread(target=self._work, name="clark-agent-live", daemon=True)
                    self._thread.start()
        with suppress(Full):
            self._queue.put_nowait(payload)

    def stop(self) -> None:
        """End the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            with suppress(Empty):
                while True:
                    self._queue.get_nowait()
            self._queue.put(None)
            thread.join()

    def _work(self) -> None:
        connection: psycopg.Connection | None = None
        is_over = False
        while not is_over:
            found = [self._queue.get()]
            with suppress(Empty):
                while True:
                    found.append(self._queue.get_nowait())
            payloads = [payload for payload in found if payload is not None]
            is_over = len(payloads) < len(found)
            try:
                if connection is None or connection.closed:
                    connection = self._connector.connect()
                connection.execute(
                    "SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) AS payload",
                    (self._keeper.live_channel, payloads),
                )
            except (psycopg.Error, OSError) as error:
                logger.debug("what a run shows is not published: %s", error)
                if connection is not None:
                    connection.close()
        if connection is not None:
            connection.close()


class Tail:
    """Reads the records of a run as they are committed."""

    def __init__(
        self,
        parts: Parts,
        run_id: str,
        number: int,
        after: int,
        keeps: object,
        place: LogPlace = START,
    ) -> None:
        self._parts = parts
        self._keeps = keeps
        self._run_id = run_id
        self.number = number
        self._after = after
        self._reader = LogReader(run_id, "record {}", after=place)
        self._next = place.seq + 1
        """The number of the next record to read."""
        self._is_current = False
        """Whether everything was read before the last news."""
        self._has_rows = False
        """Whether rows were passed to the reader that were not returned yet."""
        self._live: deque[bytes] = deque(maxlen=4 * _MOST_LIVE)
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def read(self) -> Sequence[Record]:
        """Return the records since the last call, or the first of them. Raises `LogDamaged`."""
        while True:
            if not self._has_rows:
                self._fetch()
            is_last = not self._has_rows
            self._has_rows = False
            records = self._reader.drain()
            if self._after >= 0:
                records = [record for record in records if record.seq > self._after]
            if records or is_last:
                return records

    def _fetch(self) -> None:
        """Pass the next rows to the reader, unless nothing was announced since the last time."""
        if self._reader.is_damaged() or (self._is_current and self._parts.keeper.is_listening):
            return
        self._is_current = True  # what is announced from now on may come too late for this
        values = (self._next, _BATCH, self.number)
        rows = self._parts.read(
            lambda connection: connection.execute(self._parts.read_statement, values).fetchall()
        )
        last = rows[0][0] if rows else None
        for _, seq, data in rows:
            if seq is None:
                continue
            self._next, self._has_rows = seq + 1, True
            self._reader.take(data.encode(), seq, number=seq)
            if self._reader.is_damaged():
                return
        if len(rows) == _BATCH:
            self._is_current = False
        else:
            self._reader.expect_end(last)
            if self._reader.is_damaged():
                self._has_rows = True

    def read_live(self) -> Sequence[bytes]:
        """Return what was published since the last call."""
        found: list[bytes] = []
        with suppress(IndexError):
            while True:
                found.append(self._live.popleft())
        return found

    async def wait(self, seconds: float) -> None:
        """Wait until there may be something new, at most this long. What is new is read here, in
        a thread.
        """
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        self._waiting = loop, event
        try:
            until = loop.time() + seconds
            while not self._has_rows and not self._live:
                if self._is_current:
                    left = until - loop.time()
                    if left <= 0:
                        return
                    is_listening = self._parts.keeper.is_listening
                    wait = left if is_listening else min(left, _LOOK_EVERY)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait):
                            await event.wait()
                    event.clear()
                    if not is_listening:
                        self._is_current = False
                if not self._is_current:
                    await asyncio.to_thread(self._fetch)
        finally:
            self._waiting = None

    def wake(self) -> None:
        """Note that there are news. Called by the thread that listens."""
        self._is_current = False
        self._notify()

    def show(self, data: bytes) -> None:
        """Take what was published. Called by the thread that listens."""
        self._live.append(data)
        self._notify()

    def _notify(self) -> None:
        waiting = self._waiting
        if waiting is not None:
            with suppress(RuntimeError):  # the loop is closed
                waiting[0].call_soon_threadsafe(waiting[1].set)

    def close(self) -> None:
        """Hear nothing more. Closing twice is harmless."""
        self._parts.forget(self)
