"""Differences between the servers that speak Chat Completions.

The sources are their documentation, their responses and the bug trackers of other clients. A server
that is not listed gets `COMPATIBLE`, which sends as little as possible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct, field
from msgspec.structs import replace

from clark_agent.reasoning import ReasoningFormat
from clark_agent.stream import OutputModeName, ReasoningEffort

__all__ = [
    "COMPATIBLE",
    "DEEPSEEK",
    "GROQ",
    "KIMI",
    "MISTRAL",
    "OPENAI",
    "OPENROUTER",
    "XAI",
    "ZAI",
    "ChatDialect",
    "SchemaSupport",
    "best_mode",
    "dialect_for",
    "formats_of",
    "openai_effort",
    "rejects_schema",
    "schema_support",
]

_Efforts = Mapping[ReasoningEffort, Mapping[str, Any]]

SchemaSupport: TypeAlias = Literal["no", "unknown", "without_tools", "yes"]
"""Whether a server ensures that an answer matches a JSON schema."""


class ChatDialect(Struct, frozen=True, kw_only=True):
    """What a server expects in Chat Completions requests, and how it answers."""

    name: str
    key_variables: tuple[str, ...] = ()
    """Environment variables that hold the key. If empty, the server needs no key."""
    cap_field: str = "max_tokens"
    """The name of the field that limits the output tokens."""
    wants_usage_option: bool = True
    """Whether to request usage with ``stream_options``. Some servers always send usage, and reject
    the option."""
    efforts: _Efforts = field(default_factory=dict)
    """The fields to add to the request for each level of thinking. For a level that is not listed,
    the server's default applies."""
    has_openai_models: bool = False
    """Whether the levels depend on the model as OpenAI's do (see `openai_effort`)."""
    reasoning_fields: tuple[str, ...] = ()
    """The fields of an assistant message that carry its readable reasoning back."""
    wants_empty_reasoning: bool = False
    """Whether these fields are required even if there is no reasoning."""
    takes_details: bool = False
    """Whether structured reasoning goes back as ``reasoning_details``."""
    takes_system_anywhere: bool = True
    """Whether system messages may be anywhere. Many chat templates accept only one, at the front,
    and require user and assistant to alternate. If False, later system messages are sent as user
    messages in tags, and consecutive user messages are joined."""
    takes_result_images: bool = True
    """Whether a user message with the images of tool results may follow the results."""
    takes_files: tuple[str, ...] = ()
    """Prefixes of the media types that a user message may hold as files, such as ``audio/``. Audio
    is sent as an audio block, everything else as a file."""
    takes_file_urls: bool = False
    """Whether the server fetches a file by its URL."""
    takes_cache_marks: bool = False
    """Whether the server passes prompt cache marks on to Anthropic's models."""
    takes_extra_content: bool = False
    """Whether a call may have ``extra_content`` that must be sent back with it. Gemini puts the
    signatures of its calls there."""
    has_short_ids: bool = False
    """Whether a call's id must be nine letters and digits."""
    counts_reasoning_apart: bool = False
    """Whether the count of output tokens excludes reasoning tokens."""
    schemas: SchemaSupport = "unknown"
    """Whether the server ensures that a streamed answer matches a JSON schema in
    ``response_format``. ``no``, or ``without_tools`` in a request with tools: it rejects the field,
    and the schema is described in the system prompt. ``unknown``: the field is sent, but not relied
    on, because not all models of the server support it. See `schema_support`."""


def _effort_levels(**levels: str) -> _Efforts:
    return {ReasoningEffort(level): {"reasoning_effort": word} for level, word in levels.items()}


def _thinking(enabled: str, **levels: str) -> _Efforts:
    """Fields that switch thinking on or off, with a level if it is on."""
    off = {ReasoningEffort.NONE: {"thinking": {"type": "disabled"}}}
    on = {
        ReasoningEffort(level): {"thinking": {"type": enabled}, "reasoning_effort": word}
        for level, word in levels.items()
    }
    return {**off, **on}


