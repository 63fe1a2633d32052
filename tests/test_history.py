"""Any transcript comes out as one that a provider takes, and the account of changes is exact.

The checks here know nothing of how the repair works: they compare what went in with what came out.
In broken histories every message has its place as its timestamp, so each can be followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    SystemMessage,
    TextContent,
    ToolCall,
    ToolResultMessage,
    UserMessage,
)
from clark_agent.history import (
    HistoryChange,
    HistoryChangeKind,
    IdRenamer,
    RepairedHistory,
    repair_history,
    unique_tool_call_ids,
)
from tests.strategies import (
    broken_histories,
    calling,
    cuts,
    result,
    sound_histories,
    transcripts,
)

USER = UserMessage("and?")

SYNTHESIZED = HistoryChangeKind.SYNTHESIZED_RESULT
DROPPED = HistoryChangeKind.DROPPED_RESULT
MOVED = HistoryChangeKind.MOVED_RESULT
RENAMED = HistoryChangeKind.RENAMED_CALL


# --- what a provider takes --------------------------------------------------------------------


def check_valid(messages: Sequence[AgentMessage]) -> None:
    """Every call is answered once, in the block of results behind it, under an id of its own."""
    seen: set[str] = set()
    expected: Counter[str] = Counter()
    for message in messages:
        if isinstance(message, ToolResultMessage):
            assert expected[message.tool_call_id] == 1, f"nobody asked for {message}"
            del expected[message.tool_call_id]
            continue
        assert not expected, f"not answered: {expected}"
        if isinstance(message, AssistantMessage):
            for call in message.tool_calls:
                assert call.id, "an empty id"
                assert call.id not in seen, f"{call.id} is used again"
                seen.add(call.id)
            expected = Counter([call.id for call in message.tool_calls])
    assert not expected, f"not answered: {expected}"


@given(sound_histories())
def test_the_check_takes_sound_histories(history: list[AgentMessage]) -> None:
    check_valid(history)


@pytest.mark.parametrize(
    "history",
    [
        [calling("a")],
        [result("a")],
        [calling("a"), USER, result("a")],
        [calling("a"), result("b")],
        [calling("a"), result("a"), result("a")],
        [calling("a"), result("a"), calling("a"), result("a")],
        [calling("a", "a"), result("a"), result("a")],
        [calling(""), result("")],
        [result("a"), calling("a")],
    ],
)
def test_the_check_refuses_the_others(history: list[AgentMessage]) -> None:
    with pytest.raises(AssertionError):
        check_valid(history)


# --- repair -----------------------------------------------------------------------------------


@given(broken_histories())
@settings(max_examples=120)
def test_a_repaired_history_is_valid_and_stays_as_it_is(history: list[AgentMessage]) -> None:
    repaired = repair_history(history)
    check_valid(repaired.messages)
    again = repair_history(repaired.messages)
    assert again == RepairedHistory(repaired.messages, ())
    assert all(one is other for one, other in pairs(again.messages, repaired.messages))


@given(transcripts())
def test_messages_of_any_content_can_be_repaired(history: list[AgentMessage]) -> None:
    repaired = repair_history(history)
    check_valid(repaired.messages)
    assert repair_history(repaired.messages).changes == ()


@given(sound_histories())
def test_a_sound_history_comes_back_as_it_is(history: list[AgentMessage]) -> None:
    for mend in (repair_history, unique_tool_call_ids):
        mended = mend(iter(history))
        assert mended.changes == ()
        assert all(one is other for one, other in pairs(mended.messages, history))


@given(broken_histories())
def test_other_messages_all_stay_in_order(history: list[AgentMessage]) -> None:
    kept = repair_history(history).messages
    assert all(one is other for one, other in pairs(untouched(kept), untouched(history)))
    assert [without_ids(message) for message in assistants(kept)] == [
        without_ids(message) for message in assistants(history)
    ]


@given(broken_histories())
@settings(max_examples=120)
def test_the_account_of_changes_is_what_a_comparison_finds(history: list[AgentMessage]) -> None:
    repaired = repair_history(history)
    assert Counter(repaired.changes) == Counter(differences(history, repaired.messages))


def differences(
    before: Sequence[AgentMessage], after: Sequence[AgentMessage]
) -> list[HistoryChange]:
    """What was done to the calls and results, by following each message to its new place."""
    found: list[HistoryChange] = []
    block_of = blocks(before)
    kept: set[int] = set()
    asking: AssistantMessage | None = None
    for message in after:
        if isinstance(message, AssistantMessage):
            asking = original(message, before)
            for old, new in zip(asking.tool_calls, message.tool_calls, strict=True):
                if old.id != new.id:
                    found.append(HistoryChange(RENAMED, place(asking), old.id, old.name, new.id))
        elif isinstance(message, ToolResultMessage):
            assert asking is not None
            if message.timestamp is None:
                call = next(
                    old
                    for old, new in zip(
                        asking.tool_calls, assistants(after, asking)[0].tool_calls, strict=True
                    )
                    if new.id == message.tool_call_id
                )
                found.append(HistoryChange(SYNTHESIZED, place(asking), call.id, call.name))
                continue
            kept.add(place(message))
            if block_of.get(place(message)) != asking.timestamp:
                old_result = before[place(message)]
                assert isinstance(old_result, ToolResultMessage)
                found.append(about(old_result, MOVED))
    dropped = [m for m in before if isinstance(m, ToolResultMessage) and m.timestamp not in kept]
    return found + [about(message, DROPPED) for message in dropped]


@given(broken_histories())
@settings(max_examples=120)
def test_results_go_to_their_calls_first_come_first_served(history: list[AgentMessage]) -> None:
    answered = answers(repair_history(history).messages)
    calls = [
        (place(message), number, call.id)
        for message in assistants(history)
        for number, call in enumerate(message.tool_calls)
    ]
    turn_of = turns(history)
    strays = [m for m in history if isinstance(m, ToolResultMessage)]
    for index, number, call_id in calls:
        before = [c for c in calls if c[0] == index and c[2] == call_id and c[1] < number]
        own = [m for m in strays if m.tool_call_id == call_id and turn_of.get(place(m)) == index]
        if len(own) > len(before):
            assert answered[index, number] == own[len(before)].timestamp
        elif len([c for c in calls if c[2] == call_id]) > 1:
            assert answered[index, number] is None, "which call a stray result is for is unknown"
        else:
            elsewhere = [m.timestamp for m in strays if m.tool_call_id == call_id]
            assert answered[index, number] == (elsewhere[0] if elsewhere else None)


@given(broken_histories())
def test_results_in_place_keep_their_order_and_the_others_follow_in_that_of_the_calls(
    history: list[AgentMessage],
) -> None:
    repaired = repair_history(history).messages
    block_of = blocks(history)
    for asking in assistants(repaired):
        start = repaired.index(asking) + 1
        answers_given = repaired[start : start + len(asking.tool_calls)]
        in_place = [m for m in answers_given if block_of.get(m.timestamp or -1) == asking.timestamp]
        others = [m for m in answers_given if m not in in_place]
        assert list(answers_given) == sorted(in_place, key=place) + others
        ids = {call.id: number for number, call in enumerate(asking.tool_calls)}
        assert others == sorted(others, key=lambda m: ids[answered_id(m)])


@given(broken_histories())
def test_results_lose_nothing_but_their_id(history: list[AgentMessage]) -> None:
    for message in repair_history(history).messages:
        if isinstance(message, ToolResultMessage) and message.timestamp is not None:
            old = history[place(message)]
            assert isinstance(old, ToolResultMessage)
            assert message is old or replace(message, tool_call_id=old.tool_call_id) == old


# --- repair, by example -----------------------------------------------------------------------


def check_repair(
    given_messages: list[AgentMessage], expected: list[AgentMessage], *changes: HistoryChange
) -> None:
    repaired = repair_history(given_messages)
    check_valid(repaired.messages)
    assert list(repaired.messages) == expected
    assert repaired.changes == changes


def change(
    kind: HistoryChangeKind, index: int, call_id: str, new_id: str | None = None
) -> HistoryChange:
    return HistoryChange(kind, index, call_id, "look", new_id)


def test_a_call_without_a_result_gets_one_that_says_so() -> None:
    repaired = repair_history([USER, calling("a"), USER])
    asked, answer, later = repaired.messages[1:]
    assert (asked, later) == (calling("a"), USER)
    assert isinstance(answer, ToolResultMessage)
    assert (answer.tool_call_id, answer.tool_name, answer.is_error) == ("a", "look", True)
    assert "No result" in answer.plain_text
    assert answer.details == {"kind": "missing_tool_result"}
    assert repaired.changes == (change(SYNTHESIZED, 1, "a"),)


def test_a_result_without_a_call_goes() -> None:
    check_repair([USER, result("a"), USER], [USER, USER], change(DROPPED, 1, "a"))


def test_a_second_result_goes() -> None:
    check_repair(
        [calling("a"), result("a", "1"), result("a", "2")],
        [calling("a"), result("a", "1")],
        change(DROPPED, 2, "a"),
    )


def test_the_result_that_a_fallback_made_up_goes() -> None:
    words = AssistantMessage.from_text("the answer")
    fallback = result("plain_text_terminal_fallback_x", "the answer")
    check_repair([USER, words, fallback], [USER, words], change(DROPPED, 2, fallback.tool_call_id))


def test_one_constant_id_is_paired_turn_by_turn() -> None:
    check_repair(
        [
            calling("call_0"),
            result("call_0", "1"),
            calling("call_0"),
            result("call_0", "2"),
            USER,
            calling("call_0"),
            result("call_0", "3"),
        ],
        [
            calling("call_0"),
            result("call_0", "1"),
            calling("clark_agent_call_1"),
            result("clark_agent_call_1", "2"),
            USER,
            calling("clark_agent_call_2"),
            result("clark_agent_call_2", "3"),
        ],
        change(RENAMED, 2, "call_0", "clark_agent_call_1"),
        change(RENAMED, 5, "call_0", "clark_agent_call_2"),
    )


def test_one_id_twice_in_a_message_is_answered_first_in_first_out() -> None:
    check_repair(
        [calling("a", "b", "a"), result("a", "1"), result("a", "2"), result("b")],
        [
            calling("a", "b", "clark_agent_call_1"),
            result("a", "1"),
            result("clark_agent_call_1", "2"),
            result("b"),
        ],
        change(RENAMED, 0, "a", "clark_agent_call_1"),
    )


def test_a_result_behind_something_else_moves_up() -> None:
    note = SystemMessage("hurry")
    check_repair(
        [calling("a", "b"), result("b"), USER, note, result("a")],
        [calling("a", "b"), result("b"), result("a"), USER, note],
        change(MOVED, 4, "a"),
    )


def test_results_that_move_come_behind_those_in_place() -> None:
    check_repair(
        [result("b"), result("a"), calling("a", "b", "c"), result("c")],
        [calling("a", "b", "c"), result("c"), result("a"), result("b")],
        change(MOVED, 1, "a"),
        change(MOVED, 0, "b"),
    )


def test_a_stray_result_of_another_turn_moves_home_if_its_id_is_unique() -> None:
    check_repair(
        [result("b"), calling("a"), calling("b"), result("b", "own"), result("a"), USER],
        [calling("a"), result("a"), calling("b"), result("b", "own"), USER],
        change(DROPPED, 0, "b"),
        change(MOVED, 4, "a"),
    )


def test_a_stray_result_goes_if_two_calls_have_its_id() -> None:
    repaired = repair_history([calling("a"), calling("a"), calling("b"), result("b"), result("a")])
    check_valid(repaired.messages)
    kinds = Counter(change.kind for change in repaired.changes)
    assert kinds == {SYNTHESIZED: 2, RENAMED: 1, DROPPED: 1}
    assert change(DROPPED, 4, "a") in repaired.changes


def test_empty_ids_are_renamed_with_their_results() -> None:
    check_repair(
        [calling("", ""), result("", "1"), result("", "2"), calling(""), result("", "3")],
        [
            calling("clark_agent_call_1", "clark_agent_call_2"),
            result("clark_agent_call_1", "1"),
            result("clark_agent_call_2", "2"),
            calling("clark_agent_call_3"),
            result("clark_agent_call_3", "3"),
        ],
        change(RENAMED, 0, "", "clark_agent_call_1"),
        change(RENAMED, 0, "", "clark_agent_call_2"),
        change(RENAMED, 3, "", "clark_agent_call_3"),
    )


def test_a_new_id_is_none_that_occurs_anywhere() -> None:
    check_repair(
        [
            calling(""),
            result(""),
            calling("clark_agent_call_1"),
            result("clark_agent_call_1"),
            result("clark_agent_call_2"),
        ],
        [
            calling("clark_agent_call_3"),
            result("clark_agent_call_3"),
            calling("clark_agent_call_1"),
            result("clark_agent_call_1"),
        ],
        change(RENAMED, 0, "", "clark_agent_call_3"),
        change(DROPPED, 4, "clark_agent_call_2"),
    )


def test_results_in_another_order_than_the_calls_are_sound() -> None:
    history: list[AgentMessage] = [calling("a", "b"), result("b"), result("a"), USER]
    check_repair(history, history)


def test_nothing_to_repair_in_nothing() -> None:
    assert repair_history([]) == RepairedHistory((), ())


# --- unique ids -------------------------------------------------------------------------------


def renamed_by_hand(history: Sequence[AgentMessage]) -> tuple[list[AgentMessage], list[str]]:
    """The slow way: for each call ask the whole transcript; gives the new ids too."""
    occurring = {m.tool_call_id for m in history if isinstance(m, ToolResultMessage)}
    occurring |= {call.id for m in assistants(history) for call in m.tool_calls}
    free = [f"clark_agent_call_{n}" for n in range(1, 200)]
    free = [new_id for new_id in free if new_id not in occurring]
    used: list[str] = []
    new_ids: list[str] = []
    out: list[AgentMessage] = []
    block: list[tuple[str, str]] = []
    for message in history:
        if isinstance(message, ToolResultMessage):
            match = [pair for pair in block if pair[0] == message.tool_call_id]
            if match:
                block.remove(match[0])
                message = replace(message, tool_call_id=match[0][1])
        else:
            block = []
            for call in message.tool_calls if isinstance(message, AssistantMessage) else ():
                repeated = call.id in used
                block.append((call.id, free.pop(0) if repeated else call.id))
                used.append(call.id)
                new_ids += [block[-1][1]] * repeated
            if isinstance(message, AssistantMessage):
                message = with_ids(message, [new for _, new in block])
        out.append(message)
    return out, new_ids


@given(broken_histories())
@settings(max_examples=120)
def test_unique_ids_are_what_the_slow_way_gives(history: list[AgentMessage]) -> None:
    renamed = unique_tool_call_ids(history)
    expected, new_ids = renamed_by_hand(history)
    assert list(renamed.messages) == expected
    assert [change.new_id for change in renamed.changes] == new_ids
    assert {change.kind for change in renamed.changes} <= {RENAMED}
    ids = [call.id for message in assistants(renamed.messages) for call in message.tool_calls]
    assert len(ids) == len(set(ids))
    again = unique_tool_call_ids(renamed.messages)
    assert (again.messages, again.changes) == (renamed.messages, ())


def test_the_first_use_of_an_id_keeps_it_and_orphans_are_left_alone() -> None:
    history: list[AgentMessage] = [
        result("a", "orphan"),
        calling("a"),
        result("a", "1"),
        calling("a", "b"),
        result("a", "2"),
        result("a", "orphan"),
        USER,
        result("b", "orphan"),
        calling("a", "a"),
        result("a", "3"),
    ]
    renamed = unique_tool_call_ids(history)
    assert list(renamed.messages) == [
        *history[:3],
        calling("clark_agent_call_1", "b"),
        result("clark_agent_call_1", "2"),
        *history[5:8],
        calling("clark_agent_call_2", "clark_agent_call_3"),
        result("clark_agent_call_2", "3"),
    ]
    assert renamed.changes == (
        change(RENAMED, 3, "a", "clark_agent_call_1"),
        change(RENAMED, 8, "a", "clark_agent_call_2"),
        change(RENAMED, 8, "a", "clark_agent_call_3"),
    )
    for index in (0, 1, 2, 5, 6, 7):
        assert renamed.messages[index] is history[index]


def test_unique_ids_skip_those_that_occur() -> None:
    history: list[AgentMessage] = [calling("a", "a", "a"), result("clark_agent_call_2")]
    (renamed, orphan) = unique_tool_call_ids(history).messages
    assert renamed == calling("a", "clark_agent_call_1", "clark_agent_call_3")
    assert orphan is history[1]


@given(st.data(), broken_histories())
def test_a_transcript_in_pieces_gets_unique_ids_too(
    data: st.DataObject, history: list[AgentMessage]
) -> None:
    renamer = IdRenamer()
    renamed: list[AgentMessage] = []
    for piece in data.draw(cuts(history)):
        results = piece if all(isinstance(m, ToolResultMessage) for m in piece) else []
        foreseen = renamer.peek(results)
        new = renamer.rename(piece)
        assert not results or list(foreseen) == new
        renamed += new
    ids = [call.id for message in assistants(renamed) for call in message.tool_calls]
    assert len(ids) == len(set(ids))
    whole = answered_in_block(unique_tool_call_ids(history).messages)
    assert answered_in_block(renamed) == whole, "the same results answer the same calls"


def test_an_id_that_was_made_up_is_taken_when_a_later_piece_brings_it() -> None:
    renamer = IdRenamer()
    assert renamer.rename([calling("a"), calling("a")])[1] == calling("clark_agent_call_1")
    later = renamer.rename([calling("clark_agent_call_1"), result("clark_agent_call_1")])
    assert later == [calling("clark_agent_call_2"), result("clark_agent_call_2")]
    assert renamer.changes[1] == change(RENAMED, 2, "clark_agent_call_1", "clark_agent_call_2")


def test_a_peek_changes_nothing() -> None:
    renamer = IdRenamer()
    renamer.rename([calling("a"), calling("a")])
    answers_ahead: list[AgentMessage] = [result("a"), USER]
    for _ in range(2):
        assert renamer.peek(answers_ahead) == (result("clark_agent_call_1"), USER)
    assert renamer.rename(answers_ahead) == [result("clark_agent_call_1"), USER]


# --- following messages -----------------------------------------------------------------------


def pairs(
    one: Sequence[AgentMessage], other: Sequence[AgentMessage]
) -> Iterable[tuple[AgentMessage, AgentMessage]]:
    return zip(one, other, strict=True)


def place(message: AgentMessage) -> int:
    assert message.timestamp is not None
    return message.timestamp


def answered_id(message: AgentMessage) -> str:
    assert isinstance(message, ToolResultMessage)
    return message.tool_call_id


def about(message: ToolResultMessage, kind: HistoryChangeKind) -> HistoryChange:
    return HistoryChange(kind, place(message), message.tool_call_id, message.tool_name)


def assistants(
    history: Iterable[AgentMessage], like: AssistantMessage | None = None
) -> list[AssistantMessage]:
    return [
        message
        for message in history
        if isinstance(message, AssistantMessage)
        and (like is None or message.timestamp == like.timestamp)
    ]


def original(message: AssistantMessage, before: Sequence[AgentMessage]) -> AssistantMessage:
    (found,) = assistants(before, message)
    return found


def untouched(history: Iterable[AgentMessage]) -> list[AgentMessage]:
    return [m for m in history if not isinstance(m, AssistantMessage | ToolResultMessage)]


def with_ids(message: AssistantMessage, new_ids: Sequence[str]) -> AssistantMessage:
    fresh = iter(new_ids)
    blocks = [
        replace(block, id=next(fresh)) if isinstance(block, ToolCall) else block
        for block in message.content
    ]
    return replace(message, content=tuple(blocks))


def without_ids(message: AssistantMessage) -> AssistantMessage:
    return with_ids(message, [""] * len(message.tool_calls))


def blocks(history: Iterable[AgentMessage]) -> dict[int, int]:
    """For each result in the block right behind an assistant message, the place of that message."""
    found: dict[int, int] = {}
    asking: int | None = None
    for message in history:
        if isinstance(message, AssistantMessage):
            asking = place(message)
        elif not isinstance(message, ToolResultMessage):
            asking = None
        elif asking is not None:
            found[place(message)] = asking
    return found


def turns(history: Iterable[AgentMessage]) -> dict[int, int]:
    """For each message, the place of the last assistant message before it."""
    found: dict[int, int] = {}
    asking: int | None = None
    for message in history:
        if isinstance(message, AssistantMessage):
            asking = place(message)
        elif asking is not None:
            found[place(message)] = asking
    return found


def answers(valid: Sequence[AgentMessage]) -> dict[tuple[int, int], int | None]:
    """For each call of a valid history its result's place, None for one that was made up."""
    results = {m.tool_call_id: m.timestamp for m in valid if isinstance(m, ToolResultMessage)}
    return {
        (place(message), number): results[call.id]
        for message in assistants(valid)
        for number, call in enumerate(message.tool_calls)
    }


def answered_in_block(history: Sequence[AgentMessage]) -> set[tuple[int, int, int]]:
    """Which result in the block behind a message has the id of which of its calls."""
    block_of = blocks(history)
    return {
        (place(message), number, place(answer))
        for message in assistants(history)
        for number, call in enumerate(message.tool_calls)
        for answer in history
        if isinstance(answer, ToolResultMessage)
        and answer.tool_call_id == call.id
        and block_of.get(place(answer)) == place(message)
    }


def test_helpers_find_their_way() -> None:
    first, second = replace(calling("a"), timestamp=0), replace(result("a"), timestamp=1)
    third, fourth = replace(USER, timestamp=2), replace(result("b"), timestamp=3)
    history: list[AgentMessage] = [first, second, third, fourth]
    assert blocks(history) == {1: 0}
    assert turns(history) == {1: 0, 2: 0, 3: 0}
    assert answered_in_block(history) == {(0, 0, 1)}
    assert without_ids(first).content == (TextContent("now"), ToolCall("", "look", {}))
