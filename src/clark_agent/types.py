"""Messages, content blocks, usage, identity and context: the types that everything else uses.

Every class here is a frozen msgspec struct whose JSON is fixed: the tag comes first, fields follow
in the order of their declaration, unknown fields are ignored when reading, optional fields are
omitted when empty. Open JSON (tool arguments, details, payloads) appears only where a field is
typed ``Any``; a dict in such a field is shared and must not change afterwards.

This module knows no transport, no tool and no loop. To read and write messages use
`clark_agent.messages.wire`, which also sets the timestamp of a message without one to "now".
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr, replace

from clark_agent._ids import random_id
from clark_agent._text import well_formed
from clark_agent.reasoning import ReasoningItem, item_to_json, parse_items

__all__ = [
    "AgentContext",
    "AgentMessage",
    "Annotation",
    "AssistantBlock",
    "AssistantMessage",
    "CustomMessage",
    "FileContent",
    "HasMessages",
    "ImageContent",
    "NonNegativeInt",
    "ProviderContent",
    "ReasoningContent",
    "ReasoningDetailsContent",
    "RunIdentity",
    "StopReason",
    "SystemMessage",
    "TextContent",
    "ThinkingContent",
    "ToolCall",
    "ToolResultBlock",
    "ToolResultMessage",
    "Usage",
    "UserBlock",
    "UserMessage",
    "arg_parse_error",
    "detect_arg_parse_error",
]

NonNegativeInt: TypeAlias = Annotated[int, Meta(ge=0)]
"""An integer that must not be negative when it is read from JSON."""

# A struct that holds only scalars, or such structs, cannot be part of a reference cycle: `gc=False`
# excludes it from the cyclic collector. One with an open field could be, and is not excluded.
# With `omit_defaults`, a default from a factory is always written and a plain default is omitted:
# that is how `is_error` and `payload` differ from the optional fields.


class StopReason(StrEnum):
    """Why the model stopped generating an assistant message."""

    END_TURN = "end_turn"
    """The message is complete."""
    TOOL_USE = "tool_use"
    """It called tools."""
    MAX_TOKENS = "max_tokens"
    """It reached the output limit; the message may be cut off anywhere."""
    ERROR = "error"
    """The provider failed while it was streaming."""
    ABORTED = "aborted"
    """The caller cancelled."""
    OTHER = "other"
    """Any other reason of a provider."""


class Usage(Struct, frozen=True, gc=False):
    """Tokens that a provider reports for one call. Add two with ``+``."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cache_creation_input_tokens + other.cache_creation_input_tokens,
            self.cache_read_input_tokens + other.cache_read_input_tokens,
        )


# --- content blocks ---------------------------------------------------------------------------


class TextContent(Struct, frozen=True, gc=False, tag_field="type", tag="text"):
    """Text that people and models see."""

    text: str


class ImageContent(
    Struct, frozen=True, gc=False, omit_defaults=True, tag_field="type", tag="image"
):
    """An image, by a ``data:`` URL or a URL that the provider can fetch."""

    source: str
    media_type: str | None = None
    alt: str | None = None


class FileContent(Struct, frozen=True, gc=False, omit_defaults=True, tag_field="type", tag="file"):
    """A document or a recording, by a ``data:`` URL or a URL that the provider can fetch.

    Its media type decides how it is sent, and which providers accept it.
    """

    source: str
    media_type: str | None = None
    name: str | None = None


class ProviderContent(Struct, frozen=True, tag_field="type", tag="provider"):
    """An item that only one provider understands, such as a call of a tool on the server's side.

    ``data`` is that provider's own JSON. It is sent back to it unchanged and in its place, and
    omitted for every other provider.
    """

    provider: str
    data: Any


class ThinkingContent(Struct, frozen=True, gc=False, tag_field="type", tag="thinking"):
    """A thought that the model wrote into its visible output, between ``<thought>`` tags.

    In the next request it is a tag in the text again. It is never sent in a provider's own
    reasoning fields; those carry `ReasoningContent` and `ReasoningDetailsContent`.
    """

    text: str


