"""What plugins add before a request, and what they ask models for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    Budget,
    CancellationToken,
    ConfigError,
    CustomMessage,
    FunctionPlugin,
    LoopConfig,
    LoopOutcome,
    RunAborted,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamRequest,
    SystemMessage,
    ToolResultMessage,
    TransformContext,
    Usage,
    UserMessage,
    run,
    tool,
)
from clark_agent import events as ev
from clark_agent.effects import Effects
from clark_agent.plugins import BeforeRequestContext
from clark_agent.prices import ModelRef, Price
from clark_agent.run_log import MemoryStore, RunLog, usage_tree
from clark_agent.run_log.records import Consulted, MessagesAdded
from clark_agent.stream import Chunk, Done, Error, Start, StreamEvent, TextChunk
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream, call, check_events, say

Ask = Callable[[BeforeRequestContext], Any]

CONTEXT = AgentContext("You are under test.")
EMPTY = AssistantMessage((), StopReason.OTHER)


@tool
def work() -> str:
    """Work."""
    return "done"


def asking(ask: Ask, **flags: Any) -> Any:
    """A plugin whose hook is this function."""
    plugin = FunctionPlugin("before_request", ask, name="asking")
    vars(plugin).update(flags)
    return plugin


def told(text: str, **usage: int) -> AssistantMessage:
    return replace(say(text), usage=Usage(**usage))


class Answers:
    """A model that keeps its requests, and answers questions differently from turns."""

    def __init__(self, turns: Sequence[Any], *said: Any) -> None:
        self.turns = ScriptedStream(turns)
        self.said = list(said)
        self.requests: list[StreamRequest] = []
        self.questions: list[StreamRequest] = []

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        if request.messages[-1].plain_text != "Question":
            self.requests.append(request)
            async for event in self.turns(request, signal):
                yield event
            return
        self.questions.append(request)
        said = self.said.pop(0)
        if callable(said):
            said = await said()
        events: list[Any] = said if isinstance(said, list) else [Start(EMPTY), Done(said)]
        for answer in events:
            yield answer


async def play(model: Any, *plugins: Any, **settings: Any) -> tuple[Any, RecordingSink]:
    """The outcome of a run and its events, which are in order."""
    sink = RecordingSink()
    config = LoopConfig(stream=model, tools=[work], plugins=plugins, event_sink=sink, **settings)
    outcome: Any
    try:
        outcome = await run("Go on.", CONTEXT, config)
    except Exception as error:
        outcome = error
    check_events(sink.events)
    return outcome, sink


# --- what is added ------------------------------------------------------------------------------


async def test_messages_are_appended_before_the_request_and_announced() -> None:
    def remind(ctx: BeforeRequestContext) -> list[AgentMessage]:
        assert ctx.overflow is None
        return [SystemMessage(f"turn {ctx.iteration}"), CustomMessage("note", {"n": 1})]

    model = Answers([call("work"), "Done."])
    result, sink = await play(model, asking(remind))
    texts = [message.plain_text for message in model.requests[1].messages]
    assert texts == ["Go on.", "turn 0", "", "", "done", "turn 1", ""]
    assert [m.role for m in result.messages] == [
        "user", "system", "custom", "assistant", "tool_result", "system", "custom", "assistant",
    ]  # fmt: skip
    added = [m for m in result.messages if isinstance(m, (SystemMessage, CustomMessage))]
    assert all(message.timestamp is not None for message in added)
    earlier, later = (request.messages for request in model.requests)
    assert list(later[: len(earlier)]) == list(earlier)
    tags = [e.type for e in sink.events]
    assert tags[4:9] == ["message_start", "message_end"] * 2 + ["provider_request_prepared"]


async def test_the_context_says_what_a_plugin_needs() -> None:
    seen: list[BeforeRequestContext] = []

    def look(ctx: BeforeRequestContext) -> None:
        seen.append(ctx)

    class Known(Answers):
        context_window = 4_000
        model = "known"

    model = Known([call("work"), "Done."])
    config = LoopConfig(stream=model, tools=[work], plugins=[asking(look)], model_id="m")
    await run("Go on.", CONTEXT, config, deps="the deps")
    first, second = seen
    assert (first.iteration, second.iteration) == (0, 1)
    assert first.context_window == 4_000
    assert first.model == ModelRef("m", "known")
    assert first.system_prompt == CONTEXT.system_prompt
    assert first.deps == "the deps"
    assert (first.has_requested, second.has_requested) == (False, True)
    assert len(first.messages) == 1
    assert second.messages.grew_from(first.messages)


@pytest.mark.parametrize(
    "wrong", [[say("I was not asked")], [ToolResultMessage("c", "work", ())], "text", 1, [1]]
)
async def test_nothing_else_can_be_added(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Answers(["Done."])
    result, _ = await play(model, asking(lambda ctx: wrong))
    assert [m.role for m in result.messages] == ["user", "assistant"]
    assert "'asking' failed; it adds no message" in caplog.text


async def test_a_hook_that_fails_adds_nothing_and_the_others_do() -> None:
    def fails(ctx: BeforeRequestContext) -> None:
        raise ValueError("broken")

    model = Answers(["Done."])
    result, _ = await play(model, asking(fails), asking(lambda ctx: [SystemMessage("hi")]))
    assert [m.role for m in result.messages] == ["user", "system", "assistant"]


async def test_the_log_says_who_has_added_what_and_why() -> None:
    store = MemoryStore()
    plugin = asking(lambda ctx: [SystemMessage("hi")], purpose="greeting")
    await play(Answers(["Done."]), plugin, run_log=RunLog(store))
    (summary,) = store.runs()
    (added,) = [
        record.entry
        for record in store.load(summary.run_id).records
        if isinstance(record.entry, MessagesAdded)
    ]
    assert (added.source, added.turn, added.plugin) == ("loop", 1, "asking")
    assert added.purposes == ("greeting",)


# --- questions ----------------------------------------------------------------------------------


def once(ctx: BeforeRequestContext, at: int = 1) -> bool:
    return ctx.iteration == at


async def test_a_question_continues_the_newest_request() -> None:
    async def ask(ctx: BeforeRequestContext) -> list[AgentMessage] | None:
        if not once(ctx):
            return None
        return [SystemMessage((await ctx.ask_model("Question")).plain_text)]

    model = Answers([call("work"), "Done."], told("Answer", input_tokens=30, output_tokens=3))
    extras = {"seed": 1}
    result, sink = await play(
        model, asking(ask), provider_extras=extras, force_tool_call=True, temperature=0.5
    )
    first, (question,) = model.requests[0], model.questions
    length = len(first.messages)
    assert list(question.messages[:length]) == list(first.messages)
    assert [m.role for m in question.messages[length:]] == ["assistant", "tool_result", "user"]
    assert question.tools is first.tools
    assert (question.system_prompt, question.temperature) == (first.system_prompt, 0.5)
    assert question.provider_extras == extras
    assert first.force_tool_call
    assert not question.force_tool_call
    assert [m.plain_text for m in model.requests[1].messages][-1] == "Answer"
    assert all("Question" not in m.plain_text for m in result.messages)
    events = [e for e in sink.events if isinstance(e, (ev.ConsultationStart, ev.ConsultationEnd))]
    assert events == [
        ev.ConsultationStart(1, "asking"),
        ev.ConsultationEnd(1, "asking", Usage(30, 3)),
    ]


async def test_before_the_first_request_the_transcript_is_continued() -> None:
    async def ask(ctx: BeforeRequestContext) -> None:
        assert (await ctx.ask_model("Question")).plain_text == "Answer"

    model = Answers(["Done."], say("Answer"))
    await play(model, asking(ask))
    (question,) = model.questions
    assert [m.plain_text for m in question.messages] == ["Go on.", "Question"]
    assert question.tools == model.requests[0].tools
    assert question.system_prompt == CONTEXT.system_prompt


async def test_another_model_gets_a_request_of_its_own_and_its_price() -> None:
    other = Answers([], told("Answer", input_tokens=1_000_000, output_tokens=0))
    other.model = "cheap"  # type: ignore[attr-defined]

    async def ask(ctx: BeforeRequestContext) -> None:
        if once(ctx):
            await ctx.ask_model("Question", system_prompt="Be brief.", stream=other)

    turn = replace(say("", call("work")), usage=Usage(1_000_000, 0))
    store = MemoryStore()
    prices = {"dear": Price(input=10, output=10), "cheap": Price(input=1, output=1)}
    result, _ = await play(
        Answers([turn, told("Done.", input_tokens=0)]),
        asking(ask),
        model_id="dear",
        budget=Budget(cost=100, prices=prices),
        run_log=RunLog(store),
    )
    (question,) = other.questions
    assert (question.system_prompt, question.tools) == ("Be brief.", ())
    assert result.usage.input_tokens == result.tree_usage.input_tokens == 2_000_000
    assert result.cost == result.tree_cost == 11
    assert result.spent.cost == 11
    (summary,) = store.runs()
    tree = usage_tree(store, summary.run_id)
    assert tree.usage == tree.tree_usage == result.usage
    assert [(p.model.names[0], p.usage.input_tokens) for p in tree.by_model] == [
        ("dear", 1_000_000),
        ("cheap", 1_000_000),
    ]
    assert tree.model_calls == 3


async def test_questions_count_for_the_budget() -> None:
    async def ask(ctx: BeforeRequestContext) -> None:
        await ctx.ask_model("Question")

    said = [told("Answer", input_tokens=600, output_tokens=0) for _ in range(3)]
    model = Answers([call("work")] * 3, *said)
    result, _ = await play(model, asking(ask), budget=Budget(tokens=1_000, wrap_up_at=None))
    assert result.outcome is LoopOutcome.OUT_OF_BUDGET
    assert len(model.questions) == 2


def raises() -> Any:
    async def fail() -> Any:
        raise ConnectionError("no route to host")

    return fail


FAILURES: list[tuple[Any, str, str]] = [
    (raises(), "fatal", "the transport raised ConnectionError: no route to host"),
    ([Error(say("I was"), StreamErrorKind.FATAL, "401")], "fatal", "401"),
    ([Start(EMPTY)], "empty", "without an answer"),
    ([Start(EMPTY), 7], "fatal", "a transport must yield"),
    ([Error(say("x"), StreamErrorKind.CONTEXT_OVERFLOW, "big")], "context_overflow", "big"),
]


@pytest.mark.parametrize(("said", "kind", "text"), FAILURES)
async def test_a_model_that_fails_raises_in_the_hook(said: Any, kind: str, text: str) -> None:
    caught: list[StreamError] = []

    async def ask(ctx: BeforeRequestContext) -> None:
        try:
            await ctx.ask_model("Question")
        except StreamError as error:
            caught.append(error)

    store = MemoryStore()
    result, sink = await play(Answers(["Done."], said), asking(ask), run_log=RunLog(store))
    assert result.outcome is LoopOutcome.DONE
    (error,) = caught
    assert error.kind == kind
    assert text in str(error)
    (end,) = [e for e in sink.events if isinstance(e, ev.ConsultationEnd)]
    assert end.error == kind
    (summary,) = store.runs()
    entries = [record.entry for record in store.load(summary.run_id).records]
    (consulted,) = [entry for entry in entries if isinstance(entry, Consulted)]
    assert (consulted.error, text in (consulted.error_text or "")) == (kind, True)


async def forever() -> Any:
    await asyncio.Event().wait()


async def test_the_timeout_is_that_of_the_question() -> None:
    caught: list[BaseException] = []

    async def ask(ctx: BeforeRequestContext) -> None:
        try:
            await ctx.ask_model("Question", max_seconds=0.01)
        except TimeoutError as error:
            caught.append(error)

    model = Answers(["Done."], forever)
    result, _ = await play(model, asking(ask), hook_timeout=60)
    assert result.outcome is LoopOutcome.DONE
    assert str(caught[0]) == "the model did not answer within 0.01 seconds"


async def test_hook_timeout_does_not_count_while_a_model_answers_and_counts_after() -> None:
    reached: list[str] = []

    async def slow() -> Any:
        await asyncio.sleep(0.1)
        return say("Answer")

    async def ask(ctx: BeforeRequestContext) -> None:
        await ctx.ask_model("Question")
        reached.append("answer")
        await asyncio.sleep(60)
        reached.append("never")

    result, _ = await play(Answers(["Done."], slow), asking(ask), hook_timeout=0.05)
    assert result.outcome is LoopOutcome.DONE
    assert reached == ["answer"]


async def test_a_cancelled_run_does_not_wait_for_the_model() -> None:
    closed: list[bool] = []
    signal = CancellationToken()

    async def model(request: StreamRequest, _: CancellationToken) -> AsyncIterator[StreamEvent]:
        try:
            yield Start(EMPTY)
            yield Chunk(TextChunk("I"))
            signal.cancel("enough")
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def ask(ctx: BeforeRequestContext) -> None:
        await ctx.ask_model("Question")

    sink = RecordingSink()
    config = LoopConfig(stream=model, plugins=[asking(ask)], event_sink=sink)
    with pytest.raises(RunAborted, match="enough"):
        await run("Go on.", CONTEXT, config, signal)
    check_events(sink.events)
    assert closed == [True]
    assert ev.ConsultationEnd(0, "asking", error="aborted") in sink.events


async def test_a_time_budget_ends_a_question() -> None:
    caught: list[BaseException] = []
    clock = FakeClock()

    async def ask(ctx: BeforeRequestContext) -> None:
        clock.time_ms += 59_990
        try:
            await ctx.ask_model("Question")
        except TimeoutError as error:
            caught.append(error)
            clock.time_ms += 10
            raise

    model = Answers(["Done."], forever)
    settings: dict[str, Any] = {"budget": Budget(seconds=60), "clock": clock}
    result, _ = await play(model, asking(ask), **settings)
    assert [str(error) for error in caught] == ["the model did not answer within 0.01 seconds"]
    assert result.spent.seconds >= 60


async def test_a_question_outside_of_its_hook_is_refused() -> None:
    kept: list[BeforeRequestContext] = []

    async def keep(ctx: BeforeRequestContext) -> None:
        kept.append(ctx)
        asked = [ctx.ask_model("Question"), ctx.ask_model("Question")]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in results] == [AssistantMessage, RuntimeError]

    await play(Answers(["Done."], say("Answer")), asking(keep))
    with pytest.raises(RuntimeError, match="one question at a time, while its hook runs"):
        await kept[0].ask_model("Question")


async def test_effects_can_answer_questions() -> None:
    class Canned(Effects):
        def consult_model(self, stream: Any, request: Any, signal: Any) -> Any:
            return ScriptedStream(["from the effects"])(request, signal)

    async def ask(ctx: BeforeRequestContext) -> list[AgentMessage]:
        return [SystemMessage((await ctx.ask_model("Question")).plain_text)]

    model = Answers(["Done."])
    result, _ = await play(model, asking(ask), effects=Canned())
    assert result.messages[1].plain_text == "from the effects"
    assert model.questions == []


# --- requests that are too large ------------------------------------------------------------------


def too_large(text: str = "413: at most 100 tokens") -> list[StreamEvent]:
    return [Start(EMPTY), Error(EMPTY, StreamErrorKind.CONTEXT_OVERFLOW, text)]


class Shortens:
    """Hides what came before its marker."""

    name = "shortens"

    def __init__(self, *, hides: bool = True) -> None:
        self.hides = hides
        self.said: list[str | None] = []

    def before_request(self, ctx: BeforeRequestContext) -> list[AgentMessage] | None:
        self.said.append(ctx.overflow)
        return None if ctx.overflow is None else [CustomMessage("cut")]

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        cuts = [n for n, m in enumerate(messages) if isinstance(m, CustomMessage)]
        if not cuts or not self.hides:
            return messages
        return [UserMessage("Go on."), *messages[cuts[-1] + 1 :]]


async def test_a_plugin_makes_room_after_an_overflow() -> None:
    plugin = Shortens()
    model = Answers([call("work"), too_large(), "Done."])
    result, _ = await play(model, plugin)
    assert result.outcome is LoopOutcome.DONE
    assert plugin.said == [None, None, "413: at most 100 tokens"]
    assert [m.plain_text for m in model.requests[-1].messages] == ["Go on."]
    assert [m.role for m in result.messages][-2:] == ["custom", "assistant"]


async def test_a_request_that_did_not_get_smaller_is_not_sent_again() -> None:
    model = Answers([call("work"), too_large(), "Done."])
    error, _ = await play(model, Shortens(hides=False))
    assert isinstance(error, StreamError)
    assert error.kind is StreamErrorKind.CONTEXT_OVERFLOW
    assert len(model.requests) == 2


async def test_attempts_to_make_room_end() -> None:
    class Endless(Shortens):
        def transform_context(
            self, messages: Sequence[AgentMessage], ctx: TransformContext
        ) -> Sequence[AgentMessage]:
            cuts = sum(isinstance(m, CustomMessage) for m in messages)
            return [UserMessage("x" * (1_000 - 100 * cuts))]

    model = Answers([too_large()] * 9)
    error, _ = await play(model, Endless())
    assert isinstance(error, StreamError)
    assert len(model.requests) == 4


async def test_the_recovery_is_next_when_plugins_add_nothing() -> None:
    class Recovers:
        name = "recovers"

        def recover(self, messages: Sequence[AgentMessage], ctx: Any) -> Sequence[AgentMessage]:
            return messages[-1:]

    quiet = asking(lambda ctx: None)
    model = Answers([call("work"), too_large(), "Done."])
    result, _ = await play(model, quiet, overflow_recovery=Recovers())
    assert result.outcome is LoopOutcome.DONE


# --- the hook in a config -------------------------------------------------------------------------


def test_a_hook_with_other_parameters_is_refused() -> None:
    class Wrong:
        def before_request(self) -> None: ...

    with pytest.raises(ConfigError, match=r"before_request\(self, ctx\)"):
        LoopConfig(stream=ScriptedStream([]), plugins=[Wrong()])  # type: ignore[list-item]
