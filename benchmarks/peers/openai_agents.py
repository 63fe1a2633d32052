"""OpenAI Agents SDK: `Runner.run_streamed` with a `Model` of one's own, tracing off.

Events must be consumed; where nobody listens that is done without a look. The history is trimmed by
`ToolOutputTrimmer`, which comes with it.
"""

import asyncio

from agents import Agent, Model, RunConfig, Runner, function_tool, set_tracing_disabled
from agents.extensions import ToolOutputTrimmer
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
)

from benchmarks.work import ARGUMENTS, DELTA, MODEL_NAP, SHORT_RUN, TOOL_NAP, old_result, seen

set_tracing_disabled(True)


@function_tool
async def echo(x: int, s: str) -> str:
    seen.tools += 1
    return "ok: " + s


@function_tool
async def rest(x: int, s: str) -> str:
    await asyncio.sleep(TOOL_NAP)
    seen.tools += 1
    return "ok: " + s


def delta(text):
    return ResponseTextDeltaEvent(
        content_index=0,
        delta=text,
        item_id="m",
        logprobs=[],
        output_index=0,
        sequence_number=0,
        type="response.output_text.delta",
    )


def whole(output):
    response = Response(
        id="r",
        output=output,
        created_at=0,
        model="scripted",
        object="response",
        parallel_tool_calls=True,
        tool_choice="auto",
        tools=[],
    )
    return ResponseCompletedEvent(response=response, sequence_number=0, type="response.completed")


def said(text):
    part = ResponseOutputText(text=text, annotations=[], type="output_text")
    return ResponseOutputMessage(
        id="m", content=[part], role="assistant", status="completed", type="message"
    )


def called(call_id, tool):
    return ResponseFunctionToolCall(
        arguments=ARGUMENTS, call_id=call_id, name=tool.name, id=call_id, type="function_call"
    )


class Scripted(Model):
    def __init__(self, script):
        self.script = script

    async def get_response(self, *_, **__):
        raise NotImplementedError

    def stream_response(self, system_instructions, input, *_, **__):  # noqa: A002
        return self.script(input)


def agent(turns, tool=echo, calls=1, nap=0, turn_of=lambda items: len(items) // 2):
    async def script(items):
        if nap:
            await asyncio.sleep(nap)
        turn = turn_of(items)
        if turn < turns:
            yield whole([called(f"c{turn}-{i}", tool) for i in range(calls)])
        else:
            yield delta("done")
            yield whole([said("done")])

    return Agent("bench", tools=[tool], model=Scripted(script))


async def run(agent, listeners=1, prompt="go", config=None):
    result = Runner.run_streamed(agent, prompt, max_turns=None, run_config=config)
    if listeners:
        async for _ in result.stream_events():
            seen.events += 1
    else:
        async for _ in result.stream_events():
            pass
    return result.final_output


async def turns(count):
    return await run(agent(count))


async def stream(count, listeners):
    async def script(_items):
        parts = []
        for _ in range(count):
            parts.append(DELTA)
            yield delta(DELTA)
        yield whole([said("".join(parts))])

    return await run(Agent("bench", model=Scripted(script)), listeners)


async def batch(count):
    return await run(agent(1, rest, count, turn_of=lambda items: int(len(items) > 1)))


SHORT = agent(SHORT_RUN, nap=MODEL_NAP)


async def short_run():
    return await run(SHORT)


def history(size):
    items = []
    for n in range(size // 4):
        call = {"type": "function_call", "call_id": f"old{n}", "name": "echo"}
        result = {"type": "function_call_output", "call_id": f"old{n}", "output": old_result(n)}
        items += [
            {"role": "user", "content": f"question {n}"},
            {**call, "arguments": ARGUMENTS},
            result,
            {"role": "assistant", "content": "Here it is."},
        ]
    return items


async def append(turns, past):
    config = RunConfig(call_model_input_filter=ToolOutputTrimmer(max_output_chars=1_000))
    prompt = [*past, {"role": "user", "content": "go"}]
    return await run(agent(turns, turn_of=seen.numbering()), prompt=prompt, config=config)
