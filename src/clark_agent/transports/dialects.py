"""How the servers that speak Chat Completions differ.

What is here was learned from their documentation, their answers and the bug trackers of other
clients; each field says what goes wrong without it. A server that is not listed gets `COMPATIBLE`,
which sends as little as possible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct, field
from msgspec.structs import replace

from clark_agent.reasoning import ReasoningFormat
from clark_agent.stream import ReasoningEffort

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
    "dialect_for",
    "formats_of",
    "openai_effort",
]

_Efforts = Mapping[ReasoningEffort, Mapping[str, Any]]


class ChatDialect(Struct, frozen=True, kw_only=True):
    """What a server wants its Chat Completions to be like."""

    name: str
    key_variables: tuple[str, ...] = ()
    """Environment variables that hold the key. Without any a key is not needed."""
    cap_field: str = "max_tokens"
    """What the limit of output tokens is called."""
    wants_usage_option: bool = True
    """Whether to ask for usage; some send it anyway and refuse the question."""
    efforts: _Efforts = field(default_factory=dict)
    """What to add to the request for each level of thinking. A level that is not listed leaves it
    to the server."""
    has_openai_models: bool = False
    """Whether the levels depend on the model as OpenAI's do (see `openai_effort`)."""
    reasoning_fields: tuple[str, ...] = ()
    """Where an assistant message carries its readable reasoning back."""
    wants_empty_reasoning: bool = False
    """Whether the field must be there even when there is nothing to carry."""
    takes_details: bool = False
    """Whether structured reasoning goes back as ``reasoning_details``."""
    takes_system_anywhere: bool = True
    """Many chat templates take one system message, at the front, and users and assistants by turns:
    later system messages then go as a user's, in tags, and a user's messages are joined."""
    takes_result_images: bool = True
    """Whether a user message with the images of tool results may follow the results."""
    takes_files: tuple[str, ...] = ()
    """Beginnings of the media types of files that a user message may hold: ``audio/`` for example.
    Audio goes by its own block, everything else as a file."""
    takes_file_urls: bool = False
    """Whether the server fetches a file by its address."""
    takes_cache_marks: bool = False
    """Whether the server hands marks for the prompt cache on to Anthropic's models."""
    takes_extra_content: bool = False
    """Whether a call has ``extra_content`` that must come back with it: there Gemini has the
    signatures of its calls."""
    has_short_ids: bool = False
    """Whether a call's id must be nine letters and digits."""
    counts_reasoning_apart: bool = False
    """Whether the output tokens leave out those of the reasoning."""


def _effort_levels(**levels: str) -> _Efforts:
    return {ReasoningEffort(level): {"reasoning_effort": word} for level, word in levels.items()}


def _thinking(enabled: str, **levels: str) -> _Efforts:
    """A switch, and a level where one is wanted."""
    off = {ReasoningEffort.NONE: {"thinking": {"type": "disabled"}}}
    on = {
        ReasoningEffort(level): {"thinking": {"type": enabled}, "reasoning_effort": word}
        for level, word in levels.items()
    }
    return {**off, **on}


# Asking an unknown server to think at the least possible level would be asking it for something:
# the default of a request, minimal, says nothing.
_USUAL = _effort_levels(none="none", low="low", medium="medium", high="high", xhigh="high")

COMPATIBLE = ChatDialect(
    name="compatible server",
    efforts=_USUAL,
    # vLLM and Ollama read the one, llama.cpp and SGLang the other, and none minds both.
    reasoning_fields=("reasoning", "reasoning_content"),
    takes_system_anywhere=False,
    # Nobody knows what is behind it: it says itself what it does not take.
    takes_files=("application/pdf", "audio/"),
    takes_extra_content=True,
)

OPENAI = ChatDialect(
    name="OpenAI",
    key_variables=("OPENAI_API_KEY",),
    cap_field="max_completion_tokens",
    has_openai_models=True,
    takes_files=("application/pdf", "audio/"),
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
)

GROQ = ChatDialect(
    name="Groq",
    key_variables=("GROQ_API_KEY",),
    cap_field="max_completion_tokens",
    efforts=_effort_levels(low="low", medium="medium", high="high", xhigh="high"),
    reasoning_fields=("reasoning",),
)

MISTRAL = ChatDialect(
    name="Mistral",
    key_variables=("MISTRAL_API_KEY",),
    wants_usage_option=False,
    efforts=_effort_levels(high="high", xhigh="high"),
    takes_system_anywhere=False,
    takes_result_images=False,
    has_short_ids=True,
)

XAI = ChatDialect(
    name="xAI",
    key_variables=("XAI_API_KEY",),
    cap_field="max_completion_tokens",
    efforts=_effort_levels(low="low", high="high", xhigh="high"),
    counts_reasoning_apart=True,
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
    """The dialect of the server at that address."""
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
    """The formats of reasoning that a model behind a gateway (``vendor/model``) takes back.

    A gateway hands them on; what a vendor did not make it refuses.
    """
    return frozenset(_FORMATS.get(model.partition("/")[0], {ReasoningFormat.UNKNOWN}))


# --- OpenAI's models --------------------------------------------------------------------------

_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh")

# The first pattern that matches says which levels a model knows. One that no pattern matches does
# not reason, and refuses to be asked.
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
    """OpenAI's word for a level of thinking; None: the model does not reason.

    A level that the model does not know becomes the nearest that it does, rather less than more.
    """
    name = model.rpartition("/")[2]
    known = next((levels for pattern, levels in _OPENAI_LEVELS if pattern.match(name)), ())
    if not known:
        return None
    wanted = _LEVELS.index(effort)
    below = [level for level in known if _LEVELS.index(level) <= wanted]
    return below[-1] if below else known[0]
