"""Large results in a log: once, beside the records; the same after a crash, in a replay, a fork."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    AgentContext,
    CancellationToken,
    FunctionPlugin,
    LoopConfig,
    RunAborted,
    RunIdentity,
    RunResult,
    TextContent,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    run,
    run_continue,
    tool,
)
from clark_agent._kept_text import pack
from clark_agent.events import ToolExecutionEnd
from clark_agent.messages.wire import encode_json
from clark_agent.plugins import LargeResults
from clark_agent.plugins.large_results import KEPT_IN_MEMORY
from clark_agent.replay import assert_replays, replay
from clark_agent.run_log import (
    JsonlStore,
    MemoryStore,
    RunLog,
    RunStoreError,
    SqliteStore,
    diff,
    fork,
    kept_result,
    resume,
)
from clark_agent.run_log.memory import MemoryAppender
from clark_agent.run_log.records import Record, ToolEnded
from clark_agent.testing import RecordingSink, call, say
from tests.run_log.stories import Model, copy_of

TEXT = "".join([f"line {n} – 字😀\n" for n in range(6_000)])
OTHER = "".join([f"other {n}\n" for n in range(9_000)])
STORES = ("memory", "jsonl", "sqlite")


def open_kind(kind: str, folder: Path) -> Any:
    match kind:
        case "memory":
            return MemoryStore()
        case "jsonl":
            return JsonlStore(folder)
        case _:
            return SqliteStore(folder / "runs.db")


class Config:
    """A run that gets two large results at once, and reads one after the other."""

    def __init__(
        self,
        run_id: str = "r",
        *,
        redacts: bool = False,
        reads: str = "",
        text: str = TEXT,
        folder: Path | None = None,
    ) -> None:
        self.text = text
        self.folder = folder
        self.got: list[str] = []
        self.sink = RecordingSink()
        self.run_id = run_id
        self.redacts = redacts
        self.source = reads or run_id

    def config(self, log: RunLog | None = None, **settings: Any) -> LoopConfig:
        got, text = self.got, self.text

        @tool(idempotent=True)
        async def first() -> list[TextContent]:
            """Gets the first."""
            got.append("first")
            return [TextContent(text[:70_000]), TextContent(text[70_000:])]

        @tool(idempotent=True)
        def second() -> str:
            """Gets the second."""
            got.append("second")
            return OTHER

        def redact(ctx: AfterToolCallContext) -> AfterToolDecision | None:
            text = ctx.result.plain_text
            if "line 7 " not in text:
                return None
            return AfterToolDecision(ToolResult.text(text.replace("line 7 ", "line # ")))

        plugins: list[Any] = [LargeResults(folder=self.folder)]
        if self.redacts:
            plugins.append(FunctionPlugin("after_tool_call", redact, name="redact"))
        model = Model(
            [call("first"), call("second")],
            call("read_result", id=f"{self.source}/1-0", start=60_000, end=80_000),
            call("read_result", id=f"{self.source}/1-1", search="OTHER 4711"),
            say("done"),
        )
        given = {"stream": model, "event_sink": self.sink, "run_log": log, **settings}
        return LoopConfig(tools=[first, second], plugins=plugins, **given)

    async def play(self, store: Any, **settings: Any) -> RunResult:
        context = AgentContext("", identity=RunIdentity(self.run_id))
        return await run("Go on.", context, self.config(RunLog(store), **settings))


def ended(records: Sequence[Record]) -> list[ToolEnded]:
    return [record.entry for record in records if isinstance(record.entry, ToolEnded)]


def texts(result: RunResult) -> list[str]:
    return [m.plain_text for m in result.messages if isinstance(m, ToolResultMessage)]


def kept(store: Any, run_id: str, name: str) -> str:
    return kept_result(store, f"{run_id}/{name}")


@pytest.mark.parametrize("kind", STORES)
async def test_the_log_has_a_large_result_once_and_the_model_reads_it(
    kind: str, tmp_path: Path
) -> None:
    store = open_kind(kind, tmp_path)
    result = await Config("once").play(store)
    first, second, page, found = texts(result)
    assert first.startswith("line 0 –")
    assert second.endswith("other 8999\n")
    assert page.partition("\n")[2] == TEXT[60_000:80_000]
    assert f"character {OTHER.index('other 4711')} (line 4712)" in found
    assert kept(store, "once", "1-0") == TEXT
    assert kept(store, "once", "1-1") == OTHER
    records = store.load("once").records
    assert sum([len(encode_json(record)) for record in records]) < 90_000  # two pages, four ends
    one = next(e for e in ended(records) if e.position == 0)
    assert one.kept is not None
    assert (one.kept.name, one.kept.texts) == ("1-0", (70_000, len(TEXT) - 70_000))
    assert one.given == ToolResult((TextContent(""), TextContent("")))
    assert not KEPT_IN_MEMORY.kept("once", "1-0", 0, 1)
    for wrong in ("once/1-2", "twice/1-0", "../once/1-0", "once", ""):
        with pytest.raises(RunStoreError, match="has no large result"):
            kept_result(store, wrong)


@pytest.mark.parametrize("redacts", [False, True])
@pytest.mark.parametrize("kind", STORES)
async def test_a_replay_is_identical_and_keeps_the_same(
    kind: str, redacts: bool, tmp_path: Path
) -> None:
    store = open_kind(kind, tmp_path)
    played = Config(redacts=redacts)
    result = await played.play(store)
    again = Config(redacts=redacts)
    report = await replay(store, "r", again.config())
    assert str(report.drift) == "None"
    assert again.got == []
    assert report.result is not None
    assert report.result.messages == result.messages
    assert list(map(encode_json, again.sink.events)) == list(map(encode_json, played.sink.events))
    one = next(e for e in ended(store.load("r").records) if e.position == 0)
    assert one.given is not None
    if redacts:  # what the tool returned is another text, so the record has it
        assert one.given.plain_text == TEXT
        assert "line 7 " not in kept(store, "r", "1-0")
    if kind == "jsonl":
        report = assert_replays(store.path_of("r"), Config(redacts=redacts).config())


async def test_a_run_resumed_behind_every_record_ends_with_the_same_texts() -> None:
    store = MemoryStore()
    result = await Config().play(store)
    loaded = store.load("r")
    for length in range(1, len(loaded.records)):
        copy = copy_of(store, "r", length)
        # A crash may come before or after a result is kept; then it is there, and nobody has it.
        for name in ("1-0", "1-1"):
            copy._kept.setdefault("r", {})[name] = store._kept["r"][name]
        again = Config()
        async with asyncio.timeout(10):
            resumed = await resume(copy, "r", again.config())
        assert texts(resumed)[-4:] == texts(result)[-4:], length
        assert kept(copy, "r", "1-0") == TEXT
        replayed = Config()
        report = await replay(copy, "r", replayed.config())
        assert str(report.drift) == "None", length
        assert replayed.got == []


@pytest.mark.parametrize("kind", STORES)
async def test_a_fork_reads_what_the_run_before_has_kept(kind: str, tmp_path: Path) -> None:
    store = open_kind(kind, tmp_path)
    await Config().play(store)
    forked = Config(reads="r")
    context = fork(store, "r", turn=1)
    result = await run_continue(context, forked.config(RunLog(store)))
    page, found = texts(result)
    assert forked.got == []
    assert page.partition("\n")[2] == TEXT[60_000:80_000]
    assert "1 place" in found


async def test_runs_with_other_results_differ_and_those_with_the_same_do_not() -> None:
    store = MemoryStore()
    await Config("r").play(store)
    await Config("s").play(store)
    assert diff(store, "r", "s") is None
    await Config("t", redacts=True).play(store)
    found = diff(store, "r", "t")
    assert found is not None
    assert found.kind == "tool_ended"
    await Config("u", text=TEXT[:40_000] + "another middle" + TEXT[40_014:]).play(store)
    found = diff(store, "r", "u")
    assert found is not None
    assert found.path == "given.content[0].text"


async def test_a_replay_leaves_nothing_in_a_folder(tmp_path: Path) -> None:
    store, played = MemoryStore(), Config(folder=tmp_path / "kept")
    result = await played.play(store)
    assert not store._kept["r"]
    names = sorted(path.name.rpartition(".")[0] for path in (tmp_path / "kept" / "r").iterdir())
    assert names == ["1-0", "1-1"]
    report = await replay(store, "r", Config(folder=tmp_path / "other").config())
    assert str(report.drift) == "None"
    assert report.result is not None
    assert report.result.messages == result.messages
    assert not (tmp_path / "other").exists()


async def test_the_results_of_another_run_in_the_store_cannot_be_read() -> None:
    store = MemoryStore()
    await Config("r").play(store)
    thief = Config("thief", reads="r")
    result = await thief.play(store)
    _, _, page, found = texts(result)
    for answer in (page, found):
        assert answer.startswith("there is no result with the id 'r/1-")


# --- stores that fail -----------------------------------------------------------------------------


class FullAppender(MemoryAppender):
    def keep(self, name: str, pieces: Sequence[bytes]) -> None:
        raise OSError(28, "No space left on device")


class Full(MemoryStore):
    """Has no room for results."""

    def create(self, run_id: str) -> MemoryAppender:
        appender = super().create(run_id)
        appender.__class__ = FullAppender
        return appender


class Old:
    """A store that keeps no results."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        for name in ("load", "runs", "tail", "post", "mail", "publish", "reopen"):
            setattr(self, name, getattr(self.inner, name))

    def create(self, run_id: str) -> Any:
        inner = self.inner.create(run_id)

        class Appender:
            append = staticmethod(inner.append)
            flush = staticmethod(inner.flush)
            barrier = staticmethod(inner.barrier)
            close = staticmethod(inner.close)

        return Appender()


