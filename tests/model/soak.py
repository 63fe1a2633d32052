"""Lives without end: ``python -m tests.model.soak --lives 1000000 --seconds 3600``.

Every life has a seed. One that breaks a promise is told with its seed, and
``--seed N --lives 1`` lives it again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from typing import Any

from tests.model.scenarios import HOOKS
from tests.model.world import FAULTS, HOOK_TEMPERS, TEMPERS, Cancel, Scenario, live


def scenario(rng: random.Random) -> Scenario:
    settings: dict[str, Any] = {}
    choices: dict[str, list[Any]] = {
        "max_iterations": [1, 2, 3, 5],
        "grace_iterations": [0, 1, 3],
        "max_tool_calls_per_turn": [1, 2, 3],
        "empty_outcome_retry_budget": [0, 1, 2],
        "tool_timeout": [0.004],
        "hook_timeout": [0.002],
        "default_execution_mode": ["sequential"],
    }
    for name, values in choices.items():
        if rng.random() < 0.25:
            settings[name] = rng.choice(values)
    return Scenario(
        script=tuple(step(rng) for _ in range(rng.randint(0, 5))),
        hooks={hook: rng.choice(HOOK_TEMPERS) for hook in HOOKS if rng.random() < 0.25},
        settings=settings,
        steering=tuple(n for n in range(1, 6) if rng.random() < 0.2),
        aborting_siblings=rng.random() < 0.3,
        exclusive=rng.random() < 0.2,
        repeated_ids=rng.random() < 0.2,
    )


def step(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.6:
        return tuple(rng.choice(TEMPERS) for _ in range(rng.randint(1, 5)))
    return rng.choice(FAULTS) if kind < 0.85 else "so it is"


def cancel(rng: random.Random) -> Cancel | None:
    if rng.random() < 0.2:
        return None
    at, passes = rng.randint(1, 80), rng.choice((0, 0, 1, 2, 3, 5, 8))
    by = rng.choice((Cancel(at, "token"), Cancel(at, "task"), Cancel(at, "thread"))).by
    return Cancel(at, by, passes)


def one(seed: int) -> None:
    rng = random.Random(seed)
    asyncio.run(live(scenario(rng), cancel(rng)))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lives", type=int, default=1_000_000)
    options.add_argument("--seconds", type=float, default=3600.0)
    options.add_argument("--seed", type=int, default=0, help="of the first life")
    asked = options.parse_args()
    logging.disable(logging.CRITICAL)
    started = told = time.monotonic()
    done = 0
    for seed in range(asked.seed, asked.seed + asked.lives):
        if time.monotonic() - started > asked.seconds:
            break
        try:
            one(seed)
        except BaseException:
            print(f"\nthe life of seed {seed} broke a promise", file=sys.stderr)
            raise
        done += 1
        if time.monotonic() - told > 1:
            told = time.monotonic()
            print(f"\r{done:,} of {asked.lives:,} lives", end="", flush=True)
    seconds = time.monotonic() - started
    print(f"\r{done:,} of {asked.lives:,} lives in {seconds:,.0f} s, every promise held")


if __name__ == "__main__":
    main()
