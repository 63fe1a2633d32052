"""Turns a function's signature into a schema, a parser and a way to call it: once per tool.

A parameter is an argument, unless its type is `ToolContext`. A single parameter of an object type
stands for all arguments: its fields are what the model sees. Invalid signatures are rejected here,
where the tool is defined, with the names of the function and the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from inspect import (
    Parameter,
    isasyncgenfunction,
    iscoroutinefunction,
    isgeneratorfunction,
    signature,
    unwrap,
)
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from clark_agent.errors import InvalidArgumentsError, ToolDefinitionError
from clark_agent.tools.base import ToolContext
from clark_agent.tools.docstrings import Documentation
from clark_agent.tools.repair import (
    close_match,
    explain_arguments,
    quoted,
    repair_arguments,
)
from clark_agent.tools.schema import (
    JsonSchema,
    encode_hook,
    is_pydantic_model,
    portable_schema,
    schema_of_type,
    strict_schema,
)

__all__ = ["REFUSED", "Plan", "is_object_type", "members_of", "plan_call"]

REFUSED = (msgspec.ValidationError, ValueError)
"""What `Plan.read` raises for arguments that do not fit."""

_Call: TypeAlias = Callable[[Callable[..., Any], Any, ToolContext], Any]

_MOST_REASONS = 5
_REASON_CHARS = 400

# The field of a parsed value when one parameter stands for all arguments.
_WHOLE = "value"

# Defaults of these types are written into the schema by msgspec; a factory returns others
# unchanged, because a struct would reject or copy them.
_PLAIN_DEFAULTS = (NoneType, bool, int, float, str)


class Plan(Struct, frozen=True):
    """How a tool's arguments are read and its function called."""

    kind: Any
    """The type of parsed arguments. No raw arguments have it, so it distinguishes the two."""
    read: Callable[[Any], Any]
    """Parses arguments, or raises one of `REFUSED`."""
    call: _Call
    """Calls the function with parsed arguments and the context."""
    is_async: bool
    schema: JsonSchema
    """The schema that the model gets."""
    portable: JsonSchema
    """The schema for repair and explanations: without the nulls that the strict form adds."""
    description: str

    def repair(self, args: Any, failure: Exception, tool: str) -> Any:
        """Repair and read arguments that ``read`` rejected with this failure.

        Raises `InvalidArgumentsError` if they still do not fit.
        """
        repaired = repair_arguments(args, self.portable)
        if repaired is not args:
            try:
                return self.read(repaired)
            except REFUSED as error:
                failure = error
        reason = explain_arguments(repaired, self.portable) or _reason(failure)
        raise InvalidArgumentsError(tool, reason) from failure


def plan_call(
    function: Callable[..., Any],
    *,
    owner: str,
    documentation: Documentation,
    method: bool = False,
    strict: bool = False,
    localns: Mapping[str, Any] | None = None,
) -> Plan:
    """Work out how to call the function. Raises `ToolDefinitionError`.

    ``owner`` is its name in errors. A ``method`` is not bound yet: its first parameter is ``self``.
    """
    inner = unwrap(function)
    if isasyncgenfunction(inner) or isgeneratorfunction(inner):
        raise ToolDefinitionError(
            f"{owner} yields: a tool must return one result; report progress with ctx.update()"
        )
    every = _parameters(function, owner, method, localns or {})
    context = [parameter for parameter in every if _is_context(parameter.annotation)]
    if len(context) > 1:
        raise ToolDefinitionError(f"{owner} has more than one ToolContext parameter: remove one")
    given = [parameter for parameter in every if parameter not in context]
    whole = len(given) == 1 and is_object_type(given[0].annotation)
    kind, raw = _whole(given[0], owner) if whole else _fields(given, owner, strict)
    description = _describe(raw, every, documentation, owner, whole)
    portable = portable_schema(raw)
    if portable.get("type") != "object":
        raise ToolDefinitionError(
            f"{owner}: arguments must be a JSON object, and "
            f"{_type_name(given[0].annotation)} is not"
        )
    return Plan(
        kind=kind,
        read=_reader(kind, given[0] if whole else None),
        call=_caller(every, context[0] if context else None),
        is_async=iscoroutinefunction(inner),
        schema=_strict(portable, owner) if strict else portable,
        portable=portable,
        description=description,
    )


