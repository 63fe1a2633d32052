"""Runs as streams of events, and runs without async: in scripts, in notebooks, under Ctrl-C.

Wherever a stream is left, its run is over afterwards: no task is left, no provider stream is open,
and the events that a sink got are those of a whole run.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal as signals
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from inspect import isawaitable
from itertools import count
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from clark_agent import (
    AgentContext,
    AgentEvent,
    AssistantMessage,
    CancellationToken,
    ChannelSteering,
    ExecutionMode,
    FunctionPlugin,
    HookError,
    LoopConfig,
    LoopError,
    RunAborted,
    RunIdentity,
    RunResult,
    RunStoppedByTool,
    RunStream,
    SteeringReceipt,
    StreamError,
    StreamEvent,
    StreamRequest,
    ToolContext,
    ToolFatal,
    ToolResult,
    UserMessage,
    run,
    run_sync,
    stream_run,
    tool,
)
from clark_agent import events as ev
from clark_agent.errors import InvalidContinuationError
from clark_agent.testing import (
    FakeClock,
    RecordingSink,
    ScriptedStream,
    Step,
    call,
    check_events,
    say,
)
from tests.engine.support import (
    CONTEXT,
    Waiting,
    Work,
    check_outcome,
    failing,
    let_others_run,
    outline,
    results,
)
from tests.event_loops import starts_tasks_at_once


class Model(ScriptedStream):
    """A scripted model that lets others run before each event, and counts what it has open."""

    open = 0
    said = 0

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.open += 1
        try:
            async with aclosing(super().__call__(request, signal)) as events:  # type: ignore[type-var]
                async for event in events:
                    await asyncio.sleep(0)
                    yield event
                    self.said += 1
        finally:
            try:
                await asyncio.sleep(0)  # closing a connection takes a moment
            finally:
                self.open -= 1


class Agent:
    """A config with a model and a sink that can be asked afterwards."""

    def __init__(self, *script: Step, **settings: Any) -> None:
        self.model = Model(script)
        self.sink = RecordingSink()
        settings.setdefault("clock", FakeClock())
        self.config = LoopConfig(stream=self.model, event_sink=self.sink, **settings)

    def stream(self, prompts: Any = "go", signal: Any = None, **options: Any) -> RunStream:
        return stream_run(prompts, CONTEXT, self.config, signal, **options)

    @asynccontextmanager
    async def is_over_after(self) -> AsyncIterator[None]:
        """What holds wherever and however a stream was left."""
        before = asyncio.all_tasks()
        try:
            yield
        finally:
            assert asyncio.all_tasks() - before == set(), "tasks are left"
            assert self.model.open == 0, "a stream of the provider is open"
            if self.sink.events:  # otherwise it has not begun
                check_events(self.sink.events)


async def pausing(args: Any, ctx: ToolContext) -> ToolResult:
    await ctx.update("half")
    await asyncio.sleep(0)
    return ToolResult.text("done")


def busy_agent(**settings: Any) -> Agent:
    """One whose run has something of everything: asks again, tools at once, steering."""
    given = iter([[], [UserMessage("by the way")]])
    steering = FunctionPlugin("steering", lambda: next(given, []), name="steering")
    script: list[Step] = [
        [],  # a stream without an answer: the model is asked again
        say("Let me see.", call("work"), call("nope"), call("work")),
        call("work"),
        "That is all.",
    ]
    return Agent(*script, tools=[Work("work", pausing)], plugins=[steering], **settings)


async def read(events: RunStream) -> list[AgentEvent]:
    return [event async for event in events]


async def enter_and_read(stream: RunStream, on_event: Callable[[AgentEvent], Any]) -> None:
    async with stream as events:
        async for event in events:
            if isawaitable(pending := on_event(event)):
                await pending


def at(number: int, act: Callable[[], Any]) -> Callable[[AgentEvent], Any]:
    """Do something at an event, counted from 0."""
    counter = count()
    return lambda _: act() if next(counter) == number else None


def outcome_of(events: RunStream) -> RunResult | BaseException:
    try:
        return events.result
    except (LoopError, asyncio.CancelledError) as error:
        return error


# --- what a stream gives ------------------------------------------------------------------------


@pytest.mark.parametrize("max_buffered", [1, 2, 256])
@pytest.mark.parametrize("mode", list(ExecutionMode))
async def test_a_stream_gives_what_a_sink_gets_in_order_and_ends(
    mode: ExecutionMode, max_buffered: int
) -> None:
    agent = busy_agent(default_execution_mode=mode)
    async with (
        agent.is_over_after(),
        agent.stream(max_buffered=max_buffered) as events,
    ):
        got = await read(events)
    assert [id(event) for event in got] == [id(event) for event in agent.sink.events]
    assert {"message_discarded", "tool_execution_update", "agent_end"} <= set(agent.sink.types)
    check_outcome(events.result, got)


async def test_the_result_is_that_of_a_run() -> None:
    expected = await run("go", CONTEXT, busy_agent().config)
    async with busy_agent().stream() as events:
        assert await read(events)
        assert events.result == expected
    assert events.result == expected, "also behind the block"


async def test_the_result_is_not_there_before_the_end() -> None:
    async with busy_agent().stream() as events:
        with pytest.raises(RuntimeError, match="not over: iterate to the end"):
            _ = events.result
        await anext(events)
        with pytest.raises(RuntimeError, match="not over: iterate to the end"):
            _ = events.result


async def test_the_end_stays_the_end() -> None:
    async with Agent("ok").stream() as events:
        assert len(await read(events)) > 1
        assert await read(events) == []
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_prompts_may_be_all_that_run_takes() -> None:
    for prompts in ("hi", UserMessage("hi"), [UserMessage("hi")], iter([UserMessage("hi")])):
        async with Agent("ok").stream(prompts) as events:
            await read(events)
        assert outline(events.result.messages) == ["user: hi", "assistant: ok"]


async def test_without_prompts_the_context_is_continued() -> None:
    agent = Agent("ok")
    context = CONTEXT.extend([UserMessage("a question")])
    async with agent.is_over_after(), stream_run(None, context, agent.config) as events:
        got = await read(events)
    assert outline(events.result.messages) == ["assistant: ok"]
    assert outline(agent.model.requests[0].messages) == ["user: a question"]
    assert got == agent.sink.events


async def test_a_run_with_an_identity_tells_it() -> None:
    context = AgentContext(identity=RunIdentity.root("me"))
    async with stream_run("go", context, Agent("ok").config) as events:
        identified = [event async for event in events if isinstance(event, ev.RunIdentified)]
    assert identified == [ev.RunIdentified(RunIdentity.root("me"))]


async def test_the_reader_can_steer_the_run_that_it_reads() -> None:
    steering = ChannelSteering()
    agent = Agent(call("work"), "As you wish.", tools=[Work()], plugins=[steering])
    receipts: list[SteeringReceipt] = []

    def steer(event: AgentEvent) -> None:
        if isinstance(event, ev.ToolExecutionStart):
            receipts.append(steering.handle.steer("be brief"))

    events = agent.stream(max_buffered=1)  # so that the run is not far ahead
    await enter_and_read(events, steer)
    assert [(receipt.status, receipt.turn) for receipt in receipts] == [("delivered", 2)]
    assert "user: be brief" in outline(events.result.messages)


async def test_ten_streams_at_once_keep_their_events_apart() -> None:
    async def stream(number: int) -> list[AgentEvent]:
        async with agents[number].stream(f"{number}", max_buffered=1 + number) as events:
            got = []
            async for event in events:
                got.append(event)
                await asyncio.sleep(0)
        assert outline(events.result.messages)[0] == f"user: {number}"
        return got

    agents = [busy_agent() for _ in range(10)]
    before = asyncio.all_tasks()
    streams = await asyncio.gather(*(stream(number) for number in range(10)))
    assert asyncio.all_tasks() == before
    for agent, got in zip(agents, streams, strict=True):
        assert [id(event) for event in got] == [id(event) for event in agent.sink.events]
        assert agent.model.open == 0


async def test_ten_streams_may_share_a_config() -> None:
    async def parrot(request: StreamRequest, signal: Any) -> AsyncIterator[StreamEvent]:
        said = request.messages[-1].plain_text
        async for event in Model([f"{said} {said}"])(request, signal):
            yield event

    async def stream(number: int) -> str:
        async with stream_run(f"{number}", CONTEXT, config, max_buffered=1) as events:
            check_events(await read(events))
        return events.result.text

    config = LoopConfig(stream=parrot)
    texts = await asyncio.gather(*(stream(number) for number in range(10)))
    assert texts == [f"{number} {number}" for number in range(10)]


# --- runs that fail -----------------------------------------------------------------------------


def refuse(*_: object) -> Any:
    raise ValueError("no")


FAILURES: dict[str, tuple[Callable[[], Agent], type[LoopError]]] = {
    "stream": (lambda: Agent(failing("fatal", "broken", "half an ")), StreamError),
    "transport": (lambda: Agent(ConnectionError("no route")), StreamError),
    "tool": (
        lambda: Agent(call("work"), tools=[Work(does=ToolFatal("the disk is gone"))]),
        RunStoppedByTool,
    ),
    "gate": (
        lambda: Agent("ok", plugins=[FunctionPlugin("tool_gate", refuse, name="gate")]),
        HookError,
    ),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("max_buffered", [1, 256])
async def test_a_failed_run_raises_its_error_after_its_last_event(
    name: str, max_buffered: int
) -> None:
    make, kind = FAILURES[name]
    agent, got = make(), list[AgentEvent]()
    async with agent.is_over_after():
        events = agent.stream(max_buffered=max_buffered)
        with pytest.raises(kind) as caught:
            await enter_and_read(events, got.append)
    assert type(caught.value) is kind
    assert isinstance(got[-1], ev.AgentEnd)
    assert got == agent.sink.events
    check_outcome(caught.value, got)
    assert outcome_of(events) is caught.value


@pytest.mark.parametrize("name", FAILURES)
async def test_the_error_is_the_one_that_run_would_raise(name: str) -> None:
    """With the cause and the context that it had."""
    make, kind = FAILURES[name]
    with pytest.raises(kind) as plain:
        await run("go", CONTEXT, make().config)
    with pytest.raises(kind) as streamed:
        await enter_and_read(make().stream(), lambda _: None)
    for error in (plain.value, streamed.value):
        assert not isinstance(error.__context__, StopAsyncIteration)
    assert str(streamed.value) == str(plain.value)
    assert repr(streamed.value.__cause__) == repr(plain.value.__cause__)
    assert repr(streamed.value.__context__) == repr(plain.value.__context__)
    assert streamed.value.__notes__ == plain.value.__notes__


async def test_the_error_can_be_had_again() -> None:
    async with Agent(failing("fatal")).stream() as events:
        for _ in range(2):
            with pytest.raises(StreamError):
                await read(events)
            with pytest.raises(StreamError):
                _ = events.result


class BrokenPlugin:
    def for_run(self) -> object:
        raise ValueError("no")

    def on_event(self, event: AgentEvent) -> None:
        """Nothing."""


class BrokenClock(FakeClock):
    def now_ms(self) -> int:
        raise OSError("the clock is broken")


BROKEN: dict[str, tuple[dict[str, Any], Any, type[Exception]]] = {
    "plugin": ({"plugins": [BrokenPlugin()]}, "go", HookError),
    "clock": ({"clock": BrokenClock()}, "go", OSError),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_run_that_fails_before_its_first_event_does_not_keep_the_reader(name: str) -> None:
    settings, prompts, kind = BROKEN[name]
    agent = Agent("ok", **settings)
    async with asyncio.timeout(30), agent.stream(prompts) as events:
        with pytest.raises(kind) as caught:
            await anext(events)
        with pytest.raises(kind) as again:
            _ = events.result
    assert again.value is caught.value
    assert agent.sink.events == []
    assert agent.model.requests == []


def test_a_bad_context_config_or_continuation_is_told_at_once() -> None:
    """Before anything is awaited, and without an event loop."""
    config = Agent("ok").config
    with pytest.raises(TypeError, match="must be an AgentContext"):
        stream_run("go", "no context", config)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a LoopConfig"):
        stream_run("go", CONTEXT, "no config")  # type: ignore[arg-type]
    for prompts in (42, [UserMessage("a"), "b"], ["a"]):
        for start in (stream_run, run_sync):
            with pytest.raises(TypeError, match="prompts must be a text, a message or several"):
                start(prompts, CONTEXT, config)  # type: ignore[arg-type]
    for start in (stream_run, run_sync):
        with pytest.raises(TypeError, match="must be a CancellationToken, not int"):
            start("go", CONTEXT, config, 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidContinuationError, match="nothing to continue"):
        stream_run(None, CONTEXT, config)
    answered = CONTEXT.extend([UserMessage("hi"), AssistantMessage.from_text("hello")])
    with pytest.raises(InvalidContinuationError, match="an assistant message; add a message"):
        stream_run(None, answered, config)
    with pytest.raises(ValueError, match="max_buffered must be at least 1, not 0"):
        stream_run("go", CONTEXT, config, max_buffered=0)


async def test_a_stream_that_is_never_entered_is_none() -> None:
    agent = Agent("ok")
    events = agent.stream()
    with pytest.raises(RuntimeError, match="use 'async with stream_run"):
        await anext(events)
    with pytest.raises(RuntimeError, match="use 'async with stream_run"):
        async for _ in events:
            pass
    with pytest.raises(RuntimeError, match="use 'async with stream_run"):
        _ = events.result
    del events
    gc.collect()  # a coroutine that nobody has awaited would say so now
    assert agent.sink.events == []


async def test_a_stream_is_entered_once() -> None:
    agent = Agent("ok")
    async with agent.is_over_after(), agent.stream() as events:
        with pytest.raises(RuntimeError, match="entered only once; call stream_run again"):
            await events.__aenter__()
        await read(events)
    with pytest.raises(RuntimeError, match="entered only once; call stream_run again"):
        async with events:
            pass
    assert len(agent.model.requests) == 1


# --- leaving early ------------------------------------------------------------------------------


class Own(Exception):
    """The block's own."""


