"""An agent, or tools, as an MCP server: with the SDK's client in memory, in both eras of the
protocol, and over the pipes of a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, cast

import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError
from msgspec import Struct

from clark_agent import Agent, CancellationToken
from clark_agent.errors import ConfigError, ToolFatal
from clark_agent.mcp.serving import (
    elicited_answer,
    elicited_approval,
    mcp_server,
)
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.run_log.records import RunFailed
from clark_agent.stream import Start, StreamEvent, StreamRequest
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import ask_user_tool
from clark_agent.toolkit.approval import ApprovalGate
from clark_agent.tools import ToolContext, ToolResult, tool
from clark_agent.types import AssistantMessage, FileContent, ImageContent, TextContent

Mode = Literal["legacy", "auto"]
PIXEL = "R0lGODlhAQABAAAAACwAAAAAAQABAAA="


@pytest.fixture(params=["legacy", "auto"])
def mode(request: pytest.FixtureRequest) -> Mode:
    """The handshake era of the protocol, and that since 2026-07-28."""
    chosen: Mode = request.param
    return chosen


@tool(reads_only=True)
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def texts(result: types.CallToolResult) -> list[str]:
    return [block.text for block in result.content if isinstance(block, types.TextContent)]


# --- tools --------------------------------------------------------------------------------------


async def test_tools_are_listed_with_schema_and_hints(mode: Mode) -> None:
    @tool(idempotent=True)
    def save(text: str) -> str:
        """Save a text."""
        return "saved"

    server = mcp_server([add, save], name="sums", instructions="Use it to add.")
    async with Client(server, mode=mode) as client:
        listed = (await client.list_tools()).tools
        assert client.instructions == "Use it to add."
    assert [each.name for each in listed] == ["add", "save"]
    assert listed[0].description == "Add two numbers."
    assert listed[0].input_schema == add.parameters_schema
    assert listed[0].annotations == types.ToolAnnotations(read_only_hint=True)
    assert listed[1].annotations == types.ToolAnnotations(idempotent_hint=True)


async def test_arguments_are_repaired_and_checked_as_in_a_run(mode: Mode) -> None:
    async with Client(mcp_server([add]), mode=mode) as client:
        right = await client.call_tool("add", {"a": "2", "b": 3})
        wrong = await client.call_tool("add", {"a": "two"})
    assert (texts(right), right.is_error) == (["5"], False)
    assert wrong.is_error
    assert "a" in texts(wrong)[0]
    assert "Traceback" not in texts(wrong)[0]


async def test_an_unknown_tool_is_an_error_of_the_protocol(mode: Mode) -> None:
    async with Client(mcp_server([add]), mode=mode) as client:
        with pytest.raises(MCPError, match="unknown tool 'subtract'; the tools are: add"):
            await client.call_tool("subtract", {})


async def test_failures_are_results_without_a_traceback(mode: Mode) -> None:
    def broken() -> str:
        """Fail."""
        raise KeyError("the file is gone")

    def fatal() -> str:
        """End the run."""
        raise ToolFatal("no more")

    @tool(timeout=0.01)
    async def slow() -> str:
        """Never return."""
        await asyncio.Event().wait()
        return ""

    async with Client(mcp_server([broken, fatal, slow]), mode=mode) as client:
        results = [await client.call_tool(name, {}) for name in ("broken", "fatal", "slow")]
    assert [result.is_error for result in results] == [True, True, True]
    assert texts(results[0]) == ["KeyError: 'the file is gone'"]
    assert texts(results[1]) == ["The tool ended the run: no more"]
    assert "0.01" in texts(results[2])[0]


async def test_images_files_and_text(mode: Mode) -> None:
    def draw() -> ToolResult:
        """Draw."""
        return ToolResult(
            (
                TextContent("see:"),
                ImageContent(f"data:image/gif;base64,{PIXEL}"),
                ImageContent("https://example.com/a.png", "image/png", "A"),
                FileContent("data:audio/wav;base64,UklGRg==", name="a.wav"),
                FileContent("data:text/plain,hello%20there", name="a b.txt"),
                FileContent("https://example.com/a.pdf", "application/pdf"),
            )
        )

    async with Client(mcp_server([draw]), mode=mode) as client:
        result = await client.call_tool("draw", {})
    assert result.content == [
        types.TextContent(text="see:"),
        types.ImageContent(data=PIXEL, mime_type="image/gif"),
        types.ResourceLink(uri="https://example.com/a.png", name="A", mime_type="image/png"),
        types.AudioContent(data="UklGRg==", mime_type="audio/wav"),
        types.EmbeddedResource(
            resource=types.BlobResourceContents(
                uri="attachment:///a%20b.txt", blob="aGVsbG8gdGhlcmU=", mime_type="text/plain"
            )
        ),
        types.ResourceLink(
            uri="https://example.com/a.pdf", name="file 6", mime_type="application/pdf"
        ),
    ]


async def test_progress_of_a_tool_rises(mode: Mode) -> None:
    async def count(ctx: ToolContext) -> str:
        """Count."""
        for number in range(3):
            await ctx.update(f"step {number}")
        return "counted"

    seen: list[tuple[float, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, message))

    async with Client(mcp_server([count]), mode=mode) as client:
        result = await client.call_tool("count", {}, progress_callback=note)
    assert texts(result) == ["counted"]
    assert seen == [(1.0, "step 0"), (2.0, "step 1"), (3.0, "step 2")]


async def test_calls_run_side_by_side(mode: Mode) -> None:
    together = asyncio.Barrier(3)

    async def meet() -> str:
        """Wait for the others."""
        await together.wait()
        return "met"

    async with Client(mcp_server([meet]), mode=mode) as client:
        results = await asyncio.gather(*[client.call_tool("meet", {}) for _ in range(3)])
    assert [texts(result) for result in results] == [["met"]] * 3


async def test_a_tool_that_must_run_alone_does() -> None:
    running: list[str] = []
    log: list[tuple[str, int]] = []

    async def work(name: str) -> str:
        running.append(name)
        log.append((name, len(running)))
        for _ in range(20):
            await asyncio.sleep(0)
        running.remove(name)
        return name

    @tool(requires_exclusive_sandbox=True)
    async def alone(name: str) -> str:
        """Work alone."""
        return await work(name)

    async def shared(name: str) -> str:
        """Work beside others."""
        return await work(name)

    async with Client(mcp_server([alone, shared])) as client:
        calls = [("shared", "a"), ("shared", "b"), ("alone", "c"), ("shared", "d"), ("alone", "e")]
        await asyncio.gather(*[client.call_tool(kind, {"name": name}) for kind, name in calls])
    counts = dict(log)
    assert counts["c"] == counts["e"] == counts["d"] == 1
    assert counts["b"] == 2


@pytest.mark.parametrize("waits_on_signal", [False, True])
async def test_cancelling_a_call_cancels_the_tool(mode: Mode, waits_on_signal: bool) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(ctx: ToolContext) -> str:
        """Wait."""
        started.set()
        try:
            if waits_on_signal:
                await ctx.signal.wait()
            else:
                await asyncio.Event().wait()
        finally:
            ended.set()
        return "stopped"

    async with Client(mcp_server([wait, add]), mode=mode) as client:
        calling = asyncio.create_task(client.call_tool("wait", {}))
        await started.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await asyncio.wait_for(ended.wait(), 5)
        assert texts(await client.call_tool("add", {"a": 1})) == ["2"]


async def test_a_client_that_leaves_cancels_its_calls() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        """Wait."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async def leave() -> None:
        async with Client(mcp_server([wait]), mode="legacy") as client:
            calling = asyncio.create_task(client.call_tool("wait", {}))
            await started.wait()
            calling.add_done_callback(lambda task: task.cancelled() or task.exception())

    await leave()
    await asyncio.wait_for(ended.wait(), 5)


