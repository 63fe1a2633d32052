"""The built-in plugins, one per file. They do not depend on any product's tools."""

from clark_agent.plugins.channel_steering import ChannelSteering
from clark_agent.plugins.graceful_turn_limit import GracefulTurnLimit
from clark_agent.plugins.loop_detector import LoopDetector
from clark_agent.plugins.opening_gate import OpeningGate
from clark_agent.plugins.token_budget import TokenBudget
from clark_agent.plugins.tool_result_budget import ToolResultBudget
from clark_agent.plugins.unique_tool_call_ids import UniqueToolCallIds

__all__ = [
    "ChannelSteering",
    "GracefulTurnLimit",
    "LoopDetector",
    "OpeningGate",
    "TokenBudget",
    "ToolResultBudget",
    "UniqueToolCallIds",
]
