"""JSON schemas for tool arguments: from a type, and in the forms that providers accept.

`schema_of_type` gets a schema from msgspec (or Pydantic, for its models). `portable_schema` turns
any schema into one that every provider accepts: no references, no keyword that one of them rejects,
an object at the top. It describes the limits that it drops, so the model still knows them.
`strict_schema` makes the form that constrained decoding requires.

Making a schema portable only widens it: valid arguments stay valid, as long as they have no
properties that their type does not declare. Limits that are not in the schema are checked when the
arguments are parsed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from clark_agent.errors import ToolDefinitionError

__all__ = [
    "JsonSchema",
    "encode_hook",
    "is_pydantic_model",
    "json_type",
    "portable_schema",
    "schema_of_type",
    "strict_schema",
    "tag_of",
]

JsonSchema: TypeAlias = dict[str, Any]
_Scope: TypeAlias = Mapping[str, Any]

# --- from a type ------------------------------------------------------------------------------


def schema_of_type(tp: Any) -> JsonSchema:
    """The schema of a type, with references and titles as its library writes them.

    Raises TypeError for a type without a schema.
    """
    if is_pydantic_model(tp):
        schema: JsonSchema = tp.model_json_schema()
        return schema
    (schema,), definitions = msgspec.json.schema_components([tp], schema_hook=_schema_hook)
    _Declared(tp, definitions).restore(msgspec.inspect.type_info(tp), schema)
    return {**schema, "$defs": definitions} if definitions else schema


def is_pydantic_model(tp: Any) -> bool:
    """Whether the type is a Pydantic model. Does not import Pydantic."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(tp, type) and issubclass(tp, pydantic.BaseModel)


def encode_hook(value: Any) -> Any:
    """A hook for msgspec's encoders: also writes Pydantic models as JSON."""
    if is_pydantic_model(type(value)):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not JSON")


def _schema_hook(tp: type) -> JsonSchema:
    if not is_pydantic_model(tp):
        raise NotImplementedError
    return schema_of_type(tp)


class _Declared:
    """Restores what msgspec omits from a schema, by walking the type beside it.

    That is the declared order of enums, literals and typed dicts, which it sorts, and the format of
    dates, which it sets only for types that require a time zone.
    """

    def __init__(self, tp: Any, definitions: Mapping[str, JsonSchema]) -> None:
        self._definitions = definitions
        self._seen: set[str] = set()
        self._literals: dict[frozenset[Any], list[Any]] = {}
        self._collect_literals(tp, set())

    def _collect_literals(self, tp: Any, seen: set[Any]) -> None:
        """Record the order of the values of each literal, which only the annotation has."""
        values = get_args(tp)
        if get_origin(tp) is Literal:
            self._literals.setdefault(frozenset(values), list(values))
            return
        if isinstance(tp, type) and tp not in seen:
            seen.add(tp)
            try:
                values = tuple(get_type_hints(tp, include_extras=True).values())
            except Exception:  # msgspec resolves more names than typing; only the order is lost
                return
        for value in values:
            self._collect_literals(value, seen)

    def restore(self, info: Any, schema: Any) -> None:
        if not isinstance(schema, dict):
            return
        if (reference := schema.get("$ref")) is not None:
            name = reference.removeprefix("#/$defs/")
            if name not in self._seen:
                self._seen.add(name)
                self.restore(info, self._definitions.get(name))
            return
        kind = msgspec.inspect
        match info:
            case kind.Metadata():
                self.restore(info.type, schema)
            case kind.EnumType() if "enum" in schema:
                schema["enum"] = [member.value for member in info.cls]
            case kind.LiteralType() if "enum" in schema:
                values = self._literals.get(frozenset(info.values))
                schema["enum"] = values or list(info.values)
            case kind.DateTimeType() if schema.get("type") == "string":
                schema.setdefault("format", "date-time")
            case kind.UnionType():
                for part, branch in zip(info.types, schema.get("anyOf", ()), strict=False):
                    self.restore(part, branch)
            case kind.TupleType():
                for part, branch in zip(info.item_types, schema["prefixItems"], strict=False):
                    self.restore(part, branch)
            case kind.DictType():
                self.restore(info.value_type, schema.get("additionalProperties"))
            case kind.CollectionType():
                self.restore(info.item_type, schema.get("items"))
            case kind.StructType() | kind.DataclassType() | kind.TypedDictType():
                self._restore_fields(info, schema)
            case _:
                pass

    def _restore_fields(self, info: Any, schema: JsonSchema) -> None:
        properties: dict[str, Any] | None = schema.get("properties")
        if properties is None:  # a struct that is written as an array
            return
        for part in info.fields:
            self.restore(part.type, properties.get(part.encode_name))
        if isinstance(info, msgspec.inspect.TypedDictType):
            declared = [name for name in info.cls.__annotations__ if name in properties]
            order = [*(name for name in properties if name not in declared), *declared]
            schema["properties"] = {name: properties[name] for name in order}


