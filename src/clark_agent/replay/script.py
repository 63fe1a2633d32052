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
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._finished import FINISHED
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.effects import Child, Effects
from clark_agent.engine.arguments import prompt_messages
from clark_agent.engine.call import CallAnswered, Siblings
from clark_agent.engine.resumption import Resumption
from clark_agent.engine.run import Run
from clark_agent.errors import ToolAborted, ToolExecutionError, ToolFatal
from clark_agent.output import CheckedFinish
from clark_agent.plugins.base import (
    HOOK_OF,
    Answer,
    BeforeToolDecision,
    Block,
    Rewrite,
    channels_among,
    plugin_name,
)
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
from clark_agent.run_log.fork import usage_of
from clark_agent.run_log.records import (
    Answered,
    Asked,
    Entry,
    Interrupt,
    Record,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    RuntimeResult,
    SteeringAccepted,
    ToolEnded,
    ToolProgress,
    ToolsChanged,
    ToolStarted,
)
from clark_agent.run_log.resume import continuation, spent_by
from clark_agent.run_log.store import LoadedRun, RunStore
from clark_agent.run_log.writer import RunWriter
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

__all__ = ["Script"]

T = TypeVar("T")


class Script(Effects):
    """Answers one run, or the part of one process, from its records."""

    def __init__(
        self,
        records: Sequence[Record],
        part: range,
        store: RunStore,
        copy: RunStore,
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
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        """The futures that wait until a record is next, by its number."""
        self._parent = parent
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
        self._handle: SteeringHandle | None = None
        self._clock = ScriptedClock(records, part)
        places = [n for n, r in enumerate(records) if isinstance(r.entry, Answered)]
        self._answers = [n for n in places if n in part]
        self._given = 0
        """How many answers were requested from the model."""
        self._answered = sum(n < part.start for n in places)
        """How many answers there are before the next record."""
        self._calls = _calls(records)
        self._raised = False
        """Whether a tool of the newest batch has ended the run."""
        last = records[part.stop - 1].entry
        self._failure = last if isinstance(last, RunFailed) else None
        self._is_old = records[part.start].v == 1
        """Whether the log is of version 1, which does not record where the run was stopped."""
        self._is_killed = not isinstance(last, (RunEnded, RunFailed))
        self._is_stuck = False
        """Whether a call is running that has no end in the log. It is unknown what the process did
        with its result before it died.
        """
        self._tail = part.stop
        """From here on there are only accepted messages."""
        while self._is_killed and isinstance(records[self._tail - 1].entry, SteeringAccepted):
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
        spent = usage_of(self._store, began.identity.run_id, self._below_at(start))
        return continuation(fold(before), spent, self._log)

    def config(self, config: LoopConfig) -> LoopConfig:
        """Return the config with everything outside replaced by the script."""
        channels = {id(channel): channel.detached() for channel in channels_among(config.plugins)}
        effects = config.effects
        self._takes_agents_results = (
            effects is not None and type(effects).run_child is not Effects.run_child
        )
        self._handle = next((channel.handle for channel in channels.values()), None)
        assert isinstance(config.tools, ToolRegistry)
        tools = config.tools.values()  # without the tool for the output, which the config adds
        self._agents = frozenset([tool.name for tool in tools if tool.runs_agent])
        source = config.tool_source
        if source is not None or self.began.tool_source is not None:
            source = RecordedSource(self, self.began.tool_source or plugin_name(source))
        return config.replace(
            tool_source=source,
            tools=ToolRegistry([UntimedTool(tool) for tool in tools]),
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
        message = self._entry(self._answers[self._given - 1], Answered).message
        for position, wanted in enumerate(message.tool_calls):
            known = self._calls.get((self._answered, position))
            ended = self._end_of_call(position)
            if known is None or known.has_started or ended is None or wanted.arguments != args:
                continue
            by_others = ended.by_runtime or ended.decisions or ended.hook_raised
            if (ended.tool_name or wanted.name) == name and not by_others:
                return (ended.given or ended.result).plain_text
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
                if self._started_by(call_id):
                    self._expected.add(call_id)
            case ToolEnded(raised=raised, tool_call_id=call_id):
                self._raised = self._raised or raised is not None
                self._expected.discard(call_id)
            case RunEnded() | RunFailed():
                self._is_over = True
            case _:
                pass
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
        self._has_left, self._is_held = True, False
        self._let_go()

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
        while index > self._at and isinstance(self._records[index - 1].entry, SteeringAccepted):
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
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(index, []).append(waiter)
        return waiter

    async def _never(self) -> None:
        """Wait until cancelled, or until the replay leaves the log."""
        if not self._is_free:
            await self._wait_for(_NEVER)

    # --- steering and interrupts ----------------------------------------------------------------

    def _act(self) -> bool:
        """Repeat the steering and interrupts due here. Return whether the run was stopped now."""
        was_stopped = self._was_stopped
        while (cue := self._due()) is not None:
            # They may stop child runs, which must first reach the point where they were stopped.
            self._is_held = bool(self._expected) or any(c._must_continue for c in self._below)
            if self._is_held:
                return False
            if isinstance(cue, SteeringAccepted):
                self._send(cue)
            else:
                self._interrupted += 1
                self._is_noticed_by_call = cue.noticed_by is not None
                self._stop(cue.why)
        return self._was_stopped and not was_stopped

    def _due(self) -> SteeringAccepted | Interrupt | None:
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
        if not isinstance(record.entry, SteeringAccepted):
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
        if self._parent is not None and not self._parent._is_free:
            self._waits_to_be_stopped = True  # the run above stops it
            self._parent._moved()
        elif not run.signal.cancelled:
            run.signal.cancel(None if self._failure is None else self._failure.reason)

    def _send(self, accepted: SteeringAccepted) -> None:
        at, handle = self._at, self._handle
        if handle is not None and accepted.when == "follow_up":
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
        ended = self._end_of_call(position)
        if ended is None:  # the log ends earlier
            return None
        result = ended.given or ended.result
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
        if end is None:
            self._is_stuck = True
            self._act()
        if tool.runs_agent:
            return await self._run_agent(tool, args, ctx, end)
        if end is None:  # the log ends earlier
            await self._never()
            return ToolResult.error("the log has no end of the call")
        self._count_runs_below(ctx)
        recorded = await self._end(end, ctx)
        if isinstance(tool, CheckedFinish):  # output validators are called again, as hooks are
            return await tool.execute(args, ctx)
        return recorded

    async def _run_agent(
        self, tool: AgentTool, given: Any, ctx: ToolContext, end: int | None
    ) -> ToolResult:
        """Run a tool that runs an agent, whose run is replayed too."""
        ended = None if end is None else self._entry(end, ToolEnded)
        why = None if ended is None else ended.by_runtime
        if why is not None and why.kind == "stopped" and why.reason == "timeout":
            return await self._run_too_long(tool, given, ctx, ended)
        if end is None and not self._started_by(ctx.tool_call_id):
            await self._never()  # the log ends before that of the agent begins
        if self._takes_agents_results and ended is not None:
            if self._started_by(ctx.tool_call_id):
                with suppress(Exception):
                    await tool.execute(given, ctx)  # for the log of the run below
            return await self._end(end or 0, ctx)
        own = await tool.execute(given, ctx)
        await self._reach(self._part.stop if end is None else end)
        was_stopped = _why_stopped(why) is not None and ctx.signal.cancelled
        if ended is not None and was_stopped and not self._has_left:
            raise _by_runtime(ended)  # it was stopped before it had its result
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
        raise _by_runtime(ended)

    def _is_cancelled_itself(self, ctx: ToolContext) -> bool:
        """Return whether the replay itself was cancelled, not the replayed run."""
        if self.run is None or not ctx.signal.cancelled:
            return True  # a run cancels the signal of a call, cancelling the task does not
        interrupts = self.run.interrupts
        return interrupts.cancelled_from_outside and not interrupts.is_running()

    async def _end(self, index: int, ctx: ToolContext) -> ToolResult:
        """End as the tool did: return its result, raise, or wait to be stopped."""
        ended = self._entry(index, ToolEnded)
        result = ended.given or ended.result
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
                raise _by_runtime(ended) from None
        made = None if self._has_left else ended.by_runtime
        if made is not None and made.kind != "unchecked":  # the runtime finds this again
            raise _by_runtime(ended)
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
        known = self._started_by(tool_call_id)
        if not known:
            text = f"the log has no run that the call {tool_call_id!r} started"
            raise ToolExecutionError(text)
        records = self._store.load(known.pop(0)).records
        script = Script(records, range(len(records)), self._store, self._copy, self)
        self._below.append(script)
        self._expected.discard(tool_call_id)  # from here on the run itself is waited for
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
        runs = self._store.runs(parent_run_id=self.began.identity.run_id)
        ours = self._below_at(self._part.stop) - self._below_at(self._part.start)
        found: dict[str, list[str]] = {}
        for summary in reversed(runs):
            began = self._store.load(summary.run_id).records[0].entry
            if summary.run_id not in ours or not isinstance(began, RunBegan):
                continue
            if began.tool_call_id is not None:
                found.setdefault(began.tool_call_id, []).append(summary.run_id)
        return found

    def _below_at(self, index: int) -> frozenset[str]:
        """Return the direct child runs that existed when a process resumed at this record."""
        if index == 0:
            return frozenset()
        runs = self._store.runs(parent_run_id=self.began.identity.run_id)
        if index == len(self._records):
            return frozenset([run.run_id for run in runs])
        record = self._records[index]
        if record.v == 1:  # which does not record it
            return frozenset([run.run_id for run in runs if run.began_at < record.at])
        return frozenset(self._entry(index, RunResumed).below)


def _calls_of(run: Run) -> Siblings | None:
    """Return the running calls, if an interrupt of the run stops them."""
    handler = getattr(run.interrupts.handler, "__self__", None)
    return handler if isinstance(handler, Siblings) else None


def _wake(waiting: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)


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


def _by_runtime(ended: ToolEnded) -> CallAnswered:
    """Return the result that the runtime made instead of the tool."""
    assert ended.by_runtime is not None
    return CallAnswered(ended.given or ended.result, ended.by_runtime)


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
                calls[answers, position] = _Call(has_started=True)
            case ToolProgress(position=position):
                calls.setdefault((answers, position), _Call()).progress.append(index)
            case ToolEnded(position=position):
                calls.setdefault((answers, position), _Call()).end = index
            case _:
                pass
    return calls
