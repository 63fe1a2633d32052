"""finish ends the run with an answer in words."""

from __future__ import annotations

from clark_agent import LoopOutcome
from clark_agent.testing import ScriptedStream, call, say
from clark_agent.toolkit.finish import finish
from tests.engine.support import Work, completed, results


async def test_it_ends_the_run_and_its_answer_is_the_output() -> None:
    model = ScriptedStream([call("work"), say("That is all.", call("finish", answer="It is 42."))])
    result, _ = await completed(model, Work(), finish)
    assert result.outcome is LoopOutcome.DONE
    assert len(model.requests) == 2
    assert result.output == finish.answer_of(result) == "It is 42."
    assert result.text == "That is all."


async def test_beside_other_calls_it_is_refused_and_the_run_goes_on() -> None:
    work = Work()
    both = [call("work"), call("finish", answer="too early")]
    result, _ = await completed([both, call("finish", answer="now")], work, finish)
    assert [answer.is_error for answer in results(result)] == [False, True, False]
    assert len(work.calls) == 1
    assert result.output == "now"


async def test_an_answer_is_needed_and_is_text() -> None:
    result, _ = await completed([call("finish"), call("finish", answer="so")], finish)
    refused, accepted = results(result)
    assert refused.is_error
    assert "answer" in refused.plain_text
    assert not accepted.is_error
    assert result.output == "so"


def test_the_model_is_told() -> None:
    assert finish.name == "finish"
    assert finish.schema.parameters["properties"]["answer"]["type"] == "string"
    assert "Call it alone" in finish.description
