"""Spans of models that plugins ask beside the turn."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from clark_agent import AgentContext, Budget, FunctionPlugin, LoopConfig, Usage, run
from clark_agent.plugins import BeforeRequestContext
from clark_agent.prices import Price
from clark_agent.testing import ScriptedStream, say
from tests.otel.conftest import Telemetry


class Named(ScriptedStream):
    def __init__(self, name: str, text: str) -> None:
        super().__init__([replace(say(text), usage=Usage(1_000_000, 0))], at_end="repeat")
        self.model = name
        self.provider = "openai"


async def test_each_has_its_own_model_and_price(telemetry: Telemetry) -> None:
    other = Named("cheap", "A summary.")

    async def ask(ctx: BeforeRequestContext) -> None:
        await ctx.ask_model("Summarise.")
        await ctx.ask_model("Summarise.", stream=other)

    plugin: Any = FunctionPlugin("before_request", ask)
    prices = {"dear": Price(input=10, output=10), "cheap": Price(input=1, output=1)}
    config = LoopConfig(
        stream=Named("dear", "Done."),
        plugins=[plugin, telemetry.tracing()],
        budget=Budget(cost=100, prices=prices),
    )
    result = await run("Go", AgentContext(), config)
    assert telemetry.tree() == [
        "invoke_agent",
        ".turn",
        "..chat dear",
        "..chat cheap",
        "..chat dear",
    ]
    calls = [dict(span.attributes or {}) for span in telemetry.spans if "chat" in span.name]
    assert [call["clark_agent.cost"] for call in calls] == [10, 1, 10]
    assert [call.get("clark_agent.attempt") for call in calls] == [None, None, 1]
    whole = dict(telemetry.span("invoke_agent").attributes or {})
    assert whole["clark_agent.cost"] == result.cost == 21
    assert "clark_agent.run.retries" not in whole or whole["clark_agent.run.retries"] == 0
