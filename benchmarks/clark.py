"""clark-agent, as its guide says: one `LoopConfig`, a `@tool`, a plain function that listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from benchmarks.work import (
    ARGUMENTS,
    DELTA,
    MODEL_NAP,
    SHORT_RUN,
    TOOL_NAP,
    count_event,
    old_result,
    seen,
)
from clark_agent import (
    Agent,
    AgentContext,
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    LoopConfig,
    Plugin,
    StopReason,
    StreamEvent,
    StreamFn,
    StreamRequest,
    ToolCall,
    ToolResultMessage,
    UserMessage,
    run,
    tool,
)
from clark_agent.plugins import TokenBudget, ToolResultBudget
from clark_agent.stream import Chunk, Done, Start, TextChunk
from clark_agent.types import TextContent

EMPTY = AssistantMessage((), StopReason.OTHER)


@tool
async def echo(x: int, s: str) -> str:
    """Say it again."""
    seen.tools += 1
    return "ok: " + s


def one_call(number: int, name: str = "echo") -> ToolCall:
    return ToolCall(f"c{number}", name, msgspec.json.decode(ARGUMENTS))


def calling(turns: int, nap: float | None = None) -> StreamFn:
    """A model that calls the tool so many times, once a turn, and then says that it is done."""

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        if nap is not None:
            await asyncio.sleep(nap)
        turn = (len(request.messages) - 1) // 2
        yield Start(EMPTY)
        if turn < turns:
            yield Done(AssistantMessage((one_call(turn),), StopReason.TOOL_USE))
        else:
            yield Chunk(TextChunk("done"))
            yield Done(AssistantMessage((TextContent("done"),), StopReason.END_TURN))

    return model


async def turns(count: int) -> str:
    config = LoopConfig(stream=calling(count), tools=[echo], event_sink=count_event)
    return (await run("go", AgentContext(), config)).text


async def agent_turns(count: int) -> str:
    agent = Agent(calling(count), tools=[echo], event_sink=count_event, max_iterations=None)
    return (await agent.run("go")).output


async def stream(count: int, listeners: int) -> str:
    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(EMPTY)
        parts = []
        for _ in range(count):
            parts.append(DELTA)
            yield Chunk(TextChunk(DELTA))
        yield Done(AssistantMessage((TextContent("".join(parts)),), StopReason.END_TURN))

    config = LoopConfig(stream=model, event_sink=count_event if listeners else None)
    return (await run("go", AgentContext(), config)).text


async def batch(count: int, nap: float = TOOL_NAP) -> str:
    @tool
    async def rest(x: int, s: str) -> str:
        """Rest a little."""
        await asyncio.sleep(nap)
        seen.tools += 1
        return "ok: " + s

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(EMPTY)
        if len(request.messages) == 1:
            calls = tuple([one_call(i, "rest") for i in range(count)])
            yield Done(AssistantMessage(calls, StopReason.TOOL_USE))
        else:
            yield Chunk(TextChunk("done"))
            yield Done(AssistantMessage((TextContent("done"),), StopReason.END_TURN))

    config = LoopConfig(stream=model, tools=[rest], event_sink=count_event)
    return (await run("go", AgentContext(), config)).text


SHORT = {
    nap: LoopConfig(stream=calling(SHORT_RUN, nap), tools=[echo], event_sink=count_event)
    for nap in (0, MODEL_NAP)
}
"""One config serves any number of runs."""


async def short_run(nap: float = MODEL_NAP) -> str:
    return (await run("go", AgentContext(), SHORT[nap])).text


def history(size: int, result: str | None = None) -> tuple[AgentMessage, ...]:
    messages: list[AgentMessage] = []
    for n in range(size // 4):
        call = ToolCall(f"old{n}", "echo", msgspec.json.decode(ARGUMENTS))
        messages += [
            UserMessage(f"question {n}", n),
            AssistantMessage((TextContent("I look."), call), StopReason.TOOL_USE, None, n),
            ToolResultMessage(
                call.id, "echo", (TextContent(result or old_result(n)),), timestamp=n
            ),
            AssistantMessage((TextContent("Here it is."),), StopReason.END_TURN, None, n),
        ]
    return tuple(messages)


async def append(count: int, past: Any) -> str:
    """Turns behind a long history, with budgets that have to trim and to clip it."""

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        turn = (len(request.messages) - 1 - len(past)) // 2
        seen.turn(turn)
        yield Start(EMPTY)
        if turn < count:
            yield Done(AssistantMessage((one_call(turn),), StopReason.TOOL_USE))
        else:
            yield Chunk(TextChunk("done"))
            yield Done(AssistantMessage((TextContent("done"),), StopReason.END_TURN))

    budgets: list[Plugin] = [ToolResultBudget(1_000), TokenBudget(60 * len(past), drop_turns=False)]
    config = LoopConfig(stream=model, tools=[echo], plugins=budgets, event_sink=count_event)
    return (await run("go", AgentContext("", past), config)).text
