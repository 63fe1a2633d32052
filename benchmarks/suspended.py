"""`make bench-suspended`: many suspended runs in PostgreSQL: their size, and how fast one wakes up.

    python -m benchmarks.suspended [--runs 100000] [--sample 1000] [--url postgresql://...]

Without a URL it starts a server of its own. Each run is a real one: it calls a tool, is held back
by a gate, and is suspended. Then some of them, at random, are decided and resumed, one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from clark_agent import (
    Agent,
    AssistantMessage,
    CancellationToken,
    StopReason,
    Suspend,
    ToolCall,
    tool,
)
from clark_agent.run_log import Allow, advance, decide, waiting_for
from clark_agent.run_log.postgres import PostgresStore
from clark_agent.stream import Done, StreamEvent, StreamRequest
from tests.durable.servers import postgres

_AT_ONCE = 200
_PEOPLE = 1000


@tool
async def pay(amount: int) -> str:
    """Pay an invoice."""
    return f"paid {amount}"


class Gate:
    """Holds every call back, for a week."""

    name = "gate"

    def on_before_tool_call(self, ctx: Any) -> Suspend:
        number = int(ctx.args["amount"])
        return Suspend({"pay": number}, expires_in=7 * 86_400, assignee=f"u{number % _PEOPLE}")


async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
    """Pay first, then say so."""
    last = request.messages[-1]
    if last.role == "user":
        asked = ToolCall("call_1", "pay", {"amount": int(last.plain_text.split()[-1])})
        yield Done(AssistantMessage((asked,), StopReason.TOOL_USE))
    else:
        yield Done(AssistantMessage.from_text("It is paid."))


AGENT: Agent[str, Any] = Agent(model, name="payer", tools=[pay], plugins=[Gate()])


async def fill(store: PostgresStore, runs: int) -> float:
    numbers, began = iter(range(runs)), perf_counter()

    async def some() -> None:
        for number in numbers:
            await advance(store, f"run-{number}", AGENT, f"Pay invoice {number}")
            if number % 5000 == 4999:
                print(f"  {number + 1:,} of {runs:,}", file=sys.stderr)

    await asyncio.gather(*[some() for _ in range(_AT_ONCE)])
    return perf_counter() - began


async def timed(times: int, act: Callable[[int], Any]) -> list[float]:
    """Milliseconds of each time, sorted."""
    found: list[float] = []
    for number in range(times):
        began = perf_counter()
        await act(number)
        found.append(1000 * (perf_counter() - began))
    return sorted(found)


def shown(name: str, times: list[float]) -> str:
    last = times[min(len(times) - 1, len(times) * 99 // 100)]
    return f"| {name} | {times[len(times) // 2]:.1f} | {last:.1f} |"


async def measure(url: str, runs: int, sample: int) -> None:
    store = PostgresStore(url)
    seconds = await fill(store, runs)
    with store.connection() as connection:
        connection.execute("VACUUM ANALYZE")
        row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        tables = connection.execute(
            "SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables"
            " WHERE schemaname = 'clark_agent' ORDER BY 2 DESC"
        ).fetchall()
    size = 0 if row is None else int(row[0])
    chosen = random.Random(7).sample(range(runs), sample)

    async def decided(number: int) -> None:
        run_id = f"run-{chosen[number]}"
        (request,) = await asyncio.to_thread(waiting_for, store, run_id)
        await decide(store, run_id, request.request_id, Allow(), by="bench")

    async def woken(number: int) -> None:
        result = await advance(store, f"run-{chosen[number]}", AGENT)
        assert result.text == "It is paid."

    async def asked(number: int) -> None:
        who = f"u{chosen[number] % _PEOPLE}"
        await asyncio.to_thread(lambda: waiting_for(store, assignee=who, limit=10))

    async def swept(number: int) -> None:
        await asyncio.to_thread(store.due)

    async def looked(number: int) -> None:
        await asyncio.to_thread(store.abandoned)

    print(f"{runs:,} suspended runs: written in {seconds:.0f} s, {runs / seconds:.0f} a second, ")
    print(f"{size / 1e6:.0f} MB, {size / runs / 1000:.1f} KB each")
    print(", ".join([f"{name} {size / 1e6:.0f} MB" for name, size in tables]))
    print("\n| milliseconds | p50 | p99 |\n|---|--:|--:|")
    print(shown("read and decide a request", await timed(sample, decided)))
    print(shown("wake a run up and end it", await timed(sample, woken)))
    print(shown("the 10 newest requests of a person", await timed(min(sample, 100), asked)))
    print(shown("look for what is due", await timed(min(sample, 100), swept)))
    print(shown("look for abandoned runs", await timed(min(sample, 100), looked)))
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--url", help="an empty database; without it, a server is started")
    given = parser.parse_args()
    with ExitStack() as stack:
        url = given.url or stack.enter_context(postgres(on_disk=True)).create_database()
        asyncio.run(measure(url, given.runs, min(given.sample, given.runs)))


if __name__ == "__main__":
    main()
