"""How long a transport waits, how often it tries, how long prompts are kept: for every provider."""

from __future__ import annotations

import math
import random
from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct

from clark_agent.errors import ConfigError

__all__ = ["CacheTime", "RetryPolicy", "Timeouts", "cache_mark", "checked_cache"]

CacheTime: TypeAlias = Literal["5m", "1h"]
"""How long a provider keeps a prompt in its cache: five minutes or one hour."""


class Timeouts(Struct, frozen=True, kw_only=True):
    """How long to wait, in seconds; None: for ever."""

    connect: float | None = 15.0
    """Until the connection stands."""
    idle: float | None = 300.0
    """Without a single byte. Some models think in silence for minutes; a server's keep-alives count
    as a sign of life."""
    total: float | None = 1800.0
    """For the whole answer, attempts and the pauses between them included."""

    def __post_init__(self) -> None:
        for name in ("connect", "idle", "total"):
            value: Any = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise ConfigError(f"Timeouts.{name} must be seconds above 0 or None, not {value!r}")


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """When to ask again after a rate limit or an outage, as long as nothing has been shown.

    The pause doubles from ``first_delay`` to ``max_delay``, and a random part of up to half of it
    is taken off, so that many clients do not come back at once. A server that says how long to wait
    is heeded, unless that is more than is left of ``max_elapsed``: then the failure is told.
    """

    attempts: int = 4
    """How often in all; 1 never asks again."""
    first_delay: float = 0.5
    max_delay: float = 30.0
    max_elapsed: float = 120.0
    """No further attempt begins once so many seconds have passed since the first."""

    def __post_init__(self) -> None:
        attempts: Any = self.attempts
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise ConfigError(f"RetryPolicy.attempts must be at least 1, not {attempts!r}")
        for name in ("first_delay", "max_delay", "max_elapsed"):
            value: Any = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise ConfigError(f"RetryPolicy.{name} must be at least 0 seconds, not {value!r}")

    def delay(self, attempt: int, retry_after: float | None = None) -> float:
        """How long to wait after the failed attempt of that number, from 1."""
        if retry_after is not None:
            return retry_after
        longest = min(self.max_delay, self.first_delay * 2.0 ** min(attempt - 1, 62))
        return longest * random.uniform(0.5, 1.0)


def checked_cache(given: Any) -> CacheTime | bool:
    """The setting, if it is one. Raises `ConfigError`."""
    if not isinstance(given, bool) and given not in get_args(CacheTime):
        raise ConfigError(f"cache must be '5m', '1h', True or False, not {given!r}")
    return given  # type: ignore[no-any-return]


def cache_mark(cache: CacheTime | bool) -> dict[str, str]:
    """What marks a block up to which the prompt is to be kept, in Anthropic's words."""
    return {"type": "ephemeral", **({"ttl": cache} if isinstance(cache, str) else {})}


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer that no clock can count to
        return False
