"""A plugin may bring tools: the config offers them behind its own, and a log treats them alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from clark_agent import (
    AfterToolCallContext,
    Agent,
    AgentContext,
    AgentTool,
    ConfigError,
    LoopConfig,
    OpeningGate,
    Output,
    ToolContext,
    ToolResult,
    run,
)
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog, resume
from clark_agent.run_log.records import RunBegan, ToolEnded
from clark_agent.testing import ScriptedStream, call, say
from clark_agent.tools import ToolRegistry
from tests.run_log.stories import Model

STREAM = ScriptedStream([])


class Named(AgentTool):
    """A tool of any name, which counts its calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.description = f"Does {name}."
        self.timeout = 5.0
        self.ran = 0
        super().__init__()

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.ran += 1
        return ToolResult.text(f"{self.name} did it")


class Brings:
    """A plugin with tools."""

    def __init__(self, *tools: AgentTool, name: str = "brings", inherited: bool = False) -> None:
        self.name = name
        self.tools: Any = tools
        self.inheritable_to_child = inherited

    def for_run(self) -> Brings:
        return Brings(name=self.name)  # the tools are those of the registered plugin

    def on_after_tool_call(self, ctx: AfterToolCallContext) -> None:
        return None


def test_the_tools_of_plugins_come_behind_those_of_the_config_and_before_the_output() -> None:
    first, second, own = Named("first"), Named("second"), Named("own")
    config = LoopConfig(
        stream=STREAM,
        tools=[own],
        plugins=[Brings(first), Brings(second)],
        output=Output(int, mode="tool"),
    )
    *names, output = config.registry.names
    assert names == ["own", "first", "second"]
    assert output not in names
    assert config.all_tools.names == ("own", "first", "second")
    assert config.registry["first"] is first
    assert isinstance(config.tools, ToolRegistry)
    assert config.tools.names == ("own",)


def test_a_tool_may_come_from_several_plugins_and_from_the_config() -> None:
    same = Named("same")
    config = LoopConfig(stream=STREAM, tools=[same], plugins=[Brings(same, same), Brings(same)])
    assert config.registry.names == ("same",)


def test_another_tool_of_the_same_name_is_an_error() -> None:
    with pytest.raises(
        ConfigError,
        match="the plugin 'brings' brings a tool named 'a', and tools has another one: rename one",
    ):
        LoopConfig(stream=STREAM, tools=[Named("a")], plugins=[Brings(Named("a"))])
    with pytest.raises(
        ConfigError,
        match="the plugin 'late' brings a tool named 'a', and so does the plugin 'brings': rename",
    ):
        LoopConfig(stream=STREAM, plugins=[Brings(Named("a")), Brings(Named("a"), name="late")])
    with pytest.raises(ConfigError, match="and so does another plugin of that name"):
        LoopConfig(stream=STREAM, plugins=[Brings(Named("a")), Brings(Named("a"))])


@pytest.mark.parametrize("other", [len, Named, "a name"])
def test_what_is_no_tool_among_tools_is_an_error(other: Any) -> None:
    plugin = Brings()
    for tools in ([Named("a"), other], [other]) if callable(other) else ([Named("a"), other],):
        plugin.tools = tools
        with pytest.raises(ConfigError, match="the plugin 'brings': its tools must be AgentTool"):
            LoopConfig(stream=STREAM, plugins=[plugin])


@pytest.mark.parametrize("tools", ["a", {"a"}, ["a"], (), None, 3])
def test_tools_of_another_meaning_are_left_alone(tools: Any) -> None:
    plugin = Brings()
    plugin.tools = tools
    assert LoopConfig(stream=STREAM, plugins=[plugin]).registry.names == ()


def test_a_gate_that_names_tools_brings_none() -> None:
    assert LoopConfig(stream=STREAM, plugins=[OpeningGate(["plan"])]).registry.names == ()


def test_a_child_has_the_tools_of_inherited_plugins_once() -> None:
    kept, dropped = Brings(Named("kept"), inherited=True), Brings(Named("dropped"))
    config = LoopConfig(stream=STREAM, tools=[Named("own")], plugins=[kept, dropped])
    assert config.child().registry.names == ("own", "kept")
    assert config.child_builder().build().registry.names == ("own", "kept")
    assert config.child(tools=()).registry.names == ("kept",)
    again = config.replace(max_iterations=3)
    assert again.registry.names == ("own", "kept", "dropped")
    assert config.replace(plugins=()).registry.names == ("own",)


def test_an_agent_offers_them_too() -> None:
    agent = Agent(STREAM, plugins=[Brings(Named("brought"))])
    assert "brought" in agent.config.registry
    assert "brought" in agent.replace(name="other").config.registry


def test_check_tools_of_plugins_sees_them() -> None:
    seen: list[Sequence[str]] = []

    class Checks(Brings):
        def check_tools(self, tools: Any) -> None:
            seen.append(tuple(tools))

    LoopConfig(stream=STREAM, plugins=[Checks(Named("brought"))])
    assert seen == [("brought",)]


async def test_log_resume_and_replay_treat_them_like_any_other_tool() -> None:
    def config(brought: AgentTool, log: RunLog | None = None) -> LoopConfig:
        model = Model(call("own"), call("brought"), call("brought"), say("done"))
        return LoopConfig(
            stream=model, tools=[Named("own")], plugins=[Brings(brought)], run_log=log
        )

    store, brought = MemoryStore(), Named("brought")
    result = await run("Go on.", AgentContext(""), config(brought, RunLog(store)))
    assert result.text == "done"
    assert brought.ran == 2
    run_id = store.runs()[0].run_id
    records = store.load(run_id).records
    began = records[0].entry
    assert isinstance(began, RunBegan)
    assert list(began.tools) == ["own", "brought"]

    again = Named("brought")
    report = await replay(store, run_id, config(again))
    assert str(report.drift) == "None"
    assert again.ran == 0
    assert report.result is not None
    assert report.result.messages == result.messages

    ends = [n for n, record in enumerate(records) if isinstance(record.entry, ToolEnded)]
    store.cut(run_id, ends[1] + 1)
    again = Named("brought")
    resumed = await resume(store, run_id, config(again))
    assert resumed.text == "done"
    assert again.ran == 1
    report = await replay(store, run_id, config(Named("brought")))
    assert str(report.drift) == "None"
