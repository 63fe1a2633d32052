"""The host's own code fails: plugins, sinks, transports, policies and providers that raise, hang or
return nonsense. What each of them costs the run is a rule, and every run still closes its brackets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import pytest

from clark_agent import (
    AfterToolDecision,
    AgentEvent,
    AgentMessage,
    AgentTool,
    Answer,
    AssistantMessage,
    Budget,
    CancellationToken,
    ConfigError,
    FunctionPlugin,
    HookError,
    LoopConfig,
    LoopError,
    ProtocolPolicy,
    ProviderContent,
    Rewrite,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamEvent,
    StreamRequest,
    TextContent,
    ToolContext,
    ToolGateContext,
    ToolResult,
    TransformContext,
    UserMessage,
    run,
)
from clark_agent import events as ev
from clark_agent.messages import decode_json, encode_json, encode_message
from clark_agent.plugins.base import ToolGateClass
from clark_agent.stream import AnnotationChunk, BlockChunk, Chunk, Done, Error, Start, TextChunk
from clark_agent.testing import ScriptedStream, call, say
from clark_agent.types import Annotation
from tests.engine.support import (
    CONTEXT,
    PLACEHOLDER,
    Work,
    completed,
    decided,
    failed,
    failing,
    observed_run,
    outline,
    results,
    texts,
    truncated,
)

BUG = RuntimeError("a bug in the host")
SOURCE = Annotation("url", "https://example.org")


def crash(*_: object) -> Any:
    raise BUG


async def crash_later(*_: object) -> Any:
    await asyncio.sleep(0)
    raise BUG


async def hang(*_: object) -> Any:
    await asyncio.Event().wait()


CRASHES = pytest.mark.parametrize("crash", [crash, crash_later], ids=["sync", "async"])
Hook = Callable[..., Any]


def plugin(capability: Any, function: Hook, name: str = "broken") -> FunctionPlugin:
    return FunctionPlugin(capability, function, name=name)


# --- logged and skipped -------------------------------------------------------------------------


@CRASHES
async def test_an_observer_that_raises_is_logged_and_skipped(
    crash: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    result, sink = await completed(
        [call("work"), "ok"], Work(), plugins=[plugin("event_observer", crash)]
    )
    assert result.text == "ok"
    failures = [r for r in caplog.records if "'broken' failed on" in r.getMessage()]
    assert len(failures) == len(sink.events)


@CRASHES
async def test_a_sink_that_raises_is_logged_and_skipped(
    crash: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    result, sink = await completed(["ok"], on_event=crash)  # the observers still got every event
    assert result.text == "ok"
    assert sink.types[-1] == "agent_end"
    assert "'event_sink' failed on AgentEnd" in caplog.text


async def test_a_log_handler_that_raises_does_not_hold_up_the_events() -> None:
    """The run tells it that a sink has failed, and goes on."""

    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left on device")

    def fail(event: AgentEvent) -> None:
        raise OSError("no space left on device")

    emitting, full = logging.getLogger("clark_agent.engine.emitter"), Full()
    emitting.addHandler(full)
    try:
        async with asyncio.timeout(60):
            result, _ = await completed([call("work"), "ok"], Work(), on_event=fail)
    finally:
        emitting.removeHandler(full)
    assert result.text == "ok"


@CRASHES
@pytest.mark.parametrize("capability", ["steering", "follow_up"])
async def test_a_source_of_messages_that_raises_is_logged_and_counts_as_empty(
    capability: Any, crash: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    others = iter([[UserMessage("from another source")]])
    result, _ = await completed(
        ["ok", "really ok"],
        plugins=[plugin(capability, crash), plugin(capability, lambda: next(others, []), "fine")],
    )
    said = "user: from another source"
    if capability == "steering":
        assert outline(result.messages) == ["user: go", said, "assistant: ok"]
    else:
        assert outline(result.messages) == [
            "user: go", "assistant: ok", said, "assistant: really ok",
        ]  # fmt: skip
    assert "the message source 'broken' failed" in caplog.text


@CRASHES
async def test_a_transform_that_raises_leaves_the_messages_and_is_told(
    crash: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    stream = ScriptedStream(["ok"])
    _, sink = await completed(
        stream,
        plugins=[
            plugin("context_transform", crash),
            plugin("context_transform", lambda messages, ctx: [*messages, *messages], "twice"),
        ],
    )
    assert outline(stream.requests[0].messages) == ["user: go", "user: go"]
    applied = sink.of(ev.ContextTransformApplied)
    assert [(e.plugin, len(e.before), len(e.after)) for e in applied] == [
        ("broken", 1, 1), ("twice", 1, 2),
    ]  # fmt: skip
    assert "the transform 'broken' failed" in caplog.text


async def test_a_transform_whose_pre_check_raises_leaves_the_messages() -> None:
    class Unsure:
        def should_transform(self, messages: Sequence[Any], ctx: Any) -> bool:
            raise BUG

        def transform_context(self, messages: Sequence[Any], ctx: Any) -> Sequence[Any]:
            return []

    stream = ScriptedStream(["ok"])
    await completed(stream, plugins=[Unsure()])
    assert outline(stream.requests[0].messages) == ["user: go"]


# --- fail closed --------------------------------------------------------------------------------


@CRASHES
async def test_a_hook_before_a_call_that_raises_blocks_the_call(crash: Hook) -> None:
    tool, later = Work(), list[Any]()
    result, sink = await completed(
        [call("work"), "ok"], tool,
        plugins=[plugin("before_tool_call", crash),
                 plugin("before_tool_call", later.append, "next")],
    )  # fmt: skip
    assert tool.calls == []
    assert later == []
    assert sink.of(ev.ToolExecutionStart) == []
    (message,) = results(result)
    assert message.is_error
    assert "'broken'" in message.plain_text
    assert "RuntimeError: a bug in the host" in message.plain_text
    assert decided(message) == [("broken", "failed")]


@CRASHES
async def test_a_hook_after_a_call_that_raises_makes_its_result_an_error(crash: Hook) -> None:
    seen: list[bool] = []
    tool = Work("work", ToolResult.terminal("SECRET"))
    result, sink = await completed(
        [call("work"), "ok"], tool,
        plugins=[
            plugin("after_tool_call", crash),
            plugin("after_tool_call", lambda ctx: seen.append(ctx.is_error), "next"),
        ],
    )  # fmt: skip
    (message,) = results(result)
    assert message.is_error
    assert "SECRET" not in message.plain_text
    assert "'broken'" in message.plain_text
    assert decided(message) == [("broken", "failed")]
    assert seen == [True]  # the chain goes on with the error
    assert result.text == "ok"  # and the vote of the tool is void
    assert "SECRET" not in str(sink.events)


# --- gates --------------------------------------------------------------------------------------


@CRASHES
async def test_a_required_gate_that_raises_ends_the_run(crash: Hook) -> None:
    stream = ScriptedStream(["unheard"])
    error, _ = await failed(HookError, stream, plugins=[plugin("tool_gate", crash)])
    assert error.__cause__ is BUG
    assert (error.kind, error.name) == ("gate", "broken")
    assert stream.requests == []


@CRASHES
async def test_an_advisory_gate_that_raises_is_ignored(
    crash: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    gate: Any = plugin("tool_gate", crash)
    gate.tool_gate_class = ToolGateClass.ADVISORY
    stream = ScriptedStream(["ok"])
    _, sink = await completed(
        stream, Work("a"), Work("b"), plugins=[gate, plugin("tool_gate", lambda ctx: {"b"}, "fine")]
    )
    assert [schema.name for schema in stream.requests[0].tools] == ["b"]
    applied = [(e.plugin, e.allow) for e in sink.of(ev.ToolGateApplied)]
    assert applied == [("broken", None), ("fine", ("b",))]
    assert "the advisory gate 'broken' failed" in caplog.text


async def test_a_gate_whose_question_of_suppression_raises_fails_like_the_gate() -> None:
    class Unsure:
        name = "unsure"
        tool_gate_class = ToolGateClass.REQUIRED

        def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> set[str]:
            return {"a"}

        def suppresses_advisory_gates(self, ctx: ToolGateContext) -> bool:
            raise BUG

    error, _ = await failed(HookError, ["unheard"], Work("a"), plugins=[Unsure()])
    assert error.__cause__ is BUG


@CRASHES
async def test_a_gate_that_fails_to_give_its_reason_leaves_it_to_others(crash: Hook) -> None:
    gate: Any = plugin("tool_gate", lambda ctx: {"a"})
    gate.denial_reason = crash
    result, _ = await completed([call("b"), "ok"], Work("a"), Work("b"), plugins=[gate])
    (message,) = results(result)
    assert "'b' is not offered" in message.plain_text
    assert message.details["gate"] == "tool_gate"


# --- policy, providers, recovery ----------------------------------------------------------------


class Policy(ProtocolPolicy):
    """Raises where it is told to."""

    name = "product"

    def __init__(self, where: str) -> None:
        setattr(self, where, crash)


POLICY: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "normalize_tool_calls": ([call("a")], {}),
    "hidden_tool_error": ([call("b")], {"plugins": [plugin("tool_gate", lambda ctx: {"a"})]}),
    "terminal_tool_names": (["text"], {"plain_text_terminal_fallback_tool": "a"}),
    "asks_permission": (["text"], {"plain_text_terminal_fallback_tool": "a"}),
    "plain_text_recovery_prompt": (
        ["text"],
        {
            "plain_text_terminal_fallback_tool": "a",
            "plain_text_terminal_fallback_eager": True,
            "plain_text_terminal_fallback_eager_nudge": True,
        },
    ),
}


@pytest.mark.parametrize("where", POLICY)
async def test_a_policy_that_raises_ends_the_run(where: str) -> None:
    script, settings = POLICY[where]
    error, _ = await failed(
        HookError, script, Work("a"), Work("b"), protocol=Policy(where), **settings
    )
    assert error.__cause__ is BUG
    assert (error.kind, error.name) == ("protocol policy", "product")
    assert "product" in str(error)


@pytest.mark.parametrize(
    "provider", ["graceful_turn_limit_message_provider", "graceful_turn_limit_grace_provider"]
)
async def test_a_provider_that_raises_ends_the_run(provider: str) -> None:
    error, _ = await failed(
        HookError, [call("work")] * 4, Work(), max_iterations=4, grace_iterations=3,
        **{provider: crash},
    )  # fmt: skip
    assert error.__cause__ is BUG
    assert "crash" in str(error)


class Recovery:
    name = "shrinker"

    def __init__(self, recover: Hook) -> None:
        self.does = recover

    def recover(self, messages: Sequence[AgentMessage], ctx: Any) -> Any:
        return self.does(messages, ctx)


@CRASHES
async def test_a_recovery_that_raises_ends_the_run(crash: Hook) -> None:
    error, _ = await failed(
        HookError, [failing("context_overflow")], overflow_recovery=Recovery(crash)
    )
    assert error.__cause__ is BUG
    assert error.name == "shrinker"


@pytest.mark.parametrize("nonsense", [None, 7, "all of it"])
async def test_a_recovery_that_returns_nonsense_ends_the_run(nonsense: Any) -> None:
    stream = ScriptedStream([failing("context_overflow"), "unheard"])
    error, _ = await failed(
        HookError, stream, prompts="x" * 999,
        overflow_recovery=Recovery(lambda messages, ctx: nonsense),
    )  # fmt: skip
    assert error.name == "shrinker"
    assert len(stream.requests) == 1


async def test_a_recovery_that_returns_a_generator_loses_nothing() -> None:
    """Measuring what it gave must not use it up."""
    stream = ScriptedStream([failing("context_overflow"), "ok"])

    def last(messages: Sequence[AgentMessage], ctx: Any) -> Iterator[AgentMessage]:
        return iter(list(messages[-1:]))

    outcome, _ = await observed_run(
        stream, prompts=[UserMessage("x" * 999), UserMessage("y")],
        overflow_recovery=Recovery(last),
    )  # fmt: skip
    assert not isinstance(outcome, BaseException), outcome
    assert outline(stream.requests[1].messages) == ["user: y"]


# --- transports ---------------------------------------------------------------------------------


def no_stream(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
    raise BUG


async def raises_at_once(
    request: StreamRequest, signal: CancellationToken
) -> AsyncIterator[StreamEvent]:
    for error in (BUG,):
        raise error
    yield Start(PLACEHOLDER)


async def raises_in_the_middle(
    request: StreamRequest, signal: CancellationToken
) -> AsyncIterator[StreamEvent]:
    yield Start(PLACEHOLDER)
    yield Chunk(TextChunk("Half "))
    yield Chunk(TextChunk("of it"))
    raise BUG


@pytest.mark.parametrize("model", [no_stream, raises_at_once, raises_in_the_middle])
async def test_a_transport_that_raises_is_a_fatal_stream_error(model: Any) -> None:
    error, sink = await failed(StreamError, model)
    assert error.kind is StreamErrorKind.FATAL
    assert error.__cause__ is BUG
    assert "RuntimeError: a bug in the host" in error.message
    said = "Half of it" if model is raises_in_the_middle else ""
    assert error.partial is not None
    assert error.partial.plain_text == said
    assert error.partial.stop_reason is StopReason.ERROR
    assert sink.of(ev.MessageEnd)[-1].message == error.partial
    assert [e.reason for e in sink.of(ev.MessageDiscarded)] == ["fatal"]


class Iterating:
    """A transport that is no generator. Remembers that it was closed."""

    def __init__(
        self, events: Sequence[StreamEvent], on_close: Callable[[], Any] | None = None
    ) -> None:
        self.events = iter(events)
        self.on_close = on_close
        self.closed = 0

    def __call__(self, request: StreamRequest, signal: CancellationToken) -> Iterating:
        return self

    def __aiter__(self) -> Iterating:
        return self

    async def __anext__(self) -> StreamEvent:
        for event in self.events:
            return event
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed += 1
        if self.on_close is not None:
            self.on_close()


async def test_a_transport_that_raises_when_closed_after_its_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer is whole by then; what follows is logged."""
    model = Iterating([Done(AssistantMessage.from_text("ok"))], crash)
    result, _ = await completed(model)
    assert result.text == "ok"
    assert model.closed == 1
    assert "failed to close" in caplog.text


