"""Work on messages: JSON, views of a transcript, estimates, reasoning, thinking tags, summaries."""

from clark_agent.messages.request_summary import (
    ProviderContentCounts,
    ProviderMessageCounts,
    ProviderRequestSummary,
)
from clark_agent.messages.thinking import (
    ThinkingTagStreamFilter,
    strip_thinking_tags,
)
from clark_agent.messages.tokens import (
    JsonSizeEstimator,
    TokenEstimator,
    estimate_messages,
)
from clark_agent.messages.transcript import (
    MessageLog,
    MessageView,
)
from clark_agent.messages.wire import (
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
    "JsonSizeEstimator",
    "MalformedRow",
    "MessageLog",
    "MessageView",
    "ProviderContentCounts",
    "ProviderMessageCounts",
    "ProviderRequestSummary",
    "ThinkingTagStreamFilter",
    "TokenEstimator",
    "Transcript",
    "decode_json",
    "decode_message",
    "dump_transcript",
    "encode_json",
    "encode_message",
    "estimate_messages",
    "load_transcript",
    "strip_thinking_tags",
]
