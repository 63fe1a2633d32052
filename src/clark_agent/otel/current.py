"""Makes a span the current one while foreign code runs, step by step.

A coroutine of a run can be stepped by one task and continued by another, so a context must not be
attached from one step to the next. `InContext` attaches it before each step and detaches it after,
and keeps what the code itself has attached in between.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar

from opentelemetry.context import Context, attach, detach, get_current

from clark_agent.engine.supervised import as_coroutine

__all__ = ["InContext"]

T = TypeVar("T")


class InContext(Generic[T]):
    """Await it for the result of the work, all of whose steps run in the context."""

    __slots__ = ("_context", "_work")

    def __init__(self, work: Awaitable[T], context: Context) -> None:
        self._work: Any = work if hasattr(work, "send") else as_coroutine(work)
        self._context = context

    def __await__(self) -> Generator[Any, Any, T]:
        work, context = self._work, self._context
        step, given = work.send, None
        while True:
            token = attach(context)
            try:
                awaited = step(given)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                context = get_current()  # of a span that the code has opened, perhaps
                detach(token)
            try:
                step, given = work.send, (yield awaited)
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                step, given = work.throw, error
