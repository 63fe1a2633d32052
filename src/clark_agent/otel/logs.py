"""Ids in log records: which run, which turn and which trace a line belongs to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from opentelemetry.context import create_key, get_value
from opentelemetry.trace import format_span_id, format_trace_id, get_current_span

if TYPE_CHECKING:
    from clark_agent.otel.spans import RunSpans

__all__ = ["RunIds"]

RUN_KEY = create_key("clark-agent-run")
"""Where a context has the trace of the run that it belongs to."""


class RunIds(logging.Filter):
    """Adds ``run_id``, ``conversation_id``, ``turn``, ``trace_id`` and ``span_id`` to each record.

    Add it to a handler. Outside of a traced run the ids are empty strings, and ``turn`` is 0.
    Before its first turn, as in the event `AgentStart`, a run has the ``run_id`` that its host
    gave, or none::

        handler.addFilter(RunIds())
        handler.setFormatter(logging.Formatter("%(run_id)s/%(turn)d %(trace_id)s %(message)s"))
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the ids. Every record passes."""
        run: RunSpans | None = get_value(RUN_KEY)  # type: ignore[assignment]
        span = get_current_span().get_span_context()
        record.run_id = "" if run is None else run.run_id
        record.conversation_id = "" if run is None else run.conversation_id
        record.turn = 0 if run is None else run.turn
        record.trace_id = format_trace_id(span.trace_id) if span.is_valid else ""
        record.span_id = format_span_id(span.span_id) if span.is_valid else ""
        return True
