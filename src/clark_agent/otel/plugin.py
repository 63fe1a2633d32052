"""Tracing: the plugin for one agent, and the same for all of them."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from clark_agent._version import __version__
from clark_agent.errors import ConfigError
from clark_agent.otel._guard import guarded
from clark_agent.otel.content import Content, Redact
from clark_agent.otel.conventions import SCOPE
from clark_agent.otel.metrics import Metrics
from clark_agent.otel.spans import RunSpans
from clark_agent.prices import price_of
from clark_agent.tracing import ALL_RUNS, RunTrace, TracedRun

__all__ = ["Tracing", "instrument", "uninstrument"]

_changing = Lock()


class Tracing:
    """Sends spans and metrics of runs to OpenTelemetry. Child runs are a part of the trace.

    Args:
        content: Record prompts, answers, arguments and results too, and the texts of errors. The
            messages of each request are recorded as a whole, which takes time and space.
        redact: Called with each recorded text, and with each number as text, in the run's event
            loop; returns what to record instead.
        metrics: Record metrics.
        agent_name: The name in the span of a run whose agent has none.
        tracer_provider: Makes the spans. The global provider by default.
        meter_provider: Makes the metrics. The global provider by default.

    Where the data goes is the providers' business. An exporter that fails does not touch the run,
    as long as it exports from a thread of its own, as with a ``BatchSpanProcessor``.
    """

    name = "tracing"

    def __init__(
        self,
        *,
        content: bool = False,
        redact: Redact | None = None,
        metrics: bool = True,
        agent_name: str | None = None,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        if redact is not None and not callable(redact):
            raise ConfigError(f"redact must be a function of a text, not {redact!r}")
        if redact is not None and not content:
            raise ConfigError("redact does nothing without content=True")
        self.tracer = trace.get_tracer(SCOPE, __version__, tracer_provider)
        self.metrics = _metrics(meter_provider) if metrics else None
        self.content = Content(redact) if content else None
        self.agent_name = agent_name
        _load_prices()

    def trace_run(self, run: TracedRun, /) -> RunTrace:
        """The spans of a run that starts."""
        return self._spans(run) or RunTrace()

    @guarded
    def _spans(self, run: TracedRun) -> RunSpans:
        return RunSpans(self, run)


def _load_prices() -> None:
    """Load the table of prices now: it takes a fifth of a second, which no run should wait for."""
    with suppress(ConfigError):  # genai-prices is not installed
        price_of("")


def _metrics(provider: MeterProvider | None) -> Metrics:
    return Metrics(metrics.get_meter(SCOPE, __version__, provider))


def instrument(
    *,
    content: bool = False,
    redact: Redact | None = None,
    metrics: bool = True,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Tracing:
    """Trace all runs of this process that start from now on, except those of agents that have a
    `Tracing` of their own. The arguments are those of `Tracing`. If it is called again, the newest
    call counts.
    """
    tracing = Tracing(
        content=content,
        redact=redact,
        metrics=metrics,
        tracer_provider=tracer_provider,
        meter_provider=meter_provider,
    )
    with _changing:
        ALL_RUNS.tracer = tracing
    return tracing


def uninstrument() -> None:
    """Undo `instrument`. Runs that have started are traced to their end."""
    with _changing:
        ALL_RUNS.tracer = None
