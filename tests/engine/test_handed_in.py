"""Whatever hosts, tools, hooks and transports hand in: the run closes its brackets, and ends with a
result or with an error that carries its messages.

`observed_run` checks the brackets, and that the messages are those of the events.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import logging
import os
import pickle
import sys
import time
import weakref
from collections import UserDict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import clark_agent as ca
from benchmarks.counting import Operations
from clark_agent import events as ev
from clark_agent.engine import pace, supervised
from clark_agent.errors import (
    DecodeError,
    EmptyOutcomeError,
    EventOrderError,
    InvalidArgumentsError,
    InvalidContinuationError,
    MissingFieldError,
    ToolContractError,
)
from clark_agent.messages import encode_json
from clark_agent.replay import replay
from clark_agent.run_log import JsonlStore, MemoryStore, RunLog
from clark_agent.stream import Chunk, Done, Error, Start, TextChunk, ToolCallChunk
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream, call, check_events
from tests.cases import all_cases
from tests.engine.support import (
    CONTEXT,
    PLACEHOLDER,
    Work,
    completed,
    failed,
    let_others_run,
    observed_run,
    results,
    texts,
)

LONE = "report-\udcff.txt"
SAFE = "report-\ufffd.txt"


# --- text that cannot be encoded, details that JSON cannot hold ---------------------------------

READERS: dict[str, dict[str, Any]] = {
    "a budget": {"budget": ca.Budget(tokens=1_000_000)},
    "a token budget": {"plugins": [ca.TokenBudget(100_000)]},
    "a result budget": {"plugins": [ca.ToolResultBudget(10)]},
    "unique ids": {"plugins": [ca.UniqueToolCallIds()]},
    "none": {},
}


@pytest.mark.parametrize("settings", READERS.values(), ids=READERS)
async def test_a_lone_surrogate_becomes_a_replacement_character(settings: dict[str, Any]) -> None:
    result, sink = await completed([call("work"), call("work"), "ok"], Work(does=LONE), **settings)
    assert texts(result)[0] == SAFE
    ends = [e.result.plain_text for e in sink.events if isinstance(e, ev.ToolExecutionEnd)]
    assert ends == [SAFE, SAFE]
    for event in sink.events:
        encode_json(event)


@pytest.mark.parametrize("where", ["prompt", "history", "steering", "answer", "arguments", "error"])
async def test_wherever_it_enters(where: str) -> None:
    said = [ca.UserMessage(LONE)] if where == "steering" else []

    class Steer:
        def next_steering_messages(self) -> list[ca.AgentMessage]:
            return [said.pop()] if said else []

    def fail(args: Any, ctx: Any) -> Any:
        raise FileNotFoundError(LONE)

    arguments = {"path": LONE} if where == "arguments" else {}
    asks = ca.AssistantMessage.from_calls([ca.ToolCall("c", "work", arguments)])
    result, _ = await completed(
        [[Done(asks)], LONE if where == "answer" else "ok"],
        Work(does=fail if where == "error" else "done"),
        prompts=LONE if where == "prompt" else "go",
        context=ca.AgentContext(messages=(ca.UserMessage(LONE),) if where == "history" else ()),
        plugins=[Steer()],
        budget=ca.Budget(tokens=1_000_000),
        max_iterations=3,
        grace_iterations=0,
    )
    assert ca.load_transcript(ca.dump_transcript(result.messages)).malformed == ()
    if where != "history":
        assert "\ufffd" in ca.dump_transcript(result.messages).decode()


async def test_half_a_character_can_be_shown_and_replayed() -> None:
    async def stream(request: Any, signal: Any) -> AsyncIterator[Any]:
        yield Start(PLACEHOLDER)
        yield Chunk(TextChunk("\ud83d"))
        raise OSError("down")

    sink, store = RecordingSink(), MemoryStore()
    config = ca.LoopConfig(stream=stream, event_sink=sink, run_log=RunLog(store))
    with pytest.raises(ca.StreamError):
        await ca.run("go", CONTEXT, config)
    (update,) = [e for e in sink.events if isinstance(e, ev.MessageUpdate)]
    assert json.loads(encode_json(update))["chunk"]["delta"] == "\ud83d"
    (summary,) = store.runs()
    report = await replay(store, summary.run_id, config)
    assert report.is_identical, report


class Odd:
    def __repr__(self) -> str:
        return "<odd>"


class Words(str):
    """Text of a class of its own, as libraries return it."""

    __slots__ = ()


class Count(int):
    pass


class Ratio(float):
    pass


class Unreadable(UserDict[str, int]):
    def __iter__(self) -> Any:
        raise RuntimeError("not today")


PLAIN: dict[str, tuple[Any, Any]] = {
    "a text": ({"t": Words("a")}, {"t": "a"}),
    "a key": ({Words("a"): [Words("b")]}, {"a": ["b"]}),
    "an int": ([Count(5)], [5]),
    "a float": ([Ratio(0.5)], [0.5]),
    "an int of 5,000 digits": ([10**5_000], ["<int>"]),
    "not a number": (float("nan"), None),
    "a mapping that raises": ([Unreadable()], ["{}"]),
}


@pytest.mark.parametrize(("given", "kept"), PLAIN.values(), ids=PLAIN)
async def test_details_of_classes_of_their_own_become_plain(
    given: Any, kept: Any, tmp_path: Path
) -> None:
    made = ca.ToolResult((ca.TextContent(Words("said")),), details=given, narration=Words("told"))
    store = JsonlStore(tmp_path)
    sink = RecordingSink()
    config = ca.LoopConfig(
        stream=ScriptedStream([call("work"), "ok"]),
        tools=[Work(does=made)],
        event_sink=sink,
        budget=ca.Budget(tokens=1_000_000),
        run_log=RunLog(store),
    )
    result = await ca.run("go", CONTEXT, config)
    (message,) = results(result)
    assert message.details == kept
    assert {type(text) for text in (message.plain_text, message.narration)} == {str}
    assert ca.load_transcript(ca.dump_transcript(result.messages)).malformed == ()
    for event in sink.events:
        encode_json(event)
    (summary,) = store.runs()
    report = await replay(store, summary.run_id, config)
    assert report.is_identical, report


@pytest.mark.parametrize("where", ["system prompt", "prompt", "steering", "transform"])
async def test_text_of_a_class_of_its_own_is_logged_as_text(where: str, tmp_path: Path) -> None:
    said = [ca.UserMessage(Words("faster"))] if where == "steering" else []

    class Hooks:
        def next_steering_messages(self) -> list[ca.AgentMessage]:
            return [said.pop()] if said else []

        def transform_context(self, messages: Any, ctx: Any) -> Any:
            return [*messages, ca.UserMessage(Words("more"))] if where == "transform" else messages

    store = JsonlStore(tmp_path)
    await completed(
        ["ok"],
        prompts=Words("go") if where == "prompt" else "go",
        context=ca.AgentContext(Words("be brief") if where == "system prompt" else ""),
        plugins=[Hooks()],
        budget=ca.Budget(tokens=1_000_000),
        run_log=RunLog(store),
    )
    (summary,) = store.runs()
    assert store.load(summary.run_id).problems == ()


def test_a_system_prompt_is_text() -> None:
    with pytest.raises(TypeError, match="system_prompt must be a text, not list"):
        ca.AgentContext(["be brief"])  # type: ignore[arg-type]


LOOP: list[Any] = []
LOOP.append(LOOP)
DETAILS: dict[str, tuple[Any, Any]] = {
    "a path": ({"p": Path("a")}, {"p": repr(Path("a"))}),
    "an object": ([1, Odd()], [1, "<odd>"]),
    "odd keys": ({(1, 2): 3}, {"(1, 2)": 3}),
    "a surrogate": ({"name": LONE, LONE: 1}, {"name": SAFE, SAFE: 1}),
}


@pytest.mark.parametrize(("given", "kept"), DETAILS.values(), ids=DETAILS)
@pytest.mark.parametrize("by", ["tool", "answer", "block", "after", "update"])
async def test_details_that_json_cannot_hold_become_their_repr(
    given: Any, kept: Any, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = ca.ToolResult.text("made", details=given)

    class Hooks:
        def on_before_tool_call(self, ctx: Any) -> Any:
            return {"answer": ca.Answer(made), "block": ca.Block("no", given)}.get(by)

        def on_after_tool_call(self, ctx: Any) -> Any:
            return ca.AfterToolDecision(made) if by == "after" else None

    async def work(args: Any, ctx: ca.ToolContext) -> Any:
        if by == "update":
            await ctx.update(made)
        return made if by == "tool" else "done"

    result, sink = await completed([call("work"), "ok"], Work(does=work), plugins=[Hooks()])
    if by == "update":
        (update,) = [e for e in sink.events if isinstance(e, ev.ToolExecutionUpdate)]
        assert update.partial.details == kept
    else:
        details = results(result)[0].details
        # Who decided is added to details that are an object.
        assert (
            {**details, "decided_by": 0} == {**kept, "decided_by": 0}
            if isinstance(kept, dict)
            else details == kept
        )
    warned = [r for r in caplog.records if "cannot be written as JSON" in r.getMessage()]
    assert len(warned) == (LONE not in given)
    ca.dump_transcript(result.messages)


@pytest.mark.parametrize(("given", "kept"), DETAILS.values(), ids=DETAILS)
async def test_rewritten_arguments_can_be_written(given: Any, kept: Any) -> None:
    got: list[Any] = []

    def work(args: Any, ctx: Any) -> str:
        got.append(args)
        return "done"

    rewrite = ca.FunctionPlugin("before_tool_call", lambda ctx: ca.Rewrite({"value": given}))
    _, sink = await completed([call("work"), "ok"], Work(does=work), plugins=[rewrite])
    assert got == [{"value": kept}]
    for event in sink.events:
        encode_json(event)


async def test_details_within_themselves_can_be_written() -> None:
    result, _ = await completed(
        [call("work"), "ok"], Work(does=ca.ToolResult.text("x", details=LOOP))
    )
    assert ca.load_transcript(ca.dump_transcript(result.messages)).malformed == ()


async def test_a_conversation_can_always_be_saved(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    stream = ScriptedStream([call("work"), "ok"])
    tool = Work(does=ca.ToolResult.text(LONE, details=kept))
    talk = ca.Conversation(ca.LoopConfig(stream=stream, tools=[tool]))
    await talk.send("go")
    kept["later"] = Odd()  # changed behind everybody's back
    talk.save(tmp_path / "talk.json")
    again = ca.Conversation.load(tmp_path / "talk.json", talk.config)
    assert again.context.messages[2].plain_text == SAFE


# --- transports that yield garbage --------------------------------------------------------------

CALL: Any = ca.ToolCall("c", ["work"], {})  # type: ignore[arg-type]
GARBAGE: dict[str, tuple[Any, str]] = {
    "a text for a chunk": (Chunk("text"), "a Chunk must hold a TextChunk"),  # type: ignore[arg-type]
    "a delta that is no text": (Chunk(TextChunk(5)), "TextChunk.delta must be a str"),  # type: ignore[arg-type]
    "a call chunk of odd parts": (Chunk(ToolCallChunk("0")), "a ToolCallChunk needs an index"),  # type: ignore[arg-type]
    "a call chunk of no place": (Chunk(ToolCallChunk(-1)), "a ToolCallChunk needs an index"),
    "a start of nothing": (Start(None), "expected an AssistantMessage, not None"),  # type: ignore[arg-type]
    "no message": (Done("text"), "expected an AssistantMessage"),  # type: ignore[arg-type]
    "no content": (
        Done(ca.AssistantMessage(None, ca.StopReason.END_TURN)),  # type: ignore[arg-type]
        "content must be a tuple",
    ),
    "a name that is a list": (
        Done(ca.AssistantMessage((CALL,), ca.StopReason.TOOL_USE)),
        "ToolCall.name must be a str",
    ),
    "an unknown reason": (
        Done(ca.AssistantMessage((), "bored")),  # type: ignore[arg-type]
        "stop_reason must be one of end_turn",
    ),
    "usage that counts nothing": (
        Done(ca.AssistantMessage((), ca.StopReason.END_TURN, usage={"input": 1})),  # type: ignore[arg-type]
        "usage must be a Usage",
    ),
    "an event of its own": ({"type": "text"}, "must yield Start, Chunk, Done or Error"),
}


@pytest.mark.parametrize("then", ["ends", "fails", "raises", "is cancelled"])
@pytest.mark.parametrize(("event", "says"), GARBAGE.values(), ids=GARBAGE)
async def test_garbage_is_a_fatal_stream_error(event: Any, says: str, then: str) -> None:
    token = ca.CancellationToken()

    async def stream(request: Any, signal: Any) -> AsyncIterator[Any]:
        if not isinstance(event, Start):
            yield Start(PLACEHOLDER)
            yield Chunk(TextChunk("said before"))
        if then == "is cancelled":
            token.cancel()
        yield event
        if then == "fails":
            yield Error(PLACEHOLDER, ca.StreamErrorKind.TRANSIENT, "down")
        if then == "raises":
            raise OSError("down")

    error, _ = await observed_run(stream, signal=token)
    assert isinstance(error, ca.StreamError | ca.RunAborted)
    assert [m.plain_text for m in error.messages] == ["go"]
    if then != "is cancelled":
        assert isinstance(error, ca.StreamError)
        assert (error.kind, says in str(error)) == (ca.StreamErrorKind.FATAL, True), error
    if not isinstance(event, Start):
        assert error.partial is not None
        assert error.partial.plain_text == "said before"


async def test_a_failure_that_is_told_in_garbage_is_told_all_the_same() -> None:
    async def stream(request: Any, signal: Any) -> AsyncIterator[Any]:
        yield Start(PLACEHOLDER)
        yield Chunk(TextChunk("half"))
        yield Error(None, "unheard of", "the cable is cut")  # type: ignore[arg-type]

    error, _ = await failed(ca.StreamError, stream)
    assert error.kind is ca.StreamErrorKind.FATAL
    assert "the cable is cut (of the unknown kind 'unheard of')" in str(error)
    assert error.partial is not None
    assert error.partial.plain_text == "half"


async def test_what_can_be_read_as_it_was_meant_is() -> None:
    message = ca.AssistantMessage(
        [ca.TextContent("fine")],  # type: ignore[arg-type]
        "end_turn",  # type: ignore[arg-type]
        timestamp=12.5,  # type: ignore[arg-type]
        usage=ca.Usage(None, 3.0),  # type: ignore[arg-type]
    )

    async def stream(request: Any, signal: Any) -> AsyncIterator[Any]:
        yield Done(message)

    result, _ = await completed(stream)
    assert result.messages[1] == ca.AssistantMessage(
        (ca.TextContent("fine"),), ca.StopReason.END_TURN, timestamp=12, usage=ca.Usage(0, 3)
    )


# --- exceptions that are no help ----------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this can be said")


def unspeakable(*_: Any) -> Any:
    raise Unspeakable


def leaving(*_: Any) -> Any:
    raise GeneratorExit


async def leaving_later(*_: Any) -> Any:
    await asyncio.sleep(0)
    raise GeneratorExit


HOOKS = (
    "before_tool_call", "after_tool_call", "context_transform", "event_observer", "steering",
    "follow_up", "tool_gate",
)  # fmt: skip


@pytest.mark.parametrize("raises", [unspeakable, leaving, leaving_later])
@pytest.mark.parametrize(
    "where", ["tool", "validate", "transport", "sink", "policy", "recovery", *HOOKS]
)
async def test_an_exception_that_says_nothing(where: str, raises: Callable[..., Any]) -> None:
    class Validated(Work):
        def validate(self, args: Any) -> Any:
            return raises() if where == "validate" and raises is not leaving_later else None

    class Policy(ca.ProtocolPolicy):
        def normalize_tool_calls(self, calls: Any, registry: Any) -> Any:
            return raises() if raises is not leaving_later else calls

    class Recovery:
        def recover(self, messages: Any, ctx: Any) -> Any:
            return raises()

    async def transport(request: Any, signal: Any) -> AsyncIterator[Any]:
        yield Start(PLACEHOLDER)
        if (awaited := raises()) is not None:
            await awaited

    overflow = Error(PLACEHOLDER, ca.StreamErrorKind.CONTEXT_OVERFLOW, "too long")
    model: Any = [call("work"), [Start(PLACEHOLDER), overflow], "ok"]
    settings: dict[str, Any] = {}
    if where in HOOKS:
        settings["plugins"] = [ca.FunctionPlugin(where, raises)]  # type: ignore[arg-type]
    if where == "policy":
        settings["protocol"] = Policy()
    if where == "recovery":
        settings["overflow_recovery"] = Recovery()
    outcome, sink = await observed_run(
        transport if where == "transport" else model,
        Validated(does=raises if where == "tool" else "done"),
        on_event=raises if where == "sink" else None,
        **settings,
    )
    assert isinstance(outcome, ca.RunResult | ca.LoopError), outcome
    assert outcome.messages
    assert sink.types[-1] == "agent_end"


class Stop(BaseException):
    """Neither a failure nor the end of the interpreter."""


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("waits", [False, True])
async def test_a_listener_that_is_done_for_good_is_the_only_one(at: int, waits: bool) -> None:
    heard: list[ev.AgentEvent] = []
    told = 0

    def raises(event: ca.AgentEvent) -> None:
        nonlocal told
        told += 1
        if told > at:
            raise Stop(told)

    async def raises_later(event: ca.AgentEvent) -> None:
        await asyncio.sleep(0)
        raises(event)

    config = ca.LoopConfig(
        stream=ScriptedStream([call("work"), "ok"]),
        tools=[Work()],
        event_sink=raises_later if waits else raises,
        plugins=[ca.FunctionPlugin("event_observer", heard.append)],
    )
    with pytest.raises(Stop) as caught:
        await ca.run("go", CONTEXT, config)
    carried = caught.value.__cause__
    assert isinstance(carried, ca.LoopError)
    assert carried.messages or at < 2
    check_events(heard)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, Stop])
@pytest.mark.parametrize("at", [ev.MessageEnd, ev.TurnEnd, ev.AgentEnd])
async def test_a_listener_that_stops_the_interpreter_while_the_run_is_closed(
    stop: type[BaseException], at: type
) -> None:
    heard: list[ev.AgentEvent] = []
    failing = False

    def listen(event: ca.AgentEvent) -> None:
        nonlocal failing
        heard.append(event)
        failing = failing or isinstance(event, ev.MessageUpdate)
        if failing and isinstance(event, at):
            raise stop

    async def stream(request: Any, signal: Any) -> AsyncIterator[Any]:
        yield Start(PLACEHOLDER)
        yield Chunk(TextChunk("half"))
        raise OSError("down")

    config = ca.LoopConfig(stream=stream, event_sink=listen, clock=FakeClock())
    with pytest.raises(stop) as caught:
        await ca.run("go", CONTEXT, config)
    carried = caught.value.__cause__
    assert isinstance(carried, ca.LoopError)
    assert [m.plain_text for m in carried.messages] == ["go"]
    check_events(heard)


# --- what does not stop -------------------------------------------------------------------------


class Swallowing:
    """Goes on for ever, whoever cancels it, until it is let go."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, *_: Any) -> Any:
        self.began.set()
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                continue


