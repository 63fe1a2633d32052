"""The stories of runs that wait, and processes that decide at once, in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from clark_agent import LoopOutcome, run
from clark_agent.replay import replay
from clark_agent.run_log import RunLog, fold, resume
from clark_agent.run_log.postgres import PostgresStore
from tests.run_log.decision_driver import play
from tests.run_log.waiting_stories import ROOT, WAITING, begin, settle

pytestmark = pytest.mark.slow


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    with_tables = PostgresStore(postgres_url)
    yield with_tables
    with_tables.close()


@pytest.mark.parametrize("name", WAITING)
async def test_a_story_ends_and_replays(name: str, store: PostgresStore) -> None:
    told = begin(name)
    config = told.config(RunLog(store))
    result = await run(told.prompts, told.context, config)
    while result.outcome is LoopOutcome.SUSPENDED:
        await settle(store, result, told)
        result = await resume(store, ROOT, config)
    assert fold(store.load(ROOT)).messages == list(result.messages)
    assert [*store.runs_waiting()] == []
    again = begin(name)
    async with asyncio.timeout(60):
        report = await replay(store, ROOT, again.config())
    assert str(report.drift) == "None"
    assert not again.ran


def test_processes_that_decide_and_continue_the_same_runs(postgres_url: str) -> None:
    play(postgres_url, 6, 30, replays=3)
