"""TokenBudget: old tool results give way when the transcript grows too large."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from msgspec.structs import replace

from clark_agent.errors import ConfigError
from clark_agent.plugin import TransformContext
from clark_agent.tokens import TokenEstimator, estimate_messages
from clark_agent.transcript import MessageLog, MessageView, view_of
from clark_agent.types import AgentMessage, TextContent, ToolResultMessage

__all__ = ["TokenBudget"]

# What the model is working on right now stays whole.
_PROTECTED = 2


class TokenBudget:
    """Replaces the oldest tool results by a marker while the estimate is over budget.

    Above ``trim_trigger`` times ``max_tokens`` it trims down to ``trim_target`` times
    ``max_tokens``. The target is lower than the trigger so that one trim lasts for many turns, in
    which the beginning of the request, and with it the provider's cache of it, stays the same.
    What was trimmed stays trimmed.

    Every message is estimated once, when it first appears; a turn costs what is new in it.
    """

    name = "token_budget"

    def __init__(
        self,
        max_tokens: int = 60_000,
        *,
        trim_trigger: float = 0.7,
        trim_target: float | None = None,
        truncation_marker: str = "[left out to save room; call the tool again if you need it]",
    ) -> None:
        target = trim_trigger * 5 / 7 if trim_target is None else trim_target
        if max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, not {max_tokens}")
        if not 0 < target <= trim_trigger <= 1:
            raise ConfigError(
                f"0 < trim_target <= trim_trigger <= 1 must hold, not {target} and {trim_trigger}"
            )
        self.max_tokens = max_tokens
        self.trim_trigger = trim_trigger
        self.trim_target = target
        self.truncation_marker = truncation_marker
        self._trigger = _share(max_tokens, trim_trigger)
        self._target = _share(max_tokens, target)
        self._seen: MessageView | None = None
        self._log: MessageLog | None = None  # None while nothing had to be trimmed
        self._costs: list[int] = []
        self._total = 0
        self._next = 0  # where the next trim goes on

    def for_run(self) -> TokenBudget:
        """A fresh one that has seen nothing."""
        return TokenBudget(
            self.max_tokens,
            trim_trigger=self.trim_trigger,
            trim_target=self.trim_target,
            truncation_marker=self.truncation_marker,
        )

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        """The messages within the budget, as far as tool results can make room."""
        view = view_of(messages)
        self._follow(view, ctx.estimator)
        tail = view.tail
        total = self._total + estimate_messages(ctx.estimator, tail)
        if total > self._trigger:
            excess = self._trim(view, ctx.estimator, total - self._target)
            if excess > 0:
                tail = self._trimmed_tail(tail, ctx.estimator, excess)
                return view.with_tail(tail) if self._log is None else self._log.view(tail)
        return messages if self._log is None else self._log.view(tail)

    def _follow(self, view: MessageView, estimator: TokenEstimator) -> None:
        """Take in what is new since the last turn, or all of another transcript."""
        if not view.grew_from(self._seen):
            self._seen, self._log, self._costs, self._total, self._next = None, None, [], 0, 0
        new = view[self._seen.stable if self._seen is not None else 0 : view.stable]
        costs = [estimator.estimate_message(message) for message in new]
        self._costs += costs
        self._total += sum(costs)
        if self._log is not None:
            self._log.extend(new)
        self._seen = view

    def _trim(self, view: MessageView, estimator: TokenEstimator, excess: int) -> int:
        """Trim the stable part, oldest first; return what is still too much."""
        end = min(view.stable, len(view) - _PROTECTED)
        items: list[AgentMessage] | None = None
        while excess > 0 and self._next < end:
            index = self._next
            self._next += 1
            trimmed = self._trimmed(view[index])
            if trimmed is None:
                continue
            if items is None:
                items = list(view[: view.stable] if self._log is None else self._log)
            items[index] = trimmed
            saved = self._costs[index] - estimator.estimate_message(trimmed)
            self._total -= saved
            excess -= saved
        if items is not None:
            self._log = MessageLog(items)
        return excess

    def _trimmed_tail(
        self, tail: tuple[AgentMessage, ...], estimator: TokenEstimator, excess: int
    ) -> tuple[AgentMessage, ...]:
        items = list(tail)
        for index in range(len(items) - _PROTECTED):
            if excess <= 0:
                break
            trimmed = self._trimmed(items[index])
            if trimmed is not None:
                excess -= estimator.estimate_message(items[index])
                excess += estimator.estimate_message(trimmed)
                items[index] = trimmed
        return tuple(items)

    def _trimmed(self, message: AgentMessage) -> ToolResultMessage | None:
        """A tool result with the marker for its content; None for what cannot be trimmed."""
        marker = (TextContent(self.truncation_marker),)
        if not isinstance(message, ToolResultMessage) or message.content == marker:
            return None
        return replace(message, content=marker)


def _share(tokens: int, fraction: float) -> int:
    """The fraction of the tokens, rounded half up, with decimal fractions taken as written."""
    return floor(round(tokens * fraction, 6) + 0.5)
