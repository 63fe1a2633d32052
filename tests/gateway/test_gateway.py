"""The gateway and its client, over real connections: a uvicorn server in a thread of its own."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import signal as signals
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from clark_agent import (
    AgentContext,
    AssistantMessage,
    CancellationToken,
    ConfigError,
    CustomMessage,
    ImageContent,
    LoopConfig,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
    StreamRequest,
    TextContent,
    ToolSchema,
    TransportError,
    UserMessage,
    run,
    tool,
)
from clark_agent.errors import AccessRefused, ReplayRefused, StreamTimeout
from clark_agent.gateway import SAFE_EXTRAS, gateway
from clark_agent.gateway.server import server_config
from clark_agent.rate_limit import RateLimit, limited
from clark_agent.reasoning import ReasoningFormat, ReplayContract, ReplayViolation
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    OutputSchema,
    ReasoningEffort,
    ResponseInfo,
    Start,
    TextChunk,
    Waiting,
)
from clark_agent.testing import FakeClock, ScriptedStream, call, say
from clark_agent.testing.transport_kit import check_stream_fn
from clark_agent.transports import (
    OpenAIChat,
    PlaybackStream,
    RecordingStream,
    RetryPolicy,
    Timeouts,
)
from clark_agent.transports.proxy import ProxyStream
from clark_agent.transports.stream_json import decode_event, encode_event
from clark_agent.types import Annotation
from tests import strategies
from tests.sizes import REQUESTS_MADE_UP
from tests.transports.servers.bytes_server import Answer, ByteServer
from tests.transports.servers.child import Child

pytestmark = [pytest.mark.slow, pytest.mark.soak]

T = TypeVar("T")

PATIENCE = 30.0  # seconds until a wait for something that does not come is an error
TOKEN = "canary-token-of-alice"
OTHER_TOKEN = "canary-token-of-bob"
TOKENS = {"alice": TOKEN, "bob": OTHER_TOKEN}
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
EMPTY = AssistantMessage((), StopReason.OTHER)
REQUEST = StreamRequest(system_prompt="Be brief.", messages=(UserMessage("Hello?"),))
BODY = {"system_prompt": "Be brief.", "messages": [{"role": "user", "content": "Hello?"}]}
NEVER = RetryPolicy(attempts=1)


# --- a server, and models for it --------------------------------------------------------------

made: list[ProxyStream] = []


def proxy_to(url: str, token: str | None = None, **options: Any) -> ProxyStream:
    """A proxy that is closed with the test."""
    made.append(ProxyStream(url, token, **options))
    return made[-1]


@pytest.fixture(autouse=True)
async def _closed() -> AsyncGenerator[None]:
    yield
    while made:
        await made.pop().aclose()


class Served:
    """A gateway behind a real server, with an event loop and a thread of its own."""

    def __init__(self, app: Any, **settings: Any) -> None:
        self.app = app
        self.loop: asyncio.AbstractEventLoop
        self.url = ""
        config = server_config(app, port=0, log_config=None, lifespan="on", **settings)
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve()

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server did not end"

    @property
    def streams(self) -> int:
        return self.app.state.gateway.streams  # type: ignore[no-any-return]

    def do(self, function: Callable[[], T]) -> T:
        """Call a function on the server's loop."""
        done: Future[T] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(function()))
        return done.result(PATIENCE)

    def proxy(self, token: str | None = TOKEN, **options: Any) -> ProxyStream:
        options.setdefault("retry", NEVER)
        return proxy_to(self.url, token, **options)


