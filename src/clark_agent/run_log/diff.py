"""Finds the first difference of two logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clark_agent import _differences
from clark_agent.run_log.records import (
    Answered,
    Asked,
    CallSuspended,
    CancelReceived,
    Consulted,
    ContextEdited,
    MessagesAdded,
    Record,
    RequestDecided,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    RunSuspended,
    SteeringAccepted,
    ToolEnded,
    ToolsChanged,
    ToolsGated,
    ToolStarted,
)
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog, encode_entry, store_of
from clark_agent.tools.kept import KeptResult
from clark_agent.types import TextContent
from clark_agent.waiting import WaitingRequest

__all__ = ["Difference", "diff", "first_difference"]


class Difference(Struct, frozen=True):
    """The first difference of two runs."""

    seq: int
    """The number of the record."""
    turn: int
    kind: str
    """The kind of the record in the first run."""
    path: str
    """The path of the value in the record."""
    first: Any
    second: Any
    run_id: str | None = None
    """The id of the child run, if the difference is in one."""
    plugins: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """The plugins of both runs, if they differ as well."""

    def __str__(self) -> str:
        if self.plugins is None:
            return self._what()
        before, now = [", ".join(names) or "none" for names in self.plugins]
        return f"{self._what()} (the plugins were {before} and are {now})"

    def _what(self) -> str:
        where = f"in turn {self.turn}" if self.turn else "at the beginning"
        if self.run_id is not None:
            where += f" of the child run {self.run_id}"
        if self.path == "events":
            before = f"{where}, before record {self.seq} ({self.kind})"
            return f"{before}: {self.first} events were emitted; now {self.second}"
        if self.path == "kind":  # a different kind of record
            return f"{where}, record {self.seq}: {self.first}; now {self.second}"
        return (
            f"{where}, record {self.seq} ({self.kind}): {self.path or 'the record'} was "
            f"{_shown(self.first)} and is {_shown(self.second)}"
        )


def diff(store: RunStore | RunLog, first: str, second: str) -> Difference | None:
    """Return the first difference of two runs; None if they differ only in times and names.

    str() of the result is a sentence.
    """
    store = store_of(store)
    mine, theirs = store.load(first).records, store.load(second).records
    return first_difference(mine, theirs, of_one_run=False)


def first_difference(
    first: Sequence[Record], second: Sequence[Record], *, of_one_run: bool = True
) -> Difference | None:
    """Return the first difference of the entries of two logs. Times and run ids are ignored."""
    mine = [record for record in first if not isinstance(record.entry, RunResumed)]
    theirs = [record for record in second if not isinstance(record.entry, RunResumed)]
    turn = 0
    plugins: Difference | None = None  # reported last: a change of behaviour is more useful
    names: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    for index in range(max(len(mine), len(theirs))):
        left = mine[index] if index < len(mine) else None
        right = theirs[index] if index < len(theirs) else None
        if left is not None and right is not None and left.entry == right.entry:
            turn = _turn(left, turn)
            if not of_one_run or left.events == right.events or left.v == 1:
                continue
            kind = str(left.entry.__struct_config__.tag)
            events = Difference(left.seq, turn, kind, "events", left.events, right.events)
            return replace(events, plugins=names)
        known = left or right
        assert known is not None
        is_kept = _is_kept(left) or _is_kept(right)
        found = _differences.first_difference(
            _plain(left, of_one_run=of_one_run, is_kept=is_kept),
            _plain(right, of_one_run=of_one_run, is_kept=is_kept),
        )
        if found is not None:
            if found[0] in ("", "kind"):
                found = ("kind", _describe(left), _describe(right))
            kind = str(known.entry.__struct_config__.tag)
            difference = Difference(known.seq, _turn(known, turn), kind, *found)
            if not found[0].startswith("plugins"):
                return replace(difference, plugins=names)
            plugins, names = difference, _plugins(left, right)
        turn = _turn(known, turn)
    return plugins


def _plugins(
    left: Record | None, right: Record | None
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    if left is None or right is None:
        return None
    if not isinstance(left.entry, RunBegan) or not isinstance(right.entry, RunBegan):
        return None
    return left.entry.plugins, right.entry.plugins


def _turn(record: Record, before: int) -> int:
    turn: int | None = getattr(record.entry, "turn", None)
    return before if turn is None else turn


def _describe(record: Record | None) -> str:
    """Describe what happened, in a few words."""
    match None if record is None else record.entry:
        case None:
            return "nothing more happened"
        case ToolStarted(tool_name=name):
            return f"the tool {name} was run"
        case ToolEnded() as ended:
            result = "".join([b.text for b in ended.result.content if isinstance(b, TextContent)])
            by = [f" ({d.get('plugin')}: {d.get('decision')})" for d in ended.decisions]
            return f"the call {ended.tool_call_id} returned{''.join(by)}: {_shown(result)}"
        case Asked(turn=turn):
            return f"the model was called (turn {turn})"
        case Consulted(plugin=plugin, error=error):
            return f"{plugin} asked a model" + ("" if error is None else f" ({error})")
        case Answered(discarded=None):
            return "the model answered"
        case Answered(discarded=why):
            return f"an answer was discarded ({why})"
        case MessagesAdded(messages=messages):
            return f"a message was added: {_shown(messages[0].plain_text)}"
        case SteeringAccepted(message=message):
            return f"a message was accepted: {_shown(message.plain_text)}"
        case ContextEdited(plugin=plugin):
            return f"{plugin} edited what the model sees"
        case ToolsChanged(added=added, removed=removed):
            return f"tools were added ({', '.join(added)}) and removed ({', '.join(removed)})"
        case ToolsGated(plugin=plugin, allow=allow):
            return f"{plugin} allowed {'all tools' if allow is None else ', '.join(allow)}"
        case CallSuspended(request=None):
            return "a call waits for the run that it started"
        case CallSuspended(request=WaitingRequest(asked_by=by, tool_name=name)):
            return f"a call of {name} waits, asked by {by}"
        case RequestDecided(decision=decision, by=by):
            who = "" if by is None else f" by {by}"
            return f"a request was decided{who}: {decision.__struct_config__.tag}"
        case CancelReceived(reason=reason):
            return f"the run was cancelled from outside: {_shown(reason)}"
        case RunSuspended():
            return "the run was suspended"
        case RunEnded(outcome=outcome):
            return f"the run ended ({outcome})"
        case RunFailed(text=text):
            return f"the run failed: {_shown(text)}"
        case entry:
            return str(entry.__struct_config__.tag)


_OF_A_RUN = frozenset(
    {
        "timestamp",
        "time",
        "digest",
        "identity",
        "tool_call_id",
        "request",
        "host_notes",
        "request_id",
        "child_run_ids",
        "mail",
        "at",
    }
)


_CALL_PIECE = 5


def _is_kept(record: Record | None) -> bool:
    """Whether a result is kept beside the record: another log may have it in the record."""
    return (
        record is not None and isinstance(record.entry, ToolEnded) and record.entry.kept is not None
    )


def _plain(record: Record | None, *, of_one_run: bool, is_kept: bool) -> Any:
    if record is None:
        return None
    entry = record.entry
    if isinstance(entry, ToolEnded) and is_kept:
        entry = _with_digest(entry)
    if isinstance(entry, RunBegan):
        entry = replace(entry, trace={}, agent_name=None)  # of no effect, and older logs lack them
        if of_one_run:
            entry = replace(entry, model=None, provider=None)  # a replay calls no transport
    if isinstance(entry, RunFailed):
        entry = replace(entry, fields={})  # they say the same as its text, and older logs lack them
    data = encode_entry(entry)
    if not of_one_run:  # the ids of kept results
        data = re.sub(re.escape(record.run.encode()) + rb"/(\d+-\d+)", rb"\1", data)
    plain = msgspec.json.decode(data)
    return plain if of_one_run else _without(plain)


def _with_digest(entry: ToolEnded) -> ToolEnded:
    """The entry with a digest in place of what the tool returned, wherever that is."""
    given, kept = entry.given, entry.kept
    if given is not None:
        is_left_out = kept is not None and kept.is_given
        digest = kept.digest if kept and is_left_out else KeptResult.digest_of(given.content)
        given = replace(given, content=(TextContent(digest),))
    return replace(entry, given=given, kept=None)


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        is_call = value.get("type") == "tool_call"
        names = [name for name in value if name not in _OF_A_RUN and not (is_call and name == "id")]
        return {name: _without(value[name]) for name in names}
    if isinstance(value, (list, tuple)):
        if len(value) == _CALL_PIECE and value[0] == "call":
            return [*value[:2], *value[3:]]  # a piece of a call without its id
        return [_without(part) for part in value]
    return value


def _shown(value: Any) -> str:
    return _differences.shown(value, 160)
