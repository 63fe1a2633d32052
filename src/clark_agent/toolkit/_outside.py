"""What runs outside of the sandbox: never anything that a command or a file tool could change.

A workspace often holds a virtual environment, and this very package in it. Whatever starts a
process on the host therefore keeps to these rules:

- The text of the program is read when the tool is made, before anything can run, and is passed on
  from memory.
- The interpreter is the one that the virtual environment was made from, by its real path. If that
  lies in the root too, it is the system's, and without one the tool does not run.
- Programs are looked for in the folders of the system, not in ``PATH``.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import tempfile
from functools import cache
from importlib import import_module
from io import FileIO
from typing import IO

from msgspec import Struct

__all__ = [
    "SYSTEM_PATH",
    "Interpreter",
    "data_file",
    "find_interpreter",
    "host_folders",
    "is_below",
    "source_of",
]

SYSTEM_PATH = "/usr/bin:/bin:/usr/local/bin:/usr/sbin:/sbin:/run/current-system/sw/bin"


class Interpreter(Struct, frozen=True):
    """A Python to run our own programs with."""

    path: str
    folders: tuple[str, ...]
    """Where its library is, for a sandbox to show."""

    def command(self, source: str, *arguments: str) -> list[str]:
        """Run a program without looking at any environment, user folder or working directory."""
        return [self.path, "-I", "-S", "-B", "-c", source, *arguments]


def find_interpreter(root: str | None) -> Interpreter | None:
    """The interpreter to use beside a root; None if there is none outside of it."""
    for found in (_own(), _of_system()):
        if found is not None and not (
            root is not None and any(is_below(path, root) for path in (found.path, *found.folders))
        ):
            return found
    return None


def _own() -> Interpreter | None:
    if getattr(sys, "frozen", False):  # the executable is this program, and no Python
        return None
    path: str = getattr(sys, "_base_executable", None) or sys.executable
    if not path:
        return None
    library = os.path.dirname(os.path.realpath(os.__file__))
    folders = dict.fromkeys([os.path.realpath(sys.base_prefix), library])
    return Interpreter(os.path.realpath(path), tuple(folders))


def _of_system() -> Interpreter | None:
    path = shutil.which("python3", path=SYSTEM_PATH)
    return None if path is None else Interpreter(os.path.realpath(path), ())


def host_folders(root: str) -> list[str]:
    """The folders in a root that this program runs from: it may import more from them at any time.

    A program whose own modules lie in the root itself, not in a folder of it, is not covered.
    """
    package = os.path.dirname(os.path.dirname(__file__))
    found = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, package)]
    return [path for path in dict.fromkeys(found) if path != root and is_below(path, root)]


def is_below(path: str, folder: str) -> bool:
    """Whether the path is the folder or in it. Both are real paths."""
    return os.path.commonpath([path, folder]) == folder


@cache
def source_of(module: str) -> str:
    """The text of a module that is run as a program. Read once in the life of this process.

    Raises `OSError` where there is none, as in a program that was packed without its sources.
    """
    return inspect.getsource(import_module(module))


def data_file(data: bytes) -> IO[bytes]:
    """A file without a name that has this content, to be read by another process."""
    file: IO[bytes]
    if hasattr(os, "memfd_create"):
        file = FileIO(os.memfd_create("clark-agent"), "r+")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - whoever asked closes it
    try:
        file.write(data)
        file.flush()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
