"""What time and events decide, with a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clark_agent import (
    AgentContext,
    BeforeToolCallContext,
    LoopConfig,
    LoopOutcome,
    RunIdentity,
    RunResult,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    agent_tool,
    run,
)
from clark_agent.errors import AlreadyDecided, RequestExpired, RunBusy, ToolSuspended
from clark_agent.replay import replay
from clark_agent.run_log import (
    Allow,
    GiveResult,
    MemoryStore,
    RunLog,
    RunStore,
    decide,
    deliver,
    ready_runs,
    resume,
    waiting_for,
)
from clark_agent.run_log.records import RequestDecided
from clark_agent.testing import FakeClock, call
from clark_agent.waiting import Delivered, Elapsed, Expired, Suspend
from tests.run_log.stories import Deed, Story
from tests.run_log.storing import KINDS, open_store

ROOT = "root"
STORES = ("memory", *KINDS)


def make_store(kind: str, folder: Path) -> RunStore:
    return MemoryStore() if kind == "memory" else open_store(kind, folder)


class Gate:
    name = "gate"

    def __init__(self, **how: Any) -> None:
        self.how = how

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | None:
        return Suspend(**self.how) if ctx.tool_call.name == "pay" else None


class Case:
    """A run with a tool that must be allowed, and one that waits for its result."""

    def __init__(self, store: RunStore, *steps: Any, asks: Any = None, **gate: Any) -> None:
        self.store = store
        self.clock = FakeClock()
        self.story = Story()

        def ask(args: Any, ctx: ToolContext) -> ToolResult:
            how = asks(args) if callable(asks) else (asks or {})
            raise ToolSuspended("?", **how)

        self.config = LoopConfig(
            stream=self.story.model(*steps),
            tools=[Deed(self.story, "pay", "paid"), Deed(self.story, "ask", ask)],
            plugins=[Gate(**gate)],
            clock=self.clock,
            run_log=RunLog(store, mail_every=None),
        )

    async def begin(self) -> RunResult:
        return await run("Go.", AgentContext(identity=RunIdentity(ROOT)), self.config)

    async def resume(self) -> RunResult:
        return await resume(self.store, ROOT, self.config)

    def verdicts(self, run_id: str = ROOT) -> list[Any]:
        entries = [record.entry for record in self.store.load(run_id).records]
        return [entry.decision for entry in entries if isinstance(entry, RequestDecided)]


def texts(result: RunResult) -> list[str]:
    return [m.plain_text for m in result.messages if isinstance(m, ToolResultMessage)]


EXPIRED = "The call was not run: the request was not decided in time, and has expired."


@pytest.mark.parametrize("kind", STORES)
async def test_a_decision_that_comes_too_late(kind: str, tmp_path: Path) -> None:
    """Who decides after the expiry records the expiry, and the call is refused."""
    case = Case(make_store(kind, tmp_path), call("pay"), "Done.", expires_in=10)
    [request] = (await case.begin()).waiting
    assert request.expires_at == case.clock.time_ms + 10_000
    case.clock.time_ms = request.expires_at - 1
    assert waiting_for(case.store, ROOT, clock=case.clock) == [request]
    assert ready_runs(case.store, clock=case.clock) == []
    case.clock.time_ms = request.expires_at
    assert waiting_for(case.store, ROOT, clock=case.clock) == []
    assert ready_runs(case.store, clock=case.clock) == [ROOT]
    for _ in range(2):
        with pytest.raises(RequestExpired):
            await decide(case.store, ROOT, request.request_id, Allow(), clock=case.clock)
    assert case.verdicts() == [Expired(request.expires_at)]
    result = await case.resume()
    assert (texts(result), case.story.ran) == ([EXPIRED], [])
    assert case.verdicts() == [Expired(request.expires_at)]
    assert str((await replay(case.store, ROOT, case.config)).drift) == "None"


async def test_a_decision_just_in_time_holds_after_the_expiry() -> None:
    case = Case(MemoryStore(), call("pay"), "Done.", expires_in=10)
    [request] = (await case.begin()).waiting
    case.clock.time_ms += 9_999
    await decide(case.store, ROOT, request.request_id, Allow(), clock=case.clock)
    case.clock.time_ms += 60_000
    result = await case.resume()
    assert texts(result) == ["paid"]
    assert case.verdicts() == [Allow()]


class Leaping(FakeClock):
    """The time of the expiry comes between one look at the clock and the next."""

    def __init__(self, start: int, at: int, leap: int) -> None:
        super().__init__(start)
        self.left = at
        self.leap = leap

    def now_ms(self) -> int:
        self.left -= 1
        if self.left == 0:
            self.time_ms += self.leap
        return self.time_ms


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("at", [1, 2, 3, 4])
async def test_decisions_and_a_resume_at_the_moment_of_the_expiry(
    kind: str, at: int, tmp_path: Path
) -> None:
    """Whoever has the lock judges. The request has one verdict, and the call follows it."""
    case = Case(make_store(kind, tmp_path), call("pay"), "Done.", expires_in=10)
    [request] = (await case.begin()).waiting
    clock = Leaping(case.clock.time_ms, at, 10_000)
    config = case.config.replace(clock=clock)

    async def decided(who: str) -> str:
        try:
            await decide(case.store, ROOT, request.request_id, Allow(), by=who, clock=clock)
        except (RequestExpired, AlreadyDecided) as late:
            return type(late).__name__
        return "allowed"

    async def resumed() -> str:
        try:
            return str((await resume(case.store, ROOT, config)).outcome)
        except RunBusy:
            return "busy"

    came = await asyncio.gather(decided("a"), resumed(), decided("b"))
    [verdict] = case.verdicts()
    assert (verdict == Allow()) is ("allowed" in came)
    assert came.count("allowed") <= 1
    clock.time_ms += 20_000
    if "done" not in came:
        await resume(case.store, ROOT, config)
    assert case.story.ran == (["t0c0"] if verdict == Allow() else [])


@pytest.mark.parametrize("kind", STORES)
async def test_a_time_comes(kind: str, tmp_path: Path) -> None:
    """A call that a hook held back runs, and one that waited has its result."""
    steps = ([call("pay"), call("ask")], "Done.")
    store = make_store(kind, tmp_path)
    case = Case(store, *steps, until=1_500_000, asks={"until": 1_600_000})
    first = await case.begin()
    assert [request.until for request in first.waiting] == [1_500_000, 1_600_000]
    case.clock.time_ms = 1_500_000
    second = await case.resume()
    assert second.outcome is LoopOutcome.SUSPENDED
    assert [request.tool_name for request in second.waiting] == ["ask"]
    assert case.story.ran == ["t0c1"], "nothing runs before all is decided"
    case.clock.time_ms = 1_600_000
    result = await case.resume()
    assert texts(result) == ["paid", "The time has come."]
    assert case.verdicts() == [Elapsed(1_500_000), Elapsed(1_600_000)]
    assert str((await replay(store, ROOT, case.config)).drift) == "None"


async def test_a_time_and_an_expiry_the_first_counts() -> None:
    case = Case(MemoryStore(), call("pay"), "Done.", until=1_020_000, expires_in=10)
    [request] = (await case.begin()).waiting
    assert (request.until, request.expires_at) == (1_020_000, 1_010_000)
    case.clock.time_ms = 1_010_000
    result = await case.resume()
    assert texts(result) == [EXPIRED]


def on(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda args: {"event": args.get("event", name)}


@pytest.mark.parametrize("kind", STORES)
async def test_an_event_is_the_result(kind: str, tmp_path: Path) -> None:
    """It may come before the run waits for it, and twice with one id."""
    store = make_store(kind, tmp_path)
    case = Case(store, [call("ask", event="paid"), call("pay")], "Done.", asks=on("paid"))
    first = await case.begin()
    assert [request.event for request in first.waiting] == ["paid", None]
    assert deliver(store, ROOT, "other", 1)
    assert len(waiting_for(store, ROOT, clock=case.clock)) == 2
    assert deliver(store, ROOT, "paid", {"amount": 12}, id="m")
    assert not deliver(store, ROOT, "paid", {"amount": 13}, id="m")
    [left] = waiting_for(store, ROOT, clock=case.clock)
    assert left.tool_name == "pay"
    await decide(store, ROOT, left.request_id, Allow(), clock=case.clock)
    result = await case.resume()
    assert texts(result) == ['{"amount":12}', "paid"]
    verdicts = case.verdicts()
    assert Delivered("paid", {"amount": 12}) in verdicts
    assert len(verdicts) == 2
    assert str((await replay(store, ROOT, case.config)).drift) == "None"


async def test_an_event_before_the_run_waits_for_it() -> None:
    case = Case(MemoryStore(), call("pay"), call("ask"), "Done.", asks=on("paid"))
    [request] = (await case.begin()).waiting
    deliver(case.store, ROOT, "paid", "early")
    await decide(case.store, ROOT, request.request_id, Allow(), clock=case.clock)
    result = await case.resume()
    if result.outcome is LoopOutcome.SUSPENDED:
        assert waiting_for(case.store, ROOT, clock=case.clock) == []
        assert ready_runs(case.store, clock=case.clock) == [ROOT]
        result = await case.resume()
    assert texts(result) == ["paid", "early"]


async def test_one_delivery_ends_one_wait() -> None:
    steps = ([call("ask", n=1), call("ask", n=2)], "Done.")
    case = Case(MemoryStore(), *steps, asks=on("paid"))
    first = await case.begin()
    assert len(first.waiting) == 2
    deliver(case.store, ROOT, "paid", "first")
    second = await case.resume()
    assert second.outcome is LoopOutcome.SUSPENDED
    [left] = second.waiting
    assert left.arguments == {"n": 2}
    assert (await case.resume()).waiting == second.waiting
    deliver(case.store, ROOT, "paid", "second")
    result = await case.resume()
    assert texts(result) == ["first", "second"]
    assert case.verdicts() == [Delivered("paid", "first"), Delivered("paid", "second")]


async def test_an_event_is_not_taken_twice_over_turns() -> None:
    """An event that has ended a wait does not end the next one of its name."""
    case = Case(MemoryStore(), call("ask", n=1), call("ask", n=2), "Done.", asks=on("paid"))
    await case.begin()
    deliver(case.store, ROOT, "paid", "first")
    second = await case.resume()
    assert [request.arguments for request in second.waiting] == [{"n": 2}]
    assert waiting_for(case.store, ROOT, clock=case.clock) == list(second.waiting)
    deliver(case.store, ROOT, "paid", "second")
    assert texts(await case.resume()) == ["first", "second"]


async def test_a_person_may_be_faster_than_the_event() -> None:
    case = Case(MemoryStore(), call("ask"), "Done.", asks=on("paid"))
    [request] = (await case.begin()).waiting
    await decide(case.store, ROOT, request.request_id, GiveResult("by hand"), clock=case.clock)
    deliver(case.store, ROOT, "paid", "too late")
    result = await case.resume()
    assert texts(result) == ["by hand"]


@pytest.mark.parametrize("kind", STORES)
async def test_an_event_for_a_child(kind: str, tmp_path: Path) -> None:
    """It goes to the run that waits, and the one above goes on."""
    store = make_store(kind, tmp_path)
    below = Case(store, [call("ask"), call("pay")], "Asked.", asks=on("paid"))
    story = Story()
    child = below.config.replace(run_log=None)
    config = LoopConfig(
        stream=story.model(call("helper", task="ask"), "Done."),
        tools=[agent_tool("helper", "helps", child)],
        clock=below.clock,
        run_log=RunLog(store, mail_every=None),
    )
    first = await run("Go.", AgentContext(identity=RunIdentity(ROOT)), config)
    waits = {request.tool_name: request for request in first.waiting}
    run_id = waits["ask"].run_id
    assert run_id != ROOT
    assert {request.root_run_id for request in first.waiting} == {ROOT}
    deliver(store, run_id, "paid", {"amount": 1})
    [left] = waiting_for(store, ROOT, clock=below.clock)
    assert left.tool_name == "pay"
    below.clock.time_ms += 1
    await decide(store, ROOT, left.request_id, Allow(), clock=below.clock)
    assert ready_runs(store, clock=below.clock) == [ROOT]
    result = await resume(store, ROOT, config)
    assert result.outcome is LoopOutcome.DONE
    assert below.story.ran == ["t0c0", "t0c1"]
    assert {type(verdict) for verdict in below.verdicts(run_id)} == {Allow, Delivered}
    assert str((await replay(store, ROOT, config)).drift) == "None"


async def test_a_child_whose_request_expires() -> None:
    store = MemoryStore()
    below = Case(store, call("pay"), "Asked.", expires_in=10)
    story = Story()
    config = LoopConfig(
        stream=story.model(call("helper", task="pay"), "Done."),
        tools=[agent_tool("helper", "helps", below.config.replace(run_log=None))],
        clock=below.clock,
        run_log=RunLog(store, mail_every=None),
    )
    first = await run("Go.", AgentContext(identity=RunIdentity(ROOT)), config)
    [request] = first.waiting
    assert (await resume(store, ROOT, config)).waiting == (request,)
    below.clock.time_ms += 10_000
    result = await resume(store, ROOT, config)
    assert result.outcome is LoopOutcome.DONE
    assert below.story.ran == []
    assert [type(verdict) for verdict in below.verdicts(request.run_id)] == [Expired]
    with pytest.raises(RequestExpired):
        await decide(store, ROOT, request.request_id, Allow(), clock=below.clock)
