"""Traces and metrics of runs, for OpenTelemetry. Needs the extra ``otel``.

    from clark_agent.otel import instrument

    instrument()  # or, for one agent: Agent(..., plugins=[Tracing()])

`Tracing` makes spans and metrics by the semantic conventions for generative AI; all their names are
in ``clark_agent.otel.conventions``. `RunIds` adds the ids of runs and traces to log records.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clark_agent._extras import load_extra

if TYPE_CHECKING:
    from clark_agent.otel.logs import RunIds
    from clark_agent.otel.plugin import Tracing, instrument, uninstrument
    from clark_agent.otel.propagation import carrier_of, context_of

__all__ = ["RunIds", "Tracing", "carrier_of", "context_of", "instrument", "uninstrument"]

_WHERE = {
    "RunIds": "clark_agent.otel.logs",
    "Tracing": "clark_agent.otel.plugin",
    "carrier_of": "clark_agent.otel.propagation",
    "context_of": "clark_agent.otel.propagation",
    "instrument": "clark_agent.otel.plugin",
    "uninstrument": "clark_agent.otel.plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load_extra("opentelemetry.trace", "otel", "clark_agent.otel")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
