"""A run with an `Output` returns a value of its type or raises `OutputError` with everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from clark_agent import (
    AgentContext,
    AssistantMessage,
    BeforeToolCallContext,
    Budget,
    ChannelSteering,
    ConfigError,
    HookError,
    LoopConfig,
    ModelRetry,
    Output,
    OutputError,
    Rewrite,
    RunContext,
    StopReason,
    SystemMessage,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    agent_tool,
    run,
    stream_run,
    tool,
)
from clark_agent.output import OutputMode
from clark_agent.partial import parse_partial
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog, resume
from clark_agent.stream import Chunk, Done, Start, StreamRequest, ToolCallChunk
from clark_agent.testing import RecordingSink, ScriptedStream, call, check_events, fold_events
from tests.run_log.stories import copy_of


class Verdict(Struct):
    decision: Literal["approve", "reject"]
    score: int


GOOD = '{"decision": "approve", "score": 9}'
MODES = list(OutputMode)


def good(mode: OutputMode) -> Any:
    """The answer of a model that does it right, in a mode."""
    return call("finish", decision="approve", score=9) if mode is OutputMode.TOOL else GOOD


def config(*script: Any, output: Output[Any], **settings: Any) -> LoopConfig:
    return LoopConfig(stream=ScriptedStream([*script]), output=output, **settings)


async def outcome(*script: Any, output: Output[Any], **settings: Any) -> Any:
    result = await run("?", AgentContext(), config(*script, output=output, **settings))
    return result.output


@pytest.mark.parametrize("mode", MODES)
async def test_the_output_has_its_type(mode: OutputMode) -> None:
    assert await outcome(good(mode), output=Output(Verdict, mode=mode)) == Verdict("approve", 9)


BAD: dict[str, Any] = {
    "prose": "I approve of it.",
    "half a JSON": '{"decision": "approve", "sc',
    "the wrong type": '{"decision": "approve", "score": "many"}',
    "another choice": '{"decision": "maybe", "score": 1}',
    "nothing": AssistantMessage((), StopReason.END_TURN),
    "JSON that is no object": "[1, 2]",
}
BAD_CALLS: dict[str, Any] = {
    "prose": "I approve of it.",
    "the wrong type": call("finish", decision="approve", score="many"),
    "a missing field": call("finish", decision="approve"),
    "no JSON": call("finish", __raw__=1),
}


def bad_answers() -> list[Any]:
    cases = [pytest.param(OutputMode.TOOL, bad, id=f"tool-{n}") for n, bad in BAD_CALLS.items()]
    for mode in (OutputMode.NATIVE, OutputMode.PROMPTED):
        cases += [pytest.param(mode, bad, id=f"{mode}-{name}") for name, bad in BAD.items()]
    return cases


@pytest.mark.parametrize(("mode", "bad"), bad_answers())
async def test_what_does_not_fit_goes_back_to_the_model(mode: OutputMode, bad: Any) -> None:
    sink = RecordingSink()
    made = config(bad, bad, good(mode), output=Output(Verdict, mode=mode), event_sink=sink)
    result = await run("?", AgentContext(), made)
    assert result.output == Verdict("approve", 9)
    reasons = [m for m in result.messages if isinstance(m, (SystemMessage, ToolResultMessage))]
    assert len([m for m in reasons if m.plain_text != "The answer was accepted."]) == 2
    check_events(sink.events)
    assert fold_events(sink.events) == result.messages


@pytest.mark.parametrize(("mode", "bad"), bad_answers())
@pytest.mark.parametrize("retries", [0, 2])
async def test_without_attempts_left_the_error_carries_everything(
    mode: OutputMode, bad: Any, retries: int
) -> None:
    sink = RecordingSink()
    output = Output(Verdict, mode=mode, retries=retries)
    with pytest.raises(OutputError) as caught:
        await run("?", AgentContext(), config(*[bad] * 9, output=output, event_sink=sink))
    assert caught.value.attempts == retries + 1
    answers = [m for m in caught.value.messages if isinstance(m, AssistantMessage)]
    assert len(answers) == retries + 1
    assert caught.value.turn == retries + 1
    assert AgentContext().extend(caught.value).messages == caught.value.messages
    check_events(sink.events)
    assert fold_events(sink.events) == caught.value.messages


async def test_the_reason_says_what_is_wrong() -> None:
    made = config('{"decision": "maybe", "score": 1}', GOOD, output=Output(Verdict, mode="native"))
    result = await run("?", AgentContext(), made)
    (reason,) = [m.content for m in result.messages if isinstance(m, SystemMessage)]
    assert "$.decision" in reason
    assert '"approve", "reject"' in reason


# --- modes ------------------------------------------------------------------------------------


async def test_the_tool_mode_offers_a_tool_and_forces_a_call() -> None:
    stream = ScriptedStream([good(OutputMode.TOOL)])
    await run("?", AgentContext(), LoopConfig(stream=stream, output=Output(Verdict)))
    (request,) = stream.requests
    assert [schema.name for schema in request.tools] == ["finish"]
    assert request.force_tool_call
    assert request.output_schema is None


async def test_the_native_mode_passes_the_schema() -> None:
    stream = ScriptedStream([GOOD])
    output = Output(Verdict, mode="native", name="verdict", description="What you decide.")
    await run("?", AgentContext("Be fair."), LoopConfig(stream=stream, output=output))
    (request,) = stream.requests
    assert request.output_schema is not None
    assert (request.output_schema.name, request.output_schema.description) == (
        "verdict",
        "What you decide.",
    )
    assert set(request.output_schema.schema["properties"]) == {"decision", "score"}
    assert (request.tools, request.force_tool_call, request.system_prompt) == (
        (),
        False,
        "Be fair.",
    )


@pytest.mark.parametrize("text", [GOOD, f"```json\n{GOOD}\n```", f"Here it is: {GOOD}. Well?"])
async def test_the_prompted_mode_finds_the_object_in_the_answer(text: str) -> None:
    stream = ScriptedStream([text])
    output = Output(Verdict, mode="prompted")
    result = await run("?", AgentContext("Be fair."), LoopConfig(stream=stream, output=output))
    assert result.output == Verdict("approve", 9)
    assert stream.requests[0].system_prompt.startswith("Be fair.\n\n")
    assert '"decision"' in stream.requests[0].system_prompt


class Native(ScriptedStream):
    def best_output_mode(self, *, has_tools: bool) -> str:
        return "tool" if has_tools else "native"


@tool(idempotent=True)
async def look() -> str:
    """Look."""
    return "seen"


def test_the_transport_decides_which_mode_is_best() -> None:
    assert LoopConfig(stream=Native([]), output=Output(Verdict)).output_mode == "native"
    with_tools = LoopConfig(stream=Native([]), output=Output(Verdict), tools=[look])
    assert with_tools.output_mode == "tool"
    chosen = LoopConfig(stream=Native([]), output=Output(Verdict, mode="prompted"))
    assert chosen.output_mode == "prompted"
    assert LoopConfig(stream=ScriptedStream([]), output=Output(str)).output_mode is None


# --- types ------------------------------------------------------------------------------------


@dataclass
class Point:
    x: int
    y: int


class Answer(Struct):
    answer: str


@pytest.mark.parametrize(
    ("output_type", "arguments", "expected"),
    [
        (int, {"answer": 5}, 5),
        (list[str], {"answer": ["a"]}, ["a"]),
        (int | None, {"answer": None}, None),
        (Point, {"x": 1, "y": 2}, Point(1, 2)),
        (Answer, {"answer": "yes"}, Answer("yes")),
        (Point | int, {"answer": 5}, 5),
        (bool, {"answer": False}, False),
        (Point | Answer, {"type": "Point", "value": {"x": 1, "y": 2}}, Point(1, 2)),
        (Verdict | Answer, {"type": "Answer", "value": {"answer": "a"}}, Answer("a")),
        (Point | Verdict | int, {"answer": 5}, 5),
    ],
)
@pytest.mark.parametrize("mode", MODES)
async def test_any_type_that_a_tool_can_take(
    output_type: Any, arguments: dict[str, Any], expected: object, mode: OutputMode
) -> None:
    answer: Any = msgspec.json.encode(arguments).decode()
    if mode is OutputMode.TOOL:
        answer = call("finish", **arguments)
    result = await outcome(answer, output=Output(output_type, mode=mode))
    assert result == expected
    assert type(result) is type(expected)


@given(st.integers(-(2**53), 2**53), st.sampled_from(["approve", "reject"]), st.text())
def test_any_verdict_comes_back(score: int, decision: str, around: str) -> None:
    text = msgspec.json.encode({"decision": decision, "score": score}).decode()
    around = around.replace("{", "").replace("}", "").replace("`", "").replace("<", "")
    value = Output(Verdict).parse(f"{around}{text}{around}", OutputMode.PROMPTED)
    assert value == Verdict(decision, score)  # type: ignore[arg-type]


async def test_text_is_the_output_of_the_last_answer() -> None:
    assert await outcome("  Hello. \n", output=Output(str)) == "  Hello. \n"


async def test_text_is_never_none() -> None:
    made = config(call("look"), "no turn", output=Output(str), tools=[look], max_iterations=1)
    result = await run("?", AgentContext(), made)
    assert (result.outcome, result.output) == ("hit_max_iterations", "")


async def test_a_union_with_text_accepts_prose() -> None:
    output: Output[Any] = Output(Point | str)
    made = config("Just words.", output=output)
    assert not made.forces_tool_call
    assert (await run("?", AgentContext(), made)).output == "Just words."


# --- validators -------------------------------------------------------------------------------


def high(value: Verdict) -> None:
    if value.score < 5:
        raise ModelRetry("The score must be at least 5.")


async def high_async(value: Verdict, ctx: RunContext[int]) -> Verdict:
    if value.score < ctx.deps:
        raise ModelRetry("The score must be at least 5.")
    assert ctx.identity is not None
    assert ctx.messages[0].plain_text == "?"
    return value


@pytest.mark.parametrize("validator", [high, high_async])
@pytest.mark.parametrize("mode", MODES)
async def test_a_validator_sends_an_output_back(
    mode: OutputMode, validator: Callable[..., Any]
) -> None:
    low: Any = '{"decision": "approve", "score": 2}'
    if mode is OutputMode.TOOL:
        low = call("finish", decision="approve", score=2)
    output = Output(Verdict, mode=mode, validators=[validator])
    result = await run("?", AgentContext(), config(low, good(mode), output=output), deps=5)
    assert result.output == Verdict("approve", 9)
    assert "The score must be at least 5." in [m.plain_text for m in result.messages]
    with pytest.raises(OutputError, match="at least 5"):
        await run("?", AgentContext(), config(*[low] * 5, output=output), deps=5)


@pytest.mark.parametrize("mode", MODES)
async def test_a_validator_that_fails_ends_the_run(mode: OutputMode) -> None:
    def broken(value: Verdict) -> None:
        raise ZeroDivisionError("a bug")

    output = Output(Verdict, mode=mode, validators=[broken])
    with pytest.raises(HookError, match="output validator 'broken' raised ZeroDivisionError"):
        await outcome(*[good(mode)] * 3, output=output)


async def test_a_validator_does_not_replace_the_output() -> None:
    output = Output(Verdict, mode="native", validators=[lambda value: Verdict("reject", 0)])
    with pytest.raises(HookError, match="returns None or the value itself"):
        await outcome(GOOD, output=output)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "telepathy"},
        {"retries": -1},
        {"retries": True},
        {"validators": [lambda: None]},
        {"validators": [5]},
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Output(Verdict, **wrong)


def test_a_config_wants_an_output_not_a_type() -> None:
    with pytest.raises(ConfigError, match=r"Output\(MyType\)"):
        LoopConfig(stream=ScriptedStream([]), output=Verdict)  # type: ignore[arg-type]


# --- with the rest of a run -------------------------------------------------------------------


async def test_tools_come_before_the_output() -> None:
    for mode in MODES:
        output = Output(Verdict, mode=mode)
        made = config(call("look"), good(mode), output=output, tools=[look])
        result = await run("?", AgentContext(), made)
        assert result.output == Verdict("approve", 9)
        assert "seen" in [m.plain_text for m in result.messages]


async def test_another_tool_that_ends_the_run_leaves_no_output() -> None:
    @tool
    async def stop() -> ToolResult:
        """Stop."""
        return ToolResult.terminal("stopped")

    with pytest.raises(OutputError, match="the run was ended before"):
        await outcome(call("stop"), output=Output(Verdict), tools=[stop])


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"max_iterations": 2}, "max_iterations"), ({"budget": Budget(turns=2)}, "budget")],
)
async def test_a_limit_before_the_output_is_an_error(limit: dict[str, Any], reason: str) -> None:
    with pytest.raises(OutputError, match=reason) as caught:
        await outcome(*[call("look")] * 5, output=Output(Verdict), tools=[look], **limit)
    assert caught.value.attempts == 0
    assert len(caught.value.messages) >= 5


async def test_a_follow_up_asks_for_the_output_again() -> None:
    steering = ChannelSteering()
    receipt = steering.handle.follow_up("Once more, please.")
    output = Output(Verdict, mode="native")
    again = '{"decision": "reject", "score": 1}'
    assert await outcome(GOOD, again, output=output, plugins=[steering]) == Verdict("reject", 1)
    assert receipt.turn == 2


async def test_a_tool_may_ask_for_another_attempt() -> None:
    @tool
    async def order(amount: int) -> str:
        """Order."""
        if amount > 3:
            raise ModelRetry("Order at most 3.")
        return "ordered"

    script: list[Any] = [call("order", amount=9), call("order", amount=3), "Done."]
    result = await run(
        "?", AgentContext(), LoopConfig(stream=ScriptedStream(script), tools=[order])
    )
    first, second = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    assert (first.plain_text, first.is_error) == ("Order at most 3.", True)
    assert (second.plain_text, second.is_error) == ("ordered", False)


async def test_a_child_does_not_inherit_the_output() -> None:
    parent = config("Free.", output=Output(Verdict), tools=[look])
    child = parent.child()
    assert (child.output, child.registry.names) == (None, ("look",))


async def test_an_agent_with_an_output_as_a_tool() -> None:
    below = config(good(OutputMode.TOOL), output=Output(Verdict))
    failing = config("No.", "No.", "No.", output=Output(Verdict))
    tools = [agent_tool("judge", "Judges.", below), agent_tool("lazy", "Does not.", failing)]
    script: list[Any] = [call("judge", task="?"), call("lazy", task="?"), "Done."]
    result = await run("?", AgentContext(), LoopConfig(stream=ScriptedStream(script), tools=tools))
    judged, failed = [m for m in result.messages if isinstance(m, ToolResultMessage)]
    assert msgspec.json.decode(judged.plain_text) == {"decision": "approve", "score": 9}
    assert failed.is_error


# --- logged, resumed and replayed -------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_run_with_an_output_is_resumed_after_every_record(mode: OutputMode) -> None:
    output = Output(Verdict, mode=mode, validators=[high])
    bad: Any = "Words."
    low: Any = '{"decision": "approve", "score": 2}'
    if mode is OutputMode.TOOL:
        low = call("finish", decision="approve", score=2)
    script = [call("look"), bad, low, good(mode)]
    store = MemoryStore()
    made = config(*script, output=output, tools=[look], run_log=RunLog(store))
    first = await run("?", AgentContext("Be fair."), made)
    (summary,) = store.runs()
    report = await replay(store, summary.run_id, made)
    assert report.is_identical, str(report)
    assert report.result is not None
    assert report.result.output == Verdict("approve", 9)

    def answer(request: StreamRequest) -> Any:
        return script[sum(isinstance(m, AssistantMessage) for m in request.messages)]

    records = len(store.load(summary.run_id).records)
    for length in range(1, records):
        copy = copy_of(store, summary.run_id, length)
        stream = ScriptedStream([answer] * 9)
        again = made.replace(stream=stream, run_log=RunLog(copy))
        result = await resume(copy, summary.run_id, again)
        assert result.output == Verdict("approve", 9)
        texts = [m.plain_text for m in result.messages]
        assert texts == [m.plain_text for m in first.messages], length


async def test_attempts_are_counted_across_processes() -> None:
    store = MemoryStore()
    output = Output(Verdict, mode="native", retries=1)
    made = config("No.", KeyboardInterrupt(), output=output, run_log=RunLog(store))
    with pytest.raises(KeyboardInterrupt):
        await run("?", AgentContext(), made)
    (summary,) = store.runs()
    with pytest.raises(OutputError) as caught:
        await resume(store, summary.run_id, made.replace(stream=ScriptedStream(["No."])))
    assert caught.value.attempts == 2


# --- while it streams -------------------------------------------------------------------------


def in_pieces(arguments: str) -> list[Any]:
    """The events of a call of the finish tool that streams character by character."""
    message = AssistantMessage.from_calls([ToolCall("c", "finish", msgspec.json.decode(arguments))])
    chunks = [
        ToolCallChunk(0, "c", "finish", ""),
        *[ToolCallChunk(0, None, None, c) for c in arguments],
    ]
    start = Start(AssistantMessage((), StopReason.OTHER))
    return [start, *[Chunk(chunk) for chunk in chunks], Done(message)]


@pytest.mark.parametrize("mode", MODES)
async def test_partial_outputs_grow_to_the_output(mode: OutputMode) -> None:
    answer: Any = in_pieces(GOOD) if mode is OutputMode.TOOL else GOOD
    made = config("Words.", answer, output=Output(Verdict, mode=mode))
    async with stream_run("?", AgentContext(), made) as stream:
        seen: list[Any] = [partial async for partial in stream.partial_outputs()]
    assert seen[-1] == {"decision": "approve", "score": 9}
    assert len(seen) > 1
    for smaller, larger in pairwise(seen):
        assert set(smaller) <= set(larger)
    assert stream.result.output == Verdict("approve", 9)


async def test_the_partial_output_of_a_wrapped_type() -> None:
    made = config('{"answer": [1, 2, 3]}', output=Output(list[int], mode="native"))
    async with stream_run("?", AgentContext(), made) as stream:
        seen = [partial async for partial in stream.partial_outputs()]
    assert seen[-1] == [1, 2, 3]


async def test_text_arrives_delta_by_delta() -> None:
    made = LoopConfig(stream=ScriptedStream([call("look"), "One two three."]), tools=[look])
    async with stream_run("?", AgentContext(), made) as stream:
        deltas = [delta async for delta in stream.text_stream()]
    assert len(deltas) > 1
    assert "".join(deltas) == stream.result.text == "One two three."


def test_a_finish_tool_checks_when_it_is_called_by_itself() -> None:
    output = Output(Verdict, validators=[high])
    ctx = ToolContext(tool_call_id="c", tool_name="finish")
    result = asyncio.run(output.tool.execute({"decision": "approve", "score": 9}, ctx))
    assert result.plain_text == "The answer was accepted."


# --- attempts, rewrites and early ends --------------------------------------------------------


async def test_several_calls_of_one_answer_are_one_attempt() -> None:
    several = [call("finish", decision="approve", score=1)] * 3
    made = config(several, good(OutputMode.TOOL), output=Output(Verdict, retries=1))
    assert (await run("?", AgentContext(), made)).output == Verdict("approve", 9)


async def test_a_rewritten_output_is_the_one_that_a_resume_returns() -> None:
    class Redact:
        def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Rewrite:
            return Rewrite({"decision": "reject", "score": 0})

    store = MemoryStore()
    made = config(
        good(OutputMode.TOOL), output=Output(Verdict), plugins=[Redact()], run_log=RunLog(store)
    )
    first = await run("?", AgentContext(), made)
    assert first.output == Verdict("reject", 0)
    (summary,) = store.runs()
    for length in range(4, len(store.load(summary.run_id).records)):
        copy = copy_of(store, summary.run_id, length)
        again = made.replace(run_log=RunLog(copy), stream=ScriptedStream([good(OutputMode.TOOL)]))
        assert (await resume(copy, summary.run_id, again)).output == Verdict("reject", 0), length


async def test_text_that_no_validator_has_seen_is_not_an_output() -> None:
    output = Output(str, validators=[lambda text: None])
    with pytest.raises(OutputError, match="max_iterations"):
        await outcome(call("look"), output=output, tools=[look], max_iterations=1)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
async def test_json_that_is_nested_too_deeply_is_not_accepted(text: str) -> None:
    assert await outcome(text, GOOD, output=Output(Verdict, mode="native")) == Verdict("approve", 9)


async def test_steering_is_not_a_failed_attempt() -> None:
    steering, checking = ChannelSteering(), asyncio.Event()

    async def slow(value: Verdict) -> None:
        if not checking.is_set():
            checking.set()
            await asyncio.Event().wait()

    script = [good(OutputMode.TOOL), good(OutputMode.TOOL)]
    output = Output(Verdict, retries=0, validators=[slow])
    made = config(*script, output=output, plugins=[steering])
    task = asyncio.create_task(run("?", AgentContext(), made))
    await checking.wait()
    receipt = await steering.handle.steer("Once more.", "now")
    assert receipt.status == "delivered"
    assert (await task).output == Verdict("approve", 9)


async def test_thoughts_are_not_partial_outputs() -> None:
    text = '<think>{"score": 1}</think>' + GOOD
    made = config(text, output=Output(Verdict, mode="prompted"))
    async with stream_run("?", AgentContext(), made) as stream:
        seen = [partial async for partial in stream.partial_outputs()]
    assert seen[-1] == {"decision": "approve", "score": 9}


def test_any_json_can_be_partial() -> None:
    assert parse_partial('[{"a": 1}, {"a": 2') == [{"a": 1}, {"a": 2}]
    assert parse_partial('"abc') == "abc"
    assert parse_partial("  ") is None
    assert parse_partial("no JSON") is None


@pytest.mark.parametrize("mode", MODES)
async def test_validators_are_called_in_a_replay(mode: OutputMode) -> None:
    def broken(value: Verdict) -> None:
        raise ZeroDivisionError("a bug")

    store = MemoryStore()
    output = Output(Verdict, mode=mode, validators=[broken])
    made = config(good(mode), output=output, run_log=RunLog(store))
    with pytest.raises(HookError):
        await run("?", AgentContext(), made)
    (summary,) = store.runs()
    report = await replay(store, summary.run_id, made)
    assert report.is_identical, str(report)
    fixed = made.replace(output=Output(Verdict, mode=mode, validators=[lambda value: None]))
    assert not (await replay(store, summary.run_id, fixed)).is_identical
