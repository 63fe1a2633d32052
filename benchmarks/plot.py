"""Plots as SVG, for a light page and for a dark one: a few lines and words, so no library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    name: str
    ground: str
    ink: str
    faint: str
    grid: str
    others: str
    ours: str
    floor: str


THEMES = (
    Theme("light", "#ffffff", "#1f2430", "#5b6475", "#e3e6ec", "#8fa3bf", "#3f51b5", "#5f9e6e"),
    Theme("dark", "#1e2129", "#e6e8ee", "#a3abba", "#343a47", "#5f718c", "#8c9eff", "#79c08c"),
)


@dataclass(frozen=True)
class Series:
    """A name with its values: one for a bar, several for a line."""

    name: str
    points: Sequence[tuple[float, float]]
    note: str = ""
    """What to say where a bar has no value."""
    run: str = ""
    """The letter of its run, where there are several."""

    @property
    def label(self) -> str:
        return f"{self.name}, {self.run}" if self.run else self.name

    def color(self, theme: Theme) -> str:
        return {"clark-agent": theme.ours, "bare loop": theme.floor}.get(self.name, theme.others)

    @property
    def weight(self) -> str:
        return "600" if self.name == "clark-agent" else "400"


def number(value: float) -> str:
    """Three digits that count, with thousands apart."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def bars(title: str, unit: str, series: Sequence[Series], theme: Theme) -> str:
    """A bar each, the least first, on a logarithmic scale from a power of ten below that."""
    left, right, top, step = 150, 90, 64, 28
    series = sorted(series, key=lambda one: one.points[0][1] if one.points else math.inf)
    values = [s.points[0][1] for s in series if s.points]
    low, high = 10 ** math.floor(math.log10(min(values))), max(values)
    if low == min(values):
        low /= 10
    bottom = top + step * len(series)

    def x(value: float) -> float:
        span = WIDTH - left - right
        return left + span * math.log(value / low) / math.log(high / low)

    parts: list[str] = []
    for power in range(round(math.log10(low)), math.floor(math.log10(high)) + 1):
        at = x(10.0**power)
        parts.append(_line(at, top - 8, at, bottom, theme.grid))
        parts.append(_text(at, bottom + 16, _power(power), theme.faint, "middle", size=11))
    for index, one in enumerate(series):
        y = top + step * index
        parts.append(_text(left - 10, y + 13, one.label, theme.ink, "end", weight=one.weight))
        if not one.points:
            parts.append(_text(left + 8, y + 13, one.note, theme.faint))
            continue
        value = one.points[0][1]
        parts.append(
            f'<rect x="{left}" y="{y}" width="{x(value) - left:.1f}" height="18" rx="2" '
            f'fill="{one.color(theme)}"/>'
        )
        said = number(value)
        parts.append(_text(x(value) + 8, y + 13, said, theme.ink, weight=one.weight, halo=theme))
    return _figure(title, f"{unit}, logarithmic scale", parts, bottom + 30, theme)


def lines(title: str, unit: str, series: Sequence[Series], theme: Theme) -> str:
    """A line each, on logarithmic scales, with its name at the right."""
    left, right, top, height = 70, 150, 64, 340
    points = [point for one in series for point in one.points]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    low = 10 ** math.floor(math.log10(min(ys)))
    high = 10 ** math.ceil(math.log10(max(ys)))
    bottom, edge = top + height, WIDTH - right

    def x(value: float) -> float:
        return left + (edge - left) * math.log(value / xs[0]) / math.log(xs[-1] / xs[0])

    def y(value: float) -> float:
        return bottom - height * math.log(value / low) / math.log(high / low)

    parts: list[str] = []
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = y(10.0**power)
        parts.append(_line(left, at, edge, at, theme.grid))
        parts.append(_text(left - 8, at + 4, _power(power), theme.faint, "end", size=11))
    parts += [
        _text(x(value), bottom + 18, f"{value:,.0f}", theme.faint, "middle", size=11)
        for value in xs
    ]
    names: list[str] = []
    for end in xs:  # a name stands where its line ends, clear of the others that end there
        here = sorted(
            [one for one in series if one.points and one.points[-1][0] == end],
            key=lambda one: y(one.points[-1][1]),
        )
        places = _apart([y(one.points[-1][1]) for one in here], 17, bottom)
        for one, place in zip(here, places, strict=True):
            parts += _polyline([(x(a), y(b)) for a, b in one.points], one, theme)
            names.append(
                _text(x(end) + 10, place + 4, one.label, theme.ink, weight=one.weight, halo=theme)
            )
    parts += names
    return _figure(title, f"{unit}, logarithmic scales", parts, bottom + 34, theme)


def _polyline(places: Sequence[tuple[float, float]], one: Series, theme: Theme) -> list[str]:
    color, width = one.color(theme), 3 if one.name == "clark-agent" else 1.8
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'
    return [line, *[f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]]


def _apart(wanted: Sequence[float], gap: float, bottom: float) -> list[float]:
    """Places near the wanted ones, in the same order and no closer than the gap."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + gap) if places else place)
    limit = bottom
    for index in reversed(range(len(places))):
        places[index] = min(places[index], limit)
        limit = places[index] - gap
    return places


def _power(power: int) -> str:
    return f"{10.0**power:,.0f}" if power >= 0 else f"{10.0**power:g}"


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    color: str,
    anchor: str = "start",
    size: int = 13,
    weight: str = "400",
    halo: Theme | None = None,
) -> str:
    """Text; with a halo it can be read where a line crosses it."""
    around = f' stroke="{halo.ground}" stroke-width="4" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" '
        f'font-size="{size}" font-weight="{weight}"{around}>{escape(text)}</text>'
    )


def _figure(title: str, unit: str, parts: Iterable[str], height: float, theme: Theme) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" font-family="{FONT}" role="img" '
        f'aria-label="{escape(title)}">\n'
        f'<rect width="100%" height="100%" fill="{theme.ground}"/>\n'
        f"{_text(20, 26, title, theme.ink, size=16, weight='600')}\n"
        f"{_text(20, 45, unit, theme.faint, size=12)}\n"
        f"{body}\n</svg>\n"
    )
