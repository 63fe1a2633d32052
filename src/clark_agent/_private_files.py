"""Files and folders for their owner alone: what a run says and does may be anybody's secret.

What these functions make has the mode 0600 or 0700, whatever the umask. What exists keeps its mode.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["make_folder", "open_file"]

_FILE, _FOLDER = 0o600, 0o700


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, and make it if there is none. Returns its descriptor."""
    flags |= os.O_CREAT | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags | os.O_EXCL, _FILE)
    except FileExistsError:
        return os.open(path, flags, _FILE)
    if sys.platform != "win32":
        os.fchmod(handle, _FILE)  # a umask can only have taken more away
    return handle


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing."""
    try:
        folder.mkdir(_FOLDER)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent)
        make_folder(folder)
    except OSError:  # such as a folder that exists on a file system that cannot be written
        if not folder.is_dir():
            raise
    else:
        folder.chmod(_FOLDER)
