"""Every fault of `tests.model.faults.runs` changes what a run does, and leaves no trace."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

import clark_agent as ca
from clark_agent import events as ev
from clark_agent.testing import RecordingSink, ScriptedStream, Step, call
from tests.engine.support import CONTEXT, Stubborn, Waiting, Work, hurry, let_others_run, paid
from tests.model.faults import FAMILIES, PROMISES, Story, Verdict, check, promises_of
from tests.model.faults.base import SEAMS, SeamGoneError, broken
from tests.model.mutants import TESTS, judge
from tests.model.scenarios import SCENARIOS
from tests.model.world import Cancel, Life, Scenario, Steer, live

# --- short stories, each with another outcome under its fault -------------------------------------


def life(
    scenario: str | Scenario, cancel: Cancel | None = None, *, steered: Steer | None = None
) -> Story:
    """One life in `tests.model.world`.

    Its first suspension point is the poll for steering, its second the model, its third the tools.
    """

    async def story() -> object:
        told = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
        told = told if steered is None else replace(told, steers=(steered,))
        return outline(await live(told, cancel, patience=60))

    return story


def outline(life: Life) -> object:
    """How the run ended, why answers were discarded, and the details of tool results."""
    discarded = [event.reason for event in life.sink.of(ev.MessageDiscarded)]
    details = [event.result.details for event in life.sink.of(ev.ToolExecutionEnd)]
    return type(life.outcome).__name__, discarded, details


async def run(*script: Step, tools: Any = (), **settings: Any) -> ca.RunResult:
    config = ca.LoopConfig(stream=ScriptedStream(script), tools=tools, **settings)
    return await ca.run("go", CONTEXT, config)


async def two_prompts() -> object:
    sink, token = RecordingSink(), ca.CancellationToken()

    async def listen(event: ca.AgentEvent) -> None:
        sink(event)
        if isinstance(event, ev.MessageEnd):
            token.cancel()
            await let_others_run()

    config = ca.LoopConfig(stream=ScriptedStream(["ok"]), event_sink=listen)
    with suppress(ca.RunAborted):
        await ca.run([ca.UserMessage("one"), ca.UserMessage("two")], CONTEXT, config, token)
    return sink.types


async def a_deaf_tool() -> object:
    deaf = Stubborn()
    tool = Work("deaf", deaf, timeout=1)
    task = asyncio.create_task(run(call("deaf"), "ok", tools=[tool], cancel_grace=1))
    await deaf.started.wait()
    for _ in range(3):  # its time, the time to end, and the rest of the grace
        hurry()
        await let_others_run()
    deaf.release.set()
    result = await task
    await deaf.ended.wait()
    return [m.plain_text for m in result.messages if isinstance(m, ca.ToolResultMessage)]


async def a_listener_that_works() -> object:
    channel, undisturbed = ca.ChannelSteering(), list[bool]()

    async def listen(event: ca.AgentEvent) -> None:
        if isinstance(event, ev.MessageUpdate) and not undisturbed:
            undisturbed.append(False)
            _ = channel.handle.steer("wait", "now")
            await let_others_run()
            undisturbed[:] = [True]

    await run("one two", "ok", plugins=[channel], event_sink=listen)
    return undisturbed


async def a_child() -> object:
    config = ca.LoopConfig(
        stream=ScriptedStream([paid(1, "", call("work")), paid(2, "done")]), tools=[Work()]
    )
    result = await run(
        paid(4, "", call("child", task="do it")),
        paid(8, "ok"),
        tools=[ca.agent_tool("child", "a child", config)],
        budget=ca.Budget(turns=100),
    )
    assert result.spent is not None
    return result.spent.turns, result.tree_usage


async def a_budget_that_runs_out() -> object:
    result = await run(call("work"), "ok", tools=[Work()], budget=ca.Budget(turns=2))
    return [type(message) for message in result.messages]


async def a_child_that_is_stopped() -> object:
    waiting = Waiting()
    config = ca.LoopConfig(
        stream=ScriptedStream([call("wait"), "ok"]), tools=[Work("wait", waiting)]
    )
    child = ca.agent_tool("child", "a child", config)
    task = asyncio.create_task(run(call("child", task="wait"), tools=[child]))
    await waiting.started.wait()
    task.cancel()
    await let_others_run()
    stopped_at_once = waiting.cancelled
    for _ in range(3):
        hurry()
        await let_others_run()
    await asyncio.wait([task])
    return stopped_at_once


STORIES: dict[str, Story] = {
    "a turn that fails has no turn_end": life("one fast tool", Cancel(2, "token")),
    "a run that fails has no agent_end": life("one fast tool", Cancel(2, "token")),
    "an answer that is cut off is not discarded": life("one fast tool", Cancel(2, "token")),
    "an interrupted batch drops its results": life("two tools at once", Cancel(3, "task", 1)),
    "calls of an answer that no batch has taken up stay unanswered": life(
        "a stream that is error_message"
    ),
    "messages that were not announced yet are forgotten": two_prompts,
    "tasks of an interrupted batch are left running": life(
        "two tools at once", Cancel(3, "task", 1)
    ),
    "a tool that ignores everything is waited for": a_deaf_tool,
    "timers of a call stay behind": life(
        Scenario((("slow",), "ok"), settings={"tool_timeout": 60.0})
    ),
    "a token's cancellation is left on the task": life("one fast tool", Cancel(2, "token")),
    "the model's stream is not closed": life("one fast tool"),
    "progress after the return is told": life("a tool that keeps its handle"),
    "a truncated call is run": life("a stream that is truncated"),
    "a cancelled task ends as aborted": life("one fast tool", Cancel(2, "task")),
    "state is shared between runs": life("steering at every poll"),
    "what waits when the run ends is not handed back": life(
        "one fast tool", Cancel(2, "token"), steered=Steer(1, "follow_up")
    ),
    "a receipt names the turn before": life("one fast tool", steered=Steer(2, "after_batch")),
    "what is sent after the run waits for the next": life(
        "one fast tool", steered=Steer(2, "after_batch")
    ),
    "steering breaks nothing off": life("one fast tool", steered=Steer(2, "now")),
    "steering holds no call back": life("one by one", steered=Steer(3, "before_next_tool")),
    "steering cancels a listener that works": a_listener_that_works,
    "breaking off an answer leaves a cancellation on the task": life(
        "one fast tool", steered=Steer(2, "now")
    ),
    "a child spends what it likes": a_child,
    "a child's tokens are not added up": a_child,
    "nobody is told that the budget is nearly spent": a_budget_that_runs_out,
    "a child goes on when its call is stopped": a_child_that_is_stopped,
}


@pytest.mark.parametrize("promise", promises_of("runs"))
def test_a_fault_changes_what_a_run_does(promise: str) -> None:
    check(promise, STORIES[promise])


# --- seams and verdicts ---------------------------------------------------------------------------


def test_every_family_of_faults_has_tests_that_may_notice() -> None:
    assert {promise.family for promise in PROMISES.values()} == set(FAMILIES) == set(TESTS)


@pytest.mark.parametrize(
    "place", ["clark_agent.gone:run", "clark_agent:gone", "clark_agent:Gone.run"]
)
def test_a_seam_that_is_gone_is_an_error(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEAMS, "run", place)
    with (
        pytest.raises(SeamGoneError, match="update SEAMS"),
        broken("a cancelled task ends as aborted"),
    ):
        pass


@pytest.mark.parametrize(
    ("verdict", "word"),
    [
        (Verdict(fired=2, test="test_it", fired_in_test=1), "caught"),
        (Verdict(fired=2, test="test_it", fired_in_test=1, hung=True), "caught"),
        (Verdict(fired=2), "SURVIVES"),
        (Verdict(fired=0), "NEVER FIRED"),
        (Verdict(fired=2, test="test_it", fired_in_test=0), "NEVER FIRED"),
    ],
)
def test_a_test_that_fails_counts_if_the_fault_has_fired_in_it(verdict: Verdict, word: str) -> None:
    assert judge(verdict).word == word
