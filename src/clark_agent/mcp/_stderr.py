"""The standard error of a server that was started: read all the time, its last lines kept.

A thread reads it: a server that floods it must not slow the event loop down, and one whose pipe is
full would stop. The thread ends when the server does.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from threading import Lock, Thread

__all__ = ["StderrTail"]

logger = logging.getLogger(__name__)

_LINES = 20
_LINE_BYTES = 500
_CHUNK = 65_536


class StderrTail:
    """A pipe to give to a process. Close ``writer`` when the process has it."""

    def __init__(self, server: str) -> None:
        reading, writing = os.pipe()
        self.writer = os.fdopen(writing, "w")
        self._lines: deque[bytes] = deque(maxlen=_LINES)
        self._rest = b""
        self._lock = Lock()
        name = f"clark-agent-mcp-stderr-{server}"
        self._thread = Thread(target=self._read, args=(reading,), name=name, daemon=True)
        self._thread.start()

    def close_writer(self) -> None:
        """Give up this process's end of the pipe, so that the thread notices the other's end."""
        self.writer.close()

    def join(self, seconds: float) -> None:
        """Wait for the rest of what an ended server wrote."""
        self._thread.join(seconds)

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines, without blank ones."""
        with self._lock:
            last = [*self._lines, self._rest[:_LINE_BYTES]]
        texts = [line.decode("utf-8", "replace").rstrip() for line in last]
        return tuple([text for text in texts if text])

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while chunk := pipe.read(_CHUNK):
                # Only the last lines of a chunk can be among the last lines of all.
                parts = (self._rest + chunk).rsplit(b"\n", _LINES + 1)
                with self._lock:
                    self._rest = parts.pop()[-_CHUNK:]
                    self._lines.extend([part[-_CHUNK:][:_LINE_BYTES] for part in parts])
