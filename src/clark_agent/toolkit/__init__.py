"""Tools that most agents need, good enough for products.

    workspace, gate = Workspace("project"), ApprovalGate(ask)
    tools = [*file_tools(workspace, ask=gate.ask), shell_tool(workspace), calculator]
    config = LoopConfig(stream=..., tools=tools, plugins=[gate])

A `Workspace` is a folder that its tools cannot leave. Factory functions make the tools that act on
something outside of the process, and their parameters say what the tool may do. `ApprovalGate` asks
a person before a tool that changes something runs.
"""

from clark_agent.toolkit.approval import Approval, ApprovalGate, ApprovalRequest, Denied
from clark_agent.toolkit.ask import SUSPEND, ask_user_tool
from clark_agent.toolkit.calculator import calculator
from clark_agent.toolkit.clock_tool import current_time_tool
from clark_agent.toolkit.files import file_tools
from clark_agent.toolkit.finish import finish
from clark_agent.toolkit.limits import CommandLimits
from clark_agent.toolkit.sandbox import SandboxStatus, sandbox_status
from clark_agent.toolkit.sensitive import SENSITIVE_PATHS, SensitivePath
from clark_agent.toolkit.shell import shell_tool
from clark_agent.toolkit.untrusted import UNTRUSTED_TEXT, mark_untrusted, without_marks
from clark_agent.toolkit.web import fetch_url_tool
from clark_agent.toolkit.workspace import Workspace, WorkspaceError

__all__ = [
    "SENSITIVE_PATHS",
    "SUSPEND",
    "UNTRUSTED_TEXT",
    "Approval",
    "ApprovalGate",
    "ApprovalRequest",
    "CommandLimits",
    "Denied",
    "SandboxStatus",
    "SensitivePath",
    "Workspace",
    "WorkspaceError",
    "ask_user_tool",
    "calculator",
    "current_time_tool",
    "fetch_url_tool",
    "file_tools",
    "finish",
    "mark_untrusted",
    "sandbox_status",
    "shell_tool",
    "without_marks",
]
