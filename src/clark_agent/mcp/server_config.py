"""McpServer: how to reach one MCP server, and what to take from it.

A frozen value that is checked when it is made. It opens nothing, and its ``repr`` shows no
arguments, variables or headers: they may be secrets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from math import isfinite
from os import PathLike, fspath
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct
from msgspec.structs import force_setattr

from clark_agent.errors import ConfigError
from clark_agent.tool_source import ToolSourceContext

__all__ = [
    "HIDDEN",
    "SHORTEST_SECRET",
    "HeadersFn",
    "LogLevel",
    "McpServer",
    "ShareFn",
    "bad_header",
    "shown_url",
]

HeadersFn: TypeAlias = Callable[
    [ToolSourceContext[Any]], Mapping[str, str] | Awaitable[Mapping[str, str]]
]
"""Returns the headers of the requests of a run. Called once a turn.

Contract: plain or async. If it raises, that is logged, and the turn has no tools of this server.
"""

ShareFn: TypeAlias = Callable[[ToolSourceContext[Any]], str]
"""Returns a string: runs with the same string share a connection.

Contract: plain and quick. If it raises, that is logged, and the turn has no tools of this server.
"""

LogLevel: TypeAlias = Literal[
    "debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"
]
"""How important a log message of a server is."""


HIDDEN = "[hidden]"
SHORTEST_SECRET = 8
"""Variables are often words, such as ``debug``, which are in ordinary texts."""


class _Named(Struct, frozen=True):
    name: str


class McpServer(_Named, frozen=True, kw_only=True):
    """One MCP server: a program to start (``command``) or an address (``url``).

    Raises `ConfigError` when it is created with invalid settings.
    """

    command: str | None = None
    """The program to start. It speaks MCP on its standard input and output."""
    args: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    """Variables in addition to the few that a server inherits (PATH, HOME, …)."""
    cwd: str | PathLike[str] | None = None
    url: str | None = None
    """The address. Secrets belong into ``headers``: HTTP libraries log addresses."""
    transport: Literal["http", "sse"] = "http"
    """``sse`` is the older protocol with two endpoints."""
    headers: Mapping[str, str] | HeadersFn | None = None
    """Headers of every request, or a function that returns those of a run."""
    auth: Any = None
    """A `clark_agent.mcp.OAuth`, or any ``httpx2.Auth``."""
    prefix: str | None = None
    """Begins the names of the tools. None: the server's name and ``_``."""
    include: Sequence[str] | None = None
    """Glob patterns of the tools to take, on the server's own names. None: all."""
    exclude: Sequence[str] = ()
    """Glob patterns of the tools to leave out."""
    rename: Mapping[str, str] = {}
    """The server's own name of a tool → its name, without the prefix."""
    timeout: float = 60.0
    """Seconds that a call may take. Time that a person needs for an answer does not count."""
    connect_timeout: float = 30.0
    """Seconds that connecting may take."""
    max_result_bytes: int = 1_000_000
    """The size of a result. More is cut out of texts, and left out of anything else."""
    trust_annotations: bool = False
    """Whether to believe what the server says about its tools: that one only reads, or may be
    called again. `clark_agent.toolkit.ApprovalGate` and resumed runs rely on it."""
    untrusted: bool = True
    """Whether texts of the server are marked with `clark_agent.toolkit.mark_untrusted`."""
    strict: bool = False
    """Whether to send schemas in the strict form, where it is possible."""
    log_level: LogLevel | None = None
    """Ask the server for its log messages from this level on. They go to the logger
    ``clark_agent.mcp.server.NAME``, as do those that a server sends without being asked."""
    roots: Sequence[str | PathLike[str]] = ()
    """Folders that the server may work in, for servers that ask. Not enforced."""
    required: bool = True
    """Whether `McpTools` fails if the server cannot be reached."""
    share: ShareFn | None = None
    """Which runs share a connection, if they have the same headers. None: all."""
    idle_seconds: float = 300.0
    """When a connection that belongs to a user or a run is closed, if it is not used."""
    secrets: Sequence[str] = ()
    """Further texts that errors and logs must not show, such as a key among ``args``. Values of
    ``env`` and ``headers`` and parts of the ``url`` are hidden in any case."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        for what, error in _problems(self):
            raise ConfigError(f"McpServer {self.name!r}: {what} {error}")
        force_setattr(self, "args", tuple(self.args))
        force_setattr(self, "exclude", tuple(self.exclude))
        if self.include is not None:
            force_setattr(self, "include", tuple(self.include))
        if self.cwd is not None:
            force_setattr(self, "cwd", fspath(self.cwd))
        force_setattr(self, "secrets", tuple(self.secrets))
        force_setattr(self, "roots", tuple([fspath(root) for root in self.roots]))

    @property
    def is_shared(self) -> bool:
        """Whether all runs use the same connection."""
        return self.share is None and not callable(self.headers)

    @property
    def name_prefix(self) -> str:
        """What the names of its tools begin with."""
        return f"{self.name}_" if self.prefix is None else self.prefix

    @property
    def address(self) -> str:
        """The program or the URL, for people. Without arguments, user, query, fragment or
        ``secrets``.
        """
        text = self.command if self.command is not None else shown_url(self.url or "")
        for secret in sorted(self.secrets, key=len, reverse=True):
            if len(secret) >= SHORTEST_SECRET:
                text = text.replace(secret, HIDDEN)
        return text

    def __repr__(self) -> str:
        kind = "command" if self.command is not None else "url"
        return f"McpServer({self.name!r}, {kind}={self.address!r}, …)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        kind = "command" if self.command is not None else "url"
        return [("name", self.name), (kind, self.address)]


def shown_url(url: str) -> str:
    """The URL without the parts that may be secret."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"McpServer: the name must be a text that is not blank, not {name!r}")