@pytest.mark.parametrize("by", ["token", "task"])
@pytest.mark.parametrize("where", ["transport", "aclose", "sink", "recovery", *HOOKS])
async def test_what_ignores_its_cancellation_is_left_behind(
    where: str, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    swallowing = Swallowing()

    class Recovery:
        recover = swallowing.__call__

    class Stream:
        """Hangs in its first event, or when it is closed."""

        def __init__(self) -> None:
            self.events = iter([Start(PLACEHOLDER)])

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Any:
            for event in self.events:
                return event
            if where == "transport":
                await swallowing()
            else:
                swallowing.began.set()
                await asyncio.Event().wait()
            raise StopAsyncIteration

        async def aclose(self) -> None:
            if where == "aclose":
                await swallowing()

    overflow = Error(PLACEHOLDER, ca.StreamErrorKind.CONTEXT_OVERFLOW, "too long")
    last: Any = [Start(PLACEHOLDER), overflow] if where == "recovery" else "ok"
    scripted = ScriptedStream([call("work"), last])
    model: Any = scripted if where not in ("transport", "aclose") else lambda *_: Stream()
    settings: dict[str, Any] = {}
    if where in HOOKS:
        settings["plugins"] = [ca.FunctionPlugin(where, swallowing.__call__)]  # type: ignore[arg-type]
    if where == "recovery":
        settings["overflow_recovery"] = Recovery()
    heard: list[ev.AgentEvent] = []

    async def sink(event: ca.AgentEvent) -> None:
        heard.append(event)
        if where == "sink" and not swallowing.began.is_set():
            await swallowing()

    config = ca.LoopConfig(
        stream=model, tools=[Work()], event_sink=sink, cancel_grace=0.02, **settings
    )
    token = ca.CancellationToken()
    task = asyncio.create_task(ca.run("go", CONTEXT, config, token))
    await swallowing.began.wait()
    if by == "token":
        token.cancel()
    else:
        task.cancel()
    try:
        await asyncio.wait([task])
        if by == "token":
            assert isinstance(task.exception(), ca.RunAborted)
            assert task.exception().messages  # type: ignore[union-attr]
        else:
            assert task.cancelled()
        check_events(heard)
        assert "was left behind" in caplog.text
    finally:
        swallowing.release.set()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
    assert supervised.left_behind() == 0


def end_quietly() -> None: ...


def fail() -> None:
    raise OSError("interrupted")


def leave() -> None:
    raise GeneratorExit


@pytest.mark.parametrize("by", ["token", "task"])
@pytest.mark.parametrize("end", [end_quietly, fail, leave])
async def test_a_listener_cannot_keep_a_cancellation_to_itself(
    end: Callable[[], None], by: str
) -> None:
    began = asyncio.Event()
    heard: list[ev.AgentEvent] = []

    async def listen(event: ca.AgentEvent) -> None:
        heard.append(event)
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            end()

    config = ca.LoopConfig(stream=ScriptedStream(["ok"]), event_sink=listen, cancel_grace=0.02)
    token = ca.CancellationToken()
    task = asyncio.create_task(ca.run("go", CONTEXT, config, token))
    await began.wait()
    if by == "token":
        token.cancel()
    else:
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() if by == "task" else isinstance(task.exception(), ca.RunAborted)
    check_events(heard)


async def test_a_hook_that_times_out_and_goes_on_is_left_behind() -> None:
    swallowing = Swallowing()
    hook = ca.FunctionPlugin("before_tool_call", swallowing.__call__, name="slow")
    outcome, _ = await observed_run(
        [call("work"), "ok"],
        Work(),
        plugins=[hook],
        hook_timeout=0.01,
        cancel_grace=0.01,
        leaves_tasks=True,
    )
    assert isinstance(outcome, ca.RunResult)
    assert "took longer than 0.01 seconds" in texts(outcome)[0]
    swallowing.release.set()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})