@asynccontextmanager
async def serving(
    stream: Any, *, server: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[Served]:
    options.setdefault("tokens", TOKENS)
    served = Served(gateway(stream, **options), **(server or {}))
    with_it = await asyncio.to_thread(served.__enter__)
    try:
        yield with_it
    finally:
        await asyncio.to_thread(served.__exit__)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


async def happens(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(until, condition)


class Stuck:
    """A model that says a word and then nothing more; it remembers what became of its calls."""

    def __init__(self, words: Sequence[str] = ("Well,",), *, heeds_signal: bool = False) -> None:
        self.words = words
        self.heeds_signal = heeds_signal
        self.calls = 0
        self.ended: list[str | None] = []  # why the signal of each call was cancelled
        self.release = threading.Event()

    @property
    def running(self) -> int:
        return self.calls - len(self.ended)

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.calls += 1
        try:
            yield Start(EMPTY)
            for word in self.words:
                yield Chunk(TextChunk(word))
            await self._released(signal)
            yield Done(AssistantMessage.from_text("".join(self.words)))
        finally:
            self.ended.append(signal.reason if signal.cancelled else "not cancelled")

    async def _released(self, signal: CancellationToken) -> None:
        """What is waited for is set by another thread."""
        while not self.release.is_set():
            if self.heeds_signal and signal.cancelled:
                return
            await asyncio.sleep(0.002)


async def ask(
    stream: StreamFn, request: StreamRequest = REQUEST, signal: CancellationToken | None = None
) -> list[StreamEvent]:
    async with asyncio.timeout(PATIENCE):
        return [event async for event in stream(request, signal or CancellationToken())]


async def failure(stream: StreamFn, request: StreamRequest = REQUEST) -> Error:
    *_, last = await ask(stream, request)
    assert isinstance(last, Error), last
    return last


def post(url: str, body: Any = BODY, **options: Any) -> httpx2.Response:
    """A call by somebody who does not use our client."""
    options.setdefault("headers", AUTHORIZED)
    if "content" not in options:
        options["json"] = body
    with httpx2.Client(timeout=PATIENCE) as client:
        return client.post(f"{url}/v1/stream", **options)


def get(url: str, path: str, **options: Any) -> httpx2.Response:
    with httpx2.Client(timeout=PATIENCE) as client:
        return client.get(f"{url}{path}", **options)


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error that a refusal tells, which has the one shape that errors have."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert error.keys() <= {"type", "message", "path"}
    assert "Traceback" not in response.text
    return error


async def read_to(reader: asyncio.StreamReader, end: bytes) -> bytes:
    return await asyncio.wait_for(reader.readuntil(end), PATIENCE)


async def open_socket(
    url: str, *, missing: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A call by somebody who reads what they like, if anything, and may send less than they say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    body = json.dumps(BODY)
    writer.write(
        f"POST /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body) + missing}\r\n\r\n"
        f"{body}".encode()
    )
    await writer.drain()
    return reader, writer


# --- what goes in comes out -------------------------------------------------------------------


class Echo:
    """A model that says what it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.events: Sequence[StreamEvent] = ()
        self.request: StreamRequest | None = None

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.request = request
        for event in self.events:
            yield event


@pytest.fixture(scope="module")
def echo() -> Iterator[tuple[Echo, ProxyStream]]:
    model = Echo()
    with Served(gateway(model, tokens=TOKENS, extras=None)) as served:
        yield model, served.proxy()


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """A gateway for tests that only want to be refused."""
    with Served(gateway(ScriptedStream(["hi"], at_end="repeat"), tokens=TOKENS)) as served:
        yield served


FORMATS = st.lists(st.sampled_from(ReasoningFormat), max_size=3).map(tuple)
SECONDS = st.none() | st.floats(0.001, 1e6)
CAUSES = st.one_of(
    st.none(),
    st.builds(StreamTimeout, st.sampled_from(["connect", "idle", "total"]), SECONDS),
    st.builds(
        ReplayRefused,
        st.integers(0, 1000),
        st.builds(ReplayViolation, st.sampled_from(ReplayContract), FORMATS),
    ),
    st.builds(TransportError, strategies.TEXT),
    # That of the provider is told in other words: `TestAccess`.
)
ANSWERS = strategies.assistant_messages()
NAMES = st.none() | strategies.TEXT
RESPONSES = st.none() | st.builds(ResponseInfo, NAMES, NAMES)
BEGINNINGS = st.lists(
    st.builds(Start, ANSWERS, strategies.open_json(), RESPONSES)
    | st.builds(Chunk, strategies.chunks()),
    max_size=6,
)
ENDINGS = st.builds(Done, ANSWERS) | st.builds(
    Error, ANSWERS, st.sampled_from(StreamErrorKind), strategies.TEXT, CAUSES
)
REQUESTS = st.builds(
    StreamRequest,
    system_prompt=strategies.TEXT,
    messages=strategies.transcripts().map(tuple),
    tools=st.lists(strategies.tool_schemas(), max_size=2).map(tuple),
    temperature=st.none() | strategies.FLOATS,
    max_output_tokens=st.none() | st.integers(1, 2**63),
    reasoning=st.sampled_from(ReasoningEffort),
    provider_extras=strategies.open_json(),
    force_tool_call=st.booleans(),
    output_schema=st.none()
    | st.builds(OutputSchema, strategies.TEXT, strategies.open_json(), strategies.TEXT),
)


def comparable(event: StreamEvent) -> Any:
    """Exceptions are equal only to themselves; what they are made of is not."""
    if not isinstance(event, Error) or event.cause is None:
        return event
    cause = event.cause
    told = (type(cause), str(cause), vars(cause))
    return (event.partial, event.kind, event.message, told)


class TestTheTrip:
    @settings(max_examples=60)
    @given(beginning=BEGINNINGS, ending=ENDINGS)
    async def test_every_event_arrives_as_it_was(
        self, echo: tuple[Echo, ProxyStream], beginning: list[StreamEvent], ending: StreamEvent
    ) -> None:
        model, proxy = echo
        model.events = [*beginning, ending]
        got = await ask(proxy)
        assert [comparable(event) for event in got] == [comparable(e) for e in model.events]

    @settings(max_examples=60)
    @given(request=REQUESTS)
    async def test_every_request_arrives_as_it_was(
        self, echo: tuple[Echo, ProxyStream], request: StreamRequest
    ) -> None:
        model, proxy = echo
        model.events = [Done(EMPTY)]
        assert await ask(proxy, request) == [Done(EMPTY)]
        assert model.request == request

    @pytest.mark.parametrize("text", ["Hi", "\ud83e"])
    def test_a_schema_travels_only_if_there_is_one(self, text: str) -> None:
        """So that a gateway that does not know the field gets what it expects."""
        plain = StreamRequest(system_prompt="", messages=(UserMessage(text),))
        schema = OutputSchema("finish", {"type": "object"})
        for request in (plain, replace(plain, output_schema=schema)):
            sent = msgspec.json.decode(proxy_to("http://127.0.0.1:9").encode(request))
            assert ("output_schema" in sent) is (request is not plain)

    async def test_images_custom_messages_and_missing_dates(
        self, echo: tuple[Echo, ProxyStream]
    ) -> None:
        model, proxy = echo
        model.events = [Done(EMPTY)]
        image = ImageContent("data:image/png;base64,iVBORw0=", "image/png", "a dot")
        request = StreamRequest(
            system_prompt="",
            messages=(
                UserMessage((TextContent("Look:"), image)),
                CustomMessage("note", {"a": [1, None]}),
                UserMessage("dated", 5),
            ),
            tools=(ToolSchema("look", "Looks.", {"type": "object"}),),
            provider_extras={"seed": 1},
            force_tool_call=True,
        )
        await ask(proxy, request)
        assert model.request == request
        assert model.request.messages[0].timestamp is None

    async def test_halves_of_a_character(self, echo: tuple[Echo, ProxyStream]) -> None:
        """A provider may cut a character in two, and each half is no text by itself."""
        model, proxy = echo
        halves = [Chunk(TextChunk("\ud83d")), Chunk(TextChunk("\ude00"))]
        model.events = [Start(EMPTY), *halves, Done(AssistantMessage.from_text("😀"))]
        assert await ask(proxy) == model.events
        request = StreamRequest(system_prompt="cut: \ud83d", messages=())
        await ask(proxy, request)
        assert model.request is not None
        assert model.request.system_prompt == "cut: \ufffd"

    def test_the_text_of_a_foreign_exception_stays_at_home(self) -> None:
        error = Error(EMPTY, StreamErrorKind.FATAL, "no", ValueError("key sk-123"))
        assert b"sk-123" not in encode_event(error)
        assert decode_event(encode_event(error)) == Error(EMPTY, StreamErrorKind.FATAL, "no")

    async def test_whole_numbers_may_have_a_point(self, echo: tuple[Echo, ProxyStream]) -> None:
        model, proxy = echo
        model.events = [Done(EMPTY)]
        message = {"role": "user", "content": "x", "timestamp": 5.0}
        said = {"role": "assistant", "content": [], "stop_reason": "end_turn", "timestamp": 6.0}
        said["annotations"] = [{"kind": "url", "start": 0.0, "end": 2.0}]
        body = {"system_prompt": "", "messages": [message, said], "max_output_tokens": 3.0}
        body["provider_extras"] = {"timestamp": 1.0}
        reply = await asyncio.to_thread(post, proxy.url, body)
        assert reply.status_code == 200
        assert model.request is not None
        cited = AssistantMessage(
            (),
            StopReason.END_TURN,
            timestamp=6,
            annotations=(Annotation("url", start=0, end=2),),
        )
        assert repr(model.request.messages) == repr((UserMessage("x", 5), cited))
        assert repr(model.request.max_output_tokens) == "3"
        assert repr(model.request.provider_extras) == "{'timestamp': 1.0}"

    async def test_it_conforms(self) -> None:
        words = ScriptedStream(["one two three four five"], at_end="repeat")
        async with serving(words) as served:
            report = await check_stream_fn(served.proxy())
            assert report.message == AssistantMessage.from_text("one two three four five")
            await happens(lambda: served.streams == 0)

    @pytest.mark.parametrize("heeds_signal", [True, False])
    async def test_it_conforms_when_the_model_hangs(self, heeds_signal: bool) -> None:
        """Cancelled and closed in the middle, for real."""
        model = Stuck(["so", "so"], heeds_signal=heeds_signal)

        async def first_fine(
            request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            if not model.calls:
                model.release.set()
            async with aclosing(model(request, signal)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield event
            model.release.clear()

        async with serving(first_fine) as served:
            await check_stream_fn(served.proxy())
            await happens(lambda: served.streams == 0 and model.running == 0)

    async def test_it_conforms_when_nobody_is_there(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            port = taken.getsockname()[1]
        report = await check_stream_fn(proxy_to(f"http://127.0.0.1:{port}", retry=NEVER))
        assert report.error is not None
        assert report.error.kind is StreamErrorKind.TRANSIENT

    async def test_an_agent_with_tools(self) -> None:
        @tool
        def weather(city: str) -> str:
            """Look up the weather of a city."""
            return f"22 °C in {city}"

        model = ScriptedStream([say("Let me see.", call("weather", city="Oslo")), "It is 22 °C."])
        async with serving({"good": model}) as served:
            config = LoopConfig(stream=served.proxy(model="good"), tools=[weather])
            result = await run("Weather in Oslo?", AgentContext("Be brief."), config)
        assert result.text == "It is 22 °C."
        assert [message.role for message in result.messages] == [
            *("user", "assistant", "tool_result", "assistant")
        ]
        assert model.requests[0].tools == (weather.schema,)
        assert tuple(model.requests[1].messages) == tuple(result.messages[:-1])

    async def test_through_two_gateways(self) -> None:
        timeout = Error(EMPTY, StreamErrorKind.TRANSIENT, "slow", StreamTimeout("idle", 3))
        async with (
            serving(ScriptedStream([[timeout]])) as inner,
            serving(inner.proxy()) as outer,
        ):
            [event] = await ask(outer.proxy())
        assert comparable(event) == comparable(timeout)

    def test_one_proxy_on_several_loops(self, echo: tuple[Echo, ProxyStream]) -> None:
        model, proxy = echo
        model.events = [Done(EMPTY)]
        for _ in range(2):
            assert asyncio.run(ask(proxy)) == [Done(EMPTY)]


class TestStreaming:
    async def test_deltas_arrive_as_they_are_produced(self) -> None:
        """The model goes on only when the client has read what it said before."""
        heard = [threading.Event() for _ in range(20)]

        async def patient(
            request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            yield Start(EMPTY)
            for number, event in enumerate(heard):
                yield Chunk(TextChunk(str(number)))
                assert await asyncio.to_thread(event.wait, PATIENCE)
            yield Done(EMPTY)

        async with serving(patient) as served:
            deltas = []
            async for event in served.proxy()(REQUEST, CancellationToken()):
                if isinstance(event, Chunk) and isinstance(event.chunk, TextChunk):
                    deltas.append(event.chunk.delta)
                    heard[int(event.chunk.delta)].set()
        assert deltas == [str(number) for number in range(20)]

    async def test_comments_while_the_model_is_silent(self) -> None:
        model = Stuck()
        async with serving(model, keep_alive=0.02) as served:
            reader, writer = await open_socket(served.url)
            await read_to(reader, b"Well,")
            for _ in range(3):
                await read_to(reader, b": keep-alive\n\n")
            model.release.set()
            said = await read_to(reader, b"\r\n0\r\n\r\n")
            writer.close()
        assert b'data: {"type":"done"' in said

    async def test_comments_are_a_sign_of_life(self) -> None:
        model = Stuck()
        async with serving(model, keep_alive=0.01) as served:
            asking = asyncio.create_task(ask(served.proxy(timeouts=Timeouts(idle=0.5))))
            await happens(lambda: model.calls)
            await asyncio.sleep(1.0)  # twice as long as nothing may come
            model.release.set()
            assert isinstance((await asking)[-1], Done)

    async def test_the_headers_are_for_streams(self) -> None:
        async with serving(ScriptedStream(["hi"])) as served:
            reply = await asyncio.to_thread(post, served.url)
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-accel-buffering"] == "no"
        data = [line for line in reply.text.split("\n\n") if line]
        assert data[0] == 'data: {"type":"start"}'
        assert json.loads(data[-1].removeprefix("data: "))["type"] == "done"

    async def test_nothing_is_read_behind_the_last_event(self) -> None:
        events: list[StreamEvent] = [Start(EMPTY), Done(EMPTY), Chunk(TextChunk("late"))]
        async with serving(ScriptedStream([events], at_end="repeat")) as served:
            assert await ask(served.proxy()) == events[:2]
            assert "late" not in (await asyncio.to_thread(post, served.url)).text


# --- somebody leaves --------------------------------------------------------------------------


class TestLeaving:
    @pytest.mark.parametrize("how", ["close", "cancel", "task"])
    async def test_a_proxy_that_leaves_ends_the_call(self, how: str) -> None:
        model = Stuck()
        signal = CancellationToken()
        async with serving(model) as served:
            answer: Any = served.proxy()(REQUEST, signal)
            assert isinstance(await anext(answer), Start)
            assert isinstance(await anext(answer), Chunk)
            assert (served.streams, model.running) == (1, 1)
            if how == "close":
                await answer.aclose()
            elif how == "task":
                waiting = asyncio.create_task(anext(answer))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            else:
                signal.cancel("enough")
                error = await anext(answer)
                assert (error.kind, error.message) == (StreamErrorKind.ABORTED, "enough")
                assert error.partial.plain_text == "Well,"
                assert error.partial.stop_reason is StopReason.ABORTED
            await happens(lambda: served.streams == 0)
        assert model.ended == ["the call to the gateway has ended"]

    async def test_a_connection_that_is_cut_ends_the_call(self) -> None:
        model = Stuck(heeds_signal=True)
        async with serving(model) as served:
            reader, writer = await open_socket(served.url)
            await read_to(reader, b"Well,")
            writer.transport.abort()
            await happens(lambda: served.streams == 0)
        assert len(model.ended) == 1

    async def test_a_client_that_leaves_before_the_model_speaks(self) -> None:
        model = Stuck([])
        async with serving(model) as served:
            _, writer = await open_socket(served.url)
            await happens(lambda: model.running)
            writer.close()
            await happens(lambda: served.streams == 0 and not model.running)

    async def test_a_client_that_leaves_with_half_a_request(self) -> None:
        model = Stuck()
        async with serving(model, max_concurrent=1) as served:
            _, writer = await open_socket(served.url, missing=9)
            callers = served.app.state.gateway._callers
            await happens(lambda: callers._running["alice"] == 1)
            writer.close()
            await happens(lambda: callers._running["alice"] == 0)
        assert model.calls == 0

    async def test_a_client_that_does_not_read_is_given_up(self) -> None:
        """It would hold the model's answer, and a connection to the provider, for ever."""
        model = Stuck(["x" * 100_000] * 1000)
        async with serving(model, client_timeout=0.2, keep_alive=0.05) as served:
            _, writer = await open_socket(served.url)
            await happens(lambda: model.ended)
            await happens(lambda: served.streams == 0)
            writer.transport.abort()

    async def test_a_server_that_raises_when_the_client_has_left(self) -> None:
        """Newer servers do that, where uvicorn is silent."""
        model = Stuck(["so"] * 10)
        app = gateway(model, tokens=TOKENS)
        body = json.dumps(BODY).encode()
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if not sent:
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.sleep(PATIENCE)
            raise AssertionError("nothing comes any more")

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 4:
                raise OSError("gone")

        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        headers.append((b"content-type", b"application/json"))
        scope = {"type": "http", "method": "POST", "path": "/v1/stream", "headers": headers}
        async with asyncio.timeout(PATIENCE):
            await app({**scope, "asgi": {"spec_version": "2.4"}}, receive, send)
        assert len(sent) == 4
        assert len(model.ended) == 1
        assert app.state.gateway.streams == 0

    async def test_a_stubborn_model_does_not_go_on(self) -> None:
        """One that catches its cancellation and says more."""
        said: list[int] = []

        async def stubborn(
            request: StreamRequest, signal: CancellationToken
        ) -> AsyncIterator[StreamEvent]:
            yield Start(EMPTY)
            try:
                await asyncio.sleep(PATIENCE)
            except asyncio.CancelledError:
                for number in range(10):
                    said.append(number)
                    yield Chunk(TextChunk("more"))

        async with serving(stubborn) as served:
            answer: Any = served.proxy()(REQUEST, CancellationToken())
            await anext(answer)
            await answer.aclose()
            await happens(lambda: served.streams == 0)
        assert said == [0]


# --- who may ask, and how often ---------------------------------------------------------------


class TestTokens:
    @pytest.mark.parametrize(
        "header",
        [
            None,
            "",
            "Bearer",
            f"Basic {TOKEN}",
            TOKEN,
            f"Bearer {TOKEN[:-1]}x",
            f"Bearer {TOKEN[:-1]}",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN.upper()}",
            "Bearer x",
            "Bearer " + "x" * 5000,
            f"Bearer {TOKEN} {TOKEN}",
            "Bearer \xff\xfe",
        ],
    )
    def test_a_wrong_token_is_refused(self, shared: Served, header: str | None) -> None:
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        for reply in (
            post(shared.url, headers=headers),
            get(shared.url, "/v1/models", headers=headers),
        ):
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"] == "Bearer"
            assert error_of(reply)["type"] == "unauthorized"

    @pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer   {OTHER_TOKEN}"])
    def test_a_right_one_is_not(self, shared: Served, header: str) -> None:
        assert post(shared.url, headers={"Authorization": header}).status_code == 200

    async def test_secrets_without_names(self) -> None:
        async with serving(ScriptedStream(["hi"]), tokens=["one", TOKEN]) as served:
            assert isinstance((await ask(served.proxy()))[-1], Done)
            assert (await failure(served.proxy("two"))).kind is StreamErrorKind.FATAL

    async def test_open_access_is_for_this_machine(self) -> None:
        model = ScriptedStream(["hi"], at_end="repeat")
        async with serving(model, tokens=None) as served:
            assert isinstance((await ask(served.proxy(None)))[-1], Done)
            port = urlsplit(served.url).port
            for host, status in {
                "localhost": 200,
                f"127.0.0.1:{port}": 200,
                f"[::1]:{port}": 200,
                "evil.example": 403,
                "127.0.0.1.evil.example": 403,
                "[::1].evil.example": 403,
                "[::1]evil.example": 403,
                "[::1]:8000.evil.example": 403,
                "127.0.0.1:evil.example": 403,
                "127.0.0.1:80:80": 403,
                "localhost:8000@evil.example": 403,
                "evil.example/localhost": 403,
                "[::1%25evil.example]": 403,
                "": 403,
            }.items():
                reply = await asyncio.to_thread(post, served.url, headers={"Host": host})
                assert reply.status_code == status, host
                if status == 403:
                    assert error_of(reply)["type"] == "forbidden"

    @pytest.mark.parametrize(
        ("address", "status"),
        [
            ("127.0.0.1", 200),
            ("::1", 200),
            ("::ffff:127.0.0.1", 200),
            ("10.0.0.7", 403),
            ("2001:db8::1", 403),
        ],
    )
    async def test_open_access_is_not_for_others(self, address: str, status: int) -> None:
        app = gateway(ScriptedStream(["hi"]), tokens=None)
        transport = httpx2.ASGITransport(app, client=(address, 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/v1/models")).status_code == status

    @pytest.mark.parametrize(
        "header",
        [
            "X-Forwarded-For",
            "X-Forwarded-Host",
            "Forwarded",
            "X-Real-IP",
            "X-Forwarded",
            "X-Original-Forwarded-For",
            "X-Envoy-External-Address",
            "Fly-Client-IP",
            "DO-Connecting-IP",
            "Via",
            "CF-Connecting-IP",
        ],
    )
    async def test_open_access_is_not_for_who_asks_through_a_proxy(self, header: str) -> None:
        """Also where the server believes the proxy, and says that the client is this machine."""
        model = ScriptedStream(["hi"], at_end="repeat")
        trusting = {"proxy_headers": True, "forwarded_allow_ips": "*"}
        async with serving(model, tokens=None, server=trusting) as served:
            headers = {"Host": "localhost", header: "127.0.0.1"}
            reply = await asyncio.to_thread(post, served.url, headers=headers)
            assert reply.status_code == 403
            assert "proxy" in error_of(reply)["message"]
        assert model.requests == []

    async def test_two_hosts_are_none(self) -> None:
        async with serving(ScriptedStream([]), tokens=None) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(served.url).port)
            writer.write(
                b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
            )
            assert (await read_to(reader, b"\r\n")).split()[1] in (b"400", b"403")
            writer.close()

    async def test_each_token_has_its_own_limit(self) -> None:
        model = Stuck()
        async with serving(model, max_concurrent=2) as served:
            alice, bob = served.proxy(), served.proxy(OTHER_TOKEN)
            running = [asyncio.create_task(ask(alice)) for _ in range(2)]
            await happens(lambda: model.running == 2)
            reply = await asyncio.to_thread(post, served.url)
            assert reply.status_code == 429
            assert reply.headers["retry-after"] == "1"
            assert error_of(reply)["type"] == "too_many_streams"
            error = await failure(alice)
            assert error.kind is StreamErrorKind.PROVIDER_RATE_LIMITED
            running.append(asyncio.create_task(ask(bob)))
            await happens(lambda: model.running == 3)
            model.release.set()
            assert all(isinstance(events[-1], Done) for events in await asyncio.gather(*running))
            assert isinstance((await ask(alice))[-1], Done)

    async def test_a_proxy_comes_back_when_it_is_its_turn(self) -> None:
        model = Stuck()

        class Releasing(FakeClock):
            async def sleep(self, seconds: float) -> None:
                await super().sleep(seconds)
                model.release.set()
                await running

        clock = Releasing()
        async with serving(model, max_concurrent=1) as served:
            running = asyncio.create_task(ask(served.proxy()))
            await happens(lambda: model.running == 1)
            events = await ask(served.proxy(retry=RetryPolicy(), clock=clock))
        assert isinstance(events[-1], Done)
        assert clock.sleeps == [1.0]  # as long as the gateway asked for

    async def test_a_refused_request_takes_no_place(self) -> None:
        async with serving(ScriptedStream(["hi"]), max_concurrent=1) as served:
            for _ in range(3):
                reply = await asyncio.to_thread(post, served.url, {"system_prompt": ""})
                assert reply.status_code == 400
            assert isinstance((await ask(served.proxy()))[-1], Done)


# --- what a caller may ask the provider for ---------------------------------------------------


class TestExtras:
    @pytest.mark.parametrize(
        "name",
        ["model", "models", "stream", "n", "candidate_count", "store", "user", "safety_identifier",
         "metadata", "service_tier", "tools", "mcp_servers", "api_key", "base_url", "webhook_url",
         "extra_headers", "Model", "generationConfig", "provider", "previous_response_id", ""],
    )  # fmt: skip
    async def test_what_is_not_safe_is_refused_before_the_provider_hears_of_it(
        self, name: str
    ) -> None:
        model = ScriptedStream(["hi"])
        async with serving(model) as served:
            body = {**BODY, "provider_extras": {"top_p": 0.5, name: "x"}}
            reply = await asyncio.to_thread(post, served.url, body)
            request = replace(REQUEST, provider_extras={name: "x"})
            told = await failure(served.proxy(), request)
        assert reply.status_code == 400
        error = error_of(reply)
        assert error["type"] == "extra_not_allowed"
        assert error["path"] == f"$.provider_extras.{name}"
        assert repr(name) in error["message"]
        assert told.kind is StreamErrorKind.FATAL
        assert repr(name) in told.message
        assert model.requests == []

    async def test_what_is_safe_is_passed_on(self) -> None:
        extras = dict.fromkeys(SAFE_EXTRAS, 1)
        model = ScriptedStream(["hi"])
        async with serving(model) as served:
            events = await ask(served.proxy(), replace(REQUEST, provider_extras=extras))
        assert isinstance(events[-1], Done)
        assert model.requests[0].provider_extras == extras

    async def test_the_owner_may_allow_more_or_less(self) -> None:
        model = ScriptedStream(["hi"], at_end="repeat")
        request = replace(REQUEST, provider_extras={"metadata": {}})
        async with serving(model, extras=SAFE_EXTRAS | {"metadata"}) as served:
            assert isinstance((await ask(served.proxy(), request))[-1], Done)
        async with serving(model, extras=()) as served:
            request = replace(REQUEST, provider_extras={"top_p": 1})
            assert "allows none" in (await failure(served.proxy(), request)).message

    @pytest.mark.parametrize("extras", [[1], "x", 5])
    async def test_that_are_no_object(self, extras: Any) -> None:
        async with serving(ScriptedStream(["hi"])) as served:
            reply = await asyncio.to_thread(post, served.url, {**BODY, "provider_extras": extras})
        assert reply.status_code == 400
        assert error_of(reply)["path"] == "$.provider_extras"

    @pytest.mark.parametrize("extras", ["model", [1], 5])
    def test_names_are_texts(self, extras: Any) -> None:
        with pytest.raises((ConfigError, TypeError)):
            gateway(ScriptedStream([]), tokens=None, extras=extras)


# --- whose key was refused --------------------------------------------------------------------


class TestAccess:
    async def test_by_the_provider(self) -> None:
        """The gateway's key is the gateway's business, and the caller's token is fine."""
        body = json.dumps({"error": {"message": "Incorrect API key"}}).encode()
        refusing = Answer(status=401, headers={"content-type": "application/json"}, body=body)
        async with ByteServer(lambda request: refusing) as provider:
            chat = OpenAIChat("m", base_url=f"{provider.url}/v1", api_key="wrong key")
            alone = await failure(chat)
            async with serving(chat) as served:
                error = await failure(served.proxy())
                await chat.aclose()
        assert isinstance(alone.cause, AccessRefused)
        assert (alone.cause.by, alone.cause.status) == ("provider", 401)
        assert error.kind is StreamErrorKind.FATAL
        assert error.message.startswith("the provider behind the gateway rejected the key")
        assert error.partial.error_message == error.message
        assert isinstance(error.cause, AccessRefused)
        assert (error.cause.by, error.cause.status) == ("provider", 401)

    @pytest.mark.parametrize("token", [None, "not the token"])
    async def test_by_the_gateway(self, shared: Served, token: str | None) -> None:
        error = await failure(shared.proxy(token))
        assert error.kind is StreamErrorKind.FATAL
        assert error.message.startswith("the gateway answered 401: ")
        assert "check the token" in error.message
        assert "provider" not in error.message
        assert isinstance(error.cause, AccessRefused)
        assert (error.cause.by, error.cause.status) == ("gateway", 401)

    async def test_it_survives_a_recording(self, tmp_path: Path, shared: Served) -> None:
        path = tmp_path / "answers.jsonl"
        first = (await ask(RecordingStream(shared.proxy("no"), path)))[-1]
        again = (await ask(PlaybackStream(path)))[-1]
        assert isinstance(first, Error)
        assert isinstance(again, Error)
        assert isinstance(again.cause, AccessRefused)
        assert (again.cause.by, again.cause.status) == ("gateway", 401)


# --- connections ------------------------------------------------------------------------------


class TestSilentConnections:
    @pytest.mark.parametrize(
        "sent", [b"", b"P", b"POST /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n"]
    )
    async def test_are_closed(self, sent: bytes) -> None:
        async with serving(ScriptedStream([]), server={"header_timeout": 0.1}) as served:
            port = urlsplit(served.url).port
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _, writer in opened:
                writer.write(sent)
            async with asyncio.timeout(PATIENCE):
                assert [await reader.read() for reader, _ in opened] == [b""] * 20
            for _, writer in opened:
                writer.close()

    async def test_also_behind_a_request(self) -> None:
        async with serving(ScriptedStream([]), server={"header_timeout": 0.1}) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(served.url).port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await read_to(reader, b"}")
            writer.write(b"GET /health HT")
            async with asyncio.timeout(PATIENCE):
                assert await reader.read() == b""
            writer.close()

    async def test_a_stream_may_take_its_time(self) -> None:
        model = Stuck()
        async with serving(model, server={"header_timeout": 0.1}) as served:
            running = asyncio.create_task(ask(served.proxy()))
            await happens(lambda: model.running == 1)
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(served.url).port)
            async with asyncio.timeout(PATIENCE):
                assert await reader.read() == b"", "a silent one that came later is gone"
            writer.close()
            assert model.running == 1
            model.release.set()
            assert isinstance((await running)[-1], Done)

    @pytest.mark.parametrize("seconds", [0, -1, True, "5", float("inf"), float("nan")])
    def test_what_is_no_limit(self, seconds: Any) -> None:
        with pytest.raises(ConfigError, match="header_timeout"):
            server_config(gateway(ScriptedStream([]), tokens=None), header_timeout=seconds)


# --- refusals ---------------------------------------------------------------------------------


class TestRefusals:
    @pytest.mark.parametrize(
        ("content", "path", "text"),
        [
            (b"", "$", "truncated"),
            (b"not json", "$", "malformed"),
            (b'{"system_prompt": "x"', "$", "truncated"),
            (b"[]", "$", "Expected `object`"),
            (b"1.5", "$", "Expected `object`"),
            (b'{"system_prompt": ""}', "$", "`messages`"),
            (b'{"system_prompt": 1, "messages": []}', "$.system_prompt", "Expected `str`"),
            (b'{"system_prompt": "", "messages": [{}]}', "$.messages[0]", "`role`"),
            (
                b'{"system_prompt": "", "messages": [{"role": "user", "content": 1.5}]}',
                "$.messages[0].content",
                "Expected",
            ),
            (
                b'{"system_prompt": "", "messages": [], "reasoning": "wild"}',
                "$.reasoning",
                "Invalid enum",
            ),
            (b'{"system_prompt": "", "messages": [], "max_output_tokens": 1.0', "$", "truncated"),
            (b'{"system_prompt": "\xff", "messages": []}', "$", "utf-8"),
            (b'{"provider_extras": ' + b"[" * 100_000, "$", "nested"),
        ],
    )
    def test_a_body_that_is_no_call(
        self, shared: Served, content: bytes, path: str, text: str
    ) -> None:
        headers = {**AUTHORIZED, "Content-Type": "application/json"}
        reply = post(shared.url, content=content, headers=headers)
        assert reply.status_code == 400
        error = error_of(reply)
        assert (error["type"], error["path"]) == ("invalid_request", path)
        assert text in error["message"]

    @pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
    def test_a_body_that_is_not_said_to_be_json(self, shared: Served, kind: str | None) -> None:
        headers = AUTHORIZED | ({"Content-Type": kind} if kind else {})
        reply = post(shared.url, content=b"{}", headers=headers)
        assert reply.status_code == 415
        assert error_of(reply)["type"] == "unsupported_media_type"

    def test_a_body_that_is_compressed(self, shared: Served) -> None:
        headers = {**AUTHORIZED, "Content-Encoding": "gzip"}
        assert post(shared.url, headers=headers).status_code == 415

    def test_a_charset_may_be_said(self, shared: Served) -> None:
        headers = {**AUTHORIZED, "Content-Type": "Application/JSON; charset=utf-8"}
        content = json.dumps(BODY).encode()
        assert post(shared.url, content=content, headers=headers).status_code == 200

    @pytest.mark.parametrize("tells_length", [True, False])
    async def test_a_body_that_is_too_large(self, tells_length: bool) -> None:
        """Also one that does not say so in advance."""
        content = json.dumps({**BODY, "system_prompt": "x" * 5000}).encode()
        headers = {**AUTHORIZED, "Content-Type": "application/json"}
        model = ScriptedStream(["hi"], at_end="repeat")
        async with serving(model, max_request_bytes=5000) as served:
            body: Any = content if tells_length else iter([content[:2500], content[2500:]])
            reply = await asyncio.to_thread(post, served.url, content=body, headers=headers)
            assert reply.status_code == 413
            assert error_of(reply)["message"] == "the body is larger than 5,000 bytes"
            error = await failure(
                served.proxy(), StreamRequest(system_prompt="x" * 5000, messages=())
            )
            assert error.kind is StreamErrorKind.CONTEXT_OVERFLOW
            exact = json.dumps(BODY).encode().ljust(5000)
            reply = await asyncio.to_thread(post, served.url, content=exact, headers=headers)
            assert reply.status_code == 200
        assert len(model.requests) == 1

    async def test_a_body_that_does_not_come(self) -> None:
        async with serving(ScriptedStream(["hi"]), client_timeout=0.05) as served:
            reader, writer = await open_socket(served.url, missing=9)
            assert (await read_to(reader, b"\n")).startswith(b"HTTP/1.1 408 ")
            writer.close()

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/", 404),
            ("GET", "/v1/stream/", 404),
            ("GET", "/health/", 404),
            ("GET", "/v1/stream", 405),
            ("PUT", "/v1/stream", 405),
            ("POST", "/v1/models", 405),
            ("DELETE", "/health", 405),
        ],
    )
    def test_paths_and_methods(self, shared: Served, method: str, path: str, status: int) -> None:
        with httpx2.Client(timeout=PATIENCE) as client:
            reply = client.request(method, f"{shared.url}{path}")
        assert reply.status_code == status
        error = error_of(reply)
        assert error["type"] == {404: "not_found", 405: "method_not_allowed"}[status]
        if status == 405:
            assert reply.headers["allow"]

    async def test_models(self) -> None:
        first, second = (ScriptedStream([name], at_end="repeat") for name in ("one", "two"))
        async with serving({"first": first, "second": second}) as served:
            reply = await asyncio.to_thread(get, served.url, "/v1/models", headers=AUTHORIZED)
            assert reply.json() == {"models": ["first", "second"]}
            *_, last = await ask(served.proxy(model="second"))
            assert isinstance(last, Done)
            assert last.message.plain_text == "two"
            error = await failure(served.proxy(model="third"))
            assert error.kind is StreamErrorKind.FATAL
            assert "unknown model 'third'" in error.message
            reply = await asyncio.to_thread(post, served.url, {**BODY, "model": "third"})
            assert (reply.status_code, error_of(reply)["path"]) == (404, "$.model")
            reply = await asyncio.to_thread(post, served.url)
            assert (reply.status_code, error_of(reply)["path"]) == (400, "$.model")

    async def test_the_only_model_needs_no_name(self) -> None:
        async with serving(ScriptedStream(["hi"], at_end="repeat")) as served:
            reply = await asyncio.to_thread(get, served.url, "/v1/models", headers=AUTHORIZED)
            assert reply.json() == {"models": ["default"]}
            for name in (None, "default"):
                assert isinstance((await ask(served.proxy(model=name)))[-1], Done)


