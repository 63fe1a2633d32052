"""What a run returns: `RunResult`, with its `LoopOutcome`."""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

from msgspec import Struct

from clark_agent._typing import OutputT_co
from clark_agent.budget import BudgetLimit, Spent
from clark_agent.prices import Bill
from clark_agent.types import AgentMessage, AssistantMessage, Usage
from clark_agent.waiting import WaitingRequest

__all__ = ["LoopOutcome", "RunResult"]


class LoopOutcome(StrEnum):
    """How a run ended that did not fail."""

    DONE = "done"
    """The model was done, or a tool batch voted to end."""
    WRAPPED_UP = "wrapped_up"
    """The model finished after it was asked to wrap up, because its turns ran out."""
    HIT_MAX_ITERATIONS = "hit_max_iterations"
    """The turns ran out while there was more to do."""
    OUT_OF_BUDGET = "out_of_budget"
    """The budget ran out while there was more to do; see ``RunResult.limit``."""
    SUSPENDED = "suspended"
    """It waits for a decision, a time or an event; see ``RunResult.waiting``. Its log can be
    resumed."""

    @property
    def is_complete(self) -> bool:
        """Whether the model finished by itself."""
        return self in (LoopOutcome.DONE, LoopOutcome.WRAPPED_UP)


class RunResult(Struct, Generic[OutputT_co], frozen=True):
    """The result of a run: its own messages, not the whole transcript."""

    messages: tuple[AgentMessage, ...]
    outcome: LoopOutcome
    usage: Usage = Usage()
    """The tokens of all calls to the model, including retries."""
    undelivered: tuple[AgentMessage, ...] = ()
    """Steering that was accepted and not delivered."""
    output: OutputT_co = None  # type: ignore[assignment]
    """The output of the type that the config or the agent asks for, or the answer that a
    `finish_tool` was called with. None if the config asks for none."""
    limit: BudgetLimit | None = None
    """The limit of the budget that ended the run, if one did."""
    spent: Spent | None = None
    """What was spent of the budget, by this run and all runs that share it."""
    tree_usage: Usage = Usage()
    """The tokens of this run and of its child runs."""
    bill: Bill = Bill()
    """The tokens by model, which the cost is computed from."""
    waiting: tuple[WaitingRequest, ...] = ()
    """What a suspended run waits for, with the requests of its child runs."""

    @property
    def cost(self) -> float | None:
        """The cost of ``usage`` in US dollars, or as in ``Budget.prices``. None if a price is not
        known. The price is looked up now, unless the budget has it.
        """
        return self.bill.cost

    @property
    def tree_cost(self) -> float | None:
        """The cost of ``tree_usage``; None if a price is not known."""
        return self.bill.tree_cost

    @property
    def text(self) -> str:
        """The last text of the model."""
        for message in reversed(self.messages):
            if isinstance(message, AssistantMessage):
                return message.plain_text
        return ""

    def _repr_html_(self) -> str:
        """The run for a notebook: its messages, with folded calls."""
        from clark_agent.view.notebook import result_html  # only notebooks need it

        return result_html(self)
