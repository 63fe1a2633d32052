"""`make bench-mcp`: what a call of a tool of an MCP server adds to the SDK's own `call_tool`.

A server on the official SDK runs in a process of its own. In a run of an agent, one of its tools is
called on one connection, in turns, by the SDK's client and by our `McpTool`, as the loop does it.
What counts is the ratio of the medians.

    python -m benchmarks.mcp_calls [--calls 2000]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
from collections.abc import Awaitable, Callable
from statistics import median
from time import perf_counter
from typing import Any

from clark_agent import Agent, tool
from clark_agent.mcp import McpServer, McpTool, McpTools
from clark_agent.testing import ScriptedStream, call
from clark_agent.tools import ToolContext

ARGUMENTS = {"text": "The quick brown fox jumps over the lazy dog."}
WARM_UP = 50

# --- the server -------------------------------------------------------------------------------


def make_server() -> Any:
    import mcp_types as types
    from mcp.server import Server

    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    echo = types.Tool(name="echo", description="Return a text.", input_schema=schema)

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[echo])

    async def call_tool(ctx: Any, params: Any) -> types.CallToolResult:
        text = params.arguments["text"]
        return types.CallToolResult(content=[types.TextContent(text=text)])

    return Server("echo", on_list_tools=list_tools, on_call_tool=call_tool)


def serve_stdio() -> None:
    from mcp.server.stdio import stdio_server

    async def main() -> None:
        server = make_server()
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    asyncio.run(main())


def serve_http(port: Any) -> None:
    import socket

    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    port.send(listening.getsockname()[1])
    config = uvicorn.Config(make_server().streamable_http_app(), log_level="warning")
    uvicorn.Server(config).run([listening])


# --- the measurement --------------------------------------------------------------------------


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = perf_counter()
    await work()
    return perf_counter() - began


async def compare(server: McpServer, calls: int) -> tuple[float, float]:
    """The median of a call by the SDK, and of one by us, in seconds."""
    times: list[tuple[float, float]] = []
    async with McpTools(server) as tools:
        echo = (await tools.tools())[0]
        assert isinstance(echo, McpTool)
        client = await echo._link.connection.connected()

        @tool
        async def measure(ctx: ToolContext) -> str:
            """Call both in turns."""

            async def sdk() -> None:
                result = await client.call_tool("echo", ARGUMENTS)
                assert not result.is_error

            async def ours() -> None:
                result = await echo.execute(ARGUMENTS, ctx)
                assert not result.is_error

            for number in range(WARM_UP + calls):
                if number % 2:  # neither is always the one that follows the other
                    pair = await timed(sdk), await timed(ours)
                else:
                    second = await timed(ours)
                    pair = await timed(sdk), second
                if number >= WARM_UP:
                    times.append(pair)
            return "done"

        stream = ScriptedStream([call("measure"), "done"])
        await Agent(stream, tools=[measure], tool_source=tools).run("go")
    sdk, ours = zip(*times, strict=True)
    return median(sdk), median(ours)


async def report(calls: int, port: int) -> None:
    print(f"{calls:,} calls in turns on one connection, medians")
    print(f"{'':6}  {'SDK':>10}  {'McpTool':>10}  ratio")
    stdio = [*("-m", "benchmarks.mcp_calls"), "--serve"]
    servers = {
        "stdio": McpServer("bench", command=sys.executable, args=stdio),
        "HTTP": McpServer("bench", url=f"http://127.0.0.1:{port}/mcp"),
    }
    for name, server in servers.items():
        sdk, ours = await compare(server, calls)
        print(f"{name:6}  {sdk * 1e6:7.0f} µs  {ours * 1e6:7.0f} µs  {ours / sdk:5.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--serve", action="store_true", help="be the server, over stdio")
    given = parser.parse_args()
    if given.serve:
        serve_stdio()
        return
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve_http, args=(there,), daemon=True)
    server.start()
    try:
        asyncio.run(report(given.calls, here.recv()))
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
