"""Anthropic's Messages API, and other servers that speak it.

The request is written as plain JSON and the response is read as bytes, as in
`clark_agent.transports.openai_chat`. `clark_agent.transports.anthropic_models` describes the
models; `clark_agent.transports.anthropic_messages` writes a history.

The newest models bind their thinking to everything before it. If the server rejects thinking that
was sent back, because the system prompt, a tool or a message has changed since, the request is sent
once more without any thinking. Rejected thinking is not sent again.
A schema of the answer that the server rejects is described in the system prompt instead.

The blocks of tools that run on Anthropic's servers (a host enables them with ``provider_extras``)
are kept in the transcript as items of this provider. If the server pauses such a turn, the
transport asks it to continue, and all parts become one message.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from clark_agent._extras import load_extra
from clark_agent.clock import Clock
from clark_agent.messages.thinking import ThinkingTags
from clark_agent.reasoning import ReasoningFormat
from clark_agent.stream import (
    OutputModeName,
    OutputSchema,
    ReasoningEffort,
    StreamRequest,
    ToolSchema,
    parse_arguments,
)
from clark_agent.tools.schema import JsonSchema
from clark_agent.transports.anthropic_messages import (
    PROVIDER,
    MessagesWriter,
    keep_in_cache,
    may_think_with_budget,
    seals_of,
)
from clark_agent.transports.anthropic_models import (
    format_schema,
    max_tokens_for,
    model_named,
    thinking_fields,
)
from clark_agent.transports.http.base import Transport
from clark_agent.transports.http.failures import failure_in_stream, failure_of_sdk
from clark_agent.transports.http.reasoning_transfer import ReasoningTarget
from clark_agent.transports.http.redaction import Address, secrets_in, secrets_of
from clark_agent.transports.http.request import is_set, with_extras, with_schema_in_prompt
from clark_agent.transports.http.response import Answer, Failure, ProviderFailure
from clark_agent.transports.http.retry import (
    CacheTime,
    RetryPolicy,
    Timeouts,
    cache_mark,
    checked_cache,
)
from clark_agent.transports.http.sdk import LoopLocal, api_key_from, given_key, posted
from clark_agent.transports.http.sse_json import JsonEventDecoder, fields_of, fitted, json_text
from clark_agent.types import (
    Annotation,
    AssistantMessage,
    ProviderContent,
    StopReason,
    Usage,
    detect_arg_parse_error,
)

__all__ = ["Anthropic"]

_ANTHROPIC_URL = "https://api.anthropic.com"
_KEY_VARIABLES = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
_INTERLEAVED = "interleaved-thinking-2025-05-14"
_FORMAT = ReasoningFormat.ANTHROPIC_CLAUDE_V1

# The server's messages when it rejects thinking that was sent back.
_REFUSES_THINKING = re.compile(
    r"in `?(redacted_)?thinking`? block"
    r"|thinking`? blocks .{0,60}cannot be modified"
    r"|expected `?thinking"
    r"|thinking\S*\.(signature|data): ",
    re.IGNORECASE,
)

# The server's messages when it rejects the schema of the answer, because it is too complex for
# example. It checks schemas of tools too, but only strict ones, which are not sent.
_REFUSES_SCHEMA = re.compile(r"\bschema|output_config|output_format", re.IGNORECASE)


class Anthropic(Transport[bytes]):
    """A model behind the Messages API.

    ``base_url`` is the server's address, Anthropic's own by default. A key from the environment is
    used only for the host that it belongs to. Keys are sent as bearer tokens. ``headers`` are sent
    with every request. ``client`` is your own ``anthropic.AsyncAnthropic``, which replaces all of
    these; you close it yourself. ``cache`` is how long the prompt stays in the cache, five minutes
    by default; False disables caching.

    The API no longer has a temperature: ``request.temperature`` is ignored. Set it in
    ``provider_extras`` for a server that still accepts it.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        headers: Mapping[str, str] | None = None,
        client: Any = None,
        cache: CacheTime | bool = True,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        thinking_tags: ThinkingTags | bool = "leading",
        clock: Clock | None = None,
    ) -> None:
        sdk = load_extra("anthropic", "anthropic", "Anthropic")
        address = _address(base_url, client)
        url = address.url
        key = _key(url, api_key, base_url) if client is None else None
        given: dict[str, Any] = {**address.headers, **(headers or {})}
        super().__init__(
            model,
            provider="Anthropic" if _is_anthropic(url) else "Messages server",
            secrets=[key or "", *address.secrets, *secrets_in(headers), *secrets_of(client)],
            retry=retry,
            timeouts=timeouts,
            thinking_tags=thinking_tags,
            clock=clock,
        )
        self.base_url = url
        self.cache: CacheTime | bool = checked_cache(cache)
        self._takes = model_named(model)
        self._refused: set[int] = set()
        self._refused_schemas: list[OutputSchema] = []
        is_authorized = key or client or any(name.lower() == "authorization" for name in given)
        self._auth: dict[str, Any] = {} if is_authorized else {"Authorization": sdk.Omit()}
        sent = given if client is None else client.default_headers
        self._betas = [sent[name] for name in sent if name.lower() == "anthropic-beta"]
        self._client = client
        if base_url is not None and not _is_anthropic(url):
            # Do not send headers from Anthropic's environment variables to another server.
            given = {**dict.fromkeys(_headers_in_environment(), sdk.Omit()), **given}

        def make() -> Any:
            return sdk.AsyncAnthropic(
                api_key=key or "none",
                base_url=url,
                max_retries=0,
                timeout=sdk.Timeout(None, connect=self.timeouts.connect),
                default_headers=given,
            )

        self._clients = LoopLocal(make, lambda client: client.close())

    @property
    def target(self) -> ReasoningTarget:
        """The thinking of any Claude model: a model ignores thinking that it cannot read."""
        return ReasoningTarget(formats=frozenset({_FORMAT}), providers=frozenset({PROVIDER}))

    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        """``native`` for Claude from 4.5 on, at Anthropic; other hosts may not allow it."""
        is_ensured = self._takes.takes_formats and _is_anthropic(self.base_url)
        return "native" if is_ensured else "tool"

    def encode(self, request: StreamRequest) -> dict[str, Any]:
        """Return the body of the request."""
        takes = self._takes
        schema = self._schema(request)
        if schema is None and not _has_own_format(request):
            request = with_schema_in_prompt(request)
        writer = MessagesWriter(self._refused)
        writer.write_all(request, self.target, self.provider)
        writer.finish(takes_prefill=takes.takes_prefill and schema is None)  # not with a schema
        tools = [_tool(tool) for tool in request.tools]
        if self.cache:
            keep_in_cache(writer, tools, cache_mark(self.cache))
        max_tokens = max_tokens_for(takes, request.reasoning, request.max_output_tokens)
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "stream": True}
        if writer.system:
            body["system"] = writer.system
        body["messages"] = writer.messages
        if tools:
            body["tools"] = tools
        is_forced = bool(tools) and request.force_tool_call and takes.takes_forced_calls
        if is_forced:
            body["tool_choice"] = {"type": "any"}
        may_think = not is_forced or takes.thinks_when_forced
        if takes.thinking == "budget":
            may_think = may_think and may_think_with_budget(writer.messages)
        if may_think or request.reasoning is ReasoningEffort.NONE:
            body.update(thinking_fields(takes, request.reasoning, max_tokens=max_tokens))
        if schema is not None:
            output = {"format": {"type": "json_schema", "schema": schema}}
            body["output_config"] = {**body.get("output_config", {}), **output}
        return with_extras(body, request.provider_extras)

    def _schema(self, request: StreamRequest) -> JsonSchema | None:
        """The schema of the answer to send; None: there is none, or it cannot be ensured."""
        asked = request.output_schema
        if asked is None or not self._takes.takes_formats or asked in self._refused_schemas:
            return None
        return None if _has_own_format(request) else format_schema(asked.schema)

    def _rewritten(self, request: StreamRequest, failure: Failure) -> Any | None:
        if failure.status == 400 and _REFUSES_SCHEMA.search(failure.message):
            asked = request.output_schema
            if asked is not None and self._schema(request) is not None:
                self._refused_schemas.append(asked)
                return self.encode(request)
        if not _REFUSES_THINKING.search(failure.message):
            return None
        sent = seals_of(request.messages)
        if sent <= self._refused:
            return None
        # Later thinking is bound to a history without this thinking, so leave it out for good.
        self._refused |= sent
        return self.encode(request)

    def _continuation(
        self, body: dict[str, Any], message: AssistantMessage, paused: dict[str, Any]
    ) -> dict[str, Any]:
        """The same request, with the model's message so far appended."""
        blocks = MessagesWriter(self._refused).assistant_blocks(message)
        if blocks and blocks[-1]["type"] == "text":
            blocks[-1] = {**blocks[-1], "text": blocks[-1]["text"].rstrip()}
        turns, asked = body["messages"], body.get("container")
        if turns[-1]["role"] == "assistant":  # a prefilled answer
            turns, blocks = turns[:-1], [*turns[-1]["content"], *blocks]
        if paused and isinstance(asked, dict):  # keep the host's settings of the container
            paused = {"container": {**asked, "id": paused["container"]}}
        turn = [{"role": "assistant", "content": blocks}] if blocks else []
        return with_extras({**body, **paused, "messages": [*turns, *turn]}, None)

    @asynccontextmanager
    async def _open(self, body: dict[str, Any]) -> AsyncGenerator[AsyncIterator[bytes]]:
        client = self._client or await self._clients.get()
        headers = {**self._auth, **self._beta_header(body)}
        async with posted(client, "/v1/messages", body, headers) as pieces:
            yield pieces

    def _beta_header(self, body: Mapping[str, Any]) -> dict[str, str]:
        """Enable interleaved thinking: models with a thinking budget think between calls only with
        this header.
        """
        thinking = body.get("thinking")
        is_enabled = isinstance(thinking, dict) and thinking.get("type") == "enabled"
        if not is_enabled or not body.get("tools"):
            return {}
        return {"anthropic-beta": ",".join([*self._betas, _INTERLEAVED])}

    def _decoder(self, answer: Answer) -> _MessagesDecoder:
        return _MessagesDecoder(answer, self.model)

    def _failure(self, error: Exception) -> Failure:
        return failure_of_sdk(error, self.base_url)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._clients.aclose()


