"""The course of a call: retries, giving up, stopping, connections, and keeping secrets."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import traceback
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from weakref import ref

import openai
import pytest
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    CancellationToken,
    ConfigError,
    LoopConfig,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamEvent,
    StreamRequest,
    UserMessage,
    run,
    run_sync,
)
from clark_agent.errors import StreamTimeout
from clark_agent.stream import Chunk, Done, Error, Start, TextChunk, Waiting
from clark_agent.testing import FakeClock, RecordingSink
from clark_agent.testing.transport_kit import check_events_of, check_stream_fn
from clark_agent.transports import (
    OpenAIChat,
    PlaybackStream,
    RecordingStream,
    RetryPolicy,
    Timeouts,
)
from clark_agent.transports.dialects import OPENAI, OPENROUTER
from clark_agent.transports.http import reader
from tests.transports.servers.bytes_server import Answer, ByteServer, Request, Script
from tests.transports.wires_chat import (
    DONE,
    ONCE,
    ask,
    asking,
    chunk,
    event,
    piece,
    said,
    serving,
    stream,
    transport,
)

pytestmark = pytest.mark.slow

DOWN = Answer(status=503, body=b'{"error": {"message": "down for a moment"}}')


def error_of(events: list[StreamEvent]) -> Error:
    assert not check_events_of(events)
    last = events[-1]
    assert isinstance(last, Error), last
    return last


def text_of(events: list[StreamEvent]) -> str:
    assert not check_events_of(events)
    last = events[-1]
    assert isinstance(last, Done), last
    return last.message.plain_text


# --- retries -----------------------------------------------------------------------------


class TestRetries:
    async def test_are_so_many_and_no_more(self) -> None:
        async with serving(lambda _: DOWN, retry=RetryPolicy(attempts=3)) as (server, chat):
            *waits, last = await ask(chat)
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.TRANSIENT
        assert last.message == "the server answered 503: down for a moment (3 attempts)"
        assert len(server.requests) == 3
        assert [type(event) for event in waits] == [Waiting, Waiting]

    async def test_wait_longer_each_time_and_not_all_alike(self) -> None:
        retry = RetryPolicy(attempts=6, first_delay=1, max_delay=4)
        waited = []
        for _ in range(5):
            clock = FakeClock()
            async with serving(lambda _: DOWN, retry=retry, clock=clock) as (_, chat):
                await ask(chat)
            waited.append(clock.sleeps)
        for sleeps in waited:
            for slept, longest in zip(sleeps, [1, 2, 4, 4, 4], strict=True):
                assert longest / 2 <= slept <= longest
        assert len(set(map(tuple, waited))) > 1

    async def test_end_with_an_answer(self, caplog: pytest.LogCaptureFixture) -> None:
        busy = Answer(status=429, body=b'{"error": {"message": "slow down"}}')
        async with serving([DOWN, busy, stream(*said())]) as (server, chat):
            events = await ask(chat)
        assert text_of(events) == "Hello"
        assert [type(event) for event in events] == [Waiting, Waiting, Start, Chunk, Done]
        reasons = [event.reason for event in events if isinstance(event, Waiting)]
        assert reasons == ["transient", "provider_rate_limited"]
        assert server.requests[0].body == server.requests[1].body == server.requests[2].body
        told = [record for record in caplog.records if record.name.startswith("clark_agent")]
        assert [record.levelno for record in told] == [logging.WARNING, logging.WARNING]
        first, second = [record.getMessage() for record in told]
        assert first.startswith("compatible server: the server answered 503: down for a moment;")
        assert first.endswith("attempt 2 of 4")
        assert "429: slow down; retrying in" in second

    @pytest.mark.parametrize(
        "first",
        [
            Answer(status=None),
            Answer(status=None, reset=True),
            stream(cut_after=0),
            stream(chunk(role="assistant", content=""), reset=True),
            stream(b": keep-alive\n\n", event({"error": {"message": "busy", "code": 503}})),
            stream(b"data: {\n\n"),
        ],
        ids=["closed", "reset", "cut off", "nothing said", "told in the stream", "unreadable"],
    )
    async def test_of_a_stream_that_showed_nothing(self, first: Answer) -> None:
        async with serving([first, stream(*said())]) as (server, chat):
            assert text_of(await ask(chat)) == "Hello"
        assert len(server.requests) == 2

    async def test_of_a_server_that_is_not_there(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            port = taken.getsockname()[1]
        clock = FakeClock()
        last = error_of(await ask(transport(f"http://127.0.0.1:{port}", clock=clock)))
        assert last.kind is StreamErrorKind.TRANSIENT
        assert f"http://127.0.0.1:{port}/v1 failed: ConnectError" in last.message
        assert len(clock.sleeps) == 3

    @pytest.mark.parametrize(
        "shown",
        [
            chunk(content="Hel"),
            chunk(reasoning="Hm"),
            chunk(tool_calls=[piece(0, "a", "look", "{")]),
        ],
        ids=["text", "reasoning", "call"],
    )
    @pytest.mark.parametrize(
        "broken",
        [stream(reset=True), stream(event({"error": {"message": "busy", "code": 503}}))],
        ids=["reset", "told"],
    )
    async def test_never_follow_what_was_shown(self, shown: bytes, broken: Answer) -> None:
        script = [replace(broken, body=[shown, 0.01, *broken.body])]
        async with serving(script) as (server, chat):
            last = error_of(await ask(chat))
        assert last.kind is StreamErrorKind.TRANSIENT
        assert last.partial.content
        assert len(server.requests) == 1

    @pytest.mark.parametrize(
        ("answer", "kind"),
        [
            (Answer(status=400, body=b'{"error": {"message": "no"}}'), StreamErrorKind.FATAL),
            (Answer(status=401), StreamErrorKind.FATAL),
            (Answer(status=403), StreamErrorKind.FATAL),
            (Answer(status=404), StreamErrorKind.FATAL),
            (Answer(status=422), StreamErrorKind.FATAL),
            (Answer(status=402), StreamErrorKind.FATAL),
            (Answer(status=413), StreamErrorKind.CONTEXT_OVERFLOW),
            (stream(), StreamErrorKind.EMPTY),
            (stream(DONE), StreamErrorKind.ZERO_OUTPUT_TRANSPORT),
        ],
        ids=lambda value: getattr(value, "status", value),
    )
    async def test_do_not_follow_what_will_not_change(
        self, answer: Answer, kind: StreamErrorKind
    ) -> None:
        async with serving([answer]) as (_, chat):
            assert error_of(await ask(chat)).kind is kind
            assert chat.clock.sleeps == []  # type: ignore[attr-defined]


class TestRetryAfter:
    async def waited(self, headers: dict[str, str], **settings: Any) -> tuple[list[float], int]:
        """How long was waited, and how often was asked, until it worked or was given up."""
        clock = FakeClock()
        busy = Answer(status=429, headers=headers)
        async with serving([busy, stream(*said())], clock=clock, **settings) as (server, chat):
            events = await ask(chat)
        assert not check_events_of(events)
        return clock.sleeps, len(server.requests)

    @pytest.mark.parametrize(
        ("headers", "seconds"),
        [
            ({"retry-after": "7"}, 7.0),
            ({"Retry-After": "0.25"}, 0.25),
            ({"retry-after": "0"}, 0.0),
            ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
            ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ],
    )
    async def test_is_heeded(self, headers: dict[str, str], seconds: float) -> None:
        assert await self.waited(headers) == ([seconds], 2)

    async def test_may_be_a_date(self) -> None:
        date = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
        [seconds], asked = await self.waited({"retry-after": date})
        assert 0 < seconds <= 60
        assert asked == 2

    @pytest.mark.parametrize(
        "value",
        [
            "soon",
            "-1",
            "nan",
            "inf",
            "Mon, 01 Jan 99999 00:00:00 GMT",
            "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        ],
    )
    async def test_that_makes_no_sense_is_not(self, value: str) -> None:
        [seconds], asked = await self.waited({"retry-after": value})
        assert 0.25 <= seconds <= 0.5
        assert asked == 2

    async def test_longer_than_we_would_wait_is_told_at_once(self) -> None:
        retry = RetryPolicy(max_elapsed=30)
        assert await self.waited({"retry-after": "31"}, retry=retry) == ([], 1)
        assert await self.waited({"retry-after": "30"}, retry=retry) == ([30], 2)

    async def test_adds_up(self) -> None:
        clock = FakeClock()
        busy = Answer(status=429, headers={"retry-after": "50"})
        retry = RetryPolicy(attempts=9, max_elapsed=120)
        async with serving(lambda _: busy, clock=clock, retry=retry) as (_, chat):
            error_of(await ask(chat))
        assert clock.sleeps == [50, 50]

    async def test_longer_than_the_whole_answer_may_take_is_told_at_once(self) -> None:
        timeouts = Timeouts(total=10)
        assert await self.waited({"retry-after": "60"}, timeouts=timeouts) == ([], 1)


# --- taking too long --------------------------------------------------------------------------


IDLE = 0.4


@asynccontextmanager
async def warm(
    *answers: Answer, **settings: Any
) -> AsyncGenerator[tuple[ByteServer, OpenAIChat], None]:
    """A server and a transport that has talked to it before: it takes no time to get ready."""
    async with serving([stream(*said()), *answers], **settings) as (server, chat):
        await ask(chat)
        yield server, chat


class TestTimeouts:
    @pytest.mark.parametrize(
        "answer",
        [Answer(status=None, hold=True), stream(hold=True), stream(b": hello\n\n", hold=True)],
        ids=["no status", "no event", "a comment"],
    )
    async def test_silence_before_anything_is_asked_about_again(self, answer: Answer) -> None:
        after = stream(*said("Here I am"))
        async with warm(answer, after, timeouts=Timeouts(idle=IDLE)) as (server, chat):
            assert text_of(await ask(chat)) == "Here I am"
            await server.client_gone()

    async def test_silence_in_the_middle(self) -> None:
        answer = stream(chunk(content="Hel"), hold=True)
        async with warm(answer, timeouts=Timeouts(idle=IDLE)) as (server, chat):
            last = error_of(await ask(chat))
            await server.client_gone()
        assert last.kind is StreamErrorKind.TRANSIENT
        assert last.message == "the server did not send anything within 0.4 seconds"
        assert isinstance(last.cause, StreamTimeout)
        assert (last.cause.phase, last.cause.seconds) == ("idle", IDLE)
        assert last.partial.plain_text == "Hel"

    async def test_a_sign_of_life_is_enough_but_not_for_ever(self) -> None:
        ticks: list[bytes | float] = [b": tick\n\n", 0.04]
        timeouts = Timeouts(idle=IDLE, total=1.0)
        async with warm(stream(*ticks * 500), timeouts=timeouts) as (server, chat):
            last = error_of(await ask(chat))
            await server.client_gone()
        assert isinstance(last.cause, StreamTimeout)
        assert (last.cause.phase, last.cause.seconds) == ("total", 1.0)
        assert len(server.requests) == 2, "there is no time left to ask again"

    async def test_no_connection(self) -> None:
        with unanswering_port() as port:
            url = f"http://127.0.0.1:{port}"
            chat = transport(url, retry=ONCE, timeouts=Timeouts(connect=0.1))
            last = error_of(await ask(chat))
            await chat.aclose()
        assert last.kind is StreamErrorKind.TRANSIENT
        assert isinstance(last.cause, StreamTimeout)
        assert last.cause.phase == "connect"

    async def test_is_the_cause_of_what_a_run_ends_with(self) -> None:
        answer = stream(chunk(content="Hel"), hold=True)
        async with warm(answer, timeouts=Timeouts(idle=IDLE)) as (_, chat):
            config = LoopConfig(stream=chat, clock=FakeClock())
            with pytest.raises(StreamError) as failed:
                await run("Hi", AgentContext(), config)
        assert isinstance(failed.value.__cause__, StreamTimeout)
        assert isinstance(failed.value.__cause__, TimeoutError)

    async def test_an_answer_that_was_whole_is_not_lost(self) -> None:
        """A server may forget the last event, and to close the connection."""
        answer = stream(*said("Here I am")[:-1], hold=True)
        async with warm(answer, timeouts=Timeouts(idle=IDLE)) as (_, chat):
            assert text_of(await ask(chat)) == "Here I am"


@contextmanager
def unanswering_port() -> Iterator[int]:
    """A port whose queue of connections is full: whoever comes now is not answered."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        try:
            for client in waiting:
                client.setblocking(False)
                client.connect_ex(server.getsockname())
            yield server.getsockname()[1]
        finally:
            for client in waiting:
                client.close()


