"""The servers that the transports are tested against do what their tests rely on."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from email.message import Message
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.transports.servers.aimock import Aimock
from tests.transports.servers.bytes_server import Answer, ByteServer, Request
from tests.transports.servers.child import Child
from tests.transports.servers.llama import SHORT, LlamaServer

QUESTION = {"role": "user", "content": "Weather in Oslo?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Reply(NamedTuple):
    status: int
    headers: Message
    body: bytes


def post(url: str, body: dict[str, Any]) -> Reply:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=60)) as connection:
        connection.request("POST", parts.path, json.dumps(body))
        with connection.getresponse() as response:
            return Reply(response.status, response.headers, response.read())


def chat(base: str, **fields: Any) -> Reply:
    body = {"model": "gpt-4o", "messages": [QUESTION], "stream": True, **fields}
    return post(f"{base}/chat/completions", body)


def sse(reply: Reply) -> list[Any]:
    """The data of a stream, which has to end with `[DONE]`."""
    assert reply.status == 200
    *lines, last = [line[6:] for line in reply.body.decode().splitlines() if line]
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


def deltas(chunks: list[Any]) -> Iterator[Any]:
    return (choice["delta"] for chunk in chunks for choice in chunk["choices"])


def tool_calls(chunks: list[Any]) -> list[tuple[str, str]]:
    calls: dict[int, list[str]] = {}
    for delta in deltas(chunks):
        for piece in delta.get("tool_calls") or ():
            call = calls.setdefault(piece["index"], ["", ""])
            call[0] += piece["function"].get("name", "")
            call[1] += piece["function"].get("arguments", "")
    return [(name, arguments) for name, arguments in calls.values()]


def finish_reasons(chunks: list[Any]) -> list[str]:
    reasons = (choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
    return [reason for reason in reasons if reason]


class TestAimock:
    def test_streams_parallel_tool_calls_and_keeps_the_request(self, aimock: Aimock) -> None:
        calls = [
            {"name": "weather", "arguments": {"city": "Oslo"}, "id": "call_1"},
            {"name": "weather", "arguments": {"city": "Rome"}, "id": "call_2"},
        ]
        aimock.play({"response": {"toolCalls": calls}, "chunkSize": 5})
        chunks = sse(chat(f"{aimock.url}/v1", tools=[WEATHER]))
        assert tool_calls(chunks) == [
            ("weather", '{"city":"Oslo"}'),
            ("weather", '{"city":"Rome"}'),
        ]
        assert finish_reasons(chunks) == ["tool_calls"]
        [entry] = aimock.journal()
        assert (entry.method, entry.path) == ("POST", "/v1/chat/completions")
        assert entry.headers["accept-encoding"] == "identity"
        assert entry.body["messages"] == [QUESTION]
        assert entry.body["tools"] == [WEATHER]
        assert entry.response.status == 200

    def test_plays_turns_in_order_and_forgets_them(self, aimock: Aimock) -> None:
        aimock.play({"response": {"content": "one"}}, {"response": {"content": "two"}})
        for text in ("one", "two"):
            chunks = sse(chat(f"{aimock.url}/v1"))
            assert "".join(delta.get("content") or "" for delta in deltas(chunks)) == text
        aimock.reset()
        assert aimock.journal() == []
        assert chat(f"{aimock.url}/v1").status == 404

    def test_tells_when_to_try_again(self, aimock: Aimock) -> None:
        error = {"error": {"message": "slow down"}, "status": 429, "retryAfter": 7}
        aimock.replace({"match": {"userMessage": "Oslo"}, "response": error})
        reply = chat(f"{aimock.url}/v1")
        assert (reply.status, reply.headers["retry-after"]) == (429, "7")
        assert json.loads(reply.body)["error"]["message"] == "slow down"

    def test_breaks_off_in_a_stream(self, aimock: Aimock) -> None:
        cut = {"chunkSize": 1, "truncateAfterChunks": 3, "latency": 5}
        aimock.play({"response": {"content": "a long answer"}, **cut})
        with pytest.raises(http.client.IncompleteRead) as caught:
            chat(f"{aimock.url}/v1")
        assert caught.value.partial.startswith(b"data: {")
        [entry] = aimock.journal()
        assert entry.response.interrupted
        assert entry.response.interrupt_reason == "truncateAfterChunks"

    def test_refuses_a_fixture_that_it_does_not_understand(self, aimock: Aimock) -> None:
        with pytest.raises(ValueError, match="aimock refused POST fixtures"):
            aimock.load({"match": {}, "response": {"toolCalls": "no list"}})

    @pytest.mark.slow
    @pytest.mark.usefixtures("aimock_server")  # it skips where there is none
    def test_leaves_when_its_parent_is_gone(self) -> None:
        with Aimock() as server:
            assert server.child.let_go() == 0


class TestLlama:
    def test_is_a_real_model(self, llama_server: LlamaServer) -> None:
        assert llama_server.healthy()
        for _ in range(2):
            usage = {"stream_options": {"include_usage": True}}
            chunks = sse(chat(llama_server.url, max_tokens=4, **usage))
            assert any(delta.get("content") for delta in deltas(chunks))
            assert finish_reasons(chunks) == ["length"]
            assert chunks[-1]["usage"]["completion_tokens"] == 4
            assert chunks[-1]["model"] == llama_server.model

    def test_calls_a_tool(self, llama_server: LlamaServer) -> None:
        """The model's own choice; arguments may differ between machines, but fit the schema."""
        chunks = sse(chat(llama_server.url, max_tokens=100, tools=[WEATHER], **SHORT))
        name, arguments = tool_calls(chunks)[0]
        assert (name, list(json.loads(arguments))) == ("weather", ["city"])
        assert finish_reasons(chunks) in (["tool_calls"], ["length"])

    @pytest.mark.parametrize("path", ["messages", "responses"])
    def test_speaks_other_protocols(self, llama_server: LlamaServer, path: str) -> None:
        question = {"messages": [QUESTION]} if path == "messages" else {"input": [QUESTION]}
        limit = {"max_tokens": 4, "max_output_tokens": 4}
        reply = post(f"{llama_server.url}/{path}", {"model": "m", **question, **limit})
        assert reply.status == 200
        assert json.loads(reply.body)["usage"]["output_tokens"] == 4


