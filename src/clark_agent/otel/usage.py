"""Tokens, as the conventions count them."""

from __future__ import annotations

from clark_agent.otel import conventions as names
from clark_agent.types import Usage

__all__ = ["input_tokens", "usage_attributes"]


def input_tokens(usage: Usage) -> int:
    """All input: tokens that were read from a cache or written to it are a part of it."""
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def usage_attributes(usage: Usage) -> dict[str, int]:
    """The attributes of a span."""
    return {
        names.USAGE_INPUT_TOKENS: input_tokens(usage),
        names.USAGE_OUTPUT_TOKENS: usage.output_tokens,
        names.USAGE_CACHE_READ: usage.cache_read_input_tokens,
        names.USAGE_CACHE_CREATION: usage.cache_creation_input_tokens,
    }
