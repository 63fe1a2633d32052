"""SqliteStore: many runs in one database, searchable by conversation, parent, time and text.

- Nothing blocks the event loop. A commit that need not wait is made at once. If another process or
  thread writes, or the commit must wait for the disk, a thread of the store commits, with one
  transaction for all runs with new records, and `barrier` waits for it. The thread waits half a
  minute for other processes; then the commit fails.
- The database is in WAL mode with ``synchronous=NORMAL``: a commit hands its pages to the operating
  system, so it survives the death of the process. A flush with ``sync`` is a commit under
  ``synchronous=FULL``, which waits for the disk and so covers all earlier commits. A power failure
  can lose commits that were not synced, but does not damage the database.
- A commit that fails leaves nothing in the database, and the appended records are kept for the next
  one. Database errors are raised as `RunStoreError`.
- Reading has its own connections, and neither waits for writing nor delays it. Any thread may use a
  store, and so may a forked process.
- The writer of a run holds a lock on a small file beside the database. The lock ends with the
  process and is not inherited. The file is removed when the run is closed.
- Each record has its checksum, and the last number of each run is stored separately, so a record
  that was changed or lost by damage to the database is detected. If SQLite itself finds damage in
  its write-ahead log, it drops that and everything after it. Like whole records cut off the end of
  a file, this cannot be detected.
- The key of a record combines the number of its run and its own in one integer. So a commit writes
  to one place of one tree, and to the row that says where the run ends.
- Texts are indexed by a search, not when they are written: indexing would cost every commit more
  than the commit itself, and twice the space, although most runs are never searched. To index
  earlier, call `SqliteStore.update_index` from a thread.
- A tail asks for the number of the last record, up to a hundred times a second while the run
  writes, and five times a second otherwise. What is published to tails is in a small file beside
  the database, which exists only while a tail of the run is open.
- A new database, and the files beside it, are accessible only to their owner (0600).

Any tool may read the tables; the view ``entries`` has the records with the ids of their runs.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections import deque
from collections.abc import Awaitable, Generator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args
from weakref import finalize

from msgspec import Struct

from clark_agent._finished import FINISHED
from clark_agent._private_files import make_folder
from clark_agent._text import well_formed
from clark_agent.errors import (
    ConfigError,
    DecodeError,
    RunBusy,
    RunExists,
    RunNotFound,
    RunStoreError,
)
from clark_agent.messages.wire import decode_json
from clark_agent.run_log import _live
from clark_agent.run_log._committing import Committer, Waiter
from clark_agent.run_log._database import Connections
from clark_agent.run_log._files import LockFile
from clark_agent.run_log._live import LiveReader
from clark_agent.run_log._mail_file import encode_mail
from clark_agent.run_log._polling import Polling
from clark_agent.run_log._reading import last_of_rows, page_of_rows
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.pages import START, LogPage, LogPlace
from clark_agent.run_log.reader import SUSPENDED, LogReader, outcome_of
from clark_agent.run_log.records import Entry, Record, RunBegan
from clark_agent.run_log.search_text import SearchHit, text_of
from clark_agent.run_log.store import LoadedRun, RunAppender, RunSummary
from clark_agent.types import RunIdentity

__all__ = ["SearchHit", "SqliteStore"]

logger = logging.getLogger(__name__)

_NUMBERS = 32
"""How many bits of a record's key hold its own number; the higher ones hold its run's."""
_LAST = (1 << _NUMBERS) - 1
_LARGEST = (1 << 63) - 1
_BATCH = 500


class _Part(Struct, frozen=True):
    """Some records of a run that are to be indexed."""

    number: int
    start: int
    end: int
    records: int
    texts: list[tuple[int, str]]


class SqliteStore:
    """Keeps all runs in one database, which is created on first use.

    `close` closes its connections; otherwise they are closed with the last reference to the store.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if str(path) == ":memory:":
            raise ConfigError("SqliteStore needs a file: a database in memory has one connection")
        # The locks are beside the file itself, by whatever name it is opened.
        self._path = Path(os.path.realpath(path))
        self._connections = Connections(self._path)
        self._committer = Committer(self._connections)
        finalize(self, _shut, self._committer, self._connections)

    def close(self) -> None:
        """Commit all appended records, and close the connections. Later calls open new ones."""
        _shut(self._committer, self._connections)

    def create(self, run_id: str) -> RunAppender:
        """Create a run. Raises `RunExists`."""
        lock = self._take_lock(run_id)
        if lock is None:
            raise RunExists(run_id)
        with _released_on_failure(lock):
            if self._end_of(run_id) is not None:
                raise RunExists(run_id)
            return _Appender(self, lock, run_id)

    def reopen(self, run_id: str, *, after: int) -> RunAppender:
        """Continue a run after its last record. Raises `RunNotFound` or `RunBusy`."""
        if self._end_of(run_id) is None:
            raise RunNotFound(run_id)
        lock = self._take_lock(run_id)
        if lock is None:
            raise RunBusy(run_id)
        with _released_on_failure(lock):
            number, last = self._end_of(run_id) or (0, None)
            if last != after:
                raise RunBusy.changed(run_id, -1 if last is None else last, after)
            return _Appender(self, lock, run_id, number)

    def load(self, run_id: str) -> LoadedRun:
        """Read a run, even while it is written. Raises `RunNotFound`."""
        with _store_errors(run_id), self._connections.reading() as connection:
            end = _find_end(connection, run_id)
            rows = [] if end is None else _read_rows(connection, end[0])
        if end is None:
            raise RunNotFound(run_id)
        reader = LogReader(run_id, "record {}")
        for key, data in rows:
            reader.take(data, key & _LAST, number=key & _LAST)
        reader.expect_end(end[1])
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
        wanted = {"conversation_id": conversation_id, "parent_run_id": parent_run_id}
        tables, first = "runs CROSS JOIN ends", "TRUE"
        if outcome == SUSPENDED:  # as a constant, so that its index is used
            tables, first = "ends CROSS JOIN runs", f"outcome = '{SUSPENDED}'"
        else:
            wanted["outcome"] = outcome
        given = {column: value for column, value in wanted.items() if value is not None}
        conditions = " AND ".join([first, *[f"{column} = ?" for column in given]])
        values = [*given.values(), -1 if limit is None else limit]
        with _store_errors(), self._connections.reading() as connection:
            rows = connection.execute(_SUMMARIES.format(tables, conditions), values).fetchall()
            return [_summary(*row) for row in rows]

    def tail(self, run_id: str, *, after: int = -1) -> SqliteTail:
        """Return a reader of the records after this number, and of those to come. Raises
        `RunNotFound`.
        """
        end = self._end_of(run_id)
        if end is None:
            raise RunNotFound(run_id)
        return SqliteTail(self, run_id, end[0], after, self._live_path(run_id))

    def tail_from(self, run_id: str, place: LogPlace) -> SqliteTail:
        """Return a reader of the records behind a place, and of those to come. Raises
        `RunNotFound`.
        """
        end = self._end_of(run_id)
        if end is None:
            raise RunNotFound(run_id)
        return SqliteTail(self, run_id, end[0], -1, self._live_path(run_id), place)

    def read_page(self, run_id: str, place: LogPlace, *, records: int, size: int) -> LogPage:
        """Return the records behind a place: at most so many, and about so many bytes. Raises
        `RunNotFound`.
        """
        with _store_errors(run_id), self._connections.reading() as connection:
            end = _find_end(connection, run_id)
            if end is None:
                raise RunNotFound(run_id)
            key = end[0] << _NUMBERS
            rows = connection.execute(_PAGE, (key | place.seq + 1, key | _LAST, records))
            return page_of_rows(
                run_id, place, ((row[0] & _LAST, row[1]) for row in rows), end[1], records, size
            )

    def read_end(self, run_id: str, *, records: int, size: int) -> list[Record]:
        """Return the last records: at most so many, and about so many bytes."""
        with _store_errors(run_id), self._connections.reading() as connection:
            end = _find_end(connection, run_id)
            if end is None:
                raise RunNotFound(run_id)
            key = end[0] << _NUMBERS
            rows = connection.execute(_FROM_END, (key, key | _LAST, records))
            return last_of_rows((data for (data,) in rows), size)

    def post(self, run_id: str, mail: Mail) -> bool:
        """Put a message into the mailbox of a run. Return False if it has one with the same id.

        Waits for other writers, up to half a minute for each. Raises `RunNotFound`.
        """
        data = encode_mail(mail).decode()
        with _store_errors(run_id), self._connections.writing() as connection:
            end = _find_end(connection, run_id)
            if end is not None:
                values = {"n": end[0], "id": well_formed(mail.id), "data": data}
                return connection.execute(_POST, values).rowcount > 0
        raise RunNotFound(run_id)

    def mail(self, run_id: str, *, after: int = 0) -> Sequence[Mail]:
        """Return the messages in the mailbox of a run, without the first ``after`` of them."""
        with _store_errors(run_id), self._connections.reading() as connection:
            rows = connection.execute(_MAILS, (run_id, after)).fetchall()
        try:
            return [decode_json(data, Mail) for (data,) in rows]
        except DecodeError as error:
            reason = f"the mailbox of the run {run_id!r} is damaged: {error}"
            raise RunStoreError(reason, run_id) from error

    def kept(self, run_id: str, name: str, start: int, stop: int) -> Sequence[bytes]:
        """Return pieces of a large result; nothing if the run has none of that name."""
        with _store_errors(run_id), self._connections.reading() as connection:
            rows = connection.execute(_KEPT, (run_id, name, start, stop)).fetchall()
        return [data for (data,) in rows]

    def publish(self, run_id: str, data: bytes) -> None:
        """Show something to the tails of the run that exist now."""
        _live.publish(self._live_path(run_id), data)

    def search(self, text: str, limit: int = 20) -> tuple[SearchHit, ...]:
        """Return the records whose visible text has all these words, best match first.

        Case and accents are ignored. Records that are not indexed yet are indexed first.
        """
        words = text.replace("\0", " ").replace('"', " ").split()
        if not words:
            return ()
        self.update_index()
        query = " ".join([f'"{word}"' for word in words])
        with _store_errors(), self._connections.reading() as connection:
            rows = connection.execute(_SEARCH, (query, limit)).fetchall()
        return tuple([SearchHit(run_id, key & _LAST, snippet) for run_id, key, snippet in rows])

    def update_index(self) -> None:
        """Index the records written since the last time, in small transactions."""
        with _store_errors():
            with self._connections.reading() as connection:
                has_index = connection.execute(_HAS_INDEX).fetchone()
            if not has_index:
                with self._connections.writing() as connection:
                    connection.execute(_MAKE_INDEX)
            parts: list[_Part] = []
            for part in self._parts_to_index():
                parts.append(part)
                if sum([part.records for part in parts]) >= _BATCH:
                    self._index(parts)
                    parts = []
            self._index(parts)

    def _parts_to_index(self) -> Generator[_Part]:
        with self._connections.reading() as connection:
            waiting: list[tuple[int, int]] = connection.execute(_TO_INDEX).fetchall()
        for number, start in waiting:
            while True:
                with self._connections.reading() as connection:
                    rows = _read_rows(connection, number, start=start, limit=_BATCH)
                if not rows:
                    break
                texts = [(key, text) for key, data in rows if (text := _text_in(data))]
                end = (rows[-1][0] & _LAST) + 1
                yield _Part(number, start, end, len(rows), texts)
                start = end

    def _index(self, parts: list[_Part]) -> None:
        with self._connections.writing() as connection:
            for part in parts:
                moved = connection.execute(_INDEXED, (part.end, part.number, part.start))
                if moved.rowcount:  # otherwise another thread or process has indexed it
                    connection.executemany(_ADD_TEXT, part.texts)

    def _end_of(self, run_id: str) -> tuple[int, int | None] | None:
        with _store_errors(run_id), self._connections.reading() as connection:
            return _find_end(connection, run_id)

    def _live_path(self, run_id: str) -> Path:
        return Path(f"{self._path}-live-{_digest(run_id)}")

    def _take_lock(self, run_id: str) -> LockFile | None:
        path = f"{self._path}-lock-{_digest(run_id)}"
        try:
            return LockFile.take(path)
        except FileNotFoundError:
            make_folder(self._path.parent)
            return LockFile.take(path)


