"""The shell tool, with real commands: alone, and in the sandbox where there is one.

Whatever a command does to stay alive, nothing of it is left when the call is over. `Commands.run`
looks for that after every command, and the fixture after every test.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from signal import SIGKILL
from threading import Thread
from typing import Any

import pytest

from clark_agent import (
    AgentContext,
    CancellationToken,
    ConfigError,
    LoopConfig,
    RunAborted,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    run,
)
from clark_agent.events import ToolExecutionEnd, ToolExecutionStart, ToolExecutionUpdate
from clark_agent.testing import RecordingSink, ScriptedStream, call
from clark_agent.toolkit import _command
from clark_agent.toolkit._outside import SYSTEM_PATH
from clark_agent.toolkit._supervisor import children_by_parent, children_listed
from clark_agent.toolkit.sandbox import HOME, SandboxMode, sandbox_status
from clark_agent.toolkit.shell import CommandLimits, shell_tool
from clark_agent.toolkit.untrusted import without_marks
from tests.toolkit.commands import (
    HANG_SECONDS,
    MARK,
    MODES,
    Commands,
    host,
    wait_here_until,
    wait_until,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """For those who ignore SIGTERM anyway, and for those who wait to be told of progress."""
    monkeypatch.setattr(_command, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(_command, "_PROGRESS_SECONDS", 0.1)


def watched(root: Path, mode: SandboxMode) -> Iterator[Commands]:
    """Commands that leave nothing behind in the end: no process, and no open file."""
    made = Commands(root, mode)
    fds = len(os.listdir("/proc/self/fd"))
    yield made
    wait_until(lambda: not made.left)
    assert len(os.listdir("/proc/self/fd")) <= fds


@pytest.fixture(params=MODES)
def commands(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Commands]:
    """Once without a sandbox and once within."""
    yield from watched(tmp_path, request.param)


@pytest.fixture
def anywhere(tmp_path: Path) -> Iterator[Commands]:
    """Where it makes no difference: in the sandbox, if there is one."""
    yield from watched(tmp_path, MODES[-1])


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Commands]:
    """Without a sandbox."""
    yield from watched(tmp_path, "off")


def python(text: str) -> str:
    """A command that runs a program in Python."""
    return f"{os.path.realpath(sys.executable)} -I -S -c {quote(text)}"


# --- what a command gets, and gives back --------------------------------------------------------


async def test_output_and_errors_come_in_their_order(commands: Commands) -> None:
    result = await commands.run("echo one; echo two >&2; echo three; exit 3")
    assert result.is_error
    assert result.plain_text == "one\ntwo\nthree\n[exit code 3]"
    note = "none: it is switched off" if commands.mode == "off" else str(sandbox_status())
    assert result.details == {
        "exit_code": 3,
        "signal": None,
        "timed_out": False,
        "stopped": False,
        "too_many_processes": False,
        "killed_in_background": 0,
        "left_running": 0,
        "characters_left_out": 0,
        "sandbox": note,
    }


async def test_success_is_no_error(commands: Commands) -> None:
    result = await commands.run("true")
    assert (result.is_error, result.plain_text) == (False, "(no output)\n[exit code 0]")


async def test_it_runs_in_the_root_which_it_may_change(commands: Commands) -> None:
    result = await commands.run("pwd; echo text > file; mkdir -p a/b; mv file a/b/")
    assert result.plain_text == f"{commands.root}\n[exit code 0]"
    assert (commands.root / "a/b/file").read_text() == "text\n"


async def test_nothing_but_files_carries_over(anywhere: Commands) -> None:
    await anywhere.run("echo kept > file; export WORD=kept; kept() { :; }; cd /")
    result = await anywhere.run('pwd; echo "[$WORD]"; kept; cat file')
    assert result.plain_text.startswith(f"{anywhere.root}\n[]\n")
    assert "kept: command not found\nkept\n" in result.plain_text


async def test_there_is_no_input_and_no_terminal(commands: Commands) -> None:
    result = await commands.run(
        "cat; tty; (: < /dev/tty) 2>/dev/null || echo none; ls /proc/self/fd"
    )
    assert result.plain_text == "not a tty\nnone\n0\n1\n2\n3\n[exit code 0]"


async def test_signals_do_what_they_do_by_default(commands: Commands) -> None:
    """Python ignores SIGPIPE, and a shell cannot undo what it was started with."""
    result = await commands.run("yes | head -1; echo ${PIPESTATUS[0]}; trap", shell="bash")
    assert result.plain_text == "y\n141\n[exit code 0]"


async def test_death_by_a_signal_is_told(commands: Commands) -> None:
    result = await commands.run("echo last words; kill -SEGV $$")
    assert result.is_error
    if commands.mode == "off":
        assert result.plain_text == "last words\n[killed by SIGSEGV]"
        assert (result.details["exit_code"], result.details["signal"]) == (None, "SIGSEGV")
    else:
        assert result.plain_text == "last words\n[exit code 139: killed by SIGSEGV, it seems]"
        assert result.details["exit_code"] == 139


@pytest.mark.parametrize("shell", ["bash", "/bin/sh"])
async def test_the_shell_can_be_chosen(commands: Commands, shell: str) -> None:
    result = await commands.run('echo "$0 ${BASH_VERSION:+is bash}"; exit 7', shell=shell)
    assert Path(result.plain_text.split()[0]).name == Path(shell).name
    assert result.details["exit_code"] == 7


async def test_bash_is_the_shell_where_there_is_one(anywhere: Commands) -> None:
    result = await anywhere.run("[[ -n $BASH_VERSION ]] && echo yes; echo {1..3}")
    assert result.plain_text == "yes\n1 2 3\n[exit code 0]"


async def test_many_commands_at_once(anywhere: Commands) -> None:
    tool = anywhere.tool()

    async def one(number: int) -> ToolResult:
        context = ToolContext(tool_call_id=str(number), tool_name="shell")
        result = await tool.execute({"command": f"sleep 0.1; exit {number}"}, context)
        assert isinstance(result, ToolResult)
        return result

    results = await asyncio.gather(*[one(number) for number in range(6)])
    assert [result.details["exit_code"] for result in results] == list(range(6))


def test_an_event_loop_in_a_thread_will_do(anywhere: Commands) -> None:
    results: list[ToolResult] = []
    thread = Thread(
        target=lambda: results.append(asyncio.run(anywhere.run("echo here; sleep 9 &")))
    )
    thread.start()
    thread.join()
    assert results[0].plain_text.startswith("here\n[exit code 0]\n[killed with it: 1 ")


# --- output -------------------------------------------------------------------------------------


async def test_text_that_comes_in_halves(anywhere: Commands) -> None:
    result = await anywhere.run(r"printf 'caf\303'; sleep 0.1; printf '\251 \377\n'")
    assert result.plain_text == "café \ufffd\n[exit code 0]"


async def test_of_long_output_the_ends_are_kept(anywhere: Commands) -> None:
    result = await anywhere.run("echo first; seq 1 100000; echo last", max_output=200)
    text = result.plain_text
    left_out = result.details["characters_left_out"]
    assert text.startswith("first\n1\n2\n")
    assert text.endswith("100000\nlast\n[exit code 0]")
    assert f"[… {left_out} characters are left out here" in text
    assert len("first\nlast\n") + sum(len(f"{n}\n") for n in range(1, 100_001)) - left_out == 200


async def test_output_faster_than_it_is_read_is_not_held(anywhere: Commands) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await anywhere.run("head -c 100000000 /dev/zero | tr '\\0' y; echo; echo end")
    assert result.plain_text.endswith("yyy\nend\n[exit code 0]")
    assert result.details["characters_left_out"] == 100_000_000 + len("\nend\n") - 30_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


FILL_THE_PIPE = """
import fcntl, os
fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)
os.write(1, b"x" * 900_000)
"""


async def test_what_is_in_the_pipe_at_the_end_is_not_lost(anywhere: Commands) -> None:
    """The event loop is busy until all is over: it hears of the output and of the end at once."""
    program = python(FILL_THE_PIPE)
    running = asyncio.create_task(anywhere.start(f"{program} && touch ready", max_output=1_000_000))
    await asyncio.sleep(0)
    wait_until(lambda: is_ready(anywhere) and not anywhere.running)
    assert (await running).plain_text == "x" * 900_000 + "\n[exit code 0]"


async def test_a_command_that_closes_its_output_is_waited_for(commands: Commands) -> None:
    result = await commands.run("echo bye; exec >&- 2>&-; sleep 0.3; exit 5")
    assert result.plain_text == "bye\n[exit code 5]"


async def test_progress_is_the_newest_lines_now_and_then(anywhere: Commands) -> None:
    told: list[str] = []

    async def listen(partial: ToolResult) -> None:
        told.append(partial.plain_text)

    started = time.monotonic()
    await anywhere.run("for i in $(seq 40); do echo line $i; sleep 0.01; done", emit=listen)
    assert 1 <= len(told) <= (time.monotonic() - started) / 0.1
    for text in told:
        lines = text.splitlines()
        last = int(lines[-1].removeprefix("line "))
        assert lines == [f"line {number}" for number in range(max(1, last - 9), last + 1)]
    assert len(set(told)) == len(told)


async def test_a_listener_that_fails_ends_the_command(anywhere: Commands) -> None:
    async def listen(partial: ToolResult) -> None:
        raise LookupError(partial.plain_text)

    with pytest.raises(LookupError, match="noise"):
        await anywhere.run("while :; do echo noise; sleep 0.1; done", emit=listen)
    anywhere.check_nothing_is_left()


async def test_a_listener_that_is_slow_does_not_hold_up_the_command(anywhere: Commands) -> None:
    async def listen(partial: ToolResult) -> None:
        await wait_here_until(lambda: (anywhere.root / "done").exists())

    command = "echo one; sleep 0.3; seq 1 100000; touch done"
    result = await anywhere.run(command, emit=listen)
    assert result.plain_text.endswith("100000\n[exit code 0]")


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", " \n\t"])
async def test_an_empty_command(outside: Commands, command: str) -> None:
    assert await outside.run(command) == ToolResult.error("The command is empty: say what to run.")


async def test_a_nul_in_the_command(outside: Commands) -> None:
    result = await outside.run("echo a\0b; touch file")
    assert result.is_error
    assert "NUL character" in result.plain_text
    assert os.listdir(outside.root) == []


async def test_half_a_character_in_the_command(outside: Commands) -> None:
    result = await outside.run("touch file; echo \ud800")
    assert result.is_error
    assert "half a character" in result.plain_text
    assert os.listdir(outside.root) == []


async def test_the_longest_command_runs_and_a_longer_one_is_refused(commands: Commands) -> None:
    command = ": ".ljust(100_000 - len("; echo fine"), "x") + "; echo fine"
    assert (await commands.run(command)).plain_text == "fine\n[exit code 0]"
    assert await commands.run(f"{command} ") == ToolResult.error(
        "The command has 100001 bytes, and 100000 is the most. Write it to a file, and run that."
    )


async def test_what_the_system_refuses(commands: Commands) -> None:
    result = await commands.run("true", environment={"HUGE": "x" * 10_000_000})
    assert result.is_error
    assert "Argument list too long" in result.plain_text


@pytest.mark.parametrize("seconds", [0, -1])
async def test_a_timeout_that_makes_no_sense(outside: Commands, seconds: float) -> None:
    result = await outside.run("true", seconds=seconds)
    assert result == ToolResult.error(f"The timeout must be more than 0 seconds, not {seconds}.")


@pytest.mark.parametrize("becomes", ["nothing", "a file", "a link"])
async def test_a_root_that_is_gone(anywhere: Commands, becomes: str) -> None:
    root = anywhere.root / "root"
    root.mkdir()
    tool = anywhere.tool(root=root)
    root.rmdir()
    if becomes == "a file":
        root.write_text("")
    elif becomes == "a link":
        root.symlink_to("/")
    result = await tool.execute(
        {"command": "true"}, ToolContext(tool_call_id="c", tool_name="shell")
    )
    assert result == ToolResult.error(
        f"The workspace folder {root} is not there any more: nothing can run in it."
    )


async def test_a_root_that_a_command_removes(outside: Commands) -> None:
    root = outside.root / "root"
    root.mkdir()
    assert not (await outside.run("rmdir ../root; echo done", root=root)).is_error
    with pytest.raises(ConfigError, match="create it first"):
        await outside.run("true", root=root)


async def test_a_shell_that_has_gone(outside: Commands) -> None:
    program = outside.root / "sh"
    program.symlink_to("/bin/sh")
    tool = outside.tool(shell=str(program))
    program.unlink()
    result = await tool.execute(
        {"command": "true"}, ToolContext(tool_call_id="c", tool_name="shell")
    )
    assert result == ToolResult.error(
        "The command could not be started: No such file or directory."
    )


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"timeout": 0}, "timeout must be a number above 0, not 0"),
        ({"timeout": float("inf")}, "timeout must be a number above 0, not inf"),
        ({"timeout": True}, "timeout must be a number above 0, not True"),
        ({"max_output": 5}, "max_output must be a number above 99, not 5"),
        ({"sandbox": "maybe"}, "sandbox must be 'auto', 'require' or 'off', not 'maybe'"),
        ({"shell": "/no/such/shell"}, "the shell '/no/such/shell' was not found"),
        ({"environment": {"A=B": "c"}}, "the variable 'A=B' cannot be set"),
        ({"environment": {"A": "\0"}}, "the variable 'A' cannot be set"),
        ({"environment": {"A": 1}}, "the variable 'A' cannot be set to 1"),
        ({"readable": ["/no/such/folder"]}, "readable path /no/such/folder does not exist"),
        ({"readable": ["/"]}, "/ cannot be readable: it would open the sandbox"),
        ({"readable": ["/proc/1"]}, "/proc/1 cannot be readable"),
        ({"limits": {"memory": 1}}, r"limits must be CommandLimits\(...\), not {'memory': 1}"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, settings: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        shell_tool(tmp_path, **{"sandbox": "off", **settings})


@pytest.mark.parametrize("root", [3, None, b"/tmp"])
def test_a_root_that_is_no_path(root: Any) -> None:
    with pytest.raises(ConfigError, match="root must be a path or a Workspace, not "):
        shell_tool(root)


@pytest.mark.parametrize("limit", [0, 1.5, True, "8G", 1 << 63])
def test_limits_that_no_kernel_takes(limit: Any) -> None:
    with pytest.raises(ConfigError, match="memory must be a whole number above 0 or None"):
        CommandLimits(memory=limit)


def test_a_root_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "nothing"):
        with pytest.raises(ConfigError, match=f"{name} is not a folder: create it first"):
            shell_tool(tmp_path / name, sandbox="off")


async def test_the_root_of_a_workspace(outside: Commands) -> None:
    class Workspace:
        root = outside.root

    for root in (Workspace(), outside.root, str(outside.root)):
        assert (await outside.run("pwd", root=root)).plain_text.startswith(f"{outside.root}\n")


# --- the environment ----------------------------------------------------------------------------


async def test_no_secret_of_ours_is_in_the_environment(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        *("OPENAI_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "GH_PAT"),
        *("SSH_AUTH_SOCK", "DATABASE_URL", "SENTRY_DSN", "HTTP_PROXY", "NPM_CONFIG__AUTH", "WORD"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "LD_PRELOAD_", "PYTHONPATH", "BASH_ENV_", "KUBECONFIG"),
    )
    for name in names:
        monkeypatch.setenv(name, "hush-hush")
    monkeypatch.setenv("LC_TIME", "C")
    result = await commands.run("env; cat /proc/$$/environ /proc/$PPID/environ | tr '\\0' '\\n'")
    assert not result.is_error
    assert "hush" not in result.plain_text
    seen = dict(line.split("=", 1) for line in result.plain_text.splitlines() if "=" in line)
    assert not seen.keys() & set(names)
    assert (seen["PATH"], seen["TERM"], seen["LC_TIME"]) == (os.environ["PATH"], "dumb", "C")
    assert seen["HOME"] == (os.environ["HOME"] if commands.mode == "off" else HOME)


async def test_the_host_adds_to_the_environment(anywhere: Commands) -> None:
    result = await anywhere.run(
        'echo "$API_TOKEN $LANG"', environment={"API_TOKEN": "meant for it", "LANG": "tlh"}
    )
    assert result.plain_text == "meant for it tlh\n[exit code 0]"


async def test_there_is_always_a_path(outside: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    assert (await outside.run("ls; echo $PATH")).plain_text.startswith(SYSTEM_PATH)


# --- nothing is left ----------------------------------------------------------------------------

IGNORES = 'trap "" TERM HUP INT; '

# Two forks and a session of its own: what a daemon does to get away. It says when it has.
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("ready", "w").close()
        time.sleep(100)
    os._exit(0)
"""

