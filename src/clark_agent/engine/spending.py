"""What a run spends: its tokens, those of the runs below it, and its share of budgets.

Nothing here raises: `clark_agent.messages.tokens.CachingEstimator` handles a host's estimator that
fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from clark_agent.budget import Budget, BudgetLimit, Meter, Spent
from clark_agent.clock import Clock
from clark_agent.engine.transcript import Transcript
from clark_agent.messages.tokens import estimate_messages
from clark_agent.prices import Bill, ModelRef, ModelUsage, Price
from clark_agent.protocol import BUDGET_WRAP_UP
from clark_agent.types import AgentMessage, AssistantMessage, SystemMessage, Usage

__all__ = ["RunCost", "Spending"]

RunCost: TypeAlias = tuple[int, Usage, ModelRef]
"""Turns, tokens and model of a run."""


_NOTHING = Usage()


class Spending:
    """The counts of one run, which it adds to those above it too."""

    _usage = _NOTHING
    """The tokens of this run, in this process."""
    _earlier: tuple[ModelUsage, ...] = ()
    """Those in other processes."""

    def __init__(
        self,
        budget: Budget | None,
        model: ModelRef,
        clock: Clock,
        transcript: Transcript,
        *,
        above: Spending | None = None,
        deadline: Meter | None = None,
    ) -> None:
        self._model = model
        self._aside: dict[ModelRef, Usage] = {}
        """The tokens of other models that plugins asked, in this process."""
        self._below: dict[ModelRef, Usage] = {}
        self._clock = clock
        self._transcript = transcript
        self._above = above
        self.meters: tuple[Meter, ...] = () if above is None else above.meters
        """Its own meter, unless it shares one from above, then those of the runs above."""
        if budget is not None and all(meter.budget is not budget for meter in self.meters):
            self.meters = (Meter(budget, clock), *self.meters)
        if deadline is not None:
            self.meters = (*self.meters, deadline)

    @property
    def usage(self) -> Usage:
        """The tokens of this run."""
        other = [part.usage for part in self._earlier]
        return sum([*other, *self._aside.values()], self._usage)

    @property
    def tree_usage(self) -> Usage:
        """The tokens of this run and of those below it."""
        return sum(self._below.values(), self.usage)

    def bill(self) -> Bill:
        """The tokens by model, with the prices of the budgets."""
        prices: dict[str, Price] = {}
        for meter in reversed(self.meters):  # its own budget comes first
            prices |= meter.budget.prices
        own = self._earlier
        if not own or self._usage != _NOTHING:
            own = (*own, ModelUsage(self._model, self._usage))
        own = (*own, *[ModelUsage(model, usage) for model, usage in self._aside.items()])
        below = tuple([ModelUsage(model, usage) for model, usage in self._below.items()])
        return Bill(own, below, prices)

    def begin_turn(self) -> None:
        """Count a turn."""
        for meter in self.meters:
            meter.begin_turn()

    def spend(self, message: AssistantMessage) -> None:
        """Count the tokens of an answer, here and above. Missing usage is estimated."""
        usage = message.usage
        if usage is not None:
            self._usage += usage
            if self._above is not None:
                self._above._count_below(usage, self._model)
        if self.meters:
            if usage is None:
                if not message.content:
                    return
                output = self._transcript.estimator.estimate_message(message)
                usage = Usage(self._transcript.tokens(), output)
            for meter in self.meters:
                meter.spend(usage, self._model)

    def spend_aside(
        self, message: AssistantMessage, model: ModelRef | None, sent: Sequence[AgentMessage]
    ) -> None:
        """Count the tokens of an answer to a plugin, from another model if one is given. Missing
        usage is estimated for the budgets.
        """
        usage = message.usage
        if usage is not None:
            if model is None:
                self._usage += usage
            else:
                self._aside[model] = self._aside.get(model, _NOTHING) + usage
            if self._above is not None:
                self._above._count_below(usage, model or self._model)
        elif message.content:
            estimator = self._transcript.estimator
            output = estimator.estimate_message(message)
            usage = Usage(estimate_messages(estimator, sent), output)
        if usage is not None:
            for meter in self.meters:
                meter.spend(usage, model or self._model)

    def _count_below(self, usage: Usage, model: ModelRef) -> None:
        """Count the tokens of a run below, here and above."""
        run: Spending | None = self
        while run is not None:
            run._below[model] = run._below.get(model, _NOTHING) + usage
            run = run._above

    def spend_below(self, costs: Iterable[RunCost]) -> None:
        """Count direct child runs whose answers are not counted one by one."""
        for turns, usage, model in costs:
            self._count_below(usage, model)
            for meter in self.meters:
                meter.restore(turns, usage, model)

    def restore(self, own: Sequence[RunCost], below: Iterable[RunCost], worked_ms: int) -> None:
        """Count what other processes have spent on the run: ``own`` has its own model first. The
        runs above know it already.
        """
        shared = () if self._above is None else self._above.meters
        for meter in [meter for meter in self.meters if meter not in shared]:
            for turns, usage, model in (*own, *below):
                meter.restore(turns, usage, model)
            meter.restore_time(worked_ms)
        self._earlier = tuple(
            [ModelUsage(model, usage) for _, usage, model in own if usage != _NOTHING]
        )
        for _, usage, model in below:
            self._below[model] = self._below.get(model, _NOTHING) + usage

    @property
    def limit(self) -> BudgetLimit | None:
        """The limit that is reached, if any."""
        for meter in self.meters:
            if (limit := meter.reached()) is not None:
                return limit
        return None

    @property
    def is_out_of_time(self) -> bool:
        """Whether a timer went off."""
        return any(meter.is_out_of_time for meter in self.meters)

    def warning(self) -> SystemMessage | None:
        """The message for the model when a limit is nearly reached."""
        for meter in self.meters:
            limit = meter.nearly_reached()
            if limit is not None:
                text = meter.budget.message or BUDGET_WRAP_UP[limit]
                return SystemMessage(text, self._clock.now_ms())
        return None

    def spent(self) -> Spent | None:
        """What was spent of the budget, by all runs that share it."""
        return self.meters[0].spent() if self.meters else None
