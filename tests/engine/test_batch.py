"""A batch of tool calls: what is refused, what runs, how it fails; each call has one answer."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable
from typing import Any

import pytest

from clark_agent import (
    AfterToolDecision,
    AgentTool,
    AssistantMessage,
    ExecutionMode,
    FunctionPlugin,
    ImageContent,
    LoopOutcome,
    ProtocolPolicy,
    RunAborted,
    RunStoppedByTool,
    TextContent,
    ToolAborted,
    ToolCall,
    ToolContext,
    ToolExecutionError,
    ToolFatal,
    ToolGateContext,
    ToolResult,
    UniqueToolCallIds,
)
from clark_agent import events as ev
from clark_agent.errors import MissingFieldError
from clark_agent.history import repair_history
from clark_agent.protocol import HiddenToolContext, HiddenToolError
from clark_agent.testing import ScriptedStream, Step, call, say
from clark_agent.types import arg_parse_error
from tests.engine.support import (
    FINISH,
    Stubborn,
    Waiting,
    Work,
    completed,
    decided,
    failed,
    hurry,
    let_others_run,
    observed_run,
    outline,
    results,
    text_of,
    texts,
)

MODES = pytest.mark.parametrize("mode", list(ExecutionMode))


# --- refused before it runs ---------------------------------------------------------------------


async def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    asked: list[str] = []
    gate: Any = FunctionPlugin("tool_gate", lambda ctx: {"work"})
    gate.denial_reason = lambda name, ctx: asked.append(name)
    result, _ = await completed([call("wrok"), "ok"], Work(), Work("other"), plugins=[gate])
    (message,) = results(result)
    assert message.is_error
    assert "'wrok'" in message.plain_text
    assert "work, other" in message.plain_text
    assert message.tool_name == "wrok"
    assert asked == []  # refused before gates are asked


async def test_an_empty_name_is_an_unknown_one() -> None:
    result, _ = await completed([[call(""), call("work")], "ok"], Work(), max_tool_calls_per_turn=1)
    assert [r.is_error for r in results(result)] == [True, False]  # and takes no slot


class Gate:
    name = "gate"

    def __init__(self, allow: set[str], reasons: dict[str, str] | None = None) -> None:
        self.allow = allow
        self.reasons = reasons or {}

    def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> set[str]:
        return self.allow

    def denial_reason(self, tool_name: str, ctx: ToolGateContext) -> str | None:
        return self.reasons.get(tool_name)


class Product(ProtocolPolicy):
    def __init__(self) -> None:
        self.asked: list[HiddenToolContext] = []

    def hidden_tool_error(self, ctx: HiddenToolContext) -> HiddenToolError | None:
        self.asked.append(ctx)
        return HiddenToolError("Not in this product.", {"product": True})


async def test_a_hidden_tool_is_refused_with_the_reason_of_a_gate() -> None:
    tool, policy = Work("b"), Product()
    gates = [
        Gate({"a", "c"}),
        Gate({"a", "c"}, {"b": "First a, then b."}),
        Gate({"a"}, {"b": "no"}),
    ]
    gates[1].name = "teacher"
    result, sink = await completed(
        [call("b"), "ok"], Work("a"), tool, Work("c"), plugins=gates, protocol=policy
    )
    (message,) = results(result)
    assert (message.is_error, message.plain_text) == (True, "First a, then b.")
    assert message.details == {
        "runtime_block": True, "requested_tool": "b", "allowed_tools": ["a"], "gate": "teacher",
    }  # fmt: skip
    assert tool.calls == []
    assert policy.asked == []
    assert sink.of(ev.ToolExecutionStart) == []


async def test_a_hidden_tool_is_refused_with_the_reason_of_the_policy() -> None:
    policy = Product()
    result, _ = await completed(
        [call("b"), "ok"], Work("a"), Work("b"), plugins=[Gate({"a"})], protocol=policy
    )
    (message,) = results(result)
    assert message.plain_text == "Not in this product."
    assert message.details == {"product": True}
    (ctx,) = policy.asked
    assert (ctx.requested_tool, set(ctx.allowlist)) == ("b", {"a"})
    assert outline(ctx.messages) == ["user: go", "assistant: "]


async def test_a_hidden_tool_is_refused_in_general_words() -> None:
    tools = [Work(f"tool_{n:02}") for n in range(20)]
    allowed = {tool.name for tool in tools[1:]}
    result, _ = await completed([call("tool_00"), "ok"], *tools, plugins=[Gate(allowed)])
    (message,) = results(result)
    assert "'tool_00'" in message.plain_text
    assert "tool_12" in message.plain_text
    assert "tool_13" not in message.plain_text  # a preview of twelve
    assert message.details["allowed_tools"] == sorted(allowed)
    assert message.details["gate"] == "tool_gate"


async def test_a_gate_holds_for_exactly_its_call() -> None:
    def gate(ctx: ToolGateContext) -> set[str] | None:
        return {"a"} if ctx.iteration == 0 else None

    tool = Work("b")
    result, _ = await completed(
        [call("b"), call("b"), "ok"], Work("a"), tool, plugins=[FunctionPlugin("tool_gate", gate)]
    )
    assert [r.is_error for r in results(result)] == [True, False]


async def test_malformed_arguments_come_back_with_a_bounded_quote() -> None:
    raw = '{"text": "' + "x" * 5_000
    broken = ToolCall("c", "work", arg_parse_error("unexpected end", raw))
    tool = Work()
    result, _ = await completed([[broken, call("work")], "ok"], tool)
    message = results(result)[0]
    assert message.is_error
    assert "unexpected end" in message.plain_text
    assert '{"text": "xxx' in message.plain_text
    assert len(message.plain_text) < 700
    assert message.details == {"kind": "tool_argument_validation"}
    assert tool.calls == [{}]


async def test_invalid_arguments_come_back_with_the_tools_objection() -> None:
    class Picky(Work):
        def validate(self, args: Any) -> None:
            raise MissingFieldError(self.name, "write", "text")

    result, _ = await completed([call("work"), "ok"], Picky())
    (message,) = results(result)
    assert message.plain_text == "'work' needs the argument 'text' for the action 'write'"
    assert message.details == {"kind": "tool_argument_validation"}


@pytest.mark.parametrize("where", ["prepare_arguments", "validate"])
async def test_a_tool_that_fails_to_check_its_arguments_refuses_the_call(where: str) -> None:
    class Broken(Work):
        pass

    def crash(self: Any, args: Any) -> Any:
        raise KeyError("x")

    setattr(Broken, where, crash)
    tool = Broken()
    result, sink = await completed([call("work"), "ok"], tool)
    assert tool.calls == []
    assert "KeyError: 'x'" in texts(result)[0]
    assert sink.of(ev.ToolExecutionStart) == []


async def test_what_validate_returns_goes_to_execute_and_what_was_prepared_to_hooks() -> None:
    class Typed(Work):
        def validate(self, args: Any) -> Any:
            return ("typed", args["x"])

    seen: list[Any] = []
    tool = Typed(prepare=lambda args: {"x": args["x"] + 1})
    _, sink = await completed(
        [call("work", x=1), "ok"], tool,
        plugins=[FunctionPlugin("before_tool_call", lambda ctx: seen.append(ctx.args))],
    )  # fmt: skip
    assert tool.calls == [("typed", 2)]
    assert seen == [{"x": 2}]
    assert sink.of(ev.ToolExecutionStart)[0].args == {"x": 1}  # the model's own


# --- the cap on calls ---------------------------------------------------------------------------


@MODES
async def test_calls_over_the_cap_are_answered_and_not_run(mode: ExecutionMode) -> None:
    tool = Work()
    result, sink = await completed(
        [[call("work", n=n) for n in range(5)], "ok"], tool, max_tool_calls_per_turn=2,
        default_execution_mode=mode,
    )  # fmt: skip
    assert tool.calls == [{"n": 0}, {"n": 1}]
    assert [r.is_error for r in results(result)] == [False] * 2 + [True] * 3
    assert results(result)[-1].details == {
        "kind": "tool_call_not_executed",
        "reason": "max_tool_calls_per_turn",
        "total_tool_calls": 5,
        "limit_counted_tool_calls": 5,
        "max_executed": 2,
    }
    assert len(sink.of(ev.ToolExecutionStart)) == 2
    assert len(sink.of(ev.ToolExecutionEnd)) == 5


async def test_some_calls_take_no_slot_and_results_over_the_cap_come_last() -> None:
    free = Work("free", counts_toward_tool_call_limit=False)
    safe = Work("safe", parallel_safe_per_turn=True)
    calls = [
        call("work"), call("free"), call("nope"), call("work"), call("safe"), call("work"),
        call("free"),
    ]  # fmt: skip
    result, _ = await completed([calls, "ok"], Work(), free, safe, max_tool_calls_per_turn=1)
    assert [(r.tool_name, r.is_error) for r in results(result)] == [
        ("work", False), ("free", False), ("nope", True), ("safe", False), ("free", False),
        ("work", True), ("work", True),
    ]  # fmt: skip
    assert results(result)[-1].details["total_tool_calls"] == 7
    assert results(result)[-1].details["limit_counted_tool_calls"] == 3


async def test_a_hidden_tool_takes_a_slot() -> None:
    tool = Work("a")
    result, _ = await completed(
        [[call("b"), call("a")], "ok"], tool, Work("b"), plugins=[Gate({"a"})],
        max_tool_calls_per_turn=1,
    )  # fmt: skip
    assert tool.calls == []
    assert [r.details.get("reason") for r in results(result)] == [None, "max_tool_calls_per_turn"]


async def test_a_capped_batch_cannot_end_the_run() -> None:
    result, _ = await completed(
        [[call("finish"), call("finish")], "ok"], FINISH, max_tool_calls_per_turn=1
    )
    assert result.text == "ok"
    vote = FunctionPlugin("after_tool_call", lambda ctx: AfterToolDecision(terminate=True))
    result, _ = await completed(
        [[call("finish"), call("finish")], "ok"], FINISH, plugins=[vote], max_tool_calls_per_turn=1
    )
    assert result.text == "ok"


async def test_hooks_see_what_is_over_the_cap_too() -> None:
    seen: list[str] = []
    await completed(
        [[call("a"), call("b")], "ok"], Work("a"), Work("b"), max_tool_calls_per_turn=1,
        plugins=[FunctionPlugin("after_tool_call", lambda ctx: seen.append(ctx.tool_call.name))],
    )  # fmt: skip
    assert seen == ["a", "b"]


# --- parallel and sequential --------------------------------------------------------------------


def meeting(number: int) -> Any:
    """Tools that only end when all of them run at once."""
    barrier = asyncio.Barrier(number)

    async def meet(args: Any, ctx: ToolContext) -> ToolResult:
        await barrier.wait()
        return ToolResult.text("met")

    return meet


class Turnstile:
    """Knows how many are inside at once."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0

    async def __call__(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0)
        self.inside -= 1
        return ToolResult.text("through")


