"""Trajectory records: the persistent format that all implementations of clark-agent share.

`TrajectoryRecorder` writes them during a run; `to_trajectory` and `from_trajectory` convert a run
log. The format that this package itself records, resumes and replays is `clark_agent.run_log`.
"""

from clark_agent.trajectory.convert import from_trajectory, to_trajectory
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

__all__ = [
    "TRAJECTORY_SCHEMA_VERSION",
    "InMemoryTrajectorySink",
    "TrajectoryPayload",
    "TrajectoryRecord",
    "TrajectoryRecorder",
    "TrajectorySink",
    "decode_record",
    "encode_record",
    "from_trajectory",
    "to_trajectory",
]
