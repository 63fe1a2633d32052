"""Faults of leases change what is in the log of a run that another process has taken over."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress

import pytest

from clark_agent.run_log import RunTakenOver
from clark_agent.run_log.postgres import PostgresStore
from tests.durable.servers import Postgres
from tests.durable.test_postgres import Time, wait_for_first_beat
from tests.model.faults import check, promises_of
from tests.run_log.storing import append, some_records


@pytest.mark.parametrize("promise", promises_of("leases"))
def test_a_fault_changes_who_writes_a_run(promise: str, postgres_server: Postgres) -> None:
    def taken_over() -> object:
        """The numbers of the records, after a process has written a run that it had lost."""
        clock, url = Time(), postgres_server.create_database()
        records = some_records("r", 3)
        with (
            closing(PostgresStore(url, lease=10_000, clock=clock)) as here,
            closing(PostgresStore(url, lease=10_000, clock=clock)) as there,
        ):
            first = here.create("r")
            append(first, records[:1])
            wait_for_first_beat(here)
            clock.ms += 20_000_000
            second = there.reopen("r", after=0)
            append(second, [])
            with suppress(RunTakenOver):
                append(first, records[1:2])
            return [record.seq for record in there.load("r").records]

    check(promise, lambda: asyncio.to_thread(taken_over))
