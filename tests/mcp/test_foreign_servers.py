"""The client against servers that others wrote, in their own environments."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from clark_agent import (
    Agent,
    CancellationToken,
    ImageContent,
    RunAborted,
    ToolResultMessage,
    UserMessage,
)
from clark_agent.mcp import McpServer, McpTools
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.testing import RecordingSink, ScriptedStream, call
from clark_agent.types import FileContent
from tests.mcp.driving import SAFETY_NET, check, drive, eventually, text_of
from tests.mcp.servers.everything import Everything
from tests.mcp.servers.install import node, python, script
from tests.transports.servers.child import ROOT, Child

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

# --- the server with every feature ------------------------------------------------------------

TRANSPORTS = ("stdio", "http", "sse")

Connect = Callable[..., Any]


@pytest.fixture(params=TRANSPORTS)
def everything(request: pytest.FixtureRequest, foreign: Need) -> Connect:
    """Opens the tools of the server with every feature, over each transport."""
    foreign("node")
    running: Everything | None = None
    if request.param != "stdio":
        running = request.getfixturevalue(f"everything_{request.param}")

    @asynccontextmanager
    async def connect(**settings: Any) -> AsyncIterator[McpTools]:
        if running is None:
            program, *arguments = node("server-everything")
            server = McpServer("all", command=program, args=[*arguments, "stdio"])
        else:
            server = McpServer("all", url=running.url, transport=request.param)
        async with asyncio.timeout(SAFETY_NET), McpTools(server, **settings) as tools:
            yield tools

    return connect


async def test_every_tool_of_it(everything: Connect) -> None:
    async with everything() as tools:
        names = [tool.name for tool in await tools.tools()]
        driven = await drive(
            tools,
            [
                call("all_echo", message="hello"),
                call("all_get-sum", a=2, b=40.5),
                call("all_get-env"),
                call("all_get-tiny-image"),
                call("all_get-annotated-message", messageType="error", includeImage=True),
                call("all_get-annotated-message", messageType="success"),
                call("all_get-structured-content", location="Chicago"),
                call("all_get-resource-links", count=2),
                call("all_get-resource-reference", resourceType="Text", resourceId=3),
                call("all_get-resource-reference", resourceType="Blob", resourceId=4),
            ],
        )
    assert set(names) >= set(EVERY_TOOL)
    # Those that need what this client does not offer are not there.
    assert not {"all_trigger-sampling-request", "all_get-roots-list"} & set(names)
    echo, total, env, image, annotated, success, structured, links, reference, blob = driven.answers
    assert text_of(echo) == "Echo: hello"
    assert text_of(total) == "The sum of 2 and 40.5 is 42.5."
    assert "PATH" in json.loads(text_of(env))
    assert [type(block).__name__ for block in image.content] == [
        "TextContent", "ImageContent", "TextContent",
    ]  # fmt: skip
    assert text_of(annotated) == "Error: Operation failed"
    assert not annotated.is_error
    assert any(isinstance(block, ImageContent) for block in annotated.content)
    assert text_of(success) == "Operation completed successfully"
    weather = {"temperature": 36, "conditions": "Light rain / drizzle", "humidity": 82}
    assert structured.details["structured"] == weather
    assert json.loads(text_of(structured)) == weather
    assert "demo://resource/dynamic/blob/1" in text_of(links)
    assert "demo://resource/dynamic/text/2" in text_of(links)
    assert "demo://resource/dynamic/text/3" in text_of(reference)
    assert "Resource 3: This is a plaintext resource" in text_of(reference)
    [file] = [block for block in blob.content if isinstance(block, FileContent)]
    assert b"Resource 4: This is a base64 blob" in content_of(file)
    assert not any(answer.is_error for answer in driven.answers)


EVERY_TOOL = (
    "all_echo",
    "all_get-annotated-message",
    "all_get-env",
    "all_get-resource-links",
    "all_get-resource-reference",
    "all_get-structured-content",
    "all_get-sum",
    "all_get-tiny-image",
    "all_gzip-file-as-resource",
    "all_toggle-simulated-logging",
    "all_toggle-subscriber-updates",
    "all_trigger-long-running-operation",
    "all_simulate-research-query",
)


async def test_arguments_that_it_refuses(everything: Connect) -> None:
    async with everything() as tools:
        wrong = await tools.call("all", "get-sum", {"a": "two"})
        unknown = await tools.call("all", "no-such-tool", {})
        # It only runs as a task, which this client does not offer.
        task = await tools.call("all", "simulate-research-query", {"topic": "tea"})
    assert wrong.is_error
    assert unknown.is_error
    assert "no-such-tool" in text_of(unknown)
    assert task.is_error
    assert "task" in text_of(task)


async def test_progress(everything: Connect) -> None:
    async with everything() as tools:
        driven = await drive(
            tools, call("all_trigger-long-running-operation", duration=0.2, steps=4)
        )
    assert "completed" in driven.texts[0]
    assert len(driven.updates) in range(1, 5)  # they may be dropped, not made up


async def test_a_cancelled_operation_leaves_the_connection_usable(everything: Connect) -> None:
    async with everything() as tools:
        operation = asyncio.create_task(
            tools.call("all", "trigger-long-running-operation", {"duration": 600, "steps": 2})
        )
        assert text_of(await tools.call("all", "echo", {"message": "1"})) == "Echo: 1"
        operation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await operation
        assert text_of(await tools.call("all", "echo", {"message": "2"})) == "Echo: 2"


async def test_resources_and_their_templates(everything: Connect) -> None:
    async with everything(resources=True) as tools:
        found = await tools.resources("all")
        templates = await tools.resource_templates("all")
        document = await tools.read_resource("all", "demo://resource/static/document/features.md")
        text = await tools.read_resource("all", "demo://resource/dynamic/text/7")
        blob = await tools.read_resource("all", "demo://resource/dynamic/blob/8")
        driven = await drive(
            tools,
            call("list_resources"),
            call("read_resource", server="all", uri="demo://resource/dynamic/text/9"),
            call("read_resource", server="all", uri="demo://resource/nowhere"),
        )
    assert "demo://resource/static/document/features.md" in {str(item.uri) for item in found}
    assert len(templates) == 2
    assert "Features" in text_of_blocks(document)
    assert "Resource 7: This is a plaintext resource" in text_of_blocks(text)
    [file] = [block for block in blob if isinstance(block, FileContent)]
    assert b"Resource 8: This is a base64 blob" in content_of(file)
    assert "demo://resource/static/document/features.md" in driven.texts[0]
    assert "Resource 9: This is a plaintext resource" in driven.texts[1]
    assert [answer.is_error for answer in driven.answers] == [False, False, True]
    assert "demo://resource/nowhere" in driven.texts[2]


async def test_a_resource_that_a_tool_makes(everything: Connect) -> None:
    """The server says that its resources have changed, and has it in its list."""
    data = {"name": "a.gz", "data": "data:text/plain,hello"}
    async with everything() as tools:
        link = await tools.call(
            "all", "gzip-file-as-resource", {**data, "outputType": "resourceLink"}
        )
        whole = await tools.call("all", "gzip-file-as-resource", {**data, "outputType": "resource"})
        found = await tools.resources("all")
        content = await tools.read_resource("all", "demo://resource/session/a.gz")
    assert "demo://resource/session/a.gz" in text_of(link)
    [file] = [block for block in whole.content if isinstance(block, FileContent)]
    assert gzip.decompress(content_of(file)) == b"hello"
    assert "demo://resource/session/a.gz" in {str(item.uri) for item in found}
    [same] = [block for block in content if isinstance(block, FileContent)]
    assert gzip.decompress(content_of(same)) == b"hello"


async def test_prompts(everything: Connect) -> None:
    async with everything() as tools:
        names = [prompt.name for prompt in await tools.prompts("all")]
        simple = await tools.prompt("all", "simple-prompt", {})
        city = await tools.prompt("all", "args-prompt", {"city": "Lima", "state": "Peru"})
        embedded = await tools.prompt(
            "all", "resource-prompt", {"resourceType": "Text", "resourceId": "1"}
        )
    assert names == ["simple-prompt", "args-prompt", "completable-prompt", "resource-prompt"]
    assert [message.plain_text for message in simple] == [
        "This is a simple prompt without arguments."
    ]
    assert [message.plain_text for message in city] == ["What's weather in Lima, Peru?"]
    assert "Resource 1: This is a plaintext resource" in "\n".join(
        message.plain_text for message in embedded
    )


async def test_a_prompt_is_the_beginning_of_a_run(everything: Connect) -> None:
    async with everything() as tools:
        prompt = await tools.prompt("all", "simple-prompt", {})
        stream = ScriptedStream(["fine"])
        await Agent(stream, tool_source=tools).run(*prompt)
    assert "simple prompt" in stream.requests[0].messages[0].plain_text


async def test_notifications_that_nobody_asked_for(everything: Connect) -> None:
    """Log messages and updates of resources are not a part of the run."""
    async with everything() as tools:
        driven = await drive(
            tools,
            [call("all_toggle-simulated-logging"), call("all_toggle-subscriber-updates")],
            [call("all_echo", message="still here")],
            [call("all_toggle-simulated-logging"), call("all_toggle-subscriber-updates")],
        )
    assert "Started" in driven.texts[0]
    assert "Started" in driven.texts[1]
    assert driven.texts[2] == "Echo: still here"
    assert "Stopped" in driven.texts[3]


class Person:
    """Gives the first answer whose key is in the question, else its last choice, else skips it."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.questions: list[str] = []

    async def __call__(self, question: str, choices: Any) -> str:
        self.questions.append(question)
        for key, answer in self.answers.items():
            if key in question:
                return answer
        return choices[-1] if choices else "skip"


