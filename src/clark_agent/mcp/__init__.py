"""MCP, both ways: the tools of MCP servers for an agent, and an agent as an MCP server.

    async with McpTools(McpServer("time", command="uvx", args=["mcp-server-time"])) as tools:
        agent = Agent("anthropic:…", tool_source=tools)
        print((await agent.run("What time is it in Lima?")).text)

The official SDK speaks the protocol; it is loaded when the first server is connected. This package
knows servers, connections, names, results and what can go wrong with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clark_agent.errors import McpError
    from clark_agent.mcp.auth import FileTokens, OAuth
    from clark_agent.mcp.config_file import load_servers
    from clark_agent.mcp.content import McpPrompt, McpResource, McpResourceTemplate
    from clark_agent.mcp.server_config import McpServer
    from clark_agent.mcp.serving import mcp_app, mcp_server, serve_mcp
    from clark_agent.mcp.tool import McpTool
    from clark_agent.mcp.tool_set import McpProblem, McpTools

__all__ = [
    "FileTokens",
    "McpError",
    "McpProblem",
    "McpPrompt",
    "McpResource",
    "McpResourceTemplate",
    "McpServer",
    "McpTool",
    "McpTools",
    "OAuth",
    "load_servers",
    "mcp_app",
    "mcp_server",
    "serve_mcp",
]

_WHERE = {
    "FileTokens": "clark_agent.mcp.auth",
    "McpError": "clark_agent.errors",
    "McpProblem": "clark_agent.mcp.tool_set",
    "McpPrompt": "clark_agent.mcp.content",
    "McpResource": "clark_agent.mcp.content",
    "McpResourceTemplate": "clark_agent.mcp.content",
    "McpServer": "clark_agent.mcp.server_config",
    "McpTool": "clark_agent.mcp.tool",
    "McpTools": "clark_agent.mcp.tool_set",
    "OAuth": "clark_agent.mcp.auth",
    "load_servers": "clark_agent.mcp.config_file",
    "mcp_app": "clark_agent.mcp.serving",
    "mcp_server": "clark_agent.mcp.serving",
    "serve_mcp": "clark_agent.mcp.serving",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
