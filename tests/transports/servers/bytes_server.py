"""A server that answers with the very bytes a test wrote, and breaks off where it says.

    async with ByteServer([Answer(body=[b"data: 1\\n\\n", 0.01, b"data: 2\\n\\n"])]) as server:
        ... talk to server.url ...
    [request] = server.requests

HTTP/1.1 on loopback, with keep-alive. Bodies are sent in chunks, one for each piece, so that a
client can tell a body that ended from one that was cut off.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Self

import msgspec

PATIENCE = 10.0  # seconds until a wait for something that does not come is an error


class Request(msgspec.Struct, frozen=True):
    """What a client sent. Names of headers are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a client gets.

    `body` is written piece by piece; a number is a pause in seconds. After it, or after `cut_after`
    bytes of it, the answer ends as it should, or breaks off:

    - `cut_after`: the connection is closed before the body's end was told
    - `reset`: the connection is reset, so that the client's system reports an error
    - `hold`: nothing more happens until the client goes away

    A `content-length` in the headers is sent as it is, true or not, and the body then in one run
    instead of chunks. With `status` None the client gets neither status nor headers, only how it
    ends.
    """

    status: int | None = 200
    headers: dict[str, str] = {}
    body: bytes | Sequence[bytes | float] = b""
    cut_after: int | None = None
    reset: bool = False
    hold: bool = False


Script = Sequence[Answer] | Callable[[Request], Answer]


class ByteServer:
    """Answers each request from a script: a list, an answer a request, or a function of requests.

    What a script raises, and a request too many for it, is raised when the server is left.
    """

    def __init__(self, script: Script) -> None:
        self.requests: list[Request] = []
        self.open_connections = 0
        self.abandoned = 0  # answers that the client did not wait for the end of
        self._script = script
        self._connections: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._changed = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def client_gone(self, *, times: int = 1) -> None:
        """Wait until a client has left in the middle of an answer, so many times in all."""
        await self._until(lambda: self.abandoned >= times)

    async def all_closed(self) -> None:
        """Wait until no connection is open."""
        await self._until(lambda: self.open_connections == 0)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()
        if self._failures and kind is None:
            raise self._failures[0]

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(condition)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _accept(self) -> asyncio.Protocol:
        gone = asyncio.Event()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(reader, writer, gone))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        return _Watched(asyncio.StreamReader(), connected, gone)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gone: asyncio.Event
    ) -> None:
        self.open_connections += 1
        try:
            while (request := await _read(reader)) is not None:
                self.requests.append(request)
                if not await self._answer(self._choose(request), writer, gone):
                    break
        except Exception as failure:
            self._failures.append(failure)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            self.open_connections -= 1
            await self._tell()

    def _choose(self, request: Request) -> Answer:
        if callable(self._script):
            return self._script(request)
        if len(self.requests) > len(self._script):
            raise AssertionError(f"no answer in the script for {request}")
        return self._script[len(self.requests) - 1]

    async def _answer(
        self, answer: Answer, writer: asyncio.StreamWriter, gone: asyncio.Event
    ) -> bool:
        """Whether the connection is good for another request."""
        writing = asyncio.create_task(_write(answer, writer))
        leaving = asyncio.create_task(gone.wait())
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            # The writer may notice that the client left before the event is set.
            if not writing.done() or isinstance(writing.exception(), ConnectionError):
                self.abandoned += 1
                await self._tell()
                return False
            return writing.result()
        finally:
            writing.cancel()
            leaving.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)


class _Watched(asyncio.StreamReaderProtocol):
    """A connection that tells at once when the client leaves it, also while nobody reads."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
        gone: asyncio.Event,
    ) -> None:
        super().__init__(reader, connected)
        self._gone = gone

    def eof_received(self) -> bool | None:
        self._gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        super().connection_lost(exc)


async def _read(reader: asyncio.StreamReader) -> Request | None:
    """The next request, or None if the client has closed the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, path, _ = first.split(" ")
        pairs = (line.split(":", 1) for line in lines)
        headers = {name.lower(): value.strip() for name, value in pairs}
        if "transfer-encoding" in headers:
            raise NotImplementedError("a request in chunks")
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return Request(method, path, headers, body)


async def _write(answer: Answer, writer: asyncio.StreamWriter) -> bool:
    """Write an answer; whether the connection is good for another.

    Raises `ConnectionError` if the client leaves before the last piece of the body.
    """
    chunked = "content-length" not in {name.lower() for name in answer.headers}
    if answer.status is not None:
        writer.write(_head(answer, chunked=chunked))
    for piece in _pieces(answer):
        if isinstance(piece, bytes):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
        else:
            await asyncio.sleep(piece)
    if answer.hold:
        await asyncio.Event().wait()
    if answer.reset:
        _reset(writer)
        return False
    if answer.status is None or answer.cut_after is not None:
        return False
    with suppress(ConnectionError):  # a client may leave when it has the whole body
        if chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
    return False


def _head(answer: Answer, *, chunked: bool) -> bytes:
    assert answer.status is not None
    phrase = HTTPStatus(answer.status).phrase if answer.status in set(HTTPStatus) else "Unknown"
    lines = [f"HTTP/1.1 {answer.status} {phrase}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    if chunked:
        lines.append("transfer-encoding: chunked")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _pieces(answer: Answer) -> list[bytes | float]:
    """The pieces of the body up to the cut, none of them empty: an empty chunk would end it."""
    pieces = [answer.body] if isinstance(answer.body, bytes) else answer.body
    left = answer.cut_after
    kept: list[bytes | float] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            piece = piece[:left]
            left = None if left is None else left - len(piece)
        if piece:
            kept.append(piece)
        if left == 0:
            break
    return kept


def _reset(writer: asyncio.StreamWriter) -> None:
    # A socket that may not linger says goodbye with a reset instead of an end.
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
