"""What the loop does when an answer does not come, comes to nothing, is cut off or does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    FunctionPlugin,
    LoopError,
    MaxTokensRecovery,
    ReasoningEffort,
    RunAborted,
    RunResult,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamEvent,
    StreamRequest,
    SystemMessage,
    TextContent,
    ToolCall,
    ToolGateContext,
    ToolResultMessage,
    TransformContext,
    Usage,
    UserMessage,
)
from clark_agent import events as ev
from clark_agent.history import repair_history
from clark_agent.recovery import Double, Fixed, Linear
from clark_agent.stream import Chunk, Done, Error, Start, TextChunk
from clark_agent.testing import FakeClock, ScriptedStream, Step, call
from tests.engine.support import (
    PLACEHOLDER,
    Work,
    completed,
    done,
    failed,
    failing,
    observed_run,
    outline,
    results,
    texts,
    truncated,
)

TRUNCATED = ["message_start", "message_update", "message_update", "message_end"]


# --- nothing came -------------------------------------------------------------------------------

EMPTY_STREAMS: dict[str, list[StreamEvent]] = {
    "no event": [],
    "only a start": [Start(PLACEHOLDER)],
    "chunks and no end": [Start(PLACEHOLDER), Chunk(TextChunk("We"))],
    "kind empty": failing("empty", "nothing"),
    "kind empty without a start": failing("empty", "nothing", started=False),
}


@pytest.mark.parametrize("name", EMPTY_STREAMS)
async def test_an_empty_stream_is_asked_for_three_times(name: str) -> None:
    clock, stream = FakeClock(), ScriptedStream([EMPTY_STREAMS[name]] * 2 + ["ok"])
    result, sink = await completed(stream, clock=clock)
    assert result.text == "ok"
    assert clock.sleeps == [0.25, 0.5]
    assert [e.reason for e in sink.of(ev.MessageDiscarded)] == ["empty", "empty"]
    assert [e.iteration for e in sink.of(ev.ProviderRequestPrepared)] == [0, 0, 0]
    assert len(sink.of(ev.TurnStart)) == 1


@pytest.mark.parametrize("name", EMPTY_STREAMS)
async def test_after_three_empty_streams_the_run_ends(name: str) -> None:
    clock, stream = FakeClock(), ScriptedStream([EMPTY_STREAMS[name]] * 9)
    error, sink = await failed(StreamError, stream, clock=clock)
    assert error.kind is StreamErrorKind.EMPTY
    assert len(stream.requests) == 3
    assert clock.sleeps == [0.25, 0.5]
    assert [e.reason for e in sink.of(ev.MessageDiscarded)] == ["empty"] * 3


async def test_a_stream_without_a_terminal_event_ends_with_an_empty_message() -> None:
    _, sink = await completed([EMPTY_STREAMS["chunks and no end"], "ok"])
    ended = sink.of(ev.MessageEnd)[1].message
    assert isinstance(ended, AssistantMessage)
    assert (ended.content, ended.stop_reason) == ((), StopReason.ERROR)
    assert ended.timestamp == 1_000_000


async def test_every_turn_has_its_own_attempts() -> None:
    clock = FakeClock()
    result, _ = await completed(
        [[], [], call("work"), [], [], "ok"], Work(), clock=clock, max_iterations=2,
        grace_iterations=0,
    )  # fmt: skip
    assert clock.sleeps == [0.25, 0.5, 0.25, 0.5]
    assert result.outcome == "done"  # retries are no turns


# --- the connection broke before anything came --------------------------------------------------


async def test_zero_output_is_asked_again_once_with_a_note_in_that_request_only() -> None:
    clock = FakeClock()
    stream = ScriptedStream([failing("zero_output_transport"), call("work"), "ok"])
    result, sink = await completed(stream, Work(), clock=clock)
    assert clock.sleeps == [0.5]
    first, second, third = stream.requests
    assert outline(first.messages) == ["user: go"]
    note = second.messages[-1]
    assert isinstance(note, SystemMessage)
    assert note.timestamp == 1_000_000
    assert outline(second.messages[:-1]) == ["user: go"]
    assert note not in third.messages
    assert note not in result.messages
    assert sink.of(ev.ProviderRequestPrepared)[1].messages == second.messages


async def test_zero_output_twice_ends_the_run() -> None:
    stream = ScriptedStream([failing("zero_output_transport", "cut", "We")] * 3)
    error, _ = await failed(StreamError, stream)
    assert (error.kind, error.message) == ("zero_output_transport", "cut")
    assert len(stream.requests) == 2
    assert error.partial is not None
    assert error.partial.plain_text == "We"


@pytest.mark.parametrize("effort", list(ReasoningEffort))
async def test_zero_output_lowers_a_high_effort_for_that_turn(effort: ReasoningEffort) -> None:
    lowered = {"medium", "high", "xhigh"}
    stream = ScriptedStream([failing("zero_output_transport"), call("work"), "ok"])
    await completed(stream, Work(), reasoning=effort)
    retry = ReasoningEffort.MINIMAL if effort in lowered else effort
    assert [request.reasoning for request in stream.requests] == [effort, retry, effort]


async def test_the_note_stays_while_the_same_turn_is_asked_for_other_reasons() -> None:
    stream = ScriptedStream([failing("zero_output_transport"), [], "ok"])
    await completed(stream)
    assert [len(request.messages) for request in stream.requests] == [1, 2, 2]


async def test_transforms_see_the_note() -> None:
    seen: list[list[str]] = []

    def look(messages: Sequence[AgentMessage], ctx: TransformContext) -> Sequence[AgentMessage]:
        seen.append([type(message).__name__ for message in messages])
        return messages

    await completed(
        [failing("zero_output_transport"), "ok"],
        plugins=[FunctionPlugin("context_transform", look)],
    )
    assert seen == [["UserMessage"], ["UserMessage", "SystemMessage"]]


# --- cut off at the output cap ------------------------------------------------------------------


def ladder(**settings: Any) -> dict[str, Any]:
    return {"max_output_tokens": 100, "max_output_tokens_recovery": MaxTokensRecovery(**settings)}


async def test_a_truncated_answer_is_asked_for_again_with_a_larger_cap() -> None:
    stream = ScriptedStream([truncated("cut off"), truncated("cut off"), "whole answer"])
    result, sink = await completed(stream, **ladder())
    assert outline(result.messages) == ["user: go", "assistant: whole answer"]
    assert sink.of(ev.OutputTokensEscalation) == [
        ev.OutputTokensEscalation(1, 100, 200),
        ev.OutputTokensEscalation(2, 200, 400),
    ]
    assert [request.max_output_tokens for request in stream.requests] == [100, 200, 400]
    assert [e.max_output_tokens for e in sink.of(ev.ProviderRequestPrepared)] == [100, 200, 400]
    attempt = ["provider_request_prepared", *TRUNCATED]
    again = [*attempt, "message_discarded", "output_tokens_escalation"]
    assert sink.types == [
        "agent_start", "turn_start", "message_start", "message_end",
        *again, *again, *attempt, "turn_end", "agent_end",
    ]  # fmt: skip


async def test_the_cap_is_back_to_normal_in_the_next_turn() -> None:
    script: list[Step] = [truncated("x"), call("work"), truncated("x"), "ok"]
    stream = ScriptedStream(script)
    _, sink = await completed(stream, Work(), **ladder())
    assert [request.max_output_tokens for request in stream.requests] == [100, 200, 100, 200]
    assert [e.attempt for e in sink.of(ev.OutputTokensEscalation)] == [1, 1]


async def test_when_the_ladder_ends_the_truncated_answer_counts() -> None:
    stream = ScriptedStream([truncated("cut"), truncated("still cut")])
    result, sink = await completed(stream, **ladder(max_attempts=1))
    assert result.text == "still cut"
    assert len(sink.of(ev.OutputTokensEscalation)) == 1
    assert len(sink.of(ev.MessageDiscarded)) == 1


async def test_calls_at_the_end_of_the_ladder_are_not_run() -> None:
    tool = Work()
    cut = truncated("", call("work", call_id="c"))
    result, _ = await completed([cut, cut, "ok"], tool, **ladder(max_attempts=1))
    assert tool.calls == []
    assert [r.details["reason"] for r in results(result)] == ["max_tokens"]


@pytest.mark.parametrize(
    ("settings", "caps"),
    [
        ({"scaling": Double(), "max_attempts": 3}, [100, 200, 400, 800]),
        ({"scaling": Double(), "max_attempts": 9, "ceiling": 250}, [100, 200, 250]),
        ({"scaling": Linear(50), "max_attempts": 3}, [100, 150, 200, 250]),
        ({"scaling": Fixed((300, 301)), "max_attempts": 9}, [100, 300, 301]),
        ({"scaling": Fixed((300, 200, 400)), "max_attempts": 9}, [100, 300]),
        ({"scaling": Double(), "max_attempts": 0}, [100]),
        ({"scaling": Double(), "ceiling": 100}, [100]),
    ],
)
async def test_every_ladder_stops_where_the_cap_would_not_be_larger(
    settings: dict[str, Any], caps: list[int]
) -> None:
    stream = ScriptedStream([truncated("cut")], at_end="repeat")
    result, _ = await completed(stream, **ladder(**settings))
    assert [request.max_output_tokens for request in stream.requests] == caps
    assert result.text == "cut"


async def test_without_a_starting_cap_there_is_no_recovery() -> None:
    stream = ScriptedStream([truncated("cut")])
    result, sink = await completed(stream, max_output_tokens_recovery=MaxTokensRecovery())
    assert result.text == "cut"
    assert sink.of(ev.OutputTokensEscalation) == []


async def test_without_a_recovery_a_truncated_answer_is_an_answer() -> None:
    stream = ScriptedStream([truncated("cut")])
    result, _ = await completed(stream, max_output_tokens=100)
    assert result.text == "cut"
    assert len(stream.requests) == 1


# --- the transcript does not fit ----------------------------------------------------------------


class Shrink:
    """Keeps the last so many messages. Remembers what it was asked."""

    name = "shrink"

    def __init__(self, keep: int, max_attempts: int = 1) -> None:
        self.keep = keep
        self.max_attempts = max_attempts
        self.asked: list[tuple[Sequence[AgentMessage], TransformContext]] = []

    def recover(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        self.asked.append((messages, ctx))
        return messages[max(0, len(messages) - self.keep) :]


LONG = [UserMessage("x" * 400), UserMessage("y" * 400), UserMessage("z")]


async def test_an_overflow_shrinks_the_live_transcript_and_not_the_returned_messages() -> None:
    shrink = Shrink(1)
    stream = ScriptedStream([failing("context_overflow", "too long"), call("work"), "ok"])
    result, sink = await completed(stream, Work(), prompts=LONG, overflow_recovery=shrink)
    assert [len(request.messages) for request in stream.requests] == [3, 1, 3]
    assert outline(stream.requests[2].messages) == ["user: z", "assistant: ", "tool_result: done"]
    assert result.messages[:3] == tuple(LONG)
    assert len(result.messages) == 6
    (applied,) = sink.of(ev.ContextTransformApplied)
    assert (applied.iteration, applied.plugin) == (0, "shrink")
    assert (len(applied.before), len(applied.after)) == (3, 1)
    at = sink.types.index("message_discarded")
    assert sink.types[at : at + 3] == [
        "message_discarded", "context_transform_applied", "provider_request_prepared",
    ]  # fmt: skip


async def test_what_the_recovery_is_told() -> None:
    shrink = Shrink(1)
    await completed(
        [failing("context_overflow"), "ok"], prompts=LONG, overflow_recovery=shrink, model_id="m"
    )
    ((messages, ctx),) = shrink.asked
    assert messages == LONG
    assert (ctx.iteration, ctx.model_id) == (0, "m")
    assert ctx.estimated_tokens == sum([ctx.estimator.estimate_message(m) for m in LONG])


async def test_an_async_recovery_is_awaited() -> None:
    class Later(Shrink):
        async def recover(self, messages: Any, ctx: Any) -> Any:  # type: ignore[override]
            await asyncio.sleep(0)
            return super().recover(messages, ctx)

    stream = ScriptedStream([failing("context_overflow"), "ok"])
    await completed(stream, prompts=LONG, overflow_recovery=Later(2))
    assert [len(request.messages) for request in stream.requests] == [3, 2]


async def test_a_recovery_needs_neither_a_name_nor_a_number_of_attempts() -> None:
    class Last:
        def recover(self, messages: Any, ctx: Any) -> Any:
            return messages[-1:]

    stream = ScriptedStream([failing("context_overflow"), failing("context_overflow")])
    _, sink = await failed(StreamError, stream, prompts=LONG, overflow_recovery=Last())
    assert [e.plugin for e in sink.of(ev.ContextTransformApplied)] == ["Last"]
    assert len(stream.requests) == 2


async def test_attempts_are_counted_per_turn() -> None:
    overflow = failing("context_overflow")
    shrink = Shrink(2, max_attempts=1)
    script: list[Step] = [overflow, call("work"), overflow, call("work"), overflow, overflow]
    stream = ScriptedStream(script)
    error, _ = await failed(
        StreamError, stream, Work("work", "r" * 300), prompts=LONG, overflow_recovery=shrink
    )
    assert error.kind is StreamErrorKind.CONTEXT_OVERFLOW
    assert [ctx.iteration for _, ctx in shrink.asked] == [0, 1, 2]


async def test_several_attempts_in_one_turn() -> None:
    class Halve(Shrink):
        def recover(self, messages: Any, ctx: Any) -> Any:
            self.asked.append((messages, ctx))
            return messages[len(messages) // 2 :]

    halve = Halve(0, max_attempts=2)
    stream = ScriptedStream([failing("context_overflow")] * 3)
    error, _ = await failed(
        StreamError, stream, prompts=[UserMessage("x" * 50)] * 8, overflow_recovery=halve
    )
    assert [len(request.messages) for request in stream.requests] == [8, 4, 2]
    assert len(error.messages) == 8


async def test_fewer_messages_are_no_progress_if_they_cost_as_much() -> None:
    class Merge:
        name = "merge"
        max_attempts = 5

        def recover(self, messages: Any, ctx: Any) -> Any:
            return [UserMessage("w" * 2_000)]

    stream = ScriptedStream([failing("context_overflow", "too long")] * 3)
    error, sink = await failed(StreamError, stream, prompts=LONG, overflow_recovery=Merge())
    assert (error.kind, error.message) == ("context_overflow", "too long")
    assert len(stream.requests) == 1
    assert sink.of(ev.ContextTransformApplied) == []


async def test_more_messages_are_progress_if_they_cost_less() -> None:
    class Split:
        def recover(self, messages: Any, ctx: Any) -> Any:
            return [UserMessage("a")] * 5

    stream = ScriptedStream([failing("context_overflow"), "ok"])
    result, _ = await completed(stream, prompts=LONG, overflow_recovery=Split())
    assert [len(request.messages) for request in stream.requests] == [3, 5]
    assert result.messages[:3] == tuple(LONG)


async def test_without_a_recovery_an_overflow_ends_the_run() -> None:
    error, _ = await failed(StreamError, [failing("context_overflow", "too long")])
    assert (error.kind, error.message) == ("context_overflow", "too long")


async def test_after_an_overflow_the_estimate_is_that_of_the_smaller_transcript() -> None:
    seen: list[int] = []

    def look(messages: Sequence[AgentMessage], ctx: TransformContext) -> Sequence[AgentMessage]:
        seen.append(ctx.estimated_tokens)
        return messages

    await completed(
        [failing("context_overflow"), "ok"], prompts=LONG, overflow_recovery=Shrink(1),
        plugins=[FunctionPlugin("context_transform", look)],
    )  # fmt: skip
    before, after = seen
    assert before > 200
    assert after < 20


async def test_after_an_overflow_the_usage_of_what_is_gone_is_forgotten() -> None:
    """A stale count would make whoever looks at it shrink the transcript over and over."""
    seen: list[Usage | None] = []

    def look(messages: Sequence[AgentMessage], ctx: TransformContext) -> Sequence[AgentMessage]:
        seen.append(ctx.last_provider_usage)
        return messages

    usage = Usage(input_tokens=9_000)
    big = AssistantMessage((call("work", call_id="c"),), StopReason.TOOL_USE, usage=usage)
    await completed(
        [big, failing("context_overflow"), "ok"], Work("work", "r" * 900), prompts=LONG,
        overflow_recovery=Summary(), plugins=[FunctionPlugin("context_transform", look)],
    )  # fmt: skip
    assert seen == [None, usage, None]


class Summary:
    def recover(self, messages: Any, ctx: Any) -> Any:
        return [UserMessage("a summary")]


async def test_an_overflow_after_a_larger_cap_starts_afresh() -> None:
    stream = ScriptedStream([truncated("cut"), failing("context_overflow"), truncated("cut"), "ok"])
    _, sink = await completed(stream, prompts=LONG, overflow_recovery=Shrink(1), **ladder())
    assert [request.max_output_tokens for request in stream.requests] == [100, 200, 100, 200]
    assert [e.attempt for e in sink.of(ev.OutputTokensEscalation)] == [1, 1]


# --- calls and results do not match -------------------------------------------------------------

LEFT_OPEN = AgentContext(
    "You are under test.",
    (
        UserMessage("look"),
        AssistantMessage((ToolCall("c1", "work", {}),), StopReason.TOOL_USE),
        ToolResultMessage("c0", "work", (TextContent("of another call"),)),
    ),
)
MISMATCH = failing("inconsistent_tool_history", "c1 has no result")


async def test_an_inconsistent_history_is_repaired_and_asked_again() -> None:
    clock, stream = FakeClock(), ScriptedStream([MISMATCH, call("work"), "ok"])
    result, sink = await completed(stream, Work(), context=LEFT_OPEN, clock=clock)
    first, second, third = [request.messages for request in stream.requests]
    assert tuple(second) == repair_history(first).messages
    assert isinstance(second[2], ToolResultMessage)
    assert second[2].tool_call_id == "c1"
    assert tuple(third[: len(second)]) == tuple(second), "the repair lasts"
    assert clock.sleeps == []
    assert [e.reason for e in sink.of(ev.MessageDiscarded)] == ["inconsistent_tool_history"]
    (applied,) = sink.of(ev.ContextTransformApplied)
    assert (applied.plugin, applied.before, applied.after) == ("repair_history", first, second)
    assert result.text == "ok"
    assert outline(result.messages)[0] == "user: go", "the messages of the run stay as they are"


async def test_an_inconsistent_history_that_stays_so_ends_the_run() -> None:
    stream = ScriptedStream([MISMATCH] * 3)
    error, sink = await failed(StreamError, stream, context=LEFT_OPEN)
    assert (error.kind, error.message) == ("inconsistent_tool_history", "c1 has no result")
    assert outline(error.messages) == ["user: go"]
    assert error.partial is not None
    assert "pairs tool calls and results" in "".join(error.__notes__)
    assert len(stream.requests) == 2
    assert len(sink.of(ev.ContextTransformApplied)) == 1


async def test_a_history_without_a_mistake_is_asked_again_as_it_is() -> None:
    """Behind a router the second request may reach another server."""
    stream = ScriptedStream([MISMATCH, "ok"])
    _, sink = await completed(stream)
    first, second = stream.requests
    assert first.messages == second.messages
    assert sink.of(ev.ContextTransformApplied) == []


async def test_what_a_transform_has_parted_is_repaired_behind_it() -> None:
    def forget(messages: Sequence[AgentMessage], ctx: TransformContext) -> Sequence[AgentMessage]:
        return [m for m in messages if not isinstance(m, ToolResultMessage)]

    stream = ScriptedStream([call("work"), MISMATCH, call("work"), MISMATCH, "ok"])
    result, sink = await completed(
        stream, Work(), plugins=[FunctionPlugin("context_transform", forget, name="forget")]
    )
    assert [bool(repair_history(r.messages).changes) for r in stream.requests] == [
        False, True, False, True, False
    ]  # fmt: skip
    applied = [e.plugin for e in sink.of(ev.ContextTransformApplied)]
    assert applied.count("repair_history") == 2
    assert not repair_history(result.messages).changes


async def test_what_an_overflow_recovery_has_parted_may_be_repaired_again() -> None:
    class LastTwo:
        def recover(self, messages: Any, ctx: Any) -> Any:
            return messages[-2:]

    done = ToolResultMessage("c1", "work", (TextContent("done" * 50),))
    context = replace(LEFT_OPEN, messages=(*LEFT_OPEN.messages[:2], done))
    stream = ScriptedStream([MISMATCH, failing("context_overflow"), MISMATCH, "ok"])
    result, _ = await completed(stream, context=context, overflow_recovery=LastTwo())
    assert result.text == "ok"
    assert outline(stream.requests[-1].messages) == ["user: go"]


async def test_every_turn_may_be_repaired_once() -> None:
    stream = ScriptedStream([MISMATCH, call("work"), MISMATCH, "ok"])
    result, _ = await completed(stream, Work(), context=LEFT_OPEN)
    assert result.text == "ok"


# --- everything else ends the run ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["transient", "provider_rate_limited", "fatal"])
async def test_every_other_kind_ends_the_run_at_once(kind: str) -> None:
    clock, stream = FakeClock(), ScriptedStream([failing(kind, "why", "We"), "unheard"])
    error, _ = await failed(StreamError, stream, clock=clock)
    assert (error.kind, error.message) == (kind, "why")
    assert clock.sleeps == []
    assert len(stream.requests) == 1


async def test_a_stream_that_says_it_was_aborted_is_an_abort() -> None:
    error, sink = await failed(RunAborted, [failing("aborted", "user left", "We")])
    assert error.reason == "user left"
    assert error.partial is not None
    assert error.partial.stop_reason is StopReason.ABORTED
    assert error.partial.error_message == "user left"
    assert sink.of(ev.MessageEnd)[-1].message == error.partial


@pytest.mark.parametrize(
    "kind", ["transient", "provider_rate_limited", "fatal", "aborted", "zero_output_transport"]
)
async def test_a_failed_turn_ends_with_the_very_message_that_failed(kind: str) -> None:
    outcome, sink = await observed_run([failing(kind, "why", "We")] * 2)
    assert isinstance(outcome, LoopError)
    (turn_end,) = sink.of(ev.TurnEnd)
    assert turn_end.message == sink.of(ev.MessageEnd)[-1].message
    assert turn_end.message == outcome.partial


async def test_the_message_of_an_error_is_its_partial_with_the_reason_and_a_fresh_time() -> None:
    usage = Usage(input_tokens=10, output_tokens=2)
    partial = AssistantMessage((TextContent("We"),), StopReason.OTHER, timestamp=7, usage=usage)
    broken = Error(partial, StreamErrorKind.TRANSIENT, "gone")
    error, sink = await failed(StreamError, [[Start(PLACEHOLDER), broken]])
    assert sink.of(ev.MessageEnd)[-1].message == AssistantMessage(
        (TextContent("We"),), StopReason.ERROR, "gone", timestamp=1_000_000, usage=usage
    )
    assert error.usage == usage  # it was paid for


async def test_usage_counts_every_call_those_asked_again_included() -> None:
    def using(message: AssistantMessage) -> AssistantMessage:
        usage = Usage(input_tokens=10, output_tokens=1, cache_read_input_tokens=5)
        return AssistantMessage(message.content, message.stop_reason, usage=usage)

    script: list[Step] = [
        using(truncated("cut")),
        using(AssistantMessage.from_calls([call("work")])),
        "ok",
    ]
    result, _ = await completed(script, Work(), **ladder())
    assert result.usage == Usage(input_tokens=20, output_tokens=2, cache_read_input_tokens=10)


# --- Done with a bad end ------------------------------------------------------------------------


async def test_done_with_stop_reason_error_is_appended_and_ends_the_run() -> None:
    message = AssistantMessage((TextContent("We"),), StopReason.ERROR, "overloaded")
    error, sink = await failed(StreamError, [message, "unheard"])
    assert (error.kind, error.message) == ("transient", "overloaded")
    assert outline(error.messages) == ["user: go", "assistant: We"]
    assert error.partial is None
    assert sink.of(ev.MessageDiscarded) == []
    assert [e.message for e in sink.of(ev.TurnEnd)] == [message]


async def test_done_with_stop_reason_aborted_is_appended_and_an_abort() -> None:
    message = AssistantMessage((TextContent("We"),), StopReason.ABORTED, "left")
    error, _ = await failed(RunAborted, [message])
    assert error.reason == "left"
    assert outline(error.messages) == ["user: go", "assistant: We"]


@pytest.mark.parametrize("reason", [StopReason.ERROR, StopReason.ABORTED])
async def test_calls_of_a_message_that_ended_badly_are_answered_and_not_run(
    reason: StopReason,
) -> None:
    tool = Work()
    message = AssistantMessage((call("work", call_id="c"),), reason)
    outcome, sink = await observed_run([message], tool)
    assert isinstance(outcome, LoopError)
    assert tool.calls == []
    assert [r.tool_call_id for r in results(outcome)] == ["c"]
    assert sink.of(ev.ToolExecutionStart) == []
    assert len(sink.of(ev.ToolExecutionEnd)) == 1


# --- the edges of a stream ----------------------------------------------------------------------


async def test_events_after_done_are_ignored() -> None:
    ok = AssistantMessage.from_text("ok")
    stream: list[StreamEvent] = [
        Start(PLACEHOLDER), Done(ok), Chunk(TextChunk("late")), Done(truncated("late")),
        Error(PLACEHOLDER, StreamErrorKind.FATAL, "late"),
    ]  # fmt: skip
    result, sink = await completed([stream])
    assert outline(result.messages) == ["user: go", "assistant: ok"]
    assert sink.of(ev.MessageUpdate) == []


async def test_chunks_before_the_start_are_ignored() -> None:
    stream: list[StreamEvent] = [
        Chunk(TextChunk("early")), Start(PLACEHOLDER), Chunk(TextChunk("in time")),
        Done(AssistantMessage.from_text("in time")),
    ]  # fmt: skip
    _, sink = await completed([stream])
    assert [e.chunk for e in sink.of(ev.MessageUpdate)] == [TextChunk("in time")]


async def test_chunks_without_a_start_are_ignored() -> None:
    ok = AssistantMessage.from_text("ok")
    _, sink = await completed([[Chunk(TextChunk("early")), Done(ok)]])
    assert sink.of(ev.MessageUpdate) == []
    assert sink.of(ev.MessageStart)[-1].message == ok


async def test_a_second_start_is_ignored() -> None:
    other = AssistantMessage((TextContent("other"),), StopReason.OTHER)
    stream: list[StreamEvent] = [
        Start(PLACEHOLDER), Start(other), Chunk(TextChunk("x")),
        Done(AssistantMessage.from_text("x")),
    ]  # fmt: skip
    _, sink = await completed([stream])
    assert [e.message for e in sink.of(ev.MessageStart)][1:] == [PLACEHOLDER]
    assert [e.partial for e in sink.of(ev.MessageUpdate)] == [PLACEHOLDER]


async def test_the_stream_is_closed_before_the_next_one_opens() -> None:
    log: list[str] = []

    async def model(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
        log.append("open")
        try:
            yield Start(PLACEHOLDER)
            message = AssistantMessage.from_calls([call("work", call_id=f"c{len(log)}")])
            yield Done(message if len(log) < 4 else AssistantMessage.from_text("ok"))
        finally:
            log.append("closed")

    await completed(model, Work())
    assert log == ["open", "closed"] * 3


async def test_a_transport_gets_the_signal_of_the_run() -> None:
    seen: list[CancellationToken] = []
    signal = CancellationToken()

    async def model(request: StreamRequest, given: CancellationToken) -> AsyncIterator[StreamEvent]:
        seen.append(given)
        yield Done(AssistantMessage.from_text("ok"))

    await completed(model, signal=signal)
    assert seen == [signal]


# --- every retry goes through transforms and gates again ----------------------------------------


@pytest.mark.parametrize(
    "first",
    [[], failing("zero_output_transport"), truncated("cut"), failing("context_overflow")],
    ids=["empty", "zero output", "truncated", "overflow"],
)
async def test_every_retry_goes_back_to_transforms_and_gates(first: Any) -> None:
    asked: list[str] = []

    def transform(messages: Sequence[AgentMessage], ctx: TransformContext) -> Any:
        asked.append(f"transform {ctx.iteration}")
        return messages

    def gate(ctx: ToolGateContext) -> None:
        asked.append(f"gate {ctx.iteration}")

    def steer() -> list[AgentMessage]:
        asked.append("steering")
        return []

    _, sink = await completed(
        [first, "ok"], prompts=LONG, overflow_recovery=Shrink(1), **ladder(),
        plugins=[FunctionPlugin("context_transform", transform, name="t"),
                 FunctionPlugin("tool_gate", gate, name="g"), FunctionPlugin("steering", steer)],
    )  # fmt: skip
    attempt = ["transform 0", "gate 0"]
    assert asked == ["steering", *attempt, *attempt, "steering"]
    types = [k for k in sink.types if k in ("context_transform_applied", "tool_gate_applied")]
    if isinstance(first, list) and first and getattr(first[-1], "kind", "") == "context_overflow":
        assert types.pop(2) == "context_transform_applied"  # the recovery's own
    assert types == ["context_transform_applied", "tool_gate_applied"] * 2
    assert [e.iteration for e in sink.of(ev.ProviderRequestPrepared)] == [0, 0]


async def test_a_mixture_of_troubles_in_one_turn() -> None:
    clock = FakeClock()
    stream = ScriptedStream(
        [
            [],
            failing("zero_output_transport"),
            truncated("cut"),
            [],
            failing("context_overflow"),
            call("work"),
            "ok",
        ]
    )
    result, sink = await completed(
        stream, Work(), prompts=LONG, overflow_recovery=Shrink(1), clock=clock, **ladder()
    )
    assert isinstance(result, RunResult)
    assert [e.reason for e in sink.of(ev.MessageDiscarded)] == [
        "empty", "zero_output_transport", "truncated", "empty", "context_overflow",
    ]  # fmt: skip
    assert clock.sleeps == [0.25, 0.5, 0.5]
    assert texts(result) == ["done"]
    assert len(sink.of(ev.TurnStart)) == 2


async def test_a_transport_with_nothing_but_errors_at_the_end() -> None:
    stream = ScriptedStream([done(AssistantMessage.from_calls([call("work", call_id="c")])), []])
    error, _ = await failed(StreamError, stream, Work())
    assert error.kind is StreamErrorKind.FATAL  # the script is over
    assert texts(error) == ["done"]
