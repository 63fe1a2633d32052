"""A world for the loop to live in: scripted models, tools and hooks of every temper, and a way to
cancel a run at any of its suspension points.

`live` runs one scenario in it and checks everything that must hold of any run, however it ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import clark_agent as ca
from clark_agent import stream as st
from clark_agent import tool_run
from clark_agent.loop import FALLBACK_ID
from clark_agent.testing import FakeClock, RecordingSink

GRACE = 0.01
PATIENCE = 0.005
EMPTY = ca.AssistantMessage((), ca.StopReason.OTHER)

Temper = Literal[
    "fast",
    "slow",
    "updates",
    "error",
    "raises",
    "hangs",
    "waits_on_signal",
    "swallows",
    "thread",
    "stubborn_thread",
    "keeps_handle",
    "terminal",
    "fatal",
    "aborts",
    "cancels_itself",
    "times_out",
    "cleans_up",
]
TEMPERS: tuple[Temper, ...] = Temper.__args__  # type: ignore[attr-defined]

# What a stream may do instead of giving an answer.
Fault = Literal[
    "empty",
    "zero_output",
    "transient",
    "overflow",
    "aborted",
    "raises",
    "raises_late",
    "hangs",
    "hangs_late",
    "truncated",
    "error_message",
    "no_start",
]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]

HookTemper = Literal["none", "passes", "acts", "raises", "waits", "hangs"]
HOOK_TEMPERS: tuple[HookTemper, ...] = HookTemper.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Scenario:
    """One life of an agent."""

    script: tuple[tuple[Temper, ...] | str | Fault, ...] = ()
    hooks: dict[str, HookTemper] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    steering: tuple[int, ...] = ()
    """At which polls a steering source has something."""
    aborting_siblings: bool = False
    exclusive: bool = False
    repeated_ids: bool = False


@dataclass(frozen=True)
class Cancel:
    """Cancel the run at its n-th suspension point, so many passes of the event loop into it."""

    at: int
    by: Literal["token", "task", "thread"]
    passes: int = 0


# --- suspension points ------------------------------------------------------------------------


class Watched:
    """Awaits a coroutine, counts its suspension points, and does something at one of them."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], at: int, act: Callable[[], None]
    ) -> None:
        self.coroutine, self.at, self.act = coroutine, at, act
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        thrown: BaseException | None = None
        while True:
            try:
                if thrown is None:
                    awaited = self.coroutine.send(None)
                else:
                    awaited = self.coroutine.throw(thrown)
            except StopIteration as done:
                return done.value
            thrown = None
            self.count += 1
            if self.count == self.at:
                self.act()
            try:
                yield awaited
            except BaseException as error:
                thrown = error


# --- inhabitants ------------------------------------------------------------------------------


