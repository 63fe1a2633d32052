"""The interface to the model: the request, the events of an answer, and how they are folded.

A transport is any callable with the signature of `StreamFn`, such as an async-generator function.
The loop passes it a `StreamRequest` and reads `Start`, `Chunk`…, and one of `Done` and `Error`;
before that `Waiting`, if the request must wait.
Transports fold their provider's deltas with a `MessageAssembler`, so that all of them treat tool
calls, and arguments that are not JSON, in the same way.

This module knows no provider.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeAlias, assert_never

import msgspec
from msgspec import Struct

from clark_agent._text import well_formed
from clark_agent.cancellation import CancellationToken
from clark_agent.clock import SystemClock
from clark_agent.types import (
    AgentMessage,
    Annotation,
    AssistantBlock,
    AssistantMessage,
    ImageContent,
    NonNegativeInt,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolCall,
    Usage,
    arg_parse_error,
)

__all__ = [
    "AnnotationChunk",
    "BlockChunk",
    "Chunk",
    "Done",
    "Error",
    "MessageAssembler",
    "OutputModeName",
    "OutputSchema",
    "ReasoningChunk",
    "ReasoningDetailsChunk",
    "ReasoningEffort",
    "ResponseInfo",
    "Start",
    "StreamChunk",
    "StreamErrorKind",
    "StreamEvent",
    "StreamFn",
    "StreamRequest",
    "TextChunk",
    "ThinkingChunk",
    "ToolCallChunk",
    "ToolSchema",
    "Waiting",
    "output_mode_of",
    "parse_arguments",
]


# --- the request ------------------------------------------------------------------------------


class ReasoningEffort(StrEnum):
    """How much a model should think. Each transport maps it to its provider's setting."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"


class ToolSchema(Struct, frozen=True):
    """A tool as the model sees it."""

    name: str
    description: str
    parameters: Any


class OutputSchema(Struct, frozen=True):
    """A JSON schema that the text of the answer must match, for providers that can ensure it."""

    name: str
    schema: Any
    description: str = ""

    @property
    def instructions(self) -> str:
        """The schema in words, for a system prompt. Raises if it is not JSON."""
        schema = msgspec.json.encode(self.schema).decode()
        return (
            "When you are done, answer with a JSON object that matches this JSON schema, and with "
            f"nothing else:\n{schema}"
        )


OutputModeName: TypeAlias = Literal["tool", "native", "prompted"]
"""The values of `clark_agent.output.OutputMode`, for ``best_output_mode`` of a transport."""


class StreamRequest(Struct, frozen=True, kw_only=True):
    """One call to the model.

    ``messages`` may be a view of the live transcript, which is cheap to pass and never changes;
    a transport that needs a list makes one.
    """

    system_prompt: str
    messages: Sequence[AgentMessage]
    tools: Sequence[ToolSchema] = ()
    temperature: float | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningEffort = ReasoningEffort.MINIMAL
    provider_extras: Any = None
    force_tool_call: bool = False
    output_schema: OutputSchema | None = None
    """Set in the output mode ``native``. A transport that cannot ensure it raises no error: the
    answer is checked anyway. It should describe the schema in the system prompt instead."""


# --- the answer -------------------------------------------------------------------------------


class TextChunk(Struct, frozen=True, gc=False, tag_field="kind", tag="text"):
    """More visible text."""

    delta: str


class ThinkingChunk(Struct, frozen=True, gc=False, tag_field="kind", tag="thinking"):
    """More of a thought that the model writes between tags."""

    delta: str


class ReasoningChunk(Struct, frozen=True, gc=False, tag_field="kind", tag="reasoning"):
    """More readable reasoning from the provider's own channel."""

    delta: str


class ReasoningDetailsChunk(Struct, frozen=True, tag_field="kind", tag="reasoning_details"):
    """More structured reasoning items."""

    delta: tuple[Any, ...]


class ToolCallChunk(Struct, frozen=True, gc=False, tag_field="kind", tag="tool_call_delta"):
    """More of the tool call at ``index``. Only the index identifies the call."""

    index: NonNegativeInt
    id_delta: str | None = None
    name_delta: str | None = None
    arguments_delta: str | None = None


class BlockChunk(Struct, frozen=True, tag_field="kind", tag="block"):
    """A block that arrives in one piece."""

    block: ImageContent | ProviderContent


class AnnotationChunk(Struct, frozen=True, tag_field="kind", tag="annotation"):
    """A source of the text."""

    annotation: Annotation


