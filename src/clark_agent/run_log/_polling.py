"""Waiting for news that nobody announces: looking for them, less often while there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Polling"]

_SHORTEST, _LONGEST = 0.01, 0.2


class Polling:
    """Looks for news often after there were some, and then less and less often."""

    def __init__(self, has_news: Callable[[], bool]) -> None:
        self._has_news = has_news
        self._interval = _SHORTEST

    async def wait(self, seconds: float) -> None:
        """Return when there are news, or after this time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not self._has_news():
            left = until - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(min(self._interval, left))
            self._interval = min(self._interval * 1.5, _LONGEST)
        self._interval = _SHORTEST
