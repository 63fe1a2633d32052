"""The sandbox that commands run in: bubblewrap, where there is one that works.

Inside, the root is where it always was and can be written. Of the rest of the machine there is only
what programs need to run, read-only: no home folder with its keys, none of the host's processes, no
capabilities, an empty ``/tmp`` that is gone with the command, and unless asked for, no network.

- A path that is not listed here is not there. Of two that are, one inside the other, the inner one
  counts: a root below ``/tmp`` or ``/usr`` can be written.
- Everything inside lives in its own process namespace and dies with the first process of it.
- Whether bubblewrap works is not guessed but tried, once for each program: kernels and containers
  may forbid what it needs, and say so only then.

It is a wall around what a command can reach, not around what it can use up: memory, disk and
processor are the host's to limit. What may be written in the root may be run by others later
(a git hook, a build script). With the network comes the host's own loopback. If the host is root,
so is the command, if without any rights: it cannot write to what belongs to other users, and it can
change the mode of ``/dev/null``, which is the host's.

This module knows nothing of the shell tool, which decides what to do when there is no sandbox.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache
from glob import glob
from tempfile import gettempdir
from typing import Literal, TypeAlias, get_args

from msgspec import Struct

from clark_agent.errors import ConfigError

__all__ = [
    "HOME",
    "SYSTEM_PATH",
    "SandboxMode",
    "SandboxStatus",
    "choose_sandbox",
    "sandbox_status",
    "sandboxed",
]

logger = logging.getLogger(__name__)

SandboxMode: TypeAlias = Literal["auto", "require", "off"]
"""``auto``: where it works; ``require``: or not at all; ``off``: never."""

SYSTEM_PATH = "/usr/bin:/bin:/usr/local/bin:/usr/sbin:/sbin:/run/current-system/sw/bin"
"""Where to look for programs that run outside: PATH may have folders that commands can change."""

HOME = "/sandbox"
"""The home folder inside: empty at first, and gone with the command."""

_PROBE_SECONDS = 20.0

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/nix/store", "/run/current-system", "/gnu/store"),
)
# Of /etc only what programs look up: there are passwords and private keys beside it.
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
# themselves can be written, which says nothing about the files in them.
_KERNEL_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")

# The command runs below a shell that stays, because all else dies as soon as it ends: it gives what
# the command has left running a moment to end by itself, tells on its stdin how many have not, and
# a little time to those to clean up. In a process namespace there are two besides: the reaper of
# bubblewrap, and itself, always as number 2. Anywhere else its "kill -1" would be everybody's end,
# and so it does nothing there. It outlives a SIGTERM, for the command to have the time it is given.
_KEEPER = """
[ $$ -eq 2 ] || exit 125
exec 3>&0 4>&2 </dev/null 2>/dev/null
trap : TERM INT HUP
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
    """Whether there is a sandbox here: str() is a sentence for people."""

    program: str | None = None
    """Where bubblewrap is."""
    options: tuple[str, ...] = ()
    """What it needs to be told to work here."""
    problem: str | None = None
    """Why there is no sandbox, and how to get one. None: there is one."""

    @property
    def works(self) -> bool:
        """Whether commands can be run in it."""
        return self.problem is None

    def __str__(self) -> str:
        return f"bubblewrap ({self.program})" if self.problem is None else f"none: {self.problem}"


def sandbox_status() -> SandboxStatus:
    """Whether bubblewrap is here and works. It is tried once; what it said is remembered."""
    if not sys.platform.startswith("linux"):
        return SandboxStatus(
            problem="bubblewrap is for Linux only. Run the agent in a Linux container or machine."
        )
    program = shutil.which("bwrap", path=SYSTEM_PATH) or shutil.which("bwrap")
    if program is None:
        return SandboxStatus(
            problem="bubblewrap is not installed. Install the package 'bubblewrap' (apt-get "
            "install bubblewrap, dnf install bubblewrap, apk add bubblewrap, pacman -S bubblewrap)."
        )
    return _try(os.path.abspath(program))


def choose_sandbox(mode: SandboxMode) -> SandboxStatus:
    """The sandbox to use. Raises `ConfigError` if one is required and there is none."""
    if mode not in get_args(SandboxMode):
        raise ConfigError(f"sandbox must be 'auto', 'require' or 'off', not {mode!r}")
    if mode == "off":
        return SandboxStatus(problem="it is switched off")
    status = sandbox_status()
    if mode == "require" and not status.works:
        raise ConfigError(
            f"a sandbox is required for commands, and there is none: {status.problem}"
        )
    if not status.works:
        _warn_once(f"commands will run without a sandbox: {status.problem}")
    return status


def sandboxed(
    status: SandboxStatus,
    command: str,
    *,
    shell: str,
    root: str,
    network: bool = False,
    readable: Iterable[str] = (),
) -> list[str]:
    """The program and its arguments that run a command of the shell in the sandbox."""
    if status.program is None or not status.works:
        raise ConfigError(f"there is no sandbox: {status.problem}")
    return [
        *_walls(status.program, status.options, network=network),
        *_mounts(root, network=network, readable=readable),
        *("--remount-ro", "/", "--chdir", root, "--"),
        *("/bin/sh", "-c", _KEEPER, shell, command),
    ]


def _walls(program: str, options: Iterable[str], *, network: bool) -> list[str]:
    return [
        program,
        *options,
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *(() if network else ("--unshare-net",)),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    ]


def _mounts(root: str, *, network: bool, readable: Iterable[str]) -> list[str]:
    mounts: dict[str, tuple[str, ...]] = {}
    for path in _SYSTEM:
        if os.path.islink(path):  # /bin may be a link to /usr/bin
            mounts[path] = ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            mounts[path] = ("--ro-bind", path, path)
    for name in (*_ETC, *(("resolv.conf",) if network else ())):
        for path in filter(os.path.exists, glob(f"/etc/{name}")):
            mounts[path] = ("--ro-bind", os.path.realpath(path), path)
    for path in ("/tmp", "/var/tmp", HOME):
        mounts[path] = ("--tmpfs", path)
    mounts["/proc"] = ("--proc", "/proc")
    for path in filter(os.path.exists, [f"/proc/{name}" for name in _KERNEL_SETTINGS]):
        mounts[path] = ("--ro-bind", path, path)
    mounts["/dev"] = ("--dev", "/dev")
    for path in readable:
        mounts[path] = ("--ro-bind", path, path)
    mounts[root] = ("--bind", root, root)
    outer_first = sorted(mounts, key=lambda path: path.count("/"))
    return [word for path in outer_first for word in mounts[path]]


@lru_cache
def _try(program: str) -> SandboxStatus:
    """Try it with all that is used later. A user namespace of its own is one wall more. In some
    containers root can do without and not with one.
    """
    said = ""
    for options in (("--unshare-user",), ()):
        status = SandboxStatus(program=program, options=options)
        argv = sandboxed(status, ":", shell="/bin/sh", root=os.path.realpath(gettempdir()))
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said = said or str(error)
            continue
        if done.returncode == 0:
            return status
        said = (
            said or done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        )
    return SandboxStatus(
        program=program, problem=f"{program} does not work here ({said}). {_ADVICE}"
    )


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
