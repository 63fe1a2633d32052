"""Tracing: an object outside of a run that follows it, from its start to its end.

A `Tracer` gets each run as it starts, as a `TracedRun`, and returns the `RunTrace` that follows it.
The tracer of a run is that plugin of its config that has ``trace_run``; else the tracer of the run
above it; else that of `ALL_RUNS`, which is read once for each run.

Contract: a trace observes. What a tracer raises is logged, and the run continues. The methods are
called in the run's event loop and return at once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from clark_agent.effects import Effects
from clark_agent.events import AgentEvent
from clark_agent.plugins.base import Tracer
from clark_agent.prices import ModelRef, Price
from clark_agent.result import RunResult
from clark_agent.types import RunIdentity

__all__ = ["ALL_RUNS", "AllRuns", "Carrier", "RunTrace", "TracedRun", "Tracer"]

logger = logging.getLogger(__name__)

Carrier = Mapping[str, str]
"""What identifies a trace to other processes: W3C ``traceparent`` and ``tracestate``, by name."""


class TracedRun(Struct, frozen=True, kw_only=True, eq=False):
    """A run that starts."""

    identity: RunIdentity | None
    """The identity, if it is known already."""
    identify: Callable[[], RunIdentity]
    """Makes the identity if there is none. Not to be called before the first `TurnStart`: a run
    whose host gave it no identity does not announce one.
    """
    agent_name: str | None = None
    conversation_id: str | None = None
    model: ModelRef = ModelRef()
    prices: Mapping[str, Price]
    """The prices that the host gave."""
    tool_call_id: str | None = None
    """For a child run: the call that started it."""
    turns: int = 0
    """How many turns are over, if the run is resumed."""
    is_resumed: bool = False
    """Whether other processes have worked on the run, traced or not."""
    traces: tuple[Carrier, ...] = ()
    """What `RunTrace.carrier` was in the other processes that worked on the run, oldest first."""
    has_model: bool = True
    """False: the run makes one call for a client, such as that of an MCP server, and what stands
    for its model is none. Only the tool is worth a trace."""
    suspended_ms: int | None = None
    """How long the run was suspended before it was resumed, if it was."""


class RunTrace:
    """Follows one run. The methods of this class do nothing; override those that are needed."""

    carrier: Carrier = MappingProxyType({})
    """Recorded in the log of the run, for the process that resumes it."""
    observes: tuple[type, ...] = ()
    """The classes of events that `on_event` wants."""

    def effects(self, effects: Effects) -> Effects:
        """The effects of the run, wrapped. Child runs inherit those that were given."""
        return effects

    def around(self, work: Coroutine[Any, Any, RunResult]) -> Awaitable[RunResult]:
        """The work of the run, wrapped."""
        return work

    def on_event(self, event: AgentEvent, /) -> None:
        """Handle an event of the run."""

    def ended(self, result: RunResult) -> None:
        """The run has its result."""

    def failed(self, error: BaseException) -> None:
        """The run ended with an error."""


class AllRuns:
    """The tracer of the runs that have no other."""

    __slots__ = ("tracer",)

    def __init__(self) -> None:
        self.tracer: Tracer | None = None


ALL_RUNS = AllRuns()


def start_trace(tracer: Tracer, run: TracedRun) -> RunTrace | None:
    """The trace of a run; None if the tracer raised."""
    try:
        return tracer.trace_run(run)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # in a plain function, so it is no cancellation of the run
        logger.exception("the tracer %r raised; the run is not traced", tracer)
        return None


async def follow(trace: RunTrace, work: Coroutine[Any, Any, RunResult]) -> RunResult:
    """Await the work of a run, and pass its end to the trace."""
    try:
        result = await trace.around(work)
    except BaseException as error:
        _report(trace.failed, error)
        raise
    _report(trace.ended, result)
    return result


def _report(method: Callable[[Any], None], end: Any) -> None:
    try:
        method(end)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # in a plain function, so it is no cancellation of the run
        logger.exception("a trace raised at the end of its run")
