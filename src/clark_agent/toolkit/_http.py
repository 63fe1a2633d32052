"""One HTTP GET to one address that was looked at before.

A name that is resolved twice may resolve to two addresses, so whoever checks an address must
connect to that very one: `get` takes it beside the URL, and never resolves anything. It speaks
HTTP/1.1 over asyncio streams, which a cancellation closes at once, reads no more than it is
told to, and knows lengths, chunks and gzip.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.message import Message
from http.client import HTTPException, parse_headers
from io import BytesIO
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
)
from typing import Final, TypeAlias
from urllib.parse import quote, urlsplit

from msgspec import Struct

from clark_agent.errors import ToolExecutionError

__all__ = ["Address", "FetchError", "Network", "Response", "Url", "get", "is_reachable"]

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_MAX_URL = 4_000
_PIECE = 65_536
_MAX_HEAD = 65_536
_CONNECT_SECONDS = 10.0


class FetchError(ToolExecutionError):
    """The page could not be had; the text says why."""


# --- where to ---------------------------------------------------------------------------------


class Url(Struct, frozen=True):
    """The parts of a URL that a request is made of."""

    scheme: str
    host: str
    port: int
    target: str

    @classmethod
    def parse(cls, text: str) -> Url:
        """Read a URL. Raises `FetchError`, whose text never quotes credentials."""
        text = text.strip()
        if len(text) > _MAX_URL:
            raise FetchError(f"The URL is longer than {_MAX_URL:,} characters.")
        if any(ord(c) < 32 or ord(c) == 127 or c == "\\" for c in text):
            raise FetchError("The URL has control characters or backslashes in it.")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise FetchError("That is no URL: its host or port cannot be read.") from None
        if "@" in parts.netloc:
            raise FetchError(
                "The URL has a user name or password in it, and none is sent. Leave it out."
            )
        if parts.scheme not in ("http", "https"):
            raise FetchError(
                "Only http and https can be fetched. Write the whole URL, such as "
                "https://example.com/page."
            )
        default = 443 if parts.scheme == "https" else 80
        target = quote(parts.path or "/", safe=_SAFE)
        if parts.query:
            target += "?" + quote(parts.query, safe=_SAFE + "?")
        return cls(parts.scheme, _host(parts.hostname), port or default, target)

    @property
    def authority(self) -> str:
        """Host, and port if it is not the usual one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == usual else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


_SAFE: Final = "/%:@!$&'()*+,;=-._~[]"
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?")


def _host(name: str | None) -> str:
    """The name as DNS has it, or an IPv6 address."""
    if name and ":" in name:
        try:
            return str(ip_address(name.partition("%")[0]))
        except ValueError:
            raise FetchError("The URL has no valid host.") from None
    try:
        host = (name or "").encode("idna").decode("ascii").lower()
    except UnicodeError:
        host = ""
    if not _HOST.fullmatch(host) or len(host) > 253:
        raise FetchError("The URL has no valid host.")
    return host.rstrip(".")


# Answers of the cloud to the machine alone, under an address that looks public.
_METADATA = frozenset({ip_address("168.63.129.16")})
_NAT64 = IPv6Network("64:ff9b::/96")


def is_reachable(address: Address, private: Sequence[Network] = ()) -> bool:
    """Whether the address is public, or in one of the networks that are allowed all the same."""
    inner = _inner(address)
    for network in private:
        if address in network or (inner is not None and inner in network):
            return True
    address = address if inner is None else inner
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not getattr(address, "is_site_local", False)
        and address not in _METADATA
    )


