"""TokenBudget: drops old tool results and old turns when the transcript grows too large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import floor

from msgspec.structs import replace

from clark_agent.errors import ConfigError, ContextOverflowError
from clark_agent.messages.tokens import TokenEstimator, estimate_messages
from clark_agent.messages.transcript import MessageLog, MessageView, view_of
from clark_agent.plugins._compacted import mark_of
from clark_agent.plugins.base import (
    RestoreContext,
    TransformContext,
)
from clark_agent.tools import AgentTool
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    SystemMessage,
    TextContent,
    ToolResultMessage,
    UserMessage,
)

__all__ = ["TokenBudget"]

# The messages that the model is working on stay complete.
_PROTECTED = 2
_RECOVERIES = 3

_LEFT_OUT = SystemMessage("[earlier turns left out to save room]")


class TokenBudget:
    """Keeps requests within a number of tokens: drops old tool results first, then old turns.

    Above ``trim_trigger`` times ``max_tokens`` it trims down to ``trim_target`` times
    ``max_tokens``. The target is lower than the trigger so that one trim lasts for many turns.
    During these, the beginning of the request, and with it the provider's cache, stays the same.
    Trimmed messages stay trimmed.

    First the content of the oldest results is replaced by the marker, except in the last two
    messages. If that is not enough, the oldest whole turns are dropped, except the messages before
    the first answer (the task), the newest message of the user, the newest turn, the newest result
    of a tool that ``pins_active_plan``, and messages for which ``pinned`` returns true. (The newest
    turn is dropped too if nothing else helps and its answer waits for no results.) A request that
    cannot be made to fit into ``max_tokens`` is not sent: the run ends with a
    `ContextOverflowError`. If a provider still rejects a request as too large, the transcript
    itself is shortened in the same way and the turn is retried, unless the config has its own
    ``overflow_recovery``.

    With ``drop_turns=False`` only results are trimmed, only in the request, and a request that does
    not fit is sent anyway.

    Every message is estimated once, when it first appears, so a turn costs only its new messages.
    """

    name = "token_budget"

    def __init__(
        self,
        max_tokens: int = 60_000,
        *,
        trim_trigger: float = 0.7,
        trim_target: float | None = None,
        truncation_marker: str = "[left out to save room; call the tool again if you need it]",
        drop_turns: bool = True,
        pinned: Callable[[AgentMessage], bool] | None = None,
    ) -> None:
        target = trim_trigger * 5 / 7 if trim_target is None else trim_target
        if max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, not {max_tokens}")
        if not 0 < target <= trim_trigger <= 1:
            raise ConfigError(
                "TokenBudget needs 0 < trim_target <= trim_trigger <= 1, "
                f"not {target} and {trim_trigger}"
            )
        if pinned is not None and not callable(pinned):
            raise ConfigError(f"pinned must be None or a function of a message, not {pinned!r}")
        self.max_tokens = max_tokens
        self.trim_trigger = trim_trigger
        self.trim_target = target
        self.truncation_marker = truncation_marker
        self.drop_turns = drop_turns
        self.pinned = pinned
        self.max_attempts = _RECOVERIES if drop_turns else 0
        """How often it may shorten the transcript in one turn."""
        self._trigger = _share(max_tokens, trim_trigger)
        self._target = _share(max_tokens, target)
        self._window = _Window(self)
        self._sent: int | None = None  # the estimate of the last request

    def for_run(self) -> TokenBudget:
        """Return a new instance without history."""
        return TokenBudget(
            self.max_tokens,
            trim_trigger=self.trim_trigger,
            trim_target=self.trim_target,
            truncation_marker=self.truncation_marker,
            drop_turns=self.drop_turns,
            pinned=self.pinned,
        )

    def restore(self, ctx: RestoreContext) -> None:
        """Repeat the trims that another process made for its requests."""
        for view in ctx.requests:
            self._fit(view, ctx.estimator, ctx.tools)

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        """Return messages within the budget. Raises `ContextOverflowError` if they do not fit."""
        view = view_of(messages)
        tail = self._fit(view, ctx.estimator, ctx.tools)
        if self.drop_turns and self._sent is not None and self._sent > self.max_tokens:
            raise ContextOverflowError(
                f"the task and the newest turn alone need about {self._sent:,} tokens, but the "
                f"TokenBudget allows {self.max_tokens:,}"
            )
        if not self._window.is_edited:
            return messages if tail is None else view.with_tail(tail)
        return self._window.view(view.tail if tail is None else tail)

    def recover(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        """Return a shorter transcript, after a provider has rejected a request as too large."""
        window = _Window(self)
        window.follow(view_of(messages).with_tail(()), ctx.estimator, ctx.tools)
        # The estimate was too low, so it is no guide: halve what was sent.
        sent = window.total if self._sent is None else min(window.total, self._sent)
        excess = window.total - min(self._target, sent // 2)
        window.shrink(excess, excess, ())
        return window.view(()) if window.is_edited else messages

    def _fit(
        self, view: MessageView, estimator: TokenEstimator, tools: Mapping[str, AgentTool]
    ) -> tuple[AgentMessage, ...] | None:
        """Trim to the budget. Return the trimmed tail if it had to be trimmed too."""
        window = self._window
        window.follow(view, estimator, tools)
        in_tail = estimate_messages(estimator, view.tail)
        total = window.total + in_tail
        tail: tuple[AgentMessage, ...] | None = None
        if total > self._trigger:
            tail = window.shrink(total - self._target, total - self.max_tokens, view.tail)
            if tail is not None:
                in_tail = estimate_messages(estimator, tail)
        self._sent = window.total + in_tail
        return tail


class _Window:
    """The remaining part of a growing transcript. Every edit makes a new log: views never change.

    All indexes refer to the remaining part, which has the size of a request, not of the transcript.
    """

    def __init__(self, budget: TokenBudget) -> None:
        self._marker = (TextContent(budget.truncation_marker),)
        self._drops_turns = budget.drop_turns
        self._pinned = budget.pinned
        self._forget(None)

    def _forget(self, seen: MessageView | None) -> None:
        self._seen = seen
        self._log: MessageLog | None = None  # None until something is trimmed
        self._costs: list[int] = []
        self._next = 0  # where the next trim continues
        self._task: int | None = None  # where the task ends
        self._has_gap = False
        self._plans: dict[str, ToolResultMessage] = {}
        self.total = 0
        """The estimated tokens of the remaining part, without the tail."""

    @property
    def is_edited(self) -> bool:
        """Whether it differs from the transcript."""
        return self._log is not None

    def view(self, tail: tuple[AgentMessage, ...]) -> MessageView:
        """Return the edited transcript with this tail."""
        assert self._log is not None
        return self._log.view(tail)

    def follow(
        self, view: MessageView, estimator: TokenEstimator, tools: Mapping[str, AgentTool]
    ) -> None:
        """Add the messages since the last turn, or all messages of a different transcript."""
        if not view.grew_from(self._seen):
            self._forget(None)
        new = view[self._seen.stable if self._seen is not None else 0 : view.stable]
        for message in new:
            if isinstance(message, ToolResultMessage):
                if _is_plan(message, tools):
                    self._plans[message.tool_name] = message
            elif self._task is None and isinstance(message, AssistantMessage):
                self._task = len(self._costs)
            self._costs.append(estimator.estimate_message(message))
        self.total += sum(self._costs[len(self._costs) - len(new) :])
        if self._log is not None:
            self._log.extend(new)
        self._seen, self._estimator, self._tools = view, estimator, tools

    def shrink(
        self, excess: int, surplus: int, tail: tuple[AgentMessage, ...]
    ) -> tuple[AgentMessage, ...] | None:
        """Trim results, oldest first, then drop turns. Return the tail if it had to be trimmed too.

        ``excess`` is the number of tokens above the target, ``surplus`` that above the maximum.
        """
        end = min(len(self._costs), len(self._costs) + len(tail) - _PROTECTED)
        saved = self._trim(end, excess)
        trimmed: tuple[AgentMessage, ...] | None = None
        if saved < excess and len(tail) > _PROTECTED:
            trimmed, more = self._trimmed_tail(tail, excess - saved)
            saved += more
        if self._drops_turns:
            if saved < excess:
                saved += self._drop(_newest_turn, excess - saved)
            if saved < surplus:
                self._drop(_last_words, surplus - saved)
        return trimmed

    def _items(self) -> list[AgentMessage]:
        if self._log is not None:
            return list(self._log)
        assert self._seen is not None
        return list(self._seen[: self._seen.stable])

    def _at(self, index: int) -> AgentMessage:
        if self._log is not None:
            return self._log[index]
        assert self._seen is not None
        return self._seen[index]

    # --- results ------------------------------------------------------------------------------

    def _trim(self, end: int, excess: int) -> int:
        """Replace the content of results by the marker, oldest first. Return the tokens saved."""
        items: list[AgentMessage] | None = None
        saved = 0
        while saved < excess and self._next < end:
            index = self._next
            self._next += 1
            trimmed = self._trimmed(self._at(index))
            if trimmed is None:
                continue
            if items is None:
                items = self._items()
            items[index] = trimmed
            cost = self._estimator.estimate_message(trimmed)
            saved += self._costs[index] - cost
            self._costs[index] = cost
        if items is not None:
            self._log = MessageLog(items)
        self.total -= saved
        return saved

    def _trimmed_tail(
        self, tail: tuple[AgentMessage, ...], excess: int
    ) -> tuple[tuple[AgentMessage, ...], int]:
        estimate = self._estimator.estimate_message
        items, saved = list(tail), 0
        for index in range(len(items) - _PROTECTED):
            if saved >= excess:
                break
            trimmed = None if _is_plan(items[index], self._tools) else self._trimmed(items[index])
            if trimmed is not None:
                saved += estimate(items[index]) - estimate(trimmed)
                items[index] = trimmed
        return tuple(items), saved

    def _trimmed(self, message: AgentMessage) -> ToolResultMessage | None:
        """Return the result with the marker as its content; None if it cannot be trimmed."""
        if not isinstance(message, ToolResultMessage) or message.content == self._marker:
            return None
        if self._is_pinned(message):
            return None
        return replace(message, content=self._marker)

    def _is_pinned(self, message: AgentMessage) -> bool:
        if isinstance(message, ToolResultMessage) and (
            self._plans.get(message.tool_name) is message
        ):
            return True
        return self._pinned is not None and self._pinned(message)

    # --- turns --------------------------------------------------------------------------------

    def _drop(self, until: Callable[[Sequence[AgentMessage]], int], excess: int) -> int:
        """Drop as many of the oldest turns as necessary. Return the tokens saved."""
        if self._task is None:
            return 0  # there is only the task
        items, costs = self._items(), self._costs
        gap = [] if self._has_gap else [_LEFT_OUT]
        gap_costs = [self._estimator.estimate_message(message) for message in gap]
        excess += sum(gap_costs)
        newest, asked = until(items), _newest_of_user(items)
        start = place = self._task + self._has_gap
        kept: list[int] = []
        saved = 0
        while saved < excess and place < newest:
            next_turn = _end_of_turn(items, place)
            if next_turn > newest:
                break
            for index in self._stays(items, range(place, next_turn), asked):
                kept.append(index)
                saved -= costs[index]
            saved += sum(costs[place:next_turn])
            place = next_turn
        saved -= sum(gap_costs)
        if saved <= 0:
            return 0
        items[start:place] = [*gap, *[items[index] for index in kept]]
        costs[start:place] = [*gap_costs, *[costs[index] for index in kept]]
        self._next = max(start, self._next + len(gap) + len(kept) - (place - start))
        self._has_gap = True
        self.total -= saved
        self._log = MessageLog(items)
        return saved

    def _stays(self, items: Sequence[AgentMessage], turn: range, asked: int) -> Sequence[int]:
        """Return what to keep of a turn: all of it if a message in it is pinned; of others, what
        the user has said last, and what a compaction of the transcript has left.
        """
        if any(self._is_pinned(items[index]) for index in turn):
            return turn
        return [index for index in turn if index == asked or mark_of(items[index]) is not None]


def _is_plan(message: AgentMessage, tools: Mapping[str, AgentTool]) -> bool:
    """Return whether a message is a plan, which is pinned until there is a newer one."""
    tool = tools.get(message.tool_name) if isinstance(message, ToolResultMessage) else None
    return tool is not None and tool.history_policy.pins_active_plan


def _end_of_turn(items: Sequence[AgentMessage], place: int) -> int:
    """Return the end of the turn that begins here: notes, an answer, and its tool results."""
    while place < len(items) and not isinstance(items[place], AssistantMessage):
        place += 1
    place += 1
    while place < len(items) and isinstance(items[place], ToolResultMessage):
        place += 1
    return min(place, len(items))


def _newest_turn(items: Sequence[AgentMessage]) -> int:
    """Return the start of the newest turn that has an answer."""
    place = len(items) - 1
    while place > 0 and not isinstance(items[place], AssistantMessage):
        place -= 1
    while place > 0 and not isinstance(items[place - 1], (AssistantMessage, ToolResultMessage)):
        place -= 1
    return place


def _last_words(items: Sequence[AgentMessage]) -> int:
    """Return the end of the newest answer, or the start of its turn if it waits for results."""
    for place in range(len(items), 0, -1):
        answer = items[place - 1]
        if isinstance(answer, AssistantMessage):
            return _newest_turn(items) if answer.tool_calls else place
    return 0


def _newest_of_user(items: Sequence[AgentMessage]) -> int:
    place = len(items) - 1
    while place >= 0 and not isinstance(items[place], UserMessage):
        place -= 1
    return place


def _share(tokens: int, fraction: float) -> int:
    """Return the fraction of the tokens, rounded half up, without binary rounding errors."""
    return floor(round(tokens * fraction, 6) + 0.5)
