"""Writers that are killed in the middle: ``python -m tests.toolkit.killed_writers ROUNDS``.

Each round forks a writer, which replaces a file over and over, and kills it with SIGKILL after a
random time. The file then holds one whole version, and the folder nothing else but, at most, what
the killed writer was writing; a listing does not tell that.

Prints the number of kills, of versions seen, and of files that were left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from clark_agent.toolkit.workspace import Workspace

LINES = 20_000


def version(number: int) -> bytes:
    return b"%08d\n" % number * LINES


def write_for_ever(root: str, number: int, done: int) -> None:
    with Workspace(root) as workspace:
        while True:
            number += 1
            workspace.write("folder/file", version(number))
            os.write(done, b".")


def current(file: Path) -> int:
    """The version that the file holds. It must be a whole one."""
    data = file.read_bytes()
    number = int(data[:8])
    assert data == version(number), f"{len(data)} bytes that begin with {data[:20]!r}"
    return number


def main(rounds: int) -> None:
    randomness = random.Random(20_260_101)
    seen: set[int] = set()
    with tempfile.TemporaryDirectory() as root:
        file = Path(root, "folder", "file")
        file.parent.mkdir()
        file.write_bytes(version(0))
        for _ in range(rounds):
            number = current(file)
            told, done = os.pipe()
            child = os.fork()
            if not child:
                try:
                    write_for_ever(root, number, done)
                finally:
                    os._exit(1)
            for _ in range(randomness.randrange(3)):  # so many are written, on a slow machine too
                os.read(told, 1)
            time.sleep(randomness.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            os.close(told)
            os.close(done)
            assert os.WIFSIGNALED(status), "the writer ended by itself"
            assert current(file) >= number
            seen.add(current(file))
        left = [name for name in os.listdir(file.parent) if name != "file"]
        assert all(name.startswith(".clark-agent-") for name in left)
        with Workspace(root) as workspace:
            assert [entry.path for entry in workspace.scan("folder").entries] == ["folder/file"]
        print(rounds, len(seen), len(left))


if __name__ == "__main__":
    main(int(sys.argv[1]))
