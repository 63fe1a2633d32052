"""How many tokens a message costs, as well as anyone needs to know without the model's tokenizer.

A host with a real tokenizer brings its own `TokenEstimator`; everything that budgets asks that one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec.json import Encoder

from clark_agent.types import AgentMessage

__all__ = ["CachingEstimator", "JsonSizeEstimator", "TokenEstimator", "estimate_messages"]


class TokenEstimator(Protocol):
    """Contract: pure, so that one estimate per message can be kept; never raises."""

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens."""
        ...


class JsonSizeEstimator:
    """A quarter of the bytes of the message's JSON: near enough for English, with no model."""

    def __init__(self) -> None:
        self._encode = Encoder().encode

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens."""
        return len(self._encode(message)) // 4


def estimate_messages(estimator: TokenEstimator, messages: Iterable[AgentMessage]) -> int:
    """The cost of messages together: the sum over each."""
    estimate = estimator.estimate_message
    return sum([estimate(message) for message in messages])


class CachingEstimator:
    """Asks another estimator about each message once, by identity. For the time of one run."""

    def __init__(self, estimator: TokenEstimator) -> None:
        self._estimate = estimator.estimate_message
        # The message is kept with its cost: an id is only taken while the object lives.
        self._costs: dict[int, tuple[AgentMessage, int]] = {}

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens."""
        known = self._costs.get(id(message))
        if known is None:
            known = self._costs[id(message)] = (message, self._estimate(message))
        return known[1]
