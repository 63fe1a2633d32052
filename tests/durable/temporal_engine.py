"""The fleet of `tests.durable.fleet` on Temporal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from temporalio.client import (
    Client,
    Interceptor,
    OutboundInterceptor,
    StartWorkflowInput,
    WorkflowHandle,
)
from temporalio.worker import Worker

from clark_agent import CancellationToken
from clark_agent.durable.temporal import ClarkPlugin, handle, start
from clark_agent.run_log import WaitingRequest
from tests.durable.fleet import Engine, Settings, agent_of, choose, prompt_of

_QUEUE = "agents"
_TASK_TIMEOUT = timedelta(seconds=2)


class _Impatient(Interceptor):
    """Starts workflows whose tasks another worker gets soon if one is frozen; 10 s are usual."""

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:  # noqa: A002
        return _ImpatientStart(next)


class _ImpatientStart(OutboundInterceptor):
    async def start_workflow(self, input: StartWorkflowInput) -> WorkflowHandle[Any, Any]:  # noqa: A002
        input.task_timeout = _TASK_TIMEOUT
        return await super().start_workflow(input)


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
            # How long the server keeps the workflows of a dead worker for it.
            sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
        )
        async with worker:
            await drain.wait()

    async def _connected(self) -> Client:
        if self._client is None:
            self._client = await Client.connect(self._settings.address, interceptors=[_Impatient()])
        return self._client


def engine(settings: Settings) -> Engine:
    return OnTemporal(settings)
