"""A command that runs, as the event loop sees it: its output as it comes, its end, and how to stop.

The work is done by a supervisor, a process of its own (``_supervisor.py``), at the other ends of
three pipes. The lifeline stops the command, when something is written to it or when it is closed,
which the kernel does if this process dies. Output and errors come through one pipe, so that they
keep their order. The status pipe is held by the supervisor alone: its end is the supervisor's end,
and so no event loop is asked to wait for processes, which not all of them can.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from threading import Thread

import msgspec
from msgspec import Struct

from clark_agent.toolkit._command_output import CommandOutput
from clark_agent.toolkit._outside import data_file
from clark_agent.tools.base import ToolContext

__all__ = ["Outcome", "RunningCommand"]

PATIENCE_SECONDS = 10.0
"""How long a supervisor may take to end a command. Then it is told to stop, and killed if even that
takes as long again.
"""

_GRACE_SECONDS = 1.0
"""Between SIGTERM and SIGKILL: the loop gives a tool 2.5 seconds to stop by itself."""
_PROGRESS_SECONDS = 0.5
_CHUNK = 65_536
_LARGEST_PIPE = 1_048_576


class Outcome(Struct, frozen=True):
    """How a command has ended, as its supervisor tells it."""

    code: int | None = None
    """The exit code, or minus the signal that killed it."""
    timed_out: bool = False
    stopped: bool = False
    crowded: bool = False
    """Whether it was ended for its many processes."""
    supervised: bool = True
    """False: the supervisor was killed, and another process has ended the command."""
    background: int = 0
    """How many processes still ran when the shell had ended."""
    left: int = 0
    """How many could not be killed."""
    errno: int = 0
    """Why it could not be started."""


class RunningCommand:
    """A command with its supervisor. Everything but `stop_from_any_thread` is for the thread of
    the event loop.

    Raises `OSError` if it cannot be started. Whoever has made it must `close` it.
    """

    outcome: Outcome | None = None
    """None until it has ended, and if the supervisor was killed."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        supervisor: Sequence[str],
        directory: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        limits: str = "",
        timeout: float,
        max_output: int,
        sandboxed: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._told = b""
        self.output = CommandOutput(max_output)
        with ExitStack() as ours, ExitStack() as theirs:
            lifeline, self._lifeline = _pipe(reader=theirs, writer=ours)
            self._output, output = _pipe(reader=ours, writer=theirs)
            self._status, status = _pipe(reader=ours, writer=theirs)
            variables = theirs.enter_context(data_file(_entries(environment)))
            passed = [status.fileno(), variables.fileno()]
            settings = [*passed, timeout, _GRACE_SECONDS, int(sandboxed), limits, directory]
            self._process = subprocess.Popen(
                [*supervisor, *map(str, settings), *argv],
                stdin=lifeline,
                stdout=output,
                stderr=output,
                pass_fds=[*passed, *descriptors],
                cwd="/",
                env={},
                start_new_session=True,
            )
            self._files = ours.pop_all()
        for end in (self._lifeline, self._output, self._status):
            os.set_blocking(end.fileno(), False)
        self._watchdog = self._loop.call_later(timeout + PATIENCE_SECONDS, self._lose_patience)
        self._loop.add_reader(self._output, self._read_output)
        self._loop.add_reader(self._status, self._read_status)

    async def watch(self, ctx: ToolContext) -> None:
        """Wait for the end, and tell now and then how far it has come."""
        told = 0
        while not self._done.done():
            await asyncio.wait([self._done], timeout=_PROGRESS_SECONDS)
            if self.output.received != told and not self._done.done():
                told = self.output.received
                await ctx.update(self.output.newest)

    async def end(self) -> None:
        """Stop it and wait until everything has ended, also when we are cancelled again: that
        takes the supervisor a moment only.
        """
        self.stop()
        while not self._done.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([self._done])

    def stop_from_any_thread(self) -> None:
        """Stop it as soon as the event loop comes to it."""
        with suppress(RuntimeError):  # the loop is closed, and so is this
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Have it ended with everything that it has started. It takes a moment."""
        if self._done.done() or self._lifeline.closed:
            return
        # Also in words: a process that was forked from ours may hold the lifeline too.
        with suppress(OSError):
            self._lifeline.write(b"\n")
        self._lifeline.close()
        self._watchdog.cancel()
        self._watchdog = self._loop.call_later(PATIENCE_SECONDS, self._lose_patience)

    def _lose_patience(self) -> None:
        """The supervisor hangs, or the command has stopped it."""
        self._process.terminate()
        self._watchdog = self._loop.call_later(PATIENCE_SECONDS, self._kill_supervisors)

    def _kill_supervisors(self) -> None:
        """Whoever of them is alive still holds the status pipe, and so its id is no other's."""
        self._process.kill()
        for pid in self._told_ids()[1:]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _told_ids(self) -> list[int]:
        """The process ids of the command and of its supervisor, if they have begun."""
        line = self._told.partition(b"\n")[0]
        return [int(word) for word in line.split() if word.isdigit() and int(word) > 1]

    def close(self) -> None:
        """Let go of it. If it still runs, it is stopped, but nobody hears of its end."""
        self._watchdog.cancel()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self._output)
            self._loop.remove_reader(self._status)
        self._files.close()
        if self._process.poll() is None:
            Thread(target=self._process.wait, daemon=True).start()

    def _read_output(self) -> None:
        data = self._output.read(_CHUNK)
        if data:
            self.output.feed(data)
        elif data is not None:
            self._loop.remove_reader(self._output)

    def _read_status(self) -> None:
        data = self._status.read(_CHUNK)
        if data:
            self._told += data
        elif data is not None:
            self._finish()

    def _finish(self) -> None:
        """The supervisor is gone. Take what is left of the output, and wait for nobody who may
        still hold the pipe.
        """
        self._loop.remove_reader(self._output)
        self._loop.remove_reader(self._status)
        self._watchdog.cancel()
        for _ in range(_LARGEST_PIPE // _CHUNK):
            data = self._output.read(_CHUNK)
            if not data:
                break
            self.output.feed(data)
        self.output.feed(b"", final=True)
        self._process.wait()  # it has ended
        outcomes = self._told.splitlines()[1:]
        if outcomes:  # each of two supervisors may have told one
            self.outcome = msgspec.json.decode(outcomes[0], type=Outcome)
        for pid in [] if outcomes else self._told_ids()[:1]:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        self._done.set_result(None)


def _entries(environment: Mapping[str, str]) -> bytes:
    entries = [f"{name}={value}\0" for name, value in environment.items()]
    return os.fsencode("".join(entries))


def _pipe(*, reader: ExitStack, writer: ExitStack) -> tuple[FileIO, FileIO]:
    """The two ends of a pipe, each with the one who closes it."""
    reading, writing = os.pipe()
    return (
        reader.enter_context(FileIO(reading, "r")),
        writer.enter_context(FileIO(writing, "w")),
    )
