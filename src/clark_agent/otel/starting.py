"""Starts spans, also if a processor raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    Span,
    SpanKind,
    Tracer,
    set_span_in_context,
)

from clark_agent.otel._guard import PASSING, report

__all__ = ["start_span"]


def start_span(
    tracer: Tracer,
    name: str,
    parent: Context,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, Any] | None = None,
    links: Sequence[Link] = (),
) -> tuple[Span, Context]:
    """A span and its context. If the tracer has none to give: an invalid span, and the parent's
    context, so that what happens in the span is still below its parent.
    """
    try:
        span = tracer.start_span(name, parent, kind, dict(attributes or {}), links)
    except PASSING:
        raise
    except BaseException as error:
        report("start_span")
        found = _started_span(error.__traceback__)
        if found is None:
            return INVALID_SPAN, parent
        span = found
    return span, set_span_in_context(span, parent)


def _started_span(traceback: TracebackType | None) -> Span | None:
    """The span that a processor has refused. The processors before it have it already, so it must
    end like any other, and only the exception knows it.
    """
    while traceback is not None:
        found = traceback.tb_frame.f_locals.get("self")
        if isinstance(found, Span) and found.is_recording():
            return found
        traceback = traceback.tb_next
    return None
