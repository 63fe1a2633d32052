"""`make bench`: the workloads in every framework, with a model that is scripted and costs nothing.

Each measurement is a process of its own. The frameworks take turns at every size, so that all have
the same weather, and each figure is the best of its rounds. A size that would take longer than the
limit, by how the framework has grown so far, is not run. Figures go to docs/benchmarks/results.json
and from there, by `benchmarks.report`, into the page, its plots and the README.

`--only` measures some frameworks again, together with the bare loop. The rows of the others stay as
they are, with the bare loop of their own run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TypeAlias

import msgspec

from benchmarks import report
from benchmarks.frameworks import CLARK, FRAMEWORKS, ROOT, Framework
from benchmarks.results import BARE, Cell, Counts, Installed, Machine, Results, Run, read

Sizes: TypeAlias = dict[str, tuple[int, ...]]

FULL: Sizes = {
    "w1": (50, 200, 1_000, 5_000),
    "w2": (1_000, 10_000, 100_000),
    "w2-unheard": (1_000, 10_000, 100_000),
    "w3": (64, 1_000),
    "w4": (1_000, 10_000),
    "w6": (50,),
}
QUICK: Sizes = {
    "w1": (50, 200, 1_000),
    "w2": (1_000, 10_000),
    "w2-unheard": (1_000, 10_000),
    "w3": (64, 1_000),
    "w4": (1_000,),
    "w6": (20,),
}
LONG = 10.0
"""Seconds after which a measurement is not repeated in another round."""


class Progress:
    """A bar on a terminal; elsewhere a line for each step that begins."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.started = total, 0, time.monotonic()
        self.on_terminal = sys.stdout.isatty()
        self.said = ""

    def step(self, what: str, detail: str = "") -> None:
        if self.on_terminal:
            filled = round(30 * self.done / self.total)
            elapsed = time.monotonic() - self.started
            bar = f"[{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total} {elapsed:4.0f} s"
            print(f"\r{bar}  {what} {detail}".ljust(100)[:100], end="", flush=True)
        elif what != self.said:
            print(f"{self.done}/{self.total} {what}", flush=True)
        self.said = what
        self.done += 1

    def end(self) -> None:
        if self.on_terminal:
            print("\r" + " " * 100 + "\r", end="")
        print(f"done in {time.monotonic() - self.started:.0f} s", flush=True)


def predicted(cells: list[Cell], size: int) -> float:
    """How long the next size will take, by the sizes so far; growth is at least linear."""
    known = [(cell.size, cell.wall) for cell in cells if cell.wall]
    if not known:
        return 0
    (last, wall), slope = known[-1], 1.0
    if len(known) > 1:
        before, earlier = known[-2]
        slope = max(1.0, math.log(wall / earlier) / math.log(last / before))
    return float(wall * (size / last) ** slope)


def measure(framework: Framework, cell: Cell, limit: float) -> float:
    """Have one measurement made, and note its figures or why there are none; return its seconds."""
    command = framework.command(cell.workload, cell.size)
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=framework.environment,
            capture_output=True,
            text=True,
            timeout=1.5 * limit + 20,
            check=False,
        )
    except subprocess.TimeoutExpired:
        cell.why = f"over {limit:.0f} s"
    else:
        _note(done, cell)
    return time.monotonic() - started


def _note(done: subprocess.CompletedProcess[str], cell: Cell) -> None:
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        cell.why = "fails: " + lines[-1].strip().replace(str(ROOT), ".")
    else:
        cell.add(json.loads(done.stdout.strip().splitlines()[-1]))