async def test_calls_run_at_once_by_default() -> None:
    result, sink = await completed([[call("meet")] * 3, "ok"], Work("meet", meeting(3)))
    assert texts(result) == ["met"] * 3
    types = [kind for kind in sink.types if kind.startswith("tool")]
    assert types == ["tool_execution_start"] * 3 + ["tool_execution_end"] * 3


async def test_a_hundred_calls_run_at_once() -> None:
    result, _ = await completed(
        [[call("meet", n=n) for n in range(100)], "ok"], Work("meet", meeting(100))
    )
    assert texts(result) == ["met"] * 100
    assert [r.tool_call_id for r in results(result)] == [f"call_{n}" for n in range(1, 101)]


async def test_the_config_can_ask_for_one_at_a_time() -> None:
    stile = Turnstile()
    _, sink = await completed(
        [[call("pass")] * 3, "ok"], Work("pass", stile), default_execution_mode="sequential"
    )
    assert stile.most == 1
    types = [kind for kind in sink.types if kind.startswith("tool")]
    assert types == ["tool_execution_start", "tool_execution_end"] * 3


async def test_an_exclusive_tool_makes_the_whole_batch_sequential() -> None:
    stile = Turnstile()
    exclusive = Work("alone", stile, requires_exclusive_sandbox=True)
    await completed(
        [[call("pass"), call("alone"), call("pass")], "ok"], Work("pass", stile), exclusive
    )
    assert stile.most == 1


