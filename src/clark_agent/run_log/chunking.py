"""Records how a message was split into deltas, without repeating the message.

A cut is a list of pieces:

    ["text", 3, 4]          the next block of text, in pieces of three and four characters
    ["thinking", …]  ["reasoning", …]
    ["details", 2]          the next two structured reasoning items
    ["block"]               the next block that came whole: an image, or a provider's item
    ["annotation"]          the next source
    ["call", 0, id, name, arguments]
                            a piece of a call, as received: its text cannot be restored from the
                            parsed arguments
    ["raw", {…}]            any delta of a transport whose deltas do not add up to its message
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from clark_agent._text import well_formed
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    MessageAssembler,
    ReasoningChunk,
    ReasoningDetailsChunk,
    StreamChunk,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
)
from clark_agent.types import (
    AssistantMessage,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    TextContent,
    ThinkingContent,
    ToolCall,
)

__all__ = ["cut", "joined"]

_NAMES: dict[type, str] = {
    TextChunk: "text",
    ThinkingChunk: "thinking",
    ReasoningChunk: "reasoning",
}
_KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "text": (TextChunk, TextContent),
    "thinking": (ThinkingChunk, ThinkingContent),
    "reasoning": (ReasoningChunk, ReasoningContent),
}

_WHOLE = (ImageContent, ProviderContent)


def cut(chunks: Sequence[StreamChunk], message: AssistantMessage) -> tuple[Any, ...]:
    """Return how the chunks split the message."""
    if not chunks:
        return ()
    if not _spells(chunks, message):
        return tuple([["raw", chunk] for chunk in chunks])
    pieces: list[list[Any]] = []
    for chunk in chunks:
        if isinstance(chunk, ToolCallChunk):
            pieces.append(
                ["call", chunk.index, chunk.id_delta, chunk.name_delta, chunk.arguments_delta]
            )
        elif isinstance(chunk, ReasoningDetailsChunk):
            pieces.append(["details", len(chunk.delta)])
        elif isinstance(chunk, BlockChunk):
            pieces.append(["block"])
        elif isinstance(chunk, AnnotationChunk):
            pieces.append(["annotation"])
        else:
            name = _NAMES[type(chunk)]
            if not pieces or pieces[-1][0] != name:
                pieces.append([name])
            pieces[-1].append(len(chunk.delta))
    return tuple(pieces)


def joined(pieces: Sequence[Any], message: AssistantMessage) -> Iterator[StreamChunk]:
    """Yield the chunks again."""
    texts = {name: _text(message, kind) for name, (_, kind) in _KINDS.items()}
    taken = dict.fromkeys(texts, 0)
    details = list(message.reasoning_details_values)
    blocks = (block for block in message.content if isinstance(block, _WHOLE))
    annotations = iter(message.annotations)
    for piece in pieces:
        name, *rest = piece
        if name == "raw":
            yield msgspec.convert(rest[0], StreamChunk)
        elif name == "call":
            yield ToolCallChunk(*rest)
        elif name == "details":
            yield ReasoningDetailsChunk(tuple(details[: rest[0]]))
            del details[: rest[0]]
        elif name == "block":
            yield BlockChunk(next(blocks))
        elif name == "annotation":
            yield AnnotationChunk(next(annotations))
        else:
            chunk, _ = _KINDS[name]
            for length in rest:
                start = taken[name]
                taken[name] = start + length
                yield chunk(texts[name][start : start + length])


def _text(message: AssistantMessage, kind: type[Any]) -> str:
    blocks: list[Any] = [block for block in message.content if type(block) is kind]
    return "".join([block.text for block in blocks])


def _spells(chunks: Sequence[StreamChunk], message: AssistantMessage) -> bool:
    """Return whether the chunks fold to the message, apart from an id that was made up."""
    is_plain = len(message.content) == 1 and not message.annotations
    if len(chunks) == 1 and type(chunks[0]) is TextChunk and is_plain:
        block = message.content[0]
        return type(block) is TextContent and block.text == well_formed(chunks[0].delta)
    assembler = MessageAssembler(lambda: "")
    for chunk in chunks:
        assembler.feed(chunk)
    folded = assembler.message()
    content = folded.content
    if folded.annotations != message.annotations:
        return False
    return len(content) == len(message.content) and all(
        type(mine) is type(theirs) and (type(mine) is ToolCall or mine == theirs)
        for mine, theirs in zip(content, message.content, strict=True)
    )
