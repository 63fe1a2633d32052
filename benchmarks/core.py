"""`make bench-core`: this package against the bare loop, one line a workload, in under a minute.

Both run in one process and take turns; each figure compares the best time of one with the best of
the other, since on a busy machine everything but the best is the machine's. Name workloads
to have those alone: `python -m benchmarks.core w1 w4`.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import gc
import importlib.util
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import requires
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import msgspec

from benchmarks import bare, clark
from benchmarks.work import seen
from clark_agent import AgentMessage, dump_transcript, load_transcript

Work: TypeAlias = Callable[[], Awaitable[object]]


async def best(*works: Work, rounds: int) -> list[float]:
    """The best time of each in seconds. They take turns, so that all have the same weather.

    A short one is done several times in a row: a short time is more likely to be a quiet one.
    """
    once = [await _timed(work, 1) for work in works]
    repeats = [max(1, round(max(once) / time)) for time in once]
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, repeat, mine in zip(works, repeats, times, strict=True):
            mine.append(await _timed(work, repeat))
    return [min(mine) for mine in times]


async def _timed(work: Work, repeat: int) -> float:
    gc.collect()
    started = perf_counter()
    for _ in range(repeat):
        await work()
    return (perf_counter() - started) / repeat


def line(name: str, about: str, **figures: float) -> None:
    words = [
        f"{key.replace('_', '-')} {value if isinstance(value, int) else f'{value:.2f}'}"
        for key, value in figures.items()
    ]
    print(f"{' '.join([name, *words]):<36}  {about}", flush=True)


async def w1(size: int = 200, short: int = 50, long: int = 5_000, rounds: int = 72) -> None:
    """Turns: the price of one, and whether it grows with the length of the run."""
    ours, floor = await best(partial(clark.turns, size), partial(bare.turns, size), rounds=rounds)
    few, many = await best(
        partial(clark.turns, short), partial(clark.turns, long), rounds=rounds // 12
    )
    about = "a turn at 200 turns; a turn of ours at 5,000 against 50"
    line("W1", about, ratio=ours / floor, growth=(many / long) / (few / short))


async def w2(size: int = 10_000, rounds: int = 60) -> None:
    """Deltas: with one listener, and with none, for whom nothing should be made."""
    works = [partial(module.stream, size, n) for n in (1, 0) for module in (clark, bare)]
    ours, floor, ours_unheard, floor_unheard = await best(*works, rounds=rounds)
    about = "a delta with one listener; with none"
    line("W2", about, ratio=ours / floor, bare_listener=ours_unheard / floor_unheard)


async def w3(size: int = 64, rounds: int = 60) -> None:
    """Tool calls at once."""
    ours, floor = await best(partial(clark.batch, size), partial(bare.batch, size), rounds=rounds)
    line("W3", "64 calls at once", ratio=ours / floor)


async def w4(size: int = 1_000, rounds: int = 6) -> None:
    """Runs at once: the time, and the memory at the peak (by what Python allocates)."""

    async def runs(module: Any, count: int) -> None:
        await asyncio.gather(*[module.short_run() for _ in range(count)])

    async def peak(module: Any) -> int:
        gc.collect()
        tracemalloc.start()
        try:
            await runs(module, size // 5)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    ours, floor = await best(partial(runs, clark, size), partial(runs, bare, size), rounds=rounds)
    about = "1,000 runs at once; what Python allocates at the peak"
    line("W4", about, ratio=ours / floor, memory=await peak(clark) / await peak(bare))


def w5(rounds: int = 25) -> None:
    """Importing, against the least that such a package imports; what an installation adds."""
    statements = ("pass", "import asyncio, msgspec", "import clark_agent")
    compiled = _compile_all("asyncio", "msgspec", "clark_agent")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    times: list[list[float]] = [[] for _ in statements]
    for _ in range(rounds):
        for statement, mine in zip(statements, times, strict=True):
            started = perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
            mine.append(perf_counter() - started)
    start, floor, ours = map(min, times)
    line(
        "W5",
        "importing; what an installation adds",
        ratio=(ours - start) / (floor - start),
        size_mb=compiled["clark_agent"] / 1e6,
        packages=1 + len([name for name in requires("clark-agent") or () if ";" not in name]),
    )


def _compile_all(*packages: str) -> dict[str, int]:
    """Compile packages as an installer does; return the bytes of each with its compiled files."""
    sizes: dict[str, int] = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        compileall.compile_dir(folder, quiet=2)
        files = [path for path in folder.rglob("*") if path.is_file()]
        tag = f".{sys.implementation.cache_tag}.pyc"
        kept = [p for p in files if p.parent.name != "__pycache__" or p.name.endswith(tag)]
        sizes[package] = sum(path.stat().st_size for path in kept)
    return sizes


async def w6(size: int = 10_000, turns: int = 200, rounds: int = 32) -> None:
    """A turn behind a long history with budgets on, against a plain turn of our own."""
    past = clark.history(size)
    plain, behind = [], []
    for _ in range(rounds):
        plain.append(await _timed(partial(clark.turns, turns), 1))
        gc.collect()
        await clark.append(turns, past)
        behind.append(seen.since_second_turn)
    about = "a turn of ours behind 10,000 messages against a plain one"
    line("W6", about, ratio=(min(behind) / (turns - 1)) / (min(plain) / turns))


async def w7(size: int = 10_000, rounds: int = 20) -> None:
    """A transcript as JSON lines, against msgspec alone with the same structs."""
    messages = clark.history(size, result="text " * 20)
    data = dump_transcript(messages)
    decoder = msgspec.json.Decoder(AgentMessage)
    encoder = msgspec.json.Encoder()

    def at_once(work: Callable[[], object]) -> Work:
        async def awaited() -> None:
            work()

        return awaited

    works: Sequence[Work] = [
        at_once(lambda: load_transcript(data)),
        at_once(lambda: decoder.decode_lines(data)),
        at_once(lambda: dump_transcript(messages)),
        at_once(lambda: encoder.encode_lines(messages)),
    ]
    ours_in, floor_in, ours_out, floor_out = await best(*works, rounds=rounds)
    reading, writing = ours_in / floor_in, ours_out / floor_out
    about = "a transcript as JSON lines, against msgspec alone"
    line("W7", about, ratio=max(reading, writing), decode=reading, encode=writing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="the workloads, all by default: W1 W2 …")
    only = [name.upper() for name in parser.parse_args().only]
    print("ratio: the time of this package by that of the bare loop")
    for work in (w1, w2, w3, w4, w5, w6, w7):
        if not only or work.__name__.upper() in only:
            done = work()
            if done is not None:
                asyncio.run(done)


if __name__ == "__main__":
    main()
