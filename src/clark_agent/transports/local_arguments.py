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

__all__ = ["copying", "is_said", "with_choices_said", "without_unsaid", "words", "words_of"]

# A text that is copied from the question has at most so many words, and comes from so many.
_LONGEST_SPAN = 6
_MOST_WORDS = 60


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
    required = list(tool.parameters.get("required") or ())
    for name, schema in _properties(tool).items():
        choices = schema.get("enum") if isinstance(schema, dict) else None
        named = [each for each in choices or () if isinstance(each, str) and _is_named(each, said)]
        narrow[name] = {**schema, "enum": named} if named else schema
        if len(named) == 1 and name not in required:
            required.append(name)
    return _changed(tool, narrow, required)


def without_unsaid(tool: ToolSchema, arguments: Mapping[str, Any], said: set[str]) -> ToolSchema:
    """The tool with no optional arguments but those that somebody has said something of."""
    required = list(tool.parameters.get("required") or ())
    kept = {*required, *_kept(tool, arguments, said)}
    left = {name: schema for name, schema in _properties(tool).items() if name in kept}
    return _changed(tool, left, required)


def _kept(tool: ToolSchema, arguments: Mapping[str, Any], said: set[str]) -> list[str]:
    """The names of the arguments that are required or were said."""
    required = tool.parameters.get("required") or ()
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
    held = {
        name: {**schema, "enum": choices} if choices and _is_text(schema) else schema
        for name, schema in _properties(tool).items()
    }
    return _changed(tool, held, list(tool.parameters.get("required") or ()))


def _changed(tool: ToolSchema, properties: dict[str, Any], required: list[str]) -> ToolSchema:
    changed = {**tool.parameters, "properties": properties, "required": required}
    return replace(tool, parameters=changed)


def _properties(tool: ToolSchema) -> dict[str, Any]:
    found = tool.parameters.get("properties")
    return found if isinstance(found, dict) else {}


def _is_named(choice: str, said: set[str]) -> bool:
    named = words(choice)
    return bool(named) and said.issuperset(named)


def _is_free(schema: Any) -> bool:
    return isinstance(schema, dict) and "enum" not in schema and schema.get("type") != "boolean"


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema
