"""ServerLink: one server for one set of runs, with its tools and its connections.

The runs of a link share a connection on each event loop. Its tools belong to no loop: they are
listed by whichever connection is there, and used with that of the loop that calls them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from clark_agent.mcp.connection import Connection
from clark_agent.mcp.definition import Definition, UnusableToolError, definition_of
from clark_agent.mcp.names import ToolNames, is_wanted
from clark_agent.mcp.results import Reader
from clark_agent.mcp.secrets import Redaction
from clark_agent.mcp.server_config import McpServer
from clark_agent.mcp.tool import McpTool

if TYPE_CHECKING:
    from clark_agent.mcp.elicitation import Elicitation
    from clark_agent.mcp.suspended_questions import SuspendingElicitation

__all__ = ["McpProblem", "ServerLink"]

logger = logging.getLogger(__name__)


class McpProblem(Struct, frozen=True):
    """Something that is missing: a server that is away, or a tool that was left out."""

    server: str
    tool: str | None
    """The server's own name of the tool; None if it is about the server."""
    text: str

    def __str__(self) -> str:
        tool = "" if self.tool is None else f"tool {self.tool!r}: "
        return f"MCP server {self.server!r}: {tool}{self.text}"


class ServerLink:
    """A server, for the runs that share ``key``."""

    def __init__(
        self,
        server: McpServer,
        key: str | None,
        *,
        share: str | None,
        headers: Mapping[str, str],
        names: ToolNames,
        elicitation: Elicitation | SuspendingElicitation | None,
        on_open: Callable[[ServerLink], None],
        on_forget: Callable[[ServerLink], None],
    ) -> None:
        self.server = server
        self.key = key
        self._share = share
        self.headers: Mapping[str, str] = headers
        self.redact = Redaction(server)
        self.redact.add_headers(headers)
        self.reader = Reader(
            server.name,
            most=server.max_result_bytes,
            untrusted=server.untrusted,
            redact=self.redact,
        )
        self._tools: tuple[McpTool, ...] = ()
        self._tool_problems: tuple[McpProblem, ...] = ()
        self._listed: tuple[list[Any], Mapping[str | None, str]] | None = None
        """A list that was received, and not used yet."""
        self._names = names
        self._elicitation = elicitation
        self._on_open = on_open
        self._on_forget = on_forget
        self._connections: dict[asyncio.AbstractEventLoop, Connection] = {}
        self._raw: dict[str, Any] = {}
        self._lock = Lock()
        self.was_reported = False
        """Whether the log says that the server cannot be reached."""

    # --- connections --------------------------------------------------------------------------

    @property
    def connection(self) -> Connection:
        """The connection of the running event loop."""
        loop = asyncio.get_running_loop()
        connection = self._connections.get(loop)
        if connection is None or connection.is_closed:
            for other in [other for other in self._connections if other.is_closed()]:
                del self._connections[other]
            connection = self._connections[loop] = Connection(self)
            self._on_open(self)
        return connection

    @property
    def open_connection(self) -> Connection | None:
        """The connection of the running event loop, if there is one."""
        return self._connections.get(asyncio.get_running_loop())

    @property
    def needs_attention(self) -> bool:
        """Whether something must be done before a turn: connect, or list the tools again."""
        connection = self.connection
        connection.use()
        return not connection.was_tried or (
            connection.is_stale and (not connection.is_up or connection.may_list)
        )

    def forget(self, connection: Connection) -> None:
        """The connection was not used for long enough, and closes."""
        for loop, known in [*self._connections.items()]:
            if known is connection:
                del self._connections[loop]
        if not self._connections:
            self._on_forget(self)

    async def close(self) -> None:
        """Close the connections, and wait for that of the running event loop."""
        here = asyncio.get_running_loop()
        connections, self._connections = self._connections, {}
        for loop, connection in connections.items():
            if loop is here:
                await connection.close()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(connection.begin_to_close)

    @property
    def problems(self) -> tuple[McpProblem, ...]:
        """Why something of the server is missing."""
        away = [
            McpProblem(self.server.name, None, connection.problem.text)
            for loop, connection in [*self._connections.items()]
            if connection.problem is not None and not loop.is_closed()
        ]
        away += [
            McpProblem(self.server.name, None, connection.list_problem)
            for connection in [*self._connections.values()]
            if connection.list_problem is not None
        ]
        self._use_list()
        return (*away[:1], *self._tool_problems)

    def elicitation_callback(
        self, connection: Connection
    ) -> Callable[[Any, Any], Awaitable[Any]] | None:
        """What answers the questions of the server; None if nobody does."""
        if self._elicitation is None:
            return None
        return self._elicitation.callback(self.server.name, connection)

    @property
    def suspends(self) -> bool:
        """Whether a question of the server suspends the run."""
        return self._elicitation is not None and self._elicitation.suspends

    def make_auth(self, connection: Connection) -> Any:
        """The authentication of requests."""
        auth = self.server.auth
        make = getattr(auth, "make_auth", None)
        return auth if make is None else make(self.server, connection, self._share)

    # --- tools --------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """List the tools again, if they have changed. What takes long is for a later turn."""
        connection = self.connection
        if connection.is_stale and connection.is_up and connection.may_list:
            await connection.list_again(self.take_tools)

    def take_tools(self, listed: list[Any], left_out: Mapping[str | None, str]) -> None:
        """Use the tools of this list from the next turn on."""
        for given in listed:
            if is_wanted(self.server, given.name):
                self._names.claim(self.server, given.name)
        self._listed = listed, left_out

    @property
    def tools(self) -> tuple[McpTool, ...]:
        """The tools that were last listed. The same object until they change.

        They are made here, and not when a list arrives, so that their names do not depend on which
        server was faster.
        """
        self._use_list()
        return self._tools

    def _use_list(self) -> None:
        with self._lock:
            listed, self._listed = self._listed, None
            if listed is not None:
                self._take_tools(*listed)

    def _take_tools(self, listed: list[Any], left_out: Mapping[str | None, str]) -> None:
        """Known tools keep their place, and their object if they are unchanged."""
        server = self.server
        found: dict[str, McpTool] = {}
        problems = [
            McpProblem(server.name, name, why if name is None else f"left out: {why}")
            for name, why in left_out.items()
            if name is None or is_wanted(server, name)
        ]
        raw: dict[str, Any] = {}
        known = {tool.remote_name: tool for tool in self._tools}
        for given in listed:
            name = given.name
            if name in raw:
                problems.append(McpProblem(server.name, name, "it is listed twice"))
                continue
            raw[name] = given
            if not is_wanted(server, name):
                continue
            if name in known and self._raw.get(name) == given:
                found[name] = known[name]
                continue
            try:
                definition = definition_of(given, strict=server.strict)
            except UnusableToolError as error:
                problems.append(McpProblem(server.name, name, f"left out: {error}"))
                continue
            found[name] = self._tool(name, definition, known.get(name))
        problems += _warnings(server, found)
        problems += [
            McpProblem(server.name, name, text)
            for name in found
            if (text := self._names.problem_of(server, name)) is not None
        ]
        self._raw = raw
        order = [name for name in known if name in found]
        order += [name for name in found if name not in known]
        tools = tuple([found[name] for name in order])
        if tools != self._tools:
            self._tools = tools
        for problem in problems:
            if problem not in self._tool_problems:
                logger.warning("%s", problem)
        self._tool_problems = tuple(problems)

    def _tool(self, name: str, definition: Definition, known: McpTool | None) -> McpTool:
        if known is not None and known.definition == definition:
            return known
        return McpTool(self, self._names.name_of(self.server, name), definition)


def _warnings(server: McpServer, found: Mapping[str, McpTool]) -> list[McpProblem]:
    return [
        McpProblem(server.name, name, f"some providers reject its schema: {'; '.join(texts)}")
        for name, tool in found.items()
        if (texts := tool.definition.warnings)
    ]
