"""PostgresStore: runs that any of several machines may take up. It needs the extra ``postgres``.

- **One writer.** A process has a lease, which a thread renews. It owns the runs that it writes for
  as long as the lease lasts; after that, another process may take them over. Each takeover changes
  the claim of the run, and a commit with an older claim is refused, so a process that was frozen
  and wakes up writes nothing: its run is let go (`clark_agent.errors.RunLetGo`).
- **Group commit.** Nothing blocks the event loop. A thread commits what all runs of the process
  have appended with one statement, while `barrier` waits. The larger the load, the larger the
  groups.
- **The database may go away.** Commits are repeated for ``patience`` seconds, and a commit that was
  made but not confirmed is recognised. Every commit waits for the disk of the server, as it is set
  up (``synchronous_commit``).
- **News.** ``NOTIFY`` wakes those who follow a run, and those whose mailbox has a message. So the
  connections must be direct, or through a pooler in session mode.
- **Search** indexes texts when one searches, not when they are written; see `update_index`.

Reading waits for the network, and is done in threads by `clark_agent.run_log.advance`, ``resume``,
``decide`` and ``follow``. Call the methods of a store from an ``async`` function through
`asyncio.to_thread`.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize

from clark_agent._extras import load_extra
from clark_agent._text import well_formed
from clark_agent.clock import Clock, now_ms
from clark_agent.errors import ConfigError, DecodeError, RunNotFound, RunStoreError
from clark_agent.messages.wire import decode_json
from clark_agent.run_log._mail_file import encode_mail
from clark_agent.run_log._reading import last_of_rows, page_of_rows
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.pages import LogPage, LogPlace
from clark_agent.run_log.reader import LogReader
from clark_agent.run_log.records import Record
from clark_agent.run_log.search_text import SearchHit, text_of
from clark_agent.run_log.store import LoadedRun, RunAppender, RunSummary, RunTail

if TYPE_CHECKING:
    import psycopg

    from clark_agent.run_log._postgres.parts import Parts

__all__ = ["PostgresStore"]

_BATCH = 500


class PostgresStore:
    """Keeps runs in PostgreSQL, in tables of their own schema, which are created on first use.

    Args:
        url: A connection string, such as ``postgresql://user:password@host/database``.
        lease: For how many seconds a process owns its runs without renewing. A run whose process
            has died is taken over after that.
        schema: The schema of the tables.
        group_commit: Whether the runs of a process share commits.
        patience: For how many seconds commits are repeated while the database is away.
        connections: How many connections may read at once. A process that writes has three more:
            two for the log and one for the lease; and one for ``RunLog(live=True)``.
        clock: The time by which leases are judged. Without it, that is the database's.
    """

    is_remote = True
    """Reading may wait for a network, and is done in threads."""

    def __init__(
        self,
        url: str,
        *,
        lease: float = 15.0,
        schema: str = "clark_agent",
        group_commit: bool = True,
        patience: float = 30.0,
        connections: int = 8,
        clock: Clock | None = None,
    ) -> None:
        load_extra("psycopg", "postgres", "PostgresStore")
        from clark_agent.run_log._postgres.connecting import Connector, shown_url
        from clark_agent.run_log._postgres.parts import Parts
        from clark_agent.run_log._postgres.schema import qualified

        for name, value, least in (("lease", lease, 0.1), ("patience", patience, 0.0)):
            given: Any = value
            if isinstance(given, bool) or not isinstance(given, (int, float)) or not given >= least:
                raise ConfigError(
                    f"PostgresStore: {name} must be at least {least} seconds, not {value!r}"
                )
        readers: Any = connections
        if isinstance(readers, bool) or not isinstance(readers, int) or readers < 1:
            raise ConfigError(f"PostgresStore: connections must be at least 1, not {connections!r}")
        if not isinstance(url, str):
            raise ConfigError(f"PostgresStore: url must be a text, not {type(url).__name__}")
        if not schema or len(schema) > 50:
            raise ConfigError(f"PostgresStore: schema must have 1 to 50 characters, not {schema!r}")
        self._url = url
        self._lease = lease
        self._schema = schema
        self._shown = shown_url(url)
        self._on_wake: Callable[[psycopg.Connection, str], None] | None = None
        connector = Connector(url, schema)

        def make() -> Parts:
            return Parts(connector, lease, clock, patience, connections, in_groups=group_commit)

        self._make = make
        self._parts_of: tuple[int, Parts] | None = None
        self._qualified: Callable[[str], bytes] = lambda text: qualified(text, schema).encode()

    def __repr__(self) -> str:
        return f"PostgresStore({self._shown!r}, schema={self._schema!r})"

    @property
    def url(self) -> str:
        """The connection string, with its password. `repr` shows it without."""
        return self._url

    @property
    def schema(self) -> str:
        """The schema of the tables."""
        return self._schema

    @property
    def lease(self) -> float:
        """For how many seconds a process owns its runs without renewing."""
        return self._lease

    @property
    def on_wake(self) -> Callable[[psycopg.Connection, str], None] | None:
        """Called with the id of an outermost run that may go on, because a request was decided, or
        an event or a cancel has arrived. It is called inside the transaction that records this:
        what it does with the connection happens together with it, or not at all.
        """
        return self._on_wake

    @on_wake.setter
    def on_wake(self, call: Callable[[psycopg.Connection, str], None] | None) -> None:
        self._on_wake = call
        if self._parts_of is not None:
            self._parts_of[1].writer.on_wake = call

    @property
    def _parts(self) -> Parts:
        """The connections and threads of this process: a forked one makes its own."""
        if self._parts_of is None or self._parts_of[0] != os.getpid():
            parts = self._make()
            parts.writer.on_wake = self._on_wake
            self._parts_of = os.getpid(), parts
            finalize(self, parts.close)
        return self._parts_of[1]

    def close(self) -> None:
        """Commit all appended records, give the lease up, and close the connections. Later calls
        open new ones.
        """
        if self._parts_of is not None and self._parts_of[0] == os.getpid():
            self._parts_of[1].close()
        self._parts_of = None

    @contextmanager
    def connection(self) -> Generator[psycopg.Connection]:
        """Yield a connection in autocommit mode. Raises `RunStoreError` if there is none."""
        with self._parts.reading() as connection:
            yield connection

    def schema_script(self) -> str:
        """Return the statements that create the tables, for a DBA who creates them beforehand."""
        from clark_agent.run_log._postgres.schema import script

        return script(self._schema)

    # --- writing --------------------------------------------------------------------------------

    def create(self, run_id: str) -> RunAppender:
        """Create a run. Its first barrier raises `RunExists`."""
        return self._parts.appender(run_id, None, keeps=self)

    def reopen(self, run_id: str, *, after: int) -> RunAppender:
        """Continue a run after its last record. Its first barrier raises `RunNotFound` or
        `RunBusy`.
        """
        return self._parts.appender(run_id, after, keeps=self)

    # --- reading --------------------------------------------------------------------------------

    def _rows(self, statement: str, values: Any = ()) -> list[tuple[Any, ...]]:
        text = self._qualified(statement)
        return self._parts.read(lambda connection: connection.execute(text, values).fetchall())

    def load(self, run_id: str) -> LoadedRun:
        """Read a run, even while it is written. Raises `RunNotFound`."""
        rows = self._rows(_LOAD, (_column(run_id),))
        if not rows:
            raise RunNotFound(run_id)
        reader = LogReader(run_id, "record {}")
        for seq, data, _ in rows:
            if seq is not None:
                reader.take(data.encode(), seq, number=seq)
        reader.expect_end(rows[0][2])
        return reader.loaded()

    def runs(
        self,
        *,
        conversation_id: str | None = None,
        parent_run_id: str | None = None,
        outcome: str | None = None,
        limit: int | None = None,
    ) -> list[RunSummary]:
        """Return the runs, newest first; those of one conversation, the children of one run, or
        those with one outcome.
        """
        wanted = {
            "conversation_id": None if conversation_id is None else _column(conversation_id),
            "parent_run_id": None if parent_run_id is None else _column(parent_run_id),
            "outcome": outcome,
        }
        given = {column: value for column, value in wanted.items() if value is not None}
        conditions = "".join([f" AND {column} = %s" for column in given])
        rows = self._rows(_SUMMARIES + conditions + _NEWEST, [*given.values(), limit])
        return [_summary(row) for row in rows]

    def tail(self, run_id: str, *, after: int = -1) -> RunTail:
        """Return a reader of the records after this number, and of those to come. Raises
        `RunNotFound`.
        """
        rows = self._rows(_NUMBER, (_column(run_id),))
        if not rows:
            raise RunNotFound(run_id)
        return self._parts.tail(run_id, rows[0][0], after, keeps=self)

    def tail_from(self, run_id: str, place: LogPlace) -> RunTail:
        """Return a reader of the records behind a place, and of those to come. Raises
        `RunNotFound`.
        """
        rows = self._rows(_NUMBER, (_column(run_id),))
        if not rows:
            raise RunNotFound(run_id)
        return self._parts.tail(run_id, rows[0][0], -1, keeps=self, place=place)

    def read_page(self, run_id: str, place: LogPlace, *, records: int, size: int) -> LogPage:
        """Return the records behind a place: at most so many, and about so many bytes. Raises
        `RunNotFound`.
        """
        values = {
            "run_id": _column(run_id),
            "seq": place.seq,
            "records": records,
            "size": size,
        }
        rows = self._rows(_READ_PAGE, values)
        if not rows:
            raise RunNotFound(run_id)
        found = [(seq, data.encode()) for _, seq, data in rows if seq is not None]
        return page_of_rows(run_id, place, found, rows[0][0], records, size)

    def read_end(self, run_id: str, *, records: int, size: int) -> list[Record]:
        """Return the last records: at most so many, and about so many bytes."""
        rows = self._rows(_READ_END, {"run_id": _column(run_id), "records": records, "size": size})
        if not rows:
            raise RunNotFound(run_id)
        return last_of_rows([data.encode() for (data,) in rows if data is not None], size)

    def abandoned(self, limit: int | None = None) -> list[str]:
        """Return the outermost runs that have begun and not ended, wait for nothing, and belong to
        no process: take them up with `clark_agent.run_log.advance`. The oldest come first.
        """
        values = {"now": self._parts.keeper.now(), "limit": limit}
        return [_text(run_id) for (run_id,) in self._rows(self._parts.abandoned, values)]

    def due(self, at: int | None = None, limit: int | None = None) -> list[str]:
        """Return the suspended outermost runs with a request whose time has come: it expires, or
        waits for that time. ``at`` is the time, in milliseconds since 1970; without it, now.
        """
        when = now_ms() if at is None else at
        return [_text(run_id) for (run_id,) in self._rows(_DUE, (when, limit))]

    def runs_waiting(self, assignee: str | None = None) -> Iterator[str]:
        """Yield the outermost runs that have open requests, the newest request first; those of one
        assignee.
        """
        seen: set[str] = set()
        before: tuple[int, int, str] = (1 << 62, 0, "")
        condition = "" if assignee is None else " AND assignee = %(assignee)s"
        while True:
            values: dict[str, Any] = {"at": before[0], "n": before[1], "id": before[2]}
            values |= {"assignee": None if assignee is None else _column(assignee)}
            rows = self._rows(_WAITING.replace("{condition}", condition), values)
            for at, number, request_id, root in rows:
                before = at, number, request_id
                if root not in seen:
                    seen.add(root)
                    yield _text(root)
            if len(rows) < _BATCH:
                return

    # --- mailboxes and news -----------------------------------------------------------------------

    def post(self, run_id: str, mail: Mail) -> bool:
        """Put a message into the mailbox of a run. Return False if it has one with the same id.
        Raises `RunNotFound`.
        """
        values = {
            "run_id": _column(run_id),
            "id": _column(well_formed(mail.id)),
            "data": encode_mail(mail).decode(),
        }
        parts, tries = self._parts, 0

        def put(connection: psycopg.Connection) -> bool:
            nonlocal tries
            tries += 1
            with connection.transaction():
                found = connection.execute(self._qualified(_LOCK), values).fetchone()
                if found is None:
                    raise RunNotFound(run_id)
                values["n"] = found[0]
                if not connection.execute(self._qualified(_POST), values).rowcount:
                    # An earlier try may have been committed, although that was not confirmed.
                    same = connection.execute(self._qualified(_IS_POSTED), values).fetchone()
                    return tries > 1 and same is not None
                note = (parts.keeper.channel, f"m {found[0]}")
                connection.execute("SELECT pg_notify(%s, %s)", note)
                if mail.kind in ("event", "cancel") and self._on_wake is not None:
                    root = connection.execute(self._qualified(_ROOT), (found[0],)).fetchone()
                    self._on_wake(connection, run_id if root is None else _text(root[0]))
            return True

        return parts.read(put)

    def mail(self, run_id: str, *, after: int = 0) -> Sequence[Mail]:
        """Return the messages in the mailbox of a run, without the first ``after`` of them."""
        rows = self._rows(_MAILS, (_column(run_id), after))
        try:
            return [decode_json(data, Mail) for (data,) in rows]
        except DecodeError as error:
            reason = f"the mailbox of the run {run_id!r} is damaged: {error}"
            raise RunStoreError(reason, run_id) from error

    def kept(self, run_id: str, name: str, start: int, stop: int) -> Sequence[bytes]:
        """Return pieces of a large result; nothing if the run has none of that name."""
        rows = self._rows(_KEPT, (_column(run_id), _column(name), start, stop))
        return [bytes(data) for (data,) in rows]

    def has_mail(self, run_id: str) -> bool:
        """Return whether a message may have arrived since the last call, for a run that this
        process writes. Does not wait.
        """
        return self._parts.has_mail(run_id)

    def publish(self, run_id: str, data: bytes) -> None:
        """Show something to the tails of the run that exist now."""
        self._parts.publish(run_id, data)

    # --- search -----------------------------------------------------------------------------------

    def search(self, text: str, limit: int = 20) -> tuple[SearchHit, ...]:
        """Return the records whose visible text has all these words, best match first.

        Case and accents are ignored. Records that are not indexed yet are indexed first.
        """
        words = _plain(well_formed(text)).replace("\0", " ").split()
        if not words:
            return ()
        self.update_index()
        rows = self._rows(_SEARCH, {"words": " ".join(words), "limit": limit})
        return tuple(
            [SearchHit(_text(run_id), seq, _snippet(body, words)) for run_id, seq, body in rows]
        )

    def update_index(self) -> None:
        """Index the records written since the last time, in small transactions."""
        for number, start in self._rows(_TO_INDEX):
            while True:
                rows = self._rows(_RECORDS, (number, start, _BATCH))
                if not rows:
                    break
                texts = [(number, seq, text) for seq, data in rows if (text := _text_in(data))]
                end = rows[-1][0] + 1
                self._parts.read(partial(self._index, number, start, end, texts))
                start = end

    def _index(
        self,
        number: int,
        start: int,
        end: int,
        texts: list[tuple[int, int, str]],
        connection: psycopg.Connection,
    ) -> None:
        with connection.transaction():
            moved = connection.execute(self._qualified(_INDEXED), (end, number, start))
            if moved.rowcount and texts:  # otherwise another process has indexed it
                rows = [(n, seq, text, _plain(text)) for n, seq, text in texts]
                connection.cursor().executemany(self._qualified(_ADD_TEXT), rows)

    # --- retention --------------------------------------------------------------------------------

    def prune(
        self, older_than: timedelta, *, outcomes: Sequence[str] | None = None, limit: int = 1000
    ) -> int:
        """Delete runs that have ended longer ago than this, with everything below them, and return
        how many; those with one of these outcomes. Runs that are suspended or under way stay,
        unless ``outcomes`` has ``suspended``.

        Deletes at most ``limit`` outermost runs: call it until it returns 0.
        """
        given: Any = older_than
        if not isinstance(given, timedelta):
            raise TypeError(f"older_than must be a timedelta, not {older_than!r}")
        if isinstance(outcomes, str):
            raise TypeError("outcomes must be a list of outcomes, not a text")
        if older_than < timedelta(0):
            raise ValueError(f"older_than must not be negative: {older_than!r}")
        before = now_ms() - round(older_than.total_seconds() * 1000)
        wanted = None if outcomes is None else list(outcomes)
        parts = self._parts
        values = {"before": before, "outcomes": wanted, "limit": limit, "now": parts.keeper.now()}

        def delete(connection: psycopg.Connection) -> int:
            with connection.transaction():
                statement = self._qualified(_PRUNABLE.replace("{alive}", parts.alive))
                rows = connection.execute(statement, values).fetchall()
                numbers = [row[0] for row in rows]
                for table in ("records", "requests", "mails", "texts", "kept", "runs"):
                    statement = self._qualified(f"DELETE FROM {{s}}.{table} WHERE n = ANY(%s)")
                    connection.execute(statement, (numbers,))
            return len(numbers)

        return parts.read(delete)


def _column(text: str) -> str:
    from clark_agent.run_log._postgres.connecting import to_column

    return to_column(well_formed(text))


def _text(column: str) -> str:
    from clark_agent.run_log._postgres.connecting import from_column

    return from_column(column)


def _plain(text: str) -> str:
    """Return a text without case and accents."""
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join([c for c in decomposed if not unicodedata.combining(c)]).casefold()


def _text_in(data: str) -> str:
    try:
        return text_of(decode_json(data.encode(), Record).entry).replace("\0", " ")
    except DecodeError:
        return ""


_AROUND = 60


def _snippet(body: str, words: Sequence[str]) -> str:
    """Return some of the text around the first of the words."""
    lowered = _plain(body)
    found = [place for word in words if (place := lowered.find(word)) >= 0]
    place = min(found, default=0)
    start, end = max(0, place - _AROUND), place + 2 * _AROUND
    before, after = "…" if start else "", "…" if end < len(body) else ""
    return f"{before}{body[start:end].strip()}{after}"


def _summary(row: tuple[Any, ...]) -> RunSummary:
    run_id, parent, depth, conversation, began, last_at, first, last, outcome = row
    return RunSummary(
        run_id=_text(run_id),
        parent_run_id=None if parent is None else _text(parent),
        depth=depth,
        conversation_id=None if conversation is None else _text(conversation),
        began_at=began,
        last_at=last_at,
        records=last - first + 1,
        outcome=outcome,
    )


_LOAD = """
    SELECT seq, data, last_seq FROM {s}.runs LEFT JOIN {s}.records USING (n)
    WHERE run_id = %s AND last_seq >= 0 ORDER BY seq