OWN = Own("mine")


def raise_own() -> None:
    raise OWN


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def break_at(stream: RunStream, number: int) -> None:
    async with stream as events:
        for _ in range(number + 1):
            await anext(events)


async def raise_at(stream: RunStream, number: int) -> None:
    with pytest.raises(Own) as caught:
        await enter_and_read(stream, at(number, raise_own))
    assert caught.value is OWN
    assert OWN.__cause__ is None
    assert OWN.__context__ is None


async def cancel_at(stream: RunStream, number: int) -> None:
    """The reader is cancelled while it waits for something else."""
    task = asyncio.create_task(enter_and_read(stream, at(number, wait_for_ever)))
    await let_others_run()
    assert task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def time_out_at(stream: RunStream, number: int) -> None:
    async def time_out() -> None:
        deadline.reschedule(0)
        await wait_for_ever()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as deadline:
            await enter_and_read(stream, at(number, time_out))


async def close_at(stream: RunStream, number: int) -> None:
    """The block is in a generator, which is closed."""

    async def generator() -> AsyncGenerator[AgentEvent]:
        async with stream as events:
            async for event in events:
                yield event

    async with aclosing(generator()) as events:
        for _ in range(number + 1):
            await anext(events)


def number_of_events() -> int:
    agent = busy_agent()
    asyncio.run(run("go", CONTEXT, agent.config))
    return len(agent.sink.events)


