"""Programs that run outside of the sandbox. No command or file tool can change them.

A workspace often contains a virtual environment with this very package. So code that starts a
process on the host follows these rules:

- The source of the program is read when the tool is made, before a command can run, and is passed
  on from memory.
- The interpreter is the one that the virtual environment was made from, by its real path. If that
  lies in the root too, the system's interpreter is used. Without one, the tool does not run.
- Programs are looked up in the system's folders, not in ``PATH``.
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
    """A Python interpreter to run programs of this package with."""

    path: str
    folders: tuple[str, ...]
    """The folders of its library, which a sandbox must show."""

    def command(self, source: str, *arguments: str) -> list[str]:
        """Return the command that runs a program without using the environment, user folder or
        working directory.
        """
        return [self.path, "-I", "-S", "-B", "-c", source, *arguments]


def find_interpreter(root: str | None) -> Interpreter | None:
    """Return the interpreter to use with a root; None if there is none outside of the root."""
    for found in (_own(), _of_system()):
        if found is not None and not (
            root is not None and any(is_below(path, root) for path in (found.path, *found.folders))
        ):
            return found
    return None


def _own() -> Interpreter | None:
    if getattr(sys, "frozen", False):  # the executable is this program, not a Python interpreter
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
    """Return the folders in a root that this program runs from and may still import from.

    Modules that lie in the root itself, not in a folder of it, are not covered.
    """
    package = os.path.dirname(os.path.dirname(__file__))
    found = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, package)]
    return [path for path in dict.fromkeys(found) if path != root and is_below(path, root)]


def is_below(path: str, folder: str) -> bool:
    """Return whether the path is the folder or lies in it. Both must be real paths."""
    return os.path.commonpath([path, folder]) == folder


@cache
def source_of(module: str) -> str:
    """Return the source of a module that is run as a program. Cached for the life of this process.

    Raises `OSError` if there is no source, as in a program that was packed without it.
    """
    return inspect.getsource(import_module(module))


def data_file(data: bytes) -> IO[bytes]:
    """Return an unnamed file with this content, for another process to read."""
    file: IO[bytes]
    if hasattr(os, "memfd_create"):
        file = FileIO(os.memfd_create("clark-agent"), "r+")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        file.write(data)
        file.flush()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
