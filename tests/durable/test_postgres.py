"""PostgresStore: the rules of a store, leases, takeovers, a database that goes away, and search."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest
from msgspec.structs import replace

from clark_agent import (
    Agent,
    AgentContext,
    AssistantMessage,
    CancellationToken,
    ConfigError,
    LoopConfig,
    LoopOutcome,
    RunAborted,
    RunIdentity,
    RunResult,
    Suspend,
    ToolContext,
    ToolResultMessage,
    UserMessage,
    agent_tool,
    run,
    run_child,
    tool,
)
from clark_agent.cancellation import LET_GO
from clark_agent.errors import (
    AlreadyDecided,
    RunBusy,
    RunExists,
    RunLetGo,
    RunNotFound,
    RunStoreError,
    RunTakenOver,
)
from clark_agent.events import AgentEnd, MessageUpdate
from clark_agent.replay import replay
from clark_agent.run_log import (
    Allow,
    RunLog,
    advance,
    cancel,
    decide,
    deliver,
    fold,
    follow,
    ready_runs,
    resume,
    steer,
    waiting_for,
)
from clark_agent.run_log._postgres.writing import Appender, GroupWriter
from clark_agent.run_log.follow import FollowedEvent
from clark_agent.run_log.postgres import PostgresStore
from clark_agent.run_log.records import RunBegan, RunFailed, ToolEnded
from clark_agent.run_log.store import RunAppender
from clark_agent.stream import Chunk, Done, Start, StreamEvent, StreamRequest, TextChunk
from clark_agent.testing import ScriptedStream, call
from clark_agent.testing.store_kit import check_run_store
from tests.durable.servers import Postgres
from tests.run_log.storing import append, close, last_of, numbered, said, some_records

pytestmark = pytest.mark.slow


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.ms = 1_800_000_000_000
        self._ids = 0

    def now_ms(self) -> int:
        return self.ms

    async def sleep(self, seconds: float) -> None:
        self.ms += round(seconds * 1000)

    def new_id(self) -> str:
        self._ids += 1
        return f"id-{self._ids}"


Open = Callable[..., PostgresStore]


def wait_for_first_beat(store: PostgresStore) -> None:
    """Wait until the thread of a store has renewed the lease, before the clock is moved."""
    while not store._parts.keeper.is_listening:
        time.sleep(0.005)


@pytest.fixture
def open_store(postgres_url: str) -> Iterator[Open]:
    """Stores on one database, each like that of another process, closed in the end."""
    with ExitStack() as stack:

        def make(**settings: Any) -> PostgresStore:
            store = PostgresStore(postgres_url, **settings)
            stack.callback(store.close)
            return store

        yield make


def identity(run_id: str = "r") -> AgentContext:
    return AgentContext(identity=RunIdentity.root(run_id))


class Gate:
    """Holds back every call of ``pay``."""

    name = "gate"

    def __init__(self, **how: Any) -> None:
        self.how = how

    def on_before_tool_call(self, ctx: Any) -> Suspend | None:
        return Suspend({"may I": ctx.args}, **self.how) if ctx.tool_call.name == "pay" else None


def payer(paid: list[int], *answers: Any, **settings: Any) -> Agent[str, Any]:
    @tool
    async def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    settings.setdefault("plugins", [Gate()])
    return Agent(ScriptedStream([*answers]), name="payer", tools=[pay], **settings)


# --- a store ----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_groups", [True, False])
def test_it_keeps_the_rules_of_a_store(open_store: Open, in_groups: bool) -> None:
    check_run_store(lambda: open_store(group_commit=in_groups))


async def test_a_run_is_written_followed_and_read(open_store: Open) -> None:
    here, there = open_store(), open_store()
    agent = Agent(ScriptedStream(["Hello.", "Again."]), run_log=RunLog(here))
    result = await agent.run("Hi")
    (summary,) = there.runs()
    assert summary.outcome == "done"
    events = [followed.event async for followed in follow(there, summary.run_id)]
    assert fold(there.load(summary.run_id)).messages == [*result.messages]
    assert events[-1].messages == result.messages  # type: ignore[union-attr]


async def test_one_who_follows_sees_deltas_of_another_process(open_store: Open) -> None:
    here, there = open_store(), open_store()
    seen: list[FollowedEvent] = []
    news = asyncio.Event()
    words = ["To be", " or not", " to be"]

    async def heard(deltas: int) -> None:
        while sum(isinstance(each.event, MessageUpdate) for each in seen) < deltas or not seen:
            news.clear()
            await news.wait()

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        watching.append(asyncio.ensure_future(watch()))
        await heard(0)  # the run is logged and followed
        # Deltas before that are lost, as they may be.
        while not there._parts.keeper.is_listening:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield Start(AssistantMessage.from_text(""))
        for number, word in enumerate(words, 1):
            yield Chunk(TextChunk(word))
            await heard(number)
        yield Done(AssistantMessage.from_text("".join(words)))

    async def watch() -> None:
        async for each in follow(there, "r"):
            seen.append(each)
            news.set()

    watching: list[asyncio.Future[None]] = []
    async with asyncio.timeout(60):
        await run("Hi", identity(), LoopConfig(stream=model, run_log=RunLog(here, live=True)))
        await watching[0]
    live = [each.event for each in seen if each.is_live]
    assert [each.chunk for each in live if isinstance(each, MessageUpdate)] == [
        TextChunk(word) for word in words
    ]
    assert isinstance(seen[-1].event, AgentEnd)


# --- leases -----------------------------------------------------------------------------------


def test_a_run_is_taken_over_when_the_lease_is_over_and_not_earlier(open_store: Open) -> None:
    clock = Time()
    # So long that the thread does not renew it by itself while the clock is moved.
    here, there = (open_store(lease=10_000, clock=clock) for _ in range(2))
    records = some_records("r", 4)
    first = here.create("r")
    append(first, records[:2])
    with pytest.raises(RunBusy):
        _open(there.reopen("r", after=1))
    assert there.abandoned() == []
    wait_for_first_beat(here)
    clock.ms += 9_900_000
    with pytest.raises(RunBusy):
        _open(there.reopen("r", after=1))
    clock.ms += 200_000
    assert there.abandoned() == ["r"]
    second = _open(there.reopen("r", after=1))
    assert there.abandoned() == here.abandoned() == []
    with pytest.raises(RunTakenOver):
        append(first, records[2:3])
    assert first.is_lost  # type: ignore[attr-defined]
    append(second, records[2:])
    close(second)
    assert [r.seq for r in here.load("r").records] == [0, 1, 2, 3]


def test_a_lease_that_lapsed_is_still_good_if_nobody_took_the_run(open_store: Open) -> None:
    clock = Time()
    store = open_store(lease=10, clock=clock)
    records = some_records("r", 3)
    appender = store.create("r")
    append(appender, records[:1])
    clock.ms += 1_000_000
    append(appender, records[1:])
    close(appender)
    assert len(store.load("r").records) == 3


async def test_a_frozen_process_that_wakes_lets_its_run_go(open_store: Open) -> None:
    """A dead worker's run is found and taken up within three leases, by a clock that is moved."""
    clock, lease = Time(), 10_000
    here, there = (open_store(lease=lease, clock=clock) for _ in range(2))
    frozen, thawed = asyncio.Event(), asyncio.Event()
    begun: list[str] = []

    @tool
    async def work(ctx: ToolContext) -> str:
        """Work."""
        begun.append(ctx.idempotency_key)
        frozen.set()
        await thawed.wait()
        return "worked"

    def agent(*answers: Any) -> Agent[str, Any]:
        return Agent(ScriptedStream([*answers]), tools=[work])

    first = asyncio.ensure_future(advance(here, "r", agent(call("work"), "Done."), "Go."))
    await frozen.wait()
    died_at = clock.ms
    while not await asyncio.to_thread(there.abandoned):
        clock.ms += 1_000_000
        assert clock.ms <= died_at + 3_000 * lease
    result = await advance(there, "r", agent("Done elsewhere."), "Go.")
    assert result.outcome is LoopOutcome.DONE
    thawed.set()
    with pytest.raises(RunLetGo):
        await first
    assert len(begun) == 1
    records = there.load("r").records
    assert not [r for r in records if isinstance(r.entry, RunFailed)]
    (ended,) = [r.entry for r in records if isinstance(r.entry, ToolEnded)]
    assert ended.by_runtime is not None  # uncertain: it had begun, and nobody knows what it did
    assert fold(there.load("r")).ending is not None


