"""The JSON of messages: nothing is lost in a round trip, and nothing bad in a file takes the rest.

The layout of the wire is written down here once more, by hand, as what other implementations see.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    RunIdentity,
    StopReason,
    SystemMessage,
    TextContent,
    ToolCall,
    ToolResult,
    ToolResultMessage,
    Usage,
    UserMessage,
    dump_transcript,
    load_transcript,
)
from clark_agent.clock import now_ms
from clark_agent.errors import DecodeError
from clark_agent.events import AgentEnd
from clark_agent.messages import (
    Transcript,
    decode_json,
    decode_message,
    encode_json,
    encode_message,
)
from clark_agent.messages.transcript import MessageLog
from clark_agent.messages.wire import jsonable
from clark_agent.stream import StreamChunk
from clark_agent.types import Annotation
from tests.strategies import (
    IDENTITIES,
    TEXT,
    chunks,
    dated,
    messages,
    open_json,
    tool_results,
    transcripts,
)

# --- one message ------------------------------------------------------------------------------


@given(messages())
def test_a_message_survives_the_wire(message: AgentMessage) -> None:
    data = encode_message(message)
    before = now_ms()
    back = decode_message(data)
    if message.timestamp is None:
        assert back.timestamp is not None
        assert before <= back.timestamp <= now_ms()
        back = dated(back, None)
    assert back == message
    assert encode_message(back) == data
    assert encode_message(dated(decode_message(data.decode()), message.timestamp)) == data


@given(messages())
def test_an_explicit_null_timestamp_stays_none(message: AgentMessage) -> None:
    row = json.loads(encode_message(message))
    row["timestamp"] = None
    assert decode_message(json.dumps(row)) == dated(message, None)


BLOCKS = {
    "text": "text",
    "image": "source media_type? alt?",
    "file": "source media_type? name?",
    "provider": "provider data",
    "thinking": "text",
    "reasoning": "text",
    "reasoning_details": "details",
    "tool_call": "id name arguments",
}
ROLES = {
    "system": "content timestamp?",
    "user": "content timestamp?",
    "assistant": "content stop_reason error_message? timestamp? usage? annotations?",
    "tool_result": "tool_call_id tool_name content is_error narration? details? timestamp?",
    "custom": "kind payload timestamp?",
}
USAGE = "input_tokens output_tokens cache_creation_input_tokens cache_read_input_tokens"


def check_layout(written: dict[str, Any], tag: str, layouts: dict[str, str]) -> None:
    """The tag, then the fields in order; those marked ``?`` are there when they are not null."""
    layout = layouts[written[tag]].split()
    names = [name.removesuffix("?") for name in layout]
    assert list(written) == [tag, *[name for name in names if name in written]]
    for name in layout:
        if name.endswith("?"):
            assert written.get(name[:-1], "left out") is not None
        else:
            assert name in written


@given(messages())
def test_the_tag_comes_first_and_fields_follow_in_order(message: AgentMessage) -> None:
    row = json.loads(encode_message(message))
    check_layout(row, "role", ROLES)
    blocks = row.get("content", "")
    for block in blocks if isinstance(blocks, list) else []:
        check_layout(block, "type", BLOCKS)
    if "usage" in row:
        assert list(row["usage"]) == USAGE.split()


@pytest.mark.parametrize(
    ("message", "written"),
    [
        (SystemMessage("s"), '{"role":"system","content":"s"}'),
        (
            UserMessage((FileContent("data:,x", name="a.txt"),)),
            '{"role":"user","content":[{"type":"file","source":"data:,x","name":"a.txt"}]}',
        ),
        (
            AssistantMessage(
                (ProviderContent("p", {"b": None}), ImageContent("i")),
                StopReason.OTHER,
                annotations=(Annotation("url", "u", start=0, end=1),),
            ),
            '{"role":"assistant","content":[{"type":"provider","provider":"p","data":{"b":null}},'
            '{"type":"image","source":"i"}],"stop_reason":"other",'
            '"annotations":[{"kind":"url","url":"u","start":0,"end":1}]}',
        ),
        (UserMessage("é\u2028", 0), '{"role":"user","content":"é\u2028","timestamp":0}'),
        (
            UserMessage((TextContent(""), ImageContent("data:,x", alt=""))),
            '{"role":"user","content":[{"type":"text","text":""},'
            '{"type":"image","source":"data:,x","alt":""}]}',
        ),
        (
            AssistantMessage((ToolCall("", "n", None),), StopReason.TOOL_USE, usage=Usage(1)),
            '{"role":"assistant","content":[{"type":"tool_call","id":"","name":"n",'
            '"arguments":null}],"stop_reason":"tool_use","usage":{"input_tokens":1,'
            '"output_tokens":0,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}}',
        ),
        (
            ToolResultMessage("c", "n", ()),
            '{"role":"tool_result","tool_call_id":"c","tool_name":"n","content":[],'
            '"is_error":false}',
        ),
        (
            ToolResultMessage("c", "n", (), True, "", details=False),
            '{"role":"tool_result","tool_call_id":"c","tool_name":"n","content":[],'
            '"is_error":true,"narration":"","details":false}',
        ),
        (CustomMessage("k"), '{"role":"custom","kind":"k","payload":null}'),
        (
            CustomMessage("k", {"b": 0, "a": 1}),
            '{"role":"custom","kind":"k","payload":{"b":0,"a":1}}',
        ),
    ],
)
def test_written_form(message: AgentMessage, written: str) -> None:
    assert encode_message(message).decode() == written


@given(messages(), TEXT.map("future_".__add__), open_json(), st.randoms(use_true_random=False))
def test_unknown_fields_and_the_order_of_fields_do_not_matter(
    message: AgentMessage, name: str, value: object, shuffle: random.Random
) -> None:
    row = json.loads(encode_message(dated(message, 1)))
    objects = [row]
    if isinstance(row.get("content"), list):
        objects += row["content"]
    if "usage" in row:
        objects.append(row["usage"])
    for written in objects:
        fields = [*written.items(), (name, value)]
        shuffle.shuffle(fields)
        written.clear()
        written.update(fields)
    assert decode_message(json.dumps(row)) == dated(message, 1)


# --- what cannot be read ----------------------------------------------------------------------


ASSISTANT = '{"role":"assistant","stop_reason":"end_turn","content":[%s]}'


@pytest.mark.parametrize(
    ("data", "path", "reason"),
    [
        ("", "$", "truncated"),
        ('{"role":"user","content":"', "$", "truncated"),
        ('{"role":"user","content":"a"} x', "$", "trailing"),
        ("[]", "$", "Expected `object`, got `array`"),
        ("null", "$", "Expected `object`, got `null`"),
        ('{"content":"a"}', "$", "missing required field `role`"),
        ('{"role":"user"}', "$", "missing required field `content`"),
        ('{"role":"pope","content":"a"}', "$.role", "Invalid value 'pope'"),
        ('{"role":7,"content":"a"}', "$.role", "Expected `str`"),
        ('{"role":"user","content":7}', "$.content", "got `int`"),
        ('{"role":"user","content":[{"type":"text","text":3}]}', "$.content[0].text", "got `int`"),
        (
            '{"role":"user","content":[{"type":"text","text":""},{"type":"text"}]}',
            "$.content[1]",
            "missing required field `text`",
        ),
        (
            '{"role":"user","content":[{"type":"thinking","text":""}]}',
            "$.content[0].type",
            "Invalid value 'thinking'",
        ),
        ('{"role":"user","content":"a","timestamp":-1}', "$.timestamp", ">= 0"),
        ('{"role":"user","content":"a","timestamp":"1"}', "$.timestamp", "got `str`"),
        (ASSISTANT % '{"type":"file","source":""}', "$.content[0].type", "'file'"),
        (ASSISTANT % '{"type":"tool_call","id":1}', "$.content[0].id", "got `int`"),
        ('{"role":"assistant","content":"","stop_reason":"other"}', "$.content", "got `str`"),
        ('{"role":"assistant","content":[],"stop_reason":"no"}', "$.stop_reason", "'no'"),
        (
            '{"role":"assistant","content":[],"stop_reason":"other","usage":{"input_tokens":"1"}}',
            "$.usage.input_tokens",
            "got `str`",
        ),
        (
            '{"role":"tool_result","tool_call_id":"c","tool_name":"n","content":[],"is_error":0}',
            "$.is_error",
            "Expected `bool`, got `int`",
        ),
        ('{"role":"custom","payload":1}', "$", "missing required field `kind`"),
        (r'{"role":"user","content":"\ud800"}', "$", ""),
        ('{"role":"user","content":"\ud800"}', "$", "surrogates not allowed"),
        (b'{"role":"user","content":"\xff"}', "$", "utf-8"),
    ],
)
def test_a_message_that_cannot_be_read_says_where_and_why(
    data: bytes | str, path: str, reason: str
) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_message(data)
    assert caught.value.path == path
    assert reason in caught.value.reason
    assert caught.value.reason
    assert str(caught.value) == f"{caught.value.reason} (at {path})"
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("nest", ["[", '{"a":'])
@pytest.mark.parametrize("field", ['"payload"', '"future"'])
def test_json_nested_too_deeply_is_a_decode_error(nest: str, field: str) -> None:
    data = '{"role":"custom","kind":"k",' + field + ":" + nest * 100_000
    with pytest.raises(DecodeError, match="too deeply"):
        decode_message(data)
    with pytest.raises(DecodeError, match="too deeply"):
        decode_json('{"content":[],"details":' + nest * 100_000, ToolResult)


@given(TEXT.filter(lambda role: role not in ROLES))
@example("x - at `$.content`")
@example("`")
def test_whatever_stands_for_a_role_the_path_is_that_of_the_role(role: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_message(json.dumps({"role": role, "content": ""}))
    assert caught.value.path == "$.role"
    assert role in caught.value.reason


@pytest.mark.parametrize(
    ("kind", "data", "path"),
    [
        (ToolResult, '{"content":[{"type":"text"}]}', "$.content[0]"),
        (ToolResult, '{"content":[],"terminate":1}', "$.terminate"),
        (ToolResult, "{}", "$"),
        (RunIdentity, '{"run_id":"r","depth":-1}', "$.depth"),
        (RunIdentity, '{"run_id":"r","deadline_unix_ms":1.5}', "$.deadline_unix_ms"),
        (RunIdentity, '{"run_id":null}', "$.run_id"),
        (StreamChunk, '{"kind":"tool_call_delta","index":-1}', "$.index"),
        (StreamChunk, '{"kind":"text"}', "$"),
    ],
)
def test_other_values_that_cannot_be_read_say_where(kind: Any, data: str, path: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_json(data, kind)
    assert caught.value.path == path
    assert caught.value.reason


# --- other values -----------------------------------------------------------------------------


@given(tool_results())
def test_a_tool_result_survives_the_wire_and_leaves_out_defaults(result: ToolResult) -> None:
    data = encode_json(result)
    assert decode_json(data, ToolResult) == result
    assert encode_json(decode_json(data, ToolResult)) == data
    row = json.loads(data)
    defaults = {"is_error": False, "details": None, "terminate": False, "narration": None}
    for name, default in defaults.items():
        assert (name in row) == (getattr(result, name) is not default)
    assert list(row) == [name for name in ("content", *defaults) if name in row]


@given(IDENTITIES)
def test_an_identity_survives_the_wire(identity: RunIdentity) -> None:
    data = encode_json(identity)
    assert decode_json(data, RunIdentity) == identity
    row = json.loads(data)
    order = ["run_id", "parent_run_id", "depth", "conversation_id", "deadline_unix_ms"]
    assert list(row) == [name for name in order if name in row]
    assert "depth" in row
    assert None not in row.values()


@given(chunks())
def test_a_chunk_survives_the_wire(chunk: StreamChunk) -> None:
    data = encode_json(chunk)
    back = decode_json(data, StreamChunk)
    assert (back, type(back), encode_json(back)) == (chunk, type(chunk), data)
    assert next(iter(json.loads(data))) == "kind"


@given(messages())
def test_the_form_for_what_json_cannot_hold_is_the_same_for_all_else(message: AgentMessage) -> None:
    assert encode_json(jsonable(message)) == encode_message(message)


@given(transcripts())
def test_a_view_of_messages_is_written_as_a_list(given_messages: list[AgentMessage]) -> None:
    view = MessageLog(given_messages).view()
    assert encode_json(AgentEnd(view)) == encode_json(AgentEnd(given_messages))
    assert dump_transcript(view) == dump_transcript(given_messages)


def test_what_has_no_json_form_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="Path"):
        encode_json(CustomMessage("k", Path()))


# --- transcripts ------------------------------------------------------------------------------


def undated(loaded: Iterable[AgentMessage], written: Iterable[AgentMessage]) -> list[AgentMessage]:
    """The loaded messages, without the dates that reading gave to undated ones."""
    pairs = list(zip(loaded, written, strict=True))
    assert all(message.timestamp is not None for message, _ in pairs)
    return [dated(message, None) if w.timestamp is None else message for message, w in pairs]


@given(transcripts())
def test_a_transcript_survives_the_wire(written: list[AgentMessage]) -> None:
    data = dump_transcript(written)
    assert data == b"".join(encode_message(message) + b"\n" for message in written)
    assert dump_transcript(iter(written)) == data
    loaded = load_transcript(data)
    assert undated(loaded.messages, written) == written
    assert loaded.malformed == ()


BOM = b"\xef\xbb\xbf"
GOOD = encode_message(UserMessage("good", 1))
GARBAGE_TEXT = [
    "not JSON",
    "null",
    "[]",
    "{}",
    '"role"',
    '{"role":"us',
    '{"role":"pope","content":"a"}',
    '{"role":"user","content":["a"]}',
    r'{"role":"user","content":"\udc00"}',
]
GARBAGE = [
    *[row.encode() for row in GARBAGE_TEXT],
    b'{"role":"user","content":"\xff"}',
    b'{"role":"user","content":"\xed\xa0\x80"}',
    GOOD + GOOD,
    GOOD + b",",
    b"\0" + GOOD,
    b"\x1e" + GOOD,
]


class File(NamedTuple):
    """The lines of a file, and what is to be found in them."""

    lines: list[bytes]
    good: list[AgentMessage]
    bad: list[tuple[int, bytes]]


@st.composite
def files(draw: DrawFn) -> File:
    lines: list[bytes] = []
    good: list[AgentMessage] = []
    bad: list[tuple[int, bytes]] = []
    for message in draw(st.lists(messages(), max_size=4)):
        for _ in range(draw(st.integers(0, 2))):
            lines.append(draw(st.sampled_from([b"", b" \t", *GARBAGE]) | torn_rows()))
            if lines[-1].strip():
                bad.append((len(lines), lines[-1]))
        lines.append(encode_message(message))
        good.append(message)
    if draw(st.booleans()):
        lines.append(draw(torn_rows()))
        bad.append((len(lines), lines[-1]))
    return File(lines, good, bad)


@st.composite
def torn_rows(draw: DrawFn) -> bytes:
    row = encode_message(draw(messages()))
    return row[: draw(st.integers(1, len(row) - 1))]


def as_is(data: bytes) -> bytes:
    return data


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def binary_file(data: bytes) -> Iterable[bytes]:
    return io.BytesIO(data)


def as_text(data: bytes) -> str:
    return data.decode()


def text_file(data: bytes) -> Iterable[str]:
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")


Source = Callable[[bytes], bytes | str | Iterable[bytes | str]]
BINARY_SOURCES: list[Source] = [as_is, binary_file]
TEXT_SOURCES: list[Source] = [as_text, text_file]
ALL_SOURCES = [*BINARY_SOURCES, *TEXT_SOURCES]


@given(files(), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
@settings(max_examples=100)
def test_bad_rows_are_reported_and_the_others_load(
    file: File, newline: bytes, ends_in_newline: bool
) -> None:
    data = newline.join(file.lines) + newline * ends_in_newline
    sources = list(BINARY_SOURCES)
    try:
        data.decode()
        sources += TEXT_SOURCES
    except UnicodeDecodeError:
        pass
    for source in sources:
        note(f"from {source.__name__}")
        loaded = load_transcript(source(data))
        assert undated(loaded.messages, file.good) == file.good
        assert [(row.line, row.raw) for row in loaded.malformed] == file.bad
        assert all(row.error.reason for row in loaded.malformed)
        assert all(row.error.path.startswith("$") for row in loaded.malformed)


@pytest.mark.parametrize("source", ALL_SOURCES)
@pytest.mark.parametrize("row", GARBAGE_TEXT)
def test_a_row_is_refused_for_the_same_reason_from_every_source(source: Source, row: str) -> None:
    with pytest.raises(DecodeError) as alone:
        decode_message(row)
    (malformed,) = load_transcript(source(f"{row}\r\n".encode())).malformed
    assert str(malformed.error) == str(alone.value)


@pytest.mark.parametrize("source", ALL_SOURCES)
@pytest.mark.parametrize("row", ['{"role":"custom","kind":"k","payload":%s}', '{"x":%s}', "%s"])
def test_a_row_nested_too_deeply_is_just_a_bad_row(source: Source, row: str) -> None:
    deep = (row % ("[" * 100_000 + "]" * 100_000)).encode()
    loaded = load_transcript(source(b"\n".join([GOOD, deep, GOOD])))
    assert loaded.messages == (UserMessage("good", 1),) * 2
    assert [(row.line, row.raw) for row in loaded.malformed] == [(2, deep)]


def outcome(loaded: Transcript) -> object:
    return loaded.messages, [(row.line, row.raw, str(row.error)) for row in loaded.malformed]


@given(st.lists(st.sampled_from([GOOD, b"", b"no", b" ", GOOD + GOOD, b"{", b"}"]), max_size=5))
@example([GOOD + GOOD, b"", b""])
@example([GOOD + GOOD[:-1], b"}"])
def test_one_string_and_its_lines_give_the_same(lines: list[bytes]) -> None:
    data = b"\n".join(lines)
    assert outcome(load_transcript(data)) == outcome(load_transcript(lines_of(data)))


@given(st.binary())
def test_loading_never_raises_and_loses_no_line(data: bytes) -> None:
    loaded = load_transcript(data)
    nonblank = [line for line in data.removeprefix(BOM).split(b"\n") if line.strip()]
    assert len(loaded.messages) + len(loaded.malformed) == len(nonblank)


@pytest.mark.parametrize("source", ALL_SOURCES)
@pytest.mark.parametrize("undated_row", [b"", b'{"role":"user","content":"b"}\r\n'])
def test_a_byte_order_mark_is_no_part_of_the_first_row(source: Source, undated_row: bytes) -> None:
    data = BOM + GOOD + b"\r\n" + undated_row + b"\r\n"
    loaded = load_transcript(source(data))
    assert loaded.malformed == ()
    assert loaded.messages[0] == UserMessage("good", 1)
    assert len(loaded.messages) == 1 + bool(undated_row)


@pytest.mark.parametrize("source", ALL_SOURCES)
def test_line_separators_of_unicode_do_not_end_a_row(source: Source) -> None:
    message = UserMessage("a\u2028b\u2029c\x85d\x0be\x0cf\x1cg", 5)
    assert load_transcript(source(dump_transcript([message]))) == Transcript((message,))


@pytest.mark.parametrize("source", ALL_SOURCES)
@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n \r\n", BOM])
def test_a_file_without_rows_is_an_empty_transcript(source: Source, data: bytes) -> None:
    assert load_transcript(source(data)) == Transcript(())


def test_an_explicit_null_timestamp_in_a_transcript_stays_none() -> None:
    row = b'{"role":"user","content":"a","timestamp":null}\n'
    assert load_transcript(row).messages == (UserMessage("a"),)


def test_a_lone_surrogate_in_a_string_is_a_bad_row() -> None:
    loaded = load_transcript('{"role":"user","content":"\ud800"}\n' + GOOD.decode())
    assert loaded.messages == (UserMessage("good", 1),)
    assert [row.line for row in loaded.malformed] == [1]


def test_open_files_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "transcript.jsonl"
    path.write_bytes(b"\r\n".join([GOOD, b'{"role":"po', GOOD]))
    with path.open("rb") as binary, path.open(encoding="utf-8") as text:
        loaded = [load_transcript(source) for source in (path.read_bytes(), binary, text)]
    assert outcome(loaded[0]) == outcome(loaded[1]) == outcome(loaded[2])
    assert loaded[0].messages == (UserMessage("good", 1),) * 2
    assert [(row.line, row.raw) for row in loaded[0].malformed] == [(2, b'{"role":"po')]
