"""What `import clark_agent` gives, and what it costs."""

import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import clark_agent

ROOT = Path(__file__).resolve().parent.parent

# Adding a name here is a promise to users; removing one breaks them.
PUBLIC_NAMES = [
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
    "BeforeToolCallContext",
    "Block",
    "Budget",
    "CancellationToken",
    "ChannelSink",
    "ChannelSteering",
    "ClarkAgentError",
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


def test_all_is_pinned() -> None:
    assert sorted(clark_agent.__all__) == PUBLIC_NAMES


def test_all_has_no_duplicates() -> None:
    assert len(clark_agent.__all__) == len(set(clark_agent.__all__))


@pytest.mark.parametrize("name", clark_agent.__all__)
def test_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(clark_agent, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        # Not inspect.getdoc: an inherited docstring describes something else.
        assert value.__doc__, f"{name} has no docstring"


def test_every_module_is_in_the_reference() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    shown = {
        name for page in pages for name in re.findall(r"::: clark_agent\.(\w+)", page.read_text())
    }
    modules = {module.name for module in pkgutil.iter_modules(clark_agent.__path__)}
    assert shown == {name for name in modules if not name.startswith("_")}


IMPORT_PROBE = """
import sys
import msgspec  # first: what it finds useful to load is its own affair

before = set(sys.modules)
import clark_agent

loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
foreign = sorted(loaded - sys.stdlib_module_names - {"clark_agent", "msgspec"})
sys.exit(f"import clark_agent also loads {foreign}" if foreign else 0)
"""


def test_import_is_light_and_silent() -> None:
    # A fresh interpreter: this one has loaded half the world. -I keeps the environment and
    # the current directory out of it.
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", IMPORT_PROBE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
