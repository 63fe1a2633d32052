"""A world for the loop to live in: scripted models, tools and hooks of every temper, and a way to
cancel a run, or to steer it, at any of its suspension points.

`live` runs one scenario in it and checks everything that must hold of any run, however it ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import clark_agent as ca
from clark_agent import stream as st
from clark_agent.engine import supervised
from clark_agent.engine.loop import FALLBACK_ID
from clark_agent.history import HistoryChangeKind, repair_history
from clark_agent.plugins.base import ToolGateClass
from clark_agent.steering import SteeringStatus
from clark_agent.testing import FakeClock, RecordingSink, check_events, fold_events
from tests.event_loops import timers

GRACE = 0.01
PATIENCE = 0.005
EMPTY = ca.AssistantMessage((), ca.StopReason.OTHER)
HALF = ca.AssistantMessage.from_text("half a ")

GARBAGE: Any = object()


class UnspeakableError(Exception):
    """Not even its text can be had."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


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
    "returns_garbage",
    "returns_odd_text",
    "raises_unspeakably",
    "closes_itself",
]
TEMPERS: tuple[Temper, ...] = Temper.__args__  # type: ignore[attr-defined]

# What a stream may do instead of giving an answer.
Fault = Literal[
    "empty",
    "zero_output",
    "transient",
    "overflow",
    "mismatch",
    "aborted",
    "raises",
    "raises_late",
    "hangs",
    "hangs_late",
    "truncated",
    "error_message",
    "no_start",
    "reports_cancel",
    "fails_on_cancel",
    "swallows_cancel",
    "ends_on_cancel",
    "cleans_up_late",
    "deaf",
    "garbage_event",
    "garbage_chunk",
    "garbage_start",
    "garbage_answer",
    "raises_unspeakably",
]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]

When = Literal["after_batch", "before_next_tool", "now", "follow_up"]
WHEN: tuple[When, ...] = When.__args__  # type: ignore[attr-defined]

HookTemper = Literal[
    "none", "passes", "acts", "raises", "waits", "hangs", "deaf", "garbage", "raises_unspeakably"
]
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
    steers: tuple[Steer, ...] = ()
    """What is sent through a channel."""


@dataclass(frozen=True)
class Steer:
    """Send messages at the n-th suspension point, so many passes of the event loop into it.

    From a thread that is waited for, or from one that races the run.
    """

    at: int
    when: When
    passes: int = 0
    by: Literal["loop", "thread", "racing_thread"] = "loop"
    messages: int = 1


@dataclass(frozen=True)
class Cancel:
    """Cancel the run at its n-th suspension point, so many passes of the event loop into it."""

    at: int
    by: Literal["token", "task", "thread"]
    passes: int = 0


# --- suspension points ------------------------------------------------------------------------