async def test_a_stream_that_was_left_behind_says_nothing_more() -> None:
    """It wakes up in a later turn of the same run."""
    gone, again = asyncio.Event(), asyncio.Event()

    async def stream(request: Any, signal: Any) -> AsyncIterator[Any]:
        yield Start(PLACEHOLDER)
        if len(request.messages) == 1:
            while not gone.is_set():
                try:
                    await gone.wait()
                except asyncio.CancelledError:
                    again.set()
            yield Chunk(TextChunk("late"))
            yield Done(ca.AssistantMessage.from_text("late"))
        else:
            gone.set()
            for _ in range(5):
                await asyncio.sleep(0)
                yield Chunk(TextChunk("new"))
            yield Done(ca.AssistantMessage.from_text("new" * 5))

    steering = ca.ChannelSteering()

    async def steer(event: ca.AgentEvent) -> None:
        if isinstance(event, ev.MessageStart) and isinstance(event.message, ca.AssistantMessage):
            asyncio.get_running_loop().call_soon(
                lambda: None if again.is_set() else steering.handle.steer("stop", "now")
            )

    result, sink = await completed(
        stream, plugins=[steering], on_event=steer, cancel_grace=0.01, leaves_tasks=True
    )
    assert result.text == "new" * 5
    deltas = [e.chunk.delta for e in sink.events if isinstance(e, ev.MessageUpdate)]  # type: ignore[union-attr]
    assert deltas == ["new"] * 5
    await let_others_run()
    assert supervised.left_behind() == 0


