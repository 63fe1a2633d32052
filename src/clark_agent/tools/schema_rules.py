"""The rules for tool parameters in each provider's documentation and error messages.

`check_schema` checks a schema against one set of rules and lists what the provider would reject.
The portable form passes all of them; the strict form passes the strict rules too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from clark_agent.tools.schema import json_type

__all__ = ["SchemaProblem", "SchemaRules", "check_schema"]


class SchemaRules(StrEnum):
    """A set of rules."""

    OPENAI = "openai"
    OPENAI_STRICT = "openai_strict"
    ANTHROPIC = "anthropic"
    GEMINI = "gemini"


class SchemaProblem(Struct, frozen=True):
    """A schema breaks ``rule`` at ``path``, a JSON path into the schema."""

    path: str
    rule: str


_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})

# At the top, the parameters of a function must be a plain object.
_FORBIDDEN_AT_ROOT: Mapping[SchemaRules, tuple[str, ...]] = {
    SchemaRules.OPENAI: ("oneOf", "anyOf", "allOf", "enum", "not"),
    SchemaRules.OPENAI_STRICT: ("oneOf", "anyOf", "allOf", "enum", "not"),
    SchemaRules.ANTHROPIC: ("oneOf", "anyOf", "allOf"),
    SchemaRules.GEMINI: ("oneOf", "anyOf", "allOf"),
}

_STRICT_KEYWORDS = frozenset(
    {
        "type", "title", "description", "properties", "required", "additionalProperties", "items",
        "enum", "const", "anyOf", "$ref", "$defs", "pattern", "format", "multipleOf", "minimum",
        "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems",
    }
)  # fmt: skip
_STRICT_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
)
_STRICT_MOST_PROPERTIES = 5000
_STRICT_MOST_LEVELS = 10
_STRICT_MOST_NAME_CHARS = 120_000
_STRICT_MOST_ENUM_VALUES = 1000
# An enum of more than this many strings may have only this many characters in all.
_STRICT_LONG_ENUM = 250
_STRICT_LONG_ENUM_CHARS = 15_000

_GEMINI_KEYWORDS = frozenset(
    {
        "$anchor", "$defs", "$id", "$ref", "additionalProperties", "anyOf", "default",
        "description", "enum", "example", "format", "items", "maxItems", "maxLength",
        "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum",
        "nullable", "oneOf", "pattern", "prefixItems", "properties", "propertyOrdering",
        "required", "title", "type",
    }
)  # fmt: skip

_ANTHROPIC_PROPERTY_CHARS = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
)
_ANTHROPIC_PROPERTY_LENGTH = 64


def check_schema(schema: Mapping[str, Any], rules: SchemaRules) -> list[SchemaProblem]:
    """What the provider would reject in a tool's parameters; empty if it accepts them."""
    found = [*_root_problems(schema, rules)]
    totals = _Totals()
    for path, part, level in _walk(schema, "$", 1):
        found += _shape_problems(path, part, schema)
        match rules:
            case SchemaRules.OPENAI:
                pass
            case SchemaRules.OPENAI_STRICT:
                found += _strict_problems(path, part)
                totals.add(part, level)
            case SchemaRules.ANTHROPIC:
                found += _anthropic_problems(path, part)
            case SchemaRules.GEMINI:
                found += _gemini_problems(path, part)
    return found + totals.problems()


def _walk(schema: Any, path: str, level: int) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """All subschemas, with their path and how many objects deep they are."""
    if not isinstance(schema, dict):
        return
    yield path, schema, level
    for keyword in ("properties", "$defs"):
        for name, part in _mapping(schema.get(keyword)).items():
            yield from _walk(part, f"{path}.{keyword}.{name}", level + 1)
    for keyword in ("items", "additionalProperties", "not"):
        yield from _walk(schema.get(keyword), f"{path}.{keyword}", level)
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for index, part in enumerate(schema.get(keyword, ())):
            yield from _walk(part, f"{path}.{keyword}[{index}]", level)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _root_problems(schema: Mapping[str, Any], rules: SchemaRules) -> Iterator[SchemaProblem]:
    if schema.get("type") != "object":
        yield SchemaProblem("$", "the parameters must be an object")
    for keyword in _FORBIDDEN_AT_ROOT[rules]:
        if keyword in schema:
            yield SchemaProblem("$", f"{keyword} is not supported at the top")


