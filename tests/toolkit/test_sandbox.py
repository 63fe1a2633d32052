"""The sandbox: what commands cannot do in it, and what is said where there is none.

Where bubblewrap works, the attempts to get out are made for real. Where it does not, each of these
tests sees to it that this is told, and that no command is run that was to be shut in.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
import venv
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clark_agent import ConfigError, ToolContext, ToolResult
from clark_agent.toolkit import _outside, sandbox
from clark_agent.toolkit._outside import SYSTEM_PATH, find_interpreter
from clark_agent.toolkit._searching import PatternError, RegexWorker
from clark_agent.toolkit.sandbox import HOME, choose_sandbox, kept, sandbox_status, sandboxed
from clark_agent.toolkit.shell import shell_tool
from clark_agent.toolkit.untrusted import without_marks
from tests.toolkit.commands import MODES, Commands, host, told_by, unmarked

pytestmark = pytest.mark.slow

STATUS = sandbox_status()
SECRET = "the-secret-itself"
PYTHON = os.path.realpath(sys.executable)


def inside(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test of the sandbox, or that there is said to be none."""

    def told(tmp_path: Path) -> None:
        assert STATUS.problem
        with pytest.raises(ConfigError, match="a sandbox is required for commands, and there is"):
            shell_tool(tmp_path, sandbox="require")

    return test if STATUS.works else told


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    root = tmp_path / "root"
    root.mkdir()
    made = Commands(root, "require")
    yield made
    made.check_nothing_is_left()


async def text_of(commands: Commands, command: str, **settings: Any) -> str:
    return (await commands.run(command, **settings)).plain_text


# --- what cannot be read ------------------------------------------------------------------------


@inside
async def test_files_beside_the_root_are_not_there(commands: Commands) -> None:
    secret = commands.root.parent / "secret"
    secret.write_text(SECRET)
    (commands.root / "link").symlink_to(secret)
    (commands.root / "up").symlink_to("..")
    paths = [str(secret), "../secret", "link", "up/secret", f"/proc/self/root{secret}"]
    text = await text_of(commands, f"cat {' '.join(paths)}; ls -a ..")
    assert SECRET not in text
    assert text.count("No such file or directory") == len(paths)
    assert text.splitlines()[len(paths) :] == [".", "..", "root", "[exit code 0]"]


@inside
async def test_the_home_folder_is_another(commands: Commands) -> None:
    real = Path.home()
    text = await text_of(commands, f"echo ~; ls -A ~; touch ~/mine && ls ~; ls -A {real}/.ssh")
    assert text.startswith(f"{HOME}\nmine\n")
    assert "No such file or directory" in text
    assert (await text_of(commands, "ls -A ~")).startswith("(no output)")


@inside
async def test_the_secrets_of_the_system_are_not_there(commands: Commands) -> None:
    for path in (
        "/etc/shadow",
        "/etc/ssh",
        "/etc/ssl/private",
        "/root",
        "/home",
        "/var/lib",
        "/sys",
    ):
        if not str(commands.root).startswith(path) and not sys.base_prefix.startswith(path):
            assert "No such file" in await text_of(commands, f"ls {path}"), path


@inside
async def test_programs_find_what_they_need(commands: Commands) -> None:
    text = await text_of(
        commands,
        "id -un; ls /etc/ssl/certs >/dev/null && date >/dev/null && echo a > /dev/null; "
        "head -c 3 /dev/urandom | wc -c; mktemp; echo shm > /dev/shm/x && cat /dev/shm/x",
    )
    assert text.splitlines()[1] == "3"
    assert text.endswith("shm\n[exit code 0]")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of the sandbox's business."""
    with subprocess.Popen(["sleep", "98765"]) as process:
        yield process
        process.kill()


@inside
async def test_other_processes_are_not_there(
    other: subprocess.Popen[bytes], commands: Commands
) -> None:
    command = f"cat /proc/[0-9]*/cmdline | grep -c 9876[5]; kill {other.pid}"
    text = await text_of(commands, command)
    assert text.startswith("0\n")
    assert "No such process" in text
    assert other.poll() is None


@inside
async def test_no_process_has_the_secrets_of_the_host(commands: Commands) -> None:
    """The host has them in its environment, which everybody of the same user may read."""
    program = """
for mode in ("off", "require"):
    tool = shell_tool(arguments[0], sandbox=mode)
    command = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\\\0' '\\\\n' | grep -c ^MY_API_KEY="
    print((await tool.execute({"command": command}, context)).plain_text.splitlines()[1])
"""
    said = told_by(host(program, str(commands.root), MY_API_KEY=SECRET))
    without, within = said.split()
    assert int(without) >= 1  # that is what the sandbox is for
    assert int(within) == 0


