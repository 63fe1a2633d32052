"""Folds a log into the state of its run: messages, progress, and unfinished calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.errors import DecodeError, LogDamaged
from clark_agent.plugins.base import EarlierCall
from clark_agent.run_log.records import (
    Answered,
    Asked,
    BatchEnded,
    ContextEdited,
    MessagesAdded,
    Record,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    SteeringAccepted,
    ToolEnded,
    ToolsChanged,
    ToolStarted,
)
from clark_agent.run_log.store import LoadedRun
from clark_agent.tools.base import ToolResult
from clark_agent.types import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    ToolCall,
    ToolResultMessage,
    Usage,
)

__all__ = ["FoldedRun", "fold"]


class FoldedRun(Struct):
    """The state of a run according to its log."""

    began: RunBegan
    last: Record
    """The last record."""
    transcript: list[AgentMessage]
    """What the model would see now, before the transforms: history and messages, with the lasting
    changes of overflow recoveries and repairs.
    """
    messages: list[AgentMessage]
    """The messages that the run has added."""
    turns: int = 0
    """The number of turns that have an answer or were interrupted."""
    asked: int = 0
    """The number of turns that have begun."""
    usage: Usage = Usage()
    answer: AssistantMessage | None = None
    """The newest answer, while results of its calls are missing in the transcript."""
    calls: dict[int, ToolResult | None] = {}
    """Its calls by position: the result, or None for a call that started and has no result."""
    arguments: dict[int, Any] = {}
    """The arguments that its calls ran with, where they differ from the model's."""
    names: dict[int, str] = {}
    """The repaired names of its calls, by position."""
    ended: AssistantMessage | None = None
    """The newest answer, if its results are the end of the transcript."""
    was_delivered: bool = False
    """Whether the transcript ends with a text that was accepted as the final answer."""
    purposes: list[str] = []
    """Why messages were added that came neither from the model nor from a tool, in order."""
    outcomes: list[EarlierCall] = []
    """All calls with a result, in the order in which they ended."""
    requests: list[int] = []
    """The length of ``transcript`` before each request, since it last changed other than by
    growing.
    """
    worked_ms: int = 0
    """How long processes worked on the run, up to the last record of each."""
    offered: tuple[str, ...] = ()
    """The tools of the newest request."""
    sourced: dict[str, dict[str, Any]] = {}
    """The tools from a tool source, in addition to those that the run began with."""
    waiting: dict[int, SteeringAccepted] = {}
    """The steering messages that were accepted and never delivered, by number."""
    last_number: int = 0
    """The number of the last accepted message."""
    ending: RunEnded | RunFailed | None = None
    turn_ends: list[int] = []
    """The length of ``messages`` at the end of each turn."""

    @property
    def context(self) -> AgentContext:
        """The context for a run that continues with this transcript."""
        return AgentContext(self.began.system_prompt, tuple(self.transcript), self.began.identity)


def fold(loaded: LoadedRun) -> FoldedRun:
    """Return the state that the records describe.

    Raises `LogDamaged` for a damaged log, and `DecodeError` for one of a newer version; both name
    the place.
    """
    run_id, records = loaded.run_id, loaded.records
    for problem in loaded.problems:
        if problem.is_newer:
            text = f"the log of run {run_id!r} cannot be read: {problem.reason}"
            raise DecodeError(text, path=problem.where)
        raise LogDamaged(run_id, problem.seq, problem.reason, path=problem.where)
    if not records or not isinstance(records[0].entry, RunBegan):
        raise LogDamaged(run_id, 0, "its first record is missing", path="record 0")
    began = records[0].entry
    run = FoldedRun(
        began=began,
        last=records[-1],
        transcript=[*began.history, *began.prompts],
        messages=list(began.prompts),
    )
    before = records[0].at
    for record in records[1:]:
        if not isinstance(record.entry, RunResumed):  # no process worked on it until then
            run.worked_ms += max(0, record.at - before)
        before = record.at
        try:
            _take(run, record)
        except _OutOfPlace as error:
            place = f"record {record.seq}"
            raise LogDamaged(run_id, record.seq, str(error), path=place) from None
    return run


class _OutOfPlace(Exception):
    """A record does not follow from those before it."""


