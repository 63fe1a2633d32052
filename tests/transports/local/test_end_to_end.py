"""The packaged model, for real: a loop, tools, an answer; stopping it, filling it."""

from __future__ import annotations

import asyncio
import threading
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from clark_agent import (
    AgentContext,
    AgentTool,
    AssistantMessage,
    CancellationToken,
    LoopConfig,
    RunResult,
    ToolResultMessage,
    UserMessage,
    run,
    tool,
)
from clark_agent.output import Output
from clark_agent.stream import Chunk, Error, StreamErrorKind, StreamRequest
from clark_agent.transports import LocalModel, connect

pytestmark = pytest.mark.slow

FILES = {"price.txt": "The price is 14 dollars.", "stock.txt": "There are 30 chairs."}


@tool
def read_file(path: str) -> str:
    """Read a text file."""
    return FILES.get(path, f"there is no {path}")


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


@tool
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"17 degrees in {city}"


TOOLS: list[AgentTool] = [read_file, calculator, weather]


@pytest.fixture
def model(local_model: LocalModel) -> LocalModel:
    """As a user connects to it; the weights are in memory already."""
    made = connect("local:")
    assert isinstance(made, LocalModel)
    return made


async def asked(question: str, model: LocalModel) -> RunResult:
    return await run(question, AgentContext(), LoopConfig(stream=model, tools=TOOLS))


def calls(result: RunResult) -> list[tuple[str, Any]]:
    asked = [m for m in result.messages if isinstance(m, AssistantMessage)]
    return [(call.name, call.arguments) for message in asked for call in message.tool_calls]


def results(result: RunResult) -> list[str]:
    found = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    return [message.plain_text for message in found]


async def test_it_calls_a_tool_and_tells_what_the_tool_said(model: LocalModel) -> None:
    result = await asked("What's the weather like in Oslo?", model)
    assert calls(result) == [("weather", {"city": "Oslo"})]
    assert results(result) == ["17 degrees in Oslo"]
    assert "17 degrees in Oslo" in result.text


async def test_a_turn_counts_the_prompt_of_its_answer_once(model: LocalModel) -> None:
    """However many steps the guide takes to find it."""
    result = await asked("What's the weather like in Oslo?", model)
    for message in result.messages:
        if isinstance(message, AssistantMessage):
            assert message.usage is not None
            read = message.usage.input_tokens + message.usage.cache_read_input_tokens
            assert 100 < read < 1_000
            assert 0 < message.usage.output_tokens < 100


async def test_it_takes_what_one_tool_says_to_the_next(model: LocalModel) -> None:
    result = await asked("Read price.txt and multiply the number in it by 3.", model)
    assert [name for name, _ in calls(result)] == ["read_file", "calculator"]
    assert results(result) == ["The price is 14 dollars.", "42"]
    assert "42" in result.text


async def test_it_uses_a_tool_and_answers_in_the_form_that_is_wanted(model: LocalModel) -> None:
    class Report(msgspec.Struct):
        weather: Literal["warm", "cold"]
        degrees: Annotated[int, Meta(ge=0, le=40)]

    config = LoopConfig(stream=model, tools=TOOLS, output=Output(Report, retries=0))
    result = await run("What's the weather like in Oslo?", AgentContext(), config)
    assert results(result) == ["17 degrees in Oslo"]
    assert isinstance(result.output, Report)


async def test_cancelled_in_the_middle_it_ends_and_answers_again(model: LocalModel) -> None:
    signal = CancellationToken()
    request = StreamRequest(
        system_prompt="", messages=(UserMessage("Tell me about the sea."),), max_output_tokens=2000
    )
    events = []
    async for event in model(request, signal):
        events.append(event)
        if isinstance(event, Chunk):
            signal.cancel("enough")
    assert isinstance(events[-1], Error)
    assert events[-1].kind is StreamErrorKind.ABORTED
    for thread in threading.enumerate():
        if thread.name == "clark-agent local model":
            await asyncio.to_thread(thread.join)  # it ends by itself, at the next token
    assert results(await asked("What's the weather like in Rome?", model)) == ["17 degrees in Rome"]


async def test_what_does_not_fit_is_an_overflow(model: LocalModel) -> None:
    request = StreamRequest(system_prompt="", messages=(UserMessage("word " * 9000),))
    events = [event async for event in model(request, CancellationToken())]
    assert isinstance(events[-1], Error)
    assert events[-1].kind is StreamErrorKind.CONTEXT_OVERFLOW
