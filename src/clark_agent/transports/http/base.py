"""One call to a provider: the steps that are the same for all providers.

    call    := encode, attempt; retry a transient failure if the attempt emitted no chunk;
               continue while the provider pauses the answer
    attempt := open, read → decode → chunks, until the provider signals the end

A transport implements four steps: encode a request, open the response, decode its pieces, and
classify the SDK's exceptions. Everything else is here: time limits, cancellation, retries, partial
answers after a failure, and redaction of secrets.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, get_args

from msgspec.structs import replace

from clark_agent.cancellation import CancellationToken
from clark_agent.clock import Clock, SystemClock
from clark_agent.errors import AccessRefused, ConfigError, StreamTimeout, TransportError
from clark_agent.messages.thinking import ThinkingTags
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    OutputModeName,
    Start,
    StreamChunk,
    StreamErrorKind,
    StreamEvent,
    StreamRequest,
    Waiting,
)
from clark_agent.transports.http.reader import Cancelled, Feed
from clark_agent.transports.http.reasoning_transfer import ReasoningTarget
from clark_agent.transports.http.redaction import Redactor
from clark_agent.transports.http.response import Answer, Failure, ProviderFailure
from clark_agent.transports.http.retry import RetryPolicy, Timeouts
from clark_agent.types import AssistantMessage, StopReason

__all__ = ["REFUSES_ACCESS", "Decoder", "Transport", "pause"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

_EMPTY = AssistantMessage((), StopReason.OTHER)
_HINTS = {
    401: "check the key",
    403: "the key does not allow it",
    404: "check the model's name and the address",
}
# A provider may pause one answer this many times.
_MOST_PAUSES = 10
REFUSES_ACCESS = (401, 403)
_MAY_PASS = (StreamErrorKind.TRANSIENT, StreamErrorKind.PROVIDER_RATE_LIMITED)


class Decoder(Protocol[T_contra]):
    """Decodes a provider's pieces and passes what they hold to an `Answer`.

    Contract: may raise `ProviderFailure`. Sets ``is_complete`` when the provider has signalled the
    end, and ``may_end`` when the answer is whole even if the connection fails now.
    """

    is_complete: bool
    may_end: bool

    def feed(self, piece: T_contra) -> None:
        """Decode the next piece."""
        ...

    def end(self) -> None:
        """Decode what is left after the end of the response."""
        ...


class Transport(ABC, Generic[T]):
    """A `clark_agent.stream.StreamFn` over HTTP. Create one and share it: it keeps connections."""

    def __init__(
        self,
        model: str,
        *,
        provider: str,
        secrets: Iterable[str] = (),
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        thinking_tags: ThinkingTags | bool = "leading",
        clock: Clock | None = None,
    ) -> None:
        name: Any = model
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{type(self).__name__} needs the name of a model, not {model!r}")
        self.model = model
        self.provider = provider
        self.retry = checked("retry", retry, RetryPolicy) or RetryPolicy()
        self.timeouts = checked("timeouts", timeouts, Timeouts) or Timeouts()
        self.thinking_tags: ThinkingTags = _thinking_tags(thinking_tags)
        self.clock = clock or SystemClock()
        self._redactor = Redactor(secrets)
        for secret in self._redactor.secrets:
            if not secret.isascii() or not secret.isprintable():
                # The HTTP libraries would log the value when they reject it.
                raise ConfigError(
                    f"{type(self).__name__}: a key or a header has characters that HTTP does not "
                    "allow, such as a line break or a letter that is not ASCII"
                )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"

    # --- implemented by each transport ----------------------------------------------------------

    @property
    def target(self) -> ReasoningTarget:
        """Whose reasoning the model accepts in a history: none, unless a transport overrides it."""
        return ReasoningTarget()

    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        """How to ask for a structured output if the user does not say.

        ``native`` where the provider ensures the schema of the answer, also in a request with tools
        if ``has_tools``. ``tool`` unless a transport overrides it.
        """
        return "tool"

    @abstractmethod
    def encode(self, request: StreamRequest) -> Any:
        """Return the body of the request. Pure: nothing is sent. Raises `TransportError`."""

    @abstractmethod
    def _open(self, body: Any) -> AbstractAsyncContextManager[AsyncIterator[T]]:
        """Send the body and yield the pieces of the response."""

    @abstractmethod
    def _decoder(self, answer: Answer) -> Decoder[T]:
        """Return a new decoder for the pieces of one response."""

    @abstractmethod
    def _failure(self, error: Exception) -> Failure:
        """Classify an exception that was raised while opening or reading the response."""

    def _rewritten(self, request: StreamRequest, failure: Failure) -> Any | None:
        """Return a changed body for a request that the server rejected, or None.

        Called after each failure until it returns a body, as long as no chunk was emitted. The new
        body is sent at once.
        """
        return None

    def _continuation(self, body: Any, message: AssistantMessage, paused: dict[str, Any]) -> Any:
        """Return the body that asks the provider to continue an answer that it has paused.

        ``body`` is the first request, ``message`` all that was received since.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot continue a paused answer")

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections. The next call opens new ones."""

    # --- the call -------------------------------------------------------------------------------

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
        has_begun = is_rewritten = False
        asked, attempts, pauses = body, 0, 0
        fresh: Callable[[], Answer] = partial(self._answer, request)
        began = self.clock.now_ms()
        while True:
            attempts += 1
            answer, has_emitted = fresh(), False
            spent = (self.clock.now_ms() - began) / 1000
            async with _Attempt(self, answer, body, signal, spent) as attempt:
                while (chunks := await attempt.read()) is not None:
                    if chunks and not has_begun:
                        has_begun = True
                        yield Start(_EMPTY, response=answer.response)
                    for chunk in chunks:
                        has_emitted = True
                        yield Chunk(chunk)
            if (failure := attempt.failure) is None:
                if answer.paused is not None and pauses < _MOST_PAUSES:
                    body = self._continuation(asked, attempt.message, answer.paused)
                    fresh, attempts, pauses = answer.continued, 0, pauses + 1
                    continue
                if not has_begun:
                    yield Start(_EMPTY, response=answer.response)
                yield Done(attempt.message)
                return
            other = None
            if not has_begun and not is_rewritten:
                other = self._rewritten(request, failure)
            if other is not None:
                asked, body, is_rewritten = other, other, True
                logger.warning("%s: %s; sending a changed request", self.provider, failure.message)
                continue
            delay = None if has_emitted else self._delay(failure, attempts, began)
            if delay is None:
                rest = attempt.rest()
                for chunk in rest if has_begun else ():
                    yield Chunk(chunk)
                tried = f" ({attempts} attempts)" if attempts > 1 else ""
                text = f"{failure.message}{tried}"
                yield Error(attempt.message, failure.kind, text, failure.cause)
                return
            text = "%s: %s; retrying in %.1f s, attempt %d of %d"
            most = self.retry.attempts
            logger.warning(text, self.provider, failure.message, delay, attempts + 1, most)
            if not has_begun:
                yield Waiting(delay, str(failure.kind))
            if not await pause(self.clock.sleep(delay), signal):
                text = signal.reason or "the call was cancelled"
                aborted = Failure(StreamErrorKind.ABORTED, text)
                yield Error(fresh().partial(aborted), aborted.kind, text)
                return

    def _answer(self, request: StreamRequest) -> Answer:
        return Answer(
            cap=request.max_output_tokens,
            thinking_tags=self.thinking_tags,
            new_id=self.clock.new_id,
            clean=self._redactor.item,
        )

    def _delay(self, failure: Failure, attempt: int, began: int) -> float | None:
        """Seconds to wait before the next attempt; None: do not retry."""
        if failure.kind not in _MAY_PASS or attempt >= self.retry.attempts:
            return None
        if isinstance(failure.cause, StreamTimeout) and failure.cause.phase == "total":
            return None
        delay = self.retry.delay(attempt, failure.retry_after)
        elapsed = (self.clock.now_ms() - began) / 1000
        total = self.timeouts.total
        if total is not None and elapsed + delay >= total:
            return None
        return delay if elapsed + delay <= self.retry.max_elapsed else None

    def _explain(self, error: Exception) -> Failure:
        """Convert the exception that ended an attempt to a `Failure`."""
        if isinstance(error, Cancelled):
            return Failure(StreamErrorKind.ABORTED, str(error))
        if isinstance(error, StreamTimeout):
            return Failure(StreamErrorKind.TRANSIENT, str(error), cause=error)
        failure = error.failure if isinstance(error, ProviderFailure) else self._failure(error)
        if failure.kind is StreamErrorKind.FATAL and failure.status in _HINTS:
            where = f"{self.provider}, model {self.model!r}"
            # Redact before the hint is added: a truncated message may end in half a secret.
            message = self._redactor.text(failure.message)
            text = f"{message} ({where}: {_HINTS[failure.status]})"
            cause = failure.cause
            if failure.status in REFUSES_ACCESS:
                cause = AccessRefused("provider", failure.status, text)
            return replace(failure, message=text, cause=cause)
        return failure


_UNFINISHED = Failure(
    StreamErrorKind.EMPTY, "the stream ended before the provider signalled the end"
)


class _Attempt(Generic[T]):
    """One request and its response.

    After the last `read`, ``message`` is the answer; if ``failure`` is set, it is the partial one.
    """

    def __init__(
        self,
        transport: Transport[T],
        answer: Answer,
        body: Any,
        signal: CancellationToken,
        spent: float,
    ) -> None:
        self.failure: Failure | None = None
        self.message = _EMPTY
        self._transport = transport
        self._answer = answer
        self._decoder = transport._decoder(answer)
        self._is_over = False
        self._feed = Feed(
            lambda: transport._open(body),
            signal,
            idle=transport.timeouts.idle,
            total=transport.timeouts.total,
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

    async def read(self) -> list[StreamChunk] | None:
        """Return the chunks since the last call, possibly none; None at the end."""
        if self._is_over:
            return None
        decoder = self._decoder
        try:
            pieces = await self._feed.read()
            for piece in pieces or ():
                decoder.feed(piece)
            if pieces is None:
                decoder.end()
            if pieces is None or decoder.is_complete:
                await self._finish()
        except Exception as error:
            if decoder.may_end and not isinstance(error, (Cancelled, ProviderFailure)):
                decoder.is_complete = True
                await self._finish()
            else:
                self._fail(self._transport._explain(error))
        return self._answer.take()

    async def _finish(self) -> None:
        self._is_over = True
        is_whole = self._decoder.is_complete
        self._answer.close(is_whole=is_whole)
        outcome = self._answer.message() if is_whole else self._answer.unreadable or _UNFINISHED
        if isinstance(outcome, Failure):
            self._fail(outcome)
        else:
            self.message = outcome
        await self._feed.drain()

    def _fail(self, failure: Failure) -> None:
        self._is_over = True
        self.failure = self._transport._redactor.failure(failure)
        self.message = self._answer.partial(self.failure)

    def rest(self) -> list[StreamChunk]:
        """Flush the chunks that a failed answer still held back. Adds them to ``message`` too."""
        assert self.failure is not None
        self._answer.close(is_whole=False)
        self.message = self._answer.partial(self.failure)
        return self._answer.take()


def _thinking_tags(given: Any) -> ThinkingTags:
    if isinstance(given, bool):
        return "leading" if given else "off"
    if given not in get_args(ThinkingTags):
        raise ConfigError(f"thinking_tags must be leading, anywhere or off, not {given!r}")
    return given  # type: ignore[no-any-return]


def checked(name: str, value: Any, kind: type[T]) -> T | None:
    """Return the setting. Raises `ConfigError` if it is of another type."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, not {value!r}")
    return value


async def pause(sleep: Any, signal: CancellationToken) -> bool:
    """Sleep. Returns False as soon as the signal is cancelled."""
    sleeping = asyncio.ensure_future(sleep)
    waiting = asyncio.ensure_future(signal.wait())
    try:
        await asyncio.wait({sleeping, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sleeping, waiting):
            task.cancel()
        await asyncio.gather(sleeping, waiting, return_exceptions=True)
    return not signal.cancelled
