"""Spans over OTLP to a receiver on this machine, which answers or hangs."""

from __future__ import annotations

import asyncio

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from clark_agent import Agent
from clark_agent.otel import Tracing
from clark_agent.testing import ScriptedStream
from tests.otel.receiver import Receiver


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
