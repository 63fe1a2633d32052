"""What a provider's failure means, and what people are told of it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent import CancellationToken, StreamErrorKind, StreamRequest, UserMessage
from clark_agent.errors import StreamTimeout
from clark_agent.stream import Error
from clark_agent.transports import OpenAIChat, RetryPolicy
from clark_agent.transports.http.failures import (
    classify,
    failure_from_response,
    failure_in_stream,
    failure_of_sdk,
    undecodable_event,
)
from clark_agent.transports.http.response import Failure
from tests.cases import all_cases
from tests.transports.servers.bytes_server import Answer, ByteServer

FATAL = StreamErrorKind.FATAL
HISTORY = StreamErrorKind.INCONSISTENT_TOOL_HISTORY
LIMITED = StreamErrorKind.PROVIDER_RATE_LIMITED
OVERFLOW = StreamErrorKind.CONTEXT_OVERFLOW
TRANSIENT = StreamErrorKind.TRANSIENT

JSON = {"content-type": "application/json"}


# --- the collection -----------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """A response as it was seen somewhere."""

    provider: str
    status: int
    body: Any
    in_stream: bool
    kind: StreamErrorKind
    source: str
    headers: Mapping[str, str] | None = None
    note: str = ""


ROWS = msgspec.json.Decoder(Row).decode_lines(
    Path(__file__).parents[1].joinpath("data", "responses.jsonl").read_bytes()
)
KINDS = (FATAL, HISTORY, LIMITED, OVERFLOW, TRANSIENT)


@pytest.mark.parametrize("kind", KINDS)
def test_responses_that_were_seen_mean_what_they_meant(kind: StreamErrorKind) -> None:
    with all_cases() as case:
        for number, row in enumerate(ROWS, start=1):
            if row.kind is kind:
                with case(f"row {number}, {row.provider} {row.status}"):
                    check_meaning(row)


def check_meaning(row: Row) -> None:
    failure = (
        failure_in_stream(row.body)
        if row.in_stream
        else failure_from_response(row.status, row.body, row.headers)
    )
    assert failure.kind is row.kind, row.note
    assert failure.cause is None
    assert str(row.status) in failure.message or row.in_stream
    if row.headers and "retry-after" in row.headers:
        assert failure.retry_after == float(row.headers["retry-after"])


def test_the_collection_has_every_kind_inside_a_stream_and_outside() -> None:
    seen = {(row.kind, row.in_stream) for row in ROWS}
    assert seen == {(kind, in_stream) for kind in KINDS for in_stream in (False, True)}


@pytest.mark.parametrize("status", [500, 502, 503, 504, 520, 599, 408, 409])
def test_an_outage_without_a_word_may_pass(status: int) -> None:
    assert classify(status, "") is TRANSIENT


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 418, 422])
def test_a_refusal_without_a_word_will_not_pass(status: int) -> None:
    assert classify(status, "") is FATAL


@pytest.mark.parametrize("code", [429, "429"])
def test_inside_a_stream_the_code_is_the_status_that_it_would_have_had(code: Any) -> None:
    assert classify(0, {"error": {"message": "no", "code": code}}) is LIMITED
    assert classify(0, {"error": {"message": "no", "code": 401}}) is FATAL
    assert classify(0, {"error": {"message": "no", "code": 503}}) is TRANSIENT


names = st.sampled_from(
    (
        *("error", "message", "code", "type", "status", "details", "metadata", "raw", "errors"),
        *("reason", "response", "retryDelay", "ThrottlingException", "x"),
    )
)
bodies = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["²", "٤"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@given(bodies, st.sampled_from([200, 400, 413, 429, 500, 503]))
def test_no_body_is_too_odd(body: Any, status: int) -> None:
    for failure in (failure_from_response(status, body), failure_in_stream(body)):
        assert failure.kind in (FATAL, LIMITED, OVERFLOW, TRANSIENT)
        assert len(failure.message) < 1100
        assert failure.retry_after is None or failure.retry_after >= 0


# --- how long to wait ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": " 20 "}, 20.0),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({}, None),
    ],
)
def test_a_header_says_how_long_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert failure_from_response(429, {"error": "no"}, headers).retry_after == seconds


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=-7)), None])
def test_a_date_says_until_when_to_wait(zone: timezone | None) -> None:
    moment = datetime(2100, 1, 1, tzinfo=zone)  # one without a zone is meant as Greenwich's
    headers = {"retry-after": format_datetime(moment)}
    until = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    longest = (until - datetime.now(UTC)).total_seconds()
    given = failure_from_response(429, "", headers).retry_after
    shortest = (until - datetime.now(UTC)).total_seconds()
    assert given is not None
    assert shortest <= given <= longest


@given(st.text() | st.from_regex(r"\A\w{3}, \d\d \w{3} \d{4,6} \d\d:\d\d:\d\d [+-]\d{1,12}\Z"))
def test_no_header_is_too_odd(value: str) -> None:
    given = failure_from_response(429, "", {"retry-after": value}).retry_after
    assert given is None or given >= 0


RETRY_INFO = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "37.5s"}


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"code": 429, "message": "no", "details": [{"@type": "x"}, RETRY_INFO]}},
        [{"error": {"code": 429, "message": "no", "details": [RETRY_INFO]}}],
        {"code": 429, "message": "no", "details": [RETRY_INFO]},  # as an SDK unpacks it
    ],
)
def test_a_body_says_how_long_to_wait(body: Any) -> None:
    assert failure_from_response(429, body).retry_after == 37.5
    assert failure_in_stream(body).retry_after == 37.5
    assert failure_from_response(429, body, {"retry-after": "2"}).retry_after == 2.0


@pytest.mark.parametrize("delay", ["soon", "", "-1s", 5, None, {"seconds": 5}])
def test_a_body_that_does_not_say_it_properly_says_nothing(delay: Any) -> None:
    body = {"error": {"details": [{"retryDelay": delay}]}}
    assert failure_from_response(429, body).retry_after is None


# --- what people are told -----------------------------------------------------------------------


def told(body: Any, status: int = 400) -> str:
    return failure_from_response(status, body).message


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "bad model", "type": "x", "code": "y"}}, "bad model"),
        ({"error": "bad model"}, "bad model"),
        ({"message": "bad model"}, "bad model"),
        ({"detail": "bad model"}, "bad model"),
        ({"detail": [{"msg": "x"}], "message": "bad model"}, "bad model"),
        ([{"error": {"message": "bad model"}}], "bad model"),
        ({"errors": [{"message": "bad model"}, {"message": "and more"}]}, "bad model"),
        ({"error": {"message": "  bad model\n"}}, "bad model"),
        ("bad model", "bad model"),
        (b"bad model", "bad model"),
        ({"error": {"message": "", "code": "x"}}, '{"error":{"message":"","code":"x"}}'),
        ({"foo": 1}, '{"foo":1}'),
        ({}, "no text"),
        ([], "no text"),
        ("", "no text"),
        (b"", "no text"),
        ("  \n", "no text"),
        (None, "no text"),
    ],
)
def test_the_text_for_people_is_found(body: Any, text: str) -> None:
    assert told(body) == f"the server answered 400: {text}"
    assert (
        failure_in_stream(body).message == f"the server failed in the middle of the stream: {text}"
    )


def test_of_a_page_only_the_text_is_told() -> None:
    page = """
      <!DOCTYPE html><html><head><title>502 Bad Gateway</title>
      <style>a > b { color: red }</style><script>if (1 < 2) alert("no")</script></head>
      <body><center><h1>502 Bad
      Gateway</h1></center><hr>cloudflare</body></html>"""
    text = "502 Bad Gateway 502 Bad Gateway cloudflare"
    assert told(page, 502) == f"the server answered 502: {text}"
    assert told({"error": {"message": page}}, 502) == f"the server answered 502: {text}"


def test_a_text_that_merely_has_a_bracket_is_no_page() -> None:
    assert told("1 < 2 and <this> stays").endswith(": 1 < 2 and <this> stays")


@pytest.mark.parametrize(
    "raw",
    [
        "prompt is too long: 219898 tokens",
        '{"type":"error","error":{"message":"prompt is too long: 219898 tokens"}}',
    ],
)
def test_a_gateway_is_asked_for_the_reason_of_the_provider_behind_it(raw: str) -> None:
    body = {
        "error": {
            "message": "Provider returned error",
            "code": 400,
            "metadata": {"raw": raw, "provider_name": "Anthropic"},
        }
    }
    failure = failure_from_response(400, body)
    assert failure.kind is OVERFLOW
    assert failure.message == f"the server answered 400: Provider returned error: {raw}"


def test_a_long_text_is_cut() -> None:
    text = told("x" * 5000)
    assert text.endswith("x…")
    assert len(text.partition(": ")[2]) == 1000
    assert told("x" * 1000).endswith(": " + "x" * 1000)
    page = "<p>" + "x" * 5000 + "</p>"
    assert told(page).endswith("x…")
    assert len(told({"foo": "x" * 5000})) < 1100


def test_what_is_no_event_is_quoted_from_its_start() -> None:
    failure = undecodable_event(b"\xff{nonsense" + b"x" * 500, ValueError("no JSON"))
    assert failure.kind is TRANSIENT
    assert "(no JSON)" in failure.message
    assert "\ufffd{nonsense" in failure.message
    assert len(failure.message) < 300


# --- exceptions of an SDK, raised by it ---------------------------------------------------------


@asynccontextmanager
async def client(url: str, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    settings.setdefault("timeout", 10)
    sdk = openai.AsyncOpenAI(api_key="sk-canary", base_url=url, max_retries=0, **settings)
    async with sdk:
        yield sdk


async def raised_by(sdk: openai.AsyncOpenAI) -> Exception:
    """What it raises when it is asked for a stream and the stream is read."""
    create = sdk.chat.completions.with_streaming_response.create
    try:
        async with create(model="m", messages=[], stream=True) as response:
            async for _ in response.iter_bytes():
                pass
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


async def raised(answer: Answer, **settings: Any) -> tuple[str, Failure]:
    """The name of the exception that the SDK raises for this answer, and what it means."""
    async with ByteServer([answer]) as server, client(server.url, **settings) as sdk:
        error = await raised_by(sdk)
    failure = failure_of_sdk(error)
    assert "sk-canary" not in failure.message
    return type(error).__name__, failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "name", "kind"),
    [
        (400, "BadRequestError", FATAL),
        (401, "AuthenticationError", FATAL),
        (403, "PermissionDeniedError", FATAL),
        (404, "NotFoundError", FATAL),
        (409, "ConflictError", TRANSIENT),
        (413, "APIStatusError", OVERFLOW),
        (422, "UnprocessableEntityError", FATAL),
        (429, "RateLimitError", LIMITED),
        (500, "InternalServerError", TRANSIENT),
        (529, "InternalServerError", LIMITED),
    ],
)
async def test_a_status(status: int, name: str, kind: StreamErrorKind) -> None:
    body = b'{"error": {"message": "because", "type": "x", "code": null}}'
    headers = {**JSON, "Retry-After": "3"}
    assert await raised(Answer(status=status, headers=headers, body=body)) == (
        name,
        Failure(kind, f"the server answered {status}: because", 3.0, status=status),
    )


@pytest.mark.slow
async def test_a_status_with_a_code_that_says_more() -> None:
    body = b'{"error": {"message": "too much", "code": "context_length_exceeded"}}'
    _, failure = await raised(Answer(status=400, headers=JSON, body=body))
    assert failure == Failure(OVERFLOW, "the server answered 400: too much", status=400)


@pytest.mark.slow
async def test_a_status_with_a_page() -> None:
    headers = {"content-type": "text/html"}
    page = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
    _, failure = await raised(Answer(status=502, headers=headers, body=page))
    text = "the server answered 502: 502 Bad Gateway"
    assert failure == Failure(TRANSIENT, text, status=502)


@pytest.mark.slow
@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'""'])
async def test_a_status_without_a_text(body: bytes) -> None:
    _, failure = await raised(Answer(status=503, headers=JSON, body=body))
    assert failure == Failure(TRANSIENT, "the server answered 503: no text", status=503)


@pytest.mark.slow
async def test_a_refused_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with client(f"http://127.0.0.1:{port}") as sdk:
        error = await raised_by(sdk)
    assert isinstance(error, openai.APIConnectionError)
    failure = failure_of_sdk(error)
    assert failure.kind is TRANSIENT
    assert failure.message.startswith("the connection failed: ConnectError: ")


@contextmanager
def crowded() -> Iterator[str]:
    """The address of a server whose queue is full: who connects hears nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        try:
            for connection in waiting:
                connection.setblocking(False)
                connection.connect_ex(server.getsockname())
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            for connection in waiting:
                connection.close()


