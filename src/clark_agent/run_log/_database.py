"""The connections to a database of runs, and its schema.

Writing uses one connection at a time, under a lock, because two would wait for each other by
sleeping. There are two writing connections: one waits for other processes and for the disk, the
other waits for nothing. Each reader has its own connection, which is reused later, and never waits
for a writer. While a process forks, there are no connections.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Lock
from weakref import WeakSet

from clark_agent._private_files import make_folder, open_file
from clark_agent.errors import RunStoreError
from clark_agent.run_log._files import LockFile

__all__ = ["Connections"]

_PATIENCE = 30.0
_APPLICATION = 0x434C524B  # "CLRK", the application id of the file
_PAGE = 4096  # a commit writes two: larger pages slow down small commits, smaller ones large

_VERSION = 4

_RUNS = """
    CREATE TABLE runs (
        n INTEGER PRIMARY KEY,
        run_id TEXT NOT NULL UNIQUE,
        parent_run_id TEXT,
        depth INTEGER NOT NULL DEFAULT 0,
        conversation_id TEXT,
        began_at INTEGER NOT NULL,
        first_seq INTEGER NOT NULL,
        version INTEGER NOT NULL,  -- of its records
        indexed INTEGER NOT NULL DEFAULT 0  -- the first number that is not in the index
    );
    CREATE INDEX runs_by_time ON runs (began_at);
    CREATE INDEX runs_by_parent ON runs (parent_run_id, began_at) WHERE parent_run_id IS NOT NULL;
    CREATE INDEX runs_by_conversation ON runs (conversation_id, began_at)
        WHERE conversation_id IS NOT NULL;
    CREATE TABLE ends (            -- the last record of each run: without it, one that
        n INTEGER PRIMARY KEY,     -- damage has made unreachable would not be missed
        seq INTEGER NOT NULL,
        at INTEGER NOT NULL,
        outcome TEXT
    );
"""
_RECORDS = """
    CREATE TABLE records (
        id INTEGER PRIMARY KEY,    -- runs.n << 32 | seq
        at INTEGER NOT NULL,
        kind TEXT NOT NULL,
        data TEXT NOT NULL
    );
"""
_VIEW = """
    CREATE VIEW entries AS
        SELECT run_id, id & 4294967295 AS seq, at, kind, data
        FROM records JOIN runs ON runs.n = id >> 32;
