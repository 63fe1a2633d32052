"""A token wakes everyone once: from any thread, from a signal handler, and in any race."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from clark_agent import CancellationToken
from clark_agent.cancellation import Subscription
from tests.races import race


def held(*tokens: CancellationToken) -> int:
    """How many subscriptions the tokens still hold."""
    return sum(len(token._subscriptions) for token in tokens)


def family() -> tuple[CancellationToken, CancellationToken, CancellationToken]:
    parent = CancellationToken()
    child = parent.child()
    return parent, child, child.child()


# --- the flag ---------------------------------------------------------------------------------


def test_cancel_is_told_downwards_only() -> None:
    parent, child, grandchild = family()
    sibling = parent.child()
    child.cancel("enough")
    assert [token.cancelled for token in (parent, child, grandchild, sibling)] == [
        False,
        True,
        True,
        False,
    ]
    assert [token.reason for token in (parent, child, grandchild, sibling)] == [
        None,
        "enough",
        "enough",
        None,
    ]
    assert child.child().cancelled


def test_the_first_reason_stays() -> None:
    token = CancellationToken()
    token.cancel("first")
    token.cancel("second")
    assert token.reason == "first"


def test_the_nearest_reason_counts() -> None:
    parent, child, grandchild = family()
    child.cancel()
    parent.cancel("all")
    assert (parent.reason, child.reason, grandchild.reason) == ("all", None, None)
    assert parent.child().reason == "all"


def test_repr() -> None:
    parent, child, _ = family()
    assert repr(child) == "<CancellationToken>"
    parent.cancel()
    assert repr(child) == "<CancellationToken cancelled>"
    child.cancel("timeout")
    assert repr(child) == "<CancellationToken cancelled: timeout>"


# --- callbacks --------------------------------------------------------------------------------


@pytest.mark.parametrize("cancelled", [0, 1, 2], ids=["parent", "child", "grandchild"])
def test_a_callback_runs_once_whoever_is_cancelled(cancelled: int) -> None:
    tokens = family()
    calls: list[str] = []
    tokens[2].subscribe(lambda: calls.append("called"))
    assert calls == []
    tokens[cancelled].cancel()
    assert calls == ["called"]
    for token in tokens:
        token.cancel()
    assert calls == ["called"]
    assert held(*tokens) == 0


def test_cancelling_a_child_leaves_the_callbacks_of_its_parent() -> None:
    parent, child, _ = family()
    calls: list[str] = []
    parent.subscribe(lambda: calls.append("parent"))
    child.subscribe(lambda: calls.append("child"))
    child.cancel()
    assert calls == ["child"]
    parent.cancel()
    assert calls == ["child", "parent"]


@pytest.mark.parametrize("cancelled", [0, 1, 2], ids=["parent", "child", "grandchild"])
def test_subscribing_after_cancel_calls_at_once(cancelled: int) -> None:
    tokens = family()
    tokens[cancelled].cancel()
    calls: list[str] = []
    subscription = tokens[2].subscribe(lambda: calls.append("called"))
    assert calls == ["called"]
    assert held(*tokens) == 0
    subscription.close()


def test_a_closed_subscription_is_not_called_and_leaves_nothing_behind() -> None:
    tokens = family()
    calls: list[str] = []
    subscriptions = [token.subscribe(lambda: calls.append("called")) for token in tokens]
    assert held(*tokens) == 1 + 2 + 3
    for subscription in subscriptions:
        subscription.close()
        subscription.close()
    assert held(*tokens) == 0
    tokens[0].cancel()
    assert calls == []


def test_a_subscription_closed_after_cancel_has_taken_it_out_is_not_called() -> None:
    token = CancellationToken()
    calls: list[str] = []
    token.subscribe(lambda: calls.append("called"))
    _, subscription = token._subscriptions.popitem()  # as cancel does on another thread
    subscription.close()
    subscription._fire()
    assert calls == []


def test_a_token_knows_whether_somebody_waits_for_it_or_below() -> None:
    parent, child, grandchild = family()
    assert not parent.has_subscribers
    subscription = child.subscribe(lambda: None)
    assert [token.has_subscribers for token in (parent, child, grandchild)] == [True, True, False]
    subscription.close()
    assert not parent.has_subscribers


async def test_a_token_remembers_whether_it_was_ever_watched_itself() -> None:
    parent, child, grandchild = family()
    child.subscribe(lambda: None).close()
    assert [token.is_watched for token in (parent, child, grandchild)] == [False, True, False]
    waiting = asyncio.create_task(grandchild.wait())
    await asyncio.sleep(0)
    assert [token.is_watched for token in (parent, child, grandchild)] == [False, True, True]
    parent.cancel()
    await waiting


def test_tokens_without_subscriptions_cost_their_parent_nothing() -> None:
    parent = CancellationToken()
    children = [parent.child() for _ in range(100)]
    assert held(parent, *children) == 0


def test_a_raising_callback_is_logged_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    token = CancellationToken()
    calls: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    token.subscribe(lambda: calls.append(1))
    token.subscribe(fail)
    token.subscribe(lambda: calls.append(2))
    token.cancel()
    assert sorted(calls) == [1, 2]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "no"
    assert held(token) == 0


def test_a_callback_may_cancel_subscribe_and_close() -> None:
    token = CancellationToken()
    calls: list[str] = []
    subscriptions: list[Subscription] = []

    def busy() -> None:
        calls.append("busy")
        for subscription in subscriptions:
            subscription.close()
        token.cancel("again")
        token.subscribe(lambda: calls.append("late"))

    subscriptions += [token.subscribe(busy), token.subscribe(busy)]
    token.cancel("first")
    assert calls == ["busy", "late"]
    assert (token.reason, held(token)) == ("first", 0)


# --- races ------------------------------------------------------------------------------------


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns as often as the interpreter lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Tally:
    """Counts the calls of one callback, from all threads."""

    def __init__(self) -> None:
        self._calls: list[None] = []

    def __call__(self) -> None:
        self._calls.append(None)

    @property
    def calls(self) -> int:
        return len(self._calls)


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("seed", range(10))
def test_in_a_race_every_live_subscription_is_called_exactly_once(seed: int) -> None:
    tokens = (*family(), *family())
    live: list[Tally] = []
    closed: list[Tally] = []
    failures: list[BaseException] = []

    def subscribe(shuffle: random.Random) -> None:
        for _ in range(200):
            tally = Tally()
            subscription = shuffle.choice(tokens).subscribe(tally)
            if shuffle.random() < 0.5:
                subscription.close()
                closed.append(tally)
            else:
                live.append(tally)

    def cancel(shuffle: random.Random) -> None:
        moments = sorted(shuffle.sample(range(900), len(tokens)))
        order = shuffle.sample(tokens, len(tokens))
        for moment, token in zip(moments, order, strict=True):
            while len(live) + len(closed) < moment and not failures:
                pass
            token.cancel()

    jobs: Sequence[Callable[[random.Random], None]] = [*[subscribe] * 5, *[cancel] * 3]
    race(
        *(partial(job, random.Random(f"{seed} {number}")) for number, job in enumerate(jobs)),
        failures=failures,
    )
    assert len(live) + len(closed) == 5 * 200
    assert {tally.calls for tally in live} == {1}
    assert {tally.calls for tally in closed} <= {0, 1}
    assert held(*tokens) == 0


@pytest.mark.usefixtures("eager_threads")
def test_many_threads_cancelling_call_back_once() -> None:
    for _ in range(50):
        parent, child, grandchild = family()
        tallies = [Tally() for _ in range(20)]
        for tally in tallies:
            grandchild.subscribe(tally)
        race(*(token.cancel for token in (parent, child, grandchild) * 2))
        assert [tally.calls for tally in tallies] == [1] * 20
        assert held(parent, child, grandchild) == 0


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX")
def test_a_signal_handler_may_cancel_in_the_middle_of_anything() -> None:
    token = CancellationToken()
    handled = depth = 0

    def handler(*_: object) -> None:
        nonlocal handled, depth
        depth += 1
        # A handler that hung in cancel would be interrupted by the next signal, and so on.
        assert depth < 50, "cancel hangs in a signal handler"
        token.cancel()
        depth -= 1
        handled += 1

    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        for _ in range(200_000):
            parent = CancellationToken()
            token = parent
            child = parent.child()
            kept, closed = Tally(), Tally()
            subscription = child.subscribe(closed)
            child.subscribe(kept)
            subscription.close()
            before = closed.calls
            parent.cancel()
            assert (kept.calls, closed.calls) == (1, before)
            assert held(parent, child) == 0
            if handled >= 300:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert handled >= 1


# --- waiting ----------------------------------------------------------------------------------


async def in_time(*waiting: asyncio.Task[None]) -> None:
    """For what would hang if it were broken."""
    async with asyncio.timeout(30):
        await asyncio.gather(*waiting)


async def test_cancel_from_another_thread_wakes_all_who_wait() -> None:
    parent, child, grandchild = family()
    tasks = [asyncio.create_task(token.wait()) for token in (parent, child, grandchild)]
    await asyncio.sleep(0)
    assert held(parent) == 3
    thread = threading.Thread(target=parent.cancel)
    thread.start()
    await in_time(*tasks)
    thread.join()
    assert held(parent, child, grandchild) == 0


async def test_wait_on_a_cancelled_token_returns_at_once() -> None:
    parent, child, _ = family()
    parent.cancel()
    waiting = child.wait()
    with pytest.raises(StopIteration):
        waiting.send(None)


@pytest.mark.usefixtures("eager_threads")
async def test_wait_never_misses_a_cancel() -> None:
    for _ in range(200):
        token = CancellationToken()
        thread = threading.Thread(target=token.cancel)
        thread.start()
        await in_time(asyncio.create_task(token.child().wait()))
        thread.join()
        assert held(token) == 0


async def test_a_wait_that_is_cancelled_leaves_nothing_behind() -> None:
    tokens = family()
    task = asyncio.create_task(tokens[2].wait())
    await asyncio.sleep(0)
    assert held(*tokens) == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held(*tokens) == 0


async def test_a_task_cancelled_together_with_the_token_is_no_trouble(
    caplog: pytest.LogCaptureFixture,
) -> None:
    token = CancellationToken()
    task = asyncio.create_task(token.wait())
    await asyncio.sleep(0)
    task.cancel()
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert held(token) == 0
    assert caplog.records == [], "the event loop has nothing to complain about"


def test_cancel_after_the_waiting_loop_has_closed_is_no_trouble() -> None:
    token = CancellationToken()
    waiting = token.wait()

    async def begin() -> None:
        waiting.send(None)

    asyncio.run(begin())
    assert held(token) == 1
    token.cancel()
    assert token.cancelled
    waiting.close()
    assert held(token) == 0
