"""The commands, and how errors are reported.

A command is imported when it is used, so that ``--help`` is quick and a missing package affects
only the commands that need it. Exit codes: 0 done, 1 an error, 2 wrong usage or settings, 3 a limit
was hit and 4 the run is suspended (`clark_agent.cli.commands.run`), 130 interrupted, 141 the output
pipe was closed, 143 SIGTERM. An error is one sentence on stderr; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from clark_agent._version import __version__
from clark_agent.errors import (
    ClarkAgentError,
    ConfigError,
    DecisionNotApplicable,
    InvalidContinuationError,
    LogDamaged,
    RequestNotFound,
    RunNotFound,
    StreamError,
)
from clark_agent.stream import StreamErrorKind

__all__ = ["PROGRAM", "can_resume", "cli", "examples", "is_debugging", "run_command_line"]

PROGRAM = "clark-agent"

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Run an agent on a prompt."),
    "chat": ("chat", "Chat with an agent in the terminal."),
    "resume": ("run", "Resume a run that was interrupted, failed or is suspended."),
    "fork": ("run", "Start a new run from a point in a logged run."),
    "waiting": ("waiting", "List what suspended runs wait for."),
    "decide": ("waiting", "Decide what a suspended run waits for."),
    "follow": ("remote", "Show a run of another process as it works."),
    "steer": ("remote", "Send a message to a run of another process."),
    "cancel": ("remote", "Cancel a run of another process."),
    "worker": ("worker", "Work on the runs of a queue in PostgreSQL."),
    "submit": ("worker", "Submit a run to a queue in PostgreSQL."),
    "runs": ("log", "List logged runs."),
    "show": ("log", "Show the messages, tool calls and usage of a run."),
    "replay": ("log", "Replay a logged run offline and report what differs."),
    "prefix": ("log", "Show how much of each request was the same as in the one before."),
    "diff": ("log", "Report the first difference between two runs."),
    "export": ("log", "Export a run as Markdown, JSON or HTML."),
    "view": ("view", "Show runs on a page in the browser."),
    "models": ("doctor", "List providers, or the models of one provider."),
    "doctor": ("doctor", "Check what works, what is missing, and how to get it."),
    "mcp": ("mcp", "Look at MCP servers: their tools, resources and prompts."),
    "mcp-serve": ("mcp_serve", "Serve an agent, or tools, to MCP clients."),
    "gateway": ("gateway", "Serve models to other machines; the API keys stay here."),
    "completion": ("doctor", "Print the completion script for a shell."),
}


def examples(*lines: str) -> str:
    """Return the examples as the end of a help text."""
    return "\b\nExamples:\n" + "\n".join([f"  {line}" for line in lines])


class _State:
    debug = False


def _set_debug(context: click.Context, _: click.Parameter, debug: bool) -> None:
    if debug and isinstance(context.obj, _State):
        context.obj.debug = True
        logging.basicConfig(level=logging.DEBUG)


_DEBUG = click.Option(  # accepted before and after the command
    ["--debug"],
    is_flag=True,
    expose_value=False,
    callback=_set_debug,
    help="Show all log messages, and tracebacks.",
)


class _Commands(click.Group):
    """The command group; loads commands from the table when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"clark_agent.cli.commands.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        if _DEBUG not in command.params:
            command.params.append(_DEBUG)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], COMMANDS, 1)
            hint = f"Did you mean {near[0]}?" if near else f'To run an agent: {PROGRAM} run "…"'
            raise click.UsageError(f"unknown command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        'clark-agent run "Read notes.txt."',
        'clark-agent run --model openai:gpt-5.1 --tools files,shell "Why do the tests fail?"',
        'git diff | clark-agent run "Write a commit message for this."',
        "clark-agent chat",
        "clark-agent doctor",
    ),
)
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Run agents from the command line.

    'clark-agent COMMAND --help' describes a command.
    """


cli.params.append(_DEBUG)


def is_debugging() -> bool:
    """Return whether ``--debug`` was given."""
    context = click.get_current_context(silent=True)
    return context is not None and isinstance(context.obj, _State) and context.obj.debug


def can_resume(failure: object) -> bool:
    """Return whether resuming the run may help. With a wrong key, for example, it does not."""
    return not (isinstance(failure, StreamError) and failure.kind is StreamErrorKind.FATAL)


def run_command_line(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # no character from a model may crash the program
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(arguments)
    finally:
        _flush_streams()


def _run(arguments: Sequence[str] | None) -> int:
    state = _State()
    try:
        code: Any = cli.main(arguments, PROGRAM, standalone_mode=False, obj=state)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        _write_error(error.format_message())
        return error.exit_code
    except click.ClickException as error:
        _write_error(f"{PROGRAM}: {_usage(error)}")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except (BrokenPipeError, SystemExit):  # click raises SystemExit for a broken pipe
        return 141
    except Exception as error:
        if state.debug:
            raise
        _write_error(f"{PROGRAM}: {_describe(error)}")
        return 2 if isinstance(error, _USAGE_ERRORS) else 1
    return code if isinstance(code, int) else 0


def _open_closed_streams() -> None:
    """Replace closed standard streams (``>&-``) by the null device.

    Otherwise there is nothing to write to, and a file that is opened later gets their descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _write_error(text: str) -> None:
    with suppress(OSError):  # the exit code reports it too
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


_USAGE_ERRORS = (
    ConfigError,
    DecisionNotApplicable,
    InvalidContinuationError,
    RequestNotFound,
    RunNotFound,
)


def _usage(error: click.ClickException) -> str:
    """Describe in one sentence what is wrong with the command line, and where to read more."""
    text = " ".join(error.format_message().split())
    text = text[:1].lower() + text[1:].rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None or not isinstance(error, click.UsageError):
        return text
    end = "" if text.endswith("?") else "."
    return f"{text}{end} See '{context.command_path} --help'"


def _describe(error: Exception) -> str:
    if isinstance(error, LogDamaged) and error.at:
        fork = f"{PROGRAM} fork {error.run_id} --before {error.at}"
        return f"{error}; to continue with the intact part: {fork}"
    if isinstance(error, ClarkAgentError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = f"{type(error).__name__}: {error}"
    return f"unexpected error: {text}. '{PROGRAM} --debug …' shows the traceback"


def _flush_streams() -> None:
    """Flush the streams and drop what cannot be written.

    Otherwise the interpreter would report an error with its own exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