class ReasoningContent(Struct, frozen=True, gc=False, tag_field="type", tag="reasoning"):
    """Readable reasoning from the provider's own channel, replayed through that channel."""

    text: str


class ReasoningDetailsContent(Struct, frozen=True, tag_field="type", tag="reasoning_details"):
    """Structured reasoning (signed, encrypted, …) from the provider, replayed unchanged.

    ``details`` is the source of truth; the typed views omit unknown items.
    """

    details: tuple[Any, ...]

    @classmethod
    def from_items(cls, items: Iterable[ReasoningItem]) -> ReasoningDetailsContent:
        """The block for items that a codec has made."""
        return cls(tuple([item_to_json(item) for item in items]))

    @property
    def as_items(self) -> tuple[ReasoningItem, ...]:
        """The items of a known kind. Unknown ones stay in ``details``, and are replayed from it."""
        return parse_items(self.details)

    @property
    def has_signed_payload(self) -> bool:
        """Whether a strict provider would miss something if this block were not replayed."""
        return any(item.is_signed for item in self.as_items)


class ToolCall(Struct, frozen=True, tag_field="type", tag="tool_call"):
    """A call of a tool by the model. ``arguments`` is open JSON, normally an object."""

    id: str
    name: str
    arguments: Any


ARG_PARSE_ERROR = "__clark_arg_parse_error"
ARG_RAW = "__clark_arg_raw"


def arg_parse_error(error: str, raw: str) -> dict[str, str]:
    """The arguments of a call whose JSON could not be parsed.

    The loop answers such a call with the syntax error and a quote of what the model sent.
    """
    return {ARG_PARSE_ERROR: error, ARG_RAW: raw}


def detect_arg_parse_error(arguments: object) -> tuple[str, str] | None:
    """``(error, raw)`` if the arguments come from `arg_parse_error`, otherwise None."""
    if not isinstance(arguments, dict) or ARG_PARSE_ERROR not in arguments:
        return None
    fields: dict[str, object] = arguments
    error, raw = fields.get(ARG_PARSE_ERROR), fields.get(ARG_RAW)
    return (error, raw) if isinstance(error, str) and isinstance(raw, str) else None


UserBlock: TypeAlias = TextContent | ImageContent | FileContent
ToolResultBlock: TypeAlias = TextContent | ImageContent | FileContent
AssistantBlock: TypeAlias = (
    TextContent
    | ThinkingContent
    | ReasoningContent
    | ReasoningDetailsContent
    | ToolCall
    | ImageContent
    | ProviderContent
)


class Annotation(Struct, frozen=True, omit_defaults=True):
    """A source of the answer, or of a passage in it: the same type for all providers."""

    kind: str
    """``url`` for a page, ``document`` for one in the request, ``file`` for one that the provider
    stores, ``search`` for a search that was made, ``other`` for anything else."""
    url: str | None = None
    title: str | None = None
    quote: str | None = None
    """The words of the source."""
    start: NonNegativeInt | None = None
    """Where the passage begins in the message's `plain_text`, in characters."""
    end: NonNegativeInt | None = None
    """Where it ends: ``plain_text[start:end]`` is the passage."""
    provider: str | None = None
    data: Any = None
    """The provider's own JSON."""


# --- messages ---------------------------------------------------------------------------------


class SystemMessage(
    Struct, frozen=True, gc=False, omit_defaults=True, tag_field="role", tag="system"
):
    """An instruction from the host or the runtime, anywhere in the transcript."""

    content: str
    timestamp: NonNegativeInt | None = None

    @property
    def role(self) -> Literal["system"]:
        """Who speaks, as in the JSON."""
        return "system"

    @property
    def plain_text(self) -> str:
        """The text."""
        return self.content


