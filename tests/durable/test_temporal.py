"""Runs in a real Temporal server: to the end, through decisions, and past workers that die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.worker import Replayer, Worker

from clark_agent import (
    Agent,
    AssistantMessage,
    LoopOutcome,
    RunAborted,
    StreamError,
    StreamErrorKind,
    ToolContext,
    ToolResultMessage,
    ToolSuspended,
    tool,
)
from clark_agent.durable.temporal import (
    ClarkPlugin,
    ClarkRun,
    RunHandle,
    handle,
    remote_agent_tool,
    start,
)
from clark_agent.errors import (
    AlreadyDecided,
    ConfigError,
    DecisionNotApplicable,
    InvalidContinuationError,
    RequestExpired,
    RequestNotFound,
    RunExists,
    RunNotFound,
)
from clark_agent.run_log import (
    Allow,
    Deny,
    GiveArguments,
    GiveResult,
    RunLog,
    RunStore,
    SqliteStore,
    WaitingRequest,
    decide,
    follow,
)
from clark_agent.run_log.records import CallSuspended, RunFailed, RunResumed, SteeringAccepted
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import SUSPEND, ApprovalGate
from tests.durable.temporal_driver import open_store, payer

pytestmark = pytest.mark.slow

HEARTBEAT = 1.0


@pytest.fixture
async def client(temporal_address: str) -> Client:
    return await Client.connect(temporal_address)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(tmp_path / "runs.db")
    yield made
    made.close()


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-{os.getpid()}"


@pytest.fixture
def run_id(queue: str) -> str:
    return f"run-of-{queue}"


@asynccontextmanager
async def working(
    client: Client,
    queue: str,
    store: SqliteStore,
    *agents: Agent[Any, Any],
    deps: Any = None,
    max_runs: int | None = None,
) -> AsyncIterator[None]:
    """A worker in this process."""
    plugin = ClarkPlugin(store, agents, deps=deps)
    async with Worker(
        client, task_queue=queue, plugins=[plugin], max_concurrent_activities=max_runs
    ):
        yield


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until a function, plain or async, returns something, and return it."""
    async with asyncio.timeout(90):
        while True:
            found = condition()
            found = await found if isawaitable(found) else found
            if found:
                return found
            await asyncio.sleep(0.02)


async def first_request(run: RunHandle[Any]) -> WaitingRequest:
    waiting: tuple[WaitingRequest, ...] = await until(run.waiting)
    return waiting[0]


def entries(store: RunStore, run_id: str, kind: type) -> list[Any]:
    return [r.entry for r in store.load(run_id).records if isinstance(r.entry, kind)]


refunded: list[tuple[str, float]] = []


@tool
def refund(order: str, amount: float) -> str:
    """Refund an order."""
    refunded.append((order, amount))
    return f"refunded {amount:.2f} for {order}"


def support(*script: Any, **settings: Any) -> Agent[str, None]:
    """An agent whose refunds wait for a decision."""
    gate = ApprovalGate(SUSPEND, tools=["refund"], timeout=settings.pop("timeout", None))
    steps = script or (call("refund", order="A-1", amount=9.0), "Done.")
    return Agent(ScriptedStream(steps), name="support", tools=[refund], plugins=[gate], **settings)


# --- the plugin -------------------------------------------------------------------------------


def test_agents_need_different_names_and_the_store_of_the_plugin(store: SqliteStore) -> None:
    with pytest.raises(ConfigError, match="has no name"):
        ClarkPlugin(store, [Agent(ScriptedStream([]))])
    with pytest.raises(ConfigError, match="two agents have the name 'support'"):
        ClarkPlugin(store, [support(), support()])
    not_an_agent: Any = "support"
    with pytest.raises(ConfigError, match="an Agent is needed, not str"):
        ClarkPlugin(store, [not_an_agent])


# --- to the end -------------------------------------------------------------------------------


class Verdict(Struct):
    """An output."""

    city: str
    rain: bool


