"""Settings: what makes no sense is refused, and pauses keep within their bounds."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import ConfigError
from clark_agent.transports import (
    Anthropic,
    Gemini,
    OpenAIChat,
    OpenAIResponses,
    ProxyStream,
    RetryPolicy,
    Timeouts,
    connect,
)

NO_NUMBERS = [True, False, "5", b"5", [5], object(), math.nan, Decimal(5), 5j]


# --- time limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("connect", value) for value in (0, 0.0, -1, -0.5, -math.inf, *NO_NUMBERS)],
        ("idle", 0),
        ("total", 0),
    ],
)
def test_a_time_limit_that_makes_no_sense_is_refused_by_name(name: str, value: Any) -> None:
    text = re.escape(f"Timeouts.{name} must be seconds above 0 or None, not {value!r}")
    with pytest.raises(ConfigError, match=text):
        Timeouts(**{name: value})


@pytest.mark.parametrize("value", [None, 1, 0.001, 5e-324, 10**9, math.inf])
def test_any_time_above_nothing_will_do(value: Any) -> None:
    limits = Timeouts(connect=value, idle=value, total=value)
    assert (limits.connect, limits.idle, limits.total) == (value, value, value)


def test_by_default_every_wait_has_an_end() -> None:
    limits = Timeouts()
    assert limits.connect is not None
    assert limits.idle is not None
    assert limits.total is not None
    assert limits.connect < limits.idle < limits.total < math.inf


# --- retries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [0, -1, 1.0, 2.5, None, *NO_NUMBERS])
def test_attempts_are_a_number_from_one(attempts: Any) -> None:
    text = re.escape(f"RetryPolicy.attempts must be at least 1, not {attempts!r}")
    with pytest.raises(ConfigError, match=text):
        RetryPolicy(attempts=attempts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("first_delay", value) for value in (-1, -5e-324, -math.inf, None, *NO_NUMBERS)],
        ("max_delay", -1),
        ("max_elapsed", -1),
    ],
)
def test_a_pause_that_makes_no_sense_is_refused_by_name(name: str, value: Any) -> None:
    text = re.escape(f"RetryPolicy.{name} must be at least 0 seconds, not {value!r}")
    with pytest.raises(ConfigError, match=text):
        RetryPolicy(**{name: value})


@pytest.mark.parametrize(
    ("kind", "name"), [(Timeouts, "total"), (Timeouts, "idle"), (RetryPolicy, "max_delay")]
)
def test_a_number_too_large_for_a_float_is_refused_like_any_other(kind: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__}.{name}"):
        kind(**{name: 10**400})


def test_settings_cannot_be_changed_or_given_by_position() -> None:
    settings: Any = [Timeouts(), RetryPolicy()]
    for setting in settings:
        with pytest.raises(AttributeError):
            setting.total = 1
        with pytest.raises(TypeError):
            type(setting)(1)


seconds = st.floats(0, 1e6) | st.integers(0, 10**6) | st.just(math.inf)


@given(st.integers(1, 10**6), seconds, seconds)
def test_a_pause_doubles_up_to_the_longest_and_at_most_half_is_taken_off(
    attempt: int, first: float, longest: float
) -> None:
    policy = RetryPolicy(first_delay=first, max_delay=longest)
    # Past 2 ** 62 nothing is left that could be waited for.
    whole = min(longest, first * 2.0 ** min(attempt - 1, 62))
    assert whole / 2 <= policy.delay(attempt) <= whole


@given(st.integers(1, 100), st.floats(0, 1e9), seconds)
def test_a_server_that_says_how_long_is_taken_at_its_word(
    attempt: int, asked: float, longest: float
) -> None:
    assert RetryPolicy(max_delay=longest).delay(attempt, asked) == asked


def test_the_pauses_of_many_clients_are_spread() -> None:
    policy = RetryPolicy(first_delay=8, max_delay=8)
    pauses = [policy.delay(1) for _ in range(400)]
    quarters = {int(pause) for pause in pauses}
    assert quarters == {4, 5, 6, 7}  # each missing with a chance of 0.75 ** 400


def test_by_default_the_longest_pause_is_shorter_than_all_of_them_may_take() -> None:
    policy = RetryPolicy()
    assert policy.first_delay < policy.max_delay < policy.max_elapsed
    assert policy.attempts > 1


# --- where and as whom ------------------------------------------------------------------------

EVERYBODY: list[Any] = [OpenAIChat, OpenAIResponses, Anthropic, Gemini]
NO_ADDRESSES = ["localhost:8000/v1", "ftp://h/v1", "h", "http://", "http://[::1", "http://h:99999"]


@pytest.mark.parametrize("make", EVERYBODY)
@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_refused_when_the_transport_is_made(make: Any, url: str) -> None:
    with pytest.raises(ConfigError, match="base_url must be the address of a server, as in http"):
        make("m", base_url=url, api_key="k")


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_of_a_gateway(url: str) -> None:
    with pytest.raises(ConfigError, match="address of a server"):
        ProxyStream(url)


@pytest.mark.parametrize("model", ["http://[::1#m", "http://h:99999#m", "gateway+http://[#m"])
def test_a_string_with_an_address_that_is_none(model: str) -> None:
    with pytest.raises(ConfigError):
        connect(model)


@pytest.mark.parametrize("make", EVERYBODY)
@pytest.mark.parametrize("key", [7, b"secret"])
def test_a_key_is_a_text(make: Any, key: Any) -> None:
    with pytest.raises(ConfigError, match="api_key must be a string, not ") as told:
        make("m", base_url="http://localhost:1", api_key=key)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("make", EVERYBODY)
def test_a_header_is_a_text(make: Any) -> None:
    with pytest.raises(ConfigError, match="the header 'x' must be a string, not int"):
        make("m", base_url="http://localhost:1", api_key="k", headers={"x": 7})
