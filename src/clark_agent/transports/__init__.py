"""Transports: the connections to models that come with this package.

    stream = connect("openrouter:anthropic/claude-sonnet-5")
    config = LoopConfig(stream=stream, tools=[...])

Each one uses its provider's official SDK, which is an extra of this package. A transport loads its
SDK when it is created; importing this module loads none of them.
"""

from clark_agent.transports.anthropic import Anthropic
from clark_agent.transports.connect import connect
from clark_agent.transports.dialects import ChatDialect
from clark_agent.transports.failover import FirstOf
from clark_agent.transports.gemini import Gemini
from clark_agent.transports.http.base import Transport
from clark_agent.transports.http.reasoning_transfer import ReasoningTarget, convert_history
from clark_agent.transports.http.retry import RetryPolicy, Timeouts
from clark_agent.transports.local import LocalModel
from clark_agent.transports.openai_chat import OpenAIChat
from clark_agent.transports.openai_responses import OpenAIResponses
from clark_agent.transports.proxy import ProxyStream
from clark_agent.transports.recording import PlaybackMismatch, PlaybackStream, RecordingStream

__all__ = [
    "Anthropic",
    "ChatDialect",
    "FirstOf",
    "Gemini",
    "LocalModel",
    "OpenAIChat",
    "OpenAIResponses",
    "PlaybackMismatch",
    "PlaybackStream",
    "ProxyStream",
    "ReasoningTarget",
    "RecordingStream",
    "RetryPolicy",
    "Timeouts",
    "Transport",
    "connect",
    "convert_history",
]
