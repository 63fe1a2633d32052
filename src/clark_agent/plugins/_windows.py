"""How many tokens a model can take: what is known of models, and what providers say.

A table like this is never complete and soon old. It errs on the small side, and what a provider
says when it rejects a request takes precedence over it.
"""

from __future__ import annotations

import re
from functools import lru_cache

from clark_agent.prices import ModelRef

__all__ = ["DEFAULT_WINDOW", "window_of", "window_said"]

DEFAULT_WINDOW = 128_000
"""For a model that is not in the table."""

_WINDOWS: tuple[tuple[str, int], ...] = (
    (r"claude-(fable|mythos|(opus|sonnet|haiku)-([5-9]|4-[6-9]))", 1_000_000),
    (r"claude", 200_000),
    (r"gpt-(5\.[4-9]|[6-9])", 400_000),
    (r"gpt-5", 128_000),
    (r"gpt-4\.1", 1_000_000),
    (r"gpt-4o|gpt-4-turbo|gpt-4-1|gpt-oss", 128_000),
    (r"gpt-4-32k", 32_000),
    (r"gpt-4", 8_192),
    (r"gpt-3\.5", 16_385),
    (r"o[1-9](-|$)", 128_000),
    (r"gemini", 1_000_000),
    (r"gemma", 128_000),
    (r"grok-(4\.|4-1|4-fast)", 500_000),
    (r"grok-4|grok-code", 256_000),
    (r"grok-2", 32_768),
    (r"grok", 131_072),
    (r"deepseek-v4", 1_000_000),
    (r"deepseek-v3\.", 128_000),
    (r"deepseek", 64_000),
    (r"mistral-nemo|mistral-large|mistral-medium|magistral|codestral|devstral", 128_000),
    (r"llama-?3\.?-?[1-3]|llama-?4", 128_000),
    (r"llama-?3", 8_192),
    (r"qwen-?3", 131_072),
    (r"qwen-?2", 32_768),
    (r"glm|kimi|minimax", 128_000),
)


@lru_cache(maxsize=256)
def window_of(model: ModelRef) -> int | None:
    """The window of a model by its name; None if it is not known."""
    for name in model.names:
        for known, size in _WINDOWS:
            if re.search(rf"(^|[/:._-])({known})", name, re.IGNORECASE):
                return size
    return None


_NUMBER = r"(\d[\d,_]*\d|\d+)(\s?K\b)?"
# Compiled when first used, because most processes never do.
_LIMITS = (
    rf"\d\s*(?:tokens\s*)?>\s*{_NUMBER}",
    rf"n_ctx\D{{0,5}}{_NUMBER}",
    rf"with {_NUMBER} maximum context",
    rf"should be \[1, {_NUMBER}",
    rf"(?:max|context|limit|window|supports|cannot exceed|<=)(?:(?!\bby\b)\D){{0,45}}?{_NUMBER}",
)
_LEAST = 256
"""A smaller number is something else: a status, or a count of messages."""


def window_said(text: str) -> int | None:
    """The limit that a provider names when it rejects a request as too large. Such a text is no
    interface: check whether the number can be true.
    """
    for pattern in _LIMITS:
        for found in re.finditer(pattern, text, re.IGNORECASE):
            number = int(re.sub(r"\D", "", found[1])) * (1_000 if found[2] else 1)
            if number >= _LEAST:
                return number
    return None
