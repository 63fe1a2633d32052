"""Rate limits: who goes when, what is counted, and what listeners and logs see of it."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import (
    AgentContext,
    CancellationToken,
    ChannelSteering,
    ConfigError,
    LoopConfig,
    RunAborted,
    RunIdentity,
    RunResult,
    StreamError,
    StreamErrorKind,
    StreamFn,
    StreamRequest,
    Usage,
    UserMessage,
    run,
    run_sync,
)
from clark_agent import events as ev
from clark_agent.rate_limit import RateLimit, limited
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog, diff
from clark_agent.stream import Done, Error, Start, StreamEvent, Waiting
from clark_agent.testing import FakeClock, RecordingSink, ScriptedStream, Step, call, say
from clark_agent.testing.transport_kit import check_stream_fn
from clark_agent.transports import FirstOf, PlaybackStream, RecordingStream
from clark_agent.transports.http.redaction import Redactor
from clark_agent.transports.stream_json import decode_event, encode_event
from clark_agent.types import AssistantMessage, StopReason
from tests.engine.support import (
    PLACEHOLDER,
    Work,
    completed,
    failed,
    observed_run,
)


class Server:
    """A model that notes when it was called, and answers at once or when it is let go."""

    def __init__(self, clock: FakeClock, *, usages: list[Usage] | None = None) -> None:
        self.clock = clock
        self.calls: list[tuple[str, float]] = []
        """Who called, and the seconds since the beginning."""
        self.began = clock.time_ms
        self.usages = usages or []
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = self.most = 0

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        who = request.messages[0].plain_text
        number = len(self.calls)
        self.calls.append((who, (self.clock.time_ms - self.began) / 1000))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            yield Start(PLACEHOLDER)
            usage = self.usages[number] if number < len(self.usages) else None
            yield Done(AssistantMessage((), StopReason.END_TURN, usage=usage))
        finally:
            self.running -= 1

    @property
    def times(self) -> list[float]:
        return [at for _, at in self.calls]


def request(who: object, **settings: Any) -> StreamRequest:
    return StreamRequest(system_prompt="", messages=(UserMessage(str(who), 1),), **settings)


async def ask(
    stream: StreamFn, who: object = "", signal: CancellationToken | None = None, **more: Any
) -> list[StreamEvent]:
    return [event async for event in stream(request(who, **more), signal or CancellationToken())]


async def settle() -> None:
    """Let all tasks come as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


def limit_of(clock: FakeClock, **limits: Any) -> RateLimit:
    return RateLimit(clock=clock, **limits)


# --- who goes when ------------------------------------------------------------------------------


async def test_no_minute_has_more_requests_than_allowed() -> None:
    clock = FakeClock()
    server = Server(clock)
    stream = limited(server, limit_of(clock, requests_per_minute=2))
    await asyncio.gather(*[ask(stream, n) for n in range(7)])
    assert server.calls == [
        ("0", 0), ("1", 0), ("2", 60), ("3", 60), ("4", 120), ("5", 120), ("6", 180),
    ]  # fmt: skip


async def test_a_minute_is_any_minute() -> None:
    clock = FakeClock()
    server = Server(clock)
    stream = limited(server, limit_of(clock, requests_per_minute=2))
    for pause in (0, 45, 10, 0, 0):
        await clock.sleep(pause)
        await ask(stream)
    assert server.times == [0, 45, 60, 105, 120]


@given(st.lists(st.integers(0, 90), min_size=1, max_size=12), st.integers(1, 4))
def test_a_request_waits_only_as_long_as_it_must(pauses: list[int], most: int) -> None:
    clock = FakeClock()
    expected: list[float] = []

    async def scenario() -> list[float]:
        server = Server(clock)
        stream = limited(server, limit_of(clock, requests_per_minute=most))
        for pause in pauses:
            await clock.sleep(pause)
            now = (clock.time_ms - server.began) / 1000
            free = expected[-most] + 60 if len(expected) >= most else 0
            expected.append(max(now, free))
            await ask(stream)
        return server.times

    assert asyncio.run(scenario()) == expected


async def test_so_many_at_a_time_in_the_order_in_which_they_came() -> None:
    clock = FakeClock()
    server = Server(clock)
    server.gate.clear()
    stream = limited(server, limit_of(clock, concurrency=3))
    tasks = [asyncio.create_task(ask(stream, n)) for n in range(10)]
    await settle()
    assert [who for who, _ in server.calls] == ["0", "1", "2"]
    server.gate.set()
    answers = await asyncio.gather(*tasks)
    assert [who for who, _ in server.calls] == [str(n) for n in range(10)]
    assert (server.most, server.running, clock.sleeps) == (3, 0, [])
    assert answers[0][0] == Start(PLACEHOLDER)
    assert answers[3][0] == Waiting(None, "concurrency")


