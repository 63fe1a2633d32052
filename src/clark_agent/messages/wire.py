"""Reading and writing messages as JSON: one at a time, or a transcript with one a line.

Reading is strict about the type of a message and lenient about the rest: unknown fields are
ignored, a missing timestamp means now. In a transcript, a row that cannot be read is reported with
its line number and its text; the other rows load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import Any, TypeVar, overload

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from clark_agent._text import well_formed
from clark_agent.clock import now_ms
from clark_agent.errors import DecodeError
from clark_agent.messages.transcript import MessageView
from clark_agent.types import AgentContext, AgentMessage

__all__ = [
    "MalformedRow",
    "Transcript",
    "decode_json",
    "decode_message",
    "dump_transcript",
    "encode_json",
    "encode_message",
    "load_transcript",
]

_T = TypeVar("_T")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def to_json_value(value: object) -> object:
    """The JSON form of types that msgspec does not know: a view of messages becomes a list."""
    if isinstance(value, MessageView):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


_encoder = msgspec.json.Encoder(enc_hook=to_json_value)

encode_strictly = _encoder.encode
"""The JSON of a value. Raises if it has none, even for half a character."""


class Stamp(Struct):
    """The timestamp in a message's JSON, to distinguish a missing one from null."""

    timestamp: Any = msgspec.UNSET


def encode_json(value: Any) -> bytes:
    """The JSON of a message, an event, a result, or any other value of this package.

    A provider may split a character over two deltas. Half a character has no UTF-8: it is written
    as an escape.
    """
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        import json  # hardly ever needed

        plain = msgspec.to_builtins(value, enc_hook=to_json_value)
        return json.dumps(plain, separators=(",", ":")).encode()


@overload
def decode_json(data: bytes | str, kind: type[_T]) -> _T: ...
@overload
def decode_json(data: bytes | str, kind: Any) -> Any: ...
def decode_json(data: bytes | str, kind: Any) -> Any:
    """Decode a value of that type (a struct or a union of structs).

    For messages use `decode_message`, which sets missing timestamps. Raises `DecodeError`, with the
    path and the reason.
    """
    try:
        return decoder_for(kind).decode(data)
    except msgspec.ValidationError as error:
        reason, separator, path = str(error).rpartition(" - at `")
        if not separator:
            reason, path = path, "$"
        raise DecodeError(reason, path=path.removesuffix("`")) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise DecodeError(str(error)) from error
    except RecursionError as error:
        raise DecodeError("the JSON is nested too deeply") from error


def encode_message(message: AgentMessage | AgentContext) -> bytes:
    """The JSON of a message, or of a context with its messages.

    Never fails: `jsonable` converts what JSON cannot hold.
    """
    try:
        return _encoder.encode(message)
    except Exception:
        return _encoder.encode(jsonable(message))


_DEEPEST = 100


def jsonable(value: Any, depth: int = 0) -> Any:
    """A copy of the value that JSON can hold.

    Lone surrogates become U+FFFD. Objects without a JSON form, too deeply nested values and cycles
    become their ``repr``. Subclasses of texts and numbers become plain ones. Never raises, even if
    the value's own methods do.
    """
    if value is None or type(value) is bool:
        return value
    with suppress(Exception):
        if isinstance(value, str):
            return well_formed(value)
        if isinstance(value, float):
            return float.__float__(value)
        if depth < _DEEPEST:
            if isinstance(value, Struct):
                return _fields(value, depth + 1)
            if isinstance(value, Mapping):
                return {_key(key): jsonable(item, depth + 1) for key, item in value.items()}
            if isinstance(value, (list, tuple, set, frozenset, MessageView)):
                return [jsonable(item, depth + 1) for item in value]
            plain = int.__int__(value) if isinstance(value, int) else value
            _encoder.encode(plain)
            return plain
    return _repr(value)


