"""From figures to pages: the tables in docs/benchmarks/index.md and README.md, and the plots.

`python -m benchmarks.report` does so again from docs/benchmarks/results.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plot import THEMES, Series, bars, lines, number
from benchmarks.results import (
    BARE,
    FILE,
    OURS,
    ROOT,
    Cell,
    Installed,
    Results,
    Row,
    Run,
    as_json,
    read,
)
from benchmarks.work import HISTORY

PAGE, README = FILE.with_name("index.md"), Path("README.md")
BEGIN, END = "<!-- results: written by make bench -->", "<!-- end of results -->"

CRATE = ["74 → 4,104 ¹", "", "0.18", "15.5", "284", "", "", ""]
"""Measured elsewhere, on the same kind of machine."""


def files(results: Results, root: Path = ROOT) -> dict[Path, str]:
    """The text of each file that comes from the figures."""
    found = {
        FILE: as_json(results),
        PAGE: filled((root / PAGE).read_text(encoding="utf-8"), tables(results)),
        README: filled((root / README).read_text(encoding="utf-8"), summary(results)),
    }
    for name, draw in _plots(results).items():
        for theme in THEMES:
            found[FILE.with_name(f"{name}-{theme.name}.svg")] = draw(theme)
    return {root / path: text for path, text in found.items()}


def write(results: Results, root: Path = ROOT) -> None:
    for path, text in files(results, root).items():
        path.write_text(text, encoding="utf-8")


def filled(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with this text between its two marks."""
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n{end}{rest.split(end, 1)[1]}"


class Figures:
    """The rows, those of the newest run first, their cells, and notes on cells without a figure."""

    def __init__(self, results: Results) -> None:
        self.runs = list(reversed(results.runs))
        self.rows = [Row(n, name) for n, run in enumerate(self.runs) for name in run.frameworks]
        self.cells: dict[tuple[Row, str, int], Cell] = {
            (Row(n, cell.framework), cell.workload, cell.size): cell
            for n, run in enumerate(self.runs)
            for cell in run.cells
        }
        self.notes: list[str] = []

    def letter(self, run: int) -> str:
        """What the tables call a run; nothing where there is only one."""
        return chr(ord("A") + run) if len(self.runs) > 1 else ""

    def head(self, first: str, *rest: str) -> list[str]:
        return [first, *(["run"] if len(self.runs) > 1 else []), *rest]

    def named(self, row: Row) -> list[str]:
        bold = "**" if row.name == OURS else ""
        named = f"{bold}{row.name}{bold} {self.installed(row).version}".strip()
        return [named, *([self.letter(row.run)] if len(self.runs) > 1 else [])]

    def installed(self, row: Row) -> Installed:
        return self.runs[row.run].frameworks[row.name]

    @property
    def ours(self) -> Row | None:
        return next((row for row in self.rows if row.name == OURS), None)

    def sizes(self, workload: str, row: Row | None = None) -> list[int]:
        return sorted({n for r, w, n in self.cells if w == workload and row in (None, r)})

    def value(
        self, row: Row, workload: str, size: int, key: str = "wall", unit: float = 1
    ) -> float | None:
        cell = self.cells.get((row, workload, size))
        value: float | None = getattr(cell, key, None)
        return None if value is None else value / unit

    def why(self, row: Row, workload: str, size: int) -> str:
        cell = self.cells.get((row, workload, size))
        return cell.why if cell else ""

    def said(self, row: Row, workload: str, size: int, key: str = "wall", unit: float = 1) -> str:
        """The figure, or why there is none."""
        value = self.value(row, workload, size, key, unit)
        if value is not None:
            return number(value)
        why = self.why(row, workload, size)
        return why if not why or why.startswith("over") else f"— {self.note(f'{row.name}: {why}')}"

    def note(self, text: str) -> str:
        if text not in self.notes:
            self.notes.append(text)
        return "*" * (self.notes.index(text) + 1)

    def take_notes(self) -> str:
        said = [f"{'*' * (i + 1)} {note}".replace("*", "\\*") for i, note in enumerate(self.notes)]
        self.notes = []
        return "".join(f"\n{note}\n" for note in said)

    def exponent(self, row: Row, workload: str) -> float | None:
        """How the whole time grows with the size: 1 is linear, 2 quadratic."""
        points = [(size, self.value(row, workload, size)) for size in self.sizes(workload)]
        known = [(math.log(size), math.log(wall)) for size, wall in points if wall]
        if len(known) < 2:
            return None
        x0 = sum(x for x, _ in known) / len(known)
        y0 = sum(y for _, y in known) / len(known)
        return sum((x - x0) * (y - y0) for x, y in known) / sum((x - x0) ** 2 for x, _ in known)

    def turn(self, row: Row, size: int) -> float | None:
        """Microseconds of a turn in a run of so many."""
        return self.value(row, "w1", size, unit=size * 1e-6)

    def turn_behind(self, row: Row) -> float | None:
        """Microseconds of a turn in W6, from the second turn on."""
        sizes = self.sizes("w6", row)
        return self.value(row, "w6", sizes[0], unit=(sizes[0] - 1) * 1e-6) if sizes else None

    def against_bare(self, row: Row, workload: str, size: int, key: str = "wall") -> float | None:
        """The figure by that of the bare loop in the same run."""
        bare = self.value(Row(row.run, BARE), workload, size, key)
        return _ratio(self.value(row, workload, size, key), bare)


