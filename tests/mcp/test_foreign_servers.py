"""The client against servers that others wrote, in their own environments."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clark_agent import (
    Agent,
    CancellationToken,
    ImageContent,
    LoopOutcome,
    RunAborted,
    RunIdentity,
    RunResult,
    ToolResultMessage,
    UserMessage,
)
from clark_agent.errors import McpError
from clark_agent.mcp import McpPrompt, McpServer, McpTools
from clark_agent.replay import replay
from clark_agent.run_log import (
    GiveResult,
    MemoryStore,
    RunLog,
    decide,
    fold,
    resume,
    waiting_for,
)
from clark_agent.testing import RecordingSink, ScriptedStream, call
from clark_agent.toolkit import SUSPEND
from tests.mcp.driving import (
    SAFETY_NET,
    Person,
    check,
    drive,
    eventually,
    text_of,
    text_of_blocks,
)
from tests.mcp.own_servers import program
from tests.mcp.servers.everything import Everything
from tests.mcp.servers.install import node, python, script
from tests.transports.servers.child import ROOT, Child

pytestmark = pytest.mark.slow

Need = Callable[..., None]

# --- servers of one purpose -------------------------------------------------------------------


def time_server(**settings: Any) -> McpServer:
    arguments = ["-m", "mcp_server_time", "--local-timezone", "Etc/UTC"]
    return McpServer("time", command=python("current"), args=arguments, **settings)


async def test_time_in_a_run_and_in_a_replay_without_the_server(foreign: Need) -> None:
    foreign("current")
    store = MemoryStore()
    steps = [
        call(
            "time_convert_time",
            source_timezone="America/Lima",
            time="16:30",
            target_timezone="Asia/Kathmandu",
        ),
        call("time_convert_time", source_timezone="Mars/Olympus", time="1", target_timezone="x"),
    ]
    async with McpTools(time_server()) as tools:
        driven = await drive(tools, *steps, run_id="r", run_log=RunLog(store))
    assert driven.offered[0] == ["time_get_current_time", "time_convert_time"]
    good, bad = driven.answers
    assert not good.is_error
    assert json.loads(driven.texts[0])["target"]["datetime"].endswith("03:15:00+05:45")
    assert good.details["kind"] == "mcp"
    assert (good.details["server"], good.details["tool"]) == ("time", "convert_time")
    assert good.details["structured"]["time_difference"] == "+10.75h"
    assert bad.is_error
    assert "Mars/Olympus" in driven.texts[1]

    report = await replay(store, "r", Agent(ScriptedStream([])).config)
    assert report.is_identical, report
    assert report.result is not None
    assert report.result.messages == driven.result.messages


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@b.example", *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


async def test_git_on_a_real_repository(foreign: Need, tmp_path: Path) -> None:
    foreign("current")
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    git(tmp_path, "config", "user.name", "A")
    git(tmp_path, "config", "user.email", "a@b.example")
    (tmp_path / "a.txt").write_text("one\n")
    server = McpServer(
        "git",
        command=python("current"),
        args=["-m", "mcp_server_git", "--repository", str(tmp_path)],
        prefix="",
        exclude=["git_reset", "*_branch"],
    )
    here = {"repo_path": str(tmp_path)}
    async with McpTools(server) as tools:
        driven = await drive(
            tools,
            call("git_status", **here),
            call("git_add", **here, files=["a.txt"]),
            call("git_commit", **here, message="the first one"),
            [call("git_log", **here), call("git_status", **here)],
            call("git_show", **here, revision="nowhere"),
        )
    assert "git_reset" not in driven.offered[0]
    assert "git_create_branch" not in driven.offered[0]
    assert [answer.is_error for answer in driven.answers] == [False] * 5 + [True]
    assert "a.txt" in driven.texts[0]
    assert "the first one" in driven.texts[3]
    assert "nothing to commit" in driven.texts[4]
    assert git(tmp_path, "log", "--format=%s") == "the first one"


async def test_sqlite_on_the_first_version_of_the_sdk(foreign: Need, tmp_path: Path) -> None:
    foreign("older")
    file = tmp_path / "things.db"
    program = script("older", "mcp-server-sqlite")
    server = McpServer("db", command=program, args=["--db-path", str(file)])
    async with McpTools(server) as tools:
        driven = await drive(
            tools,
            call("db_create_table", query="create table things (name text, size integer)"),
            call("db_write_query", query="insert into things values ('a', 1), ('b', 2)"),
            call("db_read_query", query="select sum(size) as total from things"),
            call("db_read_query", query="drop table things"),
            call("db_append_insight", insight="b is larger"),
        )
        memo = await tools.read_resource("db", "memo://insights")
        prompts = await tools.prompts("db")
        messages = await tools.prompt("db", prompts[0].name, {"topic": "sizes"})
    assert "'total': 3" in driven.texts[2]
    assert "Only SELECT" in driven.texts[3]
    assert "b is larger" in text_of_blocks(memo)
    assert isinstance(messages[0], UserMessage)
    assert "sizes" in messages[0].plain_text
    rows = sqlite3.connect(file)
    try:
        assert rows.execute("select count(*) from things").fetchone() == (2,)
    finally:
        rows.close()


async def test_files(foreign: Need, tmp_path: Path) -> None:
    foreign("node")
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "dot.png").write_bytes(PIXEL)
    (tmp_path / "secret.txt").write_text("secret")
    program, *arguments = node("server-filesystem")
    server = McpServer("fs", command=program, args=[*arguments, str(folder)], untrusted=True)
    async with McpTools(server) as tools:
        driven = await drive(
            tools,
            call("fs_write_file", path=str(folder / "a.txt"), content="one\ntwo\n"),
            call(
                "fs_edit_file",
                path=str(folder / "a.txt"),
                edits=[{"oldText": "two", "newText": "three"}],
            ),
            [
                call("fs_read_text_file", path=str(folder / "a.txt")),
                call("fs_read_media_file", path=str(folder / "dot.png")),
                call("fs_list_directory", path=str(folder)),
                call("fs_read_text_file", path=str(tmp_path / "secret.txt")),
            ],
        )
    assert (folder / "a.txt").read_text() == "one\nthree\n"
    _, _, text, media, listing, outside = driven.answers
    assert driven.texts[2] == "one\nthree\n"
    assert text.content[0].text != driven.texts[2]  # type: ignore[union-attr]  # between marks
    [image] = [block for block in media.content if isinstance(block, ImageContent)]
    assert image.source == "data:image/png;base64," + base64.b64encode(PIXEL).decode()
    assert "[FILE] a.txt" in text_of(listing)
    assert outside.is_error
    assert "secret" not in text_of(outside).replace("secret.txt", "")


PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)

# --- several servers, and one that is killed ----------------------------------------------------


async def test_variables_reach_a_server_and_others_do_not(
    foreign: Need, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign("node")
    monkeypatch.setenv("SOME_SECRET", "s3cret")
    program, *arguments = node("server-everything")
    server = McpServer("all", command=program, args=[*arguments, "stdio"], env={"PLACE": "here"})
    async with McpTools(server) as tools:
        environment = json.loads(text_of(await tools.call("all", "get-env", {})))
    assert environment["PLACE"] == "here"
    assert "SOME_SECRET" not in environment


async def test_two_servers_and_a_server_by_two_ways(
    foreign: Need, everything_http: Everything
) -> None:
    foreign("current", "node")
    program, *arguments = node("server-everything")
    local = McpServer("local", command=program, args=[*arguments, "stdio"], include=["echo"])
    remote = McpServer("remote", url=everything_http.url, include=["get-*"], prefix="r.")
    async with McpTools(time_server(), local, remote) as tools:
        names = [tool.name for tool in await tools.tools()]
        driven = await drive(
            tools, [call("local_echo", message="x"), call(names[-1]), call("time_get_current_time")]
        )
    assert names[:3] == ["time_get_current_time", "time_convert_time", "local_echo"]
    assert len(names) == len(set(names))
    assert all(name.replace("_", "").replace("-", "").isalnum() for name in names)
    assert driven.texts[0] == "Echo: x"


async def test_it_is_killed_in_a_call(foreign: Need) -> None:
    """Over the network too, the call says that it may have happened, and nothing hangs.

    Both transports at once: the call after it waits for a connection as long as it may.
    """
    foreign("node")
    await asyncio.gather(*[_is_killed_in_a_call(each) for each in ("streamableHttp", "sse")])


async def _is_killed_in_a_call(transport: Any) -> None:
    with Everything(transport) as running:
        kind: Any = "sse" if transport == "sse" else "http"
        server = McpServer("all", url=running.url, transport=kind, connect_timeout=3.0)
        async with asyncio.timeout(SAFETY_NET), McpTools(server) as tools:
            operation = call("all_trigger-long-running-operation", duration=600, steps=6000)
            sink, stream = (
                RecordingSink(),
                ScriptedStream([operation, call("all_echo", message="x"), "done"]),
            )
            agent = Agent(stream, tool_source=tools, event_sink=sink)
            run = asyncio.create_task(agent.run("go"))
            await eventually(lambda: "tool_execution_update" in sink.types)
            running.child.stop()
            result = await run
    check(result, sink.events)
    lost, away = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    assert lost.details["kind"] == "mcp_connection_lost"
    assert "may or may not" in text_of(lost)
    assert away.details["kind"] in {"mcp_unavailable", "mcp_connection_lost"}


# --- a current server -------------------------------------------------------------------------


class Modern:
    """The server of `tests.mcp.servers.modern`, over stdio or HTTP."""

    def __init__(self, journal: Path, url: str | None) -> None:
        self._journal = journal
        self._url = url

    def server(self, **settings: Any) -> McpServer:
        if self._url is not None:
            return McpServer("m", url=self._url, **settings)
        arguments = ["-m", "tests.mcp.servers.modern", str(self._journal)]
        return McpServer("m", command=sys.executable, args=arguments, cwd=str(ROOT), **settings)

    def notes(self) -> list[str]:
        return self._journal.read_text().split() if self._journal.exists() else []


@pytest.fixture(params=["stdio", "http"])
def modern(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Modern]:
    journal = tmp_path / "journal.txt"
    if request.param == "stdio":
        yield Modern(journal, None)
        return
    child = Child([sys.executable, "-m", "tests.mcp.servers.modern", str(journal), "http"])
    try:
        port = child.wait_for(r"port (\d+) ", seconds=30)
        yield Modern(journal, f"http://127.0.0.1:{port}/mcp")
    finally:
        child.stop()


async def test_a_cancelled_call_ends_at_the_server(modern: Modern) -> None:
    async with McpTools(modern.server()) as tools:
        operation = asyncio.create_task(tools.call("m", "slow", {"seconds": 600}))
        await eventually(lambda: modern.notes() == ["began"])
        operation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await operation
        await eventually(lambda: modern.notes() == ["began", "cancelled"])
        # So does one whose run is cancelled, and one that takes too long.
        token = CancellationToken()
        agent = Agent(ScriptedStream([call("m_slow", seconds=600)]), tool_source=tools)
        running = asyncio.create_task(agent.run("go", signal=token))
        await eventually(lambda: len(modern.notes()) == 3)
        token.cancel("enough")
        with pytest.raises(RunAborted):
            await running
        await eventually(lambda: modern.notes()[2:] == ["began", "cancelled"])


async def test_a_call_that_takes_too_long_ends_at_the_server(modern: Modern) -> None:
    async with McpTools(modern.server(timeout=1.5)) as tools:
        driven = await drive(tools, call("m_slow", seconds=600), call("m_steps", count=1))
        await eventually(lambda: modern.notes() == ["began", "cancelled"])
    late, steps = driven.answers
    assert late.is_error
    assert late.details["kind"] == "mcp_timeout"
    assert text_of(steps) == "1 steps"


async def test_tools_that_come_and_go(modern: Modern) -> None:
    async with McpTools(modern.server()) as tools:
        before = [tool.name for tool in await tools.tools()]
        driven = await drive(
            tools,
            call("m_add", name="extra"),
            call("m_steps", count=0),
            call("m_extra"),
            call("m_remove", name="extra"),
            call("m_steps", count=0),
        )
    assert driven.texts[2] == "this is extra"
    assert driven.offered[0] == before
    assert driven.offered[2] == [*before, "m_extra"]
    assert driven.offered[5] == before


async def test_a_question_on_a_current_connection(modern: Modern) -> None:
    person = Person(name="Grace")
    async with McpTools(modern.server(), ask=person) as tools:
        driven = await drive(tools, call("m_greet"))
    assert driven.texts == ["Hello, Grace!"]
    async with McpTools(modern.server()) as tools:
        driven = await drive(tools, call("m_greet"))
    assert driven.answers[0].is_error


async def test_a_question_suspends_the_run_and_another_process_goes_on(modern: Modern) -> None:
    store = MemoryStore()

    async def go_on(*steps: Any) -> RunResult[Any]:
        """With a new connection; over stdio, with a new process of the server."""
        async with asyncio.timeout(SAFETY_NET), McpTools(modern.server(), ask=SUSPEND) as tools:
            agent = Agent(
                ScriptedStream([*steps]),
                tool_source=tools,
                run_log=RunLog(store),
                max_result_chars=None,
            )
            if not store.runs():
                return await agent.run("go", identity=RunIdentity.root("r"))
            return await resume(store, "r", agent.config)

    async def answer(given: Any) -> str:
        [request] = waiting_for(store)
        await decide(store, "r", request.request_id, GiveResult(given))
        return str(request.request["question"])

    first = await go_on(call("m_register", club="chess club"))
    assert first.outcome is LoopOutcome.SUSPENDED
    assert await answer("Grace") == "The MCP server 'm' asks: What is your name?\nname: Name"
    assert (await go_on()).outcome is LoopOutcome.SUSPENDED
    question = "The MCP server 'm' asks: How old is Grace?\nage: Age"
    assert await answer("old") == question
    assert (await go_on()).outcome is LoopOutcome.SUSPENDED
    assert await answer({"age": 85}) == f"{question}\n(age: answer with a whole number)"
    assert modern.notes() == []
    done = await go_on("done")
    [result] = [m for m in done.messages if isinstance(m, ToolResultMessage)][-1:]
    assert text_of(result) == "Grace, 85, is in the chess club"
    assert modern.notes() == ["registered"]
    report = await replay(store, "r", Agent(ScriptedStream([])).config)
    assert report.is_identical, report


async def test_a_tree_whose_child_calls_a_server_that_asks(modern: Modern) -> None:
    """The root waits for the child, goes on with it, and its log is replayed without the server."""
    store = MemoryStore()

    def tree(tools: McpTools | None, *steps: Any, child: tuple[Any, ...]) -> Agent[str, Any]:
        clerk = Agent(
            ScriptedStream([*child]), name="clerk", tool_source=tools, max_result_chars=None
        )
        delegate = clerk.as_tool("Greets people.", name="clerk")
        return Agent(
            ScriptedStream([*steps]), tools=[delegate], run_log=RunLog(store), max_result_chars=None
        )

    async with asyncio.timeout(SAFETY_NET), McpTools(modern.server(), ask=SUSPEND) as tools:
        child = (call("m_steps", count=2), call("m_greet"))
        agent = tree(tools, call("clerk", task="greet her"), child=child)
        waiting = await agent.run("go", identity=RunIdentity.root("root"))
        assert waiting.outcome is LoopOutcome.SUSPENDED
        [request] = waiting_for(store)
        assert (request.root_run_id, request.tool_name) == ("root", "m_greet")
    await decide(store, "root", request.request_id, GiveResult("Grace"))
    async with asyncio.timeout(SAFETY_NET), McpTools(modern.server(), ask=SUSPEND) as tools:
        done = await resume(store, "root", tree(tools, "done", child=("greeted",)))
    assert done.text == "done"
    said = [text_of(m) for m in store_messages(store, request.run_id)]
    assert said == ["2 steps", "Hello, Grace!"]
    report = await replay(store, "root", tree(None, child=()).config)
    assert report.is_identical, report


def store_messages(store: MemoryStore, run_id: str) -> list[ToolResultMessage]:
    return [m for m in fold(store.load(run_id)).messages if isinstance(m, ToolResultMessage)]


async def test_a_question_that_cannot_suspend_is_refused(
    modern: Modern, caplog: pytest.LogCaptureFixture
) -> None:
    """Outside of a run, in a run without a log, and on a connection of an older protocol."""
    older = McpServer("old", **program("legacy"))
    async with McpTools(modern.server(), older, ask=SUSPEND) as tools:
        direct = await tools.call("m", "greet")
        driven = await drive(tools, call("m_greet"), call("old_ask"))
    assert direct.is_error
    assert "2026-07-28" in text_of(direct)
    assert [answer.is_error for answer in driven.answers] == [True, True]
    assert "cannot wait" in driven.texts[0]
    assert "2026-07-28" in driven.texts[1]
    assert "a question is refused" in caplog.text


async def test_updates_of_a_resource_of_a_current_server(modern: Modern) -> None:
    async with asyncio.timeout(SAFETY_NET), McpTools(modern.server()) as tools:
        async with tools.resource_updates("m", "note://today") as updates:
            await tools.call("m", "change", {"uri": "note://tomorrow"})
            await tools.call("m", "change", {"uri": "note://today"})
            assert await anext(updates) == "note://today"
            await tools.call("m", "change", {"uri": "note://today"})
            assert await anext(updates) == "note://today"
        with pytest.raises(RuntimeError, match="async with"):
            await anext(tools.resource_updates("m", "note://today"))


async def test_updates_go_on_with_the_next_connection(tmp_path: Path) -> None:
    modern = Modern(tmp_path / "journal.txt", None)
    async with (
        asyncio.timeout(SAFETY_NET),
        McpTools(modern.server()) as tools,
        tools.resource_updates("m", "note://today") as updates,
    ):
        assert (await tools.call("m", "leave")).is_error
        assert await anext(updates) == "note://today"  # one may have been missed
        await tools.call("m", "change", {"uri": "note://today"})
        assert await anext(updates) == "note://today"


async def test_a_server_without_updates(foreign: Need) -> None:
    foreign("current")
    async with McpTools(time_server()) as tools:
        with pytest.raises(McpError, match="does not report when its resources change"):
            async with tools.resource_updates("time", "note://today"):
                pass
        prompt = McpPrompt("time", "any")
        assert await tools.complete(prompt, "city") == ()
        assert await tools.instructions("time") is None


async def test_the_log_of_a_current_server(
    modern: Modern, caplog: pytest.LogCaptureFixture
) -> None:
    """Current servers send messages only for requests that ask for them."""
    caplog.set_level(logging.DEBUG, "clark_agent.mcp.server.m")
    async with McpTools(modern.server()) as tools:
        await tools.call("m", "report", {"text": "one"})
    async with McpTools(modern.server(log_level="info")) as tools:
        await tools.call("m", "report", {"text": "two\nlines"})
        await eventually(lambda: "warning" in caplog.text)
    lines = [r for r in caplog.records if r.name == "clark_agent.mcp.server.m"]
    assert [(r.levelname, r.message) for r in lines] == [("WARNING", "modern: warning two lines")]


async def test_suggestions_of_a_current_server(modern: Modern) -> None:
    async with McpTools(modern.server()) as tools:
        [prompt] = await tools.prompts("m")
        found = await tools.complete(prompt, "city", "L", given={"state": "Peru"})
    assert found == ("Lima", "of Peru")


async def test_progress_of_a_current_server(modern: Modern) -> None:
    async with McpTools(modern.server()) as tools:
        driven = await drive(tools, call("m_steps", count=3))
    assert driven.texts == ["3 steps"]
    assert driven.updates
    assert "step" in driven.updates[0]
