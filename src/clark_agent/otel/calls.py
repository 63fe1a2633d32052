"""The spans around the effects of a run: its model calls and its tool calls.

Whatever fails here, the effect itself happens, and its result or its exception passes unchanged.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from inspect import isawaitable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from clark_agent._text import message_of
from clark_agent.cancellation import CancellationToken
from clark_agent.effects import Child, Effects
from clark_agent.engine.supervised import is_cancelled
from clark_agent.errors import RunLetGo, ToolSuspended
from clark_agent.otel import conventions as names
from clark_agent.otel._guard import guarded
from clark_agent.otel.current import InContext, OwnContext
from clark_agent.otel.server import server_of
from clark_agent.otel.starting import encodable, start_span
from clark_agent.otel.usage import usage_attributes
from clark_agent.prices import ModelRef
from clark_agent.result import RunResult
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    ResponseInfo,
    Start,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
    Waiting,
)
from clark_agent.tools.base import AgentTool, ToolContext, ToolResult
from clark_agent.types import AssistantMessage, StopReason, Usage

if TYPE_CHECKING:
    from clark_agent.otel.spans import RunSpans

__all__ = ["TracedEffects"]

AskModel = Callable[[StreamFn, StreamRequest, CancellationToken], AsyncIterable[StreamEvent]]

_NOT_FAILED = (ToolSuspended, RunLetGo)
TIMEOUT = "timeout"
# How the loop takes answers that end with a failure which the transport does not report.
_ANSWERS_FAILED = {
    StopReason.ERROR: str(StreamErrorKind.TRANSIENT),
    StopReason.ABORTED: str(StreamErrorKind.ABORTED),
}
# The reasons of our own transports: other ones may quote anything.
_WAITING_FOR = {
    *map(str, StreamErrorKind),
    "requests_per_minute",
    "tokens_per_minute",
    "concurrency",
}


class TracedEffects(Effects):
    """The effects of a run, with a span around each model call and each tool call."""

    def __init__(self, inner: Effects, run: RunSpans) -> None:
        self._inner = inner
        self._run = run

    def ask_model(
        self, stream: StreamFn, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterable[StreamEvent]:
        """Call the model, in a span that ends with its answer."""
        if not self._run.run.has_model:
            return self._inner.ask_model(stream, request, signal)
        call = ModelCall(self._run, stream, request, signal)
        return self._traced(call, self._inner.ask_model, stream, request, signal)

    def consult_model(
        self, stream: StreamFn, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterable[StreamEvent]:
        """Call a model for a plugin, in a span of the same kind."""
        call = ModelCall(self._run, stream, request, signal, beside=ModelRef.of(None, stream))
        return self._traced(call, self._inner.consult_model, stream, request, signal)

    def _traced(
        self,
        call: ModelCall,
        ask: AskModel,
        stream: StreamFn,
        request: StreamRequest,
        signal: CancellationToken,
    ) -> AsyncIterable[StreamEvent]:
        own = OwnContext(call.context)
        try:
            events = own.run(ask, stream, request, signal)
        except BaseException as error:
            call.raised(error)
            raise
        if not hasattr(type(events), "__aiter__"):  # the loop says what is wrong with it
            call.raised(TypeError())
            return events
        return TracedStream(events, call, own)

    def run_tool(self, tool: AgentTool, args: Any, ctx: ToolContext) -> Awaitable[ToolResult]:
        """Run a tool, in a span."""
        call = ToolSpan(self._run, tool, args, ctx)
        token = attach(call.context)
        try:
            work: Any = self._inner.run_tool(tool, args, ctx)
        except BaseException as error:
            call.raised(error)
            raise
        finally:
            detach(token)
        if not isawaitable(work):  # the loop says what is wrong with it
            call.raised(TypeError())
            return work  # type: ignore[no-any-return]
        return _followed(work, call)

    def run_child(self, child: Child) -> Awaitable[RunResult]:
        """Start a child run. It has its own trace, below the tool's span."""
        return self._inner.run_child(child)