def _ratio(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


# --- where the figures are from -----------------------------------------------------------------


def origin(figures: Figures) -> str:
    """When and where the rows were measured, and which of them together."""
    first, *others = figures.runs
    if not others:
        return f"All rows are of one run of `make bench`: {_measured(first)}.\n"
    runs = "".join(
        f"- {figures.letter(n)}: {_names(run)}; {_measured(run)}\n"
        for n, run in enumerate(figures.runs)
    )
    drift = ", and ".join(_drift(figures, n) for n in range(1, len(figures.runs)))
    return (
        f"The rows are of {len(figures.runs)} runs of `make bench`. "
        f"Only rows of one run compare directly.\n\n{runs}\n"
        f"The bare loop was measured in each run: {drift}.\n"
    )


def _names(run: Run) -> str:
    return ", ".join(f"{name} {each.version}".strip() for name, each in run.frameworks.items())


def _measured(run: Run) -> str:
    machine, rounds = run.machine, run.rounds
    how = "one round" if rounds == 1 else f"the best of {rounds} rounds"
    how = f"a quick look, {how}" if run.quick else how
    return (
        f"{run.date}, Python {machine.python} on {machine.system}, {machine.cores} cores "
        f"({machine.cpu}), {how}, at most {run.limit:.0f} s for one measurement"
    )


def _drift(figures: Figures, run: int) -> str:
    """How the bare loop of this run compares with that of the newest one."""
    ratios = [
        ratio
        for row, workload, size in figures.cells
        if row == Row(run, BARE)
        and (
            ratio := _ratio(
                figures.value(row, workload, size),
                figures.value(Row(0, BARE), workload, size),
            )
        )
    ]
    letter, newest = figures.letter(run), figures.letter(0)
    if not ratios:
        return f"{letter} has no size in common with {newest}"
    low, high = min(ratios), max(ratios)
    return f"in {letter} it took {low:.2f} to {high:.2f} times as long as in {newest}"


# --- the README ---------------------------------------------------------------------------------


def summary(results: Results) -> str:
    figures = Figures(results)

    def place(row: Row) -> tuple[int, bool, bool, float]:
        time = figures.turn(row, 200)
        return row.run, row.name != BARE, row.name != OURS, math.inf if time is None else time

    head = ["a turn, µs, at 200 turns", "× bare loop", "at 1,000", "a delta, µs"]
    head += ["1,000 runs at once, ms", "import, ms"]
    rows = [
        [
            *figures.named(row),
            figures.said(row, "w1", 200, unit=200e-6),
            _optional(figures.against_bare(row, "w1", 200)),
            figures.said(row, "w1", 1_000, unit=1_000e-6),
            figures.said(row, "w2", 10_000, unit=1e-2),
            figures.said(row, "w4", 1_000, unit=1e-3),
            number(figures.installed(row).import_time * 1e3),
        ]
        for row in sorted(figures.rows, key=place)
    ]
    table = _table(figures.head("", *head), rows)
    parts = [origin(figures), table, figures.take_notes().strip("\n"), _growth(figures)]
    return "\n".join(part if part.endswith("\n") else f"{part}\n" for part in parts if part)


def _growth(figures: Figures) -> str:
    if (row := figures.ours) is None:
        return ""
    sizes = figures.sizes("w1", row)
    grown = _ratio(figures.turn(row, sizes[-1]), figures.turn(row, sizes[0]))
    behind = _ratio(figures.turn_behind(row), figures.turn(row, 200))
    if grown is None or behind is None:
        return ""
    return (
        f"A turn of clark-agent takes {grown:.2f} times as long in a run of {sizes[-1]:,} turns as "
        f"in one of {sizes[0]:,}.\nBehind a history of {HISTORY:,} messages with token budgets on, "
        f"it takes {behind:.1f} times as long as a plain one.\n"
    )


# --- the page -----------------------------------------------------------------------------------


def tables(results: Results) -> str:
    figures = Figures(results)
    sections = [origin(figures), _glance(figures), _turns(figures), _deltas(figures)]
    sections += [_calls(figures), _runs(figures), _imports(figures), _history(figures)]
    sections += [_wire(results), _aims(figures)]
    return "\n".join(section for section in sections if section)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, marks, *rows))


