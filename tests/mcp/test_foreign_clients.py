"""Our server against clients that others wrote, in their own environments."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

from tests.mcp.driving import SAFETY_NET, eventually
from tests.mcp.servers.install import node, python
from tests.transports.servers.child import ROOT, Child

pytestmark = pytest.mark.slow

Need = Callable[..., None]
CLIENTS = Path(__file__).parent / "servers" / "clients"


class Ours:
    """Our server: a command to start it, or the URL where it runs."""

    def __init__(self, journal: Path, url: str | None) -> None:
        self._journal = journal
        self.url = url
        # A client may start it anywhere, and with few variables.
        self.command = [
            *("env", f"PYTHONPATH={ROOT}", sys.executable),
            *("-m", "tests.mcp.servers.ours", str(journal)),
        ]

    @property
    def target(self) -> list[str]:
        return [self.url] if self.url is not None else self.command

    def client(self, **settings: Any) -> Client:
        if self.url is not None:
            return Client(self.url, **settings)
        program, *arguments = self.command
        return Client(StdioServerParameters(command=program, args=arguments), **settings)

    def notes(self) -> list[str]:
        return self._journal.read_text().splitlines() if self._journal.exists() else []


@pytest.fixture(params=["stdio", "http"])
def ours(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ours]:
    journal = tmp_path / "journal.txt"
    if request.param == "stdio":
        yield Ours(journal, None)
        return
    child = Child([sys.executable, "-m", "tests.mcp.servers.ours", str(journal), "http"])
    try:
        port = child.wait_for(r"port (\d+) ", seconds=30)
        yield Ours(journal, f"http://127.0.0.1:{port}/mcp")
    finally:
        child.stop()


async def run(command: list[str], said: str = "", **variables: str) -> str:
    """What a program prints; it must end well."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **variables},
    )
    try:
        async with asyncio.timeout(SAFETY_NET):
            out, errors = await process.communicate(said.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return out.decode()


NAMES = {"add", "draw", "fail", "rest", "helper", "counter", "deployer"}


# --- the official client ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_client(ours: Ours, mode: str) -> None:
    reports: list[str | None] = []

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        reports.append(message)

    async with asyncio.timeout(SAFETY_NET), ours.client(mode=mode) as client:
        listed = (await client.list_tools()).tools
        added = await client.call_tool("add", {"a": 2, "b": 3})
        drawn = await client.call_tool("draw", {})
        failed = await client.call_tool("fail", {})
        wrong = await client.call_tool("add", {"a": "two"})
        answered = await client.call_tool("helper", {"task": "add"}, progress_callback=heard)
        counted = await client.call_tool("counter", {"task": "count"})
        refused = await client.call_tool("deployer", {"task": "deploy"})
    assert {tool.name for tool in listed} == NAMES
    assert text_of(added) == "5"
    assert [block.type for block in drawn.content] == ["text", "image"]
    assert failed.is_error
    assert "the disk is full" in text_of(failed)
    assert wrong.is_error
    assert not answered.is_error
    assert text_of(answered) == "The sum is 42."
    assert any("add" in (message or "") for message in reports), reports
    assert counted.structured_content == {"total": 42}
    assert "elicitation" in text_of(refused)
    assert ours.notes() == []


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_client_is_asked_for_an_approval(ours: Ours, mode: str) -> None:
    questions: list[str] = []

    async def answer(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        questions.append(params.message)
        return types.ElicitResult(action="accept", content={"decision": "once"})

    async with asyncio.timeout(SAFETY_NET):
        async with ours.client(mode=mode, elicitation_callback=answer) as client:
            done = await client.call_tool("deployer", {"task": "deploy"})
    assert not done.is_error
    assert "production" in questions[0]
    assert ours.notes() == ["deployed to production"]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_call_that_the_official_client_cancels(ours: Ours, mode: str) -> None:
    async with asyncio.timeout(SAFETY_NET), ours.client(mode=mode) as client:
        resting = asyncio.create_task(client.call_tool("rest", {"seconds": 600}))
        await eventually(lambda: ours.notes() == ["began"])
        resting.cancel()
        await asyncio.wait([resting])
        await eventually(lambda: ours.notes() == ["began", "cancelled"])
        assert text_of(await client.call_tool("add", {"a": 1})) == "2"


async def test_the_client_of_the_first_version(foreign: Need, ours: Ours) -> None:
    foreign("older")
    calls: list[Any] = [
        ["add", {"a": 2, "b": 3}],
        ["draw", {}],
        ["fail", {}],
        ["helper", {"task": "add"}],
        ["counter", {"task": "count"}],
        ["deployer", {"task": "deploy"}],
    ]
    program = [python("older"), str(CLIENTS / "first_sdk.py"), *ours.target]
    said = json.loads(await run(program, json.dumps(calls) + "\n"))
    assert said["server"] == "ours"
    assert set(said["tools"]) == NAMES
    assert said["read only"] == ["add"]
    added, drawn, failed, answered, counted, deployed = said["results"]
    assert added["content"][0]["text"] == "5"
    assert [block["type"] for block in drawn["content"]] == ["text", "image"]
    assert failed["isError"]
    assert "the disk is full" in failed["content"][0]["text"]
    assert answered["content"][0]["text"] == "The sum is 42."
    assert counted["structuredContent"] == {"total": 42}
    assert not deployed["isError"]
    assert ours.notes() == ["deployed to production"]


# --- clients of others ------------------------------------------------------------------------


async def test_the_inspector(foreign: Need, ours: Ours) -> None:
    foreign("node")
    how = ["--transport", "http"] if ours.url is not None else []
    inspector = [*node("inspector-cli", "build/cli.js"), "--cli", *ours.target, *how, "--method"]
    arguments = ["--tool-arg", "a=40", "--tool-arg", "b=2"]
    listed, added, answered = await asyncio.gather(
        run([*inspector, "tools/list"]),
        run([*inspector, "tools/call", "--tool-name", "add", *arguments]),
        run([*inspector, "tools/call", "--tool-name", "helper", "--tool-arg", "task=add"]),
    )
    assert {tool["name"] for tool in json.loads(listed)["tools"]} == NAMES
    assert json.loads(added)["content"] == [{"type": "text", "text": "42"}]
    assert json.loads(answered)["content"] == [{"type": "text", "text": "The sum is 42."}]


async def test_an_agent_of_another_framework(foreign: Need, ours: Ours) -> None:
    foreign("current")
    calls: list[Any] = [
        ["add", {"a": 2, "b": 3}],
        ["fail", {}],
        ["helper", {"task": "add"}],
        ["counter", {"task": "count"}],
    ]
    program = [python("current"), str(CLIENTS / "other_agent.py"), *ours.target]
    said = json.loads(await run(program, json.dumps(calls) + "\n"))
    assert set(said["tools"]) == NAMES
    assert said["tools"]["add"]["properties"]["a"]["description"] == "The first one."
    returned = dict(said["returned"])
    assert returned["add"] == "5"
    assert "the disk is full" in returned["fail"]
    assert returned["helper"] == "The sum is 42."
    assert "42" in returned["counter"]
    assert said["output"] == "done"


# --- the command line -------------------------------------------------------------------------


async def test_the_command_that_serves_an_agent(foreign: Need) -> None:
    """`clark-agent mcp-serve`, with the inspector and with our own client."""
    foreign("node")
    serve = ["-m", "clark_agent", "mcp-serve", "--agent", "tests.mcp.servers.ours:helper"]
    ours = ["env", f"PYTHONPATH={ROOT}", sys.executable, *serve]
    inspector = [*node("inspector-cli", "build/cli.js"), "--cli", *ours, "--method"]
    task = ["--tool-name", "helper", "--tool-arg", "task=add"]
    answered = await run([*inspector, "tools/call", *task])
    assert json.loads(answered)["content"] == [{"type": "text", "text": "The sum is 42."}]
    parameters = StdioServerParameters(command=ours[0], args=ours[1:])
    async with asyncio.timeout(SAFETY_NET), Client(parameters) as client:
        result = await client.call_tool("helper", {"task": "add"})
    assert text_of(result) == "The sum is 42."


def text_of(result: types.CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, types.TextContent))
