"""Tools: what the model may call.

`tool` makes one of a function; `TypedTool` and `AgentTool` are classes to derive from.
`ToolRegistry` has the tools of a run by name. A running tool gets a `ToolContext` and returns a
`ToolResult`.
"""

from clark_agent.errors import ToolDefinitionError
from clark_agent.tools.base import (
    NEVER_CLIP,
    AgentTool,
    Continued,
    Emit,
    ToolContext,
    ToolHistoryPolicy,
    ToolResult,
)
from clark_agent.tools.finish import (
    FinishTool,
    finish_tool,
)
from clark_agent.tools.function import (
    FunctionTool,
    ToolLike,
    ToolRegistry,
    TypedTool,
    tool,
    tool_result,
)
from clark_agent.tools.identity import (
    ToolIdentityPolicy,
    extract_args_key,
    extract_operation_key,
    extract_target,
)
from clark_agent.tools.repair import (
    repair_arguments,
)
from clark_agent.tools.schema import (
    portable_schema,
    strict_schema,
)
from clark_agent.tools.schema_rules import (
    SchemaProblem,
    SchemaRules,
    check_schema,
)

__all__ = [
    "NEVER_CLIP",
    "AgentTool",
    "Continued",
    "Emit",
    "FinishTool",
    "FunctionTool",
    "SchemaProblem",
    "SchemaRules",
    "ToolContext",
    "ToolDefinitionError",
    "ToolHistoryPolicy",
    "ToolIdentityPolicy",
    "ToolLike",
    "ToolRegistry",
    "ToolResult",
    "TypedTool",
    "check_schema",
    "extract_args_key",
    "extract_operation_key",
    "extract_target",
    "finish_tool",
    "portable_schema",
    "repair_arguments",
    "strict_schema",
    "tool",
    "tool_result",
]
