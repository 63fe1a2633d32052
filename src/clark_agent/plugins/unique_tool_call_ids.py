"""UniqueToolCallIds: makes tool-call ids unique in the request."""

from __future__ import annotations

from collections.abc import Sequence

from clark_agent.history import IdRenamer
from clark_agent.messages.transcript import MessageLog, MessageView, view_of
from clark_agent.plugins.base import TransformContext
from clark_agent.types import AgentMessage

__all__ = ["UniqueToolCallIds"]


class UniqueToolCallIds:
    """Renames repeated tool-call ids in the request; the transcript keeps them.

    Some servers give every call the same id, and some providers reject an id that occurs twice. A
    turn costs only its new messages.
    """

    name = "unique_tool_call_ids"

    def __init__(self) -> None:
        self._seen: MessageView | None = None
        self._renamer = IdRenamer()
        self._log: MessageLog | None = None  # None until something is renamed

    def for_run(self) -> UniqueToolCallIds:
        """Return a new instance."""
        return UniqueToolCallIds()

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        """Return the messages with every id used once."""
        view = view_of(messages)
        if not view.grew_from(self._seen):
            self._seen, self._renamer, self._log = None, IdRenamer(), None
        start = self._seen.stable if self._seen is not None else 0
        self._seen = view
        renamed = self._renamer.rename(view[start : view.stable])
        if self._log is None and self._renamer.changes:
            self._log = MessageLog(view[:start])
        if self._log is None:
            return messages
        self._log.extend(renamed)
        return self._log.view(self._renamer.peek(view.tail))
