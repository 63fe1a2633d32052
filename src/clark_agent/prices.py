"""What tokens cost: prices that the host gives, and those of the package genai-prices.

A price is found by the name of the model, and the provider that serves it. Prices of the host come
first. Other prices come from genai-prices (the extra ``prices``), which is loaded when the first
price is looked up. It brings a table of prices with it; nothing is downloaded.

This module does not know runs and budgets: `Bill` has the tokens of a run, and computes their cost
when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from msgspec import Struct, field

from clark_agent._extras import load_extra
from clark_agent.errors import ConfigError
from clark_agent.types import Usage

__all__ = ["Bill", "ModelRef", "ModelUsage", "Price", "find_price", "price_of"]

_MILLION = 1_000_000


class Price(Struct, frozen=True, kw_only=True):
    """The price of a model's tokens, per million, in any currency.

    Tokens read from a cache or written to it cost as much as other input, unless set.
    """

    input: float
    output: float
    cache_read: float | None = None
    cache_write: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cache_read", "cache_write"):
            value: Any = getattr(self, name)
            if value is None and name.startswith("cache"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ConfigError(f"Price.{name} must be a number of at least 0, not {value!r}")

    def of(self, usage: Usage) -> float:
        """The cost of what a provider reports."""
        cache_read = self.input if self.cache_read is None else self.cache_read
        cache_write = self.input if self.cache_write is None else self.cache_write
        return (
            usage.input_tokens * self.input
            + usage.output_tokens * self.output
            + usage.cache_read_input_tokens * cache_read
            + usage.cache_creation_input_tokens * cache_write
        ) / _MILLION


class ModelRef(Struct, frozen=True, gc=False, omit_defaults=True):
    """The names of a model, to find its price with."""

    model_id: str | None = None
    """The ``model_id`` of the config."""
    model: str | None = None
    """The ``model`` of the transport."""
    provider: str | None = None
    """The ``provider`` of the transport."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model that are known, first that of the config."""
        return tuple(dict.fromkeys([name for name in (self.model_id, self.model) if name]))

    @classmethod
    def of(cls, model_id: str | None, stream: object) -> ModelRef:
        """The model of a config, with what its transport says about itself."""
        return cls(model_id, _text(stream, "model"), _text(stream, "provider"))


def _text(stream: object, name: str) -> str | None:
    value: Any = getattr(stream, name, None)
    return value if isinstance(value, str) else None


# --- finding a price --------------------------------------------------------------------------

_PROVIDERS = {"z.ai": "zai"}
"""Names of our transports that genai-prices does not know, and its own for them."""


@lru_cache(maxsize=1024)
def price_of(model_id: str, provider: str | None = None) -> Price | None:
    """The price of a model in US dollars, from genai-prices; None if it does not know the model.

    ``provider`` is the name of the server's owner, such as ``openai`` or ``openrouter``; without
    it, the model's own vendor. A provider that is not known has no prices: the same model may cost
    something else there.

    It is the price at the time of the first call. Of a price that depends on the length of the
    request, it is the one for short requests. Raises `ConfigError` if genai-prices is not
    installed.
    """
    package: Any = load_extra("genai_prices", "prices", "the price of a model")
    known = None if provider is None else _PROVIDERS.get(provider.lower(), provider)
    try:
        found = package.calc_price(package.Usage(), model_id, provider_id=known).model_price
    except LookupError:
        return None
    amounts = {
        name: _amount(getattr(found, f"{name}_mtok"))
        for name in ("input", "output", "cache_read", "cache_write")
    }
    if amounts["input"] is None or amounts["output"] is None:
        return None  # it is paid by the hour, by the page, …, or the price is missing
    return Price(**amounts)  # type: ignore[arg-type]


def _amount(price: Any) -> float | None:
    """The number of dollars; the first one if the price has tiers."""
    return None if price is None else float(getattr(price, "base", price))


def find_price(model: ModelRef, prices: Mapping[str, Price]) -> Price | None:
    """The price among those of the host, or from genai-prices; None if neither has one.

    Raises `ConfigError` if genai-prices is needed and not installed.
    """
    for name in model.names:
        if name in prices:
            return prices[name]
    for name in model.names:
        if (price := price_of(name, model.provider)) is not None:
            return price
    return None


# --- the cost of a run ------------------------------------------------------------------------


class ModelUsage(Struct, frozen=True):
    """The tokens of one model."""

    model: ModelRef
    usage: Usage


class Bill(Struct, frozen=True):
    """The tokens of a run by model, and their cost. Prices are looked up when the cost is read."""

    own: tuple[ModelUsage, ...] = ()
    """The run itself. One model, unless the run was resumed with another."""
    below: tuple[ModelUsage, ...] = ()
    """The runs below it."""
    prices: Mapping[str, Price] = field(default_factory=dict)
    """Those that the host gave."""

    @property
    def cost(self) -> float | None:
        """The cost of the run itself; None if the price of a model is not known."""
        return self._cost(self.own)

    @property
    def tree_cost(self) -> float | None:
        """The cost of the run and of the runs below it; None if the price of one is not known."""
        return self._cost((*self.own, *self.below))

    def _cost(self, parts: Iterable[ModelUsage]) -> float | None:
        cost = 0.0
        for part in parts:
            try:
                price = find_price(part.model, self.prices)
            except ConfigError:  # genai-prices is not installed, and no limit needs it
                return None
            if price is None:
                return None
            cost += price.of(part.usage)
        return cost
