"""Compaction in runs, with a scripted model that also writes the summaries."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    CancellationToken,
    Compaction,
    ConfigError,
    Conversation,
    CustomMessage,
    ImageContent,
    LoopConfig,
    LoopOutcome,
    RunAborted,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamRequest,
    SystemMessage,
    TextContent,
    TokenBudget,
    ToolCall,
    ToolResultMessage,
    UniqueToolCallIds,
    Usage,
    UserMessage,
    run,
    tool,
)
from clark_agent.history import repair_history
from clark_agent.plugins._compacted import mark_of
from clark_agent.plugins._windows import DEFAULT_WINDOW, window_of, window_said
from clark_agent.prices import ModelRef
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog, check_prefix, fork, usage_tree
from clark_agent.stream import Done, Error, Start, StreamEvent
from clark_agent.testing import RecordingSink, ScriptedStream, check_events, say
from clark_agent.tools import ToolHistoryPolicy, ToolResult

EMPTY = AssistantMessage((), StopReason.OTHER)
FACT = "The password is swordfish."
WINDOW = 2_000


@tool
def look(number: int) -> str:
    """Look something up."""
    return f"Result {number}: " + f"something about {number}. " * 12


class Summarised:
    """A model that works for some turns, and summarises when it is asked to.

    What it says depends on the request alone, like a real model.
    """

    def __init__(
        self,
        turns: int = 40,
        *,
        summary: Callable[[StreamRequest], Any] | None = None,
        limit: int | None = None,
        said: str = "prompt is too long: {size} tokens > {limit} maximum",
        call_first: ToolCall | None = None,
        scale: float = 1.0,
    ) -> None:
        self.turns = turns
        self.summary = summary or (lambda request: "What happened so far.")
        self.limit = limit
        self.said = said
        self.requests: list[StreamRequest] = []
        self.asked: list[StreamRequest] = []
        self.call_first = call_first
        self.scale = scale

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        size = int(size_of(request) * self.scale)
        usage = Usage(size, 20)
        if "Write a summary" in request.messages[-1].plain_text:
            self.asked.append(request)
            said = self.summary(request)
            if hasattr(said, "__await__"):
                said = await said
            if isinstance(said, list):
                for event in said:
                    yield event
                return
            yield Start(EMPTY)
            yield Done(said if isinstance(said, AssistantMessage) else answer(say(said), usage))
            return
        self.requests.append(request)
        yield Start(EMPTY)
        if self.limit is not None and size > self.limit:
            text = self.said.format(size=size, limit=self.limit)
            yield Error(EMPTY, StreamErrorKind.CONTEXT_OVERFLOW, text)
            return
        number = self.number(request)
        if number >= self.turns:
            yield Done(answer(say("Done."), usage))
            return
        call = ToolCall(f"c{number}", "look", {"number": number})
        if number == 0 and self.call_first is not None:
            call = self.call_first
        yield Done(answer(say("", call), usage))

    def number(self, request: StreamRequest) -> int:
        """The number of the next call: one more than the newest."""
        for message in reversed(request.messages):
            if isinstance(message, AssistantMessage) and message.tool_calls:
                digits = message.tool_calls[0].id[1:]
                return int(digits) + 1
        return 0


def answer(message: AssistantMessage, usage: Usage) -> AssistantMessage:
    return replace(message, usage=usage)


def size_of(request: StreamRequest) -> int:
    """What this provider counts: characters, and a little for each message."""
    texts = [str(m.plain_text) for m in request.messages]
    return sum([len(text) // 4 + 8 for text in texts]) + 50 * len(request.tools)


async def play(
    model: Summarised, *plugins: Any, prompt: str = FACT, **settings: Any
) -> tuple[Any, RecordingSink]:
    sink = RecordingSink()
    tools = settings.pop("tools", [look])
    config = LoopConfig(stream=model, tools=tools, plugins=plugins, event_sink=sink, **settings)
    outcome: Any
    try:
        outcome = await run(prompt, AgentContext("You work."), config)
    except Exception as error:
        outcome = error
    check_events(sink.events)
    for request in model.requests:
        assert not repair_history(request.messages).changes
    return outcome, sink


def marks(messages: Sequence[AgentMessage]) -> list[Any]:
    return [mark for message in messages if (mark := mark_of(message)) is not None]


def texts(request: StreamRequest) -> list[str]:
    return [message.plain_text for message in request.messages]


# --- what it does -------------------------------------------------------------------------------


async def test_a_long_run_stays_within_the_window() -> None:
    model = Summarised(60)
    result, sink = await play(model, Compaction(WINDOW))
    assert result.outcome is LoopOutcome.DONE
    made = marks(result.messages)
    assert len(made) >= 4
    assert all(mark.has_summary for mark in made)
    assert max(map(size_of, model.requests)) <= WINDOW
    assert len(model.asked) == len(made)
    assert all(texts(request)[0] == FACT for request in model.requests)
    # The newest result is always there, word for word.
    for number, request in enumerate(model.requests[1:]):
        assert f"something about {number}." in texts(request)[-1]
    kinds = [event.type for event in sink.events]
    assert kinds.count("consultation_start") == kinds.count("consultation_end") == len(made)


async def test_one_compaction_lasts_for_many_turns() -> None:
    model = Summarised(60)
    result, _ = await play(model, Compaction(WINDOW))
    made = marks(result.messages)
    assert all(mark.last_turn - mark.first_turn >= 4 for mark in made)
    later = [mark.first_turn for mark in made if not mark.merges][1:]
    assert set(later) <= {mark.last_turn + 1 for mark in made}


async def test_summaries_add_up_and_keep_the_prefix() -> None:
    store = MemoryStore()
    model = Summarised(60, summary=lambda request: f"Summary of {len(request.messages)}.")
    result, _ = await play(model, Compaction(WINDOW), run_log=RunLog(store))
    made = [mark for mark in marks(result.messages) if not mark.merges]
    assert len(made) >= 3
    (summary,) = store.runs()
    report = check_prefix(store, summary.run_id)
    assert all(
        [cause.name for cause in request.change.causes] == ["compaction"]
        for request in report.changes
        if request.change is not None
    )
    assert len(report.changes) == len(marks(result.messages))
    report.without("compaction").require(1.0)
    # Each one keeps what the earlier ones have made: the change is behind it.
    first, second, *_ = [request.change for request in report.changes]
    assert first is not None
    assert second is not None
    assert second.at > first.at


async def test_what_must_not_be_lost_is_in_every_request_after_four_compactions() -> None:
    """Pinned facts, the task, plans, refusals and answers of people."""
    plan = tool(lambda: "1. look 2. tell", name="plan", description="plan")
    plan.history_policy = ToolHistoryPolicy(pins_active_plan=True)
    asked = tool(lambda: "Paris, not Rome", name="ask_user", description="ask")
    asked.history_policy = ToolHistoryPolicy(keeps_result=True)

    class Model(Summarised):
        def number(self, request: StreamRequest) -> int:
            return super().number(request)

        async def __call__(
            self, request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            special = {1: "plan", 2: "ask_user", 3: "pinned"}
            async for event in super().__call__(request, signal):
                number = self.number(request)
                if isinstance(event, Done) and event.message.tool_calls and number in special:
                    call = ToolCall(f"c{number}", special[number], {})
                    event = Done(answer(say("", call), Usage(size_of(request), 20)))
                yield event

    pinned = tool(lambda: "IMPORTANT: 42", name="pinned", description="pinned")
    model = Model(90)
    compaction = Compaction(WINDOW, pinned=lambda m: "IMPORTANT" in m.plain_text)
    result, _ = await play(model, compaction, tools=[look, plan, asked, pinned])
    assert len(marks(result.messages)) >= 4
    for request in model.requests[5:]:
        sent = texts(request)
        assert sent[0] == FACT
        for needed in ("1. look 2. tell", "Paris, not Rome", "IMPORTANT: 42"):
            assert needed in sent


async def test_the_whole_text_can_be_read_back() -> None:
    read = ToolCall("c0", "look", {"number": 0})

    class Model(Summarised):
        async def __call__(
            self, request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            async for event in super().__call__(request, signal):
                number = self.number(request)
                if (
                    isinstance(event, Done)
                    and number in (40, 41, 42)
                    and self.requests[-1] is request
                ):
                    asked: dict[int, dict[str, Any]] = {
                        40: {"words": "something about 3."},
                        41: {"turns": "4"},
                        42: {"turns": "1-60", "page": 2},
                    }
                    call = ToolCall(f"c{number}", "read_earlier", asked[number])
                    event = Done(answer(say("", call), Usage(size_of(request), 20)))
                yield event

    model = Model(44, call_first=read)
    result, _ = await play(model, Compaction(WINDOW))
    found, turn, page = [
        m.plain_text
        for m in result.messages
        if isinstance(m, ToolResultMessage) and m.tool_name == "read_earlier"
    ]
    assert "turn 4: Result of look: Result 3:" in found
    assert look_text(3) in turn
    assert "[page 2 of " in page
    # It was not in the request that asked for it.
    assert all("Result 3:" not in text for text in texts(model.requests[40]))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"words": "zebra"}, "No message has all of these words: zebra."),
        ({"turns": 1}, "Result 0: "),
        ({"turns": 0}, FACT),
        ({"turns": "1", "page": -1}, "There are the pages 1 to 1, not -1."),
        ({"turns": "1" * 5_000}, "turns such as 12 or 12-15"),
        ({"turns": "1-" + "9" * 18}, "Result 0: "),
        ({"turns": "1", "page": "9" * 5_000}, "too large"),
        ({"turns": "1", "page": 0}, "There are the pages 1 to 1, not 0."),
    ],
)
async def test_reading_back_takes_what_models_give(asked: dict[str, Any], said: str) -> None:
    answers = [
        say("", ToolCall("a", "look", {"number": 0})),
        say("", ToolCall("b", "read_earlier", asked)),
        say("Done."),
    ]
    config = LoopConfig(stream=ScriptedStream(answers), tools=[look], plugins=[Compaction()])
    result = await run(FACT, AgentContext(), config)
    (got,) = [
        m for m in result.messages if isinstance(m, ToolResultMessage) and m.tool_call_id == "b"
    ]
    assert said in got.plain_text


def look_text(number: int) -> str:
    return f"Result {number}: " + f"something about {number}. " * 12


async def test_the_question_reads_the_cache_of_the_newest_request() -> None:
    model = Summarised(30)
    await play(model, Compaction(WINDOW))
    for question in model.asked:
        before = [r for r in model.requests if len(r.messages) < len(question.messages)]
        newest = max(
            (r for r in before if list(question.messages[: len(r.messages)]) == list(r.messages)),
            key=lambda r: len(r.messages),
        )
        since = question.messages[len(newest.messages) :]
        assert [m.role for m in since] == ["assistant", "tool_result", "user"]
        assert question.tools is newest.tools
        assert question.system_prompt == newest.system_prompt


async def test_another_model_gets_a_text_and_its_tokens_count() -> None:
    other = Summarised()
    other.model = "small"  # type: ignore[attr-defined]
    store = MemoryStore()
    model = Summarised(30)
    result, _ = await play(model, Compaction(WINDOW, model=other), run_log=RunLog(store))
    assert model.asked == []
    assert len(other.asked) == len(marks(result.messages)) > 0
    for question in other.asked:
        assert question.tools == ()
        assert len(question.messages) == 1
        assert "<conversation>" in question.messages[0].plain_text
    counted = [m.usage for m in result.messages if isinstance(m, AssistantMessage)]
    own = sum([usage.input_tokens for usage in counted if usage is not None])
    aside = sum([size_of(question) for question in other.asked])
    assert result.usage.input_tokens == own + aside
    (summary,) = store.runs()
    tree = usage_tree(store, summary.run_id)
    assert tree.usage == result.usage
    assert [part.model.model for part in tree.by_model] == [None, "small"]
    assert tree.by_model[1].usage.input_tokens == aside


class Redact:
    """Removes what tools have returned from the context."""

    name = "redact"

    def transform_context(self, messages: Sequence[AgentMessage], ctx: Any) -> list[AgentMessage]:
        gone = (TextContent("[gone]" + "x" * 400),)
        return [replace(m, content=gone) if m.role == "tool_result" else m for m in messages]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("has_other", [True, False])
@pytest.mark.parametrize("said", ["It worked.", ""])
async def test_requests_for_summaries_have_what_other_plugins_make_of_the_messages(
    is_first: bool, has_other: bool, said: str
) -> None:
    model, other = [Summarised(40, summary=lambda request: said) for _ in range(2)]
    compaction = Compaction(WINDOW, model=other if has_other else None)
    plugins = [compaction, Redact()] if is_first else [Redact(), compaction]
    result, _ = await play(model, *plugins)
    asked = other.asked if has_other else model.asked
    assert len(asked) >= 2
    assert any("Result 3" in m.plain_text for m in result.messages)
    for request in [*model.requests, *asked]:
        assert "something about" not in str(texts(request))
        assert request is model.requests[0] or "[gone]" in str(texts(request))


async def test_by_hand_the_request_has_what_other_plugins_make_of_the_messages() -> None:
    model = Summarised(10)
    config = LoopConfig(stream=model, tools=[look], plugins=[Compaction(4_000), Redact()])
    conversation = Conversation(config=config)
    await conversation.send("Go")
    assert await conversation.compact() is not None
    (asked,) = model.asked
    assert "something about" not in str(texts(asked))
    assert "[gone]" in str(texts(asked))


@pytest.mark.parametrize("is_first", [True, False])
async def test_ids_of_calls_are_unique_in_requests_for_summaries(is_first: bool) -> None:
    model = SameIds(60)
    unique, compaction = UniqueToolCallIds(), Compaction(WINDOW)
    plugins = [compaction, unique] if is_first else [unique, compaction]
    result, _ = await play(model, *plugins)
    assert len(model.asked) >= 2
    for request in model.asked:
        ids = [m.tool_call_id for m in request.messages if isinstance(m, ToolResultMessage)]
        assert len(ids) == len(set(ids))
    assert all(mark.has_summary for mark in marks(result.messages))


class SameIds(Summarised):
    """A model whose calls all have the same id."""

    def number(self, request: StreamRequest) -> int:
        return 0 if len(self.requests) < self.turns else self.turns


async def test_summaries_that_grow_are_merged() -> None:
    model = Summarised(120, summary=lambda request: "A fact to keep. " * 12)
    result, _ = await play(model, Compaction(WINDOW))
    made = marks(result.messages)
    assert [mark.merges for mark in made].count(True) >= 1
    assert max(map(size_of, model.requests)) <= WINDOW
    merged = next(mark for mark in made if mark.merges)
    assert merged.first_turn == 1
    late = [text for text in texts(model.requests[-1]) if text.startswith("[A summary")]
    assert len(late) <= 5


# --- what no model has seen ---------------------------------------------------------------------


class Fetching(Summarised):
    """A model that fetches batches of these sizes, and remembers what it has not seen before."""

    def __init__(self, batches: list[list[int]], **settings: Any) -> None:
        super().__init__(len(batches), **settings)
        self.batches = batches
        self.made: list[str] = []
        """The results of all calls."""
        self.answered: list[tuple[StreamRequest, list[str]]] = []
        """The requests that it has answered, with the results that were not made before."""

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        async for event in super().__call__(request, signal):
            if isinstance(event, Done) and request in self.requests:
                known = sum([len(new) for _, new in self.answered])
                self.answered.append((request, self.made[known:]))
            if isinstance(event, Done) and event.message.tool_calls:
                number = len(self.answered) - 1
                calls = [
                    ToolCall(f"{number}.{at}", "fetch", {"size": size})
                    for at, size in enumerate(self.batches[number])
                ]
                event = Done(replace(event.message, content=tuple(calls)))
            yield event

    def number(self, request: StreamRequest) -> int:
        return len(self.answered)

    def fetch(self, size: int) -> str:
        """Fetch something."""
        self.made.append(f"Result {len(self.made)}: " + "x" * size)
        return self.made[-1]


class Notes:
    """Adds messages after batches."""

    def __init__(self, notes: Sequence[AgentMessage | None]) -> None:
        self.notes = list(notes)

    def next_steering_messages(self) -> list[AgentMessage]:
        note = self.notes.pop(0) if self.notes else None
        return [] if note is None else [note]


NOTES = [None, UserMessage("Use metres."), SystemMessage("Remember the rules.")]


@given(
    st.lists(st.lists(st.integers(0, 2_500), min_size=1, max_size=3), min_size=4, max_size=16),
    st.lists(st.sampled_from(NOTES), max_size=16),
    st.sampled_from(["", "What happened so far.", "word " * 4_000]),
    st.sampled_from([None, "{size} > {limit} maximum", "Too long."]),
)
def test_a_model_sees_all_results_whole_before_they_are_replaced(
    batches: list[list[int]],
    notes: list[AgentMessage | None],
    summary: str,
    said: str | None,
) -> None:
    limit = None if said is None else WINDOW
    model = Fetching(batches, summary=lambda request: summary, limit=limit, said=said or "")
    compaction = Compaction(WINDOW if said is None else None)
    asyncio.run(play(model, compaction, Notes(notes), tools=[tool(model.fetch)]))
    for request, new in model.answered:
        least = 250 + sum([len(text) // 4 + 8 for text in new])
        if limit is None or least < 0.8 * limit:
            assert set(new) <= set(texts(request))


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("summary", ["", "What happened so far."])
async def test_a_message_behind_results_does_not_replace_them(
    note: AgentMessage | None, summary: str
) -> None:
    batches = [[700], [700], [700], [3_600], [0], [0]]
    model = Fetching(batches, summary=lambda request: summary)
    notes = Notes([None, None, None, None, note])
    result, _ = await play(model, Compaction(WINDOW), notes, tools=[tool(model.fetch)])
    assert marks(result.messages)
    assert model.made[3] in texts(model.requests[4])


async def test_results_that_do_not_fit_can_be_read_back() -> None:
    """They go last: behind what is pinned, and after the provider has rejected them."""
    model = Fetching([[100], [100], [9_000], [0]], limit=WINDOW)
    result, _ = await play(model, Compaction(WINDOW), tools=[tool(model.fetch)])
    assert result.outcome is LoopOutcome.DONE
    assert [mark.last_turn for mark in marks(result.messages)][-1] == 3
    assert model.made[2] not in texts(model.answered[3][0])
    assert "read_earlier" in texts(model.answered[3][0])[-1]


# --- conversations ------------------------------------------------------------------------------


async def test_a_conversation_of_many_runs_compacts_once_and_so_it_does_when_loaded(
    tmp_path: Path,
) -> None:
    class Chatty(Summarised):
        def number(self, request: StreamRequest) -> int:
            return self.turns

    model = Chatty()
    config = LoopConfig(stream=model, plugins=[Compaction(WINDOW)])
    talk = Conversation(config, "You talk.")
    for number in range(40):
        await talk.send(f"Question {number}. " + "Tell me about it. " * 12)
        count = len(marks(talk.messages))
        if number % 7 == 0:
            talk.save(tmp_path / "talk.json")
            talk = Conversation.load(tmp_path / "talk.json", config)
            assert len(marks(talk.messages)) == count
    assert len(model.asked) == len(marks(talk.messages)) > 1
    assert max(map(size_of, model.requests)) <= WINDOW
    for number, request in enumerate(model.requests):
        assert texts(request)[-1].startswith(f"Question {number}.")
        assert texts(request)[0].startswith("Question 0.")
    assert len([m for m in talk.messages if isinstance(m, UserMessage)]) == 40


async def test_a_fork_before_the_compaction_does_not_have_it() -> None:
    store = MemoryStore()
    result, _ = await play(Summarised(30), Compaction(WINDOW), run_log=RunLog(store))
    (summary,) = store.runs()
    first = next(n for n, m in enumerate(result.messages) if mark_of(m) is not None)
    turns = sum(isinstance(m, AssistantMessage) for m in result.messages[:first])
    assert marks(fork(store, summary.run_id, turn=turns).messages) == []
    assert len(marks(fork(store, summary.run_id, turn=turns + 1).messages)) == 1


async def test_a_replay_needs_no_model() -> None:
    store = MemoryStore()
    model = Summarised(30)
    sink = RecordingSink()
    settings: dict[str, Any] = {"tools": [look], "plugins": [Compaction(WINDOW)]}
    config = LoopConfig(stream=model, run_log=RunLog(store), event_sink=sink, **settings)
    await run(FACT, AgentContext("You work."), config)
    (summary,) = store.runs()
    never = Summarised(summary=lambda request: pytest.fail("a replay asked a model"))
    report = await replay(store, summary.run_id, LoopConfig(stream=never, **settings))
    assert report.is_identical
    assert never.requests == never.asked == []


# --- when there is no summary -------------------------------------------------------------------


def cut_off(request: StreamRequest) -> AssistantMessage:
    return replace(say("What happened"), stop_reason=StopReason.MAX_TOKENS)


def fails(request: StreamRequest) -> list[Any]:
    return [Start(EMPTY), Error(EMPTY, StreamErrorKind.FATAL, "401")]


def raising(request: StreamRequest) -> Any:
    raise ConnectionError("no route to host")


async def _forever() -> Any:
    await asyncio.Event().wait()


USELESS: dict[str, tuple[Callable[[StreamRequest], Any], int]] = {
    "empty": (lambda request: "", 2),
    "calls": (lambda request: say("", ToolCall("x", "look", {"number": 1})), 2),
    "cut off": (cut_off, 3),
    "failed": (fails, 1),
    "raised": (raising, 1),
    "endless": (lambda request: _forever(), 1),
    "longer than what it replaces": (lambda request: "word " * 4_000, 1),
}


@pytest.mark.parametrize("name", USELESS)
async def test_without_a_summary_old_turns_are_left_out(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    summary, questions = USELESS[name]
    model = Summarised(20, summary=summary)
    with caplog.at_level(logging.WARNING):
        result, _ = await play(model, Compaction(WINDOW, timeout=0.01))
    assert result.outcome is LoopOutcome.DONE
    first, *_ = made = marks(result.messages)
    assert not any(mark.has_summary for mark in made)
    assert max(map(size_of, model.requests)) <= WINDOW
    note = next(t for t in texts(model.requests[-1]) if t.startswith("[To save room"))
    assert "the turns 1 to" in note
    assert "read_earlier" in note
    assert first.text == note
    assert len(model.asked) == questions * min(2, len(made))
    assert "no summary" in caplog.text


async def test_the_answer_of_the_second_request_counts() -> None:
    def summary(request: StreamRequest) -> Any:
        return "From the text." if not request.tools else say("", ToolCall("x", "look", {}))

    model = Summarised(20, summary=summary)
    result, _ = await play(model, Compaction(WINDOW))
    assert marks(result.messages)[0].text.endswith("From the text.")


async def test_a_request_for_a_summary_that_is_too_large_is_made_smaller() -> None:
    def summary(request: StreamRequest) -> Any:
        too_large = Error(EMPTY, StreamErrorKind.CONTEXT_OVERFLOW, "prompt is too long")
        return [Start(EMPTY), too_large] if request.tools else "From the text."

    model = Summarised(20, summary=summary)
    result, _ = await play(model, Compaction(WINDOW))
    made = marks(result.messages)
    assert made
    assert all(mark.text.endswith("From the text.") for mark in made)
    assert len(model.asked) == 2 * len(made)


async def test_earlier_summaries_stay_if_they_cannot_be_merged() -> None:
    """Also if the model fails for the rest of the run."""
    facts = [f"Fact {number}: " + "something to keep. " * 12 for number in range(3)]

    def summary(request: StreamRequest) -> Any:
        known = sum("Fact " in text for text in texts(request))
        return facts[known] if known < len(facts) else fails(request)

    model = Summarised(90, summary=summary)
    result, _ = await play(model, Compaction(WINDOW))
    made = marks(result.messages)
    assert [mark.has_summary for mark in made[:4]] == [True, True, True, False]
    assert not any(mark.merges for mark in made)
    sent = "\n".join(texts(model.requests[-1]))
    assert all(fact.strip() in sent for fact in facts)
    assert max(map(size_of, model.requests)) <= WINDOW


async def test_a_model_that_fails_is_asked_less_and_less_often() -> None:
    model = Summarised(150, summary=fails)
    result, _ = await play(model, Compaction(WINDOW))
    made = marks(result.messages)
    assert len(made) >= 10
    assert len(model.asked) == len(made).bit_length()


async def test_a_run_that_is_cancelled_meanwhile_ends_and_goes_on_later() -> None:
    signal = CancellationToken()

    async def cancels() -> Any:
        signal.cancel("enough")
        await asyncio.Event().wait()

    model = Summarised(20, summary=lambda request: cancels())
    sink = RecordingSink()
    config = LoopConfig(stream=model, tools=[look], plugins=[Compaction(WINDOW)], event_sink=sink)
    with pytest.raises(RunAborted) as caught:
        await run(FACT, AgentContext("You work."), config, signal)
    check_events(sink.events)
    messages = caught.value.messages
    assert marks(messages) == []
    assert not repair_history(messages).changes
    model.summary = lambda request: "Now."
    context = AgentContext("You work.").extend(messages)
    result = await run("Go on.", context, config)
    assert result.outcome is LoopOutcome.DONE
    assert marks(result.messages)


@pytest.mark.parametrize("kilobytes", [5, 300])
async def test_images_do_not_count_with_their_bytes(kilobytes: int) -> None:
    model = Summarised(12)
    image = ImageContent("data:image/png;base64," + "A" * (kilobytes * 1_365), "image/png")

    @tool
    def look(number: int) -> ToolResult:
        """Look at the screen."""
        return ToolResult((image,))

    result, _ = await play(model, Compaction(128_000), TokenBudget(60_000), tools=[look])
    assert result.outcome is LoopOutcome.DONE
    assert marks(result.messages) == []
    sent = [m for m in model.requests[-1].messages if isinstance(m, ToolResultMessage)]
    assert [m.content for m in sent] == [(image,)] * 12


# --- requests that are too large ------------------------------------------------------------------


@pytest.mark.parametrize("limit", range(400, 1_900, 150))
async def test_an_overflow_at_any_turn_is_recovered_and_says_the_window(limit: int) -> None:
    model = Summarised(40, limit=limit)
    result, _ = await play(model, Compaction())
    assert result.outcome is LoopOutcome.DONE
    made = marks(result.messages)
    assert made[0].window == limit
    too_large = [request for request in model.requests if size_of(request) > limit]
    assert len(too_large) <= 2
    assert all(mark.window is None for mark in made[2:])
    assert texts(model.requests[-1])[0] == FACT


@pytest.mark.parametrize("said", ["Your input is too long.", "", "<html>413</html>", "limit 7"])
async def test_a_provider_need_not_say_how_large_the_window_is(said: str) -> None:
    model = Summarised(40, limit=1_200, said=said)
    result, _ = await play(model, Compaction())
    assert result.outcome is LoopOutcome.DONE
    assert len([request for request in model.requests if size_of(request) > 1_200]) <= 3


@pytest.mark.parametrize("said", ["Your input is too long.", "{size} tokens > {limit} maximum"])
@pytest.mark.parametrize("window", [None, 1_200])
async def test_what_is_pinned_goes_if_nothing_else_makes_the_request_fit(
    said: str, window: int | None
) -> None:
    model = Summarised(0, limit=1_200, said=said)
    compaction = Compaction(window, pinned=lambda m: "IMPORTANT" in m.plain_text)
    talk = Conversation(LoopConfig(stream=model, plugins=[compaction]), "You talk.")
    await talk.send(FACT)
    await talk.send("IMPORTANT: " + "a rule " * 350)
    await talk.send("More. " * 30)
    question = "Read this: " + "word " * 480
    assert (await talk.send(question)).outcome is LoopOutcome.DONE
    assert texts(model.requests[-1])[0] == FACT
    assert texts(model.requests[-1])[-1] == question
    assert size_of(model.requests[-1]) <= 1_200
    sizes = [size_of(request) for request in model.requests[3:]]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("characters", [14_400, 14_800, 15_200])
async def test_what_is_unread_stays_if_less_is_enough(characters: int) -> None:
    """A provider that counts half of what is estimated, and says how large its window is."""
    model = Summarised(5, limit=2_000, scale=0.5)

    @tool
    def look(number: int) -> str:
        """Look."""
        return f"{number}: " + "word " * (characters // 5 if number == 3 else 60) + "the end"

    result, _ = await play(model, Compaction(), tools=[look], max_iterations=12)
    assert result.outcome is LoopOutcome.DONE
    too_large = [r for r in model.requests if size_of(r) * 0.5 > 2_000]
    assert too_large
    first = next(r for r in model.requests if model.number(r) == 4 and r not in too_large)
    (unread,) = [text for text in texts(first) if text.startswith("3: ")]
    assert unread.endswith("the end")


@pytest.mark.parametrize("by_hand", [False, True])
async def test_the_request_after_a_compaction_by_hand_is_checked(by_hand: bool) -> None:
    model = Summarised(0)
    talk = Conversation(LoopConfig(stream=model, plugins=[Compaction(WINDOW)]), "You talk.")
    for number in range(12):
        await talk.send(f"Question {number}. " + "Tell me about it. " * 15)
    if by_hand:
        assert await talk.compact() is not None
    await talk.send("word " * 1_400)
    assert len(marks(talk.messages)) == 1 + by_hand
    assert size_of(model.requests[-1]) <= WINDOW


async def test_another_run_of_the_conversation_knows_the_window() -> None:
    model = Summarised(30, limit=1_200)
    config = LoopConfig(stream=model, tools=[look], plugins=[Compaction()])
    talk = Conversation(config, "You work.")
    await talk.send(FACT)
    before = len([r for r in model.requests if size_of(r) > 1_200])
    model.turns = 80
    await talk.send("Go on.")
    assert len([r for r in model.requests if size_of(r) > 1_200]) == before
    assert len(marks(talk.messages)) > 3


async def test_what_cannot_be_made_smaller_fails_with_the_words_of_the_provider() -> None:
    model = Summarised(3, limit=100)
    error, _ = await play(model, Compaction(), prompt="word " * 1_000)
    assert isinstance(error, StreamError)
    assert error.kind is StreamErrorKind.CONTEXT_OVERFLOW
    assert "> 100 maximum" in str(error)


# --- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("claude-sonnet-4-5", 200_000),
        ("anthropic/claude-opus-4-8", 1_000_000),
        ("gpt-5.1", 128_000),
        ("openai:gpt-6-sol", 400_000),
        ("gemini-3.8-flash", 1_000_000),
        ("o3-mini", 128_000),
        ("Qwen3-8B-Q4.gguf", 131_072),
        ("a-model-of-ours", None),
    ],
)
def test_windows_of_models(name: str, size: int | None) -> None:
    assert window_of(ModelRef(model=name)) == size
    assert DEFAULT_WINDOW == 128_000


def test_windows_that_providers_have_named() -> None:
    """Of real responses: the number is right, or there is none."""
    path = Path(__file__).parent.parent / "transports" / "data" / "responses.jsonl"
    known = 0
    for line in path.read_text("utf-8").splitlines():
        response = json.loads(line)
        if response["kind"] != "context_overflow":
            continue
        text = (
            response["body"] if isinstance(response["body"], str) else json.dumps(response["body"])
        )
        said = window_said(text)
        known += said is not None
        if said is not None and str(said) not in text:
            assert f"{said // 1_000}K" in text
    assert known > 55
    cases = {
        "prompt is too long: 219898 tokens > 200000 maximum": 200_000,
        "exceed context limit: 199759 + 8192 > 200000, decrease": 200_000,
        "maximum context length is 4097 tokens. However, your messages resulted in 6988": 4_097,
        "exceeds the maximum number of tokens allowed (1048576).": 1_048_576,
        "prompt too long; exceeded max context length by 540451 tokens": None,
        "Range of input length should be [1, 6000]": 6_000,
        "supports only 256K context": 256_000,
        "Your input exceeds the context window of this model.": None,
    }
    assert {text: window_said(text) for text in cases} == cases


async def test_the_transport_may_say_its_window() -> None:
    class Local(Summarised):
        context_window = WINDOW
        model = "claude-sonnet-4-5"

    model = Local(30)
    result, _ = await play(model, Compaction())
    assert marks(result.messages)
    assert max(map(size_of, model.requests)) <= WINDOW


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 0},
        {"window": True},
        {"trigger": 0.2},
        {"target": 0},
        {"trigger": 1.1},
        {"timeout": 0},
        {"summary_tokens": -1},
        {"pinned": "yes"},
        {"model": "gpt-5"},
    ],
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Compaction"):
        Compaction(**settings)


def test_it_brings_its_tool_and_child_runs_inherit_it() -> None:
    compaction = Compaction(pinned=lambda m: False, read_back=False)
    assert LoopConfig(stream=Summarised(), plugins=[compaction]).registry.names == ()
    config = LoopConfig(stream=Summarised(), tools=[look], plugins=[Compaction(), compaction])
    assert config.registry.names == ("look", "read_earlier")
    assert config.child().plugins == config.plugins
    fresh = compaction.for_run()
    assert fresh is not compaction
    assert (fresh.pinned, fresh.tools) == (compaction.pinned, ())


async def test_other_messages_of_the_host_are_no_marks() -> None:
    history = (
        UserMessage("Hi."),
        CustomMessage("compaction", {"kept": -3}),
        CustomMessage("compaction", "text"),
        say("Hello."),
        CustomMessage("other", {"text": "x", "kept": 0}),
    )
    model = Summarised(0)
    config = LoopConfig(stream=model, plugins=[Compaction()])
    await run("And now?", AgentContext("", history), config)
    sent = model.requests[0].messages
    assert [m.plain_text for m in sent if m.plain_text] == ["Hi.", "Hello.", "And now?"]