# Without ``minimal``: that is the default of a request, and must not send an option that an unknown
# server may not support.
_USUAL = _effort_levels(none="none", low="low", medium="medium", high="high", xhigh="high")

COMPATIBLE = ChatDialect(
    name="compatible server",
    efforts=_USUAL,
    # vLLM and Ollama read the first, llama.cpp and SGLang the second; all accept both.
    reasoning_fields=("reasoning", "reasoning_content"),
    takes_system_anywhere=False,
    # The model is unknown: send the file, and let the server reject what it does not support.
    takes_files=("application/pdf", "audio/"),
    takes_extra_content=True,
)

OPENAI = ChatDialect(
    name="OpenAI",
    key_variables=("OPENAI_API_KEY",),
    cap_field="max_completion_tokens",
    has_openai_models=True,
    takes_files=("application/pdf", "audio/"),
    schemas="yes",
)

OPENROUTER = ChatDialect(
    name="OpenRouter",
    key_variables=("OPENROUTER_API_KEY",),
    efforts={effort: {"reasoning": {"effort": str(effort)}} for effort in ReasoningEffort},
    takes_details=True,
    takes_files=("application/pdf", "audio/"),
    takes_file_urls=True,
    takes_cache_marks=True,
)

DEEPSEEK = ChatDialect(
    name="DeepSeek",
    key_variables=("DEEPSEEK_API_KEY",),
    efforts=_thinking("enabled", low="low", medium="high", high="high", xhigh="max"),
    reasoning_fields=("reasoning_content",),
    wants_empty_reasoning=True,
    schemas="no",
)

KIMI = ChatDialect(
    name="Moonshot",
    key_variables=("MOONSHOT_API_KEY",),
    efforts={ReasoningEffort.NONE: {"thinking": {"type": "disabled"}}},
    reasoning_fields=("reasoning_content",),
    wants_empty_reasoning=True,
)

ZAI = ChatDialect(
    name="Z.ai",
    key_variables=("ZAI_API_KEY", "ZHIPUAI_API_KEY"),
    efforts={ReasoningEffort.NONE: {"thinking": {"type": "disabled"}}},
    reasoning_fields=("reasoning_content",),
    schemas="no",
)

GROQ = ChatDialect(
    name="Groq",
    key_variables=("GROQ_API_KEY",),
    cap_field="max_completion_tokens",
    efforts=_effort_levels(low="low", medium="medium", high="high", xhigh="high"),
    reasoning_fields=("reasoning",),
    schemas="no",  # it has schemas, but neither while streaming nor with tools
)

MISTRAL = ChatDialect(
    name="Mistral",
    key_variables=("MISTRAL_API_KEY",),
    wants_usage_option=False,
    efforts=_effort_levels(high="high", xhigh="high"),
    takes_system_anywhere=False,
    takes_result_images=False,
    has_short_ids=True,
    schemas="without_tools",
)

XAI = ChatDialect(
    name="xAI",
    key_variables=("XAI_API_KEY",),
    cap_field="max_completion_tokens",
    efforts=_effort_levels(low="low", high="high", xhigh="high"),
    counts_reasoning_apart=True,
    schemas="yes",
)

_KEYED = replace(
    COMPATIBLE,
    takes_system_anywhere=True,
    reasoning_fields=(),
    takes_files=(),
    takes_extra_content=False,
)

_HOSTS: Mapping[str, ChatDialect] = {
    "api.openai.com": OPENAI,
    "openrouter.ai": OPENROUTER,
    "api.deepseek.com": DEEPSEEK,
    "api.groq.com": GROQ,
    "api.mistral.ai": MISTRAL,
    "api.x.ai": XAI,
    "api.moonshot.ai": KIMI,
    "api.moonshot.cn": KIMI,
    "api.z.ai": ZAI,
    "open.bigmodel.cn": ZAI,
    "api.cerebras.ai": replace(_KEYED, name="Cerebras", key_variables=("CEREBRAS_API_KEY",)),
    "api.together.xyz": replace(_KEYED, name="Together", key_variables=("TOGETHER_API_KEY",)),
    "api.fireworks.ai": replace(_KEYED, name="Fireworks", key_variables=("FIREWORKS_API_KEY",)),
}


