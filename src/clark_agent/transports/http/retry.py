"""Settings of all transports: time limits, retries and prompt caching."""

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
    """Time limits in seconds; None: no limit."""

    connect: float | None = 15.0
    """Limit for opening the connection."""
    idle: float | None = 300.0
    """Limit without a single byte. Some models think for minutes without output; keep-alives from
    the server reset it."""
    total: float | None = 1800.0
    """Limit for the whole answer, with all attempts and the pauses between them."""

    def __post_init__(self) -> None:
        for name in ("connect", "idle", "total"):
            value: Any = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise ConfigError(f"Timeouts.{name} must be seconds above 0 or None, not {value!r}")


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """When to retry an attempt that failed by a rate limit or an outage and emitted no chunk.

    The pause doubles from ``first_delay`` to ``max_delay``. It is shortened at random by up to
    half, so that many clients do not retry at once. If the server states how long to wait, that
    value is used; if it exceeds what is left of ``max_elapsed``, the failure is reported instead.
    """

    attempts: int = 4
    """The number of attempts in all; 1 disables retries."""
    first_delay: float = 0.5
    max_delay: float = 30.0
    max_elapsed: float = 120.0
    """No attempt starts later than this many seconds after the first."""

    def __post_init__(self) -> None:
        attempts: Any = self.attempts
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise ConfigError(f"RetryPolicy.attempts must be at least 1, not {attempts!r}")
        for name in ("first_delay", "max_delay", "max_elapsed"):
            value: Any = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise ConfigError(f"RetryPolicy.{name} must be at least 0 seconds, not {value!r}")

    def delay(self, attempt: int, retry_after: float | None = None) -> float:
        """Seconds to wait after the failed attempt of that number, counted from 1."""
        if retry_after is not None:
            return retry_after
        longest = min(self.max_delay, self.first_delay * 2.0 ** min(attempt - 1, 62))
        return longest * random.uniform(0.5, 1.0)


def checked_cache(given: Any) -> CacheTime | bool:
    """Return the setting. Raises `ConfigError` if it is not valid."""
    if not isinstance(given, bool) and given not in get_args(CacheTime):
        raise ConfigError(f"cache must be '5m', '1h', True or False, not {given!r}")
    return given  # type: ignore[no-any-return]


def cache_mark(cache: CacheTime | bool) -> dict[str, str]:
    """Return Anthropic's ``cache_control``, which marks the end of a cached prompt prefix."""
    return {"type": "ephemeral", **({"ttl": cache} if isinstance(cache, str) else {})}


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer that is too large for a float
        return False
