"""Where to continue a run that another process has started: an argument of the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from clark_agent.engine.spending import RunCost
from clark_agent.plugins.base import EarlierCall
from clark_agent.steering import SteeringReceipt
from clark_agent.tools.base import ToolResult
from clark_agent.types import AgentMessage, AssistantMessage

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


class AfterBatch(Struct, frozen=True):
    """All calls of the newest answer have their results. They may have voted to end the run."""

    message: AssistantMessage
    calls: EarlierResults
    arguments: Mapping[int, Any] = {}


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
    cost: RunCost
    costs_below: tuple[RunCost, ...] = ()
    """The cost of each run below it."""
    purposes: tuple[str, ...] = ()
    """Why messages were added that neither the model nor a tool gave."""
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

    @property
    def turns_before(self) -> int:
        """How many turns there are before the answer that is announced again, if one is."""
        return self.turns - isinstance(self.where, AfterAnswer)
