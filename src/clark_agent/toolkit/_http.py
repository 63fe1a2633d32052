"""One HTTP GET to an address that was checked before.

A name may resolve to different addresses each time, so the caller must connect to the very address
it has checked: `get` takes the addresses beside the URL and never resolves a name. The ``Host``
header and the TLS handshake use the host name of the URL, which the certificate must match.

httpcore2, the layer below httpx2, speaks HTTP: no redirects, cookies, proxies or retries. This
module decompresses bodies itself, to stop at the size limit. Connections are closed as soon as the
request ends or is cancelled.

This module needs the extra ``web``. It is imported when a page is first fetched.
"""

from __future__ import annotations

import ssl
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpcore2
from httpx2 import Headers
from msgspec import Struct

from clark_agent.toolkit._addresses import Address
from clark_agent.toolkit._url import FetchError, Url

__all__ = ["Response", "get"]

_CONNECT_SECONDS = 10.0
_FIXED = (("Accept-Encoding", "gzip"), ("Connection", "close"))


class Response(Struct, frozen=True):
    """The response of a server."""

    status: int
    headers: Headers
    body: bytes = b""
    cut: str = ""
    """Why the body is incomplete; empty if it is complete."""


async def get(
    url: Url,
    addresses: Sequence[Address],
    *,
    headers: Sequence[tuple[str, str]],
    max_bytes: int,
    wants_body: Callable[[int, Headers], bool],
    tls: ssl.SSLContext | None,
) -> Response:
    """Get the URL from the first address that accepts a connection. Raises `FetchError`.

    The body is read only if ``wants_body(status, headers)`` is true.
    """
    sent = [("Host", url.authority), *headers, *_FIXED]
    async with _answer(url, addresses, sent, tls) as answer:
        found = Headers(answer.headers)
        if not 200 <= answer.status < 600:
            raise FetchError("What answers there does not speak HTTP.")
        if answer.status in (204, 304) or not wants_body(answer.status, found):
            return Response(answer.status, found)
        unpack = _unpacker(found.get("Content-Encoding", ""))
        body, cut = await _body(url, answer, unpack, max_bytes)
        return Response(answer.status, found, body, cut)


@asynccontextmanager
async def _answer(
    url: Url,
    addresses: Sequence[Address],
    headers: Sequence[tuple[str, str]],
    tls: ssl.SSLContext | None,
) -> AsyncGenerator[httpcore2.Response]:
    """Yield the response before its body is read; the connection stays open inside the block."""
    async with AsyncExitStack() as opened:
        backend = _CheckedAddresses(addresses, opened)
        pool = httpcore2.AsyncConnectionPool(ssl_context=tls, network_backend=backend)
        request = httpcore2.Request(
            "GET",
            httpcore2.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target),
            headers=headers,
            extensions={"timeout": {"connect": _CONNECT_SECONDS}},
        )
        await opened.enter_async_context(pool)
        try:
            answer = await pool.handle_async_request(request)
        except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
            raise FetchError(_no_connection(url, error)) from error
        except (httpcore2.ProtocolError, httpcore2.NetworkError, ValueError) as error:
            raise FetchError(_no_answer(url, error)) from error
        yield answer


class _CheckedAddresses(httpcore2.AsyncNetworkBackend):
    """Connects only to the checked addresses, whatever host is requested."""

    def __init__(self, addresses: Sequence[Address], opened: AsyncExitStack) -> None:
        self._addresses = addresses
        self._opened = opened
        backend: Any = httpcore2.AnyIOBackend()  # type checkers do not find its base class
        self._backend: httpcore2.AsyncNetworkBackend = backend

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's name for it
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Return the first connection that succeeds. Every connection is closed at the end."""
        failure: Exception = httpcore2.ConnectError("it has no address")
        for address in self._addresses:
            try:
                stream = await self._backend.connect_tcp(str(address), port, timeout)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
            else:
                self._opened.push_async_callback(stream.aclose)
                return stream
        raise failure


def _no_connection(url: Url, error: BaseException) -> str:
    """Explain why connecting failed. A TLS error is the cause of another error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = f"its certificate is not to be trusted ({cause.verify_message})"
            return f"{url.authority} was not asked: {why}."
        cause = cause.__cause__ or cause.__context__
    reason = "it took too long" if isinstance(error, httpcore2.ConnectTimeout) else str(error)
    return f"Cannot connect to {url.authority}: {reason or 'it was refused'}."


def _no_answer(url: Url, error: Exception) -> str:
    """Describe a response that could not be read. Text from the server is not quoted."""
    reason = str(error)
    if "too long" in reason:
        return "The headers of the answer are too long."
    if isinstance(error, httpcore2.ProtocolError) and "disconnected" in reason:
        return f"{url.authority} broke the connection."
    if isinstance(error, httpcore2.NetworkError):
        return f"{url.authority} broke the connection."
    return "What answers there does not speak HTTP."


# --- the body ---------------------------------------------------------------------------------


async def _body(
    url: Url, answer: httpcore2.Response, unpack: Callable[[bytes, int], bytes], max_bytes: int
) -> tuple[bytes, str]:
    """Return the decompressed body, and why it is incomplete, or an empty text."""
    body, received = bytearray(), 0
    try:
        async for piece in answer.aiter_stream():
            received += len(piece)
            body += unpack(piece, max_bytes + 1 - len(body))
            if max(len(body), received) > max_bytes:
                return bytes(body[:max_bytes]), "the page is longer than can be fetched"
    except (httpcore2.ProtocolError, httpcore2.NetworkError) as error:
        if "illegal" in str(error):
            raise FetchError("The answer comes in chunks that cannot be read.") from error
        if not body:
            raise FetchError(f"{url.authority} broke the connection.") from error
        return bytes(body), "the connection broke before the end of the page"
    except zlib.error as error:
        raise FetchError(f"The answer is packed in a way that cannot be read: {error}.") from error
    return bytes(body), ""


def _unpacker(encoding: str) -> Callable[[bytes, int], bytes]:
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return lambda piece, _: piece
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _Inflating().unpack
    raise FetchError(f"The answer is packed as {encoding[:40]!r}, which was not asked for.")


class _Inflating:
    """Decompresses zlib, or gzip with any number of members. Data after them is ignored."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=47)  # gzip or zlib, by its header
        self._is_first = True
        self._is_over = False

    def unpack(self, piece: bytes, most: int) -> bytes:
        """Decompress a piece, up to ``most`` bytes."""
        unpacked = bytearray()
        while piece and not self._is_over and len(unpacked) < most:
            try:
                unpacked += self._inflate.decompress(piece, most - len(unpacked))
            except zlib.error:
                if self._is_first:
                    raise
                self._is_over = True
            if not self._inflate.eof:
                break
            piece = self._inflate.unused_data
            self._inflate = zlib.decompressobj(wbits=31)
            self._is_first = False
        return bytes(unpacked)