def dialect_for(base_url: str) -> ChatDialect:
    """Return the dialect of the server at that address."""
    host = urlsplit(base_url).hostname or ""
    for known, dialect in _HOSTS.items():
        if host == known or host.endswith(f".{known}"):
            return dialect
    return COMPATIBLE


_FORMATS = {
    "anthropic": {ReasoningFormat.ANTHROPIC_CLAUDE_V1},
    "google": {ReasoningFormat.GOOGLE_GEMINI_V1},
    "openai": {ReasoningFormat.OPENAI_RESPONSES_V1, ReasoningFormat.AZURE_OPENAI_RESPONSES_V1},
    "x-ai": {ReasoningFormat.XAI_RESPONSES_V1},
}


def formats_of(model: str) -> frozenset[ReasoningFormat]:
    """The formats of reasoning that a model behind a gateway (``vendor/model``) accepts.

    The gateway passes reasoning on to the vendor, which rejects what it did not make.
    """
    return frozenset(_FORMATS.get(model.partition("/")[0], {ReasoningFormat.UNKNOWN}))


# Models of a server with schemas that came before them, or that have them only without tools.
_OLDER_MODELS: tuple[tuple[re.Pattern[str], SchemaSupport], ...] = (
    (re.compile(r"(ft:)?(gpt-3|gpt-4(-|:|$)|gpt-4o-2024-05-13)|chatgpt-|o1-(mini|preview)"), "no"),
    (re.compile(r"grok-[23]"), "without_tools"),
)


def schema_support(dialect: ChatDialect, model: str) -> SchemaSupport:
    """Whether the server ensures schemas with this model."""
    if dialect.schemas != "yes":
        return dialect.schemas
    for pattern, known in _OLDER_MODELS:
        if pattern.match(model):
            return known
    return "yes"


def rejects_schema(support: SchemaSupport, *, has_tools: bool) -> bool:
    """Whether the server rejects a request with a schema."""
    return support == "no" or (support == "without_tools" and has_tools)


def best_mode(support: SchemaSupport, *, has_tools: bool) -> OutputModeName:
    """How to ask for a structured output."""
    is_relied_on = support != "unknown" and not rejects_schema(support, has_tools=has_tools)
    return "native" if is_relied_on else "tool"


# --- OpenAI's models --------------------------------------------------------------------------

_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh")

# The first pattern that matches gives the levels of a model. A model that matches none does not
# reason, and rejects the option.
_OPENAI_LEVELS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), tuple(levels.split()))
    for pattern, levels in (
        (r"o\d", "low medium high"),
        (r"gpt-5-chat", ""),
        (r"gpt-5-pro", "high"),
        (r"gpt-5-codex", "low medium high"),
        (r"gpt-5(-|$)", "minimal low medium high"),
        (r"gpt-[\d.]+-chat", "medium"),
        (r"gpt-[\d.]+-pro", "medium high xhigh"),
        (r"gpt-5\.1-codex-max", "low medium high xhigh"),
        (r"gpt-5\.1-codex", "low medium high"),
        (r"gpt-5\.\d+-codex", "low medium high xhigh"),
        (r"gpt-5\.1", "none low medium high"),
        (r"gpt-(5\.\d+|[6-9]|\d\d)", "none low medium high xhigh"),
    )
)


def openai_effort(model: str, effort: ReasoningEffort) -> str | None:
    """OpenAI's name for a level of thinking; None: the model does not reason.

    A level that the model does not know becomes the next lower one that it knows, or its lowest.
    """
    name = model.rpartition("/")[2]
    known = next((levels for pattern, levels in _OPENAI_LEVELS if pattern.match(name)), ())
    if not known:
        return None
    wanted = _LEVELS.index(effort)
    below = [level for level in known if _LEVELS.index(level) <= wanted]
    return below[-1] if below else known[0]
