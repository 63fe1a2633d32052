"""Tools to test an agent, and to check your own transport or store.

`ScriptedStream`, `RecordingSink` and `FakeClock` replace a model, a listener and time.
`clark_agent.testing.grammar` checks the order of events, `transport_kit` and `misbehaviours` check
a transport, and `store_kit` checks a store of runs.
"""

from clark_agent.testing.grammar import (
    EventChecker,
    check_events,
    fold_events,
)
from clark_agent.testing.script import FakeClock, RecordingSink, ScriptedStream, Step, call, say

__all__ = [
    "EventChecker",
    "FakeClock",
    "RecordingSink",
    "ScriptedStream",
    "Step",
    "call",
    "check_events",
    "fold_events",
    "say",
]
