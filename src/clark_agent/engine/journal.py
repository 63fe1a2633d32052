"""The interface through which the engine records a run.

The engine calls the journal for everything that enters a run from outside, before that has an
effect. A run without a log has a `Journal`, which records nothing, so the engine never checks
whether there is a log. The journal of a run log is `clark_agent.run_log.writer.RunWriter`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from clark_agent._finished import FINISHED
from clark_agent._kept_text import Pieces
from clark_agent.clock import Clock
from clark_agent.events import AgentEvent
from clark_agent.steering import SteeringReceipt
from clark_agent.stream import StreamRequest
from clark_agent.types import AgentMessage, AssistantMessage, ToolResultMessage

if TYPE_CHECKING:
    from clark_agent.budget import BudgetLimit
    from clark_agent.engine.answer import OpenAnswer
    from clark_agent.engine.call import Call
    from clark_agent.engine.consult import Consultation
    from clark_agent.engine.resumption import Resumption
    from clark_agent.engine.run import Run
    from clark_agent.errors import LoopError
    from clark_agent.result import LoopOutcome
    from clark_agent.tools import ToolRegistry
    from clark_agent.tools.base import ToolResult

__all__ = ["Emit", "Journal"]

Emit: TypeAlias = Callable[[AgentEvent], Awaitable[None]]


class Journal:
    """Records nothing.

    Contract: methods that return None return at once. What they record is safe when `barrier`
    has been awaited. They raise `RunLogError` if the run must not continue without its log.
    """

    __slots__ = ("clock",)

    keeps_progress = False
    """Whether it records the progress of calls."""
    first: int | None = None
    """The number of the first record that this process writes, if it records."""
    is_traced = True
    """Whether a tracer may follow the run. A replay is not traced."""
    is_replay = False
    """Whether the run is a replay, which leaves nothing behind."""
    receives = False
    """Whether it passes messages from other processes to the run, which may cancel it."""

    publish: Callable[[AgentEvent], None] | None = None
    """Shows the deltas of answers to other processes, if it does that."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        """The clock of the run. Its readings may be recorded."""

    @property
    def can_wait(self) -> bool:
        """Whether the run can be suspended, so that another process finds it."""
        return False

    # --- the beginning and the end --------------------------------------------------------------

    def began(self, run: Run, prompts: Sequence[AgentMessage]) -> None:
        """The run begins."""

    def resumed(self, run: Run, resumption: Resumption) -> None:
        """The run of another process is continued."""

    def ended(self, run: Run, outcome: LoopOutcome, limit: BudgetLimit | None) -> None:
        """The run has ended; ``limit`` is the limit of the budget that it reached."""

    def suspended(
        self, run: Run, calls: Sequence[Call], results: Sequence[ToolResultMessage]
    ) -> None:
        """The run ends here for now. Some of the calls wait, and have placeholders as results."""

    def let_go(self) -> None:
        """This process gives the run up. Only results of tools are recorded from now on."""

    def closing(self) -> None:
        """The run is over. From now on a lost record does not raise."""

    def failed(self, failure: LoopError) -> None:
        """The run has ended with an error."""

    def barrier(self) -> Awaitable[None]:
        """Wait until everything so far is safe."""
        return FINISHED

    def settle(self, grace: float, *, is_cancelled: bool) -> Awaitable[None]:
        """Wait until everything is safe; if the run is cancelled, at most ``grace`` seconds. Does
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
        *,
        before_request: tuple[int, str] | None = None,
    ) -> None:
        """Messages enter the transcript that came neither from the model nor from a tool. If a
        plugin adds them before a request: the turn, and the name of the plugin.
        """

    def accepted(self, receipt: SteeringReceipt) -> None:
        """A message was sent to the run, and may have an effect. Does not raise."""

    def message_sent(self, note: Callable[[], None]) -> None:
        """A message was sent, on any thread: call ``note`` in the run's event loop, which records
        the messages that wait.
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
        """A plugin has returned the messages for the model."""

    def gated(self, plugin: str, allow: tuple[str, ...] | None) -> None:
        """A gate has returned the tools that the model may call."""

    def asked(self, request: StreamRequest, turn: int) -> None:
        """The model is about to be called."""

    def answered(
        self, answer: OpenAnswer, message: AssistantMessage, discarded: str | None = None
    ) -> None:
        """The model has answered; ``discarded`` is why the answer does not enter the transcript."""

    def consulted_before(self, plugin: str, request: StreamRequest) -> Consultation | None:
        """How a model has answered this plugin, if another process has asked it the same just
        before it stopped.
        """
        return None

    def consulted(self, consultation: Consultation) -> None:
        """A model has answered a plugin, or failed to."""

    # --- tools ----------------------------------------------------------------------------------

    def tools_changed(self, tools: ToolRegistry) -> None:
        """These are the tools from this turn on."""

    @property
    def place(self) -> tuple[int, int] | None:
        """Its position: the number of the next record, and of the steps since the last one."""
        return None

    def tool_started(self, call: Call) -> Awaitable[None]:
        """A tool is about to run. Await the result before it runs."""
        return FINISHED

    def tool_progressed(self, position: int, partial: ToolResult) -> None:
        """A tool reported progress."""

    @property
    def may_lose(self) -> bool:
        """Whether the run continues without its records if they cannot be written."""
        return False

    def keep(self, name: str, pieces: Pieces) -> bool:
        """Keep a large result with the records that follow. Return False if that is impossible."""
        return False

    def tool_ended(self, call: Call, result: ToolResult) -> None:
        """A call has its result."""

    def call_suspended(self, call: Call) -> None:
        """A call waits, and has a placeholder as its result."""

    def batch_ended(self, calls: Sequence[Call], results: Sequence[ToolResultMessage]) -> None:
        """The results of these calls enter the transcript."""

    # --- steps: the moments at which an interruption can be placed ------------------------------

    def emitting(self, emit: Emit) -> Emit:
        """How to emit the events of the run."""
        return emit

    def hook_asked(self) -> Awaitable[None]:
        """A hook is about to be called."""
        return FINISHED

    def hook_answered(self) -> Awaitable[None]:
        """The hook has returned."""
        return FINISHED

    def decided(self) -> None:
        """A decision was made that depends on events outside the run."""

    def interrupted(
        self, why: Literal["cancelled", "out_of_time"], noticed_by: int | None = None
    ) -> None:
        """The run was cancelled here, or its time is over; ``noticed_by`` is the position of the
        call that noticed it, if one did.
        """
