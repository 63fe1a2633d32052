"""A walk down from the root of a workspace, by descriptors, and the operations at its end.

`Descent` enforces the rules of :mod:`clark_agent.toolkit.workspace`. It opens each name relative to
the folder before it, without following links, and then checks what it has opened. Names are single
path components, never ``..``: the caller has split the path.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import islice
from threading import Lock
from typing import Literal, TypeAlias
from weakref import WeakValueDictionary

from msgspec import Struct

from clark_agent.errors import ToolExecutionError
from clark_agent.tools.repair import close_match

__all__ = [
    "Descent",
    "Entry",
    "Identity",
    "Protected",
    "WorkspaceError",
    "WorkspaceErrorKind",
    "can_descend",
    "entry_of",
    "folded",
    "identity_of",
    "names_in",
    "open_root",
    "quoted_path",
    "shown",
]

WorkspaceErrorKind: TypeAlias = Literal[
    "invalid",  # not a path
    "outside",  # it would leave the root
    "symlink",
    "protected",
    "hard_link",
    "special",  # a pipe, a device, a socket, or a file of a kernel file system
    "not_found",
    "is_folder",
    "not_folder",
    "too_large",
    "read_only",
    "sensitive",  # needs a person's approval, and has none
    "failed",  # the operating system reported an error
]

# Windows lacks these flags, so a Workspace cannot be made there.
_O_DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)
_O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_O_CLOEXEC: int = getattr(os, "O_CLOEXEC", 0)
_O_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)

_FOLDER = os.O_RDONLY | _O_DIRECTORY | _O_NOFOLLOW | _O_CLOEXEC
_READ = os.O_RDONLY | _O_NOFOLLOW | _O_NONBLOCK | _O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _O_NOFOLLOW | _O_CLOEXEC

_LARGEST_FOLDER = 20_000
_TEMPORARY = re.compile(r"\.clark-agent-[0-9a-f]{16}\.tmp")

Identity: TypeAlias = tuple[int, int]
"""The device and inode number of a file: equal for all its names, different for other files."""


class WorkspaceError(ToolExecutionError):
    """A path is invalid or not allowed, or a file cannot be read or written; ``kind`` says why."""

    def __init__(self, text: str, *, kind: WorkspaceErrorKind) -> None:
        super().__init__(text)
        self.kind = kind


class Entry(Struct, frozen=True, gc=False):
    """A file, folder, link or special file in the workspace."""

    path: str
    """Relative to the root, with ``/`` between the names; the root itself is ``.``."""
    kind: Literal["file", "folder", "symlink", "other"]
    size: int
    """In bytes; 0 unless it is a regular file."""


class Protected(Struct, frozen=True):
    """A protected path: as it was given, and where it would be if it existed."""

    path: str
    folder: str
    name: str
    is_inside: bool
    """Whether it is relative to the root, so that it stays protected if the root is renamed."""


class Descent:
    """A walk down from the root. `close` closes every descriptor, including the one passed in."""

    def __init__(self, root: int, protected: tuple[Protected, ...], device: int) -> None:
        self._root = self._folder = root
        self._protected = protected
        self._device = device
        self._walked: list[str] = []

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._root)
        if self._folder != self._root:
            os.close(self._folder)

    def enter(self, name: str, *, make: bool) -> None:
        """Enter a folder; with ``make``, create it if it is missing."""
        self.check_name(name)
        try:
            try:
                fd = os.open(name, _FOLDER, dir_fd=self._folder)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):  # another process created it first
                    os.mkdir(name, dir_fd=self._folder)
                fd = os.open(name, _FOLDER, dir_fd=self._folder)
        except OSError as error:
            raise self.failed(error, name) from error
        try:
            self._check_opened(fd, name)
        except BaseException:
            os.close(fd)
            raise
        if self._folder != self._root:
            os.close(self._folder)
        self._folder = fd
        self._walked.append(name)

    def look(self, name: str) -> os.stat_result:
        """Stat the name without opening it or following a link."""
        try:
            return os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except OSError as error:
            raise self.failed(error, name) from error

    def open(self, name: str, *, hard_links: bool) -> int:
        """Open a regular file for reading. The caller closes the descriptor."""
        # Check before opening too, because opening a device may have an effect. The check that
        # counts is the one after opening.
        self._check_kind(name, self.look(name))
        try:
            fd = os.open(name, _READ, dir_fd=self._folder)
        except OSError as error:
            raise self.failed(error, name) from error
        try:
            self._check_file(name, self._check_opened(fd, name), hard_links=hard_links)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def scan(self, prefix: str) -> tuple[list[Entry], bool]:
        """Return the entries of this folder, with ``prefix`` before each name, and whether there
        are more.
        """
        hidden = self._off_limits()
        here = identity_of(os.fstat(self._folder))
        entries: list[Entry] = []
        try:
            with os.scandir(self._folder) as found:
                for each in islice(found, _LARGEST_FOLDER):
                    with suppress(FileNotFoundError):
                        about = each.stat(follow_symlinks=False)
                        if hidden.has(here, each.name, about) or _TEMPORARY.fullmatch(each.name):
                            continue
                        entries.append(entry_of(prefix + each.name, about))
                is_cut = next(found, None) is not None
        except OSError as error:
            raise self.failed(error, "") from error
        return sorted(entries, key=lambda entry: entry.path), is_cut

    # --- writing

    @contextmanager
    def lock(self, name: str) -> Generator[None]:
        """Keep other threads of this process from changing the file of that name in this folder."""
        key = (*identity_of(os.fstat(self._folder)), folded(name))
        with _making_a_lock:
            lock = _locks.get(key)
            if lock is None:
                lock = _locks[key] = Lock()
        with lock:
            yield

    def target(self, name: str, *, hard_links: bool) -> os.stat_result | None:
        """Return the stat of the file to be replaced, or None if there is no such file. Raises if
        it must not be replaced.
        """
        self.check_name(name)
        try:
            found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.failed(error, name) from error
        self.check_protected(name, found)
        self._check_file(name, found, hard_links=hard_links)
        if not found.st_mode & 0o222 or not os.access(name, os.W_OK, dir_fd=self._folder):
            raise WorkspaceError(f"{self.quoted(name)} is read-only", kind="read_only")
        return found

    def replace(self, name: str, data: bytes, old: os.stat_result | None) -> None:
        """Write a new file with this content and rename it to the name."""
        temporary = f".clark-agent-{os.urandom(8).hex()}.tmp"
        try:
            # Not accessible to other users until it has the mode of the old file.
            mode = 0o666 if old is None else 0o600
            fd = os.open(temporary, _CREATE, mode, dir_fd=self._folder)
            try:
                with os.fdopen(fd, "wb") as file:
                    if old is not None:
                        _take_after(fd, old)
                    file.write(data)
                    file.flush()
                    os.fsync(fd)
                os.replace(temporary, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=self._folder)
                raise
        except OSError as error:
            raise self.failed(error, name) from error
        with suppress(OSError):  # some file systems cannot, and the file is already in place
            os.fsync(self._folder)

    # --- what is refused

    def check_name(self, name: str) -> None:
        """Refuse a protected name, whether or not the file exists."""
        if self._protected and self._off_limits().has(
            identity_of(os.fstat(self._folder)), name, None
        ):
            raise self._is_protected(name)

    def check_protected(self, name: str, found: os.stat_result) -> None:
        """Refuse a protected file, whatever name it was reached by."""
        if self._protected and identity_of(found) in self._off_limits().identities:
            raise self._is_protected(name)

    def _is_protected(self, name: str) -> WorkspaceError:
        return WorkspaceError(
            f"{self.quoted(name)} is protected: no tool may read, change or list it",
            kind="protected",
        )

    def _off_limits(self) -> _OffLimits:
        """Look up what is protected now. Not cached: protected files may be created later."""
        limits = _OffLimits()
        for each in self._protected:
            start = self._root if each.is_inside else None
            with suppress(OSError):
                limits.places.add((identity_of(os.stat(each.folder, dir_fd=start)), each.name))
            with suppress(OSError):
                limits.identities.add(identity_of(os.stat(each.path, dir_fd=start)))
        return limits

    def _check_opened(self, fd: int, name: str) -> os.stat_result:
        found = os.fstat(fd)
        self.check_protected(name, found)
        # The kernel's file systems report no blocks.
        if found.st_dev != self._device and os.fstatvfs(fd).f_blocks == 0:
            raise WorkspaceError(
                f"{self.quoted(name)} belongs to a file system of the kernel's", kind="special"
            )
        return found

    def _check_file(self, name: str, found: os.stat_result, *, hard_links: bool) -> None:
        self._check_kind(name, found)
        if found.st_nlink > 1 and not hard_links:
            raise WorkspaceError(
                f"{self.quoted(name)} has {found.st_nlink} hard links, and another name of it may "
                "be outside of the workspace: it is not read or replaced",
                kind="hard_link",
            )

    def _check_kind(self, name: str, found: os.stat_result) -> None:
        if stat.S_ISLNK(found.st_mode):
            raise self._is_link(name)
        if stat.S_ISDIR(found.st_mode):
            raise WorkspaceError(f"{self.quoted(name)} is a folder, not a file", kind="is_folder")
        if not stat.S_ISREG(found.st_mode):
            raise WorkspaceError(
                f"{self.quoted(name)} is not a regular file but a pipe, a device or a socket",
                kind="special",
            )

    def _is_link(self, name: str) -> WorkspaceError:
        return WorkspaceError(
            f"{self.quoted(name)} is a symbolic link, and links are not followed, wherever they "
            "point: use the path of the real file",
            kind="symlink",
        )

    # --- messages

    def quoted(self, name: str) -> str:
        """Return the quoted path of a name in this folder, or of the folder itself if ``name`` is
        empty.
        """
        return quoted_path("/".join([*self._walked, name] if name else self._walked) or ".")

    def failed(self, error: OSError, name: str) -> WorkspaceError:
        """Turn an error of the operating system into a `WorkspaceError`."""
        path = self.quoted(name)
        with suppress(OSError):  # a link instead of a folder has no error code of its own
            found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                return self._is_link(name)
        if isinstance(error, FileNotFoundError):
            return WorkspaceError(f"there is no {path}{self._hint(name)}", kind="not_found")
        if isinstance(error, NotADirectoryError):
            return WorkspaceError(f"{path} is not a folder", kind="not_folder")
        if isinstance(error, IsADirectoryError):
            return WorkspaceError(f"{path} is a folder, not a file", kind="is_folder")
        return WorkspaceError(f"{path}: {error.strerror}", kind="failed")

    def _hint(self, name: str) -> str:
        """Suggest an existing name that is close to a missing one."""
        try:
            entries, _ = self.scan("")
        except WorkspaceError:
            return ""
        meant = close_match(name, [entry.path for entry in entries[:1_000]])
        if meant is not None:
            return f"; did you mean {self.quoted(meant)}?"
        return f": list {self.quoted('')} to see what there is"


class _OffLimits:
    """The files and places that are protected at one moment."""

    __slots__ = ("identities", "places")

    def __init__(self) -> None:
        self.identities: set[Identity] = set()
        self.places: set[tuple[Identity, str]] = set()

    def has(self, folder: Identity, name: str, found: os.stat_result | None) -> bool:
        if found is not None and identity_of(found) in self.identities:
            return True
        return (folder, folded(name)) in self.places


_locks: WeakValueDictionary[tuple[int, int, str], Lock] = WeakValueDictionary()
_making_a_lock = Lock()


# --- the operating system ---------------------------------------------------------------------


def can_descend() -> bool:
    """Whether this system opens files relative to a folder, and without following links."""
    needed = {os.open, os.stat, os.mkdir, os.unlink, os.rename, os.access}
    return needed <= os.supports_dir_fd and os.scandir in os.supports_fd and _O_NOFOLLOW != 0


def open_root(root: str) -> int:
    """Open the root itself. The host chose it, so it may be a link."""
    return os.open(root, os.O_RDONLY | _O_DIRECTORY | _O_CLOEXEC)


def identity_of(found: os.stat_result) -> Identity:
    """Return the key that distinguishes a file from all others."""
    return found.st_dev, found.st_ino


def _take_after(fd: int, old: os.stat_result) -> None:
    """Copy owner and mode of the old file to a new one; the owner only if permitted."""
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        with suppress(PermissionError):
            os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, old.st_mode & 0o777)


def entry_of(path: str, found: os.stat_result) -> Entry:
    """Make an `Entry` from a stat result."""
    if stat.S_ISREG(found.st_mode):
        return Entry(path, "file", found.st_size)
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, "folder", 0)
    return Entry(path, "symlink" if stat.S_ISLNK(found.st_mode) else "other", 0)


# --- names ------------------------------------------------------------------------------------

_UNSHOWABLE = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"  # these would break a line
)


def shown(name: str) -> str:
    """Return the name with characters escaped that would break a line of text."""
    return _UNSHOWABLE.sub(lambda found: ascii(found[0])[1:-1], name)


def quoted_path(path: str) -> str:
    """Quote a path for an error message, shortened if it is long."""
    text = shown(path)
    return f"'{text if len(text) <= 200 else text[:200] + '…'}'"


def names_in(path: str) -> tuple[str, ...]:
    """Split a path into its names, without empty ones and ``.``."""
    return tuple([name for name in path.split("/") if name not in ("", ".")])


def folded(name: str) -> str:
    """Return a key that is equal for names that some file system treats as the same."""
    return unicodedata.normalize("NFC", name.casefold())
