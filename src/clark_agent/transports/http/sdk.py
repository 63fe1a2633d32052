"""Keys of providers, and one client of an SDK for each event loop.

A client keeps connections, which belong to the loop that opened them. A transport that is used from
``asyncio.run`` twice, or by `clark_agent.run_sync`, therefore needs a new client each time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from clark_agent.errors import ConfigError, TransportError
from clark_agent.transports.http.redirects import MOST_REDIRECTS, is_redirect, redirect_target

__all__ = ["LoopLocal", "MissingKeyError", "api_key_from", "given_key", "posted"]

T = TypeVar("T")


class MissingKeyError(ConfigError):
    """No key was passed, and none of the environment variables ``variables`` is set."""

    def __init__(self, needed_by: str, variables: tuple[str, ...]) -> None:
        names = " or ".join(variables)
        super().__init__(f"{needed_by} needs a key: set {names}, or pass api_key")
        self.needed_by = needed_by
        self.variables = variables


def given_key(key: Any) -> str | None:
    """Return the host's key, stripped, or None. Raises `ConfigError` if it is not a string."""
    if key is not None and not isinstance(key, str):
        raise ConfigError(f"api_key must be a string, not {type(key).__name__}")
    return key and key.strip()


def api_key_from(given: str | None, variables: tuple[str, ...], needed_by: str) -> str:
    """Return the given key, or the first environment variable that is set.

    Raises `MissingKeyError` if there is no key.
    """
    for value in (given, *[os.environ.get(name) for name in variables]):
        if value and value.strip():
            return value.strip()
    raise MissingKeyError(needed_by, variables)


@asynccontextmanager
async def posted(
    client: Any, path: str, body: Mapping[str, Any], headers: Mapping[str, Any], **options: Any
) -> AsyncGenerator[AsyncIterator[bytes]]:
    """Send the body with a client of the openai or anthropic package; yield the response's bytes.

    The packages' own methods would transform every message by its type, and follow redirects to
    any host.
    """
    headers = {**headers, "X-Stainless-Raw-Response": "stream"}  # return the raw bytes
    for _ in range(MOST_REDIRECTS):
        try:
            response = await client.post(
                path,
                body=body,
                cast_to=object,
                options={"headers": headers, "follow_redirects": False, **options},
                stream=True,
            )
        except Exception as error:
            path = _moved_to(error)
            continue
        try:
            yield response.iter_bytes()
        finally:
            await response.close()
        return
    raise TransportError(f"the server redirected {MOST_REDIRECTS} times in a row")


def _moved_to(error: Exception) -> str:
    """Return the target of a redirect. Raises the error again if it is not a redirect."""
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    location: Any = response.headers.get("location") if status else None
    if not is_redirect(status, location):
        raise error
    return redirect_target(status, location, str(response.request.url))


class LoopLocal(Generic[T]):
    """One object for each event loop, created on first use and closed with its loop.

    An async generator holds the object, because a loop closes its async generators before it ends.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[Any]]) -> None:
        self._make = make
        self._close = close
        self._kept: WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[T, None]]
        ] = WeakKeyDictionary()

    async def get(self) -> T:
        """Return the object of the running loop; create it on first use."""
        loop = asyncio.get_running_loop()
        kept = self._kept.get(loop)
        if kept is None:
            # A loop that was closed without closing its generators is kept alive by its own entry.
            for gone in [other for other in self._kept if other.is_closed()]:
                del self._kept[gone]
            keeper = self._keep()
            kept = self._kept[loop] = (await anext(keeper), keeper)
        return kept[0]

    async def aclose(self) -> None:
        """Close the object of the running loop, if there is one."""
        kept = self._kept.pop(asyncio.get_running_loop(), None)
        if kept is not None:
            await kept[1].aclose()

    async def _keep(self) -> AsyncGenerator[T, None]:
        loop = asyncio.get_running_loop()
        value = self._make()
        try:
            yield value
        finally:
            # A generator references its loop, so the entry would keep its weak key alive.
            self._kept.pop(loop, None)
            await self._close(value)
