"""Messages for a run that is going on: when they take effect, and what became of them.

A `Line` is a channel that keeps the receipts of what was sent through it. Whatever a test is about,
its runs are also checked for this: a message is in the transcript exactly once, in the order of
sending and in the turn that its receipt names, or it has expired and was handed back exactly once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from itertools import count
from typing import Any, TypeVar

import pytest

from clark_agent import (
    AgentEvent,
    AgentMessage,
    AssistantMessage,
    Budget,
    CancellationToken,
    ChannelSteering,
    Conversation,
    CustomMessage,
    ExecutionMode,
    FunctionPlugin,
    HookError,
    LoopConfig,
    LoopError,
    LoopOutcome,
    MaxTokensRecovery,
    RunAborted,
    RunResult,
    RunStoppedByTool,
    SteeringReceipt,
    SteerWhen,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamEvent,
    StreamRequest,
    SystemMessage,
    ToolContext,
    ToolFatal,
    ToolResult,
    UserMessage,
    agent_tool,
    run,
    run_sync,
    stream_run,
    tool,
)
from clark_agent import events as ev
from clark_agent.stream import Chunk, Done, Error, Start, TextChunk
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream, Step, call
from tests.cases import all_cases
from tests.engine.support import (
    CONTEXT,
    FINISH,
    PLACEHOLDER,
    Stubborn,
    Waiting,
    Work,
    check_outcome,
    completed,
    failed,
    failing,
    let_others_run,
    observe,
    observed_run,
    outline,
    results,
    role,
    shape,
    text_of,
    texts,
    truncated,
)
from tests.model.world import check_receipts

E = TypeVar("E", bound=BaseException)

GRACE = 0.01
MODES = [str(when) for when in SteerWhen]
EVERY_WAY = pytest.mark.parametrize("when", MODES)
HELD_BACK = {"kind": "tool_call_not_executed", "reason": "steered"}
STOPPED = {"kind": "tool_call_stopped", "reason": "steered", "still_running": False}
LEFT_BEHIND = {**STOPPED, "still_running": True}


class Line:
    """A channel that keeps the receipts of what was sent through it."""

    def __init__(self) -> None:
        self.plugin = ChannelSteering()
        self.steering: list[SteeringReceipt] = []
        self.follow_ups: list[SteeringReceipt] = []

    def steer(self, message: AgentMessage | str, when: str = SteerWhen.AFTER_BATCH) -> None:
        self.steering.append(self.plugin.handle.steer(message, SteerWhen(when)))

    def follow_up(self, message: AgentMessage | str) -> None:
        self.follow_ups.append(self.plugin.handle.follow_up(message))

    def send(self, message: str, when: str) -> None:
        if when == "follow_up":
            self.follow_up(message)
        else:
            self.steer(message, when)

    def from_thread(self, message: str, when: str = SteerWhen.AFTER_BATCH) -> None:
        thread = threading.Thread(target=self.steer, args=(message, when))
        thread.start()
        thread.join()

    @property
    def fates(self) -> list[tuple[str, int | None]]:
        """What the receipts say, of steering and then of follow-ups."""
        return told(*self.steering, *self.follow_ups)

    async def completed(
        self, model: Any, *tools: Any, plugins: Any = (), **settings: Any
    ) -> tuple[RunResult, RecordingSink]:
        """An observed run with this channel that comes to an end."""
        plugins = [*plugins, self.plugin]
        result, sink = await completed(model, *tools, plugins=plugins, **settings)
        self.check(result, sink)
        return result, sink

    async def failed(
        self, kind: type[E], model: Any, *tools: Any, plugins: Any = (), **settings: Any
    ) -> tuple[E, RecordingSink]:
        """An observed run with this channel that ends with an error of this class."""
        plugins = [*plugins, self.plugin]
        error, sink = await failed(kind, model, *tools, plugins=plugins, **settings)
        self.check(error, sink)
        return error, sink

    def check(self, outcome: RunResult | BaseException, sink: RecordingSink) -> None:
        check_receipts(outcome, sink.events, self.steering, self.follow_ups)


def told(*receipts: SteeringReceipt) -> list[tuple[str, int | None]]:
    return [(str(receipt.status), receipt.turn) for receipt in receipts]


def said(messages: Any) -> list[str]:
    """What users, and the host in their name, have said."""
    return [text_of(message) for message in messages if role(message) in ("user", "system")]


def details(outcome: Any) -> list[Any]:
    return [result.details for result in results(outcome)]


def discarded(sink: RecordingSink) -> list[str]:
    return [event.reason for event in sink.of(ev.MessageDiscarded)]


def tail(sink: RecordingSink, kind: str) -> list[str]:
    """The shape of the events after the first of a kind."""
    return shape(sink.events[sink.types.index(kind) + 1 :])


def current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


Play = Callable[[CancellationToken], AsyncGenerator[StreamEvent, None]]


class Model:
    """Plays one stream that is made for it, and after that a script."""

    def __init__(self, first: Play, *script: Step) -> None:
        self.first = first
        self.script = ScriptedStream(script or ["ok"])
        self.requests: list[StreamRequest] = []
        self.cancelling: list[int] = []
        self.open = 0

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        self.cancelling.append(current_task().cancelling())
        self.open += 1
        try:
            is_first = len(self.requests) == 1
            events: Any = self.first(signal) if is_first else self.script(request, signal)
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            self.open -= 1


def half_an_answer(act: Callable[[], object]) -> Play:
    """A stream that says something, does something, and then waits for good."""

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        yield Chunk(TextChunk("Half"))
        act()
        await asyncio.Event().wait()

    return play


# --- what becomes of a message --------------------------------------------------------------------


@EVERY_WAY
async def test_what_is_sent_before_the_run_is_in_its_first_turn_and_disturbs_nothing(
    when: str,
) -> None:
    line = Line()
    line.steer("first of all", when)
    result, sink = await line.completed([call("work"), "ok"], Work())
    assert line.fates == [("delivered", 1)]
    assert said(result.messages) == ["go", "first of all"]
    assert texts(result) == ["done"]
    assert discarded(sink) == []
    assert result.undelivered == ()


@EVERY_WAY
async def test_what_is_sent_while_a_tool_runs_is_put_before_the_next_answer(when: str) -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("by the way", when)
        assert line.fates == [("queued", None)]
        assert line.steering[0].when == when
        return ToolResult.text("done")

    stream = ScriptedStream([call("work"), "ok"])
    result, sink = await line.completed(stream, Work("work", work))
    assert line.fates == [("delivered", 2)]
    assert outline(result.messages) == [
        "user: go", "assistant: ", "tool_result: done", "user: by the way", "assistant: ok",
    ]  # fmt: skip
    assert stream.requests[1].messages[-1] is line.steering[0].message
    assert sink.types.count("turn_start") == 2


async def test_any_kind_of_message_can_be_sent() -> None:
    line, note = Line(), CustomMessage("note", {"x": 1})
    line.steer(SystemMessage("mind the gap"))
    line.steer(note)
    line.steer(UserMessage("and this", timestamp=3))
    result, _ = await line.completed(["ok"])
    assert outline(result.messages)[1:4] == [
        "system: mind the gap",
        "custom: note",
        "user: and this",
    ]
    assert result.messages[2] is note


async def test_messages_are_delivered_in_the_order_of_sending_whatever_their_mode() -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        for number, when in enumerate(("now", "after_batch", "before_next_tool", "now")):
            line.steer(f"{number}", when)
        return ToolResult.text("done")

    result, _ = await line.completed([call("work"), "ok"], Work("work", work))
    assert said(result.messages) == ["go", "0", "1", "2", "3"]
    assert line.fates == [("delivered", 2)] * 4


async def test_one_message_sent_twice_is_told_twice() -> None:
    channel, message = ChannelSteering(), UserMessage("again")
    receipts = [channel.handle.steer(message), channel.handle.steer(message)]
    result, _ = await completed(["ok"], plugins=[channel])
    assert said(result.messages) == ["go", "again", "again"]
    assert told(*receipts) == [("delivered", 1)] * 2


@EVERY_WAY
async def test_at_the_cap_a_message_expires_and_is_handed_back(when: str) -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("too late", when)
        line.steer("this too", when)
        return ToolResult.text("done")

    result, _ = await line.completed([call("work")], Work("work", work), max_iterations=1)
    assert result.outcome is LoopOutcome.HIT_MAX_ITERATIONS
    assert line.fates == [("expired", None)] * 2
    assert said(result.undelivered) == ["too late", "this too"]
    assert said(result.messages) == ["go"]


async def test_an_answer_that_is_broken_off_takes_a_turn_of_the_cap() -> None:
    line = Line()
    line.follow_up("and?")
    model = Model(half_an_answer(lambda: line.steer("stop", "now")))
    result, sink = await line.completed(model, max_iterations=1)
    assert result.outcome is LoopOutcome.HIT_MAX_ITERATIONS
    assert outline(result.messages) == ["user: go", "user: and?"]
    assert said(result.undelivered) == ["stop"]
    assert line.fates == [("expired", None), ("delivered", None)]
    assert discarded(sink) == ["steered"]


@EVERY_WAY
async def test_what_comes_while_the_last_batch_votes_to_end_expires(when: str) -> None:
    line = Line()

    async def finish(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("wait", when)
        line.follow_up("and then")
        return ToolResult.terminal("finished")

    result, _ = await line.completed([call("work")], Work("work", finish))
    assert result.outcome is LoopOutcome.DONE
    assert line.fates == [("expired", None)] * 2
    assert said(result.undelivered) == ["wait", "and then"]


@pytest.mark.parametrize("when", [*MODES, "follow_up"])
async def test_what_is_sent_when_the_end_is_told_expires(when: str) -> None:
    line = Line()

    def at_the_end(event: AgentEvent) -> None:
        if isinstance(event, ev.AgentEnd):
            line.send("oh", when)
            assert line.fates == [("queued", None)], "until the run has looked for the last time"

    result, _ = await line.completed(["ok"], on_event=at_the_end)
    assert line.fates == [("expired", None)]
    assert said(result.undelivered) == ["oh"]


@pytest.mark.parametrize("when", [*MODES, "follow_up"])
async def test_what_is_sent_after_the_run_expires_at_once_and_is_nobodys(when: str) -> None:
    channel = ChannelSteering()
    config = LoopConfig(stream=ScriptedStream(["ok", "again"]), plugins=[channel])
    first, _ = await observe(config)
    handle = channel.handle
    if when == "follow_up":
        receipt = handle.follow_up("late")
    else:
        receipt = handle.steer("late", SteerWhen(when))
    assert told(receipt) == [("expired", None)]
    assert await receipt is receipt
    second, _ = await observe(config)
    for result in (first, second):
        assert isinstance(result, RunResult)
        assert said(result.messages) == ["go"]
        assert result.undelivered == ()


async def test_the_same_channel_serves_one_run_after_the_other() -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("on")
        return ToolResult.text("done")

    for turns in (1, 2, 3):
        script: list[Step] = [*[call("work")] * (turns - 1), "ok"]
        result, _ = await line.completed(script, Work("work", work))
        assert line.fates == [("delivered", turn) for turn in range(2, turns + 1)]
        assert len(said(result.messages)) == turns
        line.steering.clear()


async def test_a_run_that_fails_hands_back_what_it_had_no_turn_for() -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("delivered")
        return ToolResult.text("done")

    async def burn(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("lost", "now")
        line.steer("this too")
        line.follow_up("later")
        raise ToolFatal("on fire")

    error, _ = await line.failed(
        RunStoppedByTool, [call("work"), call("burn")], Work("work", work), Work("burn", burn)
    )
    assert line.fates == [("delivered", 2), *[("expired", None)] * 3]
    assert said(error.undelivered) == ["lost", "this too", "later"]
    assert said(error.messages) == ["go", "delivered"]


async def test_a_stream_that_fails_for_good_takes_no_message_with_it() -> None:
    line = Line()

    def fail(request: StreamRequest) -> Step:
        line.steer("are you there?", "now")
        return failing("fatal", "no key")

    error, _ = await line.failed(StreamError, [fail])
    assert said(error.undelivered) == ["are you there?"]
    assert line.fates == [("expired", None)]


async def test_a_run_that_another_plugin_keeps_from_beginning_takes_no_message_with_it() -> None:
    class Broken:
        name = "broken"

        def for_run(self) -> Broken:
            raise RuntimeError("not today")

        def next_steering_messages(self) -> list[AgentMessage]:
            return []

    channel = ChannelSteering()
    receipt = channel.handle.steer("hello?")
    config = LoopConfig(stream=ScriptedStream(["ok"]), plugins=[channel, Broken()])
    with pytest.raises(HookError):
        await run("go", CONTEXT, config)
    assert receipt.status == "queued", "it still waits for a run"


async def test_what_a_polled_source_gave_in_vain_is_handed_back_beside_it() -> None:
    line = Line()
    line.steer("mine")
    signal = CancellationToken()

    def poll() -> list[AgentMessage]:
        signal.cancel()
        return [UserMessage("polled")]

    error, _ = await line.failed(
        RunAborted, ["unheard"], plugins=[FunctionPlugin("steering", poll)], signal=signal
    )
    assert said(error.undelivered) == ["polled", "mine"]
    assert line.fates == [("expired", None)]


async def test_what_the_run_itself_would_have_said_is_not_handed_back_as_a_message() -> None:
    """The word that the budget is nearly spent comes from nobody."""
    line, signal = Line(), CancellationToken()

    async def stop_at_second_turn(event: AgentEvent) -> None:
        if isinstance(event, ev.TurnStart) and line.steering:
            signal.cancel()
            await asyncio.Event().wait()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("mine")
        return ToolResult.text("done")

    error, _ = await line.failed(
        RunAborted,
        [call("work"), "unheard"],
        Work("work", work),
        on_event=stop_at_second_turn,
        signal=signal,
        budget=Budget(turns=2),
    )
    assert said(error.undelivered) == ["mine"]


async def test_a_run_on_a_cancelled_token_hands_everything_back() -> None:
    line, signal = Line(), CancellationToken()
    line.steer("a")
    line.follow_up("b")
    signal.cancel()
    error, _ = await line.failed(RunAborted, ["unheard"], signal=signal)
    assert said(error.undelivered) == ["a", "b"]
    assert line.fates == [("expired", None)] * 2


# --- waiting for it -------------------------------------------------------------------------------


async def test_a_receipt_can_be_awaited_while_the_run_goes_on() -> None:
    line, waiting = Line(), Waiting()
    running = asyncio.create_task(
        line.completed([call("wait"), "ok"], Work("wait", waiting), prompts="go")
    )
    await waiting.started.wait()
    line.steer("stop that", "now")
    receipt = line.steering[0]
    assert await receipt is receipt
    assert told(receipt) == [("delivered", 2)]
    result, _ = await running
    assert waiting.cancelled
    assert said(result.messages) == ["go", "stop that"]


async def test_a_receipt_that_waits_for_a_run_is_settled_when_the_run_fails() -> None:
    line, signal, waiting = Line(), CancellationToken(), Waiting()
    running = asyncio.create_task(
        line.failed(RunAborted, [call("wait")], Work("wait", waiting), signal=signal)
    )
    await waiting.started.wait()
    line.steer("when you are done")
    await let_others_run()
    assert not line.steering[0].is_settled
    signal.cancel()
    assert told(await line.steering[0]) == [("expired", None)]
    await running


def test_a_thread_may_wait_for_the_receipt_of_a_run_on_another() -> None:
    channel, started = ChannelSteering(), threading.Event()

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    config = LoopConfig(
        stream=ScriptedStream([call("wait"), "ok"]), tools=[Work("wait", wait)], plugins=[channel]
    )
    outcome: list[RunResult] = []
    thread = threading.Thread(target=lambda: outcome.append(run_sync("go", CONTEXT, config)))
    thread.start()
    assert started.wait(5)
    receipt = channel.handle.steer("enough", "now")
    assert receipt.wait(5)
    thread.join()
    assert told(receipt) == [("delivered", 2)]
    assert said(outcome[0].messages) == ["go", "enough"]


# --- follow-ups -----------------------------------------------------------------------------------


async def test_a_follow_up_waits_until_the_model_has_stopped() -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.follow_up("and now?")
        line.steer("mind this")
        return ToolResult.text("done")

    result, _ = await line.completed([call("work"), "so far", "the end"], Work("work", work))
    assert outline(result.messages)[3:] == [
        "user: mind this", "assistant: so far", "user: and now?", "assistant: the end",
    ]  # fmt: skip
    assert line.fates == [("delivered", 2), ("delivered", 3)]


async def test_follow_ups_keep_their_order_and_wait_for_steering() -> None:
    line = Line()
    line.follow_up("a")
    line.follow_up("b")
    line.steer("soon")
    result, _ = await line.completed(["one", "two"])
    assert said(result.messages) == ["go", "soon", "a", "b"]
    assert line.fates == [("delivered", 1), ("delivered", 2), ("delivered", 2)]


async def test_a_follow_up_never_disturbs_anything() -> None:
    line = Line()

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        line.follow_up("one")
        await let_others_run()
        calls = [call("work", call_id="c1"), call("work", call_id="c2")]
        yield Done(AssistantMessage.from_calls(calls))

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.follow_up("another")
        await let_others_run()
        return ToolResult.text("done")

    model = Model(play, "so far", "the end")
    result, sink = await line.completed(
        model, Work("work", work), default_execution_mode="sequential"
    )
    assert texts(result) == ["done", "done"]
    assert discarded(sink) == []
    assert line.fates == [("delivered", 3)] * 3


async def test_at_the_cap_a_follow_up_is_left_in_the_transcript_in_no_turn() -> None:
    line = Line()
    line.follow_up("and?")
    line.follow_up("well?")
    result, _ = await line.completed(["ok"], max_iterations=1)
    assert result.outcome is LoopOutcome.HIT_MAX_ITERATIONS
    assert outline(result.messages) == ["user: go", "assistant: ok", "user: and?", "user: well?"]
    assert line.fates == [("delivered", None)] * 2
    assert result.undelivered == ()


async def test_at_the_cap_steering_is_handed_back_and_a_follow_up_is_not() -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("too late")
        line.follow_up("and?")
        return ToolResult.text("done")

    result, _ = await line.completed([call("work")], Work("work", work), max_iterations=1)
    assert line.fates == [("expired", None), ("delivered", None)]
    assert said(result.messages) == ["go", "and?"]
    assert said(result.undelivered) == ["too late"]


class TickingClock(FakeClock):
    """Stands still until it is asked so many times, and is then far ahead."""

    asked_until_late: int | None = None

    def now_ms(self) -> int:
        if self.asked_until_late is not None:
            self.asked_until_late -= 1
            if self.asked_until_late < 0:
                return self.time_ms + 10**9
        return self.time_ms


async def test_a_follow_up_is_not_said_to_be_delivered_when_time_runs_out_before_its_turn() -> None:
    """The time is over between the decision to go on and the turn."""
    line, clock = Line(), TickingClock()
    line.follow_up("and?")

    def last_source() -> list[AgentMessage]:
        if clock.asked_until_late is None:
            clock.asked_until_late = 1
        return []

    # Asked after the channel: from here on the clock is looked at once to decide, then once more.
    after = FunctionPlugin("follow_up", last_source, name="after")
    result, sink = await completed(
        ["ok"], plugins=[line.plugin, after], clock=clock, budget=Budget(seconds=1000)
    )
    assert result.outcome is LoopOutcome.OUT_OF_BUDGET
    line.check(result, sink)


# --- after the batch ------------------------------------------------------------------------------


async def test_after_the_batch_nothing_in_flight_is_disturbed() -> None:
    line, ended = Line(), list[str]()

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        line.steer("while you speak")
        await let_others_run()
        calls = [call("work", call_id=f"c{n}") for n in range(3)]
        yield Done(AssistantMessage.from_calls(calls, "All of it"))

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("while you work")
        await let_others_run()
        ended.append(ctx.tool_call_id)
        return ToolResult.text("done")

    result, sink = await line.completed(Model(play), Work("work", work))
    assert texts(result) == ["done"] * 3
    assert ended == ["c0", "c1", "c2"]
    assert discarded(sink) == []
    assert line.fates == [("delivered", 2)] * 4


async def test_a_source_that_is_polled_never_interrupts() -> None:
    """Also when it has something to say all the time."""
    waiting = [UserMessage("polled")]
    polls: list[int] = []

    def poll() -> list[AgentMessage]:
        polls.append(len(polls))
        return [waiting.pop()] if len(polls) == 2 else []

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        await let_others_run()
        calls = [call("work", call_id="c1"), call("work", call_id="c2")]
        yield Done(AssistantMessage.from_calls(calls))

    result, sink = await completed(
        Model(play),
        Work(),
        plugins=[FunctionPlugin("steering", poll)],
        default_execution_mode="sequential",
    )
    assert texts(result) == ["done", "done"]
    assert discarded(sink) == []
    assert said(result.messages) == ["go", "polled"]
    assert len(polls) == 3, "before the first turn and after every one"


# --- before the next tool -------------------------------------------------------------------------


@pytest.mark.parametrize("exclusive", [True, False])
async def test_one_by_one_the_calls_after_the_one_that_runs_are_not_run(exclusive: bool) -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        if ctx.tool_call_id == "call_2":
            line.steer("hold on", "before_next_tool")
            await let_others_run()
        return ToolResult.text("done")

    mode = ExecutionMode.PARALLEL if exclusive else ExecutionMode.SEQUENTIAL
    working = Work("work", work, requires_exclusive_sandbox=exclusive)
    result, sink = await line.completed(
        [[call("work")] * 4, "ok"], working, default_execution_mode=mode
    )
    assert len(working.calls) == 2
    assert details(result) == [None, None, HELD_BACK, HELD_BACK]
    assert [message.is_error for message in results(result)] == [False, False, True, True]
    assert texts(result)[2].startswith("Not executed: the user intervened.")
    started = [event.tool_call_id for event in sink.of(ev.ToolExecutionStart)]
    ended = [event.tool_call_id for event in sink.of(ev.ToolExecutionEnd)]
    assert started == ["call_1", "call_2"]
    assert ended == ["call_1", "call_2", "call_3", "call_4"]
    assert line.fates == [("delivered", 2)]


async def test_calls_that_run_at_once_all_end_as_usual() -> None:
    line, barrier = Line(), asyncio.Barrier(3)

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        if await barrier.wait() == 0:
            line.steer("hold on", "before_next_tool")
        await let_others_run()
        return ToolResult.text("done")

    result, _ = await line.completed([[call("work")] * 3, "ok"], Work("work", work))
    assert texts(result) == ["done"] * 3
    assert line.fates == [("delivered", 2)]


async def test_of_calls_that_begin_at_once_those_after_the_sender_are_not_run() -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        if ctx.tool_call_id == "call_2":
            line.steer("hold on", "before_next_tool")
        await let_others_run()
        return ToolResult.text("done")

    working = Work("work", work)
    result, _ = await line.completed([[call("work")] * 4, "ok"], working)
    assert details(result) == [None, None, HELD_BACK, HELD_BACK]
    assert len(working.calls) == 2


@pytest.mark.parametrize("calls", [1, 3])
async def test_a_whole_batch_is_held_back_when_the_message_came_during_the_answer(
    calls: int,
) -> None:
    line, asked = Line(), list[str]()

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        line.steer("hold on", "before_next_tool")
        await let_others_run()
        batch = [call("work", call_id=f"c{n}") for n in range(calls)]
        yield Done(AssistantMessage.from_calls(batch, "Let me see."))

    def before(ctx: Any) -> None:
        asked.append(ctx.tool_call.id)

    working = Work()
    result, sink = await line.completed(
        Model(play), working, plugins=[FunctionPlugin("before_tool_call", before)]
    )
    assert details(result) == [HELD_BACK] * calls
    assert working.calls == []
    assert asked == [], "nobody is asked about a call that will not be run"
    assert sink.of(ev.ToolExecutionStart) == []
    assert discarded(sink) == [], "the answer itself is not disturbed"
    assert line.fates == [("delivered", 2)]


@pytest.mark.parametrize("when", ["before_next_tool", "now"])
@pytest.mark.parametrize("mode", list(ExecutionMode))
async def test_a_message_from_the_hook_before_a_call_holds_that_call_back(
    when: str, mode: ExecutionMode
) -> None:
    """At once or one by one: a call before it may have run only in the second case."""
    line = Line()

    async def before(ctx: Any) -> None:
        if ctx.tool_call.id == "call_2":
            line.steer("hold on", when)
        await let_others_run()

    working = Work()
    result, _ = await line.completed(
        [[call("work")] * 3, "ok"],
        working,
        plugins=[FunctionPlugin("before_tool_call", before)],
        default_execution_mode=mode,
    )
    ran = 1 if mode is ExecutionMode.SEQUENTIAL else 0
    assert details(result) == [None] * ran + [HELD_BACK] * (3 - ran)
    assert len(working.calls) == ran


@pytest.mark.parametrize("when", ["before_next_tool", "now"])
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_message_when_the_start_is_told_holds_the_call_back(when: str, calls: int) -> None:
    line = Line()

    async def on_event(event: AgentEvent) -> None:
        if isinstance(event, ev.ToolExecutionStart) and not line.steering:
            line.steer("hold on", when)
            await let_others_run()

    working = Work()
    result, sink = await line.completed([[call("work")] * calls, "ok"], working, on_event=on_event)
    assert details(result) == [HELD_BACK] * calls
    assert working.calls == []
    assert len(sink.of(ev.ToolExecutionStart)) == 1


async def test_an_answer_in_words_is_not_disturbed_by_what_waits_for_the_next_tool() -> None:
    line = Line()

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        line.steer("hold on", "before_next_tool")
        await let_others_run()
        yield Done(AssistantMessage.from_text("In my opinion"))

    result, sink = await line.completed(Model(play))
    assert outline(result.messages)[1:] == [
        "assistant: In my opinion", "user: hold on", "assistant: ok",
    ]  # fmt: skip
    assert discarded(sink) == []


async def test_the_next_batch_is_run_as_usual() -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        if not line.steering:
            line.steer("hold on", "before_next_tool")
        return ToolResult.text("done")

    result, _ = await line.completed(
        [[call("work")] * 2, [call("work")] * 2, "ok"],
        Work("work", work),
        default_execution_mode="sequential",
    )
    assert details(result) == [None, HELD_BACK, None, None]


@pytest.mark.parametrize("when", ["before_next_tool", "now"])
async def test_a_vote_to_end_that_was_held_back_does_not_count(when: str) -> None:
    line = Line()

    def before(ctx: Any) -> None:
        if not line.steering:
            line.steer("not yet", when)

    result, _ = await line.completed(
        [call("finish"), call("finish")],
        FINISH,
        plugins=[FunctionPlugin("before_tool_call", before)],
    )
    assert details(result) == [HELD_BACK, None]
    assert line.fates == [("delivered", 2)]


async def test_hooks_after_a_call_see_that_it_was_held_back() -> None:
    line, seen = Line(), list[Any]()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("hold on", "before_next_tool")
        return ToolResult.text("done")

    def after(ctx: Any) -> None:
        seen.append(ctx.result.details)

    await line.completed(
        [[call("work")] * 2, "ok"],
        Work("work", work),
        plugins=[FunctionPlugin("after_tool_call", after)],
        default_execution_mode="sequential",
    )
    assert seen == [None, HELD_BACK]


async def test_calls_over_the_limit_are_told_so_and_not_that_they_were_held_back() -> None:
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("hold on", "before_next_tool")
        return ToolResult.text("done")

    result, _ = await line.completed(
        [[call("work")] * 3, "ok"],
        Work("work", work),
        max_tool_calls_per_turn=2,
        default_execution_mode="sequential",
    )
    reasons = [found and found["reason"] for found in details(result)]
    assert reasons == [None, "steered", "max_tool_calls_per_turn"]


@pytest.mark.parametrize("when", ["before_next_tool", "now"])
async def test_one_by_one_a_call_that_was_held_back_is_not_said_to_have_failed_the_others(
    when: str,
) -> None:
    """The tools abort their siblings when they fail; this is no failure of theirs."""
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("hold on", when)
        await asyncio.sleep(0)
        return ToolResult.text("done")

    result, _ = await line.completed(
        [[call("work")] * 3, "ok"],
        Work("work", work, aborts_siblings_on_error=True),
        default_execution_mode="sequential",
    )
    first = STOPPED if when == "now" else None
    assert details(result) == [first, HELD_BACK, HELD_BACK]


async def test_at_once_a_call_that_was_held_back_does_not_stop_those_that_run() -> None:
    """The tools abort their siblings when they fail; this is no failure of theirs."""
    line = Line()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("hold on", "before_next_tool")
        await let_others_run()
        return ToolResult.text("done")

    result, _ = await line.completed(
        [[call("work")] * 3, "ok"], Work("work", work, aborts_siblings_on_error=True)
    )
    assert texts(result)[0] == "done"
    assert details(result) == [None, HELD_BACK, HELD_BACK]


# --- now: the model's answer ----------------------------------------------------------------------


async def test_the_answer_is_broken_off_and_a_new_turn_begins_with_the_message() -> None:
    line = Line()
    model = Model(half_an_answer(lambda: line.steer("stop", "now")))
    result, sink = await line.completed(model)
    assert outline(result.messages) == ["user: go", "user: stop", "assistant: ok"]
    assert result.outcome is LoopOutcome.DONE
    assert line.fates == [("delivered", 2)]
    assert tail(sink, "message_update") == [
        "message_end assistant",
        "message_discarded",
        "turn_end",
        "turn_start",
        "message_start user",
        "message_end user",
        "provider_request_prepared",
        "message_start assistant",
        "message_update",
        "message_end assistant",
        "turn_end",
        "agent_end",
    ]
    broken_off = sink.of(ev.TurnEnd)[0].message
    assert isinstance(broken_off, AssistantMessage)
    assert broken_off.plain_text == "Half", "listeners keep what was said"
    assert (broken_off.stop_reason, broken_off.error_message) == (
        StopReason.ABORTED, "the user intervened",
    )  # fmt: skip
    assert discarded(sink) == ["steered"]
    assert outline(model.requests[1].messages) == ["user: go", "user: stop"]
    assert model.open == 0


async def test_an_answer_that_has_not_begun_is_broken_off_too() -> None:
    line = Line()

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        line.steer("stop", "now")
        await asyncio.Event().wait()
        yield Start(PLACEHOLDER)

    result, sink = await line.completed(Model(play))
    assert discarded(sink) == ["steered"]
    assert tail(sink, "provider_request_prepared")[:4] == [
        "message_start assistant", "message_end assistant", "message_discarded", "turn_end",
    ]  # fmt: skip
    assert line.fates == [("delivered", 2)]
    assert result.text == "ok"


async def test_an_answer_can_be_broken_off_again_and_again() -> None:
    line, played = Line(), count(1)

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        if (number := next(played)) <= 5:
            line.steer(f"no {number}", "now")
            await asyncio.Event().wait()
        assert current_task().cancelling() == 0
        yield Done(AssistantMessage.from_text("ok"))

    result, sink = await line.completed(model)
    assert said(result.messages) == ["go", *[f"no {n}" for n in range(1, 6)]]
    assert line.fates == [("delivered", turn) for turn in range(2, 7)]
    assert discarded(sink) == ["steered"] * 5


async def test_messages_that_follow_at_once_break_off_one_answer() -> None:
    line, cancelled = Line(), list[str]()

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        try:
            line.steer("one", "now")
            line.steer("two", "now")
            await asyncio.Event().wait()
        finally:
            cancelled.append("once")
            line.steer("three", "now")
            await let_others_run()
            cancelled.append("not again")

    result, sink = await line.completed(Model(play))
    assert cancelled == ["once", "not again"], "the transport may clean up in peace"
    assert said(result.messages) == ["go", "one", "two", "three"]
    assert line.fates == [("delivered", 2)] * 3
    assert discarded(sink) == ["steered"]


async def clean_up(line: Line) -> AsyncGenerator[StreamEvent, None]:
    try:
        line.steer("stop", "now")
        await asyncio.Event().wait()
        yield Start(PLACEHOLDER)
    finally:
        await let_others_run()
        assert current_task().cancelling() == 1


async def raise_another_error(line: Line) -> AsyncGenerator[StreamEvent, None]:
    try:
        line.steer("stop", "now")
        await asyncio.Event().wait()
        yield Start(PLACEHOLDER)
    except asyncio.CancelledError:
        raise OSError("the wire is cut") from None


async def raise_when_closed(line: Line) -> AsyncGenerator[StreamEvent, None]:
    try:
        line.steer("stop", "now")
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        yield Chunk(TextChunk("x"))
    finally:
        raise OSError("it does not close")


async def report_an_abort(line: Line) -> AsyncGenerator[StreamEvent, None]:
    try:
        line.steer("stop", "now")
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        yield Error(PLACEHOLDER, StreamErrorKind.ABORTED, "the caller cancelled")


async def report_a_failure(line: Line) -> AsyncGenerator[StreamEvent, None]:
    try:
        line.steer("stop", "now")
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        yield Error(PLACEHOLDER, StreamErrorKind.TRANSIENT, "the wire is cut")


async def end_without_a_word(line: Line) -> AsyncGenerator[StreamEvent, None]:
    line.steer("stop", "now")
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
        yield Start(PLACEHOLDER)


async def swallow_it_and_go_on(line: Line) -> AsyncGenerator[StreamEvent, None]:
    yield Start(PLACEHOLDER)
    line.steer("stop", "now")
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    for number in count():
        yield Chunk(TextChunk(f"{number} "))
        assert number < 1, "it is not read on"


async def wait_under_a_timeout(line: Line) -> AsyncGenerator[StreamEvent, None]:
    line.steer("stop", "now")
    async with asyncio.timeout(10):
        await asyncio.Event().wait()
    yield Start(PLACEHOLDER)


async def wait_in_a_task_group(line: Line) -> AsyncGenerator[StreamEvent, None]:
    line.steer("stop", "now")
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.Event().wait())
    yield Start(PLACEHOLDER)


@pytest.mark.parametrize(
    "transport",
    [clean_up, raise_another_error, raise_when_closed, report_an_abort, report_a_failure,
     end_without_a_word, swallow_it_and_go_on, wait_under_a_timeout, wait_in_a_task_group],
)  # fmt: skip
@pytest.mark.parametrize("failures_before", [0, 2])
async def test_however_a_transport_takes_it_the_answer_is_broken_off(
    transport: Callable[[Line], AsyncGenerator[StreamEvent, None]], failures_before: int
) -> None:
    """Also when the next failure of the transport would be one too many."""
    line, played, cancelling = Line(), count(1), list[int]()

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        cancelling.append(current_task().cancelling())
        number = next(played)
        if number <= failures_before:
            return
        if number > failures_before + 1:
            yield Done(AssistantMessage.from_text("ok"))
            return
        async with aclosing(transport(line)) as events:
            async for event in events:
                yield event

    result, sink = await line.completed(model)
    assert outline(result.messages) == ["user: go", "user: stop", "assistant: ok"]
    assert line.fates == [("delivered", 2)]
    assert discarded(sink) == [*["empty"] * failures_before, "steered"]
    assert cancelling == [0] * (failures_before + 2)


async def test_a_transport_that_swallows_it_may_still_finish_its_answer() -> None:
    """What came whole stays; its calls are held back."""
    line = Line()

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        line.steer("stop", "now")
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        yield Done(AssistantMessage.from_calls([call("work", call_id="c1")], "Whole"))

    working = Work()
    result, sink = await line.completed(Model(play), working)
    assert outline(result.messages)[1] == "assistant: Whole"
    assert discarded(sink) == []
    assert details(result) == [HELD_BACK]
    assert working.calls == []


class PlainIterator:
    """A stream that is no generator and cannot be closed."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def __aiter__(self) -> PlainIterator:
        return self

    async def __anext__(self) -> StreamEvent:
        if self.line.steering:
            return Done(AssistantMessage.from_text("ok"))
        self.line.steer("stop", "now")
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_stream_that_is_no_generator_is_broken_off_too() -> None:
    line = Line()
    result, _ = await line.completed(lambda request, signal: PlainIterator(line))
    assert outline(result.messages) == ["user: go", "user: stop", "assistant: ok"]


