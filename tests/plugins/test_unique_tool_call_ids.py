"""Ids are made unique in the request, at the cost of what is new, and in the request alone."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    SystemMessage,
    ToolResultMessage,
    UserMessage,
)
from clark_agent.history import unique_tool_call_ids
from clark_agent.messages.transcript import MessageLog, MessageView
from clark_agent.plugins import UniqueToolCallIds
from clark_agent.plugins.hooks import Hooks
from tests.plugins.support import (
    FEW_IDS,
    NOTES,
    CountingView,
    before_call,
    calling,
    grow,
    heaps,
    result,
    tails,
    turns,
)
from tests.strategies import cuts

CONTEXT = before_call()
# Among them ids that the plugin itself hands out.
AWKWARD_IDS = st.sampled_from(["a", "b", "clark_agent_call_1", "clark_agent_call_2"])


def whole(messages: list[AgentMessage] | tuple[AgentMessage, ...]) -> tuple[AgentMessage, ...]:
    """The transcript renamed in one pass."""
    return unique_tool_call_ids(messages).messages


def call_ids(messages: tuple[AgentMessage, ...]) -> list[str]:
    return [c.id for m in messages if isinstance(m, AssistantMessage) for c in m.tool_calls]


def assert_each_answer_finds_its_call(messages: tuple[AgentMessage, ...]) -> None:
    """Behind each message with calls stand their results, told by the name of the tool."""
    calls: dict[str, str] = {}
    for is_result, run in groupby(messages, lambda m: isinstance(m, ToolResultMessage)):
        if is_result:
            results = [m for m in run if isinstance(m, ToolResultMessage)]
            assert {m.tool_name: m.tool_call_id for m in results} == calls
            assert len(results) == len(calls)
            calls = {}
        else:
            assert not calls, "calls without results"
            for message in run:
                if isinstance(message, AssistantMessage):
                    calls = {c.name: c.id for c in message.tool_calls}
    assert not calls


# --- in pieces as in one pass -----------------------------------------------------------------


@given(heaps().flatmap(cuts))
def test_piece_by_piece_equals_one_pass(pieces: list[tuple[AgentMessage, ...]]) -> None:
    plugin = UniqueToolCallIds()
    for view in grow(pieces):
        assert tuple(plugin.transform_context(view, CONTEXT)) == whole(tuple(view))


_USED = (calling(("a", "look"), ("b", "look")), result("a"), result("b"))
_WAITING = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map(
    lambda ids: (calling(*[(call_id, "look") for call_id in ids]),)
)
# A transcript in pieces, the last of which makes calls of used ids that wait for their results.
WAITING = st.tuples(heaps().flatmap(cuts), _WAITING).map(lambda made: [_USED, *made[0], made[1]])


@given(WAITING, st.lists(FEW_IDS.map(result), max_size=3), st.lists(NOTES, max_size=2))
def test_results_and_then_notes_in_the_tail_are_as_if_they_were_appended(
    pieces: list[tuple[AgentMessage, ...]],
    results: list[AgentMessage],
    notes: list[AgentMessage],
) -> None:
    plugin = UniqueToolCallIds()
    for view in grow(pieces):
        for tail in ((*results, *notes), tuple(results[:1]), tuple(notes)):
            asked = view.with_tail(tail)
            assert tuple(plugin.transform_context(asked, CONTEXT)) == whole(tuple(asked))


@given(WAITING, tails())
def test_any_tail_is_as_if_it_were_appended(
    pieces: list[tuple[AgentMessage, ...]], tail: tuple[AgentMessage, ...]
) -> None:
    plugin = UniqueToolCallIds()
    for view in grow(pieces):
        asked = view.with_tail(tail)
        assert tuple(plugin.transform_context(asked, CONTEXT)) == whole(tuple(asked))


def test_a_result_behind_a_note_is_no_answer_in_the_tail_either() -> None:
    log = MessageLog([calling(("a", "look")), result("a"), calling(("a", "look"))])
    asked = log.view((SystemMessage("a note between"), result("a")))
    assert tuple(UniqueToolCallIds().transform_context(asked, CONTEXT)) == whole(tuple(asked))


@given(heaps(), heaps())
def test_a_list_is_taken_like_a_view(
    one: tuple[AgentMessage, ...], other: tuple[AgentMessage, ...]
) -> None:
    plugin = UniqueToolCallIds()
    for messages in (list(one), [*one, *other], list(other)):
        assert tuple(plugin.transform_context(messages, CONTEXT)) == whole(messages)


# --- what comes out ---------------------------------------------------------------------------


@given(turns(AWKWARD_IDS))
def test_all_ids_differ_and_every_answer_finds_its_call(made: list[list[AgentMessage]]) -> None:
    plugin = UniqueToolCallIds()
    for view in grow(made):
        sent = tuple(plugin.transform_context(view, CONTEXT))
        ids = call_ids(sent)
        assert len(set(ids)) == len(ids)
        assert_each_answer_finds_its_call(sent)


@given(heaps(AWKWARD_IDS).flatmap(cuts))
def test_what_was_sent_once_stays_as_it_was(pieces: list[tuple[AgentMessage, ...]]) -> None:
    plugin = UniqueToolCallIds()
    before: tuple[AgentMessage, ...] = ()
    for view in grow(pieces):
        sent = tuple(plugin.transform_context(view, CONTEXT))
        assert sent[: len(before)] == before
        before = sent


def test_repeats_are_numbered_and_ids_that_occur_are_skipped() -> None:
    one_id_for_all: list[AgentMessage] = [
        calling(("x", "a"), ("x", "b")),
        result("x", "a"),
        result("x", "b"),
        calling(("clark_agent_call_2", "c")),
        result("clark_agent_call_2", "c"),
        UserMessage("more"),
        calling(("x", "d")),
        result("x", "d"),
    ]
    assert list(UniqueToolCallIds().transform_context(one_id_for_all, CONTEXT)) == [
        calling(("x", "a"), ("clark_agent_call_1", "b")),
        result("x", "a"),
        result("clark_agent_call_1", "b"),
        calling(("clark_agent_call_2", "c")),
        result("clark_agent_call_2", "c"),
        UserMessage("more"),
        calling(("clark_agent_call_3", "d")),
        result("clark_agent_call_3", "d"),
    ]


def test_an_open_call_is_renamed_before_its_result_is_there() -> None:
    plugin = UniqueToolCallIds()
    log = MessageLog([calling(("x", "a")), result("x", "a"), calling(("x", "b"), ("x", "c"))])
    assert tuple(plugin.transform_context(log.view(), CONTEXT))[2:] == (
        calling(("clark_agent_call_1", "b"), ("clark_agent_call_2", "c")),
    )
    log.append(result("x", "b"))
    peeked = tuple(plugin.transform_context(log.view((result("x", "c"),)), CONTEXT))
    log.append(result("x", "c"))
    assert tuple(plugin.transform_context(log.view(), CONTEXT)) == peeked
    assert peeked[3:] == (result("clark_agent_call_1", "b"), result("clark_agent_call_2", "c"))


# --- what stays -------------------------------------------------------------------------------


@given(turns(st.just("")))
def test_nothing_is_made_when_nothing_repeats(made: list[list[AgentMessage]]) -> None:
    """Each call gets an id of its own here."""
    plugin, log = UniqueToolCallIds(), MessageLog()
    for number, turn in enumerate(made):
        for message in turn:
            if isinstance(message, AssistantMessage):
                calls = message.tool_calls
                log.append(calling(*[(f"{number}.{c.name}", c.name) for c in calls]))
            elif isinstance(message, ToolResultMessage):
                log.append(result(f"{number}.{message.tool_name}", message.tool_name))
            else:
                log.append(message)
        view = log.view()
        assert plugin.transform_context(view, CONTEXT) is view
        as_list = list(view)
        assert UniqueToolCallIds().transform_context(as_list, CONTEXT) is as_list


@given(heaps().flatmap(cuts))
def test_the_transcript_keeps_its_ids(pieces: list[tuple[AgentMessage, ...]]) -> None:
    plugin = UniqueToolCallIds()
    given_messages = tuple(m for piece in pieces for m in piece)
    for view in grow(pieces):
        sent = plugin.transform_context(view, CONTEXT)
        assert tuple(view) == given_messages[: len(view)]
        for mine, theirs in zip(view, sent, strict=True):
            assert mine is theirs or mine != theirs, "what is the same is shared"


@given(heaps().flatmap(cuts), heaps().flatmap(cuts))
def test_a_view_of_another_log_starts_over(
    one: list[tuple[AgentMessage, ...]], other: list[tuple[AgentMessage, ...]]
) -> None:
    plugin = UniqueToolCallIds()
    early: list[MessageView] = []
    for pieces in (one, other):
        for view in grow(pieces):
            early.append(view)
            assert tuple(plugin.transform_context(view, CONTEXT)) == whole(tuple(view))
    for view in early:  # shorter ones of the same log too
        assert tuple(plugin.transform_context(view, CONTEXT)) == whole(tuple(view))


@pytest.mark.parametrize("repeats", [False, True])
def test_a_turn_costs_what_is_new_in_it(repeats: bool) -> None:
    plugin = UniqueToolCallIds()
    backing: list[AgentMessage] = []
    for turn in range(500):
        call_id = "x" if repeats else f"id {turn}"
        backing += [calling((call_id, "look")), result(call_id)]
        view = CountingView(backing)
        plugin.transform_context(view, CONTEXT)
        assert view.handed <= (2 if turn != 1 else 4), "once, the start must be copied"


def test_every_run_gets_its_own() -> None:
    plugin = UniqueToolCallIds()
    hooks = Hooks.of([plugin])
    assert hooks.names["context_transform"] == ("unique_tool_call_ids",)
    assert hooks.for_run().plugins[0] is not plugin
    log = MessageLog([calling(("x", "a")), result("x", "a"), calling(("x", "b"))])
    sent = [tuple(p.transform_context(log.view(), CONTEXT)) for p in (plugin, plugin.for_run())]
    assert sent[0] == sent[1] == whole(tuple(log))
