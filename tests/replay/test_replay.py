"""A run that is replayed tells the very same events, byte by byte, and asks nobody."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    AgentContext,
    AgentEvent,
    AgentMessage,
    BeforeToolCallContext,
    Block,
    Budget,
    ChannelSteering,
    FanOutSink,
    FunctionPlugin,
    LoopConfig,
    ReasoningEffort,
    RunResult,
    StreamErrorKind,
    SystemMessage,
    TokenBudget,
    ToolContext,
    ToolGateContext,
    ToolResult,
    ToolResultBudget,
    TransformContext,
    UserMessage,
    agent_tool,
    run,
    run_child,
)
from clark_agent.errors import failure_of
from clark_agent.events import AgentStart, ChildRunEvent, ProviderRequestPrepared, RunIdentified
from clark_agent.messages.wire import encode_json
from clark_agent.plugins.base import BeforeToolDecision
from clark_agent.replay import assert_replays, replay
from clark_agent.run_log import (
    Difference,
    JsonlStore,
    MemoryStore,
    RunLog,
    RunNotFound,
    RunStore,
    resume,
)
from clark_agent.run_log.records import RunBegan, ToolStarted
from clark_agent.stream import Chunk, Done, Error, Start, TextChunk
from clark_agent.testing import RecordingSink, call, say
from tests.run_log.stories import (
    FAILURES,
    STORIES,
    Gate,
    Meddling,
    Noting,
    Story,
    begin,
    copy_of,
    fill,
    long_config,
    root_of,
    tell,
    told,
)


def assert_same_events(first: Sequence[AgentEvent], second: Sequence[AgentEvent]) -> None:
    """Byte by byte. The order of runs beside each other is nowhere written; that within each is."""
    one, other = by_run(first), by_run(second)
    assert one.keys() == other.keys()
    for run_id, events in one.items():
        for mine, theirs in zip(events, other[run_id], strict=False):
            assert mine == theirs
        assert len(events) == len(other[run_id])


def by_run(events: Sequence[AgentEvent]) -> dict[str | None, list[bytes]]:
    found: dict[str | None, list[bytes]] = {}
    for event in events:
        run_id = event.identity.run_id if isinstance(event, ChildRunEvent) else None
        found.setdefault(run_id, []).append(encode_json(event))
    return found


@pytest.mark.parametrize("name", [*STORIES, *FAILURES])
async def test_a_replay_is_identical(name: str) -> None:
    played = await told(name)
    store = copy_of(played.store, played.run_id)
    again = begin(name)
    async with asyncio.timeout(10):  # a replay waits for nothing
        report = await replay(store, played.run_id, again.config())
    assert str(report.drift) == "None"
    assert not again.was_asked
    assert not again.ran
    assert_same_events(played.events, again.sink.events)
    if isinstance(played.outcome, BaseException):
        assert type(report.error) is type(failure_of(played.outcome))
        assert str(report.error) == str(failure_of(played.outcome))
        assert report.result is None
    else:
        assert report.result is not None
        assert timeless(report.result) == timeless(played.outcome)


def timeless(result: RunResult) -> RunResult:
    """But for the seconds that were spent, which are read when all is over."""
    spent = result.spent
    return result if spent is None else replace(result, spent=replace(spent, seconds=0.0))


# --- other runs -----------------------------------------------------------------------------------


async def test_a_run_of_a_thousand_turns_is_replayed(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    played, config = long_config(1_000, RunLog(store))
    result = await run("Go on.", AgentContext("Be quick."), config)
    (summary,) = store.runs()
    again, config = long_config(0, None)
    report = assert_replays(store.path_of(summary.run_id), config)
    assert report.result == result
    assert again.ran == []
    assert_same_events(played.sink.events, again.sink.events)


EXAMPLES = Path(__file__).parent.parent.parent / "examples"


class Logged:
    """Stands in for `LoopConfig` in an example and its agents: logs the runs, keeps the events."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.made: list[tuple[LoopConfig, RecordingSink]] = []

    def __call__(self, **settings: Any) -> LoopConfig:
        recorder = RecordingSink()
        given = settings.get("event_sink")
        settings["event_sink"] = recorder if given is None else FanOutSink(recorder, given)
        settings["run_log"] = RunLog(self.store)
        config = LoopConfig(**settings)
        self.made.append((config, recorder))
        return config

    def of(self, run_id: str) -> tuple[LoopConfig, list[AgentEvent]]:
        """Which config a run had, and what it told."""
        for config, recorder in self.made:
            for events in split_into_runs(recorder.events):
                identified = [e for e in events if isinstance(e, RunIdentified)]
                if identified[0].identity.run_id == run_id:
                    return config, events
        raise AssertionError(f"nobody knows the run {run_id}")