# --- what cannot be changed ---------------------------------------------------------------------


@inside
async def test_only_the_root_can_be_written(commands: Commands) -> None:
    (commands.root / "deep").mkdir()
    text = await text_of(commands, "echo 1 > here; echo 2 > deep/there; rm -f gone; mkdir made")
    assert text == "(no output)\n[exit code 0]"
    assert sorted(os.listdir(commands.root)) == ["deep", "here", "made"]
    paths = ["/x", "/usr/x", "/etc/x", "/etc/passwd", "/bin/x", f"{sys.base_prefix}/x"]
    text = await text_of(commands, f"for path in {' '.join(paths)}; do echo no > $path; done")
    assert text.count("Read-only file system") == len(paths)
    await commands.run("echo no > ../x; chmod 777 ..; mv ../root ../moved")
    assert os.listdir(commands.root.parent) == ["root"]


@inside
async def test_what_is_written_elsewhere_is_gone(commands: Commands) -> None:
    name = f"left-by-{commands.mark}"
    text = await text_of(
        commands, f"for d in /tmp /var/tmp ~; do echo x > $d/{name}; done; ls /tmp"
    )
    assert name in text
    assert name not in os.listdir("/tmp")
    assert name not in await text_of(commands, "ls /tmp /var/tmp ~")


@inside
async def test_there_are_no_rights_to_be_had(commands: Commands) -> None:
    text = await text_of(
        commands, "grep -E '^(CapInh|CapPrm|CapEff|CapAmb|NoNew)' /proc/self/status"
    )
    values = dict(line.split(":\t") for line in text.splitlines()[:5])
    assert values.pop("NoNewPrivs") == "1"
    assert {int(value, 16) for value in values.values()} == {0}


@inside
@pytest.mark.parametrize(
    "attempt",
    [
        "mount -o remount,rw /usr && touch /usr/x",
        "umount /tmp",
        "unshare -Urm sh -c 'mount -o remount,bind,rw /usr && touch /usr/{0} && echo escaped'",
        "unshare -Urm sh -c 'umount /tmp && echo escaped'",
        "unshare -Urmp --fork sh -c 'mount -t proc none /proc && ls /proc/{1} && echo escaped'",
        "cat /proc/sys/kernel/core_pattern > /proc/sys/kernel/core_pattern && echo escaped",
        "echo 1 > /proc/sys/net/ipv4/ip_forward && echo escaped",
        "echo h > /proc/sysrq-trigger && echo escaped",
        "nsenter -t 1 -m -p true && echo escaped",
        "chroot /proc/1/root ls {2} && echo escaped",
        "mknod disk b 8 0 && echo escaped",
    ],
)
async def test_ways_out(commands: Commands, attempt: str) -> None:
    outside = commands.root.parent / "outside"
    outside.write_text(SECRET)
    result = await commands.run(attempt.format(commands.mark, os.getpid(), outside))
    assert result.is_error
    assert "escaped" not in result.plain_text
    assert commands.mark not in os.listdir("/usr")


@inside
async def test_the_keeper_of_a_command_does_nothing_elsewhere(commands: Commands) -> None:
    """It sends signals to everybody around it, and so it must know where it is."""
    command = '/bin/sh -c "$KEEPER" /bin/sh "echo ran"; echo $?'
    text = await text_of(commands, command, environment={"KEEPER": sandbox._KEEPER})
    assert text == "125\n[exit code 0]"


# --- the network --------------------------------------------------------------------------------


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Somebody who listens on this machine, and says the secret to whoever comes."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SECRET.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@inside
async def test_there_is_no_network(commands: Commands, port: int) -> None:
    command = f"exec 3<>/dev/tcp/127.0.0.1/{port} && cat <&3"
    text = await text_of(commands, command, shell="bash")
    assert SECRET not in text
    assert "Connection refused" in text
    names = await text_of(commands, "tail -n +3 /proc/net/dev | cut -d: -f1")
    assert names.split()[0] == "lo"
    assert names.split()[1] == "[exit"


@inside
async def test_there_is_a_network_if_asked_for(commands: Commands, port: int) -> None:
    command = f"exec 3<>/dev/tcp/127.0.0.1/{port} && cat <&3; ls /etc/resolv.conf"
    text = await text_of(commands, command, shell="bash", network=True)
    assert text.startswith(SECRET)
    assert text.endswith("/etc/resolv.conf\n[exit code 0]")


