"""Stand-ins to test an agent without a model and without waiting.

    stream = ScriptedStream([call("search", query="rust"), "Here is what I found."])
    sink, clock = RecordingSink(), FakeClock()
    config = LoopConfig(stream=stream, tools=[search], event_sink=sink, clock=clock)

The project's own tests use nothing else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec.structs import replace

from clark_agent.cancellation import CancellationToken
from clark_agent.events import AgentEvent
from clark_agent.messages.wire import encode_json
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    Chunk,
    Done,
    Error,
    MessageAssembler,
    ReasoningChunk,
    ReasoningDetailsChunk,
    Start,
    StreamChunk,
    StreamErrorKind,
    StreamEvent,
    StreamRequest,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
)
from clark_agent.types import (
    AssistantMessage,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolCall,
)

__all__ = ["FakeClock", "RecordingSink", "ScriptedStream", "call", "say"]

_E = TypeVar("_E", bound=AgentEvent)


def say(text: str, *calls: ToolCall) -> AssistantMessage:
    """Return an answer with text, followed by the given tool calls."""
    return AssistantMessage.from_calls(calls, text) if calls else AssistantMessage.from_text(text)


def call(name: str, /, *, call_id: str = "", **arguments: Any) -> ToolCall:
    """Return a tool call. Without an id, `ScriptedStream` assigns one: ``call_1``, ``call_2``, …"""
    return ToolCall(call_id, name, arguments)


Step: TypeAlias = (
    str
    | ToolCall
    | AssistantMessage
    | BaseException
    | Iterable[ToolCall]
    | Iterable[StreamEvent]
    | Callable[[StreamRequest], "Step"]
)
"""What the scripted model does in one call: say a text, make one or more tool calls, return a whole
message, yield exactly the given events, raise, or compute one of these from the request.
"""

_EMPTY = AssistantMessage((), StopReason.OTHER)


class ScriptedStream:
    """A transport that plays a script, one step for each call, and records the requests.

    Text, thoughts and reasoning are streamed word by word, everything else in one piece. If the
    signal is cancelled, the step ends with an error of kind ``aborted``; events that a step gives
    itself are played unchanged. After its end, the script fails with a fatal stream error that says
    so. With ``at_end="empty"`` it returns streams without an answer instead, with ``"repeat"`` the
    last step again.
    """

    def __init__(
        self, script: Iterable[Step], *, at_end: Literal["error", "empty", "repeat"] = "error"
    ) -> None:
        self.script = list(script)
        self.at_end = at_end
        self.requests: list[StreamRequest] = []
        self._ids = count(1)

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        """Play the next step."""
        if signal.cancelled:
            yield _aborted(MessageAssembler(), signal)
            return
        self.requests.append(request)
        number = len(self.requests)
        if number > len(self.script) and (self.at_end == "error" or not self.script):
            text = f"this is call {number}, but the script ends with call {len(self.script)}"
            yield Error(_EMPTY, StreamErrorKind.FATAL, text)
            return
        if number > len(self.script) and self.at_end == "empty":
            return
        step = self.script[min(number, len(self.script)) - 1]
        for event in self._events(step, request, signal):
            yield event

    def _events(
        self, step: Step, request: StreamRequest, signal: CancellationToken
    ) -> Iterable[StreamEvent]:
        if isinstance(step, BaseException):
            raise step.with_traceback(None)  # without its traceback, which would grow each time
        if callable(step):
            return self._events(step(request), request, signal)
        if isinstance(step, str):
            return self._stream(AssistantMessage.from_text(step), signal)
        if isinstance(step, ToolCall):
            return self._stream(AssistantMessage.from_calls([step]), signal)
        if isinstance(step, AssistantMessage):
            return self._stream(step, signal)
        items: Sequence[Any] = list(step)
        if items and all(isinstance(item, ToolCall) for item in items):
            return self._stream(AssistantMessage.from_calls(items), signal)
        return items

    def _stream(
        self, message: AssistantMessage, signal: CancellationToken
    ) -> Iterable[StreamEvent]:
        message = replace(message, content=tuple([self._with_id(b) for b in message.content]))
        streamed = MessageAssembler()
        yield Start(_EMPTY)
        for chunk in _chunks(message):
            if signal.cancelled:
                yield _aborted(streamed, signal)
                return
            streamed.feed(chunk)
            yield Chunk(chunk)
        yield _aborted(streamed, signal) if signal.cancelled else Done(message)

    def _with_id(self, block: Any) -> Any:
        if isinstance(block, ToolCall) and not block.id:
            return replace(block, id=f"call_{next(self._ids)}")
        return block


def _chunks(message: AssistantMessage) -> Iterator[StreamChunk]:
    """Yield the deltas that make up the message."""
    calls = count()
    for block in message.content:
        if isinstance(block, TextContent):
            yield from map(TextChunk, _words(block.text))
        elif isinstance(block, ThinkingContent):
            yield from map(ThinkingChunk, _words(block.text))
        elif isinstance(block, ReasoningContent):
            yield from map(ReasoningChunk, _words(block.text))
        elif isinstance(block, ReasoningDetailsContent):
            yield ReasoningDetailsChunk(tuple(block.details))
        elif isinstance(block, ToolCall):
            arguments = encode_json(block.arguments).decode()
            yield ToolCallChunk(next(calls), block.id, block.name, arguments)
        elif isinstance(block, (ImageContent, ProviderContent)):
            yield BlockChunk(block)
    yield from map(AnnotationChunk, message.annotations)


def _words(text: str) -> list[str]:
    return re.findall(r"\S+\s*|\s+", text)


def _aborted(streamed: MessageAssembler, signal: CancellationToken) -> Error:
    text = signal.reason or "the call was cancelled"
    partial = streamed.message(StopReason.ABORTED, error_message=text)
    return Error(partial, StreamErrorKind.ABORTED, text)


class RecordingSink:
    """A sink that records every event."""

    def __init__(self) -> None:
        self.events: list[AgentEvent] = []

    def __call__(self, event: AgentEvent) -> None:
        """Record the event."""
        self.events.append(event)

    @property
    def types(self) -> list[str]:
        """The types of the events in order, as in their JSON."""
        return [str(event.__struct_config__.tag) for event in self.events]

    def of(self, kind: type[_E]) -> list[_E]:
        """Return the events of one class."""
        return [event for event in self.events if isinstance(event, kind)]


class FakeClock:
    """A clock that advances only by `sleep`, without waiting. Its ids count from 1."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.time_ms = now_ms
        self.sleeps: list[float] = []
        self._ids = count(1)

    def now_ms(self) -> int:
        """Return the current time."""
        return self.time_ms

    async def sleep(self, seconds: float) -> None:
        """Advance the time, and let other tasks run."""
        self.sleeps.append(seconds)
        self.time_ms += round(seconds * 1000)
        await asyncio.sleep(0)

    def new_id(self) -> str:
        """Return ``id-1``, ``id-2``, …"""
        return f"id-{next(self._ids)}"
