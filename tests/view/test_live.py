"""A run as it goes on: its items arrive while it runs, from any position, with deltas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from clark_agent import AgentContext, CancellationToken, LoopConfig, RunIdentity, run, tool
from clark_agent.run_log import JsonlStore, MemoryStore, RunLog, RunStore
from clark_agent.stream import Chunk, Done, Start, StreamEvent, StreamRequest, TextChunk
from clark_agent.testing import ScriptedStream, call, say
from clark_agent.types import AssistantMessage
from tests.run_log import stories, waiting_stories
from tests.run_log.mailing import until
from tests.run_log.storing import KINDS, open_store
from tests.view.site import site

pytestmark = pytest.mark.slow

RUN = "live"


def make(kind: str, folder: Path) -> Any:
    return MemoryStore() if kind == "memory" else open_store(kind, folder)


each_store = pytest.mark.parametrize("kind", ["memory", *KINDS])


def config(store: RunStore, gates: list[asyncio.Event]) -> LoopConfig:
    """A run that waits at each gate."""

    @tool
    async def wait(number: int) -> str:
        """Wait."""
        await gates[number].wait()
        return f"waited {number}"

    steps = [call("wait", number=n) for n in range(len(gates))]
    stream = ScriptedStream([*steps, say("Over.")])
    return LoopConfig(stream=stream, tools=[wait], run_log=RunLog(store, live=True))


def begin(store: RunStore, gates: list[asyncio.Event]) -> asyncio.Task[Any]:
    context = AgentContext(identity=RunIdentity(RUN))
    return asyncio.create_task(run("go", context, config(store, gates)))


async def is_there(store: RunStore) -> None:
    await until(lambda: any(r.run_id == RUN and r.records > 3 for r in store.runs()))


@each_store
async def test_items_arrive_while_it_runs_and_after_a_cut(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    gates = [asyncio.Event() for _ in range(3)]
    running = begin(store, gates)
    await is_there(store)
    seqs: list[int] = []
    async with site(store) as page:

        async def follow(until_kind: str, open_gate: int | None) -> None:
            """Follow from the last position, and cut the connection at an item."""
            last = seqs[-1] if seqs else None
            async with page.events(RUN, last=last) as events:
                async for name, place, data in events:
                    if name == "item":
                        assert place == str(data["seq"])
                        seqs.append(data["seq"])
                        if open_gate is not None and data["kind"] == "tool_started":
                            gates[open_gate].set()
                            open_gate = None
                        if data["kind"] == until_kind:
                            return

        await follow("tool_result", 0)
        await follow("tool_result", 1)
        await follow("tool_result", 2)
        await follow("ended", None)
        assert seqs == list(range(len(seqs)))
        assert [item["seq"] for item in await page.every_item(RUN)] == seqs
    assert (await running).text == "Over."


@each_store
async def test_it_ends_with_the_run(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    gate = asyncio.Event()
    running = begin(store, [gate])
    await is_there(store)
    async with site(store) as page:
        view = await page.get("run", run=RUN)
        assert view["run"]["status"] == "running"
        seen: list[str] = []
        last: Any = None
        async with page.events(RUN, after=view["last_seq"]) as events:
            async for name, place, data in events:
                seen.append(name)
                if name == "run" and not gate.is_set():
                    assert data["run"]["status"] == "running"
                    gate.set()
                if name == "item":
                    assert int(place or -1) > view["last_seq"]
                last = data
        assert seen[-2:] == ["run", "end"]
        assert last == {}
        assert (await page.get("run", run=RUN))["run"]["status"] == "done"
        page.reading.catalog.refresh(force=True)
        assert (await page.get("runs"))["runs"][0]["status"] == "done"
    await running


class Typing:
    """A model whose answer comes in pieces, the last one only when told."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        message = AssistantMessage.from_text("one two three")
        yield Start(stories.EMPTY)
        yield Chunk(TextChunk("one "))
        while not self.may_end.is_set():
            yield Chunk(TextChunk(""))
            await asyncio.sleep(0.005)
        yield Chunk(TextChunk("two three"))
        yield Done(message)


