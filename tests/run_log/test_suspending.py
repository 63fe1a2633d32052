"""What a call that waits means for its batch, hooks and listeners, and what a decision does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clark_agent import (
    AfterToolCallContext,
    Agent,
    AgentContext,
    AgentTool,
    BeforeToolCallContext,
    Budget,
    CancellationToken,
    ChannelSteering,
    ConfigError,
    LoopConfig,
    LoopOutcome,
    Plugin,
    Rewrite,
    RunAborted,
    RunIdentity,
    RunResult,
    Suspend,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    ToolSuspended,
    agent_tool,
    run,
    run_child,
    tool,
)
from clark_agent.errors import (
    AlreadyDecided,
    DecisionNotApplicable,
    RequestExpired,
    RequestNotFound,
    RunBusy,
)
from clark_agent.events import ToolExecutionEnd, ToolExecutionStart
from clark_agent.history import repair_history
from clark_agent.replay import replay
from clark_agent.run_log import (
    Allow,
    Deny,
    GiveArguments,
    GiveResult,
    JsonlStore,
    LogDamaged,
    MemoryStore,
    RunLog,
    RunStore,
    advance,
    cancel,
    decide,
    deliver,
    diff,
    fold,
    fork,
    ready_runs,
    resume,
    steer,
    waiting_for,
)
from clark_agent.run_log.records import CallSuspended, RequestDecided, ToolEnded
from clark_agent.steering import SteeringStatus
from clark_agent.stream import StreamEvent, StreamRequest
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream, call, check_events
from clark_agent.toolkit import SUSPEND, Approval, ApprovalGate, ApprovalRequest
from clark_agent.waiting import Expired, WaitingRequest
from tests.run_log.storing import open_store

HERE = AgentContext(identity=RunIdentity("r", conversation_id="talk"))


class Gate:
    """Suspends every call of ``pay``."""

    name = "gate"

    def __init__(self, **how: Any) -> None:
        self.how = how
        self.seen: list[Any] = []

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | None:
        if ctx.tool_call.name != "pay":
            return None
        self.seen.append(ctx.args)
        return Suspend({"may I": ctx.args}, **self.how)


class World:
    """A store, tools that note what they do, and configs on them."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.sink = RecordingSink()
        self.paid: list[Any] = []
        self.tools: list[AgentTool] = []

        @tool
        def pay(amount: int, to: str = "ada") -> str:
            """Pay."""
            self.paid.append(amount)
            return f"paid {amount} to {to}"

        @tool
        def look() -> str:
            """Look."""
            return "seen"

        self.add(pay, look)

    def add(self, *tools: AgentTool) -> None:
        self.tools += tools

    def config(self, *steps: Any, plugins: list[Plugin] | None = None, **more: Any) -> LoopConfig:
        return LoopConfig(
            stream=ScriptedStream(steps),
            tools=self.tools,
            plugins=[Gate()] if plugins is None else plugins,
            run_log=RunLog(self.store),
            clock=self.clock,
            event_sink=self.sink,
            **more,
        )

    async def decide(self, request: WaitingRequest, decision: Any, by: str = "ada") -> Any:
        return await decide(self.store, "r", request.request_id, decision, by=by, clock=self.clock)


def results(result: RunResult) -> list[ToolResultMessage]:
    return [m for m in result.messages if isinstance(m, ToolResultMessage)]


def suspended_details(message: ToolResultMessage) -> dict[str, Any]:
    details: Any = message.details
    assert isinstance(details, dict)
    assert details["kind"] == "suspended"
    return details


# --- the outcome ----------------------------------------------------------------------------------


