"""What the semantic conventions for generative AI require of each span and each metric.

Facts from ``model/gen-ai/spans.yaml``, ``model/gen-ai/metrics.yaml`` and
``docs/gen-ai/gen-ai-metrics.md`` of the repository ``open-telemetry/semantic-conventions-genai``,
as of September 2026, with their groups of attributes resolved.
"""

from __future__ import annotations

from typing import NamedTuple

_USAGE = {
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_creation.input_tokens",
}
_CONTENT = {
    "gen_ai.system_instructions",
    "gen_ai.input.messages",
    "gen_ai.output.messages",
    "gen_ai.tool.definitions",
}
_REQUEST = {
    "gen_ai.request.model",
    "gen_ai.request.max_tokens",
    "gen_ai.request.temperature",
    "gen_ai.output.type",
    "gen_ai.conversation.id",
    "gen_ai.response.finish_reasons",
    "error.type",
}


class SpanType(NamedTuple):
    """A kind of span."""

    kind: str
    named_by: str
    """The attribute that follows the operation in the name of the span."""
    required: set[str]
    others: set[str]
    """Conditionally required and recommended ones."""
    opt_in: set[str]


SPANS = {
    "invoke_agent": SpanType(
        "INTERNAL",
        "gen_ai.agent.name",
        {"gen_ai.operation.name", "gen_ai.provider.name"},
        {*_USAGE, *_REQUEST, "gen_ai.agent.name"},
        _CONTENT,
    ),
    "chat": SpanType(
        "CLIENT",
        "gen_ai.request.model",
        {"gen_ai.operation.name", "gen_ai.provider.name"},
        {
            *_USAGE,
            *_REQUEST,
            "gen_ai.request.stream",
            "gen_ai.response.id",
            "gen_ai.response.model",
            "gen_ai.response.time_to_first_chunk",
            "server.address",
            "server.port",
        },
        _CONTENT,
    ),
    "execute_tool": SpanType(
        "INTERNAL",
        "gen_ai.tool.name",
        {"gen_ai.operation.name", "gen_ai.tool.name"},
        {"gen_ai.tool.call.id", "gen_ai.tool.description", "gen_ai.tool.type", "error.type"},
        {"gen_ai.tool.call.arguments", "gen_ai.tool.call.result"},
    ),
}

_OF_CALLS = {"gen_ai.operation.name", "gen_ai.provider.name"}
METRICS: dict[str, tuple[str, set[str]]] = {
    "gen_ai.client.token.usage": ("{token}", {*_OF_CALLS, "gen_ai.token.type"}),
    "gen_ai.client.operation.duration": ("s", _OF_CALLS),
    "gen_ai.client.operation.time_to_first_chunk": ("s", _OF_CALLS),
    "gen_ai.client.operation.time_per_output_chunk": ("s", _OF_CALLS),
    "gen_ai.invoke_agent.duration": ("s", set()),
    "gen_ai.execute_tool.duration": ("s", {"gen_ai.tool.name"}),
}
"""The unit, and the required attributes."""

_DOUBLING = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
BOUNDARIES = {
    "gen_ai.client.token.usage": (
        1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864,
    ),
    "gen_ai.client.operation.duration": _DOUBLING,
    "gen_ai.client.operation.time_to_first_chunk": _DOUBLING,
    "gen_ai.client.operation.time_per_output_chunk": _DOUBLING,
}  # fmt: skip
"""The recommended boundaries of the buckets. There are none for the other metrics."""

INTEGERS = _USAGE | {"gen_ai.request.max_tokens", "server.port"}
LISTS = {"gen_ai.response.finish_reasons"}
BOOLEANS = {"gen_ai.request.stream"}
NUMBERS = {"gen_ai.response.time_to_first_chunk", "gen_ai.request.temperature"}
