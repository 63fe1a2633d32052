"""Docstrings in the three styles."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent.tools.docstrings import parse_docstring

GOOGLE = """Search the notes.

    All words must occur.

    Args:
        query (str): The words,
            separated by spaces.
        limit: How many.

    Returns:
        The titles.
    """

NUMPY = """Search the notes.

    All words must occur.

    Parameters
    ----------
    query : str
        The words,
        separated by spaces.
    limit : int, optional
        How many.

    Returns
    -------
    list
        The titles.
    """

REST = """Search the notes.

    All words must occur.

    :param str query: The words,
        separated by spaces.
    :param limit: How many.
    :type limit: int
    :returns: The titles.
    """


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, REST], ids=["google", "numpy", "rest"])
def test_the_three_styles_say_the_same(docstring: str) -> None:
    parsed = parse_docstring(docstring)
    assert parsed.parameters == {
        "query": "The words, separated by spaces.",
        "limit": "How many.",
    }
    assert parsed.description.startswith("Search the notes.\n\nAll words must occur.")
    assert "The titles." in parsed.description
    assert "limit" not in parsed.description


@pytest.mark.parametrize("empty", [None, "", "   \n  "])
def test_nothing(empty: str | None) -> None:
    parsed = parse_docstring(empty)
    assert parsed.description == ""
    assert parsed.parameters == {}


def test_two_parameters_in_one_numpy_entry() -> None:
    parsed = parse_docstring("Do.\n\nParameters\n----------\nx, y : int\n    A coordinate.\n")
    assert parsed.parameters == {"x": "A coordinate.", "y": "A coordinate."}


def test_several_google_sections() -> None:
    parsed = parse_docstring("Do.\n\nArgs:\n    x: One.\n\nKeyword Args:\n    y: Two.\n\nEnd.")
    assert parsed.parameters == {"x": "One.", "y": "Two."}
    assert parsed.description == "Do.\n\nEnd."


def test_an_entry_without_text() -> None:
    assert parse_docstring("Do.\n\nArgs:\n    x:\n        Below.\n").parameters == {"x": "Below."}
    assert parse_docstring("Do.\n\n:param x:").parameters == {"x": ""}


def test_a_colon_in_prose_is_prose() -> None:
    text = "Do this: that.\n\nNote:\n    Mind the gap.\n\nA time is 12:30:00."
    assert parse_docstring(text).description == text
    assert parse_docstring(text).parameters == {}


def test_a_line_of_an_entry_that_looks_like_one() -> None:
    parsed = parse_docstring("Do.\n\nArgs:\n    mode: One of\n        fast: quickly\n    n: Count.")
    assert parsed.parameters == {"mode": "One of fast: quickly", "n": "Count."}


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    parse_docstring(text)


@given(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1), min_size=1))
def test_prose_without_sections_is_kept_word_for_word(words: list[str]) -> None:
    text = " ".join(words)
    assert parse_docstring(text).description == inspect.cleandoc(text)
