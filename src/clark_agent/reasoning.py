"""Provider-native reasoning: typed items, the requirements of each provider, and an audit.

Providers send reasoning that must be sent back unchanged with the next request, or they reject it.
The most general format is OpenRouter's ``reasoning_details`` list: readable text with an optional
signature, a summary, or an encrypted blob, each labelled with the format of its origin. The raw
JSON in the transcript stays the source of truth; this module is a typed view of it. It reads
leniently (a missing or invalid field becomes empty, an unknown kind is omitted), so that a new
format of a provider breaks nothing.

This module knows no message and no transport.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from msgspec import Struct, to_builtins

__all__ = [
    "OpenRouterReasoningCodec",
    "ReasoningCodec",
    "ReasoningEncrypted",
    "ReasoningFormat",
    "ReasoningItem",
    "ReasoningSummary",
    "ReasoningText",
    "ReplayAudit",
    "ReplayContract",
    "ReplayViolation",
    "audit_replay",
    "item_to_json",
    "parse_item",
    "parse_items",
]


class ReplayContract(StrEnum):
    """When a provider requires its signed reasoning back."""

    STATELESS = "stateless"
    """Never."""
    REQUIRED_WITH_TOOLS = "required_with_tools"
    """When the next request carries tool calls or results."""
    ALWAYS_REQUIRED = "always_required"
    """With every request."""


class ReasoningFormat(StrEnum):
    """The provider format of an item."""

    ANTHROPIC_CLAUDE_V1 = "anthropic-claude-v1"
    GOOGLE_GEMINI_V1 = "google-gemini-v1"
    OPENAI_RESPONSES_V1 = "openai-responses-v1"
    AZURE_OPENAI_RESPONSES_V1 = "azure-openai-responses-v1"
    XAI_RESPONSES_V1 = "xai-responses-v1"
    UNKNOWN = "unknown"

    @classmethod
    def from_wire(cls, name: object) -> ReasoningFormat:
        """The format of that name; `UNKNOWN` for any other value."""
        try:
            return cls(name) if isinstance(name, str) else cls.UNKNOWN
        except ValueError:
            return cls.UNKNOWN

    @property
    def replay_contract(self) -> ReplayContract:
        """What the provider of this format requires."""
        if self in (ReasoningFormat.XAI_RESPONSES_V1, ReasoningFormat.UNKNOWN):
            return ReplayContract.STATELESS
        return ReplayContract.REQUIRED_WITH_TOOLS


class ReasoningText(Struct, frozen=True, gc=False, tag_field="type", tag="reasoning.text"):
    """Readable reasoning, signed if its provider signs it."""

    id: str | None
    format: ReasoningFormat
    index: int | None
    text: str
    signature: str | None = None

    @property
    def is_signed(self) -> bool:
        """Whether the provider checks this item on replay."""
        return self.signature is not None


class ReasoningSummary(Struct, frozen=True, gc=False, tag_field="type", tag="reasoning.summary"):
    """A summary of reasoning that the provider does not disclose."""

    id: str | None
    format: ReasoningFormat
    index: int | None
    summary: str

    @property
    def is_signed(self) -> bool:
        """Never: a summary has nothing to check."""
        return False


class ReasoningEncrypted(
    Struct, frozen=True, gc=False, tag_field="type", tag="reasoning.encrypted"
):
    """An opaque blob that only its provider can read."""

    id: str | None
    format: ReasoningFormat
    index: int | None
    data: str

    @property
    def is_signed(self) -> bool:
        """Always: the blob is its own signature."""
        return True


ReasoningItem: TypeAlias = ReasoningText | ReasoningSummary | ReasoningEncrypted


def parse_item(value: object) -> ReasoningItem | None:
    """The typed form of one ``reasoning_details`` entry, or None when its kind is unknown."""
    if not isinstance(value, dict):
        return None
    fields: dict[str, object] = value
    origin = ReasoningFormat.from_wire(fields.get("format"))
    item_id = _string(fields, "id")
    index = fields.get("index")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        index = None
    match fields.get("type"):
        case "reasoning.text":
            signature = _string(fields, "signature")
            return ReasoningText(item_id, origin, index, _string(fields, "text") or "", signature)
        case "reasoning.summary":
            return ReasoningSummary(item_id, origin, index, _string(fields, "summary") or "")
        case "reasoning.encrypted":
            return ReasoningEncrypted(item_id, origin, index, _string(fields, "data") or "")
        case _:
            return None


def parse_items(values: Iterable[object]) -> tuple[ReasoningItem, ...]:
    """The typed forms of all entries of a known kind."""
    return tuple([item for value in values if (item := parse_item(value)) is not None])


def item_to_json(item: ReasoningItem) -> dict[str, Any]:
    """The ``reasoning_details`` entry for an item, without its empty fields."""
    fields: dict[str, Any] = to_builtins(item)
    return {name: value for name, value in fields.items() if value is not None}


def _string(fields: dict[str, object], name: str) -> str | None:
    value = fields.get(name)
    return value if isinstance(value, str) else None


class ReasoningCodec(Protocol):
    """Translates between a provider's wire and typed items.

    Contract: stateless; neither method raises for odd input.
    """

    def parse_response(self, raw: Iterable[Any]) -> tuple[ReasoningItem, ...]:
        """The items in a response, unknown kinds left out."""
        ...

    def write_assistant(
        self, message: MutableMapping[str, Any], items: Iterable[ReasoningItem]
    ) -> None:
        """Add the items to an outgoing assistant message, where the provider expects them."""
        ...


class OpenRouterReasoningCodec:
    """The codec for every API with ``reasoning_details``."""

    def parse_response(self, raw: Iterable[Any]) -> tuple[ReasoningItem, ...]:
        """The items in a response, unknown kinds left out."""
        return parse_items(raw)

    def write_assistant(
        self, message: MutableMapping[str, Any], items: Iterable[ReasoningItem]
    ) -> None:
        """Set ``reasoning_details``; without items the message stays as it is."""
        details = [item_to_json(item) for item in items]
        if details:
            message["reasoning_details"] = details


class ReplayViolation(Struct, frozen=True):
    """The next request would be rejected: the signatures that its provider requires are missing."""

    contract: ReplayContract
    formats: tuple[ReasoningFormat, ...]


class ReplayAudit(Struct, frozen=True):
    """The reasoning of a turn, and whether its provider would accept it back."""

    item_count: int
    signed_count: int
    formats: tuple[ReasoningFormat, ...]
    violation: ReplayViolation | None = None


def audit_replay(
    items: Iterable[ReasoningItem], contract: ReplayContract, *, next_turn_carries_tools: bool
) -> ReplayAudit:
    """Whether the next request would be rejected for a missing signature."""
    items = tuple(items)
    signed = sum(item.is_signed for item in items)
    formats = tuple(sorted({item.format for item in items}))
    demanded = contract is ReplayContract.ALWAYS_REQUIRED or (
        contract is ReplayContract.REQUIRED_WITH_TOOLS and next_turn_carries_tools
    )
    violation = ReplayViolation(contract, formats) if demanded and signed == 0 else None
    return ReplayAudit(len(items), signed, formats, violation)
