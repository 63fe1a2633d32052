"""A view is a tuple of messages that copies nothing and never changes while its log grows."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import AgentMessage, AssistantMessage, SystemMessage, UserMessage
from clark_agent.intake import accept_messages
from clark_agent.messages.transcript import MessageLog, MessageView, view_of

# Few different ones, so that equal messages meet.
MESSAGES: st.SearchStrategy[AgentMessage] = st.one_of(
    st.builds(UserMessage, st.sampled_from("ab")),
    st.builds(SystemMessage, st.sampled_from("ab")),
    st.just(AssistantMessage.from_text("a")),
)
LISTS = st.lists(MESSAGES, max_size=6)
TUPLES = LISTS.map(tuple)
BOUNDS = st.none() | st.integers(-9, 9)
SLICES = st.builds(slice, BOUNDS, BOUNDS, BOUNDS.filter(lambda step: step != 0))

ONE, TWO, THREE = UserMessage("1"), UserMessage("2"), UserMessage("3")


@given(LISTS, TUPLES, LISTS, SLICES, MESSAGES)
def test_a_view_reads_like_the_tuple_of_its_messages(
    stable: list[AgentMessage],
    tail: tuple[AgentMessage, ...],
    later: list[AgentMessage],
    part: slice,
    sought: AgentMessage,
) -> None:
    log = MessageLog(stable)
    view, model = log.view(tail), (*stable, *tail)
    log.extend(later)
    assert len(view) == len(model)
    assert bool(view) == bool(model)
    assert tuple(view) == model
    assert tuple(reversed(view)) == model[::-1]
    assert view[part] == model[part]
    assert type(view[part]) is tuple
    assert (sought in view) == (sought in model)
    assert view.count(sought) == model.count(sought)
    for index in range(-len(model), len(model)):
        assert view[index] is model[index]
    for index in (-len(model) - 1, len(model)):
        with pytest.raises(IndexError):
            view[index]
    if sought in model:
        assert view.index(sought) == model.index(sought)
    else:
        with pytest.raises(ValueError):  # noqa: PT011 - Sequence gives no text
            view.index(sought)


@given(LISTS, TUPLES, SLICES)
def test_slices_hold_the_very_messages(
    stable: list[AgentMessage], tail: tuple[AgentMessage, ...], part: slice
) -> None:
    got, model = MessageLog(stable).view(tail)[part], (*stable, *tail)[part]
    assert all(a is b for a, b in zip(got, model, strict=True))


@given(LISTS, st.lists(LISTS, max_size=4))
def test_each_view_keeps_what_it_showed_when_it_was_made(
    first: list[AgentMessage], steps: list[list[AgentMessage]]
) -> None:
    log, model = MessageLog(first), list(first)
    views, models = [log.view()], [tuple(model)]
    for step in steps:
        for message in step[:1]:
            log.append(message)
        log.extend(step[1:])
        model += step
        views.append(log.view())
        models.append(tuple(model))
    assert [tuple(view) for view in views] == models
    assert list(log) == model
    assert len(log) == len(model)
    assert [log[i] for i in range(len(model))] == model


def test_an_iteration_that_is_under_way_does_not_see_what_is_appended() -> None:
    log = MessageLog([ONE])
    under_way = iter(log.view())
    assert list(islice(under_way, 1)) == [ONE]
    log.append(TWO)
    assert list(under_way) == []
    with_tail = iter(log.view((THREE,)))
    log.append(ONE)
    assert list(with_tail) == [ONE, TWO, THREE]


def test_a_log_does_not_share_the_list_it_was_given() -> None:
    given_list: list[AgentMessage] = [ONE]
    log = MessageLog(given_list)
    given_list.append(TWO)
    assert list(log) == [ONE]


def test_no_index_but_a_number_or_a_slice() -> None:
    with pytest.raises(TypeError):
        MessageLog([ONE]).view()["0"]  # type: ignore[call-overload]


# --- tails ------------------------------------------------------------------------------------


def test_a_tail_belongs_to_its_view_alone() -> None:
    log = MessageLog([ONE])
    view = log.view((TWO,))
    assert (view.stable, view.tail) == (1, (TWO,))
    assert list(log) == [ONE]
    assert log.view().tail == ()
    log.append(THREE)
    assert tuple(view) == (ONE, TWO)
    assert tuple(log.view()) == (ONE, THREE)


def test_with_tail_replaces_the_tail_and_leaves_the_view() -> None:
    log = MessageLog([ONE])
    view = log.view((TWO,))
    log.append(TWO)
    other = view.with_tail((THREE, THREE))
    assert tuple(other) == (ONE, THREE, THREE)
    assert (other.stable, other.tail) == (1, (THREE, THREE))
    assert tuple(view) == (ONE, TWO)
    assert other.grew_from(view)


# --- what grew from what ----------------------------------------------------------------------


def test_grew_from_needs_the_same_log_and_no_fewer_messages() -> None:
    log = MessageLog([ONE])
    early = log.view()
    noted = log.view((THREE,))
    log.append(TWO)
    late = log.view()
    elsewhere = MessageLog([ONE, TWO]).view()
    assert late.grew_from(early)
    assert late.grew_from(late)
    assert late.grew_from(noted), "the tail is not among the messages that stay"
    assert noted.grew_from(early)
    assert early.grew_from(noted)
    assert not early.grew_from(late)
    assert not late.grew_from(elsewhere), "equal messages of another log"
    assert not elsewhere.grew_from(late)
    assert not late.grew_from(None)
    assert not MessageLog().view().grew_from(MessageLog().view())


@given(LISTS, st.lists(st.tuples(LISTS, TUPLES), min_size=1, max_size=4))
def test_what_grew_begins_with_the_stable_messages_of_the_earlier(
    first: list[AgentMessage], steps: list[tuple[list[AgentMessage], tuple[AgentMessage, ...]]]
) -> None:
    log = MessageLog(first)
    views = [log.view()]
    for new, tail in steps:
        log.extend(new)
        views.append(log.view(tail))
    for position, earlier in enumerate(views):
        for later in views[position:]:
            assert later.grew_from(earlier)
            assert later[: earlier.stable] == earlier[: earlier.stable]


# --- identity, equality -----------------------------------------------------------------------


class Untouchable(list[AgentMessage]):
    """A backing list that lets nobody read it."""

    def __iter__(self) -> None:  # type: ignore[override]
        raise AssertionError("a view was made by copying")

    def __getitem__(self, index: object) -> None:  # type: ignore[override]
        raise AssertionError("a view was made by reading")


def test_making_views_reads_and_copies_nothing() -> None:
    backing = Untouchable([ONE] * 1000)
    view = MessageView(backing, 1000)
    later = view.with_tail((TWO,))
    assert (len(view), len(later)) == (1000, 1001)
    assert later.grew_from(view)
    assert later[-1] is TWO
    assert view_of(view) is view
    assert repr(view) == "<MessageView of 1000 messages>"


def test_all_views_of_a_log_share_its_list() -> None:
    log = MessageLog([ONE])
    views = [log.view()]
    for _ in range(100):
        log.append(TWO)
        views.append(log.view((THREE,)))
    backing = views[0]._items
    assert all(view._items is backing for view in views)
    assert views[0].with_tail((TWO,))._items is backing
    assert [view.stable for view in views] == list(range(1, 102))


@given(LISTS, TUPLES, LISTS)
def test_views_are_equal_when_their_messages_are(
    stable: list[AgentMessage], tail: tuple[AgentMessage, ...], other: list[AgentMessage]
) -> None:
    view, model = MessageLog(stable).view(tail), [*stable, *tail]
    same = MessageLog(model).view()
    assert view == same
    assert view == model
    assert view == tuple(model)
    assert tuple(model) == view
    assert (view == MessageLog(other).view()) == (model == other)
    assert (view != other) == (model != other)


def test_a_view_is_not_equal_to_what_is_no_sequence_of_messages() -> None:
    view = MessageLog().view()
    assert view != ""
    assert view != {}
    assert view != None  # noqa: E711
    with pytest.raises(TypeError, match="unhashable"):
        hash(view)


@given(LISTS)
def test_view_of_takes_any_sequence(messages: list[AgentMessage]) -> None:
    for sequence in (messages, tuple(messages)):
        view = view_of(sequence)
        assert tuple(view) == tuple(messages)
        assert (view.stable, view.tail) == (len(messages), ())
        assert not view.grew_from(view_of(sequence))


# --- what a host returns ----------------------------------------------------------------------


@given(LISTS)
def test_messages_from_a_host_are_taken_as_they_are(messages: list[AgentMessage]) -> None:
    view = MessageLog(messages).view()
    for sequence in (messages, tuple(messages), view):
        assert accept_messages(sequence) is sequence
    assert accept_messages(iter(messages)) == tuple(messages)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "not NoneType"),
        ("hi", "not str"),
        (b"hi", "not bytes"),
        (ONE, "not UserMessage"),
        ([ONE, "hi"], "but one is a str"),
        ([[ONE]], "but one is a list"),
        (iter([ONE, None]), "but one is a NoneType"),
    ],
)
def test_what_is_no_sequence_of_messages_is_refused(value: object, says: str) -> None:
    with pytest.raises(TypeError, match=f"expected messages, {says}"):
        accept_messages(value)