def _optional(value: float | None) -> str:
    return "" if value is None else number(value)


def _glance(figures: Figures) -> str:
    head = ["a turn, µs", "growth", "a delta, µs", "1,000 calls, ms", "1,000 runs, ms"]
    head += ["memory a run, KB", "import, ms", f"a turn behind {HISTORY:,} messages, µs"]
    rows = []
    for row in figures.rows:
        exponent = figures.exponent(row, "w1")
        rows.append(
            [
                *figures.named(row),
                figures.said(row, "w1", 200, unit=200e-6),
                "" if exponent is None else f"{exponent:.2f}",
                figures.said(row, "w2", 10_000, unit=1e-2),
                figures.said(row, "w3", 1_000, unit=1e-3),
                figures.said(row, "w4", 1_000, unit=1e-3),
                _optional(figures.value(row, "w4", 1_000, "memory", unit=1e6)),
                number(figures.installed(row).import_time * 1e3),
                _optional(figures.turn_behind(row)),
            ]
        )
        if row.name == OURS:
            rows.append(["clark-agent, Rust", *[""] * (len(figures.runs) > 1), *CRATE])
    notes = "\n¹ At 50 and at 2,000 turns. Measured elsewhere, on the same kind of machine.\n"
    table = _table(figures.head("", *head), rows)
    return f"### At a glance\n\n{table}{notes}{figures.take_notes()}"


def _by_size(figures: Figures, workload: str, row: Row, unit: Callable[[int], float]) -> list[str]:
    return [figures.said(row, workload, n, unit=unit(n)) for n in figures.sizes(workload)]


def _turns(figures: Figures) -> str:
    head = [*[f"{n:,} turns" for n in figures.sizes("w1")], "growth"]
    rows = []
    for row in figures.rows:
        exponent = figures.exponent(row, "w1")
        by_size = _by_size(figures, "w1", row, lambda n: n * 1e-6)
        grown = "" if exponent is None else f"{exponent:.2f}"
        rows.append([*figures.named(row), *by_size, grown])
    table = _table(figures.head("µs a turn", *head), rows)
    return f"### W1: turns\n\n{table}{figures.take_notes()}"


def _deltas(figures: Figures) -> str:
    sizes = figures.sizes("w2")
    head = [*[f"{n:,}" for n in sizes], *[f"{n:,}, unheard" for n in sizes]]
    rows = [
        [
            *figures.named(row),
            *_by_size(figures, "w2", row, lambda n: n * 1e-6),
            *_by_size(figures, "w2-unheard", row, lambda n: n * 1e-6),
        ]
        for row in figures.rows
    ]
    table = _table(figures.head("µs a delta", *head), rows)
    return f"### W2: deltas\n\n{table}{figures.take_notes()}"


def _calls(figures: Figures) -> str:
    head = figures.head("ms", *[f"{n:,} calls" for n in figures.sizes("w3")])
    rows = [
        [*figures.named(row), *_by_size(figures, "w3", row, lambda _: 1e-3)] for row in figures.rows
    ]
    return f"### W3: calls at once\n\n{_table(head, rows)}{figures.take_notes()}"


def _runs(figures: Figures) -> str:
    head = figures.head("")
    for size in figures.sizes("w4"):
        head += [f"{size:,} runs, s", "CPU, s", "memory a run, KB"]
    rows = []
    for row in figures.rows:
        cells = figures.named(row)
        for size in figures.sizes("w4"):
            cells += [
                figures.said(row, "w4", size),
                _optional(figures.value(row, "w4", size, "cpu")),
                _optional(figures.value(row, "w4", size, "memory", unit=size * 1e3)),
            ]
        rows.append(cells)
    return f"### W4: runs at once\n\n{_table(head, rows)}{figures.take_notes()}"


def _imports(figures: Figures) -> str:
    head = figures.head("", "import, ms", "size beyond msgspec, MB", "packages")
    rows = []
    for row in figures.rows:
        found = figures.installed(row)
        size = number(found.bytes / 1e6) if found.packages else ""
        packages = str(found.packages or "")
        rows.append([*figures.named(row), number(found.import_time * 1e3), size, packages])
    return f"### W5: import and installation\n\n{_table(head, rows)}"


