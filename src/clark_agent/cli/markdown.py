"""Markdown while it streams: the text is cut into blocks, and each block is rendered once.

A block is complete when later text can no longer change it: a paragraph or a table at a blank line,
a heading at its end, a code fence where it closes, a list at the first line after a blank one that
is not indented. The work for a delta does not grow with the answer. The open block can be shown as
plain text, from its end.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.markdown import Markdown

__all__ = ["MarkdownBlocks", "rendered"]

_FENCE = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}(\s|$)")
_ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])(\s|$)")


class MarkdownBlocks:
    """Takes the deltas of an answer and returns the blocks that they complete."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._pieces: list[str] = []
        """The unfinished line."""
        self._fence = ""
        self._is_list = False
        self._done: list[str] = []

    def feed(self, delta: str) -> list[str]:
        """Add a delta. Return the blocks that are complete now."""
        first, *others = delta.split("\n")
        self._pieces.append(first)
        for piece in others:
            self._line("".join(self._pieces))
            self._pieces = [piece]
        return self._take()

    def close(self) -> list[str]:
        """Return the rest, after the last delta."""
        self._line("".join(self._pieces))
        self._pieces = []
        self._fence = ""
        self._finish()
        return self._take()

    def tail(self, characters: int) -> str:
        """Return the end of the open block, about this many characters."""
        kept: list[str] = []
        for piece in reversed(self._pieces):
            kept.append(piece)
            characters -= len(piece)
            if characters <= 0:
                break
        else:
            for line in reversed(self._lines):
                kept.append(f"{line}\n")
                characters -= len(line) + 1
                if characters <= 0:
                    break
        return "".join(reversed(kept))

    def _line(self, line: str) -> None:
        if self._fence:
            self._in_fence(line)
        elif (fence := _FENCE.match(line)) is not None:
            if not self._is_list or not line[0].isspace():
                self._finish()
            self._fence = fence[1]
            self._lines.append(line)
        elif not line.strip():
            if self._is_list:
                self._lines.append(line)
            else:
                self._finish()
        else:
            self._text(line)

    def _in_fence(self, line: str) -> None:
        self._lines.append(line)
        mark = line.strip()
        if mark.startswith(self._fence) and not mark.strip(self._fence[0]):
            self._fence = ""
            if not self._is_list:
                self._finish()

    def _text(self, line: str) -> None:
        is_heading = _HEADING.match(line) is not None
        is_after_blank = bool(self._lines) and not self._lines[-1].strip()
        if is_heading or (is_after_blank and not line[0].isspace()):
            self._finish()
        if not self._lines:
            self._is_list = _ITEM.match(line) is not None
        self._lines.append(line)
        if is_heading:
            self._finish()

    def _finish(self) -> None:
        block = "\n".join(self._lines).rstrip()
        if block:
            self._done.append(block)
        self._lines, self._is_list = [], False

    def _take(self) -> list[str]:
        done, self._done = self._done, []
        return done


def rendered(block: str) -> Markdown:
    """Render a block with rich. Tags are shown as written, and links with their address."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    shown = Markdown("", hyperlinks=False)
    # Rich's own parser treats tags as HTML and drops them, including ``List<int>``.
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
    shown.parsed = parser.parse(block)
    return shown
