"""Plugins: the eight hooks, and the built-in plugins, one per file.

The hooks are protocols; a plugin is any object with at least one of their methods. The built-in
plugins do not depend on any product's tools.
"""

from clark_agent.plugins.base import (
    AfterToolCall,
    AfterToolCallContext,
    AfterToolDecision,
    Answer,
    BeforeRequest,
    BeforeRequestContext,
    BeforeToolCall,
    BeforeToolCallContext,
    BeforeToolDecision,
    Block,
    ContextTransform,
    EventObserver,
    FollowUpSource,
    FunctionPlugin,
    Plugin,
    RestoreContext,
    Rewrite,
    SteeringSource,
    ToolGate,
    ToolGateClass,
    ToolGateContext,
    TransformContext,
)
from clark_agent.plugins.channel_steering import ChannelSteering
from clark_agent.plugins.compaction import Compaction
from clark_agent.plugins.graceful_turn_limit import GracefulTurnLimit
from clark_agent.plugins.large_results import LargeResults
from clark_agent.plugins.loop_detector import LoopDetector
from clark_agent.plugins.opening_gate import OpeningGate
from clark_agent.plugins.token_budget import TokenBudget
from clark_agent.plugins.tool_result_budget import ToolResultBudget
from clark_agent.plugins.unique_tool_call_ids import UniqueToolCallIds

__all__ = [
    "AfterToolCall",
    "AfterToolCallContext",
    "AfterToolDecision",
    "Answer",
    "BeforeRequest",
    "BeforeRequestContext",
    "BeforeToolCall",
    "BeforeToolCallContext",
    "BeforeToolDecision",
    "Block",
    "ChannelSteering",
    "Compaction",
    "ContextTransform",
    "EventObserver",
    "FollowUpSource",
    "FunctionPlugin",
    "GracefulTurnLimit",
    "LargeResults",
    "LoopDetector",
    "OpeningGate",
    "Plugin",
    "RestoreContext",
    "Rewrite",
    "SteeringSource",
    "TokenBudget",
    "ToolGate",
    "ToolGateClass",
    "ToolGateContext",
    "ToolResultBudget",
    "TransformContext",
    "UniqueToolCallIds",
]
