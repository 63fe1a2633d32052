"""Chat Completions: OpenAI, and all servers that speak its protocol.

The request is written as plain JSON and the response is read as bytes. The SDK provides
authentication, connections and errors; its objects for each delta are not used, because creating
them would take most of a stream's time. `clark_agent.transports.dialects` describes how servers
differ.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from mimetypes import guess_extension
from typing import Any, assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clark_agent.clock import Clock
from clark_agent.messages.thinking import ThinkingTags
from clark_agent.reasoning import ReasoningFormat, item_to_json, parse_item, parse_items
from clark_agent.stream import OutputModeName, StreamRequest, ToolSchema
from clark_agent.transports.dialects import (
    ChatDialect,
    best_mode,
    formats_of,
    openai_effort,
    rejects_schema,
    schema_support,
)
from clark_agent.transports.gemini_contents import UNSIGNED, generation_of
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
    stable_part,
    with_extras,
    with_schema_in_prompt,
    woven_text,
)
from clark_agent.transports.http.response import Answer, Failure, ProviderFailure
from clark_agent.transports.http.retry import (
    CacheTime,
    RetryPolicy,
    Timeouts,
    cache_mark,
    checked_cache,
)
from clark_agent.transports.http.sse_json import JsonEventDecoder, fields_of, json_text
from clark_agent.transports.openai_client import OpenAIClients
from clark_agent.transports.openai_responses import openai_annotation, openai_schema
from clark_agent.types import (
    AgentMessage,
    Annotation,
    AssistantMessage,
    CustomMessage,
    FileContent,
    ImageContent,
    ProviderContent,
    StopReason,
    SystemMessage,
    TextContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserBlock,
    UserMessage,
)

__all__ = ["ChatDecoder", "OpenAIChat", "chat_messages", "chat_tool"]

# In Chat Completions these models accept tools only with reasoning turned off. Both together need
# the Responses API.
_THINKS_WITHOUT_TOOLS = re.compile(r"gpt-(5\.([2-9]|\d\d)|[6-9]|\d\d)(?!.*-(pro|chat|codex))")

_PROVIDER = "chat"
_SEALED_FOR_ACCOUNT = (
    ReasoningFormat.OPENAI_RESPONSES_V1,
    ReasoningFormat.AZURE_OPENAI_RESPONSES_V1,
)


class OpenAIChat(Transport[bytes]):
    """A model behind a Chat Completions server.

    ``base_url`` is the server's address, OpenAI's own by default; it selects the dialect, unless
    ``dialect`` is given. A key from the environment is used only for the host that it belongs to.
    ``headers`` are sent with every request. ``client`` is your own ``openai.AsyncOpenAI``, which
    replaces all of these; you close it yourself.

    ``cache`` is how long a prompt stays in the cache of Anthropic's models behind OpenRouter, five
    minutes by default; False disables caching. ``prompt_cache_key`` is an OpenAI option: it routes
    requests with the same beginning to the same cache.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        dialect: ChatDialect | None = None,
        headers: Mapping[str, str] | None = None,
        client: Any = None,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        thinking_tags: ThinkingTags | bool = "leading",
        cache: CacheTime | bool = True,
        prompt_cache_key: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clients = OpenAIClients(
            "OpenAIChat",
            base_url=base_url,
            api_key=api_key,
            headers=headers,
            client=client,
            timeouts=timeouts,
            dialect=dialect,
        )
        self.base_url = self._clients.url
        self.dialect = self._clients.dialect
        self.cache: CacheTime | bool = checked_cache(cache)
        self.prompt_cache_key = prompt_cache_key
        super().__init__(
            model,
            provider=self.dialect.name,
            secrets=self._clients.secrets,
            retry=retry,
            timeouts=timeouts,
            thinking_tags=thinking_tags,
            clock=clock,
        )

    @property
    def target(self) -> ReasoningTarget:
        """Behind OpenRouter, the reasoning formats of the model's vendor; elsewhere none."""
        dialect = self.dialect
        return ReasoningTarget(
            formats=formats_of(self.model) if dialect.takes_details else frozenset(),
            providers=frozenset({_PROVIDER} if dialect.takes_extra_content else ()),
        )

    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        """``native`` where the server is known to ensure a schema, else ``tool``."""
        return best_mode(schema_support(self.dialect, self.model), has_tools=has_tools)

    def encode(self, request: StreamRequest) -> dict[str, Any]:
        """Return the body of the request."""
        dialect = self.dialect
        if is_set(request.provider_extras, "response_format"):
            request = replace(request, output_schema=None)
        elif rejects_schema(schema_support(dialect, self.model), has_tools=bool(request.tools)):
            request = with_schema_in_prompt(request)
        is_marked = dialect.takes_cache_marks and _vendor(self.model) == "anthropic"
        messages = chat_messages(
            request,
            dialect,
            model=self.model,
            target=self.target,
            cache=self.cache if is_marked else False,
        )
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        if dialect.wants_usage_option:
            body["stream_options"] = {"include_usage": True}
        if request.tools:
            body["tools"] = [chat_tool(tool) for tool in request.tools]
            if request.force_tool_call:
                body["tool_choice"] = "required"
        if request.max_output_tokens is not None:
            body[dialect.cap_field] = request.max_output_tokens
        if request.temperature is not None:
            body["temperature"] = request.temperature
        if request.output_schema is not None:
            schema = openai_schema(request.output_schema)
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.prompt_cache_key is not None:
            body["prompt_cache_key"] = self.prompt_cache_key
        if dialect.has_openai_models:
            _add_openai_effort(body, self.model, request)
        else:
            body.update(dialect.efforts.get(request.reasoning, {}))
        return with_extras(body, request.provider_extras)

    @asynccontextmanager
    async def _open(self, body: dict[str, Any]) -> AsyncGenerator[AsyncIterator[bytes]]:
        async with self._clients.posted("/chat/completions", body) as pieces:
            yield pieces

    def _decoder(self, answer: Answer) -> ChatDecoder:
        return ChatDecoder(answer, self.dialect, self.model)

    def _failure(self, error: Exception) -> Failure:
        return failure_of_sdk(error, self.base_url)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._clients.aclose()


