"""Redaction of secrets: keys, headers, passwords in addresses.

Everything that a transport emits passes through here, except the model's own words. A server may
quote the key that it rejects: in an error, in a redirect, in a malformed event. A third-party
gateway may put it anywhere. The model's text and tool arguments are content and stay unchanged: an
agent that edits the file with its own key must not write "[redacted]" into it.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clark_agent.errors import AccessRefused, ConfigError, TransportError
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    Chunk,
    Done,
    Error,
    ResponseInfo,
    Start,
    StreamChunk,
    StreamEvent,
    Waiting,
)
from clark_agent.transports.http.response import Failure
from clark_agent.types import AssistantMessage, ImageContent, ProviderContent

__all__ = [
    "Address",
    "Redactor",
    "address_parts",
    "is_secret",
    "secrets_in",
    "secrets_of",
    "without_credentials",
]

_ITEMS = (ImageContent, ProviderContent)

_REDACTED = "[redacted]"
# Shorter values are placeholders for servers without keys, and occur inside ordinary words.
_SHORTEST_SECRET = 6

_SECRET = re.compile(
    r"authorization|cookie|header|passw|passphrase|secret|credential|bearer|signature|"
    r"keys?$|token$|(^|[^a-z])(auth|sig)$",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(?<=://)[^\s/?#@\"'<>]+@")
_VALUE_IN_QUERY = re.compile(r"([?&])([\w.-]+)=([^\s&#\"'<>]+)")


def is_secret(name: str) -> bool:
    """Whether a header or a field of that name holds a secret."""
    return _SECRET.search(name) is not None


def secrets_in(headers: Mapping[str, str] | None) -> list[str]:
    """Return the secrets in the headers: each value, and its last word (as in ``Bearer …``).

    Values too short for a key are skipped: they would match ordinary text.
    """
    found: list[str] = []
    for name, value in (headers or {}).items():
        if not isinstance(value, str):
            raise ConfigError(f"the header {name!r} must be a string, not {type(value).__name__}")
        shortest = 4 if is_secret(name) else 8
        found += [word for word in {value.strip(), *value.split()[-1:]} if len(word) >= shortest]
    return found


def secrets_of(client: Any) -> list[str]:
    """Return the keys that an SDK's client exposes."""
    keys = [getattr(client, name, None) for name in ("api_key", "auth_token")]
    for name in ("default_headers", "default_query"):
        fields: Any = getattr(client, name, None)
        named = fields.items() if isinstance(fields, Mapping) else ()
        texts = {name: value for name, value in named if isinstance(value, str)}
        keys += secrets_in({name: value for name, value in texts.items() if is_secret(name)})
    return [key for key in keys if isinstance(key, str)]


def without_credentials(text: str) -> str:
    """Redact users, passwords and keys in the addresses that the text quotes."""
    if "=" in text:
        text = _VALUE_IN_QUERY.sub(_without_value, text)
    return _USER_IN_URL.sub(f"{_REDACTED}@", text) if "://" in text else text


def _without_value(found: re.Match[str]) -> str:
    mark, name, _ = found.groups()
    return f"{mark}{name}={_REDACTED}" if is_secret(name) else found[0]