async def test_an_exclusive_tool_over_the_cap_does_not() -> None:
    exclusive = Work("alone", requires_exclusive_sandbox=True)
    calls = [call("meet"), call("meet"), call("alone")]
    result, _ = await completed(
        [calls, "ok"], Work("meet", meeting(2)), exclusive, max_tool_calls_per_turn=2
    )
    assert texts(result)[:2] == ["met", "met"]


async def test_calls_are_prepared_in_order_before_any_of_them_runs() -> None:
    log: list[str] = []

    def note(word: str) -> Any:
        return lambda ctx: log.append(f"{word} {ctx.tool_call.id}")

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        log.append(f"run {ctx.tool_call_id}")
        return ToolResult.text("done")

    await completed(
        [[call("work"), call("work")], "ok"], Work("work", work),
        plugins=[FunctionPlugin("before_tool_call", note("before"))],
    )  # fmt: skip
    assert log == ["before call_1", "before call_2", "run call_1", "run call_2"]


async def test_in_sequence_each_call_is_prepared_after_the_one_before_has_run() -> None:
    log: list[str] = []

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        log.append(f"run {ctx.tool_call_id}")
        return ToolResult.text("done")

    def before(ctx: Any) -> None:
        log.append(f"before {ctx.tool_call.id}")

    await completed(
        [[call("work"), call("work")], "ok"], Work("work", work),
        plugins=[FunctionPlugin("before_tool_call", before)], default_execution_mode="sequential",
    )  # fmt: skip
    assert log == ["before call_1", "run call_1", "before call_2", "run call_2"]


