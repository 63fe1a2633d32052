"""What a run has told the model, counted and trimmed is known to the process that takes it up.

It is known from what the log says, never from words: texts change, and anybody may use them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from clark_agent import (
    AgentContext,
    AgentMessage,
    Budget,
    ChannelSteering,
    CustomMessage,
    LoopConfig,
    LoopDetector,
    LoopOutcome,
    RunResult,
    StreamRequest,
    SystemMessage,
    TokenBudget,
    ToolResultMessage,
    run,
)
from clark_agent.plugins.base import RestoreContext
from clark_agent.protocol import BUDGET_WRAP_UP, WRAP_UP
from clark_agent.run_log import LoadedRun, MemoryStore, RunLog, RunStore, resume
from clark_agent.run_log.records import MessagesAdded, RunResumed, ToolEnded
from clark_agent.testing import ScriptedStream, call
from tests.run_log.stories import Model, Numbering, Story, after, copy_of, root_of

Make = Callable[[], Story]


async def whole(make: Make) -> tuple[RunResult, LoadedRun, RunStore]:
    store = MemoryStore()
    result = await make().play(RunLog(store))
    assert isinstance(result, RunResult), result
    return result, root_of(store), store


async def resumed_everywhere(make: Make) -> list[tuple[int, RunResult, Story]]:
    """The run cut behind every record and taken up, each with a fresh story."""
    _, loaded, store = await whole(make)
    found: list[tuple[int, RunResult, Story]] = []
    for cut in range(1, len(loaded.records)):
        story = make()
        cut_store = copy_of(store, loaded.run_id, cut)
        found.append((cut, await resume(cut_store, loaded.run_id, story.config()), story))
    return found


def purposes(store: RunStore, run_id: str) -> list[str]:
    entries = [record.entry for record in store.load(run_id).records]
    return [p for entry in entries if isinstance(entry, MessagesAdded) for p in entry.purposes]


def notes(result: RunResult) -> list[str]:
    return [m.content for m in result.messages if isinstance(m, SystemMessage)]


# --- warnings -------------------------------------------------------------------------------------


def warned_in_new_words() -> Story:
    """A warning that never says the same twice."""
    s = Story()
    words = count(1)
    s.deed("work", after(1))
    s.settings |= {
        "max_iterations": 6,
        "grace_iterations": 3,
        "graceful_turn_limit_message_provider": lambda: f"wrap up {id(s)} {next(words)}",
    }
    s.model(*[call("work", n=n) for n in range(4)], "Closing.")
    return s


async def test_a_warning_is_not_given_twice_whatever_its_words() -> None:
    for cut, result, _ in await resumed_everywhere(warned_in_new_words):
        assert len(notes(result)) == 1, cut
        assert result.outcome is LoopOutcome.WRAPPED_UP, cut


def quoted() -> Story:
    """The user says what the runtime would."""
    s = Story()
    s.deed("work", after(1))
    s.prompts = [SystemMessage(WRAP_UP, 1), *[SystemMessage(t, 1) for t in BUDGET_WRAP_UP.values()]]
    s.settings |= {"max_iterations": 6, "grace_iterations": 3, "budget": Budget(turns=50)}
    s.model(call("work"), "Closing.")
    return s


async def test_words_of_others_are_no_warning() -> None:
    for cut, result, _ in await resumed_everywhere(quoted):
        assert result.outcome is LoopOutcome.DONE, cut


def warned_of_the_budget() -> Story:
    s = Story()
    s.deed("work", after(1))
    s.settings["budget"] = Budget(turns=6, wrap_up_at=0.5, message=f"Hurry, {id(s)}.")
    s.model(*[call("work", n=n) for n in range(4)], "Closing.")
    return s


async def test_a_word_about_the_budget_is_given_once_whatever_it_is() -> None:
    for cut, result, _ in await resumed_everywhere(warned_of_the_budget):
        assert len(notes(result)) == 1, cut
        assert result.outcome is LoopOutcome.WRAPPED_UP, cut


def nudged() -> Story:
    s = Story()
    s.deed("deliver", "delivered")
    s.settings |= {
        "plain_text_terminal_fallback_tool": "deliver",
        "plain_text_terminal_fallback_eager": True,
        "plain_text_terminal_fallback_eager_nudge": True,
    }
    s.model("One.", "Two.", "Three.", *["Never."] * 5)
    return s


async def test_the_model_is_reminded_as_often_as_without_a_crash() -> None:
    result, loaded, store = await whole(nudged)
    assert purposes(store, loaded.run_id) == ["nudge", "nudge", "final_answer"]
    for cut, again, _ in await resumed_everywhere(nudged):
        assert len(notes(again)) == len(notes(result)) == 2, cut


class Closing:
    """A plugin of the host's own that tells the model to come to an end."""

    name = "closing"
    purpose = "wrap_up"

    def __init__(self) -> None:
        self.given = False

    def for_run(self) -> Closing:
        return Closing()

    def restore(self, ctx: RestoreContext) -> None:
        self.given = "wrap_up" in ctx.purposes

    def next_steering_messages(self) -> list[AgentMessage]:
        was, self.given = self.given, True
        return [] if was else [SystemMessage("Close.")]