async def test_deps_reach_the_tools() -> None:
    def who(ctx: ToolContext[str]) -> str:
        """Say who."""
        return ctx.deps

    async with Client(mcp_server([who], deps="ann")) as client:
        assert texts(await client.call_tool("who", {})) == ["ann"]


# --- agents -------------------------------------------------------------------------------------


async def test_an_agent_is_one_tool(mode: Mode) -> None:
    stream = ScriptedStream([call("add", a=1, b=2), "It is 3."])
    agent = Agent(stream, tools=[add], name="calculator")
    seen: list[tuple[float, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, message))

    server = mcp_server(agent, description="Calculates.")
    async with Client(server, mode=mode) as client:
        (listed,) = (await client.list_tools()).tools
        result = await client.call_tool(
            "calculator", {"task": "What is 1 + 2?"}, progress_callback=note
        )
    assert (listed.name, listed.description) == ("calculator", "Calculates.")
    assert list(listed.input_schema["properties"]) == ["task"]
    assert listed.output_schema is None
    assert (texts(result), result.is_error) == (["It is 3."], False)
    assert stream.requests[0].messages[-1].plain_text == "What is 1 + 2?"
    messages = ["turn 1", "add: started", "add: done", "turn 2"]
    assert seen == [(float(n), text) for n, text in enumerate(messages, 1)]


