"""A redirect is followed within one origin. A key and a conversation go to no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import AssistantMessage
from clark_agent.errors import TransportError
from clark_agent.stream import Done, Error, Start, StreamErrorKind, StreamFn
from clark_agent.testing import FakeClock
from clark_agent.testing.misbehaviours import MISBEHAVIOURS
from clark_agent.transports import Anthropic, OpenAIChat, OpenAIResponses, ProxyStream, RetryPolicy
from clark_agent.transports.http.redirects import redirect_target
from clark_agent.transports.stream_json import encode_event
from tests.transports import wires_anthropic, wires_chat, wires_gemini, wires_responses
from tests.transports.servers.bytes_server import Answer, ByteServer, Request
from tests.transports.wires_chat import ask, stream

pytestmark = pytest.mark.slow

SECRET = "very-secret-key"
KEYS = {"x-api-key": SECRET, "api-key": SECRET, "x-goog-api-key": SECRET}
PLAIN = MISBEHAVIOURS[0].steps


def own(wire: Any, **settings: Any) -> Callable[[str], StreamFn]:
    return lambda url: wire.transport(url, headers=KEYS, **settings)


def proxy(url: str) -> StreamFn:
    return ProxyStream(url, SECRET, headers=KEYS, clock=FakeClock())


def chat_by_client(url: str) -> StreamFn:
    client = openai.AsyncOpenAI(api_key=SECRET, base_url=f"{url}/v1", default_headers=KEYS)
    return OpenAIChat("m", client=client)


def responses_by_client(url: str) -> StreamFn:
    client = openai.AsyncOpenAI(api_key=SECRET, base_url=f"{url}/v1", default_headers=KEYS)
    return OpenAIResponses("m", client=client)


def anthropic_by_client(url: str) -> StreamFn:
    client = anthropic.AsyncAnthropic(api_key=SECRET, base_url=url, default_headers=KEYS)
    return Anthropic("m", client=client)


def gateway_events() -> list[bytes]:
    message = AssistantMessage.from_text("Hello")
    return [b"data: %b\n\n" % encode_event(e) for e in (Start(message), Done(message))]


# How to reach a server, and what it answers.
WAYS: dict[str, tuple[Callable[[str], StreamFn], list[bytes]]] = {
    "chat": (own(wires_chat), wires_chat.render(PLAIN)),
    "responses": (own(wires_responses), wires_responses.render(PLAIN)),
    "anthropic": (own(wires_anthropic), wires_anthropic.render(PLAIN)),
    "gemini": (own(wires_gemini), wires_gemini.render(PLAIN)),
    "proxy": (proxy, gateway_events()),
    "chat-client": (chat_by_client, wires_chat.render(PLAIN)),
    "responses-client": (responses_by_client, wires_responses.render(PLAIN)),
    "anthropic-client": (anthropic_by_client, wires_anthropic.render(PLAIN)),
}
every_way = pytest.mark.parametrize("way", WAYS)


async def closed(transport: Any) -> None:
    await transport.aclose()
    client = getattr(transport, "_client", None) or getattr(
        getattr(transport, "_clients", None), "_client", None
    )
    if client is not None:
        await client.close()


@every_way
@pytest.mark.parametrize("status", [302, 307, 308])
async def test_no_redirect_leads_to_another_origin(way: str, status: int) -> None:
    make, body = WAYS[way]
    async with ByteServer(lambda _: stream(*body)) as elsewhere:
        there = f"{elsewhere.url}/taken"
        moved = Answer(status=status, headers={"location": f"{there}?key=x"})
        async with ByteServer([moved]) as server:
            transport = make(server.url)
            [told] = await ask(transport)
            await closed(transport)
        assert elsewhere.requests == []
    assert isinstance(told, Error)
    assert told.kind is StreamErrorKind.FATAL
    assert there in told.message, "it says where to"
    assert "url to its new address" in told.message, "and what to set"
    assert "key=x" not in told.message
    assert SECRET not in told.message


@every_way
@pytest.mark.parametrize("status", [307, 308])
async def test_another_path_of_the_same_origin_is_followed(way: str, status: int) -> None:
    make, body = WAYS[way]

    def moved_once(request: Request) -> Answer:
        if request.path.startswith("/there"):
            return stream(*body)
        return Answer(status=status, headers={"location": "/there/it?is=1"})

    async with ByteServer(moved_once) as server:
        transport = make(server.url)
        events = await ask(transport)
        await closed(transport)
    assert isinstance(events[-1], Done)
    assert events[-1].message.plain_text == "Hello"
    first, second = server.requests
    assert (second.method, second.path) == ("POST", "/there/it?is=1")
    assert second.body == first.body
    assert SECRET in second.headers.values()


@every_way
async def test_a_redirect_that_would_lose_the_request_is_not_followed(way: str) -> None:
    make, _ = WAYS[way]
    async with ByteServer([Answer(status=302, headers={"location": "/login"})]) as server:
        transport = make(server.url)
        [told] = await ask(transport)
        await closed(transport)
    assert isinstance(told, Error)
    assert told.kind is StreamErrorKind.FATAL
    assert "/login" in told.message
    assert len(server.requests) == 1


@every_way
async def test_a_redirect_to_nowhere_is_not_repeated(way: str) -> None:
    make, _ = WAYS[way]
    async with ByteServer(lambda _: Answer(status=307)) as server:
        transport = make(server.url)
        [told] = await ask(transport)
        await closed(transport)
    assert isinstance(told, Error)
    assert told.kind is StreamErrorKind.FATAL
    assert "the server answered 307" in told.message
    assert len(server.requests) == 1


@every_way
async def test_redirects_in_a_circle_end(way: str) -> None:
    make, _ = WAYS[way]
    async with ByteServer(lambda r: Answer(status=307, headers={"location": r.path})) as server:
        transport = make(server.url)
        transport.retry = RetryPolicy(attempts=1)  # type: ignore[attr-defined]
        [told] = await ask(transport)
        await closed(transport)
    assert isinstance(told, Error)
    assert len(server.requests) < 10


ORIGINS = st.tuples(
    st.sampled_from(["http", "https"]),
    st.sampled_from(["a.example", "b.example", "a.example.b.example", "127.0.0.1", "[::1]"]),
    st.sampled_from(["", ":80", ":443", ":8000"]),
)
PORTS = {"http": ":80", "https": ":443"}


@given(ORIGINS, ORIGINS, st.sampled_from(["", "u:p@", "a.example@"]))
def test_the_origin_decides(
    here: tuple[str, str, str], there: tuple[str, str, str], user: str
) -> None:
    url = "{}://{}{}/v1".format(*here)
    scheme, host, port = there
    location = f"{scheme}://{user}{host}{port}/v2"

    def origin(parts: tuple[str, str, str]) -> tuple[str, str, str]:
        return parts[0], parts[1], parts[2] or PORTS[parts[0]]

    if origin(here) == origin(there):
        assert redirect_target(307, location, url) == location
        return
    with pytest.raises(TransportError) as refused:
        redirect_target(307, location, url)
    assert "u:p" not in str(refused.value)


@pytest.mark.parametrize("location", ["http://[", "http://a:b/", "//[::1"])
def test_an_address_that_is_none(location: str) -> None:
    with pytest.raises(TransportError, match="an invalid address"):
        redirect_target(307, location, "http://a.example/v1")
