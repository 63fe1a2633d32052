"""Commands for runs that another process runs: ``follow``, ``steer`` and ``cancel``.

`follow` reads the log as it grows. A message goes into the mailbox of the run, beside its log. The
process that runs it looks there several times a second. If no process does, the message waits until
the run is resumed.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import click

from clark_agent import events as ev
from clark_agent.cli.app import examples
from clark_agent.cli.commands.run import SUSPENDED
from clark_agent.cli.options import Log, find_run, find_submitted, log_options, run_argument
from clark_agent.cli.requests import waiting_lines
from clark_agent.cli.view import JsonView, Screen, View, make_screen, one_line, safe
from clark_agent.durable.dbos import connect
from clark_agent.result import LoopOutcome
from clark_agent.run_log import cancel as send_cancel
from clark_agent.run_log import fold, follow_up, waiting_for
from clark_agent.run_log import follow as follow_run
from clark_agent.run_log import steer as send_message
from clark_agent.run_log.follow import FollowedEvent
from clark_agent.run_log.records import RunEnded, RunFailed, RunSuspended
from clark_agent.steering import SteerWhen
from clark_agent.stream import TextChunk
from clark_agent.types import AssistantMessage, UserMessage

if TYPE_CHECKING:
    from clark_agent.run_log.postgres import PostgresStore

__all__ = ["cancel", "follow", "steer"]

_FOLLOW_UP = "follow_up"


@click.command(
    epilog=examples(
        'clark-agent steer last "Leave the tests alone"',
        'clark-agent steer 3f2a --when now "Stop and read the issue first"',
        'clark-agent steer 3f2a --when follow_up "And now in French"',
    )
)
@run_argument()
@click.argument("text", nargs=-1, required=True)
@click.option(
    "--when",
    type=click.Choice([*[when.value for when in SteerWhen], _FOLLOW_UP]),
    default=SteerWhen.AFTER_BATCH.value,
    help="How soon: after the running tools (after_batch, the default), before the next tool, now "
    "(running tools are stopped), or when the agent has finished (follow_up).",
)
@log_options(must_exist=True)
def steer(*, run_id: str, text: tuple[str, ...], when: str, log: Log) -> None:
    """Send a message to a run of another process.

    The model gets TEXT as a message of the user. If no process works on the run, because it is
    suspended or was killed, the message waits until the run is resumed.
    """
    found, message = find_run(log, run_id), " ".join(text)
    if when == _FOLLOW_UP:
        follow_up(log.store, found, message)
    else:
        send_message(log.store, found, message, SteerWhen(when))
    click.echo(f"sent to run {found[:8]}", err=True)


@click.command(
    epilog=examples("clark-agent cancel last", 'clark-agent cancel 3f2a --reason "wrong folder"')
)
@run_argument()
@click.option("--reason", metavar="TEXT", help="Why; it is recorded in the log.")
@log_options(must_exist=True)
def cancel(*, run_id: str, reason: str | None, log: Log) -> None:
    """Cancel a run of another process.

    The run ends as failed, with its tools stopped, as soon as its process reads the message. A run
    without a process ends when it is resumed. A queued run ends at once, and never begins.
    """
    found, queue = find_submitted(log, run_id)
    if queue is not None:
        store = cast("PostgresStore", log.store)
        connect(store, queue=queue).cancel(found, reason)
        click.echo(f"cancelled run {found[:8]}", err=True)
        return
    send_cancel(log.store, found, reason)
    click.echo(f"sent to run {found[:8]}", err=True)


# --- follow ---------------------------------------------------------------------------------------


@click.command(
    epilog=examples(
        "clark-agent follow last",
        "clark-agent follow 3f2a --wait            # also when it is resumed later",
        "clark-agent follow 3f2a --json | jq .type",
    )
)
@run_argument()
@click.option("--wait", is_flag=True, help="Go on while the run is suspended.")
@click.option("--json", "as_json", is_flag=True, help="Write events as JSON, one per line.")
@log_options(must_exist=True)
def follow(*, run_id: str, wait: bool, as_json: bool, log: Log) -> int:
    """Show a run that another process runs: what has happened, then what happens.

    It ends with the run, or when the run is suspended. If the process of the run has died, nothing
    happens until the run is resumed; Ctrl-C leaves. The run goes on without you.

    Exit codes: 0 the run is done, 1 it failed, 3 a limit ended it, 4 it is suspended, 130 you left.
    """
    found = find_run(log, run_id)
    screen = make_screen()
    view: _FollowView | JsonView = JsonView() if as_json else _FollowView(screen)

    async def main() -> None:
        events = follow_run(log.store, found, until_suspended=not wait)
        async with aclosing(events):
            async for followed in events:
                view(followed.event) if isinstance(view, JsonView) else view.take(followed)

    try:
        asyncio.run(main())
    finally:
        screen.close()
    return _show_end(log, found, None if as_json else screen)


class _FollowView:
    """Shows the events of a log, and in between the text that is being streamed."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._view = View(screen)
        self._streamed = ""

    def take(self, followed: FollowedEvent) -> None:
        match followed.event:
            case ev.MessageUpdate(chunk=TextChunk(delta)):
                self._streamed += delta
                self._view(followed.event)
            case ev.MessageStart(message=UserMessage() as message):
                self._view.show([message])
            case ev.MessageStart():
                pass  # it comes with its end, when the text has been shown
            case ev.MessageEnd(message=AssistantMessage() as message):
                text, streamed, self._streamed = message.plain_text, self._streamed, ""
                if not text.startswith(streamed):  # its beginning is missing: show all of it
                    self._screen.end()
                    streamed = ""
                self._screen.say(safe(text.removeprefix(streamed)))
                self._screen.status("")
                self._screen.end()
            case _:
                self._view(followed.event)


def _show_end(log: Log, run_id: str, screen: Screen | None) -> int:
    """Say how the run stands, and return the exit code."""
    ending = fold(log.store.load(run_id)).ending
    lines: list[str] = []
    match ending:
        case RunFailed(text=text):
            code, lines = 1, [f"failed: {one_line(text, 400)}"]
        case RunEnded(outcome=outcome):
            code, lines = 0 if LoopOutcome(outcome).is_complete else 3, [one_line(outcome)]
        case RunSuspended():
            waiting = waiting_for(log.store, run_id)
            code, lines = SUSPENDED, ["suspended", *waiting_lines(waiting, log, run_id)]
        case _:  # somebody has resumed it meanwhile
            code, lines = SUSPENDED, ["resumed"]
    if screen is not None:
        for line in lines:
            screen.note(line)
    return code