def _is_anthropic(url: str) -> bool:
    return f".{urlsplit(url).hostname or ''}".endswith(".anthropic.com")


def _address(given: str | None, client: Any) -> Address:
    if client is not None:
        return Address.of(str(client.base_url), has_query=True)
    url = given or os.environ.get("ANTHROPIC_BASE_URL") or _ANTHROPIC_URL
    return Address.of(url.rstrip("/").removesuffix("/v1"))  # the SDK adds it


def _key(url: str, given: str | None, base_url: str | None) -> str | None:
    given = given_key(given)
    if _is_anthropic(url):
        return api_key_from(given, _KEY_VARIABLES, "Anthropic")
    if given is None and base_url is None:  # the key belongs to ANTHROPIC_BASE_URL
        given = next(filter(None, [os.environ.get(name) for name in _KEY_VARIABLES]), None)
    return given.strip() if given else None


def _headers_in_environment() -> list[str]:
    """The names of the headers that the SDK adds from the environment."""
    lines = os.environ.get("ANTHROPIC_CUSTOM_HEADERS", "").splitlines()
    return [line.partition(":")[0].strip() for line in lines if ":" in line]


def _has_own_format(request: StreamRequest) -> bool:
    """Whether the host sets the format of the answer itself."""
    return is_set(request.provider_extras, "output_config", "format")


