"""Gemini: Google's generateContent, with the Gemini API or, with your own client, Vertex AI.

The request is written as the plain JSON of the REST API and the response is read as bytes. The SDK
provides the address, authentication and errors. Its own reader is bypassed, because it fails on
keep-alives, does not close a response that is abandoned early, and spends most of a stream's time
on creating objects. Only the responses of your own client are read through it.

A finish reason does not end an answer: usage, and even text, may follow it. Only the end of the
stream does. `clark_agent.transports.gemini_contents` describes how signatures are kept.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from clark_agent._extras import load_extra
from clark_agent.clock import Clock
from clark_agent.errors import TransportError
from clark_agent.messages.thinking import ThinkingTags
from clark_agent.reasoning import ReasoningFormat
from clark_agent.stream import (
    OutputModeName,
    ReasoningEffort,
    StreamErrorKind,
    StreamRequest,
    ToolSchema,
)
from clark_agent.transports.gemini_contents import (
    PROVIDER,
    ContentsWriter,
    Part,
    generation_of,
    takes_file,
)
from clark_agent.transports.http.base import Transport
from clark_agent.transports.http.failures import (
    failure_from_response,
    failure_in_stream,
    failure_of_sdk,
)
from clark_agent.transports.http.reasoning_transfer import ReasoningTarget
from clark_agent.transports.http.redaction import Address, secrets_in, secrets_of
from clark_agent.transports.http.redirects import MOST_REDIRECTS, stay_at_origin
from clark_agent.transports.http.request import (
    is_set,
    sendable,
    with_extras,
    with_schema_in_prompt,
)
from clark_agent.transports.http.response import Answer, Failure, ProviderFailure
from clark_agent.transports.http.retry import RetryPolicy, Timeouts
from clark_agent.transports.http.sdk import LoopLocal, api_key_from, given_key
from clark_agent.transports.http.sse_json import JsonEventDecoder, json_text
from clark_agent.types import Annotation, ImageContent, ProviderContent, StopReason, Usage

__all__ = ["Gemini"]

_GOOGLE_URL = "https://generativelanguage.googleapis.com"
_KEY_VARIABLES = ("GOOGLE_API_KEY", "GEMINI_API_KEY")  # in the SDK's order
_FORMAT = str(ReasoningFormat.GOOGLE_GEMINI_V1)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Gemini(Transport[bytes]):
    """A Gemini model.

    ``base_url`` is the server's address, Google's own by default. A key from the environment is
    used only for Google's own hosts. ``headers`` are sent with every request. ``client`` is your
    own ``google.genai.Client``, for Vertex AI for example, which replaces all of these; you close
    it yourself. The ``provider_extras`` of a request are fields of the SDK's
    ``GenerateContentConfig`` or of the REST API's request.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        api_version: str | None = None,
        headers: Mapping[str, str] | None = None,
        client: Any = None,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        thinking_tags: ThinkingTags | bool = "leading",
        clock: Clock | None = None,
    ) -> None:
        sdk = load_extra("google.genai", "google", "Gemini")
        address = Address.of(base_url or _GOOGLE_URL)
        key = None if client is not None else _key_for(api_key, base_url)
        known = [os.environ.get(name, "").strip() for name in _KEY_VARIABLES]
        known += secrets_of(getattr(client, "_api_client", None))
        super().__init__(
            model,
            provider="Gemini",
            secrets=[key or "", *address.secrets, *secrets_in(headers), *known],
            retry=retry,
            timeouts=timeouts,
            thinking_tags=thinking_tags,
            clock=clock,
        )
        self.base_url = address.url
        self._api_error: type[Any] = sdk.errors.APIError
        self._client = client

        def make() -> _OwnClient:
            http = _http_client(self.timeouts.connect)
            options = sdk.types.HttpOptions(
                base_url=address.url if base_url else None,
                api_version=api_version,
                headers={**address.headers, **(headers or {})},
                httpx_async_client=http,
            )
            # Without a key the SDK would look for one in the environment.
            sdk_client = sdk.Client(api_key=key or "none", vertexai=False, http_options=options)
            return _OwnClient(sdk_client, http)

        self._clients = LoopLocal(make, _OwnClient.aclose)

    @property
    def target(self) -> ReasoningTarget:
        """Reasoning that this model signed, or a Gemini model behind a gateway."""
        return ReasoningTarget(
            formats=frozenset({ReasoningFormat.GOOGLE_GEMINI_V1}),
            model=self.model,
            providers=frozenset({PROVIDER}),
        )

    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        """``native`` from Gemini 3 on; ``tool`` with tools before."""
        generation = generation_of(self.model)
        if generation is None or _NOT_FOR_TEXT.search(self.model):
            return "tool"
        return "native" if generation >= 3 or not has_tools else "tool"

    def encode(self, request: StreamRequest) -> dict[str, Any]:
        """Return the body of the request. Raises `TransportError`."""
        if request.tools and (generation_of(self.model) or 3) < 3:
            request = with_schema_in_prompt(request)  # the API rejects a schema next to functions
        writer = ContentsWriter(self.model)
        writer.system(request.system_prompt)
        messages = sendable(
            request.messages, self.target, provider=self.provider, takes_file=takes_file
        )
        for message in messages:
            writer.write(message)
        writer.flush_results()
        if not writer.contents:
            raise TransportError("the request is empty: no message has text")
        body: dict[str, Any] = {"contents": writer.contents}
        if writer.instructions:
            text = "\n\n".join(writer.instructions)
            body["systemInstruction"] = {"parts": [{"text": text}]}
        if request.tools:
            body["tools"] = [{"functionDeclarations": [_declaration(t) for t in request.tools]}]
            if request.force_tool_call:
                body["toolConfig"] = {"functionCallingConfig": {"mode": "ANY"}}
        generation: dict[str, Any] = {}
        if request.max_output_tokens is not None:
            generation["maxOutputTokens"] = request.max_output_tokens
        if request.temperature is not None:
            generation["temperature"] = request.temperature
        if (thinking := _thinking(self.model, request.reasoning)) is not None:
            generation["thinkingConfig"] = thinking
        extras: Any = request.provider_extras
        if isinstance(extras, Mapping):
            extras = _as_in_rest(extras)
            if _sets_thinking_length(extras.get("generationConfig")):
                generation.pop("thinkingConfig", None)
        if request.output_schema is not None and not _sets_format(extras):
            generation["responseMimeType"] = "application/json"
            generation["responseJsonSchema"] = request.output_schema.schema
        if generation:
            body["generationConfig"] = generation
        return with_extras(body, extras)

    @asynccontextmanager
    async def _open(self, body: dict[str, Any]) -> AsyncGenerator[AsyncIterator[bytes]]:
        if self._client is not None:
            async with _read_by_sdk(await self._ask(self._client, body)) as events:
                yield events
            return
        own = await self._clients.get()
        taken: list[Any] = []
        _TAKEN.set(taken)
        try:
            async for _ in await self._ask(own.sdk, body):
                pass  # the SDK sees an empty body, see `_http_client`
            if not taken:
                raise RuntimeError("google-genai did not use the HTTP client that was passed to it")
            yield taken[0].aiter_bytes()
        finally:
            for response in taken:
                await response.aclose()

    async def _ask(self, client: Any, body: dict[str, Any]) -> Any:
        """Return the SDK's stream. The request is sent on its first read.

        The body is passed as ``extra_body``. Its contents replace the ``contents`` that the SDK
        requires. The SDK's own retries, function calling and continuations are disabled.
        """
        return await client.aio.models.generate_content_stream(
            model=self.model,
            contents="replaced",
            config={
                "http_options": {"extra_body": body, "retry_options": {"attempts": 1}},
                "automatic_function_calling": {"disable": True},
                "automatic_continuation": False,
            },
        )

    def _decoder(self, answer: Answer) -> _GeminiDecoder:
        return _GeminiDecoder(answer, self.model, self.clock.new_id)

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, self._api_error):
            rejected: Any = error
            headers = getattr(rejected.response, "headers", None)
            return failure_from_response(rejected.code or 0, rejected.details, headers)
        if type(error).__name__ == "UnknownApiResponseError":
            text = f"the server sent an event that cannot be decoded: {error}"
            return Failure(StreamErrorKind.TRANSIENT, text[:300])
        if type(error).__module__.startswith("aiohttp."):  # the SDK prefers it if installed
            text = f"the connection failed: {type(error).__name__}: {error}"
            return Failure(StreamErrorKind.TRANSIENT, text)
        return failure_of_sdk(error)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._clients.aclose()


