"""Plugins in a run: who is asked when, in which order, with what, and who is named for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    AgentContext,
    AgentEvent,
    AgentMessage,
    Answer,
    AssistantMessage,
    BeforeToolCallContext,
    Block,
    FunctionPlugin,
    LoopConfig,
    Rewrite,
    RunIdentity,
    SystemMessage,
    ToolCall,
    ToolGateContext,
    ToolResult,
    TransformContext,
    Usage,
    UserMessage,
    run,
)
from clark_agent import events as ev
from clark_agent.messages import estimate_messages
from clark_agent.messages.tokens import JsonSizeEstimator
from clark_agent.plugins.base import BeforeRequestContext, BeforeToolDecision, ToolGateClass
from clark_agent.testing import ScriptedStream, call, say
from tests.engine.support import (
    CONTEXT,
    Work,
    completed,
    decided,
    observe,
    outline,
    results,
)


class Everything:
    """Has all hooks and writes down when each of them is called."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name = name
        self.log = log

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> None:
        self.log.append((self.name, "before"))

    def on_after_tool_call(self, ctx: AfterToolCallContext) -> None:
        self.log.append((self.name, "after"))

    def before_request(self, ctx: BeforeRequestContext) -> Iterable[AgentMessage] | None:
        self.log.append((self.name, "request"))
        return None

    def transform_context(self, messages: Sequence[Any], ctx: TransformContext) -> Sequence[Any]:
        self.log.append((self.name, "transform"))
        return messages

    def on_event(self, event: AgentEvent) -> None:
        if isinstance(event, ev.TurnEnd):
            self.log.append((self.name, "turn_end"))

    def next_steering_messages(self) -> list[AgentMessage]:
        self.log.append((self.name, "steering"))
        return []

    def next_follow_up_messages(self) -> list[AgentMessage]:
        self.log.append((self.name, "follow_up"))
        return []

    def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> set[str] | None:
        self.log.append((self.name, "gate"))
        return None


class AsyncEverything(Everything):
    """The same, with a turn for others in each."""

    async def on_before_tool_call(self, ctx: BeforeToolCallContext) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().on_before_tool_call(ctx)

    async def on_after_tool_call(self, ctx: AfterToolCallContext) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().on_after_tool_call(ctx)

    async def before_request(  # type: ignore[override]
        self, ctx: BeforeRequestContext
    ) -> Iterable[AgentMessage] | None:
        await asyncio.sleep(0)
        return super().before_request(ctx)

    async def transform_context(  # type: ignore[override]
        self, messages: Sequence[Any], ctx: TransformContext
    ) -> Sequence[Any]:
        await asyncio.sleep(0)
        return super().transform_context(messages, ctx)

    async def on_event(self, event: AgentEvent) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().on_event(event)

    async def next_steering_messages(self) -> list[AgentMessage]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().next_steering_messages()

    async def next_follow_up_messages(self) -> list[AgentMessage]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().next_follow_up_messages()

    async def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> set[str] | None:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().next_turn_tool_allowlist(ctx)


ORDER = [
    "steering",
    "request", "transform", "gate", "before", "after", "turn_end", "steering",
    "request", "transform", "gate", "turn_end", "steering",
    "follow_up",
]  # fmt: skip


@pytest.mark.parametrize("kinds", ["ss", "aa", "sas", "asa"])
async def test_hooks_are_called_in_the_order_of_registration(kinds: str) -> None:
    log: list[tuple[str, str]] = []
    plugins = [
        (Everything if kind == "s" else AsyncEverything)(f"{kind}{n}", log)
        for n, kind in enumerate(kinds)
    ]
    await completed([call("work"), "ok"], Work(), plugins=plugins)
    assert log == [(plugin.name, hook) for hook in ORDER for plugin in plugins]


async def test_the_order_can_be_inspected() -> None:
    log: list[tuple[str, str]] = []
    config = LoopConfig(
        stream=ScriptedStream(["ok"]),
        plugins=[Everything("a", log), AsyncEverything("b", log)],
        max_iterations=9,
    )
    names = config.plugin_names
    assert names["before_tool_call"] == names["tool_gate"] == ("a", "b")
    assert names["steering"] == names["event_observer"] == ("a", "b", "graceful_turn_limit")
    outcome, _ = await observe(config)
    assert not isinstance(outcome, BaseException)
    assert log == [(name, hook) for hook in [*ORDER[:4], *ORDER[-3:]] for name in "ab"]


