"""Strands Agents: `Agent.invoke_async` with a `callback_handler`, and a model class of one's own.

An agent holds its conversation, so each run has one of its own. The sliding window, its default, is
left out but for W6: there it is kept to a hundred messages, at every turn.
"""

import asyncio

from strands import Agent, tool
from strands.agent.conversation_manager import (
    NullConversationManager,
    SlidingWindowConversationManager,
)
from strands.models import Model

from benchmarks.work import ARGUMENTS, DELTA, MODEL_NAP, SHORT_RUN, TOOL_NAP, old_result, seen


def listen(**_):
    seen.events += 1


@tool
async def echo(x: int, s: str) -> str:
    """Say it again."""
    seen.tools += 1
    return "ok: " + s


@tool
async def rest(x: int, s: str) -> str:
    """Rest a little."""
    await asyncio.sleep(TOOL_NAP)
    seen.tools += 1
    return "ok: " + s


class Scripted(Model):
    def __init__(self, script):
        self.script = script

    def update_config(self, **_):
        pass

    def get_config(self):
        return {}

    def structured_output(self, *_, **__):
        raise NotImplementedError

    async def stream(self, messages, *_, **__):
        yield {"messageStart": {"role": "assistant"}}
        async for event in self.script(messages):
            yield event


def call(call_id, name):
    tool_use = {"toolUseId": call_id, "name": name}
    yield {"contentBlockStart": {"start": {"toolUse": tool_use}}}
    yield {"contentBlockDelta": {"delta": {"toolUse": {"input": ARGUMENTS}}}}
    yield {"contentBlockStop": {}}


def text(deltas):
    yield {"contentBlockStart": {"start": {}}}
    for delta in deltas:
        yield {"contentBlockDelta": {"delta": {"text": delta}}}
    yield {"contentBlockStop": {}}
    yield {"messageStop": {"stopReason": "end_turn"}}


def calling(turns, name="echo", calls=1, nap=0, turn_of=lambda messages: len(messages) // 2):
    async def script(messages):
        if nap:
            await asyncio.sleep(nap)
        turn = turn_of(messages)
        if turn < turns:
            for i in range(calls):
                for event in call(f"c{turn}-{i}", name):
                    yield event
            yield {"messageStop": {"stopReason": "tool_use"}}
        else:
            for event in text(["done"]):
                yield event

    return Scripted(script)


async def run(model, tools=(echo,), listener=listen, window=None, past=()):
    agent = Agent(
        model,
        messages=list(past),
        tools=list(tools),
        callback_handler=listener,
        conversation_manager=window or NullConversationManager(),
    )
    return (await agent.invoke_async("go")).message["content"][0]["text"]


async def turns(count):
    return await run(calling(count))


async def stream(count, listeners):
    async def script(_messages):
        for event in text(DELTA for _ in range(count)):
            yield event

    return await run(Scripted(script), (), listen if listeners else None)


async def batch(count):
    return await run(calling(1, "rest", count), [rest])


SHORT = calling(SHORT_RUN, nap=MODEL_NAP)


async def short_run():
    return await run(SHORT)


def history(size):
    messages = []
    for n in range(size // 4):
        use = {"toolUseId": f"old{n}", "name": "echo", "input": {"x": 7, "s": "hello"}}
        content = [{"text": old_result(n)}]
        result = {"toolUseId": f"old{n}", "status": "success", "content": content}
        messages += [
            {"role": "user", "content": [{"text": f"question {n}"}]},
            {"role": "assistant", "content": [{"text": "I look."}, {"toolUse": use}]},
            {"role": "user", "content": [{"toolResult": result}]},
            {"role": "assistant", "content": [{"text": "Here it is."}]},
        ]
    return messages


async def append(turns, past):
    window = SlidingWindowConversationManager(window_size=100, per_turn=True)
    return await run(calling(turns, turn_of=seen.numbering()), window=window, past=past)
