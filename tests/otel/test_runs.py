"""Which spans are current, what is recorded of retries and errors, and that a run is untouched."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.metrics import (
    Histogram,
    Meter,
    NoOpHistogram,
    NoOpMeter,
    NoOpMeterProvider,
)
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode, get_current_span

from clark_agent import (
    Agent,
    AgentContext,
    AgentTool,
    CancellationToken,
    ConfigError,
    LoopConfig,
    MaxTokensRecovery,
    RunAborted,
    RunIdentity,
    StreamError,
    ToolContext,
    ToolResult,
    run,
    tool,
)
from clark_agent.effects import Effects
from clark_agent.otel import RunIds, Tracing, carrier_of, context_of, instrument, uninstrument
from clark_agent.otel.content import NOT_REDACTED
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.run_log.records import RunBegan
from clark_agent.stream import Error, Start, StreamErrorKind, StreamRequest, Waiting
from clark_agent.testing import RecordingSink, ScriptedStream, call, check_events
from clark_agent.types import AssistantMessage, StopReason
from tests.otel.conftest import Telemetry


def name_of(span: Any) -> str:
    return getattr(span, "name", "none")


def now() -> str:
    """The name of the current span."""
    return name_of(get_current_span())


# --- which span is current ----------------------------------------------------------------------


async def test_tools_transports_and_hooks_run_in_their_span(telemetry: Telemetry) -> None:
    seen: dict[str, list[str]] = {"tool": [], "thread": [], "model": [], "hook": [], "task": []}

    @tool
    async def wait() -> str:
        """Wait."""
        seen["tool"].append(now())
        await asyncio.sleep(0)
        seen["tool"].append(now())
        await asyncio.create_task(other())
        return "done"

    async def other() -> None:
        seen["task"].append(now())

    @tool
    def in_thread() -> str:
        """Run in a thread."""
        seen["thread"].append(now())
        return "done"

    class Hook:
        def on_before_tool_call(self, ctx: Any) -> None:
            seen["hook"].append(now())

    script = ScriptedStream([[call("wait"), call("in_thread")], "Done."])

    async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[Any]:
        async for event in script(request, signal):
            seen["model"].append(now())
            await asyncio.sleep(0)
            yield event

    agent = Agent(model, tools=[wait, in_thread], plugins=[telemetry.tracing(), Hook()], name="a")
    before = now()
    await agent.run("Go.")
    assert now() == before == "none"
    assert seen["tool"] == ["execute_tool wait"] * 2
    assert seen["task"] == ["execute_tool wait"]
    assert seen["thread"] == ["execute_tool in_thread"]
    assert set(seen["model"]) == {"chat"}
    assert set(seen["hook"]) == {"turn"}


async def test_a_span_that_a_tool_opens_stays_current_over_its_steps(telemetry: Telemetry) -> None:
    tracer = telemetry.spans_to.get_tracer("mine")
    seen = []

    @tool
    async def work() -> str:
        """Work."""
        with tracer.start_as_current_span("mine"):
            await asyncio.sleep(0)
            seen.append(now())
            with tracer.start_as_current_span("inner"):
                await asyncio.sleep(0)
                seen.append(now())
            seen.append(now())
        seen.append(now())
        return "done"

    agent = Agent(
        ScriptedStream([call("work"), "Done."]), tools=[work], plugins=[telemetry.tracing()]
    )
    await agent.run("Go.")
    assert seen == ["mine", "inner", "mine", "execute_tool work"]
    assert "....inner" in telemetry.tree()


@pytest.mark.parametrize("by", ["transport", "effects"])
@pytest.mark.parametrize("ends", [True, False])
async def test_a_span_that_a_stream_opens_stays_current_over_its_steps(
    telemetry: Telemetry, by: str, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = telemetry.spans_to.get_tracer("mine")
    seen: list[str] = []
    outside: list[str] = []
    token = CancellationToken()

    async def opens(events: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
        try:
            with tracer.start_as_current_span("request"):
                async for event in events:
                    yield event
                    seen.append(now())
                    if not ends:
                        token.cancel()
                    with tracer.start_as_current_span("step"):
                        await asyncio.sleep(0)
        finally:
            seen.append(now())

    async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[Any]:
        script: Any = ScriptedStream(["Done."])(request, signal)
        async with aclosing(opens(script) if by == "transport" else script) as events:
            async for event in events:
                yield event

    class Opens(Effects):
        async def ask_model(self, *args: Any) -> AsyncIterator[Any]:
            events: Any = super().ask_model(*args)
            async with aclosing(opens(events) if by == "effects" else events) as events:
                async for event in events:
                    yield event

    class Listens:
        def on_event(self, event: Any) -> None:
            outside.append(now())

    agent = Agent(
        model,
        plugins=[telemetry.tracing(), Listens()],
        effects=Opens(),
    )
    if ends:
        await agent.run("Go.")
    else:
        with pytest.raises(RunAborted):
            await agent.run("Go.", signal=token)
    assert seen[-1] == "chat"
    assert set(seen[:-1]) == {"request"}
    assert set(outside) == {"invoke_agent", "turn"}
    assert now() == "none"
    steps = ["....step"] * (len(seen) - 1)
    assert telemetry.tree() == ["invoke_agent", ".turn", "..chat", "...request", *steps]
    assert not [record for record in caplog.records if "detach" in record.getMessage()]


async def test_a_stream_that_is_left_behind_closes_its_spans_in_another_task(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = telemetry.spans_to.get_tracer("mine")
    may_end, has_ended = asyncio.Event(), asyncio.Event()
    token = CancellationToken()
    seen: list[Any] = []

    async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[Any]:
        with tracer.start_as_current_span("request"):
            yield Start(AssistantMessage((), StopReason.OTHER))
            token.cancel()
            for _ in range(2):
                with suppress(asyncio.CancelledError):
                    await may_end.wait()
            seen.append(asyncio.current_task())
        seen.append(now())
        has_ended.set()

    agent = Agent(model, plugins=[telemetry.tracing()], cancel_grace=0.01)
    with pytest.raises(RunAborted):
        await agent.run("Go.", signal=token)
    may_end.set()
    await has_ended.wait()
    assert seen[0] is not asyncio.current_task()
    assert seen[1] == "chat"
    assert telemetry.tree() == ["invoke_agent", ".turn", "..chat", "...request"]
    assert not [record for record in caplog.records if "detach" in record.getMessage()]


async def test_a_run_is_below_the_span_of_its_caller(telemetry: Telemetry) -> None:
    tracer = telemetry.spans_to.get_tracer("mine")
    agent = Agent(ScriptedStream(["One.", "Two."]), plugins=[telemetry.tracing()])
    with tracer.start_as_current_span("request"):
        carrier = carrier_of()
        await agent.run("Go.")
        assert now() == "request"
    token = otel_context.attach(context_of(carrier))  # as in another process
    try:
        await agent.run("Go.")
    finally:
        otel_context.detach(token)
    assert telemetry.tree() == ["request", *([".invoke_agent", "..turn", "...chat"] * 2)]


async def test_a_stream_that_is_read_elsewhere_has_its_spans(telemetry: Telemetry) -> None:
    agent = Agent(ScriptedStream(["One two three."]), plugins=[telemetry.tracing()])
    async with agent.stream("Go.") as events:
        async for _ in events:
            assert now() == "none"
    assert telemetry.tree() == ["invoke_agent", ".turn", "..chat"]


# --- child runs, effects, instrument --------------------------------------------------------------


async def test_child_runs_are_below_the_call_that_started_them(telemetry: Telemetry) -> None:
    child = Agent(ScriptedStream(["Here."]), name="child")
    parent = Agent(
        ScriptedStream([call("child", task="Find it."), "Done."]),
        tools=[child.as_tool("Finds things.")],
        plugins=[telemetry.tracing()],
        name="parent",
    )
    await parent.run("Go.")
    assert telemetry.tree() == [
        "invoke_agent parent",
        ".turn",
        "..chat",
        "..execute_tool child",
        "...invoke_agent child",
        "....turn",
        ".....chat",
        ".turn",
        "..chat",
    ]
    attributes = telemetry.span("invoke_agent child").attributes or {}
    above = telemetry.span("invoke_agent parent").attributes or {}
    assert attributes["clark_agent.run.parent_id"] == above["clark_agent.run.id"]
    assert attributes["clark_agent.run.depth"] == 1


async def test_the_effects_of_the_host_still_happen_in_child_runs_too(telemetry: Telemetry) -> None:
    seen = []

    class Noted(Effects):
        def run_tool(self, tool: AgentTool, args: Any, ctx: ToolContext) -> Awaitable[ToolResult]:
            seen.append((tool.name, now()))
            return super().run_tool(tool, args, ctx)

    @tool
    def look() -> str:
        """Look."""
        return "seen"

    child = Agent(ScriptedStream([call("look"), "Here."]), tools=[look], name="child")
    parent = Agent(
        ScriptedStream([call("child", task="Find it."), "Done."]),
        tools=[child.as_tool("Finds things.")],
        plugins=[telemetry.tracing()],
        effects=Noted(),
    )
    await parent.run("Go.")
    assert seen == [("child", "execute_tool child"), ("look", "execute_tool look")]
    assert len([span for span in telemetry.spans if span.name == "execute_tool look"]) == 1


async def test_instrument_traces_all_agents_until_it_is_undone(telemetry: Telemetry) -> None:
    agent = Agent(ScriptedStream(["One.", "Two.", "Three."]), name="a")
    await agent.run("Go.")
    instrument(tracer_provider=telemetry.spans_to, meter_provider=telemetry.metrics_to)
    await agent.run("Go.")
    uninstrument()
    await agent.run("Go.")
    assert telemetry.tree() == ["invoke_agent a", ".turn", "..chat"]


async def test_an_agent_with_its_own_tracing_is_traced_once(telemetry: Telemetry) -> None:
    others = Telemetry()
    instrument(tracer_provider=others.spans_to, meter_provider=others.metrics_to)
    await Agent(ScriptedStream(["One."]), plugins=[telemetry.tracing()]).run("Go.")
    assert len(telemetry.spans) == 3
    assert others.spans == []


async def test_a_replay_is_not_traced_and_needs_no_tracer(telemetry: Telemetry) -> None:
    store = MemoryStore()
    agent = Agent(
        ScriptedStream([call("find", secret="x"), "Done."]),
        tools=[find],
        plugins=[telemetry.tracing()],
        run_log=RunLog(store),
    )
    await agent.run("Go.")
    (logged,) = store.runs()
    count = len(telemetry.spans)
    instrument(tracer_provider=telemetry.spans_to, meter_provider=telemetry.metrics_to)
    untraced = [each for each in agent.config.plugins if not isinstance(each, Tracing)]
    for again in (agent.config, agent.config.replace(plugins=untraced)):
        assert (await replay(store, logged.run_id, again)).is_identical
    assert len(telemetry.spans) == count == 6


# --- what happened ------------------------------------------------------------------------------


async def test_retries_and_discarded_answers(telemetry: Telemetry) -> None:
    cut = AssistantMessage.from_text("It was the best", stop_reason=StopReason.MAX_TOKENS)
    agent = Agent(
        ScriptedStream([cut, "All of it."]),
        plugins=[telemetry.tracing()],
        max_output_tokens=10,
        max_output_tokens_recovery=MaxTokensRecovery(),
    )
    await agent.run("Go.")
    assert telemetry.tree() == ["invoke_agent", ".turn", "..chat", "..chat"]
    run_attributes = telemetry.span("invoke_agent").attributes or {}
    assert run_attributes["clark_agent.run.retries"] == 1
    assert run_attributes["clark_agent.run.discarded_answers"] == 1
    turn = telemetry.span("turn")
    assert [event.name for event in turn.events] == ["clark_agent.answer_discarded"]
    assert (turn.attributes or {})["clark_agent.turn.attempts"] == 2
    metrics = telemetry.metrics()
    assert metrics["clark_agent.retries"][0].value == 1
    assert metrics["clark_agent.discarded_answers"][0].value == 1


async def test_a_failed_model_call_and_a_failed_run(telemetry: Telemetry) -> None:
    async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[Any]:
        empty = AssistantMessage((), StopReason.ERROR)
        yield Waiting(0.5, "provider_rate_limited")
        yield Start(empty)
        yield Error(empty, StreamErrorKind.FATAL, "no such model: secret")

    agent = Agent(model, plugins=[telemetry.tracing()])
    with pytest.raises(StreamError):
        await agent.run("Go.")
    chat, whole = telemetry.span("chat"), telemetry.span("invoke_agent")
    assert (chat.attributes or {})["error.type"] == "fatal"
    assert [event.name for event in chat.events] == ["clark_agent.request_delayed"]
    assert (whole.attributes or {})["error.type"] == "StreamError"
    assert (whole.attributes or {})["clark_agent.run.outcome"] == "failed"
    for span in (chat, whole):
        assert span.status.status_code is StatusCode.ERROR
        assert "secret" not in span.to_json()


@pytest.mark.parametrize("raises", [True, False])
async def test_what_is_no_transport_fails_as_without_a_trace(
    telemetry: Telemetry, raises: bool
) -> None:
    def model(request: StreamRequest, signal: CancellationToken) -> Any:
        if raises:
            raise OSError("no network")
        return 3

    messages = []
    for plugins in ([], [telemetry.tracing()]):
        with pytest.raises(StreamError) as caught:
            await Agent(model, plugins=plugins).run("Go.")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert (telemetry.span("chat").attributes or {})["error.type"]


async def test_a_cancelled_run_closes_its_spans(telemetry: Telemetry) -> None:
    token = CancellationToken()

    @tool
    async def wait() -> str:
        """Wait."""
        token.cancel("enough")
        await asyncio.Event().wait()
        return "never"

    agent = Agent(ScriptedStream([call("wait")]), tools=[wait], plugins=[telemetry.tracing()])
    with pytest.raises(RunAborted):
        await agent.run("Go.", signal=token)
    assert telemetry.tree() == ["invoke_agent", ".turn", "..chat", "..execute_tool wait"]
    assert (telemetry.span("invoke_agent").attributes or {})["error.type"] == "RunAborted"


async def test_a_call_that_does_not_run_is_an_event_of_its_turn(telemetry: Telemetry) -> None:
    agent = Agent(ScriptedStream([call("missing"), "Done."]), plugins=[telemetry.tracing()])
    await agent.run("Go.")
    first = next(span for span in telemetry.spans if span.name == "turn")
    (event,) = first.events
    assert event.name == "clark_agent.tool_rejected"
    assert (event.attributes or {})["gen_ai.tool.name"] == "unknown"


async def test_the_events_of_a_traced_run_are_the_same(telemetry: Telemetry) -> None:
    kinds = []
    for plugins in ([], [telemetry.tracing()]):
        sink = RecordingSink()
        config = LoopConfig(
            stream=ScriptedStream(["Hello there."]), plugins=plugins, event_sink=sink
        )
        await run("Hi.", AgentContext(), config)
        check_events(sink.events)
        kinds.append(sink.types)
    assert kinds[0] == kinds[1]
    assert "run_identified" not in kinds[0]


# --- content ------------------------------------------------------------------------------------


@tool
def find(secret: str) -> str:
    """Find it."""
    if secret == "raise":
        raise ValueError("the password is tea")
    return "the password is tea"


@pytest.mark.parametrize("script", ["x", "raise"])
async def test_content_is_off_unless_it_is_wanted(telemetry: Telemetry, script: str) -> None:
    agent = Agent(
        ScriptedStream([call("find", secret=script), "the password is tea"]),
        tools=[find],
        system_prompt="the password is tea",
        plugins=[telemetry.tracing()],
    )
    await agent.run("the password is tea")
    assert len(telemetry.spans) == 6
    for span in telemetry.spans:
        assert "password" not in span.to_json()


@pytest.mark.parametrize("script", ["x", "raise"])
async def test_all_content_is_redacted(telemetry: Telemetry, script: str) -> None:
    def redact(text: str) -> str:
        return text.replace("tea", "***")

    agent = Agent(
        ScriptedStream([call("find", secret=script), "the password is tea"]),
        tools=[find],
        system_prompt="the password is tea",
        plugins=[telemetry.tracing(content=True, redact=redact)],
    )
    await agent.run("the password is tea")
    everything = "".join(span.to_json() for span in telemetry.spans)
    assert "tea" not in everything
    assert everything.count("the password is ***") >= 6


@pytest.mark.parametrize("redact", [lambda text: 1 / 0, lambda text: None])
async def test_a_redact_that_fails_records_nothing_and_stops_nothing(
    telemetry: Telemetry, redact: Any
) -> None:
    agent = Agent(
        ScriptedStream([call("find", secret="x"), "the password is tea"]),
        tools=[find],
        plugins=[telemetry.tracing(content=True, redact=redact)],
    )
    result = await agent.run("the password is tea")
    assert result.text == "the password is tea"
    everything = "".join(span.to_json() for span in telemetry.spans)
    assert "password" not in everything
    assert NOT_REDACTED in everything


async def test_nothing_is_computed_for_a_run_that_is_not_sampled() -> None:
    asked: list[str] = []
    provider = TracerProvider(sampler=ALWAYS_OFF)
    tracing = Tracing(tracer_provider=provider, content=True, redact=asked.append)  # type: ignore[arg-type]
    agent = Agent(
        ScriptedStream([call("find", secret="x"), "Done."]), tools=[find], plugins=[tracing]
    )
    await agent.run("Go.")
    assert asked == []


async def test_a_run_below_a_span_that_is_not_sampled_is_not_sampled(
    telemetry: Telemetry,
) -> None:
    seen: list[str] = []
    store = MemoryStore()

    @tool
    def look() -> str:
        """Look."""
        seen.append(carrier_of()["traceparent"])
        return "seen"

    child = Agent(ScriptedStream([call("look"), "Here."]), tools=[look], name="child")
    parent = Agent(
        ScriptedStream([call("child", task="Look."), "Done."]),
        tools=[child.as_tool("Looks.")],
        plugins=[telemetry.tracing()],
        run_log=RunLog(store),
    )
    above = f"00-{'a' * 32}-{'b' * 16}-00"
    token = otel_context.attach(context_of({"traceparent": above}))
    try:
        await parent.run("Go.")
    finally:
        otel_context.detach(token)
    assert telemetry.spans == []
    # Neither the tool nor a process that resumes the run begins to sample in the middle of it.
    (inside,) = seen
    began = [each.entry for each in store.load(store.runs()[0].run_id).records]
    recorded = [entry.trace["traceparent"] for entry in began if isinstance(entry, RunBegan)]
    for parent_of in (inside, *recorded):
        assert parent_of.startswith(f"00-{'a' * 32}-")
        assert parent_of.endswith("-00")


# --- failures -------------------------------------------------------------------------------------


class Failing(SpanExporter):
    """Raises."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise OSError("no network")

    def shutdown(self) -> None:
        raise OSError("no network")


