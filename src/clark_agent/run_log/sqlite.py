"""SqliteStore: many runs in one database, found by conversation, parent, time, and what was said.

- A flush is a commit. The database is in WAL mode with ``synchronous=NORMAL``: a commit hands its
  pages to the operating system, so it survives the death of the process; a flush with ``sync`` is a
  commit under ``synchronous=FULL``, for which the disk is waited for, and with it for everything
  that was committed before. A power failure can take commits that were not synced, never the
  database.
- When a commit fails nothing of it is in the database, and what was appended is kept for the next
  flush. Failures of the database are raised as `RunStoreError`.
- All runs of a store are written through one connection, one transaction at a time; other stores
  and processes wait their turn, at most half a minute. Reading has connections of its own, and
  neither waits for writing nor holds it up. Any thread may use a store, and a forked process too.
- Whoever writes a run holds a lock on a small file beside the database, which goes away with the
  process, and the file when the run is closed.
- A record's key is the number of its run and its own, in one integer: a flush then writes to one
  place of one tree, which is most of what it costs. The row of the run is written with its first
  records, when it ends, and when it is closed; until then its last record is looked up.
- Texts are indexed when somebody searches, not when they are written: that would cost every flush
  more than the flush itself, and twice the space, for what most runs are never asked. To have it
  done before, call `SqliteStore.update_index`, from a thread.

The tables may be read with any tool; the view ``entries`` has the records with their runs' ids.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias, get_args
from weakref import finalize

from msgspec import Struct

from clark_agent._private_files import make_folder
from clark_agent.errors import ConfigError, DecodeError
from clark_agent.run_log._database import Connections, Statement
from clark_agent.run_log._files import LockFile
from clark_agent.run_log._reading import outcome_of, read_records
from clark_agent.run_log.records import Entry, Record, RunBegan
from clark_agent.run_log.store import (
    LoadedRun,
    RunAppender,
    RunBusy,
    RunExists,
    RunNotFound,
    RunStoreError,
    RunSummary,
)
from clark_agent.run_log.texts import text_of
from clark_agent.types import RunIdentity
from clark_agent.wire import decode_json

__all__ = ["SearchHit", "SqliteStore"]

_NUMBERS = 32
"""How many bits of a record's key are its own number; those above are its run's."""
_LAST = (1 << _NUMBERS) - 1
_LARGEST = (1 << 63) - 1
_BATCH = 500


_Newest: TypeAlias = tuple[int, int] | None
"""The number and the time of a run's last record."""


class SearchHit(Struct, frozen=True):
    """A record in which the words were found, and some of the text around them."""

    run_id: str
    seq: int
    snippet: str


class _Part(Struct, frozen=True):
    """Some records of a run that are to be indexed."""

    number: int
    start: int
    end: int
    records: int
    texts: list[tuple[int, str]]


