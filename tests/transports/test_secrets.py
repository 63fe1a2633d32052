"""A secret that a transport was given is in nothing that leaves it, whatever its server quotes."""

from __future__ import annotations

import json
import logging
import traceback
from base64 import b64encode
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clark_agent import (
    AssistantMessage,
    ConfigError,
    ProviderContent,
    StopReason,
    TextContent,
    ToolCall,
)
from clark_agent.errors import TransportError
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    Chunk,
    Done,
    Error,
    Start,
    StreamErrorKind,
    TextChunk,
)
from clark_agent.testing import FakeClock
from clark_agent.transports import (
    Anthropic,
    Gemini,
    OpenAIChat,
    OpenAIResponses,
    ProxyStream,
    RecordingStream,
    RetryPolicy,
    connect,
)
from clark_agent.transports.http.redaction import Address, Redactor
from clark_agent.transports.stream_json import encode_event
from clark_agent.types import Annotation
from tests.transports.servers.bytes_server import Answer, ByteServer, Request
from tests.transports.test_odd_events import TRANSPORTS, written
from tests.transports.wires_chat import ask, stream

TWICE = RetryPolicy(attempts=2)
# The mark in front keeps them apart from the words that a request has anyway.
SECRETS = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~+/=:@!", min_size=12
).map(lambda text: f"zq9{text}")


# --- where a secret can stand -----------------------------------------------------------------


def with_user(url: str, user: str) -> str:
    return url.replace("://", f"://{user}@")


PLACES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "key": lambda url, secret: {"base_url": url, "api_key": secret},
    "header": lambda url, secret: {"base_url": url, "headers": {"x-api-key": secret}},
    "bearer": lambda url, secret: {
        "base_url": url,
        "headers": {"Authorization": f"Bearer {secret}"},
    },
    "odd header": lambda url, secret: {"base_url": url, "headers": {"x-tenant": secret}},
    "password": lambda url, secret: {"base_url": with_user(url, f"me:{quote(secret, safe='')}")},
    "user": lambda url, secret: {"base_url": with_user(url, quote(secret, safe=""))},
}
MAKERS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "chat": (OpenAIChat, "m", "/v1"),
    "responses": (OpenAIResponses, "m", "/v1"),
    "anthropic": (Anthropic, "m", ""),
    "gemini": (Gemini, "gemini-3-flash", ""),
}


# --- what a server can do with it -------------------------------------------------------------


def quoted(request: Request, secret: str) -> str:
    return f"{secret} {quote(secret, safe='')} {request.headers} ?key={secret}&a=b"


def in_error(request: Request, secret: str) -> Answer:
    body = msgspec.json.encode({"error": {"message": quoted(request, secret), "code": secret}})
    return Answer(status=401, headers={"content-type": "application/json"}, body=body)


def in_page(request: Request, secret: str) -> Answer:
    return Answer(status=500, body=f"<html>{secret}</html>".encode())


