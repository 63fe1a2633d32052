"""The dependencies of a run reach its tools and hooks, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clark_agent import (
    AgentContext,
    AgentMessage,
    Conversation,
    LoopConfig,
    TextContent,
    ToolContext,
    ToolResult,
    TypedTool,
    UserMessage,
    agent_tool,
    run,
    run_child,
    run_continue,
    run_sync,
    stream_run,
    tool,
)
from clark_agent.plugins import (
    AfterToolCallContext,
    BeforeToolCallContext,
    ToolGateContext,
    TransformContext,
)
from clark_agent.plugins.base import RestoreContext
from clark_agent.replay import replay
from clark_agent.run_log import JsonlStore, RunLog, resume
from clark_agent.testing import ScriptedStream, call
from clark_agent.tool_source import ToolSourceContext

if TYPE_CHECKING:
    from decimal import Decimal


class Shop:
    """Neither JSON nor comparable."""

    def __init__(self, name: str) -> None:
        self.name = name


@tool
def shop_name(ctx: ToolContext[Shop]) -> str:
    """The name of the shop."""
    return ctx.deps.name


@tool
async def shop_name_async(ctx: ToolContext[Shop]) -> str:
    """The name of the shop."""
    return ctx.deps.name


class ShopName(TypedTool[Shop]):
    """The name of the shop."""

    name = "shop_name_of_class"

    def run(self, ctx: ToolContext[Shop]) -> str:
        return ctx.deps.name


TOOLS: list[Any] = [shop_name, shop_name_async, ShopName()]


class Hooks:
    """Notes the deps that every hook gets."""

    def __init__(self) -> None:
        self.seen: dict[str, object] = {}

    def on_before_tool_call(self, ctx: BeforeToolCallContext[Shop]) -> None:
        self.seen["before"] = ctx.deps

    def on_after_tool_call(self, ctx: AfterToolCallContext[Shop]) -> None:
        self.seen["after"] = ctx.deps

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext[Shop]
    ) -> Sequence[AgentMessage]:
        self.seen["transform"] = ctx.deps
        return messages

    def next_turn_tool_allowlist(self, ctx: ToolGateContext[Shop]) -> None:
        self.seen["gate"] = ctx.deps

    def restore(self, ctx: RestoreContext[Shop]) -> None:
        self.seen["restore"] = ctx.deps

    def tools_for_turn(self, ctx: ToolSourceContext[Shop]) -> list[Any]:
        self.seen["source"] = ctx.deps
        return []


def config(*script: Any, **settings: Any) -> LoopConfig:
    settings.setdefault("tools", TOOLS)
    return LoopConfig(stream=ScriptedStream([*script]), **settings)


@pytest.mark.parametrize("name", [made.name for made in TOOLS])
async def test_a_tool_has_the_deps_of_its_run(name: str) -> None:
    shop = Shop("Alba")
    result = await run("?", AgentContext(), config(call(name), "Done."), deps=shop)
    assert result.messages[2].plain_text == "Alba"


async def test_every_way_to_run_takes_deps() -> None:
    shop, script = Shop("Alba"), (call("shop_name"), "Done.")
    context = AgentContext(messages=(UserMessage("?"),))
    assert (await run_continue(context, config(*script), deps=shop)).messages[
        1
    ].plain_text == "Alba"
    async with stream_run("?", AgentContext(), config(*script), deps=shop) as stream:
        async for _ in stream:
            pass
    assert stream.result.messages[2].plain_text == "Alba"
    conversation = Conversation(config(*script), deps=shop)
    assert (await conversation.send("?")).messages[2].plain_text == "Alba"
    result = run_sync("?", AgentContext(), config(*script), deps=shop)
    assert result.messages[2].plain_text == "Alba"


async def test_a_loaded_conversation_takes_deps(tmp_path: Path) -> None:
    Conversation(config(), "Be brief.").save(tmp_path / "talk.json")
    loaded = Conversation.load(
        tmp_path / "talk.json", config(call("shop_name"), "Done."), deps=Shop("Alba")
    )
    assert (await loaded.send("?")).messages[2].plain_text == "Alba"


async def test_every_hook_has_the_deps() -> None:
    shop, hooks = Shop("Alba"), Hooks()
    made = config(call("shop_name"), "Done.", plugins=[hooks], tool_source=hooks)
    await run("?", AgentContext(), made, deps=shop)
    assert hooks.seen == dict.fromkeys(["before", "after", "transform", "gate", "source"], shop)


async def test_without_deps_they_are_none() -> None:
    seen: list[object] = []

    @tool
    async def look(ctx: ToolContext) -> None:
        """Look."""
        seen.append(ctx.deps)

    await run("?", AgentContext(), config(call("look"), "Done.", tools=[look]))
    assert seen == [None]


async def test_a_child_inherits_the_deps_or_has_its_own() -> None:
    mine, other = Shop("Alba"), Shop("Bruno")

    @tool
    async def ask_both(ctx: ToolContext[Shop]) -> str:
        """Ask two agents."""
        first = await run_child(ctx, "?", config(call("shop_name"), "Done."))
        second = await run_child(ctx, "?", config(call("shop_name"), "Done."), deps=other)
        return f"{first.messages[2].plain_text} {second.messages[2].plain_text}"

    tools = [
        ask_both,
        agent_tool("inheriting", "An agent.", config(call("shop_name"), _repeat)),
        agent_tool("own", "An agent.", config(call("shop_name"), _repeat), deps=other),
        agent_tool(
            "none", "An agent.", config(call("has_none"), _repeat, tools=[has_none]), deps=None
        ),
    ]
    calls = [call("ask_both"), call("inheriting", task="?"), call("own", task="?")]
    made = config(*calls, call("none", task="?"), "Done.", tools=tools)
    result = await run("?", AgentContext(), made, deps=mine)
    texts = [message.plain_text for message in result.messages if message.role == "tool_result"]
    assert texts == ["Alba Bruno", "Alba", "Bruno", "True"]


@tool
async def has_none(ctx: ToolContext) -> str:
    """Whether there are no dependencies."""
    return str(ctx.deps is None)


def _repeat(request: Any) -> str:
    text: str = request.messages[-1].plain_text
    return text


def logged(folder: Path) -> str:
    texts = [path.read_text() for path in folder.rglob("*.jsonl")]
    assert texts
    return "".join(texts)


async def test_deps_are_not_logged_and_are_given_anew(tmp_path: Path) -> None:
    shop = Shop("a secret name")
    store = JsonlStore(tmp_path)

    @tool
    async def buy(ctx: ToolContext[Shop]) -> ToolResult:
        """Buy."""
        return ToolResult((TextContent(f"{len(ctx.deps.name)} letters"),))

    script = (call("buy"), KeyboardInterrupt("the process ends"), "Done.")
    stream = ScriptedStream([*script])
    made = LoopConfig(stream=stream, tools=[buy], run_log=RunLog(store))
    with pytest.raises(KeyboardInterrupt):
        await run("?", AgentContext(), made, deps=shop)
    (summary,) = store.runs()
    assert "secret" not in logged(tmp_path)

    hooks = Hooks()
    resumed = made.replace(plugins=[hooks])
    result = await resume(store, summary.run_id, resumed, deps=shop)
    assert result.text == "Done."
    assert hooks.seen == dict.fromkeys(["restore", "transform", "gate"], shop)

    again = Hooks()
    await replay(store, summary.run_id, made.replace(plugins=[again]), deps=shop)
    assert again.seen["transform"] is shop


def test_deps_for_a_tool_that_is_called_by_itself() -> None:
    ctx = ToolContext(tool_call_id="c", tool_name="t", deps=Shop("Alba"))
    assert shop_name(ctx) == "Alba"


def test_the_type_of_deps_need_not_exist_at_run_time() -> None:
    @tool
    def total(ctx: ToolContext[Decimal]) -> str:
        """Add up."""
        return str(ctx.deps)

    assert total.schema.parameters["properties"] == {}
