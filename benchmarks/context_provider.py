"""The provider of `benchmarks.context`: a Chat Completions server that plays the script and counts.

All frameworks talk to it through their own client for this API, so what is counted are the bytes
that reach a provider. A request that ends with what the next turn of the script waits for gets that
turn; any other asks for a summary. Usage is reported in each answer, as providers do.

A token is four bytes of JSON: the tools first, then each message. What a cache would have is the
longest beginning that a request shares with any earlier one; no entry expires.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct, json

from benchmarks.context_script import FACTS, PINNED, TASK, Script

BYTES = 4
"""The bytes of a token."""
BLOCK = 1024 * BYTES
SUMMARY = 6_000
"""The characters of a summary."""
CODES = (TASK, *PINNED, *[fact.code for fact in FACTS])


class Seen(Struct, frozen=True, kw_only=True):
    """A request and what was counted in it, in tokens."""

    is_summary: bool
    tokens: int
    cached: int
    """By whole messages."""
    cached_blocks: int
    """By blocks of 1,024 tokens."""
    output: int
    possible: int = 0
    """What the turn before had sent; 0 for a summary and the first turn."""
    kept: int = 0
    """How much of that was at the beginning again."""
    is_compacted: bool = False
    """Whether it is smaller than the turn before and the messages that came since."""
    codes: frozenset[str] | None = None
    """The codes of the task and of facts in it; only noted in turns of the last ask."""


class Prefixes:
    """The beginnings of all requests so far, as chains of hashes."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, parts: Sequence[bytes]) -> int:
        """Return how many parts at the beginning an earlier request had too, and add all."""
        chain, common, is_known = hashlib.blake2b(digest_size=16), 0, True
        for number, part in enumerate(parts, start=1):
            chain.update(len(part).to_bytes(4, "big") + part)
            digest = chain.digest()
            is_known = is_known and digest in self._seen
            if is_known:
                common = number
            else:
                self._seen.add(digest)
        return common


class Account:
    """Counts the requests of one conversation."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._last_ask = len(script.turns) - len(script.asks[-1].turns)
        self._messages, self._blocks = Prefixes(), Prefixes()
        self._before: list[bytes] | None = None
        self.turn = 0
        """How many turns of the script are played."""
        self.seen: list[Seen] = []

    def add(self, body: dict[str, Any], answer: dict[str, Any], *, is_summary: bool) -> Seen:
        """Count a request and its answer."""
        parts = [json.encode(body.get("tools") or []), *map(json.encode, body["messages"])]
        whole = b"".join(parts)
        blocks = [whole[at : at + BLOCK] for at in range(0, len(whole) - BLOCK + 1, BLOCK)]
        common = self._messages.add(parts)
        before = self._before
        possible = kept = 0
        if not is_summary and before is not None:
            possible, kept = _tokens(before), _tokens(before[: _common(before, parts)])
        found = Seen(
            is_summary=is_summary,
            tokens=_tokens(parts),
            cached=_tokens(parts[:common]),
            cached_blocks=self._blocks.add(blocks) * BLOCK // BYTES,
            output=len(json.encode(answer)) // BYTES,
            possible=possible,
            kept=kept,
            is_compacted=possible > 0 and _tokens(parts) < possible + self._news(parts),
            codes=None if is_summary else self._codes(whole),
        )
        self.seen.append(found)
        if not is_summary:
            self._before = parts
            self.turn += 1
        return found

    def _news(self, parts: Sequence[bytes]) -> int:
        """The tokens of what came since the turn before: results, or what the user said."""
        calls = self._script.turns[self.turn - 1].calls
        return _tokens(parts[-max(1, len(calls)) :])

    def _codes(self, whole: bytes) -> frozenset[str] | None:
        if self.turn < self._last_ask:
            return None
        return frozenset([code for code in CODES if code.encode() in whole])


def _tokens(parts: Sequence[bytes]) -> int:
    return sum(map(len, parts)) // BYTES


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return number
    return min(len(one), len(other))


class Provider:
    """Plays the script once."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.account = Account(script)
        self._asked: dict[int, str] = {}
        at = 0
        for ask in script.asks:
            self._asked[at] = ask.text
            at += len(ask.turns)

    def answer(self, body: dict[str, Any]) -> tuple[dict[str, Any], Seen]:
        """Return the message of the model, and what was counted."""
        turn = self.account.turn
        is_summary = not self._continues(body["messages"][-1], turn)
        if is_summary:
            message = {"role": "assistant", "content": self._summary(body["messages"])}
        else:
            message = self._turn(turn)
        return message, self.account.add(body, message, is_summary=is_summary)

    def _continues(self, newest: dict[str, Any], turn: int) -> bool:
        """Whether a request that ends with this message asks for this turn of the script."""
        if turn >= len(self.script.turns):
            return False
        if turn in self._asked:
            return newest["role"] == "user" and _text(newest).endswith(self._asked[turn])
        last = self.script.turns[turn - 1].calls[-1].id
        return bool(newest["role"] == "tool" and newest["tool_call_id"] == last)

    def _turn(self, number: int) -> dict[str, Any]:
        turn = self.script.turns[number]
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.encode(call.arguments).decode(),
                    },
                }
                for call in turn.calls
            ]
        return message

    def _summary(self, messages: Sequence[dict[str, Any]]) -> str:
        """All facts that the request shows, and words up to the usual size of a summary.

        The task and the rules that are to be pinned are left out: to keep them is not the model's.
        """
        shown = "\n".join(map(_text, messages))
        lines = ["The work so far:"]
        lines += dict.fromkeys(re.findall(r"FACT-[0-9a-f]{6}: [^.\n\\\"]+", shown))
        chance = random.Random(len(self.account.seen))
        size = sum(map(len, lines)) + len(lines)
        while size < SUMMARY:
            lines.append(f"- step {chance.randint(1, 10**6)}: read, changed and tested a module")
            size += len(lines[-1]) + 1
        return "\n".join(lines)


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join([part.get("text", "") for part in content])


# --- HTTP -------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(provider: Provider) -> AsyncIterator[str]:
    """Serve on a free port of this machine. Yields the base URL for clients."""
    errors: list[Exception] = []
    connections: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[asyncio.current_task()] = writer
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                body = json.decode(await reader.readexactly(int(length[1]) if length else 0))
                writer.write(_response(provider, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            errors.append(error)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=2**26)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        if errors:
            raise errors[0]
    finally:
        server.close()
        for writer in connections.values():
            writer.close()
        await asyncio.gather(*filter(None, connections))


def _response(provider: Provider, body: dict[str, Any]) -> bytes:
    message, seen = provider.answer(body)
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    usage = {
        "prompt_tokens": seen.tokens,
        "completion_tokens": seen.output,
        "total_tokens": seen.tokens + seen.output,
        "prompt_tokens_details": {"cached_tokens": seen.cached_blocks},
    }
    head = {"id": f"chatcmpl-{len(provider.account.seen)}", "created": 1, "model": body["model"]}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason}
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        return _http("application/json", json.encode(whole))
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, "tool_calls": calls} if calls else message
    head["object"] = "chat.completion.chunk"
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {**head, "choices": [], "usage": usage},
    ]
    lines = [b"data: " + json.encode(chunk) for chunk in chunks] + [b"data: [DONE]", b""]
    return _http("text/event-stream", b"\n\n".join(lines))


def _http(kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