class Watched:
    """Awaits a coroutine, counts its suspension points, and does something at some of them."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], acts: Mapping[int, Sequence[Callable[[], None]]]
    ) -> None:
        self.coroutine, self.acts = coroutine, acts
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
            for act in self.acts.get(self.count, ()):
                act()
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
        self.cancelling = 0
        """The most cancellations that the run's task was under when the model was asked."""
        self.line = Line(scenario.steers)

    def config(self, sink: ca.EventSink) -> ca.LoopConfig:
        scenario = self.scenario
        settings: dict[str, Any] = {"cancel_grace": GRACE, **scenario.settings}
        plugins: list[Any] = [Hooks(scenario.hooks, self.wait_deaf), Steering(scenario.steering)]
        plugins.append(ca.UniqueToolCallIds())
        if scenario.steers:
            plugins.append(self.line.channel)
        return ca.LoopConfig(
            stream=self.stream(),
            tools=[Tool(self, temper) for temper in TEMPERS],
            plugins=plugins,
            event_sink=sink,
            clock=FakeClock(),
            **settings,
        )

    async def wait_deaf(self) -> None:
        """Wait for the end of the world, whoever cancels that."""
        while not self.release.is_set():
            with suppress(asyncio.CancelledError):
                await self.release.wait()

    def stream(self) -> st.StreamFn:
        calls = iter(enumerate(self.scenario.script))
        steps = list(self.scenario.script)

        async def model(
            request: st.StreamRequest, signal: ca.CancellationToken
        ) -> AsyncIterator[st.StreamEvent]:
            self.open_streams += 1
            task = asyncio.current_task()
            assert task is not None
            self.cancelling = max(self.cancelling, task.cancelling())
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
            "mismatch": st.StreamErrorKind.INCONSISTENT_TOOL_HISTORY,
            "aborted": st.StreamErrorKind.ABORTED,
        }
        call = ca.ToolCall("cut", "fast", {})
        if fault == "no_start":
            yield st.Done(ca.AssistantMessage.from_text("out of the blue"))
            return
        if fault == "raises":
            raise OSError("the wire is cut")
        if fault == "raises_unspeakably":
            raise UnspeakableError
        if fault == "hangs":
            await asyncio.Event().wait()
        if fault == "garbage_start":
            yield st.Start(GARBAGE)
        yield st.Start(EMPTY)
        yield st.Chunk(st.TextChunk("half a "))
        if fault == "deaf":
            await self.wait_deaf()
        await asyncio.sleep(0)
        match fault:
            case "garbage_event":
                yield GARBAGE
            case "garbage_chunk":
                yield st.Chunk(GARBAGE)
                yield st.Chunk(st.TextChunk(GARBAGE))
                await asyncio.Event().wait()
            case "garbage_answer":
                yield st.Done(ca.AssistantMessage(GARBAGE, GARBAGE, GARBAGE))
            case _:
                pass
        if fault == "raises_late":
            raise OSError("the wire is cut in mid-word")
        if fault.endswith(("_cancel", "_late")):
            async with aclosing(self.hang(fault)) as events:
                async for event in events:
                    yield event
            return
        if fault == "truncated":
            yield st.Done(ca.AssistantMessage((call,), ca.StopReason.MAX_TOKENS))
        elif fault == "error_message":
            yield st.Done(ca.AssistantMessage((call,), ca.StopReason.ERROR, "it broke"))
        else:
            yield st.Error(HALF, kinds.get(fault, GARBAGE), f"a {fault} failure")

    async def hang(self, fault: Fault) -> AsyncGenerator[st.StreamEvent, None]:
        """Wait for good, and take a cancellation in a way of its own."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            match fault:
                case "reports_cancel":
                    yield st.Error(HALF, st.StreamErrorKind.ABORTED, "it was cancelled")
                case "fails_on_cancel":
                    raise OSError("the wire is cut by the cancellation") from None
                case "swallows_cancel":
                    yield st.Chunk(st.TextChunk("word"))
                    await asyncio.sleep(0)
                    yield st.Done(ca.AssistantMessage.from_text("half a word"))
                case "ends_on_cancel":
                    return
                case _:
                    raise
        finally:
            if fault == "cleans_up_late":
                for _ in range(2):
                    await asyncio.sleep(0)


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
        await self.world.wait_deaf()

    async def returns_garbage(self, ctx: ca.ToolContext) -> Any:
        return GARBAGE

    async def returns_odd_text(self, ctx: ca.ToolContext) -> ca.ToolResult:
        details = {"a\udc80": Path("\udc80"), "cause": UnspeakableError()}
        return ca.ToolResult((ca.TextContent("half a \ud83d"),), details=details)

    async def raises_unspeakably(self, ctx: ca.ToolContext) -> None:
        await asyncio.sleep(0)
        raise UnspeakableError

    async def closes_itself(self, ctx: ca.ToolContext) -> None:
        raise GeneratorExit

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
    tool_gate_class = ToolGateClass.ADVISORY

    def __init__(
        self,
        tempers: dict[str, HookTemper],
        wait_deaf: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.tempers = tempers
        self.wait_deaf = wait_deaf

    async def mood(self, hook: str) -> Any:
        """Whether the hook should act; garbage, if that is what it should return."""
        match self.tempers.get(hook, "none"):
            case "garbage":
                return GARBAGE
            case "deaf":
                await self.wait_deaf()
            case "raises_unspeakably":
                raise UnspeakableError
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

    async def on_before_tool_call(self, ctx: ca.BeforeToolCallContext) -> Any:
        mood = await self.mood("before")
        if mood is GARBAGE:
            return GARBAGE
        return ca.Block("not today") if mood else None

    async def on_after_tool_call(self, ctx: ca.AfterToolCallContext) -> Any:
        mood = await self.mood("after")
        if mood is GARBAGE:
            return GARBAGE
        return ca.AfterToolDecision(ca.ToolResult.text("changed")) if mood else None

    async def transform_context(
        self, messages: Sequence[ca.AgentMessage], ctx: ca.TransformContext
    ) -> Sequence[ca.AgentMessage]:
        mood = await self.mood("transform")
        if mood is GARBAGE:
            return [*messages, GARBAGE]
        return list(messages)[-50:] if mood else messages

    async def next_turn_tool_allowlist(self, ctx: ca.ToolGateContext) -> set[str] | None:
        mood = await self.mood("gate")
        return {GARBAGE} if mood is GARBAGE else {"fast", "slow"} if mood else None

    async def on_event(self, event: ca.AgentEvent) -> None:
        if isinstance(event, (ca.events.MessageEnd, ca.events.ToolExecutionStart)):
            await self.mood("observer")

    async def next_follow_up_messages(self) -> list[ca.AgentMessage]:
        return [GARBAGE] if await self.mood("follow_up") is GARBAGE else []


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


class Line:
    """A channel that steers as it is told, and keeps every receipt."""

    def __init__(self, steers: Sequence[Steer]) -> None:
        self.steers = steers
        self.channel = ca.ChannelSteering()
        self.steering: list[ca.SteeringReceipt] = []
        self.follow_ups: list[ca.SteeringReceipt] = []
        self.racing: list[tuple[ca.SteeringReceipt, bool]] = []
        """What threads have sent on their own, and whether the run's end had been told by then."""
        self.threads: list[threading.Thread] = []

    def act(self, number: int, sink: RecordingSink) -> None:
        """Send what a steer says, the way it says."""
        steer = self.steers[number]
        texts = [f"{steer.when} {number}.{n}" for n in range(steer.messages)]
        match steer.by:
            case "loop":
                self.send(steer, texts)
            case "thread":
                thread = threading.Thread(target=self.send, args=(steer, texts))
                thread.start()
                thread.join()
            case "racing_thread":
                thread = threading.Thread(target=self.race, args=(steer, texts, sink))
                self.threads.append(thread)
                thread.start()

    def send(self, steer: Steer, texts: Sequence[str]) -> None:
        into = self.follow_ups if steer.when == "follow_up" else self.steering
        into.extend(self.post(steer, text) for text in texts)

    def race(self, steer: Steer, texts: Sequence[str], sink: RecordingSink) -> None:
        for text in texts:
            receipt = self.post(steer, text)
            self.racing.append((receipt, "agent_end" in sink.types[-1:]))

    def post(self, steer: Steer, text: str) -> ca.SteeringReceipt:
        handle = self.channel.handle
        if steer.when == "follow_up":
            return handle.follow_up(text)
        return handle.steer(text, steer.when)

    def join(self) -> None:
        for thread in self.threads:
            thread.join()


