"""Runs one command and sees to it that nothing of it is left. Not a module but a program.

The shell tool starts it with ``python -I -S -c`` and stands at the other end of its pipes. It
imports only what it needs, because every command waits for it to start.

    arguments        STATUS_FD ENVIRONMENT_FD TIMEOUT GRACE SANDBOXED LIMITS DIRECTORY PROGRAM …
    stdin            the lifeline: a byte, or its end because our parent has died, means stop
    stdout, stderr   those of the command
    STATUS_FD        a line with the process ids of the command and its supervisor, then one of JSON
                     when all is over
    ENVIRONMENT_FD   the environment for PROGRAM, entries that end in NUL; we have none ourselves
    LIMITS           the most processes, then resource=number, with commas; empty for no limit

On Linux it is the reaper of all its descendants: whoever daemonises becomes its child, so that a
process that has no children left has no descendants either, and the kernel says so. To end them,
all are stopped before the first is killed; what is stopped cannot fork, nor replace what was killed
beside it. Elsewhere, and where ``/proc`` does not show our own processes, there is only the
command's process group, which a process may leave.

A command in a sandbox cannot reach us. Any other can kill us, and so there are two of us: the
guardian, which our parent has started, and its child the supervisor, which starts the command. If
the supervisor dies the guardian gets its descendants and ends them; if the guardian dies the
supervisor is told by the kernel and ends them. Who kills both at once gets away.

With SANDBOXED the command is a sandbox, whose first process must not be told to terminate: all else
would die with it at once. What it writes to its stdin is how many processes it found left over.
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
"""What the command leaves behind may end by itself: ``> >(tee log)`` has something to write yet."""
_FREEZE_SECONDS = 1.0
_KILL_SECONDS = 5.0
_PAUSE_SECONDS = 0.01
_LONGEST_WAIT = 3600.0
_MOST = 1_000_000
"""What is told from within the sandbox need not be true."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_JOIN_SESSION_KEYRING = 1
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_LIFELINE = 0
_FOR_EVER = float("inf")
_COUNT_SECONDS = 0.25
"""How often the processes are counted."""

_IS_LINUX = sys.platform.startswith("linux")


# --- the descendants, as /proc tells of them ----------------------------------------------------


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended in the meantime
        return b""


def _state_and_parent(pid: int) -> tuple[bytes, int] | None:
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (fields[0], int(fields[1])) if len(fields) > 1 else None


def sees_processes() -> bool:
    """Whether the numbers in ``/proc`` are those that we may send signals to. There may be none, or
    those of another namespace, which belong to others.
    """
    try:
        return _IS_LINUX and os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    """Whether the process runs: one that has ended and was not waited for does not."""
    found = _state_and_parent(pid)
    return found is not None and found[0] not in (b"Z", b"X")


def threads_of(pid: int) -> list[str]:
    """The threads of a process; none if it is gone."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def children_listed(pid: int) -> list[int]:
    """The children of a process, as the kernel lists them. Fast: it outruns what forks and ends."""
    listed = [_read(f"/proc/{pid}/task/{thread}/children") for thread in threads_of(pid)]
    return [int(child) for text in listed for child in text.split()]


def children_by_parent() -> dict[int, list[int]]:
    """The children of every process, for kernels that do not list them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        found = _state_and_parent(int(name)) if name.isdigit() else None
        if found is not None:
            children.setdefault(found[1], []).append(int(name))
    return children


def descendants(pid: int) -> Iterator[int]:
    """Everything below a process, parents first: the children of one that is given are looked up
    only when the next is asked for, and do not change if it was stopped by then.
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
    """One command and all that comes of it."""

    def __init__(
        self, *, grace: float, sandboxed: bool = False, most: int = 0, lifeline: bool = True
    ) -> None:
        self._grace = grace
        self._sandboxed = sandboxed
        self._most = most
        """How many processes and threads there may be; 0: any number."""
        self._sees_processes = sees_processes()
        self.main = 0
        """The process of the command."""
        self.ended: int | None = None
        """How it has ended, as ``wait`` tells it."""
        self.is_stopped = False
        """Whether somebody has told us to stop."""
        self.is_crowded = False
        """Whether there were too many processes."""
        self._events = select.poll()
        if lifeline:
            self._events.register(_LIFELINE, select.POLLIN)
        self._events.register(_wake_on_signals(), select.POLLIN)

    def watch(self, timeout: float) -> bool:
        """Wait until the command has ended or must end. Whether its time is up."""
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
        """End what is left. How many processes the command had left behind when it ended."""
        background = 0
        if self.ended is not None and not self._is_gone_in(_SETTLE_SECONDS):
            background = self.count()
        if not self.is_crowded:  # who forks without end does not stop when told
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
        """How many processes there are."""
        if not self._sees_processes:
            return 0 if self._is_gone() else 1
        return sum([is_alive(pid) for pid in self._descendants()])

    def _descendants(self) -> Iterator[int]:
        return descendants(os.getpid()) if self._sees_processes else iter(())

    def _reap(self) -> bool:
        """Take notice of those that have ended. Whether we still have children."""
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
        """Whether nothing is left."""
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
        """Wait for a child that ends or somebody who tells us to stop."""
        for fd, _ in self._events.poll(min(seconds, _LONGEST_WAIT) * 1000 + 1):
            if fd == _LIFELINE:
                self.is_stopped = True
                self._events.unregister(fd)
            elif set(os.read(fd, 4096)) - {signal.SIGCHLD}:
                self.is_stopped = True

    def _terminate(self) -> None:
        """Tell everything to end, also what is only just being started, but nothing twice: many
        take the second time for "at once". Return when all have, or the grace is over.
        """
        told: set[int] = {self.main} if self._sandboxed else set()
        until = time.monotonic() + self._grace
        if not self._sees_processes and not self._sandboxed:
            _signal_group(self.main, signal.SIGTERM)
        while not self._is_gone() and time.monotonic() < until:
            for pid in self._descendants():
                if pid not in told:
                    _signal(pid, signal.SIGTERM)
                    told.add(pid)
            self._pause(_PAUSE_SECONDS)

    def _freeze(self) -> None:
        """Stop everything, until a look around finds nothing new."""
        known: set[int] = set()
        until = time.monotonic() + _FREEZE_SECONDS
        while time.monotonic() < until:
            found = self._signal_all(signal.SIGSTOP)
            if found <= known:
                return
            known |= found

    def _signal_all(self, number: int) -> set[int]:
        """Send a signal to each as soon as it is seen, and to its whole group: that happens at one
        blow, also to what forks and ends faster than we can look.
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
    if pid > 1:  # whatever else is no single process
        with suppress(OSError):  # it has ended, or become another user's and is out of our reach
            os.kill(pid, number)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _signal_group(group: int, number: int) -> bool:
    if group <= 1:  # 0 is our own, and the system takes 1 for all processes that there are
        return False
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


