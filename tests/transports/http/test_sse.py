"""Server-sent events come out the same however they are written and however they are cut."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Sequence
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clark_agent.transports.http.sse import SseDecoder
from tests.sizes import CONFUSING_BYTES

pytestmark = pytest.mark.soak

BOM = b"\xef\xbb\xbf"


# --- the rules, as they are written -------------------------------------------------------------


def by_the_book(stream: bytes) -> tuple[list[bytes], list[bytes]]:
    """The payloads of the complete events, and the data lines of one that was not closed.

    A plain reading of "9.2.6 Interpreting an event stream", one byte after the other. What the
    stream ends with, without a line end, counts as a line here, and bytes that went bad on the way
    are no part of the name ``data``.
    """
    payloads: list[bytes] = []
    data: list[bytes] = []
    for line in lines_by_the_book(stream.removeprefix(BOM)):
        if not line:
            if data:
                payloads.append(b"\n".join(data))
            data = []
        elif not line.startswith(b":"):
            name, colon, value = line.partition(b":")
            if name == b"data" or (colon and name.lstrip(bytes(range(0x80, 0x100))) == b"data"):
                data.append(value.removeprefix(b" "))
    return payloads, data


def lines_by_the_book(stream: bytes) -> list[bytes]:
    lines = [b""]
    for position, byte in enumerate(stream):
        if byte == ord("\n") and stream[position - 1 : position] == b"\r":
            continue  # the second half of a line end
        if byte in b"\r\n":
            lines.append(b"")
        else:
            lines[-1] += bytes([byte])
    return lines if lines[-1] else lines[:-1]


def decoded(reads: Sequence[bytes]) -> list[bytes]:
    decoder = SseDecoder()
    return [payload for read in reads for payload in decoder.feed(read)] + decoder.end()


def expected(stream: bytes) -> list[bytes]:
    payloads, unclosed = by_the_book(stream)
    return payloads + ([b"\n".join(unclosed)] if unclosed else [])


# --- streams, and reads of them -----------------------------------------------------------------

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
values = st.one_of(
    st.sampled_from([b"", b" ", b"  x", b"{}", b":", b"data: x", b'{"a": "b"}', BOM, b"\x00\x0b"]),
    st.text().map(lambda text: text.encode().replace(b"\r", b"").replace(b"\n", b"")),
)
FIELDS = (
    *(b"data", b"data: ", b"data:", b"data:  ", b"event: ", b"id: ", b"id", b"retry:", b":", b": "),
    *(b"Data: ", b" data: ", b"dat: ", b"datax: ", b"data : ", b"", b"{", b"\xff"),
)
fields = st.sampled_from(FIELDS)
lines = st.tuples(fields, values).map(
    # A field without a colon has no value: what stood behind would be a part of its name.
    lambda pair: pair[0] if pair[0] in (b"data", b"id") else b"".join(pair)
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    one_end = draw(st.none() | line_ends)  # mostly alike, sometimes of every kind
    pieces = [draw(st.sampled_from([b"", BOM]))]
    for line in draw(st.lists(lines | st.just(b""), max_size=12)):
        pieces += [line, one_end or draw(line_ends)]
    pieces.append(draw(st.sampled_from([b"", b"data: cut o", b"data"])))
    return b"".join(pieces)


@st.composite
def cut_streams(draw: st.DrawFn) -> list[bytes]:
    stream = draw(streams())
    cuts = draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]


@given(cut_streams())
@example([b"data: a\r", b"\n\r", b"\ndata: b\r", b"\r", b"data: c"])
@example([BOM[:1], BOM[1:], b"data: a\n\n"])
@example([b"data: a\r", b"", b"\n\r\n"])
@example([b"data\n\n"])
@example([b"\xffdata: x\n"])
@example([b"data: a\ndata\ndata: b\n\n"])
def test_any_stream_in_any_pieces_gives_what_the_rules_say(reads: list[bytes]) -> None:
    assert decoded(reads) == expected(b"".join(reads))


@given(streams())
def test_the_cuts_do_not_matter(stream: bytes) -> None:
    whole = decoded([stream])
    assert decoded([stream[at : at + 1] for at in range(len(stream))]) == whole
    for at in range(len(stream)):
        assert decoded([stream[:at], stream[at:]]) == whole


@given(st.lists(st.binary().map(lambda data: data[:40]), max_size=6))
def test_no_bytes_are_too_odd(reads: list[bytes]) -> None:
    decoder = SseDecoder()
    for read in reads:
        decoder.feed(read)
    decoder.end()
    assert isinstance(decoder.stray, bytes)


# --- what comes when ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_an_event_is_given_with_the_read_that_completes_it(end: bytes) -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1" + end) == []
    assert decoder.feed(end) == [b"1"]
    assert decoder.feed(b"data: 2" + end + end + b"data: 3" + end + end + b"dat") == [b"2", b"3"]
    assert decoder.feed(b"a: 4" + end + end) == [b"4"]


def test_with_lone_returns_an_event_is_given_as_soon_as_something_follows() -> None:
    """A return at the end of a read may be half of a line end; nothing can be half of a letter."""
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\r\r") == []
    assert decoder.feed(b"d") == [b"1"]


def test_lines_of_data_are_joined_and_the_other_fields_left_out() -> None:
    stream = b'event: message\nid: 7\n: hi\ndata: {"a":\ndata:1}\nretry: 10\n\n'
    assert decoded([stream]) == [b'{"a":\n1}']


def test_one_space_belongs_to_the_field_and_no_more() -> None:
    assert decoded([b"data:a\n\ndata: a\n\ndata:  a\n\ndata:\ta\n\n"]) == [
        b"a",
        b"a",
        b" a",
        b"\ta",
    ]


def test_a_payload_keeps_what_looks_like_a_line_end_to_a_string() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf".encode()
    assert decoded([b"data: " + text + b"\n\n"]) == [text]


# --- the end of the bytes -----------------------------------------------------------------------


@pytest.mark.parametrize("rest", [b"", b"\n", b"\r", b"\r\n"])
def test_at_the_end_an_event_needs_no_empty_line(rest: bytes) -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\n\ndata: [DONE]" + rest) == [b"1"]
    assert decoder.end() == [b"[DONE]"]
    assert decoder.end() == []


def test_at_the_end_there_may_be_nothing() -> None:
    assert SseDecoder().end() == []
    decoder = SseDecoder()
    decoder.feed(b"data: 1\n\n: bye\n")
    assert decoder.end() == []


# --- what is no event ---------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [0, 2])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_document_in_place_of_a_stream_is_kept(indent: int, end: bytes) -> None:
    document = {"id": "x", "data": [1, 2], "event": {"retry": None}, "text": "data: no event"}
    body = msgspec.json.format(msgspec.json.encode(document), indent=indent).replace(b"\n", end)
    for reads in ([body], [body[at : at + 1] for at in range(len(body))]):
        decoder = SseDecoder()
        assert [p for read in reads for p in decoder.feed(read)] + decoder.end() == []
        assert msgspec.json.decode(decoder.stray) == document


def test_known_fields_and_comments_are_not_stray() -> None:
    decoder = SseDecoder()
    decoder.feed(BOM + b": hello\nevent: x\nid\nretry: 1\ndata: 1\n\n:\n")
    assert decoder.end() == []
    assert decoder.stray == b""


def test_events_do_not_lose_what_is_stray_among_them() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"oops\ndata: 1\n\n<html>\n") == [b"1"]
    assert decoder.stray == b"oops\n<html>"


def test_of_what_is_stray_no_more_than_a_megabyte_is_kept() -> None:
    decoder = SseDecoder()
    line = b"x" * 1023 + b"\n"
    for _ in range(3000):
        decoder.feed(line)
    assert 1_000_000 < decoder.stray.count(b"x") <= 1 << 20
    assert decoder.feed(b"data: 1\n\n") == [b"1"]


# --- work ---------------------------------------------------------------------------------------


def work_of(reads: list[bytes]) -> int:
    """How many bytes are copied, and how many looked at by methods of ``bytes``.

    What a read makes the decoder allocate is copied; what its methods are called on is looked at.
    """
    decoder = SseDecoder()
    looked_at = 0

    def note(frame: FrameType, event: str, function: Any) -> None:
        nonlocal looked_at
        if event == "c_call":
            receiver = getattr(function, "__self__", None)
            if isinstance(receiver, (bytes, bytearray)):
                looked_at += len(receiver)

    copied = 0
    tracemalloc.start()
    sys.setprofile(note)
    try:
        for read in reads:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            decoder.feed(read)
            copied += tracemalloc.get_traced_memory()[1] - before
    finally:
        sys.setprofile(None)
        tracemalloc.stop()
    return copied + looked_at


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("opening", [b"data: ", b": ", b"stray "])
def test_the_work_grows_with_the_bytes_and_not_with_their_square(opening: bytes, size: int) -> None:
    def work_for_reads(count: int) -> int:
        line = opening + b"x" * (size * count) + b"\n\n"
        return work_of([line[at : at + size] for at in range(0, len(line), size)])

    small, large = work_for_reads(2_000), work_for_reads(16_000)
    assert large < 10 * small  # eight times the bytes; looking twice at them would be 64 times


def test_a_line_of_a_megabyte_byte_by_byte() -> None:
    decoder = SseDecoder()
    line = b"data: " + b"x" * CONFUSING_BYTES + b"\n"
    for at in range(len(line)):
        assert not decoder.feed(line[at : at + 1])
    assert decoder.feed(b"\n") == [line[6:-1]]
