"""The output that a run must return: which attempts the model has left, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clark_agent._text import well_formed
from clark_agent.engine.resumption import Resumption
from clark_agent.errors import ModelRetry, OutputError
from clark_agent.output import Output, OutputMode
from clark_agent.result import LoopOutcome
from clark_agent.run_context import RunContext
from clark_agent.types import AgentMessage, AssistantMessage, ToolResultMessage

__all__ = ["REJECTED", "Goal"]

REJECTED = "output_rejected"
"""The purpose of a message that tells the model why its output was not accepted."""

_NO_REASON = "The output was not accepted. Try again."
_ENDED_EARLY = {
    LoopOutcome.HIT_MAX_ITERATIONS: "the run reached max_iterations first",
    LoopOutcome.OUT_OF_BUDGET: "the run reached the limit of its budget first",
}


class Goal:
    """The output of one run."""

    __slots__ = ("_attempts", "_mode", "output")

    def __init__(self, output: Output[Any], mode: OutputMode | None) -> None:
        self.output = output
        self._mode = mode
        self._attempts = 0

    def restore(self, resumption: Resumption) -> None:
        """Count the attempts that another process has seen."""
        # A batch that has not ended is counted when it ends: its results are not messages yet.
        self._attempts = list(resumption.purposes).count(REJECTED)
        is_counted = False
        for message in resumption.messages:
            if isinstance(message, AssistantMessage):
                is_counted = False
            elif not is_counted and self._is_attempt(message):
                is_counted = True
                self._attempts += 1

    async def accept(self, message: AssistantMessage, ctx: RunContext[Any]) -> Any:
        """The output in an answer without tool calls.

        Raises `ModelRetry` with the reason if there is none, and `OutputError` if the model has no
        attempt left.
        """
        try:
            value = self.output.parse(message.plain_text, self._mode)
            await self.output.check(value, ctx)
        except ModelRetry as retry:
            reason = well_formed(str(retry)) or _NO_REASON
            self._count(reason)
            raise ModelRetry(reason) from retry
        return value

    def check_batch(self, results: Sequence[ToolResultMessage]) -> None:
        """Count failed calls of the finish tool. Raises `OutputError` if no attempt is left."""
        for result in results:
            if result.is_error and self._is_attempt(result):
                self._count(result.plain_text)
                return  # several calls of one answer are one attempt

    def _is_attempt(self, message: AgentMessage) -> bool:
        """Whether it is a failed call of the finish tool, and failed not because of steering."""
        if not isinstance(message, ToolResultMessage) or not message.is_error:
            return False
        details: Any = message.details
        is_steered = isinstance(details, dict) and details.get("reason") == "steered"
        return message.tool_name == self.output.tool.name and not is_steered

    def missing(self, outcome: LoopOutcome) -> OutputError:
        """The error of a run that ends without its output."""
        reason = _ENDED_EARLY.get(outcome, "the run was ended before the model gave one")
        return OutputError(reason, self._attempts)

    def _count(self, reason: str) -> None:
        self._attempts += 1
        if self._attempts > self.output.retries:
            tries = "the attempt" if self._attempts == 1 else f"{self._attempts} attempts"
            raise OutputError(
                f"{tries} of the model failed; the last reason was: {reason}", self._attempts
            )