@inside
async def test_sockets_without_a_file_are_not_there_either(commands: Commands) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{commands.mark}")
        listener.listen()
        program = f'import socket; socket.socket(socket.AF_UNIX).connect("\\x00{commands.mark}")'
        text = await text_of(commands, f"{PYTHON} -I -S -c '{program}'")
        assert "ConnectionRefusedError" in text
        text = await text_of(commands, f"{PYTHON} -I -S -c '{program}'", network=True)
        assert text == "(no output)\n[exit code 0]"


# --- where things are ---------------------------------------------------------------------------


@inside
async def test_more_can_be_made_readable(commands: Commands) -> None:
    folder = commands.root.parent / "tools"
    folder.mkdir()
    (folder / "file").write_text("readable\n")
    (commands.root.parent / "link").symlink_to(folder)
    paths = [folder / "file", commands.root.parent / "link" / "file"]
    for given in (folder, str(commands.root.parent / "link")):
        text = await text_of(
            commands, f"cat {paths[0]}; echo no > {paths[0]}", readable=[given, sys.base_prefix]
        )
        assert text.startswith("readable\n")
        assert "Read-only file system" in text
    text = await text_of(commands, f"cat {paths[1]}", readable=[commands.root.parent / "link"])
    assert text.startswith("readable\n")


@inside
async def test_the_inner_of_two_paths_counts(commands: Commands) -> None:
    """The root may be written though what is around it is read-only, and the other way round."""
    (commands.root / "fixed").mkdir()
    text = await text_of(
        commands,
        "echo 1 > ../no; echo 2 > yes; echo 3 > fixed/no",
        readable=[commands.root.parent, commands.root / "fixed"],
    )
    assert text.count("Read-only file system") == 2
    assert os.listdir(commands.root / "fixed") == []
    assert (commands.root / "yes").read_text() == "2\n"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A virtual environment in the root, from which the host runs, with all that it needs."""
    environment = tmp_path / "root" / "tools" / "env"
    venv.create(environment, symlinks=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    for package in ("clark_agent", "msgspec"):
        found = find_spec(package)
        assert found is not None
        assert found.origin is not None
        shutil.copytree(Path(found.origin).parent, packages / package)
    return environment


USE_BOTH_TOOLS = """
from clark_agent.toolkit import Workspace, file_tools
root, environment, mode, spoil = arguments
search = next(tool for tool in file_tools(Workspace(root)) if tool.name == "search_files")
tool = shell_tool(root, sandbox=mode)
if mode == "require":
    print((await tool.execute({"command": spoil}, context)).plain_text)
else:
    import subprocess
    subprocess.run(spoil, shell=True, cwd=root, check=True)
print((await tool.execute({"command": "echo fine"}, context)).plain_text)
found = await search.execute({"pattern": "ne+dle", "regex": True, "path": "file"}, context)
print(found.plain_text)
"""


def spoiling(environment: Path, root: Path) -> str:
    """A command that replaces all that it finds of a host by something that leaves a trace."""
    escaped = f"touch {root.parent}/escaped"
    return (
        f"cd {environment}; "
        f"for f in bin/*; do rm -f $f; printf '#!/bin/sh\\n{escaped}\\n' > $f; chmod +x $f; done; "
        f"for f in $(find lib* -name '*.py'); do "
        f"echo 'import os; os.system(\"{escaped}\")' > $f; done; "
        f"mkdir -p {root}/bin; cp bin/python {root}/bin/python3; cp bin/python {root}/bin/bwrap"
    )


@pytest.mark.parametrize("mode", MODES)
def test_nothing_in_the_root_is_run_outside_of_the_sandbox(
    installed: Path, tmp_path: Path, mode: str
) -> None:
    """Neither the interpreter of the host nor any module of it, whoever has changed them."""
    root = tmp_path / "root"
    (root / "file").write_text("a needle\n")
    spoil = spoiling(installed, root)
    path = f"{root}/bin:{os.environ['PATH']}"
    python = str(installed / "bin" / "python")
    arguments = (str(root), str(installed), mode, spoil)
    said = told_by(host(USE_BOTH_TOOLS, *arguments, python=python, PATH=path))
    assert without_marks(said).endswith("fine\n[exit code 0]\nfile:1: a needle\n")
    assert sorted(os.listdir(tmp_path)) == ["root"]


@inside
async def test_what_the_host_runs_from_cannot_be_changed(installed: Path, tmp_path: Path) -> None:
    """It may import from there at any time. Nor can something else be put in its place."""
    program = """
