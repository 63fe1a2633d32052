"""One stream of the model, read to its end.

`read_answer` returns the answer, how the stream failed, or None if it was interrupted. It calls
the transport once: `clark_agent.engine.retry` decides about retries.

Events of a transport are checked as they arrive. A stream that does not stop when it is cancelled
is left behind, like a tool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._finished import FINISHED
from clark_agent._text import describe, well_formed
from clark_agent.engine.run import Run
from clark_agent.engine.supervised import Supervised, as_coroutine, is_cancelled
from clark_agent.events import MessageUpdate, RequestDelayed
from clark_agent.intake import (
    accept_answer,
    accept_chunk,
    accept_chunks,
    accept_json,
    is_plain_answer,
)
from clark_agent.steering import SteerWhen
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    Start,
    StreamErrorKind,
    StreamRequest,
    TextChunk,
    Waiting,
)
from clark_agent.types import AssistantMessage, StopReason

if TYPE_CHECKING:
    from clark_agent.engine.interrupts import Why

__all__ = ["StreamFailure", "close_stream", "read_answer"]

logger = logging.getLogger(__name__)

# After this many deltas other tasks may run, if it is time.
_CHUNKS_BETWEEN_PAUSES = 64


class StreamFailure(Struct, frozen=True):
    """The stream ended without an answer."""

    message: AssistantMessage
    """The received part of it."""
    kind: StreamErrorKind
    text: str
    cause: BaseException | None = None
    raised: BaseException | None = None
    """The exception of the transport, if it raised."""


async def read_answer(run: Run, request: StreamRequest) -> AssistantMessage | StreamFailure | None:
    """Call the model, and read its answer. None: the user steered, or time ran out."""
    reading = _Reading(run)
    if run.interrupts.may_intervene:
        if run.interrupts.can_intervene:
            if run.interrupts.due(SteerWhen.NOW) is not None:
                return None
            run.journal.decided()  # from here on an interrupt arrives while the stream is read
        run.interrupts.handler = reading
    try:
        events = run.effects.ask_model(run.config.stream, request, run.signal)
        work = _read(run, events, reading)
        try:
            awaited = work.send(None)
        except StopIteration as done:  # it had nothing to wait for
            outcome: AssistantMessage | StreamFailure | None = done.value
        else:
            outcome = await Supervised(work, awaited, grace=run.grace, what="the transport")
        if reading.is_due and isinstance(outcome, StreamFailure):
            return None
        return outcome
    except (Exception, asyncio.CancelledError) as error:
        reading.end()
        if reading.was_cancelled and not run.interrupts.is_cancelled():
            return None
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        return StreamFailure(
            run.failed_answer(error),
            StreamErrorKind.FATAL,
            f"the transport raised {describe(error)}",
            error,
            error,
        )


def _no_transport(returned: object) -> TypeError:
    if isinstance(returned, Coroutine):
        returned.close()  # it will not be awaited
    kind = type(returned).__name__
    return TypeError(f"a transport must be an async generator, but this one returned a {kind}")


class _Reading:
    """The handler of interrupts while a stream is read. It does not disturb a running listener."""

    is_due = False
    """Whether the user steered, or time ran out."""
    is_over = False
    """Whether further events are ignored: the stream may have been left behind."""
    was_cancelled = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self.emit: Callable[[MessageUpdate | RequestDelayed], Awaitable[None]] = run.emitter.emit

    def __call__(self, why: Why) -> None:
        if why == "aborted":
            self._run.interrupts.cancel_task()
            return
        self.is_due = True
        if not self.was_cancelled and not self._run.emitter.is_sending:
            self.was_cancelled = True
            self._run.interrupts.cancel_task()

    def end(self) -> None:
        """Clean up after the stream; the task continues."""
        self.is_over = True
        self.emit = _ignore
        interrupts = self._run.interrupts
        if interrupts.handler is self:
            interrupts.handler = None
            if self.was_cancelled:
                interrupts.take_back()


def _ignore(event: MessageUpdate | RequestDelayed) -> Awaitable[None]:
    return FINISHED


async def _read(
    run: Run, events: AsyncIterable[Any], reading: _Reading
) -> AssistantMessage | StreamFailure | None:
    """Read to the end, or until interrupted. Chunks before `Start` are ignored.

    A chunk is checked before a listener gets it; if there is none, together with its neighbours.
    """
    answer, emits_deltas = run.answer, run.emits_deltas
    placeholder: AssistantMessage | None = None
    keep: Callable[[Any], None] = answer.chunks.append
    until_pause = _CHUNKS_BETWEEN_PAUSES
    try:
        async for event in events:
            kind = type(event)
            if kind is Chunk and placeholder is not None:
                chunk = event.chunk
                if emits_deltas:
                    if type(chunk) is not TextChunk or type(chunk.delta) is not str:
                        chunk = accept_chunk(chunk)
                    keep(chunk)
                    await reading.emit(MessageUpdate(placeholder, chunk))
                else:
                    keep(chunk)
                until_pause -= 1
                if not until_pause:
                    until_pause = _CHUNKS_BETWEEN_PAUSES
                    await run.pace.pause_if_due()
            elif reading.is_over:
                break
            elif kind is Start and placeholder is None:
                placeholder, details = _accepted(event)
                await answer.begin(placeholder, details)
                keep = answer.chunks.append
            elif kind is Done:
                if answer.chunks and not emits_deltas:
                    accept_chunks(answer.chunks)
                message = event.message
                return message if is_plain_answer(message) else accept_answer(message)
            elif kind is Error:
                accept_chunks(answer.chunks)
                return _failed(run, event)
            elif kind is Waiting and placeholder is None:
                await reading.emit(_delayed(event))
            elif kind is Chunk or kind is Start or kind is Waiting:  # not where it belongs
                await run.pace.pause_if_due()
            else:
                raise TypeError(
                    f"a transport must yield Start, Chunk, Done or Error, not {event!r}"
                )
            if reading.is_due:
                break
        accept_chunks(answer.chunks)
    except TypeError:
        if hasattr(type(events), "__aiter__"):
            raise
        raise _no_transport(events) from None
    except GeneratorExit as error:
        if not run.interrupts.is_running():
            raise
        raise RuntimeError("GeneratorExit was raised") from error
    finally:
        reading.end()
        if (close := getattr(events, "aclose", None)) is not None:
            closing = _begin_to_close(close)
            if closing is not None:
                await _finish_closing(run, *closing)
    if reading.is_due:
        return None
    text = "the stream ended without an answer"
    message = AssistantMessage((), StopReason.ERROR, text, run.clock.now_ms())
    return StreamFailure(message, StreamErrorKind.EMPTY, text)


def _accepted(event: Start) -> tuple[AssistantMessage, Any]:
    """The checked placeholder and details of a `Start`."""
    placeholder, details = event.partial, event.details
    if type(placeholder) is not AssistantMessage or placeholder.content:
        placeholder = accept_answer(placeholder)
    if details is not None:
        details = accept_json(details, "Start.details")
    return placeholder, details


def _delayed(event: Waiting) -> RequestDelayed:
    """The event for the listeners."""
    seconds: Any = event.seconds
    reason: Any = event.reason
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not isinstance(reason, str) or not (seconds is None or (is_number and isfinite(seconds))):
        raise TypeError(f"Waiting must have seconds or None, and a reason, not {event!r}")
    return RequestDelayed(seconds, well_formed(reason))


class HasGrace(Protocol):
    """What stops foreign code."""

    @property
    def grace(self) -> float:
        """How long it has to stop."""
        ...


async def close_stream(run: HasGrace, events: Any) -> None:
    """Close the stream of a transport, within the run's grace. Does not raise."""
    if (close := getattr(events, "aclose", None)) is not None:
        closing = _begin_to_close(close)
        if closing is not None:
            await _finish_closing(run, *closing)


