"""Prepares a history for a request. The rules are the same for all providers:

- custom messages are left out;
- reasoning of other providers is left out (`clark_agent.transports.http.reasoning_transfer`);
- every call has one result, directly after its message, and ids are unique
  (`clark_agent.history.repair_history`);
- an assistant message that a failure cut off, or that is empty, is left out;
- thoughts go back into the text, between tags;
- signed reasoning that has lost its signature is an error here, before the server rejects it;
- so is a file that the provider does not accept: no file is left out silently;
- a schema for the answer that the provider cannot ensure is described in the system prompt.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from hashlib import sha256
from mimetypes import guess_type
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import msgspec
from msgspec.structs import replace

from clark_agent.errors import ReplayRefused, TransportError
from clark_agent.history import repair_history
from clark_agent.messages.transcript import MessageView
from clark_agent.reasoning import ReplayContract, audit_replay, parse_items
from clark_agent.stream import StreamRequest
from clark_agent.tools.schema import JsonSchema, strict_schema
from clark_agent.transports.http.reasoning_transfer import ReasoningTarget, convert_history
from clark_agent.types import (
    AgentMessage,
    AssistantBlock,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningDetailsContent,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UserBlock,
    UserMessage,
    detect_arg_parse_error,
)

__all__ = [
    "arguments_object",
    "arguments_text",
    "custom_input",
    "custom_tools",
    "inline_data",
    "is_set",
    "media_type_of",
    "merged",
    "safe_id",
    "safe_name",
    "sendable",
    "stable_part",
    "strict_form",
    "with_extras",
    "with_schema_in_prompt",
    "woven_text",
]

_BROKEN = (StopReason.ERROR, StopReason.ABORTED)
_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
# Google's models can also read from Google Cloud Storage (``gs://``).
_ADDRESS = re.compile(r"(https?|gs)://\S", re.IGNORECASE)


def sendable(
    messages: Iterable[AgentMessage],
    target: ReasoningTarget,
    *,
    provider: str = "the provider",
    takes_file: Callable[[FileContent], bool] = lambda file: False,
) -> Sequence[AgentMessage]:
    """Return the messages to send, in a form that the provider accepts.

    Raises `ReplayRefused` if the reasoning of an open tool round has lost its signatures, and
    `TransportError` for a file that the provider does not accept.
    """
    messages = tuple(messages)
    _check_files(messages, provider, takes_file)
    kept = [(place, m) for place, m in enumerate(messages) if _is_for_models(m)]
    converted = convert_history([message for _, message in kept], target)
    _audit(converted, [place for place, _ in kept])
    return repair_history([message for message in converted if _has_content(message)]).messages


def _is_for_models(message: AgentMessage) -> bool:
    if isinstance(message, CustomMessage):
        return False
    if isinstance(message, AssistantMessage):
        # The user has seen the text of an aborted message. An incomplete call, or the text before
        # a failure, is left out.
        has_text = bool(message.plain_text.strip()) and not message.tool_calls
        was_stopped = message.stop_reason is StopReason.ABORTED
        return (was_stopped and has_text) or message.stop_reason not in _BROKEN
    return True


def _has_content(message: AgentMessage) -> bool:
    if not isinstance(message, (UserMessage, AssistantMessage)):
        return True
    content = message.content
    return bool(content) if isinstance(content, str) else any(map(_is_content, content))


def _is_content(block: AssistantBlock | UserBlock) -> bool:
    if isinstance(block, ReasoningDetailsContent):
        return bool(block.details)
    whole = (ToolCall, ImageContent, FileContent, ProviderContent)
    return isinstance(block, whole) or bool(block.text)


def _check_files(
    messages: Iterable[AgentMessage], provider: str, takes_file: Callable[[FileContent], bool]
) -> None:
    for place, message in enumerate(messages):
        if not isinstance(message, (UserMessage, ToolResultMessage)):
            continue
        if isinstance(message.content, str):
            continue
        for number, block in enumerate(message.content):
            if not isinstance(block, FileContent):
                continue
            name = f" {block.name!r}" if block.name else ""
            where = f"block {number} of message {place} ({message.role}){name}"
            if not _is_inline(block.source) and not _ADDRESS.match(block.source):
                raise TransportError(
                    f"a file needs a data: URL, or an address that {provider} can fetch: {where}"
                )
            if not takes_file(block):
                how = "inside the request" if inline_data(block.source) else "by its address"
                raise TransportError(
                    f"{provider} does not accept a file of type "
                    f"{media_type_of(block) or 'unknown'} {how}: {where}"
                )


def media_type_of(block: FileContent | ImageContent) -> str:
    """The media type of the block: stated, or guessed from its name or address, or empty."""
    is_inline = _is_inline(block.source)
    stated = block.source[5:].partition(",")[0].partition(";")[0] if is_inline else ""
    if not stated:
        name = block.name if isinstance(block, FileContent) else None
        address = "" if is_inline else block.source
        stated = block.media_type or _guessed(name or "") or _guessed(address) or ""
    return stated.lower().replace("image/jpg", "image/jpeg")


def _guessed(address: str) -> str | None:
    try:
        return guess_type(urlsplit(address).path)[0]
    except ValueError:  # an invalid address from the model or the host
        return None


def inline_data(source: str) -> str | None:
    """The content of a ``data:`` URL, in base64; None for any other address."""
    head, comma, data = source.partition(",")
    if not comma or not _is_inline(source):
        return None
    if head[-7:].lower() == ";base64":
        return unquote(data) if "%" in data else data
    return b64encode(unquote_to_bytes(data)).decode()


def _is_inline(source: str) -> bool:
    return source[:5].lower() == "data:"


def stable_part(
    view: Sequence[AgentMessage], messages: Sequence[AgentMessage]
) -> Sequence[AgentMessage]:
    """The messages that the next request will start with too: all but the tail of a view."""
    tail = view.tail if isinstance(view, MessageView) else ()
    passing = [message for message in tail if not isinstance(message, CustomMessage)]
    return messages[: max(0, len(messages) - len(passing))]


def custom_tools(extras: Any) -> frozenset[str]:
    """The names of the tools in ``provider_extras`` that take plain text: OpenAI's custom tools."""
    tools = extras.get("tools") if isinstance(extras, Mapping) else None
    names = [
        tool.get("name") or (tool.get("custom") or {}).get("name")
        for tool in (tools if isinstance(tools, (list, tuple)) else ())
        if isinstance(tool, Mapping) and tool.get("type") == "custom"
    ]
    return frozenset([name for name in names if isinstance(name, str)])