"""
_WAITING = """
    CREATE TABLE IF NOT EXISTS mails (  -- the mailboxes of the runs
        n INTEGER NOT NULL,             -- of the run
        place INTEGER NOT NULL,         -- in the mailbox, from 1
        id TEXT NOT NULL,
        data TEXT NOT NULL,
        PRIMARY KEY (n, place)
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX IF NOT EXISTS mails_by_id ON mails (n, id);
    CREATE INDEX IF NOT EXISTS ends_suspended ON ends (n) WHERE outcome = 'suspended';
"""
"""What version 3 has added. A process with an older version of this package may set the version
back while it has the database open: then these exist already.
"""
_KEPT = """
    CREATE TABLE IF NOT EXISTS kept (   -- results that are too large for the model
        n INTEGER NOT NULL,             -- of the run
        name TEXT NOT NULL,
        place INTEGER NOT NULL,         -- of the piece, from 0
        data BLOB NOT NULL
    );
    CREATE UNIQUE INDEX IF NOT EXISTS kept_by_place ON kept (n, name, place);
"""
"""What version 4 has added."""
_FROM_1 = f"""
    DROP VIEW entries;
    DROP INDEX runs_by_time;
    DROP INDEX runs_by_parent;
    DROP INDEX runs_by_conversation;
    DROP INDEX runs_to_index;
    ALTER TABLE runs RENAME TO old_runs;
    {_RUNS}
    INSERT INTO runs SELECT
        n, run_id, parent_run_id, depth, conversation_id, began_at, first_seq, version, indexed
        FROM old_runs;
    INSERT INTO ends SELECT n, records.id & 4294967295, records.at, outcome
        FROM old_runs JOIN records ON records.id = (
            SELECT max(id) FROM records WHERE id BETWEEN n << 32 AND n << 32 | 4294967295
        );
    DROP TABLE old_runs;
    {_VIEW}
    {_WAITING}
"""
_MIGRATIONS = {
    0: _RUNS + _RECORDS + _VIEW + _WAITING + _KEPT,
    1: _FROM_1 + _KEPT,
    2: _WAITING + _KEPT,
    3: _WAITING + _KEPT,
}
"""The script that migrates each version to the newest; 0 is an empty database."""

_making = Lock()


class Connections:
    """Opens, prepares, lends and closes the connections."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.when_forked: Callable[[], None] = lambda: None
        """Called in a forked process."""
        self._start_over()
        _every.add(self)

    def _start_over(self) -> None:
        self.lock = Lock()
        """Held while writing."""
        self._readers = Condition()
        self._reading = 0
        self._is_paused = False
        self._writer: sqlite3.Connection | None = None
        self._is_full = False
        self.hasty: sqlite3.Connection | None = None
        """The connection that waits for nothing. Use it only under the lock."""
        self._idle: list[sqlite3.Connection] = []

    @contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        """Yield a connection for this reader alone, which sees the current database."""
        with self._readers:
            self._readers.wait_for(lambda: not self._is_paused)
            self._reading += 1
        try:
            with self._idle_connection() as connection:
                connection.execute("BEGIN")
                yield connection
                connection.execute("COMMIT")
        finally:
            with self._readers:
                self._reading -= 1
                self._readers.notify_all()

    @contextmanager
    def _idle_connection(self) -> Generator[sqlite3.Connection]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._open()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    @contextmanager
    def writing(self) -> Generator[sqlite3.Connection]:
        """Yield a writing transaction, under the lock."""
        with self.lock, self.transaction() as connection:
            yield connection

    @contextmanager
    def transaction(self, *, sync: bool = False) -> Generator[sqlite3.Connection]:
        """Yield a writing transaction. The caller holds the lock. ``sync`` waits for the disk."""
        connection = self._ready(sync=sync)
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            # Some failures, such as a full disk, have already rolled it back.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def open_hasty(self) -> None:
        """Open the connection that waits for nothing, neither for other processes nor for the disk.
        It leaves checkpoints to other connections.
        """
        with self.lock:
            if self.hasty is None:
                self.hasty = self._open(patience=0)
                self.hasty.execute("PRAGMA wal_autocheckpoint=0")

    def checkpoint(self) -> None:
        """Move the immediate commits from the write-ahead log into the database.

        The next commit restarts the log and waits for the disk, so one is made here.
        """
        with self._idle_connection() as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        with self.writing() as connection:
            connection.execute(f"PRAGMA user_version={_VERSION}")

    def _ready(self, *, sync: bool) -> sqlite3.Connection:
        """Return the writing connection. Call this and use the result only under the lock."""
        if self._writer is None:
            self._writer = self._open()
            self._is_full = False
        if sync is not self._is_full:
            self._writer.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
            self._is_full = sync
        return self._writer

    def close(self) -> None:
        """Close the idle connections. They are reopened on demand."""
        with self.lock:
            self._close_idle()

    def _close_idle(self) -> None:
        every, self._idle = [*self._idle, self._writer, self.hasty], []
        self._writer = self.hasty = None
        for connection in every:
            if connection is not None:
                connection.close()

    # --- forks ----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Close all connections, and open none until `reopen` is called."""
        self.lock.acquire()
        with self._readers:
            self._is_paused = True
            self._readers.wait_for(lambda: not self._reading)
        self._close_idle()

    def reopen(self, *, in_child: bool) -> None:
        """Resume after the fork."""
        if in_child:
            self._start_over()
            self.when_forked()
            return
        with self._readers:
            self._is_paused = False
            self._readers.notify_all()
        self.lock.release()

    def _open(self, patience: float | None = None) -> sqlite3.Connection:
        self._make_file()
        patience = _PATIENCE if patience is None else patience
        connection = sqlite3.connect(
            self._path, timeout=patience, isolation_level=None, check_same_thread=False
        )
        try:
            if self._version_of(connection) < _VERSION:
                self._migrate(connection)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA fullfsync=ON")
        except BaseException as error:
            connection.close()
            if type(error) is sqlite3.DatabaseError:  # it is none, or is damaged
                raise RunStoreError(f"{self._path}: {error}") from error
            raise
        return connection

    def _make_file(self) -> None:
        """Create the database for its owner only. SQLite gives the files beside it the same mode.

        Only one thread at a time: closing the file drops all locks that the process has on it.
        """
        if self._path.exists():
            return
        with _making:
            if not self._path.exists():
                make_folder(self._path.parent)
                os.close(open_file(self._path, os.O_RDWR))

    def _version_of(self, connection: sqlite3.Connection) -> int:
        """Return the schema version; 0 without tables. All values come from one snapshot."""
        connection.execute("BEGIN")
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        application: int = connection.execute("PRAGMA application_id").fetchone()[0]
        tables: int = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        connection.execute("COMMIT")
        if application != _APPLICATION and (version or tables):
            raise RunStoreError(f"{self._path} is not a database of runs")
        if version > _VERSION:
            raise RunStoreError(
                f"{self._path} was written by a newer version of this package: its tables have"
                f" version {version}, and this one reads up to {_VERSION}"
            )
        return version

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Create or upgrade the tables.

        Only one process at a time, because SQLite does not wait when it switches the journal mode.
        """
        lock = self._wait_for_lock()
        try:
            connection.execute(f"PRAGMA page_size={_PAGE}")
            connection.execute("PRAGMA journal_mode=WAL")
            script = _MIGRATIONS.get(self._version_of(connection), "")
            connection.executescript(
                f"BEGIN IMMEDIATE; {script}"
                f" PRAGMA application_id={_APPLICATION};"
                f" PRAGMA user_version={_VERSION}; COMMIT"
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
                raise RunStoreError(f"{self._path} is being set up by another process")
            time.sleep(0.005)


_every: WeakSet[Connections] = WeakSet()
_paused: list[Connections] = []


def _before_fork() -> None:
    """Close all connections before a fork.

    A forked process inherits SQLite's knowledge of its locks, but not the locks. A connection that
    is opened there would hold none, and another process could delete the write-ahead log that it
    uses. So no connection may be open during a fork.
    """
    for connections in list(_every):
        connections.pause()
        _paused.append(connections)


def _after_fork(*, in_child: bool) -> None:
    while _paused:
        _paused.pop().reopen(in_child=in_child)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _after_fork(in_child=False),
        after_in_child=lambda: _after_fork(in_child=True),
    )
