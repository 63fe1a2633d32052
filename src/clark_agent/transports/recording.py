"""Record what a real provider answered, and play it back.

    stream = RecordingStream(connect("openai:gpt-5"), "answers.jsonl")   # once, with a key
    stream = ReplayStream("answers.jsonl")                               # from then on, without

A recording is a text file: a line that says what it is, then one line a call with what the model
was asked and every event of the answer. It has no headers and no keys. What a model does not see
(times, usage, a tool result's details) is no part of the request, so that a replay does not fail
over it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, assert_never

import msgspec
from msgspec import Struct

from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ConfigError, DecodeError, TransportError
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    Start,
    StreamChunk,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
)
from clark_agent.types import AssistantMessage, CustomMessage, StopReason
from clark_agent.wire import decode_json, encode_json, to_json_value

__all__ = ["RecordingStream", "ReplayMismatch", "ReplayStream"]

FORMAT = "clark-agent answers"
VERSION = 1

_EMPTY = AssistantMessage((), StopReason.OTHER)


# --- the file ---------------------------------------------------------------------------------


class _Header(Struct, frozen=True):
    format: str
    version: int


class _Start(Struct, frozen=True, tag_field="type", tag="start"):
    pass


class _Chunk(Struct, frozen=True, tag_field="type", tag="chunk"):
    chunk: StreamChunk


class _Done(Struct, frozen=True, tag_field="type", tag="done"):
    message: AssistantMessage


class _Error(Struct, frozen=True, tag_field="type", tag="error"):
    partial: AssistantMessage
    kind: StreamErrorKind
    message: str


_Event: TypeAlias = _Start | _Chunk | _Done | _Error


class _Call(Struct, frozen=True):
    """One call. Without a terminal event it was given up by whoever asked."""

    request: dict[str, Any]
    events: tuple[_Event, ...]


def _to_record(event: StreamEvent) -> _Event:
    match event:
        case Start():
            return _Start()
        case Chunk():
            return _Chunk(event.chunk)
        case Done():
            return _Done(event.message)
        case Error():
            return _Error(event.partial, event.kind, event.message)
        case _:
            assert_never(event)


def _from_record(event: _Event) -> StreamEvent:
    match event:
        case _Start():
            return Start(_EMPTY)
        case _Chunk():
            return Chunk(event.chunk)
        case _Done():
            return Done(event.message)
        case _Error():
            return Error(event.partial, event.kind, event.message)
        case _:
            assert_never(event)


# --- the request, as far as the model sees it -------------------------------------------------

_UNSEEN = frozenset({"timestamp", "usage", "error_message", "narration", "details"})
_SECRET_NAMES = ("authorization", "cookie", "header", "password", "secret", "credential")
_SECRET_ENDINGS = ("key", "token")


def _seen(request: StreamRequest) -> dict[str, Any]:
    messages: list[Any] = [
        {
            name: value
            for name, value in msgspec.to_builtins(message, enc_hook=to_json_value).items()
            if name not in _UNSEEN
        }
        for message in request.messages
        if not isinstance(message, CustomMessage)
    ]
    seen = {
        "system_prompt": request.system_prompt,
        "messages": messages,
        "tools": list(request.tools),
        "temperature": request.temperature,
        "max_output_tokens": request.max_output_tokens,
        "reasoning": request.reasoning,
        "force_tool_call": request.force_tool_call,
        "provider_extras": _without_secrets(request.provider_extras),
    }
    # As it will be when it is read again: numbers, enums and structs in their JSON form.
    plain: dict[str, Any] = msgspec.json.decode(encode_json(seen))
    return plain


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_secrets(part) for name, part in value.items() if not _is_secret(name)
        }
    if isinstance(value, (list, tuple)):
        return [_without_secrets(part) for part in value]
    return value


def _is_secret(name: object) -> bool:
    lowered = str(name).lower()
    return any(word in lowered for word in _SECRET_NAMES) or lowered.endswith(_SECRET_ENDINGS)


def _difference(recorded: Any, asked: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Where two JSON values part first, and what stands there in each."""
    if isinstance(recorded, dict) and isinstance(asked, dict):
        for name in [*recorded, *[name for name in asked if name not in recorded]]:
            here = f"{path}.{name}" if path else name
            if found := _difference(recorded.get(name), asked.get(name), here):
                return found
        return None
    if isinstance(recorded, list) and isinstance(asked, list):
        for index, (left, right) in enumerate(zip(recorded, asked, strict=False)):
            if found := _difference(left, right, f"{path}[{index}]"):
                return found
        if len(recorded) == len(asked):
            return None
        shorter = min(len(recorded), len(asked))
        return f"{path}[{shorter}]", _at(recorded, shorter), _at(asked, shorter)
    return None if recorded == asked else (path, recorded, asked)


