"""What is written down of a run, as the engine sees it.

The engine tells the journal of everything that comes into a run from outside, before that has an
effect. A run without a log has a `Journal`, which keeps nothing: the engine never asks whether
there is one. The journal of a run log is `clark_agent.run_log.writer.RunWriter`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from clark_agent._finished import FINISHED
from clark_agent.clock import Clock
from clark_agent.events import AgentEvent
from clark_agent.steering import SteeringReceipt
from clark_agent.stream import StreamRequest
from clark_agent.types import AgentMessage, AssistantMessage, ToolResultMessage

if TYPE_CHECKING:
    from clark_agent.budget import BudgetLimit
    from clark_agent.engine.answer import OpenAnswer
    from clark_agent.engine.call import Call
    from clark_agent.engine.resumption import Resumption
    from clark_agent.engine.run import Run
    from clark_agent.errors import LoopError
    from clark_agent.result import LoopOutcome
    from clark_agent.tools import ToolRegistry
    from clark_agent.tools.base import ToolResult

__all__ = ["Emit", "Journal"]

Emit: TypeAlias = Callable[[AgentEvent], Awaitable[None]]


class Journal:
    """Keeps nothing.

    Contract: methods that return None return at once. What they record is safe when `barrier`
    has been awaited. They raise `RunLogError` if the run must not go on without its log.
    """

    __slots__ = ("clock",)

    keeps_progress = False
    """Whether it wants to know how far a call has come."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        """The clock of the run. What it says may be kept."""

    # --- the beginning and the end --------------------------------------------------------------

    def began(self, run: Run, prompts: Sequence[AgentMessage]) -> None:
        """The run begins."""

    def resumed(self, run: Run, resumption: Resumption) -> None:
        """The run goes on that another process has begun."""

    def ended(self, run: Run, outcome: LoopOutcome, limit: BudgetLimit | None) -> None:
        """The run has come to its end; ``limit`` is what of the budget ran out."""

    def closing(self) -> None:
        """The run is over. From now on a record that is lost stops nothing."""

    def failed(self, failure: LoopError) -> None:
        """The run has ended with an error."""

    def barrier(self) -> Awaitable[None]:
        """Await that everything so far is safe."""
        return FINISHED

    def settle(self, grace: float, *, is_cancelled: bool) -> Awaitable[None]:
        """Await that everything is safe; once the run is cancelled, at most so many seconds. Does
        not raise.
        """
        return FINISHED

    def close(self) -> None:
        """Nothing follows."""

    # --- messages -------------------------------------------------------------------------------

    def added(
        self,
        source: Literal["turn", "follow_up", "loop"],
        messages: Sequence[AgentMessage],
        purposes: Sequence[str],
        receipts: Sequence[SteeringReceipt] = (),
    ) -> None:
        """Messages enter the transcript that neither the model nor a tool gave."""

    def accepted(self, receipt: SteeringReceipt) -> None:
        """A message was sent to the run, and may have an effect. Does not raise."""

    def message_sent(self, note: Callable[[], None]) -> None:
        """A message was sent, on any thread: have ``note`` called in the run's event loop, which
        says what waits.
        """

    # --- the model ------------------------------------------------------------------------------

    def edited(
        self,
        plugin: str,
        before: Sequence[AgentMessage],
        after: Sequence[AgentMessage],
        *,
        is_lasting: bool = False,
    ) -> None:
        """A plugin was asked what the model should see."""

    def gated(self, plugin: str, allow: tuple[str, ...] | None) -> None:
        """A gate was asked what the model may call."""

    def asked(self, request: StreamRequest, turn: int) -> None:
        """The model is about to be asked."""

    def answered(
        self, answer: OpenAnswer, message: AssistantMessage, discarded: str | None = None
    ) -> None:
        """The model has answered; ``discarded`` says why that does not enter the transcript."""

    # --- tools ----------------------------------------------------------------------------------

    def tools_changed(self, tools: ToolRegistry) -> None:
        """From this turn on these are the tools."""

    @property
    def place(self) -> tuple[int, int] | None:
        """Where it is: which record is next, and how many steps there were since the last."""
        return None

    def tool_started(self, call: Call) -> Awaitable[None]:
        """A tool is about to run. Await that this is safe."""
        return FINISHED

    def tool_progressed(self, position: int, partial: ToolResult) -> None:
        """A tool says how far it is."""

    def tool_ended(self, call: Call, result: ToolResult) -> None:
        """A call has its result."""

    def batch_ended(self, calls: Sequence[Call], results: Sequence[ToolResultMessage]) -> None:
        """The results of these calls enter the transcript."""

    # --- steps: the moments at which an interruption can be placed ------------------------------

    def emitting(self, emit: Emit) -> Emit:
        """How to emit the events of the run."""
        return emit

    def hook_asked(self) -> Awaitable[None]:
        """A hook is about to be asked."""
        return FINISHED

    def hook_answered(self) -> Awaitable[None]:
        """The hook has answered."""
        return FINISHED

    def decided(self) -> None:
        """A decision was made that depends on what others have done."""

    def interrupted(
        self, why: Literal["cancelled", "out_of_time"], noticed_by: int | None = None
    ) -> None:
        """The run was cancelled here, or its time is over; ``noticed_by`` is the position of the
        call that found out, if one did.
        """
