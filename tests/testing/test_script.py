"""What agents are tested with: a scripted model, a sink that remembers, a clock without waiting."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    AgentEvent,
    AssistantMessage,
    CancellationToken,
    EventSink,
    ImageContent,
    ProviderContent,
    ReasoningContent,
    StopReason,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
    TextContent,
    ThinkingContent,
    ToolCall,
    UserMessage,
)
from clark_agent.clock import Clock
from clark_agent.events import AgentEnd, AgentStart, MessageEnd, MessageStart, TurnStart
from clark_agent.stream import Chunk, Done, Error, Start, TextChunk, ToolCallChunk
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream, Step, call, say
from clark_agent.testing.transport_kit import check_stream_fn
from clark_agent.types import Annotation, ReasoningDetailsContent
from tests.event_loops import task_for_later

EMPTY = AssistantMessage((), StopReason.OTHER)


def ask(*words: str) -> StreamRequest:
    return StreamRequest(system_prompt="", messages=[UserMessage(word) for word in words])


async def answer(stream: StreamFn, request: StreamRequest | None = None) -> list[StreamEvent]:
    return [event async for event in stream(request or ask(), CancellationToken())]


async def play(*script: Step) -> list[StreamEvent]:
    """What the first step of a script gives."""
    return await answer(ScriptedStream(script))


# --- steps ----------------------------------------------------------------------------------------


async def test_a_text_is_streamed_word_by_word() -> None:
    assert await play("Here  it is.\n") == [
        Start(EMPTY),
        Chunk(TextChunk("Here  ")),
        Chunk(TextChunk("it ")),
        Chunk(TextChunk("is.\n")),
        Done(AssistantMessage((TextContent("Here  it is.\n"),), StopReason.END_TURN)),
    ]


@given(st.text(st.sampled_from("ab \n\t\u3000é"), max_size=20))
def test_the_words_make_up_the_text(text: str) -> None:
    events = asyncio.run(play(text))
    chunks = [event.chunk for event in events if isinstance(event, Chunk)]
    assert "".join([chunk.delta for chunk in chunks if isinstance(chunk, TextChunk)]) == text
    assert events[-1] == Done(AssistantMessage.from_text(text))


async def test_a_call_becomes_a_message() -> None:
    assert await play(call("look", place="here")) == [
        Start(EMPTY),
        Chunk(ToolCallChunk(0, "call_1", "look", '{"place":"here"}')),
        Done(
            AssistantMessage((ToolCall("call_1", "look", {"place": "here"}),), StopReason.TOOL_USE)
        ),
    ]


async def test_several_calls_become_one_message() -> None:
    events = await play([call("a"), call("b", x=1)])
    calls = (ToolCall("call_1", "a", {}), ToolCall("call_2", "b", {"x": 1}))
    assert events == [
        Start(EMPTY),
        Chunk(ToolCallChunk(0, "call_1", "a", "{}")),
        Chunk(ToolCallChunk(1, "call_2", "b", '{"x":1}')),
        Done(AssistantMessage(calls, StopReason.TOOL_USE)),
    ]


async def test_a_whole_message_is_given_as_it_is() -> None:
    message = AssistantMessage(
        (TextContent("a b"), ToolCall("x", "look", {}), TextContent("c")), StopReason.MAX_TOKENS
    )
    assert await play(message) == [
        Start(EMPTY),
        Chunk(TextChunk("a ")),
        Chunk(TextChunk("b")),
        Chunk(ToolCallChunk(0, "x", "look", "{}")),
        Chunk(TextChunk("c")),
        Done(message),
    ]


async def test_events_are_yielded_as_they_are() -> None:
    events: list[StreamEvent] = [
        Chunk(TextChunk("early")),
        Error(EMPTY, StreamErrorKind.TRANSIENT, "gone"),
    ]
    assert await play(events) == events
    assert await play([]) == []


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
async def test_an_exception_is_raised(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        await play(error)
    assert caught.value is error


async def test_a_function_decides_by_the_request() -> None:
    def echo(request: StreamRequest) -> Step:
        last = request.messages[-1]
        assert isinstance(last, UserMessage)
        return f"you said {last.plain_text}" if last.content else lambda _: call("wait")

    stream = ScriptedStream([echo], at_end="repeat")
    first, second = await answer(stream, ask("hi")), await answer(stream, ask(""))
    assert first[-1] == Done(AssistantMessage.from_text("you said hi"))
    assert second[-1] == Done(AssistantMessage.from_calls([call("wait", call_id="call_1")]))


async def test_steps_come_in_order() -> None:
    stream = ScriptedStream(iter(["one", "two"]))
    ends = [(await answer(stream))[-1] for _ in range(2)]
    assert ends == [Done(AssistantMessage.from_text(text)) for text in ("one", "two")]


# --- ids ------------------------------------------------------------------------------------------


async def test_calls_without_an_id_are_numbered_over_the_whole_script() -> None:
    stream = ScriptedStream(
        [call("a"), [call("b", call_id="mine"), call("c")], say("so", call("d")), [call("e")]]
    )
    ids: list[str] = []
    for _ in range(4):
        done = (await answer(stream))[-1]
        assert isinstance(done, Done)
        ids += [c.id for c in done.message.tool_calls]
    assert ids == ["call_1", "mine", "call_2", "call_3", "call_4"]


async def test_a_repeated_step_gets_new_ids() -> None:
    stream = ScriptedStream([call("a")], at_end="repeat")
    ends = [(await answer(stream))[-1] for _ in range(3)]
    assert ends == [
        Done(AssistantMessage.from_calls([call("a", call_id=f"call_{n}")])) for n in (1, 2, 3)
    ]


def test_call_and_say() -> None:
    assert call("look", name="x", self=1) == ToolCall("", "look", {"name": "x", "self": 1})
    assert call("look", call_id="c") == ToolCall("c", "look", {})
    assert say("hi") == AssistantMessage.from_text("hi")
    look = call("look")
    assert say("hi", look) == AssistantMessage((TextContent("hi"), look), StopReason.TOOL_USE)
    assert say(" ", look).content == (look,)


# --- past the end ---------------------------------------------------------------------------------


async def test_past_its_end_a_script_fails_and_says_so() -> None:
    stream = ScriptedStream(["one"])
    await answer(stream)
    (event,) = await answer(stream)
    assert isinstance(event, Error)
    assert event.kind is StreamErrorKind.FATAL
    assert event.message == "this is call 2, but the script ends with call 1"


async def test_it_may_fall_silent_instead() -> None:
    stream = ScriptedStream(["one"], at_end="empty")
    assert len(await answer(stream)) == 3
    assert [await answer(stream), await answer(stream)] == [[], []]


async def test_it_may_repeat_its_last_step_instead() -> None:
    stream = ScriptedStream(["one", "two"], at_end="repeat")
    ends = [(await answer(stream))[-1] for _ in range(4)]
    texts = [end.message.plain_text for end in ends if isinstance(end, Done)]
    assert texts == ["one", "two", "two", "two"]


@pytest.mark.parametrize("at_end", ["error", "repeat"])
async def test_an_empty_script_has_nothing_to_repeat(at_end: Literal["error", "repeat"]) -> None:
    (event,) = await answer(ScriptedStream([], at_end=at_end))
    assert isinstance(event, Error)


# --- what it was asked ----------------------------------------------------------------------------


async def test_requests_are_remembered_whatever_comes_of_them() -> None:
    stream = ScriptedStream(["one", RuntimeError("no")])
    requests = [ask("a"), ask("b"), ask("c")]
    await answer(stream, requests[0])
    with pytest.raises(RuntimeError):
        await answer(stream, requests[1])
    await answer(stream, requests[2])
    assert [a is b for a, b in zip(stream.requests, requests, strict=True)] == [True] * 3


async def test_a_stream_that_is_given_up_counts_as_asked() -> None:
    stream = ScriptedStream(["one two", "next"])
    opened: Any = stream(ask(), CancellationToken())
    assert await anext(opened) == Start(EMPTY)
    await opened.aclose()
    assert (await answer(stream))[-1] == Done(AssistantMessage.from_text("next"))


# --- the sink -------------------------------------------------------------------------------------


def test_the_sink_keeps_events_in_order() -> None:
    sink = RecordingSink()
    as_sink: EventSink = sink
    message = UserMessage("hi")
    events: list[AgentEvent] = [
        AgentStart(),
        TurnStart(),
        MessageStart(message),
        MessageEnd(message),
        AgentEnd([message]),
    ]
    for event in events:
        assert as_sink(event) is None
    assert all(a is b for a, b in zip(sink.events, events, strict=True))
    assert sink.types == ["agent_start", "turn_start", "message_start", "message_end", "agent_end"]
    assert sink.of(MessageEnd) == [MessageEnd(message)]
    assert sink.of(MessageStart)[0].message is message
    assert RecordingSink().events == []


# --- as a transport -------------------------------------------------------------------------------

THOUGHT = {"type": "reasoning.text", "text": "So.", "signature": "s"}
EVERYTHING = AssistantMessage(
    (
        ReasoningContent("Let me see. "),
        ReasoningDetailsContent((THOUGHT,)),
        ThinkingContent("Hm, well."),
        TextContent("I look at two places."),
        ToolCall("", "look", {"at": [1, {"b": "é"}]}),
        ImageContent("data:image/png;base64,aGk="),
        ProviderContent("p", {"type": "search"}),
        ToolCall("", "look", {}),
    ),
    StopReason.TOOL_USE,
    annotations=(Annotation("url", "https://example.org"), Annotation("search")),
)


@pytest.mark.parametrize(
    "step",
    ["Hello there.", "", call("look", at=1), [call("look"), call("see")], EVERYTHING],
    ids=["text", "nothing", "call", "calls", "everything"],
)
async def test_it_conforms(step: Any) -> None:
    report = await check_stream_fn(ScriptedStream([step], at_end="repeat"))
    assert report.error is None


async def test_every_call_is_streamed() -> None:
    events = [e async for e in ScriptedStream([EVERYTHING])(ask(), CancellationToken())]
    chunks = [event.chunk for event in events if isinstance(event, Chunk)]
    assert [chunk for chunk in chunks if isinstance(chunk, ToolCallChunk)] == [
        ToolCallChunk(0, "call_1", "look", '{"at":[1,{"b":"é"}]}'),
        ToolCallChunk(1, "call_2", "look", "{}"),
    ]


async def test_a_cancelled_signal_ends_it() -> None:
    stream, signal = ScriptedStream(["one two three"]), CancellationToken()
    events = []
    async for event in stream(ask(), signal):
        events.append(event)
        if isinstance(event, Chunk):
            signal.cancel("enough")
    partial = AssistantMessage((TextContent("one "),), StopReason.ABORTED, "enough")
    assert events[-1] == Error(partial, StreamErrorKind.ABORTED, "enough")
    assert [event async for event in stream(ask(), signal)] == [
        Error(AssistantMessage((), StopReason.ABORTED, "enough"), StreamErrorKind.ABORTED, "enough")
    ]
    assert len(stream.requests) == 1, "a call that is cancelled before takes no step"


# --- the clock ------------------------------------------------------------------------------------


async def test_time_passes_only_while_somebody_sleeps() -> None:
    fake = FakeClock(5_000)
    clock: Clock = fake
    assert [clock.now_ms(), clock.now_ms()] == [5_000, 5_000]
    await clock.sleep(0.25)
    assert clock.now_ms() == 5_250
    await clock.sleep(86_400)
    assert clock.now_ms() == 86_405_250
    await clock.sleep(0)
    assert fake.sleeps == [0.25, 86_400, 0]
    assert FakeClock().now_ms() == 1_000_000


async def test_sleep_gives_others_a_turn() -> None:
    order: list[str] = []

    async def other() -> None:
        order.append("other")

    task = asyncio.create_task(other())
    await FakeClock().sleep(3600)
    order.append("awake")
    await task
    assert order == ["other", "awake"]


async def test_a_sleeper_can_be_cancelled() -> None:
    task = task_for_later(FakeClock().sleep(1))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_ids_count_per_clock() -> None:
    one, two = FakeClock(), FakeClock()
    assert [one.new_id(), one.new_id(), two.new_id()] == ["id-1", "id-2", "id-1"]
