"""Runs that wait, in stores that write in the background, and with several processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clark_agent import LoopOutcome, run
from clark_agent.replay import replay
from clark_agent.run_log import RunLog, fold, resume
from tests.run_log.storing import KINDS, open_store
from tests.run_log.waiting_stories import ROOT, WAITING, begin, settle


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WAITING)
async def test_a_story_in_a_store_ends_and_replays(name: str, kind: str, tmp_path: Path) -> None:
    store, told = open_store(kind, tmp_path), begin(name)
    config = told.config(RunLog(store))
    result = await run(told.prompts, told.context, config)
    while result.outcome is LoopOutcome.SUSPENDED:
        await settle(store, result, told)
        result = await resume(store, ROOT, config)
    assert fold(store.load(ROOT)).messages == list(result.messages)
    again = begin(name)
    async with asyncio.timeout(20):
        report = await replay(store, ROOT, again.config())
    assert str(report.drift) == "None"
    assert not again.ran