async def test_a_frozen_process_that_wakes_starts_no_child_runs(open_store: Open) -> None:
    clock = Time()
    here, there = open_store(lease=10_000, clock=clock), open_store(lease=10_000, clock=clock)
    frozen, thawed = asyncio.Event(), asyncio.Event()
    begun: list[str] = []

    @tool
    async def work(ctx: ToolContext) -> str:
        """Work."""
        begun.append(ctx.identity.run_id)
        return "worked"

    def agent(*answers: Any, stops: bool) -> Agent[str, Any]:
        @tool(idempotent=True)
        async def delegate(ctx: ToolContext) -> str:
            """Give the work to agents."""
            if stops:
                frozen.set()
                await thawed.wait()
            model = ScriptedStream([call("work"), "Worked."])
            config = LoopConfig(stream=model, tools=[work])
            return (await run_child(ctx, "Work.", config)).text

        return Agent(ScriptedStream([*answers]), tools=[delegate])

    first = agent(call("delegate"), "Done.", stops=True)
    running = asyncio.ensure_future(advance(here, "r", first, "Go."))
    await frozen.wait()
    await asyncio.to_thread(wait_for_first_beat, here)
    clock.ms += 100_000_000
    result = await advance(there, "r", agent("Done elsewhere.", stops=False), "Go.")
    assert result.text == "Done elsewhere."
    thawed.set()
    with pytest.raises(RunLetGo):
        await running
    assert len(begun) == 1
    assert len(await asyncio.to_thread(lambda: there.runs(parent_run_id="r"))) == 1


