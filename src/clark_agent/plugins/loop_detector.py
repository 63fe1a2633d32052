"""LoopDetector: detects a model that repeats the same call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from clark_agent.errors import ConfigError
from clark_agent.plugins.base import (
    AfterToolCallContext,
    BeforeToolCallContext,
    Block,
    RestoreContext,
)
from clark_agent.tools import AgentTool, ToolResult
from clark_agent.tools.identity import (
    ToolIdentityPolicy,
    extract_args_key,
    extract_operation_key,
)
from clark_agent.types import SystemMessage, ToolCall

__all__ = ["LoopDetector"]

_DEFAULT_POLICY = ToolIdentityPolicy()


class LoopDetector:
    """Counts equal calls, by the tool's identity policy, that return the same result.

    After ``warn_after`` of them the model gets a note, once; after ``block_after``, further ones
    are not run. A different result, as from polling something that changes, restarts the count.
    None disables a step. It remembers the last ``window`` different calls.
    """

    name = "loop_detector"
    purpose = "repetition"

    def __init__(
        self, warn_after: int | None = 3, block_after: int | None = 5, *, window: int = 100
    ) -> None:
        for label, value in (("warn_after", warn_after), ("block_after", block_after)):
            if value is not None and not _is_count(value):
                raise ConfigError(f"{label} must be at least 1 or None, not {value!r}")
        if warn_after is not None and block_after is not None and block_after < warn_after:
            raise ConfigError(
                f"block_after ({block_after}) must be at least warn_after ({warn_after})"
            )
        if not _is_count(window):
            raise ConfigError(f"window must be at least 1, not {window!r}")
        self.warn_after = warn_after
        self.block_after = block_after
        self.window = window
        self._seen: dict[tuple[str, ...], tuple[int, int]] = {}
        self._blocked: set[str] = set()
        self._notes: list[SystemMessage] = []

    def for_run(self) -> LoopDetector:
        """Return a new instance without history."""
        return LoopDetector(self.warn_after, self.block_after, window=self.window)

    def restore(self, ctx: RestoreContext) -> None:
        """Count the calls of another process. Notes that it has sent are not sent again."""
        for call in ctx.calls:
            if not any(self._has_blocked(decision) for decision in call.decisions):
                self._count(call.tool_call, ctx.tools.get(call.tool_call.name), call.result)
        del self._notes[: ctx.purposes.count(self.purpose)]

    def _has_blocked(self, decision: Mapping[str, Any]) -> bool:
        return decision.get("plugin") == self.name and decision.get("decision") == "block"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Block | None:
        """Block a call whose result is already known."""
        key = _identity(ctx.tool_call, ctx.tool)
        outcome, count = self._seen.get(key, (0, 0))
        if self.block_after is None or count < self.block_after:
            return None
        del self._seen[key]
        self._seen[key] = (outcome, count)  # move it to the end, so that it is dropped last
        self._blocked.add(ctx.tool_call.id)
        details = {"kind": "tool_call_not_executed", "reason": "loop_detected", "repeats": count}
        return Block(
            f"The call was not run: it has been made {count} times and always gave the same "
            "result. Use that result, try something different, or say what stands in the way.",
            details,
        )

    def on_after_tool_call(self, ctx: AfterToolCallContext) -> None:
        """Count the result."""
        if ctx.tool_call.id in self._blocked:
            self._blocked.discard(ctx.tool_call.id)
        else:
            self._count(ctx.tool_call, ctx.tool, ctx.result)

    def _count(self, call: ToolCall, tool: AgentTool | None, result: ToolResult) -> None:
        key = _identity(call, tool)
        outcome = hash((result.is_error, result.content))
        known, count = self._seen.pop(key, (outcome, 0))
        count = count + 1 if known == outcome else 1
        self._seen[key] = (outcome, count)
        if len(self._seen) > self.window:
            del self._seen[next(iter(self._seen))]
        if count == self.warn_after:
            self._notes.append(
                SystemMessage(
                    "[from the runtime, not from the user]\n"
                    f"You have called {call.name!r} {count} times in the same way, with "
                    "the same result each time. Calling it again will not change that: use what "
                    "you have, try something different, or say what stands in the way."
                )
            )

    def next_steering_messages(self) -> list[SystemMessage]:
        """Return the notes that are due."""
        notes, self._notes = self._notes, []
        return notes


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _identity(call: ToolCall, tool: AgentTool | None) -> tuple[str, ...]:
    """Return the identity of the model's own call, before hooks change it."""
    name, args = call.name, call.arguments
    policy = _DEFAULT_POLICY if tool is None else tool.identity_policy
    key = extract_args_key(policy, name, args)
    return name, extract_operation_key(policy, args), _text(args) if key is None else key


def _text(args: Any) -> str:
    try:
        return msgspec.json.encode(args, order="deterministic").decode()
    except (TypeError, ValueError, RecursionError):
        return repr(args)
