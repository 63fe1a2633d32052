"""Random batches that work, wait, ask and start agents, random decisions, and random crashes."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from clark_agent import (
    AgentContext,
    ExecutionMode,
    LoopConfig,
    LoopOutcome,
    RunIdentity,
    RunResult,
    agent_tool,
    run,
)
from clark_agent.history import repair_history
from clark_agent.replay import replay
from clark_agent.run_log import RunLog, fold, resume, usage_tree
from clark_agent.run_log.records import Record, RequestDecided, ToolStarted
from clark_agent.testing import call
from tests.run_log.stories import Deed, Meddling, Story, after, undated
from tests.run_log.test_waiting import effects, sum_of_open, uncertain
from tests.run_log.waiting_stories import (
    ROOT,
    Gate,
    OrderedStore,
    asking,
    settle,
    store_with,
)

DECISIONS = ("allow", "deny", "arguments", "wrong", "result", "expire")


class Plan(Struct, frozen=True):
    """A run: the calls of each turn, those of its agent, and how they run."""

    turns: list[list[tuple[str, str]]]
    below: list[list[tuple[str, str]]]
    one_by_one: bool
    meddles: bool


def batches(*names: str) -> st.SearchStrategy[list[list[tuple[str, str]]]]:
    calls = st.tuples(st.sampled_from(names), st.sampled_from(DECISIONS))
    return st.lists(st.lists(calls, min_size=1, max_size=3), min_size=1, max_size=2)


PLAIN = ("work", "quick", "again", "pay", "pay", "ask", "event")
plans = st.builds(
    Plan,
    turns=batches(*PLAIN, "helper", "helper"),
    below=batches(*PLAIN),
    one_by_one=st.booleans(),
    meddles=st.booleans(),
)


def begin(plan: Plan) -> Story:
    """A fresh story of a plan."""
    story = Story()
    story.context = AgentContext("You wait.", identity=RunIdentity(ROOT))

    def tools() -> list[Any]:
        return [
            Deed(story, "work", after(3)),
            Deed(story, "quick", "quick"),
            Deed(story, "again", after(2), idempotent=True),
            Deed(story, "pay", after(1)),
            asking(story, expires_in=3600),
            asking(story, "event", event="paid"),
        ]

    gates: list[Any] = [Gate("pay", expires_in=3600)]
    settings: dict[str, Any] = {
        "plugins": [*gates, Meddling()] if plan.meddles else gates,
        "default_execution_mode": ExecutionMode.SEQUENTIAL
        if plan.one_by_one
        else ExecutionMode.PARALLEL,
    }
    top = story.model(*_steps(plan.turns), "Done.")
    below = LoopConfig(
        stream=story.model(*_steps(plan.below), "Helped.", prefix="c"),
        tools=tools(),
        clock=story.clock,
        **settings,
    )
    story.tools = [*tools(), agent_tool("helper", "helps", below)]
    story.settings |= settings
    assert story.models[0] is top
    return story


def _steps(turns: list[list[tuple[str, str]]]) -> list[Any]:
    return [
        [
            call(name, task=f"help {number} {place}")
            if name == "helper"
            else call(name, n=10 * number + place, decide=decision, q=decision)
            for place, (name, decision) in enumerate(calls)
        ]
        for number, calls in enumerate(turns)
    ]


async def go_on(store: OrderedStore, story: Story, *, begins: bool) -> RunResult:
    config = story.config(RunLog(store, mail_every=None))
    async with asyncio.timeout(20):
        if begins:
            result = await run(story.prompts, story.context, config)
        else:
            result = await resume(store, ROOT, config)
        while result.outcome is LoopOutcome.SUSPENDED:
            again = await resume(store, ROOT, config)  # too early: nothing happens
            assert again.waiting == result.waiting
            await settle(store, result, story)
            result = await resume(store, ROOT, config)
    return result


def check(store: OrderedStore, story: Story, result: RunResult, lost: int) -> None:
    """What must hold of a run that has ended, of which so many calls were cut off."""
    assert result.outcome is LoopOutcome.DONE
    assert fold(store.load(ROOT)).messages == list(result.messages)
    assert repair_history(result.messages).changes == ()
    decided: list[str] = []
    for summary in store.runs():
        loaded = store.load(summary.run_id)
        assert loaded.problems == ()
        entries = [record.entry for record in loaded.records]
        decided += [e.request_id for e in entries if isinstance(e, RequestDecided)]
    assert len(decided) == len(set(decided)), "a request was decided twice"
    assert len(uncertain(store)) <= lost
    names = {
        (r.run, r.entry.tool_call_id, r.entry.position): r.entry.tool_name
        for r in store.order
        if isinstance(r.entry, ToolStarted)
    }
    twice = {names[key] for key, count in effects(store).items() if count > 1}
    assert twice <= {"again", "helper"}
    assert usage_tree(store, ROOT).tree_usage == result.tree_usage


@given(plan=plans, cuts=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3))
def test_whatever_waits_and_wherever_it_dies_a_run_comes_to_its_end(
    plan: Plan, cuts: list[float]
) -> None:
    asyncio.run(_live_and_die(plan, cuts))


async def _live_and_die(plan: Plan, cuts: list[float]) -> None:
    story, store = begin(plan), OrderedStore()
    expected = await go_on(store, story, begins=True)
    check(store, story, expected, 0)
    lost = 0
    for cut in cuts:
        records: list[Record] = store.order[: 1 + int(cut * (len(store.order) - 1))]
        lost += sum_of_open(records)
        store, story = store_with(records), begin(plan)
        story.clock.time_ms = max(record.at for record in records)
        result = await go_on(store, story, begins=False)
        check(store, story, result, lost)
        if not uncertain(store):
            assert undated(result.messages) == undated(expected.messages)
    replayed = begin(plan)
    async with asyncio.timeout(20):
        report = await replay(store_with(store.order), ROOT, replayed.config())
    assert str(report.drift) == "None"
    assert not replayed.ran
