"""A Temporal worker in a process of its own, to be killed, stopped and frozen.

``python -m tests.durable.temporal_driver ADDRESS QUEUE FOLDER STORE NAME``. The tool ``pay`` writes
a line into the file ``effects`` when it begins, and returns when the file ``go`` is there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from clark_agent import Agent, StreamRequest, ToolCall, ToolContext, ToolResultMessage, tool
from clark_agent.durable.temporal import ClarkPlugin
from clark_agent.run_log import SqliteStore
from clark_agent.run_log.postgres import PostgresStore
from clark_agent.testing import ScriptedStream, call

__all__ = ["open_store", "payer"]

LEASE = 2.0


def payer(folder: Path, name: str = "here") -> Agent[str, None]:
    """An agent that pays once and says what came of it, whichever process goes on with it."""

    @tool
    async def pay(ctx: ToolContext, order: str) -> str:
        """Pay for an order."""
        with (folder / "effects").open("a") as effects:
            effects.write(f"{order} {ctx.idempotency_key} {name}\n")
        while not (folder / "go").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return f"paid {order}"

    def next_step(request: StreamRequest) -> str | ToolCall:
        last = request.messages[-1]
        if isinstance(last, ToolResultMessage):
            return f"The tool said: {last.plain_text}"
        return call("pay", order=last.plain_text)

    model = ScriptedStream([next_step], at_end="repeat")
    return Agent(model, name="payer", tools=[pay])


def open_store(url: str, folder: Path) -> SqliteStore | PostgresStore:
    """The store at this URL, or with ``sqlite`` one in the folder."""
    if url == "sqlite":
        return SqliteStore(folder / "runs.db")
    return PostgresStore(url, lease=LEASE)


async def main(address: str, queue: str, folder: Path, url: str, name: str) -> None:
    """Work until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    store = open_store(url, folder)
    client = await Client.connect(address)
    plugin = ClarkPlugin(store, agents=[payer(folder, name)])
    async with Worker(
        client,
        task_queue=queue,
        plugins=[plugin],
        # How long the server keeps the workflows of a dead worker for it.
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
    ):
        print("ready", flush=True)
        await stop.wait()
    print("stopped", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
    os._exit(0)
