"""A small, typed, hookable agent loop.

The layers, each knowing only those above it:

- ``types``, ``reasoning``: messages, content blocks, identity and context
- ``clock``, ``cancellation``: time and stopping
- ``stream``, ``tools``, ``events``: the model, the tools, and what a run tells its listeners
- ``errors``, ``wire``: what can go wrong, and JSON
- ``thinking``, ``tokens``, ``tool_identity``, ``history``, ``request_summary``: pure functions
  over all that
- ``config``: settings
- ``trajectory``: the durable record of a run

Importing this package loads msgspec and the standard library, nothing else.
"""

from clark_agent import events, stream
from clark_agent._version import __version__
from clark_agent.cancellation import CancellationToken, Subscription
from clark_agent.clock import Clock, SystemClock
from clark_agent.config import Double, Fixed, Linear, MaxTokensRecovery, TokenScaling
from clark_agent.errors import (
    ClarkAgentError,
    DecodeError,
    EmptyOutcomeError,
    InvalidArgumentsError,
    InvalidContinuationError,
    LoopError,
    MissingFieldError,
    RunAborted,
    StreamError,
    ToolAborted,
    ToolError,
    ToolExecutionError,
    ToolFatal,
    ToolFatalError,
    ToolValidationError,
)
from clark_agent.events import AgentEvent, ChannelSink, EventSink, FanOutSink
from clark_agent.history import (
    HistoryChange,
    HistoryChangeKind,
    RepairedHistory,
    repair_history,
    unique_tool_call_ids,
)
from clark_agent.reasoning import (
    OpenRouterReasoningCodec,
    ReasoningCodec,
    ReasoningEncrypted,
    ReasoningFormat,
    ReasoningItem,
    ReasoningSummary,
    ReasoningText,
    ReplayAudit,
    ReplayContract,
    ReplayViolation,
    audit_replay,
)
from clark_agent.request_summary import (
    ProviderContentCounts,
    ProviderMessageCounts,
    ProviderRequestSummary,
)
from clark_agent.stream import (
    MessageAssembler,
    ReasoningEffort,
    StreamChunk,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
    ToolSchema,
    parse_arguments,
)
from clark_agent.thinking import ThinkingTagStreamFilter, strip_thinking_tags
from clark_agent.tokens import JsonSizeEstimator, TokenEstimator, estimate_messages
from clark_agent.tool_identity import (
    ToolIdentityPolicy,
    extract_args_key,
    extract_operation_key,
    extract_target,
)
from clark_agent.tools import ToolResult
from clark_agent.types import (
    AgentContext,
    AgentMessage,
    AssistantBlock,
    AssistantMessage,
    CustomMessage,
    ImageContent,
    ReasoningContent,
    ReasoningDetailsContent,
    RunIdentity,
    StopReason,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultBlock,
    ToolResultMessage,
    Usage,
    UserBlock,
    UserMessage,
    arg_parse_error,
    detect_arg_parse_error,
)
from clark_agent.wire import (
    MalformedRow,
    Transcript,
    decode_json,
    decode_message,
    dump_transcript,
    encode_json,
    encode_message,
    load_transcript,
)

__all__ = [
    "AgentContext",
    "AgentEvent",
    "AgentMessage",
    "AssistantBlock",
    "AssistantMessage",
    "CancellationToken",
    "ChannelSink",
    "ClarkAgentError",
    "Clock",
    "CustomMessage",
    "DecodeError",
    "Double",
    "EmptyOutcomeError",
    "EventSink",
    "FanOutSink",
    "Fixed",
    "HistoryChange",
    "HistoryChangeKind",
    "ImageContent",
    "InvalidArgumentsError",
    "InvalidContinuationError",
    "JsonSizeEstimator",
    "Linear",
    "LoopError",
    "MalformedRow",
    "MaxTokensRecovery",
    "MessageAssembler",
    "MissingFieldError",
    "OpenRouterReasoningCodec",
    "ProviderContentCounts",
    "ProviderMessageCounts",
    "ProviderRequestSummary",
    "ReasoningCodec",
    "ReasoningContent",
    "ReasoningDetailsContent",
    "ReasoningEffort",
    "ReasoningEncrypted",
    "ReasoningFormat",
    "ReasoningItem",
    "ReasoningSummary",
    "ReasoningText",
    "RepairedHistory",
    "ReplayAudit",
    "ReplayContract",
    "ReplayViolation",
    "RunAborted",
    "RunIdentity",
    "StopReason",
    "StreamChunk",
    "StreamError",
    "StreamErrorKind",
    "StreamEvent",
    "StreamFn",
    "StreamRequest",
    "Subscription",
    "SystemClock",
    "SystemMessage",
    "TextContent",
    "ThinkingContent",
    "ThinkingTagStreamFilter",
    "TokenEstimator",
    "TokenScaling",
    "ToolAborted",
    "ToolCall",
    "ToolError",
    "ToolExecutionError",
    "ToolFatal",
    "ToolFatalError",
    "ToolIdentityPolicy",
    "ToolResult",
    "ToolResultBlock",
    "ToolResultMessage",
    "ToolSchema",
    "ToolValidationError",
    "Transcript",
    "Usage",
    "UserBlock",
    "UserMessage",
    "__version__",
    "arg_parse_error",
    "audit_replay",
    "decode_json",
    "decode_message",
    "detect_arg_parse_error",
    "dump_transcript",
    "encode_json",
    "encode_message",
    "estimate_messages",
    "events",
    "extract_args_key",
    "extract_operation_key",
    "extract_target",
    "load_transcript",
    "parse_arguments",
    "repair_history",
    "stream",
    "strip_thinking_tags",
    "unique_tool_call_ids",
]