# --- tools --------------------------------------------------------------------------------------


async def _followed(work: Awaitable[ToolResult], call: ToolSpan) -> ToolResult:
    try:
        result = await InContext(work, call.context)
    except BaseException as error:
        call.raised(error)
        raise
    call.returned(result)
    return result


class ToolSpan:
    """The span of a tool call. It ends when the call has its result.

    That a tool was left behind, and still runs, changes nothing.
    """

    __slots__ = ("_began", "_ctx", "_is_over", "_labels", "_run", "_span", "context")

    def __init__(self, run: RunSpans, tool: AgentTool, args: Any, ctx: ToolContext) -> None:
        self._run = run
        self._ctx = ctx
        self._began = perf_counter()
        self._is_over = False
        self._labels: dict[str, str] = encodable(
            {
                names.OPERATION_NAME: names.EXECUTE_TOOL,
                names.TOOL_NAME: tool.name,
                names.TOOL_TYPE: "function",
            }
        )
        self._span: Span = INVALID_SPAN
        self.context: Context = run.turn_context
        ctx.when_settled = self.settled
        self._start(tool, args, ctx)

    @guarded
    def _start(self, tool: AgentTool, args: Any, ctx: ToolContext) -> None:
        run = self._run
        attributes = {**self._labels}
        if tool.description:
            attributes[names.TOOL_DESCRIPTION] = tool.description
        self._span, self.context = span, _ = start_span(
            run.tracing.tracer,
            f"{names.EXECUTE_TOOL} {tool.name}",
            run.turn_context,
            attributes=attributes,
        )
        if run.tracing.content is not None and span.is_recording():
            span.set_attributes(run.call_id(names.TOOL_CALL_ID, ctx.tool_call_id))
            span.set_attributes(run.tracing.content.of_arguments(args))

    @guarded
    def returned(self, result: ToolResult) -> None:
        """The tool has returned."""
        if self._is_over:
            return
        content, error = self._run.tracing.content, None
        is_result = isinstance(result, ToolResult)
        if is_result and result.is_error:
            error = "tool_error"
            self._run.mark_failed(self._span, error, "the tool reports an error")
        if is_result and content is not None and self._span.is_recording():
            self._span.set_attributes(content.of_result(result))
        self._end(error)

    @guarded
    def raised(self, error: BaseException) -> None:
        """The tool has raised."""
        if self._is_over:
            return
        if isinstance(error, _NOT_FAILED):
            self._span.set_attribute(names.IS_SUSPENDED, True)
            self._end(None)
            return
        kind = type(error).__qualname__
        if isinstance(error, CancelledError) and self._ctx.signal.reason == TIMEOUT:
            kind = TIMEOUT
        self._run.mark_failed(self._span, kind, message_of(error))
        self._end(kind)

    @guarded
    def settled(self) -> None:
        """The call has its result. A tool that has not ended was stopped, and left behind."""
        if not self._is_over:
            self.raised(CancelledError("the tool did not stop, and was left behind"))

    def _end(self, error: str | None) -> None:
        self._is_over = True
        self._ctx.when_settled = None
        seconds = perf_counter() - self._began
        if self._run.tracing.metrics is not None:
            self._run.tracing.metrics.tool_called(self._labels, seconds, error)
        self._span.end()


# --- the model ----------------------------------------------------------------------------------


class TracedStream:
    """The events of a model call. The transport runs in the span. A span that it makes the current
    one itself, around its yields, stays the current one in its next steps.
    """

    __slots__ = ("_call", "_events", "_iterator", "_own")

    def __init__(
        self, events: AsyncIterable[StreamEvent], call: ModelCall, own: OwnContext
    ) -> None:
        self._events = events
        self._call = call
        self._own = own
        self._iterator: AsyncIterator[StreamEvent] | None = None

    def __aiter__(self) -> TracedStream:
        self._iterator = self._own.run(aiter, self._events)
        return self

    async def __anext__(self) -> StreamEvent:
        assert self._iterator is not None
        call = self._call
        try:
            event = await self._own.steps(self._iterator.__anext__())
        except StopAsyncIteration:
            call.ended()
            raise
        except BaseException as error:
            call.raised(error)
            raise
        if type(event) is Chunk:
            call.chunks.append(perf_counter())
        else:
            call.note(event)
        return event

    async def aclose(self) -> None:
        """Close the transport's stream. An answer that has not ended was interrupted."""
        self._call.stopped()
        if (close := getattr(self._events, "aclose", None)) is not None:
            await self._own.steps(close())


