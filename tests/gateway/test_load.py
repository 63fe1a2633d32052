"""Many streams at once through a gateway in another process; some of their clients vanish."""

from __future__ import annotations

import pytest

from benchmarks.gateway import VANISHES, Outcome, one_round, raise_file_limit, server, settled
from tests.sizes import GATEWAY_DELTAS, GATEWAY_ROUNDS, GATEWAY_STREAMS

pytestmark = [pytest.mark.slow, pytest.mark.soak]

STREAMS, DELTAS = GATEWAY_STREAMS, GATEWAY_DELTAS
GONE = STREAMS // VANISHES
MOST_GROWTH = 20.0  # MB, from after the first round to after the last


async def test_many_streams_at_once() -> None:
    """No delta goes astray, no call is left running, and no memory stays taken.

    That each delta is its own client's next one is checked by the client, which raises.
    """
    raise_file_limit(2 * STREAMS + 100)
    with server() as gate:
        sizes: list[float] = []
        for _ in range(GATEWAY_ROUNDS):
            outcomes = await one_round(gate.url, streams=STREAMS, deltas=DELTAS)
            assert outcomes.count(Outcome(DELTAS, vanished=False)) == STREAMS - GONE
            assert outcomes.count(Outcome(DELTAS // 2, vanished=True)) == GONE
            assert await settled(gate) == {
                "running": 0,
                "answered": STREAMS - GONE,
                "broken_off": GONE,
            }
            sizes.append(gate.megabytes())
    assert sizes[-1] - sizes[0] < MOST_GROWTH, sizes
