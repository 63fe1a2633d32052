"""Runs whose workers are killed, stopped or told to leave, on each engine.

The processes that die are started by `tests.durable.kill_driver`, which also says what must hold.
`make test-distributed` does the same with more runs.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.durable import servers
from tests.durable.fleet import ENGINES
from tests.sizes import DISTRIBUTED_RUNS

pytestmark = [pytest.mark.slow, pytest.mark.soak]


def drive(*arguments: object) -> dict[str, int]:
    """Run the driver to its end; what it has counted."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.durable.kill_driver", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pairs = [pair.split("=") for pair in ran.stdout.split() if "=" in pair]
    return {name: int(number) for name, number in pairs}


GIVEN = ("--runs", DISTRIBUTED_RUNS, "--workers", 3, "--pace", 0.05)
BLOWS = ("--blows", DISTRIBUTED_RUNS // 5)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_run_is_lost_and_no_call_begins_twice(
    engine: str, postgres_server: servers.Postgres, request: pytest.FixtureRequest
) -> None:
    own = ["--engine", engine, "--url", postgres_server.url]
    if engine == "temporal":
        own += ["--address", request.getfixturevalue("temporal_address")]
    counted = drive(*GIVEN, *own, *BLOWS, "--lease", 1)
    assert counted["runs"] == DISTRIBUTED_RUNS
    assert counted["sigkill"] > 0
    assert counted["sigstop"] > 0


@pytest.mark.parametrize("store", ["sqlite", "jsonl"])
def test_runs_in_files_survive_their_workers(store: str) -> None:
    counted = drive(*GIVEN, *BLOWS, "--store", store)
    assert counted["sigkill"] > 0


def test_runs_survive_a_crash_of_the_database() -> None:
    try:
        servers.postgres_programs()
    except servers.Missing as missing:
        pytest.skip(str(missing))
    counted = drive(*GIVEN, "--stop-postgres", "--lease", 1, "--blows", 0)
    assert counted["crashes"] == 1


def test_a_worker_that_is_told_to_leave_leaves_no_call_uncertain(
    postgres_server: servers.Postgres,
) -> None:
    counted = drive(*GIVEN, *BLOWS, "--drain", "--url", postgres_server.url)
    assert counted["sigterm"] > 0
    assert counted["uncertain"] == 0
