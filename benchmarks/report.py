"""From figures to the page: the tables between its two marks, and the plots beside it.

`python -m benchmarks.report` does so again from docs/benchmarks/results.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.plot import THEMES, Series, bars, lines, number

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
BEGIN, END = "<!-- results: written by make bench -->", "<!-- end of results -->"

CRATE = ["clark-agent, Rust", "74 → 4,104 ¹", "", "0.18", "15.5", "284", "", "", ""]
"""Measured elsewhere, on the same kind of machine."""

Results: TypeAlias = dict[str, Any]


def write(results: Results) -> None:
    PAGE.mkdir(parents=True, exist_ok=True)
    (PAGE / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    for name, draw in _plots(results).items():
        for theme in THEMES:
            (PAGE / f"{name}-{theme.name}.svg").write_text(draw(theme))
    page = PAGE / "index.md"
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n{END}{after}")


class Figures:
    """The cells by framework, workload and size, and notes on those without a figure."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.cells = {(c["framework"], c["workload"], c["size"]): c for c in results["cells"]}
        self.names = list(results["frameworks"])
        self.notes: list[str] = []

    def sizes(self, workload: str) -> list[int]:
        return sorted({size for _, w, size in self.cells if w == workload})

    def value(
        self, name: str, workload: str, size: int, key: str = "wall", unit: float = 1
    ) -> float | None:
        value: float | None = self.cells.get((name, workload, size), {}).get(key)
        return None if value is None else value / unit

    def said(self, name: str, workload: str, size: int, key: str = "wall", unit: float = 1) -> str:
        """The figure, or why there is none."""
        value = self.value(name, workload, size, key, unit)
        if value is not None:
            return number(value)
        why: str = self.cells.get((name, workload, size), {}).get("why", "")
        return why if not why or why.startswith("over") else f"— {self.note(f'{name}: {why}')}"

    def note(self, text: str) -> str:
        if text not in self.notes:
            self.notes.append(text)
        return "*" * (self.notes.index(text) + 1)

    def take_notes(self) -> str:
        said = [f"{'*' * (i + 1)} {note}".replace("*", "\\*") for i, note in enumerate(self.notes)]
        self.notes = []
        return "".join(f"\n{note}\n" for note in said)

    def exponent(self, name: str, workload: str) -> float | None:
        """How the whole time grows with the size: 1 is linear, 2 quadratic."""
        points = [(size, self.value(name, workload, size)) for size in self.sizes(workload)]
        known = [(math.log(size), math.log(wall)) for size, wall in points if wall]
        if len(known) < 2:
            return None
        x0 = sum(x for x, _ in known) / len(known)
        y0 = sum(y for _, y in known) / len(known)
        return sum((x - x0) * (y - y0) for x, y in known) / sum((x - x0) ** 2 for x, _ in known)

    def turn_behind(self, name: str) -> float | None:
        """Microseconds of a turn in W6, from the second turn on."""
        turns = self.sizes("w6")[0]
        return self.value(name, "w6", turns, unit=(turns - 1) * 1e-6)


def tables(results: Results) -> str:
    figures = Figures(results)
    sections = [_machine(results), _glance(figures), _turns(figures), _deltas(figures)]
    sections += [_calls(figures), _runs(figures), _imports(figures), _history(figures)]
    sections.append(_wire(results))
    return "\n".join(section for section in sections if section)


