"""Runs on DBOS, in a real database, with workers in this process and in others."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dbos import DBOS, DBOSClient

from clark_agent import Agent, LoopError, LoopOutcome, UserMessage
from clark_agent.durable.dbos import (
    QueuedRun,
    RunQueue,
    Worker,
    attach,
    connect,
    dbos_config,
    install,
)
from clark_agent.errors import (
    AlreadyDecided,
    ConfigError,
    InvalidContinuationError,
    RunAborted,
    RunExists,
    RunNotFound,
)
from clark_agent.result import RunResult
from clark_agent.run_log import (
    Allow,
    RunLog,
    SqliteStore,
    advance,
    cancel,
    decide,
    deliver,
    waiting_for,
)
from clark_agent.run_log.postgres import PostgresStore
from clark_agent.testing import ScriptedStream
from clark_agent.types import ToolResultMessage
from tests.durable import servers
from tests.durable.agents import agents, deeds, folder, support
from tests.transports.servers.child import Child

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        # DBOS, when it is destroyed while it starts a workflow.
        "ignore:Exception ignored in. <coroutine object execute_dequeued_workflow"
        ":pytest.PytestUnraisableExceptionWarning"
    ),
]

LEASE = 2.0
PATIENCE = 60.0
SETTINGS = ("--lease", str(LEASE), "--poll", "0.05", "--sweep", "0.2", "--concurrency", "4")


@pytest.fixture(scope="module")
def url(postgres_server: servers.Postgres) -> str:
    return postgres_server.create_database()


@pytest.fixture(scope="module", autouse=True)
def _deeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEDS", str(tmp_path_factory.mktemp("deeds")))
        yield


@pytest.fixture(scope="module")
def store(url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(url, lease=LEASE)
    yield store
    store.close()


@pytest.fixture(scope="module")
def worker(store: PostgresStore) -> Iterator[Worker]:
    DBOS(config={**dbos_config(store), "log_level": "CRITICAL"})
    worker = install(store, agents(), concurrency=4, poll=0.05, sweep=0.2)
    DBOS.launch()
    yield worker
    worker.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # what DBOS leaves behind, here and not in a test of something else


async def result_of(runs: RunQueue, run_id: str) -> RunResult[str]:
    async with asyncio.timeout(PATIENCE):
        return await runs.result(run_id, support())


def workflows(run_id: str) -> list[tuple[str, Any]]:
    """The workflows of a run that have ended: the status and the output of each."""
    found = DBOS.list_workflows(workflow_id_prefix=f"clark_agent:{run_id}:")
    return [(workflow.status, workflow.output) for workflow in found]


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(true):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def outcomes(run_id: str, *expected: str) -> Callable[[], bool]:
    wanted = [("SUCCESS", {"run_id": run_id, "outcome": outcome}) for outcome in expected]
    return lambda: workflows(run_id) == wanted


# --- submitting -----------------------------------------------------------------------------------


async def test_a_run_is_submitted_once(worker: Worker) -> None:
    assert worker.submit("once", support(), "pay")
    assert not worker.submit("once", "support", [UserMessage("pay")])
    result = await result_of(worker, "once")
    assert (result.outcome, result.output) == (LoopOutcome.DONE, "Done.")
    assert not worker.submit("once", "support", "pay")
    await until(outcomes("once", "done"))
    assert deeds("once") == ["pay"]


async def test_another_run_with_the_same_id_is_refused(worker: Worker) -> None:
    worker.submit("other", "support", "pay")
    with pytest.raises(RunExists, match="with other prompts"):
        worker.submit("other", "support", "pay pay")
    with pytest.raises(RunExists, match="for 'support' in 'agents'"):
        worker.submit("other", "billing", "pay")
    await advance(worker._store, "elsewhere", support(), "pay")
    with pytest.raises(RunExists, match="was not submitted"):
        worker.submit("elsewhere", "support", "pay")
    with pytest.raises(RunNotFound):
        await worker.result("never", support())
    assert not worker.wake("never")


async def test_a_run_is_submitted_in_a_transaction(worker: Worker, url: str) -> None:
    with psycopg.connect(url) as connection:
        assert worker.submit("undone", "support", "pay", connection=connection)
        connection.rollback()
    assert not worker.wake("undone")
    with psycopg.connect(url) as connection:
        assert worker.submit("undone", "support", "pay", connection=connection)
    assert (await result_of(worker, "undone")).output == "Done."


async def test_a_process_without_dbos_submits_and_waits(worker: Worker, url: str) -> None:
    other = PostgresStore(url)
    runs = connect(other)
    runs.submit("web", "support", "pay refund")
    result = await result_of(runs, "web")
    assert result.outcome is LoopOutcome.SUSPENDED
    await decide(other, "web", result.waiting[0].request_id, Allow(), by="ada")
    assert (await result_of(runs, "web")).output == "Done."
    assert deeds("web") == ["pay", "refund"]
    other.close()


async def test_a_failed_run_is_a_workflow_that_has_ended(worker: Worker) -> None:
    worker.submit("broken", "support", "pay fail")
    with pytest.raises(LoopError, match="the model is broken"):
        await result_of(worker, "broken")
    await until(lambda: [status for status, _ in workflows("broken")] == ["SUCCESS"])
    ((_, output),) = await asyncio.to_thread(workflows, "broken")
    assert output["outcome"] == "failed"
    assert "the model is broken" in output["error"]


async def test_a_run_that_no_worker_can_work_on_is_tried_again(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        worker.submit("early", "shipping", "pay")
        await until(lambda: "no agent 'shipping' in this worker" in caplog.text)
        worker._agents["shipping"] = support().replace(name="shipping")
    assert (await result_of(worker, "early")).output == "Done."
    await until(lambda: len(workflows("early")) > 1)
    (_, first), *_ = await asyncio.to_thread(workflows, "early")
    assert first["outcome"] == "postponed"


async def test_a_run_that_was_assigned_and_not_executed_is_executed(
    worker: Worker, url: str
) -> None:
    with psycopg.connect(url) as connection:  # as after a claim whose answer was lost
        worker.submit("claimed", "support", "pay", connection=connection)
        connection.execute(
            "UPDATE dbos.workflow_status SET status = 'PENDING', executor_id = %s "
            "WHERE workflow_uuid = 'clark_agent:claimed:begin'",
            (DBOS.executor_id,),
        )
    assert (await result_of(worker, "claimed")).output == "Done."
    await until(outcomes("claimed", "done"))


@pytest.mark.parametrize(
    ("run_id", "prompts", "error", "text"),
    [
        (7, "pay", TypeError, "the id of a run must be a text, not int"),
        ("", "pay", ConfigError, "invalid id of a run: ''"),
        ("empty", [], ConfigError, "a run needs at least one prompt"),
    ],
)
def test_what_cannot_be_submitted(
    store: PostgresStore, run_id: Any, prompts: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        connect(store).submit(run_id, "support", prompts)


# --- queued ---------------------------------------------------------------------------------------


async def test_a_queued_run_is_cancelled_and_never_begins(worker: Worker) -> None:
    runs = connect(worker._store, queue="idle")  # it has no worker
    assert runs.submit("first", "support", "pay", tenant="acme")
    assert runs.submit(r"sec\ond:", "billing", "pay")
    queued = [QueuedRun("first", "support", "acme", "idle")]
    assert runs.queued() == [*queued, QueuedRun(r"sec\ond:", "billing", "default", "idle")]
    runs.cancel(r"sec\ond:", "nobody needs it")
    assert runs.queued() == queued
    with pytest.raises(RunAborted, match="nobody needs it") as raised:
        await result_of(runs, r"sec\ond:")
    assert raised.value.reason == "nobody needs it"
    (summary,) = [run for run in worker._store.runs() if run.run_id == r"sec\ond:"]
    assert summary.outcome == "failed"
    with pytest.raises(RunAborted):  # as a worker that takes it later
        await advance(worker._store, r"sec\ond:", support(), "pay")
    with pytest.raises(InvalidContinuationError, match="has ended"):
        runs.cancel(r"sec\ond:")
    with pytest.raises(RunNotFound):
        runs.cancel("never submitted")
    assert deeds(r"sec\ond:") == []


async def test_a_run_whose_log_was_removed_is_not_queued(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.submit("removed", "support", "pay")
    await result_of(worker, "removed")
    await until(outcomes("removed", "done"))
    with worker._tables.transaction() as connection:
        connection.execute("DELETE FROM clark_agent.runs WHERE run_id = 'removed'")
    assert worker._tables.queued(run_id="removed") == []
    tries: list[str] = []

    def counted(store: PostgresStore, run_id: str, reason: str | None) -> bool:
        tries.append(run_id)
        return cancel(store, run_id, reason)

    monkeypatch.setattr("clark_agent.durable.dbos.cancel", counted)
    with pytest.raises(RunNotFound):
        worker.cancel("removed")
    assert len(tries) == 2  # nobody works on it, so there is nothing to wait for


async def test_a_run_is_cancelled_while_workers_begin_it(worker: Worker) -> None:
    ids = [f"raced {n}" for n in range(20)]
    for run_id in ids:
        worker.submit(run_id, "support", "refund", tenant=run_id)

    def cancel_all() -> None:
        for run_id in ids:
            worker.cancel(run_id, f"no {run_id}")

    await asyncio.to_thread(cancel_all)
    for run_id in ids:
        with pytest.raises(RunAborted, match=f"no {run_id}"):
            await result_of(worker, run_id)
        assert deeds(run_id) == []


async def test_a_run_that_begins_when_it_is_cancelled_is_aborted(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = connect(store, queue="idle")
    runs.submit("begins", "support", "refund")
    found = runs._tables.queued

    def begin(**wanted: Any) -> list[QueuedRun]:
        queued = found(**wanted)
        started = advance(store, "begins", support(), "refund")
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(started)).result()
        return queued

    with monkeypatch.context() as patch:
        patch.setattr(runs._tables, "queued", begin)
        runs.cancel("begins", "too late")
    with pytest.raises(RunAborted, match="too late"):
        await advance(store, "begins", support(), "refund")


async def test_a_run_that_begins_and_ends_while_it_is_cancelled_has_ended(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = connect(store, queue="idle")
    runs.submit("ends", "support", "pay")
    found = runs._tables.queued

    def work(**wanted: Any) -> list[QueuedRun]:
        run = advance(store, "ends", support(), "pay")
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(run)).result()
        with runs._tables.transaction() as connection:  # as DBOS does after the workflow
            connection.execute(
                "UPDATE dbos.workflow_status SET status = 'SUCCESS' "
                "WHERE workflow_uuid = 'clark_agent:ends:begin'"
            )
        return found(**wanted)

    monkeypatch.setattr(runs._tables, "queued", work)
    with pytest.raises(InvalidContinuationError, match="has ended"):
        runs.cancel("ends", "too late")


# --- waiting --------------------------------------------------------------------------------------


async def test_one_of_several_decisions_wakes_the_run_once(worker: Worker) -> None:
    worker.submit("decided", "support", "refund pay")
    (request,) = (await result_of(worker, "decided")).waiting
    await until(outcomes("decided", "suspended"))

    async def allow(by: str) -> str:
        try:
            await decide(worker._store, "decided", request.request_id, Allow(), by=by)
        except AlreadyDecided as error:
            return str(error.by)
        return by

    assert len(set(await asyncio.gather(*[allow(f"person {n}") for n in range(5)]))) == 1
    assert (await result_of(worker, "decided")).output == "Done."
    await until(outcomes("decided", "suspended", "done"))
    assert deeds("decided") == ["refund", "pay"]


async def test_a_decision_and_its_wake_up_are_one_transaction(worker: Worker, url: str) -> None:
    worker.submit("atomic", "support", "refund")
    (request,) = (await result_of(worker, "atomic")).waiting
    await until(outcomes("atomic", "suspended"))
    other = PostgresStore(url)
    connect(other)
    wake = other.on_wake
    assert wake is not None
    woken: list[str] = []

    def fails(connection: psycopg.Connection[Any], run_id: str) -> None:
        wake(connection, run_id)
        woken.append(run_id)
        raise ZeroDivisionError

    other.on_wake = fails
    with pytest.raises(ZeroDivisionError):
        await decide(other, "atomic", request.request_id, Allow())
    other.close()
    assert set(woken) == {"atomic"}
    assert await asyncio.to_thread(outcomes("atomic", "suspended"))
    assert waiting_for(worker._store, "atomic") == [request]
    await decide(worker._store, "atomic", request.request_id, Allow())
    assert (await result_of(worker, "atomic")).output == "Done."


async def test_decisions_about_child_runs_wake_the_outermost_run(worker: Worker) -> None:
    worker.submit("boss", "support", "clerks pay")
    first, second = (await result_of(worker, "boss")).waiting
    assert len({first.run_id, second.run_id, "boss"}) == 3
    # After the first one, the log of the outermost run is as it was before.
    await decide(worker._store, first.run_id, first.request_id, Allow())
    await until(outcomes("boss", "suspended", "suspended"))
    await decide(worker._store, second.run_id, second.request_id, Allow())
    await until(outcomes("boss", "suspended", "suspended", "done"))
    assert [deeds(first.run_id), deeds(second.run_id)] == [["refund"], ["refund"]]
    assert deeds("boss") == ["pay"]


@pytest.mark.parametrize("word", ["timer", "question"])
async def test_a_run_goes_on_when_its_time_has_come(worker: Worker, word: str) -> None:
    worker.submit(word, "support", f"{word} pay")
    await until(outcomes(word, "suspended", "done"))
    assert deeds(word) == [word, "pay"]


async def test_an_event_wakes_the_run(worker: Worker) -> None:
    worker.submit("event", "support", "payment pay")
    assert (await result_of(worker, "event")).outcome is LoopOutcome.SUSPENDED
    assert deliver(worker._store, "event", "paid", {"amount": 9}, id="1")
    assert not deliver(worker._store, "event", "paid", {"amount": 9}, id="1")
    result = await result_of(worker, "event")
    (paid, _) = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    assert paid.plain_text == '{"amount":9}'
    await until(outcomes("event", "suspended", "done"))


async def test_a_suspended_run_is_cancelled(worker: Worker) -> None:
    worker.submit("cancelled", "support", "refund")
    await result_of(worker, "cancelled")
    cancel(worker._store, "cancelled", "nobody needs it")
    with pytest.raises(LoopError, match="nobody needs it"):
        await result_of(worker, "cancelled")


async def test_a_tenant_with_many_runs_does_not_hold_up_another(worker: Worker) -> None:
    for number in range(20):
        worker.submit(f"big.{number}", "support", "hold", tenant="big")

    def held() -> int:
        return sum(len(deeds(f"big.{number}")) for number in range(20))

    await until(lambda: held() == 2)
    for number in range(3):
        worker.submit(f"small.{number}", "support", "pay", tenant="small")
        assert (await result_of(worker, f"small.{number}")).output == "Done."
    assert held() == 2
    (folder() / "big").touch()
    for number in range(20):
        await result_of(worker, f"big.{number}")
    assert held() == 20


async def test_superfluous_wake_ups_do_not_wait_for_a_long_run(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.submit("long", "support", "hold")
    await until(lambda: deeds("long"))
    monkeypatch.setattr(worker, "_patience", 0.5)  # they wait for twice as long
    worker.wake("long")
    worker.wake("long")

    def ended() -> list[str]:
        return sorted(output["outcome"] for _, output in workflows("long") if output)

    await until(lambda: ended() == ["busy", "busy"])
    (folder() / "long").touch()
    await until(lambda: ended() == ["busy", "busy", "done"])
    assert deeds("long") == ["hold"]


# --- processes ------------------------------------------------------------------------------------


class Workers:
    """Workers in processes of their own, and the queue."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = PostgresStore(url, lease=LEASE)
        self.runs = connect(self.store)
        self.started: list[Child] = []

    def start(self, *command: str) -> Child:
        words = ("worker", "--store", self.url, "--agents", "tests.durable.agents:agents")
        command = command or ("-m", "clark_agent", *words, *SETTINGS)
        child = Child([sys.executable, *command])
        self.started.append(child)
        child.wait_for("(working on)", seconds=PATIENCE)
        return child

    async def begin(self, run_id: str, prompt: str) -> Child:
        """Start a worker that is in the middle of a run."""
        child = self.start()
        self.runs.submit(run_id, "support", prompt)
        await until(lambda: deeds(run_id))
        return child

    async def said(self, child: Child, text: str) -> None:
        await until(lambda: text in child.output)


