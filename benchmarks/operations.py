"""How many operations each workload takes, compared with the numbers in `operations.json`.

Seconds depend on the machine and its load. The bytecodes that a workload executes and the functions
in C that it calls do not: they depend on the minor version of Python alone. So a change is compared
with the numbers that are pinned for each version:

    python -m benchmarks.operations          # compare; fails when a count is more than 2 % too high
    python -m benchmarks.operations --pin    # write the counts of this version of Python

The work for N units, 2N and 4N is counted. The number is what a unit takes between 2N and 4N, so
that what a run takes once is left out. There a unit may not take more than one between N and 2N.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TypeAlias

import msgspec

import clark_agent
from benchmarks import clark
from benchmarks.counting import Operations
from benchmarks.run_log import one_run
from benchmarks.work import seen
from clark_agent import dump_transcript, load_transcript
from clark_agent.engine import pace
from clark_agent.run_log import JsonlStore, RunLog

PINS = Path(__file__).with_name("operations.json")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
GROWTH = 1.05
"""How much more a unit among many may take than one among few."""
TOLERANCE = 0.02
"""How far a count may be from its pin."""

Counts: TypeAlias = dict[str, float]
Pins: TypeAlias = dict[str, Counts]
Work: TypeAlias = Callable[[], Awaitable[object]]


# --- counting -----------------------------------------------------------------------------------


async def counted(work: Work) -> int:
    """The operations of the work. All of it runs in tasks of its own, from their first step."""
    with Operations() as operations:
        await asyncio.create_task(_awaited(work))
    return operations.count


async def _awaited(work: Work) -> None:
    await work()


async def per_unit(name: str, size: int, prepare: Callable[[int], Work]) -> float:
    """What a unit takes among many. The work is prepared before it is counted."""
    await counted(prepare(size))  # what is done once, for good, is done now
    one, two, four = [await counted(prepare(size * factor)) for factor in (1, 2, 4)]
    early, late = (two - one) / size, (four - two) / (2 * size)
    check_growth(name, (2 * size, early), (4 * size, late))
    return late


def check_growth(name: str, few: tuple[int, float], many: tuple[int, float]) -> None:
    grown = [f"{count:,.1f} operations at {size:,}" for size, count in (few, many)]
    assert many[1] <= GROWTH * few[1], f"{name} grows: {grown[0]}, {grown[1]}"


# --- the workloads ------------------------------------------------------------------------------


def turns(size: int) -> Work:
    return partial(clark.turns, size)


def agent_turns(size: int) -> Work:
    return partial(clark.agent_turns, size)


@contextmanager
def logged_turns() -> Iterator[Callable[[int], Work]]:
    with TemporaryDirectory() as folder:
        store, numbers = JsonlStore(folder), count()
        yield lambda size: partial(one_run, size, RunLog(store), f"run {next(numbers)}")


def deltas(size: int, *, listeners: int) -> Work:
    return partial(clark.stream, size, listeners)


def calls(size: int) -> Work:
    return partial(clark.batch, size, nap=0)


def runs(size: int) -> Work:
    async def work() -> None:
        await asyncio.gather(*[clark.short_run(0) for _ in range(size)])

    return work


def messages(size: int) -> Work:
    history = clark.history(size)

    async def work() -> None:
        load_transcript(dump_transcript(history))

    return work


async def behind_a_history(name: str, short: int = 1_000, long: int = 4_000) -> float:
    await _behind(short)  # what is done once, for good, is done now
    few, many = await _behind(short), await _behind(long)
    check_growth(name, (short, few), (long, many))
    return many


async def _behind(size: int, turns: int = 20) -> float:
    """What a turn behind a history of that size takes, from the second turn on."""
    past = clark.history(size)
    with Operations() as operations:
        seen.clock = lambda: operations.count
        await asyncio.create_task(_awaited(partial(clark.append, turns, past)))
    seen.clock = perf_counter
    return seen.since_second_turn / (turns - 1)


IMPORT = """
import sys
sys.path += sys.argv[1:]
import asyncio, msgspec
from benchmarks.counting import Operations
with Operations() as operations:
    import clark_agent
