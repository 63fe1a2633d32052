"""Hands events to those who listen, and makes none when nobody does."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from inspect import isawaitable
from typing import Any, TypeAlias

from msgspec import Struct

from clark_agent.cancel_scope import is_cancelled
from clark_agent.events import AgentEvent, EventSink
from clark_agent.plugin import ObserverHook

__all__ = ["Emitter", "Listener"]

logger = logging.getLogger(__name__)


class Listener(Struct, frozen=True):
    """A sink or an observer, with the event classes that it wants; None: all."""

    name: str
    call: Callable[[AgentEvent], Any]
    observes: tuple[type, ...] | None = None


Listeners: TypeAlias = tuple[Listener, ...]


class Emitter:
    """Emits the events of one run: first to the sinks, then to the observers in order.

    A listener is awaited, so a slow one slows the run. One that raises is logged and skipped. All
    listeners see the same events in the same order: an event goes out when the one before it is
    through, also when several tools run at once, and when the run is cancelled while a listener
    works the others still get the event before the cancellation goes on.
    """

    __slots__ = ("_by_kind", "_listeners", "_sending", "_timeout", "_waiting", "deadline")

    def __init__(
        self, sinks: Sequence[EventSink], observers: Sequence[ObserverHook], timeout: float | None
    ) -> None:
        listeners = [Listener("event_sink", sink) for sink in sinks]
        listeners += [Listener(hook.name, hook.call, hook.observes) for hook in observers]
        self._listeners = tuple(listeners)
        self._by_kind: dict[type, Listeners] = {}
        self._timeout = timeout
        self.deadline: float | None = None
        """When listeners have had their time, by the event loop's clock; None: they may take it."""
        self._sending = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_sending(self) -> bool:
        """Whether a listener has an event that it is not done with."""
        return self._sending

    def listeners(self, kind: type[AgentEvent]) -> Listeners:
        """Those who want events of a class."""
        found = self._by_kind.get(kind)
        if found is None:
            found = self._by_kind[kind] = tuple(
                [x for x in self._listeners if x.observes is None or kind in x.observes]
            )
        return found

    async def emit(self, kind: type[AgentEvent], *fields: Any) -> None:
        """Make an event and send it, if anybody wants it."""
        if listeners := self.listeners(kind):
            await self.send(kind(*fields), listeners)

    async def send(self, event: AgentEvent, listeners: Listeners) -> None:
        """Give the event to each listener, whatever the others do."""
        turn, cancelled = await self._wait_for_turn() if self._sending else (True, None)
        self._sending = True
        try:
            for listener in listeners:
                try:
                    pending = listener.call(event)
                    if pending is not None and isawaitable(pending):
                        async with asyncio.timeout_at(self._until()):
                            await pending
                except asyncio.CancelledError as error:
                    if is_cancelled():
                        cancelled = error
                    else:
                        _log_failure(listener, event)
                except Exception:
                    _log_failure(listener, event)
        finally:
            if turn:
                self._pass_on_turn()
        if cancelled is not None:
            raise cancelled

    def _until(self) -> float | None:
        """When the listener that is about to be awaited must be done."""
        if self._timeout is None:
            return self.deadline
        until = asyncio.get_running_loop().time() + self._timeout
        return until if self.deadline is None else min(until, self.deadline)

    async def _wait_for_turn(self) -> tuple[bool, asyncio.CancelledError | None]:
        """Wait until the events before are through; a cancellation meanwhile is for later.

        False when the time for that is up: then the event goes out of turn.
        """
        cancelled: asyncio.CancelledError | None = None
        turn = asyncio.get_running_loop().create_future()
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
            self._sending = False


def _log_failure(listener: Listener, event: AgentEvent) -> None:
    kind = type(event).__name__
    logger.exception("the listener %r failed on %s; the run goes on", listener.name, kind)
