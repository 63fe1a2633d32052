"""Pages of logs: damage, torn ends, and how much is read. `check_run_store` has the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import force_setattr

from clark_agent.messages.wire import encode_json
from clark_agent.run_log import JsonlStore, LogDamaged, RunStore, SqliteStore
from clark_agent.run_log._checksums import seal_all
from clark_agent.run_log.pages import START, LogPage, read_end, read_page
from clark_agent.run_log.records import Record, RunBegan, ToolProgress
from clark_agent.tools import ToolResult
from clark_agent.types import RunIdentity

RUN = "r"


def written(store: RunStore, count: int, *, length: int = 100) -> list[Record]:
    """Write a log with this many records of this length."""
    entries: list[Any] = [RunBegan(identity=RunIdentity(RUN))]
    entries += [ToolProgress(partial=ToolResult.text("x" * length)) for _ in range(count - 1)]
    records = [Record(2, seq, RUN, 1000 + seq, entry) for seq, entry in enumerate(entries)]
    seal_all(records)
    appender = store.create(RUN)
    for record in records:
        appender.append(record, encode_json(record))

    async def close() -> None:
        appender.close()
        await appender.barrier()

    asyncio.run(close())
    return records


def pages(store: RunStore, **limits: Any) -> list[LogPage]:
    found = [read_page(store, RUN, **limits)]
    while not found[-1].is_end:
        found.append(read_page(store, RUN, found[-1].end, **limits))
    return found


@pytest.fixture(params=["jsonl", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RunStore:
    return JsonlStore(tmp_path) if request.param == "jsonl" else SqliteStore(tmp_path / "runs.db")


def test_a_page_reads_no_more_than_its_size(store: RunStore) -> None:
    records = written(store, 200, length=1000)
    found = pages(store, records=1000, size=10_000)
    assert [r for page in found for r in page.records] == records
    assert len(found) > 15
    assert all(page.bytes_read < 12_000 for page in found)


def test_a_record_that_is_longer_than_a_page_is_read(store: RunStore) -> None:
    records = written(store, 3, length=50_000)
    found = pages(store, records=1000, size=1000)
    assert [r for page in found for r in page.records] == records
    assert list(read_end(store, RUN, size=1000)) == records[-1:]


def test_damage_is_reported_where_it_is(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    records = written(store, 20)
    path = store.path_of(RUN)
    lines = path.read_bytes().split(b"\n")
    lines[12] = lines[12].replace(b"xxx", b"yyy", 1)
    path.write_bytes(b"\n".join(lines))
    found = pages(store, records=5)
    assert [r for page in found for r in page.records] == records[:12]
    assert found[-1].problem is not None
    assert found[-1].problem.seq == 12
    assert found[-1].problem.where.startswith("line 13, byte ")
    again = read_page(store, RUN, found[-1].end)
    assert again.records == ()
    assert again.problem == found[-1].problem


def test_a_place_in_another_log_is_noticed(store: RunStore, tmp_path: Path) -> None:
    written(store, 20)
    page = read_page(store, RUN, records=5)
    wrong = page.end
    force_setattr(wrong, "checksum", 1)
    assert "checksum" in str(read_page(store, RUN, wrong).problem)


def test_a_torn_end_is_not_there_yet(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    records = written(store, 3)
    path = store.path_of(RUN)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    first = read_page(store, RUN)
    assert list(first.records) == records[:2]
    assert first.is_end
    path.write_bytes(whole)
    assert list(read_page(store, RUN, first.end).records) == records[2:]


def test_a_record_without_its_line_break_counts_once(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    records = written(store, 4)
    path = store.path_of(RUN)
    whole = path.read_bytes()
    path.write_bytes(b"\n".join(whole.split(b"\n")[:3]))
    first = read_page(store, RUN)
    assert list(first.records) == records[:3]
    assert read_page(store, RUN, first.end).records == ()
    path.write_bytes(whole)
    after = read_page(store, RUN, first.end, size=1)
    assert list(after.records) == records[3:]
    assert after.problem is None


def test_a_log_that_became_shorter_is_damaged(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    written(store, 3)
    end = read_page(store, RUN).end
    path = store.path_of(RUN)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(LogDamaged, match="missing"):
        read_page(store, RUN, end)


def test_the_end_of_a_long_log_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JsonlStore(tmp_path)
    records = written(store, 3000, length=300)
    read: list[int] = []
    from clark_agent.run_log import jsonl

    plain = jsonl._read

    def counted(*args: Any) -> bytes:
        data = plain(*args)
        read.append(len(data))
        return data

    monkeypatch.setattr(jsonl, "_read", counted)
    assert list(read_end(store, RUN, records=5, size=10_000)) == records[-5:]
    assert sum(read) < 60_000


def test_files_are_listed_again_only_if_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JsonlStore(tmp_path)
    records = written(store, 3)
    before = store.runs()
    from clark_agent.run_log import jsonl

    read: list[Path] = []
    plain = jsonl._summarize

    def summarize(head: Any, path: Path) -> Any:
        read.append(path)
        return plain(head, path)

    monkeypatch.setattr(jsonl, "_summarize", summarize)
    assert store.runs() == before
    assert read == []
    other = JsonlStore(tmp_path)
    appender = other.reopen(RUN, after=2)
    more = Record(2, 3, RUN, 5000, records[1].entry)
    seal_all([more], records[-1])
    appender.append(more, encode_json(more))
    appender.close()
    assert [(run.records, run.last_at) for run in store.runs()] == [(4, 5000)]
    assert len(read) == 1
    store.path_of(RUN).unlink()
    assert store.runs() == []


def test_the_beginning_of_every_log_is_the_same_place(store: RunStore) -> None:
    records = written(store, 2)
    assert list(read_page(store, RUN, START).records) == records
