"""Folds a log into the state of its run: messages, progress, and unfinished calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.engine.resumption import AskedEarlier, EarlierWait
from clark_agent.engine.runtime_results import suspended as suspended_result
from clark_agent.errors import LogDamaged
from clark_agent.plugins.base import EarlierCall
from clark_agent.prices import ModelRef
from clark_agent.run_log.reader import error_of
from clark_agent.run_log.records import (
    Answered,
    Asked,
    BatchEnded,
    CallSuspended,
    CancelReceived,
    Consulted,
    ContextEdited,
    MessagesAdded,
    Record,
    RequestDecided,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    RunSuspended,
    SteeringAccepted,
    ToolEnded,
    ToolsChanged,
    ToolStarted,
    ToolWithdrawn,
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
from clark_agent.waiting import WaitingRequest

__all__ = [
    "BROKEN_OFF",
    "WITHOUT_WORK",
    "FoldedRun",
    "fold",
    "fold_in",
    "fold_intact",
    "result_message",
]


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
    """The tokens of the run, without those of other models that plugins asked."""
    aside: dict[ModelRef, Usage] = {}
    """The tokens of these."""
    consulted: list[Consulted] = []
    """What models have answered plugins since the newest request."""
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
    added_by: set[str] = set()
    """The plugins that have added messages before a request since the newest answer."""
    outcomes: list[EarlierCall] = []
    """All calls with a result, in the order in which they ended."""
    requests: list[int] = []
    """The length of ``transcript`` before each request, since it last changed other than by
    growing.
    """
    traces: list[dict[str, str]] = []
    """The spans of the processes that worked on the run, oldest first."""
    suspended_at: int | None = None
    """When the run was suspended, if it is."""
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
    mails: set[str] = set()
    """The ids of the messages in its mailbox that it has taken."""
    cancelled: CancelReceived | None = None
    """The message that cancels the run, until its end is recorded."""
    waits: dict[int, EarlierWait] = {}
    """The calls that wait, or whose request was decided and not acted on yet, by position."""
    acted_on: dict[int, EarlierWait] = {}
    """What calls had waited for that have started since, and have no result, by position."""
    placeholders: int = 0
    """How many results at the end of the transcript are those of a batch that waits."""
    ending: RunEnded | RunFailed | RunSuspended | None = None
    turn_ends: list[int] = []
    """The length of ``messages`` at the end of each turn."""

    @property
    def open_requests(self) -> tuple[WaitingRequest, ...]:
        """The requests that have no decision yet; not those of child runs."""
        newest = [wait.asked[-1] for _, wait in sorted(self.waits.items()) if wait.asked]
        return tuple([asked.request for asked in newest if asked.verdict is None])

    def drop_placeholders(self) -> None:
        """Remove the results of a batch that waits from the transcript."""
        if self.placeholders:
            del self.transcript[-self.placeholders :]
            del self.messages[-self.placeholders :]
            self.placeholders = 0

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
        raise error_of(run_id, problem)
    if not records or not isinstance(records[0].entry, RunBegan):
        raise LogDamaged(run_id, 0, "its first record is missing", path="record 0")
    began = records[0].entry
    run = FoldedRun(
        began=began,
        last=records[0],
        transcript=[*began.history, *began.prompts],
        messages=list(began.prompts),
        traces=[began.trace] if began.trace else [],
    )
    for record in records[1:]:
        fold_in(run, record)
    return run


def fold_intact(loaded: LoadedRun) -> tuple[LoadedRun, FoldedRun, LogDamaged | None]:
    """Return the run up to the damage, its fold, and the damage, if there is any.

    Raises like `fold` if nothing is intact, or if the log is of a newer version.
    """
    try:
        return loaded, fold(loaded), None
    except LogDamaged as error:
        intact = [record for record in loaded.records if record.seq < error.at]
        if not intact:
            raise
        loaded = replace(loaded, records=tuple(intact), problems=())
        return loaded, fold(loaded), error


def fold_in(run: FoldedRun, record: Record) -> None:
    """Add the next record to the state."""
    if not isinstance(record.entry, WITHOUT_WORK):  # no process worked on it until then
        run.worked_ms += max(0, record.at - run.last.at)
    run.last = record
    try:
        _take(run, record)
    except _OutOfPlace as error:
        place = f"record {record.seq}"
        raise LogDamaged(record.run, record.seq, str(error), path=place) from None


class _OutOfPlace(Exception):
    """A record does not follow from those before it."""


def _take(run: FoldedRun, record: Record) -> None:
    match record.entry:
        case MessagesAdded() as added:
            if added.source == "turn" or (added.turn or 0) > run.asked:
                _end_turn(run)
            _append(run, added.messages)
            if added.plugin is not None:
                run.added_by.add(added.plugin)
            run.purposes.extend(added.purposes)
            run.was_delivered = "final_answer" in added.purposes
            for number in added.steering:
                run.waiting.pop(number, None)
        case SteeringAccepted() as accepted:
            run.waiting[accepted.number] = accepted
            run.last_number = max(run.last_number, accepted.number)
            if accepted.mail is not None:
                run.mails.add(accepted.mail)
        case CancelReceived() as cancelled:
            run.mails.add(cancelled.mail)
            run.cancelled = cancelled
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
            run.consulted.clear()
            run.requests.append(len(run.transcript))
            if asked.settings is not None:
                run.offered = tuple(asked.settings.get("tools") or ())
        case Consulted() as consulted:
            _consulted(run, consulted)
        case Answered() as answered:
            _answered(run, answered)
        case ToolStarted() as started:
            if (wait := run.waits.pop(started.position, None)) is not None:
                run.acted_on[started.position] = wait
            run.calls[started.position] = None
            if started.arguments is not None:
                run.arguments[started.position] = started.arguments
        case ToolWithdrawn(position=position):
            run.calls.pop(position, None)
            if (wait := run.acted_on.pop(position, None)) is not None:
                run.waits[position] = wait  # what was decided still holds
            else:
                run.arguments.pop(position, None)
        case ToolEnded() as ended:
            run.waits.pop(ended.position, None)
            run.acted_on.pop(ended.position, None)
            run.calls[ended.position] = ended.result
            if ended.tool_name is not None:
                run.names[ended.position] = ended.tool_name
            _outcome(run, ended)
        case CallSuspended() as suspended:
            _call_suspended(run, suspended)
        case RequestDecided() as decided:
            run.waits = {n: _decided(wait, decided) for n, wait in run.waits.items()}
            if decided.mail is not None:
                run.mails.add(decided.mail)
        case RunSuspended() as ending:
            run.ending, run.suspended_at = ending, record.at
            _suspended(run, ending)
        case BatchEnded() as batch:
            _batch_ended(run, batch)
        case RunEnded() | RunFailed() as ending:
            run.ending, run.cancelled = ending, None
            _end_turn(run)
        case RunResumed() as resumed:
            run.ending = run.suspended_at = None
            if resumed.trace:
                run.traces.append(resumed.trace)
            run.drop_placeholders()
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
    if answered.discarded in BROKEN_OFF:
        run.turns = run.asked
    if answered.discarded is None or answered.discarded in BROKEN_OFF:
        run.added_by.clear()
    if answered.discarded is None:
        run.turns = run.asked
        run.answer, run.ended, run.was_delivered = answered.message, None, False
        run.calls, run.names, run.arguments = {}, {}, {}
        run.waits, run.acted_on = {}, {}
        run.transcript.append(answered.message)
        run.messages.append(answered.message)


def _consulted(run: FoldedRun, consulted: Consulted) -> None:
    run.consulted.append(consulted)
    if (usage := consulted.message.usage) is None:
        return
    if consulted.model is None:
        run.usage += usage
    else:
        run.aside[consulted.model] = run.aside.get(consulted.model, Usage()) + usage


def _call_suspended(run: FoldedRun, suspended: CallSuspended) -> None:
    position = suspended.position
    run.calls.pop(position, None)  # it may have started, and then it waits for its result
    acted_on = run.acted_on.pop(position, _NEVER_ASKED)
    if suspended.tool_name is not None:
        run.names[position] = suspended.tool_name
    asked: tuple[AskedEarlier, ...] = ()
    if suspended.request is not None:
        before = run.waits.get(position, _NEVER_ASKED).asked
        if suspended.request.continues:
            before = acted_on.asked
        asked = (*before, AskedEarlier(suspended.request))
    run.waits[position] = EarlierWait(asked, suspended.child_run_ids, suspended.decisions)


_NEVER_ASKED = EarlierWait()


def _decided(wait: EarlierWait, decided: RequestDecided) -> EarlierWait:
    """Return what a call waits for after a decision. The first decision of a request counts."""
    asked = [
        replace(each, verdict=decided.decision, by=decided.by)
        if each.request.request_id == decided.request_id and each.verdict is None
        else each
        for each in wait.asked
    ]
    return replace(wait, asked=tuple(asked))


def _suspended(run: FoldedRun, suspended: RunSuspended) -> None:
    """Add the results of the batch, with placeholders for the calls that wait."""
    run_id = run.began.identity.run_id
    waiting = {n: _placeholder(run_id, wait) for n, wait in run.waits.items()}
    held = suspended_result("held", run_id)
    calls = {
        n: run.calls.get(n) or waiting.get(n, held)
        for n in range(len(run.answer.tool_calls if run.answer is not None else ()))
    }
    results = _results(run, suspended.time, suspended.positions, calls)
    run.transcript.extend(results)
    run.messages.extend(results)
    run.placeholders = len(results)


def _placeholder(run_id: str, wait: EarlierWait) -> ToolResult:
    if not wait.asked:
        return suspended_result("child", run_id)
    request = wait.asked[-1].request
    return suspended_result(request.needs, run_id, request.request_id)


def _batch_ended(run: FoldedRun, batch: BatchEnded) -> None:
    results = _results(run, batch.time, batch.positions, run.calls)
    answer, run.answer = run.answer, None
    run.waits, run.acted_on = {}, {}
    _append(run, results)
    run.ended = answer


def _results(
    run: FoldedRun,
    time: int | tuple[int, ...],
    positions: tuple[int, ...] | None,
    results: Mapping[int, ToolResult | None],
) -> list[AgentMessage]:
    """Return the messages for the results of a batch."""
    if run.answer is None:
        raise _OutOfPlace("a batch of calls ended that the model did not request")
    calls = run.answer.tool_calls
    positions = tuple(range(len(calls))) if positions is None else positions
    times = time if isinstance(time, tuple) else (time,) * len(calls)
    if sorted(positions) != list(range(len(calls))) or len(times) != len(calls):
        raise _OutOfPlace("a batch ended with other calls than the model requested")
    messages: list[AgentMessage] = []
    for position, at in zip(positions, times, strict=True):
        result = results.get(position)
        if result is None:
            raise _OutOfPlace(f"a batch ended in which call {position} has no result")
        messages.append(result_message(calls[position], result, at, run.names.get(position)))
    return messages


WITHOUT_WORK = (RunResumed, RequestDecided)
"""Records that are written after a time in which no process worked on the run."""
BROKEN_OFF = ("steered", "out_of_time", "out_of_budget")
"""Why an answer is discarded whose turn ends without another."""


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
