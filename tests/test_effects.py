"""One seam around what a run does to the world: asking models, running tools, starting children."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable
from typing import Any

import pytest
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentEvent,
    AgentTool,
    AssistantMessage,
    CancellationToken,
    ConfigError,
    LoopConfig,
    RunAborted,
    RunResult,
    StreamError,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    agent_tool,
    run,
    tool,
)
from clark_agent.effects import Child, Effects
from clark_agent.events import MessageEnd
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog, resume
from clark_agent.stream import StreamEvent, StreamFn, StreamRequest
from clark_agent.testing import RecordingSink, ScriptedStream, call, check_events


class Noted(Effects):
    """Notes each effect, and lets it happen."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def ask_model(
        self, stream: StreamFn, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterable[StreamEvent]:
        self.seen.append(f"asks with {len(request.messages)}")
        return super().ask_model(stream, request, signal)

    async def run_tool(self, tool: AgentTool, args: Any, ctx: ToolContext) -> ToolResult:
        self.seen.append(f"runs {tool.name}")
        result = await super().run_tool(tool, args, ctx)
        self.seen.append(f"ran {tool.name}")
        return result

    def run_child(self, child: Child) -> Awaitable[RunResult]:
        self.seen.append(f"starts a child for {child.tool_call_id}")
        return super().run_child(child)


@tool
async def look(path: str) -> str:
    """Look at a file."""
    await asyncio.sleep(0)
    return f"{path} is empty"


def results(result: RunResult) -> list[str]:
    return [m.plain_text for m in result.messages if isinstance(m, ToolResultMessage)]


def two_levels(effects: Effects | None, below: Effects | None = None, **more: Any) -> LoopConfig:
    child = LoopConfig(stream=ScriptedStream([call("look", path="b"), "Empty."]), tools=[look])
    child = child.replace(effects=below)
    helper = agent_tool("helper", "helps", child)
    stream = ScriptedStream([[call("look", path="a"), call("helper", task="b")], "Done."])
    return LoopConfig(stream=stream, tools=[look, helper], effects=effects, **more)


async def test_every_effect_goes_through_it_and_children_inherit_it() -> None:
    noted, sink = Noted(), RecordingSink()
    result = await run("go", AgentContext(), two_levels(noted, event_sink=sink))
    assert result.text == "Done."
    assert results(result) == ["a is empty", "Empty."]
    check_events(sink.events)
    assert sorted(noted.seen) == sorted(
        [
            "asks with 1",
            "runs look",
            "runs helper",
            "starts a child for call_2",
            "asks with 1",
            "ran look",
            "runs look",
            "ran look",
            "asks with 3",
            "ran helper",
            "asks with 4",
        ]
    )


async def test_a_child_may_have_its_own() -> None:
    above, below = Noted(), Noted()
    await run("go", AgentContext(), two_levels(above, below))
    assert below.seen == ["asks with 1", "runs look", "ran look", "asks with 3"]
    assert above.seen.count("asks with 1") == 1


async def test_what_it_returns_is_what_hooks_events_and_the_model_see() -> None:
    class Elsewhere(Effects):
        async def run_tool(self, tool: AgentTool, args: Any, ctx: ToolContext) -> ToolResult:
            await ctx.update("on the way")
            return ToolResult.text(f"{tool.name} ran elsewhere with {args.path}")

    sink = RecordingSink()
    stream = ScriptedStream([call("look", path="a"), "Done."])
    config = LoopConfig(stream=stream, tools=[look], effects=Elsewhere(), event_sink=sink)
    result = await run("go", AgentContext(), config)
    assert results(result) == ["look ran elsewhere with a"]
    check_events(sink.events)


@pytest.mark.parametrize("value", [None, "text", ToolResult.text])
async def test_what_is_no_result_is_a_bug_that_is_told(value: Any) -> None:
    class Broken(Effects):
        async def run_tool(self, tool: AgentTool, args: Any, ctx: ToolContext) -> ToolResult:
            await super().run_tool(tool, args, ctx)
            return value  # type: ignore[no-any-return]

    stream = ScriptedStream([call("look", path="a"), "Done."])
    config = LoopConfig(stream=stream, tools=[look], effects=Broken())
    (told,) = results(await run("go", AgentContext(), config))
    assert "must return a ToolResult" in told