# --- the request ------------------------------------------------------------------------------


def _add_openai_effort(body: dict[str, Any], model: str, request: StreamRequest) -> None:
    effort = openai_effort(model, request.reasoning)
    if effort is None:
        return
    if request.tools and _THINKS_WITHOUT_TOOLS.match(model):
        effort = "none"
    body["reasoning_effort"] = effort
    if effort != "none":
        body.pop("temperature", None)  # rejected while reasoning is on


def chat_messages(
    request: StreamRequest,
    dialect: ChatDialect,
    *,
    model: str,
    target: ReasoningTarget,
    cache: CacheTime | bool = False,
) -> list[dict[str, Any]]:
    """Return the messages of the conversation, the system prompt first."""
    writer = _Writer(dialect, model, custom_tools(request.provider_extras))
    writer.system(request.system_prompt)
    messages = sendable(
        request.messages,
        target,
        provider=dialect.name,
        takes_file=lambda file: _file_part(file, dialect) is not None,
    )
    stable = len(stable_part(request.messages, messages))
    for message in messages[:stable]:
        writer.write(message)
    writer.flush_media()
    end = len(writer.messages)
    for message in messages[stable:]:
        writer.write(message)
    writer.flush_media()
    if cache:
        _keep_in_cache(writer.messages, end, cache_mark(cache))
    return writer.messages


def _vendor(model: str) -> str:
    """The vendor in a gateway's model name. An alias for the newest model starts with ``~``."""
    return model.partition("/")[0].removeprefix("~")