@pytest.mark.parametrize("make", [Full, Old])
async def test_a_result_that_the_store_cannot_keep_is_not_lost(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = make()
    caplog.set_level(logging.WARNING)
    played = Config(make.__name__)
    result = await played.play(store)
    _, _, page, _ = texts(result)
    assert page.partition("\n")[2] == TEXT[60_000:80_000]
    one = next(e for e in ended(store.load(played.run_id).records) if e.position == 0)
    assert one.kept is None
    assert one.given is not None
    assert one.given.plain_text == TEXT  # so the record has it
    if make is Old:
        assert caplog.text.count("has no methods keep and kept: large results stay in the") == 1
        report = await replay(store, played.run_id, Config(played.run_id).config())
        assert str(report.drift) == "None"
    else:
        assert "could not be kept in its log" in caplog.text


async def test_a_run_whose_log_may_be_lost_keeps_its_results_in_memory_too() -> None:
    config = Config("may be lost")
    log = RunLog(MemoryStore(), on_failure="drop")
    context = AgentContext("", identity=RunIdentity(config.run_id))
    await run("Go on.", context, config.config(log))
    assert KEPT_IN_MEMORY.kept(config.run_id, "1-0", 0, 1)


async def test_results_that_were_deleted_are_missed_and_a_replay_does_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    result = await Config().play(store)
    store._kept.clear()
    report = await replay(store, "r", Config().config())
    assert report.result is not None
    assert texts(report.result) == texts(result)
    assert "is not in the store" in caplog.text


async def test_a_replay_notices_a_result_that_is_not_what_was_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    result = await Config().play(store)
    store._kept["r"]["1-0"] = tuple(pack("x" * len(TEXT)))  # intact, but another text
    report = await replay(store, "r", Config().config())
    assert report.result is not None
    assert texts(report.result) == texts(result)
    assert "r/1-0 cannot be read: it is not what the record says" in caplog.text


async def test_a_copied_log_without_its_large_results_says_what_to_copy(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path / "runs")
    await Config(redacts=True).play(store)
    (tmp_path / "tests").mkdir()
    copied = tmp_path / "tests" / "umbrella.jsonl"
    copied.write_bytes(store.path_of("r").read_bytes())
    with pytest.raises(AssertionError, match=r"copy the folder r\.kept to .*tests.r\.kept as well"):
        assert_replays(copied, Config().config())
    shutil.copytree(tmp_path / "runs" / "r.kept", tmp_path / "tests" / "r.kept")
    assert_replays(copied, Config(redacts=True).config())


# --- other endings --------------------------------------------------------------------------------


async def test_the_result_of_a_call_in_a_run_that_is_cancelled_is_kept() -> None:
    store, signal = MemoryStore(), CancellationToken()

    @tool
    async def large() -> str:
        """Returns while the run is being cancelled."""
        signal.cancel("enough")
        return TEXT

    @tool
    async def stops(ctx: ToolContext) -> str:
        """Returns once it is cancelled."""
        await ctx.signal.wait()
        return OTHER

    sink = RecordingSink()
    config = LoopConfig(
        stream=Model([call("stops"), call("large")], say("never")),
        tools=[stops, large],
        plugins=[LargeResults()],
        run_log=RunLog(store),
        event_sink=sink,
    )
    with pytest.raises(RunAborted) as raised:
        await run("Go on.", AgentContext("", identity=RunIdentity("r")), config, signal)
    ends = [event for event in sink.events if isinstance(event, ToolExecutionEnd)]
    assert len(ends) == 2
    assert all(len(end.result.plain_text) < 11_000 for end in ends)
    got = [m for m in raised.value.messages if isinstance(m, ToolResultMessage)]
    assert "id r/1-1]" in got[1].plain_text
    assert kept(store, "r", "1-1") == TEXT


async def test_details_of_the_host_stay_as_they_are() -> None:
    store = MemoryStore()

    @tool
    def large() -> ToolResult:
        """Gets it."""
        return replace(ToolResult.text(TEXT), details=["its own", 1])

    config = LoopConfig(
        stream=Model(call("large"), call("read_result", id="r/1-0", end=10), say("done")),
        tools=[large],
        plugins=[LargeResults()],
        run_log=RunLog(store),
    )
    result = await run("Go on.", AgentContext("", identity=RunIdentity("r")), config)
    got, read = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    assert got.details == ["its own", 1]
    assert read.plain_text.endswith(f"\n{TEXT[:10]}")
    report = await replay(store, "r", config)
    assert str(report.drift) == "None"
