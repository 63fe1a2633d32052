"""The client of a gateway: a transport that calls a model through `gateway`.

    stream = ProxyStream("https://models.example.com", token, model="good")

The gateway sends the events of its own transport, and they are passed on unchanged: the final
message is the gateway's and is not assembled again here. The gateway retries failures of its
provider; they are passed on and not retried here. The one exception is a key that the provider
rejected: its error text is rewritten, so that it is not mistaken for a rejected gateway token (see
`clark_agent.errors.AccessRefused`). A request is retried only before the answer begins, after a
failed connection or a temporary rejection (408, 429, 502, 503, 504).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from clark_agent._extras import load_extra
from clark_agent.cancellation import CancellationToken
from clark_agent.clock import Clock, SystemClock
from clark_agent.errors import (
    AccessRefused,
    ConfigError,
    DecodeError,
    StreamTimeout,
    TransportError,
)
from clark_agent.messages.wire import encode_json, to_json_value
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    Chunk,
    Done,
    Error,
    MessageAssembler,
    StreamErrorKind,
    StreamEvent,
    StreamRequest,
    Waiting,
)
from clark_agent.transports.http.base import REFUSES_ACCESS, pause
from clark_agent.transports.http.failures import (
    failure_from_response,
    failure_of_sdk,
    undecodable_event,
)
from clark_agent.transports.http.reader import Cancelled, Feed
from clark_agent.transports.http.redaction import Redactor, address_parts, secrets_in
from clark_agent.transports.http.redirects import MOST_REDIRECTS, stay_at_origin
from clark_agent.transports.http.request import with_extras
from clark_agent.transports.http.response import Failure, ProviderFailure
from clark_agent.transports.http.retry import RetryPolicy, Timeouts
from clark_agent.transports.http.sdk import LoopLocal
from clark_agent.transports.http.sse import SseDecoder
from clark_agent.transports.stream_json import call_fields, decode_event, encode_call
from clark_agent.types import AssistantMessage, StopReason

__all__ = ["ProxyStream"]

logger = logging.getLogger(__name__)

_EMPTY = AssistantMessage((), StopReason.OTHER)
_LONGEST_REFUSAL = 1 << 16
# Shorter than uvicorn's keep-alive of five seconds, so that a connection is not reused while the
# gateway closes it.
_KEEP_SECONDS = 4.0


class ProxyStream:
    """A model behind a gateway. Create one and share it: it keeps connections.

    ``url`` is the gateway's address. ``model`` selects one of its models; it may be None if the
    gateway has only one. ``headers`` are sent with every request, for example for a proxy in front
    of the gateway.

    What the models behind the gateway can do is not known here. The mode of a run's output is
    therefore ``tool``, unless you set it.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        model: str | None = None,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        clock: Clock | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        sdk = load_extra("httpx2", "gateway", "ProxyStream")
        self.url = self.base_url = _checked_url(url)
        self.model = model
        self.retry = retry or RetryPolicy()
        self.timeouts = timeouts or Timeouts()
        self.clock = clock or SystemClock()
        if token is not None and not _is_sendable(token, is_empty_fine=False):
            raise ConfigError("token must be a non-empty string of printable ASCII characters")
        if not all(_is_sendable(value) for value in (headers or {}).values()):
            raise ConfigError("a header of ProxyStream has characters that HTTP does not allow")
        self._redactor = Redactor([token or "", *secrets_in(headers)])
        self._headers = {
            **(headers or {}),
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            **({"Authorization": f"Bearer {token}"} if token is not None else {}),
        }

        connect = self.timeouts.connect

        def make() -> Any:
            return sdk.AsyncClient(
                timeout=sdk.Timeout(None, connect=connect),
                limits=sdk.Limits(max_keepalive_connections=100, keepalive_expiry=_KEEP_SECONDS),
                event_hooks={"response": [stay_at_origin("url")]},
                follow_redirects=True,
                max_redirects=MOST_REDIRECTS,
            )

        self._clients: LoopLocal[Any] = LoopLocal(make, lambda client: client.aclose())

    def __repr__(self) -> str:
        return f"ProxyStream({self.url!r}{f', model={self.model!r}' if self.model else ''})"

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        """Send the request and yield the events of the answer."""
        try:
            body = self.encode(request)
        except TransportError as error:
            failed = Error(_EMPTY, StreamErrorKind.FATAL, str(error), error)
            yield self._redactor.event(failed)
            return
        began = self.clock.now_ms()
        for number in count(1):
            spent = (self.clock.now_ms() - began) / 1000
            async with _Attempt(self, body, signal, spent) as attempt:
                while (events := await attempt.read()) is not None:
                    for event in events:
                        yield event
            failure = attempt.failure
            if failure is None:
                return
            delay = self._delay(attempt, number, began)
            if delay is None:
                tried = f" ({number} attempts)" if number > 1 else ""
                text = f"{failure.message}{tried}"
                yield Error(attempt.partial(text), failure.kind, text, failure.cause)
                return
            text = "gateway: %s; retrying in %.1f s, attempt %d of %d"
            logger.warning(text, failure.message, delay, number + 1, self.retry.attempts)
            yield Waiting(delay, str(failure.kind))
            if not await pause(self.clock.sleep(delay), signal):
                text = signal.reason or "the call was cancelled"
                yield Error(_EMPTY, StreamErrorKind.ABORTED, text)
                return

    def encode(self, request: StreamRequest) -> bytes:
        """Return the body of the request. Pure: nothing is sent. Raises `TransportError`."""
        try:
            return encode_call(request, self.model)
        except UnicodeEncodeError:  # a lone surrogate
            fields = call_fields(request, self.model)
            return encode_json(
                with_extras(msgspec.to_builtins(fields, enc_hook=to_json_value), None)
            )
        except (TypeError, NotImplementedError, RecursionError, ValueError) as error:
            raise TransportError(f"the request cannot be written as JSON: {error}") from error

    async def aclose(self) -> None:
        """Close the connections of the running event loop. The next call opens new ones."""
        await self._clients.aclose()

    # --- internals ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open(self, body: bytes) -> AsyncGenerator[AsyncIterator[bytes]]:
        client = await self._clients.get()
        url = f"{self.url}/v1/stream"
        async with client.stream("POST", url, content=body, headers=self._headers) as response:
            if response.status_code != 200:
                raise ProviderFailure(self._refused(await _refusal(response)))
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                answer = kind or "no content type"
                text = f"{self.url} is not a gateway: it answers with {answer}"
                raise ProviderFailure(Failure(StreamErrorKind.FATAL, text))
            yield response.aiter_bytes()

    def _refused(self, failure: Failure) -> Failure:
        """Mark a 401 or 403 as rejected by the gateway itself, not by the provider behind it."""
        if failure.status not in REFUSES_ACCESS:
            return failure
        hint = "check the token" if failure.status == 401 else "it does not serve this caller"
        message = self._redactor.text(failure.message).replace("the server", "the gateway", 1)
        text = f"{message} ({hint})"
        cause = AccessRefused("gateway", failure.status, text)
        return replace(failure, message=text, cause=cause)

    def _explain(self, error: Exception) -> Failure:
        """Convert the exception that ended an attempt to a `Failure`."""
        if isinstance(error, Cancelled):
            return Failure(StreamErrorKind.ABORTED, str(error))
        if isinstance(error, StreamTimeout):
            return Failure(StreamErrorKind.TRANSIENT, str(error), cause=error)
        if isinstance(error, ProviderFailure):
            return error.failure
        return failure_of_sdk(error, self.url)

    def _delay(self, attempt: _Attempt, number: int, began: int) -> float | None:
        """Seconds to wait before the next attempt; None: do not retry."""
        failure = attempt.failure
        if failure is None or not attempt.may_be_repeated or number >= self.retry.attempts:
            return None
        delay = self.retry.delay(number, failure.retry_after)
        elapsed = (self.clock.now_ms() - began) / 1000
        total = self.timeouts.total
        if total is not None and elapsed + delay >= total:
            return None
        return delay if elapsed + delay <= self.retry.max_elapsed else None


