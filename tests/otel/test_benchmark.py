"""The benchmark of tracing runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_it_measures_with_tracing_on_and_off() -> None:
    command = [sys.executable, "-m", "benchmarks.trace", "--ours", "--turns", "2", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[:2] for row in rows[1:]] == [["clark-agent", "off"], ["clark-agent", "on"]]
    assert float(rows[2][-2]) > 0