@pytest.mark.slow
async def test_a_connection_that_does_not_stand_in_time() -> None:
    with crowded() as url:
        async with client(url, timeout=openai.Timeout(10, connect=0.05)) as sdk:
            error = await raised_by(sdk)
    assert isinstance(error, openai.APITimeoutError)
    failure = failure_of_sdk(error)
    assert failure.kind is TRANSIENT
    assert isinstance(failure.cause, StreamTimeout)
    assert failure.cause.phase == "connect"
    assert failure.message == str(failure.cause) == "the connection was not established in time"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "read", "name"), [(None, 0.05, "APITimeoutError"), (200, 0.5, "ReadTimeout")]
)
async def test_a_server_that_falls_silent(status: int | None, read: float, name: str) -> None:
    """Before its headers the SDK says so; behind them the HTTP library does."""
    body = b"" if status is None else b"data: 1\n\n"
    answer = Answer(status=status, body=body, hold=True)
    raised_name, failure = await raised(answer, timeout=openai.Timeout(10, read=read))
    assert raised_name == name
    assert failure.kind is TRANSIENT
    assert isinstance(failure.cause, StreamTimeout)
    assert failure.cause.phase == "idle"
    assert failure.message == str(failure.cause)


@pytest.mark.slow
@pytest.mark.parametrize("status", [None, 200])
@pytest.mark.parametrize("ending", ["reset", "close"])
async def test_a_connection_that_breaks(status: int | None, ending: str) -> None:
    body = b"" if status is None else b"data: 1\n\n"
    answer = Answer(
        status=status,
        body=body,
        reset=ending == "reset",
        cut_after=len(body) if ending == "close" else None,
    )
    name, failure = await raised(answer)
    assert name == "APIConnectionError" or status == 200
    assert failure.kind is TRANSIENT
    named = "ReadError" if ending == "reset" else "RemoteProtocolError"
    assert failure.message.startswith(f"the connection failed: {named}")
    assert failure.cause is None


