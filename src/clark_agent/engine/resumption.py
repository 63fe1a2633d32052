"""Where to continue a run that another process has started: an argument of the loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from clark_agent.config import LoopConfig
from clark_agent.engine.spending import RunCost
from clark_agent.errors import LoopError
from clark_agent.plugins.base import EarlierCall
from clark_agent.result import RunResult
from clark_agent.steering import SteeringReceipt
from clark_agent.tools.base import ToolResult
from clark_agent.tracing import Carrier
from clark_agent.types import AgentContext, AgentMessage, AssistantMessage, RunIdentity
from clark_agent.waiting import Deny, Expired, GiveResult, Verdict, WaitingRequest

__all__ = [
    "NEW_TURN",
    "AfterAnswer",
    "AfterBatch",
    "AskedEarlier",
    "EarlierChild",
    "EarlierChildren",
    "EarlierResults",
    "EarlierWait",
    "FinalAnswer",
    "NewTurn",
    "Resumption",
    "Where",
]


class AskedEarlier(Struct, frozen=True):
    """A request about a call, and its verdict if it has one."""

    request: WaitingRequest
    verdict: Verdict | None = None
    by: str | None = None


class EarlierWait(Struct, frozen=True):
    """A call that waits, or whose request was decided while no process worked on the run."""

    asked: tuple[AskedEarlier, ...] = ()
    """All requests about it, in order. Only the last can be open."""
    child_run_ids: tuple[str, ...] = ()
    """The runs that it waits for, if it does."""
    decisions: tuple[dict[str, Any], ...] = ()
    """Which plugins affected the call before, and how."""

    @property
    def needs_tool(self) -> bool:
        """Whether the call will run its tool, as far as is known."""
        if not self.asked:
            return True
        last = self.asked[-1]
        if isinstance(last.verdict, (Deny, Expired)):
            return False
        if last.request.needs == "result":
            return last.request.continues
        return not isinstance(last.verdict, GiveResult)


class EarlierChildren(Protocol):
    """The child runs that other processes have started."""

    def can_continue(self, tool_call_id: str) -> bool:
        """Whether the child runs of a call can be found. Old logs do not say in which turn they
        were started.
        """
        ...

    def find(
        self, config: LoopConfig, turn: int, position: int, number: int
    ) -> EarlierChild | None:
        """The child run of this number, from 0, of the call in that place."""
        ...


class EarlierChild(Struct, frozen=True, kw_only=True):
    """A child run of another process: where to continue it, or its result."""

    prompts: tuple[AgentMessage, ...]
    identity: RunIdentity
    ended: RunResult | LoopError | None = None
    """Its result or its error, if it has ended."""
    resume: Callable[[], Awaitable[tuple[AgentContext, Resumption]]] | None = None
    """Locks its log, and returns where to continue. Raises `clark_agent.errors.RunBusy`."""


EarlierResults: TypeAlias = Mapping[int, ToolResult | None]
"""Calls by position: those with a result, and those (None) that started and have none."""


class NewTurn(Struct, frozen=True):
    """The model is called next."""


class AfterAnswer(Struct, frozen=True):
    """The newest answer is in the transcript, and not all its calls have results."""

    message: AssistantMessage
    offered: frozenset[str] | None
    """The offered tools; None: all."""
    calls: EarlierResults
    arguments: Mapping[int, Any] = {}
    """The arguments that calls ran with, where they differ from the model's."""
    waits: Mapping[int, EarlierWait] = {}
    """The calls that are suspended, by position."""
    acted_on: Mapping[int, EarlierWait] = {}
    """What calls had waited for that have started since, by position."""


class AfterBatch(Struct, frozen=True):
    """All calls of the newest answer have their results. They may have voted to end the run."""

    message: AssistantMessage
    calls: EarlierResults
    arguments: Mapping[int, Any] = {}
    waits: Mapping[int, EarlierWait] = {}
    acted_on: Mapping[int, EarlierWait] = {}


class FinalAnswer(Struct, frozen=True):
    """A text of the model was accepted as the final answer."""


Where: TypeAlias = NewTurn | AfterAnswer | AfterBatch | FinalAnswer

NEW_TURN = NewTurn()


class Resumption(Struct, frozen=True, kw_only=True):
    """Where to continue, and what other processes have done so far."""

    where: Where
    journal: Callable[..., Any]
    """Makes the `Journal` that continues the log; takes the arguments of `Journals.journal`, except
    the id."""
    turns: int
    """How many turns have an answer."""
    messages: tuple[AgentMessage, ...] = ()
    """The messages that the run has added, without an answer that is announced again."""
    costs: tuple[RunCost, ...]
    """The cost of the run by model, its own model first."""
    costs_below: tuple[RunCost, ...] = ()
    """The cost of each run below it."""
    purposes: tuple[str, ...] = ()
    """Why messages were added that neither the model nor a tool gave."""
    added_by: frozenset[str] = frozenset()
    """The plugins that have added messages in the turn that has no answer yet."""
    outcomes: tuple[EarlierCall, ...] = ()
    """All calls that have a result."""
    requests: tuple[int, ...] = ()
    """How long the transcript was before each request."""
    worked_ms: int = 0
    """How long other processes have worked on the run."""
    waiting: tuple[SteeringReceipt, ...] = ()
    """Messages that were accepted and never delivered."""
    sourced: frozenset[str] = frozenset()
    """The names of the tools from a tool source."""
    traces: tuple[Carrier, ...] = ()
    """The traces that other processes have recorded."""
    suspended_at: int | None = None
    """When the run was suspended, if it was until now."""
    children: EarlierChildren
    """The child runs that other processes have started."""

    def has_added(self, plugin: str, turn: int) -> bool:
        """Whether a plugin has added messages before the request of this turn."""
        return turn == self.turns + 1 and plugin in self.added_by

    @property
    def turns_before(self) -> int:
        """How many turns there are before the answer that is announced again, if one is."""
        return self.turns - isinstance(self.where, AfterAnswer)
