"""Converts between the run log and the records that other implementations share.

A trajectory has no deltas, no requests and no steering, so a log made from one cannot be replayed
exactly; it can be read, forked, exported and compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from clark_agent.errors import DecodeError
from clark_agent.run_log.fold import fold, result_message
from clark_agent.run_log.records import (
    RUN_LOG_VERSION,
    Answered,
    Asked,
    BatchEnded,
    Entry,
    MessagesAdded,
    Record,
    RunBegan,
    RunEnded,
    RunFailed,
    ToolEnded,
    ToolStarted,
)
from clark_agent.run_log.store import LoadedRun
from clark_agent.tools import ToolResult
from clark_agent.trajectory import records as rec
from clark_agent.trajectory.records import TrajectoryPayload, TrajectoryRecord
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    RunIdentity,
    ToolCall,
    ToolResultMessage,
)

__all__ = ["from_trajectory", "to_trajectory"]


def to_trajectory(loaded: LoadedRun) -> list[TrajectoryRecord]:
    """Convert the log of a run to trajectory records. Raises like `fold` for a damaged log."""
    fold(loaded)
    writer = _Writer()
    records: list[TrajectoryRecord] = []
    identity: RunIdentity | None = None
    for record in loaded.records:
        if isinstance(record.entry, RunBegan):
            identity = record.entry.identity
        for payload in writer.payloads(record.entry):
            records.append(
                TrajectoryRecord(
                    schema_version=rec.TRAJECTORY_SCHEMA_VERSION,
                    seq=len(records),
                    run_id=record.run,
                    parent_run_id=None if identity is None else identity.parent_run_id,
                    depth=0 if identity is None else identity.depth,
                    recorded_at_unix_ms=record.at,
                    payload=payload,
                )
            )
    return records


class _Writer:
    def __init__(self) -> None:
        self._messages: list[AgentMessage] = []
        self._answer: AssistantMessage | None = None
        self._results: dict[int, ToolResult] = {}
        self._returned: list[ToolResultMessage] = []
        self._names: dict[int, str] = {}
        self._discarded: AssistantMessage | None = None
        self._turn_open = False
        self._turn = 0

    def payloads(self, entry: Entry) -> Iterator[TrajectoryPayload]:
        match entry:
            case RunBegan():
                yield rec.RunStarted(entry.identity)
                yield from self._begin_turn()
                yield from self._append(entry.prompts)
            case MessagesAdded():
                if entry.source == "turn":
                    yield from self._begin_turn()
                if entry.turn is not None:
                    yield from self._enter(entry.turn)
                yield from self._append(entry.messages)
                # Only a text that was accepted as the final answer.
                self._returned += [m for m in entry.messages if isinstance(m, ToolResultMessage)]
            case Asked():
                yield from self._enter(entry.turn)
            case Answered(discarded=None):
                self._answer = entry.message
                self._names = {}
                yield from self._append([entry.message])
            case Answered():
                self._discarded = entry.message
            case ToolStarted():
                call = self._call(entry.position)
                arguments = call.arguments if entry.arguments is None else entry.arguments
                yield rec.ToolStarted(call.id, entry.tool_name, arguments)
            case ToolEnded():
                call = self._call(entry.position)
                self._results[entry.position] = entry.result
                name = self._names[entry.position] = entry.tool_name or call.name
                yield rec.ToolEnded(call.id, name, entry.result, entry.result.is_error)
            case BatchEnded():
                yield from self._append(self._batch(entry))
            case RunEnded():
                yield from self._end_turn()
                yield rec.RunEnded(entry.outcome, tuple(self._messages))
            case RunFailed():
                yield from self._end_turn()
                yield rec.RunEnded("failed", tuple(self._messages))
            case _:
                pass

    def _enter(self, turn: int) -> Iterator[TrajectoryPayload]:
        if turn > self._turn and self._turn:
            yield from self._begin_turn()
        self._turn = turn

    def _begin_turn(self) -> Iterator[TrajectoryPayload]:
        if self._turn_open and self._answer is None and self._discarded is None:
            return  # it has just begun
        yield from self._end_turn()
        self._turn_open = True
        yield rec.TurnStarted()

    def _end_turn(self) -> Iterator[TrajectoryPayload]:
        message = self._answer or self._discarded
        if self._turn_open and message is not None:
            yield rec.TurnEnded(message, tuple(self._returned))
        self._turn_open, self._answer, self._discarded, self._returned = False, None, None, []

    def _append(self, messages: Iterable[AgentMessage]) -> Iterator[TrajectoryPayload]:
        for message in messages:
            self._messages.append(message)
            yield rec.MessageAppended(message)

    def _call(self, position: int) -> ToolCall:
        assert self._answer is not None
        return self._answer.tool_calls[position]

    def _batch(self, ended: BatchEnded) -> list[ToolResultMessage]:
        assert self._answer is not None
        calls = self._answer.tool_calls
        positions = range(len(calls)) if ended.positions is None else ended.positions
        times = ended.time if isinstance(ended.time, tuple) else (ended.time,) * len(calls)
        self._returned = [
            result_message(
                calls[position], self._results[position], time, self._names.get(position)
            )
            for position, time in zip(positions, times, strict=True)
        ]
        self._results = {}
        return self._returned


def from_trajectory(records: Iterable[TrajectoryRecord]) -> LoadedRun:
    """Convert trajectory records to the log of a run. Raises `DecodeError` if there is none."""
    given = list(records)
    identity = next(
        (r.payload.identity for r in given if isinstance(r.payload, rec.RunStarted)), None
    )
    if identity is None:
        raise DecodeError("no record identifies the run", path="record 0")
    reader = _Reader()
    entries: list[tuple[int, Entry]] = [(given[0].recorded_at_unix_ms, RunBegan(identity=identity))]
    for record in given:
        if record.run_id not in (None, identity.run_id):
            continue  # another run's record
        entries += [(record.recorded_at_unix_ms, entry) for entry in reader.entries(record.payload)]
    return LoadedRun(
        identity.run_id,
        tuple(
            [
                Record(RUN_LOG_VERSION, seq, identity.run_id, at, entry)
                for seq, (at, entry) in enumerate(entries)
            ]
        ),
    )


class _Reader:
    def __init__(self) -> None:
        self._turn = 0
        self._count = 0
        self._calls: tuple[ToolCall, ...] = ()
        self._positions: list[int] = []
        self._times: list[int] = []

    def entries(self, payload: TrajectoryPayload) -> Iterator[Entry]:
        match payload:
            case rec.TurnStarted():
                self._turn += 1
            case rec.MessageAppended(AssistantMessage() as answer):
                yield Asked(turn=max(1, self._turn), messages=self._count, digest="")
                yield Answered(message=answer)
                self._count += 1
                self._calls = answer.tool_calls
                self._positions, self._times = [], []
            case rec.MessageAppended(ToolResultMessage() as result) if self._calls:
                yield from self._result(result)
            case rec.MessageAppended(message):
                self._count += 1
                yield MessagesAdded(source="loop", messages=(message,))
            case rec.RunEnded():
                failed = payload.outcome in ("failed", "error", "aborted")
                yield (
                    RunFailed(error=payload.outcome, text=payload.outcome)
                    if failed
                    else RunEnded(outcome=payload.outcome)
                )
            case _:
                pass

    def _result(self, message: ToolResultMessage) -> Iterator[Entry]:
        """Yield the result of one call, and after the last one the end of the batch."""
        position = next(
            (
                index
                for index, call in enumerate(self._calls)
                if call.id == message.tool_call_id and index not in self._positions
            ),
            None,
        )
        if position is None:
            yield MessagesAdded(source="loop", messages=(message,))
            return
        self._count += 1
        result = ToolResult(
            message.content,
            is_error=message.is_error,
            narration=message.narration,
            details=message.details,
        )
        yield ToolStarted(
            position=position, tool_call_id=message.tool_call_id, tool_name=message.tool_name
        )
        is_renamed = message.tool_name != self._calls[position].name
        yield ToolEnded(
            position=position,
            tool_call_id=message.tool_call_id,
            tool_name=message.tool_name if is_renamed else None,
            result=result,
        )
        self._positions.append(position)
        self._times.append(message.timestamp or 0)
        if len(self._positions) == len(self._calls):
            yield BatchEnded(tuple(self._times), tuple(self._positions))
            self._calls = ()
