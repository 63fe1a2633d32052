"""The Responses API: OpenAI's own, and other servers that speak it.

The server stores nothing (``store`` is false), so every request carries the whole history.
Reasoning is sent back as the encrypted blob that the server sent, before the text or call that
followed it. The server rejects a reasoning item without its blob, or without an item after it, so
such items are left out. Ids that the server gave to its items are not sent back, because they would
refer to stored items. Only the items of server tools are sent back unchanged. A picture that the
model made is such an item too: a transcript holds it as the item without the picture, followed by
the picture, and both are sent back as one item.

An answer is a sequence of items. Each is announced, sent in fragments and then sent as a whole. Not
every server does all of that, and gateways lose the indexes and ids that connect the fragments: see
`_ResponsesDecoder`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from mimetypes import guess_extension
from typing import Any, assert_never

import msgspec
from msgspec import Struct

from clark_agent.clock import Clock
from clark_agent.messages.thinking import ThinkingTags
from clark_agent.reasoning import ReasoningEncrypted, ReasoningFormat, parse_items
from clark_agent.stream import OutputModeName, OutputSchema, StreamRequest, ToolSchema
from clark_agent.transports.dialects import best_mode, openai_effort, schema_support
from clark_agent.transports.http.base import Transport
from clark_agent.transports.http.failures import failure_in_stream, failure_of_sdk
from clark_agent.transports.http.reasoning_transfer import ReasoningTarget
from clark_agent.transports.http.request import (
    arguments_text,
    custom_input,
    custom_tools,
    inline_data,
    is_set,
    media_type_of,
    safe_id,
    safe_name,
    sendable,
    strict_form,
    with_extras,
    woven_text,
)
from clark_agent.transports.http.response import Answer, Failure, ProviderFailure
from clark_agent.transports.http.retry import RetryPolicy, Timeouts
from clark_agent.transports.http.sse_json import JsonEventDecoder, fields_of, fitted, json_text
from clark_agent.transports.openai_client import OpenAIClients
from clark_agent.types import (
    AgentMessage,
    Annotation,
    AssistantBlock,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    ReasoningDetailsContent,
    StopReason,
    SystemMessage,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserBlock,
    UserMessage,
)

__all__ = ["OpenAIResponses", "openai_annotation", "openai_schema"]

_FORMAT = ReasoningFormat.OPENAI_RESPONSES_V1
_LONGEST_ID = 64
_LONGEST_NAME = 128
# The server rejects a smaller limit of output tokens.
_SMALLEST_CAP = 16
# Newer models label each message as commentary or as the final answer, and need the label back. A
# transcript holds it as a structured item before the text.
_PHASE = "openai.message_phase"
_PROVIDER = "openai"
_PICTURE = "image_generation_call"
# Items that need an output from the host. The server rejects them in a history without it.
_WAITING = frozenset(
    ["computer_call", "local_shell_call", "shell_call", "apply_patch_call", "mcp_approval_request"]
)
_REFUSES_SUMMARY = re.compile(r"verified to generate reasoning summaries")
_REFUSES_BLOB = re.compile(r"encrypted content .{0,200}could not be verified", re.IGNORECASE)


class OpenAIResponses(Transport[bytes]):
    """A model behind a Responses server.

    ``base_url`` is the server's address, OpenAI's own by default. A key from the environment is
    used only for the host that it belongs to. ``headers`` are sent with every request. ``client``
    is your own ``openai.AsyncOpenAI``, which replaces all of these; you close it yourself.
    ``prompt_cache_key`` routes requests with the same beginning to the same cache.

    If the server rejects one of these, the request is sent again without it, and so are all later
    ones: reasoning summaries, which OpenAI writes only for verified organizations, and blobs that
    were encrypted for another account.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        headers: Mapping[str, str] | None = None,
        client: Any = None,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        thinking_tags: ThinkingTags | bool = "leading",
        prompt_cache_key: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clients = OpenAIClients(
            "OpenAIResponses",
            base_url=base_url,
            api_key=api_key,
            headers=headers,
            client=client,
            timeouts=timeouts,
        )
        self.base_url = self._clients.url
        self.prompt_cache_key = prompt_cache_key
        self._wants_summary = True
        self._refused: frozenset[str] = frozenset()  # blobs that the server rejected
        super().__init__(
            model,
            provider=self._clients.dialect.name,
            secrets=self._clients.secrets,
            retry=retry,
            timeouts=timeouts,
            thinking_tags=thinking_tags,
            clock=clock,
        )

    @property
    def target(self) -> ReasoningTarget:
        """Reasoning that OpenAI encrypted for this model: no other model can read it."""
        formats = frozenset({_FORMAT, ReasoningFormat.AZURE_OPENAI_RESPONSES_V1})
        return ReasoningTarget(formats=formats, model=self.model, providers=frozenset({_PROVIDER}))

    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        """``native`` for OpenAI's models from GPT-4o on, and for Grok."""
        return best_mode(schema_support(self._clients.dialect, self.model), has_tools=has_tools)

    def encode(self, request: StreamRequest) -> dict[str, Any]:
        """Return the body of the request."""
        messages = sendable(
            request.messages, self.target, provider=self.provider, takes_file=_takes_file
        )
        items = _Input(self._refused, custom_tools(request.provider_extras)).items(messages)
        body: dict[str, Any] = {"model": self.model, "input": items, "stream": True, "store": False}
        if request.system_prompt:
            body["instructions"] = request.system_prompt
        if request.tools:
            body["tools"] = [_tool(tool) for tool in request.tools]
            if request.force_tool_call:
                body["tool_choice"] = "required"
        if request.max_output_tokens is not None:
            body["max_output_tokens"] = max(_SMALLEST_CAP, request.max_output_tokens)
        if request.temperature is not None:
            body["temperature"] = request.temperature
        if self.prompt_cache_key is not None:
            body["prompt_cache_key"] = self.prompt_cache_key
        schema = request.output_schema
        if schema is not None and not is_set(request.provider_extras, "text", "format"):
            body["text"] = {"format": {"type": "json_schema", **openai_schema(schema)}}
        effort = openai_effort(self.model, request.reasoning)
        if effort is not None:
            _add_effort(body, effort, with_summary=self._wants_summary)
        return with_extras(body, request.provider_extras)

    def _rewritten(self, request: StreamRequest, failure: Failure) -> Any | None:
        if self._wants_summary and _REFUSES_SUMMARY.search(failure.message):
            self._wants_summary = False
            return self.encode(request)
        if _REFUSES_BLOB.search(failure.message):
            sent = _blobs_in(request.messages)
            if not sent <= self._refused:
                self._refused |= sent
                return self.encode(request)
        return None

    @asynccontextmanager
    async def _open(self, body: dict[str, Any]) -> AsyncGenerator[AsyncIterator[bytes]]:
        async with self._clients.posted("/responses", body) as pieces:
            yield pieces

    def _decoder(self, answer: Answer) -> _ResponsesDecoder:
        return _ResponsesDecoder(answer, self.model)

    def _failure(self, error: Exception) -> Failure:
        return failure_of_sdk(error, self.base_url)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._clients.aclose()


