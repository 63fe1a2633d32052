"""The fleet of `tests.durable.fleet` on Temporal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from temporalio.client import Client
from temporalio.worker import Worker

from clark_agent import CancellationToken
from clark_agent.durable.temporal import ClarkPlugin, handle, start
from clark_agent.run_log import WaitingRequest
from tests.durable.fleet import Engine, Settings, agent_of, choose, prompt_of

_QUEUE = "agents"


class OnTemporal:
    """Workflows on one task queue."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._agent = agent_of(settings)
        self._client: Client | None = None

    async def submit(self, run_ids: Sequence[str]) -> None:
        client = await self._connected()
        lease = self._settings.lease
        async with asyncio.TaskGroup() as group:
            for run_id in run_ids:
                prompt = prompt_of(run_id)
                group.create_task(
                    start(
                        client, self._agent, prompt, id=run_id, task_queue=_QUEUE, heartbeat=lease
                    )
                )

    async def decide(self, request: WaitingRequest) -> None:
        run = handle(await self._connected(), self._agent, request.root_run_id)
        await run.decide(request.request_id, choose(request), by="decider")

    async def work(self, drain: CancellationToken) -> None:
        plugin = ClarkPlugin(self._settings.open_store(), [self._agent])
        worker = Worker(
            await self._connected(),
            task_queue=_QUEUE,
            plugins=[plugin],
            max_concurrent_activities=self._settings.concurrency,
            graceful_shutdown_timeout=timedelta(seconds=30),
        )
        async with worker:
            await drain.wait()

    async def _connected(self) -> Client:
        if self._client is None:
            self._client = await Client.connect(self._settings.address)
        return self._client


def engine(settings: Settings) -> Engine:
    return OnTemporal(settings)
