"""How the loop calls a hook, and what a failing source of messages counts for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from clark_agent.cancel_scope import is_cancelled
from clark_agent.errors import HookError
from clark_agent.plugin import Hook
from clark_agent.run_state import Run
from clark_agent.transcript import checked_messages
from clark_agent.types import AgentMessage

__all__ = ["call_hook", "poll"]

logger = logging.getLogger(__name__)


async def call_hook(run: Run, hook: Hook, *args: Any) -> Any:
    """What the hook returns, within the time that the config gives hooks."""
    try:
        if not hook.is_async:
            return hook.call(*args)
        if run.config.hook_timeout is None:
            return await hook.call(*args)
        return await _within(run.config.hook_timeout, hook, *args)
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise RuntimeError(f"{hook.name!r} cancelled itself") from error


async def _within(seconds: float, hook: Hook, *args: Any) -> Any:
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await hook.call(*args)
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(f"{hook.name!r} took longer than {seconds} seconds") from None
        raise


async def poll(run: Run, sources: Sequence[Hook], into: list[AgentMessage]) -> None:
    """Collect the messages of all sources, in order. A source that fails has none.

    Only a built-in source raises `HookError`, for the provider behind it that the run relies on.
    """
    for source in sources:
        try:
            into.extend(checked_messages(await call_hook(run, source)))
        except HookError:
            raise
        except Exception:
            logger.exception("the message source %r failed; it counts as empty", source.name)
