"""Arguments that do not fit: what is mended, and what the model is told."""

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from clark_agent.errors import InvalidArgumentsError
from clark_agent.tools import tool
from clark_agent.tools.repair import close_match, explain_arguments, quoted, repair_arguments


class Cat(Struct, tag="cat"):
    lives: int


class Dog(Struct, tag="dog"):
    tricks: list[int]


class Inner(Struct):
    depth: int = 1
    flag: bool = False


@tool
def everything(
    text: str,
    count: int = 0,
    ratio: float = 0.5,
    sure: bool = False,
    tags: list[str] | None = None,
    inner: Inner | None = None,
    numbers: dict[str, int] | None = None,
    pets: list[Cat | Dog] | None = None,
    mode: Literal["fast", "slow"] = "fast",
    number_or_text: int | str = 0,
    anything: Any = None,
    level: Literal[1, 2] = 1,
) -> None: ...


SCHEMA = everything.parameters_schema


def mended(**args: Any) -> Any:
    return repair_arguments(args, SCHEMA)


@pytest.mark.parametrize(
    ("name", "sent", "meant"),
    [
        ("count", "42", 42),
        ("count", " -7 ", -7),
        ("count", "+7", 7),
        ("count", "42.0", 42),
        ("count", 42.0, 42),
        ("ratio", "3.5", 3.5),
        ("ratio", "1e3", 1000.0),
        ("ratio", "3", 3),
        ("sure", "true", True),
        ("sure", " False", False),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("tags", "null", None),
        ("inner", '{"depth": "2"}', {"depth": 2}),
        ("inner", {"depth": "2", "flag": None}, {"depth": 2}),
        ("numbers", {"a": "1"}, {"a": 1}),
        ("pets", [{"type": "cat", "lives": "9"}], [{"type": "cat", "lives": 9}]),
        ("pets", [{"type": "dog", "tricks": "[1]"}], [{"type": "dog", "tricks": [1]}]),
        ("level", "2", 2),
    ],
)
def test_what_is_mended(name: str, sent: Any, meant: Any) -> None:
    repaired = mended(**{name: sent})[name]
    assert repaired == meant
    assert type(repaired) is type(meant)
    everything.validate({"text": "", name: sent})


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("count", "abc"),
        ("count", ""),
        ("count", "1_000"),
        ("count", "٤٢"),
        ("count", "4.5"),
        ("count", 4.5),
        ("count", "9" * 5000),
        ("count", True),
        ("ratio", "nan"),
        ("ratio", "1e999"),
        ("ratio", "1e"),
        ("sure", "yes"),
        ("sure", 1),
        ("tags", "a, b"),
        ("tags", '["a"'),
        ("tags", '{"a": 1}'),
        ("inner", "[" * 100_000),
        ("pets", [{"type": "bird", "lives": "9"}]),
        ("pets", [{"lives": "9", "tricks": "[]"}]),
        ("text", 5),
    ],
)
def test_what_is_left_alone(name: str, sent: Any) -> None:
    args = {name: sent}
    assert repair_arguments(args, SCHEMA) is args
    with pytest.raises(InvalidArgumentsError):
        everything.validate({"text": "", **args})


@pytest.mark.parametrize("value", ["42", "true", "null", "[1]", 42.0])
def test_text_stays_text_where_text_is_declared(value: Any) -> None:
    args = {"text": value, "number_or_text": value, "anything": value}
    assert repair_arguments(args, {**SCHEMA}) == args


def test_nulls_are_dropped_where_they_are_not_declared() -> None:
    assert mended(count=None, tags=None, anything=None, unknown=None) == {
        "tags": None,
        "anything": None,
        "unknown": None,
    }


def test_no_arguments() -> None:
    assert repair_arguments(None, SCHEMA) == {}
    assert repair_arguments('{"text": "x"}', SCHEMA) == {"text": "x"}


def test_the_given_arguments_are_not_changed() -> None:
    args = {"count": "1", "inner": {"depth": "2"}, "numbers": {"a": "3"}}
    before = msgspec.json.encode(args)
    repair_arguments(args, SCHEMA)
    assert msgspec.json.encode(args) == before


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(SCHEMA["properties"], JSON)))
def test_anything_can_be_repaired_and_explained(args: Any) -> None:
    repaired = repair_arguments(args, SCHEMA)
    assert repair_arguments(repaired, SCHEMA) == repaired
    reason = explain_arguments(args, SCHEMA)
    assert reason is None or len(reason) < 3000


