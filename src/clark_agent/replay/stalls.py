"""Notices that a replay cannot go on: all of it waits for a place in the log that never comes.

With other plugins, or with other hooks in them, the replay makes fewer steps than the run did. What
happened in the log after so many steps would then be waited for forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

__all__ = ["Stalls"]

_QUIET_SECONDS = 0.2
_QUIET_PASSES = 100
"""After that time, so many passes of the event loop: whatever is only delayed comes first."""


class Stalls:
    """Watches a replay with all its child runs."""

    def __init__(self, on_stall: Callable[[], None]) -> None:
        self._on_stall = on_stall
        self._moves = 0
        self._busy = 0
        """How many hooks, listeners and validators of the host are running."""
        self._handle: asyncio.Handle | None = None

    def moved(self) -> None:
        """Count a step of the replay."""
        self._moves += 1

    def waits(self) -> None:
        """Begin to watch, because something waits for the log."""
        self._moves += 1
        if self._handle is None:
            self._watch()

    def begin(self) -> None:
        """Something of the host begins to run."""
        self._busy += 1

    def end(self) -> None:
        """It has ended."""
        self._busy -= 1

    @contextmanager
    def busy(self) -> Generator[None]:
        """While the block runs, so does something of the host."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    async def during(self, work: Awaitable[None]) -> None:
        """Await work of the host."""
        with self.busy():
            await work

    def close(self) -> None:
        """Watch no longer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(_QUIET_SECONDS, self._look, self._moves, _QUIET_PASSES)

    def _look(self, moves: int, passes: int) -> None:
        if self._busy or moves != self._moves:
            self._watch()
        elif passes:
            loop = asyncio.get_running_loop()
            self._handle = loop.call_soon(self._look, moves, passes - 1)
        else:
            self._handle = None
            self._on_stall()
