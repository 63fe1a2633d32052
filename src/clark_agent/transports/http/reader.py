"""What a server sends, read by a task of its own.

The task opens the response, reads it and closes it, so that what the HTTP library binds to a task
stays in one. Whoever reads the feed can therefore be stopped at any point, by the signal, by a time
limit or by being closed, and the connection goes with it at once.
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
"""Opens a response and gives its pieces; leaving it closes the connection."""

# How many pieces may lie unread before the task stops reading.
_MOST_UNREAD = 256
# How long a response may take to end after its last event, so that its connection can be used
# again, and how long one may take to be closed.
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
        self._spent = spent  # of the total, by what came before
        self._loop = asyncio.get_running_loop()
        self._unread: list[T] = []
        self._failure: Exception | None = None
        self._is_over = False
        self._news: asyncio.Future[None] | None = None  # somebody waits for a piece
        self._room: asyncio.Future[None] | None = None  # the task waits to be read
        self._heard = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._total_timer: asyncio.TimerHandle | None = None
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._signal.cancelled:
            self._failure = Cancelled(self._signal.reason or "the call was cancelled")
            self._is_over = True
            return self
        self._heard = self._loop.time()
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
            if not task.cancelling():  # or it would be disturbed while it closes the response
                task.cancel()
            await asyncio.wait({task}, timeout=_CLOSE_SECONDS)

    async def read(self) -> list[T] | None:
        """What has come since the last time, at least one piece; None at the end.

        Raises what the source raised, `StreamTimeout` or `Cancelled`, once everything that came
        before is read.
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
        """Nothing more is wanted: let the response end by itself if it is about to.

        Only then can its connection be used again.
        """
        if self._task is not None and not self._is_over:
            if self._room is not None:
                _wake(self._room)
            await asyncio.wait({self._task}, timeout=_DRAIN_SECONDS)

    async def _pump(self) -> None:
        try:
            async with self._source() as pieces:
                async for piece in pieces:
                    self._heard = self._loop.time()
                    self._unread.append(piece)
                    if self._news is not None:
                        _wake(self._news)
                    if len(self._unread) >= _MOST_UNREAD:
                        self._room = self._loop.create_future()
                        await self._room
                        self._room = None
                        self._heard = self._loop.time()
        except Exception as error:
            self._fail(error)
        finally:
            self._is_over = True
            if self._news is not None:
                _wake(self._news)

    def _fail(self, error: Exception) -> None:
        """End it here; the first reason stays."""
        if self._is_over or self._failure is not None:
            return
        self._failure = error
        if self._news is not None:
            _wake(self._news)
        if self._task is not None and self._task is not asyncio.current_task(self._loop):
            self._task.cancel()

    def _watch_idle(self, limit: float) -> None:
        """Look again when the time would be over if nothing came until then.

        While the task waits to be read it is not the server that is silent.
        """
        silent = self._loop.time() - self._heard if self._room is None else 0.0
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
