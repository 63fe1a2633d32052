"""Faults of runs in PostgreSQL, which a process has for a time."""

from __future__ import annotations

from typing import Any

from tests.model.faults.base import Fault, breaks


@breaks(
    "a worker that has lost its run writes on",
    "tests/durable/test_postgres.py::"
    "test_a_run_is_taken_over_when_the_lease_is_over_and_not_earlier",
)
def _(fault: Fault) -> None:
    """It writes under the claim of the worker that has taken the run over."""

    def change(wrote: Any) -> Any:
        def write(self: Any, group: Any) -> Any:
            for appender in group:
                with self._connector.connect() as connection:
                    rows = connection.execute(self._is_written.encode(), (appender.number,))
                    claim, _ = rows.fetchone()
                fault.fired += claim != appender.claim
                appender.claim = claim
            return wrote(self, group)

        return write

    fault.wrap("worker writes to PostgreSQL", change)
