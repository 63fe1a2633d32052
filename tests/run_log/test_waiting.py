"""A run that waits goes on exactly once, whatever dies behind whichever record."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from clark_agent import LoopOutcome, RunResult
from clark_agent.errors import InvalidContinuationError
from clark_agent.events import AgentEvent
from clark_agent.history import repair_history
from clark_agent.replay import replay
from clark_agent.run_log import RunLog, RunStore, fold, resume
from clark_agent.run_log.records import Record, ToolEnded, ToolStarted
from clark_agent.testing import check_events, fold_events
from tests.run_log.stories import undated
from tests.run_log.waiting_stories import (
    ROOT,
    WAITING,
    begin,
    carry_on,
    live,
    store_with,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", WAITING)
async def test_a_story_waits_and_comes_to_its_end(name: str) -> None:
    told, result, store, parts = await live(name)
    assert len(parts) > 1 or name == "a_tree_that_waits_nowhere"
    assert result.outcome.is_complete
    for events in parts:
        check_events(events)
    every: list[AgentEvent] = [event for events in parts for event in events]
    assert fold_events(every) == result.messages
    assert fold(store.load(ROOT)).messages == list(result.messages)
    assert repair_history(result.messages).changes == ()
    assert max(Counter(told.ran).values()) == 1 or name in _SAME_IDS


_SAME_IDS = {"a_tree_with_a_budget", "agents_side_by_side"}
"""Stories in which several runs of one agent have calls with the same ids."""


@pytest.mark.parametrize("name", WAITING)
async def test_a_replay_of_all_its_parts_is_identical(name: str) -> None:
    _, _, store, _ = await live(name)
    again = begin(name)
    async with asyncio.timeout(20):
        report = await replay(store_with(store.order), ROOT, again.config())
    assert str(report.drift) == "None"
    assert not again.ran
    assert not again.was_asked


def effects(store: RunStore) -> Counter[tuple[str, str, int]]:
    """How often each call of each run was started."""
    count: Counter[tuple[str, str, int]] = Counter()
    for summary in store.runs():
        for record in store.load(summary.run_id).records:
            if isinstance(record.entry, ToolStarted):
                entry = record.entry
                count[summary.run_id, entry.tool_call_id, entry.position] += 1
    return count


def uncertain(store: RunStore) -> list[ToolEnded]:
    """The calls, in all runs, of which nothing is known."""
    return [
        record.entry
        for summary in store.runs()
        for record in store.load(summary.run_id).records
        if isinstance(record.entry, ToolEnded)
        and record.entry.by_runtime is not None
        and record.entry.by_runtime.kind == "uncertain"
    ]


def agents(told: Any) -> set[str]:
    return {"helper", "level1", "level2", "level3"}


@pytest.mark.parametrize("name", WAITING)
async def test_a_tree_goes_on_behind_every_record(name: str) -> None:
    """Cut the logs of all its runs behind each record, in the order in which they were written."""
    _, result, store, _ = await live(name)
    problems: list[str] = []
    for cut in range(1, len(store.order)):
        tag = store.order[cut - 1].entry.__struct_config__.tag
        where = f"behind {cut - 1} ({store.order[cut - 1].run} {tag})"
        try:
            await check_cut(name, store.order[:cut], result)
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else ""
            problems.append(f"{where}: {type(error).__name__}: {first}")
    assert problems == []


async def check_cut(name: str, records: list[Record], outcome: RunResult) -> None:
    if records[-1].entry.__struct_config__.tag == "run_ended" and records[-1].run == ROOT:
        return
    store, told = store_with(records), begin(name)
    told.clock.time_ms = max([record.at for record in records])
    async with asyncio.timeout(20):
        result = await carry_on(store, told)
    assert result.outcome.is_complete
    assert fold(store.load(ROOT)).messages == list(result.messages)
    assert repair_history(result.messages).changes == ()
    # No tool was started twice, except agents that were taken up and tools that may be.
    idempotent = {tool.name for tool in told.config().registry.values() if tool.idempotent}
    names = {
        (r.run, r.entry.tool_call_id, r.entry.position): r.entry.tool_name
        for r in store.order
        if isinstance(r.entry, ToolStarted)
    }
    twice = [names[key] for key, count in effects(store).items() if count > 1]
    assert set(twice) <= idempotent | agents(told)
    assert len(uncertain(store)) <= sum_of_open(records)
    if not uncertain(store):
        assert undated(result.messages) == undated(outcome.messages)
        assert (result.outcome, result.output) == (outcome.outcome, outcome.output)
    async with asyncio.timeout(20):
        again = begin(name)
        report = await replay(store_with(store.order), ROOT, again.config())
    assert str(report.drift) == "None", f"replay: {report.drift}"
    assert not again.ran


def sum_of_open(records: list[Record]) -> int:
    """How many tools, other than agents, had started and have no end."""
    open_calls: set[tuple[str, str, int]] = set()
    for record in records:
        match record.entry:
            case ToolStarted(tool_call_id=call_id, position=position, tool_name=name):
                if name not in agents(None):
                    open_calls.add((record.run, call_id, position))
            case ToolEnded(tool_call_id=call_id, position=position):
                open_calls.discard((record.run, call_id, position))
            case _:
                pass
    return len(open_calls)


@pytest.mark.parametrize("name", WAITING)
async def test_a_run_that_has_ended_cannot_be_resumed(name: str) -> None:
    told, _, store, _ = await live(name)
    with pytest.raises(InvalidContinuationError):
        await resume(store, ROOT, told.config(RunLog(store)))


@pytest.mark.parametrize("name", [n for n in WAITING if n != "a_tree_that_waits_nowhere"])
async def test_resuming_too_early_changes_nothing(name: str) -> None:
    from clark_agent import run

    told, store = begin(name), store_with([])
    config = told.config(RunLog(store))
    first = await run(told.prompts, told.context, config)
    assert first.outcome is LoopOutcome.SUSPENDED
    assert not first.outcome.is_complete
    before, ran = len(store.order), list(told.ran)
    for _ in range(2):
        again = await resume(store, ROOT, config)
        assert again.waiting == first.waiting
        assert again.messages == first.messages
        assert again.outcome is LoopOutcome.SUSPENDED
    assert (len(store.order), told.ran) == (before, ran)
