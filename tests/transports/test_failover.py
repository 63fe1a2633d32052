"""The first transport that can answer does, and the run is told if it was not the first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AssistantMessage,
    CancellationToken,
    ConfigError,
    LoopConfig,
    RunAborted,
    StopReason,
    StreamError,
    StreamRequest,
    UserMessage,
    run,
    tool,
)
from clark_agent.events import AgentEvent, MessageStart
from clark_agent.messages import encode_json
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    OutputModeName,
    Start,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    TextChunk,
)
from clark_agent.testing import RecordingSink, ScriptedStream, call, check_events
from clark_agent.testing.transport_kit import check_stream_fn
from clark_agent.transports import FirstOf, RetryPolicy, Transport
from tests.transports import wires_anthropic, wires_chat, wires_gemini, wires_responses
from tests.transports.servers.bytes_server import Answer, ByteServer
from tests.transports.wires_chat import ask, asking

NOTHING = AssistantMessage((), StopReason.OTHER)
OUTAGES = [StreamErrorKind.TRANSIENT, StreamErrorKind.PROVIDER_RATE_LIMITED]
OTHERS = [kind for kind in StreamErrorKind if kind not in OUTAGES]
CANARY = "sk-canary-71aa3c09"


class Cause(Exception):
    """What is behind a failure."""


def failing(
    kind: StreamErrorKind, text: str = "out of order", cause: Exception | None = None
) -> ScriptedStream:
    """A transport that cannot answer, ever."""
    return ScriptedStream([[Error(NOTHING, kind, text, cause)]], at_end="repeat")


def saying(text: str = "Hello there") -> ScriptedStream:
    return ScriptedStream([text], at_end="repeat")


class Named:
    """A transport with a name of its own."""

    def __init__(self, name: str, inner: StreamFn) -> None:
        self.__name__ = name
        self.inner = inner

    def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        return self.inner(request, signal)


def names_of(events: list[StreamEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


# --- who answers ------------------------------------------------------------------------------


async def test_the_first_answers_and_nothing_is_said_about_it() -> None:
    second = saying("no")
    events = await ask(FirstOf([saying(), second]))
    assert events == [
        Start(NOTHING),
        Chunk(TextChunk("Hello ")),
        Chunk(TextChunk("there")),
        Done(AssistantMessage.from_text("Hello there")),
    ]
    assert not second.requests


@pytest.mark.parametrize("kind", OUTAGES)
async def test_an_outage_leads_to_the_next(kind: StreamErrorKind) -> None:
    first, second = failing(kind), saying()
    events = await ask(FirstOf([Named("one", first), Named("two", second)]))
    assert events[0] == Start(
        NOTHING,
        {
            "answered_by": "two",
            "failed": [{"transport": "one", "kind": str(kind), "message": "out of order"}],
        },
    )
    assert events[1:] == (await ask(saying()))[1:]
    assert len(first.requests) == len(second.requests) == 1


async def test_all_get_the_same_request_and_signal() -> None:
    seen: list[tuple[StreamRequest, CancellationToken]] = []

    async def down(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        seen.append((request, signal))
        yield Error(NOTHING, StreamErrorKind.TRANSIENT, "down")

    request, signal = asking(UserMessage("Hi"), temperature=0.5), CancellationToken()
    await ask(FirstOf([down, down, down]), request, signal)
    assert len(seen) == 3
    assert all(one is request and other is signal for one, other in seen)


@pytest.mark.parametrize("kind", OTHERS)
async def test_any_other_failure_is_told_as_it_is(kind: StreamErrorKind) -> None:
    cause, second = Cause(), saying()
    error = Error(AssistantMessage.from_text("half"), kind, "no", cause)
    [told] = await ask(FirstOf([ScriptedStream([[error]]), second]))
    assert told is error
    assert not second.requests


@pytest.mark.parametrize("kind", OTHERS)
async def test_any_other_failure_of_a_later_one_names_those_before(kind: StreamErrorKind) -> None:
    cause, third = Cause(), saying()
    second = failing(kind, "refused", cause)
    first = Named("one", failing(StreamErrorKind.TRANSIENT, "down"))
    [told] = await ask(FirstOf([first, second, third]))
    assert isinstance(told, Error)
    assert (told.kind, told.cause) == (kind, cause)
    assert told.message.startswith("refused")
    assert "one: down" in told.message
    assert not third.requests


@pytest.mark.parametrize("kind", StreamErrorKind)
async def test_once_something_was_shown_there_is_no_other(kind: StreamErrorKind) -> None:
    events: list[StreamEvent] = [
        Start(NOTHING),
        Chunk(TextChunk("Hel")),
        Error(AssistantMessage.from_text("Hel"), kind, "gone"),
    ]
    second = saying()
    assert await ask(FirstOf([ScriptedStream([events]), second])) == events
    assert not second.requests


async def test_a_start_alone_shows_nothing() -> None:
    begun: list[StreamEvent] = [
        Start(NOTHING),
        Error(NOTHING, StreamErrorKind.TRANSIENT, "gone"),
    ]
    events = await ask(FirstOf([ScriptedStream([begun]), saying()]))
    assert names_of(events) == ["Start", "Chunk", "Chunk", "Done"]
    assert isinstance(events[0], Start)
    assert events[0].details["failed"][0]["message"] == "gone"


async def test_an_answer_without_chunks_has_a_start_too() -> None:
    done = Done(AssistantMessage.from_text("Hi"))
    answers: list[list[StreamEvent]] = [[done], [Start(NOTHING), done]]
    for silent in answers:
        stream = FirstOf([failing(StreamErrorKind.TRANSIENT), ScriptedStream([silent])])
        assert names_of(await ask(stream)) == ["Start", "Done"]


async def test_a_stream_that_ends_without_a_word_is_told_as_it_is() -> None:
    second = saying()
    assert await ask(FirstOf([ScriptedStream([[]]), second])) == []
    assert not second.requests


async def test_all_fail() -> None:
    cause = Cause()
    kind = StreamErrorKind.PROVIDER_RATE_LIMITED
    stream = FirstOf(
        [
            Named("one", failing(StreamErrorKind.TRANSIENT, "no line")),
            Named("two", failing(StreamErrorKind.PROVIDER_RATE_LIMITED, "too many")),
            Named("three", failing(kind, "later, please", cause)),
        ]
    )
    [told] = await ask(stream)
    assert isinstance(told, Error)
    assert (told.kind, told.cause) == (kind, cause)
    assert told.message.startswith("later, please")
    assert "one: no line" in told.message
    assert "two: too many" in told.message
    assert told.message.index("one:") < told.message.index("two:")


async def test_the_partial_of_the_last_is_kept() -> None:
    usage = replace(NOTHING, stop_reason=StopReason.ERROR, error_message="x")
    last = ScriptedStream([[Error(usage, StreamErrorKind.TRANSIENT, "x")]])
    [told] = await ask(FirstOf([failing(StreamErrorKind.TRANSIENT), last]))
    assert isinstance(told, Error)
    assert told.partial is usage


async def test_each_call_begins_with_the_first_again() -> None:
    first = ScriptedStream([[Error(NOTHING, StreamErrorKind.TRANSIENT, "once")], "I am back"])
    stream = FirstOf([first, saying("Hello")])
    assert (await ask(stream))[-1] == Done(AssistantMessage.from_text("Hello"))
    again = await ask(stream)
    assert again[0] == Start(NOTHING)
    assert again[-1] == Done(AssistantMessage.from_text("I am back"))


# --- in a run ---------------------------------------------------------------------------------


@tool
def look() -> str:
    """Look around."""
    return "a lamp"


async def test_the_details_reach_the_events_of_a_run() -> None:
    down: Any = [Error(NOTHING, StreamErrorKind.TRANSIENT, "no line")]
    first = ScriptedStream([down, "A lamp."])
    second = ScriptedStream([call("look")])
    sink = RecordingSink()
    stream = FirstOf([Named("one", first), Named("two", second)])
    config = LoopConfig(stream=stream, tools=[look], event_sink=sink)
    result = await run("What is here?", AgentContext(), config)
    assert result.text == "A lamp."
    check_events(sink.events)
    starts = [e for e in sink.of(MessageStart) if isinstance(e.message, AssistantMessage)]
    details = {
        "answered_by": "two",
        "failed": [{"transport": "one", "kind": "transient", "message": "no line"}],
    }
    assert [start.details for start in starts] == [details, None]
    written = [msgspec.json.decode(encode_json(start)) for start in starts]
    assert written[0]["details"] == details
    assert "details" not in written[1]
    read = msgspec.json.decode(encode_json(starts[0]), type=AgentEvent)
    assert isinstance(read, MessageStart)
    assert read.details == details


async def test_a_run_that_ends_because_all_failed() -> None:
    cause = Cause()
    last = failing(StreamErrorKind.PROVIDER_RATE_LIMITED, "too many", cause)
    stream = FirstOf([Named("one", failing(StreamErrorKind.TRANSIENT, "no line")), last])
    with pytest.raises(StreamError) as failed:
        await run("Hi", AgentContext(), LoopConfig(stream=stream))
    assert failed.value.kind is StreamErrorKind.PROVIDER_RATE_LIMITED
    assert failed.value.__cause__ is cause
    assert "one: no line" in str(failed.value)


# --- cancelling, closing, raising -------------------------------------------------------------


class Slow:
    """Answers only when it is cancelled, and knows whether it was closed."""

    def __init__(self, *before: StreamEvent) -> None:
        self.before = before
        self.is_closed = False
        self.waits = asyncio.Event()

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        try:
            for event in self.before:
                yield event
            self.waits.set()
            await signal.wait()
            yield Error(NOTHING, StreamErrorKind.ABORTED, signal.reason or "")
        finally:
            await asyncio.sleep(0)
            self.is_closed = True


async def test_a_run_that_is_cancelled_while_the_first_thinks() -> None:
    first, second, signal = Slow(), saying(), CancellationToken()
    config = LoopConfig(stream=FirstOf([first, second]))
    running = asyncio.create_task(run("Hi", AgentContext(), config, signal))
    await first.waits.wait()
    signal.cancel("enough")
    with pytest.raises(RunAborted):
        await running
    assert first.is_closed
    assert not second.requests


async def test_the_failure_of_one_that_is_cancelled_leads_nowhere() -> None:
    second, signal = saying(), CancellationToken()

    async def first(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        signal.cancel("enough")
        yield Error(NOTHING, StreamErrorKind.TRANSIENT, "the connection was closed")

    [told] = await ask(FirstOf([first, second]), None, signal)
    assert isinstance(told, Error)
    assert not second.requests


@pytest.mark.slow
async def test_cancelled_before_the_call() -> None:
    signal = CancellationToken()
    signal.cancel("before")
    async with wires_chat.serving([]) as (server, chat):
        second = saying()
        [told] = await ask(FirstOf([chat, second]), None, signal)
        assert not server.requests
    assert isinstance(told, Error)
    assert told.kind is StreamErrorKind.ABORTED
    assert not second.requests


@pytest.mark.parametrize("before", [0, 1], ids=["the first", "the second"])
async def test_closing_closes_the_inner_stream(before: int) -> None:
    slow = Slow(Start(NOTHING), Chunk(TextChunk("Hel")))
    stream = FirstOf([*[failing(StreamErrorKind.TRANSIENT)] * before, slow])
    answer: Any = stream(asking(), CancellationToken())
    assert isinstance(await anext(answer), Start)
    assert isinstance(await anext(answer), Chunk)
    await answer.aclose()
    assert slow.is_closed


async def test_the_stream_that_failed_is_closed_before_the_next_is_asked() -> None:
    class Failing(Slow):
        async def __call__(
            self, request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            try:
                yield Error(NOTHING, StreamErrorKind.TRANSIENT, "down")
                raise AssertionError("nobody reads on behind the end")
            finally:
                self.is_closed = True

    first = Failing()

    async def second(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        assert first.is_closed
        yield Done(AssistantMessage.from_text("Hi"))

    assert names_of(await ask(FirstOf([first, second]))) == ["Start", "Done"]


async def test_cancelling_the_task_closes_the_inner_stream() -> None:
    slow, second = Slow(), saying()
    asked = asyncio.create_task(ask(FirstOf([slow, second])))
    await slow.waits.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert slow.is_closed
    assert not second.requests


async def test_an_iterator_that_cannot_be_closed_is_left_alone() -> None:
    class Bare:
        def __init__(self) -> None:
            self.events = iter([Error(NOTHING, StreamErrorKind.TRANSIENT, "down")])

        def __aiter__(self) -> Bare:
            return self

        async def __anext__(self) -> StreamEvent:
            for event in self.events:
                return event
            raise StopAsyncIteration

    events = await ask(FirstOf([lambda _, __: Bare(), saying()]))
    assert names_of(events) == ["Start", "Chunk", "Chunk", "Done"]


@pytest.mark.parametrize("before", [0, 1], ids=["the first", "the second"])
async def test_a_transport_that_raises_is_a_fatal_failure_of_the_run(before: int) -> None:
    error, last = ValueError("a bug"), saying()
    broken = ScriptedStream([error])
    stream = FirstOf([*[failing(StreamErrorKind.TRANSIENT)] * before, broken, last])
    with pytest.raises(StreamError) as failed:
        await run("Hi", AgentContext(), LoopConfig(stream=stream))
    assert failed.value.kind is StreamErrorKind.FATAL
    assert failed.value.__cause__ is error
    assert not last.requests


async def test_a_transport_that_raises_when_it_is_called() -> None:
    def broken(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        raise ValueError("a bug")

    with pytest.raises(StreamError) as failed:
        await run("Hi", AgentContext(), LoopConfig(stream=FirstOf([broken, saying()])))
    assert isinstance(failed.value.__cause__, ValueError)


# --- one in another ---------------------------------------------------------------------------


async def test_inside_another_all_are_asked_in_order() -> None:
    inner = FirstOf(
        [
            Named("a", failing(StreamErrorKind.TRANSIENT, "a is down")),
            Named("b", failing(StreamErrorKind.TRANSIENT, "b is down")),
        ]
    )
    events = await ask(FirstOf([inner, Named("c", saying())]))
    assert names_of(events) == ["Start", "Chunk", "Chunk", "Done"]
    assert isinstance(events[0], Start)
    assert events[0].details["answered_by"] == "c"
    [failed] = events[0].details["failed"]
    assert failed["transport"] == "FirstOf([a, b])"
    assert "a is down" in failed["message"]
    assert "b is down" in failed["message"]


async def test_what_an_inner_one_says_of_its_answer_is_passed_on() -> None:
    inner = FirstOf([Named("a", failing(StreamErrorKind.TRANSIENT)), Named("b", saying())])
    told = (await ask(inner))[0]
    assert isinstance(told, Start)
    assert told.details["answered_by"] == "b"
    assert (await ask(FirstOf([inner, saying("no")])))[0] == told


async def test_a_transports_own_start_is_passed_on() -> None:
    """A gateway has details of its own to tell, and a partial need not be empty."""
    begun = Start(AssistantMessage.from_text("…"), {"region": "eu"})
    answer: list[StreamEvent] = [begun, Done(AssistantMessage.from_text("Hi"))]
    events = await ask(FirstOf([ScriptedStream([answer]), saying("no")]))
    assert events == answer


async def test_an_inner_one_that_answers_for_another() -> None:
    inner = FirstOf([Named("b", failing(StreamErrorKind.TRANSIENT)), Named("c", saying())])
    [start, *_] = await ask(FirstOf([Named("a", failing(StreamErrorKind.TRANSIENT)), inner]))
    assert isinstance(start, Start)
    assert [failed["transport"] for failed in start.details["failed"]] == ["a", "b"]
    assert start.details["answered_by"] == "c"


# --- making one -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [[], [None], ["openai:gpt-5"], [saying(), 3]])
def test_what_is_no_row_of_transports(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        FirstOf(wrong)


def test_its_transports_can_be_any_iterable() -> None:
    one, two = saying(), saying()
    assert FirstOf(iter([one, two])).transports == (one, two)


def test_it_shows_what_it_is_made_of() -> None:
    async def mine(request: StreamRequest, signal: CancellationToken) -> Any:
        yield None

    assert repr(FirstOf([mine, Named("two", saying())])) == "FirstOf([mine, two])"


class WithKey(Struct):
    """A transport of a host's own, whose repr shows all of its fields."""

    api_key: str

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Error(NOTHING, StreamErrorKind.TRANSIENT, "down")


