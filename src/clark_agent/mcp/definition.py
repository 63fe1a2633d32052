"""Definition: what a server says about one of its tools, in the form that providers accept.

The schema of a tool comes from a stranger: it may be invalid, or grow without limit when its
references are followed. Such a tool is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from clark_agent._text import describe, well_formed
from clark_agent.errors import ConfigError
from clark_agent.tools.schema import portable_schema, strict_schema
from clark_agent.tools.schema_rules import SchemaRules, check_schema

__all__ = ["Definition", "UnusableToolError", "definition_of"]

_MOST_NODES = 20_000
_DEEPEST = 60
_LONGEST_DESCRIPTION = 20_000
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_LIMITS = frozenset({"minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"})
_PROVIDERS = (SchemaRules.OPENAI, SchemaRules.ANTHROPIC, SchemaRules.GEMINI)


class UnusableToolError(Exception):
    """Why a tool is left out."""


class Definition(Struct, frozen=True):
    """A tool of a server."""

    name: str
    """The server's own name."""
    title: str | None
    description: str
    parameters: dict[str, Any]
    """The schema in the form that is sent to providers."""
    reads_only: bool
    """The server says that the tool changes nothing."""
    idempotent: bool
    """The server says that calling it again changes nothing more."""
    destructive: bool | None
    open_world: bool | None
    loose: dict[str, Any] | None = None
    """The portable schema, if ``parameters`` is the strict one."""
    warnings: tuple[str, ...] = ()
    """Which providers do not accept the schema."""

    def preview(self, server: str) -> str:
        """What the server says about the tool, for the person who approves a call."""
        what = self.title or self.name
        lines = [f"{what} (tool {self.name!r} of the MCP server {server!r})"]
        said = [*_said(self)]
        if said:
            lines.append("The server says that it " + ", ".join(said) + ".")
        else:
            lines.append("The server does not say what it may change.")
        return "\n".join(lines)

    def without_nulls(self, arguments: Any) -> Any:
        """The arguments without nulls in place of optional ones, which the strict form requires."""
        return arguments if self.loose is None else _without_nulls(arguments, self.loose)

    def checked(self) -> dict[str, Any]:
        """The schema to check arguments with: what the form for providers says, as far as that can
        be checked. What a server has written there in another form than it should counts as not
        said.
        """
        return _checkable(self.parameters if self.loose is None else self.loose)


def _said(definition: Definition) -> Iterator[str]:
    if definition.reads_only:
        yield "only reads"
    elif definition.destructive is not None:
        yield "may destroy something" if definition.destructive else "only adds something"
    if definition.idempotent:
        yield "may be called again without further effect"
    if definition.open_world is not None:
        yield "reaches the outside world" if definition.open_world else "stays in its own world"


def definition_of(tool: Any, *, strict: bool) -> Definition:
    """The definition of a tool of the SDK. Raises `UnusableToolError`."""
    if tool.execution is not None and tool.execution.task_support == "required":
        raise UnusableToolError("it runs only as a task, which this client does not support")
    parameters, loose = _parameters(tool.input_schema, strict=strict)
    rejections: list[str] = []
    for rules in _PROVIDERS:
        problems = check_schema(parameters, rules)
        if problems:
            rejections.append(f"{rules.value}: {problems[0].path} {problems[0].rule}")
    if len(rejections) == len(_PROVIDERS):
        raise UnusableToolError(f"no provider accepts its schema ({rejections[0]})")
    said = tool.annotations
    title = tool.title or (None if said is None else said.title)
    description = well_formed(tool.description or title or "")
    return Definition(
        name=tool.name,
        title=None if title is None else well_formed(title)[:200],
        description=description[:_LONGEST_DESCRIPTION],
        parameters=parameters,
        reads_only=said is not None and bool(said.read_only_hint),
        idempotent=said is not None and bool(said.idempotent_hint),
        destructive=None if said is None else said.destructive_hint,
        open_world=None if said is None else said.open_world_hint,
        loose=loose,
        warnings=tuple(rejections),
    )