def _key_for(given: str | None, base_url: str | None) -> str | None:
    given = given_key(given)
    host = urlsplit(base_url).hostname or "" if base_url else "googleapis.com"
    if not given and not f".{host}".endswith(".googleapis.com"):
        return None
    return api_key_from(given, _KEY_VARIABLES, "Gemini")


# --- the response -----------------------------------------------------------------------------

# The list to which `_http_client` adds the response of the current task's request.
_TAKEN: ContextVar[list[Any]] = ContextVar("_TAKEN")


class _OwnClient(Struct, frozen=True):
    sdk: Any
    http: Any

    async def aclose(self) -> None:
        await self.http.aclose()
        self.sdk.close()


def _http_client(connect: float | None) -> Any:
    """Return an HTTP client for the SDK that withholds the body of a 200 response, for us to read.

    The SDK sees the status and an empty body. It gets error responses whole, because its exceptions
    parse them.
    """
    httpx = load_extra("httpx2", "google", "Gemini")

    async def limit_connecting(request: Any) -> None:
        # The SDK sets a time limit for each request, and cannot limit the connection alone.
        request.extensions["timeout"] = httpx.Timeout(None, connect=connect).as_dict()

    async def take(response: Any) -> None:
        if response.status_code == 200:
            taken = httpx.Response(
                200,
                headers=response.headers,
                stream=response.stream,
                request=response.request,
                extensions=response.extensions,
            )
            response.stream = httpx.ByteStream(b"")
            _TAKEN.get().append(taken)

    return httpx.AsyncClient(
        limits=httpx.Limits(max_connections=1000, max_keepalive_connections=100),
        event_hooks={"request": [limit_connecting], "response": [stay_at_origin(), take]},
        follow_redirects=True,
        max_redirects=MOST_REDIRECTS,
    )


