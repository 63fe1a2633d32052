"""Cancelled at every suspension point, by token, by task and from a thread, every promise holds."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

import clark_agent as ca
from tests.model.scenarios import SCENARIOS
from tests.model.world import Cancel, live

pytestmark = pytest.mark.slow


def test_there_is_enough_to_sweep() -> None:
    assert len(SCENARIOS) >= 30


@pytest.mark.parametrize("name", SCENARIOS)
async def test_every_suspension_point(name: str) -> None:
    scenario = SCENARIOS[name]
    points = (await live(scenario)).points
    assert points > 0, "a life that never waits cannot be cancelled"
    aborted = 0
    for at, passes in product(range(1, points + 1), (0, 3)):
        by_token = await live(scenario, Cancel(at, "token", passes))
        by_thread = await live(scenario, Cancel(at, "thread", passes))
        by_task = await live(scenario, Cancel(at, "task", passes))
        aborted += isinstance(by_token.outcome, ca.RunAborted)
        aborted += isinstance(by_thread.outcome, ca.RunAborted)
        aborted += isinstance(by_task.outcome, asyncio.CancelledError)
    assert aborted > 0, "no cancellation had any effect"


async def test_a_task_that_is_cancelled_at_its_first_wait_is_cancelled() -> None:
    life = await live(SCENARIOS["one fast tool"], Cancel(1, "task"))
    assert isinstance(life.outcome, asyncio.CancelledError)
    cause = life.outcome.__cause__
    assert isinstance(cause, ca.RunAborted)
    assert cause.messages
