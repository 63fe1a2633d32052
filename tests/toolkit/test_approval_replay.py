"""A gate is asked last, about the call that will run; and in a replay nobody is asked at all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    AgentContext,
    Answer,
    BeforeToolCallContext,
    Block,
    CancellationToken,
    ExecutionMode,
    LoopConfig,
    Rewrite,
    RunAborted,
    ToolResult,
    agent_tool,
    run,
)
from clark_agent.plugins.base import BeforeToolDecision
from clark_agent.replay import assert_replays, replay
from clark_agent.run_log import JsonlStore, MemoryStore, RunLog, resume
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit.approval import Approval, ApprovalGate, Denied
from tests.engine.support import CONTEXT, Work, completed, decided, results
from tests.toolkit.test_approval import Gone, Person, cancel_when_asked, cut_behind


class Confine:
    """Rewrites the path of every call."""

    name = "confine"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Rewrite:
        return Rewrite({"path": "/safe" + ctx.args["path"]})


class Refuse:
    name = "refuse"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Block:
        return Block("no")


async def test_a_plugin_that_rewrites_is_asked_first_wherever_it_is_registered() -> None:
    person, work = Person(), Work()
    plugins = [ApprovalGate(person), Confine()]
    await completed([call("work", path="/x"), "ok"], work, plugins=plugins)
    assert person.asked == ["work(path='/safe/x')"]
    assert work.calls == [{"path": "/safe/x"}]


async def test_nobody_is_asked_about_what_is_blocked_anyway() -> None:
    person, work = Person(), Work()
    await completed([call("work"), "ok"], work, plugins=[ApprovalGate(person), Refuse()])
    assert person.asked == []


def test_the_order_is_told() -> None:
    gate = ApprovalGate(None)
    config = LoopConfig(stream=ScriptedStream([]), plugins=[gate, Refuse(), Confine()])
    assert config.plugin_names["before_tool_call"] == ("refuse", "confine", "approval_gate")


# --- replays ------------------------------------------------------------------------------------


def config_with(person: Any, *plugins: Any, log: RunLog | None = None, **settings: Any) -> Any:
    calls = [call("work", n=n) for n in range(3)]
    settings.setdefault("stream", ScriptedStream([calls, call("work", n=3), "done"]))
    gate = ApprovalGate(person)
    return LoopConfig(tools=[Work()], plugins=[gate, *plugins], run_log=log, **settings)


class Loud:
    name = "loud"

    def on_after_tool_call(self, ctx: AfterToolCallContext) -> AfterToolDecision:
        return AfterToolDecision(ToolResult.text(ctx.result.plain_text.upper()))


@pytest.mark.parametrize("mode", ExecutionMode)
@pytest.mark.parametrize("plugins", [(), (Loud(),)])
async def test_a_replay_asks_nobody(
    mode: ExecutionMode, plugins: tuple[Any, ...], tmp_path: Path
) -> None:
    store = JsonlStore(tmp_path)
    person = Person(Denied("not this"), Approval.ONCE, Approval.NO, Approval.ALWAYS)
    log = RunLog(store)
    first = config_with(person, *plugins, log=log, default_execution_mode=mode)
    await run("go", CONTEXT, first)
    assert len(person.requests) == 4
    (summary,) = store.runs()
    again = Person(*[Approval.ALWAYS] * 4)
    config = config_with(again, *plugins, default_execution_mode=mode)
    report = assert_replays(tmp_path / f"{summary.run_id}.jsonl", config)
    assert report.result is not None
    assert again.requests == []
    assert config.plugins[0].always == frozenset()
    assert config.registry["work"].calls == []


@pytest.mark.parametrize("ask", [None, Person(OSError("no display"), True, EOFError())])
async def test_nor_about_what_could_not_be_asked(ask: Any) -> None:
    store = MemoryStore()
    await run("go", CONTEXT, config_with(ask, log=RunLog(store)))
    (summary,) = store.runs()
    again = Person()
    report = await replay(store, summary.run_id, config_with(again))
    assert str(report.drift) == "None"
    assert again.requests == []


async def test_nor_when_it_took_too_long() -> None:
    store, person = MemoryStore(), Gone()
    model = ScriptedStream([call("work"), "done"])
    config = config_with(person, log=RunLog(store), stream=model, hook_timeout=0.01)
    result = await run("go", CONTEXT, config)
    assert decided(results(result)[0]) == [("approval_gate", "failed")]
    (summary,) = store.runs()
    again = Person()
    report = await replay(store, summary.run_id, config_with(again))
    assert str(report.drift) == "None"
    assert again.requests == []


async def test_nor_when_the_run_was_cancelled_meanwhile() -> None:
    store, person, signal = MemoryStore(), Gone(), CancellationToken()
    canceller = asyncio.create_task(cancel_when_asked(person, signal.cancel))
    with pytest.raises(RunAborted):
        await run("go", CONTEXT, config_with(person, log=RunLog(store)), signal)
    await canceller
    (summary,) = store.runs()
    again = Person()
    report = await replay(store, summary.run_id, config_with(again))
    assert str(report.drift) == "None"
    assert isinstance(report.error, RunAborted)
    assert again.requests == []


@pytest.mark.parametrize("position", [0, 1])
async def test_nor_in_a_run_that_was_resumed(position: int) -> None:
    store, mode = MemoryStore(), ExecutionMode.SEQUENTIAL
    person = Person(Approval.NO, Approval.ONCE, Approval.NO)
    first = config_with(person, log=RunLog(store), default_execution_mode=mode)
    await run("go", CONTEXT, first)
    run_id = cut_behind(store, "tool_ended", f"call_{position + 1}")
    rest = ScriptedStream([call("work", n=4), "done"])
    second = Person(Approval.NO, Approval.ONCE)
    await resume(store, run_id, config_with(second, stream=rest, default_execution_mode=mode))
    assert second.requests
    again = Person()
    report = await replay(store, run_id, config_with(again, default_execution_mode=mode))
    assert str(report.drift) == "None"
    assert again.requests == []


async def test_nor_about_the_calls_of_child_runs() -> None:
    store = MemoryStore()

    def tree(person: Any) -> LoopConfig:
        gate = ApprovalGate(person)
        below = LoopConfig(
            stream=ScriptedStream([call("work", n=1), call("work", n=2), "done"]),
            tools=[Work()],
            plugins=[gate],
        )
        above = ScriptedStream([call("helper", task="do it"), "ok"])
        tools = [agent_tool("helper", "helps", below)]
        return LoopConfig(stream=above, tools=tools, plugins=[gate])

    person = Person(Approval.ONCE, Approval.NO, Approval.ONCE)
    await run("go", AgentContext(), tree(person).replace(run_log=RunLog(store)))
    assert len(person.requests) == 3
    (summary,) = [found for found in store.runs() if found.depth == 0]
    again = Person()
    report = await replay(store, summary.run_id, tree(again))
    assert str(report.drift) == "None"
    assert again.requests == []


class Editor:
    """A person who edits the arguments, or answers in the tool's stead."""

    name = "editor"
    is_interactive = True

    def __init__(self) -> None:
        self.asked = 0

    async def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
        self.asked += 1
        if ctx.args["n"] == 0:
            return Rewrite({"n": 7})
        return Answer(ToolResult.text("I know")) if ctx.args["n"] == 1 else None


async def test_all_decisions_of_those_who_ask_outside_are_taken_from_the_log() -> None:
    store, first = MemoryStore(), Editor()
    config = LoopConfig(
        stream=ScriptedStream([[call("work", n=n) for n in range(3)], "done"]),
        tools=[Work()],
        plugins=[first],
        run_log=RunLog(store),
    )
    await run("go", CONTEXT, config)
    assert first.asked == 3
    (summary,) = store.runs()
    again = Editor()
    report = await replay(store, summary.run_id, config.replace(plugins=[again]))
    assert str(report.drift) == "None"
    assert again.asked == 0
