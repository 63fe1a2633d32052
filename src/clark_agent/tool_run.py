"""One tool call in progress, awaited in place, which can be stopped and in the end left behind.

A tool is not given a task merely to be cancellable. `ToolRun` steps the tool's coroutine inside the
task that awaits it, passing on what it waits for, and so stands between the two when that task is
cancelled. It starts with the first thing that the tool waits for: a tool that never waits needs
none of this.

1. The call's token is cancelled. A tool that waits on it, or runs in a thread, may end by itself.
2. Then, and for any other tool at once, the cancellation is raised inside the coroutine.
3. What has not ended when the grace is over is left behind: it goes on in a task of its own,
   nobody waits for it, and its result says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from clark_agent.base_tool import ToolContext

__all__ = ["ToolLeftBehindError", "ToolRun", "left_behind"]

logger = logging.getLogger(__name__)

_left_behind: set[asyncio.Task[Any]] = set()


def left_behind() -> int:
    """How many calls go on although nobody waits for them any more."""
    return len(_left_behind)


class ToolLeftBehindError(Exception):
    """The call did not end within the grace and still goes on."""


class ToolRun:
    """Await it for the tool's result. After `stop` it ends within the grace, one way or another."""

    __slots__ = (
        "_awaited",
        "_cancelling",
        "_cancels",
        "_context",
        "_coroutine",
        "_grace",
        "_in_thread",
        "_leave",
        "_task",
        "_timers",
        "cancelled_from_outside",
        "stopped",
    )

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        awaited: Any,
        context: ToolContext,
        *,
        grace: float,
        cancelling: int = 0,
        in_thread: bool = False,
    ) -> None:
        self._coroutine = coroutine
        self._awaited = awaited
        """What the coroutine waits for by now."""
        self._context = context
        self._grace = grace
        self._in_thread = in_thread
        self._task: asyncio.Task[Any] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._cancelling = cancelling
        """How often the task was cancelled before the tool began."""
        self._cancels = 0
        self._leave = False
        self.stopped: str | None = None
        """Why the call was stopped, if it was."""
        self.cancelled_from_outside = False
        """Whether it was the awaiting task that somebody cancelled."""

    def stop_at(self, when: float, why: str) -> None:
        """Stop the call unless it has ended by then, on the event loop's clock."""
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_at(when, lambda: self.stop(why)))

    def stop(self, why: str) -> None:
        """Make the call end. The first reason stays."""
        if self.stopped is not None:
            return
        self.stopped = why
        self._context.signal.cancel(why)
        if self._in_thread:
            self._later(self._grace, self._end_of_grace)
        elif self._context.is_watched:
            self._later(self._grace / 2, self._interrupt)
        else:
            self._interrupt()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, act))

    def _interrupt(self) -> None:
        """Raise the cancellation in the tool. It has the rest of the grace to end.

        Unless the run itself is over, a listener that works on the tool's progress is not
        disturbed: then the cancellation comes after it.
        """
        if self._context.is_reporting and self.stopped != "aborted":
            loop = asyncio.get_running_loop()
            self._context.when_reported = lambda: loop.call_soon(self._interrupt)
        elif self._task is not None:  # otherwise it has ended in the meantime
            self._context.when_reported = None
            self._cancel_task()
            self._later(self._grace / 2, self._end_of_grace)

    def _end_of_grace(self) -> None:
        self._leave = True
        self._cancel_task()

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._cancels += 1
            self._task.cancel()

    def __await__(self) -> Generator[Any, Any, Any]:
        task = self._task = asyncio.current_task()
        assert task is not None
        awaited = self._awaited
        try:
            # What ``yield from`` does with the coroutine, with an eye on cancellations.
            while True:
                thrown: BaseException | None = None
                try:
                    yield _plain(awaited)
                except BaseException as error:
                    if self._leave and isinstance(error, asyncio.CancelledError):
                        if _is_task_like(awaited):
                            awaited.add_done_callback(_retrieve)
                        _leave_behind(self._coroutine, error)
                        raise ToolLeftBehindError from None
                    if isinstance(error, asyncio.CancelledError) and _cancels(awaited):
                        self._leave_after_grace()
                        continue
                    thrown = error
                try:
                    awaited = _step(self._coroutine, thrown)
                except StopIteration as done:
                    return done.value
                if thrown is not None:
                    self._leave_after_grace()
        finally:
            for timer in self._timers:
                timer.cancel()
            self.cancelled_from_outside = self._is_cancelled_from_outside()
            if self.cancelled_from_outside:
                self._context.signal.cancel("aborted")  # for a thread that goes on alone
            for _ in range(self._cancels):
                task.uncancel()
            self._task = None

    def _is_cancelled_from_outside(self) -> bool:
        """Whether the task has been cancelled by others.

        Not at once when a cancellation is raised: ``asyncio.timeout`` and ``TaskGroup`` inside a
        tool cancel its task too, and take that back as soon as it reaches them.
        """
        task = self._task
        return task is not None and task.cancelling() > self._cancelling + self._cancels

    def _leave_after_grace(self) -> None:
        if self._is_cancelled_from_outside():
            self._later(self._grace, self._leave_if_cancelled)

    def _leave_if_cancelled(self) -> None:
        """The tool has gone on although its task was cancelled: to clean up, or for ever."""
        if self.stopped is None and self._is_cancelled_from_outside():
            self.stopped = "aborted"
            self._context.signal.cancel("aborted")
            self._end_of_grace()


def _plain(awaited: Any) -> Any:
    """What to wait for in its stead, so that a cancellation comes back to us at once.

    To cancel a task that waits for another task is to cancel that one, and to wait on.
    """
    if not _is_task_like(awaited):
        return awaited
    awaited._asyncio_future_blocking = False
    woken = awaited.get_loop().create_future()

    def wake(_: object) -> None:
        awaited.remove_done_callback(wake)
        if not woken.done():
            woken.set_result(None)

    awaited.add_done_callback(wake)
    woken.add_done_callback(wake)
    woken._asyncio_future_blocking = True
    return woken


def _is_task_like(awaited: Any) -> bool:
    return type(awaited) is not asyncio.Future and asyncio.isfuture(awaited)


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Take notice of how it ended, since nobody else will."""
    if not done.cancelled():
        done.exception()


def _cancels(awaited: Any) -> bool:
    """Pass a cancellation on to what is waited for. False: it cannot be, or is over."""
    return _is_task_like(awaited) and awaited.cancel()


def _step(coroutine: Coroutine[Any, Any, Any], thrown: BaseException | None) -> Any:
    return coroutine.send(None) if thrown is None else coroutine.throw(thrown)


class _Rest:
    """What is left of a coroutine, from the exception on that it has not been given yet."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], thrown: BaseException | None) -> None:
        self._coroutine = coroutine
        self._thrown = thrown

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            try:
                awaited = _step(self._coroutine, self._thrown)
            except StopIteration as done:
                return done.value
            self._thrown = None
            try:
                yield awaited
            except BaseException as error:
                self._thrown = error


async def _finish(rest: _Rest) -> None:
    await rest


def _leave_behind(coroutine: Coroutine[Any, Any, Any], thrown: BaseException) -> None:
    task = asyncio.ensure_future(_finish(_Rest(coroutine, thrown)))
    _left_behind.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled() and task.exception() is not None:
        logger.info("a tool that was left behind failed in the end: %r", task.exception())
