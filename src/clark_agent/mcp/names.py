"""The names of tools: those of servers, in the form that every provider accepts.

A name depends on the server's settings and the server's own name of the tool only, so that it is
the same in every process. If two tools would have the same name, the later one gets a suffix, and
keeps it.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from hashlib import sha256

from clark_agent.mcp.server_config import McpServer
from clark_agent.tools.base import is_tool_name

__all__ = ["ToolNames", "is_wanted"]

_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST = 64
_SUFFIX = 6


def is_wanted(server: McpServer, name: str) -> bool:
    """Whether ``include`` and ``exclude`` let the tool through."""
    if server.include is not None and not any(fnmatchcase(name, p) for p in server.include):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in server.exclude)


class ToolNames:
    """The names of the tools of several servers."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._owners: dict[str, tuple[str, str]] = {}

    def reserve(self, name: str) -> None:
        """Keep a name free of the tools of servers."""
        self._owners[name] = ("", name)

    def name_of(self, server: McpServer, tool: str) -> str:
        """The name of the tool. The same each time."""
        owner = (server.name, tool)
        known = self._names.get(owner)
        if known is not None:
            return known
        wanted = server.name_prefix + server.rename.get(tool, tool)
        name = wanted if is_tool_name(wanted) else _with_suffix(wanted, owner)
        if self._owners.setdefault(name, owner) != owner:
            name = _with_suffix(wanted, owner)
        self._owners[name] = owner
        self._names[owner] = name
        return name


def _with_suffix(name: str, owner: tuple[str, str]) -> str:
    digest = sha256("\0".join(owner).encode("utf-8", "surrogatepass")).hexdigest()[:_SUFFIX]
    plain = _FORBIDDEN.sub("_", name)[: _LONGEST - _SUFFIX - 1]
    return f"{plain}_{digest}" if plain else f"tool_{digest}"
