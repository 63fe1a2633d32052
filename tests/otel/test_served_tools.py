"""Tools that are served to clients of the Model Context Protocol, without a model."""

from __future__ import annotations

import logging
from typing import Any

from clark_agent import tool
from clark_agent.mcp.serving_calls import ServedCall
from clark_agent.mcp.serving_entries import tool_entries
from clark_agent.otel import RunIds, instrument
from tests.otel.conftest import Telemetry

logger = logging.getLogger("tests.otel.served")


async def test_a_call_of_a_client_is_the_span_of_its_tool_and_nothing_else(
    telemetry: Telemetry,
) -> None:
    instrument(tracer_provider=telemetry.spans_to, meter_provider=telemetry.metrics_to)
    records: list[Any] = []

    @tool
    def stock(item: str) -> str:
        """How many there are."""
        record = logger.makeRecord("x", logging.INFO, "x", 1, "x", (), None)
        RunIds().filter(record)
        records.append(record)
        return f"{item}: 3"

    (entry,) = tool_entries([stock], plugins=(), tool_timeout=None, deps=None)
    with telemetry.spans_to.get_tracer("sdk").start_as_current_span("tools/call stock"):
        for arguments in ({"item": "tea"}, {"item": 3}):
            outcome = await entry.call(arguments, ServedCall(question_timeout=1))
            assert outcome.result.is_error is (arguments["item"] == 3)
    assert telemetry.tree() == ["tools/call stock", ".execute_tool stock"]
    found = telemetry.metrics()
    assert set(found) == {"gen_ai.execute_tool.duration"}
    assert found["gen_ai.execute_tool.duration"][0].count == 1
    (inside,) = records
    assert inside.run_id
    assert inside.turn == 1
    assert telemetry.span("execute_tool stock").context is not None
