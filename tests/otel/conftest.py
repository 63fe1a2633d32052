"""Real providers of the SDK, which keep what they get in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from clark_agent.otel import Tracing, uninstrument


class Telemetry:
    """What a run has sent."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.spans_to = TracerProvider()
        self.spans_to.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.metrics_to = MeterProvider([self._reader])

    def tracing(self, **settings: Any) -> Tracing:
        """A plugin that sends its data here."""
        return Tracing(tracer_provider=self.spans_to, meter_provider=self.metrics_to, **settings)

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans that have ended, in the order in which they started."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def span(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def tree(self) -> list[str]:
        """The names, each behind its depth in dots."""
        spans = {span.context.span_id: span for span in self.spans if span.context is not None}

        def depth(span: ReadableSpan) -> int:
            if span.parent is None or span.parent.span_id not in spans:
                return 0
            return 1 + depth(spans[span.parent.span_id])

        return [f"{'.' * depth(span)}{span.name}" for span in self.spans]

    def metrics(self) -> dict[str, list[Any]]:
        """The points of each metric, by name."""
        data: Any = self._reader.get_metrics_data()
        found: dict[str, list[Any]] = {}
        for resource in [] if data is None else data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    found.setdefault(metric.name, []).extend(metric.data.data_points)
        return found


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    """Providers for one test. No agent is instrumented after it."""
    made = Telemetry()
    yield made
    uninstrument()
    made.spans_to.shutdown()
    made.metrics_to.shutdown()