async def test_during_the_pause_before_another_attempt_the_model_is_not_asked_again() -> None:
    line = Line()

    class Clock(FakeClock):
        async def sleep(self, seconds: float) -> None:
            line.steer("stop", "now")
            await let_others_run()
            await super().sleep(seconds)

    clock, stream = Clock(), ScriptedStream([failing("empty", started=False), "ok"])
    result, sink = await line.completed(stream, clock=clock)
    assert len(clock.sleeps) == 1
    assert len(stream.requests) == 2, "once in vain, and once with the message"
    assert discarded(sink) == ["empty", "steered"]
    assert said(result.messages) == ["go", "stop"]
    assert line.fates == [("delivered", 2)]


async def test_an_answer_that_was_cut_off_is_not_asked_for_again() -> None:
    line = Line()

    def on_event(event: AgentEvent) -> None:
        if isinstance(event, ev.OutputTokensEscalation):
            line.steer("stop", "now")

    stream = ScriptedStream([truncated("cut o"), "ok"])
    result, sink = await line.completed(
        stream,
        on_event=on_event,
        max_output_tokens=10,
        max_output_tokens_recovery=MaxTokensRecovery(),
    )
    assert discarded(sink) == ["truncated", "steered"]
    assert outline(result.messages) == ["user: go", "user: stop", "assistant: ok"]