class FailingTracer(trace.Tracer):
    """Raises from the n-th span on."""

    def __init__(self, after: int) -> None:
        self._left = after
        self._real = TracerProvider().get_tracer("x")

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        self._left -= 1
        if self._left < 0:
            raise OSError("no tracer")
        return self._real.start_span(*args, **kwargs)

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("no tracer")


@pytest.mark.parametrize("after", range(7))
async def test_a_tracer_that_raises_does_not_touch_the_run(after: int) -> None:
    class Provider(trace.TracerProvider):
        def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
            return FailingTracer(after)

    sink = RecordingSink()
    agent = Agent(
        ScriptedStream([call("find", secret="x"), "Done."]),
        tools=[find],
        plugins=[Tracing(tracer_provider=Provider(), content=True)],
        event_sink=sink,
    )
    result = await agent.run("Go.")
    assert result.text == "Done."
    check_events(sink.events)


async def test_an_exporter_that_raises_does_not_touch_the_run() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Failing()))
    agent = Agent(ScriptedStream(["Done."]), plugins=[Tracing(tracer_provider=provider)])
    assert (await agent.run("Go.")).text == "Done."


class Ending(SpanProcessor):
    """Raises at the end of each span, after those that were added before it."""

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("no processor")


class FailingMeter(NoOpMeter):
    """Its histograms raise."""

    def create_histogram(self, *args: Any, **kwargs: Any) -> Histogram:
        class Failing(NoOpHistogram):
            def record(self, *args: Any, **kwargs: Any) -> None:
                raise RuntimeError("no metrics")

        return Failing("x")


