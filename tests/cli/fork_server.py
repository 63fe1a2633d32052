"""A process that has imported the command line and forks for each command.

    python tests/cli/fork_server.py FD

To start Python and import the command takes a quarter of a second of CPU, with MCP more than half
of one; to fork takes a hundredth. Each message on the Unix socket FD is one byte with five
descriptors: a file with the words, the folder and the environment of the command as JSON, its
stdin, stdout and stderr, and a pipe for its exit code. When the socket ends, so do all processes.

Only the tests of `tests.cli.command_line` use it. It imports nothing of theirs, since a command has
to find its modules by itself.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import sys
import threading
from importlib import import_module
from typing import NoReturn

MODULES = (
    "clark_agent.mcp.tool_set",
    "clark_agent.mcp._sdk",
    "clark_agent.transports.openai_chat",
    "clark_agent.transports.local",
    "clark_agent.run_log.sqlite",
    "anyio._backends._asyncio",
    "openai.resources.chat",
)
"""What commands import only when they need it."""


def serve(asked: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks are not waited for
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, 1, 5)
        if not message:
            os.killpg(0, signal.SIGKILL)
        if not os.fork():
            asked.close()
            _keep(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(command: int, stdin: int, stdout: int, stderr: int, code: int) -> None:
    """Run the command in a child, and report how that ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (pid := os.fork()):
        os.close(code)
        with open(command, encoding="utf-8") as file:
            asked = json.load(file)
        for descriptor, number in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _run(asked["words"], asked["folder"], asked["environment"])
    _, status = os.waitpid(pid, 0)
    os.write(code, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(words: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """Do what ``python -m clark_agent`` does."""
    from clark_agent.cli import main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [folder, *filter(None, paths)]
    sys.argv[1:] = words
    code: object = None
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    assert isinstance(code, int)
    # As `multiprocessing` does it: to take down the interpreter would take longer than a command.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    from clark_agent.cli.app import COMMANDS

    for name in {module for module, _ in COMMANDS.values()}:
        import_module(f"clark_agent.cli.commands.{name}")
    for name in MODULES:
        import_module(name)
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        serve(asked)
