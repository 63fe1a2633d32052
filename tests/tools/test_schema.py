"""Schemas: from types, in the portable and the strict form, and against providers' rules."""

import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any, Literal, NotRequired, Required, TypeAlias, TypedDict

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from msgspec import Meta, Struct

from clark_agent.errors import InvalidArgumentsError, ToolDefinitionError
from clark_agent.tools import FunctionTool, tool
from clark_agent.tools.schema import portable_schema, schema_of_type, strict_schema, tag_of
from clark_agent.tools.schema_rules import SchemaProblem, SchemaRules, check_schema
from tests.cases import all_cases

FEW = settings(max_examples=12)
"""For properties that are checked for each of many types."""

PORTABLE_RULES = [SchemaRules.OPENAI, SchemaRules.ANTHROPIC, SchemaRules.GEMINI]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"
    ALSO = "also"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(Struct):
    """Where."""

    x: int
    y: int = 0


class Node(Struct):
    value: int
    children: list["Node"] = []


class Copy(Struct, tag="copy", tag_field="action"):
    source: str
    target: str
    overwrite: bool = False


class Delete(Struct, tag="delete", tag_field="action"):
    source: str
    depth: Annotated[int, Meta(ge=0)] = 0


class Find(Struct, tag="find", tag_field="action"):
    source: int | None
    near: Point | None = None


Action: TypeAlias = Copy | Delete | Find


@dataclasses.dataclass
class Size:
    width: int
    height: int | None = None


@attrs.define
class Box:
    size: Size
    name: str = "box"


class Filter(TypedDict):
    zeta: str
    alpha: NotRequired[int]


class Model(pydantic.BaseModel):
    name: str
    count: int = 3


class Pair(Struct, array_like=True):
    a: int
    b: int


floats = st.floats(allow_nan=False, allow_infinity=False)
points = st.builds(Point, x=st.integers(), y=st.integers())
sizes = st.builds(Size, width=st.integers(), height=st.none() | st.integers())
actions = st.one_of(
    st.builds(Copy, source=st.text(), target=st.text(), overwrite=st.booleans()),
    st.builds(Delete, source=st.text(), depth=st.integers(0)),
    st.builds(Find, source=st.none() | st.integers(), near=st.none() | points),
)
nodes = st.recursive(
    st.builds(Node, value=st.integers()),
    lambda inner: st.builds(Node, value=st.integers(), children=st.lists(inner, max_size=2)),
    max_leaves=4,
)