class ModelCall:
    """The span of a model call."""

    __slots__ = (
        "_began",
        "_beside",
        "_is_over",
        "_labels",
        "_run",
        "_signal",
        "_span",
        "chunks",
        "context",
    )

    def __init__(
        self,
        run: RunSpans,
        stream: StreamFn,
        request: StreamRequest,
        signal: CancellationToken,
        *,
        beside: ModelRef | None = None,
    ) -> None:
        self._run = run
        self._signal = signal
        self._beside = beside
        """The model that a plugin asks beside the turn."""
        labels = run.labels if beside is None else run.labels_of(beside)
        self._labels: dict[str, str | int] = {**labels}
        if beside is not None:
            self._labels[names.PLUGIN] = run.asking
        self._began = perf_counter()
        self._is_over = False
        self._span: Span = INVALID_SPAN
        self.chunks: list[float] = []
        """When each chunk arrived."""
        self.context: Context = run.turn_context
        run.leave_model_call()
        run.model_call = self
        self._start(stream, request)

    @guarded
    def _start(self, stream: StreamFn, request: StreamRequest) -> None:
        run = self._run
        self._labels.update(server_of(stream))
        attributes: dict[str, Any] = {**self._labels, names.REQUEST_STREAM: True}
        if self._beside is None:
            attributes[names.ATTEMPT] = run.begin_attempt()
        model = self._labels.get(names.REQUEST_MODEL)
        self._span, self.context = span, _ = start_span(
            run.tracing.tracer,
            names.CHAT if model is None else f"{names.CHAT} {model}",
            run.turn_context,
            SpanKind.CLIENT,
            attributes,
        )
        if span.is_recording():
            span.set_attributes(encodable(_request_attributes(run, request)))
            if run.tracing.content is not None:
                span.set_attributes(run.tracing.content.of_request(request))

    @guarded
    def note(self, event: Any) -> None:
        """What is not a chunk: an event, or what a broken transport yields."""
        if self._is_over:
            return
        match event:
            case Start(response=ResponseInfo() as response):
                self._responds(response)
            case Done(message):
                self._answered(message)
            case Error(partial, kind, text):
                usage: Any = getattr(partial, "usage", None)
                usage = usage if isinstance(usage, Usage) else None
                error = _kind(kind)
                if error == StreamErrorKind.ABORTED and self._is_stopped():
                    self.stopped(usage)
                else:
                    self._failed(error, str(text), usage)
            case Waiting(seconds, reason):
                known = reason in _WAITING_FOR
                noted: dict[str, Any] = {
                    names.REASON: reason if known else self._run.said(str(reason), names.OTHER)
                }
                if seconds is not None:
                    noted[names.SECONDS] = seconds
                self._span.add_event(names.REQUEST_DELAYED, noted)
            case Start() | Chunk():
                pass
            case _:  # the loop says what is wrong with it
                self.raised(TypeError("the transport yielded something else than an event"))

    def _responds(self, response: ResponseInfo) -> None:
        optional = {names.RESPONSE_ID: response.id, names.RESPONSE_MODEL: response.model}
        found = encodable({k: v for k, v in optional.items() if v is not None})
        self._span.set_attributes(found)
        if response.model is not None:
            self._labels[names.RESPONSE_MODEL] = found[names.RESPONSE_MODEL]

    def _answered(self, message: Any) -> None:
        if not isinstance(message, AssistantMessage):
            self.raised(TypeError("Done has no message"))
            return
        content = self._run.tracing.content
        if content is not None and self._span.is_recording():
            self._span.set_attributes(content.of_answer(message))
        error = _ANSWERS_FAILED.get(message.stop_reason)
        if message.stop_reason is StopReason.ABORTED and self._is_stopped():
            self.stopped(message.usage)
            return
        if error is not None:
            self._run.mark_failed(self._span, error, message.error_message or "")
        self._end(error, message.usage, message.stop_reason)

    def _failed(self, kind: str, text: str, usage: Usage | None) -> None:
        self._run.mark_failed(self._span, kind, text)
        self._end(kind, usage, None)

    @guarded
    def raised(self, error: BaseException) -> None:
        """The transport has raised, or reading was interrupted."""
        if self._is_over:
            return
        if isinstance(error, GeneratorExit) or (
            isinstance(error, CancelledError) and self._is_stopped()
        ):
            self.stopped()
        else:
            self._failed(type(error).__qualname__, message_of(error), None)

    def _is_stopped(self) -> bool:
        """Whether the run does not want the answer any more. Otherwise a transport that says so has
        failed.
        """
        return self._signal.cancelled or is_cancelled()

    @guarded
    def ended(self) -> None:
        """The transport has ended. Without an answer it has failed, unless the run is stopped."""
        if self._is_over or self._signal.cancelled:
            self.stopped()
        else:
            self._failed(str(StreamErrorKind.EMPTY), "the stream ended without an answer", None)

    @guarded
    def stopped(self, usage: Usage | None = None) -> None:
        """Nothing more is read. Without an answer, reading was interrupted, which is no failure of
        the model.
        """
        if not self._is_over:
            self._span.set_attribute(names.IS_INTERRUPTED, True)
            self._end(None, usage, None)

    def _end(self, error: str | None, usage: Usage | None, stopped: StopReason | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._run.model_call is self:
            self._run.model_call = None
        run, span, chunks, now = self._run, self._span, self.chunks, perf_counter()
        seconds = now - self._began
        first = chunks[0] - self._began if chunks else None
        cost = None if usage is None else run.spend(usage, self._beside)
        if span.is_recording():
            found: dict[str, Any] = {} if usage is None else dict(usage_attributes(usage))
            if first is not None:
                found[names.RESPONSE_TIME_TO_FIRST_CHUNK] = first
            if cost is not None:
                found[names.COST] = cost
            if stopped is not None:
                found[names.RESPONSE_FINISH_REASONS] = (names.finish_reason(stopped),)
                if chunks and usage is not None and usage.output_tokens > 1:
                    each = (now - chunks[0]) / (usage.output_tokens - 1)
                    found[names.TIME_PER_OUTPUT_TOKEN] = each
            elif error is not None and chunks:  # it broke off
                found[names.RESPONSE_FINISH_REASONS] = ("error",)
            span.set_attributes(found)
        if run.tracing.metrics is not None:
            run.tracing.metrics.model_called(
                self._labels,
                seconds=seconds,
                error=error,
                usage=usage,
                cost=cost,
                first_chunk=first,
                chunks=chunks,
            )
        span.end()


def _kind(kind: Any) -> str:
    try:
        return str(StreamErrorKind(kind))
    except ValueError:  # the loop takes it like this
        return str(StreamErrorKind.FATAL)


def _request_attributes(run: RunSpans, request: StreamRequest) -> dict[str, Any]:
    found: dict[str, Any] = {names.TURN_NUMBER: run.turn, names.RUN_ID: run.run_id}
    optional = {
        names.CONVERSATION_ID: run.conversation_id or None,
        names.REQUEST_MAX_TOKENS: request.max_output_tokens,
        names.REQUEST_TEMPERATURE: request.temperature,
        names.OUTPUT_TYPE: None if request.output_schema is None else "json",
    }
    found.update((name, value) for name, value in optional.items() if value is not None)
    return found
