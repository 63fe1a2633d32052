"""Runs that are stopped: by their token or as a task, from anywhere, at every point of a run.

A token ends the run with `RunAborted`. A cancelled task stays cancelled, and its `CancelledError`
has the `RunAborted` as its cause, with everything that the run had. Either way brackets close,
every call is answered, the stream is closed and no task is left; `observed_run` sees to most of it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from clark_agent import (
    AfterToolDecision,
    AgentEvent,
    AgentMessage,
    Answer,
    AssistantMessage,
    CancellationToken,
    ChannelSink,
    ExecutionMode,
    FunctionPlugin,
    LoopConfig,
    LoopError,
    MaxTokensRecovery,
    RunAborted,
    RunResult,
    StopReason,
    StreamError,
    StreamEvent,
    StreamRequest,
    ToolContext,
    ToolResult,
    UserMessage,
    run,
    tool,
)
from clark_agent import events as ev
from clark_agent._threads import run_in_thread
from clark_agent.audience import Audience
from clark_agent.engine.emitter import Emitter
from clark_agent.engine.supervised import left_behind
from clark_agent.stream import Chunk, Done, ReasoningChunk, Start, TextChunk, ToolCallChunk
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream, Step, call, check_events
from tests.cases import all_cases
from tests.engine.support import (
    CONTEXT,
    FINISH,
    PLACEHOLDER,
    Stubborn,
    Waiting,
    Work,
    completed,
    failed,
    failing,
    let_others_run,
    observe,
    observed_run,
    outline,
    results,
    texts,
    truncated,
)
from tests.event_loops import task_for_later

Outcome = tuple[RunResult | BaseException, RecordingSink]
SOON = 0.01


def current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def cancel(by: str, signal: CancellationToken, task: asyncio.Task[Any]) -> None:
    if by == "token":
        signal.cancel()
    else:
        task.cancel()


# --- a run with something of everything ---------------------------------------------------------


async def pause(*_: object) -> None:
    await asyncio.sleep(0)


class Everything:
    """All hooks, each of which gives others a turn."""

    name = "everything"

    def __init__(self) -> None:
        self.steering: list[list[AgentMessage]] = [[], [UserMessage("by the way")]]
        self.follow_ups: list[list[AgentMessage]] = [[UserMessage("sure?")]]

    def for_run(self) -> Everything:
        return Everything()

    async def on_before_tool_call(self, ctx: Any) -> None:
        await pause()

    async def on_after_tool_call(self, ctx: Any) -> None:
        await pause()

    async def transform_context(self, messages: Any, ctx: Any) -> Any:
        await pause()
        return messages

    async def on_event(self, event: AgentEvent) -> None:
        await pause()

    async def next_steering_messages(self) -> list[AgentMessage]:
        await pause()
        return self.steering.pop(0) if self.steering else []

    async def next_follow_up_messages(self) -> list[AgentMessage]:
        await pause()
        return self.follow_ups.pop(0) if self.follow_ups else []

    async def next_turn_tool_allowlist(self, ctx: Any) -> None:
        await pause()


class PausingStream(ScriptedStream):
    """Gives others a turn before every event, and knows whether each stream was closed."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.open = 0

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.open += 1
        try:
            async for event in super().__call__(request, signal):
                await pause()
                yield event
        finally:
            self.open -= 1


async def work(args: Any, ctx: ToolContext) -> ToolResult:
    await ctx.update("half")
    await pause()
    return ToolResult.text("done")


def scenario(mode: ExecutionMode) -> tuple[LoopConfig, PausingStream]:
    script: list[Step] = [
        [],
        truncated("cut off"),
        [call("work"), call("nope"), call("work")],
        call("work"),
        "so far",
        "the end",
    ]
    stream = PausingStream(script)
    config = LoopConfig(
        stream=stream,
        tools=[Work("work", work)],
        plugins=[Everything()],
        default_execution_mode=mode,
        max_output_tokens=10,
        max_output_tokens_recovery=MaxTokensRecovery(),
        clock=FakeClock(),
    )
    return config, stream


EVERY_MODE = pytest.mark.parametrize("mode", list(ExecutionMode))


async def places(mode: ExecutionMode) -> list[tuple[int, str]]:
    """The number and the kind of every event of a run that nobody stops."""
    outcome, sink = await observe(scenario(mode)[0])
    assert isinstance(outcome, RunResult)
    return list(enumerate(sink.types))


def is_in_last_turn(sink: RecordingSink, number: int) -> bool:
    return "turn_end" not in sink.types[number:-2]


@EVERY_MODE
async def test_a_token_can_be_cancelled_at_every_event(mode: ExecutionMode) -> None:
    """By a listener that goes on at once."""

    async def cancelled_at(number: int) -> None:
        signal, seen = CancellationToken(), list[AgentEvent]()

        def cancel_then(event: AgentEvent) -> None:
            seen.append(event)
            if len(seen) == number + 1:
                signal.cancel("enough")

        config, stream = scenario(mode)
        outcome, _ = await observe(config, signal=signal, on_event=cancel_then)
        assert type(outcome) is RunAborted
        assert outcome.reason == "enough"
        assert stream.open == 0

    with all_cases() as case:
        for place in await places(mode):
            with case(place):
                await cancelled_at(place[0])


@EVERY_MODE
async def test_a_token_can_be_cancelled_by_a_listener_that_waits(mode: ExecutionMode) -> None:
    async def cancelled_at(number: int) -> None:
        signal, seen = CancellationToken(), list[AgentEvent]()

        async def cancel_then(event: AgentEvent) -> None:
            seen.append(event)
            if len(seen) == number + 1:
                signal.cancel("enough")
                await let_others_run()

        config, stream = scenario(mode)
        outcome, _ = await observe(config, signal=signal, on_event=cancel_then)
        assert type(outcome) is RunAborted
        assert stream.open == 0

    with all_cases() as case:
        for place in await places(mode):
            with case(place):
                await cancelled_at(place[0])


@EVERY_MODE
async def test_a_task_can_be_cancelled_at_every_event(mode: ExecutionMode) -> None:
    async def cancelled_at(number: int) -> None:
        seen = list[AgentEvent]()

        async def cancel_then(event: AgentEvent) -> None:
            seen.append(event)
            if len(seen) == number + 1:
                task.cancel()
                await let_others_run()

        config, stream = scenario(mode)
        task = task_for_later(observe(config, on_event=cancel_then))
        outcome, _ = await task
        assert isinstance(outcome, asyncio.CancelledError)
        assert task.cancelling() == 1
        assert stream.open == 0

    with all_cases() as case:
        for place in await places(mode):
            with case(place):
                await cancelled_at(place[0])


