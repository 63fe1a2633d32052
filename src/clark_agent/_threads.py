"""Threads for synchronous tools.

A separate pool, because the event loop's default executor is shared with name lookups and file
access, has a fixed size that waiting tools would use up, and is joined when the interpreter exits,
so that one hanging tool would keep the process alive. Here every call gets a thread at once, idle
threads are reused and end after a while, and all of them are daemons.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

__all__ = ["WorkerThreads", "call_in_loop", "has_running_loop", "is_running", "run_in_thread"]

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def has_running_loop() -> bool:
    """Whether this is the thread of a running event loop, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_running(loop: asyncio.AbstractEventLoop | None) -> bool:
    """Whether this code runs in the event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def call_in_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object
) -> bool:
    """Call something soon in an event loop, from any thread. False: the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except NotImplementedError:  # an event loop that only its own thread can reach
        loop.call_soon(call, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        logger.debug("the event loop was closed before the call")
        return False
    return True


class _Job:
    """One call, and where its outcome goes."""

    __slots__ = ("call", "context", "error", "future", "loop", "value")

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.context: Context = copy_context()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.context.run(self.call)
        except StopIteration as stop:  # a future rejects it, and its waiter would wait forever
            self.error = RuntimeError("the function raised StopIteration")
            self.error.__cause__ = stop
        except BaseException as error:
            self.error = error

    def deliver(self) -> None:
        call_in_loop(self.loop, self._settle)

    def _settle(self) -> None:
        if self.future.done():  # the waiting task was cancelled
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


class WorkerThreads:
    """As many daemon threads as there are calls at a time, kept for ``idle_seconds`` after."""

    def __init__(self, name: str, *, idle_seconds: float = 10.0) -> None:
        self._name = name
        self._idle_seconds = idle_seconds
        self._numbers = count(1)
        self._idle: list[SimpleQueue[_Job]] = []

    async def run(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call the function in a thread, with the caller's context variables.

        When the awaiting task is cancelled, the thread continues and its outcome is dropped.
        """
        job = _Job(lambda: function(*args, **kwargs))
        try:
            self._idle.pop().put(job)  # the last to become idle: the others may time out
        except IndexError:
            # A thread keeps its arguments for as long as it lives: the queue, but not the job.
            jobs: SimpleQueue[_Job] = SimpleQueue()
            jobs.put(job)
            name = f"{self._name}-{next(self._numbers)}"
            threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True).start()
        result: _R = await job.future
        return result

    def _work(self, jobs: SimpleQueue[_Job]) -> None:
        while True:
            try:
                job = jobs.get(timeout=self._idle_seconds)
            except Empty:
                try:
                    self._idle.remove(jobs)
                except ValueError:  # another call has just taken this thread: its job is on the way
                    continue
                return
            job.run()
            self._idle.append(jobs)  # first: the caller may call again at once
            job.deliver()
            del job  # an idle thread keeps no references

    def forget(self) -> None:
        """Give up the idle threads. A forked child has none of its parent's."""
        self._idle.clear()


_threads = WorkerThreads("clark-agent-tool")
run_in_thread = _threads.run

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.forget)
