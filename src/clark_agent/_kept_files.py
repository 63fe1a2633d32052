"""Kept results in files: a folder for each run, and in it a file for each result.

A file begins with a line of JSON, the sizes of the pieces; then come the pieces themselves. It is
written beside its place and moved there, so that it is there as a whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from clark_agent._kept_text import KeptDamaged, digest_of
from clark_agent._private_files import file_name, make_folder, open_file

__all__ = ["read_kept", "read_kept_in", "write_kept", "write_kept_in"]


_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


def write_kept(folder: str, run_id: str, name: str, pieces: Sequence[bytes]) -> None:
    """Keep a result of a run in a folder for all runs. Its digest is in the name of the file, so
    another writer of the same run, or a later one, never replaces it.
    """
    write_kept_in(Path(folder, file_name(run_id)), f"{name}.{digest_of(pieces)}", pieces)


def read_kept(
    folder: str, run_id: str, name: str, digest: str | None, start: int, stop: int
) -> list[bytes]:
    """Return some of its pieces. Without a digest, there must be only one of that name."""
    place = Path(folder, file_name(run_id))
    if digest is None:
        with suppress(FileNotFoundError, NotADirectoryError):
            found = [each for each in os.listdir(place) if each.startswith(f"{name}.")]
            digests = [each.removeprefix(f"{name}.") for each in found]
            digests = [each for each in digests if "." not in each]  # others have another name
            digest = digests[0] if len(digests) == 1 else None
    return [] if digest is None else read_kept_in(place, f"{name}.{digest}", start, stop)


def write_kept_in(folder: Path, name: str, pieces: Sequence[bytes]) -> Path:
    """Keep the pieces under a name, in place of what it had. Return the file."""
    make_folder(folder)
    path = folder / file_name(name)
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    sizes = msgspec.json.encode([len(piece) for piece in pieces])
    try:
        with os.fdopen(open_file(draft, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.writelines([sizes, b"\n", *pieces])
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return path


def read_kept_in(folder: Path, name: str, start: int, stop: int) -> list[bytes]:
    """Return the pieces from one number up to another; none if nothing has that name. Raises
    `KeptDamaged`.
    """
    try:
        file = open(folder / file_name(name), "rb")  # noqa: SIM115
    except (FileNotFoundError, NotADirectoryError):
        return []
    with file:
        try:
            sizes = msgspec.json.decode(file.readline(), type=list[_Size])
        except ValueError as error:
            raise KeptDamaged("its file is damaged") from error
        ends = [0, *accumulate(sizes)]
        if file.tell() + ends[-1] != os.fstat(file.fileno()).st_size:
            raise KeptDamaged("its file is not as long as it was")
        file.seek(ends[min(start, len(sizes))], os.SEEK_CUR)
        return [file.read(size) for size in sizes[start:stop]]
