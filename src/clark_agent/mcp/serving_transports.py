"""How clients reach a server: stdin and stdout, or streamable HTTP."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from hashlib import sha256
from io import TextIOWrapper
from queue import SimpleQueue
from threading import Semaphore, Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any, BinaryIO

from clark_agent._extras import load_extra
from clark_agent._listening import is_loopback, listen
from clark_agent.errors import ConfigError

if TYPE_CHECKING:
    from mcp.server import Server
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["http_app", "parse_address", "serve_http", "serve_stdio"]


# --- stdin and stdout -----------------------------------------------------------------------------


_LAST_ANSWERS_SECONDS = 1.0


async def serve_stdio(server: Server[Any], stop: Callable[[], None]) -> signal.Signals | None:
    """Serve one client until it closes stdin, or until SIGTERM or SIGINT. Return the signal.

    If the client has closed stdout, the next message for it ends the server too.
    """
    import anyio
    from mcp.server.stdio import stdio_server

    ended_by: signal.Signals | None = None
    with _private_stdin() as stdin, _private_stdout() as stdout, anyio.CancelScope() as scope:

        def end(number: signal.Signals) -> None:
            nonlocal ended_by
            ended_by = number
            stop()
            scope.cancel()

        with _on_signals(end), _Answers(stdout, scope.cancel) as answers:
            streams: Any = {"stdin": _Lines(stdin), "stdout": answers}
            async with stdio_server(**streams) as (received, sent):
                with _prints_to_stderr():
                    await server.run(received, sent, server.create_initialization_options())
                # The client may have stopped reading too.
                scope.deadline = anyio.current_time() + _LAST_ANSWERS_SECONDS
    return ended_by


@contextmanager
def _prints_to_stderr() -> Generator[None]:
    """Let Python print to stderr.

    What is in a buffer must be written while the descriptor points there, or the client would get
    it in the end.
    """
    stdout = sys.stdout
    stdout.flush()
    with redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            stdout.flush()


@contextmanager
def _on_signals(end: Callable[[signal.Signals], None]) -> Generator[None]:
    """Call ``end`` at the first SIGTERM or SIGINT. The second has its usual effect."""
    if current_thread() is not main_thread():
        yield
        return
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def on_signal(number: signal.Signals) -> None:
        restore()
        end(number)

    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        restore()


@contextmanager
def _private_stdin() -> Generator[BinaryIO]:
    """Yield stdin under a descriptor of its own; meanwhile tools and commands read an empty one."""
    try:
        is_real = sys.stdin.buffer.fileno() == 0
    except (AttributeError, OSError, ValueError):
        is_real = False
    if not is_real:  # replaced, as in a test
        yield sys.stdin.buffer
        return
    private = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        # Not closed: the thread that reads it may still wait for input.
        yield os.fdopen(private, "rb", closefd=False)
    finally:
        os.dup2(private, 0)


@contextmanager
def _private_stdout() -> Generator[BinaryIO]:
    """Yield stdout under a descriptor of its own; meanwhile tools and commands write to stderr."""
    try:
        is_real = sys.stdout.buffer.fileno() == 1
    except (AttributeError, OSError, ValueError):
        is_real = False
    if not is_real:  # replaced, as in a test
        yield sys.stdout.buffer
        return
    sys.stdout.flush()
    private = os.dup(1)
    try:
        os.dup2(2, 1)
    except OSError:  # stderr is closed
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.close(nothing)
    try:
        # Not closed: the thread that writes it may still wait for the client to read.
        yield os.fdopen(private, "wb", buffering=0, closefd=False)
    finally:
        os.dup2(private, 1)


class _Lines:
    """The lines of a file, read by a thread that does not keep the process from ending.

    The SDK's own reader cannot be cancelled while it waits for input.
    """

    _AHEAD = 64

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._room = Semaphore(self._AHEAD)
        Thread(target=self._read, name="clark_agent.mcp.stdin", daemon=True).start()

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        line = await self._lines.get()
        if line is None:
            raise StopAsyncIteration
        self._room.release()
        return line

    def _read(self) -> None:
        with suppress(RuntimeError, ValueError, OSError):  # the loop, or the file, is closed
            for line in TextIOWrapper(self._file, encoding="utf-8", errors="replace"):
                self._room.acquire()
                self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._lines.put_nowait, None)


class _Answers:
    """A file, written by a thread that does not keep the process from ending.

    The SDK's own writer cannot be cancelled while it waits for the client to read.
    """

    def __init__(self, file: BinaryIO, on_closed: Callable[[], None]) -> None:
        self._file = file
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._texts: SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = SimpleQueue()

    def __enter__(self) -> _Answers:
        Thread(target=self._write, name="clark_agent.mcp.stdout", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._texts.put(None)

    async def write(self, text: str) -> None:
        """Write the text. If the client has closed the other end, nobody is left to serve."""
        written: asyncio.Future[None] = self._loop.create_future()
        self._texts.put((text.encode(), written))
        try:
            await written
        except ConnectionError:
            self._on_closed()

    async def flush(self) -> None:
        """Nothing is kept back."""

    def _write(self) -> None:
        while (item := self._texts.get()) is not None:
            text, written = item
            error: OSError | None = None
            try:
                left = memoryview(text)
                while left:
                    left = left[self._file.write(left) :]
                self._file.flush()
            except OSError as failed:
                error = failed
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_settle, written, error)


def _settle(written: asyncio.Future[None], error: OSError | None) -> None:
    if written.done():  # cancelled
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)


# --- HTTP -----------------------------------------------------------------------------------------

_SHUTDOWN_SECONDS = 10
_IDLE_SECONDS = 30 * 60
"""Then a session without requests ends. It belongs to a client before protocol 2026-07-28."""
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_PORT = re.compile(r":[0-9]{1,5}")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def http_app(
    server: Server[Any], *, path: str, token: str | None, hosts: Sequence[str] | None
) -> Starlette:
    """Make the ASGI app. Raises `ConfigError`."""
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.middleware import Middleware

    if not path.startswith("/"):
        raise ConfigError(f"path must begin with a slash, not {path!r}")
    if token is not None and not token.strip():
        raise ConfigError("token is empty")
    names = _allowed(hosts)
    security = TransportSecuritySettings(
        allowed_hosts=names,
        allowed_origins=[f"{scheme}://{name}" for name in names for scheme in ("http", "https")],
    )
    app = server.streamable_http_app(
        streamable_http_path=path,
        session_idle_timeout=_IDLE_SECONDS,
        transport_security=security,
    )
    if token is not None:
        app.user_middleware.insert(0, Middleware(_BearerToken, token=token))
    return app


def _allowed(hosts: Sequence[str] | None) -> list[str]:
    """Return the hosts in the form of the SDK: each with and without any port."""
    if isinstance(hosts, str):
        raise ConfigError(f"hosts must be a list: [{hosts!r}]")
    given = _LOOPBACK if hosts is None else tuple(hosts)
    allowed: list[str] = []
    for host in given:
        name = _HOST.match(host)
        port = "" if name is None else host[name.end() :]
        if name is None or (port and not _PORT.fullmatch(port)):
            raise ConfigError(
                f"expected a host, such as agents.example.com, 10.0.0.5:8000 or [::1], not {host!r}"
            )
        allowed += [host] if port else [host, f"{host}:*"]
    return allowed


class _BearerToken:
    """Rejects requests without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = sha256(token.strip().encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_known(scope):
            from starlette.responses import JSONResponse

            error = {"error": "invalid_token", "error_description": "a bearer token is required"}
            headers = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
            await JSONResponse(error, 401, headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, secret = (given[0] if len(given) == 1 else b"").partition(b" ")
        is_same = hmac.compare_digest(sha256(secret.strip()).digest(), self._expected)
        return kind.lower() == b"bearer" and is_same


async def serve_http(
    server: Server[Any],
    stop: Callable[[], None],
    *,
    address: str,
    path: str,
    token: str | None,
    hosts: Sequence[str] | None,
    on_listening: Callable[[str], None] | None,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError`, also if the address is taken."""
    host, port = parse_address(address)
    if not is_loopback(host.strip("[]")):
        if token is None:
            raise ConfigError(
                f"other machines can reach {host}: an MCP server there needs a token (--token)"
            )
        if hosts is None:
            raise ConfigError(
                f"other machines can reach {host}: give the names that clients use for it as hosts "
                "(--host), such as agents.example.com"
            )
    app = http_app(server, path=path, token=token, hosts=hosts)
    uvicorn = load_extra("uvicorn", "mcp", "an MCP server over HTTP")

    class Stopping(uvicorn.Server):  # type: ignore[misc,name-defined]
        """Ends the calls as soon as it is told to stop: it would wait for them."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            super().handle_exit(sig, frame)
            loop.call_soon_threadsafe(stop)

    loop = asyncio.get_running_loop()
    config = uvicorn.Config(
        app,
        log_level="warning",
        proxy_headers=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    with listen(host.strip("[]"), port) as listener:
        if on_listening is not None:
            on_listening(f"http://{host}:{listener.getsockname()[1]}{path}")
        await Stopping(config).serve(sockets=[listener])


def parse_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    if _PORT.fullmatch(colon + port) and int(port) <= 65535:
        if _HOST.fullmatch(host):
            return host, int(port)
        if _HOST.fullmatch(f"[{host}]"):
            raise ConfigError(f"write an IPv6 address in brackets: [{host}]:{port}")
    raise ConfigError(f"expected HOST:PORT, such as 127.0.0.1:8000, not {address!r}")
