"""Plays the records of a run: answers as its model, tools and clock did, and repeats steering and
cancellation.

The replay writes its own log and counts its steps, so the script knows its position. All timing
follows from that: the tool that ended second in the log ends second, and a message that was sent
between two events, or during a hook call, is sent there again. Once the replay writes a record that
differs from the log at that position, it has left the log. Then nothing waits for the log any more,
and the replay runs freely to its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._finished import FINISHED
from clark_agent._kept_text import KeptDamaged
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.effects import Child, Effects
from clark_agent.engine.arguments import prompt_messages
from clark_agent.engine.call import CallAnswered, Siblings
from clark_agent.engine.consult import TIMEOUT
from clark_agent.engine.resumption import EarlierChild, Resumption
from clark_agent.engine.run import Run
from clark_agent.engine.suspension import ChildSuspended
from clark_agent.errors import (
    RunNotFound,
    ToolAborted,
    ToolExecutionError,
    ToolFatal,
    ToolSuspended,
)
from clark_agent.output import CheckedFinish
from clark_agent.plugins.base import (
    HOOK_OF,
    Answer,
    BeforeToolDecision,
    Block,
    Rewrite,
    Suspend,
    channels_among,
    plugin_name,
)
from clark_agent.replay.stalls import Stalls
from clark_agent.replay.stand_ins import (
    RecordedDecisions,
    RecordedSource,
    ScriptedClock,
    ScriptedLog,
    UntimedTool,
)
from clark_agent.result import RunResult
from clark_agent.run_log.chunking import joined
from clark_agent.run_log.fold import fold
from clark_agent.run_log.fork import runs_below_at, usage_of
from clark_agent.run_log.memory import MemoryStore
from clark_agent.run_log.records import (
    Answered,
    Asked,
    CallSuspended,
    CancelReceived,
    Consulted,
    Entry,
    Interrupt,
    Record,
    RequestDecided,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    RunSuspended,
    RuntimeResult,
    SteeringAccepted,
    ToolEnded,
    ToolProgress,
    ToolsChanged,
    ToolStarted,
    ToolWithdrawn,
)
from clark_agent.run_log.resume import LoggedChildren, continuation, receipt_of, spent_by
from clark_agent.run_log.store import LoadedRun, RunStore
from clark_agent.run_log.writer import RunLog, RunWriter, is_kept_when_let_go
from clark_agent.steering import SteeringHandle, SteerWhen
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    Start,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
)
from clark_agent.sub_agents import ChildRun
from clark_agent.tools import ToolRegistry
from clark_agent.tools.base import AgentTool, ToolContext, ToolResult
from clark_agent.types import AgentContext, AgentMessage, AssistantMessage, StopReason
from clark_agent.waiting import WaitingRequest

__all__ = ["Script", "parts_of"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Script(Effects):
    """Answers one run, or the part of one process, from its records."""

    def __init__(
        self,
        records: Sequence[Record],
        part: range,
        store: RunStore,
        copy: MemoryStore,
        parent: Script | None = None,
    ) -> None:
        self.run: Run | None = None
        self.writer: RunWriter | None = None
        """The writer of the replay's log."""
        self.signal = CancellationToken()
        self._part = part
        self._records = records
        began = records[0].entry
        assert isinstance(began, RunBegan)
        self.began = began
        self._at = part.start
        self._interrupted = 0
        """How many interrupts of the next record have been repeated."""
        self._is_reading = False
        """Whether deltas are being read. Input during an answer is repeated after them."""
        self._has_left = False
        self.first_left: str | None = None
        """The run below that was the first to leave its log."""
        self._is_held = False
        """Whether the next steering or interrupt waits for child runs."""
        self._is_over = False
        self._is_out_of_time = False
        self._was_stopped = False
        """Whether the replay is at the point where the run was cancelled."""
        self._is_noticed_by_call = False
        """Whether a call notices that by itself, and stops the others."""
        self._waits_to_be_stopped = False
        """For a child run: whether it is at the point where its parent stopped it."""
        self._is_cancelled_by_mail = False
        """Whether a message cancelled it, and not its parent."""
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        """The futures that wait until a record is next, by its number."""
        self._parent = parent
        self.stalls: Stalls = Stalls(self._stalled) if parent is None else parent.stalls
        self._below: list[Script] = []
        self._expected: set[str] = set()
        """The calls that start a child run, until that run begins."""
        self._agents: frozenset[str] = frozenset()
        self._takes_agents_results = False
        """Whether the results of agents may come from the host's effects, so that only the log has
        them."""
        self._moved_below = asyncio.Event()
        """Set when a child run is at the point where it was stopped, or has ended."""
        self._store = store
        self._copy = copy
        self._children: dict[str, list[str]] | None = None
        self._placed: dict[tuple[int, int], list[tuple[str, Sequence[Record]]]] | None = None
        self._handle: SteeringHandle | None = None
        self._clock = ScriptedClock(records, part)
        places = [n for n, r in enumerate(records) if isinstance(r.entry, Answered)]
        self._places = places
        """Where all answers are, in order."""
        self._answers = [n for n in places if n in part]
        self._consultations = [n for n in part if isinstance(records[n].entry, Consulted)]
        """Where the answers to plugins are that were not given yet."""
        self._given = 0
        """How many answers were requested from the model."""
        self._answered = sum(n < part.start for n in places)
        """How many answers there are before the next record."""
        self._calls = _calls(records)
        self._raised = False
        """Whether a tool of the newest batch has ended the run."""
        last = records[part.stop - 1].entry
        self._failure = last if isinstance(last, RunFailed) else None
        self._taken_up: dict[str, Script] = {}
        """The child runs of another process that are about to continue."""
        self._started: list[Script] = []
        """All child runs of this part."""
        self._is_old = records[part.start].v == 1
        """Whether the log is of version 1, which does not record where the run was stopped."""
        self._is_killed = not isinstance(last, (RunEnded, RunFailed, RunSuspended))
        self._is_stuck = False
        """Whether a call is running that has no end in the log. It is unknown what the process did
        with its result before it died.
        """
        self._tail = part.stop
        """From here on there are only accepted messages."""
        while self._is_killed and isinstance(records[self._tail - 1].entry, _RECEIVED):
            self._tail -= 1
        self._is_stopped = self._is_killed or any(
            each.why == "cancelled" for n in part for each in records[n].interrupts
        )
        requests = any(isinstance(r.entry, Asked) and r.entry.request is not None for r in records)
        self._log = ScriptedLog(self, copy, full_requests=requests, notes=began.host_notes)

    def beginning(self) -> tuple[AgentContext, Resumption | None]:
        """Return the context, and the resumption if this part continues a run."""
        began, start = self.began, self._part.start
        if start == 0:
            return AgentContext(began.system_prompt, began.history, began.identity), None
        before = LoadedRun(began.identity.run_id, tuple(self._records[:start]))
        spent = usage_of(self._store, began.identity.run_id, start)
        return continuation(fold(before), spent, self._log, children=self)

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.began.identity.run_id

    def finish(self) -> None:
        """Make the copies of this part as long as the originals: if the process died, the end of
        the replay has no counterpart, and decisions are made between the parts.
        """
        self.stalls.close()
        for child in self._started:
            child.finish()
        with suppress(RunNotFound):
            run_id, stop = self.began.identity.run_id, self._part.stop
            self._copy.cut(run_id, stop)
            self._copy.extend(run_id, self._records[stop : _next_part(self._records, stop)])

    def config(self, config: LoopConfig) -> LoopConfig:
        """Return the config with everything outside replaced by the script."""
        channels = {id(channel): channel.detached() for channel in channels_among(config.plugins)}
        effects = config.effects
        self._takes_agents_results = (
            effects is not None and type(effects).run_child is not Effects.run_child
        )
        self._handle = next((channel.handle for channel in channels.values()), None)
        tools = config.all_tools.values()  # without the tool for the output, which the config adds
        self._agents = frozenset([tool.name for tool in tools if tool.runs_agent])
        source = config.tool_source
        if source is not None or self.began.tool_source is not None:
            source = RecordedSource(self, self.began.tool_source or plugin_name(source))
        return config.replace(
            tool_source=source,
            tools=ToolRegistry([UntimedTool(tool, self) for tool in tools]),
            plugins=[
                channels.get(id(plugin)) or self._decided(plugin) for plugin in config.plugins
            ],
            clock=self._clock,
            run_log=self._log,
            effects=self,
            tool_timeout=None,
        )

    def _decided(self, plugin: Any) -> Any:
        """Return the plugin; one with ``is_interactive`` gets its decisions from the log."""
        asks = getattr(plugin, "is_interactive", False) is True
        return (
            RecordedDecisions(plugin, self)
            if asks and hasattr(plugin, HOOK_OF["before_tool_call"])
            else plugin
        )

    def changed_tools(self) -> ToolsChanged | None:
        """Which tools were added or removed here, if any."""
        at = self._at
        if at < self._part.stop and isinstance(self._records[at].entry, RunResumed):
            at += 1  # the source is called before the log continues
            if at < self._part.stop and self._records[at].events:
                return None  # that was in a turn
        entry = self._records[at].entry if at < self._part.stop else None
        return entry if isinstance(entry, ToolsChanged) else None

    def sourced_before(self) -> dict[str, dict[str, Any]]:
        """Return the tools of the tool source before this part."""
        start = self._part.start
        if start == 0:
            return {}
        return fold(LoadedRun(self.began.identity.run_id, tuple(self._records[:start]))).sourced

    def refusal(self, name: str, args: Any) -> str | None:
        """Return a tool's error for these arguments in the newest answer, if it rejected them."""
        message = self._entry(self._places[self._answered - 1], Answered).message
        for position, wanted in enumerate(message.tool_calls):
            known = self._calls.get((self._answered, position))
            ended = self._end_of_call(position)
            if known is None or known.has_started or ended is None or wanted.arguments != args:
                continue
            by_others = ended.by_runtime or ended.decisions or ended.hook_raised
            if (ended.tool_name or wanted.name) == name and not by_others:
                return (self._own_result(ended)).plain_text
        return None

    # --- position in the log --------------------------------------------------------------------

    @property
    def _next(self) -> Record | None:
        return self._records[self._at] if self._at < self._part.stop else None

    def _entry(self, index: int, kind: type[T]) -> T:
        entry = self._records[index].entry
        assert isinstance(entry, kind)
        return entry

    def written(self, entry: Entry) -> None:
        """Advance after the replay has written a record."""
        due = None if (record := self._next) is None else record.entry
        if type(due) is not type(entry) or _position(due) != _position(entry):
            self._leave()
        match entry:
            case Answered():
                self._answered += 1
                self._raised = False
            case ToolStarted(tool_name=name, tool_call_id=call_id) if name in self._agents:
                place = (self._turn, entry.position)
                if self._started_by(call_id) or self._parts_at(place):
                    self._expected.add(call_id)
            case ToolEnded(raised=raised, tool_call_id=call_id):
                self._raised = self._raised or raised is not None
                self._expected.discard(call_id)
            case RunEnded() | RunFailed() | RunSuspended():
                self._is_over = True
            case _:
                pass
        self.stalls.moved()
        self._at += 1
        self._interrupted = 0
        self._clock.move(self._at)
        _wake(self._waiting.pop(self._at, ()))
        _wake(self._waiting.pop(_STEP, ()))
        self._act()
        if self._is_over and self._parent is not None:
            self._parent._below = [child for child in self._parent._below if child is not self]
            self._parent._moved()

    def _moved(self) -> None:
        """Continue after a child run has ended, or is at the point where it was stopped."""
        self._act()
        if not self._is_held:
            _wake(self._waiting.pop(_HELD, ()))
        self._moved_below.set()

    def answered(self) -> Awaitable[None]:
        """Handle the return of a hook. If the run was stopped here, it used the hook's answer
        before that.
        """
        _wake(self._waiting.pop(_STEP, ()))
        is_stopped = self._act()
        if self._is_held or (is_stopped and self._waits_to_be_stopped):
            return self._answered_and_held()
        return FINISHED

    async def _answered_and_held(self) -> None:
        try:
            await self._held_behind(FINISHED)
        except asyncio.CancelledError:
            if self.run is None or not self.run.interrupts.is_fired:
                raise

    def stepped(self, sent: Awaitable[None]) -> Awaitable[None]:
        """Handle an emitted event, or a hook call that is about to be made."""
        self.stalls.moved()
        if sent is not FINISHED:
            sent = self.stalls.during(sent)
        _wake(self._waiting.pop(_STEP, ()))
        continues, run = self._was_stopped, self.run
        is_stopped = self._act()
        if is_stopped and not self._waits_to_be_stopped and run is not None:
            calls = None if self._is_noticed_by_call else _calls_of(run)
            if calls is not None:
                calls.stop()  # now, before they get any further
        if is_stopped or self._is_held:
            return self._held_behind(sent, continues=continues)
        return sent

    async def _held_behind(self, sent: Awaitable[None], *, continues: bool = False) -> None:
        """Wait after this step. If the run was stopped between this step and the next, wait
        forever.
        """
        await sent
        await self._released()
        run = self.run
        if run is not None and self._was_stopped and not continues and _calls_of(run) is None:
            await self._never()

    async def _released(self) -> None:
        """Wait until the steering and interrupts due here have been repeated."""
        while self._is_held and not self._is_free:
            await self._wait_for(_HELD)

    def begun(self, kept: Awaitable[None]) -> Awaitable[None]:
        """Handle the start of the log. A run that was stopped there goes no further."""
        is_first = self._at == self._part.start + 1
        return self._held_at_begin(kept) if is_first and self._was_stopped else kept

    async def _held_at_begin(self, kept: Awaitable[None]) -> None:
        await kept
        await self._never()

    def _leave(self) -> None:
        """Leave the log. So do the runs above: they would wait for a run that is no longer as it
        was.
        """
        if self._has_left:
            return
        is_over = self._next is None  # a process that died has no records of closing its runs
        self._has_left, self._is_held = True, False
        self._let_go()
        if self._parent is not None and not is_over:
            self._parent.first_left = self._parent.first_left or self.first_left or self.run_id
            self._parent._leave()

    def _let_go(self) -> None:
        """Release all waits, here and in child runs."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            _wake(each)
        self._moved_below.set()
        for child in self._below:
            child._let_go()

    @property
    def _is_free(self) -> bool:
        """Whether this run, or one above it, has left the log, so that nothing waits for it."""
        above = self._parent
        return self._has_left or (above is not None and above._is_free)

    async def _reach(self, index: int) -> None:
        """Wait until the records before this one are written; return at once if they are.

        Accepted messages right before it do not count: they wait for this themselves.
        """
        while index > self._at and isinstance(self._records[index - 1].entry, _RECEIVED):
            index -= 1
        if self._at < index and not self._is_free:
            await self._wait_for(index)

    async def _reach_return(self, index: int) -> None:
        """Wait until the tool may return whose end this record is."""
        if (place := self._records[index].returned) is not None:
            await self._reach_place(*place)
        else:
            await self._reach(index)

    async def _reach_place(self, index: int, steps: int) -> None:
        """Wait until this record is next and this many steps have been made."""
        while not self._is_free and self._at <= index:
            if self._at == index and self.writer is not None:
                if self.writer.noted.steps >= steps:
                    return
                await self._wait_for(_STEP)
            else:
                await self._wait_for(index)

    def _wait_for(self, index: int) -> asyncio.Future[None]:
        self.stalls.waits()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(index, []).append(waiter)
        return waiter

    async def _never(self) -> None:
        """Wait until cancelled, or until the replay leaves the log."""
        if not self._is_free:
            await self._wait_for(_NEVER)

    def _stalled(self) -> None:
        """Leave the log, because nothing goes on: the innermost run that waits for it."""
        for child in self._below:
            child._stalled()
        if any(self._waiting.values()) and not self._waits_to_be_stopped:
            self._leave()

    # --- steering and interrupts ----------------------------------------------------------------

    def _act(self) -> bool:
        """Repeat the steering and interrupts due here. Return whether the run was stopped now."""
        was_stopped = self._was_stopped
        while (cue := self._due()) is not None:
            # They may stop child runs, which must first reach the point where they were stopped.
            self._is_held = bool(self._expected) or any(c._must_continue for c in self._below)
            if self._is_held:
                return False
            if not isinstance(cue, Interrupt):
                self._send(cue)
            else:
                self._interrupted += 1
                self._is_noticed_by_call = cue.noticed_by is not None
                self._stop(cue.why)
        return self._was_stopped and not was_stopped

    def _due(self) -> SteeringAccepted | CancelReceived | Interrupt | None:
        """Return what is due after the newest step: a message to send, or an interrupt."""
        if self._has_left or self._is_reading or self.run is None or self.writer is None:
            return None
        record, behind = self._next, self.writer.noted.steps
        if record is None:
            killed = self._is_killed and not self._was_stopped
            return Interrupt(0, "cancelled") if killed else None
        if self._interrupted < len(record.interrupts) and not self._was_stopped:
            interrupt = record.interrupts[self._interrupted]
            return interrupt if interrupt.steps <= behind else None
        if not isinstance(record.entry, _RECEIVED):
            return None
        is_last = self._is_stuck and self._at >= self._tail
        is_last = is_last and record.events <= self.writer.noted.events
        return record.entry if is_last or record.steps <= behind else None

    @property
    def _must_continue(self) -> bool:
        """Whether the run is neither over nor at the point where it was stopped."""
        return not (self._waits_to_be_stopped or self._has_left or self._is_over)

    def _stop(self, why: str) -> None:
        """Cancel the run here, or let it run out of time."""
        run = self.run
        assert run is not None
        if why == "out_of_time":
            self._is_out_of_time = True
            # From the event loop, like a timer: a tool that is about to start has then started.
            asyncio.get_running_loop().call_soon(self._clock.ring)
            return
        self._was_stopped = True
        by_parent = self._parent is not None and not self._is_cancelled_by_mail
        if by_parent and self._parent is not None and not self._parent._is_free:
            self._waits_to_be_stopped = True  # the run above stops it
            self._parent._moved()
        elif not run.signal.cancelled:
            run.signal.cancel(None if self._failure is None else self._failure.reason)

    def _send(self, accepted: SteeringAccepted | CancelReceived) -> None:
        at, handle = self._at, self._handle
        assert self.writer is not None
        if isinstance(accepted, CancelReceived):
            self._is_cancelled_by_mail = True
            self.writer.cancel_received(accepted)  # an interrupt stops the run
        elif accepted.mail is not None:
            self.writer.receive(receipt_of(accepted))
        elif handle is not None and accepted.when == "follow_up":
            _ = handle.follow_up(accepted.message)
        elif handle is not None:
            _ = handle.steer(accepted.message, SteerWhen(accepted.when))
        if self._at == at:
            self._leave()  # the run did not accept it

    # --- the model ------------------------------------------------------------------------------

    def ask_model(
        self, stream: StreamFn, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterable[StreamEvent]:
        """Return the recorded answer as a stream."""
        return self._answer()

    async def _answer(self) -> AsyncIterator[StreamEvent]:
        answered = self._next_answer()
        if answered is None:
            if self._is_stopped and not self._has_left:
                if self._next is not None and not self._was_stopped:  # it had started to answer
                    yield Start(_EMPTY)
                if not self._was_stopped:
                    self._stop("cancelled")
                await self._never()
            yield Error(_EMPTY, StreamErrorKind.FATAL, "the log has no further answer")
            return
        if answered.pieces is not None:
            self._is_reading = True
            yield Start(answered.start or _EMPTY, answered.details)
            for chunk in joined(answered.pieces, answered.message):
                yield Chunk(chunk)
            self._is_reading = False
            self._act()
        if answered.error is not None:
            yield _failed(answered)
        elif answered.discarded in _STOPPED and self._is_stopped_now(answered.discarded):
            await self._never()
            yield Error(_EMPTY, StreamErrorKind.FATAL, "the log has no such answer")
        else:
            yield Done(answered.message)

    def consult_model(
        self, stream: StreamFn, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterable[StreamEvent]:
        """Return the recorded answer to a plugin as a stream."""
        return self._consulted()

    async def _consulted(self) -> AsyncIterator[StreamEvent]:
        found = self._consultations
        while not self._has_left and found and found[0] < self._at:
            found.pop(0)
        if not found:
            if self._is_stopped and not self._has_left:
                if not self._was_stopped:
                    self._stop("cancelled")
                await self._never()
            yield Error(_EMPTY, StreamErrorKind.FATAL, "the log has no such answer")
            return
        consulted = self._entry(found.pop(0), Consulted)
        if consulted.error is None:
            yield Done(consulted.message)
        elif consulted.error == TIMEOUT:
            raise TimeoutError(consulted.error_text or "")
        else:
            kind = StreamErrorKind(consulted.error)
            yield Error(consulted.message, kind, consulted.error_text or "")

    def _next_answer(self) -> Answered | None:
        """Return the next answer in the log; after leaving the log, the one after the last."""
        answers = self._answers
        while (
            not self._has_left and self._given < len(answers) and (answers[self._given] < self._at)
        ):
            self._given += 1  # it was interrupted before the model was called
        if self._given == len(answers):
            return None
        self._given += 1
        return self._entry(answers[self._given - 1], Answered)

    def _is_stopped_now(self, why: str) -> bool:
        """Return whether the answer is interrupted here, as it was. If not, nothing would interrupt
        it.
        """
        run = self.run
        if self._is_free or run is None:
            return False
        if self._is_old and why != "steered":
            self._stop("cancelled" if why == "aborted" else why)
        if why == "aborted":
            return True
        return self._is_out_of_time or run.interrupts.due(SteerWhen.NOW) is not None

    # --- the tools ------------------------------------------------------------------------------

    def decision(self, plugin: str, position: int) -> BeforeToolDecision | None:
        """Return a plugin's recorded decision about a call."""
        request = self._suspended(position)
        if (
            request is not None
            and request.needs == "permission"
            and request.asked_by.partition(" #")[0] == plugin
        ):
            return _suspension(request)
        ended = self._end_of_call(position)
        if ended is None:  # the log ends earlier
            return None
        result = self._own_result(ended)
        for decided in ended.decisions:
            match decided:
                case {"plugin": name, "decision": "block"} if name == plugin:
                    return Block(result.plain_text, result.details)
                case {"plugin": name, "decision": "answer"} if name == plugin:
                    return Answer(result)
                case {"plugin": name, "decision": "rewrite", "args": args} if name == plugin:
                    return Rewrite(args)
                case {"plugin": name, "decision": "failed"} if name == plugin:
                    raise _exception(*(ended.hook_raised or ("Exception", result.plain_text)))
                case _:
                    pass
        return None

    def passed(self) -> None:
        """Handle a step that the replay does not wait for."""
        _wake(self._waiting.pop(_STEP, ()))
        self._act()

    def happened(self, position: int) -> ToolResult | None:
        """Return what a tool knew about a call of another process."""
        ended = self._end_of_call(position)
        return None if ended is None or ended.by_runtime else self._own_result(ended)

    def _own_result(self, ended: ToolEnded) -> ToolResult:
        """Return what the tool returned, before plugins changed it."""
        given, kept = ended.given, ended.kept
        if given is None:
            return ended.result
        if kept is None or not kept.is_given:
            return given
        store: Any = self._store
        try:
            return kept.fill_in(given, lambda name: partial(store.kept, self.run_id, name))
        except (LookupError, AttributeError):
            logger.warning("the result %s/%s is not in the store", self.run_id, kept.name)
            return ended.result
        except KeptDamaged as error:
            logger.warning("the result %s/%s cannot be read: %s", self.run_id, kept.name, error)
            return ended.result

    def _by_runtime(self, ended: ToolEnded) -> CallAnswered:
        """Return the result that the runtime made instead of the tool."""
        assert ended.by_runtime is not None
        return CallAnswered(self._own_result(ended), ended.by_runtime)

    def _suspended_at(self, position: int) -> int | None:
        """Return the index of the record that suspends a call in this part, if one does."""
        call = self._calls.get((self._answered, position))
        found = [] if call is None else [n for n in call.suspended if n in self._part]
        return found[-1] if found else None

    def _suspended(self, position: int) -> WaitingRequest | None:
        index = self._suspended_at(position)
        return None if index is None else self._entry(index, CallSuspended).request

    def _end_of_call(self, position: int) -> ToolEnded | None:
        call = self._calls.get((self._answered, position))
        if call is None or call.end is None or call.end >= self._part.stop:
            return None
        return self._entry(call.end, ToolEnded)

    async def run_tool(self, tool: AgentTool, args: Any, ctx: ToolContext) -> ToolResult:
        """Repeat a tool's progress, and return its result."""
        known = self._calls.get((self._answered, ctx.position))
        if known is None or not known.has_started or self._has_left:
            return ToolResult.error("the log has no such call")
        for index in known.progress:
            if index in self._part:
                await self._reach(index)
                await ctx.update(self._entry(index, ToolProgress).partial)
        end = known.end if known.end in self._part else None
        waits_at = self._suspended_at(ctx.position)
        if end is None and waits_at is None:
            self._is_stuck = True
            self._act()
        if tool.runs_agent:
            return await self._run_agent(tool, args, ctx, end)
        if waits_at is not None:
            raise await self._suspension(waits_at, ctx)
        if end is None:  # the log ends earlier
            await self._never()
            return ToolResult.error("the log has no end of the call")
        self._count_runs_below(ctx)
        recorded = await self._end(end, ctx)
        if isinstance(tool, CheckedFinish):  # output validators are called again, as hooks are
            with self.stalls.busy():
                return await tool.execute(args, ctx)
        return recorded

    async def _suspension(self, index: int, ctx: ToolContext) -> ToolSuspended:
        """Wait until the call was suspended. Return what its tool raised."""
        try:
            await self._reach(index)
            await self._released()
        except asyncio.CancelledError:
            if self._is_cancelled_itself(ctx):
                self._leave()
                raise
            await self._reach(index)  # it was stopped when it had raised this
        entry = self._entry(index, CallSuspended)
        if entry.request is None:
            return ChildSuspended(entry.child_run_ids, ())
        return _suspension_of_tool(entry.request)

    async def _run_agent(
        self, tool: AgentTool, given: Any, ctx: ToolContext, end: int | None
    ) -> ToolResult:
        """Run a tool that runs an agent, whose run is replayed too."""
        ended = None if end is None else self._entry(end, ToolEnded)
        why = None if ended is None else ended.by_runtime
        if why is not None and why.kind == "stopped" and why.reason == "timeout":
            return await self._run_too_long(tool, given, ctx, ended)
        if end is None and not self._has_run_below(ctx):
            await self._never()  # the log ends before that of the agent begins
        if end is not None and why is not None and not self._has_run_below(ctx):
            return await self._end(end, ctx)  # it was stopped before that of the agent began
        if self._takes_agents_results and ended is not None:
            if self._started_by(ctx.tool_call_id):
                with suppress(Exception):
                    await tool.execute(given, ctx)  # for the log of the run below
            return await self._end(end or 0, ctx)
        try:
            own = await tool.execute(given, ctx)
        except ToolSuspended as suspended:
            waits_at = self._suspended_at(ctx.position)
            await self._reach(self._part.stop if waits_at is None else waits_at)
            await self._released()
            if isinstance(suspended, ChildSuspended) and waits_at is not None:
                # The run may have drawn the ids of its children at another record: a store that
                # writes in the background lets several calls start before the first of them runs.
                recorded = self._entry(waits_at, CallSuspended).child_run_ids
                raise ChildSuspended(recorded, suspended.waiting) from None
            raise
        await self._reach(self._part.stop if end is None else end)
        await self._released()
        was_stopped = _why_stopped(why) is not None and ctx.signal.cancelled
        if ended is not None and was_stopped and not self._has_left:
            raise self._by_runtime(ended)  # it was stopped before it had its result
        return own

    async def _run_too_long(
        self, tool: AgentTool, given: Any, ctx: ToolContext, ended: ToolEnded | None
    ) -> ToolResult:
        """Replay an agent that exceeded the timeout of its tool. Time is not replayed, but the end
        is.
        """
        assert ended is not None
        running = asyncio.ensure_future(tool.execute(given, ctx))
        try:
            while not running.done() and not self._is_free:
                below = self._below
                if below and all(child._waits_to_be_stopped for child in below):
                    ctx.signal.cancel("timeout")
                    await asyncio.wait([running])
                else:
                    self._moved_below.clear()
                    moved = asyncio.ensure_future(self._moved_below.wait())
                    await asyncio.wait([running, moved], return_when=asyncio.FIRST_COMPLETED)
                    moved.cancel()
        finally:
            running.cancel()
            await asyncio.wait([running])
        raise self._by_runtime(ended)

    def _is_cancelled_itself(self, ctx: ToolContext) -> bool:
        """Return whether the replay itself was cancelled, not the replayed run."""
        if self.run is None or not ctx.signal.cancelled:
            return True  # a run cancels the signal of a call, cancelling the task does not
        interrupts = self.run.interrupts
        return interrupts.cancelled_from_outside and not interrupts.is_running()

    async def _end(self, index: int, ctx: ToolContext) -> ToolResult:
        """End as the tool did: return its result, raise, or wait to be stopped."""
        ended = self._entry(index, ToolEnded)
        result = self._own_result(ended)
        why = _why_stopped(ended.by_runtime)
        try:
            await self._reach_return(index)
            await self._released()
            if self._waits_to_be_stopped and not ctx.signal.cancelled:
                await self._never()  # it returned while it was being stopped
            if why is not None and not self._has_left:
                if why == "aborted" and not self._raised and self._is_old:
                    asyncio.get_running_loop().call_soon(self._stop, "cancelled")
                elif why == "out_of_time" and self._is_old:
                    asyncio.get_running_loop().call_soon(self._stop, "out_of_time")
                await self._never()
        except asyncio.CancelledError:
            if self._is_cancelled_itself(ctx):
                self._leave()
                raise
            await self._reach_return(index)  # stopped calls end in their recorded order
            if why is not None:
                raise self._by_runtime(ended) from None
        made = None if self._has_left else ended.by_runtime
        if made is not None and made.kind != "unchecked":  # the runtime finds this again
            raise self._by_runtime(ended)
        if ended.raised == "fatal":
            raise ToolFatal(ended.raised_text or "")
        if ended.raised == "aborted":
            raise ToolAborted(ended.raised_text or "")
        return result

    # --- child runs -----------------------------------------------------------------------------

    def run_child(self, child: Child) -> Awaitable[RunResult]:
        """Replay the run that a call started, with the recorded prompts if they are equal."""
        assert isinstance(child, ChildRun)
        tool_call_id = child.tool_call_id
        if child.resumption is not None:
            assert child.context.identity is not None
            taken_up = self._taken_up.pop(child.context.identity.run_id)
            return replace(
                child,
                config=taken_up.config(child.config),
                signal=taken_up.follow(child.signal),
            ).start()
        known = self._started_by(tool_call_id)
        if not known:
            text = f"the log has no run that the call {tool_call_id!r} started"
            raise ToolExecutionError(text)
        records = self._store.load(known.pop(0)).records
        script = self._play(records, parts_of(records)[0], tool_call_id)
        prompts, recorded = prompt_messages(child.prompts, child.config), script.began.prompts
        if [_undated(message) for message in recorded] == [_undated(m) for m in prompts]:
            prompts = recorded
        context = AgentContext(child.context.system_prompt, identity=script.began.identity)
        return replace(
            child,
            prompts=prompts,
            context=context,
            config=script.config(child.config),
            signal=script.follow(child.signal),
        ).start()

    def _play(self, records: Sequence[Record], part: range, tool_call_id: str | None) -> Script:
        """Return the script of a part of a child run, which is about to begin."""
        script = Script(records, part, self._store, self._copy, self)
        self._below.append(script)
        self._started.append(script)
        if tool_call_id is not None:
            self._expected.discard(tool_call_id)  # from here on the run itself is waited for
        return script

    # --- child runs of another process ----------------------------------------------------------

    def can_continue(self, tool_call_id: str) -> bool:
        """Return whether the child runs of a call can be found."""
        return self._logged_children().can_continue(tool_call_id)

    def find(
        self, config: LoopConfig, turn: int, position: int, number: int
    ) -> EarlierChild | None:
        """Return a child run that began before this part: its part in this one, or its end."""
        found: list[tuple[RunBegan, Sequence[Record]]] = []
        for _, records in self._earlier_runs_at((turn, position)):
            entry = records[0].entry
            if isinstance(entry, RunBegan) and entry.call_place == (turn, position, number):
                found.append((entry, records))
        if not found:
            return None
        began, records = found[-1]
        run_id = began.identity.run_id
        part = self._part_of(records)
        if part is not None:

            async def resume() -> tuple[AgentContext, Resumption]:
                script = self._play(records, part, began.tool_call_id)
                self._taken_up[run_id] = script
                context, resumption = script.beginning()
                assert resumption is not None
                return context, resumption

            return EarlierChild(prompts=began.prompts, identity=began.identity, resume=resume)
        if self._had_ended(records):
            return self._logged_children().find(config, turn, position, number)

        async def wait() -> tuple[AgentContext, Resumption]:
            await self._never()  # the log ends before the run was taken up
            raise RunNotFound(run_id)

        return EarlierChild(prompts=began.prompts, identity=began.identity, resume=wait)

    def _logged_children(self) -> LoggedChildren:
        return LoggedChildren(RunLog(self._store), self.began.identity.run_id)

    @property
    def _turn(self) -> int:
        return 0 if self.run is None else self.run.turns

    def _runs_at(self, place: tuple[int, int]) -> list[tuple[str, Sequence[Record]]]:
        """Return the child runs of a call, oldest first, with their records."""
        if self._placed is None:
            self._placed = {}
            for summary in reversed(self._store.runs(parent_run_id=self.began.identity.run_id)):
                records = self._store.load(summary.run_id).records
                began = records[0].entry
                if isinstance(began, RunBegan) and began.call_place is not None:
                    found = self._placed.setdefault(began.call_place[:2], [])
                    found.append((summary.run_id, records))
        return self._placed.get(place, [])

    def _parts_at(self, place: tuple[int, int]) -> list[range]:
        """Return the parts of earlier child runs of a call that are played in this one."""
        parts = [self._part_of(records) for _, records in self._runs_at(place)]
        return [part for part in parts if part is not None]

    def _part_of(self, records: Sequence[Record]) -> range | None:
        """Return the part of a child run that belongs to this one, unless it began here."""
        first = self._records[self._part.start].seq
        for part in parts_of(records)[1:]:
            entry = records[part.start].entry
            if isinstance(entry, RunResumed) and entry.within == first:
                return part
        return None

    def _has_run_below(self, ctx: ToolContext) -> bool:
        """Return whether a call starts or continues a run in this part, or has its end."""
        place = (ctx.turn, ctx.position)
        if self._started_by(ctx.tool_call_id) or self._parts_at(place):
            return True
        runs = self._earlier_runs_at(place)
        return any(self._had_ended(records) for _, records in runs)

    def _had_ended(self, records: Sequence[Record]) -> bool:
        """Return whether a child run had ended before this part, and not in a later one."""
        first = self._records[self._part.start].seq
        resumed = [r.entry.within for r in records if isinstance(r.entry, RunResumed)]
        is_later = any(within is not None and within > first for within in resumed)
        return isinstance(records[-1].entry, (RunEnded, RunFailed)) and not is_later

    def _earlier_runs_at(self, place: tuple[int, int]) -> list[tuple[str, Sequence[Record]]]:
        """Return the child runs of a call that began before this part."""
        before = self._below_at(self._part.start)
        return [run for run in self._runs_at(place) if run[0] in before]

    def follow(self, signal: CancellationToken) -> CancellationToken:
        """Return a token that is cancelled with the call, with the reason in the log."""
        own = self.signal

        def cancel() -> None:
            is_as_it_was = self._was_stopped and not self._has_left and self._failure is not None
            reason = self._failure.reason if is_as_it_was and self._failure else signal.reason
            own.cancel(reason)

        signal.subscribe(cancel)
        return own

    def _count_runs_below(self, ctx: ToolContext) -> None:
        """Count the cost of runs that a tool started by itself, since the tool is not run."""
        assert self.run is not None
        for run_id in self._started_by(ctx.tool_call_id):
            self.run.spending.spend_below(spent_by(usage_of(self._store, run_id)))

    def _started_by(self, tool_call_id: str) -> list[str]:
        """Return the runs that a call started and that were not replayed yet, oldest first."""
        if self._children is None:
            self._children = self._runs_below()
        return self._children.get(tool_call_id, [])

    def _runs_below(self) -> dict[str, list[str]]:
        """Return the runs that this part started, by call."""
        runs, ours = self._store.runs(parent_run_id=self.began.identity.run_id), self._ours()
        found: dict[str, list[str]] = {}
        for summary in reversed(runs):
            began = self._store.load(summary.run_id).records[0].entry
            if summary.run_id not in ours or not isinstance(began, RunBegan):
                continue
            if began.tool_call_id is not None:
                found.setdefault(began.tool_call_id, []).append(summary.run_id)
        return found

    def _ours(self) -> frozenset[str]:
        """Return the direct child runs that began in this part."""
        return self._below_at(self._part.stop) - self._below_at(self._part.start)

    def _below_at(self, index: int) -> frozenset[str]:
        """Return the direct child runs that existed when a process resumed at this record."""
        if index == 0:
            return frozenset()
        index = _next_part(self._records, index)
        run_id = self.began.identity.run_id
        if index == len(self._records):
            return frozenset([run.run_id for run in self._store.runs(parent_run_id=run_id)])
        return runs_below_at(self._store, run_id, self._records[index])


