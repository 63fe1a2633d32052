"""The tools of a turn, if some of them come from a tool source."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from clark_agent.engine.hooks import call_hook
from clark_agent.engine.resumption import AfterAnswer, Resumption
from clark_agent.engine.run import Run
from clark_agent.errors import ConfigError
from clark_agent.plugins.hooks import Hook
from clark_agent.tool_source import ToolSourceContext
from clark_agent.tools import ToolRegistry

__all__ = ["check_waiting_calls", "refresh_tools"]

logger = logging.getLogger(__name__)


async def refresh_tools(run: Run, source: Hook, turn: int) -> None:
    """Get the current tools of the source. If it fails, they stay as they were."""
    context = ToolSourceContext(turn, run.transcript.view(), run.identify(), run.signal, run.deps)
    try:
        given: Any = await call_hook(run, source, context)
        if given is run.sourced:
            return
        registry = _with(run.config.registry, given)
    except Exception:
        logger.exception("the tool source %r failed; the tools stay as they were", source.name)
        return
    run.sourced = given
    if registry.schemas == run.registry.schemas:
        if all(registry[name] is run.registry[name] for name in registry):
            return
    else:
        run.journal.tools_changed(registry)
    run.registry = registry


def check_waiting_calls(run: Run, resumption: Resumption) -> None:
    """Raise `ConfigError` if a call waits for a tool that the source no longer provides.

    Called before the run continues: the call is not lost, and a later resume finds it.
    """
    where = resumption.where
    if not isinstance(where, AfterAnswer):
        return
    for position, call in enumerate(where.message.tool_calls):
        wait = where.waits.get(position)
        is_waiting = position not in where.calls and (wait is None or wait.needs_tool)
        if is_waiting and call.name in resumption.sourced and call.name not in run.registry:
            raise ConfigError(
                f"a call in the log waits for the tool {call.name!r}, which the tool source does "
                "not provide now; resume again when it does"
            )


def _with(own: ToolRegistry, given: Iterable[Any]) -> ToolRegistry:
    """The tools of the config, followed by those of the source that have another name."""
    more = ToolRegistry(given)
    for name in own.names:
        if name in more:
            logger.warning("ignored the tool %r of the tool source: the config has one too", name)
    return ToolRegistry([*own.values(), *[tool for name, tool in more.items() if name not in own]])