class FailingMeters(NoOpMeterProvider):
    """Its meters have histograms that raise."""

    def get_meter(self, *args: Any, **kwargs: Any) -> Meter:
        return FailingMeter("x")


def halved(text: str) -> str:
    """Cut a character into half."""
    return f"{text}\ud83d"


@pytest.mark.parametrize("broken", ["processor", "metrics", "redact"])
async def test_every_span_ends_whatever_fails_on_the_way(
    telemetry: Telemetry, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    if broken == "processor":
        telemetry.spans_to.add_span_processor(Ending())
    tracing = Tracing(
        content=True,
        redact=halved if broken == "redact" else None,
        tracer_provider=telemetry.spans_to,
        meter_provider=FailingMeters() if broken == "metrics" else telemetry.metrics_to,
    )
    for _ in range(2):
        agent = Agent(ScriptedStream([call("look"), "Done."]), tools=[look], plugins=[tracing])
        assert (await agent.run("Go.")).text == "Done."
    spans = ["invoke_agent", ".turn", "..chat", "..execute_tool look", ".turn", "..chat"]
    assert telemetry.tree() == spans * 2
    if broken == "redact":
        said = (telemetry.spans[-1].attributes or {})["gen_ai.output.messages"]
        assert json.loads(str(said))[0]["parts"] == [{"type": "text", "content": "Done.\ufffd"}]
        assert not caplog.records
    if broken != "metrics":
        counted = telemetry.metrics()["gen_ai.client.operation.duration"]
        assert [point.count for point in counted] == [4]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(set(warnings)), "each failure is logged once"


async def test_a_processor_that_raises_at_the_start_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Starting(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            raise RuntimeError("no processor")

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Starting())
    agent = Agent(ScriptedStream(["One."] * 3), plugins=[Tracing(tracer_provider=provider)])
    for _ in range(3):
        assert (await agent.run("Go.")).text == "One."
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) <= 1


