"""Tools: what the model may call.

`tool` makes one of a function; `TypedTool` and `AgentTool` are classes to derive from.
`ToolRegistry` has the tools of a run by name. A running tool gets a `ToolContext` and returns a
`ToolResult`.
"""

from clark_agent.errors import ToolDefinitionError
from clark_agent.tools.base import (
    NEVER_CLIP,
    AgentTool,
    Emit,
    ToolContext,
    ToolHistoryPolicy,
    ToolResult,
)
from clark_agent.tools.function import (
    FunctionTool,
    ToolLike,
    ToolRegistry,
    TypedTool,
    tool,
    tool_result,
)

__all__ = [
    "NEVER_CLIP",
    "AgentTool",
    "Emit",
    "FunctionTool",
    "ToolContext",
    "ToolDefinitionError",
    "ToolHistoryPolicy",
    "ToolLike",
    "ToolRegistry",
    "ToolResult",
    "TypedTool",
    "tool",
    "tool_result",
]
