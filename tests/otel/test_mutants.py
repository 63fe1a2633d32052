"""Faults of traces change what a short run sends."""

from __future__ import annotations

import pytest

from clark_agent import Agent, tool
from clark_agent.run_log import Allow, MemoryStore, RunLog, decide, resume
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import SUSPEND, ApprovalGate
from tests.model.faults import check, promises_of
from tests.otel.conftest import Telemetry


@tool
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


async def a_run_that_goes_on() -> object:
    """The spans of a run that is suspended and resumed: names, attributes, links and traces."""
    telemetry, store = Telemetry(), MemoryStore()
    agent = Agent(
        ScriptedStream([call("pay", amount=1), "Done."]),
        tools=[pay],
        plugins=[telemetry.tracing(metrics=False), ApprovalGate(SUSPEND)],
        run_log=RunLog(store),
    )
    (request,) = (await agent.run("Go.")).waiting
    await decide(store, request.run_id, request.request_id, Allow())
    await resume(store, request.run_id, agent)
    spans = telemetry.spans
    traces = {span.context.trace_id for span in spans if span.context is not None}
    told = [(span.name, sorted(span.attributes or {}), len(span.links)) for span in spans]
    telemetry.spans_to.shutdown()
    telemetry.metrics_to.shutdown()
    return told, len(traces)


@pytest.mark.parametrize("promise", promises_of("tracing"))
def test_a_fault_changes_a_trace(promise: str) -> None:
    check(promise, a_run_that_goes_on)
