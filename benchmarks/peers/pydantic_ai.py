"""Pydantic AI: `Agent.run` with an `event_stream_handler`, and a model class of one's own.

The class is faster than the `FunctionModel` for tests, which guesses tokens. Without a handler
whole answers would be asked for; so where nobody listens the handler consumes the events without a
look. A history processor keeps the newest messages, as the documentation shows.
"""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import Model, StreamedResponse

from benchmarks.work import ARGUMENTS, DELTA, MODEL_NAP, SHORT_RUN, TOOL_NAP, old_result, seen

NO_LIMIT = UsageLimits(request_limit=None)


async def listen(_context, events):
    async for _ in events:
        seen.events += 1


async def ignore(_context, events):
    async for _ in events:
        pass


async def echo(x: int, s: str) -> str:
    seen.tools += 1
    return "ok: " + s


async def rest(x: int, s: str) -> str:
    await asyncio.sleep(TOOL_NAP)
    return await echo(x, s)


@dataclass
class Answer(StreamedResponse):
    script: Any
    model_name, provider_name, provider_url = "scripted", None, None
    timestamp = datetime.now(UTC)

    async def _get_event_iterator(self):
        async for item in self.script:
            if isinstance(item, str):
                for event in self._parts_manager.handle_text_delta(vendor_part_id=0, content=item):
                    yield event
            else:
                yield self._parts_manager.handle_part(vendor_part_id=item.tool_call_id, part=item)


class Scripted(Model):
    model_name = system = "scripted"

    def __init__(self, script):
        super().__init__()
        self.script = script

    async def request(self, *_):
        raise NotImplementedError

    @asynccontextmanager
    async def request_stream(self, messages, settings, parameters, run_context=None):
        _, parameters = self.prepare_request(settings, parameters)
        yield Answer(parameters, self.script(messages))


def agent(turns, tool=echo, calls=1, nap=0, turn_of=lambda messages: len(messages) // 2, **options):
    async def script(messages):
        if nap:
            await asyncio.sleep(nap)
        turn = turn_of(messages)
        if turn < turns:
            for i in range(calls):
                yield ToolCallPart(tool.__name__, ARGUMENTS, f"c{turn}-{i}")
        else:
            yield "done"

    return Agent(Scripted(script), tools=[tool], **options)


async def run(agent, handler=listen, **options):
    result = await agent.run("go", event_stream_handler=handler, usage_limits=NO_LIMIT, **options)
    return result.output


async def turns(count):
    return await run(agent(count))


async def stream(count, listeners):
    async def script(_messages):
        for _ in range(count):
            yield DELTA

    return await run(Agent(Scripted(script)), listen if listeners else ignore)


async def batch(count):
    return await run(agent(1, rest, count))


SHORT = agent(SHORT_RUN, nap=MODEL_NAP)


async def short_run():
    return await run(SHORT)


def history(size):
    messages = []
    for n in range(size // 4):
        messages += [
            ModelRequest([UserPromptPart(f"question {n}")]),
            ModelResponse([TextPart("I look."), ToolCallPart("echo", ARGUMENTS, f"old{n}")]),
            ModelRequest([ToolReturnPart("echo", old_result(n), f"old{n}")]),
            ModelResponse([TextPart("Here it is.")]),
        ]
    return messages


async def newest(messages):
    return messages[-100:] if len(messages) > 100 else messages


async def append(turns, past):
    trimming = agent(turns, turn_of=seen.numbering(), capabilities=[ProcessHistory(newest)])
    return await run(trimming, message_history=past)
