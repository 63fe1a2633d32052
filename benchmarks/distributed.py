"""`make bench-distributed`: turns of runs that survive their process, on the same servers.

The model and the tool do nothing, so what is measured is the price of durability: ours in a file,
in Postgres, on DBOS and on Temporal, and Pydantic AI on DBOS and on Temporal. The subjects take
turns, and each figure is the best of its rounds. The table goes to docs/benchmarks/distributed.md.

    python -m benchmarks.distributed [--rounds 3] [--only NAME ...] [--no-write]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.durable_runs import RUNS, SHORT, TURNS
from benchmarks.frameworks import ROOT, Framework
from tests.durable import servers

PAGE = ROOT / "docs" / "benchmarks" / "distributed.md"
PEER = Framework(
    "pydantic-ai-durable",
    "benchmarks.peers.pydantic_ai_durable",
    ("pydantic-ai-slim[dbos,temporal]==2.66.0", "psycopg[binary]>=3.2"),
    "from pydantic_ai import Agent",
    "pydantic-ai-slim",
)


class Subject(NamedTuple):
    """What is measured, and the module that does."""

    title: str
    argument: str
    is_peer: bool = False


SUBJECTS = (
    Subject("`SqliteStore`", "sqlite"),
    Subject("`PostgresStore`", "postgres"),
    Subject("`PostgresStore`, `group_commit=False`", "postgres-each"),
    Subject("DBOS", "dbos"),
    Subject("Temporal", "temporal"),
    Subject("Pydantic AI on DBOS", "dbos", is_peer=True),
    Subject("Pydantic AI on Temporal", "temporal", is_peer=True),
)


def measure(subject: Subject, url: str, address: str, folder: str) -> dict[str, float]:
    python = PEER.python if subject.is_peer else sys.executable
    module = PEER.module if subject.is_peer else "benchmarks.durable_runs"
    ran = subprocess.run(
        [str(python), "-m", module, subject.argument, url, address, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_path(subject)])},
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not lines:
        raise SystemExit(f"{subject.title}: {ran.stdout}\n{ran.stderr}")
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


def _path(subject: Subject) -> list[str]:
    return [] if subject.is_peer else sys.path


def compare(subjects: Sequence[Subject], rounds: int) -> dict[Subject, dict[str, float]]:
    best: dict[Subject, dict[str, float]] = {}
    with (
        servers.postgres(on_disk=True) as postgres,
        servers.temporal(on_disk=True) as temporal,
    ):
        for number in range(rounds):
            for subject in subjects:
                print(f"round {number + 1}: {subject.title}", file=sys.stderr, flush=True)
                url = postgres.create_database()
                with TemporaryDirectory() as folder:
                    found = measure(subject, url, temporal.address, folder)
                kept = best.setdefault(subject, found)
                kept["ms_turn"] = min(kept["ms_turn"], found["ms_turn"])
                kept["turns_s"] = max(kept["turns_s"], found["turns_s"])
    return best


def table(best: dict[Subject, dict[str, float]]) -> str:
    lines = [
        f"| | ms a turn, one run of {TURNS} turns | turns a second, {RUNS} runs of {SHORT} turns |",
        "|---|--:|--:|",
        *[
            f"| {subject.title} | {found['ms_turn']:.1f} | {found['turns_s']:,.0f} |"
            for subject, found in best.items()
        ],
    ]
    return "\n".join(lines)


def page(figures: str, rounds: int) -> str:
    repeated = "" if rounds == 1 else f"Each figure is the best of {rounds} rounds. "
    return f"""# Runs on several machines

What it costs that a run survives its process. The model is scripted and the tool does nothing, so
these are the turns alone; a real model takes a second or more. Each turn is an answer with one
tool call, and its result.

{figures}

Measured on {date.today()} with Python {platform.python_version()} on {os.cpu_count()} cores: one
worker process, a PostgreSQL with `fsync` on, and a Temporal development server on the same machine.
{repeated}Compare them with each other, not with those of other
machines.

- In the first three rows the process that asks also works, without an engine. A file of SQLite has
  no network, serves one machine, and is not forced to the disk (`durability="system"`), as the
  commits of PostgreSQL are.
- On DBOS and on Temporal, our runs keep their journal in the same `PostgresStore`, and the engine
  knows only their ids.
- Pydantic AI keeps its journal in the engine: a step of DBOS, or an activity of Temporal, for each
  request to the model and each tool call.

To reproduce it: `make bench-distributed`.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="parts of titles")
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    chosen = [
        subject
        for subject in SUBJECTS
        if not given.only or any(part.lower() in subject.title.lower() for part in given.only)
    ]
    if any(subject.is_peer for subject in chosen):
        PEER.install()
    figures = table(compare(chosen, given.rounds))
    print(figures)
    if not given.no_write and not given.only:
        Path(PAGE).write_text(page(figures, given.rounds))


if __name__ == "__main__":
    main()
