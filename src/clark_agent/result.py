"""What a run returns: `RunResult`, and `LoopOutcome`, which says how the run ended."""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

from msgspec import Struct

from clark_agent._typing import OutputT_co
from clark_agent.budget import BudgetLimit, Spent
from clark_agent.types import AgentMessage, AssistantMessage, Usage

__all__ = ["LoopOutcome", "RunResult"]


class LoopOutcome(StrEnum):
    """How a run ended that did not fail."""

    DONE = "done"
    """The model was done, or a tool batch voted to end."""
    WRAPPED_UP = "wrapped_up"
    """The model closed cleanly after it was told that its turns run out."""
    HIT_MAX_ITERATIONS = "hit_max_iterations"
    """The turns ran out while there was more to do."""
    OUT_OF_BUDGET = "out_of_budget"
    """The budget ran out while there was more to do; ``RunResult.limit`` says what of it."""

    @property
    def is_complete(self) -> bool:
        """Whether the model came to an end of its own."""
        return self in (LoopOutcome.DONE, LoopOutcome.WRAPPED_UP)


class RunResult(Struct, Generic[OutputT_co], frozen=True):
    """What a run has brought: its own messages, not the whole transcript."""

    messages: tuple[AgentMessage, ...]
    outcome: LoopOutcome
    usage: Usage = Usage()
    """The tokens of all calls to the model, those asked again included."""
    undelivered: tuple[AgentMessage, ...] = ()
    """Steering that was accepted and came too late."""
    output: OutputT_co = None  # type: ignore[assignment]
    """The output of the type that the config or the agent asks for, or the answer that a
    `finish_tool` was called with. None if the config asks for none."""
    limit: BudgetLimit | None = None
    """What of the budget ran out, if that ended the run."""
    spent: Spent | None = None
    """What was spent of the budget, by this run and all that share it."""
    tree_usage: Usage = Usage()
    """The tokens of this run and of its child runs."""

    @property
    def text(self) -> str:
        """What the model said last."""
        for message in reversed(self.messages):
            if isinstance(message, AssistantMessage):
                return message.plain_text
        return ""