print(operations.count)
"""


def importing() -> float:
    """What an import takes beyond those of asyncio and msgspec, in a fresh interpreter.

    It starts without site-packages, from where anything might be loaded, and with hashes that are
    not random, since a few operations depend on the order of a set.
    """
    places = {Path(__file__).parents[1]}
    places |= {Path(str(module.__file__)).parents[1] for module in (clark_agent, msgspec)}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", IMPORT, *sorted(map(str, places))],
        env={**environment, "PYTHONHASHSEED": "0"},
        check=True,
        stdout=subprocess.PIPE,
    )
    return float(done.stdout)


async def count_all() -> Counts:
    # Counting takes time, and a run that takes long pauses for others; how often is the machine's.
    vars(pace)["monotonic"] = lambda: -1.0
    with logged_turns() as logged:
        return {
            "W1 turn": await per_unit("W1", 50, turns),
            "W1 turn, agent": await per_unit("W1, agent,", 50, agent_turns),
            "W1 turn, logged": await per_unit("W1, logged,", 50, logged),
            "W2 delta": await per_unit("W2", 500, partial(deltas, listeners=1)),
            "W2 delta, unheard": await per_unit("W2, unheard,", 500, partial(deltas, listeners=0)),
            "W3 call": await per_unit("W3", 50, calls),
            "W4 run": await per_unit("W4", 20, runs),
            "W5 import": importing(),
            "W6 turn behind a history": await behind_a_history("W6"),
            "W7 message read and written": await per_unit("W7", 400, messages),
        }


# --- comparing ----------------------------------------------------------------------------------


def compare(pinned: Counts, now: Counts) -> tuple[str, bool]:
    """A table, and whether every count has its pin and none is too high."""
    rows, passed = [f"{'':28}{'pinned':>12}{'now':>12}{'change':>10}"], True
    for name in {**pinned, **now}:
        before, after = pinned.get(name), now.get(name)
        figures = [f"{'' if count is None else f'{count:,.1f}':>12}" for count in (before, after)]
        change = f"{after / before - 1:+.1%}" if before and after is not None else ""
        verdict, good = judge(before, after)
        rows.append(f"{name:28}{''.join(figures)}{change:>10}  {verdict}".rstrip())
        passed &= good
    return "\n".join(rows), passed


def judge(pinned: float | None, now: float | None) -> tuple[str, bool]:
    if pinned is None:
        return "not pinned", False
    if now is None:
        return "not counted", False
    if now > pinned * (1 + TOLERANCE):
        return "too high", False
    if now < pinned * (1 - TOLERANCE):
        return "lower: pin it", True
    return "", True


def read_pins() -> Pins:
    return msgspec.json.decode(PINS.read_bytes(), type=Pins) if PINS.exists() else {}


def write_pins(now: Counts) -> None:
    pins = {**read_pins(), VERSION: {name: round(count, 1) for name, count in now.items()}}
    ordered = dict(sorted(pins.items(), key=lambda item: [int(n) for n in item[0].split(".")]))
    PINS.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=2) + b"\n")


def check(*, pin: bool = False) -> bool:
    """Count everything, print it beside its pins, and say whether all is well."""
    now = asyncio.run(count_all())
    pinned = read_pins().get(VERSION, {})
    table, passed = compare(pinned, now)
    print(f"operations of a unit, Python {VERSION}:\n{table}", flush=True)
    if pin:
        write_pins(now)
        print(f"written to {PINS.name}")
    elif not pinned:
        print(f"nothing is pinned for Python {VERSION}, so nothing is compared; see make bench-pin")
    elif not passed:
        print("make it cheaper, or say in the commit what it buys and run make bench-pin")
    return pin or not pinned or passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pin", action="store_true", help="write the counts of this Python")
    sys.exit(not check(pin=parser.parse_args().pin))
