"""A tool that asks in the middle of its work, and goes on with the answer in another process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from clark_agent import (
    Agent,
    BeforeToolCallContext,
    CancellationToken,
    LoopOutcome,
    Rewrite,
    RunIdentity,
    RunResult,
    ToolContext,
    ToolResultMessage,
    ToolSuspended,
    tool,
)
from clark_agent.cancellation import LET_GO
from clark_agent.errors import AlreadyDecided, DecisionNotApplicable, RunLetGo
from clark_agent.events import ToolExecutionEnd
from clark_agent.replay import replay
from clark_agent.run_log import (
    Allow,
    Deny,
    GiveResult,
    MemoryStore,
    RunLog,
    decide,
    deliver,
    resume,
    waiting_for,
)
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream, call, check_events
from clark_agent.toolkit import SUSPEND, ApprovalGate


class World:
    """A tool that asks for the name of each of its steps, and a store."""

    def __init__(self, *, expires_in: float | None = None, event: str | None = None) -> None:
        self.store = MemoryStore()
        self.began: list[tuple[int, Any]] = []
        self.plugins: list[Any] = []
        self.clock = FakeClock()

        @tool
        def climb(steps: int, ctx: ToolContext) -> str:
            """Climb a mountain."""
            names: list[str] = []
            if ctx.continued is not None:
                names = [*ctx.continued.request["names"], ctx.continued.result.plain_text]
            self.began.append((steps, names))
            if len(names) < steps:
                raise ToolSuspended(
                    {"names": names}, continues=True, expires_in=expires_in, event=event
                )
            return " > ".join(names)

        self.climb = climb

    def agent(self, *steps: Any) -> Agent[str, Any]:
        self.sink = RecordingSink()
        return Agent(
            ScriptedStream([*steps]),
            tools=[self.climb],
            run_log=RunLog(self.store),
            plugins=self.plugins,
            event_sink=self.sink,
            clock=self.clock,
        )

    async def start(self, steps: int = 2) -> RunResult[Any]:
        agent = self.agent(call("climb", steps=steps))
        return await agent.run("up", identity=RunIdentity.root("r"))

    async def go_on(self) -> RunResult[Any]:
        result = await resume(self.store, "r", self.agent("done").config)
        check_events(self.sink.events)
        return result

    async def answer(self, decision: Any) -> RunResult[Any]:
        [request] = waiting_for(self.store, clock=self.clock)
        await decide(self.store, "r", request.request_id, decision, by="ada", clock=self.clock)
        return await self.go_on()


def said(result: RunResult[Any]) -> str:
    [answer] = [m for m in result.messages if isinstance(m, ToolResultMessage)][-1:]
    return answer.content[0].text  # type: ignore[union-attr]


async def test_it_goes_on_with_each_answer_and_the_log_is_replayed() -> None:
    world = World()
    result = await world.start()
    assert result.outcome is LoopOutcome.SUSPENDED
    [first] = waiting_for(world.store)
    assert (first.needs, first.continues, first.request) == ("result", True, {"names": []})

    result = await world.answer(GiveResult("camp"))
    assert result.outcome is LoopOutcome.SUSPENDED
    [second] = waiting_for(world.store)
    assert second.request_id != first.request_id
    with pytest.raises(AlreadyDecided):
        await decide(world.store, "r", first.request_id, GiveResult("summit"))

    result = await world.answer(GiveResult("summit"))
    assert (result.text, said(result)) == ("done", "camp > summit")
    assert world.began == [(2, []), (2, ["camp"]), (2, ["camp", "summit"])]
    ends = [e for e in world.sink.events if isinstance(e, ToolExecutionEnd)]
    given = {"plugin": "climb", "decision": "give_result", "by": "ada"}
    assert ends[-1].result.details["decided_by"] == [given, given]
    report = await replay(world.store, "r", Agent(ScriptedStream([]), tools=[world.climb]).config)
    assert report.is_identical, report
    assert len(world.began) == 3  # the replay does not call it


async def test_a_refusal_is_its_result_and_it_is_not_called_again() -> None:
    world = World()
    await world.start()
    with pytest.raises(DecisionNotApplicable):
        await decide(world.store, "r", waiting_for(world.store)[0].request_id, Allow())
    result = await world.answer(Deny("not today"))
    assert "not today" in said(result)
    assert world.began == [(2, [])]


async def test_so_is_the_end_of_its_time() -> None:
    world = World(expires_in=60)
    await world.start()
    world.clock.time_ms += 61_000
    result = await world.go_on()
    assert "expired" in said(result)
    assert world.began == [(2, [])]


async def test_an_event_is_an_answer_too() -> None:
    world = World(event="named")
    await world.start(1)
    deliver(world.store, "r", "named", "camp")
    assert said(await world.go_on()) == "camp"


class Rewriter:
    """Makes every climb one step long, and counts its calls."""

    name = "rewriter"
    seen = 0

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Rewrite:
        self.seen += 1
        return Rewrite({"steps": 1})


async def test_hooks_that_have_seen_the_call_are_not_asked_again() -> None:
    world, rewriter = World(), Rewriter()
    world.plugins = [rewriter, ApprovalGate(SUSPEND)]
    await world.start()
    result = await world.answer(Allow())
    assert result.outcome is LoopOutcome.SUSPENDED
    seen = rewriter.seen
    result = await world.answer(GiveResult("camp"))
    assert said(result) == "camp"
    assert rewriter.seen == seen
    assert world.began == [(1, []), (1, ["camp"])]
    config = Agent(ScriptedStream([]), tools=[world.climb], plugins=world.plugins).config
    report = await replay(world.store, "r", config)
    assert report.is_identical, report


async def test_an_answer_holds_if_the_process_is_let_go_in_the_second_call() -> None:
    world, token = World(), CancellationToken()
    began: list[str] = []

    @tool(idempotent=True)
    async def book(ctx: ToolContext) -> str:
        """Book a room."""
        if ctx.continued is None:
            raise ToolSuspended("For how many?", continues=True)
        began.append(ctx.continued.result.plain_text)
        if len(began) == 1:
            token.cancel(LET_GO)
            await asyncio.Event().wait()
        return f"for {ctx.continued.result.plain_text}"

    world.climb = book
    await world.agent(call("book")).run("go", identity=RunIdentity.root("r"))
    [request] = waiting_for(world.store, clock=world.clock)
    await decide(world.store, "r", request.request_id, GiveResult("4"), clock=world.clock)
    with pytest.raises(RunLetGo):
        await resume(world.store, "r", world.agent("done").config, signal=token)
    result = await world.go_on()
    assert said(result) == "for 4"
    assert began == ["4", "4"]
