"""What `import clark_agent` gives, and what it costs."""

import inspect
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import clark_agent
from clark_agent import run_log, waiting
from clark_agent.durable import dbos

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

RUN_LOG_NAMES = [
    "Allow",
    "AlreadyDecided",
    "DecisionNotApplicable",
    "Deny",
    "Difference",
    "Durability",
    "FoldedRun",
    "FollowedEvent",
    "GiveArguments",
    "GiveResult",
    "JsonlStore",
    "LoadedRun",
    "LogDamaged",
    "LogProblem",
    "LogReader",
    "LoggedSpan",
    "Mail",
    "MemoryStore",
    "OnFailure",
    "PrefixChanged",
    "PrefixReport",
    "RequestExpired",
    "RequestNotFound",
    "RunAppender",
    "RunBusy",
    "RunExists",
    "RunLetGo",
    "RunLog",
    "RunLogError",
    "RunNotFound",
    "RunStore",
    "RunStoreError",
    "RunSummary",
    "RunTail",
    "RunTakenOver",
    "RunUsage",
    "SqliteStore",
    "WaitingRequest",
    "advance",
    "cancel",
    "check_prefix",
    "decide",
    "deliver",
    "diff",
    "fold",
    "follow",
    "follow_up",
    "fork",
    "kept_result",
    "ready_runs",
    "recorded_end",
    "resume",
    "span_tree",
    "sse",
    "steer",
    "tree_lines",
    "usage_tree",
    "waiting_for",
]

WAITING_NAMES = [
    "Allow",
    "AnyDecision",
    "Decision",
    "Delivered",
    "Deny",
    "Elapsed",
    "Expired",
    "GiveArguments",
    "GiveResult",
    "Suspend",
    "Verdict",
    "WaitingRequest",
    "request_id_of",
    "run_of_request",
]

DBOS_NAMES = [
    "QueuedRun",
    "RunQueue",
    "Worker",
    "attach",
    "connect",
    "dbos_config",
    "install",
]

TEMPORAL_NAMES = [
    "ClarkPlugin",
    "ClarkRun",
    "RemoteAgentTool",
    "RunHandle",
    "handle",
    "remote_agent_tool",
    "start",
]

PINNED = [
    (clark_agent, PUBLIC_NAMES),
    (run_log, RUN_LOG_NAMES),
    (waiting, WAITING_NAMES),
    (dbos, DBOS_NAMES),
    # Its classes are those of the package, which the tests of the core alone do not have.
    *(
        [(import_module("clark_agent.durable.temporal"), TEMPORAL_NAMES)]
        if find_spec("temporalio")
        else []
    ),
]


@pytest.mark.parametrize(
    ("module", "names"), PINNED, ids=lambda value: getattr(value, "__name__", "")
)
def test_all_is_pinned(module: ModuleType, names: list[str]) -> None:
    assert sorted(module.__all__) == names


@pytest.mark.parametrize(
    "module", [module for module, _ in PINNED], ids=lambda module: module.__name__
)
def test_all_has_no_duplicates(module: ModuleType) -> None:
    assert len(module.__all__) == len(set(module.__all__))


@pytest.mark.parametrize(
    ("module", "names"), PINNED, ids=lambda value: getattr(value, "__name__", "")
)
def test_public_names_exist_and_are_documented(module: ModuleType, names: list[str]) -> None:
    missing = [name for name in names if not hasattr(module, name)]
    # Not inspect.getdoc: an inherited docstring describes something else.
    undocumented = [
        name
        for name in names
        if inspect.isclass(value := getattr(module, name, None)) or inspect.isfunction(value)
        if not value.__doc__
    ]
    assert (missing, undocumented) == ([], [])


def test_what_the_run_log_offers_is_in_the_reference() -> None:
    """Every name of the package is a member of a module that has its place on a page."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    shown = {name for page in pages for name in re.findall(r"::: ([\w.]+)", page.read_text())}
    missing = [
        name
        for name in RUN_LOG_NAMES
        if getattr(getattr(run_log, name), "__module__", None) not in shown
    ]
    assert missing == []


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


@pytest.mark.slow
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
