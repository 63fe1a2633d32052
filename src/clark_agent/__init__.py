"""A small, typed, hookable agent loop: context → model → tool batch → results appended → repeat.

The layers, each knowing only those before it and its neighbours:

- ``reasoning``, ``types``, ``clock``, ``cancellation``: messages, identity, time and stopping
- ``stream``, ``errors``: the seam to a model, and what can go wrong
- ``run_context``: the run, for functions of the host
- ``tools``: what the model may call, its schema and its arguments
- ``events``, ``messages``, ``history``, ``gates``, ``intake``: events, and work on messages
- ``steering``, ``protocol``, ``waiting``: messages to a running agent, the rules for the model's
  answers, and requests that wait for a decision
- ``prices``: the names of models, and what their tokens cost
- ``plugins``: the eight hooks, and the built-in plugins
- ``recovery``, ``audience``: what to do after an overflow, and who receives the events
- ``budget``, ``rate_limit``, ``result``: what a run may spend and how fast, and what it returns
- ``effects``, ``tool_source``, ``tracing``: wrapping model and tool calls, tools that change, and
  following runs from outside
- ``output``, ``partial``: the type that a run returns, and its value while it streams
- ``config``: the settings of a run
- ``engine``: what happens in a run: the loop, a turn, a batch of tool calls
- ``running``, ``conversation``, ``sub_agents``: what people do with the loop
- ``agent``: a model, its tools and a system prompt as one value
- ``run_log``: everything that enters a run, recorded as it happens
- ``durable``: runs in workflow engines, which move them between machines
- ``toolkit``: tools that most agents need
- ``mcp``: the tools of MCP servers, and agents as an MCP server
- ``otel``: traces and metrics for OpenTelemetry
- ``transports``: connections to models, each loading its SDK when it is created
- ``gateway``: a server between clients and models
- ``trajectory``, ``export``, ``replay``: durable records, other formats, and a logged run again
- ``view``: a page to look at runs
- ``testing``: the order of events as code, and what to test agents, transports and stores with
- ``cli``: the command line

Importing this package loads msgspec and the standard library, nothing else.
"""

from clark_agent import events, stream
from clark_agent._version import __version__
from clark_agent.agent import Agent
from clark_agent.budget import (
    Budget,
)
from clark_agent.cancellation import (
    CancellationToken,
)
from clark_agent.config import (
    AgentBuilder,
    ExecutionMode,
    LoopConfig,
)
from clark_agent.conversation import (
    Conversation,
)
from clark_agent.engine.loop import (
    run,
    run_continue,
)
from clark_agent.errors import (
    ClarkAgentError,
    ConfigError,
    ContextOverflowError,
    HookError,
    LoopError,
    ModelRetry,
    OutputError,
    RunAborted,
    RunStoppedByTool,
    StreamError,
    ToolAborted,
    ToolExecutionError,
    ToolFatal,
    ToolSuspended,
    TransportError,
)
from clark_agent.events import (
    AgentEvent,
    ChannelSink,
    EventSink,
    FanOutSink,
)
from clark_agent.messages.wire import (
    dump_transcript,
    load_transcript,
)
from clark_agent.output import Output
from clark_agent.plugins import (
    ChannelSteering,
    Compaction,
    GracefulTurnLimit,
    LargeResults,
    LoopDetector,
    OpeningGate,
    TokenBudget,
    ToolResultBudget,
    UniqueToolCallIds,
)
from clark_agent.plugins.base import (
    AfterToolCallContext,
    AfterToolDecision,
    Answer,
    BeforeRequestContext,
    BeforeToolCallContext,
    Block,
    FunctionPlugin,
    Plugin,
    Rewrite,
    Suspend,
    ToolGateContext,
    TransformContext,
)
from clark_agent.prices import (
    Price,
)
from clark_agent.protocol import (
    ProtocolPolicy,
)
from clark_agent.recovery import (
    MaxTokensRecovery,
)
from clark_agent.result import (
    LoopOutcome,
    RunResult,
)
from clark_agent.run_context import RunContext
from clark_agent.running import (
    RunStream,
    run_sync,
    stream_run,
)
from clark_agent.steering import (
    SteeringHandle,
    SteeringReceipt,
    SteerWhen,
)
from clark_agent.stream import (
    ReasoningEffort,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
    ToolSchema,
)
from clark_agent.sub_agents import (
    agent_tool,
    run_child,
)
from clark_agent.tools import (
    AgentTool,
    FunctionTool,
    ToolContext,
    ToolRegistry,
    ToolResult,
    TypedTool,
    tool,
)
from clark_agent.tools.finish import (
    finish_tool,
)
from clark_agent.types import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    RunIdentity,
    StopReason,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
)

__all__ = [
    "AfterToolCallContext",
    "AfterToolDecision",
    "Agent",
    "AgentBuilder",
    "AgentContext",
    "AgentEvent",
    "AgentMessage",
    "AgentTool",
    "Answer",
    "AssistantMessage",
    "BeforeRequestContext",
    "BeforeToolCallContext",
    "Block",
    "Budget",
    "CancellationToken",
    "ChannelSink",
    "ChannelSteering",
    "ClarkAgentError",
    "Compaction",
    "ConfigError",
    "ContextOverflowError",
    "Conversation",
    "CustomMessage",
    "EventSink",
    "ExecutionMode",
    "FanOutSink",
    "FileContent",
    "FunctionPlugin",
    "FunctionTool",
    "GracefulTurnLimit",
    "HookError",
    "ImageContent",
    "LargeResults",
    "LoopConfig",
    "LoopDetector",
    "LoopError",
    "LoopOutcome",
    "MaxTokensRecovery",
    "ModelRetry",
    "OpeningGate",
    "Output",
    "OutputError",
    "Plugin",
    "Price",
    "ProtocolPolicy",
    "ProviderContent",
    "ReasoningContent",
    "ReasoningDetailsContent",
    "ReasoningEffort",
    "Rewrite",
    "RunAborted",
    "RunContext",
    "RunIdentity",
    "RunResult",
    "RunStoppedByTool",
    "RunStream",
    "SteerWhen",
    "SteeringHandle",
    "SteeringReceipt",
    "StopReason",
    "StreamError",
    "StreamErrorKind",
    "StreamEvent",
    "StreamFn",
    "StreamRequest",
    "Suspend",
    "SystemMessage",
    "TextContent",
    "ThinkingContent",
    "TokenBudget",
    "ToolAborted",
    "ToolCall",
    "ToolContext",
    "ToolExecutionError",
    "ToolFatal",
    "ToolGateContext",
    "ToolRegistry",
    "ToolResult",
    "ToolResultBudget",
    "ToolResultMessage",
    "ToolSchema",
    "ToolSuspended",
    "TransformContext",
    "TransportError",
    "TypedTool",
    "UniqueToolCallIds",
    "Usage",
    "UserMessage",
    "__version__",
    "agent_tool",
    "dump_transcript",
    "events",
    "finish_tool",
    "load_transcript",
    "run",
    "run_child",
    "run_continue",
    "run_sync",
    "stream",
    "stream_run",
    "tool",
]