# --- results ------------------------------------------------------------------------------------


async def test_a_result_enters_the_transcript_as_it_is() -> None:
    given = ToolResult(
        (TextContent("a"), ImageContent("data:image/png;base64,AA==")),
        details={"rows": 3},
    ).with_narration(" Looked. ")
    result, sink = await completed([call("work", call_id="c"), "ok"], Work("work", given))
    (message,) = results(result)
    assert (message.tool_call_id, message.tool_name) == ("c", "work")
    assert message.content == given.content
    assert (message.narration, message.details) == ("Looked.", {"rows": 3})
    (end,) = sink.of(ev.ToolExecutionEnd)
    assert end.result is given
    assert end.is_error is False


async def test_the_model_may_be_told_of_an_error_by_a_result() -> None:
    result, sink = await completed([call("work"), "ok"], Work("work", ToolResult.error("no")))
    assert results(result)[0].is_error
    assert sink.of(ev.ToolExecutionEnd)[0].is_error


@pytest.mark.parametrize("value", [None, 7, ["x"], {"content": "x"}, b"x"])
async def test_a_tool_that_returns_no_result_has_failed(value: Any) -> None:
    result, _ = await completed([call("work"), "ok"], Work("work", lambda args, ctx: value))
    (message,) = results(result)
    assert message.is_error
    assert "ToolResult" in message.plain_text
    assert type(value).__name__ in message.plain_text


class Custom(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ToolExecutionError("no luck"), "ToolExecutionError: no luck"),
        (KeyError("x"), "KeyError: 'x'"),
        (Custom(), "Custom: "),
        (AssertionError("no"), "AssertionError: no"),
        (RecursionError("deep"), "RecursionError: deep"),
        (TimeoutError("slow"), "TimeoutError: slow"),
        (OSError(2, "gone"), "FileNotFoundError: [Errno 2] gone"),
        (MemoryError(), "MemoryError: "),
        (StopAsyncIteration("x"), "StopAsyncIteration: x"),
        (StopIteration("x"), "RuntimeError: "),
        (ExceptionGroup("both", [ValueError("a")]), "ExceptionGroup: both (1 sub-exception)"),
    ],
)
async def test_any_exception_of_a_tool_is_a_result_that_names_it(
    error: Exception, told: str
) -> None:
    result, _ = await completed([[call("bad"), call("work")], "ok"], Work("bad", error), Work())
    assert [message.is_error for message in results(result)] == [True, False]
    assert texts(result)[0].startswith(told)
    assert texts(result)[1] == "done"


@MODES
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_that_raises_does_not_take_the_others_down(
    calls: int, mode: ExecutionMode
) -> None:
    script: list[Step] = [[call("bad"), call("work")][:calls], "ok"]
    bad = Work("bad", ValueError("bad value"))
    result, _ = await completed(script, bad, Work(), default_execution_mode=mode)
    assert [message.is_error for message in results(result)] == [True, False][:calls]
    assert texts(result) == ["ValueError: bad value", "done"][:calls]


@MODES
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_that_cancels_itself_has_failed(calls: int, mode: ExecutionMode) -> None:
    async def await_a_cancelled_future(args: Any, ctx: ToolContext) -> ToolResult:
        future: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        future.cancel()
        return await future

    for does in (await_a_cancelled_future, asyncio.CancelledError()):
        result, _ = await completed(
            [[call("bad"), call("work")][:calls], "ok"], Work("bad", does), Work(),
            default_execution_mode=mode,
        )  # fmt: skip
        assert [r.is_error for r in results(result)] == [True, False][:calls]
        assert "cancelled itself" in texts(result)[0]


