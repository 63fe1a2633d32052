"""Workers and queues from the shell, with a real database."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from clark_agent import Agent
from clark_agent.cli.commands.doctor import Finding, _log_finding
from clark_agent.cli.options import open_log, without_secrets
from clark_agent.durable.dbos import connect
from clark_agent.run_log import advance, waiting_for
from clark_agent.run_log.postgres import PostgresStore
from clark_agent.testing import ScriptedStream
from tests.cli.command_line import PATIENCE, CommandLine, Said
from tests.durable.agents import deeds, support
from tests.durable.conftest import postgres_server, postgres_url

pytestmark = pytest.mark.slow

__all__ = ["postgres_server", "postgres_url"]

AGENTS = "tests.durable.agents:agents"
SECRET = "s3cr3t"

_QUEUED = "run 'q1' is queued: no worker has begun it yet"
_URL = "the URL of a database, such as postgresql://user@host/database"

nameless = Agent(ScriptedStream(["Hello."]))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.setenv("DEEDS", str(tmp_path))
    run = CommandLine(tmp_path)
    run.env["PYTHONPATH"] = os.pathsep.join(sys.path)
    run.env["DEEDS"] = str(tmp_path)
    return run


async def says(process: asyncio.subprocess.Process, text: str) -> str:
    """Wait for a line that has a text."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        while line := (await process.stdout.readline()).decode():
            if text in line:
                return line
    raise AssertionError(f"it never said {text!r}")


async def test_runs_from_the_queue_to_the_end(run: CommandLine, postgres_url: str) -> None:
    run.env["CLARK_AGENT_STORE"] = postgres_url.replace("postgres@", f"postgres:{SECRET}@")
    worker = await run.start("worker", "--agents", AGENTS, "--poll", "0.1", "--lease", "3")
    assert f"the queue agents at {postgres_url}: support, billing\n" in await says(
        worker, "working on"
    )
    submit = ("submit", "--agent", "support", "--id", "order-7", "--tenant", "acme", "refund pay")
    first = await run.anew(*submit)
    second, other = await run.each([submit, (*submit, "pay")])
    assert (first.code, first.out, first.err) == (0, "order-7\n", "")
    assert (second.code, second.out, second.err) == (0, "order-7\n", "it was already submitted\n")
    assert other == Said(1, "", "clark-agent: run 'order-7' already exists, with other prompts\n")
    await says(worker, "run order-7: taken")
    await says(worker, "run order-7: suspended")
    waits, decided = await run.each([("waiting",), ("decide", "order-7", "allow", "--by", "ada")])
    assert "refund" in waits.out
    assert decided.code == 0
    assert decided.out.endswith("allowed by ada\na worker of the queue 'agents' continues it\n")
    await says(worker, "run order-7: ended (done)")
    listed, shown, followed = await run.each(
        [
            ("runs",),
            ("show", "last"),
            ("follow", "--log", postgres_url, "order-7"),
        ]
    )
    assert "done" in listed.out
    assert "Done." in shown.out
    assert "Done." in followed.out
    log = open_log(postgres_url)
    assert _log_finding(log) == Finding(True, "run log", f"{postgres_url}, 1 runs")
    assert isinstance(log.store, PostgresStore)
    log.store.close()
    assert deeds("order-7") == ["refund", "pay"]
    worker.send_signal(signal.SIGTERM)
    await says(worker, "stopping; a second signal exits at once")
    _, err = await worker.communicate()
    assert (worker.returncode, err) == (143, b"")


async def test_a_queued_run_is_seen_and_cancelled(run: CommandLine, postgres_url: str) -> None:
    run.env["CLARK_AGENT_STORE"] = postgres_url
    await run.each([("submit", "--agent", "support", "--id", "q10", "--queue", "idle", "pay")])
    await run.each([("submit", "--agent", "support", "--id", "q1", "--queue", "idle", "pay")])
    commands = [("follow", "q1"), ("show", "q1"), ("steer", "q1", "Stop."), ("resume", "q1")]
    commands[-1] = (*commands[-1], "--log", postgres_url)
    for said in await run.each(commands):
        assert said == Said(2, "", f"clark-agent: {_QUEUED}\n")
    (cancelled,) = await run.each([("cancel", "q1", "--reason", "not needed")])
    assert cancelled == Said(0, "", "cancelled run q1\n")
    listed, followed = await run.each([("runs",), ("follow", "q1")])
    assert (listed.code, listed.out.count("\n"), "failed" in listed.out) == (0, 1, True)
    assert (followed.code, "the run was aborted: not needed" in followed.err) == (1, True)
    (second,) = await run.each([("cancel", "q1")])
    assert "the run 'q1' has ended (failed)" in second.err


