"""What servers return, as content of ours."""

from __future__ import annotations

import base64
import json
from typing import Any

import jsonschema
import mcp_types as types
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from clark_agent.mcp._mending import mended_message, mended_tools
from clark_agent.mcp.content import prompt_messages
from clark_agent.mcp.definition import UnusableToolError, _checkable, definition_of
from clark_agent.mcp.results import Reader, clip, json_value
from clark_agent.toolkit import without_marks
from clark_agent.tools import ToolResult
from clark_agent.tools.repair import explain_arguments
from clark_agent.types import FileContent, ImageContent, TextContent

PNG = base64.b64encode(b"\x89PNG").decode()


def reader(*, most: int = 10_000, untrusted: bool = False) -> Reader:
    return Reader("s", most=most, untrusted=untrusted, redact=str)


def result(*content: Any, **fields: Any) -> types.CallToolResult:
    return types.CallToolResult(content=list(content), **fields)


def test_every_kind_of_content() -> None:
    given = result(
        types.TextContent(text="hello"),
        types.ImageContent(data=PNG, mime_type="image/png"),
        types.ImageContent(data=PNG, mime_type="image/tiff"),
        types.AudioContent(data=PNG, mime_type="audio/wav"),
        types.EmbeddedResource(resource=types.TextResourceContents(uri="a://b", text="t")),
        types.EmbeddedResource(
            resource=types.BlobResourceContents(uri="a://c", blob=PNG, mime_type="application/pdf")
        ),
        types.EmbeddedResource(resource=types.BlobResourceContents(uri="a://d", blob=PNG)),
        types.ResourceLink(uri="a://e", name="e", title="E", description="The e."),
    )
    assert reader().tool_result(given, "t").content == (
        TextContent("hello"),
        ImageContent(f"data:image/png;base64,{PNG}", "image/png"),
        FileContent(f"data:image/tiff;base64,{PNG}", "image/tiff"),
        FileContent(f"data:audio/wav;base64,{PNG}", "audio/wav"),
        TextContent("a://b:\nt"),
        FileContent(f"data:application/pdf;base64,{PNG}", "application/pdf", "a://c"),
        FileContent(
            f"data:application/octet-stream;base64,{PNG}", "application/octet-stream", "a://d"
        ),
        TextContent("E: a://e\nThe e."),
    )


def test_structured_content() -> None:
    both = result(types.TextContent(text="x"), structured_content={"a": 1}, _meta={"m": 2})
    made = reader().tool_result(both, "t")
    assert made.content == (TextContent("x"),)
    assert made.details == {
        "kind": "mcp",
        "server": "s",
        "tool": "t",
        "structured": {"a": 1},
        "meta": {"m": 2},
    }
    alone = reader().tool_result(result(structured_content=[1, None]), "t")
    assert alone.content == (TextContent("[1,null]"),)
    large = reader(most=1_000).tool_result(result(structured_content={"a": "x" * 2_000}), "t")
    assert large.details["structured_bytes"] == 2_008
    assert len(large.plain_text) < 1_000
    assert reader().tool_result(result(is_error=True), "t").plain_text == (
        "(The tool returned nothing.)"
    )
    assert reader().tool_result(result(is_error=True), "t").is_error


def test_content_that_cannot_be_used_becomes_a_note() -> None:
    given = result(
        types.ImageContent(data="not base64!", mime_type="image/png"),
        types.ImageContent(data=PNG, mime_type="nonsense"),
        types.AudioContent(data="A" * 20_000, mime_type="audio/wav"),
    )
    assert reader().tool_result(given, "t").content == (
        TextContent("(An image is left out: its data is not valid base64)"),
        FileContent(f"data:application/octet-stream;base64,{PNG}", "application/octet-stream"),
        TextContent("(A recording (audio/wav, 15,000 bytes) is left out: it is too large)"),
    )


def test_marks() -> None:
    made = reader(untrusted=True).tool_result(result(types.TextContent(text="hello")), "t")
    assert made.plain_text.startswith("<untrusted-")
    assert without_marks(made.plain_text) == "hello"