async def test_a_transport_without_a_way_to_close_is_fine() -> None:
    class Plain:
        def __init__(self) -> None:
            self.given = False

        def __call__(self, request: StreamRequest, signal: CancellationToken) -> Plain:
            return self

        def __aiter__(self) -> Plain:
            return self

        async def __anext__(self) -> StreamEvent:
            if self.given:
                raise StopAsyncIteration
            self.given = True
            return Done(AssistantMessage.from_text("ok"))

    result, _ = await completed(Plain())
    assert result.text == "ok"


async def test_a_transport_is_closed_when_it_has_more_to_say() -> None:
    model = Iterating([Done(AssistantMessage.from_text("ok")), Chunk(TextChunk("more"))])
    await completed(model)
    assert model.closed == 1


@pytest.mark.parametrize("event", [None, "text", UserMessage("x"), ev.AgentStart()])
async def test_a_transport_that_yields_nonsense_is_a_fatal_stream_error(event: Any) -> None:
    error, _ = await failed(StreamError, [[Start(PLACEHOLDER), event]])
    assert error.kind is StreamErrorKind.FATAL
    assert isinstance(error.__cause__, TypeError)


async def test_what_json_cannot_hold_in_an_answer_does_not_keep_it_from_being_written() -> None:
    item = ProviderContent("p", {"half": "\ud83d", "object": BUG})
    source = Annotation("url", title="\ud83d", data={"object": BUG})
    answer = AssistantMessage((item, TextContent("ok")), StopReason.END_TURN, annotations=(source,))
    script: list[StreamEvent] = [
        Start(PLACEHOLDER),
        Chunk(BlockChunk(item)),
        Chunk(TextChunk("ok")),
        Chunk(AnnotationChunk(source)),
        Done(answer),
    ]
    result, sink = await completed([script])
    message = result.messages[-1]
    assert decode_json(encode_json(message), AssistantMessage) == message
    block, _, note = [event.chunk for event in sink.of(ev.MessageUpdate)]
    assert isinstance(message, AssistantMessage)
    assert block == BlockChunk(message.content[0])  # type: ignore[arg-type]
    assert note == AnnotationChunk(message.annotations[0])


