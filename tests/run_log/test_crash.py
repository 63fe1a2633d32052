"""Runs that are killed at any moment, and disks that are full at any byte.

The processes that die are started by `tests.run_log.crash_driver`; this only looks at what it says.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.run_log.crash_driver import KINDS
from tests.sizes import DISK_STEPS, KILLS


def drive(*arguments: object) -> dict[str, int]:
    """Run the driver to its end; what it has counted."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.run_log.crash_driver", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return {name: int(number) for name, number in [pair.split("=") for pair in ran.stdout.split()]}


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


def test_a_full_disk_stops_a_run_that_can_go_on_later_in_files() -> None:
    counted = drive("--stores", "jsonl", "--full-disk", 200, 30_000, 30_000 // DISK_STEPS)
    assert counted["jsonl-resumed"] > 3
    assert counted["jsonl-done"] > 0
    assert counted["jsonl-dropped"] > 3
    assert counted["jsonl-whole"] > 0


def test_a_full_disk_stops_a_run_that_can_go_on_later_in_a_database() -> None:
    counted = drive(
        "--stores", "sqlite", "--full-disk", 150_000, 4_000_000, 4_000_000 // DISK_STEPS
    )
    assert counted["sqlite-resumed"] > 2
    assert counted["sqlite-done"] > 0
    assert counted["sqlite-dropped"] > 2
    assert counted["sqlite-whole"] > 0
