"""ChannelSteering: sends messages to a running agent, from any thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from clark_agent.steering import (
    Channel,
    SteeringHandle,
    SteeringReceipt,
    SteeringStatus,
    SteerWhen,
)
from clark_agent.types import AgentMessage

__all__ = ["ChannelSteering"]


class ChannelSteering:
    """A source of steering and follow-up messages, fed through its ``handle``.

    If several runs share the source, the first run to poll gets the message. When the last of them
    ends, it returns the messages that no run has taken as undelivered.
    """

    name = "channel_steering"

    def __init__(self, channel: Channel | None = None) -> None:
        self._channel = Channel() if channel is None else channel
        self.handle = SteeringHandle(self._channel)
        self._steering: list[SteeringReceipt] = []
        self._follow_ups: list[SteeringReceipt] = []

    # --- plugin methods -------------------------------------------------------------------------

    def for_run(self) -> ChannelSteering:
        """Return a listener on the same channel, for one more run."""
        listener = ChannelSteering(self._channel)
        self._channel.listeners[listener] = None
        return listener

    def detached(self) -> ChannelSteering:
        """Return a new channel, for a replay, which gets the messages from the log."""
        return ChannelSteering()

    def end_run(self) -> None:
        """Stop listening for this run."""
        self.close()

    def next_steering_messages(self) -> list[AgentMessage]:
        """Take all queued steering messages."""
        return _take(self._channel.steering, self._steering)

    def next_follow_up_messages(self) -> list[AgentMessage]:
        """Take all queued follow-ups, which wait until the model stops."""
        return _take(self._channel.follow_ups, self._follow_ups)

    # --- further methods for the loop -----------------------------------------------------------

    @property
    def taken(self) -> tuple[SteeringReceipt, ...]:
        """The messages that were taken from the queue and are not settled yet."""
        return (*self._steering, *self._follow_ups)

    def waiting(self) -> list[SteeringReceipt]:
        """Return the messages that were sent and not taken yet."""
        return [*self._channel.steering.copy(), *self._channel.follow_ups.copy()]

    def watch(self, accepted: Callable[[SteeringReceipt], None]) -> None:
        """Register ``accepted``, called on any thread with each message that is sent."""
        self._channel.watchers[self] = accepted

    def listen(self, wake: Callable[[], None]) -> None:
        """Register ``wake``, called on any thread when an urgent message is sent."""
        self._channel.listeners[self] = wake

    @property
    def urgency(self) -> SteerWhen | None:
        """How soon the most urgent queued message wants to be delivered."""
        if not self._channel.steering:
            return None
        wanted = {receipt.when for receipt in self._channel.steering.copy()}
        return max(wanted, key=_URGENCY.index, default=None)

    def delivered(self, turn: int) -> None:
        """Settle all taken messages: they are in the transcript, before the answer of this turn."""
        _settle(self._steering, SteeringStatus.DELIVERED, turn)
        _settle(self._follow_ups, SteeringStatus.DELIVERED, turn)

    def promoted(self) -> None:
        """Treat the taken follow-ups like steering, for the next turn."""
        self._steering += self._follow_ups
        self._follow_ups.clear()

    def appended(self) -> None:
        """Settle the taken follow-ups: they are in the transcript, and no turn follows."""
        _settle(self._follow_ups, SteeringStatus.DELIVERED)

    def close(self, *, is_kept: bool = False) -> list[AgentMessage]:
        """Stop listening. Messages that were taken and not delivered expire.

        The last listener also lets all queued messages expire, and returns them. With ``is_kept``,
        they are delivered when the run is resumed.
        """
        status = SteeringStatus.KEPT if is_kept else SteeringStatus.EXPIRED
        self._channel.watchers.pop(self, None)
        if self._channel.listeners.pop(self, None) is None:
            return []  # already closed, or its run never started
        self._channel.ended = True
        _settle(self._steering, status)
        _settle(self._follow_ups, status)
        if self._channel.listeners:
            return []
        left: list[SteeringReceipt] = []
        messages = _take(self._channel.steering, left) + _take(self._channel.follow_ups, left)
        _settle(left, status)
        return messages


_URGENCY = list(SteerWhen)


def _take(queue: deque[SteeringReceipt], into: list[SteeringReceipt]) -> list[AgentMessage]:
    messages: list[AgentMessage] = []
    while queue:
        try:
            receipt = queue.popleft()
        except IndexError:  # another run has taken it
            break
        into.append(receipt)
        messages.append(receipt.message)
    return messages


def _settle(
    receipts: list[SteeringReceipt], status: SteeringStatus, turn: int | None = None
) -> None:
    for receipt in receipts:
        receipt.settle(status, turn)
    receipts.clear()
