"""How many operations each workload takes, compared with the numbers in `operations.json`.

Seconds depend on the machine and its load. The bytecodes that a workload executes and the functions
in C that it calls do not: they depend on the minor version of Python alone. So a change is compared
with the numbers that are pinned for each version:

    python -m benchmarks.operations          # compare; fails when a count is more than 2 % too high
    python -m benchmarks.operations --pin    # write the counts of this version of Python

A pin that is raised needs a `--reason`. `operations.md` records every change of a pin, and the pins
have to be those of the record.

The work for N units, 2N and 4N is counted. The number is what a unit takes between 2N and 4N, so
that what a run takes once is left out. There a unit may not take more than one between N and 2N.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple, TypeAlias

import msgspec

import clark_agent
from benchmarks import clark
from benchmarks.counting import Operations
from benchmarks.results import Counts
from benchmarks.run_log import one_run
from benchmarks.work import seen
from clark_agent import dump_transcript, load_transcript
from clark_agent.engine import pace
from clark_agent.run_log import JsonlStore, RunLog

PINS = Path(__file__).with_name("operations.json")
RECORD = PINS.with_suffix(".md")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
GROWTH = 1.05
"""How much more a unit among many may take than one among few."""
TOLERANCE = 0.02
"""How far a count may be from its pin."""

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


# --- pinning ------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A line of the record: a pin that was changed."""

    date: str
    python: str
    workload: str
    before: float | None
    """None for the first pin of a workload."""
    after: float | None
    """None for a workload that is no longer counted."""
    reason: str

    def __str__(self) -> str:
        return f"| {' | '.join('' if each is None else str(each) for each in self)} |"


def read_record() -> list[Change]:
    """The changes of the pins in `operations.md`, the oldest first."""
    found: list[Change] = []
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| \d", line):
            when, python, workload, before, after, reason = [
                x.strip() for x in line[1:-1].split("|")
            ]
            change = (float(before) if before else None, float(after) if after else None, reason)
            found.append(Change(when, python, workload, *change))
    return found


def replayed(record: list[Change]) -> tuple[Pins, list[Change]]:
    """The pins that the record leads to, and the changes that raised one without a reason."""
    pins: Pins = {}
    unexplained: list[Change] = []
    for change in record:
        counts = pins.setdefault(change.python, {})
        before = counts.get(change.workload)
        if change.after is None:
            counts.pop(change.workload, None)
            continue
        counts[change.workload] = change.after
        if before is not None and change.after > before and not change.reason:
            unexplained.append(change)
    return pins, unexplained


def unrecorded(pins: Pins, record: list[Change]) -> list[str]:
    """Where the pins are not what the record says, and where it lacks a reason."""
    recorded, unexplained = replayed(record)
    found = [f"no reason: {change}" for change in unexplained]
    for python in {**recorded, **pins}:
        here, there = pins.get(python, {}), recorded.get(python, {})
        found += [
            f"Python {python}, {name}: {here.get(name)} in {PINS.name}, "
            f"{there.get(name)} in {RECORD.name}"
            for name in {**there, **here}
            if here.get(name) != there.get(name)
        ]
    return found


def pin(now: Counts, reason: str) -> bool:
    """Write the counts of this Python and the record of the change, unless it lacks a reason."""
    reason = " ".join(reason.replace("|", "/").split())
    rounded = {name: round(count, 1) for name, count in now.items()}
    record = read_record()
    before = replayed(record)[0].get(VERSION, {})
    today = date.today().isoformat()
    added = [
        Change(today, VERSION, name, before.get(name), rounded.get(name), reason)
        for name in {**before, **rounded}
        if before.get(name) != rounded.get(name)
    ]
    unexplained = [change for change in replayed([*record, *added])[1] if change in added]
    if unexplained:
        print("nothing is written, since a pin that is raised needs a reason:")
        print("\n".join(f"  {each.workload}: {each.before} → {each.after}" for each in unexplained))
        print('make bench-pin REASON="what the operations buy"')
        return False
    pins = {**read_pins(), VERSION: rounded}
    ordered = dict(sorted(pins.items(), key=lambda item: [int(n) for n in item[0].split(".")]))
    PINS.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=2) + b"\n")
    with RECORD.open("a", encoding="utf-8") as file:
        file.writelines(f"{change}\n" for change in added)
    print(f"written to {PINS.name} and {RECORD.name}")
    return True


def check() -> bool:
    """Count everything, print it beside its pins, and say whether all is well."""
    pins = read_pins()
    if differences := unrecorded(pins, read_record()):
        print("\n".join(differences))
        print(f"{PINS.name} is not edited by hand: run make bench-pin, which writes both files")
        return False
    pinned = pins.get(VERSION, {})
    passed = show(asyncio.run(count_all()), pinned)
    if not pinned:
        print(f"nothing is pinned for Python {VERSION}, so nothing is compared; see make bench-pin")
    elif not passed:
        print('make it cheaper, or run make bench-pin REASON="what the operations buy"')
    return not pinned or passed


def show(now: Counts, pinned: Counts) -> bool:
    table, passed = compare(pinned, now)
    print(f"operations of a unit, Python {VERSION}:\n{table}", flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pin", action="store_true", help="write the counts of this Python")
    parser.add_argument("--reason", default="", help="why pins are raised")
    parser.add_argument("--json", action="store_true", help="print the counts alone")
    options = parser.parse_args()
    if options.json:
        print(msgspec.json.encode(asyncio.run(count_all())).decode())
    elif options.pin:
        now = asyncio.run(count_all())
        show(now, read_pins().get(VERSION, {}))
        sys.exit(not pin(now, options.reason))
    else:
        sys.exit(not check())


if __name__ == "__main__":
    main()
