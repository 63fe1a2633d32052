"""Reading the records of one run: what cannot be read is reported, and the rest is read.

Both stores read with this, so both find the same faults: a row that is no record, one that a newer
version wrote, one of another run, and numbers that do not follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from clark_agent.errors import DecodeError
from clark_agent.run_log.records import RUN_LOG_VERSION, Entry, Record, RunEnded, RunFailed
from clark_agent.run_log.store import LogProblem
from clark_agent.wire import decode_json

__all__ = ["FAILED", "is_json", "outcome_of", "read_records"]

FAILED = "failed"
"""The outcome of a run that ended with an error."""
_SHOWN = 200


class _Versioned(Struct):
    v: int = 0


def outcome_of(entry: Entry) -> str | None:
    """How the run ended, if this is how its log ends."""
    if isinstance(entry, RunEnded):
        return entry.outcome
    return FAILED if isinstance(entry, RunFailed) else None


def is_json(data: bytes) -> bool:
    """Whether this is JSON, of whatever."""
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


def read_records(
    run_id: str, rows: Iterable[tuple[int, bytes]], *, noun: str
) -> tuple[tuple[Record, ...], tuple[LogProblem, ...]]:
    """The records that the rows hold, and what is wrong with them.

    A row comes with a number; ``noun`` says what that counts. A log may begin with 0 or with 1. A
    record that is out of order is read all the same, one of another run is not.
    """
    records: list[Record] = []
    problems: list[LogProblem] = []
    due: tuple[int, ...] = (0, 1)
    for number, data in rows:
        try:
            record = decode_json(data, Record)
        except DecodeError as error:
            reason: str | None = _newer(data) or str(error)
            due = tuple([seq + 1 for seq in due])
        else:
            reason = _fault(record, run_id, due)
            if record.run == run_id:
                due = (record.seq + 1,)
                if record.v <= RUN_LOG_VERSION:
                    records.append(record)
        if reason is not None:
            problems.append(LogProblem(f"{noun} {number}", reason, _shown(data)))
    return tuple(records), tuple(problems)


def _fault(record: Record, run_id: str, due: tuple[int, ...]) -> str | None:
    """What is wrong with a record, if it stands where one of these numbers is due."""
    if record.v > RUN_LOG_VERSION:
        return _newer_version(record.v)
    if record.run != run_id:
        return f"it is a record of the run {record.run!r}"
    if record.seq not in due:
        return f"it has the number {record.seq}, where {due[0]} is due"
    return None


def _newer(data: bytes) -> str | None:
    """Why a row cannot be read, if a newer version wrote it."""
    try:
        version = decode_json(data, _Versioned).v
    except DecodeError:
        return None
    return _newer_version(version) if version > RUN_LOG_VERSION else None


def _newer_version(version: int) -> str:
    return f"it was written by a newer version ({version}; this one reads up to {RUN_LOG_VERSION})"


def _shown(data: bytes) -> str:
    return data[:_SHOWN].decode("utf-8", "replace")
