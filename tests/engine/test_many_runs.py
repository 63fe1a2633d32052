"""One config serves any number of runs, one by one or all at once, with the same result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    AgentContext,
    AgentEvent,
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    LoopConfig,
    OpeningGate,
    RunAborted,
    RunIdentity,
    RunResult,
    StreamEvent,
    StreamRequest,
    TextContent,
    TokenBudget,
    ToolContext,
    ToolResult,
    ToolResultBudget,
    ToolResultMessage,
    UniqueToolCallIds,
    UserMessage,
    run,
)
from clark_agent import events as ev
from clark_agent.messages import encode_json
from clark_agent.stream import Chunk, Done, Start, TextChunk
from clark_agent.testing import call, check_events, fold_events
from clark_agent.trajectory import InMemoryTrajectorySink, TrajectoryRecorder
from tests.engine.support import CONTEXT, PLACEHOLDER, Waiting, Work
from tests.sizes import EQUAL_RUNS

pytestmark = [pytest.mark.slow, pytest.mark.soak]


class StoppedClock:
    """Time stands still and every id is the same, so that runs can be compared."""

    def now_ms(self) -> int:
        return 1_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def new_id(self) -> str:
        return "id"


async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
    """Decides by the request alone: three batches under one id, then says what it can see."""
    batches = [m for m in request.messages if isinstance(m, AssistantMessage)]
    await asyncio.sleep(0)
    if len(batches) < 3:
        calls = [
            call("look", call_id="same", n=len(batches)),
            call("slow", call_id=f"{len(batches)}"),
        ]
        yield Done(AssistantMessage.from_calls(calls))
        return
    yield Start(PLACEHOLDER)
    yield Chunk(TextChunk("I see "))
    await asyncio.sleep(0)
    seen = [
        f"{m.tool_call_id}={m.plain_text[:3]}:{len(m.plain_text)}"
        for m in request.messages
        if isinstance(m, ToolResultMessage)
    ]
    tools = [tool.name for tool in request.tools]
    yield Done(
        AssistantMessage((TextContent(f"I see {seen} with {tools}"),), PLACEHOLDER.stop_reason)
    )


async def slow(args: Any, ctx: ToolContext) -> ToolResult:
    await ctx.update("half")
    await asyncio.sleep(0)
    return ToolResult.text("s" * 50)


class Numbering:
    """Counts the calls of its run, in what the model sees of them."""

    name = "numbering"

    def __init__(self) -> None:
        self.calls = 0
        self.steered = False

    def for_run(self) -> Numbering:
        return Numbering()

    async def on_after_tool_call(self, ctx: AfterToolCallContext) -> AfterToolDecision:
        self.calls += 1
        number = self.calls
        await asyncio.sleep(0)
        return AfterToolDecision(ToolResult.text(f"{number}: {ctx.result.plain_text}"))

    def next_steering_messages(self) -> list[AgentMessage]:
        if self.steered or self.calls < 2:
            return []
        self.steered = True
        return [UserMessage(f"after {self.calls} calls")]


class Checking:
    """Checks the events of each run by itself and keeps what they come to."""

    def __init__(self, folds: list[tuple[AgentMessage, ...]]) -> None:
        self.folds = folds
        self.events: list[AgentEvent] = []

    def for_run(self) -> Checking:
        return Checking(self.folds)

    def on_event(self, event: AgentEvent) -> None:
        self.events.append(event)
        if isinstance(event, ev.AgentEnd):
            check_events(self.events)
            self.folds.append(fold_events(self.events))


def make_config(folds: list[tuple[AgentMessage, ...]]) -> LoopConfig:
    return LoopConfig(
        stream=model,
        tools=[Work("look", "l" * 200), Work("slow", slow), Work("other")],
        plugins=[
            Numbering(),
            OpeningGate(["look", "slow"]),
            ToolResultBudget(100),
            TokenBudget(120, truncation_marker="-", drop_turns=False),
            UniqueToolCallIds(),
            Checking(folds),
            TrajectoryRecorder(InMemoryTrajectorySink()),
        ],
        max_iterations=6,
        grace_iterations=3,
        clock=StoppedClock(),
    )


async def test_many_runs_at_once_are_as_many_times_one() -> None:
    alone = await run("go", CONTEXT, make_config([]))
    assert alone.outcome == "wrapped_up"
    assert "clark_agent_call_" in alone.text  # the plugins did have something to do
    assert "-:1" in alone.text

    folds: list[tuple[AgentMessage, ...]] = []
    config = make_config(folds)
    at_once = await asyncio.gather(*[run("go", CONTEXT, config) for _ in range(EQUAL_RUNS)])
    assert len(at_once) == len(folds) == EQUAL_RUNS
    expected = encode_json(alone)
    assert {encode_json(result) for result in at_once} == {expected}
    assert all(fold == alone.messages for fold in folds)

    one_by_one = [await run("go", CONTEXT, config) for _ in range(20)]
    assert all(result == alone for result in one_by_one)


async def test_runs_at_once_do_not_hear_of_each_other() -> None:
    """Each prompt comes back in its own result, with its own identity in the events."""
    heard: dict[str, list[str]] = {}

    class ByRun:
        def __init__(self) -> None:
            self.run_id = ""

        def for_run(self) -> ByRun:
            return ByRun()

        def on_event(self, event: AgentEvent) -> None:
            if isinstance(event, ev.RunIdentified):
                self.run_id = event.identity.run_id
            elif isinstance(event, ev.MessageEnd) and isinstance(event.message, UserMessage):
                heard.setdefault(self.run_id, []).append(event.message.plain_text)

    async def echo(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
        await asyncio.sleep(0)
        first = request.messages[0]
        assert isinstance(first, UserMessage)
        yield Done(AssistantMessage.from_text(f"{request.system_prompt} {first.plain_text}"))

    config = LoopConfig(stream=echo, plugins=[ByRun()])

    async def one(number: int) -> RunResult:
        context = AgentContext(f"system {number}", identity=RunIdentity.root(f"run {number}"))
        return await run(f"prompt {number}", context, config)

    found = await asyncio.gather(*[one(number) for number in range(100)])
    assert [r.text for r in found] == [f"system {n} prompt {n}" for n in range(100)]
    assert heard == {f"run {n}": [f"prompt {n}"] for n in range(100)}


async def test_stopping_one_run_leaves_the_others_alone() -> None:
    waiting = Waiting()

    async def ask(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
        answered = isinstance(request.messages[-1], ToolResultMessage)
        calls = AssistantMessage.from_calls([call("wait", call_id="c")])
        yield Done(AssistantMessage.from_text("ok") if answered else calls)

    config = LoopConfig(stream=ask, tools=[Work("wait", waiting)])
    signals = [CancellationToken() for _ in range(50)]
    tasks = [asyncio.create_task(run("go", CONTEXT, config, signal)) for signal in signals]
    await waiting.started.wait()
    for signal in signals[::2]:
        signal.cancel()
    stopped = await asyncio.gather(*tasks[::2], return_exceptions=True)
    assert [type(outcome) for outcome in stopped] == [RunAborted] * 25
    waiting.release.set()
    assert [result.text for result in await asyncio.gather(*tasks[1::2])] == ["ok"] * 25
