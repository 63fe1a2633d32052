"""``clark-agent view`` as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from clark_agent.cli.app import run_command_line
from clark_agent.run_log import JsonlStore, RunLog, SqliteStore
from tests.run_log import stories

pytestmark = pytest.mark.slow

MODULE = """
from clark_agent import Agent
from clark_agent.testing import ScriptedStream, say

shop = Agent(ScriptedStream([say("From the page.")] * 9), system_prompt="You sell.")
"""


def logged(store: Any) -> str:
    return asyncio.run(stories.tell("plain", RunLog(store))).run_id


@contextmanager
def serving(
    *arguments: str, cwd: Path, browser: Path | None = None
) -> Generator[tuple[subprocess.Popen[str], str]]:
    """Start the command, and wait for its address."""
    more = ("--no-browser",) if browser is None else ()
    process = subprocess.Popen(
        [sys.executable, "-m", "clark_agent", "view", *more, "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={
            **os.environ,
            "XDG_STATE_HOME": str(cwd / "state"),
            "PYTHONUNBUFFERED": "1",
            "BROWSER": str(browser),
        },
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.communicate()
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextmanager
def opened(url: str) -> Generator[httpx2.Client]:
    base, _, _ = url.partition("/?")
    with httpx2.Client(base_url=base, timeout=30, trust_env=False) as client:
        assert client.get(url).status_code == 303
        yield client


def test_the_address_that_the_browser_gets_works_once(tmp_path: Path) -> None:
    """Other users of the machine see it: it is an argument of a program."""
    logged(JsonlStore(tmp_path / "runs"))
    seen, browser = tmp_path / "seen", tmp_path / "browser"
    os.mkfifo(seen)
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {seen}\n')
    browser.chmod(0o700)
    with serving(str(tmp_path / "runs"), cwd=tmp_path, browser=browser) as (_, url):
        given = seen.read_text()
        base, _, token = given.partition("/?token=")
        assert base == url.partition("/?")[0]
        assert token not in url
        assert url.partition("token=")[2] not in given
        with opened(given) as client:
            assert len(client.get("/api/runs").json()["runs"]) == 1
        assert httpx2.get(given, trust_env=False).status_code == 401
        with opened(url) as client, opened(url):
            assert client.get("/api/runs").status_code == 200


def test_it_shows_runs_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    run_id = logged(JsonlStore(tmp_path / "runs"))
    with serving(str(tmp_path / "runs"), cwd=tmp_path) as (process, url):
        with opened(url) as client:
            assert client.get("/").status_code == 200
            session = client.get("/api/session").json()
            assert session["where"] == str(tmp_path / "runs")
            assert (session["can_write"], session["csrf"]) == (False, "")
            (row,) = client.get("/api/runs").json()["runs"]
            assert row["run_id"] == run_id
            with client.stream("GET", f"/api/events?run={run_id}") as events:
                assert events.status_code == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0
        token = url.partition("token=")[2]
        assert token not in out + err
        assert "Traceback" not in err


def test_a_stream_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path / "runs")
    run_id = logged(store)
    path = store.path_of(run_id)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))  # not ended
    with (
        serving("--log", str(tmp_path / "runs"), cwd=tmp_path) as (process, url),
        opened(url) as client,
        client.stream("GET", f"/api/events?run={run_id}") as events,
    ):
        lines = events.iter_lines()
        while next(lines) != "event: run":
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


def test_with_an_agent_it_forks(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(MODULE)
    run_id = logged(SqliteStore(tmp_path / "runs.db"))
    arguments = ("runs.db", "--write", "--agent", "shop:shop")
    with serving(*arguments, cwd=tmp_path) as (process, url), opened(url) as client:
        session = client.get("/api/session").json()
        assert (session["can_run"], session["agent"]) == (True, "shop:shop")
        done = client.post(
            f"/api/fork?run={run_id}",
            json={"prompt": "Again."},
            headers={"x-clark-token": session["csrf"]},
        ).json()
        with client.stream("GET", f"/api/events?run={done['run_id']}") as events:
            text = "".join(events.iter_text())
        assert "From the page." in text
        row = client.get(f"/api/run?run={done['run_id']}").json()["run"]
        assert row["forked_from"]["run_id"] == run_id
        assert process.poll() is None


def test_mistakes_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run_command_line(["view", "runs", "--no-browser", "--port", port]) == 2
    reason = "Address already in use; choose another port, or 0 for any that is free"
    assert f"cannot listen on 127.0.0.1 port {port}: {reason}\n" in capsys.readouterr().err
    assert run_command_line(["view", "missing.db"]) == 2
    assert "there is no log at" in capsys.readouterr().err
    assert run_command_line(["view", "runs", "--agent", "shop:shop"]) == 2
    assert "need --write" in capsys.readouterr().err
    assert run_command_line(["view", "runs", "--write", "--agent", "nothing:here"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert run_command_line(["view", "runs", "--log", "runs"]) == 2
    assert "STORE" in capsys.readouterr().err
    assert run_command_line(["view", "no/such/folder/missing.db"]) == 2
    assert "there is no log at" in capsys.readouterr().err
    (tmp_path / "random.db").write_bytes(b"not a database " * 400)
    assert run_command_line(["view", "random.db"]) == 1
    assert f"{tmp_path / 'random.db'}: file is not a database" in capsys.readouterr().err
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE books (title TEXT)")
    assert run_command_line(["view", "other.db"]) == 1
    assert "other.db is not a database of runs" in capsys.readouterr().err
    (tmp_path / "folder.db").mkdir()
    assert run_command_line(["view", "folder.db"]) == 2
    assert "folder.db is a folder" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {
        "folder.db", "other.db", "random.db", "runs"
    }  # fmt: skip


def test_without_its_packages_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run_command_line(["view", str(tmp_path / "runs")]) == 2
    assert "'.[view]'" in capsys.readouterr().err


def test_there_is_no_option_to_ask_at_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Calls of runs that the page starts always wait for the page."""
    assert run_command_line(["view", "--help"]) == 0
    help_text = capsys.readouterr().out
    assert "--allow NAMES" in help_text
    assert "--suspend" not in help_text
    assert "terminal" not in help_text
