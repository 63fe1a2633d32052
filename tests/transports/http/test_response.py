"""What pieces of an answer come to, whichever provider sent them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    AssistantMessage,
    ProviderContent,
    ReasoningContent,
    ReasoningDetailsContent,
    StopReason,
    StreamErrorKind,
    TextContent,
    ThinkingContent,
    ToolCall,
    Usage,
)
from clark_agent.stream import (
    MessageAssembler,
    ReasoningDetailsChunk,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
)
from clark_agent.testing import FakeClock
from clark_agent.transports.http.response import Answer, Failure
from clark_agent.types import AssistantBlock
from tests.strategies import cuts, open_json


def answer(**settings: Any) -> Answer:
    return Answer(**{"new_id": FakeClock().new_id, **settings})


def message_of(told: Answer) -> AssistantMessage:
    told.close()
    message = told.message()
    assert isinstance(message, AssistantMessage), message
    return message


def failure_of(told: Answer) -> Failure:
    told.close()
    failure = told.message()
    assert isinstance(failure, Failure), failure
    return failure


def blocks(*steps: Callable[[Answer], None], **settings: Any) -> tuple[AssistantBlock, ...]:
    told = answer(**settings)
    for step in steps:
        step(told)
    return message_of(told).content


def text(delta: str) -> Callable[[Answer], None]:
    return lambda told: told.text(delta)


def reasoning(delta: str) -> Callable[[Answer], None]:
    return lambda told: told.reasoning(delta)


def details(*items: Any) -> Callable[[Answer], None]:
    return lambda told: told.reasoning_details(items)


def call(key: int | str | None, *given: str | None) -> Callable[[Answer], None]:
    return lambda told: told.call(key, *given)


# --- text and thoughts ------------------------------------------------------------------------


MEANT = "One. <think>hm</think>Two. <thought>so</thought>Three."


def test_tags_behind_the_first_word_are_text() -> None:
    assert blocks(text(MEANT)) == (TextContent(MEANT),)
    prose = "Wrap it in a <reasoning> element. Then deploy"
    assert blocks(text(prose)) == (TextContent(prose),)
    code = "`<think>` opens it"
    assert blocks(text(code)) == (TextContent(code),)


def test_thoughts_in_front_of_the_first_word_are_kept_apart() -> None:
    got = blocks(text("\n<think>hm</think> <thought>so</thought>\nYes: <think> is a tag."))
    assert got == (
        TextContent("\n"),
        ThinkingContent("hm"),
        TextContent(" "),
        ThinkingContent("so"),
        TextContent("\nYes: <think> is a tag."),
    )


def test_thoughts_are_kept_apart_anywhere_where_that_is_wanted() -> None:
    assert blocks(text(MEANT), thinking_tags="anywhere") == (
        TextContent("One. "),
        ThinkingContent("hm"),
        TextContent("Two. "),
        ThinkingContent("so"),
        TextContent("Three."),
    )


@pytest.mark.parametrize("where", ["leading", "anywhere"])
def test_a_thought_that_never_ends_is_kept(where: str) -> None:
    told = answer(thinking_tags=where)
    told.text("<think>first</think><think>but </thi")
    told.call(0, "a", "look", "{}")
    assert message_of(told).content == (
        ThinkingContent("firstbut "),
        ToolCall("a", "look", {}),
        ThinkingContent("</thi"),
    )


def test_a_thought_is_told_as_it_comes() -> None:
    told = answer()
    for delta in ("<think>On", "e, ", "two</thi", "nk>Yes"):
        told.text(delta)
    assert told.take() == [
        ThinkingChunk("On"),
        ThinkingChunk("e, "),
        ThinkingChunk("two"),
        TextChunk("Yes"),
    ]


def test_what_only_looked_like_a_tag_is_text() -> None:
    for where in ("leading", "anywhere"):
        assert blocks(text("<thi"), text("s>b"), text(" < c <thin"), thinking_tags=where) == (
            TextContent("<this>b < c <thin"),
        )


def test_tags_are_text_where_they_are_not_wanted() -> None:
    assert blocks(text("<think>hm</think>"), thinking_tags="off") == (
        TextContent("<think>hm</think>"),
    )


@given(
    st.lists(
        st.sampled_from(["<think>", "</ Think>", "<", "thin", ">", " ", "a", "é"]), max_size=12
    )
    .map("".join)
    .flatmap(cuts),
    st.sampled_from(["leading", "anywhere", "off"]),
)
def test_nothing_that_was_said_is_lost_however_it_is_cut(deltas: list[str], where: str) -> None:
    whole, cut = answer(thinking_tags=where), answer(thinking_tags=where)
    whole.text("".join(deltas))
    for delta in deltas:
        cut.text(delta)
    contents = []
    for told in (whole, cut):
        told.close()
        message = told.partial(Failure(StreamErrorKind.EMPTY, ""))
        contents.append(message.content)
    assert contents[0] == contents[1]
    texts = [b.text for b in contents[0] if isinstance(b, (TextContent, ThinkingContent))]
    kept = "".join(texts)
    assert _without_tags(kept) == _without_tags("".join(deltas))


def _without_tags(said: str) -> str:
    """All that is no part of a tag; what is left of tags may be one again."""
    while (shorter := re.sub(r"<\s*/?\s*think\s*>", "", said, flags=re.I)) != said:
        said = shorter
    return said


def test_text_is_told_at_once() -> None:
    told = answer()
    told.text("<th")
    assert told.take() == [], "it may become a tag"
    told.text("ere")
    assert told.take() == [TextChunk("<there")]
    told.text(" <th")
    assert told.take() == [TextChunk(" <th")], "it cannot become a tag any more"
    assert told.take() == []


# --- calls ------------------------------------------------------------------------------------

LOOK = ToolCall("a", "look", {"at": 1})


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, "a", "look", '{"at": 1}')],
        [("item_1", "a", "look", '{"at": 1}')],
        [(None, "a", "look", '{"at": 1}')],
        [(7, "a", "look", ""), (7, None, None, '{"at"'), (7, None, None, ": 1}")],
        [(None, "a", "look", ""), (None, None, None, '{"at"'), (None, "", "", ": 1}")],
        [(0, None, "look", '{"at"'), (0, "a", None, ": 1}")],
        [(0, "a", None, None), (0, None, "look", None), (0, None, None, '{"at": 1}')],
        [(0, "a", "lo", None), (0, None, "ok", None), (0, None, None, '{"at": 1}')],
        [(0, "a", "lo", None), (0, "a", "look", None), (0, "a", "look", '{"at": 1}')],
        [(0, "a", "look", '{"at"'), (0, "b", None, ": 1"), (0, "c", None, "}")],
        [(0, "a", "look", '{"at"'), (0, "b", "look", ": 1}")],
        [(0, "a", "look", '{"at": 1}'), (0, "a", "look", "")],
    ],
    ids=str,
)
def test_one_call(pieces: list[tuple[Any, ...]]) -> None:
    assert blocks(*[call(*piece) for piece in pieces]) == (LOOK,)


SEE = ToolCall("b", "see", {"at": 2})


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, "a", "look", '{"at": 1}'), (1, "b", "see", '{"at": 2}')],
        [(1, "a", "look", '{"at": 1}'), (0, "b", "see", '{"at": 2}')],
        [(None, "a", "look", '{"at": 1}'), (None, "b", "see", '{"at": 2}')],
        [(0, "a", "look", '{"at": 1}'), (0, "b", "see", '{"at": 2}')],
        [(0, "a", "look", '{"at": 1}'), (0, "b", "see", ""), (0, None, None, '{"at": 2}')],
        [
            (0, "a", "look", ""),
            (1, "b", "see", ""),
            (0, None, None, '{"at": 1}'),
            (1, None, None, '{"at": 2}'),
        ],
        [(None, "a", "look", '{"at": 1}'), (None, "b", "see", ""), (None, None, None, '{"at": 2}')],
    ],
    ids=str,
)
def test_two_calls(pieces: list[tuple[Any, ...]]) -> None:
    assert blocks(*[call(*piece) for piece in pieces]) == (LOOK, SEE)


def test_calls_of_one_number_and_one_name_that_have_no_arguments() -> None:
    got = blocks(call(0, "a", "look", "{}"), call(0, "b", "look", "{}"))
    assert got == (ToolCall("a", "look", {}), ToolCall("b", "look", {}))


def test_chunks_say_which_call_by_its_place() -> None:
    told = answer()
    told.call("item_9", "a", "look", None)
    told.call("item_3", "b", "see", "{}")
    told.call("item_9", None, None, "{}")
    assert told.take() == [
        ToolCallChunk(0, "a", "look", None),
        ToolCallChunk(1, "b", "see", "{}"),
        ToolCallChunk(0, None, None, "{}"),
    ]


def test_a_call_without_an_id_gets_one() -> None:
    assert blocks(call(0, None, "look", "{}")) == (ToolCall("id-1", "look", {}),)


# --- structured reasoning ---------------------------------------------------------------------


def fragment(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning.text", "index": 0, **fields}


def test_fragments_are_told_as_one_item_before_what_follows() -> None:
    told = answer()
    told.reasoning_details([fragment(text="Let ")])
    told.reasoning_details([fragment(text="me."), fragment(signature="s")])
    assert told.take() == []
    told.text("Yes")
    assert told.take() == [
        ReasoningDetailsChunk((fragment(text="Let me.", signature="s"),)),
        TextChunk("Yes"),
    ]


def test_what_was_given_is_not_changed() -> None:
    first, second = fragment(text="Let "), fragment(text="me.", signature="s")
    blocks(details(first), details(second), text("Yes"))
    assert (first, second) == (fragment(text="Let "), fragment(text="me.", signature="s"))


def test_a_whole_item_is_passed_on_untouched() -> None:
    item = {"type": "reasoning.text", "text": "So.", "signature": "s", "new": [{}]}
    [block, _] = blocks(details(item), text("Yes"))
    assert isinstance(block, ReasoningDetailsContent)
    assert block.details[0] is item


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (fragment(text="a"), fragment(index=1, text="b")),
        (fragment(text="a"), {"type": "reasoning.summary", "index": 0, "summary": "b"}),
        (fragment(text="a", id="1"), fragment(text="b", id="2")),
        (fragment(text="a", index=None, signature="s"), fragment(text="b", index=None)),
        (
            {"type": "reasoning.encrypted", "data": "a"},
            {"type": "reasoning.encrypted", "data": "b"},
        ),
        ({"type": "new", "text": "a"}, {"type": "new", "text": "b"}),
        ("no item", "no item"),
        (fragment(text="a"), None),
    ],
    ids=["index", "type", "id", "signature", "blob", "unknown", "no object", "null"],
)
def test_what_is_another_item(first: Any, second: Any) -> None:
    [block, _] = blocks(details(first, second), text("Yes"))
    assert isinstance(block, ReasoningDetailsContent)
    assert block.details == (first, second)


def test_reasoning_of_both_kinds_and_a_call() -> None:
    item = fragment(text="So.")
    assert blocks(reasoning("So."), details(item), call(0, "a", "look", "{}")) == (
        ReasoningContent("So."),
        ReasoningDetailsContent((item,)),
        ToolCall("a", "look", {}),
    )


# --- how it ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "with_text", "with_call"),
    [
        (None, StopReason.END_TURN, StopReason.TOOL_USE),
        (StopReason.END_TURN, StopReason.END_TURN, StopReason.TOOL_USE),
        (StopReason.TOOL_USE, StopReason.END_TURN, StopReason.TOOL_USE),
        (StopReason.MAX_TOKENS, StopReason.MAX_TOKENS, StopReason.MAX_TOKENS),
        (StopReason.OTHER, StopReason.OTHER, StopReason.OTHER),
    ],
)
def test_the_reason_says_what_the_content_says(
    finish: StopReason | None, with_text: StopReason, with_call: StopReason
) -> None:
    for step, expected in ((text("Hi"), with_text), (call(0, "a", "look", "{}"), with_call)):
        told = answer()
        step(told)
        told.finish = finish
        assert message_of(told).stop_reason is expected


@pytest.mark.parametrize(("tokens", "is_cut"), [(63, False), (64, True), (65, True)])
def test_an_answer_as_long_as_allowed_was_cut_off(tokens: int, is_cut: bool) -> None:
    told = answer(cap=64)
    told.text("And then")
    told.finish = StopReason.END_TURN
    told.usage = Usage(9, tokens)
    expected = StopReason.MAX_TOKENS if is_cut else StopReason.END_TURN
    message = message_of(told)
    assert (message.stop_reason, message.usage) == (expected, Usage(9, tokens))


def test_a_provider_that_says_that_it_failed() -> None:
    told = answer()
    told.text("Hi")
    told.finish = StopReason.ERROR
    assert failure_of(told).kind is StreamErrorKind.TRANSIENT


@pytest.mark.parametrize("step", [text(""), text(" \n"), reasoning("Hm"), details(fragment())])
def test_what_cannot_be_used(step: Callable[[Answer], None]) -> None:
    told = answer()
    step(told)
    assert failure_of(told).kind is StreamErrorKind.ZERO_OUTPUT_TRANSPORT


def test_a_thought_alone_cannot_be_used() -> None:
    told = answer()
    told.text("<think>hm</think>")
    failure = failure_of(told)
    assert failure.kind is StreamErrorKind.ZERO_OUTPUT_TRANSPORT
    assert failure.message == "the answer has neither text nor a tool call, only reasoning"


def test_an_item_of_a_provider_alone_cannot_be_used_either() -> None:
    told = answer()
    told.block(ProviderContent("p", {"type": "search"}))
    failure = failure_of(told)
    assert failure.kind is StreamErrorKind.ZERO_OUTPUT_TRANSPORT
    assert failure.message.endswith("call, only items of the provider's own tools")


def test_nothing_but_cut_off_is_an_answer() -> None:
    """Asking again would end in the same way; the loop knows what to do about a limit."""
    told = answer()
    told.reasoning("Let me think")
    told.finish = StopReason.MAX_TOKENS
    assert message_of(told).content == (ReasoningContent("Let me think"),)


def test_nothing_because_it_was_withheld() -> None:
    told = answer()
    told.withheld = "the filter stopped it"
    assert failure_of(told) == Failure(StreamErrorKind.FATAL, "the filter stopped it")
    told.text("but")
    assert message_of(told).plain_text == "but"


def test_what_came_of_an_answer_that_failed() -> None:
    told = answer()
    told.text("Hel")
    told.usage = Usage(9, 1)
    for kind, reason in (
        (StreamErrorKind.ABORTED, StopReason.ABORTED),
        (StreamErrorKind.TRANSIENT, StopReason.ERROR),
    ):
        assert told.partial(Failure(kind, "oh")) == AssistantMessage(
            (TextContent("Hel"),), reason, "oh", usage=Usage(9, 1)
        )


# --- properties -------------------------------------------------------------------------------

words = st.text(st.sampled_from("ab <>/thinkug\n🦀"), max_size=8)
steps = st.lists(
    st.one_of(
        words.map(text),
        words.map(reasoning),
        st.lists(open_json() | st.builds(fragment, text=words), max_size=2).map(
            lambda items: details(*items)
        ),
        st.builds(
            call,
            st.none() | st.integers(0, 2) | st.sampled_from(["x", "y"]),
            st.none() | st.sampled_from(["", "a", "b"]),
            st.none() | st.sampled_from(["", "look", "lo", "see"]),
            st.none() | st.sampled_from(["", "{", "}", '"a"', ":", "1"]),
        ),
        st.just(lambda told: told.take() and None),
    ),
    max_size=12,
)


@given(steps)
def test_the_chunks_spell_the_message(taken: list[Callable[[Answer], None]]) -> None:
    told = answer()
    assembler = MessageAssembler(FakeClock().new_id)
    for step in taken:
        step(told)
        for chunk in told.take():
            assembler.feed(chunk)
    # What has been told so far is what a failure here would leave.
    failure = Failure(StreamErrorKind.ABORTED, "enough")
    told.close()
    for chunk in told.take():
        assembler.feed(chunk)
    partial = told.partial(failure).content
    assert assembler.message().content == partial
    message = told.message()
    if isinstance(message, AssistantMessage):
        assert message.content == partial


@given(open_json(), st.data())
def test_arguments_in_any_pieces_are_the_same(value: Any, data: st.DataObject) -> None:
    written = json.dumps(value)
    told = answer()
    told.call(0, "a", "look", None)
    for piece in data.draw(cuts(written)):
        told.call(0, None, None, piece)
    whole = answer()
    whole.call(0, "a", "look", written)
    assert message_of(told).content == message_of(whole).content


@given(words, st.data())
def test_text_in_any_pieces_is_the_same(written: str, data: st.DataObject) -> None:
    pieces = data.draw(cuts(written))
    assert blocks(*map(text, pieces), text("!")) == blocks(text(written), text("!"))
