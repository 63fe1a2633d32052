"""Runs a server until those who started it are gone: ``guard.py USER FOLDER COMMAND…``.

The input of this process is a pipe from the tests. If they are killed, it ends: the server is
stopped at once and its folder removed. If this process is killed itself, Linux ends the server.
It knows nothing of the package, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def main() -> int:
    user, folder, *command = sys.argv[1:]
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        user=user or None,
        group=None if not user else _group_of(user),
        extra_groups=None if not user else [],
        cwd=folder,
        preexec_fn=lambda: end_with_parent(signal.SIGQUIT),
    )
    print(f"pid: {server.pid}", flush=True)
    is_orphan = threading.Event()

    def watch() -> None:
        os.read(0, 1)  # returns at the end; `sys.stdin` would hold up the exit of this process
        is_orphan.set()
        server.send_signal(signal.SIGQUIT)  # Postgres: stop without waiting for anything
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    code = server.wait()
    if is_orphan.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _group_of(user: str) -> int:
    import pwd

    return pwd.getpwnam(user).pw_gid


def end_with_parent(number: signal.Signals) -> None:
    """On Linux: get this signal when the parent of this process dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    # The tests stop the server itself. What reaches the whole group must not stop the guard first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main())
