"""A running command as the event loop sees it: its output, its end, and how to stop it.

A supervisor (``_supervisor.py``), a separate process, runs the command. Three pipes connect it to
this process. The lifeline stops the command when a byte is written to it or when it is closed; the
kernel closes it if this process dies. Output and errors share one pipe, so that they keep their
order. Only the supervisor holds the status pipe, so the end of that pipe is the end of the
supervisor. This way the event loop need not be able to wait for processes, which not all can.
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
"""How long a supervisor may take to end a command. After that it gets SIGTERM, and after the same
time again SIGKILL.
"""

_GRACE_SECONDS = 1.0
"""Between SIGTERM and SIGKILL. The loop gives a tool 2.5 seconds to stop by itself."""
_PROGRESS_SECONDS = 0.5
_CHUNK = 65_536
_LARGEST_PIPE = 1_048_576


class Outcome(Struct, frozen=True):
    """How a command ended, as its supervisor reports it."""

    code: int | None = None
    """The exit code, or minus the signal that killed it."""
    timed_out: bool = False
    stopped: bool = False
    crowded: bool = False
    """Whether it was ended because it had too many processes."""
    supervised: bool = True
    """False if the supervisor was killed and another process ended the command."""
    background: int = 0
    """How many processes still ran when the shell ended."""
    left: int = 0
    """How many could not be killed."""
    errno: int = 0
    """The error number if the command could not be started."""


class RunningCommand:
    """A command and its supervisor. Call everything but `stop_from_any_thread` on the event loop's
    thread.

    Raises `OSError` if the command cannot be started. The creator must `close` it.
    """

    outcome: Outcome | None = None
    """None until the command ends. Stays None if the supervisor was killed."""

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
        self._reports = b""
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
        """Wait for the end, and send the newest output as progress now and then."""
        reported = 0
        while not self._done.done():
            await asyncio.wait([self._done], timeout=_PROGRESS_SECONDS)
            if self.output.received != reported and not self._done.done():
                reported = self.output.received
                await ctx.update(self.output.newest)

    async def end(self) -> None:
        """Stop the command and wait until all its processes have ended. Cancellation does not
        interrupt the wait, which is short.
        """
        self.stop()
        while not self._done.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([self._done])

    def stop_from_any_thread(self) -> None:
        """Ask the event loop to stop the command."""
        with suppress(RuntimeError):  # the loop is closed, so the command has been stopped
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Ask the supervisor to end the command and everything it started. Does not wait."""
        if self._done.done() or self._lifeline.closed:
            return
        # Write as well as close: a process forked from ours may still hold the lifeline open.
        with suppress(OSError):
            self._lifeline.write(b"\n")
        self._lifeline.close()
        self._watchdog.cancel()
        self._watchdog = self._loop.call_later(PATIENCE_SECONDS, self._lose_patience)

    def _lose_patience(self) -> None:
        """Terminate the supervisor: it hangs, or the command has stopped it."""
        self._process.terminate()
        self._watchdog = self._loop.call_later(PATIENCE_SECONDS, self._kill_supervisors)

    def _kill_supervisors(self) -> None:
        """Kill the supervisors. One that is alive still holds the status pipe, so its id has not
        been reused.
        """
        self._process.kill()
        for pid in self._reported_ids()[1:]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _reported_ids(self) -> list[int]:
        """Return the ids of the command and its supervisor, or [] before they are reported."""
        line = self._reports.partition(b"\n")[0]
        return [int(word) for word in line.split() if word.isdigit() and int(word) > 1]

    def close(self) -> None:
        """Release all resources. A command that still runs is stopped, and its outcome is lost."""
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
            self._reports += data
        elif data is not None:
            self._finish()

    def _finish(self) -> None:
        """Read the rest of the output after the supervisor has ended. Do not wait for the end of
        the pipe: a process that escaped may still hold it.
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
        self._process.wait()  # it has ended, so this returns at once
        outcomes = self._reports.splitlines()[1:]
        if outcomes:  # each of two supervisors may have reported one
            self.outcome = msgspec.json.decode(outcomes[0], type=Outcome)
        for pid in [] if outcomes else self._reported_ids()[:1]:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        self._done.set_result(None)


def _entries(environment: Mapping[str, str]) -> bytes:
    entries = [f"{name}={value}\0" for name, value in environment.items()]
    return os.fsencode("".join(entries))


def _pipe(*, reader: ExitStack, writer: ExitStack) -> tuple[FileIO, FileIO]:
    """Return both ends of a new pipe, each registered with the stack that closes it."""
    reading, writing = os.pipe()
    return (
        reader.enter_context(FileIO(reading, "r")),
        writer.enter_context(FileIO(writing, "w")),
    )
