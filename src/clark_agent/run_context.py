"""What functions of the host get that are called for a run: system prompts, output validators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any, Generic, TypeAlias

from msgspec import Struct

from clark_agent._typing import DepsT, DepsT_co
from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ConfigError, HookError, RunAborted
from clark_agent.types import AgentMessage, RunIdentity

__all__ = ["RunContext", "SystemPrompt", "resolve_system_prompt"]


class RunContext(Struct, Generic[DepsT_co], frozen=True):
    """The run that a function of the host is called for."""

    deps: DepsT_co
    """The dependencies of the run."""
    identity: RunIdentity | None = None
    """Whose run it is; None before the run has begun."""
    messages: Sequence[AgentMessage] = ()
    """The transcript so far."""


SystemPrompt: TypeAlias = str | Callable[[RunContext[DepsT]], str | Awaitable[str]]
"""A text, or a function that returns it: ``def`` or ``async def``, called before each run.

Contract: an exception ends the run with a `HookError` before anything is sent.
"""


def check_system_prompt(prompt: Any, owner: str) -> None:
    """Raise `ConfigError` if it is neither text nor a function."""
    if not isinstance(prompt, str) and not callable(prompt):
        raise ConfigError(f"{owner}: system_prompt must be a text or a function, not {prompt!r}")


async def resolve_system_prompt(
    prompt: SystemPrompt[Any],
    ctx: RunContext[Any],
    signal: CancellationToken | None = None,
    limit: float | None = None,
) -> str:
    """The text of a system prompt. ``limit`` is in seconds.

    Raises `HookError`, and `RunAborted` if it is cancelled.
    """
    if isinstance(prompt, str):
        return prompt
    name = getattr(prompt, "__name__", type(prompt).__name__)
    if signal is not None and signal.cancelled:
        raise RunAborted(signal.reason)
    try:
        text: Any = prompt(ctx)
        if isawaitable(text):
            text = await _awaited(text, signal, limit)
        if not isinstance(text, str):
            raise TypeError(f"a system prompt must be a text, not {text!r}")
    except RunAborted:
        raise
    except Exception as error:
        raise HookError("system prompt", name, error) from error
    return text


async def _awaited(
    text: Awaitable[Any], signal: CancellationToken | None, limit: float | None
) -> Any:
    task = asyncio.ensure_future(text)
    waiting: set[asyncio.Future[Any]] = {task}
    if signal is not None:
        waiting.add(asyncio.ensure_future(signal.wait()))
    try:
        await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if signal is not None and signal.cancelled:
            raise RunAborted(signal.reason)
        raise TimeoutError(f"it took more than {limit} seconds")
    finally:
        for each in waiting:
            each.cancel()