def _digest(run_id: str) -> str:
    return sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


_SUMMARIES = """
    SELECT run_id, parent_run_id, depth, conversation_id, began_at, at, first_seq, seq, outcome
    FROM {} USING (n) WHERE {}
    ORDER BY began_at DESC, run_id DESC LIMIT ?
"""
_POST = """
    INSERT INTO mails (n, place, id, data)
    SELECT :n, 1 + (SELECT count(*) FROM mails WHERE n = :n), :id, :data
    WHERE NOT EXISTS (SELECT 1 FROM mails WHERE n = :n AND id = :id)
"""
_MAILS = """
    SELECT CAST(data AS BLOB) FROM runs JOIN mails USING (n) WHERE run_id = ? AND place > ?
    ORDER BY place
"""
_KEPT = """
    SELECT CAST(data AS BLOB) FROM runs JOIN kept USING (n)
    WHERE run_id = ? AND name = ? AND place >= ? AND place < ? ORDER BY place
"""
_DROP_KEPT = "DELETE FROM kept WHERE n = ? AND name = ?"
_KEEP = "INSERT INTO kept (n, name, place, data) VALUES (?, ?, ?, ?)"
_PAGE = (
    "SELECT id, CAST(coalesce(data, '') AS BLOB) FROM records"
    " WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?"
)
_FROM_END = (
    "SELECT CAST(coalesce(data, '') AS BLOB) FROM records"
    " WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT ?"
)
_LAST_NUMBER = "SELECT seq FROM ends WHERE n = ?"
_END = "SELECT runs.n, seq FROM runs LEFT JOIN ends USING (n) WHERE run_id = ?"
_HAS_INDEX = "SELECT 1 FROM sqlite_master WHERE name = 'texts'"
_MAKE_INDEX = """
    CREATE VIRTUAL TABLE IF NOT EXISTS texts
    USING fts5(text, tokenize = 'unicode61 remove_diacritics 2')
"""
_TO_INDEX = "SELECT n, indexed FROM runs JOIN ends USING (n) WHERE indexed <= seq"
_INDEXED = "UPDATE runs SET indexed = ? WHERE n = ? AND indexed = ?"
_ADD_TEXT = "INSERT INTO texts (rowid, text) VALUES (?, ?)"
_SEARCH = f"""
    SELECT run_id, texts.rowid, snippet(texts, 0, '', '', '…', 16)
    FROM texts JOIN runs ON n = texts.rowid >> {_NUMBERS}
    WHERE texts MATCH ? ORDER BY rank LIMIT ?
"""
_KINDS: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in get_args(Entry)}
_BEGIN = """
    INSERT INTO runs (run_id, parent_run_id, depth, conversation_id, began_at, first_seq, version)
    VALUES (?, ?, ?, ?, ?, ?, ?)
"""
_INSERT = "INSERT INTO records (id, at, kind, data) VALUES (?, ?, ?, ?)"
_FIRST_END = "INSERT INTO ends (seq, at, outcome, n) VALUES (?, ?, ?, ?)"
_SET_END = "UPDATE ends SET seq = ?, at = ?, outcome = ? WHERE n = ?"
_TOUCH_END = "UPDATE ends SET n = n WHERE n = ?"


