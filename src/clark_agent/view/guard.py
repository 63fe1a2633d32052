"""Who may use the page: a token, checks against other sites, and headers for the browser.

- The address that is opened first has the token. It is exchanged for a cookie that scripts cannot
  read and that other sites cannot send, and the browser is sent to the address without it.
- The name in ``Host`` must be this machine's, or an address: a page of another site that has its
  name resolve to this machine (DNS rebinding) is refused.
- Requests for data that a browser sends for another site are refused. What changes something also
  needs a header that another site cannot set.
- Nothing is cached, framed or loaded from elsewhere, and no script runs but those of the page.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection
from hashlib import sha256
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import msgspec

from clark_agent.view.shapes import Failure

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CSRF_HEADER", "POLICY", "Guard", "OneTimeTokens", "Refused", "host_name"]

CSRF_HEADER = "x-clark-token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.IGNORECASE)


class Refused(Exception):
    """A request that is refused: the status, a word for programs and a sentence for people."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.failure = Failure(error, message)


def host_name(given: str) -> str:
    """Return the name in a ``Host`` header without the port; empty if it is malformed."""
    found = _HOST.fullmatch(given)
    return (found[1] or found[2]).lower() if found else ""


class OneTimeTokens:
    """Tokens that open the page once, for where others can see them: the arguments of a browser's
    command line, for example.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def new(self) -> str:
        """Return a token."""
        token = secrets.token_urlsafe(24)
        self._digests.add(_digest(token))
        return token

    def take(self, token: str) -> bool:
        """Return whether a token may open the page; it never may again."""
        digest = _digest(token)
        if digest not in self._digests:
            return False
        self._digests.discard(digest)
        return True


class Guard:
    """An ASGI app around another: it checks each request, and adds headers to each answer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        hosts: Collection[str] | None,
        csrf: str,
        can_write: bool,
        once: OneTimeTokens,
    ) -> None:
        self._app = app
        self._once = once
        self._hosts = None if hosts is None else {"localhost", *[name.lower() for name in hosts]}
        self._csrf = csrf
        self._can_write = can_write
        self._digest = None if token is None else _digest(token)
        key = b"" if token is None else token.encode()
        self._cookie = f"clark_view_{sha256(b'name ' + key).hexdigest()[:12]}"
        self._session = hmac.new(key, b"session", sha256).hexdigest()
        """What the cookie has: from it nothing about the token can be told."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send, headers = _with_headers(send), _headers(scope)
        try:
            self._check_host(headers)
            if await self._exchange(scope, headers, send):
                return
            self._check_session(headers)
            if _path(scope).startswith("/api/"):
                self._check_site(scope["method"], headers)
        except Refused as refusal:
            await _refuse(send, refusal, is_page=_is_navigation(scope, headers))
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: dict[str, list[str]]) -> None:
        given = headers.get("host", [])
        if self._hosts is None:
            return
        name = host_name(given[0]) if len(given) == 1 else ""
        if not (name in self._hosts or _is_address(name)):
            raise Refused(403, "wrong_host", "this server does not answer under that name")

    async def _exchange(self, scope: Scope, headers: dict[str, list[str]], send: Send) -> bool:
        """Take a token in the address: set the cookie, and redirect to the address without it."""
        query = scope["query_string"].decode("latin-1")
        if self._digest is None or scope["method"] != "GET" or "token=" not in query:
            return False
        fields = parse_qs(query, keep_blank_values=True)
        given = fields.pop("token", [])
        if _path(scope).startswith("/api/") or not given:
            return False
        is_right = len(given) == 1 and (
            hmac.compare_digest(_digest(given[0]), self._digest) or self._once.take(given[0])
        )
        if not is_right:
            raise Refused(401, "wrong_token", _HOW)
        rest = urlencode(fields, doseq=True)
        path = scope.get("root_path", "").rstrip("/") + _path(scope)
        cookie = f"{self._cookie}={self._session}; Path=/; HttpOnly; SameSite=Strict"
        if scope.get("scheme") == "https":
            cookie += "; Secure"
        # One slash, because "//name" would be another site; and nothing that ends a header.
        location = "/" + quote(path.lstrip("/")) + (f"?{rest}" if rest else "")
        more = [(b"location", location.encode()), (b"set-cookie", cookie.encode())]
        await answer(send, 303, b"", more)
        return True

    def _check_session(self, headers: dict[str, list[str]]) -> None:
        if self._digest is None:
            return
        expected = _digest(self._session)
        for line in headers.get("cookie", []):
            for part in line.split(";"):
                name, _, value = part.strip().partition("=")
                if name == self._cookie and hmac.compare_digest(_digest(value), expected):
                    return
        raise Refused(401, "no_token", _HOW)

    def _check_site(self, method: str, headers: dict[str, list[str]]) -> None:
        """Refuse what a browser sends for another site."""
        site = headers.get("sec-fetch-site", ["none"])
        if any(value not in ("same-origin", "none") for value in site):
            raise Refused(403, "other_site", "this was sent by a page of another site")
        if method in ("GET", "HEAD"):
            return
        hosts = [value.lower() for value in headers.get("host", [])]
        origins = {urlsplit(value).netloc.lower() for value in headers.get("origin", [])}
        if not origins.issubset(hosts):
            raise Refused(403, "other_site", "this was sent by a page of another site")
        if not self._can_write:
            raise Refused(403, "read_only", READ_ONLY)
        given = headers.get(CSRF_HEADER, [""])
        if len(given) != 1 or not hmac.compare_digest(_digest(given[0]), _digest(self._csrf)):
            text = f"the header {CSRF_HEADER} must have the value of csrf in api/session"
            raise Refused(403, "no_csrf_token", text)


_HOW = "open the address that was printed when this server started: it has the token"
READ_ONLY = "this server only shows runs: start it with --write to change something"


def _digest(text: str) -> bytes:
    return sha256(text.encode("utf-8", "surrogateescape")).digest()


def _is_address(name: str) -> bool:
    """Whether it is the address of a machine, which no other site can take for its name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _headers(scope: Scope) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


def _path(scope: Scope) -> str:
    """Return the path below the place where the app is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(root) else path


def _is_navigation(scope: Scope, headers: dict[str, list[str]]) -> bool:
    """Whether a person reads the answer: a browser opens an address of the page."""
    accepted = ",".join(headers.get("accept", [])).lower()
    return "text/html" in accepted and not _path(scope).startswith("/api/")


def _with_headers(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = [(n.lower(), v) for n, v in message.get("headers", [])]
            names = {name for name, _ in _HEADERS}
            headers = [*_HEADERS, *[(n, v) for n, v in given if n not in names]]
            message = {**message, "headers": headers}
        await send(message)

    return with_headers


async def _refuse(send: Send, refusal: Refused, *, is_page: bool) -> None:
    if not is_page:
        await answer(send, refusal.status, msgspec.json.encode(refusal.failure))
        return
    body = _REFUSAL.format(message=escape(str(refusal))).encode()
    await answer(send, refusal.status, body, kind=b"text/html; charset=utf-8")


_REFUSAL = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Not shown · clark-agent</title>
<p>Not shown: {message}.</p>
</html>
"""


async def answer(
    send: Send,
    status: int,
    body: bytes,
    more: Collection[tuple[bytes, bytes]] = (),
    *,
    kind: bytes = b"application/json",
) -> None:
    """Send a short answer."""
    headers: list[tuple[bytes, Any]] = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