async def test_the_result_says_what_waits_as_json() -> None:
    w = World()
    config = w.config(call("pay", amount=5), plugins=[Gate(expires_in=60, assignee="finance")])
    result = await run("Pay.", HERE, config)
    assert result.outcome is LoopOutcome.SUSPENDED
    assert not result.outcome.is_complete
    (request,) = msgspec.json.decode(msgspec.json.encode(result.waiting))
    assert request == {
        "request_id": request["request_id"],
        "run_id": "r",
        "root_run_id": "r",
        "conversation_id": "talk",
        "turn": 1,
        "position": 0,
        "tool_call_id": "call_1",
        "tool_name": "pay",
        "arguments": {"amount": 5},
        "asked_by": "gate",
        "needs": "permission",
        "request": {"may I": {"amount": 5}},
        "assignee": "finance",
        "asked_at": request["asked_at"],
        "expires_at": request["asked_at"] + 60_000,
    }
    assert request["request_id"].startswith("r/1/0/")
    assert w.paid == []
    check_events(w.sink.events)
    (summary,) = w.store.runs()
    assert summary.outcome == "suspended"


async def test_a_call_that_waits_passes_no_hook_has_no_vote_and_stops_no_sibling() -> None:
    seen: list[str] = []

    class After:
        name = "after"

        def on_after_tool_call(self, ctx: AfterToolCallContext) -> None:
            seen.append(ctx.tool_call.name)

    w = World()
    pay, _ = w.tools
    pay.aborts_siblings_on_error = True
    w.add(tool(_ends))
    steps = [call("pay", amount=1), call("ends"), call("look")]
    result = await run("Go.", HERE, w.config(steps, plugins=[Gate(), After()]))
    assert result.outcome is LoopOutcome.SUSPENDED
    assert sorted(seen) == ["ends", "look"]
    placeholder, ended, looked = results(result)
    assert suspended_details(placeholder)["reason"] == "permission"
    assert not placeholder.is_error
    assert (ended.plain_text, looked.plain_text) == ("That is all.", "seen")
    assert repair_history(result.messages).changes == ()
    kinds = [(type(e), e.tool_name) for e in w.sink.events if isinstance(e, ToolExecutionStart)]
    assert (ToolExecutionStart, "pay") not in kinds
    ends = [e.tool_name for e in w.sink.events if isinstance(e, ToolExecutionEnd)]
    assert sorted(ends) == ["ends", "look", "pay"]


def _ends() -> ToolResult:
    """Vote to end."""
    return ToolResult.terminal("That is all.")


_ends.__name__ = "ends"


async def test_the_vote_is_taken_with_the_real_results() -> None:
    w = World()
    w.add(tool(_ends))
    config = w.config([call("pay", amount=1), call("ends")], "It is not asked for this.")
    (request,) = (await run("Go.", HERE, config)).waiting
    assert await w.decide(request, GiveResult(ToolResult.terminal("by hand"))) == ()
    result = await resume(w.store, "r", config)
    assert result.outcome is LoopOutcome.DONE
    assert [r.plain_text for r in results(result)] == ["by hand", "That is all."]
    assert w.paid == []


async def test_a_tool_is_not_called_again_to_come_back_to_its_question() -> None:
    asked: list[str] = []

    @tool
    def ask(question: str, ctx: ToolContext) -> str:
        """Ask."""
        asked.append(ctx.idempotency_key)
        raise ToolSuspended({"q": question}, assignee="bob")

    w = World()
    w.add(ask)
    config = w.config(call("ask", question="Which?"), "Blue it is.")
    (request,) = (await run("Go.", HERE, config)).waiting
    assert (request.needs, request.asked_by, request.assignee) == ("result", "ask", "bob")
    for decision in (Allow(), GiveArguments({"question": "What?"})):
        with pytest.raises(DecisionNotApplicable, match="GiveResult or Deny"):
            await w.decide(request, decision)
    await w.decide(request, GiveResult({"colour": "blue"}))
    result = await resume(w.store, "r", config)
    assert [r.plain_text for r in results(result)] == ['{"colour":"blue"}']
    assert asked == ["r/1/0"]


async def test_an_urgent_message_waits_in_the_log_and_its_receipt_says_so() -> None:
    w = World()
    channel = ChannelSteering()

    @tool
    def steers() -> str:
        """Steer."""
        receipts.append(channel.handle.steer("Later."))
        return "steered"

    receipts: list[Any] = []
    w.add(steers)
    config = w.config([call("pay", amount=1), call("steers")], "Done.", plugins=[Gate(), channel])
    first = await run("Go.", HERE, config)
    assert first.undelivered == ()
    assert receipts[0].status is SteeringStatus.KEPT
    steer(w.store, "r", "And later still.")
    await w.decide(first.waiting[0], Allow())
    result = await resume(w.store, "r", config)
    told = [m.plain_text for m in result.messages if m.role == "user"]
    assert told == ["Go.", "Later.", "And later still."]


