"""finish_tool: a run that ends with a value of a type."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from datetime import date
from typing import Annotated, Any, Literal, TypedDict

import attrs
import jsonschema
import msgspec
import pydantic
import pytest

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    AgentTool,
    Answer,
    BeforeToolCallContext,
    Block,
    ConfigError,
    FunctionPlugin,
    LoopConfig,
    LoopOutcome,
    Rewrite,
    StopReason,
    ToolContext,
    ToolResult,
    finish_tool,
    run,
)
from clark_agent.errors import ToolDefinitionError
from clark_agent.testing import ScriptedStream, Step, call, say
from clark_agent.tools import FinishTool
from tests.engine.support import CONTEXT, Work, completed, outline, results, texts


class Verdict(msgspec.Struct):
    decision: Literal["approve", "reject"]
    score: Annotated[int, msgspec.Meta(ge=0, le=10)] = 5


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Movie(TypedDict):
    title: str
    year: int


class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(gt=0)

    @pydantic.field_validator("name")
    @classmethod
    def check_name(cls, name: str) -> str:
        if not name.istitle():
            raise ValueError("a name begins with a capital")
        return name


@attrs.define
class Box:
    size: int


class Found(msgspec.Struct, tag="found"):
    where: str


class Missing(msgspec.Struct, tag="missing"):
    looked_at: list[str]


class Colour(enum.Enum):
    RED = "red"


class Nothing(msgspec.Struct):
    pass


ANSWERS: list[Any] = [
    pytest.param(Verdict, {"decision": "approve"}, Verdict("approve", 5), id="struct"),
    pytest.param(Point, {"x": 1, "y": 2}, Point(1, 2), id="dataclass"),
    pytest.param(
        Movie, {"title": "M", "year": 1931}, {"title": "M", "year": 1931}, id="typed dict"
    ),
    pytest.param(Person, {"name": "Ada", "age": 36}, Person(name="Ada", age=36), id="pydantic"),
    pytest.param(Box, {"size": 3}, Box(3), id="attrs"),
    pytest.param(Nothing, {}, Nothing(), id="empty struct"),
    pytest.param(Found | Missing, {"type": "found", "where": "x"}, Found("x"), id="union"),
    pytest.param(
        Found | Missing, {"type": "missing", "looked_at": ["a"]}, Missing(["a"]), id="union, other"
    ),
    pytest.param(int, {"answer": 42}, 42, id="int"),
    pytest.param(str, {"answer": "forty-two"}, "forty-two", id="str"),
    pytest.param(float, {"answer": 0.5}, 0.5, id="float"),
    pytest.param(bool, {"answer": False}, False, id="bool"),
    pytest.param(list[str], {"answer": ["a", "b"]}, ["a", "b"], id="list"),
    pytest.param(list[Verdict], {"answer": [{"decision": "reject"}]}, [Verdict("reject")]),
    pytest.param(dict[str, int], {"answer": {"a": 1}}, {"a": 1}, id="dict"),
    pytest.param(set[int], {"answer": [1, 2]}, {1, 2}, id="set"),
    pytest.param(Literal["yes", "no"], {"answer": "yes"}, "yes", id="literal"),
    pytest.param(int | str, {"answer": "x"}, "x", id="union of scalars"),
    pytest.param(Colour, {"answer": "red"}, Colour.RED, id="enum"),
    pytest.param(date, {"answer": "2024-02-29"}, date(2024, 2, 29), id="date"),
    pytest.param(Annotated[int, msgspec.Meta(ge=3)], {"answer": 3}, 3, id="annotated"),
    pytest.param(Any, {"answer": {"any": ["thing"]}}, {"any": ["thing"]}, id="any"),
]


@pytest.mark.parametrize(("kind", "arguments", "value"), ANSWERS)
async def test_the_arguments_are_the_answer(
    kind: Any, arguments: dict[str, Any], value: object
) -> None:
    finish = finish_tool(kind)
    result, _ = await completed([call("finish", **arguments), "unheard"], finish)
    assert result.output == value
    assert type(result.output) is type(value)
    assert result.outcome is LoopOutcome.DONE
    assert texts(result) == ["The answer was accepted."]
    jsonschema.validate(arguments, finish.schema.parameters)


async def test_the_answer_may_be_mended_like_other_arguments() -> None:
    result, _ = await completed(
        [call("finish", decision="approve", score="9")], finish_tool(Verdict)
    )
    assert result.output == Verdict("approve", 9)


@pytest.mark.parametrize(
    ("kind", "wrong", "told", "right", "value"),
    [
        (Verdict, {"decision": "maybe"}, '"maybe"', {"decision": "reject"}, Verdict("reject")),
        (Verdict, {"decision": "reject", "score": 11}, "10", {"decision": "reject"}, None),
        (Point, {"y": 1}, "x", {"x": 1}, Point(1)),
        (Movie, {"title": "M"}, "year", {"title": "M", "year": 1931}, None),
        (Person, {"name": "ada", "age": 36}, "capital", {"name": "Ada", "age": 36}, None),
        (Person, {"name": "Ada", "age": 0}, "at least 1", {"name": "Ada", "age": 1}, None),
        (int, {"answer": "many"}, "integer", {"answer": 3}, 3),
        (int, {}, "answer", {"answer": 3}, 3),
        (list[str], {"answer": [1.5]}, "string", {"answer": []}, []),
        (Literal["yes", "no"], {"answer": "well"}, '"well"', {"answer": "no"}, "no"),
        (Found | Missing, {"type": "lost"}, '"lost"', {"type": "found", "where": "x"}, None),
    ],
)
async def test_what_does_not_fit_goes_back_to_the_model(
    kind: Any, wrong: dict[str, Any], told: str, right: dict[str, Any], value: object
) -> None:
    model = ScriptedStream([call("finish", **wrong), call("finish", **right)])
    result, _ = await completed(model, finish_tool(kind))
    refused, accepted = results(result)
    assert refused.is_error
    assert told in refused.plain_text
    assert "finish" in refused.plain_text
    assert accepted.plain_text == "The answer was accepted."
    assert value is None or result.output == value
    assert result.output is not None
    assert len(model.requests) == 2


async def test_a_model_that_never_gets_it_right_comes_to_the_cap() -> None:
    model = ScriptedStream([call("finish", answer="many")], at_end="repeat")
    result, _ = await completed(model, finish_tool(int), max_iterations=4)
    assert (result.outcome, result.output) == (LoopOutcome.HIT_MAX_ITERATIONS, None)


async def test_prose_is_no_answer() -> None:
    result, _ = await completed(["I would say 42."], finish_tool(int))
    assert (result.output, result.outcome) == (None, LoopOutcome.DONE)
    assert result.text == "I would say 42."


async def test_a_provider_can_be_told_to_insist() -> None:
    model = ScriptedStream([call("finish", answer=1)])
    await completed(model, finish_tool(int), force_tool_call=True)
    assert model.requests[0].force_tool_call


async def test_prose_taken_for_the_result_of_the_tool_is_not_of_its_type() -> None:
    result, _ = await completed(
        ["I would say 42."],
        finish_tool(int),
        plain_text_terminal_fallback_tool="finish",
        plain_text_terminal_fallback_eager=True,
    )
    assert result.output is None
    assert texts(result) == ["I would say 42."]


async def test_words_before_the_call_are_kept() -> None:
    result, _ = await completed([say("Here it is.", call("finish", answer=7))], finish_tool(int))
    assert (result.output, result.text) == (7, "Here it is.")


# --- more than one call -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize("other", ["finish", "work", "nope"])
async def test_an_answer_in_company_is_refused_and_the_model_told_why(
    other: str, mode: str
) -> None:
    """Otherwise it would be lost: the other call wants the run to go on."""
    work = Work()
    result, _ = await completed(
        [[call("finish", answer=1), call(other, answer=2)], call("finish", answer=3)],
        finish_tool(int),
        work,
        default_execution_mode=mode,
    )
    assert result.output == 3
    refused = results(result)[0]
    assert refused.is_error
    assert refused.details == {"kind": "tool_call_not_executed", "reason": "not_alone"}
    assert "alone" in refused.plain_text
    assert len(work.calls) == (other == "work")


async def test_a_call_that_has_no_vote_is_no_company() -> None:
    note = Work("note", counts_toward_termination_vote=False)
    result, _ = await completed([[call("note"), call("finish", answer=1)]], finish_tool(int), note)
    assert result.output == 1
    assert len(note.calls) == 1


@pytest.mark.parametrize("answers", [(1, "two"), ("one", 2)])
async def test_of_two_answers_both_must_fit(answers: tuple[Any, Any]) -> None:
    result, _ = await completed(
        [[call("finish", answer=answer) for answer in answers], call("finish", answer=3)],
        finish_tool(int),
    )
    assert result.output == 3


async def test_an_answer_beside_other_work_does_not_end_the_run() -> None:
    work = Work()
    result, _ = await completed(
        [[call("finish", answer=1), call("work")], "I was not done."], finish_tool(int), work
    )
    assert len(work.calls) == 1
    assert result.output is None
    assert outline(result.messages)[-1] == "assistant: I was not done."


async def test_an_answer_that_did_not_end_the_run_is_forgotten() -> None:
    result, _ = await completed(
        [[call("finish", answer=1), call("work")], call("finish", answer=2)],
        finish_tool(int),
        Work(),
    )
    assert result.output == 2


async def test_an_answer_beside_a_note_ends_the_run() -> None:
    note = Work("note", counts_toward_termination_vote=False)
    for calls in (
        [call("note"), call("finish", answer=1)],
        [call("finish", answer=1), call("note")],
    ):
        result, _ = await completed([calls, "unheard"], finish_tool(int), note)
        assert (result.output, result.outcome) == (1, LoopOutcome.DONE)


async def test_two_kinds_of_answers_may_be_offered() -> None:
    tools: list[AgentTool] = [finish_tool(int, name="number"), finish_tool(str, name="word")]
    first, _ = await completed([call("number", answer=1)], *tools)
    second, _ = await completed([call("word", answer="one")], *tools)
    assert (first.output, second.output) == (1, "one")


async def test_an_answer_over_the_cap_of_calls_does_not_count() -> None:
    result, _ = await completed(
        [[call("finish", answer=1), call("finish", answer=2)], call("finish", answer=3)],
        finish_tool(int),
        max_tool_calls_per_turn=1,
    )
    assert result.output == 3


async def test_an_answer_that_was_cut_off_does_not_count() -> None:
    cut = msgspec.structs.replace(
        say("", call("finish", answer=1)), stop_reason=StopReason.MAX_TOKENS
    )
    result, _ = await completed([cut, call("finish", answer=2)], finish_tool(int))
    assert result.output == 2


async def test_runs_at_once_do_not_mix_their_answers() -> None:
    config = LoopConfig(stream=ScriptedStream([]), tools=[finish_tool(int)])

    async def one(number: int) -> Any:
        script: list[Step] = [call("finish", answer="x"), call("finish", answer=number)]
        return await run("go", CONTEXT, config.replace(stream=ScriptedStream(script)))

    answers = await asyncio.gather(*[one(number) for number in range(20)])
    assert [result.output for result in answers] == list(range(20))


# --- hooks --------------------------------------------------------------------------------------


def before(decision: Any) -> FunctionPlugin:
    def decide(ctx: BeforeToolCallContext) -> Any:
        return decision(ctx) if callable(decision) else decision

    return FunctionPlugin("before_tool_call", decide, name="before")


def after(decision: AfterToolDecision | None) -> FunctionPlugin:
    """Decides once."""
    decisions = iter([decision])

    def decide(ctx: AfterToolCallContext) -> AfterToolDecision | None:
        return next(decisions, None)

    return FunctionPlugin("after_tool_call", decide, name="after")


async def test_an_answer_that_a_hook_rewrites_is_the_rewritten_one() -> None:
    def double(ctx: BeforeToolCallContext) -> Rewrite:
        return Rewrite({"answer": ctx.args["answer"] * 2})

    result, _ = await completed(
        [call("finish", answer=21)], finish_tool(int), plugins=[before(double)]
    )
    assert result.output == 42


async def test_a_rewritten_answer_has_to_fit_too() -> None:
    spoil = iter([Rewrite({"answer": "spoilt"})])
    result, _ = await completed(
        [call("finish", answer=1), call("finish", answer=2)],
        finish_tool(int),
        plugins=[before(lambda ctx: next(spoil, None))],
    )
    assert "spoilt" in texts(result)[0]
    assert result.output == 2


@pytest.mark.parametrize("decision", [Block("Not yet."), Answer(ToolResult.text("Not yet."))])
async def test_a_hook_may_hold_an_answer_back(decision: Any) -> None:
    decisions = iter([decision])
    result, _ = await completed(
        [call("finish", answer=1), call("finish", answer=2)],
        finish_tool(int),
        plugins=[before(lambda ctx: next(decisions, None))],
    )
    assert texts(result)[0] == "Not yet."
    assert result.output == 2


async def test_a_hook_may_keep_the_run_going() -> None:
    result, _ = await completed(
        [call("finish", answer=1), "I checked: it is fine."],
        finish_tool(int),
        plugins=[after(AfterToolDecision(terminate=False))],
    )
    assert result.output is None
    assert result.text == "I checked: it is fine."


async def test_a_run_that_a_hook_kept_going_ends_with_the_next_answer() -> None:
    result, _ = await completed(
        [call("finish", answer=1), call("finish", answer=2)],
        finish_tool(int),
        plugins=[after(AfterToolDecision(ToolResult.error("Check again.")))],
    )
    assert texts(result) == ["Check again.", "The answer was accepted."]
    assert result.output == 2


@pytest.mark.parametrize(
    "plugins",
    [
        [after(AfterToolDecision(terminate=True))],
        [before(Block("No.")), after(AfterToolDecision(terminate=True))],
    ],
    ids=["that does not fit", "that is held back"],
)
async def test_a_hook_may_end_the_run_at_an_answer_that_is_none(
    plugins: list[FunctionPlugin],
) -> None:
    answer: Any = "many" if len(plugins) == 1 else 1
    result, _ = await completed(
        [call("finish", answer=answer), "unheard"], finish_tool(int), plugins=plugins
    )
    assert result.outcome is LoopOutcome.DONE
    assert results(result)[0].is_error
    assert result.output is None


# --- the tool itself ----------------------------------------------------------------------------


def test_the_fields_of_a_struct_are_the_parameters() -> None:
    finish = finish_tool(Verdict)
    assert finish.schema.parameters == {
        "type": "object",
        "properties": {
            "decision": {"type": "string", "enum": ["approve", "reject"]},
            "score": {"type": "integer", "minimum": 0, "maximum": 10, "default": 5},
        },
        "required": ["decision"],
    }


def test_any_other_type_is_one_parameter() -> None:
    schema = finish_tool(list[str]).schema.parameters
    assert schema == {
        "type": "object",
        "properties": {"answer": {"type": "array", "items": {"type": "string"}}},
        "required": ["answer"],
    }


@pytest.mark.parametrize("kind", [Verdict, Point, Movie, Person, Box, int, list[str]])
def test_a_strict_schema_leaves_nothing_open(kind: Any) -> None:
    schema = finish_tool(kind, strict=True).schema.parameters
    assert schema["additionalProperties"] is False
    assert schema["required"] == list(schema["properties"])


async def test_a_strict_tool_does_not_overlook_what_it_does_not_know() -> None:
    script: list[Step] = [call("finish", answer=1, reason="because"), call("finish", answer=2)]
    result, _ = await completed(script, finish_tool(int, strict=True))
    assert "reason" in texts(result)[0]
    assert result.output == 2
    result, _ = await completed(script, finish_tool(int))
    assert result.output == 1


async def test_a_default_that_is_left_out_of_a_strict_answer_is_null() -> None:
    result, _ = await completed(
        [call("finish", decision="reject", score=None)], finish_tool(Verdict, strict=True)
    )
    assert result.output == Verdict("reject", 5)


@pytest.mark.parametrize("kind", [dict[str, int], Any])
def test_what_a_strict_schema_cannot_say_is_refused(kind: Any) -> None:
    with pytest.raises(ToolDefinitionError, match="strict"):
        finish_tool(kind, strict=True)


async def test_it_has_a_name_and_a_description() -> None:
    finish = finish_tool(int)
    assert isinstance(finish, FinishTool)
    assert (finish.name, finish.schema.name) == ("finish", "finish")
    assert "final answer" in finish.description
    deliver = finish_tool(int, name="deliver", description="Hand it over.")
    assert (deliver.schema.name, deliver.schema.description) == ("deliver", "Hand it over.")
    result, _ = await completed([call("deliver", answer=1)], deliver)
    assert result.output == 1


@pytest.mark.parametrize("name", ["", "has space", "x" * 65])
def test_a_name_that_no_provider_takes_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        finish_tool(int, name=name)


@pytest.mark.parametrize("kind", [complex, object, 3, lambda: 1])
def test_a_type_that_arguments_cannot_have_is_refused(kind: Any) -> None:
    with pytest.raises(ToolDefinitionError, match="finish_tool"):
        finish_tool(kind)


async def test_it_can_be_tried_without_a_run() -> None:
    finish = finish_tool(Verdict)
    args = finish.validate({"decision": "approve", "score": 1})
    assert finish.output(args) == Verdict("approve", 1)
    result = await finish.execute(args, ToolContext(tool_call_id="c", tool_name="finish"))
    assert result.terminate


async def test_any_tool_may_take_the_answer_of_a_run() -> None:
    class Deliver(AgentTool):
        name = "deliver"
        is_final_answer = True

        async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
            return ToolResult.terminal("Thank you.")

        def output(self, args: Any) -> Any:
            return sorted(args["names"])

    result, _ = await completed([call("deliver", names=["b", "a"])], Deliver())
    assert result.output == ["a", "b"]
