"""One tool call in progress, which can be stopped and, as a last resort, left behind.

It starts when the tool first waits for something: a tool that never waits needs none of this.

1. The call's token is cancelled. A tool that waits on it, or runs in a thread, may end by itself;
   any tool may if the run is let go, since a result is better than a call that is uncertain.
2. Then, and for any other tool at once, the cancellation is raised inside the coroutine.
3. A tool that has not ended when the grace is over is left behind: it continues in its own task,
   the run does not wait for it, and the result says that it may still be running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn

from clark_agent.cancellation import LET_GO
from clark_agent.engine.supervised import Supervised
from clark_agent.tools.base import ToolContext

__all__ = ["ToolLeftBehindError", "ToolTask"]


class ToolLeftBehindError(Exception):
    """The call did not end within the grace and still runs."""


class ToolTask(Supervised):
    """Await it for the tool's result. After `stop` it always ends within the grace."""

    __slots__ = ("_context", "_in_thread", "cancelled_from_outside", "stopped")

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
        super().__init__(coroutine, awaited, grace=grace, cancelling=cancelling)
        self._context = context
        self._in_thread = in_thread
        self.stopped: str | None = None
        """Why the call was stopped, if it was."""
        self.cancelled_from_outside = False
        """Whether the task that awaits it was cancelled."""

    @property
    def why(self) -> str | None:
        """Why it was cancelled; None if it cancelled itself."""
        return "aborted" if self.cancelled_from_outside else self.stopped

    def stop_at(self, when: float, why: str) -> None:
        """Stop the call unless it has ended by then, on the event loop's clock."""
        self._at(when, lambda: self.stop(why))

    def stop(self, why: str) -> None:
        """Make the call end. The first reason counts."""
        if self.stopped is not None:
            return
        self.stopped = why
        if self._context.signal.reason is None:  # keep a reason that was given before
            self._context.signal.cancel(why)
        if self._in_thread:
            self._later(self._grace, self._end_of_grace)
        elif self._context.is_watched or self._context.signal.reason == LET_GO:
            self._later(self._grace / 2, self._interrupt)
        else:
            self._interrupt()

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

    def _raise_left_behind(self) -> NoReturn:
        raise ToolLeftBehindError

    def _end(self, task: asyncio.Task[Any]) -> None:
        self.cancelled_from_outside = self._is_cancelled_from_outside()
        if self.cancelled_from_outside:
            self._context.signal.cancel("aborted")  # for a thread that still runs
        super()._end(task)

    def _leave_if_cancelled(self) -> None:
        if self.stopped is None and self._is_cancelled_from_outside():
            self.stopped = "aborted"
            self._context.signal.cancel("aborted")
            self._end_of_grace()
