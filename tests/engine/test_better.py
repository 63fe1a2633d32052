"""Where this loop is better than the crate that it comes from: one test for every such promise.

Each of them fails on the crate's behaviour. The other files of this folder go into the details.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from clark_agent import (
    Answer,
    AssistantMessage,
    BeforeToolCallContext,
    Block,
    CancellationToken,
    ExecutionMode,
    FunctionPlugin,
    HookError,
    LoopConfig,
    LoopError,
    LoopOutcome,
    MaxTokensRecovery,
    ProtocolPolicy,
    Rewrite,
    RunAborted,
    RunStoppedByTool,
    StopReason,
    StreamError,
    StreamEvent,
    StreamRequest,
    SystemMessage,
    TextContent,
    TokenBudget,
    ToolAborted,
    ToolCall,
    ToolContext,
    ToolFatal,
    ToolGateContext,
    ToolResult,
    ToolResultBudget,
    ToolResultMessage,
    UserMessage,
    engine,
    run,
)
from clark_agent import events as ev
from clark_agent.audience import Audience
from clark_agent.engine.emitter import Emitter
from clark_agent.engine.run import Run
from clark_agent.errors import EmptyOutcomeError
from clark_agent.history import repair_history
from clark_agent.plugins.hooks import Hooks
from clark_agent.stream import Chunk, Done, Start, TextChunk
from clark_agent.testing import RecordingSink, ScriptedStream, Step, call, check_events, fold_events
from tests.engine.support import (
    CONTEXT,
    FINISH,
    PLACEHOLDER,
    Waiting,
    Work,
    carried,
    completed,
    decided,
    done,
    failed,
    failing,
    observed_run,
    outline,
    results,
    shape,
    text_of,
    texts,
    truncated,
)

PROMPTED = ["agent_start", "turn_start", "message_start user", "message_end user"]
ASKED = ["provider_request_prepared", "message_start assistant"]


def answered(calls: int = 1) -> list[str]:
    """An answer that calls so many tools, each in one delta."""
    return [*ASKED, *["message_update"] * calls, "message_end assistant"]


DISCARDED = ["message_end assistant", "message_discarded"]
RESULT = ["message_start tool_result", "message_end tool_result"]
CLOSED = ["turn_end", "agent_end"]


def crash(*_: object) -> Any:
    raise RuntimeError("a bug in the host")


# --- brackets always close ----------------------------------------------------------------------


async def test_brackets_close_on_abort_while_the_model_streams() -> None:
    signal = CancellationToken()

    async def model(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        yield Chunk(TextChunk("Well"))
        signal.cancel("enough")
        await asyncio.Event().wait()

    error, sink = await failed(RunAborted, model, signal=signal)
    assert error.reason == "enough"
    assert shape(sink.events) == [*PROMPTED, *ASKED, "message_update", *DISCARDED, *CLOSED]


async def test_brackets_close_on_abort_while_tools_run() -> None:
    signal, one, two = CancellationToken(), Waiting(), Waiting()

    async def cancel(args: Any, ctx: ToolContext) -> ToolResult:
        await one.started.wait()
        await two.started.wait()
        signal.cancel()
        return ToolResult.text("cancelled it")

    calls = [call("one"), call("two"), call("cancel")]
    error, sink = await failed(
        RunAborted, [calls], Work("one", one), Work("two", two), Work("cancel", cancel),
        signal=signal,
    )  # fmt: skip
    starts = [f"tool_execution_start call_{n}" for n in (1, 2, 3)]
    begun = [*PROMPTED, *answered(3), *starts]
    assert shape(sink.events)[: len(begun)] == begun
    ends = shape(sink.events)[len(begun) :][:3]
    assert sorted(ends) == [f"tool_execution_end call_{n}" for n in (1, 2, 3)]
    assert shape(sink.events)[-8:] == [*RESULT * 3, *CLOSED]
    assert texts(error)[2] == "cancelled it"
    assert (one.cancelled, two.cancelled) == (True, True)


@pytest.mark.parametrize("kind", ["transient", "provider_rate_limited", "fatal"])
async def test_brackets_close_on_a_stream_error(kind: str) -> None:
    error, sink = await failed(StreamError, [failing(kind, "no luck", "Well")])
    assert (error.kind, error.message) == (kind, "no luck")
    assert shape(sink.events) == [*PROMPTED, *ASKED, "message_update", *DISCARDED, *CLOSED]


@pytest.mark.parametrize("mode", list(ExecutionMode))
@pytest.mark.parametrize("error", [ToolFatal("broken"), ToolAborted("broken")])
async def test_brackets_close_on_a_fatal_tool(mode: ExecutionMode, error: Exception) -> None:
    kind = RunStoppedByTool if isinstance(error, ToolFatal) else RunAborted
    raised, sink = await failed(
        kind, [[call("bad"), call("work")]], Work("bad", error), Work(),
        default_execution_mode=mode,
    )  # fmt: skip
    assert raised.__cause__ is error
    types = shape(sink.events)
    begun = [*PROMPTED, *answered(2)]
    assert types[: len(begun)] == begun
    assert types[-6:] == [*RESULT * 2, *CLOSED]
    ended = [event.tool_call_id for event in sink.of(ev.ToolExecutionEnd)]
    assert sorted(ended) == ["call_1", "call_2"]


async def test_brackets_close_on_a_crash_of_a_gate() -> None:
    error, sink = await failed(HookError, ["unheard"], plugins=[FunctionPlugin("tool_gate", crash)])
    assert isinstance(error.__cause__, RuntimeError)
    assert shape(sink.events) == [*PROMPTED, *CLOSED]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("place", ["before_tool_call", "after_tool_call", "tool", "stream"])
async def test_brackets_close_when_the_process_is_interrupted(
    stop: type[BaseException], place: str
) -> None:
    def interrupt(*_: object) -> Any:
        raise stop

    plugins = []
    if place == "before_tool_call":
        plugins = [FunctionPlugin("before_tool_call", interrupt)]
    elif place == "after_tool_call":
        plugins = [FunctionPlugin("after_tool_call", interrupt)]
    outcome, sink = await observed_run(
        [interrupt if place == "stream" else call("work")],
        Work("work", interrupt if place == "tool" else "done"),
        plugins=plugins,
    )
    assert type(outcome) is stop
    if place == "stream":
        assert shape(sink.events) == [*PROMPTED, "provider_request_prepared", *CLOSED]
    else:
        start = [] if place == "before_tool_call" else ["tool_execution_start call_1"]
        tool = [*start, "tool_execution_end call_1"]
        assert shape(sink.events) == [*PROMPTED, *answered(), *tool, *RESULT, *CLOSED]
    assert repair_history(fold_events(sink.events)).changes == ()


# --- message events -----------------------------------------------------------------------------


async def test_tool_results_have_message_events() -> None:
    result, sink = await completed([[call("work"), call("nope")], "ok"], Work())
    told = [e.message for e in sink.of(ev.MessageEnd) if isinstance(e.message, ToolResultMessage)]
    assert told == results(result)
    assert [m.tool_call_id for m in told] == ["call_1", "call_2"]


async def test_runtime_notes_have_message_events() -> None:
    """A nudge, a synthesized result, and the message of the turn limit."""
    nudged, sink = await completed(
        ["Let me see.", "The answer is 42.", "Done."],
        plain_text_terminal_fallback_tool="deliver",
        plain_text_terminal_fallback_eager=True,
        plain_text_terminal_fallback_eager_nudge=True,
    )
    assert [text_of(e.message) for e in sink.of(ev.MessageStart)] == [
        "go", "", text_of(nudged.messages[2]), "", text_of(nudged.messages[4]), "", "Let me see.",
    ]  # fmt: skip
    assert isinstance(nudged.messages[2], SystemMessage)
    assert isinstance(nudged.messages[-1], ToolResultMessage)

    _, sink = await completed([call("work"), "ok"], Work(), max_iterations=2, grace_iterations=1)
    notes = [e.message for e in sink.of(ev.MessageEnd) if isinstance(e.message, SystemMessage)]
    assert len(notes) == 1


# --- tool_execution_start -----------------------------------------------------------------------


async def test_tool_execution_start_comes_after_lookup_validation_and_hooks() -> None:
    log: list[str] = []

    class Careful(Work):
        def validate(self, args: Any) -> None:
            log.append("validate")

        async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
            log.append("execute")
            return ToolResult.text("done")

    def before(ctx: BeforeToolCallContext) -> None:
        log.append("before")

    def on_event(event: ev.AgentEvent) -> None:
        if isinstance(event, ev.ToolExecutionStart):
            log.append("start")

    await completed(
        [call("work"), "ok"], Careful(), on_event=on_event,
        plugins=[FunctionPlugin("before_tool_call", before)],
    )  # fmt: skip
    assert log == ["validate", "before", "start", "execute"]


async def test_a_call_that_is_refused_has_no_tool_execution_start() -> None:
    def before(ctx: BeforeToolCallContext) -> Block | Answer | None:
        match ctx.tool_call.name:
            case "blocked":
                return Block("no")
            case "answered":
                return Answer(ToolResult.text("yes"))
            case _:
                return None

    def gate(ctx: ToolGateContext) -> set[str]:
        return set(ctx.available_tool_names) - {"hidden"}

    broken = ToolCall("m", "work", {"__clark_arg_parse_error": "eof", "__clark_arg_raw": "{"})
    calls = [
        call("unknown", call_id="u"), call("hidden", call_id="h"), broken,
        call("strict", call_id="v"), call("blocked", call_id="b"), call("answered", call_id="a"),
    ]  # fmt: skip
    tools = [Work("strict", require="x"), *[Work(n) for n in ("hidden", "work", "blocked")]]
    result, sink = await completed(
        [calls, "ok"], *tools, Work("answered"),
        plugins=[FunctionPlugin("before_tool_call", before), FunctionPlugin("tool_gate", gate)],
    )  # fmt: skip
    assert sink.of(ev.ToolExecutionStart) == []
    ended = [event.tool_call_id for event in sink.of(ev.ToolExecutionEnd)]
    assert ended == ["u", "h", "m", "v", "b", "a"]
    assert [r.is_error for r in results(result)] == [True] * 5 + [False]


# --- message_discarded --------------------------------------------------------------------------


class KeepLast:
    name = "keep_last"

    def recover(self, messages: Any, ctx: Any) -> Any:
        return messages[-1:]


DISCARDS: dict[str, tuple[list[Any], dict[str, Any], list[str]]] = {
    "truncated": (
        [truncated(), "whole"],
        {"max_output_tokens": 10, "max_output_tokens_recovery": MaxTokensRecovery()},
        ["truncated"],
    ),
    "no terminal event": ([[Start(PLACEHOLDER)], "whole"], {}, ["empty"]),
    "kind empty": ([failing("empty"), [], "whole"], {}, ["empty", "empty"]),
    "zero output": ([failing("zero_output_transport"), "whole"], {}, ["zero_output_transport"]),
    "overflow": (
        [failing("context_overflow", "too long", "We"), "whole"],
        {"overflow_recovery": KeepLast(), "prompts": [UserMessage("x" * 99), UserMessage("y")]},
        ["context_overflow"],
    ),
    "failed": ([failing("transient", "gone", "We")], {}, ["transient"]),
    "failed without a start": ([failing("fatal", started=False)], {}, ["fatal"]),
    "aborted": ([failing("aborted", "stop", "We")], {}, ["aborted"]),
    "raised": ([OSError("no network")], {}, ["fatal"]),
}


@pytest.mark.parametrize("name", DISCARDS)
async def test_message_discarded_follows_every_message_that_does_not_enter(name: str) -> None:
    script, settings, reasons = DISCARDS[name]
    outcome, sink = await observed_run(script, **settings)
    assert [event.reason for event in sink.of(ev.MessageDiscarded)] == reasons
    places = [i for i, kind in enumerate(sink.types) if kind == "message_discarded"]
    dropped = [sink.events[i - 1] for i in places]
    messages = carried(outcome)
    assert messages is not None
    for event in dropped:
        assert isinstance(event, ev.MessageEnd)
        assert isinstance(event.message, AssistantMessage)
        assert event.message not in messages
    # The fold is compared by every observed run; here only that there was something to fold.
    assert len(sink.of(ev.MessageEnd)) == len(messages) + len(reasons)


# --- the partial --------------------------------------------------------------------------------


async def test_a_half_streamed_message_is_the_partial_and_not_among_the_messages() -> None:
    error, sink = await failed(StreamError, [failing("transient", "gone", "Half ", "a th")])
    (_, end) = sink.of(ev.MessageEnd)
    assert error.partial == end.message
    assert error.partial == AssistantMessage(
        (TextContent("Half a th"),), StopReason.ERROR, "gone", timestamp=1_000_000
    )
    assert outline(error.messages) == ["user: go"]


async def test_an_aborted_message_is_the_partial_and_not_among_the_messages() -> None:
    signal = CancellationToken()

    def cancel_at_third_word(event: ev.AgentEvent) -> None:
        if event == ev.MessageUpdate(PLACEHOLDER, TextChunk("three ")):
            signal.cancel()

    async def model(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        for word in ("one ", "two ", "three ", "four"):
            yield Chunk(TextChunk(word))
            await asyncio.sleep(0)
        yield Done(AssistantMessage.from_text("one two three four"))

    error, sink = await failed(RunAborted, model, signal=signal, on_event=cancel_at_third_word)
    assert error.partial is not None
    assert error.partial.plain_text == "one two three "
    assert error.partial.stop_reason is StopReason.ABORTED
    assert sink.of(ev.MessageEnd)[-1].message == error.partial
    assert outline(error.messages) == ["user: go"]


# --- parallel batches ---------------------------------------------------------------------------


async def test_parallel_tools_end_as_they_finish_and_their_messages_keep_their_order() -> None:
    ends = {name: asyncio.Event() for name in "abc"}

    def tool(name: str, after: str | None) -> Work:
        async def work(args: Any, ctx: ToolContext) -> ToolResult:
            if after is not None:
                await ends[after].wait()
            return ToolResult.text(name)

        return Work(name, work)

    def on_event(event: ev.AgentEvent) -> None:
        if isinstance(event, ev.ToolExecutionEnd):
            ends[event.tool_name].set()

    result, sink = await completed(
        [[call("a"), call("b"), call("c")], "ok"], tool("a", "b"), tool("b", "c"), tool("c", None),
        on_event=on_event,
    )  # fmt: skip
    assert [event.tool_name for event in sink.of(ev.ToolExecutionEnd)] == ["c", "b", "a"]
    assert texts(result) == ["a", "b", "c"]
    assert [r.tool_name for r in sink.of(ev.TurnEnd)[0].tool_results] == ["a", "b", "c"]


# --- transports without a start -----------------------------------------------------------------


async def test_every_message_end_has_its_start_also_when_only_done_comes() -> None:
    answer = AssistantMessage.from_text("all at once")
    _, sink = await completed([done(answer)])
    assert shape(sink.events) == [*PROMPTED, *answered(0), *CLOSED]
    assert [event.message for event in sink.of(ev.MessageStart)][1] == answer


# --- the grammar is code ------------------------------------------------------------------------


async def test_the_grammar_is_code_that_users_can_run_on_what_they_recorded() -> None:
    sink = RecordingSink()
    await run("go", CONTEXT, LoopConfig(stream=ScriptedStream(["ok"]), event_sink=sink))
    check_events(sink.events)
    with pytest.raises(AssertionError, match=r"event 1 \(message_start\)"):
        check_events([sink.events[0], *sink.events[2:]])


# --- nobody pays for listeners that are not there -----------------------------------------------


def engine_modules() -> list[str]:
    return [f"clark_agent.engine.{module.name}" for module in iter_modules(engine.__path__)]


def counted_events(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the events that the loop makes for listeners alone, where it makes them."""
    made: Counter[str] = Counter()

    def counting(kind: Any) -> Any:
        def make(*args: Any, **fields: Any) -> Any:
            made[kind.__name__] += 1
            return kind(*args, **fields)

        return make

    for module in map(import_module, engine_modules()):
        for name in ("MessageUpdate", "ToolExecutionUpdate", "ChildRunEvent"):
            kind = getattr(module, name, None)
            if isinstance(kind, type) and issubclass(kind, ev._Event):
                monkeypatch.setattr(module, name, counting(kind))
    return made


