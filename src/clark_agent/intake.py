"""Values from outside a run, checked and made safe once, where they enter.

Hosts, tools, hooks and transports may pass a value of the wrong type, text that no encoder accepts,
or details that JSON cannot hold. A value that was checked here can be counted, logged, saved and
sent. A valid value is returned unchanged; an invalid one is copied and repaired, or rejected with a
`TypeError` that says what was given and what is allowed.

This module knows messages and tool results, not the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import isfinite
from operator import attrgetter
from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from clark_agent._text import well_formed
from clark_agent.errors import ToolContractError
from clark_agent.messages.transcript import MessageView
from clark_agent.messages.wire import encode_strictly, jsonable
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
from clark_agent.tools.base import ToolResult
from clark_agent.types import (
    AgentMessage,
    Annotation,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    StopReason,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
)

__all__ = [
    "accept_answer",
    "accept_chunk",
    "accept_chunks",
    "accept_json",
    "accept_message",
    "accept_messages",
    "accept_result",
    "is_plain_answer",
    "is_plain_result",
]

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode

_SHOWN = 120


# --- leaves -----------------------------------------------------------------------------------


def accept_json(value: Any, owner: str) -> Any:
    """The value, or a copy that JSON can hold: lone surrogates become U+FFFD, objects their repr.

    ``owner`` describes the value in the log.
    """
    if value is None or (type(value) is float and not isfinite(value)):
        return None  # as JSON writes it
    try:
        written = encode_strictly(value)
    except Exception as error:
        if not isinstance(error, UnicodeError):
            logger.warning(
                "%s cannot be written as JSON (%s); what JSON cannot hold was replaced by its repr",
                owner,
                error,
            )
        return jsonable(value)
    if isinstance(value, dict) and type(value) is not dict:
        return msgspec.json.decode(written)  # the value's own methods may raise later
    return value


def _text(value: Any, field: str) -> str:
    if isinstance(value, str):
        return well_formed(value)
    raise TypeError(f"{field} must be a str, not {_shown(value)}")


def _optional_text(value: Any, field: str) -> str | None:
    return None if value is None else _text(value, field)


def _items(value: Any, field: str) -> tuple[Any, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(accept_json(tuple(value), field))
    raise TypeError(f"{field} must be a tuple, not {_shown(value)}")


def _place(value: Any, field: str) -> int | None:
    """A position in a text. A negative one, as ``str.find`` returns it, means None."""
    if value is None or type(value) is int:
        return value if value is None or value >= 0 else None
    raise TypeError(f"{field} must be an int or None, not {_shown(value)}")


def _timestamp(value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    if isinstance(value, (int, float)) and value == value and abs(value) < 1e18:
        return int(value)
    raise TypeError(f"timestamp must be an int (milliseconds) or None, not {_shown(value)}")


def _usage(value: Any) -> Usage | None:
    if value is None:
        return None
    if not isinstance(value, Usage):
        raise TypeError(f"usage must be a Usage or None, not {_shown(value)}")
    if (
        type(value.input_tokens) is int
        and type(value.output_tokens) is int
        and type(value.cache_creation_input_tokens) is int
        and type(value.cache_read_input_tokens) is int
    ):
        return value
    counts: list[Any] = [getattr(value, name) for name in Usage.__struct_fields__]
    if any(count is not None and not isinstance(count, (int, float)) for count in counts):
        raise TypeError(f"the counts of a Usage must be ints, not {_shown(value)}")
    return Usage(*[0 if count is None else int(count) for count in counts])


def _stop_reason(value: Any) -> StopReason:
    try:
        return StopReason(value)
    except ValueError:
        allowed = ", ".join(StopReason)
        raise TypeError(f"stop_reason must be one of {allowed}, not {_shown(value)}") from None


def _shown(value: object) -> str:
    """The type of a rejected value, and the start of its repr."""
    kind = type(value).__name__
    if value is None:
        return "None (NoneType)"
    try:
        text = well_formed(repr(value))
    except Exception:
        return f"a {kind}"
    return f"a {kind}: {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}"


# --- blocks -----------------------------------------------------------------------------------


def _block(block: Any, allowed: tuple[type, ...]) -> Any:
    kind = type(block)
    if kind not in allowed:
        names = ", ".join([each.__name__ for each in allowed])
        raise TypeError(f"content holds {names}; not {_shown(block)}")
    if kind is ToolCall:
        return _changed(
            block,
            id=_text(block.id, "ToolCall.id"),
            name=_text(block.name, "ToolCall.name"),
            arguments=accept_json(block.arguments, f"the arguments of a call of {block.name!r}"),
        )
    return _checked(block)


def _checked(value: Any) -> Any:
    """The struct, with each field checked according to `_FIELDS`."""
    kind = type(value)
    return _changed(
        value,
        **{
            name: check(getattr(value, name), f"{kind.__name__}.{name}")
            for name, check in _FIELDS[kind].items()
        },
    )


def _blocks(content: Any, allowed: tuple[type, ...]) -> tuple[Any, ...]:
    if not isinstance(content, (tuple, list)):
        raise TypeError(f"content must be a tuple of blocks, not {_shown(content)}")
    blocks = [_block(block, allowed) for block in content]
    return _same(content, tuple(blocks))


def _same(before: Any, after: tuple[Any, ...]) -> tuple[Any, ...]:
    """The given value, if nothing in it was replaced."""
    if type(before) is tuple and all(map(_is, before, after)):
        return before
    return after


def _is(one: object, other: object) -> bool:
    return one is other


def _changed(value: Any, **fields: Any) -> Any:
    """The struct with these fields; itself if nothing changes."""
    changes = {name: new for name, new in fields.items() if getattr(value, name) is not new}
    return replace(value, **changes) if changes else value


_FIELDS: dict[type, dict[str, Callable[[Any, str], Any]]] = {
    TextContent: {"text": _text},
    ThinkingContent: {"text": _text},
    ReasoningContent: {"text": _text},
    ReasoningDetailsContent: {"details": _items},
    ImageContent: {"source": _text, "media_type": _optional_text, "alt": _optional_text},
    FileContent: {"source": _text, "media_type": _optional_text, "name": _optional_text},
    ProviderContent: {"provider": _text, "data": accept_json},
    Annotation: {
        "kind": _text,
        "url": _optional_text,
        "title": _optional_text,
        "quote": _optional_text,
        "start": _place,
        "end": _place,
        "provider": _optional_text,
        "data": accept_json,
    },
}
_USER_BLOCKS = (TextContent, ImageContent, FileContent)
_WHOLE_BLOCKS = (ImageContent, ProviderContent)
_ASSISTANT_BLOCKS = (
    TextContent,
    ToolCall,
    ThinkingContent,
    ReasoningContent,
    ReasoningDetailsContent,
    *_WHOLE_BLOCKS,
)


def _annotation(value: Any) -> Annotation:
    if type(value) is not Annotation:
        raise TypeError(f"expected an Annotation, not {_shown(value)}")
    annotation: Annotation = _checked(value)
    return annotation


def _annotations(value: Any) -> tuple[Annotation, ...]:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"annotations must be a tuple of Annotation, not {_shown(value)}")
    return _same(value, tuple([_annotation(each) for each in value]))


# --- messages ---------------------------------------------------------------------------------


def accept_answer(message: Any) -> AssistantMessage:
    """The assistant message, safe to keep. Raises `TypeError` for anything else."""
    if not isinstance(message, AssistantMessage):
        raise TypeError(f"expected an AssistantMessage, not {_shown(message)}")
    accepted: AssistantMessage = _changed(
        message,
        content=_blocks(message.content, _ASSISTANT_BLOCKS),
        stop_reason=_stop_reason(message.stop_reason),
        error_message=_optional_text(message.error_message, "error_message"),
        timestamp=_timestamp(message.timestamp),
        usage=_usage(message.usage),
        annotations=_annotations(message.annotations),
    )
    return accepted


def is_plain_answer(message: Any) -> bool:
    """Whether an answer can be kept unchanged. A quick check, because every turn has one."""
    if type(message) is not AssistantMessage or message.annotations:
        return False
    kinds = tuple(map(type, _plain_fields(message)))
    if kinds not in _PLAIN_FIELDS and not (
        kinds in _WITH_USAGE and _usage(message.usage) is message.usage
    ):
        return False
    for block in message.content:
        if type(block) is ToolCall:
            if type(block.name) is not str or type(block.id) is not str:
                return False
        elif type(block) is not TextContent or type(block.text) is not str:
            return False
    try:
        _encode(message)  # fails for half a character, and for arguments without a JSON form
    except Exception:
        return False
    return True


_plain_fields = attrgetter("usage", "content", "stop_reason", "error_message", "timestamp")
_PLAIN_FIELDS = {
    (type(None), tuple, StopReason, type(None), int),
    (type(None), tuple, StopReason, type(None), type(None)),
}
_WITH_USAGE = {(Usage, *kinds[1:]) for kinds in _PLAIN_FIELDS}


def _accept_system(message: SystemMessage) -> AgentMessage:
    content = _text(message.content, "SystemMessage.content")
    accepted: AgentMessage = _changed(
        message, content=content, timestamp=_timestamp(message.timestamp)
    )
    return accepted


def _accept_user(message: UserMessage) -> AgentMessage:
    content: Any = message.content
    accepted: AgentMessage = _changed(
        message,
        content=well_formed(content)
        if isinstance(content, str)
        else _blocks(content, _USER_BLOCKS),
        timestamp=_timestamp(message.timestamp),
    )
    return accepted


def _accept_tool_result(message: ToolResultMessage) -> AgentMessage:
    accepted: AgentMessage = _changed(
        message,
        tool_call_id=_text(message.tool_call_id, "ToolResultMessage.tool_call_id"),
        tool_name=_text(message.tool_name, "ToolResultMessage.tool_name"),
        content=_blocks(message.content, _USER_BLOCKS),
        is_error=bool(message.is_error),
        narration=_optional_text(message.narration, "narration"),
        details=accept_json(message.details, "the details of a tool result"),
        timestamp=_timestamp(message.timestamp),
    )
    return accepted


def _accept_custom(message: CustomMessage) -> AgentMessage:
    accepted: AgentMessage = _changed(
        message,
        kind=_text(message.kind, "CustomMessage.kind"),
        payload=accept_json(message.payload, "the payload of a custom message"),
        timestamp=_timestamp(message.timestamp),
    )
    return accepted


_ACCEPT: dict[type, Callable[[Any], AgentMessage]] = {
    SystemMessage: _accept_system,
    UserMessage: _accept_user,
    AssistantMessage: accept_answer,
    ToolResultMessage: _accept_tool_result,
    CustomMessage: _accept_custom,
}


def accept_message(message: Any) -> AgentMessage:
    """The message, safe to keep. Raises `TypeError` for anything else, or an invalid field."""
    accept = _ACCEPT.get(type(message))
    if accept is None:  # a host may have subclasses
        accept = next((each for kind, each in _ACCEPT.items() if isinstance(message, kind)), None)
    if accept is None:
        raise TypeError(f"expected messages, but one is a {type(message).__name__}")
    return accept(message)


def accept_messages(value: object, known: Iterable[AgentMessage] = ()) -> Sequence[AgentMessage]:
    """The messages, safe to keep. Raises `TypeError` for anything else.

    Those in ``known`` were already accepted and are not checked again; nor is a view, which has
    only accepted messages.
    """
    if isinstance(value, MessageView) or (isinstance(value, (list, tuple)) and not value):
        return value
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"expected messages, not {type(value).__name__}")
    given = value if isinstance(value, (list, tuple)) else tuple(value)
    ids = set(map(id, known))
    accepted = [m if id(m) in ids else accept_message(m) for m in given]
    return given if all(map(_is, given, accepted)) else tuple(accepted)


# --- results and chunks -----------------------------------------------------------------------


def accept_result(result: Any, owner: str) -> ToolResult:
    """The result, safe to keep. Raises `ToolContractError` for anything else.

    ``owner`` names the code that returned it.
    """
    if type(result) is ToolResult:
        return _accept_result(result, owner)
    hint = ""
    if hasattr(result, "__await__"):
        hint = " (an 'await' is missing)"
        getattr(result, "close", lambda: None)()  # so that Python does not warn as well
    raise ToolContractError(f"{owner} must return a ToolResult, not {_shown(result)}{hint}")


def is_plain_result(result: Any) -> bool:
    """Whether a tool's result is text that can be kept unchanged, as most are."""
    if type(result) is not ToolResult or result.details is not None or result.narration is not None:
        return False
    content = result.content
    if type(content) is not tuple:
        return False
    for block in content:
        if type(block) is not TextContent:
            return False
        text = block.text
        if type(text) is not str or not (text.isascii() or well_formed(text) is text):
            return False
    return True


