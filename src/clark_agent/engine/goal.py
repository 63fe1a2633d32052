"""The output that a run must return: which attempts the model has left, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clark_agent.engine.resumption import Resumption
from clark_agent.errors import ModelRetry, OutputError
from clark_agent.output import Output, OutputMode
from clark_agent.result import LoopOutcome
from clark_agent.run_context import RunContext
from clark_agent.types import AssistantMessage, ToolResultMessage

__all__ = ["REJECTED", "Goal"]

REJECTED = "output_rejected"
"""The purpose of a message that tells the model why its output was not accepted."""

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
        results = [m for m in resumption.messages if isinstance(m, ToolResultMessage)]
        failed = [m for m in results if m.is_error and m.tool_name == self.output.tool.name]
        self._attempts = list(resumption.purposes).count(REJECTED) + len(failed)

    async def accept(self, message: AssistantMessage, ctx: RunContext[Any]) -> Any:
        """The output in an answer without tool calls.

        Raises `ModelRetry` with the reason if there is none, and `OutputError` if the model has no
        attempt left.
        """
        try:
            value = self.output.parse(message.plain_text, self._mode)
            await self.output.check(value, ctx)
        except ModelRetry as retry:
            self._count(str(retry))
            raise
        return value

    def check_batch(self, results: Sequence[ToolResultMessage]) -> None:
        """Count failed calls of the finish tool. Raises `OutputError` if no attempt is left."""
        for result in results:
            if result.is_error and result.tool_name == self.output.tool.name:
                self._count(result.plain_text)

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