# --- a life, and what must hold of it -----------------------------------------------------------


@dataclass
class Life:
    """How a run went."""

    outcome: ca.RunResult | BaseException
    sink: RecordingSink
    points: int
    line: Line
    was_cancelled: bool


async def live(
    scenario: Scenario, cancel: Cancel | None = None, *, patience: float = PATIENCE
) -> Life:
    """Run the scenario, cancelled or not, and check all that must hold."""
    world, sink, token = World(scenario), RecordingSink(), ca.CancellationToken()
    config = world.config(sink)
    before = asyncio.all_tasks()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    ended = False

    def later(passes: int, act: Callable[[], None]) -> None:
        if ended:
            return
        if passes > 0:
            loop.call_soon(later, passes - 1, act)
        else:
            act()

    def stop() -> None:
        assert cancel is not None
        if cancel.by == "token":
            token.cancel("at a suspension point")
        elif cancel.by == "task":
            task.cancel()
        else:
            thread = threading.Thread(target=token.cancel)
            thread.start()
            thread.join()

    # Whatever hangs for good is cancelled in the end, so that every life ends.
    net = loop.call_later(patience, token.cancel, "it has hung for long enough")
    acts: dict[int, list[Callable[[], None]]] = {}
    for number, steer in enumerate(scenario.steers):
        send = partial(world.line.act, number, sink)
        acts.setdefault(steer.at, []).append(partial(later, steer.passes, send))
    if cancel is not None:
        acts.setdefault(cancel.at, []).append(partial(later, cancel.passes, stop))
    coroutine = ca.run("go", ca.AgentContext("sys"), config, token)
    watched = Watched(coroutine, acts)
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
    was_cancelled = token.cancelled or cancelled_by_task > 0
    life = Life(outcome, sink, watched.count, world.line, was_cancelled)
    by_task = cancel is not None and cancel.by == "task"
    assert by_task or cancelled_by_task == 0, "the run has left a cancellation on its task"
    check_ending(life, cancelled_by_task)
    assert "cut" not in world.ran, "a call that was cut off has been run"
    check_messages(life)
    check_steering(world, life)
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


