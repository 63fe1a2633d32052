"""The HTTP client of a connection: what goes wrong with one request stays with it.

The SDK starts all requests of a connection in one group, so that an error of the transport would
end all of them, and it reads a JSON body whatever its size. Here a request whose connection drops,
or whose answer is compressed or too large, is answered with an error of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import httpx2
import msgspec
from mcp_types import CONNECTION_CLOSED, PARSE_ERROR

from clark_agent._text import describe

__all__ = ["LOST", "NOT_SENT", "HttpClient"]

LOST = "Connection closed"
"""Begins the error of a request whose connection was lost; the same as that of the SDK."""
NOT_SENT = "No connection"
"""Begins the error of a request that has not left this process."""
_EVENTS = "text/event-stream"
_JSON = "application/json"
_UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout)


class HttpClient(httpx2.AsyncClient):
    """A client for one server.

    ``most``: the size of a body that is not a stream of events. ``isolates``: whether errors of the
    transport become answers; asked for each of them.
    """

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None,
        timeout: httpx2.Timeout | None,
        auth: httpx2.Auth | None,
        most: int,
        on_response: Callable[[httpx2.Response], Awaitable[None]],
        isolates: Callable[[], bool],
    ) -> None:
        # A few bytes of a compressed body can stand for gigabytes.
        given = httpx2.Headers({**(headers or {})})
        given["Accept-Encoding"] = "identity"
        super().__init__(
            headers=given,
            timeout=timeout,
            auth=auth,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
            event_hooks={"response": [on_response, self._bound]},
        )
        self._most = most
        self._isolates = isolates

    async def _bound(self, response: httpx2.Response) -> None:
        """Limit the body, before anybody reads it."""
        if not _has_type(response, _EVENTS) or _encoding(response):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream, self._most, _encoding(response))

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request. Errors that belong to a POST are its answer."""
        try:
            response = await super().send(request, **options)
            if request.method == "POST":
                await _read(response)
            return response
        except _BodyError as error:
            return _failed(request, PARSE_ERROR, str(error))
        except httpx2.TransportError as error:
            if request.method != "POST" or not self._isolates():
                raise
            what = NOT_SENT if isinstance(error, _UNSENT) else LOST
            return _failed(request, CONNECTION_CLOSED, f"{what} ({describe(error)})")


class _BodyError(Exception):
    """Why a body is not read."""


class _Bounded(httpx2.AsyncByteStream):
    """A body up to its largest size."""

    def __init__(self, stream: httpx2.AsyncByteStream, most: int, encoding: str) -> None:
        self._stream = stream
        self._most = most
        self._encoding = encoding

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._encoding:
            raise _BodyError(
                f"the answer is compressed ({self._encoding[:40]}), which was not asked for"
            )
        left = self._most
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                raise _BodyError(f"the answer has more than {self._most:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _read(response: httpx2.Response) -> None:
    """Read what the SDK would read as a whole, so that its errors come up here."""
    if _has_type(response, _JSON) or response.is_redirect or _encoding(response):
        try:
            await response.aread()
        except BaseException:
            await response.aclose()
            raise


def _has_type(response: httpx2.Response, kind: str) -> bool:
    said: str = response.headers.get("content-type", "")
    return said.lower().startswith(kind)


def _encoding(response: httpx2.Response) -> str:
    """How the body is compressed; empty if it is not."""
    said: str = response.headers.get("content-encoding", "").strip().lower()
    return "" if said == "identity" else said


def _failed(request: httpx2.Request, code: int, text: str) -> httpx2.Response:
    """An answer with this error, which the SDK gives to the request."""
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": text}}
    return httpx2.Response(
        502,
        headers={"Content-Type": _JSON},
        content=msgspec.json.encode(error),
        request=request,
    )
