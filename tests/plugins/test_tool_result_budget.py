"""Old results are clipped once, to head and tail; what the model has not seen stays whole."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    ImageContent,
    TextContent,
    ToolResultMessage,
    UserMessage,
)
from clark_agent.errors import ConfigError
from clark_agent.messages.transcript import MessageLog, MessageView
from clark_agent.plugins import ToolResultBudget
from clark_agent.plugins.hooks import Hooks
from clark_agent.plugins.tool_result_budget import clip
from clark_agent.types import ToolResultBlock
from tests.plugins.support import (
    Capped,
    CountingView,
    before_call,
    calling,
    grow,
    heaps,
    result,
    tails,
)
from tests.strategies import cuts

SHORT, DEFAULT = 3, 6
CONTEXT = before_call(None, Capped("look", None), Capped("short", SHORT), Capped("never", "never"))


def send(budget: ToolResultBudget, messages: Sequence[AgentMessage]) -> tuple[AgentMessage, ...]:
    return tuple(budget.transform_context(messages, CONTEXT))


# --- one text ---------------------------------------------------------------------------------

MARKER = re.compile(r"\n\[… ([\d,]+) of ([\d,]+) characters left out …\]\n")
LONG_TEXTS = st.integers(1, 3000).map(lambda n: (string.ascii_letters * 60)[:n])


def parts(clipped: str) -> tuple[str, re.Match[str], str]:
    """Head, marker and tail."""
    match = MARKER.search(clipped)
    assert match is not None
    return clipped[: match.start()], match, clipped[match.end() :]


def number(text: str) -> int:
    return int(text.replace(",", ""))


@given(LONG_TEXTS, st.integers(0, 2000))
def test_head_and_tail_are_kept_within_the_cap(text: str, cap: int) -> None:
    text += "x" * (cap + 1)
    clipped = clip(text, cap)
    head, marker, tail = parts(clipped)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert 0 <= len(head) - len(tail) <= 1, "in equal shares"
    assert len(clipped) <= max(cap, len(marker[0])), "the marker is within the cap if it can be"
    assert len(clipped) >= cap - len(marker[2]), "and the cap is made use of"


@given(LONG_TEXTS, st.integers(0, 2000))
def test_the_marker_tells_how_much_is_missing(text: str, cap: int) -> None:
    text += "x" * (cap + 1)
    head, marker, tail = parts(clip(text, cap))
    assert number(marker[2]) == len(text)
    assert number(marker[1]) == len(text) - len(head) - len(tail)


# --- a whole transcript -----------------------------------------------------------------------


def by_the_book(messages: Sequence[AgentMessage]) -> tuple[AgentMessage, ...]:
    """All results before the newest calls, each against its cap, unless that saves nothing."""
    with_calls = [
        place
        for place, message in enumerate(messages)
        if isinstance(message, AssistantMessage) and message.tool_calls
    ]
    newest = with_calls[-1] if with_calls else 0
    caps = {"look": DEFAULT, "short": SHORT}
    sent: list[AgentMessage] = []
    for place, message in enumerate(messages):
        if isinstance(message, ToolResultMessage) and place < newest:
            cap = caps.get(message.tool_name)
            text = message.plain_text
            if cap is not None and len(text) > cap and len(clip(text, cap)) < len(text):
                message = result(message.tool_call_id, message.tool_name, clip(text, cap))
        sent.append(message)
    return tuple(sent)


@given(heaps())
def test_results_before_the_newest_calls_are_held_to_their_caps(
    messages: tuple[AgentMessage, ...],
) -> None:
    assert send(ToolResultBudget(DEFAULT), messages) == by_the_book(messages)


@given(heaps().flatmap(cuts), tails())
def test_piece_by_piece_equals_one_go(
    pieces: list[tuple[AgentMessage, ...]], tail: tuple[AgentMessage, ...]
) -> None:
    budget = ToolResultBudget(DEFAULT)
    for view in grow(pieces):
        for asked in (view.with_tail(tail), view):
            assert send(budget, asked) == by_the_book(tuple(asked))
            assert send(ToolResultBudget(DEFAULT), asked) == by_the_book(tuple(asked))


@given(heaps(), heaps())
def test_another_transcript_starts_over(
    one: tuple[AgentMessage, ...], other: tuple[AgentMessage, ...]
) -> None:
    budget = ToolResultBudget(DEFAULT)
    first, second = MessageLog(one).view(), MessageLog(other).view()
    for view in (first, second, first):
        assert send(budget, view) == by_the_book(tuple(view))
        assert send(budget, list(view)) == by_the_book(tuple(view))


@given(heaps().flatmap(cuts))
def test_the_transcript_stays_whole_and_what_fits_is_shared(
    pieces: list[tuple[AgentMessage, ...]],
) -> None:
    budget = ToolResultBudget(DEFAULT)
    for view in grow(pieces):
        before = tuple(view)
        sent = budget.transform_context(view, CONTEXT)
        assert tuple(view) == before
        clipped = sum(a is not b for a, b in zip(before, sent, strict=True))
        assert clipped == sum(a != b for a, b in zip(before, by_the_book(before), strict=True))
        if not clipped:
            assert sent is view


# --- examples ---------------------------------------------------------------------------------

BIG = "0123456789" * 20


def turn(call_id: str, *names: str) -> list[AgentMessage]:
    return [
        calling(*[(f"{call_id}{name}", name) for name in names]),
        *[result(f"{call_id}{name}", name, BIG) for name in names],
    ]


def test_results_are_whole_until_the_next_batch() -> None:
    budget = ToolResultBudget(100)
    log = MessageLog([UserMessage("go"), *turn("1", "look", "look2")])
    view = log.view()
    assert budget.transform_context(view, CONTEXT) is view
    for note in ("hm", "well"):  # neither words nor notes make a batch old
        log.extend([AssistantMessage.from_text("so"), UserMessage(note)])
        view = log.view()
        assert budget.transform_context(view, CONTEXT) is view
    log.extend(turn("2", "look"))
    sent = send(budget, log.view())
    assert [len(m.plain_text) for m in sent if isinstance(m, ToolResultMessage)] == [100, 100, 200]
    assert sent[-1] is log[-1]


def test_only_the_newest_results_are_in_the_tail() -> None:
    """The plugins behind this one rely on that: calls are in the part that stays."""
    log = MessageLog([*turn("1", "look"), *turn("2", "look", "look2"), UserMessage("hm")])
    sent = ToolResultBudget(100).transform_context(log.view(), CONTEXT)
    assert isinstance(sent, MessageView)
    assert (sent.stable, sent.tail) == (3, tuple(log)[3:])


def test_a_clipped_prefix_stays_the_same() -> None:
    budget = ToolResultBudget(100)
    log = MessageLog([*turn("1", "look"), *turn("2", "look")])
    before = send(budget, log.view())
    for number_of_turn in range(3, 9):
        log.extend(turn(str(number_of_turn), "look"))
        sent = send(budget, log.view())
        seen_whole = len(before) - 1  # the newest result then; it is old now
        assert sent[:seen_whole] == before[:seen_whole]
        before = sent


def test_a_tool_may_have_its_own_cap_or_none() -> None:
    messages = [*turn("1", "look", "short", "never", "unknown"), calling(("2", "look"))]
    ctx = before_call(
        None, Capped("look", None), Capped("short", 60), Capped("never", "never"), Capped("o", 1)
    )
    sent = ToolResultBudget(100).transform_context(messages, ctx)
    sizes = {m.tool_name: len(m.plain_text) for m in sent if isinstance(m, ToolResultMessage)}
    assert sizes == {"look": 100, "short": 60, "never": 200, "unknown": 100}


def test_a_cap_may_be_larger_than_the_default() -> None:
    messages = [*turn("1", "look"), calling(("2", "look"))]
    ctx = before_call(None, Capped("look", 200))
    assert ToolResultBudget(100).transform_context(messages, ctx) is messages


@pytest.mark.parametrize(("size", "clipped"), [(99, False), (100, False), (101, True)])
def test_a_result_at_its_cap_is_left_alone(size: int, clipped: bool) -> None:
    messages: list[AgentMessage] = [
        calling(("1", "look")),
        result("1", "look", "x" * size),
        calling(("2", "look")),
    ]
    sent = ToolResultBudget(100).transform_context(messages, CONTEXT)
    assert (sent is not messages) == clipped
    assert (sent[1] != messages[1]) == clipped


def old(*blocks: ToolResultBlock) -> ToolResultMessage:
    return ToolResultMessage("1", "look", blocks, True, "told", {"d": 1}, 7)


def test_everything_but_the_text_is_kept() -> None:
    image, other = ImageContent("data:,x"), ImageContent("data:,y", "image/png", "alt")
    given_result = old(TextContent(BIG[:100]), image, TextContent(BIG[100:]), other)
    sent = send(ToolResultBudget(100), [given_result, calling(("2", "look"))])
    assert sent[0] == old(TextContent(clip(BIG, 100)), image, other)


def test_images_alone_are_no_text() -> None:
    messages: list[AgentMessage] = [old(ImageContent("data:," + BIG)), calling(("2", "look"))]
    assert ToolResultBudget(1).transform_context(messages, CONTEXT) is messages


# --- what it costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 200], ids=["fits", "clipped"])
def test_a_turn_costs_what_is_new_in_it(size: int) -> None:
    budget = ToolResultBudget(100)
    backing: list[AgentMessage] = []
    handed: list[int] = []
    for number_of_turn in range(500):
        call_id = str(number_of_turn)
        backing += [calling((call_id, "look")), result(call_id, "look", "x" * size)]
        view = CountingView(backing)
        sent = budget.transform_context(view, CONTEXT)
        assert len(sent) == len(backing)
        handed.append(view.handed)
    assert max(handed) <= 6
    assert len(set(handed[2:])) == 1, "the same in the last turn as in the third"


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_of_nothing_is_refused(cap: int) -> None:
    with pytest.raises(ConfigError, match=f"default_max_chars must be at least 1, not {cap}"):
        ToolResultBudget(cap)


def test_every_run_gets_its_own_with_the_same_cap() -> None:
    assert ToolResultBudget().default_max_chars == 32_000
    budget = ToolResultBudget(100)
    hooks = Hooks.of([budget])
    assert hooks.names["context_transform"] == ("tool_result_budget",)
    log = MessageLog([*turn("1", "look")])
    early = log.view()
    log.extend(turn("2", "look"))
    assert send(budget, log.view()) != tuple(log)
    fresh = hooks.for_run().plugins[0]
    assert isinstance(fresh, ToolResultBudget)
    assert fresh is not budget
    assert fresh.default_max_chars == 100
    assert fresh.transform_context(early, CONTEXT) is early
    assert send(fresh, log.view()) == send(budget, log.view())
