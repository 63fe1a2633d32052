"""Moving a conversation from one model to another.

Text, calls and results are understood everywhere. Reasoning is not: it is signed or sealed by the
provider that made it, and another refuses it. Every structured item therefore says whose it is
(``format``), and those that a native transport made also by which model (``model``), and
`convert_history` leaves to each target what that target will take back. So does every item of a
provider (`clark_agent.types.ProviderContent`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.reasoning import ReasoningFormat
from clark_agent.types import (
    AgentMessage,
    AssistantBlock,
    AssistantMessage,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
)

__all__ = ["ReplayTarget", "convert_history"]


class ReplayTarget(Struct, frozen=True, kw_only=True):
    """Whose reasoning, and whose own items, a model takes back."""

    formats: frozenset[ReasoningFormat] = frozenset()
    """The formats of structured reasoning that it understands."""
    model: str | None = None
    """If given, items that name another model are foreign too."""
    providers: frozenset[str] = frozenset()
    """Whose `ProviderContent` it understands."""


def convert_history(
    messages: Iterable[AgentMessage], target: ReplayTarget
) -> tuple[AgentMessage, ...]:
    """The history as another model may see it. Pure; messages that need no change are shared.

    Items of other providers are left out. So is their structured reasoning, and readable reasoning
    that came with it: it is the same thought once more. Readable reasoning of unknown origin stays,
    as does everything that was said, called and returned.
    """
    return tuple(
        [
            _converted(message, target) if isinstance(message, AssistantMessage) else message
            for message in messages
        ]
    )


def _converted(message: AssistantMessage, target: ReplayTarget) -> AssistantMessage:
    details = message.reasoning_details_values
    items = [block for block in message.content if isinstance(block, ProviderContent)]
    if all(_is_own(item, target) for item in details) and all(
        item.provider in target.providers for item in items
    ):
        return message
    is_foreign = bool(details) and not any(_is_own(item, target) for item in details)
    blocks: list[AssistantBlock] = []
    for block in message.content:
        if isinstance(block, ReasoningDetailsContent):
            kept = tuple([item for item in block.details if _is_own(item, target)])
            if kept:
                blocks.append(ReasoningDetailsContent(kept))
        elif isinstance(block, ProviderContent):
            if block.provider in target.providers:
                blocks.append(block)
        elif not (is_foreign and isinstance(block, ReasoningContent)):
            blocks.append(block)
    return replace(message, content=tuple(blocks))


def _is_own(item: Any, target: ReplayTarget) -> bool:
    if not isinstance(item, dict):
        return False
    fields: dict[str, Any] = item
    if ReasoningFormat.from_wire(fields.get("format")) not in target.formats:
        return False
    made_by = fields.get("model")
    return target.model is None or made_by is None or made_by == target.model
