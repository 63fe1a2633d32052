"""CubeLoop: `Agent.prompt` with a subscriber, and a provider of one's own.

An agent holds its conversation, so each run has one of its own. Every delta carries the message so
far, as its providers do it. `CompactionMiddleware` prunes and sums up the history.
"""

import asyncio
import json

from cubeloop import Agent, tool
from cubeloop.middleware import CompactionMiddleware
from cubeloop.providers.base import (
    AssistantMessage,
    BaseProvider,
    MessageStream,
    StreamEvent,
    TextContent,
    ToolCall,
    ToolResultMessage,
    UserMessage,
)

from benchmarks.work import ARGUMENTS, DELTA, MODEL_NAP, SHORT_RUN, TOOL_NAP, old_result, seen


def listen(_event, _signal=None):
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


def said(text):
    return AssistantMessage(content=[TextContent(text=text)])


def called(call_id, name):
    return ToolCall(id=call_id, name=name, arguments=json.loads(ARGUMENTS))


class Answer(MessageStream):
    """Makes its events as they are asked for: a queue would hold all of them at once."""

    def __init__(self, script):
        super().__init__()
        self.script = script

    async def __aiter__(self):
        yield StreamEvent(type="start", partial=AssistantMessage(content=[]))
        for item in self.script:
            if isinstance(item, StreamEvent):
                yield item
            else:
                self.set_result(item)
        yield StreamEvent(type="done")


class Scripted(BaseProvider):
    def __init__(self, script, nap=0):
        super().__init__(provider_id="scripted")
        self.script, self.nap = script, nap

    async def stream(self, model, messages, **_):
        if self.nap:
            await asyncio.sleep(self.nap)
        return Answer(self.script(messages))


def say(deltas):
    text = ""
    for delta in deltas:
        text += delta
        partial = said(text)
        yield StreamEvent(type="text_delta", content_index=0, delta=delta, partial=partial)
    yield said(text)


def calling(turns, name="echo", calls=1, nap=0, turn_of=lambda messages: len(messages) // 2):
    def script(messages):
        turn = turn_of(messages)
        if turn < turns:
            blocks = [called(f"c{turn}-{i}", name) for i in range(calls)]
            return [AssistantMessage(content=blocks, stop_reason="tool_use")]
        return say(["done"])

    return Scripted(script, nap)


async def run(provider, tools=(echo,), listeners=1, **options):
    agent = Agent(model=provider.model("scripted"), tools=list(tools), **options)
    if listeners:
        agent.subscribe(listen)
    await agent.prompt("go")
    return agent.state.messages[-1].content[0].text


async def turns(count):
    return await run(calling(count))


async def stream(count, listeners):
    provider = Scripted(lambda _messages: say([DELTA] * count))
    return await run(provider, (), listeners)


async def batch(count):
    script = calling(1, "rest", count, turn_of=lambda messages: int(len(messages) > 1))
    return await run(script, [rest])


SHORT = calling(SHORT_RUN, nap=MODEL_NAP)


async def short_run():
    return await run(SHORT)


def history(size):
    messages = []
    for n in range(size // 4):
        looks = [TextContent(text="I look."), called(f"old{n}", "echo")]
        result = [TextContent(text=old_result(n))]
        messages += [
            UserMessage(content=[TextContent(text=f"question {n}")]),
            AssistantMessage(content=looks, stop_reason="tool_use"),
            ToolResultMessage(tool_call_id=f"old{n}", tool_name="echo", content=result),
            said("Here it is."),
        ]
    return messages


async def append(turns, past):
    summary = Scripted(lambda _messages: say(["There were questions."]))
    compaction = CompactionMiddleware(
        summary_model=summary.model("scripted"), max_tokens_before_compact=100_000
    )
    script = calling(turns, turn_of=seen.numbering())
    return await run(script, middleware=[compaction], messages=past)
