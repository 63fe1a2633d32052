"""A text in pieces reads like the text itself, from anywhere; and a cut never loses a mark."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clark_agent import _kept_text
from clark_agent._kept_text import KeptDamaged, KeptText, pack
from clark_agent._untrusted import head_of, is_marked, mark_untrusted, tail_of


class Counted:
    """Reads pieces, and notes which."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.read: list[int] = []

    def __call__(self, start: int, stop: int) -> Sequence[bytes]:
        self.read += range(start, min(stop, len(self.pieces)))
        return self.pieces[start:stop]


TEXTS = st.text(
    st.one_of(st.sampled_from("ab\n\nX😀𝄞é\ud800\r\u2028"), st.characters()), max_size=60
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kept_text, "_STEP", 7)


def kept(text: str) -> KeptText:
    return KeptText(Counted(pack(text)))


@given(TEXTS, st.integers(-3, 70), st.integers(-3, 70))
@example("😀" * 8, 6, 8)
@example("", 0, 0)
def test_any_part_is_the_same_as_of_the_text(text: str, start: int, stop: int) -> None:
    read = kept(text)
    assert read.part(start, stop) == text[max(start, 0) : max(stop, 0)]
    assert read.characters == len(text)


@given(TEXTS, st.integers(1, 9))
def test_all_pages_together_are_the_text(text: str, page: int) -> None:
    read = kept(text)
    pages = [read.part(start, start + page) for start in range(0, len(text), page)]
    assert "".join(pages) == text


@given(TEXTS)
@example("\n" * 7)
@example("aaaaaa\n\naaaaaa\n")
def test_lines_are_where_they_are_in_the_text(text: str) -> None:
    read, lines = kept(text), text.split("\n")
    assert read.lines == len(lines)
    at = 0
    for number, line in enumerate(lines, 1):
        assert read.start_of(number) == at
        for character in range(at, at + len(line) + (number < len(lines))):
            assert read.line_at(character) == number
        at += len(line) + 1
    assert read.start_of(len(lines) + 1) == len(text)
    assert read.start_of(0) == 0


@given(TEXTS, st.text(st.sampled_from("abX😀\n"), min_size=1, max_size=9), st.integers(0, 60))
@example("xxxxxABxxABABxx", "ab", 0)
@example("aaaaaaaaaaaaaaaaa", "aaa", 1)
@example("a.c abc", "a.c", 0)
def test_a_search_finds_what_is_in_the_text(text: str, words: str, start: int) -> None:
    found = list(kept(text).find(words, start, around=4, is_cancelled=lambda: False))
    pattern = re.compile(re.escape(words), re.IGNORECASE)
    assert [place.start for place in found] == [m.start() for m in pattern.finditer(text, start)]
    for place in found:
        assert place.line == text.count("\n", 0, place.start) + 1
        stop = place.start + len(words) + 4
        assert place.excerpt == text[max(place.start - 4, 0) : stop]


def test_a_search_stops_when_it_is_cancelled() -> None:
    checks = iter([False, False, True])
    read = Counted(pack("x" * 7_000))
    found = KeptText(read).find("no", 0, around=4, is_cancelled=lambda: next(checks))
    assert list(found) == []
    assert max(read.read) < 6


def test_a_part_reads_only_the_pieces_that_it_needs() -> None:
    text = "".join(f"{n}\n" for n in range(5_000))
    read = Counted(pack(text))
    assert KeptText(read).part(10_000, 10_010) == text[10_000:10_010]
    assert len(read.read) <= 3
    read.read.clear()
    again = KeptText(read)
    start = again.start_of(2_000)
    assert text[start:].startswith("1999\n")
    assert len(read.read) == 2


def test_a_piece_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeptDamaged, match="a part of it is missing"):
        KeptText(Counted(pack("x" * 30)[:3])).part(0, 30)


# --- marks ----------------------------------------------------------------------------------------

PLAIN = st.text(st.sampled_from("y \n<>/"), max_size=12)
EVIL = st.lists(
    st.one_of(
        st.text(st.sampled_from("Z\nZ"), max_size=9),
        st.sampled_from(
            ["<untrusted-aaaaaaaaaaaa>\n", "\n</untrusted-aaaaaaaaaaaa>", "<untrusted-", "Z"]
        ),
    ),
    max_size=6,
).map("".join)
MARKED = re.compile(r"<untrusted-([a-p]{12})>\n(.*?)\n</untrusted-\1>", re.DOTALL)


@st.composite
def marked_texts(draw: st.DrawFn) -> str:
    """A text of ours, with parts of strangers between marks; these have all of its Z."""
    parts = draw(st.lists(EVIL, min_size=1, max_size=3))
    return "".join([draw(PLAIN) + mark_untrusted(part) + draw(PLAIN) for part in parts])


@given(marked_texts(), st.integers(0, 250))
@example(mark_untrusted("Z" * 40), 27)
@example(mark_untrusted("Z" * 40), 80)
def test_what_is_marked_stays_marked_wherever_it_is_cut(text: str, at: int) -> None:
    head, tail = head_of(text, at), tail_of(text, at)
    for part in (head, tail):
        assert "Z" not in MARKED.sub("", part)
    assert len(head) <= at + 30
    assert len(tail) <= max(len(text) - at, 0) + 30
    assert is_marked(text)


@given(st.text(), st.integers(0, 50))
def test_a_text_without_marks_is_cut_where_it_is_asked(text: str, at: int) -> None:
    assert head_of(text, at) == text[:at]
    assert tail_of(text, at) == text[at:]
    assert not is_marked(text)


def test_many_open_marks_do_not_take_long() -> None:
    letters = "abcdefghijklmnop"
    codes = (
        f"{letters[n // 256 % 16]}{letters[n // 16 % 16]}{letters[n % 16]}" * 4 for n in range(4096)
    )
    hostile = "".join([f"<untrusted-{code}>\n" for code in codes]) * 20
    assert head_of(hostile, 1_000) == hostile[:1_000]
    assert not is_marked(hostile)
