"""Patterns for paths: ``*.py``, ``src/**/test_*.py``, ``*.{js,ts}``.

``*`` and ``?`` match within one name, ``**`` matches any number of folders, and braces list
alternatives. A pattern without a ``/`` is matched against the last name of the path. The time is
bounded by the lengths of the pattern and the path, for any pattern.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

__all__ = ["Glob"]

_MOST_ALTERNATIVES = 64
_CHOICE = re.compile(r"\{([^{},]*,[^{}]*)\}")


class Glob:
    """A parsed pattern."""

    def __init__(self, pattern: str) -> None:
        """Raises `ValueError` if the pattern has too many alternatives."""
        self._alternatives = [_names_of(each) for each in _expand(pattern.strip())]

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches the whole path."""
        names = path.split("/")
        return any(_matches(pattern, names) for pattern in self._alternatives)


def _names_of(pattern: str) -> list[str]:
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    return names if "/" in pattern else ["**", *names]


def _matches(pattern: list[str], names: list[str]) -> bool:
    """Track all possible positions in the pattern at once."""
    places = _with_stars(pattern, {0})
    for name in names:
        reached = {place for place in places if place < len(pattern) and pattern[place] == "**"}
        reached |= {
            place + 1
            for place in places - reached
            if place < len(pattern) and fnmatchcase(name, pattern[place])
        }
        places = _with_stars(pattern, reached)
    return len(pattern) in places


def _with_stars(pattern: list[str], places: set[int]) -> set[int]:
    """Return these positions, and those after each ``**`` that matches no folder at all."""
    reached = set(places)
    for place in range(len(pattern)):
        if place in reached and pattern[place] == "**":
            reached.add(place + 1)
    return reached


def _expand(pattern: str) -> list[str]:
    """Expand braces into separate patterns; braces without alternatives stay literal."""
    done: list[str] = []
    waiting = [pattern]
    while waiting:
        current = waiting.pop()
        choice = _CHOICE.search(current)
        if choice is None:
            done.append(current)
        else:
            before, after = current[: choice.start()], current[choice.end() :]
            waiting += [before + each + after for each in choice[1].split(",")]
        if len(done) + len(waiting) > _MOST_ALTERNATIVES:
            raise ValueError(f"it stands for more than {_MOST_ALTERNATIVES} patterns")
    return done
