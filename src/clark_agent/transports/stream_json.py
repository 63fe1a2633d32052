"""The JSON format of requests and stream events, for recordings and the gateway.

An event is an object with a ``type``: ``waiting``, ``start``, ``chunk``, ``done`` or ``error``.
Messages, chunks and tools inside it have their usual JSON form. A request is an object with the
fields of `clark_agent.stream.StreamRequest`, and the name of a model if there are several. Decoding
restores everything except an error's cause: only this package's own exceptions are encoded, because
the text of another exception may hold a key.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeAlias, assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from clark_agent.errors import (
    AccessRefused,
    DecodeError,
    ReplayRefused,
    StreamTimeout,
    TransportError,
)
from clark_agent.messages.wire import decode_json, encode_json, encode_strictly
from clark_agent.reasoning import ReplayViolation
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    ResponseInfo,
    Start,
    StreamChunk,
    StreamErrorKind,
    StreamEvent,
    StreamRequest,
    ToolSchema,
    Waiting,
)
from clark_agent.types import AgentMessage, AssistantMessage, StopReason, Usage

__all__ = [
    "ChunkRecord",
    "DoneRecord",
    "ErrorRecord",
    "EventRecord",
    "StartRecord",
    "StreamCall",
    "WaitingRecord",
    "call_fields",
    "decode_call",
    "decode_event",
    "encode_call",
    "encode_event",
    "from_record",
    "to_record",
]

_EMPTY = AssistantMessage((), StopReason.OTHER)


# --- events -----------------------------------------------------------------------------------


class TimeoutCause(Struct, frozen=True, tag_field="type", tag="timeout"):
    """The server took too long."""

    phase: Literal["connect", "idle", "total"]
    seconds: float | None


class ReplayCause(Struct, frozen=True, tag_field="type", tag="replay_refused"):
    """The history lacks reasoning that the provider requires."""

    index: int
    violation: ReplayViolation


class AccessCause(Struct, frozen=True, tag_field="type", tag="access_refused"):
    """The provider or a gateway rejected the key."""

    by: Literal["provider", "gateway"]
    status: int
    text: str


class OtherCause(Struct, frozen=True, tag_field="type", tag="transport"):
    """The text of another error of a transport."""

    text: str


CauseRecord: TypeAlias = TimeoutCause | ReplayCause | AccessCause | OtherCause


class WaitingRecord(Struct, frozen=True, tag_field="type", tag="waiting"):
    """The request waits, at least ``seconds``; null: it is not known how long."""

    seconds: float | None
    reason: str


class StartRecord(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="start"):
    """The model has started to answer. Without ``partial`` the message is still empty."""

    partial: AssistantMessage | None = None
    details: Any = None
    response: ResponseInfo | None = None


class ChunkRecord(Struct, frozen=True, tag_field="type", tag="chunk"):
    """A delta of the message."""

    chunk: StreamChunk


class DoneRecord(Struct, frozen=True, tag_field="type", tag="done"):
    """The whole message. The last event of an answer."""

    message: AssistantMessage


class ErrorRecord(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="error"):
    """The answer failed; ``partial`` is the message so far. The last event of an answer."""

    partial: AssistantMessage
    kind: StreamErrorKind
    message: str
    cause: CauseRecord | None = None


EventRecord: TypeAlias = WaitingRecord | StartRecord | ChunkRecord | DoneRecord | ErrorRecord


def to_record(event: StreamEvent) -> EventRecord:
    """Convert an event to the form that is encoded."""
    match event:
        case Chunk():
            return ChunkRecord(event.chunk)
        case Start():
            partial = event.partial if event.partial != _EMPTY else None
            return StartRecord(partial, event.details, event.response)
        case Done():
            return DoneRecord(event.message)
        case Error():
            return ErrorRecord(event.partial, event.kind, event.message, _written(event.cause))
        case Waiting():
            return WaitingRecord(event.seconds, event.reason)
        case _:
            assert_never(event)


def from_record(record: EventRecord) -> StreamEvent:
    """Convert a decoded record to its event."""
    match record:
        case ChunkRecord():
            return Chunk(record.chunk)
        case StartRecord():
            return Start(record.partial or _EMPTY, record.details, record.response)
        case DoneRecord():
            return Done(record.message)
        case ErrorRecord():
            return Error(record.partial, record.kind, record.message, _read(record.cause))
        case WaitingRecord():
            return Waiting(record.seconds, record.reason)
        case _:
            assert_never(record)


def _written(cause: Exception | None) -> CauseRecord | None:
    if isinstance(cause, StreamTimeout):
        phase: Any = cause.phase
        return TimeoutCause(phase, cause.seconds)
    if isinstance(cause, ReplayRefused):
        return ReplayCause(cause.index, cause.violation)
    if isinstance(cause, AccessRefused):
        return AccessCause(cause.by, cause.status, str(cause))
    return OtherCause(str(cause)) if isinstance(cause, TransportError) else None


def _read(cause: CauseRecord | None) -> Exception | None:
    match cause:
        case None:
            return None
        case TimeoutCause():
            return StreamTimeout(cause.phase, cause.seconds)
        case ReplayCause():
            return ReplayRefused(cause.index, cause.violation)
        case AccessCause():
            return AccessRefused(cause.by, cause.status, cause.text)
        case OtherCause():
            return TransportError(cause.text)
        case _:
            assert_never(cause)


def encode_event(event: StreamEvent) -> bytes:
    """Encode the event as JSON on one line."""
    return encode_json(to_record(event))


def decode_event(data: bytes) -> StreamEvent:
    """Decode an event from JSON. Raises `DecodeError`.

    msgspec rejects escapes of lone surrogates and invalid UTF-8. Here the former are accepted, and
    the latter is replaced.
    """
    try:
        return from_record(decode_json(data, EventRecord))
    except DecodeError as error:
        try:
            plain = json.loads(data.decode(errors="replace"))
            record: EventRecord = msgspec.convert(plain, EventRecord)
        except (ValueError, RecursionError):
            raise error from None
        return from_record(record)


# --- requests ---------------------------------------------------------------------------------


class StreamCall(StreamRequest, frozen=True, kw_only=True):
    """A request, and the name of the model that it is for."""

    system_prompt: str = ""
    messages: tuple[AgentMessage, ...]
    tools: tuple[ToolSchema, ...] = ()
    model: str | None = None

    def to_request(self) -> StreamRequest:
        """Return the request without the model's name."""
        fields = asdict(self)
        del fields["model"]
        return StreamRequest(**fields)