@given(st.lists(st.text(max_size=3_000), max_size=8), st.integers(1_000, 5_000))
def test_all_texts_together_keep_to_the_limit(texts: list[str], most: int) -> None:
    given = [types.TextContent.model_construct(type="text", text=text) for text in texts]
    made = reader(most=most).blocks(given)
    size = sum(len(block.text.encode()) for block in made if isinstance(block, TextContent))
    assert size <= most + 200
    assert len(made) == len(texts) or "more parts are left out" in str(made[-1])
    for block, text in zip(made, texts, strict=False):
        assert isinstance(block, TextContent)
        block.text.encode()
        if "left out" not in block.text:
            assert block.text == text


def size_of(made: ToolResult) -> int:
    return len(msgspec.json.encode([made.content, made.details]))


LONG = "b" * 50_000


@pytest.mark.parametrize(
    "content",
    [
        types.TextContent(text="k", annotations=types.Annotations(last_modified=LONG)),
        types.TextContent(text="k", annotations=types.Annotations(audience=["user"] * 10_000)),
        types.AudioContent(data=PNG, mime_type=f"a/{LONG}"),
        types.AudioContent(data="no base64", mime_type=f"a/{LONG}"),
        types.AudioContent(data="A" * 20_000, mime_type=f"a/{LONG}"),
        types.EmbeddedResource(resource=types.BlobResourceContents(uri=f"f:{LONG}", blob=PNG)),
        types.EmbeddedResource(resource=types.BlobResourceContents(uri=f"f:{LONG}", blob="%")),
        types.EmbeddedResource(resource=types.TextResourceContents(uri=f"f:{LONG}", text="t")),
        types.ResourceLink(uri=f"f:{LONG}", name=LONG, title=LONG, description=LONG),
    ],
)
def test_everything_of_a_server_counts(content: Any) -> None:
    made = reader(most=10_000).tool_result(result(content), "t")
    assert size_of(made) < 12_000


def test_details_together_keep_to_the_limit() -> None:
    said = {"k": "m" * 6_000}
    marked = types.TextContent(text="k", annotations=types.Annotations(last_modified="z" * 6_000))
    made = reader().tool_result(result(marked, structured_content=said, _meta=said), "t")
    assert made.details["structured"] == said
    assert {"meta", "annotations"}.isdisjoint(made.details)


def test_thousands_of_parts_become_one_note() -> None:
    made = reader().tool_result(result(*[types.TextContent(text="")] * 5_000), "t")
    assert len(made.content) == 1_001
    assert made.content[-1] == TextContent("(4,000 more parts are left out: it is too large)")
    few = reader(most=1_000).tool_result(result(*[types.TextContent(text="x" * 300)] * 50), "t")
    assert len(few.content) < 10
    contents = [types.TextResourceContents(uri="a://b", text="t")] * 5_000
    assert len(reader().resources(contents)) <= 1_001


def test_the_messages_of_a_prompt_keep_to_the_limit() -> None:
    text = types.TextContent(text="x" * 300)
    prompt = types.GetPromptResult(messages=[types.PromptMessage(role="user", content=text)] * 50)
    made = prompt_messages(reader(most=1_000), prompt)
    assert len(made) < 10
    assert "more parts are left out" in str(made[-1])


def test_a_text_that_is_cut_keeps_head_and_tail() -> None:
    text = clip("a" * 5_000 + "é" * 5_000, 1_000)
    assert text.startswith("aaa")
    assert text.endswith("ééé")
    assert "\n[… " in text
    assert len(text.encode()) <= 1_000


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(_JSON)
def test_any_structured_value_can_be_written(value: Any) -> None:
    made, encoded = json_value(value)
    assert msgspec.json.encode(made) == encoded


def test_values_that_json_does_not_have() -> None:
    deep: Any = "x"
    for _ in range(5_000):
        deep = [deep]
    _, encoded = json_value({"a": deep, "\ud800": "\udfff", "b": 2**80})
    assert b"nested too deeply" in encoded


# --- messages that the SDK refuses ------------------------------------------------------------


def refused(line: str) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        types.jsonrpc_message_adapter.validate_json(line)
    return caught.value


def test_an_answer_with_half_of_a_character_is_mended() -> None:
    line = r'{"jsonrpc": "2.0", "id": 7, "result": {"a": "x\ud800y", "\udfff": 1}}'
    made = mended_message(refused(line))
    assert isinstance(made, SessionMessage)
    assert isinstance(made.message, types.JSONRPCResponse)
    assert (made.message.id, made.message.result) == (7, {"a": "x\ufffdy", "\ufffd": 1})


