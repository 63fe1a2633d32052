"""What interrupts a run from outside: cancellation, an urgent message, the end of its time.

There is one mechanism for all three. While something can be stopped, it sets the ``handler``, which
is called with the reason. Without a handler, a cancelled token cancels the run's task (without a
task of its own, as ``asyncio.timeout`` does it), and the others take effect when the run calls
`due`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Literal, Self, TypeAlias

from clark_agent._threads import call_in_loop
from clark_agent.budget import Meter
from clark_agent.cancellation import LET_GO, CancellationToken, Subscription
from clark_agent.clock import Timer, call_later
from clark_agent.engine.inbox import Inbox
from clark_agent.engine.journal import Journal
from clark_agent.engine.spending import Spending
from clark_agent.errors import RunAborted, RunLetGo
from clark_agent.steering import SteerWhen

__all__ = ["Interrupts", "Intervention", "Why"]

Intervention: TypeAlias = Literal["steered", "out_of_time"]
"""Why something is not started, or is stopped, in a run that continues."""

Why: TypeAlias = Literal["aborted"] | Intervention


class Interrupts:
    """While it is entered, cancelling the token cancels the current task, at most once."""

    is_fired = False
    """Whether the token was cancelled."""
    expected = 0
    """How often the task counts as cancelled by the run itself."""
    handler: Callable[[Why], None] | None = None
    """Stops what is in progress, while that can be stopped."""
    _subscription: Subscription | None = None
    _task: asyncio.Task[object] | None = None
    _cancelling: Callable[[], int] = int
    """How often the task was cancelled."""
    _cancels = 0
    _was_noted = False
    _is_acted_on = False
    _timers: tuple[Timer, ...] = ()

    def __init__(
        self, signal: CancellationToken, inbox: Inbox, spending: Spending, journal: Journal
    ) -> None:
        self.signal = signal
        self.loop = asyncio.get_running_loop()
        self._inbox = inbox
        self._spending = spending
        self._journal = journal
        self.can_intervene = inbox.can_interrupt or bool(spending.meters)
        """Whether anything but a cancellation can interrupt the run."""
        self.may_intervene = self.can_intervene or journal.receives
        """The same, or the journal may receive a message later."""
        if self.can_intervene:
            inbox.listen(self._wake)
            self.start_timers()

    # --- cancellation ---------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        if self._task is not None:
            self._cancelling = self._task.cancelling
        self.expected = self._cancelling()
        self.is_fired = self.signal.cancelled
        if not self.is_fired:  # otherwise the run notices by itself, at a known point
            self._subscription = self.signal.subscribe(self._fire_from_any_thread)
        return self

    def _fire_from_any_thread(self) -> None:
        self.is_fired = True
        call_in_loop(self.loop, self._fire)

    def _fire(self) -> None:
        if self._task is None or self._is_acted_on:
            return
        self.note_cancelled()
        if self.handler is not None:
            self.handler("aborted")
        else:
            self.cancel_task()

    def closing(self) -> None:
        """Note that the run is over. The token then no longer cancels the task, which would only
        disturb the cleanup.
        """
        self._is_acted_on = self.is_fired

    def cancel_task(self) -> None:
        """Cancel the task now; undone on exit."""
        if self._task is not None:
            self._cancels += 1
            self.expected += 1
            self._task.cancel()

    def take_back(self) -> None:
        """Undo `cancel_task` after it had its effect; the task continues."""
        if self._task is not None:
            self._cancels -= 1
            self.expected -= 1
            self._task.uncancel()

    @property
    def cancelled_from_outside(self) -> bool:
        """Whether the task was cancelled by something other than the run."""
        return self._cancelling() > self.expected

    def is_running(self) -> bool:
        """Whether the task is the one that runs now. False while its coroutine is garbage
        collected.
        """
        try:
            return self._task is not None and asyncio.current_task() is self._task
        except RuntimeError:  # the event loop is gone
            return False

    def is_cancelled(self, noticed_by: int | None = None) -> bool:
        """Whether the run was cancelled, by its token or by its task. Callers act on it.

        A tool call passes its position as ``noticed_by``.
        """
        if self.is_fired or self._cancelling() > self.expected:
            self.note_cancelled(noticed_by)
            return True
        return False

    @property
    def is_let_go(self) -> bool:
        """Whether this process gives the run up without ending it."""
        return self.is_fired and self.signal.reason == LET_GO

    def check(self) -> None:
        """Raise if the run was cancelled, even if the cancellation was swallowed."""
        if self.is_fired or self._cancelling() > self.expected:
            self.note_cancelled()
            if self.cancelled_from_outside:
                raise asyncio.CancelledError
            raise RunLetGo() if self.is_let_go else RunAborted(self.signal.reason)

    def note_cancelled(self, noticed_by: int | None = None) -> None:
        """Record in the journal where the run was cancelled."""
        if not self._was_noted:
            self._was_noted = True
            if self.is_let_go:
                self._journal.let_go()
            self._journal.interrupted("cancelled", noticed_by)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._subscription is not None:
            self._subscription.close()
        if self._timers:
            self.stop_timers()
        task, self._task, self._cancelling = self._task, None, int
        if task is not None and self._cancels:
            for _ in range(self._cancels):
                task.uncancel()

    # --- interventions --------------------------------------------------------------------------

    def due(self, when: SteerWhen) -> Intervention | None:
        """Why nothing more should start (before the next tool), or continue (now)."""
        if not self.can_intervene:
            return None
        if self._inbox.cannot_wait(when):
            return "steered"
        return "out_of_time" if self._spending.is_out_of_time else None

    def restored(self) -> None:
        """Take waiting messages and spent time into account, after a resume."""
        self.can_intervene = self.can_intervene or self._inbox.can_interrupt
        self.may_intervene = self.may_intervene or self.can_intervene
        self.start_timers()

    def received(self) -> None:
        """Take a message into account that has just arrived from another process."""
        self.can_intervene = True
        self._wake()

    def _wake(self) -> None:
        """Interrupt for an urgent message. Called on any thread."""
        call_in_loop(self.loop, self._intervene)

    def _intervene(self) -> None:
        if self.handler is not None and (why := self.due(SteerWhen.NOW)) is not None:
            self.handler(why)

    def start_timers(self) -> None:
        """Interrupt the run when a time budget is over, as long as the run lasts."""
        self.stop_timers()
        self._timers = tuple(
            [
                call_later(self._journal.clock, left, partial(self._out_of_time, meter))
                for meter in self._spending.meters
                if (left := meter.seconds_left()) is not None
            ]
        )

    def stop_timers(self) -> None:
        """Stop the timers of `start_timers`."""
        for timer in self._timers:
            timer.cancel()

    def _out_of_time(self, meter: Meter) -> None:
        self._journal.interrupted("out_of_time")
        meter.is_out_of_time = True
        self._intervene()
