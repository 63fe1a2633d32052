"""The estimate is a quarter of the bytes on the wire, for each message by itself."""

from __future__ import annotations

import pytest
from hypothesis import given

from clark_agent import AgentMessage, UserMessage
from clark_agent.messages import (
    JsonSizeEstimator,
    TokenEstimator,
    encode_message,
    estimate_messages,
)
from clark_agent.messages.tokens import CachingEstimator
from tests.strategies import messages, transcripts


@given(messages())
def test_a_quarter_of_the_bytes_rounded_down(message: AgentMessage) -> None:
    assert JsonSizeEstimator().estimate_message(message) == len(encode_message(message)) // 4


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 7), ("abc", 7), ("abcd", 8), ("éé", 8), ("😀", 8)]
)
def test_bytes_count_not_characters(text: str, tokens: int) -> None:
    assert len(encode_message(UserMessage(""))) == 28
    assert JsonSizeEstimator().estimate_message(UserMessage(text)) == tokens


@given(transcripts())
def test_the_sum_is_taken_over_rounded_estimates(given_messages: list[AgentMessage]) -> None:
    estimator = JsonSizeEstimator()
    total = estimate_messages(estimator, iter(given_messages))
    assert total == sum(len(encode_message(message)) // 4 for message in given_messages)


def test_any_estimator_will_do() -> None:
    class One:
        def estimate_message(self, message: AgentMessage) -> int:
            return 1

    estimator: TokenEstimator = One()
    assert estimate_messages(estimator, [UserMessage("a"), UserMessage("b" * 100)]) == 2


@given(transcripts())
def test_a_caching_estimator_asks_about_each_message_once(
    given_messages: list[AgentMessage],
) -> None:
    asked: list[AgentMessage] = []

    class Counting(JsonSizeEstimator):
        def estimate_message(self, message: AgentMessage) -> int:
            asked.append(message)
            return super().estimate_message(message)

    caching = CachingEstimator(Counting())
    for _ in range(2):
        total = estimate_messages(caching, given_messages)
        assert total == estimate_messages(JsonSizeEstimator(), given_messages)
    assert len(asked) == len({id(message) for message in given_messages})


def test_a_caching_estimator_is_not_fooled_by_an_id_that_is_used_again() -> None:
    caching = CachingEstimator(JsonSizeEstimator())
    costs = [caching.estimate_message(UserMessage("a" * (4 * size))) for size in range(200)]
    assert costs == list(range(7, 207))