async def test_an_object_whose_call_is_async_is_awaited() -> None:
    class Source:
        def __init__(self) -> None:
            self.waiting = [UserMessage("psst")]

        async def __call__(self) -> list[UserMessage]:
            await asyncio.sleep(0)
            waiting, self.waiting = self.waiting, []
            return waiting

    result, _ = await completed(["ok"], plugins=[FunctionPlugin("steering", Source())])
    assert outline(result.messages) == ["user: go", "user: psst", "assistant: ok"]


# --- what hooks are told ------------------------------------------------------------------------


async def test_what_a_hook_before_a_call_is_told() -> None:
    seen: list[BeforeToolCallContext] = []
    tool = Work(prepare=lambda args: {**args, "more": 1})
    result, _ = await completed(
        [[call("work", x=1), call("work", x=2)], "ok"], tool,
        plugins=[FunctionPlugin("before_tool_call", seen.append)],
    )  # fmt: skip
    assert [ctx.assistant_message for ctx in seen] == [result.messages[1]] * 2
    assert [ctx.tool_call for ctx in seen] == [
        ToolCall("call_1", "work", {"x": 1}),
        ToolCall("call_2", "work", {"x": 2}),
    ]
    assert [ctx.args for ctx in seen] == [{"x": 1, "more": 1}, {"x": 2, "more": 1}]
    assert [ctx.messages == result.messages[:2] for ctx in seen] == [True, True]


async def test_what_a_hook_after_a_call_is_told() -> None:
    seen: list[AfterToolCallContext] = []
    result, _ = await completed(
        [[call("work", x=1), call("nope"), call("bad")], "ok"],
        Work(prepare=lambda args: {"y": 2}), Work("bad", ValueError("no")),
        plugins=[FunctionPlugin("after_tool_call", seen.append)],
    )  # fmt: skip
    by_name = {ctx.tool_call.name: ctx for ctx in seen}
    assert by_name["work"].args == {"y": 2}
    assert by_name["work"].result == ToolResult.text("done")
    assert {name: ctx.is_error for name, ctx in by_name.items()} == {
        "work": False, "nope": True, "bad": True,
    }  # fmt: skip
    assert all(ctx.assistant_message == result.messages[1] for ctx in seen)
    assert all(ctx.messages == result.messages[:2] for ctx in seen)


async def test_what_a_transform_is_told() -> None:
    seen: list[tuple[Sequence[AgentMessage], TransformContext]] = []

    def note(messages: Sequence[AgentMessage], ctx: TransformContext) -> Sequence[AgentMessage]:
        seen.append((messages, ctx))
        return messages

    usage = Usage(input_tokens=50, output_tokens=5)
    answer = AssistantMessage.from_calls([call("work", call_id="c")])
    answer = AssistantMessage(answer.content, answer.stop_reason, usage=usage)
    tool = Work()
    result, _ = await completed(
        [answer, "ok"], tool, plugins=[FunctionPlugin("context_transform", note)], model_id="m-1"
    )
    first, second = [ctx for _, ctx in seen]
    assert (first.iteration, second.iteration) == (0, 1)
    assert (first.model_id, second.model_id) == ("m-1", "m-1")
    assert (first.last_provider_usage, second.last_provider_usage) == (None, usage)
    assert first.tools["work"] is tool
    for messages, ctx in seen:
        assert ctx.estimated_tokens == estimate_messages(JsonSizeEstimator(), messages)
    assert [list(messages) for messages, _ in seen] == [
        list(result.messages[:1]),
        list(result.messages[:3]),
    ]


