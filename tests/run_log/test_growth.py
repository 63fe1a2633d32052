"""What a turn costs does not depend on how many there were: counted in operations, not in time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.operations import check_growth, counted
from clark_agent import (
    AgentContext,
    AssistantMessage,
    CancellationToken,
    Compaction,
    LoopConfig,
    LoopDetector,
    RunIdentity,
    StopReason,
    StreamRequest,
    TokenBudget,
    ToolCall,
    agent_tool,
    run,
    tool,
)
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog, resume
from clark_agent.stream import Done, StreamEvent
from tests.run_log.stories import copy_of

pytestmark = pytest.mark.slow


@tool
async def work(n: int) -> str:  # not in a thread: how often one wakes the loop is the machine's
    """Work."""
    return "x" * 200


class Turns:
    """Calls a tool so many times."""

    def __init__(self, turns: int, name: str = "work", **arguments: Any) -> None:
        self.turns = turns
        self.name = name
        self.arguments = arguments or {"n": 1}
        self.count = 0

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.count += 1
        if self.count > self.turns:
            yield Done(AssistantMessage.from_text("done"))
            return
        made = ToolCall(f"c{self.count}", self.name, self.arguments)
        yield Done(AssistantMessage((made,), StopReason.TOOL_USE))


def config(turns: int, **settings: Any) -> LoopConfig:
    return LoopConfig(**{"stream": Turns(turns), "tools": [work], **settings})


CONTEXT = AgentContext(identity=RunIdentity.root("r"))
Work = Callable[[], Awaitable[object]]


async def budget(turns: int) -> Work:
    return partial(run, "go", CONTEXT, config(turns, plugins=[TokenBudget(1_500)]))


async def budget_logged(turns: int) -> Work:
    plugins = [TokenBudget(1_500)]
    return partial(
        run, "go", CONTEXT, config(turns, plugins=plugins, run_log=RunLog(MemoryStore()))
    )


class Summarising(Turns):
    """The same, with summaries when they are asked for."""

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        if "Write a summary" in request.messages[-1].plain_text:
            yield Done(AssistantMessage.from_text("It has worked."))
            return
        async for event in super().__call__(request, signal):
            yield event


def compacting(turns: int, **settings: Any) -> LoopConfig:
    return config(turns, stream=Summarising(turns), plugins=[Compaction(1_500)], **settings)


async def compaction(turns: int) -> Work:
    return partial(run, "go", CONTEXT, compacting(turns))


async def compaction_logged(turns: int) -> Work:
    return partial(run, "go", CONTEXT, compacting(turns, run_log=RunLog(MemoryStore())))


async def logged(turns: int, **settings: Any) -> tuple[MemoryStore, LoopConfig]:
    store = MemoryStore()
    made = config(turns, run_log=RunLog(store), **settings)
    await run("go", CONTEXT, made)
    return store, made


async def replayed(turns: int) -> Work:
    store, made = await logged(turns)
    return partial(replay, store, "r", made)


async def resumed(turns: int) -> Work:
    plugins = [TokenBudget(1_500), LoopDetector(None, None)]
    store, _ = await logged(turns, plugins=plugins)
    cut = copy_of(store, "r", len(store.load("r").records) - 3)
    return partial(resume, cut, "r", config(0, plugins=plugins))


async def resumed_with_children(turns: int) -> Work:
    child = LoopConfig(stream=Turns(10**9), tools=[work])
    child = child.replace(stream=_answers_at_once)
    tools = [agent_tool("helper", "helps", child)]
    store, _ = await logged(turns, stream=Turns(turns, "helper", task="t"), tools=tools)
    cut = copy_of(store, "r", len(store.load("r").records) - 3)
    return partial(resume, cut, "r", config(0, tools=tools))


async def _answers_at_once(
    request: StreamRequest, signal: CancellationToken
) -> AsyncIterator[StreamEvent]:
    yield Done(AssistantMessage.from_text("done"))


@pytest.mark.parametrize(
    ("prepare", "size"),
    [
        (budget, 30),
        (budget_logged, 30),
        (compaction, 70),  # it compacts every 7 turns, so in all sizes equally often
        (compaction_logged, 70),
        (replayed, 20),
        (resumed, 20),
        (resumed_with_children, 10),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_turn_among_many_costs_what_it_costs_among_few(
    prepare: Callable[[int], Awaitable[Work]], size: int
) -> None:
    await (await prepare(size))()  # what is done once, for good, is done now
    one, two, four = [await counted(await prepare(size * factor)) for factor in (1, 2, 4)]
    few, many = (two - one) / size, (four - two) / (2 * size)
    check_growth(prepare.__name__, (2 * size, few), (4 * size, many))