@pytest.mark.parametrize("calls", [1, 2])
async def test_timeouts_and_task_groups_inside_a_tool_are_its_own_affair(calls: int) -> None:
    log: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("child")

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            log.append("timed out")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                group.create_task(asyncio.Event().wait())
                await asyncio.Event().wait()
        except* ValueError:
            log.append("group failed")
        async with asyncio.TaskGroup() as group:
            one = group.create_task(asyncio.sleep(0, "a"))
            two = group.create_task(asyncio.sleep(0, "b"))
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0)
        except TimeoutError:
            log.append("waited in vain")
        return ToolResult.text(one.result() + two.result())

    result, _ = await completed([[call("work")] * calls, "ok"], Work("work", work))
    assert texts(result) == ["ab"] * calls
    assert sorted(log) == sorted(["timed out", "group failed", "waited in vain"] * calls)


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_task_group_that_fails_at_its_end_does_not_cancel_the_run(calls: int) -> None:
    async def fail(text: str) -> None:
        await asyncio.sleep(0.001)
        raise ValueError(text)

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        failed = 0
        try:
            async with asyncio.TaskGroup() as group:
                for text in ("one", "two"):
                    group.create_task(fail(text))
        except* ValueError as errors:
            failed = len(errors.exceptions)
        return ToolResult.text(f"{failed} failed")

    result, _ = await completed([[call("work")] * calls, "ok"], Work("work", work))
    assert texts(result) == ["2 failed"] * calls


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_cancellation_at_the_end_of_a_failed_task_group_counts(swallows: bool) -> None:
    reached, cancelled = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        await asyncio.sleep(0.001)
        raise ValueError

    async def clean_up() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            reached.set()
            await cancelled.wait()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        try:
            async with asyncio.TaskGroup() as group:
                for coroutine in (fail(), clean_up()):
                    group.create_task(coroutine)
        except BaseException:
            if not swallows:
                raise
        return ToolResult.text("ended")

    running = asyncio.ensure_future(completed([[call("work")], "ok"], Work("work", work)))
    await reached.wait()
    running.cancel()
    cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_timeout_that_leaves_a_tool_is_an_exception_like_any_other(calls: int) -> None:
    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
        return ToolResult.text("never")

    result, _ = await completed([[call("work")] * calls, "ok"], Work("work", work))
    assert texts(result) == ["TimeoutError: "] * calls


# --- ends of the run ----------------------------------------------------------------------------


async def test_a_fatal_tool_ends_the_run_and_stops_its_siblings() -> None:
    waiting = Waiting()

    async def fatal(args: Any, ctx: ToolContext) -> ToolResult:
        await waiting.started.wait()
        raise ToolFatal("the disk is gone")

    error, _ = await failed(
        RunStoppedByTool, [[call("wait"), call("fatal"), call("nope")]], Work("wait", waiting),
        Work("fatal", fatal),
    )  # fmt: skip
    assert (error.tool, error.reason) == ("fatal", "the disk is gone")
    assert waiting.cancelled
    stopped, said, unknown = results(error)
    assert stopped.details == {
        "kind": "tool_call_stopped", "reason": "aborted", "still_running": False,
    }  # fmt: skip
    assert "the disk is gone" in said.plain_text
    assert "'nope'" in unknown.plain_text


async def test_a_tool_may_end_the_run_as_aborted() -> None:
    error, _ = await failed(RunAborted, [call("stop")], Work("stop", ToolAborted("user said no")))
    assert "user said no" in str(error)
    assert texts(error) == ["The tool aborted the run: user said no"]


async def test_in_sequence_nothing_runs_after_a_fatal_tool() -> None:
    after = Work("after")
    error, _ = await failed(
        RunStoppedByTool, [[call("fatal"), call("after")]], Work("fatal", ToolFatal("x")), after,
        default_execution_mode="sequential",
    )  # fmt: skip
    assert after.calls == []
    assert results(error)[1].details == {"kind": "tool_call_not_executed", "reason": "aborted"}


async def test_of_two_tools_that_end_the_run_the_first_counts() -> None:
    waiting = asyncio.Event()

    async def second(args: Any, ctx: ToolContext) -> ToolResult:
        waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ToolAborted("me too") from None
        raise AssertionError

    async def first(args: Any, ctx: ToolContext) -> ToolResult:
        await waiting.wait()
        raise ToolFatal("the cause of it all")

    outcome, _ = await observed_run(
        [[call("first"), call("second")]], Work("first", first), Work("second", second)
    )
    assert isinstance(outcome, RunStoppedByTool)
    assert outcome.reason == "the cause of it all"


# --- siblings -----------------------------------------------------------------------------------


async def test_a_failure_that_aborts_siblings_stops_those_that_run() -> None:
    waiting = Waiting()

    async def fail(args: Any, ctx: ToolContext) -> ToolResult:
        await waiting.started.wait()
        raise ValueError("no")

    result, _ = await completed(
        [[call("wait"), call("work"), call("bad")], "ok"], Work("wait", waiting),
        Work("bad", fail, aborts_siblings_on_error=True), Work(),
    )  # fmt: skip
    assert waiting.cancelled
    assert [r.is_error for r in results(result)] == [True, False, True]
    assert "another call of the same batch failed" in texts(result)[0]
    assert result.outcome is LoopOutcome.DONE


async def test_a_failure_at_once_stops_siblings_that_come_later_in_the_batch() -> None:
    """They have been announced as running, so they are siblings still running."""
    waiting = Waiting()
    running = asyncio.create_task(
        completed(
            [[call("bad"), call("wait")], "ok"],
            Work("bad", ValueError("no"), aborts_siblings_on_error=True), Work("wait", waiting),
        )
    )  # fmt: skip
    await let_others_run()
    waiting.release.set()  # for the case that it did start, so that the test ends
    result, _ = await running
    assert [r.is_error for r in results(result)] == [True, True]


