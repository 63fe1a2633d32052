"""The real command in a child process, with a real server behind it and a folder of its own."""

from __future__ import annotations

import asyncio
import atexit
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import msgspec
import pytest
from msgspec import Struct

from clark_agent.run_log import JsonlStore
from tests.transports.servers.bytes_server import Answer, ByteServer, Script
from tests.transports.wires_chat import DONE, chunk, piece, stream, usage

PATIENCE = 180.0  # seconds until what does not come is an error
SPENT = usage(prompt_tokens=100, completion_tokens=20)


def says(*texts: str, **settings: Any) -> Answer:
    return stream(*[chunk(content=text) for text in texts], chunk("stop"), SPENT, DONE, **settings)


def hangs(text: str) -> Answer:
    """Begins to speak and never ends."""
    return stream(chunk(content=text), hold=True)


def calls(tool: str, **arguments: Any) -> Answer:
    return calls_all((tool, arguments))


def calls_all(*calls: tuple[str, dict[str, Any]]) -> Answer:
    """Several calls in one answer."""
    pieces = [
        piece(n, f"call_{tool}", tool, msgspec.json.encode(arguments).decode())
        for n, (tool, arguments) in enumerate(calls)
    ]
    return stream(chunk(tool_calls=pieces), chunk("tool_calls"), SPENT, DONE)


class Said(Struct, frozen=True):
    """What a command has left."""

    code: int
    out: str
    err: str


class CommandLine:
    """Starts ``clark-agent`` in a folder, with a log and an environment of its own."""

    def __init__(self, home: Path, model: str | None = None) -> None:
        self.root = home / "root"
        self.root.mkdir(exist_ok=True)
        self.store = JsonlStore(home / "clark-agent" / "runs")
        self.env = {**_environment(), "XDG_STATE_HOME": str(home), "HOME": str(home)}
        if model is not None:
            self.env["CLARK_AGENT_MODEL"] = model

    async def start(
        self, *words: str, stdin: int = subprocess.DEVNULL
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "clark_agent", *words),
            cwd=self.root,
            env=self.env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    async def __call__(self, *words: str, given: str | None = None) -> Said:
        """Run a command to its end, in a fork of a process that has imported everything."""
        asked = {"words": words, "folder": str(self.root), "environment": self.env}
        return await _fork_server().run(msgspec.json.encode(asked), given)

    async def anew(self, *words: str, given: str | None = None) -> Said:
        """Run a command to its end, in a Python of its own."""
        stdin = subprocess.DEVNULL if given is None else subprocess.PIPE
        return await _ended(await self.start(*words, stdin=stdin), given)

    async def start_redirected(self, how: str, *words: str) -> asyncio.subprocess.Process:
        """Start it by a shell, with streams as in ``2>/dev/full``."""
        return await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", f'exec "$@" {how}', "sh"),
            *(sys.executable, "-m", "clark_agent", *words),
            cwd=self.root,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    async def redirected(self, how: str, *words: str) -> Said:
        return await _ended(await self.start_redirected(how, *words))

    async def each(self, commands: Iterable[Sequence[str]]) -> list[Said]:
        """Run commands one after the other."""
        return [await self(*words) for words in commands]

    @asynccontextmanager
    async def terminal(self, *words: str) -> AsyncGenerator[Terminal]:
        """The command on a terminal of its own."""
        here, there = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "clark_agent", *words),
            cwd=self.root,
            env={**self.env, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(there)
        terminal = Terminal(here, process)
        try:
            yield terminal
        finally:
            terminal.close()
            if process.returncode is None:
                process.kill()
            await process.wait()


class _ForkServer:
    """A process of `tests.cli.fork_server`. It ends with this one."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("fork_server.py")),
                    str(there.fileno()),
                ],
                pass_fds=[there.fileno()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(self._end)

    async def run(self, command: bytes, given: str | None) -> Said:
        with ExitStack() as stack:
            asked, out, err = [stack.enter_context(TemporaryFile()) for _ in range(3)]
            asked.write(command)
            asked.seek(0)
            here, there = [stack.enter_context(end) for end in socket.socketpair()]
            with _given(given) as stdin, there:
                files = (asked, stdin, out, err, there)
                socket.send_fds(self._socket, [b"x"], [file.fileno() for file in files])
            here.setblocking(False)
            async with asyncio.timeout(PATIENCE):
                code = await asyncio.get_running_loop().sock_recv(here, 16)
            out.seek(0)
            err.seek(0)
            return Said(int(code), out.read().decode(), err.read().decode())

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


_fork_server = cache(_ForkServer)


async def _ended(process: asyncio.subprocess.Process, given: str | None = None) -> Said:
    async with asyncio.timeout(PATIENCE):
        out, err = await process.communicate(None if given is None else given.encode())
    assert process.returncode is not None
    return Said(process.returncode, out.decode(), err.decode())


def _given(text: str | None) -> BinaryIO:
    """Return a pipe with a short text, or nothing."""
    if text is None:
        return open(os.devnull, "rb")
    there, here = os.pipe()
    with open(here, "wb") as pipe:
        pipe.write(text.encode())
    return open(there, "rb")


def _environment() -> dict[str, str]:
    """Return what every command needs of the environment of the tests."""
    kept = {name: os.environ[name] for name in ("PATH", "SSL_CERT_FILE") if name in os.environ}
    return {**kept, "LC_ALL": "C.UTF-8"}


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """What a person sees and types."""

    def __init__(self, fd: int, process: asyncio.subprocess.Process) -> None:
        self._fd = fd
        self._process = process
        self._raw = b""
        self._changed = asyncio.Event()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # the other end is closed
            asyncio.get_running_loop().remove_reader(self._fd)
            data = b""
        self._raw += data
        self._changed.set()

    @property
    def raw(self) -> str:
        return self._raw.decode("utf-8", "replace")

    @property
    def text(self) -> str:
        """What was shown, without what colours and moves it."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)

    async def sees(self, text: str, times: int = 1) -> str:
        return await self.until(lambda: self.text.count(text) >= times, text)

    async def until(self, is_so: Callable[[], bool], what: str) -> str:
        try:
            async with asyncio.timeout(PATIENCE):
                while not is_so():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pytest.fail(f"never came: {what}\n{self.text}")
        return self.text

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        self.type("\x03")

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self._process.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        with suppress(OSError):
            os.close(self._fd)


@asynccontextmanager
async def command_line(
    home: Path, script: Script
) -> AsyncGenerator[tuple[CommandLine, ByteServer]]:
    async with ByteServer(script) as server:
        yield CommandLine(home, f"{server.url}/v1#m"), server