def _keep_in_cache(messages: list[dict[str, Any]], end: int, mark: Mapping[str, str]) -> None:
    """Mark the ends of the prompt prefixes to cache: the instructions, and the ends of this and the
    previous request. ``end`` is the number of messages that the next request will start with too.

    All messages are written as parts, marked or not, so that they are the same in the next request.
    """
    for message in messages:
        if message["role"] != "assistant" and isinstance(message["content"], str):
            message["content"] = [_text_part(message["content"])]
    instructions = [message for message in messages[:1] if message["role"] == "system"]
    ends = [m for m in messages[len(instructions) : end] if m["role"] in ("user", "tool")]
    for message in [*instructions, *ends[-2:]]:
        *_, last = message["content"]
        if last["type"] != "text" or last["text"].strip():
            last["cache_control"] = {**mark}


def chat_tool(tool: ToolSchema) -> dict[str, Any]:
    """Return the declaration of a tool."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


class _Writer:
    """Writes a history in a dialect."""

    def __init__(self, dialect: ChatDialect, model: str, custom: frozenset[str]) -> None:
        self._model = model
        self._wants_signatures = (generation_of(model) or 0) >= 3
        self.messages: list[dict[str, Any]] = []
        self._dialect = dialect
        self._custom = custom
        self._media: list[dict[str, Any]] = []  # images and files for the next user message
        self._ids: dict[str, str] = {}
        self._numbers = count(1)

    def write(self, message: AgentMessage) -> None:
        if not isinstance(message, ToolResultMessage):
            self.flush_media()
        match message:
            case SystemMessage():
                self.system(message.content)
            case UserMessage():
                self._user(_user_content(message.content, self._dialect))
            case AssistantMessage():
                self._assistant(message)
            case ToolResultMessage():
                self._result(message)
            case CustomMessage():
                raise AssertionError("custom messages are left out before")
            case _:
                assert_never(message)

    def system(self, text: str) -> None:
        if not text:
            return
        if self._dialect.takes_system_anywhere or not self.messages:
            self.messages.append({"role": "system", "content": text})
        elif len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self._user(f"<system>\n{text}\n</system>")

    def flush_media(self) -> None:
        """Write pending images and files in a user message: no server accepts them in tool or
        assistant messages.
        """
        if self._media:
            media, self._media = self._media, []
            self._user(media)

    def _user(self, content: str | list[dict[str, Any]]) -> None:
        last = self.messages[-1] if self.messages else None
        joins = not self._dialect.takes_system_anywhere
        if joins and last is not None and last["role"] == "user":
            last["content"] = _joined(last["content"], content)
        else:
            self.messages.append({"role": "user", "content": content})

    def _assistant(self, message: AssistantMessage) -> None:
        dialect = self._dialect
        text = woven_text(message.content)
        images = [block for block in message.content if isinstance(block, ImageContent)]
        if images and not dialect.takes_result_images:
            text = "\n".join([part for part in (text, *map(_left_out, images)) if part])
        elif images:
            self._media.append(_text_part("(Images that the assistant made:)"))
            self._media += [_image_part(image) for image in images]
        calls = [self._call(call) for call in message.tool_calls]
        if dialect.takes_extra_content:
            self._add_extra_content(message, calls)
        if not text and not calls:
            return
        written: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            written["tool_calls"] = calls
        reasoning = message.reasoning_text
        if reasoning or dialect.wants_empty_reasoning:
            written.update(dict.fromkeys(dialect.reasoning_fields, reasoning))
        if dialect.takes_details and (details := self._details(message, calls)):
            written["reasoning_details"] = details
        self.messages.append(written)

    def _call(self, call: ToolCall) -> dict[str, Any]:
        name = safe_name(call.name)
        if (text := custom_input(call, self._custom)) is not None:
            custom = {"name": name, "input": text}
            return {"id": self._id(call.id), "type": "custom", "custom": custom}
        function = {"name": name, "arguments": arguments_text(call)}
        return {"id": self._id(call.id), "type": "function", "function": function}

    def _add_extra_content(self, message: AssistantMessage, calls: list[dict[str, Any]]) -> None:
        """Restore the ``extra_content`` of each call, from the item after it, if this model sent
        it. A first call without one gets a placeholder signature if the model requires signatures.
        """
        count = 0
        for block in message.content:
            if isinstance(block, ToolCall):
                count += 1
            elif isinstance(block, ProviderContent) and count:
                match block.data:
                    case {"model": model, "extra_content": extra} if model == self._model:
                        calls[count - 1]["extra_content"] = extra
                    case _:
                        pass
        if calls and self._wants_signatures:
            unsigned = {"google": {"thought_signature": UNSIGNED}}
            calls[0].setdefault("extra_content", unsigned)

    def _details(self, message: AssistantMessage, calls: list[dict[str, Any]]) -> list[Any]:
        details = _reasoning_items(message)
        is_signed = any(item.is_signed for item in parse_items(details))
        if self._wants_signatures and calls and not is_signed:
            details.append(_skipping(calls[0]["id"]))
        return details

    def _result(self, message: ToolResultMessage) -> None:
        images = [block for block in message.content if isinstance(block, ImageContent)]
        files = [block for block in message.content if isinstance(block, FileContent)]
        text = message.plain_text
        if images and self._dialect.takes_result_images:
            self._media.append(_text_part(f"Images from the tool {message.tool_name}:"))
            self._media += [_image_part(image) for image in images]
            text = text or "(see the images that follow)"
        elif images:
            text = "\n".join([part for part in (text, *map(_left_out, images)) if part])
        if files:
            self._media.append(_text_part(f"Files from the tool {message.tool_name}:"))
            self._media += [_user_part(file, self._dialect) for file in files]
            text = text or "(see the files that follow)"
        call_id = self._id(message.tool_call_id)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _id(self, call_id: str) -> str:
        if not self._dialect.has_short_ids:
            return safe_id(call_id, 40)
        if call_id not in self._ids:
            self._ids[call_id] = f"call{next(self._numbers):05d}"
        return self._ids[call_id]


def _reasoning_items(message: AssistantMessage) -> list[Any]:
    """Return the structured reasoning. A gateway's items stay unchanged; items of the native
    transports are converted to the gateway's format.
    """
    items: list[Any] = []
    for item in message.reasoning_details_values:
        if "model" in item:
            items += _for_gateway(item)
        elif str(item.get("type", "")).startswith("reasoning."):
            items.append(item)
    return items


def _for_gateway(item: dict[str, Any]) -> list[Any]:
    """Convert an item of a native transport, without that transport's own fields.

    Left out are items that OpenAI encrypted, because they are valid for one account only, and
    Gemini's signatures of text, because the format cannot name the signed part.
    """
    known = parse_item(item)
    if known is None or known.format in _SEALED_FOR_ACCOUNT or item.get("part") == "text":
        return []
    return [item_to_json(known)]


def _skipping(call_id: str) -> dict[str, Any]:
    """Return the placeholder for the signature of a call that another model made."""
    return {
        "type": "reasoning.encrypted",
        "data": UNSIGNED,
        "id": call_id,
        "format": str(ReasoningFormat.GOOGLE_GEMINI_V1),
        "index": 0,
    }


def _user_content(
    content: str | Sequence[UserBlock], dialect: ChatDialect
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_user_part(block, dialect) for block in content]


def _user_part(block: UserBlock, dialect: ChatDialect) -> dict[str, Any]:
    match block:
        case TextContent():
            return _text_part(block.text)
        case ImageContent():
            return _image_part(block)
        case FileContent():
            part = _file_part(block, dialect)
            assert part is not None, "a file that is not taken is refused before"
            return part
        case _:
            assert_never(block)


_AUDIO = {
    "audio/wav": "wav",
    "audio/x-wav": "wav",
    "audio/wave": "wav",
    "audio/vnd.wave": "wav",
    "audio/mpeg": "mp3",
    "audio/mp3": "mp3",
}


def _file_part(file: FileContent, dialect: ChatDialect) -> dict[str, Any] | None:
    """Return the part that holds a file; None: the server does not accept the file."""
    media_type, data = media_type_of(file), inline_data(file.source)
    if media_type.startswith("image/"):
        return _image_part(ImageContent(file.source))
    if not media_type.startswith(dialect.takes_files):
        return None
    if media_type.startswith("audio/"):
        form = _AUDIO.get(media_type)
        if form is None or data is None:
            return None
        return {"type": "input_audio", "input_audio": {"data": data, "format": form}}
    if data is None and not dialect.takes_file_urls:
        return None
    source = file.source if data is None else f"data:{media_type};base64,{data}"
    name = file.name or f"file{guess_extension(media_type) or ''}"
    return {"type": "file", "file": {"filename": name, "file_data": source}}


def _left_out(image: ImageContent) -> str:
    return f"[image{f': {image.alt}' if image.alt else ''}]"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image_part(image: ImageContent) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image.source}}


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [[_text_part(part)] if isinstance(part, str) else part for part in (first, second)]
    return [*parts[0], *parts[1]]


# --- the answer -------------------------------------------------------------------------------


class _Function(Struct):
    name: str | None = None
    arguments: Any = None


class _Custom(Struct):
    name: str | None = None
    input: str | None = None


class _CallDelta(Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None
    custom: _Custom | None = None
    extra_content: Any = None


class _Delta(Struct):
    content: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    reasoning_details: list[Any] | None = None
    refusal: str | None = None
    tool_calls: list[_CallDelta] | None = None
    function_call: _Function | None = None
    audio: Any = None
    images: Any = None
    annotations: Any = None


class _Choice(Struct):
    index: int | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    search_results: Any = None
    citations: Any = None


class _NamedChunk(_Chunk):
    """A chunk with what all of them repeat; it is decoded until it is known."""

    id: Any = None
    model: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)
_NAMED_CHUNKS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_NamedChunk)

_FINISH = {
    "stop": StopReason.END_TURN,
    "end": StopReason.END_TURN,
    "eos": StopReason.END_TURN,
    "end_turn": StopReason.END_TURN,
    "stop_sequence": StopReason.END_TURN,
    "tool_calls": StopReason.TOOL_USE,
    "function_call": StopReason.TOOL_USE,
    "tool_use": StopReason.TOOL_USE,
    "length": StopReason.MAX_TOKENS,
    "max_tokens": StopReason.MAX_TOKENS,
    "model_length": StopReason.MAX_TOKENS,
    "content_filter": StopReason.OTHER,
}
# Finish reasons that report a failure.
_BROKEN = {
    "error": "the provider failed in the middle of its answer",
    "abort": "the server aborted the answer",
    "insufficient_system_resource": "the provider is overloaded",
}


class ChatDecoder(JsonEventDecoder[_Chunk]):
    """Decodes the events of a streamed completion, or one that arrived as one document."""

    def __init__(self, answer: Answer, dialect: ChatDialect, model: str) -> None:
        super().__init__(answer, _NAMED_CHUNKS)
        self._dialect = dialect
        self._model = model
        self._cited: set[str] = set()

    def _event(self, event: _Chunk) -> bool:
        if event.error:
            raise ProviderFailure(failure_in_stream(event.error))
        if type(event) is _NamedChunk:
            self._named(event)
        if event.usage:
            self._usage(event.usage)
        if event.search_results or event.citations:
            self._cite(event.search_results)
            self._cite(event.citations)
        for choice in event.choices or ():
            if not choice.index:
                self._choice(choice)
        return event.choices is not None or event.usage is not None

    def _named(self, event: _NamedChunk) -> None:
        self._answer.named(event.id, event.model)
        if self._answer.response is not None:
            self._decode = _CHUNKS.decode

    def _cite(self, sources: Any) -> None:
        """Add sources of the whole answer, as Perplexity and xAI send them, perhaps repeatedly."""
        for source in sources if isinstance(sources, list) else ():
            fields = {"url": source} if isinstance(source, str) else fields_of(source)
            url, title = fields.get("url"), fields.get("title")
            if isinstance(url, str) and url not in self._cited:
                self._cited.add(url)
                title = title if isinstance(title, str) else None
                note = Annotation("url", url, title, provider=_PROVIDER, data=source)
                self._answer.annotate(note)

    def _choice(self, choice: _Choice) -> None:
        if choice.error:
            raise ProviderFailure(failure_in_stream(choice.error))
        if (delta := choice.delta or choice.message) is not None:
            self._delta(delta)
        if choice.usage:
            self._usage(choice.usage)
        if reason := choice.finish_reason:
            if reason in _BROKEN:
                raise ProviderFailure(
                    failure_in_stream({"message": _BROKEN[reason], "code": reason})
                )
            self._answer.finish = _FINISH.get(reason, StopReason.OTHER)
            if reason == "content_filter":
                self._answer.withheld = "the provider's content filter stopped the answer"
            self.may_end = True

    def _delta(self, delta: _Delta) -> None:
        answer = self._answer
        if reasoning := delta.reasoning or delta.reasoning_content:
            answer.reasoning(reasoning)
        if delta.reasoning_details:
            answer.reasoning_details(delta.reasoning_details)
        if (content := delta.content) is not None:
            if type(content) is str:
                answer.text(content)
            else:
                self._parts(content)
        if delta.refusal:
            answer.text(delta.refusal)
        match delta.audio:
            case {"transcript": str(spoken)}:
                answer.text(spoken)
            case _:
                pass
        for call in delta.tool_calls or ():
            self._call(call)
        if (legacy := delta.function_call) is not None:
            answer.call("function_call", None, legacy.name, _arguments(legacy.arguments))
        for image in delta.images if isinstance(delta.images, list) else ():
            self._image(image)
        for note in delta.annotations if isinstance(delta.annotations, list) else ():
            if isinstance(note, dict):
                answer.annotate(openai_annotation(note))

    def _call(self, call: _CallDelta) -> None:
        answer, custom = self._answer, call.custom
        if custom is not None:
            answer.custom_call(call.index, call.id, custom.name, custom.input)
        else:
            function = call.function or _Function()
            answer.call(call.index, call.id, function.name, _arguments(function.arguments))
        if call.extra_content:
            data = {"model": self._model, "extra_content": call.extra_content}
            answer.block(ProviderContent(_PROVIDER, data))

    def _image(self, image: Any) -> None:
        match image:
            case {"image_url": {"url": str(url)}} | {"image_url": str(url)} if url:
                self._answer.block(ImageContent(url))
            case _:
                pass

    def _parts(self, content: Any) -> None:
        """Add content that is a list of parts. Some servers separate thinking from text so."""
        for part in content if isinstance(content, list) else ():
            match part:
                case {"type": "thinking", "thinking": [*inner]}:
                    for piece in inner:
                        text = piece.get("text") if isinstance(piece, dict) else piece
                        self._answer.reasoning(text if isinstance(text, str) else "")
                case {"text": str(text)}:
                    self._answer.text(text)
                case {"type": "image_url"}:
                    self._image(part)
                case _:
                    pass

    def _usage(self, usage: Mapping[str, Any]) -> None:
        details = fields_of(usage.get("prompt_tokens_details"))
        cached = _count(
            details.get("cached_tokens"),
            usage.get("prompt_cache_hit_tokens"),
            usage.get("cached_tokens"),
        )
        written = _count(details.get("cache_write_tokens"), details.get("cache_creation_tokens"))
        output = _count(usage.get("completion_tokens"))
        if self._dialect.counts_reasoning_apart:
            thought = fields_of(usage.get("completion_tokens_details"))
            output += _count(thought.get("reasoning_tokens"))
        self._answer.usage = Usage(
            max(0, _count(usage.get("prompt_tokens")) - cached - written), output, written, cached
        )


def _count(*values: Any) -> int:
    """The first value that is a count, else 0."""
    return next((value for value in values if type(value) is int and value >= 0), 0)


def _arguments(arguments: Any) -> str | None:
    if arguments is None or isinstance(arguments, str):
        return arguments
    return json_text(arguments)  # some servers send the object itself
