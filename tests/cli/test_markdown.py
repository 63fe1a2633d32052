"""Markdown while it streams: cut into blocks, none lost, each rendered once."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from clark_agent.cli.markdown import MarkdownBlocks, rendered

DOCUMENT = """\
# Title
A paragraph of
two lines with List<int> in it.

- one

  ```python
  in_a_list()

  ```
- two
    - nested

Behind the list.
```
a fence

## not a heading
```
| a | b |
|---|---|
| 1 | 2 |

~~~~
```
~~~~
1. last
"""
BLOCKS = [
    "# Title",
    "A paragraph of\ntwo lines with List<int> in it.",
    "- one\n\n  ```python\n  in_a_list()\n\n  ```\n- two\n    - nested",
    "Behind the list.",
    "```\na fence\n\n## not a heading\n```",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "~~~~\n```\n~~~~",
    "1. last",
]


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def blocks_of(pieces: list[str]) -> list[str]:
    blocks = MarkdownBlocks()
    return [block for piece in pieces for block in blocks.feed(piece)] + blocks.close()


def shown(blocks: list[str]) -> list[str]:
    out = io.StringIO()
    for block in blocks:
        Console(file=out, width=60).print(rendered(block))
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


@given(st.lists(st.integers(0, 20)))
def test_blocks_are_the_same_however_the_text_is_cut(sizes: list[int]) -> None:
    assert blocks_of(cut(DOCUMENT, sizes)) == BLOCKS


@given(st.text("ab`~#-1. \n|<>*", max_size=80), st.lists(st.integers(0, 9)))
def test_nothing_is_lost(text: str, sizes: list[int]) -> None:
    blocks = blocks_of(cut(text, sizes))
    assert "".join("".join(blocks).split()) == "".join(text.split())
    assert blocks == blocks_of([text])


def test_blocks_look_as_the_whole_does() -> None:
    assert shown(BLOCKS) == shown([DOCUMENT])
    assert any("List<int>" in line for line in shown(BLOCKS))


def test_a_block_comes_as_soon_as_it_is_finished() -> None:
    blocks = MarkdownBlocks()
    assert blocks.feed("# Title\nSome te") == ["# Title"]
    assert blocks.tail(100) == "Some te"
    assert blocks.feed("xt\n\n``") == ["Some text"]
    assert blocks.feed("`\ncode\n") == []
    assert blocks.tail(100) == "```\ncode\n"
    assert blocks.feed("```\n") == ["```\ncode\n```"]
    assert blocks.tail(100) == ""


@given(st.text("ab\n", max_size=60), st.integers(1, 30))
def test_the_tail_is_the_end_of_what_is_open(text: str, size: int) -> None:
    blocks = MarkdownBlocks()
    blocks.feed("```\n")
    for character in text:
        blocks.feed(character)
    tail = blocks.tail(size)
    assert f"```\n{text}".endswith(tail)
    assert len(tail) >= min(size, len(text))


def test_the_tail_of_a_long_block_is_short() -> None:
    blocks = MarkdownBlocks()
    blocks.feed("```\n" + "a line of code\n" * 10_000)
    assert len(blocks.tail(100)) < 130
