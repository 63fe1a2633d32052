"""Rate limits on our side: requests wait for their turn, instead of being rejected.

    limit = RateLimit(requests_per_minute=50, tokens_per_minute=400_000, concurrency=8)
    stream = limited(connect("anthropic:claude-sonnet-5"), limit)

One `RateLimit` is shared by all transports that wrap it, and by all runs that use these: across
tasks, threads and event loops of one process. Requests go in the order in which they came.

In no 60 seconds there are more requests than allowed. Tokens are estimated before a request, and
corrected when its usage is known; so their limit holds as well as they can be estimated. Requests
are counted as they are made here: a transport's own retries are not counted again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from threading import Lock
from typing import Any

from clark_agent._threads import call_in_loop
from clark_agent.cancellation import CancellationToken
from clark_agent.clock import Clock, SystemClock
from clark_agent.errors import ConfigError
from clark_agent.messages.tokens import JsonSizeEstimator
from clark_agent.messages.wire import encode_json
from clark_agent.stream import (
    Done,
    Error,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
    Waiting,
)
from clark_agent.types import AssistantMessage, StopReason, Usage

__all__ = ["LimitedStream", "RateLimit", "limited"]

_MINUTE_MS = 60_000
_FIRST_GUESS = 1000
"""The output tokens of a request, while none has been answered."""
_WEIGHT = 1 / 8
"""How much each answer changes the usual number of output tokens."""


class RateLimit:
    """How many requests and tokens a minute, and how many requests at a time. None: no limit.

    Tokens are all that a provider reports: input, cached or not, and output. A request that is
    larger than ``tokens_per_minute`` is sent when no other was sent for a minute.
    """

    def __init__(
        self,
        *,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        concurrency: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.requests_per_minute = _checked("requests_per_minute", requests_per_minute)
        self.tokens_per_minute = _checked("tokens_per_minute", tokens_per_minute)
        self.concurrency = _checked("concurrency", concurrency)
        if requests_per_minute is tokens_per_minute is concurrency is None:
            raise ConfigError(
                "RateLimit needs requests_per_minute, tokens_per_minute or concurrency"
            )
        self._clock = clock or SystemClock()
        self._lock = Lock()
        self._queue: deque[_Turn] = deque()
        """Those that wait, in order."""
        self._sent: deque[_Turn] = deque()
        """Those of the last minute, in order."""
        self._tokens = 0
        """Their tokens."""
        self._running: set[_Turn] = set()
        """Those that are admitted and have not ended, if their number is limited."""
        self._usual: float | None = None
        """The usual number of output tokens."""

    def __repr__(self) -> str:
        names = ("requests_per_minute", "tokens_per_minute", "concurrency")
        given = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        return f"RateLimit({', '.join(given)})"

    # --- for the stream -------------------------------------------------------------------------

    def _enter(self, request: StreamRequest) -> _Turn:
        """Queue a request. It may be admitted at once."""
        turn = _Turn(self._estimate(request) if self.tokens_per_minute else 0)
        with self._lock:
            self._queue.append(turn)
            self._admit()
        return turn

    async def _wait(self, turn: _Turn, signal: CancellationToken, seconds: float | None) -> bool:
        """Return when something has changed: the turn or the time. False: it was cancelled."""
        cancelled = signal.subscribe(turn.wake)
        sleeping = None
        try:
            if seconds is not None:
                sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
                sleeping.add_done_callback(lambda _: turn.changed.set())
            await turn.changed.wait()
        finally:
            cancelled.close()
            if sleeping is not None:
                sleeping.cancel()
                await asyncio.gather(sleeping, return_exceptions=True)
        turn.changed.clear()
        return not signal.cancelled

    def _why(self, turn: _Turn) -> tuple[bool, float | None, str] | None:
        """Whether the turn is the next, how long that one has to wait, and why. None: admitted."""
        with self._lock:
            self._admit()
            if turn.is_admitted:
                return None
            first = self._queue[0]
            blocked = self._blocked(first)
            assert blocked is not None
            return (first is turn, *blocked)

    def _leave(self, turn: _Turn, usage: Usage | None) -> None:
        """End a request, or give up waiting. What was not sent leaves nothing behind."""
        with self._lock:
            if not turn.is_admitted:
                with suppress(ValueError):
                    self._queue.remove(turn)
            else:
                self._running.discard(turn)
                if usage is not None:
                    self._usual = _closer(self._usual, usage.output_tokens)
                if turn.is_counted and not turn.was_sent:
                    self._sent.remove(turn)
                    self._forget(turn)
                elif turn.is_counted and usage is not None:
                    self._tokens += _total(usage) - turn.tokens
                    turn.tokens = _total(usage)
            self._admit(is_news=True)

    # --- under the lock -------------------------------------------------------------------------

    def _admit(self, *, is_news: bool = False) -> None:
        """Admit those that may go, in order. The next one learns of it if anything has changed."""
        now = self._clock.now_ms()
        if self._sent and self._sent[-1].at > now:  # the clock was set back
            for turn in self._sent:
                turn.at = min(turn.at, now)
        while self._sent and now - self._sent[0].at >= _MINUTE_MS:
            self._forget(self._sent.popleft())
        self._drop_lost()
        while self._queue and self._blocked(turn := self._queue[0]) is None:
            self._queue.popleft()
            turn.is_admitted = turn.is_counted = True
            turn.at = now
            self._sent.append(turn)
            self._tokens += turn.tokens
            if self.concurrency is not None:
                self._running.add(turn)
            turn.wake()
            is_news = True
        if is_news and self._queue:
            self._queue[0].wake()

    def _drop_lost(self) -> None:
        """Drop what an event loop has left open that was closed: it will never end."""
        while self._queue and self._queue[0].loop.is_closed():
            self._queue.popleft()
        if self._queue and self.concurrency is not None and len(self._running) >= self.concurrency:
            self._running = {turn for turn in self._running if not turn.loop.is_closed()}

    def _forget(self, turn: _Turn) -> None:
        turn.is_counted = False
        self._tokens -= turn.tokens

    def _blocked(self, turn: _Turn) -> tuple[float | None, str] | None:
        """How long the next turn has to wait, and why. None: not at all."""
        if self.concurrency is not None and len(self._running) >= self.concurrency:
            return None, "concurrency"
        until, why = 0, ""
        if self.requests_per_minute is not None:
            over = len(self._sent) + 1 - self.requests_per_minute
            if over > 0:
                until, why = self._sent[over - 1].at, "requests_per_minute"
        if self.tokens_per_minute is not None:
            over = self._tokens + min(turn.tokens, self.tokens_per_minute) - self.tokens_per_minute
            for sent in self._sent:
                if over <= 0:
                    break
                over -= sent.tokens
                if sent.at >= until:
                    until, why = sent.at, "tokens_per_minute"
        left = until + _MINUTE_MS - self._clock.now_ms()
        return (max(0, left) / 1000, why) if why else None

    # --- tokens ---------------------------------------------------------------------------------

    def _estimate(self, request: StreamRequest) -> int:
        """The tokens of a request and its answer.

        The newest usage in the transcript counts for all before it, so that a long transcript is
        not measured again for each request.
        """
        output = request.max_output_tokens or round(self._usual or _FIRST_GUESS)
        estimate = JsonSizeEstimator().estimate_message
        tokens = 0
        for message in reversed(request.messages):
            if isinstance(message, AssistantMessage) and message.usage is not None:
                return tokens + _total(message.usage) + output
            tokens += estimate(message)
        size = len(request.system_prompt) + len(encode_json(request.tools))
        return tokens + size // 4 + output


class _Turn:
    """A request, from the queue to its end."""

    __slots__ = ("at", "changed", "is_admitted", "is_counted", "loop", "tokens", "was_sent")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        """Those that it is expected to use; then those that it has used."""
        self.at = 0
        """When it was admitted."""
        self.is_admitted = False
        self.is_counted = False
        """Whether it counts as one of the last minute."""
        self.was_sent = False
        self.changed = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def wake(self) -> None:
        """Let the one who waits look again. From any thread, and from a signal handler."""
        call_in_loop(self.loop, self.changed.set)


def _checked(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"RateLimit.{name} must be a whole number of at least 1, not {value!r}")
    return value


def _total(usage: Usage) -> int:
    return (
        usage.input_tokens
        + usage.output_tokens
        + usage.cache_creation_input_tokens
        + usage.cache_read_input_tokens
    )


def _closer(usual: float | None, to: int) -> float:
    return to if usual is None else usual + (to - usual) * _WEIGHT


# --- the stream -------------------------------------------------------------------------------


def limited(stream: StreamFn, limit: RateLimit) -> LimitedStream:
    """The transport, whose requests wait until the limit allows them.

    While one waits, the transport yields `clark_agent.stream.Waiting`, which listeners get as
    `clark_agent.events.RequestDelayed`. A request that is cancelled while it waits does not count.
    """
    return LimitedStream(stream, limit)


class LimitedStream:
    """What `limited` returns. It has all attributes of its transport."""

    def __init__(self, stream: StreamFn, limit: RateLimit) -> None:
        given: Any = limit
        if not callable(stream):
            raise ConfigError(f"limited() needs a transport, not {stream!r}")
        if not isinstance(given, RateLimit):
            raise ConfigError(f"limited() needs a RateLimit, not {given!r}")
        self.stream = stream
        self.limit = limit

    def __repr__(self) -> str:
        return f"limited({self.stream!r}, {self.limit!r})"

    def __getattr__(self, name: str) -> Any:
        """Such as ``model``, ``provider``, ``best_output_mode`` and ``aclose``."""
        if name == "stream" or name.startswith("__"):  # a copy that is still empty; a protocol
            raise AttributeError(name)
        return getattr(self.stream, name)

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        """Wait, then call the transport."""
        if signal.cancelled:
            yield _aborted(signal)
            return
        limit = self.limit
        usage: Usage | None = None
        reported: tuple[bool, str] | None = None
        turn = limit._enter(request)
        try:
            while (why := limit._why(turn)) is not None:
                is_next, seconds, reason = why
                if (is_next, reason) != reported:
                    reported = (is_next, reason)
                    yield Waiting(seconds, reason)
                    continue  # the listeners may have taken their time
                if not await limit._wait(turn, signal, seconds if is_next else None):
                    yield _aborted(signal)
                    return
            turn.was_sent = True
            answer = self.stream(request, signal)
            try:
                async for event in answer:
                    if isinstance(event, (Done, Error)):
                        usage = _usage(event)
                    yield event
            finally:
                if (close := getattr(answer, "aclose", None)) is not None:
                    await close()
        finally:
            limit._leave(turn, usage)


def _usage(event: Done | Error) -> Usage | None:
    message: Any = event.message if isinstance(event, Done) else event.partial
    usage: Any = getattr(message, "usage", None)
    return usage if isinstance(usage, Usage) else None


def _aborted(signal: CancellationToken) -> Error:
    text = signal.reason or "the call was cancelled"
    partial = AssistantMessage((), StopReason.ABORTED, text)
    return Error(partial, StreamErrorKind.ABORTED, text)
