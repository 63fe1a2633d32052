"""Writes the records of all runs of a process, in groups.

A thread takes what all runs have appended since its last commit, and commits it with one statement.
While it waits for the database, more is appended: the busier the process, the larger the groups.

A run is claimed before it is written, and each commit names its claim, so that a process whose run
was taken over writes nothing more. If the database is away, the thread tries again, and then finds
out whether its last commit was made.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from queue import SimpleQueue
from typing import Any, TypeVar, get_args
from uuid import UUID, uuid4

import psycopg

from clark_agent._finished import FINISHED
from clark_agent._text import well_formed
from clark_agent.errors import RunBusy, RunExists, RunNotFound, RunStoreError, RunTakenOver
from clark_agent.run_log._committing import Outcome, Waiter, running_loop, settle
from clark_agent.run_log._postgres.connecting import (
    Connector,
    from_column,
    is_passing,
    store_error,
    to_column,
)
from clark_agent.run_log._postgres.keeping import ALIVE, RELEASE, Keeper
from clark_agent.run_log._postgres.schema import qualified
from clark_agent.run_log._queue_thread import QueueThread, distinct_items
from clark_agent.run_log.reader import outcome_of
from clark_agent.run_log.records import (
    CallSuspended,
    Entry,
    Record,
    RequestDecided,
    RunBegan,
    RunEnded,
    RunFailed,
    ToolStarted,
)
from clark_agent.types import RunIdentity

__all__ = ["Appender", "GroupWriter", "OnWake"]

logger = logging.getLogger(__name__)

OnWake = Callable[[psycopg.Connection, str], None]
_T = TypeVar("_T")

_LARGEST = (1 << 63) - 1
_SOON = 0.01
"""The seconds after which flushed records are committed, unless a barrier comes first."""
_MOST = 2000
"""The number of runs in one commit."""
_KINDS: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in get_args(Entry)}

_PARENT = """
    WITH parent AS (
        SELECT FROM {s}.runs WHERE n = %(parent)s AND claim = %(parent_claim)s FOR SHARE
    )
"""
"""Whether this process still has the run above. While its row is locked, no process takes that
run over; one that does so later finds the child.
"""
_CREATE = f"""
    INSERT INTO {{s}}.runs AS r (run_id, parent_run_id, owner, claim, epoch)
    SELECT %(run_id)s, %(above)s, %(worker)s, %(claim)s, 1 {{}}
    ON CONFLICT (run_id) DO UPDATE SET parent_run_id = excluded.parent_run_id,
        owner = excluded.owner, claim = excluded.claim, epoch = r.epoch + 1
        WHERE r.last_seq < 0 AND (r.claim = excluded.claim OR NOT {ALIVE})
    RETURNING n, FALSE, NULL, NULL
"""
_REOPEN = f"""
    UPDATE {{s}}.runs AS r SET owner = %(worker)s, claim = %(claim)s, epoch = r.epoch + 1
    FROM (SELECT n, owner FROM {{s}}.runs WHERE run_id = %(run_id)s) AS old
    WHERE r.n = old.n AND r.last_seq = %(after)s AND (r.claim = %(claim)s OR NOT {ALIVE})
    RETURNING r.n, EXISTS (
        SELECT FROM {{s}}.requests q WHERE q.n = r.n AND q.decided_at IS NULL
    ), old.owner, r.parent_run_id
"""
_FENCE = f"""
    WITH RECURSIVE below AS (
        SELECT n, run_id FROM {{s}}.runs WHERE parent_run_id = %(run_id)s
        UNION
        SELECT runs.n, runs.run_id FROM below JOIN {{s}}.runs ON runs.parent_run_id = below.run_id
    )
    UPDATE {{s}}.runs AS r SET owner = NULL, claim = NULL, epoch = epoch + 1
    WHERE n IN (SELECT n FROM below) AND owner IS NOT NULL AND owner <> %(worker)s
        AND (owner = %(owner)s OR NOT {ALIVE})
