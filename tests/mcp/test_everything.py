"""The client against the reference server: everything that it offers is used once."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from clark_agent import Agent, ImageContent
from clark_agent.errors import McpError
from clark_agent.mcp import McpPrompt, McpServer, McpTools
from clark_agent.testing import ScriptedStream, call
from clark_agent.types import FileContent
from tests.mcp.driving import (
    SAFETY_NET,
    Person,
    content_of,
    drive,
    eventually,
    text_of,
    text_of_blocks,
)
from tests.mcp.servers.everything import Everything
from tests.mcp.servers.install import node

pytestmark = pytest.mark.slow

Need = Callable[..., None]

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
    async def connect(
        settings_of_server: dict[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[McpTools]:
        more = settings_of_server or {}
        if running is None:
            program, *arguments = node("server-everything")
            server = McpServer("all", command=program, args=[*arguments, "stdio"], **more)
        else:
            server = McpServer("all", url=running.url, transport=request.param, **more)
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
    assert names == list(EVERY_TOOL)  # without those that need sampling, roots, or a person
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
    assert annotated.details["annotations"] == [
        {"audience": ["user", "assistant"], "priority": 1.0},
        {"audience": ["user"], "priority": 0.5},
    ]
    assert "annotations" not in echo.details
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
)


async def test_arguments_that_it_refuses(everything: Connect) -> None:
    async with everything() as tools:
        wrong = await tools.call("all", "get-sum", {"a": "two"})
        unknown = await tools.call("all", "no-such-tool", {})
    assert wrong.is_error
    assert unknown.is_error
    assert "no-such-tool" in text_of(unknown)


async def test_a_tool_that_runs_only_as_a_task_is_left_out(everything: Connect) -> None:
    """Tasks were an experiment of one version of the protocol, and are not supported."""
    async with everything() as tools:
        offered = [tool.name for tool in await tools.tools()]
        answer = await tools.call("all", "simulate-research-query", {"topic": "tea"})
        [problem] = tools.problems
    assert "all_simulate-research-query" not in offered
    assert problem.tool == "simulate-research-query"
    assert str(problem) == (
        "MCP server 'all': tool 'simulate-research-query': left out: it runs only as a task, which "
        "this client does not support"
    )
    assert answer.is_error
    assert "task" in text_of(answer)


async def test_instructions(everything: Connect) -> None:
    async with everything() as tools:
        said = await tools.instructions("all")
    assert said.startswith("# Everything Server")


async def test_the_folders_that_it_may_use(everything: Connect, tmp_path: Path) -> None:
    async with everything({"roots": [tmp_path]}) as tools:
        driven = await drive(tools, call("all_get-roots-list"))
    assert f"1. {tmp_path.name}\n   URI: {tmp_path.as_uri()}" in driven.texts[0]


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


async def test_suggestions_for_arguments(everything: Connect) -> None:
    async with everything() as tools:
        prompts = {prompt.name: prompt for prompt in await tools.prompts("all")}
        templates = {
            template.uri_template: template for template in await tools.resource_templates("all")
        }
        team = prompts["completable-prompt"]
        departments = await tools.complete(team, "department")
        engineering = await tools.complete(team, "department", "E")
        names = await tools.complete(team, "name", given={"department": "Sales"})
        text = templates["demo://resource/dynamic/text/{resourceId}"]
        numbers = await tools.complete(text, "resourceId", "7")
        nothing = await tools.complete(text, "resourceId", "seven")
        with pytest.raises(McpError, match="simple-prompt"):
            await tools.complete(McpPrompt("all", "no-simple-prompt"), "city")
    assert departments == ("Engineering", "Sales", "Marketing", "Support")
    assert engineering == ("Engineering",)
    assert names == ("David", "Eve", "Frank")
    assert (numbers, nothing) == (("7",), ())


async def test_a_prompt_is_the_beginning_of_a_run(everything: Connect) -> None:
    async with everything() as tools:
        prompt = await tools.prompt("all", "simple-prompt", {})
        stream = ScriptedStream(["fine"])
        await Agent(stream, tool_source=tools).run(*prompt)
    assert "simple prompt" in stream.requests[0].messages[0].plain_text


async def test_updates_of_resources(everything: Connect) -> None:
    uris = [f"demo://resource/dynamic/text/{number}" for number in (1, 2)]
    async with everything() as tools:
        async with (
            tools.resource_updates("all", uris[0]) as first,
            tools.resource_updates("all", uris[1]) as second,
        ):
            await tools.call("all", "toggle-subscriber-updates")
            assert await anext(first) == uris[0]
            assert await anext(second) == uris[1]
        [block] = await tools.read_resource("all", uris[0])
        assert "plaintext resource" in text_of_blocks([block])
        await tools.call("all", "toggle-subscriber-updates")
        async with tools.resource_updates("all", uris[0]) as updates:
            waiting = asyncio.ensure_future(anext(updates))
            await tools.aclose()
            with pytest.raises(StopAsyncIteration):
                await waiting


async def test_its_log(everything: Connect, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        ours = [r for r in caplog.records if r.name == "clark_agent.mcp.server.all"]
        return [f"{record.levelname} {record.message}" for record in ours]

    uri = "demo://resource/dynamic/text/1"
    caplog.set_level(logging.DEBUG, "clark_agent.mcp.server")
    async with everything({"log_level": "info"}) as tools:
        async with tools.resource_updates("all", uri):
            await eventually(lambda: any("Received Subscribe" in line for line in lines()))
        await eventually(lambda: any("Received Unsubscribe" in line for line in lines()))
    assert lines()[0].startswith(f"INFO Received Subscribe Resource request for URI: {uri}")
    caplog.clear()
    async with everything({"log_level": "emergency"}) as tools:
        async with tools.resource_updates("all", uri):
            pass
        await tools.call("all", "echo", {"message": "1"})
    assert not any("Received" in line for line in lines())


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