class SqliteStore:
    """Keeps all runs in one database, which is made when it is first used.

    Its connections are closed by `close`, or when the store is no longer referred to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if str(path) == ":memory:":
            raise ConfigError("a database in memory has one connection; a store needs a file")
        self._path = Path(path).absolute()
        self._connections = Connections(self._path)
        finalize(self, self._connections.close)

    def close(self) -> None:
        """Close the connections. Whatever comes after this opens new ones."""
        self._connections.close()

    def create(self, run_id: str) -> RunAppender:
        """Begin a run. Raises `RunExists`."""
        lock = self._take_lock(run_id)
        if lock is None:
            raise _exists(run_id)
        try:
            if self._number_of(run_id) is not None:
                raise _exists(run_id)
            return _Appender(self, lock, run_id)
        except BaseException:
            lock.release()
            raise

    def reopen(self, run_id: str) -> RunAppender:
        """Go on with a run. Raises `RunNotFound` or `RunBusy`."""
        if self._number_of(run_id) is None:
            raise RunNotFound(f"there is no run {run_id!r}", run_id)
        lock = self._take_lock(run_id)
        if lock is None:
            raise RunBusy(f"somebody is writing to the run {run_id!r}", run_id)
        try:
            appender = _Appender(self, lock, run_id)
            with _failures_told(run_id), self._connections.writing() as connection:
                connection.execute("UPDATE runs SET is_open = 1 WHERE run_id = ?", (run_id,))
                appender.go_on(connection)
            return appender
        except BaseException:
            lock.release()
            raise

    def load(self, run_id: str) -> LoadedRun:
        """Read a run, also one that is being written. Raises `RunNotFound`."""
        number = self._number_of(run_id)
        if number is None:
            raise RunNotFound(f"there is no run {run_id!r}", run_id)
        with _failures_told(run_id), self._connections.reading() as connection:
            rows = _read_rows(connection, number)
        numbered = [(key & _LAST, data) for key, data in rows]
        records, problems = read_records(run_id, numbered, noun="record")
        return LoadedRun(run_id, records, problems)

    def runs(
        self,
        *,
        conversation_id: str | None = None,
        parent_run_id: str | None = None,
        limit: int | None = None,
    ) -> list[RunSummary]:
        """The runs, newest first; those of one conversation, or the children of one run."""
        wanted = {"conversation_id": conversation_id, "parent_run_id": parent_run_id}
        given = {column: value for column, value in wanted.items() if value is not None}
        conditions = " AND ".join([f"{column} = ?" for column in given]) or "TRUE"
        values = [*given.values(), -1 if limit is None else limit]
        with _failures_told(), self._connections.reading() as connection:
            rows = connection.execute(_SUMMARIES.format(conditions), values).fetchall()
        return [_summary(*row) for row in rows]

    def search(self, text: str, limit: int = 20) -> tuple[SearchHit, ...]:
        """The records whose visible text has all these words, the best first.

        Case and accents make no difference. What is not in the index yet is added first.
        """
        words = text.replace("\0", " ").replace('"', " ").split()
        if not words:
            return ()
        self.update_index()
        query = " ".join([f'"{word}"' for word in words])
        with _failures_told(), self._connections.reading() as connection:
            rows = connection.execute(_SEARCH, (query, limit)).fetchall()
        return tuple([SearchHit(run_id, key & _LAST, snippet) for run_id, key, snippet in rows])

    def update_index(self) -> None:
        """Add to the index what was written since the last time, a little at a time."""
        with _failures_told():
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
                if moved.rowcount:  # otherwise somebody else has done it
                    connection.executemany(_ADD_TEXT, part.texts)

    def _number_of(self, run_id: str) -> int | None:
        with _failures_told(run_id), self._connections.reading() as connection:
            row = connection.execute("SELECT n FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        return None if row is None else row[0]

    def _take_lock(self, run_id: str) -> LockFile | None:
        digest = sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()
        path = f"{self._path}-lock-{digest[:32]}"
        try:
            return LockFile.take(path)
        except FileNotFoundError:
            make_folder(self._path.parent)
            return LockFile.take(path)


_SUMMARIES = f"""
    SELECT run_id, parent_run_id, depth, conversation_id, began_at,
        CASE WHEN is_open THEN (
            SELECT at FROM records
            WHERE id BETWEEN n << {_NUMBERS} AND n << {_NUMBERS} | {_LAST}
            ORDER BY id DESC LIMIT 1
        ) ELSE last_at END,
        first_seq,
        CASE WHEN is_open THEN (
            SELECT max(id) & {_LAST} FROM records
            WHERE id BETWEEN n << {_NUMBERS} AND n << {_NUMBERS} | {_LAST}
        ) ELSE last_seq END,
        outcome
    FROM runs WHERE {{}}
    ORDER BY began_at DESC, run_id DESC LIMIT ?
"""
_HAS_INDEX = "SELECT 1 FROM sqlite_master WHERE name = 'texts'"
_MAKE_INDEX = """
    CREATE VIRTUAL TABLE IF NOT EXISTS texts
    USING fts5(text, tokenize = 'unicode61 remove_diacritics 2')
"""
_TO_INDEX = "SELECT n, indexed FROM runs WHERE is_open OR indexed <= last_seq"
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
_CLOSE = "UPDATE runs SET is_open = 0, last_seq = ?, last_at = ? WHERE n = ?"
_MOST_ROWS = 8
_INSERTS = tuple(
    "INSERT INTO records (id, at, kind, data) VALUES " + ", ".join(["(?, ?, ?, ?)"] * count)
    for count in range(_MOST_ROWS + 1)
)


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


def _exists(run_id: str) -> RunExists:
    return RunExists(f"there is a run {run_id!r} already", run_id)


@contextmanager
def _failures_told(run_id: str | None = None) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RunStoreError(str(error), run_id) from error


def _read_rows(
    connection: sqlite3.Connection, number: int, *, start: int = 0, limit: int = -1
) -> list[tuple[int, bytes]]:
    """The keys of a run's records, and their JSON."""
    key = number << _NUMBERS
    return connection.execute(
        "SELECT id, CAST(data AS BLOB) FROM records WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?",
        (key | start, key | _LAST, limit),
    ).fetchall()


def _text_in(data: bytes) -> str:
    try:
        return text_of(decode_json(data, Record).entry)
    except DecodeError:
        return ""


