"""The marks around untrusted text; see `clark_agent.toolkit.untrusted`.

A marked text can be cut: `head_of` and `tail_of` close and open the marks that the cut separates,
so that no part of the text loses them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import TypeAlias

__all__ = ["head_of", "is_marked", "mark_untrusted", "tail_of", "without_marks"]

_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_LENGTH = 12
# Compiled when first used, because most processes never do.
_MARKED = rf"(?s)<untrusted-([a-p]{{{_LENGTH}}})>\n(.*?)\n</untrusted-\1>"
_TAG = rf"<(/?)untrusted-([a-p]{{{_LENGTH}}})>"


def mark_untrusted(text: str) -> str:
    """Return the text between marks that it cannot forge. Equal texts get equal marks."""
    boundary = _digest(text)
    while boundary in text:  # takes a text made for it, and luck
        boundary = _digest(boundary + text)
    return f"<untrusted-{boundary}>\n{text}\n</untrusted-{boundary}>"


def without_marks(text: str) -> str:
    """Return the text without its marks, to show it to people."""
    return re.sub(_MARKED, lambda found: found[2], text)


def _digest(text: str) -> str:
    from hashlib import sha256  # only those who quote strangers need it

    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return digest[:_LENGTH].translate(_LETTERS)


# --- cutting ----------------------------------------------------------------------------------


_Span: TypeAlias = tuple[str, int, int, int, int]
"""A marked part of a text: its code, and where the mark, the text in it, and both end."""


def is_marked(text: str) -> bool:
    """Whether any part of the text is marked."""
    return next(_spans(text), None) is not None


def head_of(text: str, stop: int) -> str:
    """The text up to about this character. A mark that is open there is closed."""
    for code, start, inner_start, inner_end, end in _spans(text):
        if start >= stop:
            break
        if stop <= inner_start:
            return text[:start]
        if stop < inner_end:
            return f"{text[:stop]}\n</untrusted-{code}>"
        if stop < end:
            return text[:end]
    return text[:stop]


def tail_of(text: str, start: int) -> str:
    """The text from about this character on. A mark that is open there is opened again."""
    for code, opened, inner_start, inner_end, end in _spans(text):
        if opened >= start:
            break
        if start <= inner_start:
            return text[opened:]
        if start < inner_end:
            return f"<untrusted-{code}>\n{text[start:]}"
        if start < end:
            return text[end:]
    return text[start:]


def _spans(text: str) -> Iterator[_Span]:
    """The marked parts, in order. A mark inside another one is a part of its text."""
    if "<untrusted-" not in text:
        return
    ends: dict[str, list[int]] = {}
    for tag in re.finditer(_TAG, text):
        if tag[1] and text[tag.start() - 1 : tag.start()] == "\n":
            ends.setdefault(tag[2], []).append(tag.start())
    at = 0
    for tag in re.finditer(_TAG, text):
        after = tag.end()
        if tag[1] or tag.start() < at or text[after : after + 1] != "\n":
            continue
        closing = ends.get(tag[2], [])
        index = bisect_right(closing, after + 1)
        if index < len(closing):
            at = closing[index] + len("</untrusted->") + _LENGTH
            yield tag[2], tag.start(), after + 1, closing[index] - 1, at
