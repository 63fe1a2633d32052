"""The transcript of a run: the messages before the transforms, and those that the run added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from clark_agent.messages.tokens import CachingEstimator, TokenEstimator
from clark_agent.messages.transcript import MessageLog
from clark_agent.types import AgentMessage, AssistantMessage, Usage

__all__ = ["Transcript"]


class Transcript(MessageLog):
    """The live transcript. ``added`` has the messages of this run alone."""

    __slots__ = ("_counted", "_estimator", "_tokens", "_unbound", "added", "last_usage")

    def __init__(self, messages: Sequence[AgentMessage], estimator: TokenEstimator) -> None:
        super().__init__(messages)
        self.added = MessageLog()
        self.last_usage = _last_usage(messages)
        """The usage of the newest answer that reports one."""
        self._unbound = estimator
        self._estimator: CachingEstimator | None = None
        self._tokens = 0
        self._counted = 0

    def add(self, messages: Sequence[AgentMessage]) -> None:
        """Append messages of this run."""
        self.extend(messages)
        self.added.extend(messages)

    def add_answer(self, message: AssistantMessage) -> None:
        """Append an answer."""
        self.append(message)
        self.added.append(message)
        if message.usage is not None:
            self.last_usage = message.usage

    def replace(self, messages: Iterable[AgentMessage]) -> None:
        """Continue with other messages. ``added`` is not changed."""
        super().__init__(messages)
        self.last_usage = _last_usage(self)
        self._tokens = self._counted = 0

    @property
    def estimator(self) -> CachingEstimator:
        """The estimator of the config, for this run."""
        if self._estimator is None:
            self._estimator = CachingEstimator(self._unbound)
        return self._estimator

    def tokens(self) -> int:
        """The estimated tokens. Each message is estimated once."""
        estimate = self.estimator.estimate_message
        for index in range(self._counted, len(self)):
            self._tokens += estimate(self[index])
        self._counted = len(self)
        return self._tokens


def _last_usage(messages: Iterable[AgentMessage]) -> Usage | None:
    for message in reversed(tuple(messages)):
        if isinstance(message, AssistantMessage) and message.usage is not None:
            return message.usage
    return None