def _parameters(schema: Any, *, strict: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The schema to send and, if that is the strict form, the portable one."""
    try:
        msgspec.json.encode(schema)
        _check_size(schema)
        portable = portable_schema(schema)
        form = _strict(portable) if strict else None
    except UnusableToolError:
        raise
    except Exception as error:  # whatever a foreign schema may trigger
        raise UnusableToolError(f"its schema is invalid ({describe(error)[:200]})") from None
    if "type" not in portable and "anyOf" not in portable:
        portable = {"type": "object", **portable}
    if portable.get("type") != "object":
        raise UnusableToolError("its schema is not that of an object")
    portable.setdefault("properties", {})
    return (portable, None) if form is None else (form, portable)


def _strict(schema: dict[str, Any]) -> dict[str, Any] | None:
    try:
        form = strict_schema({"type": "object", "properties": {}, **schema})
    except ConfigError:
        return None
    return None if check_schema(form, SchemaRules.OPENAI_STRICT) else form


def _check_size(schema: Any) -> None:
    """Count what following all references would give, without making it."""
    scope: dict[str, Any] = {"#": schema}
    left = _MOST_NODES
    # The references around each part: one that contains itself is not followed again.
    parts: list[tuple[Any, frozenset[str], int]] = [(schema, frozenset(), 0)]
    while parts:
        part, inside, depth = parts.pop()
        left -= 1
        if left < 0 or depth > _DEEPEST:
            raise UnusableToolError("its schema is too large or nested too deeply")
        if isinstance(part, list):
            parts.extend([(item, inside, depth + 1) for item in part])
        if not isinstance(part, dict):
            continue
        for keyword in ("$defs", "definitions"):
            definitions = part.get(keyword)
            if isinstance(definitions, Mapping):
                scope.update({f"#/{keyword}/{n}": d for n, d in definitions.items()})
        reference = part.get("$ref")
        if isinstance(reference, str) and reference in scope and reference not in inside:
            parts.append((scope[reference], inside | {reference}, depth + 1))
        parts.extend(
            [
                (value, inside, depth + 1)
                for key, value in part.items()
                if key not in ("$ref", "$defs", "definitions", "enum", "const", "default")
            ]
        )


def _checkable(schema: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not isinstance(schema, dict):
        return found
    for key, value in schema.items():
        match key, value:
            case "type", str() if value in _TYPES:
                found[key] = value
            case "enum", [_, *_]:
                found[key] = value
            case "required", [*_]:
                found[key] = [name for name in value if isinstance(name, str)]
            case "properties", dict():
                found[key] = {name: _checkable(part) for name, part in value.items()}
            case "additionalProperties", False:
                found[key] = False
            case (("additionalProperties" | "items"), dict()):
                found[key] = _checkable(value)
            case "anyOf", [_, *_]:
                found[key] = [_checkable(branch) for branch in value]
            case _, int() | float() if key in _LIMITS and not isinstance(value, bool):
                found[key] = value
            case _:
                pass
    return found


def _without_nulls(value: Any, schema: Any) -> Any:
    if isinstance(value, list) and isinstance(schema, dict):
        items: list[Any] = value
        return [_without_nulls(item, schema.get("items")) for item in items]
    if not isinstance(value, dict) or not isinstance(schema, dict):
        return value
    fields: dict[str, Any] = value
    parts, required = schema.get("properties", {}), schema.get("required", ())
    return {
        key: _without_nulls(item, parts.get(key))
        for key, item in fields.items()
        if item is not None or key in required or _allows_null(parts.get(key))
    }


def _allows_null(schema: Any) -> bool:
    """Whether null means something of its own. Then it stays."""
    if not isinstance(schema, dict):
        return True
    return any(part.get("type") == "null" for part in schema.get("anyOf", ()))
