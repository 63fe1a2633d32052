"""Hands events to those who listen, and makes none when nobody does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from inspect import isawaitable
from typing import Any, TypeAlias

from msgspec import Struct

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
    """Emits the events of one run: first to the sink, then to the observers in order.

    A listener is awaited, so a slow one slows the run. One that raises is logged and skipped. When
    the run is cancelled while a listener works, the others still get the event before the
    cancellation goes on: all listeners always see the same events.
    """

    __slots__ = ("_by_kind", "_listeners", "_timeout")

    def __init__(
        self, sink: EventSink | None, observers: Sequence[ObserverHook], timeout: float | None
    ) -> None:
        listeners = [] if sink is None else [Listener("event_sink", sink)]
        listeners += [Listener(hook.name, hook.call, hook.observes) for hook in observers]
        self._listeners = tuple(listeners)
        self._by_kind: dict[type, Listeners] = {}
        self._timeout = timeout

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
        cancelled: asyncio.CancelledError | None = None
        for listener in listeners:
            try:
                pending = listener.call(event)
                if pending is None:
                    continue
                if isawaitable(pending):
                    async with asyncio.timeout(self._timeout):
                        await pending
            except asyncio.CancelledError as error:
                cancelled = error
            except Exception:
                logger.exception(
                    "the listener %r failed on %s; the run goes on",
                    listener.name,
                    type(event).__name__,
                )
        if cancelled is not None:
            raise cancelled
