"""`make bench-log`: what it costs to log a run, and to find one again.

Each run is timed with and without its log, in turns; what counts is the ratio.

    python -m benchmarks.run_log [--turns 1000] [--rounds 7] [--runs 10000]
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.clark import calling, echo
from benchmarks.work import count_event
from clark_agent import AgentContext, LoopConfig, RunIdentity, RunResult, dump_transcript, run
from clark_agent.run_log import JsonlStore, RunLog, RunStore, SqliteStore, fold


async def one_run(turns: int, run_log: RunLog | None, run_id: str) -> tuple[float, RunResult]:
    config = LoopConfig(
        stream=calling(turns), tools=[echo], event_sink=count_event, run_log=run_log
    )
    context = AgentContext(identity=RunIdentity.root(run_id))
    began = perf_counter()
    result = await run("go", context, config)
    return perf_counter() - began, result


async def cost(store: RunStore, turns: int, rounds: int) -> tuple[float, float, RunResult]:
    """Seconds without and with a log, the best of all rounds, and the last result."""
    plain: list[float] = []
    logged: list[float] = []
    result: RunResult | None = None
    for number in range(rounds):
        plain.append((await one_run(turns, None, "unlogged"))[0])
        seconds, result = await one_run(turns, RunLog(store), f"run {number}")
        logged.append(seconds)
    assert result is not None
    return min(plain), min(logged), result


def timed_load(store: RunStore, run_id: str) -> float:
    times: list[float] = []
    for _ in range(5):
        began = perf_counter()
        fold(store.load(run_id))
        times.append(perf_counter() - began)
    return median(times)


async def main(turns: int, rounds: int, runs: int, folder: Path) -> None:
    jsonl, sqlite = JsonlStore(folder / "runs"), SqliteStore(folder / "runs.db")
    stores: dict[str, JsonlStore | SqliteStore] = {"JsonlStore": jsonl, "SqliteStore": sqlite}
    print(f"{turns:,} turns, best of {rounds} rounds, nothing forced to the disk")
    for name, store in stores.items():
        plain, logged, result = await cost(store, turns, rounds)
        print(
            f"{name:12}  a turn {plain / turns * 1e6:.0f} µs, logged {logged / turns * 1e6:.0f} µs,"
            f" ratio {logged / plain:.2f}; loaded and folded in"
            f" {timed_load(store, 'run 0') * 1e3:.0f} ms"
        )
        transcript = len(dump_transcript(result.messages))
        size = jsonl.path_of("run 0").stat().st_size
        print(f"{'':12}  as JSON lines the log is {size / transcript:.1f} times the transcript")
    for number in range(runs):
        await one_run(1, RunLog(sqlite), f"small {number}")
    began = perf_counter()
    found = list(sqlite.runs())
    listed = perf_counter() - began
    began = perf_counter()
    list(sqlite.runs(limit=50))
    newest = perf_counter() - began
    print(
        f"SqliteStore: {len(found):,} runs listed in {listed * 1e3:.0f} ms,"
        f" the newest 50 in {newest * 1e3:.1f} ms"
    )
    sqlite.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", type=int, default=10_000)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        asyncio.run(main(given.turns, given.rounds, given.runs, Path(folder)))
