"""Workspace: a folder that the tools of an agent cannot leave.

A path comes from a model, so nothing about it is believed. It is never compared with the root and
then opened by its name, because what stands behind a name may change in between. Instead the root
is opened once, and every path is walked from there name by name, each opened relative to the folder
before it. What was opened is then looked at, and that is what is used:

- There is no way up: ``..`` is refused wherever it stands, and so is an absolute path that does not
  begin with the root. One that does is taken as relative to it.
- A symbolic link is not followed, wherever it points, neither on the way nor at its end.
- Only regular files are read or replaced: no pipe, device or socket, and none of them is waited
  for. Other file systems may be mounted below the root, but not those that the kernel makes up,
  such as ``/proc``, through which a process could read its own secrets.
- A file with several hard links may have one of its names elsewhere. It is neither read nor
  replaced unless ``hard_links`` is set.
- What is ``protected`` cannot be read, written or listed, nor can anything below it: not by its
  name, also before it exists, and not by another name (a hard link) of the same file; of what is
  below a protected folder, other names are kept out only while ``hard_links`` is not set. A
  relative path among ``protected`` is relative to the root.
- What is ``sensitive`` is not refused here. `Workspace.sensitive` says what a person should be
  asked about, by the rules of :mod:`clark_agent.toolkit.sensitive`, and the tools ask.
- The root is the folder that was opened, also when it is renamed or something else takes its name.

A file is written as a whole beside the old one and then put in its place, so that there is always
either the one or the other. Its mode stays, and its owner where that is allowed. If the process is
killed in the middle, a file named ``.clark-agent-….tmp`` may stay behind; listings leave such files
out. Two changes of one file wait for each other, also when they come through two workspaces of one
process.

A `Workspace` may be used from any number of threads. It knows nothing of tools: what it refuses it
raises as a `WorkspaceError`, in words that a model can act on.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from threading import Lock
from typing import Self
from weakref import finalize

from msgspec import Struct

from clark_agent.errors import ConfigError
from clark_agent.toolkit._descent import (
    Descent,
    Entry,
    Protected,
    WorkspaceError,
    WorkspaceErrorKind,
    can_descend,
    entry_of,
    folded,
    identity_of,
    names_in,
    open_root,
    quoted_path,
    shown,
)
from clark_agent.toolkit._outside import host_folders
from clark_agent.toolkit.sensitive import (
    SENSITIVE_PATHS,
    Access,
    SensitivePath,
    SensitiveRules,
)

__all__ = ["Entry", "Folder", "Workspace", "WorkspaceError", "WorkspaceErrorKind", "shown"]

_DEEPEST = 100
_LONGEST_PATH = 4_096
_LONGEST_NAME = 255


class Folder(Struct, frozen=True):
    """What is in a folder, sorted by name."""

    path: str
    entries: tuple[Entry, ...]
    is_cut: bool = False
    """Whether there is more in it than anybody should read."""
    problem: WorkspaceError | None = None
    """Why there is nothing to tell of it."""


class Workspace:
    """A root for the tools of an agent; see the module for what it refuses.

    ``max_read_bytes`` is the size of the largest file that is held in memory as a whole, to be
    edited for example. Close it when no tool uses it any more, or leave that to the interpreter.

    Raises `ConfigError` for a root that is no folder, or is ``/``, where nothing would be outside.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        protected: Iterable[str | os.PathLike[str]] = (),
        hard_links: bool = False,
        read_only: bool = False,
        max_read_bytes: int = 16 << 20,
        sensitive: Iterable[SensitivePath] = SENSITIVE_PATHS,
    ) -> None:
        _check_platform()
        given = os.path.abspath(os.fspath(root))
        fd = _open_root(given)
        self._fd = fd
        self._lock = Lock()
        self._close = finalize(self, os.close, fd)
        self.root = Path(os.path.realpath(given))
        """Where the root was when the workspace was made."""
        self.hard_links = hard_links
        self.read_only = read_only
        self.max_read_bytes = max_read_bytes
        self._sensitive = SensitiveRules([*sensitive, *_host_rules(str(self.root))])
        # The longer first: a root that is reached through a link may lie below itself.
        self._spellings = sorted([names_in(given), names_in(str(self.root))], key=len)[::-1]
        try:
            _check_settings(protected, max_read_bytes)
            self._identity = identity_of(os.fstat(fd))
            if self._identity == identity_of(os.stat("/")):
                raise ConfigError("'/' cannot be the root of a workspace: nothing is outside of it")
            self._protected = tuple([self._protect(path) for path in protected])
        except BaseException:
            self.close()
            raise

    # --- reading ------------------------------------------------------------------------------

    def name_of(self, path: str) -> str:
        """The path relative to the root, in the form of `Entry.path`. Nothing is opened."""
        return "/".join(self._names(path)) or "."

    def sensitive(self, path: str, access: Access) -> str | None:
        """Why a person should be asked before this is read or written; None: no reason."""
        return self._sensitive.reason(self.name_of(path), access)

    def look(self, path: str) -> Entry:
        """What there is at a path, without opening it."""
        names = self._names(path)
        if not names:
            return Entry(".", "folder", 0)
        with self._descend(names[:-1]) as descent:
            descent.check_name(names[-1])
            found = descent.look(names[-1])
            descent.check_protected(names[-1], found)
            return entry_of("/".join(names), found)

    def open(self, path: str) -> BufferedReader:
        """Open a file for reading. Whoever asks for it closes it."""
        with self._descend_to_file(path) as (descent, name):
            return os.fdopen(descent.open(name, hard_links=self.hard_links), "rb")

    def read(self, path: str) -> bytes:
        """The whole file, if it is not larger than ``max_read_bytes``."""
        with self._descend_to_file(path) as (descent, name):
            return self._read(descent, name)

    def _read(self, descent: Descent, name: str) -> bytes:
        with os.fdopen(descent.open(name, hard_links=self.hard_links), "rb") as file:
            try:
                data = file.read(self.max_read_bytes + 1)
            except OSError as error:
                raise descent.failed(error, name) from error
        if len(data) > self.max_read_bytes:
            raise WorkspaceError(
                f"{descent.quoted(name)} has more than {self.max_read_bytes:,} bytes, which is too "
                "large to be taken as a whole",
                kind="too_large",
            )
        return data

    def scan(self, path: str = ".") -> Folder:
        """What is in a folder. Links are told as such, and what is protected is not told."""
        names = self._names(path)
        with self._descend(names) as descent:
            entries, is_cut = descent.scan("".join([f"{name}/" for name in names]))
        return Folder("/".join(names) or ".", tuple(entries), is_cut)

    def walk(
        self, path: str = ".", *, enter: Callable[[Entry], bool] = lambda entry: True
    ) -> Iterator[Folder]:
        """A folder and the folders below it, level by level, those that ``enter`` agrees to.

        Each is opened anew from the root, so that a walk holds nothing open while it waits. One
        that cannot be read is told with its ``problem``; only for the first it is raised.
        """
        waiting = deque([self.name_of(path)])
        first = True
        while waiting:
            name = waiting.popleft()
            try:
                folder = self.scan(name)
            except WorkspaceError as error:
                if first:
                    raise
                folder = Folder(name, (), problem=error)
            first = False
            yield folder
            waiting.extend([e.path for e in folder.entries if e.kind == "folder" and enter(e)])

    # --- writing ------------------------------------------------------------------------------

    def write(self, path: str, data: bytes) -> bool:
        """Make or replace a file, and the folders on the way to it; whether the file is new."""
        self._check_writable()
        with self._descend_to_file(path, make=True) as (descent, name), descent.lock(name):
            old = descent.target(name, hard_links=self.hard_links)
            descent.replace(name, data, old)
        return old is None

    def update(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Replace a file by what ``change`` makes of its content.

        Nobody else in this process writes the file in between. What ``change`` raises comes out
        here, and the file stays as it was.
        """
        self._check_writable()
        with self._descend_to_file(path) as (descent, name), descent.lock(name):
            data = self._read(descent, name)
            old = descent.target(name, hard_links=self.hard_links)
            descent.replace(name, change(data), old)

    def _check_writable(self) -> None:
        if self.read_only:
            raise WorkspaceError("the workspace is read-only", kind="read_only")

    # --- the way from a path to what is there -------------------------------------------------

    @contextmanager
    def _descend(self, names: Iterable[str], *, make: bool = False) -> Generator[Descent]:
        with self._lock:  # or the number might be another file's by the time it is used
            if not self._close.alive:
                raise WorkspaceError("the workspace is closed", kind="failed")
            root = os.dup(self._fd)
        descent = Descent(root, self._protected, self._identity[0])
        try:
            for name in names:
                descent.enter(name, make=make)
            yield descent
        finally:
            descent.close()

    @contextmanager
    def _descend_to_file(self, path: str, *, make: bool = False) -> Generator[tuple[Descent, str]]:
        names = self._names(path)
        if not names or path.endswith(("/", "/.")):
            raise WorkspaceError(
                f"{quoted_path(path)} stands for a folder: name a file", kind="is_folder"
            )
        with self._descend(names[:-1], make=make) as descent:
            descent.check_name(names[-1])
            yield descent, names[-1]

    def _names(self, path: str) -> tuple[str, ...]:
        """The names that lead from the root to a path."""
        _check_text(path)
        names = names_in(path)
        if ".." in names or path == "~" or path.startswith("~/"):
            raise WorkspaceError(
                f"{quoted_path(path)} may lead out of the workspace: '..' and '~' are not allowed; "
                "give the path from the workspace's root",
                kind="outside",
            )
        if path.startswith("/"):
            names = self._below_root(path, names)
        if len(names) > _DEEPEST:
            raise WorkspaceError(
                f"{quoted_path(path)} has more than {_DEEPEST} folders in each other",
                kind="invalid",
            )
        return names

    def _below_root(self, path: str, names: tuple[str, ...]) -> tuple[str, ...]:
        for root in self._spellings:
            if names[: len(root)] == root:
                return names[len(root) :]
        raise WorkspaceError(
            f"{quoted_path(path)} is outside of the workspace: give the path from the workspace's "
            "root, without a '/' at the beginning",
            kind="outside",
        )

    def _protect(self, path: str | os.PathLike[str]) -> Protected:
        given = os.fspath(path)
        names = names_in(given)
        is_inside = not given.startswith("/")
        for root in self._spellings:
            if not is_inside and names[: len(root)] == root:
                given, is_inside = "/".join(names[len(root) :]), True
        given = os.path.normpath(given)
        with suppress(OSError):
            found = os.stat(given, dir_fd=self._fd if is_inside else None)
            if identity_of(found) == self._identity:
                raise ConfigError(f"{path} cannot be protected: it is the whole workspace")
        folder, name = os.path.split(given)
        return Protected(given, folder or ".", folded(name), is_inside)

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the root. What is under way goes on, anything else is refused."""
        with self._lock:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Workspace {self.root}{' (read-only)' if self.read_only else ''}>"


def _check_platform() -> None:
    if not can_descend():
        raise ConfigError(
            "a Workspace needs a system that opens files relative to a folder (Linux, macOS, BSD); "
            "this one does not, and without it a path cannot be kept inside"
        )


def _check_settings(protected: object, max_read_bytes: object) -> None:
    if isinstance(protected, str | os.PathLike):
        raise ConfigError(f"protected takes a list of paths, not {protected!r} alone")
    if not isinstance(max_read_bytes, int) or max_read_bytes < 1:
        raise ConfigError(f"max_read_bytes must be a number above 0, not {max_read_bytes!r}")


def _host_rules(root: str) -> list[SensitivePath]:
    """What this program runs from may lie in the root."""
    folders = [os.path.relpath(folder, root) for folder in host_folders(root)]
    reason = "the program that runs this tool imports it"
    return [SensitivePath(f"{folder}/**", "write", reason) for folder in folders]


def _open_root(root: str) -> int:
    try:
        return open_root(root)
    except FileNotFoundError:
        raise ConfigError(f"there is no folder {root!r} for a workspace: make it first") from None
    except NotADirectoryError:
        raise ConfigError(f"{root!r} is no folder, so it cannot be a workspace") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{root!r} cannot be a workspace: {error}") from error


# --- names ------------------------------------------------------------------------------------


def _check_text(path: str) -> None:
    """Refuse what is no path in any folder."""
    problem: str | None = None
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        encoded, problem = b"", f"{quoted_path(path)} is no valid Unicode"
    if not path:
        problem = "the path is empty: the workspace's root is '.'"
    elif "\0" in path:
        problem = f"{quoted_path(path)} has a NUL character in it"
    elif "\\" in path:
        problem = f"{quoted_path(path)} has a backslash in it: put '/' between the names"
    elif len(encoded) > _LONGEST_PATH:
        problem = f"{quoted_path(path)} is too long"
    elif max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
        problem = f"{quoted_path(path)} has a name in it that is too long"
    if problem is not None:
        raise WorkspaceError(problem, kind="invalid")