def _machine(results: Results) -> str:
    machine = results["machine"]
    rounds = results["rounds"]
    how = "one round" if rounds == 1 else f"the best of {rounds} rounds"
    how = f"a quick look, {how}" if results["quick"] else how
    return (
        f"Python {machine['python']} on {machine['system']}, {machine['cores']} cores "
        f"({machine['cpu']}); {how}; at most {results['limit']:.0f} s for one measurement.\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, marks, *rows))


def _named(figures: Figures, name: str) -> str:
    version = figures.results["frameworks"][name]["version"]
    bold = "**" if name == "clark-agent" else ""
    return f"{bold}{name}{bold} {version}".strip()


def _optional(value: float | None) -> str:
    return "" if value is None else number(value)


def _glance(figures: Figures) -> str:
    head = ["", "a turn, µs", "growth", "a delta, µs", "1,000 calls, ms", "1,000 runs, ms"]
    head += ["memory a run, KB", "import, ms", "a turn behind 10,000 messages, µs"]
    rows = []
    for name in figures.names:
        exponent = figures.exponent(name, "w1")
        rows.append(
            [
                _named(figures, name),
                figures.said(name, "w1", 200, unit=200e-6),
                "" if exponent is None else f"{exponent:.2f}",
                figures.said(name, "w2", 10_000, unit=1e-2),
                figures.said(name, "w3", 1_000, unit=1e-3),
                figures.said(name, "w4", 1_000, unit=1e-3),
                _optional(figures.value(name, "w4", 1_000, "memory", unit=1e6)),
                number(figures.results["frameworks"][name]["import"] * 1e3),
                _optional(figures.turn_behind(name)),
            ]
        )
        if name == "clark-agent":
            rows.append(CRATE)
    notes = "\n¹ At 50 and at 2,000 turns. Measured elsewhere, on the same kind of machine.\n"
    return f"### At a glance\n\n{_table(head, rows)}{notes}{figures.take_notes()}"


def _by_size(figures: Figures, workload: str, name: str, unit: Callable[[int], float]) -> list[str]:
    return [figures.said(name, workload, n, unit=unit(n)) for n in figures.sizes(workload)]


def _turns(figures: Figures) -> str:
    head = ["µs a turn", *[f"{n:,} turns" for n in figures.sizes("w1")], "growth"]
    rows = []
    for name in figures.names:
        exponent = figures.exponent(name, "w1")
        row = _by_size(figures, "w1", name, lambda n: n * 1e-6)
        grown = "" if exponent is None else f"{exponent:.2f}"
        rows.append([_named(figures, name), *row, grown])
    return f"### W1: turns\n\n{_table(head, rows)}{figures.take_notes()}"


def _deltas(figures: Figures) -> str:
    sizes = figures.sizes("w2")
    head = ["µs a delta", *[f"{n:,}" for n in sizes], *[f"{n:,}, unheard" for n in sizes]]
    rows = [
        [
            _named(figures, name),
            *_by_size(figures, "w2", name, lambda n: n * 1e-6),
            *_by_size(figures, "w2-unheard", name, lambda n: n * 1e-6),
        ]
        for name in figures.names
    ]
    return f"### W2: deltas\n\n{_table(head, rows)}{figures.take_notes()}"


def _calls(figures: Figures) -> str:
    head = ["ms", *[f"{n:,} calls" for n in figures.sizes("w3")]]
    rows = [
        [_named(figures, name), *_by_size(figures, "w3", name, lambda _: 1e-3)]
        for name in figures.names
    ]
    return f"### W3: calls at once\n\n{_table(head, rows)}{figures.take_notes()}"


def _runs(figures: Figures) -> str:
    head = [""]
    for size in figures.sizes("w4"):
        head += [f"{size:,} runs, s", "CPU, s", "memory a run, KB"]
    rows = []
    for name in figures.names:
        row = [_named(figures, name)]
        for size in figures.sizes("w4"):
            row += [
                figures.said(name, "w4", size),
                _optional(figures.value(name, "w4", size, "cpu")),
                _optional(figures.value(name, "w4", size, "memory", unit=size * 1e3)),
            ]
        rows.append(row)
    return f"### W4: runs at once\n\n{_table(head, rows)}{figures.take_notes()}"


def _imports(figures: Figures) -> str:
    head = ["", "import, ms", "size beyond msgspec, MB", "packages"]
    rows = []
    for name in figures.names:
        found = figures.results["frameworks"][name]
        size = number(found["bytes"] / 1e6) if found["packages"] else ""
        packages = str(found["packages"] or "")
        rows.append([_named(figures, name), number(found["import"] * 1e3), size, packages])
    return f"### W5: import and installation\n\n{_table(head, rows)}"


def _history(figures: Figures) -> str:
    turns = figures.sizes("w6")[0]
    head = ["", "a turn behind 10,000 messages, µs", "against a plain turn of its own"]
    rows = []
    for name in figures.names:
        turn = figures.turn_behind(name)
        plain = figures.value(name, "w1", 200, unit=200e-6)
        ratio = "" if turn is None or plain is None else f"{turn / plain:.1f} ×"
        said = figures.said(name, "w6", turns) if turn is None else number(turn)
        rows.append([_named(figures, name), said, ratio])
    return f"### W6: a long history\n\n{_table(head, rows)}{figures.take_notes()}"


def _wire(results: Results) -> str:
    found = results["wire"]
    if not found:
        return ""
    rows = [["clark-agent", f"{found['decode']:.2f} ×", f"{found['encode']:.2f} ×"]]
    return f"### W7: the wire\n\n{_table(['against msgspec alone', 'reading', 'writing'], rows)}"


def _plots(results: Results) -> dict[str, Callable[[Any], str]]:
    figures = Figures(results)

    def one(workload: str, size: int, unit: float) -> list[Series]:
        series = []
        for name in figures.names:
            value = figures.value(name, workload, size, unit=unit)
            points = [] if value is None else [(0.0, value)]
            why = figures.cells[name, workload, size]["why"].split(":")[0]
            series.append(Series(name, points, why))
        return series

    turns = []
    for name in figures.names:
        values = [(n, figures.value(name, "w1", n, unit=n * 1e-6)) for n in figures.sizes("w1")]
        turns.append(Series(name, [(n, value) for n, value in values if value]))
    imports = [
        Series(name, [(0.0, found["import"] * 1e3)])
        for name, found in results["frameworks"].items()
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
    write(json.loads((PAGE / "results.json").read_text()))