async def test_an_agent_without_a_name_gets_one_from_the_server() -> None:
    agent = Agent(ScriptedStream([]))
    async with Client(mcp_server(agent, name="My agents: a & b")) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["My_agents_a_b"]
    async with Client(mcp_server(agent)) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["agent"]


async def test_invalid_tasks_do_not_start_a_run(mode: Mode) -> None:
    stream = ScriptedStream([])
    async with Client(mcp_server(Agent(stream, name="a")), mode=mode) as client:
        results = [
            await client.call_tool("a", arguments)
            for arguments in ({}, {"task": "  "}, {"task": ["x", {}]})
        ]
    assert [result.is_error for result in results] == [True, True, True]
    assert "task" in texts(results[0])[0]
    assert texts(results[1]) == ["The task is blank. Say in it what the agent should do."]
    assert stream.requests == []


async def test_a_run_that_fails_is_an_error_result(mode: Mode) -> None:
    agent = Agent(ScriptedStream([RuntimeError("no route to the model")]), name="a")
    async with Client(mcp_server(agent), mode=mode) as client:
        result = await client.call_tool("a", {"task": "Go"})
    assert result.is_error
    assert "did not end well" in texts(result)[0]
    assert "Traceback" not in texts(result)[0]


async def test_a_run_that_runs_out_of_turns_is_an_error_result() -> None:
    stream = ScriptedStream([call("add", a=1)], at_end="repeat")
    agent = Agent(stream, tools=[add], name="a", max_iterations=2, grace_iterations=0)
    async with Client(mcp_server(agent)) as client:
        result = await client.call_tool("a", {"task": "Go"})
    assert result.is_error
    assert texts(result)[0].startswith("The agent ran out of turns.")


class Weather(Struct):
    city: str
    degrees: float


class Unknown(Struct):
    reason: str