"""
"""Takes the runs below a run away from the process that had it, and from those that had it before
and died. Includes runs that are claimed and have no record yet.
"""
_LAST = "SELECT last_seq FROM {s}.runs WHERE run_id = %s AND last_seq >= 0"
_WRITE = """
    WITH v AS (
        SELECT * FROM unnest(
            %(n)s::bigint[], %(claim)s::uuid[], %(before)s::bigint[], %(last)s::bigint[],
            %(at)s::bigint[], %(outcome)s::text[], %(release)s::bool[], %(parent)s::text[],
            %(depth)s::bigint[], %(conversation)s::text[], %(began)s::bigint[],
            %(first)s::bigint[], %(version)s::bigint[]
        ) AS v (n, claim, before, last, at, outcome, release, parent, depth, conversation, began,
            first, version)
    ), moved AS (
        UPDATE {s}.runs r SET
            last_seq = v.last,
            last_at = coalesce(v.at, r.last_at),
            outcome = CASE WHEN v.at IS NULL THEN r.outcome ELSE v.outcome END,
            owner = CASE WHEN v.release THEN NULL ELSE r.owner END,
            parent_run_id = coalesce(v.parent, r.parent_run_id),
            depth = coalesce(v.depth, r.depth),
            conversation_id = coalesce(v.conversation, r.conversation_id),
            began_at = coalesce(v.began, r.began_at),
            first_seq = coalesce(v.first, r.first_seq),
            version = coalesce(v.version, r.version)
        FROM v
        WHERE r.n = v.n AND r.claim = v.claim AND r.last_seq = v.before AND r.owner IS NOT NULL
        RETURNING r.n, r.last_seq
    ), added AS (
        INSERT INTO {s}.records (n, seq, at, kind, data)
        SELECT d.* FROM unnest(
            %(rn)s::bigint[], %(rseq)s::bigint[], %(rat)s::bigint[], %(rkind)s::text[],
            %(rdata)s::text[]
        ) AS d (n, seq, at, kind, data) JOIN moved USING (n)
    )
    SELECT n, pg_notify(%(channel)s, 'r ' || n || ' ' || last_seq) FROM moved
"""
_IS_WRITTEN = "SELECT claim, last_seq FROM {s}.runs WHERE n = %s"
_ASK = """
    INSERT INTO {s}.requests (n, request_id, root_run_id, assignee, asked_at, due_at)
    VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
