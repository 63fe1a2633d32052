"""Commands that run an agent: ``run``, ``resume`` and ``fork``.

The first Ctrl-C stops the run cleanly; a second one exits at once. The log keeps what the run has
done in both cases. SIGTERM lets the run go: this process stops, and the run does not end, so that
another process can resume it.

Exit codes: 0 the model finished, 1 the run failed, 3 a limit ended it, 4 it is suspended and waits,
130 it was interrupted (128 + the signal).
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from clark_agent.cancellation import LET_GO, CancellationToken
from clark_agent.cli.app import PROGRAM, can_resume, examples, is_debugging
from clark_agent.cli.approval_prompt import find_person
from clark_agent.cli.options import (
    DEFAULT_MODEL,
    LOG_INSIDE,
    TOO_SMALL,
    Approvals,
    CliAgent,
    Given,
    Log,
    Settings,
    agent_options,
    approval_options,
    find_run,
    log_options,
    make_agent,
    make_gate,
    read_system,
    resume_command,
    run_argument,
    settings_again,
    settings_from,
    system_option,
)
from clark_agent.cli.requests import waiting_lines
from clark_agent.cli.trace_view import show_trace
from clark_agent.cli.view import (
    JsonView,
    PlainScreen,
    View,
    make_screen,
    output_text,
    safe,
    show_log_messages,
)
from clark_agent.engine.arguments import check_continuation
from clark_agent.engine.loop import start
from clark_agent.errors import (
    ConfigError,
    DecodeError,
    InvalidContinuationError,
    LoopError,
    RunAborted,
    RunLetGo,
    ToolExecutionError,
    failure_of,
)
from clark_agent.events import AgentEvent, EventSink, RunIdentified
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.run_context import RunContext, resolve_system_prompt
from clark_agent.run_log import fold, waiting_for
from clark_agent.run_log import fork as fork_run
from clark_agent.run_log import resume as resume_run
from clark_agent.run_log.records import RunEnded, RunSuspended
from clark_agent.run_log.resume import has_ended
from clark_agent.running import Starter
from clark_agent.toolkit.ask import SUSPEND, unless_stopped
from clark_agent.types import AgentContext, RunIdentity, Usage
from clark_agent.waiting import WaitingRequest

if TYPE_CHECKING:
    from clark_agent.mcp.tool_set import McpTools

__all__ = ["SUSPENDED", "check_not_queued", "continue_run", "fork", "resume", "run"]

SUSPENDED = 4
"""The exit code of a run that waits for a decision, a time or an event."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Write events as JSON, one per line."
)
trace_option = click.option(
    "--trace", is_flag=True, help="Draw the spans of the run at its end: times, tokens and cost."
)
prompt_argument = click.argument("prompt", nargs=-1)


@click.command(
    epilog=examples(
        'clark-agent run "What is 17% of 2,340?"',
        'clark-agent run -m anthropic:claude-sonnet-5 -t files,shell "Why do the tests fail?"',
        'cat error.log | clark-agent run "What went wrong?"',
        'clark-agent run --yes --json "Add a licence to every file in src" | jq .type',
        'clark-agent run --mcp .mcp.json "What changed in the tracker this week?"',
        'clark-agent run --trace "Why do the tests fail?"     # and where the time went',
        'clark-agent run --suspend "Clean up the notes"     # decide about its calls later',
    )
)
@prompt_argument
@agent_options
@system_option
@approval_options()
@json_option
@trace_option
@log_options(can_be_off=True)
def run(
    *,
    prompt: tuple[str, ...],
    given: Given,
    system: str | None,
    approvals: Approvals,
    as_json: bool,
    trace: bool,
    log: Log | None,
) -> int:
    """Run an agent on a prompt.

    PROMPT is the task. Piped input is added to it; "-" reads the whole prompt from stdin. The
    model's text goes to stdout, its actions to stderr. Tools with side effects ask before they run;
    without a terminal they are refused, unless --yes or --allow permits them.

    With --suspend they suspend the run instead: it ends with exit code 4 and says how to decide and
    how to resume it, at any time and in any process.

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 a limit was hit, 4 suspended, 130 interrupted.
    """
    if trace and (as_json or log is None):
        other = "--json" if as_json else "--no-log"
        raise click.UsageError(f"--trace does not go with {other}")
    text = _read_prompt(prompt)
    stage = Stage(as_json, log, draws_trace=trace)
    agent = stage.agent(approvals.applied_to(settings_from(given), log=log), approvals)
    given_system = read_system(system)
    system_prompt = agent.system_prompt if given_system is None else given_system

    async def starter(sink: EventSink, token: CancellationToken) -> RunResult:
        identity = RunIdentity.root()
        resolved = await resolve_system_prompt(system_prompt, RunContext(agent.deps, identity))
        context = AgentContext(resolved, identity=identity)
        return await start(text, context, agent.config, token, sink=sink, deps=agent.deps)

    return stage.play(starter)