async def test_a_run_of_a_queue_is_left_to_its_workers(run: CommandLine, postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    connect(store).submit("q1", "support", "refund")
    await advance(store, "q1", support(), "refund")  # as a worker that has stopped since
    run.env["CLARK_AGENT_STORE"] = postgres_url
    resume = ("resume", "--log", postgres_url, "q1")
    shown, resumed, both = await run.each(
        [("show", "q1"), resume, ("decide", "q1", "allow", "--resume")]
    )
    assert "then: a worker of the queue 'agents' continues it" in shown.out
    refused = Said(
        2, "", "clark-agent: run 'q1' belongs to the queue 'agents': its workers continue it\n"
    )
    assert (resumed, both) == (refused, refused)
    assert len(waiting_for(store, "q1")) == 1  # nothing was decided
    store.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ada:pw@db:5432/shop?sslmode=require", "postgresql://ada@db:5432/shop"),
        ("postgres://ada@db/shop", "postgres://ada@db/shop"),
        ("postgresql:///shop", "postgresql:///shop"),
        ("postgresql://ada:p/w@db/shop#x", "postgresql://ada@db/shop"),
        ("postgresql://ada:p@w@db/shop", "postgresql://…"),
        ("postgresql://ada:p?w@db/shop", "postgresql://…"),
        ("postgresql://ada:p#w@db/shop", "postgresql://…"),
        ("postgresql://db/shop?user=ada@x&password=pw", "postgresql://…"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_hints_name_the_log_if_it_is_not_the_default(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("CLARK_AGENT_STORE", raising=False)
    here, there = open_log(), open_log(postgres_url)
    assert (here.option, there.option) == ("", f" --log {postgres_url}")
    monkeypatch.setenv("CLARK_AGENT_STORE", postgres_url.replace("@", f":{SECRET}@"))
    assert (here.option, there.option) == (f" --log {here.where}", "")
    monkeypatch.setenv("CLARK_AGENT_STORE", here.where)
    assert (here.option, there.option) == ("", f" --log {postgres_url}")
    assert isinstance(there.store, PostgresStore)
    there.store.close()


def test_folders_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    for name in ("a=b", "./ada@db", str(tmp_path / "postgres")):
        assert open_log(name).path == tmp_path / name


async def test_errors_say_what_is_wrong(run: CommandLine, postgres_url: str) -> None:
    here = ("worker", "--store", postgres_url, "--agents")
    away = f"postgresql://ada:{SECRET}@127.0.0.1:1/shop?password={SECRET}"
    wrong = f"postgresql://ada:{SECRET}@127.0.0.1:port/shop"
    cases = [
        (("worker", "--agents", AGENTS), 2, "missing option '--store'"),
        (("worker", "--store", "runs.db", "--agents", AGENTS), 2, "--store takes the URL"),
        (("worker", "--store", postgres_url), 2, "missing option '-a' / '--agents'"),
        ((*here, "no_such_module:x"), 2, "cannot import no_such_module"),
        ((*here, "tests.durable.agents:agent"), 2, "did you mean 'agents'?"),
        (
            (*here, "tests.durable.agents:pay"),
            2,
            "expected an Agent, a list of them, or a function",
        ),
        ((*here, "tests.cli.test_worker:nameless"), 2, "needs a name"),
        ((*here, AGENTS, "--agents", AGENTS), 2, "two agents of the queue have the name 'support'"),
        ((*here, AGENTS, "--concurrency", "2", "--per-tenant", "3"), 2, "must not exceed"),
        (
            ("worker", "--store", away, "--agents", AGENTS),
            1,
            "cannot use postgresql://ada@127.0.0.1:1",
        ),
        (
            ("worker", "--store", wrong, "--agents", AGENTS),
            1,
            "127.0.0.1:port/shop: connection is bad",
        ),
        (("runs", "--log", f"postgres:{SECRET}@db/shop"), 2, _URL),
        (("show", "--store", f"host=db password={SECRET} dbname=shop", "last"), 2, _URL),
        (("waiting", "--log", "PostgreSQL"), 2, _URL),
        (("submit", "--store", postgres_url, "--agent", "a", "--id", "", "x"), 2, "id of a run"),
        (("runs", "--log", away), 1, "cannot use postgresql://ada@127.0.0.1:1/shop: "),
        (("submit", "--store", away, "--agent", "a", "x"), 1, "Connection refused"),
    ]
    found = await run.each([words for words, _, _ in cases])
    for (words, code, text), said in zip(cases, found, strict=True):
        assert (said.code, said.out) == (code, ""), words
        assert text in said.err
        assert SECRET not in said.err


async def test_a_missing_package_is_named(run: CommandLine, postgres_url: str) -> None:
    words = ["worker", "--store", postgres_url, "--agents", AGENTS]
    code = (
        "import sys; sys.modules['dbos'] = None; from clark_agent.cli import main; "
        f"sys.argv[1:] = {words!r}; sys.exit(main())"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), env=run.env, cwd=run.root, stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"the worker needs the package dbos: pip install '.[dbos]'" in err