StreamChunk: TypeAlias = (
    TextChunk
    | ThinkingChunk
    | ReasoningChunk
    | ReasoningDetailsChunk
    | ToolCallChunk
    | BlockChunk
    | AnnotationChunk
)


class StreamErrorKind(StrEnum):
    """The kind of failure that ended a stream; the loop's recovery depends on it."""

    TRANSIENT = "transient"
    """It may work later."""
    PROVIDER_RATE_LIMITED = "provider_rate_limited"
    """The provider limits the rate of requests."""
    ZERO_OUTPUT_TRANSPORT = "zero_output_transport"
    """The connection failed before anything usable arrived."""
    FATAL = "fatal"
    """A retry cannot help: authentication, a bad request, a bug in the transport."""
    EMPTY = "empty"
    """The answer was empty."""
    ABORTED = "aborted"
    """The caller cancelled."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The request is larger than the model's window."""
    INCONSISTENT_TOOL_HISTORY = "inconsistent_tool_history"
    """The provider rejects the transcript: tool calls and results in it do not match."""


class Waiting(Struct, frozen=True, gc=False):
    """The request waits before it is sent, or sent again. Any number of these may precede `Start`;
    later ones are ignored. Listeners get them as `clark_agent.events.RequestDelayed`.
    """

    seconds: float | None
    """It waits at least this long. None: it is not known how long."""
    reason: str
    """Why, as one word: ``requests_per_minute``, ``provider_rate_limited``, …"""


