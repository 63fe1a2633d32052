"""JsonlStore: names of files, torn ends, faults in the middle, and reading no more than needed."""

from __future__ import annotations

import errno
import json
import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from clark_agent.errors import LogDamaged, RunBusy, RunExists, RunNotFound
from clark_agent.messages.wire import encode_json
from clark_agent.run_log import jsonl
from clark_agent.run_log._checksums import seal, seal_all
from clark_agent.run_log.jsonl import JsonlStore
from clark_agent.run_log.records import Record, RunEnded
from clark_agent.run_log.store import LoadedRun
from clark_agent.testing.store_kit import ODD_IDS
from tests.run_log.storing import append, began, numbered, said, some_records


def written(store: JsonlStore, records: list[Record]) -> bytes:
    """Write a run; what its file then holds."""
    run_id = records[0].run
    appender = store.create(run_id)
    append(appender, records)
    appender.close()
    return store.path_of(run_id).read_bytes()


def lines_of(*records: Record) -> bytes:
    return b"".join([encode_json(record) + b"\n" for record in records])


# --- files ------------------------------------------------------------------------------------


def test_a_record_is_a_line_of_json(tmp_path: Path) -> None:
    records = some_records("r", 3)
    data = written(JsonlStore(tmp_path), records)
    assert data == lines_of(*records)
    rows = [json.loads(line) for line in data.splitlines()]
    assert [(row["v"], row["seq"], row["run"], row["entry"]["kind"]) for row in rows] == [
        (2, 0, "r", "run_began"),
        (2, 1, "r", "answered"),
        (2, 2, "r", "answered"),
    ]
    assert [list(row)[-1] for row in rows] == ["crc"] * 3


def test_every_id_has_a_file_of_its_own_in_the_folder(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path / "runs")
    paths = [store.path_of(run_id) for run_id in ODD_IDS]
    assert {path.parent for path in paths} == {tmp_path / "runs"}
    assert len({path.name.casefold() for path in paths}) == len(ODD_IDS)
    for path in paths:
        assert len(path.name) <= 143  # the shortest limit of a file system that is in use
        assert path.name.isascii()
        assert path.name.isprintable()
        assert not path.name.startswith(".")
        assert path.name.partition(".")[0] not in ("con", "nul")
        assert not set(path.name) & set('/\\:*?"<>| ')


def test_a_usual_id_is_the_name_of_its_file(tmp_path: Path) -> None:
    run_id = "0192f0c1-8f1e-7cc3-98c4-dc0c0c07398f"
    assert JsonlStore(tmp_path).path_of(run_id) == tmp_path / f"{run_id}.jsonl"


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = JsonlStore("runs")
    monkeypatch.chdir("/")
    written(store, some_records("r", 1))
    assert (tmp_path / "runs" / "r.jsonl").exists()


def test_syncing_syncs_the_file_and_once_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync
    store = JsonlStore(tmp_path / "runs")

    def watched(handle: int) -> None:
        names = {path.stat().st_ino: path.name for path in [tmp_path / "runs", store.path_of("r")]}
        synced.append(names[os.fstat(handle).st_ino])
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    records = some_records("r", 4)
    appender = store.create("r")
    append(appender, records[:1])
    assert synced == []
    append(appender, records[1:2], sync=True)
    assert synced == ["r.jsonl", "runs"]
    appender.flush(sync=True)
    append(appender, records[2:3])
    assert synced == ["r.jsonl", "runs"]
    appender.flush(sync=True)
    assert synced == ["r.jsonl", "runs", "r.jsonl"]
    appender.close()
    reopened = store.reopen("r", after=2)
    reopened.flush(sync=True)  # of what somebody else may have left to the system
    reopened.close()
    assert synced == ["r.jsonl", "runs", "r.jsonl", "r.jsonl"]


def test_a_record_must_be_on_one_line(tmp_path: Path) -> None:
    appender = JsonlStore(tmp_path).create("r")
    with pytest.raises(ValueError, match="one line"):
        appender.append(some_records("r", 1)[0], b'{\n"v":1}')
    appender.close()


# --- torn ends --------------------------------------------------------------------------------


