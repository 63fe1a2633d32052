"""The model is told once to wrap up, while there is a turn left to do so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import AgentEvent, AssistantMessage, SystemMessage, ToolResult
from clark_agent.errors import ConfigError, HookError
from clark_agent.events import (
    AgentStart,
    MessageEnd,
    OutputTokensEscalation,
    ToolExecutionEnd,
    TurnEnd,
    TurnStart,
)
from clark_agent.plugins import GracefulTurnLimit
from clark_agent.plugins.hooks import Hooks
from clark_agent.protocol import WRAP_UP

TURN_END = TurnEnd(AssistantMessage.from_text("so"), ())


def fires_after(limit: GracefulTurnLimit, turns: int = 30) -> list[int]:
    """After how many turns a message went out, with a poll before the first and after each."""
    fired = [0] * len(limit.next_steering_messages())
    for turn in range(1, turns + 1):
        limit.on_event(TURN_END)
        fired += [turn] * len(limit.next_steering_messages())
    return fired


@given(st.integers(2, 20).flatmap(lambda cap: st.tuples(st.just(cap), st.integers(1, cap - 1))))
def test_it_fires_once_when_the_grace_is_left(numbers: tuple[int, int]) -> None:
    cap, grace = numbers
    limit = GracefulTurnLimit(cap, grace)
    assert limit.soft_limit == cap - grace
    assert not limit.fired
    assert fires_after(limit) == [cap - grace]
    assert limit.fired


def test_the_message_is_a_system_message_without_a_date() -> None:
    limit = GracefulTurnLimit(2, 1)
    limit.on_event(TURN_END)
    assert limit.next_steering_messages() == [SystemMessage(WRAP_UP, None)]
    assert limit.next_steering_messages() == []


def test_the_grace_is_five_turns_unless_told() -> None:
    assert GracefulTurnLimit(20).soft_limit == 15


def test_it_does_not_matter_how_often_it_is_polled() -> None:
    limit = GracefulTurnLimit(4, 2)
    for _ in range(5):
        assert limit.next_steering_messages() == []
    limit.on_event(TURN_END)
    limit.on_event(TURN_END)
    limit.on_event(TURN_END)
    assert len(limit.next_steering_messages()) == 1, "late is better than never"


def test_only_turns_that_are_over_count() -> None:
    message = AssistantMessage.from_text("so")
    others: list[AgentEvent] = [
        AgentStart(),
        TurnStart(),
        MessageEnd(message),
        ToolExecutionEnd("c", "look", ToolResult.text(""), False),
        OutputTokensEscalation(1, 2, 3),
    ]
    limit = GracefulTurnLimit(2, 1)
    for event in others:
        limit.on_event(event)
    assert limit.next_steering_messages() == []
    assert Hooks.of([limit]).event_observer[0].observes == (TurnEnd,)
    limit.on_event(TURN_END)
    assert len(limit.next_steering_messages()) == 1


# --- words and grace from the host ----------------------------------------------------------------


def test_the_words_are_asked_for_when_they_are_needed_and_only_then() -> None:
    asked: list[str] = []

    def words() -> str:
        asked.append("asked")
        return f"after {len(asked)}"

    limit = GracefulTurnLimit(3, 1, message_provider=words)
    for _ in range(2):
        assert limit.next_steering_messages() == []
        limit.on_event(TURN_END)
    assert asked == []
    assert limit.next_steering_messages() == [SystemMessage("after 1")]
    assert limit.next_steering_messages() == []
    assert asked == ["asked"]


def test_words_that_fail_are_asked_for_again() -> None:
    answers = iter([1, 0])
    limit = GracefulTurnLimit(2, 1, message_provider=lambda: f"in {1 // (1 - next(answers))}")
    limit.on_event(TURN_END)
    with pytest.raises(HookError) as caught:
        limit.next_steering_messages()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not limit.fired
    assert limit.next_steering_messages() == [SystemMessage("in 1")]


@given(st.integers(2, 12), st.lists(st.integers(-20, 20), min_size=1, max_size=12))
def test_a_grace_that_changes_counts_as_it_is_at_each_poll(cap: int, graces: list[int]) -> None:
    now = graces[0]
    limit = GracefulTurnLimit(cap, 1, grace_provider=lambda: now)
    due = None
    for turn, grace in enumerate(graces):
        now = grace
        within = 1 if grace < 1 else cap - 1 if grace > cap - 1 else grace
        assert limit.soft_limit == cap - within
        assert 1 <= limit.soft_limit < cap
        if due is None and turn >= cap - within:
            due = turn
        assert len(limit.next_steering_messages()) == (1 if due == turn else 0)
        limit.on_event(TURN_END)


def test_the_static_grace_is_nothing_beside_a_dynamic_one() -> None:
    assert fires_after(GracefulTurnLimit(10, 2, grace_provider=lambda: 7)) == [3]


# --- runs -----------------------------------------------------------------------------------------


def test_every_run_starts_from_zero_with_the_same_settings() -> None:
    limit = GracefulTurnLimit(9, 4, message_provider=lambda: "now", grace_provider=lambda: 3)
    assert fires_after(limit) == [6]
    fresh = limit.for_run()
    assert fresh is not limit
    assert not fresh.fired
    assert fresh.grace_iterations == 4
    for _ in range(6):
        assert fresh.next_steering_messages() == []
        fresh.on_event(TURN_END)
    assert fresh.next_steering_messages() == [SystemMessage("now")]
    assert fires_after(limit.for_run()) == [6]


@pytest.mark.parametrize(
    ("cap", "grace"), [(5, 0), (5, -1), (5, 5), (5, 6), (1, 1), (1, 0), (0, 0), (0, -1)]
)
def test_a_window_of_no_use_is_refused(cap: int, grace: int) -> None:
    assert not GracefulTurnLimit.is_useful(cap, grace)
    with pytest.raises(ConfigError, match=rf"less than max_iterations \({cap}\), not {grace}$"):
        GracefulTurnLimit(cap, grace)


def test_a_window_of_use() -> None:
    assert GracefulTurnLimit.is_useful(2, 1)
    assert GracefulTurnLimit.is_useful(6, 5)
    assert not GracefulTurnLimit.is_useful(None, 5)
