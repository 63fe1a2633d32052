"""Cancellation from any thread and any signal handler.

A token is a flag that is set once. Code that works under it either checks ``cancelled`` now and
then, awaits `wait`, or adds a callback with `subscribe`. A child token is cancelled with its
parent, never the other way round.

There is no lock: a signal handler may run `cancel` in the middle of `subscribe` on the same thread,
where a lock would hang. The order of steps is enough: `cancel` sets the flag and then drains the
callbacks, `subscribe` adds its callback and then checks the flag, and whoever removes an entry (one
atomic ``pop``) runs it. A child registers with its parent only while it has callbacks; so tokens
cost nothing to make and cannot leak.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from clark_agent._threads import call_in_loop

__all__ = ["LET_GO", "CancellationToken", "Subscription"]

logger = logging.getLogger(__name__)

LET_GO: Final = "let_go"
"""A reason to cancel a run with: this process gives it up, and it does not end. The run raises
`clark_agent.errors.RunLetGo`, and its log can be resumed in another process.
"""


class Subscription:
    """A callback of a token. ``close()`` removes it; closing twice is harmless."""

    __slots__ = ("_callback", "_token")

    def __init__(self, token: CancellationToken, callback: Callable[[], object]) -> None:
        self._token = token
        self._callback = [callback]

    def close(self) -> None:
        """Remove the callback. If it has not started yet, it never will."""
        self._callback.clear()
        token: CancellationToken | None = self._token
        while token is not None:
            token._subscriptions.pop(id(self), None)
            token = token._parent

    def _fire(self) -> None:
        try:
            callback = self._callback.pop()
        except IndexError:  # closed, or fired by a token further up
            return
        finally:
            self.close()
        try:
            callback()
        except Exception:
            logger.exception("a cancellation callback raised; the others still run")


class CancellationToken:
    """Tells work to stop. ``cancel()`` may be called from any thread, any number of times."""

    __slots__ = ("_cancelled", "_parent", "_reason", "_subscriptions", "_watched")

    def __init__(self) -> None:
        self._parent: CancellationToken | None = None
        self._cancelled = False
        self._reason: str | None = None
        self._watched = False
        self._subscriptions: dict[int, Subscription] = {}

    def cancel(self, reason: str | None = None) -> None:
        """Cancel this token and its children. The first reason counts."""
        if not self._cancelled:
            self._reason = reason
            self._cancelled = True
        while self._subscriptions:
            try:
                _, subscription = self._subscriptions.popitem()
            except KeyError:
                return
            subscription._fire()

    @property
    def cancelled(self) -> bool:
        """Whether this token or one above it was cancelled."""
        token: CancellationToken | None = self
        while token is not None:
            if token._cancelled:
                return True
            token = token._parent
        return False

    @property
    def reason(self) -> str | None:
        """The reason of the nearest ``cancel``."""
        token = self
        while not token._cancelled and token._parent is not None:
            token = token._parent
        return token._reason

    @property
    def has_subscribers(self) -> bool:
        """Whether this token or one below it has a callback or a waiter."""
        return bool(self._subscriptions)

    @property
    def is_watched(self) -> bool:
        """Whether this token itself ever had a waiter or a callback."""
        return self._watched

    def child(self) -> CancellationToken:
        """A token that is cancelled with this one and can be cancelled on its own."""
        token = CancellationToken()
        token._parent = self
        return token

    def subscribe(self, callback: Callable[[], object]) -> Subscription:
        """Call ``callback`` once, on the thread that cancels; at once if already cancelled.

        Contract: the callback is quick and does not block; an exception is logged.
        """
        subscription = Subscription(self, callback)
        self._watched = True
        token: CancellationToken | None = self
        while token is not None:
            token._subscriptions[id(subscription)] = subscription
            token = token._parent
        if self.cancelled:
            subscription._fire()
        return subscription

    async def wait(self) -> None:
        """Return as soon as the token is cancelled."""
        if self.cancelled:
            return
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        subscription = self.subscribe(lambda: call_in_loop(loop, wake))
        try:
            await done
        finally:
            subscription.close()

    def __repr__(self) -> str:
        if not self.cancelled:
            return "<CancellationToken>"
        return f"<CancellationToken cancelled{f': {self.reason}' if self.reason else ''}>"