def _tool(tool: ToolSchema) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}


# --- the answer -------------------------------------------------------------------------------


class _Delta(Struct):
    type: str | None = None
    text: str | None = None
    partial_json: str | None = None
    thinking: str | None = None
    signature: str | None = None
    citation: Any = None
    content: Any = None
    encrypted_content: Any = None
    container: Any = None
    stop_reason: str | None = None
    stop_details: Any = None


class _Start(Struct):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    citations: Any = None


class _Message(Struct):
    id: Any = None
    model: Any = None
    usage: dict[str, Any] | None = None
    container: Any = None


class _Event(Struct):
    """An event of any type, or a whole message."""

    type: str | None = None
    id: Any = None
    model: Any = None
    index: int | None = None
    delta: _Delta | None = None
    content_block: dict[str, Any] | None = None
    message: _Message | str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    content: list[dict[str, Any]] | None = None
    container: Any = None
    stop_reason: str | None = None
    stop_details: Any = None


_EVENTS = msgspec.json.Decoder(_Event)

_STOP = {
    "end_turn": StopReason.END_TURN,
    "stop_sequence": StopReason.END_TURN,
    "tool_use": StopReason.TOOL_USE,
    "max_tokens": StopReason.MAX_TOKENS,
    "model_context_window_exceeded": StopReason.MAX_TOKENS,
}