def _strict(portable: JsonSchema, owner: str) -> JsonSchema:
    try:
        return strict_schema(portable)
    except ToolDefinitionError as error:
        raise ToolDefinitionError(f"{owner}: {error}") from None


# --- the parameters ---------------------------------------------------------------------------


def _parameters(
    function: Callable[..., Any], owner: str, method: bool, localns: Mapping[str, Any]
) -> list[Parameter]:
    """The parameters with their annotations resolved."""
    try:
        parameters = list(signature(function).parameters.values())
    except (TypeError, ValueError, NameError) as error:
        raise ToolDefinitionError(f"{owner} has no readable signature: {error}") from error
    if method:
        if not parameters or parameters[0].name != "self":
            raise ToolDefinitionError(f"{owner}: the first parameter of a method must be 'self'")
        del parameters[0]
    namespace = getattr(unwrap(function), "__globals__", {})
    return [_resolved(parameter, owner, namespace, localns) for parameter in parameters]


def _resolved(
    parameter: Parameter, owner: str, globalns: dict[str, Any], localns: Mapping[str, Any]
) -> Parameter:
    where = f"{owner}: the parameter {parameter.name!r}"
    if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        raise ToolDefinitionError(f"{where} is variadic: name each argument instead")
    if parameter.kind is Parameter.POSITIONAL_ONLY:
        raise ToolDefinitionError(f"{where} is positional-only: remove the '/', models use names")
    if parameter.annotation is Parameter.empty:
        hint = f"add its type, such as '{parameter.name}: str'"
        if parameter.name == "self":
            hint = "pass the bound method, tool(obj.method), or write a TypedTool"
        raise ToolDefinitionError(f"{where} has no annotation: {hint}")
    annotation = parameter.annotation
    if annotation is None:
        annotation = NoneType
    if isinstance(annotation, str) and _names_context(annotation):
        annotation = ToolContext  # the type of its deps matters to type checkers only

    def probe() -> None: ...

    probe.__annotations__ = {parameter.name: annotation}
    # Linters move an import that only annotations use to where it does not run.
    globalns = {"ToolContext": ToolContext, **globalns}
    try:
        hints = get_type_hints(probe, globalns, dict(localns), include_extras=True)
    except Exception as error:
        raise ToolDefinitionError(
            f"{where} has the annotation {annotation!r}, which cannot be resolved ({error}): "
            "define the type before the tool, and import it at run time too"
        ) from error
    return parameter.replace(annotation=hints[parameter.name])


def _plain(annotation: Any) -> Any:
    """The type without ``Annotated`` and without the name of a type alias."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = annotation.__origin__
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        else:
            return annotation


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    plain = _plain(annotation)
    return get_args(plain) if get_origin(plain) in (Union, UnionType) else (plain,)


def _names_context(annotation: str) -> bool:
    """Whether the text of an annotation is ``ToolContext[…]``, perhaps behind a module's name."""
    name, bracket, _ = annotation.strip().partition("[")
    return bool(bracket) and name.rpartition(".")[2] == "ToolContext"


def _is_context(annotation: Any) -> bool:
    members = [_plain(member) for member in members_of(annotation) if member is not NoneType]
    kinds = [get_origin(member) or member for member in members]
    return len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], ToolContext)


def is_object_type(annotation: Any) -> bool:
    """Whether the type's fields can be the arguments: one object type, or a union of structs."""
    members = [get_origin(_plain(member)) or _plain(member) for member in members_of(annotation)]
    if len(members) > 1:
        return all(isinstance(member, type) and issubclass(member, Struct) for member in members)
    (tp,) = members
    if not isinstance(tp, type):
        return False
    return (
        issubclass(tp, Struct)
        or is_typeddict(tp)
        or hasattr(tp, "__dataclass_fields__")
        or hasattr(tp, "__attrs_attrs__")
        or is_pydantic_model(tp)
    )


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


