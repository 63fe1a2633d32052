"""A server on the official SDK, with what the servers of others lack: work that notices when it is
cancelled, tools that appear and disappear, and questions to the person on current connections.

    python -m tests.mcp.servers.modern journal.txt          over stdio
    python -m tests.mcp.servers.modern journal.txt http     over streamable HTTP; prints its port
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp.server.request_state import RequestStateSecurity
from mcp_types import Completion, PromptReference
from pydantic import BaseModel

journal = Path(sys.argv[1])
# With a key of its own, another process can go on with what this one has begun.
server = MCPServer("modern", request_state_security=RequestStateSecurity(keys=[b"k" * 32]))


def note(text: str) -> None:
    with journal.open("a") as file:
        file.write(text + "\n")


@server.tool()
async def slow(seconds: float) -> str:
    """Take a while."""
    note("began")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note("cancelled")
        raise
    note("finished")
    return "rested"


@server.tool()
async def steps(count: int, ctx: Context) -> str:
    """Report every step."""
    for number in range(1, count + 1):
        await ctx.report_progress(number, count, f"step {number}")
    return f"{count} steps"


@server.tool()
async def add(name: str, ctx: Context) -> str:
    """Add a tool."""

    async def added() -> str:
        return f"this is {name}"

    server.add_tool(added, name=name, description="Say who it is.")
    await ctx.notify_tools_changed()
    return "added"


@server.tool()
async def remove(name: str, ctx: Context) -> str:
    """Remove a tool."""
    server.remove_tool(name)
    await ctx.notify_tools_changed()
    return "removed"


@server.resource("note://today")
def today() -> str:
    """What to do today."""
    return "write tests"


@server.tool()
async def change(uri: str, ctx: Context) -> str:
    """Say that a resource has changed."""
    await ctx.notify_resource_updated(uri)
    return "changed"


@server.tool()
async def report(text: str, ctx: Context) -> str:
    """Write to the log of the client."""
    await ctx.debug(f"debug {text}")  # type: ignore[deprecated]
    await ctx.warning(f"warning {text}", logger_name="modern")  # type: ignore[deprecated]
    return "reported"


@server.tool()
async def leave() -> str:
    """End the process."""
    os._exit(3)


@server.completion()  # type: ignore[no-untyped-call, untyped-decorator]
async def suggest(ref: Any, argument: Any, context: Any) -> Completion | None:
    given = context.arguments if context is not None else {}
    if isinstance(ref, PromptReference) and argument.name == "city":
        return Completion(values=[f"{argument.value}ima", f"of {given.get('state')}"])
    return None


@server.prompt()
def weather(city: str, state: str) -> str:
    """Ask for the weather."""
    return f"How is the weather in {city}, {state}?"


class Name(BaseModel):
    name: str


async def name_of_person() -> Elicit[Name]:
    return Elicit("What is your name?", Name)


@server.tool()
async def greet(person: Annotated[Name, Resolve(name_of_person)]) -> str:
    """Ask for a name, and greet."""
    return f"Hello, {person.name}!"


class Age(BaseModel):
    age: int


async def age_of_person(person: Annotated[Name, Resolve(name_of_person)]) -> Elicit[Age]:
    return Elicit(f"How old is {person.name}?", Age)


@server.tool()
async def register(
    club: str,
    person: Annotated[Name, Resolve(name_of_person)],
    years: Annotated[Age, Resolve(age_of_person)],
) -> str:
    """Ask for a name and then for an age, and register."""
    note("registered")
    return f"{person.name}, {years.age}, is in the {club}"


def serve_http() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"port {listening.getsockname()[1]} ", flush=True)
    app = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="warning"))

    def leave_with_us() -> None:
        sys.stdin.read()
        app.should_exit = True

    threading.Thread(target=leave_with_us, daemon=True).start()
    app.run([listening])


if __name__ == "__main__":
    serve_http() if "http" in sys.argv else server.run("stdio")
