"""Keeps secrets of a server's settings out of texts: errors, logs, results.

What a server or a library says may quote a header, a variable or the query of a URL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

from clark_agent._text import well_formed
from clark_agent.mcp.server_config import HIDDEN, SHORTEST_SECRET, McpServer

__all__ = ["Redaction"]

_SHORTEST = 4


class Redaction:
    """Removes the secrets of one server from texts."""

    def __init__(self, server: McpServer) -> None:
        variables = [*(server.env or {}).values(), *server.secrets]
        found = {text for text in variables if len(text) >= SHORTEST_SECRET}
        if server.url is not None:
            found.update(_of_url(server.url))
        if isinstance(server.headers, Mapping):
            found.update(_of_headers(server.headers))
        self._secrets = _longest_first(found)

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Also remove the values of these headers."""
        self._secrets = _longest_first({*self._secrets, *_of_headers(headers)})

    def __call__(self, text: str) -> str:
        """The text without secrets, and always encodable."""
        text = well_formed(text)
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, HIDDEN)
        return text


def _longest_first(found: Iterable[str]) -> tuple[str, ...]:
    """A short value, such as ``1`` or ``yes``, is not a secret and is in every text."""
    return tuple(sorted([text for text in found if len(text) >= _SHORTEST], key=len, reverse=True))


def _of_headers(headers: Mapping[str, str]) -> Iterable[str]:
    for value in headers.values():
        yield value
        yield value.rpartition(" ")[2]  # "Bearer …"


def _of_url(url: str) -> Iterable[str]:
    parts = urlsplit(url)
    yield from [parts.query, parts.fragment]
    for part in (parts.username, parts.password):
        if part:
            yield part
            yield unquote(part)
    for _, value in parse_qsl(parts.query):
        yield value
