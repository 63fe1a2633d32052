"""A provider that says that calls and results do not match is asked once more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clark_agent import (
    AgentContext,
    AssistantMessage,
    LoopConfig,
    StopReason,
    StreamError,
    StreamErrorKind,
    ToolCall,
    UserMessage,
    run,
)
from clark_agent.testing.misbehaviours import End, Finish, Say
from tests.transports import wires_anthropic, wires_chat, wires_gemini, wires_responses
from tests.transports.servers.bytes_server import Answer, ByteServer
from tests.transports.wires_chat import stream

pytestmark = pytest.mark.slow

PLAIN = [Say("Hello"), Finish(StopReason.END_TURN), End()]
LEFT_OPEN = AssistantMessage((ToolCall("c1", "look", {}),), StopReason.TOOL_USE)
CONTEXT = AgentContext("", (UserMessage("Look."), LEFT_OPEN))


def refused(body: Any, status: int = 400) -> Answer:
    json_type = {"content-type": "application/json"}
    return Answer(status=status, headers=json_type, body=json.dumps(body).encode())


REFUSALS: dict[str, tuple[Any, Any]] = {
    "chat": (
        wires_chat,
        {
            "error": {
                "message": "An assistant message with 'tool_calls' must be followed by tool "
                "messages responding to each 'tool_call_id'. The following tool_call_ids did "
                "not have response messages: c1",
                "type": "invalid_request_error",
            }
        },
    ),
    "responses": (
        wires_responses,
        {
            "error": {
                "message": "No tool output found for function call c1.",
                "type": "invalid_request_error",
                "param": "input",
            }
        },
    ),
    "anthropic": (
        wires_anthropic,
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "messages.1: `tool_use` ids were found without `tool_result` blocks "
                "immediately after: c1.",
            },
        },
    ),
    "gemini": (
        wires_gemini,
        {
            "error": {
                "code": 400,
                "message": "Please ensure that the number of function response parts is equal to "
                "the number of function call parts of the function call turn.",
                "status": "INVALID_ARGUMENT",
            }
        },
    ),
}
every_wire = pytest.mark.parametrize("name", REFUSALS)


@every_wire
async def test_a_refusal_of_the_history_is_asked_again(name: str) -> None:
    wire, refusal = REFUSALS[name]
    async with ByteServer([refused(refusal), stream(*wire.render(PLAIN))]) as server:
        transport = wire.transport(server.url)
        result = await run("Go on.", CONTEXT, LoopConfig(stream=transport))
        await transport.aclose()
    assert result.text == "Hello"
    first, second = [request.body.decode() for request in server.requests]
    assert "No result of this call was recorded" in first, "the transport mends by itself"
    assert json.loads(first) == json.loads(second)


@every_wire
async def test_a_second_refusal_ends_the_run(name: str) -> None:
    wire, refusal = REFUSALS[name]
    async with ByteServer(lambda _: refused(refusal)) as server:
        transport = wire.transport(server.url)
        with pytest.raises(StreamError) as told:
            await run("Go on.", CONTEXT, LoopConfig(stream=transport))
        await transport.aclose()
    assert told.value.kind is StreamErrorKind.INCONSISTENT_TOOL_HISTORY
    assert [message.plain_text for message in told.value.messages] == ["Go on."]
    assert len(server.requests) == 2