def _summary(
    run_id: str,
    parent_run_id: str | None,
    depth: int,
    conversation_id: str | None,
    began_at: int,
    last_at: int,
    first_seq: int,
    last_seq: int,
    outcome: str | None,
) -> RunSummary:
    return RunSummary(
        run_id=run_id,
        parent_run_id=parent_run_id,
        depth=depth,
        conversation_id=conversation_id,
        began_at=began_at,
        last_at=last_at,
        records=last_seq - first_seq + 1,
        outcome=outcome,
    )


def _shut(committer: Committer, connections: Connections) -> None:
    committer.stop()
    connections.close()


@contextmanager
def _released_on_failure(lock: LockFile) -> Generator[None]:
    try:
        yield
    except BaseException:
        lock.release()
        raise


@contextmanager
def _store_errors(run_id: str | None = None) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RunStoreError(str(error), run_id) from error
    except (TypeError, OverflowError, UnicodeError) as error:  # the store never writes such values
        raise RunStoreError(f"the database is damaged: {error}", run_id) from error


def _find_end(connection: sqlite3.Connection, run_id: str) -> tuple[int, int | None] | None:
    """Return the number of a run, and that of its last record; None if there is no such run."""
    row: tuple[int, int | None] | None = connection.execute(_END, (run_id,)).fetchone()
    return row