def expect_torn(store: JsonlStore, path: Path, data: bytes, whole: list[Record]) -> None:
    """That of this file the whole records are there, and a writer goes on behind them."""
    path.write_bytes(data)
    assert store.load("r") == LoadedRun("r", tuple(whole), is_torn=True)
    assert listed(store) == [("r", len(whole), whole[-1].at)]
    assert path.read_bytes() == data
    more = numbered("r", [said("on")], after=whole[-1])
    appender = store.reopen("r", after=whole[-1].seq)
    assert path.read_bytes() == lines_of(*whole)
    append(appender, more)
    appender.close()
    assert store.load("r") == LoadedRun("r", (*whole, *more))


def listed(store: JsonlStore) -> list[tuple[str, int, int]]:
    return [(run.run_id, run.records, run.last_at) for run in store.runs()]


def test_a_write_may_be_torn_at_any_byte(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    records = some_records("r", 3)
    data = written(store, records)
    last = len(lines_of(*records[:-1]))
    for end in range(last + 1, len(data) - 1):
        expect_torn(store, store.path_of("r"), data[:end], records[:-1])


def test_a_run_that_was_torn_at_its_first_write_can_be_begun(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    records = some_records("r", 1)
    data = written(store, records)
    for end in range(len(data) - 1):
        store.path_of("r").write_bytes(data[:end])
        with pytest.raises(RunNotFound):
            store.load("r")
        with pytest.raises(RunNotFound):
            store.reopen("r", after=0)
        assert listed(store) == []
        assert written(store, records) == data
        with pytest.raises(RunExists):
            store.create("r")
        store.path_of("r").unlink()


@pytest.mark.parametrize("count", [1, 3])
def test_a_record_that_lacks_its_line_break_counts(tmp_path: Path, count: int) -> None:
    store = JsonlStore(tmp_path)
    records = some_records("r", count)
    data = written(store, records)
    store.path_of("r").write_bytes(data[:-1])
    assert store.load("r") == LoadedRun("r", tuple(records))
    assert listed(store) == [("r", count, records[-1].at)]
    with pytest.raises(RunExists):
        store.create("r")
    more = numbered("r", [said("on")], after=records[-1])
    appender = store.reopen("r", after=records[-1].seq)
    append(appender, more)
    appender.close()
    assert store.path_of("r").read_bytes() == data + lines_of(*more)


@pytest.mark.parametrize(
    "end",
    [
        b"\0",
        b"\0" * 70_000,
        b'{"v":2,"seq":2,"run":"r","at":12' + b"\0" * 4096,
        b"\0\0\0\n",
        b'{"v":2,"seq":2,"ru\n',
        b'{"v":2,"seq":3,"run":"r","at":1',
        b'{"v":2,"seq":2,"run":"s","at":1',
        b"\n",
        b"\xff\xfe\n",
        b"{}",
        b"dear diary",
    ],
)
def test_what_no_cut_off_write_leaves_is_damage(tmp_path: Path, end: bytes) -> None:
    """After a power failure, records may be missing that were acted on."""
    store = JsonlStore(tmp_path)
    records = some_records("r", 2)
    data = written(store, records) + end
    store.path_of("r").write_bytes(data)
    loaded = store.load("r")
    assert (loaded.records, loaded.is_torn) == (tuple(records), False)
    first = loaded.problems[0]
    assert (first.seq, first.where) == (2, f"line 3, byte {len(data) - len(end)}")
    with pytest.raises((LogDamaged, RunBusy)):
        store.reopen("r", after=1)
    assert store.path_of("r").read_bytes() == data


def test_a_failed_write_leaves_no_trace(tmp_path: Path) -> None:
    class Full(FileIO):
        """A file of which half is written, and which may not be mended at once."""

        failures = 2

        def write(self, data: Any, /) -> int:
            if not self.failures:
                return super().write(data)
            self.failures -= 1
            super().write(bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "no space left")

        def truncate(self, size: int | None = None, /) -> int:
            if self.failures == 1:
                raise OSError(errno.EIO, "not now")
            return super().truncate(size)

    store = JsonlStore(tmp_path)
    path = store.path_of("r")
    records = some_records("r", 4)
    appender: Any = store.create("r")
    append(appender, records[:2])
    appender._file.close()
    appender._file = Full(os.open(path, os.O_RDWR | os.O_APPEND), "r+b")
    with pytest.raises(OSError, match="no space"):
        append(appender, records[2:3])
    assert store.load("r") == LoadedRun("r", tuple(records[:2]), is_torn=True)
    with pytest.raises(OSError, match="not now"):
        appender.flush(sync=False)
    appender._file.failures = 0
    append(appender, records[3:])
    assert path.read_bytes() == lines_of(*records)
    appender.close()


def test_an_interruption_writes_nothing_twice(tmp_path: Path) -> None:
    class Interrupted(FileIO):
        def write(self, data: Any, /) -> int:
            super().write(data)
            raise KeyboardInterrupt

    store = JsonlStore(tmp_path)
    records = some_records("r", 3)
    appender: Any = store.create("r")
    append(appender, records[:1])
    file = appender._file
    appender._file = Interrupted(os.open(store.path_of("r"), os.O_RDWR | os.O_APPEND), "r+b")
    with pytest.raises(KeyboardInterrupt):
        append(appender, records[1:])
    appender._file.close()
    appender._file = file
    appender.close()
    assert store.path_of("r").read_bytes() == lines_of(*records)


# --- faults -----------------------------------------------------------------------------------


def sealed(line: str, before: int = 0) -> bytes:
    """A line as somebody would have written it."""
    return seal(line.encode(), before)[0]


NEWER = '{"v":3,"seq":1,"run":"r","at":1,"entry":'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"v":2,"se\0', "JSON is malformed: invalid character"),
        ("", "it is an empty line"),
        ("[]", "Expected `object`, got `array`"),
        ("7", "Expected `object`, got `int`"),
        ('{"v":2,"seq":1,"run":"r","at":1}', "missing required field `entry`"),
        ('{"v":1,"seq":1,"run":"r","at":1}', "missing required field `entry`"),
        ('{"v":2,"seq":1,"run":"r","at":1,"entry":{"kind":"run_resumed","turn":1}}', "no checksum"),
        (
            '{"v":2,"seq":1,"run":"r","at":1,"entry":{"kind":"run_resumed","turn":1},'
            '"crc":"00000000"}',
            "its checksum is wrong",
        ),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_line_that_cannot_be_read_costs_that_line(
    tmp_path: Path, place: int, line: str, reason: str
) -> None:
    store = JsonlStore(tmp_path)
    records = some_records("r", 3)
    rows = written(store, records).splitlines(keepends=True)
    rows[place] = line.replace('"seq":1', f'"seq":{place}').encode() + b"\n"
    store.path_of("r").write_bytes(b"".join(rows))
    loaded = store.load("r")
    assert not loaded.is_torn
    first = loaded.problems[0]
    assert (first.seq, first.is_newer) == (place, False)
    assert first.where == f"line {place + 1}, byte {sum(map(len, rows[:place]))}"
    assert reason in first.reason
    assert first.data == rows[place].decode().rstrip("\n")
    assert loaded.records[:place] == tuple(records[:place])
    assert all(record in records for record in loaded.records)
    assert store.path_of("r").read_bytes() == b"".join(rows)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (NEWER + '{"kind":"dance"}}', "written by a newer version (3; this one reads up to 2)"),
        (NEWER + '{"kind":"run_resumed","turn":1}}', "written by a newer version (3;"),
        (NEWER.replace("3", "2", 1) + '{"kind":"dance"}}', "Invalid value 'dance'"),
    ],
)
def test_what_a_newer_version_has_written_is_no_damage(
    tmp_path: Path, line: str, reason: str
) -> None:
    store = JsonlStore(tmp_path)
    [first] = some_records("r", 1)
    data = written(store, [first])
    assert first.crc is not None
    store.path_of("r").write_bytes(data + sealed(line, int(first.crc, 16)) + b"\n")
    loaded = store.load("r")
    assert loaded.records == (first,)
    [problem] = loaded.problems
    assert (problem.seq, problem.is_newer) == (1, True)
    assert reason in problem.reason