async def test_the_newest_usage_of_the_history_is_known_from_the_start() -> None:
    seen: list[Usage | None] = []

    def note(messages: Sequence[AgentMessage], ctx: TransformContext) -> Sequence[AgentMessage]:
        seen.append(ctx.last_provider_usage)
        return messages

    old, new = Usage(input_tokens=1), Usage(input_tokens=2)
    answers = [
        AssistantMessage(say("x").content, say("x").stop_reason, usage=usage)
        for usage in (old, new, None)
    ]
    history = [m for answer in answers for m in (UserMessage("?"), answer)]
    context = AgentContext("", tuple(history))
    plugins = [FunctionPlugin("context_transform", note)]
    await completed(["ok"], plugins=plugins, context=context)
    assert seen == [new]


async def test_a_transform_is_skipped_when_it_says_so() -> None:
    class Sometimes:
        name = "sometimes"

        def should_transform(self, messages: Sequence[Any], ctx: TransformContext) -> bool:
            return len(messages) > 1

        def transform_context(self, messages: Sequence[Any], ctx: TransformContext) -> Any:
            return messages[-1:]

    stream = ScriptedStream([call("work"), "ok"])
    _, sink = await completed(stream, Work(), plugins=[Sometimes()])
    applied = sink.of(ev.ContextTransformApplied)
    assert [(e.iteration, e.plugin, len(e.before), len(e.after)) for e in applied] == [
        (1, "sometimes", 3, 1)
    ]
    assert [len(request.messages) for request in stream.requests] == [1, 1]


async def test_transforms_chain_and_an_unchanged_one_is_told_too() -> None:
    def add(text: str) -> Any:
        return lambda messages, ctx: [*messages, SystemMessage(text)]

    stream = ScriptedStream(["ok"])
    result, sink = await completed(
        stream,
        plugins=[
            FunctionPlugin("context_transform", add("a"), name="a"),
            FunctionPlugin("context_transform", lambda messages, ctx: messages, name="idle"),
            FunctionPlugin("context_transform", add("b"), name="b"),
        ],
    )
    assert outline(stream.requests[0].messages) == ["user: go", "system: a", "system: b"]
    applied = sink.of(ev.ContextTransformApplied)
    assert [(e.plugin, len(e.before), len(e.after)) for e in applied] == [
        ("a", 1, 2), ("idle", 2, 2), ("b", 2, 3),
    ]  # fmt: skip
    assert applied[1].before is applied[1].after
    assert outline(result.messages) == ["user: go", "assistant: ok"]  # the request only
    assert sink.of(ev.ProviderRequestPrepared)[0].messages == stream.requests[0].messages


async def test_what_a_gate_is_told() -> None:
    seen: list[ToolGateContext] = []

    def gate(ctx: ToolGateContext) -> None:
        seen.append(ctx)

    def cut(messages: Sequence[AgentMessage], ctx: TransformContext) -> Sequence[AgentMessage]:
        return messages[-1:]

    await completed(
        [call("b"), "ok"], Work("b"), Work("a"), conversation_id="conv",
        plugins=[FunctionPlugin("tool_gate", gate), FunctionPlugin("context_transform", cut)],
    )  # fmt: skip
    assert [ctx.iteration for ctx in seen] == [0, 1]
    assert [ctx.conversation_id for ctx in seen] == ["conv", "conv"]
    assert [tuple(ctx.available_tool_names) for ctx in seen] == [("b", "a")] * 2
    assert [outline(ctx.messages) for ctx in seen] == [["user: go"], ["tool_result: done"]]


# --- gates in a run -----------------------------------------------------------------------------


