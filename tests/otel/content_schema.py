"""The form of recorded content, as JSON schemas of our own.

They say what these two agree on:

- ``docs/gen-ai/gen-ai-{input-messages,output-messages,system-instructions,tool-definitions}.json``
  of ``open-telemetry/semantic-conventions``, tag v1.41.1, the last release that has them;
- the files of the same names in ``model/gen-ai`` of
  ``open-telemetry/semantic-conventions-genai``, as of September 2026.

They differ in ``finish_reason`` of an answer: the first requires it, the second only allows it.
Both accept a part of any ``type`` that they do not define, so that a misspelled type would pass.
Here such a type must be one of `OTHER_PARTS`.
"""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft7Validator, Draft202012Validator

__all__ = ["check_content"]

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ANY: dict[str, Any] = {}

OTHER_PARTS = {
    "reasoning_details",  # what a provider wants back, which nobody can read
    "provider",  # an item of a provider's own tool
    "custom",  # a message of the host
}


def _part(kind: str, required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **required, **optional},
        "required": ["type", *required],
    }


_PARTS = [
    _part("text", {"content": _TEXT}),
    _part("reasoning", {"content": _TEXT}),
    _part("tool_call", {"name": _TEXT}, id=_TEXT_OR_NULL, arguments=_ANY),
    _part("tool_call_response", {"response": _ANY}, id=_TEXT_OR_NULL),
    _part("blob", {"modality": _TEXT, "content": _TEXT}, mime_type=_TEXT_OR_NULL),
    _part(
        "uri",
        # Data URLs belong into a blob.
        {"modality": _TEXT, "uri": {"type": "string", "not": {"pattern": "^data:"}}},
        mime_type=_TEXT_OR_NULL,
    ),
    _part("file", {"modality": _TEXT, "file_id": _TEXT}, mime_type=_TEXT_OR_NULL),
    *[_part(kind, {}) for kind in sorted(OTHER_PARTS)],
]
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": _TEXT,
        "parts": {"type": "array", "items": {"oneOf": _PARTS}},
        "name": _TEXT_OR_NULL,
    },
    "required": ["role", "parts"],
}
_ANSWER = {
    **_MESSAGE,
    "properties": {**_MESSAGE["properties"], "finish_reason": _TEXT},  # type: ignore[dict-item]
    "required": ["role", "parts", "finish_reason"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "name": _TEXT,
        "description": _TEXT_OR_NULL,
        "parameters": {"type": ["object", "boolean", "null"]},
    },
    "required": ["type", "name"],
}


def _list_of(item: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({"type": "array", "items": item})


_FORMS = {
    "gen_ai.input.messages": _list_of(_MESSAGE),
    "gen_ai.output.messages": _list_of(_ANSWER),
    "gen_ai.system_instructions": _list_of(_part("text", {"content": _TEXT})),
    "gen_ai.tool.definitions": _list_of(_TOOL),
    "gen_ai.tool.call.arguments": Draft202012Validator({"type": "object"}),
    "gen_ai.tool.call.result": Draft202012Validator({"type": ["array", "object"]}),
}


def check_content(name: str, written: Any) -> Any:
    """Return the decoded value of an attribute. Fails if it does not have the form."""
    value = json.loads(written)
    _FORMS[name].validate(value)
    if name == "gen_ai.tool.definitions":
        for tool in value:
            Draft7Validator.check_schema(tool["parameters"])
    return value