WAYS = [break_at, raise_at, cancel_at, time_out_at, close_at]
EVENTS = range(number_of_events())


@pytest.mark.parametrize("max_buffered", [1, 5, 256])
@pytest.mark.parametrize("leave", WAYS)
async def test_a_stream_can_be_left_at_every_event(leave: Any, max_buffered: int) -> None:
    endings = set()
    for number in EVENTS:
        agent, signal = busy_agent(), CancellationToken()
        events = agent.stream(signal=signal, max_buffered=max_buffered)
        async with agent.is_over_after():
            await leave(events, number)
        outcome = outcome_of(events)
        check_outcome(outcome, agent.sink.events)
        if isinstance(outcome, LoopError):
            assert type(outcome) is RunAborted
            assert outcome.reason == "the stream was left"
        endings.add(type(outcome))
        assert not signal.cancelled, "the caller's token is the caller's"
        assert not signal.has_subscribers
    assert len(EVENTS) > 40
    assert RunAborted in endings or max_buffered == 256


async def test_a_run_that_is_over_when_it_is_left_has_its_result() -> None:
    """All events were waiting already."""
    agent = Agent("ok")
    async with agent.is_over_after(), agent.stream() as events:
        await let_others_run()
        await anext(events)
    assert events.result.text == "ok"


