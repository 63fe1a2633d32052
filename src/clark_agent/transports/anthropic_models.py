"""The features of Anthropic's models, as data.

The models differ in how thinking is turned on and off, which efforts they know, how many tokens
they may write, whether a tool call can be forced, and whether an answer can be held to a schema.
The API rejects a request with an option that the model does not support. The first row of the table
that matches a model's family and version counts. A Claude model without a row is treated as a new
one, with only the options that all of the newest accept. Any other name belongs to another server
that speaks the Messages API; those support the oldest form of thinking, the budget.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.stream import ReasoningEffort
from clark_agent.tools.schema import JsonSchema, portable_schema
from clark_agent.transports.http.request import strict_form

__all__ = ["ClaudeModel", "format_schema", "max_tokens_for", "model_named", "thinking_fields"]


class ClaudeModel(Struct, frozen=True, kw_only=True):
    """The features of a model."""

    thinking: Literal["none", "budget", "adaptive"] = "adaptive"
    """How to turn on thinking: not possible, with a token budget, or with an effort."""
    thinks_unasked: bool = True
    """Whether the model thinks if the request has no option for it."""
    off: str | None = None
    """The ``thinking.type`` that turns thinking off; None: leave the option out, or it cannot be
    turned off."""
    efforts: tuple[str, ...] = ("low", "medium", "high", "xhigh", "max")
    hides_thinking: bool = True
    """Whether the model returns thinking without text unless the request asks for a summary."""
    takes_forced_calls: bool = True
    """Whether a tool call can be forced. Otherwise the model decides."""
    thinks_when_forced: bool = True
    """Whether a tool call can be forced while thinking is on."""
    takes_prefill: bool = False
    """Whether the last message may be the assistant's, for the model to continue."""
    takes_formats: bool = True
    """Whether an answer can be held to a JSON schema."""
    most_output: int = 128_000
    """The limit of output tokens, thinking included."""


_ALWAYS_THINKS = ClaudeModel()
_NEWEST = ClaudeModel(takes_forced_calls=False)
_THINKS_BY_DEFAULT = ClaudeModel(off="disabled")
_THINKS_ON_REQUEST = ClaudeModel(thinks_unasked=False, thinks_when_forced=False)
_BUDGET = ClaudeModel(
    thinking="budget",
    thinks_unasked=False,
    efforts=(),
    thinks_when_forced=False,
    takes_prefill=True,
    takes_formats=False,
    most_output=64_000,
)
_NEVER_THINKS = replace(_BUDGET, thinking="none")
_NO_CLAUDE = replace(_BUDGET, off="disabled", most_output=128_000)

# By family and version, as `_family_and_version` returns them.
_MODELS: tuple[tuple[re.Pattern[str], ClaudeModel], ...] = tuple(
    (re.compile(pattern), model)
    for pattern, model in (
        (r"\S* 3\.7", _BUDGET),
        (r"\S* 3\.5", replace(_NEVER_THINKS, most_output=8_192)),
        (r"\S* [0-3]\.", replace(_NEVER_THINKS, most_output=4_096)),
        (r"opus 4\.[01]$", replace(_BUDGET, most_output=32_000)),
        (r"\S* 4\.5$", replace(_BUDGET, takes_formats=True)),
        (r"\S* 4\.[0-4]$", _BUDGET),
        (
            r"opus 4\.6",
            replace(
                _THINKS_ON_REQUEST,
                efforts=("low", "medium", "high", "max"),
                hides_thinking=False,
            ),
        ),
        (
            r"\S* 4\.6",
            replace(_THINKS_ON_REQUEST, efforts=("low", "medium", "high"), hides_thinking=False),
        ),
        (r"\S* 4\.", _THINKS_ON_REQUEST),
        (r"mythos preview", replace(_ALWAYS_THINKS, efforts=("low", "medium", "high", "max"))),
        (r"(fable|mythos) 5\.0", _ALWAYS_THINKS),
        (r"(opus|sonnet) 5\.0", _THINKS_BY_DEFAULT),
        (r"haiku 5\.[05]", _THINKS_BY_DEFAULT),
        (r"sonnet 5\.5", replace(_NEWEST, off="between_tools")),
    )
)

# Both orders occur: claude-opus-4-1, claude-3-5-haiku. A date after the name is not a version.
_NAME = re.compile(
    r"claude-(?:(?P<family>[a-z]+)-)?(?P<major>\d{1,2})(?!\d)(?:[-.](?P<minor>\d{1,2})(?!\d))?"
    r"(?:-(?P<late_family>[a-z]+))?"
)