# --- the portable form ------------------------------------------------------------------------

# The keywords that every provider accepts in a tool's parameters. Others are dropped or rewritten.
_PORTABLE = frozenset(
    {
        "type", "description", "default", "format", "pattern", "minLength", "maxLength",
        "minimum", "maximum", "minItems", "maxItems", "minProperties", "maxProperties",
    }
)  # fmt: skip

# The formats that the strict form supports too. Elsewhere a format is only a hint.
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
)

_ANNOTATIONS = frozenset({"description", "default"})
_OBJECT_KEYWORDS = frozenset({"properties", "required", "additionalProperties"})

_SPOKEN: Mapping[str, Callable[[Any], str | None]] = {
    "exclusiveMinimum": "greater than {}".format,
    "exclusiveMaximum": "less than {}".format,
    "multipleOf": "a multiple of {}".format,
    "uniqueItems": lambda unique: "without duplicates" if unique else None,
    "contentEncoding": "encoded as {}".format,
}


def portable_schema(schema: Mapping[str, Any]) -> JsonSchema:
    """The schema in the form that every provider accepts.

    References are inlined; where a type contains itself, the inner one is any value of its JSON
    type. A union at the top becomes one object, see `_flattened`. Properties keep their order.
    """
    portable = _inlined(schema, {"#": schema}, frozenset())
    branches = portable.get("anyOf")
    if branches and all(branch.get("type") == "object" for branch in branches):
        rest = {key: value for key, value in portable.items() if key != "anyOf"}
        flat = _flattened(branches)
        portable = {**rest, **flat}
        if "properties" in rest:  # those of all branches
            portable["properties"] = {**rest["properties"], **flat["properties"]}
        if "required" in rest:
            needed = [*rest["required"], *flat.get("required", ())]
            portable["required"] = list(dict.fromkeys(needed))
    return portable


def _inlined(schema: Any, scope: _Scope, inside: frozenset[str]) -> JsonSchema:
    """One subschema without references; ``inside`` are the references around it."""
    if not isinstance(schema, dict):  # true allows all; allowing more than false is harmless
        return {}
    for keyword in ("$defs", "definitions"):
        if definitions := schema.get(keyword):
            named = {f"#/{keyword}/{name}": value for name, value in definitions.items()}
            scope = {**scope, **named}
    rest = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
    if "$ref" in schema:
        base = _referenced(schema["$ref"], scope, inside)
        return _both(base, _rewritten(rest, scope, inside))
    result = _rewritten(rest, scope, inside)
    for part in schema.get("allOf", ()):
        result = _both(result, _inlined(part, scope, inside))
    return result


def _referenced(reference: str, scope: _Scope, inside: frozenset[str]) -> JsonSchema:
    target = scope.get(reference)
    if reference in inside:
        kind = target.get("type") if isinstance(target, dict) else None
        return {"type": kind} if isinstance(kind, str) else {}
    return _inlined(target, scope, inside | {reference})


def _both(first: JsonSchema, second: JsonSchema) -> JsonSchema:
    """Roughly the intersection: where they disagree the first wins, except for annotations."""
    if "type" in first and second.get("type", first["type"]) != first["type"]:
        second = {key: value for key, value in second.items() if key in _ANNOTATIONS}
    elif not _OBJECT_KEYWORDS.isdisjoint(first):  # these mean something only together
        second = {key: value for key, value in second.items() if key not in _OBJECT_KEYWORDS}
    return {
        **second,
        **first,
        **{key: value for key, value in second.items() if key in _ANNOTATIONS},
    }


def _rewritten(schema: JsonSchema, scope: _Scope, inside: frozenset[str]) -> JsonSchema:
    result = {key: value for key, value in schema.items() if key in _PORTABLE}
    if result.get("format") not in _FORMATS:
        result.pop("format", None)
    if "properties" in schema:
        properties = schema["properties"]
        result["properties"] = {
            name: _inlined(value, scope, inside) for name, value in properties.items()
        }
        needed = set(schema.get("required", ()))
        if required := [name for name in properties if name in needed]:
            result["required"] = required
    # With patterns, it is about the names that none of them matches.
    if "additionalProperties" in schema and "patternProperties" not in schema:
        more = schema["additionalProperties"]
        if more is False:
            result["additionalProperties"] = False
        elif value := _inlined(more, scope, inside):
            result["additionalProperties"] = value
    _rewrite_items(result, schema, scope, inside)
    _rewrite_limits(result, schema)
    result = _one_type_each(result)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            branches = [_inlined(branch, scope, inside) for branch in schema[keyword]]
            result = _both(_any_of(branches), result)
    if "const" in schema:
        result = _both(_any_of(_enums([schema["const"]])), result)
    elif "enum" in schema:
        result = _both(_any_of(_enums(schema["enum"])), result)
    return result


