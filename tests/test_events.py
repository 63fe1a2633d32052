"""Sinks pass on every event, make the run wait when nobody reads, and never hold it for good."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from itertools import chain
from typing import TypeVar, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clark_agent import (
    AgentEvent,
    AssistantMessage,
    ChannelSink,
    EventSink,
    FanOutSink,
    ReasoningDetailsContent,
    RunIdentity,
    StopReason,
    SystemMessage,
    TextContent,
    ToolResult,
    ToolResultMessage,
    ToolSchema,
    Usage,
    UserMessage,
)
from clark_agent import events as ev
from clark_agent.events import (
    AgentEnd,
    AgentStart,
    MessageDiscarded,
    TurnStart,
    public_event,
    public_events,
)
from clark_agent.messages import encode_json
from clark_agent.stream import ReasoningDetailsChunk, TextChunk

T = TypeVar("T")

START = AgentStart()
END = AgentEnd(())
TURN = TurnStart()


def note(number: int) -> AgentEvent:
    """An event that can be told from others."""
    return MessageDiscarded(str(number))


async def others_run() -> None:
    """Let every task that can run do so until it waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


async def write(sink: ChannelSink, events: Sequence[AgentEvent], written: list[AgentEvent]) -> None:
    for event in events:
        await sink(event)
        written.append(event)


async def read(sink: ChannelSink) -> list[AgentEvent]:
    return [event async for event in sink]


async def in_time(work: Awaitable[T]) -> T:
    """For what would hang if it were broken."""
    async with asyncio.timeout(30):
        return await work


# --- events -----------------------------------------------------------------------------------


def test_every_event_has_its_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in get_args(AgentEvent)]
    assert tags == [
        "agent_start",
        "run_identified",
        "agent_end",
        "turn_start",
        "turn_end",
        "message_start",
        "message_update",
        "message_end",
        "message_discarded",
        "tool_execution_start",
        "tool_execution_update",
        "tool_execution_end",
        "child_run_event",
        "output_tokens_escalation",
        "consultation_start",
        "consultation_end",
        "context_transform_applied",
        "tool_gate_applied",
        "tool_gate_conflict_resolved",
        "provider_request_prepared",
        "request_delayed",
    ]
    assert json.loads(encode_json(note(1))) == {"type": "message_discarded", "reason": "1"}


# --- fan-out ----------------------------------------------------------------------------------


async def test_fan_out_hands_an_event_to_each_sink_in_order() -> None:
    seen: list[tuple[str, AgentEvent]] = []

    def plain(event: AgentEvent) -> None:
        seen.append(("plain", event))

    async def slow(event: AgentEvent) -> None:
        await asyncio.sleep(0)
        seen.append(("async", event))

    sink: EventSink = FanOutSink(plain, slow, plain)
    for event in (START, TURN):
        pending = sink(event)
        assert pending is not None
        await pending
    names = ["plain", "async", "plain"]
    assert seen == [(name, event) for event in (START, TURN) for name in names]