async def test_a_small_request_does_not_overtake_a_large_one() -> None:
    clock = FakeClock()
    server = Server(clock, usages=[Usage(500, 0)])
    stream = limited(server, limit_of(clock, tokens_per_minute=1000))
    await asyncio.gather(
        ask(stream, "first", max_output_tokens=400),
        ask(stream, "large", max_output_tokens=900),
        ask(stream, "small", max_output_tokens=1),
    )
    assert server.calls == [("first", 0), ("large", 60), ("small", 60)]


# --- tokens -------------------------------------------------------------------------------------


async def test_tokens_are_corrected_when_they_are_known() -> None:
    """Both ways: less than estimated leaves room, more takes it."""
    clock = FakeClock()
    server = Server(clock, usages=[Usage(10, 10), Usage(900, 90), Usage(10, 10)])
    stream = limited(server, limit_of(clock, tokens_per_minute=1000))
    for _ in range(3):
        await ask(stream, max_output_tokens=800)
    assert server.times == [0, 0, 60]


async def test_an_early_end_wakes_the_next_one() -> None:
    clock = FakeClock()

    class Slow(FakeClock):
        async def sleep(self, seconds: float) -> None:
            await asyncio.Event().wait()

    server = Server(clock, usages=[Usage(10, 10)])
    server.gate.clear()
    stream = limited(server, RateLimit(tokens_per_minute=1000, clock=Slow()))
    tasks = [asyncio.create_task(ask(stream, n, max_output_tokens=600)) for n in range(2)]
    await settle()
    assert len(server.calls) == 1
    server.gate.set()
    await asyncio.gather(*tasks)
    assert len(server.calls) == 2


async def test_a_request_that_is_too_large_goes_alone() -> None:
    clock = FakeClock()
    server = Server(clock, usages=[Usage(10, 10), Usage(5000, 10), Usage(10, 10)])
    stream = limited(server, limit_of(clock, tokens_per_minute=100))
    for _ in range(3):
        await ask(stream, max_output_tokens=4000)
    assert server.times == [0, 60, 120]


async def test_without_a_cap_the_usual_answer_is_expected() -> None:
    clock = FakeClock()
    server = Server(clock, usages=[Usage(10, 20)] * 40)
    stream = limited(server, limit_of(clock, tokens_per_minute=1500))
    await ask(stream)  # a guess: 1000
    server.gate.clear()
    tasks = [asyncio.create_task(ask(stream)) for _ in range(30)]
    await settle()
    assert 10 < len(server.calls) <= 1 + 1500 // 20
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_usage_in_the_transcript_stands_for_all_before_it() -> None:
    before = [UserMessage("x" * 40_000, 1)] * 3
    answer = AssistantMessage((), StopReason.END_TURN, usage=Usage(30, 5, 4, 1))
    limit = RateLimit(tokens_per_minute=10**6)
    asked = StreamRequest(
        system_prompt="s" * 4000, messages=(*before, answer, UserMessage("y" * 400, 1)),
        max_output_tokens=7,
    )  # fmt: skip
    assert 40 + 7 + 100 <= limit._estimate(asked) < 40 + 7 + 130
    first = StreamRequest(system_prompt="s" * 4000, messages=before, max_output_tokens=7)
    assert 31_000 < limit._estimate(first) < 31_200


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 80)), min_size=1, max_size=10),
    st.integers(150, 600),
)
def test_no_minute_has_more_tokens_than_allowed(requests: list[tuple[int, int]], most: int) -> None:
    clock = FakeClock()

    async def scenario() -> tuple[list[float], int]:
        server = Server(clock, usages=[Usage(tokens) for tokens, _ in requests])
        limit = limit_of(clock, tokens_per_minute=most)
        stream = limited(server, limit)
        for _, pause in requests:
            await clock.sleep(pause)
            await ask(stream, max_output_tokens=100)
        return server.times, min(most, limit._estimate(request("", max_output_tokens=100)))

    times, estimate = asyncio.run(scenario())
    for n, at in enumerate(times):
        used = sum(requests[m][0] for m in range(n) if at - times[m] < 60)
        assert used == 0 or used + estimate <= most
        arrived = times[n - 1] + requests[n][1] if n else at
        if at > arrived:  # it had to wait: a moment before, there was no room
            used = sum(requests[m][0] for m in range(n) if at - times[m] <= 60)
            assert used + estimate > most


