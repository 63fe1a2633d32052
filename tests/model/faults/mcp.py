"""Faults of MCP servers as tools."""

from __future__ import annotations

from typing import Any

from clark_agent.mcp.names import ToolNames
from tests.model.faults.base import Fault, breaks

FAULTS = "tests/mcp/test_faults.py::{}"


@breaks(
    "a call that may have happened is sent again",
    FAULTS.format("test_one_that_dies_in_every_call"),
)
def _(fault: Fault) -> None:
    def change(call: Any) -> Any:
        async def call_again(self: Any, *args: Any) -> Any:
            result = await call(self, *args)
            if result.details.get("kind") not in ("mcp_connection_lost", "mcp_timeout"):
                return result
            fault.fired += 1
            return await call(self, *args)

        return call_again

    fault.wrap("server is called", change)


@breaks(
    "a server takes a name that belongs to another one",
    "tests/mcp/test_client.py::test_a_name_with_the_prefix_of_another_server_is_not_given",
)
def _(fault: Fault) -> None:
    """A tool has the name that it would have if there were no other server."""

    def change(name_of: Any) -> Any:
        def alone(self: Any, server: Any, tool: str) -> str:
            name: str = name_of(self, server, tool)
            wanted: str = name_of(ToolNames([server]), server, tool)
            fault.fired += wanted != name
            return wanted

        return alone

    fault.wrap("name of a tool", change)


@breaks(
    "arguments that the schema rejects are sent",
    FAULTS.format("test_arguments_that_the_schema_rejects_are_not_sent"),
)
def _(fault: Fault) -> None:
    def change(_: Any) -> Any:
        def accept(self: Any, args: Any) -> None:
            fault.fired += 1

        return accept

    fault.wrap("arguments for a server", change)


@breaks("a run hangs with a server that hangs", FAULTS.format("test_one_that_hangs"))
def _(fault: Fault) -> None:
    def change(_: Any) -> Any:
        def endless(server: Any) -> float:
            fault.fired += 1
            return 1e6

        return property(endless)

    fault.wrap("time for a server", change)
