"""Runs that are killed at any moment, or wanted by several, and disks that are full at any byte.

The processes that die are started by `tests.run_log.crash_driver`; this only looks at what it says.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.run_log.contention_driver import ROUNDS
from tests.run_log.crash_driver import KINDS
from tests.run_log.decision_driver import STORES
from tests.sizes import DECIDED_RUNS, DISK_STEPS, FELLED_WAITS, KILLS

pytestmark = [pytest.mark.slow, pytest.mark.soak]


def drive(*arguments: object, driver: str = "crash_driver") -> dict[str, int]:
    """Run the driver to its end; what it has counted."""
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.run_log.{driver}", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    pairs = [pair.split("=") for pair in ran.stdout.split() if "=" in pair]
    return {name: int(number) for name, number in pairs}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives_being_killed_at_any_moment(kind: str) -> None:
    """What must hold of a life is written down in the driver."""
    counted = drive("--stores", kind, "--rounds", KILLS)
    assert counted["deaths"] >= KILLS
    # The moments were all over the run.
    assert counted["nothing"] > 0
    assert counted["run_began"] > 0
    assert counted["run_resumed"] > 0
    assert counted["tool_started"] > KILLS // 15
    assert counted["tool_ended"] > KILLS // 15


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_of_several_processes_that_want_a_run_one_makes_its_calls(
    kind: str, processes: int
) -> None:
    """They resume one, and begin one, at the same moment; the rules are in the driver."""
    given = ("--stores", kind, "--processes", processes, "--rounds", ROUNDS)
    counted = drive(*given, driver="contention_driver")
    assert counted["won"] == 2 * ROUNDS
    assert counted["busy"] > ROUNDS


@pytest.mark.parametrize("kind", STORES)
def test_of_several_who_decide_about_runs_and_continue_them_one_counts(kind: str) -> None:
    """Six processes (or threads); the rules are in the driver."""
    counted = drive("--stores", kind, "--runs", DECIDED_RUNS, driver="decision_driver")
    assert counted["runs"] == DECIDED_RUNS
    assert counted["decided"] == 4 * DECIDED_RUNS
    assert counted["ended"] == 6 * DECIDED_RUNS
    assert counted["late"] > DECIDED_RUNS // 2
    assert counted["busy"] > DECIDED_RUNS // 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_that_waits_survives_being_killed_at_any_moment(kind: str) -> None:
    """Workers and deciders die; what must hold of a life is written down in the driver."""
    rounds = FELLED_WAITS // 2
    counted = drive("--stores", kind, "--rounds", rounds, driver="waiting_driver")
    assert counted["lives"] == rounds
    assert counted["worker"] > rounds
    assert counted["decider"] > rounds


def test_a_full_disk_stops_a_run_that_can_go_on_later_in_files() -> None:
    counted = drive("--stores", "jsonl", "--full-disk", 200, 30_000, 30_000 // DISK_STEPS)
    assert counted["jsonl-resumed"] > 3
    assert counted["jsonl-done"] > 0
    assert counted["jsonl-dropped"] > 3
    assert counted["jsonl-whole"] > 0


def test_a_full_disk_stops_a_run_that_can_go_on_later_in_a_database() -> None:
    counted = drive(
        "--stores", "sqlite", "--full-disk", 150_000, 1_600_000, 1_450_000 // DISK_STEPS
    )
    assert counted["sqlite-resumed"] > 2
    assert counted["sqlite-done"] > 0
    assert counted["sqlite-dropped"] > 2
    assert counted["sqlite-whole"] > 0