def _at(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _shown(value: Any) -> str:
    text = "nothing" if value is None else encode_json(value).decode(errors="replace")
    return text if len(text) <= 120 else text[:119] + "…"


# --- recording --------------------------------------------------------------------------------


class RecordingStream:
    """A transport that passes everything on to another one and writes down what came.

    A file that is there already is replaced at the first call, unless ``append`` is set. A call is
    written when it ends; one that is given up before it ends is written as far as it came.
    """

    def __init__(self, inner: StreamFn, path: str | PathLike[str], *, append: bool = False) -> None:
        if not callable(inner):
            raise ConfigError(f"RecordingStream needs a transport, not {inner!r}")
        self.inner = inner
        self.path = Path(path)
        self._has_begun = append and self.path.exists()

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        """Ask the inner transport, and write down what it says."""
        self._begin()
        seen = _seen(request)
        events: list[_Event] = []
        answer = self.inner(request, signal)
        try:
            async for event in answer:
                events.append(_to_record(event))
                yield event
        finally:
            self._write(_Call(seen, tuple(events)))
            if (close := getattr(answer, "aclose", None)) is not None:
                await close()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(encode_json(_Header(FORMAT, VERSION)) + b"\n")

    def _write(self, call: _Call) -> None:
        with self.path.open("ab") as file:
            file.write(encode_json(call) + b"\n")


# --- playing back -----------------------------------------------------------------------------


class ReplayMismatch(TransportError):
    """What is asked is not what was recorded: ``path`` says where they part first."""

    def __init__(self, call: int, path: str, recorded: Any, asked: Any) -> None:
        super().__init__(
            f"the request differs from recorded call {call} at {path}: "
            f"recorded was {_shown(recorded)}, asked is {_shown(asked)}"
        )
        self.call = call
        self.path = path
        self.recorded = recorded
        self.asked = asked


class ReplayStream:
    """A transport that plays a recording.

    Strictly, a request gets the answer that was recorded for the same request; where several were,
    in their order. One that was not recorded is a fatal error that names the first difference from
    the next call of the recording. Leniently (``strict=False``) the answers come in their order
    whatever is asked. Past its end the recording fails with an error that says so.
    """

    def __init__(self, path: str | PathLike[str], *, strict: bool = True) -> None:
        self.path = Path(path)
        self.strict = strict
        calls = enumerate(_load(self.path), start=1)
        self._unplayed: dict[int, _Call] = dict(calls)
        self._count = len(self._unplayed)

    @property
    def unplayed(self) -> tuple[int, ...]:
        """The numbers, from 1, of the calls that nobody has asked for."""
        return tuple(self._unplayed)

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        """Play the answer to this request."""
        try:
            call = self._find(request)
        except TransportError as error:
            yield Error(_EMPTY, StreamErrorKind.FATAL, str(error), error)
            return
        event: _Event | None = None
        for event in call.events:
            if signal.cancelled:
                break
            yield _from_record(event)
        if not isinstance(event, (_Done, _Error)) or signal.cancelled:
            text = signal.reason or "the recorded call was given up here"
            yield Error(_EMPTY, StreamErrorKind.ABORTED, text)

    def _find(self, request: StreamRequest) -> _Call:
        if not self._unplayed:
            text = f"the recording has {self._count} calls, and this is one more"
            raise TransportError(f"{self.path.name}: {text}")
        first = next(iter(self._unplayed))
        if not self.strict:
            return self._unplayed.pop(first)
        asked = _seen(request)
        for number, call in self._unplayed.items():
            if call.request == asked:
                return self._unplayed.pop(number)
        found = _difference(self._unplayed[first].request, asked)
        assert found is not None, "they are not equal"
        raise ReplayMismatch(first, *found)


def _load(path: Path) -> Iterable[_Call]:
    lines = path.read_bytes().splitlines()
    header = _line(path, 1, lines[0] if lines else b"", _Header)
    if header.format != FORMAT or header.version != VERSION:
        raise DecodeError(f"{path.name} is no recording that this version can read", path="line 1")
    return [
        _line(path, number, line, _Call)
        for number, line in enumerate(lines[1:], start=2)
        if line.strip()
    ]


def _line(path: Path, number: int, line: bytes, kind: type[Any]) -> Any:
    try:
        return decode_json(line, kind)
    except DecodeError as error:
        where = f"line {number}, {error.path}"
        raise DecodeError(f"{path.name}: {error.reason}", path=where) from error
