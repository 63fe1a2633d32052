"""What both stores need of a file system: a lock that a crash releases, and a real sync."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from clark_agent import _private_files

__all__ = ["LockFile", "create_file", "open_file", "sync_file", "sync_folder", "try_lock"]

_FLAGS = os.O_RDWR | os.O_APPEND


def open_file(path: str | Path) -> FileIO:
    """Open a file for reading and writing without a buffer; what is written goes to its end."""
    return FileIO(os.open(path, _FLAGS | getattr(os, "O_BINARY", 0)), "r+b")


def create_file(path: str | Path) -> FileIO:
    """Open a file in the same way, and make it if there is none."""
    return FileIO(_private_files.open_file(path, _FLAGS), "r+b")


_locked: WeakSet[FileIO] = WeakSet()


def _forget_locks() -> None:
    """Close the locked files in a process that was forked.

    The lock belongs to the open file, which a fork shares: without this, a helper that a tool has
    forked would hold the lock for as long as it lives, also when the run's own process is gone.
    """
    for file in list(_locked):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


if sys.platform == "win32":
    import msvcrt

    def try_lock(file: FileIO) -> bool:
        """Lock the file until it is closed, or its process ends; False if it is locked already."""
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
        """Lock the file until it is closed, or its process ends; False if it is locked already.

        Each opening of the file counts, also in the same process. A forked process has no share in
        the lock.
        """
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _locked.add(file)
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

    __slots__ = ("_held", "_path", "_process")

    def __init__(self, path: str, file: FileIO) -> None:
        self._path = path
        self._held = [file]
        self._process = os.getpid()

    @classmethod
    def take(cls, path: str) -> LockFile | None:
        """Lock the file of that name, which is made for it; None if it is locked already."""
        while True:
            file = create_file(path)
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

    def release(self) -> bool:
        """Remove the file and let others lock it; once, whichever thread does it. Whether it was
        this one.

        A forked process leaves it to its parent.
        """
        try:
            file = self._held.pop()
        except IndexError:
            return False
        if self._process == os.getpid():
            with suppress(OSError):
                os.unlink(self._path)
        file.close()
        return True


def _is_at(path: str, file: FileIO) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
