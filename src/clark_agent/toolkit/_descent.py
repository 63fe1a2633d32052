"""One way down from the root of a workspace, by descriptors, and what may be done at its end.

`Descent` is where the rules of :mod:`clark_agent.toolkit.workspace` are kept. Each name is opened
relative to the folder before it and without following a link, and then what was opened is looked
at. Names are plain here: whoever gives them has taken a path apart, and none is ``..``.
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
    "invalid",  # no path at all
    "outside",  # it would leave the root
    "symlink",
    "protected",
    "hard_link",
    "special",  # a pipe, a device, a socket, or a file system of the kernel's
    "not_found",
    "is_folder",
    "not_folder",
    "too_large",
    "read_only",
    "sensitive",  # a person has to be asked, and has not agreed
    "failed",  # the operating system said no
]

# Windows has none of these, and there a Workspace cannot be made.
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
"""The device and the number of a file: the same for all its names, and for no other file."""


class WorkspaceError(ToolExecutionError):
    """A path that will not do, or a file that cannot be read or written; ``kind`` says why."""

    def __init__(self, text: str, *, kind: WorkspaceErrorKind) -> None:
        super().__init__(text)
        self.kind = kind


class Entry(Struct, frozen=True, gc=False):
    """A thing in the workspace."""

    path: str
    """Relative to the root, with ``/`` between the names; the root itself is ``.``."""
    kind: Literal["file", "folder", "symlink", "other"]
    size: int
    """In bytes; 0 for what is no file."""


class Protected(Struct, frozen=True):
    """A path that is off limits: as it was given, and where it would be if it existed."""

    path: str
    folder: str
    name: str
    is_inside: bool
    """Whether it is relative to the root, and goes with it when the root is renamed."""


class Descent:
    """One way down from the root. Closes what it has opened, the given descriptor too."""

    def __init__(self, root: int, protected: tuple[Protected, ...], device: int) -> None:
        self._root = self._folder = root
        self._protected = protected
        self._device = device
        self._walked: list[str] = []

    def close(self) -> None:
        """It is over."""
        os.close(self._root)
        if self._folder != self._root:
            os.close(self._folder)

    def enter(self, name: str, *, make: bool) -> None:
        """Go on to a folder; ``make`` it if it is not there."""
        self.check_name(name)
        try:
            try:
                fd = os.open(name, _FOLDER, dir_fd=self._folder)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):  # somebody else was faster
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
        """What there is of that name, without opening it."""
        try:
            return os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except OSError as error:
            raise self.failed(error, name) from error

    def open(self, name: str, *, hard_links: bool) -> int:
        """Open a regular file for reading. Whoever asks for it closes it."""
        # Looked at first only because to open a device may do something. What counts is below.
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
        """What is in this folder, with ``prefix`` before the names; whether there is more."""
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
        """Keep others from changing the file of that name in this folder."""
        key = (*identity_of(os.fstat(self._folder)), folded(name))
        with _making_a_lock:
            lock = _locks.get(key)
            if lock is None:
                lock = _locks[key] = Lock()
        with lock:
            yield

    def target(self, name: str, *, hard_links: bool) -> os.stat_result | None:
        """The file that is about to be replaced, if there is one and it may be."""
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
        """Put a file with this content in the place of that name."""
        temporary = f".clark-agent-{os.urandom(8).hex()}.tmp"
        try:
            # Closed to others until it has the mode of the old one.
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
        with suppress(OSError):  # not all file systems can, and the file is there already
            os.fsync(self._folder)

    # --- what is refused

    def check_name(self, name: str) -> None:
        """Refuse a name that is off limits, whether there is something of that name or not."""
        if self._protected and self._off_limits().has(
            identity_of(os.fstat(self._folder)), name, None
        ):
            raise self._is_protected(name)

    def check_protected(self, name: str, found: os.stat_result) -> None:
        """Refuse a file that is off limits, under whatever name."""
        if self._protected and identity_of(found) in self._off_limits().identities:
            raise self._is_protected(name)

    def _is_protected(self, name: str) -> WorkspaceError:
        return WorkspaceError(
            f"{self.quoted(name)} is protected: no tool may read, change or list it",
            kind="protected",
        )

    def _off_limits(self) -> _OffLimits:
        """What is protected by now. Looked up each time: it may have been made since."""
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
        # Such file systems have no blocks of their own.
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
                f"{self.quoted(name)} is no regular file but a pipe, a device or a socket",
                kind="special",
            )

    def _is_link(self, name: str) -> WorkspaceError:
        return WorkspaceError(
            f"{self.quoted(name)} is a symbolic link, and links are not followed, wherever they "
            "point: use the path of the real file",
            kind="symlink",
        )

    # --- words

    def quoted(self, name: str) -> str:
        """The path of a name in this folder; of the folder itself for an empty name."""
        return quoted_path("/".join([*self._walked, name] if name else self._walked) or ".")

    def failed(self, error: OSError, name: str) -> WorkspaceError:
        """What to say of an error of the operating system."""
        path = self.quoted(name)
        with suppress(OSError):  # it may be a link in the place of a folder, which has no code
            found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                return self._is_link(name)
        if isinstance(error, FileNotFoundError):
            return WorkspaceError(f"there is no {path}{self._hint(name)}", kind="not_found")
        if isinstance(error, NotADirectoryError):
            return WorkspaceError(f"{path} is no folder", kind="not_folder")
        if isinstance(error, IsADirectoryError):
            return WorkspaceError(f"{path} is a folder, not a file", kind="is_folder")
        return WorkspaceError(f"{path}: {error.strerror}", kind="failed")

    def _hint(self, name: str) -> str:
        """What somebody may have meant by a name that is not there."""
        try:
            entries, _ = self.scan("")
        except WorkspaceError:
            return ""
        meant = close_match(name, [entry.path for entry in entries[:1_000]])
        if meant is not None:
            return f"; did you mean {self.quoted(meant)}?"
        return f": list {self.quoted('')} to see what there is"


class _OffLimits:
    """The files and the places that are protected, at one moment."""

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
    """Open the root itself. It is the host's choice, and may be a link."""
    return os.open(root, os.O_RDONLY | _O_DIRECTORY | _O_CLOEXEC)


def identity_of(found: os.stat_result) -> Identity:
    """What a file is told from all others by."""
    return found.st_dev, found.st_ino


def _take_after(fd: int, old: os.stat_result) -> None:
    """Give a new file the owner and the mode of an old one; the owner only if we may."""
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        with suppress(PermissionError):
            os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, old.st_mode & 0o777)


def entry_of(path: str, found: os.stat_result) -> Entry:
    """What was found, for others."""
    if stat.S_ISREG(found.st_mode):
        return Entry(path, "file", found.st_size)
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, "folder", 0)
    return Entry(path, "symlink" if stat.S_ISLNK(found.st_mode) else "other", 0)


# --- names ------------------------------------------------------------------------------------

_UNSHOWABLE = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"  # or a line would be broken
)


def shown(name: str) -> str:
    """A name as it can stand in a line of text: what would break the line is escaped."""
    return _UNSHOWABLE.sub(lambda found: ascii(found[0])[1:-1], name)


def quoted_path(path: str) -> str:
    """A path in an error, cut if it is long."""
    text = shown(path)
    return f"'{text if len(text) <= 200 else text[:200] + '…'}'"


def names_in(path: str) -> tuple[str, ...]:
    """The names of a path, without those that lead nowhere."""
    return tuple([name for name in path.split("/") if name not in ("", ".")])


def folded(name: str) -> str:
    """The same for all names that some file system takes for one."""
    return unicodedata.normalize("NFC", name.casefold())
