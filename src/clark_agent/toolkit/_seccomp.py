"""The system calls that commands in the sandbox cannot make, as a program for the kernel.

Bubblewrap decides what a command can see. This filter removes the parts of the kernel that a
command could use to see more, or to attack the kernel itself: the keys of other processes, other
processes' memory, new namespaces and mounts, kernel programs and kernel modules.

- A refused call fails with ``EPERM``. ``clone3`` fails with ``ENOSYS``: its flags are in memory,
  where a filter cannot look, and every C library then falls back to ``clone``.
- Only the native system calls of the machine exist. A program of another architecture is killed.
- There is a program for the machines in `_MACHINES`. Elsewhere `filter_program` returns None.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from struct import pack

from msgspec import Struct

__all__ = ["REFUSED", "UNKNOWN", "Machine", "filter_program", "this_machine"]

CLONE_NEWUSER = 0x1000_0000
X32_BIT = 0x4000_0000

# fmt: off
REFUSED: dict[str, tuple[int, int]] = {  # the number on x86_64, and in the table of newer machines
    # keys that belong to the user, whichever process added them
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # parts of the kernel that often have flaws, or reveal its secrets
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "syslog": (103, 116), "lookup_dcookie": (212, 18), "fanotify_init": (300, 262),
    # the whole machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112),
    # what is mounted where
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265), "setns": (308, 268),
}
_ONLY_X86_64 = {"iopl": 172, "ioperm": 173, "modify_ldt": 154, "uselib": 134}
UNKNOWN: dict[str, tuple[int, int]] = {"clone3": (435, 435)}
_NEW_NAMESPACE: dict[str, tuple[int, int]] = {"clone": (56, 220), "unshare": (272, 97)}
# fmt: on


class Machine(Struct, frozen=True):
    """One architecture, as the filter sees it."""

    audit_arch: int
    column: int
    """Which column of the numbers above applies to it."""
    has_x32: bool = False


_MACHINES = {
    "x86_64": Machine(0xC000_003E, 0, has_x32=True),
    "aarch64": Machine(0xC000_00B7, 1),
}


def this_machine() -> Machine | None:
    """Return the machine that this process runs on; None if there is no filter for it."""
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        return None
    return _MACHINES.get(os.uname().machine)


def filter_program() -> bytes | None:
    """Return the filter in the format that ``bwrap --seccomp`` reads."""
    machine = this_machine()
    return None if machine is None else _program(machine)


# --- the program ----------------------------------------------------------------------------------

# A filter is a list of instructions: operation, two jump distances (if true, if false), operand.
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in the kernel's ``seccomp_data``
_ALLOW, _KILL, _FAIL = 0x7FFF_0000, 0x8000_0000, 0x0005_0000


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return pack("=HBBI", code, if_true, if_false, operand)


@lru_cache
def _program(machine: Machine) -> bytes:
    return b"".join(_instructions(machine))


def _instructions(machine: Machine) -> Iterator[bytes]:
    yield _instruction(_LOAD, _ARCH)
    yield _instruction(_JUMP_IF_EQUAL, machine.audit_arch, if_true=1)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _NUMBER)
    if machine.has_x32:
        yield _instruction(_JUMP_IF_AT_LEAST, X32_BIT, if_false=1)
        yield _instruction(_RETURN, _FAIL | errno.ENOSYS)
        for number in _ONLY_X86_64.values():
            yield from _refusal(number, errno.EPERM)
    for numbers in REFUSED.values():
        yield from _refusal(numbers[machine.column], errno.EPERM)
    for numbers in UNKNOWN.values():
        yield from _refusal(numbers[machine.column], errno.ENOSYS)
    for numbers in _NEW_NAMESPACE.values():
        yield _instruction(_JUMP_IF_EQUAL, numbers[machine.column], if_false=4)
        yield _instruction(_LOAD, _FIRST_ARGUMENT)
        yield _instruction(_JUMP_IF_ANY_BIT, CLONE_NEWUSER, if_false=1)
        yield _instruction(_RETURN, _FAIL | errno.EPERM)
        yield _instruction(_RETURN, _ALLOW)
    yield _instruction(_RETURN, _ALLOW)


def _refusal(number: int, error: int) -> Iterator[bytes]:
    yield _instruction(_JUMP_IF_EQUAL, number, if_false=1)
    yield _instruction(_RETURN, _FAIL | error)