async def test_siblings_go_on_when_a_hook_clears_the_error() -> None:
    gate = asyncio.Event()

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        await gate.wait()
        return ToolResult.text("undisturbed")

    def forgive(ctx: Any) -> AfterToolDecision | None:
        if ctx.tool_call.name == "bad":
            gate.set()
            return AfterToolDecision(mark_error=False)
        return None

    result, _ = await completed(
        [[call("wait"), call("bad")], "ok"], Work("wait", wait),
        Work("bad", ValueError("no"), aborts_siblings_on_error=True),
        plugins=[FunctionPlugin("after_tool_call", forgive)],
    )  # fmt: skip
    assert texts(result)[0] == "undisturbed"


async def test_siblings_stop_when_a_hook_makes_it_an_error() -> None:
    waiting = Waiting()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        await waiting.started.wait()
        return ToolResult.text("fine")

    def object_to_it(ctx: Any) -> AfterToolDecision | None:
        return AfterToolDecision(mark_error=True) if ctx.tool_call.name == "work" else None

    await completed(
        [[call("wait"), call("work")], "ok"], Work("wait", waiting),
        Work("work", work, aborts_siblings_on_error=True),
        plugins=[FunctionPlugin("after_tool_call", object_to_it)],
    )  # fmt: skip
    assert waiting.cancelled


async def test_a_failing_tool_without_the_flag_leaves_its_siblings_alone() -> None:
    done = asyncio.Event()

    async def wait(args: Any, ctx: ToolContext) -> ToolResult:
        await done.wait()
        return ToolResult.text("undisturbed")

    def on_event(event: ev.AgentEvent) -> None:
        if isinstance(event, ev.ToolExecutionEnd) and event.tool_name == "bad":
            done.set()

    result, _ = await completed(
        [[call("wait"), call("bad")], "ok"], Work("wait", wait), Work("bad", ValueError("no")),
        on_event=on_event,
    )  # fmt: skip
    assert texts(result)[0] == "undisturbed"


# --- timeouts -----------------------------------------------------------------------------------

SOON = 0.01


@MODES
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_that_takes_too_long_is_stopped(calls: int, mode: ExecutionMode) -> None:
    waiting = Waiting()
    result, _ = await completed(
        [[call("wait"), call("work")][:calls], "ok"], Work("wait", waiting), Work(),
        tool_timeout=SOON, default_execution_mode=mode,
    )  # fmt: skip
    assert waiting.cancelled
    message = results(result)[0]
    assert message.is_error
    assert "0.01 seconds" in message.plain_text
    assert message.details == {
        "kind": "tool_call_stopped", "reason": "timeout", "still_running": False,
    }  # fmt: skip
    assert texts(result)[1:] == ["done"][: calls - 1]


@MODES
async def test_the_time_of_a_call_begins_before_its_first_step(mode: ExecutionMode) -> None:
    async def work(args: Any, ctx: ToolContext) -> None:
        hurry(100)
        await asyncio.sleep(10)

    result, _ = await completed(
        [[call("work"), call("idle")], "ok"], Work("work", work), Work("idle"),
        tool_timeout=60.0, default_execution_mode=mode,
    )  # fmt: skip
    assert texts(result) == ["The call took longer than 60.0 seconds and was stopped.", "done"]


async def test_a_tools_own_timeout_comes_before_that_of_the_config() -> None:
    waiting, patient = Waiting(), Waiting()

    def on_event(event: ev.AgentEvent) -> None:
        if isinstance(event, ev.ToolExecutionEnd) and event.tool_name == "wait":
            patient.release.set()

    result, _ = await completed(
        [[call("wait"), call("patient")], "ok"], Work("wait", waiting, timeout=2 * SOON),
        Work("patient", patient, timeout=3600.0), tool_timeout=SOON, on_event=on_event,
    )  # fmt: skip
    assert "0.02 seconds" in texts(result)[0]
    assert texts(result)[1] == "released"


async def test_a_tool_may_use_its_last_moments() -> None:
    async def careful(args: Any, ctx: ToolContext) -> ToolResult:
        await ctx.signal.wait()
        return ToolResult.text(f"saved what there was ({ctx.signal.reason})")

    result, _ = await completed([call("work"), "ok"], Work("work", careful), tool_timeout=SOON)
    assert texts(result) == ["saved what there was (timeout)"]
    assert not results(result)[0].is_error