async def test_fan_out_goes_on_when_a_sink_raises(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[AgentEvent] = []

    def plain(event: AgentEvent) -> None:
        raise ValueError("plainly")

    async def slow(event: AgentEvent) -> None:
        await asyncio.sleep(0)
        raise KeyError("later")

    await FanOutSink(plain, slow, seen.append)(START)
    assert seen == [START]
    errors = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert errors == ["plainly", "'later'"]


async def test_fan_out_can_be_cancelled() -> None:
    seen: list[AgentEvent] = []

    async def stuck(event: AgentEvent) -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(FanOutSink(stuck, seen.append)(START))
    await others_run()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == []


# --- channel: order and waiting ---------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1])
def test_a_channel_holds_at_least_one_event(size: int) -> None:
    with pytest.raises(ValueError, match=f"not {size}"):
        ChannelSink(size)


async def test_a_channel_holds_256_events_unless_told_otherwise() -> None:
    written: list[AgentEvent] = []
    writer = asyncio.create_task(write(ChannelSink(), [TURN] * 300, written))
    await others_run()
    assert len(written) == 256
    writer.cancel()


@given(st.integers(1, 5), st.integers(0, 20))
@settings(max_examples=50)
def test_the_writer_is_never_further_ahead_than_the_buffer(size: int, count: int) -> None:
    async def check() -> None:
        events = [START, *[note(number) for number in range(count)], END]
        sink = ChannelSink(size)
        written: list[AgentEvent] = []
        writer = asyncio.create_task(write(sink, events, written))
        got: list[AgentEvent] = []
        await others_run()
        assert len(written) == min(size, len(events)), "it waits, though it could run"
        async for event in sink:
            got.append(event)
            await others_run()
            assert len(written) == min(size + len(got), len(events))
        assert got == events
        await writer

    asyncio.run(in_time(check()))


async def test_a_reader_waits_for_the_writer() -> None:
    sink = ChannelSink()
    reader = asyncio.create_task(read(sink))
    for event in (START, TURN, END):
        await others_run()
        assert not reader.done()
        await sink(event)
    assert await in_time(reader) == [START, TURN, END]


async def test_two_writers_share_the_room() -> None:
    sink = ChannelSink(2)
    written: list[AgentEvent] = []
    await sink(START)
    batches = [[note(number + 10 * writer) for number in range(5)] for writer in range(2)]
    writers = [asyncio.create_task(write(sink, batch, written)) for batch in batches]
    await others_run()
    assert len(written) == 1
    got: list[AgentEvent] = []
    async for event in sink:
        got.append(event)
        await others_run()
        assert len(written) + 1 - len(got) <= 2
        if len(got) == 11:
            await sink(END)
    await asyncio.gather(*writers)
    assert (got[0], got[-1]) == (START, END)
    for batch in batches:
        assert [event for event in got if event in batch] == batch


# --- channel: where a loop ends ---------------------------------------------------------------


def runs(depth: int = 3) -> st.SearchStrategy[list[AgentEvent]]:
    inner = st.just([TURN]) if depth == 0 else st.just([TURN]) | runs(depth - 1)
    return st.lists(inner, max_size=3).map(lambda parts: [START, *chain(*parts), END])


@given(st.lists(runs(), max_size=4), st.integers(1, 4))
@settings(max_examples=60)
def test_a_loop_ends_with_the_outermost_run_and_the_next_goes_on(
    given_runs: list[list[AgentEvent]], size: int
) -> None:
    async def check() -> None:
        sink = ChannelSink(size)
        written: list[AgentEvent] = []
        writer = asyncio.create_task(write(sink, [*chain(*given_runs)], written))
        assert [await read(sink) for _ in given_runs] == given_runs
        await writer

    asyncio.run(in_time(check()))


async def test_past_its_end_an_iterator_stays_ended() -> None:
    sink = ChannelSink()
    for event in (START, END, START):
        await sink(event)
    iterator = aiter(sink)
    assert [await anext(iterator), await anext(iterator)] == [START, END]
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await in_time(anext(iterator))
    assert await anext(aiter(sink)) == START


async def test_a_loop_that_was_left_is_taken_up_again() -> None:
    sink = ChannelSink()
    await write(sink, [START, START, END, TURN, END, START], [])
    async for event in sink:
        if event == END:
            break
    assert await in_time(read(sink)) == [TURN, END]


# --- channel: closing -------------------------------------------------------------------------


async def test_close_frees_a_blocked_writer_and_the_reader_gets_the_rest() -> None:
    sink = ChannelSink(2)
    written: list[AgentEvent] = []
    writer = asyncio.create_task(write(sink, [START, TURN, note(1), note(2)], written))
    await others_run()
    assert written == [START, TURN]
    sink.close()
    await in_time(writer)
    await sink(note(3))
    assert await in_time(read(sink)) == [START, TURN]
    assert await in_time(read(sink)) == []


async def test_close_ends_a_reader_that_waits() -> None:
    sink = ChannelSink()
    await sink(START)
    reader = asyncio.create_task(read(sink))
    await others_run()
    sink.close()
    sink.close()
    assert await in_time(reader) == [START]


async def test_as_a_context_manager_it_closes_when_the_reader_leaves() -> None:
    sink = ChannelSink(1)
    written: list[AgentEvent] = []
    writer = asyncio.create_task(write(sink, [START, TURN, TURN, END], written))
    with sink as entered:
        async for event in entered:
            assert event == START
            break
    await in_time(writer)
    assert len(written) == 4


# --- channel: cancellation --------------------------------------------------------------------


async def test_a_cancelled_reader_leaves_the_channel_usable() -> None:
    sink = ChannelSink(1)
    reader = asyncio.create_task(read(sink))
    await others_run()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    written: list[AgentEvent] = []
    writer = asyncio.create_task(write(sink, [START, TURN, END], written))
    assert await in_time(read(sink)) == [START, TURN, END]
    await writer


async def test_a_cancelled_writer_leaves_the_channel_usable() -> None:
    sink = ChannelSink(1)
    await sink(START)
    lost, kept = (asyncio.create_task(write(sink, [event], [])) for event in (note(1), note(2)))
    await others_run()
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    reader = asyncio.create_task(read(sink))
    await in_time(kept)
    await in_time(write(sink, [END], []))
    assert await in_time(reader) == [START, note(2), END]


async def test_a_writer_cancelled_when_room_was_made_for_it_leaves_the_room_to_others() -> None:
    sink = ChannelSink(1)
    await sink(START)
    lost, kept = (asyncio.create_task(write(sink, [event], [])) for event in (note(1), note(2)))
    await others_run()
    iterator = aiter(sink)
    assert await anext(iterator) == START
    lost.cancel()
    await in_time(kept)
    assert await in_time(anext(iterator)) == note(2)
    assert lost.cancelled()


# --- for others to see ------------------------------------------------------------------------

SECRET = "geheim"


def every_event() -> list[AgentEvent]:
    """One of each kind, with the secret where nobody else should look."""
    details = {"token": SECRET}
    reasoning = ReasoningDetailsContent(({"data": SECRET},))
    answer = AssistantMessage((reasoning, TextContent("Yes.")), StopReason.END_TURN)
    result = ToolResult.text("found", details=details)
    answered = ToolResultMessage("c", "t", (TextContent("found"),), details=details)
    schema = ToolSchema("t", SECRET, {})
    return [
        ev.AgentStart(),
        ev.RunIdentified(RunIdentity.root("r")),
        ev.AgentEnd([UserMessage("Hi"), SystemMessage(SECRET), answer, answered]),
        ev.TurnStart(),
        ev.TurnEnd(answer, [answered]),
        ev.MessageStart(answer, details),
        ev.MessageUpdate(AssistantMessage.from_calls([]), TextChunk("Yes.")),
        ev.MessageEnd(answered),
        ev.MessageDiscarded("steered"),
        ev.ToolExecutionStart("c", "t", {"q": 1}),
        ev.ToolExecutionUpdate("c", "t", result),
        ev.ToolExecutionEnd("c", "t", result, False),
        ev.ChildRunEvent(RunIdentity.root("c"), "c", ev.MessageEnd(answered)),
        ev.OutputTokensEscalation(1, 2, 3),
        ev.ConsultationStart(0, "p"),
        ev.ConsultationEnd(0, "p", Usage(1, 2), "timeout"),
        ev.ContextTransformApplied(0, "p", [SystemMessage(SECRET)], []),
        ev.ToolGateApplied(0, "p", [SECRET]),
        ev.ToolGateConflictResolved(0, ["p"], None, [], SECRET),
        ev.ProviderRequestPrepared(0, None, SECRET, [], [schema], None, None),
        ev.RequestDelayed(1.5, "busy"),
    ]


def test_every_event_says_what_it_is_and_has_json() -> None:
    told = every_event()
    assert [type(event) for event in told] == [*get_args(AgentEvent)]
    for event in told:
        assert event.type == json.loads(encode_json(event))["type"]


def test_what_others_see_has_no_secrets() -> None:
    public = [event for event in map(public_event, every_event()) if event is not None]
    assert [event.type for event in public] == [
        *("agent_start", "run_identified", "agent_end", "turn_start", "turn_end"),
        *("message_start", "message_update", "message_end", "message_discarded"),
        *("tool_execution_start", "tool_execution_update", "tool_execution_end", "child_run_event"),
        *("consultation_start", "consultation_end", "request_delayed"),
    ]
    text = b"".join([encode_json(event) for event in public]).decode()
    assert SECRET not in text
    assert text.count("Yes.") == 4
    assert text.count("found") == 6


async def test_a_stream_can_be_filtered() -> None:
    async def told() -> AsyncIterator[AgentEvent]:
        for event in (START, ev.MessageStart(SystemMessage("x")), END):
            yield event

    assert [event async for event in public_events(told())] == [START, AgentEnd([])]


def test_below_a_run_too() -> None:
    hidden = ev.ChildRunEvent(RunIdentity.root("c"), "c", ev.MessageEnd(SystemMessage("x")))
    assert public_event(hidden) is None
    chunk = ReasoningDetailsChunk((SECRET,))
    assert public_event(ev.MessageUpdate(AssistantMessage.from_text(""), chunk)) is None
