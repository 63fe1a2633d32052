"""An agent, or tools, as an MCP server.

    await serve_mcp(agent)                           # over stdin and stdout
    await serve_mcp(agent, http="127.0.0.1:8000")    # streamable HTTP, at /mcp
    app = mcp_app([search, weather])                 # an ASGI app to mount elsewhere

An agent is one tool with the parameter ``task``; every call is a run of its own, in its own run log
if the agent has one. Tools are offered as they are. The rules:

- What an agent does (turns, tools) and what a tool reports is progress for the client.
- A client that cancels a call, or disconnects, cancels the run or the tool. Over HTTP before
  version 2026-07-28 of the protocol, a closed connection is not a cancellation: the end of the
  session is, and after half an hour without a request a session ends.
- A failure is a result with ``isError`` and a text that says what happened, never a traceback.
- An agent with an output type has an output schema, and returns structured content.
- With `elicited_approval` and `elicited_answer`, an `ApprovalGate` and ``ask_user`` ask the user of
  the client by elicitation. A client that cannot do that gets a refusal that says so.
- SIGTERM ends the server. Runs with a log are let go, and can be resumed; others are cancelled.
- Over stdin and stdout, what tools print goes to stderr. Over HTTP, the server is reachable from
  this machine only unless it has a token, and rejects requests with a foreign ``Host`` or
  ``Origin``.

The protocol is the SDK's, which is loaded when a server is made.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from re import sub
from signal import Signals
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from clark_agent._extras import load_extra
from clark_agent._version import __version__
from clark_agent.agent import Agent
from clark_agent.errors import ConfigError
from clark_agent.mcp.serving_calls import Calls
from clark_agent.mcp.serving_entries import AgentEntry, Entry, tool_entries
from clark_agent.mcp.serving_questions import elicited_answer, elicited_approval
from clark_agent.mcp.serving_transports import http_app, serve_http, serve_stdio
from clark_agent.plugins.base import Plugin
from clark_agent.tools import AgentTool, ToolRegistry

if TYPE_CHECKING:
    import mcp_types as types
    from mcp.server import Server, ServerRequestContext
    from starlette.applications import Starlette

__all__ = [
    "ServerOptions",
    "elicited_answer",
    "elicited_approval",
    "mcp_app",
    "mcp_server",
    "serve_mcp",
]

_QUESTION_TIMEOUT = 600.0
_PATH = "/mcp"


if TYPE_CHECKING:  # costly to create at run time

    class ServerOptions(TypedDict, total=False):
        """The options of `mcp_server`."""

        name: str | None
        instructions: str | None
        description: str | None
        deps: Any
        plugins: Iterable[Plugin]
        tool_timeout: float | None
        question_timeout: float

else:
    ServerOptions = dict


def mcp_server(
    what: Agent[Any, Any] | Iterable[Any],
    *,
    name: str | None = None,
    instructions: str | None = None,
    description: str | None = None,
    deps: Any = None,
    plugins: Iterable[Plugin] = (),
    tool_timeout: float | None = None,
    question_timeout: float = _QUESTION_TIMEOUT,
) -> Server[Any]:
    """Make the SDK's low-level server, for a transport of your own.

    Args:
        what: An agent, or tools (functions too). An agent among tools needs a name.
        name: The name of the server. By default that of the agent, or ``clark-agent``.
        instructions: What clients tell their model about the server.
        description: What the agent can do, for the model that calls it. Only for a single agent:
            tools have their own.
        deps: The dependencies of the agent or of the tools, for every call.
        plugins: Plugins for the calls of tools, such as an `ApprovalGate`. An agent has its own.
        tool_timeout: Seconds that a call of a tool may take, unless the tool has its own timeout.
        question_timeout: Seconds after which a call is cancelled whose client does not answer a
            question. Clients of protocols before 2026-07-28 have no limit over stdin and stdout:
            they hold the call open, and the end of the pipe tells if they are gone.

    Raises `ConfigError`.
    """
    return _Offer(
        what,
        name=name,
        instructions=instructions,
        description=description,
        deps=deps,
        plugins=plugins,
        tool_timeout=tool_timeout,
        question_timeout=question_timeout,
    ).server()


def mcp_app(
    what: Agent[Any, Any] | Iterable[Any],
    *,
    path: str = _PATH,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    **options: Unpack[ServerOptions],
) -> Starlette:
    """Make an ASGI app that serves streamable HTTP at ``path``.

    Requests must name one of the ``hosts`` (such as ``"agents.example.com"`` or
    ``"10.0.0.5:8000"``) in their header ``Host``, and as ``Origin`` if they have one; by default
    this machine. With ``token``, they must have it as bearer token. Mounted in another app, its
    lifespan must run: ``app.router.lifespan_context(app)``. Use one process: a call that asks a
    question waits in the process that runs it.

    Raises `ConfigError`.
    """
    return http_app(_Offer(what, **options).server(), path=path, token=token, hosts=hosts)


async def serve_mcp(
    what: Agent[Any, Any] | Iterable[Any],
    *,
    http: str | None = None,
    path: str = _PATH,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    on_listening: Callable[[str], None] | None = None,
    **options: Unpack[ServerOptions],
) -> Signals | None:
    """Serve until the client closes stdin, or until SIGTERM or Ctrl-C. Return the signal, if any.

    If the client has closed stdout, the next message for it ends the server too.
    With ``http="HOST:PORT"`` over streamable HTTP instead; then the signal has its usual effect
    afterwards. A host that other machines can reach needs a ``token`` and ``hosts``, as in
    `mcp_app`. Port 0 is any free one; ``on_listening`` gets the URL.

    Raises `ConfigError`.
    """
    if http is None and (token is not None or hosts is not None or path != _PATH):
        raise ConfigError("serve_mcp: token, hosts and path need http='HOST:PORT'")
    offer = _Offer(what, **options)
    if http is None:
        return await serve_stdio(offer.server(), offer.stop)
    await serve_http(
        offer.server(),
        offer.stop,
        address=http,
        path=path,
        token=token,
        hosts=hosts,
        on_listening=on_listening,
    )
    return None


class _Offer:
    """What a server offers, and the calls that are under way."""

    def __init__(
        self,
        what: Agent[Any, Any] | Iterable[Any],
        *,
        name: str | None = None,
        instructions: str | None = None,
        description: str | None = None,
        deps: Any = None,
        plugins: Iterable[Plugin] = (),
        tool_timeout: float | None = None,
        question_timeout: float = _QUESTION_TIMEOUT,
    ) -> None:
        seconds: Any = question_timeout
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not 0 < seconds < float("inf"):
            raise ConfigError(f"question_timeout must be a number of seconds, not {seconds!r}")
        self._instructions = instructions
        self._question_timeout = question_timeout
        self._running: set[Calls] = set()
        given: Any = what
        if isinstance(given, Agent):
            if tuple(plugins) or tool_timeout is not None:
                raise ConfigError(
                    "plugins and tool_timeout are for tools; an agent has its own: "
                    "Agent(..., plugins=[...], tool_timeout=...)"
                )
            tool_name = given.name or _tool_name(name or "agent")
            entries: list[Entry] = [
                AgentEntry(given, name=tool_name, description=description, deps=deps)
            ]
            self._title = name or given.name or "clark-agent"
        else:
            if description is not None:
                raise ConfigError("description is for a single agent; tools have their own")
            entries = _many(given, deps=deps, plugins=plugins, tool_timeout=tool_timeout)
            self._title = name or "clark-agent"
        self._entries = {entry.tool.name: entry for entry in entries}

    def stop(self) -> None:
        """Make all calls end: runs with a log are let go."""
        for calls in tuple(self._running):
            calls.stop()

    def server(self) -> Server[Any]:
        """Make the SDK's server."""
        load_extra("mcp", "mcp", "an MCP server")
        from mcp.server import Server
        from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity

        self._tools = [entry.describe() for entry in self._entries.values()]
        server: Server[Any] = Server(
            self._title,
            version=__version__,
            instructions=self._instructions,
            lifespan=self._lifespan,
            get_tool_input_schema=self._input_schema,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
        )
        # What a client sends back is sealed: only the caller that was asked can answer.
        security = RequestStateSecurity.ephemeral(ttl=self._question_timeout)
        server.middleware.append(RequestStateBoundary(security, default_audience=self._title))
        return server

    @asynccontextmanager
    async def _lifespan(self, _: Server[Any]) -> AsyncGenerator[Calls]:
        calls = Calls(question_timeout=self._question_timeout)
        self._running.add(calls)
        try:
            yield calls
        finally:
            self._running.discard(calls)
            await calls.aclose()

    def _input_schema(self, name: str) -> Mapping[str, Any] | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.tool.parameters_schema

    async def _list_tools(
        self, ctx: ServerRequestContext[Calls], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        import mcp_types as types

        return types.ListToolsResult(tools=self._tools)

    async def _call_tool(
        self, ctx: ServerRequestContext[Calls], params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        from mcp.shared.exceptions import MCPError
        from mcp_types import INVALID_PARAMS

        calls, entry = ctx.lifespan_context, self._entries.get(params.name)
        if entry is None:
            known = ", ".join(self._entries)
            text = f"unknown tool {params.name[:100]!r}; the tools are: {known}"
            raise MCPError(code=INVALID_PARAMS, message=text)
        if params.request_state is None:
            arguments = params.arguments or {}
            call = calls.start(
                lambda call: entry.call(arguments, call),
                alone=entry.tool.requires_exclusive_sandbox,
                can_be_resumed=entry.can_be_resumed,
            )
        else:
            waiting = calls.take(params.request_state)
            if waiting is None:
                text = "the call that asked is over; call the tool again without requestState"
                raise MCPError(code=INVALID_PARAMS, message=text)
            call = waiting
            call.answer(params.input_responses)
        return await call.serve(ctx, calls.park)


def _many(
    given: Any, *, deps: Any, plugins: Iterable[Plugin], tool_timeout: float | None
) -> list[Entry]:
    """Return what is offered for tools and agents."""
    if isinstance(given, ToolRegistry):
        given = given.values()
    if isinstance(given, (str, AgentTool)) or not isinstance(given, Iterable):
        raise ConfigError(f"an MCP server offers an Agent, or a list of tools, not {given!r}")
    every = list(given)
    agents: list[Entry] = []
    for each in every:
        if isinstance(each, Agent):
            if each.name is None:
                raise ConfigError("an agent among tools needs a name: Agent(..., name=...)")
            agents.append(AgentEntry(each, name=each.name, description=None, deps=deps))
    tools = [each for each in every if not isinstance(each, Agent)]
    entries = [
        *agents,
        *tool_entries(tools, plugins=plugins, tool_timeout=tool_timeout, deps=deps),
    ]
    names = [entry.tool.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two of the tools have the name {name!r}")
    if not entries:
        raise ConfigError("an MCP server needs an agent, or at least one tool")
    return entries


def _tool_name(text: str) -> str:
    """Make a name that every provider accepts."""
    return sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_")[:64] or "agent"