@pytest.mark.parametrize(
    "make", [str, lambda: iter("hello"), lambda: asyncio.sleep(0)], ids=["str", "iter", "coroutine"]
)
async def test_a_transport_that_is_no_async_generator_is_told_so(make: Any) -> None:
    returned = make()
    error, _ = await failed(StreamError, lambda request, signal: returned)
    kind = type(returned).__name__
    assert f"a transport must be an async generator, but this one returned a {kind}" in str(error)


def test_a_transport_that_returns_is_refused_at_once() -> None:
    async def answer(request: StreamRequest, signal: CancellationToken) -> str:
        return "hello"

    with pytest.raises(ConfigError, match="stream must be an async generator that yields Start"):
        LoopConfig(stream=answer)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_that_breaks_off_keeps_its_sources(is_streamed: bool) -> None:
    told = AssistantMessage((TextContent("so"),), StopReason.OTHER, annotations=(SOURCE,))
    chunks = [Chunk(TextChunk("so")), Chunk(AnnotationChunk(SOURCE))]
    events: list[StreamEvent] = [Start(PLACEHOLDER), *chunks] if is_streamed else [Start(told)]

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        for event in events:
            yield event
        raise BUG

    error, _ = await failed(StreamError, model)
    assert error.partial is not None
    assert (error.partial.plain_text, error.partial.annotations) == ("so", (SOURCE,))