def test_records_out_of_order_are_told_and_read(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    records = some_records("r", 5)
    disordered = [replace(records[place]) for place in (0, 1, 3, 2, 3, 3)]
    seal_all(disordered)
    written(store, disordered)
    loaded = store.load("r")
    assert [record.seq for record in loaded.records] == [0, 1, 3, 2, 3, 3]
    assert [(problem.where.partition(",")[0], problem.reason) for problem in loaded.problems] == [
        ("line 3", "it has number 3 instead of 2"),
        ("line 4", "it has number 2 instead of 4"),
        ("line 6", "it has number 3 instead of 4"),
    ]


def test_a_record_of_another_run_is_not_this_runs(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    records = some_records("r", 3)
    rows = written(store, records).splitlines(keepends=True)
    rows.insert(1, lines_of(*some_records("other", 1)))
    store.path_of("r").write_bytes(b"".join(rows))
    loaded = store.load("r")
    assert loaded.records == tuple(records)
    assert loaded.problems[0].where.startswith("line 2,")
    rows[1] = lines_of(*numbered("other", [said("x")], after=records[0]))
    store.path_of("r").write_bytes(b"".join(rows))
    assert store.load("r").problems[0].reason == "it is a record of the run 'other'"


def test_long_data_is_shown_in_part(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    store.path_of("r").write_bytes(b'"' + b"x" * 100_000 + b'"\n')
    [problem] = store.load("r").problems
    assert problem.data == '"' + "x" * 199


# --- looking through the runs -----------------------------------------------------------------


def test_what_is_no_log_is_not_listed(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    assert list(store.runs()) == []
    data = written(store, some_records("r", 2))
    (tmp_path / "copy of r.jsonl").write_bytes(data)
    (tmp_path / "notes.jsonl").write_text("dear diary\n")
    (tmp_path / "numbers.jsonl").write_text("1\n2\n")
    (tmp_path / "zeros.jsonl").write_bytes(b"\0" * 5000)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "r.txt").write_bytes(data)
    (tmp_path / "folder.jsonl").mkdir()
    torn = store.path_of("torn")
    torn.write_bytes(lines_of(*some_records("torn", 1))[:-2])
    assert [run.run_id for run in store.runs()] == ["r"]
    with pytest.raises(RunNotFound):
        store.load("empty")


def test_a_log_of_a_newer_version_is_listed(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    data = written(store, some_records("r", 1))
    later = b'{"v":3,"seq":1,"run":"r","at":2000,"entry":{"kind":"dance"}}\n'
    store.path_of("r").write_bytes(data.replace(b'"v":2', b'"v":3') + later)
    [run] = store.runs()
    assert (run.records, run.last_at, run.outcome) == (2, 2000, None)


def test_only_the_first_and_the_last_line_are_read(tmp_path: Path) -> None:
    """The lines between would take more memory than there is."""
    store = JsonlStore(tmp_path)
    first, last = numbered("r", [began("r"), RunEnded(outcome="done")])
    written(store, [first])
    with store.path_of("r").open("r+b") as file:
        file.seek(1 << 40)
        file.write(b"\n" + lines_of(last))
    [run] = store.runs()
    assert (run.began_at, run.last_at, run.outcome) == (first.at, last.at, "done")
    store.reopen("r", after=1).close()


@pytest.mark.parametrize("size", [10, jsonl._CHUNK - 200, jsonl._CHUNK, 10 * jsonl._CHUNK + 7])
def test_long_lines_are_found_whole(tmp_path: Path, size: int) -> None:
    store = JsonlStore(tmp_path)
    records = numbered("r", [began("r", "x" * size), said("y" * size), said("z" * size)])
    data = written(store, records)
    for cut in (0, 1, 2):
        store.path_of("r").write_bytes(data[: len(data) - cut])
        count = 3 if cut < 2 else 2
        assert listed(store) == [("r", count, records[count - 1].at)]
    store.reopen("r", after=1).close()
    assert store.path_of("r").read_bytes() == lines_of(*records[:2])
