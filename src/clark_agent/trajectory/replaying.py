"""The same run once more, with model, tools and clock answered from its log.

What came from outside is taken from the records, in their order; everything else (plugins, gates,
policy, the loop itself) runs for real, and writes a log of its own. Where that parts from the first
one, something has changed, and the first difference says what.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._threads import has_running_loop
from clark_agent.base_tool import AgentTool, ToolContext, ToolResult
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.errors import (
    DecodeError,
    LoopError,
    ToolAborted,
    ToolExecutionError,
    ToolFatal,
    failure_of,
)
from clark_agent.events import EventSink
from clark_agent.loop import RunResult, start
from clark_agent.plugin import Answer, BeforeToolDecision, Block, Rewrite
from clark_agent.plugins.channel_steering import ChannelSteering
from clark_agent.run_log.jsonl import JsonlStore, read_log
from clark_agent.run_log.log import RunLog, store_of
from clark_agent.run_log.memory import MemoryStore
from clark_agent.run_log.pieces import joined
from clark_agent.run_log.records import (
    Answered,
    Asked,
    BatchEnded,
    Entry,
    Record,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    RuntimeResult,
    SteeringAccepted,
    ToolEnded,
    ToolProgress,
    ToolStarted,
)
from clark_agent.run_log.store import LoadedRun, RunStore
from clark_agent.run_state import Replayed, Resumption, Run
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    Start,
    StreamErrorKind,
    StreamEvent,
    StreamRequest,
)
from clark_agent.tool_run import ToolLeftBehindError
from clark_agent.tools import ToolRegistry
from clark_agent.trajectory.differing import Difference, first_difference
from clark_agent.trajectory.fold import fold
from clark_agent.trajectory.forking import usage_tree
from clark_agent.trajectory.resuming import taken_up
from clark_agent.types import AgentContext, AgentMessage, AssistantMessage, StopReason
from clark_agent.wire import decode_json

__all__ = ["ReplayReport", "assert_replays", "replay"]

T = TypeVar("T")


class ReplayReport(Struct, frozen=True):
    """What came of a replay."""

    run_id: str
    drift: Difference | None
    """Where the replay parts from the log first; None: nowhere."""
    result: RunResult | None = None
    error: LoopError | None = None

    @property
    def is_identical(self) -> bool:
        """Whether nothing has changed."""
        return self.drift is None

    def __str__(self) -> str:
        if self.drift is None:
            return f"the run {self.run_id} replays as it was"
        return f"the run {self.run_id} does not replay as it was: {self.drift}"


async def replay(
    store: RunStore | RunLog, run_id: str, config: LoopConfig, *, sink: EventSink | None = None
) -> ReplayReport:
    """Run a logged run again, offline, under a config; say where it differs first.

    The config brings plugins, policy, settings and the tools' declarations; its transport is not
    called and no tool is run, but those that are agents themselves: their runs are replayed too.
    Plugins that ask outside decide as they did.
    """
    store = store_of(store)
    loaded = store.load(run_id)
    fold(loaded)  # which refuses a log with a hole
    copy = MemoryStore()
    outcome: RunResult | LoopError | None = None
    for part in _parts(loaded.records):
        script = Script(loaded.records, part, store, copy)
        outcome = await _replay_part(script, config, sink)
        copy.cut(run_id, part.stop)  # where the process died, what ended the replay is not part
    drift = _drift(store, copy)
    if isinstance(outcome, LoopError):
        return ReplayReport(run_id, drift, error=outcome)
    return ReplayReport(run_id, drift, outcome)


def _parts(records: Sequence[Record]) -> list[range]:
    """What each of the processes has written that had a part in the run."""
    begins = [n for n, record in enumerate(records) if isinstance(record.entry, RunResumed)]
    return [range(begin, end) for begin, end in pairwise([0, *begins, len(records)])]


async def _replay_part(
    script: Script, config: LoopConfig, sink: EventSink | None
) -> RunResult | LoopError:
    context, resumption = script.beginning()
    try:
        return await start(
            () if resumption is not None else script.began.prompts,
            context,
            script.config(config),
            script.signal,
            sink=sink,
            call_id=script.began.tool_call_id,
            resumption=resumption,
            replays=script,
        )
    except (Exception, asyncio.CancelledError) as raised:
        error = failure_of(raised)
        if error is None:
            raise
        return error


def _drift(store: RunStore, copy: RunStore) -> Difference | None:
    """Where a run of the replay parts from what it was; the outermost first."""
    for summary in sorted(copy.runs(), key=lambda run: run.depth):
        first = store.load(summary.run_id).records
        again = copy.load(summary.run_id).records
        if not isinstance(first[-1].entry, (RunEnded, RunFailed)):
            again = again[: len(first)]  # the process died before the run had ended
        drift = first_difference(first, again)
        if drift is not None:
            return replace(drift, run_id=summary.run_id) if summary.parent_run_id else drift
    return None


def assert_replays(path: str | PathLike[str], config: LoopConfig) -> ReplayReport:
    """For tests: fail, with the first difference, unless the run in a log file replays as it was.

    The file is one that a `JsonlStore` wrote, under any name; the runs below it are looked for in
    the same folder. Not async, so that it fits into any test, also one that is.
    """
    store = _FileStore(Path(path))
    report = _run_anywhere(lambda: replay(store, store.run_id, config))
    assert report.is_identical, str(report)
    return report


class _FileStore(JsonlStore):
    """A folder of logs in which one may have any name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        data = path.read_bytes()
        try:
            self.run_id = decode_json(data.partition(b"\n")[0], Record).run
        except DecodeError as error:
            raise DecodeError(f"{path} is no log of a run: {error.reason}", path="line 1") from None
        self._file = read_log(self.run_id, data)

    def load(self, run_id: str) -> LoadedRun:
        return self._file if run_id == self.run_id else super().load(run_id)


