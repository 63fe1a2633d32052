"""The operations of a workload are counted exactly, and compared with what is pinned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.operations import compare, judge, read_pins

ROOT = Path(__file__).resolve().parent.parent


def test_every_version_has_the_same_workloads_pinned() -> None:
    first, *others = [list(counts) for counts in read_pins().values()]
    assert first
    assert others == [first] * len(others)


@pytest.mark.parametrize(
    ("pinned", "now", "verdict"),
    [
        (1000, 1000, ("", True)),
        (1000, 1020, ("", True)),
        (1000, 1021, ("too high", False)),
        (1000, 980, ("", True)),
        (1000, 979, ("lower: pin it", True)),
        (0, 0, ("", True)),
        (0, 1, ("too high", False)),
        (None, 1, ("not pinned", False)),
        (1, None, ("not counted", False)),
    ],
)
def test_a_count_beside_its_pin(
    pinned: float | None, now: float | None, verdict: tuple[str, bool]
) -> None:
    assert judge(pinned, now) == verdict


def test_the_table() -> None:
    table, passed = compare({"turn": 1000, "nil": 0, "gone": 1}, {"turn": 1100, "nil": 0})
    assert [line.split() for line in table.splitlines()] == [
        ["pinned", "now", "change"],
        ["turn", "1,000.0", "1,100.0", "+10.0%", "too", "high"],
        ["nil", "0.0", "0.0"],
        ["gone", "1.0", "not", "counted"],
    ]
    assert not passed
    assert compare({"turn": 1000}, {"turn": 990})[1]


COUNTING = """
import asyncio
from benchmarks.operations import counted, per_unit

def steps(size, *, squared=False):
    namespace = {}
    exec(compile("async def work(n):\\n for _ in range(n): abs(1)", "made anew", "exec"), namespace)
    return lambda: namespace["work"](size * size if squared else size)

async def main():
    _, few, again, more = [await counted(steps(size)) for size in (1, 100, 100, 200)]
    assert few == again, "counts differ"
    assert more - few > 400, "not every bytecode is counted"
    assert await per_unit("steps", 100, steps) == (more - few) / 100
    try:
        await per_unit("squares", 10, lambda size: steps(size, squared=True))
    except AssertionError as error:
        print(error)

asyncio.run(main())
"""


def test_operations_are_counted_exactly_and_growth_is_refused() -> None:
    """In another process: this one may be traced for its coverage."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTING], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("squares grows: ")
