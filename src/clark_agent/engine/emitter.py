"""Sends events to the listeners."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from contextlib import suppress
from inspect import isawaitable
from typing import Any

from clark_agent._finished import FINISHED
from clark_agent.audience import Audience, Listener, Listeners
from clark_agent.engine.supervised import Supervised, as_coroutine, is_cancelled, step
from clark_agent.events import AgentEvent

__all__ = ["Emitter"]

logger = logging.getLogger(__name__)

# The exceptions of a listener that do not affect the run.
_FAILURES = (Exception, asyncio.CancelledError, GeneratorExit)


class Emitter:
    """Emits the events of one run.

    A listener is awaited, so a slow one slows the run. If one raises, that is logged. All listeners
    get the same events in the same order: an event is sent when the one before it is handled, even
    if several tools run at once. If the run is cancelled while a listener works, the others still
    get the event before the cancellation continues.
    """

    __slots__ = (
        "_audience",
        "_grace",
        "_listen",
        "_only",
        "_timeout",
        "_waiting",
        "deadline",
        "is_sending",
    )

    def __init__(
        self,
        audience: Audience,
        timeout: float | None = None,
        grace: float = 0,
        *,
        eager: bool = False,
    ) -> None:
        """``eager``: tasks begin as soon as they are made, so a listener may start one that emits
        before the listener has returned.
        """
        self._audience = audience
        self._grace = grace
        self._only = None if eager else audience.only
        self._listen = self._only
        """The only listener, while it is not handling an event."""
        self._timeout = timeout
        self.deadline: float | None = None
        """When the time of the listeners ends, by the event loop's clock; None: no limit."""
        self.is_sending = False
        """Whether a listener is handling an event."""
        self._waiting: deque[asyncio.Future[None]] | None = None

    def listeners(self, kind: type[AgentEvent]) -> Listeners:
        """The listeners for events of a class."""
        return self._audience[kind]

    def emit(self, event: AgentEvent) -> Awaitable[None]:
        """Send the event to each listener, whatever the others do. Await the result.

        Plain listeners are called at once; a coroutine is made only if something must be awaited.
        """
        listen = self._listen
        if listen is None:
            listeners = self._audience[type(event)]
            return self._send(event, listeners) if listeners else FINISHED
        try:
            pending = listen(event)
        except _FAILURES:
            _log_failure(self._audience.listeners[0], event)
            return FINISHED
        if pending is None:
            return FINISHED
        self.is_sending, self._listen = True, None
        return self._send_the_rest(event, self._audience.listeners, pending)

    def _send(self, event: AgentEvent, listeners: Listeners) -> Awaitable[None]:
        if self.is_sending:
            return self._send_in_turn(event, listeners)
        self.is_sending = True
        stop: BaseException | None = None
        for listener in listeners:
            try:
                pending = listener.call(event)
            except _FAILURES:
                _log_failure(listener, event)
                continue
            except BaseException as error:
                stop = stop or error
                continue
            if pending is not None:
                rest = listeners[listeners.index(listener) :]
                return self._send_the_rest(event, rest, pending, stop=stop)
        self._pass_on_turn()
        if stop is not None:
            raise stop
        return FINISHED

    async def _send_in_turn(self, event: AgentEvent, listeners: Listeners) -> None:
        turn, cancelled = await self._wait_for_turn()
        self.is_sending = True
        await self._send_the_rest(event, listeners, None, has_turn=turn, stop=cancelled)

    async def _send_the_rest(
        self,
        event: AgentEvent,
        listeners: Listeners,
        pending: Awaitable[Any] | None,
        *,
        has_turn: bool = True,
        stop: BaseException | None = None,
    ) -> None:
        """Await the result of the first listener, if it was already called; then call the others.

        ``stop``, or an exception here that must end the run, is raised when all have the event.
        """
        try:
            for listener in listeners:
                try:
                    if pending is None:
                        pending = listener.call(event)
                    if pending is not None and isawaitable(pending):
                        await self._within_time(listener, pending)
                except asyncio.CancelledError as error:
                    if is_cancelled():
                        stop = stop or error
                    else:
                        _log_failure(listener, event)
                except Exception:
                    _log_failure(listener, event)
                except GeneratorExit:  # nothing may be awaited any more
                    raise
                except BaseException as error:
                    stop = stop or error
                pending = None
        finally:
            if has_turn:
                self._pass_on_turn()
        if stop is not None:
            raise stop

    async def _within_time(self, listener: Listener, pending: Awaitable[Any]) -> None:
        coroutine = as_coroutine(pending)
        try:
            awaited = step(coroutine, None)
        except StopIteration:  # it had nothing to wait for
            return
        # When the run is being closed, listeners have had their grace with the deadline.
        grace = self._grace if self.deadline is None else 0
        work = Supervised(coroutine, awaited, grace=grace, what=f"the listener {listener.name!r}")
        until, cancels = self._until(listener), _cancels()
        try:
            if until is None:
                await work
            else:
                async with asyncio.timeout_at(until):
                    await work
        finally:
            # A listener cannot swallow a cancellation, by failing or by continuing.
            if work.is_interrupted and _cancels() > cancels:
                raise asyncio.CancelledError

    def _until(self, listener: Listener) -> float | None:
        """The deadline of the listener that is about to be awaited."""
        if self._timeout is None or not listener.is_hook:
            return self.deadline
        until = asyncio.get_running_loop().time() + self._timeout
        return until if self.deadline is None else min(until, self.deadline)

    async def _wait_for_turn(self) -> tuple[bool, asyncio.CancelledError | None]:
        """Wait until the events before are handled; a cancellation meanwhile is returned for later.

        False when the time for that is up: then the event is sent out of order.
        """
        cancelled: asyncio.CancelledError | None = None
        turn = asyncio.get_running_loop().create_future()
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(turn)
        while not turn.done():
            try:
                async with asyncio.timeout_at(self.deadline):
                    await asyncio.shield(turn)
            except asyncio.CancelledError as error:
                cancelled = error
            except TimeoutError:
                if not turn.done():
                    self._waiting.remove(turn)
                    return False, cancelled
        return True, cancelled

    def _pass_on_turn(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self.is_sending, self._listen = False, self._only


def _cancels() -> int:
    """How many cancellations of the current task were not undone."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _log_failure(listener: Listener, event: AgentEvent) -> None:
    kind = type(event).__name__
    with suppress(Exception):  # a log handler of the host that fails must not stop the events
        logger.exception("the listener %r failed on %s; the run continues", listener.name, kind)
