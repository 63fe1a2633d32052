"""The sandbox that commands run in: bubblewrap, where it works.

Inside, the root keeps its path and is writable. The rest of the machine is visible only as far as
programs need it to run, read-only: no home folder with its keys, no processes of the host, no
capabilities, an empty ``/tmp`` that is deleted with the command, and no network unless requested.

- A path that is not listed here does not exist inside. If one listed path lies in another, the
  inner one applies: a root below ``/tmp`` or ``/usr`` is writable.
- Everything inside lives in its own process namespace and dies with its first process.
- A filter refuses system calls that commands should not need: keys, the memory of other processes,
  mounts, new user namespaces, kernel programs (:mod:`clark_agent.toolkit._seccomp`).
- The host's own code is read-only, even if it lies in the root. Otherwise a command could leave
  code there for the host to import.
- Bubblewrap gets its options and the command's environment through a file, and its own environment
  is empty: a ``LD_LIBRARY_PATH`` for the command must not load anything outside.
- Whether bubblewrap works is tested once for each program, not guessed: kernels and containers may
  forbid what it needs, and only an attempt shows that.

The sandbox limits what a command can reach. :class:`~clark_agent.toolkit.shell.CommandLimits` limit
what it can use, but not the disk as a whole, nor the processor. Files written in the root may be
run by others later (a git hook, a build script). With the network, a command also reaches the
host's own loopback. If the host is root, so is the command, but without capabilities: it cannot
write to files of other users, but it can change the mode of ``/dev/null``, which is the host's.

This module does not know the shell tool, which decides what to do without a sandbox.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from glob import glob
from itertools import product
from tempfile import gettempdir
from typing import Literal, TypeAlias, get_args

from msgspec import Struct

from clark_agent.errors import ConfigError
from clark_agent.toolkit._outside import SYSTEM_PATH, data_file, is_below
from clark_agent.toolkit._seccomp import filter_program

__all__ = [
    "HOME",
    "SandboxMode",
    "SandboxStatus",
    "choose_sandbox",
    "kept",
    "sandbox_status",
    "sandboxed",
]

logger = logging.getLogger(__name__)

SandboxMode: TypeAlias = Literal["auto", "require", "off"]
"""``auto``: use it if it works; ``require``: fail without it; ``off``: do not use it."""

HOME = "/sandbox"
"""The home folder inside: empty at first, and deleted with the command."""

_PROBE_SECONDS = 20.0

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/nix/store", "/run/current-system", "/gnu/store"),
)
# Only the parts of /etc that programs look up: it also holds passwords and private keys.
_ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d"),
    *("passwd", "group", "nsswitch.conf", "hosts", "host.conf", "hostname", "gai.conf"),
    *("protocols", "services", "localtime", "timezone", "locale.conf", "locale.alias"),
    *("os-release", "debian_version", "mime.types", "magic", "terminfo", "inputrc", "fonts"),
    *("ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf"),
    *("pki/tls/certs", "pki/tls/cert.pem", "pki/tls/openssl.cnf", "pki/ca-trust"),
    *("crypto-policies", "static", "java*", "perl", "xml"),
)

# Root may write to these without any capability. Bubblewrap covers them only if the folders
# themselves are writable, but the files in them may be writable anyway.
_KERNEL_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
# These reveal data of the whole machine, in every namespace.
_KERNEL_SECRETS = ("kcore", "keys", "key-users", "kmsg", "timer_list", "sched_debug")

# A shell that keeps running starts the command, because everything dies when the first process
# ends. It gives the processes that the command leaves behind a moment to end, writes the number of
# the remaining ones to its stdin, sends them SIGTERM and gives them a little time to clean up. Two
# processes always exist in the namespace: bubblewrap's reaper, and this shell, as number 2.
# Elsewhere its "kill -1" would end every process of the user, so it exits unless it is number 2. It
# survives SIGTERM, so that the command gets its grace period. The kernel counts processes per user
# namespace, so their limit is set inside. Shells disagree on the ulimit option for it.
_KEEPER = """
[ $$ -eq 2 ] || exit 125
exec 3>&0 4>&2 </dev/null 2>/dev/null
trap : TERM INT HUP
[ -z "$2" ] || ulimit -u "$2" || ulimit -p "$2"
(exec "$0" -c "$1") 2>&4 3>&- 4>&-
code=$?
tries=0
while set -- /proc/[0-9]*; [ $# -gt 2 ] && [ $tries -lt 24 ]; do
    [ $tries -ne 4 ] || { echo $(($# - 2)) >&3; kill -TERM -1; }
    tries=$((tries + 1))
    sleep 0.05
done
exit $code
"""


class SandboxStatus(Struct, frozen=True, kw_only=True):
    """Whether there is a working sandbox; str() gives a sentence for people."""

    program: str | None = None
    """The path of bubblewrap."""
    options: tuple[str, ...] = ()
    """Additional options that it needs here."""
    filters: bool = False
    """Whether system calls are filtered."""
    limits_scratch: bool = False
    """Whether the size of ``/tmp`` and the home folder can be limited."""
    problem: str | None = None
    """Why there is no sandbox, and how to get one; None if there is one."""

    @property
    def works(self) -> bool:
        """Whether commands can run in the sandbox."""
        return self.problem is None

    @property
    def counts_processes(self) -> bool:
        """Whether the kernel counts the sandbox's processes separately from the user's others."""
        found = re.match(r"(\d+)\.(\d+)", os.uname().release)
        is_new = found is not None and (int(found[1]), int(found[2])) >= (5, 14)
        return is_new and "--unshare-user" in self.options

    def __str__(self) -> str:
        if self.problem is not None:
            return f"none: {self.problem}"
        lacks = "" if self.filters else ", without a filter for system calls"
        return f"bubblewrap ({self.program}){lacks}"


def sandbox_status() -> SandboxStatus:
    """Return whether bubblewrap is installed and works. The result of the test is cached."""
    if not sys.platform.startswith("linux"):
        return SandboxStatus(
            problem="bubblewrap is for Linux only. Run the agent in a Linux container or machine."
        )
    program = shutil.which("bwrap", path=SYSTEM_PATH)
    if program is None:
        return SandboxStatus(
            problem="bubblewrap is not installed. Install the package 'bubblewrap' (apt-get "
            "install bubblewrap, dnf install bubblewrap, apk add bubblewrap, pacman -S bubblewrap)."
        )
    return _try(os.path.realpath(program))


def choose_sandbox(mode: SandboxMode) -> SandboxStatus:
    """Return the sandbox to use. Raises `ConfigError` if one is required and there is none."""
    if mode not in get_args(SandboxMode):
        raise ConfigError(f"sandbox must be 'auto', 'require' or 'off', not {mode!r}")
    if mode == "off":
        return SandboxStatus(problem="it is switched off")
    status = sandbox_status()
    if mode == "require" and not status.works:
        raise ConfigError(f"commands require a sandbox, but none is available: {status.problem}")
    if not status.works:
        _warn_once(f"commands will run without a sandbox: {status.problem}")
    return status


def sandboxed(
    status: SandboxStatus,
    argv: Sequence[str],
    files: ExitStack,
    *,
    root: str | None = None,
    environment: Mapping[str, str] | None = None,
    network: bool = False,
    readable: Iterable[str] = (),
    scratch: int | None = None,
    session: bool = True,
) -> tuple[list[str], list[int]]:
    """Return the arguments that run a program in the sandbox, and the descriptors to pass with
    them.

    ``files`` closes the descriptors. They are for one process, which reads them to their end.
    ``scratch`` is the size limit in bytes of each in-memory folder. Without a ``root`` only these
    folders are writable. Without a ``session`` of its own, the program stays in the process group
    of its parent.
    """
    if status.program is None or not status.works:
        raise ConfigError(f"no sandbox is available: {status.problem}")
    options = [
        *status.options,
        *_walls(network=network),
        *(("--new-session",) if session else ()),
        *_mounts(root, network=network, readable=readable, scratch=_size(status, scratch)),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", root or "/"),
    ]
    for name, value in (environment or {}).items():
        options += ["--setenv", name, value]
    descriptors: list[int] = []
    if status.filters and (program := filter_program()) is not None:
        descriptors.append(files.enter_context(data_file(program)).fileno())
        options += ["--seccomp", str(descriptors[0])]
    data = b"".join([os.fsencode(option) + b"\0" for option in options])
    descriptors.append(files.enter_context(data_file(data)).fileno())
    return [status.program, "--args", str(descriptors[-1]), "--", *argv], descriptors


def kept(status: SandboxStatus, shell: str, command: str, processes: int | None) -> list[str]:
    """Return the program that runs a shell command inside the sandbox."""
    limit = str(processes) if processes is not None and status.counts_processes else ""
    return ["/bin/sh", "-c", _KEEPER, shell, command, limit]


def _walls(*, network: bool) -> list[str]:
    return [
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *(() if network else ("--unshare-net",)),
        *("--die-with-parent", "--cap-drop", "ALL"),
    ]


def _size(status: SandboxStatus, scratch: int | None) -> tuple[str, ...]:
    return ("--size", str(scratch)) if status.limits_scratch and scratch is not None else ()


def _mounts(
    root: str | None, *, network: bool, readable: Iterable[str], scratch: tuple[str, ...]
) -> list[str]:
    mounts: dict[str, tuple[str, ...]] = {}
    for path in _SYSTEM:
        if os.path.islink(path):  # /bin may be a link to /usr/bin
            mounts[path] = ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            mounts[path] = ("--ro-bind", path, path)
    for name in (*_ETC, *(("resolv.conf",) if network else ())):
        for path in filter(os.path.exists, glob(f"/etc/{name}")):
            mounts[path] = ("--ro-bind", os.path.realpath(path), path)
    mounts["/proc"] = ("--proc", "/proc")
    for path in filter(os.path.exists, [f"/proc/{name}" for name in _KERNEL_SETTINGS]):
        mounts[path] = ("--ro-bind", path, path)
    for path in filter(os.path.exists, [f"/proc/{name}" for name in _KERNEL_SECRETS]):
        mounts[path] = ("--ro-bind", os.devnull, path)
    mounts["/dev"] = ("--dev", "/dev")
    for path in ("/tmp", "/var/tmp", "/dev/shm", HOME):
        mounts[path] = (*scratch, "--tmpfs", path)
    for path in readable:
        mounts[path] = ("--ro-bind", path, path)
        for folder in _between(root, path):
            mounts.setdefault(folder, ("--bind", folder, folder))
    if root is not None:
        mounts[root] = ("--bind", root, root)
    outer_first = sorted(mounts, key=lambda path: path.count("/"))
    return [word for path in outer_first for word in mounts[path]]


def _between(root: str | None, path: str) -> list[str]:
    """Return the folders between the root and a read-only path in it. As mount points they cannot
    be renamed. Renaming one would let a command replace what is below it.
    """
    if root is None or not is_below(path, root) or path == root:
        return []
    names = os.path.relpath(path, root).split("/")[:-1]
    return [os.path.join(root, *names[: n + 1]) for n in range(len(names))]


@lru_cache
def _try(program: str) -> SandboxStatus:
    """Try bubblewrap with everything that is used later, then without features that older versions
    or containers lack. A user namespace of its own adds protection. In some containers, root can
    use the sandbox only without one.
    """
    first_problem = ""
    has_filter = filter_program() is not None
    variants = product([True, False], [True, False][not has_filter :], [("--unshare-user",), ()])
    for limits_scratch, filters, options in variants:
        status = SandboxStatus(
            program=program, options=options, filters=filters, limits_scratch=limits_scratch
        )
        try:
            problem = _problem(status)
        except subprocess.TimeoutExpired as error:
            first_problem = first_problem or str(error)
            break
        if problem is None:
            return status
        first_problem = first_problem or problem
    return SandboxStatus(
        program=program, problem=f"{program} does not work here ({first_problem}). {_ADVICE}"
    )


def _problem(status: SandboxStatus) -> str | None:
    """Return bubblewrap's error if it does not work with these settings."""
    with ExitStack() as files:
        argv, descriptors = sandboxed(
            status,
            kept(status, "/bin/sh", ":", processes=100),
            files,
            root=os.path.realpath(gettempdir()),
            scratch=1 << 20,
        )
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=descriptors,
                env={},
                cwd="/",
                timeout=_PROBE_SECONDS,
                check=False,
            )
        except OSError as error:
            return str(error)
    if done.returncode == 0:
        return None
    return done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"


_ADVICE = (
    "The kernel or the container forbids new namespaces. In Docker, start the container with "
    "--security-opt apparmor=unconfined and, for root, --cap-add SYS_ADMIN, or for other users, "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined. On Ubuntu 24.04 and "
    "later, give bwrap an AppArmor profile, or: sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0. Elsewhere: sysctl "
    "kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000."
)


@lru_cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