"""
_READ_PAGE = """
    SELECT last_seq, seq, data FROM {s}.runs LEFT JOIN LATERAL (
        SELECT seq, data, sum(octet_length(data)) OVER (ORDER BY seq) - octet_length(data) AS before
        FROM (
            SELECT seq, data FROM {s}.records WHERE records.n = runs.n AND seq > %(seq)s
            ORDER BY seq LIMIT %(records)s
        ) next
    ) r ON before < %(size)s WHERE run_id = %(run_id)s AND last_seq >= 0 ORDER BY seq
"""
_READ_END = """
    SELECT data FROM {s}.runs LEFT JOIN LATERAL (
        SELECT seq, data,
            sum(octet_length(data)) OVER (ORDER BY seq DESC) - octet_length(data) AS behind
        FROM (
            SELECT seq, data FROM {s}.records WHERE records.n = runs.n
            ORDER BY seq DESC LIMIT %(records)s
        ) last
    ) r ON behind < %(size)s WHERE run_id = %(run_id)s AND last_seq >= 0 ORDER BY seq DESC
"""
_SUMMARIES = """
    SELECT run_id, parent_run_id, depth, conversation_id, began_at, last_at, first_seq, last_seq,
        outcome
    FROM {s}.runs WHERE last_seq >= 0
