"""Tools that change during a run.

A `ToolSource` is called once a turn, before the request, for tools in addition to those of the
config: the tools of a connected server, or those that a search has found. Changes are recorded in
the run log, and a replay takes them from there::

    class Found:
        def tools_for_turn(self, ctx):
            return self.tools  # the same object while nothing has changed

    config = LoopConfig(stream=stream, tools=[search], tool_source=Found())
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol

from msgspec import Struct

from clark_agent._typing import DepsT_co
from clark_agent.cancellation import CancellationToken
from clark_agent.plugins.base import MaybeAsync
from clark_agent.tools import ToolLike
from clark_agent.types import AgentMessage, RunIdentity

__all__ = ["ToolSource", "ToolSourceContext"]


class ToolSourceContext(Struct, Generic[DepsT_co], frozen=True):
    """The context of a tool source."""

    turn: int
    """The turn that is about to call the model, from 1."""
    messages: Sequence[AgentMessage]
    """The transcript, before the transforms."""
    identity: RunIdentity
    """The identity of the run."""
    signal: CancellationToken
    deps: DepsT_co = None  # type: ignore[assignment]
    """The dependencies of the run."""


class ToolSource(Protocol):
    """A source of tools that may change during a run."""

    def tools_for_turn(self, ctx: ToolSourceContext) -> MaybeAsync[Iterable[ToolLike]]:
        """The tools of this turn, in addition to those of the config.

        Contract: plain or async. Returns the same object as last time if nothing has changed, which
        costs nothing and keeps the provider's cache. If it raises, that is logged and the tools
        stay unchanged. A tool of the config is never replaced by one of the same name.
        """
        ...
