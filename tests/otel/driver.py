"""An agent in processes of its own, whose traces go to an OTLP receiver.

    python -m tests.otel.driver begin|resume|serve ENDPOINT [STORE]

``begin``: a parent starts a child, which calls a tool of an MCP server, which is ``serve`` in a
third process. Then the parent is suspended. ``resume`` allows the call, and ends the run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from clark_agent import Agent, BeforeToolCallContext, Suspend, tool
from clark_agent.mcp import McpServer, McpTools, serve_mcp
from clark_agent.otel import instrument
from clark_agent.run_log import Allow, RunLog, SqliteStore, decide, resume, waiting_for
from clark_agent.testing import ScriptedStream, call


def provider(endpoint: str) -> TracerProvider:
    made = TracerProvider()
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    trace.set_tracer_provider(made)
    return made


@tool(reads_only=True)
def stock(item: str) -> str:
    """How many there are."""
    return f"{item}: 3"


@tool
def order(item: str) -> str:
    """Order an item."""
    return f"ordered {item}"


class AskFirst:
    """Suspends the run before an order."""

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | None:
        asks = ctx.tool_call.name == "order" and not ctx.was_allowed
        return Suspend({"summary": "order"}) if asks else None


async def main(what: str, endpoint: str, path: str) -> None:
    instrument()
    if what == "serve":
        await serve_mcp([stock], name="shop")
        return
    store = SqliteStore(path)
    server = McpServer(
        "shop",
        command=sys.executable,
        args=["-m", "tests.otel.driver", "serve", endpoint],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    async with McpTools(server) as tools:
        clerk = Agent(
            ScriptedStream([call("shop_stock", item="tea"), "Three."]),
            tool_source=tools,
            name="clerk",
        )
        script: list[Any] = [call("clerk", task="Tea?"), call("order", item="tea"), "Ordered."]
        buyer = Agent(
            ScriptedStream(script if what == "begin" else script[2:]),
            tools=[clerk.as_tool("Knows the stock."), order],
            plugins=[AskFirst()],
            run_log=RunLog(store),
            name="buyer",
        )
        if what == "begin":
            result = await buyer.run("Buy tea.")
        else:
            (request,) = waiting_for(store)
            await decide(store, request.run_id, request.request_id, Allow())
            result = await resume(store, request.root_run_id, buyer)
    print(result.outcome)


if __name__ == "__main__":
    exporting = provider(sys.argv[2])
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else ""))
    finally:
        exporting.shutdown()
