"""A thread that commits what runs have to write, so that no event loop waits for a database.

It takes whatever has come together since its last commit, of all runs of a store, into one
transaction: many runs at once cost little more commits than one. The thread is started when it is
needed, and ends with its store. In a process that was forked there is none, so it gets its own.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Protocol

from clark_agent.run_log._database import Connections

__all__ = ["Committer", "Waiter", "Writer"]


class Waiter:
    """Somebody who waits for a commit, in an event loop of their own."""

    __slots__ = ("future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def settle(self, error: Exception | None) -> None:
        """The commit is over. Called in the event loop."""
        if self.future.done():  # whoever waited was cancelled
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class Writer(Protocol):
    """Somebody with something to write. These are called by the committer's thread alone."""

    def take(self) -> bool:
        """Look what there is to write, and who waits for it. Whether there is anything."""
        ...

    @property
    def wants_sync(self) -> bool:
        """Whether the disk has to be waited for."""
        ...

    def write(self, connection: sqlite3.Connection, /) -> None:
        """Write what was taken, within a transaction."""
        ...

    def end(self, error: Exception | None, /) -> tuple[Sequence[Waiter], Exception | None]:
        """What was taken is committed, or has failed. Returns who waits for that, and how it is
        to be told.
        """
        ...


class Committer:
    """Commits what writers have, soon after they have said so. Any thread may use it."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._start_over()

    def _start_over(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._queue: SimpleQueue[Writer | None] | None = None
        self._thread: Thread | None = None

    def wake(self, writer: Writer) -> None:
        """Have committed what a writer has."""
        if self._process != os.getpid():
            self._start_over()
        with self._lock:
            if self._queue is None:
                self._queue = SimpleQueue()
                self._thread = Thread(
                    target=self._work, args=(self._queue,), name="clark-agent-log", daemon=True
                )
                self._thread.start()
            self._queue.put(writer)

    def stop(self) -> None:
        """Commit what there is, and end the thread. The next writer starts another."""
        if self._process != os.getpid():
            return
        with self._lock:
            queue, thread = self._queue, self._thread
            self._queue = self._thread = None
        if queue is not None and thread is not None:
            queue.put(None)
            if thread is not current_thread():  # which may be the last to let go of the store
                thread.join()

    def _work(self, queue: SimpleQueue[Writer | None]) -> None:
        is_over = False
        while not is_over:
            writers = _waiting(queue)
            is_over = None in writers
            self._commit([(writer, writer.take()) for writer in writers if writer is not None])
            del writers  # a thread that waits must not keep a store alive

    def _commit(self, writers: Sequence[tuple[Writer, bool]]) -> None:
        error: Exception | None = None
        try:
            if busy := [writer for writer, has_something in writers if has_something]:
                sync = any(writer.wants_sync for writer in busy)
                with self._connections.writing(sync=sync) as connection:
                    for writer in busy:
                        writer.write(connection)
        except Exception as failure:
            # A database that is locked or full fails for all; otherwise one of them is to blame.
            if len(writers) > 1 and not isinstance(failure, sqlite3.OperationalError):
                for pair in writers:
                    self._commit([pair])
                return
            error = failure
        _settle([writer.end(error) for writer, _ in writers])


def _waiting(queue: SimpleQueue[Writer | None]) -> list[Writer | None]:
    """All that are in the queue, once each; waits for the first."""
    writers: dict[Writer | None, None] = {queue.get(): None}
    try:
        while True:
            writers[queue.get_nowait()] = None
    except Empty:
        return list(writers)


def _settle(outcomes: Iterable[tuple[Sequence[Waiter], Exception | None]]) -> None:
    """Tell those who wait, with one call for each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[Waiter, Exception | None]]] = {}
    for waiters, error in outcomes:
        for waiter in waiters:
            loops.setdefault(waiter.loop, []).append((waiter, error))
    for loop, told in loops.items():
        try:
            loop.call_soon_threadsafe(_tell, told)
        except RuntimeError:  # the loop was closed: nobody waits any more
            continue


def _tell(told: Iterable[tuple[Waiter, Exception | None]]) -> None:
    for waiter, error in told:
        waiter.settle(error)
