"""Following a run: the same events from every position, in every process, over HTTP, with cuts."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clark_agent import (
    AssistantMessage,
    CancellationToken,
    LoopConfig,
    RunIdentity,
    UserMessage,
    run,
)
from clark_agent import events as ev
from clark_agent.errors import LogDamaged, RunNotFound
from clark_agent.events import AgentEvent, public_event
from clark_agent.messages import encode_json
from clark_agent.run_log import (
    FollowedEvent,
    JsonlStore,
    MemoryStore,
    RunLog,
    RunStore,
    follow,
    sse,
)
from clark_agent.run_log.event_stream import EventStream
from clark_agent.run_log.records import Record, RunBegan, RunEnded, RunResumed, RunSuspended
from clark_agent.run_log.writer import LiveEvent
from clark_agent.stream import Chunk, Done, Start, StreamEvent, StreamRequest, TextChunk
from tests.run_log.mailing import GO, context
from tests.run_log.stories import EMPTY, begin, tell, told
from tests.run_log.storing import KINDS, child, numbered, open_store, said

stores = pytest.mark.parametrize("kind", ["memory", *KINDS])
NAMES = (
    "batches",
    "steering",
    "broken_streams",
    "helpers",
    "nudges",
    "progress",
    "a_tool_is_fatal",
)


def make_store(kind: str, folder: Path) -> Any:
    return MemoryStore() if kind == "memory" else open_store(kind, folder)


def due(records: Sequence[Record]) -> list[FollowedEvent]:
    stream = EventStream()
    return [
        FollowedEvent(record.seq, index, event)
        for record in records
        for index, event in enumerate(stream.take(record))
    ]


async def collected(
    followed: AsyncGenerator[FollowedEvent], count: int | None = None
) -> list[FollowedEvent]:
    found: list[FollowedEvent] = []
    async with aclosing(followed), asyncio.timeout(60):
        async for each in followed:
            found.append(each)
            if len(found) == count:
                break
    return found


# --- from every position ----------------------------------------------------------------------


@stores
@pytest.mark.parametrize("name", NAMES)
async def test_every_position_gives_the_same_stream(kind: str, name: str, tmp_path: Path) -> None:
    played = await told(name)
    store = make_store(kind, tmp_path)
    await write(store, played.records)
    whole = await collected(follow(store, played.run_id))
    assert whole == due(played.records)
    assert len({each.id for each in whole}) == len(whole)
    for record in played.records:
        rest = [each for each in whole if each.seq > record.seq]
        assert await collected(follow(store, played.run_id, after=record.seq)) == rest
        assert await collected(follow(store, played.run_id, after=str(record.seq))) == rest
    for number, each in enumerate(whole, 1):
        assert await collected(follow(store, played.run_id, after=each.id)) == whole[number:]
    assert await collected(follow(store, played.run_id, after=10_000)) == []


async def test_a_stream_of_frames_is_the_same_from_every_position() -> None:
    played = await told("batches")
    whole = [frame async for frame in sse(played.store, played.run_id)]
    events = due(played.records)
    assert whole == [frame_of(each) for each in events]
    for number, each in enumerate(events, 1):
        frames = [frame async for frame in sse(played.store, played.run_id, after=each.id)]
        assert frames == whole[number:]
    assert [frame async for frame in sse(played.store, played.run_id, after="")] == whole


def frame_of(each: FollowedEvent, *, public: bool = True) -> bytes:
    shown = public_event(each.event) if public else each.event
    data = b"" if shown is None else b"data: " + encode_json(shown) + b"\n"
    return f"id: {each.id}\n".encode() + data + b"\n"


async def test_what_is_not_public_only_moves_the_position() -> None:
    played = await told("nudges")
    public = [frame async for frame in sse(played.store, played.run_id)]
    everything = [frame async for frame in sse(played.store, played.run_id, public=False)]
    assert everything == [frame_of(each, public=False) for each in due(played.records)]
    assert len(public) == len(everything)
    hidden = [frame for frame in public if b"data:" not in frame]
    assert hidden
    assert all(frame.startswith(b"id: ") and frame.endswith(b"\n\n") for frame in hidden)
    assert not any(b"system" in frame for frame in public)


@pytest.mark.parametrize(
    "after", ["x", "1.", ".1", "-1", "1.2.3", " 1", "1\n", "٣", 1.5, True, b"1", "9" * 30]
)
def test_a_wrong_position_is_an_error(after: Any) -> None:
    with pytest.raises(ValueError, match="invalid position"):
        follow(MemoryStore(), "r", after=after)
    with pytest.raises(ValueError, match="invalid position"):
        sse(MemoryStore(), "r", after=after)


@pytest.mark.parametrize("heartbeat", [0, -1, float("nan"), True, "1"])
def test_a_wrong_heartbeat_is_an_error(heartbeat: Any) -> None:
    with pytest.raises(ValueError, match="heartbeat"):
        sse(MemoryStore(), "r", heartbeat=heartbeat)


@stores
async def test_an_unknown_run_is_an_error_at_the_first_step(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    for followed in (follow(store, "nobody"), sse(store, "nobody")):
        with pytest.raises(RunNotFound):
            await anext(followed)


async def test_damage_ends_the_stream(tmp_path: Path) -> None:
    played = await told("batches")
    store = JsonlStore(tmp_path)
    await write(store, played.records)
    path = store.path_of(played.run_id)
    lines = path.read_bytes().split(b"\n")
    lines[9] = lines[9].replace(b'"seq"', b'"sex"')
    path.write_bytes(b"\n".join(lines))
    intact = due(played.records[:9])
    following = follow(store, played.run_id)
    assert [await anext(following) for _ in intact] == intact
    with pytest.raises(LogDamaged):
        await anext(following)


# --- runs that wait ---------------------------------------------------------------------------


async def write(store: RunStore, records: Sequence[Record]) -> None:
    first = records[0]
    if first.seq:
        appender = store.reopen(first.run, after=first.seq - 1)
    else:
        appender = store.create(first.run)
    for record in records:
        appender.append(record, encode_json(record))
    appender.close()
    await appender.barrier()


@stores
async def test_a_suspended_run_stays_open(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    began = RunBegan(identity=RunIdentity("r"), prompts=(UserMessage("go", 1),))
    records = numbered("r", [began, said("x"), RunSuspended(time=1)])
    await write(store, records)
    until = await collected(follow(store, "r", until_suspended=True))
    assert until == due(records)
    following = asyncio.create_task(collected(follow(store, "r")))
    await asyncio.sleep(0)
    more = numbered("r", [RunResumed(1), RunEnded(outcome="done")], after=records[-1])
    await write(store, more)
    assert await following == due([*records, *more])
    assert await collected(follow(store, "r", until_suspended=True)) == due([*records, *more])


@stores
async def test_a_heartbeat_while_nothing_happens(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    records = numbered("r", [RunBegan(identity=RunIdentity("r"))])
    await write(store, records)
    frames: list[bytes] = []
    async with aclosing(sse(store, "r", heartbeat=0.01)) as stream, asyncio.timeout(60):
        async for frame in stream:
            frames.append(frame)
            if len(frames) == 6:
                break
    assert frames == [*[frame_of(each) for each in due(records)], *[b":\n\n"] * 3]


@stores
async def test_a_closed_stream_leaves_nothing(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    await write(store, numbered("r", [RunBegan(identity=RunIdentity("r"))]))
    store.load("r")
    files = files_in(tmp_path)
    stream = follow(store, "r")
    await anext(stream)
    await stream.aclose()
    waiting = asyncio.create_task(collected(follow(store, "r"), 100))
    frames = asyncio.create_task(anext_after(sse(store, "r", heartbeat=None), 3))
    for _ in range(20):
        await asyncio.sleep(0)
    for task in (waiting, frames):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert [path for path in open_files(tmp_path) if path not in _DATABASE] == []
    assert files_in(tmp_path) == files
    if isinstance(store, MemoryStore):
        assert store._tails == {}


_DATABASE = ("runs.db", "runs.db-wal", "runs.db-shm")


def open_files(folder: Path) -> list[str]:
    """The names of the files in a folder that this process has open."""
    found: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            found += [path.name] if folder in path.parents else []
    return found


def files_in(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if not path.name.endswith(("-wal", "-shm"))]
    return sorted(found)


async def anext_after(stream: AsyncGenerator[bytes], count: int) -> bytes:
    async with aclosing(stream):
        for _ in range(count):
            await anext(stream)
        return await anext(stream)


# --- deltas -----------------------------------------------------------------------------------


@stores
async def test_deltas_come_while_an_answer_is_streamed(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    seen: list[FollowedEvent] = []
    news = asyncio.Event()
    words = ["To be", " or not", " to be"]

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(EMPTY)
        for number, word in enumerate(words, 1):
            yield Chunk(TextChunk(word))
            while sum(isinstance(each.event, ev.MessageUpdate) for each in seen) < number:
                news.clear()
                await news.wait()
        yield Done(AssistantMessage.from_text("".join(words)))

    async def watch() -> None:
        async with aclosing(follow(store, "r")) as followed:
            async for each in followed:
                seen.append(each)
                news.set()

    log = RunLog(store, live=True)
    began = asyncio.Event()

    def sink(event: AgentEvent) -> Any:
        began.set()
        return following_has_begun()

    async def following_has_begun() -> None:
        while not seen:  # so that there is a tail
            news.clear()
            await news.wait()

    config = LoopConfig(stream=model, run_log=log, event_sink=sink)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(run(GO, context("r"), config))
        await began.wait()
        group.create_task(watch())
    live = [each for each in seen if each.is_live]
    deltas = [ev.MessageUpdate(EMPTY, TextChunk(word)) for word in words]
    assert [each.event for each in live] == [ev.MessageStart(EMPTY), *deltas]
    assert {(each.seq, each.index, each.id) for each in live} == {(0, 4, None)}
    assert recorded(seen) == due(store.load("r").records)
    end = [each.event for each in seen].index(ev.MessageEnd(running.result().messages[-1]))
    assert max(seen.index(each) for each in live) < end


@stores
async def test_a_delta_whose_message_is_there_is_dropped(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    records = numbered("r", [RunBegan(identity=RunIdentity("r")), said("done")])
    await write(store, records[:1])
    following = follow(store, "r")
    found = [await anext(following) for _ in range(3)]

    def publish(seq: int, text: str) -> None:
        event = ev.MessageUpdate(EMPTY, TextChunk(text))
        store.publish("r", encode_json(LiveEvent(seq, event)))

    publish(1, "in time")
    async with asyncio.timeout(60):
        begun = [(await anext(following)).event for _ in range(2)]
        assert begun == [
            ev.MessageStart(EMPTY),
            ev.MessageUpdate(EMPTY, TextChunk("in time")),
        ]
        publish(1, "late")
        store.publish("r", b"rubbish")
        await write(store, records[1:])
        publish(1, "later")
        publish(2, "next")
        while len(found) < 7 or not found[-1].is_live:
            found.append(await anext(following))
    await following.aclose()
    assert found[:-2] == due(records)
    assert found[-2].event == ev.MessageStart(EMPTY)
    assert found[-1].event == ev.MessageUpdate(EMPTY, TextChunk("next"))


async def test_nothing_is_published_unless_it_is_asked_for() -> None:
    class Quiet(MemoryStore):
        def publish(self, run_id: str, data: bytes) -> None:
            raise AssertionError("published")

    played = await tell("batches", RunLog(Quiet()))
    assert played.records
    assert begin("batches").config(RunLog(Quiet())).audience[ev.RequestDelayed] is not None


async def test_frames_of_deltas_have_no_position() -> None:
    store = MemoryStore()
    await write(store, numbered("r", [RunBegan(identity=RunIdentity("r"))]))
    stream = sse(store, "r")
    for _ in range(3):
        await anext(stream)
    event = ev.MessageUpdate(EMPTY, TextChunk("x"))
    store.publish("r", encode_json(LiveEvent(1, event)))
    start = ev.MessageStart(EMPTY)
    assert await anext(stream) == b"data: " + encode_json(start) + b"\n\n"
    assert await anext(stream) == b"data: " + encode_json(event) + b"\n\n"
    await stream.aclose()


# --- other processes, and browsers ------------------------------------------------------------


async def with_cuts(store: RunStore, run_id: str, seed: int) -> list[FollowedEvent]:
    """Follow a run to its end, and begin again after a few events each time."""
    rng = random.Random(seed)
    found: list[FollowedEvent] = []
    while not (found and isinstance(found[-1].event, ev.AgentEnd)):
        after = recorded(found)[-1].id if recorded(found) else None
        found += await collected(follow(store, run_id, after=after), rng.randrange(1, 8))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_of_another_process(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    with child("run_turns", kind, tmp_path) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "begun\n"
        whole, *cut = await asyncio.gather(
            collected(follow(store, "r")), *[with_cuts(store, "r", seed) for seed in range(3)]
        )
        assert await asyncio.to_thread(process.wait) == 0
    records = store.load("r").records
    assert len(records) > 100
    for found in (whole, *cut):
        assert recorded(found) == due(records)
        for before, each in pairwise(found):  # a delta is where the stream is
            assert not each.is_live or (each.seq, each.index) == (before.seq, before.index)


def recorded(found: list[FollowedEvent]) -> list[FollowedEvent]:
    return [each for each in found if not each.is_live]


@asynccontextmanager
async def served(store: RunStore) -> AsyncIterator[str]:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def events(request: Request) -> Response:
        after = request.headers.get("last-event-id")
        frames = sse(store, request.path_params["run_id"], after=after, heartbeat=0.05)
        return StreamingResponse(frames, media_type="text/event-stream")

    app = Starlette(routes=[Route("/runs/{run_id}", events)])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listening = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_browsers_that_are_cut_off_see_everything_once(kind: str, tmp_path: Path) -> None:
    httpx2 = pytest.importorskip("httpx2")
    pytest.importorskip("uvicorn")
    store = open_store(kind, tmp_path)

    async def browse(client: Any, seed: int) -> list[bytes]:
        rng = random.Random(seed)
        frames: list[bytes] = []
        while not (frames and b'"agent_end"' in frames[-1]):
            headers: dict[str, str] = {}
            if frames:
                headers["last-event-id"] = frames[-1].split(b"\n")[0][4:].decode()
            left = rng.randrange(1, 12)
            async with client.stream("GET", "/runs/r", headers=headers) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                rest = b""
                async for data in response.aiter_bytes():
                    *whole, rest = (rest + data).split(b"\n\n")
                    new = [frame + b"\n\n" for frame in whole if frame.startswith(b"id: ")][:left]
                    frames += new
                    left -= len(new)
                    if not left:
                        break
        return frames

    async with served(store) as url:
        with child("run_turns", kind, tmp_path) as process:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "begun\n"
            async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
                found = await asyncio.gather(*[browse(client, seed) for seed in range(3)])
            assert await asyncio.to_thread(process.wait) == 0
    whole = [frame_of(each) for each in due(store.load("r").records)]
    assert [len(frames) for frames in found] == [len(whole)] * 3
    assert all(frames == whole for frames in found)
