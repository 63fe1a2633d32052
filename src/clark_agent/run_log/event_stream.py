"""The events of a run, from the records of its log.

`EventStream` takes the records of one run in order, and returns the events that each implies. They
are those of the run itself, with these differences:

- There are no requests, transforms, gates, deltas and events of child runs: the log does not have
  them in this form.
- The start of an answer comes with its end, because the log has it then. A turn without calls ends
  with the next record that shows it. A turn that fails before anything of it is recorded is not
  shown.
- In a parallel batch, a call starts when its tool does. A call that was stopped before that has
  only an end.
- If a process dies, another continues inside the open brackets: nothing is announced twice. A run
  that was suspended or had failed begins again with ``agent_start``, and an answer whose calls are
  not done is announced again.

`clark_agent.testing.check_events` accepts each part, from ``agent_start`` to ``agent_end``, with
``requests=False``. The cost of a record does not depend on those before it, except that
``agent_end`` carries all messages of its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from clark_agent.engine.answer import EMPTY
from clark_agent.engine.runtime_results import suspended
from clark_agent.events import (
    AgentEnd,
    AgentEvent,
    AgentStart,
    ConsultationEnd,
    ConsultationStart,
    MessageDiscarded,
    MessageEnd,
    MessageStart,
    RunIdentified,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnEnd,
    TurnStart,
)
from clark_agent.run_log.fold import BROKEN_OFF, result_message
from clark_agent.run_log.records import (
    Answered,
    Asked,
    BatchEnded,
    CallSuspended,
    Consulted,
    MessagesAdded,
    Record,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    RunSuspended,
    ToolEnded,
    ToolProgress,
    ToolStarted,
)
from clark_agent.tools.base import ToolResult
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    RunIdentity,
    StopReason,
    ToolCall,
    ToolResultMessage,
)

__all__ = ["EventStream"]


class EventStream:
    """Turns the records of one run into events. It keeps the open turn, and the messages of the
    open part.
    """

    def __init__(self) -> None:
        self._identity: RunIdentity | None = None
        self._is_open = False
        """Whether ``agent_end`` is still to come."""
        self._in_turn = False
        self._messages: list[AgentMessage] = []
        """The messages of the part."""
        self._answer: AssistantMessage | None = None
        """The answer of the turn."""
        self._is_last = False
        """Whether that is the last message, so that a part that follows announces it again."""
        self._discarded: AssistantMessage | None = None
        """The newest answer of the turn that was discarded."""
        self._turn_results: Sequence[ToolResultMessage] = ()
        self._results: dict[int, ToolResult] = {}
        """The results of the answer's calls, by position."""
        self._names: dict[int, str] = {}
        """The repaired names of its calls."""
        self._waiting: dict[int, ToolResult] = {}
        """The placeholders of its calls that wait."""
        self._started: set[int] = set()
        """Its calls that have started in this part."""

    def take(self, record: Record) -> tuple[AgentEvent, ...]:
        """Return the events of the next record."""
        return tuple(self._events(record))

    def _events(self, record: Record) -> Iterator[AgentEvent]:
        match record.entry:
            case RunBegan() as began:
                self._identity = began.identity
                yield from self._begin()
                yield from self._announce(began.prompts)
            case RunResumed():
                if not self._is_open:
                    yield from self._begin_again()
            case MessagesAdded() as added:
                yield from self._added(added)
            case Consulted() as asked:
                yield from self._new_turn()
                iteration, plugin, usage = asked.turn - 1, asked.plugin, asked.message.usage
                yield ConsultationStart(iteration, plugin)
                yield ConsultationEnd(iteration, plugin, usage, asked.error)
            case Asked():
                yield from self._new_turn()
            case Answered() as answered:
                yield from self._answered(answered)
            case ToolStarted() as started:
                if started.position not in self._started:
                    self._started.add(started.position)
                    self._names[started.position] = started.tool_name
                    call = self._call(started.position)
                    args = started.arguments if call is None else call.arguments
                    yield ToolExecutionStart(started.tool_call_id, started.tool_name, args)
            case ToolProgress(position=position, partial=partial):
                if (call := self._call(position)) is not None:
                    yield ToolExecutionUpdate(call.id, self._name(position, call), partial)
            case ToolEnded() as ended:
                yield self._ended(ended)
            case CallSuspended() as waiting:
                self._waits(waiting)
            case BatchEnded() as batch:
                yield from self._announce_results(batch)
            case RunSuspended() as batch:
                yield from self._suspended(batch)
            case RunEnded():
                yield from self._end("there is no budget for a turn", StopReason.ABORTED, record)
            case RunFailed(error=error, text=text):
                is_aborted = error == "RunAborted"
                why = "the run was aborted" if is_aborted else text
                reason = StopReason.ABORTED if is_aborted else StopReason.ERROR
                yield from self._end(why, reason, record)
            case _:
                return

    # --- brackets -------------------------------------------------------------------------------

    def _begin(self) -> Iterator[AgentEvent]:
        self._is_open, self._in_turn, self._messages = True, True, []
        self._discarded, self._turn_results = None, ()
        self._started.clear()
        yield AgentStart()
        if self._identity is not None:
            yield RunIdentified(self._identity)
        yield TurnStart()

    def _begin_again(self) -> Iterator[AgentEvent]:
        """Begin another part, with the answer whose calls are not done."""
        answer = self._answer if self._is_last else None
        results, self._results, self._waiting = self._results, {}, {}
        self._answer = answer
        yield from self._begin()
        if answer is None:
            return
        yield from self._announce([answer])
        self._is_last = True
        self._results = results
        for position, result in results.items():
            yield self._end_of(position, result)

    def _new_turn(self) -> Iterator[AgentEvent]:
        """Open a turn, unless one is open that has no answer yet."""
        if self._in_turn and self._answer is None:
            return
        if self._in_turn:
            yield self._end_turn(self._answer)
        self._in_turn = True
        self._answer = self._discarded = None
        self._turn_results = ()
        yield TurnStart()

    def _end_turn(self, message: AssistantMessage | None) -> TurnEnd:
        assert message is not None
        self._in_turn = False
        return TurnEnd(message, tuple(self._turn_results))

    def _end(self, why: str, reason: StopReason, record: Record) -> Iterator[AgentEvent]:
        """Close what is open."""
        if not self._is_open:
            return
        if self._in_turn:
            now = record.now[-1] if record.now else record.at
            unanswered = AssistantMessage((), reason, why, now)
            yield self._end_turn(self._answer or self._discarded or unanswered)
        self._is_open = False
        yield AgentEnd(tuple(self._messages))

    # --- messages -------------------------------------------------------------------------------

    def _announce(self, messages: Iterable[AgentMessage]) -> Iterator[AgentEvent]:
        for message in messages:
            self._is_last = False
            self._messages.append(message)
            yield MessageStart(message)
            yield MessageEnd(message)

    def _added(self, added: MessagesAdded) -> Iterator[AgentEvent]:
        match added.source:
            case "turn":
                yield from self._new_turn()
                yield from self._announce(added.messages)
            case "follow_up":
                if self._in_turn and self._answer is not None:
                    yield self._end_turn(self._answer)
                yield from self._announce(added.messages)
            case "loop" if added.turn is not None:
                yield from self._new_turn()
                yield from self._announce(added.messages)
            case "loop":
                if "final_answer" in added.purposes:
                    results = [m for m in added.messages if isinstance(m, ToolResultMessage)]
                    self._turn_results = results
                yield from self._announce(added.messages)
                if self._in_turn and self._answer is not None:
                    yield self._end_turn(self._answer)

    def _answered(self, answered: Answered) -> Iterator[AgentEvent]:
        message = answered.message
        placeholder = message if answered.pieces is None else answered.start or EMPTY
        yield MessageStart(placeholder, answered.details)
        yield MessageEnd(message)
        if answered.discarded is not None:
            self._discarded = message
            yield MessageDiscarded(answered.discarded)
            if answered.discarded in BROKEN_OFF:
                yield self._end_turn(message)
            return
        self._messages.append(message)
        self._answer, self._is_last = message, True
        self._results, self._names, self._waiting = {}, {}, {}
        self._started.clear()

    # --- calls ----------------------------------------------------------------------------------

    def _call(self, position: int) -> ToolCall | None:
        calls = () if self._answer is None else self._answer.tool_calls
        return calls[position] if position < len(calls) else None

    def _name(self, position: int, call: ToolCall) -> str:
        return self._names.get(position, call.name)

    def _ended(self, ended: ToolEnded) -> AgentEvent:
        if ended.tool_name is not None:
            self._names[ended.position] = ended.tool_name
        self._results[ended.position] = ended.result
        return self._end_of(ended.position, ended.result, ended.tool_call_id)

    def _end_of(
        self, position: int, result: ToolResult, call_id: str | None = None
    ) -> ToolExecutionEnd:
        call = self._call(position)
        name = "" if call is None else self._name(position, call)
        found = call_id if call_id is not None or call is None else call.id
        return ToolExecutionEnd(found or "", name, result, result.is_error)

    def _waits(self, waiting: CallSuspended) -> None:
        """Note that a call waits. It ends with the batch, or earlier if it is withdrawn."""
        if waiting.tool_name is not None:
            self._names[waiting.position] = waiting.tool_name
        request = waiting.request
        run_id = "" if self._identity is None else self._identity.run_id
        reason: Literal["permission", "result", "child"]
        reason = "child" if request is None else request.needs
        request_id = None if request is None else request.request_id
        self._waiting[waiting.position] = suspended(reason, run_id, request_id)

    def _announce_results(self, batch: BatchEnded | RunSuspended) -> Iterator[AgentEvent]:
        """Announce the results of the batch, and end the turn."""
        answer = self._answer
        calls = () if answer is None else answer.tool_calls
        positions = range(len(calls)) if batch.positions is None else batch.positions
        times = batch.time if isinstance(batch.time, tuple) else (batch.time,) * len(calls)
        messages: list[ToolResultMessage] = []
        for position, time in zip(positions, times, strict=False):
            result = self._results.get(position) or self._waiting.get(position)
            if (call := self._call(position)) is not None and result is not None:
                name = self._names.get(position)
                messages.append(result_message(call, result, time, name))
        self._turn_results = messages
        yield from self._announce(messages)
        if self._in_turn and answer is not None:
            yield self._end_turn(answer)

    def _suspended(self, batch: RunSuspended) -> Iterator[AgentEvent]:
        run_id = "" if self._identity is None else self._identity.run_id
        calls = () if self._answer is None else self._answer.tool_calls
        for position in range(len(calls)):
            if position not in self._results:
                placeholder = self._waiting.setdefault(position, suspended("held", run_id))
                yield self._end_of(position, placeholder)
        yield from self._announce_results(batch)
        self._is_open, self._is_last = False, True  # the answer is announced again
        yield AgentEnd(tuple(self._messages))
