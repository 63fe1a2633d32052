"""ChannelSteering: messages for a running agent, from anywhere."""

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
    """A source of steering and follow-ups, fed through its ``handle``.

    If several runs share the source, the first to look gets the message; what nobody has taken
    goes to the last of them that ends, as undelivered.
    """

    name = "channel_steering"

    def __init__(self, channel: Channel | None = None) -> None:
        self._channel = Channel() if channel is None else channel
        self.handle = SteeringHandle(self._channel)
        self._steering: list[SteeringReceipt] = []
        self._follow_ups: list[SteeringReceipt] = []

    # --- what plugins have ----------------------------------------------------------------------

    def for_run(self) -> ChannelSteering:
        """The same channel, now with one run more that listens."""
        listener = ChannelSteering(self._channel)
        self._channel.listeners[listener] = None
        return listener

    def detached(self) -> ChannelSteering:
        """A channel of its own. For a replay, which gets from the log what was sent."""
        return ChannelSteering()

    def end_run(self) -> None:
        """One run less listens."""
        self.close()

    def next_steering_messages(self) -> list[AgentMessage]:
        """All messages that wait to be put before the model."""
        return _take(self._channel.steering, self._steering)

    def next_follow_up_messages(self) -> list[AgentMessage]:
        """All messages that wait for the model to stop."""
        return _take(self._channel.follow_ups, self._follow_ups)

    # --- what the loop asks of it beyond that ---------------------------------------------------

    @property
    def taken(self) -> tuple[SteeringReceipt, ...]:
        """What was taken from the queue and is not settled yet."""
        return (*self._steering, *self._follow_ups)

    def waiting(self) -> list[SteeringReceipt]:
        """What was sent and not taken yet."""
        return [*self._channel.steering.copy(), *self._channel.follow_ups.copy()]

    def watch(self, accepted: Callable[[SteeringReceipt], None]) -> None:
        """Have ``accepted`` called, on any thread, with each message that is sent."""
        self._channel.watchers[self] = accepted

    def listen(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on any thread, when a message is sent that cannot wait."""
        self._channel.listeners[self] = wake

    @property
    def urgency(self) -> SteerWhen | None:
        """How soon the most pressing message that waits wants to be heard."""
        if not self._channel.steering:
            return None
        wanted = {receipt.when for receipt in self._channel.steering.copy()}
        return max(wanted, key=_URGENCY.index, default=None)

    def delivered(self, turn: int) -> None:
        """All that was taken is now in the transcript, before the answer of this turn."""
        _settle(self._steering, SteeringStatus.DELIVERED, turn)
        _settle(self._follow_ups, SteeringStatus.DELIVERED, turn)

    def promoted(self) -> None:
        """The follow-ups that were taken wait for the next turn, like steering."""
        self._steering += self._follow_ups
        self._follow_ups.clear()

    def appended(self) -> None:
        """The follow-ups that were taken are in the transcript, and no turn comes after them."""
        _settle(self._follow_ups, SteeringStatus.DELIVERED)

    def close(self) -> list[AgentMessage]:
        """Listen no more. What was taken and not delivered has expired.

        The last to leave lets all that waits expire, and returns it.
        """
        self._channel.watchers.pop(self, None)
        if self._channel.listeners.pop(self, None) is None:
            return []  # closed before, or its run has never begun
        self._channel.ended = True
        _settle(self._steering, SteeringStatus.EXPIRED)
        _settle(self._follow_ups, SteeringStatus.EXPIRED)
        if self._channel.listeners:
            return []
        left: list[SteeringReceipt] = []
        messages = _take(self._channel.steering, left) + _take(self._channel.follow_ups, left)
        _settle(left, SteeringStatus.EXPIRED)
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