async def test_many_runs_at_once_have_a_trace_each(telemetry: Telemetry) -> None:
    @tool
    async def nap(n: int) -> int:
        """Sleep."""
        for _ in range(n % 5):
            await asyncio.sleep(0)
        return n

    async def one(n: int) -> None:
        child = Agent(ScriptedStream([call("nap", n=n), "Ok."]), tools=[nap], name=f"child{n}")
        parent = Agent(
            ScriptedStream([[call(f"child{n}", task="Nap."), call("nap", n=n)], "Done."]),
            tools=[child.as_tool("Naps."), nap],
            name=f"parent{n}",
            plugins=[telemetry.tracing()],
        )
        await parent.run("Go.")

    await asyncio.gather(*[one(n) for n in range(20)])
    traces: dict[int, list[ReadableSpan]] = {}
    for span in telemetry.spans:
        assert span.context is not None
        traces.setdefault(span.context.trace_id, []).append(span)
    assert [len(spans) for spans in traces.values()] == [13] * 20
    for spans in traces.values():
        (root,) = [span for span in spans if span.parent is None]
        number = root.name.removeprefix("invoke_agent parent")
        children = {span.name for span in spans if "child" in span.name}
        assert children == {f"execute_tool child{number}", f"invoke_agent child{number}"}