@pytest.mark.parametrize("depth", [300, 200_000])
def test_an_answer_that_is_nested_too_deeply_is_mended_or_an_error(depth: int) -> None:
    line = '{"jsonrpc": "2.0", "id": 7, "result": {"a": ' + "[" * depth + "]" * depth + "}}"
    made = mended_message(refused(line))
    assert isinstance(made, SessionMessage)
    assert isinstance(made.message, (types.JSONRPCResponse, types.JSONRPCError))
    assert made.message.id == 7


@pytest.mark.parametrize("depth", [300, 5_000, 200_000])
def test_what_is_nested_too_deeply_does_not_hide_the_rest(depth: int) -> None:
    deep = '{"a": [' * depth + r'"}]\"]' + '"' + "]}" * depth
    line = f'{{"jsonrpc": "2.0", "id": 7, "result": {{"a": {deep}, "b": [{deep}, "x"]}}}}'
    made = mended_message(refused(line))
    assert isinstance(made, SessionMessage)
    assert isinstance(made.message, types.JSONRPCResponse)
    assert made.message.result["b"][1] == "x"
    assert "[nested too deeply]" in str(made.message.result["a"])


@pytest.mark.parametrize(
    "error", [None, "no", 5, {}, {"code": "x", "message": "y"}, {"code": 1}, {"message": "m"}, []]
)
def test_an_error_of_another_form_is_an_error(error: Any) -> None:
    made = mended_message(refused(json.dumps({"jsonrpc": "2.0", "id": 7, "error": error})))
    assert isinstance(made, SessionMessage)
    assert isinstance(made.message, types.JSONRPCError)
    assert (made.message.id, made.message.error.message) == (7, "the error is not valid")


@pytest.mark.parametrize(
    "line",
    ["hello", "[1]", '{"id": 3}', '"result"', "{" * 500, '{"id": 3, "method": 5, "error": 1}'],
)
def test_what_is_no_answer_stays_an_exception(line: str) -> None:
    error = refused(line)
    assert mended_message(error) is error


def test_one_invalid_tool_does_not_hide_the_others() -> None:
    good = {"name": "good", "inputSchema": {"type": "object"}}
    loose = {"name": "loose", "inputSchema": {"properties": {}}}
    odd = {**good, "name": "odd", "annotations": 5}
    result = {"tools": [good, {"name": "bad"}, loose, 5, odd]}
    made, left_out = mended_tools(result, "2025-11-25")
    assert [tool["name"] for tool in made["tools"]] == ["good", "loose", "odd"]
    assert made["tools"][1]["inputSchema"] == {"type": "object", "properties": {}}
    assert left_out == [
        ("bad", "its definition is invalid (inputSchema: Field required)"),
        ("None", "it is not an object"),
    ]
    assert mended_tools({"tools": [good]}, "2025-11-25") == ({"tools": [good]}, [])


# --- definitions ------------------------------------------------------------------------------


def made_of(schema: Any, *, strict: bool = False) -> Any:
    return definition_of(types.Tool(name="t", input_schema=schema), strict=strict)


def test_a_schema_that_explodes_is_left_out() -> None:
    """Each definition has the next one ten times."""
    definitions: dict[str, Any] = {
        f"d{n}": {
            "type": "object",
            "properties": {f"p{i}": {"$ref": f"#/$defs/d{n + 1}"} for i in range(10)},
        }
        for n in range(12)
    }
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    with pytest.raises(UnusableToolError, match="too large"):
        made_of(schema)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "array", "items": {}}, "not that of an object"),
        ({"type": "object", "properties": 5}, "invalid"),
        ({"type": "object", "properties": {"a": {"type": "colour"}}}, "no provider accepts"),
        ({"type": "object", "required": 5, "properties": {}}, "invalid"),
    ],
)
def test_schemas_that_are_left_out(schema: Any, error: str) -> None:
    with pytest.raises(UnusableToolError, match=error):
        made_of(schema)


def test_a_schema_that_some_providers_reject_is_kept_and_reported() -> None:
    made = made_of({"type": "object", "properties": {"a b": {"type": "string"}}})
    assert [text.split(":")[0] for text in made.warnings] == ["anthropic"]


def test_a_recursive_schema() -> None:
    tree = {"type": "object", "properties": {"inner": {"$ref": "#/$defs/tree"}}}
    made = made_of({**tree, "$defs": {"tree": tree}})
    assert made.parameters["properties"]["inner"]["type"] == "object"