def custom_input(call: ToolCall, custom: Set[str]) -> str | None:
    """The plain text that a call passed to a custom tool; None: it is not such a call."""
    arguments = call.arguments
    if call.name not in custom or not isinstance(arguments, dict) or len(arguments) != 1:
        return None
    text: object = arguments.get("input")
    return text if isinstance(text, str) else None


def _audit(messages: Sequence[AgentMessage], places: Sequence[int]) -> None:
    """Check the tool rounds since the last user message: providers check only those."""
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if isinstance(message, UserMessage):
            return
        if not isinstance(message, AssistantMessage) or not message.tool_calls:
            continue
        items = parse_items(message.reasoning_details_values)
        contracts = {item.format.replay_contract for item in items}
        for contract in contracts - {ReplayContract.STATELESS}:
            demanded = [item for item in items if item.format.replay_contract is contract]
            audit = audit_replay(demanded, contract, next_turn_carries_tools=True)
            if audit.violation is not None:
                raise ReplayRefused(places[index], audit.violation)


def woven_text(blocks: Iterable[AssistantBlock]) -> str:
    """Join visible text and thoughts in order, each thought between tags."""
    pieces = [
        block.text if isinstance(block, TextContent) else f"<thought>{block.text}</thought>"
        for block in blocks
        if isinstance(block, (TextContent, ThinkingContent))
    ]
    return "".join(pieces)


