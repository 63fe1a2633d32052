"""A model that does the same thing over and over is told, and then stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    AfterToolCallContext,
    AgentMessage,
    AgentTool,
    Answer,
    BeforeToolCallContext,
    Block,
    ConfigError,
    FunctionPlugin,
    ImageContent,
    LoopConfig,
    LoopDetector,
    LoopOutcome,
    Rewrite,
    RunResult,
    SystemMessage,
    TextContent,
    ToolCall,
    ToolContext,
    ToolResult,
    run,
)
from clark_agent.testing import ScriptedStream, Step, call, say
from clark_agent.tools import ToolIdentityPolicy
from tests.engine.support import CONTEXT, Work, completed, outline, results


def notes(messages: Sequence[AgentMessage]) -> list[str]:
    return [message.content for message in messages if isinstance(message, SystemMessage)]


async def repeat(
    times: int,
    *tools: AgentTool,
    detector: LoopDetector | None = None,
    step: Step | None = None,
    plugins: Sequence[Any] = (),
) -> tuple[RunResult, list[int]]:
    """A model that makes one call so often; the result, and before which requests it was told."""
    same = call("work", path="a") if step is None else step
    model = ScriptedStream([*[same] * times, "I give up."])
    detector = LoopDetector() if detector is None else detector
    result, _ = await completed(model, *tools, plugins=[detector, *plugins])
    told: list[int] = []
    for number, request in enumerate(model.requests):
        told += [number] * (len(notes(request.messages)) - len(told))
    return result, told


# --- the note, then the end ---------------------------------------------------------------------


async def test_the_model_is_told_after_three_and_stopped_after_five() -> None:
    work = Work()
    result, told = await repeat(8, work)
    assert told == [3]
    assert len(work.calls) == 5
    assert [answer.is_error for answer in results(result)] == [False] * 5 + [True] * 3
    assert result.outcome is LoopOutcome.DONE


async def test_the_note_says_what_is_repeated_and_who_says_so() -> None:
    result, _ = await repeat(3, Work())
    (note,) = notes(result.messages)
    assert note.startswith("[from the runtime, not from the user]")
    assert "'work' 3 times" in note


async def test_a_call_that_is_not_run_says_why() -> None:
    result, _ = await repeat(7, Work())
    for answer in results(result)[5:]:
        assert answer.plain_text.startswith("The call was not run: it has been made 5 times")
        assert answer.details == {
            "kind": "tool_call_not_executed",
            "reason": "loop_detected",
            "repeats": 5,
            "decided_by": [{"plugin": "loop_detector", "decision": "block"}],
        }


@pytest.mark.parametrize(
    ("warn", "block", "told", "ran"),
    [
        (1, 1, [1], 1),
        (2, 2, [2], 2),
        (2, 4, [2], 4),
        (None, 2, [], 2),
        (2, None, [2], 9),
        (None, None, [], 9),
    ],
)
async def test_both_steps_are_the_hosts_choice(
    warn: int | None, block: int | None, told: list[int], ran: int
) -> None:
    work = Work()
    _, seen = await repeat(9, work, detector=LoopDetector(warn, block))
    assert (seen, len(work.calls)) == (told, ran)


async def test_a_model_that_stops_in_time_hears_nothing() -> None:
    result, told = await repeat(2, Work())
    assert told == []
    assert notes(result.messages) == []


async def test_a_model_that_tries_something_else_may_go_on() -> None:
    work = Work()
    script: list[Step] = [*[call("work", path="a")] * 7, call("work", path="b"), "ok"]
    result, _ = await completed(script, work, plugins=[LoopDetector()])
    assert work.calls == [{"path": "a"}] * 5 + [{"path": "b"}]
    assert not results(result)[-1].is_error


async def test_calls_in_between_do_not_hide_a_loop() -> None:
    work = Work()
    script: list[Step] = []
    for number in range(7):
        script += [call("work", path="a"), call("work", path=f"other {number}")]
    await completed([*script, "ok"], work, plugins=[LoopDetector()])
    assert work.calls.count({"path": "a"}) == 5
    assert len(work.calls) == 5 + 7


async def test_calls_of_one_batch_count_each() -> None:
    """They are let through together: none of them can know the others' results."""
    work = Work()
    step = [call("work", path="a"), call("work", path="a"), call("work", path="a")]
    result, told = await repeat(3, work, step=step)
    assert told == [1]
    assert len(work.calls) == 6
    assert len(notes(result.messages)) == 1


