"""What a model that only continues text is shown: one line for each thing, and examples that are
right. No model is asked here.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from typing import Annotated, Any, Literal

import jsonschema
import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from clark_agent import ToolSchema, tool
from clark_agent.tools import portable_schema
from clark_agent.transports.local.packaged.prompts import (
    COMMON_WORDS,
    Step,
    Turn,
    answer_prompt,
    call_prompt,
    quoted,
    shared_words,
    with_facts,
)
from tests.strategies import TEXT

NAMES = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64)
OWN = "own_tool"


def object_of(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def example_for(parameters: Any, *, description: str = "Do it.") -> Any:
    """The arguments of the example that is made for a tool with such parameters."""
    prompt = call_prompt([ToolSchema(OWN, description, parameters)], "Hi")
    [written] = re.findall(rf"^assistant: call {OWN} (.*)$", prompt, re.MULTILINE)
    return msgspec.json.decode(written)


# --- examples hold to the schema ----------------------------------------------------------------


def limits(low: str, high: str, numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """None, one or both of two limits, in order."""

    def made(pair: Sequence[Any]) -> dict[str, Any]:
        least, most = sorted(pair, key=lambda n: 0 if n is None else n)
        given = {low: least, high: most} if None not in pair else {low: pair[0], high: pair[1]}
        return {name: value for name, value in given.items() if value is not None}

    return st.tuples(*[st.none() | numbers] * 2).map(made)


def typed(kind: str, more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return more.map(lambda keywords: {"type": kind, **keywords})


SCALARS = st.one_of(
    typed("string", limits("minLength", "maxLength", st.integers(0, 40))),
    typed("integer", limits("minimum", "maximum", st.integers(-1000, 1000))),
    typed("number", limits("minimum", "maximum", st.floats(-1000, 1000))),
    st.just({"type": "boolean"}),
    st.lists(TEXT, min_size=1, max_size=3).map(lambda texts: {"type": "string", "enum": texts}),
    st.lists(st.integers(), min_size=1, max_size=3).map(lambda n: {"type": "integer", "enum": n}),
    st.just({}),
)


def _objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(properties: dict[str, Any], wanted: Sequence[bool]) -> dict[str, Any]:
        required = [name for name, is_wanted in zip(properties, wanted, strict=False) if is_wanted]
        return object_of(properties, *required)

    flags = st.lists(st.booleans(), min_size=3, max_size=3)
    return st.builds(made, st.dictionaries(TEXT, parts, max_size=3), flags)


def _larger(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            lambda items, few: {"type": "array", "items": items, **few},
            parts,
            limits("minItems", "maxItems", st.integers(0, 3)),
        ),
        parts.map(lambda part: {"anyOf": [{"type": "null"}, part]}),
        parts.map(lambda part: {"type": "object", "additionalProperties": part}),
        parts.map(
            lambda part: {"type": "object", "additionalProperties": part, "minProperties": 1}
        ),
        _objects(parts),
    )


PARAMETERS = _objects(st.recursive(SCALARS, _larger, max_leaves=5)).map(portable_schema)


@given(PARAMETERS)
@example(object_of({"n": {"type": "integer", "minimum": 10}}, "n"))
@example(object_of({"n": {"type": "number", "maximum": -0.5}}, "n"))
@example(object_of({"s": {"type": "string", "minLength": 30}}, "s"))
@example(object_of({"s": {"type": "string", "maxLength": 0}}, "s"))
@example(object_of({"o": object_of({"x": {"type": "integer"}}, "x")}, "o"))
@example(object_of({"a": {"type": "array", "items": {"type": "boolean"}, "minItems": 2}}, "a"))
@example(object_of({"o": {"anyOf": [{"type": "null"}, {"type": "integer"}]}}, "o"))
@example({})
@example({"type": "object"})
@example({"type": "object", "properties": None, "required": None})
def test_the_example_for_a_tool_holds_to_its_schema(parameters: dict[str, Any]) -> None:
    made = example_for(parameters)
    assert isinstance(made, dict)
    if parameters.get("properties"):
        jsonschema.Draft202012Validator(parameters).validate(made)
        assert made.keys() == set(parameters.get("required", ()))


class Point(Struct):
    x: int
    y: Annotated[float, Meta(ge=0.5, le=0.75)]


class Line(Struct):
    ends: Annotated[list[Point], Meta(min_length=2)]
    label: str | None


def _nothing() -> str:
    return ""


def _scalars(
    count: Annotated[int, Meta(ge=100)], ratio: Annotated[float, Meta(le=-1)], is_on: bool
) -> str:
    return ""


def _texts(
    code: Annotated[str, Meta(min_length=12)], initial: Annotated[str, Meta(max_length=1)]
) -> str:
    return ""


def _choices(state: Literal["on", "off"], level: Literal[1, 2], mixed: Literal["a", 7]) -> str:
    return ""


def _nested(line: Line, lines: list[Line], by_name: dict[str, Point], more: Any) -> str:
    return ""


def _optional(name: str, note: str | None, day: date, at: datetime, size: int = 3) -> str:
    return ""


@pytest.mark.parametrize(
    "function", [_nothing, _scalars, _texts, _choices, _nested, _optional], ids=lambda f: f.__name__
)
def test_the_example_for_a_function_holds_to_its_schema(function: Callable[..., str]) -> None:
    made = tool(function, name=OWN, description="Do it.")
    arguments = example_for(made.schema.parameters)
    jsonschema.Draft202012Validator(made.schema.parameters).validate(arguments)
    made.validate(arguments)


def test_references_are_followed_once_the_schema_is_portable() -> None:
    point = object_of({"x": {"type": "integer"}}, "x")
    schema = {**object_of({"at": {"$ref": "#/$defs/Point"}}, "at"), "$defs": {"Point": point}}
    made = example_for(portable_schema(schema))
    jsonschema.Draft202012Validator(schema).validate(made)


def test_two_arguments_are_not_alike() -> None:
    text = {"type": "string"}
    made = example_for(object_of({"first": text, "second": text, "third": text}, "first", "second"))
    assert len(set(made.values())) == len(made) == 2


def test_usual_names_get_usual_values() -> None:
    text = {"type": "string"}
    made = example_for(object_of({"path": text, "home_city": text}, "path", "home_city"))
    assert made == {"path": "report.txt", "home_city": "Lima"}


# --- every line is what it seems ----------------------------------------------------------------

STEPS = st.builds(Step, NAMES, st.just({}), TEXT)
TURNS = st.builds(Turn, TEXT, st.lists(STEPS, max_size=2).map(tuple), TEXT)
TOOLS = st.lists(st.builds(ToolSchema, NAMES, TEXT, PARAMETERS), max_size=3)
NO_TOOLS = call_prompt([], "Hi").split("\n")


@given(TOOLS, TEXT)
@example([ToolSchema(OWN, "One.\n\nTwo.", object_of({"a\nb": {"type": "string"}}))], "x\ny")
@example([ToolSchema(OWN, "", object_of({"a": {"enum": ["x\ny"]}}, "a"))], "\u2028")
@example([ToolSchema(OWN, "", object_of({"a": {"type": "string", "examples": ["x\ny"]}}, "a"))], "")
def test_a_question_about_tools_has_as_many_lines_as_it_should(
    tools: list[ToolSchema], question: str
) -> None:
    lines = call_prompt(tools, question).split("\n")
    assert len(lines) == len(NO_TOOLS) + 4 * len(tools)  # a signature, a blank line, an exchange
    assert lines[0] == "Tools:"
    for tool_schema, line in zip(tools, lines[1:], strict=False):
        assert line.startswith(f"{tool_schema.name}(")
    exchanges = lines[lines.index("") :]
    for blank, asked, done in zip(*[exchanges[start::3] for start in range(3)], strict=True):
        assert blank == ""
        assert asked.startswith("user: ")
        assert done.startswith(("assistant: call ", "assistant: say ")) or done == "assistant:"
    assert lines[-2:] == [f"user: {quoted(question)}", "assistant:"]


@given(TEXT, st.lists(TURNS, max_size=2), TURNS)
def test_a_question_for_an_answer_has_as_many_lines_as_it_should(
    system: str, earlier: list[Turn], last: Turn
) -> None:
    turn = Turn(last.question, last.steps)
    prompt = answer_prompt(system, earlier, turn)
    assert prompt.startswith(system.strip())
    # What comes before the conversation is always the same.
    head, _, _ = answer_prompt(system, [], turn).rpartition("user: ")
    assert prompt.startswith(head)
    lines = prompt.removeprefix(head).split("\n")
    expected: list[str] = []
    for each in (*earlier, turn):
        expected.append(f"user: {quoted(each.question)}")
        expected += [f"result: {quoted(step.result)}" for step in each.steps[-1:]]
        expected += [f"assistant: {quoted(each.answer)}" if each.answer else "assistant:", ""]
    assert lines == expected[:-1]


@given(TEXT)
def test_quoted_text_is_one_line(text: str) -> None:
    line = quoted(text)
    assert len(line.splitlines()) <= 1
    assert "\0" not in line, "llama.cpp takes it for the end"
    assert quoted(line) == line == line.strip()
    assert line.split() == text.replace("\0", " ").split()


@given(TEXT, st.lists(TEXT, max_size=3), st.integers(1, 20))
def test_facts_stand_behind_the_question(question: str, facts: list[str], longest: int) -> None:
    asked = with_facts(question, facts, longest=longest)
    assert len(asked.splitlines()) <= 1
    assert asked.startswith(quoted(question))
    assert len(asked) <= len(question) + len(facts) * (longest + len(" It says: ."))


def test_facts_are_sentences() -> None:
    assert with_facts("How\nmuch?", ["It is 14.", "Two\nlines"]) == (
        "How much? It says: It is 14. It says: Two lines."
    )


# --- what was read before need not be read again ------------------------------------------------


@given(TOOLS, TEXT, TEXT)
def test_questions_about_the_same_tools_begin_alike(
    tools: list[ToolSchema], first: str, second: str
) -> None:
    prompts = [call_prompt(tools, question) for question in (first, second)]
    tail = len(f"{quoted(first)}\nassistant:")
    assert prompts[1].startswith(prompts[0][:-tail])


@given(TEXT, st.lists(TURNS, min_size=1, max_size=3), TEXT)
def test_a_conversation_goes_on_where_it_was(system: str, turns: list[Turn], text: str) -> None:
    """But for the examples, which depend on whether there is a result to report."""
    assume(text.strip())
    talk = [Turn(turn.question, (), turn.answer) for turn in turns]
    before = answer_prompt(system, talk[:-1], Turn(talk[-1].question))
    after = answer_prompt(system, [*talk[:-1], Turn(talk[-1].question, (), text)], Turn("More?"))
    assert after.startswith(before)
    assert after.removeprefix(before) == f" {quoted(text)}\n\nuser: More?\nassistant:"


# --- what a question and a tool have in common --------------------------------------------------

WEATHER = ToolSchema(
    "get_weather",
    "Tell the weather of a city.",
    object_of(
        {
            "city": {"type": "string", "description": "Where to look."},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "city",
    ),
)


@pytest.mark.parametrize(
    ("question", "count"),
    [
        ("", 0),
        ("What is this?", 0),
        ("How is the weather?", 1),
        ("WEATHER, weather and the weathers", 1),
        ("Which cities have weather?", 1),  # a stem is no dictionary
        ("weather in the city, in fahrenheit", 3),
        ("Is anybody looking?", 1),
        ("42 + 1", 0),
    ],
)
def test_words_that_a_question_and_a_tool_share(question: str, count: int) -> None:
    assert shared_words(question, WEATHER) == count


@given(st.lists(st.sampled_from(sorted(COMMON_WORDS)), max_size=8), TOOLS)
def test_common_words_do_not_count(words: list[str], tools: list[ToolSchema]) -> None:
    for each in tools:
        assert shared_words(" ".join(words), each) == 0


@given(TEXT, TOOLS)
def test_no_more_words_are_shared_than_there_are(question: str, tools: list[ToolSchema]) -> None:
    for each in tools:
        assert 0 <= shared_words(question, each) <= len(re.findall(r"[a-zA-Z]{2,}", question))