def _accept_result(result: ToolResult, owner: str) -> ToolResult:
    try:
        accepted: ToolResult = _changed(
            result,
            content=_blocks(result.content, _USER_BLOCKS),
            is_error=bool(result.is_error),
            terminate=bool(result.terminate),
            narration=_optional_text(result.narration, "narration"),
            details=accept_json(result.details, f"what {owner} returned as details"),
        )
    except TypeError as error:
        raise ToolContractError(f"{owner} returned a ToolResult whose {error}") from None
    return accepted


_DELTAS = (TextChunk, ThinkingChunk, ReasoningChunk)


def accept_chunk(chunk: Any) -> StreamChunk:
    """The chunk. Raises `TypeError` for anything else.

    A lone surrogate in a delta of text stays: it may be half of a character whose other half comes
    next.
    """
    kind = type(chunk)
    accepted: StreamChunk = chunk
    if kind in _DELTAS:
        if not isinstance(chunk.delta, str):
            raise TypeError(f"{kind.__name__}.delta must be a str, not {_shown(chunk.delta)}")
    elif kind is ToolCallChunk:
        parts = (chunk.id_delta, chunk.name_delta, chunk.arguments_delta)
        if (
            type(chunk.index) is not int
            or chunk.index < 0
            or any(p is not None and not isinstance(p, str) for p in parts)
        ):
            raise TypeError(
                "a ToolCallChunk needs an index of at least 0 and deltas that are texts, "
                f"not {_shown(chunk)}"
            )
    elif kind is ReasoningDetailsChunk:
        accepted = _changed(chunk, delta=_items(chunk.delta, "ReasoningDetailsChunk.delta"))
    elif kind is BlockChunk:
        accepted = _changed(chunk, block=_block(chunk.block, _WHOLE_BLOCKS))
    elif kind is AnnotationChunk:
        accepted = _changed(chunk, annotation=_annotation(chunk.annotation))
    else:
        names = " or ".join([each.__name__ for each in get_args(StreamChunk)])
        raise TypeError(f"a Chunk must hold a {names}, not {_shown(chunk)}")
    return accepted


_TEXT_ALONE = frozenset([TextChunk])
_delta = attrgetter("delta")


def accept_chunks(chunks: list[StreamChunk]) -> None:
    """Check that all are chunks, in place.

    Raises `TypeError` at the first invalid one; it and those after it are dropped.
    """
    if set(map(type, chunks)) <= _TEXT_ALONE:  # the usual case
        with suppress(TypeError):
            "".join(map(_delta, chunks))
            return
    for place, chunk in enumerate(chunks):
        try:
            chunks[place] = accept_chunk(chunk)
        except TypeError:
            del chunks[place:]
            raise
