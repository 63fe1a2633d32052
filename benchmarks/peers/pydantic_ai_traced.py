"""Pydantic AI with its instrumentation: spans and metrics into the SDK's own memory, no content."""

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic_ai import Agent
from pydantic_ai.models.instrumented import InstrumentationSettings

from benchmarks.peers import pydantic_ai

KEPT = InMemorySpanExporter()
SPANS = TracerProvider()
SPANS.add_span_processor(SimpleSpanProcessor(KEPT))
Agent.instrument_all(
    InstrumentationSettings(
        tracer_provider=SPANS,
        meter_provider=MeterProvider([InMemoryMetricReader()]),
        include_content=False,
    )
)


async def turns(count):
    KEPT.clear()
    text = await pydantic_ai.turns(count)
    spans = KEPT.get_finished_spans()
    assert len(spans) >= 2 * count, f"{len(spans)} spans"
    return text
