"""A process that gives a run up leaves nothing behind but what has really happened."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from clark_agent import (
    AfterToolCallContext,
    AgentContext,
    AgentTool,
    BeforeToolCallContext,
    CancellationToken,
    LoopConfig,
    LoopError,
    LoopOutcome,
    RunAborted,
    RunIdentity,
    Suspend,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    agent_tool,
    run,
    tool,
)
from clark_agent.cancellation import LET_GO
from clark_agent.errors import RunLetGo, failure_of
from clark_agent.events import AgentEvent, ChildRunEvent, ToolExecutionStart
from clark_agent.history import repair_history
from clark_agent.replay import replay
from clark_agent.run_log import (
    Allow,
    GiveArguments,
    JsonlStore,
    MemoryStore,
    RunAppender,
    RunLog,
    RunStore,
    decide,
    fold,
    resume,
)
from clark_agent.run_log.records import (
    Answered,
    BatchEnded,
    CallSuspended,
    Record,
    RunFailed,
    RunSuspended,
    ToolEnded,
    ToolStarted,
    ToolWithdrawn,
)
from clark_agent.testing import ScriptedStream, call, check_events
from clark_agent.waiting import Decision
from tests.run_log import stories, waiting_stories
from tests.run_log.stories import FAILURES, STORIES, Deed, Story, after, carried, undated
from tests.run_log.storing import child, line_from
from tests.run_log.waiting_stories import ROOT, WAITING, Gate, settle
from tests.sizes import FACTOR

pytestmark = pytest.mark.soak

ALL = (*STORIES, *FAILURES, *[f"waiting: {name}" for name in WAITING])

_ENDED_BY_A_TOOL = ("a_tool_is_fatal", "a_tool_aborts", "a_tool_is_fatal_alone")
_FORGETS_ITS_END = {*_ENDED_BY_A_TOOL, "steered_and_failed", "time_runs_out_in_a_tool"}
"""Stories that go on after a resume, though a tool or the time had ended them: so they do after a
crash between the result of that tool and the end of the run."""


_AGENTS_AT_ONCE = {"helpers", "waiting: agents_side_by_side"}
"""Stories in which agents run side by side. Which of them notices first that it is let go depends
on the event loop, and a replay may count the last events of one of them otherwise."""
_DEPENDS_ON_TIME = {"a_sibling_fails", "steering_now_in_a_batch", "cancelled_in_a_batch"}
"""Stories in which a tool is stopped, and may come to its end if the run is let go before that."""


def begin(name: str) -> Story:
    """A fresh story of any kind, under a known id."""
    if name.startswith("waiting: "):
        return waiting_stories.begin(name.removeprefix("waiting: "))
    story = stories.begin(name)
    context = story.context
    story.context = AgentContext(context.system_prompt, context.messages, RunIdentity(ROOT))
    return story


class Letting:
    """A sink that lets the run go at one event."""

    def __init__(self, story: Story, at: int | None = None) -> None:
        self.story = story
        self.at = at
        self.events: list[AgentEvent] = []
        story.sink = self  # type: ignore[assignment]

    async def __call__(self, event: AgentEvent) -> None:
        self.events.append(event)
        if len(self.events) == self.at:
            self.story.signal.cancel(LET_GO)


async def see_through(store: RunStore, story: Story, *, begins: bool = True) -> Any:
    """Play a story until it has ended or was let go: its result or its error."""
    outcome: Any = None
    if begins:
        outcome = await story.play(RunLog(store))
    while not isinstance(outcome, BaseException):
        if outcome is not None:
            if outcome.outcome is not LoopOutcome.SUSPENDED:
                break
            await settle(store, outcome, story)
        try:
            outcome = await resume(store, ROOT, story.config(RunLog(store)), story.signal)
        except LoopError as error:
            outcome = error
    return outcome


def cut_off(store: RunStore) -> int:
    """How many calls of all runs have started and not ended."""
    count = 0
    for summary in store.runs():
        open_calls: set[int] = set()
        for record in store.load(summary.run_id).records:
            match record.entry:
                case Answered():
                    open_calls = set()
                case ToolStarted(position=position):
                    open_calls.add(position)
                case ToolEnded(position=position) | CallSuspended(position=position):
                    open_calls.discard(position)
                case _:
                    pass
        count += len(open_calls)
    return count


def entries_of(store: RunStore, kind: Any) -> list[Any]:
    """The entries of one kind, of all runs."""
    logs = [store.load(summary.run_id).records for summary in store.runs()]
    return [r.entry for records in logs for r in records if isinstance(r.entry, kind)]


def uncertain(store: RunStore) -> list[ToolEnded]:
    ended = entries_of(store, ToolEnded)
    return [e for e in ended if e.by_runtime is not None and e.by_runtime.kind == "uncertain"]


def check_left(name: str, store: RunStore, failure: RunLetGo, events: list[AgentEvent]) -> None:
    """What must hold of a run that was let go."""
    if name != "the_same_id_again":  # which is a history that could be repaired
        assert repair_history(failure.messages).changes == ()
    if name not in WAITING and not name.startswith("waiting"):
        check_events(events)
    if name not in FAILURES:
        assert entries_of(store, RunFailed) == []
        stopped = [e.by_runtime for e in entries_of(store, ToolEnded) if e.by_runtime is not None]
        assert [why for why in stopped if why.reason == "aborted"] == []


async def let_go_and_resume(name: str, at: int, expected: Any) -> str:
    """Let a story go at an event, take it up, and replay it."""
    store, story = MemoryStore(), begin(name)
    sink = Letting(story, at)
    left = await see_through(store, story)
    if not isinstance(left, RunLetGo):
        assert type(left) is type(expected)
        return "ended before"
    check_left(name, store, left, sink.events)
    open_calls, ran = cut_off(store), list(story.ran)
    again = begin(name)
    again.clock.time_ms = story.clock.time_ms
    outcome = await see_through(store, again, begins=False)
    assert len(uncertain(store)) <= open_calls
    twice = Counter(set(ran)) + Counter(set(again.ran)) - Counter({*ran, *again.ran})
    if name not in _SAME_IDS:
        idempotent = {t.name for t in again.config().registry.values() if t.idempotent}
        names = {e.tool_call_id: e.tool_name for e in entries_of(store, ToolStarted)}
        assert {names.get(call_id, call_id) for call_id in twice} <= idempotent
    if not uncertain(store) and name not in _FORGETS_ITS_END | _DEPENDS_ON_TIME:
        assert type(outcome) is type(expected), outcome
        assert undated(carried(outcome)) == undated(carried(expected))
    replayed = begin(name)
    report = await replay(store, ROOT, replayed.config())
    assert str(report.drift) == "None" or name in _AGENTS_AT_ONCE, report.drift
    assert not replayed.ran
    return "let go"


_SAME_IDS = {
    "the_same_id_again",
    "helpers",
    "a_budget_with_helpers",
    "waiting: a_tree_with_a_budget",
    "waiting: agents_side_by_side",
}
"""Stories in which several calls have the same id."""

_STEP = 1 if FACTOR > 1 else 11


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
async def test_a_story_is_let_go_at_every_event(name: str) -> None:
    """At every eleventh, beginning with another one in each story; in `make soak` at every one."""
    story = begin(name)
    sink = Letting(story)
    expected = await see_through(MemoryStore(), story)
    count, problems = len(sink.events), list[str]()
    came: Counter[str] = Counter()
    for at in range(1 + len(name) % _STEP, count + 1, _STEP):
        try:
            async with asyncio.timeout(30):
                came[await let_go_and_resume(name, at, expected)] += 1
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else ""
            problems.append(f"at {at} of {count}: {type(error).__name__}: {first}")
    assert problems == []
    assert came["let go"] > 0


# --- in particular --------------------------------------------------------------------------------


async def let_go(config: LoopConfig, when: Any, store: RunStore) -> RunLetGo:
    """Run, let it go when an event says so, and return what it raises."""
    token, events = CancellationToken(), list[AgentEvent]()

    async def listen(event: AgentEvent) -> None:
        events.append(event)
        if when(event):
            token.cancel(LET_GO)

    config = config.replace(event_sink=listen, run_log=RunLog(store), cancel_grace=0.05)
    with pytest.raises(RunLetGo) as raised:
        await run("Go.", AgentContext("You work.", identity=RunIdentity(ROOT)), config, token)
    check_events(events)
    assert repair_history(raised.value.messages).changes == ()
    assert entries_of(store, RunFailed) == []
    return raised.value


def results(store: RunStore, run_id: str = ROOT) -> dict[int, str]:
    """The results in the log, by position."""
    entries = [record.entry for record in store.load(run_id).records]
    return {e.position: e.result.plain_text for e in entries if isinstance(e, ToolEnded)}


def starts(name: str) -> Any:
    return lambda event: isinstance(event, ToolExecutionStart) and event.tool_name == name


async def test_a_batch_with_finished_running_and_waiting_calls() -> None:
    """What has returned is in the log, what waits still waits, and what ran is uncertain."""
    store, story = MemoryStore(), Story()
    token = CancellationToken()

    async def stops(args: Any, ctx: ToolContext) -> ToolResult:
        for _ in range(5):  # the others have their turn
            await asyncio.sleep(0)
        token.cancel(LET_GO)
        await asyncio.sleep(60)
        raise AssertionError("it is stopped")

    tools = [Deed(story, "quick", "quick"), Deed(story, "stops", stops), Deed(story, "pay", "paid")]
    model = story.model([call("quick"), call("stops"), call("pay"), call("quick")], "Done.")
    config = LoopConfig(
        stream=model, tools=tools, plugins=[Gate("pay")], run_log=RunLog(store), clock=story.clock
    )
    with pytest.raises(RunLetGo):
        await run("Go.", AgentContext(identity=RunIdentity(ROOT)), config, token)
    assert results(store) == {0: "quick", 3: "quick"}
    assert [e.position for e in entries_of(store, CallSuspended)] == [2]
    assert entries_of(store, (RunSuspended, BatchEnded, RunFailed)) == []
    result = await resume(store, ROOT, config)
    assert result.outcome is LoopOutcome.SUSPENDED
    assert [request.tool_name for request in result.waiting] == ["pay"]
    await settle(store, result, story)
    result = await resume(store, ROOT, config)
    assert [e.position for e in entries_of(store, ToolEnded)] == [0, 3, 1, 2]
    assert [e.position for e in uncertain(store)] == [1]
    assert story.ran == ["t0c0", "t0c1", "t0c3", "t0c2"]
    report = await replay(store, ROOT, config)
    assert str(report.drift) == "None", report.drift


async def test_a_result_that_comes_while_the_tool_is_stopped_is_kept() -> None:
    """A tool that ends its work before it stops has returned: that is in the log."""
    store, story, token = MemoryStore(), Story(), CancellationToken()

    async def finishes(args: Any, ctx: ToolContext) -> ToolResult:
        if args["n"]:
            token.cancel(LET_GO)
        await ctx.signal.wait()
        return ToolResult.text("finished")

    config = LoopConfig(
        stream=story.model([call("finishes", n=0), call("finishes", n=1)], "Done."),
        tools=[Deed(story, "finishes", finishes)],
        run_log=RunLog(store),
        clock=story.clock,
    )
    with pytest.raises(RunLetGo):
        await run("Go.", AgentContext(identity=RunIdentity(ROOT)), config, token)
    assert results(store) == {0: "finished", 1: "finished"}
    assert entries_of(store, (BatchEnded, RunFailed)) == []
    result = await resume(store, ROOT, config)
    assert result.outcome is LoopOutcome.DONE
    assert story.ran == ["t0c0", "t0c1"]
    assert str((await replay(store, ROOT, config)).drift) == "None"


@pytest.mark.parametrize("how", ["thread", "deaf", "async"])
async def test_a_tool_that_runs_is_uncertain_later(how: str) -> None:
    """Whether it stops, runs on in a thread, or does not listen: nobody knows what it has done."""
    store, story = MemoryStore(), Story()
    token, release = CancellationToken(), asyncio.Event()

    def blocks() -> str:
        """Block for a while."""
        token.cancel(LET_GO)
        time.sleep(0.2)
        return "too late"

    async def deaf(args: Any, ctx: ToolContext) -> ToolResult:
        token.cancel(LET_GO)
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return ToolResult.text("too late")

    async def sleeps(args: Any, ctx: ToolContext) -> ToolResult:
        token.cancel(LET_GO)
        await asyncio.sleep(60)
        return ToolResult.text("too late")

    made: Any = tool(blocks, name="work")
    if how != "thread":
        made = Deed(story, "work", deaf if how == "deaf" else sleeps)
    config = LoopConfig(
        stream=story.model(call("work"), "Done."),
        tools=[made],
        run_log=RunLog(store),
        cancel_grace=0.02,
        clock=story.clock,
    )
    with pytest.raises(RunLetGo):
        await run("Go.", AgentContext(identity=RunIdentity(ROOT)), config, token)
    release.set()
    assert entries_of(store, (ToolEnded, BatchEnded, RunFailed)) == []
    result = await resume(store, ROOT, config)
    assert result.outcome is LoopOutcome.DONE
    assert len(uncertain(store)) == 1
    assert str((await replay(store, ROOT, config)).drift) == "None"


class Slow:
    """A hook that waits until the run is let go."""

    name = "slow"

    def __init__(self, token: CancellationToken, which: str) -> None:
        self.token = token
        self.which = which
        self.seen: list[str] = []

    async def on_before_tool_call(self, ctx: Any) -> None:
        if self.which == "before":
            self.token.cancel(LET_GO)
            await asyncio.sleep(0)

    async def on_after_tool_call(self, ctx: AfterToolCallContext) -> None:
        self.seen.append(ctx.result.plain_text)
        if self.which == "after":
            self.token.cancel(LET_GO)
            await asyncio.sleep(0)


@pytest.mark.parametrize("which", ["before", "after"])
@pytest.mark.parametrize("calls", [1, 2])
async def test_in_a_hook(which: str, calls: int) -> None:
    """A call whose hooks were asked before it has not started, and runs later. A result that hooks
    after the call were checking is not recorded unchecked.
    """
    store, story, token = MemoryStore(), Story(), CancellationToken()
    hook = Slow(token, which)
    config = LoopConfig(
        stream=story.model([call("work")] * calls, "Done."),
        tools=[Deed(story, "work", after(1))],
        plugins=[hook],
        run_log=RunLog(store),
        clock=story.clock,
    )
    with pytest.raises(RunLetGo):
        await run("Go.", AgentContext(identity=RunIdentity(ROOT)), config, token)
    for ended in entries_of(store, ToolEnded):
        assert ended.by_runtime is None
        assert ended.result.plain_text in hook.seen
    assert entries_of(store, (BatchEnded, RunFailed)) == []
    started = len(story.ran)
    assert started == (0 if which == "before" else calls)
    again = LoopConfig(
        stream=config.stream, tools=config.tools, run_log=RunLog(store), clock=story.clock
    )
    result = await resume(store, ROOT, again)
    assert result.outcome is LoopOutcome.DONE
    assert max(Counter(story.ran).values()) == 1
    if which == "before":
        assert len(story.ran) == calls
        assert uncertain(store) == []


async def test_in_children_three_levels_down() -> None:
    store, story = MemoryStore(), Story()
    below: list[AgentTool] = []
    for level in (3, 2, 1):
        calls = [call("work", n=level), *[call(made.name, task="down") for made in below]]
        config = LoopConfig(
            stream=story.model(calls, f"Done {level}.", prefix=f"l{level}"),
            tools=[Deed(story, "work", after(level)), *below],
            clock=story.clock,
        )
        below = [agent_tool(f"level{level}", "goes down", config)]
    top = LoopConfig(
        stream=story.model([call("level1", task="go"), call("work")], "All done."),
        tools=[*below, Deed(story, "work", after(30))],
        clock=story.clock,
    )

    def at_the_bottom(event: AgentEvent) -> bool:
        is_deep = isinstance(event, ChildRunEvent) and event.identity.depth == 3
        return is_deep and isinstance(event.event, ToolExecutionStart)  # type: ignore[union-attr]

    await let_go(top, at_the_bottom, store)
    assert len(store.runs()) == 4
    assert [summary.outcome for summary in store.runs()] == [None] * 4
    result = await resume(store, ROOT, top.replace(run_log=RunLog(store)))
    assert result.outcome is LoopOutcome.DONE
    assert len(store.runs()) == 4
    assert max(Counter(story.ran).values()) == 1
    assert str((await replay(store, ROOT, top)).drift) == "None"


@pytest.mark.parametrize("reason", [LET_GO, "the user has left"])
async def test_a_run_that_is_cancelled_before_it_is_suspended_is_not_suspended(reason: str) -> None:
    """One call waits, and the run is cancelled when the other is about to start."""
    store, story, token = MemoryStore(), Story(), CancellationToken()

    async def listen(event: AgentEvent) -> None:
        if isinstance(event, ToolExecutionStart):
            token.cancel(reason)

    config = LoopConfig(
        stream=story.model([call("pay"), call("work")], "Done."),
        tools=[Deed(story, "pay", "paid"), Deed(story, "work", "worked")],
        plugins=[Gate("pay")],
        event_sink=listen,
        run_log=RunLog(store),
        clock=story.clock,
    )
    with pytest.raises(RunLetGo if reason == LET_GO else RunAborted) as raised:
        await run("Go.", AgentContext(identity=RunIdentity(ROOT)), config, token)
    assert repair_history(raised.value.messages).changes == ()
    assert entries_of(store, RunSuspended) == []
    assert len(entries_of(store, RunFailed)) == (reason != LET_GO)
    assert story.ran == []


async def test_a_task_that_is_cancelled_is_not_let_go() -> None:
    """Only the token lets a run go; a cancelled task aborts it."""
    store, story = MemoryStore(), Story()
    started = asyncio.Event()

    async def waits(args: Any, ctx: ToolContext) -> ToolResult:
        started.set()
        await asyncio.sleep(60)
        return ToolResult.text("never")

    config = LoopConfig(
        stream=story.model(call("work"), "Done."),
        tools=[Deed(story, "work", waits)],
        run_log=RunLog(store),
    )
    task = asyncio.ensure_future(run("Go.", AgentContext(identity=RunIdentity(ROOT)), config))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert isinstance(failure_of(raised.value), RunAborted)
    assert len(entries_of(store, RunFailed)) == 1


@pytest.mark.slow
async def test_a_worker_gives_its_run_up_at_sigterm(tmp_path: Path) -> None:
    """Its process says so and ends; this one goes on."""
    with child("work_until_told", "jsonl", tmp_path) as worker:
        assert line_from(worker) == "working"
        os.kill(worker.pid, signal.SIGTERM)
        assert line_from(worker) == "let go"
        assert worker.wait(20) == 0
    store = JsonlStore(tmp_path / "runs")
    assert [entry.position for entry in entries_of(store, ToolEnded)] == [0]
    assert entries_of(store, (BatchEnded, RunFailed)) == []
    done = LoopConfig(
        stream=ScriptedStream(["Done."]),
        tools=[tool(_quick, name="quick"), tool(_slow, name="slow")],
    )
    result = await resume(store, ROOT, done)
    assert result.outcome is LoopOutcome.DONE
    assert len(uncertain(store)) == 1
    assert fold(store.load(ROOT)).messages == list(result.messages)


async def _quick() -> str:
    """Be quick."""
    return "quick"


async def _slow() -> str:
    """Be slow."""
    raise AssertionError("it is not run again")


@pytest.mark.xfail(strict=True, reason="the log has it, and resume does not act on it")
@pytest.mark.parametrize("name", ["a_tool_is_fatal_alone", "a_tool_is_fatal", "a_tool_aborts"])
async def test_a_tool_that_has_ended_the_run_ends_it_after_a_resume_too(name: str) -> None:
    """The process dies between the result of the tool and the end of the run."""
    store, story = MemoryStore(), begin(name)
    ended = await see_through(store, story)
    records = store.load(ROOT).records
    [fatal] = [r.seq for r in records if isinstance(r.entry, ToolEnded) and r.entry.raised]
    cut, again = MemoryStore(), begin(name)
    stories.fill(cut, ROOT, records[: fatal + 1])
    outcome = await see_through(cut, again, begins=False)
    assert type(outcome) is type(ended)


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_call_that_was_recorded_and_did_not_begin_is_not_uncertain(calls: int) -> None:
    store, token, begun = HoldingStore(), CancellationToken(), list[str]()

    @tool
    async def work(ctx: ToolContext) -> str:
        """Work."""
        begun.append(ctx.idempotency_key)
        return "worked"

    def config(*answers: Any) -> LoopConfig:
        return LoopConfig(stream=ScriptedStream(answers), tools=[work], run_log=RunLog(store))

    store.when_started = lambda: token.cancel(LET_GO)
    context = AgentContext(identity=RunIdentity.root("r"))
    with pytest.raises(RunLetGo):
        await run("Go.", context, config([call("work")] * calls), token)
    assert begun == []
    kinds = [type(record.entry) for record in store.load("r").records]
    assert kinds.count(ToolWithdrawn) == kinds.count(ToolStarted) > 0
    store.when_started = lambda: None
    result = await resume(store, "r", config("Done."))
    assert len(begun) == calls
    assert [m.plain_text for m in result.messages if isinstance(m, ToolResultMessage)] == [
        "worked"
    ] * calls
    report = await replay(store, "r", config([call("work")] * calls, "Done."))
    assert str(report.drift) == "None"
    assert fold(store.load("r")).messages == list(result.messages)


class Asking:
    """Holds every call back, until it is allowed."""

    name = "asking"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend:
        return Suspend({"may": ctx.tool_call.name})


@pytest.mark.parametrize("decision", [Allow(), GiveArguments({"n": 5})], ids=["allow", "arguments"])
async def test_a_decision_holds_if_the_call_did_not_begin(decision: Decision) -> None:
    store, token, begun = HoldingStore(), CancellationToken(), list[int]()

    @tool
    async def work(n: int) -> str:
        """Work."""
        begun.append(n)
        return f"worked {n}"

    def config(*answers: Any) -> LoopConfig:
        return LoopConfig(
            stream=ScriptedStream(answers), tools=[work], run_log=RunLog(store), plugins=[Asking()]
        )

    store.when_started = lambda: token.cancel(LET_GO)
    context = AgentContext(identity=RunIdentity.root("r"))
    first = await run("Go.", context, config(call("work", n=1)))
    await decide(store, "r", first.waiting[0].request_id, decision)
    with pytest.raises(RunLetGo):
        await resume(store, "r", config(), token)
    assert begun == []
    store.when_started = lambda: None
    result = await resume(store, "r", config("Done."))
    assert (result.outcome, begun) == (LoopOutcome.DONE, [5 if decision != Allow() else 1])
    report = await replay(store, "r", config(call("work", n=1), "Done."))
    assert str(report.drift) == "None"
    assert fold(store.load("r")).messages == list(result.messages)


@pytest.mark.parametrize("decision", [Allow(), GiveArguments({"n": 5})], ids=["allow", "arguments"])
async def test_a_decision_holds_if_the_call_runs_again_after_a_crash(decision: Decision) -> None:
    whole, begun = MemoryStore(), list[int]()

    @tool(idempotent=True)
    async def work(n: int) -> str:
        """Work."""
        begun.append(n)
        return f"worked {n}"

    def config(store: MemoryStore, *answers: Any) -> LoopConfig:
        return LoopConfig(
            stream=ScriptedStream(answers), tools=[work], run_log=RunLog(store), plugins=[Asking()]
        )

    context = AgentContext(identity=RunIdentity.root("r"))
    first = await run("Go.", context, config(whole, call("work", n=1)))
    await decide(whole, "r", first.waiting[0].request_id, decision)
    await resume(whole, "r", config(whole, "Done."))
    records = whole.load("r").records
    (started,) = [n for n, r in enumerate(records) if isinstance(r.entry, ToolStarted)]
    cut = MemoryStore()
    stories.fill(cut, "r", records[: started + 1])
    result = await resume(cut, "r", config(cut, "Done."))
    assert (result.outcome, begun) == (LoopOutcome.DONE, [5 if decision != Allow() else 1] * 2)
    report = await replay(cut, "r", config(cut, call("work", n=1), "Done."))
    assert str(report.drift) == "None"


class HoldingStore(MemoryStore):
    """Does something while the record waits that a tool starts."""

    when_started: Callable[[], object]

    def create(self, run_id: str) -> RunAppender:  # type: ignore[override]
        return Holding(self, super().create(run_id))

    def reopen(self, run_id: str, *, after: int) -> RunAppender:  # type: ignore[override]
        return Holding(self, super().reopen(run_id, after=after))


class Holding:
    """An appender whose barriers take a moment."""

    def __init__(self, store: HoldingStore, appender: RunAppender) -> None:
        self._store = store
        self._appender = appender
        self._last: Record | None = None
        self.flush = appender.flush
        self.close = appender.close

    def append(self, record: Record, data: bytes, /) -> None:
        self._last = record
        self._appender.append(record, data)

    def barrier(self) -> Awaitable[None]:
        return self._pass()

    async def _pass(self) -> None:
        if self._last is not None and isinstance(self._last.entry, ToolStarted):
            self._store.when_started()
        await asyncio.sleep(0)
        await self._appender.barrier()
