"""Commands about runs that wait: ``waiting`` and ``decide``.

A decision is a record in the log. Nothing runs until the run is resumed, here with ``--resume`` or
with ``clark-agent resume``. Of several decisions about a request the first counts.
"""

from __future__ import annotations

import asyncio
import getpass
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click
import msgspec
from click.shell_completion import CompletionItem

from clark_agent.cli.app import PROGRAM, examples
from clark_agent.cli.commands.log import print_runs
from clark_agent.cli.commands.run import SUSPENDED, check_not_queued, continue_run
from clark_agent.cli.options import (
    Approvals,
    Given,
    Log,
    RunNames,
    existing,
    log_options,
    open_log,
    resume_command,
)
from clark_agent.cli.requests import (
    find_request,
    how_to_decide,
    name_of,
    request_lines,
    requests_of,
    verdict_text,
    worker_continues,
)
from clark_agent.cli.view import JsonView, one_line
from clark_agent.errors import ClarkAgentError, ConfigError
from clark_agent.run_log import decide as record_decision
from clark_agent.run_log import ready_runs, waiting_for
from clark_agent.waiting import (
    Allow,
    AnyDecision,
    Deny,
    GiveArguments,
    GiveResult,
    WaitingRequest,
)

__all__ = ["decide", "waiting"]


def _complete_requests(context: click.Context, _: Any, incomplete: str) -> list[CompletionItem]:
    items: list[CompletionItem] = []
    with suppress(ClarkAgentError):
        log = existing(open_log(context.params.get("log")))
        names = RunNames(log)
        items += [
            CompletionItem(name_of(request, names), help=one_line(request.tool_name))
            for request in waiting_for(log.store, limit=50)
        ]
    return [item for item in items if item.value.startswith(incomplete)]


# --- waiting --------------------------------------------------------------------------------------


@click.command(
    epilog=examples(
        "clark-agent waiting",
        "clark-agent waiting 3f2a                  # one run, with all arguments",
        "clark-agent waiting --assignee finance --json | jq -r .request_id",
        "clark-agent waiting --ready               # runs that can be resumed",
    )
)
@click.argument("name", metavar="[RUN|REQUEST]", required=False, shell_complete=_complete_requests)
@click.option("--assignee", metavar="NAME", help="Only requests for this person, role or queue.")
@click.option("--full", is_flag=True, help="Show all arguments. Default if a run is named.")
@click.option(
    "--ready", is_flag=True, help="List the suspended runs that wait for nothing any more."
)
@click.option("--json", "as_json", is_flag=True, help="Write one request per line, as JSON.")
@log_options(must_exist=True)
def waiting(
    *, name: str | None, assignee: str | None, full: bool, ready: bool, as_json: bool, log: Log
) -> None:
    """List what suspended runs wait for, the newest run first.

    With a RUN: what this run and its child runs wait for, with all arguments. The first word of
    each request is its name, for 'clark-agent decide'.
    """
    if ready:
        if name is not None or assignee is not None:
            raise click.UsageError("--ready lists runs: it takes no run and no --assignee")
        _list_ready(log, as_json)
        return
    found = waiting_for(log.store) if name is None else requests_of(log, name)
    found = [request for request in found if assignee in (None, request.assignee)]
    if as_json:
        for request in found:
            JsonView().write(request)
        return
    names = RunNames(log)
    for request in found:
        for line in request_lines(request, names, full=full or name is not None):
            click.echo(line)
    if not found:
        click.echo("nothing waits for a decision", err=True)


def _list_ready(log: Log, as_json: bool) -> None:
    ready = set(ready_runs(log.store))
    found = [run for run in log.store.runs() if run.run_id in ready]
    if as_json:
        for run in found:
            JsonView().write(run)
        return
    print_runs(found, log)
    if not found:
        click.echo("no suspended run can be resumed", err=True)


# --- decide ---------------------------------------------------------------------------------------


