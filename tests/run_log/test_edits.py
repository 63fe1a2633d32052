"""The edits of a view turn the one into the other, and hold only what is new."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clark_agent import AgentMessage, UserMessage
from clark_agent.run_log.writer import changes

POOL: list[AgentMessage] = [UserMessage(str(number)) for number in range(12)]
SOME = st.lists(st.sampled_from(POOL), max_size=10)


@given(SOME, SOME)
def test_edits_turn_one_sequence_into_the_other(
    before: list[AgentMessage], after: list[AgentMessage]
) -> None:
    made = list(before)
    for edit in reversed(changes(before, after)):
        made[edit.start : edit.start + edit.removed] = edit.inserted
    assert made == after


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_what_stays_is_not_written_again(dropped: set[int], replaced: set[int]) -> None:
    new = {number: UserMessage(f"new {number}") for number in replaced - dropped}
    after = [new.get(n, POOL[n]) for n in range(12) if n not in dropped]
    written = [message for edit in changes(POOL, after) for message in edit.inserted]
    assert written == list(dict(sorted(new.items())).values())