# --- stopping ---------------------------------------------------------------------------------


class EndlessClock(FakeClock):
    """Its pauses do not end by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.asleep.set()
        await asyncio.Event().wait()


def was_aborted(events: list[StreamEvent], reason: str) -> bool:
    last = error_of(events)
    assert last.partial.stop_reason in (StopReason.ABORTED, StopReason.OTHER)
    return (last.kind, last.message) == (StreamErrorKind.ABORTED, reason)


@asynccontextmanager
async def nothing_left() -> AsyncGenerator[None, None]:
    """What is started inside has ended at the end."""
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


class CountingServer(ByteServer):
    """Knows how many connections there were in all."""

    accepted = 0

    def _accept(self) -> asyncio.Protocol:
        self.accepted += 1
        return super()._accept()


WORD: list[bytes | float] = [chunk(content="Hel"), 0.005]
ENDLESS = stream(*WORD * 1000)


class TestCancellation:
    async def test_before_the_call(self) -> None:
        signal = CancellationToken()
        signal.cancel("no longer needed")
        async with nothing_left(), CountingServer([]) as server:
            chat = transport(server.url)
            events = await ask(chat, signal=signal)
            await chat.aclose()
            await server.all_closed()
        assert was_aborted(events, "no longer needed")
        assert [type(event) for event in events] == [Error]
        assert server.accepted == 0

    @pytest.mark.parametrize(
        "answer", [Answer(status=None, hold=True), stream(hold=True)], ids=["no status", "no event"]
    )
    async def test_before_the_server_says_anything(self, answer: Answer) -> None:
        signal = CancellationToken()

        def cancel(_: Request) -> Answer:
            asyncio.get_running_loop().call_later(0.02, signal.cancel, "enough")
            return answer

        async with nothing_left(), serving(cancel) as (server, chat):
            events = await ask(chat, signal=signal)
            await server.client_gone()
            await server.all_closed()
        assert was_aborted(events, "enough")
        assert len(server.requests) == 1

    async def test_while_connecting(self) -> None:
        signal = CancellationToken()
        with unanswering_port() as port:
            chat = transport(f"http://127.0.0.1:{port}")
            asyncio.get_running_loop().call_later(0.02, signal.cancel, "enough")
            async with nothing_left():
                assert was_aborted(await ask(chat, signal=signal), "enough")
            await chat.aclose()

    @pytest.mark.parametrize("from_thread", [False, True], ids=["same thread", "another thread"])
    async def test_in_the_middle(self, from_thread: bool) -> None:
        signal = CancellationToken()
        events: list[StreamEvent] = []
        async with nothing_left(), serving([ENDLESS]) as (server, chat):
            async for told in chat(asking(), signal):
                events.append(told)
                if len(events) == 3 and from_thread:
                    thread = threading.Thread(target=signal.cancel, args=("enough",))
                    thread.start()
                    thread.join()
                elif len(events) == 3:
                    signal.cancel("enough")
            await server.client_gone()
            await server.all_closed()
        assert was_aborted(events, "enough")
        assert error_of(events).partial.plain_text.startswith("HelHel")
        assert error_of(events).partial.stop_reason is StopReason.ABORTED
        assert error_of(events).partial.error_message == "enough"

    async def test_while_waiting_to_ask_again(self) -> None:
        signal, clock = CancellationToken(), EndlessClock()
        async with nothing_left(), serving([DOWN], clock=clock) as (server, chat):
            call = asyncio.create_task(ask(chat, signal=signal))
            await clock.asleep.wait()
            signal.cancel("enough")
            events = await call
            await chat.aclose()
            await server.all_closed()
        assert was_aborted(events, "enough")
        assert len(server.requests) == 1

    async def test_while_nobody_reads(self) -> None:
        signal = CancellationToken()
        async with nothing_left(), serving([ENDLESS]) as (server, chat):
            answer = chat(asking(), signal)
            events = [await anext(answer)]
            signal.cancel("enough")
            await server.client_gone()
            events += [told async for told in answer]
        assert was_aborted(events, "enough")

    async def test_without_a_reason(self) -> None:
        signal = CancellationToken()
        signal.cancel()
        async with serving([]) as (_, chat):
            assert was_aborted(await ask(chat, signal=signal), "the call was cancelled")

    async def test_afterwards_does_nothing(self) -> None:
        signal = CancellationToken()
        async with serving([stream(*said()), stream(*said("Again"))]) as (_, chat):
            events = await ask(chat, signal=signal)
            assert not signal.has_subscribers
            signal.cancel()
            assert text_of(events) == "Hello"
            assert text_of(await ask(chat)) == "Again"

    async def test_closing_the_stream_in_the_middle(self) -> None:
        async with nothing_left(), serving([ENDLESS]) as (server, chat):
            answer: Any = chat(asking(), CancellationToken())
            assert isinstance(await anext(answer), Start)
            await anext(answer)
            await answer.aclose()
            await server.client_gone()
            await server.all_closed()

    @pytest.mark.parametrize(
        "answer", [ENDLESS, stream(hold=True)], ids=["in the middle", "before anything"]
    )
    async def test_of_the_task(self, answer: Answer) -> None:
        asked = asyncio.Event()

        def script(_: Request) -> Answer:
            asked.set()
            return answer

        async with nothing_left(), serving(script) as (server, chat):
            call = asyncio.create_task(ask(chat))
            await asked.wait()
            await asyncio.sleep(0.02)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.client_gone()
            await server.all_closed()

    async def test_of_the_task_while_it_waits_to_ask_again(self) -> None:
        clock = EndlessClock()
        async with nothing_left(), serving([DOWN], clock=clock) as (_, chat):
            call = asyncio.create_task(ask(chat))
            await clock.asleep.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await chat.aclose()

    async def test_of_one_call_does_not_disturb_another(self) -> None:
        signal = CancellationToken()

        def script(request: Request) -> Answer:
            return ENDLESS if b"endless" in request.body else stream(0.05, *said())

        async with serving(script) as (_, chat):
            endless = asyncio.create_task(ask(chat, asking(UserMessage("endless")), signal))
            other = asyncio.create_task(ask(chat))
            await asyncio.sleep(0.02)
            signal.cancel("enough")
            assert was_aborted(await endless, "enough")
            assert text_of(await other) == "Hello"


@pytest.mark.parametrize("answer", [stream(*said()), DOWN, stream(*said()[:1])])
async def test_it_conforms(answer: Answer) -> None:
    async with serving(lambda _: answer) as (_, chat):
        await check_stream_fn(chat)


async def test_a_dead_port_conforms() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    report = await check_stream_fn(transport(f"http://127.0.0.1:{port}"))
    assert report.error is not None


# --- connections ------------------------------------------------------------------------------


class TestConnections:
    @pytest.mark.parametrize("pause", [0.0, 0.005])
    async def test_are_used_again(self, pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also if the response ends a little later than its last event."""
        monkeypatch.setattr(reader, "_DRAIN_SECONDS", 30.0)  # it ends long before
        async with CountingServer(lambda _: stream(*said(), pause)) as server:
            chat = transport(server.url)
            for _ in range(3):
                assert text_of(await ask(chat)) == "Hello"
            assert server.accepted == 1
            await chat.aclose()

    async def test_are_used_again_after_a_failure(self) -> None:
        script = [DOWN, Answer(status=400), stream(*said())]
        async with CountingServer(script) as server:
            chat = transport(server.url)
            error_of(await ask(chat))
            assert text_of(await ask(chat)) == "Hello"
            assert server.accepted == 1
            await chat.aclose()

    async def test_that_stay_open_after_the_last_event_do_not_hold_the_answer_up(self) -> None:
        async with serving([stream(*said(), hold=True)]) as (server, chat):
            assert text_of(await ask(chat)) == "Hello"
            await server.client_gone()

    async def test_of_calls_at_once(self) -> None:
        def echo(request: Request) -> Answer:
            number = request.body.partition(b"number ")[2].partition(b'"')[0].decode()
            return stream(0.01, chunk(content=number), 0.01, chunk("stop"), DONE)

        async with serving(echo) as (_, chat):
            requests = [asking(UserMessage(f"number {number}")) for number in range(20)]
            answers = await asyncio.gather(*[ask(chat, request) for request in requests])
        assert [text_of(events) for events in answers] == [str(number) for number in range(20)]

    async def test_are_closed_and_opened_anew(self) -> None:
        async with serving(lambda _: stream(*said())) as (server, chat):
            await ask(chat)
            assert server.open_connections == 1
            await chat.aclose()
            await server.all_closed()
            await chat.aclose()
            assert text_of(await ask(chat)) == "Hello"

    def test_of_one_event_loop_are_not_used_in_another(self) -> None:
        with in_a_thread(lambda _: stream(*said())) as server:
            chat = transport(server.url)

            async def twice() -> None:
                assert text_of(await ask(chat)) == "Hello"
                assert text_of(await ask(chat)) == "Hello"

            for _ in range(3):
                asyncio.run(twice())
                server.wait_until_closed()
            assert server.accepted == 3

    def test_of_an_event_loop_that_ended_are_forgotten(self) -> None:
        with in_a_thread(lambda _: stream(*said())) as server:
            chat = transport(server.url)

            async def once() -> Any:
                await ask(chat)
                return ref(asyncio.get_running_loop())

            loops = [asyncio.run(once()) for _ in range(3)]
            gc.collect()
            assert [loop() for loop in loops] == [None] * 3

    def test_of_run_sync(self) -> None:
        with in_a_thread(lambda _: stream(*said())) as server:
            config = LoopConfig(stream=transport(server.url))
            context = AgentContext("Be brief.")
            for _ in range(2):
                result = run_sync("Hi", context, config)
                assert result.text == "Hello"
                context = context.extend(result)
                server.wait_until_closed()
        assert len(server.requests) == 2

    async def test_of_run_sync_in_a_running_loop(self) -> None:
        async with serving(lambda _: stream(*said())) as (_, chat):
            assert text_of(await ask(chat)) == "Hello"
            config = LoopConfig(stream=chat)
            for _ in range(2):
                result = await asyncio.to_thread(run_sync, "Hi", AgentContext(), config)
                assert result.text == "Hello"


