"""How many tokens a message costs, as well as anyone needs to know without the model's tokenizer.

A host with a real tokenizer brings its own `TokenEstimator`; everything that budgets asks that one.
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

    Should not raise. For a message on which it does, a run logs that and takes the estimate of
    `JsonSizeEstimator`.
    """

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens."""
        ...


class JsonSizeEstimator:
    """A quarter of the bytes of the message's JSON: near enough for English, with no model."""

    def estimate_message(self, message: AgentMessage) -> int:
        """The cost of one message in tokens. Never raises."""
        return len(encode_message(message)) // 4


def estimate_messages(estimator: TokenEstimator, messages: Iterable[AgentMessage]) -> int:
    """The cost of messages together: the sum over each."""
    estimate = estimator.estimate_message
    return sum([estimate(message) for message in messages])


class CachingEstimator:
    """Asks another estimator about each message once, by identity. For the time of one run.

    Never raises: where the other estimator fails, the size of the message counts.
    """

    def __init__(self, estimator: TokenEstimator) -> None:
        self._estimate = estimator.estimate_message
        self._has_failed = False
        # The message is kept with its cost: an id is only taken while the object lives.
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
