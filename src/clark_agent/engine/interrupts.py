"""What reaches into a run from outside: cancellation, a message that cannot wait, the end of time.

There is one mechanism for all three. What can be stopped right now is the ``handler``: it is called
with the reason. While there is none, a cancelled token cancels the run's task (without a task of
its own, as ``asyncio.timeout`` does it), and the others are noticed when the run asks `due`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Literal, Self, TypeAlias

from clark_agent._threads import call_in_loop
from clark_agent.budget import Meter
from clark_agent.cancellation import CancellationToken, Subscription
from clark_agent.clock import Timer, call_later
from clark_agent.engine.inbox import Inbox
from clark_agent.engine.journal import Journal
from clark_agent.engine.spending import Spending
from clark_agent.errors import RunAborted
from clark_agent.steering import SteerWhen

__all__ = ["Interrupts", "Intervention", "Why"]

Intervention: TypeAlias = Literal["steered", "out_of_time"]
"""Why something is not begun, or is broken off, in a run that goes on."""

Why: TypeAlias = Literal["aborted"] | Intervention


class Interrupts:
    """While it is entered, cancelling the token cancels the current task, at most once."""

    is_fired = False
    """Whether the token was cancelled."""
    expected = 0
    """How often the task counts as cancelled by the run itself."""
    handler: Callable[[Why], None] | None = None
    """Stops what is in flight, while there is something that can be stopped."""
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
        """Whether anything but a cancellation can reach into the run."""
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
        if not self.is_fired:  # otherwise the run finds out by itself, at a known point
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
        """The run is over. If that is because of the token, the task need not be cancelled for it:
        what is left to do would only be disturbed.
        """
        self._is_acted_on = self.is_fired

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
        """Whether the task was cancelled by something other than the run."""
        return self._cancelling() > self.expected

    def is_running(self) -> bool:
        """Whether the task is the one that runs now. Not when its coroutine is thrown away."""
        try:
            return self._task is not None and asyncio.current_task() is self._task
        except RuntimeError:  # there is no event loop any more
            return False

    def is_cancelled(self, noticed_by: int | None = None) -> bool:
        """Whether the run was cancelled, by its token or by its task. Callers act on it.

        A tool call that asks says which it is.
        """
        if self.is_fired or self._cancelling() > self.expected:
            self.note_cancelled(noticed_by)
            return True
        return False

    def check(self) -> None:
        """Raise if the run was cancelled, also when that was swallowed."""
        if self.is_fired or self._cancelling() > self.expected:
            self.note_cancelled()
            if self.cancelled_from_outside:
                raise asyncio.CancelledError
            raise RunAborted(self.signal.reason)

    def note_cancelled(self, noticed_by: int | None = None) -> None:
        """Have the journal know where the run was cancelled."""
        if not self._was_noted:
            self._was_noted = True
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
        """Why nothing more should be begun (before the next tool), or go on (now)."""
        if not self.can_intervene:
            return None
        if self._inbox.cannot_wait(when):
            return "steered"
        return "out_of_time" if self._spending.is_out_of_time else None

    def restored(self) -> None:
        """What other processes have left is known: messages that wait, and time that is spent."""
        self.can_intervene = self.can_intervene or self._inbox.can_interrupt
        self.start_timers()

    def _wake(self) -> None:
        """A message cannot wait. Called on any thread."""
        call_in_loop(self.loop, self._intervene)

    def _intervene(self) -> None:
        if self.handler is not None and (why := self.due(SteerWhen.NOW)) is not None:
            self.handler(why)

    def start_timers(self) -> None:
        """Have each budget of time interrupt the run when it is over, as long as the run lasts."""
        self.stop_timers()
        self._timers = tuple(
            [
                call_later(self._journal.clock, left, partial(self._out_of_time, meter))
                for meter in self._spending.meters
                if (left := meter.seconds_left()) is not None
            ]
        )

    def stop_timers(self) -> None:
        """Let no budget of time interrupt the run."""
        for timer in self._timers:
            timer.cancel()

    def _out_of_time(self, meter: Meter) -> None:
        self._journal.interrupted("out_of_time")
        meter.is_out_of_time = True
        self._intervene()