def _read_rows(
    connection: sqlite3.Connection, number: int, *, start: int = 0, limit: int = -1
) -> list[tuple[int, bytes]]:
    """Return the keys and the JSON of a run's records."""
    key = number << _NUMBERS
    return connection.execute(_PAGE, (key | start, key | _LAST, limit)).fetchall()


def _text_in(data: bytes) -> str:
    try:
        return text_of(decode_json(data, Record).entry)
    except DecodeError:
        return ""


class SqliteTail:
    """Reads the records of a run as they are committed."""

    def __init__(
        self,
        store: SqliteStore,
        run_id: str,
        number: int,
        after: int,
        live: Path,
        place: LogPlace = START,
    ) -> None:
        self._store = store
        """A reference, so that the connections are closed after the last tail."""
        self._connections = store._connections
        self._run_id = run_id
        self._number = number
        self._after = after
        self._reader = LogReader(run_id, "record {}", after=place)
        self._next = place.seq + 1
        """The number of the next record to read."""
        self._seen: int | None = -1
        """The number of the last record when they were read last; None: there is more to read."""
        self._live = LiveReader(live)
        self._polling = Polling(self._has_news)

    def read(self) -> Sequence[Record]:
        """Return the records since the last call, or the first of them. Raises `LogDamaged`."""
        while True:
            self._read_rows()
            records = self._reader.drain()
            if self._after >= 0:
                records = [record for record in records if record.seq > self._after]
            if records or self._seen is not None:
                return records

    def _read_rows(self) -> None:
        """Pass the next rows to the reader."""
        if self._reader.is_damaged():
            return
        with _store_errors(self._run_id), self._connections.reading() as connection:
            last = self._last_number(connection)
            if last is not None and last < self._next:
                self._seen = last
                return
            rows = _read_rows(connection, self._number, start=self._next, limit=_BATCH)
        for key, data in rows:
            self._next = (key & _LAST) + 1
            self._reader.take(data, key & _LAST, number=key & _LAST)
            if self._reader.is_damaged():
                return
        self._seen = None
        if len(rows) < _BATCH:
            self._seen = last
            self._reader.expect_end(last)

    def _last_number(self, connection: sqlite3.Connection) -> int | None:
        row: tuple[int] | None = connection.execute(_LAST_NUMBER, (self._number,)).fetchone()
        return None if row is None else row[0]

    def _has_news(self) -> bool:
        if self._live.has_more:
            return True
        with _store_errors(self._run_id), self._connections.reading() as connection:
            return self._last_number(connection) != self._seen

    def read_live(self) -> Sequence[bytes]:
        """Return what was published since the last call, or a part of it."""
        return self._live.read()

    def wait(self, seconds: float) -> Awaitable[None]:
        """Wait until there may be something new, at most this long."""
        return self._polling.wait(seconds)

    def close(self) -> None:
        """Release the file of what is published."""
        self._live.close()


