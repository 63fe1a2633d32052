"""Faults of taking runs over: a run has one writer, and who lost it writes nothing more."""

from __future__ import annotations

from typing import Any

from clark_agent import run_log as logs
from tests.model.faults.base import Fault, breaks

RULES = "tests/run_log/test_stores.py::test_a_store_in_memory_keeps_the_rules"


@breaks(
    "a run that a process works on is taken by another one",
    "tests/run_log/test_resume.py::test_a_run_that_somebody_writes_is_not_resumed",
)
def _(fault: Fault) -> None:
    def change(reopen: Any) -> Any:
        def take(self: logs.MemoryStore, run_id: str, *, after: int) -> Any:
            taken = run_id in self._busy
            fault.fired += taken
            self._busy.discard(run_id)
            return reopen(self, run_id, after=after)

        return take

    fault.wrap("store continues a run", change)


@breaks("a run that has changed since it was read is continued", RULES)
def _(fault: Fault) -> None:
    def change(reopen: Any) -> Any:
        def take(self: logs.MemoryStore, run_id: str, *, after: int) -> Any:
            last = self.load(run_id).records[-1].seq
            fault.fired += last != after
            return reopen(self, run_id, after=last)

        return take

    fault.wrap("store continues a run", change)


@breaks("a log that was closed is written", RULES)
def _(fault: Fault) -> None:
    """Who closes it lets others write, and goes on."""

    def change(close: Any) -> Any:
        def go_on(self: Any) -> None:
            close(self)
            fault.fired += 1
            self._is_closed = False

        return go_on

    fault.wrap("store lets others write", change)
