"""Runs one command and makes sure that none of its processes remain. A program, not a module.

The shell tool starts it with ``python -I -S -c`` and holds the other ends of its pipes. It imports
only what it needs, because every command waits for it to start.

    arguments        STATUS_FD ENVIRONMENT_FD TIMEOUT GRACE SANDBOXED LIMITS DIRECTORY PROGRAM …
    stdin            the lifeline: a byte, or its end because our parent has died, means stop
    stdout, stderr   those of the command
    STATUS_FD        a line with the process ids of the command and its supervisor, then one of JSON
                     when all is over
    ENVIRONMENT_FD   the environment for PROGRAM, entries that end in NUL; we have none ourselves
    LIMITS           the most processes, then resource=number, with commas; empty for no limit

On Linux it is the subreaper of all its descendants: a process that daemonises becomes its child. So
a supervisor without children has no descendants either, and ``waitpid`` reports that. To end them,
it stops all of them before it kills the first: a stopped process cannot fork, so it cannot replace
a killed one. On other systems, and where ``/proc`` does not show our own processes, it can only
signal the command's process group, which a process may leave.

A command in a sandbox cannot reach the supervisor. Any other command can kill it, so there are two
processes: the guardian, started by our parent, and its child the supervisor, which starts the
command. If the supervisor dies, the guardian inherits its descendants and ends them. If the
guardian dies, the kernel signals the supervisor, which ends them. A command that kills both at once
escapes.

With SANDBOXED the command is a sandbox. Its first process must not get SIGTERM, because all others
would die with it at once. It writes the number of leftover processes to its stdin.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

_SETTLE_SECONDS = 0.2
"""Leftover processes may end by themselves: ``> >(tee log)`` still has something to write."""
_FREEZE_SECONDS = 1.0
_KILL_SECONDS = 5.0
_PAUSE_SECONDS = 0.01
_LONGEST_WAIT = 3600.0
_MOST = 1_000_000
"""An upper bound for the reported number of leftover processes, which may be false."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_JOIN_SESSION_KEYRING = 1
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_LIFELINE = 0
_FOR_EVER = float("inf")
_COUNT_SECONDS = 0.25
"""How often the processes are counted."""

_IS_LINUX = sys.platform.startswith("linux")


# --- the descendants, from /proc ----------------------------------------------------------------


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended since
        return b""


def _state_and_parent(pid: int) -> tuple[bytes, int] | None:
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (fields[0], int(fields[1])) if len(fields) > 1 else None


def sees_processes() -> bool:
    """Return whether the numbers in ``/proc`` are valid targets for our signals. ``/proc`` may be
    empty, or show another namespace, whose numbers belong to other processes.
    """
    try:
        return _IS_LINUX and os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    """Return whether the process runs. A zombie does not."""
    found = _state_and_parent(pid)
    return found is not None and found[0] not in (b"Z", b"X")


def threads_of(pid: int) -> list[str]:
    """Return the threads of a process; none if it is gone."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def children_listed(pid: int) -> list[int]:
    """Return the children as the kernel lists them: fast enough to catch short-lived ones."""
    listed = [_read(f"/proc/{pid}/task/{thread}/children") for thread in threads_of(pid)]
    return [int(child) for text in listed for child in text.split()]


def children_by_parent() -> dict[int, list[int]]:
    """Return the children of every process, for kernels that do not list them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        found = _state_and_parent(int(name)) if name.isdigit() else None
        if found is not None:
            children.setdefault(found[1], []).append(int(name))
    return children


def descendants(pid: int) -> Iterator[int]:
    """Yield all descendants of a process, parents first. The children of a yielded process are
    looked up only when the next one is requested. If the caller has stopped it by then, they do not
    change.
    """
    is_listed = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    table = {} if is_listed else children_by_parent()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for child in children_listed(parent) if is_listed else table.get(parent, ()):
            yield child
            waiting.append(child)


# --- supervising ----------------------------------------------------------------------------------