_MAY_PASS = (StreamErrorKind.TRANSIENT, StreamErrorKind.PROVIDER_RATE_LIMITED)
_UNFINISHED = Failure(StreamErrorKind.EMPTY, "the gateway ended the stream without an answer")


class _Attempt:
    """One request and its response. After the last `read`, the terminal event was returned, or
    ``failure`` is set.
    """

    def __init__(
        self, proxy: ProxyStream, body: bytes, signal: CancellationToken, spent: float
    ) -> None:
        self.failure: Failure | None = None
        self._proxy = proxy
        self._has_begun = False
        self._is_over = False
        self._sse = SseDecoder()
        self._assembler = MessageAssembler(proxy.clock.new_id)
        timeouts = proxy.timeouts
        self._feed = Feed(
            lambda: proxy._open(body),
            signal,
            idle=timeouts.idle,
            total=timeouts.total,
            spent=spent,
        )

    async def __aenter__(self) -> Self:
        await self._feed.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._feed.__aexit__(kind, error, traceback)

    @property
    def may_be_repeated(self) -> bool:
        """Whether the answer has not begun and the failure may be temporary."""
        failure = self.failure
        if failure is None or self._has_begun or failure.kind not in _MAY_PASS:
            return False
        return not isinstance(failure.cause, StreamTimeout) or failure.cause.phase == "connect"

    def partial(self, text: str) -> AssistantMessage:
        """Return the partial message of an answer that failed between gateway and client."""
        is_aborted = self.failure is not None and self.failure.kind is StreamErrorKind.ABORTED
        reason = StopReason.ABORTED if is_aborted else StopReason.ERROR
        return self._assembler.message(reason, error_message=text)

    async def read(self) -> list[StreamEvent] | None:
        """Return the events since the last call, possibly none; None at the end."""
        if self._is_over:
            return None
        events: list[StreamEvent] = []
        try:
            pieces = await self._feed.read()
            if pieces is None:
                self._fail(_UNFINISHED)
            for payload in [found for piece in pieces or () for found in self._sse.feed(piece)]:
                events.append(event := self._event(payload))
                if isinstance(event, (Done, Error)):
                    self._is_over = True
                    await self._feed.drain()
                    break
        except Exception as error:
            self._fail(self._proxy._explain(error))
        return events

    def _event(self, payload: bytes) -> StreamEvent:
        try:
            event = decode_event(payload)
        except DecodeError as error:
            # A retry would not help: the server does not speak the gateway's protocol.
            failure = replace(undecodable_event(payload, error), kind=StreamErrorKind.FATAL)
            raise ProviderFailure(failure) from None
        if isinstance(event, Waiting):
            return self._proxy._redactor.event(event)
        self._has_begun = True
        if isinstance(event, Chunk):
            if isinstance(event.chunk, (AnnotationChunk, BlockChunk)):
                event = Chunk(self._proxy._redactor.chunk(event.chunk))
            self._assembler.feed(event.chunk)
            return event
        # A third-party gateway may quote the token anywhere.
        safe = self._proxy._redactor.event(_by_provider(event))
        if isinstance(event, Error) and isinstance(safe, Error):
            received = self._assembler.message().content
            if event.partial.content == received:  # the model's own words are not redacted
                return replace(safe, partial=replace(safe.partial, content=received))
        return safe

    def _fail(self, failure: Failure) -> None:
        self._is_over = True
        self.failure = self._proxy._redactor.failure(failure)


