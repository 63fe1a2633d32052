"""The Responses API as bytes: what a server of the tests sends, and how they ask it.

`NAME`, `transport` and `render` are what `test_misbehaviours` wants of every wire. `STYLES` are the
ways in which servers differ, each of them seen at one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Literal, assert_never

import msgspec
from msgspec import Struct

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
from clark_agent.transports.openai_responses import OpenAIResponses
from tests.transports.servers.bytes_server import Answer, ByteServer, Script

NAME = "responses"

# --- events -----------------------------------------------------------------------------------


def event(kind: str, **fields: Any) -> bytes:
    """An event, without what is None."""
    return b"data: %b\n\n" % msgspec.json.encode({"type": kind, **_without_none(fields)})


def added(item: dict[str, Any], index: int | None = None) -> bytes:
    return event("response.output_item.added", output_index=index, item=item)


def done(item: dict[str, Any], index: int | None = None) -> bytes:
    return event("response.output_item.done", output_index=index, item=item)


def text_delta(delta: str, index: int | None = None, item_id: str | None = None) -> bytes:
    return event("response.output_text.delta", delta=delta, output_index=index, item_id=item_id)


def arguments_delta(delta: str, index: int | None = None, item_id: str | None = None) -> bytes:
    kind = "response.function_call_arguments.delta"
    return event(kind, delta=delta, output_index=index, item_id=item_id)


def summary_delta(
    delta: str, index: int | None = None, item_id: str | None = None, part: int | None = None
) -> bytes:
    kind = "response.reasoning_summary_text.delta"
    return event(kind, delta=delta, output_index=index, item_id=item_id, summary_index=part)


def completed(*output: dict[str, Any], **fields: Any) -> bytes:
    response = {"status": "completed", "output": output, **fields}
    return event("response.completed", response=response)


def message(text: str | None = None, item_id: str | None = None, **fields: Any) -> dict[str, Any]:
    parts = [] if text is None else [{"type": "output_text", "text": text, "annotations": []}]
    known = {"type": "message", "id": item_id, "role": "assistant", "content": parts}
    return _without_none({**known, **fields})


def call(
    call_id: str | None = None,
    name: str | None = None,
    arguments: Any = "",
    item_id: str | None = None,
) -> dict[str, Any]:
    known = {"id": item_id, "call_id": call_id, "name": name, "arguments": arguments}
    return _without_none({"type": "function_call", **known})


def reasoning(
    summary: Sequence[str] = (), sealed: str | None = None, item_id: str | None = None
) -> dict[str, Any]:
    parts = [{"type": "summary_text", "text": text} for text in summary]
    known = {"id": item_id, "summary": parts, "encrypted_content": sealed}
    return _without_none({"type": "reasoning", **known})


def stream(*pieces: bytes | float, **settings: Any) -> Answer:
    """An answer of events."""
    return Answer(headers={"content-type": "text/event-stream"}, body=pieces, **settings)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# --- steps ------------------------------------------------------------------------------------


class Style(Struct, frozen=True, kw_only=True):
    """How a server tells which item a piece belongs to, and what it says besides."""

    name: str
    numbers: Literal["own", "alike"] | None = "own"
    ids: Literal["steady", "fresh", "alike"] | None = "steady"
    announces: bool = True
    """Whether it says that an item begins."""
    closes: bool = True
    """Whether it says that an item has ended, and sends it as a whole."""
    sums_up: bool = False
    """Whether the last event has all items once more."""
    fails: Literal["flat", "nested", "response"] = "nested"

    def render(self, steps: Sequence[Step]) -> list[bytes]:
        """The events of these steps."""
        writer = _Writer(self)
        return [piece for step in steps for piece in writer.write(step)]


STYLES = (
    Style(name=NAME),
    Style(name="OpenAI", sums_up=True, fails="response"),
    Style(name="as documented", fails="flat"),
    Style(name="another id each time", ids="fresh"),
    Style(name="all ids alike", ids="alike"),
    Style(name="no ids", ids=None),
    Style(name="no numbers", numbers=None),
    Style(name="all numbers alike", numbers="alike"),
    Style(name="items are not closed", closes=False),
    Style(name="items are closed in the last event", closes=False, sums_up=True),
    Style(name="items are not announced", announces=False),
)


def render(steps: Sequence[Step]) -> list[bytes]:
    """The events of these steps, with as few words as possible."""
    return STYLES[0].render(steps)


class _Item:
    def __init__(self, kind: str, index: int | None, item_id: str | None) -> None:
        self.kind = kind
        self.index = index
        self.id = item_id
        self.call_id: str | None = None
        self.name: str | None = None
        self.text = ""
        self.is_open = True

    def as_json(self, *, whole: bool) -> dict[str, Any]:
        text = self.text if whole else ""
        match self.kind:
            case "message":
                return message(text or None, self.id)
            case "reasoning":
                return reasoning([text] if text else [], item_id=self.id)
            case _:
                return call(self.call_id, self.name, text, self.id)


class _Writer:
    def __init__(self, style: Style) -> None:
        self._style = style
        self._items: list[_Item] = []
        self._calls: dict[int, _Item] = {}
        self._ids = count()
        self._has_begun = False
        self._reason = StopReason.END_TURN
        self._usage: Usage | None = None

    def write(self, step: Step) -> list[bytes]:
        pieces = self._step(step)
        if not self._has_begun:
            self._has_begun = True
            pieces.insert(0, event("response.created", response={"status": "in_progress"}))
        return pieces

    def _step(self, step: Step) -> list[bytes]:
        match step:
            case Say():
                return self._piece("message", step.text, text_delta)
            case Reason():
                return self._piece("reasoning", step.text, summary_delta)
            case Call():
                return self._call(step)
            case Finish():
                self._reason = step.reason
                return self._close(*self._items)
            case ReportUsage():
                self._usage = step.usage  # it has its place in the last event
                return []
            case Comment():
                return [b": ping\n\n", event("keepalive")]
            case Fail():
                return [self._failure(step.message)]
            case End():
                return [self._end()]
            case _:
                assert_never(step)

    def _piece(self, kind: str, text: str, delta: Any) -> list[bytes]:
        last = self._items[-1] if self._items else None
        pieces: list[bytes] = []
        if last is None or last.kind != kind or not last.is_open:
            pieces += self._close(*[item for item in self._items if item.kind != "function_call"])
            last = self._begin(kind)
            pieces += self._announce(last)
        last.text += text
        return [*pieces, delta(text, last.index, self._id_for(last))]

    def _call(self, step: Call) -> list[bytes]:
        item = self._calls.get(step.index)
        is_new = item is None
        pieces: list[bytes] = []
        if item is None:
            pieces += self._close(*[item for item in self._items if item.kind != "function_call"])
            item = self._calls[step.index] = self._begin("function_call")
        changed = step.id if item.call_id and step.id != item.call_id else None
        item.call_id = item.call_id or step.id
        item.name = item.name or step.name
        if is_new or (step.name and self._style.ids == "steady"):
            pieces += self._announce(item)
        if step.arguments:
            item.text += step.arguments
            item_id = self._id_for(item) if changed is None else changed
            pieces.append(arguments_delta(step.arguments, item.index, item_id))
        if changed is not None:
            item.call_id = changed
        return pieces

    def _begin(self, kind: str) -> _Item:
        numbers = {"own": len(self._items), "alike": 0, None: None}
        item = _Item(kind, numbers[self._style.numbers], None)
        if self._style.ids is not None:
            item.id = "i" if self._style.ids == "alike" else f"i{next(self._ids)}"
        self._items.append(item)
        return item

    def _id_for(self, item: _Item) -> str | None:
        if self._style.ids == "fresh":
            item.id = f"i{next(self._ids)}"
        return item.id

    def _announce(self, item: _Item) -> list[bytes]:
        return [added(item.as_json(whole=False), item.index)] if self._style.announces else []

    def _close(self, *items: _Item) -> list[bytes]:
        closing = [item for item in items if item.is_open]
        for item in closing:
            item.is_open = False
            self._id_for(item)
        if not self._style.closes:
            return []
        return [done(item.as_json(whole=True), item.index) for item in closing]

    def _failure(self, text: str) -> bytes:
        error = {"code": "server_is_overloaded", "message": text}
        match self._style.fails:
            case "flat":
                return event("error", **error, param=None)
            case "nested":
                return event("error", error={"type": "server_error", **error})
            case "response":
                return event("response.failed", response={"status": "failed", "error": error})

    def _end(self) -> bytes:
        output = [item.as_json(whole=True) for item in self._items] if self._style.sums_up else []
        response: dict[str, Any] = {"status": "completed", "output": output}
        kind = "response.completed"
        if self._reason in (StopReason.MAX_TOKENS, StopReason.OTHER):
            kind = "response.incomplete"
            reason = "content_filter" if self._reason is StopReason.OTHER else "max_output_tokens"
            response |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
        if (usage := self._usage) is not None:
            cached, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
            response["usage"] = {
                "input_tokens": usage.input_tokens + cached + written,
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
                "output_tokens": usage.output_tokens,
            }
        return event(kind, response=response)


# --- how it is asked --------------------------------------------------------------------------


def transport(
    url: str,
    *,
    model: str = "m",
    retry: RetryPolicy | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> OpenAIResponses:
    """A transport to a server of the tests. Its clock makes pauses take no time."""
    clock = FakeClock() if clock is None else clock
    return OpenAIResponses(model, base_url=f"{url}/v1", retry=retry, clock=clock, **settings)


@asynccontextmanager
async def serving(
    script: Script, **settings: Any
) -> AsyncGenerator[tuple[ByteServer, OpenAIResponses], None]:
    """A server and a transport to it, which is closed at the end."""
    async with ByteServer(script) as server:
        responses = transport(server.url, **settings)
        try:
            yield server, responses
        finally:
            await responses.aclose()