class Supervisor:
    """One command and all its processes."""

    def __init__(
        self, *, grace: float, sandboxed: bool = False, most: int = 0, lifeline: bool = True
    ) -> None:
        self._grace = grace
        self._sandboxed = sandboxed
        self._most = most
        """The maximum number of processes and threads; 0 for no limit."""
        self._sees_processes = sees_processes()
        self.main = 0
        """The process id of the command."""
        self.ended: int | None = None
        """Its status as ``waitpid`` returned it; None while it runs."""
        self.is_stopped = False
        """Whether a stop was requested, by the lifeline or a signal."""
        self.is_crowded = False
        """Whether there were too many processes."""
        self._events = select.poll()
        if lifeline:
            self._events.register(_LIFELINE, select.POLLIN)
        self._events.register(_wake_on_signals(), select.POLLIN)

    def watch(self, timeout: float) -> bool:
        """Wait until the command ends or must end. Return whether its time is up."""
        until = time.monotonic() + timeout
        while self._reap() and self.ended is None and not self.is_stopped:
            left = until - time.monotonic()
            if left <= 0:
                return True
            if self._most:
                left = min(left, _COUNT_SECONDS)
                self.is_crowded = self._has_more_than(self._most)
            if self.is_crowded:
                break
            self._pause(left)
        return False

    def end(self) -> int:
        """End all processes. Return how many were left when the command ended."""
        background = 0
        if self.ended is not None and not self._is_gone_in(_SETTLE_SECONDS):
            background = self.count()
        if not self.is_crowded:  # a fork bomb does not stop on SIGTERM
            self._terminate()
        until = time.monotonic() + _KILL_SECONDS
        while not self._is_gone() and time.monotonic() < until:
            self._freeze()
            self._signal_all(signal.SIGKILL)
            self._pause(_PAUSE_SECONDS)
        return background

    def _has_more_than(self, most: int) -> bool:
        count = 0
        for pid in self._descendants():
            count += len(threads_of(pid))
            if count > most:
                return True
        return False

    def count(self) -> int:
        """Return the number of live processes."""
        if not self._sees_processes:
            return 0 if self._is_gone() else 1
        return sum([is_alive(pid) for pid in self._descendants()])

    def _descendants(self) -> Iterator[int]:
        return descendants(os.getpid()) if self._sees_processes else iter(())

    def _reap(self) -> bool:
        """Reap the children that have ended. Return whether any are left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self.main:
                    self.ended = status
        except ChildProcessError:
            return False

    def _is_gone(self) -> bool:
        """Return whether no process is left."""
        if self._reap():
            return False
        return _IS_LINUX or not _signal_group(self.main, 0)

    def _is_gone_in(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._is_gone():
            if time.monotonic() >= until:
                return False
            self._pause(_PAUSE_SECONDS)
        return True

    def _pause(self, seconds: float) -> None:
        """Wait until a child ends, a stop is requested, or the time is up."""
        for fd, _ in self._events.poll(min(seconds, _LONGEST_WAIT) * 1000 + 1):
            if fd == _LIFELINE:
                self.is_stopped = True
                self._events.unregister(fd)
            elif set(os.read(fd, 4096)) - {signal.SIGCHLD}:
                self.is_stopped = True

    def _terminate(self) -> None:
        """Send SIGTERM to every process, including new ones, but only once to each: many programs
        take a second one as "at once". Return when all have ended or the grace period is over.
        """
        signalled: set[int] = {self.main} if self._sandboxed else set()
        until = time.monotonic() + self._grace
        if not self._sees_processes and not self._sandboxed:
            _signal_group(self.main, signal.SIGTERM)
        while not self._is_gone() and time.monotonic() < until:
            for pid in self._descendants():
                if pid not in signalled:
                    _signal(pid, signal.SIGTERM)
                    signalled.add(pid)
            self._pause(_PAUSE_SECONDS)

    def _freeze(self) -> None:
        """Send SIGSTOP to every process until a pass finds no new one."""
        known: set[int] = set()
        until = time.monotonic() + _FREEZE_SECONDS
        while time.monotonic() < until:
            found = self._signal_all(signal.SIGSTOP)
            if found <= known:
                return
            known |= found

    def _signal_all(self, number: int) -> set[int]:
        """Send a signal to each process as soon as it is found, and to its whole group. Signalling
        a group is atomic, so it also reaches processes that fork and exit faster than we can list
        them.
        """
        found: set[int] = set()
        if not self._sees_processes:
            _signal_group(self.main, number)
        for pid in self._descendants():
            found.add(pid)
            group = _group(pid)
            _signal(pid, number)
            if group != os.getpgid(0):
                _signal_group(group, number)
        return found


def _signal(pid: int, number: int) -> None:
    if pid > 1:  # 0 and below address groups, and 1 is init
        with suppress(OSError):  # it has ended, or belongs to another user now
            os.kill(pid, number)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _signal_group(group: int, number: int) -> bool:
    if group <= 1:  # 0 is our own group, and 1 means all processes
        return False
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


def _wake_on_signals() -> int:
    """Return the reading end of a pipe that receives the number of every signal we handle."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return reading


def _prctl(option: int, value: int) -> None:
    if _IS_LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(*[ctypes.c_ulong(word) for word in (option, value, 0, 0, 0)])


