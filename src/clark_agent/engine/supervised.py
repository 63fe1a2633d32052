"""Foreign code that is awaited in place, and left behind if it does not stop when it is cancelled.

Code of a host, a tool or a transport needs no task of its own to be cancellable. `Supervised` steps
its coroutine inside the task that awaits it, yields what the coroutine waits for, and so controls
what happens when that task is cancelled:

1. The cancellation is raised inside the coroutine.
2. If the coroutine continues, it has a grace to end: it may have something to clean up.
3. After that it is left behind: it continues in its own task, and nothing waits for it.

``asyncio.timeout`` and ``TaskGroup`` inside the coroutine cancel the task too, and undo that as
soon as it reaches them. Therefore only a cancellation that is still there when the grace is over
counts, and the next one has its own grace. Before Python 3.13 a ``TaskGroup`` does not undo one
that it makes at its end; that is done here.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import CoroutineType
from typing import Any, Final, NoReturn
from weakref import WeakSet

__all__ = ["UNSTARTED", "Supervised", "as_coroutine", "is_cancelled", "left_behind", "step"]

logger = logging.getLogger(__name__)

UNSTARTED: Final = object()
"""In place of the awaited object: the coroutine has not started."""

_left_behind: set[asyncio.Task[Any]] = set()
_innermost: dict[asyncio.Task[Any], Supervised] = {}
"""The innermost of the nested objects that a task awaits."""
_UNDO_FOR_GROUPS: Final = sys.version_info < (3, 13)
_END_OF_GROUP: Final = asyncio.TaskGroup.__aexit__
_undone: WeakSet[asyncio.TaskGroup] = WeakSet()


def is_cancelled() -> bool:
    """Whether the current task was cancelled.

    If not, a ``CancelledError`` was made by the code that raised it, and counts as its failure.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def left_behind() -> int:
    """The number of coroutines that were left behind and still run."""
    return len(_left_behind)