@pytest.mark.slow
@EVERY_MODE
@pytest.mark.parametrize("by", ["token", "task"])
async def test_a_run_can_be_stopped_at_every_await(by: str, mode: ExecutionMode) -> None:
    """Let it go one more step of the event loop each time, until it comes through."""
    steps = 0
    while True:
        signal = CancellationToken()
        config, stream = scenario(mode)
        task = asyncio.create_task(observe(config, signal=signal))
        for _ in range(steps):
            await asyncio.sleep(0)
        cancel(by, signal, task)
        try:
            outcome, _ = await task
        except asyncio.CancelledError:
            assert steps == 0  # cancelled before it began
            steps += 1
            continue
        assert stream.open == 0
        if isinstance(outcome, RunResult):
            break
        expected = RunAborted if by == "token" else asyncio.CancelledError
        assert type(outcome) is expected
        steps += 1
    assert steps > 100  # it did take that many


async def cancelled_at(number: int, mode: ExecutionMode) -> tuple[bool, list[bool]]:
    """Whether the run came through all the same, and which tools saw it cancelled as they began."""
    signal, begun, seen = CancellationToken(), list[bool](), list[AgentEvent]()

    async def note(args: Any, ctx: ToolContext) -> ToolResult:
        begun.append(signal.cancelled)
        return ToolResult.text("done")

    def cancel_at_event(event: AgentEvent) -> None:
        seen.append(event)
        if len(seen) == number + 1:
            signal.cancel()

    script: list[Step] = [[call("note"), call("note")], call("note"), "ok"]
    outcome, sink = await observed_run(
        script, Work("note", note), signal=signal, on_event=cancel_at_event,
        default_execution_mode=mode,
    )  # fmt: skip
    came_through = isinstance(outcome, RunResult)
    assert not came_through or is_in_last_turn(sink, number)
    return came_through, begun


@EVERY_MODE
async def test_once_the_token_is_cancelled_no_tool_begins(mode: ExecutionMode) -> None:
    """At whatever event a listener cancels it."""
    for number in count():
        came_through, begun = await cancelled_at(number, mode)
        assert True not in begun, f"a tool began after a cancel at event {number}"
        if came_through:
            break


# --- before the run -----------------------------------------------------------------------------


async def test_a_token_that_is_cancelled_already_stops_the_run_before_the_model_is_asked() -> None:
    signal, stream = CancellationToken(), ScriptedStream(["unheard"])
    signal.cancel("never mind")
    error, sink = await failed(RunAborted, stream, signal=signal)
    assert stream.requests == []
    assert outline(error.messages) == ["user: go"]
    assert sink.types == [
        "agent_start", "turn_start", "message_start", "message_end", "turn_end", "agent_end",
    ]  # fmt: skip
    assert str(error) == "the run was aborted: never mind"


async def test_a_parents_token_stops_the_run_too() -> None:
    parent = CancellationToken()
    child, waiting = parent.child(), Waiting()
    task = asyncio.create_task(observed_run([call("wait")], Work("wait", waiting), signal=child))
    await waiting.started.wait()
    parent.cancel("all of you")
    outcome, _ = await task
    assert isinstance(outcome, RunAborted)
    assert outcome.reason == "all of you"


# --- where it may come from ---------------------------------------------------------------------


async def hanging_model(
    request: StreamRequest, signal: CancellationToken
) -> AsyncIterator[StreamEvent]:
    yield Start(PLACEHOLDER)
    yield Chunk(TextChunk("Half"))
    await asyncio.Event().wait()


def cancel_at_update(cancel: Callable[[], object]) -> Callable[[AgentEvent], None]:
    def on_event(event: AgentEvent) -> None:
        if isinstance(event, ev.MessageUpdate):
            cancel()

    return on_event


async def test_from_another_thread_while_the_model_streams() -> None:
    signal, threads = CancellationToken(), list[threading.Thread]()

    def from_a_thread() -> None:
        thread = threading.Thread(target=signal.cancel, args=("from a thread",))
        threads.append(thread)
        thread.start()

    error, _ = await failed(
        RunAborted, hanging_model, signal=signal, on_event=cancel_at_update(from_a_thread)
    )
    threads[0].join()
    assert error.reason == "from a thread"
    assert error.partial is not None
    assert error.partial.plain_text == "Half"


@pytest.mark.parametrize("calls", [1, 3])
async def test_from_another_thread_while_tools_run(calls: int) -> None:
    signal, barrier = CancellationToken(), asyncio.Barrier(calls)

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        if await barrier.wait() == 0:
            threading.Thread(target=signal.cancel).start()
        await asyncio.Event().wait()
        raise AssertionError

    error, _ = await failed(RunAborted, [[call("wait")] * calls], Work("wait", wait), signal=signal)
    for message in results(error):
        assert message.details == {
            "kind": "tool_call_stopped", "reason": "aborted", "still_running": False,
        }  # fmt: skip


@pytest.mark.parametrize(
    "capability",
    ["before_tool_call", "after_tool_call", "context_transform", "tool_gate", "steering",
     "follow_up", "event_observer"],
)  # fmt: skip
@pytest.mark.parametrize("by", ["token", "task"])
async def test_from_within_every_kind_of_hook(capability: Any, by: str) -> None:
    signal, asked = CancellationToken(), list[object]()

    async def stop(*_: object) -> Any:
        asked.append(_)
        if len(asked) == 1:
            cancel(by, signal, task)
            await asyncio.Event().wait()

    task = task_for_later(
        observed_run(
            [call("work"), "ok"], Work(), signal=signal, plugins=[FunctionPlugin(capability, stop)]
        )
    )
    outcome, _ = await task
    assert type(outcome) is (RunAborted if by == "token" else asyncio.CancelledError)


@pytest.mark.parametrize("calls", [1, 2])
async def test_from_within_a_tool(calls: int) -> None:
    signal, ended = CancellationToken(), list[str]()

    async def stop(args: Any, ctx: ToolContext) -> ToolResult:
        signal.cancel("by a tool")
        assert ctx.signal.cancelled
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")
        raise AssertionError

    error, _ = await failed(
        RunAborted, [[call("stop"), call("stop")][:calls]], Work("stop", stop), signal=signal
    )
    assert error.reason == "by a tool"
    assert ended[:1] == ["cleaned up"]


