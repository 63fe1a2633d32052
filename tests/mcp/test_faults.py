"""Servers that crash, hang, lie and flood. A run on their tools ends normally and says what failed.

`drive` checks for every run that it ends, that its events are in order, and that its transcript
needs no repair; the fixture `faulty` that no process is left.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import signal
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import anyio
import pytest

from clark_agent import Agent, AgentEvent, CancellationToken, RunAborted, RunIdentity
from clark_agent.events import ToolExecutionUpdate
from clark_agent.mcp import McpError, McpServer, McpTools, _sdk
from clark_agent.run_log import MemoryStore, RunLog, check_prefix
from clark_agent.testing import RecordingSink, ScriptedStream, call
from tests.mcp.conftest import FaultyServers
from tests.mcp.driving import SAFETY_NET, Driven, check, drive, eventually, text_of
from tests.mcp.servers.faulty import ECHO
from tests.mcp.servers.faulty_http import Answer, FaultyHttp, json_answer, sse_answer

Actions = dict[str, Any]
SECRET = "s3cret-t0ken"


async def entered(*servers: McpServer, **settings: Any) -> BaseException | None:
    """What entering says, or None."""
    async with asyncio.timeout(SAFETY_NET):
        try:
            async with McpTools(*servers, **settings):
                return None
        except McpError as error:
            return error


def failed(driven: Driven, kind: str, *words: str) -> None:
    """The first call failed in this way, and its text has these words."""
    answer = driven.answers[0]
    assert answer.is_error
    assert answer.details["server"] in {"faulty", "web"}
    assert answer.details["kind"] == kind, answer
    for word in words:
        assert word in text_of(answer), text_of(answer)


# --- when it starts ---------------------------------------------------------------------------

ENDED = f"the program {sys.executable!r} has ended, or has closed its output"
NO_ANSWER = f"no connection within 0.3 seconds; check that {sys.executable} is an MCP server"
DECLINED = "the server refuses the connection"
NOT_VALID = "the server does not follow the protocol: ValidationError"


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ({"start": {"die": 3}}, ENDED),
        ({"start": {"stderr": 300, "die": 3}},
         f"{ENDED}. Its last lines on stderr:\n{'x' * 99}\n"),
        ({"initialize": {"die": 3}}, ENDED),
        ({"initialize": {"die": -signal.SIGKILL}}, ENDED),
        ({"server/discover": {"die": 3}}, ENDED),
        ({"initialize": {"silent": True}}, NO_ANSWER),
        ({"server/discover": {"silent": True}, "initialize": {"silent": True}}, NO_ANSWER),
        ({"initialize": {"error": {"code": -32000, "message": "no licence"}}},
         f"{DECLINED} (-32000): no licence"),
        ({"initialize": {"result": "yes"}}, f"{DECLINED} (-32700): the result is not an object"),
        ({"initialize": {"result": {"protocolVersion": 5}}}, NOT_VALID),
        ({"initialize": {"result": {"protocolVersion": "1066-10-14", "capabilities": {},
          "serverInfo": {"name": "x", "version": "1"}}}},
         "RuntimeError: Unsupported protocol version from the server: 1066-10-14"),
        ({"tools/list": {"die": 3}}, ENDED),
        ({"tools/list": {"silent": True}}, NO_ANSWER),
        ({"tools/list": {"error": {"code": -32603, "message": "none today"}}},
         f"{DECLINED} (-32603): none today"),
        ({"tools/list": {"result": {"tools": "none"}}}, NOT_VALID),
        ({"tools/list": {"result": []}}, f"{DECLINED} (-32700): the result is not an object"),
    ],
    ids=[
        "dies", "dies with words", "dies in the handshake", "is killed in the handshake",
        "dies in the probe", "never answers", "answers nothing at all", "refuses",
        "answers with a text", "answers with half of it", "speaks an unknown version",
        "dies in the list", "never lists", "refuses to list", "lists a text", "lists a list",
    ],
)  # fmt: skip
async def test_one_that_cannot_be_used(faulty: FaultyServers, actions: Actions, said: str) -> None:
    """If it is required, entering fails and says why. If it is not, the run goes on without it."""
    seconds = 0.3 if said == NO_ANSWER else 20.0
    expected = f"MCP server 'faulty': {said}"
    error = await entered(faulty(actions, connect_timeout=seconds))
    assert str(error).startswith(expected), error
    optional = faulty(actions, connect_timeout=seconds, required=False)
    async with asyncio.timeout(SAFETY_NET), McpTools(optional) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
        assert driven.texts == ["There is no tool 'faulty_echo'. The tools are: none."]
        (problem,) = tools.problems
        assert str(problem).startswith(expected), problem


@pytest.mark.slow
async def test_one_that_is_not_there() -> None:
    error = await entered(McpServer("gone", command="/no/such/program"))
    assert error is not None
    assert "gone" in str(error)
    assert "/no/such/program" in str(error)
    async with McpTools(McpServer("gone", command="/no/such/program", required=False)) as tools:
        driven = await drive(tools)
    assert driven.offered == [[]]


async def test_one_that_starts_slowly(faulty: FaultyServers) -> None:
    async with McpTools(faulty({"start": {"wait": 0.7}}, connect_timeout=20)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
    assert driven.texts == ["echo: x"]


@pytest.mark.parametrize(
    "garbage",
    [
        "Welcome to the server!",
        "\n\n",
        '{"jsonrpc": "2.0", "half": ',
        "[1, 2, 3]",
        "null",
        '{"jsonrpc": "2.0", "id": 77, "result": {}}',
        '{"jsonrpc": "2.0", "method": "notifications/unheard_of", "params": {"a": 1}}',
        '{"jsonrpc": "2.0", "method": "notifications/progress", "params": "no"}',
        '{"jsonrpc": "2.0", "id": "q", "method": "sampling/createMessage", "params": {}}',
        '{"jsonrpc": "2.0", "id": "q", "method": "roots/list"}',
        '{"jsonrpc": "2.0", "id": "q", "method": "elicitation/create", "params": {"message": 5}}',
        "\x00\x01\x02",
        "h\xe9las",  # not UTF-8
    ],
    ids=[
        "banner", "blank", "half", "list", "null", "answer to nothing", "unknown notification",
        "wrong notification", "sampling", "roots", "wrong question", "control", "bytes",
    ],
)  # fmt: skip
async def test_garbage_on_its_output(
    faulty: FaultyServers, garbage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Between proper messages it is skipped, whenever it comes, and without a traceback."""
    said = {"flood": [0, {}], "line": garbage}
    actions = {"start": said, "notifications/initialized": said}
    async with McpTools(faulty(actions)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"), call("faulty_echo", text="y"))
    assert driven.texts == ["echo: x", "echo: y"]
    assert "Traceback" not in caplog.text
    if garbage.startswith("Welcome"):
        told = [record for record in caplog.records if "Welcome" in record.getMessage()]
        assert [record.levelname for record in told] == ["WARNING"]


# --- in a call --------------------------------------------------------------------------------


async def test_a_schema_that_is_nested_too_deeply_costs_its_tool(faulty: FaultyServers) -> None:
    schema = '{"type":"object","properties":{"a":' * 1_500 + "{}" + "}}" * 1_500
    listed = f'[{{"name":"deep","inputSchema":{schema}}},{json.dumps(ECHO)}]'
    line = f'{{"jsonrpc":"2.0","id":ID,"result":{{"tools":{listed}}}}}'
    async with McpTools(faulty({"tools/list": {"line": line}})) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
        assert "'deep'" in str(tools.problems)
    assert driven.offered[0] == ["faulty_echo"]
    assert driven.texts == ["echo: x"]


@pytest.mark.parametrize("result", [None, "done", 5, [], ["x"]])
async def test_a_result_that_is_not_an_object(faulty: FaultyServers, result: Any) -> None:
    """The call fails at once, and does not wait for its timeout."""
    async with McpTools(faulty({"tools/call": {"result": result}}, timeout=1_000)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
        assert len(await tools.tools()) == 1
    failed(driven, "mcp_protocol_error", "the result is not an object", "may or may not")


@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL, -signal.SIGSEGV])
async def test_one_that_dies_in_a_call(faulty: FaultyServers, code: int) -> None:
    """The call says that it may have happened. The next one has a new process."""
    actions = {"first": {"tools/call": {"die": code}}}
    async with McpTools(faulty(actions)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"), call("faulty_echo", text="y"))
    failed(driven, "mcp_connection_lost", "faulty", "may or may not")
    assert driven.texts[1] == "echo: y"
    assert len(faulty.starts) == 2


async def test_one_that_dies_in_every_call(faulty: FaultyServers) -> None:
    """Calls at once all fail; none is sent again."""
    async with McpTools(faulty({"tools/call": {"die": 1}})) as tools:
        driven = await drive(tools, [call("faulty_echo", text=str(n)) for n in range(5)])
    assert all(answer.is_error for answer in driven.answers)
    kinds = {answer.details["kind"] for answer in driven.answers}
    assert kinds <= {"mcp_connection_lost", "mcp_unavailable"}
    sent = [entry["params"]["arguments"]["text"] for entry in faulty.received("tools/call")]
    assert len(sent) == len(set(sent))


async def test_one_that_does_not_come_back(faulty: FaultyServers) -> None:
    """A call waits for it, but not longer than for a connection."""
    actions = {"start": {"die": 5}, "first": {"start": {}, "tools/call": {"die": 1}}}
    async with McpTools(faulty(actions, connect_timeout=1.0)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"), call("faulty_echo", text="y"))
        assert "faulty" in str(tools.problems)
    failed(driven, "mcp_connection_lost")
    last = driven.answers[1]
    assert last.is_error
    assert last.details["kind"] == "mcp_unavailable"
    assert "faulty" in text_of(last)
    assert driven.offered[0] == driven.offered[2] == ["faulty_echo"]


async def test_a_call_right_after_a_crash_does_not_wait_for_the_next_attempt(
    faulty: FaultyServers,
) -> None:
    """The attempts by itself are 0.5, 1, 2 and 4 seconds apart, more than it may take."""
    async with McpTools(faulty({"tools/call": {"die": 3}}, connect_timeout=1.5)) as tools:
        kinds = [(await tools.call("faulty", "echo")).details["kind"] for _ in range(6)]
    assert kinds == ["mcp_connection_lost"] * 6


async def test_it_is_started_again_by_itself_and_less_and_less_often(faulty: FaultyServers) -> None:
    """It dies as soon as it is connected. The pauses between starts double."""
    actions = {"first": {"tools/call": {"die": 1}}, "tools/list": {"die": 1}}
    actions["first"]["tools/list"] = {}  # type: ignore[index]
    async with McpTools(faulty(actions)) as tools:
        await drive(tools, call("faulty_echo", text="x"))
        await eventually(lambda: len(faulty.starts) >= 3)
    times = [entry["at"] for entry in faulty.starts]
    first, second, *_ = [later - earlier for earlier, later in pairwise(times)]
    assert first > 0.45
    assert second > 0.9


async def test_one_that_hangs(faulty: FaultyServers) -> None:
    """The call ends in time, the server is told, and other calls go on."""
    actions = {"tools/call": {"silent": True}}
    async with McpTools(faulty(actions, timeout=0.3)) as tools:
        driven = await drive(tools, [call("faulty_echo", text="x"), call("faulty_echo", text="y")])
        await eventually(lambda: len(faulty.received("notifications/cancelled")) == 2)
    failed(driven, "mcp_timeout", "0.3")
    sent = {entry["id"] for entry in faulty.received("tools/call")}
    told = {entry["params"]["requestId"] for entry in faulty.received("notifications/cancelled")}
    assert told == sent


async def test_a_cancelled_run_while_it_hangs(faulty: FaultyServers) -> None:
    async with McpTools(faulty({"tools/call": {"silent": True}})) as tools:
        stream, token, sink = (
            ScriptedStream([call("faulty_echo", text="x")]),
            CancellationToken(),
            RecordingSink(),
        )
        agent = Agent(stream, tool_source=tools, event_sink=sink)
        running = asyncio.create_task(agent.run("go", signal=token))
        await eventually(lambda: faulty.received("tools/call"))
        token.cancel("enough")
        async with asyncio.timeout(SAFETY_NET):
            with pytest.raises(RunAborted):
                await running
        await eventually(lambda: faulty.received("notifications/cancelled"))


async def test_one_that_neither_answers_nor_leaves(faulty: FaultyServers) -> None:
    """It reads nothing any more and ignores that its input ends: it is killed."""
    actions = {"tools/call": {"wait": 3600}}
    async with asyncio.timeout(SAFETY_NET):
        async with McpTools(faulty(actions, timeout=0.2)) as tools:
            driven = await drive(tools, call("faulty_echo", text="x"))
    failed(driven, "mcp_timeout")


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"content": "text"},
        {"content": None},
        {"content": [5]},
        {"content": [{"type": "text"}]},
        {"content": [{"type": "text", "text": 5}]},
        {"content": [{"type": "hologram", "data": "x"}]},
        {"content": [{"type": "image", "data": "AAAA"}]},
        {"content": [{"type": "resource", "resource": {"text": "no uri"}}]},
        {"content": [], "isError": "perhaps"},
        {"content": [], "structuredContent": [1, 2]},
        {"resultType": "something else", "content": []},
    ],
    ids=json.dumps,
)
async def test_results_of_the_wrong_shape(faulty: FaultyServers, result: Any) -> None:
    """They are an error result, never an exception, and the connection stays."""
    async with McpTools(faulty({"tools/call": {"result": result}}, timeout=5)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
        again = await drive(tools, call("faulty_echo", text="y"))
    for answer in (*driven.answers, *again.answers):
        assert text_of(answer)
        if answer.is_error:
            assert answer.details["kind"] == "mcp_protocol_error", answer
            assert "faulty" in text_of(answer)
    assert len(faulty.starts) == 1


@pytest.mark.parametrize(
    "result",
    [
        {"content": []},
        {"content": [{"type": "text", "text": ""}]},
        {"content": [{"type": "text", "text": "lone \ud800 surrogate, \u0000 and \u202e"}]},
        {"content": [{"type": "image", "data": "%%%", "mimeType": "image/png"}]},
        {"content": [{"type": "image", "data": "AAAA", "mimeType": "text/html"}]},
        {"content": [{"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}]},
        {"content": [{"type": "resource", "resource": {"uri": "a b", "text": "t"}}]},
        {"content": [{"type": "resource_link", "uri": "::", "name": ""}]},
        {"content": [], "structuredContent": {"deep": [[[[[[[[1]]]]]]]]}},
        {"content": [{"type": "text", "text": "t", "unknown": 1}], "_meta": {"a": 1}, "more": 2},
        {"content": [], "isError": True},
    ],
    ids=["nothing", "empty", "surrogate", "not base64", "html as image", "audio", "odd uri",
         "odd link", "deep", "more than known", "error without text"],
)  # fmt: skip
async def test_odd_results(faulty: FaultyServers, result: Any) -> None:
    """Whatever they are, the model gets something that a provider accepts."""
    async with McpTools(faulty({"tools/call": {"result": result}})) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
    [answer] = driven.answers
    assert answer.content
    assert answer.is_error == bool(result.get("isError")) or answer.is_error
    assert driven.stream.requests[1].messages[-1] == answer


NO_ERROR = "(error -32700): the error is not valid"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"code": -32602, "message": "no such text"}, None),
        ({"code": -32602, "message": "no such text", "data": {"a": ["long"] * 10_000}}, None),
        ({"code": -32000, "message": "no such text"}, "(error -32000): no such text"),
        ({"code": -32001, "message": "no such text"}, "(error -32001): no such text"),
        ({"code": -32042, "message": "no such text"}, "(error -32042): no such text"),
        ({"code": -32602}, NO_ERROR),
        ({"code": "x", "message": "no such text"}, NO_ERROR),
        ({"message": "no such text"}, NO_ERROR),
        ({"message": 5}, NO_ERROR),
        ("no such text", NO_ERROR),
        (None, NO_ERROR),
    ],
    ids=[
        "-32602", "long data", "-32000", "-32001", "-32042", "no message", "code is text",
        "no code", "message is a number", "text", "null",
    ],
)  # fmt: skip
async def test_errors_of_the_protocol(faulty: FaultyServers, error: Any, said: str | None) -> None:
    """One that refuses the arguments says that nothing happened. Others do not say."""
    async with McpTools(faulty({"tools/call": {"error": error}}, timeout=1_000)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
    failed(driven, "mcp_protocol_error")
    expected = "The server 'faulty' has refused the call (error -32602): no such text"
    if said is not None:
        expected = (
            f"The server 'faulty' has not answered the call as it should {said}\n"
            "The call may or may not have happened: check before you call again."
        )
    assert driven.texts == [expected]


@pytest.mark.parametrize(
    "line",
    [
        "this is not JSON",
        '{"jsonrpc": "2.0", "id": 4711, "result": {"content": []}}',
        '{"jsonrpc": "2.0", "id": null, "result": {"content": []}}',
        '{"jsonrpc": "1.0", "id": ID, "result": {"content": []}}',
        '{"id": ID, "result": {"content": []}}',
        '{"jsonrpc": "2.0", "id": ID}',
        '[{"jsonrpc": "2.0", "id": ID, "result": {"content": []}}]',
    ],
    ids=["no JSON", "wrong id", "no id", "old version", "no version", "no result", "batch"],
)
async def test_answers_that_belong_to_no_call(faulty: FaultyServers, line: str) -> None:
    """The call ends when its time is up, and calls of others are not harmed."""
    async with McpTools(faulty({"tools/call": {"line": line}}, timeout=0.5)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
        assert len(await tools.tools()) == 1
    failed(driven, "mcp_timeout", "0.5")


async def test_an_answer_with_a_result_and_an_error(faulty: FaultyServers) -> None:
    line = (
        '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{"type": "text", "text": "r"}]},'
        ' "error": {"code": 1, "message": "e"}}'
    )
    async with McpTools(faulty({"tools/call": {"line": line}}, timeout=0.5)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
    assert driven.texts[0]


async def test_two_answers_to_a_call(faulty: FaultyServers) -> None:
    good = '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{"type": "text", "text": "1"}]}}'
    async with McpTools(faulty({"tools/call": {"line": f"{good}\n{good}"}})) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"), call("faulty_echo", text="y"))
    assert driven.texts == ["1", "1"]


async def test_structured_content_that_its_schema_forbids(faulty: FaultyServers) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = {**ECHO, "outputSchema": schema}
    lies = [{"n": "many"}, {}, None]
    for lie in lies:
        result: dict[str, Any] = {"content": [{"type": "text", "text": "t"}]}
        if lie is not None:
            result["structuredContent"] = lie
        actions = {"tools/list": {"result": {"tools": [tool]}}, "tools/call": {"result": result}}
        async with McpTools(faulty(actions)) as tools:
            driven = await drive(tools, call("faulty_echo", text="x"))
        failed(driven, "mcp_protocol_error", "faulty")


async def test_output_schemas_that_are_no_schemas(faulty: FaultyServers) -> None:
    result = {"content": [], "structuredContent": {"n": 1}}
    for schema in ({"type": "objekt"}, {"$ref": "#/nowhere"}, {"properties": 5}):
        tools_list = {"tools": [{**ECHO, "outputSchema": schema}]}
        actions = {"tools/list": {"result": tools_list}, "tools/call": {"result": result}}
        async with McpTools(faulty(actions)) as tools:
            driven = await drive(tools, call("faulty_echo", text="x"))
            assert driven.texts[0]


# --- questions --------------------------------------------------------------------------------

QUESTION = {
    "id": "q",
    "method": "elicitation/create",
    "params": {
        "message": "Who are you?",
        "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}


class Silent:
    """A person who never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, question: str, choices: Any) -> str:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.gone.set()
        return ""


async def test_a_run_is_cancelled_while_a_person_is_asked(faulty: FaultyServers) -> None:
    person, token = Silent(), CancellationToken()
    actions = {"tools/call": {"flood": [1, QUESTION], "silent": True}}
    async with McpTools(faulty(actions), ask=person) as tools:
        agent = Agent(ScriptedStream([call("faulty_echo", text="x")]), tool_source=tools)
        running = asyncio.create_task(agent.run("go", signal=token))
        async with asyncio.timeout(SAFETY_NET):
            await person.asked.wait()
            token.cancel("enough")
            with pytest.raises(RunAborted):
                await running
            await person.gone.wait()
        await eventually(lambda: faulty.received("notifications/cancelled"))


async def test_it_dies_while_a_person_is_asked(faulty: FaultyServers) -> None:
    person = Silent()
    actions = {"tools/call": {"flood": [1, QUESTION], "silent": True}}
    async with McpTools(faulty(actions), ask=person) as tools:
        running = asyncio.create_task(drive(tools, call("faulty_echo", text="x")))
        async with asyncio.timeout(SAFETY_NET):
            await person.asked.wait()
            os.kill(faulty.running()[0], signal.SIGKILL)
            driven = await running
            await person.gone.wait()
    failed(driven, "mcp_connection_lost")


@pytest.mark.parametrize(
    "schema",
    [
        None,
        5,
        {},
        {"type": "object", "properties": {"a": 5}},
        {"type": "object", "properties": {"a": {"type": "matrix"}}},
        {"type": "object", "properties": {"a": {"type": "string", "enum": []}}},
        {"type": "object", "properties": {f"f{n}": {"type": "string"} for n in range(1000)}},
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": "low"}}},
    ],
    ids=["null", "number", "empty", "no field", "unknown type", "no choice", "wide", "odd limit"],
)
async def test_questions_that_cannot_be_asked(faulty: FaultyServers, schema: Any) -> None:
    """The server is told so, or gets an answer; the call goes on."""
    params = {"message": "Well?", "requestedSchema": schema}
    question = {**QUESTION, "params": params}

    async def answer(question: str, choices: Any) -> str:
        return "1"

    async with McpTools(faulty({"tools/call": {"flood": [1, question]}}), ask=answer) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
        await eventually(lambda: [entry for entry in faulty.journal if entry.get("id") == "q"])
    assert driven.texts == ["echo: x"]


# --- lists of tools ---------------------------------------------------------------------------


def tool_with(schema: Any, name: str = "odd") -> dict[str, Any]:
    return {"name": name, "description": "Odd.", "inputSchema": schema}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "array", "items": {}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}},
        {"type": "object", "properties": {"a": {"$ref": "https://example.org/schema.json"}}},
        {"type": "object", "properties": 5},
        {"type": "object", "properties": {"a": {"type": "colour"}}},
    ],
    ids=["text", "list", "no such definition", "elsewhere", "number", "unknown type"],
)
async def test_a_schema_that_no_provider_accepts(faulty: FaultyServers, schema: Any) -> None:
    """The tool is left out and the others stay."""
    listed = {"tools": [tool_with(schema), ECHO]}
    async with McpTools(faulty({"tools/list": {"result": listed}})) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
        problems = str(tools.problems)
    assert "faulty_echo" in driven.offered[0]
    assert driven.texts == ["echo: x"]
    if driven.offered[0] == ["faulty_echo"]:
        assert "odd" in problems


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}},
         "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
        {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object"}]},
        {"type": ["object", "null"], "properties": {"a": {"type": ["string", "null"]}}},
        {"type": "object", "properties": {"a b/c": {"type": "string"}, "": {"type": "string"}}},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(500)}},
    ],
    ids=["empty", "bare", "recursive", "choice", "or null", "odd names", "wide"],
)  # fmt: skip
async def test_odd_schemas(faulty: FaultyServers, schema: Any) -> None:
    """A tool with one is offered and works, or it is left out and that is said."""
    listed = {"tools": [tool_with(schema), ECHO]}
    async with McpTools(faulty({"tools/list": {"result": listed}})) as tools:
        driven = await drive(tools, call("faulty_odd"), call("faulty_echo", text="x"))
        problems = str(tools.problems)
    assert driven.texts[1] == "echo: x"
    assert "faulty_odd" in driven.offered[0] or "odd" in problems


async def test_arguments_that_the_schema_rejects_are_not_sent(faulty: FaultyServers) -> None:
    """What is meant is repaired as with other tools; the rest is an error without a call."""
    counts = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    listed = {"tools": [tool_with({**counts, "additionalProperties": False})]}
    async with McpTools(faulty({"tools/list": {"result": listed}})) as tools:
        calls = [call("faulty_odd", wrong=1), call("faulty_odd", n="no"), call("faulty_odd", n="7")]
        driven = await drive(tools, *calls)
    wrong, no, seven = driven.answers
    for answer in (wrong, no):
        assert answer.is_error
        assert answer.details["kind"] == "tool_argument_validation"
    assert "'faulty_odd'" in text_of(wrong)
    assert not seven.is_error
    (sent,) = faulty.received("tools/call")
    assert sent["params"]["arguments"] == {"n": 7}


@pytest.mark.parametrize(
    "entry", [{"name": 5}, {"name": "odd"}, {"inputSchema": {"type": "object"}}, {}, None, "odd"],
    ids=json.dumps,
)  # fmt: skip
async def test_entries_that_are_no_tools(faulty: FaultyServers, entry: Any) -> None:
    """They are left out and the others stay."""
    async with McpTools(faulty({"tools/list": {"result": {"tools": [entry, ECHO]}}})) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
        assert tools.problems
    assert driven.offered[0] == ["faulty_echo"]
    assert driven.texts == ["echo: x"]


async def test_names_that_providers_refuse(faulty: FaultyServers) -> None:
    names = ["a b", "a.b", "a/b", "é", "", "x" * 200, "x" * 199 + "y", "echo", "echo"]
    listed = {"tools": [{**ECHO, "name": name} for name in names]}
    async with McpTools(faulty({"tools/list": {"result": listed}})) as tools:
        offered = [tool.name for tool in await tools.tools()]
        calls = [call(name, text=str(n)) for n, name in enumerate(offered)]
        driven = await drive(tools, calls)
    assert len(offered) == len(set(offered)) >= 7
    assert all(1 <= len(name) <= 64 and name.isascii() for name in offered)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") for name in offered)
    assert driven.texts == [f"echo: {n}" for n in range(len(offered))]
    called = [entry["params"]["name"] for entry in faulty.received("tools/call")]
    assert set(called) <= set(names)
    assert {"a b", "a.b", "a/b", "x" * 200, "x" * 199 + "y", "echo"} <= set(called)


def page_of(message: dict[str, Any], *, pages: int | None, size: int) -> Answer:
    """A page of tools, and the way to the next one."""
    number = int((message.get("params") or {}).get("cursor") or 0)
    tools = [{**ECHO, "name": f"t{number * size + n}"} for n in range(size)]
    result: dict[str, Any] = {"tools": tools}
    if pages is None or number + 1 < pages:
        result["nextCursor"] = str(number + 1)
    return json_answer({"id": message["id"], "result": result})


@pytest.fixture
def http() -> Iterator[FaultyHttp]:
    with FaultyHttp() as server:
        yield server


@pytest.mark.slow
async def test_a_thousand_tools_on_twenty_pages(http: FaultyHttp) -> None:
    http.answers["tools/list"] = lambda message: page_of(message, pages=20, size=50)
    async with McpTools(McpServer("big", url=http.url)) as tools:
        driven = await drive(tools, call("big_t999", text="x"), call("big_t0", text="y"))
    assert driven.offered[0] == [f"big_t{n}" for n in range(1000)]
    assert driven.texts == ["echo: x", "echo: y"]
    assert http.methods().count("tools/list") == 20
    first, *others = [request.tools for request in driven.stream.requests]
    assert all(tools is first for tools in others)


@pytest.mark.slow
async def test_pages_without_end(http: FaultyHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was listed so far is used, and the rest is reported."""
    monkeypatch.setattr("clark_agent.mcp._requests._MOST_PAGES", 20)
    http.answers["tools/list"] = lambda message: page_of(message, pages=None, size=1)
    async with McpTools(McpServer("endless", url=http.url)) as tools:
        assert len(await tools.tools()) == 20
        [problem] = tools.problems
    assert (problem.server, problem.tool) == ("endless", None)
    assert "more than 20 pages" in problem.text


@pytest.mark.slow
async def test_pages_that_lead_back(http: FaultyHttp) -> None:
    def same(message: dict[str, Any]) -> Answer:
        result = {"tools": [ECHO], "nextCursor": "again"}
        return json_answer({"id": message["id"], "result": result})

    http.answers["tools/list"] = same
    async with McpTools(McpServer("circle", url=http.url)) as tools:
        driven = await drive(tools, call("circle_echo", text="x"))
        assert "the same page twice" in str(tools.problems)
    assert driven.texts == ["echo: x"]
    assert http.methods().count("tools/list") == 2


# --- too much of it ---------------------------------------------------------------------------

MANY = 5_000


@pytest.mark.parametrize(
    "notification",
    [
        {"method": "notifications/progress", "params": {"progressToken": "TOKEN", "progress": 1}},
        {"method": "notifications/progress", "params": {"progressToken": 12345, "progress": 1}},
        {"method": "notifications/message", "params": {"level": "error", "data": "x" * 500}},
        {"method": "notifications/tools/list_changed"},
        {"method": "notifications/resources/list_changed"},
        {"method": "notifications/resources/updated", "params": {"uri": "a://b"}},
        {"method": "notifications/cancelled", "params": {"requestId": 1}},
    ],
    ids=["progress", "progress of others", "log", "tools", "resources", "updates", "cancelled"],
)
async def test_floods_of_notifications(faulty: FaultyServers, notification: Any) -> None:
    actions = {"tools/call": {"flood": [MANY, notification]}}
    async with McpTools(faulty(actions)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"), call("faulty_echo", text="y"))
    assert driven.texts == ["echo: x", "echo: y"]
    # The tools are listed again before a turn, not for every notification.
    assert len(faulty.received("tools/list")) <= 20


@pytest.mark.parametrize(
    "notification",
    [
        {"method": "notifications/progress", "params": {"progressToken": "TOKEN", "progress": "x"}},
        {"method": "notifications/progress",
         "params": {"progressToken": "TOKEN", "progress": 10**400}},
        {"method": "notifications/progress",
         "params": {"progressToken": "TOKEN", "progress": 1, "total": -(10**400)}},
        {"method": "notifications/message", "params": {"level": "loud", "data": "x"}},
        {"method": "notifications/resources/updated", "params": {"uri": 5}},
    ],
    ids=["progress", "large progress", "large total", "log", "updates"],
)  # fmt: skip
async def test_floods_of_notifications_that_are_not_valid(
    faulty: FaultyServers, notification: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """They are ignored, the log says it once, and the connection stays."""
    actions = {"tools/call": {"flood": [50, notification]}}
    async with McpTools(faulty(actions)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"), call("faulty_echo", text="y"))
    assert driven.texts == ["echo: x", "echo: y"]
    assert len(faulty.starts) == 1
    [warning] = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert notification["method"] in warning.getMessage()
    assert warning.exc_info is None


async def test_a_connection_that_the_sdk_gives_up_is_noticed_at_once() -> None:
    hooks, ends = _sdk.Hooks(), list[bool]()
    hooks.on_end = lambda: ends.append(True)
    sending, receiving = anyio.create_memory_object_stream[Any](1)
    async with sending:
        with pytest.raises(ZeroDivisionError):
            async with _sdk._Watched(receiving, hooks):
                raise ZeroDivisionError
        assert ends == [True]


async def test_a_flood_of_progress_and_a_slow_listener(faulty: FaultyServers) -> None:
    """What the listener cannot take in time is dropped, and the call does not wait for it."""
    params = {"progressToken": "TOKEN", "progress": 1}
    flood = [MANY, {"method": "notifications/progress", "params": params}]
    heard: list[AgentEvent] = []

    async def listen(event: AgentEvent) -> None:
        heard.append(event)
        if isinstance(event, ToolExecutionUpdate):
            await asyncio.sleep(0.01)

    async with McpTools(faulty({"tools/call": {"flood": flood}})) as tools:
        agent = Agent(
            ScriptedStream([call("faulty_echo", text="x"), "done"]),
            tool_source=tools,
            event_sink=listen,
        )
        async with asyncio.timeout(SAFETY_NET):
            result = await agent.run("go")
    check(result, heard)
    assert text_of(result.messages[2]) == "echo: x"
    assert 0 < sum(isinstance(event, ToolExecutionUpdate) for event in heard) < MANY / 10


async def test_floods_while_nobody_calls(faulty: FaultyServers) -> None:
    log = {"method": "notifications/message", "params": {"level": "info", "data": "x" * 500}}
    async with McpTools(faulty({"notifications/initialized": {"flood": [MANY, log]}})) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
    assert driven.texts == ["echo: x"]


async def test_a_flood_of_questions(faulty: FaultyServers) -> None:
    """Without a person, each is declined; the call goes on."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    question = {"id": "q", "method": "elicitation/create",
                "params": {"message": "Password?", "requestedSchema": schema}}  # fmt: skip
    async with McpTools(faulty({"tools/call": {"flood": [200, question]}})) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
    assert driven.texts == ["echo: x"]


async def test_a_flood_on_stderr(faulty: FaultyServers) -> None:
    """It neither blocks the server nor fills the memory; its last lines are in the error."""
    actions = {"start": {"stderr": 2_000_000}, "tools/call": {"stderr": 20_000_000, "die": 9}}
    async with McpTools(faulty(actions)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
    failed(driven, "mcp_connection_lost")
    assert len(text_of(driven.answers[0])) < 20_000


async def test_a_result_of_ten_megabytes(faulty: FaultyServers) -> None:
    """Over stdio, the time that the SDK takes grows with the square of the size of a line."""
    actions = {"tools/call": {"size": 10_000_000}}
    async with McpTools(faulty(actions, max_result_bytes=10_000)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
    [answer] = driven.answers
    assert len(text_of(answer)) < 11_000
    assert text_of(answer).count("y") > 8_000 or answer.is_error


async def test_a_binary_result_that_is_too_large(faulty: FaultyServers) -> None:
    actions = {"tools/call": {"image": 300_000}}
    async with McpTools(faulty(actions, max_result_bytes=10_000)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"))
    assert "300,000" in driven.texts[0]
    assert len(str(driven.answers[0])) < 11_000


async def test_a_hundred_runs_on_one_server(faulty: FaultyServers) -> None:
    """It answers the last call first. Every run gets its own answer, over one connection."""
    async with McpTools(faulty({"tools/call": {"hold": 100}})) as tools:

        async def one(number: int) -> str:
            sink = RecordingSink()
            stream = ScriptedStream([call("faulty_echo", text=f"run {number}"), "done"])
            agent = Agent(stream, tool_source=tools, event_sink=sink)
            result = await agent.run("go", identity=RunIdentity.root(f"r{number}"))
            check(result, sink.events)
            return text_of(result.messages[2])

        async with asyncio.timeout(SAFETY_NET):
            texts = await asyncio.gather(*[one(number) for number in range(100)])
    assert texts == [f"echo: run {number}" for number in range(100)]
    assert len(faulty.starts) == 1


async def test_a_hundred_runs_whose_server_dies(faulty: FaultyServers) -> None:
    """All of them end, and it is started once more, not a hundred times."""
    actions = {"first": {"tools/call": {"wait": 0.3, "die": 1}}}
    async with McpTools(faulty(actions)) as tools:
        steps = [call("faulty_echo", text="x"), call("faulty_echo", text="y")]
        runs = [drive(tools, *steps, run_id=f"r{number}") for number in range(100)]
        driven = await asyncio.gather(*runs)
    assert {run.texts[1] for run in driven} == {"echo: y"}
    kinds = {run.answers[0].details["kind"] for run in driven}
    assert kinds <= {"mcp", "mcp_connection_lost"}
    assert len(faulty.starts) == 2


async def test_calls_leave_nothing_behind(faulty: FaultyServers) -> None:
    """The memory after many calls is what it was after a few."""
    async with McpTools(faulty()) as tools:
        for _ in range(50):
            await tools.call("faulty", "echo", {"text": "x" * 10_000})
        tracemalloc.start()
        try:
            for _ in range(100):
                await tools.call("faulty", "echo", {"text": "x" * 10_000})
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept < 500_000  # of two million bytes of texts


async def test_a_list_that_changes_in_a_run(faulty: FaultyServers) -> None:
    """The server lists a new tool first. It is offered last: the tools before it stay cached."""
    store = MemoryStore()
    async with McpTools(faulty({"tools/call": {"grow": True}})) as tools:
        steps = [call("faulty_echo", text=str(n)) for n in range(3)]
        driven = await drive(tools, *steps, run_log=RunLog(store))
    assert driven.offered[0] == ["faulty_echo"]
    assert driven.offered[-1] == ["faulty_echo", "faulty_echo1", "faulty_echo2", "faulty_echo3"]
    for earlier, later in pairwise(driven.offered):
        assert later[: len(earlier)] == earlier
    changes = [request.change for request in check_prefix(store, "r").changes]
    assert [(change.part, change.at) for change in changes if change is not None] == [
        ("tools", 1), ("tools", 2), ("tools", 3),
    ]  # fmt: skip


async def test_a_list_that_fails_after_it_has_changed(faulty: FaultyServers) -> None:
    """The tools stay what they were."""
    changed = {"flood": [1, {"method": "notifications/tools/list_changed"}]}
    actions = {"tools/call": {**changed}, "tools/list": {"hold": 1}}
    async with McpTools(faulty(actions)) as tools:
        driven = await drive(tools, call("faulty_echo", text="x"), call("faulty_echo", text="y"))
    assert driven.texts == ["echo: x", "echo: y"]
    assert driven.offered == [["faulty_echo"]] * 3


# --- our own end ------------------------------------------------------------------------------


def test_without_a_context_manager_nothing_is_left(faulty: FaultyServers) -> None:
    """Each call of `run_sync` has an event loop of its own, and the server ends with it."""
    tools = McpTools(faulty())
    for text in ("x", "y"):
        stream = ScriptedStream([call("faulty_echo", text=text), "done"])
        result = Agent(stream, tool_source=tools).run_sync("go")
        assert text_of(result.messages[2]) == f"echo: {text}"
        assert faulty.running() == []


async def test_a_run_that_is_cancelled_while_it_connects(faulty: FaultyServers) -> None:
    tools = McpTools(faulty({"initialize": {"silent": True}}))
    agent, token = Agent(ScriptedStream(["done"]), tool_source=tools), CancellationToken()
    running = asyncio.create_task(agent.run("go", signal=token))
    await eventually(lambda: faulty.received("initialize"))
    token.cancel("enough")
    async with asyncio.timeout(SAFETY_NET):
        with pytest.raises(RunAborted):
            await running
        await tools.aclose()


KILLED = """
import asyncio, sys
from clark_agent.mcp import McpServer, McpTools

async def main():
    async with McpTools(McpServer("faulty", command=sys.argv[1], args=sys.argv[2:])):
        print("connected", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_our_process_is_killed(faulty: FaultyServers, number: signal.Signals) -> None:
    """Its servers read the end of their input, and leave."""
    server = faulty()
    assert server.command is not None
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED, server.command, *server.args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    async with asyncio.timeout(SAFETY_NET):
        assert await process.stdout.readline() == b"connected\n"
        process.send_signal(number)
        await process.wait()
    await eventually(lambda: faulty.running() == [])


# --- HTTP -------------------------------------------------------------------------------------


def at(server: FaultyHttp, **settings: Any) -> McpServer:
    headers = {"Authorization": f"Bearer {SECRET}"}
    return McpServer(
        "web", url=server.url, headers=headers, **{"connect_timeout": 10.0, **settings}
    )


HTML = Answer(200, b"<html><h1>It works!</h1></html>", {"Content-Type": "text/html"})
REFUSED = {"401": {"mcp_unauthorized"}, "403": {"mcp_unauthorized"}}
REFUSALS = {
    "401": Answer(401, b'{"error": "invalid_token"}', {"WWW-Authenticate": "Bearer"}),
    "403": Answer(403, b"forbidden"),
    "404": Answer(404, b"not found"),
    "405": Answer(405),
    "429": Answer(429, b"slow down", {"Retry-After": "3600"}),
    "500": Answer(500, b"oops"),
    "503": Answer(503),
    "html": HTML,
    "empty": Answer(200, b"", {"Content-Type": "application/json"}),
    "not JSON": Answer(200, b"{{{", {"Content-Type": "application/json"}),
    "accepted": Answer(202),
    "events without an answer": sse_answer(b": hello\n\n"),
    "events that are no JSON": sse_answer(b"event: message\ndata: {{{\n\n"),
    "cut": Answer(200, b'{"jsonrpc": ', {"Content-Type": "application/json"}, cut=1000),
    "elsewhere": Answer(302, b"", {"Location": "http://127.0.0.2:9/mcp"}),
    "in a circle": Answer(307, b"", {"Location": "/mcp"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_answers_of_http_when_it_connects(http: FaultyHttp, refusal: str) -> None:
    http.answers["*"] = REFUSALS[refusal]
    error = await entered(at(http))
    assert error is not None
    assert "web" in str(error)
    assert SECRET not in str(error)
    assert SECRET not in repr(error.__cause__)
    if refusal.isdecimal():
        assert refusal in str(error), error
    async with McpTools(at(http, required=False)) as tools:
        await drive(tools)


@pytest.mark.slow
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_answers_of_http_in_a_call(
    http: FaultyHttp, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The call fails and says why; the next one works again."""
    caplog.set_level("DEBUG")
    async with McpTools(at(http, timeout=10)) as tools:
        await tools.tools()
        http.answers["tools/call"] = REFUSALS[refusal]
        driven = await drive(tools, call("web_echo", text="x"))
        del http.answers["tools/call"]
        again = await drive(tools, call("web_echo", text="y"))
    [answer] = driven.answers
    assert answer.is_error
    kinds = {"mcp_protocol_error", "mcp_connection_lost"}
    assert answer.details["kind"] in REFUSED.get(refusal, kinds), answer
    assert "web" in text_of(answer)
    assert SECRET not in text_of(answer)
    assert SECRET not in caplog.text
    if refusal in {"401", "403", "500", "503"}:
        assert refusal in text_of(answer)
    assert again.texts == ["echo: y"]


@pytest.mark.slow
@pytest.mark.parametrize("refusal", ["html", "not JSON", "events that are no JSON"])
async def test_what_the_sdk_logs_about_http_is_left_out(
    http: FaultyHttp, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with McpTools(at(http)) as tools:
        http.answers["tools/call"] = REFUSALS[refusal]
        driven = await drive(tools, call("web_echo", text="x"))
    failed(driven, "mcp_protocol_error")
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.slow
async def test_a_list_that_hangs_after_it_has_changed(
    http: FaultyHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn waits a moment, the next ones do not; the tools stay until the list comes."""
    monkeypatch.setattr("clark_agent.mcp.connection._LIST_SECONDS", 0.05)
    changed = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}

    def answer(message: dict[str, Any]) -> Answer:
        proper = http.proper(message)
        event = json.dumps(changed).encode()
        return sse_answer(b"data: " + event + b"\n\n", b"data: " + proper.body + b"\n\n")

    http.answers["tools/call"] = answer
    async with McpTools(at(http, timeout=1_000)) as tools:
        http.answers["tools/list"] = Answer(200, hang=True)
        driven = await drive(tools, *[call("web_echo", text=str(n)) for n in range(3)])
        assert driven.offered == [["web_echo"]] * 4
        assert http.methods().count("tools/list") == 2
        assert "takes long" in str(tools.problems)
        http.released.set()
        await eventually(lambda: "does not list them" in str(tools.problems))
        assert len(await tools.tools()) == 1
        del http.answers["tools/list"]
        async with asyncio.timeout(SAFETY_NET):
            while tools.problems:
                await tools.tools()
                await asyncio.sleep(0.02)
    assert len(http.sessions) == 1


@pytest.mark.slow
async def test_nobody_listens() -> None:
    with FaultyHttp() as server:
        url = server.url
    error = await entered(McpServer("web", url=url))
    assert error is not None
    assert "web" in str(error)


@pytest.mark.slow
async def test_http_that_hangs(http: FaultyHttp) -> None:
    async with McpTools(at(http, timeout=1.5)) as tools:
        http.answers["tools/call"] = Answer(200, hang=True)
        driven = await drive(tools, call("web_echo", text="x"))
        del http.answers["tools/call"]
        again = await drive(tools, call("web_echo", text="y"))
        http.released.set()
    failed(driven, "mcp_timeout", "1.5")
    assert again.texts == ["echo: y"]


@pytest.mark.slow
async def test_http_that_hangs_when_it_connects(http: FaultyHttp) -> None:
    http.answers["*"] = Answer(200, hang=True)
    error = await entered(at(http, connect_timeout=0.5))
    http.released.set()
    assert error is not None
    assert "web" in str(error)


@pytest.mark.slow
async def test_a_redirect_to_another_origin_gets_no_secrets(http: FaultyHttp) -> None:
    with FaultyHttp() as other:
        http.answers["*"] = Answer(307, b"", {"Location": other.url})
        error = await entered(at(http))
        assert error is not None
        secrets = [request for request in other.requests if SECRET in str(request.headers)]
        assert secrets == []


@pytest.mark.slow
async def test_a_redirect_on_the_same_origin(http: FaultyHttp) -> None:
    """It is followed with the same method and body."""
    server = McpServer("web", url=f"{http.origin}/old")

    def moved(message: dict[str, Any]) -> Answer:
        if http.requests[-1].path == "/old":
            return Answer(307, b"", {"Location": "/mcp"})
        return http.proper(message)

    http.answers.update(
        {"server/discover": moved, "initialize": moved, "tools/list": moved, "tools/call": moved}
    )
    async with McpTools(server) as tools:
        driven = await drive(tools, call("web_echo", text="x"))
    assert driven.texts == ["echo: x"]


@pytest.mark.slow
async def test_a_session_that_the_server_has_lost(http: FaultyHttp) -> None:
    """A call in a lost session says so or is sent in a new one; the next call works."""
    async with McpTools(at(http)) as tools:
        first = await drive(tools, call("web_echo", text="x"))
        http.forget()
        second = await drive(tools, call("web_echo", text="y"), call("web_echo", text="z"))
    assert first.texts == ["echo: x"]
    lost, after = second.answers
    if lost.is_error:
        assert lost.details["kind"] in {"mcp_connection_lost", "mcp_protocol_error"}
        assert "session" in text_of(lost).lower()
    assert text_of(after) == "echo: z"
    assert len(http.sessions) == 2


DROPS = {
    "drop": Answer(0, drop=True),
    "cut": REFUSALS["cut"],
    "cut in events": Answer(200, b": hello\n\n", {"Content-Type": "text/event-stream"}, cut=1000),
    "cut in an error": Answer(500, b"{", {"Content-Type": "application/json"}, cut=1000),
}


@pytest.mark.slow
@pytest.mark.parametrize("drop", DROPS)
async def test_a_connection_that_drops_fails_one_call(http: FaultyHttp, drop: str) -> None:
    """The others go on, in the same session."""
    may_answer = threading.Event()

    def answer(message: dict[str, Any]) -> Answer:
        if message["params"]["arguments"]["text"] == "drop":
            return DROPS[drop]
        assert may_answer.wait(SAFETY_NET)
        return http.proper(message)

    http.answers["tools/call"] = answer
    async with McpTools(at(http)) as tools:
        slow = asyncio.create_task(drive(tools, call("web_echo", text="slow")))
        await eventually(lambda: "tools/call" in http.methods())
        dropped = await drive(tools, call("web_echo", text="drop"))
        may_answer.set()
        assert (await slow).texts == ["echo: slow"]
        after = await drive(tools, call("web_echo", text="after"))
    failed(dropped, "mcp_connection_lost", "may or may not")
    assert after.texts == ["echo: after"]
    assert len(http.sessions) == 1


SPACES = b" " * 200_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(200, gzip.compress(SPACES), {"Content-Encoding": "gzip"}), "compressed (gzip)"),
        (Answer(500, gzip.compress(SPACES), {"Content-Encoding": "gzip"}), "compressed (gzip)"),
        (Answer(200, SPACES), "more than 100,000 bytes"),
        (Answer(500, SPACES), "more than 100,000 bytes"),
        (Answer(302, SPACES, {"Location": "/mcp"}), "more than 100,000 bytes"),
    ],
    ids=["compressed", "a compressed error", "long", "a long error", "a long redirect"],
)
async def test_a_body_that_is_too_large(
    http: FaultyHttp, answer: Answer, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not read, and only its call fails."""
    monkeypatch.setattr("clark_agent.mcp._sdk._LARGEST_EVENT", 100_000)
    headers = {"Content-Type": "application/json", **answer.headers}
    async with McpTools(at(http, max_result_bytes=1_000)) as tools:
        http.answers["tools/call"] = answer._replace(headers=headers)
        driven = await drive(tools, call("web_echo", text="x"))
        del http.answers["tools/call"]
        again = await drive(tools, call("web_echo", text="y"))
    failed(driven, "mcp_protocol_error", said, "may or may not")
    assert again.texts == ["echo: y"]
    assert len(http.sessions) == 1
    assert {request.headers["accept-encoding"] for request in http.requests} == {"identity"}


@pytest.mark.slow
async def test_an_event_that_is_too_large(
    http: FaultyHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clark_agent.mcp._sdk._LARGEST_EVENT", 100_000)
    async with McpTools(at(http, max_result_bytes=1_000)) as tools:
        http.answers["tools/call"] = sse_answer(b"data: " + SPACES + b"\n\n")
        driven = await drive(tools, call("web_echo", text="x"))
    failed(driven, "mcp_protocol_error", "100000 byte", "may or may not")


@pytest.mark.slow
async def test_http_that_is_away_for_a_while() -> None:
    with FaultyHttp() as server:
        port = server.origin.rpartition(":")[2]
        async with McpTools(McpServer("web", url=server.url, connect_timeout=1.0)) as tools:
            await drive(tools, call("web_echo", text="x"))
            server.stop()
            away = await drive(tools, call("web_echo", text="y"))
            with FaultyHttp(port=int(port)):
                back = await drive(tools, call("web_echo", text="z"))
    failed(away, "mcp_unavailable", "not made")
    assert back.texts == ["echo: z"]


@pytest.mark.slow
async def test_headers_are_those_of_the_caller(http: FaultyHttp) -> None:
    server = McpServer(
        "web",
        url=http.url,
        headers=lambda ctx: {"X-Run": ctx.identity.run_id},
        share=lambda ctx: ctx.identity.run_id,
    )
    async with McpTools(server) as tools:
        await asyncio.gather(
            *[drive(tools, call("web_echo", text=run), run_id=run) for run in ("one", "two")]
        )
    calls = [r for r in http.requests if r.message.get("method") == "tools/call"]
    assert {r.headers["x-run"]: r.message["params"]["arguments"]["text"] for r in calls} == {
        "one": "one",
        "two": "two",
    }


@pytest.mark.slow
async def test_a_result_of_fifty_megabytes_over_http(http: FaultyHttp) -> None:
    def large(message: dict[str, Any]) -> Answer:
        content = [{"type": "text", "text": "y" * 50_000_000}]
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {"content": content}})
        if message["params"]["arguments"]["text"] == "events":
            return sse_answer(b"event: message\ndata: " + body.encode() + b"\n\n")
        return Answer(200, body.encode(), {"Content-Type": "application/json"})

    http.answers["tools/call"] = large
    async with McpTools(at(http, max_result_bytes=10_000)) as tools:
        driven = await drive(tools, call("web_echo", text="json"), call("web_echo", text="events"))
    for answer in driven.answers:
        assert len(text_of(answer)) < 11_000
        assert not answer.is_error
