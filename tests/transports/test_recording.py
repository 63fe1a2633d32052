"""A recording plays back what was recorded, and nothing that was not."""

# ruff: noqa: ASYNC240 — the files are small, and nobody waits
from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentEvent,
    AgentTool,
    AssistantMessage,
    CancellationToken,
    ConfigError,
    CustomMessage,
    ImageContent,
    LoopConfig,
    ReasoningContent,
    ReasoningDetailsContent,
    ReasoningEffort,
    RunAborted,
    RunResult,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
    SystemMessage,
    TextContent,
    ToolCall,
    ToolResultMessage,
    ToolSchema,
    TransportError,
    Usage,
    UserMessage,
    agent_tool,
    run,
    tool,
)
from clark_agent import events as ev
from clark_agent.errors import DecodeError, StreamTimeout
from clark_agent.output import Output
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    MessageAssembler,
    OutputModeName,
    OutputSchema,
    ReasoningChunk,
    ReasoningDetailsChunk,
    Start,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
)
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream, Step, call, say
from clark_agent.transports import (
    OpenAIChat,
    PlaybackMismatch,
    PlaybackStream,
    RecordingStream,
    RetryPolicy,
    Timeouts,
)
from clark_agent.types import Annotation
from tests import strategies
from tests.engine.support import (
    PLACEHOLDER,
    Waiting,
    Work,
    failed,
    failing,
    hurry,
    let_others_run,
)
from tests.transports.servers.bytes_server import Answer, ByteServer, Request

CANARY = "sk-canary-0123456789"