def split_into_runs(events: list[AgentEvent]) -> list[list[AgentEvent]]:
    runs: list[list[AgentEvent]] = []
    for event in events:
        if isinstance(event, AgentStart):
            runs.append([])
        runs[-1].append(event)
    return runs


# These have logs of their own; the demo is replayed in tests/test_examples.py.
_LOGGED = ("approval_web", "demo", "run_log")
PROGRAMS = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in _LOGGED]


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
async def test_the_runs_of_the_examples_are_replayed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = Logged()
    monkeypatch.setattr("clark_agent.agent.LoopConfig", logged)  # also for agents of the module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.LoopConfig = logged
    await example.main()
    roots = [summary.run_id for summary in logged.store.runs() if summary.depth == 0]
    assert roots
    for run_id in roots:
        config, events = logged.of(run_id)
        sink = RecordingSink()
        store = copy_of(logged.store, run_id)
        async with asyncio.timeout(10):
            report = await replay(store, run_id, config.replace(event_sink=sink))
        assert str(report.drift) == "None"
        assert_same_events(events, sink.events)


@pytest.mark.parametrize("name", [*STORIES, *FAILURES])
async def test_a_listener_that_takes_its_time_changes_nothing(name: str) -> None:
    """Neither in the run that is logged nor in the one that is replayed."""

    def slowly(story: Story) -> None:
        sink = story.sink

        async def listen(event: AgentEvent) -> None:
            sink(event)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        story.settings["event_sink"] = listen

    for first, second in ((True, True), (True, False), (False, True)):
        if first is not second and name in ("a_sibling_fails", "a_tool_is_fatal"):
            continue  # here the run itself depends on who is quicker
        played, again, store = begin(name), begin(name), MemoryStore()
        if first:
            slowly(played)
        if second:
            slowly(again)
        await played.play(RunLog(store))
        loaded = root_of(store)
        async with asyncio.timeout(10):
            report = await replay(copy_of(store, loaded.run_id), loaded.run_id, again.config())
        assert str(report.drift) == "None", (first, second)
        assert_same_events(played.sink.events, again.sink.events)


async def test_a_replay_does_not_touch_the_hosts_own_channel() -> None:
    """Not even when its run is over: what was sent before the run began is in the log."""
    story, store, sink = begin("steering"), MemoryStore(), RecordingSink()
    await story.play(RunLog(store))
    run_id = root_of(store).run_id
    report = await replay(store, run_id, story.config().replace(event_sink=sink))
    assert str(report.drift) == "None"
    waiting = ChannelSteering()
    story = begin("plain")
    played = await told("plain")
    receipt = waiting.handle.steer("For the real run.")
    story.settings["plugins"] = [waiting]
    await replay(played.store, played.run_id, story.config())
    assert receipt.status == "queued"


@pytest.mark.parametrize("name", ["transforms", "steering", "broken_streams"])
async def test_a_log_with_whole_requests_is_replayed(name: str) -> None:
    played = await tell(name, RunLog(MemoryStore(), full_requests=True))
    copy = copy_of(played.store, played.run_id)
    report = await replay(copy, played.run_id, begin(name).config())
    assert str(report.drift) == "None"


