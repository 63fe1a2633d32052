"""Commits the records of runs so that no event loop waits for a database.

A commit that need not wait is made at once by its caller, which takes less time than to wake a
thread. While several runs are open, all records of one iteration of the event loop go into one
transaction. If another process or thread is writing, or the commit must wait for the disk, a thread
commits for all runs at once, and the event loop continues. The thread also commits when no event
loop runs.

The thread is started when it is needed, and ends with its store. A forked process starts its own.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import Enum, auto
from queue import SimpleQueue
from threading import Lock
from typing import Protocol, TypeAlias

from clark_agent.run_log._database import Connections
from clark_agent.run_log._queue_thread import QueueThread, distinct_items

__all__ = ["Committer", "Outcome", "Waiter", "Writer", "running_loop", "settle"]


class Waiter:
    """A task that waits for a commit in its event loop."""

    __slots__ = ("future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def settle(self, error: Exception | None) -> None:
        """Report the end of the commit. Called in the event loop."""
        if self.future.done():  # the waiting task was cancelled
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class Writer(Protocol):
    """A source of records to commit. The holder of the database lock calls the methods, one at a
    time.
    """

    @property
    def has_something(self) -> bool:
        """Whether there are records to write, or a task waits for confirmation."""
        ...

    @property
    def wants_sync(self) -> bool:
        """Whether the commit must wait for the disk."""
        ...

    def take(self) -> bool:
        """Select the records to write, and their waiters. Return whether there are records."""
        ...

    def put_back(self) -> None:
        """Undo `take`: the selected records will be written later."""
        ...

    def write(self, connection: sqlite3.Connection, /) -> None:
        """Write the selected records, within a transaction."""
        ...

    def end(self, error: Exception | None, /) -> tuple[Sequence[Waiter], Exception | None]:
        """Report that the selected records are committed, or that it failed. Returns the waiters,
        and the error to raise for them.
        """
        ...


class _Order(Enum):
    """Other orders for the thread."""

    CHECKPOINT = auto()
    STOP = auto()


_CHECKPOINT = 1000
"""The number of immediate commits after which a checkpoint is worthwhile."""


class Committer:
    """Commits the records of writers soon after a request. Safe to use from any thread."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._start_over()
        connections.when_forked = self._start_over

    def _start_over(self) -> None:
        self._lock = Lock()
        self._thread = QueueThread[Writer | _Order](self._work, last=_Order.STOP)
        self._due: dict[asyncio.AbstractEventLoop, list[Writer]] = {}
        """The writers to commit at the end of this iteration, by event loop."""
        self._commits = 0
        """The number of immediate commits since the last checkpoint."""
        self._open_writers = 0

    def count(self, more: int) -> None:
        """Adjust the number of open writers."""
        with self._lock:
            self._open_writers += more

    def commit(self, writer: Writer) -> bool:
        """Commit at once if this is the only open writer and nothing must be waited for. Otherwise
        commit soon. Return whether it was at once.
        """
        if self._open_writers == 1 and self._commit_at_once([writer]):
            return True
        self.commit_soon(writer)
        return False

    def commit_soon(self, writer: Writer) -> None:
        """Schedule a commit: at the end of this iteration of the event loop if possible, otherwise
        by the thread.
        """
        loop = running_loop()
        if loop is None:
            self.wake(writer)
            return
        due = self._due.get(loop)
        if due is None:
            for other in list(self._due):
                if other.is_closed():  # it was closed before the callback ran
                    del self._due[other]
            due = self._due[loop] = []
            loop.call_soon(self._commit_due, loop)
        due.append(writer)

    def _commit_due(self, loop: asyncio.AbstractEventLoop) -> None:
        writers = [w for w in dict.fromkeys(self._due.pop(loop)) if w.has_something]
        if writers and not self._commit_at_once(writers):
            for writer in writers:
                self.wake(writer)

    def _commit_at_once(self, writers: list[Writer]) -> bool:
        """Commit if nothing must be waited for. Return False if nothing was done."""
        lock = self._connections.lock
        for writer in writers:
            if writer.wants_sync:
                return False
        if not lock.acquire(blocking=False):
            return False
        try:
            connection = self._connections.hasty
            outcomes = None if connection is None else _committed(connection, writers)
        finally:
            lock.release()
        if outcomes is None:
            return False
        settle(outcomes)
        self._commits += 1
        if self._commits >= _CHECKPOINT:
            self._commits = 0
            self.wake(_Order.CHECKPOINT)
        return True

    def wake(self, writer: Writer | _Order) -> None:
        """Have the thread commit the records of a writer, or execute an order."""
        self._thread.put(writer)

    def stop(self) -> None:
        """Commit everything, and end the thread. The next writer starts another."""
        self._thread.stop()

    def _work(self, queue: SimpleQueue[Writer | _Order]) -> None:
        orders: set[_Order] = set()
        while _Order.STOP not in orders:
            found = distinct_items(queue)
            orders = {order for order in found if isinstance(order, _Order)}
            self._commit([writer for writer in found if not isinstance(writer, _Order)])
            del found  # a waiting thread must not keep a store alive
            with suppress(Exception):  # writers get such errors from their commits
                if _Order.CHECKPOINT in orders:
                    self._connections.checkpoint()
                if self._thread.uses(queue):  # otherwise it was stopped, perhaps by the line above
                    self._connections.open_hasty()

    def _commit(self, writers: Sequence[Writer]) -> None:
        """Commit, and wait as long as necessary."""
        error: Exception | None = None
        with self._connections.lock:
            taken = [(writer, writer.take()) for writer in writers]
            try:
                if busy := [writer for writer, has_something in taken if has_something]:
                    sync = any(writer.wants_sync for writer in busy)
                    with self._connections.transaction(sync=sync) as connection:
                        for writer in busy:
                            writer.write(connection)
            except sqlite3.OperationalError as failure:  # locked or full: the same for all writers
                error = failure
            except Exception as failure:
                error = failure
                if len(writers) > 1:  # one of the writers caused it
                    for writer in writers:
                        writer.put_back()
                    taken = []
            outcomes = [writer.end(error) for writer, _ in taken]
        settle(outcomes)
        for writer in writers if not taken else ():
            self._commit([writer])