def arguments_object(call: ToolCall) -> dict[str, Any]:
    """A call's arguments, for providers that accept only an object."""
    unreadable = detect_arg_parse_error(call.arguments)
    if unreadable is not None:
        return {"invalid_json": unreadable[1]}
    if isinstance(call.arguments, dict):
        return call.arguments
    return {"value": call.arguments}


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as JSON text.

    Arguments that could not be parsed go back as a JSON string inside an object: many servers parse
    the text before the model sees it, and fail if it is not JSON.
    """
    arguments = arguments_object(call)
    try:
        return msgspec.json.encode(arguments).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_well_formed(arguments)).decode()
    except (TypeError, NotImplementedError, RecursionError, ValueError) as error:
        text = f"the arguments of the call {call.id} cannot be written as JSON: {error}"
        raise TransportError(text) from error


def safe_id(call_id: str, longest: int) -> str:
    """Return a call id that every provider accepts. An invalid id is replaced by its hash, so that
    a call and its result still have the same id.
    """
    if len(call_id) <= longest and not _UNUSUAL.search(call_id):
        return call_id
    return f"call_{sha256(call_id.encode(errors='replace')).hexdigest()[:24]}"


def safe_name(name: str, longest: int = 64) -> str:
    """Return a tool name that every provider accepts.

    A model may invent a name. The call got an error result, but providers would still reject every
    later request that contains the name.
    """
    return _UNUSUAL.sub("_", name)[:longest] or "_"


def strict_form(schema: Any) -> JsonSchema | None:
    """The schema in the form that constrained decoding requires; None: it has none."""
    try:
        return strict_schema(schema)
    except Exception:  # too open, or not a schema: a gateway's client may send anything
        return None


def with_schema_in_prompt(request: StreamRequest) -> StreamRequest:
    """Return the request with its output schema described in the system prompt.

    For a provider that cannot ensure the schema in this request. Raises `TransportError`.
    """
    schema = request.output_schema
    if schema is None:
        return request
    try:
        text = replace(schema, schema=_well_formed(schema.schema)).instructions
    except (TypeError, NotImplementedError, RecursionError, ValueError) as error:
        raise TransportError(f"the output schema cannot be written as JSON: {error}") from error
    parts = [part for part in (request.system_prompt, text) if part]
    return replace(request, system_prompt="\n\n".join(parts), output_schema=None)


def is_set(extras: Any, *path: str) -> bool:
    """Whether the host's own fields have a value at that path."""
    for name in path:
        if not isinstance(extras, Mapping) or name not in extras:
            return False
        extras = extras[name]
    return True


def with_extras(body: dict[str, Any], extras: Any) -> dict[str, Any]:
    """Merge the host's own fields into the body, and replace lone surrogates.

    A lone surrogate, from a file name or a split emoji, cannot be encoded as UTF-8. Raises
    `TransportError` if the body cannot be written as JSON.
    """
    if extras is not None and not isinstance(extras, Mapping):
        raise TransportError(f"provider_extras must be a mapping, not {type(extras).__name__}")
    body = merged(body, extras or {})
    try:
        msgspec.json.encode(body)
    except UnicodeEncodeError:
        fixed: dict[str, Any] = _well_formed(body)
        return fixed
    except (TypeError, NotImplementedError, RecursionError, ValueError) as error:
        raise TransportError(f"the request cannot be written as JSON: {error}") from error
    return body


def merged(ours: Any, theirs: Any) -> Any:
    """Merge two JSON values; the second wins.

    Objects are merged field by field, unless their ``type`` fields differ. Lists are joined, ours
    first, without duplicates. Any other value of theirs replaces ours.
    """
    if isinstance(ours, dict) and isinstance(theirs, Mapping):
        if ours.get("type") != theirs.get("type", ours.get("type")):
            return theirs
        both = {name: merged(ours[name], theirs[name]) for name in theirs if name in ours}
        return {**ours, **theirs, **both}
    if isinstance(ours, list) and isinstance(theirs, (list, tuple)):
        joined = [*ours]
        joined += [
            item for place, item in enumerate(theirs) if item not in (*ours, *theirs[:place])
        ]
        return joined
    return theirs


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_well_formed(name): _well_formed(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_well_formed(part) for part in value]
    return value
