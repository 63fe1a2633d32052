"""A long text in pieces, so that a part of it can be read without the rest.

`pack` returns the pieces: first a description, then the text, 32,768 characters in each piece, as
UTF-8. `KeptText` reads them through a function that returns some of the pieces, from wherever they
are kept. The description has the checksums of the pieces, and one of its own, so that damage to
what is read is noticed.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias
from zlib import crc32

import msgspec
from msgspec import Struct

from clark_agent._untrusted import is_marked

__all__ = [
    "Found",
    "KeptDamaged",
    "KeptText",
    "OpenKept",
    "Pieces",
    "ReadPieces",
    "digest_of",
    "pack",
]

_STEP = 1 << 15

Pieces: TypeAlias = Sequence[bytes]
ReadPieces: TypeAlias = Callable[[int, int], Pieces]
"""Returns the pieces from one number up to, and not including, another; none if there are none."""


class KeptDamaged(ValueError):
    """A kept text, or a piece of it, is not what was kept."""


class _Description(Struct, frozen=True, omit_defaults=True):
    """The first piece."""

    characters: int
    step: int
    breaks: tuple[int, ...]
    """How many line breaks there are before each piece, and in the end."""
    sums: tuple[int, ...]
    """The checksums of the pieces of the text."""
    digest: str
    """Of the whole text."""
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
    pieces = [part.encode("utf-8", "surrogatepass") for part in parts]
    breaks = [0]
    for part in parts:
        breaks.append(breaks[-1] + part.count("\n"))
    described = _Description(
        characters=len(text),
        step=_STEP,
        breaks=tuple(breaks),
        sums=tuple(map(crc32, pieces)),
        digest=_digest(pieces),
        is_untrusted=media_type is None and is_marked(text),
        media_type=media_type,
    )
    data = msgspec.json.encode(described)
    return [b"%08x " % crc32(data) + data, *pieces]


def digest_of(pieces: Pieces) -> str:
    """The digest of a text that was packed."""
    return _described(pieces[0]).digest


def _digest(pieces: Pieces) -> str:
    from hashlib import blake2b  # only large results need it

    digest = blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _described(piece: bytes) -> _Description:
    """What the first piece says. Raises `KeptDamaged`."""
    data = piece[9:]
    if piece[:9] != b"%08x " % crc32(data):
        raise KeptDamaged("its description is damaged")
    return msgspec.json.decode(data, type=_Description)


class KeptText:
    """Reads a text that was packed. Each method reads only the pieces that it needs.

    Raises `LookupError` if there is none, and then `KeptDamaged` for pieces that are damaged or
    missing.
    """

    def __init__(self, read: ReadPieces) -> None:
        self._read = read
        first = read(0, 1)
        if not first:
            raise LookupError("there is no such text")
        self._description = described = _described(first[0])
        self.digest = described.digest
        """The digest of the whole text."""
        self.characters = described.characters
        """How many characters it has."""
        self.lines = described.breaks[-1] + 1
        """How many lines it has."""
        self.is_untrusted = described.is_untrusted
        """Whether a part of it is marked as untrusted."""
        self.media_type = described.media_type
        """Of data that is no text for a model."""
        self.searched = 0
        """How far `find` has searched."""
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
        self.searched = at
        while at < self.characters and (at <= start or not is_cancelled()):
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
            at = self.searched = next_at

    def _piece(self, number: int) -> str:
        if self._latest[0] != number:
            self._latest = number, self._pieces(number, number + 1)[0]
        return self._latest[1]

    def _pieces(self, first: int, stop: int) -> list[str]:
        found = self._read(first + 1, stop + 1)
        if len(found) != stop - first:
            raise KeptDamaged("a part of it is missing")
        if tuple(map(crc32, found)) != self._description.sums[first:stop]:
            raise KeptDamaged("a part of it is damaged")
        return [piece.decode("utf-8", "surrogatepass") for piece in found]


OpenKept: TypeAlias = Callable[[], KeptText]
"""Finds a text, which may wait for a network. Raises `LookupError` or `KeptDamaged`."""