def _one_type_each(schema: JsonSchema) -> JsonSchema:
    """A list of types, which some providers reject, as a union."""
    kinds = schema.get("type")
    if not isinstance(kinds, list):
        return schema
    rest = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    branches: list[JsonSchema] = []
    for kind in kinds:
        branch: JsonSchema = {"type": kind} if kind == "null" else {**rest, "type": kind}
        if kind == "array":
            branch.setdefault("items", {})
        branches.append(branch)
    return {**_any_of(branches), **{k: v for k, v in schema.items() if k in _ANNOTATIONS}}


def _rewrite_items(
    result: JsonSchema, schema: JsonSchema, scope: _Scope, inside: frozenset[str]
) -> None:
    """One schema for all items: a tuple becomes an array of the union of its item types."""
    items = schema.get("items")
    prefix: Sequence[Any] = items if isinstance(items, list) else schema.get("prefixItems", ())
    if prefix:
        parts = [_inlined(part, scope, inside) for part in prefix]
        if isinstance(items, dict):
            parts.append(_inlined(items, scope, inside))
        closed = items is False or result.get("maxItems") == len(prefix)
        result["items"] = _any_of(parts) if closed or isinstance(items, dict) else {}
    elif "items" in schema or result.get("type") == "array":
        result["items"] = _inlined(items, scope, inside)


def _rewrite_limits(result: JsonSchema, schema: JsonSchema) -> None:
    """Describe the dropped limits in words; keep the next wider limit where there is one."""
    whole = result.get("type") == "integer"
    for keyword, limit, step, tighter in (
        ("exclusiveMinimum", "minimum", 1, max),
        ("exclusiveMaximum", "maximum", -1, min),
    ):
        bound = schema.get(keyword)
        if not isinstance(bound, int | float) or isinstance(bound, bool):
            continue
        exact = whole and isinstance(bound, int)
        inclusive = bound + step if exact else bound
        result[limit] = tighter(result.get(limit, inclusive), inclusive)
    for keyword, speak in _SPOKEN.items():
        exact = whole and keyword.startswith("exclusive")
        if keyword in schema and not exact and (text := speak(schema[keyword])):
            _note(result, text)


def _note(schema: JsonSchema, text: str) -> None:
    described = schema.get("description")
    schema["description"] = f"{described} ({text})" if described else text


def _any_of(branches: Iterable[JsonSchema]) -> JsonSchema:
    flat: list[JsonSchema] = []
    for branch in branches:
        parts = branch["anyOf"] if branch.keys() == {"anyOf"} else [branch]
        flat.extend(part for part in parts if part not in flat)
    if any(branch.keys() <= _ANNOTATIONS for branch in flat):  # one branch allows everything
        return {}
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


def _enums(values: Sequence[Any]) -> list[JsonSchema]:
    """An enum for each JSON type among the values."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(json_type(value), []).append(value)
    return [_enum(kind, members) for kind, members in by_type.items()]


def _enum(kind: str, members: list[Any]) -> JsonSchema:
    match kind:
        case "null":
            return {"type": "null"}
        case "boolean":  # some providers reject enums of booleans
            only = f"always {str(members[0]).lower()}"
            both = len(set(members)) > 1
            return {"type": kind} if both else {"type": kind, "description": only}
        case "string" | "integer" | "number":
            return {"type": kind, "enum": members}
        case "array":
            return {"type": kind, "items": {}}
        case _:
            return {"type": kind}


def json_type(value: object) -> str:
    """The name of the value's type in JSON schema."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case _:
            return "array"


# --- a union at the top -----------------------------------------------------------------------


def tag_of(variants: Sequence[Mapping[str, Any]]) -> str | None:
    """The property that distinguishes the variants: required in all, an enum, without overlap."""
    if not variants:
        return None
    for name in variants[0].get("properties", {}):
        seen: set[Any] = set()
        count = 0
        for variant in variants:
            values = variant.get("properties", {}).get(name, {}).get("enum", ())
            if not values or name not in variant.get("required", ()):
                break
            seen.update(values)
            count += len(values)
        else:
            if count == len(seen):
                return str(name)
    return None


