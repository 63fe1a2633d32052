"""What remains of compacted transcripts, whatever they are made of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import (
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    Compaction,
    ContextOverflowError,
    CustomMessage,
    StreamError,
    StreamErrorKind,
    SystemMessage,
    TokenBudget,
    ToolCall,
    ToolResultBudget,
    ToolResultMessage,
    UniqueToolCallIds,
    UserMessage,
)
from clark_agent.history import repair_history
from clark_agent.messages.transcript import MessageLog
from clark_agent.plugins._compacted import KIND, Mark, Projection, mark_of
from clark_agent.plugins._turn_text import texts_of
from clark_agent.plugins.base import BeforeRequestContext, Question
from clark_agent.plugins.read_earlier import found, read
from clark_agent.prices import ModelRef
from clark_agent.testing import say
from clark_agent.tools import AgentTool, ToolHistoryPolicy, ToolRegistry, ToolResult
from tests.plugins.support import (
    CharacterEstimator,
    CountingView,
    before_call,
    calling,
    cost,
    result,
)

PIN = "pin"


def is_pinned(message: AgentMessage) -> bool:
    return PIN in message.plain_text


class Plan(AgentTool):
    name = "plan"
    history_policy = ToolHistoryPolicy(pins_active_plan=True)

    async def execute(self, args: Any, ctx: Any) -> ToolResult:
        return ToolResult.text("")


class Decision(Plan):
    name = "decision"
    history_policy = ToolHistoryPolicy(keeps_result=True)


TOOLS = ToolRegistry([Plan(), Decision()])
ESTIMATOR = CharacterEstimator()


class Asker:
    """Answers every question with a summary, or fails."""

    def __init__(self, size: int = 10, *, fails: bool = False) -> None:
        self.size = size
        self.fails = fails
        self.asked: list[Question] = []

    async def __call__(self, question: Question) -> AssistantMessage:
        self.asked.append(question)
        if self.fails:
            raise StreamError(StreamErrorKind.FATAL, "401")
        return say("s" * self.size)


def before(log: MessageLog, asker: Asker, overflow: str | None = None) -> BeforeRequestContext:
    return BeforeRequestContext(
        signal=CancellationToken(),
        run_id="r",
        model=ModelRef("m"),
        context_window=None,
        iteration=0,
        messages=log.view(),
        system_prompt="",
        estimator=ESTIMATOR,
        tools=TOOLS,
        overflow=overflow,
        asker=asker,
    )


def run_hook(plugin: Compaction, ctx: BeforeRequestContext) -> list[CustomMessage]:
    return asyncio.run(plugin.before_request(ctx)) or []


def unsound(messages: Sequence[AgentMessage]) -> list[Any]:
    """Calls without their results and the reverse. Ids may repeat: that is for another plugin."""
    changes = repair_history(messages).changes
    return [change for change in changes if not change.kind.value.startswith("renamed")]


def projected(messages: Sequence[AgentMessage], pinned: Any = is_pinned) -> list[AgentMessage]:
    projection = Projection(pinned)
    projection.follow(MessageLog(messages).view(), ESTIMATOR, TOOLS)
    return list(projection.view())


# --- random transcripts ---------------------------------------------------------------------------

TEXTS = st.sampled_from(["", "a", "words " * 3, f"{PIN} it", "w" * 40])


@st.composite
def turns(draw: st.DrawFn) -> list[AgentMessage]:
    """An answer with its results, and a note or two."""
    names = st.sampled_from(["look", "plan", "decision"])
    calls = [
        (draw(st.sampled_from("abc")) + str(n), draw(names)) for n in range(draw(st.integers(0, 3)))
    ]
    if not calls:
        turn: list[AgentMessage] = [AssistantMessage.from_text(draw(TEXTS) or "x")]
    else:
        turn = [calling(*calls), *[result(i, name, draw(TEXTS)) for i, name in calls]]
    notes = st.sampled_from(["user", "system", "custom", "none", "none"])
    for _ in range(draw(st.integers(0, 2))):
        match draw(notes):
            case "user":
                turn.append(UserMessage(draw(TEXTS)))
            case "system":
                turn.append(SystemMessage(draw(TEXTS)))
            case "custom":
                turn.append(CustomMessage("host", {"x": 1}))
            case _:
                pass
    return turn


@st.composite
def marked(draw: st.DrawFn) -> list[AgentMessage]:
    """A sound transcript with markers at the ends of turns, which cut anywhere."""
    messages: list[AgentMessage] = [UserMessage("task"), SystemMessage("rules")]
    for turn in draw(st.lists(turns(), max_size=10)):
        messages += turn
        if draw(st.integers(0, 2)) == 0:
            kept = draw(st.integers(-2, len(messages) + 2))
            text = f"summary {len(messages)}"
            payload = {"text": text, "kept": kept, "merges": draw(st.booleans())}
            messages.append(CustomMessage(KIND, payload))
    return messages


@given(marked())
def test_calls_and_results_are_never_separated(messages: list[AgentMessage]) -> None:
    assert unsound([m for m in messages if mark_of(m) is None]) == []
    sent = projected(messages)
    assert unsound(sent) == []
    assert all(mark_of(m) is None for m in sent)


@given(marked(), st.data())
def test_a_transcript_from_which_others_have_dropped_turns_stays_sound(
    messages: list[AgentMessage], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(messages)))
    while 0 < place < len(messages) and isinstance(messages[place], ToolResultMessage):
        place -= 1
    assert unsound(projected([UserMessage("task"), *messages[place:]])) == []


@given(marked())
def test_what_must_stay_stays_word_for_word(messages: list[AgentMessage]) -> None:
    sent = projected(messages)
    assert sent[:2] == messages[:2]
    for message in messages:
        assert not is_pinned(message) or message in sent
        if isinstance(message, ToolResultMessage) and message.tool_name == "decision":
            assert message in sent
    users = [m for m in messages if isinstance(m, UserMessage)]
    assert users[-1] in sent
    plans = [m for m in messages if isinstance(m, ToolResultMessage) and m.tool_name == "plan"]
    assert not plans or plans[-1] in sent


@given(marked())
def test_it_can_be_followed_message_by_message(messages: list[AgentMessage]) -> None:
    log, projection = MessageLog(), Projection(is_pinned)
    for message in messages:
        log.append(message)
        projection.follow(log.view(), ESTIMATOR, TOOLS)
        assert projection.total == sum([cost(m) for m in projection.view() if mark_of(m) is None])
    assert list(projection.view()) == projected(messages)


@given(marked())
def test_what_a_compaction_has_made_stays_until_they_are_merged(
    messages: list[AgentMessage],
) -> None:
    """What comes before the newest messages is the beginning of every later request, without
    plans, calls and messages of the user that are outdated.
    """
    log, projection = MessageLog(), Projection(is_pinned)
    heads: list[list[AgentMessage]] = []
    for message in messages:
        log.append(message)
        projection.follow(log.view(), ESTIMATOR, TOOLS)
        mark = mark_of(message)
        if mark is not None:
            if mark.merges:
                heads.clear()
            sent = list(projection.view())
            head = len(sent) - len(
                [m for m in log.view()[projection.start :] if mark_of(m) is None]
            )
            heads.append(sent[:head])
    for earlier, later in pairwise(heads):
        place = 0
        for message in earlier:
            if place < len(later) and later[place] == message:
                place += 1
                continue
            assert not is_pinned(message)
            assert message.role != "system"
            assert not (isinstance(message, ToolResultMessage) and message.tool_name == "decision")
            assert not message.plain_text.startswith("summary")


def test_open_calls_stay() -> None:
    is_open = calling(("x", "look"))
    history: list[AgentMessage] = [
        UserMessage("task"),
        is_open,
        say("Still waiting."),
        say("Still."),
        say("Now."),
    ]
    sent = projected([*history, Mark(text="s", kept=1).message()])
    assert [m.plain_text for m in sent] == ["task", "s", "", "Now."]
    assert sent[2] is is_open


@pytest.mark.parametrize(
    "details",
    [
        {"kind": "tool_call_not_executed", "reason": "denied"},
        {"decided_by": [{"plugin": "p", "decision": "deny"}]},
        {"decided_by": [{"plugin": "p", "decision": "allow", "by": "Ada"}]},
        {"decided_by": [{"plugin": "engine", "decision": "give_result"}]},
    ],
)
def test_decisions_of_people_stay(details: Any) -> None:
    decided = ToolResultMessage("x", "look", (), details=details)
    other = ToolResultMessage("y", "look", (), details={"decided_by": [{"decision": "block"}]})
    history: list[AgentMessage] = [
        UserMessage("task"),
        calling(("x", "look")),
        decided,
        calling(("y", "look")),
        other,
    ]
    sent = projected([*history, say("And?"), Mark(text="s", kept=1).message()])
    assert decided in sent
    assert other not in sent


# --- what no longer has to stay ---------------------------------------------------------------


def working(
    plugin: Compaction,
    asker: Asker,
    log: MessageLog,
    turns: range,
    *,
    tool: str = "plan",
    text: str = "plan",
) -> list[Sequence[AgentMessage]]:
    """What is sent in these turns, each tenth of which makes a plan and reads three files."""
    sent: list[Sequence[AgentMessage]] = []
    for number in turns:
        calls = [(f"{number}.{n}", "look") for n in range(3 if number % 10 == 0 else 1)]
        if number % 10 == 0:
            calls.append((f"{number}.plan", tool))
        log.append(calling(*calls))
        for call, name in calls:
            said = f"{text} {number} " if name == tool else ""
            log.append(result(call, name, said + "w" * 40))
        log.extend(run_hook(plugin, before(log, asker)))
        sent.append(plugin.transform_context(log.view(), before_call(ESTIMATOR, *TOOLS.values())))
    return sent


def texts(messages: Sequence[AgentMessage], start: str) -> list[str]:
    return [m.plain_text for m in messages if m.plain_text.startswith(start)]


@pytest.mark.parametrize("fails", [True, False])
def test_outdated_plans_and_notes_do_not_pile_up(fails: bool) -> None:
    plugin, asker = Compaction(6_000, 0.5, 0.3), Asker(fails=fails)
    log = MessageLog([UserMessage("task")])
    sent = working(plugin, asker, log, range(400))
    marks = [mark for message in log if (mark := mark_of(message))]
    assert len(marks) > 8
    assert max(len(texts(messages, "[To save room")) for messages in sent) == int(fails)
    for place, message in enumerate(log):
        if mark_of(message) is not None:
            head = projected(log.view()[: place + 1], None)
            mark = mark_of(message)
            assert mark is not None
            old = head[: len(head) - mark.kept]
            assert len(texts(old, "plan")) <= 1, "only the newest plan stays"
    if fails:
        assert f"the turns 1 to {marks[-1].last_turn} of" in marks[-1].text


def marks_of(log: MessageLog) -> list[AgentMessage]:
    return [message for message in log if mark_of(message) is not None]


def test_summaries_stay_where_notes_are_merged() -> None:
    plugin, log = Compaction(6_000), MessageLog([UserMessage("task")])
    working(plugin, Asker(), log, range(100))
    assert len(marks_of(log)) == 1
    sent = working(plugin, Asker(fails=True), log, range(100, 250))[-1]
    assert len(marks_of(log)) >= 3
    assert len(texts(sent, "[A summary takes")) == 1
    assert len(texts(sent, "[To save room")) == 1


def test_the_next_summary_is_soon_asked_for_however_often_it_has_failed() -> None:
    plugin, log = Compaction(2_500), MessageLog([UserMessage("task")])
    working(plugin, Asker(fails=True), log, range(600))
    asker = Asker()
    assert asyncio.run(plugin.compact(before(log, asker))) is not None
    assert asker.asked, "by hand it is always asked"
    count = len(marks_of(log))
    working(plugin, asker, log, range(600, 720))
    made = [mark_of(message) for message in marks_of(log)[count:]]
    assert any(mark is not None and mark.has_summary for mark in made[:4])


def test_an_unanswered_message_that_is_too_large_goes_when_there_is_a_newer_one() -> None:
    plugin, log = Compaction(1_000), MessageLog([UserMessage("task"), say("Yes?")])
    huge = UserMessage("h" * 3_000)
    log.append(huge)
    log.extend(run_hook(plugin, before(log, Asker(), "too large")))
    assert huge in projected(log.view())
    log.append(UserMessage("Never mind."))
    log.extend(run_hook(plugin, before(log, Asker())))
    assert huge in projected(log.view()), "a model may take more than is known of it"
    log.extend(run_hook(plugin, before(log, Asker(), "too large")))
    sent = projected(log.view())
    assert huge not in sent
    assert sent[-1] == UserMessage("Never mind.")


def test_pinned_messages_go_before_the_request_is_too_large_for_good() -> None:
    plugin, log = Compaction(2_000), MessageLog([UserMessage("task")])
    sent = working(plugin, Asker(), log, range(300), tool="decision", text="decided")
    assert max(sum([cost(m) for m in messages]) for messages in sent) < 2_000
    marks = [mark for message in log if (mark := mark_of(message))]
    assert any(mark.drops_pins for mark in marks)
    assert not marks[0].drops_pins
    assert unsound(sent[-1]) == []


# --- with the plugin itself -----------------------------------------------------------------------


@given(
    st.lists(turns(), min_size=1, max_size=12),
    st.integers(40, 400),
    st.floats(0.3, 1),
    st.floats(0.1, 0.9),
    st.integers(0, 200),
    st.booleans(),
    st.booleans(),
)
def test_random_runs_stay_sound_and_small(
    made: list[list[AgentMessage]],
    window: int,
    trigger: float,
    share: float,
    summary: int,
    fails: bool,
    overflows: bool,
) -> None:
    plugin = Compaction(window, trigger, trigger * share, pinned=is_pinned)
    asker, log = Asker(summary, fails=fails), MessageLog([UserMessage("task")])
    context = before_call(ESTIMATOR, *TOOLS.values())
    for turn in made:
        log.extend(turn)
        added = run_hook(plugin, before(log, asker))
        log.extend(added)
        sent = plugin.transform_context(log.view(), context)
        assert unsound(sent) == []
        size = sum([cost(m) for m in sent])
        if added:
            assert size < sum([cost(m) for m in projected(log.view()[: len(log) - 1])])
        again = projected([*log, *run_hook(plugin, before(log, asker))])
        assert sum([cost(m) for m in again]) <= size
        if overflows:
            more = run_hook(plugin, before(log, asker, "too large"))
            log.extend(more)
            shorter = plugin.transform_context(log.view(), context)
            assert not more or sum([cost(m) for m in shorter]) < size
            assert unsound(shorter) == []
        fresh = Compaction(window, trigger, trigger * share, pinned=is_pinned)
        assert list(fresh.transform_context(log.view(), context)) == list(
            plugin.transform_context(log.view(), context)
        )


OTHERS = [
    lambda: TokenBudget(150, trim_trigger=0.8, pinned=is_pinned),
    lambda: ToolResultBudget(20),
    UniqueToolCallIds,
]


@given(st.lists(turns(), min_size=1, max_size=10), st.permutations(range(4)), st.integers(60, 300))
def test_it_works_beside_other_transforms_in_any_order(
    made: list[list[AgentMessage]], order: list[int], window: int
) -> None:
    compaction = Compaction(window, pinned=is_pinned)
    chain: list[Any] = [compaction, *[make() for make in OTHERS]]
    chain = [chain[place] for place in order]
    asker, log = Asker(), MessageLog([UserMessage("task")])
    context = before_call(CharacterEstimator(), *TOOLS.values())
    for turn in made:
        log.extend(turn)
        log.extend(run_hook(compaction, before(log, asker)))
        messages: Sequence[AgentMessage] = log.view()
        for plugin in chain:
            try:
                messages = plugin.transform_context(messages, context)
            except ContextOverflowError:  # the budget is too small for what must stay
                return
            assert unsound(messages) == []


def test_a_token_budget_that_shortens_the_transcript_keeps_what_was_compacted() -> None:
    history: list[AgentMessage] = [UserMessage("task")]
    for number in range(20):
        history += [calling((str(number), "look")), result(str(number), text="w" * 40)]
        if number == 5:
            history.append(Mark(text="what happened", kept=2).message())
    shorter = TokenBudget(200).recover(MessageLog(history).view(), before_call(ESTIMATOR))
    assert len(shorter) < len(history) - 10
    assert "what happened" in [m.plain_text for m in projected(shorter)]
    assert unsound(projected(shorter)) == []


def test_a_turn_costs_its_new_messages_alone() -> None:
    """Whatever the length of the transcript, also after compactions."""
    plugin, asker = Compaction(600), Asker()
    items: list[AgentMessage] = [UserMessage("task")]
    context = before_call(ESTIMATOR, *TOOLS.values())
    handed: list[int] = []
    for number in range(400):
        items += [calling((str(number), "look")), result(str(number), text="w" * 20)]
        view = CountingView(items)
        hook = before(MessageLog(), asker)
        added = run_hook(plugin, replace(hook, messages=view))
        items += added
        view = CountingView(items) if added else view
        plugin.transform_context(view, context)
        if not added:
            handed.append(view.handed)
    assert max(handed) <= 4
    assert len(asker.asked) > 8


# --- reading it again -----------------------------------------------------------------------------


def test_every_turn_can_be_read_and_found() -> None:
    history: list[AgentMessage] = [UserMessage("task")]
    for number in range(30):
        history += [calling((str(number), "look")), result(str(number), text=f"Fact {number}!")]
    history.append(Mark(text="Fact 7! was replaced", kept=2).message())
    for number in range(30):
        assert f"Fact {number}!" in read(history, number + 1, number + 1, 1).plain_text
        assert f"turn {number + 1}:" in found(history, f"fact {number}!")
    assert "task" in read(history, 0, 0, 1).plain_text
    assert "replaced" not in found(history, "fact 7!")
    assert found(history, "nothing like it").startswith("No message has")
    assert "and 10 more turns" in found(history, "Fact")
    assert read(history, 31, 31, 1).is_error
    assert read(history, 5, 4, 1).is_error


def test_searches_do_not_find_earlier_searches() -> None:
    history: list[AgentMessage] = [UserMessage("task"), calling(("a", "look"))]
    history.append(result("a", text="The code is 4711."))
    for number in range(30):
        search = ToolCall(f"s{number}", "read_earlier", {"words": "code"})
        history.append(say(f"Look for me {number}.", search))
        history.append(result(search.id, "read_earlier", found(history, "code")))
    assert found(history, "code") == "turn 1: Result of look: The code is 4711."
    assert found(history, "me 29.") == "turn 31: Assistant: Look for me 29."
    assert "read_earlier" in read(history, 2, 2, 1).plain_text


def test_words_that_are_not_found_are_cut() -> None:
    assert len(found([UserMessage("task")], "q" * 60_000)) < 300


@pytest.mark.parametrize("before", ["İ" * 4_000, "ß" * 4_000, "İx" * 10, ""])
def test_excerpts_have_the_words_whatever_becomes_of_them_in_lower_case(before: str) -> None:
    assert "Zebra" in found([UserMessage(f"{before} Zebra {'İ' * 300}")], "zEBRA")


def test_pages_have_everything_and_a_limit() -> None:
    text = "".join([f"{number:05} " for number in range(9_000)])
    history: list[AgentMessage] = [calling(("a", "look")), result("a", text=text)]
    pages = [read(history, 1, 1, page).plain_text for page in range(1, 8)]
    assert all(len(page) < 8_100 for page in pages)
    assert text in "".join([page.partition("\n\n[page ")[0] for page in pages])
    assert read(history, 1, 1, 8).is_error


@given(st.lists(st.integers(0, 3_000), max_size=20), st.integers(100, 5_000))
def test_a_text_of_many_messages_has_a_limit(sizes: list[int], room: int) -> None:
    messages = [UserMessage("u" * size) for size in sizes]
    text = texts_of(messages, room)
    assert len(text) <= max(room, 260 * len(sizes)) + 10 * len(sizes)
    if sum(sizes) + 10 * len(sizes) <= room:
        assert text.count("u") >= sum(sizes)