def _run_anywhere(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it in a loop of its own; in a thread of its own where a loop runs already."""
    if not has_running_loop():
        return asyncio.run(make())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(make())).result()


class Script:
    """The records of a run as a script for those who answered it.

    The replay writes a log of its own, and so it is known how far it is. Each takes its cue from
    that: the second tool to end in the log ends second, and a message that came while a tool ran
    comes while it runs. Once the replay writes something else than the log has there, it has left
    the log: then nobody waits for anything any more, and it ends as it may.
    """

    def __init__(
        self, records: Sequence[Record], part: range, store: RunStore, copy: RunStore
    ) -> None:
        self.run: Run | None = None
        self.signal = CancellationToken()
        self._part = part
        self._records = records = records[: part.stop]
        began = records[0].entry
        assert isinstance(began, RunBegan)
        self.began = began
        self._entries = [record.entry for record in records]
        self._at = part.start
        self._has_left = False
        self._moved = asyncio.Event()
        self._store = store
        self._copy = copy
        self._children: dict[str, list[str]] | None = None
        self._channel: ChannelSteering | None = None
        self._clock = _ScriptedClock(records, part.start)
        own, before = self._entries[part.start :], self._entries[: part.start]
        self._answers = [entry for entry in own if isinstance(entry, Answered)]
        self._answered = sum(isinstance(entry, Answered) for entry in before)
        self._calls = _calls(self._entries)
        self._ends = _ends(self._entries)
        last = self._entries[-1]
        self._failure = last if isinstance(last, RunFailed) else None
        requests = _has_requests(self._entries)
        self._log = RunLog(copy, full_requests=requests, notes=began.host_notes)
        self._log.on_written = self._written

    def beginning(self) -> tuple[AgentContext, Resumption | None]:
        """Where the run, or this part of it, began."""
        began, start = self.began, self._part.start
        if start == 0:
            return AgentContext(began.system_prompt, began.history, began.identity), None
        before = LoadedRun(began.identity.run_id, tuple(self._records[:start]))
        spent = usage_tree(self._store, began.identity.run_id, before=self._records[start].at)
        return taken_up(fold(before), spent)

    def config(self, config: LoopConfig) -> LoopConfig:
        """The config, with its outside replaced."""
        plugins = [
            ChannelSteering() if type(plugin) is ChannelSteering else plugin
            for plugin in config.plugins
        ]
        channels = [plugin for plugin in plugins if isinstance(plugin, ChannelSteering)]
        self._channel = channels[0] if channels else None
        return config.replace(
            stream=self.answer,
            tools=ToolRegistry([_ScriptedTool(tool, self) for tool in config.registry.values()]),
            plugins=plugins,
            clock=self._clock,
            run_log=self._log,
            tool_timeout=None,
        )

    def child(
        self, tool_call_id: str, prompts: Sequence[AgentMessage], config: LoopConfig
    ) -> Replayed:
        """The run that a call of this one started; with its prompts, if they are what they were."""
        if self._children is None:
            self._children = _children(self._store, self.began.identity.run_id)
        known = self._children.get(tool_call_id)
        if not known:
            text = f"the log has no run that the call {tool_call_id!r} started"
            raise ToolExecutionError(text)
        records = self._store.load(known.pop(0)).records
        script = Script(records, range(len(records)), self._store, self._copy)
        recorded = script.began.prompts
        if [_undated(message) for message in recorded] == [_undated(m) for m in prompts]:
            prompts = recorded
        return Replayed(script.began.identity, prompts, script.config(config), script)

    # --- how far it is --------------------------------------------------------------------------

    def _written(self, entry: Entry) -> None:
        """The replay has written a record."""
        due = self._next
        if type(due) is not type(entry) or _position(due) != _position(entry):
            self._has_left = True
        self._at += 1
        self._clock.move(self._at)
        if not isinstance(entry, Asked):  # what came during an answer comes behind its deltas
            self._send_what_is_due()
        if self._was_cancelled_here(entry):
            self._cancel()
        self._moved.set()

    @property
    def _next(self) -> Entry | None:
        return self._entries[self._at] if self._at < len(self._entries) else None

    async def _reach(self, index: int) -> None:
        """Wait until the records before this one are written; at once if they are."""
        while self._at < index and not self._has_left:
            self._moved.clear()
            await self._moved.wait()

    def _send_what_is_due(self) -> None:
        while isinstance(cue := self._next, SteeringAccepted) and not self._has_left:
            at, handle = self._at, None if self._channel is None else self._channel.handle
            if handle is not None and cue.when == "follow_up":
                _ = handle.follow_up(cue.message)
            elif handle is not None:
                _ = handle.steer(cue.message, cue.when)  # type: ignore[arg-type]
            if self._at == at:
                self._has_left = True  # nobody has heard it

    def _was_cancelled_here(self, written: Entry) -> bool:
        """Whether somebody has cancelled the run behind this record, while no tool was running."""
        if self._has_left or self._raised():
            return False
        match self._next:
            case RunFailed(error="RunAborted"):
                if isinstance(written, Answered):
                    said = written.message.stop_reason
                    return written.discarded is None and said is not StopReason.ABORTED
                return not isinstance(written, Asked)
            case ToolEnded(by_runtime=why):
                is_between = isinstance(written, (Answered, ToolEnded))
                return is_between and why == RuntimeResult("not_executed", "aborted")
            case _:
                return False

    def _raised(self) -> bool:
        """Whether a tool of the newest batch has ended the run."""
        for entry in reversed(self._entries[: self._at]):
            if isinstance(entry, Answered):
                break
            if isinstance(entry, ToolEnded) and entry.raised is not None:
                return True
        return False

    def _cancel(self) -> None:
        if self.run is not None and not self.run.signal.cancelled:
            self.run.signal.cancel(None if self._failure is None else self._failure.reason)

    async def _wait_to_be_stopped(self, why: str) -> None:
        """The run, or the call, was stopped here. Whoever steered has done so.

        It comes from outside, also for the one who knows that it is time.
        """
        loop = asyncio.get_running_loop()
        if why == "aborted" and not self._raised():
            loop.call_soon(self._cancel)
        elif why == "out_of_time" and self.run is not None:
            loop.call_soon(self.run.run_out_of_time)
        await loop.create_future()

    # --- those who answer -----------------------------------------------------------------------

    async def answer(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        """The transport: what the provider answered."""
        if not self._answers:
            self._send_what_is_due()
            if not self._has_left and not isinstance(self._next, RunEnded):
                await self._wait_to_be_stopped("aborted")  # the log ends before the answer
            yield Error(_EMPTY, StreamErrorKind.FATAL, "the log has no further answer")
            return
        answered = self._answers.pop(0)
        self._answered += 1
        if answered.pieces is not None:
            yield Start(_EMPTY, answered.details)
            for chunk in joined(answered.pieces, answered.message):
                yield Chunk(chunk)
        self._send_what_is_due()
        if answered.error is not None:
            yield _failed(answered)
        elif answered.discarded in _STOPPED and not self._has_left:
            await self._wait_to_be_stopped(answered.discarded)
        else:
            yield Done(answered.message)

    def decision(self, plugin: str, position: int) -> BeforeToolDecision | None:
        """What a plugin has decided about a call, with the answer that it had from outside."""
        ended = self._ends.get((self._answered, position))
        if ended is None:  # the log ends before
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

    def by_runtime(self, position: int) -> RuntimeResult | None:
        """Why a call that ends as it did had a result of the runtime's own."""
        ended = self._ends.get((self._answered, position))
        return None if ended is None or self._has_left else ended.by_runtime

    async def run_tool(self, tool: AgentTool, given: Any, ctx: ToolContext) -> ToolResult:
        """What a tool gave, and what it told on the way."""
        known = self._calls.get((self._answered, ctx.position))
        if known is None or self._has_left:
            return ToolResult.error("the log has no such call")
        for index in known.progress:
            await self._reach(index)
            await ctx.update(self._entry(index, ToolProgress).partial)
        if tool.runs_agent:
            own = await tool.execute(given, ctx)
            await self._reach_end(known.end)
            return own
        if known.end is None:  # the log ends before
            await self._reach_end(None)
            await self._wait_to_be_stopped("aborted")
        return await self._end_of(known.end or 0)

    async def _end_of(self, index: int) -> ToolResult:
        """End as the tool did: with its result, an error, or not by itself."""
        ended = self._entry(index, ToolEnded)
        result = ended.given or ended.result
        why = _why_stopped(ended.by_runtime)
        try:
            await self._reach(index)
            if why is not None and not self._has_left:
                await self._wait_to_be_stopped(why)
        except asyncio.CancelledError:
            await self._reach(index)  # when several are stopped they end in the order of the log
            if why is not None:
                if ended.by_runtime is not None and ended.by_runtime.still_running:
                    raise ToolLeftBehindError from None
                raise
        if ended.raised == "fatal":
            raise ToolFatal(ended.raised_text or "")
        if ended.raised == "aborted":
            raise ToolAborted(ended.raised_text or "")
        return result

    async def _reach_end(self, index: int | None) -> None:
        await self._reach(len(self._entries) if index is None else index)

    def _entry(self, index: int, kind: type[T]) -> T:
        entry = self._entries[index]
        assert isinstance(entry, kind)
        return entry


_EMPTY = AssistantMessage((), StopReason.OTHER)
_STOPPED = ("aborted", "steered", "out_of_time")


def _position(entry: object) -> Any:
    """Which call an entry is about, if it is about one."""
    return getattr(entry, "position", None)


def _why_stopped(why: RuntimeResult | None) -> str | None:
    """Why a call was stopped by others, if it was. A timeout is its own affair."""
    if why is None or why.kind != "stopped":
        return None
    return why.reason if why.reason in (*_STOPPED, "sibling") else None


def _failed(answered: Answered) -> Error:
    """How a stream failed. Raises what a transport has raised."""
    if answered.raised is not None:
        raise _exception(*answered.raised)
    kind = StreamErrorKind(answered.error or "")
    return Error(answered.message, kind, answered.error_text or "")


def _exception(name: str, text: str) -> Exception:
    """An exception that is called so, and says that."""
    error: Exception = type(name, (Exception,), {})(text)
    return error


def _has_requests(entries: Sequence[Entry]) -> bool:
    return any(isinstance(entry, Asked) and entry.request is not None for entry in entries)


def _undated(message: AgentMessage) -> AgentMessage:
    return replace(message, timestamp=None)


def _children(store: RunStore, run_id: str) -> dict[str, list[str]]:
    """The runs that a run started, by the call that did, oldest first."""
    found: dict[str, list[str]] = {}
    for summary in reversed(list(store.runs(parent_run_id=run_id))):
        began = store.load(summary.run_id).records[0].entry
        if isinstance(began, RunBegan) and began.tool_call_id is not None:
            found.setdefault(began.tool_call_id, []).append(summary.run_id)
    return found


class _Call(Struct):
    """Where the records of a call that was run stand."""

    progress: list[int] = []
    end: int | None = None


def _calls(entries: Sequence[Entry]) -> dict[tuple[int, int], _Call]:
    """Each call that was run, by the number of the answer and its position in it."""
    calls: dict[tuple[int, int], _Call] = {}
    answers = 0
    for index, entry in enumerate(entries):
        match entry:
            case Answered():
                answers += 1
            case ToolStarted(position=position):
                calls[answers, position] = _Call()
            case ToolProgress(position=position) if (answers, position) in calls:
                calls[answers, position].progress.append(index)
            case ToolEnded(position=position) if (answers, position) in calls:
                calls[answers, position].end = index
            case _:
                pass
    return calls


def _ends(entries: Sequence[Entry]) -> dict[tuple[int, int], ToolEnded]:
    """How each call ended, run or not, by the number of the answer and its position in it."""
    ends: dict[tuple[int, int], ToolEnded] = {}
    answers = 0
    for entry in entries:
        match entry:
            case Answered():
                answers += 1
            case ToolEnded(position=position):
                ends[answers, position] = entry
            case _:
                pass
    return ends


class _ScriptedClock:
    """Says what the clock said, record by record."""

    def __init__(self, records: Sequence[Record], start: int) -> None:
        self._records = records
        self._last = records[start].at
        self._readings: list[int] = []
        self._ids: list[str] = []
        self.move(start)

    def move(self, at: int) -> None:
        """The next record is this one."""
        if at < len(self._records):
            record = self._records[at]
            self._readings = [*record.now]
            if isinstance(record.entry, BatchEnded):
                time = record.entry.time  # one number: the last is said again
                self._readings += time if isinstance(time, tuple) else (time,)
            self._readings.reverse()
            self._ids = [*record.ids]

    def now_ms(self) -> int:
        if self._readings:
            self._last = self._readings.pop()
        return self._last

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def new_id(self) -> str:
        return self._ids.pop(0) if self._ids else "no further id in the log"


class _ScriptedTool(AgentTool):
    """Looks like a tool of the config, and gives what it gave."""

    def __init__(self, tool: AgentTool, script: Script) -> None:
        self._tool = tool
        self._script = script

    def __getattribute__(self, name: str) -> Any:
        if name in ("_tool", "_script", "execute", "__class__", "runs_in_thread", "timeout"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_tool"), name)

    runs_in_thread = False
    timeout = None

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        return await self._script.run_tool(self._tool, args, ctx)