# What a parameter may be annotated with, and values of it.
TYPES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "str": (str, st.text()),
    "int": (int, st.integers()),
    "float": (float, floats),
    "bool": (bool, st.booleans()),
    "none": (None, st.none()),
    "any": (Any, st.text() | st.integers()),
    "optional_str": (str | None, st.none() | st.text()),
    "optional_int": (int | None, st.none() | st.integers()),
    "int_or_str": (int | str, st.integers() | st.text()),
    "int_or_float": (int | float, st.integers() | floats),
    "positive": (Annotated[int, Meta(gt=0)], st.integers(1)),
    "below": (Annotated[int, Meta(lt=10)], st.integers(max_value=9)),
    "fraction": (Annotated[float, Meta(gt=0, lt=1)], st.just(0.5)),
    "multiple": (Annotated[int, Meta(multiple_of=3)], st.integers(-99, 99).map(lambda n: 3 * n)),
    "short": (Annotated[str, Meta(max_length=3, min_length=1)], st.text(min_size=1, max_size=3)),
    "pattern": (Annotated[str, Meta(pattern="^[ab]+$")], st.from_regex("^[ab]+\\Z")),
    "described": (Annotated[str, "What it is."], st.text()),
    "list": (list, st.lists(st.integers())),
    "list_int": (list[int], st.lists(st.integers())),
    "list_str_short": (Annotated[list[str], Meta(max_length=2)], st.lists(st.text(), max_size=2)),
    "list_optional": (list[int | None], st.lists(st.none() | st.integers())),
    "matrix": (list[list[float]], st.lists(st.lists(floats))),
    "sequence": (Sequence[int], st.lists(st.integers())),
    "set": (set[int], st.sets(st.integers())),
    "frozenset": (frozenset[str], st.frozensets(st.text())),
    "tuple": (tuple[int, str], st.tuples(st.integers(), st.text())),
    "tuple_of_any_length": (tuple[int, ...], st.lists(st.integers()).map(tuple)),
    "dict": (dict, st.dictionaries(st.text(), st.integers())),
    "dict_str_int": (dict[str, int], st.dictionaries(st.text(), st.integers())),
    "dict_int_str": (dict[int, str], st.dictionaries(st.integers(-(2**63), 2**63), st.text())),
    "mapping": (Mapping[str, bool], st.dictionaries(st.text(), st.booleans())),
    "literal": (Literal["b", "a"], st.sampled_from(["a", "b"])),
    "literal_int": (Literal[2, 1], st.sampled_from([1, 2])),
    "literal_mixed": (Literal["a", 1, None], st.sampled_from(["a", 1, None])),
    "enum": (Color, st.sampled_from(Color)),
    "int_enum": (Level, st.sampled_from(Level)),
    "optional_enum": (Color | None, st.none() | st.sampled_from(Color)),
    "datetime": (dt.datetime, st.datetimes()),
    "date": (dt.date, st.dates()),
    "time": (dt.time, st.times()),
    "timedelta": (dt.timedelta, st.timedeltas(dt.timedelta(0), dt.timedelta(999))),
    "uuid": (uuid.UUID, st.uuids()),
    "decimal": (decimal.Decimal, st.decimals(allow_nan=False, allow_infinity=False, places=2)),
    "bytes": (bytes, st.binary()),
    "struct": (Point | None, st.none() | points),
    "dataclass_or_none": (Size | None, st.none() | sizes),
    "list_of_structs": (list[Point], st.lists(points)),
    "list_of_attrs": (list[Box], st.lists(st.builds(Box, size=sizes, name=st.text()))),
    "dict_of_structs": (dict[str, Point], st.dictionaries(st.text(), points)),
    "typed_dicts": (list[Filter], st.lists(st.fixed_dictionaries({"zeta": st.text()}))),
    "recursive": (list[Node], st.lists(nodes, max_size=2)),
    "tagged_union": (list[Action], st.lists(actions)),
    "optional_union": (Action | None, st.none() | actions),
    "array_like": (list[Pair], st.lists(st.builds(Pair, a=st.integers(), b=st.integers()))),
}

# A lone parameter of these stands for all arguments.
WHOLES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "struct": (Point, points),
    "dataclass": (Size, sizes),
    "attrs": (Box, st.builds(Box, size=sizes, name=st.text())),
    "typed_dict": (
        Filter,
        st.fixed_dictionaries({"zeta": st.text()}, optional={"alpha": st.integers()}),
    ),
    "recursive": (Node, nodes),
    "tagged_union": (Action, actions),
    "pydantic": (Model, st.builds(Model, name=st.text(), count=st.integers(-(2**60), 2**60))),
}

# msgspec takes numbers for these although it writes strings.
LENIENT = {"decimal"}

JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    floats,
    st.text(),
    st.lists(st.none() | st.text() | st.integers(), max_size=3),
    st.dictionaries(st.text(), st.none() | st.text() | st.integers(), max_size=3),
)


def tool_with(*, strict: bool = False, **annotations: Any) -> FunctionTool[..., Any]:
    """A tool with these parameters; one whose name starts with ``maybe`` has a default."""

    async def made(**arguments: Any) -> Any:
        return arguments

    vars(made)["__signature__"] = Signature(
        [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                annotation=annotation,
                default=None if name.startswith("maybe") else Parameter.empty,
            )
            for name, annotation in annotations.items()
        ]
    )
    return tool(made, strict=strict)