# --- decisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "text", "paid", "is_error"),
    [
        (Allow(), "paid 5 to ada", [5], False),
        (Deny("too much"), "The call was not run: it was refused: too much", [], True),
        (Deny(), "The call was not run: it was refused. Do not send it again as it is.", [], True),
        (GiveArguments({"amount": 3, "to": "bob"}), "paid 3 to bob", [3], False),
        (GiveArguments({"amount": "7"}), "paid 7 to ada", [7], False),
        (GiveResult("paid in cash"), "paid in cash", [], False),
        (GiveResult(ToolResult.error("no cash")), "no cash", [], True),
    ],
)
async def test_what_a_decision_does(
    decision: Any, text: str, paid: list[int], is_error: bool
) -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.")
    (request,) = (await run("Pay.", HERE, config)).waiting
    await w.decide(request, decision, by="ada")
    assert ready_runs(w.store, clock=w.clock) == ["r"]
    w.sink.events.clear()
    result = await resume(w.store, "r", config)
    check_events(w.sink.events)
    (message,) = results(result)
    assert (message.plain_text, message.is_error, w.paid) == (text, is_error, paid)
    decided = [r for r in w.store.load("r").records if isinstance(r.entry, RequestDecided)]
    assert [(r.entry.by, r.entry.decision) for r in decided] == [("ada", decision)]  # type: ignore[union-attr]
    assert (await replay(w.store, "r", config)).is_identical


async def test_arguments_that_do_not_fit_are_an_error_result() -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Sorry.")
    (request,) = (await run("Pay.", HERE, config)).waiting
    await w.decide(request, GiveArguments({"amount": "a lot"}))
    (message,) = results(await resume(w.store, "r", config))
    assert message.is_error
    assert "amount" in message.plain_text
    assert w.paid == []


async def test_the_first_decision_counts() -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.")
    (request,) = (await run("Pay.", HERE, config)).waiting
    await w.decide(request, Deny("no"), by="ada")
    with pytest.raises(AlreadyDecided) as caught:
        await w.decide(request, Allow(), by="bob")
    assert (caught.value.by, caught.value.decision) == ("ada", Deny("no"))
    await resume(w.store, "r", config)
    with pytest.raises(AlreadyDecided):
        await w.decide(request, Allow(), by="bob")
    assert w.paid == []


async def test_requests_that_are_not_there() -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.")
    (request,) = (await run("Pay.", HERE, config)).waiting
    for run_id, request_id in (
        ("r", "r/1/0/0000000000000000"),
        ("r", "other/1/0/0000000000000000"),
        ("r", "nonsense"),
        ("other", request.request_id),
    ):
        with pytest.raises(RequestNotFound):
            await decide(w.store, run_id, request_id, Allow())
    with pytest.raises(TypeError, match="a decision is"):
        await decide(w.store, "r", request.request_id, True)  # type: ignore[arg-type]


async def test_a_request_about_other_arguments_is_another_request() -> None:
    """A plugin that changes the arguments between suspend and resume is asked about again."""

    class Doubles:
        name = "doubles"

        def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Rewrite | None:
            return Rewrite({**ctx.args, "amount": 2 * ctx.args["amount"]})

    w = World()
    steps = (call("pay", amount=5), "Done.")
    (first,) = (await run("Pay.", HERE, w.config(*steps))).waiting
    await w.decide(first, Allow())
    second = first
    orders: list[list[Plugin]] = [[Doubles(), Gate()], [Gate(), Doubles()]]
    for plugins in orders:
        again = await resume(w.store, "r", w.config("Done.", plugins=plugins))
        assert again.outcome is LoopOutcome.SUSPENDED
        (second,) = again.waiting
        assert second.arguments == {"amount": 10}
        assert second.request_id != first.request_id
        assert w.paid == []
    await w.decide(second, Allow())
    await resume(w.store, "r", w.config("Done.", plugins=[Gate(), Doubles()]))
    assert w.paid == [10]


