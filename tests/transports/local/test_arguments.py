"""What of a call's arguments somebody has said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent.stream import ToolSchema
from clark_agent.transports.local.packaged.arguments import (
    copying,
    is_said,
    with_choices_said,
    without_unsaid,
    words,
    words_of,
)


def schema(required: list[str], **properties: Any) -> ToolSchema:
    parameters = {"type": "object", "properties": properties, "required": required}
    return ToolSchema("tool", "Does something.", parameters)


TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "number"}
ROOMS: dict[str, Any] = {"type": "string", "enum": ["Oak", "Elm tree", "Birch"]}


@pytest.mark.parametrize(
    ("arguments", "question", "expected"),
    [
        ({"path": "notes/todo.txt"}, "What does notes/todo.txt say?", True),
        ({"path": "NOTES.txt"}, "Read notes.txt", True),
        ({"path": "note.txt"}, "Read notes.txt", False),
        ({"path": "path"}, "Which path is it?", False),
        ({"path": ""}, "Read it", False),
        ({"amount": 14.0}, "Take 14 of them", True),
        ({"amount": 15}, "Take 14 of them", False),
        ({"path": "14*3"}, "14 times 3", True),
        ({"path": "a", "amount": 3}, "a and 3", True),
        ({"path": "a", "amount": 3}, "a and 4", True),  # the optional one is left out
    ],
)
def test_arguments_are_said_word_by_word(
    arguments: dict[str, Any], question: str, expected: bool
) -> None:
    tool = schema(["path"], path=TEXT, amount=NUMBER)
    assert is_said(tool, arguments, set(words(question))) is expected


def test_a_tool_without_arguments_needs_nothing_said() -> None:
    assert is_said(schema([]), {}, {"hello"})


def test_of_a_tool_that_takes_something_something_must_have_been_said() -> None:
    tool = schema([], path=TEXT, limit=NUMBER)
    said = set(words("Read apples.txt"))
    assert not is_said(tool, {}, said)
    assert not is_said(tool, {"path": "pears.txt"}, said)  # which would be left out
    assert is_said(tool, {"path": "apples.txt", "limit": 10}, said)


def test_a_choice_that_was_said_is_the_one() -> None:
    tool = schema([], room=ROOMS, text=TEXT)
    narrow = with_choices_said(tool, set(words("The elm tree, please")))
    assert narrow.parameters["properties"]["room"]["enum"] == ["Elm tree"]
    assert narrow.parameters["required"] == ["room"]
    assert tool.parameters["required"] == []  # the tool itself stays as it was


def test_of_several_choices_that_were_said_any_may_be_meant() -> None:
    narrow = with_choices_said(schema([], room=ROOMS), set(words("Oak or birch?")))
    assert narrow.parameters["properties"]["room"]["enum"] == ["Oak", "Birch"]
    assert narrow.parameters["required"] == []


def test_optional_arguments_that_nobody_has_said_are_left_out() -> None:
    tool = schema(["path"], path=TEXT, offset=NUMBER, limit=NUMBER)
    arguments = {"path": "made up", "offset": 1, "limit": 20}
    fitting = without_unsaid(tool, arguments, set(words("the first 20 lines")))
    assert list(fitting.parameters["properties"]) == ["path", "limit"]


def test_texts_can_be_held_to_the_words_of_the_question() -> None:
    tool = copying(schema(["path"], path=TEXT, n=NUMBER, room=ROOMS), "Read 'my notes.txt', now!")
    held = tool.parameters["properties"]
    assert held["path"]["enum"][:4] == ["Read", "my", "notes.txt", "now"]
    assert "my notes.txt" in held["path"]["enum"]
    assert (held["n"], held["room"]) == (NUMBER, ROOMS)


@given(st.text(max_size=200))
def test_whatever_is_copied_was_said(question: str) -> None:
    tool = copying(schema(["path"], path=TEXT), question)
    for choice in tool.parameters["properties"]["path"].get("enum", ()):
        assert set(words(choice)) <= set(words(question))


def test_the_words_of_an_argument_are_those_of_all_that_is_in_it() -> None:
    value = {"a": ["One two", 3, 4.5, None, True], "b": {"c": "Six"}}
    assert list(words_of(value)) == ["one", "two", "3", "4", "5", "six"]
