"""The only module that opens connections with the SDK. It is loaded with the first connection.

Adds to the SDK's transports what a long-lived connection needs: a sign when it ends, and the status
of HTTP errors. `clark_agent.mcp._http` keeps errors of HTTP to their requests,
`clark_agent.mcp._mending` mends what the SDK would refuse as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TextIO

import anyio
import httpx2
import mcp_types as types
from mcp import MCPError
from mcp.client import Client
from mcp.client.auth import OAuthFlowError
from mcp.client.sse import sse_client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND
from pydantic import FileUrl, ValidationError

from clark_agent._text import describe
from clark_agent._version import __version__
from clark_agent.errors import McpError
from clark_agent.mcp._http import LOST, NOT_SENT, HttpClient
from clark_agent.mcp._mending import check_notification, mended_message, mended_tools
from clark_agent.mcp._requests import (
    call_or_ask,
    is_modern,
    list_all,
    list_tools,
    listen_for_resource,
    listen_for_tools,
    set_log_level,
    subscribe,
    unsubscribe,
)
from clark_agent.mcp._sdk_log import is_ours, quieten
from clark_agent.mcp.server_config import McpServer

__all__ = [
    "Client",
    "Hooks",
    "call_or_ask",
    "explain",
    "failure_of_request",
    "is_gone",
    "leaf_of",
    "list_all",
    "list_tools",
    "listen_for_resource",
    "listen_for_tools",
    "open_client",
    "set_log_level",
    "subscribe",
    "types",
    "unsubscribe",
    "was_not_sent",
]

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 30.0
_READ_SECONDS = 300.0
_LARGEST_EVENT = 64 * 1_024 * 1_024
_SESSION_GONE = "Session terminated"
_LONGEST_LOG = 2_000
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "alert": logging.CRITICAL,
    "emergency": logging.CRITICAL,
}
_UNAUTHORIZED = (401, 403)
_LOST = (LOST, "SSE stream ended")


class Hooks:
    """What a connection tells whoever has opened it."""

    def __init__(self) -> None:
        self.on_end: Callable[[], None] = _nothing
        """Called when nothing more can come from the server."""
        self.on_tools_changed: Callable[[], None] = _nothing
        self.on_resource_updated: Callable[[str], None] = _ignore
        self.redact: Callable[[str], str] = str
        self.elicit: Any = None
        self.stderr: TextIO | None = None
        self.status: int | None = None
        """The status of the last HTTP response, if it was an error."""
        self.noise: str | None = None
        """The last thing the server sent that is not a message."""
        self.client: Client | None = None
        self.is_up = False
        """Whether it is connected. Until then, what goes wrong is an error of connecting."""
        self.left_out: dict[str | None, str] = {}
        """Tools that the SDK does not accept, and why."""
        self.server = ""
        self._has_warned = False

    def version(self) -> str | None:
        """The version of the protocol, once it is known."""
        try:
            return None if self.client is None else self.client.session.protocol_version
        except RuntimeError:  # it is connecting
            return None

    def on_noise(self, error: Exception) -> None:
        """Say once that the server sends something that is not a message."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "MCP server %r sends what is not a valid message, which is ignored: %.200s",
                self.server,
                self.redact(_quoted(error)),
            )

    async def on_message(self, message: object) -> None:
        """Take what the SDK does not handle itself."""
        if isinstance(message, types.ToolListChangedNotification):
            self.on_tools_changed()
        elif isinstance(message, types.ResourceUpdatedNotification):
            self.on_resource_updated(message.params.uri)
        elif isinstance(message, Exception):
            self.noise = describe(message)[:500]

    async def on_log(self, params: types.LoggingMessageNotificationParams) -> None:
        """Pass a log message of the server on to `logging`."""
        level = _LEVELS[params.level]
        log = logging.getLogger(f"clark_agent.mcp.server.{self.server}")
        if log.isEnabledFor(level):
            text = params.data if isinstance(params.data, str) else repr(params.data)
            prefix = "" if params.logger is None else f"{params.logger}: "
            log.log(level, "%s", _one_line(self.redact(prefix + text)))

    async def on_response(self, response: httpx2.Response) -> None:
        """Remember the status of errors, which the SDK does not pass on."""
        self.status = response.status_code if response.status_code >= 400 else None


def _nothing() -> None:
    pass


def _ignore(_: str) -> None:
    pass


