"""`make bench-smoke`: the core benchmark runs, and no workload takes more than is pinned for it."""

from __future__ import annotations

import asyncio
import sys

from benchmarks import bare, clark, core, operations
from benchmarks.work import DELTA, SHORT_RUN, seen


async def check_work() -> None:
    """Both sides do what they are timed for."""
    for module in (bare, clark):
        seen.reset()
        assert await module.turns(10) == "done"
        assert await module.batch(20, nap=0) == "done"
        assert await module.short_run(0) == "done"
        assert await module.append(6, module.history(40)) == "done"
        assert seen.tools == 10 + 20 + SHORT_RUN + 6
        assert seen.since_second_turn
        for listeners in (0, 1):
            seen.reset()
            assert await module.stream(100, listeners) == DELTA * 100
            assert (seen.events > 100) is bool(listeners)


async def run_all() -> None:
    await core.w1(10, 5, 20, rounds=12)
    await core.w2(100, rounds=2)
    await core.w3(10, rounds=2)
    await core.w4(10, rounds=2)
    core.w5(rounds=2)
    await core.w6(100, 5, rounds=2)
    await core.w7(100, rounds=2)


if __name__ == "__main__":
    asyncio.run(check_work())
    print("sizes too small to mean anything:")
    asyncio.run(run_all())
    print()
    sys.exit(not operations.check())