def parts_of(records: Sequence[Record]) -> list[range]:
    """Return the records of each process that worked on the run.

    Two kinds of records belong to none: decisions, which are made while no process works; and what
    tools still returned after their process had given the run up. Which of them ended first, and
    between which events, is chance.
    """
    begins = [n for n, record in enumerate(records) if isinstance(record.entry, RunResumed)]
    parts: list[range] = []
    for begin, end in pairwise([0, *begins, len(records)]):
        while isinstance(records[end - 1].entry, RequestDecided):
            end -= 1
        parts.append(range(begin, _let_go_at(records, begin, end)))
    return parts


def _let_go_at(records: Sequence[Record], begin: int, end: int) -> int:
    """Return where a process gave the run up; the end if it did not."""
    for index in range(begin + 1, end):
        if any(interrupt.why == "cancelled" for interrupt in records[index].interrupts):
            rest = [records[n].entry for n in range(index, end)]
            return index if all(map(is_kept_when_let_go, rest)) else end
    return end


def _next_part(records: Sequence[Record], index: int) -> int:
    """Return the index of the next part."""
    while index < len(records) and not isinstance(records[index].entry, RunResumed):
        index += 1
    return index


def _suspension(request: WaitingRequest) -> Suspend:
    """Return the decision of a hook, as it was recorded."""
    expires, asked = request.expires_at, request.asked_at
    seconds = None if expires is None else (expires - asked) / 1000
    return Suspend(request.request, seconds, request.until, request.event, request.assignee)


