"""Patterns for paths: ``*.py``, ``src/**/test_*.py``, ``*.{js,ts}``.

``*`` and ``?`` stay within a name, ``**`` stands for any number of folders, and one of several
alternatives may stand in braces. A pattern without a ``/`` is for the last name alone, wherever it
is. Time is bounded by the lengths of the pattern and the path, whatever the pattern is.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

__all__ = ["Glob"]

_MOST_ALTERNATIVES = 64
_CHOICE = re.compile(r"\{([^{},]*,[^{}]*)\}")


class Glob:
    """A pattern, ready to be asked."""

    def __init__(self, pattern: str) -> None:
        """Raise ValueError for a pattern with more alternatives than anybody means."""
        self._alternatives = [_names_of(each) for each in _expand(pattern.strip())]

    def matches(self, path: str) -> bool:
        """Whether the pattern stands for the whole path."""
        names = path.split("/")
        return any(_matches(pattern, names) for pattern in self._alternatives)


def _names_of(pattern: str) -> list[str]:
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    return names if "/" in pattern else ["**", *names]


def _matches(pattern: list[str], names: list[str]) -> bool:
    """Follow all readings of the pattern at once: the places in it that may come next."""
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
    """These places, and those behind a ``**`` that stands for no folder at all."""
    reached = set(places)
    for place in range(len(pattern)):
        if place in reached and pattern[place] == "**":
            reached.add(place + 1)
    return reached


def _expand(pattern: str) -> list[str]:
    """The patterns that one with braces stands for; braces without a choice are themselves."""
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
