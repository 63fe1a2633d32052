"""Gemini's generateContent as bytes: what a server of the tests sends, and how it is asked.

`NAME`, `transport` and `render` are what `test_misbehaviours` wants of every wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, assert_never

import msgspec

from clark_agent import StopReason
from clark_agent.clock import Clock
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
from clark_agent.transports import RetryPolicy
from clark_agent.transports.gemini import Gemini
from tests.transports.servers.bytes_server import Answer, ByteServer, Script

NAME = "gemini"
MODEL = "gemini-3-flash-preview"
KEY = "canary-key-7c1f"

_REASONS = {
    StopReason.END_TURN: "STOP",
    StopReason.TOOL_USE: "STOP",
    StopReason.MAX_TOKENS: "MAX_TOKENS",
    StopReason.OTHER: "SAFETY",
}


# --- what a server sends ----------------------------------------------------------------------


def event(value: Any) -> bytes:
    return b"data: %b\r\n\r\n" % msgspec.json.encode(value)


def chunk(*parts: dict[str, Any], finish: str | None = None, **fields: Any) -> bytes:
    """An event with parts of the content."""
    candidate: dict[str, Any] = {"index": 0}
    if parts:
        candidate["content"] = {"role": "model", "parts": parts}
    if finish:
        candidate["finishReason"] = finish
    return event({"candidates": [candidate], "modelVersion": MODEL, **fields})


def text(said: str, signature: str | None = None) -> dict[str, Any]:
    return {"text": said, **_signed(signature)}


def thought(said: str, signature: str | None = None) -> dict[str, Any]:
    return {"text": said, "thought": True, **_signed(signature)}


def call(
    name: str, call_id: str | None = None, signature: str | None = None, **args: Any
) -> dict[str, Any]:
    called = {"name": name, "args": args, **({"id": call_id} if call_id else {})}
    return {"functionCall": called, **_signed(signature)}


def _signed(signature: str | None) -> dict[str, str]:
    return {"thoughtSignature": signature} if signature else {}


def usage(prompt: int, candidates: int, **fields: int) -> dict[str, int]:
    return {"promptTokenCount": prompt, "candidatesTokenCount": candidates, **fields}


def said(words: str = "Hello") -> list[bytes]:
    """A whole answer."""
    return [chunk(text(words)), chunk(finish="STOP", usageMetadata=usage(9, 2))]


def failing(code: int, message: str, status: str = "UNAVAILABLE", *details: Any) -> dict[str, Any]:
    """The body of an error."""
    told: dict[str, Any] = {"code": code, "message": message, "status": status}
    return {"error": {**told, **({"details": details} if details else {})}}


def refusal(code: int, message: str, status: str, *details: Any, **headers: str) -> Answer:
    """A response that tells an error."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = msgspec.json.encode(failing(code, message, status, *details))
    return Answer(status=code, headers={"content-type": "application/json", **named}, body=body)


def stream(*pieces: bytes | float, **settings: Any) -> Answer:
    """An answer of events."""
    return Answer(headers={"content-type": "text/event-stream"}, body=pieces, **settings)


def render(steps: Sequence[Step]) -> list[bytes]:
    """The events, one for each step but for the end, which this wire does not have.

    Nor has it pieces of a call: a call is one part, told where its first piece would be.
    """
    whole: dict[int, Call] = {}
    for step in steps:
        if isinstance(step, Call):
            whole[step.index] = _joined(whole.get(step.index, Call(step.index)), step)
    events: list[bytes] = []
    for step in steps:
        if isinstance(step, Call):
            if (called := whole.pop(step.index, None)) is not None:
                events.append(_rendered(called))
        elif not isinstance(step, End):
            events.append(_rendered(step))
    return events


def _joined(first: Call, more: Call) -> Call:
    arguments = (first.arguments or "") + (more.arguments or "")
    return Call(first.index, first.id or more.id, first.name or more.name, arguments)


def _rendered(step: Step) -> bytes:
    match step:
        case Say():
            return chunk(text(step.text))
        case Reason():
            return chunk(thought(step.text))
        case Call():
            given = {"name": step.name, "id": step.id, "args": _object(step.arguments)}
            called = {name: value for name, value in given.items() if value is not None}
            return chunk({"functionCall": called})
        case Finish():
            return chunk(finish=_REASONS[step.reason])
        case ReportUsage():
            told = step.usage
            cached = told.cache_read_input_tokens
            counts = usage(
                told.input_tokens + cached, told.output_tokens, cachedContentTokenCount=cached
            )
            return event({"usageMetadata": counts})
        case Comment():
            return b": keep-alive\r\n\r\n"
        case Fail():
            return event(failing(503, step.message))
        case End():
            raise AssertionError("the end of the stream is the end")
        case _:
            assert_never(step)


def _object(arguments: str | None) -> Any:
    """The arguments, if they are what this wire can tell."""
    try:
        return msgspec.json.decode(arguments or "", type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


# --- how it is asked --------------------------------------------------------------------------


class OneId(FakeClock):
    """The id of a call that came without does not depend on what a transport was asked before."""

    def new_id(self) -> str:
        return "made-up"


def transport(
    url: str,
    *,
    model: str = MODEL,
    api_key: str | None = KEY,
    retry: RetryPolicy | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> Gemini:
    """A transport to a server of the tests. Its clock makes pauses take no time."""
    clock = OneId() if clock is None else clock
    if "client" not in settings:
        settings |= {"base_url": url, "api_key": api_key}
    return Gemini(model, retry=retry, clock=clock, **settings)


@asynccontextmanager
async def serving(
    script: Script, **settings: Any
) -> AsyncGenerator[tuple[ByteServer, Gemini], None]:
    """A server and a transport to it, which is closed at the end."""
    async with ByteServer(script) as server:
        gemini = transport(server.url, **settings)
        try:
            yield server, gemini
        finally:
            await gemini.aclose()
