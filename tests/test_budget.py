"""Budgets: what a run and those below it may spend, the word before the end, and the end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentEvent,
    AgentMessage,
    AgentTool,
    AssistantMessage,
    Budget,
    CancellationToken,
    ChannelSteering,
    ConfigError,
    FunctionPlugin,
    LoopConfig,
    LoopError,
    LoopOutcome,
    MaxTokensRecovery,
    Price,
    RunAborted,
    RunResult,
    StopReason,
    StreamError,
    StreamFn,
    SystemMessage,
    ToolCall,
    ToolContext,
    ToolResult,
    Usage,
    UserMessage,
    agent_tool,
    finish_tool,
    run,
    run_child,
)
from clark_agent import events as ev
from clark_agent.budget import BudgetLimit, Spent
from clark_agent.history import repair_history
from clark_agent.protocol import BUDGET_WRAP_UP, WRAP_UP
from clark_agent.stream import Chunk, Done, Start, StreamEvent, StreamRequest, TextChunk
from clark_agent.testing import (
    FakeClock,
    RecordingSink,
    ScriptedStream,
    Step,
    call,
    check_events,
    fold_events,
    say,
)
from tests.engine.support import (
    CONTEXT,
    PLACEHOLDER,
    Waiting,
    Work,
    completed,
    failed,
    failing,
    for_good,
    hurry,
    observe,
    observed_run,
    outline,
    paid,
    results,
    texts,
    truncated,
)
from tests.event_loops import timers
from tests.sizes import EXAMPLES

MODEL = "m"
PRICES = {MODEL: Price(input=1_000_000, output=2_000_000)}
"""A token costs 1, or 2 when it is written."""


def working(tokens: int = 10) -> AssistantMessage:
    """A turn of work."""
    return paid(tokens, "", call("work"))


def notes(messages: Iterable[AgentMessage]) -> list[str]:
    """What the runtime has said."""
    return [message.content for message in messages if isinstance(message, SystemMessage)]


def words(limit: BudgetLimit) -> str:
    return BUDGET_WRAP_UP[limit]


LIMITS = list(BudgetLimit)


def budget(limit: BudgetLimit, most: float, **more: Any) -> Budget:
    """One limit of so much."""
    value: Any = most if limit in (BudgetLimit.COST, BudgetLimit.SECONDS) else int(most)
    return Budget(**{str(limit): value}, prices=PRICES, **more)


class Spender:
    """A model and a tool with which each turn of work costs one tenth of every limit of 100."""

    def __init__(self, turns_of_work: int | None = None) -> None:
        self.clock = FakeClock()
        self.asked: list[StreamRequest] = []
        self.turns_of_work = turns_of_work
        self.work = Work(does=self.pass_time)

    async def pass_time(self, args: Any, ctx: ToolContext) -> str:
        self.clock.time_ms += 10_000
        return "worked"

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.asked.append(request)
        number = len(self.asked)
        done = self.turns_of_work is not None and number > self.turns_of_work
        yield Start(PLACEHOLDER)
        yield Done(paid(10, "done") if done else paid(10, "", call("work", call_id=f"c{number}")))

    def settings(self, limits: Budget) -> dict[str, Any]:
        return {"budget": limits, "clock": self.clock, "model_id": MODEL}


# --- unlimited, and nothing ---------------------------------------------------------------------


async def test_without_a_budget_nothing_is_counted() -> None:
    result, _ = await completed([working(), "ok"], Work())
    assert (result.spent, result.limit) == (None, None)


@pytest.mark.parametrize("limits", [Budget(), Budget(prices=PRICES, wrap_up_at=None)])
async def test_none_is_unlimited(limits: Budget) -> None:
    spender = Spender(turns_of_work=50)
    result, _ = await completed(spender, spender.work, **spender.settings(limits))
    assert (result.outcome, result.limit) == (LoopOutcome.DONE, None)
    assert notes(result.messages) == []
    assert result.spent is not None
    assert (result.spent.turns, result.spent.tokens, result.spent.seconds) == (51, 510, 500.0)
    assert result.spent.cost == (510 if limits.prices else 0)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("wrap_up_at", [0.8, 1, None])
async def test_zero_is_nothing_at_all(limit: BudgetLimit, wrap_up_at: float | None) -> None:
    model = ScriptedStream(["unheard"])
    limits = budget(limit, 0, wrap_up_at=wrap_up_at)
    result, sink = await completed(model, budget=limits, model_id=MODEL)
    assert model.requests == []
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, limit)
    assert not result.outcome.is_complete
    assert outline(result.messages) == ["user: go"]
    assert result.text == ""
    assert sink.types == [
        "agent_start",
        "turn_start",
        "message_start",
        "message_end",
        "turn_end",
        "agent_end",
    ]
    assert result.spent is not None
    assert result.spent == Spent(seconds=result.spent.seconds)


@pytest.mark.parametrize("limit", LIMITS)
async def test_with_nothing_to_spend_a_context_is_not_continued(limit: BudgetLimit) -> None:
    model = ScriptedStream(["unheard"])
    context = AgentContext("", (UserMessage("go"),))
    result, _ = await completed(
        model, prompts=None, context=context, budget=budget(limit, 0), model_id=MODEL
    )
    assert (result.messages, model.requests) == ((), [])
    assert result.outcome is LoopOutcome.OUT_OF_BUDGET


async def test_with_nothing_to_spend_steering_comes_too_late() -> None:
    steering = ChannelSteering()
    steered = steering.handle.steer("Look here.")
    followed = steering.handle.follow_up("And then?")
    result, _ = await completed(["unheard"], plugins=[steering], budget=Budget(turns=0))
    assert [getattr(m, "plain_text", "") for m in result.undelivered] == ["Look here."]
    assert outline(result.messages) == ["user: go", "user: And then?"]
    assert (steered.status, followed.status) == ("expired", "delivered")


# --- the word before the end --------------------------------------------------------------------


@pytest.mark.parametrize("limit", LIMITS)
async def test_the_model_is_told_once_and_may_close(limit: BudgetLimit) -> None:
    """At four fifths of the limit, which are eight turns here."""
    spender = Spender(turns_of_work=8)
    most = 10 if limit is BudgetLimit.TURNS else 100
    result, _ = await completed(
        spender, spender.work, **spender.settings(budget(limit, most, message=None))
    )
    assert notes(result.messages) == [words(limit)]
    assert len(spender.asked) == 9
    assert notes(spender.asked[-1].messages) == [words(limit)]
    assert notes(spender.asked[-2].messages) == []
    assert (result.outcome, result.limit) == (LoopOutcome.WRAPPED_UP, None)
    assert result.text == "done"


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_model_that_goes_on_is_stopped_at_the_limit(limit: BudgetLimit) -> None:
    spender = Spender()
    most = 10 if limit is BudgetLimit.TURNS else 100
    result, _ = await completed(spender, spender.work, **spender.settings(budget(limit, most)))
    assert notes(result.messages) == [words(limit)]
    assert len(spender.asked) == 10
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, limit)
    assert len(results(result)) == 10, "the calls of the last turn are run"


@pytest.mark.parametrize("limit", LIMITS)
async def test_the_word_comes_at_the_share_that_it_is_asked_for(limit: BudgetLimit) -> None:
    spender = Spender(turns_of_work=3)
    most = 10 if limit is BudgetLimit.TURNS else 100
    limits = budget(limit, most, wrap_up_at=0.25)
    result, _ = await completed(spender, spender.work, **spender.settings(limits))
    assert [len(notes(request.messages)) for request in spender.asked] == [0, 0, 0, 1]
    assert result.outcome is LoopOutcome.WRAPPED_UP


@pytest.mark.parametrize("limit", LIMITS)
async def test_the_word_may_be_the_hosts_own(limit: BudgetLimit) -> None:
    spender = Spender(turns_of_work=8)
    most = 10 if limit is BudgetLimit.TURNS else 100
    limits = budget(limit, most, message="Schluss jetzt.")
    result, _ = await completed(spender, spender.work, **spender.settings(limits))
    told = [message for message in result.messages if isinstance(message, SystemMessage)]
    assert told == [SystemMessage("Schluss jetzt.", timestamp=told[0].timestamp)]
    assert told[0].timestamp == 1_000_000 + 80_000


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_host_may_do_without_the_word(limit: BudgetLimit) -> None:
    spender = Spender()
    most = 10 if limit is BudgetLimit.TURNS else 100
    limits = budget(limit, most, wrap_up_at=None)
    result, _ = await completed(spender, spender.work, **spender.settings(limits))
    assert notes(result.messages) == []
    assert len(spender.asked) == 10
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, limit)


@given(st.integers(2, 30), st.floats(0.01, 1))
def test_the_word_leaves_a_turn_to_act_on_it(turns: int, share: float) -> None:
    async def life() -> None:
        spender = Spender()
        limits = Budget(turns=turns, wrap_up_at=share)
        config = LoopConfig(stream=spender, tools=[spender.work], budget=limits)
        result = await run("go", CONTEXT, config)
        told = [bool(notes(request.messages)) for request in spender.asked]
        assert len(told) == turns
        assert told.index(True) == max(1, min(math.ceil(turns * share), turns - 1))
        assert notes(result.messages) == [WRAP_UP]

    asyncio.run(life())


async def test_one_turn_is_too_short_for_a_word() -> None:
    result, _ = await completed([working(), "unheard"], Work(), budget=Budget(turns=1))
    assert notes(result.messages) == []
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, BudgetLimit.TURNS)


async def test_of_two_limits_the_nearer_is_told_of_and_only_that() -> None:
    spender = Spender()
    limits = Budget(turns=7, tokens=50)
    result, _ = await completed(spender, spender.work, **spender.settings(limits))
    assert notes(result.messages) == [words(BudgetLimit.TOKENS)]
    assert result.limit is BudgetLimit.TOKENS
    assert len(spender.asked) == 5


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_model_that_has_stopped_is_not_made_to_go_on(limit: BudgetLimit) -> None:
    spender = Spender(turns_of_work=8)
    most = 10 if limit is BudgetLimit.TURNS else 95
    result, _ = await completed(
        spender, spender.work, **spender.settings(budget(limit, most, wrap_up_at=0.89))
    )
    assert len(spender.asked) == 9
    assert (result.outcome, notes(result.messages)) == (LoopOutcome.DONE, [])


async def test_a_model_that_stops_with_its_last_turn_is_done() -> None:
    result, _ = await completed([paid(10, "ok")], budget=Budget(turns=1, tokens=10))
    assert (result.outcome, result.limit) == (LoopOutcome.DONE, None)


async def test_a_vote_to_end_needs_no_word() -> None:
    spender = Spender()
    end = Work("work", ToolResult.terminal("bye"))
    result, _ = await completed(spender, end, budget=Budget(tokens=11))
    assert (result.outcome, notes(result.messages)) == (LoopOutcome.DONE, [])


async def test_a_value_after_the_word_is_a_clean_close() -> None:
    result, _ = await completed(
        [working(8), paid(1, "", call("finish", answer=7))],
        Work(),
        finish_tool(int),
        budget=Budget(tokens=10),
    )
    assert (result.outcome, result.output) == (LoopOutcome.WRAPPED_UP, 7)


def follow_up(*texts: str) -> FunctionPlugin:
    """Something more each time that the model has stopped."""
    given = iter(texts)
    return FunctionPlugin("follow_up", lambda: [UserMessage(t) for t in [next(given, "")] if t])


async def test_a_follow_up_near_the_limit_comes_with_the_word() -> None:
    model = ScriptedStream([paid(8, "ok"), paid(1, "and that is all"), "unheard"])
    result, _ = await completed(model, plugins=[follow_up("more?")], budget=Budget(tokens=10))
    assert outline(model.requests[1].messages)[2:] == [
        "user: more?",
        f"system: {words(BudgetLimit.TOKENS)}",
    ]
    assert result.outcome is LoopOutcome.WRAPPED_UP


async def test_the_last_turn_is_told_of_when_a_follow_up_begins_it() -> None:
    result, _ = await completed(
        ["ok", working(), "unheard"], Work(), plugins=[follow_up("more?")], budget=Budget(turns=2)
    )
    assert notes(result.messages) == [words(BudgetLimit.TURNS)]
    assert result.outcome is LoopOutcome.OUT_OF_BUDGET


async def test_a_follow_up_that_no_turn_is_left_for_stays_in_the_transcript() -> None:
    result, _ = await completed(
        [paid(10, "ok"), "unheard"], plugins=[follow_up("more?")], budget=Budget(tokens=10)
    )
    assert outline(result.messages) == ["user: go", "assistant: ok", "user: more?"]
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, BudgetLimit.TOKENS)


async def test_steering_near_the_limit_comes_before_the_word() -> None:
    steering = ChannelSteering()

    async def steer(args: Any, ctx: ToolContext) -> str:
        _ = steering.handle.steer("Mind the step.")
        return "worked"

    model = ScriptedStream([working(8), paid(1, "ok")])
    await completed(model, Work(does=steer), plugins=[steering], budget=Budget(tokens=10))
    assert outline(model.requests[1].messages)[-2:] == [
        "user: Mind the step.",
        f"system: {words(BudgetLimit.TOKENS)}",
    ]


# --- time ---------------------------------------------------------------------------------------


async def test_when_the_time_is_over_an_answer_that_hangs_is_broken_off() -> None:
    closed = False

    async def hangs(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        nonlocal closed
        try:
            yield Start(PLACEHOLDER)
            yield Chunk(TextChunk("Well, "))
            await for_good()
        finally:
            closed = True

    result, sink = await completed(hangs, budget=Budget(seconds=10))
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, BudgetLimit.SECONDS)
    assert outline(result.messages) == ["user: go"]
    (discarded,) = sink.of(ev.MessageDiscarded)
    assert discarded.reason == "out_of_time"
    (end,) = sink.of(ev.TurnEnd)
    assert isinstance(end.message, AssistantMessage)
    assert end.message.plain_text == "Well, "
    assert closed


async def test_when_the_time_is_over_a_model_that_says_nothing_is_left() -> None:
    async def silent(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        await for_good()
        yield Start(PLACEHOLDER)

    result, _ = await completed(silent, budget=Budget(seconds=10))
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, BudgetLimit.SECONDS)


@pytest.mark.parametrize("count", [1, 3])
async def test_when_the_time_is_over_tools_that_hang_are_stopped(count: int) -> None:
    waiting = [Waiting() for _ in range(count)]

    async def begin(args: Any, ctx: ToolContext) -> ToolResult:
        hurry()
        number: int = args["n"]
        return await waiting[number](args, ctx)

    tools = [Work(f"wait{n}", begin) for n in range(count)]
    calls = [call(tool.name, n=n) for n, tool in enumerate(tools)]
    result, _ = await completed([calls, "unheard"], *tools, budget=Budget(seconds=10))
    assert all(does.cancelled for does in waiting)
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, BudgetLimit.SECONDS)
    assert [answer.details["reason"] for answer in results(result)] == ["out_of_time"] * count
    assert all(answer.is_error for answer in results(result))


async def test_when_the_time_is_over_no_further_call_of_the_batch_is_run() -> None:
    after = Work("after")
    result, _ = await completed(
        [[call("wait"), call("after")], "unheard"],
        Work("wait", lambda args, ctx: for_good(), requires_exclusive_sandbox=True),
        after,
        budget=Budget(seconds=10),
    )
    assert after.calls == []
    assert [answer.details["reason"] for answer in results(result)] == ["out_of_time"] * 2
    assert texts(result)[1] == "Not executed: the time for this run is over."


async def test_a_tool_that_knows_its_signal_may_end_in_its_own_words() -> None:
    async def careful(args: Any, ctx: ToolContext) -> str:
        hurry()
        await ctx.signal.wait()
        return "half of it"

    result, _ = await completed([call("work")], Work(does=careful), budget=Budget(seconds=10))
    assert texts(result) == ["half of it"]
    assert result.outcome is LoopOutcome.OUT_OF_BUDGET


async def test_time_that_is_not_used_is_given_back() -> None:
    await completed(["ok"], budget=Budget(seconds=60))
    await failed(StreamError, [failing("fatal")], budget=Budget(seconds=60))
    assert timers() == []


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_run_that_ran_out_can_be_continued(limit: BudgetLimit) -> None:
    spender = Spender()
    most = 2 if limit is BudgetLimit.TURNS else 20
    first, _ = await completed(spender, spender.work, **spender.settings(budget(limit, most)))
    assert first.outcome is LoopOutcome.OUT_OF_BUDGET
    spender.turns_of_work = len(spender.asked)
    second, _ = await completed(
        spender,
        spender.work,
        prompts=None,
        context=CONTEXT.extend(first),
        **spender.settings(budget(limit, most)),
    )
    assert (second.outcome, second.text) == (LoopOutcome.DONE, "done")


async def test_a_run_that_fails_in_time_fails() -> None:
    error, _ = await failed(StreamError, [failing("fatal", "no power")], budget=Budget(seconds=9))
    assert "no power" in str(error)


# --- tokens and cost ----------------------------------------------------------------------------


class PerMessage:
    """One token a message."""

    def estimate_message(self, message: AgentMessage) -> int:
        return 1


async def test_tokens_that_nobody_reports_are_estimated() -> None:
    """Those of the whole transcript, which the model reads, and of its answer."""
    result, _ = await completed(
        [call("work"), call("work"), "ok"],
        Work(),
        token_estimator=PerMessage(),
        budget=Budget(tokens=100),
    )
    assert result.spent is not None
    assert result.spent.tokens == (1 + 1) + (3 + 1) + (5 + 1)
    assert result.usage == Usage(), "an estimate is no report"


async def test_estimated_tokens_reach_a_limit_like_others() -> None:
    result, _ = await completed(
        [call("work"), call("work"), call("work"), "unheard"],
        Work(),
        token_estimator=PerMessage(),
        budget=Budget(tokens=6, wrap_up_at=None),
    )
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, BudgetLimit.TOKENS)
    assert len(results(result)) == 2


async def test_a_report_counts_for_more_than_an_estimate() -> None:
    result, _ = await completed([working(1), "ok"], Work(), budget=Budget(tokens=10**6))
    assert result.spent is not None
    assert 1 < result.spent.tokens < 1000
    assert result.usage == Usage(1)


async def test_all_kinds_of_tokens_count() -> None:
    usage = Usage(1, 20, 300, 4000)
    result, _ = await completed([replace(say("ok"), usage=usage)], budget=Budget(tokens=10**6))
    assert result.spent is not None
    assert result.spent.tokens == 4321


@pytest.mark.parametrize("limit", [BudgetLimit.TOKENS, BudgetLimit.COST])
async def test_an_answer_that_is_asked_for_again_counts_too(limit: BudgetLimit) -> None:
    cut = replace(truncated(), usage=Usage(10))
    result, sink = await completed(
        [cut, cut, paid(10, "whole")],
        max_output_tokens=5,
        max_output_tokens_recovery=MaxTokensRecovery(),
        budget=budget(limit, 1000),
        model_id=MODEL,
    )
    assert len(sink.of(ev.MessageDiscarded)) == 2
    assert result.spent is not None
    assert (result.spent.turns, result.spent.tokens, result.spent.cost) == (1, 30, 30.0)
    assert result.usage == Usage(30)


async def test_an_attempt_that_failed_counts_too() -> None:
    empty = failing("empty", "nothing came", "a word or two")
    result, _ = await completed(
        [empty, paid(10, "ok")], budget=Budget(tokens=1000), token_estimator=PerMessage()
    )
    assert result.spent is not None
    assert result.spent.tokens == (1 + 1) + 10


@pytest.mark.parametrize("limit", [BudgetLimit.TOKENS, BudgetLimit.COST])
async def test_what_is_cut_off_at_the_limit_is_not_asked_for_again(limit: BudgetLimit) -> None:
    model = ScriptedStream([replace(truncated(), usage=Usage(10)), paid(10, "unheard")])
    await observed_run(
        model,
        max_output_tokens=5,
        max_output_tokens_recovery=MaxTokensRecovery(),
        budget=budget(limit, 10),
        model_id=MODEL,
    )
    assert len(model.requests) == 1


def test_cached_tokens_have_prices_of_their_own() -> None:
    usage = Usage(1_000, 2_000, 3_000, 4_000)
    plain = Price(input=10, output=100)
    assert plain.of(usage) == pytest.approx((8_000 * 10 + 2_000 * 100) / 1e6)
    cached = Price(input=10, output=100, cache_read=1, cache_write=12.5)
    assert cached.of(usage) == pytest.approx(
        (1_000 * 10 + 2_000 * 100 + 3_000 * 12.5 + 4_000 * 1) / 1e6
    )
    free = Price(input=10, output=100, cache_read=0, cache_write=0)
    assert free.of(usage) == pytest.approx((1_000 * 10 + 2_000 * 100) / 1e6)


amounts = st.integers(0, 10**7)
usages = st.builds(Usage, amounts, amounts, amounts, amounts)
prices = st.builds(
    Price,
    input=st.floats(0, 1000),
    output=st.floats(0, 1000),
    cache_read=st.none() | st.floats(0, 1000),
    cache_write=st.none() | st.floats(0, 1000),
)


@given(st.lists(usages, min_size=1, max_size=8), prices)
def test_the_cost_is_that_of_all_answers(answers: list[Usage], price: Price) -> None:
    script: list[Step] = [replace(say("", call("work")), usage=usage) for usage in answers[:-1]]
    script.append(replace(say("ok"), usage=answers[-1]))
    config = LoopConfig(
        stream=ScriptedStream(script),
        tools=[Work()],
        model_id=MODEL,
        budget=Budget(prices={MODEL: price, "other": Price(input=1, output=1)}),
    )
    result = asyncio.run(run("go", CONTEXT, config))
    assert result.spent is not None
    read = price.input if price.cache_read is None else price.cache_read
    write = price.input if price.cache_write is None else price.cache_write
    expected = math.fsum(
        part / 1e6
        for usage in answers
        for part in (
            usage.input_tokens * price.input,
            usage.output_tokens * price.output,
            usage.cache_read_input_tokens * read,
            usage.cache_creation_input_tokens * write,
        )
    )
    assert result.spent.cost == pytest.approx(expected, rel=1e-12)
    assert result.spent.turns == len(answers)


async def test_prices_without_a_limit_only_tell_the_cost() -> None:
    limits = Budget(prices=PRICES)
    result, _ = await completed([paid(7, "ok")], budget=limits, model_id=MODEL)
    assert result.spent is not None
    assert result.spent.cost == 7.0
    result, _ = await completed([paid(7, "ok")], budget=limits, model_id="another")
    assert result.spent is not None
    assert result.spent.cost == 0.0


# --- what makes no sense ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"turns": -1}, "turns must be at least 0"),
        ({"turns": 1.5}, "turns must be a whole number"),
        ({"turns": True}, "turns must be a whole number"),
        ({"turns": "3"}, "turns must be a whole number"),
        ({"tokens": -1}, "tokens must be at least 0"),
        ({"tokens": 10.0}, "tokens must be a whole number"),
        ({"cost": -0.01, "prices": PRICES}, "cost must be at least 0"),
        ({"cost": math.nan, "prices": PRICES}, "cost must be at least 0"),
        ({"cost": "1", "prices": PRICES}, "cost must be a number"),
        ({"seconds": -1}, "seconds must be at least 0"),
        ({"seconds": math.nan}, "seconds must be at least 0"),
        ({"seconds": "1"}, "seconds must be a number"),
        ({"seconds": False}, "seconds must be a number"),
        ({"wrap_up_at": 0}, "wrap_up_at must be above 0"),
        ({"wrap_up_at": 1.01}, "wrap_up_at must be above 0"),
        ({"wrap_up_at": math.nan}, "wrap_up_at must be above 0"),
        ({"wrap_up_at": True}, "wrap_up_at must be above 0"),
        ({"wrap_up_at": "0.5"}, "wrap_up_at must be above 0"),
        ({"cost": 1.0, "prices": {MODEL: 3}}, "price"),
        ({"cost": 1.0, "prices": [MODEL]}, "price"),
        ({"message": 3}, "message"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Budget(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"input": -1, "output": 1},
        {"input": 1, "output": -1},
        {"input": math.nan, "output": 1},
        {"input": 1, "output": 1, "cache_read": -1},
        {"input": 1, "output": 1, "cache_write": math.nan},
        {"input": "1", "output": 1},
    ],
)
def test_a_price_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Price(**settings)


@pytest.mark.parametrize("given", [3, {"turns": 3}, "turns=3"])
def test_a_config_takes_a_budget_or_none(given: Any) -> None:
    with pytest.raises(ConfigError, match="must be a Budget"):
        LoopConfig(stream=ScriptedStream([]), budget=given)


def test_a_limit_on_cost_needs_to_know_the_model() -> None:
    limits = Budget(cost=1, prices=PRICES)
    with pytest.raises(ConfigError, match="set model_id"):
        LoopConfig(stream=ScriptedStream([]), budget=limits)
    with pytest.raises(ConfigError, match="no price for the model 'other': set "):
        LoopConfig(stream=ScriptedStream([]), budget=limits, model_id="other")
    config = LoopConfig(stream=ScriptedStream([]), budget=limits, model_id=MODEL)
    with pytest.raises(ConfigError, match="no price"):
        config.replace(model_id="other")
    with pytest.raises(ConfigError, match="no price"):
        config.child(model_id="other")


def test_a_budget_is_a_value() -> None:
    assert Budget(turns=3) == Budget(turns=3)
    with pytest.raises(AttributeError):
        Budget(turns=3).turns = 4  # type: ignore[misc]


# --- many runs ----------------------------------------------------------------------------------


async def test_every_run_has_the_whole_budget() -> None:
    limits = Budget(turns=3, tokens=100)
    config = LoopConfig(stream=ScriptedStream([]), tools=[Work()], budget=limits)

    async def one(number: int) -> RunResult:
        model = ScriptedStream([working(number)], at_end="repeat")
        return await run("go", CONTEXT, config.replace(stream=model))

    for number, result in enumerate(await asyncio.gather(*[one(n) for n in range(30)])):
        assert result.spent is not None
        assert (result.spent.turns, result.spent.tokens) == (3, 3 * number)
        assert result.limit is BudgetLimit.TURNS


async def test_one_config_serves_run_after_run() -> None:
    model = ScriptedStream([working(5)], at_end="repeat")
    config = LoopConfig(stream=model, tools=[Work()], budget=Budget(tokens=10, wrap_up_at=None))
    for _ in range(3):
        result, _ = await observe(config)
        assert isinstance(result, RunResult)
        assert result.spent is not None
        assert result.spent.tokens == 10
    assert len(model.requests) == 6


# --- beside the cap on turns --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "turns", "outcome", "asked"),
    [
        (3, 5, LoopOutcome.HIT_MAX_ITERATIONS, 3),
        (3, 3, LoopOutcome.HIT_MAX_ITERATIONS, 3),
        (5, 3, LoopOutcome.OUT_OF_BUDGET, 3),
        (3, 0, LoopOutcome.OUT_OF_BUDGET, 0),
    ],
)
async def test_the_nearer_of_cap_and_budget_ends_the_run(
    cap: int, turns: int, outcome: LoopOutcome, asked: int
) -> None:
    model = ScriptedStream([working()], at_end="repeat")
    result, _ = await completed(model, Work(), max_iterations=cap, budget=Budget(turns=turns))
    assert result.outcome is outcome
    assert result.limit == (BudgetLimit.TURNS if outcome is LoopOutcome.OUT_OF_BUDGET else None)
    assert len(model.requests) == asked


async def test_cap_and_budget_each_have_their_word() -> None:
    """The cap of eight with a grace of five after the third turn, the tokens after the sixth."""
    model = ScriptedStream([*[working(10)] * 6, "ok"])
    result, _ = await completed(
        model, Work(), max_iterations=8, grace_iterations=5, budget=Budget(tokens=75)
    )
    told = [len(notes(request.messages)) for request in model.requests]
    assert told == [0, 0, 0, 1, 1, 1, 2]
    assert notes(result.messages) == [WRAP_UP, words(BudgetLimit.TOKENS)]
    assert result.outcome is LoopOutcome.WRAPPED_UP


async def test_the_word_of_the_cap_alone_is_a_warning_too() -> None:
    result, _ = await completed(
        [working(), "ok"], Work(), max_iterations=2, grace_iterations=1, budget=Budget(turns=9)
    )
    assert notes(result.messages) == [WRAP_UP]
    assert result.outcome is LoopOutcome.WRAPPED_UP


async def test_budget_and_empty_outcomes_do_not_mix() -> None:
    result, _ = await completed(
        ["ok"], empty_outcome_retry_budget=1, plugins=[follow_up("more?")], budget=Budget(turns=1)
    )
    assert result.outcome is LoopOutcome.OUT_OF_BUDGET


# --- trees --------------------------------------------------------------------------------------


def agent(
    name: str, model: StreamFn | Iterable[Step], *tools: AgentTool, **settings: Any
) -> AgentTool:
    stream = model if callable(model) else ScriptedStream(model)
    settings.setdefault("model_id", MODEL)
    return agent_tool(
        name, f"the {name}", LoopConfig(stream=stream, tools=tools, **settings), max_depth=5
    )


def ask(name: str) -> ToolCall:
    return call(name, task=f"{name}, please")


def runs_of(events: Iterable[AgentEvent]) -> dict[str, list[AgentEvent]]:
    """The events of each run by the task that it was given."""
    runs: dict[str, list[AgentEvent]] = {"": []}
    for event in events:
        if isinstance(event, ev.ChildRunEvent):
            runs.setdefault(event.identity.run_id, []).append(event.event)
        else:
            runs[""].append(event)
    named: dict[str, list[AgentEvent]] = {}
    for told in runs.values():
        check_events(told)
        messages = fold_events(told)
        assert repair_history(messages).changes == ()
        name = getattr(messages[0], "plain_text", "").partition(",")[0]
        named[name if name not in named else f"{name} {len(named)}"] = told
    return named


def told_by_run(events: Iterable[AgentEvent]) -> dict[str, list[str]]:
    return {name: notes(fold_events(told)) for name, told in runs_of(events).items()}


def sums(events: Iterable[AgentEvent]) -> tuple[int, int]:
    """The turns and tokens of all runs together."""
    runs = runs_of(events).values()
    turns = sum(isinstance(event, ev.ProviderRequestPrepared) for told in runs for event in told)
    tokens = sum(
        event.message.usage.input_tokens
        for told in runs
        for event in told
        if isinstance(event, ev.MessageEnd)
        and isinstance(event.message, AssistantMessage)
        and event.message.usage is not None
    )
    return turns, tokens


class Growing:
    """Three agents, one below the other, each of which works so many turns; all cost the same."""

    def __init__(self, *turns: int) -> None:
        self.clock = FakeClock()
        top, middle, bottom = turns
        lower = self.agent("lower", bottom)
        upper = self.agent("upper", middle, ask("lower"), lower)
        self.tools = [upper, self.work]
        self.model = self.script(top, ask("upper"))

    @property
    def work(self) -> AgentTool:
        async def pass_time(args: Any, ctx: ToolContext) -> str:
            self.clock.time_ms += 10_000
            return "worked"

        return Work(does=pass_time)

    def script(self, turns: int, *first: ToolCall) -> ScriptedStream:
        begin = [paid(10, "", *first)] if first else []
        return ScriptedStream([*begin, *[working()] * turns, paid(10, "done")])

    def agent(self, name: str, turns: int, *asks: Any) -> AgentTool:
        calls = [part for part in asks if isinstance(part, ToolCall)]
        tools = [part for part in asks if isinstance(part, AgentTool)]
        return agent(name, self.script(turns, *calls), *tools, self.work, clock=self.clock)


@pytest.mark.parametrize("limit", LIMITS)
async def test_the_word_reaches_whoever_runs_and_each_is_told_once(limit: BudgetLimit) -> None:
    """The lowest works for long. It is told, and then those above it, when it is their turn."""
    tree = Growing(0, 0, 14)
    most = 20 if limit is BudgetLimit.TURNS else 200
    if limit is BudgetLimit.SECONDS:
        most = 160
    result, sink = await completed(
        tree.model,
        *tree.tools,
        clock=tree.clock,
        model_id=MODEL,
        budget=budget(limit, most),
    )
    assert told_by_run(sink.events) == {
        "go": [words(limit)],
        "upper": [words(limit)],
        "lower": [words(limit)],
    }
    assert (result.outcome, result.limit) == (LoopOutcome.WRAPPED_UP, None)
    assert result.spent is not None
    turns, tokens = sums(sink.events)
    assert (turns, tokens) == (19, 190)
    assert result.spent == Spent(turns, tokens, float(tokens), 140.0)
    assert result.tree_usage == Usage(tokens)


@pytest.mark.parametrize("limit", LIMITS)
async def test_what_any_run_of_the_tree_spends_counts_for_all(limit: BudgetLimit) -> None:
    tree = Growing(9, 9, 9)
    most = 12 if limit is BudgetLimit.TURNS else 120
    if limit is BudgetLimit.SECONDS:
        most = 100
    result, sink = await completed(
        tree.model, *tree.tools, clock=tree.clock, model_id=MODEL, budget=budget(limit, most)
    )
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, limit)
    turns, tokens = sums(sink.events)
    assert result.spent is not None
    assert (result.spent.turns, result.spent.tokens, result.spent.cost) == (turns, tokens, tokens)
    assert getattr(result.spent, limit) == most
    assert all(len(told) <= 1 for told in told_by_run(sink.events).values())
    # What was under way has come to an end, one above the other, and says why.
    (answer,) = [a for a in results(result) if a.tool_name == "upper"]
    assert answer.details["outcome"] == "out_of_budget"
    assert answer.plain_text.startswith(f"The agent ran out of {limit}.")


@pytest.mark.parametrize("limit", LIMITS)
async def test_with_nothing_to_spend_no_child_is_started(limit: BudgetLimit) -> None:
    tree = Growing(1, 1, 1)
    result, sink = await completed(
        tree.model, *tree.tools, clock=tree.clock, model_id=MODEL, budget=budget(limit, 0)
    )
    assert result.outcome is LoopOutcome.OUT_OF_BUDGET
    assert list(runs_of(sink.events)) == ["go"]
    assert tree.model.requests == []


@pytest.mark.parametrize("turns", range(1, 14))
async def test_the_turns_of_a_tree_are_never_more_than_it_may_take(turns: int) -> None:
    """Also with children side by side, which look at the same moment whether one is left."""
    work = Work()
    busy = [
        agent(name, ScriptedStream([working()], at_end="repeat"), work) for name in ("a", "b", "c")
    ]
    upper = agent("upper", [[ask("a"), ask("b"), ask("c")], "done"], *busy)
    result, sink = await completed(
        [ask("upper"), "done"], upper, budget=Budget(turns=turns), model_id=MODEL
    )
    assert sums(sink.events)[0] == turns
    assert result.spent is not None
    assert result.spent.turns == turns
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, BudgetLimit.TURNS)
    assert all(len(told) <= 1 for told in told_by_run(sink.events).values())


async def test_children_side_by_side_stop_at_the_limit_that_they_share() -> None:
    """Each may be in the middle of an answer when the others reach it; none begins another."""
    busy = [
        agent(name, ScriptedStream([working(10)], at_end="repeat"), Work())
        for name in ("a", "b", "c")
    ]
    result, sink = await completed(
        [paid(10, "", ask("a"), ask("b"), ask("c")), "unheard"],
        *busy,
        budget=Budget(tokens=100),
        model_id=MODEL,
    )
    _, tokens = sums(sink.events)
    assert result.spent is not None
    assert 100 <= tokens <= 120
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, BudgetLimit.TOKENS)
    for answer in results(result):
        assert answer.plain_text.startswith("The agent ran out of tokens.")


class Keeper(AgentTool):
    """Starts a child and keeps its result."""

    name = "keep"

    def __init__(self, config: LoopConfig) -> None:
        self.config = config
        self.result: RunResult | None = None
        super().__init__()

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.result = await run_child(ctx, "go", self.config)
        return ToolResult.text(self.result.text)


async def test_a_child_has_its_parents_budget_and_its_own() -> None:
    own = Budget(turns=2, wrap_up_at=None)
    keeper = Keeper(
        LoopConfig(
            stream=ScriptedStream([working(10)], at_end="repeat"), tools=[Work()], budget=own
        )
    )
    result, _ = await completed(
        [paid(10, "", call("keep")), paid(10, "ok")], keeper, budget=Budget(turns=9)
    )
    assert keeper.result is not None
    assert keeper.result.limit is BudgetLimit.TURNS
    assert keeper.result.spent is not None
    assert (keeper.result.spent.turns, keeper.result.spent.tokens) == (2, 20), "of its own"
    assert result.spent is not None
    assert (result.spent.turns, result.spent.tokens) == (4, 40)
    assert result.outcome is LoopOutcome.DONE


async def test_a_child_with_much_of_its_own_is_held_to_its_parents() -> None:
    keeper = Keeper(
        LoopConfig(
            stream=ScriptedStream([working(10)], at_end="repeat"),
            tools=[Work()],
            budget=Budget(turns=99, tokens=99_999),
        )
    )
    result, sink = await completed([call("keep"), "unheard"], keeper, budget=Budget(turns=4))
    assert keeper.result is not None
    assert (keeper.result.outcome, keeper.result.limit) == (LoopOutcome.OUT_OF_BUDGET, "turns")
    assert keeper.result.spent is not None
    assert keeper.result.spent.turns == 3
    assert result.limit is BudgetLimit.TURNS
    assert notes(keeper.result.messages) == [WRAP_UP], "told of whichever comes first"
    assert sums(sink.events)[0] == 4


async def test_each_child_has_its_own_budget_anew() -> None:
    own = Budget(turns=2, wrap_up_at=None)
    child = agent("a", ScriptedStream([working(10)], at_end="repeat"), Work(), budget=own)
    result, sink = await completed([ask("a"), ask("a"), "ok"], child, model_id=MODEL)
    assert sums(sink.events)[0] == 3 + 2 * 2
    assert (result.spent, result.outcome) == (None, LoopOutcome.DONE)


async def test_the_config_of_a_child_shares_its_parents_budget() -> None:
    limits = Budget(turns=5)
    child = ScriptedStream([working()], at_end="repeat")
    parent = LoopConfig(stream=ScriptedStream([call("keep"), "unheard"]), budget=limits)
    keeper = Keeper(parent.child(stream=child, tools=[Work()]))
    assert keeper.config.budget is limits
    result, _ = await observe(parent.replace(tools=[keeper]))
    assert isinstance(result, RunResult)
    assert keeper.result is not None
    assert keeper.result.spent is not None
    assert keeper.result.spent.turns == 5, "one meter for both"
    assert len(child.requests) == 4


async def test_a_child_whose_model_has_no_price_is_refused() -> None:
    """Or it would spend without end what the parent must not."""
    model = ScriptedStream([paid(10**9, "unheard")])
    for model_id, told in ((None, "model_id"), ("other", "no price")):
        child = agent("a", model, model_id=model_id)
        result, sink = await completed(
            [paid(1, "", ask("a")), paid(1, "ok")],
            child,
            budget=Budget(cost=10, prices=PRICES),
            model_id=MODEL,
        )
        (answer,) = results(result)
        assert answer.is_error
        assert told in answer.plain_text
        assert list(runs_of(sink.events)) == ["go"]
    assert model.requests == []


async def test_a_model_of_another_price_has_its_own() -> None:
    prices: Mapping[str, Price] = {**PRICES, "dear": Price(input=5_000_000, output=1)}
    child = agent("a", [paid(10, "fine")], model_id="dear")
    result, _ = await completed(
        [paid(10, "", ask("a")), paid(10, "ok")],
        child,
        budget=Budget(cost=100, prices=prices),
        model_id=MODEL,
    )
    assert result.spent is not None
    assert result.spent.cost == 10 + 50 + 10


async def test_an_answer_of_a_child_that_was_stopped_halfway_counts() -> None:
    """As far as it can be known, like one of the run itself that was broken off."""

    async def hangs(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        yield Chunk(TextChunk("Well, "))
        await for_good()

    child = agent_tool("a", "", LoopConfig(stream=hangs, token_estimator=PerMessage()), timeout=50)
    result, _ = await completed(
        [paid(10, "", ask("a")), paid(10, "ok")], child, budget=Budget(tokens=1000)
    )
    assert result.spent is not None
    assert result.spent.tokens == 20 + (1 + 1)


@pytest.mark.parametrize("by", ["token", "task", "seconds"])
async def test_cancelling_the_root_leaves_nothing_of_the_tree(by: str) -> None:
    waiting, token, both = Waiting(), CancellationToken(), Waiting()
    clock = FakeClock()
    lower = agent("lower", [paid(1, "", call("wait"))], Work("wait", waiting), clock=clock)
    other = agent("other", [paid(2, "", call("both"))], Work("both", both), clock=clock)
    upper = agent("upper", [paid(4, "", ask("lower"), ask("other"))], lower, other, clock=clock)
    limits = Budget(turns=50, tokens=10**6, seconds=60)

    async def whole() -> tuple[RunResult | BaseException, RecordingSink]:
        task = asyncio.current_task()
        assert task is not None

        async def stop() -> None:
            await waiting.started.wait()
            await both.started.wait()
            if by == "token":
                token.cancel()
            elif by == "task":
                task.cancel()
            else:
                hurry()

        stopper = asyncio.create_task(stop())
        await asyncio.sleep(0)
        outcome = await observed_run(
            [paid(8, "", ask("upper"))],
            upper,
            signal=token,
            budget=limits,
            clock=clock,
            model_id=MODEL,
        )
        while task.cancelling():
            task.uncancel()
        await stopper
        return outcome

    outcome, sink = await asyncio.create_task(whole())
    assert waiting.cancelled
    assert both.cancelled
    assert sorted(runs_of(sink.events)) == ["go", "lower", "other", "upper"]
    if by == "seconds":
        assert isinstance(outcome, RunResult)
        assert (outcome.outcome, outcome.limit) == (LoopOutcome.OUT_OF_BUDGET, "seconds")
        assert outcome.tree_usage == Usage(15)
        assert outcome.spent is not None
        assert (outcome.spent.turns, outcome.spent.tokens) == (4, 15)
    else:
        failure = outcome if by == "token" else getattr(outcome, "__cause__", None)
        assert isinstance(failure, RunAborted)
        assert failure.tree_usage == Usage(15)
    assert timers() == []
    assert len(asyncio.all_tasks()) == 1


async def test_time_is_told_by_the_clock_of_the_run_that_has_the_budget() -> None:
    """Whatever clock a child has."""
    child = agent("a", [working(), "fine"], Work())
    result, _ = await completed(
        [ask("a"), "ok"], child, budget=Budget(seconds=60), model_id=MODEL, clock=FakeClock()
    )
    assert texts(result) == ["fine"]
    assert (result.outcome, result.text) == (LoopOutcome.DONE, "ok")


async def test_the_time_of_a_child_is_its_own_and_the_parent_goes_on() -> None:
    clock = FakeClock()
    child = agent(
        "a",
        [say("So far.", call("wait"))],
        Work("wait", lambda args, ctx: for_good()),
        budget=Budget(seconds=10),
        clock=clock,
    )
    result, _ = await completed(
        [ask("a"), "ok"], child, budget=Budget(seconds=1000), model_id=MODEL, clock=clock
    )
    (answer,) = results(result)
    assert answer.details["outcome"] == "out_of_budget"
    assert "So far." in answer.plain_text
    assert (result.outcome, result.text) == (LoopOutcome.DONE, "ok")


# --- any run ------------------------------------------------------------------------------------

ONE_EACH = {MODEL: Price(input=1_000_000, output=1_000_000)}
turn_scripts = st.tuples(
    st.lists(st.integers(0, 30), max_size=2),  # attempts that were cut off
    st.none() | st.integers(0, 30),  # what the answer costs; None: nobody says
    st.booleans(),  # whether it goes on
)
budgets = st.builds(
    lambda turns, tokens, cost, share: Budget(
        turns=turns, tokens=tokens, cost=cost, prices=ONE_EACH, wrap_up_at=share
    ),
    st.none() | st.integers(0, 6),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(0, 100),
    st.sampled_from([0.8, 0.5, 1.0, None]),
)


def is_near(limits: Budget, turns: int, spent: int, share: float) -> bool:
    """Whether so much of a limit is spent. Of the turns one is left to act on it."""
    most_turns = math.inf if limits.turns is None else min(limits.turns * share, limits.turns - 1)
    money = [limit for limit in (limits.tokens, limits.cost) if limit is not None]
    return turns > 0 and (turns >= most_turns or any(spent >= most * share for most in money))


@settings(max_examples=EXAMPLES * 2)
@given(st.lists(turn_scripts, min_size=1, max_size=7), budgets)
def test_no_run_asks_its_model_once_a_limit_is_reached(
    script: list[tuple[list[int], int | None, bool]], limits: Budget
) -> None:
    spent = turns = 0
    is_told = False
    steps = [
        (tokens, goes_on, cut)
        for attempts, last, goes_on in [*script, ([], 1, False)]
        for tokens, cut in [*[(tokens, True) for tokens in attempts], (last, False)]
    ]
    position = iter(enumerate(steps))

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        nonlocal spent, turns, is_told
        if request.max_output_tokens == 1:  # not asked again
            if limits.wrap_up_at is not None:
                is_told = is_told or is_near(limits, turns, spent, limits.wrap_up_at)
            turns += 1
        assert limits.turns is None or turns <= limits.turns
        assert limits.tokens is None or spent < limits.tokens
        assert limits.cost is None or spent < limits.cost
        assert len(notes(request.messages)) == is_told
        number, (tokens, goes_on, cut) = next(position)
        message = say("", call("work", call_id=f"c{number}")) if goes_on else say("ok")
        if cut:
            message = replace(message, stop_reason=StopReason.MAX_TOKENS)
        yield Start(PLACEHOLDER)
        spent += len(request.messages) + 1 if tokens is None else tokens
        yield Done(message if tokens is None else replace(message, usage=Usage(tokens)))

    result, _ = asyncio.run(
        observed_run(
            model,
            Work(),
            budget=limits,
            model_id=MODEL,
            token_estimator=PerMessage(),
            max_output_tokens=1,
            max_output_tokens_recovery=MaxTokensRecovery(max_attempts=100),
        )
    )
    if isinstance(result, BaseException):  # what the model says of the loop
        raise result
    assert result.spent is not None
    assert (result.spent.turns, result.spent.tokens) == (turns, spent)
    assert len(notes(result.messages)) == is_told
    if result.outcome is LoopOutcome.OUT_OF_BUDGET:
        assert result.limit is not None
        assert getattr(result.spent, result.limit) >= getattr(limits, result.limit)
    else:
        assert result.outcome is (LoopOutcome.WRAPPED_UP if is_told else LoopOutcome.DONE)
        assert result.text == "ok"


async def test_an_error_of_a_budgeted_run_carries_what_it_had() -> None:
    error, _ = await failed(
        StreamError, [working(3), failing("fatal")], Work(), budget=Budget(turns=9, seconds=60)
    )
    assert isinstance(error, LoopError)
    assert error.usage == Usage(3)
    assert len(results(error)) == 1
