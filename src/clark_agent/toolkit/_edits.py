"""Exact replacement of one text by another: pure functions on text.

Only an exact match, character for character, is replaced, and nothing else changes. If all lines of
a file end in CRLF, line breaks in both texts are taken as CRLF, because a model sees and writes
only line feeds. A text that is missing or not unique is refused with a hint on how to fix the call.
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
"""A change takes at least two characters, and its hunk has a header."""
_CUT = "\n[the difference is longer, and cut here]\n"
_CONTEXT = 3


class EditRefused(Exception):
    """The text cannot be replaced; the message is written for a model."""


class Edit(Struct, frozen=True):
    """The result of a replacement."""

    text: str
    count: int
    """How many places were changed."""
    line: int
    """The line of the first place, from 1."""
    diff: str
    """In the unified format, without the file header. A long diff is cut and ends with a note."""


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
    """Yield the start of every match, including overlapping ones."""
    found = text.find(old)
    while found >= 0:
        yield found
        found = text.find(old, found + 1)


def _with_breaks_of(text: str, old: str, new: str) -> tuple[str, str]:
    """Return both texts with the line breaks of the file."""
    breaks = text.count("\r\n")
    if not breaks:
        return old, new
    as_crlf = _as_crlf(old)
    if breaks == text.count("\n") or (as_crlf in text and old not in text):
        return as_crlf, _as_crlf(new)
    return old, new


def _as_crlf(text: str) -> str:
    return re.sub(r"(?<!\r)\n", "\r\n", text)


# --- messages ---------------------------------------------------------------------------------


def _not_only_once(text: str, places: list[int]) -> str:
    lines = [str(text.count("\n", 0, place) + 1) for place in places[:_MOST_PLACES]]
    more = "more than " if len(places) > _MOST_PLACES else ""
    return (
        f"'old' is there {more}{len(lines)} times, at the lines {', '.join(lines)}: give more of "
        "the text around the one you mean, or set replace_all"
    )


def _not_there(text: str, old: str, new: str) -> str:
    """Explain why the text was not found, as far as that can be guessed."""
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
    """Return the lines that match the text except for spaces and tabs, if there are any."""
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
    """Replaced lines: the number of the first, from 0, and the lines before and after."""

    first: int
    old: list[str]
    new: list[str]

    @property
    def end(self) -> int:
        return self.first + len(self.old)


def unified_diff(old: str, new: str) -> str:
    """Return the diff of two texts in the unified format, without the file header.

    The time grows little faster than the texts. A long diff is cut and ends with a note.
    """
    before, after = _lines(old), _lines(new)
    return _joined(_hunks(before, _differing(before, after)))


def _differing(before: list[str], after: list[str]) -> Iterator[_Change]:
    """Yield the changes between anchors: lines that occur once in each text, in the same order."""
    whole = _trimmed(0, before, after)
    first = start = 0
    for end, stop in [*_anchors(whole.old, whole.new), (len(whole.old), len(whole.new))]:
        change = _trimmed(whole.first + first, whole.old[first:end], whole.new[start:stop])
        if change.old or change.new:
            yield change
        first, start = end + 1, stop + 1


def _anchors(before: list[str], after: list[str]) -> list[tuple[int, int]]:
    """Return the longest list of lines that occur once in each text, in the same order."""
    ours, theirs = Counter(before), Counter(after)
    places = {line: place for place, line in enumerate(after)}
    found = [
        (n, places[line])
        for n, line in enumerate(before)
        if ours[line] == 1 and theirs.get(line) == 1
    ]
    # Longest increasing subsequence: of those with equal length, keep the one with the lowest end.
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
    """Join the first hunks, up to the length limit. Later hunks are never computed."""
    taken: list[str] = []
    left = _MOST_CHARS_OF_DIFF
    for piece in hunks:
        if len(piece) > left:
            return "".join([*taken, piece[:left], _CUT])
        taken.append(piece)
        left -= len(piece)
    return "".join(taken)


def _diff(text: str, old: str, new: str, count: int) -> Iterator[str]:
    """Yield the hunks. The changed places are known, so no diff algorithm is needed."""
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
    """Yield the lines around each place; places that share a line become one change."""
    line = counted = 0
    place = text.find(old)
    while count and place >= 0:
        start = text.rfind("\n", 0, place) + 1
        line += text.count("\n", counted, start)
        counted = start
        end = start
        while count and place >= 0 and (end == start or place < end):
            after = place + len(old)
            if after >= end:  # otherwise it ends in the line that was already found
                end = _end_of_line(text, after, joins=not new.endswith("\n"))
            place = text.find(old, after)
            count -= 1
        before = text[start:end]
        yield _trimmed(line, _lines(before), _lines(before.replace(old, new)))


def _end_of_line(text: str, position: int, *, joins: bool) -> int:
    """Return the index after the line in which the replaced text ends. ``joins`` is true if the
    replacement also pulls in the next line.
    """
    if text[position - 1] == "\n" and not joins:
        return position
    end = text.find("\n", position)
    return len(text) if end < 0 else end + 1


def _trimmed(first: int, old: list[str], new: list[str]) -> _Change:
    """Drop the unchanged lines at both ends."""
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
    """Split into lines, with their ends. Only a line feed ends a line."""
    *lines, last = text.split("\n")
    whole = [f"{line}\n" for line in lines]
    return [*whole, last] if last else whole
