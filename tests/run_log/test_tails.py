"""Tails: reading a run while another process writes it, dies, is resumed, or has damaged it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest

from clark_agent.errors import DecodeError, LogDamaged, RunNotFound
from clark_agent.run_log import _live
from clark_agent.run_log.jsonl import JsonlStore
from clark_agent.run_log.memory import MemoryStore
from clark_agent.run_log.records import Record, RunSuspended
from clark_agent.run_log.sqlite import SqliteStore
from clark_agent.run_log.store import RunAppender, RunStore, RunTail
from tests.run_log.storing import (
    KINDS,
    append,
    child,
    line_from,
    mail_to,
    numbered,
    open_store,
    said,
    some_records,
    writing,
)

both = pytest.mark.parametrize("kind", KINDS)


def read_until(tail: RunTail, enough: Callable[[list[Record]], bool]) -> list[Record]:
    return asyncio.run(_read_until(tail, enough))


async def _read_until(tail: RunTail, enough: Callable[[list[Record]], bool]) -> list[Record]:
    records: list[Record] = []
    async with asyncio.timeout(30):
        while not enough(records):
            new = tail.read()
            records += new
            if not new:
                await tail.wait(1)
    return records


_tails: list[RunTail] = []


def closed_later(tail: RunTail) -> RunTail:
    _tails.append(tail)
    return tail


@pytest.fixture(autouse=True)
def _close_tails() -> Generator[None]:
    yield
    while _tails:
        _tails.pop().close()


def fill(store: RunStore, records: list[Record]) -> None:
    with writing(store.create(records[0].run)) as appender:
        append(appender, records)


@pytest.mark.slow
@both
def test_a_tail_reads_what_another_process_writes(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    with child("append_forever", kind, tmp_path) as process:
        assert line_from(process)
        tail = store.tail("killed")
        records = read_until(tail, lambda found: len(found) > 200)
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = store.load("killed").records
    records += read_until(tail, lambda found: len(records) + len(found) >= len(left))
    assert tuple(records) == left
    more = numbered("killed", [said("on"), said("and on")], after=left[-1])
    with writing(store.reopen("killed", after=left[-1].seq)) as appender:
        append(appender, more)
    assert read_until(tail, lambda found: len(found) == 2) == more
    tail.close()


@both
def test_a_long_log_is_read_in_parts(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    records = some_records("r", 1_300, "long " * 400)
    fill(store, [*records[:700], *numbered("r", [said("x" * 3_000_000)], after=records[699])])
    due = list(store.load("r").records)
    tail = closed_later(store.tail("r"))
    parts: list[list[Record]] = []
    while part := list(tail.read()):
        parts.append(part)
    assert [record for part in parts for record in part] == due
    assert len(parts) > 1
    late = closed_later(store.tail("r", after=699))
    assert list(late.read()) == due[700:]
    assert list(late.read()) == []


@both
def test_damage_ends_a_tail_after_what_is_intact(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    records = some_records("r", 6)
    fill(store, records)
    tail = closed_later(store.tail("r"))
    if isinstance(store, JsonlStore):
        path = store.path_of("r")
        path.write_bytes(path.read_bytes().replace(b" 3", b" 9"))
        where = "line 4, byte"
    else:
        with store._connections.writing() as connection:
            connection.execute("UPDATE records SET data = replace(data, ' 3', ' 9')")
        where = "record 3"
    assert list(tail.read()) == records[:3]
    for _ in range(2):
        with pytest.raises(LogDamaged, match=where) as found:
            tail.read()
        assert found.value.at == 3


@both
def test_a_tail_of_a_newer_version_says_so(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    records = some_records("r", 3)
    fill(store, records)
    if isinstance(store, JsonlStore):
        path = store.path_of("r")
        path.write_bytes(path.read_bytes() + b'{"v":3,"seq":3}\n')
    else:
        with store._connections.writing() as connection:
            (last,) = connection.execute("SELECT max(id) FROM records").fetchone()
            newer = (last + 1, 1, "x", '{"v":3,"seq":3}')
            connection.execute("INSERT INTO records VALUES (?, ?, ?, ?)", newer)
    tail = closed_later(store.tail("r"))
    assert list(tail.read()) == records
    with pytest.raises(DecodeError, match="newer version"):
        tail.read()


def test_a_record_that_a_database_has_lost_is_noticed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    records = some_records("r", 4)
    fill(store, records)
    with store._connections.writing() as connection:
        connection.execute("DELETE FROM records WHERE id & 4294967295 = 3")
    tail = closed_later(store.tail("r"))
    assert list(tail.read()) == records[:3]
    with pytest.raises(LogDamaged, match="the log must end with record 3"):
        tail.read()


# --- the ends of files ------------------------------------------------------------------------


def test_a_torn_end_is_read_when_it_is_complete(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    records = some_records("r", 4)
    fill(store, records)
    path = store.path_of("r")
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    path.write_bytes(whole[:start])
    tail = closed_later(store.tail("r"))
    assert list(tail.read()) == records[:3]
    for end in range(start, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert list(tail.read()) == []
    path.write_bytes(whole)
    assert list(tail.read()) == records[3:]


def test_a_torn_end_may_be_cut_off(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    records = some_records("r", 3)
    fill(store, records)
    path = store.path_of("r")
    torn = numbered("r", [said("never")], after=records[-1])
    with writing(store.reopen("r", after=2)) as appender:
        append(appender, torn)
    path.write_bytes(path.read_bytes()[:-20])
    tail = closed_later(store.tail("r"))
    assert list(tail.read()) == records
    more = numbered("r", [said("instead")], after=records[-1])
    with writing(store.reopen("r", after=2)) as appender:
        assert list(tail.read()) == []
        append(appender, more)
    assert read_until(tail, bool) == more


def test_a_record_without_a_line_break_counts_if_it_stays_so(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    records = some_records("r", 3)
    fill(store, records)
    path = store.path_of("r")
    path.write_bytes(path.read_bytes()[:-1])
    tail = closed_later(store.tail("r"))
    assert read_until(tail, lambda found: len(found) == 3) == records
    more = numbered("r", [said("more"), said("still")], after=records[-1])
    with writing(store.reopen("r", after=2)) as appender:
        append(appender, more)
    assert read_until(tail, lambda found: len(found) == 2) == more
    assert tail.read() == []


def test_records_that_go_away_are_damage(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    fill(store, some_records("r", 3))
    tail = closed_later(store.tail("r"))
    assert len(tail.read()) == 3
    path = store.path_of("r")
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(LogDamaged, match="missing"):
        tail.read()
    path.unlink()
    with pytest.raises(RunNotFound):
        tail.read()


# --- what is published ------------------------------------------------------------------------


def live_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if "live" in path.name]


@both
def test_what_is_published_leaves_nothing(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    fill(store, some_records("r", 1))
    store.publish("r", b"0")
    assert live_files(tmp_path) == []
    one, other = store.tail("r"), store.tail("r")
    (name,) = live_files(tmp_path)
    assert next(tmp_path.rglob(name)).stat().st_mode & 0o777 == 0o600
    store.publish("r", b"1")
    assert list(one.read_live()) == [b"1"]
    one.close()
    store.publish("r", b"2")
    assert list(other.read_live()) == [b"1", b"2"]
    assert list(one.read_live()) == []
    other.close()
    assert live_files(tmp_path) == []
    assert [run.run_id for run in store.runs()] == ["r"]


@pytest.mark.slow
@both
def test_a_killed_follower_costs_one_look(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    fill(store, some_records("r", 2))
    with child("tail_forever", kind, tmp_path) as process:
        assert line_from(process) == "2"
        store.publish("r", b"1")
        assert len(live_files(tmp_path)) == 1
        process.kill()
        process.wait()
    assert len(live_files(tmp_path)) == 1
    store.publish("r", b"2")
    assert live_files(tmp_path) == []


@both
def test_the_live_file_stays_small(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    fill(store, some_records("r", 1))
    tail = closed_later(store.tail("r"))
    (name,) = live_files(tmp_path)
    path = next(tmp_path.rglob(name))
    found: list[bytes] = []
    for number in range(400):
        store.publish("r", b"%d %s" % (number, b"x" * 3_000))
        assert path.stat().st_size <= _live._LARGEST + 4_000
        if number % 10 == 9:
            found += tail.read_live()
    numbers = [int(line.split()[0]) for line in found if line[:1].isdigit()]
    assert numbers == sorted(numbers)
    assert len(numbers) > 300  # a few are lost each time the file starts over
    tail.close()


@both
def test_a_follower_waits_for_what_is_published(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    fill(store, some_records("r", 1))
    tail = closed_later(store.tail("r"))
    assert len(tail.read()) == 1

    async def follow() -> list[bytes]:
        waiting = asyncio.create_task(read_live_of(tail))
        await asyncio.sleep(0)
        store.publish("r", b"x")
        async with asyncio.timeout(30):
            return await waiting

    assert asyncio.run(follow()) == [b"x"]


async def read_live_of(tail: RunTail) -> list[bytes]:
    while not (found := tail.read_live()):
        await tail.wait(5)
    return list(found)


def test_a_folder_that_cannot_be_written_can_be_followed(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    fill(store, some_records("r", 2))
    (tmp_path / "r.live").mkdir()  # so that it cannot be made
    tail = closed_later(store.tail("r"))
    assert len(tail.read()) == 2
    store.publish("r", b"x")
    assert list(tail.read_live()) == []
    tail.close()


# --- in memory --------------------------------------------------------------------------------


def test_other_threads_wake_a_tail_in_memory() -> None:
    store = MemoryStore()
    records = some_records("r", 3)
    appender = store.create("r")
    append(appender, records[:1])
    tail = store.tail("r")
    assert list(tail.read()) == records[:1]
    asyncio.run(_woken(store, appender, tail, records[1:]))
    tail.close()
    store.publish("r", b"y")
    assert list(tail.read_live()) == []
    assert store._tails == {}


async def _woken(
    store: MemoryStore, appender: RunAppender, tail: RunTail, records: list[Record]
) -> None:
    for act, due in (
        (lambda: append(appender, records), records),
        (lambda: store.publish("r", b"x"), []),
    ):
        waiting = asyncio.ensure_future(tail.wait(600))
        await asyncio.sleep(0)
        thread = Thread(target=act)
        thread.start()
        async with asyncio.timeout(30):
            await waiting
        thread.join()
        assert list(tail.read()) == due
    assert list(tail.read_live()) == [b"x"]


# --- databases of older versions --------------------------------------------------------------

VERSION_2 = """
    CREATE TABLE runs (
        n INTEGER PRIMARY KEY, run_id TEXT NOT NULL UNIQUE, parent_run_id TEXT,
        depth INTEGER NOT NULL DEFAULT 0, conversation_id TEXT, began_at INTEGER NOT NULL,
        first_seq INTEGER NOT NULL, version INTEGER NOT NULL, indexed INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX runs_by_time ON runs (began_at);
    CREATE INDEX runs_by_parent ON runs (parent_run_id, began_at) WHERE parent_run_id IS NOT NULL;
    CREATE INDEX runs_by_conversation ON runs (conversation_id, began_at)
        WHERE conversation_id IS NOT NULL;
    CREATE TABLE ends (
        n INTEGER PRIMARY KEY, seq INTEGER NOT NULL, at INTEGER NOT NULL, outcome TEXT
    );
    CREATE TABLE records (
        id INTEGER PRIMARY KEY, at INTEGER NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL
    );
    CREATE VIEW entries AS
        SELECT run_id, id & 4294967295 AS seq, at, kind, data
        FROM records JOIN runs ON runs.n = id >> 32;
    PRAGMA application_id = 1129075275;
    PRAGMA user_version = 2;
"""


def test_a_database_of_version_2_gets_mailboxes(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    new = SqliteStore(tmp_path / "new.db")
    records = some_records("r", 3)
    fill(new, records)
    new.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA journal_mode = WAL; {VERSION_2}")
        connection.execute("ATTACH ? AS new", (str(tmp_path / "new.db"),))
        for table in ("runs", "ends", "records"):
            connection.execute(f"INSERT INTO {table} SELECT * FROM new.{table}")
        connection.commit()
    store = SqliteStore(path)
    assert list(store.load("r").records) == records
    assert store.post("r", mail_to("1"))
    assert not store.post("r", mail_to("1"))
    assert list(store.mail("r")) == [mail_to("1")]
    assert list(closed_later(store.tail("r", after=1)).read()) == records[2:]
    suspended = numbered("r", [RunSuspended(time=1)], after=records[-1])
    with writing(store.reopen("r", after=2)) as appender:
        append(appender, suspended)
    assert [run.run_id for run in store.runs(outcome="suspended")] == ["r"]
    with store._connections.writing() as connection:  # as an older version may do meanwhile
        connection.execute("PRAGMA user_version = 2")
    store.close()
    assert list(SqliteStore(path).mail("r")) == [mail_to("1")]


def test_suspended_runs_are_found_by_index(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    fill(store, some_records("r", 1))
    heard: list[str] = []
    with store._connections.reading() as connection:
        connection.set_trace_callback(heard.append)
    assert store.runs(outcome="suspended") == []
    assert list(store.mail("r")) == []
    with store._connections.reading() as connection:
        connection.set_trace_callback(None)
        plans = [
            " ".join([row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}")])
            for sql in heard
            if "SELECT" in sql
        ]
    assert len(plans) == 2
    assert "INDEX ends_suspended" in plans[0]
    assert "SCAN runs" not in plans[0]
    assert "SCAN" not in plans[1]


def test_a_tail_keeps_its_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    fill(store, some_records("r", 2))
    tail = store.tail("r")
    del store
    gc.collect()
    assert len(tail.read()) == 2
    tail.close()
    del tail
    gc.collect()
    assert os.listdir(tmp_path) == ["runs.db"]