def address_parts(url: Any, what: str = "base_url", example: str = "/v1") -> SplitResult:
    """Split the address of a server. Raises `ConfigError` if it is not an HTTP address."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        is_http = parts is not None and parts.scheme in ("http", "https")
        if parts is not None and is_http and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # an unclosed bracket, or a port out of range
        pass
    shown = without_credentials(f"{url!r}")
    raise ConfigError(
        f"{what} must be the address of a server, as in http://localhost:8080{example}, not {shown}"
    )


class Address(Struct, frozen=True):
    """A server's address without credentials, and the credentials that it had.

    HTTP libraries log addresses. A user and a password in one are therefore sent as the
    ``Authorization`` header that they stand for.
    """

    url: str
    headers: dict[str, str]
    secrets: list[str]

    @classmethod
    def of(cls, url: str, *, has_query: bool = False) -> Address:
        """Split an address. Raises `ConfigError` if it is not the address of a server, or has a
        query or a fragment (allowed with ``has_query``).
        """
        parts = urlsplit(url) if has_query else address_parts(url)
        if (parts.query or parts.fragment) and not has_query:
            raise ConfigError(
                "base_url must not have a query or a fragment: send fixed values as headers, or "
                "pass a client of your own"
            )
        secrets = secrets_in(dict(parse_qsl(parts.query)))
        user, has_user, host = parts.netloc.rpartition("@")
        if not has_user:
            return cls(url, {}, secrets)
        plain = _with_host(parts, host)
        given = user.split(":", 1)
        # Keep non-ASCII secrets in their encoded form; `Redactor` adds the decoded one.
        words = [w if w.isascii() else quote(w, safe="") for w in (*given, *map(unquote, given))]
        basic = b64encode(":".join([*map(unquote, given), ""][:2]).encode()).decode()
        return cls(plain, {"Authorization": f"Basic {basic}"}, [*secrets, *words, basic])


def _with_host(parts: SplitResult, host: str) -> str:
    return parts._replace(netloc=host).geturl()


class Redactor:
    """Removes secrets from what a transport emits."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self.secrets = tuple({secret for secret in secrets if len(secret) >= _SHORTEST_SECRET})
        decoded = [unquote(secret) for secret in self.secrets]
        forms = {*self.secrets, *[quote(secret, safe="") for secret in self.secrets]}
        forms |= {secret for secret in decoded if len(secret) >= _SHORTEST_SECRET}
        self._forms = sorted(forms, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Redact a text. Also redacts credentials in the addresses that it quotes."""
        for secret in self._forms:
            text = _without_beginning_at_end(text.replace(secret, _REDACTED), secret)
        return without_credentials(text)

    def json(self, value: Any) -> Any:
        """Redact all strings of a JSON value, keys included."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return {self.json(name): self.json(part) for name, part in value.items()}
            case list() | tuple():
                return type(value)([self.json(part) for part in value])
            case _:
                return value

    def item(self, item: Any) -> Any:
        """Redact a server's block or annotation.

        Only the known secrets are removed. Credentials in other addresses stay: the item is content
        and must be sent back unchanged.
        """
        if not self._forms or (isinstance(item, ImageContent) and item.source.startswith("data:")):
            return item
        plain = msgspec.to_builtins(item)
        clean = self._exactly(plain)
        return item if clean == plain else msgspec.convert(clean, type(item))

    def chunk(self, chunk: StreamChunk) -> StreamChunk:
        """Redact a delta. Text, reasoning and tool calls are the model's words and stay."""
        match chunk:
            case BlockChunk(block=block):
                return BlockChunk(self.item(block))
            case AnnotationChunk(annotation=annotation):
                return AnnotationChunk(self.item(annotation))
            case _:
                return chunk

    def _exactly(self, value: Any) -> Any:
        match value:
            case str():
                for secret in self._forms:
                    value = value.replace(secret, _REDACTED)
                return value
            case dict():
                return {self._exactly(name): self._exactly(part) for name, part in value.items()}
            case list() | tuple():
                return type(value)([self._exactly(part) for part in value])
            case _:
                return value

    def event(self, event: StreamEvent) -> StreamEvent:
        """Redact an event that another party, such as a gateway, has made.

        The deltas and the final message are the model's words and stay, except for blocks and
        annotations. A partial message is redacted as a whole.
        """
        match event:
            case Chunk(chunk):
                clean = self.chunk(chunk)
                return event if clean is chunk else Chunk(clean)
            case Start():
                partial = self._message(event.partial)
                return Start(partial, self.json(event.details), self._response(event.response))
            case Done(message):
                return Done(self._answer(message))
            case Error():
                return Error(
                    self._message(event.partial),
                    event.kind,
                    self.text(event.message),
                    self.cause(event.cause),
                )
            case Waiting():
                return Waiting(event.seconds, self.text(event.reason))

    def _response(self, response: ResponseInfo | None) -> ResponseInfo | None:
        if response is None:
            return None
        named = (response.id, response.model)
        return ResponseInfo(*[None if text is None else self.text(text) for text in named])

    def failure(self, failure: Failure) -> Failure:
        """Redact a failure's message and cause."""
        text, cause = self.text(failure.message), self.cause(failure.cause)
        return replace(failure, message=text, cause=cause)

    def cause(self, error: Exception | None) -> Exception | None:
        """Return the exception, or a new one with redacted text if it holds a secret anywhere."""
        if error is None or not any(self._has_secret(text) for text in _texts_of(error)):
            return error
        text = self.text(str(error))
        if isinstance(error, AccessRefused):
            return AccessRefused(error.by, error.status, text)
        return TransportError(text)

    def _has_secret(self, text: str) -> bool:
        return self.text(text) != text

    def _answer(self, message: AssistantMessage) -> AssistantMessage:
        text = message.error_message
        return replace(
            message,
            content=tuple([self.item(b) if isinstance(b, _ITEMS) else b for b in message.content]),
            annotations=tuple([self.item(annotation) for annotation in message.annotations]),
            error_message=self.text(text) if text else text,
        )

    def _message(self, message: AssistantMessage) -> AssistantMessage:
        plain = msgspec.to_builtins(message)
        clean = self.json(plain)
        return message if clean == plain else msgspec.convert(clean, AssistantMessage)


def _texts_of(error: BaseException) -> Iterator[str]:
    """Yield the texts of an exception, of its causes and of its contexts."""
    seen: set[int] = set()
    ahead: list[BaseException | None] = [error]
    while ahead:
        found = ahead.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield from (str(found), repr(found), *getattr(found, "__notes__", ()))
            ahead += [found.__cause__, found.__context__]


def _without_beginning_at_end(text: str, secret: str) -> str:
    """Redact the beginning of a secret at the end of the text: long texts are truncated."""
    shown = text.removesuffix("…")
    for length in range(len(secret) - 1, 3, -1):
        if shown.endswith(secret[:length]):
            return f"{shown[:-length]}{_REDACTED}"
    return text