class _Appender:
    """Writes one run, through the committer of its store.

    The run appends to the pending records. The committer removes them once they are in the
    database.
    """

    __slots__ = (
        "_committer",
        "_failure",
        "_is_closed",
        "_is_released",
        "_is_unsynced",
        "_kept",
        "_lock",
        "_number",
        "_pending",
        "_process",
        "_run_id",
        "_store",
        "_sync_asked",
        "_synced",
        "_taken",
        "_taken_kept",
        "_taken_number",
        "_taken_sync",
        "_taken_waiters",
        "_waiters",
    )

    def __init__(
        self, store: SqliteStore, lock: LockFile, run_id: str, number: int | None = None
    ) -> None:
        self._store = store
        """A reference, so that the connections are closed after the last appender."""
        self._committer = store._committer
        self._committer.count(1)
        self._lock = lock
        self._run_id = run_id
        self._process = os.getpid()
        self._pending: deque[tuple[Record, bytes]] = deque()
        self._kept: deque[tuple[str, Sequence[bytes]]] = deque()
        """The large results to write with the next records."""
        self._waiters: deque[Waiter] = deque()
        self._is_closed = False
        self._is_released = False
        """Whether others may write the run."""
        self._failure: Exception | None = None
        """Why not everything could be written before it was closed."""
        self._sync_asked = 0
        # Only the committer uses the attributes below.
        self._number = number
        """The number of the run, from its first commit on."""
        self._synced = 0
        self._is_unsynced = True
        self._taken: Sequence[tuple[Record, bytes]] = ()
        self._taken_kept: Sequence[tuple[str, Sequence[bytes]]] = ()
        self._taken_number = number
        self._taken_sync = 0
        self._taken_waiters: list[Waiter] = []

    def append(self, record: Record, data: bytes, /) -> None:
        """Buffer a record, with its JSON on one line."""
        if self._is_closed:
            raise RunStoreError(f"the log of the run {self._run_id!r} is closed", self._run_id)
        if record.seq > _LAST:
            raise RunStoreError(f"the record number {record.seq} is too large", self._run_id)
        self._pending.append((record, data))

    def keep(self, name: str, pieces: Sequence[bytes]) -> None:
        """Keep a large result, in the transaction of the next record."""
        self._kept.append((name, pieces))

    def flush(self, *, sync: bool) -> None:
        """Schedule a commit of everything."""
        if sync and (self._pending or self._is_unsynced):
            self._sync_asked += 1
        if self.has_something:
            self._check_process()
            self._committer.commit_soon(self)

    def barrier(self) -> Awaitable[None]:
        """Commit everything, and wait for that."""
        if self._is_released:
            if self._failure is not None:
                raise self._failure
            return FINISHED
        if not self.has_something:
            return FINISHED
        self._check_process()
        if self._committer.commit(self):
            return FINISHED
        waiter = Waiter()
        self._waiters.append(waiter)
        return waiter.future

    def close(self) -> None:
        """Schedule a commit of everything, then let others write. Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._process != os.getpid():  # a forked process leaves the rest to its parent
            self._is_released = True
        elif self.has_something:
            self._committer.wake(self)  # the event loop may end before its next iteration
        else:
            self._release()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RunStoreError("only the process that opened a run may write it", self._run_id)

    def _release(self) -> None:
        self._is_released = True
        if self._lock.release():
            self._committer.count(-1)

    # --- called by the committer ----------------------------------------------------------------

    @property
    def has_something(self) -> bool:
        """Whether there are records to write, or a task waits for confirmation."""
        return bool(self._pending or self._waiters) or self._sync_asked != self._synced

    @property
    def wants_sync(self) -> bool:
        """Whether the commit must wait for the disk."""
        return self._sync_asked != self._synced

    def take(self) -> bool:
        """Select the records to write, and the waiters for them."""
        self._taken_waiters = _all_of(self._waiters) if self._waiters else []
        self._taken_sync = self._sync_asked
        self._taken = () if self._is_released else self._pending.copy()
        self._taken_kept = self._kept.copy() if self._taken else ()  # before or with its record
        return bool(self._taken) or (self.wants_sync and self._number is not None)

    def put_back(self) -> None:
        """Undo `take`: the selected records are not written."""
        self._waiters.extendleft(reversed(self._taken_waiters))
        self._taken_waiters, self._taken, self._taken_kept = [], (), ()

    def write(self, connection: sqlite3.Connection) -> None:
        """Write the selected records, and where the run ends now."""
        number = self._number
        if number is None:
            values = _first_values(self._run_id, self._taken[0][0])
            number = connection.execute(_BEGIN, values).lastrowid or 0
        self._taken_number = number
        if not self._taken:  # a sync needs some write to commit
            connection.execute(_TOUCH_END, (number,))
            return
        for name, pieces in self._taken_kept:
            connection.execute(_DROP_KEPT, (number, name))
            rows_of_it = [(number, name, place, piece) for place, piece in enumerate(pieces)]
            connection.executemany(_KEEP, rows_of_it)
        key = number << _NUMBERS
        rows = [
            (
                key | record.seq,
                record.at if record.at < _LARGEST else _LARGEST,
                _KINDS[type(record.entry)],
                data.decode(),
            )
            for record, data in self._taken
        ]
        connection.executemany(_INSERT, rows)
        last = self._taken[-1][0]
        statement = _FIRST_END if self._number is None else _SET_END
        connection.execute(statement, (last.seq, _fitting(last.at), outcome_of(last.entry), number))

    def end(self, error: Exception | None) -> tuple[Sequence[Waiter], Exception | None]:
        """Report that the selected records are committed, or that it failed."""
        waiters, self._taken_waiters = self._taken_waiters, []
        taken, self._taken = self._taken, ()
        kept, self._taken_kept = self._taken_kept, ()
        if self._is_released:
            return waiters, self._failure
        if error is None:
            self._number = self._taken_number
            is_synced = self._taken_sync != self._synced
            self._is_unsynced = not is_synced and (bool(taken) or self._is_unsynced)
            self._synced = self._taken_sync
            for _ in taken:
                self._pending.popleft()
            for _ in kept:
                self._kept.popleft()
        elif isinstance(error, sqlite3.Error):
            cause, error = error, RunStoreError(str(error), self._run_id)
            error.__cause__ = cause
        if self._is_closed and (error is not None or not self.has_something):
            self._failure = error
            self._release()
            if error is not None and not waiters:
                logger.error("the end of the log of run %s is lost: %s", self._run_id, error)
        return waiters, error


def _all_of(waiters: deque[Waiter]) -> list[Waiter]:
    found: list[Waiter] = []
    while waiters:
        found.append(waiters.popleft())
    return found


def _fitting(number: int) -> int:
    """Return the number, or the largest one that a column can hold."""
    return number if number < _LARGEST else _LARGEST


def _first_values(run_id: str, first: Record) -> tuple[Any, ...]:
    """Return the values of the run's row that come from its first record."""
    entry = first.entry
    identity = entry.identity if isinstance(entry, RunBegan) else RunIdentity("")
    return (
        run_id,
        identity.parent_run_id,
        _fitting(identity.depth),
        identity.conversation_id,
        _fitting(first.at),
        first.seq,
        _fitting(first.v),
    )