# --- others run too -----------------------------------------------------------------------------


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "monotonic", time.monotonic)


@pytest.mark.usefixtures("paced")
@pytest.mark.parametrize(
    "busy", ["turns", "calls", "deltas", "starts", "ignored deltas", "updates"]
)
async def test_a_run_that_never_waits_lets_others_run(busy: str) -> None:
    ticks = 0
    token = ca.CancellationToken()

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 3:
            token.cancel()
        else:
            asyncio.get_running_loop().call_later(0.001, tick)

    async def stream(request: Any, signal: Any) -> AsyncIterator[Any]:
        while busy == "ignored deltas":
            yield Chunk(TextChunk("x"))
        yield Start(PLACEHOLDER)
        while busy == "starts":
            yield Start(PLACEHOLDER)
        while busy == "deltas":
            yield Chunk(TextChunk("x"))
        calls = [ca.ToolCall(str(n), "work", {}) for n in range(5_000 if busy == "calls" else 1)]
        yield Done(ca.AssistantMessage.from_calls(calls))

    tick()
    mode = ca.ExecutionMode.SEQUENTIAL if busy == "calls" else ca.ExecutionMode.PARALLEL

    async def work(args: Any, ctx: ca.ToolContext) -> str:
        while busy == "updates":
            await ctx.update("on it")
        return "done"

    config = ca.LoopConfig(
        stream=stream,
        tools=[Work(does=work)],
        default_execution_mode=mode,
        event_sink=lambda event: None,
    )
    with pytest.raises(ca.RunAborted):  # it goes on for ever unless it is cancelled
        await ca.run("go", CONTEXT, config, token)
    assert ticks == 3