Outcome: TypeAlias = tuple[Sequence[Waiter], Exception | None]


def _committed(connection: sqlite3.Connection, writers: Sequence[Writer]) -> list[Outcome] | None:
    """Commit at once. If that is not possible, undo everything and return None."""
    taken: list[tuple[Writer, bool]] = []
    try:
        connection.execute("BEGIN IMMEDIATE")
        taken = [(writer, writer.take()) for writer in writers]
        for writer, has_something in taken:
            if has_something:
                writer.write(connection)
        connection.execute("COMMIT")
    except BaseException as error:
        # Ctrl-C may arrive right after the commit: then it is committed.
        is_committed = not isinstance(error, Exception) and not connection.in_transaction
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if is_committed:
            settle([writer.end(None) for writer, _ in taken])
        else:
            for writer, _ in taken:
                writer.put_back()
        if isinstance(error, Exception):  # the thread retries, and reports the error
            return None
        raise
    return [writer.end(None) for writer in writers]


def settle(outcomes: Iterable[Outcome]) -> None:
    """Notify the waiters, with one call for each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[Waiter, Exception | None]]] = {}
    for waiters, error in outcomes:
        for waiter in waiters:
            loops.setdefault(waiter.loop, []).append((waiter, error))
    if not loops:
        return
    here = running_loop()
    for loop, settled in loops.items():
        if loop is here:
            _notify(settled)
            continue
        with suppress(RuntimeError):  # the loop is closed, so its waiters are gone
            loop.call_soon_threadsafe(_notify, settled)


def _notify(settled: Iterable[tuple[Waiter, Exception | None]]) -> None:
    for waiter, error in settled:
        waiter.settle(error)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of this thread, if it runs one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
