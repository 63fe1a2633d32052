"""The ladder of output caps rises with every step, stays under its ceiling, and ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import MaxTokensRecovery
from clark_agent.recovery import Double, Fixed, Linear, TokenScaling

LARGEST = 2**32 - 1

scalings: st.SearchStrategy[TokenScaling] = st.one_of(
    st.just(Double()),
    st.builds(Linear, st.integers(-5, 2**20)),
    st.builds(Fixed, st.lists(st.integers(-5, 2**20), max_size=6).map(tuple)),
)


@given(scalings, st.none() | st.integers(0, 2**32), st.integers(0, 2**32))
def test_every_cap_is_larger_than_the_one_before_and_under_the_ceiling(
    scaling: TokenScaling, ceiling: int | None, start: int
) -> None:
    recovery = MaxTokensRecovery(max_attempts=40, scaling=scaling, ceiling=ceiling)
    caps = [start]
    for attempt in range(recovery.max_attempts):
        cap = recovery.next_cap(caps[-1], attempt)
        if cap is None:
            break
        assert cap > caps[-1]
        assert cap <= (LARGEST if ceiling is None else ceiling)
        caps.append(cap)
    if isinstance(scaling, Double):
        assert len(caps) <= 40, "32 bits are used up after 33 doublings"
    if isinstance(scaling, Fixed):
        assert len(caps) - 1 <= len(scaling.caps)


def ladder(recovery: MaxTokensRecovery, start: int) -> list[int]:
    caps: list[int] = []
    for attempt in range(recovery.max_attempts):
        cap = recovery.next_cap(caps[-1] if caps else start, attempt)
        if cap is None:
            break
        caps.append(cap)
    return caps


@pytest.mark.parametrize(
    ("recovery", "caps"),
    [
        (MaxTokensRecovery(), [200, 400, 800]),
        (MaxTokensRecovery.doubling(), [200, 400, 800]),
        (MaxTokensRecovery.doubling(5, ceiling=500), [200, 400, 500]),
        (MaxTokensRecovery.doubling(5, ceiling=100), []),
        (MaxTokensRecovery(scaling=Linear(50), ceiling=210), [150, 200, 210]),
        (MaxTokensRecovery(scaling=Linear(0)), []),
        (MaxTokensRecovery(scaling=Fixed((300, 900)), max_attempts=9), [300, 900]),
        (MaxTokensRecovery(scaling=Fixed((300, 200, 900)), max_attempts=9), [300]),
        (MaxTokensRecovery(scaling=Fixed(()), max_attempts=9), []),
        (MaxTokensRecovery(max_attempts=0), []),
    ],
)
def test_ladders_from_a_cap_of_100(recovery: MaxTokensRecovery, caps: list[int]) -> None:
    assert ladder(recovery, 100) == caps


def test_without_a_ceiling_32_bits_are_the_ceiling() -> None:
    recovery = MaxTokensRecovery.doubling(100)
    assert ladder(recovery, 2**31)[-1] == LARGEST
    assert recovery.next_cap(LARGEST, 0) is None
    assert recovery.next_cap(0, 0) is None, "nothing to double"
