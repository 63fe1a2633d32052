"""uvloop, with timers that a test can see and hurry. Imported only where uvloop is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

import uvloop

Ts = TypeVarTuple("Ts")


class UvLoop(uvloop.Loop):
    """Every timer is one of uvloop's, behind a handle of asyncio's that says when it is due."""

    def __init__(self) -> None:
        super().__init__()
        self._timers: dict[int, tuple[asyncio.TimerHandle, asyncio.TimerHandle]] = {}
        self._ahead = 0.0

    @property
    def _scheduled(self) -> list[asyncio.TimerHandle]:
        return [timer for timer, _ in self._timers.values()]

    def time(self) -> float:
        return super().time() + self._ahead

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        left = max(0.0, when - self.time())
        self._timers[id(timer)] = timer, super().call_later(left, self._go_off, timer)
        return timer

    def _go_off(self, timer: asyncio.TimerHandle) -> None:
        self._timers.pop(id(timer), None)
        if not timer.cancelled():
            timer._run()

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        if (found := self._timers.pop(id(timer), None)) is not None:
            found[1].cancel()

    def hurry(self, seconds: float) -> None:
        """Let the timers go off that are due within that time, in their order."""
        self._ahead += seconds
        now = self.time()
        due = [pair for pair in self._timers.values() if pair[0].when() <= now]
        for timer, behind in sorted(due, key=lambda pair: pair[0].when()):
            behind.cancel()
            self.call_soon(self._go_off, timer)
