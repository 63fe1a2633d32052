"""Messages to a running agent: when they take effect, and whether they were delivered.

A `SteeringHandle` (from `clark_agent.plugins.ChannelSteering`) accepts messages from any thread and
any signal handler, and returns a `SteeringReceipt` for each. There is no lock, for the same reason
as in `clark_agent.cancellation`: the sender queues a message and then checks whether a run still
listens; a run that ends unregisters and then empties the queue; whoever removes an entry (one
atomic ``popleft`` or ``remove``) settles its receipt.
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
    """How soon a message is delivered to the model."""

    AFTER_BATCH = "after_batch"
    """With the next turn. Nothing in progress is stopped."""
    BEFORE_NEXT_TOOL = "before_next_tool"
    """Calls of the batch that have not started are not run; those that run end as usual."""
    NOW = "now"
    """Also stops what is in progress: the model's answer, or the running tools."""


When: TypeAlias = SteerWhen | Literal["after_batch", "before_next_tool", "now"]
"""A `SteerWhen`, or its name."""


class SteeringStatus(StrEnum):
    """The state of a message."""

    QUEUED = "queued"
    DELIVERED = "delivered"
    """It is in the transcript."""
    EXPIRED = "expired"
    """The run was over before it could be delivered."""
    KEPT = "kept"
    """The run was suspended or let go. Its log has the message, which is delivered when the run is
    resumed."""


class SteeringReceipt:
    """The state of a sent message. ``await`` it to wait until it is settled; the result is the
    receipt itself. In a thread without an event loop use `wait`.

    A tool must not await the receipt of a message that waits for the tool to end.
    """

    __slots__ = ("_settled", "is_follow_up", "mail", "message", "status", "turn", "when")

    def __init__(self, message: AgentMessage, when: SteerWhen, *, mail: str | None = None) -> None:
        self.message = message
        self.when = when
        self.is_follow_up = False
        """Whether it waits for the model to stop."""
        self.mail = mail
        """The id of the message in the mailbox of the run, if it came from there."""
        self.status = SteeringStatus.QUEUED
        self.turn: int | None = None
        """The turn of the run in which it was delivered, from 1. None until then, and for a
        follow-up that was added to the transcript when no turn remained."""
        self._settled = CancellationToken()

    @property
    def is_settled(self) -> bool:
        """Whether it is delivered or expired."""
        return self._settled.cancelled

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self._settled.wait().__await__()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until it is settled, at most ``timeout`` seconds. Return whether it is.

        Raises `RuntimeError` on the thread of an event loop, which it would block: await it there.
        """
        if self.is_settled:
            return True
        if timeout != 0 and has_running_loop():
            raise RuntimeError("wait() would block the event loop: use 'await receipt'")
        settled = Event()
        subscription = self._settled.subscribe(settled.set)
        try:
            return settled.wait(timeout)
        finally:
            subscription.close()

    def settle(self, status: SteeringStatus, turn: int | None = None) -> None:
        """Set the final state. Called by the code that removed the message from the queue."""
        self.turn = turn
        self.status = status
        self._settled.cancel()

    def __repr__(self) -> str:
        where = "" if self.turn is None else f" in turn {self.turn}"
        return f"<SteeringReceipt {self.status}{where}>"


class Channel:
    """The shared state of a handle and the runs that listen to it."""

    __slots__ = ("ended", "follow_ups", "listeners", "steering", "watchers")

    def __init__(self) -> None:
        self.steering: deque[SteeringReceipt] = deque()
        self.follow_ups: deque[SteeringReceipt] = deque()
        self.listeners: dict[object, Callable[[], None] | None] = {}
        """The runs that listen, each with its wake function."""
        self.watchers: dict[object, Callable[[SteeringReceipt], None]] = {}
        """The functions to call with every message that is sent."""
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
            except ValueError:  # an ending run, or one that has just begun, has taken it
                return
            receipt.settle(SteeringStatus.EXPIRED)

    def wake(self) -> None:
        """Wake the runs: an urgent message waits."""
        for wake in tuple(self.listeners.values()):
            if wake is not None:
                wake()


class SteeringHandle:
    """The sending end. Any thread may use it, before, during and after a run.

    Messages that are sent before the first run wait for it. After a run, until another begins,
    messages expire at once.
    """

    __slots__ = ("_channel",)

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def steer(
        self, message: AgentMessage | str, when: When = SteerWhen.AFTER_BATCH
    ) -> SteeringReceipt:
        """Send a message to the model; ``when`` is how soon it is delivered."""
        if when not in _CHOICES:
            raise ValueError(f"when must be one of {', '.join(_CHOICES)}, not {when!r}")
        receipt = SteeringReceipt(message_from(message), SteerWhen(when))
        self._channel.send(self._channel.steering, receipt)
        if receipt.when is SteerWhen.NOW:
            self._channel.wake()
        return receipt

    def follow_up(self, message: AgentMessage | str) -> SteeringReceipt:
        """Start the agent again with a message, after it has stopped by itself."""
        receipt = SteeringReceipt(message_from(message), SteerWhen.AFTER_BATCH)
        receipt.is_follow_up = True
        self._channel.send(self._channel.follow_ups, receipt)
        return receipt


def message_from(message: AgentMessage | str) -> AgentMessage:
    """The message that was sent, checked. Raises `TypeError`."""
    if isinstance(message, str):
        return UserMessage(message)
    try:
        (checked,) = accept_messages([message])
    except TypeError:
        kind = type(message).__name__
        raise TypeError(f"expected a text or a message, not {kind}") from None
    return checked


_CHOICES = tuple(SteerWhen)
