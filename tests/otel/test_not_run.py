"""Calls whose tool did not run: what became of them, and what is recorded of their names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from clark_agent import (
    Agent,
    Answer,
    BeforeToolCallContext,
    Block,
    CancellationToken,
    Suspend,
    ToolResult,
    tool,
)
from clark_agent.cancellation import LET_GO
from clark_agent.errors import RunLetGo
from clark_agent.run_log import (
    Allow,
    Deny,
    GiveResult,
    MemoryStore,
    RunLog,
    decide,
    resume,
    waiting_for,
)
from clark_agent.testing import ScriptedStream, call
from tests.otel.conftest import Telemetry

REJECTED = "clark_agent.tool_rejected"


@tool
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


class Decides:
    """A hook with one decision."""

    def __init__(self, decision: Any) -> None:
        self._decision = decision

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Any:
        if isinstance(self._decision, Exception):
            raise self._decision
        return None if ctx.was_allowed else self._decision


def events(telemetry: Telemetry) -> list[tuple[str, Any]]:
    """The names and the reasons of the events of turns."""
    turns = [span for span in telemetry.spans if span.name == "turn"]
    return [
        (event.name, (event.attributes or {}).get("clark_agent.reason"))
        for turn in turns
        for event in turn.events
    ]


@pytest.mark.parametrize(
    ("decision", "event"),
    [
        (Answer(ToolResult.text("cached")), ("clark_agent.tool_answered", None)),
        (Block("not today"), (REJECTED, "blocked")),
        (ValueError("secret"), (REJECTED, "hook_failed")),
        (Suspend({}), (REJECTED, "cannot_wait")),
        (None, None),
    ],
)
async def test_what_a_hook_decides(telemetry: Telemetry, decision: Any, event: Any) -> None:
    agent = Agent(
        ScriptedStream([call("pay", amount=1), "Done."]),
        tools=[pay],
        plugins=[telemetry.tracing(), Decides(decision)],
    )
    await agent.run("Go.")
    assert events(telemetry) == ([] if event is None else [event])
    first = next(span for span in telemetry.spans if span.name == "turn")
    assert (first.attributes or {})["clark_agent.turn.tool_calls"] == (event is None)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [(call("missing"), "unknown_tool"), (call("pay", amount="much"), "invalid_arguments")],
)
async def test_a_call_that_is_rejected_has_a_reason(
    telemetry: Telemetry, wanted: Any, reason: str
) -> None:
    agent = Agent(ScriptedStream([wanted, "Done."]), tools=[pay], plugins=[telemetry.tracing()])
    await agent.run("Go.")
    assert events(telemetry) == [(REJECTED, reason)]


async def test_calls_over_the_cap_are_rejected(telemetry: Telemetry) -> None:
    agent = Agent(
        ScriptedStream([[call("pay", amount=1), call("pay", amount=2)], "Done."]),
        tools=[pay],
        plugins=[telemetry.tracing()],
        max_tool_calls_per_turn=1,
    )
    await agent.run("Go.")
    assert events(telemetry) == [(REJECTED, "max_tool_calls_per_turn")]


@pytest.mark.parametrize(
    ("verdict", "event"),
    [
        (Allow(), None),
        (GiveResult(ToolResult.text("paid by hand")), ("clark_agent.tool_answered", None)),
        (Deny("no"), (REJECTED, "denied")),
    ],
)
async def test_a_call_that_waits_is_suspended_and_then_what_was_decided(
    telemetry: Telemetry, verdict: Any, event: Any
) -> None:
    store = MemoryStore()
    agent = Agent(
        ScriptedStream([call("pay", amount=1), "Done."]),
        tools=[pay],
        plugins=[telemetry.tracing(), Decides(Suspend({}))],
        run_log=RunLog(store),
    )
    await agent.run("Go.")
    assert events(telemetry) == [("clark_agent.tool_suspended", None)]
    assert (telemetry.span("turn").attributes or {})["clark_agent.is_suspended"] is True
    (request,) = waiting_for(store)
    await decide(store, request.run_id, request.request_id, verdict)
    await resume(store, request.run_id, agent)
    assert events(telemetry)[1:] == ([] if event is None else [event])
    ran = [span for span in telemetry.spans if span.name == "execute_tool pay"]
    assert len(ran) == (event is None)


@pytest.mark.parametrize("was_traced", [True, False])
async def test_a_run_that_goes_on_is_marked_as_resumed(
    telemetry: Telemetry, was_traced: bool
) -> None:
    store = MemoryStore()
    agent = Agent(
        ScriptedStream([call("pay", amount=1), "Done."]),
        tools=[pay],
        plugins=[Decides(Suspend({}))],
        run_log=RunLog(store),
    )
    traced = agent.replace(plugins=[Decides(Suspend({})), telemetry.tracing()])
    await (traced if was_traced else agent).run("Go.")
    (request,) = waiting_for(store)
    await decide(store, request.run_id, request.request_id, Allow())
    await resume(store, request.run_id, traced)
    *before, after = [span for span in telemetry.spans if span.name == "invoke_agent"]
    assert (after.attributes or {})["clark_agent.run.is_resumed"] is True
    assert len(after.links) == len(before) == was_traced
    for span in before:
        assert "clark_agent.run.is_resumed" not in (span.attributes or {})


async def test_a_result_from_the_log_is_restored(telemetry: Telemetry) -> None:
    token, store = CancellationToken(), MemoryStore()

    @tool
    async def slow() -> str:
        """Stop the process."""
        token.cancel(LET_GO)
        await asyncio.sleep(0)
        return "paid"

    agent = Agent(
        ScriptedStream([call("slow"), "Done."]),
        tools=[slow],
        plugins=[telemetry.tracing()],
        run_log=RunLog(store),
    )
    with pytest.raises(RunLetGo):
        await agent.run("Go.", signal=token)
    assert events(telemetry) == []
    (logged,) = store.runs()
    result = await resume(store, logged.run_id, agent)
    assert result.messages[2].plain_text == "paid"
    assert events(telemetry) == [("clark_agent.tool_restored", None)]


SECRET = "the-password-is-tea"


async def test_names_and_ids_that_the_model_makes_up_are_content(telemetry: Telemetry) -> None:
    for settings in ({}, {"content": True, "redact": lambda text: text.replace("tea", "***")}):
        agent = Agent(
            ScriptedStream(
                [
                    [
                        call(SECRET * 1000, call_id=SECRET),
                        call("pay", call_id=f"{SECRET}-2", amount=1),
                    ],
                    call("child", call_id=f"{SECRET}-3", task="Pay."),
                    "Done.",
                ]
            ),
            tools=[pay, Agent(ScriptedStream(["Paid."]), name="child").as_tool("Pays.")],
            plugins=[telemetry.tracing(**settings)],
        )
        await agent.run("Go.")
    for span in telemetry.spans:
        assert "tea" not in span.to_json()
    first, second = [e for s in telemetry.spans for e in s.events]
    assert (first.attributes or {})["gen_ai.tool.name"] == "unknown"
    named = (second.attributes or {})["gen_ai.tool.name"]
    assert str(named).startswith("the-password-is-***")
    assert len(str(named)) <= 101
