"""Agents below agents: who they are, what is heard of them, and that none is left behind."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from threading import Barrier
from time import sleep
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentEvent,
    AgentMessage,
    AgentTool,
    AssistantMessage,
    Budget,
    CancellationToken,
    ChannelSteering,
    ConfigError,
    FunctionPlugin,
    LoopConfig,
    LoopError,
    LoopOutcome,
    MaxTokensRecovery,
    RunAborted,
    RunIdentity,
    RunResult,
    RunStoppedByTool,
    StreamError,
    StreamFn,
    SystemMessage,
    ToolCall,
    ToolContext,
    ToolExecutionError,
    ToolFatal,
    ToolResult,
    Usage,
    UserMessage,
    agent_tool,
    finish_tool,
    run,
    run_child,
    stream_run,
    sub_agents,
    tool,
)
from clark_agent import events as ev
from clark_agent.engine.supervised import left_behind
from clark_agent.errors import failure_of
from clark_agent.history import repair_history
from clark_agent.stream import Chunk, Done, Start, StreamEvent, StreamRequest, TextChunk
from clark_agent.testing import (
    FakeClock,
    RecordingSink,
    ScriptedStream,
    Step,
    call,
    check_events,
    fold_events,
    say,
)
from tests.engine.support import (
    CONTEXT,
    PLACEHOLDER,
    Stubborn,
    Waiting,
    Work,
    failing,
    for_good,
    hurry,
    let_others_run,
    observed_run,
    outline,
    paid,
    results,
    texts,
    truncated,
)
from tests.event_loops import timers
from tests.sizes import FELLED_TREES

ROOT = RunIdentity.root("root", conversation_id="talk")


# --- trees --------------------------------------------------------------------------------------


def agent(
    name: str,
    model: StreamFn | Iterable[Step],
    *tools: AgentTool,
    system_prompt: str = "",
    max_depth: int = 3,
    timeout: float | None = None,
    **settings: Any,
) -> AgentTool:
    """A tool that is an agent with this script and these tools."""
    stream = model if callable(model) else ScriptedStream(model)
    return agent_tool(
        name,
        f"the {name}",
        LoopConfig(stream=stream, tools=tools, **settings),
        system_prompt=system_prompt,
        max_depth=max_depth,
        timeout=timeout,
    )


def ask(name: str, task: str = "please", **more: Any) -> ToolCall:
    return call(name, task=task, **more)


class Delegate(AgentTool):
    """A tool that starts a run by itself and remembers what came of it."""

    name = "delegate"

    def __init__(self, config: LoopConfig | None = None, **options: Any) -> None:
        self.config = config
        self.options = options
        self.identities: list[RunIdentity | None] = []
        self.outcomes: list[RunResult | BaseException] = []
        super().__init__()

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        assert self.config is not None
        try:
            result = await run_child(ctx, args.get("task", "go"), self.config, **self.options)
        except BaseException as error:
            self.outcomes.append(error)
            raise
        finally:
            self.identities.append(ctx.identity)
        self.outcomes.append(result)
        return ToolResult.text(result.text)


def child_events(events: Iterable[AgentEvent]) -> list[ev.ChildRunEvent]:
    return [event for event in events if isinstance(event, ev.ChildRunEvent)]


def by_run(events: Iterable[AgentEvent]) -> dict[str, list[AgentEvent]]:
    """The events of each child run, by its id."""
    runs: dict[str, list[AgentEvent]] = {}
    for told in child_events(events):
        runs.setdefault(told.identity.run_id, []).append(told.event)
    return runs


def identities(events: Iterable[AgentEvent]) -> dict[str, RunIdentity]:
    """Who the child runs are, by the name of the call that started them."""
    return {told.tool_call_id: told.identity for told in child_events(events)}


def check_tree(events: Sequence[AgentEvent]) -> None:
    """What holds of the runs of every tree: each for itself is a sound run, and a child of one."""
    check_events(events)
    assert not [told for told in child_events(events) if isinstance(told.event, ev.ChildRunEvent)]
    known = {told.identity.run_id: told.identity for told in child_events(events)}
    for told in child_events(events):
        assert told.identity == known[told.identity.run_id]
    for run_id, told_of_it in by_run(events).items():
        check_events(told_of_it)
        named = [event.identity for event in told_of_it if isinstance(event, ev.RunIdentified)]
        assert named in ([], [known[run_id]])  # cancelled at once, it does not come to its name
        assert repair_history(fold_events(told_of_it)).changes == ()
        if (above := known.get(known[run_id].parent_run_id or "")) is not None:
            assert known[run_id].depth == above.depth + 1


async def tree_run(
    model: StreamFn | Iterable[Step], *tools: AgentTool, **options: Any
) -> tuple[RunResult | BaseException, RecordingSink]:
    """An observed run whose child runs are looked at as closely."""
    outcome, sink = await observed_run(model, *tools, **options)
    check_tree(sink.events)
    return outcome, sink


async def tree_result(
    model: StreamFn | Iterable[Step], *tools: AgentTool, **options: Any
) -> tuple[RunResult, RecordingSink]:
    """One that comes to an end."""
    outcome, sink = await tree_run(model, *tools, **options)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome, sink


# --- a task and its answer ----------------------------------------------------------------------


async def test_the_answer_of_the_child_is_the_result_of_the_call() -> None:
    model = ScriptedStream(["Rust is ten years old."])
    result, _ = await tree_result(
        [ask("research", "How old is Rust?"), "Ten years."],
        agent("research", model, system_prompt="You look things up."),
    )
    assert texts(result) == ["Rust is ten years old."]
    assert result.text == "Ten years."
    request = model.requests[0]
    assert request.system_prompt == "You look things up."
    assert outline(request.messages) == ["user: How old is Rust?"]


async def test_the_model_sees_a_tool_with_one_parameter() -> None:
    schema = agent("research", []).schema
    assert (schema.name, schema.description) == ("research", "the research")
    assert list(schema.parameters["properties"]) == ["task"]
    assert schema.parameters["required"] == ["task"]
    assert schema.parameters["properties"]["task"]["description"]


async def test_a_child_knows_nothing_of_the_conversation_above_it() -> None:
    model = ScriptedStream(["fine"])
    context = AgentContext("A secret.", (UserMessage("Another secret."), say("I see.")))
    await tree_result([ask("child", "just this"), "ok"], agent("child", model), context=context)
    assert "secret" not in repr(model.requests[0])


async def test_a_child_that_says_nothing_has_a_result_all_the_same() -> None:
    silent = AssistantMessage((), say("x").stop_reason)
    result, _ = await tree_result([ask("child"), "ok"], agent("child", [silent]))
    assert texts(result) == ["The agent ended without a word."]
    assert not results(result)[0].is_error


async def test_the_last_words_count_also_when_they_came_with_the_last_call() -> None:
    result, _ = await tree_result(
        [ask("child"), "ok"],
        agent("child", [say("Here it is.", call("end"))], Work("end", ToolResult.terminal("bye"))),
    )
    assert texts(result) == ["Here it is."]


async def test_one_tool_serves_many_runs_at_once() -> None:
    child = agent("child", ScriptedStream(["mine"], at_end="repeat"))
    config = LoopConfig(stream=ScriptedStream([]), tools=[child])
    runs = [
        run("go", CONTEXT, config.replace(stream=ScriptedStream([ask("child"), "ok"])))
        for _ in range(20)
    ]
    for result in await asyncio.gather(*runs):
        assert texts(result) == ["mine"]


@pytest.mark.parametrize("config", [None, "config", AgentContext()])
def test_an_agent_needs_a_config(config: Any) -> None:
    with pytest.raises(ConfigError, match="LoopConfig"):
        agent_tool("child", "a child", config)


async def test_a_tool_may_start_a_run_with_messages_of_any_kind() -> None:
    prompts: list[AgentMessage] = [SystemMessage("mind the gap"), UserMessage("go")]
    model = ScriptedStream(["gone"])

    async def start(args: Any, ctx: ToolContext) -> str:
        result = await run_child(ctx, prompts, LoopConfig(stream=model), system_prompt="sys")
        assert result.messages[:2] == tuple(prompts)
        return result.text

    result, _ = await tree_result([call("work"), "ok"], Work(does=start))
    assert texts(result) == ["gone"]
    assert list(model.requests[0].messages) == prompts


async def test_what_is_no_config_is_refused_before_anything_runs() -> None:
    delegate = Delegate()
    delegate.config = "config"  # type: ignore[assignment]
    result, _ = await tree_result([call("delegate"), "ok"], delegate)
    assert results(result)[0].is_error
    assert isinstance(delegate.outcomes[0], AttributeError | TypeError)


async def test_outside_of_a_run_a_child_is_a_run_like_any_other() -> None:
    """As in the test of a tool."""
    ctx = ToolContext(tool_call_id="c", tool_name="t")
    sink = RecordingSink()
    config = LoopConfig(stream=ScriptedStream(["alone"]), event_sink=sink, clock=FakeClock())
    result = await run_child(ctx, "go", config)
    assert result.text == "alone"
    (identified,) = sink.of(ev.RunIdentified)
    assert identified.identity == RunIdentity("id-2", "id-1", 1)
    ctx.signal.cancel("enough")
    with pytest.raises(RunAborted, match="enough"):
        await run_child(ctx, "go", config)


# --- who is who ---------------------------------------------------------------------------------


async def test_a_child_is_known_by_its_parent_its_depth_and_its_conversation() -> None:
    grandchild = agent("lower", ["deep"])
    identity = replace(ROOT, deadline_unix_ms=2**60)
    result, sink = await tree_result(
        [ask("upper", call_id="up"), "ok"],
        agent("upper", [ask("lower", call_id="down"), "high"], grandchild),
        context=replace(CONTEXT, identity=identity),
    )
    assert texts(result) == ["high"]
    known = identities(sink.events)
    upper, lower = known["up"], known["down"]
    assert upper == RunIdentity(upper.run_id, "root", 1, "talk", 2**60)
    assert lower == RunIdentity(lower.run_id, upper.run_id, 2, "talk", 2**60)
    assert len({"root", upper.run_id, lower.run_id}) == 3


async def test_children_of_a_run_without_a_name_have_one_parent() -> None:
    delegate = Delegate(LoopConfig(stream=ScriptedStream(["a", "b", "c", "d"])))
    calls = [call("delegate", call_id=f"d{n}") for n in range(4)]
    _, sink = await tree_result([calls[:2], calls[2], calls[3], "ok"], delegate)
    known = identities(sink.events)
    (parent,) = {identity.parent_run_id for identity in known.values()}
    assert parent
    assert len({identity.run_id for identity in known.values()}) == 4
    assert {identity.depth for identity in known.values()} == {1}
    assert not sink.of(ev.RunIdentified), "the host has not named the run, so nobody is told"
    assert [identity and identity.run_id for identity in delegate.identities] == [parent] * 4


async def test_two_runs_without_a_name_are_two_parents() -> None:
    delegate = Delegate(LoopConfig(stream=ScriptedStream(["a"], at_end="repeat")))
    config = LoopConfig(stream=ScriptedStream([]), tools=[delegate])
    for _ in range(2):
        await run("go", CONTEXT, config.replace(stream=ScriptedStream([call("delegate"), "ok"])))
    first, second = [identity and identity.run_id for identity in delegate.identities]
    assert first != second


# --- what is heard of a child -------------------------------------------------------------------


async def test_the_events_of_a_child_are_in_the_parents_stream() -> None:
    _, sink = await tree_result(
        [ask("child", "count", call_id="it"), "ok"], agent("child", ["one two"])
    )
    (told,) = by_run(sink.events).values()
    assert [str(event.__struct_config__.tag) for event in told] == [
        "agent_start",
        "run_identified",
        "turn_start",
        "message_start",
        "message_end",
        "provider_request_prepared",
        "message_start",
        "message_update",
        "message_update",
        "message_end",
        "turn_end",
        "agent_end",
    ]
    assert {event.tool_call_id for event in child_events(sink.events)} == {"it"}
    start = sink.types.index("tool_execution_start")
    end = sink.types.index("tool_execution_end")
    assert sink.types[start + 1 : end] == ["child_run_event"] * 12
    assert sink.types.count("child_run_event") == 12


async def test_the_events_of_one_run_fold_to_its_messages() -> None:
    clock = FakeClock()
    delegate = Delegate(
        LoopConfig(
            stream=ScriptedStream(
                [
                    failing("empty"),
                    say("first", call("work")),
                    say("second", call("work"), call("work")),
                    "done",
                ]
            ),
            tools=[Work()],
            clock=clock,
        )
    )
    _, sink = await tree_result([call("delegate"), "ok"], delegate, clock=clock)
    (told,) = by_run(sink.events).values()
    (result,) = delegate.outcomes
    assert isinstance(result, RunResult)
    assert fold_events(told) == result.messages
    assert isinstance(told[-1], ev.AgentEnd)
    assert tuple(told[-1].messages) == result.messages


async def test_the_events_of_a_run_that_fails_fold_to_what_it_had() -> None:
    script: list[Step] = [say("so far", call("work")), failing("fatal", "broken", "half a")]
    delegate = Delegate(LoopConfig(stream=ScriptedStream(script), tools=[Work()]))
    result, sink = await tree_result([call("delegate"), "ok"], delegate)
    (told,) = by_run(sink.events).values()
    (error,) = delegate.outcomes
    assert isinstance(error, StreamError)
    assert fold_events(told) == error.messages
    assert "StreamError" in texts(result)[0]


async def test_grandchildren_are_told_of_flat() -> None:
    lowest = agent("lowest", ["bottom"])
    lower = agent("lower", [ask("lowest", call_id="c3"), "deep"], lowest)
    upper = agent("upper", [ask("lower", call_id="c2"), "high"], lower)
    _, sink = await tree_result([ask("upper", call_id="c1"), "ok"], upper)
    known = identities(sink.events)
    assert [known[name].depth for name in ("c1", "c2", "c3")] == [1, 2, 3]
    said = {}
    for name, identity in known.items():
        *_, answer = fold_events(by_run(sink.events)[identity.run_id])
        said[name] = getattr(answer, "plain_text", None)
    assert said == {"c1": "high", "c2": "deep", "c3": "bottom"}


async def test_children_that_run_at_once_are_told_apart() -> None:
    both = asyncio.Barrier(2)

    async def meet(args: Any, ctx: ToolContext) -> str:
        await both.wait()
        return "met"

    twins = agent(
        "twin", ScriptedStream([call("meet"), call("meet"), "I am one"]), Work("meet", meet)
    )
    # One script for two runs would mix their turns: each call makes an agent of its own.
    others = agent(
        "other", ScriptedStream([call("meet"), call("meet"), "I am two"]), Work("meet", meet)
    )
    result, sink = await tree_result(
        [[ask("twin", call_id="a"), ask("other", call_id="b")], "ok"], twins, others
    )
    assert texts(result) == ["I am one", "I am two"]
    order = [event.tool_call_id for event in child_events(sink.events)]
    assert order != sorted(order), "they should have been mixed for this to show anything"
    known = identities(sink.events)
    assert known["a"].run_id != known["b"].run_id
    assert known["a"].parent_run_id == known["b"].parent_run_id
    for name, words in (("a", "I am one"), ("b", "I am two")):
        told = by_run(sink.events)[known[name].run_id]
        assert outline(fold_events(told))[-1] == f"assistant: {words}"


@pytest.mark.parametrize("deep", [False, True])
async def test_no_event_is_made_when_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    sent: list[AgentEvent] = []

    class Counted(ev.ChildRunEvent, frozen=True):
        def __post_init__(self) -> None:
            sent.append(self)

    monkeypatch.setattr(sub_agents, "ChildRunEvent", Counted)
    child = agent("child", ["fine"])
    if deep:
        child = agent("child", [ask("child"), "so it is"], child)
    config = LoopConfig(stream=ScriptedStream([ask("child"), "ok"]), tools=[child])
    await run("go", CONTEXT, config)
    assert sent == []

    ends: list[AgentEvent] = []

    class Ends:
        name = "ends"
        observes = (ev.TurnEnd,)

        def on_event(self, event: AgentEvent) -> None:
            ends.append(event)

    script: list[Step] = [ask("child"), "ok"]
    child = agent("child", ["fine"])
    await run(
        "go",
        CONTEXT,
        config.replace(stream=ScriptedStream(script), tools=[child], plugins=[Ends()]),
    )
    assert sent == []
    assert len(ends) == 2, "the turns of the child are nothing to an observer of turns"


async def test_an_observer_may_want_nothing_but_children() -> None:
    seen: list[AgentEvent] = []

    class Children:
        name = "children"
        observes = (ev.ChildRunEvent,)

        def on_event(self, event: AgentEvent) -> None:
            seen.append(event)

    config = LoopConfig(
        stream=ScriptedStream([ask("child"), "ok"]),
        tools=[agent("child", [ask("lower"), "fine"], agent("lower", ["deep"]))],
        plugins=[Children()],
    )
    await run("go", CONTEXT, config)
    runs = by_run(seen)
    assert len(runs) == 2
    assert len(child_events(seen)) == len(seen)
    for told in runs.values():
        check_events(told)


async def test_a_sink_of_the_childs_own_gets_its_events_as_they_are() -> None:
    own = RecordingSink()
    lower = agent("lower", ["deep"])
    upper = agent("upper", [ask("lower"), "high"], lower, event_sink=own)
    _, sink = await tree_result([ask("upper", call_id="up"), "ok"], upper)
    check_tree(own.events)
    run_id = identities(sink.events)["up"].run_id
    raw = [event for event in own.events if not isinstance(event, ev.ChildRunEvent)]
    assert raw == by_run(sink.events)[run_id]
    assert len(by_run(own.events)) == 1, "and wraps those of its own child"

    alone = RecordingSink()
    config = LoopConfig(
        stream=ScriptedStream([ask("upper"), "ok"]),
        tools=[agent("upper", ["high"], event_sink=alone)],
    )
    await run("go", CONTEXT, config)
    check_events(alone.events)
    assert len(alone.events) == 11


async def test_a_stream_of_events_has_those_of_the_children() -> None:
    child = agent("child", ["a b c d e f g h"])
    config = LoopConfig(stream=ScriptedStream([ask("child"), "ok"]), tools=[child])
    seen: list[AgentEvent] = []
    async with stream_run("go", CONTEXT, config, max_buffered=1) as events:
        async for event in events:
            seen.append(event)  # noqa: PERF401 (one by one, as a reader does)
    check_tree(seen)
    assert len(by_run(seen)) == 1
    assert events.result.text == "ok"


async def test_leaving_a_stream_of_events_ends_the_children_too() -> None:
    waiting = Waiting()
    child = agent("child", [call("wait")], Work("wait", waiting))
    config = LoopConfig(stream=ScriptedStream([ask("child")]), tools=[child])
    before = asyncio.all_tasks()
    async with stream_run("go", CONTEXT, config) as events:
        async for event in events:
            if isinstance(event, ev.ChildRunEvent) and isinstance(
                event.event, ev.ToolExecutionStart
            ):
                await waiting.started.wait()
                break
    assert waiting.cancelled
    assert asyncio.all_tasks() == before


async def test_a_listener_that_fails_on_the_childs_events_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def touchy(event: AgentEvent) -> None:
        if isinstance(event, ev.ChildRunEvent):
            raise LookupError("children!")

    result, sink = await tree_result(
        [ask("child"), "ok"],
        agent("child", ["fine"]),
        plugins=[FunctionPlugin("event_observer", touchy, name="touchy")],
    )
    assert texts(result) == ["fine"]
    assert len(by_run(sink.events)) == 1
    assert "touchy" in caplog.text


# --- limits, failures, and what there was so far ------------------------------------------------

NOT_YET: list[Step] = [say("I have half of it.", call("work")), call("work"), call("work")]


def only_result(outcome: Any) -> Any:
    (result,) = results(outcome)
    assert result.details["kind"] == "sub_agent"
    assert result.details.keys() == {"kind", "outcome", "usage"}
    return result


@pytest.mark.parametrize(
    ("limits", "outcome", "said"),
    [
        ({"max_iterations": 2}, "hit_max_iterations", "The agent ran out of turns."),
        ({"budget": Budget(turns=2)}, "out_of_budget", "The agent ran out of turns."),
        ({"budget": Budget(tokens=1)}, "out_of_budget", "The agent ran out of tokens."),
        ({"budget": Budget(turns=0)}, "out_of_budget", "The agent ran out of turns."),
    ],
)
async def test_a_child_at_its_limit_gives_what_it_has(
    limits: dict[str, Any], outcome: str, said: str
) -> None:
    result, _ = await tree_result(
        [ask("child"), "I make do with that."], agent("child", NOT_YET, Work(), **limits)
    )
    answer = only_result(result)
    assert not answer.is_error
    assert answer.plain_text.startswith(said)
    asked = limits != {"budget": Budget(turns=0)}
    assert ("I have half of it." in answer.plain_text) is asked
    assert ("It had said nothing yet." in answer.plain_text) is not asked
    assert answer.details["outcome"] == outcome
    assert result.outcome is LoopOutcome.DONE
    assert result.text == "I make do with that."


@pytest.mark.parametrize(
    ("script", "reason", "said"),
    [
        ([say("Half of it.", call("work")), failing("fatal", "no power")], "no power", "Half of"),
        ([failing("fatal", "no power", "Well, I ", "think")], "no power", "Well, I think"),
        ([failing("fatal", "no power")], "no power", "It had said nothing yet."),
        ([OSError("the wire is cut")], "the wire is cut", "It had said nothing yet."),
        ([say("On it.", call("fatal"))], "the house is on fire", "On it."),
    ],
)
async def test_a_child_that_fails_gives_an_error_with_what_it_has(
    script: list[Step], reason: str, said: str
) -> None:
    tools = [Work(), Work("fatal", ToolFatal("the house is on fire"))]
    result, _ = await tree_result([ask("child"), "Oh."], agent("child", script, *tools))
    answer = only_result(result)
    assert answer.is_error
    assert reason in answer.plain_text
    assert said in answer.plain_text
    assert answer.details["outcome"] == "failed"
    assert (result.outcome, result.text) == (LoopOutcome.DONE, "Oh.")


async def test_a_child_that_wraps_up_in_time_is_complete() -> None:
    result, _ = await tree_result(
        [ask("child"), "ok"],
        agent("child", [call("work"), "That is all I have."], Work(), budget=Budget(turns=2)),
    )
    answer = only_result(result)
    assert answer.plain_text == "That is all I have."
    assert answer.details["outcome"] == "wrapped_up"


async def test_the_tokens_of_a_child_are_in_the_details() -> None:
    lower = agent("lower", [paid(4, "deep")])
    child = agent("child", [paid(1, "", ask("lower")), paid(2, "high")], lower)
    result, _ = await tree_result([paid(8, "", ask("child")), paid(16, "ok")], child)
    usage = only_result(result).details["usage"]
    assert msgspec.convert(usage, Usage) == Usage(7)
    assert json.loads(json.dumps(usage)) == usage


# --- structured answers -------------------------------------------------------------------------


class Verdict(msgspec.Struct):
    decision: Literal["yes", "no"]
    score: int


async def test_a_child_that_finishes_with_a_value_returns_it_as_json() -> None:
    result, _ = await tree_result(
        [ask("judge"), "ok"],
        agent(
            "judge",
            [call("finish", decision="maybe", score=1), call("finish", decision="yes", score=9)],
            finish_tool(Verdict),
        ),
    )
    answer = only_result(result)
    assert json.loads(answer.plain_text) == {"decision": "yes", "score": 9}
    assert answer.details["outcome"] == "done"
    assert not answer.is_error


@pytest.mark.parametrize(
    ("kind", "value"), [(int, 0), (bool, False), (list[str], []), (dict[str, int], {"a": 1})]
)
async def test_an_answer_that_counts_for_nothing_is_an_answer(kind: Any, value: Any) -> None:
    result, _ = await tree_result(
        [ask("judge"), "ok"], agent("judge", [call("finish", answer=value)], finish_tool(kind))
    )
    assert json.loads(only_result(result).plain_text) == value


async def test_a_child_that_does_not_finish_has_its_words() -> None:
    result, _ = await tree_result(
        [ask("judge"), "ok"], agent("judge", ["I cannot say."], finish_tool(Verdict))
    )
    assert only_result(result).plain_text == "I cannot say."


# --- how deep -----------------------------------------------------------------------------------


def endless(depths: list[int], **options: Any) -> Delegate:
    """An agent that starts itself as long as it may."""
    deeper = Delegate(**options)

    def decide(request: StreamRequest) -> Step:
        if len(request.messages) > 1:
            return texts(list(request.messages))[-1]
        depths.append(len(depths) + 1)
        return call("delegate")

    stream = ScriptedStream([decide], at_end="repeat")
    deeper.config = LoopConfig(stream=stream, tools=[deeper])
    return deeper


@pytest.mark.parametrize(
    ("options", "deepest"), [({}, 3), ({"max_depth": 1}, 1), ({"max_depth": 5}, 5)]
)
async def test_a_run_too_deep_is_refused_and_the_others_go_on(
    options: dict[str, int], deepest: int
) -> None:
    depths: list[int] = []
    result, sink = await tree_result([call("delegate"), "ok"], endless(depths, **options))
    assert len(depths) == deepest
    assert max(identity.depth for identity in identities(sink.events).values()) == deepest
    assert "no agent may be started here" in texts(result)[0]
    assert f"{deepest} levels" in texts(result)[0]
    assert result.outcome is LoopOutcome.DONE


async def test_at_depth_zero_nobody_is_started() -> None:
    model = ScriptedStream(["unheard"])
    result, sink = await tree_result(
        [ask("child"), "Then I do it."], agent("child", model, max_depth=0)
    )
    assert results(result)[0].is_error
    assert "no agent may be started here" in texts(result)[0]
    assert model.requests == []
    assert not child_events(sink.events)
    assert result.text == "Then I do it."


async def test_the_depth_counts_from_the_outermost_run() -> None:
    context = replace(CONTEXT, identity=replace(ROOT, depth=3))
    result, _ = await tree_result([ask("child"), "ok"], agent("child", ["hi"]), context=context)
    assert results(result)[0].is_error


async def test_run_child_raises_when_it_is_too_deep() -> None:
    delegate = Delegate(LoopConfig(stream=ScriptedStream(["unheard"])), max_depth=0)
    result, _ = await tree_result([call("delegate"), "ok"], delegate)
    assert isinstance(delegate.outcomes[0], ToolExecutionError)
    assert results(result)[0].is_error


# --- tokens -------------------------------------------------------------------------------------


async def test_tokens_are_added_up_the_tree() -> None:
    lower = agent("lower", [paid(1, "", call("work")), paid(2, "deep")], Work())
    upper = agent("upper", [paid(4, "", ask("lower")), paid(8, "high")], lower)
    other = agent("other", [paid(16, "beside")])
    result, _ = await tree_result(
        [paid(32, "", ask("upper"), ask("other")), paid(64, "ok")], upper, other
    )
    assert result.usage == Usage(96)
    assert result.tree_usage == Usage(127)


async def test_a_run_without_children_has_its_own_tokens() -> None:
    result, _ = await tree_result([paid(3, "ok")])
    assert result.usage == result.tree_usage == Usage(3)


async def test_tokens_of_children_that_fail_count() -> None:
    script: list[Step] = [paid(1, "", call("work")), failing("fatal")]
    result, _ = await tree_result(
        [paid(2, "", ask("child")), paid(4, "ok")], agent("child", script, Work())
    )
    assert result.tree_usage == Usage(7)
    assert only_result(result).details["usage"]["input_tokens"] == 1


async def test_tokens_of_children_count_when_the_run_fails() -> None:
    lower = agent("lower", [paid(1, "deep")])
    child = agent("child", [paid(2, "", ask("lower")), paid(4, "fine")], lower)
    error, _ = await tree_run([paid(8, "", ask("child")), failing("fatal")], child)
    assert isinstance(error, StreamError)
    assert (error.usage, error.tree_usage) == (Usage(8), Usage(15))


async def test_tokens_of_a_child_that_is_stopped_by_a_fatal_tool_count() -> None:
    waiting = Waiting()

    async def burn(args: Any, ctx: ToolContext) -> ToolResult:
        await waiting.started.wait()
        raise ToolFatal("the house is on fire")

    child = agent("child", [paid(1, "", call("wait"))], Work("wait", waiting))
    error, _ = await tree_run([paid(2, "", ask("child"), call("burn"))], child, Work("burn", burn))
    assert isinstance(error, RunStoppedByTool)
    assert (error.usage, error.tree_usage) == (Usage(2), Usage(3))
    assert waiting.cancelled


async def test_answers_that_were_asked_for_again_count_in_the_tree() -> None:
    cut = replace(truncated(), usage=Usage(1))
    child = agent(
        "child",
        [cut, paid(2, "whole")],
        max_output_tokens=5,
        max_output_tokens_recovery=MaxTokensRecovery(),
    )
    result, _ = await tree_result([paid(4, "", ask("child")), paid(8, "ok")], child)
    assert texts(result) == ["whole"]
    assert (result.usage, result.tree_usage) == (Usage(12), Usage(15))


# --- stopping a tree ----------------------------------------------------------------------------

Where = Literal["tool", "stream"]
Stop = Literal["token", "task", "timeout", "sibling", "steering"]


class Tower:
    """Three runs, one below the other. The lowest waits for good, in its tool or its stream."""

    def __init__(self, where: Where, stop: Stop) -> None:
        self.open_streams = 0
        self.waiting = Waiting()
        self.idle = Waiting()
        self.steering = ChannelSteering()
        self.token = CancellationToken()
        hanging = self.model(paid(1, "Digging.", call("wait")), hangs=where == "stream")
        beside = Work("idle", self.idle)
        lower = agent("lower", hanging, Work("wait", self.waiting))
        middle = self.model(paid(2, "I ask below.", ask("lower"), call("idle")))
        timeout = 50 if stop == "timeout" else None
        self.upper = agent("upper", middle, lower, beside, timeout=timeout)
        self.top = [ask("upper")] if stop != "sibling" else [ask("upper"), call("fail")]

    def model(self, *script: AssistantMessage, hangs: bool = False) -> StreamFn:
        quiet = CancellationToken()
        answers = iter(ScriptedStream(script)._stream(a, quiet) for a in script)

        async def play(
            request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            self.open_streams += 1
            try:
                for event in next(answers):
                    if hangs and isinstance(event, Done):
                        self.waiting.started.set()
                        try:
                            await asyncio.Event().wait()
                        finally:
                            self.waiting.cancelled = True
                    yield event
            finally:
                self.open_streams -= 1

        return play

    async def both_wait(self) -> None:
        await self.waiting.started.wait()
        await self.idle.started.wait()

    async def fail(self, args: Any, ctx: ToolContext) -> ToolResult:
        await self.both_wait()
        return ToolResult.error("I failed.")

    def check_nothing_left(self) -> None:
        assert self.waiting.cancelled
        assert self.idle.cancelled
        assert self.open_streams == 0
        assert left_behind() == 0
        assert timers() == []


async def stopped(
    where: Where, stop: Stop, **options: Any
) -> tuple[Tower, RunResult | BaseException, RecordingSink]:
    """Let a tower stand until it waits, stop it, and look whether anything is left of it."""
    tower = Tower(where, stop)
    root = [paid(4, "You do it.", *tower.top), paid(8, "ok")]
    fail = Work("fail", tower.fail, aborts_siblings_on_error=True)
    watcher: asyncio.Task[object] | None = None

    async def stop_it(task: asyncio.Task[Any]) -> None:
        await tower.both_wait()
        match stop:
            case "token":
                tower.token.cancel("enough")
            case "task":
                task.cancel()
            case "timeout":
                hurry()
            case "steering":
                _ = tower.steering.handle.steer("Leave it.", "now")
            case _:
                pass

    async def whole() -> tuple[RunResult | BaseException, RecordingSink]:
        nonlocal watcher
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(stop_it(task))
        await asyncio.sleep(0)
        outcome = await tree_run(
            root, tower.upper, fail, signal=tower.token, plugins=[tower.steering], **options
        )
        while task.cancelling():
            task.uncancel()
        return outcome

    outcome, sink = await asyncio.create_task(whole())
    assert watcher is not None
    await watcher
    tower.check_nothing_left()
    return tower, outcome, sink


def told_of(sink: RecordingSink) -> list[list[str]]:
    """The messages of each run below, the highest first."""
    return [outline(fold_events(told)) for told in by_run(sink.events).values()]


@pytest.mark.parametrize("where", ["tool", "stream"])
async def test_a_token_stops_the_whole_tree(where: Where) -> None:
    _, outcome, sink = await stopped(where, "token")
    assert isinstance(outcome, RunAborted)
    assert outcome.reason == "enough"
    assert outcome.usage == Usage(4)
    assert outcome.tree_usage == Usage(7 if where == "tool" else 6)
    assert len(by_run(sink.events)) == 2


@pytest.mark.parametrize("where", ["tool", "stream"])
async def test_a_cancelled_task_stops_the_whole_tree(where: Where) -> None:
    _, outcome, sink = await stopped(where, "task")
    assert isinstance(outcome, asyncio.CancelledError)
    failure = failure_of(outcome)
    assert failure is not None
    assert failure.tree_usage == Usage(7 if where == "tool" else 6)
    assert len(by_run(sink.events)) == 2


@pytest.mark.parametrize("where", ["tool", "stream"])
@pytest.mark.parametrize("stop", ["timeout", "sibling", "steering"])
async def test_a_call_that_is_stopped_stops_all_below_it(where: Where, stop: Stop) -> None:
    _, outcome, sink = await stopped(where, stop)
    assert isinstance(outcome, RunResult)
    assert outcome.text == "ok"
    assert outcome.tree_usage == Usage(15 if where == "tool" else 14)
    upper, lower = told_of(sink)
    assert upper[1] == "assistant: I ask below."
    assert lower[1:2] == (["assistant: Digging."] if where == "tool" else [])
    answer = results(outcome)[0]
    assert answer.is_error
    assert "I ask below." in answer.plain_text
    assert answer.details["kind"] == "sub_agent"
    assert answer.details["outcome"] == "stopped"
    assert answer.details["reason"] == {"steering": "steered"}.get(stop, stop)
    assert answer.details["usage"]["input_tokens"] == (3 if where == "tool" else 2)


async def test_what_is_steered_into_the_parent_is_the_next_thing_it_sees() -> None:
    _, outcome, _ = await stopped("tool", "steering")
    assert isinstance(outcome, RunResult)
    assert outline(outcome.messages)[-2:] == ["user: Leave it.", "assistant: ok"]


async def test_a_gentler_word_waits_for_the_child() -> None:
    steering = ChannelSteering()

    async def say_it(args: Any, ctx: ToolContext) -> str:
        _ = steering.handle.steer("Hurry.", "before_next_tool")
        return "said"

    child = agent("child", [call("say_it"), call("say_it"), "done"], Work("say_it", say_it))
    result, _ = await tree_result([ask("child"), "ok"], child, plugins=[steering])
    assert texts(result) == ["done"]


async def test_a_child_is_stopped_once_its_call_is_and_its_sibling_goes_on() -> None:
    stopped = asyncio.Event()

    async def wait(args: Any, ctx: ToolContext) -> str:
        hurry()
        await ctx.signal.wait()
        stopped.set()
        return "never mind"

    async def watch(args: Any, ctx: ToolContext) -> str:
        await stopped.wait()
        return "still here"

    slow = agent("slow", [call("wait")], Work("wait", wait), timeout=50)
    other = agent("other", [call("watch"), "fine"], Work("watch", watch))
    result, _ = await tree_result([[ask("slow"), ask("other")], "ok"], slow, other)
    assert "took too long" in texts(result)[0]
    assert texts(result)[1] == "fine"


async def test_a_timeout_in_the_child_is_the_childs_affair() -> None:
    waiting = Waiting()
    child = agent("child", [call("wait"), "it took too long"], Work("wait", waiting, timeout=0.01))
    result, _ = await tree_result([ask("child"), "ok"], child)
    assert texts(result) == ["it took too long"]
    assert waiting.cancelled


@pytest.mark.parametrize("by", ["token", "task"])
async def test_a_grandchilds_tool_that_takes_no_cancellation_is_left_behind(by: str) -> None:
    stubborn, token = Stubborn(), CancellationToken()
    lower = agent("lower", [call("stay")], Work("stay", stubborn))
    upper = agent("upper", [ask("lower")], lower)

    async def whole() -> tuple[RunResult | BaseException, RecordingSink]:
        task = asyncio.current_task()
        assert task is not None

        async def stop_once_it_runs() -> None:
            await stubborn.started.wait()
            if by == "token":
                token.cancel()
            else:
                task.cancel()

        stopping = asyncio.create_task(stop_once_it_runs())
        outcome = await tree_run(
            [ask("upper")], upper, signal=token, cancel_grace=0.2, leaves_tasks=True
        )
        await stopping
        while task.cancelling():
            task.uncancel()
        return outcome

    outcome, sink = await asyncio.create_task(whole())
    wanted = RunAborted if by == "token" else asyncio.CancelledError
    assert isinstance(outcome, wanted)
    assert not stubborn.ended.is_set()
    assert left_behind() == 1
    _, lowest = by_run(sink.events).values()
    (answer,) = results(fold_events(lowest))
    assert answer.details["still_running"] is True
    stubborn.release.set()
    await stubborn.ended.wait()
    await let_others_run()
    assert left_behind() == 0


@pytest.mark.parametrize("by", ["token", "task"])
async def test_a_childs_model_that_takes_no_cancellation_is_left_behind(by: str) -> None:
    release, token = asyncio.Event(), CancellationToken()
    asked = asyncio.Event()

    async def deaf(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        asked.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        yield Done(say("too late"))

    config = LoopConfig(
        stream=ScriptedStream([ask("child")]), tools=[agent("child", deaf)], cancel_grace=0.02
    )
    before = asyncio.all_tasks()
    task = asyncio.create_task(run("go", CONTEXT, config, token))
    await asked.wait()
    if by == "token":
        token.cancel()
    else:
        task.cancel()
    ended, _ = await asyncio.wait([task], timeout=2)
    release.set()
    await asyncio.wait([task])
    await let_others_run()
    assert ended, "the run waited for a child that does not listen"
    assert asyncio.all_tasks() == before


async def test_a_child_that_was_left_behind_is_heard_no_more() -> None:
    """Its call is over, and with it the part of the stream where its events belong."""
    stubborn, late = Stubborn(), asyncio.Event()

    async def start(args: Any, ctx: ToolContext) -> ToolResult:
        await stubborn(args, ctx)
        await run_child(ctx, "go", LoopConfig(stream=ScriptedStream(["late"])))
        late.set()
        return ToolResult.text("late")

    work = Work("start", start, timeout=0.01)
    result, sink = await tree_result(
        [call("start"), "ok"], work, cancel_grace=0.01, leaves_tasks=True
    )
    told = len(sink.events)
    assert results(result)[0].details["still_running"] is True
    stubborn.release.set()
    await let_others_run()
    assert len(sink.events) == told
    assert left_behind() == 0


async def test_a_child_gets_less_grace_than_its_parent() -> None:
    """A tool of the child that cleans up slowly is left behind by the child, not the child too."""
    stubborn = Stubborn()

    async def stay(args: Any, ctx: ToolContext) -> ToolResult:
        hurry()
        return await stubborn(args, ctx)

    child = agent("child", [say("Well.", call("stay"))], Work("stay", stay), timeout=50)
    result, sink = await tree_result(
        [ask("child"), "ok"], child, cancel_grace=0.2, leaves_tasks=True
    )
    (told,) = by_run(sink.events).values()
    assert results(fold_events(told))[0].details["still_running"] is True
    assert results(result)[0].details["kind"] == "sub_agent", "the child itself came to an end"
    stubborn.release.set()
    await stubborn.ended.wait()
    await let_others_run()


# --- deadlines ----------------------------------------------------------------------------------


def due(milliseconds: int) -> tuple[FakeClock, AgentContext]:
    """A clock, and the context of a run that must be done so soon."""
    clock = FakeClock()
    identity = replace(ROOT, deadline_unix_ms=clock.now_ms() + milliseconds)
    return clock, replace(CONTEXT, identity=identity)


@pytest.mark.parametrize("where", ["tool", "stream"])
async def test_a_child_stops_at_the_deadline_with_what_it_has(where: Where) -> None:
    clock, context = due(20_000)
    stopped = False

    async def wait(args: Any, ctx: ToolContext) -> str:
        nonlocal stopped
        try:
            await for_good()
        finally:
            stopped = True
        return "never"

    async def dawdle(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(PLACEHOLDER)
        yield Chunk(TextChunk("So far so good."))
        if where == "stream":
            await for_good()
        yield Done(say("So far so good.", call("wait", call_id="w")))

    child = agent("child", dawdle, Work("wait", wait), clock=clock)
    result, sink = await tree_result([ask("child"), "ok"], child, clock=clock, context=context)
    answer = only_result(result)
    assert answer.details["outcome"] == "out_of_budget"
    assert answer.plain_text.startswith("The agent ran out of seconds.")
    assert ("So far so good." in answer.plain_text) is (where == "tool")
    assert not answer.is_error
    assert stopped is (where == "tool")
    assert result.outcome is LoopOutcome.DONE, "the host's own run is the host's affair"
    (told,) = by_run(sink.events).values()
    assert isinstance(told[-1], ev.AgentEnd)


async def test_past_the_deadline_a_child_does_not_ask_its_model() -> None:
    clock, context = due(0)
    model = ScriptedStream(["unheard"])
    child = agent("child", model, clock=clock)
    result, _ = await tree_result([ask("child"), "ok"], child, clock=clock, context=context)
    assert only_result(result).details["outcome"] == "out_of_budget"
    assert model.requests == []


async def test_the_deadline_reaches_all_levels() -> None:
    clock, context = due(20_000)
    wait = Work("wait", lambda args, ctx: for_good())
    lower = agent("lower", [say("Deep.", call("wait"))], wait, clock=clock)
    upper = agent("upper", [say("High.", ask("lower")), "late"], lower, clock=clock)
    result, sink = await tree_result([ask("upper"), "ok"], upper, clock=clock, context=context)
    assert len(wait.calls) == 1
    answer = only_result(result)
    assert answer.details["outcome"] == "out_of_budget"
    assert "High." in answer.plain_text
    known = identities(sink.events).values()
    assert {identity.deadline_unix_ms for identity in known} == {clock.now_ms() + 20_000}


async def test_the_shorter_of_deadline_and_budget_counts() -> None:
    clock, context = due(1_000_000)
    delegate = Delegate(
        LoopConfig(
            stream=ScriptedStream([call("wait")]),
            tools=[Work("wait", lambda args, ctx: for_good())],
            budget=Budget(seconds=10),
            clock=clock,
        )
    )
    await tree_result([call("delegate"), "ok"], delegate, clock=clock, context=context)
    (result,) = delegate.outcomes
    assert isinstance(result, RunResult)
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, "seconds")


async def test_a_deadline_leaves_the_other_limits_of_a_budget_alone() -> None:
    clock, context = due(60_000)
    delegate = Delegate(
        LoopConfig(
            stream=ScriptedStream([call("work")], at_end="repeat"),
            tools=[Work()],
            budget=Budget(turns=3, seconds=3600),
            clock=clock,
        )
    )
    await tree_result([call("delegate"), "ok"], delegate, clock=clock, context=context)
    (result,) = delegate.outcomes
    assert isinstance(result, RunResult)
    assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, "turns")
    assert result.spent is not None
    assert result.spent.turns == 3


async def test_a_deadline_far_away_is_no_matter() -> None:
    clock, context = due(60_000)
    child = agent("child", ["fine"], clock=clock)
    result, _ = await tree_result([ask("child"), "ok"], child, clock=clock, context=context)
    assert only_result(result).details["outcome"] == "done"
    assert timers() == []


# --- at every step of every run -----------------------------------------------------------------

Temper = Literal["fast", "slow", "hangs", "cleans_up", "waits_on_signal", "errs", "fatal", "deaf"]


@dataclass(frozen=True)
class Node:
    """An agent by what it does in each turn: the agents it asks and the tools it calls, at once.

    After its last turn it says that it is done. ``hangs`` never comes to its answer.
    """

    turns: tuple[tuple[Node | Temper, ...], ...] = ()
    hangs: bool = False


@dataclass
class Grove:
    """Where a tree of agents lives, and what is known of it."""

    open_streams: int = 0
    running: Counter[str] = field(default_factory=Counter)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def config(self, node: Node, **settings: Any) -> LoopConfig:
        tools: dict[str, AgentTool] = {}
        script: list[AssistantMessage] = []
        for number, turn in enumerate(node.turns):
            calls: list[ToolCall] = []
            for place, part in enumerate(turn):
                name = part if isinstance(part, str) else f"agent_{number}_{place}"
                if isinstance(part, Node):
                    tools[name] = agent_tool(name, "an agent", self.config(part))
                else:
                    tools[name] = Work(name, self.work(part))
                calls.append(call(name, task="go", call_id=f"{name}_{number}_{place}"))
            script.append(paid(1 + number, "I go on.", *calls))
        script.append(paid(100, "I am done."))
        return LoopConfig(stream=self.model(script, node.hangs), tools=tools.values(), **settings)

    def model(self, script: list[AssistantMessage], hangs: bool) -> StreamFn:
        answers = iter(script)

        async def play(
            request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            self.open_streams += 1
            try:
                yield Start(PLACEHOLDER)
                await asyncio.sleep(0)
                yield Chunk(TextChunk("I go "))
                if hangs:
                    await self.release.wait()
                yield Done(next(answers))
            finally:
                self.open_streams -= 1

        return play

    def work(self, temper: Temper) -> Callable[[Any, ToolContext], Coroutine[Any, Any, ToolResult]]:
        async def work(args: Any, ctx: ToolContext) -> ToolResult:
            self.running[temper] += 1
            try:
                return await self.do(temper, ctx)
            finally:
                self.running[temper] -= 1

        return work

    async def do(self, temper: Temper, ctx: ToolContext) -> ToolResult:
        match temper:
            case "slow":
                await asyncio.sleep(0)
                await ctx.update("half")
                await asyncio.sleep(0)
            case "hangs":
                await self.release.wait()
            case "cleans_up":
                try:
                    await self.release.wait()
                finally:
                    await asyncio.sleep(0)
            case "waits_on_signal":
                await ctx.signal.wait()
            case "deaf":
                while not self.release.is_set():
                    try:
                        await self.release.wait()
                    except asyncio.CancelledError:
                        continue
            case "errs":
                return ToolResult.error("no luck")
            case "fatal":
                await asyncio.sleep(0)
                raise ToolFatal("the house is on fire")
            case "fast":
                pass
        return ToolResult.text("did it")


class Stepped(Coroutine[Any, Any, Any]):
    """A coroutine that tells whenever it waits."""

    def __init__(self, inner: Coroutine[Any, Any, Any], waits: Callable[[], None]) -> None:
        self._inner = inner
        self._waits = waits

    def send(self, value: Any) -> Any:
        awaited = self._inner.send(value)
        self._waits()
        return awaited

    def throw(self, *error: Any) -> Any:
        awaited = self._inner.throw(*error)
        self._waits()
        return awaited

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        raise AssertionError("it is run by a task")


@contextmanager
def every_task(waits: Callable[[], None]) -> Iterator[None]:
    """Tell of every suspension point of all tasks that are made meanwhile."""
    loop = asyncio.get_running_loop()

    def make(loop: asyncio.AbstractEventLoop, inner: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(Stepped(inner, waits), loop=loop, **options)

    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(None)


_IDLE = 30
"""After so many passes of the event loop without a step nothing moves any more."""


@dataclass(frozen=True)
class Felled:
    outcome: RunResult | BaseException
    sink: RecordingSink
    steps: int


async def fell(
    node: Node,
    at: int = 0,
    by: Literal["token", "task"] = "token",
    passes: int = 0,
    *,
    slow_sink: bool = False,
    grace: float = 5.0,
) -> Felled:
    """Run the tree, cancel it at a step of any of its runs, and check that nothing is left.

    When all of it waits, and for good, it is cancelled in any case.
    """
    grove, sink, token = Grove(), RecordingSink(), CancellationToken()
    loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
    budget = Budget(turns=1000, tokens=10**6, seconds=60)

    async def listen(event: AgentEvent) -> None:
        sink(event)
        await asyncio.sleep(0)

    config = grove.config(
        node, event_sink=listen if slow_sink else sink, cancel_grace=grace, budget=budget
    )
    steps = 0
    task: asyncio.Task[RunResult] | None = None

    def act(more: int) -> None:
        assert task is not None
        if more > 0:
            loop.call_soon(act, more - 1)
        elif by == "token":
            token.cancel("felled")
        else:
            task.cancel()

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == at:
            act(passes)

    def watch(seen: int, idle: int) -> None:
        assert task is not None
        if idle > _IDLE:
            token.cancel("all of it waits")
        elif not task.done():
            loop.call_soon(watch, steps, idle + 1 if steps == seen else 0)

    with every_task(step):
        task = asyncio.create_task(run("go", CONTEXT, config, token))
        watch(0, 0)
        await asyncio.wait([task])
    outcome: RunResult | BaseException
    try:
        outcome = task.result()
    except (LoopError, asyncio.CancelledError) as error:
        outcome = error
    felled = Felled(outcome, sink, steps)
    check_felled(felled)
    assert grove.open_streams == 0
    running = {temper for temper, count in grove.running.items() if count}
    assert running <= {"deaf"}
    left = asyncio.all_tasks() - before
    assert len(left) == left_behind() <= grove.running["deaf"]
    grove.release.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not grove.running.total()
    assert asyncio.all_tasks() == before
    assert timers() == []
    return felled


def check_felled(felled: Felled) -> None:
    """All runs of the tree are sound, and their tokens add up."""
    carrier: Any = felled.outcome
    if isinstance(carrier, BaseException):
        carrier = failure_of(carrier)
        assert carrier is not None, felled.outcome
        assert type(carrier) is not LoopError, f"unexpected: {carrier!r}"
    check_tree(felled.sink.events)
    assert fold_events(felled.sink.events) == carrier.messages
    assert repair_history(carrier.messages).changes == ()
    own = tokens(felled.sink.events)
    assert carrier.usage.input_tokens == own
    below = sum(tokens(told) for told in by_run(felled.sink.events).values())
    assert carrier.tree_usage.input_tokens == own + below


def tokens(events: Iterable[AgentEvent]) -> int:
    return sum(
        event.message.usage.input_tokens
        for event in events
        if isinstance(event, ev.MessageEnd)
        and isinstance(event.message, AssistantMessage)
        and event.message.usage is not None
    )


LEAF = Node((("slow",),))
TREES: dict[str, Node] = {
    "three levels": Node(((Node(((LEAF,),)),),)),
    "three levels, two at once": Node(((Node(((LEAF, "slow"),)), LEAF), ("fast",))),
    "one that hangs at the bottom": Node(((Node(((Node((("hangs",),)),),)),),)),
    "a model that hangs at the bottom": Node(((Node(((Node(hangs=True),),)),),)),
    "one that cleans up beside one that waits": Node(
        ((Node(((Node((("cleans_up", "waits_on_signal"),)),),)),),)
    ),
    "a fatal tool beside one that hangs": Node(((Node((("fatal", Node((("hangs",),))),)),),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("slow_sink", [False, True])
@pytest.mark.parametrize("name", TREES)
async def test_a_tree_can_be_cancelled_at_every_step_of_every_run(
    name: str, slow_sink: bool
) -> None:
    node = TREES[name]
    steps = (await fell(node, slow_sink=slow_sink)).steps
    assert steps > (40 if slow_sink else 5)
    endings: Counter[str] = Counter()
    later = (0,) if slow_sink else (0, 1, 3)
    for at, by, passes in product(range(1, steps + 1), ("token", "task"), later):
        felled = await fell(node, at, by, passes, slow_sink=slow_sink)  # type: ignore[arg-type]
        endings[type(felled.outcome).__name__] += 1
    assert endings["RunAborted"] > 0
    assert endings["CancelledError"] > 0


async def test_a_tree_with_a_deaf_tool_can_be_cancelled_at_every_step() -> None:
    node = Node(((Node(((Node((("deaf",),)), "slow"),)),),))
    steps = (await fell(node, grace=0.1)).steps
    for at, by in product(range(1, steps + 1), ("token", "task")):
        await fell(node, at, by, grace=0.1)  # type: ignore[arg-type]


tempers = st.sampled_from(
    ["fast", "slow", "hangs", "cleans_up", "waits_on_signal", "errs", "fatal"]
)


def nodes(depth: int) -> st.SearchStrategy[Any]:
    """Trees of so many levels at most, with up to three calls at once."""
    parts: st.SearchStrategy[Any] = tempers
    if depth > 1:
        parts = st.one_of(nodes(depth - 1), tempers)
    turns = st.lists(parts, min_size=1, max_size=3, unique_by=str).map(tuple)
    return st.builds(
        Node,
        st.lists(turns, max_size=2).map(tuple),
        st.sampled_from([False, False, False, True]),
    )


@settings(max_examples=FELLED_TREES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    nodes(3),
    st.integers(0, 150),
    st.sampled_from(["token", "task"]),
    st.integers(0, 4),
    st.booleans(),
)
def test_any_tree_can_be_cancelled_anywhere(
    node: Node, at: int, by: Literal["token", "task"], passes: int, slow_sink: bool
) -> None:
    asyncio.run(fell(node, at, by, passes, slow_sink=slow_sink))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("", "d"), "agent_tool has no name"),
        (("a b!", "d"), "invalid tool name 'a b!'"),
        (("a", 5), "description must be a text"),
    ],
)
def test_an_agent_tool_that_makes_no_sense_is_refused(
    arguments: tuple[Any, Any], told: str
) -> None:
    config = LoopConfig(stream=ScriptedStream([]))
    with pytest.raises(ConfigError, match=told):
        agent_tool(*arguments, config)
    wrong: list[dict[str, Any]] = [{"system_prompt": 5}, {"max_depth": "3"}, {"max_depth": -1}]
    for options in wrong:
        with pytest.raises(ConfigError, match="agent_tool: "):
            agent_tool("a", "d", config, **options)
    with pytest.raises(ConfigError, match="needs a LoopConfig, not int"):
        agent_tool("a", "d", 5)  # type: ignore[arg-type]


# --- who a run is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, RunIdentity.root("r", conversation_id="c")])
async def test_a_tool_always_knows_whose_call_it_is(given: RunIdentity | None) -> None:
    seen: list[RunIdentity] = []

    @tool
    def who(ctx: ToolContext) -> str:
        """Tell who it is."""
        seen.append(ctx.identity)
        return ctx.identity.run_id

    model = ScriptedStream([[call("who"), call("who")], call("who"), "done"])
    sink = RecordingSink()
    config = LoopConfig(stream=model, tools=[who], event_sink=sink)
    await run("go", AgentContext(identity=given), config)
    assert len(seen) == 3
    assert len(set(seen)) == 1
    if given is None:
        assert (seen[0].parent_run_id, seen[0].depth) == (None, 0)
        assert sink.of(ev.RunIdentified) == []  # only for an identity that the context brought
    else:
        assert seen[0] == given


async def test_two_threads_that_ask_at_once_are_told_the_same() -> None:
    class Slow(FakeClock):
        def new_id(self) -> str:
            sleep(0.02)
            return super().new_id()

    seen: list[RunIdentity] = []
    together = Barrier(2)

    @tool
    def who(ctx: ToolContext) -> str:
        """Tell who it is."""
        together.wait(10)
        seen.append(ctx.identity)
        return "told"

    model = ScriptedStream([[call("who"), call("who")], "done"])
    await run("go", AgentContext(), LoopConfig(stream=model, tools=[who], clock=Slow()))
    assert seen[0] is seen[1]


def test_also_in_a_test_of_the_tool() -> None:
    ctx = ToolContext(tool_call_id="c", tool_name="t")
    assert ctx.identity is ctx.identity
