"""An MCP server over streamable HTTP: the SDK's client, and requests that must be rejected."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
import mcp_types as types
import pytest
import uvicorn
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from clark_agent import Agent
from clark_agent.errors import ConfigError
from clark_agent.mcp.serving import elicited_approval, mcp_app, serve_mcp
from clark_agent.mcp.serving_transports import parse_address
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit.approval import ApprovalGate
from clark_agent.tools import ToolContext

pytestmark = pytest.mark.slow

Mode = Literal["legacy", "auto"]


@pytest.fixture(params=["legacy", "auto"])
def mode(request: pytest.FixtureRequest) -> Mode:
    """The handshake era of the protocol, and that since 2026-07-28."""
    chosen: Mode = request.param
    return chosen


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@asynccontextmanager
async def serving(app: Any) -> AsyncGenerator[str]:
    """Serve the app on a free port, and yield its address."""
    started = asyncio.Event()

    class Started(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    config = uvicorn.Config(
        app, port=0, log_level="warning", timeout_graceful_shutdown=5, ws="none", lifespan="on"
    )
    server = Started(config)
    running = asyncio.create_task(server.serve())
    await asyncio.wait_for(started.wait(), 10)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await running


def texts(result: types.CallToolResult) -> list[str]:
    return [block.text for block in result.content if isinstance(block, types.TextContent)]


async def test_a_call_with_progress(mode: Mode) -> None:
    agent = Agent(ScriptedStream([call("add", a=1, b=2), "3"]), tools=[add], name="sum")
    seen: list[str | None] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        seen.append(message)

    async with serving(mcp_app(agent)) as url, Client(f"{url}/mcp", mode=mode) as client:
        result = await client.call_tool("sum", {"task": "1 + 2"}, progress_callback=note)
    assert texts(result) == ["3"]
    assert seen == ["turn 1", "add: started", "add: done", "turn 2"]


async def test_approvals(mode: Mode) -> None:
    deployed: list[str] = []

    def deploy(target: str) -> str:
        """Deploy."""
        deployed.append(target)
        return "deployed"

    async def elicit(
        context: Any, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        return types.ElicitResult(action="accept", content={"decision": "once"})

    app = mcp_app([deploy], plugins=[ApprovalGate(elicited_approval())])
    async with (
        serving(app) as url,
        Client(f"{url}/mcp", mode=mode, elicitation_callback=elicit) as client,
    ):
        assert texts(await client.call_tool("deploy", {"target": "prod"})) == ["deployed"]
    assert deployed == ["prod"]


async def test_clients_do_not_wait_for_each_others_users() -> None:
    """One user who does not answer must not stop all others."""

    def deploy(target: str) -> str:
        """Deploy."""
        return f"deployed {target}"

    asked, answered = asyncio.Event(), asyncio.Event()

    async def slow(
        context: Any, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        asked.set()
        await answered.wait()
        return types.ElicitResult(action="accept", content={"decision": "once"})

    async def fast(
        context: Any, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        return types.ElicitResult(action="accept", content={"decision": "once"})

    app = mcp_app([deploy], plugins=[ApprovalGate(elicited_approval())])
    async with (
        serving(app) as url,
        Client(f"{url}/mcp", elicitation_callback=slow) as first,
        Client(f"{url}/mcp", elicitation_callback=fast) as second,
    ):
        waiting = asyncio.create_task(first.call_tool("deploy", {"target": "a"}))
        await asked.wait()
        assert texts(await second.call_tool("deploy", {"target": "b"})) == ["deployed b"]
        answered.set()
        assert texts(await waiting) == ["deployed a"]


async def test_cancelling_a_call_cancels_the_tool(mode: Mode) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        """Wait."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async with serving(mcp_app([wait])) as url, Client(f"{url}/mcp", mode=mode) as client:
        calling = asyncio.create_task(client.call_tool("wait", {}))
        await started.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await asyncio.wait_for(ended.wait(), 5)


async def test_a_closed_connection_cancels_the_tool() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(ctx: ToolContext) -> str:
        """Wait."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    request = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "wait", "arguments": {}, "_meta": meta},
    }
    headers = {
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": "2026-07-28",
        "mcp-method": "tools/call",
        "mcp-name": "wait",
    }
    async with serving(mcp_app([wait])) as url:
        async with httpx2.AsyncClient() as client:
            calling = asyncio.create_task(
                client.post(f"{url}/mcp", json=request, headers=headers, timeout=30)
            )
            await asyncio.wait_for(started.wait(), 5)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
        await asyncio.wait_for(ended.wait(), 5)


async def test_the_end_of_a_session_cancels_what_a_closed_connection_does_not() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        """Wait."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    headers = {"accept": "application/json, text/event-stream"}
    async with (
        serving(mcp_app([wait])) as url,
        httpx2.AsyncClient(headers=headers, timeout=30) as client,
    ):

        async def post(method: str, **message: Any) -> httpx2.Response:
            request = {"jsonrpc": "2.0", "method": method, **message}
            return await client.post(f"{url}/mcp", json=request)

        info = {"name": "test", "version": "1"}
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
        opened = await post("initialize", id=1, params=hello)
        client.headers["mcp-session-id"] = opened.headers["mcp-session-id"]
        await post("notifications/initialized")
        calling = asyncio.create_task(
            post("tools/call", id=2, params={"name": "wait", "arguments": {}})
        )
        await asyncio.wait_for(started.wait(), 5)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await post("tools/list", id=3)
        assert not ended.is_set()
        await client.delete(f"{url}/mcp")
        await asyncio.wait_for(ended.wait(), 5)