async def test_two_gates_need_two_permissions() -> None:
    w = World()
    first, second = Gate(), Gate()
    second.name = "second"
    config = w.config(call("pay", amount=5), "Done.", plugins=[first, second])
    (request,) = (await run("Pay.", HERE, config)).waiting
    await w.decide(request, Allow())
    (other,) = (await resume(w.store, "r", config)).waiting
    assert other.asked_by == "second"
    assert w.paid == []
    await w.decide(other, Allow())
    assert (await resume(w.store, "r", config)).outcome is LoopOutcome.DONE
    assert w.paid == [5]


async def test_a_denial_holds_even_if_the_gate_is_gone() -> None:
    w = World()
    (request,) = (await run("Pay.", HERE, w.config(call("pay", amount=5)))).waiting
    await w.decide(request, Deny("no"))
    await resume(w.store, "r", w.config("Done.", plugins=[]))
    assert w.paid == []


# --- time and events ------------------------------------------------------------------------------


async def test_expiry_is_recorded_and_is_a_refusal_that_says_so() -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.", plugins=[Gate(expires_in=10)])
    (request,) = (await run("Pay.", HERE, config)).waiting
    assert waiting_for(w.store, "r", clock=w.clock) == [request]
    w.clock.time_ms += 10_000
    assert waiting_for(w.store, "r", clock=w.clock) == []
    assert ready_runs(w.store, clock=w.clock) == ["r"]
    with pytest.raises(RequestExpired):
        await w.decide(request, Allow())
    with pytest.raises(RequestExpired):
        await w.decide(request, Deny())
    result = await resume(w.store, "r", config)
    (message,) = results(result)
    assert "has expired" in message.plain_text
    assert message.is_error
    assert w.paid == []
    decided = [r.entry for r in w.store.load("r").records if isinstance(r.entry, RequestDecided)]
    assert [type(entry.decision) for entry in decided] == [Expired]


async def test_resume_judges_the_time_itself() -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.", plugins=[Gate(expires_in=10)])
    await run("Pay.", HERE, config)
    w.clock.time_ms += 9_000
    assert (await resume(w.store, "r", config)).outcome is LoopOutcome.SUSPENDED
    w.clock.time_ms += 2_000
    assert (await resume(w.store, "r", config)).outcome is LoopOutcome.DONE
    assert w.paid == []


async def test_a_call_waits_for_a_time() -> None:
    w = World()
    until = w.clock.time_ms + 5_000
    config = w.config(call("pay", amount=5), "Done.", plugins=[Gate(until=until)])
    (request,) = (await run("Pay.", HERE, config)).waiting
    assert request.until == until
    assert (await resume(w.store, "r", config)).outcome is LoopOutcome.SUSPENDED
    w.clock.time_ms = until
    assert (await resume(w.store, "r", config)).outcome is LoopOutcome.DONE
    assert w.paid == [5]


async def test_a_call_waits_for_an_event_which_may_come_first() -> None:
    @tool
    def order() -> str:
        """Order, and wait until it is paid."""
        deliver(w.store, "r", "paid", {"amount": 1}, id="webhook-1")  # faster than the run
        raise ToolSuspended(event="paid")

    w = World()
    w.add(order)
    config = w.config([call("order"), call("order")], "Done.")
    first = await run("Go.", HERE, config)
    assert len(first.waiting) == 2
    again = await resume(w.store, "r", config)  # one delivery ends one wait
    assert len(again.waiting) == 1
    assert deliver(w.store, "r", "shipped") is True
    assert len((await resume(w.store, "r", config)).waiting) == 1
    assert deliver(w.store, "r", "paid", {"amount": 2}, id="webhook-2") is True
    assert deliver(w.store, "r", "paid", {"amount": 2}, id="webhook-2") is False
    result = await resume(w.store, "r", config)
    assert [r.plain_text for r in results(result)] == ['{"amount":1}', '{"amount":2}']