def as_json(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    return msgspec.json.decode(msgspec.json.encode(value))


def valid(schema: Mapping[str, Any], instance: Any) -> bool:
    return bool(Draft202012Validator(schema).is_valid(instance))


def read(made: FunctionTool[..., Any], args: Any) -> Any:
    """Parse without repair."""
    return made._plan.read(args)


# --- every type a tool may have ---------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_every_type_has_a_schema_that_all_providers_take(name: str) -> None:
    annotation, _ = TYPES[name]
    schema = tool_with(given=annotation, maybe=annotation).parameters_schema
    Draft202012Validator.check_schema(schema)
    assert [check_schema(schema, rules) for rules in PORTABLE_RULES] == [[], [], []]
    assert list(schema["properties"]) == ["given", "maybe"]
    assert schema["required"] == ["given"]
    assert portable_schema(schema) == schema


@pytest.mark.parametrize("name", WHOLES)
def test_every_object_type_can_be_all_arguments(name: str) -> None:
    schema = tool_with(everything=WHOLES[name][0]).parameters_schema
    Draft202012Validator.check_schema(schema)
    assert [check_schema(schema, rules) for rules in PORTABLE_RULES] == [[], [], []]
    assert "everything" not in schema["properties"]
    assert portable_schema(schema) == schema


@pytest.mark.parametrize("name", TYPES)
def test_valid_arguments_pass_schema_and_tool(name: str) -> None:
    annotation, values = TYPES[name]
    made = tool_with(given=annotation, maybe=annotation)

    @FEW
    @given(values, st.none() | values)
    def check(value: Any, other: Any) -> None:
        args = {"given": as_json(value)}
        if other is not None:
            args["maybe"] = as_json(other)
        assert valid(made.parameters_schema, args)
        parsed = read(made, args)
        assert parsed.given == value
        assert made.validate(args) == parsed

    check()


@pytest.mark.parametrize("name", WHOLES)
def test_valid_objects_pass_schema_and_tool(name: str) -> None:
    annotation, values = WHOLES[name]
    made = tool_with(everything=annotation)

    @FEW
    @given(values)
    def check(value: Any) -> None:
        args = as_json(value)
        assert valid(made.parameters_schema, args)
        assert read(made, args).value == value
        assert made.validate(args).value == value
        assert read(made, value).value == value

    check()


@pytest.mark.parametrize("name", TYPES)
def test_what_the_schema_forbids_the_tool_refuses(name: str) -> None:
    annotation, _ = TYPES[name]
    made = tool_with(given=annotation)

    @FEW
    @given(JUNK)
    def check(value: Any) -> None:
        args = {"given": value}
        if valid(made.parameters_schema, args) or name in LENIENT:
            return
        with pytest.raises(msgspec.ValidationError):
            read(made, args)
        with contextlib.suppress(InvalidArgumentsError):  # unless it can be mended
            made.validate(args)

    check()


def test_missing_arguments_are_refused_by_name() -> None:
    with all_cases() as case:
        for name, (annotation, _) in TYPES.items():
            with case(name):
                made = tool_with(given=annotation)
                assert not valid(made.parameters_schema, {})
                with pytest.raises(InvalidArgumentsError, match='"given" is missing'):
                    made.validate({})


NOT_STRICT = {
    "any",
    "array_like",
    "dict",
    "dict_int_str",
    "dict_of_structs",
    "dict_str_int",
    "list",
    "mapping",
    "recursive",
}


@pytest.mark.parametrize("name", TYPES)
def test_the_strict_form(name: str) -> None:
    annotation, values = TYPES[name]
    if name in NOT_STRICT:
        with pytest.raises(ToolDefinitionError, match=r"made.*strict form cannot express"):
            tool_with(given=annotation, strict=True)
        return
    made = tool_with(given=annotation, maybe=annotation, strict=True)
    schema = made.parameters_schema
    Draft202012Validator.check_schema(schema)
    assert check_schema(schema, SchemaRules.OPENAI_STRICT) == []
    assert [check_schema(schema, rules) for rules in PORTABLE_RULES] == [[], [], []]

    @FEW
    @given(values)
    def check(value: Any) -> None:
        args = {"given": as_json(value), "maybe": None}
        assert made.validate(args).given == value

    check()


@pytest.mark.parametrize("name", sorted(WHOLES.keys() - {"recursive"}))
def test_the_strict_form_of_object_types(name: str) -> None:
    annotation, values = WHOLES[name]
    made = tool_with(everything=annotation, strict=True)
    assert check_schema(made.parameters_schema, SchemaRules.OPENAI_STRICT) == []

    @FEW
    @given(values)
    def check(value: Any) -> None:
        args = dict.fromkeys(made.parameters_schema["properties"]) | as_json(value)
        parsed = made.validate(args).value
        assert as_json(parsed) == as_json(value)

    check()


# --- one shape, five ways to write it ---------------------------------------------------------


class Inner(Struct):
    deep: int


Count = Annotated[int, Meta(description="How many.", ge=1)]


class AsStruct(Struct):
    name: str
    inner: Inner
    count: Count = 1
    color: Color = Color.RED
    note: str | None = None
    order: Literal["up", "down"] = "up"


@dataclasses.dataclass
class AsDataclass:
    name: str
    inner: Inner
    count: Count = 1
    color: Color = Color.RED
    note: str | None = None
    order: Literal["up", "down"] = "up"


@attrs.define
class AsAttrs:
    name: str
    inner: Inner
    count: Count = 1
    color: Color = Color.RED
    note: str | None = None
    order: Literal["up", "down"] = "up"


class PydanticInner(pydantic.BaseModel):
    deep: int


class AsPydantic(pydantic.BaseModel):
    name: str
    inner: PydanticInner
    count: int = pydantic.Field(1, description="How many.", ge=1)
    color: Color = Color.RED
    note: str | None = None
    order: Literal["up", "down"] = "up"


class AsTypedDict(TypedDict, total=False):
    name: Required[str]
    inner: Required[Inner]
    count: Count
    color: Color
    note: str | None
    order: Literal["up", "down"]


def without_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    properties = {
        name: {key: value for key, value in part.items() if key != "default"}
        for name, part in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def test_the_same_shape_gives_the_same_schema() -> None:
    @tool
    async def by_signature(
        name: str,
        inner: Inner,
        count: Count = 1,
        color: Color = Color.RED,
        note: str | None = None,
        order: Literal["up", "down"] = "up",
    ) -> None: ...

    expected = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "inner": {
                "type": "object",
                "properties": {"deep": {"type": "integer"}},
                "required": ["deep"],
            },
            "count": {
                "type": "integer",
                "description": "How many.",
                "minimum": 1,
                "default": 1,
            },
            "color": {"type": "string", "enum": ["red", "blue", "also"], "default": "red"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "order": {"type": "string", "enum": ["up", "down"], "default": "up"},
        },
        "required": ["name", "inner"],
    }
    assert by_signature.parameters_schema == expected
    for shape in (AsStruct, AsDataclass, AsAttrs, AsPydantic):
        schema = tool_with(args=shape).parameters_schema
        assert schema == expected, shape
        assert list(schema["properties"]) == list(expected["properties"]), shape
    schema = tool_with(args=AsTypedDict).parameters_schema
    assert schema == without_defaults(expected)
    assert list(schema["properties"]) == list(expected["properties"])


# --- the portable form ------------------------------------------------------------------------


def test_a_tagged_union_becomes_one_object() -> None:
    assert portable_schema(schema_of_type(Action)) == {
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": ["copy", "delete", "find"]},
            "source": {
                "anyOf": [
                    {
                        "type": "string",
                        "description": 'applies when action is "copy" or "delete"',
                    },
                    {
                        "anyOf": [{"type": "integer"}, {"type": "null"}],
                        "description": 'applies when action is "find"',
                    },
                ]
            },
            "target": {"type": "string", "description": 'applies when action is "copy"'},
            "overwrite": {
                "type": "boolean",
                "default": False,
                "description": 'applies when action is "copy"',
            },
            "depth": {
                "type": "integer",
                "minimum": 0,
                "default": 0,
                "description": 'applies when action is "delete"',
            },
            "near": {
                "anyOf": [
                    {
                        "type": "object",
                        "description": "Where.",
                        "properties": {
                            "x": {"type": "integer"},
                            "y": {"type": "integer", "default": 0},
                        },
                        "required": ["x"],
                    },
                    {"type": "null"},
                ],
                "default": None,
                "description": 'applies when action is "find"',
            },
        },
        "required": ["action", "source"],
    }


