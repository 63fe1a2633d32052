"""Our server, for clients of others: tools and agents with scripted models.

python -m tests.mcp.servers.ours journal.txt           over stdin and stdout
python -m tests.mcp.servers.ours journal.txt http      over streamable HTTP; prints its port
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

from msgspec import Struct

from clark_agent import Agent, ImageContent, TextContent, ToolResult, tool
from clark_agent.mcp.serving import elicited_approval, mcp_app, serve_mcp
from clark_agent.stream import StreamRequest
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import ApprovalGate
from clark_agent.tools import ToolContext

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)
journal = Path("journal.txt")


def note(text: str) -> None:
    with journal.open("a") as file:
        file.write(text + "\n")


@tool(reads_only=True)
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


@tool
def draw() -> ToolResult:
    """Draw a dot."""
    return ToolResult((TextContent("a dot"), ImageContent(PIXEL, "image/png")))


@tool
def fail() -> str:
    """Fail."""
    raise ValueError("the disk is full")


@tool
async def rest(seconds: float, ctx: ToolContext) -> str:
    """Rest, and say when it begins."""
    note("began")
    await ctx.update("resting")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note("cancelled")
        raise
    return "rested"


@tool
def deploy(place: str) -> str:
    """Deploy to a place."""
    note(f"deployed to {place}")
    return "deployed"


class Sum(Struct):
    """A sum."""

    total: int


def scripted(*steps: Any) -> Any:
    """A model that plays the steps in every run: it looks at how far the run is."""

    def step(request: StreamRequest) -> Any:
        done = sum(message.role == "assistant" for message in request.messages)
        return steps[done]

    return ScriptedStream([step], at_end="repeat")


helper = Agent(
    scripted(call("add", a=20, b=22), "The sum is 42."),
    tools=[add],
    name="helper",
    system_prompt="You add numbers.",
)
counter = Agent(
    scripted(call("finish", total=42)), output=Sum, name="counter", system_prompt="Count."
)
deployer = Agent(
    scripted(call("deploy", place="production"), "I tried."),
    tools=[deploy],
    plugins=[ApprovalGate(elicited_approval())],
    name="deployer",
)
everything = [add, draw, fail, rest, helper, counter, deployer]


def serve_http() -> None:
    import uvicorn

    app = mcp_app(everything, name="ours")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))

    def leave_with_us() -> None:
        sys.stdin.read()
        server.should_exit = True

    async def serve() -> None:
        threading.Thread(target=leave_with_us, daemon=True).start()
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0.01)
        [listening] = server.servers
        print(f"port {listening.sockets[0].getsockname()[1]} ", flush=True)
        await serving

    asyncio.run(serve())


if __name__ == "__main__":
    journal = Path(sys.argv[1])
    if "http" in sys.argv:
        serve_http()
    else:
        asyncio.run(serve_mcp(everything, name="ours"))