def model_named(name: str) -> ClaudeModel:
    """Return the features of the model with that name. Names of gateways are known too."""
    lowered = name.lower()
    if "claude" not in lowered:
        return _NO_CLAUDE
    known = _family_and_version(lowered)
    return next((model for pattern, model in _MODELS if pattern.match(known)), _NEWEST)


def _family_and_version(name: str) -> str:
    """Return ``opus 4.1`` for ``claude-opus-4-1-20250805``; empty if there is no version."""
    if "claude-mythos-preview" in name:
        return "mythos preview"
    found = _NAME.search(name)
    if found is None:
        return ""
    family = found["family"] or found["late_family"] or "claude"
    return f"{family} {found['major']}.{found['minor'] or 0}"


# --- request fields ---------------------------------------------------------------------------

_USUAL_OUTPUT = 32_000
_LONG_OUTPUT = 64_000


def max_tokens_for(model: ClaudeModel, effort: ReasoningEffort, wanted: int | None) -> int:
    """The required limit of output tokens: the wanted or usual one, at most the model's."""
    usual = _LONG_OUTPUT if effort is ReasoningEffort.XHIGH else _USUAL_OUTPUT
    return min(usual if wanted is None else wanted, model.most_output)


_BUDGETS = {
    ReasoningEffort.LOW: 2_048,
    ReasoningEffort.MEDIUM: 8_192,
    ReasoningEffort.HIGH: 16_384,
    ReasoningEffort.XHIGH: 32_768,
}
_SMALLEST_BUDGET = 1_024
_ROOM_TO_ANSWER = 1_024

# The effort names for each level, the best first. ``MINIMAL`` applies only to models that think by
# default, and means their lowest effort.
_WORDS = {
    ReasoningEffort.MINIMAL: ("low",),
    ReasoningEffort.LOW: ("low",),
    ReasoningEffort.MEDIUM: ("medium",),
    ReasoningEffort.HIGH: ("high",),
    ReasoningEffort.XHIGH: ("xhigh", "max", "high"),
}


def thinking_fields(
    model: ClaudeModel, effort: ReasoningEffort, *, max_tokens: int
) -> dict[str, Any]:
    """The request's fields for thinking; empty if the model's default does what is wanted."""
    if effort is ReasoningEffort.NONE:
        return _no_thinking(model)
    if model.thinking == "none" or (effort is ReasoningEffort.MINIMAL and not model.thinks_unasked):
        return {}
    if model.thinking == "budget":
        budget = min(_BUDGETS[effort], max_tokens - _ROOM_TO_ANSWER)
        if budget < _SMALLEST_BUDGET:
            return {}
        return {"thinking": {"type": "enabled", "budget_tokens": budget}}
    thinking = {"type": "adaptive"}
    if model.hides_thinking:
        thinking["display"] = "summarized"
    word = next(word for word in _WORDS[effort] if word in model.efforts)
    return {"thinking": thinking, "output_config": {"effort": word}}


def _no_thinking(model: ClaudeModel) -> dict[str, Any]:
    if model.off is not None:
        return {"thinking": {"type": model.off}}
    return {"output_config": {"effort": "low"}} if model.thinks_unasked else {}


# The limits that the API does not enforce and rejects.
_SPOKEN = {
    "pattern": "matches the regular expression {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minimum": "at least {}",
    "maximum": "at most {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} properties",
    "maxProperties": "at most {} properties",
}


def format_schema(schema: Any) -> JsonSchema | None:
    """The schema as ``output_config.format`` accepts it; None: the API cannot ensure it.

    All objects are closed. Unlike the strict form, this one leaves properties optional: the API
    limits the number of unions. Limits that the API rejects become words.
    """
    return None if strict_form(schema) is None else _closed(portable_schema(schema))


def _closed(schema: JsonSchema) -> JsonSchema:
    spoken = [name for name in _SPOKEN if name in schema]
    if schema.get("minItems") in (0, 1):  # the two that it enforces
        spoken.remove("minItems")
    result = {name: value for name, value in schema.items() if name not in spoken}
    if spoken:
        notes = ", ".join([_SPOKEN[name].format(schema[name]) for name in spoken])
        described = schema.get("description")
        result["description"] = f"{described} ({notes})" if described else notes
    if "properties" in schema:
        parts = schema["properties"]
        result["properties"] = {name: _closed(part) for name, part in parts.items()}
        result["additionalProperties"] = False
    if "items" in schema:
        result["items"] = _closed(schema["items"])
    if "anyOf" in schema:
        result["anyOf"] = [_closed(part) for part in schema["anyOf"]]
    return result