@click.command(
    epilog=examples(
        "clark-agent resume last",
        "clark-agent resume 3f2a --model openai:gpt-5.1",
        "clark-agent decide 3f2a allow && clark-agent resume 3f2a",
    )
)
@run_argument()
@agent_options
@approval_options()
@json_option
@log_options(must_exist=True)
def resume(*, run_id: str, given: Given, approvals: Approvals, as_json: bool, log: Log) -> int:
    """Resume a run that was interrupted, failed or is suspended.

    RUN is a run id, a prefix of one, or "last". The run keeps its model, tools and folder, unless
    options change them. Settings that only the log has need your consent; with --yes, or without a
    terminal, pass them as options. Tool calls that have a result are not run again.

    A suspended run goes on when all its requests are decided. Before that, the command says what it
    waits for, and the exit code is 4. A run of a queue is left to its workers.
    """
    return continue_run(run_id, given, approvals, as_json=as_json, log=log)


def continue_run(
    run_id: str, given: Given, approvals: Approvals, *, as_json: bool, log: Log
) -> int:
    """Resume a run, unless it still waits. Return the exit code."""
    found = find_run(log, run_id)
    check_not_queued(log, found)
    folded = fold(log.store.load(found))  # refuse a damaged log before asking anything
    if isinstance(folded.ending, RunEnded):
        raise has_ended(found, folded.ending)
    stage = Stage(as_json, log)
    if isinstance(folded.ending, RunSuspended) and (waiting := waiting_for(log.store, found)):
        return stage.still_waits(found, waiting, folded.ending.tree_usage)
    settings = approvals.applied_to(_again("resume", given, log, found, approvals), log=log)
    agent = stage.agent(settings, approvals)

    def starter(sink: EventSink, token: CancellationToken) -> Coroutine[Any, Any, RunResult]:
        return resume_run(
            log.store, found, agent.config, token, sink=sink, trust_log=True, deps=agent.deps
        )

    return stage.play(starter)


def check_not_queued(log: Log, run_id: str) -> None:
    """Raise `ConfigError` if workers continue a run, or the run that has started it."""
    if log.queues is None:
        return
    seen = {run_id}
    while (queue := log.queue_of(run_id)) is None:
        above = fold(log.store.load(run_id)).began.identity.parent_run_id
        if above is None or above in seen:
            return
        seen.add(above)
        run_id = above
    raise ConfigError(f"run {run_id!r} belongs to the queue {queue!r}: its workers continue it")


@click.command(
    epilog=examples(
        'clark-agent fork last "And now in French"',
        "clark-agent fork 3f2a --turn 2 --model openai:gpt-5.1",
    )
)
@run_argument()
@prompt_argument
@click.option("--turn", type=click.IntRange(min=0), metavar="N", help="Fork after turn N.")
@click.option(
    "--before",
    type=click.IntRange(min=1),
    metavar="N",
    help="Drop record N of the log and everything after it, such as damaged records.",
)
@agent_options
@approval_options()
@json_option
@log_options(must_exist=True)
def fork(
    *,
    run_id: str,
    prompt: tuple[str, ...],
    turn: int | None,
    before: int | None,
    given: Given,
    approvals: Approvals,
    as_json: bool,
    log: Log,
) -> int:
    """Start a new run from a point in a logged run.

    The new run has the history of RUN up to the end of a turn (all of it by default; 0 is before
    the first turn). It continues with PROMPT, or without one if an answer of the model is due.
    """
    found = find_run(log, run_id)
    context = fork_run(log.store, found, turn=turn, before=before)
    text = _read_prompt(prompt, needed=False)
    if not text:
        check_continuation(context)
    settings = approvals.applied_to(_again("fork", given, log, found, approvals), log=log)
    stage = Stage(as_json, log)
    agent = stage.agent(settings, approvals)
    return stage.play(
        lambda sink, token: start(
            text or (), context, agent.config, token, sink=sink, deps=agent.deps
        )
    )