# --- what stops the interpreter -----------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("in_child", [False, True])
def test_a_tool_that_stops_the_interpreter(
    stop: type[BaseException], calls: int, in_child: bool
) -> None:
    async def leave(args: Any, ctx: ca.ToolContext) -> Any:
        await asyncio.sleep(0)
        if args.get("n", 0) == 0:
            raise stop(3)
        await asyncio.Event().wait()

    heard: list[ev.AgentEvent] = []
    batch = [call("leave", n=n) for n in range(calls)]
    config = ca.LoopConfig(
        stream=ScriptedStream([batch], at_end="repeat"), tools=[Work("leave", leave)]
    )
    if in_child:
        config = ca.LoopConfig(
            stream=ScriptedStream([call("ask", task="go")]),
            tools=[ca.agent_tool("ask", "asks", config)],
        )
    config = config.replace(event_sink=heard.append)
    before = _open_event_loops()
    with pytest.raises(stop) as caught:
        ca.run_sync("go", CONTEXT, config)
    check_events(heard)
    carried = caught.value.__cause__
    assert isinstance(carried, ca.LoopError)
    answered = [m for m in carried.messages if isinstance(m, ca.ToolResultMessage)]
    assert len(answered) == (1 if in_child else calls)
    assert _open_event_loops() <= before