"""
_DECIDE = "UPDATE {s}.requests SET decided_at = %s WHERE n = %s AND request_id = %s"
_DROP_KEPT = "DELETE FROM {s}.kept WHERE n = %s AND name = %s"
_KEEP = "INSERT INTO {s}.kept (n, name, place, data) VALUES (%s, %s, %s, %s)"
_FORGET = "UPDATE {s}.requests SET decided_at = %s WHERE n = %s AND decided_at IS NULL"


class GroupWriter:
    """Claims and writes runs in its thread, which is started when it is needed."""

    def __init__(
        self, connector: Connector, keeper: Keeper, *, patience: float, in_groups: bool
    ) -> None:
        self._connector = connector
        self._keeper = keeper
        self._patience = patience
        self._in_groups = in_groups
        self.on_wake: OnWake | None = None
        self._thread = QueueThread[Appender | None](self._work, last=None)
        self._connection: psycopg.Connection | None = None
        self._claiming: psycopg.Connection | None = None
        """A connection whose commits do not wait for the disk: a claim is on disk before anything
        that is written under it.
        """
        schema = connector.schema
        create = _CREATE.replace("{}", "")
        create_below = _PARENT + _CREATE.replace("{}", "FROM parent")
        self._create = qualified(create, schema)
        self._create_below = qualified(create_below, schema)
        self._reopen, self._fence = qualified(_REOPEN, schema), qualified(_FENCE, schema)
        self._release = qualified(RELEASE, schema)
        self._last, self._write = qualified(_LAST, schema), qualified(_WRITE, schema)
        self._is_written, self._ask = qualified(_IS_WRITTEN, schema), qualified(_ASK, schema)
        self._decide, self._forget = qualified(_DECIDE, schema), qualified(_FORGET, schema)
        self._drop_kept, self._keep = qualified(_DROP_KEPT, schema), qualified(_KEEP, schema)

    def wake(self, appender: Appender) -> None:
        """Have the thread write what an appender has."""
        self._thread.put(appender)

    def stop(self) -> None:
        """Write everything, and end the thread. The next appender starts another."""
        self._thread.stop()

    def _work(self, queue: SimpleQueue[Appender | None]) -> None:
        is_over = False
        while not is_over:
            found = distinct_items(queue, most=_MOST)
            is_over = None in found
            self._commit([appender for appender in found if appender is not None])
            del found  # a waiting thread must not keep a store alive
        for connection in (self._connection, self._claiming):
            if connection is not None:
                with suppress(psycopg.Error):
                    connection.close()
        self._connection = self._claiming = None

    def _commit(self, appenders: Sequence[Appender]) -> None:
        outcomes: list[Outcome] = []
        group: list[Appender] = []
        for appender in appenders:
            appender.take()
            if appender.must_claim:
                self._claim(appender)
            if not appender.must_write:
                outcomes.append(appender.end(None))
            elif not self._in_groups or appender.taken_wakes is not None:
                outcomes += self._written([appender])  # what it calls may fail
            else:
                group.append(appender)
        if group:
            outcomes += self._written(group)
        for appender in appenders:
            if appender.is_over:
                self._keeper.disowns(appender)
        settle(outcomes)

    # --- claiming -------------------------------------------------------------------------------

    def _claim(self, appender: Appender) -> None:
        try:
            appender.claimed(*self._retried(lambda: self._claimed(appender)))
            self._keeper.owns(appender)
        except Exception as error:
            appender.failed(_told(error, appender.run_id))
            if is_passing(error):  # it may be claimed, although that was not confirmed
                self.release_later(appender)

    def release_later(self, appender: Appender) -> None:
        """Let others write a run once the database is there again."""
        self._keeper.release_later(appender.claim)

    def _claimed(self, appender: Appender) -> tuple[int, bool]:
        if self._claiming is None:
            self._claiming = self._connector.connect()
            self._claiming.execute("SET synchronous_commit = off")
        run_id, after = to_column(appender.run_id), appender.after
        self._keeper.register(self._claiming)
        values: dict[str, Any] = {
            "run_id": run_id,
            "above": None if appender.parent is None else to_column(well_formed(appender.parent)),
            "worker": self._keeper.worker,
            "claim": appender.claim,
            "after": after,
            "now": self._keeper.now(),
        }
        statement = self._create if after is None else self._reopen
        parent = None if appender.parent is None else self._keeper.owner_of(appender.parent)
        if parent is not None:
            values |= {"parent": parent.number, "parent_claim": parent.claim}
            statement = self._create_below
        row = self._claiming.execute(statement.encode(), values).fetchone()
        if row is not None:
            if row[2] is not None:  # this worker, if the answer to an earlier attempt was lost
                self._claiming.execute(self._fence.encode(), {**values, "owner": row[2]})
            if row[3] is not None:
                try:
                    above = self._keeper.owner_of(from_column(row[3]))
                    self._check_above(self._claiming, above)
                except RunTakenOver:
                    self._claiming.execute(self._release.encode(), ([appender.claim],))
                    raise
            return int(row[0]), bool(row[1])
        self._check_above(self._claiming, parent)
        if after is None:
            raise RunExists(appender.run_id)
        last = self._claiming.execute(self._last.encode(), (run_id,)).fetchone()
        if last is None:
            raise RunNotFound(appender.run_id)
        if last[0] != after:
            raise RunBusy.changed(appender.run_id, int(last[0]), after)
        raise RunBusy(appender.run_id)

    def _check_above(self, connection: psycopg.Connection, above: Appender | None) -> None:
        """Raise `RunTakenOver` if the run above, which this process had, was taken over."""
        if above is None:
            return
        row = connection.execute(self._is_written.encode(), (above.number,)).fetchone()
        if row is None or row[0] != above.claim:
            above.lose()
            raise RunTakenOver(above.run_id)

    # --- writing --------------------------------------------------------------------------------

    def _written(self, group: Sequence[Appender]) -> Iterator[Outcome]:
        """Write what a group has, and yield how that went."""
        try:
            lost = self._retried(lambda: self._wrote(group))
        except Exception as error:
            if len(group) > 1 and not is_passing(error):  # one of them caused it
                for appender in group:
                    yield from self._written([appender])
                return
            for appender in group:
                yield appender.end(_told(error, appender.run_id))
            return
        for appender in group:
            is_lost = appender.number in lost
            yield appender.end(RunTakenOver(appender.run_id) if is_lost else None)

    def _wrote(self, group: Sequence[Appender]) -> set[int | None]:
        """Write in one transaction. Return the numbers of the runs that have another writer."""
        if self._connection is None:
            self._connection = self._connector.connect()
        connection = self._connection
        values = _columns(group)
        values["channel"] = self._keeper.channel
        statement = self._write.encode()
        special = [appender for appender in group if appender.is_special]
        if not special:
            moved = {row[0] for row in connection.execute(statement, values)}
        else:
            with connection.transaction():
                moved = {row[0] for row in connection.execute(statement, values)}
                with connection.pipeline():
                    for appender in special:
                        if appender.number in moved:
                            self._write_kept(connection, appender)
                            self._note_requests(connection, appender)
                wakes = group[0].taken_wakes
                if wakes is not None and moved and self.on_wake is not None:
                    self.on_wake(connection, wakes)
        return {a.number for a in group if a.number not in moved and not self._has(connection, a)}

    def _has(self, connection: psycopg.Connection, appender: Appender) -> bool:
        """Return whether an earlier attempt was committed, although that was not confirmed."""
        row = connection.execute(self._is_written.encode(), (appender.number,)).fetchone()
        return row is not None and row == (appender.claim, appender.taken_last)

    def _write_kept(self, connection: psycopg.Connection, appender: Appender) -> None:
        number = appender.number
        for name, pieces in appender.taken_kept:
            connection.execute(self._drop_kept.encode(), (number, name))
            rows = [(number, name, place, piece) for place, piece in enumerate(pieces)]
            connection.cursor().executemany(self._keep.encode(), rows)

    def _note_requests(self, connection: psycopg.Connection, appender: Appender) -> None:
        number = appender.number
        for record, _ in appender.taken:
            at = _fitting(record.at)
            match record.entry:
                case CallSuspended(request=asked) if asked is not None:
                    due = [at for at in (asked.expires_at, asked.until) if at is not None]
                    values = (
                        number,
                        to_column(asked.request_id),
                        to_column(asked.root_run_id),
                        None if asked.assignee is None else to_column(asked.assignee),
                        _fitting(asked.asked_at),
                        _fitting(min(due)) if due else None,
                    )
                    connection.execute(self._ask.encode(), values)
                case RequestDecided(request_id=decided):
                    connection.execute(self._decide.encode(), (at, number, to_column(decided)))
                case RunEnded() | RunFailed():
                    connection.execute(self._forget.encode(), (at, number))
                case _:
                    pass

    def _retried(self, work: Callable[[], _T]) -> _T:
        """Do it; while the database is away, again, as long as the patience lasts."""
        until, pause = time.monotonic() + self._patience, 0.02
        is_new = True
        while True:
            try:
                return work()
            except (psycopg.Error, OSError) as error:
                self._discard()
                if not is_passing(error) or time.monotonic() > until:
                    raise
                if is_new:
                    logger.warning("the database of runs cannot be written yet: %s", error)
                is_new = False
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _discard(self) -> None:
        """Close the connections: they may be broken, or lead to a server that is read-only now."""
        for connection in (self._connection, self._claiming):
            if connection is not None:
                with suppress(psycopg.Error):
                    connection.close()
        self._connection = self._claiming = None


class Appender:
    """Writes one run, through the thread of its store.

    The run appends to the pending records. The thread removes them once they are committed.
    """

    def __init__(
        self, writer: GroupWriter, run_id: str, after: int | None, *, keeps: object
    ) -> None:
        self._writer = writer
        self._keeps = keeps
        """A reference, so that the connections are closed after the last appender."""
        self.run_id = run_id
        self.after = after
        """The number of the last record that was read; None for a new run."""
        self.claim: UUID = uuid4()
        self._process = os.getpid()
        self._pending: deque[tuple[Record, bytes]] = deque()
        self._kept: deque[tuple[str, Sequence[bytes]]] = deque()
        """The large results to write with the next records."""
        self._waiters: deque[Waiter] = deque()
        self._wakes: str | None = None
        self._is_closed = False
        self._is_due = False
        """Whether a commit is scheduled."""
        self.is_over = False
        """Whether others may write the run, or do."""
        self.is_lost = False
        """Whether another process has taken the run over."""
        self._failure: Exception | None = None
        # Only the thread uses the attributes below.
        self.number: int | None = None
        """The number of the run, once it is claimed."""
        self._last = -1 if after is None else after
        self._has_requests = False
        self.taken: Sequence[tuple[Record, bytes]] = ()
        self.taken_kept: Sequence[tuple[str, Sequence[bytes]]] = ()
        self._taken_waiters: list[Waiter] = []
        self.taken_wakes: str | None = None
        self.releases = False

    # --- called by the run ----------------------------------------------------------------------

    def append(self, record: Record, data: bytes, /) -> None:
        """Buffer a record, with its JSON on one line."""
        if self._is_closed:
            raise RunStoreError(f"the log of the run {self.run_id!r} is closed", self.run_id)
        if self._failure is not None:
            raise self._failure
        if record.seq > _LARGEST:
            raise RunStoreError(f"the record number {record.seq} is too large", self.run_id)
        self._pending.append((record, data))

    def keep(self, name: str, pieces: Sequence[bytes]) -> None:
        """Keep a large result, in the transaction of the next record."""
        if self._failure is not None:
            raise self._failure
        self._kept.append((name, pieces))

    def flush(self, *, sync: bool) -> None:
        """Schedule a commit of everything. Each commit is on disk, if the server is set up so."""
        self._check_process()
        if self._failure is not None:
            raise self._failure
        if not self._pending or self._is_due:
            return
        self._is_due = True
        loop = running_loop()
        if loop is None:
            self._wake()
        else:  # a barrier that follows soon needs no commit of its own
            loop.call_later(_SOON, self._wake)

    def _wake(self) -> None:
        self._is_due = False
        if self._pending:
            self._writer.wake(self)

    def barrier(self) -> Awaitable[None]:
        """Claim the run, commit everything, and wait for that."""
        self._check_process()
        if self.is_over or self._failure is not None:
            if self._failure is not None:
                raise self._failure
            return FINISHED
        if self.number is not None and not self._pending and not self._is_closed:
            return FINISHED
        waiter = Waiter()
        self._waiters.append(waiter)
        self._writer.wake(self)
        return waiter.future

    def wakes(self, run_id: str) -> None:
        """Have the next commit call `PostgresStore.on_wake` with this run, in its transaction."""
        self._wakes = run_id

    def close(self) -> None:
        """Schedule a commit of everything, then let others write. Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._process != os.getpid():  # a forked process leaves the rest to its parent
            self.is_over = True
        else:
            self._writer.wake(self)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RunStoreError("only the process that opened a run may write it", self.run_id)

    # --- called by the thread -------------------------------------------------------------------

    def _give_up(self, error: Exception) -> None:
        """Keep only what closing may still write: nothing, if it would fail again; and no start of
        a tool, since a tool starts only after its record is written.
        """
        self._failure = error
        kept: deque[tuple[Record, bytes]] = deque()
        cause = error.__cause__
        if isinstance(cause, Exception) and is_passing(cause):
            kept.extend(takewhile(lambda each: not _starts_tool(each[0]), self._pending))
        self._pending = kept
        if not kept:
            self._kept.clear()
        self._wakes = None
        if self._is_closed:
            self.is_over = True
            self._writer.release_later(self)

    def lose(self) -> None:
        """Note that another process has taken the run over."""
        self.failed(RunTakenOver(self.run_id))

    def failed(self, error: Exception) -> None:
        """Note that the run cannot be written any more."""
        self._failure = error
        self.is_lost = isinstance(error, RunTakenOver)
        self.is_over = True

    def claimed(self, number: int, has_requests: bool) -> None:
        """Note that the run may be written."""
        self.number, self._has_requests = number, has_requests

    def take(self) -> None:
        """Select what to write, and who waits for it."""
        self._taken_waiters = []
        while self._waiters:
            self._taken_waiters.append(self._waiters.popleft())
        # Closed first: nothing is appended after that.
        self.releases = self._is_closed and not self.is_over
        self.taken = () if self.is_over else self._pending.copy()
        self.taken_kept = self._kept.copy() if self.taken else ()  # before or with its record
        self.taken_wakes = self._wakes if self.taken else None
        if any(isinstance(record.entry, CallSuspended) for record, _ in self.taken):
            self._has_requests = True

    @property
    def must_claim(self) -> bool:
        """Whether the run must be claimed first. One that is closed unused needs no claim."""
        wanted = self.taken or (self._taken_waiters and not self.releases)
        return self.number is None and not self.is_over and bool(wanted)

    @property
    def must_write(self) -> bool:
        """Whether there is something to write."""
        return (bool(self.taken) or self.releases) and self.number is not None and not self.is_over

    @property
    def is_special(self) -> bool:
        """Whether more than the log is to be written."""
        return (
            bool(self.taken_kept)
            or self.taken_wakes is not None
            or (
                self._has_requests
                and any(isinstance(record.entry, _ABOUT_REQUESTS) for record, _ in self.taken)
            )
        )

    @property
    def taken_last(self) -> int:
        """The number of the last record after the commit."""
        return self.taken[-1][0].seq if self.taken else self._last

    @property
    def parent(self) -> str | None:
        """The run above a new run."""
        entry = self.taken[0][0].entry if self.taken else None
        return entry.identity.parent_run_id if isinstance(entry, RunBegan) else None

    def row(self) -> tuple[Any, ...]:
        """Return what a commit says about the run; see ``_WRITE``."""
        last = self.taken[-1][0] if self.taken else None
        first: tuple[Any, ...] = (None,) * 6
        if self._last < 0 and self.taken:
            first = _first_values(self.taken[0][0])
        return (
            self.number,
            self.claim,
            self._last,
            self.taken_last,
            None if last is None else _fitting(last.at),
            None if last is None else outcome_of(last.entry),
            self.releases,
            *first,
        )

    def end(self, error: Exception | None) -> Outcome:
        """Report that what was taken is committed, or that it failed."""
        waiters, self._taken_waiters = self._taken_waiters, []
        taken, self.taken = self.taken, ()
        kept, self.taken_kept = self.taken_kept, ()
        if self.is_over:
            return waiters, self._failure
        if isinstance(error, RunTakenOver):
            self.failed(error)
        elif error is None:
            if self.number is not None and taken:
                self._last = taken[-1][0].seq
                self._wakes = None
                for _ in taken:
                    self._pending.popleft()
                for _ in kept:
                    self._kept.popleft()
            self.is_over = self.releases
        else:
            self._give_up(error)
        if self.is_over and self._failure is not None and not waiters and self._pending:
            logger.error("the end of the log of run %s is lost: %s", self.run_id, self._failure)
        return waiters, error


