"""The shell tool: runs one command, returns its output, and leaves no process behind.

- A command runs in the root, in a shell of its own: only files carry over to the next command. Its
  input is empty, and it has no terminal.
- However the command ends, everything that it has started ends with it: when the shell exits, when
  its time is up, when the call or the run is cancelled, and when this process is killed. First
  comes SIGTERM, after a second SIGKILL. A supervisor (``_supervisor.py``) does this, independent of
  our event loop and our process. In the sandbox no process escapes it. On Linux without a sandbox,
  two kinds of process escape: one that another service was asked to run (``systemd-run``, ``docker
  run``, ``at``), and one that left its process group before the command killed the supervisor and
  its guardian at the same moment. On other systems the supervisor can only signal the process
  group, which a process can leave.
- The environment has only the variables listed here, none of which holds a secret, and those that
  the host adds. Programs outside of the sandbox do not see them.
- `CommandLimits` bound what each process may use, with or without a sandbox.
- Where bubblewrap works (:mod:`clark_agent.toolkit.sandbox`), the command sees and changes only
  what it may. Without it, a command has all rights of the current user: it can even read the
  environment of this process, and replace the programs that we run. The tool's description, the log
  and the details of every result then say that there is no sandbox.

A command that fails gives an error result with its output. The model decides what to do next.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import signal
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from clark_agent.errors import ConfigError
from clark_agent.toolkit import _supervisor
from clark_agent.toolkit._command import PATIENCE_SECONDS, Outcome, RunningCommand
from clark_agent.toolkit._outside import (
    SYSTEM_PATH,
    find_interpreter,
    host_folders,
    is_below,
    source_of,
)
from clark_agent.toolkit.limits import CommandLimits
from clark_agent.toolkit.sandbox import (
    HOME,
    SandboxMode,
    SandboxStatus,
    choose_sandbox,
    kept,
    sandboxed,
)
from clark_agent.toolkit.untrusted import mark_untrusted
from clark_agent.tools import FunctionTool
from clark_agent.tools.base import AgentTool, ToolContext, ToolHistoryPolicy, ToolResult

__all__ = ["CommandLimits", "Rooted", "shell_tool"]

logger = logging.getLogger(__name__)

_LONGEST_COMMAND = 100_000
"""In bytes. Linux limits one argument to 128 KiB."""

_INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE"),
        *("VIRTUAL_ENV", "JAVA_HOME", "GOPATH", "GOROOT", "CARGO_HOME", "RUSTUP_HOME", "NVM_DIR"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "NIX_PATH", "NIX_PROFILES"),
    }
)
_LOCALE = "LC_"


class Rooted(Protocol):
    """An object with a root, such as a workspace."""

    @property
    def root(self) -> Path:
        """The root folder."""
        ...


# --- the tool -------------------------------------------------------------------------------------


class _Settings(Struct, frozen=True, kw_only=True):
    root: str
    timeout: float
    max_output: int
    sandbox: SandboxStatus
    sandbox_note: str
    network: bool
    readable: tuple[str, ...]
    environment: dict[str, str]
    limits: CommandLimits
    shell: str
    supervisor: list[str]

    def start(self, command: str, timeout: float) -> RunningCommand:
        """Start a command. Raises `OSError`."""
        argv, environment = [self.shell, "-c", command], self.environment
        descriptors: list[int] = []
        with ExitStack() as files:
            if self.sandbox.works:
                argv, descriptors = sandboxed(
                    self.sandbox,
                    kept(self.sandbox, self.shell, command, self.limits.processes),
                    files,
                    root=self.root,
                    environment=self.environment,
                    network=self.network,
                    readable=self.readable,
                    scratch=self.limits.scratch,
                )
                environment = {}
            return RunningCommand(
                argv,
                supervisor=self.supervisor,
                directory=self.root,
                environment=environment,
                descriptors=descriptors,
                limits=self.limits.settings,
                timeout=timeout,
                max_output=self.max_output,
                sandboxed=self.sandbox.works,
            )


def shell_tool(
    root: str | Path | Rooted,
    *,
    timeout: float = 120.0,
    max_output: int = 30_000,
    sandbox: SandboxMode = "auto",
    network: bool = False,
    environment: Mapping[str, str] | None = None,
    shell: str | None = None,
    readable: Iterable[str | Path] = (),
    limits: CommandLimits | None = None,
) -> AgentTool:
    """Make the tool ``shell``, which runs commands in a folder that they may change.

    ``timeout`` is the maximum number of seconds for a command. ``max_output`` is how many
    characters of its output are kept, half from the beginning and half from the end.
    ``environment`` is added to the few inherited variables. ``shell`` defaults to bash if it is
    installed. In the sandbox there is no ``network`` unless it is enabled, and only the system and
    the ``readable`` paths are visible; a readable path in the root cannot be changed. ``limits`` is
    what a command may use.

    Raises `ConfigError` for invalid settings, and if a sandbox is required and there is none.
    """
    if os.name != "posix":
        raise ConfigError("the shell tool is for Linux and macOS: it needs sessions and signals")
    _check_number("timeout", timeout, above=0)
    _check_number("max_output", max_output, above=99)
    status = choose_sandbox(sandbox)
    folder = _folder(root)
    if status.works and folder == "/":
        raise ConfigError("shell_tool: the root cannot be '/' in a sandbox: choose a folder")
    if status.works and is_below(status.program or "", folder):
        raise ConfigError(f"shell_tool: {status.program} is in the root: choose another folder")
    settings = _Settings(
        root=folder,
        timeout=timeout,
        max_output=int(max_output),
        sandbox=status,
        sandbox_note=_sandbox_note(status, folder),
        network=network,
        readable=(*host_folders(folder), *[path for each in readable for path in _names(each)]),
        environment=_environment(environment or {}, in_sandbox=status.works),
        limits=_limits(limits),
        shell=_shell(shell),
        supervisor=_supervisor_command(folder if status.works else None),
    )

    async def run(
        command: str,
        ctx: ToolContext,
        timeout: float | None = None,  # noqa: ASYNC109 - the model's name for it
    ) -> ToolResult:
        """Run a command.

        Args:
            command: What the shell should run. May have several lines.
            timeout: Seconds until the command is killed, if fewer than usual.
        """
        return await _run(settings, command, timeout, ctx)

    made = FunctionTool(run, name="shell", description=_description(settings))
    made.timeout = timeout + 2 * PATIENCE_SECONDS  # the last resort
    # A batch may write a file and then run it, so the order matters.
    made.requires_exclusive_sandbox = True
    made.history_policy = ToolHistoryPolicy(summary_arg="command")
    return made


def _check_number(name: str, value: Any, *, above: int) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not above < value < math.inf:
        raise ConfigError(f"shell_tool: {name} must be a number above {above}, not {value!r}")


def _limits(given: CommandLimits | None) -> CommandLimits:
    if given is None:
        return CommandLimits()
    if not isinstance(given, CommandLimits):
        raise ConfigError(f"shell_tool: limits must be CommandLimits(...), not {given!r}")
    return given


def _folder(given: str | Path | Rooted) -> str:
    # A Path also has an attribute ``root``, with another meaning.
    path = given if isinstance(given, (str, Path)) else getattr(given, "root", None)
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"shell_tool: root must be a path or a Workspace, not {given!r}")
    folder = os.path.realpath(path)
    if not os.path.isdir(folder):
        raise ConfigError(f"shell_tool: {folder} is not a folder: create it first")
    return folder


def _sandbox_note(status: SandboxStatus, root: str) -> str:
    """Describe the sandbox for people."""
    home = os.path.realpath(os.path.expanduser("~"))
    if not status.works or os.path.commonpath([home, root]) != root:
        return str(status)
    logger.warning("commands can read the home folder, because it is inside their root %s", root)
    return f"{status}, but with the home folder, which lies in the root"


def _names(given: str | Path) -> list[str]:
    """Return a path that should be visible inside, and what it links to."""
    path = os.path.abspath(os.fspath(given))
    if not os.path.exists(path):
        raise ConfigError(f"shell_tool: the readable path {path} does not exist")
    names = list(dict.fromkeys([path, os.path.realpath(path)]))
    if any(name == "/" or f"{name}/".startswith("/proc/") for name in names):
        raise ConfigError(f"shell_tool: {path} cannot be readable: it would open the sandbox")
    return names


def _shell(given: str | None) -> str:
    wanted = given or shutil.which("bash", path=SYSTEM_PATH) or shutil.which("bash") or "/bin/sh"
    found = shutil.which(wanted)
    if found is None:
        raise ConfigError(f"shell_tool: the shell {wanted!r} was not found or cannot be run")
    return os.path.abspath(found)


def _supervisor_command(root: str | None) -> list[str]:
    """Return the supervisor's command, with an interpreter outside of the root if one is given."""
    interpreter = find_interpreter(root)
    if interpreter is None:
        where = "" if root is None else f" outside of {root}, where commands could replace it"
        raise ConfigError(
            f"shell_tool: commands are supervised by python3, but none was found{where}: install "
            "the system's python3, or choose another root"
        )
    try:
        return interpreter.command(source_of(_supervisor.__name__))
    except OSError as error:
        raise ConfigError(
            f"shell_tool: cannot read the source of the supervisor: {error}"
        ) from error


