"""Separates the thoughts that a model writes between tags from its visible text.

Models asked to think aloud write ``<thought>…</thought>`` (or a synonym) into their visible output.
`ThinkingTagStreamFilter` splits the two while the text streams in, wherever a tag is split:

- From a ``<`` on, text is held back while it can still become a tag. Case does not matter, and
  ASCII white space may be anywhere inside the tag.
- The character that rules a tag out is text, like all that was held back, even if it is itself a
  ``<``: in ``<<think>`` nothing is a tag.
- Any closing tag of the family closes a thought. A thought that is never closed is dropped.

Text can also be about such tags: "Wrap it in a <reasoning> element." So that no word is lost,
transports use a `ThoughtSplitter`. By default it recognizes a tag only before the first visible
word, where models put them, and it keeps a thought that is never closed.

The work is done by two regular expressions that each run over a stretch of text in one go; their
alternatives are disjoint at every step, so they never backtrack over more than white space and the
filter is linear in its input however it is cut.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, TypeAlias

__all__ = [
    "Piece",
    "ThinkingTagStreamFilter",
    "ThinkingTags",
    "ThoughtSplitter",
    "strip_leading_thoughts",
    "strip_thinking_tags",
]

ThinkingTags: TypeAlias = Literal["leading", "anywhere", "off"]
"""Where tags mark thoughts: before the first visible word, anywhere, or nowhere."""

Piece: TypeAlias = tuple[Literal["said", "thought"], str]
"""A stretch of output, and whether it is for readers."""

TAGS = ("think", "thinking", "thought", "reasoning", "reflection")
_SPACE = r" \t\n\f\r"

# How many pieces of plain text one match may take. `re` remembers a position for each.
_RUN = 1024


def _branches(words: set[str], *, rejecting: bool) -> str:
    """A pattern for what may follow a common prefix, given the ways to finish it.

    The accepting form matches as much of a tag as is there. The rejecting form matches only what
    has turned out not to be a tag, up to and including the character that decided it.
    """
    heads = sorted({word[0] for word in words if word})
    steps = [
        re.escape(head)
        + _branches({word[1:] for word in words if word.startswith(head)}, rejecting=rejecting)
        for head in heads
        if not (rejecting and head == ">")
    ]
    if not heads:
        return ""
    if rejecting:
        steps.append(f"[^{_SPACE}{re.escape(''.join(heads))}]")
        return f"[{_SPACE}]*(?:{'|'.join(steps)})"
    return f"[{_SPACE}]*(?:{'|'.join(steps)})?"


class _Side:
    """The two patterns for one side of the tag: plain text to skip, and a whole or partial tag."""

    def __init__(self, slash: str) -> None:
        words = {f"<{slash}{tag}>" for tag in TAGS}
        flags = re.ASCII | re.IGNORECASE
        rejected = _branches({word[1:] for word in words}, rejecting=True)
        self.plain = re.compile(f"(?:[^<]+|<{rejected}){{1,{_RUN}}}", flags)
        self.tag = re.compile("<" + _branches({w[1:] for w in words}, rejecting=False), flags)


@cache
def _side(*, inside: bool) -> _Side:
    """The patterns for where the text is; compiled when first needed, they take a while."""
    return _Side("/" if inside else "")


class ThinkingTagStreamFilter:
    """Feed it deltas; it returns the visible text and collects the thoughts."""

    __slots__ = ("_held", "_inside", "_prefix", "_thought", "_thoughts")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset to the initial state."""
        self._inside = False
        self._held: list[str] = []  # text that may still become a tag, unchanged
        self._prefix = ""  # the same without white space: at most as long as a tag
        self._thought: list[str] = []
        self._thoughts: list[str] = []

    @property
    def is_idle(self) -> bool:
        """Whether it is in visible text and holds nothing back: text without a ``<`` can pass."""
        return not self._inside and not self._held

    @property
    def is_inside(self) -> bool:
        """Whether it is in the middle of a thought."""
        return self._inside

    def feed(self, delta: str) -> str:
        """Add the next piece of output; return the text that is now known to be visible."""
        if not self._held and "<" not in delta:
            if self._inside:
                self._thought.append(delta)
                return ""
            return delta
        visible: list[str] = []
        rest = self._resume(delta, visible)
        while rest < len(delta):
            rest = self._scan(delta, rest, visible)
        return "".join(visible)

    def flush(self) -> str:
        """End the output: return what was held back, and drop a thought that was never closed."""
        return self.finish()[0]

    def finish(self) -> tuple[str, str]:
        """End the output: return the text that was held back, and the open thought."""
        held = "".join(self._held)
        rest = ("", self.take_open_thought() + held) if self._inside else (held, "")
        self._inside = False
        self._held.clear()
        self._prefix = ""
        return rest

    def take_open_thought(self) -> str:
        """The part so far of a thought that is still open; `take_thoughts` then has the rest."""
        came = "".join(self._thought)
        self._thought.clear()
        return came

    def take_thoughts(self) -> tuple[str, ...]:
        """The thoughts completed since the last call, untrimmed, in order."""
        thoughts = tuple(self._thoughts)
        self._thoughts.clear()
        return thoughts

    def _scan(self, delta: str, start: int, visible: list[str]) -> int:
        """Read plain text from ``start`` and, if one follows, a tag; return where that ends."""
        side = _side(inside=self._inside)
        end = start
        while match := side.plain.match(delta, end):
            end = match.end()
        (self._thought if self._inside else visible).append(delta[start:end])
        if end == len(delta):
            return end
        tag = side.tag.match(delta, end)
        assert tag is not None, "only a tag or the beginning of one stops plain text"
        if tag.group().endswith(">"):
            self._toggle()
        else:
            self._hold(tag.group(), tag.group())
        return tag.end()

    def _resume(self, delta: str, visible: list[str]) -> int:
        """Continue a tag that began in an earlier delta; return how much of this one it used."""
        if not self._held:
            return 0
        side = _side(inside=self._inside)
        joined = self._prefix + delta
        match = side.tag.match(joined)
        assert match is not None, "what is held begins with a <"
        taken = match.end() - len(self._prefix)
        if match.group().endswith(">"):
            self._toggle()
            return taken
        if taken == len(delta):
            self._hold(delta, joined)
            return taken
        held = "".join(self._held) + delta[: taken + 1]
        (self._thought if self._inside else visible).append(held)
        self._held.clear()
        self._prefix = ""
        return taken + 1

    def _hold(self, text: str, prefix: str) -> None:
        self._held.append(text)
        self._prefix = "".join(prefix.split())

    def _toggle(self) -> None:
        if self._inside:
            self._thoughts.append("".join(self._thought))
            self._thought.clear()
        self._inside = not self._inside
        self._held.clear()
        self._prefix = ""