_COUNTS = (
    "input_tokens",
    "output_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
)


class _OpenBlock:
    """A block that is not complete yet."""

    __slots__ = (
        "begin",
        "citations",
        "has_json",
        "item",
        "json",
        "key",
        "kind",
        "signature",
        "thinking",
        "whole_input",
    )

    def __init__(self, kind: str, key: int, begin: int = 0) -> None:
        self.kind = kind
        self.key = key
        self.begin = begin  # where its text starts in all received text
        self.citations: list[dict[str, Any]] = []
        self.thinking: list[str] = []
        self.signature = ""
        self.whole_input: Any = None  # some servers send the input with the start, without deltas
        self.has_json = False
        self.item: dict[str, Any] | None = None  # a provider item
        self.json: list[str] = []  # the input of a provider item


class _MessagesDecoder(JsonEventDecoder[_Event]):
    """Decodes the events of a streamed message, or a message that arrived as one document."""

    def __init__(self, answer: Answer, model: str) -> None:
        super().__init__(answer, _EVENTS)
        self._model = model
        self._open: dict[int, _OpenBlock] = {}
        self._thoughts = 0
        self._keys = count()  # some servers give several blocks the same index
        self._counts: dict[str, int] = {}
        self._container: dict[str, Any] = {}

    def _event(self, event: _Event) -> bool:
        if event.error:
            raise ProviderFailure(failure_in_stream(event.error))
        index = event.index or 0
        match event.type:
            case "content_block_delta":
                if event.delta is not None:
                    self._delta(index, event.delta)
            case "content_block_start":
                if event.content_block is not None:
                    self._start(index, event.content_block)
            case "content_block_stop":
                self._stop(index)
            case "message_start":
                if isinstance(event.message, _Message):
                    self._answer.named(event.message.id, event.message.model)
                    self._usage(event.message.usage)
                    self._runs_in(event.message.container)
            case "message_delta":
                self._usage(event.usage)
                if event.delta is not None:
                    self._runs_in(event.delta.container)
                    self._finish(event.delta.stop_reason, event.delta.stop_details)
            case "message_stop":
                self._stop_all()
                self.is_complete = True
            case "message":
                self._whole(event)
            case _:
                return event.type is not None and "error" not in event.type.lower()
        return True

    def _whole(self, event: _Event) -> None:
        self._answer.named(event.id, event.model)
        for index, block in enumerate(event.content or ()):
            self._start(index, block)
            self._stop(index)
        self._usage(event.usage)
        self._runs_in(event.container)
        self._finish(event.stop_reason, event.stop_details)
        self.is_complete = True

    def _start(self, index: int, item: dict[str, Any]) -> None:
        start: _Start = fitted(item, _Start)
        kind = start.type or ""
        again = self._open.get(index)
        key = again.key if again is not None and again.kind == kind else next(self._keys)
        for other, begun in tuple(self._open.items()):
            if other == index or begun.kind != "tool_use":  # only calls may be open in parallel
                self._stop(other)
        block = self._open[index] = _OpenBlock(kind, key, self._answer.received)
        match kind:
            case "text":
                self._answer.text(start.text or "")
                self._cite(block, start.citations)
            case "thinking":
                self._think(block, start.thinking or "")
                block.signature = start.signature or ""
            case "redacted_thinking" if start.data:
                self._keep({"type": "reasoning.encrypted", "data": start.data})
            case "tool_use":
                block.whole_input = start.input
                self._answer.call(block.key, start.id, start.name)
            case "redacted_thinking" | "":
                pass  # empty
            case _:
                block.item = item

    def _delta(self, index: int, delta: _Delta) -> None:
        block = self._open.get(index)
        match delta.type:
            case "text_delta":
                self._answer.text(delta.text or "")
            case "input_json_delta":
                if block is not None and block.item is not None:
                    block.json.append(delta.partial_json or "")
                elif block is not None and block.kind == "tool_use" and delta.partial_json:
                    block.has_json = True
                    self._answer.call(block.key, arguments=delta.partial_json)
            case "citations_delta":
                if block is not None:
                    self._cite(block, [delta.citation])
            case "compaction_delta":
                if block is not None and block.item is not None:
                    sent = {"content": delta.content, "encrypted_content": delta.encrypted_content}
                    block.item |= {name: value for name, value in sent.items() if value is not None}
            case "thinking_delta":
                if block is None:
                    block = self._open[index] = _OpenBlock("thinking", next(self._keys))
                self._think(block, delta.thinking or "")
            case "signature_delta":
                if block is not None:
                    block.signature = delta.signature or block.signature
            case _:
                pass

    def _think(self, block: _OpenBlock, text: str) -> None:
        block.thinking.append(text)
        self._answer.reasoning(text)

    def _stop(self, index: int) -> None:
        block = self._open.pop(index, None)
        if block is None:
            return
        if block.kind == "tool_use" and block.whole_input and not block.has_json:
            self._answer.call(block.key, arguments=json_text(block.whole_input))
        if block.kind == "thinking" and block.signature:
            text = "".join(block.thinking)
            self._keep({"type": "reasoning.text", "text": text, "signature": block.signature})
        if block.item is not None:
            self._answer.block(ProviderContent(PROVIDER, _with_input(block.item, block.json)))
        for citation in block.citations:
            self._answer.annotate(_annotation(citation, block.begin, self._answer.received))

    def _cite(self, block: _OpenBlock, citations: Any) -> None:
        found: list[Any] = citations if isinstance(citations, list) else []
        block.citations += [citation for citation in found if isinstance(citation, dict)]

    def _runs_in(self, container: Any) -> None:
        """Record the container in which the server runs code. A continuation must name it."""
        if isinstance(container, dict) and isinstance(container.get("id"), str):
            self._container = {"container": container["id"]}

    def _stop_all(self) -> None:
        for index in tuple(self._open):
            self._stop(index)

    def _keep(self, item: dict[str, Any]) -> None:
        """Add a reasoning item that must be sent back."""
        origin = {"format": str(_FORMAT), "index": self._thoughts, "model": self._model}
        self._thoughts += 1
        self._answer.reasoning_details([{**item, **origin}])

    def _finish(self, reason: str | None, details: Any) -> None:
        if not reason:
            return
        self._stop_all()
        self._answer.finish = _STOP.get(reason, StopReason.OTHER)
        if reason == "pause_turn" and not self._answer.has_calls:
            self._answer.paused = self._container
        if reason == "refusal":
            refusal = fields_of(details)
            why = refusal.get("explanation") or refusal.get("category")
            text = "the model declined to answer"
            self._answer.withheld = f"{text}: {why}" if why else text
        self.may_end = True

    def _usage(self, usage: Mapping[str, Any] | None) -> None:
        """Update the usage. The counts are totals so far; a missing count keeps its value."""
        if not usage:
            return
        for name in _COUNTS:
            value = usage.get(name)
            if type(value) is int and value >= 0:
                self._counts[name] = value
        self._answer.usage = Usage(*[self._counts.get(name, 0) for name in _COUNTS])


def _with_input(item: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
    """Return the provider's item with the input that arrived after its start."""
    written = "".join(pieces)
    if not written.strip():
        return item
    arguments = parse_arguments(written)
    cut_off = detect_arg_parse_error(arguments)
    return {**item, "input": {"invalid_json": cut_off[1]} if cut_off else arguments}


_CITED = {
    "web_search_result_location": "url",
    "search_result_location": "document",
    "char_location": "document",
    "page_location": "document",
    "content_block_location": "document",
}


def _annotation(citation: dict[str, Any], begin: int, end: int) -> Annotation:
    def text(*names: str) -> str | None:
        values = [citation.get(name) for name in names]
        return next((value for value in values if isinstance(value, str)), None)

    return Annotation(
        _CITED.get(str(citation.get("type")), "other"),
        url=text("url", "source"),
        title=text("title", "document_title"),
        quote=text("cited_text"),
        start=begin,
        end=end,
        provider=PROVIDER,
        data=citation,
    )