async def test_a_tool_that_cancels_the_run_may_still_give_its_result() -> None:
    signal = CancellationToken()

    async def stop(args: Any, ctx: ToolContext) -> ToolResult:
        signal.cancel()
        return ToolResult.text("stopped it")

    error, _ = await failed(RunAborted, [call("stop")], Work("stop", stop), signal=signal)
    assert texts(error) == ["stopped it"]


# --- while the model streams --------------------------------------------------------------------


class Closable:
    """A stream that is no generator: somebody has to close it."""

    def __init__(self) -> None:
        self.closed = 0
        self.begun = asyncio.Event()

    def __call__(self, request: StreamRequest, signal: CancellationToken) -> Closable:
        return self

    def __aiter__(self) -> Closable:
        return self

    async def __anext__(self) -> StreamEvent:
        if not self.begun.is_set():
            self.begun.set()
            return Start(PLACEHOLDER)
        await asyncio.Event().wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.closed += 1


@pytest.mark.parametrize("by", ["token", "task"])
async def test_the_stream_is_closed(by: str) -> None:
    model, signal = Closable(), CancellationToken()
    task = asyncio.create_task(observed_run(model, signal=signal))
    await model.begun.wait()
    await let_others_run()
    cancel(by, signal, task)
    outcome, sink = await task
    assert isinstance(outcome, RunAborted | asyncio.CancelledError)
    assert model.closed == 1
    assert sink.types[-4:] == ["message_end", "message_discarded", "turn_end", "agent_end"]


async def test_a_transport_may_react_to_the_signal_by_itself() -> None:
    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for event in failing("aborted", "closed the connection", "We", started=False):
                yield event

    signal = CancellationToken()
    task = asyncio.create_task(observed_run(model, signal=signal))
    await let_others_run()
    signal.cancel("enough")
    outcome, _ = await task
    assert isinstance(outcome, RunAborted)
    assert outcome.partial is not None
    assert outcome.partial.error_message == "closed the connection"


