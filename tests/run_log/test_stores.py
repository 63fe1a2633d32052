"""What holds for both stores: the kit, any records, and processes that die, fight, fork or find
the disk full."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import closing, nullcontext
from itertools import count
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace

from clark_agent import RunIdentity
from clark_agent.errors import RunBusy, RunExists, RunNotFound, RunStoreError
from clark_agent.run_log._checksums import seal_all
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.memory import MemoryStore
from clark_agent.run_log.records import (
    RUN_LOG_VERSION,
    Answered,
    ContextEdited,
    Edit,
    Entry,
    MessagesAdded,
    Record,
    RequestDecided,
    RunBegan,
    RunEnded,
    RunFailed,
    RunSuspended,
    SteeringAccepted,
    ToolEnded,
    ToolProgress,
    ToolsGated,
    ToolStarted,
)
from clark_agent.run_log.store import LoadedRun, RunSummary
from clark_agent.testing import store_kit
from clark_agent.testing.store_kit import NonconformingStore, check_run_store
from tests.run_log.storing import (
    KINDS,
    append,
    child,
    line_from,
    numbered,
    open_store,
    said,
    some_records,
    tell,
    writing,
)
from tests.strategies import (
    IDENTITIES,
    TEXT,
    UNSIGNED,
    USAGES,
    assistant_messages,
    messages,
    open_json,
    optional,
    tool_results,
)

both = pytest.mark.parametrize("kind", KINDS)


@both
def test_a_log_is_for_its_owner_alone(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    with closing(store.create("private")) as appender:
        append(appender, some_records("private", 3))
        modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {0o600}


@both
def test_keeps_the_rules(kind: str, tmp_path: Path) -> None:
    check_run_store(lambda: open_store(kind, tmp_path))


def test_a_store_in_memory_keeps_the_rules() -> None:
    store = MemoryStore()
    check_run_store(lambda: store)


# --- any records ------------------------------------------------------------------------------

_messages = st.lists(messages(), max_size=3).map(tuple)
_entries: SearchStrategy[Entry] = st.one_of(
    st.builds(RunBegan, identity=IDENTITIES, system_prompt=TEXT, history=_messages),
    st.builds(MessagesAdded, source=st.just("turn"), messages=_messages),
    st.builds(SteeringAccepted, number=UNSIGNED, message=messages(), when=TEXT),
    st.builds(
        ContextEdited,
        plugin=TEXT,
        edits=st.lists(st.builds(Edit, UNSIGNED, UNSIGNED, _messages), max_size=2).map(tuple),
    ),
    st.builds(ToolsGated, plugin=TEXT, allow=optional(st.lists(TEXT, max_size=2).map(tuple))),
    st.builds(Answered, message=assistant_messages(), details=open_json(), error=optional(TEXT)),
    st.builds(ToolStarted, tool_call_id=TEXT, tool_name=TEXT, arguments=open_json()),
    st.builds(ToolProgress, partial=tool_results()),
    st.builds(ToolEnded, tool_call_id=TEXT, result=tool_results()),
    st.builds(RunEnded, outcome=TEXT, usage=USAGES),
    st.builds(RunFailed, error=TEXT, text=TEXT, undelivered=_messages),
)
_names = count()


@pytest.fixture(scope="module")
def storages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storages")


@both
@settings(max_examples=20)
@given(data=st.data(), name=TEXT)
def test_any_records_survive(kind: str, storages: Path, data: Any, name: str) -> None:
    run_id = f"{name}{next(_names)}"
    entries = data.draw(st.lists(_entries, min_size=1, max_size=12))
    records = [
        Record(RUN_LOG_VERSION, seq, run_id, data.draw(UNSIGNED), entry, (seq,), (name,))
        for seq, entry in enumerate(entries)
    ]
    seal_all(records)
    store = open_store(kind, storages)
    flushes = sorted(data.draw(st.lists(st.integers(1, len(records)), max_size=3)))
    with writing(store.create(run_id)) as appender:
        for start, end in zip([0, *flushes], [*flushes, len(records)], strict=True):
            append(appender, records[start:end])
            assert store.load(run_id) == LoadedRun(run_id, tuple(records[:end]))
    assert open_store(kind, storages).load(run_id) == LoadedRun(run_id, tuple(records))


# --- other processes --------------------------------------------------------------------------


@pytest.mark.slow
@both
def test_a_killed_process_leaves_what_it_flushed_and_no_lock(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    with child("append_forever", kind, tmp_path) as process:
        told = [int(line_from(process)) for _ in range(100)]
        with pytest.raises(RunBusy):
            store.reopen("killed", after=told[-1])
        assert len(store.load("killed").records) > told[-1]
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        told += [int(line) for line in process.stdout if line.endswith("\n")]
        process.wait()
    loaded = store.load("killed")
    assert not loaded.problems
    appender = store.reopen("killed", after=loaded.records[-1].seq)
    loaded = store.load("killed")
    assert not loaded.is_torn
    assert len(loaded.records) > told[-1]
    [summary] = store.runs()
    assert (summary.records, summary.last_at) == (len(loaded.records), loaded.records[-1].at)
    more = numbered("killed", [said("on")], after=loaded.records[-1])
    append(appender, more)
    appender.close()
    assert store.load("killed").records == (*loaded.records, *more)


@pytest.mark.slow
@both
def test_processes_that_want_the_same_run_take_turns(kind: str, tmp_path: Path) -> None:
    with child("contend", kind, tmp_path) as one, child("contend", kind, tmp_path) as other:
        for process in (one, other):
            tell(process)
        assert sorted([line_from(one), line_from(other)]) == ["lost", "won"]
        assert (one.wait(), other.wait()) == (0, 0)
    loaded = open_store(kind, tmp_path).load("contended")
    assert [record.seq for record in loaded.records] == list(range(13))
    assert not loaded.problems


@pytest.mark.slow
@both
def test_a_full_disk_costs_nothing_that_was_flushed(kind: str, tmp_path: Path) -> None:
    with child("fill", kind, tmp_path) as process:
        failure, flushed, *rest = process.communicate()[0].splitlines()
        assert process.returncode == 0
    assert failure == f"failed {'OSError' if kind == 'jsonl' else 'RunStoreError'}"
    assert int(flushed) > 10
    assert rest == [
        "failed again",
        f"{flushed} False 0",
        "flushed",
        f"{int(flushed) + 3} False 0",
    ]
    loaded = open_store(kind, tmp_path).load("full")
    assert loaded == LoadedRun("full", tuple(some_records("full", 200, "z" * 1_000)))


@pytest.mark.slow
@both
def test_a_forked_process_writes_its_own_runs_only(kind: str, tmp_path: Path) -> None:
    with child("fork", kind, tmp_path) as process:
        output = process.communicate()[0].splitlines()
        assert process.returncode == 0
    assert output == ["refused", "1", "still locked"]
    store = open_store(kind, tmp_path)
    texts = [record.entry for record in store.load("parent").records]
    assert texts[1:] == [said("from the parent")]
    assert len(store.load("child").records) == 3
    store.reopen("parent", after=1).close()


@pytest.mark.slow
@both
@pytest.mark.parametrize("how", ["fork", "subprocess"])
def test_a_helper_that_outlives_its_process_has_no_share_in_the_lock(
    kind: str, how: str, tmp_path: Path
) -> None:
    """A tool may start one that goes on when the agent is killed."""
    store = open_store(kind, tmp_path)
    with child("leave_a_helper", kind, tmp_path, how) as process:
        helper = int(line_from(process))
        try:
            with pytest.raises(RunBusy):
                store.reopen("left", after=1)
            process.kill()
            process.wait()
            os.kill(helper, 0)  # it is still there
            store.reopen("left", after=1).close()
        finally:
            os.kill(helper, signal.SIGKILL)


@both
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_what_is_made_is_for_its_owner_alone(kind: str, umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        store = open_store(kind, tmp_path / "new" / "folder")
        appender = store.create("r")
        append(appender, some_records("r", 2))
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == (1 if kind == "jsonl" else 4)  # the database, -wal, -shm and the lock
    assert {oct(path.stat().st_mode & 0o777) for path in made} == {"0o600"}
    assert {oct(path.stat().st_mode & 0o777) for path in folders} == {"0o700"}
    appender.close()


@both
def test_what_exists_keeps_its_mode(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" if kind == "jsonl" else tmp_path
    folder.mkdir(exist_ok=True)
    folder.chmod(0o750)
    [first] = some_records("r", 1)
    with writing(open_store(kind, tmp_path).create("r")) as appender:
        append(appender, [first])
    file = tmp_path / ("runs/r.jsonl" if kind == "jsonl" else "runs.db")
    file.chmod(0o640)
    with writing(open_store(kind, tmp_path).reopen("r", after=0)) as appender:
        append(appender, numbered("r", [said("more")], after=first))
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o750, 0o640)


@pytest.mark.slow
@both
def test_threads_may_be_the_first_to_read(kind: str, tmp_path: Path) -> None:
    """What decodes records is made when it is needed, and not by two at a time."""
    with writing(open_store(kind, tmp_path).create("r")) as appender:
        append(appender, some_records("r", 3))
    with child("read_at_once", kind, tmp_path) as process:
        assert process.communicate()[0] == "[3, 3, 3, 3]\n"
        assert process.returncode == 0


@both
def test_an_appender_that_was_closed_takes_nothing(kind: str, tmp_path: Path) -> None:
    appender = open_store(kind, tmp_path).create("r")
    appender.close()
    with pytest.raises(RunStoreError, match="closed"):
        append(appender, some_records("r", 1))


@both
def test_errors_name_the_run(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    with pytest.raises(RunNotFound, match="'nobody'") as missing:
        store.load("nobody")
    assert missing.value.run_id == "nobody"


@both
def test_a_run_is_there_from_its_first_flush_on(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    appender = store.create("r")
    with pytest.raises(RunNotFound):
        store.load("r")
    with pytest.raises((RunNotFound, RunBusy)):
        store.reopen("r", after=0)
    appender.close()
    assert list(store.runs()) == []
    with pytest.raises(RunNotFound):
        store.load("r")
    with pytest.raises(RunNotFound):
        store.reopen("r", after=0)
    appender = store.create("r")
    append(appender, some_records("r", 2))
    appender.close()
    assert len(store.load("r").records) == 2


@both
def test_a_log_may_begin_with_0_or_1_and_misses_nothing(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    numbers = {"zero": [0, 1], "one": [1, 2, 3], "late": [2, 3], "gap": [0, 1, 4, 5]}
    for run_id, seqs in numbers.items():
        appender = store.create(run_id)
        records = [numbered(run_id, [said("x")], seq)[0] for seq in seqs]
        seal_all(records)
        append(appender, records)
        appender.close()
    loaded = {run_id: store.load(run_id) for run_id in numbers}
    assert {run_id: [r.seq for r in run.records] for run_id, run in loaded.items()} == numbers
    reasons = {name: [problem.reason for problem in run.problems] for name, run in loaded.items()}
    assert reasons == {
        "zero": [],
        "one": [],
        "late": ["it has number 2 instead of 0"],
        "gap": ["it has number 4 instead of 2"],
    }
    counts = {run.run_id: run.records for run in store.runs()}
    assert (counts["zero"], counts["one"]) == (2, 3)


# --- the kit ----------------------------------------------------------------------------------


class ToyStore:
    """A store that keeps the rules, in memory, except those that it is told to break."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.written: dict[str, list[Record]] = {}
        self.open: dict[str, ToyAppender] = {}
        self.boxes: dict[str, list[Mail]] = {}
        self.tails: list[ToyTail] = []
        self.lock = Lock()
        self.together = Barrier(4)

    def create(self, run_id: str) -> ToyAppender:
        key = run_id.casefold() if self.fault == "folds case" else run_id
        if (key in self.open or key in self.written) and self.fault != "begins twice":
            raise RunExists(run_id)
        self.open[key] = ToyAppender(self, key)
        return self.open[key]

    def reopen(self, run_id: str, *, after: int) -> ToyAppender:
        if run_id in self.open and self.fault != "two writers":
            raise RunBusy(run_id)
        if run_id not in self.written and self.fault != "reopens anything":
            raise RunNotFound(run_id)
        last = self.written[run_id][-1].seq if run_id in self.written else after
        if last != after and self.fault != "does not compare":
            raise RunBusy.changed(run_id, last, after)
        self.open[run_id] = ToyAppender(self, run_id)
        return self.open[run_id]

    def load(self, run_id: str) -> LoadedRun:
        if run_id not in self.written:
            raise RunNotFound(run_id)
        records = tuple(self.written[run_id])
        if self.fault == "loses order":
            records = records[::-1]
        elif self.fault == "loses one":
            records = records[:4] + records[5:]
        elif self.fault == "changes one":
            records = tuple([replace(record, ids=()) for record in records])
        return LoadedRun(run_id, records)

    def runs(
        self,
        *,
        conversation_id: str | None = None,
        parent_run_id: str | None = None,
        outcome: str | None = None,
        limit: int | None = None,
    ) -> list[RunSummary]:
        found = [self.summary(run_id, records) for run_id, records in self.written.items()]
        if conversation_id is not None and self.fault != "ignores conversations":
            found = [run for run in found if run.conversation_id == conversation_id]
        if parent_run_id is not None and self.fault != "ignores parents":
            found = [run for run in found if run.parent_run_id == parent_run_id]
        if outcome is not None and self.fault != "ignores outcomes":
            found = [run for run in found if run.outcome == outcome]
        found.sort(key=lambda run: run.began_at, reverse=self.fault != "lists the oldest first")
        return found if self.fault == "ignores limits" else found[:limit]

    def tail(self, run_id: str, *, after: int = -1) -> ToyTail:
        if run_id not in self.written:
            raise RunNotFound(run_id)
        self.tails.append(ToyTail(self, run_id, after))
        return self.tails[-1]

    def post(self, run_id: str, mail: Mail) -> bool:
        if run_id not in self.written and self.fault != "posts to nobody":
            raise RunNotFound(run_id)
        if run_id not in self.open and self.fault == "posts to runs that are open":
            return False
        box = self.boxes.setdefault(run_id, [])
        with nullcontext() if self.fault == "posts without a lock" else self.lock:
            is_new = all(mail.id != other.id for other in box)
            if self.fault == "posts without a lock" and mail.id == "same 0":
                self.together.wait(10)  # every thread of the kit finds that it is new
            if is_new or self.fault == "keeps doubles":
                box.append(mail)
        return is_new

    def mail(self, run_id: str, *, after: int = 0) -> list[Mail]:
        box = self.boxes.get(run_id, [])
        return box[::-1][after:] if self.fault == "loses order of mail" else box[after:]

    def publish(self, run_id: str, data: bytes) -> None:
        for tail in self.tails:
            if tail.run_id == run_id:
                tail.live.append(data)

    def summary(self, run_id: str, records: list[Record]) -> RunSummary:
        identity = RunIdentity("")
        if isinstance(records[0].entry, RunBegan):
            identity = records[0].entry.identity
        outcome = None
        for record in records if self.fault == "remembers outcomes" else records[-1:]:
            if isinstance(record.entry, RunEnded):
                outcome = record.entry.outcome
            elif isinstance(record.entry, RunFailed):
                outcome = "failed" if self.fault != "hides failures" else None
            elif isinstance(record.entry, (RunSuspended, RequestDecided)):
                outcome = "suspended" if self.fault != "forgets who waits" else None
        last = records[0] if self.fault == "stops the clock" else records[-1]
        return RunSummary(
            run_id=run_id,
            parent_run_id=identity.parent_run_id,
            depth=identity.depth,
            conversation_id=identity.conversation_id,
            began_at=records[0].at,
            last_at=last.at,
            records=len(records),
            outcome=outcome,
        )


