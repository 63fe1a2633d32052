"""The system's clock tells the time and gives ids that do not repeat."""

from __future__ import annotations

import asyncio
from time import time
from uuid import UUID

import pytest

from clark_agent.clock import Clock, SystemClock, now_ms


def test_now_is_in_milliseconds_of_the_unix_epoch() -> None:
    clock: Clock = SystemClock()
    before = int(time() * 1000)
    readings = [now_ms(), clock.now_ms(), now_ms()]
    after = int(time() * 1000)
    assert all(type(reading) is int for reading in readings)
    assert before <= readings[0] <= readings[1] <= readings[2] <= after


def test_ids_are_random_uuids() -> None:
    clock = SystemClock()
    ids = [clock.new_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(UUID(new_id).version == 4 and str(UUID(new_id)) == new_id for new_id in ids)


async def test_sleep_lets_others_run_and_takes_its_time() -> None:
    order: list[str] = []

    async def sleep(seconds: float, name: str) -> None:
        await SystemClock().sleep(seconds)
        order.append(name)

    await asyncio.gather(sleep(0.03, "later"), sleep(0, "sooner"))
    assert order == ["sooner", "later"]


async def test_sleep_can_be_cancelled() -> None:
    task = asyncio.create_task(SystemClock().sleep(3600))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
