"""`advance`: one step that is safe to repeat; and runs that go on after a deployment."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from clark_agent import (
    Agent,
    AssistantMessage,
    BeforeToolCallContext,
    Block,
    Budget,
    LoopError,
    LoopOutcome,
    Rewrite,
    RunAborted,
    RunResult,
    ToolResultMessage,
    ToolSuspended,
    tool,
)
from clark_agent.errors import AlreadyDecided, ConfigError, StreamError, ToolAborted, ToolFatal
from clark_agent.run_log import (
    Allow,
    Deny,
    LoadedRun,
    MemoryStore,
    RunBusy,
    RunExists,
    RunNotFound,
    RunStore,
    advance,
    decide,
    deliver,
)
from clark_agent.run_log.records import RunBegan, RunResumed
from clark_agent.stream import Error, StreamErrorKind
from clark_agent.testing import ScriptedStream, call
from clark_agent.waiting import Suspend
from tests.run_log.crash_driver import in_child
from tests.run_log.stories import Model
from tests.run_log.storing import KINDS, open_store


def paying(ran: list[Any], **more: Any) -> Agent[Any, Any]:
    """An agent that pays once, if it may."""

    @tool
    async def pay(amount: int) -> str:
        """Pay."""
        ran.append(amount)
        await asyncio.sleep(0)
        return f"paid {amount}"

    settings = {"tools": [pay], "plugins": [Gate()], **more}
    return Agent(Model(call("pay", amount=3), "Done."), **settings)


class Gate:
    def __init__(self, name: str = "gate") -> None:
        self.name = name

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend:
        return Suspend({"may": ctx.args})


def texts(result: RunResult) -> list[str]:
    return [m.plain_text for m in result.messages if isinstance(m, ToolResultMessage)]


# --- several at once ------------------------------------------------------------------------------


def begin_at_once(kind: str, folder: Path, processes: int) -> Counter[str]:
    """Processes that advance one fresh run at the same moment: what they got."""
    reader, writer = os.pipe()
    children: list[int] = []
    for number in range(processes):
        forked = os.fork()
        if forked == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent closes its end
            in_child(lambda: _advance_once(kind, folder, number))  # noqa: B023
        children.append(forked)
    os.close(reader)
    os.close(writer)
    for forked in children:
        assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    return Counter((folder / f"got-{number}").read_text() for number in range(processes))


def _advance_once(kind: str, folder: Path, number: int) -> None:
    @tool
    async def pay(amount: int) -> str:
        """Pay."""
        file = os.open(folder / "effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b"paid\n")
        os.close(file)
        await asyncio.sleep(0.001)
        return "paid"

    agent = Agent(Model(call("pay", amount=1), "Done."), tools=[pay])
    try:
        result = asyncio.run(advance(open_store(kind, folder), "fresh", agent, "Pay."))
        got = f"{result.outcome} {len(result.messages)}"
    except RunBusy:
        got = "busy"
    (folder / f"got-{number}").write_text(got)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_of_several_processes_one_begins_the_run(kind: str) -> None:
    came: Counter[str] = Counter()
    for _ in range(8):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            got = begin_at_once(kind, folder, 4)
            assert got["done 4"] >= 1
            assert set(got) <= {"busy", "done 4"}
            assert (folder / "effects").read_text() == "paid\n"
            loaded = open_store(kind, folder).load("fresh")
            assert loaded.problems == ()
            begins = [r for r in loaded.records if isinstance(r.entry, (RunBegan, RunResumed))]
            assert len(begins) == 1
            came += got
    assert came["busy"] > 0


# --- what it returns ------------------------------------------------------------------------------


async def test_it_begins_waits_goes_on_and_reports() -> None:
    store, ran = MemoryStore(), list[Any]()
    agent = paying(ran)
    first = await advance(store, "r", agent, "Pay.")
    assert first.outcome is LoopOutcome.SUSPENDED
    records = len(store.load("r").records)
    again = await advance(store, "r", agent, "Pay.")
    assert (again.waiting, again.messages, again.usage) == (
        first.waiting,
        first.messages,
        first.usage,
    )
    assert len(store.load("r").records) == records
    await decide(store, "r", first.waiting[0].request_id, Allow())
    done = await advance(store, "r", agent)
    assert (done.outcome, ran, texts(done)) == (LoopOutcome.DONE, [3], ["paid 3"])
    records = len(store.load("r").records)
    for prompts in ("Pay.", None):
        reported = await advance(store, "r", agent, prompts)
        assert reported.messages == done.messages
        assert (reported.output, reported.outcome) == ("Done.", LoopOutcome.DONE)
        assert (reported.usage, reported.tree_usage) == (done.usage, done.tree_usage)
        assert (reported.limit, reported.waiting) == (None, ())
    assert len(store.load("r").records) == records
    assert ran == [3]


async def test_other_prompts_are_another_run() -> None:
    store, ran = MemoryStore(), list[Any]()
    agent = paying(ran)
    await advance(store, "r", agent, "Pay.")
    with pytest.raises(RunExists, match="with other prompts"):
        await advance(store, "r", agent, "Do not pay.")
    with pytest.raises(RunNotFound):
        await advance(store, "unknown", agent)
    assert [run.run_id for run in store.runs()] == ["r"]


class Weather(Struct):
    """The weather."""

    city: str
    degrees: int


@pytest.mark.parametrize("mode", ["tool", "native", "prompted"])
async def test_the_output_of_every_mode_is_reported_again(mode: str) -> None:
    text = '{"city": "Lisbon", "degrees": 21}'
    store = MemoryStore()
    agent = Agent(ScriptedStream([text]), output=Weather, output_mode=mode)
    if mode == "tool":
        [name] = agent.config.registry
        agent = agent.replace(model=ScriptedStream([call(name, city="Lisbon", degrees=21)]))
    first = await advance(store, "r", agent, "How warm is it?")
    assert first.output == Weather("Lisbon", 21)
    again = await advance(store, "r", agent, "How warm is it?")
    assert again.output == first.output
    assert again.messages == first.messages
    assert again.usage == first.usage


async def test_a_limit_is_reported_again() -> None:
    store, ran = MemoryStore(), list[Any]()
    agent = paying(ran, plugins=[], budget=Budget(turns=1, wrap_up_at=None))
    first = await advance(store, "r", agent, "Pay.")
    assert first.outcome is LoopOutcome.OUT_OF_BUDGET
    again = await advance(store, "r", agent, "Pay.")
    assert (again.outcome, again.limit, again.messages) == (
        first.outcome,
        first.limit,
        first.messages,
    )
    assert first.limit is not None


@pytest.mark.parametrize("error", [ToolFatal("no money"), ToolAborted("no bank")])
async def test_a_failure_is_raised_again_and_can_be_tried_again(error: Exception) -> None:
    store, attempts = MemoryStore(), list[int]()

    @tool(idempotent=True)
    async def pay() -> str:
        """Pay."""
        attempts.append(1)
        raise error

    agent = Agent(Model(call("pay"), "Done."), tools=[pay])
    with pytest.raises(LoopError) as first:
        await advance(store, "r", agent, "Pay.")
    records = len(store.load("r").records)
    with pytest.raises(LoopError) as again:
        await advance(store, "r", agent, "Pay.")
    assert str(again.value) == str(first.value).splitlines()[0]
    assert isinstance(again.value, RunAborted) is isinstance(first.value, RunAborted)
    assert again.value.messages == first.value.messages
    assert again.value.usage == first.value.usage
    assert len(attempts) == 1
    assert len(store.load("r").records) == records
    result = await advance(store, "r", agent, "Pay.", retry_failed=True)
    assert result.outcome is LoopOutcome.DONE
    assert len(attempts) == 1, "the call has its result"


class Behind(MemoryStore):
    """A store that returns what it had at some moment, as to a process that is slow."""

    seen: LoadedRun | None = None

    def load(self, run_id: str) -> LoadedRun:
        seen, self.seen = self.seen, None
        return super().load(run_id) if seen is None else seen


@pytest.mark.parametrize("fails", [False, True])
async def test_a_run_that_ends_while_it_is_read_is_busy(fails: bool) -> None:
    """It is neither reported as nothing to resume, nor, if it has failed, resumed."""
    store, ran = Behind(), list[Any]()
    agent = paying(ran)
    first = await advance(store, "r", agent, "Pay.")
    await decide(store, "r", first.waiting[0].request_id, Allow())
    early = store.load("r")
    if fails:
        broken = agent.replace(model=ScriptedStream([]))
        with pytest.raises(LoopError):
            await advance(store, "r", broken)
    else:
        await advance(store, "r", agent)
    records = len(store.load("r").records)
    store.seen = early
    with pytest.raises(RunBusy):
        await advance(store, "r", agent, "Pay.")
    assert len(store.load("r").records) == records
    assert ran == [3]


# --- a deployment between ask and answer ----------------------------------------------------------


async def suspended(agent: Agent[Any, Any]) -> tuple[RunStore, str]:
    """A run that waits for its permission."""
    store = MemoryStore()
    first = await advance(store, "r", agent, "Pay.")
    [request] = first.waiting
    return store, request.request_id


async def test_a_tool_that_is_gone_changes_nothing() -> None:
    ran: list[Any] = []
    store, request_id = await suspended(paying(ran))
    await decide(store, "r", request_id, Allow())
    records = len(store.load("r").records)
    with pytest.raises(ConfigError, match="waits for the tool 'pay'"):
        await advance(store, "r", paying(ran, tools=[]))
    assert len(store.load("r").records) == records
    result = await advance(store, "r", paying(ran))
    assert (texts(result), ran) == (["paid 3"], [3])


async def test_a_tool_that_is_gone_is_not_needed_to_refuse() -> None:
    ran: list[Any] = []
    store, request_id = await suspended(paying(ran))
    await decide(store, "r", request_id, Deny("too much"))
    result = await advance(store, "r", paying(ran, tools=[], plugins=[]))
    assert texts(result) == ["The call was not run: it was refused: too much"]
    assert ran == []


async def test_a_tool_with_another_schema_refuses_the_old_arguments() -> None:
    ran: list[Any] = []
    store, request_id = await suspended(paying(ran))
    await decide(store, "r", request_id, Allow())

    @tool
    async def pay(amount: int, currency: str) -> str:
        """Pay."""
        ran.append((amount, currency))
        return "paid"

    result = await advance(store, "r", paying(ran, tools=[pay]))
    [text] = texts(result)
    assert "currency" in text
    assert (result.outcome, ran) == (LoopOutcome.DONE, [])


class Added:
    name = "added"

    def __init__(self, decision: Any) -> None:
        self.decision = decision

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Any:
        return self.decision


async def test_a_new_hook_blocks_what_was_allowed() -> None:
    ran: list[Any] = []
    store, request_id = await suspended(paying(ran))
    await decide(store, "r", request_id, Allow())
    result = await advance(store, "r", paying(ran, plugins=[Gate(), Added(Block("closed"))]))
    assert (texts(result), ran) == (["closed"], [])


@pytest.mark.parametrize("order", ["before", "after"])
async def test_a_new_hook_that_asks_is_asked_too(order: str) -> None:
    ran: list[Any] = []
    store, request_id = await suspended(paying(ran))
    await decide(store, "r", request_id, Allow())
    both: list[Any] = [Gate(), Added(Suspend("sure?"))]
    agent = paying(ran, plugins=both if order == "after" else both[::-1])
    result = await advance(store, "r", agent)
    assert [(r.asked_by, r.request) for r in result.waiting] == [("added", "sure?")]
    assert ran == []
    await decide(store, "r", result.waiting[0].request_id, Allow())
    result = await advance(store, "r", agent)
    assert (texts(result), ran) == (["paid 3"], [3])


async def test_a_new_hook_that_rewrites_is_asked_about_again() -> None:
    """What was allowed was the call with its old arguments."""
    ran: list[Any] = []
    store, request_id = await suspended(paying(ran))
    await decide(store, "r", request_id, Allow())
    agent = paying(ran, plugins=[Added(Rewrite({"amount": 4})), Gate()])
    result = await advance(store, "r", agent)
    assert [r.arguments for r in result.waiting] == [{"amount": 4}]
    assert ran == []
    await decide(store, "r", result.waiting[0].request_id, Allow())
    result = await advance(store, "r", agent)
    assert (texts(result), ran) == (["paid 4"], [4])


async def test_a_refusal_holds_without_the_hook_that_asked() -> None:
    ran: list[Any] = []
    store, request_id = await suspended(paying(ran))
    await decide(store, "r", request_id, Deny("never"))
    result = await advance(store, "r", paying(ran, plugins=[]))
    assert texts(result) == ["The call was not run: it was refused: never"]
    assert ran == []


async def test_a_gate_with_another_name_asks_again() -> None:
    """A request belongs to the plugin that asks."""
    ran: list[Any] = []
    store, request_id = await suspended(paying(ran))
    await decide(store, "r", request_id, Allow())
    agent = paying(ran, plugins=[Gate("guard")])
    result = await advance(store, "r", agent)
    assert [r.asked_by for r in result.waiting] == ["guard"]
    assert ran == []
    await decide(store, "r", result.waiting[0].request_id, Allow())
    assert texts(await advance(store, "r", agent)) == ["paid 3"]


async def test_a_failed_run_raises_an_error_of_the_same_class_again() -> None:
    store = MemoryStore()

    async def model(request: Any, signal: Any) -> Any:
        yield Error(AssistantMessage.from_text(""), StreamErrorKind.FATAL, "it broke")

    agent = Agent(model)
    with pytest.raises(StreamError) as first:
        await advance(store, "r", agent, "Go.")
    with pytest.raises(StreamError) as again:
        await advance(store, "r", agent, "Go.")
    assert (again.value.kind, again.value.message) == (first.value.kind, first.value.message)
    assert str(again.value) == str(first.value)
    assert again.value.messages == first.value.messages


@pytest.mark.parametrize("kind", KINDS)
async def test_an_event_that_came_before_the_run_asked_for_it(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)

    @tool
    async def order() -> str:
        """Order something."""
        raise ToolSuspended({"order": 1}, event="paid")

    agent = Agent(Model(call("order"), call("order"), "Done."), tools=[order], plugins=[Gate()])
    first = await advance(store, "r", agent, "Go.")
    deliver(store, "r", "paid", {"payment": 1})
    deliver(store, "r", "paid", {"payment": 2})
    await decide(store, "r", first.waiting[0].request_id, Allow())
    second = await advance(store, "r", agent)
    assert [request.needs for request in second.waiting] == ["permission"]  # of the second order
    await decide(store, "r", second.waiting[0].request_id, Allow())
    result = await advance(store, "r", agent)
    assert result.outcome is LoopOutcome.DONE
    assert texts(result) == ['{"payment":1}', '{"payment":2}']


@pytest.mark.parametrize("run_id", [5, None, b"r", "", "a\ud800"])
async def test_an_invalid_id_is_refused(run_id: Any, tmp_path: Path) -> None:
    for kind in KINDS:
        with pytest.raises(ConfigError, match="the id of a run"):
            await advance(open_store(kind, tmp_path / kind), run_id, paying([]), "Go.")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_event_that_came_first_counts_and_no_decision_after_it(
    kind: str, tmp_path: Path
) -> None:
    store = open_store(kind, tmp_path)

    @tool
    async def order() -> str:
        """Order something."""
        raise ToolSuspended({"order": 1}, event="paid")

    agent = Agent(Model(call("order"), "Done."), tools=[order])
    (request,) = (await advance(store, "r", agent, "Go.")).waiting
    deliver(store, "r", "paid", "paid in full")
    with pytest.raises(AlreadyDecided):
        await decide(store, "r", request.request_id, Deny("too late"))
    assert texts(await advance(store, "r", agent)) == ["paid in full"]
