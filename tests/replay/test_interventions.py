"""Somebody cancels or steers at any moment, once or more, and the run is replayed as it was.

The moments are all events of a run with hooks of every kind, and two within each hook.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    AgentContext,
    AgentEvent,
    AgentMessage,
    BeforeToolCallContext,
    ChannelSteering,
    LoopConfig,
    Rewrite,
    SystemMessage,
    ToolContext,
    ToolGateContext,
    ToolResult,
    TransformContext,
    UserMessage,
    agent_tool,
    run,
)
from clark_agent.plugins.base import BeforeToolDecision
from clark_agent.replay import replay, stalls
from clark_agent.run_log import MemoryStore, RunLog, resume
from clark_agent.run_log.records import ToolEnded
from clark_agent.testing import ScriptedStream, call, check_events
from tests.replay.test_replay import assert_same_events
from tests.run_log.stories import Deed, Story, copy_of, root_of
from tests.sizes import FACTOR, INTERVENTIONS

pytestmark = [pytest.mark.slow, pytest.mark.soak]


class Moments:
    """Counts the moments of a run, and acts at some of them."""

    def __init__(self) -> None:
        self.acts: dict[int, list[Callable[[], object]]] = {}
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        for act in self.acts.get(self.count, ()):
            act()


class Everywhere:
    """Hooks of every kind, all of them async, each with a moment before and after its wait."""

    name = "everywhere"

    def __init__(self, moment: Callable[[], None]) -> None:
        self.moment = moment
        self.followed = False

    def for_run(self) -> Everywhere:
        return Everywhere(self.moment)

    async def pause(self) -> None:
        self.moment()
        await asyncio.sleep(0)
        self.moment()

    async def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        await self.pause()
        return [*messages, SystemMessage("a note", 5)]

    async def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> frozenset[str] | None:
        await self.pause()
        return None if ctx.iteration % 2 else frozenset(ctx.available_tool_names)

    async def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
        await self.pause()
        return Rewrite({"n": 2}) if ctx.args == {"n": 1} else None

    async def on_after_tool_call(self, ctx: AfterToolCallContext) -> AfterToolDecision | None:
        await self.pause()
        return AfterToolDecision(mark_error=True) if ctx.args == {"n": 2} else None

    async def next_steering_messages(self) -> list[AgentMessage]:
        await self.pause()
        return []

    async def next_follow_up_messages(self) -> list[AgentMessage]:
        await self.pause()
        was, self.followed = self.followed, True
        return [] if was else [UserMessage("and then?", 7)]


def busy(moment: Callable[[], None], *, listens: bool = False, helps: bool = False) -> Story:
    """A run of four turns with hooks of every kind, and perhaps a listener that takes its time."""
    s = Story("busy")
    sink = s.sink

    def listen(event: AgentEvent) -> Any:
        sink(event)
        moment()
        return asyncio.sleep(0) if listens else None

    async def works(args: Any, ctx: ToolContext) -> ToolResult:
        moment()
        await asyncio.sleep(0)
        moment()
        return ToolResult.text("done")

    s.settings["event_sink"] = listen
    s.settings["plugins"] = [s.steering, Everywhere(moment)]
    s.deed("work", works)
    s.model([call("work", n=1), call("work")], call("work"), "Well.", "Then that.", *["More."] * 9)
    if helps:
        child = LoopConfig(
            stream=s.model(call("work"), "From below.", prefix="c"),
            tools=[Deed(s, "work", works)],
            plugins=[Everywhere(moment)],
            clock=s.clock,
        )
        s.tools.append(agent_tool("helper", "helps", child))
        s.models[0].steps = ([call("helper", task="a"), call("work")], *s.models[0].steps[1:])
    return s


Act = Callable[[Story], object]
ACTS: dict[str, Act] = {
    "cancel": lambda s: s.signal.cancel("enough"),
    "now": lambda s: s.steering.handle.steer("Stop.", "now"),
    "before_next_tool": lambda s: s.steering.handle.steer("Wait.", "before_next_tool"),
    "after_batch": lambda s: s.steering.handle.steer("Listen."),
    "follow_up": lambda s: s.steering.handle.follow_up("And that?"),
    "cancel the task": lambda s: s.tasks[0].cancel(),
}
Acts = tuple[tuple[int, str], ...]
"""At which moment somebody does what."""


async def differs(acts: Acts, **more: Any) -> str | None:
    """What is different when a run in which somebody acted is replayed; None: nothing."""
    moments = Moments()
    story = busy(moments, **more)
    for at, act in acts:
        moments.acts.setdefault(at, []).append(partial(ACTS[act], story))
    store = MemoryStore()
    story.tasks = [asyncio.ensure_future(story.play(RunLog(store)))]
    await asyncio.wait(story.tasks)
    check_events(story.sink.events)
    loaded = root_of(store)
    again = busy(Moments(), **more)
    try:
        async with asyncio.timeout(60):
            report = await replay(copy_of(store, loaded.run_id), loaded.run_id, again.config())
    except TimeoutError:
        return "it hangs"
    if not report.is_identical:
        return str(report.drift)
    try:
        assert_same_events(story.sink.events, again.sink.events)
    except AssertionError as error:
        return f"called identical: {str(error)[:300]}"
    return None


async def moments_of(**more: Any) -> int:
    moments = Moments()
    await busy(moments, **more).play(RunLog(MemoryStore()))
    return moments.count


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("helps", [False, True])
async def test_who_acts_at_any_moment_changes_nothing(act: str, listens: bool, helps: bool) -> None:
    kind = {"listens": listens, "helps": helps}
    step = 1 if FACTOR > 1 else 1 + 2 * listens + 3 * helps
    found = {
        at: found
        for at in range(1, await moments_of(**kind) + 1, step)
        if (found := await differs(((at, act),), **kind)) is not None
    }
    assert found == {}


@pytest.mark.parametrize(
    ("acts", "kind"),
    [
        pytest.param(((7, "now"), (50, "now")), {}, id="in two turns"),
        pytest.param(((16, "now"), (17, "now")), {}, id="in the stream, then in the transform"),
        pytest.param(((19, "now"), (20, "cancel")), {}, id="a call was held back before"),
        pytest.param(((29, "cancel"),), {}, id="a hook has its answer already"),
        pytest.param(((34, "cancel the task"), (40, "now")), {}, id="while it is closed"),
        pytest.param(((73, "cancel"), (73, "after_batch")), {}, id="both at one moment"),
        pytest.param(
            ((79, "now"), (79, "cancel the task")), {"helps": True}, id="the first stopped a child"
        ),
        pytest.param(
            ((26, "now"), (28, "cancel the task")), {"listens": True}, id="the first stopped a call"
        ),
        pytest.param(
            ((23, "now"), (25, "cancel the task")),
            {"helps": True, "listens": True},
            id="a call finds it out before it begins",
        ),
        pytest.param(
            ((114, "cancel the task"), (120, "follow_up")), {"helps": True}, id="behind the results"
        ),
        pytest.param(
            ((25, "now"), (26, "follow_up"), (27, "cancel")),
            {"helps": True, "listens": True},
            id="a child and a call are stopped by different people",
        ),
    ],
)
async def test_who_acts_twice_changes_nothing(acts: Acts, kind: dict[str, bool]) -> None:
    assert await differs(acts, **kind) is None


async def test_whoever_acts_and_how_often_changes_nothing() -> None:
    chance = Random(1)
    found: dict[Acts, str] = {}
    for _ in range(INTERVENTIONS):
        kind = {"helps": chance.random() < 0.4, "listens": chance.random() < 0.3}
        first, names = chance.randint(1, 165 if kind["helps"] else 105), tuple(ACTS)
        later = [first + chance.randint(0, 6 if chance.random() < 0.5 else 60) for _ in range(2)]
        acts = tuple([(at, chance.choice(names)) for at in (first, *later)])
        if (difference := await differs(acts, **kind)) is not None:
            found[acts] = difference
    assert found == {}


async def killed_and_resumed(chance: Random) -> str | None:
    """What is different when a run is replayed in which somebody acted, and which was killed and
    resumed, while somebody acted again.
    """
    kind = {"helps": chance.random() < 0.4, "listens": chance.random() < 0.3}
    names, store = tuple(ACTS), MemoryStore()
    stories: list[Story] = []
    # The log of a child is copied as a whole, so nobody may have stopped it.
    for acts in (0 if kind["helps"] else chance.randint(0, 2), chance.randint(0, 2)):
        moments = Moments()
        story = busy(moments, **kind)
        for _ in range(acts):
            act = partial(ACTS[chance.choice(names)], story)
            moments.acts.setdefault(chance.randint(1, 150), []).append(act)
        stories.append(story)
    first, second = stories
    first.tasks = [asyncio.ensure_future(first.play(RunLog(store)))]
    await asyncio.wait(first.tasks)
    loaded = root_of(store)
    cut = copy_of(store, loaded.run_id, chance.randint(1, len(loaded.records) - 1))
    second.tasks = [
        asyncio.ensure_future(resume(cut, loaded.run_id, second.config(), second.signal))
    ]
    await asyncio.wait(second.tasks)
    _ = second.tasks[0].cancelled() or second.tasks[0].exception()
    started = [r.entry for r in cut.load(loaded.run_id).records if isinstance(r.entry, ToolEnded)]
    assert len(started) == len({e.tool_call_id for e in started}), "a call has one result"
    try:
        async with asyncio.timeout(60):
            report = await replay(cut, loaded.run_id, busy(Moments(), **kind).config())
    except TimeoutError:
        return "it hangs"
    return None if report.is_identical else str(report.drift)


async def test_whoever_acts_a_run_that_was_killed_and_resumed_replays() -> None:
    found = {
        seed: difference
        for seed in range(INTERVENTIONS)
        if (difference := await killed_and_resumed(Random(seed))) is not None
    }
    assert found == {}


async def test_steering_from_within_a_transport_that_has_said_nothing_yet() -> None:
    steering = ChannelSteering()
    sent: list[object] = []

    async def stream(request: Any, signal: Any) -> Any:
        if not sent:
            sent.append(steering.handle.steer("Stop.", "now"))
        async for event in ScriptedStream(["Here I am."])(request, signal):
            yield event

    store = MemoryStore()
    config = LoopConfig(stream=stream, plugins=[steering], run_log=RunLog(store))
    await run("go", AgentContext(), config)
    (summary,) = store.runs()
    report = await replay(store, summary.run_id, config)
    assert report.is_identical, report


# --- with other plugins -----------------------------------------------------------------------


@pytest.mark.parametrize("act", ["cancel", "now", "before_next_tool", "cancel the task"])
@pytest.mark.parametrize("helps", [False, True])
async def test_a_replay_without_a_plugin_of_the_run_ends(
    act: str, helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "_QUIET_SECONDS", 0.0)
    for at in range(1, 60, 1 if FACTOR > 1 else 2):
        moments = Moments()
        story = busy(moments, helps=helps)
        story.settings["plugins"] = [story.steering]
        moments.acts[at] = [partial(ACTS[act], story)]
        store = MemoryStore()
        story.tasks = [asyncio.ensure_future(story.play(RunLog(store)))]
        await asyncio.wait(story.tasks)
        again = busy(Moments(), helps=helps)
        again.settings["plugins"] = []
        async with asyncio.timeout(60):
            report = await replay(store, root_of(store).run_id, again.config())
        assert report.drift is not None
        assert "plugins" in str(report.drift) or report.drift.run_id is not None
        check_events(again.sink.events)


@pytest.mark.parametrize("act", ["cancel", "now"])
async def test_work_of_the_host_is_waited_for(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "_QUIET_SECONDS", 0.0)
    for at in range(1, await moments_of(listens=True) + 1, 1 if FACTOR > 1 else 9):
        assert await differs(((at, act),), listens=True) is None, at