async def test_an_event_lets_a_held_call_run() -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.", plugins=[Gate(event="payday")])
    await run("Pay.", HERE, config)
    deliver(w.store, "r", "payday")
    await resume(w.store, "r", config)
    assert w.paid == [5]


async def test_an_event_finds_the_child_that_waits_for_it_and_comes_once() -> None:
    @tool
    def order() -> str:
        """Order."""
        raise ToolSuspended(event="paid")

    w = World()
    w.add(order)
    child = w.config(call("order"), call("order"), "One.", "Two.", plugins=[])
    child = child.replace(run_log=None, event_sink=None)
    w.tools = [agent_tool("child", "child", child)]
    config = w.config([call("child", task="a"), call("child", task="b")], "Done.", plugins=[])
    assert len((await run("Go.", HERE, config)).waiting) == 2
    assert deliver(w.store, "r", "paid", 1, id="first") is True
    assert deliver(w.store, "r", "paid", 1, id="first") is False
    assert len((await resume(w.store, "r", config)).waiting) == 1
    assert deliver(w.store, "r", "paid", 2, id="second") is True
    result = await resume(w.store, "r", config)
    assert result.outcome is LoopOutcome.DONE
    assert w.store.mail("r") == ()


@pytest.mark.parametrize(
    "wrong", [{"expires_in": 0}, {"expires_in": "soon"}, {"until": 1.5}, {"event": ""}]
)
async def test_a_wrong_suspension_blocks_the_call(wrong: dict[str, Any]) -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.", plugins=[Gate(**wrong)])
    result = await run("Pay.", HERE, config)
    assert result.outcome is LoopOutcome.DONE
    (message,) = results(result)
    assert next(iter(wrong)) in message.plain_text
    assert w.paid == []


# --- runs that cannot wait ------------------------------------------------------------------------


async def test_a_run_without_a_log_refuses_instead_of_waiting() -> None:
    @tool
    def ask() -> str:
        """Ask."""
        raise ToolSuspended("?")

    w = World()
    w.add(ask)
    config = w.config([call("pay", amount=5), call("ask")], "Done.").replace(run_log=None)
    result = await run("Pay.", HERE, config)
    assert result.outcome is LoopOutcome.DONE
    pay, asked = results(result)
    assert "cannot wait" in pay.plain_text
    assert "cannot wait" in asked.plain_text
    assert pay.is_error
    assert w.paid == []


async def test_a_child_of_a_tool_that_does_not_come_back_refuses() -> None:
    """A tool of the host that starts a run is not called again, unless it is idempotent."""
    w = World()
    child = w.config(call("pay", amount=5), "Refused.").replace(run_log=None, event_sink=None)

    def delegating(*, idempotent: bool) -> AgentTool:
        @tool(idempotent=idempotent)
        async def delegate(ctx: ToolContext) -> str:
            """Delegate."""
            return (await run_child(ctx, "Pay.", child)).text

        return delegate

    w.tools = [delegating(idempotent=False)]
    result = await run("Go.", HERE, w.config(call("delegate"), "Done.", plugins=[]))
    assert [r.plain_text for r in results(result)] == ["Refused."]
    child = child.replace(stream=ScriptedStream([call("pay", amount=5), "Paid."]))
    w.tools = [delegating(idempotent=True)]
    config = w.config(call("delegate"), "Done.", plugins=[])
    context = AgentContext(identity=RunIdentity("again"))
    (request,) = (await run("Go.", context, config)).waiting
    assert (request.root_run_id, request.tool_name) == ("again", "pay")
    await decide(w.store, "again", request.request_id, Allow(), clock=w.clock)
    result = await resume(w.store, "again", config)
    assert [r.plain_text for r in results(result)] == ["Paid."]
    assert w.paid == [5]


# --- stopping, budgets, and other uses of the log -------------------------------------------------


