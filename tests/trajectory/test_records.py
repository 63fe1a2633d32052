"""Trajectory records: every kind survives the wire, and old rows can still be read."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clark_agent import AgentMessage, SystemMessage, ToolResult, UserMessage
from clark_agent.clock import now_ms
from clark_agent.errors import DecodeError
from clark_agent.trajectory import (
    TRAJECTORY_SCHEMA_VERSION,
    TrajectoryPayload,
    TrajectoryRecord,
    decode_record,
    encode_record,
    records,
)
from tests.strategies import (
    IDENTITIES,
    TEXT,
    dated,
    messages,
    open_json,
    optional,
    tool_results,
    transcripts,
)

unsigned = st.integers(0, 2**32 - 1)
names = st.lists(TEXT, max_size=3).map(tuple)
dated_messages = st.builds(dated, messages(), unsigned)
dated_transcripts = st.lists(dated_messages, max_size=3).map(tuple)

PAYLOADS: dict[type[Any], st.SearchStrategy[Any]] = {
    records.RunStarted: st.builds(records.RunStarted, IDENTITIES),
    records.RunEnded: st.builds(records.RunEnded, TEXT, dated_transcripts),
    records.TurnStarted: st.just(records.TurnStarted()),
    records.TurnEnded: st.builds(records.TurnEnded, dated_messages, dated_transcripts),
    records.MessageAppended: st.builds(records.MessageAppended, dated_messages),
    records.ToolStarted: st.builds(records.ToolStarted, TEXT, TEXT, open_json()),
    records.ToolEnded: st.builds(records.ToolEnded, TEXT, TEXT, tool_results(), st.booleans()),
    records.ProviderRequestPrepared: st.builds(
        records.ProviderRequestPrepared,
        *[unsigned, optional(TEXT), unsigned, unsigned, unsigned, names],
    ),
    records.ContextTransformApplied: st.builds(
        records.ContextTransformApplied, unsigned, TEXT, unsigned, unsigned
    ),
    records.ToolGateApplied: st.builds(records.ToolGateApplied, unsigned, TEXT, optional(names)),
    records.ToolGateConflictResolved: st.builds(
        records.ToolGateConflictResolved,
        iteration=unsigned,
        plugins=names,
        chosen_plugin=optional(TEXT),
        allow=names,
        reason=TEXT,
    ),
    records.OutputTokensEscalation: st.builds(
        records.OutputTokensEscalation, unsigned, unsigned, unsigned
    ),
}


ORDER = (
    "schema_version",
    "seq",
    "run_id",
    "parent_run_id",
    "depth",
    "recorded_at_unix_ms",
    "payload",
)


def test_every_payload_is_tested() -> None:
    assert set(PAYLOADS) == set(get_args(TrajectoryPayload))


def recorded(payload: TrajectoryPayload) -> TrajectoryRecord:
    return TrajectoryRecord(seq=3, recorded_at_unix_ms=5, payload=payload)


@pytest.mark.parametrize("kind", PAYLOADS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_a_record_survives_the_wire(kind: type[Any], data: st.DataObject) -> None:
    record = TrajectoryRecord(
        schema_version=data.draw(unsigned),
        seq=data.draw(unsigned),
        run_id=data.draw(optional(TEXT)),
        parent_run_id=data.draw(optional(TEXT)),
        depth=data.draw(unsigned),
        recorded_at_unix_ms=data.draw(unsigned),
        payload=data.draw(PAYLOADS[kind]),
    )
    written = encode_record(record)
    assert decode_record(written) == record
    assert encode_record(decode_record(written.decode())) == written
    row = json.loads(written)
    assert list(row) == [name for name in ORDER if name in row]
    assert {"schema_version", "depth"} <= set(row)
    assert next(iter(row["payload"])) == "kind"
    assert row["payload"]["kind"] == kind.__struct_config__.tag


@pytest.mark.parametrize(
    ("payload", "written"),
    [
        (records.TurnStarted(), '{"kind":"turn_started"}'),
        (
            records.RunEnded("done", (SystemMessage("s", 1),)),
            '{"kind":"run_ended","outcome":"done",'
            '"new_messages":[{"role":"system","content":"s","timestamp":1}]}',
        ),
        (
            records.ToolEnded("id", "look", ToolResult(()), False),
            '{"kind":"tool_ended","tool_call_id":"id","tool_name":"look","result":{"content":[]},'
            '"is_error":false}',
        ),
        (
            records.ProviderRequestPrepared(0, None, 1, 2, 3, ("a",)),
            '{"kind":"provider_request_prepared","iteration":0,"model_id":null,'
            '"system_prompt_chars":1,"message_count":2,"tool_count":3,"tools":["a"]}',
        ),
        (
            records.ToolGateApplied(0, "gate"),
            '{"kind":"tool_gate_applied","iteration":0,"plugin":"gate"}',
        ),
        (
            records.ToolGateConflictResolved(iteration=0, plugins=(), allow=("a",), reason="r"),
            '{"kind":"tool_gate_conflict_resolved","iteration":0,"plugins":[],"allow":["a"],'
            '"reason":"r"}',
        ),
    ],
)
def test_written_form(payload: TrajectoryPayload, written: str) -> None:
    head = '{"schema_version":0,"seq":3,"depth":0,"recorded_at_unix_ms":5,"payload":'
    assert encode_record(recorded(payload)).decode() == head + written + "}"


def test_a_row_without_a_version_is_of_version_0() -> None:
    row = '{"seq":3,"recorded_at_unix_ms":5,"payload":{"kind":"turn_started"}}'
    assert decode_record(row) == recorded(records.TurnStarted())
    assert decode_record(row).schema_version == 0
    assert TRAJECTORY_SCHEMA_VERSION == 1


# --- messages inside records ------------------------------------------------------------------


def holding(inner: list[AgentMessage]) -> list[TrajectoryPayload]:
    """All payloads that have messages."""
    payloads: list[TrajectoryPayload] = [records.RunEnded("done", tuple(inner))]
    if inner:
        payloads.append(records.TurnEnded(inner[0], tuple(inner[1:])))
        payloads.append(records.MessageAppended(inner[0]))
    return payloads


def held(record: TrajectoryRecord) -> tuple[AgentMessage, ...]:
    match record.payload:
        case records.RunEnded(new_messages=found):
            return found
        case records.TurnEnded(assistant=first, tool_results=rest):
            return (first, *rest)
        case records.MessageAppended(message=only):
            return (only,)
        case other:
            raise AssertionError(other)


@given(transcripts())
def test_undated_messages_are_dated_when_they_are_read(inner: list[AgentMessage]) -> None:
    for payload in holding(inner):
        record = recorded(payload)
        before = now_ms()
        back = held(decode_record(encode_record(record)))
        for read, written in zip(back, held(record), strict=True):
            if written.timestamp is None:
                assert read.timestamp is not None
                assert before <= read.timestamp <= now_ms()
                assert dated(read, None) == written
            else:
                assert read == written


@given(transcripts(), st.data())
def test_explicit_null_timestamps_stay_none(inner: list[AgentMessage], data: st.DataObject) -> None:
    for payload in holding(inner):
        row = json.loads(encode_record(recorded(payload)))
        null: list[bool] = []
        for message in _rows(row["payload"]):
            null.append(data.draw(st.booleans()))
            if null[-1]:
                message["timestamp"] = None
        back = held(decode_record(json.dumps(row)))
        assert [message.timestamp is None for message in back] == null


def _rows(payload: dict[str, Any]) -> list[dict[str, Any]]:
    if "new_messages" in payload:
        return list(payload["new_messages"])
    return [payload.get("assistant") or payload["message"], *payload.get("tool_results", [])]


# --- what is not known, and what cannot be read -----------------------------------------------


@pytest.mark.parametrize(
    "unknown",
    [
        {"future": [1]},
        {"message": "text"},
        {"assistant": {"role": "system"}},
        {"tool_results": [{}]},
        {"new_messages": 7},
    ],
    ids=lambda unknown: next(iter(unknown)),
)
@pytest.mark.parametrize("stamp", [{}, {"timestamp": 1}, {"timestamp": None}], ids=str)
def test_unknown_fields_are_ignored_also_when_other_kinds_have_them(
    unknown: dict[str, Any], stamp: dict[str, Any]
) -> None:
    message = {"role": "user", "content": "a", **stamp, "future": 1}
    for payload in (
        {**unknown, "kind": "message_appended", "message": message},
        {**unknown, "kind": "run_ended", "outcome": "", "new_messages": [message]},
        {**unknown, "kind": "turn_ended", "assistant": message, "tool_results": [message]},
    ):
        row = {"seq": 3, "recorded_at_unix_ms": 5, "future": {}, "payload": payload}
        for found in held(decode_record(json.dumps(row))):
            assert dated(found, None) == UserMessage("a")
            assert (found.timestamp is None) == (stamp.get("timestamp", 0) is None)


@pytest.mark.parametrize(
    ("row", "path", "reason"),
    [
        ("{", "$", "truncated"),
        ('{"seq":0,"recorded_at_unix_ms":1}', "$", "missing required field `payload`"),
        (
            '{"seq":0,"recorded_at_unix_ms":1,"payload":{"kind":"nap"}}',
            "$.payload.kind",
            "Invalid value 'nap'",
        ),
        (
            '{"seq":-1,"recorded_at_unix_ms":1,"payload":{"kind":"turn_started"}}',
            "$.seq",
            ">= 0",
        ),
        (
            '{"seq":0,"recorded_at_unix_ms":1,"payload":{"kind":"run_ended","outcome":"done",'
            '"new_messages":[{"role":"user","content":"a"},{"role":"user","content":1}]}}',
            "$.payload.new_messages[1].content",
            "got `int`",
        ),
        (
            '{"seq":0,"recorded_at_unix_ms":1,"payload":{"kind":"tool_ended","tool_call_id":"",'
            '"tool_name":"","result":{"content":[{"type":"text"}]},"is_error":true}}',
            "$.payload.result.content[0]",
            "missing required field `text`",
        ),
    ],
)
def test_a_record_that_cannot_be_read_says_where_and_why(row: str, path: str, reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_record(row)
    assert caught.value.path == path
    assert reason in caught.value.reason


def test_a_record_nested_too_deeply_is_a_decode_error() -> None:
    row = '{"seq":0,"payload":{"kind":"tool_started","args":' + "[" * 100_000
    with pytest.raises(DecodeError, match="too deeply"):
        decode_record(row)