@pytest.mark.parametrize("name", ["batches", "steering", "hooks", "steering_now_in_a_later_answer"])
async def test_a_log_that_ends_in_the_middle_is_replayed_as_far_as_it_goes(name: str) -> None:
    played = await told(name)
    for length in range(1, len(played.records)):
        story = begin(name)
        async with asyncio.timeout(10):
            report = await replay(
                copy_of(played.store, played.run_id, length), played.run_id, story.config()
            )
        assert str(report.drift) == "None", length
        assert not story.was_asked


@pytest.mark.parametrize("name", ["batches", "hooks", "transforms", "gates", "finishing"])
async def test_a_run_that_was_resumed_is_replayed(name: str) -> None:
    played = await told(name)
    for length in (3, len(played.records) // 2, len(played.records) - 2):
        cut = copy_of(played.store, played.run_id, length)
        await resume(cut, played.run_id, begin(name).config())
        story = begin(name)
        async with asyncio.timeout(10):
            report = await replay(cut, played.run_id, story.config())
        assert str(report.drift) == "None", length
        assert not story.ran


# --- what has changed is named --------------------------------------------------------------------


async def drift_of(name: str, change: Callable[[Story], object]) -> Difference:
    """What a replay says after a change to the story."""
    played = await told(name)
    story = begin(name)
    change(story)
    async with asyncio.timeout(10):
        report = await replay(copy_of(played.store, played.run_id), played.run_id, story.config())
    assert not story.was_asked
    assert not story.ran
    assert not report.is_identical
    assert report.drift is not None
    assert str(report.drift) in str(report)
    return report.drift


def setting(name: str, value: Any) -> Callable[[Story], object]:
    return lambda story: story.settings.__setitem__(name, value)


WATCHER = FunctionPlugin("event_observer", lambda event: None, name="watcher")


@pytest.mark.parametrize(
    ("change", "kind", "path"),
    [
        (setting("temperature", 0.5), "asked", "settings.temperature"),
        (setting("max_output_tokens", 7), "asked", "settings.max_output_tokens"),
        (setting("reasoning", ReasoningEffort.HIGH), "asked", "settings.reasoning"),
        (setting("provider_extras", {"a": 1}), "asked", "settings.provider_extras"),
        (setting("force_tool_call", True), "asked", "settings.force_tool_call"),
        (setting("model_id", "another"), "run_began", "model_id"),
        (setting("plugins", [WATCHER]), "run_began", "plugins"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_changed_setting_is_named(
    change: Callable[[Story], object], kind: str, path: str
) -> None:
    drift = await drift_of("one_after_the_other", change)
    assert (drift.kind, drift.path) == (kind, path)


async def test_a_changed_tool_is_named() -> None:
    def describe(story: Story) -> None:
        story.tools[1].description = "does it otherwise"

    drift = await drift_of("one_after_the_other", describe)
    assert (drift.kind, drift.path) == ("run_began", "tools.again.description")
    assert drift.second == "does it otherwise"

    def retype(story: Story) -> None:
        story.tools[0].parameters_schema = {"type": "object", "properties": {"n": {}}}

    drift = await drift_of("one_after_the_other", retype)
    assert drift.kind == "run_began"
    assert drift.path.startswith("tools.work.parameters")

    def remove(story: Story) -> None:
        del story.tools[1]

    drift = await drift_of("one_after_the_other", remove)
    assert (drift.kind, drift.path) == ("run_began", "tools.again")


async def test_a_decision_that_is_new_is_told_in_words() -> None:
    class Blocker:
        def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
            return Block("not today")

    drift = await drift_of("one_after_the_other", setting("plugins", [Blocker()]))
    assert "the tool work was run; now the call " in str(drift)
    assert "(blocker: block)" in str(drift)
    assert "not today" in str(drift)


async def test_a_changed_decision_is_named() -> None:
    class Lenient(Meddling):
        def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
            return None if ctx.args.get("wants") == "block" else super().on_before_tool_call(ctx)

    drift = await drift_of("hooks", setting("plugins", [Lenient()]))
    assert (drift.turn, drift.kind) == (1, "tool_ended")

    class Strict(Meddling):
        def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
            return Block("No.")

    drift = await drift_of("hooks", setting("plugins", [Strict()]))
    assert (drift.turn, drift.kind, drift.path) == (1, "tool_ended", "result.content[0].text")
    assert (drift.first, drift.second) == ("Not that.", "No.")

    class Changing(Meddling):
        async def on_after_tool_call(self, ctx: AfterToolCallContext) -> AfterToolDecision | None:
            return AfterToolDecision(ToolResult.text("another")) if ctx.args == {} else None

    drift = await drift_of("hooks", setting("plugins", [Changing()]))
    assert (drift.turn, drift.kind) == (2, "tool_ended")


async def test_a_changed_gate_is_named() -> None:
    class Open(Gate):
        def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> frozenset[str] | None:
            return None

    drift = await drift_of("gates", setting("plugins", [Open()]))
    assert (drift.turn, drift.kind) == (0, "tools_gated")

    class Narrow(Gate):
        def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> frozenset[str] | None:
            return frozenset({"danger"})

    drift = await drift_of("gates", setting("plugins", [Narrow()]))
    assert (drift.kind, drift.path, drift.second) == ("tools_gated", "allow[0]", "danger")


async def test_a_changed_transform_is_named() -> None:
    class Other(Noting):
        def transform_context(
            self, messages: Sequence[AgentMessage], ctx: TransformContext
        ) -> Sequence[AgentMessage]:
            return [*messages, SystemMessage("another note", 5)]

    plugins = [ToolResultBudget(100), TokenBudget(600, trim_trigger=0.5, drop_turns=False), Other()]
    drift = await drift_of("transforms", setting("plugins", plugins))
    assert drift.kind == "context_edited"
    assert drift.path == "edits[0][2][0].content"
    assert drift.second == "another note"
    plugins = [ToolResultBudget(90), TokenBudget(600, trim_trigger=0.5, drop_turns=False), Noting()]
    drift = await drift_of("transforms", setting("plugins", plugins))
    assert drift.kind == "context_edited"
    assert drift.turn > 1


async def altered(name: str, **changes: Any) -> Difference:
    """A log whose first record says something else than the rest was made from."""
    played = await told(name)
    began = played.records[0].entry
    assert isinstance(began, RunBegan)
    first = replace(played.records[0], entry=replace(began, **changes))
    store = MemoryStore()
    fill(store, played.run_id, [first, *played.records[1:]])
    report = await replay(store, played.run_id, begin(name).config())
    assert report.drift is not None
    return report.drift


async def test_another_prompt_is_noticed() -> None:
    drift = await altered("one_after_the_other", prompts=(UserMessage("Go elsewhere.", 1),))
    assert (drift.kind, drift.turn, drift.path) == ("asked", 1, "digest")
    drift = await altered("one_after_the_other", system_prompt="You are someone else.")
    assert (drift.kind, drift.turn, drift.path) == ("asked", 1, "settings.system_prompt")


async def test_what_changed_in_a_helper_is_named() -> None:
    def change(story: Story) -> None:
        helper = agent_tool(
            "helper",
            "helps",
            LoopConfig(stream=story.models[1], clock=story.clock, temperature=0.7),
        )
        story.tools[0] = helper

    played = await told("a_budget_with_helpers")
    story = begin("a_budget_with_helpers")
    change(story)
    report = await replay(played.store, played.run_id, story.config())
    assert report.drift is not None
    assert report.drift.kind in ("run_began", "asked")
    assert not story.was_asked


@pytest.mark.parametrize("name", ["batches", "helpers"])
async def test_the_test_helper_says_what_is_different(name: str, tmp_path: Path) -> None:
    """Also in a test that is async itself, and for a file that has got another name."""
    store = JsonlStore(tmp_path)
    run_id = (await tell(name, RunLog(store))).run_id
    path = store.path_of(run_id).rename(tmp_path / "golden.jsonl")
    report = assert_replays(path, begin(name).config())
    assert report.is_identical
    assert str(report) == f"the run {run_id} replays as it was"
    with pytest.raises(AssertionError, match=r"in turn 1, .*settings\.temperature was nothing"):
        assert_replays(str(path), begin(name).config().replace(temperature=1))


def test_the_test_helper_works_without_a_loop(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    played = asyncio.run(tell("steering", RunLog(store)))
    assert_replays(store.path_of(played.run_id), begin("steering").config())


async def test_a_replay_goes_where_a_sink_of_its_own_hears_it() -> None:
    played = await told("hooks")
    heard: list[AgentEvent] = []
    await replay(played.store, played.run_id, begin("hooks").config(), sink=heard.append)
    assert_same_events(played.events, heard)


async def test_a_replay_leaves_the_log_alone() -> None:
    played = await told("helpers")
    before = {s.run_id: played.store.load(s.run_id).records for s in played.store.runs()}
    log = RunLog(played.store)
    await replay(played.store, played.run_id, begin("helpers").config(log))
    assert {s.run_id: played.store.load(s.run_id).records for s in played.store.runs()} == before
    assert log.dropped == 0


async def test_a_run_that_nobody_knows_is_not_replayed() -> None:
    with pytest.raises(RunNotFound):
        await replay(MemoryStore(), "nobody", begin("plain").config())


# --- words that the runtime uses too --------------------------------------------------------------

RUNTIME_RESULTS = [
    ToolResult.error("The call was stopped because another call of the same batch failed."),
    ToolResult.error("The call was not run: an earlier call of the same batch failed. And so on."),
    ToolResult.error(
        "The result was withheld: the run was stopped before the hooks had checked it."
    ),
    *[
        ToolResult.error("words", details={"kind": kind, "reason": why, "still_running": True})
        for kind in ("tool_call_stopped", "tool_call_not_executed", "tool_call_uncertain")
        for why in ("aborted", "steered", "out_of_time", "sibling", "timeout", "interrupted")
    ],
]


@pytest.mark.parametrize("plugins", [(), (Meddling(),)], ids=["plain", "hooked"])
async def test_a_tool_may_say_what_the_runtime_says(plugins: tuple[Any, ...]) -> None:
    """What a result says does not matter, only what the log says of who made it."""

    def make() -> Story:
        s = Story()
        said = iter(RUNTIME_RESULTS)
        s.deed("work", lambda args, ctx: next(said))
        s.settings["plugins"] = plugins
        pairs = [[call("work", n=n), call("work", m=n)] for n in range(len(RUNTIME_RESULTS) // 2)]
        s.model(*pairs, call("work"), "Done.")
        return s

    played, store = make(), MemoryStore()
    result = await played.play(RunLog(store))
    assert isinstance(result, RunResult)
    loaded, again = root_of(store), make()
    async with asyncio.timeout(5):
        report = await replay(copy_of(store, loaded.run_id), loaded.run_id, again.config())
    assert str(report.drift) == "None"
    assert_same_events(played.sink.events, again.sink.events)


async def test_a_transport_may_say_what_the_runtime_says() -> None:
    def make() -> Story:
        s = Story()
        failed = Error(say(""), StreamErrorKind.FATAL, "the transport raised ValueError: ")
        s.model([failed])
        return s

    played, store = make(), MemoryStore()
    await played.play(RunLog(store))
    loaded, again = root_of(store), make()
    report = await replay(copy_of(store, loaded.run_id), loaded.run_id, again.config())
    assert str(report.drift) == "None"
    assert_same_events(played.sink.events, again.sink.events)


# --- a replay that is cancelled -------------------------------------------------------------------


class Stuck:
    """A hook that waits for ever in a replay."""

    def __init__(self, hook: str) -> None:
        self.reached = asyncio.Event()

        async def wait(*args: Any) -> None:
            self.reached.set()
            await asyncio.Event().wait()

        setattr(self, hook, wait)

    name = "stuck"


HOOKS = [
    "transform_context",
    "next_turn_tool_allowlist",
    "on_before_tool_call",
    "on_after_tool_call",
    "next_steering_messages",
    "next_follow_up_messages",
    "on_event",
]
NOT_ASKED = {("cancelled_in_a_batch", "next_follow_up_messages")}


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        (name, hook)
        for name in ("batches", "cancelled_in_a_batch")
        for hook in HOOKS
        if (name, hook) not in NOT_ASKED
    ],
)
async def test_a_replay_can_be_cancelled_anywhere(name: str, hook: str) -> None:
    played = await told(name)
    story, stuck = begin(name), Stuck(hook)
    story.settings |= {"plugins": [stuck], "cancel_grace": 0.01}
    task = asyncio.create_task(replay(played.store, played.run_id, story.config()))
    await stuck.reached.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.parametrize("name", ["batches", "helpers", "steering_now_in_a_batch"])
async def test_a_replay_can_be_cancelled_behind_every_event(name: str) -> None:
    """Also while the tools of the log wait for their turn."""
    played = await told(name)
    events = len(await _replayed_events(name, played.store, played.run_id))
    for at in range(1, events, 3):
        task, seen = await cancelled_behind(at, name, played.store, played.run_id)
        assert task.done(), at
        assert task.cancelled() or seen == events, at


async def cancelled_behind(
    at: int, name: str, store: RunStore, run_id: str
) -> tuple[asyncio.Task[Any], int]:
    """Cancel a replay in the middle of an event; its task, and how many events there were."""
    story = begin(name)
    seen: list[AgentEvent] = []

    def cancel(event: AgentEvent) -> None:
        seen.append(event)
        if len(seen) == at:
            story.tasks[0].cancel()

    story.settings |= {"event_sink": cancel, "cancel_grace": 0.01}
    work = replay(copy_of(store, run_id), run_id, story.config())
    story.tasks = [asyncio.create_task(work)]
    await asyncio.wait(story.tasks, timeout=5)
    return story.tasks[0], len(seen)


async def _replayed_events(name: str, store: RunStore, run_id: str) -> list[AgentEvent]:
    story = begin(name)
    await replay(copy_of(store, run_id), run_id, story.config())
    return story.sink.events


async def test_a_timeout_around_a_replay_is_a_timeout() -> None:
    played = await told("batches")
    story = begin("batches")
    story.settings["plugins"] = [Stuck("transform_context")]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await replay(played.store, played.run_id, story.config())


# --- runs below -----------------------------------------------------------------------------------


def own_child(s: Story) -> None:
    """A tool of one's own that runs an agent."""
    child = LoopConfig(stream=s.model("From below.", prefix="c"), clock=s.clock)

    async def asks(args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.text((await run_child(ctx, "Help.", child)).text)

    top = s.model(call("asks"), call("asks"), "Done.", *["More."] * 3)
    s.models.insert(0, s.models.pop(s.models.index(top)))
    s.deed("asks", asks)


@pytest.mark.parametrize("budget", [None, Budget(tokens=350, wrap_up_at=None)])
async def test_what_a_tool_of_ones_own_has_spent_below_is_counted(budget: Budget | None) -> None:
    def make() -> Story:
        s = Story()
        own_child(s)
        s.settings["budget"] = budget
        return s

    played, store = make(), MemoryStore()
    result = await played.play(RunLog(store))
    assert isinstance(result, RunResult)
    assert result.tree_usage != result.usage
    loaded, again = root_of(store), make()
    report = await replay(store, loaded.run_id, again.config())
    assert str(report.drift) == "None"
    assert report.result is not None
    assert (report.result.tree_usage, report.result.outcome) == (result.tree_usage, result.outcome)
    assert not again.was_asked


async def test_a_child_that_had_not_begun_when_its_parent_died_is_not_mistaken_for_the_next() -> (
    None
):
    """The call is idempotent: the process that goes on runs it again, and then there is a child."""

    def make() -> Story:
        s = begin("helpers")
        for each in s.tools:
            each.idempotent = True
        return s

    played, store = make(), MemoryStore()
    await played.play(RunLog(store))
    loaded = root_of(store)
    started = [n for n, r in enumerate(loaded.records) if isinstance(r.entry, ToolStarted)]
    cut = MemoryStore()
    fill(cut, loaded.run_id, loaded.records[: started[0] + 1])  # and no log of a child
    await resume(cut, loaded.run_id, make().config())
    again = make()
    async with asyncio.timeout(5):
        report = await replay(cut, loaded.run_id, again.config())
    assert str(report.drift) == "None"
    assert not again.was_asked


# --- what is noticed ------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"max_output_tokens": 7}])
async def test_a_setting_is_compared_also_if_the_run_was_cancelled_at_once(
    change: dict[str, Any],
) -> None:
    """The event tells the setting, so the log has it, however soon the run ends behind it."""

    def make(**settings: Any) -> Story:
        s = Story()
        s.model("Never.")

        def stop(event: AgentEvent) -> None:
            if isinstance(event, ProviderRequestPrepared):
                s.signal.cancel()

        s.settings |= {"event_sink": stop, **settings}
        return s

    store = MemoryStore()
    await make().play(RunLog(store))
    loaded = root_of(store)
    same = await replay(store, loaded.run_id, make().config())
    assert str(same.drift) == "None"
    report = await replay(store, loaded.run_id, make(**change).config())
    assert report.drift is not None
    assert next(iter(change)) in str(report.drift)


class Alternating:
    """A transform that adds a note in every other turn, unless it is told to in all."""

    name = "alternating"

    def __init__(self, *, always: bool = False, says_so: bool = False) -> None:
        self.always = always
        self.says_so = says_so

    def should_transform(self, messages: Sequence[AgentMessage], ctx: TransformContext) -> bool:
        return self.always or not self.says_so or ctx.iteration % 2 == 0

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        if self.always or ctx.iteration % 2 == 0:
            return [*messages, SystemMessage("a note", 5)]
        return messages


@pytest.mark.parametrize("says_so", [False, True])
async def test_a_transform_that_stops_to_edit_is_compared(says_so: bool) -> None:
    """What it gives is in the log turn by turn; and whether it ran follows from the events."""

    def make(plugin: Alternating) -> Story:
        s = Story()
        s.deed("work", "done")
        s.settings["plugins"] = [plugin]
        s.model(call("work"), call("work"), call("work"), "Done.")
        return s

    store = MemoryStore()
    await make(Alternating(says_so=says_so)).play(RunLog(store))
    loaded = root_of(store)
    same = await replay(store, loaded.run_id, make(Alternating(says_so=says_so)).config())
    assert str(same.drift) == "None"
    for other in (Alternating(always=True), Alternating(says_so=not says_so)):
        report = await replay(store, loaded.run_id, make(other).config())
        assert not report.is_identical
        assert report.drift is not None
        assert report.drift.turn in (1, 2)


async def test_an_answer_that_is_announced_with_something_is_announced_so_again() -> None:
    def make() -> Story:
        s = Story()
        placeholder = say("I ")
        s.model([Start(placeholder), Chunk(TextChunk("I am.")), Done(say("I am."))])
        return s

    played, store = make(), MemoryStore()
    await played.play(RunLog(store))
    loaded, again = root_of(store), make()
    report = await replay(store, loaded.run_id, again.config())
    assert str(report.drift) == "None"
    assert_same_events(played.sink.events, again.sink.events)
