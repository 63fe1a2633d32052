"""The listeners of a config for each class of events, found once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from clark_agent.events import AgentEvent, EventSink, MessageUpdate
from clark_agent.plugins.hooks import ObserverHook

__all__ = ["Audience", "Listener", "Listeners"]


class Listener(Struct, frozen=True, eq=False):
    """A sink or an observer, with the event classes that it wants; None: all."""

    name: str
    call: Callable[[AgentEvent], Any]
    observes: tuple[type, ...] | None = None
    is_hook: bool = True
    """Whether ``hook_timeout`` applies. It does not for a reader of this package."""


Listeners: TypeAlias = tuple[Listener, ...]


class Audience(dict[type[AgentEvent], Listeners]):
    """The listeners by class of event: the sink, a reader of this package, a log that publishes the
    deltas, the observers in order.

    Shared by the runs of a config, as long as none has its own listeners.
    """

    __slots__ = ("listeners", "only")

    def __init__(
        self,
        sink: EventSink | None,
        observers: Sequence[ObserverHook] = (),
        reader: EventSink | None = None,
        deltas: Callable[[AgentEvent], Any] | None = None,
    ) -> None:
        listeners = [] if sink is None else [Listener("event_sink", sink)]
        if reader is not None:
            listeners.append(Listener("reader", reader, is_hook=False))
        if deltas is not None:
            listeners.append(Listener("run_log", deltas, (MessageUpdate,), is_hook=False))
        listeners += [Listener(hook.name, hook.call, hook.observes) for hook in observers]
        self.listeners = tuple(listeners)
        self.only: Callable[[AgentEvent], Any] | None = None
        """The only listener, if it wants all events, as in most runs."""
        if len(listeners) == 1 and listeners[0].observes is None:
            self.only = listeners[0].call

    def __missing__(self, kind: type[AgentEvent]) -> Listeners:
        """Find the listeners of a class, once."""
        found = self[kind] = tuple(
            [x for x in self.listeners if x.observes is None or kind in x.observes]
        )
        return found