# --- schema and parsing -----------------------------------------------------------------------


def _fields(given: Sequence[Parameter], owner: str, strict: bool) -> tuple[Any, JsonSchema]:
    """A struct with a field for each parameter."""
    fields = [_field(parameter) for parameter in given]
    kind = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=strict)
    raw = _schema_of(kind, given, owner)
    properties = _root(raw)["properties"]
    for parameter in given:
        if parameter.default is not Parameter.empty:
            try:
                text = msgspec.json.encode(parameter.default, enc_hook=encode_hook)
            except (TypeError, ValueError):  # the model need not know it
                continue
            properties[parameter.name]["default"] = msgspec.json.decode(text)
    return kind, raw


def _field(parameter: Parameter) -> Any:
    default = parameter.default
    if default is Parameter.empty:
        return parameter.name, parameter.annotation
    if type(default) not in _PLAIN_DEFAULTS and not isinstance(default, Enum):
        default = msgspec.field(default_factory=lambda: parameter.default)
    return parameter.name, parameter.annotation, default


def _whole(parameter: Parameter, owner: str) -> tuple[Any, JsonSchema]:
    """A struct that holds the single value that stands for all arguments."""
    tp = _plain(parameter.annotation)
    kind = msgspec.defstruct("Arguments", [(_WHOLE, tp)])
    return kind, _schema_of(tp, [parameter], owner)


def _schema_of(tp: Any, given: Sequence[Parameter], owner: str) -> JsonSchema:
    """The schema of all arguments. If it has none, raises an error that names the parameter."""
    try:
        return schema_of_type(tp)
    except Exception:
        for parameter in given:
            _check_type(parameter, owner)
        raise


def _check_type(parameter: Parameter, owner: str) -> None:
    tp = parameter.annotation
    try:
        schema_of_type(tp)
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ToolDefinitionError(
            f"{owner}: the parameter {parameter.name!r} has the type {_type_name(tp)}, which "
            f"cannot be read from JSON: use a type that can ({lines[-1] if lines else error})"
        ) from error


def _decode_hook(tp: type, value: Any) -> Any:
    if is_pydantic_model(tp):
        return tp.model_validate(value)  # type: ignore[attr-defined]
    raise NotImplementedError


def _reader(kind: Any, whole: Parameter | None) -> Callable[[Any], Any]:
    convert: Callable[[Any, Any], Any] = msgspec.convert
    if _needs_more(msgspec.inspect.type_info(kind), set()):
        convert = partial(msgspec.convert, str_keys=True, dec_hook=_decode_hook)
    if whole is None:
        return lambda args: convert(args, kind)
    tp = _plain(whole.annotation)
    if is_pydantic_model(tp):
        return lambda args: kind(tp.model_validate(args))
    if whole.default is Parameter.empty:
        return lambda args: convert({_WHOLE: args}, kind)
    return lambda args: convert({_WHOLE: args}, kind) if args else kind(whole.default)


def _needs_more(info: Any, seen: set[int]) -> bool:
    """Whether parsing needs options, which cost more than the parsing of simple arguments.

    They are for models of other libraries, and for keys other than strings, which JSON lacks.
    """
    if id(info) in seen:
        return False
    seen.add(id(info))
    if isinstance(info, msgspec.inspect.CustomType):
        return True
    if isinstance(info, msgspec.inspect.DictType):
        plain = (msgspec.inspect.StrType, msgspec.inspect.AnyType)
        if not isinstance(info.key_type, plain):
            return True
    parts: tuple[Any, ...] = astuple(info) if isinstance(info, Struct) else ()
    parts = info if isinstance(info, tuple) else parts
    return any(_needs_more(part, seen) for part in parts)


