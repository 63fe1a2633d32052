"""The metrics of runs, as the conventions define them, and a few of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from opentelemetry.metrics import Meter

from clark_agent.otel import conventions as names
from clark_agent.otel.usage import input_tokens
from clark_agent.types import Usage

__all__ = ["Metrics"]

Attributes = Mapping[str, str]


class Metrics:
    """The instruments. Made once; runs share them."""

    def __init__(self, meter: Meter) -> None:
        self._tokens = meter.create_histogram(
            names.TOKEN_USAGE, unit="{token}", description="Tokens of a model call."
        )
        self._operation = meter.create_histogram(
            names.OPERATION_DURATION, unit="s", description="Duration of a model call."
        )
        self._first_chunk = meter.create_histogram(
            names.TIME_TO_FIRST_CHUNK, unit="s", description="Time until the first chunk arrives."
        )
        self._per_chunk = meter.create_histogram(
            names.TIME_PER_OUTPUT_CHUNK, unit="s", description="Time between two chunks."
        )
        self._run = meter.create_histogram(
            names.INVOKE_AGENT_DURATION, unit="s", description="Duration of a run."
        )
        self._tool = meter.create_histogram(
            names.EXECUTE_TOOL_DURATION, unit="s", description="Duration of a tool call."
        )
        self._suspended = meter.create_histogram(
            names.SUSPENDED_DURATION, unit="s", description="How long a resumed run was suspended."
        )
        self._cost = meter.create_counter(
            names.COST_TOTAL, unit="{USD}", description="Cost of model calls."
        )
        self._retries = meter.create_counter(
            names.RETRIES, unit="{call}", description="Model calls after the first of their turn."
        )
        self._discarded = meter.create_counter(
            names.DISCARDED_ANSWERS, unit="{answer}", description="Answers that were not used."
        )

    def model_called(
        self,
        of: Attributes,
        *,
        seconds: float,
        error: str | None,
        usage: Usage | None,
        cost: float | None,
        first_chunk: float | None,
        chunks: Sequence[float],
    ) -> None:
        """A model call has ended. ``chunks`` are the times at which its chunks arrived."""
        self._operation.record(seconds, of if error is None else {**of, names.ERROR_TYPE: error})
        if first_chunk is not None:
            self._first_chunk.record(first_chunk, of)
        for before, at in pairwise(chunks):
            self._per_chunk.record(at - before, of)
        if usage is not None:
            self._tokens.record(input_tokens(usage), {**of, names.TOKEN_TYPE: "input"})
            self._tokens.record(usage.output_tokens, {**of, names.TOKEN_TYPE: "output"})
        if cost is not None:
            self._cost.add(cost, of)

    def retried(self, of: Attributes) -> None:
        """A turn calls the model again."""
        self._retries.add(1, of)

    def discarded(self, of: Attributes) -> None:
        """An answer does not enter the transcript."""
        self._discarded.add(1, of)

    def tool_called(self, of: Attributes, seconds: float, error: str | None) -> None:
        """A tool call has ended."""
        self._tool.record(seconds, of if error is None else {**of, names.ERROR_TYPE: error})

    def run_ended(self, of: Attributes, seconds: float, error: str | None) -> None:
        """A run has ended, or was suspended."""
        self._run.record(seconds, of if error is None else {**of, names.ERROR_TYPE: error})

    def run_resumed(self, of: Attributes, suspended: float) -> None:
        """A run goes on that was suspended."""
        self._suspended.record(suspended, of)
