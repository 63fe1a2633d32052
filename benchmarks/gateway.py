"""What a gateway carries: many streams at once, some of whose clients vanish.

    python -m benchmarks.gateway [streams] [deltas] [rounds]

The gateway runs in a process of its own, one worker of uvicorn, in front of a model that costs
nothing; the clients are plain sockets in this one. All streams of a round are open before the first
delta is sent. Every delta says whose it is and its number, and each is checked.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from clark_agent import AssistantMessage, CancellationToken, StopReason, StreamEvent, StreamRequest
from clark_agent.gateway import gateway
from clark_agent.stream import Chunk, Done, Start, TextChunk

TOKEN = "benchmark"
VANISHES = 10  # every so many clients, one
START = Start(AssistantMessage((), StopReason.OTHER))


# --- the gateway ------------------------------------------------------------------------------


class Model:
    """Says as many deltas as it is asked for, each with the caller's id and a number."""

    def __init__(self) -> None:
        self.running = self.answered = self.broken_off = 0
        self._all_here = asyncio.Event()

    def count(self) -> dict[str, int]:
        """How the calls since the last time ended."""
        counts = {
            "running": self.running,
            "answered": self.answered,
            "broken_off": self.broken_off,
        }
        self.answered = self.broken_off = 0
        self._all_here.clear()
        return counts

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        wanted: dict[str, int] = request.provider_extras
        self.running += 1
        is_whole = False
        try:
            if self.running == wanted["together"]:
                self._all_here.set()
            await self._all_here.wait()
            yield START
            for number in range(wanted["deltas"]):
                yield Chunk(TextChunk(f"{request.system_prompt}:{number} "))
                await asyncio.sleep(0)
            is_whole = True
            yield Done(AssistantMessage.from_text(request.system_prompt))
        finally:
            self.running -= 1
            self.answered += is_whole
            self.broken_off += not is_whole


def serve() -> None:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    model = Model()

    async def look(request: Request) -> JSONResponse:
        return JSONResponse(model.count())

    threading.Thread(target=_leave_with_parent, daemon=True).start()
    app = gateway(model, tokens=[TOKEN], max_concurrent=100_000, extras=None)
    app.router.routes.append(Route("/model", look))
    uvicorn.run(app, port=0, access_log=False)


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


class Server(NamedTuple):
    """The process of a gateway."""

    pid: int
    url: str

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        with closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def megabytes(self, field: str = "VmRSS") -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(rf"{field}:\s+(\d+) kB", status)[0]) / 1024

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server() -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gateway", "serve"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stdin is not None
    try:
        said = ""
        while not (found := re.search(r"running on (http://\S+)", said)):
            said += (line := process.stderr.readline())
            if not line:
                raise RuntimeError(f"the gateway did not start:\n{said}")
        yield Server(process.pid, found[1])
    finally:
        process.terminate()
        process.communicate()


# --- the clients ------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What one client saw."""

    deltas: int
    vanished: bool


async def client(url: str, name: str, *, deltas: int, together: int, vanishes: bool) -> Outcome:
    """One stream. Raises when a delta is not the one that is due."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    try:
        # Who is going to vanish gets an answer without end: nothing else ends that call.
        extras = {"deltas": sys.maxsize if vanishes else deltas, "together": together}
        body = json.dumps({"system_prompt": name, "messages": [], "provider_extras": extras})
        writer.write(
            f"POST /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{name} was refused: {status!r}")
        heard = 0
        async for event in _events(reader):
            if event["type"] == "chunk":
                said, due = event["chunk"]["delta"], f"{name}:{heard} "
                if said != due:
                    raise RuntimeError(f"{said!r} came where {due!r} was due")
                heard += 1
                if vanishes and heard == deltas // 2:
                    writer.transport.abort()
                    return Outcome(heard, True)
            elif event["type"] == "done":
                if heard != deltas or event["message"]["content"][0]["text"] != name:
                    raise RuntimeError(f"{name} ended with {event} after {heard} deltas")
                return Outcome(heard, False)
            elif event["type"] != "start":
                raise RuntimeError(f"{name} got {event}")
        raise RuntimeError(f"the stream of {name} broke off after {heard} deltas")
    finally:
        writer.close()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    tail = b""
    while block := await reader.read(1 << 16):
        *lines, tail = (tail + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield msgspec.json.decode(line[6:])


async def one_round(url: str, *, streams: int, deltas: int) -> list[Outcome]:
    return await asyncio.gather(
        *[
            client(
                url,
                f"client-{number}",
                deltas=deltas,
                together=streams,
                vanishes=number % VANISHES == 0,
            )
            for number in range(streams)
        ]
    )


async def settled(gate: Server) -> dict[str, int]:
    """Wait until the gateway has noticed who left; what the model has counted since the last time.

    Raises when calls are left running.
    """
    for _ in range(1000):
        if gate.get("/health")["streams"] == 0:
            counts: dict[str, int] = gate.get("/model")
            return counts
        await asyncio.sleep(0.01)
    raise RuntimeError(f"calls are left running: {gate.get('/health')}, {gate.get('/model')}")


def raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


async def main(streams: int = 500, deltas: int = 200, rounds: int = 4) -> None:
    raise_file_limit(2 * streams + 100)
    with server() as gate:
        print(f"{streams} streams of {deltas} deltas at once, {streams // VANISHES} vanish")
        print(f"{'round':>8}{'deltas/s':>11}{'CPU µs/delta':>14}{'RSS MB':>9}")
        print(f"{'start':>8}{'':>25}{gate.megabytes():9.1f}")
        for number in range(1, rounds + 1):
            began, cpu = perf_counter(), gate.cpu_seconds()
            outcomes = await one_round(gate.url, streams=streams, deltas=deltas)
            seconds = perf_counter() - began
            counts = await settled(gate)
            cpu = gate.cpu_seconds() - cpu
            heard = sum(outcome.deltas for outcome in outcomes)
            print(
                f"{number:>8}{heard / seconds:11,.0f}{cpu / heard * 1e6:14.1f}"
                f"{gate.megabytes():9.1f}   {counts}"
            )
        print(f"{'peak':>8}{'':>25}{gate.megabytes('VmHWM'):9.1f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        asyncio.run(main(*map(int, sys.argv[1:])))