@asynccontextmanager
async def _read_by_sdk(stream: Any) -> AsyncGenerator[AsyncIterator[bytes]]:
    """Encode the chunks that the SDK has parsed as server-sent events again."""
    events = _as_events(stream)
    try:
        yield events
    finally:
        closing = asyncio.ensure_future(_close_by_sdk(events, stream))
        while not closing.done():  # finish closing even if this task is cancelled again
            with suppress(asyncio.CancelledError):
                await asyncio.shield(closing)


async def _as_events(stream: Any) -> AsyncGenerator[bytes]:
    async for chunk in stream:
        seen = chunk.model_dump_json(
            by_alias=True, exclude_none=True, exclude={"sdk_http_response"}
        )
        yield b"data: %b\n\n" % seen.encode()


async def _close_by_sdk(events: AsyncGenerator[bytes], stream: Any) -> None:
    """Close the SDK's stream, possibly in the middle of a response.

    Its ``aclose`` leaves the connection open. Cancelling a task that waits for the next chunk
    closes it, so chunks that have already arrived are read first.
    """
    await events.aclose()
    is_over = False
    while not is_over:
        reading = asyncio.ensure_future(anext(stream, None))
        await asyncio.wait({reading}, timeout=0)
        reading.cancel()
        outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
        is_over = outcome is None or isinstance(outcome, BaseException)


# --- models -----------------------------------------------------------------------------------

_NOT_FOR_TEXT = re.compile(r"-(image|tts|live|audio|native-audio)\b")

_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh")

# The first pattern that matches gives the levels of a model of the third generation or later.
_KNOWN_LEVELS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), tuple(levels.split()))
    for pattern, levels in (
        (r"gemini-[\d.]+-flash-lite", "minimal low medium high"),
        (r"gemini-3(\.[1-6])?-flash", "minimal low medium high"),
        (r"gemini-3-pro", "low high"),
        (r"", "low medium high"),
    )
)

_BUDGETS = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192, "high": 24576, "xhigh": 24576}
_PRO_BUDGETS = {**_BUDGETS, "none": 128, "minimal": 128, "xhigh": 32768}


def _thinking(model: str, effort: ReasoningEffort) -> dict[str, Any] | None:
    """Return the ``thinkingConfig``; None: the model rejects it, or is unknown.

    Thought summaries are requested with every level except ``none``. A level that the model does
    not know becomes the next lower one that it knows, or its lowest.
    """
    name, generation = model.rpartition("/")[2], generation_of(model)
    if generation is None or _NOT_FOR_TEXT.search(name):
        return None
    shown = {} if effort is ReasoningEffort.NONE else {"includeThoughts": True}
    if generation >= 3:
        known = next(levels for pattern, levels in _KNOWN_LEVELS if pattern.match(name))
        wanted = _LEVELS.index(effort)
        below = [level for level in known if _LEVELS.index(level) <= wanted]
        return {"thinkingLevel": (below[-1] if below else known[0]).upper(), **shown}
    if name.startswith("gemini-2.5-"):
        budgets = _PRO_BUDGETS if name.startswith("gemini-2.5-pro") else _BUDGETS
        return {"thinkingBudget": budgets[effort], **shown}
    return None


