"""Over the budget the oldest results give way, far enough that the request then stays the same.

That turns give way too is in `test_token_budget_turns`; here they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from msgspec.structs import replace

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    ImageContent,
    TextContent,
    ToolResultMessage,
    UserMessage,
)
from clark_agent.errors import ConfigError
from clark_agent.messages.transcript import MessageLog, MessageView
from clark_agent.plugins import TokenBudget
from clark_agent.plugins.hooks import Hooks
from tests.plugins.support import (
    CharacterEstimator,
    before_call,
    calling,
    cost,
    grow,
    heaps,
    result,
    tails,
)
from tests.strategies import cuts

CONTEXT = before_call(CharacterEstimator())
results_only = partial(TokenBudget, drop_turns=False)


def total(messages: Sequence[AgentMessage]) -> int:
    return sum([cost(message) for message in messages])


def send(budget: TokenBudget, messages: Sequence[AgentMessage]) -> tuple[AgentMessage, ...]:
    return tuple(budget.transform_context(messages, CONTEXT))


# --- the rules again, with everything counted anew at every step ----------------------------------


class SlowBudget:
    """Trims by the book. Remembers which entries of the log it has trimmed, and nothing else."""

    def __init__(self, budget: TokenBudget) -> None:
        self.trigger = share(budget.max_tokens, budget.trim_trigger)
        self.target = share(budget.max_tokens, budget.trim_target)
        self.marker = (TextContent(budget.truncation_marker),)
        self.trimmed: set[int] = set()

    def send(self, view: MessageView) -> tuple[AgentMessage, ...]:
        messages = list(view)
        for index in self.trimmed:
            messages[index] = self.without_content(messages[index])
        if total(messages) > self.trigger:
            for index in range(len(messages) - 2):
                if total(messages) <= self.target:
                    break
                messages[index] = self.without_content(messages[index])
                if index < view.stable:
                    self.trimmed.add(index)
        return tuple(messages)

    def without_content(self, message: AgentMessage) -> AgentMessage:
        if isinstance(message, ToolResultMessage):
            return replace(message, content=self.marker)
        return message


def share(tokens: int, fraction: float) -> int:
    exact = Decimal(str(round(fraction, 9))) * tokens
    return int(exact.to_integral_value(ROUND_HALF_UP))


def crate(messages: Sequence[AgentMessage], trigger: int, marker: str) -> tuple[AgentMessage, ...]:
    """What the crate sends: always from the full transcript, down to the trigger."""
    sent = list(messages)
    block = (TextContent(marker),)
    for index in range(len(sent) - 2):
        if total(sent) <= trigger:
            break
        message = sent[index]
        if isinstance(message, ToolResultMessage) and message.content != block:
            sent[index] = replace(message, content=block)
    return tuple(sent)


@st.composite
def budgets(draw: DrawFn) -> TokenBudget:
    trigger = draw(st.sampled_from([0.1, 0.25, 0.5, 0.7, 0.9, 1.0]))
    target = draw(st.sampled_from([0.05, 0.1, 0.25, 0.33, 0.5, 0.7, 1.0]))
    return results_only(
        draw(st.integers(1, 90)),
        trim_trigger=trigger,
        trim_target=min(target, trigger),
        # Some markers are longer than what they stand for.
        truncation_marker=draw(st.sampled_from(["", "-", "abc", "left out"])),
    )


# --- in pieces as by the book -----------------------------------------------------------------


@given(budgets(), heaps().flatmap(cuts), tails())
def test_a_growing_transcript_is_trimmed_by_the_book(
    budget: TokenBudget, pieces: list[tuple[AgentMessage, ...]], tail: tuple[AgentMessage, ...]
) -> None:
    slow = SlowBudget(budget)
    for number, view in enumerate(grow(pieces)):
        asked = view.with_tail(tail) if number % 2 else view
        assert send(budget, asked) == slow.send(asked)
        assert send(budget, asked) == slow.send(asked), "and the same asked again"


@given(budgets(), heaps().flatmap(cuts))
def test_with_the_target_at_the_trigger_it_sends_what_the_crate_sends(
    budget: TokenBudget, pieces: list[tuple[AgentMessage, ...]]
) -> None:
    marker = budget.truncation_marker
    like_the_crate = results_only(
        budget.max_tokens,
        trim_trigger=budget.trim_trigger,
        trim_target=budget.trim_trigger,
        truncation_marker=marker,
    )
    trigger = share(budget.max_tokens, budget.trim_trigger)
    for view in grow(pieces):
        assert send(like_the_crate, view) == crate(tuple(view), trigger, marker)


@given(budgets(), heaps(), heaps())
def test_another_transcript_starts_over(
    budget: TokenBudget, one: tuple[AgentMessage, ...], other: tuple[AgentMessage, ...]
) -> None:
    first, second = MessageLog(one).view(), MessageLog(other).view()
    for view in (first, second, first):
        assert send(budget, view) == SlowBudget(budget).send(view)
        assert send(budget, list(view)) == SlowBudget(budget).send(view)


@given(budgets(), heaps().flatmap(cuts))
def test_the_transcript_stays_whole(
    budget: TokenBudget, pieces: list[tuple[AgentMessage, ...]]
) -> None:
    for view in grow(pieces):
        before = tuple(view)
        sent = send(budget, view)
        assert tuple(view) == before
        for mine, theirs in zip(before, sent, strict=True):
            assert mine is theirs or isinstance(theirs, ToolResultMessage)


# --- when, and what ---------------------------------------------------------------------------


def transcript(*sizes: int) -> list[AgentMessage]:
    """A question, then a result of each size (its cost is one more), then two plain messages."""
    results = [result(str(n), text="x" * (size - 1)) for n, size in enumerate(sizes)]
    return [UserMessage("?"), *results, UserMessage("a"), UserMessage("b")]


def test_it_trims_above_the_trigger_and_not_at_it() -> None:
    at, above = transcript(10, 24), transcript(10, 25)
    assert (total(at), total(above)) == (40, 41)
    budget = results_only(80, trim_trigger=0.5, trim_target=0.5, truncation_marker="")
    view = MessageLog(at).view()
    assert budget.transform_context(view, CONTEXT) is view
    assert budget.transform_context(at, CONTEXT) is at
    sent = send(budget, above)
    assert sent == (above[0], result("0", text=""), *above[2:])


def test_it_trims_down_to_the_target_oldest_first() -> None:
    messages = transcript(10, 10, 10, 10)
    budget = results_only(100, trim_trigger=0.4, trim_target=0.28, truncation_marker="")
    sent = send(budget, messages)
    assert total(messages) == 46
    assert total(sent) == 28, "two are enough to reach the target"
    assert sent[1:3] == (result("0", text=""), result("1", text=""))
    assert sent[3:] == tuple(messages[3:])


@pytest.mark.parametrize(("max_tokens", "fits"), [(99, 25), (98, 25), (97, 24), (90, 23)])
def test_a_share_is_rounded_half_up(max_tokens: int, fits: int) -> None:
    # 24.75, 24.5, 24.25 and 22.5: "fits" is the largest total that is left alone.
    budget = results_only(max_tokens, trim_trigger=0.25)
    at, above = transcript(fits - 6), transcript(fits - 5)
    assert total(at) == fits
    assert budget.transform_context(at, CONTEXT) is at
    assert send(budget, above) != tuple(above)


def test_the_last_two_messages_are_never_trimmed() -> None:
    big = "x" * 1000
    messages: list[AgentMessage] = [result("0", text=big), result("1", text=big)]
    budget = results_only(10, truncation_marker="-")
    assert send(budget, messages) == tuple(messages)
    sent = send(budget, [*messages, result("2", text=big)])
    assert sent == (result("0", text="-"), result("1", text=big), result("2", text=big))
    assert send(budget, []) == ()


def test_results_in_the_tail_give_way_last_and_only_as_far_as_needed() -> None:
    tail = tuple([result(str(n), text="x" * 9) for n in range(4)])
    log = MessageLog([UserMessage("?")])
    budget = results_only(100, trim_trigger=0.4, trim_target=0.34, truncation_marker="")
    sent = send(budget, log.view(tail))
    assert sent == (log[0], result("0", text=""), *tail[1:])
    log.append(result("old", text="x" * 9))
    assert send(budget, log.view(tail)) == (
        *(log[0], result("old", text="")),
        *(result("0", text=""), *tail[1:]),
    )


def test_only_the_content_of_a_result_goes() -> None:
    old = ToolResultMessage(
        "id", "look", (TextContent("x" * 99), ImageContent("data:,x")), True, "told", {"d": 1}, 7
    )
    call = calling(("id", "look"))
    messages: list[AgentMessage] = [call, old, UserMessage("a" * 99), UserMessage("b")]
    sent = send(results_only(10, truncation_marker="gone"), messages)
    trimmed = ToolResultMessage("id", "look", (TextContent("gone"),), True, "told", {"d": 1}, 7)
    assert sent == (call, trimmed, *messages[2:])


def test_what_is_a_marker_already_is_left_alone() -> None:
    marked = result("0", text="gone")
    messages: list[AgentMessage] = [marked, result("1", text="x" * 99), *transcript()]
    estimator = CharacterEstimator()
    budget = results_only(10, truncation_marker="gone")
    sent = budget.transform_context(messages, before_call(estimator))
    assert sent[0] is marked
    assert sent[1] == result("1", text="gone")
    assert len(estimator.asked) == len(messages) + 1, "and is not estimated again"


def test_what_was_trimmed_stays_trimmed() -> None:
    log = MessageLog(transcript(10, 10, 10))
    budget = results_only(100, trim_trigger=0.3, trim_target=0.3, truncation_marker="")
    noted = send(budget, log.view((UserMessage("x" * 20),)))
    assert [m == result(str(n), text="") for n, m in enumerate(noted[1:4])] == [True] * 3
    # Without the note one trim would do, but the provider knows the transcript by now.
    assert send(budget, log.view()) == noted[:-1]
    assert total(send(budget.for_run(), log.view())) == 27


def test_the_marker_has_words_for_the_model() -> None:
    log = MessageLog(transcript(100, 100))
    sent = send(results_only(100), log.view())
    assert isinstance(sent[1], ToolResultMessage)
    assert "left out" in sent[1].plain_text


# --- a stable prefix --------------------------------------------------------------------------


def requests(budget: TokenBudget, turns: int) -> list[tuple[AgentMessage, ...]]:
    """What is sent in a run in which every turn costs 100."""
    log = MessageLog([UserMessage("go")])
    sent = [send(budget, log.view())]
    for turn in range(turns):
        log.extend([calling((str(turn), "look")), result(str(turn), text="x" * 98)])
        sent.append(send(budget, log.view()))
    return sent


def broken_prefixes(sent: list[tuple[AgentMessage, ...]]) -> list[int]:
    """The turns whose request does not begin with the whole request before."""
    return [
        turn
        for turn, (before, after) in enumerate(pairwise(sent), start=1)
        if after[: len(before)] != before
    ]


def test_one_trim_lasts_until_the_trigger_is_hit_again() -> None:
    budget = results_only(10_000, trim_trigger=0.7, trim_target=0.5, truncation_marker="")
    sent = requests(budget, 200)
    broken = broken_prefixes(sent)
    assert broken[0] == 70, "the question, then 70 turns of 100 are above 7,000"
    for turn in range(1, 201):
        untrimmed = total(sent[turn - 1]) + 100
        assert (turn in broken) == (untrimmed > 7_000)
        assert total(sent[turn]) == untrimmed or total(sent[turn]) <= 5_000
    # A trim makes room for about 20 turns. A few more are lost to what the markers cost.
    assert {b - a for a, b in pairwise(broken)} <= {20, 21}
    assert len(broken) <= 7


def test_with_the_target_at_the_trigger_every_turn_breaks_the_prefix() -> None:
    budget = results_only(10_000, trim_trigger=0.7, trim_target=0.7, truncation_marker="")
    assert len(broken_prefixes(requests(budget, 200))) > 125


# --- what it costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10, 10_000])
def test_every_message_is_estimated_once(length: int) -> None:
    estimator = CharacterEstimator()
    budget, ctx = results_only(10_000_000), before_call(estimator)
    log = MessageLog([result(str(n)) for n in range(length)])
    view = log.view()
    assert budget.transform_context(view, ctx) is view
    assert len(estimator.asked) == length
    for turn in range(5):
        estimator.asked.clear()
        new: list[AgentMessage] = [calling((f"t{turn}", "look")), result(f"t{turn}")]
        log.extend(new)
        budget.transform_context(log.view(), ctx)
        assert estimator.asked == new
        estimator.asked.clear()
        note = UserMessage("a note")
        budget.transform_context(log.view((note,)), ctx)
        assert estimator.asked == [note]


def test_a_trim_estimates_each_marker_once() -> None:
    estimator = CharacterEstimator()
    budget = results_only(1_000, trim_trigger=0.5, trim_target=0.25, truncation_marker="")
    ctx = before_call(estimator)
    log = MessageLog([result(str(n), text="x" * 9) for n in range(51)])
    sent = budget.transform_context(log.view(), ctx)
    trimmed = [m for m in sent if isinstance(m, ToolResultMessage) and not m.plain_text]
    assert total(tuple(sent)) == 249
    assert len(trimmed) == 29
    assert estimator.asked == [*log, *trimmed]
    for turn in range(20):
        estimator.asked.clear()
        log.append(result(f"t{turn}"))
        budget.transform_context(log.view(), ctx)
        assert len(estimator.asked) == 1


# --- settings ---------------------------------------------------------------------------------


def test_the_settings_unless_told() -> None:
    budget = TokenBudget()
    assert (budget.max_tokens, budget.trim_trigger) == (60_000, 0.7)
    assert budget.trim_target == pytest.approx(0.5)
    assert TokenBudget(trim_trigger=1).trim_target == pytest.approx(5 / 7)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a_budget_of_nothing_is_refused(max_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"max_tokens must be at least 1, not {max_tokens}"):
        results_only(max_tokens)


@pytest.mark.parametrize("trigger", [0, -0.1, 1.01, float("nan"), float("inf")])
def test_a_trigger_is_a_fraction(trigger: float) -> None:
    with pytest.raises(ConfigError, match="trim_trigger"):
        results_only(trim_trigger=trigger)


@pytest.mark.parametrize("target", [0, -0.1, 0.51, 1, float("nan")])
def test_a_target_is_no_more_than_the_trigger(target: float) -> None:
    with pytest.raises(ConfigError, match=f"trim_target.*{target}"):
        results_only(trim_trigger=0.5, trim_target=target)


def test_every_run_gets_its_own_with_the_same_settings() -> None:
    budget = results_only(50, trim_trigger=0.6, trim_target=0.3, truncation_marker="gone")
    budget.pinned = lambda message: False
    hooks = Hooks.of([budget])
    assert hooks.names["context_transform"] == ("token_budget",)
    log = MessageLog(transcript(10))
    early = log.view()
    log.extend([result("late", text="x" * 90), *transcript()])
    assert send(budget, log.view())[1] == result("0", text="gone")
    fresh = hooks.for_run().plugins[0]
    assert isinstance(fresh, TokenBudget)
    assert fresh is not budget
    for name in (
        *("max_tokens", "trim_trigger", "trim_target"),
        "truncation_marker",
        "drop_turns",
        "pinned",
    ):
        assert getattr(fresh, name) == getattr(budget, name)
    assert fresh.transform_context(early, CONTEXT) is early


def test_words_of_the_model_are_never_trimmed() -> None:
    messages: list[AgentMessage] = [
        AssistantMessage.from_text("x" * 500),
        UserMessage("x" * 500),
        *transcript(),
    ]
    assert send(results_only(10), messages) == tuple(messages)