async def test_leaving_at_the_last_event_takes_nothing_back() -> None:
    agent = busy_agent()
    async with agent.is_over_after(), agent.stream(max_buffered=1) as events:
        async for event in events:
            if isinstance(event, ev.AgentEnd):
                break
    assert events.result.text == "That is all."


async def test_a_stream_can_be_left_before_it_is_read() -> None:
    agent = Agent("unheard")
    async with agent.is_over_after(), agent.stream() as events:
        pass
    assert type(outcome_of(events)) is RunAborted
    assert agent.model.requests == [] or starts_tasks_at_once()


async def test_what_waited_can_be_read_after_leaving_and_then_the_error_comes() -> None:
    agent = Agent("one two three four five")
    async with agent.is_over_after(), agent.stream(max_buffered=3) as events:
        await let_others_run()
    rest = [await anext(events) for _ in range(3)]
    assert rest == agent.sink.events[:3]
    with pytest.raises(RunAborted):
        await anext(events)


async def test_leaving_stops_the_tools_and_waits_for_their_cleanup() -> None:
    cleaned: list[str] = []

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        try:
            await asyncio.Event().wait()
        finally:
            await let_others_run()
            cleaned.append(ctx.tool_call_id)
        raise AssertionError("unreachable")

    agent = Agent([call("wait"), call("wait")], tools=[Work("wait", wait)])
    async with agent.is_over_after(), agent.stream() as events:
        async for event in events:
            if isinstance(event, ev.ToolExecutionStart):
                await let_others_run()
                break
    assert sorted(cleaned) == ["call_1", "call_2"]
    outcome = outcome_of(events)
    check_outcome(outcome, agent.sink.events)
    assert [result.details["reason"] for result in results(outcome)] == ["aborted", "aborted"]


async def test_leaving_closes_the_stream_of_the_provider() -> None:
    agent = Agent("one two three four five six seven")
    async with agent.is_over_after(), agent.stream(max_buffered=1) as events:
        async for event in events:
            if isinstance(event, ev.MessageUpdate):
                assert agent.model.open == 1
                break
    assert agent.model.open == 0
    outcome = outcome_of(events)
    assert isinstance(outcome, RunAborted)
    assert outcome.partial is not None
    assert outcome.partial.plain_text.startswith("one ")


async def test_a_stream_can_be_cancelled_at_every_await() -> None:
    """Let the reader go one more step of the event loop each time, until it comes through."""
    for steps in count():
        agent, got = busy_agent(), list[AgentEvent]()
        stream = agent.stream(max_buffered=1)
        task = asyncio.create_task(enter_and_read(stream, got.append))
        async with agent.is_over_after():
            for _ in range(steps):
                await asyncio.sleep(0)
            was_cancelled = task.cancel()
            await asyncio.wait([task])
        if not was_cancelled:
            assert steps > 50  # it did take that many
            assert got == agent.sink.events
            break
        assert task.cancelled(), "a cancelled reader stays cancelled"
        if steps > 0:  # otherwise it has not begun
            check_outcome(outcome_of(stream), agent.sink.events)


async def test_a_reader_that_gives_up_waiting_for_the_end_may_wait_again() -> None:
    """The run goes on meanwhile: only leaving the block stops it."""
    saved = asyncio.Event()

    async def save(event: AgentEvent) -> None:
        if isinstance(event, ev.AgentEnd):
            await saved.wait()

    agent = Agent("ok", plugins=[FunctionPlugin("event_observer", save, name="saver")])
    async with agent.is_over_after(), agent.stream() as events:
        async for event in events:
            if isinstance(event, ev.AgentEnd):
                break
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await anext(events)
        saved.set()
        assert await read(events) == []
        assert events.result.text == "ok"