async def talkative(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
    yield Start(PLACEHOLDER)
    for _number in range(10_000):
        yield Chunk(TextChunk("word "))
    yield Done(AssistantMessage.from_text("word " * 10_000))


@pytest.mark.parametrize("in_thread", [False, True])
async def test_without_listeners_progress_is_not_even_reported(
    monkeypatch: pytest.MonkeyPatch, in_thread: bool
) -> None:
    """A thread does not wait for the event loop to tell nobody."""
    told: list[str] = []

    def spy(self: Run, ctx: ToolContext, partial: ToolResult) -> Awaitable[None]:
        told.append(partial.plain_text)
        return self.emit(ev.ToolExecutionUpdate(ctx.tool_call_id, ctx.tool_name, partial))

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        if in_thread:
            _ = await asyncio.to_thread(ctx.update, "half")
        else:
            await ctx.update("half")
        return ToolResult.text("done")

    monkeypatch.setattr(Run, "report", spy)
    for sink, wanted in ((None, []), (RecordingSink(), ["half"])):
        stream = ScriptedStream([call("work"), "ok"])
        config = LoopConfig(stream=stream, tools=[Work("work", work)], event_sink=sink)
        assert (await run("go", CONTEXT, config)).text == "ok"
        assert told == wanted


async def test_without_listeners_a_delta_costs_no_event_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = counted_events(monkeypatch)
    await run("go", CONTEXT, LoopConfig(stream=talkative))
    assert made["MessageUpdate"] == 0

    await run("go", CONTEXT, LoopConfig(stream=talkative, event_sink=RecordingSink()))
    assert made["MessageUpdate"] == 10_000  # the count does count


async def test_without_listeners_no_event_object_is_made_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def progress(args: Any, ctx: ToolContext) -> ToolResult:
        await ctx.update("half")
        return ToolResult.text("done")

    class Everything:
        def transform_context(self, messages: Any, ctx: Any) -> Any:
            return messages

        def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> set[str]:
            return set(ctx.available_tool_names)

    made = counted_events(monkeypatch)
    stream: list[Step] = [truncated(), [call("work"), call("work"), call("nope")], "ok"]
    config = LoopConfig(
        stream=ScriptedStream(stream),
        tools=[Work("work", progress)],
        plugins=[Everything()],
        max_output_tokens=10,
        max_output_tokens_recovery=MaxTokensRecovery(),
    )
    await run("go", CONTEXT, config)
    assert not made
    with pytest.raises(StreamError):
        await run("go", CONTEXT, config.replace(stream=ScriptedStream([failing("fatal")])))
    assert not made


async def test_an_observer_gets_and_pays_for_what_it_wants_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Turns:
        observes = (ev.TurnEnd,)

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_event(self, event: ev.AgentEvent) -> None:
            self.seen.append(event)

    turns = Turns()
    emitter = Emitter(Audience(None, Hooks.of([turns]).event_observer))
    assert emitter.listeners(ev.MessageUpdate) == ()
    assert [listener.name for listener in emitter.listeners(ev.TurnEnd)] == ["turns"]

    config = LoopConfig(stream=ScriptedStream([call("x"), "a b c"]), plugins=[turns])
    await run("go", CONTEXT, config)
    assert [type(event) for event in turns.seen] == [ev.TurnEnd, ev.TurnEnd]


# --- the cap ------------------------------------------------------------------------------------


async def test_steering_that_can_no_longer_be_delivered_comes_back_undelivered() -> None:
    waiting = iter([[], [UserMessage("one more thing")]])
    steering = FunctionPlugin("steering", lambda: next(waiting))
    result, _ = await completed([call("work")], Work(), plugins=[steering], max_iterations=1)
    assert result.undelivered == (UserMessage("one more thing"),)
    assert result.outcome is LoopOutcome.HIT_MAX_ITERATIONS
    assert outline(result.messages) == ["user: go", "assistant: ", "tool_result: done"]


async def test_hit_max_iterations_only_when_the_loop_would_have_gone_on() -> None:
    capped: dict[str, Any] = {"max_iterations": 2, "grace_iterations": 0}
    clean, _ = await completed([call("work"), "ok"], Work(), **capped)
    assert clean.outcome is LoopOutcome.DONE
    voted, _ = await completed([call("work"), call("finish")], Work(), FINISH, **capped)
    assert voted.outcome is LoopOutcome.DONE
    warned, _ = await completed([call("work"), "ok"], Work(), max_iterations=2, grace_iterations=1)
    assert warned.outcome is LoopOutcome.WRAPPED_UP
    cut, _ = await completed([call("work"), call("work")], Work(), **capped)
    assert cut.outcome is LoopOutcome.HIT_MAX_ITERATIONS
    assert not cut.outcome.is_complete


# --- truncated calls ----------------------------------------------------------------------------


async def test_tool_calls_of_a_max_tokens_turn_are_never_executed() -> None:
    tool = Work()
    cut = truncated("", call("work", call_id="a", text="rm -rf /tm"), call("nope", call_id="b"))
    result, sink = await completed([cut, "ok"], tool, FINISH, max_tool_calls_per_turn=1)
    assert tool.calls == []
    assert sink.of(ev.ToolExecutionStart) == []
    for message in results(result):
        assert message.is_error
        assert "cut off" in message.plain_text
        assert message.details == {"kind": "tool_call_not_executed", "reason": "max_tokens"}
    assert [m.tool_call_id for m in results(result)] == ["a", "b"]


# --- settings -----------------------------------------------------------------------------------


async def test_force_tool_call_is_off_by_default() -> None:
    stream = ScriptedStream(["ok"])
    await completed(stream)
    assert [request.force_tool_call for request in stream.requests] == [False]
    stream = ScriptedStream([call("work"), "ok"])
    await completed(stream, Work(), force_tool_call=True)
    assert [request.force_tool_call for request in stream.requests] == [True, True]


async def test_asking_for_permission_is_recognised_by_the_policy() -> None:
    class German(ProtocolPolicy):
        def asks_permission(self, text: str) -> bool:
            return text.startswith("Soll ich")

    script = ["Soll ich anfangen?", "Die Antwort ist 42.", "Soll ich weitermachen?"]
    settings: dict[str, Any] = {
        "plain_text_terminal_fallback_tool": "deliver",
        "plain_text_terminal_fallback_eager": True,
        "plain_text_terminal_fallback_eager_nudge": True,
    }
    result, _ = await completed(script, protocol=German(), **settings)
    assert texts(result) == ["Die Antwort ist 42."]
    english, _ = await completed(script, **settings)
    assert texts(english) == ["Soll ich anfangen?"]


# --- errors carry what the run had --------------------------------------------------------------


class Unpolicy(ProtocolPolicy):
    def normalize_tool_calls(self, calls: Any, registry: Any) -> Any:
        raise RuntimeError("a bug in the host")


TWO_CALLS = [call("work"), call("bad")]
ERRORS: dict[str, tuple[type[LoopError], list[Any], dict[str, Any]]] = {
    "stream error": (StreamError, [TWO_CALLS, failing("fatal", "no", "We")], {}),
    "stream raises": (StreamError, [TWO_CALLS, OSError("no network")], {}),
    "done with an error": (
        StreamError,
        [TWO_CALLS, AssistantMessage((call("work", call_id="z"),), StopReason.ERROR, "overloaded")],
        {},
    ),
    "done aborted": (RunAborted, [TWO_CALLS, AssistantMessage((), StopReason.ABORTED)], {}),
    "fatal tool": (RunStoppedByTool, [[call("work"), call("fatal"), call("work")]], {}),
    "fatal tool in sequence": (
        RunStoppedByTool,
        [[call("work"), call("fatal"), call("work")]],
        {"default_execution_mode": "sequential"},
    ),
    "tool aborts": (RunAborted, [[call("work"), call("abort"), call("work")]], {}),
    "policy raises": (HookError, [TWO_CALLS], {"protocol": Unpolicy()}),
    "gate raises": (
        HookError,
        [TWO_CALLS, "unheard"],
        {"plugins": [FunctionPlugin("tool_gate", lambda c: None if c.iteration == 0 else crash())]},
    ),
    "empty outcome": (EmptyOutcomeError, [TWO_CALLS, "ok"], {"empty_outcome_retry_budget": 0}),
}


@pytest.mark.parametrize("name", ERRORS)
async def test_errors_carry_messages_that_a_provider_takes(name: str) -> None:
    kind, script, settings = ERRORS[name]
    tools = [
        Work(),
        Work("bad", ValueError("no")),
        Work("fatal", ToolFatal("broken")),
        Work("abort", ToolAborted("enough")),
    ]
    error, _ = await failed(kind, script, *tools, **settings)
    # Every observed run is checked for validity; here: nothing that had happened is missing.
    assert isinstance(error, LoopError)
    calls = [c.id for m in error.messages if isinstance(m, AssistantMessage) for c in m.tool_calls]
    assert calls
    assert [r.tool_call_id for r in results(error)] == calls
    # The next run goes on from there.
    context = CONTEXT.extend(error)
    stream = ScriptedStream(["here we are"])
    again, _ = await completed(stream, *tools, context=context, prompts="and now?")
    assert again.text == "here we are"
    assert stream.requests[0].messages == [*error.messages, again.messages[0]]


# --- BeforeToolCall -----------------------------------------------------------------------------


async def test_before_tool_call_can_rewrite_the_arguments() -> None:
    def redirect(ctx: BeforeToolCallContext) -> Rewrite:
        return Rewrite({"path": "/workspace/" + ctx.args["path"]})

    tool = Work("read", lambda args, ctx: f"read {args['path']}", require="path")
    result, sink = await completed(
        [call("read", path="notes"), "ok"], tool,
        plugins=[FunctionPlugin("before_tool_call", redirect, name="jail")],
    )  # fmt: skip
    assert tool.calls == [{"path": "/workspace/notes"}]
    assert texts(result) == ["read /workspace/notes"]
    # The transcript and the start event keep what the model said; the details say what ran.
    asked = result.messages[1]
    assert isinstance(asked, AssistantMessage)
    assert asked.tool_calls[0].arguments == {"path": "notes"}
    assert sink.of(ev.ToolExecutionStart)[0].args == {"path": "notes"}
    assert results(result)[0].details == {
        "decided_by": [
            {"plugin": "jail", "decision": "rewrite", "args": {"path": "/workspace/notes"}}
        ]
    }


async def test_rewritten_arguments_are_prepared_and_validated_again() -> None:
    def spoil(ctx: BeforeToolCallContext) -> Rewrite:
        return Rewrite({"file": "x"})

    def prepare(args: Any) -> Any:
        return {**args, "prepared": True}

    tool = Work("read", require="path", prepare=prepare)
    result, sink = await completed(
        [call("read", path="notes"), "ok"], tool,
        plugins=[FunctionPlugin("before_tool_call", spoil, name="spoiler")],
    )  # fmt: skip
    assert tool.calls == []
    assert sink.of(ev.ToolExecutionStart) == []
    (message,) = results(result)
    assert message.is_error
    assert "'path' is missing" in message.plain_text
    assert message.details["decided_by"] == [
        {"plugin": "spoiler", "decision": "rewrite", "args": {"file": "x", "prepared": True}}
    ]


async def test_before_tool_call_can_answer_in_the_tools_stead() -> None:
    answer = ToolResult.text("from the cache", details={"age": 3}).with_narration("Looked it up.")
    tool = Work()
    result, sink = await completed(
        [call("work"), "ok"], tool,
        plugins=[FunctionPlugin("before_tool_call", lambda ctx: Answer(answer), name="cache")],
    )  # fmt: skip
    assert tool.calls == []
    assert sink.of(ev.ToolExecutionStart) == []
    (message,) = results(result)
    assert (message.plain_text, message.is_error) == ("from the cache", False)
    assert message.narration == "Looked it up."
    assert message.details["age"] == 3
    assert decided(message) == [("cache", "answer")]


# --- siblings -----------------------------------------------------------------------------------


async def test_in_sequence_a_failure_that_aborts_siblings_skips_the_rest() -> None:
    first, last = Work("first"), Work("last")
    result, sink = await completed(
        [[call("first"), call("bad"), call("last"), call("last")], "ok"],
        first, Work("bad", ValueError("no"), aborts_siblings_on_error=True), last,
        default_execution_mode="sequential",
    )  # fmt: skip
    assert (len(first.calls), len(last.calls)) == (1, 0)
    assert [r.is_error for r in results(result)] == [False, True, True, True]
    assert [event.tool_name for event in sink.of(ev.ToolExecutionStart)] == ["first", "bad"]
    assert [event.tool_name for event in sink.of(ev.ToolExecutionEnd)] == [
        "first", "bad", "last", "last",
    ]  # fmt: skip
    assert result.outcome is LoopOutcome.DONE  # it never ends the run by itself


# --- budgets ------------------------------------------------------------------------------------


class Characters:
    """A token is a character of text."""

    def estimate_message(self, message: Any) -> int:
        return len(text_of(message))


async def test_token_budget_trims_below_its_trigger_so_that_the_prefix_stays() -> None:
    stream = ScriptedStream([*[call("work")] * 8, "ok"])
    budget = TokenBudget(1000, trim_trigger=0.5, trim_target=0.25, truncation_marker="-")
    result, _ = await completed(
        stream, Work("work", "x" * 100), plugins=[budget], token_estimator=Characters()
    )
    trimmed = [
        [text_of(m) == "-" for m in request.messages if isinstance(m, ToolResultMessage)].count(
            True
        )
        for request in stream.requests
    ]
    # Five results of 100 exceed 500; trimmed to 250 they last until the next three have come.
    assert trimmed == [0, 0, 0, 0, 0, 3, 3, 3, 6]
    assert texts(result) == ["x" * 100] * 8  # the transcript keeps them


async def test_tool_result_budget_never_clips_the_newest_batch() -> None:
    long = "head" + "x" * 300 + "tail"
    stream = ScriptedStream([[call("work"), call("kept")], call("work"), "ok"])
    result, _ = await completed(
        stream, Work("work", long), Work("kept", long, max_result_chars="never"),
        plugins=[ToolResultBudget(100)],
    )  # fmt: skip
    seen = [
        [text_of(m) for m in request.messages if isinstance(m, ToolResultMessage)]
        for request in stream.requests
    ]
    assert seen[1] == [long, long]
    clipped, kept, newest = seen[2]
    assert (kept, newest) == (long, long)
    assert len(clipped) == 100
    assert clipped.startswith("head")
    assert clipped.endswith("tail")
    assert texts(result) == [long] * 3