@pytest.fixture
def workers(postgres_url: str) -> Iterator[Workers]:
    workers = Workers(postgres_url)
    yield workers
    for child in workers.started:
        if child.running:
            os.kill(child.pid, signal.SIGCONT)
        child.stop()
    workers.store.close()


def results(result: RunResult[str]) -> list[tuple[str, bool]]:
    """What came of each call."""
    found = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    return [(message.plain_text, message.is_error) for message in found]


async def test_the_run_of_a_killed_worker_is_taken_up(workers: Workers) -> None:
    killed = await workers.begin("killed", "hold pay")
    os.kill(killed.pid, signal.SIGKILL)
    other = workers.start()
    result = await result_of(workers.runs, "killed")
    (uncertain, is_error), paid = results(result)
    assert (is_error, paid) == (True, ("paid", False))
    assert "held" not in uncertain
    assert deeds("killed") == ["hold", "pay"]
    await workers.said(other, "run killed: ended (done)")


async def test_a_worker_that_is_told_to_stop_leaves_nothing_uncertain(workers: Workers) -> None:
    stopped = await workers.begin("stopped", "hold pay")
    os.kill(stopped.pid, signal.SIGTERM)
    await workers.said(stopped, "stopping")
    (folder() / "stopped").touch()
    await until(lambda: not stopped.running)
    assert stopped._process.returncode == 143
    assert "run stopped: let go" in stopped.output
    client = DBOSClient(system_database_url=workers.url)
    assert [each.status for each in client.list_workflows()] == ["ENQUEUED"]
    client.destroy()
    workers.start()
    result = await result_of(workers.runs, "stopped")
    assert results(result) == [("held", False), ("paid", False)]
    assert deeds("stopped") == ["hold", "pay"]


