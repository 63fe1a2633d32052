"""Spans over OTLP to a receiver on this machine, which answers or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from clark_agent import (
    Agent,
    BeforeRequestContext,
    CancellationToken,
    RunIdentity,
    UserMessage,
    tool,
)
from clark_agent.otel import Tracing
from clark_agent.stream import ResponseInfo, Start, StreamEvent, StreamRequest
from clark_agent.testing import ScriptedStream, call
from tests.otel.conftest import Telemetry
from tests.otel.receiver import Receiver

pytestmark = pytest.mark.slow


async def test_a_receiver_that_hangs_does_not_touch_the_run() -> None:
    with Receiver(hangs=True) as receiver:
        provider = TracerProvider()
        exporter = OTLPSpanExporter(receiver.endpoint)
        processor = BatchSpanProcessor(exporter, schedule_delay_millis=1, max_export_batch_size=1)
        provider.add_span_processor(processor)
        agent = Agent(ScriptedStream(["Done."] * 3), plugins=[Tracing(tracer_provider=provider)])
        await agent.run("Go.")
        assert await asyncio.to_thread(receiver.asked.wait, 10)
        for _ in range(2):  # while the exporter waits for the receiver
            assert (await agent.run("Go.")).text == "Done."
        assert receiver.spans == []
        receiver.answer()
        await asyncio.to_thread(provider.shutdown)


async def test_otlp_reaches_a_receiver() -> None:
    with Receiver() as receiver:
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(receiver.endpoint)))
        agent = Agent(
            ScriptedStream(["Done."]), plugins=[Tracing(tracer_provider=provider)], name="a"
        )
        await agent.run("Go.")
        await asyncio.to_thread(provider.shutdown)
    assert {span.name for span in receiver.spans} == {"invoke_agent a", "turn", "chat"}


HALF = "caf\udce9"


class Halved(ScriptedStream):
    """A transport whose names have half a character, such as from the name of a file."""

    model = provider = HALF

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        async for event in super().__call__(request, signal):
            if isinstance(event, Start):
                yield replace(event, response=ResponseInfo(HALF, HALF))
            else:
                yield event


class Asks:
    """A plugin that asks a model."""

    name = HALF

    async def before_request(self, ctx: BeforeRequestContext) -> list[UserMessage]:
        await ctx.ask_model("How many?")
        return []


async def test_every_name_can_be_encoded(telemetry: Telemetry) -> None:
    @tool(description=HALF)
    def look() -> str:
        """Look."""
        return "seen"

    agent = Agent(
        Halved(["Three.", call("look"), "Three.", "Done."]),
        tools=[look],
        plugins=[Asks(), telemetry.tracing(agent_name=HALF)],
        conversation_id=HALF,
    )
    await agent.run("Go.", identity=RunIdentity.root("r" + HALF))
    spans = telemetry.spans
    assert len(spans) == 8
    assert "caf\ufffd" in spans[0].name
    assert encode_spans(spans).SerializeToString()
    for span in spans:
        for value in (span.name, *(span.attributes or {}).values()):
            str(value).encode()
    for points in telemetry.metrics().values():
        for point in points:
            "".join(map(str, point.attributes.values())).encode()
