"""Folding chunks into a message: however an answer is cut, it spells the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import count, zip_longest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from clark_agent import (
    AssistantMessage,
    ReasoningContent,
    ReasoningDetailsContent,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolCall,
    Usage,
)
from clark_agent.messages import decode_message, encode_message
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    MessageAssembler,
    ReasoningChunk,
    ReasoningDetailsChunk,
    StreamChunk,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
    parse_arguments,
)
from clark_agent.types import detect_arg_parse_error
from tests.strategies import TEXT, USAGES, chunks, cuts, open_json

DELTA_KINDS: tuple[tuple[type[Any], type[Any]], ...] = (
    (TextChunk, TextContent),
    (ThinkingChunk, ThinkingContent),
    (ReasoningChunk, ReasoningContent),
)


def assembled(parts: Iterable[StreamChunk]) -> AssistantMessage:
    ids = count(1)
    assembler = MessageAssembler(lambda: f"new_{next(ids)}")
    for part in parts:
        assembler.feed(part)
    return assembler.message(timestamp=1)


# --- cutting ----------------------------------------------------------------------------------

# Halves of characters outside the basic plane, as a provider may send them.
halves = st.sampled_from(["\ud83d", "\ude00", "\ud800", "\udfff"])
split_text = st.lists(TEXT | halves, max_size=6).map("".join)
argument_text = st.one_of(
    st.just(""),
    st.sampled_from([" ", "{", '{"a":', "[1,]", "nul", '"\\ud800"']),
    open_json().map(json.dumps),
    open_json().map(lambda value: json.dumps(value, ensure_ascii=False)),
    TEXT,
)
answers = st.lists(chunks(split_text, argument_text), max_size=8)


@st.composite
def recut(draw: DrawFn, answer: Sequence[StreamChunk]) -> list[StreamChunk]:
    """The same answer in other pieces: smaller, some empty, those of calls in another order."""
    pieces: list[StreamChunk] = []
    for chunk in answer:
        pieces += draw(_pieces(chunk))
    if len(pieces) > 1:
        for place in draw(st.lists(st.integers(0, len(pieces) - 2), max_size=20)):
            _swap_calls(pieces, place)
    return pieces


@st.composite
def _pieces(draw: DrawFn, chunk: StreamChunk) -> list[StreamChunk]:
    if isinstance(chunk, (BlockChunk, AnnotationChunk)):
        return [chunk]  # they come whole
    if not isinstance(chunk, ToolCallChunk):
        make: type[Any] = type(chunk)
        return [make(part) for part in draw(cuts(chunk.delta))]
    ids, names, arguments = (
        draw(cuts(text or "", 3))
        for text in (chunk.id_delta, chunk.name_delta, chunk.arguments_delta)
    )
    if draw(st.booleans()):  # all three side by side, else one after the other
        return [ToolCallChunk(chunk.index, *row) for row in zip_longest(ids, names, arguments)]
    return [
        *[ToolCallChunk(chunk.index, id_delta=part) for part in ids],
        *[ToolCallChunk(chunk.index, name_delta=part) for part in names],
        *[ToolCallChunk(chunk.index, arguments_delta=part) for part in arguments],
    ]


def _swap_calls(pieces: list[StreamChunk], place: int) -> None:
    """Swap two neighbours of different calls, unless one of them is where its call begins."""
    one, other = pieces[place : place + 2]
    if (
        isinstance(one, ToolCallChunk)
        and isinstance(other, ToolCallChunk)
        and one.index != other.index
        and _begun(pieces[:place], one.index)
        and _begun(pieces[:place], other.index)
    ):
        pieces[place : place + 2] = [other, one]


def _begun(pieces: Sequence[StreamChunk], index: int) -> bool:
    return any(
        isinstance(piece, ToolCallChunk)
        and piece.index == index
        and (piece.id_delta or piece.name_delta or piece.arguments_delta)
        for piece in pieces
    )


@given(st.data(), answers)
@settings(max_examples=100)
def test_it_does_not_matter_how_an_answer_is_cut(
    data: st.DataObject, answer: list[StreamChunk]
) -> None:
    assert assembled(data.draw(recut(answer))) == assembled(answer)


# --- what it spells ---------------------------------------------------------------------------


def well_formed(text: str) -> str:
    """Halves that meet make a character, a half alone becomes U+FFFD."""
    out: list[str] = []
    characters = list(text)
    while characters:
        first = characters.pop(0)
        if "\ud800" <= first <= "\udbff" and characters and "\udc00" <= characters[0] <= "\udfff":
            high, low = ord(first) - 0xD800, ord(characters.pop(0)) - 0xDC00
            first = chr(0x10000 + high * 0x400 + low)
        out.append("\ufffd" if "\ud800" <= first <= "\udfff" else first)
    return "".join(out)


@given(answers)
@settings(max_examples=100)
def test_blocks_stand_in_the_order_in_which_they_began(answer: list[StreamChunk]) -> None:
    expected: list[list[Any]] = []
    calls: dict[int, list[Any]] = {}
    for chunk in answer:
        if isinstance(chunk, ToolCallChunk):
            deltas = [chunk.id_delta or "", chunk.name_delta or "", chunk.arguments_delta or ""]
            if any(deltas) and chunk.index not in calls:
                calls[chunk.index] = [ToolCallChunk, "", "", ""]
                expected.append(calls[chunk.index])
            for field, delta in enumerate(deltas, 1):
                if delta:
                    calls[chunk.index][field] += delta
        elif isinstance(chunk, BlockChunk):
            expected.append([BlockChunk, chunk.block])
        elif not isinstance(chunk, AnnotationChunk) and chunk.delta:
            if not expected or expected[-1][0] is not type(chunk):
                expected.append([type(chunk), type(chunk.delta)()])
            expected[-1][1] += chunk.delta
    message = assembled(answer)
    assert len(message.content) == len(expected)
    kinds = dict(DELTA_KINDS)
    new_ids = count(1)
    for block, (kind, *fields) in zip(message.content, expected, strict=True):
        if kind is BlockChunk:
            assert block == fields[0]
        elif kind in kinds:
            assert block == kinds[kind](well_formed(fields[0]))
        elif kind is ReasoningDetailsChunk:
            assert block == ReasoningDetailsContent(fields[0])
        else:
            assert isinstance(block, ToolCall)
            assert block.id == (well_formed(fields[0]) or f"new_{next(new_ids)}")
            assert block.name == well_formed(fields[1])
            assert block.arguments == parse_arguments(fields[2])
    assert message.stop_reason == ("tool_use" if calls else "end_turn")


@given(answers)
def test_every_assembled_message_can_be_written(answer: list[StreamChunk]) -> None:
    message = assembled(answer)
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize(("kind", "block"), DELTA_KINDS)
def test_deltas_of_one_kind_are_one_block_until_another_kind_comes(
    kind: type[Any], block: type[Any]
) -> None:
    other = ThinkingChunk if kind is TextChunk else TextChunk
    between = ThinkingContent if kind is TextChunk else TextContent
    parts = [kind("a"), other(""), kind(""), kind("b"), other("!"), kind("c")]
    assert assembled(parts).content == (block("ab"), between("!"), block("c"))


def test_interleaved_calls_and_text() -> None:
    parts: list[StreamChunk] = [
        TextChunk("let me "),
        ToolCallChunk(1, "i", "na", None),
        ToolCallChunk(0, None, "second", "[1"),
        TextChunk("see"),
        ToolCallChunk(1, "d", "me", '{"a":'),
        ToolCallChunk(0, "x", None, ",2]"),
        ToolCallChunk(2, "", None, ""),
        ToolCallChunk(1, None, None, "1}"),
    ]
    assert assembled(parts).content == (
        TextContent("let me "),
        ToolCall("id", "name", {"a": 1}),
        ToolCall("x", "second", [1, 2]),
        TextContent("see"),
    )


def test_reasoning_details_are_kept_as_they_came() -> None:
    details = ({"b": 1, "a": [None]}, "odd", 3)
    parts = [ReasoningDetailsChunk(details[:1]), ReasoningDetailsChunk(details[1:])]
    (block,) = assembled(parts).content
    assert block == ReasoningDetailsContent(details)
    assert isinstance(block, ReasoningDetailsContent)
    assert block.details[0] is details[0]


# --- the rest of the message ------------------------------------------------------------------


@given(st.none() | st.sampled_from(StopReason), st.none() | TEXT, st.none() | USAGES)
def test_stop_reason_error_timestamp_and_usage_are_passed_on(
    reason: StopReason | None, error: str | None, usage: Usage | None
) -> None:
    assembler = MessageAssembler()
    message = assembler.message(reason, error_message=error, timestamp=7, usage=usage)
    assert message == AssistantMessage((), reason or StopReason.END_TURN, error, 7, usage)


def test_the_reason_given_wins_over_what_the_content_says() -> None:
    assembler = MessageAssembler()
    assembler.feed(ToolCallChunk(0, "i", "n"))
    assert assembler.message().stop_reason is StopReason.TOOL_USE
    assert assembler.message(StopReason.MAX_TOKENS).stop_reason is StopReason.MAX_TOKENS


def test_empty_until_something_comes() -> None:
    assembler = MessageAssembler()
    nothing: list[StreamChunk] = [
        TextChunk(""),
        ThinkingChunk(""),
        ReasoningChunk(""),
        ReasoningDetailsChunk(()),
        ToolCallChunk(0),
        ToolCallChunk(0, "", "", ""),
    ]
    for chunk in nothing:
        assembler.feed(chunk)
        assert assembler.empty
    assert assembler.message() == AssistantMessage((), StopReason.END_TURN)
    assembler.feed(TextChunk(" "))
    assert not assembler.empty


def test_a_message_may_be_asked_for_in_between() -> None:
    assembler = MessageAssembler()
    assembler.feed(TextChunk("a"))
    first = assembler.message()
    assembler.feed(TextChunk("b"))
    assert first.plain_text == "a"
    assert assembler.message().plain_text == "ab"


def test_what_was_made_up_for_a_message_in_between_does_not_stay() -> None:
    assembler = MessageAssembler()
    assembler.feed(ToolCallChunk(0, None, "look", "{"))
    (early,) = assembler.message().tool_calls
    assert early.id
    assert detect_arg_parse_error(early.arguments)
    assembler.feed(ToolCallChunk(0, "real", None, "}"))
    assert assembler.message().tool_calls == (ToolCall("real", "look", {}),)


def test_a_call_without_an_id_gets_a_new_one_and_keeps_it() -> None:
    assembler = MessageAssembler()
    assembler.feed(ToolCallChunk(0, None, "a", "{}"))
    assembler.feed(ToolCallChunk(1, "", "b", "{}"))
    message = assembler.message()
    first, second = message.tool_calls
    assert first.id
    assert second.id
    assert first.id != second.id
    assert assembler.message() == message


# --- arguments --------------------------------------------------------------------------------


@given(open_json(), st.booleans())
def test_arguments_are_what_the_json_says(value: Any, ascii_only: bool) -> None:
    parsed = parse_arguments(json.dumps(value, ensure_ascii=ascii_only))
    assert (parsed, json.dumps(parsed)) == (value, json.dumps(value))


@pytest.mark.parametrize("nothing", ["", " ", "\n\t \r"])
def test_no_arguments_are_an_empty_object(nothing: str) -> None:
    assert parse_arguments(nothing) == {}
    (call,) = assembled([ToolCallChunk(0, "i", "n", nothing)]).tool_calls
    assert call.arguments == {}


@pytest.mark.parametrize(
    "raw", ["{", '{"a": 1', "{'a': 1}", "nope", '{"a": 1} x', '"\\ud800"', "\0"]
)
def test_what_is_not_json_becomes_the_sentinel_with_the_text_intact(raw: str) -> None:
    found = detect_arg_parse_error(parse_arguments(raw))
    assert found is not None
    assert found[0]
    assert found[1] == raw


@given(
    open_json().map(json.dumps).flatmap(lambda raw: st.integers(1, len(raw)).map(lambda n: raw[:n]))
)
def test_cut_off_arguments_are_json_or_the_sentinel(raw: str) -> None:
    parsed = parse_arguments(raw)
    try:
        value = json.loads(raw)
    except ValueError:
        found = detect_arg_parse_error(parsed)
        assert found is not None
        assert found[1] == raw
    else:
        assert parsed == value


@pytest.mark.parametrize("raw", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_arguments_nested_too_deeply_become_the_sentinel(raw: str) -> None:
    message = assembled([ToolCallChunk(0, "i", "n", raw)])
    found = detect_arg_parse_error(message.tool_calls[0].arguments)
    assert found is not None
    assert "too deeply" in found[0]
    assert found[1] == raw
    assert decode_message(encode_message(message)) == message


# --- halves of characters ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deltas", "text"),
    [
        (["a\ud83d", "\ude00b"], "a😀b"),
        (["\ud83d", "", "\ude00"], "😀"),
        (["\ud83d"], "\ufffd"),
        (["\ude00\ud83d"], "\ufffd\ufffd"),
        (["\ud83da", "\ude00"], "\ufffda\ufffd"),
        (["\ud83d\ud83d", "\ude00"], "\ufffd😀"),
        (["\ufeff\ud83d"], "\ufeff\ufffd"),
    ],
)
def test_halves_that_meet_are_joined_and_lone_ones_replaced(deltas: list[str], text: str) -> None:
    assert text == well_formed("".join(deltas))
    for kind, block in DELTA_KINDS:
        assert assembled([kind(delta) for delta in deltas]).content == (block(text),)
    for field in ("id_delta", "name_delta"):
        parts = [ToolCallChunk(0, **{field: delta}) for delta in deltas]
        (call,) = assembled([ToolCallChunk(0, arguments_delta="{}"), *parts]).tool_calls
        assert text in (call.id, call.name)


def test_halves_that_meet_inside_arguments_are_joined() -> None:
    parts = [ToolCallChunk(0, "i", "n", '{"a":"\ud83d'), ToolCallChunk(0, None, None, '\ude00"}')]
    assert assembled(parts).tool_calls == (ToolCall("i", "n", {"a": "😀"}),)


def test_a_lone_half_inside_arguments_does_not_stop_the_message_from_being_written() -> None:
    message = assembled([ToolCallChunk(0, "i", "n", '{"a":"\ud83d"}')])
    assert "\ufffd" in str(message.tool_calls[0].arguments)
    assert decode_message(encode_message(message)) == message
