"""ResourceUpdates: what a server says about changes of a resource, as an async iterator.

Older connections subscribe to a resource, and the updates come with everything else. On current
connections a request stays open for them. Both end with the connection, and begin again with the
next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from clark_agent.errors import McpError

if TYPE_CHECKING:
    from clark_agent.mcp._sdk import Client
    from clark_agent.mcp.connection import Connection
    from clark_agent.mcp.link import ServerLink

__all__ = ["ResourceUpdates"]

_MOST_PENDING = 256
_AGAIN_SECONDS = 5.0
_NO_SUCH_METHOD = -32601


class ResourceUpdates:
    """Yields the URI each time a resource may have changed. `McpTools.resource_updates` makes it.

    Updates of one URI that have not been read yet count once. After a lost connection it yields
    once, because an update may have been missed. It ends when the `McpTools` is closed.
    """

    def __init__(self, link: Callable[[], Awaitable[ServerLink]], uri: str) -> None:
        self._find_link = link
        self._uri = uri
        self.pending: dict[str, None] = {}
        """The URIs of updates that have not been read yet."""
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._link: ServerLink | None = None
        self._has_begun = False

    async def __aenter__(self) -> ResourceUpdates:
        """Subscribe. Raises `McpError` if the server cannot be reached, or refuses."""
        link = self._link = await self._find_link()
        connection = link.connection
        connection.watchers.add(self)
        task = self._task = asyncio.get_running_loop().create_task(self._watch(link, connection))
        task.add_done_callback(lambda _: self._news.set())
        try:
            await self._news.wait()
            if task.done():
                await task
        except BaseException:
            await self._end(connection)
            raise
        self._news.clear()
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._link is not None
        connection = self._link.open_connection
        if connection is not None and self in connection.watchers:
            await self._end(connection)
            if not any(watcher._uri == self._uri for watcher in connection.watchers):
                await self._unsubscribe(connection)
        elif self._task is not None:
            self._task.cancel()

    def __aiter__(self) -> ResourceUpdates:
        return self

    async def __anext__(self) -> str:
        if self._task is None:
            raise RuntimeError("use it in 'async with' first")
        while not self.pending:
            if self._task.done():
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        uri = next(iter(self.pending))
        del self.pending[uri]
        return uri

    def updated(self, uri: str) -> None:
        """Take an update of the server, if it is about this resource or a part of it."""
        rest = uri.removeprefix(self._uri)
        is_part = rest == "" or (rest != uri and (self._uri[-1:] == "/" or rest[0] in "/?#"))
        if is_part and len(self.pending) < _MOST_PENDING:
            self.pending[uri] = None
            self._news.set()

    async def _end(self, connection: Connection) -> None:
        connection.watchers.discard(self)
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()

    async def _unsubscribe(self, connection: Connection) -> None:
        from clark_agent.mcp import _sdk

        if connection.is_up and self._link is not None:
            with suppress(McpError):
                await connection.request(
                    lambda client: _sdk.unsubscribe(client, self._uri),
                    within=self._link.server.timeout,
                )

    async def _watch(self, link: ServerLink, connection: Connection) -> None:
        """Stay subscribed. Fails only before it was, and ends when the connection is closed."""
        while True:
            client: Client | None = None
            try:
                client = await connection.connected()
                await self._watch_client(link, connection, client)
            except McpError as error:
                if self._has_begun:
                    pass
                elif error.code == _NO_SUCH_METHOD:
                    text = "it does not report when its resources change"
                    raise McpError(error.server, text, kind=error.kind, code=error.code) from None
                else:
                    raise
            if connection.is_closed:
                return
            if client is None:  # it cannot be reached
                await connection.changed(within=_AGAIN_SECONDS)
            else:  # the server has ended it, unless the connection is lost
                await connection.lost(client, within=_AGAIN_SECONDS)

    async def _watch_client(self, link: ServerLink, connection: Connection, client: Client) -> None:
        from clark_agent.mcp import _sdk

        def subscribe(client: Client) -> Coroutine[Any, Any, bool]:
            return _sdk.subscribe(client, self._uri)

        if await connection.request(subscribe, within=link.server.timeout):
            self._begin()
            await connection.lost(client)
            return
        try:
            await _sdk.listen_for_resource(client, self._uri, self._begin)
        except Exception as error:
            raise _sdk.failure_of_request(link.server.name, error, _sdk.Hooks()) from None

    def _begin(self) -> None:
        if self._has_begun:
            self.updated(self._uri)
        self._has_begun = True
        self._news.set()