def cut_off(request: Request, secret: str) -> Answer:
    """A text that is too long is cut off, perhaps in the middle of a secret."""
    filler = "x" * (999 - len(secret) // 2)
    return Answer(status=400, body=msgspec.json.encode({"error": f"{filler}{secret}"}))


def in_stream(request: Request, secret: str) -> Answer:
    return stream(b"data: %b\n\n" % msgspec.json.encode({"type": "error", "error": secret}))


def no_event(request: Request, secret: str) -> Answer:
    return stream(f"data: {secret} {{\n\n".encode())


def elsewhere(request: Request, secret: str) -> Answer:
    to = f"http://{quote(secret, safe='')}@127.0.0.1:1/{quote(secret, safe='')}?key={secret}"
    return Answer(status=307, headers={"location": to})


def gone(request: Request, secret: str) -> Answer:
    return Answer(status=None, reset=True)


LIES = [in_error, in_page, cut_off, in_stream, no_event, elsewhere, gone]


# --- what leaves a transport ------------------------------------------------------------------


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.startswith("clark_agent")
        if ours or record.levelno >= logging.INFO:  # what libraries write below that is theirs
            self.texts += [record.getMessage(), repr(record.__dict__)]


@contextmanager
def all_logs() -> Generator[list[str]]:
    kept, root = Kept(), logging.getLogger()
    before = root.level
    root.addHandler(kept)
    root.setLevel(logging.DEBUG)
    try:
        yield kept.texts
    finally:
        root.removeHandler(kept)
        root.setLevel(before)


def texts_of(error: BaseException | None) -> list[str]:
    """What an exception says, and those that it came from."""
    if error is None:
        return []
    told = [str(error), repr(error), *traceback.format_exception(error)]
    return told + texts_of(error.__cause__) + texts_of(error.__context__)


async def told_by(transport: Any) -> str:
    """Everything that comes out of one call."""
    with TemporaryDirectory() as folder, all_logs() as logged:
        path = Path(folder) / "answers.jsonl"
        events = await ask(RecordingStream(transport, path))
        last = events[-1]
        assert isinstance(last, (Done, Error))
        if isinstance(last, Error):
            logged += [last.message, *texts_of(last.cause)]
        return "\n".join([*logged, *map(repr, events), repr(transport), path.read_text()])


def assert_hidden(secret: str, text: str) -> None:
    me = b64encode(f"me:{secret}".encode()).decode()
    alone = b64encode(f"{secret}:".encode()).decode()
    for form in (secret, quote(secret, safe=""), me, alone):
        place = text.find(form)
        assert place < 0, text[max(0, place - 100) : place + 200]


@pytest.mark.slow
@pytest.mark.parametrize("wire", MAKERS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([*PLACES]), st.sampled_from(LIES), SECRETS)
async def test_no_secret_leaves_a_transport(
    wire: str, place: str, lie: Callable[[Request, str], Answer], secret: str
) -> None:
    make, model, path = MAKERS[wire]
    async with ByteServer(lambda request: lie(request, secret)) as server:
        given_ = PLACES[place](f"{server.url}{path}", secret)
        transport = make(model, retry=TWICE, clock=FakeClock(), **given_)
        text = await told_by(transport)
        await transport.aclose()
        assert server.requests
    assert_hidden(secret, text)
    assert secret not in transport.base_url


@pytest.mark.slow
@pytest.mark.parametrize("wire", MAKERS)
async def test_a_password_that_is_not_ascii_is_known_in_all_its_forms(wire: str) -> None:
    make, model, path = MAKERS[wire]
    secret = "zq9-geheim:/@ü"
    async with ByteServer(lambda request: in_error(request, secret)) as server:
        url = with_user(f"{server.url}{path}", f"me:{quote(secret, safe='')}")
        transport = make(model, base_url=url)
        text = await told_by(transport)
        await transport.aclose()
    assert_hidden(secret, text)


@pytest.mark.slow
@pytest.mark.parametrize("wire", MAKERS)
async def test_no_secret_comes_in_a_source_or_an_item_of_a_provider(wire: str) -> None:
    """What else stands in them goes back as it came, keys of strangers included."""
    make, model, path = MAKERS[wire]
    key, others = "zq9-key-of-ours", "https://a.example/b?sig=abcdef"
    recorded = json.dumps(TRANSPORTS[wire][1]).replace('"u"', json.dumps(f"{others}&k={key}"))
    body = [written(event) for event in json.loads(recorded)]
    async with ByteServer([stream(*body)]) as server:
        transport = make(model, base_url=f"{server.url}{path}", api_key=key)
        text = await told_by(transport)
        await transport.aclose()
    assert_hidden(key, text)
    assert f"{others}&k=[redacted]" in text


@pytest.mark.slow
@pytest.mark.parametrize("wire", MAKERS)
async def test_a_user_in_the_address_is_sent_as_a_header(wire: str) -> None:
    make, model, path = MAKERS[wire]
    async with ByteServer([Answer(status=400)]) as server:
        transport = make(model, base_url=with_user(f"{server.url}{path}", "me:p%40ss"))
        await ask(transport)
        await transport.aclose()
    assert server.requests[0].headers["authorization"] == "Basic bWU6cEBzcw=="


@pytest.mark.parametrize("wire", MAKERS)
async def test_nobody_listens_at_an_address_with_a_password(wire: str) -> None:
    make, model, path = MAKERS[wire]
    base = f"http://me:very-secret@127.0.0.1:9{path}"
    transport = make(model, base_url=base, retry=RetryPolicy(attempts=1))
    assert "very-secret" not in await told_by(transport)
    await transport.aclose()


@pytest.mark.parametrize("wire", MAKERS)
@pytest.mark.parametrize("rest", ["?key=very-secret", "#very-secret"])
def test_an_address_has_no_query(wire: str, rest: str) -> None:
    """The key would be lost on the way, or stand in the logs of the HTTP library."""
    make, model, _ = MAKERS[wire]
    with pytest.raises(ConfigError, match="headers") as refused:
        make(model, base_url=f"http://127.0.0.1:9/v1{rest}")
    assert "very-secret" not in str(refused.value)


@pytest.mark.slow
async def test_a_client_of_the_hosts_own() -> None:
    secret = "the-hosts-own-secret"
    async with ByteServer(lambda request: in_error(request, secret)) as server:
        client = openai.AsyncOpenAI(
            api_key="another-secret",
            base_url=f"{server.url}/v1",
            default_headers={"api-key": secret},
            default_query={"key": secret},
        )
        events = await ask(OpenAIChat("m", client=client))
        await client.close()
    assert secret not in repr(events)
    assert "another-secret" not in repr(events)


@pytest.mark.parametrize(
    "model",
    ["ftp://me:very-secret@host#m", "http://me:very-secret@", "gateway+ftp://very-secret@h"],
)
def test_a_string_that_names_no_model(model: str) -> None:
    with pytest.raises(ConfigError) as refused:
        connect(model)
    assert "very-secret" not in str(refused.value)


# --- a gateway of somebody else ---------------------------------------------------------------


def lying_events(secret: str) -> list[list[Any]]:
    empty = AssistantMessage((), StopReason.OTHER)
    said = AssistantMessage(
        (TextContent(f"it is {secret}"), ToolCall("c", "look", {"at": [secret]})),
        StopReason.ERROR,
        error_message=f"not {secret}",
    )
    item = ProviderContent("p", {"a": [{secret: f"{secret}!"}]})
    source = Annotation("url", f"https://a.example/{secret}", data={"key": secret})
    cause = TransportError(f"because of {secret}")
    fatal = StreamErrorKind.FATAL
    return [
        [Start(empty, {"a": [{secret: f"{secret}!"}]}), Error(empty, fatal, "no")],
        [Start(said), Error(empty, fatal, "no")],
        [Error(said, fatal, "no")],
        [Error(empty, fatal, f"not {secret}", cause)],
        [Start(empty), Done(AssistantMessage((), StopReason.ERROR, f"not {secret}"))],
        [
            Start(empty),
            Chunk(BlockChunk(item)),
            Chunk(AnnotationChunk(source)),
            Done(AssistantMessage((item,), StopReason.END_TURN, annotations=(source,))),
        ],
    ]


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["token", "header"]),
    st.integers(0, len(LIES) + len(lying_events("")) - 1),
    SECRETS.filter(lambda text: " " not in text),
)
async def test_no_token_comes_back_from_a_gateway(place: str, which: int, secret: str) -> None:
    def answer(request: Request) -> Answer:
        if which < len(LIES):
            return LIES[which](request, secret)
        events = lying_events(secret)[which - len(LIES)]
        return stream(*[b"data: %b\n\n" % encode_event(event) for event in events])

    given_: dict[str, Any] = (
        {"token": secret} if place == "token" else {"headers": {"x-token": secret}}
    )
    async with ByteServer(answer) as server:
        proxy = ProxyStream(server.url, retry=TWICE, clock=FakeClock(), **given_)
        text = await told_by(proxy)
        await proxy.aclose()
    assert_hidden(secret, text)