# --- the same call ------------------------------------------------------------------------------


async def test_the_order_of_arguments_does_not_matter() -> None:
    work = Work()
    one = ToolCall("", "work", {"a": 1, "b": {"c": 2, "d": 3}})
    other = ToolCall("", "work", {"b": {"d": 3, "c": 2}, "a": 1})
    await completed([*[one, other] * 4, "ok"], work, plugins=[LoopDetector()])
    assert len(work.calls) == 5


async def test_another_tool_with_the_same_arguments_is_another_call() -> None:
    one, other = Work("one"), Work("other")
    script: list[Step] = [call(name, path="a") for name in ("one", "other") * 2]
    result, _ = await completed([*script, "ok"], one, other, plugins=[LoopDetector()])
    assert notes(result.messages) == []


POLICIES: list[Any] = [
    pytest.param(ToolIdentityPolicy(target="path"), {"path": "a"}, id="a target"),
    pytest.param(
        ToolIdentityPolicy(target=lambda args: args["path"].strip()), {"path": " a"}, id="computed"
    ),
    pytest.param(ToolIdentityPolicy(args_key_fn=lambda args: "always the same"), {}, id="a key"),
    pytest.param(
        ToolIdentityPolicy(operation_arg="op", target="path"), {"op": "read", "path": "a"}
    ),
]


@pytest.mark.parametrize(("policy", "arguments"), POLICIES)
async def test_the_tool_says_when_two_calls_are_the_same(
    policy: ToolIdentityPolicy, arguments: dict[str, Any]
) -> None:
    work = Work(identity_policy=policy)
    script: list[Step] = [
        ToolCall("", "work", {**arguments, "attempt": number}) for number in range(8)
    ]
    result, _ = await completed([*script, "ok"], work, plugins=[LoopDetector()])
    assert len(work.calls) == 5
    assert len(notes(result.messages)) == 1


async def test_another_operation_on_the_same_target_is_another_call() -> None:
    work = Work(identity_policy=ToolIdentityPolicy(operation_arg="op", target="path"))
    script: list[Step] = [call("work", op=op, path="a") for op in ("read", "write") * 2]
    result, _ = await completed([*script, "ok"], work, plugins=[LoopDetector()])
    assert notes(result.messages) == []


async def test_arguments_that_are_no_json_are_compared_as_they_are_shown() -> None:
    work = Work(prepare=lambda args: {**args, "more": object})
    _, told = await repeat(7, work)
    assert told == [3]
    assert len(work.calls) == 5


@pytest.mark.parametrize("first", ["detector", "rewriter"])
async def test_a_call_that_another_plugin_rewrites_is_still_the_same(first: str) -> None:
    def rewrite(ctx: BeforeToolCallContext) -> Rewrite:
        return Rewrite({**ctx.args, "safe": True})

    work = Work()
    plugins: list[Any] = [LoopDetector(), FunctionPlugin("before_tool_call", rewrite)]
    if first == "rewriter":
        plugins.reverse()
    script: list[Step] = [call("work", path="a")] * 8
    result, _ = await completed([*script, "ok"], work, plugins=plugins)
    assert len(notes(result.messages)) == 1
    assert len(work.calls) == 5


# --- the same result ----------------------------------------------------------------------------


async def test_polling_something_that_moves_is_no_loop() -> None:
    percent = iter(range(0, 100, 10))
    work = Work(does=lambda args, ctx: f"{next(percent)} %")
    result, told = await repeat(10, work)
    assert told == []
    assert len(work.calls) == 10
    assert not any(answer.is_error for answer in results(result))


async def test_another_result_starts_the_count_anew() -> None:
    given = iter("aaaabbbbbbb")
    work = Work(does=lambda args, ctx: next(given))
    _, told = await repeat(11, work)
    assert told == [3, 7], "three a, and after the change three b"
    assert len(work.calls) == 9, "four a and five b"


