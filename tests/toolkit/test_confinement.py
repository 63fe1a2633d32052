"""What the kernel refuses to commands in the sandbox, and what they may use up; tried for real."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from clark_agent import ConfigError, ToolResult
from clark_agent.toolkit import _supervisor
from clark_agent.toolkit._outside import SYSTEM_PATH
from clark_agent.toolkit._seccomp import REFUSED, UNKNOWN, filter_program, this_machine
from clark_agent.toolkit.limits import CommandLimits
from clark_agent.toolkit.sandbox import sandbox_status
from clark_agent.toolkit.untrusted import without_marks
from tests.toolkit.commands import MODES, Commands, host, told_by

pytestmark = pytest.mark.slow

STATUS = sandbox_status()
MACHINE = this_machine()
PYTHON = os.path.realpath(sys.executable)

inside = pytest.mark.skipif(not STATUS.works, reason=f"no sandbox here: {STATUS.problem}")
filtered = pytest.mark.skipif(not STATUS.filters, reason="no filter for system calls here")


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    made = Commands(tmp_path, "require")
    yield made
    made.check_nothing_is_left()


@pytest.fixture(params=MODES)
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Commands]:
    made = Commands(tmp_path, request.param)
    yield made
    made.check_nothing_is_left()


async def python_in(commands: Commands, program: str, **settings: Any) -> ToolResult:
    return await commands.run(f"{PYTHON} -I -S -c {quote(program)}", **settings)


# --- system calls -------------------------------------------------------------------------------

CALLS = """
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *words):
    ctypes.set_errno(0)
    words = [*words, *[0] * (6 - len(words))]
    result = libc.syscall(*[ctypes.c_long(word) for word in (number, *words)])
    return ctypes.get_errno() if result < 0 else -result
"""


@inside
@filtered
async def test_system_calls_that_nothing_should_need_are_refused(commands: Commands) -> None:
    """With arguments that the kernel would find fault with before it looks at anybody's rights."""
    assert MACHINE is not None
    numbers = {name: pair[MACHINE.column] for name, pair in {**REFUSED, **UNKNOWN}.items()}
    program = f"{CALLS}\nprint(json.dumps({{n: call(c) for n, c in {numbers!r}.items()}}))"
    said = json.loads((await python_in(commands, program)).plain_text.splitlines()[0])
    expected = dict.fromkeys(REFUSED, errno.EPERM) | dict.fromkeys(UNKNOWN, errno.ENOSYS)
    assert said == expected


NAMESPACES = """
import os, threading
NEWUSER = 0x10000000
print(call(UNSHARE, NEWUSER), call(UNSHARE, NEWUSER | 0x20000), call(UNSHARE, 0x200))
print(call(CLONE, NEWUSER | 17))
thread = threading.Thread(target=print, args=["thread"])
thread.start()
thread.join()
pid = os.fork()
if not pid:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@inside
@filtered
async def test_there_are_no_new_user_namespaces_but_threads_and_forks(commands: Commands) -> None:
    assert MACHINE is not None
    numbers = [("UNSHARE", (272, 97)), ("CLONE", (56, 220))]
    program = NAMESPACES
    for name, pair in numbers:
        program = program.replace(name, str(pair[MACHINE.column]))
    result = await python_in(commands, CALLS + program)
    assert result.plain_text == "1 1 0\n1\nthread\n7\n[exit code 0]"


X32 = "print(call(0x40000000 + 39))"  # getpid
# mov eax, 20; int 0x80; ret: getpid of 32-bit programs
I386 = """
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))
code = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("ran", code(), flush=True)
"""


@inside
@filtered
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="this machine has one set of calls")
async def test_other_sets_of_system_calls_are_refused(commands: Commands) -> None:
    assert (await python_in(commands, CALLS + X32)).plain_text.startswith(f"{errno.ENOSYS}\n")
    result = await python_in(commands, CALLS + I386)
    assert result.plain_text == "(no output)\n[exit code 159: killed by SIGSYS, it seems]"


@inside
@pytest.mark.skipif(not os.path.exists("/proc/keys"), reason="this kernel has no keys")
async def test_the_keys_of_the_host_are_not_listed(commands: Commands) -> None:
    assert "/proc/keys: Permission denied" in (await commands.run("cat /proc/keys")).plain_text


@inside
async def test_no_program_gains_rights_from_its_file(commands: Commands) -> None:
    result = await commands.run("cut -d' ' -f5,6 /proc/self/mountinfo")
    lines = result.plain_text.splitlines()[:-1]
    assert len(lines) > 10
    assert [line for line in lines if "nosuid" not in line] == []


def test_a_machine_without_a_filter_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    assert filter_program() is None
    status = type(STATUS)(program="/usr/bin/bwrap")
    assert str(status) == "bubblewrap (/usr/bin/bwrap), without a filter for system calls"


KEYRINGS = f"""
import ctypes
libc = ctypes.CDLL(None)
def keyring():
    return libc.syscall({_supervisor._KEYCTL.get(os.uname().machine, 0)}, 0, -3, 0)
