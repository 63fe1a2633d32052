"""`make bench-trace`: what tracing adds to a turn of W1, here and in Pydantic AI.

Spans and metrics go to the in-memory exporter and reader of the OpenTelemetry SDK, without content.
All are measured in one run, and take turns; what counts is the best time of each, as a ratio to the
bare loop (see `benchmarks.core`). The packages of Pydantic AI are installed under `.bench/`, once.

    python -m benchmarks.trace [--turns 200] [--rounds 5] [--ours]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.frameworks import FRAMEWORKS, Framework

ROOT = Path(__file__).resolve().parents[1]
TRACED = "opentelemetry-sdk>=1.40,<2"


def peer() -> Framework:
    """Pydantic AI in the version that `make bench` compares with, and the SDK."""
    (known,) = [each for each in FRAMEWORKS if each.name == "pydantic-ai"]
    return Framework(
        "pydantic-ai-traced", known.module, (*known.requirements, TRACED), known.statement
    )


def measured(python: str, module: str, turns: int) -> float:
    """The best time of a run, in seconds."""
    command = [python, "-m", "benchmarks.measure", module, "w1", str(turns)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr.strip()}")
    wall: float = json.loads(done.stdout)["wall"]
    return wall


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ours", action="store_true", help="without Pydantic AI")
    given = parser.parse_args()
    works = [
        ("bare loop", "", sys.executable, "benchmarks.bare"),
        ("clark-agent", "off", sys.executable, "benchmarks.clark"),
        ("clark-agent", "on", sys.executable, "benchmarks.clark_traced"),
    ]
    if not given.ours:
        other = peer()
        other.install()
        python = str(other.python)
        works += [
            ("pydantic-ai", "off", python, "benchmarks.peers.pydantic_ai"),
            ("pydantic-ai", "on", python, "benchmarks.peers.pydantic_ai_traced"),
        ]
    best = [float("inf")] * len(works)
    for _ in range(given.rounds):
        for n, (_, _, python, module) in enumerate(works):
            best[n] = min(best[n], measured(python, module, given.turns))
    print(f"{'':<14}{'tracing':<9}{'µs a turn':>10}{'to bare':>9}{'on to off':>11}{'added µs':>10}")
    for n, ((name, state, _, _), seconds) in enumerate(zip(works, best, strict=True)):
        each = f"{seconds / given.turns * 1e6:>10.1f}{seconds / best[0]:>9.2f}"
        off = best[n - 1]
        more = (seconds - off) / given.turns * 1e6
        added = f"{seconds / off:>11.2f}{more:>10.1f}" if state == "on" else ""
        print(f"{name:<14}{state:<9}{each}{added}", flush=True)


if __name__ == "__main__":
    main()
