"""ToolResultBudget: limits the size of each old tool result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from clark_agent.errors import ConfigError
from clark_agent.messages.transcript import MessageLog, MessageView, view_of
from clark_agent.plugins.base import TransformContext
from clark_agent.plugins.large_results import note_in
from clark_agent.tools import NEVER_CLIP, AgentTool
from clark_agent.types import AgentMessage, AssistantMessage, TextContent, ToolResultMessage

__all__ = ["ToolResultBudget"]


class ToolResultBudget:
    """Clips tool results in the request to a number of characters; the transcript keeps them whole.

    A tool may set its own cap, or "never clip", with ``max_result_chars``. Results of the newest
    batch are never clipped, because the model has not seen them yet. Older ones keep their head and
    tail around a marker, and the note of `clark_agent.plugins.LargeResults`, whatever their cap. A
    turn costs only its new messages.
    """

    name = "tool_result_budget"

    def __init__(self, default_max_chars: int = 32_000) -> None:
        if default_max_chars < 1:
            raise ConfigError(f"default_max_chars must be at least 1, not {default_max_chars}")
        self.default_max_chars = default_max_chars
        self._seen: MessageView | None = None
        self._newest_batch = 0  # where the results of the newest batch begin
        self._log: MessageLog | None = None  # what comes before; None until something is clipped

    def for_run(self) -> ToolResultBudget:
        """Return a new instance without history."""
        return ToolResultBudget(self.default_max_chars)

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        """Return the messages with old results clipped to their cap."""
        view = view_of(messages)
        if not view.grew_from(self._seen):
            self._seen, self._newest_batch, self._log = None, 0, None
        aged_from = self._newest_batch
        for index in range(self._seen.stable if self._seen is not None else 0, view.stable):
            message = view[index]
            if isinstance(message, AssistantMessage) and message.tool_calls:
                self._newest_batch = index + 1
        self._seen = view
        self._age(view, aged_from, ctx.tools)
        if self._log is None:
            return messages
        return self._log.view(view[self._newest_batch :])

    def _age(self, view: MessageView, start: int, tools: Mapping[str, AgentTool]) -> None:
        """Add the messages that no longer belong to the newest batch."""
        aged = view[start : self._newest_batch]
        clipped = [self._clipped(message, tools) for message in aged]
        if self._log is None and any(a is not b for a, b in zip(aged, clipped, strict=True)):
            self._log = MessageLog(view[:start])
        if self._log is not None:
            self._log.extend(clipped)

    def _clipped(self, message: AgentMessage, tools: Mapping[str, AgentTool]) -> AgentMessage:
        if not isinstance(message, ToolResultMessage):
            return message
        tool = tools.get(message.tool_name)
        cap = None if tool is None else tool.max_result_chars
        if cap is None:
            cap = self.default_max_chars
        text = message.plain_text
        if cap == NEVER_CLIP or len(text) <= cap:
            return message
        clipped = clip(text, cap)
        note = note_in(message)
        if note not in clipped:  # it has the id with which the model can read the rest
            clipped = f"{clip(text, max(cap - len(note), 0))}{note}"
        if len(clipped) >= len(text):
            return message
        blocks = [block for block in message.content if not isinstance(block, TextContent)]
        return replace(message, content=(TextContent(clipped), *blocks))


def clip(text: str, max_chars: int) -> str:
    """Return the head and the tail of a text, around a marker with the number of missing
    characters.
    """

    def marker(left_out: int) -> str:
        return f"\n[… {left_out:,} of {len(text):,} characters left out …]\n"

    room = max(max_chars - len(marker(len(text))), 0)
    head, tail = room - room // 2, room // 2
    return text[:head] + marker(len(text) - room) + text[len(text) - tail :]