def _one_line(text: str) -> str:
    """A text of a server, for a log: it cannot pass for lines of others."""
    shown = "".join([c if c.isprintable() else " " for c in text[:_LONGEST_LOG]])
    return shown if len(text) <= _LONGEST_LOG else shown + "…"


def _quoted(error: Exception) -> str:
    """The line that is not a message, or what is wrong with it."""
    if isinstance(error, ValidationError):
        return repr(error.errors(include_url=False)[0].get("input"))
    return describe(error)


quieten()


def open_client(
    server: McpServer, headers: Mapping[str, str], *, auth: httpx2.Auth | None, hooks: Hooks
) -> Client:
    """A client for the server. Entering it connects."""
    hooks.server = server.name
    level: Any = server.log_level
    hooks.client = Client(
        _transport(server, headers, auth, hooks),
        cache=None,
        client_info=types.Implementation(name="clark-agent", version=__version__),
        message_handler=hooks.on_message,
        elicitation_callback=hooks.elicit,
        logging_callback=hooks.on_log,
        log_level=level,
        list_roots_callback=_roots(server) if server.roots else None,
    )
    return hooks.client


def _roots(server: McpServer) -> Any:
    """What answers a server that asks for the folders it may work in."""
    paths = [Path(root).absolute() for root in server.roots]
    roots = [types.Root(uri=FileUrl(path.as_uri()), name=path.name) for path in paths]

    async def list_roots(context: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=roots)

    return list_roots


@asynccontextmanager
async def _transport(
    server: McpServer, headers: Mapping[str, str], auth: httpx2.Auth | None, hooks: Hooks
) -> AsyncGenerator[Any]:
    is_ours.set(True)
    if server.command is not None:
        parameters = StdioServerParameters(
            command=server.command,
            args=list(server.args),
            env=dict(server.env or {}),
            cwd=None if server.cwd is None else str(server.cwd),
            encoding_error_handler="replace",  # with "strict", one bad byte ends the connection
        )
        assert hooks.stderr is not None
        async with stdio_client(parameters, errlog=hooks.stderr) as (reading, writing):
            hooks.stderr.close()
            yield _Watched(reading, hooks), writing
        return
    assert server.url is not None
    read = max(_READ_SECONDS, server.timeout + _WAIT_SECONDS)
    timeout = httpx2.Timeout(_WAIT_SECONDS, read=read)
    most = max(_LARGEST_EVENT, 8 * server.max_result_bytes)
    if server.transport == "sse":

        def factory(
            headers: dict[str, str] | None = None,
            timeout: httpx2.Timeout | None = None,
            auth: httpx2.Auth | None = None,
        ) -> httpx2.AsyncClient:
            return HttpClient(
                headers=headers,
                timeout=timeout,
                auth=auth,
                most=most,
                on_response=hooks.on_response,
                isolates=lambda: False,
            )

        async with sse_client(
            server.url,
            headers=dict(headers),
            timeout=_WAIT_SECONDS,
            sse_read_timeout=read,
            httpx_client_factory=factory,
            auth=auth,
        ) as (reading, writing):
            yield _Watched(reading, hooks), writing
        return
    client = HttpClient(
        headers=headers,
        timeout=timeout,
        auth=auth,
        most=most,
        on_response=hooks.on_response,
        isolates=lambda: hooks.is_up,
    )
    async with (
        client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=most) as (
            reading,
            writing,
        ),
    ):
        yield _Watched(reading, hooks), writing


class _Watched:
    """The messages of a server, with a sign at their end."""

    def __init__(self, stream: Any, hooks: Hooks) -> None:
        self._stream = stream
        self._hooks = hooks

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                item = await self._stream.__anext__()
            except BaseException:  # its end, or a cancellation of everything around it
                self._hooks.on_end()
                raise
            if isinstance(item, Exception):
                return self._mended(item)
            message = item.message
            if isinstance(message, types.JSONRPCNotification):
                if not self._is_valid(message):
                    continue
            elif isinstance(message, types.JSONRPCResponse) and "tools" in message.result:
                self._mend_tools(message)
            return item

    def _is_valid(self, notification: types.JSONRPCNotification) -> bool:
        try:
            check_notification(notification, self._hooks.version())
        except ValueError as error:
            self._hooks.on_noise(error)
            return False
        return True

    def _mended(self, item: Exception) -> Any:
        made = mended_message(item) if isinstance(item, ValidationError) else item
        if isinstance(made, Exception):
            self._hooks.on_noise(made)
        return made

    def _mend_tools(self, answer: types.JSONRPCResponse) -> None:
        version = self._hooks.version()
        if version is None or not isinstance(answer.result["tools"], list):
            return
        if "content" not in answer.result:
            answer.result, left_out = mended_tools(answer.result, version)
            self._hooks.left_out.update(left_out)

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        self._hooks.on_end()  # nobody reads any more, also if an error of the SDK is the reason
        return await self._stream.__aexit__(*error)