def _problems(server: McpServer) -> Iterator[tuple[str, str]]:
    """What is wrong with the settings. Values are not quoted: they may be secrets."""
    if (server.command is None) == (server.url is None):
        yield "needs", "either a command (to start it) or a url (to connect to it)"
    if server.command is not None:
        yield from _command_problems(server)
    else:
        yield from _url_problems(server)
    yield from _name_problems(server)
    for what in ("timeout", "connect_timeout", "idle_seconds"):
        seconds = getattr(server, what)
        if not _is_number(seconds) or not isfinite(seconds) or seconds <= 0:
            yield what, f"must be more than 0 seconds, not {seconds!r}"
    most: object = server.max_result_bytes
    if not isinstance(most, int) or isinstance(most, bool) or most < 1_000:
        yield "max_result_bytes", f"must be at least 1000, not {most!r}"
    for what in ("trust_annotations", "untrusted", "strict", "required"):
        if not isinstance(getattr(server, what), bool):
            yield what, f"must be True or False, not {getattr(server, what)!r}"
    level: object = server.log_level
    if level is not None and level not in get_args(LogLevel):
        yield "log_level", f"must be one of {', '.join(get_args(LogLevel))}, not {level!r}"
    if not _are_texts(server.secrets):
        yield "secrets", "must be a list of strings"
    if not _are_paths(server.roots):
        yield "roots", 'must be a list of folders, such as ["/srv/shared"]'
    share: object = server.share
    if share is not None and not callable(share):
        yield "share", "must be a function of ToolSourceContext that returns a string"


def _command_problems(server: McpServer) -> Iterator[tuple[str, str]]:
    if not isinstance(server.command, str) or not server.command.strip():
        yield "command", "must be the name or path of a program"
    if not _are_texts(server.args):
        yield "args", 'must be a list of strings, such as ["--port", "1"]'
    env = server.env
    if env is not None and not _is_text_mapping(env):
        yield "env", "must be a mapping of names to strings"
    for what in ("headers", "auth"):
        if getattr(server, what) is not None:
            yield what, "is for servers with a url; use env for a command"
    if server.transport != "http":
        yield "transport", "is for servers with a url"


def _url_problems(server: McpServer) -> Iterator[tuple[str, str]]:
    url = server.url
    if not isinstance(url, str) or not _is_http(url):
        yield "url", "must be a complete http:// or https:// address"
    if server.transport not in ("http", "sse"):
        yield "transport", f"must be 'http' or 'sse', not {server.transport!r}"
    headers = server.headers
    if headers is not None and not callable(headers) and not _is_text_mapping(headers):
        yield "headers", "must be a mapping of names to strings, or a function that returns one"
    elif isinstance(headers, Mapping) and (name := bad_header(headers)) is not None:
        yield "headers", f"has a character that HTTP does not allow, or a line break, in {name!r}"
    if callable(headers) and server.share is None and hasattr(server.auth, "make_auth"):
        yield (
            "auth",
            "with OAuth keeps a login for each user, but a function for headers does not say who "
            "that is: set share, such as share=lambda ctx: ctx.deps.name",
        )
    for what in ("args", "env", "cwd"):
        if getattr(server, what):
            yield what, "is for servers with a command"


def bad_header(headers: Mapping[str, str]) -> str | None:
    """The name of a header whose value cannot be sent, if there is one. The HTTP library would
    quote the value when it refuses it.
    """
    for name, given in headers.items():
        value: object = given  # of a function, it may be anything
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            return name
    return None


def _name_problems(server: McpServer) -> Iterator[tuple[str, str]]:
    prefix: object = server.prefix
    if prefix is not None and not isinstance(prefix, str):
        yield "prefix", "must be a string or None"
    for what in ("include", "exclude"):
        patterns = getattr(server, what)
        if patterns is not None and not _are_texts(patterns):
            yield what, 'must be a list of patterns, such as ["search*"]'
    if not _is_text_mapping(server.rename):
        yield "rename", "must be a mapping of the server's names to other names"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_texts(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(item, str) for item in value)


def _are_paths(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(item, (str, PathLike)) for item in value)


def _is_text_mapping(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(key, str) and isinstance(item, str) for key, item in value.items())


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