class TestOwnClient:
    async def test_stays_open(self) -> None:
        async with ByteServer(lambda _: stream(*said())) as server:
            client = openai.AsyncOpenAI(base_url=server.url, api_key="mine")
            chat = OpenAIChat("m", client=client)
            assert text_of(await ask(chat)) == "Hello"
            await chat.aclose()
            assert not client.is_closed()
            assert text_of(await ask(chat)) == "Hello"
            await client.close()
        assert {request.headers["authorization"] for request in server.requests} == {"Bearer mine"}

    async def test_does_not_ask_again_behind_our_back(self) -> None:
        """It would do so in real time, and without a word."""
        async with ByteServer(lambda _: DOWN) as server:
            client = openai.AsyncOpenAI(base_url=server.url, api_key="mine", max_retries=1)
            error_of(await ask(OpenAIChat("m", client=client, retry=ONCE)))
            await client.close()
        assert len(server.requests) == 1

    def test_says_which_dialect_it_is(self) -> None:
        client = openai.AsyncOpenAI(base_url="https://openrouter.ai/api/v1", api_key="mine")
        assert OpenAIChat("m", client=client).dialect is OPENROUTER


class ThreadedServer:
    """A `ByteServer` that outlives the event loops of a test."""

    def __init__(self, server: CountingServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self.url = server.url

    @property
    def accepted(self) -> int:
        return self._server.accepted

    @property
    def requests(self) -> list[Request]:
        return self._server.requests

    def wait_until_closed(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.all_closed(), self._loop).result(10)


@contextmanager
def in_a_thread(script: Script) -> Iterator[ThreadedServer]:
    started: list[ThreadedServer] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with CountingServer(script) as server:
            started.append(ThreadedServer(server, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield started[0]
    finally:
        over.set()
        thread.join()


# --- secrets ----------------------------------------------------------------------------------

KEY = "sk-CANARY-0123456789abcdef"
PAGE = f"<html><body><p>The key {KEY} was refused</p></body></html>".encode()


def refused(text: str, status: int = 401) -> Answer:
    body = b'{"error": {"message": "%b", "type": "auth"}}' % text.encode()
    return Answer(status=status, body=body)


QUOTES = {
    "in an error": refused(f"Incorrect API key provided: {KEY}."),
    "in an error that may pass": refused(f"{KEY} is out of luck", 429),
    "in a page": Answer(status=403, body=PAGE),
    "in a plain text": Answer(status=500, body=f"no {KEY}".encode()),
    "in a stream": stream(event({"error": {"message": f"bad key {KEY}", "code": 401}})),
    "in a stream that began": stream(
        chunk(content="Hel"), event({"error": {"message": f"bad key {KEY}"}})
    ),
    "in one piece": Answer(body=b'{"error": "bad key %b"}' % KEY.encode()),
    "in what cannot be read": stream(f"data: oops {KEY}\n\n".encode()),
    "where a long text is cut": refused("x" * 985 + KEY),
    "where what cannot be read is cut": stream(b"data: " + b"x" * 185 + KEY.encode() + b"\n\n"),
    "nowhere": stream(*said()),
}


WAYS: dict[str, dict[str, Any]] = {
    "as a key": {"api_key": KEY},
    "as a header": {"headers": {"X-Api-Key": KEY}},
    "as a whole authorization": {"headers": {"Authorization": f"Bearer {KEY}"}},
    "in a client": {},
}


@asynccontextmanager
async def knowing(way: str, url: str) -> AsyncGenerator[OpenAIChat, None]:
    """A transport that was given the key in one of the ways to give it."""
    if way != "in a client":
        async with aclosing(transport(url, **WAYS[way])) as chat:
            yield chat
    else:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            yield OpenAIChat("m", client=client, clock=FakeClock())


class TestSecrets:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("quote", QUOTES)
    async def test_are_told_to_nobody(
        self,
        way: str,
        quote: str,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.DEBUG)
        async with ByteServer(lambda _: QUOTES[quote]) as server, knowing(way, server.url) as chat:
            text = await self.everything_said(chat, tmp_path)
        assert KEY in str([request.headers for request in server.requests]), "it was used"
        assert "CANARY" not in text
        assert "CANARY" not in logged(caplog)

    async def everything_said(self, chat: OpenAIChat, folder: Path) -> str:
        """All that a call and a run bring to light, without the logs."""
        path, sink = folder / "answers.jsonl", RecordingSink()
        recording = RecordingStream(chat, path)
        extras = {"extra_headers": {"X-Key": KEY}, "api_key": KEY}
        events = await ask(recording, asking(provider_extras=extras))
        texts = [repr(chat), repr(events)]
        config = LoopConfig(stream=recording, event_sink=sink, clock=FakeClock())
        try:
            await run("Hi", AgentContext(), config)
        except StreamError as error:
            texts += traceback.format_exception(error)
            texts += [repr(error), str(vars(error))]
        PlaybackStream(path)
        return "\n".join([*texts, repr(sink.events), path.read_text()])

    @pytest.mark.parametrize(
        "settings",
        [{"api_key": f"{KEY}\n"}, {"headers": {"X-Api-Key": f"{KEY}\n"}}],
        ids=["a key", "a header"],
    )
    async def test_with_a_line_end(
        self, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        """As when a key was read from a file."""
        caplog.set_level(logging.DEBUG)
        async with serving(lambda _: stream(*said()), **settings) as (_, chat):
            events = await ask(chat)
        assert isinstance(events[-1], Done)
        assert "CANARY" not in repr(events)
        assert "CANARY" not in logged(caplog)

    @pytest.mark.parametrize(
        "settings",
        [
            {"api_key": f"{KEY}\n{KEY}"},
            {"api_key": f"{KEY}é"},
            {"headers": {"X-Api-Key": f"{KEY}\n{KEY}"}},
        ],
        ids=["two keys", "a key that is no ASCII", "a header with two"],
    )
    def test_that_cannot_be_sent(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="characters that HTTP does not allow") as error:
            transport("http://127.0.0.1:1", **settings)
        assert "CANARY" not in str(error.value)

    async def test_in_the_address_of_a_server_that_is_not_there(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            port = taken.getsockname()[1]
        chat = transport(f"http://user:{KEY}@127.0.0.1:{port}", retry=ONCE)
        assert "CANARY" not in repr(await ask(chat))

    def test_in_the_address_of_a_server_that_needs_a_key(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GROQ_API_KEY", raising=False)
        with pytest.raises(ConfigError) as error:
            transport(f"https://user:{KEY}@api.groq.com")
        assert "CANARY" not in str(error.value)

    async def test_a_short_header_does_not_garble_what_is_told(self) -> None:
        headers = {"X-Beta": "1", "X-Title": "e"}
        async with serving([refused("the key is wrong")], headers=headers) as (_, chat):
            last = error_of(await ask(chat))
        told = "the server answered 401: the key is wrong"
        assert last.message == f"{told} (compatible server, model 'm': check the key)"

    def test_a_missing_key_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        with pytest.raises(ConfigError, match="set OPENROUTER_API_KEY, or pass api_key") as error:
            OpenAIChat("m", base_url="https://openrouter.ai/api/v1")
        assert "CANARY" not in str(error.value)


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """What was logged, and what could have been made of it."""
    assert caplog.records, "the libraries below do log"
    lines = [f"{record.getMessage()} {record.args!r}" for record in caplog.records]
    return "\n".join([*lines, caplog.text])


class TestEnvironment:
    async def sent(self, request: StreamRequest | None = None, **settings: Any) -> Request:
        async with serving([stream(*said())], **settings) as (server, chat):
            await ask(chat, request)
        return server.requests[0]

    @pytest.fixture(autouse=True)
    def openai_is_set_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID", "WEBHOOK_SECRET"):
            monkeypatch.setenv(f"OPENAI_{name}", KEY)
        monkeypatch.delenv("OPENAI_BASE_URL", raising=False)

    async def test_what_is_for_openai_goes_to_nobody_else(self) -> None:
        request = await self.sent()
        assert "CANARY" not in str(request.headers)
        assert "authorization" not in request.headers
        assert "openai-organization" not in request.headers

    async def test_nor_do_the_headers_that_it_has_for_openai(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"X-Gateway-Key: {KEY}")
        assert "CANARY" not in str((await self.sent()).headers)

    async def test_a_key_that_was_given_goes_instead(self) -> None:
        request = await self.sent(api_key="mine", headers={"X-Title": "Test"})
        assert request.headers["authorization"] == "Bearer mine"
        assert request.headers["x-title"] == "Test"
        assert "CANARY" not in str(request.headers)

    async def test_a_dialect_alone_does_not_send_it_elsewhere(self) -> None:
        request = await self.sent(dialect=OPENAI)
        assert "CANARY" not in str(request.headers)

    async def test_it_goes_with_the_address_beside_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with ByteServer([stream(*said())]) as server:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
            chat = OpenAIChat("m")
            assert text_of(await ask(chat)) == "Hello"
            await chat.aclose()
        [request] = server.requests
        assert request.headers["authorization"] == f"Bearer {KEY}"
        assert "openai-organization" not in request.headers

    def test_it_is_for_openai(self) -> None:
        chat = OpenAIChat("gpt-5")
        assert (chat.base_url, chat.dialect) == ("https://api.openai.com/v1", OPENAI)
        assert "CANARY" not in repr(chat)


async def test_text_is_shown_as_it_comes() -> None:
    """The first chunk is there before the server has written the second."""
    async with serving([stream(chunk(content="Hel"), hold=True)]) as (server, chat):
        answer: Any = chat(asking(), CancellationToken())
        assert isinstance(await anext(answer), Start)
        assert await anext(answer) == Chunk(TextChunk("Hel"))
        await answer.aclose()
        await server.client_gone()
