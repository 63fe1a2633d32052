"""What a run has beside its turns: models that plugins ask, compactions, and large results."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clark_agent import Agent, Price, RunIdentity, UserMessage
from clark_agent.messages.wire import encode_json
from clark_agent.plugins.compaction import mark_of
from clark_agent.run_log import (
    JsonlStore,
    MemoryStore,
    RunLog,
    SqliteStore,
    check_prefix,
    usage_tree,
)
from clark_agent.run_log._checksums import seal
from clark_agent.run_log.records import Consulted, MessagesAdded
from clark_agent.testing import ScriptedStream
from clark_agent.types import CustomMessage
from clark_agent.view import items
from clark_agent.view.export import write_run
from clark_agent.view.index import LogIndex
from clark_agent.view.parts import tokens_of
from clark_agent.view.requests import sent_request
from tests.view.site import Site, site
from tests.view.stories import LOG, MODEL, OTHER_MODEL, SUMMARY, Audit

pytestmark = pytest.mark.slow

PRICES = {MODEL: Price(input=3.0, output=15.0), OTHER_MODEL: Price(input=0.5, output=2.0)}
each_store = pytest.mark.parametrize("kind", ["memory", "jsonl", "sqlite"])


def make(kind: str, folder: Path) -> Any:
    if kind == "memory":
        return MemoryStore()
    return JsonlStore(folder) if kind == "jsonl" else SqliteStore(folder / "runs.db")


async def audited(kind: str, folder: Path) -> tuple[Any, Audit]:
    store = make(kind, folder)
    audit = Audit(store)
    await audit.run()
    return store, audit


def close(store: Any) -> None:
    if isinstance(store, SqliteStore):
        store.close()


async def items_of_kind(page: Site, kind: str) -> list[Any]:
    return [item for item in await page.every_item("audit") if item["kind"] == kind]


@each_store
async def test_models_that_plugins_ask_are_in_the_timeline_and_in_the_totals(
    kind: str, tmp_path: Path
) -> None:
    store, _ = await audited(kind, tmp_path)
    async with site(store, prices=PRICES) as page:
        first, second, *summaries = await items_of_kind(page, "consulted")
        assert (first["plugin"], first["model"], first["turn"]) == ("adviser", OTHER_MODEL, 1)
        assert first["blocks"][0]["text"]["text"] == "Look at the *night* first."
        assert (first["error"], first["ms"], first["messages"]) == (None, 1_500, 1)
        assert first["tokens"] == {"input": 200, "output": 10, "cache_read": 0, "cache_write": 0}
        assert first["cost"] == pytest.approx((200 * 0.5 + 10 * 2.0) / 1e6)

        # A failure, whose text is cut and can be had.
        assert (second["error"], second["turn"], second["blocks"]) == ("fatal", 2, [])
        failure = second["error_text"]
        assert len(failure["text"]) == 4_000 < failure["length"]
        where = {"at": failure["at"], "path": failure["path"]}
        rest = await page.get("piece", run="audit", start=4_000, **where)
        assert failure["text"] + rest["text"] == "the transport raised ConnectionError: " + (
            "no route to " + "x" * 9_000
        )

        # The summaries come from the model of the run.
        assert summaries
        assert {each["plugin"] for each in summaries} == {"compaction"}
        assert {each["model"] for each in summaries} == {None}

        # Totals of the run and of its turns, with the price of each model.
        spent = usage_tree(store, "audit")
        cost = sum([PRICES[part.model.names[0]].of(part.usage) for part in spent.by_model])
        assert len(spent.by_model) == 2
        view = await page.get("run", run="audit")
        assert view["tokens"] == msgspec.to_builtins(tokens_of(spent.usage)) == view["tree_tokens"]
        assert view["model_calls"] == spent.model_calls
        assert [view[name] for name in ("cost", "tree_cost")] == pytest.approx([cost, cost])
        turns = (await page.get("turns", run="audit"))["turns"]
        assert sum([turn["cost"] for turn in turns]) == pytest.approx(cost)
        assert sum([turn["tokens"]["input"] for turn in turns]) == spent.usage.input_tokens
        assert (turns[0]["ms"], turns[0]["model_ms"]) == (1_900, 1_900)
        assert turns[0]["began_at"] == first["at"] - 1_500
    close(store)


@each_store
async def test_a_cost_is_unknown_if_one_price_is(kind: str, tmp_path: Path) -> None:
    store, _ = await audited(kind, tmp_path)
    records = store.load("audit").records
    (model,) = {r.entry.model for r in records if isinstance(r.entry, Consulted) and r.entry.model}
    index = LogIndex(store, "audit", prices=PRICES)
    index.advance()
    known = index.cost
    assert known is not None
    index.spent.aside[msgspec.structs.replace(model, model="a model without a price")] = index.usage
    unknown = index.cost
    assert unknown is None
    close(store)


@each_store
async def test_compactions_say_what_they_replaced(kind: str, tmp_path: Path) -> None:
    store, audit = await audited(kind, tmp_path)
    added = [r for r in store.load("audit").records if isinstance(r.entry, MessagesAdded)]
    marks = {r.seq: mark for r in added for m in r.entry.messages if (mark := mark_of(m))}
    assert marks
    async with site(store) as page:
        found = {i["seq"]: i for i in await items_of_kind(page, "added") if i["seq"] in marks}
        assert [*found] == [*marks]
        for seq, mark in marks.items():
            (block,) = found[seq]["messages"][0]["blocks"]
            assert block["kind"] == "compaction"
            for name in ("first_turn", "last_turn", "messages", "tokens_before", "tokens_after"):
                assert block[name] == getattr(mark, name)
            assert block["tokens_before"] > block["tokens_after"]
            assert SUMMARY in block["text"]["text"]
            assert found[seq]["plugin"] == "compaction"
        compacted = {item["turn"] for item in found.values()}
        turns = (await page.get("turns", run="audit"))["turns"]
        assert {turn["turn"] for turn in turns if turn["is_compacted"]} == compacted
        for turn in compacted:
            request = await page.get("request", run="audit", turn=turn)
            causes = request["prefix"]["change"]["causes"]
            assert causes == [{"kind": "plugin", "name": "compaction"}]

        # Every request is rebuilt as the model got it.
        index = LogIndex(store, "audit")
        index.advance()
        assert len(audit.sent) == len(turns)
        for number, sent in enumerate(audit.sent, 1):
            request_sent = sent_request(index, number)
            assert request_sent is not None
            assert list(request_sent.messages) == list(sent)
            assert request_sent.prefix == check_prefix(store, "audit").requests[number - 1]
    close(store)


@each_store
async def test_a_result_that_is_kept_aside_is_read_in_pieces(kind: str, tmp_path: Path) -> None:
    store, _ = await audited(kind, tmp_path)
    async with site(store) as page:
        item = (await items_of_kind(page, "tool_result"))[0]
        kept = item["result"]["kept"]
        assert kept["data"] == 0
        text = kept["text"]
        assert (text["text"], text["length"]) == ("", len(LOG))
        assert item["given"]["blocks"] == item["result"]["blocks"]  # not the emptied ones
        reads: list[tuple[int, int]] = []
        plain = store.kept

        def counted(run_id: str, name: str, start: int, stop: int) -> Any:
            reads.append((start, stop))
            return plain(run_id, name, start, stop)

        page.reading._store = Counted(store, counted)
        where = {"at": text["at"], "path": text["path"]}
        whole = ""
        while len(whole) < len(LOG):
            piece = await page.get("piece", run="audit", start=len(whole), length=100_000, **where)
            assert (piece["length"], piece["start"]) == (len(LOG), len(whole))
            whole += piece["text"]
        assert whole == LOG
        assert max(stop - start for start, stop in reads) <= 5  # of 32,768 characters each
        assert (await page.get("piece", run="audit", start=400_000, **where))["text"] == ""

        # Only results that are kept aside can be read, and only while the store has them.
        answer = await page.get("piece", run="audit", code=404, at=0, path="kept")
        assert answer["message"] == "record 0 has no result that is kept aside"
        page.reading._store = Counted(store, lambda *where: ())
        answer = await page.get("piece", run="audit", code=404, **where)
        assert answer["message"] == "the store does not have this result any more"
    close(store)


class Counted:
    """A store with another way to read what is kept aside."""

    def __init__(self, store: Any, kept: Any) -> None:
        self._store = store
        self.kept = kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@each_store
async def test_an_export_has_a_part_of_what_is_kept_aside(kind: str, tmp_path: Path) -> None:
    store, _ = await audited(kind, tmp_path)
    file = io.StringIO()
    assert write_run(store, "audit", file) == ()
    data = embedded(file.getvalue())["runs"]["audit"]
    (result, *_) = [item for item in data["items"] if item["kind"] == "tool_result"]
    text = result["result"]["kept"]["text"]
    assert (text["text"], text["length"]) == (LOG[:200_000], len(LOG))
    kinds = {item["kind"] for item in data["items"]}
    assert "consulted" in kinds
    assert len([turn for turn in data["turns"] if turn["is_compacted"]]) > 0

    # Without what is kept, the rest of the run is there.
    gone = io.StringIO()
    without: Any = Counted(store, lambda *where: ())
    assert write_run(without, "audit", gone) == ()
    data = embedded(gone.getvalue())["runs"]["audit"]
    (result, *_) = [item for item in data["items"] if item["kind"] == "tool_result"]
    assert result["result"]["kept"]["text"]["text"] == ""
    close(store)


def embedded(page: str) -> Any:
    """The data in an exported file."""
    start = page.index('id="embedded"')
    start = page.index(">", start) + 1
    return json.loads(page[start : page.index("</script>", start)])


# --- what the page does not know ------------------------------------------------------------------

ODD = [
    CustomMessage("", None),
    CustomMessage("compaction", {"text": 7}),
    CustomMessage("compaction", [1, 2]),
    CustomMessage("from_the_future", {"a": [{"b": None}], "": 1.5}),
]


async def test_custom_messages_of_any_kind_are_shown() -> None:
    store = MemoryStore()
    agent = Agent(ScriptedStream(["Yes."]), run_log=RunLog(store))
    await agent.run([UserMessage("Well?"), *ODD], identity=RunIdentity.root("odd"))
    async with site(store) as page:
        began = (await page.every_item("odd"))[0]
        blocks = [message["blocks"][0] for message in began["messages"]]
        assert [block["kind"] for block in blocks] == ["text", *["other"] * 4]
        assert [json.loads(block["data"]["text"]) for block in blocks[1:]] == [
            message.payload for message in ODD
        ]
        assert (await page.get("request", run="odd", turn=1))["total"] == 5
        assert (await page.get("diff", a="odd", b="odd"))["common"] == 6
    assert write_run(store, "odd", io.StringIO()) == ()


async def test_a_record_of_an_unknown_kind_is_named_and_what_comes_before_it_is_shown(
    tmp_path: Path,
) -> None:
    store = JsonlStore(tmp_path)
    audit = Audit(store)
    await audit.run()
    path = tmp_path / "audit.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    before = int(json.loads(lines[8])["crc"], 16)
    made_up = {**json.loads(lines[9]), "entry": {"kind": "made_up", "text": "of a later version"}}
    del made_up["crc"]
    sealed, _ = seal(encode_json(made_up), before)
    path.write_bytes(b"".join([*lines[:9], sealed + b"\n", *lines[10:]]))
    async with site(store) as page:
        view = await page.get("run", run="audit")
        (damage,) = view["damage"]
        assert damage["seq"] == 9
        assert "it is not a record that this version can read" in damage["reason"]
        assert "made_up" in damage["reason"]
        assert damage["is_newer"]
        assert view["run"]["status"] == "newer"
        listed = await page.get("runs", status="newer")
        assert [row["status"] for row in listed["runs"]] == ["newer"]
        first = await page.get("items", run="audit")
        assert [item["seq"] for item in first["items"]] == list(range(9))
        assert first["damage"] == damage
    file = io.StringIO()
    assert write_run(store, "audit", file) == ()
    run = embedded(file.getvalue())["runs"]["audit"]
    assert [item["seq"] for item in run["items"]] == list(range(9))
    assert run["view"]["damage"] == [damage]


def test_a_record_without_an_item_of_its_own_is_shown_as_it_is() -> None:
    """For entries that are added to the vocabulary before the page knows them."""
    from clark_agent.run_log.records import Record, _Entry
    from clark_agent.view.parts import part_at
    from clark_agent.view.timeline import Timeline

    class New(_Entry, frozen=True, tag="new"):
        text: str

    entry: Any = New("x" * 5_000)
    item = Timeline().take(Record(2, 7, "run", 1_000, entry))
    assert isinstance(item, items.OtherRecord)
    assert (item.name, item.data.at) == ("new", 7)
    assert item.data.path is not None
    assert part_at(entry, item.data.path) == {"kind": "new", "text": "x" * 5_000}