# --- logging --------------------------------------------------------------------------------------


async def test_a_run_that_is_not_sampled_has_its_ids_in_log_records() -> None:
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.addFilter(RunIds())
    handler.setFormatter(logging.Formatter("%(run_id)s/%(turn)d %(message)s"))
    mine = logging.getLogger("tests.otel.formatted")
    mine.addHandler(handler)

    @tool
    async def note() -> str:
        """Write a log record."""
        mine.warning("noted")
        return "noted"

    tracing = Tracing(tracer_provider=TracerProvider(sampler=ALWAYS_OFF))
    agent = Agent(ScriptedStream([call("note"), "Done."]), tools=[note], plugins=[tracing])
    try:
        await agent.run("Go.", identity=RunIdentity.root("run-1"))
        mine.warning("outside")
    finally:
        mine.removeHandler(handler)
    assert lines.getvalue() == "run-1/1 noted\n/0 outside\n"


async def test_log_records_have_the_ids_of_their_run_and_turn(telemetry: Telemetry) -> None:
    records: list[Any] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Kept()
    handler.addFilter(RunIds())
    mine = logging.getLogger("tests.otel.mine")
    mine.addHandler(handler)

    @tool
    def note() -> str:
        """Write a log record, in a thread."""
        mine.warning("noted")
        return "noted"

    agent = Agent(
        ScriptedStream(["Hm.", call("note"), "Done."]),
        tools=[note],
        plugins=[telemetry.tracing()],
    )
    try:
        mine.warning("outside")
        await agent.run("Wait.")
        identity = RunIdentity.root("run-1", conversation_id="talk")
        await agent.run("Go.", identity=identity)
    finally:
        mine.removeHandler(handler)
    outside, inside = records
    assert (outside.run_id, outside.turn, outside.trace_id) == ("", 0, "")
    assert (inside.run_id, inside.turn, inside.conversation_id) == ("run-1", 1, "talk")
    span = telemetry.span("execute_tool note").context
    assert span is not None
    assert inside.trace_id == f"{span.trace_id:032x}"
    assert inside.span_id == f"{span.span_id:016x}"
    assert threading.current_thread() is threading.main_thread()