async def test_a_result_and_an_error_with_the_same_words_are_not_the_same() -> None:
    flip = iter([False, True] * 5)

    async def does(args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.error("x") if next(flip) else ToolResult.text("x")

    _, told = await repeat(9, Work(does=does))
    assert told == []


async def test_images_are_part_of_a_result() -> None:
    shown = iter("abcdefghi")

    async def does(args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult((TextContent("see"), ImageContent(f"data:{next(shown)}")))

    _, told = await repeat(9, Work(does=does))
    assert told == []


async def test_details_for_the_host_are_not() -> None:
    numbers = iter(range(9))

    async def does(args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.text("the same", details={"number": next(numbers)})

    work = Work(does=does)
    _, told = await repeat(9, work)
    assert told == [3]
    assert len(work.calls) == 5


async def test_failures_count_like_results() -> None:
    work = Work(does=LookupError("no such file"))
    result, told = await repeat(7, work)
    assert told == [3]
    assert len(work.calls) == 5
    assert "LookupError" in results(result)[0].plain_text


async def test_a_tool_that_does_not_exist_is_told_of_too() -> None:
    result, told = await repeat(6, step=call("imagined", x=1))
    assert told == [3]
    assert "'imagined'" in notes(result.messages)[0]


async def test_arguments_that_will_not_do_are_told_of_too() -> None:
    work = Work(require="query")
    _, told = await repeat(6, work)
    assert told == [3]
    assert work.calls == []


@pytest.mark.parametrize("decision", [Block("Not here."), Answer(ToolResult.text("Cached."))])
async def test_calls_that_another_plugin_takes_over_count_too(decision: Any) -> None:
    other = FunctionPlugin("before_tool_call", lambda ctx: decision)
    work = Work()
    result, told = await repeat(7, work, plugins=[other])
    assert told == [3]
    assert work.calls == []
    assert "always gave the same result" in results(result)[-1].plain_text


# --- memory -------------------------------------------------------------------------------------


async def test_it_remembers_so_many_different_calls() -> None:
    for window, ran in ((2, 5), (1, 8)):
        work = Work()
        script: list[Step] = []
        for number in range(8):
            script += [call("work", path="a"), call("work", path=f"other {number}")]
        detector = LoopDetector(window=window)
        await completed([*script, "ok"], work, plugins=[detector])
        assert work.calls.count({"path": "a"}) == ran


async def test_every_run_starts_with_a_clean_slate() -> None:
    work = Work()
    config = LoopConfig(stream=ScriptedStream([]), tools=[work], plugins=[LoopDetector()])

    async def one() -> RunResult:
        model = ScriptedStream([*[call("work", path="a")] * 4, "ok"])
        return await run("go", CONTEXT, config.replace(stream=model))

    for result in [await one(), await one(), *await asyncio.gather(one(), one(), one())]:
        assert len(notes(result.messages)) == 1
    assert len(work.calls) == 5 * 4


async def test_a_note_that_comes_too_late_is_kept_to_itself() -> None:
    end = Work("end", ToolResult.terminal("bye"))
    script: list[Step] = [[call("end")]]
    result, _ = await completed(script, end, plugins=[LoopDetector(1, None)])
    assert outline(result.messages)[-1] == "tool_result: bye"


def test_settings_are_kept_for_the_next_run() -> None:
    fresh = LoopDetector(2, 7, window=9).for_run()
    assert (fresh.warn_after, fresh.block_after, fresh.window) == (2, 7, 9)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"warn_after": 0}, "warn_after must be at least 1"),
        ({"block_after": 0}, "block_after must be at least 1"),
        ({"warn_after": True}, "warn_after must be at least 1"),
        ({"warn_after": -3, "block_after": None}, "warn_after must be at least 1"),
        (
            {"warn_after": 4, "block_after": 3},
            r"must be at least warn_after \(4\)",
        ),
        ({"window": 0}, "window must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LoopDetector(**settings)


# --- any sequence -------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), max_size=40),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_any_sequence_of_calls(sequence: list[tuple[str, str]], warn_after: int, more: int) -> None:
    """Beside a count that is kept by hand."""
    block_after = warn_after + more
    detector = LoopDetector(warn_after, block_after)
    tool, message = Work(), say("")
    last: dict[str, tuple[str, int]] = {}
    for number, (path, outcome) in enumerate(sequence):
        made = ToolCall(f"c{number}", "work", {"path": path})
        _, count = last.get(path, ("", 0))
        decision = detector.on_before_tool_call(
            BeforeToolCallContext(message, made, made.arguments, (), tool)
        )
        assert (decision is not None) is (count >= block_after)
        result = ToolResult.text(outcome)
        if decision is not None:
            result = ToolResult.error(decision.reason or "")
        else:
            known, count = last.get(path, (outcome, 0))
            last[path] = (outcome, count + 1 if known == outcome else 1)
        detector.on_after_tool_call(
            AfterToolCallContext(message, made, made.arguments, result, result.is_error, (), tool)
        )
        is_due = decision is None and last[path][1] == warn_after
        assert len(detector.next_steering_messages()) == is_due