def test_the_tag_comes_first_wherever_it_stood() -> None:
    def variant(tag: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"a": {"type": "string"}, "t": {"enum": [tag]}},
            "required": ["t"],
            "additionalProperties": False,
        }

    flat = portable_schema({"oneOf": [variant("x"), variant("y")], "description": "Either."})
    assert list(flat["properties"]) == ["t", "a"]
    assert flat["properties"]["a"] == {"type": "string"}
    assert flat["additionalProperties"] is False
    assert flat["description"] == "Either."


def test_a_union_without_a_tag_is_flattened_too() -> None:
    one = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    two = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
    assert portable_schema({"anyOf": [one, two]}) == {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
    }
    assert tag_of([one, two]) is None
    assert tag_of([]) is None


SCHEMA_PARTS: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(
        st.sampled_from(
            [
                {"type": "string", "title": "T", "format": "nonsense"},
                {"type": "string", "minLength": 2, "contentEncoding": "base64"},
                {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
                {"type": "number", "exclusiveMinimum": 0.5, "multipleOf": 0.25},
                {"type": ["string", "null"], "maxLength": 3, "description": "d"},
                {"type": ["array", "null"]},
                {"const": "a"},
                {"const": True},
                {"const": None},
                {"enum": ["a", 1, None, True, 1.5, [1]]},
                {"$ref": "#/$defs/Text", "description": "mine"},
                {"$ref": "#/$defs/Tree"},
                {"$ref": "#/$defs/Nowhere"},
                {"type": "array", "items": True},
                {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
                {"type": "array", "prefixItems": [{"type": "string"}]},
                {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
                {"type": "object", "patternProperties": {"^a": {"type": "string"}}},
                {"type": "object", "additionalProperties": True},
                True,
                {},
            ]
        ),
        st.builds(
            lambda keyword, parts: {keyword: parts},
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(SCHEMA_PARTS, min_size=1, max_size=3),
        ),
        st.builds(
            lambda items, more: {"type": "array", "items": items, **more},
            SCHEMA_PARTS,
            st.sampled_from([{}, {"maxItems": 1}, {"description": "many"}]),
        ),
        st.builds(
            lambda a, b, more: {
                "type": "object",
                "properties": {"a": a, "b": b},
                "required": ["a", "ghost"],
                **more,
            },
            SCHEMA_PARTS,
            SCHEMA_PARTS,
            st.sampled_from([{}, {"additionalProperties": False}, {"title": "T"}]),
        ),
    )
)
DEFINITIONS = {
    "Text": {"type": "string", "title": "Text"},
    "Tree": {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
    },
    "Nowhere": {},
}
INSTANCES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10) | st.sampled_from([0.75, 1.5, "a", "abc", ""]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "kids", "ghost"]), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(SCHEMA_PARTS, INSTANCES)
def test_making_a_schema_portable_never_forbids_what_was_allowed(part: Any, instance: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"it": part},
        "required": ["it"],
        "$defs": DEFINITIONS,
    }
    portable = portable_schema(schema)
    Draft202012Validator.check_schema(portable)
    assert [check_schema(portable, rules) for rules in PORTABLE_RULES] == [[], [], []]
    assert portable_schema(portable) == portable
    if valid(schema, {"it": instance}):
        assert valid(portable, {"it": instance})