async def test_what_it_raises_is_the_tools_or_the_models_failure() -> None:
    class Down(Effects):
        models = 0

        def ask_model(
            self, stream: StreamFn, request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterable[StreamEvent]:
            self.models += 1
            if self.models == 2:
                raise ConnectionError("the line is down")
            return super().ask_model(stream, request, signal)

        def run_tool(self, tool: AgentTool, args: Any, ctx: ToolContext) -> Awaitable[ToolResult]:
            raise PermissionError("not here")

    sink = RecordingSink()
    stream = ScriptedStream([call("look", path="a"), "Done."])
    config = LoopConfig(stream=stream, tools=[look], effects=Down(), event_sink=sink)
    with pytest.raises(StreamError, match="the line is down") as caught:
        await run("go", AgentContext(), config)
    (told,) = [m for m in caught.value.messages if isinstance(m, ToolResultMessage)]
    assert told.is_error
    assert "not here" in told.plain_text
    check_events(sink.events)


async def test_a_stream_may_be_replaced() -> None:
    class Cached(Effects):
        async def ask_model(
            self, stream: StreamFn, request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            async for event in ScriptedStream(["From the cache."])(request, signal):
                yield event

    config = LoopConfig(stream=ScriptedStream([]), effects=Cached())
    assert (await run("go", AgentContext(), config)).text == "From the cache."


async def test_a_tools_timeout_includes_what_is_around_it() -> None:
    class Slow(Effects):
        async def run_tool(self, tool: AgentTool, args: Any, ctx: ToolContext) -> ToolResult:
            await asyncio.sleep(60)
            return await super().run_tool(tool, args, ctx)

    stream = ScriptedStream([call("look", path="a"), "Done."])
    config = LoopConfig(stream=stream, tools=[look], effects=Slow(), tool_timeout=0.01)
    (told,) = results(await run("go", AgentContext(), config))
    assert "took longer than 0.01 seconds" in told


async def test_a_record_is_kept_before_the_effect_and_replay_does_not_call_it() -> None:
    store, noted = MemoryStore(), Noted()
    config = two_levels(noted, run_log=RunLog(store))
    await run("go", AgentContext(), config)
    (root,) = [summary for summary in store.runs() if not summary.depth]
    noted.seen.clear()
    report = await replay(store, root.run_id, config)
    assert report.is_identical, report
    assert noted.seen == []


async def test_a_resumed_run_goes_through_it() -> None:
    store, token = MemoryStore(), CancellationToken()

    def cancel(event: AgentEvent) -> None:
        if isinstance(event, MessageEnd):
            token.cancel()

    stream = ScriptedStream(["Never mind."])
    config = LoopConfig(stream=stream, event_sink=cancel, run_log=RunLog(store))
    with pytest.raises(RunAborted):
        await run("go", AgentContext(), config, token)
    (summary,) = store.runs()
    noted = Noted()
    again = LoopConfig(stream=ScriptedStream([call("look", path="a"), "Done."]), tools=[look])
    result = await resume(store, summary.run_id, again.replace(effects=noted))
    assert result.text == "Done."
    assert noted.seen == ["asks with 1", "runs look", "ran look", "asks with 3"]


class Refusing(Effects):
    def run_child(self, child: Child) -> Awaitable[RunResult]:
        raise PermissionError("no children here")


class Redacting(Effects):
    async def run_child(self, child: Child) -> RunResult:
        result = await super().run_child(child)
        return replace(result, messages=(AssistantMessage.from_text("[redacted]"),))


@pytest.mark.parametrize("effects", [Refusing(), Redacting()], ids=["refusing", "redacting"])
async def test_what_becomes_of_a_child_is_replayed(effects: Effects) -> None:
    store = MemoryStore()
    config = two_levels(effects, run_log=RunLog(store))
    first = results(await run("go", AgentContext(), config))
    assert "Empty." not in first[1]
    (root,) = [summary for summary in store.runs() if not summary.depth]
    report = await replay(store, root.run_id, config)
    assert report.is_identical, report
    assert report.result is not None
    assert results(report.result) == first


def test_a_misspelt_override_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a method 'runtool'; did you mean 'run_tool'"):

        class Misspelt(Effects):
            async def runtool(self, tool: AgentTool, args: Any, ctx: ToolContext) -> ToolResult:
                return ToolResult.text("never")

    class Fine(Effects):
        async def run_in_pool(self) -> None: ...

    assert LoopConfig(stream=ScriptedStream([]), effects=Fine()).effects is not None


def test_it_must_be_an_instance() -> None:
    for wrong in (Effects, object(), "effects"):
        with pytest.raises(
            ConfigError, match="effects must be an instance of a subclass of Effects"
        ):
            LoopConfig(stream=ScriptedStream([]), effects=wrong)  # type: ignore[arg-type]
