"""Redirects: followed only within one origin.

A redirect repeats the request: the conversation, and the headers that carry a key. HTTP libraries
drop ``Authorization`` for another host, but keep all other headers. A server may therefore redirect
to another path of its own (307 and 308, which keep the method and the body). A redirect to another
scheme, host or port is an error that names the target.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from clark_agent.errors import TransportError

__all__ = ["MOST_REDIRECTS", "is_redirect", "redirect_target", "stay_at_origin"]

MOST_REDIRECTS = 5
_KEEP_THE_REQUEST = (307, 308)
_LONGEST_SHOWN = 200
_PORTS = {"http": 80, "https": 443}


def is_redirect(status: int, location: str | None) -> bool:
    """Whether a response is a redirect."""
    return 300 <= status < 400 and bool(location)


def redirect_target(status: int, location: str, url: str, *, setting: str = "base_url") -> str:
    """Return the URL to send the request to. Raises `TransportError` if that is not allowed.

    ``setting`` is the name of the parameter with the server's address, for the message.
    """
    try:
        target = urljoin(url, location)
        here, there = urlsplit(url), urlsplit(target)
        is_same = _origin(here) == _origin(there)
    except ValueError:
        raise TransportError(f"the server answered {status} with an invalid address") from None
    if is_same and status in _KEEP_THE_REQUEST:
        return target
    if is_same:
        raise TransportError(
            f"the server answered {status} and redirects to {_shown(there)}, which would drop the "
            f"request: check {setting}"
        )
    raise TransportError(
        f"the redirect to another origin, {_shown(there)}, was not followed: the key and the "
        f"conversation are only for {_shown(here, with_path=False)}. If the server has moved, set "
        f"{setting} to its new address"
    )


def stay_at_origin(setting: str = "base_url") -> Callable[[Any], Awaitable[None]]:
    """Return a response hook for an httpx client that follows redirects."""

    async def check(response: Any) -> None:
        status, location = response.status_code, response.headers.get("location")
        if is_redirect(status, location):
            redirect_target(status, location, str(response.request.url), setting=setting)

    return check


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _shown(parts: SplitResult, *, with_path: bool = True) -> str:
    """Format the address without possible secrets: the user, the query and the fragment."""
    path = parts.path if with_path and len(parts.path) < _LONGEST_SHOWN else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"