from pathlib import Path
tool = shell_tool(arguments[0], sandbox="require")
command = "cd tools; echo > env/new; mv env gone; cd ..; mv tools gone; echo > tools/beside; ls"
print((await tool.execute({"command": command}, context)).plain_text)
"""
    python = str(installed / "bin" / "python")
    said = told_by(host(program, str(tmp_path / "root"), python=python))
    assert "env/new: Read-only file system" in said
    assert "cannot move 'env'" in said
    assert "cannot move 'tools'" in said
    assert without_marks(said).endswith("tools\n[exit code 0]\n")
    assert sorted(os.listdir(tmp_path / "root" / "tools")) == ["beside", "env"]


@inside
async def test_the_environment_of_a_command_is_for_the_command_alone(commands: Commands) -> None:
    """A library from the root is loaded by the command, and by nothing outside of the sandbox."""
    (commands.root / "trace.c").write_text(
        "#include <stdio.h>\n"
        "__attribute__((constructor)) static void trace(void) {"
        f' FILE *file = fopen("{commands.root.parent}/escaped", "w"); if (file) fclose(file);'
        ' puts("loaded"); fflush(stdout); }\n'
    )
    library = commands.root / "trace.so"
    await text_of(commands, f"gcc -shared -fPIC -o {library} trace.c")
    text = await text_of(commands, "true", environment={"LD_PRELOAD": str(library)})
    assert text.startswith("loaded\n")
    assert sorted(os.listdir(commands.root.parent)) == ["root"]


@inside
def test_what_searches_is_in_the_sandbox_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has no environment: neither secrets, nor anything that makes Python load more."""
    monkeypatch.setenv("LD_PRELOAD_", SECRET)
    with RegexWorker.for_root(str(tmp_path)).start("5", "exact", "1") as process:
        assert isinstance(process.args, list)
        assert process.args[0] == STATUS.program
        assert Path(f"/proc/{process.pid}/environ").read_bytes() == b""
        process.communicate()  # it ends when nothing more comes
    assert process.returncode == 0


def test_an_interpreter_in_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is the system's, and without one there is no supervisor, nor a search by pattern."""
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    system = tmp_path.parent / f"{tmp_path.name}-bin"
    system.mkdir()
    monkeypatch.setattr(_outside, "SYSTEM_PATH", str(system))
    assert find_interpreter(str(tmp_path)) is None
    assert find_interpreter(None) is not None
    with pytest.raises(PatternError, match="no Python interpreter outside of"):
        RegexWorker.for_root(str(tmp_path)).start()
    if STATUS.works:
        with pytest.raises(ConfigError, match="supervised by python3, but none was found outside"):
            shell_tool(tmp_path, sandbox="require")
    (system / "python3").symlink_to(PYTHON)
    found = find_interpreter(str(tmp_path))
    assert found is not None
    assert found.path == PYTHON


@inside
async def test_lies_from_within(commands: Commands) -> None:
    """A command can reach the pipe on which its keeper tells how many processes are left."""
    result = await commands.run("echo 99999999999999999999999999999999 > /proc/2/fd/3; exit 3")
    assert result.details["exit_code"] == 3
    assert result.details["killed_in_background"] == 1_000_000


@inside
@pytest.mark.parametrize("name", ["with space", "--chdir", "ünï", "a'b\"c", "new\nline"])
async def test_a_root_of_any_name(commands: Commands, name: str) -> None:
    root = commands.root / name
    root.mkdir()
    assert not (await commands.run("echo text > file", root=root)).is_error
    assert (root / "file").read_text() == "text\n"


@inside
async def test_a_root_that_cannot_be_shut_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="the root cannot be '/' in a sandbox"):
        shell_tool("/", sandbox="auto")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    tool = shell_tool(tmp_path, sandbox="require")
    assert "commands can read the home folder, because it is inside their root" in caplog.text
    context = ToolContext(tool_call_id="c", tool_name="shell")
    result = await tool.execute({"command": "true"}, context)
    assert result.details["sandbox"].endswith(", but with the home folder, which lies in the root")


@inside
def test_the_model_is_told(tmp_path: Path) -> None:
    described = shell_tool(tmp_path, sandbox="require").description
    assert "It runs in a sandbox: only the workspace folder can be changed" in described
    assert described.endswith("It has no network.")
    assert shell_tool(tmp_path, network=True).description.endswith("It has a network.")


# --- where there is none ------------------------------------------------------------------------


