"""Large logs and many runs: what a request reads does not grow with them."""

from __future__ import annotations

import re
import subprocess
import sys
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from benchmarks.view import write_large, write_many
from clark_agent.run_log import JsonlStore, SqliteStore, jsonl
from clark_agent.view.requests import TooLarge
from tests.sizes import RUNS_LISTED, VIEW_MEGABYTES
from tests.transports.servers.child import ROOT
from tests.view.site import site

pytestmark = [pytest.mark.slow, pytest.mark.soak]

PAGE = 3 << 20
"""More than a page may read, with the parts of the log around it."""


class Counter:
    """Counts the bytes that are read from files of logs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = 0
        plain = jsonl._read

        def read(*args: Any) -> bytes:
            data = plain(*args)
            self.read += len(data)
            return data

        monkeypatch.setattr(jsonl, "_read", read)

    def take(self) -> int:
        read, self.read = self.read, 0
        return read


async def test_a_page_of_a_large_log_reads_a_bounded_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JsonlStore(tmp_path)
    size = write_large(store, "large", VIEW_MEGABYTES)
    assert size > VIEW_MEGABYTES * 1_000_000
    counter = Counter(monkeypatch)
    async with site(store) as page:
        monkeypatch.setattr(page.reading, "_in_background", lambda name, step: None)
        await page.get("runs")
        assert counter.take() < PAGE
        view = await page.get("run", run="large")
        assert counter.take() < PAGE
        assert not view["indexed"]["is_complete"]
        assert view["indexed"]["bytes"] < view["indexed"]["of_bytes"] == size
        first = await page.get("items", run="large")
        assert len(first["items"]) == 100
        assert counter.take() < PAGE
        page.reading._index("large").reach(seq=1 << 62)
        assert size - PAGE <= counter.take() < size * 1.1  # once, for all that follows
        view = await page.get("run", run="large")
        assert view["indexed"] == {
            "records": view["run"]["records"],
            "bytes": size,
            "of_bytes": size,
            "is_complete": True,
        }
        turns = view["turns"]
        for turn in (1, turns // 3, turns // 2, turns):
            for limit in (1, 50, 500):
                found = await page.get("items", run="large", turn=turn, limit=limit)
                read = counter.take()
                assert read < PAGE
                assert abs(read - found["bytes_read"]) < 1000
                assert found["records_read"] < limit + 300
                assert found["items"][0]["turn"] == turn
        last = await page.get("items", run="large", before=1 << 40, limit=500)
        assert counter.take() < PAGE
        assert last["items"][-1]["kind"] == "ended"
        overview = await page.get("turns", run="large", limit=1000, **{"from": turns - 10})
        assert [row["turn"] for row in overview["turns"]] == list(range(turns - 10, turns + 1))
        async with page.events("large", after=view["last_seq"] - 3) as events:
            names = [name async for name, _, _ in events]
        assert names == ["item", "item", "item", "run", "end"]
        assert counter.take() < PAGE


async def test_pages_of_a_large_run_in_a_database(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    write_large(store, "large", 5)
    store.close()
    async with site(store) as page:
        page.reading._index("large").reach(seq=1 << 62)
        view = await page.get("run", run="large")
        for turn in (1, view["turns"] // 2, view["turns"]):
            found = await page.get("items", run="large", turn=turn, limit=20)
            assert found["items"][0]["turn"] == turn
            assert found["bytes_read"] < PAGE
            assert found["records_read"] < 400


async def test_what_needs_all_of_a_large_log_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clark_agent.view import reading, requests

    monkeypatch.setattr(requests, "MOST_READ", 1 << 20)
    monkeypatch.setattr(reading, "MOST_READ", 1 << 20)
    store = JsonlStore(tmp_path)
    write_large(store, "a", 3)
    write_large(store, "b", 0.1)
    async with site(store) as page:
        early = await page.get("request", run="a", turn=10)
        assert early["total"] == 19
        answer = await page.get("request", run="a", turn=400, code=413)
        assert answer["error"] == "too_large"
        late = await page.get("request", run="a", turn=400, force=1)
        assert (late["total"], len(late["messages"])) == (799, 2)
        assert (await page.get("diff", code=413, a="a", b="b"))["error"] == "too_large"
        assert (await page.get("diff", force=1, a="a", b="b"))["common"] > 1
    assert issubclass(TooLarge, Exception)


async def test_thousands_of_runs_are_listed_without_reading_their_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JsonlStore(tmp_path)
    write_many(store, RUNS_LISTED)
    async with site(store) as page:
        monkeypatch.setattr(page.reading, "_in_background", lambda name, step: None)
        found = await page.get("runs", limit=50)
        assert (found["total"], len(found["runs"])) == (RUNS_LISTED, 50)
        while page.reading.catalog.look(2000):
            pass
        page.reading.catalog.refresh(force=True)
        await page.get("runs", limit=50, after=found["next"])
        opened: list[str] = []
        plain = FileIO

        def open_file(path: Any, *rest: Any) -> Any:
            opened.append(str(path))
            return plain(path, *rest)

        monkeypatch.setattr(jsonl, "FileIO", open_file)
        page.reading.catalog.refresh(force=True)
        assert opened == []  # no file has changed
        again = await page.get("runs", limit=50, agent="repairer", model="gpt-5", status="done")
        assert again["total"] == RUNS_LISTED
        assert opened == []
        third = await page.get("runs", limit=50, after=again["next"])
        await page.get("runs", limit=50, after=third["next"])
        assert len(opened) < 120  # the ends of those that are shown for the first time


def test_the_benchmark_of_the_page_runs() -> None:
    command = [sys.executable, "-m", "benchmarks.view", "--sizes", "1", "--runs", "10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    log, runs = done.stdout.splitlines()
    assert re.search(r"MB  first screen .* page .* request", log)
    assert runs.startswith("10 runs  first list")
