"""GracefulTurnLimit: asks the model to wrap up before it runs out of turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from clark_agent.errors import ConfigError, HookError
from clark_agent.events import AgentEvent, TurnEnd
from clark_agent.plugins.base import RestoreContext
from clark_agent.protocol import WRAP_UP
from clark_agent.types import SystemMessage

__all__ = ["GracefulTurnLimit"]

_T = TypeVar("_T")


class GracefulTurnLimit:
    """Steers once, with a system message, when only the grace turns are left.

    A config with ``max_iterations`` installs it automatically. The text and the number of grace
    turns can come from callables. The number is read at every poll and clamped between 1 and one
    less than the cap, so that the model always has a turn to act on the message.
    """

    name = "graceful_turn_limit"
    purpose = "wrap_up"
    observes = (TurnEnd,)

    def __init__(
        self,
        max_iterations: int,
        grace_iterations: int = 5,
        *,
        message_provider: Callable[[], str] | None = None,
        grace_provider: Callable[[], int] | None = None,
    ) -> None:
        if not self.is_useful(max_iterations, grace_iterations):
            raise ConfigError(
                f"grace_iterations must be at least 1 and less than max_iterations "
                f"({max_iterations}), not {grace_iterations}"
            )
        self.max_iterations = max_iterations
        self.grace_iterations = grace_iterations
        self.message_provider = message_provider
        self.grace_provider = grace_provider
        self.fired = False
        self._completed_turns = 0

    @staticmethod
    def is_useful(max_iterations: int | None, grace_iterations: int) -> bool:
        """Return whether there is a turn before the cap at which to warn."""
        return max_iterations is not None and 0 < grace_iterations < max_iterations

    @property
    def soft_limit(self) -> int:
        """The number of turns after which the message is sent, with the current grace."""
        grace = _ask(self.grace_provider, self.grace_iterations)
        return self.max_iterations - min(max(grace, 1), self.max_iterations - 1)

    def for_run(self) -> GracefulTurnLimit:
        """Return a new instance that has counted no turns."""
        return GracefulTurnLimit(
            self.max_iterations,
            self.grace_iterations,
            message_provider=self.message_provider,
            grace_provider=self.grace_provider,
        )

    def restore(self, ctx: RestoreContext) -> None:
        """Continue after the turns of another process."""
        self._completed_turns = ctx.turns
        self.fired = self.purpose in ctx.purposes

    def on_event(self, event: AgentEvent) -> None:
        """Count the finished turns."""
        if isinstance(event, TurnEnd):
            self._completed_turns += 1

    def next_steering_messages(self) -> list[SystemMessage]:
        """Return the message once, as soon as it is due."""
        if self.fired or self._completed_turns < self.soft_limit:
            return []
        text = _ask(self.message_provider, WRAP_UP)
        self.fired = True
        return [SystemMessage(text)]


def _ask(provider: Callable[[], _T] | None, default: _T) -> _T:
    if provider is None:
        return default
    try:
        return provider()
    except Exception as error:
        name = getattr(provider, "__name__", type(provider).__name__)
        raise HookError("provider", name, error) from error
