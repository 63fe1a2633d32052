"""Commands that look at logged runs: ``runs``, ``show``, ``replay``, ``diff`` and ``export``.

None of them calls a model or runs a tool.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import click
import msgspec

from clark_agent.cli.app import examples
from clark_agent.cli.setup import (
    Given,
    Log,
    agent_options,
    find_run,
    log_options,
    nobody,
    run_argument,
    settings_from,
    settings_of,
)
from clark_agent.cli.view import (
    JsonView,
    PlainScreen,
    RichScreen,
    View,
    has_terminal,
    one_line,
    safe,
)
from clark_agent.errors import ConfigError
from clark_agent.run_log.log import encode_entry
from clark_agent.run_log.records import RunBegan, RunFailed
from clark_agent.run_log.store import LoadedRun, RunSummary
from clark_agent.trajectory import (
    diff as first_difference,
)
from clark_agent.trajectory import (
    encode_record,
    fold,
    to_anthropic_messages,
    to_markdown,
    to_openai_messages,
    to_trajectory,
    usage_tree,
)
from clark_agent.trajectory import replay as replay_run

__all__ = ["diff", "export", "replay", "runs", "show"]


# --- runs -----------------------------------------------------------------------------------------


@click.command(epilog=examples("clark-agent runs", "clark-agent runs -n 100 --json | jq .outcome"))
@click.option(
    "-n",
    "--limit",
    metavar="N",
    default=20,
    type=click.IntRange(min=1),
    help="How many; 20 by default.",
)
@click.option("--all", "children", is_flag=True, help="Those that other runs started, too.")
@click.option("--json", "as_json", is_flag=True, help="One run a line, as JSON.")
@log_options()
def runs(*, limit: int, children: bool, as_json: bool, log: Log) -> None:
    """List the runs that were logged, the newest first."""
    found = [run for run in log.store.runs() if children or not run.depth][:limit]
    if as_json:
        for run in found:
            JsonView().write(run)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
    rows = [_row(run, log) for run in found]
    columns = [max([len(cell) for cell in column]) for column in zip(*rows, strict=True)]
    for row in rows:
        *cells, said = [cell.ljust(size) for cell, size in zip(row, columns, strict=True)]
        line = "  ".join([*cells, said.rstrip()])
        click.echo(line if len(line) <= width else line[: width - 1] + "…")
    if not found:
        click.echo(f"there are no runs in {log.path}", err=True)


def _row(run: RunSummary, log: Log) -> tuple[str, ...]:
    """Its id, when it was and how it ended, the model, and what it was asked."""
    when = datetime.fromtimestamp(run.began_at / 1000).strftime("%Y-%m-%d %H:%M")
    start = (safe(run.run_id)[:8], when, one_line(run.outcome or "not ended", 18))
    records = log.store.load(run.run_id).records
    began = records[0].entry if records else None
    if not isinstance(began, RunBegan):
        return (*start, "-", "(its beginning cannot be read)")
    said = " ".join([message.plain_text for message in began.prompts])
    return (*start, one_line(began.model_id or "-", 28), one_line(said))


# --- show -----------------------------------------------------------------------------------------


@click.command(epilog=examples("clark-agent show last", "clark-agent show 3f2a | less"))
@run_argument()
@log_options()
def show(*, run_id: str, log: Log) -> None:
    """Show what was said and done in a run, and what it took."""
    loaded = log.store.load(find_run(log, run_id))
    folded = fold(loaded)
    began, settings = folded.began, settings_of(folded.began)
    screen = RichScreen() if has_terminal() else PlainScreen(notes=sys.stdout)
    screen.note(f"run       {safe(loaded.run_id)}")
    screen.note(
        f"began     {datetime.fromtimestamp(loaded.records[0].at / 1000):%Y-%m-%d %H:%M:%S}"
    )
    screen.note(f"model     {one_line(began.model_id or '-')}")
    screen.note(f"tools     {one_line(', '.join(began.tools) or '-', 400)}")
    if began.host_notes:
        screen.note(f"root      {one_line(settings.root)}")
    if began.identity.conversation_id:
        screen.note(f"talk      {one_line(began.identity.conversation_id)}")
    View(screen).tell([*began.history, *folded.messages])
    if isinstance(folded.ending, RunFailed):
        screen.note(one_line(folded.ending.text, 400), "error")
    for line in str(usage_tree(log.store, loaded.run_id)).splitlines():
        screen.note(safe(line))
    screen.close()


# --- replay and diff ------------------------------------------------------------------------------


@click.command(epilog=examples("clark-agent replay last", "clark-agent replay 3f2a --tools none"))
@run_argument()
@agent_options
@log_options()
def replay(*, run_id: str, given: Given, log: Log) -> int:
    """Run a logged run again, offline, and say what differs.

    Model, tools and clock answer from the log, so nothing is called and nothing changes. The run is
    set up as it was, unless options say otherwise: then it is told what they would have changed.

    Exit codes: 0 identical, 1 not.
    """
    found = find_run(log, run_id)
    began = fold(log.store.load(found)).began
    agent = nobody(settings_from(given, settings_of(began)))
    report = asyncio.run(replay_run(log.store, found, agent.config))
    if report.is_identical:
        click.echo("identical")
        return 0
    click.echo(safe(f"not identical: {report.drift}"))
    return 1


@click.command(epilog=examples("clark-agent diff 3f2a 91bc"))
@run_argument("first")
@run_argument("second")
@log_options()
def diff(*, first: str, second: str, log: Log) -> int:
    """Say where two runs part, times and names aside.

    Exit codes: 0 they are the same, 1 they are not.
    """
    found = first_difference(log.store, find_run(log, first), find_run(log, second))
    click.echo("the same" if found is None else safe(str(found)))
    return int(found is not None)


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
        "clark-agent export last > talk.md", "clark-agent export 3f2a -f openai -o messages.json"
    )
)
@run_argument()
@click.option(
    "-f",
    "--format",
    "name",
    type=click.Choice(list(FORMATS)),
    default="markdown",
    help="markdown, or JSON: messages as openai and anthropic take them, trajectory records, or "
    "the records of the log.",
)
@click.option("-o", "--output", metavar="FILE", type=click.Path(), help="Where to; stdout.")
@log_options()
def export(*, run_id: str, name: str, output: str | None, log: Log) -> None:
    """Write a run in a form that others read."""
    text = FORMATS[name](log.store.load(find_run(log, run_id)))
    if output is None or output == "-":
        sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
        return
    try:
        Path(output).expanduser().write_text(text, "utf-8", errors="surrogatepass")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error
