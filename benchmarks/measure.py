"""One measurement of one framework, in a process of its own: prints its figures as JSON.

    python -m benchmarks.measure benchmarks.bare w1 200

Runs in the framework's environment, so it needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeAlias

from benchmarks.work import DELTA, HISTORY, SHORT_RUN, seen

Work: TypeAlias = Callable[[], Awaitable[Any]]

ENOUGH = 1.0
"""Seconds after which nothing is repeated any more."""
REPEATS = 30


def prepare(module: Any, workload: str, size: int) -> tuple[Work, Work, Callable[[Any], None]]:
    """What to do before the clock runs, what to time, and how to see that it was done."""

    async def many(count: int) -> list[Any]:
        return await asyncio.gather(*[module.short_run() for _ in range(count)])

    def ran(tools: int, texts: Callable[[Any], list[str]] = lambda text: [text]) -> Any:
        def look(result: Any) -> None:
            assert seen.tools == tools, f"{seen.tools} of {tools} tools ran"
            assert seen.events >= tools, f"the listener got {seen.events} events"
            assert all("done" in text for text in texts(result)), "the model was not heard"

        return look

    def streamed(text: str) -> None:
        assert text == DELTA * size, f"{len(text)} characters arrived"
        assert seen.events >= size or workload == "w2-unheard", f"{seen.events} events"

    match workload:
        case "w1":
            return partial(module.turns, min(size, 20)), partial(module.turns, size), ran(size)
        case "w2" | "w2-unheard":
            stream = partial(module.stream, listeners=int(workload == "w2"))
            return partial(stream, min(size, 100)), partial(stream, size), streamed
        case "w3":
            return partial(module.batch, 8), partial(module.batch, size), ran(size)
        case "w4":
            return partial(many, 2), partial(many, size), ran(size * SHORT_RUN, list)
        case "w6":
            short, long = module.history(8), module.history(HISTORY)
            return partial(module.append, 2, short), partial(module.append, size, long), ran(size)
        case _:
            raise ValueError(f"there is no workload {workload!r}")


async def measure(module: Any, workload: str, size: int) -> dict[str, float]:
    warm_up, work, look = prepare(module, workload, size)
    await warm_up()
    walls: list[float] = []
    cpus: list[float] = []
    memory = None
    begun = perf_counter()
    while not walls or (len(walls) < REPEATS and perf_counter() - begun < ENOUGH):
        seen.reset()
        gc.collect()
        before = forget_peak()
        cpu, started = process_time(), perf_counter()
        result = await work()
        wall = perf_counter() - started
        cpus.append(process_time() - cpu)
        walls.append(seen.since_second_turn if workload == "w6" else wall)
        if memory is None:  # the first time: later ones find room that is free already
            memory = peak() - before
        look(result)
    return {"wall": min(walls), "cpu": min(cpus), "memory": memory or 0, "repeats": len(walls)}


def forget_peak() -> int:
    """Have the system forget the most memory that this process had; return what it has now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    """A figure in bytes of the process's status; 0 where the system tells none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("workload")
    parser.add_argument("size", type=int)
    options = parser.parse_args()
    logging.disable()
    module = importlib.import_module(options.module)
    print(json.dumps(asyncio.run(measure(module, options.workload, options.size))))


if __name__ == "__main__":
    main()