@pytest.mark.slow
class TestByteServer:
    async def connect(
        self, server: ByteServer, body: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
        self.send(writer, body)
        return reader, writer

    def send(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(b"POST /v1/x HTTP/1.1\r\nX-Key: k\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body)

    async def test_writes_pieces_as_chunks_and_keeps_the_connection(self) -> None:
        script = [Answer(body=[b"ab", 0.001, b"c"]), Answer(status=500, headers={"A": "b"})]
        async with ByteServer(script) as server:
            reader, writer = await self.connect(server, b"one")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head == b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            assert await reader.readuntil(b"\r\n0\r\n\r\n") == b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
            self.send(writer, b"two")
            assert (await reader.readline()) == b"HTTP/1.1 500 Internal Server Error\r\n"
            await reader.readuntil(b"\r\n0\r\n\r\n")
            assert server.open_connections == 1
            writer.close()
            await server.all_closed()
        expected = {"x-key": "k", "content-length": "3"}
        assert server.requests == [
            Request("POST", "/v1/x", expected, b"one"),
            Request("POST", "/v1/x", expected, b"two"),
        ]
        assert server.abandoned == 0

    async def test_cuts_a_body(self) -> None:
        async with ByteServer([Answer(body=[b"ab", b"cd", b"ef"], cut_after=3)]) as server:
            reader, writer = await self.connect(server)
            assert (await reader.read()).endswith(b"\r\n\r\n2\r\nab\r\n1\r\nc\r\n")
            writer.close()

    async def test_sends_what_length_it_is_told(self) -> None:
        def script(request: Request) -> Answer:
            return Answer(headers={"Content-Length": "9"}, body=request.body, cut_after=9)

        async with ByteServer(script) as server:
            reader, writer = await self.connect(server, b"abc")
            assert await reader.read() == b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"
            writer.close()

    @pytest.mark.parametrize("status", [200, None])
    async def test_resets(self, status: int | None) -> None:
        async with ByteServer([Answer(status=status, body=[0.01], reset=True)]) as server:
            reader, writer = await self.connect(server)
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()

    async def test_holds_until_the_client_leaves(self) -> None:
        async with ByteServer([Answer(body=b"ab", hold=True)]) as server:
            reader, writer = await self.connect(server)
            await reader.readuntil(b"ab\r\n")
            assert server.abandoned == 0
            writer.close()
            await server.client_gone()
            await server.all_closed()
        assert server.abandoned == 1

    async def test_a_request_too_many_is_an_error(self) -> None:
        async def ask() -> None:
            async with ByteServer([]) as server:
                reader, writer = await self.connect(server)
                assert await reader.read() == b""
                writer.close()

        with pytest.raises(AssertionError, match="no answer in the script"):
            await ask()


LISTEN = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print("port:", server.getsockname()[1], flush=True)
time.sleep(600)
"""
START_ANOTHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.slow
class TestChild:
    def test_stops_with_all_that_it_started(self) -> None:
        child = Child([sys.executable, "-c", START_ANOTHER, LISTEN])
        port = int(child.wait_for(r"port: (\d+)", seconds=30))
        socket.create_connection(("127.0.0.1", port)).close()
        child.stop()
        assert not child.running
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()

    def test_says_why_it_did_not_start(self) -> None:
        child = Child([sys.executable, "-c", "print('no luck')"])
        with pytest.raises(RuntimeError, match="no luck"):
            child.wait_for("(never)", seconds=30)
