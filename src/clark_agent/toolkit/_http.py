"""One HTTP GET to one address that was looked at before.

A name that is resolved twice may resolve to two addresses, so whoever checks an address must
connect to that very one: `get` takes it beside the URL, and never resolves anything. The name in
the ``Host`` header and in the TLS handshake, which the certificate must have, is that of the URL.

httpcore2, which httpx2 stands on, speaks HTTP: there are no redirects, cookies, proxies or retries.
What is packed is unpacked here, because no more may be unpacked than is wanted. Everything is
closed at once when it is over or cancelled.

This module needs the extra ``web``, and is imported when a page is first fetched.
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
    """What a server answered."""

    status: int
    headers: Headers
    body: bytes = b""
    cut: str = ""
    """Why there is more than was read, if there is."""


async def get(
    url: Url,
    addresses: Sequence[Address],
    *,
    headers: Sequence[tuple[str, str]],
    max_bytes: int,
    wants_body: Callable[[int, Headers], bool],
    tls: ssl.SSLContext | None,
) -> Response:
    """Get the URL from the first of the addresses that answers. Raises `FetchError`.

    What ``wants_body`` does not want, by status and headers, is not read.
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
    """The beginning of the answer, as long as the connection is there."""
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
    """Connects to the addresses that were looked at, whatever host it is asked for."""

    def __init__(self, addresses: Sequence[Address], opened: AsyncExitStack) -> None:
        self._addresses = addresses
        self._opened = opened
        backend: Any = httpcore2.AnyIOBackend()  # whose base no type checker finds
        self._backend: httpcore2.AsyncNetworkBackend = backend

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's word for it
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """The first connection that there is. It is closed with the others, come what may."""
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
    """Why there is none. An error of TLS is the cause of another one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = f"its certificate is not to be trusted ({cause.verify_message})"
            return f"{url.authority} was not asked: {why}."
        cause = cause.__cause__ or cause.__context__
    said = "it took too long" if isinstance(error, httpcore2.ConnectTimeout) else str(error)
    return f"There is no connection to {url.authority}: {said or 'it was refused'}."


def _no_answer(url: Url, error: Exception) -> str:
    """What to say of an answer that has no beginning. What the server sent is not quoted."""
    said = str(error)
    if "too long" in said:
        return "The headers of the answer are too long."
    if isinstance(error, httpcore2.ProtocolError) and "disconnected" in said:
        return f"{url.authority} broke the connection."
    if isinstance(error, httpcore2.NetworkError):
        return f"{url.authority} broke the connection."
    return "What answers there does not speak HTTP."


# --- the body ---------------------------------------------------------------------------------


async def _body(
    url: Url, answer: httpcore2.Response, unpack: Callable[[bytes, int], bytes], max_bytes: int
) -> tuple[bytes, str]:
    """The body, unpacked, and why it is less than all, if it is."""
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
    """Unpacks gzip of any number of members, or zlib; what stands behind the last is ignored."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=47)  # gzip or zlib, by its header
        self._is_first = True
        self._is_over = False

    def unpack(self, piece: bytes, most: int) -> bytes:
        """What the piece becomes, but no more than is wanted of it."""
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
