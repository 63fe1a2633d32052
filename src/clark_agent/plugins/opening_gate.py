"""OpeningGate: restricts the tools of the first turn."""

from __future__ import annotations

from collections.abc import Iterable

from clark_agent.errors import ConfigError
from clark_agent.plugins.base import ToolGateContext

__all__ = ["OpeningGate"]


class OpeningGate:
    """Restricts the first model call of a run to the given tools, as far as they are registered."""

    name = "opening_gate"

    def __init__(self, tools: Iterable[str]) -> None:
        if isinstance(tools, str):
            raise ConfigError(f"OpeningGate takes the names of tools, not one string: [{tools!r}]")
        self.tools = frozenset(tools)

    def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> frozenset[str] | None:
        """Return the opening tools in the first turn, and None after it."""
        if ctx.iteration != 0:
            return None
        return self.tools.intersection(ctx.available_tool_names)