def closed_by_a_plugin() -> Story:
    s = Story()
    s.deed("work", after(1))
    s.settings["plugins"] = [Closing()]
    s.model(call("work"), call("work"), "Closed.")
    return s


async def test_a_plugin_of_ones_own_can_say_why_and_know_what_it_said() -> None:
    for cut, result, _ in await resumed_everywhere(closed_by_a_plugin):
        assert notes(result) == ["Close."], cut
        assert result.outcome is LoopOutcome.WRAPPED_UP, cut


class Failing(Closing):
    def for_run(self) -> Failing:
        return Failing()

    def restore(self, ctx: RestoreContext) -> None:
        raise ValueError("no")


async def test_a_plugin_that_cannot_restore_its_state_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make() -> Story:
        s = closed_by_a_plugin()
        s.settings["plugins"] = [Failing()]
        return s

    _, loaded, store = await whole(make)
    cut = copy_of(store, loaded.run_id, len(loaded.records) // 2)
    with caplog.at_level(logging.ERROR):
        result = await resume(cut, loaded.run_id, make().config())
    assert result.text == "Closed."
    assert "could not restore its state" in caplog.text


class Seen:
    """Keeps what it is told."""

    def __init__(self, seen: list[RestoreContext]) -> None:
        self.seen = seen

    def restore(self, ctx: RestoreContext) -> None:
        self.seen.append(ctx)

    def on_event(self, event: object) -> None:
        pass


async def test_what_a_plugin_is_told() -> None:
    def make() -> Story:
        s = Story()
        s.deed("work", after(1))
        s.model(call("work"), [call("work"), call("work")], "Done.")
        return s

    result, loaded, store = await whole(make)
    story = make()
    seen: list[RestoreContext] = []
    story.settings["plugins"] = [Seen(seen)]
    cut = copy_of(store, loaded.run_id, len(loaded.records) - 2)
    await resume(cut, loaded.run_id, story.config())
    (ctx,) = seen
    assert ctx.turns == 2
    assert list(ctx.messages) == list(result.messages[:-1])
    assert [c.tool_call.id for c in ctx.calls] == ["t0c0", "t1c0", "t1c1"]
    assert [len(view) for view in ctx.requests] == [1, 3, 6]
    assert ctx.purposes == ()
    assert "work" in ctx.tools


# --- counts ---------------------------------------------------------------------------------------


def repeating() -> Story:
    s = Story()
    s.deed("work", "the same")
    s.settings["plugins"] = [LoopDetector(2, 4)]
    s.model(*[call("work", n=1) for _ in range(7)], "Enough.")
    return s


async def test_calls_that_repeat_are_counted_on() -> None:
    result, _, _ = await whole(repeating)
    blocked = [m.plain_text[:20] for m in result.messages if isinstance(m, ToolResultMessage)]
    assert len(notes(result)) == 1
    assert sum("not run" in text for text in blocked) == 3
    for cut, again, _ in await resumed_everywhere(repeating):
        texts = [m.plain_text[:20] for m in again.messages if isinstance(m, ToolResultMessage)]
        # A call that had begun has another result, after which it is counted anew.
        if not any("had begun" in text for text in texts):
            assert texts == blocked, cut
            assert len(notes(again)) == 1, cut


def trimming() -> Story:
    s = Story()
    s.deed("read", lambda args, ctx: "x" * 200 + str(args), idempotent=True)
    s.settings["plugins"] = [TokenBudget(700)]
    s.models.append(Numbering(*[call("read", n=n) for n in range(12)], "Read."))
    return s


async def test_what_was_trimmed_stays_trimmed_for_the_providers_cache() -> None:
    """The first request behind a crash is the one that would have come without."""
    store = MemoryStore()
    played = trimming()
    await played.play(RunLog(store))
    loaded = root_of(store)
    sent = played.models[0].asked
    assert len(sent[-1].messages) < 20, "turns were left out"
    for cut in range(1, len(loaded.records)):
        story = trimming()
        await resume(copy_of(store, loaded.run_id, cut), loaded.run_id, story.config())
        asked = story.models[0].asked
        expected = sent[len(sent) - len(asked) :]
        for mine, theirs in zip(asked, expected, strict=True):
            assert [_text(m) for m in mine.messages] == [_text(m) for m in theirs.messages], cut


def _text(message: AgentMessage) -> str:
    assert not isinstance(message, CustomMessage)
    return message.content if isinstance(message, SystemMessage) else message.plain_text


# --- time -----------------------------------------------------------------------------------------


class Hours:
    """A clock that somebody sets."""

    def __init__(self, time_ms: int) -> None:
        self.time_ms = time_ms

    def now_ms(self) -> int:
        return self.time_ms

    def advance(self, by_ms: int) -> str:
        self.time_ms += by_ms
        return "ok"

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def new_id(self) -> str:
        return "id"


async def test_seconds_count_on_and_the_time_between_processes_does_not() -> None:
    def make(clock: Hours) -> Story:
        s = Story()
        s.clock = clock  # type: ignore[assignment]
        s.deed("work", lambda args, ctx: clock.advance(4_000))
        s.settings["budget"] = Budget(seconds=20, wrap_up_at=None)
        s.models.append(Model(*[call("work", n=n) for n in range(9)]))
        return s

    store = MemoryStore()
    first = make(Hours(1_000_000))
    alone = await first.play(RunLog(store))
    assert isinstance(alone, RunResult)
    assert (alone.outcome, alone.limit) == (LoopOutcome.OUT_OF_BUDGET, "seconds")
    assert len(first.ran) == 5
    loaded = root_of(store)
    ends = [n for n, r in enumerate(loaded.records) if isinstance(r.entry, ToolEnded)]
    ran = []
    for end in ends[:4]:
        second = make(Hours(9_000_000))
        again = copy_of(store, loaded.run_id, end + 1)
        result = await resume(again, loaded.run_id, second.config())
        assert (result.outcome, result.limit) == (LoopOutcome.OUT_OF_BUDGET, "seconds")
        assert result.spent is not None
        assert result.spent.seconds == 20
        ran.append(len(second.ran))
    assert ran == [4, 3, 2, 1]
    again = copy_of(store, loaded.run_id, ends[1] + 1)
    third = make(Hours(5))
    third.models[0].steps = third.models[0].steps[:3]
    with pytest.raises(Exception, match="no step 3"):
        await resume(again, loaded.run_id, third.config())
    result = await resume(again, loaded.run_id, make(Hours(7)).config())
    assert result.spent is not None
    assert result.spent.seconds == 20, "over three processes too"
    assert sum(isinstance(r.entry, RunResumed) for r in again.load(loaded.run_id).records) == 2


# --- channels -------------------------------------------------------------------------------------


class Wrapped:
    """A channel that is none of the package's own classes."""

    name = "wrapped"

    def __init__(self, inner: ChannelSteering) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def for_run(self) -> Wrapped:
        return Wrapped(self.inner.for_run())

    def next_steering_messages(self) -> Sequence[AgentMessage]:
        return self.inner.next_steering_messages()

    def next_follow_up_messages(self) -> Sequence[AgentMessage]:
        return self.inner.next_follow_up_messages()


async def test_a_channel_of_ones_own_can_interrupt() -> None:
    channel = ChannelSteering()

    def model(request: StreamRequest) -> Any:
        return "Stopped." if len(request.messages) > 3 else call("wait")

    story = Story()
    story.deed("wait", lambda args, ctx: _steer(channel))
    config = LoopConfig(
        stream=ScriptedStream([model], at_end="repeat"),
        tools=story.tools,
        plugins=[Wrapped(channel)],
    )
    result = await run("Go.", AgentContext(), config)
    texts = [m.plain_text for m in result.messages if isinstance(m, ToolResultMessage)]
    assert "the user intervened" in texts[0]
    assert result.text == "Stopped."


async def _steer(channel: ChannelSteering) -> str:
    _ = channel.handle.steer("Stop.", "now")
    await asyncio.sleep(60)
    return "never"
