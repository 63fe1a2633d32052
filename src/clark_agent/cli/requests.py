"""Requests that wait, on the command line: their short names, how to find one, how to show one.

The name of a request is that of its run, the turn, and the position of the call: ``3f2a91bc/2/0``.
Commands accept it, the whole id, or just the run if it has one open request.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, assert_never

import msgspec

from clark_agent.cli.app import PROGRAM
from clark_agent.cli.options import Log, RunNames, find_run, resume_command
from clark_agent.cli.view import PART, call_line, one_line, safe, time_text
from clark_agent.errors import ConfigError, RequestNotFound
from clark_agent.run_log.records import CallSuspended
from clark_agent.run_log.requests import waiting_for
from clark_agent.toolkit._visible import call_block
from clark_agent.waiting import (
    Allow,
    Delivered,
    Deny,
    Elapsed,
    Expired,
    GiveArguments,
    GiveResult,
    Verdict,
    WaitingRequest,
)

__all__ = [
    "find_request",
    "how_to_decide",
    "name_of",
    "request_lines",
    "requests_of",
    "verdict_text",
    "waiting_lines",
    "worker_continues",
]

_NAME = re.compile(r"(.+)/(\d+)/(\d+)(?:/([0-9a-f]*))?")
_TIME = "%Y-%m-%d %H:%M:%S"


def name_of(request: WaitingRequest, names: RunNames) -> str:
    """Return the short name of a request."""
    return f"{names(request.run_id)}/{request.turn}/{request.position}"


# --- finding --------------------------------------------------------------------------------------


def requests_of(log: Log, given: str) -> list[WaitingRequest]:
    """Return the open requests that a name stands for: a request, or a run with its child runs."""
    run_id, place = _split(log, given)
    found = waiting_for(log.store, run_id)
    return found if place is None else [request for request in found if _is_at(request, place)]


def find_request(log: Log, given: str) -> WaitingRequest:
    """Return the request that a name stands for. It may be decided already.

    Raises `ConfigError` if a run has no open request, or several.
    """
    run_id, place = _split(log, given)
    names = RunNames(log)
    if place is None:
        waiting = waiting_for(log.store, run_id)
        if len(waiting) == 1:
            return waiting[0]
        if not waiting:
            raise ConfigError(f"the run {names(run_id)} waits for no decision")
        listed = [line for request in waiting for line in request_lines(request, names)]
        text = "\n".join([f"the run {names(run_id)} has {len(waiting)} open requests:", *listed])
        raise ConfigError(
            f"{text}\nname one of them: {PROGRAM} decide {name_of(waiting[0], names)} …"
        )
    asked = [
        record.entry.request
        for record in log.store.load(run_id).records
        if isinstance(record.entry, CallSuspended) and record.entry.request is not None
    ]
    for request in reversed(asked):  # the newest request about a call is the one that can be open
        if _is_at(request, place):
            return request
    raise RequestNotFound(given, run_id)


_Place = tuple[int, int, str]


def _split(log: Log, given: str) -> tuple[str, _Place | None]:
    """Return the run, and the place of the request in it."""
    match = _NAME.fullmatch(given)
    if match is None or any(run.run_id == given for run in log.store.runs()):
        return find_run(log, given), None
    run, turn, position, digest = match.groups()
    return find_run(log, run), (int(turn), int(position), digest or "")


def _is_at(request: WaitingRequest, place: _Place) -> bool:
    turn, position, digest = place
    return (
        request.turn == turn
        and request.position == position
        and request.request_id.rpartition("/")[2].startswith(digest)
    )


# --- showing --------------------------------------------------------------------------------------


def request_lines(request: WaitingRequest, names: RunNames, *, full: bool = False) -> Iterator[str]:
    """Yield the lines that show a request: all that it asks if ``full``, otherwise two lines."""
    yield f"{name_of(request, names)}  {call_line(request.tool_name, request.arguments)}"
    needs = "asks for permission" if request.needs == "permission" else "waits for its result"
    parts = [f"{one_line(request.asked_by)} {needs}", f"since {time_text(request.asked_at, _TIME)}"]
    if request.assignee is not None:
        parts.append(f"for {one_line(request.assignee)}")
    if request.event is not None:
        parts.append(f"until the event {one_line(request.event)}")
    if request.until is not None:
        parts.append(f"until {time_text(request.until, _TIME)}")
    if request.expires_at is not None:
        parts.append(f"expires {time_text(request.expires_at, _TIME)}")
    yield f"  {PART.join(parts)}"
    if full:
        yield from _indented("arguments:", call_block(request.arguments))
        yield from _asked(request.request)


def _asked(asked: Any) -> Iterator[str]:
    """Yield what the plugin or the tool asks, if it is more than the call."""
    match asked:
        case None:
            return
        case {"kind": "approval"}:
            if asked.get("preview"):
                yield from _indented("preview:", str(asked["preview"]))
        case {"kind": "question", "question": question}:
            yield from _indented("question:", str(question))
            choices = asked.get("choices")
            if isinstance(choices, list) and choices:
                yield from _indented("choices:", "\n".join([str(choice) for choice in choices]))
        case _:
            text = msgspec.json.format(msgspec.json.encode(asked), indent=2).decode()
            yield from _indented("request:", text)


def _indented(label: str, text: str) -> Iterator[str]:
    yield f"  {label}"
    for line in safe(text).rstrip("\n").split("\n"):
        yield f"    {line}"


def how_to_decide(request: WaitingRequest, log: Log, names: RunNames) -> str:
    """Return the command that decides a request."""
    name = shlex.quote(name_of(request, names))
    if request.needs == "result":
        return f'{PROGRAM} decide{log.option} {name} result "…"    # or: deny "why"'
    return (
        f"{PROGRAM} decide{log.option} {name} allow"
        """    # or: deny "why", arguments '{…}', result "…\""""
    )


def waiting_lines(waiting: Sequence[WaitingRequest], log: Log, run_id: str) -> Iterator[str]:
    """Yield what a run waits for, and the commands that decide it and go on."""
    names = RunNames(log)
    for request in waiting:
        yield from request_lines(request, names)
        yield f"  {how_to_decide(request, log, names)}"
    if (queue := log.queue_of(run_id)) is not None:
        yield f"then: {worker_continues(queue)}"
    else:
        yield f"then: {resume_command(log, run_id)}"


def worker_continues(queue: str) -> str:
    """Return who goes on with a run of a queue."""
    return f"a worker of the queue {queue!r} continues it"


def verdict_text(verdict: Verdict, by: str | None) -> str:
    """Return a decision in words, and who made it."""
    match verdict:
        case Allow():
            text = "allowed"
        case Deny(reason):
            text = f"denied ({one_line(reason)})" if reason else "denied"
        case GiveArguments(args):
            text = f"allowed with {one_line(repr(args))}"
        case GiveResult(result):
            text = f"answered ({one_line(result.plain_text)})"
        case Expired():
            text = "expired"
        case Elapsed():
            text = "its time came"
        case Delivered(name):
            text = f"the event {one_line(name)} came"
        case _:
            assert_never(verdict)
    return text if by is None else f"{text} by {one_line(by)}"
