"""Messages that wait for a run: steering, follow-ups, and their receipts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from clark_agent.engine.journal import Journal
from clark_agent.plugins.base import SteeringChannel
from clark_agent.plugins.hooks import Hook
from clark_agent.steering import SteeringReceipt, SteerWhen
from clark_agent.types import AgentMessage

__all__ = ["Inbox"]


class Inbox:
    """The messages from sources that are not in the transcript yet."""

    _left: Sequence[SteeringReceipt] = ()
    """The messages in ``pending`` that another process has accepted and not delivered."""
    _left_follow_ups: Sequence[SteeringReceipt] = ()
    """The same for ``follow_ups``."""
    _delivering: Sequence[SteeringReceipt] = ()
    """Those of ``_left`` that were taken for a turn."""
    _are_follow_ups = False
    """Whether ``pending`` has follow-ups, and no steering."""

    def __init__(self, channels: Sequence[SteeringChannel], journal: Journal) -> None:
        self._channels = channels
        self._journal = journal
        self.pending: list[AgentMessage] = []
        """For the next turn."""
        self.follow_ups: list[AgentMessage] = []
        """From follow-up sources, before they are promoted or appended."""
        self._purposes: dict[int, str] = {}
        """The purpose of a message by its ``id()``, if its plugin has one."""

    @property
    def can_interrupt(self) -> bool:
        """Whether an urgent message may arrive."""
        return bool(self._channels or self._left)

    def listen(self, wake: Callable[[], None]) -> None:
        """Register ``wake``, called on any thread when an urgent message arrives."""
        for channel in self._channels:
            channel.listen(wake)

    def watch(self) -> None:
        """Record every message that is sent from now on in the journal."""
        for channel in self._channels:
            channel.watch(lambda _: self._journal.message_sent(self.note_waiting))

    def note_waiting(self) -> None:
        """Record the messages that wait in the journal, in the order in which they are taken."""
        for channel in self._channels:
            for receipt in channel.waiting():
                self._journal.accepted(receipt)

    def restore(self, waiting: Iterable[SteeringReceipt]) -> None:
        """Add the messages that another process has accepted, as if they were sent to this one."""
        given = tuple(waiting)
        self._left = [receipt for receipt in given if not receipt.is_follow_up]
        self._left_follow_ups = [receipt for receipt in given if receipt.is_follow_up]
        self.pending += [receipt.message for receipt in self._left]
        self.follow_ups += [receipt.message for receipt in self._left_follow_ups]

    def receive(self, receipt: SteeringReceipt) -> None:
        """Add a message from the mailbox of the run, as if another process had accepted it."""
        if receipt.is_follow_up:
            self._left_follow_ups = [*self._left_follow_ups, receipt]
            self.follow_ups.append(receipt.message)
        else:
            self._left = [*self._left, receipt]
            self.pending.append(receipt.message)
        self._journal.accepted(receipt)

    def collect(
        self, source: Hook, messages: Sequence[AgentMessage], into: list[AgentMessage]
    ) -> None:
        """Take the messages of a source."""
        into.extend(messages)
        if source.purpose is not None:
            self._purposes.update([(id(message), source.purpose) for message in messages])

    def note_taken(self) -> None:
        """Record in the journal what was sent before it was taken."""
        for receipt in self._taken():
            self._journal.accepted(receipt)

    def cannot_wait(self, when: SteerWhen) -> bool:
        """Whether a message must be delivered by now."""
        for channel in self._channels:
            if channel.urgency in (when, SteerWhen.NOW):
                for receipt in channel.waiting():  # record the acceptance before the effect
                    self._journal.accepted(receipt)
                return True
        return any(receipt.when in (when, SteerWhen.NOW) for receipt in self._left)

    def take(self) -> tuple[list[AgentMessage], list[str], list[SteeringReceipt]]:
        """The messages for this turn, their purposes, and their receipts.

        They count as delivered when `delivered` is called.
        """
        messages, self.pending = self.pending, []
        usual = "follow_up" if self._are_follow_ups else "steering"
        purposes = [self._purposes.pop(id(message), usual) for message in messages]
        self._delivering, self._left = self._left, ()
        return messages, purposes, [*self._delivering, *self._taken()]

    def delivered(self, turn: int) -> None:
        """Settle the taken messages: they are in the transcript, before the answer of this turn."""
        self._are_follow_ups = False
        self._delivering = ()
        for channel in self._channels:
            channel.delivered(turn)

    def promote(self, follow_ups: list[AgentMessage]) -> None:
        """Let follow-ups wait for the next turn."""
        self._are_follow_ups = not self.pending
        self.pending = [*self.pending, *follow_ups]
        self._left = [*self._left, *self._left_follow_ups]
        self._left_follow_ups = ()
        for channel in self._channels:
            channel.promoted()

    def follow_up_receipts(self) -> list[SteeringReceipt]:
        """The receipts of follow-ups that no turn is left to answer."""
        return [*self._left_follow_ups, *self._taken()]

    def appended(self) -> None:
        """Settle the follow-ups: they are in the transcript."""
        self._left_follow_ups = ()
        for channel in self._channels:
            channel.appended()

    def undelivered(self) -> tuple[AgentMessage, ...]:
        """The messages that were accepted and are not delivered."""
        waiting = [receipt.message for channel in self._channels for receipt in channel.waiting()]
        return (*self.pending, *self.follow_ups, *waiting)

    def close(self, *, is_kept: bool = False) -> tuple[AgentMessage, ...]:
        """Take no more messages. Return those that were accepted and never delivered.

        With ``is_kept`` there are none: the log has them, and the run gets them when it is resumed.
        """
        left = [*self.pending, *self.follow_ups]
        for channel in self._channels:
            left += channel.close(is_kept=is_kept)
        return () if is_kept else tuple(left)

    def _taken(self) -> list[SteeringReceipt]:
        return [receipt for channel in self._channels for receipt in channel.taken]