def run_workloads(
    frameworks: list[Framework], sizes: Sizes, rounds: int, limit: float
) -> list[Cell]:
    cells: list[Cell] = []
    progress = Progress(rounds * len(frameworks) * sum(map(len, sizes.values())))
    for workload, size in [(w, size) for w, some in sizes.items() for size in some]:
        row: list[Cell] = []
        for framework in frameworks:
            cell = Cell(framework.name, workload, size)
            cannot = framework.cannot
            cell.why = cannot.get(workload, cannot.get(f"{workload} {size}", ""))
            before = [c for c in cells if (c.framework, c.workload) == (cell.framework, workload)]
            if not cell.why and before:
                too_long = predicted(before, size) > limit
                cell.why = before[-1].why or (f"over {limit:.0f} s" if too_long else "")
            row.append(cell)
        took = dict.fromkeys([cell.framework for cell in row], 0.0)
        for _ in range(rounds):
            for framework, cell in zip(frameworks, row, strict=True):
                progress.step(f"{workload} {size:,}", framework.name)
                if not cell.why and took[framework.name] < LONG:
                    took[framework.name] = measure(framework, cell, limit)
        cells += row
    progress.end()
    return cells


def time_imports(frameworks: list[Framework], rounds: int) -> dict[str, float]:
    """Seconds that an import takes beyond the start of the interpreter, with compiled files."""
    times: dict[str, tuple[list[float], list[float]]] = {f.name: ([], []) for f in frameworks}
    for _ in range(rounds):
        for framework in frameworks:
            for command, taken in zip(framework.importing(), times[framework.name], strict=True):
                started = time.perf_counter()
                subprocess.run(command, cwd=ROOT, env=framework.environment, check=True)
                taken.append(time.perf_counter() - started)
    return {name: min(whole) - min(start) for name, (start, whole) in times.items()}


def _printed(*arguments: str) -> str:
    """What a module of the benchmarks prints in our environment."""
    command = [str(CLARK.python), "-m", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=CLARK.environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def wire() -> dict[str, float]:
    """W7 is about this package and msgspec alone, so the core benchmark has it."""
    words = _printed("benchmarks.core", "w7").split()
    return {name: float(words[words.index(name) + 1]) for name in ("decode", "encode")}


def operations() -> Counts:
    """The operations of what is measured here, so that a later change of them can be seen."""
    return msgspec.json.decode(_printed("benchmarks.operations", "--json"), type=Counts)


def machine() -> Machine:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), cpu)
    return Machine(cpu, os.cpu_count(), platform.system(), platform.python_version())


def run(frameworks: list[Framework], sizes: Sizes, rounds: int, limit: float, quick: bool) -> Run:
    """Install and measure these frameworks."""
    for framework in frameworks:
        print(f"installing {framework.name} ...", flush=True)
        framework.install()
    footprints = {framework.name: framework.footprint() for framework in frameworks}
    imports = time_imports(frameworks, 4 if quick else 8)
    has_ours = CLARK in frameworks
    return Run(
        date=date.today().isoformat(),
        quick=quick,
        rounds=rounds,
        limit=limit,
        machine=machine(),
        frameworks={
            name: Installed(**found, import_time=imports[name])
            for name, found in footprints.items()
        },
        cells=run_workloads(frameworks, sizes, rounds, limit),
        wire=wire() if has_ours else {},
        operations=operations() if has_ours else {},
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a first look: less of everything")
    parser.add_argument("--rounds", type=int, help="how often each is measured (3; quick: 1)")
    parser.add_argument("--limit", type=float, help="seconds for one measurement (60; quick: 15)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[each.name for each in FRAMEWORKS if each.name != BARE],
        metavar="NAME",
        help="these frameworks and the bare loop; the rows of the others stay",
    )
    parser.add_argument("--print", action="store_true", help="print the tables; write nothing")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    names = options.only and {BARE, *options.only}
    measured = run(
        [each for each in FRAMEWORKS if not names or each.name in names],
        QUICK if options.quick else FULL,
        options.rounds or (1 if options.quick else 3),
        options.limit or (15.0 if options.quick else 60.0),
        options.quick,
    )
    results = read().renewed(measured) if names else Results([measured])
    if options.print:
        print(report.tables(results))
    else:
        report.write(results)


if __name__ == "__main__":
    main()
