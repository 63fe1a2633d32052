"""A long text in pieces, so that a part of it can be read without the rest.

`pack` returns the pieces: first a description, then the text, 32,768 characters in each piece, as
UTF-8. `KeptText` reads them through a function that returns some of the pieces, from wherever they
are kept.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec
from msgspec import Struct

from clark_agent._untrusted import is_marked

__all__ = ["Found", "KeptText", "Pieces", "ReadPieces", "pack"]

_STEP = 1 << 15

Pieces: TypeAlias = Sequence[bytes]
ReadPieces: TypeAlias = Callable[[int, int], Pieces]
"""Returns the pieces from one number up to, and not including, another. Raises `LookupError`."""


class _Description(Struct, frozen=True, omit_defaults=True):
    """The first piece."""

    characters: int
    step: int
    breaks: tuple[int, ...]
    """How many line breaks there are before each piece, and in the end."""
    is_untrusted: bool = False
    """Whether a part of it is marked as untrusted."""
    media_type: str | None = None
    """Of data that is no text for a model."""


class Found(Struct, frozen=True):
    """A place where words were found."""

    start: int
    """The number of the character, from 0."""
    line: int
    """The number of the line, from 1."""
    excerpt: str


def pack(text: str, *, media_type: str | None = None) -> list[bytes]:
    """The pieces of a text; ``media_type`` if it is a ``data:`` URL."""
    parts = [text[start : start + _STEP] for start in range(0, len(text), _STEP)]
    breaks = [0]
    for part in parts:
        breaks.append(breaks[-1] + part.count("\n"))
    is_untrusted = media_type is None and is_marked(text)
    described = _Description(len(text), _STEP, tuple(breaks), is_untrusted, media_type)
    return [
        msgspec.json.encode(described),
        *[part.encode("utf-8", "surrogatepass") for part in parts],
    ]


class KeptText:
    """Reads a text that was packed. Each method reads only the pieces that it needs."""

    def __init__(self, read: ReadPieces) -> None:
        self._read = read
        (first,) = read(0, 1)
        self._description = described = msgspec.json.decode(first, type=_Description)
        self.characters = described.characters
        """How many characters it has."""
        self.lines = described.breaks[-1] + 1
        """How many lines it has."""
        self.is_untrusted = described.is_untrusted
        """Whether a part of it is marked as untrusted."""
        self.media_type = described.media_type
        """Of data that is no text for a model."""
        self._latest: tuple[int, str] = (-1, "")

    def part(self, start: int, stop: int) -> str:
        """The characters from one number up to, and not including, another."""
        start, stop = max(start, 0), min(stop, self.characters)
        if start >= stop:
            return ""
        step = self._description.step
        first, last = start // step, (stop - 1) // step
        text = self._piece(first) if first == last else "".join(self._pieces(first, last + 1))
        return text[start - first * step : stop - first * step]

    def start_of(self, line: int) -> int:
        """The number of the first character of a line. Lines are counted from 1."""
        if line <= 1:
            return 0
        if line > self.lines:
            return self.characters
        # The line begins behind the break with this number.
        wanted, breaks = line - 1, self._description.breaks
        piece = bisect_right(breaks, wanted - 1) - 1
        text, at = self._piece(piece), -1
        for _ in range(wanted - breaks[piece]):
            at = text.index("\n", at + 1)
        return piece * self._description.step + at + 1

    def line_at(self, character: int) -> int:
        """The number of the line that has this character."""
        character = min(max(character, 0), self.characters)
        piece, rest = divmod(character, self._description.step)
        if not rest:
            return self._description.breaks[piece] + 1
        return self._description.breaks[piece] + self._piece(piece).count("\n", 0, rest) + 1

    def find(
        self, words: str, start: int, *, around: int, is_cancelled: Callable[[], bool]
    ) -> Iterator[Found]:
        """The places from a character on that have these words, whatever the case."""
        pattern = re.compile(re.escape(words), re.IGNORECASE)
        step, at = self._description.step, max(start, 0)
        while at < self.characters and not is_cancelled():
            stop = (at // step + 1) * step  # a place belongs to the piece in which it begins
            text = self.part(at, stop + len(words) - 1)
            next_at = stop
            for match in pattern.finditer(text):
                place = at + match.start()
                if place >= stop:
                    break
                end = at + match.end()
                excerpt = self.part(place - around, end + around)
                yield Found(place, self.line_at(place), excerpt)
                next_at = max(next_at, end)
            at = next_at

    def _piece(self, number: int) -> str:
        if self._latest[0] != number:
            self._latest = number, self._pieces(number, number + 1)[0]
        return self._latest[1]

    def _pieces(self, first: int, stop: int) -> list[str]:
        found = self._read(first + 1, stop + 1)
        if len(found) != stop - first:
            raise LookupError("a part of the result is missing")
        return [piece.decode("utf-8", "surrogatepass") for piece in found]
