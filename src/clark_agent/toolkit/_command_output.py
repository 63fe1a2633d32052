"""Turns the output of a command into text for a model, in bounded memory.

Bytes arrive in chunks that end anywhere. They are decoded as UTF-8, and invalid bytes become
U+FFFD. Then everything is removed that only a terminal understands: colours and other escape
sequences, control characters, and text that a progress bar has overwritten in its line. The
beginning and the end of the rest are kept, with a count of the characters between them.

The same bytes give the same text however they are split, unless a line is longer than the buffer
for unfinished lines.
"""

from __future__ import annotations

import codecs
import re

__all__ = ["CommandOutput"]

_LONGEST_LINE = 8_192
_LONGEST_ESCAPE = 256

_ESCAPE = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]?"  # colours, cursor, erasing
    r"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # titles and links
    r"|[PX^_][^\x1b\n]*\x1b\\"  # strings for the device
    r"|[ -/]*[0-~]"  # everything else
    r")?"
)
_CONTROLS = bytes([*range(9), *range(11, 32), 127])
"""All control characters except tab and line feed."""
_WITHOUT_CONTROLS = dict.fromkeys(_CONTROLS)

_NEWEST_LINES = 10
_NEWEST_CHARACTERS = 1_000


class CommandOutput:
    """Takes bytes and keeps at most ``limit`` characters of text."""

    def __init__(self, limit: int) -> None:
        self._head_size = limit // 2
        self._tail_size = limit - self._head_size
        self._head = ""
        self._tail = ""
        self._line = ""
        """The unfinished line, which may still change."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_plain = True
        """Whether the unfinished line contains nothing that must be removed."""
        self._length = 0
        self.received = 0
        """The number of bytes received."""

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Add a chunk of output; ``final`` marks the last one."""
        self.received += len(data)
        text = self._line + self._decoder.decode(data, final)
        plain = self._is_plain and len(data.translate(None, _CONTROLS)) == len(data)
        end = len(text) if final else text.rfind("\n") + 1
        line = text[end:] if plain else _not_overwritten(text[end:])
        if len(line) > _LONGEST_LINE:
            held_back = 0 if plain else _LONGEST_ESCAPE
            self._keep(text[:end] + line[: len(line) - held_back], plain=plain)
            line = line[len(line) - held_back :]
        else:
            self._keep(text[:end], plain=plain)
        self._line = line
        self._is_plain = plain or line.isprintable()

    def _keep(self, text: str, *, plain: bool) -> None:
        if not plain:
            text = _clean(text)
        self._length += len(text)
        room = self._head_size - len(self._head)
        if room > 0:
            self._head += text[:room]
            text = text[room:]
        if text:
            self._tail = (self._tail + text)[-self._tail_size :]

    @property
    def left_out(self) -> int:
        """The number of characters dropped between the beginning and the end."""
        return self._length - len(self._head) - len(self._tail)

    @property
    def text(self) -> str:
        """The text that was kept, without the unfinished line."""
        if not self.left_out:
            return self._head + self._tail
        return (
            f"{self._head}\n[… {self.left_out} characters are left out here; to see them, write "
            f"the output to a file and read that, or print less …]\n{self._tail}"
        )

    @property
    def newest(self) -> str:
        """The last lines, including the unfinished one."""
        end = (self._head + self._tail + _clean(self._line))[-_NEWEST_CHARACTERS:]
        return "\n".join(end.splitlines()[-_NEWEST_LINES:])


def _clean(text: str) -> str:
    if "\r" in text:
        text = "\n".join([_not_overwritten(line) for line in text.split("\n")])
    return _ESCAPE.sub("", text).translate(_WITHOUT_CONTROLS)


def _not_overwritten(line: str) -> str:
    """Return what a line finally shows. A carriage return at its end may be part of a CRLF."""
    shown = line.rstrip("\r")
    start = shown.rfind("\r") + 1
    return line[start:]