ASKED = StreamRequest(
    system_prompt="Be brief.",
    messages=(
        UserMessage("Weather in Oslo?", 1),
        AssistantMessage.from_calls(
            [ToolCall("call_1", "weather", {"city": "Oslo"})], "Let me see"
        ),
        ToolResultMessage("call_1", "weather", (TextContent("22 °C"),)),
    ),
    tools=(ToolSchema("weather", "The weather.", {"type": "object", "properties": {}}),),
    temperature=0.5,
    max_output_tokens=100,
    reasoning=ReasoningEffort.LOW,
    provider_extras={"seed": 1, "nothing": None},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


async def heard(
    stream: StreamFn, request: StreamRequest = ASKED, signal: CancellationToken | None = None
) -> list[StreamEvent]:
    return [event async for event in stream(request, signal or CancellationToken())]


async def record(path: Path, script: Iterable[Step], *requests: StreamRequest) -> list[Any]:
    """Have a script recorded; what was heard, a list for each request."""
    stream = RecordingStream(ScriptedStream(script), path)
    return [await heard(stream, request) for request in requests]


def comparable(events: Iterable[StreamEvent]) -> list[Any]:
    """Events that can be compared: exceptions are never equal, their class and text may be."""
    return [
        (replace(event, cause=None), type(event.cause), str(event.cause))
        if isinstance(event, Error)
        else event
        for event in events
    ]


# --- what was recorded comes again --------------------------------------------------------------

EVERYTHING: list[StreamEvent] = [
    Start(PLACEHOLDER),
    Chunk(ReasoningChunk("Hm. ")),
    Chunk(ReasoningDetailsChunk(({"type": "reasoning.text", "text": "Hm.", "signature": "s"},))),
    Chunk(ThinkingChunk("so…")),
    Chunk(TextChunk("Höre: \n🦀\u2028")),
    Chunk(ToolCallChunk(0, "call_1", "weather", None)),
    Chunk(ToolCallChunk(0, None, None, '{"city": "Oslo"}')),
]


def whole(events: Sequence[StreamEvent]) -> AssistantMessage:
    assembler = MessageAssembler()
    for event in events:
        if isinstance(event, Chunk):
            assembler.feed(event.chunk)
    return assembler.message(usage=Usage(9, 2, 1, 4), timestamp=17)


@pytest.mark.parametrize(
    "events",
    [
        [*EVERYTHING, Done(whole(EVERYTHING))],
        [*EVERYTHING, Error(whole(EVERYTHING), StreamErrorKind.EMPTY, "it broke off")],
        [Done(AssistantMessage.from_text("at once"))],
        [Error(PLACEHOLDER, StreamErrorKind.PROVIDER_RATE_LIMITED, "wait")],
        [Error(PLACEHOLDER, StreamErrorKind.TRANSIENT, "late", StreamTimeout("idle", 3))],
        [Start(PLACEHOLDER, {"answered_by": "the second"}), Done(say("hello"))],
        [Start(AssistantMessage.from_text("so far")), Done(say("so far so good"))],
        [
            Start(PLACEHOLDER),
            Chunk(TextChunk("\ud83e")),
            Chunk(TextChunk("\udd80")),
            Done(say("🦀")),
        ],
    ],
    ids=[
        "a bit of everything",
        "a bit of everything, broken off",
        "nothing but the message",
        "a failure",
        "a timeout",
        "a start with details",
        "a start with a part",
        "a character in two halves",
    ],
)
async def test_every_event_comes_as_it_was(path: Path, events: list[StreamEvent]) -> None:
    [recorded] = await record(path, [events], ASKED)
    assert recorded == events  # the recording passes everything on
    assert comparable(await heard(PlaybackStream(path))) == comparable(events)


async def test_a_recording_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "answers.jsonl"
    before = os.umask(0)
    try:
        await record(path, ["one"], ASKED)
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in (path.parent, path)] == [0o700, 0o600]
    path.chmod(0o644)
    await record(path, ["two"], ASKED)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all the examples of a test: each replaces the recording of the one before."""
    return tmp_path_factory.mktemp("shared") / "answers.jsonl"


@pytest.mark.parametrize("strict", [True, False])
@given(messages=st.lists(strategies.messages(), max_size=4), answer=strategies.assistant_messages())
async def test_any_messages_are_recorded_and_recognised(
    shared_path: Path, strict: bool, messages: Any, answer: Any
) -> None:
    request = StreamRequest(system_prompt="", messages=messages)
    [recorded] = await record(shared_path, [[Done(answer)]], request)
    assert await heard(PlaybackStream(shared_path, strict=strict), request) == recorded


def thermometer(degrees: int) -> AgentTool:
    @tool
    async def weather(city: str) -> str:
        """The weather of a city."""
        return f"{degrees} °C in {city}"

    return weather


weather = thermometer(22)


async def observed(
    stream: StreamFn, *tools: AgentTool, **settings: Any
) -> tuple[RunResult | StreamError | RunAborted, list[AgentEvent]]:
    """A run, or the error that it ended with, and its events."""
    sink = RecordingSink()
    settings.setdefault("clock", FakeClock())
    config = LoopConfig(stream=stream, tools=tools, event_sink=sink, **settings)
    try:
        return await run("Weather in Oslo?", AgentContext("Be brief."), config), sink.events
    except (StreamError, RunAborted) as error:
        return error, sink.events


async def test_a_run_with_tools_is_the_same_again(path: Path) -> None:
    script: list[Step] = [
        [call("weather", city="Oslo"), call("weather", city="Rome")],
        failing("empty", "nothing came"),
        say("One more.", call("weather", city="Lima")),
        "Warm everywhere.",
    ]
    recording = RecordingStream(ScriptedStream(script), path)
    first, events = await observed(recording, weather)
    assert isinstance(first, RunResult)
    replay = PlaybackStream(path)
    again, events_again = await observed(replay, weather)
    assert again == first
    assert events_again == events
    assert first.text == "Warm everywhere."
    assert replay.unplayed == ()


@pytest.mark.parametrize(
    "script",
    [
        [failing("fatal", "no such model", "We")],
        [failing("transient", "it broke off", "We")],
        [[Start(PLACEHOLDER), Chunk(TextChunk("We"))]] * 3,
        [[]] * 3,
    ],
    ids=["fatal", "transient", "no terminal event", "no event"],
)
async def test_a_run_that_fails_fails_again_in_the_same_way(path: Path, script: list[Step]) -> None:
    first, events = await observed(RecordingStream(ScriptedStream(script), path))
    again, events_again = await observed(PlaybackStream(path))
    assert isinstance(first, StreamError)
    assert isinstance(again, StreamError)
    assert (again.kind, again.messages, again.partial) == (
        first.kind,
        first.messages,
        first.partial,
    )
    assert events_again == events


def chat_events(*deltas: dict[str, Any], finish: str) -> bytes:
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


@pytest.mark.slow
async def test_a_run_with_a_provider_is_the_same_again_without_it(path: Path) -> None:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    answers = [
        chat_events(
            {"reasoning_content": "Hm."},
            {"tool_calls": [{"index": 0, "id": "call_1", "function": function}]},
            finish="tool_calls",
        ),
        chat_events({"content": "Wa"}, {"content": "rm."}, finish="stop"),
    ]
    async with ByteServer([Answer(body=answer) for answer in answers]) as server:
        transport = OpenAIChat(
            "m", base_url=server.url, api_key=CANARY, headers={"X-Secret": f"{CANARY}-2"}
        )
        first, events = await observed(RecordingStream(transport, path), weather)
        await transport.aclose()
        assert server.requests[0].headers["authorization"] == f"Bearer {CANARY}"
    again, events_again = await observed(PlaybackStream(path), weather)
    assert isinstance(first, RunResult)
    assert again == first
    assert events_again == events
    assert (first.text, first.usage) == ("Warm.", Usage(18, 4))
    assert any(isinstance(event, ev.MessageUpdate) for event in events)
    assert CANARY not in path.read_text()


@pytest.mark.slow
async def test_a_provider_that_falls_silent_does_so_again_without_waiting(path: Path) -> None:
    def silent(request: Request) -> Answer:
        hurry(100)
        return Answer(hold=True)

    async with ByteServer(silent) as server:
        transport = OpenAIChat(
            "m", base_url=server.url, retry=RetryPolicy(attempts=1), timeouts=Timeouts(idle=60)
        )
        first, _ = await observed(RecordingStream(transport, path))
        await transport.aclose()
    again, _ = await observed(PlaybackStream(path))
    for error in (first, again):
        assert isinstance(error, StreamError)
        assert isinstance(error.__cause__, StreamTimeout)
        assert (error.__cause__.phase, error.__cause__.seconds) == ("idle", 60)
    assert str(again) == str(first)


# --- strictly -----------------------------------------------------------------------------------


def changed(index: int, **fields: Any) -> StreamRequest:
    """The request with other fields in the message at that place."""
    messages: list[Any] = list(ASKED.messages)
    messages[index] = replace(messages[index], **fields)
    return replace(ASKED, messages=tuple(messages))


USER: Any
CALLS: Any
RESULT: Any
USER, CALLS, RESULT = ASKED.messages
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("asked", "path_of_it", "recorded", "now"),
    [
        (replace(ASKED, system_prompt="Rant."), "system_prompt", "Be brief.", "Rant."),
        (changed(0, content="Rain?"), "messages[0].content", "Weather in Oslo?", "Rain?"),
        (
            changed(0, content=(ImageContent("data:,"),)),
            "messages[0].content",
            "Weather in Oslo?",
            [{"type": "image", "source": "data:,"}],
        ),
        (
            changed(
                1, content=(*CALLS.content[:1], ToolCall("call_1", "weather", {"city": "Rom"}))
            ),
            "messages[1].content[1].arguments.city",
            "Oslo",
            "Rom",
        ),
        (changed(1, stop_reason=StopReason.OTHER), "messages[1].stop_reason", "tool_use", "other"),
        (changed(2, is_error=True), "messages[2].is_error", False, True),
        (changed(2, tool_call_id="call_2"), "messages[2].tool_call_id", "call_1", "call_2"),
        (
            replace(ASKED, messages=(CALLS, USER, RESULT)),
            "messages[0].role",
            "user",
            "assistant",
        ),
        (replace(ASKED, messages=(USER, CALLS)), "messages[2]", "22 °C", None),
        (replace(ASKED, messages=(*ASKED.messages, SystemMessage("!"))), "messages[3]", None, "!"),
        (replace(ASKED, tools=()), "tools[0]", "The weather.", None),
        (
            replace(ASKED, tools=(ToolSchema("weather", "The weather.", PARAMETERS),)),
            "tools[0].parameters.properties.city",
            None,
            {"type": "string"},
        ),
        (replace(ASKED, temperature=0.7), "temperature", 0.5, 0.7),
        (replace(ASKED, temperature=None), "temperature", 0.5, None),
        (replace(ASKED, max_output_tokens=99), "max_output_tokens", 100, 99),
        (replace(ASKED, reasoning=ReasoningEffort.HIGH), "reasoning", "low", "high"),
        (replace(ASKED, force_tool_call=True), "force_tool_call", False, True),
        (replace(ASKED, provider_extras={"seed": 2}), "provider_extras.seed", 1, 2),
        (replace(ASKED, provider_extras=None), "provider_extras", {"seed": 1}, None),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else None,
)
async def test_the_first_difference_is_named(
    path: Path, asked: StreamRequest, path_of_it: str, recorded: Any, now: Any
) -> None:
    await record(path, ["hello"], ASKED)
    replay = PlaybackStream(path)
    [event] = await heard(replay, asked)
    assert isinstance(event, Error)
    assert event.kind is StreamErrorKind.FATAL
    mismatch = event.cause
    assert isinstance(mismatch, PlaybackMismatch)
    assert (mismatch.call, mismatch.path) == (1, path_of_it)
    assert f"differs from recorded call 1 at {path_of_it}: " in str(mismatch)
    for side, value in ((": recorded ", recorded), (", requested ", now)):
        shown = str(mismatch).partition(side)[2].partition(", requested ")[0]
        words = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        assert ("nothing" if value is None else words.rstrip("}")) in shown
    assert event.message == str(mismatch)
    assert replay.unplayed == (1,)  # it is still there for who asks for it
    assert await heard(replay)


@pytest.mark.parametrize("turned", [True, False])
async def test_null_and_nothing_at_all_are_told_apart(path: Path, turned: bool) -> None:
    both = [ASKED, replace(ASKED, provider_extras={"seed": 1})]
    recorded, asked = both[::-1] if turned else both
    await record(path, ["hello"], recorded)
    [*_, event] = await heard(PlaybackStream(path), asked)
    assert isinstance(event, Error)
    assert isinstance(event.cause, PlaybackMismatch)
    assert event.cause.path == "provider_extras.nothing"


@pytest.mark.parametrize(
    "asked",
    [
        changed(0, timestamp=99),
        changed(1, timestamp=5, usage=Usage(7, 7), error_message="x"),
        changed(1, annotations=(Annotation("url", "https://example.org"),)),
        changed(2, timestamp=5, narration="I looked.", details={"seconds": 3}),
        replace(ASKED, messages=(*ASKED.messages, CustomMessage("note", {"for": "people"}))),
        replace(ASKED, messages=list(ASKED.messages), tools=list(ASKED.tools)),
        replace(ASKED, provider_extras={"nothing": None, "seed": 1.0, "api_key": "x"}),
    ],
    ids=[
        "time",
        "usage",
        "sources",
        "narration and details",
        "custom message",
        "lists",
        "order and key",
    ],
)
async def test_what_a_model_does_not_see_does_not_matter(path: Path, asked: StreamRequest) -> None:
    [recorded] = await record(path, ["hello"], ASKED)
    assert await heard(PlaybackStream(path), asked) == recorded


async def test_reasoning_that_goes_back_to_the_model_matters(path: Path) -> None:
    def thought(text: str) -> StreamRequest:
        details = ReasoningDetailsContent(({"type": "reasoning.text", "text": text},))
        return changed(1, content=(ReasoningContent("Hm."), details, *CALLS.content))

    await record(path, ["hello"], thought("one"))
    [event] = await heard(PlaybackStream(path), thought("two"))
    assert isinstance(event, Error)
    assert isinstance(event.cause, PlaybackMismatch)
    assert event.cause.path == "messages[1].content[1].details[0].text"


async def test_a_long_difference_is_cut(path: Path) -> None:
    await record(path, ["hello"], replace(ASKED, system_prompt="x" * 5000))
    [event] = await heard(PlaybackStream(path))
    assert isinstance(event, Error)
    assert len(event.message) < 400
    assert "xx…" in event.message
    assert isinstance(event.cause, PlaybackMismatch)
    assert event.cause.recorded == "x" * 5000


async def test_the_difference_is_to_the_next_call_that_nobody_has_asked_for(path: Path) -> None:
    await record(path, ["one", "two"], ASKED, replace(ASKED, temperature=1.0))
    replay = PlaybackStream(path)
    await heard(replay)
    [event] = await heard(replay, replace(ASKED, temperature=0.9))
    assert isinstance(event, Error)
    assert isinstance(event.cause, PlaybackMismatch)
    assert event.cause.call == 2
    assert (event.cause.recorded, event.cause.asked) == (1.0, 0.9)


async def test_identical_requests_get_their_answers_in_order(path: Path) -> None:
    other = replace(ASKED, temperature=1.0)
    recorded = await record(path, ["one", "two", "three", "four"], ASKED, other, ASKED, ASKED)
    replay = PlaybackStream(path)
    assert await heard(replay) == recorded[0]
    assert await heard(replay) == recorded[2]
    assert list(replay.unplayed) == [2, 4]
    assert await heard(replay) == recorded[3]
    assert await heard(replay, other) == recorded[1]
    assert list(replay.unplayed) == []


@pytest.mark.parametrize("strict", [True, False])
async def test_past_the_end_it_says_how_many_there_were(path: Path, strict: bool) -> None:
    await record(path, ["one", "two"], ASKED, ASKED)
    replay = PlaybackStream(path, strict=strict)
    for _ in range(2):
        assert isinstance((await heard(replay))[-1], Done)
    [event] = await heard(replay)
    assert isinstance(event, Error)
    assert event.kind is StreamErrorKind.FATAL
    assert event.message == "answers.jsonl: the recording has 2 calls, and all of them were played"
    assert isinstance(event.cause, TransportError)


async def test_leniently_the_answers_come_in_their_order_whatever_is_asked(path: Path) -> None:
    recorded = await record(path, ["one", "two"], ASKED, replace(ASKED, temperature=1.0))
    replay = PlaybackStream(path, strict=False)
    other = StreamRequest(system_prompt="Other.", messages=())
    assert [await heard(replay, other), await heard(replay, other)] == recorded


async def test_a_run_that_asks_for_something_else_fails_with_the_mismatch_as_cause(
    path: Path,
) -> None:
    script: list[Step] = [call("weather", city="Oslo"), "Warm."]
    await observed(RecordingStream(ScriptedStream(script), path), weather)
    error, _ = await failed(
        StreamError,
        PlaybackStream(path),
        thermometer(40),
        prompts="Weather in Oslo?",
        context=AgentContext("Be brief."),
    )
    assert error.kind is StreamErrorKind.FATAL
    assert isinstance(error.__cause__, PlaybackMismatch)
    assert error.__cause__.path == "messages[2].content[0].text"
    assert (error.__cause__.recorded, error.__cause__.asked) == ("22 °C in Oslo", "40 °C in Oslo")
    assert len(error.messages) == 3


# --- several at once ----------------------------------------------------------------------------


class Gated:
    """A transport whose answers come when they are let go: to the last question first."""

    def __init__(self, count: int) -> None:
        self.waiting: list[asyncio.Event] = []
        self.count = count

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        gate = asyncio.Event()
        self.waiting.append(gate)
        yield Start(PLACEHOLDER)
        if len(self.waiting) == self.count:
            self.waiting.pop().set()
        await gate.wait()
        text = f"about {request.messages[-1].plain_text}"
        yield Chunk(TextChunk(text))
        yield Done(AssistantMessage.from_text(text))
        if self.waiting:
            self.waiting.pop().set()


async def test_calls_at_once_are_told_apart(path: Path) -> None:
    requests = [replace(ASKED, messages=(UserMessage(f"number {n}"),)) for n in range(5)]
    recording = RecordingStream(Gated(5), path)
    recorded = await asyncio.gather(*[heard(recording, request) for request in requests])
    replay = PlaybackStream(path)
    again = await asyncio.gather(*[heard(replay, request) for request in requests])
    assert again == recorded
    assert replay.unplayed == ()
    asked = [json.loads(line)["request"] for line in path.read_text().splitlines()[1:]]
    assert [request["messages"][0]["content"] for request in asked] == [
        f"number {n}"
        for n in (4, 3, 2, 1, 0)  # a call is written when it ends
    ]


async def test_sub_agents_share_a_recording(path: Path) -> None:
    async def answer(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        last = request.messages[-1]
        await asyncio.sleep(0)
        if isinstance(last, ToolResultMessage):
            message = say("Both are warm.")
        elif "Compare" in last.plain_text:
            message = AssistantMessage.from_calls(
                [ToolCall(f"c_{city}", "scout", {"task": f"Look at {city}"}) for city in ("a", "b")]
            )
        else:
            message = say(f"{last.plain_text}: warm")
        yield Start(PLACEHOLDER)
        yield Done(message)

    async def go(stream: StreamFn) -> RunResult:
        scout = agent_tool("scout", "Looks.", LoopConfig(stream=stream, clock=FakeClock()))
        config = LoopConfig(stream=stream, tools=[scout], clock=FakeClock())
        return await run("Compare a and b", AgentContext(), config)

    first = await go(RecordingStream(answer, path))
    replay = PlaybackStream(path)
    again = await go(replay)
    assert [message.plain_text for message in again.messages] == [
        message.plain_text for message in first.messages
    ]
    assert again.text == "Both are warm."
    assert len(path.read_text().splitlines()) == 1 + 4
    assert replay.unplayed == ()


# --- calls that do not come to their end --------------------------------------------------------


async def test_a_call_that_was_given_up_is_recorded_as_far_as_it_came(path: Path) -> None:
    stream = RecordingStream(ScriptedStream(["one two three"]), path)
    async with aclosing(stream(ASKED, CancellationToken())) as answer:  # type: ignore[type-var]
        seen = [await anext(answer) for _ in range(3)]
    replayed = await heard(PlaybackStream(path))
    assert replayed[:3] == seen
    [end] = replayed[3:]
    assert isinstance(end, Error)
    assert end.kind is StreamErrorKind.ABORTED
    assert end.message == "the recorded call was closed here"
    assert end.partial.plain_text == "one two "


async def test_a_call_that_was_cancelled_is_recorded_and_its_stream_closed(path: Path) -> None:
    closed: list[bool] = []

    async def slow(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        try:
            yield Start(PLACEHOLDER)
            yield Chunk(TextChunk("We"))
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    task = asyncio.create_task(observed(RecordingStream(slow, path)))
    await let_others_run()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == [True]
    error, _ = await observed(PlaybackStream(path))
    assert isinstance(error, RunAborted)
    assert error.partial is not None
    assert error.partial.plain_text == "We"


async def test_an_answer_that_is_not_read_to_its_end_closes_the_one_inside(path: Path) -> None:
    closed: list[bool] = []

    async def inner(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        try:
            yield Start(PLACEHOLDER)
            yield Done(say("never read"))
        finally:
            closed.append(True)

    async with aclosing(RecordingStream(inner, path)(ASKED, CancellationToken())) as answer:  # type: ignore[type-var]
        await anext(answer)
        assert closed == []
    assert closed == [True]


async def test_a_transport_that_raises_is_heard_and_written_down(path: Path) -> None:
    async def broken(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        yield Chunk(TextChunk("We"))
        raise RuntimeError("a bug of the transport")

    with pytest.raises(RuntimeError, match="a bug of the transport"):
        await heard(RecordingStream(broken, path))
    replayed = await heard(PlaybackStream(path))
    assert replayed[:2] == [Start(PLACEHOLDER), Chunk(TextChunk("We"))]
    assert isinstance(replayed[-1], Error)
    assert replayed[-1].kind is StreamErrorKind.FATAL  # which is what the loop took it for


async def test_a_replay_stops_when_it_is_cancelled(path: Path) -> None:
    await record(path, ["one two three"], ASKED)
    signal = CancellationToken()
    events = []
    async for event in PlaybackStream(path)(ASKED, signal):
        events.append(event)
        if len(events) == 2:
            signal.cancel("enough")
    assert events[:2] == [Start(PLACEHOLDER), Chunk(TextChunk("one "))]
    assert len(events) == 3
    assert isinstance(events[2], Error)
    assert (events[2].kind, events[2].message) == (StreamErrorKind.ABORTED, "enough")
    assert events[2].partial.plain_text == "one "


async def test_a_replay_that_is_cancelled_before_it_is_asked_says_nothing(path: Path) -> None:
    await record(path, ["one two three"], ASKED)
    signal = CancellationToken()
    signal.cancel("before")
    [event] = await heard(PlaybackStream(path), ASKED, signal)
    assert isinstance(event, Error)
    assert event.kind is StreamErrorKind.ABORTED


@pytest.mark.parametrize("last", [Done(say("hi")), failing("fatal", "no", started=False)[-1]])
async def test_cancelled_at_its_last_event_a_replay_has_no_other(
    path: Path, last: StreamEvent
) -> None:
    await record(path, [[last]], ASKED)
    signal = CancellationToken()
    events = []
    async for event in PlaybackStream(path)(ASKED, signal):
        events.append(event)
        signal.cancel()
    assert events == [last]


# --- the file -----------------------------------------------------------------------------------


async def test_a_recording_can_be_read_by_people(path: Path) -> None:
    await record(path, [say("22 °C", call("weather", city="Oslo"))], ASKED)
    header, line = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(header) == {"format": "clark-agent answers", "version": 1}
    row = json.loads(line)
    assert list(row) == ["request", "events"]
    assert row["request"]["system_prompt"] == "Be brief."
    assert row["request"]["messages"][0] == {"role": "user", "content": "Weather in Oslo?"}
    assert row["events"][0] == {"type": "start"}
    assert row["events"][1] == {"type": "chunk", "chunk": {"kind": "text", "delta": "22 "}}
    assert row["events"][-1]["type"] == "done"
    assert "22 °C" in line  # as it is, not in escapes
    assert "timestamp" not in line


async def test_a_recording_written_by_hand_is_one(path: Path) -> None:
    """What a fixture needs, and no more; with an empty line, and the line ends of Windows."""
    await record(path, ["hello"], ASKED)
    header, line = path.read_bytes().splitlines()
    path.write_bytes(header + b"\r\n\r\n" + line + b"\r\n  \r\n")
    assert (await heard(PlaybackStream(path)))[-1] == Done(say("hello"))


async def test_a_file_that_is_there_is_replaced_at_the_first_call(path: Path) -> None:
    path.write_text("something else")
    stream = RecordingStream(ScriptedStream(["one", "two"]), path)
    assert path.read_text() == "something else"
    await heard(stream)
    await heard(stream)
    assert len(path.read_text().splitlines()) == 3


async def test_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "answers.jsonl"
    await heard(RecordingStream(ScriptedStream(["one"]), str(path)))
    assert PlaybackStream(str(path)).unplayed == (1,)


async def test_appending_goes_on_with_a_recording(path: Path) -> None:
    recorded = []
    for text in ("one", "two"):
        stream = RecordingStream(ScriptedStream([text]), path, append=True)
        recorded.append(await heard(stream))
    replay = PlaybackStream(path)
    assert [await heard(replay), await heard(replay)] == recorded


async def test_appending_to_an_empty_file_begins_a_recording(path: Path) -> None:
    path.touch()
    [recorded] = [await heard(RecordingStream(ScriptedStream(["one"]), path, append=True))]
    assert await heard(PlaybackStream(path)) == recorded


@pytest.mark.parametrize("content", [b"my notes\n", b'{"role": "user"}\n', b'{"format": "x"}'])
async def test_appending_to_something_else_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises((ConfigError, DecodeError)):
        await heard(RecordingStream(ScriptedStream(["one"]), path, append=True))
    assert path.read_bytes() == content


async def test_nothing_is_appended_behind_a_torn_line(path: Path) -> None:
    await record(path, ["one"], ASKED)
    torn = path.read_bytes()[:-20]
    path.write_bytes(torn)
    with pytest.raises(DecodeError, match="at line 2"):
        await heard(RecordingStream(ScriptedStream(["two"]), path, append=True))
    assert path.read_bytes() == torn


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"", "line 1"),
        (b"\n", "line 1"),
        (b"not JSON\n", "line 1"),
        (b'{"role": "user", "content": "a transcript"}\n', "line 1"),
        (b'{"format": "something", "version": 1}\n', "line 1"),
        (b'{"format": "clark-agent answers", "version": 99}\n', "line 1"),
        (b'{"format": "clark-agent answers", "version": "1"}\n', "line 1"),
        (b'{"format": "clark-agent answers", "version": 1}\n{"request": {}}\n', "line 2"),
        (b'{"format": "clark-agent answers", "version": 1}\n\n[]\n', "line 3"),
        (
            b'{"format": "clark-agent answers", "version": 1}\n'
            b'{"request": {}, "events": [{"type": "start"}, {"type": "stop"}]}\n',
            "line 2, $.events[1].type",
        ),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_the_line(
    path: Path, content: bytes, where: str
) -> None:
    path.write_bytes(content)
    with pytest.raises(DecodeError) as caught:
        PlaybackStream(path)
    assert caught.value.path.startswith(where)
    assert "answers.jsonl" in str(caught.value)


async def test_a_torn_last_line_is_refused_with_its_number(path: Path) -> None:
    await record(path, ["one", "two"], ASKED, ASKED)
    whole_file = path.read_bytes()
    path.write_bytes(whole_file[:-30])
    with pytest.raises(DecodeError) as caught:
        PlaybackStream(path)
    assert caught.value.path.startswith("line 3")


def test_a_recording_that_is_not_there(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"answers\.jsonl"):
        PlaybackStream(path)


@pytest.mark.parametrize("inner", [None, "openai:gpt-5", {}])
def test_something_else_cannot_be_recorded(path: Path, inner: Any) -> None:
    with pytest.raises(ConfigError, match="RecordingStream needs a transport, not"):
        RecordingStream(inner, path)


# --- nothing secret -----------------------------------------------------------------------------


@dataclass
class Login:
    api_key: str


@pytest.mark.parametrize(
    "extras",
    [
        {"api_key": CANARY},
        {"apiKey": CANARY, "X-API-KEY": CANARY},
        {"authorization": f"Bearer {CANARY}"},
        {"auth": CANARY},
        {"extra_headers": {"X-Whatever": CANARY}},
        {"headers": [["X-Whatever", CANARY]]},
        {"deep": [{"er": ({"access_token": CANARY},)}]},
        {"client_secret": CANARY, "password": CANARY, "session_cookie": CANARY},
        {"credentials": {"user": CANARY}},
        {"api_keys": [CANARY]},
        {"login": Login(CANARY)},
    ],
    ids=lambda extras: ", ".join(extras),
)
async def test_nothing_secret_is_written_down(path: Path, extras: dict[str, Any]) -> None:
    request = replace(ASKED, provider_extras={**extras, "seed": 7})
    [recorded] = await record(path, ["hello"], request)
    assert CANARY not in path.read_text()
    assert json.loads(path.read_text().splitlines()[1])["request"]["provider_extras"]["seed"] == 7
    assert await heard(PlaybackStream(path), request) == recorded


async def test_what_merely_sounds_secret_is_kept(path: Path) -> None:
    extras = {"max_tokens": 5, "keyword": "x", "tokenizer": "y", "monkey_business": 1}
    await record(path, ["hello"], replace(ASKED, provider_extras=extras))
    kept = json.loads(path.read_text().splitlines()[1])["request"]["provider_extras"]
    assert kept == extras


@pytest.mark.slow
async def test_a_key_that_a_server_quotes_is_not_written_down(path: Path) -> None:
    def refuse(request: Request) -> Answer:
        text = f"Incorrect API key provided: {request.headers['authorization']}"
        body = json.dumps({"error": {"message": text}}).encode()
        return Answer(status=401, headers={"content-type": "application/json"}, body=body)

    async with ByteServer(refuse) as server:
        transport = OpenAIChat("m", base_url=server.url, api_key=CANARY)
        events = await heard(RecordingStream(transport, path))
        await transport.aclose()
    assert CANARY not in repr(events)
    assert CANARY not in path.read_text()
    assert "Incorrect API key" in path.read_text()


# --- what cannot be written ---------------------------------------------------------------------


async def test_half_a_character_in_a_prompt_does_not_keep_a_call_from_being_recorded(
    path: Path,
) -> None:
    request = changed(0, content="cut \ud83e")
    [recorded] = await record(path, ["hello"], request)
    assert recorded[-1] == Done(say("hello"))
    assert await heard(PlaybackStream(path), request) == recorded


async def test_extras_that_are_no_json_are_told_by_an_event(path: Path) -> None:
    """By the inner transport, or by the one that listens; a transport does not raise."""
    request = replace(ASKED, provider_extras={"callback": print})
    [recorded] = await record(path, ["hello"], request)
    assert isinstance(recorded[-1], Done | Error)


async def test_a_run_in_a_folder_that_cannot_be_written_fails_as_any_transport_does(
    tmp_path: Path,
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    stream = RecordingStream(ScriptedStream(["one"]), blocked / "answers.jsonl")
    error, _ = await failed(StreamError, stream)
    assert error.kind is StreamErrorKind.FATAL
    assert isinstance(error.__cause__, OSError)


async def test_waiting_tools_do_not_keep_the_recording_waiting(path: Path) -> None:
    """A call is in the file when it ends, long before the run does."""
    slow = Waiting()
    stream = RecordingStream(ScriptedStream([call("work"), "done"]), path)
    task = asyncio.create_task(observed(stream, Work("work", slow)))
    await slow.started.wait()
    assert len(path.read_text().splitlines()) == 2
    slow.release.set()
    await task
    assert len(path.read_text().splitlines()) == 3


# --- a structured output ------------------------------------------------------------------------


async def test_a_run_with_an_output_is_the_same_again(path: Path) -> None:
    class Native(ScriptedStream):
        def best_output_mode(self, *, has_tools: bool) -> OutputModeName:
            return "tool" if has_tools else "native"

    config = LoopConfig(
        stream=RecordingStream(Native(['{"answer": "x"}', '{"answer": 2}']), path),
        output=Output(int),
    )
    first = await run("How many?", AgentContext(), config)
    again = await run(
        "How many?", AgentContext(), LoopConfig(stream=PlaybackStream(path), output=Output(int))
    )
    assert first.output == again.output == 2


async def test_only_a_request_with_an_output_has_its_schema(path: Path) -> None:
    schema = OutputSchema("finish", {"type": "object"})
    await record(path, ["a", "b"], ASKED, replace(ASKED, output_schema=schema))
    _, plain, native = [json.loads(line) for line in path.read_text().splitlines()]
    assert "output_schema" not in plain["request"]
    assert native["request"] == {
        **plain["request"],
        "output_schema": {"name": "finish", "schema": {"type": "object"}, "description": ""},
    }
    playback = PlaybackStream(path)
    assert playback.best_output_mode(has_tools=True) == "tool"
    await heard(playback)
    assert playback.best_output_mode(has_tools=True) == "native"
    other = replace(ASKED, output_schema=replace(schema, name="other"))
    [event] = await heard(playback, other)
    assert isinstance(event, Error)
    assert isinstance(event.cause, PlaybackMismatch)
    assert event.cause.path == "output_schema.name"