def _wake_on_signals() -> int:
    """The end of a pipe where the number of every signal arrives that we care for."""
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
    """Take a new, empty session keyring: the one we have holds keys of whoever started us.

    It fails in containers that forbid it, and there the command's filter forbids it too.
    """
    number = _KEYCTL.get(os.uname().machine)
    if _IS_LINUX and number is not None:
        import ctypes

        words = (number, _JOIN_SESSION_KEYRING, 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(*[ctypes.c_ulong(word) for word in words])


# --- starting the command -------------------------------------------------------------------------


class Program:
    """What to start, and how."""

    def __init__(
        self, argv: list[str], directory: str, environment: bytes, limits: list[tuple[str, int]]
    ) -> None:
        self.argv = argv
        self.directory = directory
        entries = [entry.partition(b"=") for entry in environment.split(b"\0") if entry]
        self.environment = {name: value for name, _, value in entries}
        self.limits = limits

    def start(self, *, stdin: int, status: int, sandboxed: bool) -> tuple[int, int]:
        """Start it in a session of its own: its process id, and 0 or why it did not start.

        It is told before the program runs, which may have nothing better to do than to kill us.
        """
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _tell(status, b"%d %d\n" % (os.getpid(), os.getppid()))
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
    """Lower what the kernel lets a process use. Nothing is raised but the size of core dumps to one
    byte, which the kernel takes for "none": with 0 it still starts a program that gets them.
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
        with suppress(ValueError):  # this system has no such limit to set
            resource.setrlimit(number, (lower[0], lower[1]))


def _settable_signals() -> Iterable[int]:
    return [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]


def main(arguments: list[str]) -> None:
    """Run the command and tell how it went."""
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
        os.setsid()  # who kills the group of one of us does not reach the other
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _supervise(program, status, timeout, grace, sandboxed=sandboxed, most=int(most or 0))


def _supervise(
    program: Program, status: int, timeout: float, grace: float, *, sandboxed: bool, most: int
) -> None:
    supervisor = Supervisor(grace=grace, sandboxed=sandboxed, most=most)
    left_over, told = os.pipe()
    stdin = told if sandboxed else os.open(os.devnull, os.O_RDONLY)
    supervisor.main, errno = program.start(stdin=stdin, status=status, sandboxed=sandboxed)
    os.close(told)
    if errno:
        _tell(status, b'{"errno": %d}\n' % errno)
        return
    timed_out = supervisor.watch(timeout)
    stopped = supervisor.ended is None and not timed_out and not supervisor.is_crowded
    background = supervisor.end()
    if sandboxed:
        background = _number(left_over)
    ended = supervisor.ended
    code = b"null" if ended is None else b"%d" % os.waitstatus_to_exitcode(ended)
    flags = (_json(timed_out), _json(stopped), _json(supervisor.is_crowded))
    _tell(
        status,
        b'{"code": %s, "timed_out": %s, "stopped": %s, "crowded": %s, "background": %d, '
        b'"left": %d}\n' % (code, *flags, background, supervisor.count()),
    )


def _guard(supervisor: int, status: int, grace: float) -> None:
    """Wait for the supervisor. If it is killed, or somebody tells us to stop, do its work."""
    guardian = Supervisor(grace=grace, lifeline=False)
    guardian.main = supervisor
    guardian.watch(_FOR_EVER)
    if guardian.ended != 0:
        guardian.end()
        _tell(status, b'{"supervised": false, "left": %d}\n' % guardian.count())


def _pair(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    return name, int(number)


def _tell(status: int, line: bytes) -> None:
    with suppress(OSError):  # nobody listens any more; what is to be done is done all the same
        os.write(status, line)


def _json(value: bool) -> bytes:
    return b"true" if value else b"false"


def _number(fd: int) -> int:
    os.set_blocking(fd, False)
    try:
        text = os.read(fd, 64).strip()
    except BlockingIOError:  # something that could not be killed holds the other end
        return 0
    return min(int(text), _MOST) if text.isdigit() else 0


if __name__ == "__main__":
    main(sys.argv[1:])