def _open_event_loops() -> set[str]:
    """Return the descriptors on which event loops of this process wait."""
    gc.collect()  # loops that others have dropped
    loops = set()
    for entry in os.scandir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile by another thread, or that of the listing
            if "eventpoll" in os.readlink(entry.path):
                loops.add(entry.name)
    return loops


# --- memory -------------------------------------------------------------------------------------


async def test_a_plugin_that_keeps_what_it_is_told_can_be_freed() -> None:
    class Hoarder:
        def __init__(self) -> None:
            self.kept: list[Any] = []

        def on_before_tool_call(self, ctx: Any) -> None:
            self.kept.append(ctx)

        def on_after_tool_call(self, ctx: Any) -> None:
            self.kept.append(ctx)

        def on_event(self, event: Any) -> None:
            self.kept.append(event)

        def transform_context(self, messages: Any, ctx: Any) -> Any:
            self.kept.append(ctx)
            return messages

        def next_turn_tool_allowlist(self, ctx: Any) -> None:
            self.kept.append(ctx)

    class Tool(Work):
        plugin: Any = None

    tool = Tool()
    plugin = tool.plugin = Hoarder()
    config = ca.LoopConfig(
        stream=ScriptedStream([call("work"), "ok"]), tools=[tool], plugins=[plugin]
    )
    await ca.run("go", CONTEXT, config)
    assert len(plugin.kept) > 10
    gone = weakref.ref(plugin)
    del plugin, tool, config
    gc.collect()
    assert gone() is None


