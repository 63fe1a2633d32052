"""Spans and metrics are those that the conventions define."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from clark_agent import (
    Agent,
    AssistantMessage,
    Budget,
    ConfigError,
    Price,
    StopReason,
    TextContent,
    ToolExecutionError,
    tool,
)
from clark_agent.otel import conventions
from clark_agent.testing import ScriptedStream, call
from clark_agent.types import Usage
from tests.otel.conftest import Telemetry
from tests.otel.schema import BOOLEANS, INTEGERS, LISTS, METRICS, NUMBERS, SPANS

USAGE = Usage(100, 20, 5, 50)


class Model(ScriptedStream):
    """A script that says who it is."""

    model = "gpt-5"
    provider = "azure"


def answer(text: str) -> AssistantMessage:
    return AssistantMessage((TextContent(text),), StopReason.END_TURN, usage=USAGE)


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a < 0:
        raise ToolExecutionError("negative")
    return a + b


def agent(telemetry: Telemetry, *script: Any, **settings: Any) -> Agent[str, None]:
    tracing = telemetry.tracing(**settings)
    return Agent(
        Model(script),
        tools=[add],
        name="adder",
        system_prompt="Add.",
        plugins=[tracing],
        temperature=0.5,
        max_output_tokens=512,
        conversation_id="talk",
        budget=Budget(prices={"gpt-5": Price(input=2.0, output=10.0)}),
    )


SCRIPT = (call("add", a=1, b=2), call("add", a=-1, b=2), answer("It is three."))


@pytest.mark.parametrize("content", [False, True])
async def test_every_span_has_what_the_conventions_require_and_nothing_else(
    telemetry: Telemetry, content: bool
) -> None:
    await agent(telemetry, *SCRIPT, content=content).run("1 + 2?")
    seen = set()
    for span in telemetry.spans:
        attributes: Mapping[str, Any] = span.attributes or {}
        ours = {name for name in attributes if name.startswith("clark_agent.")}
        if span.name == "turn":
            assert ours == set(attributes)
            continue
        operation = attributes["gen_ai.operation.name"]
        rules = SPANS[operation]
        seen.add(operation)
        assert span.kind.name == rules.kind
        assert span.name == f"{operation} {attributes[rules.named_by]}"
        given = set(attributes) - ours
        assert rules.required <= given
        assert given <= rules.required | rules.others | (rules.opt_in if content else set())
        for name in given:
            value = attributes[name]
            wanted = (
                int
                if name in INTEGERS
                else tuple
                if name in LISTS
                else bool
                if name in BOOLEANS
                else float
                if name in NUMBERS
                else str
            )
            assert type(value) is wanted, name
            if name in rules.opt_in:
                assert isinstance(json.loads(str(value)), (list, dict))
    assert seen == set(SPANS)


async def test_a_run_is_a_tree_of_spans_in_one_trace(telemetry: Telemetry) -> None:
    await agent(telemetry, *SCRIPT).run("1 + 2?")
    assert telemetry.tree() == [
        "invoke_agent adder",
        ".turn",
        "..chat gpt-5",
        "..execute_tool add",
        ".turn",
        "..chat gpt-5",
        "..execute_tool add",
        ".turn",
        "..chat gpt-5",
    ]
    assert len({span.context.trace_id for span in telemetry.spans if span.context}) == 1


async def test_the_attributes_of_a_run(telemetry: Telemetry) -> None:
    result = await agent(telemetry, *SCRIPT).run("1 + 2?")
    run: Mapping[str, Any] = telemetry.span("invoke_agent adder").attributes or {}
    assert run["gen_ai.provider.name"] == "azure.ai.openai"
    assert run["gen_ai.conversation.id"] == "talk"
    assert run["clark_agent.run.outcome"] == "done"
    assert run["clark_agent.run.turns"] == 3
    assert run["clark_agent.run.retries"] == run["clark_agent.run.discarded_answers"] == 0
    assert run["gen_ai.usage.input_tokens"] == 155  # with what is cached
    assert run["gen_ai.usage.output_tokens"] == 20
    assert run["gen_ai.usage.cache_read.input_tokens"] == 50
    assert run["clark_agent.cost"] == run["clark_agent.run.tree_cost"] == result.cost


async def test_the_attributes_of_model_and_tool_calls(telemetry: Telemetry) -> None:
    await agent(telemetry, *SCRIPT).run("1 + 2?")
    chats: list[dict[str, Any]] = [
        dict(s.attributes or {}) for s in telemetry.spans if s.name == "chat gpt-5"
    ]
    assert [chat["gen_ai.response.finish_reasons"] for chat in chats] == [
        ("tool_call",),
        ("tool_call",),
        ("stop",),
    ]
    assert [chat["clark_agent.turn.number"] for chat in chats] == [1, 2, 3]
    assert chats[2]["clark_agent.cost"] == pytest.approx((155 * 2 + 20 * 10) / 1e6)
    assert chats[2]["gen_ai.response.time_to_first_chunk"] > 0
    assert chats[2]["clark_agent.response.time_per_output_token"] > 0
    good, bad = [s for s in telemetry.spans if s.name == "execute_tool add"]
    assert good.status.is_unset
    assert bad.status.status_code is StatusCode.ERROR
    assert (bad.attributes or {})["error.type"] == "ToolExecutionError"
    assert bad.status.description is None  # it may have content


async def test_the_metrics_are_those_of_the_conventions(telemetry: Telemetry) -> None:
    await agent(telemetry, *SCRIPT).run("1 + 2?")
    found = telemetry.metrics()
    for name, (_, required) in METRICS.items():
        for point in found[name]:
            assert required <= set(point.attributes), name
    tokens = {p.attributes["gen_ai.token.type"]: p.sum for p in found[conventions.TOKEN_USAGE]}
    assert tokens == {"input": 155, "output": 20}
    assert sum(p.count for p in found[conventions.OPERATION_DURATION]) == 3
    assert sum(p.count for p in found[conventions.EXECUTE_TOOL_DURATION]) == 2
    assert sum(p.count for p in found[conventions.INVOKE_AGENT_DURATION]) == 1
    assert found[conventions.COST_TOTAL][0].value == pytest.approx((155 * 2 + 20 * 10) / 1e6)
    failed = [p for p in found[conventions.EXECUTE_TOOL_DURATION] if "error.type" in p.attributes]
    assert [p.attributes["error.type"] for p in failed] == ["ToolExecutionError"]


async def test_without_metrics_there_are_only_spans(telemetry: Telemetry) -> None:
    await agent(telemetry, *SCRIPT, metrics=False).run("1 + 2?")
    assert telemetry.spans
    assert telemetry.metrics() == {}


def test_every_name_of_the_conventions_is_in_the_table_once() -> None:
    names = [
        value
        for name, value in vars(conventions).items()
        if name.isupper() and isinstance(value, str) and "." in value
    ]
    assert len(names) == len(set(names))


def test_redact_without_content_is_refused(telemetry: Telemetry) -> None:
    with pytest.raises(ConfigError, match="redact does nothing without content=True"):
        telemetry.tracing(redact=str.upper)
    with pytest.raises(ConfigError, match="redact must be a function"):
        telemetry.tracing(content=True, redact="secret")
