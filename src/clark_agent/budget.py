"""Budget: what a run and all the runs below it may spend together.

A `Budget` is a setting and never changes. Each run that starts with one gets a `Meter`, which its
child runs share: what any of them spends counts for all. Before a limit is reached, each of them
gets a message to wrap up, once; when it is reached, no further turn begins, and the run ends as
`out_of_budget`. Only the time limit also stops what is in progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from clark_agent.clock import Clock
from clark_agent.errors import ConfigError
from clark_agent.prices import ModelRef, Price, find_price
from clark_agent.types import Usage

__all__ = ["Budget", "BudgetLimit", "Meter", "Spent"]


class BudgetLimit(StrEnum):
    """A limit of a budget."""

    TURNS = "turns"
    TOKENS = "tokens"
    COST = "cost"
    SECONDS = "seconds"


class Budget(Struct, frozen=True, kw_only=True):
    """Limits for a run and its children together. None is unlimited, 0 allows nothing.

    ``tokens`` counts input and output, cached or not. An answer without usage is estimated with the
    config's estimator. ``cost`` is in US dollars, unless ``prices`` has the price of every model.
    Each model needs a price: from ``prices``, or from the package genai-prices (the extra
    ``prices``).
    """

    turns: int | None = None
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None
    """Wall time from the start of the outermost run. For a run that is resumed, the time in which
    processes worked on it; not the time in between."""
    prices: Mapping[str, Price] = field(default_factory=dict)
    """By the ``model_id`` of the config, or the ``model`` of its transport. They come before those
    of genai-prices."""
    wrap_up_at: float | None = 0.8
    """The share of a limit at which the model is asked to wrap up; None disables the message."""
    message: str | None = None
    """The text of that message, instead of the default."""

    def __post_init__(self) -> None:
        for limit in BudgetLimit:
            value: Any = getattr(self, limit)
            if value is None:
                continue
            whole = limit in (BudgetLimit.TURNS, BudgetLimit.TOKENS)
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                wanted = "a whole number" if whole else "a number"
                raise ConfigError(f"Budget.{limit} must be {wanted} or None, not {value!r}")
            if not value >= 0:
                raise ConfigError(f"Budget.{limit} must be at least 0 or None, not {value}")
        prices: Any = self.prices
        if not isinstance(prices, Mapping) or not all(
            isinstance(price, Price) for price in prices.values()
        ):
            raise ConfigError(f"Budget.prices must be a Price for each model_id, not {prices!r}")
        message: Any = self.message
        if message is not None and not isinstance(message, str):
            raise ConfigError(f"Budget.message must be a text, not {message!r}")
        share: Any = self.wrap_up_at
        is_share = isinstance(share, (int, float)) and not isinstance(share, bool)
        if share is not None and not (is_share and 0 < share <= 1):
            raise ConfigError(f"Budget.wrap_up_at must be above 0 and at most 1, not {share!r}")

    def check_model(self, model: ModelRef) -> None:
        """Raise `ConfigError` if the price of the model is needed and not known."""
        if self.cost is None:
            return
        if not model.names:
            raise ConfigError("Budget.cost needs the name of the model: set model_id in the config")
        name = model.names[0]
        give = f"set Budget.prices={{{name!r}: Price(input=..., output=...)}}"
        try:
            price = find_price(model, self.prices)
        except ConfigError as error:
            text = (
                f"Budget.cost has no price for the model {name!r}: {give}, or look it up: {error}"
            )
            raise ConfigError(text) from None
        if price is None:
            at = "" if model.provider is None else f" of the provider {model.provider!r}"
            raise ConfigError(f"Budget.cost has no price for the model {name!r}{at}: {give}")

    def price_of(self, model: ModelRef) -> Price | None:
        """The price of the model; None if it is not known, or not wanted: without ``cost`` and
        ``prices``, costs are not counted.
        """
        if self.cost is None and not self.prices:
            return None
        try:
            return find_price(model, self.prices)
        except ConfigError:  # genai-prices is not installed
            return None


class Spent(Struct, frozen=True):
    """What a run and its children have spent of their budget."""

    turns: int = 0
    tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0


class Meter:
    """Counts what a tree of runs spends. For the loop."""

    __slots__ = (
        "_clock",
        "_cost",
        "_prices",
        "_started_ms",
        "_tokens",
        "_turns",
        "budget",
        "is_out_of_time",
    )

    def __init__(self, budget: Budget, clock: Clock) -> None:
        self.budget = budget
        self._clock = clock
        self._started_ms = clock.now_ms()
        self._turns = 0
        self._tokens = 0
        self._cost = 0.0
        self._prices: dict[ModelRef, Price | None] = {}
        self.is_out_of_time = False
        """Set by the run whose timer went off."""

    def begin_turn(self) -> None:
        """Count a turn of any run in the tree."""
        self._turns += 1

    def spend(self, usage: Usage, model: ModelRef) -> None:
        """Count the tokens of a model call."""
        self._tokens += (
            usage.input_tokens
            + usage.output_tokens
            + usage.cache_creation_input_tokens
            + usage.cache_read_input_tokens
        )
        try:
            price = self._prices[model]
        except KeyError:
            price = self._prices[model] = self.budget.price_of(model)
        if price is not None:
            self._cost += price.of(usage)

    def restore(self, turns: int, usage: Usage, model: ModelRef) -> None:
        """Count what another process has spent."""
        self._turns += turns
        self.spend(usage, model)

    def restore_time(self, milliseconds: int) -> None:
        """Count the time that another process has worked."""
        self._started_ms -= milliseconds

    def spent(self) -> Spent:
        """All that was spent so far."""
        seconds = max(0, self._clock.now_ms() - self._started_ms) / 1000
        return Spent(self._turns, self._tokens, self._cost, seconds)

    def seconds_left(self) -> float | None:
        """The time that is left; None: no limit."""
        limit = self.budget.seconds
        return None if limit is None else max(0.0, limit - self.spent().seconds)

    def reached(self) -> BudgetLimit | None:
        """The limit that leaves no room for another turn."""
        return self._over(1.0)

    def nearly_reached(self) -> BudgetLimit | None:
        """The limit to warn the model about, in a turn that is about to begin and already counted.

        The first turn never has a warning, and the last always has one.
        """
        share = self.budget.wrap_up_at
        if share is None or self._turns <= 1:
            return None
        if self._turns == self.budget.turns:
            return BudgetLimit.TURNS
        return self._over(share, turns=self._turns - 1)

    def _over(self, share: float, *, turns: int | None = None) -> BudgetLimit | None:
        if self.is_out_of_time:
            return BudgetLimit.SECONDS
        spent = self.spent()
        if turns is not None:
            spent = replace(spent, turns=turns)
        for limit in BudgetLimit:
            most: float | None = getattr(self.budget, limit)
            if most is not None and getattr(spent, limit) >= most * share:
                return limit
        return None
