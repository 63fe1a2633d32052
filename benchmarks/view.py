"""`make bench-view`: how long the page of runs takes to show a run, and how much it reads for that.

Logs of 1, 20 and 200 MB in a file each, and 10,000 small runs. Each request goes over HTTP to a
server in this process. What is measured: the first screen (the list, then the head of a run and its
first items), pages from the beginning, the middle and the end, and what a request of the model
looked like.

    python -m benchmarks.view [--sizes 1 20 200] [--runs 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx2
import uvicorn

from clark_agent.messages.wire import encode_json
from clark_agent.run_log import JsonlStore
from clark_agent.run_log._checksums import seal
from clark_agent.run_log.records import (
    RUN_LOG_VERSION,
    Answered,
    Asked,
    BatchEnded,
    Entry,
    Record,
    RunBegan,
    RunEnded,
    ToolEnded,
    ToolStarted,
)
from clark_agent.run_log.store import RunStore
from clark_agent.tools import ToolResult
from clark_agent.types import (
    AssistantMessage,
    RunIdentity,
    StopReason,
    TextContent,
    ToolCall,
    Usage,
    UserMessage,
)
from clark_agent.view.app import view_app

TOKEN = "only-for-the-benchmark"
USAGE = Usage(1200, 80, 0, 9000)
SENTENCE = "The tests of the parser fail since the last change of its grammar, and this is why. "


def entries(run_id: str, turns: int, length: int) -> list[Entry]:
    """A run of so many turns, each with a tool result of about this many characters."""
    result = ToolResult.text(SENTENCE * (length // len(SENTENCE)))
    found: list[Entry] = [
        RunBegan(
            identity=RunIdentity(run_id),
            system_prompt="You repair programs.",
            prompts=(UserMessage("Repair the parser.", 1),),
            tools={"read": {"description": "Read.", "parameters": {}}},
            model_id="gpt-5",
            agent_name="repairer",
        )
    ]
    settings: dict[str, Any] = {"system_prompt": "0", "tools": {"read": "1"}}
    for turn in range(1, turns + 1):
        call = ToolCall(f"c{turn}", "read", {"path": f"src/part_{turn}.py"})
        text = TextContent(SENTENCE * 3)
        answer = AssistantMessage((text, call), StopReason.TOOL_USE, None, turn, USAGE)
        found += [
            Asked(
                turn=turn,
                messages=2 * turn - 1,
                digest=f"{turn}",
                settings=settings if turn == 1 else None,
            ),
            Answered(message=answer),
            ToolStarted(tool_call_id=call.id, tool_name="read"),
            ToolEnded(tool_call_id=call.id, result=result),
            BatchEnded(turn),
        ]
    return [*found, RunEnded(outcome="done", usage=USAGE, tree_usage=USAGE)]


def write_log(store: RunStore, run_id: str, run: list[Entry], *, at: int = 0) -> int:
    """Write a log; return its size."""
    appender, before, size = store.create(run_id), 0, 0
    for seq, entry in enumerate(run):
        record = Record(RUN_LOG_VERSION, seq, run_id, at + 1000 * seq, entry)
        data, before = seal(encode_json(record), before)
        appender.append(record, data)
        size += len(data) + 1
        if seq % 500 == 499:
            appender.flush(sync=False)
    appender.close()
    return size


def write_large(store: RunStore, run_id: str, megabytes: float, *, length: int = 6000) -> int:
    """Write a log of about this size; return its size."""
    return write_log(store, run_id, entries(run_id, max(1, round(megabytes * 160)), length))


def write_many(store: JsonlStore, count: int) -> None:
    """Write so many small runs, without the care of a store."""
    first, *_, last = entries("run-000000", 0, 0)
    plain = [
        encode_json(Record(RUN_LOG_VERSION, seq, "run-000000", 1_000_000 + seq, entry))
        for seq, entry in enumerate([first, last])
    ]
    store.path_of("run").parent.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        run_id, before, lines = f"run-{number:06}", 0, b""
        for data in plain:
            own = data.replace(b"run-000000", run_id.encode())
            sealed, before = seal(own.replace(b":100000", b":%d" % (100_000 + number)), before)
            lines += sealed + b"\n"
        store.path_of(run_id).write_bytes(lines)


@asynccontextmanager
async def served(store: RunStore) -> AsyncGenerator[httpx2.AsyncClient]:
    """Serve the page, and open it."""
    app = view_app(store, token=TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx2.AsyncClient(base_url=base, timeout=300, trust_env=False) as client:
            await client.get("/", params={"token": TOKEN})
            yield client
        server.should_exit = True
        await serving


async def timed(client: httpx2.AsyncClient, path: str, **params: Any) -> tuple[float, Any]:
    """Get it; return milliseconds and the answer."""
    start = perf_counter()
    response = await client.get(f"/api/{path}", params=params)
    took = (perf_counter() - start) * 1000
    response.raise_for_status()
    return took, response.json()


async def measure_log(folder: Path, megabytes: int) -> None:
    """Measure one log."""
    store = JsonlStore(folder / f"{megabytes}")
    size = write_large(store, "large", megabytes)
    async with served(store) as client:
        listed, _ = await timed(client, "runs")
        head, _ = await timed(client, "run", run="large")
        first, page = await timed(client, "items", run="large")
        start = perf_counter()
        while not (await timed(client, "run", run="large"))[1]["indexed"]["is_complete"]:
            pass
        indexed = (perf_counter() - start) * 1000
        turns = (await timed(client, "run", run="large"))[1]["turns"]
        numbers = range(1, turns, max(1, turns // 20))
        pages = [await timed(client, "items", run="large", turn=number) for number in numbers]
        last, _ = await timed(client, "items", run="large", before=10**9)
        middle, _ = await timed(client, "request", run="large", turn=turns // 2, force=1)
    read = max([data["bytes_read"] for _, data in [*pages, (first, page)]])
    print(
        f"{size / 1e6:7.1f} MB  first screen {listed + head + first:6.1f} ms"
        f" (list {listed:.1f}, head {head:.1f}, items {first:.1f})"
        f"  page {median([ms for ms, _ in pages]):5.1f} ms, at most"
        f" {max([ms for ms, _ in pages]):5.1f} ms and {read / 1e6:.2f} MB read"
        f"  end {last:5.1f} ms  index {indexed:6.0f} ms  request {middle:6.0f} ms"
    )


async def measure_list(folder: Path, count: int) -> None:
    """Measure a list of many runs."""
    store = JsonlStore(folder / "many")
    write_many(store, count)
    async with served(JsonlStore(folder / "many")) as client:
        first, _ = await timed(client, "runs")
        second, data = await timed(client, "runs")
        while data["known"] < data["of"]:
            _, data = await timed(client, "runs")
        later = median([(await timed(client, "runs", after=data["next"]))[0] for _ in range(20)])
        search, found = await timed(client, "runs", q="repair parser")
    print(
        f"{count:,} runs  first list {first:.0f} ms, again {second:.1f} ms,"
        f" next page {later:.1f} ms, search {search:.0f} ms ({found['total']:,} found)"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 20, 200], help="in MB")
    parser.add_argument("--runs", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in options.sizes:
            await measure_log(Path(folder), megabytes)
        if options.runs:
            await measure_list(Path(folder), options.runs)


if __name__ == "__main__":
    asyncio.run(main())