# --- cancelled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["token", "task", "close"])
@pytest.mark.parametrize(
    "limits", [{"concurrency": 1}, {"requests_per_minute": 1}, {"tokens_per_minute": 900}]
)
async def test_cancelled_while_waiting_leaves_nothing_behind(
    by: str, limits: dict[str, int]
) -> None:
    clock = FakeClock()

    class Never(FakeClock):
        async def sleep(self, seconds: float) -> None:
            await asyncio.Event().wait()

    slow = Never()
    server = Server(clock)
    server.gate.clear()
    limit = RateLimit(**limits, clock=slow)
    stream = limited(server, limit)
    first = asyncio.create_task(ask(stream, "first", max_output_tokens=500))
    await settle()
    tasks_before = asyncio.all_tasks()
    signal = CancellationToken()
    answer = stream(request("second", max_output_tokens=500), signal)
    assert isinstance(await anext(answer), Waiting)
    third = asyncio.create_task(ask(stream, "third", max_output_tokens=500))
    if by == "close":
        await answer.aclose()  # type: ignore[attr-defined]
    else:
        waiting = asyncio.ensure_future(anext(answer))
        await settle()
        if by == "token":
            signal.cancel("enough")
            event = await waiting
            assert isinstance(event, Error)
            assert (event.kind, event.message) == (StreamErrorKind.ABORTED, "enough")
            await answer.aclose()  # type: ignore[attr-defined]
        else:
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
    slow.time_ms += 60_000
    server.gate.set()
    events = await first
    assert isinstance(events[-1], Done)
    events = await third
    assert isinstance(events[-1], Done)
    assert [who for who, _ in server.calls] == ["first", "third"]
    assert asyncio.all_tasks() <= tasks_before
    slow.time_ms += 60_000
    assert [type(event) for event in await ask(stream)] == [Start, Done], "all is free again"


async def test_cancelled_just_when_its_turn_has_come() -> None:
    clock = FakeClock()
    server = Server(clock)
    server.gate.clear()
    limit = limit_of(clock, concurrency=1, requests_per_minute=3)
    stream = limited(server, limit)
    first = asyncio.create_task(ask(stream, "first"))
    await settle()
    signal = CancellationToken()
    second = asyncio.create_task(ask(stream, "second", signal))
    third = asyncio.create_task(ask(stream, "third"))
    await settle()
    server.gate.set()
    await first  # in this step the second is admitted
    signal.cancel()
    assert isinstance((await second)[-1], Error)
    assert isinstance((await third)[-1], Done)
    assert server.calls == [("first", 0), ("third", 0)]
    await ask(stream, "fourth")
    assert server.calls[-1] == ("fourth", 0), "the second is not one of three"


async def test_cancelled_before_the_call() -> None:
    signal = CancellationToken()
    signal.cancel("no time")
    server = Server(FakeClock())
    (event,) = await ask(limited(server, RateLimit(requests_per_minute=1)), signal=signal)
    assert isinstance(event, Error)
    assert (event.kind, event.message, server.calls) == (StreamErrorKind.ABORTED, "no time", [])


async def test_a_clock_that_is_set_back_delays_by_a_minute_at_most() -> None:
    clock = FakeClock()
    server = Server(clock)
    stream = limited(server, limit_of(clock, requests_per_minute=1))
    await ask(stream)
    clock.time_ms -= 3_600_000
    await ask(stream)
    assert clock.sleeps == [60]


# --- shared -------------------------------------------------------------------------------------


async def test_a_hundred_runs_share_one_limit() -> None:
    clock = FakeClock()
    server = Server(clock)
    limit = limit_of(clock, requests_per_minute=40, concurrency=7)
    configs = [LoopConfig(stream=limited(server, limit)) for _ in range(4)]
    results = await asyncio.gather(
        *[run(str(n), AgentContext(), configs[n % 4]) for n in range(100)]
    )
    assert all(result.outcome == "done" for result in results)
    assert server.times == [0] * 40 + [60] * 40 + [120] * 20
    assert sorted(int(who) for who, _ in server.calls) == list(range(100))
    assert server.most <= 7