before = keyring()
leave_keyring()
print(before > 0, keyring() not in (before, -1))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="keyrings are Linux's")
def test_a_session_keyring_of_its_own() -> None:
    """Tried from outside: inside the sandbox nobody may ask which keyring there is."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_supervisor._KEYCTL.get(os.uname().machine, -1), 0, -3, 0) < 0:
        pytest.skip("this kernel or container has no keyrings")
    program = f"from clark_agent.toolkit._supervisor import leave_keyring\n{KEYRINGS}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"True True\n"


# --- work that goes on as ever --------------------------------------------------------------------


@inside
async def test_builds_and_tests_work_inside(commands: Commands) -> None:
    """A compiler, version control, a test runner with processes and threads, a build tool."""
    (commands.root / "main.c").write_text(
        "#include <pthread.h>\n#include <stdio.h>\n"
        "static void *work(void *n) { return n; }\n"
        "int main(void) { pthread_t t; pthread_create(&t, 0, work, 0); pthread_join(t, 0);"
        ' puts("built"); }\n'
    )
    (commands.root / "Makefile").write_text(
        "all: main\n\t./main\nmain: main.c\n\tgcc -pthread $< -o $@\n"
    )
    (commands.root / "test_it.py").write_text(
        "import multiprocessing, subprocess, threading\n"
        "def test_processes(tmp_path):\n"
        "    with multiprocessing.Pool(2) as pool:\n"
        "        assert pool.map(abs, [-1, 2]) == [1, 2]\n"
        "    assert subprocess.run(['true']).returncode == 0\n"
    )
    result = await commands.run(
        "set -e; make -s; git init -q .; git -c user.name=a -c user.email=b commit -qm x "
        f"--allow-empty; git log --format=%s; {sys.executable} -m pytest -q -p no:cacheprovider "
        "test_it.py",
        readable=[sys.base_prefix, sys.prefix],
    )
    assert not result.is_error, result.plain_text
    assert result.plain_text.startswith("built\nx\n")
    assert "1 passed" in result.plain_text


# --- limits -------------------------------------------------------------------------------------

LIMITS = """
import resource
for name in ("DATA", "NOFILE", "FSIZE", "CORE"):
    print(name, resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1])
"""


async def test_every_process_has_limits(anywhere: Commands) -> None:
    limits = CommandLimits(memory=1 << 30, open_files=100, file_size=1 << 20)
    result = await python_in(anywhere, LIMITS, limits=limits)
    assert result.plain_text.split("\n")[:4] == [
        "DATA 1073741824",
        "NOFILE 100",
        "FSIZE 1048576",
        "CORE 1",
    ]


async def test_a_limit_is_never_raised(anywhere: Commands) -> None:
    soft, hard = 64, 64
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
tool = shell_tool(arguments[0], sandbox=arguments[1])
print((await tool.execute({{"command": "ulimit -Sn; ulimit -Hn"}}, context)).plain_text)
"""
    said = told_by(host(program, str(anywhere.root), anywhere.mode))
    assert without_marks(said).split()[:2] == ["64", "64"]