@given(actions)
def test_flattening_a_union_keeps_every_instance_valid(action: Action) -> None:
    instance = as_json(action)
    assert valid(schema_of_type(Action), instance)
    assert valid(portable_schema(schema_of_type(Action)), instance)


def test_dropped_limits_are_told() -> None:
    described = portable_schema(
        {"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.5, "description": "A step."}
    )
    assert described == {
        "type": "number",
        "minimum": 0,
        "description": "A step. (greater than 0) (a multiple of 0.5)",
    }
    assert portable_schema({"type": "integer", "exclusiveMinimum": 0, "minimum": 5}) == {
        "type": "integer",
        "minimum": 5,
    }
    assert portable_schema({"type": "array", "uniqueItems": False}) == {
        "type": "array",
        "items": {},
    }


def test_tuples_as_older_drafts_write_them() -> None:
    pair = {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]}
    assert portable_schema(pair)["items"] == {}
    assert portable_schema({**pair, "maxItems": 2})["items"] == {
        "anyOf": [{"type": "string"}, {"type": "integer"}]
    }


def test_a_recursive_type_is_cut() -> None:
    inner = portable_schema(schema_of_type(Node))["properties"]["children"]["items"]
    assert inner == {"type": "object"}
    tree = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/T"}}]}
    top = {"type": "object", "properties": {"t": {"$ref": "#/$defs/T"}}, "$defs": {"T": tree}}
    assert portable_schema(top)["properties"]["t"]["anyOf"][1] == {"type": "array", "items": {}}


def test_a_pydantic_model_inside_other_types() -> None:
    made = tool_with(models=list[Model])
    args = {"models": [{"name": "n"}]}
    assert valid(made.parameters_schema, args)
    assert made.validate(args).models == [Model(name="n")]
    with pytest.raises(InvalidArgumentsError, match="models"):
        made.validate({"models": [{"count": 1}]})


# --- providers' rules -------------------------------------------------------------------------

OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def nested(levels: int) -> dict[str, Any]:
    schema = closed(a={"type": "string"})
    for _ in range(levels - 1):
        schema = closed(a=schema)
    return schema


