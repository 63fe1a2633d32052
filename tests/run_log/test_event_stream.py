"""The events that a log implies are those that the run emitted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from clark_agent import (
    AssistantMessage,
    LoopError,
    RunIdentity,
    StopReason,
    ToolCall,
    ToolResult,
    ToolResultMessage,
    UserMessage,
)
from clark_agent import events as ev
from clark_agent.engine.runtime_results import suspended
from clark_agent.events import AgentEvent
from clark_agent.run_log import RunLog, resume
from clark_agent.run_log.event_stream import EventStream
from clark_agent.run_log.records import (
    Answered,
    Asked,
    CallSuspended,
    Entry,
    Record,
    RequestDecided,
    RunBegan,
    RunEnded,
    RunFailed,
    RunResumed,
    RunSuspended,
    ToolEnded,
    ToolStarted,
)
from clark_agent.testing import check_events, fold_events
from clark_agent.waiting import GiveResult, WaitingRequest
from tests.run_log.stories import FAILURES, STORIES, begin, carried, copy_of, told
from tests.run_log.storing import numbered
from tests.run_log.waiting_stories import ROOT, WAITING, live

KINDS = (
    ev.AgentStart,
    ev.RunIdentified,
    ev.TurnStart,
    ev.TurnEnd,
    ev.AgentEnd,
    ev.MessageStart,
    ev.MessageEnd,
    ev.MessageDiscarded,
    ev.ToolExecutionStart,
    ev.ToolExecutionUpdate,
    ev.ToolExecutionEnd,
)


def derived(records: Iterable[Record]) -> list[AgentEvent]:
    stream = EventStream()
    return [event for record in records for event in stream.take(record)]


def parts(events: Iterable[AgentEvent]) -> list[list[AgentEvent]]:
    found: list[list[AgentEvent]] = []
    for event in events:
        if isinstance(event, ev.AgentStart):
            found.append([])
        found[-1].append(event)
    return found


def check_parts(events: Iterable[AgentEvent]) -> None:
    for part in parts(events):
        check_events(part, requests=False)


def comparable(events: Iterable[AgentEvent], started: set[str]) -> list[Any]:
    """What the log has of the events: in a batch, the events of each call, in the order of ends."""
    found: list[Any] = []
    calls: dict[str, list[AgentEvent]] = defaultdict(list)
    for event in events:
        match event:
            case ev.RunIdentified():
                continue  # the log does not have whether the host gave the identity
            case _ if not isinstance(event, KINDS):
                continue
            case ev.ToolExecutionStart(tool_call_id=call_id) if call_id not in started:
                continue  # stopped before its tool ran
            case ev.ToolExecutionStart() | ev.ToolExecutionUpdate() | ev.ToolExecutionEnd():
                calls[event.tool_call_id].append(_with_plain_arguments(event))
                continue
            case _:
                pass
        found += [calls.pop(call_id) for call_id in sorted(calls)]
        found.append(_without_a_made_up_answer(event))
    return _without_an_unknown_turn(found)


def _without_an_unknown_turn(events: list[Any]) -> list[Any]:
    """A turn that failed before anything of it was recorded is not in the log."""
    match events:
        case [*before, ev.TurnEnd(), ev.TurnStart(), ev.TurnEnd(AssistantMessage(())), last]:
            return [*before, events[-4], last]
        case _:
            return events


def _with_plain_arguments(event: Any) -> Any:
    """A policy may have repaired them; the log has what the model wrote."""
    return replace(event, args=None) if isinstance(event, ev.ToolExecutionStart) else event


def _without_a_made_up_answer(event: AgentEvent) -> AgentEvent:
    """The answer of a turn that has none is not in the log."""
    if isinstance(event, ev.TurnEnd):
        message = event.message
        assert isinstance(message, AssistantMessage)
        if not message.content and message.stop_reason in (StopReason.ABORTED, StopReason.ERROR):
            return replace(event, message=replace(message, error_message=None, timestamp=None))
    if isinstance(event, ev.AgentEnd):
        return ev.AgentEnd(tuple(event.messages))
    return event


def started_in(records: Iterable[Record]) -> set[str]:
    return {r.entry.tool_call_id for r in records if isinstance(r.entry, ToolStarted)}


@pytest.mark.parametrize("name", [*STORIES, *FAILURES])
async def test_the_events_of_a_story(name: str) -> None:
    played = await told(name)
    events = derived(played.records)
    check_events(events, requests=False)
    assert list(fold_events(events)) == list(carried(played.outcome))
    started = started_in(played.records)
    assert comparable(events, started) == comparable(played.events, started)


@pytest.mark.parametrize("name", ["batches", "steering", "helpers", "nudges", "finishing"])
async def test_a_run_that_was_killed_goes_on(name: str) -> None:
    """Wherever its process died, nothing is announced twice."""
    played = await told(name)
    for length in range(1, len(played.records)):
        copy = copy_of(played.store, played.run_id, length)
        again = begin(name)
        result = await resume(copy, played.run_id, again.config(RunLog(copy)))
        records = copy.load(played.run_id).records
        events = derived(records)
        assert len(parts(events)) == 1
        check_events(events, requests=False)
        assert list(fold_events(events)) == list(result.messages)
        before = derived(records[:length])
        assert events[: len(before)] == before


@pytest.mark.parametrize("name", ["the_stream_fails", "a_tool_is_fatal", "cancelled_in_a_batch"])
async def test_a_run_that_failed_begins_another_part(name: str) -> None:
    played = await told(name)
    store, again = copy_of(played.store, played.run_id), begin(name)
    with suppress(LoopError):
        await resume(store, played.run_id, again.config(RunLog(store)))
    records = store.load(played.run_id).records
    first, second = parts(derived(records))
    check_events(first, requests=False)
    check_events(second, requests=False)
    started = started_in(records[len(played.records) :])
    assert comparable(second, started) == comparable(again.sink.events, started)


# --- suspended --------------------------------------------------------------------------------

CALLS = (ToolCall("c0", "look", {"n": 0}), ToolCall("c1", "pay", {}), ToolCall("c2", "pay", {}))
ANSWER = AssistantMessage(CALLS, StopReason.TOOL_USE, timestamp=5)
REQUEST = WaitingRequest(
    request_id="r/1/1/x",
    run_id="r",
    root_run_id="r",
    turn=1,
    position=1,
    tool_call_id="c1",
    tool_name="pay",
    asked_by="gate",
    needs="permission",
    asked_at=1,
)


DECIDED = {"plugin": "other", "decision": "rewrite", "args": {"n": 1}}


def logged(*entries: Entry) -> Sequence[Record]:
    return numbered("r", entries)


def test_a_suspended_run_ends_with_placeholders_and_begins_again() -> None:
    done, paid = ToolResult.text("seen"), ToolResult.text("paid")
    identity = RunIdentity("r")
    records = logged(
        RunBegan(identity=identity, prompts=(UserMessage("go", 1),)),
        Asked(turn=1, messages=1, digest="x"),
        Answered(message=ANSWER),
        ToolStarted(position=0, tool_call_id="c0", tool_name="look"),
        ToolEnded(position=0, tool_call_id="c0", result=done),
        CallSuspended(position=1, tool_call_id="c1", request=REQUEST, decisions=(DECIDED,)),
        RunSuspended(time=7),
        RequestDecided(request_id="r/1/1/x", decision=GiveResult("paid")),
        RunResumed(1),
        ToolEnded(position=1, tool_call_id="c1", result=paid),
        ToolStarted(position=2, tool_call_id="c2", tool_name="pay"),
        ToolEnded(position=2, tool_call_id="c2", result=paid),
    )
    waits = suspended("permission", "r", "r/1/1/x")
    held = suspended("held", "r")
    prompt = UserMessage("go", 1)
    placeholders = [
        ToolResultMessage("c0", "look", done.content, timestamp=7),
        ToolResultMessage("c1", "pay", waits.content, details=waits.details, timestamp=7),
        ToolResultMessage("c2", "pay", held.content, details=held.details, timestamp=7),
    ]
    results = [event for m in placeholders for event in (ev.MessageStart(m), ev.MessageEnd(m))]
    first, second = parts(derived(records))
    assert first == [
        ev.AgentStart(),
        ev.RunIdentified(identity),
        ev.TurnStart(),
        ev.MessageStart(prompt),
        ev.MessageEnd(prompt),
        ev.MessageStart(ANSWER),
        ev.MessageEnd(ANSWER),
        ev.ToolExecutionStart("c0", "look", {"n": 0}),
        ev.ToolExecutionEnd("c0", "look", done, False),
        ev.ToolExecutionEnd("c1", "pay", waits, False),
        ev.ToolExecutionEnd("c2", "pay", held, False),
        *results,
        ev.TurnEnd(ANSWER, tuple(placeholders)),
        ev.AgentEnd((prompt, ANSWER, *placeholders)),
    ]
    check_events(first, requests=False)
    assert second == [
        ev.AgentStart(),
        ev.RunIdentified(identity),
        ev.TurnStart(),
        ev.MessageStart(ANSWER),
        ev.MessageEnd(ANSWER),
        ev.ToolExecutionEnd("c0", "look", done, False),
        ev.ToolExecutionEnd("c1", "pay", paid, False),
        ev.ToolExecutionStart("c2", "pay", {}),
        ev.ToolExecutionEnd("c2", "pay", paid, False),
    ]


def test_the_placeholders_say_what_a_call_waits_for() -> None:
    assert suspended("result", "r", "q").plain_text == "The call waits for its result."
    assert suspended("child", "r").details == {
        "kind": "suspended",
        "run_id": "r",
        "request_id": None,
        "reason": "child",
    }
    assert not suspended("held", "r").is_error


def test_nothing_follows_an_end() -> None:
    began = RunBegan(identity=RunIdentity("r"))
    failed = RunFailed(error="RunAborted", text="aborted")
    for ending in (RunEnded(outcome="done"), failed):
        events = derived(logged(began, ending, ending))
        check_events(events, requests=False)


@pytest.mark.parametrize("name", [*WAITING])
async def test_the_events_of_a_run_that_waits(name: str) -> None:
    _, _, store, theirs = await live(name)
    for summary in store.runs():
        check_parts(derived(store.load(summary.run_id).records))
    records = store.load(ROOT).records
    started = started_in(records)
    for ours, emitted in zip(parts(derived(records)), theirs, strict=True):
        assert comparable(ours, started) == comparable(emitted, started)
