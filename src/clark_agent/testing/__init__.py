"""What to test an agent with, and what to try a transport or a store of your own with.

`ScriptedStream`, `RecordingSink` and `FakeClock` stand in for a model, a listener and time.
`clark_agent.testing.grammar` has the order of events as code, `transport_kit` and `misbehaviours`
try a transport, `store_kit` tries a store of runs.
"""

from clark_agent.testing.script import FakeClock, RecordingSink, ScriptedStream, Step, call, say

__all__ = ["FakeClock", "RecordingSink", "ScriptedStream", "Step", "call", "say"]
