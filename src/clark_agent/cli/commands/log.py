"""Commands that read logged runs: ``runs``, ``show``, ``replay``, ``prefix``, ``diff``, ``export``.

None of them calls a model or runs a tool.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE
from tempfile import mkstemp
from typing import TextIO

import click
import msgspec
from msgspec import Struct

from clark_agent.cli.app import examples
from clark_agent.cli.options import (
    Given,
    Log,
    agent_options,
    find_run,
    log_options,
    replay_agent,
    run_argument,
    settings_from,
    settings_of,
)
from clark_agent.cli.requests import verdict_text, waiting_lines
from clark_agent.cli.trace_view import show_trace
from clark_agent.cli.view import (
    PART,
    JsonView,
    PlainScreen,
    RichScreen,
    View,
    has_terminal,
    one_line,
    safe,
    time_text,
    usage_text,
)
from clark_agent.errors import ConfigError, DecodeError
from clark_agent.export import to_anthropic_messages, to_markdown, to_openai_messages
from clark_agent.prices import Price
from clark_agent.replay import replay as replay_run
from clark_agent.run_log import check_prefix, fold, usage_tree, waiting_for
from clark_agent.run_log import diff as first_difference
from clark_agent.run_log.families import outermost
from clark_agent.run_log.fold import fold_intact
from clark_agent.run_log.records import (
    Answered,
    Asked,
    CallSuspended,
    Consulted,
    RequestDecided,
    RunBegan,
    RunFailed,
    RunResumed,
    RunSuspended,
    ToolEnded,
    ToolStarted,
)
from clark_agent.run_log.store import LoadedRun, RunSummary
from clark_agent.run_log.writer import encode_entry
from clark_agent.trajectory import encode_record, to_trajectory
from clark_agent.types import AssistantMessage
from clark_agent.view.export import MOST_BYTES, write_run
from clark_agent.waiting import WaitingRequest

__all__ = ["diff", "export", "prefix", "print_runs", "replay", "runs", "show"]


# --- runs -----------------------------------------------------------------------------------------


@click.command(epilog=examples("clark-agent runs", "clark-agent runs -n 100 --json | jq .outcome"))
@click.option(
    "-n",
    "--limit",
    metavar="N",
    default=20,
    type=click.IntRange(min=1),
    help="How many runs to list. Default: 20.",
)
@click.option(
    "--all", "children", is_flag=True, help="Include runs that other runs in the log started."
)
@click.option("--json", "as_json", is_flag=True, help="Write one run per line, as JSON.")
@log_options(must_exist=True)
def runs(*, limit: int, children: bool, as_json: bool, log: Log) -> None:
    """List logged runs, the newest first."""
    every = log.store.runs()
    found = (every if children else outermost(every))[:limit]
    for name in getattr(log.store, "unreadable", tuple)():
        click.echo(f"not listed: the first record of {safe(name)} cannot be read", err=True)
    if as_json:
        for run in found:
            JsonView().write(run)
        return
    print_runs(found, log)
    if not found:
        click.echo(f"no runs in {log.where}", err=True)


def print_runs(found: Iterable[RunSummary], log: Log) -> None:
    """Print one line for each run."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
    rows = [_row(run, log) for run in found]
    columns = [max([len(cell) for cell in column]) for column in zip(*rows, strict=True)]
    for row in rows:
        *cells, prompt = [cell.ljust(size) for cell, size in zip(row, columns, strict=True)]
        line = "  ".join([*cells, prompt.rstrip()])
        click.echo(line if len(line) <= width else line[: width - 1] + "…")


def _row(run: RunSummary, log: Log) -> tuple[str, ...]:
    """Return its id, time, outcome, model and prompt."""
    when = time_text(run.began_at, "%Y-%m-%d %H:%M")
    start = (safe(run.run_id)[:8], when, one_line(run.outcome or "not ended", 18))
    records = log.store.load(run.run_id).records
    began = records[0].entry if records else None
    if not isinstance(began, RunBegan):
        return (*start, "-", "(the first record cannot be read)")
    prompt = " ".join([message.plain_text for message in began.prompts])
    return (*start, one_line(began.model_id or "-", 28), one_line(prompt))


# --- show -----------------------------------------------------------------------------------------