# --- the request ------------------------------------------------------------------------------


def _add_effort(body: dict[str, Any], effort: str, *, with_summary: bool) -> None:
    """Request encrypted reasoning. Only for models that reason: others reject the option."""
    body["include"] = ["reasoning.encrypted_content"]
    body["reasoning"] = {"effort": effort}
    if effort != "none":
        body.pop("temperature", None)  # rejected while reasoning is on
        if with_summary:
            body["reasoning"]["summary"] = "auto"


def _blobs_in(messages: Iterable[AgentMessage]) -> frozenset[str]:
    entries = (
        entry
        for message in messages
        if isinstance(message, AssistantMessage)
        for entry in parse_items(message.reasoning_details_values)
    )
    return frozenset([entry.data for entry in entries if isinstance(entry, ReasoningEncrypted)])


def _tool(tool: ToolSchema) -> dict[str, Any]:
    # By default the server treats a schema as strict, and rejects one that is not.
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": False,
    }


def openai_schema(schema: OutputSchema) -> dict[str, Any]:
    """The name and the schema of an answer, strict if the schema allows it."""
    strict = strict_form(schema.schema)
    described = {"description": schema.description} if schema.description else {}
    return {
        "name": safe_name(schema.name),
        **described,
        "schema": schema.schema if strict is None else strict,
        "strict": strict is not None,
    }


