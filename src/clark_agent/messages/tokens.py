"""Estimates the tokens of a message, without the model's tokenizer.

A host with a real tokenizer passes its own `TokenEstimator`; all budgets use it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from clark_agent.messages.wire import encode_message
from clark_agent.types import AgentMessage

__all__ = ["CachingEstimator", "JsonSizeEstimator", "TokenEstimator", "estimate_messages"]


logger = logging.getLogger(__name__)


class TokenEstimator(Protocol):
    """Contract: pure, so that one estimate per message can be kept.

    Should not raise. If it does, a run logs that and uses the estimate of `JsonSizeEstimator`.
    """

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens."""
        ...


class JsonSizeEstimator:
    """A quarter of the bytes of the message's JSON: close enough for English, without a model."""

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens. Never raises."""
        return len(encode_message(message)) // 4


def estimate_messages(estimator: TokenEstimator, messages: Iterable[AgentMessage]) -> int:
    """The cost of messages together: the sum over each."""
    estimate = estimator.estimate_message
    return sum([estimate(message) for message in messages])


class CachingEstimator:
    """Calls another estimator once for each message, by identity. For one run.

    Never raises: if the other estimator fails, it uses the size of the message.
    """

    def __init__(self, estimator: TokenEstimator) -> None:
        self._estimate = estimator.estimate_message
        self._has_failed = False
        # The message is kept with its cost: an id is unique only while the object lives.
        self._costs: dict[int, tuple[AgentMessage, int]] = {}

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens."""
        known = self._costs.get(id(message))
        if known is None:
            known = self._costs[id(message)] = (message, self._ask(message))
        return known[1]

    def _ask(self, message: AgentMessage) -> int:
        try:
            return max(0, int(self._estimate(message)))
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "the token estimator failed; the size of such messages is used instead",
                    exc_info=True,
                )
        return JsonSizeEstimator().estimate_message(message)
