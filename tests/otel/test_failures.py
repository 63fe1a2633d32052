"""What fails in a run is marked as failed; what fails in the tracing does not touch the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode

from clark_agent import (
    Agent,
    AssistantMessage,
    BeforeRequestContext,
    CancellationToken,
    ChannelSteering,
    Price,
    RunAborted,
    StopReason,
    StreamError,
    UserMessage,
    tool,
)
from clark_agent.budget import Budget
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    Start,
    StreamErrorKind,
    StreamRequest,
    TextChunk,
    Waiting,
)
from clark_agent.testing import FakeClock, ScriptedStream, call
from clark_agent.types import Usage
from tests.otel.conftest import Telemetry

EMPTY = AssistantMessage((), StopReason.OTHER)
FAILED = AssistantMessage((), StopReason.ERROR, "secret")
ABORTED = AssistantMessage((), StopReason.ABORTED, "secret")


def transport(events: Sequence[Any]) -> Any:
    async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[Any]:
        for event in events:
            yield event

    return model


# --- failed model calls -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([], "empty"),
        ([Start(EMPTY), Chunk(TextChunk("Hm"))], "empty"),
        ([Start(EMPTY), Done(FAILED)], "transient"),
        ([Start(EMPTY), Done(ABORTED)], "aborted"),
        ([Start(EMPTY), "secret"], "TypeError"),
        ([Done("secret")], "TypeError"),  # type: ignore[arg-type]
        ([Error(EMPTY, StreamErrorKind.EMPTY, "secret")], "empty"),
        ([Error(EMPTY, "secret", "secret")], "fatal"),  # type: ignore[arg-type]
    ],
)
async def test_a_model_call_without_an_answer_has_failed(
    telemetry: Telemetry, events: Sequence[Any], kind: str
) -> None:
    agent = Agent(transport(events), plugins=[telemetry.tracing()], clock=FakeClock())
    with pytest.raises((StreamError, RunAborted)):
        await agent.run("Go.")
    chats = [span for span in telemetry.spans if span.name == "chat"]
    for span in chats:
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == kind
        assert "secret" not in span.to_json()
    points = telemetry.metrics()["gen_ai.client.operation.duration"]
    assert {point.attributes["error.type"] for point in points} == {kind}
    assert sum(point.count for point in points) == len(chats) > 0


async def test_a_transport_that_ends_because_the_run_is_stopped_was_interrupted(
    telemetry: Telemetry,
) -> None:
    token = CancellationToken()

    async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[Any]:
        yield Start(EMPTY)
        token.cancel("enough")

    with pytest.raises(RunAborted):
        await Agent(model, plugins=[telemetry.tracing()]).run("Go.", signal=token)
    chat = telemetry.span("chat")
    assert (chat.attributes or {})["clark_agent.is_interrupted"] is True
    assert "error.type" not in (chat.attributes or {})


@pytest.mark.parametrize("obeys", [True, False])
@pytest.mark.parametrize("way", ["steering", "token", "task", "stream"])
async def test_an_answer_that_was_interrupted_has_not_failed(
    telemetry: Telemetry, way: str, obeys: bool
) -> None:
    reading = asyncio.Event()
    partial = AssistantMessage((), StopReason.ABORTED, usage=Usage(7, 1))

    async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[Any]:
        yield Start(EMPTY)
        if len(request.messages) > 1:
            yield Done(AssistantMessage.from_text("Done."))
            return
        yield Chunk(TextChunk("Hm"))
        reading.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not obeys:
                raise
            yield Error(partial, StreamErrorKind.ABORTED, "secret")

    steering, token = ChannelSteering(), CancellationToken()
    agent = Agent(model, plugins=[steering, telemetry.tracing()])

    async def stream() -> None:
        async with agent.stream("Go."):
            await reading.wait()

    work = stream() if way == "stream" else agent.run("Go.", signal=token)
    task = asyncio.ensure_future(work)
    await reading.wait()
    match way:
        case "steering":
            _ = steering.handle.steer("Stop.", "now")
        case "token":
            token.cancel()
        case "task":
            task.cancel()
        case _:
            pass
    with suppress(RunAborted, asyncio.CancelledError):
        await task
    chat = next(span for span in telemetry.spans if span.name == "chat")
    attributes = chat.attributes or {}
    assert attributes["clark_agent.is_interrupted"] is True
    assert chat.status.is_unset
    assert "error.type" not in attributes
    assert "gen_ai.response.finish_reasons" not in attributes
    assert ("gen_ai.usage.input_tokens" in attributes) is obeys
    points = telemetry.metrics()["gen_ai.client.operation.duration"]
    assert not [point for point in points if "error.type" in point.attributes]


async def test_a_transport_that_cancels_itself_has_failed(telemetry: Telemetry) -> None:
    async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[Any]:
        yield Start(EMPTY)
        raise asyncio.CancelledError

    with pytest.raises(StreamError):
        await Agent(model, plugins=[telemetry.tracing()]).run("Go.")
    attributes = telemetry.span("chat").attributes or {}
    assert attributes["error.type"] == "CancelledError"
    assert "clark_agent.is_interrupted" not in attributes


@pytest.mark.parametrize(
    ("reason", "recorded"),
    [
        ("provider_rate_limited", "provider_rate_limited"),
        ("tokens_per_minute", "tokens_per_minute"),
        ("because of: secret", "other"),
    ],
)
async def test_the_reason_of_a_wait_is_a_known_word(
    telemetry: Telemetry, reason: str, recorded: str
) -> None:
    answer = AssistantMessage.from_text("Done.")
    model = transport([Waiting(0.5, reason), Start(EMPTY), Done(answer)])
    await Agent(model, plugins=[telemetry.tracing()]).run("Go.")
    (event,) = telemetry.span("chat").events
    assert (event.attributes or {})["clark_agent.reason"] == recorded


async def test_a_tool_that_takes_too_long_has_a_timeout(telemetry: Telemetry) -> None:
    @tool(timeout=0.01)
    async def wait() -> str:
        """Wait."""
        await asyncio.Event().wait()
        return "never"

    agent = Agent(
        ScriptedStream([call("wait"), "Done."]), tools=[wait], plugins=[telemetry.tracing()]
    )
    await agent.run("Go.")
    span = telemetry.span("execute_tool wait")
    assert (span.attributes or {})["error.type"] == "timeout"
    (point,) = telemetry.metrics()["gen_ai.execute_tool.duration"]
    assert point.attributes["error.type"] == "timeout"


async def ignoring_cancellations(event: asyncio.Event) -> None:
    """Wait, also after the two cancellations with which a run leaves code behind."""
    for _ in range(2):
        with suppress(asyncio.CancelledError):
            await event.wait()
            return
    await event.wait()


@pytest.mark.parametrize("ends_with", ["a result", "an error"])
async def test_the_span_of_a_tool_that_does_not_stop_ends_with_its_call(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture, ends_with: str
) -> None:
    may_end, has_ended = asyncio.Event(), asyncio.Event()

    @tool(timeout=0.01)
    async def stuck() -> str:
        """Ignore every cancellation."""
        await ignoring_cancellations(may_end)
        has_ended.set()
        if ends_with == "an error":
            raise ValueError("too late")
        return "too late"

    agent = Agent(
        ScriptedStream([call("stuck"), "Done."]),
        tools=[stuck],
        plugins=[telemetry.tracing(content=True)],
        cancel_grace=0.01,
    )
    result = await agent.run("Go.")
    assert result.messages[2].plain_text.endswith("may still be running.")
    before = telemetry.span("execute_tool stuck").to_json()
    may_end.set()
    await has_ended.wait()
    await asyncio.sleep(0)
    span, turn = telemetry.span("execute_tool stuck"), telemetry.spans[1]
    assert span.to_json() == before
    assert (span.attributes or {})["error.type"] == "timeout"
    assert span.status.status_code is StatusCode.ERROR
    assert span.end_time is not None
    assert turn.end_time is not None
    assert span.end_time <= turn.end_time
    (point,) = telemetry.metrics()["gen_ai.execute_tool.duration"]
    assert (point.count, point.attributes["error.type"]) == (1, "timeout")
    assert not [record for record in caplog.records if "ended span" in record.getMessage()]


async def test_the_span_of_a_transport_that_does_not_stop_ends_with_its_turn(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    may_end, has_ended = asyncio.Event(), asyncio.Event()
    token = CancellationToken()

    async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[Any]:
        yield Start(EMPTY)
        token.cancel()
        await ignoring_cancellations(may_end)
        has_ended.set()
        yield Waiting(1.0, "concurrency")
        yield Done(AssistantMessage.from_text("Too late."))

    agent = Agent(model, plugins=[telemetry.tracing(content=True)], cancel_grace=0.01)
    with pytest.raises(RunAborted):
        await agent.run("Go.", signal=token)
    assert telemetry.tree() == ["invoke_agent", ".turn", "..chat"]
    before = telemetry.span("chat").to_json()
    may_end.set()
    await has_ended.wait()
    await asyncio.sleep(0)
    assert telemetry.span("chat").to_json() == before
    assert (telemetry.span("chat").attributes or {})["clark_agent.is_interrupted"] is True
    (point,) = telemetry.metrics()["gen_ai.client.operation.duration"]
    assert point.count == 1
    assert not [record for record in caplog.records if "ended span" in record.getMessage()]


async def test_a_failed_run_has_the_cost_of_its_tree(telemetry: Telemetry) -> None:
    usage = Usage(100, 10)

    def said(*content: Any, reason: StopReason) -> AssistantMessage:
        return AssistantMessage(content, reason, usage=usage)

    child = Agent(ScriptedStream(["Here."]), name="child")
    asked = said(call("child", call_id="c1", task="Find it."), reason=StopReason.TOOL_USE)
    failing = [Error(EMPTY, StreamErrorKind.FATAL, "no")]

    class Model(ScriptedStream):
        model = "m"

    parent = Agent(
        Model([asked, failing]),
        tools=[child.as_tool("Finds things.")],
        plugins=[telemetry.tracing()],
        budget=Budget(prices={"m": Price(input=2.0, output=10.0)}),
        name="parent",
    )
    with pytest.raises(StreamError) as caught:
        await parent.run("Go.")
    found = telemetry.span("invoke_agent parent").attributes or {}
    assert caught.value.tree_cost is not None
    assert found["clark_agent.run.tree_cost"] == caught.value.tree_cost


class Asks:
    """Asks a model beside the turn."""

    name = "asks"

    async def before_request(self, ctx: BeforeRequestContext) -> list[UserMessage]:
        await ctx.ask_model("How many?", system_prompt="Count.")
        return []


async def test_a_model_call_beside_the_turn_names_the_plugin(telemetry: Telemetry) -> None:
    agent = Agent(ScriptedStream(["Three.", "Done."]), plugins=[telemetry.tracing(), Asks()])
    await agent.run("Go.")
    beside, own = [span.attributes or {} for span in telemetry.spans if span.name == "chat"]
    assert beside["clark_agent.plugin"] == "asks"
    assert "clark_agent.attempt" not in beside
    assert "clark_agent.plugin" not in own
    counted = telemetry.metrics()["gen_ai.client.operation.duration"]
    assert sorted(p.attributes.get("clark_agent.plugin", "") for p in counted) == ["", "asks"]


# --- failures of the tracing ----------------------------------------------------------------------


class PanicError(BaseException):
    """What an extension module raises."""


class Raises(SpanProcessor):
    """Raises at the start or at the end of spans."""

    def __init__(self, error: BaseException, *, at: str, of: str = "") -> None:
        self._error, self._at, self._of = error, at, of

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self._at == "start" and span.name.startswith(self._of):
            raise self._error

    def on_end(self, span: ReadableSpan) -> None:
        if self._at == "end":
            raise self._error


@pytest.mark.parametrize("error", [PanicError("no"), asyncio.CancelledError(), GeneratorExit()])
@pytest.mark.parametrize("place", ["redact", "start", "end"])
async def test_no_exception_of_the_tracing_ends_a_run(
    telemetry: Telemetry, error: BaseException, place: str
) -> None:
    def redact(text: str) -> str:
        raise error

    if place != "redact":
        telemetry.spans_to.add_span_processor(Raises(error, at=place))
    tracing = telemetry.tracing(content=True, redact=redact if place == "redact" else None)

    @tool
    def look() -> str:
        """Look."""
        return "seen"

    agent = Agent(ScriptedStream([call("look"), "Done."]), tools=[look], plugins=[tracing])
    result = await agent.run("Go.")
    assert result.text == "Done."
    if place != "start":
        assert len(telemetry.spans) == 6


async def test_a_keyboard_interrupt_passes(telemetry: Telemetry) -> None:
    telemetry.spans_to.add_span_processor(Raises(KeyboardInterrupt(), at="start"))
    with pytest.raises(KeyboardInterrupt):
        await Agent(ScriptedStream(["Done."]), plugins=[telemetry.tracing()]).run("Go.")


async def test_a_span_that_a_processor_refuses_is_still_in_the_trace(telemetry: Telemetry) -> None:
    telemetry.spans_to.add_span_processor(Raises(ValueError("no"), at="start", of="invoke"))
    agent = Agent(ScriptedStream(["Done."]), name="a", plugins=[telemetry.tracing()])
    await agent.run("Go.")
    assert telemetry.tree() == ["invoke_agent a", ".turn", "..chat"]
    metrics = telemetry.metrics()
    assert metrics["gen_ai.invoke_agent.duration"][0].count == 1
    assert metrics["gen_ai.client.operation.duration"][0].count == 1


class Refuses(trace.Tracer):
    """Has no span of some names."""

    def __init__(self, real: trace.Tracer, of: str) -> None:
        self._real, self._of = real, of

    def start_span(self, name: str, *args: Any, **kwargs: Any) -> trace.Span:
        if name.startswith(self._of):
            raise ValueError("no")
        return self._real.start_span(name, *args, **kwargs)

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("of", "tree"),
    [
        ("invoke", ["request", ".turn", "..chat", "..execute_tool look", ".turn", "..chat"]),
        ("turn", ["request", ".invoke_agent", "..chat", "..execute_tool look", "..chat"]),
        ("chat", ["request", ".invoke_agent", "..turn", "...execute_tool look", "..turn"]),
        ("execute", ["request", ".invoke_agent", "..turn", "...chat", "..turn", "...chat"]),
    ],
)
async def test_without_a_span_the_others_and_the_metrics_go_on(
    telemetry: Telemetry, of: str, tree: list[str]
) -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    tracing = telemetry.tracing()
    tracing.tracer = Refuses(tracing.tracer, of)
    agent = Agent(ScriptedStream([call("look"), "Done."]), tools=[look], plugins=[tracing])
    with telemetry.spans_to.get_tracer("mine").start_as_current_span("request"):
        await agent.run("Go.")
    assert telemetry.tree() == tree
    metrics = telemetry.metrics()
    assert metrics["gen_ai.invoke_agent.duration"][0].count == 1
    assert metrics["gen_ai.client.operation.duration"][0].count == 2
    assert metrics["gen_ai.execute_tool.duration"][0].count == 1