def _begin_to_close(close: Callable[[], Any]) -> tuple[Any, Any] | None:
    """Close the transport's stream. Return the rest of that work, if it must be awaited."""
    try:
        work = close()
        try:
            begin = work.send
        except AttributeError:
            work = as_coroutine(work)
            begin = work.send
        return work, begin(None)
    except StopIteration:
        return None
    except Exception:
        logger.exception("the transport failed to close its stream")
        return None


async def _finish_closing(run: HasGrace, work: Any, awaited: Any) -> None:
    """Wait until the stream is closed, at most as long as for a cancelled tool."""
    closing = _Closing(work, awaited, grace=run.grace)
    closing.leave_after(run.grace)
    try:
        await closing
    except Exception:
        logger.exception("the transport failed to close its stream")


class _Closing(Supervised):
    """The closing of a stream, limited like a cancelled tool."""

    def _raise_left_behind(self) -> NoReturn:
        raise TimeoutError("it did not end in time, and was left behind")


def _failed(run: Run, event: Error) -> StreamFailure:
    """The failure that the transport reports, with the received part of the answer."""
    reported: Any = event.message
    text = well_formed(reported if isinstance(reported, str) else repr(reported))
    try:
        kind = StreamErrorKind(event.kind)
    except ValueError:
        kind, text = StreamErrorKind.FATAL, f"{text} (of the unknown kind {event.kind!r})"
    try:
        partial = accept_answer(event.partial)
    except TypeError as error:
        logger.warning("the transport's Error.partial is ignored: %s", error)
        partial = run.answer.so_far(text)
    message = replace(
        partial,
        stop_reason=StopReason.ABORTED if kind is StreamErrorKind.ABORTED else StopReason.ERROR,
        error_message=text,
        timestamp=run.clock.now_ms(),
    )
    cause = event.cause if isinstance(event.cause, BaseException) else None
    return StreamFailure(message, kind, text, cause)
