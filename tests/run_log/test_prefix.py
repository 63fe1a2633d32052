"""What of a request was the same in the request before, and who changed the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from clark_agent import (
    AgentContext,
    AgentMessage,
    LoopConfig,
    SystemMessage,
    TransformContext,
    run,
    tool,
)
from clark_agent.plugins import TokenBudget
from clark_agent.run_log import MemoryStore, PrefixChanged, RunLog, check_prefix, usage_tree
from clark_agent.run_log.fold import fold, fold_in
from clark_agent.run_log.prefix import PrefixCause, PrefixReport
from clark_agent.run_log.records import Asked
from clark_agent.run_log.sent import SentMessages
from clark_agent.run_log.writer import encode_entry
from clark_agent.testing import ScriptedStream, call
from tests.run_log.stories import FAILURES, STORIES, begin

CALLS = [call("look", n=n) for n in range(6)]


@tool
def look(n: int) -> str:
    """Look."""
    return f"{n} " * 200


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
