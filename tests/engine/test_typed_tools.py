"""Tools made of functions, in a run: parsing, mending, threads, and what it means to stop them."""

from __future__ import annotations

import asyncio
import threading

from clark_agent import (
    BeforeToolCallContext,
    CancellationToken,
    FunctionPlugin,
    Rewrite,
    RunAborted,
    ToolContext,
    ToolResult,
    tool,
)
from clark_agent import events as ev
from clark_agent.testing import call
from tests.engine.support import completed, observed_run, results, texts


@tool
async def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def test_arguments_come_as_the_declared_types() -> None:
    result, sink = await completed([[call("add", a=1), call("add", a="2", b=None)], "ok"], add)
    assert texts(result) == ["2", "3"]
    # What the model sent stays as it was, also where it had to be mended.
    assert [e.args for e in sink.of(ev.ToolExecutionStart)] == [{"a": 1}, {"a": "2", "b": None}]


async def test_arguments_that_cannot_be_mended_come_back_to_the_model() -> None:
    result, sink = await completed([call("add", a="two"), call("add", a=2), "ok"], add)
    refused, fine = results(result)
    assert refused.is_error
    assert "integer" in refused.plain_text
    assert '"two"' in refused.plain_text
    assert fine.plain_text == "3"
    assert len(sink.of(ev.ToolExecutionStart)) == 1


async def test_rewritten_arguments_are_parsed_like_the_models() -> None:
    def rewrite(ctx: BeforeToolCallContext) -> Rewrite:
        return Rewrite({**ctx.args, "b": "40"})

    plugins = [FunctionPlugin("before_tool_call", rewrite)]
    result, _ = await completed([call("add", a=2), "ok"], add, plugins=plugins)
    assert texts(result) == ["42"]


async def test_plain_functions_run_at_once_and_do_not_stall_the_loop() -> None:
    barrier = threading.Barrier(3)

    @tool
    def meet(n: int) -> str:
        """Wait for the others."""
        barrier.wait(10)
        return f"met {n} in {threading.current_thread() is not threading.main_thread()}"

    ticks: list[int] = []

    async def tick() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    result, _ = await completed([[call("meet", n=n) for n in range(3)], "ok"], meet)
    ticking.cancel()
    assert texts(result) == ["met 0 in True", "met 1 in True", "met 2 in True"]
    assert ticks


async def test_a_plain_function_reports_progress() -> None:
    @tool
    def work(ctx: ToolContext) -> str:
        """Report."""
        _ = ctx.update("half")
        return "done"

    result, sink = await completed([call("work"), "ok"], work)
    assert [e.partial.plain_text for e in sink.of(ev.ToolExecutionUpdate)] == ["half"]
    assert texts(result) == ["done"]


async def test_a_plain_function_that_does_not_stop_is_left_behind() -> None:
    signal, begun, release = CancellationToken(), threading.Event(), threading.Event()
    ended = threading.Event()

    @tool
    def block() -> None:
        """Block."""
        begun.set()
        release.wait(10)
        ended.set()

    task = asyncio.create_task(
        observed_run([call("block")], block, signal=signal, cancel_grace=0.01, leaves_tasks=True)
    )
    await asyncio.to_thread(begun.wait)
    signal.cancel()
    outcome, _ = await task
    assert isinstance(outcome, RunAborted)
    assert results(outcome)[0].details["still_running"] is True
    release.set()
    await asyncio.to_thread(ended.wait)


async def test_a_plain_function_that_takes_too_long_is_left_behind() -> None:
    begun, release = threading.Event(), threading.Event()

    @tool(timeout=0.01)
    def block() -> None:
        """Block."""
        begun.set()
        release.wait(10)

    result, _ = await completed([call("block"), "ok"], block, cancel_grace=0.01, leaves_tasks=True)
    release.set()
    assert results(result)[0].details == {
        "kind": "tool_call_stopped", "reason": "timeout", "still_running": True,
    }  # fmt: skip


async def test_what_a_function_returns_is_what_the_model_reads() -> None:
    @tool
    async def give(what: str) -> object:
        """Give something back."""
        return {
            "nothing": None, "data": {"x": [1, 2]}, "result": ToolResult.error("no"),
            "bytes": b"x",
        }[what]  # fmt: skip

    calls = [call("give", what=what) for what in ("nothing", "data", "result", "bytes")]
    result, _ = await completed([calls, "ok"], give)
    nothing, data, given, raw = results(result)
    assert not nothing.is_error
    assert data.plain_text == '{"x":[1,2]}'
    assert (given.is_error, given.plain_text) == (True, "no")
    assert raw.is_error
