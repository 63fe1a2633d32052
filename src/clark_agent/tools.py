"""What a tool gives back."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.types import TextContent, ToolResultBlock

__all__ = ["ToolResult"]


class ToolResult(Struct, frozen=True, gc=False, omit_defaults=True):
    """The outcome of a tool call.

    The model sees ``content``. ``details`` is structured data for the host, ``narration`` a
    one-sentence caption for people. ``terminate`` votes to end the run: it ends when every counted
    result of the batch votes so.
    """

    content: tuple[ToolResultBlock, ...]
    is_error: bool = False
    details: Any = None
    terminate: bool = False
    narration: str | None = None

    @classmethod
    def text(cls, text: str, *, details: Any = None) -> ToolResult:
        """A plain success."""
        return cls((TextContent(text),), details=details)

    @classmethod
    def terminal(cls, text: str, *, details: Any = None) -> ToolResult:
        """A success that votes to end the run."""
        return cls((TextContent(text),), details=details, terminate=True)

    @classmethod
    def error(cls, text: str, *, details: Any = None) -> ToolResult:
        """A failure that the model can react to. It does not end the run."""
        return cls((TextContent(text),), is_error=True, details=details)

    def with_narration(self, narration: str) -> ToolResult:
        """The same result with a caption; a blank one changes nothing."""
        narration = narration.strip()
        return replace(self, narration=narration) if narration else self

    @property
    def plain_text(self) -> str:
        """The text, joined over all text blocks."""
        return "".join([b.text for b in self.content if type(b) is TextContent])