class Supervised:
    """Await it for the coroutine's result.

    When the awaiting task is cancelled, this ends within the grace, one way or another. ``what``
    names the code in the log.
    """

    __slots__ = (
        "_awaited",
        "_cancelling",
        "_cancels",
        "_coroutine",
        "_grace",
        "_grace_timer",
        "_leave",
        "_task",
        "_timers",
        "_what",
        "is_interrupted",
    )

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        awaited: Any = UNSTARTED,
        *,
        grace: float,
        what: str = "",
        cancelling: int | None = None,
    ) -> None:
        self._coroutine = coroutine
        self._awaited = awaited
        """What the coroutine waits for now."""
        self._grace = grace
        self._what = what
        self._task: asyncio.Task[Any] | None = None
        self._timers: list[asyncio.TimerHandle] | None = None
        self._grace_timer: asyncio.TimerHandle | None = None
        """Runs while there is a cancellation that was not undone."""
        self._cancelling = cancelling
        """How often the task was cancelled before the coroutine began; None until awaited."""
        self._cancels = 0
        self._leave = False
        self.is_interrupted = False
        """Whether a cancellation was raised inside the coroutine, even if it was swallowed."""

    def __await__(self) -> Generator[Any, Any, Any]:
        task = self._task = asyncio.current_task()
        assert task is not None
        if self._cancelling is None:
            self._cancelling = task.cancelling()
        outer = _innermost.get(task)
        _innermost[task] = self
        try:
            awaited = self._awaited
            if awaited is UNSTARTED:
                awaited = step(self._coroutine, None)
            # Like ``yield from`` with the coroutine, but it handles cancellations.
            while True:
                thrown: BaseException | None = None
                try:
                    yield _plain(awaited)
                except BaseException as error:
                    if isinstance(error, asyncio.CancelledError):
                        self.is_interrupted = True
                        if _UNDO_FOR_GROUPS:
                            self._undo_for_group()
                    if self._leave and isinstance(error, asyncio.CancelledError):
                        if _is_task_like(awaited):
                            awaited.add_done_callback(_retrieve)
                        _leave_behind(self._coroutine, error)
                        self._raise_left_behind()
                    if isinstance(error, asyncio.CancelledError) and _cancels(awaited):
                        self._time_grace()
                        continue
                    thrown = error
                awaited = step(self._coroutine, thrown)
                if thrown is not None or self._grace_timer is not None:
                    self._time_grace()
        except StopIteration as done:
            return done.value
        finally:
            if outer is None:
                del _innermost[task]
            else:
                _innermost[task] = outer
            self._end(task)

    def leave_after(self, seconds: float) -> None:
        """Leave the coroutine behind unless it ends in time, whether it was cancelled or not."""
        self._later(seconds, self._end_of_grace)

    def _end(self, task: asyncio.Task[Any]) -> None:
        """Undo the changes to the task: the coroutine is over, or left behind."""
        if self._timers is not None:
            for timer in self._timers:
                timer.cancel()
        for _ in range(self._cancels):
            task.uncancel()
        self._task = None

    def _raise_left_behind(self) -> NoReturn:
        logger.warning("%s did not stop when it was cancelled, and was left behind", self._what)
        raise asyncio.CancelledError

    def _is_cancelled_from_outside(self) -> bool:
        """Whether the task was cancelled from outside, and that was not undone."""
        task, before = self._task, self._cancelling
        if task is None or before is None:
            return False
        return task.cancelling() > before + self._cancels

    def _undo_for_group(self) -> None:
        """Undo the cancellation if a `TaskGroup` made it whose end the coroutine waits for."""
        waiting: Any = self._coroutine
        while isinstance(inner := getattr(waiting, "cr_await", None), CoroutineType):
            waiting = inner
        if getattr(waiting, "cr_code", None) is not _END_OF_GROUP.__code__:
            return
        group = waiting.cr_frame.f_locals["self"]
        if group._parent_cancel_requested and group not in _undone:
            _undone.add(group)
            if self._task is not None and self._is_cancelled_from_outside():
                self._task.uncancel()

    def _time_grace(self) -> None:
        """Start the grace of a cancellation, or end that of one that was undone."""
        timer = self._grace_timer
        if not self._is_cancelled_from_outside():
            if timer is not None:
                timer.cancel()
                self._grace_timer = None
        elif timer is None:
            self._grace_timer = self._later(self._grace, self._grace_is_over)

    def _grace_is_over(self) -> None:
        self._grace_timer = None
        self._leave_if_cancelled()

    def _leave_if_cancelled(self) -> None:
        """Handle a coroutine that continued after a cancellation: to clean up, or forever."""
        if self._is_cancelled_from_outside():
            self._end_of_grace()

    def _later(self, seconds: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        return self._at(asyncio.get_running_loop().time() + seconds, act)

    def _at(self, when: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.get_running_loop().call_at(when, act)
        if self._timers is None:
            self._timers = []
        self._timers.append(timer)
        return timer

    def _end_of_grace(self) -> None:
        if self._task is not None and _innermost.get(self._task) is not self:
            # It waits for another supervised coroutine, which ends first.
            self._later(self._grace, self._end_of_grace)
            return
        self._leave = True
        self._cancel_task()

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._cancels += 1
            self._task.cancel()


def as_coroutine(work: Awaitable[Any]) -> Coroutine[Any, Any, Any]:
    """A coroutine for any awaitable."""
    return work if type(work) is CoroutineType else _awaited(work)


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


def step(coroutine: Coroutine[Any, Any, Any], thrown: BaseException | None) -> Any:
    """Run the coroutine until it waits for something, and return that.

    The interpreter closes coroutines with ``GeneratorExit``, and nothing may be awaited after it.
    One that the coroutine raises by itself is a failure like any other.
    """
    try:
        return coroutine.send(None) if thrown is None else coroutine.throw(thrown)
    except GeneratorExit as error:
        if isinstance(thrown, GeneratorExit):
            raise
        raise RuntimeError("GeneratorExit was raised") from error


def _plain(awaited: Any) -> Any:
    """What to wait for instead, so that a cancellation is raised here at once.

    Cancelling a task that waits for another task cancels the other one, and keeps waiting for it.
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
    """Retrieve the exception, so that asyncio does not warn about it."""
    if not done.cancelled():
        done.exception()


def _cancels(awaited: Any) -> bool:
    """Cancel what is waited for. False: it cannot be cancelled, or is over."""
    return _is_task_like(awaited) and awaited.cancel()


class _Rest:
    """The rest of a coroutine, starting with an exception that it has not received yet."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], thrown: BaseException | None) -> None:
        self._coroutine = coroutine
        self._thrown = thrown

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            try:
                awaited = step(self._coroutine, self._thrown)
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
        logger.info("code that was left behind has failed: %r", task.exception())
