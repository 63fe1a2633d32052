"""What is made of the bytes that a command prints."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent.toolkit._command_output import CommandOutput

NEVER_CUT = 1_000_000

PIECES = st.lists(
    st.one_of(
        st.text(max_size=20).map(str.encode),
        st.binary(max_size=10),
        st.sampled_from(
            [b"\r", b"\n", b"\r\n", b"\x1b[31m", b"\x1b]0;title\x07", b"\x1b", b"\xc3"]
        ),
    ),
    max_size=40,
)


def read(*pieces: bytes, limit: int = NEVER_CUT) -> CommandOutput:
    output = CommandOutput(limit)
    for piece in pieces:
        output.feed(piece)
    output.feed(b"", final=True)
    return output


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (b"plain\n", "plain\n"),
        ("é漢🙂".encode(), "é漢🙂"),
        (b"a\xff\xfeb", "a\ufffd\ufffdb"),
        (b"cut \xe6\xbc", "cut \ufffd"),
        (b"\x1b[1;31mred\x1b[0m\n", "red\n"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x07", "link"),
        (b"\x1b(Bascii\x1bM \x1bPdevice\x1b\\", "ascii "),
        (b"cut off \x1b[3", "cut off "),
        (b"a\x00b\x07c\x08\td\x7f", "abc\td"),
        (b"10%\r50%\r100%\ndone", "100%\ndone"),
        (b"one\r\ntwo\r\r\nthree\r", "one\ntwo\nthree"),
        (b"working\r\x1b[Kdone\n", "done\n"),
    ],
)
def test_a_model_reads_what_a_terminal_would_show(printed: bytes, text: str) -> None:
    assert read(printed).text == text
    assert read(*[bytes([byte]) for byte in printed]).text == text


@given(PIECES, st.data())
def test_it_does_not_matter_where_the_pieces_end(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read(*parts).text == read(whole).text


@given(PIECES)
def test_nothing_is_left_for_a_terminal(pieces: list[bytes]) -> None:
    text = read(*pieces).text
    assert not set(text) & {chr(code) for code in range(32) if chr(code) not in "\t\n"}
    assert text.encode().decode() == text


@given(PIECES, st.integers(1, 50))
def test_the_beginning_and_the_end_are_kept(pieces: list[bytes], limit: int) -> None:
    whole, cut = read(*pieces).text, read(*pieces, limit=limit)
    assert cut.left_out == max(0, len(whole) - limit)
    if not cut.left_out:
        assert cut.text == whole
    else:
        half = limit // 2
        assert cut.text.startswith(
            f"{whole[:half]}\n[… {cut.left_out} characters are left out here"
        )
        assert cut.text.endswith(f"…]\n{whole[half - limit :]}")


@pytest.mark.parametrize("piece", [b"y\n" * 30_000, b"y" * 60_000, b"\x1b[1my\r" * 10_000])
def test_memory_is_bounded(piece: bytes) -> None:
    output = CommandOutput(1_000)
    for _ in range(50):
        output.feed(piece)
        kept = [vars(output)[name] for name in ("_head", "_tail", "_line")]
        assert sum(map(sys.getsizeof, kept)) < 20_000
    assert output.received == 50 * len(piece)


def test_the_newest_lines_have_the_one_that_has_not_ended() -> None:
    output = CommandOutput(10_000)
    output.feed(b"".join([b"line %d\n" % number for number in range(20)]) + b"\x1b[1m90%\r95%")
    assert output.newest.splitlines() == [f"line {number}" for number in range(11, 20)] + ["95%"]
    assert "95%" not in output.text


def test_the_newest_lines_are_not_long() -> None:
    output = CommandOutput(10_000)
    output.feed(b"x" * 5_000)
    assert output.newest == "x" * 1_000