# Grandchildren that come and go all the time, each in a session of its own: about a hundred are
# there at any time. It ends by itself before a test would hang.
STORM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
until = time.monotonic() + 30
for _ in range(10):
    if os.fork() == 0:
        os.setsid()
        while time.monotonic() < until:
            if os.fork() == 0:
                os.setsid()
                time.sleep(0.2)
                os._exit(0)
            time.sleep(0.02)
        os._exit(0)
open("ready", "w").close()
time.sleep(30)
"""

# A process that is never there when one looks for it: it forks and ends, over and over.
COMET = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
until = time.monotonic() + 30
while time.monotonic() < until:
    if os.fork():
        os._exit(0)
    os.setsid()
    open("ready", "w").close()
"""

READY = "until [ -e ready ]; do sleep 0.01; done; "

ESCAPES = {
    "child": "(sleep 100) & touch ready; wait",
    "stubborn": IGNORES + "touch ready; while :; do sleep 100; done",
    "stubborn children": f"({IGNORES}while :; do sleep 100; done) & sleep 100 & touch ready; wait",
    "stopped": "sleep 100 & kill -STOP $!; touch ready; sleep 100",
    "session": "setsid sleep 100 & touch ready; sleep 100",
    "nohup": "nohup sleep 100 >/dev/null 2>&1 & disown; touch ready; sleep 100",
    "daemon": python(DAEMON) + "; sleep 100",
    "storm": python(STORM),
    "comet": python(COMET) + "; sleep 100",
}