def carrier_of(outcome: ca.RunResult | BaseException) -> ca.RunResult | ca.LoopError:
    """What carries all that the run had."""
    carrier = outcome.__cause__ if isinstance(outcome, asyncio.CancelledError) else outcome
    assert isinstance(carrier, (ca.RunResult, ca.LoopError)), f"{outcome!r} carries nothing"
    return carrier


def check_messages(life: Life) -> None:
    """The events are in order, tell the same messages, and every call is answered in its place."""
    messages = carrier_of(life.outcome).messages
    check_events(life.sink.events)
    assert fold_events(life.sink.events) == messages
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
    for change in repair_history(messages).changes:
        is_repeated_id = change.kind is HistoryChangeKind.RENAMED_CALL
        assert is_repeated_id or change.tool_call_id.startswith(FALLBACK_ID), change


def check_steering(world: World, life: Life) -> None:
    """Every message has its fate, and nobody was disturbed more than was asked for."""
    line = life.line
    if not line.steers:
        return
    line.join()
    racing = [receipt for receipt, is_late in line.racing if not is_late or is_told(receipt, life)]
    check_receipts(life.outcome, life.sink.events, line.steering, line.follow_ups)
    for receipt in racing:  # in what order they were queued nobody can tell
        check_receipts(life.outcome, life.sink.events, [receipt])
    for receipt, _ in line.racing:
        assert receipt.is_settled, "a message without a fate"
    late = [line.channel.handle.steer("late", "now"), line.channel.handle.follow_up("late")]
    assert [receipt.status for receipt in late] == ["expired"] * 2
    check_disturbance(world, life)


def is_told(receipt: ca.SteeringReceipt, life: Life) -> bool:
    """Whether the run has anything to say about the message."""
    carrier = carrier_of(life.outcome)
    return any(message is receipt.message for message in (*carrier.messages, *carrier.undelivered))


def check_receipts(
    outcome: ca.RunResult | BaseException,
    events: Iterable[ca.AgentEvent],
    *queues: Sequence[ca.SteeringReceipt],
) -> None:
    """Each message is told of once, in the turn that its receipt names, or handed back once.

    The receipts of a queue are given in the order of sending, and that is the order of both.
    """
    carrier = carrier_of(outcome)
    turns = turns_of(events)
    for receipts in queues:
        for receipt in receipts:
            told = turns.get(id(receipt.message), [])
            if receipt.status is SteeringStatus.DELIVERED:
                assert told == [receipt.turn], f"{receipt} of {receipt.message}: told in {told}"
            else:
                assert receipt.status is SteeringStatus.EXPIRED, f"{receipt} has no fate"
                assert receipt.turn is None
                assert told == [], f"{receipt} of {receipt.message}: told in {told}"
            assert receipt.is_settled
        fates = {
            SteeringStatus.DELIVERED: carrier.messages,
            SteeringStatus.EXPIRED: carrier.undelivered,
        }
        for status, messages in fates.items():
            wanted = [id(receipt.message) for receipt in receipts if receipt.status is status]
            sent = {id(receipt.message) for receipt in receipts}
            found = [id(message) for message in messages if id(message) in sent]
            assert found == wanted, f"what is {status} is not what the run gives, in order"


