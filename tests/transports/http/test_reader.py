"""The pieces of a response: read by a task of its own, and stopped at any point."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from clark_agent import CancellationToken
from clark_agent.errors import StreamTimeout
from clark_agent.transports.http.reader import Cancelled, Feed


class Source:
    """A response whose pieces a generator makes, which knows what became of it."""

    def __init__(self, pieces: Callable[[], AsyncIterator[int]]) -> None:
        self._pieces = pieces
        self.opened = 0
        self.closed = 0
        self.was_cancelled = False
        self.taken = 0

    def __call__(self) -> AbstractAsyncContextManager[AsyncIterator[int]]:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[AsyncIterator[int], None]:
        self.opened += 1
        try:
            yield self._counted()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            self.closed += 1

    async def _counted(self) -> AsyncIterator[int]:
        async for piece in self._pieces():
            self.taken += 1
            yield piece


async def three() -> AsyncIterator[int]:
    for piece in range(3):
        yield piece
        await asyncio.sleep(0)


async def endless() -> AsyncIterator[int]:
    number = 0
    while True:
        yield number
        number += 1
        await asyncio.sleep(0)


async def silent() -> AsyncIterator[int]:
    await asyncio.Event().wait()
    yield 0


async def broken() -> AsyncIterator[int]:
    yield 0
    yield 1
    raise OSError("the wire was cut")


def feed(source: Source, signal: CancellationToken | None = None, **limits: Any) -> Feed[int]:
    return Feed(source, signal or CancellationToken(), **{"idle": None, "total": None, **limits})


async def all_of(feed: Feed[int]) -> list[int]:
    pieces: list[int] = []
    while (some := await feed.read()) is not None:
        assert some, "at least one piece, or the end"
        pieces += some
    return pieces


async def failure_of(feed: Feed[int]) -> tuple[list[int], Exception]:
    """What came before it failed, and how."""
    pieces: list[int] = []
    try:
        while (some := await feed.read()) is not None:
            pieces += some
    except Exception as error:
        return pieces, error
    raise AssertionError("it did not fail")


async def test_everything_comes_in_order_and_ends() -> None:
    source = Source(three)
    async with feed(source) as pieces:
        assert await all_of(pieces) == [0, 1, 2]
        assert await pieces.read() is None
    assert (source.opened, source.closed, source.was_cancelled) == (1, 1, False)


async def test_a_failure_comes_behind_what_came_before_it() -> None:
    async with feed(Source(broken)) as pieces:
        got, error = await failure_of(pieces)
        assert got == [0, 1]
        assert isinstance(error, OSError)
        with pytest.raises(OSError, match="the wire was cut"):
            await pieces.read()


async def test_a_failure_to_open() -> None:
    def nobody() -> AsyncIterator[int]:
        raise OSError("nobody there")

    @asynccontextmanager
    async def refusing() -> AsyncGenerator[AsyncIterator[int], None]:
        yield nobody()

    async with Feed(refusing, CancellationToken(), idle=None, total=None) as pieces:
        with pytest.raises(OSError, match="nobody there"):
            await pieces.read()


async def test_a_slow_reader_holds_the_source_up_and_loses_nothing() -> None:
    async def many() -> AsyncIterator[int]:
        for piece in range(2000):
            yield piece

    source = Source(many)
    async with feed(source) as pieces:
        for _ in range(10):
            await asyncio.sleep(0)
        assert source.taken < 300, "it does not read ahead without end"
        assert await all_of(pieces) == list(range(2000))


async def test_a_slow_reader_is_not_taken_for_a_silent_server() -> None:
    async def many() -> AsyncIterator[int]:
        for piece in range(600):
            yield piece

    async with feed(Source(many), idle=0.2) as pieces:
        await asyncio.sleep(0.5)
        assert await all_of(pieces) == list(range(600))


async def test_silence() -> None:
    source = Source(silent)
    async with feed(source, idle=0.02) as pieces:
        got, error = await failure_of(pieces)
    assert got == []
    assert isinstance(error, StreamTimeout)
    assert (error.phase, error.seconds) == ("idle", 0.02)
    assert source.was_cancelled
    assert source.closed == 1


async def test_a_piece_now_and_then_is_no_silence() -> None:
    async def ticking() -> AsyncIterator[int]:
        for piece in range(8):
            await asyncio.sleep(0.1)
            yield piece

    async with feed(Source(ticking), idle=0.5) as pieces:
        assert await all_of(pieces) == list(range(8))


async def test_the_whole_takes_too_long() -> None:
    source = Source(endless)
    async with feed(source, idle=0.05, total=0.1) as pieces:
        got, error = await failure_of(pieces)
    assert got[:3] == [0, 1, 2]
    assert isinstance(error, StreamTimeout)
    assert (error.phase, error.seconds) == ("total", 0.1)
    assert source.was_cancelled


@pytest.mark.parametrize("spent", [5.0, 7.0])
async def test_what_was_spent_before_counts(spent: float) -> None:
    async with feed(Source(silent), total=5.0, spent=spent) as pieces:
        _, error = await failure_of(pieces)
    assert isinstance(error, StreamTimeout)


@pytest.mark.parametrize("from_thread", [False, True])
async def test_cancelled_while_somebody_waits(from_thread: bool) -> None:
    asyncio.get_running_loop().set_debug(True)  # it minds what threads do to it
    signal, source = CancellationToken(), Source(silent)
    async with asyncio.timeout(5), feed(source, signal) as pieces:
        waiting = asyncio.create_task(failure_of(pieces))
        await asyncio.sleep(0)
        if from_thread:
            await asyncio.to_thread(signal.cancel, "enough")
        else:
            signal.cancel("enough")
        _, error = await waiting
    assert isinstance(error, Cancelled)
    assert str(error) == "enough"
    assert source.closed == source.opened == 1
    assert not signal.has_subscribers


async def test_cancelled_while_nobody_reads() -> None:
    signal, source = CancellationToken(), Source(three)
    async with feed(source, signal) as pieces:
        assert await pieces.read() == [0]
        signal.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert source.closed == 1, "the connection goes at once"
        _, error = await failure_of(pieces)
    assert isinstance(error, Cancelled)
    assert str(error) == "the call was cancelled"


async def test_cancelled_before_nothing_is_opened() -> None:
    signal, source = CancellationToken(), Source(three)
    signal.cancel("too late")
    async with feed(source, signal) as pieces:
        got, error = await failure_of(pieces)
    assert got == []
    assert isinstance(error, Cancelled)
    assert source.opened == 0


async def test_cancelled_after_the_end_does_nothing() -> None:
    signal = CancellationToken()
    async with feed(Source(three), signal) as pieces:
        assert await all_of(pieces) == [0, 1, 2]
        signal.cancel()
        await asyncio.sleep(0)
        assert await pieces.read() is None


async def test_the_first_reason_stays() -> None:
    signal = CancellationToken()
    async with feed(Source(silent), signal, total=0.01) as pieces:
        _, error = await failure_of(pieces)
        signal.cancel()
        await asyncio.sleep(0)
        assert (await failure_of(pieces))[1] is error
    assert isinstance(error, StreamTimeout)


@pytest.mark.parametrize("kind", [silent, endless])
async def test_leaving_closes_the_source(kind: Callable[[], AsyncIterator[int]]) -> None:
    source, before = Source(kind), asyncio.all_tasks()
    async with feed(source, idle=10, total=10):
        await asyncio.sleep(0)
    assert source.closed == 1
    assert asyncio.all_tasks() == before


async def test_leaving_by_cancellation_closes_the_source() -> None:
    source, before = Source(silent), asyncio.all_tasks()

    async def read() -> None:
        async with feed(source) as pieces:
            await pieces.read()

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed == 1
    assert asyncio.all_tasks() == before


async def test_a_source_that_does_not_close_is_left_behind() -> None:
    closing = asyncio.Event()

    @asynccontextmanager
    async def stubborn() -> AsyncGenerator[AsyncIterator[int], None]:
        try:
            yield silent()
        finally:
            await closing.wait()

    before = asyncio.all_tasks()
    async with asyncio.timeout(5):
        async with Feed(stubborn, CancellationToken(), idle=None, total=None):
            await asyncio.sleep(0)
    [left] = asyncio.all_tasks() - before
    closing.set()
    await asyncio.wait({left})


class TestDrain:
    async def test_a_response_that_is_about_to_end_does(self) -> None:
        source = Source(three)
        async with feed(source) as pieces:
            await pieces.read()
            await pieces.drain()
        assert (source.closed, source.was_cancelled) == (1, False)

    async def test_a_response_that_goes_on_is_cut(self) -> None:
        source = Source(silent)
        async with feed(source) as pieces:
            await pieces.drain()
            assert source.closed == 0
        assert (source.closed, source.was_cancelled) == (1, True)


def test_a_signal_may_be_cancelled_when_the_loop_is_gone() -> None:
    """As by a thread that does not know that the run was over long ago."""
    signal = CancellationToken()
    loop = asyncio.new_event_loop()
    pieces: Feed[int] | None = None

    async def begin() -> None:
        nonlocal pieces
        pieces = feed(Source(silent), signal)
        await pieces.__aenter__()

    try:
        loop.run_until_complete(begin())
        [task] = asyncio.all_tasks(loop)
        task.cancel()
        loop.run_until_complete(asyncio.wait({task}))
    finally:
        loop.close()
    thread = threading.Thread(target=signal.cancel)
    thread.start()
    thread.join()
    assert signal.cancelled
