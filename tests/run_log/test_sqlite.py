"""SqliteStore: commits that survive, files of other versions, many processes, and searching."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import threading
import time
from contextlib import ExitStack, closing
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clark_agent import (
    AssistantMessage,
    RunIdentity,
    StopReason,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResult,
    UserMessage,
)
from clark_agent.errors import ConfigError, RunExists, RunStoreError
from clark_agent.messages.wire import encode_json
from clark_agent.run_log import _files
from clark_agent.run_log.records import (
    Answered,
    Entry,
    MessagesAdded,
    Record,
    RunBegan,
    RunEnded,
    RunFailed,
    SteeringAccepted,
    ToolEnded,
)
from clark_agent.run_log.sqlite import SearchHit, SqliteStore
from clark_agent.run_log.store import LoadedRun
from tests.run_log.storing import (
    append,
    began,
    child,
    close,
    line_from,
    numbered,
    said,
    some_records,
    tell,
    writing,
)
from tests.strategies import TEXT


def write(store: SqliteStore, records: list[Record]) -> None:
    with writing(store.create(records[0].run)) as appender:
        append(appender, records)


# --- commits ----------------------------------------------------------------------------------


def test_a_torn_log_of_the_database_costs_the_commits_that_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    records = some_records("r", 25, "x" * 900)
    with writing(store.create("r")) as appender:
        append(appender, records[:1])
        sizes = {1: wal_of(path).stat().st_size}
        for start in range(1, len(records), 3):
            append(appender, records[start : start + 3])
            sizes[start + 3] = wal_of(path).stat().st_size
        files = path.read_bytes(), wal_of(path).read_bytes()
    offsets = {size + step for size in sizes.values() for step in (-1, 0, 1, 24, 4096)}
    offsets |= set(range(sizes[1], sizes[25], 7_777))
    for number, offset in enumerate(sorted(offsets)):
        copy = tmp_path / f"{number}.db"
        copy.write_bytes(files[0])
        wal_of(copy).write_bytes(files[1][:offset])
        expect_goes_on(copy, records, max([0, *[n for n, size in sizes.items() if size <= offset]]))
    spoiled = bytearray(files[1])
    spoiled[sizes[13] + 100] ^= 1
    copy = tmp_path / "spoiled.db"
    copy.write_bytes(files[0])
    wal_of(copy).write_bytes(spoiled)
    expect_goes_on(copy, records, 13)


def wal_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def expect_goes_on(path: Path, records: list[Record], count: int) -> None:
    """That so many records are there, and a writer goes on behind them."""
    with closing(SqliteStore(path)) as store:
        if not count:
            assert list(store.runs()) == []
            write(store, records)
            return
        assert store.load("r") == LoadedRun("r", tuple(records[:count]))
        assert [run.records for run in store.runs()] == [count]
        with writing(store.reopen("r", after=count - 1)) as appender:
            append(appender, records[count:])
        assert store.load("r") == LoadedRun("r", tuple(records))


def test_a_full_database_keeps_what_it_has(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    records = some_records("r", 400, "x" * 900)
    appender: Any = store.create("r")
    append(appender, records[:1])
    limit_pages(store, 20)
    flushed = 1
    with pytest.raises(RunStoreError, match="full") as failure:  # noqa: PT012
        for start in range(1, len(records), 3):
            append(appender, records[start : start + 3])
            flushed = start + 3
    assert failure.value.run_id == "r"
    assert isinstance(failure.value.__cause__, sqlite3.OperationalError)
    assert flushed > 1
    assert store.load("r") == LoadedRun("r", tuple(records[:flushed]))
    with pytest.raises(RunStoreError, match="full"):
        append(appender, [], sync=True)
    limit_pages(store, 1 << 20)
    append(appender, records[flushed + 3 :])
    appender.close()
    assert store.load("r") == LoadedRun("r", tuple(records))


def limit_pages(store: SqliteStore, pages: int) -> None:
    connections = store._connections
    connections.open_hasty()
    assert connections.hasty is not None
    with connections.writing() as connection:
        for each in (connection, connections.hasty):
            each.execute(f"PRAGMA max_page_count = {pages}")


def test_a_close_that_fails_frees_the_run_and_keeps_the_rest(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    records = some_records("r", 100, "x" * 9000)
    appender = store.create("r")
    append(appender, records[:1])
    limit_pages(store, 20)
    for record in records[1:]:
        appender.append(record, b"x" * 9000)
    for _ in range(2):
        with pytest.raises(RunStoreError, match="full"):
            close(appender)
    limit_pages(store, 1 << 20)
    with writing(store.reopen("r", after=0)) as again:
        append(again, records[1:])
    assert store.load("r") == LoadedRun("r", tuple(records))


class Interrupted:
    """A connection at whose so-manieth statement somebody presses Ctrl-C."""

    def __init__(self, connection: sqlite3.Connection, at: int, *, before: bool) -> None:
        self.connection = connection
        self.left = at
        self.before = before

    @property
    def in_transaction(self) -> bool:
        return self.connection.in_transaction

    def execute(self, *arguments: Any) -> Any:
        return self._call(self.connection.execute, *arguments)

    def executemany(self, *arguments: Any) -> Any:
        return self._call(self.connection.executemany, *arguments)

    def _call(self, function: Any, *arguments: Any) -> Any:
        self.left -= 1
        if not self.left and self.before:
            raise KeyboardInterrupt
        result = function(*arguments)
        if not self.left:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_interruption_commits_nothing_twice(tmp_path: Path, at: int, before: bool) -> None:
    """It may also come right behind the commit, when nobody has noted yet that it happened."""
    store = SqliteStore(tmp_path / "runs.db")
    records = some_records("r", 6)
    appender = store.create("r")
    append(appender, records[:2])
    store._committer.stop()  # its thread may still have the lock, and then does the next commit too
    store._connections.open_hasty()
    hasty: Any = store._connections.hasty

    async def interrupted() -> None:
        for record in records[2:4]:
            appender.append(record, encode_json(record))
        with pytest.raises(KeyboardInterrupt):
            await appender.barrier()

    store._connections.hasty = Interrupted(hasty, at, before=before)  # type: ignore[assignment]
    asyncio.run(interrupted())
    store._connections.hasty = hasty
    append(appender, records[4:])
    appender.close()
    assert store.load("r") == LoadedRun("r", tuple(records))
    store.close()


async def test_a_commit_waits_for_the_disk_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    connect = sqlite3.connect

    def overheard(*arguments: Any, **settings: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **settings)
        connection.set_trace_callback(lambda sql: heard.append(sql.split("(")[0].strip()))
        return connection

    monkeypatch.setattr(sqlite3, "connect", overheard)
    store = SqliteStore(tmp_path / "runs.db")
    records = some_records("r", 5)
    appender = store.create("r")

    async def written(record: Record | None, *, sync: bool) -> list[str]:
        heard.clear()
        if record is not None:
            appender.append(record, encode_json(record))
        appender.flush(sync=sync)
        await appender.barrier()
        if sync and heard:
            writer = store._connections._writer
            assert writer is not None
            assert writer.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        return [sql.partition(" SET ")[0] for sql in heard if not sql.startswith("PRAGMA")]

    commit = ["BEGIN IMMEDIATE", "INSERT INTO records", "UPDATE ends", "COMMIT"]
    await written(records[0], sync=False)
    store._connections.open_hasty()  # as the thread would, sooner or later
    assert await written(records[1], sync=False) == commit
    assert await written(records[2], sync=True) == commit
    assert await written(None, sync=True) == []
    assert await written(records[3], sync=False) == commit
    assert await written(None, sync=True) == ["BEGIN IMMEDIATE", "UPDATE ends", "COMMIT"]
    appender.close()


def test_runs_may_be_written_from_any_thread(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    records = some_records("r", 3)
    appender = store.create("r")
    append(appender, records[:1])
    for record in records[1:]:
        thread = threading.Thread(target=append, args=(appender, [record]))
        thread.start()
        thread.join()
    appender.close()
    assert store.load("r") == LoadedRun("r", tuple(records))


@pytest.mark.slow
def test_four_processes_write_two_hundred_runs(tmp_path: Path) -> None:
    """They also all find no database, and make it."""
    names = ["a", "b", "c", "d"]
    with ExitStack() as stack:
        processes = [stack.enter_context(child("many", tmp_path, name)) for name in names]
        for process in processes:
            tell(process)
        assert [line_from(process) for process in processes] == ["done"] * 4
        assert [process.wait() for process in processes] == [0] * 4
    store = SqliteStore(tmp_path / "runs.db")
    runs = list(store.runs())
    assert len({run.run_id for run in runs}) == 200
    for run in runs:
        name = run.run_id.partition(".")[0]
        assert (run.records, run.outcome) == (4, name)
        due = some_records(run.run_id, 3)
        due += numbered(run.run_id, [RunEnded(outcome=name)], after=due[-1])
        assert store.load(run.run_id) == LoadedRun(run.run_id, tuple(due))


@pytest.mark.slow
def test_a_forked_process_does_not_write_into_files_that_its_parent_removes(
    tmp_path: Path,
) -> None:
    with child("fork_and_close", tmp_path) as process:
        assert process.communicate()[0] == "[1, 3]\n"
        assert process.returncode == 0


# --- the file ---------------------------------------------------------------------------------


def test_nothing_is_left_beside_the_database(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "new" / "runs.db")
    appenders = [store.create(f"r{number}") for number in range(3)]
    for appender in appenders:
        append(appender, some_records("r", 1))
    assert len(list((tmp_path / "new").glob("runs.db-lock-*"))) == 3
    for appender in appenders:
        appender.close()
    store.close()
    assert os.listdir(tmp_path / "new") == ["runs.db"]


def test_a_lock_on_a_file_that_was_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may remove it between somebody's opening it and locking it."""
    path = str(tmp_path / "lock")
    try_lock = _files.try_lock
    owner = _files.LockFile.take(path)

    def late(file: FileIO) -> bool:
        nonlocal owner
        if owner is not None:
            owner.release()
            owner = None
        return try_lock(file)

    monkeypatch.setattr(_files, "try_lock", late)
    lock = _files.LockFile.take(path)
    assert lock is not None
    assert _files.LockFile.take(path) is None
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_store_that_is_forgotten_closes_its_connections(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    appender = store.create("r")
    del store
    gc.collect()
    append(appender, some_records("r", 2))
    assert wal_of(tmp_path / "runs.db").exists()
    appender.close()
    del appender
    gc.collect()
    while os.listdir(tmp_path) != ["runs.db"]:  # the last to let go may be the store's thread
        time.sleep(0.001)


def test_a_store_that_was_closed_may_be_used_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    records = some_records("r", 2)
    with writing(store.create("r")) as appender:
        append(appender, records[:1])
        store.close()
        append(appender, records[1:])
    store.close()
    store.close()
    assert store.load("r") == LoadedRun("r", tuple(records))
    store.close()


def use(store: SqliteStore) -> list[Any]:
    return [
        lambda: store.create("r"),
        lambda: store.reopen("r", after=0),
        lambda: store.load("r"),
        lambda: list(store.runs()),
        lambda: store.search("x"),
    ]


def test_a_database_of_the_version_before_gets_the_table_for_large_results(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with closing(SqliteStore(path)) as store:
        write(store, some_records("r", 3))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE kept")
        connection.execute("PRAGMA user_version = 3")
    with closing(SqliteStore(path)) as store:
        assert not store.kept("r", "1-0", 0, 9)
        appender = store.reopen("r", after=2)
        appender.keep("1-0", [b"a", b"b"])  # type: ignore[attr-defined]
        append(appender, numbered("r", [said("more")], after=store.load("r").records[-1]))
        appender.close()
        assert store.kept("r", "1-0", 0, 9) == [b"a", b"b"]


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with closing(SqliteStore(path)) as store:
        write(store, some_records("r", 1))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    for attempt in use(SqliteStore(path)):
        with pytest.raises(RunStoreError, match=r"newer version of this package.*99.*up to 4"):
            attempt()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["runs.db"]


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    before = path.read_bytes()
    for attempt in use(SqliteStore(path)):
        with pytest.raises(RunStoreError, match=r"shop\.db is not a database of runs"):
            attempt()
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    path.write_bytes(b"These are not the tables you are looking for. " * 100)
    for attempt in use(SqliteStore(path)):
        with pytest.raises(RunStoreError, match="not a database"):
            attempt()
    with pytest.raises(ConfigError, match="memory"):
        SqliteStore(":memory:")


def test_records_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    records = some_records("r", 6)
    write(store, records)
    store.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        change = "UPDATE records SET data = ? WHERE id & 4294967295 = ?"
        connection.execute(change, ('{"v":1,"se', 1))
        connection.execute(change, ('{"v":3,"seq":3,"entry":{"kind":"dance"}}', 3))
        connection.execute("DELETE FROM records WHERE id & 4294967295 = 5")
    loaded = store.load("r")
    assert loaded.records == (records[0],)
    assert [(problem.where, problem.reason) for problem in loaded.problems] == [
        ("record 1", "Input data was truncated"),
        ("record 2", "its checksum is wrong"),
        ("record 3", "it was written by a newer version (3; this one reads up to 2)"),
        ("record 4", "its checksum is wrong"),
        ("record 5", "the log must end with record 5"),
    ]
    assert not loaded.is_torn
    assert store.search("Wört 1") == ()
    assert [hit.seq for hit in store.search("Wört 2")] == [2]


def test_anybody_can_read_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    write(store, some_records("é\0", 2))
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT run_id, seq, at, kind, json_extract(data, '$.entry.kind') FROM entries"
        ).fetchall()
        [mode] = connection.execute("PRAGMA journal_mode").fetchone()
    assert rows == [
        ("é\0", 0, 1000, "run_began", "run_began"),
        ("é\0", 1, 1001, "answered", "answered"),
    ]
    assert mode == "wal"


def test_a_number_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    with writing(store.create("r")) as appender, pytest.raises(RunStoreError, match="too large"):
        append(appender, numbered("r", [said("x")], 1 << 32))


def test_two_records_of_one_number_are_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    records = some_records("r", 2)
    appender = store.create("r")
    append(appender, records)
    with pytest.raises(RunStoreError, match="UNIQUE"):
        append(appender, records[1:])
    appender.close()
    assert store.load("r") == LoadedRun("r", tuple(records))


def test_runs_are_found_by_index(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    write(store, some_records("r", 1))
    heard: list[str] = []
    with store._connections.reading() as connection:
        connection.set_trace_callback(heard.append)
    list(store.runs(limit=3))
    list(store.runs(conversation_id="c"))
    list(store.runs(parent_run_id="p"))
    store.update_index()
    with store._connections.reading() as connection:
        connection.set_trace_callback(None)
        plans = [
            " ".join([row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}")])
            for sql in heard
            if "FROM runs" in sql
        ]
    expected = ["runs_by_time", "runs_by_conversation", "runs_by_parent"]
    assert len(plans) == 4
    plans.pop()  # what is not indexed yet is looked for in all runs
    for plan, name in zip(plans, expected, strict=True):
        assert f"USING INDEX {name}" in plan or f"USING COVERING INDEX {name}" in plan
        assert "SCAN records" not in plan


# --- searching --------------------------------------------------------------------------------


def found(store: SqliteStore, text: str) -> list[tuple[str, int]]:
    return sorted([(hit.run_id, hit.seq) for hit in store.search(text)])


def test_what_people_and_models_see_is_found(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    answer = AssistantMessage(
        (
            ThinkingContent("hidden thought"),
            TextContent("The cat sat, "),
            TextContent("quite visibly."),
            ToolCall("1", "look", {"query": "hidden argument"}),
        ),
        StopReason.TOOL_USE,
    )
    entries: list[Entry] = [
        RunBegan(
            identity=RunIdentity("r"),
            system_prompt="hidden prompt",
            history=(UserMessage("hidden history"),),
            prompts=(SystemMessage("visible rule"), UserMessage((TextContent("visible wish"),))),
        ),
        SteeringAccepted(number=1, message=UserMessage("visible nudge"), when="now"),
        MessagesAdded(source="turn", messages=(UserMessage("visible nudge"),)),
        Answered(message=answer),
        ToolEnded(tool_call_id="1", result=ToolResult.text("VISIBLE Über­raschung")),
        RunFailed(error="x", text="hidden error", undelivered=(UserMessage("visible rest"),)),
    ]
    write(store, numbered("r", entries))
    assert found(store, "visible") == [("r", 0), ("r", 2), ("r", 4), ("r", 5)]
    assert found(store, "hidden") == []
    assert found(store, "wish rule") == [("r", 0)]
    assert found(store, "wish nudge") == []
    assert found(store, "uber visible") == [("r", 4)]
    assert store.search("visibly") == (SearchHit("r", 3, "The cat sat, quite visibly."),)


def test_the_snippet_is_around_the_words_and_the_best_comes_first(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    far = " ".join([*["filler"] * 300, "needle", *["filler"] * 300])
    write(store, numbered("r", [began("r"), said(far), said("needle, needle!")]))
    best, second = store.search("needle")
    assert best == SearchHit("r", 2, "needle, needle!")
    assert "needle" in second.snippet
    assert second.snippet.startswith("…")
    assert second.snippet.endswith("…")
    assert len(second.snippet) < 200
    assert store.search("needle", 1) == (best,)


def test_what_was_written_since_is_found_too(tmp_path: Path) -> None:
    store, other = SqliteStore(tmp_path / "runs.db"), SqliteStore(tmp_path / "runs.db")
    assert store.search("word") == ()
    appender = store.create("r")
    append(appender, numbered("r", [began("r", "word"), said("word")]))
    assert found(store, "word") == [("r", 0), ("r", 1)]
    append(appender, numbered("r", [said("word")], 2))
    assert found(other, "word") == [("r", 0), ("r", 1), ("r", 2)]
    with writing(drop_and_reopen(store, appender)) as again:
        append(again, numbered("r", [said("word")], 3))
    write(other, some_records("s", 2, "word"))
    assert len(found(store, "word")) == 5
    assert len(found(other, "word")) == 5


def drop_and_reopen(store: SqliteStore, appender: Any) -> Any:
    """As if the process of the appender had died."""
    appender._lock.release()
    return store.reopen("r", after=2)


def test_indexing_many_records_takes_them_all(tmp_path: Path) -> None:
    store, other = SqliteStore(tmp_path / "runs.db"), SqliteStore(tmp_path / "runs.db")
    write(store, some_records("long", 1201, "word"))
    for number in range(3):
        write(store, some_records(f"short {number}", 2, "word"))
    threads = [threading.Thread(target=s.update_index) for s in (store, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.search("word", 5000)) == 1200 + 3
    assert len(other.search("word", 5000)) == 1200 + 3


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> SqliteStore:
    store = SqliteStore(tmp_path_factory.mktemp("library") / "runs.db")
    write(store, some_records("r", 3))
    return store


@settings(max_examples=100)
@given(text=st.text(st.sampled_from("\"'*()^-+:{} \0ANDORTé"), max_size=12) | TEXT)
def test_any_text_may_be_searched_for(library: SqliteStore, text: str) -> None:
    assert isinstance(library.search(text), tuple)


def test_a_link_to_the_file_is_the_same_store(tmp_path: Path) -> None:
    (tmp_path / "other.db").symlink_to(tmp_path / "runs.db")
    store, linked = SqliteStore(tmp_path / "runs.db"), SqliteStore(tmp_path / "other.db")
    appender = store.create("r")
    with pytest.raises(RunExists):
        linked.create("r")
    appender.close()
