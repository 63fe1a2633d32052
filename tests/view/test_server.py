"""What the page of runs gets from its server, for each kind of store."""

from __future__ import annotations

import base64
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clark_agent import (
    AgentContext,
    LoopConfig,
    ModelRetry,
    Price,
    RunIdentity,
    ToolResult,
    UserMessage,
    agent_tool,
    run,
    tool,
)
from clark_agent.messages.wire import encode_json
from clark_agent.run_log import (
    JsonlStore,
    MemoryStore,
    RunLog,
    RunStore,
    deliver,
    span_tree,
    usage_tree,
)
from clark_agent.run_log._checksums import seal_all
from clark_agent.run_log.records import Entry, Record, RunBegan, RunEnded
from clark_agent.testing import FakeClock, ScriptedStream, call, say
from clark_agent.types import ImageContent, TextContent, Usage
from clark_agent.view import shapes
from clark_agent.view.export import write_run
from clark_agent.view.items import Item
from tests.run_log import stories
from tests.run_log.storing import KINDS, open_store
from tests.view.site import site

pytestmark = pytest.mark.slow

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
each_store = pytest.mark.parametrize("kind", ["memory", *KINDS])


def make(kind: str, folder: Path) -> Any:
    return MemoryStore() if kind == "memory" else open_store(kind, folder)


def checked(data: Any, kind: Any) -> Any:
    """The data as its shape."""
    return msgspec.convert(data, kind, strict=True)


@tool
def look(what: str) -> ToolResult:
    """Look at something."""
    picture = ImageContent(f"data:image/png;base64,{PIXEL}", "image/png", "a pixel")
    svg = ImageContent("data:image/svg+xml;base64,PHN2Zy8+")
    far = ImageContent("https://example.com/x.png")
    text = TextContent(f"{what}: " + "z" * 9000)
    details = {"diff": "@@ -1 +1 @@\n-a\n+b\n", "n": 1}
    return ToolResult((text, picture, svg, far), details=details, narration="Looked.")


@tool
def fail() -> str:
    """Fail."""
    raise ModelRetry("it is broken")


def config(store: RunStore, *steps: Any, **settings: Any) -> LoopConfig:
    stream = ScriptedStream(steps or [call("look", what="the sea"), call("fail"), say("All seen.")])
    return LoopConfig(
        stream=stream,
        tools=[look, fail],
        run_log=RunLog(store),
        model_id="gpt-5",
        agent_name="viewer",
        **settings,
    )


async def one_run(store: RunStore, run_id: str = "r1", prompt: str = "What is there?") -> str:
    context = AgentContext("You look.", identity=RunIdentity(run_id, conversation_id="talk"))
    await run(UserMessage(prompt), context, config(store))
    return run_id