async def test_a_listener_of_an_event_is_in_the_run_and_turn_of_the_event(
    telemetry: Telemetry,
) -> None:
    seen: list[tuple[str, str, int, str]] = []

    class Listens:
        def on_event(self, event: Any) -> None:
            record: Any = logging.makeLogRecord({})
            RunIds().filter(record)
            seen.append((type(event).__name__, record.run_id, record.turn, now()))

    agent = Agent(
        ScriptedStream([call("find", secret="x"), "Done."]),
        tools=[find],
        plugins=[Listens(), telemetry.tracing()],
    )
    await agent.run("Go.", identity=RunIdentity.root("run-1"))
    assert {run_id for _, run_id, _, _ in seen} == {"run-1"}
    assert seen[0] == ("AgentStart", "run-1", 0, "invoke_agent")
    turns = [entry[2:] for entry in seen if entry[0] == "TurnStart"]
    assert turns == [(1, "turn"), (2, "turn")]


def test_an_agent_has_one_tracer(telemetry: Telemetry) -> None:
    with pytest.raises(ConfigError, match="one tracer, not 2: tracing, tracing"):
        Agent(ScriptedStream(["Hi."]), plugins=[telemetry.tracing(), telemetry.tracing()])


async def test_the_newest_call_of_instrument_counts(telemetry: Telemetry) -> None:
    others = Telemetry()
    instrument(tracer_provider=others.spans_to, meter_provider=others.metrics_to)
    instrument(tracer_provider=telemetry.spans_to, meter_provider=telemetry.metrics_to)
    await Agent(ScriptedStream(["One."])).run("Go.")
    assert len(telemetry.spans) == 3
    assert others.spans == []


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
def test_headers_of_any_case_are_a_context(name: str) -> None:
    found = get_current_span(context_of({name: f"00-{'a' * 32}-{'b' * 16}-01"}))
    assert found.get_span_context().trace_id == int("a" * 32, 16)
