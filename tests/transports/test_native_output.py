"""Runs with a native output: each provider is asked for the schema, and what comes is checked."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from clark_agent import (
    AgentContext,
    LoopConfig,
    StopReason,
    SystemMessage,
    Usage,
    run,
)
from clark_agent.errors import OutputError
from clark_agent.output import Output, OutputMode
from clark_agent.stream import OutputModeName
from clark_agent.testing import ScriptedStream
from clark_agent.testing.misbehaviours import End, Finish, ReportUsage, Say
from clark_agent.tools.schema import strict_schema
from clark_agent.transports import LocalModel
from tests.transports import wires_anthropic, wires_chat, wires_gemini, wires_responses
from tests.transports.servers.bytes_server import Answer, ByteServer
from tests.transports.servers.llama import LlamaServer

WIRES: tuple[Any, ...] = (wires_chat, wires_responses, wires_anthropic, wires_gemini)

every_wire = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.NAME)


class Verdict(msgspec.Struct):
    decision: Literal["approve", "reject"]
    score: Annotated[int, Meta(ge=0, le=10)]


PROSE = "I approve of it."
HALF = '{"decision": "approve", "sco'
WRONG = '{"decision": "approve", "score": "high"}'
RIGHT = '{"decision": "approve", "score": 9}'
USAGE = Usage(5, 3)


def answers(wire: Any, *texts: str) -> list[Answer]:
    return [Answer(body=wire.render(_steps(text))) for text in texts]


def _steps(text: str) -> list[Any]:
    reason = StopReason.MAX_TOKENS if text is HALF else StopReason.END_TURN
    return [Say(text), Finish(reason), ReportUsage(USAGE), End()]


def schema_in(wire: Any, body: Any) -> Any:
    """The schema, where the provider has it in a request."""
    match wire.NAME:
        case "chat":
            return body["response_format"]["json_schema"]["schema"]
        case "responses":
            return body["text"]["format"]["schema"]
        case "anthropic":
            return body["output_config"]["format"]["schema"]
        case _:
            return body["generationConfig"]["responseJsonSchema"]


def config(stream: Any, **options: Any) -> LoopConfig:
    return LoopConfig(stream=stream, output=Output(Verdict, mode="native", **options))


@pytest.mark.slow
@every_wire
async def test_a_wrong_answer_goes_back_with_the_reason(wire: Any) -> None:
    script = answers(wire, PROSE, HALF, WRONG, RIGHT)
    async with ByteServer(script) as server, aclosing(wire.transport(server.url)) as stream:
        result = await run("Review.", AgentContext(), config(stream, retries=3))
    assert result.output == Verdict("approve", 9)
    reasons = [m.plain_text for m in result.messages if isinstance(m, SystemMessage)]
    assert ["not valid JSON" in reason for reason in reasons] == [True, True, False]
    assert "does not match the schema" in reasons[2]
    assert "score" in reasons[2]
    bodies = [msgspec.json.decode(request.body) for request in server.requests]
    assert len(bodies) == 4
    for body in bodies:
        assert list(schema_in(wire, body)["properties"]) == ["decision", "score"]
    sent = msgspec.json.encode(bodies[-1]).decode()
    for text in (PROSE, HALF, WRONG, *reasons):
        assert msgspec.json.encode(text).decode()[1:-1] in sent


@pytest.mark.slow
@every_wire
async def test_without_attempts_left_the_error_has_all_that_was_said(wire: Any) -> None:
    script = answers(wire, WRONG, PROSE)
    async with ByteServer(script) as server, aclosing(wire.transport(server.url)) as stream:
        with pytest.raises(OutputError) as raised:
            await run("Review.", AgentContext(), config(stream, retries=1))
    error = raised.value
    assert error.attempts == 2
    assert "not valid JSON" in error.reason
    told = [message.plain_text for message in error.messages if message.role == "assistant"]
    assert told == [WRONG, PROSE]
    assert error.usage == USAGE + USAGE


# --- real models --------------------------------------------------------------------------------


async def test_llama_cpp_holds_a_real_model_to_the_schema(llama_server: LlamaServer) -> None:
    async with aclosing(wires_chat.transport(llama_server.root, model=llama_server.model)) as chat:
        settings = LoopConfig(
            stream=chat, output=Output(Verdict, mode="native", retries=0), max_output_tokens=100
        )
        result = await run("Review: 1 + 1 = 2.", AgentContext(), settings)
    assert isinstance(result.output, Verdict)


@pytest.mark.slow
@pytest.mark.parametrize("has_template", [False, True])
async def test_a_model_in_this_process_is_held_to_it_too(
    local_model: LocalModel, taught_model: LocalModel, has_template: bool
) -> None:
    model = taught_model if has_template else local_model
    settings = LoopConfig(
        stream=model,
        output=Output(Verdict, retries=0),
        max_output_tokens=100,
        temperature=0.0,
    )
    assert settings.output_mode is OutputMode.NATIVE
    result = await run("Review: 1 + 1 = 2.", AgentContext(), settings)
    assert isinstance(result.output, Verdict)


# --- which mode ---------------------------------------------------------------------------------


class Native(ScriptedStream):
    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        return "native"


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (Verdict, OutputMode.NATIVE),
        (list[int], OutputMode.NATIVE),
        (dict[str, int], OutputMode.TOOL),
    ],
)
def test_native_is_the_default_only_for_a_schema_that_can_be_ensured(
    kind: Any, mode: OutputMode
) -> None:
    assert LoopConfig(stream=Native([]), output=Output(kind)).output_mode is mode


def test_the_schema_has_the_description_of_the_output_and_not_that_of_a_tool() -> None:
    assert Output(Verdict).schema.description == ""
    assert Output(Verdict, description="A review.").schema.description == "A review."


def test_a_strict_output_is_sent_as_it_is() -> None:
    schema = Output(Verdict, strict=True).schema.schema
    assert strict_schema(schema) == schema
