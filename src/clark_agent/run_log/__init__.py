"""The run log: records everything that enters a run from outside, as it happens.

`RunLog` is the setting, with a store: `JsonlStore`, `SqliteStore` or `MemoryStore`. `resume`
continues a run, `fork` starts another from its middle, `diff` compares two, `usage_tree` adds up
their cost, and `fold` returns the state that the records describe. `clark_agent.replay` runs a
logged run again.
"""

from clark_agent.errors import (
    LogDamaged,
    RunBusy,
    RunExists,
    RunLogError,
    RunNotFound,
    RunStoreError,
)
from clark_agent.run_log.diff import Difference, diff
from clark_agent.run_log.fold import FoldedRun, fold
from clark_agent.run_log.fork import RunUsage, fork, usage_tree
from clark_agent.run_log.jsonl import JsonlStore
from clark_agent.run_log.memory import MemoryStore
from clark_agent.run_log.reader import LogReader
from clark_agent.run_log.resume import resume
from clark_agent.run_log.sqlite import SqliteStore
from clark_agent.run_log.store import (
    LoadedRun,
    LogProblem,
    RunAppender,
    RunStore,
    RunSummary,
)
from clark_agent.run_log.writer import Durability, OnFailure, RunLog

__all__ = [
    "Difference",
    "Durability",
    "FoldedRun",
    "JsonlStore",
    "LoadedRun",
    "LogDamaged",
    "LogProblem",
    "LogReader",
    "MemoryStore",
    "OnFailure",
    "RunAppender",
    "RunBusy",
    "RunExists",
    "RunLog",
    "RunLogError",
    "RunNotFound",
    "RunStore",
    "RunStoreError",
    "RunSummary",
    "RunUsage",
    "SqliteStore",
    "diff",
    "fold",
    "fork",
    "resume",
    "usage_tree",
]
