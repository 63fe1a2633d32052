"""The connections to one database of runs, and what is in it.

Writing goes through one connection, under a lock: two would wait for each other by sleeping. Each
reader has a connection to itself while it reads; they are kept for the next one. A process that was
forked opens its own, since neither locks nor connections may be carried over.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

from clark_agent._ids import random_id
from clark_agent.run_log._files import LockFile
from clark_agent.run_log.store import RunStoreError

__all__ = ["Connections", "Statement"]

Statement: TypeAlias = tuple[str, Sequence[Any]]
"""SQL and its parameters."""

_PATIENCE = 30.0
_APPLICATION = 0x434C524B  # "CLRK": what the file says it is
_PAGE = 8192  # of the sizes from 1 to 16 KiB, the one that makes small commits cheapest

_MIGRATIONS = (
    """
    CREATE TABLE runs (
        n INTEGER PRIMARY KEY,
        run_id TEXT NOT NULL UNIQUE,
        parent_run_id TEXT,
        depth INTEGER NOT NULL DEFAULT 0,
        conversation_id TEXT,
        began_at INTEGER NOT NULL,
        last_at INTEGER,           -- this and last_seq: as they were when it was closed
        first_seq INTEGER NOT NULL,
        last_seq INTEGER,
        outcome TEXT,
        version INTEGER NOT NULL,  -- of its records
        is_open INTEGER NOT NULL DEFAULT 1,
        indexed INTEGER NOT NULL DEFAULT 0  -- the first number that is not in the index
    );
    CREATE INDEX runs_by_time ON runs (began_at);
    CREATE INDEX runs_by_parent ON runs (parent_run_id, began_at) WHERE parent_run_id IS NOT NULL;
    CREATE INDEX runs_by_conversation ON runs (conversation_id, began_at)
        WHERE conversation_id IS NOT NULL;
    CREATE INDEX runs_to_index ON runs (n) WHERE is_open OR indexed <= last_seq;
    CREATE TABLE records (
        id INTEGER PRIMARY KEY,    -- runs.n << 32 | seq
        at INTEGER NOT NULL,
        kind TEXT NOT NULL,
        data TEXT NOT NULL
    );
    CREATE VIEW entries AS
        SELECT run_id, id & 4294967295 AS seq, at, kind, data
        FROM records JOIN runs ON runs.n = id >> 32;
    """,
)
"""Each brings a database from the version of its place to the next."""

_left_behind: list[sqlite3.Connection] = []
"""Of a parent process: to close them here would be to meddle with its files."""


def _make_private(path: Path) -> None:
    """Make the file, if there is none, for its owner alone.

    It gets its name when it is closed already: whoever closes a file gives up all locks that its
    process has on it, those of SQLite too.
    """
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{random_id()}.tmp")
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        with suppress(OSError):  # somebody else was faster, or there are no links here
            os.link(draft, path)
    finally:
        draft.unlink()


class Connections:
    """Opens, prepares, hands out and closes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_over()

    def _start_over(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._writer: sqlite3.Connection | None = None
        self._is_full = False
        self._idle: list[sqlite3.Connection] = []

    def _check_process(self) -> None:
        if self._process != os.getpid():
            _left_behind.extend(self._take_all())
            self._start_over()

    def _take_all(self) -> list[sqlite3.Connection]:
        every, self._idle = self._idle, []
        if self._writer is not None:
            every.append(self._writer)
            self._writer = None
        return every

    @contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        """A connection that nobody else uses meanwhile."""
        self._check_process()
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._open()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)

    @contextmanager
    def writing(self, *, sync: bool = False) -> Generator[sqlite3.Connection]:
        """A transaction that writes; everybody else waits until it is committed.

        The commit waits for the disk if asked.
        """
        self._check_process()
        with self._lock, _transaction(self._ready(sync=sync)) as connection:
            yield connection

    def commit(self, statements: Sequence[Statement], *, sync: bool) -> None:
        """Do all of this or nothing: one statement is a transaction, and the quickest."""
        if len(statements) == 1:
            self._check_process()
            with self._lock:
                self._ready(sync=sync).execute(*statements[0])
        else:
            with self.writing(sync=sync) as connection:
                for sql, parameters in statements:
                    connection.execute(sql, parameters)

    def _ready(self, *, sync: bool) -> sqlite3.Connection:
        """The connection that writes. To be called, and the result used, under the lock."""
        if self._writer is None:
            self._writer = self._open()
            self._is_full = False
        if sync is not self._is_full:
            self._writer.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
            self._is_full = sync
        return self._writer

    def close(self) -> None:
        """Close those that are not in use. They are opened again when they are needed."""
        self._check_process()
        with self._lock:
            for connection in self._take_all():
                connection.close()

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _make_private(self._path)
        connection = sqlite3.connect(
            self._path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
        )
        try:
            if self._version_of(connection) < len(_MIGRATIONS):
                self._migrate(connection)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA fullfsync=ON")
        except BaseException:
            connection.close()
            raise
        return connection

    def _version_of(self, connection: sqlite3.Connection) -> int:
        """The version of the tables; 0 if there are none. Both are read at the same moment."""
        connection.execute("BEGIN")
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        application: int = connection.execute("PRAGMA application_id").fetchone()[0]
        tables: int = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        connection.execute("COMMIT")
        if application != _APPLICATION and (version or tables):
            raise RunStoreError(f"{self._path} is a database of something else")
        if version > len(_MIGRATIONS):
            raise RunStoreError(
                f"{self._path} was written by a newer version of this package: its tables have the"
                f" version {version}, this one knows them up to {len(_MIGRATIONS)}"
            )
        return version

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Make the tables, or bring them up to date.

        One process at a time: the database itself does not wait when its mode is switched.
        """
        lock = self._wait_for_lock()
        try:
            connection.execute(f"PRAGMA page_size={_PAGE}")
            connection.execute("PRAGMA journal_mode=WAL")
            script = "".join(_MIGRATIONS[self._version_of(connection) :])
            connection.executescript(
                f"BEGIN IMMEDIATE; {script}"
                f" PRAGMA application_id={_APPLICATION};"
                f" PRAGMA user_version={len(_MIGRATIONS)}; COMMIT"
            )
        finally:
            lock.release()

    def _wait_for_lock(self) -> LockFile:
        until = time.monotonic() + _PATIENCE
        while True:
            lock = LockFile.take(f"{self._path}-lock")
            if lock is not None:
                return lock
            if time.monotonic() > until:
                raise RunStoreError(f"{self._path} is being set up by somebody else")
            time.sleep(0.005)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        # Some failures, such as a full disk, have rolled it back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
