"""OAuth: logging in to a server in the browser, and keeping the tokens.

OAuth 2.1 with PKCE, by the SDK's client: it finds the authorization server, registers this program
and gets and renews tokens. Here are the two ends that it needs: a listener on this machine that
receives the redirect of the browser, and a file with the tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from inspect import isawaitable
from pathlib import Path
from secrets import compare_digest
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from urllib.parse import parse_qs, urlsplit

import msgspec

from clark_agent._private_files import make_folder, open_file
from clark_agent._threads import run_in_thread
from clark_agent.errors import ConfigError, McpError
from clark_agent.mcp.server_config import McpServer, shown_url

if TYPE_CHECKING:
    from clark_agent.mcp.connection import Connection

__all__ = ["FileTokens", "OAuth", "OpenBrowser", "Tokens"]

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_PATH = "/callback"
_MOST_HEADER_BYTES = 16_384
_AGAIN_AFTER = 300.0
"""A login that has failed is not repeated for this long: a lost connection must not open browser
windows again and again."""

OpenBrowser: TypeAlias = Callable[[str], Awaitable[object] | object]
"""Shows the address to the person. A plain function runs in a thread."""


class Tokens(Protocol):
    """Where tokens are kept. The values are open JSON objects.

    The key of a server is its URL. If the server has ``share``, each user has a key: the URL, a
    line break and what ``share`` returns.

    Contract: may block briefly. Unknown keys have the value None.
    """

    def load(self, key: str, /) -> dict[str, Any] | None:
        """What was last saved for the key."""
        ...

    def save(self, key: str, value: dict[str, Any], /) -> None:
        """Keep the value."""
        ...


class FileTokens:
    """Tokens in a file that only its owner can read. None: a file in the user's state folder.

    Any number of objects and processes may use one file. On Windows, processes that save at the
    same time can lose what another one has just saved.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = _default_path() if path is None else Path(path)

    def load(self, key: str, /) -> dict[str, Any] | None:
        """What was last saved for the key. A file that cannot be read counts as empty."""
        value = (self._read() or {}).get(key)
        return value if isinstance(value, dict) else None

    def save(self, key: str, value: dict[str, Any], /) -> None:
        """Replace the file as a whole, so that no reader sees half of it. One that cannot be read
        is kept under another name.
        """
        make_folder(self.path.parent)
        with _lock, _alone_in(self.path.parent):
            known = self._read()
            if known is None and self.path.is_file():
                kept = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
                self.path.rename(kept)
                logger.warning("the damaged file with tokens is now %s", kept)
            values = {**(known or {}), key: value}
            new = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
            new.unlink(missing_ok=True)
            with os.fdopen(open_file(new, os.O_WRONLY), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(values)))
            new.replace(self.path)

    def _read(self) -> dict[str, Any] | None:
        """What the file has; None if it cannot be read."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
            logger.warning("cannot read the tokens in %s: %r", self.path, error)
            return None

    def __repr__(self) -> str:
        return f"FileTokens({str(self.path)!r})"


_lock = Lock()
"""One for all files: to save takes a moment, and happens after a login."""


if sys.platform == "win32":

    @contextmanager
    def _alone_in(folder: Path) -> Generator[None]:
        yield

else:
    import fcntl

    @contextmanager
    def _alone_in(folder: Path) -> Generator[None]:
        """Keep other processes out. The lock is on the folder: the file itself is replaced."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _default_path() -> Path:
    home = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(home):
        return Path(home) / "clark-agent" / "mcp-tokens.json"
    usual = "~/Library/Application Support" if sys.platform == "darwin" else "~/.local/state"
    return Path(usual).expanduser() / "clark-agent" / "mcp-tokens.json"


class OAuth:
    """Log in with OAuth 2.1: ``McpServer(..., auth=OAuth())``.

    The first connection opens the browser; later ones use and renew the stored tokens. With
    ``share``, each key has a login and tokens of its own.

    ``scopes``: what to ask for; None: what the server says that it needs. ``storage``: where the
    tokens are kept. ``redirect_port``: where the browser comes back to on this machine; 0: any free
    port. ``open_browser``: False logs the address instead of opening it; a function gets it.
    ``client_id``, ``client_secret``: if the program is registered already. ``login_timeout``:
    seconds that the person has.
    """

    def __init__(
        self,
        *,
        scopes: Sequence[str] | None = None,
        storage: Tokens | None = None,
        client_name: str = "clark-agent",
        redirect_port: int = 0,
        open_browser: bool | OpenBrowser = True,
        client_id: str | None = None,
        client_secret: str | None = None,
        login_timeout: float = 300.0,
    ) -> None:
        if isinstance(scopes, str):
            raise ConfigError('OAuth: scopes must be a list of strings, such as ["read"]')
        if not 0 <= redirect_port <= 65_535:
            raise ConfigError(f"OAuth: redirect_port must be 0 to 65535, not {redirect_port!r}")
        if client_secret is not None and client_id is None:
            raise ConfigError("OAuth: client_secret needs a client_id")
        if login_timeout <= 0:
            raise ConfigError("OAuth: login_timeout must be more than 0 seconds")
        self._scopes = None if scopes is None else " ".join(scopes)
        self._tokens: Tokens = FileTokens() if storage is None else storage
        self._client_name = client_name
        self._port = redirect_port
        self._open_browser = open_browser
        self._client_id = client_id
        self._client_secret = client_secret
        self._login_timeout = login_timeout
        self._failed_at: dict[str, float] = {}

    def make_auth(self, server: McpServer, connection: Connection, share: str | None) -> Any:
        """The SDK's authentication for one connection, with the key of those who share it."""
        from clark_agent.mcp import _oauth

        assert server.url is not None
        key = server.url if share is None else f"{server.url}\n{share}"
        stored = self._tokens.load(key) or {}
        port = self._port or _free_port(_port_of(stored))
        redirect = f"http://{_HOST}:{port}{_PATH}"
        entry = _oauth.StoredTokens(
            self._tokens, key, stored, redirect, self._client_id, self._client_secret
        )
        login = _Login(self, server, connection, key, port)
        return _oauth.provider(
            server.url,
            entry,
            redirect=redirect,
            name=self._client_name,
            scopes=self._scopes,
            has_secret=self._client_secret is not None,
            on_redirect=login.redirect,
            on_callback=login.callback,
        )

    def __repr__(self) -> str:
        return f"OAuth(client_name={self._client_name!r}, …)"


