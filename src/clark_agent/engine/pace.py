"""A run that never waits still lets other tasks of its event loop run, every few milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from threading import local
from time import monotonic
from typing import Final

from clark_agent._finished import FINISHED

__all__ = ["Pace", "current_pace"]

_SECONDS: Final = 0.005
_STALE: Final = 0.05


class Pace:
    """When to let other tasks run. Shared by all runs of a thread: if one has paused, all have."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due = 0.0

    def begin(self) -> None:
        """Note that a run begins. If none began recently, the event loop has just had a turn."""
        now = monotonic()
        if now - self._due > _STALE:
            self._due = now + _SECONDS

    def pause_if_due(self) -> Awaitable[None]:
        """Let other tasks run, if they have waited for long."""
        return FINISHED if monotonic() < self._due else self._pause()

    async def _pause(self) -> None:
        self._due = monotonic() + _SECONDS
        await asyncio.sleep(0)
        self._due = monotonic() + _SECONDS


class _Threads(local):
    """One for each thread, in which at most one event loop runs at a time."""

    def __init__(self) -> None:
        self.pace = Pace()


_threads = _Threads()


def current_pace() -> Pace:
    """The pace of this thread's event loop."""
    return _threads.pace
