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
    "AccessRefused",
    "AfterToolCall",
    "AfterToolCallContext",
    "AfterToolDecision",
    "AgentBuilder",
    "AgentContext",
    "AgentEvent",
    "AgentMessage",
    "AgentTool",
    "Annotation",
    "Answer",
    "AssistantBlock",
    "AssistantMessage",
    "BeforeToolCall",
    "BeforeToolCallContext",
    "BeforeToolDecision",
    "Block",
    "Budget",
    "BudgetLimit",
    "CancellationToken",
    "ChannelSink",
    "ChannelSteering",
    "ClarkAgentError",
    "Clock",
    "ConfigError",
    "ContextOverflowError",
    "ContextOverflowRecovery",
    "ContextTransform",
    "Conversation",
    "CustomMessage",
    "DecodeError",
    "Double",
    "EmptyOutcomeError",
    "EventChecker",
    "EventObserver",
    "EventOrderError",
    "EventSink",
    "ExecutionMode",
    "FanOutSink",
    "FileContent",
    "FinishTool",
    "Fixed",
    "FollowUpSource",
    "FunctionPlugin",
    "FunctionTool",
    "GracefulTurnLimit",
    "HiddenToolContext",
    "HiddenToolError",
    "HistoryChange",
    "HistoryChangeKind",
    "HookError",
    "ImageContent",
    "InvalidArgumentsError",
    "InvalidContinuationError",
    "JsonSizeEstimator",
    "Linear",
    "LogDamaged",
    "LoopConfig",
    "LoopDetector",
    "LoopError",
    "LoopOutcome",
    "MalformedRow",
    "MaxTokensRecovery",
    "MessageAssembler",
    "MessageLog",
    "MessageView",
    "MissingFieldError",
    "NEVER_CLIP",
    "OpenRouterReasoningCodec",
    "OpeningGate",
    "PlainTextRecoveryContext",
    "Plugin",
    "Price",
    "ProtocolPolicy",
    "ProviderContent",
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
    "ReplayRefused",
    "ReplayViolation",
    "RestoreContext",
    "Rewrite",
    "RunAborted",
    "RunBusy",
    "RunExists",
    "RunIdentity",
    "RunLogError",
    "RunNotFound",
    "RunResult",
    "RunStoreError",
    "RunStream",
    "SchemaProblem",
    "SchemaRules",
    "Spent",
    "SteerWhen",
    "SteeringHandle",
    "SteeringReceipt",
    "SteeringSource",
    "SteeringStatus",
    "StopReason",
    "StreamChunk",
    "StreamError",
    "StreamErrorKind",
    "StreamEvent",
    "StreamFn",
    "StreamRequest",
    "StreamTimeout",
    "Subscription",
    "SystemClock",
    "SystemMessage",
    "TextContent",
    "ThinkingContent",
    "ThinkingTagStreamFilter",
    "TokenBudget",
    "TokenEstimator",
    "TokenScaling",
    "ToolAborted",
    "ToolCall",
    "ToolContext",
    "ToolContractError",
    "ToolDefinitionError",
    "ToolError",
    "ToolExecutionError",
    "ToolFatal",
    "ToolFatalError",
    "ToolGate",
    "ToolGateClass",
    "ToolGateContext",
    "ToolHistoryPolicy",
    "ToolIdentityPolicy",
    "ToolLike",
    "ToolRegistry",
    "ToolResult",
    "ToolResultBlock",
    "ToolResultBudget",
    "ToolResultMessage",
    "ToolSchema",
    "ToolValidationError",
    "Transcript",
    "TransformContext",
    "TransportError",
    "TypedTool",
    "UniqueToolCallIds",
    "Usage",
    "UserBlock",
    "UserMessage",
    "__version__",
    "agent_tool",
    "arg_parse_error",
    "audit_replay",
    "check_events",
    "check_schema",
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
    "finish_tool",
    "fold_events",
    "load_transcript",
    "parse_arguments",
    "portable_schema",
    "public_event",
    "public_events",
    "repair_arguments",
    "repair_history",
    "run",
    "run_child",
    "run_continue",
    "run_sync",
    "stream",
    "stream_run",
    "strict_schema",
    "strip_thinking_tags",
    "tool",
    "unique_tool_call_ids",
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