async def test_memory_and_files_are_bounded(anywhere: Commands) -> None:
    limits = CommandLimits(memory=256 << 20, file_size=1 << 20)
    result = await python_in(anywhere, "x = bytearray(512 << 20)", limits=limits)
    assert "MemoryError" in result.plain_text
    result = await anywhere.run("head -c 9000000 /dev/zero > file", limits=limits)
    assert result.is_error
    assert (anywhere.root / "file").stat().st_size == 1 << 20


@inside
@pytest.mark.skipif(not STATUS.limits_scratch, reason="this bubblewrap cannot limit folders")
async def test_what_is_kept_in_memory_is_bounded(commands: Commands) -> None:
    fill = "for d in /tmp /var/tmp /dev/shm ~; do head -c 3000000 /dev/zero > $d/x; done; "
    result = await commands.run(f"{fill} echo no > /dev/x", limits=CommandLimits(scratch=1 << 20))
    assert result.plain_text.count("No space left on device") == 4
    assert "/dev/x: Read-only file system" in result.plain_text


MANY = "for i in $(seq 60); do sleep 100 & done; wait"
# It doubles every 50 ms: fast enough to get away, and the machine has other tests to run.
BOMB = "bomb() { sleep 0.05; bomb | bomb & }; bomb; sleep 100"


@pytest.mark.parametrize("command", [MANY, BOMB], ids=["many", "bomb"])
async def test_too_many_processes_end_the_command(anywhere: Commands, command: str) -> None:
    result = await anywhere.run(command, limits=CommandLimits(processes=40))
    assert result.is_error
    if result.details["too_many_processes"]:  # else the kernel has let no more of them begin
        assert "[killed with everything that it had started: more than 40 processes]" in (
            result.plain_text
        )


THREADS = """
import threading, time
for n in range(60):
    threading.Thread(target=time.sleep, args=[100], daemon=True).start()
time.sleep(100)
"""


async def test_threads_count_too(anywhere: Commands) -> None:
    result = await python_in(anywhere, THREADS, limits=CommandLimits(processes=40))
    assert result.is_error
    assert result.details["too_many_processes"] or "can't start new thread" in result.plain_text


async def test_limits_can_be_lifted(anywhere: Commands) -> None:
    lifted = CommandLimits(
        memory=None, processes=None, open_files=None, file_size=None, scratch=None
    )
    result = await anywhere.run("ulimit -d; ulimit -f; ulimit -u", limits=lifted)
    assert result.plain_text.split("\n")[:2] == ["unlimited", "unlimited"]


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "many"])
def test_limits_that_make_no_sense(value: Any) -> None:
    with pytest.raises(ConfigError, match="memory must be a whole number above 0 or None"):
        CommandLimits(memory=value)


NOBODY = 65534


@inside
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.skipif(not STATUS.counts_processes, reason="this kernel counts all of a user's")
def test_the_kernel_counts_the_processes_of_other_users_itself() -> None:
    """At once, and not when somebody looks."""
    program = f"""
import hashlib  # loaded when first used, and it may be in root's home, like our interpreter
sys._base_executable = arguments[2]
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
from clark_agent.toolkit.limits import CommandLimits
try:
    tool = shell_tool(arguments[0], sandbox="require", limits=CommandLimits(processes=20))
    print((await tool.execute({{"command": arguments[1]}}, context)).plain_text)
except Exception as error:
    print("cannot:", error)
"""
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        python = shutil.which("python3", path=SYSTEM_PATH) or PYTHON
        many = "for i in $(seq 40); do sleep 100 & done; wait"
        said = told_by(host(program, folder, many, python))
    if "Permission denied" in said or "cannot:" in said:
        pytest.skip(f"nobody else can run our interpreter: {said}")
    assert "Resource temporarily unavailable" in said