async def test_a_run_goes_to_its_end(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    script = [call("finish", city="Porto", rain=True)]
    agent: Agent[Verdict, None] = Agent(ScriptedStream(script), name="weather", output=Verdict)
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Rain in Porto?", id=run_id, task_queue=queue)
        result = await run.result()
        with_store = await handle(client, agent, run_id, store=store).result()
    assert result.output == with_store.output == Verdict("Porto", True)
    assert result.outcome is LoopOutcome.DONE
    assert result.usage == with_store.usage
    assert [type(m).__name__ for m in with_store.messages] == [
        "UserMessage",
        "AssistantMessage",
        "ToolResultMessage",
    ]


async def test_without_a_store_the_result_has_the_last_text_only(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    agent = Agent(ScriptedStream(["Hello Ada."]), name="talker")
    async with working(client, queue, store, agent):
        run = await start(client, agent, "I am Ada.", id=run_id, task_queue=queue)
        result = await run.result()
    assert result.output == result.text == "Hello Ada."
    assert [message.plain_text for message in result.messages] == ["Hello Ada."]


@pytest.mark.parametrize("kind", ["value", "function", "coroutine"])
async def test_tools_get_the_dependencies_of_the_worker(
    client: Client, store: SqliteStore, queue: str, run_id: str, kind: str
) -> None:
    @tool
    def who(ctx: ToolContext[str]) -> str:
        """Say who it is."""
        return f"deps: {ctx.deps}"

    async def of_run(given: str) -> str:
        return f"for {given}"

    given = {"value": "for all", "function": lambda given: f"for {given}", "coroutine": of_run}
    agent = Agent(ScriptedStream([call("who"), "Done."]), name="a", tools=[who], deps_type=str)
    async with working(client, queue, store, agent, deps=given[kind]):
        run = await start(client, agent, "Who?", id=run_id, task_queue=queue, store=store)
        result = await run.result()
    expected = "deps: for all" if kind == "value" else f"deps: for {run_id}"
    assert result.messages[2].plain_text == expected


async def test_starting_twice_is_starting_once(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    model = ScriptedStream(["Hello."])
    agent = Agent(model, name="talker")
    async with working(client, queue, store, agent):
        for _ in range(2):  # the second time it has ended
            first, second = await asyncio.gather(
                start(client, agent, "Hi.", id=run_id, task_queue=queue),
                start(client, agent, "Hi.", id=run_id, task_queue=queue),
            )
            assert (await first.result()).output == (await second.result()).output == "Hello."
        with pytest.raises(RunExists, match="of another agent or with other prompts"):
            await start(client, agent, "Bye.", id=run_id, task_queue=queue)
        other = Agent(model, name="other")
        with pytest.raises(RunExists):
            await start(client, other, "Hi.", id=run_id, task_queue=queue)
    assert len(model.requests) == 1


async def test_a_run_that_another_engine_has_begun_with_other_prompts_is_not_touched(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    from clark_agent.run_log import advance

    agent = Agent(ScriptedStream(["Hello."]), name="talker")
    await advance(store, run_id, agent, "Hi.")
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Bye.", id=run_id, task_queue=queue)
        with pytest.raises(RunExists, match="with other prompts"):
            await run.result()


async def test_a_terminated_workflow_is_started_again(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    agent = support()
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Refund A-1.", id=run_id, task_queue=queue)
        request = await first_request(run)
        await run.workflow.terminate()
        with pytest.raises(WorkflowFailureError):
            await run.result()
        again = await start(client, agent, "Refund A-1.", id=run_id, task_queue=queue)
        assert (await first_request(again)).request_id == request.request_id
        await again.decide(request.request_id, Deny("no"))
        assert (await again.result()).output == "Done."


async def test_a_run_that_does_not_exist(client: Client, store: SqliteStore, run_id: str) -> None:
    run = handle(client, support(), run_id)
    with pytest.raises(RunNotFound):
        await run.result()
    with pytest.raises(RunNotFound):
        await run.steer("hello")
    with pytest.raises(RunNotFound):
        await run.decide("a/1/0/b", Allow())
    with pytest.raises(RunNotFound):
        await run.waiting()
    with pytest.raises(RunNotFound):
        await run.wake()


@pytest.mark.parametrize("setting", [{"heartbeat": 0}, {"poll": -1.0}, {"heartbeat": "5"}])
async def test_settings_are_checked(client: Client, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be more than 0 seconds"):
        await start(client, support(), "Hi.", id="x", task_queue="q", **setting)


async def test_prompts_of_more_than_two_megabytes_are_refused(client: Client) -> None:
    with pytest.raises(ConfigError, match="which allows 2 MB"):
        await start(client, support(), "x" * 3_000_000, id="x", task_queue="q")


async def test_a_result_of_more_than_two_megabytes_is_read_from_the_store(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    text = "x" * 3_000_000
    agent = Agent(ScriptedStream([AssistantMessage.from_text(text)]), name="talker")
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Go.", id=run_id, task_queue=queue)
        with pytest.raises(ConfigError, match="too large to be carried"):
            await run.result()
        result = await handle(client, agent, run_id, store=store).result()
    assert result.output == text


# --- decisions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (Allow(), "refunded 9.00 for A-1"),
        (Deny("Ask first."), "The call was not run: it was refused: Ask first."),
        (GiveArguments({"order": "A-1", "amount": 4.0}), "refunded 4.00 for A-1"),
        (GiveResult("A voucher."), "A voucher."),
    ],
    ids=["allow", "deny", "arguments", "result"],
)
async def test_a_suspended_run_goes_on_when_it_is_decided(
    client: Client, store: SqliteStore, queue: str, run_id: str, decision: Any, said: str
) -> None:
    agent = support()
    async with working(client, queue, store, agent):
        run = await start(
            client, agent, "Refund A-1.", id=run_id, task_queue=queue, poll=None, store=store
        )
        without = handle(client, agent, run_id)
        request = await first_request(without)
        assert request == await first_request(run)
        assert request.arguments == {"order": "A-1", "amount": 9.0}
        await without.decide(request.request_id, decision, by="grace")
        result = await run.result()
        with pytest.raises(AlreadyDecided) as second:
            await run.decide(request.request_id, Deny())
        with pytest.raises(RequestNotFound):  # it has ended, and nobody can look why
            await without.decide(request.request_id, Deny())
        assert await run.waiting() == await without.waiting() == ()
    assert result.messages[2].plain_text == said
    assert (second.value.decision, second.value.by) == (decision, "grace")


async def test_of_two_requests_each_is_decided_once(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    calls = [call("refund", order="A-1", amount=1.0), call("refund", order="A-2", amount=2.0)]
    agent = support(calls, "Done.")
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Refund both.", id=run_id, task_queue=queue, poll=None)
        await first_request(run)
        one, two = await run.waiting()
        await run.decide(one.request_id, Allow(), by="grace")
        assert await run.waiting() == (two,)
        with pytest.raises(AlreadyDecided) as error:
            await run.decide(one.request_id, Deny("no"), by="linus")
        assert (error.value.decision, error.value.by) == (Allow(), "grace")
        assert error.value.request_id == one.request_id
        with pytest.raises(RequestNotFound):
            await run.decide(f"{run_id}/9/9/nothing", Allow())
        not_a_decision: Any = "allow"
        with pytest.raises(TypeError):
            await run.decide(two.request_id, not_a_decision)
        await run.decide(two.request_id, Allow())
        await run.result()
    assert ("A-1", 1.0) in refunded


async def test_a_decision_that_does_not_fit(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    @tool
    def ask() -> str:
        """Ask."""
        raise ToolSuspended({"kind": "question"})

    agent = Agent(ScriptedStream([call("ask"), "Done."]), name="asker", tools=[ask])
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Ask.", id=run_id, task_queue=queue, store=store)
        request = await first_request(run)
        with pytest.raises(DecisionNotApplicable, match="Use GiveResult or Deny"):
            await run.decide(request.request_id, Allow())
        await run.decide(request.request_id, GiveResult({"answer": 42}))
        assert (await run.result()).messages[2].plain_text == '{"answer":42}'


async def test_a_request_expires_by_a_timer(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    agent = support(timeout=0.5)
    async with working(client, queue, store, agent):
        run = await start(
            client, agent, "Refund A-1.", id=run_id, task_queue=queue, poll=None, store=store
        )
        result = await run.result()
        (request,) = entries(store, run_id, CallSuspended)
        with pytest.raises(RequestExpired):
            await run.decide(request.request.request_id, Allow())
    assert "expired" in result.messages[2].plain_text


async def test_a_decision_without_a_handle_is_found_by_a_poll_or_a_signal(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    for name, poll in (("polled", 0.2), ("woken", None)):
        agent = support()
        async with working(client, f"{queue}-{name}", store, agent):
            run = await start(
                client,
                agent,
                "Refund A-1.",
                id=f"{run_id}-{name}",
                task_queue=f"{queue}-{name}",
                poll=poll,
            )
            request = await first_request(run)
            await decide(store, run.id, request.request_id, Allow())
            if poll is None:
                await run.wake()
            assert (await run.result()).output == "Done."
            await run.wake()  # has no effect


async def test_an_event_wakes_the_run(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    @tool
    def wait_for_payment() -> str:
        """Wait."""
        raise ToolSuspended(event="paid")

    model = ScriptedStream([call("wait_for_payment"), "Paid."])
    agent = Agent(model, name="shop", tools=[wait_for_payment])
    async with working(client, queue, store, agent):
        run = await start(
            client, agent, "Ship it.", id=run_id, task_queue=queue, poll=None, store=store
        )
        await first_request(run)
        assert await run.deliver("paid", {"amount": 90}, id="payment-1")
        result = await run.result()
        assert await run.deliver("paid", {"amount": 90}, id="payment-1") is False
        with pytest.raises(InvalidContinuationError, match="has ended"):
            await handle(client, agent, run_id).deliver("paid")
    assert result.messages[2].plain_text == '{"amount":90}'


async def test_a_deploy_that_lacks_the_tool_holds_the_run_up_until_the_next(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    agent = support()
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Refund A-1.", id=run_id, task_queue=queue)
        request = await first_request(run)
        assert await run.problem() is None
    async with working(client, queue, store, support().replace(tools=[])):
        await run.decide(request.request_id, Allow())
        problem = await until(run.problem)
    assert problem.startswith("ConfigError: a call in the log waits for the tool 'refund'")
    async with working(client, queue, store, agent):
        assert (await run.result()).output == "Done."


async def test_a_worker_without_the_agent_says_so(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    agent = Agent(ScriptedStream(["Hello."]), name="talker")
    async with working(client, queue, store, support()):
        run = await start(client, agent, "Hi.", id=run_id, task_queue=queue)
        problem = await until(run.problem)
        assert "this worker has no agent 'talker' (it has support)" in problem
        await run.workflow.cancel()  # nothing has begun
        with pytest.raises(RunAborted):
            await run.result()
    with pytest.raises(RunNotFound):
        store.load(run_id)


# --- messages ---------------------------------------------------------------------------------


def slow_agent(began: asyncio.Event, go: asyncio.Event, *script: Any) -> Agent[str, None]:
    """An agent whose tool waits for the test."""

    @tool
    async def work() -> str:
        """Work."""
        began.set()
        await go.wait()
        return "worked"

    return Agent(ScriptedStream([call("work"), *script]), name="slow", tools=[work])


async def test_a_running_agent_is_steered(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    agent = slow_agent(began, go, "Well.", "More.")
    async with working(client, queue, store, agent, max_runs=1):  # messages need no room
        run = await start(client, agent, "Go.", id=run_id, task_queue=queue, store=store)
        assert await run.steer("Faster.", id="one")  # possibly before it has begun
        assert await run.follow_up("And then?")
        assert not await run.steer("Faster.", id="one")
        with pytest.raises(ValueError, match="when must be one of"):
            await run.steer("x", "soon")  # type: ignore[arg-type]
        await began.wait()
        await until(lambda: len(entries(store, run_id, SteeringAccepted)) == 2)
        go.set()
        result = await run.result()
        with pytest.raises(InvalidContinuationError):
            await run.steer("Too late.")
        with pytest.raises(InvalidContinuationError):
            await handle(client, agent, run_id).steer("Too late.")
    said = [message.plain_text for message in result.messages]
    assert said == ["Go.", "", "worked", "Faster.", "Well.", "And then?", "More."]


async def test_a_running_agent_is_cancelled(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    agent = slow_agent(began, go)
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Go.", id=run_id, task_queue=queue)
        await began.wait()
        assert await run.cancel("not needed")
        with pytest.raises(RunAborted) as error:
            await run.result()
        with pytest.raises(RunAborted) as recorded:
            await handle(client, agent, run_id, store=store).result()
    assert error.value.reason == recorded.value.reason == "not needed"
    assert error.value.messages == ()
    assert len(recorded.value.messages) == 3


async def test_a_suspended_run_is_cancelled(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    agent = support()
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Refund A-1.", id=run_id, task_queue=queue, poll=None)
        await first_request(run)
        await run.cancel("not needed")
        with pytest.raises(RunAborted, match="not needed"):
            await run.result()


@pytest.mark.parametrize("state", ["running", "running, without a mailbox", "suspended"])
async def test_a_cancelled_workflow_aborts_its_run(
    client: Client, store: SqliteStore, queue: str, run_id: str, state: str
) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    agent = support() if state == "suspended" else slow_agent(began, go)
    if state == "running, without a mailbox":  # a heartbeat tells the worker
        agent = agent.replace(run_log=RunLog(store, mail_every=None))
    async with working(client, queue, store, agent):
        run = await start(
            client, agent, "Go.", id=run_id, task_queue=queue, poll=None, heartbeat=HEARTBEAT
        )
        await (first_request(run) if state == "suspended" else began.wait())
        await run.workflow.cancel()
        with pytest.raises(RunAborted, match="the workflow was cancelled"):
            await run.result()
        assert (await run.workflow.describe()).status is WorkflowExecutionStatus.CANCELED
    (failed,) = entries(store, run_id, RunFailed)
    assert (failed.error, failed.reason) == ("RunAborted", "the workflow was cancelled")


async def test_a_run_is_aborted_although_no_worker_has_its_agent(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    agent, other = support(), Agent(ScriptedStream([]), name="other")
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Refund A-1.", id=run_id, task_queue=queue)
        request = await first_request(run)
    async with working(client, queue, store, other):
        await run.decide(request.request_id, Allow())
        await until(run.problem)
        await run.workflow.cancel()
        await until(lambda: store.mail(run_id))
    async with working(client, queue, store, agent):
        with pytest.raises(RunAborted):
            await run.result()


async def test_a_long_history_is_cut(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    agent = support()

    async def begin() -> RunHandle[str]:
        return await start(client, agent, "Refund A-1.", id=run_id, task_queue=queue, poll=None)

    async with working(client, queue, store, agent):
        run = await begin()
        request = await first_request(run)
        first = (await run.workflow.describe()).run_id

        async def is_cut() -> bool:
            await run.wake()
            return (await run.workflow.describe()).run_id != first

        await until(is_cut)
        again = await begin()
        await again.decide(request.request_id, Allow())
        assert (await run.result()).output == (await again.result()).output == "Done."
    histories = [
        await client.get_workflow_handle(run_id, run_id=each).fetch_history()
        for each in (first, (await run.workflow.describe()).run_id)
    ]
    replayer = Replayer(workflows=[ClarkRun])
    for history in histories:
        await replayer.replay_workflow(history)
    assert len(entries(store, run_id, RunResumed)) == 1


async def test_events_are_followed(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    agent = Agent(ScriptedStream(["Hello."]), name="talker")
    run = await start(client, agent, "Hi.", id=run_id, task_queue=queue, store=store)
    following = asyncio.create_task(_all(run))  # before any worker has it
    async with working(client, queue, store, agent):
        await run.result()
        events = await following
    assert events == [each async for each in follow(store, run_id)]
    assert [e async for e in run.events(after=events[3].id)] == events[4:]
    with pytest.raises(ConfigError, match="give this handle the store"):
        await _all(handle(client, agent, run_id))
    with pytest.raises(RunNotFound):
        await _all(handle(client, agent, f"{run_id}-x", store=store))


async def _all(run: RunHandle[Any]) -> list[Any]:
    return [event async for event in run.events()]


# --- failures ---------------------------------------------------------------------------------


async def test_a_run_that_fails_is_not_repeated(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    model = ScriptedStream([call("refund", order="A-1", amount=1.0)])
    agent = Agent(model, name="failing", tools=[refund])
    async with working(client, queue, store, agent):
        run = await start(client, agent, "Go.", id=run_id, task_queue=queue)
        with pytest.raises(StreamError) as error:
            await run.result()
        with pytest.raises(StreamError) as recorded:
            await handle(client, agent, run_id, store=store).result()
        with pytest.raises(StreamError):  # starting it again returns the same
            await (await start(client, agent, "Go.", id=run_id, task_queue=queue)).result()
    assert error.value.kind is recorded.value.kind is StreamErrorKind.FATAL
    assert str(error.value) == str(recorded.value)
    assert error.value.message == "this is call 2, but the script ends with call 1"
    assert error.value.usage == recorded.value.usage
    assert len(recorded.value.messages) == 3
    assert len(model.requests) == 2
    assert len(entries(store, run_id, RunFailed)) == 1


# --- other task queues ------------------------------------------------------------------------


def chief_and_clerk(queue: str, *script: Any) -> tuple[Agent[str, None], Agent[str, None]]:
    clerk = support(*script).replace(name="clerk")
    asks = remote_agent_tool("ask", "Does the paperwork.", clerk, task_queue=f"{queue}-clerks")
    calls = [call("ask", task="Refund A-1."), call("ask", task="Refund A-2.")]
    model = ScriptedStream([calls[: len(script) // 2 or 2], "All done."])
    return Agent(model, name="chief", tools=[asks]), clerk


async def test_an_agent_asks_agents_on_another_task_queue(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    chief, clerk = chief_and_clerk(queue, "First.", "Second.", "", "")
    async with (
        working(client, queue, store, chief),
        working(client, f"{queue}-clerks", store, clerk),
    ):
        run = await start(client, chief, "Go.", id=run_id, task_queue=queue, poll=None, store=store)
        result = await run.result()
        below = [await handle(client, clerk, f"{run_id}/1/{n}").result() for n in (0, 1)]
    assert result.output == "All done."
    results = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    assert [m.plain_text for m in results] == [each.output for each in below]
    assert {each.output for each in below} == {"First.", "Second."}


async def test_an_agent_on_another_task_queue_waits_for_a_decision(
    client: Client, store: SqliteStore, queue: str, run_id: str
) -> None:
    steps = [call("refund", order="A-9", amount=5.0), "Refunded."]
    chief, clerk = chief_and_clerk(queue, *steps)
    async with (
        working(client, queue, store, chief),
        working(client, f"{queue}-clerks", store, clerk),
    ):
        run = await start(client, chief, "Go.", id=run_id, task_queue=queue, poll=None, store=store)
        below = handle(client, clerk, f"{run_id}/1/0", store=store)
        await first_request(run)
        request = await first_request(below)
        await below.decide(request.request_id, Allow(), by="grace")
        result = await run.result()
    assert result.messages[2].plain_text == "Refunded."
    assert ("A-9", 5.0) in refunded


@pytest.mark.parametrize("what", ["fails", "is cancelled"])
async def test_an_agent_on_another_task_queue(
    client: Client, store: SqliteStore, queue: str, run_id: str, what: str
) -> None:
    steps = [call("refund", order="A-9", amount=5.0), "x"]
    chief, clerk = chief_and_clerk(queue, *steps)
    if what == "fails":
        clerk = clerk.replace(model=ScriptedStream([]))
    async with (
        working(client, queue, store, chief),
        working(client, f"{queue}-clerks", store, clerk),
    ):
        run = await start(client, chief, "Go.", id=run_id, task_queue=queue, poll=None, store=store)
        below = handle(client, clerk, f"{run_id}/1/0", store=store)
        if what == "fails":
            result = await run.result()
            assert result.messages[2].plain_text.startswith("The agent did not end well: ")
            with pytest.raises(StreamError):
                await below.result()
        else:
            await first_request(below)
            await run.cancel("enough")
            with pytest.raises(RunAborted, match="enough"):
                await run.result()
            with pytest.raises(RunAborted, match="the workflow was cancelled"):
                await below.result()


# --- workers that die -------------------------------------------------------------------------

UNCERTAIN = "may or may not have"


class World:
    """Workers in processes of their own, with a store that they share."""

    def __init__(self, client: Client, address: str, queue: str, folder: Path, url: str) -> None:
        self.client = client
        self.address = address
        self.queue = queue
        self.folder = folder
        self.url = url
        self.store = open_store(url, folder)
        self.agent = payer(folder)

    @contextmanager
    def worker(self, name: str, *, is_ready: bool = True) -> Generator[subprocess.Popen[str]]:
        """Start a worker, and wait until it is ready, or not."""
        given = (self.address, self.queue, str(self.folder), self.url, name)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(
            [sys.executable, "-m", "tests.durable.temporal_driver", *given],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                if is_ready:
                    assert process.stdout is not None
                    assert process.stdout.readline() == "ready\n"
                yield process
            finally:
                process.kill()

    async def start(self, run_id: str, heartbeat: float) -> RunHandle[str]:
        """Start a run, and return when its tool has begun."""
        run = await start(
            self.client,
            self.agent,
            "A-1",
            id=run_id,
            task_queue=self.queue,
            store=self.store,
            heartbeat=heartbeat,
        )
        await until(self.effects)
        return run

    def effects(self) -> list[str]:
        path = self.folder / "effects"
        return path.read_text().splitlines() if path.exists() else []

    def go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture
def world(
    request: pytest.FixtureRequest,
    client: Client,
    temporal_address: str,
    queue: str,
    tmp_path: Path,
) -> Iterator[World]:
    is_postgres = request.param == "postgres"
    url = request.getfixturevalue("postgres_url") if is_postgres else "sqlite"
    made = World(client, temporal_address, queue, tmp_path, url)
    yield made
    made.store.close()


@pytest.mark.parametrize("world", ["postgres"], indirect=True)
async def test_a_worker_that_is_killed_is_replaced(world: World, run_id: str) -> None:
    with (
        world.worker("first", is_ready=False) as first,
        world.worker("second", is_ready=False) as second,
    ):
        run = await world.start(run_id, HEARTBEAT)
        (began,) = world.effects()
        dead = first if began.endswith("first") else second
        dead.kill()
        result = await run.result()
    # Nobody knows what came of the payment, and it is not made again.
    assert world.effects() == [began]
    assert UNCERTAIN in result.output
    assert len(entries(world.store, run_id, RunResumed)) == 1


@pytest.mark.parametrize("world", ["sqlite"], indirect=True)
async def test_a_worker_that_is_stopped_lets_its_runs_go(world: World, run_id: str) -> None:
    with world.worker("first") as first:
        # With so long a heartbeat, only a run that was let go ends in this test.
        run = await world.start(run_id, 600)
        first.send_signal(signal.SIGTERM)
        world.go()
        with world.worker("second", is_ready=False):
            result = await run.result()
        assert first.wait() == 0
    assert world.effects() == [f"A-1 {run_id}/1/0 first"]
    assert result.output == "The tool said: paid A-1"
    assert entries(world.store, run_id, RunFailed) == []


@pytest.mark.parametrize("world", ["sqlite"], indirect=True)
async def test_a_frozen_worker_that_goes_on_does_no_harm(world: World, run_id: str) -> None:
    with world.worker("first") as first:
        run = await world.start(run_id, HEARTBEAT)
        first.send_signal(signal.SIGSTOP)
        with world.worker("second", is_ready=False):
            # The second worker gets the run when the first has lost it. It finds it locked, or
            # takes it when the lease is over.
            await until(lambda: _has_attempts(run))
            first.send_signal(signal.SIGCONT)
            await until(lambda: entries(world.store, run_id, RunResumed))
            world.go()
            result = await run.result()
            first.send_signal(signal.SIGTERM)
            assert first.wait() == 0
    assert world.effects() == [f"A-1 {run_id}/1/0 first"]
    assert entries(world.store, run_id, RunFailed) == []
    assert result.outcome is LoopOutcome.DONE
    assert UNCERTAIN in result.output


async def _has_attempts(run: RunHandle[Any]) -> bool:
    described = await run.workflow.describe()
    pending = described.raw_description.pending_activities
    is_running = described.status is WorkflowExecutionStatus.RUNNING
    return not is_running or any(each.attempt > 2 for each in pending)