@each_store
async def test_a_run_and_its_timeline(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    run_id = await one_run(store)
    async with site(store, where="here") as page:
        session = checked(await page.get("session"), shapes.Session)
        assert (session.where, session.can_write) == ("here", False)
        view = checked(await page.get("run", run=run_id), shapes.RunView)
        assert (view.run.status, view.run.agent, view.run.model) == ("done", "viewer", "gpt-5")
        assert (view.run.task, view.turns, view.tool_calls) == ("What is there?", 3, 2)
        assert view.indexed.is_complete
        assert view.last_seq == view.run.records - 1
        items = await page.every_item(run_id, limit=4)
        assert [item["seq"] for item in items] == list(range(view.run.records))
        checked(items, list[Item])
        answers = [item for item in items if item["kind"] == "answer"]
        assert [a["turn"] for a in answers] == [1, 2, 3]
        (calling,) = answers[0]["blocks"]
        assert (calling["kind"], calling["name"], calling["summary"]) == (
            "call",
            "look",
            "what='the sea'",
        )
        looked, failed = [item for item in items if item["kind"] == "tool_result"]
        assert (looked["name"], looked["result"]["narration"]) == ("look", "Looked.")
        assert looked["result"]["diff"]["text"].startswith("@@")
        assert (failed["result"]["is_error"], failed["position"]) == (True, 0)
        turns = checked(await page.get("turns", run=run_id), shapes.TurnList)
        assert [(t.turn, t.calls, t.errors) for t in turns.turns] == [
            (1, 1, 0),
            (2, 1, 1),
            (3, 0, 0),
        ]
        part = await page.get("turns", run=run_id, limit=2, **{"from": 2})
        assert [t["turn"] for t in part["turns"]] == [2, 3]
        from_turn = await page.get("items", run=run_id, turn=3)
        assert from_turn["items"][0]["turn"] == 3
        assert from_turn["next"] is None
        last = await page.get("items", run=run_id, before=from_turn["items"][0]["seq"], limit=3)
        assert last["items"][-1]["seq"] == from_turn["items"][0]["seq"] - 1
        assert len(last["items"]) == 3
        assert last["next"] == from_turn["items"][0]["seq"]


@each_store
async def test_long_texts_come_in_pieces_and_images_as_files(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    run_id = await one_run(store)
    async with site(store) as page:
        items = await page.every_item(run_id)
        looked = next(item for item in items if item["kind"] == "tool_result")
        text, picture, svg, far = looked["result"]["blocks"]
        assert (len(text["text"]["text"]), text["text"]["length"]) == (4000, 9009)
        address = {"at": text["text"]["at"], "path": text["text"]["path"]}
        whole = ""
        while len(whole) < 9009:
            piece = await page.get("piece", run=run_id, start=len(whole), length=3500, **address)
            assert piece["length"] == 9009
            whole += piece["text"]
        assert whole == "the sea: " + "z" * 9000
        response = await page.client.get(
            "/api/image", params={"run": run_id, "at": picture["at"], "path": picture["path"]}
        )
        assert response.headers["content-type"] == "image/png"
        assert response.content == base64.b64decode(PIXEL)
        for other in (svg, far):
            assert (other["at"], other["path"], other["data"]) == (None, None, None)
        assert far["url"] == "https://example.com/x.png"
        for path in (
            picture["path"].replace(".1.", ".2."),
            "result.content.0.text",
            "x",
            "",
            "a.b",
        ):
            await page.get("image", run=run_id, code=404, at=picture["at"], path=path)
        for path in ("nothing", "result.content.99.text", "result.content.x", "sent.messages.1"):
            await page.get("piece", run=run_id, code=404, at=picture["at"], path=path)
        await page.get("piece", run=run_id, code=404, at=9999, path="result")


@each_store
async def test_what_the_model_saw(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    run_id = await one_run(store)
    async with site(store) as page:
        first = checked(await page.get("request", run=run_id, turn=1), shapes.RequestView)
        assert (first.system_prompt.text, first.total) == ("You look.", 1)
        assert {t.name for t in first.tools} == {"look", "fail"}
        second = checked(await page.get("request", run=run_id, turn=2), shapes.RequestView)
        assert [m.role for m in second.messages] == ["assistant", "tool_result"]
        assert (second.total, second.first) == (3, 1)
        assert second.prefix is not None
        assert second.prefix.reuse == 1.0
        every = await page.get("request", run=run_id, turn=2, **{"from": 0})
        assert [m["is_new"] for m in every["messages"]] == [False, True, True]
        long = every["messages"][2]["blocks"][0]["text"]
        piece = await page.get("piece", run=run_id, at=long["at"], path=long["path"], start=8999)
        assert piece["text"] == "z" * 10
        answer = await page.get("request", run=run_id, turn=9, code=404)
        assert "turn 9" in answer["message"]
        await page.get("request", run=run_id, turn=1, code=404, attempt=2)


async def test_which_plugin_changed_a_request() -> None:
    played = await stories.told("transforms")
    async with site(played.store) as page:
        found: list[Any] = []
        view = await page.get("run", run=played.run_id)
        for turn in range(1, view["turns"] + 1):
            request = await page.get("request", run=played.run_id, turn=turn)
            found += [edit["plugin"] for edit in request["edits"]]
            change = request["prefix"]["change"]
            if change is not None:
                assert change["part"] in ("messages", "tools")
                assert change["causes"][0]["name"] in found
                assert request["replaced"]
        assert found


async def many_runs(store: RunStore, count: int) -> None:
    """Write logs of many small runs, quickly."""
    for number in range(count):
        run_id = f"run-{number:05}"
        parent = f"run-{number - 1:05}" if number % 10 == 9 else None
        identity = RunIdentity(run_id, parent, int(parent is not None), f"talk {number % 7}")
        began = RunBegan(
            identity=identity,
            prompts=(UserMessage(f"Task number {number} of the bread baker"),),
            model_id=("gpt-5", "claude-sonnet-4-5")[number % 2],
            agent_name=("baker", "miller", None)[number % 3],
        )
        usage = Usage(1000, 10)
        outcome = "done" if number % 5 else "max_turns"
        entries: list[Entry] = [began, RunEnded(outcome=outcome, usage=usage, tree_usage=usage)]
        records = [Record(2, n, run_id, 1000 * number + n, e) for n, e in enumerate(entries)]
        if number % 50 == 0:
            records = records[:1]
        seal_all(records)
        appender = store.create(run_id)
        for record in records:
            appender.append(record, encode_json(record))
        appender.close()
        await appender.barrier()


async def written(store: RunStore, run_id: str, parent: str | None, depth: int) -> None:
    """Write the log of a run that has just begun, with any parent."""
    began = RunBegan(identity=RunIdentity(run_id, parent, depth), prompts=(UserMessage(run_id),))
    record = Record(2, 0, run_id, ord(run_id[0]), began)
    seal_all([record])
    appender = store.create(run_id)
    appender.append(record, encode_json(record))
    appender.close()
    await appender.barrier()


@each_store
async def test_a_run_whose_parent_is_not_there_is_outermost(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    for run_id, parent, depth in (("b", "a", 1), ("c", "b", 2), ("d", "gone", 4), ("e", "d", 5)):
        await written(store, run_id, parent, depth)
    async with site(store) as page:
        found = await page.get("runs")
        assert [(row["run_id"], row["children"]) for row in found["runs"]] == [("d", 1), ("b", 1)]
        assert (await page.get("runs", all="1"))["total"] == 4
        assert [row["run_id"] for row in (await page.get("runs", parent="b"))["runs"]] == ["c"]
        assert (await page.get("run", run="b"))["parents"] == []
        view = await page.get("run", run="c")
        assert (view["parents"], view["run"]["parent_run_id"]) == (["b"], "b")


@each_store
async def test_parents_in_a_circle_end(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    circles = (("self", "self", 1), ("a", "c", 1), ("b", "a", 2), ("c", "b", 1), ("d", "e", 1))
    for run_id, parent, depth in (*circles, ("e", "d", 1)):
        await written(store, run_id, parent, depth)
    async with site(store) as page:
        listed = (await page.get("runs"))["runs"]
        assert sorted(row["run_id"] for row in listed) == ["a", "c", "d", "e", "self"]
        for run_id, *_ in circles:
            view = await page.get("run", run=run_id)
            below = ["b"] if run_id == "a" else []
            assert [child["run"]["run_id"] for child in view["children"]] == below
            assert view["parents"] == (["a"] if run_id == "b" else [])
            assert [child.run_id for child in usage_tree(store, run_id).children] == below
            assert len([*span_tree(store, run_id).walk()]) == 1 + len(below)
            assert write_run(store, run_id, StringIO()) == ()
            assert deliver(store, run_id, "paid", id=run_id)
            assert not deliver(store, run_id, "paid", id=run_id)


@each_store
async def test_the_list_is_filtered_searched_and_paged(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    await many_runs(store, 120)
    prices = {"gpt-5": Price(input=10, output=100)}
    async with site(store, prices=prices) as page:

        async def listed(**query: Any) -> list[Any]:
            found: list[Any] = []
            after: str | None = ""
            total = 0
            while after is not None:
                data = checked(await page.get("runs", after=after, **query), shapes.RunList)
                found += data.runs
                after = data.next
                total = data.total
            assert len(found) == total
            return found

        await page.reading.runs(limit=1)
        while page.reading.catalog.look():
            pass
        runs = await listed(limit=25)
        assert [r.run_id for r in runs] == [
            f"run-{n:05}" for n in range(119, -1, -1) if n % 10 != 9
        ]
        assert len(await listed(all="1", limit=50)) == 120
        baker = await listed(agent="baker")
        assert {r.agent for r in baker} == {"baker"}
        both = await listed(agent="baker", model="gpt-5", status="done")
        assert {(r.agent, r.model, r.status) for r in both} == {("baker", "gpt-5", "done")}
        assert {r.cost for r in both} == {0.011}
        running = await listed(status="running")
        assert [r.run_id for r in running] == ["run-00100", "run-00050", "run-00000"]
        assert running[0].tokens is None
        children = await listed(parent="run-00018")
        assert [r.run_id for r in children] == ["run-00019"]
        parent = next(r for r in runs if r.run_id == "run-00018")
        assert parent.children == 1
        found = await listed(q="number 77 bread")
        assert [r.run_id for r in found] == ["run-00077"]
        by_id = await listed(q="run-00042")
        assert [r.run_id for r in by_id] == ["run-00042"]
        assert await listed(q="butter") == []
        odd = await listed(q='"; DROP TABLE runs; -- *()')
        assert odd == []
        await page.get("runs", code=400, after="x")
        await page.get("runs", code=400, limit=1000)
        assert (await page.get("session"))["search"] == (
            "full_text" if kind == "sqlite" else "scan"
        )


@each_store
async def test_a_search_finds_what_was_said_later(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    await one_run(store, "r1")
    await one_run(store, "r2", "Something else?")
    async with site(store) as page:
        found = await page.get("runs", q="seen all")
        assert {r["run_id"] for r in found["runs"]} == {"r1", "r2"}
        row = found["runs"][0]
        assert "All seen." in row["snippet"]
        item = await page.get("items", run=row["run_id"], limit=1, **{"from": row["snippet_seq"]})
        assert item["items"][0]["kind"] == "answer"
        (only,) = (await page.get("runs", q="something"))["runs"]
        assert only["run_id"] == "r2"


@each_store
async def test_child_runs_are_at_their_calls(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    helper = LoopConfig(
        stream=ScriptedStream([say("Helped.")] * 3), model_id="small", run_log=RunLog(store)
    )
    asking = agent_tool("helper", "Helps.", helper)
    steps: list[Any] = [call("helper", task="a"), call("helper", task="b"), say("Done.")]
    outer = LoopConfig(
        stream=ScriptedStream(steps), tools=[asking], run_log=RunLog(store), clock=FakeClock()
    )
    await run("go", AgentContext("", identity=RunIdentity("top")), outer)
    async with site(store) as page:
        view = checked(await page.get("run", run="top"), shapes.RunView)
        assert [(c.turn, c.position) for c in view.children] == [(1, 0), (2, 0)]
        child = view.children[1].run
        assert (child.task, child.depth, child.parent_run_id) == ("b", 1, "top")
        second = await page.get("items", run="top", turn=2, limit=3)
        assert [c["run"]["run_id"] for c in second["children"]] == [child.run_id]
        turns = await page.get("turns", run="top")
        assert [t["has_children"] for t in turns["turns"]] == [True, True, False]
        below = await page.get("run", run=child.run_id)
        assert below["parents"] == ["top"]
        assert below["run"]["model"] == "small"


async def test_two_runs_side_by_side(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    await one_run(store, "r1")
    await one_run(store, "r2")
    await one_run(store, "r3", "Another question")
    async with site(store) as page:
        same = checked(await page.get("diff", a="r1", b="r2"), shapes.DiffView)
        assert same.difference is None
        assert (same.common, same.a_total) == (6, 6)
        other = checked(await page.get("diff", a="r1", b="r3"), shapes.DiffView)
        assert other.common == 0
        assert other.difference is not None
        assert "What is there?" in other.difference.first.text
        assert "Another question" in other.difference.text
        assert [row.is_same for row in other.rows] == [False, True, True, True, True, True]
        part = await page.get("diff", a="r1", b="r3", limit=2, **{"from": 1})
        assert [row["index"] for row in part["rows"]] == [1, 2]
        assert part["next"] == 3
        long = next(
            b
            for r in other.rows
            if r.a
            for b in r.a.blocks
            if getattr(b, "text", None) and b.text.path
        )
        piece = await page.get("piece", run="r1", at=long.text.at, path=long.text.path, start=9000)
        assert piece["text"] == "z" * 9
        await page.get("diff", code=404, a="r1", b="none")
        await page.get("diff", code=400, a="r1")


async def test_damage_is_shown_and_the_rest_can_be_read(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    run_id = await one_run(store)
    path = store.path_of(run_id)
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    lines[6] = lines[6][:20] + b"?" + lines[6][21:]
    path.write_bytes(b"\n".join(lines))
    async with site(store) as page:
        view = checked(await page.get("run", run=run_id), shapes.RunView)
        (damage,) = view.damage
        assert (damage.seq, damage.where.split(",")[0]) == (6, "line 7")
        page_ = await page.get("items", run=run_id)
        assert [item["seq"] for item in page_["items"]] == [0, 1, 2, 3, 4, 5]
        assert page_["damage"]["seq"] == 6
        assert page_["next"] is None
        answer = await page.get("diff", code=422, a=run_id, b=run_id)
        assert answer["error"] == "damaged"
        (row,) = (await page.get("runs", status="damaged"))["runs"]
        assert (row["status"], view.run.status, damage.is_newer) == ("damaged", "damaged", False)
        path.write_bytes(whole)  # it is mended
        page.reading._indexes.clear()
        assert (await page.get("run", run=run_id))["run"]["status"] == "done"
        (row,) = (await page.get("runs"))["runs"]
        assert row["status"] == "done"


async def test_damaged_logs_that_cannot_be_listed_are_named(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    await one_run(store)
    await one_run(store, "renamed")
    store.path_of("renamed").rename(tmp_path / "other.jsonl")
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "notes.txt").write_text("These are notes.\n")
    (tmp_path / "begun.jsonl").write_text('{"v":2,"seq":0')
    (tmp_path / "empty.jsonl").touch()
    async with site(store) as page:
        found = checked(await page.get("runs"), shapes.RunList)
        assert [row.run_id for row in found.runs] == ["r1"]
        assert found.unreadable == ("broken.jsonl", "other.jsonl")
        (tmp_path / "broken.jsonl").unlink()
        (tmp_path / "other.jsonl").rename(store.path_of("renamed"))
        page.reading.catalog.refresh(force=True)
        found = checked(await page.get("runs"), shapes.RunList)
        assert (found.total, found.unreadable) == (2, ())


ODD_IDS = (
    "a/b", "a b", "é", "x?y#z", "%41", "turns", "job", "job/items", "job/turns", "job/events",
    "job/image", "job/requests/1", "job/steer", ".", "..", "/", "/job", "job/", "\n", "日本",
    "a&run=b",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "sqlite"])
async def test_a_run_may_have_any_id(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    for name in ODD_IDS:
        await one_run(store, name)
    async with site(store, can_write=True) as page:
        assert {row["run_id"] for row in (await page.get("runs"))["runs"]} == set(ODD_IDS)
        for name in ODD_IDS:
            assert (await page.get("run", run=name))["run"]["run_id"] == name
            items = await page.get("items", run=name, limit=1)
            assert items["items"][0]["kind"] == "began"
            assert (await page.get("request", run=name, turn=1))["run_id"] == name
            answer = await page.post("cancel", {}, code=409, run=name)
            assert repr(name) in answer["message"]
        for name in ("..", "job/events", "\n"):
            async with page.events(name) as events:
                assert [event async for event, *_ in events][-1] == "end"


async def test_wrong_parameters_are_explained() -> None:
    played = await stories.told("plain")
    async with site(played.store) as page:
        for query in ({"from": "-1"}, {"limit": "0"}, {"turn": "1e3"}, {"before": "9" * 40}):
            answer = await page.get("items", run=played.run_id, code=400, **query)
            assert next(iter(query)) in answer["message"]
        answer = await page.get("items", run=played.run_id, code=404, turn=999)
        assert "no turn 999" in answer["message"]
        await page.get("run", run="none", code=404)
        await page.get("nothing", code=404)
        await page.get("events", run=played.run_id, code=400, after="x")
        for path in ("run", "items", "events", "request"):
            assert "run must be" in (await page.get(path, code=400))["message"]
        assert "turn must be" in (await page.get("request", run="x", code=400))["message"]
        for after in ("x", "-1", "1", "5.", ".x", "1e5.x", "9" * 30 + ".x"):
            answer = await page.get("runs", code=400, after=after)
            assert answer["message"].startswith("after must be"), answer
