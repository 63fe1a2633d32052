"""How much the random, exhaustive and heavy tests try.

Each number is a floor: `make test` never tries less. `make soak` sets ``CLARK_AGENT_SOAK`` to a
factor and runs the same families with so many times more.
"""

from __future__ import annotations

import os

__all__ = [
    "CONFUSING_BYTES",
    "DECIDED_RUNS",
    "DISK_STEPS",
    "DISTRIBUTED_RUNS",
    "EQUAL_RUNS",
    "EXAMPLES",
    "FACTOR",
    "FELLED_TREES",
    "FELLED_WAITS",
    "GATEWAY_DELTAS",
    "GATEWAY_ROUNDS",
    "GATEWAY_STREAMS",
    "INTERVENTIONS",
    "KILLS",
    "LIVES",
    "RACES_WON",
    "REQUESTS_MADE_UP",
    "RUNS_AT_ONCE",
    "RUNS_LISTED",
    "STEERED_LIVES",
    "TALKATIVE_RUNS",
    "VIEW_MEGABYTES",
]

FACTOR = float(os.environ.get("CLARK_AGENT_SOAK", "1"))


def _times(floor: int) -> int:
    return max(1, int(floor * FACTOR))


EXAMPLES = _times(50)
"""What hypothesis makes up for a test that does not say how much."""
LIVES = _times(600)
"""Random lives of an agent, each with a random end (tests/model/test_random.py)."""
STEERED_LIVES = _times(150)
"""Random lives that somebody steers (tests/model/test_steering.py)."""
FELLED_TREES = _times(100)
"""Random trees of runs that are cancelled somewhere (tests/test_sub_agents.py)."""
TALKATIVE_RUNS = _times(6)
"""Runs that many threads talk to at once, for each of four seeds."""
KILLS = _times(60)
"""Processes that are killed at random moments, for each store (tests/run_log/test_crash.py)."""
DECIDED_RUNS = _times(80)
"""Runs that six processes decide about and continue (tests/run_log/test_crash.py)."""
FELLED_WAITS = _times(40)
"""Trees of runs that wait and are killed until they have ended (tests/run_log/test_crash.py)."""
DISTRIBUTED_RUNS = _times(20)
"""Runs whose workers are killed, for each engine (tests/durable/test_kills.py)."""
DISK_STEPS = _times(9)
"""Sizes of a disk at which it is full, for each store."""
RUNS_AT_ONCE = _times(3_000)
"""Runs of one config in one event loop (tests/model/test_many.py)."""
EQUAL_RUNS = _times(300)
"""Runs at once that are compared with one alone (tests/engine/test_many_runs.py)."""
INTERVENTIONS = _times(150)
"""Runs in which somebody cancels or steers three times (tests/replay/test_interventions.py)."""
GATEWAY_STREAMS = _times(150)
GATEWAY_DELTAS = _times(60)
GATEWAY_ROUNDS = 3
"""Streams at once through a gateway, the deltas of each, and how often (test_gateway_load.py)."""
VIEW_MEGABYTES = _times(30)
"""The size of a log on the page of runs (tests/view/test_large.py)."""
RUNS_LISTED = _times(3_000)
"""Runs in the list of the page of runs (tests/view/test_large.py)."""
RACES_WON = _times(150)
"""Races with a process that swaps links, won by each side (tests/toolkit/test_escapes.py)."""
CONFUSING_BYTES = _times(250_000)
"""Bytes of one line of an event stream that come one by one (tests/transports/http/test_sse.py)."""
REQUESTS_MADE_UP = _times(10)
"""Requests of each kind that schemathesis makes up (tests/gateway/test_gateway.py)."""