@pytest.mark.parametrize("capability", ["context_transform", "tool_gate"])
@pytest.mark.parametrize("when", MODES)
async def test_a_hook_that_waits_before_the_model_is_asked_ends_in_peace(
    capability: Any, when: str
) -> None:
    line, ended = Line(), list[str]()

    async def hook(*args: Any) -> Any:
        if not line.steering:
            line.steer("stop", when)
        await let_others_run()
        ended.append(capability)
        return args[0] if capability == "context_transform" else None

    stream = ScriptedStream(["ok", "well"])
    result, sink = await line.completed(stream, plugins=[FunctionPlugin(capability, hook)])
    assert len(ended) == 2
    assert line.fates == [("delivered", 2)]
    assert discarded(sink) == ["steered"] * (when == "now")
    assert len(stream.requests) == (1 if when == "now" else 2)
    assert said(result.messages) == ["go", "stop"]


# --- now: tools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 3])
async def test_tools_that_run_are_stopped(calls: int) -> None:
    line, barrier, signals = Line(), asyncio.Barrier(calls), list[CancellationToken]()

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        signals.append(ctx.signal)
        if await barrier.wait() == 0:
            line.steer("stop", "now")
        await asyncio.Event().wait()
        raise AssertionError

    result, _ = await line.completed([[call("wait")] * calls, "ok"], Work("wait", wait))
    assert details(result) == [STOPPED] * calls
    assert set(texts(result)) == {"The call was running when the user intervened, and was stopped."}
    assert all(signal.cancelled for signal in signals)
    assert line.fates == [("delivered", 2)]
    assert result.text == "ok"


