"""W3C trace context: between processes, and between a run and the process that resumes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from clark_agent.otel import conventions as names

__all__ = ["carrier_of", "context_of", "links_to", "resumed_context"]

_W3C = TraceContextTextMapPropagator()


def carrier_of(context: Context | None = None) -> dict[str, str]:
    """The headers ``traceparent`` and ``tracestate`` of a context; of the current one by default.

    Pass them to another process, which continues the trace with `context_of`. Empty if there is no
    span.
    """
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return carrier


def context_of(carrier: Mapping[str, str]) -> Context:
    """The context of a span in another process: attach it, and runs continue its trace. The names
    of the headers may have any case.
    """
    return _W3C.extract({name.lower(): value for name, value in carrier.items()}, Context())


def resumed_context(current: Context, traces: Sequence[Mapping[str, str]]) -> Context:
    """The context in which a run goes on: of its first process, unless there is a span here."""
    if not traces or get_current_span(current).get_span_context().is_valid:
        return current
    return _W3C.extract(traces[0], current)


def links_to(traces: Sequence[Mapping[str, str]]) -> list[Link]:
    """Links to the spans of the first process that worked on a run, and of the previous one."""
    ends = {"first": traces[0], "previous": traces[-1]} if traces else {}
    if len(traces) == 1:
        del ends["previous"]
    found = {which: _span_context(carrier) for which, carrier in ends.items()}
    return [Link(span, {names.LINK: which}) for which, span in found.items() if span.is_valid]


def _span_context(carrier: Mapping[str, str]) -> SpanContext:
    return get_current_span(context_of(carrier)).get_span_context()