def strip_thinking_tags(text: str) -> str:
    """The visible part of a whole text: no thoughts, and no white space around the rest."""
    thinking = ThinkingTagStreamFilter()
    return (thinking.feed(text) + thinking.flush()).strip()


_BRACKETS = re.compile("[<>]")


class ThoughtSplitter:
    """Splits output into text and thoughts, in order, and drops nothing but tags.

    The pieces do not depend on how the output is split into deltas. Thoughts are streamed.
    """

    __slots__ = ("_anywhere", "_filter", "_has_spoken")

    def __init__(self, where: Literal["leading", "anywhere"] = "leading") -> None:
        self._anywhere = where == "anywhere"
        self._filter = ThinkingTagStreamFilter()
        self._has_spoken = False

    @property
    def is_settled(self) -> bool:
        """Whether everything from here on is text."""
        return self._has_spoken and not self._anywhere

    @property
    def is_inside(self) -> bool:
        """Whether it is in the middle of a thought."""
        return self._filter.is_inside

    @property
    def is_holding(self) -> bool:
        """Whether text is held back that may still become a tag."""
        return not self._filter.is_idle and not self._filter.is_inside

    def passes(self, delta: str) -> bool:
        """Whether the whole delta is text."""
        if self._has_spoken:
            return not self._anywhere or ("<" not in delta and self._filter.is_idle)
        return False

    def feed(self, delta: str) -> list[Piece]:
        """Take the next piece of output."""
        pieces: list[Piece] = []
        start = 0
        while start < len(delta):
            if self.is_settled:
                pieces.append(("said", delta[start:]))
                break
            # A thought ends with a ">", and text before a "<" decides whether a tag may follow:
            # fed up to there, no piece holds more than one change.
            end = self._end_of_step(delta, start)
            self._add(pieces, "said", self._filter.feed(delta[start:end]))
            for thought in self._filter.take_thoughts():
                self._add(pieces, "thought", thought)
            self._add(pieces, "thought", self._filter.take_open_thought())
            start = end
        return pieces

    def flush(self) -> list[Piece]:
        """Return what was held back, because the output has ended or something else follows."""
        pieces: list[Piece] = []
        said, thought = self._filter.finish()
        self._add(pieces, "said", said)
        self._add(pieces, "thought", thought)
        return pieces

    def _end_of_step(self, delta: str, start: int) -> int:
        if self._anywhere or self._filter.is_inside:
            return delta.find(">", start) + 1 or len(delta)
        found = _BRACKETS.search(delta, start + 1)
        if found is None:
            return len(delta)
        return found.end() if found.group() == ">" else found.start()

    def _add(self, pieces: list[Piece], kind: Literal["said", "thought"], text: str) -> None:
        if text:
            if kind == "said" and not self._has_spoken and not text.isspace():
                self._has_spoken = True
            pieces.append((kind, text))


def strip_leading_thoughts(text: str) -> str:
    """The visible part of a whole answer: `strip_thinking_tags` by the rule of transports."""
    splitter = ThoughtSplitter()
    pieces = [*splitter.feed(text), *splitter.flush()]
    return "".join([piece for kind, piece in pieces if kind == "said"]).strip()