class _Appender:
    """Writes one run, through the connection that all runs of the store are written through."""

    __slots__ = (
        "_connections",
        "_is_closed",
        "_is_unsure",
        "_is_unsynced",
        "_last",
        "_lock",
        "_number",
        "_outcome",
        "_pending",
        "_process",
        "_run_id",
        "_store",
    )

    def __init__(self, store: SqliteStore, lock: LockFile, run_id: str) -> None:
        self._store = store
        """Kept, so that the connections are closed after the last appender."""
        self._connections = store._connections
        self._lock = lock
        self._run_id = run_id
        self._number: int | None = None
        """Of the run, from its first commit on."""
        self._process = os.getpid()
        self._pending: list[tuple[Record, bytes]] = []
        self._last: _Newest = None
        """The number and the time of the last record that was committed."""
        self._outcome: str | None = None
        """As the run's row has it."""
        self._is_closed = False
        self._is_unsure = False
        """Whether what is pending may have been committed."""
        self._is_unsynced = True

    def go_on(self, connection: sqlite3.Connection) -> None:
        """Learn how the run stands."""
        run = connection.execute(
            "SELECT n, outcome FROM runs WHERE run_id = ?", (self._run_id,)
        ).fetchone()
        if run is not None:
            self._number, self._outcome = run
            key = run[0] << _NUMBERS
            last = connection.execute(
                "SELECT id, at FROM records WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1",
                (key, key | _LAST),
            ).fetchone()
            self._last = last[0] & _LAST, last[1]

    def append(self, record: Record, data: bytes, /) -> None:
        """Take a record, and its JSON on one line."""
        if self._is_closed:
            raise RunStoreError(f"the log of the run {self._run_id!r} is closed", self._run_id)
        if record.seq > _LAST:
            raise RunStoreError(f"{record.seq} is too large for a record's number", self._run_id)
        self._pending.append((record, data))

    def flush(self, *, sync: bool) -> None:
        """Hand everything on."""
        if self._pending or (sync and self._is_unsynced):
            self._commit(sync=sync)

    def close(self) -> None:
        """Flush, and let others write. Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._process != os.getpid():  # what is left to do is its parent's
            return
        try:
            self._commit(sync=False)
        finally:
            self._lock.release()

    def _commit(self, *, sync: bool) -> None:
        """Have the database take what is pending, and what that means for the run's row."""
        if self._process != os.getpid():
            raise RunStoreError("a run is written by the process that opened it", self._run_id)
        try:
            if self._is_unsure:
                self._forget_committed()
            if self._pending:
                record = self._pending[-1][0]
                self._write((record.seq, _fitting(record.at)), outcome_of(record.entry), sync=sync)
            elif self._number is not None:
                self._write(self._last, self._outcome, sync=sync)
        except sqlite3.Error as error:
            raise RunStoreError(str(error), self._run_id) from error

    def _write(self, newest: _Newest, outcome: str | None, *, sync: bool) -> None:
        self._is_unsure = True
        number = self._number
        if number is None:
            number = self._begin(newest, outcome, sync=sync)
        else:
            self._connections.commit(self._changes(number, newest, outcome), sync=sync)
        # Nothing can interrupt between these.
        self._pending, self._number, self._last, self._outcome = [], number, newest, outcome
        self._is_unsure, self._is_unsynced = False, not sync

    def _begin(self, newest: _Newest, outcome: str | None, *, sync: bool) -> int:
        """Add the run, with its first records; its number."""
        values = _first_values(self._run_id, self._pending[0][0])
        with self._connections.writing(sync=sync) as connection:
            number = connection.execute(_BEGIN, values).lastrowid or 0
            for sql, parameters in self._changes(number, newest, outcome):
                connection.execute(sql, parameters)
        return number

    def _changes(self, number: int, newest: _Newest, outcome: str | None) -> list[Statement]:
        changes = _insertions(number, self._pending)
        if outcome != self._outcome:
            changes.append(("UPDATE runs SET outcome = ? WHERE n = ?", (outcome, number)))
        if self._is_closed and newest is not None:
            changes.append((_CLOSE, (*newest, number)))
        # If there is nothing else, a commit of something, for the disk to be waited for.
        return changes or [("UPDATE runs SET is_open = 1 WHERE n = ?", (number,))]

    def _forget_committed(self) -> None:
        """After an interruption: ask the database what it has of what is pending."""
        with self._connections.reading() as connection:
            self.go_on(connection)
        if self._last is not None:
            last = self._last[0]
            self._pending = [pair for pair in self._pending if pair[0].seq > last]
        self._is_unsure = False


def _insertions(number: int, pairs: list[tuple[Record, bytes]]) -> list[Statement]:
    key = number << _NUMBERS
    statements: list[Statement] = []
    for start in range(0, len(pairs), _MOST_ROWS):
        values: list[int | str] = []
        rows = pairs[start : start + _MOST_ROWS]
        for record, data in rows:
            kind = _KINDS[type(record.entry)]
            values += (key | record.seq, _fitting(record.at), kind, data.decode())
        statements.append((_INSERTS[len(rows)], values))
    return statements


def _fitting(number: int) -> int:
    """The number, or the largest that a column can hold."""
    return number if number < _LARGEST else _LARGEST


def _first_values(run_id: str, first: Record) -> tuple[Any, ...]:
    """What the run's row says from its first record on."""
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
