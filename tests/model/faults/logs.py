"""Faults of the run log: what is written when, what is read, resumed and replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from clark_agent import ToolResult
from clark_agent.run_log.records import (
    BatchEnded,
    Record,
    SteeringAccepted,
    ToolEnded,
    ToolProgress,
    ToolStarted,
)
from tests.model.faults.base import Fault, breaks, change_records


@breaks(
    "a tool starts before its record is written",
    "tests/run_log/test_exactly_once.py::test_a_tool_that_does_not_know_leaves_it_uncertain",
)
def _(fault: Fault) -> None:
    """The record is written with the next one."""
    late: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def change(append: Any) -> Any:
        def append_later(self: Any, record: Record, data: bytes) -> None:
            held = late.setdefault(self, [])
            if isinstance(record.entry, ToolStarted):
                fault.fired += 1
                held.append((record, data))
                return
            while held:
                append(self, *held.pop(0))
            append(self, record, data)

        return append_later

    fault.wrap("store writes", change)


@breaks(
    "a wrong checksum is right",
    "tests/run_log/test_damage.py::test_nothing_is_paid_from_a_damaged_log",
)
def _(fault: Fault) -> None:
    def change(is_sealed: Any) -> Any:
        def always(data: bytes, before: int) -> bool:
            fault.fired += not is_sealed(data, before)
            return True

        return always

    fault.wrap("checksum", change)


@breaks(
    "a resumed run repeats a call that has its result",
    "tests/run_log/test_exactly_once.py::"
    "test_it_is_not_asked_about_calls_that_have_ended_or_not_begun",
)
def _(fault: Fault) -> None:
    """It reads that a call of the newest batch has made progress, and not that it has ended."""

    def without_end(record: Record) -> Record:
        match record.entry:
            case ToolStarted(position=position):
                partial = ToolResult.text("")
            case ToolEnded(position=position, result=partial, by_runtime=None):
                pass
            case _:
                return record
        return replace(record, entry=ToolProgress(position=position, partial=partial))

    def change(records: Sequence[Record]) -> Iterator[Record]:
        is_over = [isinstance(record.entry, BatchEnded) for record in records]
        for index, record in enumerate(records):
            yield record if any(is_over[index:]) else without_end(record)

    change_records(fault, change)


@breaks(
    "a message from another process is delivered again by a resumed run",
    "tests/run_log/test_mail.py::test_mail_that_was_taken_is_not_taken_again",
)
def _(fault: Fault) -> None:
    def change(record: Record) -> Record:
        entry = record.entry
        if not isinstance(entry, SteeringAccepted) or entry.mail is None:
            return record
        return replace(record, entry=replace(entry, mail=None))

    change_records(fault, lambda records: map(change, records))


@breaks(
    "a replay notices no difference",
    "tests/replay/test_replay.py::test_another_prompt_is_noticed",
)
def _(fault: Fault) -> None:
    def change(drift: Any) -> Any:
        def none(report: Any) -> None:
            fault.fired += drift.__get__(report) is not None

        return property(none)

    fault.wrap("replay is compared", change)