async def test_a_form(everything: Connect) -> None:
    person = Person(
        legal="Ada Lovelace",
        email="ada@example.org",
        date="1815-12-10",
        website="https://example.org/ada",
        integer="7",
        number="2.5",
        terms="yes",
    )
    async with everything(ask=person) as tools:
        answer = await tools.call("all", "trigger-elicitation-request", {})
    assert not answer.is_error
    assert "Name: Ada Lovelace" in text_of(answer), text_of(answer)
    assert "Favorite Integer: 7" in text_of(answer), person.questions
    assert "Agreed to terms: true" in text_of(answer)
    values = json.loads(text_of(answer).partition("Raw result: ")[2])["content"]
    assert values["number"] == 2.5
    assert values["titledSingleSelectEnum"] == "hero-1"  # skipped: the default
    assert values["untitledMultipleSelectEnum"] == ["Guitar"]


async def test_a_person_who_says_nothing(everything: Connect) -> None:
    async with everything(ask=lambda question, choices: "") as tools:
        answer = await tools.call("all", "trigger-elicitation-request", {})
    assert "declined" in text_of(answer)


async def test_a_page_to_open(everything: Connect) -> None:
    person = Person(**{"https://example.org/sign-in": "yes"})
    async with everything(ask=person) as tools:
        answer = await tools.call(
            "all", "trigger-url-elicitation", {"url": "https://example.org/sign-in"}
        )
    assert any("https://example.org/sign-in" in question for question in person.questions)
    assert "User completed" in text_of(answer)


