"""A conformance kit for your own transport.

    report = await check_stream_fn(my_transport)

calls the transport for real, several times, and raises `NonconformingStream` with every violation
that could break the loop:

- The order of events: at most one start, before all chunks and after all waiting; one terminal
  event; nothing after it.
- The chunks fold to exactly the message in `Done`, or to the partial message in `Error`.
- A failure is an `Error` event, never an exception. The stop reason matches the content.
- A signal that is cancelled, before the call or during it, ends the stream in time.
- A stream that is closed early closes in time and leaves no task behind.

A transport that cannot answer passes if it reports that correctly: point it at a dead port to check
that too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from msgspec import Struct

from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ClarkAgentError
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    MessageAssembler,
    Start,
    StreamEvent,
    StreamFn,
    StreamRequest,
    Waiting,
)
from clark_agent.types import AssistantBlock, AssistantMessage, StopReason, ToolCall, UserMessage

__all__ = ["NonconformingStream", "StreamReport", "check_events_of", "check_stream_fn"]


class NonconformingStream(ClarkAgentError, AssertionError):
    """A transport breaks the rules; ``problems`` lists how, one per line."""

    def __init__(self, problems: Sequence[str]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} with this transport:", *problems]))
        self.problems = tuple(problems)


class StreamReport(Struct, frozen=True):
    """The events of an undisturbed call."""

    events: tuple[StreamEvent, ...]

    @property
    def message(self) -> AssistantMessage:
        """The whole message, or the part before the error."""
        last = self.events[-1]
        return last.message if isinstance(last, Done) else last.partial  # type: ignore[union-attr]

    @property
    def error(self) -> Error | None:
        """The error that it ended with, or None."""
        last = self.events[-1]
        return last if isinstance(last, Error) else None


_REQUEST = StreamRequest(
    system_prompt="You are brief.", messages=(UserMessage("Say hello and count to three."),)
)


async def check_stream_fn(
    stream: StreamFn,
    request: StreamRequest | None = None,
    *,
    cancel_within: float = 2.0,
    answer_within: float = 60.0,
) -> StreamReport:
    """Check a transport and return its events.

    It is called several times: to the end, cancelled before the call, and cancelled and closed at
    the start and at the first chunk. Raises `NonconformingStream`.
    """
    asked = _REQUEST if request is None else request
    whole = await _listen(stream, asked, within=answer_within)
    problems = [*whole.problems, *check_events_of(whole.events)]
    cancelled = CancellationToken()
    cancelled.cancel("before the call")
    early = await _listen(stream, asked, signal=cancelled, within=cancel_within)
    problems += [f"cancelled before the call: {text}" for text in early.problems]
    problems += [f"cancelled before the call: {text}" for text in _ending_problems(early.events)]
    if any(isinstance(event, Chunk) for event in early.events):
        problems.append("cancelled before the call: it called the model anyway")
    seen = {type(event) for event in whole.events}
    moments: list[type[StreamEvent]] = [kind for kind in (Start, Chunk) if kind in seen]
    for moment in moments or [Error]:
        late = await _listen(
            stream, asked, within=answer_within, cancel_at=moment, cancel_within=cancel_within
        )
        found = [*late.problems, *check_events_of(late.events)]
        closing = await _close_early(stream, asked, moment, answer_within, cancel_within)
        problems += [f"cancelled in the middle: {text}" for text in found]
        problems += [f"closed in the middle: {text}" for text in closing]
    if problems:
        raise NonconformingStream(list(dict.fromkeys(problems)))
    return StreamReport(whole.events)


def check_events_of(events: Sequence[StreamEvent]) -> list[str]:
    """Return the rules that a complete stream of events breaks; empty if there are none."""
    problems = _ending_problems(events)
    starts = [index for index, event in enumerate(events) if isinstance(event, Start)]
    chunks = [index for index, event in enumerate(events) if isinstance(event, Chunk)]
    if len(starts) > 1:
        problems.append(f"{len(starts)} start events; one is enough")
    if chunks and (not starts or starts[0] > chunks[0]):
        problems.append("a chunk came before the start: the loop ignores it")
    waits = [index for index, event in enumerate(events) if isinstance(event, Waiting)]
    if starts and waits and waits[-1] > starts[0]:
        problems.append("Waiting came after the start: the loop ignores it")
    terminal = events[-1] if events else None
    if isinstance(terminal, (Done, Error)) and chunks:
        problems += _fold_problems(events, terminal)
    if isinstance(terminal, Done):
        problems += _reason_problems(terminal.message)
    return problems


def _ending_problems(events: Sequence[StreamEvent]) -> list[str]:
    ends = [index for index, event in enumerate(events) if isinstance(event, (Done, Error))]
    if not ends:
        return ["no terminal event: the last must be Done or Error"]
    problems: list[str] = []
    if len(ends) > 1:
        problems.append(f"{len(ends)} terminal events; there must be exactly one")
    if ends[0] != len(events) - 1:
        problems.append("an event came after the terminal event")
    return problems


def _fold_problems(events: Sequence[StreamEvent], terminal: Done | Error) -> list[str]:
    assembler = MessageAssembler(lambda: "")
    for event in events:
        if isinstance(event, Chunk):
            assembler.feed(event.chunk)
    folded = assembler.message()
    content = folded.content
    name, message = (
        ("Done", terminal.message) if isinstance(terminal, Done) else ("Error", terminal.partial)
    )
    problems: list[str] = []
    if _comparable(content, message.content) != _comparable(message.content, content):
        problems.append(f"the chunks fold to {content!r}, but {name} carries {message.content!r}")
    if folded.annotations != message.annotations:
        theirs = f"{folded.annotations!r}, but {name} carries {message.annotations!r}"
        problems.append(f"the chunks fold to the annotations {theirs}")
    return problems


def _comparable(blocks: Sequence[AssistantBlock], others: Sequence[AssistantBlock]) -> list[Any]:
    """Return the blocks without the ids that the transport made up for calls without one."""
    without_id = {
        index
        for index, pair in enumerate(zip(blocks, others, strict=False))
        if any(isinstance(block, ToolCall) and not block.id for block in pair)
    }
    return [
        (block.name, block.arguments)
        if isinstance(block, ToolCall) and index in without_id
        else block
        for index, block in enumerate(blocks)
    ]


def _reason_problems(message: AssistantMessage) -> list[str]:
    reason = message.stop_reason
    if reason in (StopReason.ERROR, StopReason.ABORTED):
        return [f"Done carries the stop reason {reason}; report a failure with Error"]
    if reason is StopReason.TOOL_USE and not message.tool_calls:
        return ["the stop reason is tool_use, but there is no tool call"]
    if reason is StopReason.END_TURN and message.tool_calls:
        return ["the stop reason is end_turn, but there are tool calls"]
    ids = [call.id for call in message.tool_calls]
    return ["a tool call without an id"] if not all(ids) else []


class _Received(Struct):
    events: tuple[StreamEvent, ...]
    problems: list[str]


async def _listen(
    stream: StreamFn,
    request: StreamRequest,
    *,
    within: float,
    signal: CancellationToken | None = None,
    cancel_at: type[StreamEvent] | None = None,
    cancel_within: float = 0.0,
) -> _Received:
    """Read a stream to its end. With ``cancel_at``, cancel at the first event of that type, and
    allow ``cancel_within`` seconds more.
    """
    signal = signal or CancellationToken()
    events: list[StreamEvent] = []
    problems: list[str] = []
    limit = within

    async def read() -> None:
        event: Any
        async for event in stream(request, signal):
            if not isinstance(event, (Waiting, Start, Chunk, Done, Error)):
                problems.append(f"{event!r} is not a stream event")
                continue
            events.append(event)
            if cancel_at is not None and isinstance(event, cancel_at) and not signal.cancelled:
                signal.cancel("in the middle")

    async def read_on() -> None:
        nonlocal limit
        task = asyncio.ensure_future(read())
        stopping = asyncio.ensure_future(signal.wait())
        try:
            done = await _first(task, stopping, seconds=within)
            if done is stopping and cancel_at is not None:
                limit = cancel_within
                done = await _first(task, seconds=cancel_within)
            if done is not task:
                await _give_up(task, limit)
        finally:
            stopping.cancel()
        task.result()

    try:
        await read_on() if cancel_at is not None else await _limited(read(), within)
    except TimeoutError:
        problems.append(f"it did not end within {limit:g} seconds")
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        problems.append("it raised CancelledError; report a cancellation with Error")
    except Exception as error:
        problems.append(f"it raised {type(error).__name__}: {error}; report failures with Error")
    return _Received(tuple(events), problems)


async def _first(*tasks: asyncio.Future[Any], seconds: float) -> asyncio.Future[Any] | None:
    """Return the first future that is done, in argument order on a tie; None if none is in time."""
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return next((task for task in tasks if task.done()), None)


async def _give_up(task: asyncio.Future[Any], seconds: float) -> NoReturn:
    task.cancel()
    await asyncio.wait({task}, timeout=seconds)
    raise TimeoutError


async def _limited(work: Coroutine[Any, Any, None], seconds: float) -> None:
    """Wait for ``work`` at most this long, even if it ignores cancellation."""
    task = asyncio.ensure_future(work)
    try:
        if await _first(task, seconds=seconds) is None:
            await _give_up(task, seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    task.result()


async def _close_early(
    stream: StreamFn,
    request: StreamRequest,
    moment: type[StreamEvent],
    begin_within: float,
    within: float,
) -> list[str]:
    before = asyncio.all_tasks()

    async def begin() -> None:
        with suppress(StopAsyncIteration):  # the check of the whole stream reports this
            while not isinstance(await anext(answer), moment):
                pass

    async def close() -> None:
        await answer.aclose()  # type: ignore[attr-defined]

    try:
        answer: AsyncIterator[StreamEvent] = stream(request, CancellationToken())
        if not hasattr(answer, "aclose"):
            return ["its iterator has no aclose(): the connection cannot be closed"]
        await _limited(begin(), begin_within)
        await _limited(close(), within)
    except TimeoutError:
        return [f"it did not close within {within:g} seconds"]
    except Exception as error:
        return [f"it raised {type(error).__name__}: {error}"]
    left = [task for task in asyncio.all_tasks() - before if not task.done()]
    if left:
        _, pending = await asyncio.wait(left, timeout=within)
        left = list(pending)
    return [f"it left {len(left)} tasks behind: {left!r}"] if left else []
