"""Server-sent events from bytes that may be cut anywhere.

Only the payloads matter here: every provider says inside its JSON what an event is. Reads are taken
a whole block at a time, lines are found by the C code of ``bytes``, and nothing is looked at twice.
"""

from __future__ import annotations

__all__ = ["SseDecoder"]

_NOT_ASCII = bytes(range(0x80, 0x100))
_KNOWN_FIELDS = (b"event", b"id", b"retry")
_STRAY_LIMIT = 1 << 20


class SseDecoder:
    """Feed it reads; it gives back the payloads of the events that are complete.

    What is no event at all is kept in ``stray``, up to a megabyte: a server that was asked for a
    stream may answer with one JSON document instead.
    """

    __slots__ = ("_lines", "_stray", "_stray_size", "_tail")

    def __init__(self) -> None:
        self._tail: list[bytes] = []  # the line that has not ended yet, as it came
        self._lines: list[bytes] = []  # the data lines of the event that has not ended yet
        self._stray: list[bytes] = []
        self._stray_size = 0

    @property
    def stray(self) -> bytes:
        """The lines that belong to no event."""
        return b"\n".join(self._stray)

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next read; return the payloads of the events that it completes."""
        # A CR at the very end may be half of a CR LF: it waits for what follows.
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        if not cut and not (data and self._tail and self._tail[-1].endswith(b"\r")):
            if data:
                self._tail.append(data)
            return []
        block = data[:cut]
        if self._tail:
            block = b"".join((*self._tail, block))
            self._tail.clear()
        if cut < len(data):
            self._tail.append(data[cut:])
        return self._read(block)

    def end(self) -> list[bytes]:
        """The bytes have ended: the payload that was not closed by an empty line, if there is one.

        It may be cut off; whoever asks has to see whether it can be used.
        """
        block = b"".join((*self._tail, b"\n\n"))
        self._tail.clear()
        return self._read(block)

    def _read(self, block: bytes) -> list[bytes]:
        payloads: list[bytes] = []
        lines = self._lines
        for line in block.splitlines():
            if line.startswith(b"data:"):
                lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line:
                self._other(line)
            elif lines:
                payloads.append(lines[0] if len(lines) == 1 else b"\n".join(lines))
                lines.clear()
        return payloads

    def _other(self, line: bytes) -> None:
        if line[0] >= 0x80:  # a byte order mark, or a byte that went bad on the way
            line = line.lstrip(_NOT_ASCII)
            if line.startswith(b"data:"):
                self._lines.append(line[5:].removeprefix(b" "))
                return
        if line == b"data":
            self._lines.append(b"")
            return
        name = line.partition(b":")[0]
        if name in _KNOWN_FIELDS or not name or name == b"data":
            return
        self._stray_size += len(line)
        if self._stray_size <= _STRAY_LIMIT:
            self._stray.append(line)
