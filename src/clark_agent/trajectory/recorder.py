"""TrajectoryRecorder: an observer that writes the events of a run as persistent records."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from inspect import isawaitable
from typing import Protocol, get_args

from clark_agent import events as ev
from clark_agent.clock import Clock, SystemClock
from clark_agent.events import AgentEvent
from clark_agent.trajectory import records as rec
from clark_agent.trajectory.records import TrajectoryPayload, TrajectoryRecord
from clark_agent.types import AssistantMessage, RunIdentity

__all__ = ["InMemoryTrajectorySink", "TrajectoryRecorder", "TrajectorySink"]

logger = logging.getLogger(__name__)


class TrajectorySink(Protocol):
    """Receives the records.

    Contract: keeps their order. The recorder logs an exception, and the run continues.
    """

    def record(self, record: TrajectoryRecord, /) -> Awaitable[None] | None:
        """Store a record; plain or async."""
        ...


class InMemoryTrajectorySink:
    """Keeps the records in a list."""

    def __init__(self) -> None:
        self.records: list[TrajectoryRecord] = []

    def record(self, record: TrajectoryRecord) -> None:
        """Store the record."""
        self.records.append(record)


class TrajectoryRecorder:
    """Turns events into records, without deltas, numbered from 0 in each run."""

    name = "trajectory_recorder"
    observes = tuple(
        kind
        for kind in get_args(AgentEvent)
        if kind not in (ev.MessageUpdate, ev.ToolExecutionUpdate, ev.ChildRunEvent)
    )

    def __init__(self, sink: TrajectorySink, *, clock: Clock | None = None) -> None:
        self._sink = sink
        self._clock = clock or SystemClock()
        self._identity: RunIdentity | None = None
        self._seq = 0
        self._answer: TrajectoryRecord | None = None
        """The newest answer, until it is known whether it enters the transcript."""

    def for_run(self) -> TrajectoryRecorder:
        """Return a new recorder with the same sink."""
        return TrajectoryRecorder(self._sink, clock=self._clock)

    async def on_event(self, event: AgentEvent) -> None:
        """Write the record of an event, if it has one."""
        if isinstance(event, ev.RunIdentified):
            self._identity = event.identity
        answer, self._answer = self._answer, None
        if answer is not None and not isinstance(event, ev.MessageDiscarded):
            await self._write(answer)
        payload = payload_of(event)
        if payload is None:
            return
        record = self._record(payload)
        if isinstance(event, ev.MessageEnd) and isinstance(event.message, AssistantMessage):
            self._answer = record
        else:
            await self._write(record)

    def _record(self, payload: TrajectoryPayload) -> TrajectoryRecord:
        identity = self._identity
        return TrajectoryRecord(
            schema_version=rec.TRAJECTORY_SCHEMA_VERSION,
            seq=self._seq,
            run_id=None if identity is None else identity.run_id,
            parent_run_id=None if identity is None else identity.parent_run_id,
            depth=0 if identity is None else identity.depth,
            recorded_at_unix_ms=self._clock.now_ms(),
            payload=payload,
        )

    async def _write(self, record: TrajectoryRecord) -> None:
        self._seq += 1
        try:
            pending = self._sink.record(record)
            if isawaitable(pending):
                await pending
        except Exception:
            logger.exception("the trajectory sink failed; the run continues without the record")


def payload_of(event: AgentEvent) -> TrajectoryPayload | None:
    """Return the payload for an event; None for events that are not recorded."""
    match event:
        case ev.RunIdentified():
            return rec.RunStarted(event.identity)
        case ev.AgentEnd():
            return rec.RunEnded("ended", tuple(event.messages))
        case ev.TurnStart():
            return rec.TurnStarted()
        case ev.TurnEnd():
            return rec.TurnEnded(event.message, tuple(event.tool_results))
        case ev.MessageEnd():
            return rec.MessageAppended(event.message)
        case ev.ToolExecutionStart():
            return rec.ToolStarted(event.tool_call_id, event.tool_name, event.args)
        case ev.ToolExecutionEnd():
            return rec.ToolEnded(event.tool_call_id, event.tool_name, event.result, event.is_error)
        case _:
            return _payload_of_request(event)


def _payload_of_request(event: AgentEvent) -> TrajectoryPayload | None:
    match event:
        case ev.ProviderRequestPrepared():
            return rec.ProviderRequestPrepared(
                event.iteration,
                event.model_id,
                len(event.system_prompt),
                len(event.messages),
                len(event.tools),
                tuple([tool.name for tool in event.tools]),
            )
        case ev.ContextTransformApplied():
            return rec.ContextTransformApplied(
                event.iteration, event.plugin, len(event.before), len(event.after)
            )
        case ev.ToolGateApplied():
            allow = None if event.allow is None else tuple(event.allow)
            return rec.ToolGateApplied(event.iteration, event.plugin, allow)
        case ev.ToolGateConflictResolved():
            return rec.ToolGateConflictResolved(
                iteration=event.iteration,
                plugins=tuple(event.plugins),
                chosen_plugin=event.chosen_plugin,
                allow=tuple(event.allow),
                reason=event.reason,
            )
        case ev.OutputTokensEscalation():
            return rec.OutputTokensEscalation(event.attempt, event.prev_cap, event.new_cap)
        case _:
            return None