def is_ready(commands: Commands) -> bool:
    return (commands.root / "ready").exists()


class Escapes:
    """All ways to get away at once, each in a root of its own."""

    def __init__(self, root: Path, mode: SandboxMode) -> None:
        self.all = {name: Commands(root / name, mode) for name in ESCAPES}
        for commands in self.all.values():
            commands.root.mkdir()

    def start(self, **settings: Any) -> dict[str, asyncio.Task[ToolResult]]:
        return {
            name: asyncio.create_task(commands.start(f"echo begun; {ESCAPES[name]}", **settings))
            for name, commands in self.all.items()
        }

    @property
    def are_ready(self) -> bool:
        return all(map(is_ready, self.all.values()))

    @property
    def running(self) -> dict[str, list[str]]:
        return {name: left for name, commands in self.all.items() if (left := commands.running)}


@pytest.fixture(params=MODES)
def escapes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Escapes]:
    made = Escapes(tmp_path, request.param)
    yield made
    wait_until(lambda: not made.running)


async def test_commands_whose_time_is_up(escapes: Escapes) -> None:
    seconds = 1.0
    while True:
        tasks = escapes.start(timeout=seconds)
        results = {name: await task for name, task in tasks.items()}
        assert escapes.running == {}
        if escapes.are_ready:
            break
        seconds *= 2  # this is a slow machine, and some of them had not even begun
    for name, result in results.items():
        assert result.is_error, name
        assert "with everything that it had started; do less in one command]" in result.plain_text
        assert f"begun\n[timed out: killed after {seconds:g} seconds" in result.plain_text, name
        assert result.details["timed_out"], name
        assert (result.details["exit_code"], result.details["left_running"]) == (None, 0), name


