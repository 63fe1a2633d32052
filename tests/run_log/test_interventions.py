"""Somebody cancels or steers at any moment, and the run is replayed as it was.

The moments are all events of a run with hooks of every kind, and two within each hook.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    AgentContext,
    AgentEvent,
    AgentMessage,
    BeforeToolCallContext,
    BeforeToolDecision,
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
    check_events,
    run,
)
from clark_agent.testing import ScriptedStream, call
from clark_agent.trajectory import MemoryStore, RunLog, replay
from tests.run_log.stories import Deed, Story, copy_of, root_of
from tests.run_log.test_replay import assert_same_events


class Moments:
    """Counts the moments of a run, and acts at some of them."""

    def __init__(self, *at: int, act: Callable[[], object] = lambda: None) -> None:
        self.at = at
        self.act = act
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count in self.at:
            self.act()


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


async def differs(act: Act, *at: int, **more: Any) -> str | None:
    """What is different when a run in which somebody acted is replayed; None: nothing."""
    moments = Moments(*at)
    story = busy(moments, **more)
    moments.act = lambda: act(story)
    store = MemoryStore()
    story.tasks = [asyncio.ensure_future(story.play(RunLog(store)))]
    await asyncio.wait(story.tasks)
    check_events(story.sink.events)
    loaded = root_of(store)
    again = busy(Moments(), **more)
    try:
        async with asyncio.timeout(1):
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


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("act", ACTS)
async def test_who_acts_at_any_moment_changes_nothing(act: str, listens: bool) -> None:
    found = {
        at: found
        for at in range(1, await moments_of(listens=listens) + 1)
        if (found := await differs(ACTS[act], at, listens=listens)) is not None
    }
    assert found == {}


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the replay records another broken-off answer than the run did",
)
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
