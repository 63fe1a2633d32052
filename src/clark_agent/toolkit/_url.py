"""A URL that may be fetched, parsed strictly."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final
from urllib.parse import quote, urlsplit

from msgspec import Struct

from clark_agent.errors import ToolExecutionError

__all__ = ["FetchError", "Url"]

_MAX_URL = 4_000


class FetchError(ToolExecutionError):
    """The page could not be fetched; the message says why."""


class Url(Struct, frozen=True):
    """The parts of a URL that a request needs."""

    scheme: str
    host: str
    port: int
    target: str

    @classmethod
    def parse(cls, text: str) -> Url:
        """Parse a URL. Raises `FetchError`, whose message never quotes credentials."""
        text = text.strip()
        if len(text) > _MAX_URL:
            raise FetchError(f"The URL is longer than {_MAX_URL:,} characters.")
        if any(ord(c) < 32 or ord(c) == 127 or c == "\\" for c in text):
            raise FetchError("The URL has control characters or backslashes in it.")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise FetchError("Invalid URL: its host or port cannot be read.") from None
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
        """The host, and the port if it is not the default one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == usual else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


_SAFE: Final = "/%:@!$&'()*+,;=-._~[]"
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?")


def _host(name: str | None) -> str:
    """Return the host name in its DNS form, or an IPv6 address."""
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