async def test_a_tool_that_waits_for_its_signal_and_goes_on_is_cancelled() -> None:
    async def deaf(args: Any, ctx: ToolContext) -> ToolResult:
        await ctx.signal.wait()
        await asyncio.Event().wait()
        return ToolResult.text("never")

    result, _ = await completed(
        [call("work"), "ok"], Work("work", deaf), tool_timeout=SOON, cancel_grace=4 * SOON
    )
    assert results(result)[0].details["still_running"] is False


@MODES
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_that_swallows_its_cancellation_is_left_behind(
    calls: int, mode: ExecutionMode, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn = Stubborn()
    result, _ = await completed(
        [[call("stubborn"), call("work")][:calls], "ok"], Work("stubborn", stubborn), Work(),
        tool_timeout=SOON, cancel_grace=SOON, default_execution_mode=mode, leaves_tasks=True,
    )  # fmt: skip
    message = results(result)[0]
    assert message.is_error
    assert message.details == {
        "kind": "tool_call_stopped", "reason": "timeout", "still_running": True,
    }  # fmt: skip
    assert "may still be running" in message.plain_text
    assert "left behind" in caplog.text
    assert texts(result)[1:] == ["done"][: calls - 1]
    assert not stubborn.ended.is_set()
    stubborn.release.set()
    await stubborn.ended.wait()


async def test_a_tool_left_behind_that_fails_in_the_end_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release, failed_at_last = asyncio.Event(), asyncio.Event()

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        failed_at_last.set()
        raise ValueError("after all that")

    with caplog.at_level(logging.INFO):
        await completed(
            [call("work"), "ok"], Work("work", work), tool_timeout=SOON, cancel_grace=SOON,
            leaves_tasks=True,
        )  # fmt: skip
        release.set()
        await failed_at_last.wait()
        await asyncio.sleep(0)
    assert "after all that" in caplog.text


async def test_a_sibling_that_swallows_its_cancellation_is_left_behind() -> None:
    stubborn = Stubborn()

    async def fail(args: Any, ctx: ToolContext) -> ToolResult:
        await stubborn.started.wait()
        raise ValueError("no")

    result, _ = await completed(
        [[call("stubborn"), call("bad")], "ok"], Work("stubborn", stubborn),
        Work("bad", fail, aborts_siblings_on_error=True), cancel_grace=SOON, leaves_tasks=True,
    )  # fmt: skip
    assert results(result)[0].details["still_running"] is True
    stubborn.release.set()
    await stubborn.ended.wait()


# --- progress -----------------------------------------------------------------------------------


async def test_progress_is_told_while_the_tool_runs() -> None:
    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        await ctx.update("half")
        await ctx.update(ToolResult.text("nearly", details={"percent": 90}))
        return ToolResult.text("done")

    _, sink = await completed([[call("work"), call("work")], "ok"], Work("work", work))
    updates = sink.of(ev.ToolExecutionUpdate)
    assert [(e.tool_call_id, e.tool_name) for e in updates] == [
        ("call_1", "work"), ("call_1", "work"), ("call_2", "work"), ("call_2", "work"),
    ]  # fmt: skip
    assert updates[0].partial == ToolResult.text("half")
    assert updates[1].partial.details == {"percent": 90}


async def test_progress_after_the_tool_has_returned_is_dropped() -> None:
    kept: list[ToolContext] = []

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        kept.append(ctx)
        return ToolResult.text("done")

    async def late(args: Any, ctx: ToolContext) -> ToolResult:
        await kept[0].update("too late")
        await ctx.update("in time")
        return ToolResult.text("done")

    _, sink = await completed(
        [call("work"), call("late"), "ok"], Work("work", work), Work("late", late)
    )
    assert [e.partial.plain_text for e in sink.of(ev.ToolExecutionUpdate)] == ["in time"]
    await kept[0].update("much too late")
    assert len(sink.of(ev.ToolExecutionUpdate)) == 1


async def test_an_update_that_is_awaited_too_late_is_dropped() -> None:
    kept: list[Awaitable[None]] = []

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        kept.append(ctx.update("made in time"))
        return ToolResult.text("done")

    _, sink = await completed([call("work"), "ok"], Work("work", work))
    await kept[0]
    assert sink.of(ev.ToolExecutionUpdate) == []


async def test_an_update_on_its_way_when_the_tool_returns_reaches_no_listener_too_late() -> None:
    """A slow listener holds it up; those behind it must not get it after the end of the call."""
    held = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        async def report() -> None:
            await ctx.update("on its way")

        tasks.append(asyncio.create_task(report()))
        await held.wait()
        return ToolResult.text("done")

    async def slow(event: ev.AgentEvent) -> None:
        if isinstance(event, ev.ToolExecutionUpdate):
            held.set()
            await let_others_run()

    # Every observed run compares what the sink and an observer behind it have seen.
    try:
        await completed([call("work"), "ok"], Work("work", work), on_event=slow, leaves_tasks=True)
    finally:
        await asyncio.gather(*tasks)


async def test_a_listener_that_fails_on_progress_does_not_fail_the_tool() -> None:
    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        await ctx.update("half")
        return ToolResult.text("done")

    def crash(event: ev.AgentEvent) -> None:
        if isinstance(event, ev.ToolExecutionUpdate):
            raise RuntimeError("a bug in the host")

    result, _ = await completed([call("work"), "ok"], Work("work", work), on_event=crash)
    assert texts(result) == ["done"]


async def test_a_thread_may_report_progress() -> None:
    async def work(args: Any, ctx: ToolContext) -> ToolResult:
        finished = asyncio.Event()
        loop = asyncio.get_running_loop()

        def report() -> None:
            _ = ctx.update("from a thread")  # in a thread it is only called
            loop.call_soon_threadsafe(finished.set)

        thread = threading.Thread(target=report)
        thread.start()
        await finished.wait()
        thread.join()
        return ToolResult.text("done")

    _, sink = await completed([call("work"), "ok"], Work("work", work))
    assert [e.partial.plain_text for e in sink.of(ev.ToolExecutionUpdate)] == ["from a thread"]


# --- aliases and ids ----------------------------------------------------------------------------


async def test_the_policy_may_repair_names_and_arguments() -> None:
    class Aliases(ProtocolPolicy):
        def normalize_tool_calls(self, calls: Any, registry: Any) -> Any:
            assert "read_file" in registry
            return [ToolCall(c.id, "read_file", {"path": c.arguments["file"]}) for c in calls]

    tool = Work("read_file", require="path")
    result, sink = await completed(
        [call("readFile", file="x"), "ok"], tool, protocol=Aliases(), max_tool_calls_per_turn=1
    )
    assert tool.calls == [{"path": "x"}]
    assert [r.tool_name for r in results(result)] == ["read_file"]
    assert sink.of(ev.ToolExecutionStart)[0].args == {"path": "x"}
    asked = result.messages[1]
    assert isinstance(asked, AssistantMessage)
    assert asked.tool_calls[0] == ToolCall("call_1", "readFile", {"file": "x"})


@MODES
async def test_calls_of_one_id_are_each_answered_in_their_order(mode: ExecutionMode) -> None:
    calls = [call("work", call_id="same", n=n) for n in range(3)]
    tool = Work("work", lambda args, ctx: f"result {args['n']}")
    result, sink = await completed([calls, "ok"], tool, default_execution_mode=mode, valid=False)
    assert texts(result) == ["result 0", "result 1", "result 2"]
    assert [r.tool_call_id for r in results(result)] == ["same"] * 3
    assert len(sink.of(ev.ToolExecutionEnd)) == 3
    # Once the ids are told apart the pairs are as they ran.
    repaired = repair_history(result.messages)
    assert [c.kind for c in repaired.changes] == ["renamed_call"] * 2
    assert texts(list(repaired.messages)) == texts(result)


async def test_a_server_with_one_id_for_all_calls() -> None:
    stream = ScriptedStream([*[call("work", call_id="c")] * 3, "ok"])
    await completed(stream, Work(), plugins=[UniqueToolCallIds()], valid=False)
    sent = stream.requests[-1].messages
    ids = [c.id for m in sent if isinstance(m, AssistantMessage) for c in m.tool_calls]
    assert ids == ["c", "clark_agent_call_1", "clark_agent_call_2"]
    assert [r.tool_call_id for r in results(list(sent))] == ids
    assert repair_history(sent).changes == ()


async def test_text_beside_calls_stays_in_the_message() -> None:
    result, _ = await completed([say("Let me look.", call("work")), "ok"], Work())
    assert [text_of(m) for m in result.messages] == ["go", "Let me look.", "done", "ok"]


async def test_a_block_leaves_the_other_calls_alone() -> None:
    def guard(ctx: Any) -> None:
        if ctx.args.get("bad"):
            raise PermissionError("not this one")

    result, _ = await completed(
        [[call("work"), call("work", bad=True), call("work")], "ok"], Work(),
        plugins=[FunctionPlugin("before_tool_call", guard, name="guard")],
    )  # fmt: skip
    assert [r.is_error for r in results(result)] == [False, True, False]
    assert decided(results(result)[1]) == [("guard", "failed")]


async def test_a_tool_that_is_only_a_base_is_told_apart_from_one_that_fails() -> None:
    class Lazy(AgentTool):
        name = "lazy"

        async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
            raise NotImplementedError

    result, _ = await completed([call("lazy"), "ok"], Lazy())
    assert texts(result) == ["NotImplementedError: "]
