"""The worker process of `RegexSearch`: finds a regular expression in blocks of text.

Its source is passed to an interpreter, so it imports nothing from this package. Frames arrive on
standard input and leave on standard output: four bytes with the length, then the data. The first
frame holds the pattern, each later one a block of text. The first reply is the error in the
pattern, empty if it is valid. The reply to each block is a list of pairs: the line number, and the
position in that line where the first match begins.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from struct import pack, unpack
from typing import IO


def read_frame(source: IO[bytes]) -> bytes | None:
    """Return the next frame; None at the end of the input."""
    head = source.read(4)
    if len(head) < 4:
        return None
    (length,) = unpack("<I", head)
    data = source.read(length)
    return data if len(data) == length else None


def write_frame(target: IO[bytes], data: bytes) -> None:
    """Send a frame."""
    target.write(pack("<I", len(data)) + data)
    target.flush()


def find(search: Callable[[str], re.Match[str] | None], text: str, limit: int) -> list[int]:
    """Return the matching lines and positions as one flat list of numbers."""
    found: list[int] = []
    for number, line in enumerate(text.split("\n")):
        match = search(line.removesuffix("\r"))
        if match is not None:
            found += [number, match.start()]
            if len(found) >= 2 * limit:
                break
    return found


def serve(source: IO[bytes], target: IO[bytes], *, ignore_case: bool, limit: int) -> None:
    """Reply to each block until the input ends."""
    pattern = read_frame(source)
    if pattern is None:
        return
    try:
        search = re.compile(pattern.decode(), re.IGNORECASE if ignore_case else 0).search
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        write_frame(target, (str(error) or "it is too large").encode())
        return
    write_frame(target, b"")
    while (block := read_frame(source)) is not None:
        found = find(search, block.decode(), limit)
        write_frame(target, pack(f"<{len(found)}I", *found))


_MEMORY = 2 << 30


def _limit_ourselves(seconds: int) -> None:
    """Limit our own CPU time and memory: the parent may be killed while a match runs forever."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))


if __name__ == "__main__":
    _limit_ourselves(int(sys.argv[1]))
    serve(
        sys.stdin.buffer,
        sys.stdout.buffer,
        ignore_case=sys.argv[2] == "ignore-case",
        limit=int(sys.argv[3]),
    )