class _Login:
    """One person, one browser, one redirect."""

    def __init__(
        self, oauth: OAuth, server: McpServer, connection: Connection, key: str, port: int
    ) -> None:
        self._oauth = oauth
        self._server = server
        self._connection = connection
        self._key = key
        self._port = port
        self._url = ""

    async def redirect(self, url: str) -> None:
        """Keep the address: the listener must be there before the browser is."""
        failed = self._oauth._failed_at.get(self._key)
        if failed is not None and time.monotonic() - failed < _AGAIN_AFTER:
            raise McpError(
                self._server.name, "the login has failed a short time ago; start the program again"
            )
        self._url = url

    async def callback(self) -> Any:
        """Show the address to the person and wait for the redirect."""
        from clark_agent.mcp import _oauth

        try:
            with self._connection.asking():
                query = await self._wait()
        except BaseException:
            self._oauth._failed_at[self._key] = time.monotonic()
            raise
        if "code" not in query:
            self._oauth._failed_at[self._key] = time.monotonic()
            why = query.get("error_description") or query.get("error") or "no code was returned"
            raise McpError(self._server.name, f"the login was refused: {why[:300]}")
        self._oauth._failed_at.pop(self._key, None)
        return _oauth.code_result(query)

    async def _wait(self) -> dict[str, str]:
        received: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        state = parse_qs(urlsplit(self._url).query).get("state", [""])[0]

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with asyncio.timeout(10):
                    query = await _read_query(reader)
                    if query is None:
                        writer.write(_page("404 Not Found", "Nothing here."))
                    elif not compare_digest(query.get("state", "").encode(), state.encode()):
                        # Any page in the browser can send this, so the login goes on.
                        text = "This is not the answer to the login that is in progress."
                        writer.write(_page("400 Bad Request", text))
                    else:
                        if not received.done():
                            received.set_result(query)
                        text = "You can close this window."
                        text = f"Logged in. {text}" if "code" in query else f"Not logged in. {text}"
                        writer.write(_page("200 OK", text))
                    await writer.drain()
            except (OSError, TimeoutError, ValueError, asyncio.LimitOverrunError, EOFError):
                pass
            finally:
                writer.close()

        try:
            listener = await asyncio.start_server(
                answer, _HOST, self._port, limit=_MOST_HEADER_BYTES
            )
        except OSError as error:
            raise McpError(
                self._server.name,
                f"no login on port {self._port} ({error.strerror}); set redirect_port",
            ) from None
        async with listener:
            await self._show()
            try:
                async with asyncio.timeout(self._oauth._login_timeout):
                    return await received
            except TimeoutError:
                raise McpError(
                    self._server.name,
                    f"nobody has logged in within {self._oauth._login_timeout:g} seconds",
                    kind="timeout",
                ) from None

    async def _show(self) -> None:
        show = self._oauth._open_browser
        if callable(show):
            shown = await run_in_thread(show, self._url)
            if isawaitable(shown):
                await shown
            return
        logger.warning(
            "MCP server %r at %s: log in at %s",
            self._server.name,
            shown_url(self._server.url or ""),
            self._url,
        )
        if show:
            import webbrowser

            await run_in_thread(webbrowser.open, self._url)


async def _read_query(reader: asyncio.StreamReader) -> dict[str, str] | None:
    """The query of the redirect; None if the browser asks for something else."""
    line = (await reader.readuntil(b"\r\n")).decode("latin-1")
    while (await reader.readuntil(b"\r\n")) != b"\r\n":
        pass
    method, _, rest = line.partition(" ")
    target = urlsplit(rest.partition(" ")[0])
    if method != "GET" or target.path != _PATH:
        return None
    query = {name: values[0] for name, values in parse_qs(target.query).items()}
    return query if "code" in query or "error" in query else None


def _page(status: str, text: str) -> bytes:
    body = f"<!doctype html><meta charset=utf-8><title>clark-agent</title><p>{text}".encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/html; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _port_of(stored: dict[str, Any]) -> int:
    """The port that the program was registered with: some servers accept no other."""
    match stored:
        case {"client": {"redirect_uris": [str(uri), *_]}}:
            return urlsplit(uri).port or 0
        case _:
            return 0


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise ConfigError("OAuth: there is no free port on this machine; set redirect_port")