def _inner(address: Address) -> IPv4Address | None:
    """The IPv4 address that is meant by one of IPv6."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour


# --- the request ------------------------------------------------------------------------------


class Response(Struct, frozen=True):
    """What a server answered."""

    status: int
    reason: str
    headers: Message
    body: bytes = b""
    is_cut: bool = False
    """Whether there was more than was read."""


async def get(
    url: Url,
    addresses: Sequence[Address],
    *,
    headers: Sequence[tuple[str, str]],
    max_bytes: int,
    wants_body: Callable[[int, Message], bool],
    tls: ssl.SSLContext | None,
) -> Response:
    """Get the URL from the first of the addresses that answers. Raises `FetchError`.

    What ``wants_body`` does not want, by status and headers, is not read.
    """
    reader, writer = await _connect(url, addresses, tls)
    try:
        lines = [f"GET {url.target} HTTP/1.1", f"Host: {url.authority}"]
        lines += [f"{name}: {value}" for name, value in (*headers, *_FIXED)]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        status, reason, found = await _head(reader)
        if status in (204, 304) or not wants_body(status, found):
            return Response(status, reason, found)
        body, is_cut = await _body(reader, found, max_bytes)
        return Response(status, reason, found, body, is_cut)
    except (OSError, asyncio.IncompleteReadError) as error:
        said = "" if isinstance(error, asyncio.IncompleteReadError) else f" ({error})"
        raise FetchError(f"{url.authority} broke the connection{said}.") from error
    finally:
        # Not ``close``: nothing is owed to the server, and it may not want to end.
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


_FIXED = (("Accept-Encoding", "gzip"), ("Connection", "close"))


async def _connect(
    url: Url, addresses: Sequence[Address], tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    failure: BaseException | None = None
    for address in addresses:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await asyncio.open_connection(
                    str(address),
                    url.port,
                    ssl=tls,
                    server_hostname=None if tls is None else url.host,
                    limit=_MAX_HEAD,
                )
        except ssl.SSLCertVerificationError as error:
            why = f"its certificate is not to be trusted ({error.verify_message})"
            raise FetchError(f"{url.authority} was not asked: {why}.") from error
        except OSError as error:  # which a timeout is too
            failure = error
    said = "it took too long" if isinstance(failure, TimeoutError) else str(failure)
    raise FetchError(f"There is no connection to {url.authority}: {said}.") from failure


_STATUS = re.compile(rb"HTTP/1\.[0-9] ([1-5][0-9][0-9])(?: ([^\r\n]*))?\r?\n")


async def _head(reader: asyncio.StreamReader) -> tuple[int, str, Message]:
    """Status, reason and headers of the answer; what a server says before it does not matter."""
    while True:
        first = _STATUS.fullmatch(await _line(reader))
        if first is None:
            raise FetchError("What answers there does not speak HTTP.")
        head = bytearray()
        while (line := await _line(reader)).strip(b"\r\n"):
            head += line
            if len(head) > _MAX_HEAD:
                raise FetchError("The headers of the answer are too long.")
        try:
            headers = parse_headers(BytesIO(head + b"\r\n"))
        except HTTPException as error:
            raise FetchError(f"The headers of the answer cannot be read: {error}.") from error
        status = int(first[1])
        if status >= 200:
            return status, (first[2] or b"").decode("latin-1").strip(), headers


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except ValueError:
        raise FetchError("The headers of the answer are too long.") from None
    if not line.endswith(b"\n"):
        raise asyncio.IncompleteReadError(line, None)
    return line


class _Pieces:
    """The body as it comes, piece by piece."""

    def __init__(self, reader: asyncio.StreamReader, headers: Message) -> None:
        self._reader = reader
        self._in_chunks = "chunked" in headers.get("Transfer-Encoding", "").lower()
        length = headers.get("Content-Length", "").strip()
        self._left = int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None
        """How much there still is, of all or of this chunk; None: until the connection ends."""
        if self._in_chunks:
            self._left = 0

    async def next(self) -> bytes:
        """The next piece; nothing at the end. An end too early raises `IncompleteReadError`."""
        if self._in_chunks and not self._left:
            self._left = await self._chunk_size()
        if self._left == 0:
            return b""
        most = _PIECE if self._left is None else min(self._left, _PIECE)
        piece = await self._reader.read(most)
        if self._left is not None:
            if not piece:
                raise asyncio.IncompleteReadError(b"", self._left)
            self._left -= len(piece)
            if self._in_chunks and not self._left:
                await _line(self._reader)
        return piece

    async def _chunk_size(self) -> int:
        size = (await _line(self._reader)).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", size):
            raise FetchError("The answer comes in chunks that cannot be read.")
        return int(size, 16)


async def _body(
    reader: asyncio.StreamReader, headers: Message, max_bytes: int
) -> tuple[bytes, bool]:
    """The body, unpacked, and whether it is less than all."""
    pieces, unpack = _Pieces(reader, headers), _unpacker(headers.get("Content-Encoding", ""))
    body, received = bytearray(), 0
    try:
        while piece := await pieces.next():
            received += len(piece)
            body += unpack(piece, max_bytes + 1 - len(body))
            if max(len(body), received) > max_bytes:
                return bytes(body[:max_bytes]), True
    except asyncio.IncompleteReadError:
        if not body:
            raise
        return bytes(body), True
    except zlib.error as error:
        raise FetchError(f"The answer is packed in a way that cannot be read: {error}.") from error
    return bytes(body), False


def _unpacker(encoding: str) -> Callable[[bytes, int], bytes]:
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return lambda piece, _: piece
    if encoding in ("gzip", "x-gzip", "deflate"):
        inflate = zlib.decompressobj(wbits=47)  # gzip or zlib, by its header
        return lambda piece, most: inflate.decompress(piece, max(1, most))
    raise FetchError(f"The answer is packed as {encoding[:40]!r}, which was not asked for.")
