"""Files and folders that only their owner can read: a run may contain secrets.

New files and folders get the mode 0600 or 0700, whatever the umask. Existing ones keep their mode.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

__all__ = ["file_name", "make_folder", "open_file"]

_FILE, _FOLDER = 0o600, 0o700
_LONGEST = 128
# Compiled when first used, because most processes never do.
_UNSAFE = rb"[^a-z0-9._-]"
_RESERVED = r"(?:con|prn|aux|nul|com\d|lpt\d|)(?:\.|$)"  # reserved somewhere, or hidden


def file_name(text: str) -> str:
    """Return a file name for any text: another one for each, also where case makes no difference.

    Everything but small letters, digits, ``.``, ``_`` and ``-`` becomes ``%XX``. A long name is cut
    and gets a digest.
    """
    raw = text.encode("utf-8", "surrogatepass")
    name = re.sub(_UNSAFE, lambda found: b"%%%02X" % ord(found[0]), raw).decode("ascii")
    if re.match(_RESERVED, name):
        name = f"%{ord(name[0]):02X}{name[1:]}" if name else "%"
    if len(name) > _LONGEST:
        from hashlib import sha256  # few names are so long

        name = f"{name[:40]}%~{sha256(raw).hexdigest()}"
    return name


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, and create it if it is missing. Return its descriptor."""
    flags |= os.O_CREAT | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags | os.O_EXCL, _FILE)
    except FileExistsError:
        return os.open(path, flags, _FILE)
    if sys.platform != "win32":
        os.fchmod(handle, _FILE)  # the umask may have removed more
    return handle


def make_folder(folder: Path) -> None:
    """Create a folder, and the missing ones above it."""
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
