"""The double loop: prompts, turns, steering, follow-ups, the cap, and stops in plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from clark_agent import (
    AfterToolDecision,
    AgentContext,
    AgentMessage,
    AssistantMessage,
    ChannelSteering,
    ConfigError,
    Conversation,
    CustomMessage,
    FunctionPlugin,
    GracefulTurnLimit,
    ImageContent,
    LoopConfig,
    LoopOutcome,
    ProtocolPolicy,
    RunIdentity,
    StopReason,
    StreamError,
    SystemMessage,
    TextContent,
    ToolCall,
    ToolResult,
    ToolResultMessage,
    UserMessage,
    run,
    run_continue,
)
from clark_agent import events as ev
from clark_agent.errors import EmptyOutcomeError, InvalidContinuationError
from clark_agent.history import repair_history
from clark_agent.protocol import PLAIN_TEXT_RECOVERY, WRAP_UP, PlainTextRecoveryContext
from clark_agent.testing import FakeClock, ScriptedStream, Step, call, fold_events, say
from tests.engine.support import (
    CONTEXT,
    FALLBACK_ID,
    FINISH,
    Work,
    completed,
    failed,
    failing,
    observe,
    outline,
    results,
    shape,
    text_of,
    texts,
)


def source(capability: Any, *batches: Sequence[AgentMessage], name: str = "source") -> Any:
    """The n-th poll gives the n-th batch; ``.polls`` counts."""
    given: Iterator[Sequence[AgentMessage]] = iter(batches)

    def poll() -> Sequence[AgentMessage]:
        plugin.polls += 1
        return next(given, [])

    plugin: Any = FunctionPlugin(capability, poll, name=name)
    plugin.polls = 0
    return plugin


# --- prompts ------------------------------------------------------------------------------------


async def test_a_prompt_may_be_a_plain_string() -> None:
    result, _ = await completed(["ok"], prompts="hello", clock=FakeClock(5_000))
    assert result.messages[0] == UserMessage("hello", timestamp=5_000)


@pytest.mark.parametrize(
    "prompt",
    [
        UserMessage("hello"),
        UserMessage((TextContent("look"), ImageContent("data:image/png;base64,AA=="))),
        SystemMessage("wake up", timestamp=3),
        CustomMessage("note", {"x": 1}),
    ],
)
async def test_a_prompt_may_be_one_message_of_any_kind(prompt: AgentMessage) -> None:
    stream = ScriptedStream(["ok"])
    result, _ = await completed(stream, prompts=prompt)
    assert result.messages == (prompt, AssistantMessage.from_text("ok"))
    assert list(stream.requests[0].messages) == [prompt]


async def test_prompts_may_be_several_messages_from_anything_that_can_be_iterated() -> None:
    prompts = [UserMessage("one"), SystemMessage("two"), CustomMessage("three")]
    for given in (prompts, tuple(prompts), iter(prompts), (p for p in prompts)):
        result, sink = await completed(["ok"], prompts=given)
        assert result.messages[:3] == tuple(prompts)
        assert [e.message for e in sink.of(ev.MessageStart)][:3] == prompts
        assert sink.types[1:4] == ["turn_start", "message_start", "message_end"]


async def test_prompts_may_hold_answers_and_results_as_an_example() -> None:
    prompts = [
        UserMessage("1 + 1?"),
        say("", call("add", call_id="e")),
        ToolResultMessage("e", "add", (TextContent("2"),)),
        say("2"),
        UserMessage("2 + 2?"),
    ]
    stream = ScriptedStream(["4"])
    result, _ = await completed(stream, prompts=prompts)
    assert result.messages[:5] == tuple(prompts)
    assert list(stream.requests[0].messages) == prompts


@pytest.mark.parametrize("capability", ["steering", "follow_up"])
async def test_a_source_may_give_an_answer_in_the_models_name(capability: Any) -> None:
    given: list[AgentMessage] = [say("I should look closer."), UserMessage("Do.")]
    plugins = [source(capability, given)]
    result, _ = await completed(["ok", "done"], plugins=plugins)
    assert given[0] in result.messages
    capped, _ = await completed(["ok"], plugins=[source(capability, given)], max_iterations=1)
    assert given[0] in (*capped.messages, *capped.undelivered)


@pytest.mark.parametrize("blank", ["", " \n\t"])
async def test_a_blank_prompt_is_a_mistake(blank: str) -> None:
    config = LoopConfig(stream=ScriptedStream(["unheard"]))
    talk = Conversation(config)
    with pytest.raises(ConfigError, match="the prompt is blank: say what"):
        await run(blank, AgentContext(), config)
    with pytest.raises(
        ConfigError, match=r"the prompt is blank: .*, or send\(\) of a Conversation"
    ):
        await talk.send(blank)
    assert talk.messages == ()


async def test_several_texts_as_prompts_are_told_how_to_be_messages() -> None:
    config = LoopConfig(stream=ScriptedStream(["unheard"]))
    several: Any = ["one", "two"]
    with pytest.raises(TypeError, match=r"one is a str\. Use UserMessage\('...'\)"):
        await run(several, AgentContext(), config)


async def test_no_prompts_at_all_still_asks_the_model() -> None:
    result, _ = await completed(["ok"], prompts=[])
    assert outline(result.messages) == ["assistant: ok"]


# --- run_continue -------------------------------------------------------------------------------


async def test_continuing_nothing_is_refused() -> None:
    stream = ScriptedStream(["unheard"])
    error, sink = await failed(InvalidContinuationError, stream, prompts=None)
    assert (error.messages, sink.events, stream.requests) == ((), [], [])


@pytest.mark.parametrize("last", [say("done"), say("", call("work", call_id="c"))])
async def test_continuing_the_assistants_own_message_is_refused(last: AssistantMessage) -> None:
    context = AgentContext("", (UserMessage("go"), last))
    await failed(InvalidContinuationError, ["unheard"], prompts=None, context=context)


@pytest.mark.parametrize(
    "last",
    [
        UserMessage("go"),
        SystemMessage("go on"),
        CustomMessage("note"),
        ToolResultMessage("c", "work", (TextContent("done"),)),
    ],
)
async def test_everything_else_can_be_continued(last: AgentMessage) -> None:
    calls = (UserMessage("go"), say("", call("work", call_id="c")))
    history = (*calls, last) if isinstance(last, ToolResultMessage) else (last,)
    stream = ScriptedStream(["ok"])
    context = AgentContext("system", history)
    result, sink = await completed(stream, prompts=None, context=context)
    assert outline(result.messages) == ["assistant: ok"]
    assert list(stream.requests[0].messages) == list(history)
    assert stream.requests[0].system_prompt == "system"
    assert sink.types[:3] == ["agent_start", "turn_start", "provider_request_prepared"]


# --- the context --------------------------------------------------------------------------------


async def test_the_context_is_never_changed_and_extends_to_the_next_one() -> None:
    identity = RunIdentity.root("r")
    context = AgentContext("system", (UserMessage("old"), say("older")), identity)
    before = (context.system_prompt, context.messages, context.identity)
    stream = ScriptedStream([call("work"), "one", "two"])
    config = LoopConfig(stream=stream, tools=[Work()])
    first = await run("go", context, config)
    assert (context.system_prompt, context.messages, context.identity) == before
    following = context.extend(first)
    assert following.messages == (*context.messages, *first.messages)
    assert (following.system_prompt, following.identity) == ("system", identity)
    second = await run("more", following, config)
    assert outline(second.messages) == ["user: more", "assistant: two"]
    assert outline(stream.requests[2].messages) == [
        "user: old", "assistant: older", "user: go", "assistant: ", "tool_result: done",
        "assistant: one", "user: more",
    ]  # fmt: skip


async def test_a_run_can_be_taken_up_after_an_error() -> None:
    stream = ScriptedStream([call("work"), failing("transient", "gone", "hal"), "recovered"])
    config = LoopConfig(stream=stream, tools=[Work()])
    with pytest.raises(StreamError) as caught:
        await run("go", CONTEXT, config)
    context = CONTEXT.extend(caught.value)
    assert outline(context.messages) == ["user: go", "assistant: ", "tool_result: done"]
    result = await run_continue(context, config)
    assert outline(result.messages) == ["assistant: recovered"]
    assert repair_history(context.extend(result).messages).changes == ()


async def test_a_run_returns_its_own_messages_not_the_whole_transcript() -> None:
    context = AgentContext("", (UserMessage("old"),))
    result, sink = await completed(["ok"], context=context)
    assert outline(result.messages) == ["user: go", "assistant: ok"]
    assert sink.of(ev.AgentEnd)[0].messages == result.messages


async def test_the_text_of_a_result_is_what_the_model_said_last() -> None:
    result, _ = await completed([say("thinking …", call("finish"))], FINISH)
    assert result.text == "thinking …"
    assert result.outcome is LoopOutcome.DONE
    stream = ScriptedStream(["ok"])
    nothing = await run([], CONTEXT, LoopConfig(stream=stream))
    assert nothing.text == "ok"
    assert type(nothing)(messages=(), outcome=LoopOutcome.DONE).text == ""


# --- turns --------------------------------------------------------------------------------------


async def test_turns_go_on_while_there_are_tool_calls_to_answer() -> None:
    result, sink = await completed([call("work"), [call("work")] * 2, "ok"], Work())
    prompted = ["agent_start", "turn_start", "message_start user", "message_end user"]
    asked = ["provider_request_prepared", "message_start assistant"]
    answered = ["message_end assistant"]
    told = ["message_start tool_result", "message_end tool_result"]
    assert shape(sink.events) == [
        *prompted,
        *asked, "message_update", *answered,
        "tool_execution_start call_1", "tool_execution_end call_1", *told, "turn_end",
        "turn_start", *asked, *["message_update"] * 2, *answered,
        "tool_execution_start call_2", "tool_execution_start call_3",
        "tool_execution_end call_2", "tool_execution_end call_3", *told, *told, "turn_end",
        "turn_start", *asked, "message_update", *answered, "turn_end",
        "agent_end",
    ]  # fmt: skip
    assert [len(e.tool_results) for e in sink.of(ev.TurnEnd)] == [1, 2, 0]
    assert texts(result) == ["done"] * 3


async def test_what_the_loop_writes_itself_has_a_time() -> None:
    result, _ = await completed([call("work"), "ok"], Work(), clock=FakeClock(9_000))
    assert [message.timestamp for message in result.messages] == [9_000, None, 9_000, None]


# --- steering -----------------------------------------------------------------------------------


async def test_steering_is_polled_before_the_first_turn_and_after_each() -> None:
    steering = source("steering", [UserMessage("a")], [UserMessage("b"), UserMessage("c")])
    stream = ScriptedStream([call("work"), "ok"])
    result, sink = await completed(stream, Work(), plugins=[steering])
    assert outline(result.messages) == [
        "user: go", "user: a", "assistant: ", "tool_result: done", "user: b", "user: c",
        "assistant: ok",
    ]  # fmt: skip
    assert steering.polls == 3
    second_turn = sink.types[sink.types.index("turn_end") + 1 :]
    assert second_turn[:6] == [
        "turn_start", "message_start", "message_end", "message_start", "message_end",
        "provider_request_prepared",
    ]  # fmt: skip


async def test_steering_keeps_a_run_going_that_would_have_ended() -> None:
    steering = source("steering", [], [UserMessage("wait")])
    follow_up = source("follow_up")
    result, _ = await completed(["ok", "still ok"], plugins=[steering, follow_up])
    assert outline(result.messages) == [
        "user: go", "assistant: ok", "user: wait", "assistant: still ok",
    ]  # fmt: skip
    assert follow_up.polls == 1


async def test_steering_of_several_sources_comes_in_their_order() -> None:
    plugins = [
        source("steering", [UserMessage("a1"), UserMessage("a2")], name="a"),
        source("steering", [UserMessage("b1")], name="b"),
    ]
    result, _ = await completed(["ok"], plugins=plugins)
    assert outline(result.messages)[1:4] == ["user: a1", "user: a2", "user: b1"]


async def test_after_a_unanimous_vote_nobody_is_polled_any_more() -> None:
    steering, follow_up = source("steering", [], [UserMessage("x")]), source("follow_up")
    result, _ = await completed([call("finish")], FINISH, plugins=[steering, follow_up])
    assert (steering.polls, follow_up.polls) == (1, 0)
    assert result.outcome is LoopOutcome.DONE
    assert result.undelivered == ()


async def test_steering_through_a_channel() -> None:
    steering = ChannelSteering()
    handle = steering.handle
    receipts = [handle.steer("early")]

    async def work(args: Any, ctx: Any) -> ToolResult:
        receipts.append(handle.steer(SystemMessage("meanwhile")))
        return ToolResult.text("done")

    result, _ = await completed([call("work"), "ok"], Work("work", work), plugins=[steering])
    assert outline(result.messages) == [
        "user: go", "user: early", "assistant: ", "tool_result: done", "system: meanwhile",
        "assistant: ok",
    ]  # fmt: skip
    assert [(receipt.status, receipt.turn) for receipt in receipts] == [
        ("delivered", 1),
        ("delivered", 2),
    ]
    assert handle.steer("too late").status == "expired"


# --- follow-ups ---------------------------------------------------------------------------------


async def test_a_follow_up_starts_the_agent_again() -> None:
    follow_up = source("follow_up", [UserMessage("sure?")], [UserMessage("really?")])
    steering = source("steering")
    result, sink = await completed(["one", "two", "three"], plugins=[follow_up, steering])
    assert outline(result.messages) == [
        "user: go", "assistant: one", "user: sure?", "assistant: two", "user: really?",
        "assistant: three",
    ]  # fmt: skip
    assert (follow_up.polls, steering.polls) == (3, 4)
    assert len(sink.of(ev.TurnStart)) == 3


async def test_follow_ups_at_the_cap_are_appended_and_not_run() -> None:
    follow_up = source("follow_up", [UserMessage("note"), SystemMessage("note 2")])
    stream = ScriptedStream(["ok"])
    result, sink = await completed(stream, plugins=[follow_up], max_iterations=1)
    assert outline(result.messages) == ["user: go", "assistant: ok", "user: note", "system: note 2"]
    assert result.outcome is LoopOutcome.HIT_MAX_ITERATIONS
    assert follow_up.polls == 1
    assert sink.types[-6:] == [
        "turn_end", "message_start", "message_end", "message_start", "message_end", "agent_end",
    ]  # fmt: skip


async def test_follow_ups_at_the_cap_are_polled_also_with_calls_to_answer() -> None:
    follow_up = source("follow_up")
    result, _ = await completed([call("work")], Work(), plugins=[follow_up], max_iterations=1)
    assert follow_up.polls == 1
    assert result.outcome is LoopOutcome.HIT_MAX_ITERATIONS


# --- the cap ------------------------------------------------------------------------------------


async def test_the_cap_counts_the_turns_of_the_run() -> None:
    tool = Work()
    stream = ScriptedStream([call("work")], at_end="repeat")
    result, sink = await completed(stream, tool, max_iterations=7)
    assert len(tool.calls) == len(stream.requests) == len(sink.of(ev.TurnEnd)) == 7
    assert result.outcome is LoopOutcome.HIT_MAX_ITERATIONS
    assert [e.iteration for e in sink.of(ev.ProviderRequestPrepared)] == list(range(7))


async def test_undelivered_steering_at_the_cap_with_a_clean_last_turn() -> None:
    late = UserMessage("late")
    result, _ = await completed(["ok"], plugins=[source("steering", [], [late])], max_iterations=1)
    assert result.undelivered == (late,)
    assert result.outcome is LoopOutcome.HIT_MAX_ITERATIONS
    assert late not in result.messages


async def test_steering_before_the_first_turn_is_delivered_also_with_a_cap_of_one() -> None:
    result, _ = await completed(
        ["ok"], plugins=[source("steering", [UserMessage("x")])], max_iterations=1
    )
    assert outline(result.messages) == ["user: go", "user: x", "assistant: ok"]
    assert result.outcome is LoopOutcome.DONE


# --- the turn limit -----------------------------------------------------------------------------


def warnings(stream: ScriptedStream) -> list[int]:
    """In which calls the wrap-up message was new."""
    numbers = [
        [isinstance(m, SystemMessage) for m in request.messages].count(True)
        for request in stream.requests
    ]
    return [i for i, n in enumerate(numbers) if n > ([0, *numbers][i])]


async def limited(**settings: Any) -> tuple[ScriptedStream, Any, Any]:
    stream = ScriptedStream([call("work")], at_end="repeat")
    result, sink = await completed(stream, Work(), **settings)
    return stream, result, sink


async def test_the_model_is_warned_once_when_the_grace_begins() -> None:
    stream, result, _ = await limited(max_iterations=8, grace_iterations=3)
    assert warnings(stream) == [5]
    notes = [m for m in result.messages if isinstance(m, SystemMessage)]
    assert notes == [SystemMessage(WRAP_UP)]
    assert result.outcome is LoopOutcome.HIT_MAX_ITERATIONS


async def test_the_default_grace_is_five() -> None:
    stream, _, _ = await limited(max_iterations=8)
    assert warnings(stream) == [3]


@pytest.mark.parametrize(("cap", "grace"), [(5, 5), (5, 6), (5, 0), (1, 1), (1, 0)])
async def test_without_a_useful_window_there_is_no_warning(cap: int, grace: int) -> None:
    stream, _, _ = await limited(max_iterations=cap, grace_iterations=grace)
    assert warnings(stream) == []
    names = LoopConfig(stream=stream, max_iterations=cap, grace_iterations=grace).plugin_names
    assert names["steering"] == ()


async def test_the_warning_comes_after_other_steering() -> None:
    other = source("steering", [], [UserMessage("other")])
    result, _ = await completed(
        [call("work"), "ok"], Work(), plugins=[other], max_iterations=2, grace_iterations=1
    )
    assert outline(result.messages)[-3:] == ["user: other", f"system: {WRAP_UP}", "assistant: ok"]
    assert result.outcome is LoopOutcome.WRAPPED_UP
    assert result.outcome.is_complete


async def test_the_text_of_the_warning_may_come_from_the_host() -> None:
    texts_given = iter(["Hurry."])
    _, result, _ = await limited(
        max_iterations=3, grace_iterations=1,
        graceful_turn_limit_message_provider=lambda: next(texts_given),
    )  # fmt: skip
    assert SystemMessage("Hurry.") in result.messages


@pytest.mark.parametrize(
    ("graces", "warned_at"),
    [
        ([1, 1, 4, 1], [2]),  # it grows while the run goes on: asked at every poll
        ([0], [5]),  # never less than one turn
        ([-3], [5]),
        ([99], [1]),  # nor so much that there was no turn before
        ([2], [4]),
    ],
)
async def test_a_dynamic_grace_is_asked_for_at_every_poll_and_kept_in_bounds(
    graces: list[int], warned_at: list[int]
) -> None:
    asked = iter(graces)
    stream, _, _ = await limited(
        max_iterations=6, grace_iterations=3,
        graceful_turn_limit_grace_provider=lambda: next(asked, graces[-1]),
    )  # fmt: skip
    assert warnings(stream) == warned_at


async def test_with_a_dynamic_grace_the_static_one_must_still_be_useful() -> None:
    stream, _, _ = await limited(
        max_iterations=4, grace_iterations=9, graceful_turn_limit_grace_provider=lambda: 2
    )
    assert warnings(stream) == []


async def test_one_config_warns_in_every_run() -> None:
    config = LoopConfig(
        stream=ScriptedStream([call("work")], at_end="repeat"), tools=[Work()],
        max_iterations=3, grace_iterations=1,
    )  # fmt: skip
    for _ in range(2):
        result, _ = await observe(config)
        assert not isinstance(result, BaseException)
        assert [type(m) for m in result.messages].count(SystemMessage) == 1


async def test_a_turn_limit_of_the_hosts_own_counts_too() -> None:
    limit = GracefulTurnLimit(3, 2)
    result, _ = await completed([call("work"), "ok"], Work(), plugins=[limit])
    assert result.outcome is LoopOutcome.WRAPPED_UP
    assert not limit.fired  # the run had one of its own


# --- stops without a call -----------------------------------------------------------------------


async def test_the_budget_of_empty_outcomes() -> None:
    again = [UserMessage("again")]
    follow_up = source("follow_up", again, again, again)
    error, _ = await failed(
        EmptyOutcomeError, ["one", "two", "three"], plugins=[follow_up],
        empty_outcome_retry_budget=2,
    )  # fmt: skip
    assert (error.budget, error.observed) == (2, 3)
    assert follow_up.polls == 2
    assert outline(error.messages)[-2:] == ["user: again", "assistant: three"]


async def test_a_budget_of_none_left_over_is_an_error_at_the_first_stop() -> None:
    error, _ = await failed(EmptyOutcomeError, ["one"], empty_outcome_retry_budget=0)
    assert (error.budget, error.observed) == (0, 1)


async def test_a_tool_batch_resets_the_count() -> None:
    again = [UserMessage("again")]
    result, _ = await completed(
        ["one", call("work"), "two"], Work(), plugins=[source("follow_up", again)],
        empty_outcome_retry_budget=1,
    )  # fmt: skip
    assert result.text == "two"


async def test_the_budget_is_not_judged_while_steering_goes_on() -> None:
    steering = source("steering", [], [UserMessage("a")], [UserMessage("b")])
    result, _ = await completed(
        ["one", "two", call("finish")], FINISH, plugins=[steering], empty_outcome_retry_budget=0
    )
    assert result.outcome is LoopOutcome.DONE


async def test_an_empty_outcome_at_the_cap_carries_what_was_not_delivered() -> None:
    late = UserMessage("late")
    error, _ = await failed(
        EmptyOutcomeError, ["one"], plugins=[source("steering", [], [late])], max_iterations=1,
        empty_outcome_retry_budget=0,
    )  # fmt: skip
    assert error.undelivered == (late,)


# --- plain text where a tool was due ------------------------------------------------------------

EAGER: dict[str, Any] = {
    "plain_text_terminal_fallback_tool": "deliver",
    "plain_text_terminal_fallback_eager": True,
}
NUDGE: dict[str, Any] = {**EAGER, "plain_text_terminal_fallback_eager_nudge": True}


class Product(ProtocolPolicy):
    name = "product"

    def __init__(self) -> None:
        self.asked: list[PlainTextRecoveryContext] = []

    def terminal_tool_names(self) -> set[str]:
        return {"ask_user"}

    def plain_text_recovery_prompt(self, ctx: PlainTextRecoveryContext) -> str | None:
        self.asked.append(ctx)
        return "Call a tool!" if len(self.asked) == 1 else None


async def test_eager_fallback_makes_a_plain_text_the_result_of_the_tool() -> None:
    steering, follow_up = source("steering", [], [UserMessage("x")]), source("follow_up")
    seen: list[Any] = []
    result, sink = await completed(
        ["<thought>well</thought> The <thought> tag answers."],
        plugins=[steering, follow_up, FunctionPlugin("after_tool_call", seen.append)],
        clock=FakeClock(3_000), **EAGER,
    )  # fmt: skip
    (message,) = results(result)
    assert message.tool_call_id == FALLBACK_ID + "id-1"
    assert (message.tool_name, message.plain_text) == ("deliver", "The <thought> tag answers.")
    assert (message.is_error, message.timestamp) == (False, 3_000)
    assert result.outcome is LoopOutcome.DONE
    assert (steering.polls, follow_up.polls) == (1, 0)
    assert seen == []  # no call, so no hook after it
    assert sink.types[-4:] == ["message_start", "message_end", "turn_end", "agent_end"]
    assert sink.of(ev.ToolExecutionEnd) == []
    assert sink.of(ev.TurnEnd)[0].tool_results == (message,)
    # What it says stands in the assistant's message already: repair drops it.
    repaired = repair_history(result.messages).messages
    said = "assistant: <thought>well</thought> The <thought> tag answers."
    assert outline(repaired) == ["user: go", said]


async def test_lazy_fallback_waits_until_only_terminal_tools_are_left() -> None:
    settings: dict[str, Any] = {"plain_text_terminal_fallback_tool": "deliver"}
    tools = [Work(name) for name in ("deliver", "ask_user", "search")]

    async def stop_with(allow: set[str] | None) -> list[str]:
        gate = FunctionPlugin("tool_gate", lambda ctx: allow)
        result, _ = await completed(
            ["answer"], *tools, plugins=[gate], protocol=Product(), **settings
        )
        return texts(result)

    assert await stop_with({"deliver"}) == ["answer"]
    assert await stop_with({"deliver", "ask_user"}) == ["answer"]
    assert await stop_with({"deliver", "search"}) == []
    assert await stop_with({"ask_user"}) == []  # the fallback tool itself must be there
    assert await stop_with(None) == []
    ungated, _ = await completed(["answer"], tools[0], **settings)
    assert texts(ungated) == []  # the only tool there is, but nothing has narrowed it


async def test_nudges_come_first_and_the_first_answer_is_kept() -> None:
    policy = Product()
    stream = ScriptedStream(["42.", "Still 42.", "I said 42."])
    result, sink = await completed(stream, Work("search"), protocol=policy, **NUDGE)
    assert outline(result.messages) == [
        "user: go", "assistant: 42.", "system: Call a tool!", "assistant: Still 42.",
        f"system: {PLAIN_TEXT_RECOVERY}", "assistant: I said 42.", "tool_result: 42.",
    ]  # fmt: skip
    assert [ctx.iteration for ctx in policy.asked] == [0, 1]
    assert [tuple(ctx.available_tool_names) for ctx in policy.asked] == [("search",)] * 2
    assert [ctx.terminal_fallback_tool for ctx in policy.asked] == ["deliver"] * 2
    assert outline(policy.asked[0].messages) == ["user: go", "assistant: 42."]
    # A nudge belongs to the turn that it answers.
    end = sink.types.index("turn_end")
    assert sink.types[end - 3 : end] == ["message_end", "message_start", "message_end"]


async def test_a_nudge_stands_before_steering() -> None:
    steering = source("steering", [], [UserMessage("hurry")])
    result, _ = await completed(
        ["42.", call("finish")], FINISH, plugins=[steering], protocol=Product(), **NUDGE
    )
    assert outline(result.messages)[1:4] == [
        "assistant: 42.", "system: Call a tool!", "user: hurry",
    ]  # fmt: skip


async def test_a_question_for_permission_is_no_answer() -> None:
    result, _ = await completed(["Shall I begin?", "42.", "Done?"], **NUDGE)
    assert texts(result) == ["42."]
    asking, _ = await completed(["Shall I begin?", "Shall I go on?", "Shall I stop?"], **NUDGE)
    assert texts(asking) == ["Shall I stop?"]


async def test_blank_text_uses_up_a_nudge_and_is_no_answer() -> None:
    result, _ = await completed(["  ", "<think>hm</think>", "42."], **NUDGE)
    assert texts(result) == ["42."]
    blank, sink = await completed([" ", " ", " "], **NUDGE)
    assert texts(blank) == []
    assert blank.outcome is LoopOutcome.DONE
    assert len(sink.of(ev.TurnStart)) == 3


async def test_terminal_tools_alone_need_no_nudge() -> None:
    gate = FunctionPlugin("tool_gate", lambda ctx: {"deliver", "ask_user"})
    tools = [Work(name) for name in ("deliver", "ask_user", "search")]
    result, _ = await completed(["42."], *tools, plugins=[gate], protocol=Product(), **NUDGE)
    assert texts(result) == ["42."]


async def test_a_tool_batch_resets_nudges_and_the_kept_answer() -> None:
    script: list[Step] = ["early", call("search"), "one", "two", "three"]
    result, _ = await completed(script, Work("search"), **NUDGE)
    assert texts(result) == ["done", "one"]
    notes = [m for m in result.messages if isinstance(m, SystemMessage)]
    assert len(notes) == 3


async def test_a_nudge_counts_as_a_stop_without_a_call() -> None:
    error, _ = await failed(EmptyOutcomeError, ["", "", ""], **NUDGE, empty_outcome_retry_budget=2)
    assert (error.budget, error.observed) == (2, 3)


async def test_nudges_end_at_the_cap() -> None:
    result, _ = await completed(["42.", "42."], **NUDGE, max_iterations=2, grace_iterations=0)
    assert result.outcome is LoopOutcome.HIT_MAX_ITERATIONS
    assert texts(result) == []


async def test_a_text_with_another_stop_reason_falls_back_too() -> None:
    for reason in (StopReason.OTHER, StopReason.MAX_TOKENS, StopReason.TOOL_USE):
        answer = AssistantMessage((TextContent("42."),), reason)
        result, _ = await completed([answer], **EAGER)
        assert texts(result) == ["42."]


# --- the vote -----------------------------------------------------------------------------------


async def test_the_vote_must_be_unanimous() -> None:
    both, _ = await completed([[call("finish"), call("finish")]], FINISH)
    assert both.outcome is LoopOutcome.DONE
    split, _ = await completed([[call("finish"), call("work")], "ok"], FINISH, Work())
    assert split.text == "ok"


async def test_advisory_tools_do_not_vote() -> None:
    note = Work("note", counts_toward_termination_vote=False)
    result, _ = await completed([[call("note"), call("finish")]], FINISH, note)
    assert result.outcome is LoopOutcome.DONE
    alone = Work("note", ToolResult.terminal("x"), counts_toward_termination_vote=False)
    result, _ = await completed([call("note"), "ok"], alone)
    assert result.text == "ok"


async def test_unknown_names_vote_no_unless_a_hook_votes_for_them() -> None:
    result, _ = await completed([[call("finish"), call("nope")], "ok"], FINISH)
    assert result.text == "ok"
    vote = FunctionPlugin("after_tool_call", lambda ctx: AfterToolDecision(terminate=True))
    result, _ = await completed([[call("finish"), call("nope")]], FINISH, plugins=[vote])
    assert result.outcome is LoopOutcome.DONE


async def test_a_hook_can_vote_against() -> None:
    veto = FunctionPlugin("after_tool_call", lambda ctx: AfterToolDecision(terminate=False))
    result, _ = await completed([call("finish"), "ok"], FINISH, plugins=[veto])
    assert result.text == "ok"


# --- what is told -------------------------------------------------------------------------------


async def test_the_events_fold_to_the_messages_whatever_is_in_between() -> None:
    steering = source("steering", [UserMessage("a")], [UserMessage("b")])
    follow_up = source("follow_up", [CustomMessage("c")])
    result, sink = await completed(
        [[], call("work"), [call("nope"), call("work")], "one", "two"], Work(),
        plugins=[steering, follow_up], max_iterations=4, grace_iterations=1,
    )  # fmt: skip
    assert fold_events(sink.events) == result.messages
    assert sink.of(ev.AgentEnd)[0].messages == result.messages
    assert text_of(result.messages[-1]) == "c"


async def test_calls_of_the_policy_keep_their_model_names_in_the_transcript() -> None:
    class Aliases(ProtocolPolicy):
        def normalize_tool_calls(self, calls: Any, registry: Any) -> Any:
            return [ToolCall(c.id, {"wrk": "work"}.get(c.name, c.name), c.arguments) for c in calls]

    result, sink = await completed([call("wrk"), "ok"], Work(), protocol=Aliases())
    asked = result.messages[1]
    assert isinstance(asked, AssistantMessage)
    assert asked.tool_calls[0].name == "wrk"
    assert [r.tool_name for r in results(result)] == ["work"]
    assert [e.tool_name for e in sink.of(ev.ToolExecutionStart)] == ["work"]
    assert [e.tool_name for e in sink.of(ev.ToolExecutionEnd)] == ["work"]
