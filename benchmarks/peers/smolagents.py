"""smolagents: a `ToolCallingAgent` with `stream_outputs`, iterated with `run(stream=True)`.

It has no async API: runs go to threads, as its documentation says, and so do the calls of a batch.
An agent holds its memory, so each run has one of its own. It ends by a call of `final_answer`; in
W2 that comes whole, behind the text in deltas, which costs it less than arguments in deltas. Its
console is quiet. A step callback trims the memory: this is how the documentation changes it.
"""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from smolagents import AgentLogger, LogLevel, Model, ToolCallingAgent, tool
from smolagents.memory import ActionStep, TaskStep, Timing, ToolCall
from smolagents.models import (
    ChatMessageStreamDelta,
    ChatMessageToolCallFunction,
    ChatMessageToolCallStreamDelta,
)

from benchmarks.work import ARGUMENTS, DELTA, MODEL_NAP, SHORT_RUN, TOOL_NAP, old_result, seen

QUIET = AgentLogger(level=LogLevel.OFF, console=Console(quiet=True))
THREADS = ThreadPoolExecutor(max_workers=100)


@tool
def echo(x: int, s: str) -> str:
    """Say it again.

    Args:
        x: A number.
        s: What to say.
    """
    seen.tools += 1
    return "ok: " + s


@tool
def rest(x: int, s: str) -> str:
    """Rest a little.

    Args:
        x: A number.
        s: What to say.
    """
    time.sleep(TOOL_NAP)
    seen.tools += 1
    return "ok: " + s


def calls_of(name, arguments, *ids):
    function = ChatMessageToolCallFunction(name=name, arguments=arguments)
    calls = [ChatMessageToolCallStreamDelta(i, id_, "function", function) for i, id_ in ids]
    return ChatMessageStreamDelta(tool_calls=calls)


class Scripted(Model):
    def __init__(self, script):
        super().__init__()
        self.script = script

    def generate(self, *_, **__):
        raise NotImplementedError

    def generate_stream(self, messages, **_):
        return self.script(messages)


def calling(turns, name="echo", calls=1, nap=0):
    turn_of = seen.numbering()

    def script(messages):
        time.sleep(nap)
        turn = turn_of(messages)
        if turn < turns:
            yield calls_of(name, ARGUMENTS, *[(i, f"c{turn}-{i}") for i in range(calls)])
        else:
            yield calls_of("final_answer", '{"answer": "done"}', (0, f"c{turn}"))

    return Scripted(script)


PROMPTS = ToolCallingAgent([], Scripted(None), logger=QUIET).prompt_templates  # read only once


def go(model, tools=(echo,), listeners=1, past=None, **options):
    options |= {"stream_outputs": True, "max_steps": 10**9, "logger": QUIET}
    agent = ToolCallingAgent(list(tools), model, PROMPTS, **options)
    agent.memory.steps += past or []
    last = None
    for event in agent.run("go", stream=True, reset=past is None):
        last = event
        seen.events += listeners
    return last.output


async def turns(count):
    return go(calling(count))


async def stream(count, listeners):
    def script(_messages):
        parts = []
        for _ in range(count):
            parts.append(DELTA)
            yield ChatMessageStreamDelta(content=DELTA)
        yield calls_of("final_answer", json.dumps({"answer": "".join(parts)}), (0, "c"))

    return go(Scripted(script), (), listeners)


async def batch(count):
    return go(calling(1, "rest", count), [rest], max_tool_threads=count)


async def short_run():
    model = calling(SHORT_RUN, nap=MODEL_NAP)
    return await asyncio.get_running_loop().run_in_executor(THREADS, go, model)


def history(size):
    steps = []
    for n in range(size // 4):
        call = ToolCall("echo", {"x": 7, "s": "hello"}, f"old{n}")
        action = ActionStep(n, Timing(0, 0), tool_calls=[call], observations=old_result(n))
        action.model_output = "I look."
        steps += [TaskStep(f"question {n}"), action]
    return steps


def trim(step, agent):
    del agent.memory.steps[:-50]


async def append(turns, past):
    return go(calling(turns), past=past, step_callbacks=[trim])