async def test_an_aborted_run_withdraws_its_requests() -> None:
    signal = CancellationToken()

    @tool
    async def cancels() -> str:
        """Cancel the run."""
        signal.cancel("enough")
        await asyncio.sleep(5)
        return "never"

    w = World()
    w.add(cancels)
    config = w.config([call("pay", amount=1), call("cancels")])
    with pytest.raises(RunAborted) as caught:
        await run("Go.", HERE, config, signal)
    check_events(w.sink.events)
    assert repair_history(caught.value.messages).changes == ()
    assert "not run" in [m.plain_text for m in caught.value.messages][2]
    folded = fold(w.store.load("r"))
    assert folded.messages == list(caught.value.messages)
    assert waiting_for(w.store, "r", clock=w.clock) == []
    (entry,) = [r.entry for r in w.store.load("r").records if isinstance(r.entry, CallSuspended)]
    assert entry.request is not None
    with pytest.raises(RequestNotFound):
        await w.decide(entry.request, Allow())
    ends = [r.entry for r in w.store.load("r").records if isinstance(r.entry, ToolEnded)]
    assert len(ends) == 2
    assert (await replay(w.store, "r", config)).is_identical


async def test_a_call_that_a_failure_has_made_useless_is_not_asked_about() -> None:
    @tool(aborts_siblings_on_error=True)
    def fails() -> ToolResult:
        """Fail."""
        return ToolResult.error("no")

    w = World()
    w.add(fails)
    config = w.config([call("pay", amount=5), call("fails")], "Done.")
    result = await run("Pay.", HERE, config)
    assert result.outcome is LoopOutcome.DONE
    assert "not run" in results(result)[0].plain_text
    assert w.paid == []
    assert (await replay(w.store, "r", config)).is_identical


@pytest.mark.parametrize("wait", [2_000, 6_000])
async def test_of_two_times_the_earlier_one_counts(wait: int) -> None:
    w = World()
    gate = Gate(expires_in=1, until=w.clock.time_ms + 5_000)
    config = w.config(call("pay", amount=5), "Done.", plugins=[gate])
    await run("Pay.", HERE, config)
    w.clock.time_ms += wait
    await resume(w.store, "r", config)
    assert w.paid == []


async def test_a_decision_is_only_told_to_those_who_know_the_run() -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.")
    (request,) = (await run("Pay.", HERE, config)).waiting
    await w.decide(request, Deny("secret"))
    with pytest.raises(RequestNotFound):
        await decide(w.store, "other", request.request_id, Allow())


async def test_a_cancelled_run_waits_no_longer() -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.")
    (request,) = (await run("Pay.", HERE, config)).waiting
    cancel(w.store, "r", "the customer has left")
    assert waiting_for(w.store, clock=w.clock) == []
    assert ready_runs(w.store, clock=w.clock) == ["r"]
    with pytest.raises(RunAborted, match="the customer has left") as caught:
        await resume(w.store, "r", config)
    assert repair_history(caught.value.messages).changes == ()
    assert w.paid == []
    assert fold(w.store.load("r")).messages == list(caught.value.messages)
    with pytest.raises(RequestNotFound):
        await w.decide(request, Allow())
    assert (await replay(w.store, "r", config)).is_identical


async def test_deciding_while_a_process_works_on_the_run() -> None:
    caught: list[BaseException] = []

    @tool
    async def decides() -> str:
        """Decide while the batch runs."""
        (request,) = waiting_for(w.store, "r", clock=w.clock)
        try:
            await decide(w.store, "r", request.request_id, Allow(), patience=0)
        except RunBusy as error:
            caught.append(error)
        return "tried"

    w = World()
    w.add(decides)
    result = await run("Go.", HERE, w.config([call("pay", amount=1), call("decides")]))
    assert len(caught) == 1
    await w.decide(result.waiting[0], Allow())


async def test_the_time_of_waiting_is_not_the_budgets() -> None:
    w = World()
    budget = Budget(seconds=100)
    config = w.config(call("pay", amount=5), "Done.", budget=budget)
    (request,) = (await run("Pay.", HERE, config)).waiting
    w.clock.time_ms += 10**9
    await w.decide(request, Allow())
    w.clock.time_ms += 10**9
    result = await resume(w.store, "r", config)
    assert result.outcome is LoopOutcome.DONE
    assert w.paid == [5]