class ToyTail:
    def __init__(self, store: ToyStore, run_id: str, after: int) -> None:
        self.store, self.run_id, self.after = store, run_id, after
        self.live: list[bytes] = []

    def read(self) -> list[Record]:
        new = [r for r in self.store.written[self.run_id] if r.seq > self.after]
        if new and self.store.fault != "returns records again":
            self.after = new[-1].seq
        return new[1:] if self.store.fault == "skips records" else new

    def read_live(self) -> list[bytes]:
        live, self.live = self.live, []
        return [*live, b"else"] if self.store.fault == "makes things up" else live

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.001))

    def close(self) -> None:
        """There is nothing to release."""


class ToyAppender:
    def __init__(self, store: ToyStore, run_id: str) -> None:
        self.store, self.run_id = store, run_id
        self.pending: list[Record] = []
        self.is_closed = False

    def append(self, record: Record, data: bytes, /) -> None:
        if self.is_closed:
            raise RunStoreError("closed")
        self.pending.append(record)

    def flush(self, *, sync: bool) -> None:
        """It hands on when somebody waits for it."""

    async def barrier(self) -> None:
        if self.store.fault == "gives up with its caller":
            pending, self.pending = self.pending, []
            await asyncio.sleep(0.001)
            self.store.written.setdefault(self.run_id, []).extend(pending)
        elif self.pending and self.store.fault != "flushes when closed":
            self.store.written.setdefault(self.run_id, []).extend(self.pending)
            self.pending = []

    def close(self) -> None:
        if self.is_closed and self.store.fault != "closes for others":
            return
        self.is_closed = True
        if self.pending:
            self.store.written.setdefault(self.run_id, []).extend(self.pending)
            self.pending = []
        self.store.open.pop(self.run_id, None)