class UserMessage(Struct, frozen=True, omit_defaults=True, tag_field="role", tag="user"):
    """A message of the user: a plain string, or blocks of text, images and files."""

    content: str | tuple[UserBlock, ...]
    timestamp: NonNegativeInt | None = None

    @property
    def role(self) -> Literal["user"]:
        """Who speaks, as in the JSON."""
        return "user"

    @property
    def plain_text(self) -> str:
        """The text, joined over all text blocks."""
        return self.content if isinstance(self.content, str) else _text_of(self.content)


class AssistantMessage(Struct, frozen=True, omit_defaults=True, tag_field="role", tag="assistant"):
    """An answer of the model: text, thoughts, reasoning and tool calls, in order."""

    content: tuple[AssistantBlock, ...]
    stop_reason: StopReason
    error_message: str | None = None
    timestamp: NonNegativeInt | None = None
    usage: Usage | None = None
    annotations: tuple[Annotation, ...] = ()
    """The sources of the answer."""

    @property
    def role(self) -> Literal["assistant"]:
        """Who speaks, as in the JSON."""
        return "assistant"

    @classmethod
    def from_text(
        cls, text: str, *, stop_reason: StopReason = StopReason.END_TURN
    ) -> AssistantMessage:
        """An answer of one text block."""
        return cls((TextContent(text),), stop_reason)

    @classmethod
    def from_calls(
        cls,
        calls: Iterable[ToolCall],
        text: str | None = None,
        *,
        stop_reason: StopReason = StopReason.TOOL_USE,
    ) -> AssistantMessage:
        """Tool calls, after ``text`` unless that is blank."""
        blocks = (TextContent(text),) if text and text.strip() else ()
        return cls((*blocks, *calls), stop_reason)

    @property
    def plain_text(self) -> str:
        """The visible text, joined over all text blocks."""
        return _text_of(self.content)

    @property
    def thinking_text(self) -> str:
        """The thoughts written as tags, one a line."""
        return "\n".join([b.text for b in self.content if type(b) is ThinkingContent])

    @property
    def reasoning_text(self) -> str:
        """The provider's readable reasoning, joined."""
        return "".join([b.text for b in self.content if type(b) is ReasoningContent])

    @property
    def reasoning_details_values(self) -> tuple[Any, ...]:
        """All structured reasoning items, in order."""
        return tuple(
            [d for b in self.content if type(b) is ReasoningDetailsContent for d in b.details]
        )

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls, in order."""
        content = self.content
        if len(content) == 1 and type(content[0]) is ToolCall:
            return content  # type: ignore[return-value]
        return tuple([b for b in content if type(b) is ToolCall])


class ToolResultMessage(
    Struct, frozen=True, omit_defaults=True, tag_field="role", tag="tool_result"
):
    """The result of one tool call. The model sees only ``content``.

    ``narration`` is a one-sentence caption for people, ``details`` structured data for hosts.
    """

    tool_call_id: str
    tool_name: str
    content: tuple[ToolResultBlock, ...]
    is_error: bool = field(default_factory=bool)
    narration: str | None = None
    details: Any = None
    timestamp: NonNegativeInt | None = None

    @property
    def role(self) -> Literal["tool_result"]:
        """Who speaks, as in the JSON."""
        return "tool_result"

    @property
    def plain_text(self) -> str:
        """The text, joined over all text blocks."""
        return _text_of(self.content)


class CustomMessage(Struct, frozen=True, omit_defaults=True, tag_field="role", tag="custom"):
    """The host's own message. The loop passes it on and never reads it."""

    kind: str
    payload: Any = field(default_factory=NoneType)
    timestamp: NonNegativeInt | None = None

    @property
    def role(self) -> Literal["custom"]:
        """Who speaks, as in the JSON."""
        return "custom"

    @property
    def plain_text(self) -> str:
        """Empty: only the host knows the meaning of the payload."""
        return ""


AgentMessage: TypeAlias = (
    SystemMessage | UserMessage | AssistantMessage | ToolResultMessage | CustomMessage
)
"""One entry of a transcript, by ``role``."""


