"""The names of spans, attributes, events and metrics: all of them, and nowhere else.

``gen_ai.*``, ``error.*`` and ``server.*`` are those of the OpenTelemetry semantic conventions for
generative AI (the repository ``open-telemetry/semantic-conventions-genai``, whose status is
"development": names can still change). ``clark_agent.*`` are our own, for what the conventions do
not name.
"""

from __future__ import annotations

from typing import Final

from clark_agent.types import StopReason

__all__ = ["PROVIDERS", "SCOPE", "finish_reason"]

SCOPE: Final = "clark_agent"
"""The instrumentation scope."""

# --- operations, which begin the names of spans ---------------------------------------------------

INVOKE_AGENT: Final = "invoke_agent"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"
TURN: Final = "turn"

# --- attributes of the conventions ----------------------------------------------------------------

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
AGENT_NAME: Final = "gen_ai.agent.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_STREAM: Final = "gen_ai.request.stream"
OUTPUT_TYPE: Final = "gen_ai.output.type"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
"""With the tokens that were read from a cache and written to it."""
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ: Final = "gen_ai.usage.cache_read.input_tokens"
USAGE_CACHE_CREATION: Final = "gen_ai.usage.cache_creation.input_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_DESCRIPTION: Final = "gen_ai.tool.description"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"

# Content: recorded only if the host asks for it.
SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
TOOL_CALL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_CALL_RESULT: Final = "gen_ai.tool.call.result"

# --- our own attributes ---------------------------------------------------------------------------

RUN_ID: Final = "clark_agent.run.id"
RUN_PARENT_ID: Final = "clark_agent.run.parent_id"
RUN_DEPTH: Final = "clark_agent.run.depth"
RUN_TOOL_CALL_ID: Final = "clark_agent.run.tool_call_id"
"""For a child run: the call that started it."""
RUN_OUTCOME: Final = "clark_agent.run.outcome"
RUN_TURNS: Final = "clark_agent.run.turns"
RUN_RETRIES: Final = "clark_agent.run.retries"
"""Model calls after the first one of their turn."""
RUN_DISCARDED: Final = "clark_agent.run.discarded_answers"
RUN_SUSPENDED: Final = "clark_agent.run.suspended_seconds"
"""How long the run was suspended before this process resumed it."""
RUN_IS_RESUMED: Final = "clark_agent.run.is_resumed"
"""Other processes have worked on the run before, traced or not."""
RUN_TREE_COST: Final = "clark_agent.run.tree_cost"
"""The cost of the run and of its child runs, in all processes."""
COST: Final = "clark_agent.cost"
"""The cost of one model call; of a run, that of its calls in this process."""
TURN_NUMBER: Final = "clark_agent.turn.number"
TURN_ATTEMPTS: Final = "clark_agent.turn.attempts"
TURN_TOOL_CALLS: Final = "clark_agent.turn.tool_calls"
ATTEMPT: Final = "clark_agent.attempt"
"""The number of the model call in its turn, from 1."""
TIME_PER_OUTPUT_TOKEN: Final = "clark_agent.response.time_per_output_token"
"""Seconds per token after the first chunk."""
IS_INTERRUPTED: Final = "clark_agent.is_interrupted"
"""The answer was not read to its end: the user steered, time ran out, or the run was cancelled."""
IS_SUSPENDED: Final = "clark_agent.is_suspended"
"""The call waits for a decision; of a turn: one of its calls."""
PLUGIN: Final = "clark_agent.plugin"
"""Of a model call beside the turn, for example for a summary: the plugin that asked."""
LINK: Final = "clark_agent.link"
"""An attribute of links: ``first`` or ``previous`` process that worked on the run."""

# --- events of spans ------------------------------------------------------------------------------

ANSWER_DISCARDED: Final = "clark_agent.answer_discarded"
TOOL_REJECTED: Final = "clark_agent.tool_rejected"
TOOL_ANSWERED: Final = "clark_agent.tool_answered"
"""A hook or a decision gave the result instead of the tool."""
TOOL_SUSPENDED: Final = "clark_agent.tool_suspended"
"""The call waits, and its tool has not run."""
TOOL_RESTORED: Final = "clark_agent.tool_restored"
"""Another process has run the tool, and the result is in the log."""
REQUEST_DELAYED: Final = "clark_agent.request_delayed"
REASON: Final = "clark_agent.reason"
SECONDS: Final = "clark_agent.seconds"

NOT_RUN: Final = {
    "answered": TOOL_ANSWERED,
    "suspended": TOOL_SUSPENDED,
    "restored": TOOL_RESTORED,
}
"""The events of calls that did not run here and were not rejected, by `NotRun.why`."""

# --- metrics --------------------------------------------------------------------------------------

TOKEN_USAGE: Final = "gen_ai.client.token.usage"
OPERATION_DURATION: Final = "gen_ai.client.operation.duration"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.client.operation.time_to_first_chunk"
TIME_PER_OUTPUT_CHUNK: Final = "gen_ai.client.operation.time_per_output_chunk"
INVOKE_AGENT_DURATION: Final = "gen_ai.invoke_agent.duration"
EXECUTE_TOOL_DURATION: Final = "gen_ai.execute_tool.duration"
TOKEN_TYPE: Final = "gen_ai.token.type"
COST_TOTAL: Final = "clark_agent.cost.total"
RETRIES: Final = "clark_agent.retries"
DISCARDED_ANSWERS: Final = "clark_agent.discarded_answers"
SUSPENDED_DURATION: Final = "clark_agent.run.suspended.duration"

# --- values ---------------------------------------------------------------------------------------

UNKNOWN: Final = "unknown"
OTHER: Final = "other"
PROVIDERS: Final = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "google": "gcp.gen_ai",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "moonshot": "moonshot_ai",
    "vertex": "gcp.vertex_ai",
    "xai": "x_ai",
    "x.ai": "x_ai",
}
"""The conventions' names of providers, where those of our transports differ."""

_FINISH_REASONS: Final = {
    StopReason.END_TURN: "stop",
    StopReason.TOOL_USE: "tool_call",
    StopReason.MAX_TOKENS: "length",
    StopReason.ERROR: "error",
}


def finish_reason(reason: StopReason) -> str:
    """The conventions' name of the reason why a model stopped; ours, where they have none."""
    return _FINISH_REASONS.get(reason, str(reason))
