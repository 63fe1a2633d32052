"""A server in a process of its own, which says on its output where it listens.

It gets a process group of its own, so that stopping it also stops whatever it started, and a pipe
as its input: when the tests are killed before they can stop it, it reads the end of that and is
expected to leave by itself. What it prints is kept from the terminal, and part of the error if it
does not start.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".cache"  # not in git; `make clean` removes it


class Child:
    """A running process; `stop` ends it and everything it started."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        self._printed = bytearray()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """All that it printed so far."""
        return self._printed.decode(errors="replace")

    def wait_for(self, pattern: str, *, seconds: float) -> str:
        """Wait until it prints `pattern`; what the first group matched."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.output)):
            if not self.running or time.monotonic() > deadline:
                said = self.output
                self.stop()
                raise RuntimeError(f"{self._process.args!r} did not start:\n{said}")
            time.sleep(0.02)
        return found[1]

    def let_go(self) -> int:
        """Close its input, as our death would, and wait for its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(timeout=10)

    def stop(self) -> None:
        """End the process group; not an error if it is gone."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        self._signal(signal.SIGKILL)  # what did not listen, and children that outlive their parent
        self._process.wait()
        # Killed is not dead yet. Its output ends with the last process that could print to it.
        self._listener.join(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        while printed := os.read(self._process.stdout.fileno(), 65536):
            self._printed += printed

    def _signal(self, number: signal.Signals) -> None:
        # The group's number is its first member's, which stays taken while any member lives.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
