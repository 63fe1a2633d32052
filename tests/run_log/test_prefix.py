"""What of a request was the same in the request before, and who changed the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
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
    LoopConfig,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamRequest,
    SystemMessage,
    TextContent,
    TransformContext,
    run,
    tool,
)
from clark_agent.errors import InvalidContinuationError
from clark_agent.messages import JsonSizeEstimator, estimate_messages
from clark_agent.plugins import TokenBudget
from clark_agent.run_log import (
    MemoryStore,
    PrefixChanged,
    RunLog,
    check_prefix,
    resume,
    usage_tree,
)
from clark_agent.run_log.fold import fold, fold_in
from clark_agent.run_log.prefix import PrefixCause, PrefixReader, PrefixReport
from clark_agent.run_log.records import Asked
from clark_agent.run_log.sent import SentMessages
from clark_agent.run_log.store import LoadedRun
from clark_agent.run_log.writer import encode_entry
from clark_agent.stream import Done, Error, Start, StreamEvent
from clark_agent.testing import ScriptedStream, call, say
from tests.run_log.stories import FAILURES, STORIES, begin, copy_of

EMPTY = AssistantMessage((), StopReason.OTHER)
CALLS = [call("look", n=n) for n in range(6)]


@tool
def look(n: int) -> str:
    """Look."""
    return f"{n} " * 200


@tool
def small(n: int) -> str:
    """Look briefly."""
    return f"{n} " * 80


@tool
def other(n: int) -> str:
    """Look elsewhere."""
    return str(n)


async def report_of(*plugins: Any, **settings: Any) -> PrefixReport:
    store = MemoryStore()
    config = LoopConfig(
        stream=ScriptedStream([*CALLS, "done"]),
        tools=[look, other],
        plugins=plugins,
        run_log=RunLog(store),
        **settings,
    )
    await run("go", AgentContext("Be brief."), config)
    (summary,) = store.runs()
    report = check_prefix(store, summary.run_id)
    assert all(request.is_certain for request in report.requests)
    assert usage_tree(store, summary.run_id).prefix_reuse == report.reuse
    return report


@pytest.mark.parametrize("name", [*STORIES, *FAILURES])
async def test_the_requests_of_a_log_are_rebuilt_as_they_were_sent(name: str) -> None:
    story, store = begin(name), MemoryStore()
    await story.play(RunLog(store, full_requests=True))
    for summary in store.runs():
        loaded = store.load(summary.run_id)
        state = fold(msgspec.structs.replace(loaded, records=loaded.records[:1]))
        sent = SentMessages(state)
        for record in loaded.records[1:]:
            fold_in(state, record)
            sent.follow(record.entry)
            if isinstance(record.entry, Asked):
                assert timeless(sent.messages) == timeless(record.entry.request["messages"])
        check_prefix(store, summary.run_id)


class Editor:
    """A transform of the hypothesis test: edits some requests in one way, and copies the others."""

    def __init__(self, name: str, how: str, every: int, after: int) -> None:
        self.name = name
        self.how = how
        self.every = every
        self.after = after
        self.own: list[AgentMessage] = []

    def should_transform(self, messages: Sequence[AgentMessage], ctx: TransformContext) -> bool:
        return self.how != "rarely" or ctx.iteration % self.every == 0

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        is_due = len(messages) > self.after and ctx.iteration % self.every == 0
        match self.how:
            case "raise" if is_due:
                raise ValueError("not now")
            case "drop":  # only what compactions make, for example
                return [m for m in messages if not m.plain_text.startswith("[")]
            case "drop one" if is_due:
                return [m for n, m in enumerate(messages) if n != 1]
            case "insert" if is_due:
                return [messages[0], SystemMessage("Mind."), *messages[1:]]
            case "edit" if is_due:
                short = (TextContent("short"),)
                return [
                    replace(m, content=short) if m.role == "tool_result" else m for m in messages
                ]
            case "end" if is_due:
                return [*messages, SystemMessage(f"{len(messages)} messages")]
            case "rarely":
                return [*messages, SystemMessage("Mind.")]
            case "same":
                return messages
            case "own list":  # changed in place
                self.own[:] = [m for n, m in enumerate(messages) if n != self.after or not is_due]
                return self.own
            case _:
                return list(messages)


HOW = ["copy", "raise", "drop", "drop one", "insert", "edit", "end", "rarely", "same", "own list"]
EDITORS = st.builds(
    Editor, st.sampled_from("abc"), st.sampled_from(HOW), st.integers(1, 4), st.integers(0, 9)
)


@given(
    st.lists(EDITORS, max_size=3),
    st.lists(EDITORS, max_size=3),
    st.sampled_from([600, 900, 100_000]),
    st.none() | st.integers(500, 900),
    st.integers(0, 200),
)
def test_requests_that_plugins_have_edited_are_rebuilt_as_they_were_sent(
    before: list[Editor],
    behind: list[Editor],
    window: int,
    limit: int | None,
    cut: int,
) -> None:
    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        yield Start(EMPTY)
        if "Write a summary" in request.messages[-1].plain_text:
            yield Done(say("Nothing special."))
            return
        if limit is not None and estimate_messages(JsonSizeEstimator(), request.messages) > limit:
            yield Error(EMPTY, StreamErrorKind.CONTEXT_OVERFLOW, "too long")
            return
        number = next(numbers)
        yield Done(
            say("done") if number > 14 else say("", call("small", call_id=f"c{number}", n=1))
        )

    store, numbers = MemoryStore(), count()
    plugins: list[Any] = [*before, Compaction(window), *behind]
    run_log = RunLog(store, full_requests=True)
    config = LoopConfig(stream=model, tools=[small], plugins=plugins, run_log=run_log)
    with suppress(StreamError):
        asyncio.run(run("go", AgentContext(), config))
    (summary,) = store.runs()
    loaded = store.load(summary.run_id)
    check_rebuilt(loaded)
    rest, numbers = copy_of(store, summary.run_id, 1 + cut % len(loaded.records)), count(20)
    config = config.replace(run_log=RunLog(rest, full_requests=True))
    with suppress(StreamError, InvalidContinuationError):
        asyncio.run(resume(rest, summary.run_id, config))
    check_rebuilt(rest.load(summary.run_id))


def check_rebuilt(loaded: LoadedRun) -> None:
    """The log says what each request had, and what of it was in the one before."""
    state = fold(replace(loaded, records=loaded.records[:1]))
    reader = PrefixReader(state, JsonSizeEstimator())
    last: list[Any] = []
    for record in loaded.records[1:]:
        fold_in(state, record)
        prefix = reader.read(record.entry, record.seq)
        if isinstance(record.entry, Asked) and prefix is not None:
            sent = timeless(record.entry.request["messages"])
            assert timeless(reader.messages) == sent
            is_same = [old == new for old, new in zip(last, sent, strict=False)]
            kept = (*is_same, False).index(False)
            assert prefix.kept_messages == kept
            last = sent


def timeless(messages: Sequence[Any]) -> list[Any]:
    plain = msgspec.json.decode(encode_entry(list(messages)))
    return [{k: v for k, v in message.items() if k != "timestamp"} for message in plain]


async def test_a_run_that_only_grows_keeps_everything() -> None:
    report = await report_of()
    assert report.require().reuse == 1.0
    assert [request.kept_messages for request in report.requests] == [0, 1, 3, 5, 7, 9, 11]
    assert report.changes == ()


async def test_a_trim_is_found_with_its_place_and_its_plugin() -> None:
    report = await report_of(TokenBudget(900, drop_turns=False))
    change = report.changes[0].change
    assert change is not None
    assert (change.part, change.at) == ("messages", 2)
    assert change.causes == (PrefixCause("plugin", "token_budget"),)
    with pytest.raises(PrefixChanged, match="message 2 changed by plugin token_budget"):
        report.require(0.98)
    assert report.without("token_budget").require().reuse == 1.0


class Insertion:
    """Puts a note before the history, in every third request."""

    name = "insertion"

    def should_transform(self, messages: Sequence[AgentMessage], ctx: TransformContext) -> bool:
        return ctx.iteration % 3 == 2

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        return [SystemMessage("Mind."), *messages]


async def test_a_plugin_that_edits_now_and_then_breaks_the_prefix_each_time() -> None:
    report = await report_of(Insertion())
    assert [request.turn for request in report.changes] == [3, 4, 6, 7]
    assert {r.change.at for r in report.changes if r.change is not None} == {0}


class Reminder:
    """Ends each request with a note."""

    name = "reminder"

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        return [*messages, SystemMessage("Mind.")]


async def test_a_reminder_at_the_end_costs_itself_alone() -> None:
    report = await report_of(Reminder())
    assert report.require(0.97).reuse < 1.0
    ats = [r.change.at for r in report.changes if r.change is not None]
    assert ats == [1, 3, 5, 7, 9, 11]


class Gate:
    """Hides a tool from the third turn on."""

    name = "narrow"

    def __init__(self, allow: frozenset[str]) -> None:
        self.allow = allow

    def next_turn_tool_allowlist(self, ctx: Any) -> frozenset[str] | None:
        return self.allow if ctx.iteration >= 2 else None


async def test_a_gate_breaks_the_prefix_where_the_tools_begin_to_differ() -> None:
    report = await report_of(Gate(frozenset({"look"})))
    (request,) = report.changes
    assert (request.turn, request.kept_messages) == (3, 0)
    assert str(request.change) == "tool 1 (other) changed by gate narrow"
    assert 0 < request.kept_tokens < request.possible_tokens


async def test_a_tool_source_that_adds_tools_appends_them() -> None:
    class Source:
        name = "more"

        async def tools_for_turn(self, ctx: Any) -> list[Any]:
            return [other] if ctx.turn >= 2 else []

    store = MemoryStore()
    config = LoopConfig(
        stream=ScriptedStream([*CALLS, "done"]),
        tools=[look],
        tool_source=Source(),
        run_log=RunLog(store),
    )
    await run("go", AgentContext(), config)
    (request,) = check_prefix(store, store.runs()[0].run_id).changes
    assert str(request.change) == "tool 1 (other) changed by tool source more"