class SlowToLeave:
    """A tool's work that takes a while to clean up, and ends at once when cancelled again."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cleaning = asyncio.Event()
        self.ended = False

    async def __call__(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cleaning.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended = True
        raise AssertionError("unreachable")


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("own", [None, OWN])
async def test_cancelling_while_leaving_hurries_the_run_and_still_waits_for_it(
    own: Exception | None, times: int
) -> None:
    slow = SlowToLeave()
    agent = Agent(call("wait"), tools=[Work("wait", slow)], cancel_grace=3600)
    stream = agent.stream()

    async def leave() -> None:
        async with stream:
            await slow.started.wait()
            if own is not None:
                raise own

    async with agent.is_over_after():
        task = asyncio.create_task(leave())
        await slow.cleaning.wait()
        await let_others_run()
        assert not task.done(), "leaving waits for the run"
        for _ in range(times):
            task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
    assert slow.ended
    assert task.cancelled()
    outcome = outcome_of(stream)
    assert isinstance(outcome, asyncio.CancelledError)
    check_outcome(outcome, agent.sink.events)
    if own is not None:
        assert is_behind(own, caught.value), "the block's own exception can still be seen"


def is_behind(wanted: BaseException, error: BaseException | None) -> bool:
    while error is not None and error is not wanted:
        error = error.__context__
    return error is wanted


async def test_a_second_cancellation_while_leaving_does_not_end_the_wait() -> None:
    """Not even between the steps of a run that takes its time."""
    gate = asyncio.Event()

    async def keep_cleaning(args: Any, ctx: ToolContext) -> ToolResult:
        while not gate.is_set():
            with suppress(asyncio.CancelledError):
                await gate.wait()
        return ToolResult.text("clean")

    agent = Agent(call("wait"), tools=[Work("wait", keep_cleaning)], cancel_grace=3600)
    stream = agent.stream()

    async def leave() -> None:
        async with stream as events:
            async for event in events:
                if isinstance(event, ev.ToolExecutionStart):
                    await let_others_run()
                    break

    async with agent.is_over_after():
        task = asyncio.create_task(leave())
        await let_others_run()
        await let_others_run()
        for _ in range(5):
            task.cancel()
            await let_others_run()
            assert not task.done()
        gate.set()
        await asyncio.wait([task])
    assert task.cancelled()


async def test_the_blocks_own_exception_goes_before_that_of_the_run() -> None:
    async def wait_and_raise(_: AgentEvent) -> None:
        await let_others_run()
        raise OWN

    agent = Agent(failing("fatal"))
    async with agent.is_over_after():
        events = agent.stream()
        with pytest.raises(Own) as caught:
            await enter_and_read(events, wait_and_raise)
    assert caught.value is OWN
    assert type(outcome_of(events)) is StreamError


async def test_an_error_that_nobody_has_read_is_not_complained_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Agent(failing("fatal")).stream() as events:
        await let_others_run()
    del events
    gc.collect()
    assert caplog.messages == []


async def test_a_task_group_around_the_block_ends_with_its_error() -> None:
    waiting = Waiting()
    agent = Agent(call("wait"), tools=[Work("wait", waiting)])

    async def fail_meanwhile() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(enter_and_read(agent.stream(), lambda _: None))
            await waiting.started.wait()
            raise OWN

    async with agent.is_over_after():
        with pytest.raises(ExceptionGroup) as caught:
            await fail_meanwhile()
    assert caught.value.exceptions == (OWN,)
    assert waiting.cancelled


# --- the caller's token -------------------------------------------------------------------------


async def test_the_callers_token_cancels_the_run_and_the_reader_gets_the_rest() -> None:
    signal, got = CancellationToken(), list[AgentEvent]()

    def cancel(event: AgentEvent) -> None:
        got.append(event)
        if isinstance(event, ev.ToolExecutionStart):
            signal.cancel("enough")

    agent = Agent(call("wait"), tools=[Work("wait", Waiting())])
    async with agent.is_over_after():
        with pytest.raises(RunAborted, match="enough") as caught:
            await enter_and_read(agent.stream(signal=signal), cancel)
    assert got == agent.sink.events
    assert isinstance(got[-1], ev.AgentEnd)
    check_outcome(caught.value, got)


async def test_the_token_may_be_cancelled_from_another_thread() -> None:
    signal, waiting = CancellationToken(), Waiting()
    agent = Agent(call("wait"), tools=[Work("wait", waiting)])
    async with agent.is_over_after(), agent.stream(signal=signal) as events:
        await waiting.started.wait()
        await asyncio.to_thread(signal.cancel, "from afar")
        with pytest.raises(RunAborted, match="from afar"):
            await read(events)


async def test_a_token_that_is_cancelled_already_stops_the_run_before_the_model_is_asked() -> None:
    signal, agent = CancellationToken(), Agent("unheard")
    signal.cancel("never mind")
    with pytest.raises(RunAborted, match="never mind"):
        await enter_and_read(agent.stream(signal=signal), lambda _: None)
    assert agent.model.requests == []
    assert agent.sink.types[-1] == "agent_end"


# --- the reader sets the pace -------------------------------------------------------------------

LONG = " ".join(["word"] * 300)


@pytest.mark.parametrize("size", [1, 2, 7, 256])
async def test_never_more_events_wait_than_may(size: int) -> None:
    """A fast model and a slow reader. The run itself holds one more, which it cannot get rid of."""
    agent, most = Agent(LONG), 0
    async with agent.is_over_after(), agent.stream(max_buffered=size) as events:
        await let_others_run()
        await let_others_run()
        await let_others_run()
        assert len(agent.sink.events) == size + 1, "nobody has read: the run waits"
        got = 0
        async for _ in events:
            got += 1
            for _ in range(5):
                await asyncio.sleep(0)
            most = max(most, len(agent.sink.events) - got)
    assert most == size + 1
    assert got == len(agent.sink.events)


async def test_the_model_is_not_read_on_while_the_reader_is_away() -> None:
    agent = Agent(LONG)
    async with agent.stream(max_buffered=10) as events:
        await let_others_run()
        said = agent.model.said
        assert 0 < said < 20
        await let_others_run()
        assert agent.model.said == said
        for _ in range(3):
            await anext(events)
        await let_others_run()
        assert agent.model.said == said + 3


async def test_tools_that_report_at_once_wait_for_the_reader_too() -> None:
    async def chatty(args: Any, ctx: ToolContext) -> ToolResult:
        for number in range(20):
            await ctx.update(str(number))
        return ToolResult.text("done")

    agent = Agent([call("chat")] * 5, "ok", tools=[Work("chat", chatty)])
    got, most = list[AgentEvent](), 0
    async with agent.is_over_after(), agent.stream(max_buffered=4) as events:
        async for event in events:
            got.append(event)
            for _ in range(5):
                await asyncio.sleep(0)
            most = max(most, len(agent.sink.events) - len(got))
    assert most == 5
    assert got == agent.sink.events


async def test_the_time_for_hooks_is_not_the_readers() -> None:
    """A reader that takes longer than ``hook_timeout`` slows the run, and loses no event."""
    agent = Agent("one two three four five", hook_timeout=0.01)
    async with agent.is_over_after(), agent.stream(max_buffered=1) as events:
        got = [await anext(events)]
        await asyncio.sleep(0.05)
        got += await read(events)
    assert got == agent.sink.events


# --- without async ------------------------------------------------------------------------------

Call = Callable[[], Any]


def in_a_script(work: Call) -> Any:
    return work()


def in_a_running_loop(work: Call) -> Any:
    """As in a notebook: synchronous code, called by an event loop in the main thread."""

    async def cell() -> Any:
        namespace: dict[str, Any] = {"work": work}
        exec("answer = work()", namespace)
        return namespace["answer"]

    return asyncio.run(cell())


PLACES = pytest.mark.parametrize("place", [in_a_script, in_a_running_loop])


@contextmanager
def nothing_left() -> Iterator[None]:
    """No thread of a run, and no handler for Ctrl-C."""
    handler = signals.getsignal(signals.SIGINT)
    yield
    assert signals.getsignal(signals.SIGINT) is handler
    assert [t for t in threading.enumerate() if t.name == "clark_agent.run_sync"] == []


@PLACES
def test_run_sync_gives_what_run_gives(place: Any) -> None:
    expected = asyncio.run(run("go", CONTEXT, busy_agent().config))
    agent = busy_agent()
    with nothing_left():
        assert place(lambda: run_sync("go", CONTEXT, agent.config)) == expected
    check_outcome(expected, agent.sink.events)


@PLACES
def test_run_sync_can_be_called_again_and_again(place: Any) -> None:
    context, config = CONTEXT, Agent("one", "two", "three").config

    def talk() -> list[str]:
        nonlocal context
        said = []
        for _ in range(3):
            result = run_sync("go", context, config)
            context = context.extend(result)
            said.append(result.text)
        return said

    with nothing_left():
        assert place(talk) == ["one", "two", "three"]
    assert len(context.messages) == 6


WHO: ContextVar[str] = ContextVar("WHO", default="nobody")


@tool
def who_in_a_thread() -> str:
    """A tool that is not async."""
    found = WHO.get()
    WHO.set("the thread")
    return found


@tool
async def who() -> str:
    """A tool that is."""
    found = WHO.get()
    WHO.set("the tool")
    return found


@PLACES
def test_tools_see_the_callers_context_variables(place: Any) -> None:
    agent = Agent([call("who"), call("who_in_a_thread")], "ok", tools=[who, who_in_a_thread])

    def work() -> list[str]:
        reset = WHO.set("the caller")
        try:
            result = run_sync("go", CONTEXT, agent.config)
            assert WHO.get() == "the caller", "and keep what they change to themselves"
        finally:
            WHO.reset(reset)
        return [message.plain_text for message in results(result)]

    assert place(work) == ["the caller", "the caller"]


@PLACES
@pytest.mark.parametrize("name", FAILURES)
def test_errors_come_through_as_they_are(name: str, place: Any) -> None:
    make, kind = FAILURES[name]
    with pytest.raises(kind) as plain:
        asyncio.run(run("go", CONTEXT, make().config))
    agent = make()
    with nothing_left(), pytest.raises(kind) as caught:
        place(lambda: run_sync("go", CONTEXT, agent.config))
    assert type(caught.value) is kind
    assert str(caught.value) == str(plain.value)
    assert repr(caught.value.__cause__) == repr(plain.value.__cause__)
    check_outcome(caught.value, agent.sink.events)


@PLACES
def test_the_very_exception_of_a_transport_is_the_cause(place: Any) -> None:
    broken = ConnectionError("no route")
    with pytest.raises(StreamError) as caught:
        place(lambda: run_sync("go", CONTEXT, Agent(broken).config))
    assert caught.value.__cause__ is broken


@PLACES
@pytest.mark.parametrize("stop", [SystemExit(3), KeyboardInterrupt("told so")])
def test_what_tells_the_interpreter_to_stop_comes_through_too(
    stop: BaseException, place: Any
) -> None:
    with nothing_left(), pytest.raises(type(stop)) as caught:
        place(lambda: run_sync("go", CONTEXT, Agent(call("w"), tools=[Work("w", stop)]).config))
    assert caught.value.args == stop.args
    assert isinstance(caught.value.__cause__, LoopError)
    assert outline(caught.value.__cause__.messages)[0] == "user: go"


@PLACES
def test_bad_arguments_are_told_at_once(place: Any) -> None:
    with pytest.raises(TypeError, match="must be an AgentContext"):
        place(lambda: run_sync("go", "no context", Agent().config))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a LoopConfig"):
        place(lambda: run_sync("go", CONTEXT, None))  # type: ignore[arg-type]


@PLACES
def test_the_token_works_from_another_thread(place: Any) -> None:
    signal, started = CancellationToken(), threading.Event()

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    def cancel() -> None:
        started.wait()
        signal.cancel("from another thread")

    agent = Agent(call("wait"), tools=[Work("wait", wait)])
    thread = threading.Thread(target=cancel)
    thread.start()
    with nothing_left(), pytest.raises(RunAborted, match="from another thread") as caught:
        place(lambda: run_sync("go", CONTEXT, agent.config, signal))
    thread.join()
    check_outcome(caught.value, agent.sink.events)
    assert not signal.has_subscribers


@PLACES
def test_the_callers_token_is_left_alone(place: Any) -> None:
    signal = CancellationToken()
    place(lambda: run_sync("go", CONTEXT, Agent("ok").config, signal))
    assert not signal.cancelled
    assert not signal.has_subscribers


def test_run_sync_works_in_threads() -> None:
    def work(number: int) -> None:
        said[number] = run_sync("go", CONTEXT, Agent(f"{number}").config).text

    said: dict[int, str] = {}
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    with nothing_left():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert said == {number: f"{number}" for number in range(8)}


def test_a_tool_may_use_run_sync_for_a_run_of_its_own() -> None:
    """A plain one from its thread, an async one from within the loop, which waits for it."""

    @tool
    def ask() -> str:
        """Ask another agent."""
        return run_sync("go", CONTEXT, Agent("from a thread").config).text

    @tool
    async def ask_in_the_loop() -> str:
        """Ask another agent."""
        return run_sync("go", CONTEXT, Agent("from the loop").config).text

    agent = Agent([call("ask"), call("ask_in_the_loop")], "ok", tools=[ask, ask_in_the_loop])
    with nothing_left():
        result = run_sync("go", CONTEXT, agent.config)
    assert [message.plain_text for message in results(result)] == ["from a thread", "from the loop"]


# --- Ctrl-C -------------------------------------------------------------------------------------

SCRIPT = '''
import asyncio
import os
import signal
import sys
import threading

from clark_agent import (
    AgentContext,
    CancellationToken,
    LoopConfig,
    LoopError,
    ToolContext,
    events,
    run_sync,
    tool,
)
from clark_agent.history import repair_history
from clark_agent.testing import ScriptedStream, call

gate = threading.Event()


@tool
async def wait() -> str:
    """Waits, and cleans up."""
    say("started")
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(0)
        say("cleaned up")
    return "unreachable"


@tool
def wait_in_a_thread(ctx: ToolContext) -> str:
    """Is told to stop, and does not listen."""
    ctx.signal.subscribe(lambda: say("told"))
    say("started")
    gate.wait()
    return "released"


@tool
async def refuse() -> str:
    """Takes no cancellation for an answer."""
    say("started")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            say("refused")


async def silence(request, signal):
    await asyncio.sleep(3600)
    yield


def interrupt(event):
    if isinstance(event, events.AgentStart):
        os.kill(os.getpid(), signal.SIGINT)


def say(text):
    print(text, flush=True)


def work():
    name, grace = sys.argv[2], float(sys.argv[3])
    config = LoopConfig(
        stream=ScriptedStream([call(name)]),
        tools=[wait, wait_in_a_thread, refuse],
        cancel_grace=grace,
    )
    if name == "silence":
        sys.setswitchinterval(60)  # whoever has begun the run has not gone on
        config = config.replace(stream=silence, event_sink=interrupt)
    handler, token = signal.getsignal(signal.SIGINT), CancellationToken()
    try:
        run_sync("go", AgentContext(), config, token)
    except KeyboardInterrupt as stop:
        if isinstance(stop.__cause__, LoopError):
            messages = stop.__cause__.messages
            changes = repair_history(messages).changes
            say(f"{len(messages)} messages, {len(changes)} changes: {messages[-1].plain_text}")
        assert signal.getsignal(signal.SIGINT) is handler
        assert not token.cancelled, "it is the caller's"
        say("interrupted")
        raise


async def in_loop():
    work()


match sys.argv[1]:
    case "script":
        work()
    case "loop":
        asyncio.new_event_loop().run_until_complete(in_loop())
    case "asyncio.run":
        asyncio.run(in_loop())
'''


class Program:
    """A real process that Ctrl-C is pressed in."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        script = folder / "script.py"
        script.write_text(SCRIPT)
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        self._killer = threading.Timer(30, self._process.kill)  # for what would hang
        self._killer.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._killer.cancel()
        self._process.kill()
        self._process.communicate()

    def until(self, line: str) -> None:
        assert self._process.stdout is not None
        for said in self._process.stdout:
            if said.strip() == line:
                return
        raise AssertionError(f"it ended, or hung, without saying {line!r}")

    def interrupt(self) -> None:
        self._process.send_signal(signals.SIGINT)

    def end(self) -> list[str]:
        """What it said from here on, once it has ended as a program that was interrupted."""
        said, complaints = self._process.communicate()
        assert self._process.returncode == -signals.SIGINT, complaints
        assert "KeyboardInterrupt" in complaints
        return said.splitlines()


