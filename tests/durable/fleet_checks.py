"""What must hold when all runs of a fleet have ended, however many workers have died.

Nothing is lost: every run has ended with the messages of a run that nobody disturbs. Nothing began
twice: a call that is not idempotent has at most one line of its beginning. The logs are whole. A
call is uncertain only if its worker was gone when the run was continued.
"""

from __future__ import annotations

import asyncio
import traceback
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct

from clark_agent import LoopOutcome, RunResult
from clark_agent import events as ev
from clark_agent.history import repair_history
from clark_agent.replay import replay
from clark_agent.run_log import (
    LoadedRun,
    MemoryStore,
    RunLog,
    RunStore,
    advance,
    decide,
    fold,
    usage_tree,
)
from clark_agent.run_log.event_stream import EventStream
from clark_agent.run_log.records import Record, RunEnded, RunSuspended
from clark_agent.testing import check_events, fold_events
from tests.durable.fleet import choose, make_agent, prompt_of
from tests.run_log.crash_driver import Probe
from tests.run_log.waiting_driver import (
    Effect,
    Effects,
    check_effects,
    check_log,
    first_of,
    places_of,
    results_of,
)

Logs = dict[str, LoadedRun]


class Blow(Struct, frozen=True):
    """A worker that was killed, stopped or told to leave, and when."""

    at: int
    process: int
    how: str


class Found(Struct):
    """What became of a fleet."""

    problems: list[str]
    uncertain: int = 0
    """Calls of which nobody knows whether they happened."""
    gaps: list[int] = []
    """Milliseconds from a blow to the next record of each run that the worker had."""


def check_fleet(
    store: RunStore,
    run_ids: Sequence[str],
    effects: Sequence[Effect],
    owners: Sequence[tuple[int, int, str]],
    blows: Sequence[Blow],
    folder: Path,
) -> Found:
    found = Found([])
    trees: dict[str, Logs] = {run_id: {} for run_id in run_ids}
    for summary in store.runs():
        loaded = store.load(summary.run_id)
        root = root_of(loaded)
        if root not in trees:
            found.problems.append(f"{summary.run_id}: nobody has asked for it")
        else:
            trees[root][summary.run_id] = loaded
    made: dict[str, list[Effect]] = defaultdict(list)
    root_by_run = {run_id: root for root, logs in trees.items() for run_id in logs}
    for effect in effects:
        made[root_by_run.get(effect.run_id, "")].append(effect)
    found.problems += [f"{effect.key}: an effect of no run" for effect in made.pop("", [])]
    expected = asyncio.run(undisturbed(run_ids, folder))
    for run_id, logs in trees.items():
        try:
            keys = check_tree(store, run_id, logs, made[run_id], expected[run_id])
        except Exception as error:  # also what no check has thought of
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"
            found.problems.append(f"{run_id}: {type(error).__name__}: {error} ({where})")
        else:
            found.uncertain += len(keys)
    found.gaps = gaps(trees, owners, blows)
    return found


def root_of(loaded: LoadedRun) -> str:
    """The outermost run, which the prompt names."""
    prompts = fold(loaded).began.prompts
    return prompts[0].plain_text.split()[1]


async def undisturbed(run_ids: Iterable[str], folder: Path) -> dict[str, RunResult]:
    """The runs as they are if nothing dies."""
    store = MemoryStore()
    effects = Effects(folder / "expected", Probe(None))
    agent = make_agent(effects, None, 0.0, RunLog(store))

    async def live(run_id: str) -> RunResult:
        while True:
            result = await advance(store, run_id, agent, prompt_of(run_id))
            if result.outcome is not LoopOutcome.SUSPENDED:
                return result
            for request in result.waiting:
                await decide(store, run_id, request.request_id, choose(request))

    return {run_id: await live(run_id) for run_id in run_ids}


def check_tree(
    store: RunStore, root: str, logs: Logs, effects: list[Effect], expected: RunResult
) -> set[str]:
    """Check a run and its children; the keys of its uncertain calls."""
    assert root in logs, "it has never begun"
    uncertain: set[str] = set()
    for run_id, loaded in logs.items():
        records = loaded.records
        assert loaded.problems == (), loaded.problems
        assert [record.seq for record in records] == list(range(len(records))), "it has holes"
        assert isinstance(records[-1].entry, RunEnded), f"{run_id} ends with {records[-1].entry}"
        uncertain |= check_log(run_id, records, urgent=False)
        check_event_parts(records, fold(loaded).messages)
    check_effects(logs, effects, uncertain, urgent=False)
    ended = logs[root].records[-1].entry
    assert isinstance(ended, RunEnded)
    assert ended.outcome == LoopOutcome.DONE, ended
    assert usage_tree(store, root).tree_usage == ended.tree_usage
    messages = tuple(fold(logs[root]).messages)
    assert repair_history(messages).changes == ()
    wanted = results_of(expected.messages)
    results = results_of(messages)
    assert results.keys() == wanted.keys(), (results.keys(), wanted.keys())
    lost = {key.split("/", 1)[1] for key in uncertain if key.startswith(f"{root}/")}
    places = places_of(messages)
    different = {places[call_id] for call_id in results if results[call_id] != wanted[call_id]}
    assert different <= lost, f"the results of {different} differ; uncertain: {lost}"
    if not lost:
        same = tuple(expected.messages)
        assert [m.plain_text for m in messages] == [m.plain_text for m in same], first_of(
            messages, same
        )
    return uncertain


def check_event_parts(records: Sequence[Record], messages: Any) -> None:
    """What somebody who follows the run is told is in order, and tells all messages."""
    stream = EventStream()
    parts: list[list[Any]] = []
    for record in records:
        for event in stream.take(record):
            if isinstance(event, ev.AgentStart):
                parts.append([])
            parts[-1].append(event)
    for part in parts:
        check_events(part, requests=False)
    assert list(fold_events(parts[-1]))[-1:] == list(messages)[-1:]


async def check_replays(store: RunStore, run_ids: Iterable[str], folder: Path) -> list[str]:
    """Run logged runs again; what differs."""
    effects = Effects(folder / "replayed", Probe(None))
    agent = make_agent(effects, None, 0.0)
    drifted: list[str] = []
    for run_id in run_ids:
        report = await replay(store, run_id, agent.config)
        if report.drift is not None:
            drifted.append(f"{run_id}: a replay differs: {report.drift}")
    assert effects.read() == [], "a replay had an effect"
    return drifted


def gaps(
    trees: dict[str, Logs], owners: Sequence[tuple[int, int, str]], blows: Sequence[Blow]
) -> list[int]:
    """How long each run stood still that a worker had when it was struck."""
    had: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for at, process, run_id in sorted(owners):
        had[run_id].append((at, process))
    found: list[int] = []
    for run_id, logs in trees.items():
        times = sorted(record.at for loaded in logs.values() for record in loaded.records)
        still = _still(logs[run_id].records) if run_id in logs else []
        for blow in blows:
            place = bisect_right(had[run_id], (blow.at, 1 << 62)) - 1
            if place < 0 or had[run_id][place][1] != blow.process:
                continue
            if any(begin <= blow.at < end for begin, end in still):
                continue
            later = bisect_right(times, blow.at)
            if later < len(times):
                found.append(times[later] - blow.at)
    return sorted(found)


def _still(records: Sequence[Record]) -> list[tuple[int, int]]:
    """When the run was suspended, or had ended."""
    waits = [
        (record.at, after.at)
        for record, after in pairwise(records)
        if isinstance(record.entry, RunSuspended)
    ]
    return [*waits, (records[-1].at, 1 << 62)]