def _take(run: FoldedRun, record: Record) -> None:
    match record.entry:
        case MessagesAdded() as added:
            if added.source == "turn":
                _end_turn(run)
            _append(run, added.messages)
            run.purposes.extend(added.purposes)
            run.was_delivered = "final_answer" in added.purposes
            for number in added.steering:
                run.waiting.pop(number, None)
        case SteeringAccepted() as accepted:
            run.waiting[accepted.number] = accepted
            run.last_number = max(run.last_number, accepted.number)
        case ContextEdited(is_lasting=True) as edited:
            for edit in reversed(edited.edits):
                run.transcript[edit.start : edit.start + edit.removed] = edit.inserted
            run.requests.clear()
        case ToolsChanged() as changed:
            run.sourced = changed_tools(run.sourced, changed)
        case Asked() as asked:
            if asked.turn > run.asked:
                _end_turn(run)
            run.asked = asked.turn
            run.requests.append(len(run.transcript))
            if asked.settings is not None:
                run.offered = tuple(asked.settings.get("tools") or ())
        case Answered() as answered:
            _answered(run, answered)
        case ToolStarted() as started:
            run.calls[started.position] = None
            if started.arguments is not None:
                run.arguments[started.position] = started.arguments
        case ToolEnded() as ended:
            run.calls[ended.position] = ended.result
            if ended.tool_name is not None:
                run.names[ended.position] = ended.tool_name
            _outcome(run, ended)
        case BatchEnded() as batch:
            _batch_ended(run, batch)
        case RunEnded() | RunFailed() as ending:
            run.ending = ending
            _end_turn(run)
        case RunResumed() as resumed:
            run.ending = None
            del run.turn_ends[resumed.turn :]
        case _:
            pass


def changed_tools(
    sourced: dict[str, dict[str, Any]], changed: ToolsChanged
) -> dict[str, dict[str, Any]]:
    """The tools of a source after a change, in their order."""
    kept = {n: tool for n, tool in sourced.items() if n not in changed.removed}
    tools = kept | changed.added
    return tools if changed.order is None else {name: tools[name] for name in changed.order}


def _outcome(run: FoldedRun, ended: ToolEnded) -> None:
    calls = () if run.answer is None else run.answer.tool_calls
    if ended.position < len(calls):
        call = calls[ended.position]
        if ended.tool_name is not None:
            call = replace(call, name=ended.tool_name)
        run.outcomes.append(EarlierCall(call, ended.result, ended.decisions))


def _end_turn(run: FoldedRun) -> None:
    """Record the end of a turn, when the next one begins or the run ends."""
    if len(run.turn_ends) < run.asked:
        run.turn_ends.append(len(run.messages))


def _append(run: FoldedRun, messages: Iterable[AgentMessage]) -> None:
    run.ended, run.was_delivered = None, False
    if run.answer is not None and not run.answer.tool_calls:
        run.answer = None  # another message follows it
    run.transcript.extend(messages)
    run.messages.extend(messages)


def _answered(run: FoldedRun, answered: Answered) -> None:
    if answered.message.usage is not None:
        run.usage += answered.message.usage
    if answered.discarded in _BROKEN_OFF:
        run.turns = run.asked
    if answered.discarded is None:
        run.turns = run.asked
        run.answer, run.ended, run.was_delivered = answered.message, None, False
        run.calls, run.names, run.arguments = {}, {}, {}
        run.transcript.append(answered.message)
        run.messages.append(answered.message)


def _batch_ended(run: FoldedRun, batch: BatchEnded) -> None:
    if run.answer is None:
        raise _OutOfPlace("a batch of calls ended that the model did not request")
    calls = run.answer.tool_calls
    positions = tuple(range(len(calls))) if batch.positions is None else batch.positions
    times = batch.time if isinstance(batch.time, tuple) else (batch.time,) * len(calls)
    if sorted(positions) != list(range(len(calls))) or len(times) != len(calls):
        raise _OutOfPlace("a batch ended with other calls than the model requested")
    results: list[AgentMessage] = []
    for position, time in zip(positions, times, strict=True):
        result = run.calls.get(position)
        if result is None:
            raise _OutOfPlace(f"a batch ended in which call {position} has no result")
        name = run.names.get(position)
        results.append(result_message(calls[position], result, time, name))
    answer, run.answer = run.answer, None
    _append(run, results)
    run.ended = answer


_BROKEN_OFF = ("steered", "out_of_time", "out_of_budget")


def result_message(
    call: ToolCall, result: ToolResult, time: int | None, name: str | None = None
) -> ToolResultMessage:
    """Return the message for a call's result; ``name`` is the repaired tool name, if any."""
    return ToolResultMessage(
        call.id,
        name or call.name,
        result.content,
        result.is_error,
        result.narration,
        result.details,
        time,
    )
