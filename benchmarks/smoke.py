"""`make bench-smoke`: the core benchmark runs, and the work per unit does not grow.

Seconds depend on the machine; the bytecodes that a run executes and the functions that it calls do
not. So these are counted, for N units of work, 2N and 4N: a unit between 2N and 4N may not take
more of them than one between N and 2N, but for a twentieth.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from types import FrameType
from typing import Any

from benchmarks import bare, clark, core
from benchmarks.work import DELTA, SHORT_RUN, seen
from clark_agent import dump_transcript, load_transcript

TOLERANCE = 1.05


class Operations:
    """Counts bytecodes, and calls of what is written in C, while it is on."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Operations:
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        else:
            self.count += event == "opcode"
        return self._trace

    def _profile(self, _: FrameType, event: str, __: Any) -> None:
        self.count += event == "c_call"


async def counted(work: Callable[[], Awaitable[object]]) -> int:
    """The operations of the work. All of it runs in tasks of its own, from their first step."""
    with Operations() as operations:
        await asyncio.create_task(_awaited(work))
    return operations.count


async def _awaited(work: Callable[[], Awaitable[object]]) -> None:
    await work()


async def check(name: str, unit: str, work: Callable[[int], Awaitable[object]], size: int) -> None:
    await work(size)  # what is done once, for good, is done now
    one, two, four = [await counted(partial(work, size * factor)) for factor in (1, 2, 4)]
    early, late = (two - one) / size, (four - two) / (2 * size)
    said = f"{early:,.0f} operations per {unit} up to {2 * size:,}, {late:,.0f} up to {4 * size:,}"
    assert late <= TOLERANCE * early, f"{name} is not linear: {said}"
    print(name, said, flush=True)


async def runs(count: int) -> None:
    await asyncio.gather(*[clark.short_run(0) for _ in range(count)])


async def wire(count: int) -> None:
    messages = clark.history(count)
    assert load_transcript(dump_transcript(messages)).messages == messages


async def behind(size: int, turns: int = 20) -> float:
    """The operations of a turn behind a history of that size, from the second turn on."""
    past = clark.history(size)
    with Operations() as operations:
        seen.clock = lambda: operations.count
        await asyncio.create_task(_awaited(partial(clark.append, turns, past)))
    seen.clock = perf_counter
    return seen.since_second_turn / (turns - 1)


async def check_history(short: int, long: int) -> None:
    await clark.append(2, clark.history(short))
    few, many = await behind(short), await behind(long)
    said = f"{few:,.0f} operations per turn behind {short:,} messages, {many:,.0f} behind {long:,}"
    assert many <= TOLERANCE * few, f"W6 depends on the history: {said}"
    print("W6", said, flush=True)


async def check_growth() -> None:
    await check("W1", "turn", clark.turns, 50)
    await check("W2", "delta", partial(clark.stream, listeners=1), 500)
    await check("W2", "unheard delta", partial(clark.stream, listeners=0), 500)
    await check("W3", "call", partial(clark.batch, nap=0), 50)
    await check("W4", "run", runs, 20)
    await check_history(1_000, 4_000)
    await check("W7", "message", wire, 400)


async def check_work() -> None:
    """Both sides do what they are timed for."""
    for module in (bare, clark):
        seen.reset()
        assert await module.turns(10) == "done"
        assert await module.batch(20, nap=0) == "done"
        assert await module.short_run(0) == "done"
        assert await module.append(6, module.history(40)) == "done"
        assert seen.tools == 10 + 20 + SHORT_RUN + 6
        assert seen.since_second_turn
        for listeners in (0, 1):
            seen.reset()
            assert await module.stream(100, listeners) == DELTA * 100
            assert (seen.events > 100) is bool(listeners)


async def run_all() -> None:
    await core.w1(10, 5, 20, rounds=12)
    await core.w2(100, rounds=2)
    await core.w3(10, rounds=2)
    await core.w4(10, rounds=2)
    core.w5(rounds=2)
    await core.w6(100, 5, rounds=2)
    await core.w7(100, rounds=2)


if __name__ == "__main__":
    asyncio.run(check_work())
    print("sizes too small to mean anything:")
    asyncio.run(run_all())
    print("\noperations counted:")
    asyncio.run(check_growth())
