"""The event loops that the tests can run on: ``pytest --event-loop=uvloop``.

`install` sets a policy, because that reaches every loop made without naming a factory: those of
pytest-asyncio, those of ``asyncio.run`` in a test, and those that the package makes itself.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")

CHOICES = ("asyncio", "eager", "uvloop")
"""asyncio's own loop; the same with tasks that start when they are made; uvloop."""


def missing(name: str) -> str | None:
    """Why this Python cannot run tests on that loop; None: it can."""
    if name == "eager" and sys.version_info < (3, 12):
        return "needs Python 3.12"
    if name == "uvloop" and find_spec("uvloop") is None:
        return "uvloop is not installed"
    return None


def install(name: str) -> None:
    """Make every new event loop of this process one of that kind."""
    make = _factory(name)
    with warnings.catch_warnings():
        # Deprecated from 3.14 on, but nothing else reaches the loops that other code makes.
        warnings.simplefilter("ignore", DeprecationWarning)

        class Policy(asyncio.DefaultEventLoopPolicy):
            def new_event_loop(self) -> asyncio.AbstractEventLoop:
                return make()

        asyncio.set_event_loop_policy(Policy())  # type: ignore[deprecated]


def _factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if name == "uvloop":
        from tests.event_loop_uv import UvLoop

        return UvLoop
    return _eager_loop if name == "eager" else asyncio.SelectorEventLoop


def _eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.SelectorEventLoop()
    make_tasks_eager(loop)
    return loop


def make_tasks_eager(loop: asyncio.AbstractEventLoop) -> None:
    """Let tasks take their first step when they are made. Not in Python 3.11."""
    loop.set_task_factory(vars(asyncio)["eager_task_factory"])


# --- what tests need to do on all of them -------------------------------------------------------


def task_for_later(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has not started when this returns, also on a loop with eager tasks.

    For a coroutine that has to know its own task, or whose first step must wait for the test.
    """
    return asyncio.Task(coroutine)


def starts_tasks_at_once() -> bool:
    """Whether a task of the running loop takes its first step when it is made."""
    return asyncio.get_running_loop().get_task_factory() is not None


def timers() -> list[asyncio.TimerHandle]:
    """What is scheduled on the running loop and was not cancelled."""
    loop: Any = asyncio.get_running_loop()
    return [timer for timer in loop._scheduled if not timer.cancelled()]
