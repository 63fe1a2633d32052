"""Chat Completions as bytes: what a server of the tests sends, and how they ask it.

`NAME`, `transport` and `render` are what `test_misbehaviours` wants of every wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, assert_never

import msgspec

from clark_agent import AgentMessage, CancellationToken, StopReason, StreamRequest, UserMessage
from clark_agent.clock import Clock
from clark_agent.stream import StreamEvent, StreamFn
from clark_agent.testing import FakeClock
from clark_agent.testing.misbehaviours import (
    Call,
    Comment,
    End,
    Fail,
    Finish,
    Reason,
    ReportUsage,
    Say,
    Step,
)
from clark_agent.transports import ChatDialect, OpenAIChat, RetryPolicy
from tests.transports.servers.bytes_server import Answer, ByteServer, Script

NAME = "chat"
DONE = b"data: [DONE]\n\n"
ONCE = RetryPolicy(attempts=1)

_REASONS = {
    StopReason.END_TURN: "stop",
    StopReason.TOOL_USE: "tool_calls",
    StopReason.MAX_TOKENS: "length",
    StopReason.OTHER: "content_filter",
}


# --- what a server sends ----------------------------------------------------------------------


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    """An event with a delta."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event({"choices": [choice]})


def piece(
    index: int | None = None,
    call_id: str | None = None,
    name: str | None = None,
    arguments: Any = None,
) -> dict[str, Any]:
    """A delta of a tool call, without what is None."""
    function = {"name": name, "arguments": arguments}
    given = {"index": index, "id": call_id, "function": _without_none(function)}
    return _without_none(given)


def usage(**fields: Any) -> bytes:
    """The event that OpenAI sends last, if it is asked to."""
    return event({"choices": [], "usage": fields})


def said(text: str = "Hello") -> list[bytes]:
    """A whole answer."""
    return [chunk(role="assistant", content=text), chunk("stop"), DONE]


def stream(*pieces: bytes | float, **settings: Any) -> Answer:
    """An answer of events."""
    return Answer(headers={"content-type": "text/event-stream"}, body=pieces, **settings)


def render(steps: Sequence[Step]) -> list[bytes]:
    """The events, one for each step."""
    return [_rendered(step) for step in steps]


def _rendered(step: Step) -> bytes:
    match step:
        case Say():
            return chunk(content=step.text)
        case Reason():
            return chunk(reasoning_content=step.text)
        case Call():
            return chunk(tool_calls=[piece(step.index, step.id, step.name, step.arguments)])
        case Finish():
            return chunk(_REASONS[step.reason])
        case ReportUsage():
            told = step.usage
            cached = {
                "cached_tokens": told.cache_read_input_tokens,
                "cache_write_tokens": told.cache_creation_input_tokens,
            }
            return usage(
                prompt_tokens=told.input_tokens + sum(cached.values()),
                completion_tokens=told.output_tokens,
                prompt_tokens_details=cached,
            )
        case Comment():
            return b": OPENROUTER PROCESSING\n\n"
        case Fail():
            return event({"error": {"message": step.message, "type": "overloaded_error"}})
        case End():
            return DONE
        case _:
            assert_never(step)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# --- how it is asked --------------------------------------------------------------------------


def transport(
    url: str,
    *,
    model: str = "m",
    retry: RetryPolicy | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> OpenAIChat:
    """A transport to a server of the tests. Its clock makes pauses take no time."""
    clock = FakeClock() if clock is None else clock
    return OpenAIChat(model, base_url=f"{url}/v1", retry=retry, clock=clock, **settings)


def sent(request: StreamRequest, *, model: str = "m", dialect: ChatDialect) -> dict[str, Any]:
    """The body of a request in a dialect."""
    chat = OpenAIChat(model, base_url="http://127.0.0.1:9", api_key="key", dialect=dialect)
    return chat.encode(request)


def asking(*messages: AgentMessage, **fields: Any) -> StreamRequest:
    """A request with these messages, or with a greeting."""
    return StreamRequest(system_prompt="", messages=messages or (UserMessage("Hi"),), **fields)


async def ask(
    stream_fn: StreamFn,
    request: StreamRequest | None = None,
    signal: CancellationToken | None = None,
) -> list[StreamEvent]:
    """All events of a call."""
    answer = stream_fn(request or asking(), signal or CancellationToken())
    return [event async for event in answer]


@asynccontextmanager
async def serving(
    script: Script, **settings: Any
) -> AsyncGenerator[tuple[ByteServer, OpenAIChat], None]:
    """A server and a transport to it, which is closed at the end."""
    async with ByteServer(script) as server:
        chat = transport(server.url, **settings)
        try:
            yield server, chat
        finally:
            await chat.aclose()


def bodies(server: ByteServer) -> list[Any]:
    """What the server was asked."""
    return [msgspec.json.decode(request.body) for request in server.requests]