class World:
    """What the tools and hooks of one life share."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.release = asyncio.Event()
        self.thread_release = threading.Event()
        self.handles: list[ca.ToolContext] = []
        self.ran: Counter[str] = Counter()
        self.open_streams = 0

    def config(self, sink: ca.EventSink) -> ca.LoopConfig:
        scenario = self.scenario
        settings: dict[str, Any] = {"cancel_grace": GRACE, **scenario.settings}
        return ca.LoopConfig(
            stream=self.stream(),
            tools=[Tool(self, temper) for temper in TEMPERS],
            plugins=[Hooks(scenario.hooks), Steering(scenario.steering), ca.UniqueToolCallIds()],
            event_sink=sink,
            clock=FakeClock(),
            **settings,
        )

    def stream(self) -> st.StreamFn:
        calls = iter(enumerate(self.scenario.script))
        steps = list(self.scenario.script)

        async def model(
            request: st.StreamRequest, signal: ca.CancellationToken
        ) -> AsyncIterator[st.StreamEvent]:
            self.open_streams += 1
            try:
                turn, step = next(calls, (len(steps), "the end"))
                async with aclosing(self.play(turn, step)) as events:
                    async for event in events:
                        yield event
            finally:
                self.open_streams -= 1

        return model

    async def play(self, turn: int, step: Any) -> AsyncGenerator[st.StreamEvent, None]:
        if step in FAULTS:
            async with aclosing(self.fail(step)) as events:
                async for event in events:
                    yield event
            return
        yield st.Start(EMPTY)
        await asyncio.sleep(0)
        for word in ("so ", "be it"):
            yield st.Chunk(st.TextChunk(word))
        if isinstance(step, str):
            yield st.Done(ca.AssistantMessage.from_text(step))
            return
        ids = ["same"] * len(step) if self.scenario.repeated_ids else None
        calls = [
            ca.ToolCall(ids[n] if ids else f"t{turn}c{n}", name, {"turn": turn})
            for n, name in enumerate(step)
        ]
        yield st.Done(ca.AssistantMessage.from_calls(calls, "so be it"))

    async def fail(self, fault: Fault) -> AsyncGenerator[st.StreamEvent, None]:
        kinds = {
            "empty": st.StreamErrorKind.EMPTY,
            "zero_output": st.StreamErrorKind.ZERO_OUTPUT_TRANSPORT,
            "transient": st.StreamErrorKind.TRANSIENT,
            "overflow": st.StreamErrorKind.CONTEXT_OVERFLOW,
            "aborted": st.StreamErrorKind.ABORTED,
        }
        call = ca.ToolCall("cut", "fast", {})
        if fault == "no_start":
            yield st.Done(ca.AssistantMessage.from_text("out of the blue"))
            return
        if fault == "raises":
            raise OSError("the wire is cut")
        if fault == "hangs":
            await asyncio.Event().wait()
        yield st.Start(EMPTY)
        yield st.Chunk(st.TextChunk("half a "))
        if fault in ("raises_late", "hangs_late"):
            if fault == "hangs_late":
                await asyncio.Event().wait()
            raise OSError("the wire is cut in mid-word")
        if fault == "truncated":
            yield st.Done(ca.AssistantMessage((call,), ca.StopReason.MAX_TOKENS))
        elif fault == "error_message":
            yield st.Done(ca.AssistantMessage((call,), ca.StopReason.ERROR, "it broke"))
        else:
            partial = ca.AssistantMessage.from_text("half a ")
            yield st.Error(partial, kinds[fault], f"a {fault} failure")


class Tool(ca.AgentTool):
    """A tool with a temper."""

    def __init__(self, world: World, temper: Temper) -> None:
        self.world = world
        self.name = temper
        self.runs_in_thread = "thread" in temper
        self.aborts_siblings_on_error = world.scenario.aborting_siblings
        self.requires_exclusive_sandbox = world.scenario.exclusive
        self.timeout = 0.01 if temper == "times_out" else None
        super().__init__()

    async def execute(self, args: Any, ctx: ca.ToolContext) -> ca.ToolResult:
        self.world.ran[ctx.tool_call_id] += 1
        run: Callable[[ca.ToolContext], Coroutine[Any, Any, ca.ToolResult | None]]
        run = getattr(self, self.name)
        return await run(ctx) or ca.ToolResult.text(f"{self.name} is done")

    async def fast(self, ctx: ca.ToolContext) -> None: ...

    async def slow(self, ctx: ca.ToolContext) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def updates(self, ctx: ca.ToolContext) -> None:
        for n in range(3):
            await ctx.update(f"{n} of 3")
            await asyncio.sleep(0)

    async def error(self, ctx: ca.ToolContext) -> ca.ToolResult:
        await asyncio.sleep(0)
        return ca.ToolResult.error("that did not work")

    async def raises(self, ctx: ca.ToolContext) -> None:
        await asyncio.sleep(0)
        raise LookupError("no such thing")

    async def hangs(self, ctx: ca.ToolContext) -> None:
        await self.world.release.wait()

    async def waits_on_signal(self, ctx: ca.ToolContext) -> ca.ToolResult:
        await ctx.signal.wait()
        return ca.ToolResult.text("I was asked to stop, and did")

    async def swallows(self, ctx: ca.ToolContext) -> None:
        while not self.world.release.is_set():
            try:
                await self.world.release.wait()
            except asyncio.CancelledError:
                continue

    async def cleans_up(self, ctx: ca.ToolContext) -> None:
        try:
            await self.world.release.wait()
        finally:
            await asyncio.sleep(0)

    async def thread(self, ctx: ca.ToolContext) -> None:
        await asyncio.to_thread(self.block, ctx)

    async def stubborn_thread(self, ctx: ca.ToolContext) -> None:
        await asyncio.to_thread(self.world.thread_release.wait, 5)

    def block(self, ctx: ca.ToolContext) -> None:
        while not (ctx.signal.cancelled or self.world.thread_release.is_set()):
            self.world.thread_release.wait(0.001)

    async def keeps_handle(self, ctx: ca.ToolContext) -> None:
        self.world.handles.append(ctx)

    async def terminal(self, ctx: ca.ToolContext) -> ca.ToolResult:
        return ca.ToolResult.terminal("that is all")

    async def fatal(self, ctx: ca.ToolContext) -> None:
        raise ca.ToolFatal("the house is on fire")

    async def aborts(self, ctx: ca.ToolContext) -> None:
        raise ca.ToolAborted("the user said no")

    async def cancels_itself(self, ctx: ca.ToolContext) -> None:
        raise asyncio.CancelledError

    async def times_out(self, ctx: ca.ToolContext) -> None:
        await self.world.release.wait()


class Hooks:
    """All hooks in one, each with a temper."""

    name = "hooks"
    tool_gate_class = ca.ToolGateClass.ADVISORY

    def __init__(self, tempers: dict[str, HookTemper]) -> None:
        self.tempers = tempers

    async def mood(self, hook: str) -> bool:
        """Whether the hook should act."""
        match self.tempers.get(hook, "none"):
            case "raises":
                raise RuntimeError(f"{hook} is in a mood")
            case "waits":
                await asyncio.sleep(0)
            case "hangs":
                await asyncio.Event().wait()
            case "acts":
                return True
            case _:
                pass
        return False

    async def on_before_tool_call(
        self, ctx: ca.BeforeToolCallContext
    ) -> ca.BeforeToolDecision | None:
        return ca.Block("not today") if await self.mood("before") else None

    async def on_after_tool_call(self, ctx: ca.AfterToolCallContext) -> ca.AfterToolDecision | None:
        if await self.mood("after"):
            return ca.AfterToolDecision(ca.ToolResult.text("changed"))
        return None

    async def transform_context(
        self, messages: Sequence[ca.AgentMessage], ctx: ca.TransformContext
    ) -> Sequence[ca.AgentMessage]:
        return list(messages)[-50:] if await self.mood("transform") else messages

    async def next_turn_tool_allowlist(self, ctx: ca.ToolGateContext) -> set[str] | None:
        return {"fast", "slow"} if await self.mood("gate") else None

    async def on_event(self, event: ca.AgentEvent) -> None:
        if isinstance(event, (ca.events.MessageEnd, ca.events.ToolExecutionStart)):
            await self.mood("observer")

    async def next_follow_up_messages(self) -> list[ca.AgentMessage]:
        await self.mood("follow_up")
        return []


class Steering:
    """Has something to say at certain polls."""

    name = "steering"

    def __init__(self, polls: Sequence[int]) -> None:
        self.polls = polls
        self.count = 0

    def for_run(self) -> Steering:
        return Steering(self.polls)

    async def next_steering_messages(self) -> list[ca.AgentMessage]:
        await asyncio.sleep(0)
        self.count += 1
        return [ca.UserMessage(f"steer {self.count}")] if self.count in self.polls else []


# --- a life, and what must hold of it -----------------------------------------------------------


@dataclass
class Life:
    """How a run went."""

    outcome: ca.RunResult | BaseException
    sink: RecordingSink
    points: int


async def live(scenario: Scenario, cancel: Cancel | None = None) -> Life:
    """Run the scenario, cancelled or not, and check all that must hold."""
    world, sink, token = World(scenario), RecordingSink(), ca.CancellationToken()
    config = world.config(sink)
    before = asyncio.all_tasks()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    ended = False

    def act(passes: int) -> None:
        assert cancel is not None
        if ended:
            return
        if passes > 0:
            loop.call_soon(act, passes - 1)
        elif cancel.by == "token":
            token.cancel("at a suspension point")
        elif cancel.by == "task":
            task.cancel()
        else:
            thread = threading.Thread(target=token.cancel)
            thread.start()
            thread.join()

    # Whatever hangs for good is cancelled in the end, so that every life ends.
    net = loop.call_later(PATIENCE, token.cancel, "it has hung for long enough")
    at, passes = (0, 0) if cancel is None else (cancel.at, cancel.passes)
    coroutine = ca.run("go", ca.AgentContext("sys"), config, token)
    watched = Watched(coroutine, at, lambda: act(passes))
    outcome: ca.RunResult | BaseException
    try:
        outcome = await watched
    except (ca.LoopError, asyncio.CancelledError) as error:
        outcome = error
    finally:
        ended = True
        net.cancel()
    cancelled_by_task = task.cancelling()
    while task.cancelling():
        task.uncancel()
    life = Life(outcome, sink, watched.count)
    check_ending(life, cancelled_by_task)
    assert "cut" not in world.ran, "a call that was cut off has been run"
    check_messages(life)
    await check_nothing_left(world, sink, before)
    await check_config_still_works(world, config)
    return life


def check_ending(life: Life, cancelled_by_task: int) -> None:
    """A token gives RunAborted, a cancelled task CancelledError, and the count is right."""
    if isinstance(life.outcome, asyncio.CancelledError):
        assert cancelled_by_task == 1, "CancelledError without a cancelled task"
    else:
        assert isinstance(life.outcome, (ca.RunResult, ca.LoopError)), life.outcome
        assert type(life.outcome) is not ca.LoopError, f"unexpected: {life.outcome!r}"


def messages_of(outcome: ca.RunResult | BaseException) -> tuple[ca.AgentMessage, ...]:
    carrier = outcome.__cause__ if isinstance(outcome, asyncio.CancelledError) else outcome
    assert isinstance(carrier, (ca.RunResult, ca.LoopError)), f"{outcome!r} carries nothing"
    return carrier.messages


def check_messages(life: Life) -> None:
    """The events are in order, tell the same messages, and every call is answered in its place."""
    messages = messages_of(life.outcome)
    ca.check_events(life.sink.events)
    assert ca.fold_events(life.sink.events) == messages
    waiting: Counter[str] = Counter()
    for message in messages:
        if isinstance(message, ca.ToolResultMessage):
            if message.tool_call_id.startswith(FALLBACK_ID):  # it has no call, and is meant to
                continue
            assert waiting[message.tool_call_id] > 0, f"a result for nothing: {message}"
            waiting[message.tool_call_id] -= 1
            continue
        assert not waiting.total(), f"unanswered before {message}: {waiting}"
        if isinstance(message, ca.AssistantMessage):
            waiting.update([call.id for call in message.tool_calls])
    assert not waiting.total(), f"unanswered at the end: {waiting}"
    for change in ca.repair_history(messages).changes:
        is_repeated_id = change.kind is ca.HistoryChangeKind.RENAMED_CALL
        assert is_repeated_id or change.tool_call_id.startswith(FALLBACK_ID), change


async def check_nothing_left(
    world: World, sink: RecordingSink, before: set[asyncio.Task[Any]]
) -> None:
    """No stream is open, no task or timer is left, and late progress is dropped."""
    assert world.open_streams == 0
    told = len(sink.events)
    for handle in world.handles:
        await handle.update("too late")
    assert len(sink.events) == told
    world.release.set()
    world.thread_release.set()
    if rest := asyncio.all_tasks() - before:  # tools that ignored everything end now
        assert len(rest) <= tool_run.left_behind()
        await asyncio.wait(rest)
    for _ in range(2):  # their last callbacks
        await asyncio.sleep(0)
    assert tool_run.left_behind() == 0
    left = asyncio.all_tasks() - before
    assert not left, left
    loop: Any = asyncio.get_running_loop()
    timers = [handle for handle in loop._scheduled if not handle.cancelled()]
    assert not timers, timers
    assert not [generator for generator in loop._asyncgens if generator.ag_frame is not None]


async def check_config_still_works(world: World, config: ca.LoopConfig) -> None:
    """The next run on the same config knows nothing of this one."""
    if "hangs" in world.scenario.hooks.values():
        return
    scenario = world.scenario
    fresh = World(Scenario((), scenario.hooks, scenario.settings, scenario.steering))
    again, anew = RecordingSink(), RecordingSink()
    used = config.replace(stream=fresh.stream(), event_sink=again)
    for one in (used, fresh.config(anew)):
        with suppress(ca.LoopError):
            await ca.run("again", ca.AgentContext("sys"), one)
    assert again.types == anew.types
