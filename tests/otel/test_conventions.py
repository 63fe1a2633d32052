"""Spans and metrics are those that the conventions define."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import StatusCode

from clark_agent import (
    Agent,
    AssistantMessage,
    Budget,
    CancellationToken,
    ConfigError,
    Price,
    StopReason,
    TextContent,
    ToolExecutionError,
    tool,
)
from clark_agent.otel import conventions
from clark_agent.stream import ResponseInfo, Start, StreamEvent, StreamRequest
from clark_agent.testing import ScriptedStream, call
from clark_agent.transports import connect
from clark_agent.transports.connect import _CHAT_SERVERS, _OWN_APIS
from clark_agent.types import Usage
from tests.otel.conftest import Telemetry
from tests.otel.content_schema import check_content
from tests.otel.schema import BOOLEANS, BOUNDARIES, INTEGERS, LISTS, METRICS, NUMBERS, SPANS

USAGE = Usage(100, 20, 5, 50)


class Model(ScriptedStream):
    """A script that says who it is, and where, and which model answers."""

    model = "gpt-5"
    provider = "azure"
    base_url = "https://models.example.com/v1?key=secret"

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        async for event in super().__call__(request, signal):
            if isinstance(event, Start):
                response = ResponseInfo(f"answer-{len(self.requests)}", "gpt-5-2025-08-07")
                yield replace(event, response=response)
            else:
                yield event


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
                check_content(name, value)
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
    assert [chat["gen_ai.response.id"] for chat in chats] == ["answer-1", "answer-2", "answer-3"]
    assert {chat["gen_ai.response.model"] for chat in chats} == {"gpt-5-2025-08-07"}
    assert {chat["server.address"] for chat in chats} == {"models.example.com"}
    assert {chat["server.port"] for chat in chats} == {443}
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
    for name, boundaries in BOUNDARIES.items():
        for point in found[name]:
            assert point.explicit_bounds == boundaries
            assert point.attributes["gen_ai.response.model"] == "gpt-5-2025-08-07"
            assert point.attributes["server.address"] == "models.example.com"
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


def table() -> list[str]:
    """The names of attributes, events and metrics."""
    return [
        value
        for name, value in vars(conventions).items()
        if name.isupper() and isinstance(value, str) and "." in value
    ]


def test_every_name_of_the_conventions_is_in_the_table_once() -> None:
    assert len(table()) == len(set(table()))


# The package opentelemetry-semantic-conventions has the registry as it was when the conventions
# for generative AI got a repository of their own. These were added there since.
NEWER = {
    "gen_ai.invoke_agent.duration",
    "gen_ai.execute_tool.duration",
    "moonshot_ai",  # a provider
}


def published(module: Any) -> set[str]:
    """The names that a module of the package defines."""
    return {value for name, value in vars(module).items() if name.isupper() and type(value) is str}


def test_every_name_is_published() -> None:
    known = NEWER.union(
        *[
            published(module)
            for module in (gen_ai_attributes, gen_ai_metrics, error_attributes, server_attributes)
        ]
    )
    used = {name for name in table() if not name.startswith("clark_agent.")}
    assert used <= known
    assert len(used) > 30


def values(kind: str) -> set[str]:
    """The values of an attribute. The package marks all of these classes as deprecated."""
    return {each.value for each in getattr(gen_ai_attributes, kind)}


def test_every_value_is_published() -> None:
    operations = values("GenAiOperationNameValues")
    assert {conventions.CHAT, conventions.INVOKE_AGENT, conventions.EXECUTE_TOOL} <= operations
    providers = values("GenAiProviderNameValues")
    assert set(conventions.PROVIDERS.values()) <= providers | NEWER
    assert "json" in values("GenAiOutputTypeValues")


# Providers that the conventions do not name are recorded by our name for them.
UNNAMED = {"openrouter", "z.ai", "cerebras", "together", "fireworks", "compatible server"}


@pytest.mark.parametrize("scheme", sorted({*_CHAT_SERVERS, *_OWN_APIS}))
async def test_providers_have_the_names_of_the_conventions(
    telemetry: Telemetry, scheme: str
) -> None:
    class Named(ScriptedStream):
        provider = connect(f"{scheme}:some-model", api_key="key").provider  # type: ignore[union-attr]

    await Agent(Named(["Hello."]), plugins=[telemetry.tracing()]).run("Hi.")
    found = (telemetry.span("chat").attributes or {})["gen_ai.provider.name"]
    assert found in values("GenAiProviderNameValues") | NEWER | UNNAMED


def test_redact_without_content_is_refused(telemetry: Telemetry) -> None:
    with pytest.raises(ConfigError, match="redact does nothing without content=True"):
        telemetry.tracing(redact=str.upper)
    with pytest.raises(ConfigError, match="redact must be a function"):
        telemetry.tracing(content=True, redact="secret")