def _suspension_of_tool(request: WaitingRequest) -> ToolSuspended:
    again = _suspension(request)
    return ToolSuspended(
        again.request,
        expires_in=again.expires_in,
        until=again.until,
        event=again.event,
        assignee=again.assignee,
        continues=request.continues,
    )


def _calls_of(run: Run) -> Siblings | None:
    """Return the running calls, if an interrupt of the run stops them."""
    handler = getattr(run.interrupts.handler, "__self__", None)
    return handler if isinstance(handler, Siblings) else None


def _wake(waiting: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)


_RECEIVED = (SteeringAccepted, CancelReceived)
_EMPTY = AssistantMessage((), StopReason.OTHER)
_STOPPED = ("aborted", "steered", "out_of_time")

# Keys for waits that do not depend on a record: next step, cancellation, release.
_STEP, _NEVER, _HELD = -1, -2, -3


def _position(entry: object) -> Any:
    """Return the position of the call that an entry is about, if any."""
    return getattr(entry, "position", None)


def _why_stopped(why: RuntimeResult | None) -> str | None:
    """Return why a call was stopped from outside; None for a timeout, which is its own."""
    if why is None or why.kind != "stopped":
        return None
    return why.reason if why.reason in (*_STOPPED, "sibling") else None


def _failed(answered: Answered) -> Error:
    """Return the error of a stream. Raises if the transport raised."""
    if answered.raised is not None:
        raise _exception(*answered.raised)
    kind = StreamErrorKind(answered.error or "")
    return Error(answered.message, kind, answered.error_text or "")


def _exception(name: str, text: str) -> Exception:
    """Return an exception with this type name and text."""
    error: Exception = type(name, (Exception,), {})(text)
    return error


def _undated(message: AgentMessage) -> AgentMessage:
    return replace(message, timestamp=None)


class _Call(Struct):
    """The indexes of the records of a call."""

    has_started: bool = False
    progress: list[int] = []
    suspended: list[int] = []
    end: int | None = None


def _calls(records: Sequence[Record]) -> dict[tuple[int, int], _Call]:
    """Return all calls, by the number of the answer and the position in it."""
    calls: dict[tuple[int, int], _Call] = {}
    answers = 0
    for index, record in enumerate(records):
        match record.entry:
            case Answered():
                answers += 1
            case ToolStarted(position=position):
                calls.setdefault((answers, position), _Call()).has_started = True
            case ToolWithdrawn(position=position):
                calls.setdefault((answers, position), _Call()).has_started = False
            case CallSuspended(position=position):
                calls.setdefault((answers, position), _Call()).suspended.append(index)
            case ToolProgress(position=position):
                calls.setdefault((answers, position), _Call()).progress.append(index)
            case ToolEnded(position=position):
                calls.setdefault((answers, position), _Call()).end = index
            case _:
                pass
    return calls