async def test_commands_that_are_cancelled(escapes: Escapes) -> None:
    token = CancellationToken()
    tasks = escapes.start(signal=token)
    await wait_here_until(lambda: escapes.are_ready)
    token.cancel()
    results = {name: await task for name, task in tasks.items()}
    assert escapes.running == {}
    for name, result in results.items():
        assert result.is_error, name
        assert "begun\n[stopped before it had ended, with everything" in result.plain_text, name
        assert result.details["stopped"], name
        assert (result.details["exit_code"], result.details["left_running"]) == (None, 0), name


async def test_calls_that_are_cancelled_as_tasks(escapes: Escapes) -> None:
    tasks = escapes.start()
    await wait_here_until(lambda: escapes.are_ready)
    for task in tasks.values():
        task.cancel()
    await asyncio.wait(tasks.values())
    assert escapes.running == {}
    assert [name for name, task in tasks.items() if not task.cancelled()] == []


async def test_a_host_that_is_killed(escapes: Escapes) -> None:
    calls = [
        (ESCAPES[name], str(commands.root), commands.mode, commands.mark)
        for name, commands in escapes.all.items()
    ]
    process = host(
        f"""
async def one(command, root, mode, mark):
    settings = dict(environment={{{MARK!r}: mark}}, readable=[sys.base_prefix])
    await shell_tool(root, sandbox=mode, **settings).execute({{"command": command}}, context)
await asyncio.gather(*[one(*call) for call in {calls!r}])
"""
    )
    try:
        await wait_here_until(lambda: escapes.are_ready)
    finally:
        process.kill()
        process.communicate()
    await wait_here_until(lambda: not escapes.running)


