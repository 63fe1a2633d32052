"""What hypothesis can make of the data layers: values that are valid, and transcripts that are not.

Strategies that hold text take it as an argument, so that a test can plant its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from msgspec.structs import replace

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    RunIdentity,
    StopReason,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResult,
    ToolResultMessage,
    ToolSchema,
    Usage,
    UserMessage,
)
from clark_agent.reasoning import (
    ReasoningEncrypted,
    ReasoningFormat,
    ReasoningItem,
    ReasoningSummary,
    ReasoningText,
)
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    ReasoningChunk,
    ReasoningDetailsChunk,
    StreamChunk,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
)
from clark_agent.types import Annotation, AssistantBlock, UserBlock

# --- leaves -----------------------------------------------------------------------------------

# Beside what hypothesis thinks of: what a line splitter or an escaper may stumble over.
_awkward = st.sampled_from(list('"\\/\0\n\r\t\x1f\x7f\x85\u2028\u2029\ufeffé😀'))
TEXT = st.text(_awkward | st.characters(codec="utf-8"), max_size=12)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
UNSIGNED = st.integers(0, 2**64 - 1)


@cache
def open_json(text: SearchStrategy[str] = TEXT) -> SearchStrategy[Any]:
    """Any JSON value, as a decoder gives it."""
    scalars = st.none() | st.booleans() | INTEGERS | FLOATS | text
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
        max_leaves=6,
    )


def optional(inner: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.none() | inner


# --- blocks and messages ----------------------------------------------------------------------

USAGES = st.builds(Usage, *[st.integers(-(2**63), 2**63 - 1)] * 4)
TIMESTAMPS = optional(UNSIGNED)


def user_blocks(text: SearchStrategy[str] = TEXT) -> SearchStrategy[UserBlock]:
    """Also what a tool result may hold."""
    return st.one_of(
        st.builds(TextContent, text),
        images(text),
        st.builds(FileContent, text, optional(text), optional(text)),
    )


def images(text: SearchStrategy[str] = TEXT) -> SearchStrategy[ImageContent]:
    return st.builds(ImageContent, text, optional(text), optional(text))


def provider_items(text: SearchStrategy[str] = TEXT) -> SearchStrategy[ProviderContent]:
    names = st.sampled_from(["anthropic", "openai", "google", "chat"])
    return st.builds(ProviderContent, names | text, open_json(text))


def sources(text: SearchStrategy[str] = TEXT) -> SearchStrategy[Annotation]:
    places, words = optional(st.integers(0, 99)), optional(text)
    return st.builds(Annotation, text, words, words, words, places, places, words, open_json(text))


def tool_calls(text: SearchStrategy[str] = TEXT) -> SearchStrategy[ToolCall]:
    return st.builds(ToolCall, text, text, open_json(text))


def assistant_blocks(text: SearchStrategy[str] = TEXT) -> SearchStrategy[AssistantBlock]:
    return st.one_of(
        st.builds(TextContent, text),
        st.builds(ThinkingContent, text),
        st.builds(ReasoningContent, text),
        st.builds(ReasoningDetailsContent, _tuples(open_json(text), 3)),
        tool_calls(text),
        images(text),
        provider_items(text),
    )


def system_messages(text: SearchStrategy[str] = TEXT) -> SearchStrategy[SystemMessage]:
    return st.builds(SystemMessage, text, TIMESTAMPS)


def user_messages(text: SearchStrategy[str] = TEXT) -> SearchStrategy[UserMessage]:
    return st.builds(UserMessage, text | _tuples(user_blocks(text)), TIMESTAMPS)


def assistant_messages(text: SearchStrategy[str] = TEXT) -> SearchStrategy[AssistantMessage]:
    return st.builds(
        AssistantMessage,
        _tuples(assistant_blocks(text)),
        st.sampled_from(StopReason),
        optional(text),
        TIMESTAMPS,
        optional(USAGES),
        _tuples(sources(text), 2),
    )


def tool_result_messages(text: SearchStrategy[str] = TEXT) -> SearchStrategy[ToolResultMessage]:
    return st.builds(
        ToolResultMessage,
        text,
        text,
        _tuples(user_blocks(text)),
        st.booleans(),
        optional(text),
        open_json(text),
        TIMESTAMPS,
    )


def custom_messages(text: SearchStrategy[str] = TEXT) -> SearchStrategy[CustomMessage]:
    return st.builds(CustomMessage, text, open_json(text), TIMESTAMPS)


@cache
def messages(text: SearchStrategy[str] = TEXT) -> SearchStrategy[AgentMessage]:
    return st.one_of(
        system_messages(text),
        user_messages(text),
        assistant_messages(text),
        tool_result_messages(text),
        custom_messages(text),
    )


def transcripts(text: SearchStrategy[str] = TEXT) -> SearchStrategy[list[AgentMessage]]:
    """Any messages in any order, most of which no provider would take."""
    return st.lists(messages(text), max_size=5)


def without_files(message: AgentMessage) -> AgentMessage:
    """The same message for a provider that takes no files."""
    if isinstance(message, (UserMessage, ToolResultMessage)) and not isinstance(
        message.content, str
    ):
        blocks = [block for block in message.content if not isinstance(block, FileContent)]
        return replace(message, content=tuple(blocks))
    return message


def dated(message: AgentMessage, timestamp: int | None) -> AgentMessage:
    """The same message, written at that time."""
    same: AgentMessage = replace(message, timestamp=timestamp)
    return same


def _tuples(inner: SearchStrategy[Any], max_size: int = 4) -> SearchStrategy[tuple[Any, ...]]:
    return st.lists(inner, max_size=max_size).map(tuple)


# --- everything around messages ---------------------------------------------------------------

IDENTITIES = st.builds(
    RunIdentity,
    TEXT,
    optional(TEXT),
    st.integers(0, 2**32 - 1),
    optional(TEXT),
    optional(UNSIGNED),
)


def tool_results(text: SearchStrategy[str] = TEXT) -> SearchStrategy[ToolResult]:
    return st.builds(
        ToolResult,
        _tuples(user_blocks(text)),
        st.booleans(),
        open_json(text),
        st.booleans(),
        optional(text),
    )


def tool_schemas(
    text: SearchStrategy[str] = TEXT, names: SearchStrategy[str] = TEXT
) -> SearchStrategy[ToolSchema]:
    return st.builds(ToolSchema, names, text, open_json(text))


_FORMATS = st.sampled_from(ReasoningFormat)
_INDEXES = optional(st.integers(0, 2**63 - 1))
REASONING_ITEMS: SearchStrategy[ReasoningItem] = st.one_of(
    st.builds(ReasoningText, optional(TEXT), _FORMATS, _INDEXES, TEXT, optional(TEXT)),
    st.builds(ReasoningSummary, optional(TEXT), _FORMATS, _INDEXES, TEXT),
    st.builds(ReasoningEncrypted, optional(TEXT), _FORMATS, _INDEXES, TEXT),
)


# --- chunks and cuts --------------------------------------------------------------------------


def chunks(
    text: SearchStrategy[str] = TEXT, arguments: SearchStrategy[str] = TEXT
) -> SearchStrategy[StreamChunk]:
    return st.one_of(
        st.builds(TextChunk, text),
        st.builds(ThinkingChunk, text),
        st.builds(ReasoningChunk, text),
        st.builds(ReasoningDetailsChunk, _tuples(open_json(), 3)),
        st.builds(
            ToolCallChunk, st.integers(0, 3), optional(text), optional(text), optional(arguments)
        ),
        st.builds(BlockChunk, images() | provider_items()),
        st.builds(AnnotationChunk, sources()),
    )


@st.composite
def cuts(draw: DrawFn, whole: Any, max_cuts: int = 6) -> list[Any]:
    """The pieces of a string or tuple that was cut anywhere, some of them perhaps empty."""
    places = draw(st.lists(st.integers(0, len(whole)), max_size=max_cuts).map(sorted))
    return [
        whole[start:end] for start, end in zip([0, *places], [*places, len(whole)], strict=True)
    ]


# --- transcripts with tool calls, sound and otherwise -----------------------------------------

CALL_IDS = (
    "",
    "a",
    "b",
    "call_0",
    "clark_agent_call_1",
    "clark_agent_call_3",
    "plain_text_terminal_fallback_x",
)
_call_ids = st.sampled_from(CALL_IDS)
_bystanders = st.one_of(
    st.builds(UserMessage, st.just("hm")),
    st.builds(SystemMessage, st.just("note")),
    st.builds(CustomMessage, st.just("mark")),
    st.just(AssistantMessage.from_text("so")),
)


def calling(*ids: str) -> AssistantMessage:
    """An assistant message that says a word before each of its calls."""
    blocks: list[AssistantBlock] = []
    for call_id in ids:
        blocks += [TextContent("now"), ToolCall(call_id, "look", {})]
    return AssistantMessage(tuple(blocks), StopReason.TOOL_USE)


def result(call_id: str, text: str = "seen") -> ToolResultMessage:
    return ToolResultMessage(call_id, "look", (TextContent(text),))


@st.composite
def sound_histories(draw: DrawFn) -> list[AgentMessage]:
    """What a provider takes: each call has its own id, and its one result right behind it."""
    history: list[AgentMessage] = []
    for turn in range(draw(st.integers(0, 4))):
        history += draw(st.lists(_bystanders, max_size=2))
        ids = [f"{turn}.{call}" for call in range(draw(st.integers(0, 3)))]
        history += [calling(*ids), *[result(call_id) for call_id in draw(st.permutations(ids))]]
    return history


@st.composite
def _mangled(draw: DrawFn) -> list[AgentMessage]:
    """A sound history after crashes, merges and a server with few ideas for ids."""
    history = draw(sound_histories())
    names = draw(st.dictionaries(st.sampled_from(["0.0", "0.1", "1.0", "2.0"]), _call_ids))
    history = [_renamed(message, names) for message in history]
    for _ in range(draw(st.integers(0, 4))):
        if not history:
            break
        place = draw(st.integers(0, len(history) - 1))
        match draw(st.sampled_from(["drop", "repeat", "move", "cut"])):
            case "drop":
                del history[place]
            case "repeat":
                history.insert(draw(st.integers(0, len(history))), history[place])
            case "move":
                history.insert(draw(st.integers(0, len(history) - 1)), history.pop(place))
            case _:
                del history[place:]
    return history


def _renamed(message: AgentMessage, names: dict[str, str]) -> AgentMessage:
    if isinstance(message, ToolResultMessage):
        return replace(message, tool_call_id=names.get(message.tool_call_id, message.tool_call_id))
    if not isinstance(message, AssistantMessage):
        return message
    blocks = [
        replace(block, id=names.get(block.id, block.id)) if isinstance(block, ToolCall) else block
        for block in message.content
    ]
    return replace(message, content=tuple(blocks))


_heaps: SearchStrategy[list[AgentMessage]] = st.lists(
    st.one_of(
        st.lists(_call_ids, max_size=3).map(lambda ids: calling(*ids)),
        _call_ids.map(result),
        _call_ids.map(result),
        _bystanders,
    ),
    max_size=12,
)
_shuffled: SearchStrategy[list[AgentMessage]] = st.permutations(
    [calling("a", "b"), result("a"), result("b"), calling("a"), result("a"), calling("")]
)


def broken_histories() -> SearchStrategy[list[AgentMessage]]:
    """Calls and results that are shuffled, cut, doubled, and given the same ids.

    Every message has its place as its timestamp, so that a test can tell where it went.
    """
    return (_mangled() | _heaps | _shuffled).map(_numbered)


def _numbered(history: list[AgentMessage]) -> list[AgentMessage]:
    return [dated(message, place) for place, message in enumerate(history)]