def _by_key(
    request: StreamRequest, signal: CancellationToken, *, api_key: str
) -> AsyncIterator[StreamEvent]:
    return failing(StreamErrorKind.TRANSIENT)(request, signal)


@pytest.mark.parametrize(
    "transport",
    [WithKey(CANARY), partial(_by_key, api_key=CANARY)],
    ids=["a struct", "a partial"],
)
async def test_the_name_of_a_hosts_own_transport_has_no_key_in_it(transport: StreamFn) -> None:
    events = await ask(FirstOf([transport, saying()]))
    assert CANARY not in repr(events[0])
    [told] = await ask(FirstOf([transport, failing(StreamErrorKind.TRANSIENT)]))
    assert CANARY not in repr(told)
    assert CANARY not in repr(FirstOf([transport]))
    assert " at 0x" not in repr(FirstOf([transport, failing(StreamErrorKind.TRANSIENT)]))


# --- by the kit, and against servers ----------------------------------------------------------


@pytest.mark.parametrize(
    "transports",
    [
        [saying()],
        [failing(StreamErrorKind.TRANSIENT), saying()],
        [failing(StreamErrorKind.FATAL), saying()],
        [failing(StreamErrorKind.TRANSIENT), failing(StreamErrorKind.TRANSIENT)],
        [FirstOf([failing(StreamErrorKind.TRANSIENT), saying()]), saying()],
    ],
)
async def test_it_conforms(transports: list[StreamFn]) -> None:
    async def heeding(
        inner: StreamFn, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        if signal.cancelled:
            yield Error(NOTHING, StreamErrorKind.ABORTED, "cancelled")
            return
        async for event in inner(request, signal):
            yield event

    await check_stream_fn(FirstOf([partial(heeding, inner) for inner in transports]))


_Make = Callable[..., Transport[Any]]
ONCE = RetryPolicy(attempts=1)


class Wire(Struct, frozen=True):
    """A provider: its transport, an answer of it, and how it says that there is too much to do."""

    make: _Make
    answer: Answer
    limit: Answer


def _limit(message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": "rate_limit_error"}})


_TOO_MUCH = f"too many requests for {CANARY}"
_JSON = {"content-type": "application/json"}
_LIMIT = Answer(status=429, headers=_JSON, body=_limit(_TOO_MUCH))
_HELLO = [wires_responses.message("Hello", "msg_1")]

WIRES = {
    "chat": Wire(wires_chat.transport, wires_chat.stream(*wires_chat.said()), _LIMIT),
    "responses": Wire(
        wires_responses.transport,
        wires_responses.stream(
            wires_responses.done(_HELLO[0], 0), wires_responses.completed(*_HELLO)
        ),
        _LIMIT,
    ),
    "anthropic": Wire(
        wires_anthropic.transport,
        wires_anthropic.stream(*wires_anthropic.said()),
        wires_anthropic.refused(429, _TOO_MUCH, "rate_limit_error"),
    ),
    "gemini": Wire(
        wires_gemini.transport,
        wires_gemini.stream(*wires_gemini.said()),
        wires_gemini.refusal(429, _TOO_MUCH, "RESOURCE_EXHAUSTED"),
    ),
}


@asynccontextmanager
async def pair(
    first: Wire, second: Wire, *, script: list[Answer] | None = None
) -> AsyncGenerator[tuple[FirstOf, ByteServer, ByteServer]]:
    """Two servers, the first of which has no time, and a transport to both."""
    answers = [first.limit] if script is None else script
    async with ByteServer(answers) as busy, ByteServer(lambda _: second.answer) as free:
        made = [
            wire.make(server.url, api_key=CANARY, retry=ONCE)
            for wire, server in ((first, busy), (second, free))
        ]
        try:
            yield FirstOf(made), busy, free
        finally:
            for transport in made:
                await transport.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("first", WIRES)
@pytest.mark.parametrize("second", WIRES)
async def test_a_server_without_time_and_another_with(
    first: str, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "clark_agent")
    sink = RecordingSink()
    async with pair(WIRES[first], WIRES[second]) as (stream, busy, free):
        config = LoopConfig(stream=stream, event_sink=sink)
        result = await run("Hi", AgentContext(), config)
        assert len(busy.requests) == len(free.requests) == 1
        assert result.text == "Hello"
        names = [f"{transport!r} at 127.0.0.1" for transport in stream.transports]
    [start] = [event for event in sink.of(MessageStart) if event.details]
    assert start.details["answered_by"] == names[1]
    [failed] = start.details["failed"]
    assert failed["transport"] == names[0]
    assert failed["kind"] == "provider_rate_limited"
    assert "too many requests" in failed["message"]
    told = [encode_json(event).decode() for event in sink.events]
    assert CANARY not in "".join([*told, repr(stream), caplog.text])


@pytest.mark.slow
async def test_all_servers_are_busy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "clark_agent")
    chat = WIRES["chat"]
    busy = replace(chat, answer=chat.limit)
    async with pair(chat, busy) as (stream, *_):
        with pytest.raises(StreamError) as failed:
            await run("Hi", AgentContext(), LoopConfig(stream=stream))
    assert failed.value.kind is StreamErrorKind.PROVIDER_RATE_LIMITED
    assert str(failed.value).count("too many requests") == 2
    assert CANARY not in str(failed.value) + repr(failed.value.__cause__) + caplog.text


@pytest.mark.slow
async def test_no_server_at_all_and_one_that_is_there() -> None:
    dead = wires_chat.transport("http://127.0.0.1:9", retry=ONCE)
    async with wires_chat.serving([wires_chat.stream(*wires_chat.said())]) as (_, chat):
        events = await ask(FirstOf([dead, chat]))
    await dead.aclose()
    assert isinstance(events[0], Start)
    assert events[0].details["failed"][0]["kind"] == "transient"
    assert isinstance(events[-1], Done)


@pytest.mark.slow
async def test_a_connection_that_breaks_in_the_middle_is_the_end() -> None:
    cut = wires_chat.stream(wires_chat.chunk(content="Hel"), cut_after=10_000, reset=True)
    async with pair(WIRES["chat"], WIRES["chat"], script=[cut]) as (stream, _, free):
        events = await ask(stream)
        assert not free.requests
    assert names_of(events) == ["Start", "Chunk", "Error"]


@pytest.mark.slow
async def test_two_servers_conform() -> None:
    chat = WIRES["chat"]
    async with (
        ByteServer(lambda _: chat.limit) as busy,
        ByteServer(lambda _: chat.answer) as free,
    ):
        made = [chat.make(server.url, retry=ONCE) for server in (busy, free)]
        report = await check_stream_fn(FirstOf(made))
        for transport in made:
            await transport.aclose()
    assert report.error is None


# --- a structured output ------------------------------------------------------------------------


class Preferring:
    """A transport that names its best mode."""

    def __init__(self, alone: OutputModeName, with_tools: OutputModeName) -> None:
        self.modes = {False: alone, True: with_tools}

    def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
        return self.modes[has_tools]

    def __call__(self, request: StreamRequest, signal: CancellationToken) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("transports", "alone", "with_tools"),
    [
        ([Preferring("native", "native")], "native", "native"),
        ([Preferring("native", "native"), Preferring("native", "tool")], "native", "tool"),
        ([Preferring("native", "native"), saying()], "tool", "tool"),
        ([Preferring("tool", "prompted"), Preferring("native", "tool")], "tool", "prompted"),
    ],
)
def test_the_mode_of_the_output_is_one_for_all(
    transports: list[Any], alone: str, with_tools: str
) -> None:
    assert FirstOf(transports).best_output_mode(has_tools=False) == alone
    assert FirstOf(transports).best_output_mode(has_tools=True) == with_tools
