"""The figures of `make bench`, as docs/benchmarks/results.json has them.

They come from one run or more. Each run measures the bare loop too, so that ratios to it are of
figures that were measured together.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import Struct, field

ROOT = Path(__file__).resolve().parents[1]
FILE = Path("docs", "benchmarks", "results.json")
BARE, OURS = "bare loop", "clark-agent"
STALE = 0.1
"""How far operations may be from those that our rows were measured with."""

Counts: TypeAlias = dict[str, float]
"""The operations of a unit of each workload."""


class Row(NamedTuple):
    """A framework in a run, which is counted from 0."""

    run: int
    name: str


class Cell(Struct):
    """One framework at one size of one workload."""

    framework: str
    workload: str
    size: int
    wall: float | None = None
    cpu: float | None = None
    memory: int | None = None
    why: str = ""
    """Why there is no figure."""
    rounds: int = 0

    def add(self, figures: dict[str, float]) -> None:
        if self.wall is None or figures["wall"] < self.wall:
            self.wall, self.cpu = figures["wall"], figures["cpu"]
        self.memory = max(int(figures["memory"]), self.memory or 0)
        self.rounds += 1


class Installed(Struct, frozen=True):
    """What was measured, what it takes on the disk, and the seconds of its import."""

    version: str
    bytes: int
    packages: int
    import_time: float = field(name="import")


class Machine(Struct, frozen=True):
    cpu: str
    cores: int | None
    system: str
    python: str

    @property
    def version(self) -> str:
        """The version of Python as `operations.json` has it."""
        return ".".join(self.python.split(".")[:2])


class Run(Struct, frozen=True):
    """Rows that were measured together."""

    date: str
    quick: bool
    rounds: int
    limit: float
    machine: Machine
    frameworks: dict[str, Installed]
    cells: list[Cell]
    wire: dict[str, float] = {}
    operations: Counts = {}
    """What our rows took, on the Python of the machine; empty where the run has none of ours."""


class Results(Struct, frozen=True):
    runs: list[Run]
    """The oldest first."""

    def renewed(self, run: Run) -> Results:
        """With this run in place of the older rows of its frameworks.

        An older run keeps its bare loop as long as it has other rows.
        """
        kept = [_without(earlier, run.frameworks.keys() - {BARE}) for earlier in self.runs]
        return Results([*[each for each in kept if each.frameworks.keys() != {BARE}], run])

    @property
    def ours(self) -> Run | None:
        """The run with our rows."""
        return next((run for run in self.runs if OURS in run.frameworks), None)


def _without(run: Run, names: set[str]) -> Run:
    has_ours = OURS not in names
    return msgspec.structs.replace(
        run,
        frameworks={name: each for name, each in run.frameworks.items() if name not in names},
        cells=[cell for cell in run.cells if cell.framework not in names],
        wire=run.wire if has_ours else {},
        operations=run.operations if has_ours else {},
    )


def read(root: Path = ROOT) -> Results:
    path = root / FILE
    return msgspec.json.decode(path.read_bytes(), type=Results) if path.exists() else Results([])


def as_json(results: Results) -> str:
    return msgspec.json.format(msgspec.json.encode(results), indent=1).decode() + "\n"


def stale(measured: Counts, pinned: Counts) -> list[str]:
    """How the pins of today differ from the operations that our rows were measured with."""
    found: list[str] = []
    for name in {**measured, **pinned}:
        then, now = measured.get(name), pinned.get(name)
        if then is None or now is None:
            found.append(f"{name}: {'not measured' if then is None else 'no longer pinned'}")
        elif abs(now - then) > STALE * then:
            found.append(f"{name}: {then:,.1f} when measured, {now:,.1f} now")
    return found