def _again(command: str, given: Given, log: Log, run_id: str, approvals: Approvals) -> Settings:
    """Return the settings of a logged run. The person must agree to those that only the log has."""
    can_ask = sys.stdin.isatty() and sys.stderr.isatty() and not approvals.yes
    return settings_again(given, log, run_id, command=command, can_ask=can_ask)


def _read_prompt(words: tuple[str, ...], *, needed: bool = True) -> str:
    """Return the prompt: the words of the command line and the piped input."""
    text = " ".join(words).strip()
    piped = ""
    if text == "-" or _is_piped():
        text = "" if text == "-" else text
        piped = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    prompt = "\n\n".join([part for part in (text, piped) if part])
    if needed and not prompt:
        raise click.UsageError(f'missing prompt: {PROGRAM} run "Read notes.txt."')
    return prompt


def _is_piped() -> bool:
    """Return whether stdin is a pipe, a file or a socket, and so should be read."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


# --- one run --------------------------------------------------------------------------------------


class Stage:
    """One run, which sends events to a screen or as JSON, asks the person, and handles signals."""

    def __init__(self, as_json: bool, log: Log | None, *, draws_trace: bool = False) -> None:
        self.screen = PlainScreen(sys.stderr) if as_json else make_screen()
        self.view = View(self.screen)
        self.person = find_person(self.screen)
        self._json = JsonView() if as_json else None
        self._log = log
        self._draws_trace = draws_trace
        self._token = CancellationToken()
        self._signal: signal.Signals | None = None
        self._unwritable: OSError | None = None
        """The error that made the output unwritable, such as a broken pipe or a full disk."""
        self._run_id: str | None = None
        self._mcp: McpTools | None = None

    def agent(self, settings: Settings, approvals: Approvals) -> CliAgent:
        """Make the agent, which asks the person at this terminal, or suspends its run."""
        person = None if settings.suspend else self.person
        if settings.model == DEFAULT_MODEL:
            self.screen.note(TOO_SMALL)
        log = self._log
        if log is not None and "shell" in settings.tools and log.is_inside(settings.root):
            self.screen.note(LOG_INSIDE)
        nobody = SUSPEND if settings.suspend else None
        ask = nobody if person is None else person.approve
        agent = make_agent(
            settings,
            log=self._log,
            gate=make_gate(ask, approvals, settings),
            ask=nobody if person is None else person.answer,
        )
        self._mcp = agent.mcp
        return agent

    def still_waits(self, run_id: str, waiting: Sequence[WaitingRequest], usage: Usage) -> int:
        """Say what a run waits for, and return the exit code."""
        self._run_id = run_id
        result = RunResult((), LoopOutcome.SUSPENDED, tree_usage=usage, waiting=tuple(waiting))
        if self._json is not None:
            self._json.write(_ending(result, str(result.outcome), run_id))
        else:
            self.screen.note(f"the run {run_id[:8]} still waits")
            self._show_waiting(result)
        return SUSPENDED

    def play(self, starter: Starter) -> int:
        """Run it and return the exit code."""
        outcome: RunResult | LoopError

        async def main() -> RunResult:
            with self._signals():
                async with self._servers():
                    return await starter(self._sink, self._token)

        with show_log_messages(self.screen, debug=is_debugging()):
            try:
                outcome = asyncio.run(main())
            except InvalidContinuationError:  # it did not even start
                raise
            except LoopError as error:
                outcome = error
            except BaseException as error:
                if (failure := failure_of(error)) is None:
                    raise
                outcome = failure
            finally:
                if self._unwritable is None:
                    self.screen.close()
        if self._unwritable is not None:
            raise self._unwritable
        return self._ended(outcome)

    @asynccontextmanager
    async def _servers(self) -> AsyncGenerator[None]:
        """Connect to the MCP servers, unless that is interrupted, and disconnect at the end."""
        if self._mcp is None:
            yield
            return
        try:
            await unless_stopped(self._mcp.__aenter__(), self._token)
        except ToolExecutionError:
            raise RunAborted("stopped before all MCP servers were connected") from None
        try:
            yield
        finally:
            await self._mcp.aclose()

    def _sink(self, event: AgentEvent) -> None:
        if isinstance(event, RunIdentified):  # not that of a child run
            self._run_id = event.identity.run_id
        try:
            if self._unwritable is not None:
                return
            if self._json is not None:
                self._json(event)
            else:
                self.view(event)
        except OSError as error:
            self._unwritable = error
            self._token.cancel("the output cannot be written")

    @contextmanager
    def _signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _interrupt(self, number: signal.Signals) -> None:
        if self._signal is None:
            self._signal = number
            self._token.cancel(LET_GO if number is signal.SIGTERM else "interrupted")
            with suppress(OSError):  # the terminal may be gone
                self.screen.note("stopping; Ctrl-C again exits at once")
            return
        with suppress(OSError):
            self.screen.close()
            self.screen.note(f"exited before the run ended{self._how_to_resume()}", "error")
            sys.stdout.flush()
        os._exit(128 + number)  # do not wait for what does not stop: the log is on the disk

    def _ended(self, outcome: RunResult | LoopError) -> int:
        if isinstance(outcome, RunResult):
            word, text = str(outcome.outcome), ""
            is_waiting = outcome.outcome is LoopOutcome.SUSPENDED
            code = SUSPENDED if is_waiting else 0 if outcome.outcome.is_complete else 3
            if self._json is None and (output := output_text(outcome)) is not None:
                self.screen.say(safe(output))
                self.screen.end()
        elif isinstance(outcome, RunLetGo):
            text = f"stopped, and the run has not ended{self._how_to_resume()}"
            word, code = "let_go", 128 + signal.SIGTERM
        elif self._signal is not None:
            word, text, code = "interrupted", f"stopped{self._how_to_resume()}", 128 + self._signal
        else:
            word, code = "failed", 1
            text = safe(f"{outcome}{self._how_to_resume() if can_resume(outcome) else ''}")
        if self._json is not None:
            self._json.write(_ending(outcome, word, self._run_id))
        else:
            run_id = None if self._log is None else self._run_id  # without a log the id is useless
            self.screen.note(self.view.summary(_usage(outcome), word, run_id))
            if isinstance(outcome, RunResult):
                self._show_waiting(outcome)
            if self._draws_trace:
                self._show_trace()
        if text:
            self.screen.note(text, "error")
        return code

    def _show_trace(self) -> None:
        if self._log is not None and self._run_id is not None:
            try:
                show_trace(self.screen, self._log.store, self._run_id)
            except DecodeError as error:
                self.screen.note(safe(str(error)), "error")

    def _show_waiting(self, result: RunResult) -> None:
        if self._log is not None and self._run_id is not None and result.waiting:
            for line in waiting_lines(result.waiting, self._log, self._run_id):
                self.screen.note(line, "text")

    def _how_to_resume(self) -> str:
        if self._log is None or self._run_id is None:
            return ""
        return f"; to continue: {resume_command(self._log, self._run_id)}"


def _usage(outcome: RunResult | LoopError) -> Usage:
    return outcome.tree_usage


def _ending(outcome: RunResult | LoopError, word: str, run_id: str | None) -> dict[str, object]:
    """Return the last line of ``--json``: how the run ended. It is not an event."""
    row: dict[str, object] = {"type": "run_result", "run_id": run_id, "outcome": word}
    if isinstance(outcome, RunResult):
        row |= {"text": outcome.text, "output": outcome.output}
        if outcome.outcome is LoopOutcome.SUSPENDED:
            row["waiting"] = outcome.waiting
    else:
        row |= {"error": type(outcome).__name__, "text": str(outcome)}
    return {**row, "usage": _usage(outcome)}