async def test_a_transport_that_swallows_its_cancellation_starts_no_tool() -> None:
    signal, tool = CancellationToken(), Work()

    async def model(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        signal.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        yield Done(AssistantMessage.from_calls([call("work", call_id="c")]))

    error, _ = await failed(RunAborted, model, tool, signal=signal)
    assert tool.calls == []
    assert [r.details["reason"] for r in results(error)] == ["aborted"]


@pytest.mark.parametrize("by", ["token", "task"])
@pytest.mark.parametrize("way", ["ends", "raises", "fails", "answers"])
async def test_a_transport_cannot_swallow_the_cancellation_of_the_run(way: str, by: str) -> None:
    """Nor does a retry absorb it."""
    signal, asked = CancellationToken(), list[StreamRequest]()

    async def model(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
        asked.append(request)
        if len(asked) > 1:
            yield Done(AssistantMessage.from_text("asked again"))
            return
        try:
            cancel(by, signal, task)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if way == "raises":
                raise ConnectionError("closed") from None
            if way == "fails":
                yield failing("empty", "closed")[-1]
            if way == "answers":
                yield Done(AssistantMessage.from_calls([call("work", call_id="c")]))

    tool = Work()
    task = task_for_later(observed_run(model, tool, signal=signal))
    outcome, _ = await task
    assert type(outcome) is (RunAborted if by == "token" else asyncio.CancelledError)
    assert len(asked) == 1
    assert tool.calls == []


@pytest.mark.parametrize("by", ["token", "task"])
@pytest.mark.parametrize(
    "capability", ["before_tool_call", "context_transform", "tool_gate", "steering"]
)
async def test_a_hook_cannot_swallow_the_cancellation_of_the_run(capability: Any, by: str) -> None:
    signal, tool, asked = CancellationToken(), Work(), list[object]()

    async def swallow(*given: Any) -> Any:
        asked.append(given)
        if len(asked) == 1:
            cancel(by, signal, task)
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return given[0] if capability == "context_transform" else None

    plugins = [FunctionPlugin(capability, swallow)]
    task = task_for_later(observed_run([call("work"), "ok"], tool, signal=signal, plugins=plugins))
    outcome, _ = await task
    assert type(outcome) is (RunAborted if by == "token" else asyncio.CancelledError)
    assert tool.calls == []


@EVERY_MODE
async def test_a_hook_that_cancels_the_run_before_a_call_keeps_it_from_running(
    mode: ExecutionMode,
) -> None:
    signal, tool = CancellationToken(), Work()
    stop = FunctionPlugin("before_tool_call", lambda ctx: signal.cancel("not this one"))
    error, _ = await failed(
        RunAborted, [[call("work"), call("work")]], tool, signal=signal, plugins=[stop],
        default_execution_mode=mode,
    )  # fmt: skip
    assert tool.calls == []
    assert [r.details["kind"] for r in results(error)] == ["tool_call_not_executed"] * 2


async def test_what_has_been_streamed_is_the_partial_with_its_calls() -> None:
    async def model(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        yield Chunk(ReasoningChunk("hm"))
        yield Chunk(TextChunk("I look"))
        yield Chunk(ToolCallChunk(0, "c", "work", '{"x": '))
        signal.cancel()
        await asyncio.Event().wait()

    signal = CancellationToken()
    error, sink = await failed(RunAborted, model, signal=signal)
    assert error.partial is not None
    assert error.partial.reasoning_text == "hm"
    assert error.partial.plain_text == "I look"
    assert [c.name for c in error.partial.tool_calls] == ["work"]
    assert sink.of(ev.TurnEnd)[0].message == error.partial
    assert error.partial.stop_reason is StopReason.ABORTED


async def test_a_stream_that_failed_and_was_then_aborted_keeps_its_partial() -> None:
    """The listener who hears of the failed message cancels the run."""
    signal = CancellationToken()

    async def cancel(event: AgentEvent) -> None:
        if isinstance(event, ev.MessageEnd) and isinstance(event.message, AssistantMessage):
            signal.cancel()
            await let_others_run()

    error, sink = await failed(
        RunAborted, [failing("transient", "gone", "Half")], signal=signal, on_event=cancel
    )
    assert error.partial is not None
    assert error.partial.plain_text == "Half"
    assert sink.of(ev.TurnEnd)[0].message == error.partial


async def test_while_the_loop_waits_before_it_asks_again() -> None:
    class SlowClock(FakeClock):
        async def sleep(self, seconds: float) -> None:
            self.sleeps.append(seconds)
            signal.cancel()
            await asyncio.Event().wait()

    signal, clock = CancellationToken(), SlowClock()
    error, _ = await failed(RunAborted, [[], "unheard"], signal=signal, clock=clock)
    assert clock.sleeps == [0.25]
    assert outline(error.messages) == ["user: go"]


async def test_a_token_cancelled_during_a_sleep_that_ends_all_the_same() -> None:
    class Clock(FakeClock):
        async def sleep(self, seconds: float) -> None:
            signal.cancel()

    signal = CancellationToken()
    stream = ScriptedStream([[], "unheard"])
    await failed(RunAborted, stream, signal=signal, clock=Clock())
    assert len(stream.requests) == 1


# --- while tools run ----------------------------------------------------------------------------


async def test_results_say_whether_the_call_had_started() -> None:
    signal, waiting = CancellationToken(), Waiting()
    task = asyncio.create_task(
        observed_run(
            [[call("work"), call("wait"), call("work")]], Work(), Work("wait", waiting),
            signal=signal, default_execution_mode="sequential",
        )
    )  # fmt: skip
    await waiting.started.wait()
    signal.cancel()
    outcome, sink = await task
    assert isinstance(outcome, RunAborted)
    finished, stopped, untouched = results(outcome)
    assert (finished.plain_text, finished.is_error) == ("done", False)
    assert stopped.details["kind"] == "tool_call_stopped"
    assert untouched.details == {"kind": "tool_call_not_executed", "reason": "aborted"}
    started = [e.tool_call_id for e in sink.of(ev.ToolExecutionStart)]
    assert started == ["call_1", "call_2"]


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("by", ["token", "task"])
async def test_a_tool_may_end_by_itself_when_told_to(by: str, calls: int) -> None:
    """Cooperatively first: it hears of its own signal before anything is raised in it."""
    signal, started = CancellationToken(), asyncio.Event()

    async def careful(args: Any, ctx: ToolContext) -> ToolResult:
        started.set()
        await ctx.signal.wait()
        return ToolResult.text("saved")

    task = asyncio.create_task(
        observed_run([[call("work")] * calls], Work("work", careful), signal=signal)
    )
    await started.wait()
    await let_others_run()
    cancel(by, signal, task)
    outcome, _ = await task
    assert type(outcome) is (RunAborted if by == "token" else asyncio.CancelledError)
    if by == "token" or calls == 2:
        assert texts(outcome) == ["saved"] * calls


@pytest.mark.parametrize("by", ["token", "task"])
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_may_clean_up_when_it_is_cancelled(by: str, calls: int) -> None:
    signal, waiting, log = CancellationToken(), Waiting(), list[str]()

    async def clean(args: Any, ctx: ToolContext) -> ToolResult:
        try:
            return await waiting(args, ctx)
        finally:
            await asyncio.sleep(0)
            log.append("cleaned up")

    task = asyncio.create_task(
        observed_run([[call("work")] * calls], Work("work", clean), signal=signal)
    )
    await waiting.started.wait()
    await let_others_run()
    cancel(by, signal, task)
    outcome, _ = await task
    assert type(outcome) is (RunAborted if by == "token" else asyncio.CancelledError)
    assert log == ["cleaned up"] * calls


@pytest.mark.parametrize("by", ["token", "task"])
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_that_does_not_stop_is_left_behind(by: str, calls: int) -> None:
    signal, stubborn = CancellationToken(), Stubborn()
    task = asyncio.create_task(
        observed_run(
            [[call("stubborn"), call("work")][:calls]], Work("stubborn", stubborn), Work(),
            signal=signal, cancel_grace=SOON, leaves_tasks=True,
        )
    )  # fmt: skip
    await stubborn.started.wait()
    await let_others_run()
    cancel(by, signal, task)
    outcome, _ = await task
    assert type(outcome) is (RunAborted if by == "token" else asyncio.CancelledError)
    details = results(outcome)[0].details
    assert details["still_running"] is True
    assert not stubborn.ended.is_set()
    stubborn.release.set()
    await stubborn.ended.wait()


class Blocking(Work):
    """Blocks a thread until it is let go, or sees its signal when it looks."""

    runs_in_thread = True

    def __init__(self, *, looks: bool) -> None:
        self.looks = looks
        self.started = threading.Event()
        self.release = threading.Event()
        self.ended = threading.Event()
        super().__init__("block")

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        def block() -> ToolResult:
            self.started.set()
            while not self.release.wait(0.001):
                if self.looks and ctx.signal.cancelled:
                    self.ended.set()
                    return ToolResult.text("saw it")
            self.ended.set()
            return ToolResult.text("let go")

        return await run_in_thread(block)


@pytest.mark.parametrize("by", ["token", "task"])
async def test_a_thread_that_does_not_stop_is_left_behind(
    by: str, caplog: pytest.LogCaptureFixture
) -> None:
    signal, tool = CancellationToken(), Blocking(looks=False)
    task = asyncio.create_task(
        observed_run([call("block")], tool, signal=signal, cancel_grace=SOON, leaves_tasks=True)
    )
    await asyncio.to_thread(tool.started.wait)
    cancel(by, signal, task)
    outcome, _ = await task
    assert type(outcome) is (RunAborted if by == "token" else asyncio.CancelledError)
    assert results(outcome)[0].details["still_running"] is True
    assert "left behind" in caplog.text
    assert not tool.ended.is_set()
    tool.release.set()
    await asyncio.to_thread(tool.ended.wait)
    await let_others_run()


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_timeout_around_a_thread_inside_a_tool_is_the_tools_own_affair(calls: int) -> None:
    release = threading.Event()

    class Impatient(Work):
        runs_in_thread = True

        async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
            try:
                async with asyncio.timeout(SOON):
                    await run_in_thread(release.wait, 10)
            except TimeoutError:
                return ToolResult.text("gave up")
            raise AssertionError

    try:
        result, _ = await completed([[call("work")] * calls, "ok"], Impatient(), cancel_grace=0.1)
    finally:
        release.set()
    assert texts(result) == ["gave up"] * calls


@pytest.mark.parametrize("by", ["token", "task"])
async def test_a_thread_that_looks_at_its_signal_ends_by_itself(by: str) -> None:
    signal, tool = CancellationToken(), Blocking(looks=True)
    task = asyncio.create_task(observed_run([call("block")], tool, signal=signal))
    await asyncio.to_thread(tool.started.wait)
    cancel(by, signal, task)
    try:
        outcome, _ = await task
        assert type(outcome) is (RunAborted if by == "token" else asyncio.CancelledError)
        saw_it = await asyncio.to_thread(tool.ended.wait, 1)
    finally:
        tool.release.set()
    assert saw_it
    if by == "token":  # a cancelled task does not wait for a thread
        assert texts(outcome) == ["saw it"]


async def test_a_result_that_a_hook_had_no_time_to_check_is_not_given_away() -> None:
    """A hook that redacts was interrupted: fail closed, as when it had raised."""
    signal = CancellationToken()

    async def redact(ctx: Any) -> AfterToolDecision:
        signal.cancel()
        await asyncio.Event().wait()
        return AfterToolDecision(ToolResult.text("***"))

    for calls in (1, 2):
        signal = CancellationToken()
        error, sink = await failed(
            RunAborted, [[call("work")] * calls], Work("work", "SECRET"), signal=signal,
            plugins=[FunctionPlugin("after_tool_call", redact)],
        )  # fmt: skip
        assert "SECRET" not in str(error.messages)
        assert "SECRET" not in str(sink.events)


async def test_an_error_that_a_hook_had_no_time_to_check_is_not_given_away() -> None:
    signal = CancellationToken()

    async def redact(ctx: Any) -> AfterToolDecision:
        signal.cancel()
        await asyncio.Event().wait()
        return AfterToolDecision(ToolResult.text("***"))

    tool = Work("work", ValueError("no access for SECRET"))
    _, sink = await failed(
        RunAborted, [call("work")], tool, signal=signal,
        plugins=[FunctionPlugin("after_tool_call", redact)],
    )  # fmt: skip
    assert "SECRET" not in str(sink.events)


async def test_an_answer_that_a_hook_had_no_time_to_check_is_not_given_away() -> None:
    signal = CancellationToken()

    async def answer(ctx: Any) -> Answer:
        if ctx.tool_call.id == "call_2":
            signal.cancel()
            await asyncio.Event().wait()
        return Answer(ToolResult.text("SECRET"))

    def redact(ctx: Any) -> AfterToolDecision:
        return AfterToolDecision(ToolResult.text("***"))

    _, sink = await failed(
        RunAborted, [[call("work"), call("work")]], Work(), signal=signal,
        plugins=[FunctionPlugin("before_tool_call", answer),
                 FunctionPlugin("after_tool_call", redact)],
    )  # fmt: skip
    assert "SECRET" not in str(sink.events)


async def test_a_result_that_comes_while_the_run_is_stopped_passes_the_hooks_or_is_withheld() -> (
    None
):
    signal, started = CancellationToken(), asyncio.Event()

    async def careful(args: Any, ctx: ToolContext) -> ToolResult:
        started.set()
        await ctx.signal.wait()
        return ToolResult.text("SECRET")

    def redact(ctx: Any) -> AfterToolDecision:
        return AfterToolDecision(ToolResult.text("***"))

    task = asyncio.create_task(
        observed_run(
            [call("work")], Work("work", careful), signal=signal,
            plugins=[FunctionPlugin("after_tool_call", redact)],
        )
    )  # fmt: skip
    await started.wait()
    signal.cancel()
    outcome, sink = await task
    assert isinstance(outcome, RunAborted)
    assert "SECRET" not in str(sink.events)


# --- steering that was accepted -----------------------------------------------------------------


async def test_steering_that_was_polled_before_the_abort_comes_back() -> None:
    signal, turns, given = CancellationToken(), list[AgentEvent](), UserMessage("hear me")

    async def cancel_in_second_turn(event: AgentEvent) -> None:
        if isinstance(event, ev.TurnStart):
            turns.append(event)
            if len(turns) == 2:
                signal.cancel()
                await let_others_run()

    polled = iter([[], [given]])
    error, _ = await failed(
        RunAborted, [call("work")], Work(), signal=signal, on_event=cancel_in_second_turn,
        plugins=[FunctionPlugin("steering", lambda: next(polled))],
    )  # fmt: skip
    assert error.undelivered == (given,)
    assert given not in error.messages


@pytest.mark.parametrize("capability", ["steering", "follow_up"])
@pytest.mark.parametrize("by", ["token", "task"])
async def test_messages_of_one_source_are_not_lost_when_the_next_is_interrupted(
    capability: Any, by: str
) -> None:
    signal, given = CancellationToken(), UserMessage("hear me")

    async def stop() -> list[AgentMessage]:
        cancel(by, signal, task)
        await asyncio.Event().wait()
        return []

    task = task_for_later(
        observed_run(
            ["ok"], signal=signal,
            plugins=[FunctionPlugin(capability, lambda: [given]), FunctionPlugin(capability, stop)],
        )
    )  # fmt: skip
    outcome, _ = await task
    error = outcome.__cause__ if isinstance(outcome, asyncio.CancelledError) else outcome
    assert isinstance(error, RunAborted)
    assert error.undelivered == (given,)


# --- RunAborted and CancelledError --------------------------------------------------------------


async def test_a_cancelled_task_carries_what_the_run_had() -> None:
    waiting = Waiting()
    sink = RecordingSink()
    config = LoopConfig(
        stream=ScriptedStream([call("work"), call("wait")]), tools=[Work(), Work("wait", waiting)],
        event_sink=sink,
    )  # fmt: skip
    task = asyncio.create_task(run("go", CONTEXT, config))
    await waiting.started.wait()
    task.cancel("deadline")
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert task.cancelled()
    assert caught.value.args == ("deadline",)  # the very cancellation goes on
    cause = caught.value.__cause__
    assert isinstance(cause, RunAborted)
    assert outline(cause.messages)[:3] == ["user: go", "assistant: ", "tool_result: done"]
    assert len(results(cause)) == 2
    check_events(sink.events)


async def test_a_timeout_around_a_run() -> None:
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(SOON):
            await run("go", CONTEXT, LoopConfig(stream=hanging_model))
    cancelled = caught.value.__cause__
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(cancelled.__cause__, RunAborted)
    assert cancelled.__cause__.partial is not None
    assert current_task().cancelling() == 0
    await asyncio.sleep(0)  # nothing of it comes back later


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_timeout_around_a_run_whose_tools_hang(calls: int) -> None:
    waiting = Waiting()
    config = LoopConfig(
        stream=ScriptedStream([[call("wait")] * calls]), tools=[Work("wait", waiting)]
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SOON):
            await run("go", CONTEXT, config)
    assert waiting.cancelled
    assert current_task().cancelling() == 0
    assert asyncio.all_tasks() == {current_task()}


async def test_a_run_in_a_task_group_that_fails() -> None:
    waiting, sink = Waiting(), RecordingSink()
    config = LoopConfig(
        stream=ScriptedStream([call("wait")]), tools=[Work("wait", waiting)], event_sink=sink
    )

    async def fail() -> None:
        await waiting.started.wait()
        raise ValueError("elsewhere")

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(run("go", CONTEXT, config))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        await both()
    assert [type(error) for error in caught.value.exceptions] == [ValueError]
    check_events(sink.events)


async def test_token_and_task_together_count_as_the_task() -> None:
    signal, waiting = CancellationToken(), Waiting()
    task = asyncio.create_task(observed_run([call("wait")], Work("wait", waiting), signal=signal))
    await waiting.started.wait()
    signal.cancel()
    task.cancel()
    outcome, _ = await task
    assert isinstance(outcome, asyncio.CancelledError)


@pytest.mark.parametrize("error", ["stream error", "token"])
async def test_a_cancellation_while_a_failed_run_is_closed_is_not_swallowed(error: str) -> None:
    """A listener is slow to hear of the end, and in the meantime the task is cancelled."""
    signal, closing = CancellationToken(), asyncio.Event()

    async def slow(event: AgentEvent) -> None:
        if isinstance(event, ev.TurnEnd):
            closing.set()
            await asyncio.Event().wait()

    model: Any = hanging_model if error == "token" else [failing("transient")]
    config = LoopConfig(stream=model if callable(model) else ScriptedStream(model), event_sink=slow)
    task = asyncio.create_task(run("go", CONTEXT, config, signal))
    await let_others_run()
    signal.cancel()
    await closing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


@pytest.mark.parametrize("by", ["token", "task"])
async def test_a_channel_that_nobody_reads_does_not_keep_a_cancelled_run(by: str) -> None:
    """The reader has left without closing it; its room is used up and the run waits for it."""
    signal = CancellationToken()
    config = LoopConfig(
        stream=ScriptedStream(["ok"]), event_sink=ChannelSink(max_buffered=2), cancel_grace=SOON
    )
    task = asyncio.create_task(run("go", CONTEXT, config, signal))
    await let_others_run()
    assert not task.done()
    cancel(by, signal, task)
    done, _ = await asyncio.wait([task], timeout=1)
    while not task.done():  # so that the test itself ends
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)
    assert done == {task}


async def test_a_thread_whose_progress_nobody_takes_does_not_keep_a_cancelled_run() -> None:
    """The listener that holds up its update holds up the closing events behind it too."""
    signal, held, release = CancellationToken(), asyncio.Event(), asyncio.Event()

    async def hold(event: AgentEvent) -> None:
        if isinstance(event, ev.ToolExecutionUpdate):
            held.set()
            await release.wait()

    @tool
    def work(ctx: ToolContext) -> str:
        """Report."""
        _ = ctx.update("half")
        return "done"

    config = LoopConfig(
        stream=ScriptedStream([call("work")]), tools=[work], event_sink=hold, cancel_grace=SOON
    )
    task = asyncio.create_task(run("go", CONTEXT, config, signal))
    await held.wait()
    signal.cancel()
    done, _ = await asyncio.wait([task], timeout=1)
    release.set()  # so that the test itself ends
    await asyncio.gather(task, return_exceptions=True)
    await let_others_run()
    assert done == {task}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("by", ["token", "task"])
async def test_a_listener_that_awaits_hears_the_end_after_a_tool_has_used_up_the_grace(
    by: str, calls: int
) -> None:
    signal, stubborn, heard = CancellationToken(), Stubborn(), list[AgentEvent]()

    async def listen(event: AgentEvent) -> None:
        await asyncio.sleep(0)
        heard.append(event)

    async def watch(args: Any, ctx: ToolContext) -> ToolResult:
        ctx.signal.subscribe(lambda: None)  # it seems to care, so it is given all the time there is
        return await stubborn(args, ctx)

    task = asyncio.create_task(
        observed_run(
            [[call("stubborn")] * calls], Work("stubborn", watch), signal=signal,
            cancel_grace=0.2, plugins=[FunctionPlugin("event_observer", listen)],
            leaves_tasks=True,
        )
    )  # fmt: skip
    await stubborn.started.wait()
    cancel(by, signal, task)
    outcome, _ = await task
    assert type(outcome) is (RunAborted if by == "token" else asyncio.CancelledError)
    stubborn.release.set()
    await stubborn.ended.wait()
    check_events(heard)


async def test_brackets_close_however_often_the_task_is_cancelled() -> None:
    signal, waiting = CancellationToken(), Waiting()

    async def again(event: AgentEvent) -> None:
        if waiting.cancelled:
            task.cancel()
            await let_others_run()

    task = asyncio.create_task(
        observed_run([call("wait")], Work("wait", waiting), signal=signal, on_event=again)
    )
    await waiting.started.wait()
    task.cancel()
    outcome, sink = await task
    assert isinstance(outcome, asyncio.CancelledError)
    assert sink.types[-4:] == ["message_start", "message_end", "turn_end", "agent_end"]


# --- afterwards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["token", "task"])
async def test_the_next_run_on_the_same_config_works(by: str) -> None:
    waiting = Waiting()
    config = LoopConfig(
        stream=ScriptedStream([call("wait"), call("finish")]),
        tools=[Work("wait", waiting), FINISH],
        plugins=[Everything()],
    )
    signal = CancellationToken()
    task = asyncio.create_task(observe(config, signal=signal))
    await waiting.started.wait()
    cancel(by, signal, task)
    outcome, _ = await task
    assert isinstance(outcome, RunAborted | asyncio.CancelledError)
    again, _ = await observe(config)
    assert isinstance(again, RunResult)
    assert texts(again) == ["finished"]


async def test_the_same_task_goes_on_as_if_nothing_had_happened() -> None:
    signal = CancellationToken()
    with pytest.raises(RunAborted):
        await run(
            "go", CONTEXT,
            LoopConfig(stream=hanging_model, event_sink=cancel_at_update(signal.cancel)), signal,
        )  # fmt: skip
    assert current_task().cancelling() == 0
    await asyncio.sleep(0)
    async with asyncio.timeout(3600):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {current_task()}


async def test_a_token_cancelled_after_the_run_does_no_harm() -> None:
    signal = CancellationToken()
    result, _ = await completed(["ok"], signal=signal)
    signal.cancel()
    await let_others_run()
    assert result.text == "ok"
    assert current_task().cancelling() == 0
    assert not signal.has_subscribers


# --- runs within runs ---------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["token", "task"])
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_run_inside_a_tool_is_stopped_with_the_run_around_it(by: str, calls: int) -> None:
    signal, child_sinks, begun = CancellationToken(), list[RecordingSink](), asyncio.Event()

    async def delegate(args: Any, ctx: ToolContext) -> ToolResult:
        sink = RecordingSink()
        child_sinks.append(sink)
        config = LoopConfig(stream=hanging_model, event_sink=sink)
        if len(child_sinks) == calls:
            begun.set()
        return ToolResult.text((await run("child", CONTEXT, config, ctx.signal)).text)

    task = asyncio.create_task(
        observed_run([[call("delegate")] * calls], Work("delegate", delegate), signal=signal)
    )
    await begun.wait()
    await let_others_run()
    cancel(by, signal, task)
    outcome, _ = await task
    assert type(outcome) is (RunAborted if by == "token" else asyncio.CancelledError)
    for sink in child_sinks:
        check_events(sink.events)
        assert sink.types[-1] == "agent_end"
    assert [r.is_error for r in results(outcome)] == [True] * calls


async def test_a_run_inside_a_tool_can_be_stopped_alone() -> None:
    async def delegate(args: Any, ctx: ToolContext) -> ToolResult:
        child = ctx.signal.child()
        sink = cancel_at_update(lambda: child.cancel("the child alone"))
        config = LoopConfig(stream=hanging_model, event_sink=sink)
        try:
            await run("child", CONTEXT, config, child)
        except RunAborted as error:
            return ToolResult.text(f"gave up: {error.reason}")
        raise AssertionError

    for calls in (1, 2):
        result, _ = await completed([[call("delegate")] * calls, "ok"], Work("delegate", delegate))
        assert texts(result) == ["gave up: the child alone"] * calls
        assert result.text == "ok"


async def test_a_run_inside_a_tool_with_a_timeout_of_its_own() -> None:
    async def delegate(args: Any, ctx: ToolContext) -> ToolResult:
        try:
            async with asyncio.timeout(SOON):
                await run("child", CONTEXT, LoopConfig(stream=hanging_model), ctx.signal)
        except TimeoutError:
            return ToolResult.text("took too long")
        raise AssertionError

    for calls in (1, 2):
        result, _ = await completed([[call("delegate")] * calls, "ok"], Work("delegate", delegate))
        assert texts(result) == ["took too long"] * calls


async def test_a_run_whose_failure_is_a_tools_result() -> None:
    async def delegate(args: Any, ctx: ToolContext) -> ToolResult:
        config = LoopConfig(stream=ScriptedStream([failing("fatal", "no key")]))
        try:
            await run("child", CONTEXT, config, ctx.signal)
        except StreamError as error:
            return ToolResult.error(error.message)
        raise AssertionError

    result, _ = await completed([call("delegate"), "ok"], Work("delegate", delegate))
    assert texts(result) == ["no key"]
    assert issubclass(StreamError, LoopError)


# --- stranger things ----------------------------------------------------------------------------


class Odd(BaseException):
    """Neither an error nor a cancellation: somebody else's way to leave."""


@pytest.mark.parametrize("calls", [1, 2])
async def test_any_other_way_to_leave_goes_through_with_brackets_closed(calls: int) -> None:
    outcome, sink = await observed_run(
        [[call("odd"), call("work")][:calls]], Work("odd", Odd()), Work()
    )
    assert type(outcome) is Odd
    assert sink.types[-2:] == ["turn_end", "agent_end"]
    assert len(sink.of(ev.ToolExecutionEnd)) == calls


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_a_tool_ends_the_program_with_brackets_closed(
    stop: type[BaseException], calls: int
) -> None:
    sink, waiting = RecordingSink(), list[Waiting]()

    async def interrupt(args: Any, ctx: ToolContext) -> ToolResult:
        if calls == 2:
            await waiting[0].started.wait()
        raise stop

    async def main() -> None:
        waiting.append(Waiting())
        config = LoopConfig(
            stream=ScriptedStream([[call("wait"), call("interrupt")][-calls:]]),
            tools=[Work("interrupt", interrupt), Work("wait", waiting[0])],
            event_sink=sink,
        )
        await run("go", CONTEXT, config)

    with pytest.raises(stop):
        asyncio.run(main())
    check_events(sink.events)


async def test_a_call_that_stops_the_interpreter_is_not_said_to_have_never_begun() -> None:
    """Whoever resumes the run must not take it for one that can be sent again without a look."""
    outcome, _ = await observed_run([call("exit")], Work("exit", SystemExit(3)))
    assert isinstance(outcome, SystemExit)
    (result,) = results(outcome.__cause__)
    assert result.details == {
        "kind": "tool_call_stopped", "reason": "aborted", "still_running": False,
    }  # fmt: skip


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_task_that_is_cancelled_again_while_tools_clean_up(calls: int) -> None:
    waiting, cleaning, may_end = Waiting(), asyncio.Event(), asyncio.Event()

    async def slow_to_leave(args: Any, ctx: ToolContext) -> ToolResult:
        try:
            return await waiting(args, ctx)
        finally:
            cleaning.set()
            with suppress(asyncio.CancelledError):
                await may_end.wait()

    task = asyncio.create_task(observed_run([[call("work")] * calls], Work("work", slow_to_leave)))
    await waiting.started.wait()
    await let_others_run()
    task.cancel()
    await cleaning.wait()
    await let_others_run()
    task.cancel()
    await let_others_run()
    may_end.set()
    outcome, _ = await task
    assert isinstance(outcome, asyncio.CancelledError)
    assert len(results(outcome)) == calls


async def test_the_first_reason_to_stop_a_call_stays() -> None:
    signal, stubborn = CancellationToken(), Stubborn()
    stopped = asyncio.Event()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        ctx.signal.subscribe(stopped.set)
        return await stubborn(args, ctx)

    task = asyncio.create_task(
        observed_run(
            [call("work")], Work("work", work, timeout=SOON), signal=signal, cancel_grace=SOON,
            leaves_tasks=True,
        )
    )  # fmt: skip
    await stopped.wait()
    signal.cancel()
    outcome, _ = await task
    assert isinstance(outcome, RunAborted)
    assert results(outcome)[0].details["reason"] == "timeout"
    stubborn.release.set()
    await stubborn.ended.wait()


async def test_a_tool_left_behind_goes_on_as_if_nothing_had_happened() -> None:
    """Whatever it waits for still reaches it, errors too."""
    signal, log = CancellationToken(), list[str]()
    answers: asyncio.Queue[asyncio.Future[str]] = asyncio.Queue()
    ended = asyncio.Event()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        while len(log) < 3:
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            answers.put_nowait(answer)
            try:
                log.append(await answer)
            except asyncio.CancelledError:
                continue
            except ValueError as error:
                log.append(f"failed: {error}")
        await ctx.update("nobody hears this")
        ended.set()
        return ToolResult.text("never read")

    task = asyncio.create_task(
        observed_run(
            [call("work")], Work("work", work), signal=signal, cancel_grace=SOON, leaves_tasks=True
        )
    )
    first = await answers.get()
    signal.cancel()
    outcome, sink = await task
    assert results(outcome)[0].details["still_running"] is True
    assert first.cancelled()
    while log != ["one", "failed: two", "three"]:
        answer = await answers.get()
        if answer.cancelled():
            continue
        match len(log):
            case 0:
                answer.set_result("one")
            case 1:
                answer.set_exception(ValueError("two"))
            case _:
                answer.set_result("three")
        await let_others_run()
    await ended.wait()
    assert sink.of(ev.ToolExecutionUpdate) == []


async def test_a_function_that_cancels_itself_in_its_thread_has_ended() -> None:
    @tool
    def give_up() -> None:
        """Give up."""
        raise asyncio.CancelledError

    result, _ = await completed([call("give_up"), "ok"], give_up)
    (message,) = results(result)
    assert message.is_error
    assert "cancelled itself" in message.plain_text
    assert "still be running" not in message.plain_text


async def test_a_turn_that_comes_with_the_deadline_is_taken() -> None:
    """Two events at once, the first held up by its listener, and the deadline between them."""
    loop, held = asyncio.get_running_loop(), asyncio.Event()
    heard: list[AgentEvent] = []

    async def hold(event: AgentEvent) -> None:
        heard.append(event)
        if len(heard) == 1:
            await held.wait()

    emitter = Emitter(Audience(hold))
    first = asyncio.ensure_future(emitter.emit(ev.AgentStart()))
    await asyncio.sleep(0)
    emitter.deadline = loop.time() + 0.01
    loop.call_at(emitter.deadline, emitter._pass_on_turn)
    await emitter.emit(ev.TurnStart())
    held.set()
    await first
    assert heard == [ev.AgentStart(), ev.TurnStart()]


# --- tools that wait for tasks of their own -----------------------------------------------------


async def through_a_task(work: Stubborn) -> Any:
    return await asyncio.create_task(work({}, ToolContext(tool_call_id="c", tool_name="t")))


async def through_gather(work: Stubborn) -> Any:
    (result,) = await asyncio.gather(work({}, ToolContext(tool_call_id="c", tool_name="t")))
    return result


@pytest.mark.parametrize("way", [through_a_task, through_gather])
@pytest.mark.parametrize("by", ["token", "task", "timeout"])
async def test_a_tool_is_left_behind_though_it_is_its_own_task_that_does_not_stop(
    way: Callable[[Stubborn], Awaitable[Any]], by: str
) -> None:
    work, signal = Stubborn(), CancellationToken()
    task = asyncio.current_task()
    assert task is not None

    async def wait(args: Any, ctx: ToolContext) -> Any:
        return await way(work)

    async def stop() -> None:
        await work.started.wait()
        if by == "token":
            signal.cancel()
        elif by == "task":
            task.cancel()

    stopping = asyncio.create_task(stop())
    outcome, _ = await observed_run(
        [call("wait"), "ok"],
        Work("wait", wait),
        signal=signal,
        leaves_tasks=True,
        cancel_grace=0.01,
        tool_timeout=0.01 if by == "timeout" else None,
    )
    await stopping
    if by == "task":
        assert isinstance(outcome, asyncio.CancelledError)
        task.uncancel()
    elif by == "token":
        assert isinstance(outcome, RunAborted)
    (result,) = results(outcome)
    assert result.details["still_running"] is True
    assert work.cancellations > 0, "it was asked to stop"
    assert left_behind() == 1
    work.release.set()
    await work.ended.wait()
    await let_others_run()
    assert left_behind() == 0


async def test_a_tool_that_waits_for_a_task_gets_what_it_gives_and_what_it_raises() -> None:
    async def give() -> str:
        await asyncio.sleep(0)
        return "given"

    async def fail() -> str:
        await asyncio.sleep(0)
        raise LookupError("not there")

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        first = await asyncio.create_task(give())
        both = await asyncio.gather(give(), fail(), return_exceptions=True)
        cancelled = asyncio.create_task(asyncio.sleep(60))
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return ToolResult.text(f"{first} {both}")

    result, _ = await completed([call("wait"), "ok"], Work("wait", wait))
    assert texts(result) == ["given ['given', LookupError('not there')]"]


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_second_timeout_of_a_tool_has_a_grace_of_its_own(calls: int) -> None:
    """The first one has to clean up. The grace for that ends together with the second one."""
    grace = 0.02

    async def time_out_twice(args: Any, ctx: ToolContext) -> ToolResult:
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace / 4):
                asyncio.get_running_loop().call_soon(time.sleep, 2 * grace)  # so that both are due
                await asyncio.sleep(60)
        return ToolResult.text("timed out twice")

    work = Work("work", time_out_twice)
    result, _ = await completed([[call("work")] * calls, "ok"], work, cancel_grace=grace)
    assert texts(result) == ["timed out twice"] * calls


async def test_a_task_that_a_tool_waits_for_is_cancelled_with_it() -> None:
    waiting, signal = Waiting(), CancellationToken()

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        return await asyncio.create_task(waiting(args, ctx))

    async def stop() -> None:
        await waiting.started.wait()
        signal.cancel()

    stopping = asyncio.create_task(stop())
    await failed(RunAborted, [call("wait")], Work("wait", wait), signal=signal)
    await stopping
    assert waiting.cancelled