async def test_a_frozen_worker_loses_its_run_and_goes_on_with_others(workers: Workers) -> None:
    frozen = await workers.begin("frozen", "hold pay")
    os.kill(frozen.pid, signal.SIGSTOP)
    other = workers.start()
    result = await result_of(workers.runs, "frozen")
    assert len(results(result)) == 2
    (folder() / "frozen").touch()
    os.kill(frozen.pid, signal.SIGCONT)
    os.kill(other.pid, signal.SIGTERM)
    await until(lambda: not other.running)
    workers.runs.submit("next", "support", "pay")
    assert (await result_of(workers.runs, "next")).output == "Done."
    await workers.said(frozen, "run next: ended (done)")
    assert results(await result_of(workers.runs, "frozen")) == results(result)
    assert deeds("frozen") == ["hold", "pay"]


async def test_dbos_that_is_destroyed_does_not_abort_the_run(workers: Workers) -> None:
    careless = workers.start("-c", CARELESS, workers.url)
    workers.runs.submit("careless", "support", "hold pay")
    await until(lambda: deeds("careless"))
    os.kill(careless.pid, signal.SIGTERM)
    await workers.said(careless, "destroying")
    (folder() / "careless").touch()
    await until(lambda: not careless.running)
    workers.start()
    result = await result_of(workers.runs, "careless")
    assert results(result) == [("held", False), ("paid", False)]
    assert deeds("careless") == ["hold", "pay"]