@each_store
async def test_deltas_come_before_the_answer(kind: str, tmp_path: Path) -> None:
    store, model = make(kind, tmp_path), Typing()
    live = LoopConfig(stream=model, run_log=RunLog(store, live=True))
    context = AgentContext(identity=RunIdentity(RUN))
    running = asyncio.create_task(run("go", context, live))
    await until(lambda: any(r.run_id == RUN for r in store.runs()))
    async with site(store) as page:
        order: list[str] = []
        text = ""
        async with page.events(RUN) as events:
            async for name, place, data in events:
                if name == "delta":
                    assert place is None
                    order += [data["channel"]] if data["channel"] not in order else []
                    text += data["text"]
                    model.may_end.set()
                if name == "item" and data["kind"] == "answer":
                    order.append("answer")
        assert order == ["start", "text", "answer"]
        assert "one two three".endswith(text)
    await running


async def test_a_run_that_waits_stays_open_until_it_is_decided() -> None:
    told, _, store, _ = await waiting_stories.live("one_call_waits")
    del told
    async with site(store) as page:
        items = await page.every_item(waiting_stories.ROOT)
        kinds = [item["kind"] for item in items]
        assert kinds.index("waits") < kinds.index("decided") < kinds.index("ended")
        decided = items[kinds.index("decided")]
        assert (decided["decision"], decided["by"]) == ("allow", "tester")
        assert decided["position"] == 0


async def test_streams_end_when_the_server_does(tmp_path: Path) -> None:
    store = make("jsonl", tmp_path)
    gate = asyncio.Event()
    running = begin(store, [gate])
    await is_there(store)
    async with site(store) as page, page.events(RUN) as events:
        async for name, _, _ in events:
            if name == "run":
                page.app.state.view.close()
    gate.set()
    await running
    left = [name for name in os.listdir(tmp_path / "runs") if name.endswith(".live")]
    assert left == []


@pytest.mark.parametrize("version", ["2.3", "2.4"])
async def test_clients_that_leave_before_the_first_event_hold_nothing(
    version: str, tmp_path: Path
) -> None:
    """How a server tells of that depends on the version of ASGI."""
    store = JsonlStore(tmp_path)
    await begin(store, [])

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if version == "2.4":
            raise OSError
        await asyncio.sleep(0)

    async with site(store) as page:
        (cookie,) = page.client.cookies.items()
        headers = {"host": "127.0.0.1", "cookie": "=".join(cookie)}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": version},
            "method": "GET",
            "path": "/api/events",
            "query_string": f"run={RUN}".encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        for _ in range(110):
            with suppress(ClientDisconnect):
                await page.app(dict(scope), receive, send)
        assert os.listdir(tmp_path) == [store.path_of(RUN).name]
        async with page.events(RUN) as events:
            names = [name async for name, _, _ in events]
        assert names[-1] == "end"


async def test_what_is_after_the_end_is_nothing() -> None:
    played = await stories.told("plain")
    async with site(played.store) as page:
        names = []
        async with page.events(played.run_id, after=10_000) as events:
            names = [name async for name, _, _ in events]
        assert names == ["run", "end"]


async def test_damage_ends_a_stream_with_its_place(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    run_id = (await stories.tell("batches", RunLog(store))).run_id
    path = store.path_of(run_id)
    lines = path.read_bytes().split(b"\n")
    lines[5] = b"{}"
    path.write_bytes(b"\n".join(lines))
    async with site(store) as page:
        async with page.events(run_id) as events:
            found = [(name, data) async for name, _, data in events]
        assert [data["seq"] for name, data in found if name == "item"] == [0, 1, 2, 3, 4]
        name, data = found[-1]
        assert (name, data["error"]) == ("failed", "damaged")
        assert "line 6" in data["message"]
