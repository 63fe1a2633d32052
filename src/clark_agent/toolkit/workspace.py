"""Workspace: a folder that the tools of an agent cannot leave.

A path comes from a model, so it is not trusted. It is never compared with the root and then opened
by name, because the file behind a name may change in between. Instead the root is opened once, and
every path is walked from there name by name, each opened relative to the folder before it. The
checks apply to what was opened, and that is what is used:

- ``..`` is refused anywhere in a path, and so is an absolute path outside of the root. An absolute
  path below the root is taken as relative to it.
- A symbolic link is never followed, neither on the way nor at the end of a path.
- Only regular files are read or replaced. A pipe, device or socket is refused without waiting for
  it. Other file systems may be mounted below the root, except those of the kernel, such as
  ``/proc``, where a process could read its own secrets.
- A file with several hard links may also have a name outside of the root. It is neither read nor
  replaced unless ``hard_links`` is set.
- A ``protected`` path, and everything below it, cannot be read, written or listed: not by its name,
  even before it exists, and not by another name (a hard link) of the same file. For files below a
  protected folder, other names are refused only while ``hard_links`` is not set. A relative path in
  ``protected`` is relative to the root.
- A ``sensitive`` path is not refused here. `Workspace.sensitive` says whether a person should be
  asked, by the rules of :mod:`clark_agent.toolkit.sensitive`, and the tools ask.
- The root is the folder that was opened, even if it is renamed or its name is reused.

A file is written completely beside the old one and then renamed over it, so that there is always
either the old or the new file. It keeps its mode, and its owner if that is permitted. If the
process is killed during a write, a file named ``.clark-agent-….tmp`` may remain; listings omit such
files. Two changes of one file wait for each other, even through two workspaces of one process.

A `Workspace` may be used from any number of threads. It knows nothing about tools: it raises a
`WorkspaceError` for a refusal, with a message that a model can act on.
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
    """The content of a folder, sorted by name."""

    path: str
    entries: tuple[Entry, ...]
    is_cut: bool = False
    """Whether the list is incomplete because the folder is too large."""
    problem: WorkspaceError | None = None
    """Why the folder could not be read."""


class Workspace:
    """A root for the tools of an agent; see the module docstring for what it refuses.

    ``max_read_bytes`` is the size of the largest file that may be read into memory as a whole, for
    example to edit it. Close the workspace when no tool uses it any more; otherwise the interpreter
    does.

    Raises `ConfigError` if the root is not a folder, or is ``/``, because nothing is outside of it.
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
        """The path of the root when the workspace was made."""
        self.hard_links = hard_links
        self.read_only = read_only
        self.max_read_bytes = max_read_bytes
        self._sensitive = SensitiveRules([*sensitive, *_host_rules(str(self.root))])
        # Longer ones first: a root that is reached through a link may lie below itself.
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
        """Return the path relative to the root, in the form of `Entry.path`, without opening
        anything.
        """
        return "/".join(self._names(path)) or "."

    def sensitive(self, path: str, access: Access) -> str | None:
        """Return why a person should approve reading or writing this path, or None."""
        return self._sensitive.reason(self.name_of(path), access)

    def look(self, path: str) -> Entry:
        """Return the entry at a path, without opening it."""
        names = self._names(path)
        if not names:
            return Entry(".", "folder", 0)
        with self._descend(names[:-1]) as descent:
            descent.check_name(names[-1])
            found = descent.look(names[-1])
            descent.check_protected(names[-1], found)
            return entry_of("/".join(names), found)

    def open(self, path: str) -> BufferedReader:
        """Open a file for reading. The caller closes it."""
        with self._descend_to_file(path) as (descent, name):
            return os.fdopen(descent.open(name, hard_links=self.hard_links), "rb")

    def read(self, path: str) -> bytes:
        """Return the whole file, if it is not larger than ``max_read_bytes``."""
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
        """Return the content of a folder. Links are listed as such; protected paths are omitted."""
        names = self._names(path)
        with self._descend(names) as descent:
            entries, is_cut = descent.scan("".join([f"{name}/" for name in names]))
        return Folder("/".join(names) or ".", tuple(entries), is_cut)

    def walk(
        self, path: str = ".", *, enter: Callable[[Entry], bool] = lambda entry: True
    ) -> Iterator[Folder]:
        """Yield a folder and the folders below it, level by level, if ``enter`` returns true for
        them.

        Each folder is opened anew from the root, so that a walk holds nothing open between steps.
        If the first folder cannot be read, the error is raised. A later one has it as its
        ``problem``.
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
        """Create or replace a file, with missing parent folders. Return whether the file is new."""
        self._check_writable()
        with self._descend_to_file(path, make=True) as (descent, name), descent.lock(name):
            old = descent.target(name, hard_links=self.hard_links)
            descent.replace(name, data, old)
        return old is None

    def update(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Replace the content of a file by ``change(content)``.

        No other thread of this process changes the file in between. If ``change`` raises, the
        exception propagates and the file stays unchanged.
        """
        self._check_writable()
        with self._descend_to_file(path) as (descent, name), descent.lock(name):
            data = self._read(descent, name)
            old = descent.target(name, hard_links=self.hard_links)
            descent.replace(name, change(data), old)

    def _check_writable(self) -> None:
        if self.read_only:
            raise WorkspaceError("the workspace is read-only", kind="read_only")

    # --- from a path to an open folder --------------------------------------------------------

    @contextmanager
    def _descend(self, names: Iterable[str], *, make: bool = False) -> Generator[Descent]:
        with self._lock:  # otherwise the descriptor might be reused in between
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
        """Return the names that lead from the root to a path."""
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

    # --- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the root. Operations in progress continue; new ones are refused."""
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
            "a Workspace needs a system that can open files relative to a folder (Linux, macOS, "
            "BSD): otherwise a path could leave the root"
        )


def _check_settings(protected: object, max_read_bytes: object) -> None:
    if isinstance(protected, str | os.PathLike):
        raise ConfigError(f"protected must be a list of paths, not {protected!r}")
    if not isinstance(max_read_bytes, int) or max_read_bytes < 1:
        raise ConfigError(f"max_read_bytes must be a number above 0, not {max_read_bytes!r}")


def _host_rules(root: str) -> list[SensitivePath]:
    """Return rules for the folders in the root that this program imports from."""
    folders = [os.path.relpath(folder, root) for folder in host_folders(root)]
    reason = "the program that runs this tool imports it"
    return [SensitivePath(f"{folder}/**", "write", reason) for folder in folders]


def _open_root(root: str) -> int:
    try:
        return open_root(root)
    except FileNotFoundError:
        raise ConfigError(f"the folder {root!r} does not exist: create it first") from None
    except NotADirectoryError:
        raise ConfigError(f"{root!r} is not a folder, so it cannot be a workspace") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{root!r} cannot be a workspace: {error}") from error


# --- names ------------------------------------------------------------------------------------


def _check_text(path: str) -> None:
    """Refuse a text that is never a valid path."""
    problem: str | None = None
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        encoded, problem = b"", f"{quoted_path(path)} is not valid Unicode"
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
