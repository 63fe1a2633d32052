"""LangChain on LangGraph: `create_agent`, streamed by `astream`, with a chat model of one's own.

The stream has tokens (`messages`) and, for the last answer, steps (`updates`). It must be consumed;
where nobody listens that is done without a look. `ContextEditingMiddleware` trims the history.
"""

import asyncio
import json
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.messages.tool import tool_call, tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk

from benchmarks.work import ARGUMENTS, DELTA, MODEL_NAP, SHORT_RUN, TOOL_NAP, old_result, seen


async def echo(x: int, s: str) -> str:
    """Say it again."""
    seen.tools += 1
    return "ok: " + s


async def rest(x: int, s: str) -> str:
    """Rest a little."""
    await asyncio.sleep(TOOL_NAP)
    return await echo(x, s)


class Scripted(BaseChatModel):
    script: Any
    _llm_type = "scripted"

    def bind_tools(self, *_, **__):
        return self

    def _generate(self, *_, **__):
        raise NotImplementedError

    async def _astream(self, messages, *_, **__):
        async for chunk in self.script(messages):
            yield ChatGenerationChunk(message=chunk)


def agent(turns, tool=echo, calls=1, nap=0, turn_of=lambda messages: len(messages) // 2, **options):
    async def script(messages):
        if nap:
            await asyncio.sleep(nap)
        turn = turn_of(messages)
        if turn < turns:
            chunks = [
                tool_call_chunk(name=tool.__name__, args=ARGUMENTS, id=f"c{turn}-{i}", index=i)
                for i in range(calls)
            ]
            yield AIMessageChunk(content="", tool_call_chunks=chunks)
        else:
            yield AIMessageChunk(content="done")

    return create_agent(Scripted(script=script), [tool], **options)


async def run(agent, listeners=1, past=()):
    items = agent.astream(
        {"messages": [*past, HumanMessage("go")]},
        {"recursion_limit": 10**9},
        stream_mode=["messages", "updates"],
    )
    last = None
    if listeners:
        async for item in items:
            last = item
            seen.events += 1
    else:
        async for item in items:
            last = item
    return last[1]["model"]["messages"][-1].content


async def turns(count):
    return await run(agent(count))


async def stream(count, listeners):
    async def script(_messages):
        for _ in range(count):
            yield AIMessageChunk(content=DELTA)

    return await run(create_agent(Scripted(script=script)), listeners)


async def batch(count):
    return await run(agent(1, rest, count, turn_of=lambda messages: int(len(messages) > 1)))


SHORT = agent(SHORT_RUN, nap=MODEL_NAP)


async def short_run():
    return await run(SHORT)


def history(size):
    messages = []
    for n in range(size // 4):
        call = tool_call(name="echo", args=json.loads(ARGUMENTS), id=f"old{n}")
        messages += [
            HumanMessage(f"question {n}"),
            AIMessage("I look.", tool_calls=[call]),
            ToolMessage(old_result(n), tool_call_id=f"old{n}"),
            AIMessage("Here it is."),
        ]
    return messages


async def append(turns, past):
    editing = ContextEditingMiddleware(edits=[ClearToolUsesEdit()])
    return await run(agent(turns, turn_of=seen.numbering(), middleware=[editing]), past=past)