needs_signals = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
ANYWHERE = pytest.mark.parametrize("place", ["script", "loop", "asyncio.run"])


@pytest.mark.slow
@needs_signals
@ANYWHERE
def test_ctrl_c_stops_the_run_cleanly_and_brings_its_messages(place: str, tmp_path: Path) -> None:
    with Program(tmp_path, place, "wait", "3600") as program:
        program.until("started")
        program.interrupt()
        assert program.end() == [
            "cleaned up",
            "3 messages, 0 changes: The call was running when the run was stopped.",
            "interrupted",
        ]


@pytest.mark.slow
@needs_signals
@ANYWHERE
def test_ctrl_c_works_from_the_first_event_on(place: str, tmp_path: Path) -> None:
    with Program(tmp_path, place, "silence", "3600") as program:
        assert program.end() == ["1 messages, 0 changes: go", "interrupted"]


@pytest.mark.slow
@needs_signals
@ANYWHERE
def test_ctrl_c_does_not_wait_for_a_thread_that_does_not_look(place: str, tmp_path: Path) -> None:
    """Not longer than the grace; the thread is left behind, and the program ends all the same."""
    with Program(tmp_path, place, "wait_in_a_thread", "0.1") as program:
        program.until("started")
        program.interrupt()
        assert program.end() == [
            "told",
            "3 messages, 0 changes: The call was running when the run was stopped. "
            "It did not react and may still be running.",
            "interrupted",
        ]


