"""Handles arguments that do not fit: repairs what is unambiguous, explains the rest.

Models send numbers and lists as strings, and null for what they want to omit. Such arguments
are repaired against the tool's schema, but only after they failed to parse, so arguments that a
tool accepts stay unchanged. The rest is reported to the model in words that it can act on: where,
what was expected, what was sent.

Everything here is a pure function on JSON values and portable schemas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec

from clark_agent.tools.schema import JsonSchema, json_type

__all__ = ["close_match", "close_matches", "explain_arguments", "quoted", "repair_arguments"]

_QUOTE_CHARS = 200
_MOST_PROBLEMS = 5

# --- repair -----------------------------------------------------------------------------------


def repair_arguments(args: Any, schema: Mapping[str, Any]) -> Any:
    """The arguments with every unambiguous repair made; the given object if there was none.

    A null is removed where the schema does not allow null. Strings become the declared integer,
    number, boolean or null, a string of JSON the declared array or object, a whole float an
    integer.
    """
    if args is None:
        return {}
    return _repaired(args, schema)


def _repaired(value: Any, schema: Mapping[str, Any]) -> Any:
    branches: Sequence[Mapping[str, Any]] = schema.get("anyOf", (schema,))
    kinds = {branch.get("type") for branch in branches}
    if None in kinds:  # a branch that allows anything
        return value
    kind = json_type(value)
    if kind == "string" and "string" not in kinds:
        value = _from_text(value, kinds)
        kind = json_type(value)
    elif kind == "number" and "integer" in kinds and "number" not in kinds and value.is_integer():
        return int(value)
    if kind == "object":
        branch = _branch_for(value, branches)
        return value if branch is None else _repaired_object(value, branch)
    if kind == "array":
        arrays = [branch for branch in branches if branch.get("type") == "array"]
        return value if len(arrays) != 1 else _repaired_array(value, arrays[0].get("items", {}))
    return value


def _repaired_object(value: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    more = schema.get("additionalProperties")
    result: dict[str, Any] = {}
    changed = False
    for name, given in value.items():
        declared = properties.get(name, more if isinstance(more, dict) else {})
        if given is None and not _takes_null(declared):
            changed = True
            continue
        result[name] = repaired = _repaired(given, declared)
        changed = changed or repaired is not given
    return result if changed else value


def _repaired_array(value: list[Any], items: Mapping[str, Any]) -> list[Any]:
    result = [_repaired(item, items) for item in value]
    changed = any(new is not old for new, old in zip(result, value, strict=True))
    return result if changed else value


def _takes_null(schema: Mapping[str, Any]) -> bool:
    branches = schema.get("anyOf", (schema,))
    return any(branch.get("type") in (None, "null") for branch in branches)


def _branch_for(
    value: Mapping[str, Any], branches: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The object schema whose enums the value does not contradict, if there is exactly one."""
    fitting = [
        branch
        for branch in branches
        if branch.get("type") == "object"
        and all(
            value.get(name, schema["enum"][0]) in schema["enum"]
            for name, schema in branch.get("properties", {}).items()
            if name in branch.get("required", ()) and "enum" in schema
        )
    ]
    return fitting[0] if len(fitting) == 1 else None


def _from_text(text: str, kinds: set[Any]) -> Any:
    """The value that the text stands for, if it is of one of the kinds; otherwise the text."""
    stripped = text.strip()
    if "boolean" in kinds and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if "null" in kinds and stripped == "null":
        return None
    if not kinds.isdisjoint(("integer", "number")):
        number = _number(stripped)
        if isinstance(number, int) or (number is not None and "number" in kinds):
            return number
        if number is not None and number.is_integer():
            return int(number)
    opening = stripped[:1]
    if (opening == "[" and "array" in kinds) or (opening == "{" and "object" in kinds):
        try:
            return msgspec.json.decode(stripped)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            return text
    return text


def _number(text: str) -> int | float | None:
    # Python accepts more than JSON: underscores, digits of other scripts, nan, huge integers.
    if not text or len(text) > 40 or not set(text) <= set("0123456789+-.eE"):
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


# --- explanation ------------------------------------------------------------------------------