def test_threads_share_one_limit() -> None:
    """Each with an event loop of its own."""
    limit = RateLimit(concurrency=2)
    lock, running, most = threading.Lock(), 0, 0
    together = threading.Barrier(2)

    async def model(
        request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(30)  # two at a time, from two threads
        with lock:
            running -= 1
        yield Done(say("ok"))

    config = LoopConfig(stream=limited(model, limit))
    results: list[RunResult] = []
    threads = [
        threading.Thread(target=lambda: results.append(run_sync("go", AgentContext(), config)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [result.text for result in results] == ["ok"] * 8
    assert most == 2


def test_who_waits_in_a_loop_that_was_closed_holds_up_nobody() -> None:
    limit = RateLimit(concurrency=1)
    server = Server(FakeClock())
    stream = limited(server, limit)

    async def begin(asked: Any) -> None:
        await anext(asked)

    busy: Any = stream(request("busy"), CancellationToken())
    lost: Any = stream(request("lost"), CancellationToken())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin(busy))
    loop.run_until_complete(begin(lost))
    loop.run_until_complete(busy.aclose())
    loop.close()
    assert isinstance(asyncio.run(ask(stream))[-1], Done)


# --- what is seen of it -------------------------------------------------------------------------


async def test_a_delay_is_an_event_between_request_and_answer() -> None:
    clock = FakeClock()
    limit = limit_of(clock, requests_per_minute=1)
    stream = limited(ScriptedStream([call("work"), "ok"]), limit)
    _, sink = await completed(stream, Work())
    places = [n for n, kind in enumerate(sink.types) if kind == "request_delayed"]
    assert [sink.events[n] for n in places] == [ev.RequestDelayed(60.0, "requests_per_minute")]
    assert sink.types[places[0] - 1] == "provider_request_prepared"
    assert sink.types[places[0] + 1] == "message_start"
    assert ev.public_event(sink.events[places[0]]) is sink.events[places[0]]


@pytest.mark.parametrize(
    ("events", "seen"),
    [
        ([Waiting(1, "a"), Waiting(None, "b"), Start(PLACEHOLDER)], [(1, "a"), (None, "b")]),
        ([Start(PLACEHOLDER), Waiting(1, "late")], []),
        ([Waiting(1, "without a start")], [(1, "without a start")]),
    ],
)
async def test_the_engine_reports_what_comes_before_the_start(
    events: list[StreamEvent], seen: list[tuple[Any, Any]]
) -> None:
    result, sink = await completed([[*events, Done(say("ok"))]])
    assert [(e.seconds, e.reason) for e in sink.of(ev.RequestDelayed)] == seen
    assert result.text == "ok"


@pytest.mark.parametrize(
    "wrong",
    [Waiting("1", "x"), Waiting(1, None), Waiting(float("nan"), "x"), Waiting(True, "x")],  # type: ignore[arg-type]
)
async def test_the_engine_rejects_what_no_listener_could_read(wrong: Waiting) -> None:
    error, _ = await failed(StreamError, [[wrong, Done(say("ok"))]])
    assert "Waiting must have seconds or None, and a reason" in str(error)


class Forever(FakeClock):
    """On which a request waits for good."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeping = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.sleeping.set()
        await asyncio.Event().wait()


async def test_a_run_that_waits_can_be_cancelled() -> None:
    clock, signal = Forever(), CancellationToken()
    limit = RateLimit(requests_per_minute=1, clock=clock)
    stream = limited(ScriptedStream([call("work"), "unheard"]), limit)
    task = asyncio.create_task(observed_run(stream, Work(), signal=signal))
    await clock.sleeping.wait()
    signal.cancel("enough")
    outcome, sink = await task
    assert isinstance(outcome, RunAborted)
    assert sink.types.count("request_delayed") == 1


async def test_a_run_that_waits_can_be_steered() -> None:
    """The request that waited is given up; the next one has the message."""
    clock, steering = Forever(), ChannelSteering()
    limit = RateLimit(requests_per_minute=2, clock=clock)
    model = ScriptedStream([call("work"), "I was steered."])
    blocker = limited(ScriptedStream(["x"]), limit)
    await ask(blocker)
    task = asyncio.create_task(
        observed_run(limited(model, limit), Work(), plugins=[steering], clock=FakeClock())
    )
    await clock.sleeping.wait()
    clock.time_ms += 60_000
    _ = steering.handle.steer(UserMessage("Quick!"), when="now")
    outcome, sink = await task
    assert isinstance(outcome, RunResult)
    assert outcome.text == "I was steered."
    assert "Quick!" in [message.plain_text for message in model.requests[-1].messages]
    assert sink.types.count("request_delayed") == 1


async def test_the_log_of_a_delayed_run_is_that_of_any_run() -> None:
    script: list[Step] = [call("work"), "ok"]
    limit = limit_of(FakeClock(), requests_per_minute=1)
    store = MemoryStore()
    for name, stream in (
        ("delayed", limited(ScriptedStream(script), limit)),
        ("at once", ScriptedStream(script)),
    ):
        config = LoopConfig(stream=stream, tools=[Work()], run_log=RunLog(store), clock=FakeClock())
        sink = RecordingSink()
        context = AgentContext(identity=RunIdentity.root(name))
        await run("go", context, config.replace(event_sink=sink))
        assert sink.types.count("request_delayed") == (name == "delayed")
        report = await replay(store, name, config)
        assert report.is_identical, str(report)
    assert diff(store, "delayed", "at once") is None


async def test_a_recording_does_not_wait(tmp_path: Path) -> None:
    clock = FakeClock()
    limit = limit_of(clock, requests_per_minute=1)
    recorded = RecordingStream(limited(ScriptedStream(["", ""]), limit), tmp_path / "a.jsonl")
    assert [type(event) for event in await ask(recorded)] == [Start, Done]
    assert [type(event) for event in await ask(recorded)] == [Waiting, Start, Done]
    played = PlaybackStream(recorded.path)
    for _ in range(2):
        assert [type(event) for event in await ask(played)] == [Start, Done]


@pytest.mark.parametrize("event", [Waiting(1.5, "a"), Waiting(None, "b")])
def test_a_wait_has_a_json_form(event: Waiting) -> None:
    assert decode_event(encode_event(event)) == event
    clean = Redactor(["hunter2hunter2"]).event(Waiting(1, "for hunter2hunter2"))
    assert "hunter2" not in repr(clean)


# --- the wrapper --------------------------------------------------------------------------------


class Model(ScriptedStream):
    model = "gpt-5"
    provider = "OpenAI"
    best_output_mode = "native"
    closed = False

    async def aclose(self) -> None:
        self.closed = True


async def test_a_limited_transport_has_the_attributes_of_its_own() -> None:
    inner = Model(["ok"])
    stream = limited(inner, RateLimit(concurrency=1))
    assert (stream.model, stream.provider, stream.best_output_mode) == (
        "gpt-5", "OpenAI", "native",
    )  # fmt: skip
    assert LoopConfig(stream=stream).model_ref.model == "gpt-5"
    await stream.aclose()
    assert inner.closed
    assert getattr(limited(ScriptedStream([]), stream.limit), "aclose", None) is None
    assert repr(stream).endswith(", RateLimit(concurrency=1))")
    assert copy.copy(stream).stream is inner


async def test_a_limited_transport_keeps_to_the_rules_of_transports() -> None:
    script = ScriptedStream(["One two."], at_end="repeat")
    limit = RateLimit(concurrency=1, requests_per_minute=99)
    report = await check_stream_fn(limited(script, limit))
    assert report.message.plain_text == "One two."
    clock = FakeClock()
    await check_stream_fn(limited(script, limit_of(clock, requests_per_minute=1)))
    assert clock.sleeps


async def test_another_transport_may_answer_after_a_wait() -> None:
    clock = FakeClock()
    down = Error(PLACEHOLDER, StreamErrorKind.TRANSIENT, "down")
    limit = limit_of(clock, requests_per_minute=1)
    first, second = ScriptedStream([[down]]), ScriptedStream(["ok"])
    stream = FirstOf([limited(first, limit), limited(second, limit)])
    result, sink = await completed(stream)
    assert result.text == "ok"
    assert sink.of(ev.RequestDelayed) == [ev.RequestDelayed(60.0, "requests_per_minute")]


async def test_an_estimate_stays_if_there_is_no_usage() -> None:
    clock = FakeClock()
    server = Server(clock)
    stream = limited(server, limit_of(clock, tokens_per_minute=1000))
    for _ in range(2):
        await ask(stream, max_output_tokens=800)
    assert server.times == [0, 60]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "RateLimit needs"),
        ({"requests_per_minute": 0}, "requests_per_minute must be a whole number"),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute must be a whole number"),
        ({"concurrency": True}, "concurrency must be a whole number"),
        ({"concurrency": "3"}, "concurrency must be a whole number"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RateLimit(**settings)


def test_only_a_transport_and_a_limit_will_do() -> None:
    given: Any = "openai:gpt-5"
    with pytest.raises(ConfigError, match="needs a transport"):
        limited(given, RateLimit(concurrency=1))
    with pytest.raises(ConfigError, match="needs a RateLimit"):
        limited(ScriptedStream([]), given)
