"""The Messages API as bytes: what a server of the tests sends, and how they ask it.

`NAME`, `transport` and `render` are what `test_misbehaviours` wants of every wire. The wire has no
way to say a call's id or name again; what comes closest is to begin the same block once more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, assert_never

import msgspec

from clark_agent import StopReason, Usage
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
from clark_agent.transports.anthropic import Anthropic
from tests.transports.servers.bytes_server import Answer, ByteServer, Script

NAME = "anthropic"

_REASONS = {
    StopReason.END_TURN: "end_turn",
    StopReason.TOOL_USE: "tool_use",
    StopReason.MAX_TOKENS: "max_tokens",
    StopReason.OTHER: "compaction",
}


# --- what a server sends ----------------------------------------------------------------------


def event(kind: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def begun(**usage: int | None) -> bytes:
    """The event that opens every message."""
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": []}
    return event("message_start", message={**message, "stop_reason": None, "usage": usage})


def start(index: int, kind: str, **fields: Any) -> bytes:
    return event("content_block_start", index=index, content_block={"type": kind, **fields})


def delta(index: int, kind: str, **fields: Any) -> bytes:
    return event("content_block_delta", index=index, delta={"type": kind, **fields})


def stop(index: int) -> bytes:
    return event("content_block_stop", index=index)


def finished(reason: str | None, details: Any = None, **usage: int | None) -> bytes:
    """The event with the stop reason and the final counts."""
    told = {"stop_reason": reason, "stop_sequence": None, "stop_details": details}
    return event("message_delta", delta=told, usage=usage)


def failed(message: str, kind: str = "overloaded_error") -> bytes:
    return event("error", error={"type": kind, "message": message})


PING = event("ping")
END = event("message_stop")


def text(index: int, said: str) -> bytes:
    """A whole block of text."""
    opened = start(index, "text", text="")
    return opened + delta(index, "text_delta", text=said) + stop(index)


def thinking(index: int, thought: str, signature: str) -> bytes:
    """A whole block of signed thinking."""
    pieces = [
        start(index, "thinking", thinking="", signature=""),
        delta(index, "thinking_delta", thinking=thought) if thought else b"",
        delta(index, "signature_delta", signature=signature),
        stop(index),
    ]
    return b"".join(pieces)


def tool_use(index: int, call_id: str, name: str, arguments: str) -> bytes:
    """A whole call."""
    opened = start(index, "tool_use", id=call_id, name=name, input={})
    return opened + delta(index, "input_json_delta", partial_json=arguments) + stop(index)


def said(words: str = "Hello") -> list[bytes]:
    """A whole answer."""
    counts = {"input_tokens": 3, "output_tokens": 1}
    return [begun(**counts), text(0, words), finished("end_turn", output_tokens=2), END]


def stream(*pieces: bytes | float, **settings: Any) -> Answer:
    """An answer of events."""
    return Answer(headers={"content-type": "text/event-stream"}, body=pieces, **settings)


def refused(status: int, message: str, kind: str = "invalid_request_error", **more: Any) -> Answer:
    """An answer that is an error."""
    body = {"type": "error", "error": {"type": kind, "message": message}}
    headers = {"content-type": "application/json", **more}
    return Answer(status=status, headers=headers, body=msgspec.json.encode(body))


def render(steps: Sequence[Step]) -> list[bytes]:
    """The events, a piece for each step, and one in front that opens the message."""
    renderer = _Renderer(steps)
    opening = [] if not steps or isinstance(steps[0], Fail) else [renderer.opening()]
    return [*opening, *[piece for step in steps if (piece := renderer.step(step))]]


class _Renderer:
    """Opens and closes blocks as the steps need it."""

    def __init__(self, steps: Sequence[Step]) -> None:
        told = [step.usage for step in steps if isinstance(step, ReportUsage)]
        self._usage = told[-1] if told else None
        self._next = 0
        self._running: tuple[str, int] | None = None  # a block of text or thinking
        self._calls: dict[int, int] = {}  # the blocks of calls, which may come side by side

    def opening(self) -> bytes:
        counts = msgspec.to_builtins(self._usage or Usage())
        return begun(**{**counts, "output_tokens": 1})

    def step(self, step: Step) -> bytes:
        match step:
            case Say():
                block = self._block("text", text="")
                return block + delta(self._index, "text_delta", text=step.text)
            case Reason():
                block = self._block("thinking", thinking="", signature="")
                return block + delta(self._index, "thinking_delta", thinking=step.text)
            case Call():
                return self._call(step)
            case Finish():
                return self._close() + finished(_REASONS[step.reason], **self._output())
            case ReportUsage():
                return finished(None, **self._output(step.usage))
            case Comment():
                return PING + b": ping\n\n"
            case Fail():
                return failed(step.message)
            case End():
                return self._close() + END
            case _:
                assert_never(step)

    @property
    def _index(self) -> int:
        assert self._running is not None
        return self._running[1]

    def _output(self, usage: Usage | None = None) -> dict[str, int]:
        told = usage or self._usage
        return {} if told is None else {"output_tokens": told.output_tokens}

    def _block(self, kind: str, **fields: Any) -> bytes:
        if self._running is not None and self._running[0] == kind:
            return b""
        closed = self._close()
        self._running = (kind, self._next)
        self._next += 1
        return closed + start(self._index, kind, **fields)

    def _call(self, step: Call) -> bytes:
        told = b""
        if step.index not in self._calls:
            told += self._close_running()
            self._calls[step.index] = self._next
            self._next += 1
            told += start(self._calls[step.index], "tool_use", **_named(step))
        elif step.id or step.name:
            told += start(self._calls[step.index], "tool_use", **_named(step))
        if step.arguments is not None:
            json = step.arguments
            told += delta(self._calls[step.index], "input_json_delta", partial_json=json)
        return told

    def _close_running(self) -> bytes:
        closed = b"" if self._running is None else stop(self._index)
        self._running = None
        return closed

    def _close(self) -> bytes:
        calls, self._calls = self._calls, {}
        return self._close_running() + b"".join([stop(index) for index in calls.values()])


def _named(step: Call) -> dict[str, Any]:
    return {"id": step.id or "", "name": step.name or "", "input": {}}


# --- how it is asked --------------------------------------------------------------------------


def transport(
    url: str,
    *,
    model: str = "claude-sonnet-4-5",
    retry: RetryPolicy | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> Anthropic:
    """A transport to a server of the tests. Its clock makes pauses take no time."""
    clock = FakeClock() if clock is None else clock
    return Anthropic(model, base_url=url, retry=retry, clock=clock, **settings)


@asynccontextmanager
async def serving(
    script: Script, **settings: Any
) -> AsyncGenerator[tuple[ByteServer, Anthropic], None]:
    """A server and a transport to it, which is closed at the end."""
    async with ByteServer(script) as server:
        messages = transport(server.url, **settings)
        try:
            yield server, messages
        finally:
            await messages.aclose()