def _environment(added: Mapping[str, str], *, in_sandbox: bool) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or name.startswith(_LOCALE)
    }
    environment.setdefault("PATH", SYSTEM_PATH)
    environment["TERM"] = "dumb"
    if in_sandbox:
        environment["HOME"] = HOME
        environment.pop("TMPDIR", None)
    for name, value in added.items():
        if not name or "=" in name or "\0" in f"{name}{value}" or not isinstance(value, str):
            raise ConfigError(f"shell_tool: the variable {name!r} cannot be set to {value!r}")
        environment[name] = value
    return environment


def _description(settings: _Settings) -> str:
    name = os.path.basename(settings.shell)
    if not settings.sandbox.works:
        where = "It is not in a sandbox: it can change everything that the user can. Be careful."
    elif settings.network:
        where = _SANDBOXED.format("It has a network.")
    else:
        where = _SANDBOXED.format("It has no network.")
    return (
        f"Run a command with {name} in the workspace folder and return its output and exit code. "
        "Each command starts anew in that folder; it gets no input and has no terminal. It is "
        f"killed after {settings.timeout:g} seconds, and whatever it has started is killed when it "
        "ends: nothing goes on in the background. Of long output only the beginning and the end "
        f"are returned. {where}"
    )


_SANDBOXED = (
    "It runs in a sandbox: only the workspace folder can be changed, and files elsewhere, also in "
    "/tmp and the home folder, are gone after the command. {}"
)


