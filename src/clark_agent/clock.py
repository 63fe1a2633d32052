"""Time and ids, behind one interface.

The loop reads the clock, sleeps and makes ids only through a `Clock`, so that tests and replay can
use their own: retries then take no real time and ids repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import time_ns
from typing import Any, Protocol

from clark_agent._ids import random_id

__all__ = ["Clock", "SystemClock", "Timer", "call_later", "now_ms"]


def now_ms() -> int:
    """Milliseconds since the Unix epoch, by the system's clock."""
    return time_ns() // 1_000_000


class Timer(Protocol):
    """A scheduled callback, which can be cancelled."""

    def cancel(self) -> None:
        """Cancel it. Harmless after it was called."""
        ...


class Clock(Protocol):
    """Contract: none of these raises, except that ``sleep`` may be cancelled.

    A clock may also have ``call_later(seconds, callback)``, which returns a `Timer`. Without it the
    timers of a run are those of its event loop.
    """

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        ...

    def new_id(self) -> str:
        """An id that no other call of this clock has returned."""
        ...


class SystemClock:
    """The machine's clock, real sleep and random UUIDs."""

    now_ms = staticmethod(now_ms)

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)

    def new_id(self) -> str:
        """A random UUID."""
        return random_id()


def call_later(clock: Clock, seconds: float, callback: Callable[[], object]) -> Timer:
    """Call something after this many seconds, with the clock's own timers if it has them."""
    own: Any = getattr(clock, "call_later", None)
    timer: Timer = (own or asyncio.get_running_loop().call_later)(seconds, callback)
    return timer
