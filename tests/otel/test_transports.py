"""What the spans of a real transport name: the server, the response, and its model."""

from __future__ import annotations

from typing import Any

import pytest

from clark_agent import Agent, StreamError
from clark_agent.rate_limit import RateLimit, limited
from clark_agent.stream import StreamFn
from clark_agent.transports import RetryPolicy, connect
from tests.otel.conftest import Telemetry
from tests.transports import wires_chat
from tests.transports.servers.bytes_server import Answer, ByteServer

pytestmark = pytest.mark.slow

BODY = b"".join(
    [
        wires_chat.event(
            {
                "id": "answer-1",
                "model": "good-2026-01-01",
                "choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": "stop"}],
            }
        ),
        wires_chat.DONE,
    ]
)


@pytest.mark.parametrize("is_limited", [False, True])
async def test_an_answer(telemetry: Telemetry, is_limited: bool) -> None:
    async with ByteServer(lambda _: Answer(body=BODY)) as server:
        transport = wires_chat.transport(server.url, model="good")
        stream: StreamFn = transport
        if is_limited:
            stream = limited(transport, RateLimit(requests_per_minute=60))
        await Agent(stream, plugins=[telemetry.tracing()]).run("Hi.")
        await transport.aclose()
    attributes: Any = telemetry.span("chat good").attributes
    assert attributes["gen_ai.response.id"] == "answer-1"
    assert attributes["gen_ai.response.model"] == "good-2026-01-01"
    assert attributes["gen_ai.request.model"] == "good"
    assert attributes["server.address"] == "127.0.0.1"
    assert f"http://127.0.0.1:{attributes['server.port']}/v1" == transport.base_url


async def test_a_server_that_is_not_there_is_named_too(telemetry: Telemetry) -> None:
    transport = connect("http://127.0.0.1:9/v1#good", retry=RetryPolicy(attempts=1))
    with pytest.raises(StreamError):
        await Agent(transport, plugins=[telemetry.tracing()]).run("Hi.")
    attributes: Any = telemetry.span("chat good").attributes
    assert (attributes["server.address"], attributes["server.port"]) == ("127.0.0.1", 9)
    assert attributes["error.type"]
    assert "gen_ai.response.finish_reasons" not in attributes


@pytest.mark.parametrize("base_url", [None, 3, "", "not a url", "http://[", "http://host:port"])
async def test_an_address_that_is_none_is_left_out(telemetry: Telemetry, base_url: Any) -> None:
    async with ByteServer(lambda _: Answer(body=BODY)) as server:
        transport = wires_chat.transport(server.url, model="good")
        transport.__dict__["base_url"] = base_url
        await Agent(transport, plugins=[telemetry.tracing()]).run("Hi.")
        await transport.aclose()
    attributes: Any = telemetry.span("chat good").attributes
    assert "server.address" not in attributes
    assert "server.port" not in attributes
