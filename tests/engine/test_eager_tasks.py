"""On an event loop whose tasks take their first step when they are made."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from clark_agent import (
    AfterToolCallContext,
    AgentEvent,
    FunctionPlugin,
    LoopConfig,
    RunStoppedByTool,
    ToolContext,
    ToolFatal,
    ToolResult,
    events,
    run,
)
from clark_agent.testing import ScriptedStream, call
from tests import event_loops
from tests.engine.support import (
    CONTEXT,
    Waiting,
    Work,
    failed,
    observed_run,
    results,
    texts,
)

if why := event_loops.missing("eager"):
    pytest.skip(why, allow_module_level=True)


@pytest.fixture(autouse=True)
async def _eager_tasks() -> None:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, asyncio.BaseEventLoop):
        pytest.skip("uvloop and the factory of eager tasks do not fit in every version")
    event_loops.make_tasks_eager(loop)


async def test_a_fatal_call_interrupts_the_hook_of_a_call_before_it() -> None:
    asked = list[str]()

    async def check(ctx: AfterToolCallContext) -> None:
        asked.append(ctx.tool_call.name)
        if ctx.tool_call.name == "work":
            await asyncio.Event().wait()

    async with asyncio.timeout(10):
        error, _ = await failed(
            RunStoppedByTool,
            [[call("work"), call("burn"), call("work")]],
            Work(),
            Work("burn", ToolFatal("fire")),
            plugins=[FunctionPlugin("after_tool_call", check)],
        )
    assert asked == ["work", "burn"]
    assert ["withheld" in texts(error)[0], "ended the run" in texts(error)[1]] == [True, True]
    assert results(error)[2].details["kind"] == "tool_call_not_executed"


async def test_an_interpreter_that_stops_in_a_call_leaves_none_of_the_others_behind() -> None:
    waiting = Waiting()
    outcome, _ = await observed_run(
        [[call("wait"), call("exit"), call("wait")]],
        Work("wait", waiting),
        Work("exit", SystemExit(3)),
    )
    assert isinstance(outcome, SystemExit)
    assert waiting.cancelled
    cause: Any = outcome.__cause__
    assert [result.details["kind"] for result in results(cause)] == [
        "tool_call_stopped", "tool_call_stopped", "tool_call_not_executed",
    ]  # fmt: skip


@pytest.mark.parametrize("others", [0, 1])
async def test_an_event_that_a_listener_causes_goes_out_after_the_one_it_listens_to(
    others: int,
) -> None:
    """Its task emits before the listener has returned."""
    contexts, told, tasks = list[ToolContext](), list[str](), list[asyncio.Task[None]]()

    async def report(args: Any, ctx: ToolContext) -> ToolResult:
        contexts.append(ctx)
        await ctx.update("one")
        await asyncio.gather(*tasks)
        return ToolResult.text("done")

    async def update() -> None:
        await contexts[0].update("two")

    def listen(event: AgentEvent) -> None:
        if not isinstance(event, events.ToolExecutionUpdate):
            return
        text = event.partial.plain_text
        told.append(f"{text} begins")
        if text == "one":
            tasks.append(asyncio.create_task(update()))
        told.append(f"{text} ends")

    plugins = [FunctionPlugin("event_observer", lambda event: None) for _ in range(others)]
    config = LoopConfig(
        stream=ScriptedStream([call("report"), "ok"]),
        tools=[Work("report", report)],
        event_sink=listen,
        plugins=plugins,
    )
    await run("go", CONTEXT, config)
    assert told == ["one begins", "one ends", "two begins", "two ends"]
