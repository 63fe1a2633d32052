"""clark-agent with the plugin `Tracing`: spans and metrics into the SDK's own memory."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.clark import calling, echo
from benchmarks.work import count_event
from clark_agent import AgentContext, LoopConfig, run
from clark_agent.otel import Tracing

KEPT = InMemorySpanExporter()
SPANS = TracerProvider()
SPANS.add_span_processor(SimpleSpanProcessor(KEPT))
TRACING = Tracing(tracer_provider=SPANS, meter_provider=MeterProvider([InMemoryMetricReader()]))


async def turns(count: int) -> str:
    KEPT.clear()
    config = LoopConfig(
        stream=calling(count), tools=[echo], event_sink=count_event, plugins=[TRACING]
    )
    text = (await run("go", AgentContext(), config)).text
    spans = KEPT.get_finished_spans()
    assert len(spans) == 3 * count + 3, f"{len(spans)} spans"  # the last turn calls no tool
    return text