class ResponseInfo(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a provider says about its response, for traces."""

    id: str | None = None
    """Its id at the provider."""
    model: str | None = None
    """The exact model that answers: ``gpt-5-2025-08-07`` when asked for ``gpt-5``."""


class Start(Struct, frozen=True):
    """The provider has begun. ``partial`` is a placeholder for listeners, normally empty.

    ``details`` is open JSON for listeners, in the event that starts the message. ``response`` is
    not a part of any message; a transport whose provider names neither id nor model leaves it out.
    """

    partial: AssistantMessage
    details: Any = None
    response: ResponseInfo | None = None


class Chunk(Struct, frozen=True):
    """A delta for listeners; the loop itself waits for `Done`."""

    chunk: StreamChunk


class Done(Struct, frozen=True):
    """The whole message. Ends the stream."""

    message: AssistantMessage


class Error(Struct, frozen=True):
    """The stream failed; ``partial`` is what had arrived. Ends the stream.

    ``cause``, if given, becomes the cause of the error that ends the run.
    """

    partial: AssistantMessage
    kind: StreamErrorKind
    message: str
    cause: Exception | None = None


StreamEvent: TypeAlias = Waiting | Start | Chunk | Done | Error


class StreamFn(Protocol):
    """The transport.

    Contract: yields exactly one `Done` or `Error`, as its last event; reports failures of model and
    network with `Error` and does not raise (an exception counts as an `Error` of kind ``fatal``
    with that cause); stops soon after ``signal`` is cancelled; closes what it opened when its
    iterator is closed.

    It may also have a method ``best_output_mode(*, has_tools: bool) -> OutputModeName``: how to ask
    its model for a structured output if the user does not say. ``native`` only if the provider
    ensures the schema of a request, also one with tools if ``has_tools``. Default: ``tool``.

    Prices and traces read its attributes ``model``, ``provider`` and ``base_url``, if it has them.
    """

    def __call__(
        self, request: StreamRequest, signal: CancellationToken, /
    ) -> AsyncIterator[StreamEvent]:
        """Call the model."""
        ...


def output_mode_of(stream: StreamFn, *, has_tools: bool) -> OutputModeName:
    """How to ask a transport for a structured output if the user does not say."""
    best: Callable[..., OutputModeName] | None = getattr(stream, "best_output_mode", None)
    return "tool" if best is None else best(has_tools=has_tools)


# --- assembling a message ---------------------------------------------------------------------


class _Text:
    """A run of deltas of one kind. It becomes one block."""

    __slots__ = ("deltas", "kind")

    def __init__(self, kind: type[TextContent | ThinkingContent | ReasoningContent]) -> None:
        self.kind = kind
        self.deltas: list[str] = []

    def build(self) -> AssistantBlock:
        return self.kind(well_formed("".join(self.deltas)))


class _Details:
    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list[Any] = []

    def build(self) -> AssistantBlock:
        return ReasoningDetailsContent(tuple(self.values))


class _Whole:
    __slots__ = ("block",)

    def __init__(self, block: ImageContent | ProviderContent) -> None:
        self.block = block

    def build(self) -> AssistantBlock:
        return self.block


class _Call:
    __slots__ = ("arguments", "id", "made_up_id", "name", "new_id")

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.new_id = new_id
        self.made_up_id: str | None = None
        self.id: list[str] = []
        self.name: list[str] = []
        self.arguments: list[str] = []

    def build(self) -> AssistantBlock:
        if not self.id and self.made_up_id is None:
            self.made_up_id = self.new_id()
        return ToolCall(
            well_formed("".join(self.id)) or self.made_up_id or "",
            well_formed("".join(self.name)),
            parse_arguments("".join(self.arguments)),
        )


class MessageAssembler:
    """Folds chunks into the assistant message that they make up, in linear time.

    A delta continues the newest block if that is of the same kind, and opens a new one otherwise; a
    tool-call delta continues the call of its index, wherever that is. Empty deltas are ignored, so
    the message does not depend on how a provider splits its answer. Arguments are parsed once, at
    the end. A call without an id gets one from ``new_id``.
    """

    __slots__ = ("_annotations", "_blocks", "_calls", "_new_id")

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        self._new_id = new_id or SystemClock().new_id
        self._blocks: list[_Text | _Details | _Call | _Whole] = []
        self._annotations: list[Annotation] = []
        self._calls: dict[int, _Call] = {}

    def feed(self, chunk: StreamChunk) -> None:
        """Add the next chunk."""
        match chunk:
            case TextChunk():
                self._extend(TextContent, chunk.delta)
            case ThinkingChunk():
                self._extend(ThinkingContent, chunk.delta)
            case ReasoningChunk():
                self._extend(ReasoningContent, chunk.delta)
            case ReasoningDetailsChunk():
                self._extend_details(chunk.delta)
            case ToolCallChunk():
                self._extend_call(chunk)
            case BlockChunk():
                self._blocks.append(_Whole(chunk.block))
            case AnnotationChunk():
                self._annotations.append(chunk.annotation)
            case _:
                assert_never(chunk)

    @property
    def empty(self) -> bool:
        """Whether nothing was added yet."""
        return not self._blocks

    def message(
        self,
        stop_reason: StopReason | None = None,
        *,
        error_message: str | None = None,
        timestamp: int | None = None,
        usage: Usage | None = None,
    ) -> AssistantMessage:
        """The message so far; the stop reason defaults to ``tool_use`` or ``end_turn``."""
        content = tuple([block.build() for block in self._blocks])
        if stop_reason is None:
            stop_reason = StopReason.TOOL_USE if self._calls else StopReason.END_TURN
        annotations = tuple(self._annotations)
        return AssistantMessage(content, stop_reason, error_message, timestamp, usage, annotations)

    def _extend(
        self, kind: type[TextContent | ThinkingContent | ReasoningContent], delta: str
    ) -> None:
        if not delta:
            return
        last = self._blocks[-1] if self._blocks else None
        if not isinstance(last, _Text) or last.kind is not kind:
            self._blocks.append(last := _Text(kind))
        last.deltas.append(delta)

    def _extend_details(self, delta: Sequence[Any]) -> None:
        if not delta:
            return
        last = self._blocks[-1] if self._blocks else None
        if not isinstance(last, _Details):
            self._blocks.append(last := _Details())
        last.values.extend(delta)

    def _extend_call(self, chunk: ToolCallChunk) -> None:
        if not (chunk.id_delta or chunk.name_delta or chunk.arguments_delta):
            return
        call = self._calls.get(chunk.index)
        if call is None:
            call = self._calls[chunk.index] = _Call(self._new_id)
            self._blocks.append(call)
        if chunk.id_delta:
            call.id.append(chunk.id_delta)
        if chunk.name_delta:
            call.name.append(chunk.name_delta)
        if chunk.arguments_delta:
            call.arguments.append(chunk.arguments_delta)


def parse_arguments(raw: str) -> Any:
    """A tool call's arguments from the JSON text that the model wrote.

    An empty text means no arguments. Text that is not JSON becomes the object of
    `clark_agent.types.arg_parse_error`, with the text and the reason, so that the loop can report
    it to the model.
    """
    if not raw or raw.isspace():
        return {}
    raw = well_formed(raw)
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        return arg_parse_error(str(error), raw)
    except RecursionError:
        return arg_parse_error("the JSON is nested too deeply", raw)
