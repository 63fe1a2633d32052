"""Which server a transport calls."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from urllib.parse import urlsplit

from clark_agent.otel import conventions as names

__all__ = ["server_of"]

_PORTS = {"http": 80, "https": 443}
_UNKNOWN: Mapping[str, str | int] = MappingProxyType({})


def server_of(stream: object) -> Mapping[str, str | int]:
    """The attributes for the host and the port in the ``base_url`` of a transport; none without."""
    url = getattr(stream, "base_url", None)
    return _server(url) if isinstance(url, str) else _UNKNOWN


@lru_cache(maxsize=256)
def _server(url: str) -> Mapping[str, str | int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # of a transport that does not check it
        return _UNKNOWN
    if not host or port is None:
        return _UNKNOWN
    return MappingProxyType({names.SERVER_ADDRESS: host, names.SERVER_PORT: port})
