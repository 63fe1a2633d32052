"""Reads the records of one run: reports damaged records, and reads the rest.

All stores use it, so they all find the same faults: a row that is not a record, one with a wrong
checksum, one that a newer version wrote, one of another run, and numbers that are not consecutive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from clark_agent.errors import DecodeError, LogDamaged
from clark_agent.messages.wire import decode_json
from clark_agent.run_log._checksums import checksum_in, is_sealed
from clark_agent.run_log._version_1 import Upgrade, upgraded
from clark_agent.run_log.pages import START, LogPlace
from clark_agent.run_log.records import (
    RUN_LOG_VERSION,
    Entry,
    Record,
    RequestDecided,
    RunEnded,
    RunFailed,
    RunSuspended,
)
from clark_agent.run_log.store import LoadedRun, LogProblem

__all__ = ["FAILED", "SUSPENDED", "LogReader", "error_of", "is_torn", "outcome_of"]

FAILED = "failed"
"""The outcome of a run that ended with an error."""
SUSPENDED = "suspended"
"""The outcome of a run that waits, until it is resumed."""
_SHOWN = 200


class _Versioned(Struct):
    v: int = 0


def outcome_of(entry: Entry) -> str | None:
    """Return the outcome of the run if this is the last entry of its log."""
    match entry:
        case RunEnded(outcome=outcome):
            return outcome
        case RunFailed():
            return FAILED
        case RunSuspended() | RequestDecided():
            return SUSPENDED
        case _:
            return None


def error_of(run_id: str, problem: LogProblem) -> LogDamaged | DecodeError:
    """Return what to raise for a problem: `LogDamaged`, or `DecodeError` for a newer version."""
    if problem.is_newer:
        text = f"the log of run {run_id!r} cannot be read: {problem.reason}"
        return DecodeError(text, path=problem.where)
    return LogDamaged(run_id, problem.seq, problem.reason, path=problem.where)


class LogReader:
    """Takes the rows of one run in order.

    A log may begin with record 0 or 1. A record that is out of order is still read; one that is
    damaged, or of another run, is not.
    """

    def __init__(self, run_id: str, where: str, *, after: LogPlace = START) -> None:
        """Create a reader; ``where`` is the format of a place, such as ``line {}, byte {}``.
        ``after`` is where the first row is.
        """
        self._run_id = run_id
        self._where = where
        self._records: list[Record] = []
        self._problems: list[LogProblem] = []
        self._due: tuple[int, ...] = (0, 1) if after.seq < 0 else (after.seq + 1,)
        self._before = [after.checksum]
        """The checksums that the next record may continue from: that of the last valid record, and
        those in the invalid ones after it.
        """
        self._count = 0
        """The number of records so far."""
        self._last: int | None = None if after.seq < 0 else after.seq
        """The number of the last record."""
        self._sound = 0
        """How many of the records come before the first problem, if there is one."""
        self._unchecked = 0
        self._upgrade: Upgrade | None = None
        self._is_torn = False

    @property
    def due(self) -> tuple[int, ...]:
        """The numbers that the next record may have."""
        return self._due

    def is_damaged(self) -> bool:
        """Whether there is a problem."""
        return bool(self._problems)

    def take(self, data: bytes, *place: int, number: int | None = None) -> None:
        """Read a row. ``number`` is its number in the store, if the store has its own numbers."""
        due, sound, is_newer = self._due, len(self._records), False
        fault: str | None
        try:
            record = self._decoded(data)
        except DecodeError as error:
            fault, is_newer = error.reason, isinstance(error, _Unknown)
            self._before += [checksum_in(data) or 0]
            self._due = tuple([seq + 1 for seq in due])
        else:
            fault = self._fault(record, due, number)
            if record.run == self._run_id:
                self._due = (record.seq + 1,)
                self._records.append(record)
                self._count, self._last = self._count + 1, record.seq
                self._unchecked += record.crc is None
                self._before = [0 if record.crc is None else int(record.crc, 16)]
        if fault is not None:
            if not self._problems:
                self._sound = sound
            self._report(fault, data, place, due[0], is_newer=is_newer)

    def _report(
        self, fault: str, data: bytes, place: tuple[int, ...], seq: int, *, is_newer: bool = False
    ) -> None:
        where, shown = self._where.format(*place), data[:_SHOWN].decode("utf-8", "replace")
        self._problems.append(LogProblem(where, fault, shown, seq, is_newer=is_newer))

    def take_rest(self, data: bytes, *place: int) -> None:
        """Read the data after the last line break.

        A complete record counts; the rest of an interrupted write is dropped; anything else is a
        problem.
        """
        if is_torn(data, self._run_id, self._due):
            self._is_torn = True
        elif data:
            self.take(data, *place)

    def expect_end(self, last: int | None) -> None:
        """Report a problem if the last record does not have this number."""
        if self._last != last or last is None:
            self._sound = self._sound if self._problems else len(self._records)
            self._report(f"the log must end with record {last}", b"", self._due, self._due[0])

    @property
    def problem(self) -> LogProblem | None:
        """The first problem."""
        return self._problems[0] if self._problems else None

    def intact(self) -> tuple[Record, ...]:
        """The records before the first problem."""
        records = self._records[: self._sound] if self._problems else self._records
        return tuple(records if not self._unchecked else upgraded(records))

    def drain(self) -> list[Record]:
        """Return the records since the last call, up to the first problem. If there are none before
        it, raises its error.
        """
        records, self._records = self._records, []
        if self._problems:
            del records[self._sound :]
            self._sound = 0
            if not records:
                raise error_of(self._run_id, self._problems[0])
        if self._unchecked:
            self._upgrade = self._upgrade or Upgrade()
            records = list(map(self._upgrade.take, records))
        return records

    def loaded(self) -> LoadedRun:
        """Return the result."""
        records = self._records if not self._unchecked else upgraded(self._records)
        return LoadedRun(
            self._run_id,
            tuple(records),
            tuple(self._problems),
            is_torn=self._is_torn,
            unchecked=self._unchecked,
        )

    def _decoded(self, data: bytes) -> Record:
        """Decode the record. Raises `DecodeError` if it is damaged or cannot be read."""
        first, *others = self._before
        is_right = is_sealed(data, first) or any(is_sealed(data, other) for other in others)
        if not is_right and checksum_in(data) is not None:
            raise DecodeError("its checksum is wrong")
        if not data.strip():
            raise DecodeError("it is an empty line")
        try:
            record = decode_json(data, Record)
        except DecodeError as error:
            self._check_version(decode_json(data, _Versioned).v)
            kind = _Unknown if is_right else DecodeError
            raise kind(f"it is not a record that this version can read: {error}") from error
        self._check_version(record.v)
        if record.v > 1 and not is_right:
            raise DecodeError("it has no checksum")
        if record.v <= 1 and (is_right or self._count > self._unchecked):
            raise DecodeError("it has version 1, but the records around it do not")
        return record

    def _check_version(self, version: int) -> None:
        if version > RUN_LOG_VERSION:
            raise _Unknown(
                f"it was written by a newer version ({version}; this one reads up to "
                f"{RUN_LOG_VERSION})"
            )

    def _fault(self, record: Record, due: tuple[int, ...], number: int | None) -> str | None:
        """Return what is wrong with a record where one of these numbers is due, or None."""
        if record.run != self._run_id:
            return f"it is a record of the run {record.run!r}"
        if record.seq not in due:
            return f"it has number {record.seq} instead of {due[0]}"
        if number is not None and number != record.seq:
            return f"it is record {record.seq}, stored as {number}"
        return None


class _Unknown(DecodeError):
    """The record is intact, but unknown to this version."""


# --- torn ends --------------------------------------------------------------------------------

_TOKENS = re.compile(rb'(?s)"(?:[^"\\]++|\\.)*+\\?(?:"|\Z)|[\[{]|[]}]')
_CONTROL = re.compile(rb"[\0-\x1f]")


def is_torn(data: bytes, run_id: str, due: Iterable[int]) -> bool:
    """Return whether the data is an incomplete record whose write was interrupted."""
    if not data or _CONTROL.search(data):
        return False
    versions = range(1, RUN_LOG_VERSION + 1)
    if not any(_begins(data, run_id, version, seq) for version in versions for seq in due):
        return False
    depth = 0
    for token in _TOKENS.finditer(data):
        depth += token[0] in b"[{"
        depth -= token[0] in b"]}"
        if not depth:
            return False
    return True


def _begins(data: bytes, run_id: str, version: int, seq: int) -> bool:
    """Return whether the data is a prefix of a record with this number."""
    name = msgspec.json.encode(run_id.encode("utf-8", "replace").decode())
    start = b'{"v":%d,"seq":%d,"run":%b,"at":' % (version, seq, name)
    return data.startswith(start) or start.startswith(data)