def _fields(value: Struct, depth: int) -> dict[str, Any]:
    config = value.__struct_config__
    tagged: dict[str, Any] = {} if config.tag_field is None else {config.tag_field: config.tag}
    for field in msgspec.structs.fields(value):
        item = getattr(value, field.name)
        if not (config.omit_defaults and item is field.default):
            tagged[field.encode_name] = jsonable(item, depth)
    return tagged


def _key(key: object) -> str:
    return well_formed(key) if isinstance(key, str) else _repr(key)


def _repr(value: object) -> str:
    try:
        return well_formed(repr(value))
    except Exception:
        return f"<{type(value).__name__}>"


def decode_message(data: bytes | str) -> AgentMessage:
    """Decode a message.

    Raises `DecodeError`, with the path and the reason.
    """
    message: AgentMessage = decode_json(data, AgentMessage)
    if message.timestamp is None:
        date_message(message, decoder_for(Stamp).decode(data))
    return message


_making_decoders = Lock()


@cache
def decoder_for(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder for a type, made when first needed: making it takes longer than decoding.

    One at a time: msgspec crashes if two threads inspect the same struct at once.
    """
    with _making_decoders:
        return msgspec.json.Decoder(kind)


def date_message(message: AgentMessage, stamp: Stamp) -> None:
    """Set the timestamp of a message that was just decoded, if it was written without one."""
    if stamp.timestamp is msgspec.UNSET:
        force_setattr(message, "timestamp", now_ms())


class MalformedRow(Struct, frozen=True):
    """A line of a transcript that could not be read."""

    line: int
    """Its number, from 1."""
    error: DecodeError
    raw: bytes
    """The line unchanged, so that it can be repaired or kept."""


class Transcript(Struct, frozen=True):
    """The content of a file: the messages, and the rows that could not be read."""

    messages: tuple[AgentMessage, ...]
    malformed: tuple[MalformedRow, ...] = ()


def dump_transcript(messages: Iterable[AgentMessage]) -> bytes:
    """The messages as JSON lines. Never fails for a message's content; see `encode_message`."""
    messages = tuple(messages)
    try:
        return _encoder.encode_lines(messages)
    except Exception:
        return b"".join([encode_message(message) + b"\n" for message in messages])


def load_transcript(source: bytes | str | Iterable[bytes | str]) -> Transcript:
    """Read JSON lines, from one string or from lines (such as an open file).

    Never raises for the content of the lines; blank ones are skipped.
    """
    if isinstance(source, str):
        source = source.encode("utf-8", "surrogatepass")
    if isinstance(source, bytes):
        source = source.removeprefix(_BYTE_ORDER_MARK)
        messages = _load_clean(source)
        if messages is not None:
            return Transcript(messages)
        source = source.split(b"\n")
    return _load_lines(source)


def _load_clean(data: bytes) -> tuple[AgentMessage, ...] | None:
    """All rows at once, or None unless each line is a message with a timestamp."""
    try:
        messages: list[AgentMessage] = decoder_for(AgentMessage).decode_lines(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if not _is_one_a_line(data, len(messages)):
        return None
    for message in messages:
        if message.timestamp is None:
            return None
    return tuple(messages)


def _is_one_a_line(rows: bytes, count: int) -> bool:
    """Whether there is one object per line. The decoder would accept any white space between them.

    Rows as this module writes them are searched first: a longer pattern is found faster.
    """
    breaks = rows.count(b"\n") - rows.endswith(b"\n")
    if rows[:1] != b"{" or breaks != count - 1:
        return False
    return rows.count(b'}\n{"role":"') == breaks or rows.count(b"}\n{") == breaks


def _load_lines(lines: Iterable[bytes | str]) -> Transcript:
    messages: list[AgentMessage] = []
    malformed: list[MalformedRow] = []
    for number, line in enumerate(lines, 1):
        raw = line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line
        raw = raw.rstrip(b"\r\n")
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if not raw.strip():
            continue
        try:
            messages.append(decode_message(raw))
        except DecodeError as error:
            malformed.append(MalformedRow(number, error, raw))
    return Transcript(tuple(messages), tuple(malformed))
