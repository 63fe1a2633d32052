"""A file through which a run shows what it does not record, while somebody reads it.

A reader creates the file and holds a shared lock on it. A run appends to the file if it is there,
one line at a time. Whoever finds that no reader holds the lock removes the file, so one that a
killed reader has left costs a run one attempt. If the file grows too large, it starts over; a
reader that was too slow misses something.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from clark_agent.run_log._files import create_file, is_at, open_file, try_lock, try_share

__all__ = ["LiveReader", "publish"]

_LARGEST = 1 << 18


def publish(path: Path, data: bytes) -> None:
    """Append a line to the file if it has a reader. Does not raise for a file that cannot be used.

    Only one thread calls this at a time for one file.
    """
    try:
        file = open_file(path)
    except OSError:  # nobody reads it
        return
    with file, suppress(OSError):
        if _remove_unused(path, file):
            return
        if _size_of(file) > _LARGEST:
            file.truncate(0)
        file.write(data + b"\n")


def _remove_unused(path: Path, file: FileIO) -> bool:
    """Remove the file if no reader has locked it, and return whether that was so. A reader that has
    just opened it notices.
    """
    if sys.platform == "win32" or not try_lock(file):  # there, a lock cannot be shared
        return False
    os.unlink(path)
    return True


class LiveReader:
    """Reads the lines that are published from now on. Without a folder to write to, there are
    none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._at = self._seen = 0
        """Where to read on, and how large the file was when it was read last."""
        self._open()

    def _open(self) -> None:
        with suppress(OSError):
            while self._file is None:
                file = create_file(self._path)
                if try_share(file) and is_at(self._path, file):
                    self._file, self._at = file, _size_of(file)
                    self._seen = self._at
                else:  # somebody is removing it
                    file.close()

    @property
    def has_more(self) -> bool:
        """Whether there may be new lines."""
        file = self._file
        return file is not None and not file.closed and _size_of(file) != self._seen

    def read(self) -> Sequence[bytes]:
        """Return the new lines."""
        file = self._file
        if file is None or file.closed:
            return ()
        with suppress(OSError):
            self._seen = _size_of(file)
            if self._seen < self._at:
                self._at = 0
            file.seek(self._at)
            data = file.read(2 * _LARGEST)
            end = data.rfind(b"\n") + 1
            self._at += end
            return data[:end].split(b"\n")[:-1]
        return ()

    def close(self) -> None:
        """Release the file. The last reader removes it."""
        file, self._file = self._file, None
        if file is None or file.closed:  # a forked process has closed it
            return
        file.close()
        with suppress(OSError), open_file(self._path) as left:
            _remove_unused(self._path, left)
        if sys.platform == "win32":
            with suppress(OSError):  # another reader has it open
                os.unlink(self._path)


def _size_of(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size