BACKGROUND = {
    "sleep 100 &": 1,
    "sleep 100 & sleep 100 &": 2,
    "sleep 100 >/dev/null 2>&1 &": 1,
    f"({IGNORES}touch ready; while :; do sleep 100; done) & {READY}": 2,
    f"{python(DAEMON)}; {READY}": 1,
}


async def test_what_still_runs_when_the_shell_has_ended(commands: Commands) -> None:
    """Nobody waits for it, although it may hold the pipe that the output comes through."""

    async def one(number: int, command: str) -> ToolResult:
        root = commands.root / str(number)
        root.mkdir()
        return await commands.start(f"{command}\necho started; exit 4", root=root)

    results = await asyncio.gather(*[one(*numbered) for numbered in enumerate(BACKGROUND)])
    commands.check_nothing_is_left()
    for result, number in zip(results, BACKGROUND.values(), strict=True):
        assert result.plain_text.startswith(
            f"started\n[exit code 4]\n[killed with it: {number} of its processes"
        )
        assert result.details["killed_in_background"] == number
        assert (result.details["exit_code"], result.details["left_running"]) == (4, 0)


async def test_what_ends_by_itself_is_given_the_time(commands: Commands) -> None:
    """The output goes through another process, which ends after the shell does."""
    told: list[str] = []
    while "hello\n[exit code 0]" not in told:
        assert len(told) < 10, told  # less often, and the machine was only too busy
        result = await commands.run("exec > >(sleep 0.02; cat); echo hello", shell="bash")
        told.append(result.plain_text)