def turns_of(events: Iterable[ca.AgentEvent]) -> dict[int, list[int | None]]:
    """In which turns, from 1, each message is told of; None: after the last."""
    turns: dict[int, list[int | None]] = {}
    turn, is_open = 0, False
    for event in events:
        match event:
            case ca.events.TurnStart():
                turn, is_open = turn + 1, True
            case ca.events.TurnEnd():
                is_open = False
            case ca.events.MessageStart():
                turns.setdefault(id(event.message), []).append(turn if is_open else None)
            case _:
                pass
    return turns


def check_disturbance(world: World, life: Life) -> None:
    """Answers and calls are broken off only by what is sent for now, calls held back by less."""
    sent = Counter({steer.when: 0 for steer in life.line.steers})
    for steer in life.line.steers:
        sent[steer.when] += steer.messages
    discarded = [event.reason for event in life.sink.of(ca.events.MessageDiscarded)]
    assert discarded.count("steered") <= sent["now"], "one message breaks off one answer"
    if not life.was_cancelled:  # a stream that is broken off has not failed
        assert world.cancelling == 0, "the run went on under a cancellation"
        said = str(life.outcome) if isinstance(life.outcome, ca.LoopError) else ""
        assert "cancel" not in said, said
        assert "empty" in world.scenario.script or "empty" not in discarded
    urgent = sent["now"] + sent["before_next_tool"]
    for message in carrier_of(life.outcome).messages:
        if not isinstance(message, ca.ToolResultMessage) or not isinstance(message.details, dict):
            continue
        if message.details.get("reason") != "steered":
            continue
        assert message.is_error
        match message.details["kind"]:
            case "tool_call_stopped":
                assert sent["now"] > 0, "a call was stopped that should have gone on"
            case kind:
                assert kind == "tool_call_not_executed"
                assert urgent > 0, "a call was held back that should have been run"
                ran = world.ran[message.tool_call_id]
                assert world.scenario.repeated_ids or not ran, "a call was run, and said not to be"


async def check_nothing_left(
    world: World, sink: RecordingSink, before: set[asyncio.Task[Any]]
) -> None:
    """No stream is open, no task or timer is left, and late progress is dropped."""
    assert world.open_streams <= supervised.left_behind()
    told = len(sink.events)
    for handle in world.handles:
        await handle.update("too late")
    assert len(sink.events) == told
    world.release.set()
    world.thread_release.set()
    if rest := asyncio.all_tasks() - before:  # tools that ignored everything end now
        assert len(rest) <= supervised.left_behind()
        await asyncio.wait(rest)
    for _ in range(2):  # their last callbacks
        await asyncio.sleep(0)
    assert supervised.left_behind() == 0
    assert world.open_streams == 0
    left = asyncio.all_tasks() - before
    assert not left, left
    loop: Any = asyncio.get_running_loop()
    assert timers() == []
    generators = getattr(loop, "_asyncgens", ())  # uvloop does not show its own
    assert not [generator for generator in generators if generator.ag_frame is not None]


async def check_config_still_works(world: World, config: ca.LoopConfig) -> None:
    """The next run on the same config knows nothing of this one."""
    if {"hangs", "deaf"} & set(world.scenario.hooks.values()):
        return
    scenario = world.scenario
    fresh = World(Scenario((), scenario.hooks, scenario.settings, scenario.steering))
    again, anew = RecordingSink(), RecordingSink()
    used = config.replace(stream=fresh.stream(), event_sink=again, hook_timeout=None)
    for one in (used, fresh.config(anew).replace(hook_timeout=None)):
        with suppress(ca.LoopError):
            await ca.run("again", ca.AgentContext("sys"), one)
    assert again.types == anew.types
