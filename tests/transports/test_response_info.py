"""The id and the model that a provider names arrive in `Start`, whatever the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clark_agent.stream import ResponseInfo, Start, StreamEvent
from clark_agent.transports import FirstOf, RetryPolicy, connect
from clark_agent.transports.stream_json import decode_event, encode_event
from clark_agent.types import AssistantMessage, StopReason
from tests.transports import wires_anthropic, wires_chat, wires_gemini, wires_responses
from tests.transports.servers.bytes_server import Answer, ByteServer
from tests.transports.wires_chat import ask

pytestmark = pytest.mark.slow

EMPTY = AssistantMessage((), StopReason.OTHER)
NAMED = ResponseInfo("answer-1", "good-2026-01-01")
ONCE = RetryPolicy(attempts=1)


def sse(*events: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(event) for event in events)


def chat(named: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of Chat Completions, all of which repeat the names."""
    deltas: list[dict[str, Any]] = [{"content": "Hel"}, {"content": "lo"}, {}]
    ends = [None, None, "stop"]
    return [
        {**named, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in zip(deltas, ends, strict=True)
    ]


def responses(named: dict[str, Any]) -> list[dict[str, Any]]:
    delta = {"type": "response.output_text.delta", "output_index": 0, "delta": "Hello"}
    return [
        {"type": "response.created", "response": {**named, "status": "in_progress"}},
        delta,
        {"type": "response.completed", "response": {**named, "status": "completed"}},
    ]


def anthropic(named: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "message_start", "message": named},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "Hello"},
        },
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ]


def gemini(named: dict[str, Any]) -> list[dict[str, Any]]:
    part = {"index": 0, "content": {"parts": [{"text": "Hello"}]}}
    return [
        {**named, "candidates": [part]},
        {**named, "candidates": [{"index": 0, "finishReason": "STOP"}]},
    ]


WIRES: list[Any] = [
    pytest.param(wires_chat, chat, ("id", "model"), id="chat"),
    pytest.param(wires_responses, responses, ("id", "model"), id="responses"),
    pytest.param(wires_anthropic, anthropic, ("id", "model"), id="anthropic"),
    pytest.param(wires_gemini, gemini, ("responseId", "modelVersion"), id="gemini"),
]


async def answered(wire: Any, body: bytes) -> list[StreamEvent]:
    async with ByteServer(lambda _: Answer(body=body)) as server:
        transport = wire.transport(server.url, retry=ONCE)
        events = await ask(transport)
        await transport.aclose()
    return events


@pytest.mark.parametrize(("wire", "events", "fields"), WIRES)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("answer-1", "good-2026-01-01"), NAMED),
        (("answer-1", None), ResponseInfo("answer-1")),
        (("", "good"), ResponseInfo(None, "good")),
        (("", ""), None),
        ((17, ["good"]), None),
    ],
)
async def test_it_is_in_the_start(
    wire: Any,
    events: Any,
    fields: tuple[str, str],
    values: tuple[Any, Any],
    expected: ResponseInfo | None,
) -> None:
    named = dict(zip(fields, values, strict=True))
    came = await answered(wire, sse(*events(named)))
    assert came[0] == Start(EMPTY, response=expected)
    assert came[1:] == (await answered(wire, sse(*events({}))))[1:]


async def test_names_that_come_later_than_the_first_event_are_found() -> None:
    """As at Azure, whose first event has no text and empty names."""
    filtered = {"id": "", "model": "", "choices": [], "prompt_filter_results": []}
    named = {"id": "answer-1", "model": "good-2026-01-01"}
    came = await answered(wires_chat, sse(filtered, *chat(named)))
    assert came[0] == Start(EMPTY, response=NAMED)


@pytest.mark.parametrize(
    ("wire", "document"),
    [
        (
            wires_chat,
            {"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]},
        ),
        (
            wires_responses,
            {
                "status": "completed",
                "output": [
                    {"type": "message", "content": [{"type": "output_text", "text": "Hello"}]}
                ],
            },
        ),
        (
            wires_anthropic,
            {
                "type": "message",
                "content": [{"type": "text", "text": "Hello"}],
                "stop_reason": "end_turn",
            },
        ),
    ],
    ids=["chat", "responses", "anthropic"],
)
async def test_an_answer_that_is_one_document_has_it_too(
    wire: Any, document: dict[str, Any]
) -> None:
    body = msgspec.json.encode({"id": "answer-1", "model": "good-2026-01-01", **document})
    came = await answered(wire, body)
    assert came[0] == Start(EMPTY, response=NAMED)


async def test_the_next_transport_of_several_names_its_own() -> None:
    body = sse(*chat({"id": "answer-1", "model": "good-2026-01-01"}))
    async with ByteServer(lambda _: Answer(body=body)) as server:
        broken = connect("http://127.0.0.1:9/v1#bad", retry=ONCE)
        works = wires_chat.transport(server.url)
        both = FirstOf([broken, works])
        start, *_ = await ask(both)
        await both.aclose()
    assert isinstance(start, Start)
    assert start.response == NAMED
    assert start.details["failed"]


def test_it_passes_a_gateway() -> None:
    event = Start(EMPTY, response=NAMED)
    written = encode_event(event)
    assert written == (b'{"type":"start","response":{"id":"answer-1","model":"good-2026-01-01"}}')
    assert decode_event(written) == event
    assert encode_event(Start(EMPTY)) == b'{"type":"start"}'