async def test_a_takeover_takes_the_runs_below_as_well(open_store: Open) -> None:
    clock = Time()
    here, there = open_store(lease=10_000, clock=clock), open_store(lease=10_000, clock=clock)
    frozen, thawed = asyncio.Event(), asyncio.Event()
    begun: list[str] = []

    def agent(*answers: Any, of_child: Sequence[Any], stops: bool) -> Agent[str, Any]:
        @tool
        async def work(ctx: ToolContext) -> str:
            """Work."""
            begun.append(ctx.idempotency_key)
            return "worked"

        scripted = ScriptedStream([*of_child])

        async def model(
            request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            if stops:
                frozen.set()
                await thawed.wait()
            async for event in scripted(request, signal):
                yield event

        child = LoopConfig(stream=model, tools=[work])
        tools = [agent_tool("child", "A child.", child)]
        return Agent(ScriptedStream([*answers]), tools=tools)

    both = [call("work"), "Worked."]
    first = agent(call("child", task="Work."), "Done.", of_child=both, stops=True)
    running = asyncio.ensure_future(advance(here, "r", first, "Go."))
    await frozen.wait()
    await asyncio.to_thread(wait_for_first_beat, here)
    clock.ms += 100_000_000
    # The first process is alive again, and has not noticed anything.
    other = here.create("other")
    await asyncio.to_thread(append, other, some_records("other", 1))
    second = agent("Done elsewhere.", of_child=both, stops=False)
    taken = asyncio.ensure_future(advance(there, "r", second, "Go."))
    with pytest.raises(RunBusy):
        await taken
    clock.ms += 100_000_000
    result = await advance(there, "r", second, "Go.")
    assert result.text == "Done elsewhere."
    thawed.set()
    with pytest.raises(RunLetGo):
        await running
    assert len(begun) == 1
    assert len(await asyncio.to_thread(lambda: there.runs(parent_run_id="r"))) == 1
    other.close()


async def test_a_takeover_takes_child_runs_that_have_no_record_yet(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process freezes after it has claimed the child, before it writes the first record."""
    clock = Time()
    # So long a lease is not renewed while the test runs, as if the whole process were frozen.
    here, there = open_store(lease=1_000, clock=clock), open_store(lease=1_000, clock=clock)
    above = here.create("r")
    await asyncio.to_thread(append, above, some_records("r", 1))
    frozen, thawed = threading.Event(), threading.Event()
    write = GroupWriter._written

    def written(self: GroupWriter, group: Sequence[Appender]) -> Iterator[Any]:
        if any(appender.run_id == "child" for appender in group):
            frozen.set()
            thawed.wait()
        return write(self, group)

    monkeypatch.setattr(GroupWriter, "_written", written)
    child = here.create("child")
    below = RunIdentity.child_of(RunIdentity.root("r"), "child")
    (began,) = some_records("child", 1)
    assert isinstance(began.entry, RunBegan)
    record = replace(began, entry=replace(began.entry, identity=below))
    child.append(record, msgspec.json.encode(record))
    begins = child.barrier()
    await asyncio.to_thread(frozen.wait)
    await asyncio.to_thread(wait_for_first_beat, here)
    clock.ms += 6_000_000
    try:
        taken = there.reopen("r", after=0)
        await taken.barrier()
    finally:
        thawed.set()
    with pytest.raises(RunTakenOver):
        await begins
    assert await asyncio.to_thread(lambda: there.runs(parent_run_id="r")) == []
    for appender in (taken, child, above):
        appender.close()


async def test_a_process_that_is_told_of_a_takeover_stops_its_tools(open_store: Open) -> None:
    clock = Time()
    here, there = open_store(lease=0.6, clock=clock), open_store(lease=60, clock=clock)
    begun, stopped = asyncio.Event(), asyncio.Event()

    @tool
    async def hang() -> str:
        """Hang."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return "never"

    agent = Agent(ScriptedStream([call("hang")]), tools=[hang])
    running = asyncio.ensure_future(advance(here, "r", agent, "Go."))
    await begun.wait()
    clock.ms += 100_000
    taken = there.reopen("r", after=await asyncio.to_thread(last_of, there, "r"))
    await taken.barrier()
    with pytest.raises(RunLetGo):  # no record is written: the lease is renewed, and that tells it
        await asyncio.wait_for(running, 30)
    assert stopped.is_set()
    taken.close()
    await taken.barrier()


async def test_a_process_that_stops_gives_its_runs_up_at_once(open_store: Open) -> None:
    here, there = open_store(lease=1000), open_store()
    appender = here.create("r")
    records = some_records("r", 2)
    await asyncio.to_thread(append, appender, records[:1])
    here.close()
    assert there.abandoned() == ["r"]
    assert (await asyncio.to_thread(_open, there.reopen("r", after=0))) is not None


def _open(appender: RunAppender) -> RunAppender:
    """Pass the first barrier, which claims the run."""

    async def wait() -> None:
        await appender.barrier()

    asyncio.run(wait())
    return appender


async def test_what_is_in_the_mailbox_counts_before_a_resumed_run_goes_on(open_store: Open) -> None:
    store = open_store()

    @tool
    async def pay() -> str:
        """Pay."""
        return "paid"

    def agent() -> Agent[str, Any]:
        return Agent(ScriptedStream([call("pay"), "Done."]), tools=[pay], plugins=[Gate()])

    for number in range(5):
        run_id = f"cancelled {number}"
        waits = await advance(store, run_id, agent(), "Go.")
        if number % 2:
            await decide(store, run_id, waits.waiting[0].request_id, Allow())
        await asyncio.to_thread(cancel, store, run_id, "enough")
        with pytest.raises(RunAborted, match="enough") as aborted:
            await advance(store, run_id, agent(), "Go.")
        assert [m.role for m in aborted.value.messages] == ["user", "assistant", "tool_result"]
        loaded = await asyncio.to_thread(store.load, run_id)
        assert fold(loaded).messages == list(aborted.value.messages)
        assert str((await replay(store, run_id, agent().config)).drift) == "None"

        run_id = f"steered {number}"
        waits = await advance(store, run_id, agent(), "Go.")
        await asyncio.to_thread(steer, store, run_id, "Quickly.")
        await decide(store, run_id, waits.waiting[0].request_id, Allow())
        result = await advance(store, run_id, agent(), "Go.")
        assert "Quickly." in [m.plain_text for m in result.messages]


# --- a database that goes away ----------------------------------------------------------------


@contextmanager
def _cutting(url: str, progress: Callable[[], int]) -> Iterator[list[int]]:
    """Cut all connections again and again, wherever they are in their work.

    Waits for some progress between two cuts, but not long. Otherwise a slow machine could never
    open a connection.
    """
    cuts, is_over = [0], threading.Event()

    def cut() -> None:
        seen = progress()
        with psycopg.connect(url, autocommit=True, application_name="scissors") as connection:
            while not is_over.wait(0.02):
                for _ in range(50):
                    if progress() != seen or is_over.wait(0.02):
                        break
                seen = progress()
                cut = connection.execute(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                    " WHERE application_name = 'clark-agent'"
                ).fetchone()
                cuts[0] += 0 if cut is None else cut[0]

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield cuts
    finally:
        is_over.set()
        thread.join()


async def test_commits_survive_connections_that_are_cut_anywhere(
    open_store: Open, postgres_url: str
) -> None:
    store = open_store()
    open_store().runs()  # creates the tables
    begun: list[str] = []

    @tool
    async def step(ctx: ToolContext) -> str:
        """Do something."""
        begun.append(ctx.idempotency_key)
        await asyncio.sleep(0.005)
        return "done"

    async def one(number: int) -> RunResult:
        agent = Agent(ScriptedStream([*[call("step")] * 12, "Done."]), tools=[step])
        return await advance(store, f"r{number}", agent, "Go.")

    with _cutting(postgres_url, lambda: len(begun)) as cuts:
        results = await asyncio.gather(*[one(number) for number in range(8)])
    assert cuts[0] > 5
    assert {result.outcome for result in results} == {LoopOutcome.DONE}
    assert len(begun) == len(set(begun)) == 8 * 12
    for number in range(8):
        loaded = store.load(f"r{number}")
        assert (loaded.problems, loaded.is_torn) == ((), False)


async def test_runs_survive_a_crash_of_the_database(
    postgres_server: Postgres, open_store: Open
) -> None:
    store = open_store(lease=5)
    begun: list[str] = []
    half_done = asyncio.Event()
    ticks = crashed_at = 0

    @tool
    async def step(ctx: ToolContext) -> str:
        """Do something."""
        begun.append(ctx.idempotency_key)
        if len(begun) == 75:
            half_done.set()
        await asyncio.sleep(0.01)
        return "done"

    async def one(number: int) -> RunResult:
        agent = Agent(ScriptedStream([*[call("step")] * 15, "Done."]), tools=[step])
        return await advance(store, f"r{number}", agent, "Go.")

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.ensure_future(tick())
    runs = [asyncio.ensure_future(one(number)) for number in range(10)]
    await half_done.wait()
    await asyncio.to_thread(postgres_server.stop, "immediate")
    crashed_at = ticks
    await asyncio.sleep(1.0)
    assert ticks - crashed_at > 20, "the event loop was blocked while the database was away"
    await asyncio.to_thread(postgres_server.start)
    results = await asyncio.gather(*runs)
    ticking.cancel()
    assert {result.outcome for result in results} == {LoopOutcome.DONE}
    assert len(begun) == len(set(begun)) == 10 * 15
    for number in range(10):
        loaded = await asyncio.to_thread(store.load, f"r{number}")
        assert (loaded.problems, loaded.is_torn) == ((), False)
        assert [r.seq for r in loaded.records] == [*range(len(loaded.records))]


async def test_a_database_that_stays_away_ends_the_run_and_it_can_be_resumed(
    postgres_server: Postgres, open_store: Open
) -> None:
    store = open_store(patience=0.3, lease=1)

    @tool(idempotent=True)
    async def stop() -> str:
        """Stop the database."""
        await asyncio.to_thread(postgres_server.stop, "fast")
        return "stopped"

    agent = Agent(ScriptedStream([call("stop"), "Done."]), tools=[stop])
    try:
        with pytest.raises(Exception, match="PostgreSQL"):
            await advance(store, "r", agent, "Go.")
        with pytest.raises(RunStoreError, match="PostgreSQL"):
            await asyncio.to_thread(open_store(patience=0.1).load, "r")
    finally:
        await asyncio.to_thread(postgres_server.start)

    @tool(name="stop", idempotent=True)
    async def again() -> str:
        """Stop nothing."""
        return "stopped"

    other, result = open_store(), None
    for _ in range(200):
        try:
            agent = Agent(ScriptedStream(["Done."]), tools=[again])
            result = await advance(other, "r", agent, "Go.")
            break
        except RunBusy:  # the lease of the other process is not over yet
            await asyncio.sleep(0.05)
    assert result is not None
    assert result.text == "Done."


# --- waiting ----------------------------------------------------------------------------------


async def test_a_decision_and_what_it_wakes_are_one_transaction(open_store: Open) -> None:
    store, paid = open_store(), list[int]()
    woken: list[str] = []

    def enqueue(connection: psycopg.Connection, run_id: str) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS queue (run_id text)")
        connection.execute("INSERT INTO queue VALUES (%s)", (run_id,))
        woken.append(run_id)
        if len(woken) == 1:
            raise RuntimeError("the queue is broken")

    store.on_wake = enqueue
    (request,) = (await advance(store, "r", payer(paid, call("pay", amount=3)), "Pay.")).waiting
    with pytest.raises(RuntimeError, match="the queue is broken"):
        await decide(store, "r", request.request_id, Allow())
    assert await asyncio.to_thread(waiting_for, store, "r") == [request]
    await decide(store, "r", request.request_id, Allow())
    with store.connection() as connection:
        assert connection.execute("SELECT run_id FROM queue").fetchall() == [("r",)]
    result = await advance(store, "r", payer(paid, "Done."), "Pay.")
    assert (result.text, paid, woken) == ("Done.", [3], ["r", "r"])


async def test_a_run_whose_wake_up_fails_is_not_stuck(open_store: Open) -> None:
    here, there = open_store(), open_store()
    (request,) = (await advance(here, "r", payer([], call("pay", amount=3)), "Pay.")).waiting

    def fail(connection: psycopg.Connection, run_id: str) -> None:
        connection.execute("SELECT 1 / 0")

    here.on_wake = fail
    with pytest.raises(RunStoreError, match="division by zero"):
        await decide(here, "r", request.request_id, Allow())
    await decide(there, "r", request.request_id, Allow())
    assert (await advance(there, "r", payer([], "Done."), "Pay.")).text == "Done."


async def test_a_run_can_be_taken_up_as_soon_as_it_has_returned(open_store: Open) -> None:
    here, there, paid = open_store(), open_store(), list[int]()
    for number in range(10):
        run_id, token = f"r{number}", CancellationToken()
        agent = payer(paid, call("pay", amount=number))
        (request,) = (await advance(here, run_id, agent, "Pay.")).waiting
        await decide(there, run_id, request.request_id, Allow(), patience=0)
        token.cancel(LET_GO)
        with pytest.raises(RunLetGo):
            await advance(here, run_id, payer(paid), "Pay.", token)
        assert (await advance(there, run_id, payer(paid, "Done."), "Pay.")).text == "Done."
    assert paid == [*range(10)]


async def test_a_store_writes_again_after_a_time_of_only_reading(
    open_store: Open, postgres_url: str
) -> None:
    store = open_store(patience=0.2)
    agent = Agent(ScriptedStream(["Hi."] * 9))
    await advance(store, "before", agent, "Go.")
    database = psycopg.conninfo.conninfo_to_dict(postgres_url)["dbname"]

    def only_read(setting: str) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute("SET default_transaction_read_only = off")
            name = psycopg.sql.Identifier(str(database))
            change = "ALTER DATABASE {} SET default_transaction_read_only = {}"
            admin.execute(psycopg.sql.SQL(change).format(name, psycopg.sql.SQL(setting)))
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'clark-agent'"
            )

    await asyncio.to_thread(only_read, "on")
    with pytest.raises(Exception, match="read-only"):
        await advance(store, "meanwhile", agent, "Go.")
    with psycopg.connect(postgres_url, autocommit=True) as admin:  # no connection is cut this time
        admin.execute("SET default_transaction_read_only = off")
        name = psycopg.sql.Identifier(str(database))
        change = psycopg.sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = off")
        admin.execute(change.format(name))
    assert (await advance(store, "after", agent, "Go.")).text == "Hi."
    assert (await advance(store, "meanwhile", agent, "Go.")).text == "Hi."


def test_a_store_closes_while_deltas_are_published(open_store: Open) -> None:
    for run_id in map(str, range(20)):
        store = open_store()
        append(store.create(run_id), some_records(run_id, 1))
        for number in range(50):
            store.publish(run_id, b"%d" % number)
        closing = threading.Thread(target=store.close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()


async def test_one_who_follows_goes_on_when_the_store_is_closed(open_store: Open) -> None:
    here, there = open_store(), open_store()
    begun, may_end = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        begun.set()
        await may_end.wait()
        return "waited"

    agent = Agent(ScriptedStream([call("wait"), "Done."]), tools=[wait])
    running = asyncio.ensure_future(advance(here, "r", agent, "Go."))
    await begun.wait()
    followed: list[FollowedEvent] = []

    async def watch() -> None:
        async for each in follow(there, "r"):
            followed.append(each)
            if len(followed) == 3:
                await asyncio.to_thread(there.close)
                may_end.set()

    async with asyncio.timeout(60):
        await watch()
    assert (await running).text == "Done."
    assert isinstance(followed[-1].event, AgentEnd)


async def test_an_event_and_a_cancel_wake_the_outermost_run(open_store: Open) -> None:
    store, woken = open_store(), list[str]()
    store.on_wake = lambda connection, run_id: woken.append(run_id)
    child = payer([], call("pay", amount=1), plugins=[Gate(event="paid")])
    agent = Agent(
        ScriptedStream([call("child", task="x"), "Done."]),
        tools=[agent_tool("child", "A child.", child.config)],
    )
    (request,) = (await advance(store, "r", agent, "Go.")).waiting
    assert request.run_id != "r"
    assert await asyncio.to_thread(deliver, store, request.run_id, "paid", {"by": "bank"})
    assert woken == ["r"]
    await asyncio.to_thread(cancel, store, "r", "enough")
    assert woken == ["r", "r"]


async def test_many_who_decide_at_once_and_one_is_first(open_store: Open) -> None:
    stores, paid = [open_store() for _ in range(4)], list[int]()
    (request,) = (await advance(stores[0], "r", payer(paid, call("pay", amount=3)), "Pay.")).waiting

    async def one(number: int) -> object:
        try:
            store = stores[number % len(stores)]
            return await decide(store, "r", request.request_id, Allow(), by=str(number))
        except AlreadyDecided as error:
            return error

    outcomes = await asyncio.gather(*[one(number) for number in range(12)])
    assert [o for o in outcomes if not isinstance(o, AlreadyDecided)] == [()]
    assert await asyncio.to_thread(ready_runs, stores[1]) == ["r"]

    async def go_on(store: PostgresStore) -> object:
        try:
            return (await advance(store, "r", payer(paid, "Done."), "Pay.")).text
        except RunBusy as busy:
            return busy

    ended = await asyncio.gather(*[go_on(store) for store in stores])
    assert "Done." in ended
    assert paid == [3]


async def test_requests_are_found_by_who_decides_and_by_when_they_are_due(
    open_store: Open,
) -> None:
    store, clock = open_store(), Time()
    kinds: dict[str, dict[str, Any]] = {
        "a": {"assignee": "ann"},
        "b": {"assignee": "bob", "expires_in": 10},
        "c": {"assignee": "ann", "expires_in": 20},
    }
    for run_id, how in kinds.items():
        agent = payer([], call("pay", amount=1), plugins=[Gate(**how)], clock=clock)
        await advance(store, run_id, agent, "Pay.")
    anns = await asyncio.to_thread(lambda: waiting_for(store, assignee="ann", clock=clock))
    assert sorted(request.run_id for request in anns) == ["a", "c"]
    assert sorted(store.runs_waiting("ann")) == ["a", "c"]
    assert sorted(store.runs_waiting()) == ["a", "b", "c"]
    assert store.due(clock.ms) == []
    assert store.due(clock.ms + 15_000) == ["b"]
    assert store.due(clock.ms + 25_000) == ["b", "c"]
    clock.ms += 15_000
    agent = payer([], "It was refused.", clock=clock)
    assert (await resume(store, "b", agent)).outcome is LoopOutcome.DONE
    assert store.due(clock.ms) == []
    await decide(store, "a", anns[-1 if anns[-1].run_id == "a" else 0].request_id, Allow())
    assert [*store.runs_waiting("ann")] == ["c"]


async def test_a_deploy_between_suspend_and_resume(open_store: Open) -> None:
    """The tool is gone; its arguments have changed; a hook was added."""
    store, paid = open_store(), list[int]()
    for run_id in ("gone", "changed", "hooked"):
        agent = payer(paid, call("pay", amount=3))
        (request,) = (await advance(store, run_id, agent, "Pay.")).waiting
        await decide(store, run_id, request.request_id, Allow())

    with pytest.raises(ConfigError, match="waits for the tool 'pay'"):
        await advance(store, "gone", Agent(ScriptedStream(["?"])), "Pay.")
    agent = payer(paid, "Done.")
    assert (await advance(store, "gone", agent, "Pay.")).text == "Done."
    assert paid == [3]  # the next deploy has it again, and nothing is lost

    @tool
    async def pay(amount: int, currency: str) -> str:
        """Pay, in a currency."""
        paid.append(amount)
        return "paid"

    changed = Agent(ScriptedStream(["It needs a currency."]), tools=[pay], plugins=[Gate()])
    result = await advance(store, "changed", changed, "Pay.")
    assert result.text == "It needs a currency."
    assert paid == [3]
    (told,) = [m for m in result.messages if m.role == "tool_result"]
    assert told.is_error
    assert "currency" in told.plain_text

    class Second(Gate):
        name = "second"

    hooked = payer(paid, plugins=[Gate(), Second()])
    (request,) = (await advance(store, "hooked", hooked, "Pay.")).waiting
    assert request.asked_by == "second"
    assert paid == [3]


# --- mailboxes --------------------------------------------------------------------------------


async def test_a_run_is_steered_and_cancelled_from_another_process(open_store: Open) -> None:
    here, there = open_store(), open_store()
    begun = asyncio.Event()

    @tool
    async def wait(ctx: ToolContext) -> str:
        """Wait for the end."""
        begun.set()
        await ctx.signal.wait()
        return "stopped"

    model = ScriptedStream([call("wait"), call("wait")])
    agent = Agent(model, tools=[wait])
    running = asyncio.ensure_future(advance(here, "r", agent, "Go."))
    await begun.wait()
    begun.clear()
    await asyncio.to_thread(steer, there, "r", "Stop that.", "now")
    await begun.wait()
    await asyncio.to_thread(cancel, there, "r", "enough")
    with pytest.raises(Exception, match="enough") as caught:
        await running
    texts = [m.plain_text for m in caught.value.messages if isinstance(m, UserMessage)]  # type: ignore[attr-defined]
    assert texts == ["Go.", "Stop that."]


# --- search and retention ---------------------------------------------------------------------


def _kept(store: PostgresStore, run_id: str, *texts: str) -> None:
    appender = store.create(run_id)
    append(appender, [*numbered(run_id, [some_records(run_id, 1)[0].entry, *map(said, texts)])])
    close(appender)


def test_texts_are_found_without_case_and_accents(open_store: Open) -> None:
    store = open_store()
    _kept(store, "a", "Das Café in der STRASSE", "nothing")
    _kept(store, "b", "the cafe and the needle; needle", "a\0b haystack " * 40 + "needle")
    assert {hit.run_id for hit in store.search("CAFE")} == {"a", "b"}
    assert [(hit.run_id, hit.seq) for hit in store.search("café straße")] == [("a", 1)]
    found = store.search("needle")
    assert [(hit.run_id, hit.seq) for hit in found] == [("b", 1), ("b", 2)]
    assert "needle" in found[1].snippet
    assert len(found[1].snippet) < 200
    assert store.search("  ") == store.search("missing") == ()
    assert len(store.search("needle", limit=1)) == 1
    _kept(store, "c", "another needle")
    assert "c" in {hit.run_id for hit in open_store().search("needle")}


async def test_old_runs_are_pruned_with_their_trees_and_others_stay(open_store: Open) -> None:
    store, clock = open_store(), Time()
    clock.ms = 1_000
    child = LoopConfig(stream=ScriptedStream(["Child."]), clock=clock)
    agent = Agent(
        ScriptedStream([call("child", task="x"), "Done."]),
        tools=[agent_tool("child", "A child.", child)],
        clock=clock,
    )
    await advance(store, "old", agent, "Go.")
    await advance(store, "waits", payer([], call("pay", amount=1), clock=clock), "Pay.")
    await advance(store, "new", Agent(ScriptedStream(["Hi."])), "Go.")
    store.search("Done")
    assert store.prune(timedelta(days=1), outcomes=["failed"]) == 0
    assert store.prune(timedelta(days=1)) == 2
    assert store.prune(timedelta(days=1)) == 0
    assert sorted(run.run_id for run in store.runs()) == ["new", "waits"]
    assert store.search("Child") == ()
    assert store.prune(timedelta(days=1), outcomes=["suspended"]) == 1
    assert [*store.runs_waiting()] == []
    with pytest.raises(RunNotFound):
        store.load("waits")
    with pytest.raises(TypeError):
        store.prune(5)  # type: ignore[arg-type]
    result = await advance(store, "old", Agent(ScriptedStream(["Anew."])), "Go.")
    assert result.text == "Anew."


# --- large results ----------------------------------------------------------------------------


def _reads_much(run_id: str, text: str, turns: int = 1) -> Agent[str, None]:
    def large() -> str:
        """Returns much."""
        return text

    reads = [
        call("read_result", id=f"{run_id}/{turn}-0", start=100_000, end=100_050)
        for turn in range(1, turns + 1)
    ]
    return Agent(ScriptedStream([*[call("large")] * turns, *reads, "Done."]), tools=[large])


async def test_a_large_result_is_read_back_replayed_and_deleted_with_its_run(
    open_store: Open,
) -> None:
    store, text = open_store(), "".join(f"line {n} \u5b57\n" for n in range(20_000))
    agent = _reads_much("r", text)
    clock = Time()
    clock.ms = 1_000
    result = await advance(store, "r", agent.replace(clock=clock), "Go.")
    large, page = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    assert len(large.plain_text) < 11_000
    assert page.plain_text.partition("\n")[2] == text[100_000:100_050]
    assert b"".join(open_store().kept("r", "1-0", 1, 99)).decode() == text
    assert b"".join(open_store().kept("r", "1-0", 2, 3)).decode() == text[32_768:65_536]
    assert sum(len(msgspec.json.encode(record)) for record in store.load("r").records) < 50_000
    report = await replay(store, "r", agent.config.replace(clock=clock))
    assert str(report.drift) == "None"
    assert store.prune(timedelta(days=1)) == 1
    assert not store.kept("r", "1-0", 0, 1)
    with store.connection() as connection:
        assert connection.execute("SELECT count(*) FROM clark_agent.kept").fetchone() == (0,)


async def test_large_results_survive_connections_that_are_cut_anywhere(
    open_store: Open, postgres_url: str
) -> None:
    store = open_store()
    open_store().runs()  # creates the tables
    asked = 0

    async def one(number: int) -> RunResult:
        nonlocal asked
        text = f"run {number} " * 15_000
        result = await advance(store, f"r{number}", _reads_much(f"r{number}", text, 6), "Go.")
        asked += 1
        results = [m for m in result.messages if isinstance(m, ToolResultMessage)]
        pages = [m.plain_text.partition("\n")[2] for m in results[6:]]
        assert pages == [text[100_000:100_050]] * 6
        return result

    with _cutting(postgres_url, lambda: asked):
        results = await asyncio.gather(*[one(number) for number in range(4)])
    assert {result.outcome for result in results} == {LoopOutcome.DONE}
    for number in range(4):
        for turn in range(1, 7):
            kept = b"".join(store.kept(f"r{number}", f"{turn}-0", 1, 99)).decode()
            assert kept == f"run {number} " * 15_000


# --- setting up -------------------------------------------------------------------------------


def test_tables_of_the_first_version_are_brought_up_to_date(
    open_store: Open, postgres_url: str
) -> None:
    from clark_agent.run_log._postgres import schema

    store = open_store(schema="old")
    _kept(store, "a", "text")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP TABLE old.kept")
        connection.execute("UPDATE old.schema_version SET version = 1")
    again = open_store(schema="old")
    assert [run.run_id for run in again.runs()] == ["a"]
    assert not again.kept("a", "1-0", 0, 1)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        row = connection.execute("SELECT version FROM old.schema_version").fetchone()
    assert row == (schema.VERSION,)


def test_several_processes_set_up_a_database_at_once(open_store: Open) -> None:
    stores = [open_store(schema='an "odd" Schema') for _ in range(6)]
    failures: list[Exception] = []

    def use(store: PostgresStore) -> None:
        try:
            assert store.runs() == []
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    _kept(stores[0], "a", "text")
    assert stores[1].search("text")
    assert open_store().runs() == []  # another schema


def test_a_role_without_rights_to_create_uses_tables_that_a_dba_made(
    open_store: Open, postgres_url: str
) -> None:
    script = open_store(schema="given").schema_script()
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(script.encode())
        role = f"plain_{os.getpid()}_{threading.get_ident()}"
        admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'".encode())
        admin.execute(f"GRANT USAGE ON SCHEMA given TO {role}".encode())
        rights = "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA given"
        admin.execute(f"GRANT {rights} TO {role}".encode())
    parts = psycopg.conninfo.conninfo_to_dict(postgres_url) | {"user": role, "password": "secret"}
    store = PostgresStore(psycopg.conninfo.make_conninfo(**parts), schema="given")  # type: ignore[arg-type]
    try:
        _kept(store, "a", "text")
        assert store.search("text")
        assert "secret" not in repr(store)
    finally:
        store.close()


def test_tables_of_a_newer_version_are_refused(open_store: Open, postgres_url: str) -> None:
    open_store().runs()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("UPDATE clark_agent.schema_version SET version = 99")
    with pytest.raises(RunStoreError, match="newer version"):
        open_store().runs()


@pytest.mark.parametrize(
    "settings",
    [
        {"connections": 0},
        {"lease": 0},
        {"lease": "1"},
        {"patience": -1},
        {"schema": ""},
        {"url": 5},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PostgresStore(**{"url": "postgresql://localhost/x", **settings})


def test_a_wrong_url_and_an_absent_server_say_so_without_the_password() -> None:
    url = "postgresql://me:hunter2@host/db?nothing=1"
    with pytest.raises(ConfigError) as caught:
        PostgresStore(url)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ConfigError, match="%40"):
        PostgresStore("postgresql://me:hun@ter2@host/db")
    store = PostgresStore("postgresql://me:hunter2@127.0.0.1:1/db", patience=0)
    with pytest.raises(RunStoreError) as away:
        store.runs()
    assert "hunter2" not in f"{away.value}{store!r}"
    store.close()


def test_a_forked_process_has_connections_of_its_own(open_store: Open) -> None:
    store = open_store()
    appender = store.create("r")
    records = some_records("r", 3)
    append(appender, records[:1])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _kept(store, "of the child", "text")
            assert len(store.runs()) == 2
            try:
                append(appender, records[1:2])
            except RunStoreError:
                code = 0
            store.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    append(appender, records[1:])
    close(appender)
    assert len(store.load("r").records) == 3


async def test_a_run_with_that_id_is_refused_in_every_way(open_store: Open) -> None:
    here, there = open_store(), open_store()
    agent = Agent(ScriptedStream(["Hi.", "Hi."]))
    await advance(here, "r", agent, "Go.")
    with pytest.raises(RunExists):
        await advance(there, "r", agent, "Go elsewhere.")
    config = LoopConfig(stream=ScriptedStream(["Hi."]), run_log=RunLog(there))
    with pytest.raises(Exception, match="already exists"):
        await run("Go.", identity(), config, CancellationToken())