def _flattened(variants: Sequence[JsonSchema]) -> JsonSchema:
    """One object for a union of objects, because providers accept no union at the top.

    The tag comes first, as an enum of all tags. The description of a property that only some
    variants have names their tags. Only properties that all variants require are required.
    """
    tag = tag_of(variants)
    names = list(dict.fromkeys([name for variant in variants for name in variant["properties"]]))
    if tag is not None:
        names.remove(tag)
        names.insert(0, tag)
    required = [name for name in names if all(name in v.get("required", ()) for v in variants)]
    result: JsonSchema = {
        "type": "object",
        "properties": {name: _merged_property(name, tag, variants) for name in names},
    }
    if required:
        result["required"] = required
    if all(variant.get("additionalProperties") is False for variant in variants):
        result["additionalProperties"] = False
    return result


def _merged_property(name: str, tag: str | None, variants: Sequence[JsonSchema]) -> JsonSchema:
    holders = [variant for variant in variants if name in variant["properties"]]
    found: list[JsonSchema] = [variant["properties"][name] for variant in holders]
    if name == tag:
        return {**found[0], "enum": [value for schema in found for value in schema["enum"]]}
    groups: list[tuple[JsonSchema, list[JsonSchema]]] = []
    for schema, holder in zip(found, holders, strict=True):
        for same, group in groups:
            if same == schema:
                group.append(holder)
                break
        else:
            groups.append((schema, [holder]))
    if len(groups) == 1 and len(holders) == len(variants):
        return found[0]
    return _any_of([_applying(schema, tag, group) for schema, group in groups])


def _applying(schema: JsonSchema, tag: str | None, variants: Iterable[JsonSchema]) -> JsonSchema:
    if tag is None:
        return schema
    values = [value for variant in variants for value in variant["properties"][tag]["enum"]]
    spelled = " or ".join([msgspec.json.encode(value).decode() for value in values])
    noted = dict(schema)
    _note(noted, f"applies when {tag} is {spelled}")
    return noted


# --- the strict form --------------------------------------------------------------------------

_STRICT_SPOKEN: Mapping[str, Callable[[Any], str]] = {
    "default": lambda value: f"default {msgspec.json.encode(value).decode()}",
    "minLength": "at least {} characters".format,
    "maxLength": "at most {} characters".format,
    "minProperties": "at least {} properties".format,
    "maxProperties": "at most {} properties".format,
}


def strict_schema(schema: Mapping[str, Any]) -> JsonSchema:
    """The portable schema in the form that constrained decoding requires.

    All objects are closed and all their properties required; optional ones may be null instead.
    Raises `ToolDefinitionError` for a schema that allows any value, or an object with any keys.
    """
    return _strict(portable_schema(schema), "$")


def _strict(schema: JsonSchema, path: str) -> JsonSchema:
    result = {key: value for key, value in schema.items() if key not in _STRICT_SPOKEN}
    for keyword, speak in _STRICT_SPOKEN.items():
        if schema.get(keyword) is not None:
            _note(result, speak(schema[keyword]))
    if "anyOf" in schema:
        result["anyOf"] = [_strict(branch, path) for branch in schema["anyOf"]]
    elif schema.get("type") == "array":
        result["items"] = _strict(schema["items"], f"{path}[]")
    elif schema.get("type") == "object":
        result.update(_strict_object(schema, path))
    elif "type" not in schema:
        raise _not_strict(path, "any value at all")
    return result


def _strict_object(schema: JsonSchema, path: str) -> JsonSchema:
    if "properties" not in schema or schema.get("additionalProperties", False) is not False:
        raise _not_strict(path, "an object with any keys")
    required = schema.get("required", ())
    properties: dict[str, JsonSchema] = {}
    for name, value in schema["properties"].items():
        strict = _strict(value, f"{path}.{name}")
        properties[name] = strict if name in required else _nullable(strict)
    return {"properties": properties, "required": list(properties), "additionalProperties": False}


def _nullable(schema: JsonSchema) -> JsonSchema:
    described = {key: value for key, value in schema.items() if key == "description"}
    rest = {key: value for key, value in schema.items() if key != "description"}
    return {**described, **_any_of([rest, {"type": "null"}])}


def _not_strict(path: str, what: str) -> ToolDefinitionError:
    return ToolDefinitionError(
        f"the strict form cannot express {what} (at {path}): declare its fields, "
        "or remove strict=True"
    )