def _history(figures: Figures) -> str:
    head = [f"a turn behind {HISTORY:,} messages, µs", "against a plain turn of its own"]
    rows = []
    for row in figures.rows:
        turn = figures.turn_behind(row)
        ratio = _ratio(turn, figures.turn(row, 200))
        sizes = figures.sizes("w6", row)
        said = (
            (figures.said(row, "w6", sizes[0]) if sizes else "") if turn is None else number(turn)
        )
        rows.append([*figures.named(row), said, "" if ratio is None else f"{ratio:.1f} ×"])
    table = _table(figures.head("", *head), rows)
    return f"### W6: a long history\n\n{table}{figures.take_notes()}"


def _wire(results: Results) -> str:
    found = results.ours.wire if results.ours else {}
    if not found:
        return ""
    rows = [["clark-agent", f"{found['decode']:.2f} ×", f"{found['encode']:.2f} ×"]]
    return f"### W7: the wire\n\n{_table(['against msgspec alone', 'reading', 'writing'], rows)}"


def _aims(figures: Figures) -> str:
    """Our figures by those of the bare loop in the same run, and whether each is within its aim."""
    if (row := figures.ours) is None:
        return ""
    run, bare = figures.runs[row.run], Row(row.run, BARE)
    against, ours = figures.against_bare, figures.installed(row)
    sizes = figures.sizes("w1", row)
    grown = _ratio(figures.turn(row, sizes[-1]), figures.turn(row, sizes[0]))
    turn = figures.turn(row, 200)
    imported = _ratio(ours.import_time, figures.installed(bare).import_time)
    kept: list[tuple[str, float, str, float | None]] = [
        ("W1, a turn at 200 turns", 3, "×", against(row, "w1", 200)),
        (f"W1, a turn at {sizes[-1]:,} turns against one at {sizes[0]:,}", 1.3, "×", grown),
        ("W2, a delta with a listener", 2.5, "×", against(row, "w2", 10_000)),
        ("W2, a delta without", 1.3, "×", against(row, "w2-unheard", 10_000)),
        ("W3, 64 calls at once", 1.15, "×", against(row, "w3", 64)),
        ("W4, 1,000 runs at once", 1.5, "×", against(row, "w4", 1_000)),
        ("W4, memory a run", 2, "×", against(row, "w4", 1_000, "memory")),
        ("W5, import", 1.5, "× `import asyncio, msgspec`", imported),
        ("W5, installed beyond msgspec", 2, "MB", ours.bytes / 1e6),
        (
            f"W6, a turn behind {HISTORY:,} messages",
            3,
            "× a plain turn",
            _ratio(figures.turn_behind(row), turn),
        ),
        ("W7, reading a transcript", 1.2, "× msgspec", run.wire.get("decode")),
        ("W7, writing a transcript", 1.2, "× msgspec", run.wire.get("encode")),
    ]
    rows = [
        [what, f"{aim:g} {unit}", f"{reached:.2f}", "missed" if reached > aim else ""]
        for what, aim, unit, reached in kept
        if reached is not None
    ]
    counted = run.operations.get("W1 turn")
    operations = (
        f"\nWhen it was measured, a turn of W1 took {counted:,.0f} [operations](#operations) "
        f"on Python {run.machine.version}.\n"
        if counted
        else ""
    )
    return (
        "### Against the bare loop\n\nWhat this package aims at, and what it reaches, as ratios to "
        f"the bare loop of the same run:\n\n{_table(['', 'aim', 'reached', ''], rows)}{operations}"
    )


def _plots(results: Results) -> dict[str, Callable[[Any], str]]:
    figures = Figures(results)

    def series(row: Row, points: list[tuple[float, float | None]], why: str = "") -> Series:
        known = [(x, y) for x, y in points if y is not None]
        return Series(row.name, known, why.split(":")[0], figures.letter(row.run))

    def one(workload: str, size: int, unit: float) -> list[Series]:
        return [
            series(
                row,
                [(0.0, figures.value(row, workload, size, unit=unit))],
                figures.why(row, workload, size),
            )
            for row in figures.rows
        ]

    turns = [
        series(row, [(n, figures.turn(row, n)) for n in figures.sizes("w1", row)])
        for row in figures.rows
    ]
    imports = [
        series(row, [(0.0, figures.installed(row).import_time * 1e3)]) for row in figures.rows
    ]
    title = "A turn with one tool call, by the number of turns"
    return {
        "turns": lambda theme: lines(title, "microseconds a turn", turns, theme),
        "deltas": lambda theme: bars(
            "A streamed delta, one listener", "microseconds", one("w2", 10_000, 1e-2), theme
        ),
        "runs": lambda theme: bars(
            "1,000 runs of five turns at once", "seconds", one("w4", 1_000, 1), theme
        ),
        "imports": lambda theme: bars("Import", "milliseconds", imports, theme),
    }


if __name__ == "__main__":
    write(read())