@pytest.mark.parametrize(
    ("rules", "schema", "path", "says"),
    [
        *[(rules, {"type": "string"}, "$", "must be an object") for rules in SchemaRules],
        *[
            (rules, {**OBJECT, "anyOf": [OBJECT]}, "$", "anyOf is not supported at the top")
            for rules in SchemaRules
        ],
        *[(rules, {**OBJECT, "required": ["b"]}, "$", "'b'") for rules in SchemaRules],
        *[
            (rules, {"type": "object", "properties": {"a": {"type": "array"}}}, ".a", "items")
            for rules in SchemaRules
        ],
        *[
            (rules, {"type": "object", "properties": {"a": {"type": "text"}}}, ".a", "'text'")
            for rules in SchemaRules
        ],
        *[
            (rules, {"type": "object", "properties": {"a": {"$ref": "#/$defs/B"}}}, ".a", "'#/")
            for rules in SchemaRules
        ],
        (
            SchemaRules.OPENAI,
            {"type": "object", "properties": {"a": {"type": "array", "items": True}}},
            ".a",
            "not a boolean",
        ),
        (SchemaRules.OPENAI, {**OBJECT, "not": {}}, "$", "not is not supported at the top"),
        (SchemaRules.OPENAI_STRICT, OBJECT, "$", "additionalProperties"),
        (SchemaRules.OPENAI_STRICT, OBJECT, "$", "'a' must be required"),
        (SchemaRules.OPENAI_STRICT, closed(a={}), ".a", "type"),
        (SchemaRules.OPENAI_STRICT, closed(a={"type": "string", "default": ""}), ".a", "default"),
        (
            SchemaRules.OPENAI_STRICT,
            closed(a={"type": "string", "format": "decimal"}),
            ".a",
            "'decimal'",
        ),
        (SchemaRules.OPENAI_STRICT, nested(11), "$", "11 levels"),
        (
            SchemaRules.OPENAI_STRICT,
            closed(a={"type": "integer", "enum": [*range(1001)]}),
            "$",
            "1001 enum values",
        ),
        (
            SchemaRules.OPENAI_STRICT,
            closed(a={"type": "string", "enum": [f"{n:0100}" for n in range(251)]}),
            ".a",
            "15000",
        ),
        (
            SchemaRules.OPENAI_STRICT,
            closed(**{f"p{n}": {"type": "string"} for n in range(5001)}),
            "$",
            "5001 properties",
        ),
        (
            SchemaRules.OPENAI_STRICT,
            closed(a={"type": "string", "const": "x" * 120_000}),
            "$",
            "120001 characters",
        ),
        (
            SchemaRules.ANTHROPIC,
            {"type": "object", "properties": {"a b": {"type": "string"}}},
            "$",
            "'a b'",
        ),
        (
            SchemaRules.GEMINI,
            {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 2}}},
            ".a",
            "multipleOf",
        ),
        (
            SchemaRules.GEMINI,
            {"type": "object", "properties": {"a": {"enum": [True]}}},
            ".a",
            "strings or numbers",
        ),
    ],
)
def test_rules(rules: SchemaRules, schema: dict[str, Any], path: str, says: str) -> None:
    found = check_schema(schema, rules)
    assert any(path in problem.path and says in problem.rule for problem in found), found


def test_what_just_fits() -> None:
    assert check_schema(nested(10), SchemaRules.OPENAI_STRICT) == []
    many = closed(**{f"p{n}": {"type": "string"} for n in range(5000)})
    assert check_schema(many, SchemaRules.OPENAI_STRICT) == []
    referring = {**closed(a={"$ref": "#/$defs/T"}), "$defs": {"T": {"type": "string"}}}
    assert check_schema(referring, SchemaRules.OPENAI_STRICT) == []
    assert check_schema({"type": "string"}, SchemaRules.GEMINI) == [
        SchemaProblem("$", "the parameters must be an object")
    ]


def test_the_strict_form_spells_out_what_it_drops() -> None:
    schema = strict_schema(
        {
            "type": "object",
            "properties": {
                "a": {"type": "string", "minLength": 2, "default": "xx", "description": "A."},
                "b": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            },
        }
    )
    assert schema == closed(
        a={
            "description": 'A. (default "xx") (at least 2 characters)',
            "anyOf": [{"type": "string"}, {"type": "null"}],
        },
        b={"anyOf": [{"type": "string"}, {"type": "null"}]},
    )
