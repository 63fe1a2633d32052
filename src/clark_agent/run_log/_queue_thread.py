"""A thread that works through a queue, for a store that commits outside the event loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Generic, TypeVar

__all__ = ["QueueThread", "distinct_items"]

_T = TypeVar("_T")


class QueueThread(Generic[_T]):
    """Starts a thread when the first item comes, and another one if an item comes after `stop`.

    ``work`` gets the queue, and returns after it has taken ``last`` from it. Safe to use from any
    thread.
    """

    def __init__(self, work: Callable[[SimpleQueue[_T]], None], *, last: _T) -> None:
        self._work = work
        self._last = last
        self._lock = Lock()
        self._queue: SimpleQueue[_T] | None = None
        self._thread: Thread | None = None

    def put(self, item: _T) -> None:
        """Have the thread work on an item."""
        with self._lock:
            if self._queue is None:
                self._queue = SimpleQueue()
                self._thread = Thread(
                    target=self._work, args=(self._queue,), name="clark-agent-log", daemon=True
                )
                self._thread.start()
            self._queue.put(item)

    def stop(self) -> None:
        """Have the thread work on everything, and end."""
        with self._lock:
            queue, thread = self._queue, self._thread
            self._queue = self._thread = None
        if queue is not None and thread is not None:
            queue.put(self._last)
            if thread is not current_thread():  # it may drop the last reference to the store
                thread.join()

    def uses(self, queue: SimpleQueue[_T]) -> bool:
        """Whether this is the queue of the running thread: it was not stopped meanwhile."""
        return self._queue is queue


def distinct_items(queue: SimpleQueue[_T], *, most: int | None = None) -> list[_T]:
    """Return the distinct items of a queue, in order. Waits for the first."""
    found: dict[_T, None] = {queue.get(): None}
    with suppress(Empty):
        while most is None or len(found) < most:
            found[queue.get_nowait()] = None
    return list(found)