# --- growth -------------------------------------------------------------------------------------


async def test_an_unknown_tool_among_ten_thousand() -> None:
    tools = [Work(f"tool_{n:05}") for n in range(10_000)]
    result, _ = await completed([call("tool_0432"), call("nothing like it"), "ok"], *tools)
    near, far = texts(result)
    assert len(near) < 200
    assert "Similar ones are: " in near
    assert "tool_00432" in near
    assert len(far) < 1_000
    assert "and 9,970 more" in far.replace("9970", "9,970")


async def test_a_few_tools_are_all_named() -> None:
    result, _ = await completed([call("wrok"), "ok"], Work("work"), Work("play"))
    assert texts(result) == ["There is no tool 'wrok'. The tools are: work, play."]


async def test_a_cap_takes_no_longer_for_each_of_many_calls() -> None:
    async def operations(calls: int) -> int:
        batch = [call("work", n=n) for n in range(calls)]
        config = ca.LoopConfig(
            stream=ScriptedStream([batch, "ok"]), tools=[Work()], max_tool_calls_per_turn=calls // 2
        )
        with Operations() as counted:
            await asyncio.create_task(ca.run("go", CONTEXT, config))
        return counted.count

    await operations(20)
    assert await operations(400) < 2.2 * await operations(200)


# --- errors that travel -------------------------------------------------------------------------

MESSAGES = (ca.UserMessage("go"), ca.AssistantMessage.from_text("half"))


def errors() -> list[ca.ClarkAgentError]:
    made: list[ca.ClarkAgentError] = [
        ca.StreamError(ca.StreamErrorKind.TRANSIENT, "down"),
        ca.RunAborted("enough"),
        ca.RunAborted(),
        ca.RunStoppedByTool("work", "broken"),
        ca.HookError("gate", "mine", OSError("no")),
        EmptyOutcomeError(1, 2),
        InvalidContinuationError("nothing"),
        DecodeError("bad", path="$.a"),
        EventOrderError(3, "turn_end", "no turn is open"),
        InvalidArgumentsError("work", "no n"),
        MissingFieldError("work", "write", "path"),
        ToolContractError("no result"),
        ca.ConfigError("odd"),
        ca.ToolFatal("stop"),
    ]
    for error in made:
        if isinstance(error, ca.LoopError):
            error.messages, error.turn, error.usage = MESSAGES, 4, ca.Usage(1, 2)
            error.partial = MESSAGES[1]
            error.undelivered = (ca.UserMessage("wait"),)
        error.add_note("In turn 4 of the run.")
        error.__cause__ = ValueError("the cause")
    return made


def pickled(error: Any) -> Any:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("copied", [pickled, copy.copy, copy.deepcopy])
def test_an_error_travels_with_all_that_it_carries(copied: Callable[[Any], Any]) -> None:
    with all_cases() as case:
        for error in errors():
            with case(type(error).__name__):
                arrived = copied(error)
                assert type(arrived) is type(error)
                assert (str(arrived), arrived.args) == (str(error), error.args)
                assert arrived.__dict__ == error.__dict__
                assert repr(arrived.__cause__) == repr(error.__cause__)


