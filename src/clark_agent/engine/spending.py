"""What a run spends: its tokens, those of the runs below it, and its share of budgets.

Nothing here raises: `clark_agent.messages.tokens.CachingEstimator` handles a host's estimator that
fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from clark_agent.budget import Budget, BudgetLimit, Meter, Spent
from clark_agent.clock import Clock
from clark_agent.engine.transcript import Transcript
from clark_agent.protocol import BUDGET_WRAP_UP
from clark_agent.types import AssistantMessage, SystemMessage, Usage

__all__ = ["RunCost", "Spending"]

RunCost: TypeAlias = tuple[int, Usage, str | None]
"""Turns, tokens and model of a run."""


_NOTHING = Usage()


class Spending:
    """The counts of one run, which it adds to those above it too."""

    usage = Usage()
    """The tokens of this run."""
    below = _NOTHING
    """The tokens of the runs below it."""

    def __init__(
        self,
        budget: Budget | None,
        model_id: str | None,
        clock: Clock,
        transcript: Transcript,
        *,
        above: Spending | None = None,
        deadline: Meter | None = None,
    ) -> None:
        self._model_id = model_id
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
    def tree_usage(self) -> Usage:
        """The tokens of this run and of those below it."""
        return self.usage if self.below is _NOTHING else self.usage + self.below

    def begin_turn(self) -> None:
        """Count a turn."""
        for meter in self.meters:
            meter.begin_turn()

    def spend(self, message: AssistantMessage) -> None:
        """Count the tokens of an answer, here and above. Missing usage is estimated."""
        usage = message.usage
        if usage is not None:
            self.usage += usage
            self._count_above(usage)
        if self.meters:
            if usage is None:
                if not message.content:
                    return
                output = self._transcript.estimator.estimate_message(message)
                usage = Usage(self._transcript.tokens(), output)
            for meter in self.meters:
                meter.spend(usage, self._model_id)

    def _count_above(self, usage: Usage) -> None:
        above = self._above
        while above is not None:
            above.below += usage
            above = above._above

    def spend_below(self, costs: Iterable[RunCost]) -> None:
        """Count direct child runs whose answers are not counted one by one."""
        for turns, usage, model_id in costs:
            self.below += usage
            self._count_above(usage)
            for meter in self.meters:
                meter.restore(turns, usage, model_id)

    def restore(self, usage: Usage, below: Usage, costs: Iterable[RunCost], worked_ms: int) -> None:
        """Count what other processes have spent on the run."""
        self.usage, self.below = usage, below
        for meter in self.meters:
            meter.restore_time(worked_ms)
        for turns, used, model_id in costs:
            for meter in self.meters:
                meter.restore(turns, used, model_id)

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