async def test_a_suspended_run_can_be_forked_and_compared() -> None:
    w = World()
    config = w.config(call("look"), call("pay", amount=5), "Done.")
    (request,) = (await run("Pay.", HERE, config)).waiting
    context = fork(w.store, "r")
    assert [m.plain_text for m in context.messages] == ["Pay.", "", "seen"]
    other = w.config(call("look"), call("pay", amount=5), "Done.")
    await run("Pay.", AgentContext(identity=RunIdentity("s", conversation_id="talk")), other)
    assert diff(w.store, "r", "s") is None
    await w.decide(request, Deny())
    difference = diff(w.store, "r", "s")
    assert difference is not None
    assert "decided by ada: deny" in str(difference)


async def test_agents_in_agents_are_asked_about_at_the_root() -> None:
    w = World()
    inner = w.config(call("pay", amount=1), call("pay", amount=2), "One.", "Two.")
    inner = inner.replace(run_log=None, event_sink=None)
    outer = LoopConfig(
        stream=ScriptedStream([[call("inner", task="x"), call("inner", task="y")], "Outer."]),
        tools=[agent_tool("inner", "inner", inner)],
        clock=w.clock,
    )
    w.tools = [agent_tool("outer", "outer", outer)]
    config = w.config(call("outer", task="go"), "Done.", plugins=[])
    result = await run("Go.", HERE, config)
    assert [r.root_run_id for r in result.waiting] == ["r", "r"]
    assert len({r.run_id for r in result.waiting} | {"r"}) == 3
    assert waiting_for(w.store, clock=w.clock) == list(result.waiting)
    assert suspended_details(results(result)[0])["reason"] == "child"
    one, two = result.waiting
    assert await w.decide(one, Allow()) == (two,)
    assert (await resume(w.store, "r", config)).waiting == (two,)
    assert await w.decide(two, Deny("no")) == ()
    final = await resume(w.store, "r", config)
    assert final.text == "Done."
    assert len(w.paid) == 1
    assert (await replay(w.store, "r", config)).is_identical


# --- combinations ------------------------------------------------------------------------------


async def test_two_gates_of_one_name_need_two_permissions() -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.", plugins=[Gate(), Gate()])
    (first,) = (await run("Pay.", HERE, config)).waiting
    await w.decide(first, Allow())
    (second,) = (await resume(w.store, "r", config)).waiting
    assert (second.asked_by, w.paid) == ("gate #2", [])
    await w.decide(second, Allow())
    assert (await resume(w.store, "r", config)).outcome is LoopOutcome.DONE
    assert w.paid == [5]
    assert (await replay(w.store, "r", config)).is_identical


@pytest.mark.parametrize(
    ("decision", "by"),
    [
        (Allow(), 42),
        (Deny(5), None),  # type: ignore[arg-type]
        (GiveResult(ToolResult("x")), None),  # type: ignore[arg-type]
    ],
)
async def test_what_a_log_cannot_hold_is_not_written(decision: Any, by: Any) -> None:
    w = World()
    config = w.config(call("pay", amount=5), "Done.")
    (request,) = (await run("Pay.", HERE, config)).waiting
    before = len(w.store.load("r").records)
    with pytest.raises(TypeError):
        await w.decide(request, decision, by=by)
    assert len(w.store.load("r").records) == before
    await w.decide(request, Allow())


async def test_one_damaged_log_does_not_hide_the_others(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    w = World()
    for name in ("one", "two", "three"):
        config = w.config(call("pay", amount=5), "Done.").replace(run_log=RunLog(store))
        await run("Pay.", AgentContext(identity=RunIdentity(name)), config)
    path = store.path_of("two")
    path.write_bytes(path.read_bytes().replace(b'"amount":5', b'"amount":6', 1))
    assert sorted(r.run_id for r in waiting_for(store, clock=w.clock)) == ["one", "three"]
    assert ready_runs(store, clock=w.clock) == []
    with pytest.raises(LogDamaged):
        waiting_for(store, "two", clock=w.clock)


async def _gathered(children: list[Coroutine[Any, Any, RunResult]]) -> list[RunResult]:
    return await asyncio.gather(*children)


async def _grouped(children: list[Coroutine[Any, Any, RunResult]]) -> list[RunResult]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(child) for child in children]
    return [task.result() for task in tasks]


