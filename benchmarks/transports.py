"""`make bench-transports`: what a transport adds to its SDK, for each delta of a stream.

A server in a process of its own sends an answer of many deltas, one write for each. It is read, in
turns, by the SDK as objects (``async for chunk in stream``), by the SDK as plain bytes, and by our
transport down to its events. What counts is the ratio to the first, in one run.

    python -m benchmarks.transports [--deltas 10000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from collections.abc import Awaitable, Callable
from statistics import median
from time import perf_counter
from typing import Any

from clark_agent import CancellationToken, StreamRequest, UserMessage
from clark_agent.stream import Done
from clark_agent.transports import Anthropic, OpenAIChat, OpenAIResponses, Transport

REQUEST = StreamRequest(system_prompt="", messages=(UserMessage("go"),), max_output_tokens=10**6)
DELTA = "word "


# --- the server -------------------------------------------------------------------------------


def sse(*events: Any) -> bytes:
    return b"".join([b"data: " + json.dumps(event).encode() + b"\n\n" for event in events])


def chat_wire() -> tuple[bytes, bytes, bytes]:
    """What comes first, with each delta, and last."""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        return {**head, "system_fingerprint": "fp", "choices": [choice], "usage": None}

    first = sse(chunk({"role": "assistant", "content": ""}))
    last = sse(chunk({}, "stop")) + b"data: [DONE]\n\n"
    return first, sse(chunk({"content": DELTA})), last


def responses_wire() -> tuple[bytes, bytes, bytes]:
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": []}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
    response = {"id": "resp_1", "object": "response", "status": "completed", "output": []}
    usage = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
    first = sse({"type": "response.output_item.added", "output_index": 0, "item": item})
    delta = sse(
        {"type": "response.output_text.delta", "sequence_number": 4, "delta": DELTA, **place}
    )
    return (
        first,
        delta,
        sse({"type": "response.completed", "response": {**response, "usage": usage}}),
    )


def anthropic_wire() -> tuple[bytes, bytes, bytes]:
    def named(event: dict[str, Any]) -> bytes:
        return f"event: {event['type']}\n".encode() + sse(event)

    message: dict[str, Any] = {
        "id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "m",
        "stop_reason": None, "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip
    block = {"type": "text", "text": ""}
    first = named({"type": "message_start", "message": message})
    first += named({"type": "content_block_start", "index": 0, "content_block": block})
    text = {"type": "text_delta", "text": DELTA}
    delta = named({"type": "content_block_delta", "index": 0, "delta": text})
    last = named({"type": "content_block_stop", "index": 0})
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    last += named({"type": "message_delta", "delta": stop, "usage": {"output_tokens": 2}})
    return first, delta, last + named({"type": "message_stop"})


WIRES = {
    "/v1/chat/completions": chat_wire,
    "/v1/responses": responses_wire,
    "/v1/messages": anthropic_wire,
}


def serve(deltas: int, port: Any) -> None:
    """Answer every request with so many deltas."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            path = line.split()[1].decode()
            length = 0
            while (header := await reader.readline()).strip():
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            await reader.readexactly(length)
            first, delta, last = WIRES[path]()
            head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            for piece in (first, *[delta] * deltas, last, b""):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                if writer.transport.get_write_buffer_size() > 1 << 16:
                    await writer.drain()
            await writer.drain()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


# --- the readers ------------------------------------------------------------------------------


async def read_transport(transport: Transport[Any], deltas: int) -> None:
    events = 0
    last: object = None
    async for event in transport(REQUEST, CancellationToken()):
        events += 1
        last = event
    assert isinstance(last, Done), last
    assert last.message.plain_text == DELTA * deltas
    assert events == deltas + 2, events


async def read_objects(create: Callable[..., Any], deltas: int, body: dict[str, Any]) -> None:
    count = 0
    async for _ in await create(stream=True, **body):
        count += 1
    assert count >= deltas


async def read_bytes(create: Callable[..., Any], body: dict[str, Any]) -> None:
    async with create(stream=True, **body) as response:
        async for _ in response.iter_bytes():
            pass


async def timed(work: Awaitable[None]) -> float:
    began = perf_counter()
    await work
    return perf_counter() - began


async def compare(url: str, deltas: int, rounds: int) -> None:
    import anthropic
    import openai

    chat = openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0)
    claude = anthropic.AsyncAnthropic(api_key="k", base_url=url, max_retries=0)
    message = [{"role": "user", "content": "go"}]
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        (
            "OpenAIChat",
            OpenAIChat("m", base_url=f"{url}/v1", api_key="k"),
            chat.chat.completions,
            {"model": "m", "messages": message},
        ),
        (
            "OpenAIResponses",
            OpenAIResponses("m", base_url=f"{url}/v1", api_key="k"),
            chat.responses,
            {"model": "m", "input": "go"},
        ),
        (
            "Anthropic",
            Anthropic("claude-m", base_url=url, api_key="k"),
            claude.messages,
            {"model": "m", "messages": message, "max_tokens": 1000},
        ),
    ]
    print(f"{deltas:,} deltas, median of {rounds} rounds, ratios to the SDK's objects")
    print(f"{'':16}  {'SDK objects':>12}  {'SDK bytes':>10}  {'transport':>10}  ratio")
    for name, transport, resource, body in cases:
        raw = resource.with_streaming_response.create
        times: list[tuple[float, float, float]] = [
            (
                await timed(read_objects(resource.create, deltas, body)),
                await timed(read_bytes(raw, body)),
                await timed(read_transport(transport, deltas)),
            )
            for _ in range(rounds)
        ]
        objects, plain, ours = [median(column) for column in zip(*times, strict=True)]
        print(f"{name:16}  {objects:10.2f} s  {plain:8.2f} s  {ours:8.2f} s  {ours / objects:5.2f}")
        await transport.aclose()
    await chat.close()
    await claude.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deltas", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(given.deltas, there), daemon=True)
    server.start()
    try:
        asyncio.run(compare(f"http://127.0.0.1:{here.recv()}", given.deltas, given.rounds))
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
