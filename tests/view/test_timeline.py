"""Items and indexes of real runs of all kinds: whatever happens in a run, the page can show it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clark_agent.run_log import LoadedRun, MemoryStore, RunStore, fold, usage_tree
from clark_agent.run_log.prefix import prefix_of
from clark_agent.run_log.records import Answered, Asked, ContextEdited, RunEnded
from clark_agent.types import Usage
from clark_agent.view import index as indexing
from clark_agent.view import shapes
from clark_agent.view.index import LogIndex
from clark_agent.view.items import Answer, Item, OtherRecord, RequestSent, Tokens
from clark_agent.view.parts import Parts, tokens_of
from clark_agent.view.requests import request_view, sent_request
from clark_agent.view.timeline import Timeline, items_of
from tests.run_log import stories, waiting_stories

NAMES = [*stories.STORIES, *stories.FAILURES]


async def all_runs(name: str) -> tuple[RunStore, list[LoadedRun]]:
    """The runs of a story."""
    if name in NAMES:
        store = (await stories.told(name)).store
    else:
        _, _, ordered, _ = await waiting_stories.live(name)
        store = ordered
    return store, [store.load(run.run_id) for run in store.runs()]


every_story = pytest.mark.parametrize("name", [*NAMES, *waiting_stories.WAITING])


@every_story
async def test_every_record_has_an_item_and_totals_are_right(name: str) -> None:
    store, runs = await all_runs(name)
    for loaded in runs:
        items = items_of(loaded)
        assert [item.seq for item in items] == [record.seq for record in loaded.records]
        assert not any(isinstance(item, OtherRecord) for item in items)
        assert [item.turn for item in items] == sorted([item.turn for item in items])
        msgspec.json.decode(msgspec.json.encode(items), type=list[Item])
        folded = fold(loaded)
        index = LogIndex(store, loaded.run_id)
        assert not index.advance()
        assert index.is_complete
        tree = usage_tree(store, loaded.run_id)
        assert index.usage == tree.usage == sum(folded.aside.values(), folded.usage)
        assert index.turns == folded.asked or index.turns == folded.asked + 1
        assert index.model_calls == tree.model_calls
        assert index.worked_ms == folded.worked_ms
        assert type(index.ending) is type(folded.ending)
        open_now = [w.request for w in index.waits.values() if w.request and not w.is_decided]
        if not isinstance(folded.ending, RunEnded):
            assert {r.request_id for r in open_now} == {r.request_id for r in folded.open_requests}
        rows = index.turn_rows(1, 1000)
        total = sum([_usage(row.tokens) for row in rows], Usage())
        assert total == tree.usage


def _usage(tokens: Tokens) -> Usage:
    return Usage(tokens.input, tokens.output, tokens.cache_write, tokens.cache_read)


@every_story
async def test_pages_from_anywhere_have_the_same_items(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small pages begin in the middle of everything: what an item says does not depend on that."""
    monkeypatch.setattr(indexing, "_RECORDS", 3)
    store, runs = await all_runs(name)
    for loaded in runs:
        timeline = Timeline(Parts())
        due = [timeline.take(record) for record in loaded.records]
        index = LogIndex(store, loaded.run_id)
        for start in range(len(due)):
            assert list(index.items_from(due[start].seq, 4).items) == due[start : start + 4]
            before = index.items_before(due[start].seq, 4)
            assert list(before.items) == due[max(0, start - 4) : start]
            assert before.previous == (before.items[0].seq if start > 4 else None)
        forward: list[Item] = []
        start_seq: int | None = 0
        while start_seq is not None:
            page = index.items_from(start_seq, 5)
            forward += page.items
            start_seq = page.next
        assert forward == due
        for row in index.turn_rows(1, 1000):
            turn = index.items_from(row.seq, 1).items[0]
            assert turn.turn == row.turn
            assert index.turn_at(row.seq) == row.turn


@every_story
async def test_requests_are_rebuilt_as_the_log_describes_them(name: str) -> None:
    store, runs = await all_runs(name)
    for loaded in runs:
        index = LogIndex(store, loaded.run_id)
        index.advance()
        asked = [r for r in loaded.records if isinstance(r.entry, Asked)]
        if asked and isinstance(loaded.records[0].entry, Asked):
            continue
        prefixes = {request.seq: request for request in prefix_of(loaded).requests}
        for record in asked:
            entry = record.entry
            assert isinstance(entry, Asked)
            sent = sent_request(index, entry.turn, entry.attempt)
            if sent is None or sent.seq != record.seq:  # an attempt was repeated after a resume
                continue
            assert sent.prefix == prefixes[record.seq]
            if sent.prefix.is_certain:
                assert len(sent.messages) == entry.messages
            view = request_view(loaded.run_id, sent, 0, 500)
            assert view.total == len(sent.messages)
            kept = sent.prefix.kept_messages
            assert [m.is_new for m in view.messages] == [n >= kept for n in range(view.total)]
            msgspec.json.decode(msgspec.json.encode(view), type=shapes.RequestView)


async def test_what_changes_a_request_is_in_its_turn() -> None:
    _, runs = await all_runs("transforms")
    (loaded,) = runs
    items = items_of(loaded)
    for record, item in zip(loaded.records, items, strict=True):
        if isinstance(record.entry, ContextEdited) and not record.entry.is_lasting:
            later = [i for i in items if i.seq > item.seq]
            following = next(i for i in later if isinstance(i, RequestSent))
            assert item.turn == following.turn


def test_long_texts_are_cut_and_can_be_found() -> None:
    parts = Parts(10)
    text = parts.text("x" * 50, 3, "message.content.0.text")
    assert (text.text, text.length, text.at) == ("x" * 10, 50, 3)
    assert parts.text("x" * 10, 3, "a").path is None


async def test_tokens_keep_their_meaning() -> None:
    store, runs = await all_runs("plain")
    (loaded,) = runs
    answers = [r.entry for r in loaded.records if isinstance(r.entry, Answered)]
    items = [item for item in items_of(loaded) if isinstance(item, Answer)]
    for answer, item in zip(answers, items, strict=True):
        usage: Any = answer.message.usage
        assert item.tokens == (None if usage is None else tokens_of(usage))
    assert isinstance(store, MemoryStore)