def explain_arguments(args: Any, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments, in words for the model; None if no problem is found."""
    problems: list[str] = []
    for problem in _problems(args, schema, "$"):
        if len(problems) == _MOST_PROBLEMS:
            problems.append("and more")
            break
        problems.append(problem)
    return "; ".join(problems) or None


def _problems(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    branches: Sequence[Mapping[str, Any]] = schema.get("anyOf", (schema,))
    kind = json_type(value)
    fitting = [branch for branch in branches if _is_of_type(value, kind, branch.get("type"))]
    if not fitting:
        yield f"path {path}: expected {_expected(branches)}, got {_got(value)}"
        return
    if kind == "object" and len(fitting) > 1:
        chosen = _branch_for(value, fitting)
        fitting = fitting if chosen is None else [chosen]
    found = [list(_problems_within(value, kind, branch, path)) for branch in fitting]
    if all(found):
        yield from min(found, key=len)


def _problems_within(value: Any, kind: str, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Problems of a value that is of the schema's type."""
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join([quoted(choice) for choice in schema["enum"][:20]])
        yield f"path {path}: expected one of {allowed}, got {_got(value)}"
        return
    for keyword, text, wrong in _limits(value, kind):
        if (limit := schema.get(keyword)) is not None and wrong(limit):
            yield f"path {path}: expected {text.format(limit)}, got {_got(value)}"
    if kind == "object":
        yield from _object_problems(value, schema, path)
    elif kind == "array":
        for index, item in enumerate(value):
            yield from _problems(item, schema.get("items", {}), f"{path}[{index}]")


def _limits(value: Any, kind: str) -> Sequence[tuple[str, str, Any]]:
    if kind in ("integer", "number"):
        return (
            ("minimum", "at least {}", lambda limit: value < limit),
            ("maximum", "at most {}", lambda limit: value > limit),
        )
    if kind in ("string", "array"):
        noun = "Length" if kind == "string" else "Items"
        unit = "characters" if kind == "string" else "items"
        return (
            (f"min{noun}", f"at least {{}} {unit}", lambda limit: len(value) < limit),
            (f"max{noun}", f"at most {{}} {unit}", lambda limit: len(value) > limit),
        )
    return ()


def _object_problems(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    properties: Mapping[str, JsonSchema] = schema.get("properties", {})
    more = schema.get("additionalProperties")
    missing = [name for name in schema.get("required", ()) if name not in value]
    unknown = [name for name in value if name not in properties]
    where = "" if path == "$" else f" of {path}"
    for name in missing:
        yield f"the required argument {quoted(name)}{where} is missing"
    if more is False or (properties and missing):
        free = [name for name in properties if name not in value]
        for name in unknown:
            yield f"{quoted(name)} is not an argument{where}{_did_you_mean(str(name), free)}"
    for name, given in value.items():
        if name in properties:
            yield from _problems(given, properties[name], f"{path}.{name}")
        elif isinstance(more, dict):
            yield from _problems(given, more, f"{path}.{name}")


def _is_of_type(value: Any, kind: str, declared: Any) -> bool:
    if declared is None or declared == kind:
        return True
    return declared == "number" and kind == "integer"


_NOUNS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def _expected(branches: Sequence[Mapping[str, Any]]) -> str:
    kinds = dict.fromkeys([str(branch.get("type", "a value")) for branch in branches])
    return " or ".join([_NOUNS.get(kind, kind) for kind in kinds])


def _got(value: Any) -> str:
    return f"the string {quoted(value)}" if isinstance(value, str) else quoted(value)


def quoted(value: Any) -> str:
    """The value as the model wrote it, cut if long."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = repr(value)
    if len(text) > _QUOTE_CHARS:
        text = f"{text[:_QUOTE_CHARS]}…"
    return text


def close_match(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate that may be meant by the name."""
    from difflib import get_close_matches  # only mistakes need it

    matches = get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


_MOST_COMPARED = 500
_LONGEST_COMPARED = 64


def close_matches(name: str, candidates: Iterable[str], most: int = 5) -> list[str]:
    """The candidates that may be meant by the name, the best first.

    Fast with 100,000 candidates: it compares only those of similar length.
    """
    from difflib import get_close_matches  # only mistakes need it

    name = name[:_LONGEST_COMPARED]
    near = [c for c in candidates if abs(len(c) - len(name)) <= 3 or (c and c in name) or name in c]
    return get_close_matches(name, near[:_MOST_COMPARED], most)


def _did_you_mean(name: str, candidates: Sequence[str]) -> str:
    match = close_match(name, candidates)
    return "" if match is None else f"; did you mean {quoted(match)}?"
