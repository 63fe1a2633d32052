"""Much at once and for long: everything ends, and memory is where it was."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import clark_agent as ca
from clark_agent.engine import supervised
from clark_agent.history import repair_history
from clark_agent.testing import FakeClock, ScriptedStream, call
from tests.model.world import GRACE, Scenario, World
from tests.sizes import RUNS_AT_ONCE

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.soak]


class Work(ca.AgentTool):
    name = "work"

    async def execute(self, args: Any, ctx: ca.ToolContext) -> ca.ToolResult:
        return ca.ToolResult.text("done")


async def test_of_64_tools_each_result_says_how_it_ended() -> None:
    """A third is done, a third can be cancelled, a third ignores everything."""
    world = World(Scenario((("fast", "hangs", "swallows") * 21 + ("fast",),)))
    token, running = ca.CancellationToken(), asyncio.Event()

    def cancel_when_all_run(event: ca.AgentEvent) -> None:
        if len(world.ran) == 64:
            running.set()

    config = world.config(RecordingAll(cancel_when_all_run))
    task: asyncio.Task[ca.RunResult] = asyncio.create_task(
        ca.run("go", ca.AgentContext(), config, token)
    )
    await running.wait()
    token.cancel()
    outcome: ca.RunResult | BaseException
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome, ca.RunAborted)
    assert not world.release.is_set(), "it did not wait for those that ignore it"
    results = [m for m in outcome.messages if isinstance(m, ca.ToolResultMessage)]
    assert len(results) == 64
    ends = Counter(
        "done" if not r.is_error else "left" if r.details["still_running"] else "cancelled"
        for r in results
    )
    assert ends == {"done": 22, "cancelled": 21, "left": 21}
    assert supervised.left_behind() == 21
    world.release.set()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
    assert supervised.left_behind() == 0


class RecordingAll:
    """A sink with something to do at each event."""

    def __init__(self, act: Any) -> None:
        self.act = act
        self.events: list[ca.AgentEvent] = []

    def __call__(self, event: ca.AgentEvent) -> None:
        self.events.append(event)
        self.act(event)


async def test_five_thousand_turns_in_one_run() -> None:
    steps: list[Any] = [call("work", n=n) for n in range(5_000)]
    config = ca.LoopConfig(stream=ScriptedStream([*steps, "done"]), tools=[Work()])
    result = await ca.run("go", ca.AgentContext(), config)
    assert result.outcome is ca.LoopOutcome.DONE
    assert len(result.messages) == 2 + 2 * 5_000
    assert repair_history(result.messages).changes == ()


async def sleepy(request: ca.StreamRequest, signal: ca.CancellationToken) -> Any:
    await asyncio.sleep(0)
    turn = len(request.messages) // 2
    if turn < 3:
        message = ca.AssistantMessage.from_calls([ca.ToolCall(f"c{turn}", "work", {})])
    else:
        message = ca.AssistantMessage.from_text("done")
    yield ca.stream.Done(message)


async def test_thousands_of_runs_at_once() -> None:
    config = ca.LoopConfig(stream=sleepy, tools=[Work()], max_iterations=20)
    runs = [ca.run(f"go {n}", ca.AgentContext(), config) for n in range(RUNS_AT_ONCE)]
    results = await asyncio.gather(*runs)
    assert {len(result.messages) for result in results} == {8}
    assert {result.text for result in results} == {"done"}
    firsts = [result.messages[0] for result in results]
    assert [m.content for m in firsts if isinstance(m, ca.UserMessage)] == [
        f"go {n}" for n in range(RUNS_AT_ONCE)
    ]


def ours() -> tuple[int, int]:
    """How many objects of this package there are, and how much memory it has asked for."""
    gc.collect()
    package = Path(ca.__file__).parent
    objects = [
        each for each in gc.get_objects() if str(type(each).__module__).startswith(ca.__name__)
    ]
    traces = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, str(package / "*"), all_frames=True)]
    )
    return len(objects), sum(trace.size for trace in traces.traces)


async def growth(rounds: int) -> tuple[int, int]:
    """How much more there is of `ours` after runs that succeed, fail and are cancelled."""
    config = ca.LoopConfig(
        stream=sleepy,
        tools=[Work()],
        plugins=[ca.TokenBudget(200), ca.ToolResultBudget(), ca.UniqueToolCallIds()],
        max_iterations=20,
        cancel_grace=GRACE,
        clock=FakeClock(),
    )
    failing = ScriptedStream([OSError("no")], at_end="repeat")
    broken = config.replace(stream=failing)

    async def play(rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.gather(*[ca.run("go", ca.AgentContext(), config) for _ in range(5)])
            await asyncio.gather(ca.run("go", ca.AgentContext(), broken), return_exceptions=True)
            token = ca.CancellationToken()
            task = asyncio.create_task(ca.run("go", ca.AgentContext(), config, token))
            await asyncio.sleep(0)
            token.cancel()
            await asyncio.gather(task, return_exceptions=True)
        failing.requests.clear()

    tracemalloc.start()
    await play(30)  # caches fill
    objects, memory = ours()
    await play(rounds)
    objects_then, memory_then = ours()
    return objects_then - objects, memory_then - memory


def test_memory_returns_to_where_it_was() -> None:
    """In a process of its own: what other tests have left running in this one grows as well."""
    rounds = 30
    program = f"import asyncio, {__name__} as t; print(*asyncio.run(t.growth({rounds})))"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    objects, memory = map(int, ran.stdout.split())
    assert objects < rounds, f"{objects} objects more after {rounds} rounds"
    # A run that stayed would hold thousands of bytes, seven times a round.
    assert memory < 2_500 * rounds, f"{memory} bytes more after {rounds} rounds"
