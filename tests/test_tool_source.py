"""Tools that come and go while a run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from clark_agent import (
    AgentContext,
    AgentEvent,
    AgentTool,
    AssistantMessage,
    CancellationToken,
    ConfigError,
    LoopConfig,
    RunAborted,
    RunIdentity,
    RunResult,
    ToolResultMessage,
    agent_tool,
    run,
    tool,
)
from clark_agent.events import MessageEnd, TurnEnd
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog, resume
from clark_agent.run_log.records import ToolsChanged
from clark_agent.testing import ScriptedStream, call
from clark_agent.tool_source import ToolSourceContext


def named(name: str) -> AgentTool:
    async def work(n: int = 0) -> str:
        """Work."""
        return f"{name} {n}"

    return tool(name=name)(work)


class ByTurn:
    """Gives what is planned for each turn, from the first."""

    def __init__(self, *turns: Any) -> None:
        self.turns = turns
        self.asked: list[ToolSourceContext] = []

    def tools_for_turn(self, ctx: ToolSourceContext) -> Iterable[AgentTool]:
        self.asked.append(ctx)
        given = self.turns[min(ctx.turn, len(self.turns)) - 1]
        if isinstance(given, Exception):
            raise given
        return given  # type: ignore[no-any-return]


def offered(stream: ScriptedStream) -> list[list[str]]:
    return [[tool.name for tool in request.tools] for request in stream.requests]


def results(result: RunResult) -> list[str]:
    return [m.plain_text for m in result.messages if isinstance(m, ToolResultMessage)]


A, B, C = named("a"), named("b"), named("c")


async def test_it_is_asked_once_a_turn_and_its_tools_come_behind_those_of_the_config() -> None:
    source = ByTurn((B,), (B, C), (C,))
    stream = ScriptedStream([[call("a"), call("b")], [call("b", n=1), call("c")], call("b"), "ok"])
    config = LoopConfig(stream=stream, tools=[A], tool_source=source)
    context = AgentContext(identity=RunIdentity.root("r"))
    result = await run("go", context, config)
    assert offered(stream) == [["a", "b"], ["a", "b", "c"], ["a", "c"], ["a", "c"]]
    assert results(result)[:4] == ["a 0", "b 0", "b 1", "c 0"]
    assert "no tool 'b'" in results(result)[4]
    assert [ctx.turn for ctx in source.asked] == [1, 2, 3, 4]
    assert [len(ctx.messages) for ctx in source.asked] == [1, 4, 7, 9]
    assert {ctx.identity for ctx in source.asked} == {RunIdentity.root("r")}


async def test_the_same_object_costs_nothing_and_keeps_the_request_the_same() -> None:
    stream = ScriptedStream([call("b"), call("b"), "ok"])
    await run("go", AgentContext(), LoopConfig(stream=stream, tool_source=ByTurn((B,))))
    first, *others = [request.tools for request in stream.requests]
    assert all(tools is first for tools in others)


async def test_equal_tools_in_another_list_keep_the_request_the_same() -> None:
    stream = ScriptedStream([call("b"), "ok"])
    await run("go", AgentContext(), LoopConfig(stream=stream, tool_source=ByTurn([B], [B])))
    assert stream.requests[0].tools is stream.requests[1].tools


async def test_another_tool_of_the_same_face_is_the_one_that_runs() -> None:
    async def other(n: int = 0) -> str:
        """Work."""
        return "the other"

    stream = ScriptedStream([call("b"), call("b"), "ok"])
    source = ByTurn([B], [tool(name="b")(other)])
    result = await run("go", AgentContext(), LoopConfig(stream=stream, tool_source=source))
    assert results(result) == ["b 0", "the other"]


@pytest.mark.parametrize(
    "wrong",
    [OSError("away"), None, 5, ["b"], [object()], [AgentTool], "text"],
    ids=["raises", "none", "number", "names", "objects", "classes", "text"],
)
async def test_a_source_that_fails_leaves_the_tools_as_they_were(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stream = ScriptedStream([call("b"), call("b", n=2), "ok"])
    config = LoopConfig(stream=stream, tools=[A], tool_source=ByTurn((B,), wrong, wrong))
    result = await run("go", AgentContext(), config)
    assert offered(stream) == [["a", "b"]] * 3
    assert results(result) == ["b 0", "b 2"]
    assert "the tool source 'by_turn' failed" in caplog.text


async def test_a_tool_of_the_config_is_never_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def impostor(n: int = 0) -> str:
        """Work."""
        return "stolen"

    stream = ScriptedStream([call("a"), "ok"])
    source = ByTurn([tool(name="a")(impostor), B])
    config = LoopConfig(stream=stream, tools=[A], tool_source=source)
    result = await run("go", AgentContext(), config)
    assert offered(stream) == [["a", "b"]] * 2
    assert results(result) == ["a 0"]
    assert "ignored the tool 'a' of the tool source: the config has one" in caplog.text


async def test_an_async_source_has_the_time_that_hooks_have() -> None:
    class Slow:
        async def tools_for_turn(self, ctx: ToolSourceContext) -> Sequence[AgentTool]:
            await asyncio.sleep(60)
            return (B,)

    stream = ScriptedStream(["ok"])
    config = LoopConfig(stream=stream, tools=[A], tool_source=Slow(), hook_timeout=0.01)
    await run("go", AgentContext(), config)
    assert offered(stream) == [["a"]]


async def test_children_inherit_it_with_the_tools() -> None:
    source = ByTurn((B,))
    parent = LoopConfig(stream=ScriptedStream(["Fine."]), tools=[A], tool_source=source)
    below = parent.child(stream=ScriptedStream([call("b"), "From below."]))
    helper = agent_tool("helper", "helps", below)
    stream = ScriptedStream([call("helper", task="t"), "ok"])
    result = await run("go", AgentContext(), parent.replace(stream=stream, tools=[helper]))
    assert results(result) == ["From below."]
    assert len(source.asked) == 4


async def test_the_log_says_what_came_and_went_and_a_replay_asks_no_source() -> None:
    store = MemoryStore()
    strict = named("d")
    strict.requires_exclusive_sandbox = True
    source = ByTurn((B,), (B, strict), (strict,))
    wrong: Any = "many"
    stream = ScriptedStream([[call("b"), call("d")], [call("b", n=wrong), call("d")], "ok"])
    config = LoopConfig(stream=stream, tools=[A], tool_source=source, run_log=RunLog(store))
    await run("go", AgentContext(), config)
    (summary,) = store.runs()
    entries = [record.entry for record in store.load(summary.run_id).records]
    changes = [entry for entry in entries if isinstance(entry, ToolsChanged)]
    assert [(tuple(c.added), c.removed) for c in changes] == [
        (("b",), ()), (("d",), ()), ((), ("b",)),
    ]  # fmt: skip
    assert changes[1].added["d"]["flags"] == {"requires_exclusive_sandbox": True}
    source.asked.clear()
    report = await replay(store, summary.run_id, config)
    assert report.is_identical, report
    assert source.asked == []
    without = await replay(store, summary.run_id, config.replace(tool_source=None))
    assert without.is_identical, without


@pytest.mark.parametrize(
    "wrong", [ByTurn, object(), [B], "source"], ids=["class", "object", "list", "text"]
)
def test_it_must_have_the_method(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="tool_source must be an object with tools_for_turn"):
        LoopConfig(stream=ScriptedStream([]), tool_source=wrong)


async def test_the_order_of_the_tools_is_replayed() -> None:
    store = MemoryStore()
    source = ByTurn((A, B), (B, A), (C, A, B), (B, C))
    stream = ScriptedStream([call("a"), call("nope"), call("nope"), "ok"])
    config = LoopConfig(stream=stream, tool_source=source, run_log=RunLog(store))
    result = await run("go", AgentContext(), config)
    assert offered(stream) == [["a", "b"], ["b", "a"], ["c", "a", "b"], ["b", "c"]]
    assert "The tools are: c, a, b." in results(result)[2]
    (summary,) = store.runs()
    report = await replay(store, summary.run_id, config)
    assert report.is_identical, report


class Killed(BaseException):
    pass


@pytest.mark.parametrize("gives", [(), OSError("away")], ids=["nothing", "raises"])
async def test_a_call_that_waits_for_a_tool_of_the_source_is_not_lost(gives: Any) -> None:
    store, token = MemoryStore(), CancellationToken()

    def cancel(event: AgentEvent) -> None:
        if isinstance(event, MessageEnd) and isinstance(event.message, AssistantMessage):
            raise Killed

    def config(source: ByTurn, *steps: Any, **more: Any) -> LoopConfig:
        stream = ScriptedStream(steps)
        return LoopConfig(stream=stream, tool_source=source, run_log=RunLog(store), **more)

    with pytest.raises(Killed):
        await run("go", AgentContext(), config(ByTurn((B,)), call("b"), event_sink=cancel), token)
    (summary,) = store.runs()
    store.cut(summary.run_id, 4)  # the process died behind the answer
    assert type(store.load(summary.run_id).records[-1].entry).__name__ == "Answered"
    with pytest.raises(ConfigError, match="which the tool source does not provide now"):
        await resume(store, summary.run_id, config(ByTurn(gives)))
    assert len(store.load(summary.run_id).records) == 4
    again = config(ByTurn((B,)), "ok")
    result = await resume(store, summary.run_id, again)
    assert results(result) == ["b 0"]
    report = await replay(store, summary.run_id, again)
    assert report.is_identical, report


async def test_tools_that_are_gone_after_a_resume_are_recorded() -> None:
    store, token = MemoryStore(), CancellationToken()

    def cancel(event: AgentEvent) -> None:
        if isinstance(event, TurnEnd):
            token.cancel()

    log = RunLog(store)
    first = LoopConfig(
        stream=ScriptedStream([call("b")]),
        tool_source=ByTurn((B, C)),
        event_sink=cancel,
        run_log=log,
    )
    with pytest.raises(RunAborted):
        await run("go", AgentContext(), first, token)
    (summary,) = store.runs()
    stream = ScriptedStream(["ok"])
    again = LoopConfig(stream=stream, tool_source=ByTurn((C,)), run_log=log)
    await resume(store, summary.run_id, again)
    assert offered(stream) == [["c"]]
    report = await replay(store, summary.run_id, again)
    assert report.is_identical, report


@pytest.mark.parametrize("with_source", [True, False])
async def test_a_run_that_is_cancelled_while_the_source_is_asked_replays(
    with_source: bool,
) -> None:
    class Hanging:
        async def tools_for_turn(self, ctx: ToolSourceContext) -> Sequence[AgentTool]:
            asyncio.get_running_loop().call_soon(token.cancel)
            await asyncio.sleep(60)
            return ()

    store, token = MemoryStore(), CancellationToken()
    stream = ScriptedStream(["ok"])
    config = LoopConfig(stream=stream, tool_source=Hanging(), run_log=RunLog(store))
    with pytest.raises(RunAborted):
        await run("go", AgentContext(), config, token)
    (summary,) = store.runs()
    again = config if with_source else config.replace(tool_source=None)
    report = await replay(store, summary.run_id, again)
    assert report.is_identical, report
