"""The conformance kit lets good transports pass and finds each kind of fault in bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import (
    AssistantMessage,
    CancellationToken,
    ReasoningContent,
    StopReason,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
    TextContent,
    ToolCall,
    Usage,
    UserMessage,
)
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    MessageAssembler,
    ReasoningChunk,
    Start,
    StreamChunk,
    TextChunk,
    ToolCallChunk,
    Waiting,
)
from clark_agent.testing.misbehaviours import (
    MISBEHAVIOURS,
    Call,
    End,
    Fail,
    Finish,
    Misbehaviour,
    Reason,
    ReportUsage,
    Say,
    cut_anywhere_problems,
)
from clark_agent.testing.transport_kit import (
    NonconformingStream,
    StreamReport,
    check_events_of,
    check_stream_fn,
)
from clark_agent.transports import OpenAIChat, PlaybackStream, RecordingStream, RetryPolicy
from tests import strategies
from tests.engine.support import PLACEHOLDER, hurry, let_others_run
from tests.transports.servers.bytes_server import Answer, ByteServer

Events = Sequence[StreamEvent]

HELLO: list[StreamChunk] = [TextChunk("Hello "), TextChunk("there")]
CALLS: list[StreamChunk] = [
    TextChunk("Let me see."),
    ToolCallChunk(0, "a", "look", '{"at":'),
    ToolCallChunk(1, "b", "look", None),
    ToolCallChunk(0, None, None, " 1}"),
]
SAYS_HELLO = AssistantMessage.from_text("Hello there")


def folded(chunks: Iterable[StreamChunk], reason: StopReason | None = None) -> AssistantMessage:
    assembler = MessageAssembler(lambda: "made up")
    for chunk in chunks:
        assembler.feed(chunk)
    return assembler.message(reason)


def answer(chunks: Sequence[StreamChunk], message: AssistantMessage | None = None) -> Events:
    return [Start(PLACEHOLDER), *map(Chunk, chunks), Done(message or folded(chunks))]


def broken_off(chunks: Sequence[StreamChunk], partial: AssistantMessage | None = None) -> Events:
    return [
        *([Start(PLACEHOLDER)] if chunks else []),
        *map(Chunk, chunks),
        Error(partial or folded(chunks), StreamErrorKind.TRANSIENT, "it broke off"),
    ]


class Good:
    """A transport that plays events as it should, and can be told to do one thing wrong."""

    def __init__(self, events: Iterable[Any]) -> None:
        self.events = list(events)
        self.requests: list[StreamRequest] = []

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        chunks: list[StreamChunk] = []
        for event in self.events:
            if signal.cancelled:
                partial = folded(chunks, StopReason.ABORTED)
                yield Error(partial, StreamErrorKind.ABORTED, signal.reason or "cancelled")
                return
            if isinstance(event, Chunk):
                chunks.append(event.chunk)
            yield event
            await asyncio.sleep(0)


async def problems_of(stream: Any, **limits: Any) -> str:
    """What the kit finds, in one text."""
    with pytest.raises(NonconformingStream) as caught:
        await check_stream_fn(stream, **limits)
    error = caught.value
    assert list(error.problems)
    assert str(error).splitlines()[1:] == "\n".join(error.problems).splitlines()
    return "\n".join(error.problems)


# --- good ones ----------------------------------------------------------------------------------

GOOD: dict[str, Events] = {
    "text": answer(HELLO),
    "calls": answer(CALLS),
    "nothing but the message": [Done(SAYS_HELLO)],
    "a start and the message": [Start(PLACEHOLDER), Done(SAYS_HELLO)],
    "a failure": broken_off([]),
    "a failure in the middle": broken_off(HELLO),
    "cut off": answer(HELLO, replace(SAYS_HELLO, stop_reason=StopReason.MAX_TOKENS)),
    "calls, cut off": answer(CALLS, folded(CALLS, StopReason.MAX_TOKENS)),
    "a filter": answer(HELLO, replace(SAYS_HELLO, stop_reason=StopReason.OTHER)),
    "a call without an id": answer([ToolCallChunk(0, None, "look", "{}")]),
    "arguments that are no JSON": answer([ToolCallChunk(0, "a", "look", "{")]),
    "usage and a date": answer(HELLO, replace(SAYS_HELLO, usage=Usage(1, 2), timestamp=3)),
}


@pytest.mark.parametrize("name", GOOD)
async def test_a_good_transport_passes(name: str) -> None:
    stream = Good(GOOD[name])
    report = await check_stream_fn(stream)
    assert list(report.events) == list(GOOD[name])
    assert check_events_of(GOOD[name]) == []
    has_chunks = any(isinstance(event, Chunk) for event in GOOD[name])
    # To the end, cancelled before, then cancelled and closed at the start and at a chunk.
    assert len(stream.requests) == (6 if has_chunks else 4)


@given(st.lists(strategies.chunks(), max_size=8))
def test_whatever_chunks_fold_to_is_right(chunks: list[StreamChunk]) -> None:
    assert check_events_of(answer(chunks)) == []
    assert check_events_of([*answer(chunks)[:-1], *broken_off(chunks)[-1:]]) == []


async def test_a_report_says_what_was_answered() -> None:
    report = await check_stream_fn(Good(answer(HELLO)))
    assert report == StreamReport(tuple(answer(HELLO)))
    assert report.message == SAYS_HELLO
    assert report.error is None
    report = await check_stream_fn(Good(broken_off(HELLO)))
    assert report.message.plain_text == "Hello there"
    assert report.error is not None
    assert report.error.message == "it broke off"


async def test_a_request_of_ones_own_is_asked() -> None:
    request = StreamRequest(system_prompt="", messages=(UserMessage("mine"),))
    stream = Good(answer(HELLO))
    await check_stream_fn(stream, request)
    assert stream.requests == [request] * 6
    await check_stream_fn(stream)
    assert stream.requests[-1] is not request
    assert stream.requests[-1].messages[-1].plain_text


async def test_a_plain_generator_function_passes() -> None:
    async def parrot(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        if signal.cancelled:
            yield Error(PLACEHOLDER, StreamErrorKind.ABORTED, "cancelled")
            return
        text = request.messages[-1].plain_text
        yield Start(PLACEHOLDER)
        yield Chunk(TextChunk(text))
        yield Done(AssistantMessage.from_text(text))

    report = await check_stream_fn(parrot)
    assert report.message.plain_text


async def test_a_recording_and_its_replay_pass(tmp_path: Any) -> None:
    path = tmp_path / "answers.jsonl"
    report = await check_stream_fn(RecordingStream(Good(answer(CALLS)), path))
    assert (await check_stream_fn(PlaybackStream(path, strict=False))) == report


@pytest.mark.parametrize("name", ["nothing but the message", "a failure"])
async def test_a_replay_of_one_event_passes(tmp_path: Any, name: str) -> None:
    path = tmp_path / "answers.jsonl"
    await check_stream_fn(RecordingStream(Good(GOOD[name]), path))
    await check_stream_fn(PlaybackStream(path, strict=False))


@pytest.mark.slow
async def test_a_transport_to_a_server_passes_and_one_to_a_dead_port_too() -> None:
    body = (
        b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'
        b'data: {"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]}\n\n'
        b"data: [DONE]\n\n"
    )
    async with ByteServer(lambda request: Answer(body=body)) as server:
        url = server.url
        transport = OpenAIChat("m", base_url=url, retry=RetryPolicy(attempts=1))
        report = await check_stream_fn(transport)
        await transport.aclose()
    assert report.message.plain_text == "Hello"
    report = await check_stream_fn(transport)
    await transport.aclose()
    assert report.error is not None
    assert report.error.kind is StreamErrorKind.TRANSIENT


# --- bad ones: what they say --------------------------------------------------------------------

WHOLE = folded(CALLS)

BAD: dict[str, tuple[Events, str]] = {
    "no event": ([], "no terminal event"),
    "no terminal event": (answer(HELLO)[:-1], "no terminal event"),
    "two terminal events": ([*answer(HELLO), Done(SAYS_HELLO)], "2 terminal events"),
    "an error behind the message": ([*answer(HELLO), broken_off([])[-1]], "2 terminal events"),
    "a chunk behind the end": ([*answer(HELLO), Chunk(TextChunk("!"))], "after the terminal"),
    "a start behind the end": ([Done(SAYS_HELLO), Start(PLACEHOLDER)], "after the terminal"),
    "a chunk before the start": (
        [Chunk(HELLO[0]), Start(PLACEHOLDER), Chunk(HELLO[1]), Done(SAYS_HELLO)],
        "a chunk came before the start",
    ),
    "chunks without a start": (answer(HELLO)[1:], "a chunk came before the start"),
    "two starts": ([Start(PLACEHOLDER), *answer(HELLO)], "2 start events"),
    "a wait after the start": (
        [Start(PLACEHOLDER), Waiting(1, "late"), *answer(HELLO)[1:]],
        "Waiting came after the start",
    ),
    "chunks that fold to less": (answer(HELLO[:1], SAYS_HELLO), "the chunks fold to"),
    "chunks that fold to more": (answer([*HELLO, TextChunk("!")], SAYS_HELLO), "chunks fold to"),
    "chunks in another order": (answer(HELLO[::-1], SAYS_HELLO), "the chunks fold to"),
    "a call that no chunk told": (answer(CALLS[:1], WHOLE), "the chunks fold to"),
    "a call with another id": (
        answer(CALLS, replace(WHOLE, content=(*WHOLE.content[:2], ToolCall("c", "look", {})))),
        "the chunks fold to",
    ),
    "a call with other arguments": (
        answer(
            CALLS, replace(WHOLE, content=(*WHOLE.content[:2], ToolCall("b", "look", {"x": 1})))
        ),
        "the chunks fold to",
    ),
    "a call without an id, with another name": (
        answer(
            [ToolCallChunk(0, None, "look", "{}")],
            AssistantMessage.from_calls([ToolCall("a", "see", {})]),
        ),
        "the chunks fold to",
    ),
    "reasoning that the message lacks": (
        answer([ReasoningChunk("Hm."), *HELLO], SAYS_HELLO),
        "the chunks fold to",
    ),
    "a failure that loses what came": (broken_off(HELLO, PLACEHOLDER), "but Error carries ()"),
    "an error as a message": (
        answer(HELLO, replace(SAYS_HELLO, stop_reason=StopReason.ERROR)),
        "the stop reason error; report a failure with Error",
    ),
    "a cancelled call as a message": (
        answer(HELLO, replace(SAYS_HELLO, stop_reason=StopReason.ABORTED)),
        "the stop reason aborted; report a failure with Error",
    ),
    "tool_use without calls": (
        answer(HELLO, replace(SAYS_HELLO, stop_reason=StopReason.TOOL_USE)),
        "the stop reason is tool_use, but there is no tool call",
    ),
    "end_turn with calls": (
        answer(CALLS, replace(WHOLE, stop_reason=StopReason.END_TURN)),
        "the stop reason is end_turn, but there are tool calls",
    ),
    "a call without an id": (
        [Done(AssistantMessage.from_calls([ToolCall("", "look", {})]))],
        "a tool call without an id",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_fault_in_what_a_transport_says_is_found(name: str) -> None:
    events, problem = BAD[name]
    assert problem in "\n".join(check_events_of(events))
    assert problem in await problems_of(Good(events))


@pytest.mark.parametrize("event", ["text", None, {"type": "done"}, SAYS_HELLO, TextChunk("x")])
async def test_something_else_than_an_event_is_found(event: Any) -> None:
    found = await problems_of(Good([event, *answer(HELLO)]))
    assert f"{event!r} is not a stream event" in found
    assert "no terminal event" not in found


async def test_every_problem_is_told_at_once() -> None:
    found = await problems_of(Good([Chunk(TextChunk("x")), Start(PLACEHOLDER), Start(PLACEHOLDER)]))
    for problem in ("no terminal event", "2 start events", "before the start"):
        assert problem in found


# --- bad ones: what they do ---------------------------------------------------------------------


async def test_a_transport_that_raises_is_found() -> None:
    async def raising(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        raise OSError("no network")

    found = await problems_of(raising)
    assert "it raised OSError: no network; report failures with Error" in found
    assert "cancelled before the call: it raised OSError" in found


async def test_a_transport_that_raises_when_it_is_called_is_found() -> None:
    def raising(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        raise OSError("no network")

    found = await problems_of(raising)
    assert "it raised OSError: no network; report failures with Error" in found
    assert "closed in the middle: it raised OSError" in found


async def test_a_transport_that_ignores_a_signal_before_the_call_is_found() -> None:
    async def deaf(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        for event in answer(HELLO):
            yield event

    found = await problems_of(deaf)
    assert found == "cancelled before the call: it called the model anyway"


@pytest.mark.parametrize("early", [True, False])
async def test_a_transport_that_does_not_end_when_it_is_cancelled_is_found(early: bool) -> None:
    async def deaf(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        if signal.cancelled and not early:
            yield Error(PLACEHOLDER, StreamErrorKind.ABORTED, "cancelled")
            return
        for event in answer(HELLO):
            yield event
            if signal.cancelled:
                await asyncio.Event().wait()
        if early:
            await asyncio.Event().wait()

    found = await problems_of(deaf, cancel_within=0.02, answer_within=0.05)
    where = "before the call" if early else "in the middle"
    assert f"cancelled {where}: it did not end within 0.02 seconds" in found
    assert ("it did not end within 0.05 seconds" in found) is early


async def test_a_transport_that_ends_without_a_word_when_it_is_cancelled_is_found() -> None:
    async def mute(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        for event in answer(HELLO):
            if signal.cancelled:
                return
            yield event

    found = await problems_of(mute)
    assert "cancelled before the call: no terminal event" in found
    assert "cancelled in the middle: no terminal event" in found


async def test_a_transport_that_raises_when_it_is_cancelled_is_found() -> None:
    async def loud(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        for event in answer(HELLO):
            if signal.cancelled:
                raise RuntimeError("cancelled")
            yield event

    found = await problems_of(loud)
    assert "cancelled before the call: it raised RuntimeError: cancelled" in found
    assert "cancelled in the middle: it raised RuntimeError: cancelled" in found


async def test_a_transport_that_does_not_answer_is_given_up() -> None:
    async def silent(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        if not signal.cancelled:
            await signal.wait()
        yield Error(PLACEHOLDER, StreamErrorKind.ABORTED, "cancelled")

    found = await problems_of(silent, answer_within=0.02)
    assert "it did not end within 0.02 seconds" in found
    assert "cancelled" not in found


def closing(clean_up: Callable[[], Any]) -> StreamFn:
    """A good transport that does something when it is closed."""

    async def stream(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        try:
            async for event in Good(answer(HELLO))(request, signal):
                yield event
        except GeneratorExit:
            await clean_up()
            raise

    return stream


async def test_a_transport_that_never_closes_is_found() -> None:
    found = await problems_of(closing(lambda: asyncio.Event().wait()), cancel_within=0.05)
    assert found == "closed in the middle: it did not close within 0.05 seconds"


async def test_a_transport_that_raises_when_it_is_closed_is_found() -> None:
    async def fail() -> None:
        raise RuntimeError("cannot close")

    found = await problems_of(closing(fail))
    assert found == "closed in the middle: it raised RuntimeError: cannot close"


async def test_a_transport_that_goes_on_when_it_is_closed_is_found() -> None:
    async def stubborn(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        try:
            async for event in Good(answer(HELLO))(request, signal):
                yield event
        finally:
            yield Error(PLACEHOLDER, StreamErrorKind.ABORTED, "one more thing")

    found = await problems_of(stubborn)
    assert "closed in the middle: it raised RuntimeError" in found


async def test_a_transport_that_leaves_a_task_is_found() -> None:
    left: list[asyncio.Task[Any]] = []

    async def leave() -> None:
        left.append(asyncio.create_task(asyncio.Event().wait(), name="the one left"))

    found = await problems_of(closing(leave))
    assert "closed in the middle: it left 1 tasks behind" in found
    assert "the one left" in found
    for task in left:
        task.cancel()


class Iterator:
    """An iterator that cannot be closed."""

    def __init__(self, events: Iterable[StreamEvent]) -> None:
        self._events = iter(events)

    def __aiter__(self) -> Iterator:
        return self

    async def __anext__(self) -> StreamEvent:
        for event in self._events:
            return event
        raise StopAsyncIteration


async def test_an_iterator_that_cannot_be_closed_is_found() -> None:
    def stream(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        return Iterator(broken_off([]) if signal.cancelled else answer(HELLO))

    found = await problems_of(stream)
    assert found == (
        "closed in the middle: its iterator has no aclose(): the connection cannot be closed"
    )


async def test_an_empty_stream_is_not_said_to_raise() -> None:
    found = await problems_of(Good([]))
    assert "StopAsyncIteration" not in found


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_a_coroutine_function_is_found() -> None:
    async def no_generator(request: StreamRequest, signal: CancellationToken) -> Any:
        return answer(HELLO)

    found = await problems_of(no_generator)
    assert "'async for' requires an object with __aiter__ method, got coroutine" in found


async def test_a_transport_that_takes_no_cancellation_for_an_answer_does_not_hold_the_kit() -> None:
    """The kit is bounded in time whatever a transport does."""
    let_go = asyncio.Event()

    async def stubborn(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        yield Done(SAYS_HELLO)

    checking = asyncio.create_task(problems_of(stubborn, cancel_within=0.02, answer_within=0.02))
    held = not (await asyncio.wait({checking}, timeout=0.5))[0]
    let_go.set()
    [found] = await asyncio.gather(checking, return_exceptions=True)
    await let_others_run()  # what was left behind ends too
    assert not held, "it waits for what does not end"
    assert isinstance(found, str)
    assert "it did not end within 0.02 seconds" in found


async def test_a_transport_that_loses_what_came_when_it_is_cancelled_is_found() -> None:
    async def forgetful(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        for event in answer(HELLO):
            if signal.cancelled and isinstance(event, Start | Done):
                yield Error(PLACEHOLDER, StreamErrorKind.ABORTED, "cancelled")
                return
            yield event

    found = await problems_of(forgetful)
    assert "cancelled in the middle: the chunks fold to" in found


async def test_by_default_a_minute_is_given_and_two_seconds_to_stop() -> None:
    async def deaf(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        hurry(70)
        await asyncio.Event().wait()

    found = await problems_of(deaf)
    assert "it did not end within 60 seconds" in found
    assert "cancelled in the middle: it did not end within 2 seconds" in found


# --- the answers of servers that misbehave ------------------------------------------------------

BY_NAME = {case.name: case for case in MISBEHAVIOURS}


def ideal(case: Misbehaviour) -> Events:
    """What a perfect transport makes of it."""
    if case.error is not None:
        said = [TextChunk(step.text) for step in case.steps if isinstance(step, Say)]
        partial = folded(said, StopReason.ERROR)
        return [*answer(said)[:-1], Error(partial, case.error, "because")]
    content = case.content if case.content is not None else (TextContent("x"),)
    blocks = tuple(replace(b, id=b.id or "new") if isinstance(b, ToolCall) else b for b in content)
    has_calls = any(isinstance(block, ToolCall) for block in blocks)
    reason = StopReason.TOOL_USE if has_calls else StopReason.END_TURN
    message = AssistantMessage(blocks, case.stop_reason or reason, usage=case.usage)
    return [Start(PLACEHOLDER), Done(message)]


def test_the_set_is_told_apart_by_name_and_covers_every_step() -> None:
    assert len(BY_NAME) == len(MISBEHAVIOURS)
    used = {type(step) for case in MISBEHAVIOURS for step in case.steps}
    assert used >= {Say, Reason, Call, Finish, ReportUsage, Fail, End}


@pytest.mark.parametrize("name", BY_NAME)
def test_each_case_is_content_with_what_it_wants(name: str) -> None:
    assert BY_NAME[name].problems(ideal(BY_NAME[name])) == []


@pytest.mark.parametrize("name", BY_NAME)
def test_each_case_finds_what_is_not_as_it_wants_it(name: str) -> None:
    case = BY_NAME[name]
    *before, last = ideal(case)
    assert "no terminal event" in "\n".join(case.problems(before))
    if isinstance(last, Error):
        kind = next(kind for kind in StreamErrorKind if kind is not case.error)
        assert f"it failed as {kind}, not as" in "\n".join(
            case.problems([*before, replace(last, kind=kind)])
        )
        assert "it must fail as" in "\n".join(case.problems(answer(HELLO)))
        return
    assert isinstance(last, Done)
    message = last.message
    assert "it failed (transient: it broke off)" in case.problems(broken_off([]))
    if case.content is not None:
        more = replace(message, content=(TextContent("!"), *message.content))
        assert "the content is" in "\n".join(case.problems([Done(more)]))
        less = replace(message, content=message.content[1:])
        assert "the content is" in "\n".join(case.problems([Done(less)]))
    if case.stop_reason is not None:
        other = replace(message, stop_reason=StopReason.OTHER)
        assert "the stop reason is other, not" in "\n".join(case.problems([Done(other)]))
    if case.usage is not None:
        for usage in (None, Usage(1, 1)):
            wrong = replace(message, usage=usage)
            assert "the usage is" in "\n".join(case.problems([Done(wrong)]))


def test_reasoning_is_not_compared_and_the_rules_of_the_kit_are() -> None:
    case = BY_NAME["well behaved"]
    [start, done] = ideal(case)
    assert isinstance(done, Done)
    thought = (ReasoningContent("Hm."), *done.message.content)
    assert case.problems([start, Done(replace(done.message, content=thought))]) == []
    assert "2 start events; one is enough" in case.problems([start, start, done])


def test_a_call_that_got_a_new_id_must_have_one_and_keep_the_rest() -> None:
    case = BY_NAME["a call without an id"]
    right = AssistantMessage.from_calls([ToolCall("whatever", "look", {})])
    assert case.problems([Done(right)]) == []
    for wrong in (
        ToolCall("", "look", {}),
        ToolCall("a", "see", {}),
        ToolCall("a", "look", {"x": 1}),
    ):
        assert case.problems([Done(AssistantMessage.from_calls([wrong]))])
    named = BY_NAME["a call without arguments"]
    assert named.problems([Done(AssistantMessage.from_calls([ToolCall("b", "look", {})]))])


# --- a connection that breaks -------------------------------------------------------------------


@given(st.integers(0, 4), st.sampled_from(StreamErrorKind))
def test_a_beginning_that_is_told_as_a_failure_is_right(count: int, kind: StreamErrorKind) -> None:
    events = broken_off(CALLS[:count])
    assert isinstance(events[-1], Error)
    events = [*events[:-1], replace(events[-1], kind=kind)]
    assert cut_anywhere_problems(events, WHOLE) == []


def test_the_whole_is_right() -> None:
    assert cut_anywhere_problems(answer(CALLS), WHOLE) == []
    assert cut_anywhere_problems(answer(HELLO), SAYS_HELLO) == []


@pytest.mark.parametrize(
    ("events", "whole", "problem"),
    [
        (answer(HELLO[:1]), SAYS_HELLO, "a partial message was reported as complete"),
        (answer(CALLS[:1]), WHOLE, "a partial message was reported as complete"),
        (answer(CALLS[:3]), WHOLE, "a partial message was reported as complete"),
        (broken_off(HELLO[1:]), SAYS_HELLO, "the partial message is not a prefix of the whole"),
        (broken_off([*HELLO, TextChunk("!")]), SAYS_HELLO, "not a prefix of the whole"),
        (answer(HELLO)[:-1], SAYS_HELLO, "no terminal event"),
        (broken_off(HELLO, PLACEHOLDER), SAYS_HELLO, "the chunks fold to"),
        ([], SAYS_HELLO, "no terminal event"),
    ],
)
def test_a_cut_that_goes_unnoticed_or_loses_what_came_is_found(
    events: Events, whole: AssistantMessage, problem: str
) -> None:
    assert problem in "\n".join(cut_anywhere_problems(events, whole))


async def test_a_transport_that_looks_at_its_signal_only_once_is_found() -> None:
    async def stream(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        events = answer(HELLO)
        yield events[0]
        was_cancelled = signal.cancelled
        if was_cancelled:
            yield Error(PLACEHOLDER, StreamErrorKind.ABORTED, "cancelled")
            return
        yield events[1]
        while signal.cancelled:  # it waits for the model, and hears nothing else
            await asyncio.Event().wait()
        for event in events[2:]:
            yield event

    found = await problems_of(stream, cancel_within=0.05)
    assert "cancelled in the middle: it did not end within 0.05 seconds" in found


async def test_a_transport_that_raises_its_cancellation_is_found() -> None:
    async def stream(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        for event in answer(HELLO):
            if signal.cancelled:
                raise asyncio.CancelledError
            yield event

    assert "in the middle: it raised CancelledError" in await problems_of(stream)