"""
_NEWEST = " ORDER BY began_at DESC, run_id DESC LIMIT %s"
_NUMBER = "SELECT n FROM {s}.runs WHERE run_id = %s AND last_seq >= 0"
_DUE = """
    SELECT root_run_id FROM (
        SELECT root_run_id, min(due_at) AS due FROM {s}.requests
        WHERE decided_at IS NULL AND due_at <= %s GROUP BY root_run_id
    ) q JOIN {s}.runs ON runs.run_id = q.root_run_id AND outcome = 'suspended'
    ORDER BY due LIMIT %s
"""
_WAITING = f"""
    SELECT asked_at, n, request_id, root_run_id FROM {{s}}.requests
    WHERE decided_at IS NULL AND (asked_at, n, request_id) < (%(at)s, %(n)s, %(id)s) {{condition}}
    ORDER BY asked_at DESC, n DESC, request_id DESC LIMIT {_BATCH}
"""
_LOCK = "SELECT n FROM {s}.runs WHERE run_id = %(run_id)s AND last_seq >= 0 FOR NO KEY UPDATE"
_POST = """
    INSERT INTO {s}.mails (n, place, id, data)
    SELECT %(n)s, 1 + (SELECT count(*) FROM {s}.mails WHERE n = %(n)s), %(id)s, %(data)s
    ON CONFLICT DO NOTHING