@pytest.mark.slow
@needs_signals
@ANYWHERE
@pytest.mark.parametrize(("name", "sign"), [("refuse", "refused"), ("wait_in_a_thread", "told")])
def test_a_second_ctrl_c_does_not_wait(name: str, sign: str, place: str, tmp_path: Path) -> None:
    """The grace would be an hour."""
    with Program(tmp_path, place, name, "3600") as program:
        program.until("started")
        program.interrupt()
        program.until(sign)
        program.interrupt()
        program.end()


# --- in a real notebook -------------------------------------------------------------------------


class Notebook:
    """A kernel, as a notebook starts it."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import KernelManager

        names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        places = {name: str(folder) for name in names}
        self._manager = KernelManager(connection_file=str(folder / "kernel.json"))
        self._manager.start_kernel(env=os.environ | places)
        self._client = self._manager.blocking_client()

    def __enter__(self) -> Notebook:
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def cell(self, source: str, *, interrupt_at: str | None = None) -> str:
        """Run a cell; what it has printed."""
        printed = ""

        def output(message: Any) -> None:
            nonlocal printed
            if message["msg_type"] != "stream":
                return
            seen = interrupt_at is not None and interrupt_at in printed
            printed += message["content"]["text"]
            if interrupt_at is not None and interrupt_at in printed and not seen:
                self._manager.interrupt_kernel()

        reply = self._client.execute_interactive(dedent(source), output_hook=output, timeout=30)
        content = reply["content"]
        assert content["status"] == "ok", content
        return printed


@pytest.mark.slow
@needs_signals
def test_run_sync_works_in_a_notebook(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.cell(
            """
            import asyncio
            from contextvars import ContextVar
            from clark_agent import AgentContext, LoopConfig, run, run_sync, tool
            from clark_agent.history import repair_history
            from clark_agent.testing import ScriptedStream, call

            assert asyncio.get_running_loop().is_running()
            user = ContextVar("user")

            @tool
            def who() -> str:
                '''Who is there?'''
                return user.get()

            @tool
            async def wait() -> str:
                '''Waits, and cleans up.'''
                print("started", flush=True)
                try:
                    await asyncio.sleep(3600)
                finally:
                    print("cleaned up", flush=True)
            """
        )
        assert notebook.cell(
            """
            user.set("me")
            config = LoopConfig(stream=ScriptedStream([call("who"), "It is you."]), tools=[who])
            result = run_sync("Who?", AgentContext(), config)
            print([message.plain_text for message in result.messages])
            """
        ) == "['Who?', '', 'me', 'It is you.']\n"  # fmt: skip
        assert notebook.cell(
            """
            config = LoopConfig(stream=ScriptedStream([call("wait")]), tools=[wait])
            try:
                run_sync("Wait.", AgentContext(), config)
            except KeyboardInterrupt as stop:
                messages = stop.__cause__.messages
                print(len(messages), repair_history(messages).changes)
            """,
            interrupt_at="started",
        ) == "started\ncleaned up\n3 ()\n"  # fmt: skip
        assert notebook.cell(
            """
            config = LoopConfig(stream=ScriptedStream(["Still here.", "And here."]))
            print(run_sync("Hello?", AgentContext(), config).text)
            print((await run("Hello?", AgentContext(), config)).text)
            """
        ) == "Still here.\nAnd here.\n"  # fmt: skip
