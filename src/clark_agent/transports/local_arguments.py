"""What of a call's arguments somebody has said.

A small model that does not know an argument makes one up. But what a tool is called with has mostly
been said, by the person or by a tool before, and that can be checked: word by word, whatever the
order and the letters' case. Choices (an enum) and switches need not be said; a choice that was said
is the one.

Pure functions of a tool's schema, arguments and words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from clark_agent.stream import ToolSchema

__all__ = ["copying", "held", "is_said", "with_choices_said", "without_unsaid", "words", "words_of"]

# A text that is copied from the question has at most so many words, and comes from so many.
_LONGEST_SPAN = 6
_MOST_WORDS = 60
_LARGEST = 10**15


def words(text: str) -> list[str]:
    """The words and numbers of a text, in small letters."""
    return re.findall(r"[^\W_]+", text.lower())


def words_of(value: Any) -> Iterator[str]:
    """The words and numbers of an argument, or of all of them."""
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
    """Whether the arguments were said that must be, and anything at all if the tool takes any."""
    known = _properties(tool)
    kept = {name: arguments[name] for name in _kept(tool, arguments, said)}
    for name, value in kept.items():
        if name in known and _is_free(known[name]):
            given = set(words_of(value))
            # A lake called lake: that is nothing that anybody has said.
            if not given <= said or (given and given <= set(words(name))):
                return False
    return not known or bool(set(words_of(kept)) & said)


def with_choices_said(tool: ToolSchema, said: set[str]) -> ToolSchema:
    """The tool with only the choices that were said, where any was; a single one must be taken."""
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
    """The tool with no optional arguments but those that somebody has said something of."""
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
    """The tool with texts that can only be words of the question."""
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
    """The schema without what a small model loses itself in: properties that nobody named, and
    integers without end.
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
    except re.error:  # it is another language's
        return False


def _is_text(schema: Any) -> bool:
    return (
        isinstance(schema, dict)
        and schema.get("type") == "string"
        and schema.keys().isdisjoint(("enum", "format"))
    )