CARELESS = f"""
import signal, sys
from dbos import DBOS
from clark_agent.durable.dbos import dbos_config, install
from clark_agent.run_log.postgres import PostgresStore
from tests.durable.agents import agents
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
store = PostgresStore(sys.argv[1], lease={LEASE})
DBOS(config=dbos_config(store))
install(store, agents(), poll=0.05, sweep=0.2)
DBOS.launch()
print("working on", flush=True)
signal.sigwait([signal.SIGTERM])
print("destroying", flush=True)
DBOS.destroy()
store.close()
"""


# --- settings -------------------------------------------------------------------------------------


def named(*names: str) -> list[Agent[str, None]]:
    return [Agent(ScriptedStream(["Hello."]), name=name) for name in names]


def test_wrong_settings_are_refused(store: PostgresStore, tmp_path: Path) -> None:
    nameless = Agent(ScriptedStream(["Hello."]))
    elsewhere = RunLog(SqliteStore(tmp_path / "a.db"))
    logged = Agent(ScriptedStream(["Hello."]), name="a", run_log=elsewhere)
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("needs a name", lambda: install(store, [nameless])),
        ("have the name 'a'", lambda: install(store, named("a", "b", "a"))),
        ("at least one agent", lambda: install(store, [])),
        ("deps are for an agent", lambda: install(store, named("a"), deps={"b": 1})),
        ("must use the store", lambda: install(store, [logged])),
        ("concurrency must be", lambda: install(store, named("a"), concurrency=0)),
        ("must not exceed", lambda: install(store, named("a"), concurrency=2, per_tenant=3)),
        (
            "at least per_tenant",
            lambda: install(store, named("a"), per_tenant=3, per_tenant_total=2),
        ),
        ("poll must be", lambda: install(store, named("a"), poll=0)),
        ("sweep must be", lambda: install(store, named("a"), sweep=-1.0)),
        ("name of a queue", lambda: connect(store, queue="_dbos_internal")),
        ("needs a PostgresStore", lambda: connect(SqliteStore(tmp_path / "b.db"))),  # type: ignore[arg-type]
        ("invalid id of a run", lambda: connect(store).submit(" ", "a", "Hello")),
        ("invalid tenant", lambda: connect(store).submit("x", "a", "Hello", tenant="")),
        ("the prompt is blank", lambda: connect(store).submit("x", "a", "  ")),
    ]
    for text, make in wrong:
        with pytest.raises(ConfigError, match=text):
            make()


def test_only_a_database_with_a_queue_is_attached(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    assert not attach(store)
    assert store.on_wake is None
    connect(PostgresStore(postgres_url))
    assert attach(store)
    store.close()


def test_a_queue_is_complete_though_others_are_creating_the_tables_of_dbos(
    postgres_url: str,
) -> None:
    with psycopg.connect(postgres_url) as connection:  # as an early migration leaves it
        connection.execute("CREATE SCHEMA dbos")
        connection.execute(
            "CREATE FUNCTION dbos.enqueue_workflow(workflow_name text) RETURNS text "
            "LANGUAGE sql AS 'SELECT workflow_name'"
        )
    store = PostgresStore(postgres_url)
    assert connect(store).submit("early", "support", "pay")
    store.close()
