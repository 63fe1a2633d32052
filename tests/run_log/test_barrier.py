"""Waiting for a store: no event loop stands still, and nothing begins before its record is kept."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from clark_agent import (
    AgentContext,
    AgentEvent,
    AgentTool,
    AssistantMessage,
    CancellationToken,
    ChannelSteering,
    LoopConfig,
    LoopError,
    RunAborted,
    RunIdentity,
    RunResult,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    UserMessage,
    agent_tool,
    run,
    run_child,
    tool,
)
from clark_agent.errors import RunLogError
from clark_agent.events import AgentEnd, AgentStart, ProviderRequestPrepared, ToolExecutionStart
from clark_agent.messages.wire import encode_json
from clark_agent.replay import replay
from clark_agent.run_log import (
    MemoryStore,
    RunAppender,
    RunBusy,
    RunExists,
    RunLog,
    RunStoreError,
    SqliteStore,
    _database,
    fold,
    resume,
)
from clark_agent.run_log.records import (
    Record,
    RunEnded,
    RunFailed,
    SteeringAccepted,
    ToolEnded,
    ToolStarted,
)
from clark_agent.testing import RecordingSink, ScriptedStream, call, check_events
from tests.run_log.storing import child, some_records


class Held:
    """Another connection to a database, which holds its write lock when told to."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)

    def take(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")

    def release(self) -> None:
        self.connection.execute("COMMIT")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(tmp_path / "runs.db")
    list(made.runs())
    with closing(made):
        yield made


@pytest.fixture
def other(store: SqliteStore, tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path / "runs.db")
    with closing(held.connection):
        yield held


async def ticks(count: int = 50) -> None:
    """The event loop goes round so often."""
    for _ in range(count):
        await asyncio.sleep(0.001)


def entries(store: Any, run_id: str, *kinds: type) -> list[Any]:
    return [r.entry for r in store.load(run_id).records if isinstance(r.entry, kinds)]


class Story:
    """A run whose first call takes the write lock, so that its second has to wait."""

    def __init__(self, store: SqliteStore, other: Held, *, at_once: bool = False) -> None:
        self.ran: list[str] = []

        @tool
        async def locks() -> str:
            """Take the lock."""
            other.take()
            self.ran.append("locks")
            return "locked"

        @tool
        async def acts(n: int = 0) -> str:
            """Act."""
            self.ran.append(f"acts {n}")
            return "done"

        calls = [call("acts", n=n) for n in range(2 if at_once else 1)]
        self.config = LoopConfig(
            stream=ScriptedStream([call("locks"), calls, "Done."]),
            tools=[locks, acts],
            run_log=RunLog(store),
            cancel_grace=0.05,
        )
        self.context = AgentContext(identity=RunIdentity("r"))
        self.signal = CancellationToken()

    def start(self) -> asyncio.Task[RunResult]:
        return asyncio.create_task(run("Go.", self.context, self.config, self.signal))


async def test_the_loop_goes_round_while_another_process_writes(
    store: SqliteStore, other: Held
) -> None:
    story = Story(store, other)
    task = story.start()
    await ticks()
    assert story.ran == ["locks"]
    assert not task.done()
    other.release()
    assert (await task).text == "Done."
    assert story.ran == ["locks", "acts 0"]
    assert len(entries(store, "r", ToolStarted, ToolEnded, RunEnded)) == 5


async def test_a_run_begins_and_ends_while_another_process_writes(
    store: SqliteStore, other: Held
) -> None:
    """Its beginning, its end and its resumption are waited for in the same way."""
    other.take()
    config = LoopConfig(stream=ScriptedStream(["Hello."]), run_log=RunLog(store))
    task = asyncio.create_task(run("Go.", AgentContext(identity=RunIdentity("r")), config))
    await ticks()
    assert not task.done()
    assert store.runs() == []  # and reading is never held up
    other.release()
    assert (await task).text == "Hello."
    assert isinstance(store.load("r").records[-1].entry, RunEnded)
    other.take()  # all is written: nobody waits any more
    store.reopen("r", after=store.load("r").records[-1].seq).close()
    other.release()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("how", ["token", "task"])
async def test_a_call_whose_record_was_not_reached_does_not_start(
    store: SqliteStore, other: Held, how: str, at_once: bool
) -> None:
    story = Story(store, other, at_once=at_once)
    task = story.start()
    await ticks()
    if how == "token":
        story.signal.cancel("enough")
        with pytest.raises(RunAborted) as aborted:
            await task
        results = [m for m in aborted.value.messages if isinstance(m, ToolResultMessage)][1:]
        texts = ["The call was not run: the run was stopped before it started."] * len(results)
        assert [result.plain_text for result in results] == texts
        assert len(results) == (2 if at_once else 1)
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert story.ran == ["locks"]
    with pytest.raises(RunBusy):  # until its end is written
        store.reopen("r", after=store.load("r").records[-1].seq)
    other.release()
    await reopened(store)
    folded = fold(store.load("r"))
    assert isinstance(folded.ending, RunFailed)
    ended = entries(store, "r", ToolEnded)
    assert [e.by_runtime.reason for e in ended[1:]] == ["aborted"] * len(ended[1:])
    config = story.config.replace(stream=ScriptedStream(["Went on."]))
    assert (await resume(store, "r", config)).text == "Went on."
    assert story.ran == ["locks"]


async def reopened(store: SqliteStore) -> None:
    """Wait until the run's log is free."""
    while True:
        try:
            store.reopen("r", after=store.load("r").records[-1].seq).close()
        except RunBusy:
            await asyncio.sleep(0.001)
        else:
            return


async def test_steering_now_reaches_a_call_that_waits_for_its_record(
    store: SqliteStore, other: Held
) -> None:
    story = Story(store, other)
    steering = ChannelSteering()
    story.config = story.config.replace(
        plugins=[steering],
        stream=ScriptedStream([call("locks"), call("acts"), "As you wish."]),
    )
    task = story.start()
    await ticks()
    _ = steering.handle.steer("Stop!", "now")
    other.release()
    assert (await task).text == "As you wish."
    assert story.ran == ["locks"]
    assert entries(store, "r", ToolEnded)[1].by_runtime.reason == "steered"


async def test_runs_that_wait_are_committed_together(
    store: SqliteStore, other: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[str] = []
    connect = sqlite3.connect

    def overheard(*arguments: Any, **settings: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **settings)
        connection.set_trace_callback(lambda sql: commits.extend(["x"] * ("IMMEDIATE" in sql)))
        return connection

    monkeypatch.setattr(sqlite3, "connect", overheard)
    other.take()
    config = LoopConfig(stream=ScriptedStream(["Hello."] * 20), run_log=RunLog(store))
    contexts = [AgentContext(identity=RunIdentity(f"r{n}")) for n in range(20)]
    tasks = [asyncio.create_task(run("Go.", context, config)) for context in contexts]
    await ticks()
    assert len(commits) == 1  # some wait for it, the others wait behind them
    other.release()
    await asyncio.gather(*tasks)
    assert {run_.outcome for run_ in store.runs()} == {"done"}
    assert len(commits) < 12  # forty, if each came alone


async def test_a_record_that_cannot_be_written_does_not_stop_other_runs(
    store: SqliteStore, other: Held
) -> None:
    """They were about to be committed together."""
    good, bad = store.create("good"), store.create("bad")
    records = some_records("bad", 2)
    other.take()
    for appender, name in ((bad, "bad"), (good, "good")):
        for record in some_records(name, 2):
            appender.append(record, encode_json(record))
    bad.append(records[1], encode_json(records[1]))  # its number once more
    waiting = [asyncio.ensure_future(appender.barrier()) for appender in (good, bad)]
    await ticks(5)
    other.release()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert outcomes[0] is None
    assert "UNIQUE" in str(outcomes[1])
    assert len(store.load("good").records) == 2
    good.close()
    bad.close()


async def test_a_database_that_stays_locked_fails_the_run(
    store: SqliteStore, other: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_database, "_PATIENCE", 0.01)
    store.close()
    story = Story(store, other)
    with pytest.raises(RunLogError, match="locked") as failure:
        await story.start()
    assert isinstance(failure.value.__cause__, RunStoreError)
    assert story.ran == ["locks"]
    other.release()
    assert len(entries(store, "r", ToolStarted)) >= 1


async def test_what_was_closed_is_free_when_it_is_written(store: SqliteStore, other: Held) -> None:
    appender = store.create("r")
    records = some_records("r", 3)
    for record in records[:2]:
        appender.append(record, encode_json(record))
    await appender.barrier()
    other.take()
    appender.append(records[2], encode_json(records[2]))
    appender.close()
    with pytest.raises(RunBusy):
        store.reopen("r", after=1)
    waiting = asyncio.ensure_future(appender.barrier())
    await ticks(5)
    assert not waiting.done()
    other.release()
    await waiting
    assert store.load("r").records == tuple(records)
    store.reopen("r", after=2).close()


def test_a_store_that_is_closed_has_written_everything(store: SqliteStore) -> None:
    """Also what nobody has waited for; and so has one whose process ends."""
    appender = store.create("r")
    records = some_records("r", 3)
    for record in records:
        appender.append(record, encode_json(record))
    appender.close()
    store.close()
    assert SqliteStore(store._path).load("r").records == tuple(records)


@pytest.mark.slow
def test_a_process_that_ends_has_written_everything(tmp_path: Path) -> None:
    with child("end_at_once", tmp_path) as process:
        assert process.wait() == 0
    assert len(SqliteStore(tmp_path / "runs.db").load("r").records) == 3


# --- any store ------------------------------------------------------------------------------------


class Slow(MemoryStore):
    """A store far away: it takes until ``open`` is set, and says what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()
        self.failure: Exception | None = None

    def create(self, run_id: str) -> Any:
        return SlowAppender(super().create(run_id), self)


class SlowAppender:
    def __init__(self, appender: RunAppender, store: Slow) -> None:
        self._appender = appender
        self._store = store
        self.append = appender.append
        self.close = appender.close

    def flush(self, *, sync: bool) -> None:
        """It is all done in the barrier."""

    async def barrier(self) -> None:
        await self._store.open.wait()
        if self._store.failure is not None:
            raise self._store.failure
        await self._appender.barrier()


async def test_a_result_is_not_given_before_its_record_is_kept() -> None:
    store = Slow()

    async def answer(request: Any, signal: Any) -> AsyncIterator[Any]:
        store.open.clear()
        async for event in ScriptedStream(["Hello."])(request, signal):
            yield event

    task = asyncio.create_task(
        run("Go.", AgentContext(), LoopConfig(stream=answer, run_log=RunLog(store)))
    )
    await ticks(5)
    assert not task.done()
    store.open.set()
    assert (await task).text == "Hello."


async def test_a_run_that_is_cancelled_when_it_has_ended_has_ended() -> None:
    """Its result is on its way to the store, and nothing is written behind it."""
    store = Slow()

    async def answer(request: Any, signal: Any) -> AsyncIterator[Any]:
        store.open.clear()
        async for event in ScriptedStream(["Hello."])(request, signal):
            yield event

    config = LoopConfig(stream=answer, run_log=RunLog(store), cancel_grace=0.02)
    context = AgentContext(identity=RunIdentity("r"))
    task = asyncio.create_task(run("Go.", context, config))
    await ticks(5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    assert isinstance(cancelled.value.__cause__, RunAborted)
    assert [m.plain_text for m in cancelled.value.__cause__.messages] == ["Go.", "Hello."]
    assert isinstance(store.load("r").records[-1].entry, RunEnded)


@pytest.mark.parametrize("on_failure", ["fail", "drop"])
async def test_a_store_may_find_out_late_that_a_run_is_taken(on_failure: Any) -> None:
    """Then the first barrier says so, and nobody goes on without a log."""
    store = Slow()
    store.failure = RunExists("r")
    asked: list[object] = []

    async def answer(request: Any, signal: Any) -> AsyncIterator[Any]:
        asked.append(request)
        yield

    config = LoopConfig(stream=answer, run_log=RunLog(store, on_failure=on_failure))
    with pytest.raises(RunLogError) as failure:
        await run("Go.", AgentContext(identity=RunIdentity("r")), config)
    assert isinstance(failure.value.__cause__, RunExists)
    assert asked == []


@pytest.mark.parametrize("on_failure", ["fail", "drop"])
async def test_a_run_that_is_there_is_not_begun_again(on_failure: Any) -> None:
    store = MemoryStore()
    context = AgentContext(identity=RunIdentity("r"))
    for number in range(2):
        config = LoopConfig(
            stream=ScriptedStream(["Hello."]), run_log=RunLog(store, on_failure=on_failure)
        )
        if not number:
            await run("Go.", context, config)
            continue
        with pytest.raises(RunLogError) as failure:
            await run("Go.", context, config)
        assert isinstance(failure.value.__cause__, RunExists)


# --- the runs above -------------------------------------------------------------------------------


class Broken(MemoryStore):
    """A store that takes nothing."""

    def create(self, run_id: str) -> Any:
        appender: Any = super().create(run_id)
        appender.append = self._refuse
        return appender

    def _refuse(self, record: Record, data: bytes) -> None:
        raise OSError(28, "No space left on device")


def a_helper(config: LoopConfig) -> AgentTool:
    return agent_tool("helper", "Helps.", config)


def a_tool_of_the_host(config: LoopConfig) -> AgentTool:
    @tool
    async def helper(task: str, ctx: ToolContext) -> ToolResult:
        """Helps."""
        result = await run_child(ctx, task, config)
        return ToolResult.text(result.text)

    return helper


def a_tool_that_goes_on(config: LoopConfig) -> AgentTool:
    @tool
    async def helper(task: str, ctx: ToolContext) -> ToolResult:
        """Helps."""
        with suppress(LoopError):
            await run_child(ctx, task, config)
        return ToolResult.text("as if nothing had happened")

    return helper


@pytest.mark.parametrize("make", [a_helper, a_tool_of_the_host, a_tool_that_goes_on])
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_child_whose_log_cannot_be_written_ends_the_runs_above(
    make: Callable[[LoopConfig], AgentTool], calls: int
) -> None:
    asked: list[object] = []

    async def answer(request: Any, signal: Any) -> AsyncIterator[Any]:
        asked.append(request)
        async for event in ScriptedStream([[call("helper", task="x")] * calls])(request, signal):
            yield event

    below = LoopConfig(stream=ScriptedStream(["never"]), run_log=RunLog(Broken()))
    store = MemoryStore()
    config = LoopConfig(stream=answer, tools=[make(below)], run_log=RunLog(store))
    with pytest.raises(RunLogError, match=r"helper.*No space left") as failure:
        await run("Go.", AgentContext(identity=RunIdentity("r")), config)
    assert len(asked) == 1
    kinds = [type(message) for message in failure.value.messages]
    assert kinds == [UserMessage, AssistantMessage, *[ToolResultMessage] * calls]
    assert isinstance(store.load("r").records[-1].entry, ToolStarted)
    # An agent that never began is begun when the run goes on. Of another tool nothing is known.
    below = LoopConfig(stream=ScriptedStream(["From below."] * calls))
    config = LoopConfig(stream=ScriptedStream(["So be it."]), tools=[make(below)])
    result = await resume(store, "r", config)
    results = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    kind = "sub_agent" if config.registry["helper"].runs_agent else "tool_call_uncertain"
    assert [m.details["kind"] for m in results] == [kind] * calls
    assert result.text == "So be it."
    assert (await replay(store, "r", config)).is_identical


@pytest.mark.parametrize("kind", [AgentStart, ProviderRequestPrepared, ToolExecutionStart])
@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("by_token", [True, False])
async def test_a_run_that_finds_itself_cancelled_returns_when_its_log_is_kept(
    tmp_path: Path, kind: type[AgentEvent], writers: int, by_token: bool
) -> None:
    """The cancellation arrives in the task a little later: it must not cut the waiting short."""
    store, token = SqliteStore(tmp_path / "runs.db"), CancellationToken()
    others = [store.create(f"other {number}") for number in range(1, writers)]

    def cancel(event: AgentEvent) -> None:
        if isinstance(event, kind) and by_token:
            token.cancel("enough")
        elif isinstance(event, kind):
            running.cancel()

    @tool
    async def work() -> str:
        """Work."""
        return "done"

    config = LoopConfig(
        stream=ScriptedStream([call("work"), "Well."]),
        tools=[work],
        event_sink=cancel,
        run_log=RunLog(store),
    )
    context = AgentContext(identity=RunIdentity.root("r"))
    running = asyncio.ensure_future(run("go", context, config, token))
    with pytest.raises(RunAborted if by_token else asyncio.CancelledError):
        await running
    assert isinstance(store.load("r").records[-1].entry, RunFailed)
    for other in others:
        other.close()


class Late(MemoryStore):
    """Keeps nothing for good before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.may.set()
        self.is_waited_for = asyncio.Event()

    def create(self, run_id: str) -> Any:
        return _LateAppender(super().create(run_id), self)


class _LateAppender:
    def __init__(self, appender: RunAppender, store: Late) -> None:
        self._appender = appender
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._appender, name)

    async def barrier(self) -> None:
        if not self._store.may.is_set():
            self._store.is_waited_for.set()
            await self._store.may.wait()


def late_config(store: Late, kind: type[AgentEvent], *steps: Any, **more: Any) -> LoopConfig:
    """Runs whose store takes its time from an event on."""

    def listen(event: AgentEvent) -> None:
        if isinstance(event, kind):
            store.may.clear()

    return LoopConfig(
        stream=ScriptedStream(steps), event_sink=listen, run_log=RunLog(store), **more
    )


def entries_of(store: MemoryStore) -> list[str]:
    (summary,) = store.runs()
    return [type(record.entry).__name__ for record in store.load(summary.run_id).records]


@pytest.mark.parametrize("how", ["fails", "ends", "is cancelled"])
async def test_steering_while_the_log_is_kept_is_undelivered_and_not_behind_the_end(
    how: str,
) -> None:
    store, steering, token = Late(), ChannelSteering(), CancellationToken()
    step = ValueError("broken") if how == "fails" else "Done."
    config = late_config(store, AgentEnd, step, plugins=[steering])
    if how == "is cancelled":
        token.cancel()
    running = asyncio.ensure_future(run("go", AgentContext(), config, token))
    await store.is_waited_for.wait()
    receipt = steering.handle.steer("too late")
    store.may.set()
    await asyncio.wait([running])
    error = running.exception()
    left = error.undelivered if isinstance(error, LoopError) else running.result().undelivered
    assert [message.plain_text for message in left] == ["too late"]
    assert receipt.status == "expired"
    assert entries_of(store)[-1] == ("RunEnded" if how == "ends" else "RunFailed")


@pytest.mark.parametrize("by_token", [True, False])
async def test_a_failed_run_that_is_cancelled_while_its_log_is_kept_waits_for_it(
    by_token: bool,
) -> None:
    store, token = Late(), CancellationToken()
    config = late_config(store, AgentEnd, ValueError("broken"), cancel_grace=60)
    running = asyncio.ensure_future(run("go", AgentContext(), config, token))
    await store.is_waited_for.wait()
    cancel: Callable[[], object] = token.cancel if by_token else running.cancel
    cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not running.done()
    store.may.set()
    await asyncio.wait([running])


@pytest.mark.parametrize("by_token", [True, False])
async def test_a_run_that_is_cancelled_while_its_log_is_begun_emits_and_keeps_its_prompts(
    by_token: bool,
) -> None:
    store, token, sink = Late(), CancellationToken(), RecordingSink()
    store.may.clear()
    config = LoopConfig(stream=ScriptedStream([]), event_sink=sink, run_log=RunLog(store))
    context = AgentContext(identity=RunIdentity.root("r"))
    running = asyncio.ensure_future(run("go", context, config, token))
    await store.is_waited_for.wait()
    cancel: Callable[[], object] = token.cancel if by_token else running.cancel
    cancel()
    await asyncio.sleep(0)
    store.may.set()
    await asyncio.wait([running])
    if by_token:
        error = running.exception()
        assert isinstance(error, RunAborted)
        assert [message.plain_text for message in error.messages] == ["go"]
    check_events(sink.events)
    first = len(sink.events)
    report = await replay(store, "r", config)
    assert report.is_identical, report
    assert len(sink.events) == 2 * first


async def test_messages_are_recorded_in_the_order_in_which_they_are_delivered() -> None:
    """One from a thread waits for the event loop, one from the loop does not."""
    store, steering = MemoryStore(), ChannelSteering()

    @tool
    async def work() -> str:
        """Steer from a thread, then from here."""
        thread = Thread(target=lambda: steering.handle.steer("from a thread"))
        thread.start()
        thread.join()
        _ = steering.handle.steer("from here")
        return "done"

    config = LoopConfig(
        stream=ScriptedStream([call("work"), "ok"]),
        tools=[work],
        plugins=[steering],
        run_log=RunLog(store),
    )
    result = await run("go", AgentContext(), config)
    delivered = [m.plain_text for m in result.messages if isinstance(m, UserMessage)]
    assert delivered == ["go", "from a thread", "from here"]
    (summary,) = store.runs()
    entries = [record.entry for record in store.load(summary.run_id).records]
    accepted = [e.message.plain_text for e in entries if isinstance(e, SteeringAccepted)]
    assert accepted == ["from a thread", "from here"]
    assert (await replay(store, summary.run_id, config)).is_identical
