"""Starts spans, also if a processor raises. Names and attributes are such that every exporter can
encode them: one that cannot is a reason for exporters to lose a whole batch.
"""

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

from clark_agent._text import well_formed
from clark_agent.otel._guard import PASSING, report

__all__ = ["encodable", "start_span"]


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
        found = encodable(attributes or {})
        span = tracer.start_span(well_formed(name), parent, kind, found, links)
    except PASSING:
        raise
    except BaseException as error:
        report("start_span")
        started = _started_span(error.__traceback__)
        if started is None:
            return INVALID_SPAN, parent
        span = started
    return span, set_span_in_context(span, parent)


def encodable(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes, without lone surrogates. Texts with content have none."""
    return {k: well_formed(v) if isinstance(v, str) else v for k, v in attributes.items()}


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
