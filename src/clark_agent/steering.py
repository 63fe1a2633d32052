"""Talking to a running agent: when a message takes effect, and what became of it.

A `SteeringHandle` (from `clark_agent.plugins.ChannelSteering`) takes messages from any thread and
any signal handler, and gives a `SteeringReceipt` for each. There is no lock, for the reason that
`clark_agent.cancellation` gives: a message is queued first and then it is asked whether anybody
still listens; a run that ends says so first and then empties the queue; whatever takes an entry out
(one atomic ``popleft`` or ``remove``) is the one to settle its receipt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from enum import StrEnum
from threading import Event
from typing import Any, Literal, Self, TypeAlias

from clark_agent._threads import has_running_loop
from clark_agent.cancellation import CancellationToken
from clark_agent.intake import accept_messages
from clark_agent.types import AgentMessage, UserMessage

__all__ = ["SteerWhen", "SteeringHandle", "SteeringReceipt", "SteeringStatus"]


class SteerWhen(StrEnum):
    """How soon a message is put before the model."""

    AFTER_BATCH = "after_batch"
    """With the next turn. Nothing in flight is disturbed."""
    BEFORE_NEXT_TOOL = "before_next_tool"
    """Calls of the batch that have not started are not run; those that run end as usual."""
    NOW = "now"
    """What is in flight is stopped too: the model's answer, or the running tools."""


When: TypeAlias = SteerWhen | Literal["after_batch", "before_next_tool", "now"]
"""A `SteerWhen`, or its name."""


class SteeringStatus(StrEnum):
    """What has become of a message."""

    QUEUED = "queued"
    DELIVERED = "delivered"
    """It is in the transcript."""
    EXPIRED = "expired"
    """The run was over before it could be delivered."""


class SteeringReceipt:
    """Tells what becomes of a message. ``await`` it to wait until that is settled; it is its own
    result. From a thread without an event loop use `wait`.

    A tool must not await the receipt of a message that waits for the tool to end.
    """

    __slots__ = ("_settled", "is_follow_up", "message", "status", "turn", "when")

    def __init__(self, message: AgentMessage, when: SteerWhen) -> None:
        self.message = message
        self.when = when
        self.is_follow_up = False
        """Whether it waits for the model to stop."""
        self.status = SteeringStatus.QUEUED
        self.turn: int | None = None
        """The turn of the run that it was delivered in, from 1. None while it is not, and for a
        follow-up that was left in the transcript when no turn remained."""
        self._settled = CancellationToken()

    @property
    def is_settled(self) -> bool:
        """Whether it is delivered or expired."""
        return self._settled.cancelled

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self._settled.wait().__await__()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until it is settled, for so many seconds at most; whether it is.

        Raises `RuntimeError` on the thread of an event loop, which it would stop: await it there.
        """
        if self.is_settled:
            return True
        if timeout != 0 and has_running_loop():
            raise RuntimeError("wait() would stop the event loop: use 'await receipt'")
        settled = Event()
        subscription = self._settled.subscribe(settled.set)
        try:
            return settled.wait(timeout)
        finally:
            subscription.close()

    def settle(self, status: SteeringStatus, turn: int | None = None) -> None:
        """Say what has become of the message. Called by what took it out of the queue."""
        self.turn = turn
        self.status = status
        self._settled.cancel()

    def __repr__(self) -> str:
        where = "" if self.turn is None else f" in turn {self.turn}"
        return f"<SteeringReceipt {self.status}{where}>"


class Channel:
    """What a handle and the runs that listen to it share."""

    __slots__ = ("ended", "follow_ups", "listeners", "steering", "watchers")

    def __init__(self) -> None:
        self.steering: deque[SteeringReceipt] = deque()
        self.follow_ups: deque[SteeringReceipt] = deque()
        self.listeners: dict[object, Callable[[], None] | None] = {}
        """The runs that listen, each with what wakes it."""
        self.watchers: dict[object, Callable[[SteeringReceipt], None]] = {}
        """The runs that want to know of every message."""
        self.ended = False
        """Whether a run has listened and ended."""

    @property
    def is_over(self) -> bool:
        """Whether no run will take messages any more."""
        return self.ended and not self.listeners

    def send(self, queue: deque[SteeringReceipt], receipt: SteeringReceipt) -> None:
        """Queue a message, or let it expire if the run is over."""
        queue.append(receipt)
        for watch in tuple(self.watchers.values()):
            watch(receipt)
        if self.is_over:
            try:
                queue.remove(receipt)
            except ValueError:  # the ending run, or one that has just begun, was quicker
                return
            receipt.settle(SteeringStatus.EXPIRED)

    def wake(self) -> None:
        """Tell the runs that something urgent waits."""
        for wake in tuple(self.listeners.values()):
            if wake is not None:
                wake()


class SteeringHandle:
    """The sending end. Any thread may use it, before, during and after a run.

    What is sent before the first run waits for it. After a run, until another begins, messages
    expire at once.
    """

    __slots__ = ("_channel",)

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def steer(
        self, message: AgentMessage | str, when: When = SteerWhen.AFTER_BATCH
    ) -> SteeringReceipt:
        """Put a message before the model, as soon as ``when`` says."""
        if when not in _CHOICES:
            raise ValueError(f"when must be one of {', '.join(_CHOICES)}, not {when!r}")
        receipt = SteeringReceipt(_message(message), SteerWhen(when))
        self._channel.send(self._channel.steering, receipt)
        if receipt.when is SteerWhen.NOW:
            self._channel.wake()
        return receipt

    def follow_up(self, message: AgentMessage | str) -> SteeringReceipt:
        """Start the agent again with a message, when it has stopped by itself."""
        receipt = SteeringReceipt(_message(message), SteerWhen.AFTER_BATCH)
        receipt.is_follow_up = True
        self._channel.send(self._channel.follow_ups, receipt)
        return receipt


def _message(message: AgentMessage | str) -> AgentMessage:
    if isinstance(message, str):
        return UserMessage(message)
    try:
        (checked,) = accept_messages([message])
    except TypeError:
        kind = type(message).__name__
        raise TypeError(f"a text or a message is needed, not {kind}") from None
    return checked


_CHOICES = tuple(SteerWhen)
