"""Lets a token cancel the task that runs under it, without a task of its own.

The same way as ``asyncio.timeout``: the task is cancelled from outside and the cancellation is
taken back when it has done its work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from clark_agent.cancellation import CancellationToken, Subscription

__all__ = ["CancelScope", "is_cancelled"]


def is_cancelled() -> bool:
    """Whether somebody has cancelled the current task.

    Without that a ``CancelledError`` is of the making of the code that raised it, and counts as its
    failure.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class CancelScope:
    """While it is entered, cancelling the token cancels the current task, at most once.

    ``interrupt`` can be set to something else to do instead, for a while: a tool batch ends its
    calls in its own way.
    """

    __slots__ = (
        "_cancels",
        "_subscription",
        "_task",
        "_token",
        "expected",
        "interrupt",
        "is_fired",
        "noticed",
    )

    def __init__(self, token: CancellationToken) -> None:
        self._token = token
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancels = 0
        self.expected = 0
        """How often the task counts as cancelled without anybody else's doing."""
        self.interrupt: Callable[[], None] | None = None
        self.is_fired = False
        """Whether the token was cancelled."""
        self.noticed: Callable[[], None] | None = None
        """Called in the event loop when the token was cancelled, before anything is stopped."""

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self.expected = 0 if self._task is None else self._task.cancelling()
        self.is_fired = self._token.cancelled
        if not self.is_fired:  # otherwise the run finds out by itself, at a known point
            self._subscription = self._token.subscribe(self._fire_from_any_thread)
        return self

    def _fire_from_any_thread(self) -> None:
        self.is_fired = True
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._fire)

    def _fire(self) -> None:
        task = self._task
        if task is None:
            return
        if self.noticed is not None:
            self.noticed()
        if self.interrupt is not None:
            self.interrupt()
        else:
            self.cancel_task()

    def cancel_task(self) -> None:
        """Cancel the task now; taken back on exit."""
        if self._task is not None:
            self._cancels += 1
            self.expected += 1
            self._task.cancel()

    def take_back(self) -> None:
        """What `cancel_task` was called for is done; the task goes on."""
        if self._task is not None:
            self._cancels -= 1
            self.expected -= 1
            self._task.uncancel()

    @property
    def cancelled_from_outside(self) -> bool:
        """Whether somebody else has cancelled the task since the scope was entered."""
        task = self._task
        return task is not None and task.cancelling() > self.expected

    def is_running(self) -> bool:
        """Whether the task is the one that runs now. Not when its coroutine is thrown away."""
        try:
            return self._task is not None and asyncio.current_task() is self._task
        except RuntimeError:  # there is no event loop any more
            return False

    def is_cancelled(self) -> bool:
        """Whether the token was cancelled, or the task by somebody else."""
        task = self._task
        return self.is_fired or (task is not None and task.cancelling() > self.expected)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._subscription is not None:
            self._subscription.close()
        task, self._task = self._task, None
        if task is not None:
            for _ in range(self._cancels):
                task.uncancel()