@click.command(
    epilog=examples(
        "clark-agent decide 3f2a allow                          # its only open request",
        'clark-agent decide 3f2a91bc/2/0 deny "Ask finance first"',
        """clark-agent decide 3f2a91bc/2/0 arguments '{"amount": 12}'""",
        'clark-agent decide 3f2a result "Blue" --resume         # answer a question, and go on',
        "clark-agent decide 3f2a arguments - < changed.json",
    )
)
@click.argument("name", metavar="RUN|REQUEST", shell_complete=_complete_requests)
@click.argument(
    "what", metavar="DECISION", type=click.Choice(["allow", "deny", "arguments", "result"])
)
@click.argument("value", required=False)
@click.option("--reason", metavar="TEXT", help="Why it is denied; the same as VALUE after deny.")
@click.option("--by", metavar="NAME", help="Who decides. Default: your user name.")
@click.option("--resume", is_flag=True, help="Go on with the run if nothing else is open.")
@click.option("--json", "as_json", is_flag=True, help="Write the decision as a line of JSON.")
@log_options(must_exist=True)
def decide(
    *,
    name: str,
    what: str,
    value: str | None,
    reason: str | None,
    by: str | None,
    resume: bool,
    as_json: bool,
    log: Log,
) -> int:
    """Decide what a suspended run waits for.

    RUN|REQUEST is the name of a request ('clark-agent waiting' lists them), or a run that has one
    open request. DECISION is one of:

    \b
      allow             run the call as it is
      deny [VALUE]      do not run it; the model gets the reason
      arguments VALUE   run it with these arguments, a JSON object
      result VALUE      do not run it; this text is its result, or the answer

    A VALUE of "-" is read from stdin. Nothing runs until the run is resumed; a run of a queue is
    resumed by a worker.

    Exit codes: 0 decided, 1 somebody else was faster, its time is over, or a process still works on
    the run, 2 wrong usage; with --resume that of the run.
    """  # noqa: D301 - click wants the character itself
    if reason is not None and (what != "deny" or value is not None):
        raise click.UsageError("--reason is for deny, without a VALUE")
    decision = _decision(what, _read_value(value) if reason is None else reason)
    request = find_request(log, name)
    names = RunNames(log)
    _check_applies(request, decision, names)
    if resume:
        check_not_queued(log, request.root_run_id)
    who = _user_name() if by is None else by
    left = asyncio.run(
        record_decision(log.store, request.run_id, request.request_id, decision, by=who)
    )
    root = request.root_run_id
    if as_json:
        JsonView().write(
            {
                "request_id": request.request_id,
                "run_id": root,
                "decision": decision,
                "by": who,
                "waiting": left,
            }
        )
    else:
        tool, said = one_line(request.tool_name), verdict_text(decision, who)
        click.echo(f"{name_of(request, names)}  {tool} {said}")
    if resume and not left:
        return continue_run(root, Given(), Approvals(), as_json=as_json, log=log)
    if not as_json:
        _say_how_to_go_on(left, root, log, names)
    return SUSPENDED if resume else 0


def _read_value(value: str | None) -> str | None:
    if value != "-":
        return value
    return sys.stdin.buffer.read().decode("utf-8", "replace").rstrip("\n")


def _decision(what: str, value: str | None) -> AnyDecision:
    if what == "deny":
        return Deny(value)
    if what == "allow":
        if value is not None:
            raise click.UsageError("allow takes no VALUE; to change the arguments: arguments JSON")
        return Allow()
    if value is None:
        shown = "'{…}'" if what == "arguments" else '"…"'
        raise click.UsageError(f"{what} needs a VALUE: {PROGRAM} decide RUN {what} {shown}")
    return GiveResult(value) if what == "result" else GiveArguments(_arguments(value))


def _arguments(text: str) -> dict[str, Any]:
    try:
        args = msgspec.json.decode(text.encode("utf-8", "surrogateescape"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"the arguments are not JSON: {error}") from None
    if not isinstance(args, dict):
        raise click.UsageError(f"the arguments must be a JSON object, not {text[:60]}")
    return args


def _check_applies(request: WaitingRequest, decision: AnyDecision, names: RunNames) -> None:
    if request.needs == "result" and isinstance(decision, (Allow, GiveArguments)):
        raise ConfigError(
            f"{one_line(request.tool_name)} has run and waits for its result: decide "
            f'{name_of(request, names)} with result "…" or deny'
        )


def _user_name() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user without a name
        return None


def _say_how_to_go_on(left: Sequence[WaitingRequest], root: str, log: Log, names: RunNames) -> None:
    if not left:
        queue = log.queue_of(root)
        on = f"to go on: {resume_command(log, root)}" if queue is None else worker_continues(queue)
        click.echo(on)
        return
    click.echo("still open:")
    for request in left:
        for line in request_lines(request, names):
            click.echo(line)
        click.echo(f"  {how_to_decide(request, log, names)}")
