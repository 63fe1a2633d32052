"""The durable record of a run, in the vocabulary that other implementations share."""

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
]