@pytest.mark.parametrize(
    ("output", "arguments", "expected"),
    [
        (Weather, {"city": "Lima", "degrees": 19.5}, {"city": "Lima", "degrees": 19.5}),
        (list[int], {"answer": [1, 2]}, {"answer": [1, 2]}),
        (
            Weather | Unknown,
            {"type": "Unknown", "value": {"reason": "fog"}},
            {"type": "Unknown", "value": {"reason": "fog"}},
        ),
    ],
)
async def test_an_output_type_is_structured_content(
    mode: Mode, output: Any, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    agent: Agent[Any] = Agent(
        ScriptedStream([call("finish", **arguments)]), output=output, name="weather"
    )
    async with Client(mcp_server(agent), mode=mode) as client:
        (listed,) = (await client.list_tools()).tools
        result = await client.call_tool("weather", {"task": "Lima?"})  # the client validates it
    assert listed.output_schema is not None
    assert listed.output_schema["type"] == "object"
    assert result.structured_content == expected
    assert json.loads(texts(result)[0]) == expected


async def test_cancelling_a_call_cancels_the_run_and_its_log_says_so(mode: Mode) -> None:
    asked, store = asyncio.Event(), MemoryStore()

    async def stream(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        asked.set()
        await signal.wait()
        if not signal.cancelled:
            yield Start(AssistantMessage.from_text(""))

    agent = Agent(stream, name="a", run_log=RunLog(store))
    async with Client(mcp_server(agent), mode=mode) as client:
        calling = asyncio.create_task(client.call_tool("a", {"task": "Go"}))
        await asked.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
    (run,) = store.runs()  # the server waits for its runs
    assert isinstance(store.load(run.run_id).records[-1].entry, RunFailed)


async def test_agents_and_tools_side_by_side() -> None:
    agent = Agent(ScriptedStream(["Hello."]), name="greeter")
    async with Client(mcp_server([agent, add])) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["greeter", "add"]
        assert texts(await client.call_tool("greeter", {"task": "Greet"})) == ["Hello."]


# --- questions ----------------------------------------------------------------------------------


def deploying(results: list[str]) -> Any:
    @tool
    def deploy(target: str) -> str:
        """Deploy."""
        results.append(target)
        return f"deployed to {target}"

    return deploy


@pytest.mark.parametrize(
    ("action", "content", "expected"),
    [
        ("accept", {"decision": "once"}, ["prod"]),
        ("accept", {"decision": "no", "reason": "not on Fridays"}, []),
        ("accept", {"decision": "anything"}, []),
        ("accept", {}, []),
        ("decline", None, []),
        ("cancel", None, []),
    ],
)
async def test_approvals_reach_the_user_of_the_client(
    mode: Mode, action: Any, content: Any, expected: list[str]
) -> None:
    deployed: list[str] = []
    agent = Agent(
        ScriptedStream([call("deploy", target="prod"), "Done."]),
        tools=[deploying(deployed)],
        plugins=[ApprovalGate(elicited_approval())],
        name="ops",
    )
    asked: list[str] = []

    async def elicit(
        context: Any, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        asked.append(params.message)
        return types.ElicitResult(action=action, content=content)

    async with Client(mcp_server(agent), mode=mode, elicitation_callback=elicit) as client:
        result = await client.call_tool("ops", {"task": "Deploy"})
    assert asked == ["Allow this call?\ndeploy(target='prod')"]
    assert deployed == expected
    assert texts(result) == ["Done."]


async def test_a_client_without_elicitation_is_refused_and_told_why(mode: Mode) -> None:
    deployed: list[str] = []
    server = mcp_server([deploying(deployed)], plugins=[ApprovalGate(elicited_approval())])
    async with Client(server, mode=mode) as client:
        result = await client.call_tool("deploy", {"target": "prod"})
    assert deployed == []
    assert result.is_error
    refusal, note = texts(result)
    assert "no user is available to ask" in refusal
    assert "does not support elicitation" in note


async def test_a_tool_with_a_gate_asks_and_several_questions_can_be_open(mode: Mode) -> None:
    async def elicit(
        context: Any, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        return types.ElicitResult(action="accept", content={"answer": params.message.upper()})

    stream = ScriptedStream(
        [[call("ask_user", question="one?"), call("ask_user", question="two?")], "Thanks."]
    )
    agent = Agent(stream, tools=[ask_user_tool(elicited_answer())], name="a")
    async with Client(mcp_server(agent), mode=mode, elicitation_callback=elicit) as client:
        result = await client.call_tool("a", {"task": "Ask"})
    assert texts(result) == ["Thanks."]
    answers = [m.plain_text for m in stream.requests[1].messages[-2:]]
    assert answers == ["ONE?", "TWO?"]


async def test_cancelling_while_a_question_is_open_cancels_the_call() -> None:
    asked = asyncio.Event()

    async def elicit(
        context: Any, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    deployed: list[str] = []
    server = mcp_server([deploying(deployed)], plugins=[ApprovalGate(elicited_approval())])
    async with Client(server, mode="legacy", elicitation_callback=elicit) as client:
        calling = asyncio.create_task(client.call_tool("deploy", {"target": "prod"}))
        await asked.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert deployed == []


async def test_a_call_whose_client_does_not_come_back_is_cancelled() -> None:
    """The test goes on when the call is over, which the time brings about."""
    stopped = asyncio.Event()

    async def ask() -> str:
        """Ask the client."""
        try:
            return await elicited_answer()("Well?", ())
        finally:
            stopped.set()

    async def elicit(context: Any, params: Any) -> types.ElicitResult | types.ErrorData:
        raise AssertionError

    server = mcp_server([ask], question_timeout=0.05)
    async with Client(server, elicitation_callback=elicit) as client:
        first = await client.session.call_tool("ask", {}, allow_input_required=True)
        assert isinstance(first, types.InputRequiredResult)
        await asyncio.wait_for(stopped.wait(), 5)
        with pytest.raises(MCPError):
            await client.session.call_tool(
                "ask",
                {},
                input_responses={},
                request_state=first.request_state,
                allow_input_required=True,
            )


async def test_an_answer_is_for_the_call_that_asked_only_and_only_once() -> None:
    deployed: list[str] = []
    gate = ApprovalGate(elicited_approval())
    server = mcp_server([deploying(deployed)], plugins=[gate])

    async def elicit(context: Any, params: Any) -> types.ElicitResult | types.ErrorData:
        raise AssertionError

    yes = types.ElicitResult(action="accept", content={"decision": "once"})
    async with Client(server, elicitation_callback=elicit) as client:
        session = client.session
        first = await session.call_tool("deploy", {"target": "test"}, allow_input_required=True)
        assert isinstance(first, types.InputRequiredResult)
        assert first.input_requests is not None
        (key,) = first.input_requests

        async def answer(target: str, state: str | None) -> Any:
            return await session.call_tool(
                "deploy",
                {"target": target},
                input_responses={key: yes},
                request_state=state,
                allow_input_required=True,
            )

        with pytest.raises(MCPError):
            await answer("prod", first.request_state)
        with pytest.raises(MCPError):
            await answer("test", "made up")
        assert texts(await answer("test", first.request_state)) == ["deployed to test"]
        with pytest.raises(MCPError, match="over"):
            await answer("test", first.request_state)
    assert deployed == ["test"]


async def test_a_question_without_an_answer_is_asked_again() -> None:
    gate = ApprovalGate(elicited_approval())
    server = mcp_server([deploying([])], plugins=[gate])

    async def elicit(context: Any, params: Any) -> types.ElicitResult | types.ErrorData:
        raise AssertionError

    async with Client(server, elicitation_callback=elicit) as client:

        async def deploy(**answers: Any) -> Any:
            calling = client.session.call_tool(
                "deploy", {"target": "test"}, allow_input_required=True, **answers
            )
            return await asyncio.wait_for(calling, 5)

        first = await deploy()
        again = await deploy(request_state=first.request_state, input_responses={})
        assert isinstance(again, types.InputRequiredResult)
        assert again.input_requests == first.input_requests
        yes = types.ElicitResult(action="accept", content={"decision": "once"})
        answers = dict.fromkeys(again.input_requests or {}, yes)
        last = await deploy(request_state=again.request_state, input_responses=answers)
    assert texts(last) == ["deployed to test"]


async def test_outside_a_call_nobody_is_there_to_ask() -> None:
    deployed: list[str] = []
    agent = Agent(
        ScriptedStream([call("deploy", target="prod"), "Refused."]),
        tools=[deploying(deployed)],
        plugins=[ApprovalGate(elicited_approval())],
    )
    assert (await agent.run("Deploy")).text == "Refused."
    assert deployed == []


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mcp_server([]), "at least one tool"),
        (lambda: mcp_server("add"), "not 'add'"),
        (lambda: mcp_server(cast("Any", add)), "a list of tools"),
        (lambda: mcp_server([add], description="x"), "for a single agent"),
        (lambda: mcp_server([add], question_timeout=0), "question_timeout"),
        (lambda: mcp_server([Agent(ScriptedStream([]))]), "needs a name"),
        (lambda: mcp_server([Agent(ScriptedStream([]), name="add"), add]), "'add'"),
        (lambda: mcp_server(Agent(ScriptedStream([])), tool_timeout=1), "has its own"),
        (lambda: mcp_server(Agent(ScriptedStream([]), deps_type=int), deps="x"), "must be a int"),
    ],
)
def test_wrong_settings(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


# --- stdin and stdout ---------------------------------------------------------------------------


PROGRAM = """
import asyncio, os, subprocess, sys
from pathlib import Path
from clark_agent import Agent
from clark_agent.mcp.serving import serve_mcp
from clark_agent.run_log import JsonlStore, RunLog
from clark_agent.tools import ToolContext, tool

FOLDER = Path(sys.argv[1])

def loud(text: str) -> str:
    "Print, in every way there is."
    print("print:", text, flush=text == "hello")
    sys.stdout.write("write\\n")
    sys.stdout.flush()
    os.write(1, b"descriptor\\n")
    subprocess.run(["echo", "child"])
    return repr(sys.stdin.read())

async def wait(ctx: ToolContext) -> str:
    "Wait."
    (FOLDER / "started").touch()
    try:
        await asyncio.Event().wait()
    finally:
        (FOLDER / "ended").touch()
    return ""

def long() -> str:
    "Return more than pipes hold."
    (FOLDER / "started").touch()
    return "x" * 2_000_000

async def stream(request, signal):
    (FOLDER / "started").touch()
    await signal.wait()
    return
    yield

agent = Agent(stream, name="agent", run_log=RunLog(JsonlStore(FOLDER / "runs")))
ended_by = asyncio.run(serve_mcp([loud, wait, long, agent]))
(FOLDER / "over").write_text(str(ended_by))
"""


@pytest.mark.slow
async def test_what_tools_print_does_not_reach_the_client(tmp_path: Path) -> None:
    script, errors = tmp_path / "server.py", tmp_path / "stderr"
    script.write_text(PROGRAM)
    server = StdioServerParameters(command=sys.executable, args=[str(script), str(tmp_path)])
    with errors.open("w") as file:
        async with Client(stdio_client(server, file)) as client:
            first = await client.call_tool("loud", {"text": "hello"})
            second = await client.call_tool("loud", {"text": "again"})
    assert (texts(first), texts(second)) == (["''"], ["''"])
    printed = [f"{line}\n" for line in ("write", "descriptor", "child")]
    expected = ["print: hello\n", *printed, "print: again\n", *printed]
    assert errors.read_text() == "".join(expected)


def _await(path: Path) -> None:
    """Wait until another process has made the file."""
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def _started(
    folder: Path, tool_name: str, arguments: dict[str, Any], *, stdout: int | None = None
) -> Any:
    """Start the server with a call under way, without the SDK's client, which would clean up."""
    script = folder / "server.py"
    script.write_text(PROGRAM)
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(folder), stdin=pipe, stdout=stdout or pipe
    )
    assert server.stdin is not None
    info = {"name": "test", "version": "1"}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info}
    for message in (
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": tool_name, "arguments": arguments}},
    ):
        server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    await server.stdin.drain()
    await asyncio.to_thread(_await, folder / "started")
    return server


@pytest.mark.slow
async def test_the_end_of_stdin_cancels_calls_and_ends_the_server(tmp_path: Path) -> None:
    server = await _started(tmp_path, "wait", {})
    server.stdin.close()
    assert await asyncio.wait_for(server.wait(), 30) == 0
    assert (tmp_path / "ended").exists()
    assert (tmp_path / "over").read_text() == "None"


@pytest.mark.slow
async def test_a_closed_stdout_cancels_calls_and_ends_the_server(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    server = await _started(tmp_path, "wait", {}, stdout=writing)
    os.close(writing)
    os.close(reading)
    server.stdin.write(b'{"jsonrpc": "2.0", "id": 3, "method": "tools/list"}\n')
    assert await asyncio.wait_for(server.wait(), 30) == 0
    assert (tmp_path / "ended").exists()
    assert (tmp_path / "over").read_text() == "None"
    server.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["signal", "stdin"])
async def test_a_client_that_does_not_read_cannot_keep_the_server(tmp_path: Path, way: str) -> None:
    reading, writing = os.pipe()
    server = await _started(tmp_path, "long", {}, stdout=writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        await asyncio.to_thread(answers.readline)
        await asyncio.to_thread(answers.read, 100)  # now the long answer is being written
        if way == "signal":
            os.kill(server.pid, signal.SIGTERM)
        else:
            server.stdin.close()
        assert await asyncio.wait_for(server.wait(), 30) == 0
    assert (tmp_path / "over").exists()
    server.stdin.close()


@pytest.mark.slow
async def test_sigterm_cancels_calls_and_ends_the_server(tmp_path: Path) -> None:
    server = await _started(tmp_path, "wait", {})
    os.kill(server.pid, signal.SIGTERM)
    assert await asyncio.wait_for(server.wait(), 30) == 0
    assert (tmp_path / "ended").exists()
    assert (tmp_path / "over").read_text() == str(signal.SIGTERM)
    server.stdin.close()


@pytest.mark.slow
async def test_sigterm_lets_runs_with_a_log_go(tmp_path: Path) -> None:
    from clark_agent.run_log import JsonlStore, fold

    server = await _started(tmp_path, "agent", {"task": "Go"})
    os.kill(server.pid, signal.SIGTERM)
    assert await asyncio.wait_for(server.wait(), 30) == 0
    server.stdin.close()
    store = JsonlStore(tmp_path / "runs")
    (run,) = store.runs()
    assert fold(store.load(run.run_id)).ending is None