class _Input:
    """Writes a history as items."""

    def __init__(self, refused: frozenset[str], custom: frozenset[str]) -> None:
        self._refused = refused
        self._custom = custom
        self._custom_calls: set[str] = set()
        self._images: list[dict[str, Any]] = []  # pictures that other models made

    def items(self, messages: Iterable[AgentMessage]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for message in messages:
            if not isinstance(message, ToolResultMessage):
                items += self._flush_images()
            items += self._items(message)
        return [*items, *self._flush_images()]

    def _items(self, message: AgentMessage) -> list[dict[str, Any]]:
        match message:
            case SystemMessage():
                return [_message("system", _parts(message.content))] if message.content else []
            case UserMessage():
                return [_message("user", _parts(message.content))]
            case AssistantMessage():
                turn = _Turn(message, self._refused, self._custom)
                self._custom_calls |= turn.custom_calls
                self._images += turn.images
                return turn.items
            case ToolResultMessage():
                return [_result(message, self._custom_calls)]
            case CustomMessage():
                raise AssertionError("custom messages are left out before")
            case _:
                assert_never(message)

    def _flush_images(self) -> list[dict[str, Any]]:
        """Return a user message with other models' pictures: assistant messages cannot hold any."""
        images, self._images = self._images, []
        note = {"type": "input_text", "text": "(Pictures that the assistant made:)"}
        return [_message("user", [note, *images])] if images else []


def _message(role: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": parts}


def _parts(content: str | Sequence[UserBlock]) -> list[dict[str, Any]]:
    blocks = (TextContent(content),) if isinstance(content, str) else content
    return [_part(block) for block in blocks]


def _part(block: UserBlock) -> dict[str, Any]:
    match block:
        case TextContent():
            return {"type": "input_text", "text": block.text}
        case ImageContent():
            return {"type": "input_image", "image_url": block.source, "detail": "auto"}
        case FileContent():
            return _file(block)
        case _:
            assert_never(block)


def _takes_file(file: FileContent) -> bool:
    """Accept documents and pictures. The server decides which documents: it adds new types."""
    return not media_type_of(file).startswith(("audio/", "video/"))


def _file(file: FileContent) -> dict[str, Any]:
    media_type, data = media_type_of(file), inline_data(file.source)
    if media_type.startswith("image/"):
        return {"type": "input_image", "image_url": file.source, "detail": "auto"}
    if data is None:
        return {"type": "input_file", "file_url": file.source}
    name = file.name or f"file{guess_extension(media_type) or ''}"
    source = f"data:{media_type or 'application/octet-stream'};base64,{data}"
    return {"type": "input_file", "filename": name, "file_data": source}


def _result(message: ToolResultMessage, custom_calls: Set[str]) -> dict[str, Any]:
    is_text = all(isinstance(block, TextContent) for block in message.content)
    is_custom = message.tool_call_id in custom_calls
    return {
        "type": "custom_tool_call_output" if is_custom else "function_call_output",
        "call_id": safe_id(message.tool_call_id, _LONGEST_ID),
        "output": message.plain_text if is_text else _parts(message.content),
    }


class _Turn:
    """Writes the items of an assistant message, in their order."""

    def __init__(
        self, message: AssistantMessage, refused: frozenset[str], custom: frozenset[str]
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self.images: list[dict[str, Any]] = []
        self.custom_calls: set[str] = set()
        self._refused = refused
        self._custom = custom
        self._picture: dict[str, Any] | None = None  # the item of the picture that follows
        self._text_blocks: list[AssistantBlock] = []
        self._phase: str | None = None
        self._summary: list[dict[str, Any]] = []
        for block in message.content:
            self._add(block)
        self._end_text()
        while self.items and self.items[-1]["type"] == "reasoning":
            self.items.pop()

    def _add(self, block: AssistantBlock) -> None:
        if isinstance(block, (TextContent, ThinkingContent)):
            self._text_blocks.append(block)
            return
        self._end_text()
        if isinstance(block, ReasoningDetailsContent):
            for entry in block.details:
                self._structured(entry)
        elif isinstance(block, ToolCall):
            self._call(block)
        elif isinstance(block, ProviderContent):
            self._item(block.data)
        elif isinstance(block, ImageContent):
            self._image(block)

    def _call(self, call: ToolCall) -> None:
        item = {"call_id": safe_id(call.id, _LONGEST_ID)}
        item["name"] = safe_name(call.name, _LONGEST_NAME)
        if (text := custom_input(call, self._custom)) is not None:
            self.custom_calls.add(call.id)
            self.items.append({"type": "custom_tool_call", **item, "input": text})
        else:
            arguments = arguments_text(call)
            self.items.append({"type": "function_call", **item, "arguments": arguments})

    def _item(self, data: Any) -> None:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind == _PICTURE and "result" not in data:
            self._picture = data
        elif isinstance(kind, str) and kind not in _WAITING:
            self.items.append(data)

    def _image(self, image: ImageContent) -> None:
        picture, self._picture = self._picture, None
        if picture is not None and (data := inline_data(image.source)) is not None:
            self.items.append({**picture, "result": data})
        else:
            self.images.append(_part(image))

    def _end_text(self) -> None:
        if text := woven_text(self._text_blocks):
            part = {"type": "output_text", "text": text, "annotations": []}
            written = _message("assistant", [part])
            if self._phase is not None:
                written["phase"] = self._phase
            self.items.append(written)
        self._text_blocks.clear()
        self._phase = None

    def _structured(self, entry: Any) -> None:
        """Add an entry. This transport's entries hold a whole item; a gateway's summaries are
        separate entries before it.
        """
        match entry:
            case {"type": "reasoning.encrypted", "data": str(data)} if data:
                own = entry.get("summary")
                summary = own if isinstance(own, list) else self._summary
                item = {"type": "reasoning", "summary": summary, "encrypted_content": data}
                if data not in self._refused:
                    self.items.append(item)
                self._summary = []
            case {"type": "reasoning.summary", "summary": str(text)}:
                self._summary.append({"type": "summary_text", "text": text})
            case {"type": kind, "phase": str(phase)} if kind == _PHASE:
                self._phase = phase
            case _:
                pass


# --- the answer -------------------------------------------------------------------------------


class _Whole(Struct):
    """An item as the server sends it, complete or incomplete."""

    type: str | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    input: Any = None
    content: Any = None
    summary: Any = None
    encrypted_content: str | None = None
    phase: str | None = None


class _Response(Struct):
    id: Any = None
    model: Any = None
    status: Any = None
    output: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    error: Any = None


class _Event(_Response):
    """An event of any type, or a whole response. Has only the fields that are read."""

    type: str | None = None
    delta: Any = None
    output_index: int | None = None
    item_id: str | None = None
    summary_index: int | None = None
    content_index: int | None = None
    item: dict[str, Any] | None = None
    arguments: Any = None
    input: Any = None
    annotation: Any = None
    response: _Response | None = None
    code: Any = None
    message: Any = None


_EVENTS = msgspec.json.Decoder(_Event)

_MESSAGE = "message"
_CALL = "function_call"
_CUSTOM = "custom_tool_call"
_REASONING = "reasoning"
_KINDS = frozenset({_MESSAGE, _CALL, _CUSTOM, _REASONING})


class _Item:
    """An item of the answer while it streams in."""

    __slots__ = (
        "annotations",
        "announced",
        "begin",
        "call_id",
        "id",
        "index",
        "is_done",
        "key",
        "kind",
        "name",
        "phase",
        "pieces",
    )

    def __init__(self, kind: str, key: int, index: int | None, item_id: str | None) -> None:
        self.kind = kind
        self.key = key
        self.index = index
        self.id = item_id
        self.call_id = ""
        self.name = ""
        self.phase: str | None = None
        self.announced = ""  # the arguments of a call, if its announcement had them
        self.pieces: list[str] = []
        self.begin: dict[int, int] = {}  # where the text of each part starts in all received text
        self.annotations: dict[int, int] = {}  # the number of annotations received for each part
        self.is_done = False

    @property
    def has_come(self) -> bool:
        """Whether any content of it was received."""
        return self.is_done or bool(self.pieces or self.call_id or self.name)

    def is_open(self, kind: str) -> bool:
        """Whether it is of that kind and not complete."""
        return self.kind == kind and not self.is_done

    def is_whole_in(self, whole: _Whole) -> bool:
        """Whether ``whole`` is this item in full, by kind and ids."""
        ids = ((self.id, whole.id), (self.call_id, whole.call_id))
        return whole.type == self.kind and any(mine and mine == other for mine, other in ids)

    def rest(self, whole: str) -> str:
        """Return the part of ``whole`` after the fragments; empty if the fragments differ from it,
        because they are already emitted.
        """
        came = "".join(self.pieces)
        return whole[len(came) :] if whole.startswith(came) else ""


class _ResponsesDecoder(JsonEventDecoder[_Event]):
    """Decodes the events of a streamed response, or a response that arrived as one document.

    A fragment belongs to the item with its index and id. Some servers send no indexes, some give
    all items the same index, some give each event a new id. Then a match of one of the two is
    enough; without any match, the fragment belongs to the newest item of its kind. Content that was
    not sent in fragments is taken from the whole item at its end, and items that were not sent at
    all from the final response.
    """

    def __init__(self, answer: Answer, model: str) -> None:
        super().__init__(answer, _EVENTS)
        self._model = model
        self._items: list[_Item] = []
        self._numbered: dict[int | None, _Item] = {}
        self._named: dict[str | None, _Item] = {}
        self._newest: dict[str, _Item] = {}
        self._thought: tuple[_Item, int | None] | None = None  # item and part of the last reasoning
        # Provider items that were emitted, by kind and id.
        self._kept: set[tuple[str | None, str | None]] = set()

    def _event(self, event: _Event) -> bool:
        match event.type:
            case "response.output_text.delta" | "response.refusal.delta":
                item = self._item_of(_MESSAGE, event)
                item.begin.setdefault(event.content_index or 0, self._answer.received)
                self._text(item, event.delta)
            case "response.output_text.annotation.added":
                item = self._item_of(_MESSAGE, event)
                self._annotate(item, event.content_index or 0, [event.annotation])
            case "response.custom_tool_call_input.delta":
                self._custom_input(self._item_of(_CUSTOM, event), event.delta)
            case "response.custom_tool_call_input.done":
                item = self._item_of(_CUSTOM, event)
                self._custom_input(item, item.rest(_spelled(event.input)))
            case "response.function_call_arguments.delta":
                self._arguments(self._item_of(_CALL, event), event.delta)
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                self._reasoning(self._item_of(_REASONING, event), event.delta, event.summary_index)
            case "response.function_call_arguments.done":
                item = self._item_of(_CALL, event)
                self._arguments(item, item.rest(_spelled(event.arguments)))
            case "response.created" | "response.in_progress" if event.response is not None:
                self._answer.named(event.response.id, event.response.model)
            case "response.output_item.added" if event.item is not None:
                self._added(event.item, event.output_index)
            case "response.output_item.done" if event.item is not None:
                self._done(event.item, event.output_index)
            case "response.completed":
                self._end(event)
            case "response.incomplete":
                self._end(event, "incomplete")
            case "response.failed":
                self._end(event, "failed")
            case "error":
                raise ProviderFailure(failure_in_stream(_error_of(event)))
            case None if event.error:
                raise ProviderFailure(failure_in_stream(_error_of(event)))
            case None if event.output is not None:
                self._end(event)
            case _:
                return event.type is not None and "error" not in event.type.lower()
        return True

    # --- finding the item of a fragment ---------------------------------------------------------

    def _item_of(self, kind: str, event: _Event) -> _Item:
        """Return the item of a fragment. Starts a new item if none matches."""
        index, item_id = event.output_index, event.item_id
        found = self._find(kind, index, item_id)
        if found is not None:
            return found
        for item in (self._named.get(item_id), self._numbered.get(index)):
            if item is not None and item.kind == kind:
                return item  # a late fragment of a completed item
        return self._begin(kind, index, item_id)

    def _find(self, kind: str, index: int | None, item_id: str | None) -> _Item | None:
        """Return the open item with that index and id, else with that index, else with that id,
        else the newest one, unless both have an index.
        """
        named = self._named.get(item_id)
        if named is not None and named.index == index and named.is_open(kind):
            return named
        for item in (self._numbered.get(index), named):
            if item is not None and item.is_open(kind):
                return item
        newest = self._newest.get(kind)
        if newest is not None and newest.is_open(kind) and None in (newest.index, index):
            return newest
        return None

    def _begin(self, kind: str, index: int | None, item_id: str | None) -> _Item:
        item = _Item(kind, len(self._items), index, item_id)
        self._items.append(item)
        self._newest[kind] = item
        if index is not None:
            self._numbered[index] = item
        if item_id:
            self._named[item_id] = item
        return item

    # --- items ----------------------------------------------------------------------------------

    def _added(self, item_as_sent: dict[str, Any], index: int | None) -> None:
        whole = _read(item_as_sent)
        kind = whole.type
        if kind is None or kind not in _KINDS:
            return
        item = self._named.get(whole.id)
        if item is None or item.index != index or not item.is_open(kind):
            item = self._begin(kind, index, whole.id)
        item.phase = whole.phase
        if kind == _CALL:
            item.announced = _spelled(whole.arguments)
            self._call(item, whole)
        elif kind == _CUSTOM:
            item.announced = _spelled(whole.input)
            self._call(item, whole)

    def _done(self, item_as_sent: dict[str, Any], index: int | None) -> None:
        whole = _read(item_as_sent)
        kind = whole.type
        if kind is None or kind not in _KINDS:
            self._keep(item_as_sent, whole)
            return
        item = self._find(kind, index, whole.id)
        if item is None:
            known = self._named.get(whole.id)
            place = (kind, index, whole.call_id or "")
            if known is not None and (known.kind, known.index, known.call_id) == place:
                return  # a repeated event
            item = self._begin(kind, index, whole.id)
        self._complete(item, whole)

    def _complete(self, item: _Item, whole: _Whole) -> None:
        """Emit the content of the item that was not sent in fragments."""
        item.is_done = True
        if item.kind == _MESSAGE:
            item.phase = item.phase or whole.phase
            begin = item.begin.get(0, self._answer.received)
            self._text(item, item.rest("".join(_texts(whole.content))))
            self._annotate_parts(item, whole.content, begin)
        elif item.kind == _CALL:
            self._call(item, whole)
            self._arguments(item, item.rest(_spelled(whole.arguments)))
        elif item.kind == _CUSTOM:
            self._call(item, whole)
            self._custom_input(item, item.rest(_spelled(whole.input)))
        else:
            if not item.pieces:
                readable = _texts(whole.summary) or _texts(whole.content)
                self._reasoning(item, "\n\n".join(readable), None)
            self._seal(item, whole)

    def _end(self, event: _Event, status: str | None = None) -> None:
        """Process the last event: emit missing content, and record how the answer ended."""
        response = event.response or event
        self._answer.named(response.id, response.model)
        status = status or response.status
        if response.usage:
            self._answer.usage = _usage(response.usage)
        if status in ("failed", "cancelled"):
            error = response.error or event.error or f"the response has the status {status}"
            raise ProviderFailure(failure_in_stream(error))
        self._fill(response.output or ())
        if status == "incomplete":
            self._cut_off((response.incomplete_details or {}).get("reason"))
        self.is_complete = True

    def _fill(self, output: Sequence[dict[str, Any]]) -> None:
        """Complete open items. Add all items of a kind of which nothing was received."""
        unfinished = [item for item in self._items if not item.is_done]
        came = {item.kind for item in self._items if item.has_come}
        kept = {kind for kind, _ in self._kept}
        for index, item_as_sent in enumerate(output):
            whole = _read(item_as_sent)
            kind = whole.type
            if kind is None or kind not in _KINDS:
                if whole.id or kind not in kept:
                    self._keep(item_as_sent, whole)
                continue
            begun = (item for item in unfinished if item.is_whole_in(whole))
            if (item := next(begun, None)) is not None:
                unfinished.remove(item)
                self._complete(item, whole)
            elif kind not in came:
                self._complete(self._begin(kind, index, whole.id), whole)
        for item in unfinished:
            if not item.pieces:
                emit = self._custom_input if item.kind == _CUSTOM else self._arguments
                emit(item, item.announced)

    def _cut_off(self, reason: Any) -> None:
        is_full = reason in (None, "max_output_tokens", "max_tokens", "length")
        self._answer.finish = StopReason.MAX_TOKENS if is_full else StopReason.OTHER
        if reason == "content_filter":
            self._answer.withheld = "the provider's content filter stopped the answer"

    # --- output ---------------------------------------------------------------------------------

    def _text(self, item: _Item, delta: Any) -> None:
        if type(delta) is not str or not delta:
            return
        self._thought = None
        if item.phase is not None and not item.pieces:
            label = {
                "type": _PHASE,
                "phase": item.phase,
                "format": _FORMAT.value,
                "model": self._model,
            }
            self._answer.reasoning_details([label])
        item.pieces.append(delta)
        self._answer.text(delta)

    def _call(self, item: _Item, whole: _Whole) -> None:
        """Emit the id and name of a call. Known values stay, because gateways change ids."""
        call_id = "" if item.call_id else whole.call_id or ""
        name = "" if item.name else whole.name or ""
        item.call_id += call_id
        item.name += name
        if call_id or name:
            self._thought = None
            emit = self._answer.custom_call if item.kind == _CUSTOM else self._answer.call
            emit(item.key, call_id, name)

    def _custom_input(self, item: _Item, delta: Any) -> None:
        if type(delta) is str and delta:
            self._thought = None
            item.pieces.append(delta)
            self._answer.custom_call(item.key, text=delta)

    def _keep(self, item: dict[str, Any], whole: _Whole) -> None:
        """Emit a provider item, once. A generated picture is also emitted as an image."""
        kind, known = whole.type, (whole.type, whole.id)
        if not isinstance(item.get("type"), str) or (whole.id is not None and known in self._kept):
            return
        self._kept.add(known)
        self._thought = None
        if kind == _PICTURE and isinstance(data := item.get("result"), str) and data:
            self._picture({name: value for name, value in item.items() if name != "result"}, data)
        else:
            self._answer.block(ProviderContent(_PROVIDER, item), is_answer=kind in _WAITING)

    def _picture(self, item: dict[str, Any], data: str) -> None:
        self._answer.block(ProviderContent(_PROVIDER, item))
        form, prompt = item.get("output_format"), item.get("revised_prompt")
        media_type = f"image/{form if isinstance(form, str) else 'png'}"
        alt = prompt if isinstance(prompt, str) else None
        self._answer.block(ImageContent(f"data:{media_type};base64,{data}", media_type, alt))

    def _annotate_parts(self, item: _Item, parts: Any, begin: int) -> None:
        """Emit the sources of a whole message, except those already received."""
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict):
                notes, text = part.get("annotations"), part.get("text")
                item.begin.setdefault(number, begin)
                begin += len(text) if isinstance(text, str) else 0
                if isinstance(notes, list):
                    self._annotate(item, number, notes[item.annotations.get(number, 0) :])

    def _annotate(self, item: _Item, part: int, notes: Sequence[Any]) -> None:
        begin = item.begin.get(part, self._answer.received)
        for note in notes:
            item.annotations[part] = item.annotations.get(part, 0) + 1
            if isinstance(note, dict):
                self._answer.annotate(openai_annotation(note, begin))

    def _arguments(self, item: _Item, delta: Any) -> None:
        if type(delta) is str and delta:
            self._thought = None
            item.pieces.append(delta)
            self._answer.call(item.key, arguments=delta)

    def _reasoning(self, item: _Item, delta: Any, part: int | None) -> None:
        """Emit readable reasoning, with an empty line between parts and between items."""
        if type(delta) is not str or not delta:
            return
        if self._thought is not None and self._thought != (item, part):
            self._answer.reasoning("\n\n")
        self._thought = (item, part)
        item.pieces.append(delta)
        self._answer.reasoning(delta)

    def _seal(self, item: _Item, whole: _Whole) -> None:
        """Emit a reasoning item with everything that is needed to send it back."""
        if not whole.encrypted_content:
            return
        entry: dict[str, Any] = {
            "type": "reasoning.encrypted",
            "id": whole.id,
            "data": whole.encrypted_content,
            "format": _FORMAT.value,
            "summary": whole.summary if isinstance(whole.summary, list) else [],
            "model": self._model,
            "index": item.index,
        }
        kept = {name: value for name, value in entry.items() if value is not None}
        self._answer.reasoning_details([kept])


def _read(item: dict[str, Any]) -> _Whole:
    """Convert the known fields of an item."""
    whole: _Whole = fitted(item, _Whole)
    return whole


_NOTED = {
    "url_citation": "url",
    "file_citation": "file",
    "container_file_citation": "file",
    "file_path": "file",
    "file": "file",
}


def openai_annotation(note: dict[str, Any], begin: int = 0) -> Annotation:
    """Convert an OpenAI annotation; ``begin`` is added to its positions."""
    kind = note.get("type")
    inner = note.get(kind) if isinstance(kind, str) else None
    fields: dict[str, Any] = inner if isinstance(inner, dict) else note

    def text(*names: str) -> str | None:
        values = [fields.get(name) for name in names]
        return next((value for value in values if isinstance(value, str)), None)

    def place(name: str) -> int | None:
        value = fields.get(name)
        return begin + value if type(value) is int and value >= 0 else None

    return Annotation(
        _NOTED.get(str(kind), "other"),
        url=text("url"),
        title=text("title", "filename", "name"),
        quote=text("content", "quote"),
        start=place("start_index"),
        end=place("end_index"),
        provider=_PROVIDER,
        data=note,
    )


def _error_of(event: _Event) -> Any:
    """The error in an event: flat, as documented, or nested, as servers send it."""
    flat = {"code": event.code, "message": event.message}
    error: dict[str, Any] = {name: value for name, value in flat.items() if value is not None}
    return {**error, "error": event.error} if event.error else error


def _texts(parts: Any) -> list[str]:
    """The texts of the parts of a message or of reasoning."""
    texts = [
        part.get("text") or part.get("refusal")
        for part in (parts if isinstance(parts, list) else ())
        if isinstance(part, dict)
    ]
    return [text for text in texts if isinstance(text, str)]


def _spelled(arguments: Any) -> str:
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return json_text(arguments)  # some servers send the object itself


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = fields_of(usage.get("input_tokens_details"))
    cached = _count(details.get("cached_tokens"))
    written = _count(details.get("cache_write_tokens"))
    tokens = max(0, _count(usage.get("input_tokens")) - cached - written)
    return Usage(tokens, _count(usage.get("output_tokens")), written, cached)


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