# --- what goes wrong --------------------------------------------------------------------------


def leaf_of(error: BaseException) -> BaseException:
    """The first error of a group that is not another group."""
    while isinstance(error, BaseExceptionGroup):
        leaves = error.exceptions
        error = next((leaf for leaf in leaves if isinstance(leaf, Exception)), leaves[0])
    return error


def explain(server: McpServer, error: BaseException, hooks: Hooks) -> str:
    """Why the server cannot be reached, and what to do."""
    match error:
        case McpError():
            return error.text
        case OAuthFlowError():
            return f"the login has failed: {describe(error)}"
        case FileNotFoundError() | NotADirectoryError() if server.command is not None:
            return (
                f"cannot start {server.command!r}: there is no such program, or no such folder to "
                "start it in; install it, or correct command, cwd or PATH"
            )
        case PermissionError() if server.command is not None:
            return f"cannot start {server.command!r}: it may not be executed by this user"
        case ValidationError():
            return "the server does not follow the protocol: " + describe(error)[:300]
        case OSError() | ValueError() if server.command is not None:
            return f"cannot start {server.command!r}: {describe(error)}"
        case _ if hooks.status in _UNAUTHORIZED:
            return (
                f"{server.address} does not accept the credentials (status {hooks.status}); check "
                "headers or auth"
            )
        case _ if hooks.status is not None:
            return f"{server.address} answered with status {hooks.status}; check the url"
        case httpx2.ConnectError() | httpx2.ConnectTimeout():
            return f"cannot connect to {server.address}: {describe(error)}; check the url"
        case MCPError() if _is_lost(error) and server.command is not None:
            return f"the program {server.command!r} has ended, or has closed its output"
        case MCPError() if _is_lost(error):
            return f"{server.address} has closed the connection"
        case MCPError(error=data):
            return f"the server refuses the connection ({data.code}): {data.message}"
        case _:
            return describe(error)


def was_not_sent(error: BaseException) -> bool:
    """Whether the server cannot be reached any more, and has not received the request."""
    return isinstance(error, MCPError) and _says(error, NOT_SENT)


def is_gone(error: BaseException, client: Client, hooks: Hooks) -> bool:
    """Whether the server has forgotten the session, so that it has not carried out the request."""
    if not isinstance(error, MCPError) or _is_lost(error):
        return False
    if error.message == _SESSION_GONE and error.code == INVALID_REQUEST:
        return True
    is_about_it = error.code not in (METHOD_NOT_FOUND, INVALID_PARAMS)
    return hooks.status == 404 and not is_modern(client) and is_about_it


def _is_lost(error: MCPError) -> bool:
    """Whether the SDK says so. Servers use the same code for errors of their own."""
    return _says(error, *_LOST)


def _says(error: MCPError, *beginnings: str) -> bool:
    return error.code == CONNECTION_CLOSED and error.message.startswith(beginnings)


def failure_of_request(server: str, error: Exception, hooks: Hooks) -> McpError:
    """What a request failed of, in our terms."""
    match error:
        case MCPError() if _is_lost(error):
            return McpError(server, "the connection was lost", kind="connection_lost")
        case MCPError() if was_not_sent(error):
            return McpError(server, error.message)
        case MCPError() if hooks.status in _UNAUTHORIZED:
            text = (
                f"it does not accept the credentials (status {hooks.status}); check headers or auth"
            )
            return McpError(server, text, kind="unauthorized", code=error.code)
        case MCPError(error=data):
            status = f" (status {hooks.status})" if hooks.status is not None else ""
            return McpError(server, data.message + status, kind="protocol_error", code=data.code)
        case ValidationError():
            text = f"the result does not follow the protocol: {describe(error)[:500]}"
            return McpError(server, text, kind="protocol_error")
        case anyio.BrokenResourceError() | anyio.ClosedResourceError() | OSError():
            return McpError(server, "the connection was lost", kind="connection_lost")
        case _:
            return McpError(server, describe(error)[:1_000], kind="protocol_error")
