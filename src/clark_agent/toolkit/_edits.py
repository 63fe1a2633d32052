"""Replacing a text by another, exactly: pure functions on text.

A text is replaced where it stands, character for character, and nothing else changes. In a file
whose lines all end in CRLF the line breaks of both texts are taken as CRLF: a model sees and
writes line feeds alone. A text that is not there, or not only once, is refused with what it takes
to do better.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec import Struct

from clark_agent.tools.repair import close_match

__all__ = ["Edit", "EditRefused", "replace_text", "unified_diff"]

_MOST_PLACES = 20
_MOST_LINES_READ = 50_000
_MOST_LINES_WANTED = 200
_MOST_LINES_COMPARED = 3_000
_MOST_CHARS_COMPARED = 300
_MOST_CHARS_OF_DIFF = 100_000
_MOST_CHANGES = _MOST_CHARS_OF_DIFF // 2
"""A change has two characters at least, and its hunk has a header."""
_CUT = "\n[the difference is longer, and cut here]\n"
_CONTEXT = 3


class EditRefused(Exception):
    """The text cannot be replaced, in words for a model."""


class Edit(Struct, frozen=True):
    """What became of a text."""

    text: str
    count: int
    """How many places were changed."""
    line: int
    """Of the first, from 1."""
    diff: str
    """In the unified form, without the lines that name the file. A long one is cut, and says so."""


def replace_text(
    text: str, old: str, new: str, *, replace_all: bool = False, max_chars: int | None = None
) -> Edit:
    """Replace ``old`` by ``new``. Raises `EditRefused`."""
    if not old:
        raise EditRefused(
            "'old' is empty: give the text to replace; write_file makes a file or replaces it all"
        )
    old, new = _with_breaks_of(text, old, new)
    if old == new:
        raise EditRefused("'old' and 'new' are the same: there is nothing to change")
    places = list(islice(_places(text, old), _MOST_PLACES + 1))
    if not places:
        raise EditRefused(_not_there(text, old, new))
    if len(places) > 1 and not replace_all:
        raise EditRefused(_not_only_once(text, places))
    count = text.count(old) if replace_all else 1
    if max_chars is not None and len(text) + count * (len(new) - len(old)) > max_chars:
        raise EditRefused(f"the file would have more than {max_chars:,} characters")
    return Edit(
        text.replace(old, new, count),
        count,
        text.count("\n", 0, places[0]) + 1,
        _joined(_diff(text, old, new, count)),
    )


def _places(text: str, old: str) -> Iterator[int]:
    """Where the text stands, also where two places overlap."""
    found = text.find(old)
    while found >= 0:
        yield found
        found = text.find(old, found + 1)


def _with_breaks_of(text: str, old: str, new: str) -> tuple[str, str]:
    """Both texts with the line breaks of the file."""
    breaks = text.count("\r\n")
    if not breaks:
        return old, new
    as_crlf = _as_crlf(old)
    if breaks == text.count("\n") or (as_crlf in text and old not in text):
        return as_crlf, _as_crlf(new)
    return old, new


def _as_crlf(text: str) -> str:
    return re.sub(r"(?<!\r)\n", "\r\n", text)


# --- what to say ------------------------------------------------------------------------------


def _not_only_once(text: str, places: list[int]) -> str:
    lines = [str(text.count("\n", 0, place) + 1) for place in places[:_MOST_PLACES]]
    more = "more than " if len(places) > _MOST_PLACES else ""
    return (
        f"'old' is there {more}{len(lines)} times, at the lines {', '.join(lines)}: give more of "
        "the text around the one you mean, or set replace_all"
    )


def _not_there(text: str, old: str, new: str) -> str:
    """Why the text is not found, as far as that can be guessed."""
    if new and len(new) > len(old) // 2 and new in text:
        return "'old' is not in the file, but 'new' is: has this been done already?"
    if "\\n" in old and old.replace("\\n", "\n") in text:
        return "'old' has a backslash and an 'n' where the file has a line break"
    found = _but_for_white_space(text, old)
    if found is not None:
        return f"'old' is there only with other white space. The file has, {found}"
    wanted = next((line.strip() for line in old.splitlines() if line.strip()), "")
    lines = text.split("\n")
    comparable = [line for line in lines[:_MOST_LINES_COMPARED] if len(line) < _MOST_CHARS_COMPARED]
    meant = wanted and close_match(wanted[:_MOST_CHARS_COMPARED], comparable)
    if meant:
        return (
            "'old' is not in the file. The line that is most like its beginning is "
            f"{_quote(lines.index(meant) + 1, [meant])}"
        )
    return "'old' is not in the file: read it again, and copy the text exactly"


def _but_for_white_space(text: str, old: str) -> str | None:
    """The lines that have this text, if only spaces and tabs are different."""
    wanted = [" ".join(line.split()) for line in old.strip().split("\n")]
    if not any(wanted) or len(wanted) > _MOST_LINES_WANTED:
        return None
    lines = text.split("\n", _MOST_LINES_READ)[:_MOST_LINES_READ]
    have = [" ".join(line.split()) for line in lines]
    for start in range(len(have) - len(wanted) + 1):
        if have[start] == wanted[0] and have[start : start + len(wanted)] == wanted:
            return _quote(start + 1, lines[start : start + len(wanted)])
    return None


def _quote(line: int, lines: list[str]) -> str:
    text = "\n".join(lines)
    if len(text) > 2_000:
        text = f"{text[:2_000]}…"
    where = f"line {line}" if len(lines) == 1 else f"lines {line} to {line + len(lines) - 1}"
    return f"{where}:\n{text}"


# --- the difference ---------------------------------------------------------------------------


class _Change(Struct, frozen=True):
    """Lines that become others: the number of the first, from 0, and both as they are."""

    first: int
    old: list[str]
    new: list[str]

    @property
    def end(self) -> int:
        return self.first + len(self.old)


def unified_diff(old: str, new: str) -> str:
    """The difference of two texts in the unified form, without the lines that name the file.

    It is made in time that hardly grows faster than the texts. A long one is cut, and says so.
    """
    before, after = _lines(old), _lines(new)
    return _joined(_hunks(before, _differing(before, after)))


def _differing(before: list[str], after: list[str]) -> Iterator[_Change]:
    """The changes between lines that are in both texts exactly once, and in the same order."""
    whole = _trimmed(0, before, after)
    first = start = 0
    for end, stop in [*_anchors(whole.old, whole.new), (len(whole.old), len(whole.new))]:
        change = _trimmed(whole.first + first, whole.old[first:end], whole.new[start:stop])
        if change.old or change.new:
            yield change
        first, start = end + 1, stop + 1


def _anchors(before: list[str], after: list[str]) -> list[tuple[int, int]]:
    """Where the most lines stand that are in both exactly once, in an order that both have."""
    ours, theirs = Counter(before), Counter(after)
    places = {line: place for place, line in enumerate(after)}
    found = [
        (n, places[line])
        for n, line in enumerate(before)
        if ours[line] == 1 and theirs.get(line) == 1
    ]
    # The longest rising sequence: of those of one length, the one that ends lowest can grow most.
    lowest: list[int] = []
    ends: list[int] = []
    previous: list[int | None] = []
    for index, (_, place) in enumerate(found):
        length = bisect_left(lowest, place)
        lowest[length : length + 1] = [place]
        ends[length : length + 1] = [index]
        previous.append(ends[length - 1] if length else None)
    chosen: list[tuple[int, int]] = []
    last = ends[-1] if ends else None
    while last is not None:
        chosen.append(found[last])
        last = previous[last]
    return chosen[::-1]


def _joined(hunks: Iterator[str]) -> str:
    """The beginning of the hunks. No more of them are made than that takes."""
    taken: list[str] = []
    left = _MOST_CHARS_OF_DIFF
    for piece in hunks:
        if len(piece) > left:
            return "".join([*taken, piece[:left], _CUT])
        taken.append(piece)
        left -= len(piece)
    return "".join(taken)


def _diff(text: str, old: str, new: str, count: int) -> Iterator[str]:
    """The hunks. What has changed is known, so there is nothing to search for."""
    return _hunks(_lines(text), _changes(text, old, new, count))


def _hunks(lines: list[str], changes: Iterable[_Change]) -> Iterator[str]:
    shift = 0
    group: list[_Change] = []
    for change in islice(changes, _MOST_CHANGES):
        if group and change.first - group[-1].end > 2 * _CONTEXT:
            yield from _hunk(lines, group, shift)
            shift += sum(len(each.new) - len(each.old) for each in group)
            group = []
        group.append(change)
    if group:
        yield from _hunk(lines, group, shift)


def _changes(text: str, old: str, new: str, count: int) -> Iterator[_Change]:
    """The lines around each place, those together that share one."""
    line = counted = 0
    place = text.find(old)
    while count and place >= 0:
        start = text.rfind("\n", 0, place) + 1
        line += text.count("\n", counted, start)
        counted = start
        end = start
        while count and place >= 0 and (end == start or place < end):
            behind = place + len(old)
            if behind >= end:  # otherwise it ends in the line that was looked for already
                end = _end_of_line(text, behind, joins=not new.endswith("\n"))
            place = text.find(old, behind)
            count -= 1
        before = text[start:end]
        yield _trimmed(line, _lines(before), _lines(before.replace(old, new)))


def _end_of_line(text: str, position: int, *, joins: bool) -> int:
    """Behind the line in which the replaced text ends; ``joins`` if that takes the next one in."""
    if text[position - 1] == "\n" and not joins:
        return position
    end = text.find("\n", position)
    return len(text) if end < 0 else end + 1


def _trimmed(first: int, old: list[str], new: list[str]) -> _Change:
    """Without the lines at both ends that stay as they are."""
    shorter = min(len(old), len(new))
    head = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    shorter -= head
    tail = next((n for n in range(shorter) if old[-1 - n] != new[-1 - n]), shorter)
    return _Change(first + head, old[head : len(old) - tail], new[head : len(new) - tail])


def _hunk(lines: list[str], group: list[_Change], shift: int) -> Iterator[str]:
    at = start = max(group[0].first - _CONTEXT, 0)
    end = min(group[-1].end + _CONTEXT, len(lines))
    growth = sum(len(change.new) - len(change.old) for change in group)
    ours = _range(start, end - start)
    yield f"@@ -{ours} +{_range(start + shift, end - start + growth)} @@\n"
    for change in group:
        yield from _prefixed(" ", lines[at : change.first])
        yield from _prefixed("-", change.old)
        yield from _prefixed("+", change.new)
        at = change.end
    yield from _prefixed(" ", lines[at:end])


def _range(start: int, length: int) -> str:
    if length == 1:
        return str(start + 1)
    return f"{start + (length > 0)},{length}"


def _prefixed(mark: str, lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield mark + line
        if not line.endswith("\n"):
            yield "\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    """With their ends. Only a line feed ends a line."""
    *lines, last = text.split("\n")
    whole = [f"{line}\n" for line in lines]
    return [*whole, last] if last else whole