async def test_a_page_that_must_be_opened_before_the_call(everything: Connect) -> None:
    person = Person(**{"https://": "yes"})
    arguments = {"url": "https://example.org/sign-in", "errorPath": True}
    async with everything(ask=person) as tools:
        answer = await tools.call("all", "trigger-url-elicitation", arguments)
    assert answer.is_error
    assert "authorization" in text_of(answer)


async def test_without_a_person_there_are_no_tools_that_ask(everything: Connect) -> None:
    async with everything() as tools:
        names = {tool.name for tool in await tools.tools()}
        answer = await tools.call("all", "trigger-elicitation-request", {})
    if "all_trigger-elicitation-request" not in names:
        assert answer.is_error
    else:
        assert "declined" in text_of(answer)


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


@pytest.mark.parametrize("transport", ["streamableHttp", "sse"])
async def test_it_is_killed_in_a_call(foreign: Need, transport: Any) -> None:
    """Over the network too, the call says that it may have happened, and nothing hangs."""
    foreign("node")
    with Everything(transport) as running:
        kind: Any = "sse" if transport == "sse" else "http"
        server = McpServer("all", url=running.url, transport=kind, connect_timeout=3.0)
        async with asyncio.timeout(SAFETY_NET), McpTools(server) as tools:
            operation = call("all_trigger-long-running-operation", duration=600, steps=6000)
            sink, stream = RecordingSink(), ScriptedStream([operation, call("all_echo"), "done"])
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


async def test_progress_of_a_current_server(modern: Modern) -> None:
    async with McpTools(modern.server()) as tools:
        driven = await drive(tools, call("m_steps", count=3))
    assert driven.texts == ["3 steps"]
    assert driven.updates
    assert "step" in driven.updates[0]


def text_of_blocks(blocks: Any) -> str:
    return "\n".join(block.text for block in blocks if hasattr(block, "text"))


def content_of(file: FileContent) -> bytes:
    """The bytes of a file that is a data URL."""
    return base64.b64decode(file.source.partition("base64,")[2])