@pytest.mark.slow
async def test_the_models_own_words_stay() -> None:
    """A placeholder for a key is a word like any other."""
    said = AssistantMessage.from_text("Use ollama.")
    broken = AssistantMessage((TextContent("Use ollama."),), StopReason.ERROR, "gone")
    start = Start(AssistantMessage((), StopReason.OTHER))
    chunk = Chunk(TextChunk("Use ollama."))
    for last in (Done(said), Error(broken, StreamErrorKind.FATAL, "gone")):
        body = [b"data: %b\n\n" % encode_event(event) for event in (start, chunk, last)]
        async with ByteServer([stream(*body)]) as server:
            proxy = ProxyStream(server.url, "ollama")
            assert await ask(proxy) == [start, chunk, last]
            await proxy.aclose()


# --- the parts --------------------------------------------------------------------------------


def test_addresses() -> None:
    assert Address.of("http://h/v1") == Address("http://h/v1", {}, [])
    taken = Address.of("https://a:b%2Fc@h:8/v1")
    assert (taken.url, taken.headers) == ("https://h:8/v1", {"Authorization": "Basic YTpiL2M="})
    assert {"b%2Fc", "b/c", "YTpiL2M="} <= {*taken.secrets}
    with pytest.raises(ConfigError):
        Address.of("http://[")


@given(st.text(), st.lists(SECRETS, max_size=3))
def test_what_is_redacted_stays_so(text: str, secrets: list[str]) -> None:
    redactor = Redactor(secrets)
    once = redactor.text(text.join(["", *secrets, ""]))
    assert redactor.text(once) == once
    assert not any(secret in once for secret in secrets)


def test_addresses_in_a_text() -> None:
    redactor = Redactor([])
    text = "GET https://me:pw@h/x?key=abc&q=1&access_token=t failed"
    assert redactor.text(text) == (
        "GET https://[redacted]@h/x?key=[redacted]&q=1&access_token=[redacted] failed"
    )
    assert redactor.text("a@b.c, 1 == 2, ?q=1") == "a@b.c, 1 == 2, ?q=1"
