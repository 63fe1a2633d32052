"""What to do after a failed attempt to get an answer. Pure functions on values.

an empty answer            up to 3 times, a little later each time
the connection broke       once, with a note and less thinking
the answer was cut off     with a larger cap, as the recovery allows
the transcript is too big  with a smaller one, as the recovery allows
calls and results differ   once, with a repaired transcript
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, assert_never

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.config import LoopConfig
from clark_agent.engine.reading import StreamFailure
from clark_agent.errors import RunAborted, StreamError
from clark_agent.protocol import ZERO_OUTPUT_RECOVERY
from clark_agent.stream import ReasoningEffort, StreamErrorKind
from clark_agent.types import SystemMessage

__all__ = [
    "AskAgain",
    "Attempts",
    "GiveUp",
    "Repair",
    "Shrink",
    "TooLarge",
    "after_failure",
    "with_larger_cap",
]

_EMPTY_ATTEMPTS = 3
_EMPTY_DELAY = 0.25
_ZERO_OUTPUT_DELAY = 0.5


class TooLarge(Struct, frozen=True):
    """A request that the provider rejected as too large."""

    tokens: int
    """The estimate of its messages."""
    error: StreamError | RunAborted

    def check(self, tokens: int) -> None:
        """Raise the error of the provider if the next request is not smaller."""
        if tokens >= self.tokens:
            raise self.error


class Attempts(Struct, frozen=True):
    """How a turn's request differs from the first, and the number of attempts by reason."""

    cap: int | None
    reasoning: ReasoningEffort
    note: SystemMessage | None = None
    empty: int = 0
    escalations: int = 0
    overflows: int = 0
    is_repaired: bool = False
    too_large: TooLarge | None = None
    """The request before, if it was too large and plugins have made room."""


class AskAgain(Struct, frozen=True):
    """Retry after this many seconds."""

    attempts: Attempts
    delay: float


class Shrink(Struct, frozen=True):
    """Let the overflow recovery make the transcript smaller; give up if it cannot."""

    attempts: Attempts
    """For a new request with the smaller transcript."""
    otherwise: GiveUp


class Repair(Struct, frozen=True):
    """Repair the history of tool calls, and retry."""

    attempts: Attempts


class GiveUp(Struct, frozen=True):
    """Raise this."""

    error: StreamError | RunAborted


Decision: TypeAlias = AskAgain | Shrink | Repair | GiveUp


def after_failure(
    failure: StreamFailure, attempts: Attempts, config: LoopConfig, now_ms: Callable[[], int]
) -> Decision:
    """What to do after a failed stream."""
    match failure.kind:
        case StreamErrorKind.EMPTY if attempts.empty + 1 < _EMPTY_ATTEMPTS:
            attempts = replace(attempts, empty=attempts.empty + 1)
            return AskAgain(attempts, _EMPTY_DELAY * attempts.empty)
        case StreamErrorKind.ZERO_OUTPUT_TRANSPORT if attempts.note is None:
            note = SystemMessage(ZERO_OUTPUT_RECOVERY, now_ms())
            reasoning = _less_thinking(attempts.reasoning)
            return AskAgain(replace(attempts, note=note, reasoning=reasoning), _ZERO_OUTPUT_DELAY)
        case StreamErrorKind.CONTEXT_OVERFLOW:
            overflows = attempts.overflows + 1
            afresh = Attempts(config.max_output_tokens, config.reasoning, overflows=overflows)
            return Shrink(afresh, _give_up(failure, failure.text))
        case StreamErrorKind.INCONSISTENT_TOOL_HISTORY if not attempts.is_repaired:
            return Repair(replace(attempts, is_repaired=True))
        case StreamErrorKind.EMPTY:
            text = f"no answer in {_EMPTY_ATTEMPTS} attempts; the last: {failure.text}"
            return _give_up(failure, text)
        case _:
            return _give_up(failure, failure.text)


def _give_up(failure: StreamFailure, text: str) -> GiveUp:
    error: StreamError | RunAborted = StreamError(failure.kind, text)
    if failure.kind is StreamErrorKind.ABORTED:
        error = RunAborted(text)
    error.partial = failure.message
    error.__cause__ = failure.cause
    return GiveUp(error)


def with_larger_cap(attempts: Attempts, config: LoopConfig) -> Attempts | None:
    """For an answer that was cut off: the next attempt; None if it stays cut off."""
    recovery, cap = config.max_output_tokens_recovery, attempts.cap
    if recovery is None or cap is None or attempts.escalations >= recovery.max_attempts:
        return None
    larger = recovery.next_cap(cap, attempts.escalations)
    if larger is None:
        return None
    return replace(attempts, cap=larger, escalations=attempts.escalations + 1)


def _less_thinking(effort: ReasoningEffort) -> ReasoningEffort:
    match effort:
        case ReasoningEffort.MEDIUM | ReasoningEffort.HIGH | ReasoningEffort.XHIGH:
            return ReasoningEffort.MINIMAL
        case ReasoningEffort.NONE | ReasoningEffort.MINIMAL | ReasoningEffort.LOW:
            return effort
        case _:
            assert_never(effort)
