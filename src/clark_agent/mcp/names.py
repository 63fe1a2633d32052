"""The names of tools: those of servers, in the form that every provider accepts.

A name depends on the settings of all servers and on what was listed, not on which server was first.
A name that begins with the prefix of another server belongs to that one: a tool that would have it
gets a suffix. So do tools of several servers with one prefix that would have the same name. A name
that was given stays with its tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import NamedTuple

from clark_agent.mcp.server_config import McpServer
from clark_agent.tools.base import is_tool_name

__all__ = ["ToolNames", "is_wanted"]

_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST = 64
_SUFFIX = 16
"""Too many digits for a server to look for a tool name that gives it the name of another tool."""


def is_wanted(server: McpServer, name: str) -> bool:
    """Whether ``include`` and ``exclude`` let the tool through."""
    if server.include is not None and not any(fnmatchcase(name, p) for p in server.include):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in server.exclude)


class _Owner(NamedTuple):
    server: str
    tool: str
    """The server's own name of the tool."""


class ToolNames:
    """The names of the tools of several servers."""

    def __init__(self, servers: Iterable[McpServer], *, reserved: Iterable[str] = ()) -> None:
        self._prefixes = {server.name: _plain(server.name_prefix) for server in servers}
        self._names: dict[_Owner, str] = {}
        self._owners: dict[str, _Owner] = {name: _Owner("", name) for name in reserved}
        self._claims: dict[str, dict[str, None]] = {}
        """The names that tools could get, and the servers of these tools."""
        self._reasons: dict[_Owner, str] = {}

    def claim(self, server: McpServer, tool: str) -> None:
        """Make known that the server has this tool, before any tool of the list gets its name."""
        owner = _Owner(server.name, tool)
        if owner not in self._names:
            wanted = _wanted(server, tool)
            names = [_with_suffix(wanted, owner)]
            if self._intruded(server.name, wanted) is None:
                names.append(wanted)
            for name in names:
                self._claims.setdefault(name, {})[server.name] = None

    def name_of(self, server: McpServer, tool: str) -> str:
        """The name of the tool. The same each time."""
        owner = _Owner(server.name, tool)
        known = self._names.get(owner)
        if known is not None:
            return known
        wanted = name = _wanted(server, tool)
        is_usable = is_tool_name(wanted)
        reason = self._conflict(owner, wanted) if is_usable else None
        if reason is not None:
            self._reasons[owner] = reason
        if not is_usable or reason is not None or wanted in self._owners:
            length = _SUFFIX
            while (name := _with_suffix(wanted, owner, length)) in self._owners:
                length *= 2
        self._owners[name] = owner
        self._names[owner] = name
        return name

    def problem_of(self, server: McpServer, tool: str) -> str | None:
        """Why the tool has not got the name that it would have without the other servers."""
        owner = _Owner(server.name, tool)
        reason = self._reasons.get(owner)
        return None if reason is None else f"it is named {self._names[owner]!r}: {reason}"

    def _conflict(self, owner: _Owner, wanted: str) -> str | None:
        other = self._intruded(owner.server, wanted)
        if other is not None:
            return f"{wanted!r} begins with the prefix of the server {other!r}"
        holder = self._owners.get(wanted)
        if holder is not None and holder.server != owner.server:
            of = f"a tool of the server {holder.server!r}" if holder.server else "another tool"
            return f"{wanted!r} is the name of {of}"
        others = [name for name in self._claims.get(wanted, ()) if name != owner.server]
        if others:
            return f"the server {others[0]!r} has a tool with the name {wanted!r} too"
        return None

    def _intruded(self, server: str, wanted: str) -> str | None:
        """The server with a longer prefix that the name begins with."""
        own, plain = self._prefixes[server], _plain(wanted)
        for other, prefix in self._prefixes.items():
            if len(prefix) > len(own) and plain.startswith(prefix):
                return other
        return None


def _wanted(server: McpServer, tool: str) -> str:
    return server.name_prefix + server.rename.get(tool, tool)


def _plain(text: str) -> str:
    return _FORBIDDEN.sub("_", text)


def _with_suffix(name: str, owner: _Owner, length: int = _SUFFIX) -> str:
    digest = sha256("\0".join(owner).encode("utf-8", "surrogatepass")).hexdigest()[:length]
    plain = _plain(name)[: _LONGEST - len(digest) - 1]
    return f"{plain}_{digest}" if plain else f"tool_{digest}"
