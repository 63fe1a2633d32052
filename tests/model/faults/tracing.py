"""Faults of traces with OpenTelemetry."""

from __future__ import annotations

from typing import Any

from tests.model.faults.base import Fault, breaks

RUNS = "tests/otel/test_runs.py::{}"


@breaks(
    "content is recorded although nobody asked for it",
    RUNS.format("test_content_is_off_unless_it_is_wanted"),
)
def _(fault: Fault) -> None:
    def change(init: Any) -> Any:
        def tell_all(self: Any, *, content: bool = False, **kwargs: Any) -> None:
            fault.fired += not content
            init(self, content=True, **kwargs)

        return tell_all

    fault.wrap("tracing", change)


@breaks(
    "the span of a call does not end",
    RUNS.format("test_every_span_ends_whatever_fails_on_the_way"),
)
def _(fault: Fault) -> None:
    def change(end: Any) -> Any:
        def leave(self: Any, *args: Any) -> None:
            if self.name.startswith("execute_tool"):
                fault.fired += 1
            else:
                end(self, *args)

        return leave

    fault.wrap("span ends", change)


@breaks(
    "a resumed run begins another trace",
    "tests/otel/test_not_run.py::test_a_run_that_goes_on_is_marked_as_resumed",
)
def _(fault: Fault) -> None:
    def change(traces: Any) -> Any:
        def none(run: Any) -> tuple[()]:
            fault.fired += bool(traces.__get__(run))
            return ()

        return property(none)

    fault.wrap("trace of earlier processes", change)
