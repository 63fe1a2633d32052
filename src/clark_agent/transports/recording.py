"""Records the answers of a real provider, and plays them back.

    stream = RecordingStream(connect("openai:gpt-5"), "answers.jsonl")   # once, with a key
    stream = PlaybackStream("answers.jsonl")                               # from then on, without

A recording is a text file: a header line with format and version, then one line for each call with
the request and all events of the answer. It contains no HTTP headers and no keys, and a new file is
readable only by its owner. Fields that a model does not see (times, usage, a tool result's details)
are not recorded in the request, so that playback does not fail when they differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from clark_agent._differences import first_difference, shown
from clark_agent._private_files import make_folder, open_file
from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ConfigError, DecodeError, TransportError
from clark_agent.messages.wire import decode_json, encode_json, to_json_value
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    MessageAssembler,
    OutputModeName,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
    Waiting,
    output_mode_of,
)
from clark_agent.transports.http.redaction import is_secret
from clark_agent.transports.stream_json import EventRecord, from_record, to_record
from clark_agent.types import AssistantMessage, CustomMessage, StopReason

__all__ = ["PlaybackMismatch", "PlaybackStream", "RecordingStream"]

FORMAT = "clark-agent answers"
VERSION = 1

_EMPTY = AssistantMessage((), StopReason.OTHER)


# --- the file ---------------------------------------------------------------------------------


class _Header(Struct, frozen=True):
    format: str
    version: int


class _Call(Struct, frozen=True, omit_defaults=True):
    """One recorded call."""

    request: dict[str, Any]
    events: tuple[EventRecord, ...]
    given_up: bool = False
    """Whether the caller closed the stream before its end."""


# --- the request, as far as the model sees it -------------------------------------------------

_UNSEEN = frozenset({"timestamp", "usage", "error_message", "annotations", "narration", "details"})


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
        "provider_extras": request.provider_extras,
    }
    if request.output_schema is not None:  # older recordings do not have the field
        seen["output_schema"] = request.output_schema
    # Convert numbers, enums and structs to JSON, to compare equal with a loaded request.
    plain: dict[str, Any] = json.loads(encode_json(seen))
    plain["provider_extras"] = _without_secrets(plain["provider_extras"])
    return plain


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(part) for name, part in value.items() if not is_secret(name)}
    return [_without_secrets(part) for part in value] if isinstance(value, list) else value


_SHOWN = 120


# --- recording --------------------------------------------------------------------------------


class RecordingStream:
    """A transport that wraps another one and records its events.

    The first call replaces an existing file, unless ``append`` is set. A call is written when it
    ends; if the caller closes the stream early, the events so far are written.
    """

    def __init__(self, inner: StreamFn, path: str | PathLike[str], *, append: bool = False) -> None:
        if not callable(inner):
            raise ConfigError(f"RecordingStream needs a transport, not {inner!r}")
        self.inner = inner
        self.path = Path(path)
        self._has_begun = append and self.path.exists() and bool(self.path.stat().st_size)
        if self._has_begun:
            _load(self.path)  # raises if the file is not a recording

    def __repr__(self) -> str:
        return f"RecordingStream({self.path.name!r})"

    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        """That of the inner transport."""
        return output_mode_of(self.inner, has_tools=has_tools)

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        """Call the inner transport and record its events."""
        try:
            seen = _seen(request)
        except (TypeError, ValueError, NotImplementedError, RecursionError) as error:
            failure = TransportError(f"the request cannot be recorded: {error}")
            yield Error(_EMPTY, StreamErrorKind.FATAL, str(failure), failure)
            return
        self._begin()
        events: list[StreamEvent] = []
        given_up = True
        answer = self.inner(request, signal)
        try:
            async for event in answer:
                if not isinstance(event, Waiting):  # playback does not wait
                    events.append(event)
                yield event
            given_up = False
        except Exception as error:
            given_up = False
            text = f"the transport raised {type(error).__name__}"
            events.append(Error(_folded(events), StreamErrorKind.FATAL, text))
            raise
        finally:
            if events and isinstance(events[-1], (Done, Error)):
                given_up = False
            try:
                if (close := getattr(answer, "aclose", None)) is not None:
                    await close()
            finally:
                self._write(_Call(seen, tuple([to_record(event) for event in events]), given_up))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            make_folder(self.path.parent)
            with open(open_file(self.path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.write(encode_json(_Header(FORMAT, VERSION)) + b"\n")

    def _write(self, call: _Call) -> None:
        with open(open_file(self.path, os.O_WRONLY | os.O_APPEND), "ab") as file:
            file.write(encode_json(call) + b"\n")


# --- playing back -----------------------------------------------------------------------------


class PlaybackMismatch(TransportError):
    """A request differs from the recorded one; ``path`` is the place of the first difference."""

    def __init__(self, call: int, path: str, recorded: Any, asked: Any) -> None:
        super().__init__(
            f"the request differs from recorded call {call} at {path}: "
            f"recorded {shown(recorded, _SHOWN)}, requested {shown(asked, _SHOWN)}"
        )
        self.call = call
        self.path = path
        self.recorded = recorded
        self.asked = asked


class PlaybackStream:
    """A transport that plays back a recording.

    By default, a request gets the answer that was recorded for an equal request; several such
    answers are played in order. A request that was not recorded gets a fatal error with the first
    difference from the next unplayed call. With ``strict=False`` the answers are played in order,
    whatever the requests. When all calls are played, every request gets a fatal error.
    """

    def __init__(self, path: str | PathLike[str], *, strict: bool = True) -> None:
        self.path = Path(path)
        self.strict = strict
        calls = enumerate(_load(self.path), start=1)
        self._unplayed: dict[int, _Call] = dict(calls)
        self._count = len(self._unplayed)

    def __repr__(self) -> str:
        return f"PlaybackStream({self.path.name!r})"

    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        """``native`` if the next call was recorded in this mode, else ``tool``."""
        call = next(iter(self._unplayed.values()), None)
        return "native" if call is not None and "output_schema" in call.request else "tool"

    @property
    def unplayed(self) -> tuple[int, ...]:
        """The numbers, from 1, of the recorded calls that were not played."""
        return tuple(self._unplayed)

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        """Play back the answer to this request."""
        try:
            call = self._find(request)
        except TransportError as error:
            yield Error(_EMPTY, StreamErrorKind.FATAL, str(error), error)
            return
        played: list[StreamEvent] = []
        for record in call.events:
            if signal.cancelled:
                break
            played.append(from_record(record))
            yield played[-1]
        is_over = bool(played) and isinstance(played[-1], (Done, Error))
        if not is_over and (signal.cancelled or call.given_up):
            text = signal.reason or "the recorded call was closed here"
            yield Error(_folded(played), StreamErrorKind.ABORTED, text)

    def _find(self, request: StreamRequest) -> _Call:
        if not self._unplayed:
            text = f"the recording has {self._count} calls, and all of them were played"
            raise TransportError(f"{self.path.name}: {text}")
        first = next(iter(self._unplayed))
        if not self.strict:
            return self._unplayed.pop(first)
        asked = _seen(request)
        for number, call in self._unplayed.items():
            if call.request == asked:
                return self._unplayed.pop(number)
        found = first_difference(self._unplayed[first].request, asked)
        assert found is not None, "they are not equal"
        raise PlaybackMismatch(first, *found)


def _folded(events: Iterable[StreamEvent]) -> AssistantMessage:
    """Assemble the partial message from the chunks so far."""
    assembler = MessageAssembler()
    for event in events:
        if isinstance(event, Chunk):
            assembler.feed(event.chunk)
    return assembler.message(StopReason.ABORTED)


def _load(path: Path) -> Iterable[_Call]:
    lines = path.read_bytes().splitlines()
    header = _line(path, 1, lines[0] if lines else b"", _Header)
    if header.format != FORMAT or header.version != VERSION:
        raise DecodeError(
            f"{path.name} is not a recording that this version can read", path="line 1"
        )
    return [
        _line(path, number, line, _Call)
        for number, line in enumerate(lines[1:], start=2)
        if line.strip()
    ]


def _line(path: Path, number: int, line: bytes, kind: type[Any]) -> Any:
    try:
        return decode_json(line, kind)
    except DecodeError as error:
        if b"\\ud" in line:  # possibly a lone surrogate, which only ``json`` can decode
            with suppress(ValueError, RecursionError):
                return msgspec.convert(json.loads(line), kind)
        where = f"line {number}, {error.path}"
        raise DecodeError(f"{path.name}: {error.reason}", path=where) from error
