"""The run log: records everything that enters a run from outside, as it happens.

`RunLog` is the setting, with a store: `JsonlStore`, `SqliteStore` or `MemoryStore`. `resume`
continues a run, `fork` starts another from its middle, `diff` compares two, `usage_tree` adds up
their cost, `check_prefix` shows what a provider could cache, and `fold` returns the state that the
records describe. `follow` and `sse` return the events of a run in any process, from any position;
`steer`, `follow_up`, `cancel` and `deliver` send it messages. `clark_agent.replay` runs it again.
"""

from clark_agent.errors import (
    AlreadyDecided,
    DecisionNotApplicable,
    LogDamaged,
    RequestExpired,
    RequestNotFound,
    RunBusy,
    RunExists,
    RunLetGo,
    RunLogError,
    RunNotFound,
    RunStoreError,
    RunTakenOver,
)
from clark_agent.run_log.advance import advance
from clark_agent.run_log.diff import Difference, diff
from clark_agent.run_log.fold import FoldedRun, fold
from clark_agent.run_log.follow import FollowedEvent, follow, sse
from clark_agent.run_log.fork import RunUsage, fork, usage_tree
from clark_agent.run_log.jsonl import JsonlStore
from clark_agent.run_log.kept import kept_result
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.mailbox import cancel, deliver, follow_up, steer
from clark_agent.run_log.memory import MemoryStore
from clark_agent.run_log.prefix import PrefixChanged, PrefixReport, check_prefix
from clark_agent.run_log.reader import LogReader
from clark_agent.run_log.recorded import recorded_end
from clark_agent.run_log.requests import decide, ready_runs, waiting_for
from clark_agent.run_log.resume import resume
from clark_agent.run_log.span_tree import LoggedSpan, span_tree, tree_lines
from clark_agent.run_log.sqlite import SqliteStore
from clark_agent.run_log.store import (
    LoadedRun,
    LogProblem,
    RunAppender,
    RunStore,
    RunSummary,
    RunTail,
)
from clark_agent.run_log.writer import Durability, OnFailure, RunLog
from clark_agent.waiting import Allow, Deny, GiveArguments, GiveResult, WaitingRequest

__all__ = [
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
