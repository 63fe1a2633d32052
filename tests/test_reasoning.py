"""Typed reasoning: a view that loses nothing it knows, and an audit that tells what is missing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clark_agent.messages import encode_json
from clark_agent.reasoning import (
    OpenRouterReasoningCodec,
    ReasoningEncrypted,
    ReasoningFormat,
    ReasoningItem,
    ReasoningSummary,
    ReasoningText,
    ReplayContract,
    ReplayViolation,
    audit_replay,
    item_to_json,
    parse_item,
    parse_items,
)
from tests.strategies import REASONING_ITEMS, open_json

ANTHROPIC = ReasoningFormat.ANTHROPIC_CLAUDE_V1
UNKNOWN = ReasoningFormat.UNKNOWN

SIGNED = ReasoningText("1", ANTHROPIC, 0, "so", "sig")
UNSIGNED = ReasoningText("2", ANTHROPIC, 1, "so")
SUMMARY = ReasoningSummary(None, ReasoningFormat.OPENAI_RESPONSES_V1, None, "in short")
ENCRYPTED = ReasoningEncrypted(None, ReasoningFormat.XAI_RESPONSES_V1, None, "…")


# --- items ------------------------------------------------------------------------------------


@given(REASONING_ITEMS)
def test_an_item_survives_json(item: ReasoningItem) -> None:
    written = item_to_json(item)
    assert parse_item(json.loads(encode_json(written))) == item
    assert None not in written.values()
    order = ["type", "id", "format", "index", "text", "summary", "data", "signature"]
    assert list(written) == [name for name in order if name in written]


@pytest.mark.parametrize(
    ("item", "written"),
    [
        (
            SIGNED,
            {
                "type": "reasoning.text",
                "id": "1",
                "format": "anthropic-claude-v1",
                "index": 0,
                "text": "so",
                "signature": "sig",
            },
        ),
        (
            SUMMARY,
            {"type": "reasoning.summary", "format": "openai-responses-v1", "summary": "in short"},
        ),
        (ENCRYPTED, {"type": "reasoning.encrypted", "format": "xai-responses-v1", "data": "…"}),
    ],
)
def test_written_form(item: ReasoningItem, written: dict[str, Any]) -> None:
    assert item_to_json(item) == written


@given(open_json())
def test_no_json_value_makes_the_parser_raise(value: object) -> None:
    assert parse_item(value) is None
    if isinstance(value, list):
        assert parse_items(value) == ()


@pytest.mark.parametrize(
    ("type_", "empty"),
    [
        ("reasoning.text", ReasoningText(None, UNKNOWN, None, "")),
        ("reasoning.summary", ReasoningSummary(None, UNKNOWN, None, "")),
        ("reasoning.encrypted", ReasoningEncrypted(None, UNKNOWN, None, "")),
    ],
)
@settings(max_examples=30)
@given(odd=st.fixed_dictionaries({}, optional=dict.fromkeys(("id", "format"), open_json())))
def test_missing_and_odd_fields_are_empty(
    type_: str, empty: ReasoningItem, odd: dict[str, Any]
) -> None:
    assert parse_item({"type": type_}) == empty
    fields = ("text", "summary", "data", "signature")
    parsed = parse_item({"type": type_, **dict.fromkeys(fields, 7), **odd})
    assert parsed is not None
    assert type(parsed) is type(empty)
    assert parsed.id == (odd["id"] if isinstance(odd.get("id"), str) else None)


@pytest.mark.parametrize("index", [-1, 1.0, True, "1", None, [1]])
def test_what_is_no_index_is_none(index: object) -> None:
    item = parse_item({"type": "reasoning.text", "index": index})
    assert item is not None
    assert item.index is None


def test_parse_items_keeps_the_order_and_leaves_out_unknown_kinds() -> None:
    values = [item_to_json(ENCRYPTED), {"type": "reasoning.video"}, "x", item_to_json(SIGNED)]
    assert parse_items(values) == (ENCRYPTED, SIGNED)


@pytest.mark.parametrize(
    ("item", "signed"), [(SIGNED, True), (UNSIGNED, False), (SUMMARY, False), (ENCRYPTED, True)]
)
def test_what_counts_as_signed(item: ReasoningItem, signed: bool) -> None:
    assert item.is_signed is signed


def test_an_empty_signature_is_a_signature() -> None:
    assert ReasoningText(None, ANTHROPIC, None, "", "").is_signed


# --- formats ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ReasoningFormat)
def test_formats_and_their_contracts(format_: ReasoningFormat) -> None:
    assert ReasoningFormat.from_wire(format_.value) is format_
    stateless = {ReasoningFormat.XAI_RESPONSES_V1, UNKNOWN}
    expected = "stateless" if format_ in stateless else "required_with_tools"
    assert format_.replay_contract == expected


@pytest.mark.parametrize("name", [None, 3, "", "ANTHROPIC-claude-v1", "anthropic-claude-v2", ["x"]])
def test_any_other_format_is_unknown(name: object) -> None:
    assert ReasoningFormat.from_wire(name) is UNKNOWN


# --- codec ------------------------------------------------------------------------------------


@given(st.lists(REASONING_ITEMS, max_size=3))
def test_the_codec_reads_what_it_writes(items: list[ReasoningItem]) -> None:
    codec = OpenRouterReasoningCodec()
    message: dict[str, Any] = {"role": "assistant"}
    codec.write_assistant(message, iter(items))
    assert ("reasoning_details" in message) == bool(items)
    assert codec.parse_response(message.get("reasoning_details", [])) == tuple(items)
    assert message["role"] == "assistant"


def test_the_codec_leaves_a_message_alone_when_there_is_nothing_to_write() -> None:
    message = {"reasoning_details": ["kept"]}
    OpenRouterReasoningCodec().write_assistant(message, [])
    assert message == {"reasoning_details": ["kept"]}


# --- audit ------------------------------------------------------------------------------------


@given(st.lists(REASONING_ITEMS, max_size=4), st.sampled_from(ReplayContract), st.booleans())
def test_audit_counts_and_judges(
    items: list[ReasoningItem], contract: ReplayContract, tools: bool
) -> None:
    audit = audit_replay(iter(items), contract, next_turn_carries_tools=tools)
    assert audit.item_count == len(items)
    assert audit.signed_count == len([item for item in items if item.is_signed])
    assert list(audit.formats) == sorted({item.format for item in items})
    refused = audit.signed_count == 0 and (
        contract == "always_required" or (contract == "required_with_tools" and tools)
    )
    assert audit.violation == (ReplayViolation(contract, audit.formats) if refused else None)


@pytest.mark.parametrize("contract", ReplayContract)
@pytest.mark.parametrize("tools", [False, True])
def test_audit_of_unsigned_text_for_each_contract(contract: ReplayContract, tools: bool) -> None:
    refused = {("always_required", False), ("always_required", True), ("required_with_tools", True)}
    audit = audit_replay([UNSIGNED, SUMMARY], contract, next_turn_carries_tools=tools)
    assert (audit.violation is not None) == ((contract.value, tools) in refused)
    one_signed = audit_replay([UNSIGNED, SIGNED], contract, next_turn_carries_tools=tools)
    assert one_signed.violation is None
