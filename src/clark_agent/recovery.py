"""What the loop does when an answer was cut off or the transcript does not fit."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeAlias, assert_never

from msgspec import Struct

from clark_agent.plugins.base import TransformContext
from clark_agent.types import AgentMessage

__all__ = [
    "ContextOverflowRecovery",
    "Double",
    "Fixed",
    "Linear",
    "MaxTokensRecovery",
    "TokenScaling",
]

# Output caps are unsigned 32-bit numbers on every wire that has them.
_LARGEST_CAP = 2**32 - 1


class Double(Struct, frozen=True, tag_field="scaling", tag="double"):
    """Each retry doubles the cap."""


class Linear(Struct, frozen=True, tag_field="scaling", tag="linear"):
    """Each retry adds ``step`` tokens to the cap."""

    step: int


class Fixed(Struct, frozen=True, tag_field="scaling", tag="fixed"):
    """The caps of the retries, in order."""

    caps: tuple[int, ...]


TokenScaling: TypeAlias = Double | Linear | Fixed


class MaxTokensRecovery(Struct, frozen=True, kw_only=True):
    """How far the output cap may rise when an answer was cut off at it."""

    max_attempts: int = 3
    scaling: TokenScaling = Double()
    ceiling: int | None = None

    @classmethod
    def doubling(cls, max_attempts: int = 3, *, ceiling: int | None = None) -> MaxTokensRecovery:
        """Twice the cap each time."""
        return cls(max_attempts=max_attempts, ceiling=ceiling)

    def next_cap(self, previous: int, attempt: int) -> int | None:
        """The cap for retry number ``attempt`` (from 0), or None when it would not be larger."""
        match self.scaling:
            case Double():
                cap = previous * 2
            case Linear(step):
                cap = previous + step
            case Fixed(caps):
                if attempt >= len(caps):
                    return None
                cap = caps[attempt]
            case _:
                assert_never(self.scaling)
        cap = min(cap, _LARGEST_CAP if self.ceiling is None else self.ceiling)
        return cap if cap > previous else None


class ContextOverflowRecovery(Protocol):
    """Makes a transcript smaller after a provider has rejected it as too large.

    Contract: returns messages that cost less by the run's estimator; if they do not, or if it
    raises, the run ends with an error. A plugin-like object may also have ``name`` (a label for
    the event) and ``max_attempts`` (how often it is called in one turn; 1).
    """

    def recover(
        self, messages: Sequence[AgentMessage], ctx: TransformContext, /
    ) -> Sequence[AgentMessage] | Awaitable[Sequence[AgentMessage]]:
        """The transcript to continue with."""
        ...