def test_the_kit_accepts_a_store_that_keeps_the_rules() -> None:
    store = ToyStore()
    check_run_store(lambda: store)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ("loses order", "has the records [4, 3, 2, 1, 0] instead of [0, 1, 2, 3, 4]"),
        ("loses one", "has the records [0, 1, 2, 3] instead of [0, 1, 2, 3, 4]"),
        ("changes one", "after the first flush, another store has changed"),
        ("folds case", "'Case' raises RunExists"),
        ("begins twice", "creating a closed run again in another store does not raise RunExists"),
        ("two writers", "reopening an open run in another store does not raise RunBusy"),
        ("reopens anything", "reopening a run that was not created does not raise RunNotFound"),
        ("ignores conversations", "the runs of a conversation are"),
        ("ignores parents", "the children of a run are"),
        ("ignores limits", "the first two are"),
        ("lists the oldest first", "all runs are"),
        ("remembers outcomes", "A run continues where it stopped"),
        ("hides failures", "outcome='failed'"),
        ("stops the clock", "The summaries match the records"),
        ("flushes when closed", "Records are there after a barrier"),
        ("gives up with its caller", "A cancelled wait loses nothing"),
        ("does not compare", "reopening a run after an earlier record does not raise RunBusy"),
        ("ignores outcomes", "those that are suspended are"),
        ("forgets who waits", "outcome='suspended'"),
        ("skips records", "A tail returns the records from any number on: after"),
        ("returns records again", "a record is returned twice"),
        ("makes things up", "What is published reaches tails in order, or not at all"),
        ("posts to nobody", "posting to a run that was not created does not raise RunNotFound"),
        ("posts to runs that are open", "a run without a writer gets no messages"),
        ("keeps doubles", "after posting an id again"),
        ("loses order of mail", "after posting, another store has"),
        ("posts without a lock", "Several threads may post at once"),
        ("closes for others", "when the first writer was closed again does not raise RunBusy"),
    ],
)
def test_the_kit_finds_faults(fault: str, finding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_kit, "_PATIENCE", 0.2)  # for records that never come
    store = ToyStore(fault)
    with pytest.raises(NonconformingStore) as found:
        check_run_store(lambda: store)
    assert finding in str(found.value)
    assert isinstance(found.value, AssertionError)