@pytest.mark.parametrize("model", [lambda request, signal: None, lambda request, signal: [1]])
async def test_a_transport_that_is_none_is_a_fatal_stream_error(model: Any) -> None:
    error, _ = await failed(StreamError, model)
    assert error.kind is StreamErrorKind.FATAL


async def test_a_transport_that_cancels_itself_is_a_fatal_stream_error() -> None:
    """It awaited something that others had cancelled; nobody has cancelled the run."""

    async def model(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        connection = asyncio.get_running_loop().create_future()
        connection.cancel()
        await connection

    error, _ = await failed(StreamError, model)
    assert error.kind is StreamErrorKind.FATAL
    assert isinstance(error.__cause__, asyncio.CancelledError)


# --- hooks that cancel themselves ---------------------------------------------------------------


async def cancel_itself(*_: object) -> Any:
    """What a hook does that awaits a future which somebody else has cancelled."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@pytest.mark.parametrize("capability", ["steering", "follow_up", "context_transform"])
async def test_a_hook_that_cancels_itself_has_failed_like_any_other(capability: Any) -> None:
    """Nobody has cancelled the run, so it goes on."""
    result, _ = await completed(["ok"], plugins=[plugin(capability, cancel_itself)])
    assert result.text == "ok"


@pytest.mark.parametrize("capability", ["before_tool_call", "after_tool_call"])
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_hook_around_a_call_that_cancels_itself_fails_closed(
    capability: Any, calls: int
) -> None:
    result, _ = await completed(
        [[call("work")] * calls, "ok"], Work(), plugins=[plugin(capability, cancel_itself)]
    )
    assert [decided(message) for message in results(result)] == [[("broken", "failed")]] * calls


async def test_a_listener_that_cancels_itself_is_logged_and_skipped() -> None:
    result, _ = await completed(["ok"], on_event=cancel_itself)
    assert result.text == "ok"


async def test_a_gate_that_cancels_itself_ends_the_run_with_a_typed_error() -> None:
    error, _ = await failed(HookError, ["unheard"], plugins=[plugin("tool_gate", cancel_itself)])
    assert error.__cause__ is not None
    assert isinstance(error.__cause__.__cause__, asyncio.CancelledError)


# --- hooks that return nonsense -----------------------------------------------------------------


@pytest.mark.parametrize("nonsense", [True, "block", {"block": True}, AfterToolDecision()])
async def test_a_hook_before_a_call_that_returns_nonsense_blocks_it(nonsense: Any) -> None:
    tool = Work()
    result, _ = await completed(
        [call("work"), "ok"], tool, plugins=[plugin("before_tool_call", lambda ctx: nonsense)]
    )
    assert tool.calls == []
    assert decided(results(result)[0]) == [("broken", "failed")]


@pytest.mark.parametrize("nonsense", [False, "fine", ToolResult.text("fine"), Rewrite({})])
async def test_a_hook_after_a_call_that_returns_nonsense_withholds_the_result(
    nonsense: Any,
) -> None:
    result, _ = await completed(
        [call("work"), "ok"], Work("work", "SECRET"),
        plugins=[plugin("after_tool_call", lambda ctx: nonsense)],
    )  # fmt: skip
    assert decided(results(result)[0]) == [("broken", "failed")]
    assert "SECRET" not in texts(result)[0]


async def test_an_answer_that_is_no_result_blocks_the_call() -> None:
    answer = Answer("just a text")  # type: ignore[arg-type]
    tool = Work()
    result, _ = await completed(
        [call("work"), "ok"], tool, plugins=[plugin("before_tool_call", lambda ctx: answer)]
    )
    assert tool.calls == []
    assert decided(results(result)[0]) == [("broken", "failed")]


async def test_a_changed_result_that_is_none_withholds_the_result() -> None:
    decision = AfterToolDecision("just a text")  # type: ignore[arg-type]
    result, _ = await completed(
        [call("work"), "ok"], Work("work", "SECRET"),
        plugins=[plugin("after_tool_call", lambda ctx: decision)],
    )  # fmt: skip
    assert decided(results(result)[0]) == [("broken", "failed")]
    assert "SECRET" not in texts(result)[0]


@pytest.mark.parametrize("nonsense", [None, 7, "all of them", b"all", {1: 2}])
async def test_a_transform_that_returns_nonsense_leaves_the_messages(nonsense: Any) -> None:
    stream = ScriptedStream(["ok"])
    await completed(stream, plugins=[plugin("context_transform", lambda messages, ctx: nonsense)])
    assert outline(stream.requests[0].messages) == ["user: go"]


@pytest.mark.parametrize("capability", ["steering", "follow_up"])
@pytest.mark.parametrize("nonsense", [None, 7, "stop", ["stop"], {"role": "user"}])
async def test_a_source_of_messages_that_returns_nonsense_counts_as_empty(
    capability: Any, nonsense: Any
) -> None:
    given = iter([nonsense])
    result, _ = await completed(
        ["ok", "unheard"], plugins=[plugin(capability, lambda: next(given, []))]
    )
    assert outline(result.messages) == ["user: go", "assistant: ok"]


@pytest.mark.parametrize("nonsense", [True, 7, "work", [["work"]]])
async def test_a_required_gate_that_returns_nonsense_ends_the_run(nonsense: Any) -> None:
    error, _ = await failed(
        HookError, ["unheard"], Work(), plugins=[plugin("tool_gate", lambda ctx: nonsense)]
    )
    assert error.name == "broken"


async def test_a_gate_may_give_any_collection_of_names() -> None:
    for names in (["a"], ("a",), frozenset("a"), {"a": 1}.keys()):
        stream = ScriptedStream(["ok"])
        gate = plugin("tool_gate", lambda ctx, names=names: names)
        await completed(stream, Work("a"), Work("b"), plugins=[gate])
        assert [schema.name for schema in stream.requests[0].tools] == ["a"]


class Aliases(ProtocolPolicy):
    name = "product"

    def __init__(self, given: Any) -> None:
        self.given = given

    def normalize_tool_calls(self, calls: Any, registry: Any) -> Any:
        return self.given(calls)


@pytest.mark.parametrize(
    "given",
    [
        lambda calls: [],
        lambda calls: calls[::-1],
        lambda calls: [*calls, *calls],
        lambda calls: None,
        lambda calls: ["a", "b"],
    ],
    ids=["dropped", "reversed", "doubled", "none", "names"],
)
async def test_a_policy_that_changes_the_calls_themselves_ends_the_run(given: Any) -> None:
    tool = Work("a")
    error, _ = await observed_run([[call("a"), call("a")]], tool, protocol=Aliases(given))
    assert isinstance(error, LoopError)
    assert tool.calls == []


# --- for_run ------------------------------------------------------------------------------------


class ForRun:
    name = "fresh"

    def __init__(self, fresh: Hook) -> None:
        self.fresh = fresh

    def for_run(self) -> Any:
        return self.fresh()

    def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> set[str]:
        return {"safe"}


async def test_a_plugin_whose_for_run_raises_ends_the_run_with_a_typed_error() -> None:
    config = LoopConfig(stream=ScriptedStream(["unheard"]), plugins=[ForRun(crash)])
    with pytest.raises(LoopError) as caught:
        await run("go", CONTEXT, config)
    assert caught.value.__cause__ is BUG


@pytest.mark.parametrize("fresh", [lambda: None, lambda: object()], ids=["none", "no hooks"])
async def test_a_gate_whose_for_run_gives_nothing_does_not_vanish_silently(fresh: Hook) -> None:
    """A forgotten return must not open the gate."""
    stream = ScriptedStream(["ok"])
    config = LoopConfig(
        stream=stream, tools=[Work("safe"), Work("danger")], plugins=[ForRun(fresh)]
    )
    with pytest.raises(LoopError):
        await run("go", CONTEXT, config)
    assert stream.requests == []


# --- tools that are not what they should be -----------------------------------------------------


def wrapped(execute: Hook) -> Hook:
    """A decorator that does its work before there is anything to await."""

    @wraps(execute)
    def wrapper(self: Any, args: Any, ctx: ToolContext) -> Any:
        if args.get("bad"):
            raise ValueError("refused by a decorator")
        return execute(self, args, ctx)

    return wrapper


class Decorated(AgentTool):
    name = "work"

    @wrapped
    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.text("done")


@pytest.mark.parametrize("calls", [1, 2])
async def test_an_exception_from_calling_a_tool_is_its_result(calls: int) -> None:
    result, _ = await completed(
        [[call("work", bad=True), call("work", bad=False)][:calls], "ok"], Decorated()
    )
    assert texts(result) == ["ValueError: refused by a decorator", "done"][:calls]


# --- timeouts -----------------------------------------------------------------------------------

SOON = 0.01


async def test_an_observer_that_hangs_is_given_up_after_the_hook_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def slow(event: AgentEvent) -> None:
        if isinstance(event, ev.TurnStart):
            await hang()

    result, _ = await completed(["ok"], plugins=[plugin("event_observer", slow)], hook_timeout=SOON)
    assert result.text == "ok"
    assert "'broken' failed on TurnStart" in caplog.text


async def test_a_sink_that_hangs_is_given_up_after_the_hook_timeout() -> None:
    async def slow(event: AgentEvent) -> None:
        if isinstance(event, ev.AgentEnd):
            await hang()

    result, _ = await completed(["ok"], on_event=slow, hook_timeout=SOON)
    assert result.text == "ok"


@pytest.mark.parametrize("capability", ["steering", "follow_up", "context_transform"])
async def test_a_hook_that_hangs_fails_after_the_hook_timeout(
    capability: Any, caplog: pytest.LogCaptureFixture
) -> None:
    result, _ = await completed(["ok"], plugins=[plugin(capability, hang)], hook_timeout=SOON)
    assert result.text == "ok"
    assert "took longer than 0.01 seconds" in caplog.text


@pytest.mark.parametrize("capability", ["before_tool_call", "after_tool_call"])
async def test_a_hook_around_a_call_that_hangs_fails_closed(capability: Any) -> None:
    result, _ = await completed(
        [call("work"), "ok"], Work(), plugins=[plugin(capability, hang)], hook_timeout=SOON
    )
    (message,) = results(result)
    assert decided(message) == [("broken", "failed")]
    assert "took longer than 0.01 seconds" in message.plain_text


async def test_a_gate_that_hangs_ends_the_run() -> None:
    error, _ = await failed(
        HookError, ["unheard"], plugins=[plugin("tool_gate", hang)], hook_timeout=SOON
    )
    assert isinstance(error.__cause__, TimeoutError)


async def test_a_reason_that_hangs_is_left_out() -> None:
    gate: Any = plugin("tool_gate", lambda ctx: {"a"})
    gate.denial_reason = hang
    result, _ = await completed(
        [call("b"), "ok"], Work("a"), Work("b"), plugins=[gate], hook_timeout=SOON
    )
    assert results(result)[0].details["gate"] == "tool_gate"


async def test_a_timeout_of_the_hooks_own_is_told_as_it_is() -> None:
    async def own(ctx: Any) -> None:
        async with asyncio.timeout(0):
            await hang()

    result, _ = await completed(
        [call("work"), "ok"], Work(), plugins=[plugin("before_tool_call", own)], hook_timeout=60
    )
    (message,) = results(result)
    assert "TimeoutError" in message.plain_text
    assert "took longer" not in message.plain_text


async def test_the_timeout_is_off_by_default_and_holds_for_each_call_alone() -> None:
    assert LoopConfig(stream=ScriptedStream([])).hook_timeout is None

    async def quick(ctx: Any) -> None:
        await asyncio.sleep(0)

    result, _ = await completed(
        [[call("work")] * 20, "ok"], Work(), plugins=[plugin("before_tool_call", quick)],
        hook_timeout=60,
    )  # fmt: skip
    assert texts(result) == ["done"] * 20


# --- anything else ------------------------------------------------------------------------------


@pytest.mark.parametrize("estimate", [crash, lambda message: None, lambda message: "many"])
async def test_where_an_estimator_fails_the_size_of_messages_counts(
    estimate: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    class Estimator:
        def estimate_message(self, message: AgentMessage) -> int:
            cost: int = estimate(message)
            return cost

    seen: list[int] = []

    def note(messages: Sequence[AgentMessage], ctx: TransformContext) -> Sequence[AgentMessage]:
        seen.append(ctx.estimated_tokens)
        return messages

    result, _ = await completed(
        [call("work"), "ok"], Work(), token_estimator=Estimator(), budget=Budget(tokens=10_000),
        plugins=[plugin("context_transform", note)],
    )  # fmt: skip
    sizes = [len(encode_message(message)) // 4 for message in result.messages]
    assert seen == [sizes[0], sum(sizes[:3])]
    assert caplog.text.count("the token estimator failed") == 1, "once for a run"


async def test_prompts_that_raise_while_they_are_read_end_the_run_with_a_typed_error() -> None:
    def prompts() -> Iterator[AgentMessage]:
        yield UserMessage("one")
        raise BUG

    stream = ScriptedStream(["unheard"])
    with pytest.raises(LoopError) as caught:
        await run(prompts(), CONTEXT, LoopConfig(stream=stream))
    assert caught.value.__cause__ is BUG
    assert stream.requests == []


async def test_truncated_answers_pass_the_hooks_too() -> None:
    cut = truncated("", call("work", call_id="c"))
    result, _ = await completed([cut, "ok"], Work(), plugins=[plugin("after_tool_call", crash)])
    assert decided(results(result)[0]) == [("broken", "failed")]


async def test_a_run_that_fails_does_not_spoil_the_next_on_the_same_config() -> None:
    config = LoopConfig(stream=ScriptedStream([OSError("x"), "ok"]))
    with pytest.raises(StreamError):
        await run("go", CONTEXT, config)
    assert (await run("go", CONTEXT, config)).text == "ok"


async def test_an_error_says_in_which_turn_it_happened_and_what_to_do() -> None:
    broken = Error(say(""), StreamErrorKind.CONTEXT_OVERFLOW, "too long")
    error, _ = await failed(StreamError, [call("work"), [broken]], Work())
    assert error.turn == 2
    advice, place = error.__notes__
    assert "overflow_recovery" in advice
    assert place == "In turn 2 of the run."
