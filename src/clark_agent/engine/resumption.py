"""Where a run goes on that another process has begun: an argument of the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from clark_agent.engine.spending import RunCost
from clark_agent.plugins.base import EarlierCall
from clark_agent.steering import SteeringReceipt
from clark_agent.tools.base import ToolResult
from clark_agent.types import AgentMessage, AssistantMessage, Usage

__all__ = [
    "NEW_TURN",
    "AfterAnswer",
    "AfterBatch",
    "EarlierResults",
    "FinalAnswer",
    "NewTurn",
    "Resumption",
    "Where",
]

EarlierResults: TypeAlias = Mapping[int, ToolResult | None]
"""Calls by position: those with a result, and those (None) that had begun without one."""


class NewTurn(Struct, frozen=True):
    """The model is asked next."""


class AfterAnswer(Struct, frozen=True):
    """The newest answer has entered the transcript, and not all that it asks for is done."""

    message: AssistantMessage
    offered: frozenset[str] | None
    """The tools that the model was offered; None: all."""
    calls: EarlierResults


class AfterBatch(Struct, frozen=True):
    """All calls of the newest answer have their results. They may have voted to end the run."""

    message: AssistantMessage
    calls: EarlierResults


class FinalAnswer(Struct, frozen=True):
    """A text of the model was taken for the final answer."""


Where: TypeAlias = NewTurn | AfterAnswer | AfterBatch | FinalAnswer

NEW_TURN = NewTurn()


class Resumption(Struct, frozen=True, kw_only=True):
    """Where to go on, and what other processes have done so far."""

    where: Where
    journal: Callable[..., Any]
    """Makes the `Journal` that goes on with the log; takes what `Journals.journal` takes, but for
    the id."""
    turns: int
    """How many turns have their answer."""
    messages: tuple[AgentMessage, ...] = ()
    """What the run has added, without an answer that is announced again."""
    usage: Usage = Usage()
    children_usage: Usage = Usage()
    costs: tuple[RunCost, ...] = ()
    """Of this run and of each below it."""
    purposes: tuple[str, ...] = ()
    """Why messages were added that neither the model nor a tool gave."""
    outcomes: tuple[EarlierCall, ...] = ()
    """All calls that have their result."""
    requests: tuple[int, ...] = ()
    """How long the transcript was before each request."""
    worked_ms: int = 0
    """How long other processes have worked on the run."""
    waiting: tuple[SteeringReceipt, ...] = ()
    """Messages that were accepted and never delivered."""
    sourced: frozenset[str] = frozenset()
    """The tools that a source had given, by name."""

    @property
    def turns_before(self) -> int:
        """How many turns there are before the answer that is announced again, if one is."""
        return self.turns - isinstance(self.where, AfterAnswer)