def test_a_cause_that_cannot_travel_stays_behind() -> None:
    error = ca.RunAborted("enough")
    error.__cause__ = Unspeakable(sys._getframe())
    arrived = pickle.loads(pickle.dumps(error))
    assert (str(arrived), arrived.__cause__) == (str(error), None)


# --- what happened inside a tool ----------------------------------------------------------------


async def test_the_exception_of_a_tool_is_logged_once_and_at_hand(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Any] = []

    class After:
        def on_after_tool_call(self, ctx: ca.AfterToolCallContext) -> None:
            seen.append(ctx.exception)

    bug = ZeroDivisionError("in the tool")

    def fail(args: Any, ctx: Any) -> Any:
        raise bug

    _, sink = await completed(
        [call("work"), call("fine"), "ok"], Work(does=fail), Work("fine"), plugins=[After()]
    )
    failed_end, fine_end = [e for e in sink.events if isinstance(e, ev.ToolExecutionEnd)]
    assert failed_end.exception is bug
    assert fine_end.exception is None
    assert seen == [bug, None]
    (logged,) = [r for r in caplog.records if "failed" in r.getMessage()]
    assert logged.levelno == logging.WARNING
    assert logged.exc_info is not None
    assert logged.exc_info[1] is bug
    # It is no part of the event.
    plain = ev.ToolExecutionEnd(
        failed_end.tool_call_id, failed_end.tool_name, failed_end.result, failed_end.is_error
    )
    assert failed_end == plain
    assert encode_json(failed_end) == encode_json(plain)
    assert pickle.loads(pickle.dumps(plain)).exception is None
    assert msgspec.structs.replace(failed_end, is_error=True) == plain


async def nothing() -> None: ...


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "must return a ToolResult, not None"),
        ("text", "must return a ToolResult, not a str: 'text'"),
        (nothing, "must return a ToolResult, not a coroutine"),
        (ca.ToolResult("text"), "returned a ToolResult whose content must be a tuple"),  # type: ignore[arg-type]
        (ca.ToolResult((1,)), "returned a ToolResult whose content holds TextContent"),  # type: ignore[arg-type]
    ],
)
async def test_a_bug_in_a_tool_is_told_apart_from_a_failure(
    returned: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ca.AgentTool):
        name = "broken"

        async def execute(self, args: Any, ctx: Any) -> Any:
            return returned() if returned is nothing else returned

    result, sink = await completed([call("broken"), "ok"], Broken())
    assert says in texts(result)[0]
    assert results(result)[0].details == {"kind": "tool_contract_error", "tool": "broken"}
    (end,) = [e for e in sink.events if isinstance(e, ev.ToolExecutionEnd)]
    assert isinstance(end.exception, ToolContractError)
    (logged,) = [r for r in caplog.records if "a bug in the tool" in r.getMessage()]
    assert logged.levelno == logging.ERROR


class Invisible(dict[str, int]):
    """Can be written, but not looked at."""

    def keys(self) -> Any:
        raise RuntimeError("no keys")

    __iter__ = items = keys


@pytest.mark.parametrize("hook", ["after_tool_call", "before_tool_call"])
async def test_details_of_a_hook_that_cannot_be_looked_at_are_kept(hook: Any) -> None:
    result = ca.ToolResult((ca.TextContent("changed"),), details=Invisible(a=1))

    def decide(ctx: Any) -> Any:
        if hook == "after_tool_call":
            return ca.AfterToolDecision(result)
        return ca.Answer(result)

    done, sink = await completed(
        [call("work"), "ok"], Work(), plugins=[ca.FunctionPlugin(hook, decide)]
    )
    check_events(sink.events)
    (told,) = results(done)
    assert told.details["a"] == 1


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_chunk_that_only_looks_like_one_is_dropped(is_cancelled: bool) -> None:
    """Nobody listens, so it is found when the answer is over, or broken off."""

    class Delta:
        delta = "a word"

    token = ca.CancellationToken()

    async def stream(request: Any, signal: Any) -> Any:
        yield Start(ca.AssistantMessage((), ca.StopReason.OTHER))
        yield Chunk(TextChunk("half"))
        yield Chunk(Delta())  # type: ignore[arg-type]
        if is_cancelled:
            token.cancel()
            await asyncio.Event().wait()
        yield Done(ca.AssistantMessage.from_text("half a word"))

    with pytest.raises(ca.RunAborted if is_cancelled else ca.StreamError) as caught:
        await ca.run("go", ca.AgentContext(), ca.LoopConfig(stream=stream), token)
    assert type(caught.value) is not ca.LoopError
    assert caught.value.partial is not None
    assert caught.value.partial.plain_text == "half"
