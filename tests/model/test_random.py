"""Random lives, each with a random end, and every promise holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.scenarios import HOOKS
from tests.model.world import FAULTS, HOOK_TEMPERS, TEMPERS, Cancel, Scenario, live
from tests.sizes import LIVES

pytestmark = [pytest.mark.slow, pytest.mark.soak]

batches = st.lists(st.sampled_from(TEMPERS), min_size=1, max_size=4).map(tuple)
steps = st.one_of(batches, batches, st.sampled_from(FAULTS), st.just("so it is"))
fallback = {
    "plain_text_terminal_fallback_tool": "terminal",
    "plain_text_terminal_fallback_eager": True,
}
limits = st.fixed_dictionaries(
    {},
    optional={
        "max_iterations": st.integers(1, 5),
        "grace_iterations": st.integers(0, 3),
        "max_tool_calls_per_turn": st.integers(1, 3),
        "empty_outcome_retry_budget": st.integers(0, 2),
        "tool_timeout": st.just(0.004),
        "hook_timeout": st.just(0.002),
        "default_execution_mode": st.sampled_from(["parallel", "sequential"]),
    },
)
scenarios = st.builds(
    Scenario,
    script=st.lists(steps, max_size=4).map(tuple),
    hooks=st.dictionaries(st.sampled_from(HOOKS), st.sampled_from(HOOK_TEMPERS), max_size=3),
    settings=st.builds(lambda a, b: {**a, **b}, limits, st.sampled_from([{}, {}, fallback])),
    steering=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    aborting_siblings=st.booleans(),
    exclusive=st.booleans(),
    repeated_ids=st.booleans(),
)
cancels = st.one_of(
    st.none(),
    st.builds(
        Cancel,
        st.integers(1, 60),
        st.sampled_from(["token", "task", "thread"]),
        st.integers(0, 6),
    ),
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Failing hooks are logged, as they should be, thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@settings(max_examples=LIVES, suppress_health_check=list(HealthCheck))
@given(scenarios, cancels)
def test_any_life(scenario: Scenario, cancel: Cancel | None) -> None:
    asyncio.run(live(scenario, cancel))