async def test_a_question_that_is_not_answered_ends_the_call() -> None:
    async def deploy() -> str:
        """Deploy."""
        raise AssertionError

    async def elicit(
        context: Any, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        await asyncio.Event().wait()
        raise AssertionError

    gate = ApprovalGate(elicited_approval())
    app = mcp_app([deploy], plugins=[gate], question_timeout=0.05)
    async with (
        serving(app) as url,
        Client(f"{url}/mcp", mode="legacy", elicitation_callback=elicit) as client,
    ):
        result = await asyncio.wait_for(client.call_tool("deploy", {}), 5)
    assert result.is_error
    assert "the client has not answered a question in time" in texts(result)[0]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
    ],
)
async def test_foreign_hosts_and_origins_are_rejected(headers: dict[str, str], status: int) -> None:
    assert await _status(mcp_app([add]), headers) == status


async def test_hosts_that_are_allowed() -> None:
    app = mcp_app([add], hosts=["agents.example", "other.example:8000"])
    assert await _status(app, {"host": "agents.example"}) == 200
    app = mcp_app([add], hosts=["agents.example", "other.example:8000"])
    assert await _status(app, {"host": "agents.example:99"}) == 200
    app = mcp_app([add], hosts=["agents.example", "other.example:8000"])
    assert await _status(app, {"host": "other.example:99"}) == 421


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic secret", 401),
        ("Bearer secret", 200),
        ("bearer secret", 200),
    ],
)
async def test_a_token(given: str | None, status: int) -> None:
    headers = {} if given is None else {"authorization": given}
    assert await _status(mcp_app([add], token="secret"), headers) == status


async def test_a_client_with_the_token(mode: Mode) -> None:
    async with (
        serving(mcp_app([add], token="secret")) as url,
        httpx2.AsyncClient(headers={"authorization": "Bearer secret"}) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client,
    ):
        assert texts(await client.call_tool("add", {"a": 1, "b": 2})) == ["3"]


async def _status(app: Any, headers: dict[str, str]) -> int:
    info = {"name": "test", "version": "1"}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info}
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    accept = {"accept": "application/json, text/event-stream"}
    async with serving(app) as url, httpx2.AsyncClient() as client:
        response = await client.post(f"{url}/mcp", json=request, headers={**accept, **headers})
        return response.status_code


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"http": "8000"}, "HOST:PORT"),
        ({"http": "127.0.0.1:http"}, "HOST:PORT"),
        ({"http": "::1:8000"}, "brackets"),
        ({"http": "[::1:8000"}, "HOST:PORT"),
        ({"http": "http://127.0.0.1:8000"}, "HOST:PORT"),
        ({"http": "127.0.0.1 :8000"}, "HOST:PORT"),
        ({"http": "0.0.0.0:8000"}, "needs a token"),
        ({"http": "0.0.0.0:8000", "token": "x"}, "names that clients use"),
        ({"token": "x"}, "need http"),
        ({"http": "127.0.0.1:0", "token": " "}, "token is empty"),
        ({"http": "127.0.0.1:0", "hosts": "a"}, "must be a list"),
        ({"http": "127.0.0.1:0", "hosts": [""]}, "expected a host"),
        ({"http": "127.0.0.1:0", "hosts": ["*"]}, "expected a host"),
        ({"http": "127.0.0.1:0", "hosts": ["::1"]}, "expected a host"),
        ({"http": "127.0.0.1:0", "hosts": ["a.b,c.d"]}, "expected a host"),
        ({"http": "127.0.0.1:0", "hosts": ["a.b:x"]}, "expected a host"),
        ({"http": "127.0.0.1:0", "path": "mcp"}, "slash"),
    ],
)
async def test_wrong_settings(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        await serve_mcp([add], **options)


async def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="Address already in use; choose another port"):
            await serve_mcp([add], http=address, on_listening=pytest.fail)


def test_addresses() -> None:
    assert parse_address("localhost:80") == ("localhost", 80)
    assert parse_address("[::1]:80") == ("[::1]", 80)


PROGRAM = """
import asyncio, sys
from pathlib import Path
from clark_agent.mcp.serving import serve_mcp

async def wait() -> str:
    "Wait."
    Path(sys.argv[1], "started").touch()
    try:
        await asyncio.Event().wait()
    finally:
        Path(sys.argv[1], "ended").touch()
    return ""

def tell(url: str) -> None:
    print(url, flush=True)

asyncio.run(serve_mcp([wait], http="127.0.0.1:0", on_listening=tell))
"""


def _await(is_so: Callable[[], bool]) -> None:
    """Wait until another process has done something."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_sigterm_ends_calls_and_the_server(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(PROGRAM)
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    url = (await asyncio.wait_for(server.stdout.readline(), 30)).decode().strip()
    async with Client(url) as client:
        calling = asyncio.create_task(client.call_tool("wait", {}))
        await asyncio.to_thread(_await, (tmp_path / "started").exists)
        os.kill(server.pid, signal.SIGTERM)
        result = await asyncio.wait_for(calling, 30)
    assert result.is_error
    assert texts(result) == ["The call was stopped: the server is stopping."]
    assert await asyncio.wait_for(server.wait(), 30) == -signal.SIGTERM
    assert (tmp_path / "ended").exists()
