"""How the loop calls hooks, and polls the sources of messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from clark_agent.engine.run import Run
from clark_agent.engine.supervised import Supervised, as_coroutine, is_cancelled
from clark_agent.errors import HookError
from clark_agent.intake import accept_messages
from clark_agent.plugins.hooks import Hook
from clark_agent.types import AgentMessage

__all__ = ["Pausing", "call_hook", "poll"]

logger = logging.getLogger(__name__)


class Pausing(Protocol):
    """Gets the deadline of a hook, to put it off."""

    deadline: asyncio.Timeout | None


async def call_hook(run: Run, hook: Hook, *args: Any, pausing: Pausing | None = None) -> Any:
    """The result of the hook, within ``hook_timeout``, which ``pausing`` may put off.

    An async hook that ignores its cancellation is left behind after the run's grace.
    """
    journal = run.journal
    await journal.hook_asked()
    try:
        if not hook.is_async:
            answer = hook.call(*args)
        else:
            what = f"the hook {hook.name!r}"
            work = Supervised(as_coroutine(hook.call(*args)), grace=run.grace, what=what)
            if run.config.hook_timeout is None:
                answer = await work
            else:
                answer = await _within(run.config.hook_timeout, hook, work, pausing)
        await journal.hook_answered()
        return answer
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise RuntimeError(f"{hook.name!r} cancelled itself") from error


async def _within(
    seconds: float, hook: Hook, work: Supervised, pausing: Pausing | None = None
) -> Any:
    deadline = asyncio.timeout(seconds)
    if pausing is not None:
        pausing.deadline = deadline
    try:
        async with deadline:
            return await work
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(f"{hook.name!r} took longer than {seconds} seconds") from None
        raise


async def poll(run: Run, sources: Sequence[Hook], into: list[AgentMessage]) -> None:
    """Collect the messages of all sources, in order. A source that fails counts as empty.

    Only a built-in source raises `HookError`, for a provider function that the run relies on.
    """
    for source in sources:
        try:
            run.inbox.collect(source, accept_messages(await call_hook(run, source)), into)
        except HookError:
            raise
        except Exception:
            logger.exception("the message source %r failed; it counts as empty", source.name)
    run.inbox.note_taken()
