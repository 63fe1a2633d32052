"""Makes a span the current one while foreign code runs, step by step.

A coroutine of a run can be stepped by one task and continued by another, so a context must not be
attached from one step to the next.

- `InContext`, for one coroutine, attaches it before each step and detaches it after, and keeps what
  the code itself has attached in between. All other context variables are those of the task.
- `OwnContext`, for a stream that is read and closed in many pieces, has context variables of its
  own, where the span is attached once. What the stream attaches around its yields stays there too,
  and can be detached there, whichever task continues it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from opentelemetry.context import Context, attach, detach, get_current

from clark_agent.engine.supervised import as_coroutine

__all__ = ["InContext", "OwnContext"]

T = TypeVar("T")


class InContext(Generic[T]):
    """Await it for the result of the work, all of whose steps run in the context."""

    __slots__ = ("_context", "_work")

    def __init__(self, work: Awaitable[T], context: Context) -> None:
        self._work: Any = _steppable(work)
        self._context = context

    def __await__(self) -> Generator[Any, Any, T]:
        return _stepped(self._work, self._run)

    def _run(self, step: Callable[[Any], Any], given: Any) -> Any:
        token = attach(self._context)
        try:
            return step(given)
        finally:
            self._context = get_current()  # of a span that the code has opened, perhaps
            detach(token)


class OwnContext:
    """Context variables with a span as the current one."""

    __slots__ = ("run",)

    def __init__(self, context: Context) -> None:
        variables = copy_context()
        variables.run(attach, context)
        self.run = variables.run
        """Call a function there."""

    def steps(self, work: Awaitable[T]) -> Awaitable[T]:
        """Await it for the result of the work, all of whose steps run there."""
        return _Steps(_steppable(work), self.run)


class _Steps(Generic[T]):
    __slots__ = ("_run", "_work")

    def __init__(self, work: Any, run: Callable[..., Any]) -> None:
        self._work = work
        self._run = run

    def __await__(self) -> Generator[Any, Any, T]:
        return _stepped(self._work, self._run)


def _steppable(work: Any) -> Any:
    return work if hasattr(work, "send") else as_coroutine(work)


def _stepped(work: Any, run: Callable[..., Any]) -> Generator[Any, Any, Any]:
    """Like ``yield from`` with the work, each step of which ``run`` makes."""
    step, given = work.send, None
    while True:
        try:
            awaited = run(step, given)
        except StopIteration as done:
            return done.value
        try:
            step, given = work.send, (yield awaited)
        except GeneratorExit:
            run(_close, work)
            raise
        except BaseException as error:
            step, given = work.throw, error


def _close(work: Any) -> None:
    work.close()