def _by_provider(event: StreamEvent) -> StreamEvent:
    """Rewrite an error if the provider rejected the gateway's key; return other events as is."""
    if not isinstance(event, Error) or not isinstance(event.cause, AccessRefused):
        return event
    cause = event.cause
    who = "the provider" if cause.by == "provider" else "another gateway"
    text = f"{who} behind the gateway rejected the key that the gateway uses: {event.message}"
    partial = replace(event.partial, error_message=text)
    return Error(partial, event.kind, text, AccessRefused(cause.by, cause.status, text))


def _checked_url(url: str) -> str:
    parts = address_parts(url, "the url of a ProxyStream", "")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "the url of a ProxyStream must not have a user, a query or a fragment: pass the token "
            "as token"
        )
    return url.rstrip("/").removesuffix("/v1/stream")


def _is_sendable(text: Any, *, is_empty_fine: bool = True) -> bool:
    """Whether a header can carry the text. The HTTP library would log a value that it rejects."""
    is_fine = isinstance(text, str) and text.isascii() and text.isprintable()
    return is_fine and (bool(text) or is_empty_fine)


_KINDS = {
    408: StreamErrorKind.TRANSIENT,
    413: StreamErrorKind.CONTEXT_OVERFLOW,
    429: StreamErrorKind.PROVIDER_RATE_LIMITED,
    502: StreamErrorKind.TRANSIENT,
    503: StreamErrorKind.TRANSIENT,
    504: StreamErrorKind.TRANSIENT,
}


async def _refusal(response: Any) -> Failure:
    """Convert a response without a stream to a `Failure`."""
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) >= _LONGEST_REFUSAL:
            break
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        content = body.decode(errors="replace")
    failure = failure_from_response(response.status_code, content, response.headers)
    kind = _KINDS.get(response.status_code, StreamErrorKind.FATAL)
    return replace(failure, kind=kind)
