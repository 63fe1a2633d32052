"""The effect of a call happens once: its key, and what a tool knows about an interrupted call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    AgentContext,
    AgentTool,
    LoopConfig,
    LoopOutcome,
    RunIdentity,
    RunResult,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    agent_tool,
    run,
    tool,
)
from clark_agent.errors import ToolDefinitionError
from clark_agent.replay import replay
from clark_agent.run_log import RunLog, RunStore, resume
from clark_agent.run_log.records import ToolEnded, ToolStarted
from clark_agent.testing import call
from clark_agent.tools import TypedTool
from tests.run_log.stories import Story, after
from tests.run_log.waiting_stories import ROOT, OrderedStore, store_with

KEY = f"{ROOT}/1/0"


class Knowing(AgentTool):
    """Its effects are in a dict, under their keys."""

    name = "pay"
    description = "pays"

    def __init__(self, answer: Callable[[str], Any]) -> None:
        super().__init__()
        self.answer = answer
        self.asked: list[str] = []
        self.keys: list[str] = []

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.keys.append(ctx.idempotency_key)
        await asyncio.sleep(0)
        return ToolResult.text("paid")

    def did_it_happen(self, key: str) -> Any:
        self.asked.append(key)
        return self.answer(key)


class KnowingLater(Knowing):
    async def did_it_happen(self, key: str) -> ToolResult | None:
        await asyncio.sleep(0)
        result: ToolResult | None = super().did_it_happen(key)
        return result


async def cut_behind_start(config: LoopConfig, which: int = 0) -> OrderedStore:
    """The log of a run that died right behind the start of a call."""
    store = OrderedStore()
    context = AgentContext(identity=RunIdentity(ROOT))
    await run("Go.", context, config.replace(run_log=RunLog(store)))
    starts = [n for n, r in enumerate(store.order) if isinstance(r.entry, ToolStarted)]
    return store_with(store.order[: starts[which] + 1])


def config_of(*tools: Any, steps: Any = None, **settings: Any) -> tuple[Story, LoopConfig]:
    story = Story()
    model = story.model(*(steps or (call("pay", n=1), "Done.")))
    return story, LoopConfig(stream=model, tools=tools, clock=story.clock, **settings)


async def resumed(store: RunStore, config: LoopConfig) -> RunResult:
    return await resume(store, ROOT, config.replace(run_log=RunLog(store)))


def texts(result: RunResult) -> list[str]:
    return [m.plain_text for m in result.messages if isinstance(m, ToolResultMessage)]


def ends(store: RunStore, run_id: str = ROOT) -> list[ToolEnded]:
    entries = [record.entry for record in store.load(run_id).records]
    return [entry for entry in entries if isinstance(entry, ToolEnded)]


UNCERTAIN = "The call had begun when the program was interrupted."


@pytest.mark.parametrize("kind", [Knowing, KnowingLater])
async def test_a_tool_that_knows_gives_the_result(kind: type[Knowing]) -> None:
    made = kind(lambda key: ToolResult.text(f"paid before: {key}", details={"receipt": 7}))
    _, config = config_of(made)
    store = await cut_behind_start(config)
    made.keys.clear()
    result = await resumed(store, config)
    assert result.outcome is LoopOutcome.DONE
    assert (made.asked, made.keys) == ([KEY], [])
    assert texts(result) == [f"paid before: {KEY}"]
    [ended] = ends(store)
    assert ended.by_runtime is None
    assert ended.result == ToolResult.text(f"paid before: {KEY}", details={"receipt": 7})
    made.asked.clear()
    report = await replay(store, ROOT, config)
    assert str(report.drift) == "None"
    assert (made.asked, made.keys) == ([], []), "a replay asks nobody"


def _raises(key: str) -> Any:
    raise OSError("the bank is closed")


@pytest.mark.parametrize(
    "answer", [lambda key: None, _raises, lambda key: "no result"], ids=["none", "raises", "wrong"]
)
@pytest.mark.parametrize("kind", [Knowing, KnowingLater])
async def test_a_tool_that_does_not_know_leaves_it_uncertain(
    kind: type[Knowing], answer: Callable[[str], Any]
) -> None:
    made = kind(answer)
    _, config = config_of(made)
    store = await cut_behind_start(config)
    made.keys.clear()
    result = await resumed(store, config)
    assert made.asked == [KEY]
    assert made.keys == []
    assert [text.startswith(UNCERTAIN) for text in texts(result)] == [True]
    made.asked.clear()
    assert str((await replay(store, ROOT, config)).drift) == "None"
    assert made.asked == []


async def test_it_is_not_asked_about_calls_that_have_ended_or_not_begun() -> None:
    made = Knowing(lambda key: ToolResult.text("known"))
    steps = ([call("pay", n=0), call("pay", n=1), call("pay", n=2)], call("pay", n=3), "Done.")
    story, config = config_of(made, steps=steps)
    store = OrderedStore()
    settings = config.replace(run_log=RunLog(store))
    expected = await run("Go.", AgentContext(identity=RunIdentity(ROOT)), settings)
    for cut in range(1, len(store.order)):
        copy = store_with(store.order[:cut])
        started = {r.entry.position for r in copy.order if isinstance(r.entry, ToolStarted)}
        batches = sum(r.entry.__struct_config__.tag == "batch_ended" for r in copy.order)
        if batches:
            behind = [r.entry for r in copy.order][-1:]
            started = {0} if isinstance(behind[0], ToolStarted) else set()
            ended: set[int] = set()
        else:
            ended = {e.position for e in ends(copy)}
        made.asked.clear()
        story.clock.time_ms = max(record.at for record in store.order)
        result = await resumed(copy, config)
        assert made.asked == [f"{ROOT}/{batches + 1}/{n}" for n in sorted(started - ended)]
        assert texts(result) == [
            "known" if key in made.asked else "paid"
            for key in (f"{ROOT}/1/0", f"{ROOT}/1/1", f"{ROOT}/1/2", f"{ROOT}/2/0")
        ]
        assert len(result.messages) == len(expected.messages)


async def test_a_slow_answer_has_the_timeout_of_the_tool() -> None:
    class Slow(Knowing):
        timeout = 0.01

        async def did_it_happen(self, key: str) -> ToolResult | None:
            await asyncio.sleep(60)
            return ToolResult.text("too late")

    _, config = config_of(Slow(lambda key: None))
    store = await cut_behind_start(config)
    result = await resumed(store, config)
    assert texts(result)[0].startswith(UNCERTAIN)


class Stamps:
    """A hook that sees every result and marks it."""

    name = "stamps"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_after_tool_call(self, ctx: AfterToolCallContext) -> AfterToolDecision | None:
        self.seen.append(ctx.result.plain_text)
        return AfterToolDecision(ToolResult.text(f"[{ctx.result.plain_text}]"))


async def test_hooks_after_the_call_see_what_the_tool_knows() -> None:
    hook = Stamps()
    made = Knowing(lambda key: ToolResult.text("known"))
    _, config = config_of(made, plugins=[hook])
    store = await cut_behind_start(config)
    hook.seen.clear()
    result = await resumed(store, config)
    assert hook.seen == ["known"]
    assert texts(result) == ["[known]"]
    [ended] = ends(store)
    assert ended.given is not None
    assert ended.given.plain_text == "known"
    assert str((await replay(store, ROOT, config)).drift) == "None"


# --- @tool ----------------------------------------------------------------------------------------


async def _later(key: str) -> dict[str, str]:
    await asyncio.sleep(0)
    return {"receipt": key}


@pytest.mark.parametrize(
    ("find", "text"),
    [
        (lambda key: f"paid: {key}", f"paid: {KEY}"),
        (lambda key: ToolResult.text("whole"), "whole"),
        (_later, f'{{"receipt":"{KEY}"}}'),
        (lambda key: None, None),
        (_raises, None),
    ],
)
async def test_a_function_takes_did_it_happen_as_an_option(
    find: Callable[[str], Any], text: str | None
) -> None:
    ran: list[str] = []

    @tool(did_it_happen=find)
    async def pay(ctx: ToolContext, n: int) -> str:
        """Pay."""
        ran.append(ctx.idempotency_key)
        return "paid"

    _, config = config_of(pay)
    store = await cut_behind_start(config)
    result = await resumed(store, config)
    assert ran == [KEY]
    assert texts(result) == [text] if text else texts(result)[0].startswith(UNCERTAIN)
    assert str((await replay(store, ROOT, config)).drift) == "None"


async def test_a_class_defines_did_it_happen() -> None:
    class Pay(TypedTool):
        """Pays."""

        name = "pay"

        def run(self, n: int) -> str:
            return "paid"

        def did_it_happen(self, key: str) -> ToolResult | None:
            return ToolResult.text(f"known: {key}")

    _, config = config_of(Pay())
    result = await resumed(await cut_behind_start(config), config)
    assert texts(result) == [f"known: {KEY}"]


def test_did_it_happen_must_be_a_function() -> None:
    with pytest.raises(ToolDefinitionError, match="did_it_happen must be a function of the key"):
        tool(did_it_happen="yes")(_later)  # type: ignore[call-overload]


# --- keys -----------------------------------------------------------------------------------------


class Keys(AgentTool):
    """Collects the keys of its calls, with what identifies the call."""

    description = "collects"
    idempotent = True

    def __init__(self, name: str, found: list[tuple[str, str, str]]) -> None:
        self.name = name
        super().__init__()
        self.found = found

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        self.found.append((ctx.idempotency_key, ctx.identity.run_id, str(args["n"])))
        return await after(1)(args, ctx)  # type: ignore[no-any-return]


async def test_a_key_is_the_same_after_every_crash_and_no_other_call_has_it() -> None:
    """In a tree whose agents are called twice, cut behind every record."""
    found: list[tuple[str, str, str]] = []
    story = Story()
    child = LoopConfig(
        stream=story.model([call("keys", n="c0"), call("keys", n="c1")], call("keys", n="c2"), "."),
        tools=[Keys("keys", found)],
        clock=story.clock,
    )
    top = story.model(
        [call("helper", task="a"), call("keys", n="r0"), call("helper", task="b")],
        [call("keys", n="r1"), call("helper", task="a")],
        "Done.",
    )
    config = LoopConfig(
        stream=top,
        tools=[Keys("keys", found), agent_tool("helper", "helps", child)],
        clock=story.clock,
    )
    store = OrderedStore()
    settings = config.replace(run_log=RunLog(store))
    await run("Go.", AgentContext(identity=RunIdentity(ROOT)), settings)
    calls = 2 + 3 * 3
    assert len(found) == len({key for key, _, _ in found}) == calls
    for cut in range(1, len(store.order)):
        found.clear()
        copy = store_with(store.order[:cut])
        # What runs again has the key it had: every key is run, turn and position of its call.
        await resumed(copy, config)
        for key, run_id, _ in found:
            assert key.startswith(f"{run_id}/")
        assert len({key for key, _, _ in found}) == len(found)
        places = {
            f"{summary.run_id}/{turn}/{position}"
            for summary in copy.runs()
            for turn, position in started_at(copy, summary.run_id)
        }
        assert {key for key, _, _ in found} <= places


def started_at(store: RunStore, run_id: str) -> set[tuple[int, int]]:
    """Turn and position of the calls that have started."""
    found: set[tuple[int, int]] = set()
    turn = 0
    for record in store.load(run_id).records:
        entry = record.entry
        if entry.__struct_config__.tag == "answered":
            turn += 1
        elif isinstance(entry, ToolStarted):
            found.add((turn, entry.position))
    return found
