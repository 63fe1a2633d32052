"""Thoughts and visible text come apart the same way however the output is cut, in linear work.

`Reference` is the rules once more, one character at a time; the filter must agree with it after
every delta.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clark_agent.messages import ThinkingTagStreamFilter, strip_thinking_tags, thinking
from clark_agent.messages.thinking import ThoughtSplitter, strip_leading_thoughts
from tests.strategies import cuts

NAMES = ("think", "thinking", "thought", "reasoning", "reflection")
WHITE_SPACE = " \t\n\f\r"


class Reference:
    """Slow and plain: what the filter should do."""

    def __init__(self) -> None:
        self.inside = False
        self.held = ""
        self.shown = ""
        self.thought = ""
        self.thoughts: list[str] = []

    def feed(self, delta: str) -> None:
        for character in delta:
            self.take(character)

    def take(self, character: str) -> None:
        if not self.held and character != "<":
            self.put(character)
            return
        self.held += character
        tag = "".join([c.lower() if c.isascii() else c for c in self.held if c not in WHITE_SPACE])
        tags = [f"</{name}>" if self.inside else f"<{name}>" for name in NAMES]
        if tag in tags:
            self.held = ""
            if self.inside:
                self.thoughts.append(self.thought)
                self.thought = ""
            self.inside = not self.inside
        elif not any(known.startswith(tag) for known in tags):
            self.put(self.held)
            self.held = ""

    def put(self, text: str) -> None:
        if self.inside:
            self.thought += text
        else:
            self.shown += text

    def flush(self) -> None:
        if not self.inside:
            self.shown += self.held


# Pieces of tags in every case, white space of every sort, and letters that only Unicode's case
# folding takes for a k and an s: the Kelvin sign and the long s.
PIECES = [
    *"<</>>tThiInNkKgGouhraesflc \t\n\f\r\v\x1c\x85\xa0\u2028éx",
    *["\u212a", "\u017f", "thin\u212a", "rea\u017foning"],
    *[name.title() for name in NAMES],
    *NAMES,
    *[
        "<think>",
        "</think>",
        "< REFLECTION\n>",
        "<\t/ thought >",
        "<t h o u g h t>",
        "</Reasoning>",
    ],
    *["<thin", "</thin", "king>", "<<", "</<", "<//think>", "<think/>"],
]
tags = st.sampled_from(["<think>", "</think>", "<Thought >", "</ reasoning>"])
texts = st.lists(st.sampled_from(PIECES) | tags, max_size=25).map("".join)
deltas = texts.flatmap(cuts)


@given(deltas)
@settings(max_examples=300)
@example(["<thin", "k><", "<x></", "think", ">", "<"])
@example(["<", "<think>"])
@example(["< ", "", "\n", "think"])
@example(["<think>a</think>b<thought>c</reasoning>d"])
def test_every_delta_gives_what_the_reference_gives(pieces: list[str]) -> None:
    real, reference = ThinkingTagStreamFilter(), Reference()
    shown = ""
    thoughts: list[str] = []
    for piece in pieces:
        shown += real.feed(piece)
        thoughts += real.take_thoughts()
        reference.feed(piece)
        assert (shown, thoughts) == (reference.shown, reference.thoughts)
    shown += real.flush()
    reference.flush()
    assert shown == reference.shown
    assert real.take_thoughts() == ()


def split(pieces: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """The visible text and the thoughts of a whole output."""
    real = ThinkingTagStreamFilter()
    shown = "".join([real.feed(piece) for piece in pieces])
    return shown + real.flush(), real.take_thoughts()


@given(deltas)
@settings(max_examples=100)
def test_it_does_not_matter_how_the_output_is_cut(pieces: list[str]) -> None:
    whole = "".join(pieces)
    assert split(pieces) == split([whole]) == split(whole)


@given(texts)
def test_strip_gives_what_is_visible_trimmed(text: str) -> None:
    assert strip_thinking_tags(text) == split([text])[0].strip()


@given(deltas, texts)
@example(["<think>1</think><think>lost</th"], "b<think>c</think>")
@example(["a<th"], "ink>b")
def test_a_filter_that_was_reset_is_as_new(before: list[str], text: str) -> None:
    real = ThinkingTagStreamFilter()
    for piece in before:
        real.feed(piece)
    real.reset()
    assert (real.feed(text) + real.flush(), real.take_thoughts()) == split([text])


@given(deltas, texts)
@example(["<think>lost</th"], "b<think>c</think>")
def test_after_a_flush_a_new_output_may_follow(before: list[str], text: str) -> None:
    real = ThinkingTagStreamFilter()
    for piece in before:
        real.feed(piece)
    real.flush()
    thoughts = real.take_thoughts()
    assert thoughts == split(before)[1]
    assert (real.feed(text) + real.flush(), real.take_thoughts()) == split([text])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("closing", NAMES)
def test_any_closing_tag_of_the_family_closes(name: str, closing: str) -> None:
    assert split([f"a<{name}> b </{closing}>c"]) == ("ac", (" b ",))
    assert split([f"a< {name.upper()}\t>b<\n/\f{closing.title()}\r>c"]) == ("ac", ("b",))


@pytest.mark.parametrize(
    ("text", "shown", "thoughts"),
    [
        ("<<think>a</think>", "<<think>a</think>", ()),
        ("<t<think>", "<t<think>", ()),
        ("a < b", "a < b", ()),
        ("<thinks>a", "<thinks>a", ()),
        ("</think>a", "</think>a", ()),
        ("<think>a<think>b</think>c", "c", ("a<think>b",)),
        ("<think>a<</think>b</think>c", "c", ("a<</think>b",)),
        ("<think></think>a<thought></thought>", "a", ("", "")),
        ("a<think>never closed</thin", "a", ()),
        ("a<thin", "a<thin", ()),
        ("a<\n", "a<\n", ()),
        ("<think\v>a", "<think\v>a", ()),
        ("<thin\u212a>a", "<thin\u212a>a", ()),
        ("<rea\u017foning>a", "<rea\u017foning>a", ()),
        ("<think>a</thin\u212a>b</think>", "", ("a</thin\u212a>b",)),
    ],
)
def test_examples(text: str, shown: str, thoughts: tuple[str, ...]) -> None:
    assert split([text]) == split(text) == (shown, thoughts)


def test_text_goes_out_as_soon_as_it_can_be_no_tag() -> None:
    real = ThinkingTagStreamFilter()
    seen = [real.feed(piece) for piece in ["a<", "th", "o", "x", "b", "< ", "y", "<"]]
    assert seen == ["a", "", "", "<thox", "b", "", "< y", ""]
    assert real.flush() == "<"
    assert real.flush() == ""


def test_thoughts_are_taken_once() -> None:
    real = ThinkingTagStreamFilter()
    real.feed("<think>1</think><think> 2 </think><think>3")
    assert real.take_thoughts() == ("1", " 2 ")
    assert real.take_thoughts() == ()
    real.feed("</think>")
    assert real.take_thoughts() == ("3",)


# --- in front of the first word ---------------------------------------------------------------


def pieces_of(deltas: Iterable[str], where: Any = "leading") -> tuple[str, str]:
    """What is said and what is thought, each joined."""
    splitter = ThoughtSplitter(where)
    pieces = [piece for delta in deltas for piece in splitter.feed(delta)]
    pieces += splitter.flush()
    said = "".join([text for kind, text in pieces if kind == "said"])
    return said, "".join([text for kind, text in pieces if kind == "thought"])


@pytest.mark.parametrize(
    ("text", "said", "thought"),
    [
        ("<think>a</think>b<think>c</think>", "b<think>c</think>", "a"),
        (" <think>a</think>\n<thought>b</thought> c", " \n c", "ab"),
        ("Wrap it in a <reasoning> element. Then deploy", None, ""),
        ("'<think>' is a tag", None, ""),
        ("<<think>a</think>", None, ""),
        ("<t <think>a", None, ""),
        ("<think>never closed</thin", "", "never closed</thin"),
        ("<think>a<think>b</think>c", "c", "a<think>b"),
        ("<thin", None, ""),
        (" ", None, ""),
    ],
)
def test_a_tag_counts_in_front_of_the_first_word(text: str, said: str | None, thought: str) -> None:
    expected = (text if said is None else said, thought)
    assert pieces_of([text]) == pieces_of(text) == expected
    assert strip_leading_thoughts(text) == expected[0].strip()


@given(deltas)
@settings(max_examples=200)
def test_leading_thoughts_are_those_that_the_filter_finds_before_the_first_word(
    pieces: list[str],
) -> None:
    whole = "".join(pieces)
    said, thought = pieces_of(pieces)
    assert (said, thought) == pieces_of([whole])
    # The filter finds thoughts anywhere. Cut off behind the first word, it must find the same.
    real, shown, taken = ThinkingTagStreamFilter(), "", 0
    while taken < len(whole) and not shown.strip():
        shown += real.feed(whole[taken])
        taken += 1
    assert said == shown + ("" if shown.strip() else real.flush()) + whole[taken:]


@given(deltas)
@settings(max_examples=100)
def test_anywhere_it_is_the_filter_and_keeps_what_that_drops(pieces: list[str]) -> None:
    shown, thoughts = split(pieces)
    said, thought = pieces_of(pieces, "anywhere")
    assert said == shown
    assert thought.startswith("".join(thoughts))


# --- the work it takes ------------------------------------------------------------------------


class Counting:
    """A compiled pattern that counts its matches and the characters that they take."""

    calls = 0
    characters = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern

    def match(self, text: str, start: int = 0) -> re.Match[str] | None:
        found = self.pattern.match(text, start)
        Counting.calls += 1
        # A text that is matched from its start is new, and had to be put together.
        Counting.characters += len(text) if start == 0 else 0
        Counting.characters += found.end() - start if found else 0
        return found

    def search(self, text: str, start: int) -> re.Match[str] | None:
        found = self.pattern.search(text, start)
        Counting.calls += 1
        Counting.characters += (found.end() if found else len(text)) - start
        return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A second copy of the module whose patterns count."""
    compile_ = re.compile

    def compiled(pattern: str, flags: int = 0) -> Any:
        return Counting(compile_(pattern, flags))

    monkeypatch.setattr(Counting, "calls", 0)
    monkeypatch.setattr(Counting, "characters", 0)
    monkeypatch.setattr(re, "compile", compiled)
    spec = importlib.util.spec_from_file_location("counted_thinking", thinking.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SIZE = 400_000
HARD = {
    "white space in a tag": "<" + " " * SIZE,
    "white space in a tag, again and again": ("<t" + " " * 97 + "x") * (SIZE // 100),
    "nothing but <": "<" * SIZE,
    "begun tags": "<t" * (SIZE // 2),
    "almost tags": "<thinkin " * (SIZE // 9),
    "comparisons": "a < b > c " * (SIZE // 10),
    "an unclosed thought": "<think>" + "hm " * (SIZE // 3),
    "an unclosed thought full of almost tags": "<think>" + "</thinkin" * (SIZE // 9),
    "white space in a closing tag": "<think></" + "\n" * SIZE,
    "many thoughts": "<think>a</think>" * (SIZE // 16),
}


@pytest.mark.parametrize("step", [4, SIZE * 2], ids=["4 characters a delta", "one delta"])
@pytest.mark.parametrize("name", HARD)
def test_work_is_linear(counted: ModuleType, name: str, step: int) -> None:
    # Were a match itself not linear, one of these texts would keep it busy for hours.
    text = HARD[name]
    real = counted.ThinkingTagStreamFilter()
    shown = [real.feed(text[start : start + step]) for start in range(0, len(text), step)]
    shown.append(real.flush())
    assert ("".join(shown), real.take_thoughts()) == split([text])
    assert 0 < Counting.calls <= len(text)
    assert Counting.characters <= 10 * len(text)


@pytest.mark.parametrize("where", ["leading", "anywhere"])
@pytest.mark.parametrize("name", HARD)
def test_splitting_is_linear(counted: ModuleType, name: str, where: str) -> None:
    text = HARD[name][:20_000]
    for step in (4, len(text)):
        splitter = counted.ThoughtSplitter(where)
        pieces: list[tuple[str, str]] = []
        for start in range(0, len(text), step):
            pieces += splitter.feed(text[start : start + step])
        pieces += splitter.flush()
        said, thought = pieces_of([text], where)
        assert "".join([part for kind, part in pieces if kind == "said"]) == said
        assert "".join([part for kind, part in pieces if kind == "thought"]) == thought
    assert Counting.calls <= 2 * len(text)
    assert Counting.characters <= 20 * len(text)


def test_text_without_a_tag_in_sight_is_not_searched_at_all(counted: ModuleType) -> None:
    real = counted.ThinkingTagStreamFilter()
    prose = "a word > " * 10
    assert real.feed(prose) == prose
    assert Counting.calls == 0
