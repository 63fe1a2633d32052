"""The cause that a transport gives is the cause of the error that the run ends with."""

from __future__ import annotations

from typing import Any

import pytest

from clark_agent import (
    AssistantMessage,
    RunAborted,
    StopReason,
    StreamError,
    StreamErrorKind,
    TextContent,
    TransportError,
)
from clark_agent.errors import StreamTimeout
from clark_agent.stream import Chunk, Error, Start, TextChunk
from clark_agent.testing import FakeClock, ScriptedStream, Step
from clark_agent.transports import OpenAIChat, RetryPolicy, Timeouts
from tests.engine.support import PLACEHOLDER, completed, failed, hurry
from tests.transports.servers.bytes_server import Answer, ByteServer, Request

LATE = StreamTimeout("idle", 30)


def failing_with(kind: StreamErrorKind, cause: Exception | None) -> list[Any]:
    partial = AssistantMessage((TextContent("We"),), StopReason.ERROR)
    return [Start(PLACEHOLDER), Chunk(TextChunk("We")), Error(partial, kind, "no answer", cause)]


@pytest.mark.parametrize("cause", [LATE, TransportError("odd"), OSError("no route"), None])
@pytest.mark.parametrize(
    "kind",
    [
        StreamErrorKind.TRANSIENT,
        StreamErrorKind.PROVIDER_RATE_LIMITED,
        StreamErrorKind.FATAL,
        StreamErrorKind.CONTEXT_OVERFLOW,
    ],
)
async def test_a_failure_that_ends_the_run_at_once(
    kind: StreamErrorKind, cause: Exception | None
) -> None:
    error, _ = await failed(StreamError, [failing_with(kind, cause)])
    assert error.kind is kind
    assert error.__cause__ is cause
    assert error.__suppress_context__
    assert error.partial is not None
    assert error.partial.plain_text == "We"


@pytest.mark.parametrize(
    ("kind", "attempts"),
    [(StreamErrorKind.EMPTY, 3), (StreamErrorKind.ZERO_OUTPUT_TRANSPORT, 2)],
)
async def test_a_failure_that_the_loop_asks_again_after_has_the_last_cause(
    kind: StreamErrorKind, attempts: int
) -> None:
    causes = [StreamTimeout("idle", number) for number in range(1, attempts + 1)]
    script: list[Step] = [failing_with(kind, cause) for cause in causes]
    error, _ = await failed(StreamError, script)
    assert error.kind is kind
    assert error.__cause__ is causes[-1]


async def test_a_failure_that_is_made_good_leaves_no_trace() -> None:
    result, _ = await completed([failing_with(StreamErrorKind.EMPTY, LATE), "There you are."])
    assert result.text == "There you are."


async def test_a_call_that_was_cancelled_has_its_cause_too() -> None:
    error, _ = await failed(RunAborted, [failing_with(StreamErrorKind.ABORTED, LATE)])
    assert error.__cause__ is LATE


async def test_a_transport_that_raises_is_the_cause_itself() -> None:
    problem = RuntimeError("a bug of the transport")
    error, _ = await failed(StreamError, ScriptedStream([problem]))
    assert error.kind is StreamErrorKind.FATAL
    assert error.__cause__ is problem


def silent(request: Request) -> Answer:
    """Says nothing while time passes."""
    hurry(100)
    return Answer(hold=True)


@pytest.mark.slow
async def test_a_silent_server_is_asked_again_and_is_the_cause_in_the_end() -> None:
    clock = FakeClock()
    async with ByteServer(silent) as server:
        transport = OpenAIChat(
            "m",
            base_url=server.url,
            retry=RetryPolicy(attempts=3),
            timeouts=Timeouts(idle=60),
            clock=clock,
        )
        error, _ = await failed(StreamError, transport, leaves_tasks=True)  # those of the server
        await server.client_gone(times=3)
        await transport.aclose()
    assert len(server.requests) == 3
    assert len(clock.sleeps) == 2
    assert error.kind is StreamErrorKind.TRANSIENT
    assert isinstance(error.__cause__, StreamTimeout)
    assert isinstance(error.__cause__, TimeoutError)
    assert (error.__cause__.phase, error.__cause__.seconds) == ("idle", 60)
    assert "within 60 seconds (3 attempts)" in error.message
    assert error.messages[-1].plain_text == "go"


@pytest.mark.slow
async def test_a_server_that_comes_back_is_no_cause_of_anything() -> None:
    body = b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\n'

    def late(request: Request) -> Answer:
        return silent(request) if len(server.requests) == 1 else Answer(body=body)

    async with ByteServer(late) as server:
        transport = OpenAIChat(
            "m", base_url=server.url, timeouts=Timeouts(idle=60), clock=FakeClock()
        )
        result, _ = await completed(transport, leaves_tasks=True)  # those of the server
        await transport.aclose()
    assert result.text == "Hi"
    assert len(server.requests) == 2
