"""The records of a trajectory, and their JSON.

A record describes one event of a run, without deltas: the run, the time, the number, and a payload
distinguished by ``kind``. A row without a version is read as version 0.
"""

from __future__ import annotations

from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct, field

from clark_agent.messages.wire import Stamp, date_message, decode_json, encode_json
from clark_agent.tools import ToolResult
from clark_agent.types import AgentMessage, NonNegativeInt, RunIdentity

__all__ = [
    "TRAJECTORY_SCHEMA_VERSION",
    "ContextTransformApplied",
    "MessageAppended",
    "OutputTokensEscalation",
    "ProviderRequestPrepared",
    "RunEnded",
    "RunStarted",
    "ToolEnded",
    "ToolGateApplied",
    "ToolGateConflictResolved",
    "ToolStarted",
    "TrajectoryPayload",
    "TrajectoryRecord",
    "TurnEnded",
    "TurnStarted",
    "decode_record",
    "encode_record",
]

TRAJECTORY_SCHEMA_VERSION = 1


class _Payload(Struct, frozen=True, tag_field="kind"):
    """Base of all payloads."""


class RunStarted(_Payload, frozen=True, tag="run_started"):
    """The run has its identity."""

    identity: RunIdentity


class RunEnded(_Payload, frozen=True, tag="run_ended"):
    """The run is over, with the messages that it added."""

    outcome: str
    new_messages: tuple[AgentMessage, ...]


class TurnStarted(_Payload, frozen=True, tag="turn_started"):
    """A turn began."""


class TurnEnded(_Payload, frozen=True, tag="turn_ended"):
    """A turn ended."""

    assistant: AgentMessage
    tool_results: tuple[AgentMessage, ...]


class MessageAppended(_Payload, frozen=True, tag="message_appended"):
    """A message is complete."""

    message: AgentMessage


class ToolStarted(_Payload, frozen=True, tag="tool_started"):
    """A tool began to run."""

    tool_call_id: str
    tool_name: str
    args: Any


class ToolEnded(_Payload, frozen=True, tag="tool_ended"):
    """A call has its result."""

    tool_call_id: str
    tool_name: str
    result: ToolResult
    is_error: bool


class ProviderRequestPrepared(_Payload, frozen=True, tag="provider_request_prepared"):
    """The dimensions of a request, without its text."""

    iteration: NonNegativeInt
    model_id: str | None
    system_prompt_chars: NonNegativeInt
    message_count: NonNegativeInt
    tool_count: NonNegativeInt
    tools: tuple[str, ...]


class ContextTransformApplied(_Payload, frozen=True, tag="context_transform_applied"):
    """How a plugin changed the number of messages."""

    iteration: NonNegativeInt
    plugin: str
    before_count: NonNegativeInt
    after_count: NonNegativeInt


class ToolGateApplied(_Payload, frozen=True, tag="tool_gate_applied", omit_defaults=True):
    """What one gate allowed; None if it did not restrict."""

    iteration: NonNegativeInt
    plugin: str
    allow: tuple[str, ...] | None = None


class ToolGateConflictResolved(
    _Payload, frozen=True, tag="tool_gate_conflict_resolved", kw_only=True, omit_defaults=True
):
    """The gates left no tool; this allowlist was used instead."""

    iteration: NonNegativeInt
    plugins: tuple[str, ...]
    chosen_plugin: str | None = None
    allow: tuple[str, ...]
    reason: str


class OutputTokensEscalation(_Payload, frozen=True, tag="output_tokens_escalation"):
    """A cut-off answer was discarded and requested again with a larger cap."""

    attempt: NonNegativeInt
    prev_cap: NonNegativeInt
    new_cap: NonNegativeInt


TrajectoryPayload: TypeAlias = (
    RunStarted
    | RunEnded
    | TurnStarted
    | TurnEnded
    | MessageAppended
    | ToolStarted
    | ToolEnded
    | ProviderRequestPrepared
    | ContextTransformApplied
    | ToolGateApplied
    | ToolGateConflictResolved
    | OutputTokensEscalation
)


class TrajectoryRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a run. ``seq`` counts from 0 within the run."""

    schema_version: NonNegativeInt = field(default_factory=int)
    seq: NonNegativeInt
    run_id: str | None = None
    parent_run_id: str | None = None
    depth: NonNegativeInt = field(default_factory=int)
    recorded_at_unix_ms: NonNegativeInt
    payload: TrajectoryPayload


class _RunEndedStamps(Struct):
    """The timestamps of a payload's messages as they were written."""

    new_messages: tuple[Stamp, ...]

    def in_order(self) -> tuple[Stamp, ...]:
        return self.new_messages


class _TurnEndedStamps(Struct):
    assistant: Stamp
    tool_results: tuple[Stamp, ...]

    def in_order(self) -> tuple[Stamp, ...]:
        return (self.assistant, *self.tool_results)


class _MessageAppendedStamps(Struct):
    message: Stamp

    def in_order(self) -> tuple[Stamp, ...]:
        return (self.message,)


_S = TypeVar("_S")


class _Stamped(Struct, Generic[_S]):
    payload: _S


_STAMPS: dict[type, Any] = {
    RunEnded: _Stamped[_RunEndedStamps],
    TurnEnded: _Stamped[_TurnEndedStamps],
    MessageAppended: _Stamped[_MessageAppendedStamps],
}


def encode_record(record: TrajectoryRecord) -> bytes:
    """Return the record's JSON."""
    return encode_json(record)


def decode_record(data: bytes | str) -> TrajectoryRecord:
    """Decode a record.

    Raises `clark_agent.errors.DecodeError`, which names the path and the reason.
    """
    record = decode_json(data, TrajectoryRecord)
    messages = _messages(record.payload)
    if any(message.timestamp is None for message in messages):
        kind = _STAMPS[type(record.payload)]
        stamps = decode_json(data, kind).payload.in_order()
        for message, stamp in zip(messages, stamps, strict=True):
            date_message(message, stamp)
    return record


def _messages(payload: TrajectoryPayload) -> tuple[AgentMessage, ...]:
    match payload:
        case RunEnded():
            return payload.new_messages
        case TurnEnded():
            return (payload.assistant, *payload.tool_results)
        case MessageAppended():
            return (payload.message,)
        case _:
            return ()
