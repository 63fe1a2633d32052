"""Requests that wait in logs: which there are, and how they are decided.

Nothing here runs anything. A decision is a record that is appended under the lock of the run, so
that of several the first counts. `clark_agent.run_log.resume` acts on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Iterator
from random import random

from msgspec.structs import force_setattr

from clark_agent.clock import Clock, SystemClock
from clark_agent.errors import (
    AlreadyDecided,
    DecisionNotApplicable,
    DecodeError,
    RequestExpired,
    RequestNotFound,
    RunBusy,
    RunNotFound,
)
from clark_agent.messages.wire import decode_json
from clark_agent.run_log._checksums import seal
from clark_agent.run_log._reading import in_background
from clark_agent.run_log.families import is_below
from clark_agent.run_log.fold import FoldedRun, fold, fold_in
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.reader import SUSPENDED
from clark_agent.run_log.records import (
    RUN_LOG_VERSION,
    CallSuspended,
    Entry,
    Record,
    RequestDecided,
    RunEnded,
    RunFailed,
)
from clark_agent.run_log.store import LoadedRun, RunAppender, RunStore
from clark_agent.run_log.writer import RunLog, encode_entry, store_of
from clark_agent.waiting import (
    Allow,
    AnyDecision,
    Decision,
    Delivered,
    Deny,
    Elapsed,
    Expired,
    GiveArguments,
    GiveResult,
    WaitingRequest,
    run_of_request,
)

__all__ = [
    "decide",
    "locked",
    "open_requests",
    "ready_runs",
    "settle_requests",
    "waiting_for",
]

logger = logging.getLogger(__name__)

_DECISIONS = (Allow, Deny, GiveArguments, GiveResult)


# --- what waits -----------------------------------------------------------------------------------


def waiting_for(
    store: RunStore | RunLog,
    run_id: str | None = None,
    *,
    assignee: str | None = None,
    limit: int | None = None,
    clock: Clock | None = None,
) -> list[WaitingRequest]:
    """Return the open requests of a run and its child runs; without a run, those of all suspended
    runs, the newest run first.

    ``assignee`` selects those of one person, role or queue. Requests whose time is over are not
    among them. Raises `RunNotFound`; without a run, those that cannot be read are logged and
    skipped.
    """
    store = store_of(store)
    now_ms = (clock or SystemClock()).now_ms()
    found: list[WaitingRequest] = []
    every: Iterable[tuple[WaitingRequest, ...]]
    if run_id is not None:
        every = [open_requests(store, fold(store.load(run_id)), now_ms)]
    else:
        every = (waiting for _, waiting in _all_open(store, now_ms, assignee))
    for waiting in every:
        found += [r for r in waiting if assignee is None or r.assignee == assignee]
        if limit is not None and len(found) >= limit:
            return found[:limit]
    return found


def ready_runs(store: RunStore | RunLog, *, clock: Clock | None = None) -> list[str]:
    """Return the suspended runs that wait for nothing any more: all their requests are decided, or
    their time has come. `clark_agent.run_log.resume` continues each of them.
    """
    store = store_of(store)
    now_ms = (clock or SystemClock()).now_ms()
    return [root for root, waiting in _all_open(store, now_ms) if not waiting]


def _all_open(
    store: RunStore, now_ms: int, assignee: str | None = None
) -> Iterator[tuple[str, tuple[WaitingRequest, ...]]]:
    """Yield the outermost runs that are suspended, with their open requests; those that may have
    some of one assignee.
    """
    for run_id in _suspended(store, assignee):
        try:
            yield run_id, open_requests(store, fold(store.load(run_id)), now_ms)
        except (RunNotFound, DecodeError) as error:  # one damaged log must not hide the others
            logger.warning("the suspended run %s cannot be read: %s", run_id, error)


def _suspended(store: RunStore, assignee: str | None) -> Iterable[str]:
    waiting = getattr(store, "runs_waiting", None)  # a store may know who waits for what
    if waiting is not None and assignee is not None:
        found: Iterable[str] = waiting(assignee)
        return found
    return (run.run_id for run in store.runs(outcome=SUSPENDED) if not run.depth)


def open_requests(store: RunStore, folded: FoldedRun, now_ms: int) -> tuple[WaitingRequest, ...]:
    """Return the requests of a run and of the child runs it waits for that nothing has decided:
    neither a person, nor the time, nor an event. A run that is to be cancelled has none.
    """
    if isinstance(folded.ending, (RunEnded, RunFailed)) or _is_to_be_cancelled(store, folded):
        return ()
    decided = {entry.request_id for entry in _due(store, folded, now_ms)}
    found: list[WaitingRequest] = []
    for _, wait in sorted(folded.waits.items()):
        if wait.asked and wait.asked[-1].verdict is None:
            request = wait.asked[-1].request
            found += [request] if request.request_id not in decided else []
        for child in _waited_for(store, folded, wait.child_run_ids):
            found += open_requests(store, child, now_ms)
    return tuple(found)


def _waited_for(
    store: RunStore, folded: FoldedRun, child_run_ids: Iterable[str]
) -> Iterator[FoldedRun]:
    """Yield the child runs that a call waits for."""
    for run_id in child_run_ids:
        child = fold(store.load(run_id))
        if is_below(child.began.identity, folded.began.identity):
            yield child


def _is_to_be_cancelled(store: RunStore, folded: FoldedRun) -> bool:
    mails = store.mail(folded.began.identity.run_id)
    return folded.cancelled is not None or any(
        mail.kind == "cancel" and mail.id not in folded.mails for mail in mails
    )


# --- deciding -------------------------------------------------------------------------------------


async def decide(
    store: RunStore | RunLog,
    run_id: str,
    request_id: str,
    decision: Decision,
    *,
    by: str | None = None,
    clock: Clock | None = None,
    patience: float = 5.0,
) -> tuple[WaitingRequest, ...]:
    """Record the decision about a request, and who made it. Nothing runs.

    ``run_id`` is the run that has the request, or its outermost run. Returns what that outermost
    run still waits for: if it is empty, `clark_agent.run_log.resume` goes on.

    Raises `AlreadyDecided` if another decision, or the event, came first, `RequestExpired` if its
    time is over, `RequestNotFound`, `DecisionNotApplicable` if the call has already run and waits
    for its result, and `RunBusy` if a process still works on other calls of the run, after
    ``patience`` seconds.
    """
    store = store_of(store)
    for name, value in (("run_id", run_id), ("request_id", request_id), ("by", by)):
        if not (isinstance(value, str) or (name == "by" and value is None)):
            raise TypeError(f"{name} must be a text, not {value!r}")
    decision = _checked(decision)
    clock = clock or SystemClock()
    owner = run_of_request(request_id)

    def read() -> FoldedRun:
        folded = _find(store, run_id, owner, request_id)
        _check_applies(_open(folded, request_id), decision)
        return folded

    folded, appender = await locked(store, owner, read, patience)
    request = _open(folded, request_id)
    try:
        now_ms = clock.now_ms()
        due = await in_background(store, lambda: list(_due(store, folded, now_ms)))
        earlier = next((entry for entry in due if entry.request_id == request_id), None)
        entry = earlier or RequestDecided(request_id=request_id, decision=decision, by=by)
        if (wakes := getattr(appender, "wakes", None)) is not None:
            wakes(request.root_run_id)
        await _append(appender, folded, [entry], now_ms)
    finally:
        appender.close()
        await appender.barrier()
    if earlier is not None:  # the time, or an event, was first
        if isinstance(earlier.decision, (Expired, Elapsed)):
            raise RequestExpired(request_id, earlier.decision.at)
        raise AlreadyDecided(request_id, earlier.decision, None, now_ms)
    return await in_background(store, lambda: _left(store, request, now_ms))


def _checked(decision: Decision) -> AnyDecision:
    """Return the decision as a log has it. Raises `TypeError` if it cannot be written and read."""
    if not isinstance(decision, _DECISIONS):
        raise TypeError(
            "a decision is Allow(), Deny(...), GiveArguments(...) or GiveResult(...), "
            f"not {decision!r}"
        )
    try:
        checked: AnyDecision = decode_json(encode_entry(decision), AnyDecision)
        return checked
    except DecodeError as error:
        raise TypeError(f"invalid decision {decision!r}: {error}") from None


async def locked(
    store: RunStore, run_id: str, read: Callable[[], FoldedRun], patience: float
) -> tuple[FoldedRun, RunAppender]:
    """Read a run and lock its log, as it was read. While others have it, try again, for so many
    seconds; then raises `RunBusy`.
    """
    now = asyncio.get_running_loop().time
    until = now() + patience
    while True:
        folded = await in_background(store, read)
        try:
            appender = store.reopen(run_id, after=folded.last.seq)
            try:
                await appender.barrier()
            except BaseException:
                appender.close()
                raise
            return folded, appender
        except RunBusy:
            if now() >= until:
                raise
        await asyncio.sleep(0.005 + 0.02 * random())


def _left(store: RunStore, request: WaitingRequest, now_ms: int) -> tuple[WaitingRequest, ...]:
    try:
        return open_requests(store, fold(store.load(request.root_run_id)), now_ms)
    except RunNotFound:  # the outermost run is in another store
        return open_requests(store, fold(store.load(request.run_id)), now_ms)


def _find(store: RunStore, run_id: str, owner: str, request_id: str) -> FoldedRun:
    """Return the run, which has the request, and has it open."""
    try:
        loaded = store.load(owner)
    except RunNotFound:
        raise RequestNotFound(request_id, run_id) from None
    folded = fold(loaded)
    if run_id not in _known_as(loaded, request_id):
        raise RequestNotFound(request_id, run_id)
    if not isinstance(folded.ending, (RunEnded, RunFailed)) and any(
        request.request_id == request_id and _is_waited_for(store, request)
        for request in folded.open_requests
    ):
        return folded
    _raise_if_decided(store.load(owner), request_id)  # perhaps only now
    raise RequestNotFound(request_id, run_id)


def _is_waited_for(store: RunStore, request: WaitingRequest) -> bool:
    """Return whether the outermost run still waits for the run that has the request."""
    if request.run_id == request.root_run_id:
        return True
    try:
        root = fold(store.load(request.root_run_id))
    except RunNotFound:  # it is in another store
        return True
    is_over = isinstance(root.ending, (RunEnded, RunFailed))
    return not is_over and request.run_id in _below(store, root)


def _below(store: RunStore, folded: FoldedRun) -> Iterator[str]:
    """Yield the child runs that a run waits for, at any depth."""
    for wait in folded.waits.values():
        for child in _waited_for(store, folded, wait.child_run_ids):
            yield child.began.identity.run_id
            yield from _below(store, child)


def _open(folded: FoldedRun, request_id: str) -> WaitingRequest:
    return next(r for r in folded.open_requests if r.request_id == request_id)


def _known_as(loaded: LoadedRun, request_id: str) -> tuple[str, ...]:
    """Return the ids of the runs that a request can be decided with."""
    for record in loaded.records:
        match record.entry:
            case CallSuspended(request=WaitingRequest() as asked) if asked.request_id == request_id:
                return asked.run_id, asked.root_run_id
            case _:
                pass
    return ()


def _raise_if_decided(loaded: LoadedRun, request_id: str) -> None:
    for record in loaded.records:
        match record.entry:
            case RequestDecided(request_id=decided, decision=decision, by=by) if (
                decided == request_id
            ):
                if isinstance(decision, Expired):
                    raise RequestExpired(request_id, decision.at)
                raise AlreadyDecided(request_id, decision, by, record.at)
            case _:
                pass


def _check_applies(request: WaitingRequest, decision: Decision) -> None:
    if request.needs == "result" and isinstance(decision, (Allow, GiveArguments)):
        what = type(decision).__name__
        raise DecisionNotApplicable(
            f"{what} does not apply to the request {request.request_id!r}: the tool "
            f"{request.tool_name!r} has run and waits for its result. Use GiveResult or Deny",
            request.request_id,
        )


# --- what the time and events decide --------------------------------------------------------------


async def settle_requests(
    store: RunStore, folded: FoldedRun, appender: RunAppender, now_ms: int
) -> None:
    """Record what the time, or an event in the mailbox, has decided. The caller holds the lock."""
    entries = await in_background(store, lambda: list(_due(store, folded, now_ms)))
    if entries:
        await _append(appender, folded, entries, now_ms)


def _due(store: RunStore, folded: FoldedRun, now_ms: int) -> Iterator[RequestDecided]:
    """Yield what was decided without a person. Of a time and an event, the earlier one counts."""
    taken = set(folded.mails)
    for request in folded.open_requests:
        overdue = request.overdue(now_ms)
        event = None if request.event is None else _event(store, request, taken)
        if event is not None and (overdue is None or event.at < overdue.at):
            taken.add(event.id)
            yield RequestDecided(
                request_id=request.request_id,
                decision=Delivered(request.event or "", event.payload),
                mail=event.id,
            )
        elif overdue is not None:
            yield RequestDecided(request_id=request.request_id, decision=overdue)


def _event(store: RunStore, request: WaitingRequest, taken: Container[str]) -> Mail | None:
    """Return the first event in the mailbox that the request waits for."""
    for mail in store.mail(request.run_id):
        if mail.kind == "event" and mail.name == request.event and mail.id not in taken:
            return mail
    return None


async def _append(
    appender: RunAppender, folded: FoldedRun, entries: Iterable[Entry], now_ms: int
) -> None:
    """Append entries to a log that no process works on, and to its folded state."""
    for entry in entries:
        last = folded.last
        record = Record(RUN_LOG_VERSION, last.seq + 1, last.run, max(now_ms, 0), entry)
        data, checksum = seal(encode_entry(record), 0 if last.crc is None else int(last.crc, 16))
        appender.append(record, data)
        force_setattr(record, "crc", f"{checksum:08x}")
        fold_in(folded, record)
    appender.flush(sync=True)
    await appender.barrier()
