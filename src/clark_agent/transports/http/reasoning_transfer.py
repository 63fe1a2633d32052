"""Moves a conversation from one model to another.

Every model understands text, calls and results. Reasoning is different: the provider that made it
signs or encrypts it, and other providers reject it. Every structured item therefore names its
format (``format``); items from a native transport also name the model (``model``).
`convert_history` keeps only the items that the target accepts. The same holds for a provider's own
items (`clark_agent.types.ProviderContent`).
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

__all__ = ["ReasoningTarget", "convert_history"]


class ReasoningTarget(Struct, frozen=True, kw_only=True):
    """The reasoning and the provider items that a model accepts in a history."""

    formats: frozenset[ReasoningFormat] = frozenset()
    """The formats of structured reasoning that the model accepts."""
    model: str | None = None
    """If given, items that name another model are left out."""
    providers: frozenset[str] = frozenset()
    """The providers whose `ProviderContent` the model accepts."""


def convert_history(
    messages: Iterable[AgentMessage], target: ReasoningTarget
) -> tuple[AgentMessage, ...]:
    """Return the history for another model. Pure; messages that need no change are shared.

    Items of other providers are left out. So is their structured reasoning, and the readable
    reasoning of such a message, because it has the same content. Readable reasoning of unknown
    origin stays, as do text, calls and results.
    """
    return tuple(
        [
            _converted(message, target) if isinstance(message, AssistantMessage) else message
            for message in messages
        ]
    )


def _converted(message: AssistantMessage, target: ReasoningTarget) -> AssistantMessage:
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


def _is_own(item: Any, target: ReasoningTarget) -> bool:
    if not isinstance(item, dict):
        return False
    fields: dict[str, Any] = item
    if ReasoningFormat.from_wire(fields.get("format")) not in target.formats:
        return False
    made_by = fields.get("model")
    return target.model is None or made_by is None or made_by == target.model