async def test_one_by_one_the_tool_that_runs_is_stopped_and_the_rest_is_not_run() -> None:
    line, waiting = Line(), Waiting()
    work = Work()
    running = asyncio.create_task(
        line.completed(
            [[call("work"), call("wait"), call("work"), call("nope")], "ok"],
            Work("wait", waiting),
            work,
            default_execution_mode="sequential",
        )
    )
    await waiting.started.wait()
    line.steer("stop", "now")
    result, sink = await running
    assert details(result) == [None, STOPPED, HELD_BACK, HELD_BACK]
    assert len(work.calls) == 1
    ended = [event.tool_call_id for event in sink.of(ev.ToolExecutionEnd)]
    assert ended == ["call_1", "call_2", "call_3", "call_4"]


async def test_at_once_what_has_ended_keeps_its_result() -> None:
    line, waiting = Line(), Waiting()
    running = asyncio.create_task(
        line.completed(
            [[call("work"), call("wait")], "ok"], Work("wait", waiting), Work(), prompts="go"
        )
    )
    await waiting.started.wait()
    await let_others_run()
    line.steer("stop", "now")
    result, _ = await running
    assert texts(result)[0] == "done"
    assert details(result) == [None, STOPPED]


async def test_a_tool_that_heeds_its_signal_keeps_the_result_it_gives() -> None:
    line = Line()

    async def heed(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("stop", "now")
        await ctx.signal.wait()
        assert ctx.signal.reason == "steered"
        return ToolResult.text("as far as I got")

    result, _ = await line.completed([call("heed"), "ok"], Work("heed", heed))
    assert texts(result) == ["as far as I got"]
    assert details(result) == [None]


async def test_a_tool_may_clean_up() -> None:
    line, cleaned = Line(), list[int]()

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        try:
            line.steer("stop", "now")
            await asyncio.Event().wait()
        finally:
            line.steer("really", "now")
            await asyncio.sleep(0.002)
            cleaned.append(1)
        raise AssertionError

    result, _ = await line.completed([call("wait"), "ok"], Work("wait", wait))
    assert cleaned == [1]
    assert details(result) == [STOPPED]
    assert line.fates == [("delivered", 2)] * 2


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_that_swallows_its_cancellation_is_left_behind(calls: int) -> None:
    line, stubborn = Line(), Stubborn()
    seen: list[int] = []

    def stop(event: AgentEvent) -> None:
        seen.append(current_task().cancelling())

    async def steer_when_started() -> None:
        await stubborn.started.wait()
        line.steer("stop", "now")

    steering = asyncio.create_task(steer_when_started())
    result, _ = await line.completed(
        [[call("hang")] * calls, "ok"],
        Work("hang", stubborn),
        leaves_tasks=True,
        cancel_grace=GRACE,
        on_event=stop,
    )
    await steering
    assert details(result) == [LEFT_BEHIND] * calls
    assert all("may still be running" in text for text in texts(result))
    assert stubborn.cancellations >= calls
    assert line.fates == [("delivered", 2)]
    assert result.text == "ok"
    assert set(seen) == {0}
    stubborn.release.set()
    await stubborn.ended.wait()
    await let_others_run()


async def test_a_thread_that_heeds_its_signal_keeps_the_result_it_gives() -> None:
    line = Line()

    @tool
    def look(ctx: ToolContext) -> str:
        """Look."""
        line.steer("stop", "now")
        for _ in range(2000):
            if ctx.signal.cancelled:
                return "seen"
            threading.Event().wait(0.001)
        return "missed"

    result, _ = await line.completed([call("look"), "ok"], look)
    assert texts(result) == ["seen"]
    assert line.fates == [("delivered", 2)]


async def test_a_thread_that_does_not_look_is_left_behind() -> None:
    line, release = Line(), threading.Event()

    @tool
    def block() -> str:
        """Block."""
        line.steer("stop", "now")
        release.wait(5)
        return "ended after all"

    try:
        result, _ = await line.completed(
            [[call("block"), call("work")], "ok"],
            block,
            Work(),
            cancel_grace=GRACE,
            leaves_tasks=True,
        )
    finally:
        release.set()
    assert details(result)[0] == LEFT_BEHIND
    assert line.fates == [("delivered", 2)]
    await let_others_run()


async def test_the_hooks_after_a_call_end_in_peace_and_see_that_it_was_stopped() -> None:
    line, seen = Line(), list[Any]()

    async def after(ctx: Any) -> None:
        line.steer("again", "now")
        await let_others_run()
        seen.append(ctx.result.details)

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("stop", "now")
        await asyncio.Event().wait()
        raise AssertionError

    result, _ = await line.completed(
        [[call("wait")] * 2, "ok"],
        Work("wait", wait),
        plugins=[FunctionPlugin("after_tool_call", after)],
    )
    assert details(result) == [STOPPED, HELD_BACK]
    assert seen == [HELD_BACK, STOPPED], "in the order in which they were over"


async def test_a_run_below_a_tool_is_stopped_with_the_tool() -> None:
    line, below = Line(), ChannelSteering()
    receipts: list[SteeringReceipt] = []

    async def child(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        receipts.append(below.handle.steer("for the child"))
        line.steer("stop", "now")
        await asyncio.Event().wait()

    helper = agent_tool("helper", "Helps.", LoopConfig(stream=child, plugins=[below]))
    result, sink = await line.completed([call("helper", task="x"), "ok"], helper)
    assert "the user intervened" in texts(result)[0], "the tool has heeded its signal"
    assert said(result.messages) == ["go", "stop"]
    assert told(*receipts) == [("expired", None)]
    assert isinstance(sink.of(ev.ChildRunEvent)[-1].event, ev.AgentEnd)


async def test_a_run_below_a_tool_can_be_steered_by_itself() -> None:
    above, below = Line(), ChannelSteering()
    receipts: list[SteeringReceipt] = []

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        receipts.append(below.handle.steer("only you", "now"))
        await asyncio.Event().wait()

    helper = agent_tool("helper", "Helps.", LoopConfig(stream=Model(play), plugins=[below]))
    result, _ = await above.completed([call("helper", task="x"), "done"], helper)
    assert texts(result) == ["ok"]
    assert told(*receipts) == [("delivered", 2)]
    assert said(result.messages) == ["go"]


# --- at every event -------------------------------------------------------------------------------


async def pause(*_: object) -> None:
    await asyncio.sleep(0)


class PausingStream(ScriptedStream):
    """Gives others a turn before every event."""

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        async for event in super().__call__(request, signal):
            await pause()
            yield event


async def working(args: Any, ctx: ToolContext) -> ToolResult:
    await ctx.update("half")
    await pause()
    return ToolResult.text("done")


class Everything:
    """Hooks of every kind, each of which gives others a turn."""

    name = "everything"

    async def on_before_tool_call(self, ctx: Any) -> None:
        await pause()

    async def on_after_tool_call(self, ctx: Any) -> None:
        await pause()

    async def transform_context(self, messages: Any, ctx: Any) -> Any:
        await pause()
        return messages

    async def next_steering_messages(self) -> list[AgentMessage]:
        await pause()
        return []

    async def next_follow_up_messages(self) -> list[AgentMessage]:
        await pause()
        return []

    async def next_turn_tool_allowlist(self, ctx: Any) -> None:
        await pause()


def eventful(mode: ExecutionMode, line: Line) -> LoopConfig:
    script: list[Step] = [[], [call("work"), call("nope"), call("work")], call("work"), "the end"]
    return LoopConfig(
        stream=PausingStream(script, at_end="repeat"),
        tools=[Work("work", working)],
        plugins=[Everything(), line.plugin],
        default_execution_mode=mode,
        clock=FakeClock(),
    )


async def places(mode: ExecutionMode) -> list[tuple[int, str]]:
    """The number and the kind of every event of a run that nobody steers."""
    outcome, sink = await observe(eventful(mode, Line()))
    assert isinstance(outcome, RunResult)
    return list(enumerate(sink.types))


EVERY_MODE = pytest.mark.parametrize("mode", list(ExecutionMode))
# Until the prompt is told the run has not looked for messages yet.
BEFORE_THE_FIRST_LOOK = 4


@EVERY_MODE
@EVERY_WAY
async def test_a_listener_may_steer_at_every_event_and_is_never_cancelled(
    mode: ExecutionMode, when: str
) -> None:
    """It goes on for a while, the message is in the next turn, and the run comes to its end."""

    async def steered_at(number: int) -> None:
        line, seen, undisturbed = Line(), list[AgentEvent](), list[bool]()

        async def on_event(event: AgentEvent) -> None:
            seen.append(event)
            if len(seen) == number + 1:
                line.steer("by the way", when)
                undisturbed.append(False)
                await let_others_run()
                undisturbed[:] = [True]

        outcome, sink = await observe(eventful(mode, line), on_event=on_event)
        assert isinstance(outcome, RunResult)
        line.check(outcome, sink)
        assert undisturbed == [True]
        turn = sink.types[: number + 1].count("turn_start")
        if sink.types[number] == "agent_end":
            assert line.fates == [("expired", None)]
        else:
            assert line.fates == [("delivered", 1 if number < BEFORE_THE_FIRST_LOOK else turn + 1)]

    with all_cases() as case:
        for place in await places(mode):
            with case(place):
                await steered_at(place[0])


@EVERY_MODE
@EVERY_WAY
async def test_another_thread_may_steer_at_every_event(mode: ExecutionMode, when: str) -> None:
    async def steered_at(number: int) -> None:
        line, seen = Line(), list[AgentEvent]()

        def on_event(event: AgentEvent) -> None:
            seen.append(event)
            if len(seen) == number + 1:
                line.from_thread("by the way", when)

        outcome, sink = await observe(eventful(mode, line), on_event=on_event)
        assert isinstance(outcome, RunResult)
        line.check(outcome, sink)
        assert line.fates[0][0] == ("expired" if sink.types[number] == "agent_end" else "delivered")

    with all_cases() as case:
        for place in await places(mode):
            with case(place):
                await steered_at(place[0])


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_listener_that_works_on_the_progress_of_a_tool_is_not_cancelled_with_the_tool(
    in_thread: bool,
) -> None:
    line, heard = Line(), list[str]()

    async def on_event(event: AgentEvent) -> None:
        if isinstance(event, ev.ToolExecutionUpdate):
            line.steer("stop", "now")
            heard.append("begun")
            await asyncio.sleep(0.03)
            heard.append("ended")

    @tool
    def in_a_thread(ctx: ToolContext) -> str:
        """Work in a thread."""
        _ = ctx.update("half")
        return "done"

    async def in_the_loop(args: Any, ctx: ToolContext) -> ToolResult:
        await ctx.update("half")
        await asyncio.Event().wait()
        raise AssertionError

    working_tool = in_a_thread if in_thread else Work("in_the_loop", in_the_loop)
    name = "in_a_thread" if in_thread else "in_the_loop"
    result, _ = await line.completed(
        [call(name), "ok"],
        working_tool,
        on_event=on_event,
        cancel_grace=GRACE,
        leaves_tasks=True,
    )
    assert heard == ["begun", "ended"]
    assert said(result.messages) == ["go", "stop"]


# --- from anywhere --------------------------------------------------------------------------------

CAPABILITIES = [
    "before_tool_call", "after_tool_call", "context_transform", "tool_gate", "steering",
    "follow_up", "event_observer",
]  # fmt: skip


@pytest.mark.parametrize("capability", CAPABILITIES)
@EVERY_WAY
async def test_every_kind_of_hook_may_steer_and_ends_in_peace(capability: Any, when: str) -> None:
    line, ended = Line(), list[str]()

    async def hook(*args: Any) -> Any:
        if not line.steering:
            line.steer("by the way", when)
            await let_others_run()
            ended.append(capability)
        if capability == "context_transform":
            return args[0]
        return [] if capability in ("steering", "follow_up") else None

    stream = ScriptedStream([[call("work"), call("work")], "ok"], at_end="repeat")
    result, _ = await line.completed(stream, Work(), plugins=[FunctionPlugin(capability, hook)])
    assert ended == [capability]
    if capability == "follow_up" and line.steering[0].status == "expired":
        assert said(result.undelivered) == ["by the way"], "the model had stopped, and that was all"
    else:
        assert said(result.messages) == ["go", "by the way"]


@EVERY_WAY
async def test_a_callback_of_the_event_loop_may_steer(when: str) -> None:
    """As a signal handler does."""
    line = Line()

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        asyncio.get_running_loop().call_soon(line.steer, "by the way", when)
        await let_others_run()
        yield Done(AssistantMessage.from_text("whole"))

    result, sink = await line.completed(Model(play))
    assert line.fates == [("delivered", 2)]
    assert discarded(sink) == ["steered"] * (when == "now")
    assert said(result.messages) == ["go", "by the way"]


async def test_the_reader_of_a_stream_of_events_may_steer() -> None:
    line, sink = Line(), RecordingSink()
    model = Model(half_an_answer(lambda: None))
    config = LoopConfig(stream=model, plugins=[line.plugin], clock=FakeClock())
    async with stream_run("go", CONTEXT, config) as events:
        async for event in events:
            sink(event)
            if isinstance(event, ev.MessageUpdate) and not line.steering:
                line.steer("stop", "now")
    check_outcome(events.result, sink.events)
    line.check(events.result, sink)
    assert outline(events.result.messages) == ["user: go", "user: stop", "assistant: ok"]


async def test_a_conversation_keeps_what_was_delivered() -> None:
    line = Line()
    model = Model(half_an_answer(lambda: line.steer("stop", "now")), "ok", "bye")
    conversation = Conversation(LoopConfig(stream=model, plugins=[line.plugin], clock=FakeClock()))
    await conversation.send("go")
    late = line.plugin.handle.steer("between")
    await conversation.send("well?")
    assert outline(conversation.messages) == [
        "user: go", "user: stop", "assistant: ok", "user: well?", "assistant: bye",
    ]  # fmt: skip
    assert told(late, *line.steering) == [("expired", None), ("delivered", 2)]


async def test_many_threads_may_talk_at_once() -> None:
    """Every message has its fate, and those of a sender keep their order."""
    channel, senders, each = ChannelSteering(), 6, 15
    receipts: list[list[SteeringReceipt]] = [[] for _ in range(senders)]
    threads: list[threading.Thread] = []

    def send(sender: int) -> None:
        for number in range(each):
            when = MODES[(sender + number) % 3]
            receipts[sender].append(channel.handle.steer(f"{sender}.{number}", SteerWhen(when)))

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        if not threads:
            threads.extend(threading.Thread(target=send, args=(n,)) for n in range(senders))
            for thread in threads:
                thread.start()
        await asyncio.sleep(0.001)
        return ToolResult.text("done")

    script = PausingStream([[call("work")] * 2] * 8 + ["ok"], at_end="repeat")
    result, sink = await completed(script, Work("work", work), plugins=[channel])
    for thread in threads:
        thread.join()
    messages = {id(message) for message in (*result.messages, *result.undelivered)}
    for sent in receipts:
        told_of = [receipt for receipt in sent if id(receipt.message) in messages]
        assert told_of == sent[: len(told_of)], "only the last may have come after the run"
        assert {receipt.status for receipt in sent[len(told_of) :]} <= {"expired"}
        check_receipts(result, sink.events, told_of)
    assert any(sent[0].status == "delivered" for sent in receipts)


# --- several channels, and several runs -----------------------------------------------------------


async def test_a_run_listens_to_all_its_channels() -> None:
    one, two = Line(), Line()

    def talk() -> None:
        one.steer("from one", "now")
        two.steer("from two")
        one.steer("from one again")

    model = Model(half_an_answer(talk))
    result, sink = await one.completed(model, plugins=[two.plugin])
    two.check(result, sink)
    assert said(result.messages) == ["go", "from two", "from one", "from one again"]
    assert one.fates == [("delivered", 2)] * 2
    assert two.fates == [("delivered", 2)]
    assert discarded(sink) == ["steered"]


async def test_a_message_on_the_second_channel_is_as_urgent() -> None:
    one, two, stopped = Line(), Line(), Waiting()
    one.steer("no hurry")
    running = asyncio.create_task(
        one.completed(
            [[call("wait"), call("work")], "ok"],
            Work("wait", stopped),
            Work(),
            plugins=[two.plugin],
            default_execution_mode="sequential",
        )
    )
    await stopped.started.wait()
    one.steer("no hurry either")
    two.steer("stop", "now")
    result, sink = await running
    two.check(result, sink)
    assert details(result) == [STOPPED, HELD_BACK]
    assert two.fates == [("delivered", 2)]


async def test_of_two_runs_that_share_a_channel_one_gets_the_message() -> None:
    """Both are broken off, and both go on."""
    line, both = Line(), asyncio.Barrier(3)

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        yield Start(PLACEHOLDER)
        await both.wait()
        await asyncio.Event().wait()

    runs = [
        asyncio.create_task(observed_run(Model(play), plugins=[line.plugin], leaves_tasks=True))
        for _ in range(2)
    ]
    await both.wait()
    line.steer("stop", "now")
    outcomes = await asyncio.gather(*runs)
    messages = [m for outcome, _ in outcomes if isinstance(outcome, RunResult)
                for m in outcome.messages]  # fmt: skip
    assert sorted(said(messages)) == ["go", "go", "stop"]
    assert line.fates == [("delivered", 2)]
    for outcome, _ in outcomes:
        assert isinstance(outcome, RunResult)
        assert outcome.undelivered == ()
        assert outcome.text == "ok"


async def test_what_one_run_leaves_waits_for_the_other_and_is_handed_back_by_the_last() -> None:
    line, hold = Line(), asyncio.Event()

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        await hold.wait()
        return ToolResult.terminal("finished")

    async def send(args: Any, ctx: ToolContext) -> ToolResult:
        line.steer("to whom it may concern")
        line.follow_up("and then?")
        return ToolResult.terminal("finished")

    last = asyncio.create_task(
        observed_run([call("wait")], Work("wait", wait), plugins=[line.plugin])
    )
    await let_others_run()
    first, _ = await observed_run([call("send")], Work("send", send), plugins=[line.plugin])
    assert isinstance(first, RunResult)
    assert first.undelivered == ()
    assert line.fates == [("queued", None)] * 2
    hold.set()
    outcome, sink = await last
    line.check(outcome, sink)
    assert isinstance(outcome, RunResult)
    assert said(outcome.undelivered) == ["to whom it may concern", "and then?"]


def test_runs_on_two_event_loops_may_share_a_channel() -> None:
    channel, started = ChannelSteering(), threading.Barrier(3)
    outcomes: list[RunResult] = []

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        started.wait(5)
        await asyncio.Event().wait()
        raise AssertionError

    def live() -> None:
        stream = ScriptedStream([call("wait"), "ok"], at_end="repeat")
        config = LoopConfig(stream=stream, tools=[Work("wait", wait)], plugins=[channel])
        outcomes.append(run_sync("go", CONTEXT, config))

    threads = [threading.Thread(target=live) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait(5)
    receipts: list[SteeringReceipt] = []
    for thread in threads:  # the first to look gets the message, so the other may need one more
        while thread.is_alive():
            receipts.append(channel.handle.steer(f"stop {len(receipts)}", "now"))
            thread.join(0.005)
    messages = [message for result in outcomes for message in result.messages]
    undelivered = [message for result in outcomes for message in result.undelivered]
    for receipt in receipts:
        found = [message is receipt.message for message in messages]
        left = [message is receipt.message for message in undelivered]
        assert receipt.is_settled
        assert sum(found) == (receipt.status == "delivered")
        assert sum(left) <= (receipt.status == "expired")
    assert len(outcomes) == 2
    assert all(details(result) == [STOPPED] for result in outcomes)


# --- cancelled at the same time -------------------------------------------------------------------


async def cancelled_run(
    line: Line, by: str, model: Any, *tools: Any, signal: CancellationToken, **settings: Any
) -> tuple[LoopError, RecordingSink]:
    """A run that ends as cancelled, and what carries what it had."""
    if by == "token":
        return await line.failed(RunAborted, model, *tools, signal=signal, **settings)
    error, sink = await line.failed(
        asyncio.CancelledError, model, *tools, signal=signal, **settings
    )
    assert isinstance(error.__cause__, RunAborted)
    assert current_task().uncancel() == 0
    return error.__cause__, sink


@EVERY_WAY
@pytest.mark.parametrize("by", ["token", "task"])
@pytest.mark.parametrize("steers_first", [True, False])
@pytest.mark.parametrize("where", ["stream", "tool", "tools", "hook"])
async def test_a_run_that_is_cancelled_and_steered_ends_as_cancelled(
    when: str, by: str, steers_first: bool, where: str
) -> None:
    line, signal, task = Line(), CancellationToken(), current_task()

    def stop() -> None:
        if by == "token":
            signal.cancel()
        else:
            task.cancel()

    def both() -> None:
        acts: list[Callable[[], object]] = [lambda: line.steer("stop", when), stop]
        for act in acts if steers_first else reversed(acts):
            act()

    async def wait(*_: object) -> Any:
        if not line.steering:
            both()
        await asyncio.Event().wait()

    script: list[Step] = [[call("wait")] * (2 if where == "tools" else 1)]
    error, _ = await cancelled_run(
        line,
        by,
        Model(half_an_answer(both)) if where == "stream" else script,
        Work("wait", "done" if where == "hook" else wait),
        signal=signal,
        plugins=[FunctionPlugin("before_tool_call", wait)] if where == "hook" else [],
    )
    assert line.fates == [("expired", None)]
    assert said(error.undelivered) == ["stop"]
    assert said(error.messages) == ["go"]


@pytest.mark.parametrize("by", ["token", "task"])
@pytest.mark.parametrize("passes", range(8))
async def test_a_cancellation_while_steering_takes_effect_ends_the_run(
    by: str, passes: int
) -> None:
    """So many passes of the event loop after the message."""
    line, signal, task = Line(), CancellationToken(), current_task()
    loop = asyncio.get_running_loop()

    def stop(left: int) -> None:
        if left:
            loop.call_soon(stop, left - 1)
        elif by == "token":
            signal.cancel()
        else:
            task.cancel()

    async def play(signal: CancellationToken) -> AsyncGenerator[StreamEvent, None]:
        try:
            yield Start(PLACEHOLDER)
            line.steer("stop", "now")
            stop(passes)
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)

    async def hang(event: AgentEvent) -> None:
        await asyncio.sleep(0)

    forever = PausingStream([call("work")], at_end="repeat")
    model = Model(play)
    model.script = forever
    error, _ = await cancelled_run(line, by, model, Work(), signal=signal, on_event=hang)
    assert model.open == 0
    assert (line.fates == [("expired", None)]) == (said(error.undelivered) == ["stop"])


async def test_a_task_that_was_cancelled_before_stays_so_when_it_is_steered() -> None:
    """A run in a task with a cancellation of its own takes back no more than it gave."""
    line = Line()

    async def body() -> tuple[RunResult, int]:
        task = current_task()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        result, _ = await line.completed(Model(half_an_answer(lambda: line.steer("stop", "now"))))
        return result, task.cancelling()

    result, cancelling = await asyncio.create_task(body())
    assert cancelling == 1
    assert said(result.messages) == ["go", "stop"]