# --- faults -----------------------------------------------------------------------------------


async def raising(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
    yield Start(EMPTY)
    yield Chunk(TextChunk("half"))
    raise RuntimeError("inner secrets")


async def falling_silent(
    request: StreamRequest, signal: CancellationToken
) -> AsyncIterator[StreamEvent]:
    yield Start(EMPTY)
    yield Chunk(TextChunk("half"))


async def cancelling_itself(
    request: StreamRequest, signal: CancellationToken
) -> AsyncIterator[StreamEvent]:
    yield Start(EMPTY)
    yield Chunk(TextChunk("half"))
    raise asyncio.CancelledError


async def talking_nonsense(
    request: StreamRequest, signal: CancellationToken
) -> AsyncIterator[StreamEvent]:
    yield Start(EMPTY)
    yield Chunk(TextChunk("half"))
    yield "inner secrets"  # type: ignore[misc]


class TestFaults:
    @pytest.mark.parametrize("model", [raising, cancelling_itself, talking_nonsense])
    async def test_in_the_middle_of_a_stream(
        self, model: StreamFn, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving(model) as served:
            *_, last = await ask(served.proxy())
            await happens(lambda: served.streams == 0)
        assert isinstance(last, Error)
        assert last.kind is StreamErrorKind.FATAL
        assert last.partial.plain_text == "half"
        assert last.partial.stop_reason is StopReason.ERROR
        assert "inner secrets" not in repr(last)
        [incident] = re.findall(r"incident (\w{8})$", last.message)
        [record] = [r for r in caplog.records if r.name == "clark_agent.gateway.app"]
        assert record.levelno == logging.ERROR
        assert record.getMessage().startswith(f"incident {incident}\n")
        if model is raising:
            assert "in raising" in record.getMessage()

    async def test_before_the_stream(self, caplog: pytest.LogCaptureFixture) -> None:
        def broken(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
            raise RuntimeError("inner secrets")

        async with serving(broken) as served:
            reply = await asyncio.to_thread(post, served.url)
            assert reply.status_code == 500
            error = error_of(reply)
            assert error["type"] == "internal"
            assert "inner secrets" not in reply.text
            incident = error["message"].rpartition(" ")[2]
            assert f"incident {incident}" in caplog.text
            assert (await failure(served.proxy())).kind is StreamErrorKind.FATAL
            assert served.streams == 0

    async def test_a_model_that_falls_silent(self) -> None:
        async with serving(falling_silent) as served:
            *_, last = await ask(served.proxy())
        assert isinstance(last, Error)
        assert (last.kind, last.partial.plain_text) == (StreamErrorKind.EMPTY, "half")

    async def test_what_a_provider_failed_with_is_not_asked_again(self) -> None:
        """The gateway's own transport has tried."""
        for kind in StreamErrorKind:
            told = Error(EMPTY, kind, "overloaded")
            model, clock = ScriptedStream([[told]]), FakeClock()
            async with serving(model) as served:
                assert await ask(served.proxy(retry=RetryPolicy(), clock=clock)) == [told]
            assert (len(model.requests), clock.sleeps) == (1, [])


# --- the end of a server ----------------------------------------------------------------------


class TestShutdown:
    async def test_running_streams_may_end_and_new_ones_are_refused(self) -> None:
        model = Stuck()
        async with serving(model) as served:
            running = asyncio.create_task(ask(served.proxy()))
            await happens(lambda: model.running == 1)
            served.do(served.app.state.gateway.drain)
            reply = await asyncio.to_thread(post, served.url)
            assert (reply.status_code, error_of(reply)["type"]) == (503, "unavailable")
            assert reply.headers["retry-after"]
            error = await failure(served.proxy())
            assert error.kind is StreamErrorKind.TRANSIENT
            health = await asyncio.to_thread(get, served.url, "/health")
            assert (health.status_code, health.json()) == (
                *(503, {"status": "draining", "streams": 1}),
            )
            model.release.set()
            assert isinstance((await running)[-1], Done)

    async def test_what_does_not_end_in_time_is_broken_off(self) -> None:
        model = Stuck()
        async with serving(model, drain_timeout=0.05) as served:
            running = asyncio.create_task(ask(served.proxy()))
            await happens(lambda: model.running == 1)
            served.do(served.app.state.gateway.drain)
            *_, last = await running
            assert isinstance(last, Error)
            assert last.kind is StreamErrorKind.TRANSIENT
            assert "shutting down" in last.message
            assert last.partial.plain_text == "Well,"
            assert model.ended == [last.message]

    async def test_a_server_that_ends_waits_for_a_stream(self) -> None:
        model = Stuck()
        async with serving(model) as served:
            running = asyncio.create_task(ask(served.proxy()))
            await happens(lambda: model.running == 1)
            served.server.should_exit = True
            await happens(lambda: not served.server.servers[0].is_serving())
            assert model.running == 1
            model.release.set()
            assert isinstance((await running)[-1], Done)

    async def test_a_server_that_loses_patience_cancels_a_stream(self) -> None:
        """Uvicorn's own limit is shorter than ours."""
        model = Stuck()
        async with serving(model, server={"timeout_graceful_shutdown": 1}) as served:
            running = asyncio.create_task(ask(served.proxy()))
            await happens(lambda: model.running == 1)
            served.server.should_exit = True
            *_, last = await running
            assert isinstance(last, Error)
            assert last.kind is StreamErrorKind.TRANSIENT
            assert last.partial.plain_text == "Well,"
        assert model.running == 0

    @pytest.mark.parametrize("number", [signals.SIGTERM, signals.SIGINT])
    @pytest.mark.parametrize("ends", [True, False])
    async def test_a_signal(self, number: signals.Signals, ends: bool) -> None:
        """A process that is told to end lets its stream end, or breaks it off in time."""
        child = Child([sys.executable, "-c", CHILD, "2.0" if ends else "0.1"])
        try:
            url = child.wait_for(r"running on (http://\S+)", seconds=30)
            events: list[StreamEvent] = []
            async for event in proxy_to(url, TOKEN)(REQUEST, CancellationToken()):
                events.append(event)
                if isinstance(event, Chunk):
                    child._process.send_signal(number)
            await asyncio.to_thread(child._process.wait, PATIENCE)
            assert "upstream closed" in child.output
            assert isinstance(events[-1], Done if ends else Error)
            if isinstance(events[-1], Error):
                assert events[-1].kind is StreamErrorKind.TRANSIENT
        finally:
            child.stop()


# Goes on with its answer when it is told that the process is to end, and not before.
CHILD = f"""
import asyncio, sys
import uvicorn
from clark_agent import AssistantMessage, StopReason
from clark_agent.stream import Chunk, Done, Start, TextChunk
from clark_agent.gateway import gateway

async def model(request, signal):
    try:
        yield Start(AssistantMessage((), StopReason.OTHER))
        yield Chunk(TextChunk("so"))
        while not app.state.gateway.is_draining:
            await asyncio.sleep(0.01)
        if float(sys.argv[1]) < 1:
            await asyncio.sleep(60)
        yield Done(AssistantMessage.from_text("so"))
    finally:
        print("upstream closed", flush=True)

app = gateway(model, tokens=["{TOKEN}"], drain_timeout=float(sys.argv[1]))
uvicorn.run(app, port=0)
"""


class TestHealth:
    async def test_it_counts_streams(self) -> None:
        model = Stuck()
        async with serving(model) as served:
            asking: list[asyncio.Task[Any]] = []
            for count in range(3):
                health = await asyncio.to_thread(get, served.url, "/health")
                assert health.json() == {"status": "ok", "streams": count}
                asking.append(asyncio.create_task(ask(served.proxy())))
                await happens(lambda: model.running == len(asking))
            model.release.set()
            await asyncio.gather(*asking)
            await happens(lambda: served.streams == 0)


# --- the description --------------------------------------------------------------------------


class TestDescription:
    async def test_it_is_public_and_complete(self) -> None:
        async with serving(ScriptedStream(["hi"])) as served:
            description = (await asyncio.to_thread(get, served.url, "/openapi.json")).json()
        assert description["openapi"] == "3.1.0"
        assert set(description["paths"]) == {
            *("/v1/stream", "/v1/models", "/health", "/openapi.json")
        }
        operation = description["paths"]["/v1/stream"]["post"]
        assert operation["security"] == [{"token": []}]
        assert set(operation["responses"]) == {
            *("200", "400", "401", "404", "408", "413", "415", "429", "500", "503")
        }
        call = description["components"]["schemas"]["StreamCall"]
        assert set(call["properties"]) == {"model", *StreamRequest.__struct_fields__}
        text = json.dumps(description)
        for name in set(re.findall(r"#/components/schemas/(\w+)", text)):
            assert name in description["components"]["schemas"]

    @pytest.mark.parametrize("kind", ["one", "several", "open"])
    async def test_schemathesis_finds_nothing(self, kind: str, tmp_path: Path) -> None:
        """Made-up requests, right and wrong, get answers as described."""
        model = ScriptedStream(["one two", call("look", at=1)], at_end="repeat")
        models: Any = {"a": model, "b": model} if kind == "several" else model
        async with serving(models, tokens=None if kind == "open" else TOKENS) as served:
            ran = await asyncio.to_thread(
                subprocess.run,
                [
                    *(sys.executable, "-m", "schemathesis.cli", "run"),
                    f"{served.url}/openapi.json",
                    *("--header", f"Authorization: Bearer {TOKEN}", "--checks", "all"),
                    *("--max-examples", str(REQUESTS_MADE_UP)),
                    *("--seed", "7", "--no-color"),
                    *("--generation-database", "none"),
                ],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert served.streams == 0
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "No issues found" in ran.stdout
        assert model.requests  # among them were right ones


# --- the client by itself ---------------------------------------------------------------------

STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


def data(*events: StreamEvent) -> bytes:
    return b"".join([b"data: " + encode_event(event) + b"\n\n" for event in events])


def refusal(status: int, message: str = "no", headers: dict[str, str] | None = None) -> Answer:
    body = json.dumps({"error": {"type": "x", "message": message}}).encode()
    return Answer(
        status=status, headers={"Content-Type": "application/json", **(headers or {})}, body=body
    )


FINE = Answer(headers=STREAM_HEADERS, body=data(Start(EMPTY), Done(EMPTY)))


class TestProxy:
    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (400, StreamErrorKind.FATAL),
            (404, StreamErrorKind.FATAL),
            (405, StreamErrorKind.FATAL),
            (408, StreamErrorKind.TRANSIENT),
            (413, StreamErrorKind.CONTEXT_OVERFLOW),
            (415, StreamErrorKind.FATAL),
            (429, StreamErrorKind.PROVIDER_RATE_LIMITED),
            (500, StreamErrorKind.FATAL),
            (502, StreamErrorKind.TRANSIENT),
            (503, StreamErrorKind.TRANSIENT),
            (504, StreamErrorKind.TRANSIENT),
        ],
    )
    async def test_what_a_refusal_means(self, status: int, kind: StreamErrorKind) -> None:
        async with ByteServer([refusal(status)]) as server:
            error = await failure(proxy_to(server.url, TOKEN, retry=NEVER))
            assert (error.kind, error.message) == (kind, f"the server answered {status}: no")
            assert error.partial.content == ()
        [request] = server.requests
        assert (request.method, request.path) == ("POST", "/v1/stream")
        assert request.headers["authorization"] == f"Bearer {TOKEN}"

    async def test_a_refusal_by_somebody_in_between(self) -> None:
        """A page for people, and one without end."""
        page = b"<html><h1>Bad Gateway</h1></html>"
        script = [Answer(status=502, body=page), Answer(status=502, body=[b"x" * 10_000] * 1000)]
        async with ByteServer(script) as server:
            proxy = proxy_to(server.url, retry=NEVER)
            assert (await failure(proxy)).message == "the server answered 502: Bad Gateway"
            assert len((await failure(proxy)).message) < 2000

    async def test_a_wait_behind_the_gateway_is_passed_on(self) -> None:
        clock = FakeClock()
        limit = RateLimit(requests_per_minute=1, clock=clock)
        model = limited(ScriptedStream(["", ""]), limit)
        async with serving(model) as served:
            proxy = served.proxy()
            assert [type(event) for event in await ask(proxy)] == [Start, Done]
            waits, *rest = await ask(proxy)
            await proxy.aclose()
        assert waits == Waiting(60.0, "requests_per_minute")
        assert [type(event) for event in rest] == [Start, Done]

    async def test_asks_again_at_a_closed_door(self) -> None:
        clock = FakeClock()
        script = [
            Answer(status=None, reset=True),
            refusal(503, headers={"Retry-After": "7"}),
            refusal(429, headers={"Retry-After": "9"}),
            FINE,
        ]
        async with ByteServer(script) as server:
            proxy = proxy_to(server.url, TOKEN, clock=clock)
            first, *events = await ask(proxy)
        assert first == Waiting(clock.sleeps[0], "transient")
        assert events == [
            Waiting(7.0, "transient"),
            Waiting(9.0, "provider_rate_limited"),
            Start(EMPTY),
            Done(EMPTY),
        ]
        assert clock.sleeps[1:] == [7.0, 9.0]
        assert 0 < clock.sleeps[0] <= 0.5

    async def test_gives_up_in_the_end(self) -> None:
        clock = FakeClock()
        async with ByteServer(lambda request: refusal(503)) as server:
            error = await failure(proxy_to(server.url, retry=RetryPolicy(attempts=3), clock=clock))
        assert error.message == "the server answered 503: no (3 attempts)"
        assert len(clock.sleeps) == 2

    async def test_does_not_ask_again_when_something_has_come(self) -> None:
        said: list[StreamEvent] = [Start(EMPTY), Chunk(TextChunk("half"))]
        body = data(*said)
        answer = Answer(headers=STREAM_HEADERS, body=body, cut_after=len(body))
        clock = FakeClock()
        async with ByteServer([answer]) as server:
            *events, last = await ask(proxy_to(server.url, clock=clock))
        assert events == said
        assert isinstance(last, Error)
        assert (last.kind, last.partial.plain_text) == (StreamErrorKind.TRANSIENT, "half")
        assert clock.sleeps == []

    async def test_a_stream_without_an_end(self) -> None:
        body = data(Start(EMPTY), Chunk(TextChunk("half")))
        async with ByteServer([Answer(headers=STREAM_HEADERS, body=body)]) as server:
            error = await failure(proxy_to(server.url))
        assert (error.kind, error.partial.plain_text) == (StreamErrorKind.EMPTY, "half")

    async def test_a_cancelled_signal_sends_nothing(self) -> None:
        signal = CancellationToken()
        signal.cancel("no time")
        async with ByteServer([]) as server:
            [event] = await ask(proxy_to(server.url), signal=signal)
        assert isinstance(event, Error)
        assert (event.kind, event.message) == (StreamErrorKind.ABORTED, "no time")
        assert server.requests == []

    async def test_cancelled_while_it_waits_to_ask_again(self) -> None:
        signal = CancellationToken()

        class Cancelling(FakeClock):
            async def sleep(self, seconds: float) -> None:
                signal.cancel("enough")
                await asyncio.sleep(PATIENCE)

        async with ByteServer([refusal(503)]) as server:
            waits, event = await ask(proxy_to(server.url, clock=Cancelling()), signal=signal)
        assert isinstance(waits, Waiting)
        assert isinstance(event, Error)
        assert (event.kind, event.message) == (StreamErrorKind.ABORTED, "enough")

    @pytest.mark.parametrize("phase", ["idle", "total"])
    @pytest.mark.parametrize("answers", [True, False])
    async def test_time_limits(self, phase: str, answers: bool) -> None:
        """Neither is a reason to ask again: the gateway was reached."""
        limits: dict[str, Any] = {phase: 1.0}
        headers, body = (STREAM_HEADERS, data(Start(EMPTY))) if answers else ({}, b"")
        answer = Answer(status=200 if answers else None, headers=headers, body=body, hold=True)
        async with ByteServer([answer]) as server:
            proxy = proxy_to(server.url, timeouts=Timeouts(**limits), clock=FakeClock())
            error = await failure(proxy)
            await server.client_gone()
        assert error.kind is StreamErrorKind.TRANSIENT
        assert isinstance(error.cause, StreamTimeout)
        assert (error.cause.phase, error.cause.seconds) == (phase, 1.0)

    @pytest.mark.parametrize("body", [b"data: {}\n\n", b"data: nonsense\n\n"])
    async def test_an_event_that_is_none(self, body: bytes) -> None:
        async with ByteServer([Answer(headers=STREAM_HEADERS, body=body)]) as server:
            error = await failure(proxy_to(server.url, clock=FakeClock()))
        assert error.kind is StreamErrorKind.FATAL
        assert "cannot be decoded" in error.message

    async def test_what_is_no_gateway(self) -> None:
        page = Answer(headers={"Content-Type": "text/html"}, body=b"<h1>Welcome</h1>")
        async with ByteServer([page]) as server:
            error = await failure(proxy_to(server.url))
        assert error.kind is StreamErrorKind.FATAL
        assert "is not a gateway" in error.message

    async def test_headers_and_a_path_in_front(self) -> None:
        async with ByteServer([FINE]) as server:
            await ask(proxy_to(f"{server.url}/models/", headers={"X-Team": "blue"}))
        [request] = server.requests
        assert request.path == "/models/v1/stream"
        assert request.headers["x-team"] == "blue"
        assert "authorization" not in request.headers

    async def test_what_cannot_be_written(self) -> None:
        request = StreamRequest(system_prompt="", messages=(), provider_extras={"x": object()})
        [event] = await ask(proxy_to("http://127.0.0.1:1"), request)
        assert isinstance(event, Error)
        assert event.kind is StreamErrorKind.FATAL
        assert isinstance(event.cause, TransportError)
        assert "cannot be written as JSON" in event.message

    async def test_connections_are_used_again(self) -> None:
        async with ByteServer([FINE, FINE, FINE]) as server:
            proxy = proxy_to(server.url)
            for _ in range(3):
                await ask(proxy)
            assert server.open_connections == 1
            await proxy.aclose()
            await server.all_closed()


# --- secrets ----------------------------------------------------------------------------------


class TestSecrets:
    async def test_neither_key_nor_token_is_ever_told(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A provider that quotes the key, a model that raises it, and callers of all kinds."""
        caplog.set_level(logging.DEBUG)
        key = "sk-canary-key-of-the-provider"
        quoting = refusal(401, f"the key {key} is not known")
        seen: list[str] = []
        async with ByteServer(lambda request: quoting) as provider:
            chat = OpenAIChat("m", base_url=f"{provider.url}/v1", api_key=key)

            class Raising:
                inner = chat

                def __call__(
                    self, request: StreamRequest, signal: CancellationToken
                ) -> AsyncIterator[StreamEvent]:
                    raise RuntimeError(f"it was {key}, and {TOKEN} too")

            async with serving({"chat": chat, "raising": Raising()}) as served:
                for model in ("chat", "raising", "none"):
                    seen += [repr(event) for event in await ask(served.proxy(model=model))]
                    seen.append(repr(served.proxy(model=model)))
                    reply = await asyncio.to_thread(post, served.url, {**BODY, "model": model})
                    seen.append(f"{reply.headers} {reply.text}")
                wrong = await asyncio.to_thread(
                    post, served.url, headers={"Authorization": f"Bearer {TOKEN}x"}
                )
                seen.append(f"{wrong.headers} {wrong.text}")
                for path in ("/health", "/openapi.json", "/v1/models"):
                    told = await asyncio.to_thread(get, served.url, path, headers=AUTHORIZED)
                    seen.append(f"{told.headers} {told.text}")
                config = LoopConfig(stream=served.proxy(model="chat"))
                with pytest.raises(StreamError) as caught:
                    await run("Hello?", AgentContext(), config)
                seen += [str(caught.value), repr(caught.value.__cause__)]
                await chat.aclose()
        everything = "\n".join([*seen, caplog.text, *[repr(r.__dict__) for r in caplog.records]])
        assert "[redacted]" in everything  # it was there to be told
        assert key not in everything
        assert TOKEN not in everything

    async def test_a_gateway_that_quotes_the_token(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        told = Error(EMPTY, StreamErrorKind.FATAL, f"what is {TOKEN}?")
        script = [
            refusal(503, f"not {TOKEN}"),
            refusal(401, f"not {TOKEN}"),
            Answer(headers=STREAM_HEADERS, body=data(told)),
            Answer(headers=STREAM_HEADERS, body=f"data: {TOKEN}\n\n".encode()),
        ]
        async with ByteServer(script) as server:
            proxy = proxy_to(server.url, TOKEN, clock=FakeClock())
            texts = [repr(await ask(proxy)) for _ in range(3)]
        assert all("[redacted]" in text for text in texts)
        assert TOKEN not in "".join(texts) + caplog.text

    async def test_logs_name_the_caller(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        async with serving({"good": ScriptedStream(["hi"])}) as served:
            await ask(served.proxy(OTHER_TOKEN, model="good"))
            await happens(lambda: "bob called good: answered" in caplog.text)


# --- settings ---------------------------------------------------------------------------------


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"tokens": []}, "tokens is empty"),
            ({"tokens": {}}, "tokens is empty"),
            ({"tokens": "secret"}, "a list of secrets"),
            ({"tokens": [""]}, "visible ASCII"),
            ({"tokens": ["a b"]}, "visible ASCII"),
            ({"tokens": ["é"]}, "visible ASCII"),
            ({"tokens": [None]}, "visible ASCII"),
            ({"tokens": ["a", "a"]}, "the same token"),
            ({"max_request_bytes": 0}, "max_request_bytes"),
            ({"max_concurrent": True}, "max_concurrent"),
            ({"keep_alive": 0}, "keep_alive"),
            ({"client_timeout": float("inf")}, "client_timeout"),
            ({"drain_timeout": float("nan")}, "drain_timeout"),
            ({"drain_timeout": "1"}, "drain_timeout"),
        ],
    )
    def test_what_makes_no_sense(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            gateway(ScriptedStream([]), **{"tokens": ["secret"], **options})

    def test_a_token_is_not_told_when_it_is_refused(self) -> None:
        with pytest.raises(ConfigError) as caught:
            gateway(ScriptedStream([]), tokens={"alice": "se cret"})
        assert "se cret" not in str(caught.value)

    @pytest.mark.parametrize("stream", [{}, None, {"a": 1}, {"": ScriptedStream([])}])
    def test_what_is_no_transport(self, stream: Any) -> None:
        with pytest.raises(ConfigError):
            gateway(stream, tokens=["secret"])

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "example.com",
            "ftp://example.com",
            "http://",
            "http://user:pass@example.com",
            "http://example.com?token=x",
            None,
        ],
    )
    def test_what_is_no_address(self, url: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            ProxyStream(url)
        assert "pass@" not in str(caught.value)

    @pytest.mark.parametrize("token", ["", "a\nb", "é", 5])
    def test_what_is_no_token(self, token: Any) -> None:
        with pytest.raises(ConfigError, match="printable ASCII"):
            ProxyStream("http://example.com", token)

    def test_what_is_no_header(self) -> None:
        with pytest.raises(ConfigError, match="does not allow") as caught:
            ProxyStream("http://example.com", headers={"X-Key": f"{TOKEN}\n"})
        assert TOKEN not in str(caught.value)

    @pytest.mark.parametrize("package", ["starlette", "httpx2"])
    def test_says_what_to_install(self, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        makers: dict[str, Callable[[], object]] = {
            "starlette": lambda: gateway(ScriptedStream([]), tokens=["secret"]),
            "httpx2": lambda: ProxyStream("http://example.com"),
        }
        with pytest.raises(ConfigError, match=re.escape("pip install '.[gateway]'")):
            makers[package]()

    def test_importing_loads_nothing(self) -> None:
        code = (
            "import sys; import clark_agent.gateway.app, clark_agent.transports.proxy; "
            "print([m for m in ('starlette', 'uvicorn', 'httpx2') if m in sys.modules])"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert ran.stdout == "[]\n"

    def test_they_do_not_show_the_token(self) -> None:
        assert (
            repr(ProxyStream("http://h/", TOKEN, model="m")) == "ProxyStream('http://h', model='m')"
        )
        assert repr(ProxyStream("http://h/v1/stream")) == "ProxyStream('http://h')"


def test_any_client_will_do(shared: Served) -> None:
    """Here is the one of the standard library."""
    connection = http.client.HTTPConnection(urlsplit(shared.url).netloc, timeout=PATIENCE)
    headers = {**AUTHORIZED, "Content-Type": "application/json"}
    with closing(connection):
        connection.request("POST", "/v1/stream", json.dumps(BODY), headers)
        with connection.getresponse() as response:
            lines = response.read().decode().split("\n\n")
    kinds = [json.loads(line.removeprefix("data: "))["type"] for line in lines if line]
    assert kinds == ["start", "chunk", "done"]
