"""File operations for both stores: a lock that a crash releases, and a real sync."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from clark_agent import _private_files

__all__ = [
    "LockFile",
    "create_file",
    "is_at",
    "lock_within",
    "open_file",
    "sync_file",
    "sync_folder",
    "try_lock",
    "try_share",
]

_FLAGS = os.O_RDWR | os.O_APPEND


def open_file(path: str | Path) -> FileIO:
    """Open a file for reading and appending, without a buffer."""
    return FileIO(os.open(path, _FLAGS | getattr(os, "O_BINARY", 0)), "r+b")


def create_file(path: str | Path) -> FileIO:
    """Open a file in the same way, and create it if it is missing."""
    return FileIO(_private_files.open_file(path, _FLAGS), "r+b")


_locked: WeakSet[FileIO] = WeakSet()


def _forget_locks() -> None:
    """Close the locked files in a forked process.

    The lock belongs to the open file, which a fork shares. Without this, a helper process that a
    tool has forked would hold the lock as long as it lives, even after the run's own process is
    gone.
    """
    for file in list(_locked):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


if sys.platform == "win32":
    import msvcrt

    def try_lock(file: FileIO) -> bool:
        """Lock the file until it is closed or its process ends; False if it is already locked."""
        # Others cannot read a locked byte, so lock one that hardly any file reaches.
        os.lseek(file.fileno(), 0x7FFF_FFFE, os.SEEK_SET)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def try_share(file: FileIO) -> bool:
        """Return True: here, a lock cannot be shared."""
        return True

    def sync_file(file: FileIO) -> None:
        """Flush the file to the disk."""
        os.fsync(file.fileno())

    def sync_folder(folder: Path) -> None:
        """Do nothing: this system cannot sync a folder."""

else:
    import fcntl

    def try_lock(file: FileIO) -> bool:
        """Lock the file until it is closed or its process ends. Return False if it is already
        locked.

        Each open file is separate, even in the same process. A forked process does not share the
        lock.
        """
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _locked.add(file)
        return True

    def try_share(file: FileIO) -> bool:
        """Lock the file in the same way, together with others that share the lock."""
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _locked.add(file)
        return True

    def sync_file(file: FileIO) -> None:
        """Flush the file to the disk. On macOS, fsync leaves the data in the drive's cache."""
        if sys.platform == "darwin":
            fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
        else:
            os.fsync(file.fileno())

    def sync_folder(folder: Path) -> None:
        """Flush the names of the files in a folder to the disk."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def lock_within(file: FileIO, seconds: float) -> bool:
    """Lock the file. Wait for others that have locked it, at most this long."""
    until, pause = time.monotonic() + seconds, 0.0005
    while not try_lock(file):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True


class LockFile:
    """A file that exists only to be locked, and is removed on release."""

    __slots__ = ("_held", "_path", "_process")

    def __init__(self, path: str, file: FileIO) -> None:
        self._path = path
        self._held = [file]
        self._process = os.getpid()

    @classmethod
    def take(cls, path: str) -> LockFile | None:
        """Create and lock the file; None if it is already locked."""
        while True:
            file = create_file(path)
            try:
                if not try_lock(file):
                    file.close()
                    return None
                if is_at(path, file):
                    return cls(path, file)
            except BaseException:
                file.close()
                raise
            # The last holder removed it between opening and locking.
            file.close()

    def release(self) -> bool:
        """Remove the file and release the lock. Only the first call has an effect, on any thread,
        and returns True.

        A forked process does not remove the file.
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


def is_at(path: str | Path, file: FileIO) -> bool:
    """Return whether the open file still has that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
