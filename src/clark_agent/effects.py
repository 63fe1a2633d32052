"""The effects of a run: it calls the model, runs tools, and starts child runs.

These go through one object, the setting ``effects``, and nothing else in the engine does them.
Subclass `Effects` to record, trace, move or replace them; call ``super()`` for the effect itself::

    class Traced(Effects):
        def run_tool(self, tool, args, ctx):
            print("runs", tool.name)
            return super().run_tool(tool, args, ctx)

Child runs inherit the effects of the run above, unless their config has its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable
from typing import Any, Protocol

from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ConfigError
from clark_agent.result import RunResult
from clark_agent.stream import StreamEvent, StreamFn, StreamRequest
from clark_agent.tools.base import AgentTool, ToolContext, ToolResult
from clark_agent.tools.repair import close_match

__all__ = ["DIRECT", "Child", "Effects"]


class Child(Protocol):
    """A child run that is about to start: `clark_agent.sub_agents.ChildRun`."""

    @property
    def tool_call_id(self) -> str:
        """The call that starts it."""
        ...

    def start(self) -> Awaitable[RunResult]:
        """Run it."""
        ...


_METHODS = ("ask_model", "consult_model", "run_tool", "run_child")


class Effects:
    """The effects themselves. All methods are called in the run's event loop.

    Contract: an exception of an override counts as raised by the model, the tool or the child.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            meant = close_match(name, _METHODS, cutoff=0.85)
            if callable(value) and name not in _METHODS and meant is not None:
                raise ConfigError(
                    f"{cls.__qualname__} has a method {name!r}; did you mean {meant!r}?"
                )

    def ask_model(
        self, stream: StreamFn, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterable[StreamEvent]:
        """Call the model: the config's transport, with the request of a turn."""
        return stream(request, signal)

    def consult_model(
        self, stream: StreamFn, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterable[StreamEvent]:
        """Call a model for a plugin, beside the turn. The same as `ask_model` by default."""
        return self.ask_model(stream, request, signal)

    def run_tool(self, tool: AgentTool, args: Any, ctx: ToolContext) -> Awaitable[ToolResult]:
        """Run a tool. Its start is already in the journal."""
        return tool.execute(args, ctx)

    def run_child(self, child: Child) -> Awaitable[RunResult]:
        """Start a run below this one."""
        return child.start()


DIRECT = Effects()
