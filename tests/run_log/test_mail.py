"""Mail to a run: it is taken while the run runs, exactly once, and repeated in a replay."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from clark_agent import (
    CancellationToken,
    ExecutionMode,
    LoopConfig,
    RunAborted,
    UserMessage,
    agent_tool,
    run,
)
from clark_agent.errors import ConfigError, InvalidContinuationError, RunNotFound
from clark_agent.replay import replay
from clark_agent.run_log import (
    Mail,
    MemoryStore,
    RunLog,
    RunStore,
    cancel,
    deliver,
    fold,
    follow_up,
    resume,
    steer,
)
from clark_agent.run_log.records import (
    CancelReceived,
    MessagesAdded,
    RunFailed,
    RunResumed,
    SteeringAccepted,
)
from clark_agent.stream import Chunk, Start, StreamEvent, StreamRequest, TextChunk
from clark_agent.testing import ScriptedStream, call, check_events
from tests.run_log.mailing import GO, Posting, context, taken, texts, until, until_taken
from tests.run_log.stories import EMPTY, Model, copy_of
from tests.run_log.storing import KINDS, child, line_from, open_store, tell

EVERY = 0.005
stores = pytest.mark.parametrize("kind", ["memory", *KINDS])


def make_store(kind: str, folder: Path) -> Any:
    return MemoryStore() if kind == "memory" else open_store(kind, folder)


async def check_replay(store: RunStore, run_id: str, config: LoopConfig) -> None:
    report = await replay(store, run_id, config)
    assert report.is_identical, str(report)


def config_of(store: RunStore, tool: Posting, *steps: Any, **settings: Any) -> LoopConfig:
    return LoopConfig(
        stream=ScriptedStream(list(steps)),
        tools=[tool],
        run_log=RunLog(store, mail_every=EVERY),
        default_execution_mode=ExecutionMode.SEQUENTIAL,
        **settings,
    )


# --- while the run runs -----------------------------------------------------------------------


@stores
async def test_steering_after_the_batch(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    post = partial(steer, message=UserMessage("look here", 5), id="m1")
    tool = Posting(store, lambda s, r: post(s, r))
    events: list[Any] = []
    config = config_of(
        store, tool, [call("posting"), call("posting")], "ok", event_sink=events.append
    )
    result = await run(GO, context("r"), config)
    assert tool.ran == 2
    assert texts(result.messages)[-2:] == ["user: look here", "assistant: ok"]
    check_events(events)
    folded = fold(store.load("r"))
    assert (folded.mails, folded.waiting) == ({"m1"}, {})
    await check_replay(store, "r", config)


@stores
async def test_steering_before_the_next_tool(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    tool = Posting(store, lambda s, r: steer(s, r, "stop that", "before_next_tool", id="m1"))
    config = config_of(store, tool, [call("posting"), call("posting")], "ok")
    result = await run(GO, context("r"), config)
    assert tool.ran == 1
    assert "the user intervened" in texts(result.messages)[3]
    assert texts(result.messages)[4:] == ["user: stop that", "assistant: ok"]
    await check_replay(store, "r", config)


@stores
async def test_steering_now_stops_a_tool(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    tool = Posting(store, lambda s, r: steer(s, r, "at once", "now", id="m1"), waits=True)
    config = config_of(store, tool, [call("posting"), call("posting")], "ok")
    result = await run(GO, context("r"), config)
    assert tool.ran == 1
    assert "when the user intervened, and was stopped" in texts(result.messages)[2]
    assert texts(result.messages)[4:] == ["user: at once", "assistant: ok"]
    await check_replay(store, "r", config)


@stores
@pytest.mark.parametrize("begins", [True, False])
async def test_steering_now_stops_an_answer(kind: str, begins: bool, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    asked: list[StreamRequest] = []

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        asked.append(request)
        if len(asked) > 1:
            async for event in ScriptedStream(["ok"])(request, signal):
                yield event
            return
        steer(store, "r", "at once", "now", id="m1")
        if begins:
            yield Start(EMPTY)
            yield Chunk(TextChunk("I think that"))
        await asyncio.Event().wait()

    config = LoopConfig(stream=model, run_log=RunLog(store, mail_every=EVERY))
    result = await run(GO, context("r"), config)
    assert texts(result.messages) == ["user: go", "user: at once", "assistant: ok"]
    await check_replay(store, "r", config)


@stores
async def test_a_follow_up(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    tool = Posting(store, lambda s, r: follow_up(s, r, "and then?", id="m1"))
    config = config_of(store, tool, call("posting"), "done", "and then this")
    result = await run(GO, context("r"), config)
    assert texts(result.messages)[3:] == [
        "assistant: done",
        "user: and then?",
        "assistant: and then this",
    ]
    purposes = [
        e.entry.purposes for e in store.load("r").records if isinstance(e.entry, MessagesAdded)
    ]
    assert purposes == [("follow_up",)]
    await check_replay(store, "r", config)


async def test_steering_while_follow_ups_are_looked_for() -> None:
    """The model has stopped, and a message still comes in time."""
    store = MemoryStore()

    class Slow:
        name = "slow"

        async def next_follow_up_messages(self) -> list[Any]:
            steer(store, "r", "wait", id="m1")
            await until_taken(store, "r")
            return []

    config = LoopConfig(
        stream=ScriptedStream(["done", "waiting"]),
        plugins=[Slow()],
        run_log=RunLog(store, mail_every=EVERY),
    )
    result = await run(GO, context("r"), config)
    assert texts(result.messages)[1:] == ["assistant: done", "user: wait", "assistant: waiting"]
    assert result.undelivered == ()
    await check_replay(store, "r", config)


@stores
async def test_several_at_once_keep_their_order(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)

    def post(s: RunStore, r: str) -> None:
        follow_up(s, r, "four", id="4")
        for number, text in enumerate(["one", "two", "three"], 1):
            assert steer(s, r, text, id=str(number))
            assert not steer(s, r, "again", id=str(number))
        assert deliver(s, r, "paid", {"amount": 1}, id="5")

    config = config_of(store, Posting(store, post), call("posting"), "done", "done again")
    result = await run(GO, context("r"), config)
    said = [m.plain_text for m in result.messages if isinstance(m, UserMessage)]
    assert said == ["go", "one", "two", "three", "four"]
    assert taken(store, "r") == ["4", "1", "2", "3"]
    await check_replay(store, "r", config)


@stores
async def test_a_cancelled_run_leaves_the_token_of_its_caller_alone(
    kind: str, tmp_path: Path
) -> None:
    store = make_store(kind, tmp_path)
    tool = Posting(store, lambda s, r: cancel(s, r, "too expensive", id="m1"), waits=True)
    config = config_of(store, tool, [call("posting"), call("posting")], "never")
    token = CancellationToken()
    with pytest.raises(RunAborted) as aborted:
        await run(GO, context("r"), config, token)
    assert aborted.value.reason == "too expensive"
    assert not token.cancelled
    assert not token.has_subscribers
    *_, received, _, _, _, last = [record.entry for record in store.load("r").records]
    assert received == CancelReceived(mail="m1", reason="too expensive")
    assert isinstance(last, RunFailed)
    assert (last.error, last.reason) == ("RunAborted", "too expensive")
    await check_replay(store, "r", config)


async def test_the_token_of_the_caller_still_cancels() -> None:
    store = MemoryStore()
    token = CancellationToken()
    tool = Posting(store, lambda s, r: token.cancel("by hand"), waits=True)
    config = config_of(store, tool, call("posting"), "never")
    with pytest.raises(RunAborted) as aborted:
        await run(GO, context("r"), config, token)
    assert aborted.value.reason == "by hand"
    await check_replay(store, "r", config)


async def test_a_child_run_can_be_cancelled_alone() -> None:
    store = MemoryStore()
    tool = Posting(store, lambda s, r: cancel(s, r, "not you", id="m1"), waits=True)
    below = LoopConfig(stream=ScriptedStream([call("posting"), "never"]), tools=[tool])
    config = LoopConfig(
        stream=ScriptedStream([call("helper", task="x"), "done"]),
        tools=[agent_tool("helper", "Helps.", below)],
        run_log=RunLog(store, mail_every=EVERY),
    )
    result = await run(GO, context("r"), config)
    assert "not you" in texts(result.messages)[2]
    assert texts(result.messages)[3:] == ["assistant: done"]
    await check_replay(store, "r", config)


async def test_threads_post_while_a_run_runs() -> None:
    store = MemoryStore()

    def post(s: RunStore, r: str) -> None:
        for name in "abc":
            Thread(target=lambda n=name: [steer(s, r, n, id=f"{n}{k}") for k in range(20)]).start()

    tool = Posting(store, post)
    posted = tool.execute

    async def execute(args: Any, ctx: Any) -> Any:
        result = await posted(args, ctx)
        await until_taken(store, "r", 60)
        return result

    tool.execute = execute  # type: ignore[method-assign]
    config = config_of(store, tool, call("posting"), "done")
    result = await run(GO, context("r"), config)
    said = [m.plain_text for m in result.messages if isinstance(m, UserMessage)][1:]
    assert sorted(said) == sorted("abc" * 20)
    ids = taken(store, "r")
    assert len(set(ids)) == len(ids) == 60


# --- what is not taken ------------------------------------------------------------------------


async def test_a_run_that_does_not_look_gets_nothing() -> None:
    store = MemoryStore()
    tool = Posting(store, lambda s, r: steer(s, r, "hello"))
    config = LoopConfig(
        stream=ScriptedStream([call("posting"), "done"]),
        tools=[tool],
        run_log=RunLog(store, mail_every=None),
    )
    task = asyncio.ensure_future(run(GO, context("r"), config))
    await until(lambda: bool(store._mail))
    for _ in range(100):
        await asyncio.sleep(0)
    assert taken(store, "r") == []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@stores
async def test_mail_after_the_end_stays_unread(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    config = LoopConfig(stream=ScriptedStream(["done"]), run_log=RunLog(store, mail_every=EVERY))
    await run(GO, context("r"), config)
    before = store.load("r")
    for post in (steer, follow_up, cancel, deliver):
        with pytest.raises(InvalidContinuationError, match=r"the run 'r' has ended \(done\)"):
            post(store, "r", "late")
    assert list(store.mail("r")) == []
    assert store.load("r") == before


def test_wrong_messages_are_errors() -> None:
    store = MemoryStore()
    with pytest.raises(RunNotFound):
        steer(store, "nobody", "hello")
    with pytest.raises(ConfigError, match="store of runs"):
        steer("runs", "r", "hello")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="when must be one of after_batch"):
        steer(store, "r", "hello", "soon")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a text or a message, not int"):
        follow_up(store, "r", 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reason must be a text, not int"):
        cancel(store, "r", 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a name"):
        deliver(store, "r", "")
    with pytest.raises(TypeError, match="name must be a text"):
        deliver(store, "r", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be empty"):
        cancel(store, "r", id="")
    with pytest.raises(TypeError, match="run_id must be a text"):
        cancel(store, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [0, -1, float("nan"), float("inf"), True, "1"])
def test_the_interval_is_a_time(every: Any) -> None:
    with pytest.raises(ConfigError, match="mail_every must be more than 0 seconds or None"):
        RunLog(MemoryStore(), mail_every=every)


def test_a_store_without_a_mailbox_is_refused() -> None:
    class Old:
        create = reopen = load = runs = print

    with pytest.raises(ConfigError, match="has no method tail, post, mail, publish"):
        RunLog(Old())  # type: ignore[arg-type]


async def test_a_mailbox_that_cannot_be_read_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Away(MemoryStore):
        looked = 0

        def mail(self, run_id: str, *, after: int = 0) -> Any:
            self.looked += 1
            if self.looked < 5:
                raise OSError("away")
            return super().mail(run_id, after=after)

    store = Away()
    tool = Posting(store, lambda s, r: steer(s, r, "hello"))
    config = config_of(store, tool, call("posting"), "done")
    with caplog.at_level(logging.WARNING):
        result = await run(GO, context("r"), config)
    assert texts(result.messages)[3:] == ["user: hello", "assistant: done"]
    assert [r.getMessage() for r in caplog.records] == ["the mailbox of run r cannot be read: away"]


# --- resumed ----------------------------------------------------------------------------------


async def stopped_run(store: RunStore, *, after: str = "tool_started") -> None:
    """Leave a log that ends in the middle of a call."""
    tool = Posting(store, lambda s, r: None, waits=True)
    config = config_of(store, tool, call("posting"), "never")
    task = asyncio.ensure_future(run(GO, context("r"), config))
    await until(lambda: tool.ran > 0)
    count = len(store.load("r").records)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(store, MemoryStore)
    store.cut("r", count)


def resuming(store: RunStore, *steps: Any) -> LoopConfig:
    tool = Posting(store, lambda s, r: None)
    return LoopConfig(
        stream=ScriptedStream(list(steps)), tools=[tool], run_log=RunLog(store, mail_every=1000)
    )


async def test_a_resumed_run_takes_its_mail_at_once() -> None:
    store = MemoryStore()
    await stopped_run(store)
    steer(store, "r", "meanwhile", id="m1")
    deliver(store, "r", "event", id="m2")
    config = resuming(store, "done")
    result = await resume(store, "r", config)
    assert texts(result.messages)[3:] == ["user: meanwhile", "assistant: done"]
    assert taken(store, "r") == ["m1"]
    await check_replay(store, "r", config)


async def test_mail_that_was_taken_is_not_taken_again() -> None:
    store = MemoryStore()
    await stopped_run(store)
    steer(store, "r", "meanwhile", id="m1")
    config = resuming(store, "never")
    await resume(store, "r", config)
    count = [isinstance(r.entry, SteeringAccepted) for r in store.load("r").records].index(True)
    store.cut("r", count + 1)
    steer(store, "r", "later", id="m2")
    result = await resume(store, "r", resuming(store, "done"))
    said = [m.plain_text for m in result.messages if isinstance(m, UserMessage)]
    assert said == ["go", "meanwhile", "later"]
    assert taken(store, "r") == ["m1", "m2"]
    await check_replay(store, "r", config)


async def test_a_run_that_was_cancelled_and_killed_is_cancelled_when_it_is_resumed() -> None:
    store = MemoryStore()
    await stopped_run(store)
    cancel(store, "r", "enough", id="m1")
    with pytest.raises(RunAborted, match="enough"):
        await resume(store, "r", resuming(store, "never"))
    entries = [record.entry for record in store.load("r").records]
    assert [type(entry) for entry in entries].count(CancelReceived) == 1
    place = [isinstance(entry, CancelReceived) for entry in entries].index(True)
    store.cut("r", place + 1)  # killed right behind it
    assert fold(store.load("r")).cancelled == CancelReceived(mail="m1", reason="enough")
    config = resuming(store, "never")
    with pytest.raises(RunAborted, match="enough"):
        await resume(store, "r", config)
    await check_replay(store, "r", config)
    # Its end is recorded: who resumes it now wants it to go on.
    result = await resume(store, "r", resuming(store, "done after all"))
    assert texts(result.messages)[-1] == "assistant: done after all"
    entries = [record.entry for record in store.load("r").records]
    assert sum(isinstance(entry, RunResumed) for entry in entries) == 3
    assert [entry.mail for entry in entries if isinstance(entry, CancelReceived)] == ["m1"]


async def test_a_run_that_is_killed_anywhere_takes_its_mail_once() -> None:
    store = MemoryStore()

    def post(s: RunStore, r: str) -> None:
        steer(s, r, "one", id="m1")
        steer(s, r, "two", "before_next_tool", id="m2")
        follow_up(s, r, "three", id="m3")

    def config(into: RunStore, tool: Posting) -> LoopConfig:
        return LoopConfig(
            stream=Model(call("posting"), "done", "and this", "and that"),
            tools=[tool],
            run_log=RunLog(into, mail_every=EVERY),
        )

    await run(GO, context("r"), config(store, Posting(store, post)))
    records = store.load("r").records
    for length in range(1, len(records)):
        copy = copy_of(store, "r", length)
        for mail in store.mail("r"):
            assert copy.post("r", mail)
        settings = config(copy, Posting(copy, lambda s, r: None))
        result = await resume(copy, "r", settings)
        said = [m.plain_text for m in result.messages if isinstance(m, UserMessage)]
        assert said == ["go", "one", "two", "three"], length
        assert taken(copy, "r") == ["m1", "m2", "m3"]
        await check_replay(copy, "r", settings)


# --- two processes ----------------------------------------------------------------------------


def rest_of(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return [line.rstrip("\n") for line in process.stdout]


def wait_for_taken(store: RunStore, count: int) -> None:
    asyncio.run(asyncio.wait_for(until_taken(store, "r", count), 30))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_another_process_steers_and_follows_up(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    with child("run_a_mailbox", kind, tmp_path) as process:
        assert line_from(process) == "tool"
        assert steer(store, "r", "softly", id="m1")
        assert follow_up(store, "r", "one more thing", id="m2")
        wait_for_taken(store, 2)
        tell(process)  # the tool returns
        assert line_from(process) == "tool"
        assert steer(store, "r", "not the other", "before_next_tool", id="m3")
        wait_for_taken(store, 3)
        tell(process)
        assert line_from(process) == "tool"
        assert steer(store, "r", "stop", "now", id="m4")
        said = rest_of(process)
    assert said == [
        "user: go",
        "assistant: ",
        "tool_result: done",
        "user: softly",
        "assistant: ",
        "tool_result: done",
        "tool_result: Not executed: the user intervened. See what they say next, then send this "
        "call again if it is still wanted.",
        "user: not the other",
        "assistant: ",
        "tool_result: The call was running when the user intervened, and was stopped.",
        "user: stop",
        "assistant: finished",
        "user: one more thing",
        "assistant: that too",
    ]
    assert taken(store, "r") == ["m1", "m2", "m3", "m4"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_another_process_cancels(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    with child("run_a_mailbox", kind, tmp_path) as process:
        assert line_from(process) == "tool"
        assert cancel(store, "r", "no more", id="m1")
        said = rest_of(process)
    assert said[-1] == "RunAborted no more"
    last = store.load("r").records[-1].entry
    assert isinstance(last, RunFailed)
    assert last.reason == "no more"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_survives_the_process_that_took_it(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    with child("run_a_mailbox", kind, tmp_path) as process:
        assert line_from(process) == "tool"
        assert steer(store, "r", "remember", id="m1")
        wait_for_taken(store, 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert steer(store, "r", "and this", id="m2")
    assert not steer(store, "r", "remember", id="m1")
    config = resuming(store, "done")
    tool = Posting(store, lambda s, r: None)
    tool.name = "waiting"
    result = asyncio.run(resume(store, "r", config.replace(tools=[tool])))
    said = [m.plain_text for m in result.messages if isinstance(m, UserMessage)]
    assert said == ["go", "remember", "and this"]
    assert taken(store, "r") == ["m1", "m2"]
    assert isinstance(store.mail("r")[0], Mail)