class Gate:
    def __init__(
        self, name: str, allow: set[str] | None, *, priority: int = 0, advisory: bool = False,
        suppresses: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.allow = allow
        self.conflict_priority = priority
        self.tool_gate_class = ToolGateClass.ADVISORY if advisory else ToolGateClass.REQUIRED
        self.suppresses = suppresses

    def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> set[str] | None:
        return self.allow

    def suppresses_advisory_gates(self, ctx: ToolGateContext) -> bool:
        return self.suppresses


async def gated(*gates: Gate) -> tuple[list[str], list[Any], list[Any]]:
    stream = ScriptedStream(["ok"])
    tools = [Work(name) for name in "abc"]
    _, sink = await completed(stream, *tools, plugins=gates)
    offered = [schema.name for schema in stream.requests[0].tools]
    (prepared,) = sink.of(ev.ProviderRequestPrepared)
    assert prepared.tools == stream.requests[0].tools
    applied = [(e.plugin, e.allow) for e in sink.of(ev.ToolGateApplied)]
    return offered, applied, sink.of(ev.ToolGateConflictResolved)


async def test_gates_intersect_and_each_is_told() -> None:
    offered, applied, conflicts = await gated(
        Gate("one", {"c", "b"}), Gate("idle", None), Gate("two", {"b", "a"})
    )
    assert offered == ["b"]
    assert applied == [("one", ("b", "c")), ("idle", None), ("two", ("a", "b"))]
    assert conflicts == []


async def test_gates_that_leave_nothing_are_repaired() -> None:
    offered, _, (conflict,) = await gated(Gate("one", {"a", "b"}), Gate("two", {"c"}, priority=-1))
    assert offered == ["a", "b"]
    assert conflict.plugins == ("one", "two")
    assert conflict.chosen_plugin == "one"
    assert conflict.allow == ("a", "b")


async def test_a_gate_that_allows_nothing_narrows_nothing() -> None:
    offered, applied, (conflict,) = await gated(Gate("shut", set()))
    assert offered == ["a", "b", "c"]
    assert applied == [("shut", ())]
    assert (conflict.plugins, conflict.chosen_plugin, conflict.allow) == (("shut",), None, ())


async def test_a_silenced_gate_is_told_of_all_the_same() -> None:
    offered, applied, conflicts = await gated(
        Gate("advice", {"c"}, advisory=True), Gate("boss", {"a"}, priority=1, suppresses=True)
    )
    assert offered == ["a"]
    assert applied == [("advice", ("c",)), ("boss", ("a",))]
    assert conflicts == []


# --- for_run and end_run ------------------------------------------------------------------------


class Stateful:
    """Counts the events of its run, and steers once."""

    def __init__(self, made: list[Stateful]) -> None:
        self.made = made
        self.events = 0
        self.steered = False
        self.ended = 0

    def for_run(self) -> Stateful:
        fresh = Stateful(self.made)
        self.made.append(fresh)
        return fresh

    def end_run(self) -> None:
        self.ended += 1

    def on_event(self, event: AgentEvent) -> None:
        self.events += 1

    def next_steering_messages(self) -> list[AgentMessage]:
        steered, self.steered = self.steered, True
        return [] if steered else [UserMessage("by the way")]


async def test_every_run_has_a_fresh_plugin_for_all_its_hooks() -> None:
    made: list[Stateful] = []
    registered = Stateful(made)
    config = LoopConfig(stream=ScriptedStream(["ok"], at_end="repeat"), plugins=[registered])
    for number in (1, 2):
        outcome, sink = await observe(config)
        assert not isinstance(outcome, BaseException)
        # The same object was asked to steer and observed the events.
        assert outline(outcome.messages) == ["user: go", "user: by the way", "assistant: ok"]
        assert len(made) == number
        assert made[-1].events == len(sink.events)
        assert made[-1].ended == 1
    assert (registered.events, registered.steered, registered.ended) == (0, False, 0)


async def test_end_run_is_called_once_however_the_run_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Leaving:
        ends = 0

        def next_steering_messages(self) -> list[AgentMessage]:
            return []

        def end_run(self) -> None:
            self.ends += 1
            raise RuntimeError("a bug in the host")

    leaving, made = Leaving(), list[Stateful]()
    config = LoopConfig(stream=ScriptedStream([OSError("x")]), plugins=[leaving, Stateful(made)])
    outcome, _ = await observe(config)
    assert isinstance(outcome, BaseException)
    assert leaving.ends == 1
    assert made[0].ended == 1  # one that raises does not keep it from the next
    assert "failed at the end of the run" in caplog.text


async def test_a_plugin_without_state_is_used_as_it_is() -> None:
    log: list[tuple[str, str]] = []
    config = LoopConfig(stream=ScriptedStream(["ok"] * 2), plugins=[Everything("a", log)])
    assert config.hooks.for_run() is config.hooks
    await run("go", CONTEXT, config)
    await run("go", CONTEXT, config)
    assert len(log) == 2 * 7


# --- every decision names its plugin ------------------------------------------------------------


def before(name: str, decision: BeforeToolDecision | None) -> FunctionPlugin:
    return FunctionPlugin("before_tool_call", lambda ctx: decision, name=name)


def after(name: str, decision: AfterToolDecision | None) -> FunctionPlugin:
    return FunctionPlugin("after_tool_call", lambda ctx: decision, name=name)


def crash(ctx: Any) -> None:
    raise RuntimeError("a bug in the host")


FIXED = AfterToolDecision(ToolResult.text("fixed"))
DECISIONS: dict[str, tuple[list[FunctionPlugin], list[tuple[str, str]]]] = {
    "block": ([before("p", Block("no"))], [("p", "block")]),
    "rewrite": ([before("p", Rewrite({"y": 1}))], [("p", "rewrite")]),
    "answer": ([before("p", Answer(ToolResult.text("a")))], [("p", "answer")]),
    "change": ([after("p", FIXED)], [("p", "change")]),
    "mark": ([after("p", AfterToolDecision(mark_error=True))], [("p", "change")]),
    "vote": ([after("p", AfterToolDecision(terminate=True))], [("p", "change")]),
    "before failed": ([FunctionPlugin("before_tool_call", crash, name="p")], [("p", "failed")]),
    "after failed": ([FunctionPlugin("after_tool_call", crash, name="p")], [("p", "failed")]),
    "a chain": (
        [
            before("a", Rewrite({"y": 1})),
            before("b", None),
            before("c", Rewrite({"y": 2})),
            before("d", Block("no")),
            before("e", Rewrite({"y": 3})),
            after("f", None),
            after("g", FIXED),
        ],
        [("a", "rewrite"), ("c", "rewrite"), ("d", "block"), ("g", "change")],
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
async def test_every_decision_names_its_plugin(name: str) -> None:
    plugins, expected = DECISIONS[name]
    result, sink = await completed(
        [call("work"), call("finish"), "ok"], Work(), Work("finish"), plugins=plugins
    )
    message = results(result)[0]
    assert decided(message) == expected
    assert sink.of(ev.ToolExecutionEnd)[0].result.details == message.details


async def test_those_who_decide_nothing_are_not_named() -> None:
    unchanged = AfterToolDecision(mark_error=False, terminate=False)
    result, _ = await completed(
        [call("work"), "ok"], Work(),
        plugins=[before("a", None), after("b", None), after("c", AfterToolDecision()),
                 after("d", unchanged)],
    )  # fmt: skip
    assert results(result)[0].details is None


async def test_the_details_of_the_tool_stay() -> None:
    result, _ = await completed(
        [[call("object"), call("list")], "ok"],
        Work("object", ToolResult.text("x", details={"mine": 1})),
        Work("list", ToolResult.text("x", details=[1, 2])),
        plugins=[after("p", AfterToolDecision(mark_error=True))],
    )
    has_object, has_list = results(result)
    assert has_object.details["mine"] == 1
    assert decided(has_object) == [("p", "change")]
    assert has_list.details == [1, 2]  # no room for another entry; the host's own come first


async def test_a_block_without_a_reason_names_its_hook() -> None:
    result, _ = await completed(
        [call("work"), "ok"], Work(), plugins=[before("guard", Block(details={"rule": 7}))]
    )
    (message,) = results(result)
    assert "blocked by" in message.plain_text
    assert "guard" in message.plain_text
    assert message.details["rule"] == 7


async def test_hooks_before_a_call_see_the_rewrites_of_those_before_them() -> None:
    seen: list[Any] = []
    tool = Work()
    await completed(
        [call("work", x=0), "ok"], tool,
        plugins=[
            before("a", Rewrite({"x": 1})),
            FunctionPlugin("before_tool_call", lambda ctx: seen.append(ctx.args)),
            FunctionPlugin("after_tool_call", lambda ctx: seen.append(ctx.args)),
        ],
    )  # fmt: skip
    assert seen == [{"x": 1}, {"x": 1}]
    assert tool.calls == [{"x": 1}]


async def test_hooks_after_a_call_chain() -> None:
    seen: list[tuple[str, bool]] = []

    def look(ctx: AfterToolCallContext) -> None:
        seen.append((ctx.result.plain_text, ctx.is_error))

    result, _ = await completed(
        [call("work"), "ok"], Work(),
        plugins=[
            FunctionPlugin("after_tool_call", look),
            after("a", AfterToolDecision(ToolResult.error("worse"))),
            FunctionPlugin("after_tool_call", look),
            after("b", AfterToolDecision(mark_error=False)),
            FunctionPlugin("after_tool_call", look),
        ],
    )  # fmt: skip
    assert seen == [("done", False), ("worse", True), ("worse", False)]
    (message,) = results(result)
    assert (message.plain_text, message.is_error) == ("worse", False)
    assert decided(message) == [("a", "change"), ("b", "change")]


async def test_an_override_brings_its_own_flags_and_nothing_is_merged() -> None:
    original = ToolResult.terminal("x", details={"old": 1}).with_narration("caption")
    result, _ = await completed(
        [call("work"), "ok"], Work("work", original),
        plugins=[after("p", AfterToolDecision(ToolResult.text("new", details={"new": 2})))],
    )  # fmt: skip
    (message,) = results(result)
    assert message.details.keys() == {"new", "decided_by"}
    assert message.narration is None
    assert result.text == "ok"  # the vote was the tool's and went with its result


# --- listeners ----------------------------------------------------------------------------------


async def test_the_sink_hears_first_and_then_the_observers_in_order() -> None:
    heard: list[str] = []
    await completed(
        ["ok"],
        on_event=lambda event: heard.append("sink") if isinstance(event, ev.TurnEnd) else None,
        plugins=[turn_observer(name, heard) for name in ("first", "second")],
    )
    assert heard == ["sink", "first", "second"]


def turn_observer(name: str, heard: list[str]) -> FunctionPlugin:
    def note(event: AgentEvent) -> None:
        if isinstance(event, ev.TurnEnd):
            heard.append(name)

    return FunctionPlugin("event_observer", note, name=name)


async def test_the_identity_is_told_when_there_is_one() -> None:
    identity = RunIdentity.root("r-1")
    _, sink = await completed(["ok"], context=AgentContext("", identity=identity))
    assert sink.types[:3] == ["agent_start", "run_identified", "turn_start"]
    assert sink.of(ev.RunIdentified) == [ev.RunIdentified(identity)]


async def test_updates_carry_the_very_placeholder_of_the_start() -> None:
    _, sink = await completed(["one two three"])
    start = sink.of(ev.MessageStart)[-1].message
    updates = sink.of(ev.MessageUpdate)
    assert len(updates) == 3
    assert all(update.partial is start for update in updates)


async def test_the_request_event_is_exactly_what_the_model_sees() -> None:
    stream = ScriptedStream([call("work"), "ok"])
    _, sink = await completed(
        stream, Work(), model_id="m", temperature=0.5, max_output_tokens=77,
        provider_extras={"x": 1},
    )  # fmt: skip
    for event, request in zip(sink.of(ev.ProviderRequestPrepared), stream.requests, strict=True):
        assert event.messages is request.messages
        assert event.tools is request.tools
        assert event.system_prompt == request.system_prompt == CONTEXT.system_prompt
        assert (event.model_id, event.temperature, event.max_output_tokens) == ("m", 0.5, 77)
        assert (request.temperature, request.max_output_tokens) == (0.5, 77)
        assert request.provider_extras == {"x": 1}
    assert [e.iteration for e in sink.of(ev.ProviderRequestPrepared)] == [0, 1]


async def test_what_a_listener_was_given_does_not_change_later() -> None:
    seen: list[tuple[Any, list[AgentMessage]]] = []

    def keep(event: AgentEvent) -> None:
        for name in ("messages", "before", "after"):
            messages = getattr(event, name, None)
            if messages is not None:
                seen.append((messages, list(messages)))

    await completed(
        [call("work"), call("work"), "ok"], Work(), on_event=keep,
        plugins=[FunctionPlugin("context_transform", lambda messages, ctx: messages)],
    )  # fmt: skip
    assert len(seen) == 3 * 3 + 1
    assert all(list(view) == then for view, then in seen)
