"""Logs that are not what was written: refused with the place, and forked before it.

Also logs of version 1, in which damage cannot be seen: they are read, and said to be unchecked.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from clark_agent import (
    AgentContext,
    LoopConfig,
    RunIdentity,
    RunResult,
    SystemMessage,
    ToolResult,
    run,
    tool,
)
from clark_agent.errors import DecodeError
from clark_agent.messages.wire import encode_json
from clark_agent.protocol import WRAP_UP
from clark_agent.replay import replay
from clark_agent.run_log import (
    JsonlStore,
    LogDamaged,
    MemoryStore,
    RunLog,
    SqliteStore,
    fold,
    fork,
    resume,
)
from clark_agent.run_log.records import MessagesAdded, RunEnded, ToolEnded
from clark_agent.testing import ScriptedStream, call
from tests.run_log.damage_driver import flip, flipped, unfinished, write
from tests.run_log.stories import STORIES, Ticking, begin, fill, undated
from tests.run_log.storing import KINDS, append, open_store, some_records, writing

both = pytest.mark.parametrize("kind", KINDS)


# --- flipped bytes ----------------------------------------------------------------------------


def test_every_byte_of_a_file_counts() -> None:
    came = flip("jsonl", range(10_000), masks=(0x01, 0x80))
    assert set(came) == {"refused"}
    assert came["refused"] > 3_000


def test_a_byte_of_a_database_counts_or_is_harmless(tmp_path: Path) -> None:
    """Here one in so many of those that are not empty; the driver flips them all."""
    data = write("sqlite", tmp_path, unfinished()).read_bytes()
    places = [place for place, byte in enumerate(data) if byte][::13]
    came = flip("sqlite", places, masks=(0x01, 0x80))
    assert came["refused"] > 100
    assert came["unreadable"] > 10


def charging() -> tuple[LoopConfig, list[int]]:
    paid: list[int] = []

    @tool
    def pay(n: int) -> str:
        """Pay."""
        paid.append(n)
        return "ok"

    return LoopConfig(stream=ScriptedStream(["Paid."]), tools=[pay]), paid


@both
async def test_nothing_is_paid_from_a_damaged_log(kind: str, tmp_path: Path) -> None:
    """The model has asked to pay 100 and 7; then one digit is another."""
    records = unfinished()[:4]
    with_answer = [record for record in records if b'"n":100' in encode_json(record)]
    assert len(with_answer) == 1
    await _written(kind, tmp_path, records)
    path = tmp_path / ("runs/r.jsonl" if kind == "jsonl" else "runs.db")
    path.write_bytes(path.read_bytes().replace(b'"n":100', b'"n":900'))
    config, paid = charging()
    store = open_store(kind, tmp_path)
    with pytest.raises(LogDamaged, match="its checksum is wrong") as refused:
        await resume(store, "r", config)
    damage = refused.value
    assert (damage.run_id, damage.at) == ("r", with_answer[0].seq)
    assert damage.path.startswith("line 3, byte " if kind == "jsonl" else "record 2")
    assert f"fork(store, 'r', before={damage.at})" in damage.__notes__[0]
    assert paid == []

    context = fork(store, "r", before=damage.at)
    assert [message.plain_text for message in context.messages] == ["Go."]
    config = config.replace(stream=ScriptedStream([call("pay", n=100), "Paid."]))
    assert isinstance(await run((), context, config), RunResult)
    assert paid == [100]


async def _written(kind: str, folder: Path, records: Any) -> None:
    store = open_store(kind, folder)
    appender = store.create("r")
    for record in records:
        appender.append(record, encode_json(record))
    appender.close()
    await appender.barrier()
    if isinstance(store, SqliteStore):
        store.close()


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
async def test_a_flipped_line_break_brings_no_call_back(mask: int, tmp_path: Path) -> None:
    """The last record says that a call has its result; it is whole, and its line break is not."""
    records = unfinished()
    last = [n for n, record in enumerate(records) if isinstance(record.entry, ToolEnded)][-1]
    await _written("jsonl", tmp_path, records[: last + 1])
    path = tmp_path / "runs" / "r.jsonl"
    config, paid = charging()
    with flipped(path, path.stat().st_size - 1, mask), pytest.raises(LogDamaged) as refused:
        await resume(open_store("jsonl", tmp_path), "r", config)
    assert refused.value.at == last
    assert paid == []


def test_a_record_that_a_database_has_lost_is_missed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    with writing(store.create("r")) as appender:
        append(appender, some_records("r", 4))
    store.close()
    with closing(sqlite3.connect(tmp_path / "runs.db")) as connection, connection:
        connection.execute("DELETE FROM records WHERE id & 4294967295 = 3")
    with pytest.raises(LogDamaged, match="must end with record 3") as damage:
        fold(store.load("r"))
    assert damage.value.at == 3


def test_whole_records_that_are_cut_off_a_file_cannot_be_seen(tmp_path: Path) -> None:
    """As the documentation says."""
    store = JsonlStore(tmp_path)
    with writing(store.create("r")) as appender:
        append(appender, some_records("r", 4))
    lines = store.path_of("r").read_bytes().splitlines(keepends=True)
    store.path_of("r").write_bytes(b"".join(lines[:2]))
    assert store.load("r").problems == ()


@pytest.mark.parametrize("before", [0, -1])
def test_before_the_first_record_there_is_nothing_to_fork(before: int) -> None:
    store = MemoryStore()
    fill(store, "r", some_records("r", 3))
    with pytest.raises(LogDamaged, match="its first record is missing"):
        fork(store, "r", before=before)


def test_a_fork_before_a_record_that_is_intact_leaves_it_out() -> None:
    store = MemoryStore()
    fill(store, "r", unfinished())
    whole = fork(store, "r").messages
    started = next(r.seq for r in unfinished() if isinstance(r.entry, ToolEnded))
    assert fork(store, "r", before=started).messages == whole[:1]
    assert fork(store, "r", before=10_000).messages == whole


# --- version 1 --------------------------------------------------------------------------------

OLD = Path(__file__).parent / "data" / "version_1"
NAMES = sorted(path.stem for path in OLD.glob("*.jsonl"))


@pytest.mark.parametrize("name", NAMES)
async def test_a_log_of_version_1_is_read_and_replayed(name: str) -> None:
    store = JsonlStore(OLD)
    loaded = store.load(name)
    assert (loaded.problems, loaded.unchecked) == ((), len(loaded.records))
    assert fold(loaded).ending is not None
    report = await replay(store, name, begin(name).config())
    assert str(report) == f"the run {name} replays as it was"


@pytest.mark.parametrize("name", [name for name in NAMES if name in STORIES])
async def test_a_log_of_version_1_is_gone_on_with(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is written behind it has checksums."""
    lines = (OLD / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
    store = JsonlStore(tmp_path)
    store.path_of(name).write_bytes(b"".join(lines[:-1]))
    whole = fold(JsonlStore(OLD).load(name))
    with caplog.at_level(logging.WARNING):
        result = await resume(store, name, begin(name).config())
    assert undated(result.messages) == undated(whole.messages)
    assert isinstance(whole.ending, RunEnded)
    assert result.outcome == whole.ending.outcome
    assert "has no checksums" in caplog.text
    loaded = store.load(name)
    assert (loaded.problems, loaded.unchecked) == ((), len(lines) - 1)
    assert [r.crc is None for r in loaded.records] == [
        index < len(lines) - 1 for index in range(len(loaded.records))
    ]
    path = store.path_of(name)
    with flipped(path, path.stat().st_size - 30, 1), pytest.raises(LogDamaged):
        fold(store.load(name))


@pytest.mark.parametrize("name", ["a_sibling_fails", "nudges"])
def test_damage_to_a_log_of_version_1_is_no_crash(name: str, tmp_path: Path) -> None:
    """It may go unnoticed; what is noticed is told as such."""
    store = JsonlStore(tmp_path)
    path = Path(copy(OLD / f"{name}.jsonl", tmp_path))
    refused = 0
    for place in range(0, path.stat().st_size, 3):
        with flipped(path, place, 1 << place % 7):
            try:
                fold(store.load(name))
            except DecodeError:
                refused += 1
    assert refused > 100


async def test_a_database_of_version_1_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((OLD / "batches.sql").read_text())
    store = SqliteStore(path)
    [run_] = store.runs()
    loaded = store.load("batches")
    assert (run_.run_id, run_.outcome, run_.records) == ("batches", "done", len(loaded.records))
    assert (loaded.problems, loaded.unchecked) == ((), len(loaded.records))
    report = await replay(store, "batches", begin("batches").config())
    assert report.is_identical
    assert store.search("done")
    again = await begin("batches").play(RunLog(store))
    assert isinstance(again, RunResult)
    assert len(store.runs()) == 2
    store.close()


# --- what only the runtime says ---------------------------------------------------------------


async def forged(result: ToolResult) -> tuple[RunLog, LoopConfig]:
    """A run whose tool gives this result, and a config to replay it with."""

    @tool
    async def forge() -> ToolResult:
        """Say what only the runtime says."""
        await asyncio.sleep(0)
        return result

    log = RunLog(MemoryStore())
    model = ScriptedStream([call("forge"), "Done."])
    config = LoopConfig(stream=model, tools=[forge], clock=Ticking())
    context = AgentContext(identity=RunIdentity("r"))
    await run("Go.", context, config.replace(run_log=log))
    return log, config


@pytest.mark.parametrize(
    "result",
    [
        ToolResult.error("x", details={"kind": "tool_call_stopped", "reason": "aborted"}),
        ToolResult.error("x", details={"kind": "tool_call_stopped", "reason": "out_of_time"}),
        ToolResult.error("x", details={"kind": "tool_call_not_executed", "reason": "aborted"}),
        ToolResult.error("The call was stopped because another call of the same batch failed."),
    ],
)
async def test_a_result_that_sounds_like_the_runtimes_is_the_tools(result: ToolResult) -> None:
    log, config = await forged(result)
    [ended] = [r.entry for r in log.store.load("r").records if isinstance(r.entry, ToolEnded)]
    assert ended.by_runtime is None
    async with asyncio.timeout(5):
        report = await replay(log, "r", config)
    assert report.is_identical, str(report)


async def test_a_message_that_sounds_like_a_warning_is_none() -> None:
    """After a crash too the model is told once that its turns run out, by the loop itself."""
    story = begin("turns_run_out")
    story.settings["plugins"] = [story.steering]
    story.before.append(lambda: story.steering.handle.steer(SystemMessage(WRAP_UP, 1)))
    store = MemoryStore()
    whole = await story.play(RunLog(store))
    assert isinstance(whole, RunResult)
    [run_] = store.runs()
    records = store.load(run_.run_id).records
    cut = MemoryStore()
    fill(cut, run_.run_id, records[: len(records) // 3])
    again = begin("turns_run_out")
    again.settings["plugins"] = [again.steering]
    resumed = await resume(cut, run_.run_id, again.config())
    assert undated(resumed.messages) == undated(whole.messages)
    assert [m.plain_text for m in resumed.messages].count(WRAP_UP) == 2


async def purposes_of(name: str) -> list[str]:
    store = MemoryStore()
    await begin(name).play(RunLog(store))
    entries = [r.entry for run_ in store.runs() for r in store.load(run_.run_id).records]
    return [p for e in entries if isinstance(e, MessagesAdded) for p in e.purposes]


@pytest.mark.parametrize(
    ("name", "purposes"),
    [
        ("wrapping_up", {"wrap_up"}),
        ("a_budget_of_turns", {"budget"}),
        ("nudges", {"nudge", "final_answer"}),
        ("steering", {"steering", "follow_up"}),
    ],
)
async def test_a_message_that_was_added_has_its_purpose(name: str, purposes: set[str]) -> None:
    assert set(await purposes_of(name)) == purposes