@click.command(
    epilog=examples(
        "clark-agent show last",
        "clark-agent show 3f2a | less",
        "clark-agent show last --price 3 15",
        "clark-agent show last --trace",
    )
)
@run_argument()
@click.option(
    "--price",
    nargs=2,
    type=click.FloatRange(min=0),
    metavar="IN OUT",
    help="The price of a million input and output tokens; adds the cost of each step.",
)
@click.option("--trace", is_flag=True, help="Draw its spans instead: times, tokens and cost.")
@log_options(must_exist=True)
def show(*, run_id: str, price: tuple[float, float] | None, trace: bool, log: Log) -> None:
    """Show the messages, tool calls and usage of a run.

    Below each answer: when it was requested, how long it took, its tokens, how long each of its
    tools ran, and what waited for a decision, until when, and who decided it. The time in which a
    run was suspended counts for nothing. Damage to the log is reported at the end.

    With --trace: a tree of the run, its turns, model calls, tools and child runs, as far as their
    logs can be read.
    """
    cost = None if price is None else Price(input=price[0], output=price[1])
    if trace:
        screen = RichScreen() if has_terminal() else PlainScreen(notes=sys.stdout)
        show_trace(screen, log.store, find_run(log, run_id), price=cost)
        screen.close()
        return
    loaded, folded, damage = fold_intact(log.store.load(find_run(log, run_id)))
    began, settings = folded.began, settings_of(folded.began)
    screen = RichScreen() if has_terminal() else PlainScreen(notes=sys.stdout)
    screen.note(f"run       {safe(loaded.run_id)}")
    screen.note(f"began     {time_text(loaded.records[0].at, '%Y-%m-%d %H:%M:%S')}")
    screen.note(f"model     {one_line(began.model_id or '-')}")
    tools = ", ".join([*began.tools, *folded.sourced]) or "-"
    screen.note(f"tools     {one_line(tools, 400)}")
    if began.host_notes:
        screen.note(f"root      {one_line(settings.root)}")
    if began.identity.conversation_id:
        screen.note(f"talk      {one_line(began.identity.conversation_id)}")
    view, steps = View(screen), list(_steps(loaded))
    view.show(began.history)
    for message in folded.messages:
        view.show([message])
        place = next((n for n, step in enumerate(steps) if step.message is message), -1)
        for step in steps[: place + 1]:  # including discarded attempts before it
            step.show(screen, cost)
        del steps[: place + 1]
    for step in steps:  # steps without a message in the transcript
        step.show(screen, cost)
    if isinstance(folded.ending, RunFailed):
        screen.note(one_line(folded.ending.text, 400), "error")
    if isinstance(folded.ending, RunSuspended) and damage is None:
        for line in waiting_lines(waiting_for(log.store, loaded.run_id), log, loaded.run_id):
            screen.note(line)
    try:
        if damage is not None:
            raise damage
        tree = usage_tree(log.store, loaded.run_id)
    except DecodeError as error:  # this log, or that of a child run
        screen.note(one_line(str(error), 400), "error")
    else:
        for line in str(tree).splitlines():
            screen.note(safe(line))
        if cost is not None:
            screen.note(f"{cost.of(tree.tree_usage):.4f} in all")
    screen.close()


class _Step(Struct):
    """One answer of the model, possibly discarded, and the tools it called."""

    turn: int
    asked_at: int
    answered_at: int
    message: AssistantMessage
    discarded: str | None
    tools: dict[int, tuple[str, int, int | None]]
    """By position: the name, the start time, and the end time."""
    notes: list[str]
    """What waited and was decided, in order."""

    def show(self, screen: PlainScreen | RichScreen, price: Price | None) -> None:
        """Show the step, and below it what waited."""
        screen.note(f"  {self.line(price)}")
        for note in self.notes:
            screen.note(f"  {note}")

    def line(self, price: Price | None) -> str:
        """Format the step as one line."""
        usage = self.message.usage
        parts = [
            f"turn {self.turn}",
            time_text(self.asked_at, "%H:%M:%S"),
            f"{(self.answered_at - self.asked_at) / 1000:.1f} s",
        ]
        if usage is not None:
            parts.append(usage_text(usage))
            if price is not None:
                parts.append(f"{price.of(usage):.4f}")
        if self.discarded is not None:
            parts.append(f"discarded ({one_line(self.discarded)})")
        for name, began, ended in self.tools.values():
            took = "not ended" if ended is None else f"{(ended - began) / 1000:.1f} s"
            parts.append(f"{one_line(name)} {took}")
        return PART.join(parts)


