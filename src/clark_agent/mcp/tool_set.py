"""McpTools: the tools of several servers for an agent, as a `clark_agent.tool_source.ToolSource`.

Which link serves a run is decided here; everything about one server is in `ServerLink`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from inspect import isawaitable
from typing import Any, TypeVar

from clark_agent._extras import how_to_install
from clark_agent._text import well_formed
from clark_agent.errors import ConfigError, McpError
from clark_agent.mcp.content import (
    McpPrompt,
    McpResource,
    McpResourceTemplate,
    prompt_messages,
    prompt_of,
    resource_of,
    template_of,
)
from clark_agent.mcp.elicitation import Elicitation, check_elicitation
from clark_agent.mcp.link import McpProblem, ServerLink
from clark_agent.mcp.names import ToolNames
from clark_agent.mcp.resource_tools import RESOURCE_TOOLS, resource_tools
from clark_agent.mcp.server_config import McpServer, bad_header
from clark_agent.mcp.suspended_questions import SuspendingElicitation
from clark_agent.mcp.tool import error_result
from clark_agent.mcp.watching import ResourceUpdates
from clark_agent.tool_source import ToolSourceContext
from clark_agent.toolkit.ask import SUSPEND, AskUser, Suspended
from clark_agent.tools.base import AgentTool, ToolResult
from clark_agent.types import AgentMessage, ToolResultBlock

__all__ = ["McpProblem", "McpTools"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class McpTools:
    """The tools of MCP servers: ``Agent(..., tool_source=McpTools(...))``.

    ``async with`` connects to the servers and closes the connections at its end. Without it, they
    are connected in the first turn, and closed by `aclose` or with the event loop.

    ``ask`` puts the questions of servers (elicitation) to a person; with
    `clark_agent.toolkit.SUSPEND` they suspend the run. ``resources`` adds two tools,
    ``list_resources`` and ``read_resource``, for the model.
    """

    def __init__(
        self,
        *servers: McpServer,
        ask: AskUser | Suspended | None = None,
        resources: bool = False,
    ) -> None:
        self._servers = _checked(servers)
        check_elicitation(ask)
        if find_spec("mcp") is None:
            raise ConfigError(f"McpTools needs the package mcp: {how_to_install('mcp')}")
        self._elicitation: Elicitation | SuspendingElicitation | None = None
        if ask is SUSPEND:
            self._elicitation = SuspendingElicitation()
        elif ask is not None:
            self._elicitation = Elicitation(ask)
        self._names = ToolNames(servers, reserved=RESOURCE_TOOLS if resources else ())
        self._links: dict[tuple[str, str | None], ServerLink] = {}
        self._open: set[ServerLink] = set()
        """The links with connections. A run may still use one that was not used for a while."""
        self._combined: dict[tuple[ServerLink, ...], tuple[Any, tuple[AgentTool, ...]]] = {}
        self._unidentified: dict[str, McpProblem] = {}
        """The servers whose function for ``headers`` or ``share`` has failed last time."""
        self._resources = resources

    @property
    def servers(self) -> tuple[McpServer, ...]:
        """The servers."""
        return tuple(self._servers.values())

    # --- opening and closing ------------------------------------------------------------------

    async def __aenter__(self) -> McpTools:
        try:
            await self._connect([s for s in self._servers.values() if s.is_shared], raises=True)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections, and wait until nothing is left of them. May be called again."""
        links = [*self._open]
        self._open.clear()
        self._links.clear()
        self._combined.clear()
        await asyncio.gather(*[link.close() for link in links])

    async def _connect(self, servers: Sequence[McpServer], *, raises: bool) -> None:
        links = [self._link(server, None, {}) for server in servers]
        await self._first_attempts(links, raises=raises)

    async def _first_attempts(self, links: Sequence[ServerLink], *, raises: bool) -> None:
        """Wait for the links that have not tried to connect yet, at the same time."""
        waiting = [link for link in links if not link.connection.is_up]
        failures = await asyncio.gather(*[link.connection.first_attempt() for link in waiting])
        for link, failure in zip(waiting, failures, strict=True):
            if failure is None:
                continue
            if raises and link.server.required:
                raise failure
            if not link.was_reported:
                link.was_reported = True
                logger.warning("%s", failure)

    # --- as a source of tools -----------------------------------------------------------------

    async def tools_for_turn(self, ctx: ToolSourceContext[Any]) -> Sequence[AgentTool]:
        """The tools of all servers that could be reached, for this run.

        The same object while nothing has changed. Tools of a server that is away stay.
        """
        links: list[ServerLink] = []
        for server in self._servers.values():
            try:
                links.append(await self._link_for(server, ctx))
                self._unidentified.pop(server.name, None)
            except Exception as error:  # of a function for headers or share
                text = error.text if isinstance(error, McpError) else type(error).__name__
                text = f"who uses it could not be found out (headers, share): {text}"
                self._unidentified[server.name] = McpProblem(server.name, None, text)
                logger.exception("mcp server %r: no tools in this turn", server.name)
        return await self._current(tuple(links), raises=False)

    async def tools(self, ctx: ToolSourceContext[Any] | None = None) -> Sequence[AgentTool]:
        """The tools, outside of a run. Raises `McpError` if a required server cannot be reached.

        Without ``ctx``, servers with ``share`` or a function for ``headers`` are left out.
        """
        servers = [s for s in self._servers.values() if ctx is not None or s.is_shared]
        links = [await self._link_for(server, ctx) for server in servers]
        return await self._current(tuple(links), raises=True)

    async def _current(
        self, links: tuple[ServerLink, ...], *, raises: bool
    ) -> tuple[AgentTool, ...]:
        waiting = [link for link in links if link.needs_attention]
        if waiting:
            await self._first_attempts(waiting, raises=raises)
            await asyncio.gather(*[link.refresh() for link in waiting])
        return self._combine(links)

    def _combine(self, links: tuple[ServerLink, ...]) -> tuple[AgentTool, ...]:
        """All tools: known ones in the order they had, then new ones."""
        parts = tuple([link.tools for link in links])
        before, known = self._combined.get(links, ((), ()))
        if len(before) == len(parts) and all(
            old is new for old, new in zip(before, parts, strict=True)
        ):
            return known
        by_name: dict[str, AgentTool] = {}
        for part in parts:
            by_name.update({tool.name: tool for tool in part})
        if self._resources:
            for tool in resource_tools(links):
                by_name[tool.name] = next((t for t in known if t.name == tool.name), tool)
        order = [tool.name for tool in known if tool.name in by_name]
        order += [name for name in by_name if name not in set(order)]
        combined = tuple([by_name[name] for name in order])
        if len(combined) == len(known) and all(map(_is, combined, known)):
            combined = known
        self._combined[links] = (parts, combined)
        return combined

    @property
    def problems(self) -> tuple[McpProblem, ...]:
        """The servers that are away and the tools that were left out, and why."""
        of_links = [problem for link in self._links.values() for problem in link.problems]
        return (*self._unidentified.values(), *of_links)

    # --- which link ---------------------------------------------------------------------------

    async def _link_for(self, server: McpServer, ctx: ToolSourceContext[Any] | None) -> ServerLink:
        """The link of the server for this run."""
        if server.is_shared:
            return self._link(server, None, {})
        if ctx is None:
            raise McpError(
                server.name,
                "it is connected for each user or run (share, headers): pass the context of a run",
            )
        headers: Mapping[str, str] = {}
        if callable(server.headers):
            made = server.headers(ctx)
            headers = dict(await made if isawaitable(made) else made)
            if (name := bad_header(headers)) is not None:
                raise McpError(server.name, f"the value of the header {name!r} is not allowed")
        share = None if server.share is None else server.share(ctx)
        if not isinstance(share, str | None):
            raise McpError(server.name, f"share must return a string, not {type(share).__name__}")
        # Other headers are another identity, whoever shares it: no call goes out with those of
        # another run.
        return self._link(server, f"{share or ''}\n{_digest(headers)}", headers, share)

    def _link(
        self,
        server: McpServer,
        key: str | None,
        headers: Mapping[str, str],
        share: str | None = None,
    ) -> ServerLink:
        link = self._links.get((server.name, key))
        if link is None:
            link = ServerLink(
                server,
                key,
                share=share,
                headers={**_fixed_headers(server), **headers},
                names=self._names,
                elicitation=self._elicitation,
                on_open=self._open.add,
                on_forget=self._forget,
            )
            self._links[server.name, key] = link
        return link

    def _forget(self, link: ServerLink) -> None:
        self._open.discard(link)
        if self._links.get((link.server.name, link.key)) is link:
            del self._links[link.server.name, link.key]
        for links in [links for links in self._combined if link in links]:
            del self._combined[links]

    # --- direct use ---------------------------------------------------------------------------

    async def call(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        ctx: ToolSourceContext[Any] | None = None,
    ) -> ToolResult:
        """Call a tool by the server's own name of it. Raises nothing that a server causes."""
        link = await self._link_for(self._server(server), ctx)
        given = dict(arguments or {})

        async def work(client: Any) -> Any:
            return await client.call_tool(tool, given)

        try:
            result = await link.connection.request(work, within=link.server.timeout)
        except McpError as error:
            return error_result(error, link, tool)
        return link.reader.tool_result(result, tool)

    async def resources(
        self, server: str | None = None, *, ctx: ToolSourceContext[Any] | None = None
    ) -> tuple[McpResource, ...]:
        """What can be read, of one server or of all that have resources. Raises `McpError`."""
        return await self._listed(server, ctx, "resources", "list_resources", resource_of)

    async def resource_templates(
        self, server: str | None = None, *, ctx: ToolSourceContext[Any] | None = None
    ) -> tuple[McpResourceTemplate, ...]:
        """The patterns of further resources. Raises `McpError`."""
        return await self._listed(
            server,
            ctx,
            "resources",
            "list_resource_templates",
            template_of,
            field="resource_templates",
        )

    async def read_resource(
        self, server: str, uri: str, *, ctx: ToolSourceContext[Any] | None = None
    ) -> tuple[ToolResultBlock, ...]:
        """The content of a resource. Raises `McpError`."""
        link = await self._link_for(self._server(server), ctx)

        async def work(client: Any) -> Any:
            return await client.read_resource(uri)

        result = await link.connection.request(work, within=link.server.timeout)
        return link.reader.resources(result.contents)

    async def prompts(
        self, server: str | None = None, *, ctx: ToolSourceContext[Any] | None = None
    ) -> tuple[McpPrompt, ...]:
        """The prompts, of one server or of all that have some. Raises `McpError`."""
        return await self._listed(server, ctx, "prompts", "list_prompts", prompt_of)

    async def prompt(
        self,
        server: str,
        name: str,
        arguments: Mapping[str, str] | None = None,
        *,
        ctx: ToolSourceContext[Any] | None = None,
    ) -> tuple[AgentMessage, ...]:
        """The messages of a prompt, to start a run with. Raises `McpError`."""
        link = await self._link_for(self._server(server), ctx)
        given = dict(arguments or {})

        async def work(client: Any) -> Any:
            return await client.get_prompt(name, given)

        result = await link.connection.request(work, within=link.server.timeout)
        return prompt_messages(link.reader, result)

    async def complete(
        self,
        of: McpPrompt | McpResourceTemplate,
        argument: str,
        value: str = "",
        *,
        given: Mapping[str, str] | None = None,
        ctx: ToolSourceContext[Any] | None = None,
    ) -> tuple[str, ...]:
        """What the server suggests for an argument of a prompt, or a part of a template, that
        begins with ``value``. ``given`` are the arguments that are known. Raises `McpError`.

        Empty if the server suggests nothing.
        """
        link = await self._link_for(self._server(of.server), ctx)

        async def work(client: Any) -> list[str]:
            from clark_agent.mcp import _sdk

            if client.server_capabilities.completions is None:
                return []
            where: Any
            if isinstance(of, McpPrompt):
                where = _sdk.types.PromptReference(name=of.name)
            else:
                where = _sdk.types.ResourceTemplateReference(uri=of.uri_template)
            asked = {"name": argument, "value": value}
            found = await client.complete(where, asked, dict(given) if given else None)
            return list(found.completion.values)

        found = await link.connection.request(work, within=link.server.timeout)
        return tuple([well_formed(text) for text in found])

    def resource_updates(
        self, server: str, uri: str, *, ctx: ToolSourceContext[Any] | None = None
    ) -> ResourceUpdates:
        """Changes of a resource, to read it again:

        async with tools.resource_updates("files", uri) as updates:
            async for changed in updates:
                content = await tools.read_resource("files", changed)
        """
        known = self._server(server)
        return ResourceUpdates(lambda: self._link_for(known, ctx), uri)

    async def instructions(
        self, server: str, *, ctx: ToolSourceContext[Any] | None = None
    ) -> str | None:
        """What the server says about its use, for the system prompt if you trust it. None if it
        says nothing. Raises `McpError`.
        """
        link = await self._link_for(self._server(server), ctx)
        said = (await link.connection.connected()).instructions
        return None if said is None else well_formed(said)

    async def _listed(
        self,
        server: str | None,
        ctx: ToolSourceContext[Any] | None,
        capability: str,
        method: str,
        convert: Callable[[str, Any], T],
        *,
        field: str | None = None,
    ) -> tuple[T, ...]:
        if server is not None:
            wanted = [self._server(server)]
        else:
            wanted = [s for s in self._servers.values() if ctx is not None or s.is_shared]
        links = [await self._link_for(known, ctx) for known in wanted]

        async def of(link: ServerLink) -> list[T]:
            async def work(client: Any) -> list[Any]:
                from clark_agent.mcp import _sdk

                if getattr(client.server_capabilities, capability) is None:
                    return []
                return await _sdk.list_all(getattr(client, method), field or capability)

            found = await link.connection.request(work, within=link.server.timeout)
            return [convert(link.server.name, entry) for entry in found]

        parts: list[list[T]] = []
        outcomes: list[Any] = await asyncio.gather(
            *[of(link) for link in links], return_exceptions=True
        )
        for link, outcome in zip(links, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                parts.append(outcome)
            elif server is not None or link.server.required or not isinstance(outcome, McpError):
                raise outcome
        return tuple([entry for part in parts for entry in part])

    def _server(self, name: str) -> McpServer:
        try:
            return self._servers[name]
        except KeyError:
            known = ", ".join(map(repr, self._servers)) or "none"
            raise ConfigError(f"McpTools has no server {name!r}; it has {known}") from None

    def __repr__(self) -> str:
        return f"<McpTools {', '.join(self._servers)}>"


def _checked(servers: Sequence[Any]) -> dict[str, McpServer]:
    if not servers:
        raise ConfigError("McpTools needs at least one McpServer")
    by_name: dict[str, McpServer] = {}
    for server in servers:
        if not isinstance(server, McpServer):
            raise ConfigError(f"McpTools: {server!r} is not an McpServer")
        if server.name in by_name:
            raise ConfigError(f"McpTools: two servers have the name {server.name!r}")
        by_name[server.name] = server
    return by_name


def _fixed_headers(server: McpServer) -> Mapping[str, str]:
    return server.headers if isinstance(server.headers, Mapping) else {}


def _digest(headers: Mapping[str, str]) -> str:
    """A key for these headers that does not give them away."""
    lines = [f"{name.lower()}: {headers[name]}" for name in sorted(headers)]
    return sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _is(one: object, other: object) -> bool:
    return one is other