"""
_IS_POSTED = "SELECT 1 FROM {s}.mails WHERE n = %(n)s AND id = %(id)s AND data = %(data)s"
_ROOT = """
    WITH RECURSIVE above AS (
        SELECT run_id, parent_run_id FROM {s}.runs WHERE n = %s
        UNION
        SELECT runs.run_id, runs.parent_run_id
        FROM above JOIN {s}.runs ON runs.run_id = above.parent_run_id
    )
    SELECT run_id FROM above WHERE NOT EXISTS (
        SELECT FROM {s}.runs WHERE runs.run_id = above.parent_run_id
    )
"""
_MAILS = """
    SELECT data FROM {s}.runs JOIN {s}.mails USING (n) WHERE run_id = %s AND place > %s
    ORDER BY place
"""
_KEPT = """
    SELECT data FROM {s}.runs JOIN {s}.kept USING (n)
    WHERE run_id = %s AND name = %s AND place >= %s AND place < %s ORDER BY place
"""
_TO_INDEX = "SELECT n, indexed FROM {s}.runs WHERE indexed <= last_seq ORDER BY n"
_RECORDS = "SELECT seq, data FROM {s}.records WHERE n = %s AND seq >= %s ORDER BY seq LIMIT %s"
_INDEXED = "UPDATE {s}.runs SET indexed = %s WHERE n = %s AND indexed = %s"
_ADD_TEXT = """
    INSERT INTO {s}.texts (n, seq, body, words) VALUES (%s, %s, %s, to_tsvector('simple', %s))
    ON CONFLICT DO NOTHING
"""
_SEARCH = """
    SELECT run_id, seq, body FROM {s}.texts JOIN {s}.runs USING (n),
        plainto_tsquery('simple', %(words)s) AS query
    WHERE words @@ query ORDER BY ts_rank(words, query) DESC, n DESC, seq LIMIT %(limit)s
"""
_PRUNABLE = """
    WITH RECURSIVE ended AS (
        SELECT n, run_id FROM {s}.runs r
        WHERE depth = 0 AND last_at < %(before)s AND last_seq >= 0 AND NOT {alive}
            AND CASE WHEN %(outcomes)s::text[] IS NULL
                THEN outcome IS NOT NULL AND outcome <> 'suspended'
                ELSE outcome = ANY(%(outcomes)s::text[]) END
        ORDER BY last_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
    ), tree AS (
        SELECT n, run_id FROM ended
        UNION
        SELECT runs.n, runs.run_id FROM tree JOIN {s}.runs ON runs.parent_run_id = tree.run_id
    )
    SELECT n FROM tree
"""
