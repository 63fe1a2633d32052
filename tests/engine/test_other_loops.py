"""Event loops and clocks that are not asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from threading import Thread
from typing import Any, TypeVar

import pytest

from clark_agent import (
    AgentContext,
    Budget,
    CancellationToken,
    ChannelSteering,
    LoopConfig,
    LoopOutcome,
    RunAborted,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    agent_tool,
    run,
    tool,
)
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream, call, check_events

T = TypeVar("T")


class OneThread(asyncio.SelectorEventLoop):
    """Cannot be reached from other threads, like the event loops of durable engines."""

    def call_soon_threadsafe(self, *args: Any, **more: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


def on_one_thread(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    loop = OneThread()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def test_a_run_with_tools_children_and_a_log() -> None:
    @tool
    async def look(ctx: ToolContext) -> str:
        """Look around."""
        await ctx.update("half")
        await asyncio.sleep(0)
        return "seen"

    child = LoopConfig(stream=ScriptedStream([call("look"), "From below."]), tools=[look])
    helper = agent_tool("helper", "helps", child)
    store, sink = MemoryStore(), RecordingSink()
    stream = ScriptedStream([[call("look"), call("helper", task="t")], "Done."])
    config = LoopConfig(stream=stream, tools=[look, helper], event_sink=sink, run_log=RunLog(store))
    result = on_one_thread(lambda: run("go", AgentContext(), config))
    assert result.text == "Done."
    check_events(sink.events)
    (root,) = [summary for summary in store.runs() if not summary.depth]
    assert on_one_thread(lambda: replay(store, root.run_id, config)).is_identical


def test_the_token_cancels_a_tool_that_waits() -> None:
    token, sink = CancellationToken(), RecordingSink()

    @tool
    async def wait() -> str:
        """Wait for ever."""
        asyncio.get_running_loop().call_soon(token.cancel, "enough")
        await asyncio.sleep(3600)
        return "never"

    config = LoopConfig(stream=ScriptedStream([call("wait")]), tools=[wait], event_sink=sink)
    with pytest.raises(RunAborted, match="enough") as caught:
        on_one_thread(lambda: run("go", AgentContext(), config, token))
    check_events(sink.events)
    assert isinstance(caught.value.messages[-1], ToolResultMessage)


def test_steering_stops_a_stream() -> None:
    steering = ChannelSteering()
    sent: list[object] = []

    async def stream(request: Any, signal: Any) -> Any:
        if not sent:
            sent.append(steering.handle.steer("Stop.", "now"))
            await asyncio.sleep(3600)
        answer: Any = ScriptedStream(["Stopped."])(request, signal)
        async with aclosing(answer) as events:
            async for event in events:
                yield event

    config = LoopConfig(stream=stream, plugins=[steering])
    result = on_one_thread(lambda: run("go", AgentContext(), config))
    assert result.text == "Stopped."


def test_what_cannot_be_done_is_not_swallowed() -> None:
    """A loop that is open and refuses is an error of the host's, not a message that is lost."""

    class Refusing(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: Any, **more: Any) -> Any:  # type: ignore[override]
            raise RuntimeError("not from here")

    steering = ChannelSteering()
    raised: list[BaseException] = []

    @tool
    async def work() -> str:
        """Work."""

        def steer() -> None:
            try:
                _ = steering.handle.steer("Stop.", "now")
            except RuntimeError as error:
                raised.append(error)

        thread = Thread(target=steer)
        thread.start()
        thread.join()
        return "done"

    config = LoopConfig(
        stream=ScriptedStream([call("work"), "ok"]), tools=[work], plugins=[steering]
    )
    loop = Refusing()
    try:
        loop.run_until_complete(run("go", AgentContext(), config))
    finally:
        loop.close()
    assert [str(error) for error in raised] == ["not from here"]


async def test_the_timers_of_a_budget_are_the_clocks() -> None:
    class Own(FakeClock):
        def __init__(self) -> None:
            super().__init__()
            self.timers: list[tuple[float, Callable[[], object]]] = []
            self.cancelled = 0

        def call_later(self, seconds: float, callback: Callable[[], object]) -> Own:
            self.timers.append((seconds, callback))
            return self

        def cancel(self) -> None:
            self.cancelled += 1

    clock = Own()

    async def works(args: Any, ctx: ToolContext) -> ToolResult:
        ((seconds, ring),) = clock.timers
        assert seconds == pytest.approx(90, abs=1)
        asyncio.get_running_loop().call_soon(ring)
        await asyncio.sleep(3600)
        return ToolResult.text("never")

    @tool
    async def work(ctx: ToolContext) -> ToolResult:
        """Work."""
        return await works(None, ctx)

    stream = ScriptedStream([call("work"), "ok"])
    budget = Budget(seconds=90)
    config = LoopConfig(stream=stream, tools=[work], budget=budget, clock=clock)
    result = await run("go", AgentContext(), config)
    assert result.outcome is LoopOutcome.OUT_OF_BUDGET
    assert "the time for this run was over" in result.messages[-1].plain_text
    assert clock.cancelled == 1