_ABOUT_REQUESTS = (CallSuspended, RequestDecided, RunEnded, RunFailed)
_OF_RUNS = (
    *("n", "claim", "before", "last", "at", "outcome", "release"),
    *("parent", "depth", "conversation", "began", "first", "version"),
)
_OF_RECORDS = ("rn", "rseq", "rat", "rkind", "rdata")


def _columns(group: Sequence[Appender]) -> dict[str, Any]:
    """Return the values of the statement that writes a group."""
    rows = [appender.row() for appender in group]
    records = [
        (a.number, record.seq, _fitting(record.at), _KINDS[type(record.entry)], data.decode())
        for a in group
        for record, data in a.taken
    ]
    columns: Iterable[Iterable[Any]] = zip(*rows, strict=True)
    values = dict(zip(_OF_RUNS, map(list, columns), strict=True))
    columns = zip(*records, strict=True) if records else [()] * len(_OF_RECORDS)
    return values | dict(zip(_OF_RECORDS, map(list, columns), strict=True))


def _first_values(first: Record) -> tuple[Any, ...]:
    """Return the columns of a run that come from its first record."""
    entry = first.entry
    identity = entry.identity if isinstance(entry, RunBegan) else RunIdentity("")
    parent, conversation = identity.parent_run_id, identity.conversation_id
    return (
        None if parent is None else to_column(well_formed(parent)),
        _fitting(identity.depth),
        None if conversation is None else to_column(well_formed(conversation)),
        _fitting(first.at),
        first.seq,
        _fitting(first.v),
    )


def _starts_tool(record: Record) -> bool:
    return isinstance(record.entry, ToolStarted)


def _fitting(number: int) -> int:
    return number if number < _LARGEST else _LARGEST


def _told(error: Exception, run_id: str) -> Exception:
    return store_error(error, run_id) if isinstance(error, (psycopg.Error, OSError)) else error