def leave_keyring() -> None:
    """Join a new, empty session keyring: the inherited one holds keys of our parent.

    This fails in containers that forbid it. There the command's filter forbids it too.
    """
    number = _KEYCTL.get(os.uname().machine)
    if _IS_LINUX and number is not None:
        import ctypes

        words = (number, _JOIN_SESSION_KEYRING, 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(*[ctypes.c_ulong(word) for word in words])


# --- starting the command -------------------------------------------------------------------------


class Program:
    """The program to start, with its directory, environment and limits."""

    def __init__(
        self, argv: list[str], directory: str, environment: bytes, limits: list[tuple[str, int]]
    ) -> None:
        self.argv = argv
        self.directory = directory
        entries = [entry.partition(b"=") for entry in environment.split(b"\0") if entry]
        self.environment = {name: value for name, _, value in entries}
        self.limits = limits

    def start(self, *, stdin: int, status: int, sandboxed: bool) -> tuple[int, int]:
        """Start it in a new session. Return its process id, and 0 or the error number.

        The child reports both process ids before it runs the program, which may kill us at once.
        """
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _report(status, b"%d %d\n" % (os.getpid(), os.getppid()))
                if sandboxed:
                    leave_keyring()
                self._become(stdin)
            except OSError as error:
                os.write(writing, str(error.errno).encode())
            finally:
                os._exit(127)
        os.close(writing)
        with open(reading, "rb") as failure:
            return pid, int(failure.read() or 0)

    def _become(self, stdin: int) -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in _settable_signals():
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        _limit(self.limits)
        os.dup2(stdin, 0)
        os.chdir(self.directory)
        os.execve(self.argv[0], self.argv, self.environment)


def _limit(limits: list[tuple[str, int]]) -> None:
    """Lower the kernel's limits for this process. Only the core dump limit may rise, to one byte,
    which the kernel takes as "none": with 0 it would still start a crash handler program.
    """
    import resource

    core = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (core, core))
    for name, most in limits:
        number: int = getattr(resource, f"RLIMIT_{name}")
        lower = [
            most if now == resource.RLIM_INFINITY else min(most, now)
            for now in resource.getrlimit(number)
        ]
        with suppress(ValueError):  # this system cannot set this limit
            resource.setrlimit(number, (lower[0], lower[1]))


def _settable_signals() -> Iterable[int]:
    return [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]


def main(arguments: list[str]) -> None:
    """Run the command and report how it ended."""
    status, environment = map(int, arguments[:2])
    timeout, grace = map(float, arguments[2:4])
    sandboxed = arguments[4] == "1"
    most, *limits = arguments[5].split(",")
    with open(environment, "rb") as file:
        program = Program(
            arguments[7:], arguments[6], file.read(), [_pair(each) for each in limits]
        )
    os.set_inheritable(status, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not sandboxed and _IS_LINUX:
        supervisor = os.fork()
        if supervisor:
            _guard(supervisor, status, grace)
            return
        os.setsid()  # killing the process group of one does not reach the other
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _supervise(program, status, timeout, grace, sandboxed=sandboxed, most=int(most or 0))


def _supervise(
    program: Program, status: int, timeout: float, grace: float, *, sandboxed: bool, most: int
) -> None:
    supervisor = Supervisor(grace=grace, sandboxed=sandboxed, most=most)
    left_over, write_end = os.pipe()
    stdin = write_end if sandboxed else os.open(os.devnull, os.O_RDONLY)
    supervisor.main, errno = program.start(stdin=stdin, status=status, sandboxed=sandboxed)
    os.close(write_end)
    if errno:
        _report(status, b'{"errno": %d}\n' % errno)
        return
    timed_out = supervisor.watch(timeout)
    stopped = supervisor.ended is None and not timed_out and not supervisor.is_crowded
    background = supervisor.end()
    if sandboxed:
        background = _number(left_over)
    ended = supervisor.ended
    code = b"null" if ended is None else b"%d" % os.waitstatus_to_exitcode(ended)
    flags = (_json(timed_out), _json(stopped), _json(supervisor.is_crowded))
    _report(
        status,
        b'{"code": %s, "timed_out": %s, "stopped": %s, "crowded": %s, "background": %d, '
        b'"left": %d}\n' % (code, *flags, background, supervisor.count()),
    )


def _guard(supervisor: int, status: int, grace: float) -> None:
    """Wait for the supervisor. If it is killed, or a signal asks us to stop, end its processes."""
    guardian = Supervisor(grace=grace, lifeline=False)
    guardian.main = supervisor
    guardian.watch(_FOR_EVER)
    if guardian.ended != 0:
        guardian.end()
        _report(status, b'{"supervised": false, "left": %d}\n' % guardian.count())


def _pair(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    return name, int(number)


def _report(status: int, line: bytes) -> None:
    with suppress(OSError):  # the reader is gone, but the processes must still be ended
        os.write(status, line)


def _json(value: bool) -> bytes:
    return b"true" if value else b"false"


def _number(fd: int) -> int:
    os.set_blocking(fd, False)
    try:
        text = os.read(fd, 64).strip()
    except BlockingIOError:  # a process that could not be killed holds the other end
        return 0
    return min(int(text), _MOST) if text.isdigit() else 0


if __name__ == "__main__":
    main(sys.argv[1:])
