"""One subject of `benchmarks.distributed`, in a process of its own: prints its figures as JSON.

python -m benchmarks.durable_runs SUBJECT POSTGRES_URL TEMPORAL_ADDRESS FOLDER
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.clark import calling, echo
from clark_agent import Agent
from clark_agent.run_log import RunStore, SqliteStore, advance
from clark_agent.run_log.postgres import PostgresStore

TURNS = 50
"""The turns of the run that is alone."""
RUNS, SHORT = 100, 5
"""The runs at once, and the turns of each."""

Begin = Callable[[str, Agent[Any, Any]], Awaitable[Any]]
"""Runs an agent under this id, to its end."""

LONG_AGENT = Agent(calling(TURNS), tools=[echo], name="long", max_iterations=None)
SHORT_AGENT = Agent(calling(SHORT), tools=[echo], name="short", max_iterations=None)


async def measured(begin: Begin) -> dict[str, float]:
    """Milliseconds of a turn in one run, and turns a second in many."""
    await begin("warm", SHORT_AGENT)
    began = perf_counter()
    await begin("alone", LONG_AGENT)
    alone = perf_counter() - began
    began = perf_counter()
    await asyncio.gather(*[begin(f"run-{number}", SHORT_AGENT) for number in range(RUNS)])
    together = perf_counter() - began
    return {"ms_turn": 1000 * alone / TURNS, "turns_s": RUNS * SHORT / together}


@asynccontextmanager
async def in_process(store: RunStore) -> AsyncGenerator[Begin]:
    async def begin(run_id: str, agent: Agent[Any, Any]) -> Any:
        return await advance(store, run_id, agent, "go")

    yield begin


@asynccontextmanager
async def on_dbos(store: PostgresStore) -> AsyncGenerator[Begin]:
    from dbos import DBOS

    from clark_agent.durable.dbos import dbos_config, install

    DBOS(config=dbos_config(store))
    agents = [LONG_AGENT, SHORT_AGENT]
    worker = install(store, agents, concurrency=RUNS, per_tenant=RUNS, poll=0.05)
    await asyncio.to_thread(DBOS.launch)

    async def begin(run_id: str, agent: Agent[Any, Any]) -> Any:
        await asyncio.to_thread(worker.submit, run_id, agent, "go")
        return await worker.result(run_id, agent)

    try:
        yield begin
    finally:
        await asyncio.to_thread(worker.stop)


@asynccontextmanager
async def on_temporal(store: PostgresStore, address: str) -> AsyncGenerator[Begin]:
    from temporalio.client import Client
    from temporalio.worker import Worker

    from clark_agent.durable.temporal import ClarkPlugin, start

    client = await Client.connect(address)
    plugin = ClarkPlugin(store, [LONG_AGENT, SHORT_AGENT])

    async def begin(run_id: str, agent: Agent[Any, Any]) -> Any:
        run = await start(client, agent, "go", id=f"{os.getpid()}-{run_id}", task_queue="clark")
        return await run.result()

    async with Worker(client, task_queue="clark", plugins=[plugin]):
        yield begin


async def main(subject: str, url: str, address: str, folder: Path) -> None:
    match subject:
        case "sqlite":
            subjects = in_process(SqliteStore(folder / "runs.db"))
        case "postgres":
            subjects = in_process(PostgresStore(url))
        case "postgres-each":
            subjects = in_process(PostgresStore(url, group_commit=False))
        case "dbos":
            subjects = on_dbos(PostgresStore(url))
        case _:
            subjects = on_temporal(PostgresStore(url), address)
    async with subjects as begin:
        figures = await measured(begin)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
