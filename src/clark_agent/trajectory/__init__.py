"""What is kept of a run, and what can be done with it.

- the run log: `RunLog` and its stores, and with them `resume`, `replay`, `fork`, `diff`,
  `usage_tree`
- exports: `to_openai_messages`, `to_anthropic_messages`, `to_markdown`
- trajectory records, the vocabulary that other implementations share: `TrajectoryRecorder`,
  `to_trajectory`, `from_trajectory`
"""

from clark_agent.errors import (
    LogDamaged,
    RunBusy,
    RunExists,
    RunLogError,
    RunNotFound,
    RunStoreError,
)
from clark_agent.run_log.jsonl import JsonlStore
from clark_agent.run_log.kit import check_run_store
from clark_agent.run_log.log import Durability, OnFailure, RunLog
from clark_agent.run_log.memory import MemoryStore
from clark_agent.run_log.reading import LogReader
from clark_agent.run_log.sqlite import SqliteStore
from clark_agent.run_log.store import (
    LoadedRun,
    LogProblem,
    RunAppender,
    RunStore,
    RunSummary,
)
from clark_agent.trajectory.converting import from_trajectory, to_trajectory
from clark_agent.trajectory.differing import Difference, diff
from clark_agent.trajectory.exporting import (
    to_anthropic_messages,
    to_markdown,
    to_openai_messages,
)
from clark_agent.trajectory.fold import FoldedRun, fold
from clark_agent.trajectory.forking import RunUsage, fork, usage_tree
from clark_agent.trajectory.recorder import (
    InMemoryTrajectorySink,
    TrajectoryRecorder,
    TrajectorySink,
)
from clark_agent.trajectory.records import (
    TRAJECTORY_SCHEMA_VERSION,
    TrajectoryPayload,
    TrajectoryRecord,
    decode_record,
    encode_record,
)
from clark_agent.trajectory.replaying import ReplayReport, assert_replays, replay
from clark_agent.trajectory.resuming import resume

__all__ = [
    "TRAJECTORY_SCHEMA_VERSION",
    "Difference",
    "Durability",
    "FoldedRun",
    "InMemoryTrajectorySink",
    "JsonlStore",
    "LoadedRun",
    "LogDamaged",
    "LogProblem",
    "LogReader",
    "MemoryStore",
    "OnFailure",
    "ReplayReport",
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
    "TrajectoryPayload",
    "TrajectoryRecord",
    "TrajectoryRecorder",
    "TrajectorySink",
    "assert_replays",
    "check_run_store",
    "decode_record",
    "diff",
    "encode_record",
    "fold",
    "fork",
    "from_trajectory",
    "replay",
    "resume",
    "to_anthropic_messages",
    "to_markdown",
    "to_openai_messages",
    "to_trajectory",
    "usage_tree",
]
