"""Two tools with which the model reads resources: ``list_resources`` and ``read_resource``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clark_agent.errors import McpError
from clark_agent.mcp.content import resource_of, template_of
from clark_agent.mcp.tool import error_result
from clark_agent.tools.base import AgentTool, ToolContext, ToolResult

if TYPE_CHECKING:
    from clark_agent.mcp.link import ServerLink

__all__ = ["RESOURCE_TOOLS", "resource_tools"]

RESOURCE_TOOLS = ("list_resources", "read_resource")

_MOST_LISTED = 200


def resource_tools(links: Sequence[ServerLink]) -> tuple[AgentTool, ...]:
    """The two tools, for these servers."""
    return _ListResources(links), _ReadResource(links)


class _ResourceTool(AgentTool[Any]):
    def __init__(self, links: Sequence[ServerLink]) -> None:
        super().__init__()
        self._links = {link.server.name: link for link in links}
        trusted = all(link.server.trust_annotations for link in links)
        self.reads_only = self.idempotent = trusted

    def _find(self, args: Any) -> ServerLink | ToolResult:
        server = args.get("server") if isinstance(args, dict) else None
        if server is None and len(self._links) == 1:
            return next(iter(self._links.values()))
        link = self._links.get(str(server))
        if link is not None:
            return link
        return ToolResult.error(f"There is no server {server!r}: use one of {[*self._links]}.")

    async def execute(self, args: Any, ctx: ToolContext[Any]) -> ToolResult:
        raise NotImplementedError


class _ListResources(_ResourceTool):
    name = "list_resources"
    description = "List what can be read with read_resource, of one server or of all."
    parameters_schema: dict[str, Any] = {  # noqa: RUF012
        "type": "object",
        "properties": {"server": {"type": "string", "description": "The name of a server."}},
    }

    async def execute(self, args: Any, ctx: ToolContext[Any]) -> ToolResult:
        links = [*self._links.values()]
        if isinstance(args, dict) and args.get("server") is not None:
            found = self._find(args)
            if isinstance(found, ToolResult):
                return found
            links = [found]
        lines: list[str] = []
        for link in links:
            lines += await _lines(link)
        if len(lines) > _MOST_LISTED:
            lines = [*lines[:_MOST_LISTED], f"… and {len(lines) - _MOST_LISTED} more"]
        text = "\n".join(lines) or "There are no resources."
        strangers = [link for link in links if link.server.untrusted]
        return ToolResult.text(strangers[0].reader.quote(text) if strangers else text)


async def _lines(link: ServerLink) -> list[str]:
    async def work(client: Any) -> list[str]:
        from clark_agent.mcp import _sdk

        if client.server_capabilities.resources is None:
            return []
        name = link.server.name
        listed = await _sdk.list_all(client.list_resources, "resources")
        templates = await _sdk.list_all(client.list_resource_templates, "resource_templates")
        resources = [resource_of(name, given) for given in listed]
        patterns = [template_of(name, given) for given in templates]
        lines = [_line(name, r.uri, r.title or r.name, r.description) for r in resources]
        lines += [_line(name, p.uri_template, p.title or p.name, p.description) for p in patterns]
        return lines

    try:
        return await link.connection.request(work, within=link.server.timeout)
    except McpError as error:
        return [f"{link.server.name}: not available ({error.kind})"]


def _line(server: str, uri: str, title: str, description: str | None) -> str:
    about = "" if not description else f" — {' '.join(description.split())[:200]}"
    return f"{server}: {uri} ({title}){about}"


class _ReadResource(_ResourceTool):
    name = "read_resource"
    description = "Read a resource of a server. list_resources says which there are."
    parameters_schema: dict[str, Any] = {  # noqa: RUF012
        "type": "object",
        "properties": {
            "server": {"type": "string", "description": "The name of the server."},
            "uri": {"type": "string", "description": "The URI of the resource."},
        },
        "required": ["uri"],
    }

    async def execute(self, args: Any, ctx: ToolContext[Any]) -> ToolResult:
        found = self._find(args)
        if isinstance(found, ToolResult):
            return found
        uri = str(args.get("uri", ""))

        async def work(client: Any) -> Any:
            return await client.read_resource(uri)

        try:
            result = await found.connection.request(work, within=found.server.timeout)
        except McpError as error:
            return error_result(error, found, self.name)
        content = found.reader.resources(result.contents)
        details = {"kind": "mcp", "server": found.server.name, "resource": uri}
        return ToolResult(content or ToolResult.text("(It is empty.)").content, details=details)