def _reason(failure: Exception) -> str:
    """The parser's message, for values that fit the schema."""
    text, separator, path = str(failure).rpartition(" - at `")
    if not separator:
        text, path = path, ""
    path = path.rstrip("`").removeprefix(f"$.{_WHOLE}").removeprefix("$")
    for error in (failure, failure.__cause__):  # a model within other arguments is the cause
        errors: Callable[[], list[Mapping[str, Any]]] | None = getattr(error, "errors", None)
        if errors is not None:  # Pydantic lists each problem
            above = path if error is not failure else ""
            texts = [_one_reason(problem, above) for problem in errors()]
            return "; ".join([*texts[:_MOST_REASONS], *["and more"] * (len(texts) > _MOST_REASONS)])
    text = " ".join(text.replace("`", "").split())
    if len(text) > _REASON_CHARS:
        text = f"{text[:_REASON_CHARS].rpartition(' ')[0] or text[:_REASON_CHARS]} …"
    return f"path ${path}: {text[:1].lower()}{text[1:]}"


def _one_reason(error: Mapping[str, Any], above: str) -> str:
    path = "".join([f"[{key}]" if isinstance(key, int) else f".{key}" for key in error["loc"]])
    return f"path ${above}{path}: {error['msg']}, got {quoted(error['input'])}"


# --- descriptions -----------------------------------------------------------------------------


def _root(raw: JsonSchema) -> JsonSchema:
    """The schema of the object itself, without the reference to it."""
    name = raw.get("$ref", "").removeprefix("#/$defs/")
    root: JsonSchema = raw.get("$defs", {}).get(name, raw)
    return root


def _describe(
    raw: JsonSchema,
    parameters: Sequence[Parameter],
    documentation: Documentation,
    owner: str,
    whole: bool,
) -> str:
    """Put the descriptions of the parameters into the schema; returns the tool's own."""
    root = _root(raw)
    properties = root.get("properties", {})
    names = [parameter.name for parameter in parameters]
    _check_documented(documentation.parameters, [*names, *properties], owner)
    annotated = {parameter.name: _annotated_text(parameter.annotation) for parameter in parameters}
    for name, schema in properties.items():
        documented = documentation.parameters.get(name)
        if whole:
            text = None if "description" in schema else documented
        else:
            text = annotated.get(name) or documented
        if text:
            schema["description"] = text
    about_type: str = root.pop("description", "")
    return documentation.description or about_type


def _check_documented(documented: Iterable[str], names: Sequence[str], owner: str) -> None:
    for name in documented:
        if name not in names and name != "self":
            match = close_match(name, names)
            hint = f": did you mean {match!r}?" if match else ""
            raise ToolDefinitionError(
                f"{owner}: the docstring describes {name!r}, which is not a parameter{hint}"
            )


def _annotated_text(annotation: Any) -> str | None:
    """The last text in ``Annotated[…]``: a plain string, or an object's description."""
    if get_origin(annotation) is not Annotated:
        return None
    for extra in reversed(annotation.__metadata__):
        text = extra if isinstance(extra, str) else getattr(extra, "description", None)
        if isinstance(text, str) and text.strip():
            return text.strip()
    return None


# --- the call ---------------------------------------------------------------------------------


def _caller(every: Sequence[Parameter], context: Parameter | None) -> _Call:
    """Passes parsed arguments to the function's parameters, with the context in its place."""
    place = None if context is None else every.index(context)
    keywords = [p.name for p in every if p.kind is Parameter.KEYWORD_ONLY and p is not context]
    if not keywords and (context is None or context.kind is not Parameter.KEYWORD_ONLY):
        match place:
            case None:
                return lambda function, args, ctx: function(*astuple(args))
            case 0:
                return lambda function, args, ctx: function(ctx, *astuple(args))
            case _ if place == len(every) - 1:
                return lambda function, args, ctx: function(*astuple(args), ctx)
            case _:
                pass
    named = [parameter for parameter in every if parameter is not context]
    leading = len(named) - len(keywords)
    by_keyword = context is not None and context.kind is Parameter.KEYWORD_ONLY

    def call(function: Callable[..., Any], args: Any, ctx: ToolContext) -> Any:
        values = astuple(args)
        positional = [*values[:leading]]
        rest: dict[str, Any] = dict(zip(keywords, values[leading:], strict=True))
        if by_keyword and context is not None:
            rest[context.name] = ctx
        elif place is not None:
            positional.insert(place, ctx)
        return function(*positional, **rest)

    return call
