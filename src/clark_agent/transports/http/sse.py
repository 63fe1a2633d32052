"""Decodes server-sent events from bytes that may be split anywhere.

Only the payloads are returned: every provider puts the type of an event into its JSON. For speed,
each read is processed as a block, ``bytes`` methods find the lines, and no byte is scanned twice.
"""

from __future__ import annotations

__all__ = ["SseDecoder"]

_NOT_ASCII = bytes(range(0x80, 0x100))
_KNOWN_FIELDS = (b"event", b"id", b"retry")
_STRAY_LIMIT = 1 << 20


class SseDecoder:
    """Takes reads and returns the payloads of the events that are complete.

    Lines that are not part of an event are kept in ``stray``, up to a megabyte: a server may answer
    with one JSON document instead of a stream.
    """

    __slots__ = ("_lines", "_stray", "_stray_size", "_tail")

    def __init__(self) -> None:
        self._tail: list[bytes] = []  # the incomplete last line, as received
        self._lines: list[bytes] = []  # the data lines of the incomplete event
        self._stray: list[bytes] = []
        self._stray_size = 0

    @property
    def stray(self) -> bytes:
        """The lines that are not part of an event."""
        return b"\n".join(self._stray)

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next read; return the payloads of the events that it completes."""
        # A CR at the very end may be half of a CR LF: keep it for the next read.
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
        """Return the last payload if no empty line ended it. Call it at the end of the bytes.

        The payload may be truncated; the caller must check it.
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
        if line[0] >= 0x80:  # a byte order mark, or a corrupted byte
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
