"""Reads parameter descriptions from docstrings, in the three common styles.

Google (``Args:`` and an indented list), NumPy (``Parameters`` underlined) and reST (``:param x:``).
All other text is the description.
"""

from __future__ import annotations

import re
from inspect import cleandoc

from msgspec import Struct

__all__ = ["Documentation", "parse_docstring"]

_PARAMETER_SECTIONS = frozenset(
    {
        "args",
        "arguments",
        "keyword args",
        "keyword arguments",
        "other parameters",
        "parameters",
        "params",
    }
)


class Documentation(Struct, frozen=True):
    """The parts of a docstring: the description, and a text for each documented parameter."""

    description: str
    parameters: dict[str, str]


def parse_docstring(docstring: str | None) -> Documentation:
    """Parse a docstring."""
    parser = _Parser(cleandoc(docstring or ""))
    parser.parse()
    description = re.sub(r"\n{3,}", "\n\n", "\n".join(parser.prose)).strip()
    texts = {name: " ".join(lines).strip() for name, lines in parser.parameters.items()}
    return Documentation(description, texts)


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.position = 0
        self.prose: list[str] = []
        self.parameters: dict[str, list[str]] = {}

    def parse(self) -> None:
        while self.position < len(self.lines):
            line = self.lines[self.position]
            title = line.strip().lower()
            if title.removesuffix(":") in _PARAMETER_SECTIONS and self._underlined():
                self.position += 2
                self._numpy_section()
            elif title.endswith(":") and title[:-1] in _PARAMETER_SECTIONS:
                self.position += 1
                self._google_section(_indent(line))
            elif match := re.match(r"\s*:(\w+)([^:]*):(.*)", line):
                self.position += 1
                self._rest_field(match[1], match[2].split(), match[3], _indent(line))
            else:
                self.position += 1
                self.prose.append(line)

    def _underlined(self) -> bool:
        below = self.lines[self.position + 1 : self.position + 2]
        return bool(below) and re.fullmatch(r"\s*-{3,}\s*", below[0]) is not None

    def _google_section(self, outer: int) -> None:
        """Entries ``name (type): text``, indented below the title; deeper lines continue one."""
        inner: int | None = None
        current: list[str] = []
        while self.position < len(self.lines):
            line = self.lines[self.position]
            if line.strip():
                if _indent(line) <= outer:
                    return
                inner = _indent(line) if inner is None else inner
                entry = re.match(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)", line)
                if entry and _indent(line) <= inner:
                    current = self.parameters.setdefault(entry[1], [])
                    line = entry[2]
                current.append(line.strip())
            self.position += 1

    def _numpy_section(self) -> None:
        """Entries ``name : type`` at the left, their text indented below."""
        names: list[str] = []
        while self.position < len(self.lines):
            line = self.lines[self.position]
            if line.strip() and not _indent(line):
                if self._underlined():
                    return
                named = line.partition(":")[0].split(",")
                names = [name.strip().lstrip("*") for name in named]
                for name in names:
                    self.parameters.setdefault(name, [])
            elif line.strip():
                for name in names:
                    self.parameters[name].append(line.strip())
            self.position += 1

    def _rest_field(self, kind: str, words: list[str], text: str, outer: int) -> None:
        """``:param type name: text``; deeper lines continue it."""
        lines = [text.strip()]
        while self.position < len(self.lines):
            line = self.lines[self.position]
            if not line.strip() or _indent(line) <= outer:
                break
            lines.append(line.strip())
            self.position += 1
        if kind in ("param", "parameter", "arg", "argument", "key", "keyword") and words:
            self.parameters.setdefault(words[-1].lstrip("*"), []).extend(lines)
        elif kind not in ("type", "rtype"):
            title = " ".join([kind.capitalize(), *words])
            self.prose.append(f"{title}: {' '.join(lines).strip()}")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