# --- one call -------------------------------------------------------------------------------------


async def _run(
    settings: _Settings, command: str, seconds: float | None, ctx: ToolContext
) -> ToolResult:
    refusal = _refusal(settings, command, seconds)
    if refusal is not None:
        return ToolResult.error(refusal)
    timeout = settings.timeout if seconds is None else min(seconds, settings.timeout)
    try:
        running = settings.start(command, timeout)
    except OSError as error:
        return ToolResult.error(f"The command could not be started: {error.strerror or error}.")
    subscription = ctx.signal.subscribe(running.stop_from_any_thread)
    try:
        await running.watch(ctx)
    except (Exception, asyncio.CancelledError):
        await running.end()
        raise
    finally:
        subscription.close()
        running.close()
    return _result(settings, running, timeout)


def _refusal(settings: _Settings, command: str, seconds: float | None) -> str | None:
    """Return why the command is refused, or None."""
    if not command.strip():
        return "The command is empty: say what to run."
    if "\0" in command:
        return "The command has a NUL character in it, which no command can have. Write it escaped."
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        return "The command has half a character in it (a lone surrogate). Write it escaped."
    if size > _LONGEST_COMMAND:
        return (
            f"The command has {size} bytes, and {_LONGEST_COMMAND} is the most. "
            "Write it to a file, and run that."
        )
    if seconds is not None and not seconds > 0:
        return f"The timeout must be more than 0 seconds, not {seconds:g}."
    if os.path.realpath(settings.root) != settings.root or not os.path.isdir(settings.root):
        return f"The workspace folder {settings.root} is not there any more: nothing can run in it."
    return None


def _result(settings: _Settings, command: RunningCommand, timeout: float) -> ToolResult:
    outcome, output = command.outcome, command.output
    if outcome is None:
        outcome = Outcome()
        notes = ["its supervisors were killed; what the command has started may still run"]
    elif outcome.errno:
        return ToolResult.error(f"The command could not be started: {os.strerror(outcome.errno)}.")
    else:
        notes = _notes(outcome, timeout, settings)
    was_ended = outcome.timed_out or outcome.stopped or outcome.crowded
    code = None if was_ended else outcome.code
    details = {
        "exit_code": code if code is None or code >= 0 else None,
        "signal": _signal_name(-code) if code is not None and code < 0 else None,
        "timed_out": outcome.timed_out,
        "stopped": outcome.stopped,
        "too_many_processes": outcome.crowded,
        "killed_in_background": outcome.background,
        "left_running": outcome.left,
        "characters_left_out": output.left_out,
        "sandbox": settings.sandbox_note,
    }
    printed = output.text.rstrip("\n")
    text = mark_untrusted(printed) if printed else "(no output)"
    text = "\n".join([text, *[f"[{note}]" for note in notes]])
    return (ToolResult.text if code == 0 else ToolResult.error)(text, details=details)


def _notes(outcome: Outcome, timeout: float, settings: _Settings) -> list[str]:
    """Describe how a command ended."""
    notes: list[str] = []
    if not outcome.supervised:
        notes.append("its supervisor was killed; so was everything that the command had started")
    elif outcome.crowded:
        most = settings.limits.processes
        notes.append(f"killed with everything that it had started: more than {most} processes")
    elif outcome.timed_out:
        can_wait = timeout < settings.timeout
        advice = "it can be given more time" if can_wait else "do less in one command"
        notes.append(
            f"timed out: killed after {timeout:g} seconds, with everything that it had started; "
            f"{advice}"
        )
    elif outcome.stopped:
        notes.append("stopped before it had ended, with everything that it had started")
    elif outcome.code is not None:
        notes.append(_ending(outcome.code))
    if outcome.background:
        notes.append(
            f"killed with it: {outcome.background} of its processes, still in the background; "
            "nothing outlives a command: start and use in one command what has to keep running"
        )
    if outcome.left:
        notes.append(f"{outcome.left} of its processes could not be killed and may still run")
    return notes


def _ending(code: int) -> str:
    if code < 0:
        return f"killed by {_signal_name(-code)}"
    # A shell reports a signal of its child this way, and so does the sandbox for the shell.
    name = _signal_name(code - 128) if code > 128 else None
    return f"exit code {code}" + (f": killed by {name}, it seems" if name else "")


def _signal_name(number: int) -> str | None:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}" if 0 < number < signal.NSIG else None
