"""The order of events, as a table, and the position of a run in it.

Everything about the brackets of a run is in this file: `Phase` is the table, which the public
`clark_agent.check_events` uses too, and `Brackets` is the position of one run in it. A failure
happens between two events; `Brackets.close_messages` and `Brackets.close_run` then return the
missing ones.

    new ─ agent_start → started ─ turn_start → turn ─ turn_end → idle ─ agent_end → closed
                                               turn ─ message_start → message ─ message_end → turn
                                               turn ─ consultation_start → consulting
                                               consulting ─ consultation_end → turn
                                               idle ─ message_start → late message → idle

This file knows events and messages. It emits, and makes no decisions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from clark_agent import events as ev
from clark_agent._finished import FINISHED
from clark_agent.events import (
    AgentEvent,
    MessageDiscarded,
    MessageEnd,
    MessageStart,
    TurnEnd,
    TurnStart,
)
from clark_agent.types import AgentMessage, AssistantMessage, ToolResultMessage

if TYPE_CHECKING:
    from clark_agent.engine.journal import Emit

__all__ = [
    "CLOSED",
    "CONSULTING",
    "IDLE",
    "LATE_MESSAGE",
    "MESSAGE",
    "NEW",
    "STARTED",
    "TURN",
    "Brackets",
    "Phase",
]


class Phase(dict[type[AgentEvent], "Phase"]):
    """A position in a run: the events that may come next, and the phase after each."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __repr__(self) -> str:
        return f"<Phase {self.name}>"


NEW = Phase("new")
STARTED = Phase("started")
"""The run is open, its first turn is not."""
TURN = Phase("turn")
MESSAGE = Phase("message")
"""A message is open within a turn."""
CONSULTING = Phase("consulting")
"""A plugin asks a model within a turn."""
IDLE = Phase("idle")
"""The run is open, and no turn is."""
LATE_MESSAGE = Phase("late message")
"""A message is open after the last turn: a follow-up that no turn is left to answer."""
CLOSED = Phase("closed")

NEW.update({ev.AgentStart: STARTED})
STARTED.update({ev.RunIdentified: STARTED, ev.TurnStart: TURN})
TURN.update(
    {
        ev.ConsultationStart: CONSULTING,
        ev.ContextTransformApplied: TURN,
        ev.ToolGateApplied: TURN,
        ev.ToolGateConflictResolved: TURN,
        ev.ProviderRequestPrepared: TURN,
        ev.RequestDelayed: TURN,
        ev.OutputTokensEscalation: TURN,
        ev.MessageStart: MESSAGE,
        ev.MessageDiscarded: TURN,
        ev.ToolExecutionStart: TURN,
        ev.ToolExecutionUpdate: TURN,
        ev.ToolExecutionEnd: TURN,
        ev.ChildRunEvent: TURN,
        ev.TurnEnd: IDLE,
    }
)
CONSULTING.update({ev.ConsultationEnd: TURN})
MESSAGE.update({ev.MessageUpdate: MESSAGE, ev.MessageEnd: TURN})
IDLE.update({ev.TurnStart: TURN, ev.MessageStart: LATE_MESSAGE, ev.AgentEnd: CLOSED})
LATE_MESSAGE.update({ev.MessageUpdate: LATE_MESSAGE, ev.MessageEnd: IDLE})


class Brackets:
    """The position of a run, and the messages of its open turn.

    Each step is marked before its event is emitted, so that an interrupt finds the brackets as
    listeners have seen them.
    """

    phase = NEW
    has_begun = False
    """Whether the run has messages to announce, even if no event was emitted yet."""
    answer: AssistantMessage | None = None
    """The answer of the open turn."""
    results: Sequence[ToolResultMessage] = ()
    """The results of its calls."""
    discarded: AssistantMessage | None = None
    """The newest answer of the turn that did not enter the transcript."""
    consultation: ev.ConsultationStart | None = None
    """The newest question of a plugin to a model."""
    discarding: str | None = None
    """Why the message that has just ended is about to be discarded."""
    _open: AgentMessage | None = None
    """The newest message of those that were announced."""
    _unannounced: Iterator[AgentMessage] = iter(())
    """Messages that are in the transcript and not announced yet."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def send(self, event: AgentEvent) -> Awaitable[None]:
        """Emit an event that opens or closes a bracket. Awaiting it waits for the listeners."""
        self.phase = self.phase[type(event)]
        return self._emit(event)

    def begin_turn(self) -> Awaitable[None]:
        """Open a turn. The first is opened with the run."""
        self.answer = self.discarded = None
        self.results = ()
        if self.phase is TURN:
            return FINISHED
        self.phase = self.phase[TurnStart]
        return self._emit(TurnStart())

    def begin_message(self, message: AgentMessage, details: Any = None) -> Awaitable[None]:
        """Open a message."""
        self.phase = self.phase[MessageStart]
        return self._emit(MessageStart(message, details))

    def end_message(self, message: AgentMessage) -> Awaitable[None]:
        """Close the message."""
        self.phase = self.phase[MessageEnd]
        return self._emit(MessageEnd(message))

    def entered(self, messages: Iterable[AgentMessage]) -> None:
        """Note messages in the transcript, to be announced, at the latest when the run ends."""
        self._unannounced = iter(messages)
        self.has_begun = True

    async def announce(self, messages: Iterable[AgentMessage]) -> None:
        """Announce messages that have entered the transcript."""
        self._unannounced = iter(messages)
        around, emit = self.phase, self._emit
        for message in self._unannounced:
            self._open, self.phase = message, around[MessageStart]
            await emit(MessageStart(message))
            self.phase = around
            await emit(MessageEnd(message))

    def end_turn(self) -> Awaitable[None]:
        """Close the turn."""
        message = self.answer or self.discarded
        assert message is not None
        self.phase = self.phase[TurnEnd]
        return self._emit(TurnEnd(message, tuple(self.results)))

    @property
    def has_unanswered_calls(self) -> bool:
        """Whether the turn's answer has tool calls, and there are no results."""
        return (
            self.phase is TURN
            and self.answer is not None
            and bool(self.answer.tool_calls)
            and not self.results
        )

    def close_messages(self, cut_off: AssistantMessage | None) -> Iterator[AgentEvent]:
        """The missing events until no message is open or unannounced.

        ``cut_off`` is the received part of an answer that was being streamed. Send each event
        before you request the next.
        """
        if self.phase is STARTED:
            yield TurnStart()
        if self.phase is CONSULTING:
            assert self.consultation is not None
            plugin = self.consultation.plugin
            yield ev.ConsultationEnd(self.consultation.iteration, plugin, error="aborted")
        if self.phase is MESSAGE or self.phase is LATE_MESSAGE:
            message = cut_off or self._open
            assert message is not None
            yield MessageEnd(message)
        if self.discarding is not None:
            reason, self.discarding = self.discarding, None
            yield MessageDiscarded(reason)
        for message in self._unannounced:
            yield MessageStart(message)
            yield MessageEnd(message)

    def close_run(
        self, unanswered: Callable[[], AssistantMessage], messages: Sequence[AgentMessage]
    ) -> Iterator[AgentEvent]:
        """The missing events until the run is closed; ``unanswered`` returns the answer of a turn
        that has none. Send each event before you request the next.
        """
        if self.phase is TURN:
            yield TurnEnd(self.answer or self.discarded or unanswered(), tuple(self.results))
        if self.phase is IDLE:
            yield ev.AgentEnd(messages)