def test_the_strict_form_only_where_it_is_possible() -> None:
    item = {"type": "object", "properties": {"e": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "integer"},
            "c": {"type": ["string", "null"]},
            "d": {"type": "array", "items": item},
        },
        "required": ["a"],
    }
    made = made_of(schema, strict=True)
    assert made.parameters["required"] == ["a", "b", "c", "d"]
    given = {"a": "x", "b": None, "c": None, "d": [{"e": None}]}
    assert made.without_nulls(given) == {"a": "x", "c": None, "d": [{}]}
    free = made_of({"type": "object", "additionalProperties": {"type": "string"}}, strict=True)
    assert free.loose is None
    assert free.without_nulls({"a": None}) == {"a": None}


# --- arguments --------------------------------------------------------------------------------


def checked(schema: Any, arguments: Any, *, strict: bool = False) -> str | None:
    return explain_arguments(arguments, made_of(schema, strict=strict).checked())


BASE = {"properties": {"id": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": {"type": "number", "minimum": 0.0, "maximum": 1.5}}}, {"a": 1}),
        ({"properties": {"a": {"type": "number", "exclusiveMinimum": 0}}}, {"a": 1}),
        ({"properties": {"a": {"type": ["string", "null"], "minLength": 1}}}, {"a": None}),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "string"}}}, {"a": "x"}),
        ({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "aaa"}),
        ({"properties": {"a": {"const": 1}, "b": {"enum": ["x", 1, None]}}}, {"a": 1, "b": None}),
        ({"patternProperties": {"^x-": {}}, "additionalProperties": False}, {"x-a": 1}),
        ({"additionalProperties": {"type": "integer"}}, {"a": 1}),
        ({"properties": {"a": {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}}},
         {"a": ["x", 1]}),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"minimum": 3}]}}}, {"a": 5}),
        ({"allOf": [{"properties": {"a": {"type": "string"}}}, {"required": ["b"]}]}, {"b": 1}),
        ({**BASE, "oneOf": [{"type": "object", "properties": {"id": {"const": 1}}}]}, {"id": 1}),
        ({"properties": {"kind": {"type": "string"}, "a": {"type": "integer"}},
          "additionalProperties": False,
          "oneOf": [{"type": "object", "properties": {"kind": {"const": "x"}}},
                    {"type": "object", "properties": {"kind": {"const": "y"}}}]},
         {"kind": "x", "a": 1}),
    ],
)  # fmt: skip
def test_arguments_that_fit_are_not_refused(schema: Any, arguments: Any) -> None:
    schema = {"type": "object", **schema}
    jsonschema.Draft202012Validator(schema).validate(arguments)
    assert checked(schema, arguments) is None


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {}),
        ({"properties": {"a": {"type": "integer"}}}, {"a": "x"}),
        ({"properties": {"a": {"type": "number", "maximum": 1.5}}}, {"a": 2}),
        ({"properties": {"a": {"enum": ["x", "y"]}}}, {"a": "z"}),
        ({"properties": {"a": {"type": "array", "maxItems": 1}}}, {"a": [1, 2]}),
        ({"properties": {"a": {"type": "array", "items": {"type": "string"}}}}, {"a": [1]}),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "string"}}},
         {"a": 1}),
        ({"additionalProperties": False}, {"a": 1}),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"b": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
def test_arguments_that_do_not_fit_are_refused(schema: Any, arguments: Any, strict: bool) -> None:
    schema = {"type": "object", **schema}
    assert not jsonschema.Draft202012Validator(schema).is_valid(arguments)
    assert checked(schema, arguments, strict=strict) is not None


@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "minLength": "5"},
        {"type": "string", "maxLength": None},
        {"type": "string", "maxLength": True},
        {"type": "string", "enum": 5},
        {"type": "string", "enum": []},
        {"type": "string", "maxLength": [1]},
    ],
)
def test_what_a_schema_says_in_the_wrong_form_is_not_checked(part: Any) -> None:
    assert _checkable({"properties": {"a": part}})["properties"]["a"] == {"type": "string"}
    assert _checkable({"properties": 5, "required": "a", "anyOf": {}, "items": []}) == {}
    assert _checkable({"type": "colour", "additionalProperties": True}) == {}
