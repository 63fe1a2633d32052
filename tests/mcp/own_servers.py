"""Small servers on the official SDK for the tests of the client.

    python tests/mcp/own_servers.py plain|changing|legacy|large

`served` runs one in this process over HTTP; `program` is the command line of one over stdio.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import uvicorn
from mcp.server import Server
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.runner import serve_loop
from mcp.server.stdio import stdio_server


def plain() -> MCPServer:
    """Tools, resources and prompts that do what their names say."""
    server = MCPServer("plain", instructions="Be nice.")

    @server.tool(annotations=types.ToolAnnotations(read_only_hint=True, open_world_hint=False))
    def add(a: int, b: int = 0) -> int:
        """Add two numbers."""
        return a + b

    @server.tool(title="Erase it", annotations=types.ToolAnnotations(destructive_hint=True))
    def erase(what: str) -> str:
        """Erase something."""
        return f"erased {what}"

    @server.tool()
    def fail() -> str:
        """Fail."""
        raise ValueError("it cannot be done")

    @server.tool()
    def variable(name: str) -> str:
        """A variable of the environment."""
        return os.environ.get(name, "(not set)")

    @server.tool()
    def process() -> int:
        """The id of the process."""
        return os.getpid()

    @server.tool()
    def leave() -> str:
        """End the process."""
        os._exit(3)

    @server.tool()
    async def header(name: str, ctx: Context) -> str:
        """A header of the request."""
        headers: Any = ctx.request_context.request.headers  # type: ignore[union-attr]
        return str(headers.get(name, "(none)"))

    @server.tool()
    async def wait(ctx: Context) -> str:
        """Report that it waits, and wait to be cancelled."""
        await ctx.report_progress(1, None, "waiting")
        await asyncio.Event().wait()
        return "never"

    @server.resource("note://today", title="Today")
    def today() -> str:
        """What to do today."""
        return "write tests"

    @server.resource("note://{day}/{number}")
    def note(day: str, number: str) -> str:
        """A note of a day."""
        return f"note {number} of {day}"

    @server.resource("file://picture", mime_type="image/png")
    def picture() -> bytes:
        """A picture."""
        return b"\x89PNG"

    @server.prompt(title="Review")
    def review(code: str) -> str:
        """Review code."""
        return f"Please review: {code}"

    return server


def asking() -> MCPServer:
    """Asks the person during a call, as only connections of the older protocol allow."""
    server = plain()

    @server.tool()
    async def ask(ctx: Context) -> str:
        """Ask the person."""
        schema: Any = FORM
        answer = await ctx.session.elicit_form(message="Who are you?", requested_schema=schema)
        return f"{answer.action} {answer.content}"

    @server.tool()
    async def open_page(ctx: Context) -> str:
        """Ask the person to open a page."""
        answer = await ctx.session.elicit_url(
            message="Sign in", url="https://example.org/sign-in", elicitation_id="1"
        )
        return str(answer.action)

    @server.tool()
    async def ask_and_leave(ctx: Context) -> str:
        """Ask the person, and do not wait for the answer."""
        schema: Any = FORM
        task = asyncio.create_task(
            ctx.session.elicit_form(message="Still there?", requested_schema=schema)
        )
        asking.tasks.add(task)  # type: ignore[attr-defined]
        await ctx.report_progress(1)
        return "left"

    return server


asking.tasks = set()  # type: ignore[attr-defined]


def changing() -> MCPServer:
    """Gets more tools."""
    server = plain()

    @server.tool()
    async def grow(ctx: Context) -> str:
        """Get another tool."""
        names = [tool.name for tool in await server.list_tools()]

        def more() -> str:
            return "more"

        server.add_tool(more, name=f"a{len(names)}", description="More.")
        await ctx.notify_tools_changed()
        return "grown"

    return server


FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "title": "Name", "minLength": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"type": "string", "enum": ["red", "green"]},
        "member": {"type": "boolean", "default": False},
        "mail": {"type": "string", "format": "email"},
    },
    "required": ["name", "age", "colour"],
}


def large(count: int, page: int) -> Server[Any]:
    """A low-level server with many tools on pages."""

    async def list_tools(_: Any, params: Any) -> types.ListToolsResult:
        start = int(params.cursor) if params is not None and params.cursor else 0
        tools = [
            types.Tool(name=f"t{n}", input_schema={"type": "object", "properties": {}})
            for n in range(start, min(start + page, count))
        ]
        more = str(start + page) if start + page < count else None
        return types.ListToolsResult(tools=tools, next_cursor=more)

    async def call_tool(_: Any, params: Any) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(text=params.name)])

    return Server("large", on_list_tools=list_tools, on_call_tool=call_tool)


def program(kind: str) -> dict[str, Any]:
    """The settings of `McpServer` that start one over stdio."""
    return {"command": sys.executable, "args": [__file__, kind]}


@asynccontextmanager
async def served(app: Any, *, port: int = 0) -> AsyncGenerator[str]:
    """Serve an ASGI application on this machine. Yields its origin."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([sock]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def _stdio(server: Server[Any]) -> None:
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


async def _legacy_stdio(server: MCPServer) -> None:
    """Serve only the protocol before 2026."""
    async with stdio_server() as (reading, writing):
        await serve_loop(server._lowlevel_server, reading, writing, lifespan_state={})


if __name__ == "__main__":
    match sys.argv[1]:
        case "plain":
            plain().run()
        case "changing":
            changing().run()
        case "legacy":
            asyncio.run(_legacy_stdio(asking()))
        case "large":
            asyncio.run(_stdio(large(1_000, 50)))
        case other:
            raise SystemExit(f"no such server: {other}")
