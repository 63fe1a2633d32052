"""`check_events` takes what runs emit and refuses the rest, naming the place and the rule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentEvent,
    AssistantMessage,
    BeforeRequestContext,
    CancellationToken,
    FunctionPlugin,
    LoopConfig,
    MaxTokensRecovery,
    RunIdentity,
    StopReason,
    TextContent,
    ToolContext,
    ToolFatal,
    ToolResult,
    ToolResultMessage,
    UserMessage,
    run_child,
)
from clark_agent import events as ev
from clark_agent.errors import EventOrderError
from clark_agent.stream import Chunk, Done, Start, StreamEvent, TextChunk
from clark_agent.stream import Waiting as Delay
from clark_agent.testing import (
    EventChecker,
    RecordingSink,
    ScriptedStream,
    call,
    check_events,
    fold_events,
    say,
)
from tests.engine.support import (
    FINISH,
    PLACEHOLDER,
    Waiting,
    Work,
    failing,
    observed_run,
    shape,
    truncated,
)

Events = list[AgentEvent]

# --- good runs ----------------------------------------------------------------------------------


async def progress(args: Any, ctx: ToolContext) -> ToolResult:
    await ctx.update("half")
    await run_child(ctx, "a part of it", LoopConfig(stream=ScriptedStream(["done"])))
    return ToolResult.text("done")


def source(*batches: list[Any]) -> Callable[[], list[Any]]:
    given = iter(batches)
    return lambda: next(given, [])


async def ask_beside(ctx: BeforeRequestContext) -> None:
    if ctx.iteration == 1:
        await ctx.ask_model("A word?", stream=ScriptedStream(["Yes."]))


async def rich() -> RecordingSink:
    """A run with every kind of event."""
    delayed: list[StreamEvent] = [
        Delay(1, "busy"),
        Start(PLACEHOLDER),
        Chunk(TextChunk("bye")),
        Done(say("bye")),
    ]
    _, sink = await observed_run(
        [truncated("cut off"), [call("work"), call("nope")], "well then", delayed],
        Work("work", progress),
        context=AgentContext("", identity=RunIdentity.root("r")),
        plugins=[
            FunctionPlugin("before_request", ask_beside),
            FunctionPlugin("context_transform", lambda messages, ctx: messages),
            FunctionPlugin("tool_gate", lambda ctx: {"work"} if ctx.iteration == 0 else None),
            FunctionPlugin("tool_gate", lambda ctx: {"x"} if ctx.iteration == 0 else None),
            FunctionPlugin("steering", source([], [UserMessage("steer")])),
            FunctionPlugin("follow_up", source([UserMessage("more")], [UserMessage("note")])),
        ],
        max_output_tokens=10,
        max_output_tokens_recovery=MaxTokensRecovery(),
        max_iterations=3,
        grace_iterations=0,
    )
    return sink


async def aborted() -> RecordingSink:
    signal, waiting = CancellationToken(), Waiting()

    async def stop(args: Any, ctx: ToolContext) -> ToolResult:
        await waiting.started.wait()
        signal.cancel()
        return ToolResult.text("stopped")

    _, sink = await observed_run(
        [[call("wait"), call("stop")]], Work("wait", waiting), Work("stop", stop), signal=signal
    )
    return sink


async def simple(*script: Any, **settings: Any) -> RecordingSink:
    fatal = Work("fatal", ToolFatal("x"))
    _, sink = await observed_run(script, Work("work", progress), FINISH, fatal, **settings)
    return sink


async def all_good() -> dict[str, Events]:
    eager: dict[str, Any] = {
        "plain_text_terminal_fallback_tool": "deliver",
        "plain_text_terminal_fallback_eager": True,
    }
    same_id = [call("work", call_id="c"), call("work", call_id="c")]
    sinks = {
        "rich": await rich(),
        "aborted": await aborted(),
        "text": await simple("ok"),
        "no prompts": await simple("ok", prompts=[]),
        "terminal": await simple(call("finish")),
        "fallback": await simple("the answer", **eager),
        "nudged": await simple(
            "a", "b", "c", **eager, plain_text_terminal_fallback_eager_nudge=True
        ),
        "stream error": await simple(call("work"), failing("transient", "gone", "We")),
        "empty": await simple([], [], []),
        "fatal": await simple([call("work"), call("fatal")]),
        "one id": await simple(same_id, "ok", valid=False),
        "done with an error": await simple(
            AssistantMessage((call("work", call_id="c"),), StopReason.ERROR)
        ),
    }
    return {name: sink.events for name, sink in sinks.items()}


GOOD = asyncio.run(all_good())
RICH = GOOD["rich"]


@pytest.mark.parametrize("name", GOOD)
def test_good_runs_are_taken(name: str) -> None:
    check_events(GOOD[name])
    checker = EventChecker()
    for event in GOOD[name]:
        checker.feed(event)
    checker.finish()


def test_the_rich_run_has_every_event() -> None:
    assert {type(event) for event in RICH} == {*get_args(AgentEvent)}


# --- broken ones --------------------------------------------------------------------------------


def at(kind: type[AgentEvent], number: int = 0, events: Events = RICH) -> int:
    """The place of the n-th event of a class."""
    return [i for i, event in enumerate(events) if isinstance(event, kind)][number]


def message_at(kind: type[ev.MessageStart | ev.MessageEnd], role: type, number: int = 0) -> int:
    """The place of the n-th message event of a role."""
    found = [i for i, e in enumerate(RICH) if isinstance(e, kind) and isinstance(e.message, role)]
    return found[number]


def without(*places: int, events: Events = RICH) -> Events:
    return [event for i, event in enumerate(events) if i not in places]


def swapped(place: int, other: int | None = None, events: Events = RICH) -> Events:
    result = list(events)
    other = place + 1 if other is None else other
    result[place], result[other] = result[other], result[place]
    return result


def inserted(place: int, *new: AgentEvent, events: Events = RICH) -> Events:
    return [*events[:place], *new, *events[place:]]


def changed(place: int, **fields: Any) -> Events:
    result: list[Any] = list(RICH)
    result[place] = replace(result[place], **fields)
    return result


def moved(place: int, to: int) -> Events:
    """The event taken out and put in before the one that is now at ``to``."""
    rest = without(place)
    return inserted(to, RICH[place], events=rest)


USER = UserMessage("who?")
ANSWER = AssistantMessage((TextContent("who?"),), StopReason.END_TURN)
LAST = len(RICH) - 1
TURN = at(ev.TurnStart)
REQUEST = at(ev.ProviderRequestPrepared)
UPDATE = at(ev.MessageUpdate)
TOOL = at(ev.ToolExecutionStart)
TOOL_UPDATE = at(ev.ToolExecutionUpdate)
TOOL_END = [i for i, e in enumerate(RICH) if isinstance(e, ev.ToolExecutionEnd)]
RESULT = message_at(ev.MessageStart, ToolResultMessage)
TURN_END = at(ev.TurnEnd)
DISCARDED = at(ev.MessageDiscarded)
ASKED = at(ev.ConsultationStart)
ESCALATED = at(ev.OutputTokensEscalation)
WORKED = next(i for i in TOOL_END if RICH[i].tool_call_id == "call_1")  # type: ignore[union-attr]
REFUSED = next(i for i in TOOL_END if RICH[i].tool_call_id == "call_2")  # type: ignore[union-attr]
ANSWERED = message_at(ev.MessageEnd, AssistantMessage, 1)

# The events, where it is told (None: where exactly is open), and part of the rule that is told.
BROKEN: dict[str, tuple[Events, int | None, str]] = {
    # the run
    "nothing at all": ([], 0, "a run ends with agent_end"),
    "no agent_start": (RICH[1:], 0, "a run begins with agent_start"),
    "two agent_starts": (inserted(1, RICH[0]), 1, "one agent_start"),
    "agent_start in the middle": (inserted(UPDATE, RICH[0]), UPDATE, "one agent_start"),
    "no agent_end": (RICH[:-1], LAST, "a run ends with agent_end"),
    "two agent_ends": ([*RICH, RICH[-1]], LAST + 1, "nothing follows agent_end"),
    "an event after the end": ([*RICH, ev.TurnStart()], LAST + 1, "nothing follows agent_end"),
    "agent_end in a turn": (inserted(REQUEST, RICH[-1]), REQUEST, "after the last turn_end"),
    "agent_end with other messages": (
        changed(LAST, messages=[USER]), LAST, "the announced messages",
    ),
    "agent_end without the last message": (
        changed(LAST, messages=RICH[-1].messages[:-1]),  # type: ignore[union-attr]
        LAST, "the announced messages",
    ),
    "no turn at all": ([RICH[0], ev.AgentEnd(())], 1, "at least one turn"),
    "run_identified twice": (inserted(2, RICH[1]), 2, "run_identified directly follows"),
    "run_identified later": (swapped(1), 2, "run_identified directly follows"),
    # turns
    "no first turn_start": (without(TURN), TURN, "after the first turn_start"),
    "no second turn_start": (
        without(at(ev.TurnStart, 1)), ASKED - 1, "within a turn",
    ),
    "two turn_starts": (inserted(TURN, RICH[TURN]), TURN + 1, "after the turn_end before it"),
    "no turn_end": (without(TURN_END), TURN_END, "after the turn_end before it"),
    "two turn_ends": (inserted(TURN_END, RICH[TURN_END]), TURN_END + 1, "turn_end closes a turn"),
    "no last turn_end": (
        without(at(ev.TurnEnd, -1)), LAST - 1, "after the last turn_end",
    ),
    "turn_end with another answer": (
        changed(TURN_END, message=ANSWER), TURN_END, "the turn's answer",
    ),
    "turn_end without results": (changed(TURN_END, tool_results=()), TURN_END, "for every call"),
    "turn_end with a result too few": (
        changed(TURN_END, tool_results=RICH[TURN_END].tool_results[:1]),  # type: ignore[union-attr]
        TURN_END, "for every call",
    ),
    "turn_start while a message is open": (
        inserted(UPDATE, ev.TurnStart()), UPDATE, "turn_start",
    ),
    "turn_end while a message is open": (
        inserted(UPDATE, RICH[TURN_END]), UPDATE, "message is open",
    ),
    "turn_end while a tool runs": (
        inserted(TOOL_UPDATE, RICH[TURN_END]), TOOL_UPDATE, "no tool runs",
    ),
    # messages
    "no message_start of the prompt": (without(TURN + 1), TURN + 1, "message_end closes a message"),
    "no message_end of the prompt": (without(TURN + 2), TURN + 2, "no message is open"),
    "message_end before its start": (swapped(TURN + 1), TURN + 1, "message_end closes a message"),
    "a message within a message": (
        inserted(TURN + 2, RICH[TURN + 1], RICH[TURN + 2]), TURN + 2, "one message ends before",
    ),
    "a message that ends as another": (
        changed(TURN + 2, message=USER), TURN + 2, "ends as it was started",
    ),
    "a message that ends as another kind": (
        changed(TURN + 2, message=ANSWER), TURN + 2, "the message that was started",
    ),
    "an answer without a request": (without(REQUEST), None, ""),
    "an answer nobody asked for": (
        inserted(TURN + 1, ev.MessageStart(ANSWER), ev.MessageEnd(ANSWER)), None, "",
    ),
    "a message between request and answer": (
        inserted(REQUEST + 1, ev.MessageStart(USER), ev.MessageEnd(USER)), REQUEST + 1,
        "the model's answer comes before",
    ),
    "no message_start of the answer": (without(REQUEST + 1), REQUEST + 1, "an open message"),
    "an update before the start": (swapped(REQUEST + 1), REQUEST + 1, "an open message"),
    "an update of another message": (
        inserted(UPDATE, ev.MessageUpdate(replace(PLACEHOLDER), TextChunk("x"))), UPDATE,
        "the placeholder",
    ),
    "an update after the end": (swapped(DISCARDED - 2), DISCARDED - 1, "an open message"),
    "no message_end of the answer": (
        without(DISCARDED - 1), DISCARDED - 1, "message_discarded directly follows",
    ),
    "an unannounced message": (
        without(TURN + 1, TURN + 2), LAST - 2, "the announced messages",
    ),
    # discards
    "no message_discarded": (without(DISCARDED), DISCARDED, "no request after its answer"),
    "message_discarded twice": (
        inserted(DISCARDED, RICH[DISCARDED]), DISCARDED + 1, "message_discarded directly follows",
    ),
    "a discarded prompt": (
        inserted(TURN + 3, RICH[DISCARDED]), TURN + 3, "message_discarded directly follows",
    ),
    "a discarded result": (
        inserted(RESULT + 2, RICH[DISCARDED]), RESULT + 2, "message_discarded directly follows",
    ),
    "a discarded answer with tools": (
        inserted(ANSWERED + 1, RICH[DISCARDED]), ANSWERED + 2, "after the answer that calls",
    ),
    "escalation without a discard": (
        moved(ESCALATED, REQUEST), REQUEST, "output_tokens_escalation follows",
    ),
    # what plugins ask
    "no consultation_start": (without(ASKED), ASKED, "consultation_end follows consultation_start"),
    "no consultation_end": (
        without(ASKED + 1), ASKED + 1, "consultation_start is followed by consultation_end",
    ),
    "a consultation behind the gates": (
        inserted(REQUEST, RICH[ASKED], RICH[ASKED + 1]), REQUEST, "before the gates",
    ),
    "a turn_end in a consultation": (inserted(ASKED + 1, RICH[TURN_END]), ASKED + 1, ""),
    # requests
    "a request outside a turn": (
        inserted(TURN_END + 1, RICH[REQUEST]), TURN_END + 1, "within a turn",
    ),
    "a delay before the request": (
        inserted(REQUEST, ev.RequestDelayed(1, "")), REQUEST, "between request and answer",
    ),
    "a delay while the answer streams": (
        inserted(UPDATE, ev.RequestDelayed(1, "")), UPDATE, "between request and answer",
    ),
    "a delay after the answer": (
        inserted(ANSWERED + 1, ev.RequestDelayed(1, "")), ANSWERED + 1, "request and answer",
    ),
    "two requests": (inserted(REQUEST, RICH[REQUEST]), REQUEST + 1, "followed by the answer"),
    "a request while the answer streams": (
        inserted(UPDATE, RICH[REQUEST]), UPDATE, "no message is open",
    ),
    "a request after the answer": (
        inserted(ANSWERED + 1, RICH[REQUEST]), ANSWERED + 1, "no request after its answer",
    ),
    "a transform after the request": (
        moved(REQUEST - 4, REQUEST), REQUEST, "followed by the answer",
    ),
    "a gate after the request": (swapped(REQUEST - 1), REQUEST, "followed by the answer"),
    "a transform after a gate": (swapped(REQUEST - 4), REQUEST - 3, ""),
    "a conflict before its gates": (moved(REQUEST - 1, REQUEST - 3), REQUEST - 3, ""),
    "two conflicts": (inserted(REQUEST, RICH[REQUEST - 1]), REQUEST, ""),
    "a gate after the conflict": (inserted(REQUEST, RICH[REQUEST - 2]), REQUEST, ""),
    "a transform between gates": (inserted(REQUEST - 2, RICH[REQUEST - 4]), REQUEST - 2, ""),
    # tools
    "a tool before the answer": (moved(TOOL, REQUEST), REQUEST, "after the answer that calls"),
    "a tool outside a turn": (
        inserted(TURN_END + 1, RICH[TOOL]), TURN_END + 1, "tools run within a turn",
    ),
    "a tool of another turn": (
        inserted(at(ev.TurnEnd, 1), RICH[TOOL]), at(ev.TurnEnd, 1), "a call of the turn's answer",
    ),
    "a tool nobody called": (
        inserted(TOOL, ev.ToolExecutionStart("who", "work", {})), TOOL,
        "a call of the turn's answer",
    ),
    "a tool that starts twice": (inserted(TOOL, RICH[TOOL]), TOOL + 1, "starts at most once"),
    "a tool that starts again": (
        inserted(WORKED + 1, RICH[TOOL]), WORKED + 1, "starts at most once",
    ),
    "a tool without an end": (without(WORKED), RESULT - 1, "no message starts while a tool runs"),
    "a refused call without an end": (without(REFUSED), TURN_END - 1, "ends exactly once"),
    "a tool with two ends": (inserted(WORKED, RICH[WORKED]), WORKED + 1, "ends exactly once"),
    "progress before the start": (swapped(TOOL, TOOL_UPDATE), TOOL, "only a call that runs"),
    "progress after the end": (
        inserted(WORKED + 1, RICH[TOOL_UPDATE]), WORKED + 1, "only a call that runs",
    ),
    "progress of a refused call": (
        changed(TOOL_UPDATE, tool_call_id="call_2"), TOOL_UPDATE, "only a call that runs",
    ),
    "a result while its tool runs": (
        inserted(TOOL_UPDATE, RICH[RESULT]), TOOL_UPDATE, "while a tool runs",
    ),
    "a refused call that ends after the results": (
        moved(REFUSED, TURN_END - 1), TURN_END - 1, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_runs_are_refused(name: str) -> None:
    events, position, rule = BROKEN[name]
    with pytest.raises(EventOrderError) as caught:
        check_events(events)
    error = caught.value
    assert rule in error.rule
    assert position in (None, error.position)
    at_end = error.position == len(events)
    kind = "the end" if at_end else str(events[error.position].__struct_config__.tag)
    assert str(error) == f"event {error.position} ({kind}) is out of order: {error.rule}"


def test_there_are_enough_broken_runs() -> None:
    assert len(BROKEN) >= 25


def test_a_turn_without_an_answer_is_the_last_one() -> None:
    """Only a run that failed has one, and it has ended with it."""
    turn: Events = [ev.TurnStart(), ev.TurnEnd(ANSWER, ())]
    with pytest.raises(EventOrderError):
        check_events(inserted(TURN_END + 1, *turn))


# --- whatever is taken away ---------------------------------------------------------------------

# A call that was refused has no start, so one without is no violation that could be seen; every
# other bracket has two sides.
BRACKETS = (
    ev.AgentStart, ev.AgentEnd, ev.TurnStart, ev.TurnEnd, ev.MessageStart, ev.MessageEnd,
    ev.MessageDiscarded, ev.ToolExecutionEnd, ev.ProviderRequestPrepared,
)  # fmt: skip


@st.composite
def brackets(draw: st.DrawFn) -> tuple[str, int]:
    """One bracket event of one good run."""
    name = draw(st.sampled_from(sorted(GOOD)))
    places = [i for i, event in enumerate(GOOD[name]) if isinstance(event, BRACKETS)]
    return name, draw(st.sampled_from(places))


@given(brackets())
def test_no_bracket_event_can_be_left_out(which: tuple[str, int]) -> None:
    name, place = which
    with pytest.raises(EventOrderError):
        check_events(without(place, events=GOOD[name]))


def test_no_bracket_event_of_the_good_runs_can_be_left_out() -> None:
    """The same for every one of them: there are not that many."""
    for events in GOOD.values():
        for place, event in enumerate(events):
            if isinstance(event, BRACKETS):
                with pytest.raises(EventOrderError):
                    check_events(without(place, events=events))


def test_a_start_can_only_be_left_out_where_nothing_ran() -> None:
    place = at(ev.ToolExecutionStart)
    with pytest.raises(EventOrderError, match="only a call that runs has progress"):
        check_events(without(place))


@given(brackets())
def test_no_bracket_event_can_come_twice(which: tuple[str, int]) -> None:
    name, place = which
    events = GOOD[name]
    with pytest.raises(EventOrderError):
        check_events(inserted(place, events[place], events=events))


def test_no_run_is_a_part_of_another() -> None:
    for events in GOOD.values():
        for end in range(len(events)):
            with pytest.raises(EventOrderError, match="the end"):
                check_events(events[:end])


def test_two_runs_are_not_one() -> None:
    for one, two in pairwise(GOOD.values()):
        with pytest.raises(EventOrderError, match="nothing follows agent_end"):
            check_events([*one, *two])


# --- the fold -----------------------------------------------------------------------------------


def test_the_fold_takes_back_what_was_discarded() -> None:
    events: Events = [
        ev.MessageEnd(USER), ev.MessageEnd(ANSWER), ev.MessageDiscarded("empty"),
        ev.MessageStart(PLACEHOLDER), ev.MessageEnd(ANSWER),
    ]  # fmt: skip
    assert fold_events(events) == (USER, ANSWER)
    assert fold_events([]) == ()


@pytest.mark.parametrize("name", GOOD)
def test_the_fold_of_a_run_is_what_its_end_carries(name: str) -> None:
    events = GOOD[name]
    end = events[-1]
    assert isinstance(end, ev.AgentEnd)
    assert fold_events(events) == tuple(end.messages)


def test_the_fold_goes_on_as_the_events_come() -> None:
    """At every event it is a beginning of what it will be, but for an answer still in question."""
    for events in GOOD.values():
        whole = fold_events(events)
        for end in range(len(events) + 1):
            so_far = fold_events(events[:end])
            assert so_far == whole[: len(so_far)] or so_far[:-1] == whole[: len(so_far) - 1]


def test_shapes_of_good_runs() -> None:
    assert shape(GOOD["terminal"]) == [
        "agent_start", "turn_start", "message_start user", "message_end user",
        "provider_request_prepared", "message_start assistant", "message_update",
        "message_end assistant", "tool_execution_start call_1", "tool_execution_end call_1",
        "message_start tool_result", "message_end tool_result", "turn_end", "agent_end",
    ]  # fmt: skip
