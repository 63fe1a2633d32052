"""What both stores need of a file system: a lock that a crash releases, and a real sync."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import FileIO
from pathlib import Path

__all__ = ["LockFile", "open_file", "sync_file", "sync_folder", "try_lock"]


def open_file(path: str | Path, flags: int) -> FileIO:
    """Open a file for reading and writing without a buffer; what is written goes to its end.

    A new one is for its owner alone: a log holds everything that was said.
    """
    flags |= os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)
    return FileIO(os.open(path, flags, 0o600), "r+b")


if sys.platform == "win32":
    import msvcrt

    def try_lock(file: FileIO) -> bool:
        """Lock the file until it is closed, or its process ends; False if somebody else has."""
        # The locked byte cannot be read by others, so it is one that is hardly ever there.
        os.lseek(file.fileno(), 0x7FFF_FFFE, os.SEEK_SET)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def sync_file(file: FileIO) -> None:
        """Have the disk take what was written."""
        os.fsync(file.fileno())

    def sync_folder(folder: Path) -> None:
        """Nothing: here a folder cannot be synced."""

else:
    import fcntl

    def try_lock(file: FileIO) -> bool:
        """Lock the file until it is closed, or its process ends; False if somebody else has.

        Each opening of the file is somebody else, also in the same process.
        """
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def sync_file(file: FileIO) -> None:
        """Have the disk take what was written. On macOS, fsync leaves it in the drive's cache."""
        if sys.platform == "darwin":
            fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
        else:
            os.fsync(file.fileno())

    def sync_folder(folder: Path) -> None:
        """Have the disk take the names of the files in a folder."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class LockFile:
    """A file that is there to be locked, and is removed when it no longer is."""

    __slots__ = ("_file", "_path", "_process")

    def __init__(self, path: str, file: FileIO) -> None:
        self._path = path
        self._file = file
        self._process = os.getpid()

    @classmethod
    def take(cls, path: str) -> LockFile | None:
        """Lock the file of that name, which is made for it; None if somebody else has."""
        while True:
            file = open_file(path, os.O_CREAT)
            try:
                if not try_lock(file):
                    file.close()
                    return None
                if _is_at(path, file):
                    return cls(path, file)
            except BaseException:
                file.close()
                raise
            # Whoever had it removed it between the opening and the locking.
            file.close()

    def release(self) -> None:
        """Remove the file and let others lock it. A forked process leaves it to its parent."""
        if not self._file.closed and self._process == os.getpid():
            with suppress(OSError):
                os.unlink(self._path)
        self._file.close()


def _is_at(path: str, file: FileIO) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