def decode_call(data: bytes) -> StreamCall:
    """Decode a call from JSON. Raises `DecodeError`, which names the path and the reason.

    A client generated from the JSON Schema may write an integer as ``1.0``: JSON Schema allows it.
    """
    try:
        return decode_json(data, StreamCall)
    except DecodeError as error:
        if "got `float`" not in error.reason:
            raise
        plain = decode_json(data, Any)
        for fields in _with_integers(plain):
            for name, value in fields.items():
                if name in _INTEGERS and isinstance(value, float) and value.is_integer():
                    fields[name] = int(value)
        return decode_json(encode_json(plain), StreamCall)


_INTEGERS = frozenset({"max_output_tokens", "timestamp", "start", "end", *Usage.__struct_fields__})


def _with_integers(call: Any) -> list[dict[str, Any]]:
    """The objects inside a call that have integer fields."""
    messages: Any = call.get("messages") if isinstance(call, dict) else None
    objects: list[Any] = [call, *(messages if isinstance(messages, list) else ())]
    for part in [part for part in objects if isinstance(part, dict)]:
        notes = part.get("annotations")
        objects += [part.get("usage"), *(notes if isinstance(notes, list) else ())]
    return [part for part in objects if isinstance(part, dict)]


def encode_call(request: StreamRequest, model: str | None = None) -> bytes:
    """Encode a call as JSON. Raises the encoder's exceptions for values that JSON cannot hold."""
    return encode_strictly(call_fields(request, model))


def call_fields(request: StreamRequest, model: str | None = None) -> dict[str, Any]:
    """The fields of a call. ``output_schema`` is left out if it is not set."""
    fields = asdict(request)
    if request.output_schema is None:
        del fields["output_schema"]
    return fields if model is None else {"model": model, **fields}