async def _wrapped(children: list[Coroutine[Any, Any, RunResult]]) -> list[RunResult]:
    try:
        return await asyncio.gather(*children)
    except Exception as error:
        raise RuntimeError("not all were paid") from error


@pytest.mark.parametrize("together", [_gathered, _grouped, _wrapped])
@pytest.mark.parametrize("kind", ["memory", "sqlite", "jsonl"])
async def test_children_that_start_together_are_told_apart(
    kind: str,
    together: Callable[[list[Coroutine[Any, Any, RunResult]]], Awaitable[list[RunResult]]],
    tmp_path: Path,
) -> None:
    w = World()
    store: RunStore = w.store if kind == "memory" else open_store(kind, tmp_path)
    child = w.config(*[call("pay", amount=n) for n in range(3)], *["Paid."] * 3)
    child = child.replace(run_log=None, event_sink=None)
    scripted, all_have_begun = child.stream, asyncio.Barrier(3)

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        # A group starts no more children once one of them is suspended.
        if together is _grouped and len(request.messages) == 1:
            await all_have_begun.wait()
        async for event in scripted(request, signal):
            yield event

    child = child.replace(stream=model)

    @tool(idempotent=True)
    async def pay_all(ctx: ToolContext) -> str:
        """Pay three invoices at once."""
        paid: list[Coroutine[Any, Any, RunResult]] = [
            run_child(ctx, f"Pay invoice {n}.", child) for n in range(3)
        ]
        return " ".join([result.text for result in await together(paid)])

    w.tools = [pay_all]
    config = w.config(call("pay_all"), "Done.", plugins=[]).replace(run_log=RunLog(store))
    first = await run("Go.", HERE, config)
    assert len(first.waiting) == 3
    for request in first.waiting:
        await decide(store, "r", request.request_id, Allow(), clock=w.clock)
    result = await resume(store, "r", config)
    assert result.outcome is LoopOutcome.DONE
    assert sorted(w.paid) == [0, 1, 2]
    assert len(store.runs(parent_run_id="r")) == 3


async def test_a_child_of_a_run_that_has_ended_cannot_be_decided() -> None:
    w = World()
    child = w.config(call("pay", amount=1), "Paid.").replace(run_log=None, event_sink=None)
    w.tools = [agent_tool("child", "child", child)]
    config = w.config(call("child", task="x"), "Done.", plugins=[])
    (request,) = (await run("Go.", HERE, config)).waiting
    cancel(w.store, "r", "enough")
    with pytest.raises(RunAborted):
        await resume(w.store, "r", config)
    for run_id in ("r", request.run_id):
        with pytest.raises(RequestNotFound):
            await decide(w.store, run_id, request.request_id, Allow(), clock=w.clock)


async def test_an_asking_gate_does_not_ask_again_about_what_was_allowed() -> None:
    asked: list[ApprovalRequest] = []

    def ask(request: ApprovalRequest) -> Approval:
        asked.append(request)
        return Approval.NO

    w = World()
    waiting = w.config(call("pay", amount=5), plugins=[ApprovalGate(SUSPEND)])
    (request,) = (await run("Pay.", HERE, waiting)).waiting
    await w.decide(request, Allow())
    await resume(w.store, "r", w.config("Done.", plugins=[ApprovalGate(ask)]))
    assert (w.paid, asked) == ([5], [])


async def test_an_agent_can_be_resumed_with_and_an_empty_id_begins_nothing() -> None:
    w = World()
    model, tools = ScriptedStream([call("pay", amount=5), "Done."]), [*w.tools]
    agent: Agent[str, Any] = Agent(model, tools=tools, plugins=[Gate()], clock=w.clock)
    with pytest.raises(ConfigError, match="id of a run"):
        await advance(w.store, "", agent, "Pay.")
    (request,) = (await advance(w.store, "r", agent, "Pay.")).waiting
    await w.decide(request, Allow())
    assert (await resume(w.store, "r", agent)).text == "Done."
    with pytest.raises(TypeError, match="config must be a LoopConfig"):
        await resume(w.store, "r", "not a config")  # type: ignore[arg-type]