def test_the_status_says_what_is_so() -> None:
    """On any machine: that it works, if it does, and else why not and what to do."""
    program = shutil.which("bwrap", path=SYSTEM_PATH)
    if os.environ.get("CI"):  # there the tests must not do without
        assert STATUS.works, STATUS.problem
    assert sandbox_status() is STATUS or not STATUS.works
    if STATUS.works:
        assert STATUS.program == program
        assert str(STATUS) == f"bubblewrap ({program})"
        with ExitStack() as files:
            command = kept(STATUS, "/bin/sh", "echo fine", processes=None)
            argv, fds = sandboxed(STATUS, command, files, root=str(Path(__file__).parent))
            done = subprocess.run(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds, check=True
            )
        assert done.stdout == b"fine\n"
    elif program is None:
        assert "Install the package 'bubblewrap'" in str(STATUS)
    else:
        assert f"{program} does not work here (" in str(STATUS)


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder where programs are looked for. It is not there yet."""
    folder = tmp_path / "bin"
    monkeypatch.setattr(sandbox, "SYSTEM_PATH", str(folder))
    monkeypatch.setenv("PATH", str(folder))
    return folder


def make_program(folder: Path, text: str) -> None:
    folder.mkdir()
    program = folder / "bwrap"
    program.write_text(text)
    program.chmod(0o755)


@pytest.fixture(params=["missing", "refused", "broken"])
def no_sandbox(request: pytest.FixtureRequest, empty_path: Path) -> str:
    """A machine without it, and what is said there."""
    folder = empty_path
    if request.param == "missing":
        return "bubblewrap is not installed. Install the package 'bubblewrap' (apt-get install"
    if request.param == "refused":
        make_program(folder, "#!/bin/sh\necho 'bwrap: No permissions to do this' >&2; exit 1\n")
        return (
            f"{folder}/bwrap does not work here (bwrap: No permissions to do this). The kernel or"
        )
    make_program(folder, "no program at all")
    return f"{folder}/bwrap does not work here ([Errno 8] Exec format error: '{folder}/bwrap')."


def test_a_sandbox_that_is_required(no_sandbox: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        shell_tool(tmp_path, sandbox="require")
    expected = f"commands require a sandbox, but none is available: {no_sandbox}"
    assert str(raised.value).startswith(expected)


async def test_without_a_sandbox_it_is_said_plainly(
    no_sandbox: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox._warn_once.cache_clear()
    tools = [shell_tool(tmp_path) for _ in range(3)]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"commands will run without a sandbox: {no_sandbox}")
    assert "It is not in a sandbox: it can change everything that the user can" in (
        tools[0].description
    )
    context = ToolContext(tool_call_id="c", tool_name="shell")
    result = await tools[0].execute({"command": "echo ran"}, context)
    assert isinstance(result, ToolResult)
    assert unmarked(result).plain_text == "ran\n[exit code 0]"
    assert result.details["sandbox"].startswith(f"none: {no_sandbox}")


@inside
def test_bubblewrap_is_not_taken_from_where_a_command_could_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(tmp_path / "bin", f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert sandbox_status() is STATUS
    assert os.listdir(tmp_path) == ["bin"]


def test_bubblewrap_is_tried_once(tmp_path: Path, empty_path: Path) -> None:
    make_program(empty_path, f"#!/bin/sh\necho tried >> {tmp_path}/log; exit 1\n")
    assert not sandbox_status().works
    tried = (tmp_path / "log").read_text()
    assert sandbox_status().problem == sandbox_status().problem
    assert (tmp_path / "log").read_text() == tried
    assert "(exit code 1)" in str(sandbox_status())


@inside
async def test_a_place_where_it_is_forbidden(commands: Commands) -> None:
    """For real: within the sandbox there can be no other, and it is said why."""
    package = Path(sandbox.__file__).parents[2]
    program = "from clark_agent.toolkit.sandbox import sandbox_status; print(sandbox_status())"
    text = await text_of(
        commands,
        f"{sys.executable} -c '{program}'",
        readable=[sys.base_prefix, sys.prefix, package],
        environment={"PYTHONPATH": str(package)},
    )
    assert text.startswith(f"none: {STATUS.program} does not work here (bwrap: ")
    assert "The kernel or the container forbids new namespaces. In Docker" in text


def test_it_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    status = choose_sandbox("off")
    assert (status.works, str(status)) == (False, "none: it is switched off")
    assert caplog.text == ""
    with pytest.raises(ConfigError, match="no sandbox is available: it is switched off"):
        sandboxed(status, ["true"], ExitStack())


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "bubblewrap is for Linux only" in str(sandbox_status())


def test_a_probe_that_hangs(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_PROBE_SECONDS", 0.1)
    make_program(empty_path, "#!/bin/sh\nexec /bin/sleep 100\n")
    assert "timed out" in str(sandbox_status())