def _steps(loaded: LoadedRun) -> Iterator[_Step]:
    step: _Step | None = None
    turn, asked_at, suspended_at = 0, 0, 0
    tools: dict[str, str] = {}
    for record in loaded.records:
        at = record.at
        match record.entry:
            case Asked() as asked:
                turn, asked_at = asked.turn, at
            case Answered(message=message, discarded=discarded):
                if step is not None:
                    yield step
                step = _Step(turn, asked_at, at, message, discarded, {}, [])
            case _ if step is None:
                pass
            case ToolStarted() as started:
                step.tools[started.position] = (started.tool_name, at, None)
            case ToolEnded(position=position):
                _end_tool(step, position, at)
            case CallSuspended(position=position, request=request):
                _end_tool(step, position, at)  # it has run, and waits for its result
                if request is not None:
                    tools[request.request_id] = request.tool_name
                    step.notes.append(_waits(request))
            case Consulted(plugin=plugin, message=message, error=error):
                used = "" if message.usage is None else f": {usage_text(message.usage)}"
                failed = "" if error is None else f" ({one_line(error)})"
                step.notes.append(f"{one_line(plugin)} asked a model{failed}{used}")
            case RequestDecided(request_id=request_id, decision=decision, by=by):
                name = one_line(tools.get(request_id, request_id))
                step.notes.append(f"{name} {verdict_text(decision, by)} at {time_text(at, _TIME)}")
            case RunSuspended():
                suspended_at = at
            case RunResumed() if suspended_at:
                step.notes.append(f"suspended for {_duration(at - suspended_at)}")
                suspended_at = 0
            case _:
                pass
    if step is not None:
        yield step


def _end_tool(step: _Step, position: int, at: int) -> None:
    name, began, ended = step.tools.get(position, ("", 0, 0))
    if ended is None:
        step.tools[position] = (name, began, at)


def _waits(request: WaitingRequest) -> str:
    what = "permission" if request.needs == "permission" else "its result"
    parts = [
        f"{one_line(request.tool_name)} waits for {what} "
        f"({request.turn}/{request.position}) since {time_text(request.asked_at, _TIME)}"
    ]
    if request.assignee is not None:
        parts.append(f"for {one_line(request.assignee)}")
    if request.until is not None:
        parts.append(f"until {time_text(request.until, _TIME)}")
    if request.expires_at is not None:
        parts.append(f"expires {time_text(request.expires_at, _TIME)}")
    return PART.join(parts)


def _duration(milliseconds: int) -> str:
    seconds = max(0, milliseconds) / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{minutes} min" if minutes < 120 else f"{hours:.1f} h"


_TIME = "%Y-%m-%d %H:%M:%S"


# --- replay and diff ------------------------------------------------------------------------------


@click.command(epilog=examples("clark-agent replay last", "clark-agent replay 3f2a --tools none"))
@run_argument()
@agent_options
@log_options(must_exist=True)
def replay(*, run_id: str, given: Given, log: Log) -> int:
    """Replay a logged run offline and report what differs.

    The model, tools and clock answer from the log, so nothing is called and nothing changes. The
    run keeps its settings; options show what other settings would have changed.

    Exit codes: 0 identical, 1 different.
    """
    found = find_run(log, run_id)
    began = fold(log.store.load(found)).began
    settings = settings_from(given, settings_of(began))
    if settings.agent is not None and given.agent is None:
        raise ConfigError(
            f"the run used --agent {settings.agent}; pass it again, because its module is imported"
        )
    agent = replay_agent(settings, began)
    report = asyncio.run(replay_run(log.store, found, agent.config, deps=agent.deps))
    if report.is_identical:
        click.echo("identical")
        return 0
    click.echo(safe(f"not identical: {report.drift}"))
    return 1


@click.command(epilog=examples("clark-agent diff 3f2a 91bc"))
@run_argument("first")
@run_argument("second")
@log_options(must_exist=True)
def diff(*, first: str, second: str, log: Log) -> int:
    """Report the first difference between two runs, ignoring times and run ids.

    Exit codes: 0 the same, 1 different.
    """
    found = first_difference(log.store, find_run(log, first), find_run(log, second))
    click.echo("the same" if found is None else safe(str(found)))
    return int(found is not None)


