"""The metrics of runs, as the conventions define them, and a few of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from opentelemetry.metrics import Histogram, Meter

from clark_agent.otel import conventions as names
from clark_agent.otel._guard import guarded
from clark_agent.otel.usage import input_tokens
from clark_agent.types import Usage

__all__ = ["Metrics"]

Attributes = Mapping[str, str | int]

# The boundaries that the conventions recommend for tokens and for the durations of model calls.
_TOKENS = [4**n for n in range(14)]
_SECONDS = [0.01 * 2**n for n in range(14)]
# They recommend none for these: runs and tools up to an hour and a half, suspensions up to 12 days.
_LONG_SECONDS = [0.01 * 2**n for n in range(20)]
_SUSPENDED_SECONDS = [4**n for n in range(11)]


class Metrics:
    """The instruments. Made once; runs share them. One that raises keeps no span from ending."""

    def __init__(self, meter: Meter) -> None:
        def histogram(
            name: str, unit: str, description: str, boundaries: Sequence[float]
        ) -> Histogram:
            return meter.create_histogram(
                name, unit, description, explicit_bucket_boundaries_advisory=boundaries
            )

        self._tokens = histogram(names.TOKEN_USAGE, "{token}", "Tokens of a model call.", _TOKENS)
        self._operation = histogram(
            names.OPERATION_DURATION, "s", "Duration of a model call.", _SECONDS
        )
        self._first_chunk = histogram(
            names.TIME_TO_FIRST_CHUNK, "s", "Time until the first chunk arrives.", _SECONDS
        )
        self._per_chunk = histogram(
            names.TIME_PER_OUTPUT_CHUNK, "s", "Time between two chunks.", _SECONDS
        )
        self._run = histogram(names.INVOKE_AGENT_DURATION, "s", "Duration of a run.", _LONG_SECONDS)
        self._tool = histogram(
            names.EXECUTE_TOOL_DURATION, "s", "Duration of a tool call.", _LONG_SECONDS
        )
        self._suspended = histogram(
            names.SUSPENDED_DURATION,
            "s",
            "How long a resumed run was suspended.",
            _SUSPENDED_SECONDS,
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

    @guarded
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

    @guarded
    def retried(self, of: Attributes) -> None:
        """A turn calls the model again."""
        self._retries.add(1, of)

    @guarded
    def discarded(self, of: Attributes) -> None:
        """An answer does not enter the transcript."""
        self._discarded.add(1, of)

    @guarded
    def tool_called(self, of: Attributes, seconds: float, error: str | None) -> None:
        """A tool call has ended."""
        self._tool.record(seconds, of if error is None else {**of, names.ERROR_TYPE: error})

    @guarded
    def run_ended(self, of: Attributes, seconds: float, error: str | None) -> None:
        """A run has ended, or was suspended."""
        self._run.record(seconds, of if error is None else {**of, names.ERROR_TYPE: error})

    @guarded
    def run_resumed(self, of: Attributes, suspended: float) -> None:
        """A run goes on that was suspended."""
        self._suspended.record(suspended, of)
