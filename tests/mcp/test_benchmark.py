"""The benchmark of MCP calls runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.transports.servers.child import ROOT

pytestmark = pytest.mark.slow


def test_it_compares_both_transports() -> None:
    command = [sys.executable, "-m", "benchmarks.mcp_calls", "--calls", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["stdio", "HTTP"]
    assert all(float(row[-1]) > 0 for row in rows)
