"""Reads a response in a separate task.

The task opens the response, reads it and closes it, so that the state that HTTP libraries bind to a
task stays in one task. The consumer of the feed can therefore stop at any point (cancelled signal,
time limit, or closed), and the connection is closed at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, Self, TypeVar

from clark_agent.cancellation import CancellationToken, Subscription
from clark_agent.errors import StreamTimeout

__all__ = ["Cancelled", "Feed", "Source"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

Source = Callable[[], AbstractAsyncContextManager[AsyncIterator[T]]]
"""Opens a response and yields its pieces; leaving the context closes the connection."""

# The task stops reading when this many pieces are unread.
_MOST_UNREAD = 256
# How long to wait for the end of a response after its last event, so that its connection can be
# reused, and how long to wait for it to close.
_DRAIN_SECONDS = 0.05
_CLOSE_SECONDS = 1.0


class Cancelled(Exception):
    """The signal was cancelled."""


class Feed(Generic[T]):
    """The pieces of one response. An async context manager; leaving it closes the response."""

    def __init__(
        self,
        source: Source[T],
        signal: CancellationToken,
        *,
        idle: float | None,
        total: float | None,
        spent: float = 0.0,
    ) -> None:
        self._source = source
        self._signal = signal
        self._idle = idle
        self._total = total
        self._spent = spent  # seconds of the total that earlier attempts used
        self._loop = asyncio.get_running_loop()
        self._unread: list[T] = []
        self._failure: Exception | None = None
        self._is_over = False
        self._news: asyncio.Future[None] | None = None  # set while `read` waits for a piece
        self._room: asyncio.Future[None] | None = None  # set while the task waits for `read`
        self._last_piece_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._total_timer: asyncio.TimerHandle | None = None
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._signal.cancelled:
            self._failure = Cancelled(self._signal.reason or "the call was cancelled")
            self._is_over = True
            return self
        self._last_piece_at = self._loop.time()
        if self._idle is not None:
            self._watch_idle(self._idle)
        if self._total is not None:
            left = max(0.0, self._total - self._spent)
            over = StreamTimeout("total", self._total)
            self._total_timer = self._loop.call_later(left, self._fail, over)
        self._task = self._loop.create_task(self._pump())
        self._subscription = self._signal.subscribe(self._cancelled_from_any_thread)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._subscription is not None:
            self._subscription.close()
        for timer in (self._idle_timer, self._total_timer):
            if timer is not None:
                timer.cancel()
        task = self._task
        if task is not None and not task.done():
            if not task.cancelling():  # a second cancel would interrupt closing the response
                task.cancel()
            await asyncio.wait({task}, timeout=_CLOSE_SECONDS)

    async def read(self) -> list[T] | None:
        """Return the pieces since the last call, at least one; None at the end.

        After all received pieces are read, raises the source's exception, `StreamTimeout` or
        `Cancelled`, if one ended the response.
        """
        while not self._unread:
            if self._failure is not None:
                raise self._failure
            if self._is_over:
                return None
            self._news = self._loop.create_future()
            try:
                await self._news
            finally:
                self._news = None
        pieces, self._unread = self._unread, []
        if self._room is not None:
            _wake(self._room)
        return pieces

    async def drain(self) -> None:
        """Wait briefly for the response to end by itself, after its last event was read.

        Only a response that was read to its end leaves a reusable connection.
        """
        if self._task is not None and not self._is_over:
            if self._room is not None:
                _wake(self._room)
            await asyncio.wait({self._task}, timeout=_DRAIN_SECONDS)

    async def _pump(self) -> None:
        try:
            async with self._source() as pieces:
                async for piece in pieces:
                    self._last_piece_at = self._loop.time()
                    self._unread.append(piece)
                    if self._news is not None:
                        _wake(self._news)
                    if len(self._unread) >= _MOST_UNREAD:
                        self._room = self._loop.create_future()
                        await self._room
                        self._room = None
                        self._last_piece_at = self._loop.time()
        except Exception as error:
            self._fail(error)
        finally:
            self._is_over = True
            if self._news is not None:
                _wake(self._news)

    def _fail(self, error: Exception) -> None:
        """Record the failure and cancel the task. Only the first failure counts."""
        if self._is_over or self._failure is not None:
            return
        self._failure = error
        if self._news is not None:
            _wake(self._news)
        if self._task is not None and self._task is not asyncio.current_task(self._loop):
            self._task.cancel()

    def _watch_idle(self, limit: float) -> None:
        """Fail if the server was silent for ``limit`` seconds; otherwise schedule the next check.

        Time in which the task waits for the consumer does not count as silence.
        """
        silent = self._loop.time() - self._last_piece_at if self._room is None else 0.0
        if silent >= limit:
            self._fail(StreamTimeout("idle", limit))
            return
        self._idle_timer = self._loop.call_later(limit - silent, self._watch_idle, limit)

    def _cancelled_from_any_thread(self) -> None:
        error = Cancelled(self._signal.reason or "the call was cancelled")
        try:
            self._loop.call_soon_threadsafe(self._fail, error)
        except RuntimeError:  # the loop has closed, and the response with it
            logger.debug("cancelled after the event loop was closed")


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