@click.command(epilog=examples("clark-agent prefix last", "clark-agent prefix 3f2a --require 98"))
@run_argument()
@click.option(
    "--require",
    "percent",
    metavar="PERCENT",
    type=click.FloatRange(min=0, max=100),
    help="Fail if less than this share of what could repeat was the same.",
)
@log_options(must_exist=True)
def prefix(*, run_id: str, percent: float | None, log: Log) -> int:
    """Show how much of each request was the same as in the one before: what a provider can cache.

    Where the common part ends, the line says what changed, where, and which plugin, gate or tool
    source did it.

    Exit codes: 0 done, 1 less than --require.
    """
    report = check_prefix(log.store, find_run(log, run_id))
    click.echo(safe(str(report)))
    return int(percent is not None and report.reuse < percent / 100)


# --- export ---------------------------------------------------------------------------------------


def _markdown(loaded: LoadedRun) -> str:
    run = fold(loaded)
    title = one_line(run.messages[0].plain_text, 60) if run.messages else loaded.run_id
    return to_markdown(run.transcript, title=title, system_prompt=run.began.system_prompt)


def _openai(loaded: LoadedRun) -> str:
    run = fold(loaded)
    return _json(to_openai_messages(run.transcript, run.began.system_prompt))


def _anthropic(loaded: LoadedRun) -> str:
    run = fold(loaded)
    messages = to_anthropic_messages(run.transcript)
    return _json({"system": run.began.system_prompt, "messages": messages})


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def _records(loaded: LoadedRun) -> str:
    return "".join([encode_entry(record).decode() + "\n" for record in loaded.records])


def _trajectory(loaded: LoadedRun) -> str:
    return "".join([encode_record(record).decode() + "\n" for record in to_trajectory(loaded)])


FORMATS: dict[str, Callable[[LoadedRun], str]] = {
    "markdown": _markdown,
    "openai": _openai,
    "anthropic": _anthropic,
    "trajectory": _trajectory,
    "records": _records,
}


@click.command(
    epilog=examples(
        "clark-agent export last > talk.md",
        "clark-agent export 3f2a -f openai -o messages.json",
        "clark-agent export last --html -o run.html",
    )
)
@run_argument()
@click.option(
    "-f",
    "--format",
    "name",
    type=click.Choice(list(FORMATS)),
    default=None,
    help="Markdown, or JSON: messages for openai or anthropic, trajectory records, or the records "
    "of the log. Default: markdown.",
)
@click.option(
    "--html",
    "as_page",
    is_flag=True,
    help="Instead: one HTML file, which shows the run and its child runs in any browser.",
)
@click.option(
    "--max-size",
    "megabytes",
    metavar="MB",
    type=click.FloatRange(min=0.1),
    help="How large the HTML file may be. Default: 50.",
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(), help="The output file. Default: stdout."
)
@log_options(must_exist=True)
def export(
    *,
    run_id: str,
    name: str | None,
    as_page: bool,
    megabytes: float | None,
    output: str | None,
    log: Log,
) -> None:
    """Export a run as Markdown, JSON or HTML."""
    if as_page and name is not None:
        raise ConfigError("--html and --format exclude each other")
    if megabytes is not None and not as_page:
        raise ConfigError("--max-size goes with --html")
    found = find_run(log, run_id)
    text = None if as_page else FORMATS[name or "markdown"](log.store.load(found))
    with _opened(output) as file:
        if text is None:
            _export_page(log, found, file, megabytes)
        else:
            file.write(safe(text) if file.isatty() else text)


def _export_page(log: Log, run_id: str, file: TextIO, megabytes: float | None) -> None:
    if file.isatty():
        raise ConfigError("an HTML file is not for a terminal: name a file with -o")
    most = MOST_BYTES if megabytes is None else round(1_000_000 * megabytes)
    for sentence in write_run(log.store, run_id, file, most_bytes=most):
        click.echo(safe(sentence), err=True)


@contextmanager
def _opened(output: str | None) -> Generator[TextIO]:
    """Yield a file to write to. What cannot be written is a `ConfigError`."""
    if output is None or output == "-":
        yield sys.stdout
        return
    path = Path(os.path.realpath(Path(output).expanduser()))
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            with path.open("w", encoding="utf-8", errors="surrogatepass") as file:
                yield file
        else:
            with _replaced(path) as file:
                yield file
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error


@contextmanager
def _replaced(path: Path) -> Generator[TextIO]:
    """Yield a file that takes the place of ``path`` once it is whole. A new one is private."""
    handle, draft = mkstemp(prefix=".clark-agent-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogatepass") as file:
            if path.exists():
                os.chmod(draft, S_IMODE(path.stat().st_mode))
            yield file
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