FITTING = st.fixed_dictionaries(
    {"text": st.text()},
    optional={
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
        "sure": st.booleans(),
        "tags": st.none() | st.lists(st.text() | st.sampled_from(["1", "true", "null", "[]"])),
        "inner": st.none() | st.fixed_dictionaries({}, optional={"depth": st.integers()}),
        "numbers": st.none() | st.dictionaries(st.text(), st.integers()),
        "pets": st.none()
        | st.lists(st.builds(lambda n: {"type": "cat", "lives": n}, st.integers())),
        "mode": st.sampled_from(["fast", "slow"]),
        "number_or_text": st.integers() | st.text() | st.sampled_from(["1", "null"]),
        "anything": JSON,
    },
)


@given(FITTING)
def test_what_parses_is_never_touched(args: dict[str, Any]) -> None:
    parsed = everything._plan.read(args)
    assert everything.validate(args) == parsed
    assert repair_arguments(args, SCHEMA) is args
    assert explain_arguments(args, SCHEMA) is None


# --- what the model is told -------------------------------------------------------------------


def told(args: Any) -> str:
    with pytest.raises(InvalidArgumentsError) as caught:
        everything.validate(args)
    assert caught.value.tool == "everything"
    return caught.value.reason


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (
            {"text": "", "count": "abc"},
            'path $.count: expected an integer, got the string "abc"',
        ),
        ({"text": 5}, "path $.text: expected a string, got 5"),
        ({"text": "", "tags": ["a", 2]}, "path $.tags[1]: expected a string, got 2"),
        (
            {"text": "", "tags": "a"},
            'path $.tags: expected an array or null, got the string "a"',
        ),
        (
            {"text": "", "mode": "quick"},
            'path $.mode: expected one of "fast", "slow", got the string "quick"',
        ),
        ({"text": "", "inner": {"depth": []}}, "path $.inner.depth: expected an integer, got []"),
        ({"text": "", "numbers": {"a": "b"}}, "path $.numbers.a: expected an integer, got the s"),
        (
            {"text": "", "pets": [{"type": "cat"}]},
            'the required argument "lives" of $.pets[0] is missing',
        ),
        ({}, 'the required argument "text" is missing'),
        ([], "path $: expected an object, got []"),
        (
            {"txet": "hello"},
            'the required argument "text" is missing; "txet" is not an argument; '
            'did you mean "text"?',
        ),
        (
            {"text": 1, "count": "a", "sure": 2},
            "path $.text: expected a string, got 1; "
            'path $.count: expected an integer, got the string "a"; '
            "path $.sure: expected a boolean, got 2",
        ),
    ],
)
def test_reasons(args: Any, reason: str) -> None:
    assert reason in told(args)


def test_long_values_are_cut_and_long_lists_of_problems_too() -> None:
    assert len(told({"text": "", "count": "x" * 10_000})) < 300
    reason = told({"text": "", "tags": [*range(100)]})
    assert reason.count("expected") == 5
    assert reason.endswith("and more")


def test_limits_are_explained() -> None:
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 1, "maximum": 9},
            "s": {"type": "string", "minLength": 2, "maxLength": 3},
            "l": {"type": "array", "items": {}, "minItems": 1, "maxItems": 1},
        },
        "additionalProperties": False,
    }
    assert explain_arguments({"n": 0, "s": "a", "l": []}, schema) == (
        "path $.n: expected at least 1, got 0; "
        'path $.s: expected at least 2 characters, got the string "a"; '
        "path $.l: expected at least 1 items, got []"
    )
    assert explain_arguments({"n": 10, "s": "abcd", "l": [1, 2]}, schema) == (
        "path $.n: expected at most 9, got 10; "
        'path $.s: expected at most 3 characters, got the string "abcd"; '
        "path $.l: expected at most 1 items, got [1,2]"
    )
    assert explain_arguments({"nn": 1}, schema) == '"nn" is not an argument; did you mean "n"?'


def test_helpers() -> None:
    assert close_match("limt", ["query", "limit"]) == "limit"
    assert close_match("zzz", ["query", "limit"]) is None
    assert quoted(object).startswith("<class")
