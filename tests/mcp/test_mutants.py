"""Faults of MCP servers as tools change what happens in short stories."""

from __future__ import annotations

from typing import Any

import pytest

from clark_agent.mcp import McpServer, McpTools
from clark_agent.mcp.names import ToolNames
from clark_agent.testing import call
from tests.mcp.conftest import FaultyServers
from tests.mcp.driving import drive
from tests.model.faults import Story, check, promises_of


@pytest.mark.parametrize("promise", promises_of("mcp"))
def test_a_fault_changes_what_a_server_gets(promise: str, faulty: FaultyServers) -> None:
    def called(action: dict[str, Any], **arguments: Any) -> Story:
        """The kind of a result, and how often the server was called."""

        async def story() -> object:
            before = len(faulty.received("tools/call"))
            async with McpTools(faulty({"tools/call": action}, timeout=0.2)) as tools:
                driven = await drive(tools, call("faulty_echo", **arguments))
            (answer,) = driven.answers
            return answer.details["kind"], len(faulty.received("tools/call")) - before

        return story

    async def two_servers() -> object:
        short, long = McpServer("s", command="a"), McpServer("s_x", command="b")
        return ToolNames([short, long]).name_of(short, "x_t")

    async def seconds() -> object:
        return McpServer("s", command="a", timeout=2).timeout

    stories: dict[str, Story] = {
        "a call that may have happened is sent again": called({"die": 1}, text="x"),
        "a server takes a name that belongs to another one": two_servers,
        "arguments that the schema rejects are sent": called({}, wrong=1),
        "a run hangs with a server that hangs": seconds,
    }
    check(promise, stories[promise])
