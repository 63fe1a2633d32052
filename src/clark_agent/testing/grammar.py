"""The order of events as code: `check_events` raises at the first event that is out of order.

Use it on the events of a recording sink, in tests of hosts and plugins. The rules apply to every
run of this package, whether it succeeds or fails. `fold_events` returns the messages in the events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

from clark_agent import events as ev
from clark_agent.engine.brackets import CLOSED, NEW, Phase
from clark_agent.errors import EventOrderError
from clark_agent.events import AgentEvent
from clark_agent.types import AgentMessage, AssistantMessage, ToolResultMessage

__all__ = ["EventChecker", "check_events", "fold_events"]


def fold_events(events: Iterable[AgentEvent]) -> tuple[AgentMessage, ...]:
    """Return the messages of the run: those that it returns, or that its error carries.

    The events may be those of several processes, one after the other. A process that resumes a run
    announces the newest answer again, and then all its results.
    """
    messages: list[AgentMessage] = []
    goes_on = False
    for event in events:
        if isinstance(event, ev.MessageEnd):
            if goes_on and isinstance(event.message, AssistantMessage):
                _drop_answer(messages, event.message)
            goes_on = False  # it is the first message of its process
            messages.append(event.message)
        elif isinstance(event, ev.MessageDiscarded):
            messages.pop()
        elif isinstance(event, ev.ProviderRequestPrepared):
            goes_on = False
        elif isinstance(event, ev.AgentStart):
            goes_on = bool(messages)
    return tuple(messages)


def _drop_answer(messages: list[AgentMessage], answer: AssistantMessage) -> None:
    """Remove an answer that is announced again, and the results after it."""
    last = len(messages)
    while last and isinstance(messages[last - 1], ToolResultMessage):
        last -= 1
    if last and messages[last - 1] == answer:
        del messages[last - 1 :]


def check_events(events: Iterable[AgentEvent], *, requests: bool = True) -> None:
    """Raise `EventOrderError` with the position and the rule if an event is out of order.

    ``requests`` is False for events without the requests to the model, as
    `clark_agent.run_log.follow` returns them.
    """
    checker = EventChecker(requests=requests)
    for event in events:
        checker.feed(event)
    checker.finish()


class EventChecker:
    """The state machine behind `check_events`, for one event at a time.

    The table of the engine, `clark_agent.engine.brackets`, has the allowed order. This class also
    checks what an event must carry, and which events belong together.
    """

    def __init__(self, *, requests: bool = True) -> None:
        self._has_requests = requests
        self._position = -1
        self._event: AgentEvent | None = None
        self._previous: AgentEvent | None = None
        self._messages: list[AgentMessage] = []
        self._phase = NEW
        self._open: AgentMessage | None = None
        self._failed = False
        self._broken_off = False
        self._stage = 0
        self._asked = False
        self._answer: AssistantMessage | None = None
        self._results_begun = False
        self._running: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._announced: AssistantMessage | None = None
        self._last_announced: AssistantMessage | None = None

    def feed(self, event: AgentEvent) -> None:
        """Check the next event."""
        self._position += 1
        self._event = event
        after = self._phase.get(type(event))
        if after is None:
            self._fail(_rule(self._phase, event))
        self._check(event)
        self._phase = after
        self._previous = event

    def finish(self) -> None:
        """Check that the events may end here."""
        if self._phase is not CLOSED:
            self._position += 1
            self._event = None
            self._fail("a run ends with agent_end")

    def _check(self, event: AgentEvent) -> None:
        match event:
            case ev.AgentStart():
                pass
            case ev.RunIdentified():
                after_start = isinstance(self._previous, ev.AgentStart)
                self._require(after_start, "run_identified directly follows agent_start")
            case ev.TurnStart():
                self._turn_start()
            case ev.TurnEnd():
                self._turn_end(event)
            case ev.AgentEnd():
                self._agent_end(event)
            case ev.MessageStart():
                self._message_start(event.message)
            case ev.MessageUpdate():
                same = self._open is not None and event.partial is self._open
                self._require(same, "message_update carries the placeholder of an open message")
            case ev.MessageEnd():
                self._message_end(event.message)
            case ev.MessageDiscarded():
                self._message_discarded(event.reason)
            case ev.RequestDelayed():
                self._require(self._asked, "request_delayed comes between request and answer")
            case ev.ChildRunEvent():
                self._require(self._running.total() > 0, "child runs belong to a tool that runs")
            case ev.ConsultationEnd():
                pass  # the table has it behind its start
            case ev.ToolExecutionStart() | ev.ToolExecutionUpdate() | ev.ToolExecutionEnd():
                self._tool(event)
            case _:
                self._about_request(event)

    # --- brackets -------------------------------------------------------------------------------

    def _turn_start(self) -> None:
        self._require(not self._failed, "a turn without an answer is the last")
        self._broken_off = False
        self._stage = 0
        self._asked = False
        self._answer = self._announced = self._last_announced = None
        self._results_begun = False
        self._running.clear()
        self._finished.clear()

    def _turn_end(self, event: ev.TurnEnd) -> None:
        self._require(not self._running.total(), "no tool runs at turn_end")
        if self._answer is not None:
            self._require(event.message == self._answer, "turn_end carries the turn's answer")
            wanted = Counter([call.id for call in self._answer.tool_calls])
            self._require(self._finished == wanted, "every call of the turn ends exactly once")
            if wanted:
                answered = Counter([result.tool_call_id for result in event.tool_results])
                self._require(answered == wanted, "turn_end carries one result for every call")
        was_announced = self._last_announced is not None and event.message == self._last_announced
        self._failed = self._answer is None and not self._broken_off and not was_announced

    def _agent_end(self, event: ev.AgentEnd) -> None:
        same = list(event.messages) == self._messages
        self._require(same, "agent_end carries the announced messages")

    # --- messages -------------------------------------------------------------------------------

    def _message_start(self, message: AgentMessage) -> None:
        answers = isinstance(message, AssistantMessage)
        self._require(answers or not self._asked, "the model's answer comes before other messages")
        self._require(not self._running.total(), "no message starts while a tool runs")
        self._require(not self._failed, "a turn without an answer is the last")
        self._results_begun = self._answer is not None
        self._open = message
        if answers and not self._has_requests and self._answer is None:
            self._asked = True

    def _message_end(self, message: AgentMessage) -> None:
        same_kind = type(message) is type(self._open)
        self._require(same_kind, "message_end closes the message that was started")
        if self._asked and isinstance(message, AssistantMessage):
            self._asked = False
            self._answer = message
        else:
            self._require(message == self._open, "a message ends as it was started")
            # A resumed run announces an answer of another process again before it runs its calls.
            self._announced = message if isinstance(message, AssistantMessage) else None
            self._last_announced = self._announced or self._last_announced
        self._open = None
        self._messages.append(message)

    def _message_discarded(self, reason: str) -> None:
        previous = self._previous
        follows = (
            isinstance(previous, ev.MessageEnd)
            and isinstance(previous.message, AssistantMessage)
            and self._answer is not None
        )
        self._require(follows, "message_discarded directly follows the end of an answer")
        self._answer = None
        self._stage = 0
        self._broken_off = reason in ("steered", "out_of_time", "out_of_budget")
        self._messages.pop()

    # --- requests and tools ---------------------------------------------------------------------

    def _about_request(self, event: AgentEvent) -> None:
        self._require(self._answer is None, "a turn makes no request after its answer")
        self._require(not self._asked, "provider_request_prepared is followed by the answer")
        match event:
            case ev.ConsultationStart():
                self._require(self._stage == 0, "plugins ask a model before the gates")
            case ev.ContextTransformApplied():
                self._require(self._stage == 0, "transforms come before gates")
            case ev.ToolGateApplied():
                self._require(self._stage <= 1, "gates come before their conflict")
                self._stage = 1
            case ev.ToolGateConflictResolved():
                self._require(self._stage == 1, "a conflict comes after its gates, once")
                self._stage = 2
            case ev.OutputTokensEscalation():
                discarded = isinstance(self._previous, ev.MessageDiscarded)
                self._require(discarded, "output_tokens_escalation follows message_discarded")
            case _:
                self._asked = True

    def _tool(
        self, event: ev.ToolExecutionStart | ev.ToolExecutionUpdate | ev.ToolExecutionEnd
    ) -> None:
        call_id = event.tool_call_id
        if self._answer is None and self._announced is not None:
            self._answer = self._announced
        self._require(self._answer is not None, "tools run after the answer that calls them")
        self._require(not self._results_begun, "tools run before the results are announced")
        assert self._answer is not None
        known = sum([call.id == call_id for call in self._answer.tool_calls])
        self._require(known > 0, "a tool runs for a call of the turn's answer")
        begun = self._running[call_id] + self._finished[call_id]
        match event:
            case ev.ToolExecutionStart():
                self._require(begun < known, "a call starts at most once, before its end")
                self._running[call_id] += 1
            case ev.ToolExecutionUpdate():
                self._require(self._running[call_id] > 0, "only a call that runs has progress")
            case ev.ToolExecutionEnd():
                self._require(self._finished[call_id] < known, "a call ends exactly once")
                if self._running[call_id] > 0:
                    self._running[call_id] -= 1
                self._finished[call_id] += 1

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            self._fail(rule)

    def _fail(self, rule: str) -> NoReturn:
        kind = "the end" if self._event is None else str(self._event.__struct_config__.tag)
        raise EventOrderError(self._position, kind, rule)


# Why an event is not allowed, by the name of the phase; "" applies to all other phases.
_RUNS = {"": "tools run within a turn", "message": "no message is open while tools run"}
_ASKS = {
    "consulting": "consultation_start is followed by consultation_end",
    "": "requests are made within a turn",
    "message": "no message is open while a request is prepared",
}
_RULES: dict[type[AgentEvent], dict[str, str]] = {
    ev.AgentStart: {"": "a run has one agent_start"},
    ev.RunIdentified: {"": "run_identified directly follows agent_start"},
    ev.TurnStart: {
        "": "turn_start comes after the turn_end before it",
        "late message": "no message is open at turn_start",
    },
    ev.TurnEnd: {"": "turn_end closes a turn", "message": "no message is open at turn_end"},
    ev.AgentEnd: {
        "": "agent_end comes after the last turn_end",
        "started": "a run has at least one turn",
        "late message": "no message is open at agent_end",
    },
    ev.MessageStart: {
        "": "one message ends before the next starts",
        "started": "messages come after the first turn_start",
    },
    ev.MessageUpdate: {"": "message_update carries the placeholder of an open message"},
    ev.MessageEnd: {"": "message_end closes a message"},
    ev.MessageDiscarded: {"": "message_discarded directly follows the end of an answer"},
    ev.ConsultationEnd: {"": "consultation_end follows consultation_start"},
    ev.RequestDelayed: {"": "request_delayed comes between request and answer"},
    ev.ChildRunEvent: {"": "child runs belong to a tool that runs"},
    ev.ToolExecutionStart: _RUNS,
    ev.ToolExecutionUpdate: _RUNS,
    ev.ToolExecutionEnd: _RUNS,
}


def _rule(phase: Phase, event: AgentEvent) -> str:
    """Return why an event is not allowed in this phase."""
    if phase is CLOSED:
        return "nothing follows agent_end"
    if phase is NEW:
        return "a run begins with agent_start"
    reasons = _RULES.get(type(event), _ASKS)
    return reasons.get(phase.name, reasons[""])
