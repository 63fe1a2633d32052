"""The fleet of `tests.durable.fleet` on DBOS."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dbos import DBOS

from clark_agent import CancellationToken
from clark_agent.durable.dbos import connect, dbos_config, install
from clark_agent.run_log import WaitingRequest, decide
from tests.durable.fleet import Engine, Settings, agent_of, choose, prompt_of


class OnDbos:
    """A queue in the database of the store."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = settings.open_store()

    async def submit(self, run_ids: Sequence[str]) -> None:
        await asyncio.to_thread(self._submit, run_ids)

    def _submit(self, run_ids: Sequence[str]) -> None:
        runs = connect(self._store)
        for number, run_id in enumerate(run_ids):
            runs.submit(run_id, "root", prompt_of(run_id), tenant=f"tenant-{number % 3}")

    async def decide(self, request: WaitingRequest) -> None:
        if self._store.on_wake is None:
            await asyncio.to_thread(connect, self._store)
        await decide(
            self._store, request.root_run_id, request.request_id, choose(request), by="decider"
        )

    async def work(self, drain: CancellationToken) -> None:
        DBOS(config=dbos_config(self._store))
        worker = install(
            self._store,
            [agent_of(self._settings)],
            concurrency=self._settings.concurrency,
            poll=0.2,
            sweep=self._settings.lease / 3,
        )
        await asyncio.to_thread(DBOS.launch)
        await drain.wait()
        await asyncio.to_thread(worker.stop)


def engine(settings: Settings) -> Engine:
    return OnDbos(settings)
