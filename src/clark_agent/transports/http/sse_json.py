"""Decodes responses with JSON in server-sent events, for all providers.

An event is first decoded strictly, which is fast. If that fails, it is decoded leniently, because
servers and the proxies in front of them are not exact: invalid UTF-8 is replaced, numbers and
strings are converted to each other, and any other field of the wrong type is left out. A payload
that is not JSON fails the answer, but only at its end: all other events are processed first.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from clark_agent.messages.wire import jsonable
from clark_agent.transports.http.failures import failure_in_stream, no_stream, undecodable_event
from clark_agent.transports.http.response import Answer, ProviderFailure
from clark_agent.transports.http.sse import SseDecoder

__all__ = ["JsonEventDecoder", "fields_of", "fitted", "json_text"]

E = TypeVar("E")

_BROKEN = object()
_REPLACEMENT = "\ufffd"


class JsonEventDecoder(ABC, Generic[E]):
    """A `clark_agent.transports.http.base.Decoder` for bytes; a provider implements ``_event``.

    ``_event`` passes the content of an event to the answer. It sets ``may_end`` when the answer is
    whole even if no more events follow, and ``is_complete`` at the event that is always the last.
    """

    def __init__(self, answer: Answer, decoder: msgspec.json.Decoder[E]) -> None:
        self.is_complete = False
        self.may_end = False
        self._answer = answer
        self._decode = decoder.decode
        self._type: Any = decoder.type
        self._sse = SseDecoder()

    @abstractmethod
    def _event(self, event: E) -> bool:
        """Process an event. Returns False if it has no field of this wire format.

        Raises `ProviderFailure`.
        """

    def feed(self, piece: bytes) -> None:
        """Decode the next bytes."""
        for payload in self._sse.feed(piece):
            if self.is_complete:
                return
            self._payload(payload)

    def end(self) -> None:
        """Process what is left after the end of the response.

        A truncated last event is skipped: the answer is then incomplete anyway. A body without any
        event may be the answer, or an error, as one JSON document.
        """
        for payload in self._sse.end():
            if payload.startswith(b"[DONE]") or _json_in(payload) is not _BROKEN:
                self._payload(payload)
        stray = self._sse.stray
        if not self.is_complete and stray and _json_in(stray) is not _BROKEN:
            self._payload(stray)
        self.is_complete = self.is_complete or self.may_end
        if stray and not self.is_complete and self._answer.is_empty:
            raise ProviderFailure(no_stream(stray))

    def _payload(self, payload: bytes) -> None:
        if payload.startswith(b"[DONE]"):
            self.is_complete = True
            return
        if not payload.strip():
            return  # an event without data: a keep-alive
        try:
            event = self._decode(payload)
        except (ValueError, RecursionError) as error:  # bad JSON, UTF-8 or types
            self._decode_leniently(payload, error)
        else:
            if not self._event(event):
                self._unknown_event(_json_in(payload))

    def _decode_leniently(self, payload: bytes, error: Exception) -> None:
        """Decode an event that does not match its type, as far as possible."""
        value = _json_in(payload)
        if value is not _BROKEN:
            event: E | None = fitted(value, self._type)
            if event is None or not self._event(event):
                self._unknown_event(value)
        elif b"\n" in payload:  # possibly two events without the empty line between them
            for line in payload.split(b"\n"):
                self._payload(line)
        else:
            self._unreadable(undecodable_event(payload, error))

    def _unknown_event(self, value: Any) -> None:
        """Handle an event of another format. Raises `ProviderFailure` if it is an error."""
        if (error := _error_in(value)) is not None:
            raise ProviderFailure(failure_in_stream(error))

    def _unreadable(self, failure: Any) -> None:
        if self._answer.is_empty:
            raise ProviderFailure(failure)  # no chunk was emitted, so a retry is possible
        self._answer.unreadable = self._answer.unreadable or failure


def _json_in(payload: bytes) -> Any:
    """Decode the JSON of the payload, or return `_BROKEN`.

    Uses the slower decoder of the standard library: it accepts escapes of lone surrogates, which
    occur when a character is split between two events.
    """
    try:
        return json.loads(payload.decode(errors="replace").strip(f"{_REPLACEMENT} \t\r\n"))
    except (ValueError, RecursionError):
        return _BROKEN


def _error_in(value: Any) -> dict[str, Any] | None:
    """Return the event if it is an error in a known format, else None."""
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict):
        return None
    if value.get("object") == "error":
        return value
    kind = value.get("type")
    if isinstance(kind, str) and "error" not in kind.lower():
        return None  # an event of an unknown type, but not an error
    details = [value.get(name) for name in ("error", "errors", "detail")]
    if isinstance(value.get("message"), str):
        details.append(value["message"])
    return value if any(details) else None


# --- JSON that does not fit its type ----------------------------------------------------------


def fitted(value: Any, kind: Any) -> Any:
    """Convert the value to that type as far as possible; None for what cannot be converted.

    ``kind`` is a Struct whose fields all have defaults, or the type of such a field: a list, a
    union, a plain type.
    """
    try:
        return msgspec.convert(value, kind, strict=False)
    except (ValueError, RecursionError):
        pass
    if isinstance(kind, type) and issubclass(kind, Struct):
        return _fitted_struct(value, kind)
    if get_origin(kind) is list:
        of = get_args(kind)[0]
        parts = [fitted(part, of) for part in value] if isinstance(value, list) else []
        return [part for part in parts if part is not None] or None
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if get_origin(kind) in (Union, UnionType):
        others = (fitted(value, option) for option in get_args(kind) if option is not NoneType)
        return next((found for found in others if found is not None), None)
    return None


def _fitted_struct(value: Any, kind: type[Struct]) -> Any:
    if not isinstance(value, dict):
        return None
    known = [field for field in msgspec.structs.fields(kind) if field.encode_name in value]
    return kind(**{field.name: fitted(value[field.encode_name], field.type) for field in known})


def json_text(value: Any) -> str:
    """Encode arguments that arrived as an object. A lone surrogate becomes U+FFFD."""
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, RecursionError):
        return msgspec.json.encode(jsonable(value)).decode()


def fields_of(value: Any) -> dict[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}
