"""Steered at every suspension point, in every way and from anywhere, every promise holds.

What must hold of any life is in `tests.model.world`; of a steered one also that every message is in
the transcript once, where its receipt says, or was handed back, and that nothing in flight was
disturbed more than the sender asked for.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import clark_agent as ca
from tests.model import test_random as unsteered
from tests.model.scenarios import SCENARIOS
from tests.model.world import WHEN, Cancel, Life, Scenario, Steer, When, live
from tests.sizes import STEERED_LIVES, TALKATIVE_RUNS

pytestmark = [pytest.mark.slow, pytest.mark.soak]

MODES = WHEN[:3]
# Those in which there is most to disturb; the others are sampled.
IN_FULL = (
    "one fast tool",
    "two tools at once",
    "one by one",
    "a tool that hangs",
    "one that hangs beside one that works",
    "a failure that skips the rest",
    "a tool that cleans up",
    "a vote to end",
    "steering at every poll",
    "a stream that is empty",
    "a stream that is hangs",
    "a stream that is cleans_up_late",
    "a stream that is reports_cancel",
    "a hook before that waits",
    "a hook after that waits",
    "a hook transform that waits",
    "a hook observer that waits",
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Failing hooks are logged, as they should be, hundreds of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_mode_is_swept() -> None:
    assert set(MODES) == set(ca.SteerWhen)
    assert set(IN_FULL) <= set(SCENARIOS)


def steered(scenario: Scenario, *steers: Steer) -> Scenario:
    """The scenario with somebody who intervenes; tools that do not stop are soon left behind."""
    quick = {"cancel_grace": 0.001, **scenario.settings}
    return replace(scenario, settings=quick, steers=steers)


def told(life: Life) -> Counter[str]:
    """How many messages were delivered, and how many expired."""
    return Counter(str(r.status) for r in (*life.line.steering, *life.line.follow_ups))


# --- one message ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_message_at_every_suspension_point(name: str) -> None:
    scenario = SCENARIOS[name]
    points = (await live(scenario)).points
    places = list(product(range(1, points + 1), MODES, (0, 2)))
    if name not in IN_FULL:
        places = random.Random(name).sample(places, min(len(places), 16))
    fates: Counter[str] = Counter()
    for number, (at, when, passes) in enumerate(places):
        by: Any = "thread" if number % 4 == 3 else "loop"
        fates += told(await live(steered(scenario, Steer(at, when, passes, by))))
    assert fates.total() > 0, "nothing was ever sent"


@pytest.mark.parametrize("name", IN_FULL)
async def test_a_message_and_a_cancellation_after_it(name: str) -> None:
    scenario, rng = SCENARIOS[name], random.Random(name)
    points = (await live(scenario)).points
    cancelled = 0
    for at, when in product(range(1, points + 1), MODES):
        by: Any = rng.choice(("token", "task", "thread"))
        cancel = Cancel(at + rng.choice((0, 0, 1, 2, 5)), by, rng.choice((0, 1, 3)))
        life = await live(steered(scenario, Steer(at, when, rng.choice((0, 1, 2)))), cancel)
        cancelled += isinstance(life.outcome, (ca.RunAborted, asyncio.CancelledError))
    assert cancelled > 0, "no cancellation had any effect"


@pytest.mark.parametrize("when", MODES)
async def test_a_message_during_the_first_answer_is_delivered_and_the_run_goes_on(
    when: When,
) -> None:
    life = await live(steered(SCENARIOS["one fast tool"], Steer(2, when)), patience=5)
    assert isinstance(life.outcome, ca.RunResult)
    assert told(life) == {"delivered": 1}
    broken_off = [event.reason for event in life.sink.of(ca.events.MessageDiscarded)]
    assert broken_off == ["steered"] * (when == "now")


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("a tool that hangs", 3),
        ("a tool that swallows its cancellation", 3),
        ("one that hangs beside one that works", 3),
        ("a thread that looks at its signal", 3),
        ("a thread that does not", 3),
        ("a stream that is hangs", 2),
        ("a stream that is hangs_late", 2),
        ("a stream that is swallows_cancel", 2),
    ],
)
async def test_a_run_that_hangs_goes_on_when_it_is_steered_now(name: str, at: int) -> None:
    """The first wait is that of a source which is polled, the second that of the model."""
    scenario = replace(SCENARIOS[name], script=(SCENARIOS[name].script[0], "went on"))
    life = await live(steered(scenario, Steer(at, "now")), patience=5)
    assert isinstance(life.outcome, ca.RunResult)
    assert life.outcome.text == "went on"
    assert told(life) == {"delivered": 1}


# --- any number of them ---------------------------------------------------------------------------

steers = st.lists(
    st.builds(
        Steer,
        at=st.integers(1, 40),
        when=st.sampled_from((*WHEN, "now")),
        passes=st.integers(0, 5),
        by=st.sampled_from(("loop", "loop", "thread", "racing_thread")),
        messages=st.integers(1, 3),
    ),
    min_size=1,
    max_size=5,
)
cancels = st.one_of(st.none(), st.none(), unsteered.cancels)


@settings(max_examples=STEERED_LIVES, suppress_health_check=list(HealthCheck))
@given(unsteered.scenarios, steers, cancels)
def test_any_life(scenario: Scenario, sent: list[Steer], cancel: Cancel | None) -> None:
    asyncio.run(live(steered(scenario, *sent), cancel))


@pytest.mark.parametrize("seed", range(4))
async def test_many_threads_talk_to_the_run_at_once(seed: int) -> None:
    rng, fates = random.Random(seed), Counter[str]()
    names = [name for name in IN_FULL if "hang" not in name]
    for number in range(500):
        # Who wins a race is up to the machine, so that a few lives may all be over too soon.
        if number >= TALKATIVE_RUNS and fates["delivered"]:
            break
        scenario = SCENARIOS[rng.choice(names)]
        sent = [
            Steer(
                at=rng.randint(1, 12),
                when=rng.choice(WHEN),
                by="racing_thread",
                messages=rng.randint(1, 5),
            )
            for _ in range(rng.randint(2, 6))
        ]
        life = await live(steered(scenario, *sent))
        fates += Counter(str(receipt.status) for receipt, _ in life.line.racing)
    assert fates["delivered"] > 0
