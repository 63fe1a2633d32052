"""Prose in place of a tool call: remind the model, deliver the text, or accept the stop.

For providers that cannot be forced to call a tool. All decisions are functions on values; the loop
executes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from msgspec import Struct

from clark_agent.config import LoopConfig
from clark_agent.messages.thinking import strip_leading_thoughts
from clark_agent.types import AgentMessage, AssistantMessage

__all__ = ["Deliver", "FallbackDecision", "Nudge", "PlainTextFallback", "is_terminal_only"]

_MAX_NUDGES = 2


class Nudge(Struct, frozen=True):
    """Remind the model of its tools and ask again."""


class Deliver(Struct, frozen=True):
    """Use this text as the result of the fallback tool, and end the run."""

    text: str


FallbackDecision: TypeAlias = Nudge | Deliver | None


class PlainTextFallback:
    """Counts the stops of a run without a tool call, since the last tool batch."""

    def __init__(self, config: LoopConfig) -> None:
        self._config = config
        self.stops = 0
        """How often in a row the model has stopped without a tool call."""
        self._answer: str | None = None

    def reset(self) -> None:
        """Start over after a tool batch or a delivery."""
        self.stops = 0
        self._answer = None

    def restore(self, messages: Iterable[AgentMessage]) -> None:
        """Count the stops that another process has seen."""
        for message in messages:
            if isinstance(message, AssistantMessage):
                if message.tool_calls:
                    self.reset()
                else:
                    self.decide(message, None)

    def decide(
        self, message: AssistantMessage, allowlist: AbstractSet[str] | None
    ) -> FallbackDecision:
        """Decide about a message without tool calls. Counts it."""
        self.stops += 1
        config = self._config
        tool = config.plain_text_terminal_fallback_tool
        if tool is None:
            return None
        policy = config.protocol
        text = strip_leading_thoughts(message.plain_text)
        if self._answer is None and text and not policy.asks_permission(text):
            self._answer = text
        narrowed = is_terminal_only(allowlist, tool, policy.terminal_tool_names())
        eager = config.plain_text_terminal_fallback_eager
        nudges = config.plain_text_terminal_fallback_eager_nudge and eager
        if nudges and not narrowed and self.stops <= _MAX_NUDGES:
            return Nudge()
        answer = self._answer or text
        return Deliver(answer) if answer and (eager or narrowed) else None


def is_terminal_only(
    allowlist: AbstractSet[str] | None, fallback_tool: str, terminal: AbstractSet[str]
) -> bool:
    """Whether a turn offers the fallback tool and nothing but terminal tools."""
    if allowlist is None or fallback_tool not in allowlist:
        return False
    return all(name == fallback_tool or name in terminal for name in allowlist)