def _shape_problems(
    path: str, part: Mapping[str, Any], root: Mapping[str, Any]
) -> Iterator[SchemaProblem]:
    """What all providers reject."""
    kinds = part.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            yield SchemaProblem(path, f"{kind!r} is not a JSON type")
    if part.get("type") == "array" and "items" not in part and "prefixItems" not in part:
        yield SchemaProblem(path, "an array must declare its items")
    if "items" in part and not isinstance(part["items"], dict):
        yield SchemaProblem(path, "items must be a schema, not a boolean or a list")
    for name in part.get("required", ()):
        if name not in _mapping(part.get("properties")):
            yield SchemaProblem(path, f"{name!r} is required but not declared")
    reference = part.get("$ref")
    if reference is not None and not _resolves(reference, root):
        yield SchemaProblem(path, f"the reference {reference!r} cannot be resolved")


def _resolves(reference: str, root: Mapping[str, Any]) -> bool:
    if reference == "#":
        return True
    return reference.removeprefix("#/$defs/") in _mapping(root.get("$defs"))


def _strict_problems(path: str, part: Mapping[str, Any]) -> Iterator[SchemaProblem]:
    for keyword in part:
        if keyword not in _STRICT_KEYWORDS:
            yield SchemaProblem(path, f"strict: {keyword} is not supported")
    if "format" in part and part["format"] not in _STRICT_FORMATS:
        yield SchemaProblem(path, f"strict: the format {part['format']!r} is not supported")
    if not part.keys() & {"type", "anyOf", "enum", "const", "$ref"}:
        yield SchemaProblem(path, "strict: a schema must declare its type")
    if part.get("type") == "object" or "properties" in part:
        if part.get("additionalProperties") is not False:
            yield SchemaProblem(path, "strict: additionalProperties must be false")
        for name in _mapping(part.get("properties")):
            if name not in part.get("required", ()):
                yield SchemaProblem(path, f"strict: {name!r} must be required")
    values = part.get("enum", ())
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) > _STRICT_LONG_ENUM and sum(map(len, texts)) > _STRICT_LONG_ENUM_CHARS:
        yield SchemaProblem(path, f"strict: more than {_STRICT_LONG_ENUM_CHARS} characters of enum")


def _anthropic_problems(path: str, part: Mapping[str, Any]) -> Iterator[SchemaProblem]:
    for name in _mapping(part.get("properties")):
        fits = 0 < len(name) <= _ANTHROPIC_PROPERTY_LENGTH
        if not fits or not _ANTHROPIC_PROPERTY_CHARS.issuperset(name):
            yield SchemaProblem(path, f"{name!r}: a name must be 1 to 64 of A-Z a-z 0-9 _ . -")


def _gemini_problems(path: str, part: Mapping[str, Any]) -> Iterator[SchemaProblem]:
    for keyword in part:
        if keyword not in _GEMINI_KEYWORDS:
            yield SchemaProblem(path, f"{keyword} is not supported")
    for value in part.get("enum", ()):
        if json_type(value) not in ("string", "integer", "number"):
            yield SchemaProblem(path, "an enum may only have strings or numbers")
    if "enum" in part and "type" not in part:
        yield SchemaProblem(path, "an enum must declare its type")


class _Totals:
    """The totals over a whole schema that the strict rules limit."""

    def __init__(self) -> None:
        self.properties = self.levels = self.name_chars = self.enum_values = 0

    def add(self, part: Mapping[str, Any], level: int) -> None:
        names = [*_mapping(part.get("properties")), *_mapping(part.get("$defs"))]
        values = [*part.get("enum", ()), *([part["const"]] if "const" in part else [])]
        self.properties += len(_mapping(part.get("properties")))
        self.enum_values += len(part.get("enum", ()))
        self.name_chars += sum(map(len, names))
        self.name_chars += sum([len(value) for value in values if isinstance(value, str)])
        if part.get("type") == "object":
            self.levels = max(self.levels, level)

    def problems(self) -> list[SchemaProblem]:
        return [
            SchemaProblem("$", f"strict: {count} {what}, at most {most}")
            for count, most, what in (
                (self.properties, _STRICT_MOST_PROPERTIES, "properties"),
                (self.levels, _STRICT_MOST_LEVELS, "levels of nesting"),
                (self.name_chars, _STRICT_MOST_NAME_CHARS, "characters in names and enums"),
                (self.enum_values, _STRICT_MOST_ENUM_VALUES, "enum values"),
            )
            if count > most
        ]