_MESSAGE_TYPES = (
    SystemMessage,
    UserMessage,
    AssistantMessage,
    ToolResultMessage,
    CustomMessage,
)


def _text_of(blocks: Iterable[AssistantBlock | UserBlock]) -> str:
    return "".join([b.text for b in blocks if type(b) is TextContent])


# --- identity and context ---------------------------------------------------------------------


class RunIdentity(Struct, frozen=True, gc=False, omit_defaults=True):
    """The identity of a run and of its parent.

    ``deadline_unix_ms`` limits child runs (see `clark_agent.sub_agents`); a run that the host
    starts itself is not limited by it, but plugins may read it.
    """

    run_id: str
    parent_run_id: str | None = None
    depth: NonNegativeInt = field(default_factory=int)
    conversation_id: str | None = None
    deadline_unix_ms: NonNegativeInt | None = None

    @classmethod
    def root(
        cls,
        run_id: str | None = None,
        *,
        conversation_id: str | None = None,
        deadline_unix_ms: int | None = None,
    ) -> RunIdentity:
        """A top-level run, with a fresh UUID unless ``run_id`` is given."""
        return cls(
            run_id or random_id(),
            conversation_id=conversation_id,
            deadline_unix_ms=deadline_unix_ms,
        )

    @classmethod
    def child_of(cls, parent: RunIdentity, run_id: str | None = None) -> RunIdentity:
        """A run spawned by ``parent``: one deeper, same conversation and deadline."""
        return cls(
            run_id or random_id(),
            parent_run_id=parent.run_id,
            depth=parent.depth + 1,
            conversation_id=parent.conversation_id,
            deadline_unix_ms=parent.deadline_unix_ms,
        )


class HasMessages(Protocol):
    """Anything that carries the messages of a run: its result, or the error that ended it."""

    @property
    def messages(self) -> Iterable[AgentMessage]:
        """The messages of the run."""
        ...


def _must_be(name: str, value: object, kind: type[Any], words: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"AgentContext: {name} must be {words}, not {type(value).__name__}")


class AgentContext(Struct, frozen=True, omit_defaults=True):
    """Where a run starts: the system prompt and the transcript so far. A run never changes it."""

    system_prompt: str = ""
    messages: tuple[AgentMessage, ...] = ()
    identity: RunIdentity | None = None

    def __post_init__(self) -> None:
        given: Any = self.messages
        _must_be("system_prompt", self.system_prompt, str, "a text")
        if self.identity is not None:
            _must_be("identity", self.identity, RunIdentity, "a RunIdentity")
        if type(given) is not tuple:  # such as an iterator, which can be read only once
            _must_be("messages", given, Iterable, "a list of messages")
            force_setattr(self, "messages", tuple(given))
        if type(self.system_prompt) is not str:
            force_setattr(self, "system_prompt", well_formed(self.system_prompt))
        # Making a set of the types is faster than checking each message.
        wrong = {*map(type, self.messages)}.difference(_MESSAGE_TYPES)
        for each in wrong:
            if not issubclass(each, _MESSAGE_TYPES):
                raise TypeError(
                    f"AgentContext: messages must be messages, not {each.__name__}: use "
                    "UserMessage('...') for a text of the user"
                )

    def extend(self, produced: HasMessages | Iterable[AgentMessage]) -> AgentContext:
        """The context after a run: pass its result, the error that ended it, or messages."""
        given: Any = produced
        new = getattr(given, "messages", given)
        if isinstance(new, str) or not isinstance(new, Iterable):
            kind = type(given).__name__
            raise TypeError(f"expected a result, an error of a run, or messages, not {kind}")
        return replace(self, messages=(*self.messages, *new))

    def spawn_child(self, system_prompt: str) -> AgentContext:
        """An empty context whose identity is a child of this one's, or of a fresh root."""
        parent = self.identity or RunIdentity.root()
        return AgentContext(system_prompt, identity=RunIdentity.child_of(parent))
