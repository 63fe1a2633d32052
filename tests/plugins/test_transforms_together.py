"""Clip, rename, trim: each works on what the one before made, turn after turn."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from clark_agent import AgentMessage, AssistantMessage, ToolResultMessage, UserMessage
from clark_agent.history import unique_tool_call_ids
from clark_agent.messages.transcript import MessageLog
from clark_agent.plugins import TokenBudget, ToolResultBudget, UniqueToolCallIds
from clark_agent.plugins.hooks import Hooks
from clark_agent.plugins.tool_result_budget import clip
from tests.plugins.support import (
    TEXTS,
    Capped,
    CharacterEstimator,
    before_call,
    calling,
    cost,
    grow,
    result,
    turns,
)

CAP = 6
MARKER = "-"
CONTEXT = before_call(
    CharacterEstimator(),
    *[Capped(f"plain{number}", None) for number in range(4)],
    *[Capped(f"short{number}", 2) for number in range(4)],
    *[Capped(f"never{number}", "never") for number in range(4)],
)


def chain(max_tokens: int) -> Hooks:
    budget = TokenBudget(
        max_tokens,
        trim_trigger=0.8,
        trim_target=0.5,
        truncation_marker=MARKER,
        drop_turns=False,
    )
    return Hooks.of([ToolResultBudget(CAP), UniqueToolCallIds(), budget]).for_run()


def send(hooks: Hooks, messages: Sequence[AgentMessage]) -> tuple[AgentMessage, ...]:
    for hook in hooks.context_transform:
        messages = hook.transform.call(messages, CONTEXT)
    return tuple(messages)


def assert_a_provider_takes(messages: Sequence[AgentMessage]) -> None:
    """Each call has an id of its own and one result, which stands right behind."""
    seen: set[str] = set()
    waiting: dict[str, str] = {}
    for message in messages:
        if isinstance(message, ToolResultMessage):
            assert waiting.pop(message.tool_name) == message.tool_call_id
            continue
        assert not waiting
        if isinstance(message, AssistantMessage):
            waiting = {c.name: c.id for c in message.tool_calls}
            ids = set(waiting.values())
            assert len(ids) == len(message.tool_calls)
            assert not ids & seen
            seen |= ids
    assert not waiting


def is_trimmed(message: AgentMessage) -> bool:
    return isinstance(message, ToolResultMessage) and message.plain_text == MARKER


def newest_batch(messages: Sequence[AgentMessage]) -> int:
    """Where the results of the newest calls begin."""
    return max(
        [n + 1 for n, m in enumerate(messages) if isinstance(m, AssistantMessage) and m.tool_calls],
        default=0,
    )


def clipped(message: AgentMessage) -> AgentMessage:
    caps = {"plain": CAP, "short": 2}
    if not isinstance(message, ToolResultMessage):
        return message
    cap = caps.get(message.tool_name[:5])
    text = message.plain_text
    if cap is None or len(text) <= cap:
        return message
    short = min(clip(text, cap), text, key=len)
    return result(message.tool_call_id, message.tool_name, short)


def untrimmed(messages: Sequence[AgentMessage]) -> tuple[AgentMessage, ...]:
    """The transcript clipped and renamed in one go."""
    newest = newest_batch(messages)
    aged = [clipped(m) if n < newest else m for n, m in enumerate(messages)]
    return unique_tool_call_ids(aged).messages


@given(turns(), st.integers(10, 300), st.none() | st.builds(UserMessage, TEXTS))
def test_a_growing_transcript_stays_sound(
    made: list[list[AgentMessage]], max_tokens: int, note: AgentMessage | None
) -> None:
    hooks = chain(max_tokens)
    trigger = round(max_tokens * 0.8)
    for view in grow(made):
        for asked in (view, view.with_tail((note,) if note else ())):
            sent = send(hooks, asked)
            assert_a_provider_takes(sent)
            expected = untrimmed(tuple(asked))
            for mine, theirs in zip(sent, expected, strict=True):
                if is_trimmed(mine) and mine != theirs:
                    assert isinstance(theirs, ToolResultMessage)
                    assert mine == result(theirs.tool_call_id, theirs.tool_name, MARKER)
                else:
                    assert mine == theirs
            assert sent[-2:] == expected[-2:]
            if sum(map(cost, sent)) > trigger:
                results = [m for m in sent[:-2] if isinstance(m, ToolResultMessage)]
                assert all(map(is_trimmed, results)), "too much, though there was more to trim"


def test_the_newest_results_come_whole_and_under_their_new_ids() -> None:
    hooks, log = chain(1_000_000), MessageLog([UserMessage("go")])
    fresh = 0
    for turn in range(1, 9):
        log.append(calling(("call_0", "plain0"), ("call_0", "plain1")))
        log.append(result("call_0", "plain0", "a" * 50))
        log.append(result("call_0", "plain1", "b" * 50))
        first = "call_0" if turn == 1 else f"clark_agent_call_{fresh + 1}"
        fresh += 1 if turn == 1 else 2
        second = f"clark_agent_call_{fresh}"
        sent = send(hooks, log.view())
        assert sent[-3:] == (
            calling((first, "plain0"), (second, "plain1")),
            result(first, "plain0", "a" * 50),
            result(second, "plain1", "b" * 50),
        )
        assert_a_provider_takes(sent)
        old = [m.plain_text for m in sent[:-2] if isinstance(m, ToolResultMessage)]
        assert old == [clip("a" * 50, CAP), clip("b" * 50, CAP)] * (turn - 1)


def test_once_renamed_and_trimmed_the_prefix_lasts() -> None:
    hooks, log = chain(2_000), MessageLog([UserMessage("go")])
    before: tuple[AgentMessage, ...] = ()
    broken = 0
    for turn in range(300):
        log.append(calling(("call_0", "plain0")))
        log.append(result("call_0", "plain0", f"{turn:05}"))  # fits: nothing is clipped
        sent = send(hooks, log.view())
        assert_a_provider_takes(sent)
        broken += sent[: len(before)] != before
        before = sent
    assert sum(map(cost, before)) <= 1_600
    assert 0 < broken <= 3


def test_all_of_them_leave_a_sound_small_transcript_alone() -> None:
    hooks = chain(1_000_000)
    log = MessageLog()
    for turn in range(5):
        log.extend([calling((str(turn), "plain0")), result(str(turn), "plain0", "ok")])
        view = log.view()
        messages: Sequence[AgentMessage] = view
        for hook in hooks.context_transform:
            messages = hook.transform.call(messages, CONTEXT)
        assert messages is view


def test_the_transcript_itself_keeps_ids_and_texts() -> None:
    log = MessageLog([UserMessage("go")])
    for turn in range(30):
        log.append(calling(("call_0", "plain0"), ("call_0", "plain1")))
        log.extend([result("call_0", name, f"{turn:09}") for name in ("plain0", "plain1")])
    before = tuple(log)
    sent = send(chain(100), log.view())
    assert tuple(log) == before
    assert sum(map(is_trimmed, sent)) == 58, "all but the newest two"