async def test_there_is_time_to_clean_up(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM comes, and comes once: the second is taken by many programs for "at once"."""
    monkeypatch.setattr(_command, "_GRACE_SECONDS", HANG_SECONDS)
    token = CancellationToken()
    command = 'trap "echo term; sleep 0.1; echo clean; ends=1" TERM; touch ready; '
    command += "while [ -z $ends ]; do sleep 0.05; done"
    running = asyncio.create_task(commands.start(command, signal=token))
    await wait_here_until(lambda: is_ready(commands))
    token.cancel()
    result = await running
    assert result.plain_text.count("term\n") == 1
    assert "clean\n[stopped before" in result.plain_text


async def test_the_model_may_ask_for_less_time_but_not_for_more(anywhere: Commands) -> None:
    result = await anywhere.run("sleep 100", seconds=0.2, timeout=5.0)
    assert result.plain_text == (
        "(no output)\n[timed out: killed after 0.2 seconds, with everything that it had started; "
        "it can be given more time]"
    )
    result = await anywhere.run("sleep 100", seconds=1000, timeout=0.2)
    assert "killed after 0.2 seconds" in result.plain_text


async def test_to_be_cancelled_again_and_again_changes_nothing(anywhere: Commands) -> None:
    running = asyncio.ensure_future(anywhere.start(ESCAPES["stubborn"]))
    await wait_here_until(lambda: is_ready(anywhere))
    while not running.done():
        running.cancel()
        await asyncio.sleep(0.01)
    assert running.cancelled()
    anywhere.check_nothing_is_left()


async def test_a_signal_that_was_cancelled_before(anywhere: Commands) -> None:
    token = CancellationToken()
    token.cancel()
    result = await anywhere.run("sleep 100", signal=token)
    assert result.details["stopped"]


async def test_a_signal_from_another_thread(anywhere: Commands) -> None:
    token = CancellationToken()
    running = asyncio.ensure_future(anywhere.start(ESCAPES["child"], signal=token))
    await wait_here_until(lambda: is_ready(anywhere))
    thread = Thread(target=token.cancel)
    thread.start()
    assert (await running).details["stopped"]
    thread.join()


async def test_a_call_that_is_given_up_without_an_event_loop(anywhere: Commands) -> None:
    context = ToolContext(tool_call_id="c", tool_name="shell")
    execution = anywhere.tool().execute({"command": ESCAPES["session"]}, context)
    execution.send(None)
    wait_until(lambda: is_ready(anywhere))
    execution.close()
    await wait_here_until(lambda: not anywhere.running)


def test_an_event_loop_that_is_closed_in_the_middle(anywhere: Commands) -> None:
    async def start() -> None:
        task = asyncio.ensure_future(anywhere.start(ESCAPES["child"]))
        await wait_here_until(lambda: is_ready(anywhere))
        del task

    asyncio.run(start())
    anywhere.check_nothing_is_left()


async def test_a_command_that_kills_its_supervisor(outside: Commands) -> None:
    """Also what has left the group of the command is ended: there is one more who watches."""
    result = await outside.run(f"{python(DAEMON)}; {READY} echo bye; kill -KILL $PPID; sleep 100")
    assert result.is_error
    assert result.plain_text == (
        "bye\n[its supervisor was killed; so was everything that the command had started]"
    )


KILL_BOTH = (
    "guardian=$(ps -o ppid= $PPID); kill -STOP $PPID; kill -KILL $guardian; kill -KILL $PPID"
)


async def test_a_command_that_kills_everybody_who_watches_it(outside: Commands) -> None:
    """What has left the group of the command stays: without a sandbox nobody is left to end it."""
    result = await outside.start(f"sleep 100 & echo bye; {KILL_BOTH}; sleep 100")
    assert result.plain_text == (
        "bye\n[its supervisors were killed; what the command has started may still run]"
    )


@pytest.mark.parametrize("which", ["first", "second"])
async def test_a_supervisor_that_somebody_kills(commands: Commands, which: str) -> None:
    """Without a sandbox there are two, and each ends everything when the other is killed."""
    others = set(children_listed(os.getpid()))
    running = asyncio.create_task(commands.start(ESCAPES["daemon"]))
    await wait_here_until(lambda: is_ready(commands))
    (supervisor,) = set(children_listed(os.getpid())) - others
    if which == "second" and commands.mode == "off":
        supervisor = min(children_listed(supervisor))
    os.kill(supervisor, SIGKILL)
    assert (await running).is_error
    await wait_here_until(lambda: not commands.running)


@pytest.mark.parametrize("whom", ["$PPID", "$(ps -o ppid= $PPID)"])
async def test_a_command_that_stops_its_supervisor(
    outside: Commands, monkeypatch: pytest.MonkeyPatch, whom: str
) -> None:
    monkeypatch.setattr(_command, "PATIENCE_SECONDS", 0.3)
    result = await outside.run(f"setsid sleep 100 & kill -STOP {whom}; sleep 100", timeout=0.2)
    assert result.is_error


async def test_a_command_that_terminates_its_supervisor(outside: Commands) -> None:
    result = await outside.run("echo bye; kill $PPID; sleep 100")
    assert result.plain_text.startswith("bye\n[stopped before it had ended")


def test_children_are_found_also_where_the_kernel_does_not_list_them() -> None:
    processes = [subprocess.Popen(["sleep", "100"]) for _ in range(3)]
    try:
        pids = {process.pid for process in processes}
        assert pids <= set(children_by_parent()[os.getpid()])
        assert set(children_listed(os.getpid())) == set(children_by_parent()[os.getpid()])
    finally:
        for process in processes:
            process.kill()
            process.wait()


# --- in a run -----------------------------------------------------------------------------------


def results_of(messages: Any) -> list[ToolResultMessage]:
    return [message for message in messages if isinstance(message, ToolResultMessage)]


async def test_a_run_with_commands(anywhere: Commands) -> None:
    sink = RecordingSink()
    model = ScriptedStream(
        [
            # One after the other, although they come together.
            [call("shell", command="sleep 0.2; echo 1 > file"), call("shell", command="cat file")],
            call("shell", command="exit 2", timeout=5),
            "done",
        ]
    )
    config = LoopConfig(stream=model, tools=[anywhere.tool()], event_sink=sink)
    result = await run("go", AgentContext(), config)
    assert result.text == "done"
    told = [(m.is_error, without_marks(m.plain_text)) for m in results_of(result.messages)]
    assert told == [
        (False, "(no output)\n[exit code 0]"),
        (False, "1\n[exit code 0]"),
        (True, "(no output)\n[exit code 2]"),
    ]
    anywhere.check_nothing_is_left()


@pytest.mark.parametrize("by", ["token", "task"])
async def test_a_run_that_is_cancelled_in_the_middle(commands: Commands, by: str) -> None:
    sink, token = RecordingSink(), CancellationToken()
    model = ScriptedStream([call("shell", command=f"echo begun; {ESCAPES['session']}")])
    config = LoopConfig(stream=model, tools=[commands.tool()], event_sink=sink)
    task = asyncio.ensure_future(run("go", AgentContext(), config, token))
    await wait_here_until(lambda: is_ready(commands))
    token.cancel() if by == "token" else task.cancel()
    with pytest.raises((RunAborted, asyncio.CancelledError)) as raised:
        await task
    commands.check_nothing_is_left()
    failure = raised.value if by == "token" else raised.value.__cause__
    assert isinstance(failure, RunAborted)
    (answer,) = results_of(failure.messages)
    assert answer.is_error
    if by == "token":  # the tool has stopped by itself, and what it had is not lost
        assert without_marks(answer.plain_text).startswith("begun\n[stopped before it had ended")
    assert len(sink.of(ToolExecutionStart)) == len(sink.of(ToolExecutionEnd)) == 1


async def test_a_run_whose_grace_is_short(anywhere: Commands) -> None:
    """The loop does not wait for the command to end. It ends all the same."""
    token = CancellationToken()
    model = ScriptedStream([call("shell", command=ESCAPES["stubborn"])])
    config = LoopConfig(stream=model, tools=[anywhere.tool()], cancel_grace=0.01)
    task = asyncio.ensure_future(run("go", AgentContext(), config, token))
    await wait_here_until(lambda: is_ready(anywhere))
    token.cancel()
    with pytest.raises(RunAborted):
        await task
    await wait_here_until(lambda: not anywhere.running)
    await asyncio.sleep(0)


async def test_a_run_is_told_of_progress(anywhere: Commands) -> None:
    sink = RecordingSink()
    model = ScriptedStream([call("shell", command="echo begun; sleep 0.4; echo ended"), "done"])
    config = LoopConfig(stream=model, tools=[anywhere.tool()], event_sink=sink)
    await run("go", AgentContext(), config)
    told = [event.partial.plain_text for event in sink.of(ToolExecutionUpdate)]
    assert told in (["begun"], ["begun", "begun\nended"])


def test_what_the_model_sees(tmp_path: Path) -> None:
    schema = shell_tool(tmp_path, sandbox="off", timeout=60).schema
    assert schema.name == "shell"
    assert "killed after 60 seconds" in schema.description
    assert "not in a sandbox" in schema.description
    assert schema.parameters == {
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "description": "What the shell should run. May have several lines.",
            },
            "timeout": {
                "anyOf": [{"type": "number"}, {"type": "null"}],
                "default": None,
                "description": "Seconds until the command is killed, if fewer than usual.",
            },
        },
        "required": ["command"],
    }