@pytest.mark.parametrize(
    "error", [ConnectionResetError("gone"), BrokenPipeError(), OSError(5, "io")]
)
def test_an_error_of_the_system(error: Exception) -> None:
    failure = failure_of_sdk(error)
    assert failure.kind is TRANSIENT
    assert failure.message.startswith(f"the connection failed: {type(error).__name__}")


@pytest.mark.parametrize("status", [200, None])
def test_an_error_event_that_an_sdk_raises(status: int | None) -> None:
    class APIError(Exception):
        def __init__(self, text: str, body: Any) -> None:
            super().__init__(text)
            self.status_code = status
            self.body = body

    failure = failure_of_sdk(APIError("busy", {"message": "busy", "type": "overloaded_error"}))
    assert failure == Failure(LIMITED, "the server failed in the middle of the stream: busy")
    failure = failure_of_sdk(APIError("it broke", None))
    assert failure == Failure(TRANSIENT, "the server failed in the middle of the stream: it broke")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (TypeError("not a string"), "TypeError: not a string"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (openai.OpenAIError("no credentials"), "OpenAIError: no credentials"),
    ],
)
def test_an_unknown_exception_is_fatal_and_named(error: Exception, named: str) -> None:
    assert failure_of_sdk(error) == Failure(FATAL, f"the request failed: {named}")


# --- and a transport never raises for what a server says ----------------------------------------

DEEP = b"[" * 500 + b"]" * 500


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        Answer(
            status=400, headers=JSON, body=b'{"error": {"message": "no", "details": %b}}' % DEEP
        ),
        Answer(status=400, headers=JSON, body='{"error": {"message": "no", "code": "²"}}'.encode()),
        Answer(body=b'data: {"error": {"message": "no", "details": %b}}\n\n' % DEEP),
        Answer(body='data: {"error": {"message": "no", "code": "²"}}\n\n'.encode()),
    ],
    ids=["deep", "digit", "deep in a stream", "digit in a stream"],
)
async def test_a_body_of_ill_will_is_told_like_any_other(answer: Answer) -> None:
    request = StreamRequest(system_prompt="", messages=(UserMessage("hi"),))
    async with ByteServer([answer]) as server:
        transport = OpenAIChat("m", base_url=server.url, retry=RetryPolicy(attempts=1))
        [event] = [event async for event in transport(request, CancellationToken())]
        await transport.aclose()
    assert isinstance(event, Error)
    assert event.message.endswith(": no")
