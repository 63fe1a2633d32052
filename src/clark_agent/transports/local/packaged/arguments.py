"""Checks which arguments of a call occur in the conversation.

A small model that does not know an argument invents one. But most arguments were said before, by
the user or by an earlier tool, and that can be checked word by word, regardless of order and case.
Choices (an enum) and booleans need not be said; a choice that was said is the one to use.

Pure functions of a tool's schema, arguments and words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from clark_agent.stream import ToolSchema

__all__ = ["copying", "held", "is_said", "with_choices_said", "without_unsaid", "words", "words_of"]

# A text that is copied from the question has at most `_LONGEST_SPAN` words, and starts within the
# first `_MOST_WORDS` words.
_LONGEST_SPAN = 6
_MOST_WORDS = 60
_LARGEST = 10**15


def words(text: str) -> list[str]:
    """The words and numbers of a text, in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def words_of(value: Any) -> Iterator[str]:
    """Yield the words and numbers of one argument, or of a whole object of arguments."""
    match value:
        case None | bool():
            pass
        case Mapping():
            for part in value.values():
                yield from words_of(part)
        case list():
            for part in value:
                yield from words_of(part)
        case float() if value.is_integer():
            yield str(int(value))
        case _:
            yield from words(str(value))


def is_said(tool: ToolSchema, arguments: Mapping[str, Any], said: set[str]) -> bool:
    """Whether the required free-form arguments were said. If the tool has parameters, at least one
    word of the arguments must have been said too.
    """
    known = _properties(tool)
    kept = {name: arguments[name] for name in _kept(tool, arguments, said)}
    for name, value in kept.items():
        if name in known and _is_free(known[name]):
            given = set(words_of(value))
            # A value that only repeats the parameter's name, as in {"lake": "lake"}, was not said.
            if not given <= said or (given and given <= set(words(name))):
                return False
    return not known or bool(set(words_of(kept)) & said)


def with_choices_said(tool: ToolSchema, said: set[str]) -> ToolSchema:
    """Narrow each enum to the choices that were said, if any. A single one becomes required."""
    narrow: dict[str, Any] = {}
    required = _required(tool)
    for name, schema in _properties(tool).items():
        choices = schema.get("enum") if isinstance(schema, dict) else None
        named = [each for each in choices or () if isinstance(each, str) and _is_named(each, said)]
        narrow[name] = {**schema, "enum": named} if named else schema
        if len(named) == 1 and name not in required:
            required.append(name)
    return _changed(tool, narrow, required)


def without_unsaid(tool: ToolSchema, arguments: Mapping[str, Any], said: set[str]) -> ToolSchema:
    """Remove optional parameters whose arguments were not said."""
    required = _required(tool)
    kept = {*required, *_kept(tool, arguments, said)}
    left = {name: schema for name, schema in _properties(tool).items() if name in kept}
    return _changed(tool, left, required)


def _kept(tool: ToolSchema, arguments: Mapping[str, Any], said: set[str]) -> list[str]:
    """The names of the arguments that are required or were said."""
    required = _required(tool)
    return [
        name
        for name, value in arguments.items()
        if name in required or ((given := set(words_of(value))) and given <= said)
    ]


def copying(tool: ToolSchema, question: str) -> ToolSchema:
    """Restrict the tool's string parameters to sequences of words from the question."""
    parts = [word.strip(".,;:!?\"'()") for word in question.split()]
    spans = [
        " ".join(parts[start : start + length])
        for length in range(1, _LONGEST_SPAN + 1)
        for start in range(min(len(parts) - length + 1, _MOST_WORDS))
    ]
    choices = list(dict.fromkeys([span for span in spans if span]))
    narrow = {
        name: {"type": "string", "enum": fitting}
        if _is_text(schema) and (fitting := [text for text in choices if _fits(text, schema)])
        else schema
        for name, schema in _properties(tool).items()
    }
    return _changed(tool, narrow, _required(tool))


def held(schema: Any, *, is_top: bool = True) -> Any:
    """Return the schema with limits that keep a small model from endless output: no undeclared
    properties, and bounded integers.
    """
    if isinstance(schema, list):
        return [held(part, is_top=False) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {
        key: held(schema[key], is_top=False)
        for key in ("items", "anyOf", "additionalProperties")
        if key in schema
    }
    named = {name: held(part, is_top=False) for name, part in _named(schema).items()}
    if is_top:
        return {**schema, "type": "object", "properties": named, "additionalProperties": False}
    if named:
        inner = {"additionalProperties": False, **inner, "properties": named}
    if schema.get("type") == "integer" and "enum" not in schema:
        low, high = schema.get("minimum", -_LARGEST), schema.get("maximum", _LARGEST)
        return {**schema, "minimum": low, "maximum": high} if low <= high else schema
    return {**schema, **inner}


def _changed(tool: ToolSchema, properties: dict[str, Any], required: list[str]) -> ToolSchema:
    changed = {**tool.parameters, "properties": properties, "required": required}
    return replace(tool, parameters=changed)


def _required(tool: ToolSchema) -> list[str]:
    found: Any = tool.parameters.get("required")
    return list(found) if found else []


def _properties(tool: ToolSchema) -> dict[str, Any]:
    return _named(tool.parameters)


def _named(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _is_named(choice: str, said: set[str]) -> bool:
    named = words(choice)
    return bool(named) and said.issuperset(named)


def _is_free(schema: Any) -> bool:
    return isinstance(schema, dict) and "enum" not in schema and schema.get("type") != "boolean"


def _fits(text: str, schema: Mapping[str, Any]) -> bool:
    if not schema.get("minLength", 0) <= len(text) <= schema.get("maxLength", len(text)):
        return False
    try:
        return re.search(schema.get("pattern", ""), text) is not None
    except re.error:  # a pattern that Python does not support
        return False


def _is_text(schema: Any) -> bool:
    return (
        isinstance(schema, dict)
        and schema.get("type") == "string"
        and schema.keys().isdisjoint(("enum", "format"))
    )