# --- the request ------------------------------------------------------------------------------

# The fields of a request outside its generationConfig.
_REQUEST_FIELDS = _words(
    "contents systemInstruction tools toolConfig safetySettings cachedContent labels serviceTier "
    "store continuationToken"
)

_FORMAT_FIELDS = _words("responseMimeType responseSchema responseJsonSchema responseFormat")


def _declaration(tool: ToolSchema) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "parametersJsonSchema": tool.parameters,
    }


def _as_in_rest(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``provider_extras`` to the names and the nesting of the REST API."""
    written: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, value in extras.items():
        match _camel(name), value:
            case "generationConfig", Mapping():
                settings |= {_camel(inner): part for inner, part in value.items()}
            case "toolConfig", Mapping():
                written["toolConfig"] = _camel_fields(value)
            case field, _ if field in _REQUEST_FIELDS:
                written[field] = value
            case field, _:
                settings[field] = value
    thinking = settings.get("thinkingConfig")
    if isinstance(thinking, Mapping):
        settings["thinkingConfig"] = _camel_fields(thinking)
    return {**written, "generationConfig": settings} if settings else written


def _sets_thinking_length(settings: Any) -> bool:
    """Whether the host sets a thinking level or budget: the API rejects two settings."""
    thinking = settings.get("thinkingConfig") if isinstance(settings, dict) else None
    return isinstance(thinking, dict) and not thinking.keys().isdisjoint(
        ("thinkingLevel", "thinkingBudget")
    )


def _sets_format(extras: Any) -> bool:
    """Whether the host sets a format of the answer: the API rejects two."""
    return any(is_set(extras, "generationConfig", name) for name in _FORMAT_FIELDS)


def _camel_fields(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {_camel(name): _camel_fields(part) for name, part in value.items()}


def _camel(name: str) -> str:
    first, *rest = str(name).split("_")
    return first + "".join([word[:1].upper() + word[1:] for word in rest])


# --- the answer -------------------------------------------------------------------------------


class _Content(Struct):
    parts: list[Part] | None = None


class _Candidate(Struct, rename="camel"):
    index: int | None = None
    content: _Content | None = None
    finish_reason: str | None = None
    finish_message: str | None = None
    grounding_metadata: Any = None
    citation_metadata: Any = None
    url_context_metadata: Any = None


class _Feedback(Struct, rename="camel"):
    block_reason: str | None = None
    block_reason_message: str | None = None


class _Chunk(Struct, rename="camel"):
    candidates: list[_Candidate] | None = None
    usage_metadata: dict[str, Any] | None = None
    prompt_feedback: _Feedback | None = None
    error: Any = None


class _NamedChunk(_Chunk, rename="camel"):
    """A chunk with what all of them repeat; it is decoded until it is known."""

    response_id: Any = None
    model_version: Any = None


# A server without server-sent events sends its chunks as one list.
_CHUNKS = msgspec.json.Decoder(_Chunk | list[_Chunk])
_NAMED_CHUNKS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_NamedChunk | list[_NamedChunk])

_FINISH = {
    "STOP": StopReason.END_TURN,
    "MAX_TOKENS": StopReason.MAX_TOKENS,
    "CONTINUATION": StopReason.MAX_TOKENS,  # the rest would need another request
}
# The provider withholds the answer or the rest of it.
_WITHHELD = _words(
    "SAFETY RECITATION LANGUAGE BLOCKLIST PROHIBITED_CONTENT SPII IMAGE_SAFETY "
    "IMAGE_PROHIBITED_CONTENT IMAGE_RECITATION IMAGE_OTHER NO_IMAGE MODEL_ARMOR "
    "MISSING_THOUGHT_SIGNATURE"
)
# The provider could not parse the model's output. A retry may succeed.
_BROKEN = _words(
    "MALFORMED_FUNCTION_CALL MALFORMED_RESPONSE UNEXPECTED_TOOL_CALL TOO_MANY_TOOL_CALLS"
)


class _GeminiDecoder(JsonEventDecoder[_Chunk | list[_Chunk]]):
    """Decodes the events of a streamed answer, or an answer that arrived as one document."""

    def __init__(self, answer: Answer, model: str, new_id: Callable[[], str]) -> None:
        super().__init__(answer, _NAMED_CHUNKS)
        self._model = model
        self._new_id = new_id
        self._call_numbers = count()
        self._item_numbers = count()
        self._has_output = False
        self._texts: list[str] = []
        self._sources: dict[str, Any] = {}  # held back until the text that they refer to is there

    def _event(self, event: _Chunk | list[_Chunk]) -> bool:
        if isinstance(event, list):
            known = [self._chunk(chunk) for chunk in event]
            return all(known)
        return self._chunk(event)

    def _chunk(self, chunk: _Chunk) -> bool:
        if chunk.error:
            raise ProviderFailure(failure_in_stream(chunk.error))
        if type(chunk) is _NamedChunk:
            self._named(chunk)
        if chunk.usage_metadata:
            self._answer.usage = _usage(chunk.usage_metadata)
        feedback = chunk.prompt_feedback
        if feedback is not None and feedback.block_reason:
            why = _named(feedback.block_reason, feedback.block_reason_message)
            self._answer.finish = StopReason.OTHER
            self._answer.withheld = f"the provider blocked the prompt: {why}"
            self.may_end = True
        for candidate in chunk.candidates or ():
            if not candidate.index:
                self._candidate(candidate)
        known = (chunk.candidates, feedback, chunk.usage_metadata)
        return any(part is not None for part in known)

    def _named(self, chunk: _NamedChunk) -> None:
        self._answer.named(chunk.response_id, chunk.model_version)
        if self._answer.response is not None:
            self._decode = _CHUNKS.decode

    def _candidate(self, candidate: _Candidate) -> None:
        if candidate.content is not None:
            for part in candidate.content.parts or ():
                self._part(part)
        for name in _SOURCES:
            if isinstance(found := getattr(candidate, name), dict):
                self._sources[name] = {**self._sources.get(name, {}), **found}
        if candidate.finish_reason:
            self._finish(candidate.finish_reason, candidate.finish_message)
        if self.may_end and self._sources:
            sources, self._sources = self._sources, {}
            for annotation in _annotations(sources, "".join(self._texts)):
                self._answer.annotate(annotation)

    def _finish(self, reason: str, message: str | None) -> None:
        answer, why = self._answer, _named(reason, message)
        if reason in _BROKEN and not self._has_output:
            text = f"the provider could not parse the model's output: {why}"
            raise ProviderFailure(Failure(StreamErrorKind.ZERO_OUTPUT_TRANSPORT, text))
        if reason in _WITHHELD:
            answer.withheld = f"the provider stopped the answer: {why}"
        # If the reason is unknown and there are calls, `Answer` derives the stop reason from them.
        is_unknown = reason not in _FINISH and reason not in _WITHHELD
        by_content = is_unknown and answer.has_calls
        answer.finish = None if by_content else _FINISH.get(reason, StopReason.OTHER)
        self.may_end = True

    def _part(self, part: Part) -> None:
        text, call = part.get("text"), part.get("functionCall")
        sealed = part.get("thoughtSignature")
        signature = sealed if isinstance(sealed, str) else None
        if isinstance(call, dict):
            self._call(call, signature)
        elif not isinstance(text, str):
            self._block(part, signature)
        elif part.get("thought"):
            self._answer.reasoning(text)
            if signature:
                self._keep(type="reasoning.text", part="thought", text=text, signature=signature)
        else:
            self._has_output = self._has_output or bool(text.strip())
            self._texts.append(text)
            self._answer.text(text)
            if signature:
                self._seal(signature, part="text", id=None, chars=len(text))

    def _block(self, part: Part, signature: str | None) -> None:
        """Add a picture or a provider item. Its signature goes into a separate reasoning item,
        because it is valid for this model only.
        """
        unsigned = {name: value for name, value in part.items() if name != "thoughtSignature"}
        match unsigned:
            case {"inlineData": {"mimeType": str(kind), "data": str(data)}} if kind.startswith(
                "image/"
            ) and unsigned.keys() == {"inlineData"}:
                self._has_output = True
                self._answer.block(ImageContent(f"data:{kind};base64,{data}", kind))
            case _ if unsigned:
                self._answer.block(ProviderContent(PROVIDER, unsigned))
            case _:
                return
        if signature:
            self._seal(signature, part="block")

    def _call(self, call: dict[str, Any], signature: str | None) -> None:
        if call.get("willContinue") or call.get("partialArgs"):
            text = "the arguments of a call came in pieces: do not enable that in provider_extras"
            raise ProviderFailure(Failure(StreamErrorKind.FATAL, text))
        self._has_output = True
        call_id = str(call.get("id") or self._new_id())
        arguments = call.get("args")
        self._answer.call(
            next(self._call_numbers),
            call_id,
            str(call.get("name") or ""),
            None if arguments is None else json_text(arguments),
        )
        if signature:
            self._seal(signature, part="call", id=call_id)

    def _seal(self, signature: str, **fields: Any) -> None:
        self._keep(type="reasoning.encrypted", data=signature, **fields)

    def _keep(self, **fields: Any) -> None:
        """Add a reasoning item that must be sent back, directly after the content so far."""
        mine = {"format": _FORMAT, "model": self._model, "index": next(self._item_numbers)}
        self._answer.reasoning_details([{**fields, **mine}])


_SOURCES = ("grounding_metadata", "citation_metadata", "url_context_metadata")
_SEARCHED = ("webSearchQueries", "imageSearchQueries", "retrievalQueries", "searchEntryPoint")


def _annotations(sources: Mapping[str, Any], text: str) -> list[Annotation]:
    """Return the sources of an answer. Converts their positions from bytes to characters."""
    grounding = sources.get("grounding_metadata", {})
    searched = {name: grounding[name] for name in _SEARCHED if grounding.get(name)}
    found = [Annotation("search", provider=PROVIDER, data=searched)] if searched else []
    chunks, cited = _dicts(grounding.get("groundingChunks")), set()
    for support in _dicts(grounding.get("groundingSupports")):
        numbers = support.get("groundingChunkIndices")
        for number in numbers if isinstance(numbers, list) else ():
            if type(number) is int and 0 <= number < len(chunks):
                cited.add(number)
                found.append(_source(chunks[number], support.get("segment")))
    found += [_source(chunk) for n, chunk in enumerate(chunks) if n not in cited]
    citations = sources.get("citation_metadata", {})
    for name in ("citationSources", "citations"):
        found += [_source(citation, citation) for citation in _dicts(citations.get(name))]
    pages = sources.get("url_context_metadata", {})
    found += [_source(page) for page in _dicts(pages.get("urlMetadata"))]
    return _in_characters(found, text)


def _dicts(values: Any) -> list[dict[str, Any]]:
    """Return the list with each item that is not an object replaced by an empty one."""
    given = values if isinstance(values, list) else []
    return [value if isinstance(value, dict) else {} for value in given]


def _source(data: dict[str, Any], segment: Any = None) -> Annotation:
    inner = next((value for value in data.values() if isinstance(value, dict)), data)
    place: dict[str, Any] = segment if isinstance(segment, dict) else {}

    def text(*names: str) -> str | None:
        values = [inner.get(name) for name in names]
        return next((value for value in values if isinstance(value, str)), None)

    def number(name: str) -> int | None:
        value = place.get(name)
        return value if type(value) is int and value >= 0 else None

    end = number("endIndex")
    start = number("startIndex")
    return Annotation(
        "url",
        url=text("uri", "retrievedUrl"),
        title=text("title"),
        quote=text("text"),
        start=start if end is None or start is not None else 0,  # the API omits zeros
        end=end,
        provider=PROVIDER,
        data=data,
    )


def _in_characters(annotations: list[Annotation], text: str) -> list[Annotation]:
    """Convert positions from bytes to characters. Each byte of the text is decoded once."""
    if text.isascii():
        return annotations
    data = text.encode("utf-8", "surrogatepass")
    places = {
        place for note in annotations for place in (note.start, note.end) if place is not None
    }
    characters, before, count = {}, 0, 0
    for place in sorted(places):
        count += len(data[before:place].decode("utf-8", "ignore"))
        before = place
        characters[place] = count
    return [
        replace(
            note,
            start=None if note.start is None else characters[note.start],
            end=None if note.end is None else characters[note.end],
        )
        for note in annotations
    ]


def _named(reason: str, message: str | None) -> str:
    return f"{reason} ({message})" if message else reason


def _usage(counts: Mapping[str, Any]) -> Usage:
    """Convert the usage. Prompt tokens include cached ones; candidates' exclude thoughts."""

    def number(name: str) -> int:
        value = counts.get(name)
        return value if type(value) is int and value > 0 else 0

    cached = number("cachedContentTokenCount")
    sent = number("promptTokenCount") + number("toolUsePromptTokenCount")
    return Usage(
        max(0, sent - cached),
        number("candidatesTokenCount") + number("thoughtsTokenCount"),
        0,
        cached,
    )
