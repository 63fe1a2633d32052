"""A gateway: serves models to many clients, while the providers' keys stay on one host.

    # gateway_app.py, run by: uvicorn gateway_app:app --host 0.0.0.0 --port 8000
    app = gateway(
        {"fast": connect("openai:gpt-5-mini"), "good": connect("anthropic:claude-sonnet-5")},
        tokens={"alice": os.environ["ALICE_TOKEN"]},
    )

    # anywhere else
    stream = ProxyStream("https://models.example.com", token, model="good")

It is an ASGI app. ``POST /v1/stream`` takes a request as JSON and answers with server-sent events,
one for each event of the model, sent without delay. Comments keep the connection alive while the
model is silent. ``GET /v1/models`` lists the models. ``/health`` and ``/openapi.json`` need no
token. The rules:

- if a client disconnects, or does not read for ``client_timeout`` seconds, the gateway cancels the
  transport's signal and closes its stream at once;
- every answer ends with one terminal event, whatever the transport does. An exception is logged
  with an incident number; the client gets only the number;
- on SIGTERM, Ctrl-C or the end of the app's lifespan the gateway rejects new calls and lets running
  ones finish. After ``drain_timeout`` seconds it ends the rest with an error that names the reason.
  ``app.state.gateway.drain()`` starts this earlier;
- without tokens (``tokens=None``) only clients on the same machine are served, and no requests that
  a proxy forwards;
- of a call's ``provider_extras`` only the fields in ``extras`` are allowed, `SAFE_EXTRAS` by
  default. A call with any other field is rejected before the provider is called.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import signal as signals
import threading
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from clark_agent._extras import load_extra
from clark_agent._ids import random_id
from clark_agent.cancellation import CancellationToken
from clark_agent.errors import ConfigError, DecodeError
from clark_agent.gateway.docs import ErrorDetail, ErrorReply, Health, Models, describe
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    MessageAssembler,
    StreamErrorKind,
    StreamEvent,
    StreamFn,
)
from clark_agent.transports.http.redaction import Redactor
from clark_agent.transports.stream_json import StreamCall, decode_call, encode_event
from clark_agent.types import StopReason

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

__all__ = ["SAFE_EXTRAS", "Gateway", "gateway"]

logger = logging.getLogger(__name__)

_ONLY = "default"  # the name of a single model

SAFE_EXTRAS: frozenset[str] = frozenset(
    [
        "temperature",
        "top_p",
        "topP",
        "top_k",
        "topK",
        "min_p",
        "seed",
        "stop",
        "stop_sequences",
        "stopSequences",
        "presence_penalty",
        "presencePenalty",
        "frequency_penalty",
        "frequencyPenalty",
        "repetition_penalty",
        "reasoning",
        "reasoning_effort",
        "thinking",
        "thinking_config",
        "thinkingConfig",
        "verbosity",
        "text",
        "output_config",
        "response_format",
        "response_mime_type",
        "responseMimeType",
        "response_schema",
        "responseSchema",
        "response_json_schema",
        "responseJsonSchema",
        "tool_choice",
        "parallel_tool_calls",
    ]
)
"""The fields of ``provider_extras`` that a gateway's callers may set by default: options for
sampling, thinking and formats. Fields that select the model, store data, affect billing or run
tools at the provider are not included."""


def gateway(
    stream: StreamFn | Mapping[str, StreamFn],
    *,
    tokens: Mapping[str, str] | Iterable[str] | None,
    extras: Iterable[str] | None = SAFE_EXTRAS,
    max_request_bytes: int = 32 << 20,
    max_concurrent: int = 100,
    keep_alive: float = 15.0,
    client_timeout: float = 60.0,
    drain_timeout: float = 30.0,
) -> Starlette:
    """Create an ASGI app that serves one transport, or several by name, to callers with a token.

    ``tokens`` are the secrets; a mapping also gives their names for logs. None allows access
    without a token, from this machine only. ``extras`` are the fields of ``provider_extras`` that
    callers may set (``SAFE_EXTRAS | {"metadata"}`` allows one more); None allows all, including the
    model's name. ``max_concurrent`` streams may run at once for each token. After ``keep_alive``
    seconds without an event, a comment is sent. ``client_timeout`` is how many seconds a client may
    take to send its request, or to read what it was sent.
    """
    load_extra("starlette", "gateway", "gateway()")
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    limits = _Limits(max_request_bytes, max_concurrent, keep_alive, client_timeout, drain_timeout)
    callers = _Callers(tokens, max_concurrent)
    gate = Gateway(_models(stream), callers, limits, _allowed(extras))
    app = Starlette(
        routes=[
            Route("/v1/stream", _StreamEndpoint(gate), methods=["POST"]),
            Route("/v1/models", gate.get_models),
            Route("/health", gate.get_health),
            Route("/openapi.json", gate.get_description),
        ],
        exception_handlers={_Refused: _refusal_response, HTTPException: _http_error_response},
        lifespan=gate.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.gateway = gate
    return app


# --- settings and callers ---------------------------------------------------------------------


class _Limits(Struct, frozen=True):
    max_request_bytes: int
    max_concurrent: int
    keep_alive: float
    client_timeout: float
    drain_timeout: float

    def __post_init__(self) -> None:
        for name in ("max_request_bytes", "max_concurrent"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value!r}")
        for name in ("keep_alive", "client_timeout", "drain_timeout"):
            seconds: Any = getattr(self, name)
            least = 0 if name == "drain_timeout" else 0.001
            is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
            if not is_number or not least <= seconds < float("inf"):
                raise ConfigError(f"{name} must be a number of seconds, not {seconds!r}")


def _models(stream: StreamFn | Mapping[str, StreamFn]) -> dict[str, StreamFn]:
    models: dict[Any, Any] = dict(stream) if isinstance(stream, Mapping) else {_ONLY: stream}
    if not models:
        raise ConfigError("gateway() needs at least one transport")
    for name, model in models.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of a model must be a non-empty string, not {name!r}")
        if not callable(model):
            raise ConfigError(f"gateway() serves transports, not {model!r}")
    return models


_LONGEST_NAME = 100


def _allowed(extras: Iterable[str] | None) -> frozenset[str] | None:
    if extras is None:
        return None
    names: Any = () if isinstance(extras, str) else extras
    allowed = frozenset(names)
    if isinstance(extras, str) or not all(isinstance(name, str) for name in allowed):
        raise ConfigError(f"extras must be the names of fields, not {extras!r}")
    return allowed


class _Callers:
    """The known callers, and the number of running calls of each."""

    def __init__(
        self, tokens: Mapping[str, str] | Iterable[str] | None, max_concurrent: int
    ) -> None:
        self.is_open = tokens is None
        self.secrets = _named_secrets(tokens)
        self._digests = [(name, _digest(secret)) for name, secret in self.secrets.items()]
        self._running: Counter[str] = Counter()
        self._most = max_concurrent

    def identify(self, scope: Scope) -> str:
        """Return the caller's name. Raises `_Refused` if access is not allowed."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if self.is_open:
            _check_loopback(scope.get("client"), headers)
            return "local"
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, secret = given.partition(b" ")
        digest = sha256(secret.strip(b" ")).digest()
        # Compare with every token, by digests of equal length, so that the time taken reveals
        # nothing about the tokens.
        found = [name for name, known in self._digests if hmac.compare_digest(digest, known)]
        if scheme.lower() == b"bearer" and found:
            return found[0]
        text = "unknown token" if given else "missing token: send Authorization: Bearer …"
        raise _Refused(401, "unauthorized", text, headers={"WWW-Authenticate": "Bearer"})

    @contextmanager
    def slot(self, caller: str) -> Generator[None]:
        """Occupy one of the caller's concurrent calls. Raises `_Refused` if all are in use."""
        if self._running[caller] >= self._most:
            text = f"this token already has {self._most} running streams, which is its limit"
            raise _Refused(429, "too_many_streams", text, headers={"Retry-After": "1"})
        self._running[caller] += 1
        try:
            yield
        finally:
            self._running[caller] -= 1


def _named_secrets(tokens: Mapping[str, str] | Iterable[str] | None) -> dict[str, str]:
    if tokens is None:
        return {}
    if isinstance(tokens, (str, bytes)):
        raise ConfigError("tokens must be a list of secrets, or a mapping of names to secrets")
    if isinstance(tokens, Mapping):
        named = dict(tokens)
    else:
        named = {f"token {number}": secret for number, secret in enumerate(tokens, start=1)}
    if not named:
        raise ConfigError("tokens is empty: tokens=None opens the gateway to this machine only")
    for name, secret in named.items():
        if not isinstance(secret, str) or not secret.isascii() or not _is_one_word(secret):
            raise ConfigError(f"the token of {name!r} must be visible ASCII characters")
    if len(set(named.values())) < len(named):
        raise ConfigError("two callers have the same token")
    return named


def _is_one_word(text: str) -> bool:
    return bool(text) and text.isprintable() and " " not in text


def _digest(secret: str) -> bytes:
    return sha256(secret.encode()).digest()


# Headers that proxies add, and that servers such as uvicorn may trust for the client's address.
_FORWARDING = re.compile(
    rb"(x-)?(original-)?forwarded(-.*)?|x-original-(host|url|uri)|x-real-ip|x-remote-(addr|ip)|"
    rb"(.*-)?client-ip|.*-connecting-ip(v6)?|x-proxyuser-ip|x-envoy-.*|x-amzn-trace-id|via"
)
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9.-]+))(?::[0-9]{1,5})?", re.IGNORECASE)


def _check_loopback(client: Any, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Allow only requests from this machine, addressed to a loopback name.

    The ``Host`` is checked because a page of another site, open in a local browser, can send
    requests under that site's name. Forwarded requests are rejected because a proxy on this machine
    sends them for clients elsewhere.
    """
    given = [(name.lower(), value) for name, value in headers]
    hosts = [value.decode("latin-1") for name, value in given if name == b"host"]
    is_forwarded = any(_FORWARDING.fullmatch(name) for name, _ in given)
    is_ours = client is None or _is_loopback(client[0])
    if is_ours and not is_forwarded and len(hosts) == 1 and _is_loopback(_name_in(hosts[0])):
        return
    why = ", without a proxy" if is_forwarded else ""
    text = f"without tokens, this gateway serves only its own machine{why}"
    raise _Refused(403, "forbidden", text)


def _name_in(host: str) -> str:
    """The name in a ``Host`` header, without the port; empty if the header is malformed."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]) if found else ""


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


# --- the app ----------------------------------------------------------------------------------


class Gateway:
    """The state of an app made by `gateway`; it is ``app.state.gateway``."""

    def __init__(
        self,
        models: dict[str, StreamFn],
        callers: _Callers,
        limits: _Limits,
        extras: frozenset[str] | None = SAFE_EXTRAS,
    ) -> None:
        self.models = models
        self._extras = extras
        self.limits = limits
        self.is_draining = False
        self._callers = callers
        self._streams: set[_Stream] = set()
        secrets = [*callers.secrets.values(), *_secrets_of(*models.values())]
        self._redactor = Redactor(secrets)
        description = describe(is_open=callers.is_open, has_several=len(models) > 1, extras=extras)
        self._description = msgspec.json.encode(description)

    @property
    def streams(self) -> int:
        """The number of running streams."""
        return len(self._streams)

    def drain(self) -> None:
        """Reject new calls, and end running ones after ``drain_timeout``. Call it on the loop."""
        if not self.is_draining:
            self.is_draining = True
            logger.info("draining: %d streams are running", self.streams)
            asyncio.get_running_loop().call_later(self.limits.drain_timeout, self._cut_off)

    def _cut_off(self) -> None:
        if self.is_draining:
            for stream in self._streams:
                stream.cut_off()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        """Install the signal handlers at startup, and drain at shutdown."""
        loop = asyncio.get_running_loop()
        self.is_draining = False
        with _before_signal_handlers(lambda: loop.call_soon_threadsafe(self.drain)):
            yield
        self.drain()
        tasks = [stream.task for stream in self._streams]
        if tasks:
            await asyncio.wait(tasks, timeout=self.limits.drain_timeout + _CLOSE_SECONDS)

    # --- one call -------------------------------------------------------------------------------

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ``POST /v1/stream``."""
        caller = self._callers.identify(scope)
        self._check_running()
        self._check_headers(dict(scope["headers"]))
        with self._callers.slot(caller):
            try:
                name, stream = await self._begin(receive)
            except _ClientGone:
                return
            self._streams.add(stream)
            try:
                how = await stream.run(receive, send)
                logger.info("%s called %s: %s", caller, name, how)
            finally:
                self._streams.discard(stream)

    async def _begin(self, receive: Receive) -> tuple[str, _Stream]:
        call = _decoded(await self._body(receive))
        self._check_running()
        name = self._model(call.model)
        self._check_extras(call.provider_extras)
        signal = CancellationToken()
        try:
            events = self.models[name](call.to_request(), signal)
        except Exception as error:
            raise _Refused(500, "internal", self.fault(error)) from None
        return name, _Stream(events, signal, self.limits, self.fault)

    def _check_running(self) -> None:
        if self.is_draining:
            text = "the gateway is shutting down"
            raise _Refused(503, "unavailable", text, headers={"Retry-After": "2"})

    def _check_extras(self, extras: Any) -> None:
        if extras is None or self._extras is None:
            return
        if not isinstance(extras, dict):
            text = "provider_extras must be an object"
            raise _Refused(400, "invalid_request", text, path="$.provider_extras")
        for name in extras:
            if name not in self._extras:
                shown = name[:_LONGEST_NAME]
                known = ", ".join(sorted(self._extras)) or "none"
                text = f"provider_extras may not have {shown!r}; this gateway allows {known}"
                path = f"$.provider_extras.{shown}"
                raise _Refused(400, "extra_not_allowed", text, path=path)

    def _check_headers(self, headers: Mapping[bytes, bytes]) -> None:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise _Refused(415, "unsupported_media_type", "the body must be application/json")
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise _Refused(415, "unsupported_media_type", "the body must not be compressed")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.limits.max_request_bytes:
            raise self._too_large()

    async def _body(self, receive: Receive) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(self.limits.client_timeout):
                    message = await receive()
            except TimeoutError:
                raise _Refused(408, "timeout", "the body did not arrive in time") from None
            if message["type"] == "http.disconnect":
                raise _ClientGone
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self.limits.max_request_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return b"".join(pieces)

    def _too_large(self) -> _Refused:
        text = f"the body is larger than {self.limits.max_request_bytes:,} bytes"
        return _Refused(413, "too_large", text)

    def _model(self, wanted: str | None) -> str:
        if wanted is None:
            if len(self.models) == 1:
                return next(iter(self.models))
            text = "missing model: this gateway has several; GET /v1/models lists them"
            raise _Refused(400, "invalid_request", text, path="$.model")
        if wanted not in self.models:
            text = f"unknown model {wanted!r}; GET /v1/models lists the models"
            raise _Refused(404, "unknown_model", text, path="$.model")
        return wanted

    def fault(self, error: BaseException) -> str:
        """Log an unexpected exception and return the text for the client."""
        incident = random_id()[:8]
        trace = "".join(traceback.format_exception(error))
        logger.error("incident %s\n%s", incident, self._redactor.text(trace))
        return f"the gateway failed; see its log for incident {incident}"

    # --- the other endpoints --------------------------------------------------------------------

    async def get_models(self, request: Request) -> Response:
        """Answer ``GET /v1/models``."""
        self._callers.identify(request.scope)
        return _json(200, msgspec.json.encode(Models(tuple(self.models))))

    async def get_health(self, request: Request) -> Response:
        """Answer ``GET /health``."""
        if self.is_draining:
            body = msgspec.json.encode(Health("draining", self.streams))
            return _json(503, body, {"Retry-After": "2"})
        return _json(200, msgspec.json.encode(Health("ok", self.streams)))

    async def get_description(self, request: Request) -> Response:
        """Answer ``GET /openapi.json``."""
        return _json(200, self._description)


class _StreamEndpoint:
    """Makes `Gateway.serve` an ASGI app: a route treats a bound method as a request handler."""

    def __init__(self, gate: Gateway) -> None:
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gate.serve(scope, receive, send)


def _decoded(body: bytes) -> StreamCall:
    try:
        return decode_call(body)
    except DecodeError as error:
        raise _Refused(400, "invalid_request", error.reason, path=error.path) from None


def _secrets_of(*streams: Any) -> list[str]:
    """Return the known secrets of these transports and of the transports that they wrap."""
    secrets: list[str] = []
    for stream in streams:
        redactor: Any = getattr(stream, "_redactor", None)
        secrets += redactor.secrets if isinstance(redactor, Redactor) else ()
        inner = [getattr(stream, "inner", None), *getattr(stream, "transports", ())]
        secrets += _secrets_of(*[part for part in inner if callable(part)])
    return secrets


@contextmanager
def _before_signal_handlers(react: Callable[[], object]) -> Generator[None]:
    """Call ``react`` on SIGTERM and Ctrl-C, before the existing handlers, which still run.

    A server ends the app's lifespan only after every connection is closed. That is too late to
    reject new calls.
    """
    replaced: dict[signals.Signals, tuple[Any, Any]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signals.SIGTERM, signals.SIGINT):
            before = signals.getsignal(number)
            if callable(before):
                ours = _before(react, before)
                replaced[number] = (ours, before)
                signals.signal(number, ours)
    try:
        yield
    finally:
        for number, (ours, before) in replaced.items():
            if signals.getsignal(number) is ours:
                signals.signal(number, before)


def _before(react: Callable[[], object], handler: Callable[..., Any]) -> Callable[..., Any]:
    def handle(number: int, frame: Any) -> Any:
        react()
        return handler(number, frame)

    return handle


# --- refusals ---------------------------------------------------------------------------------


class _Refused(Exception):
    """Raised to reject a request; holds the status and the error to send."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        path: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(kind, message, path)
        self.headers = headers


async def _refusal_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, _Refused)
    return _json(error.status, msgspec.json.encode(ErrorReply(error.detail)), error.headers)


async def _http_error_response(request: Request, error: Any) -> Response:
    """Answer what Starlette itself rejects: an unknown path, a method that is not allowed."""
    kind = "method_not_allowed" if error.status_code == 405 else "not_found"
    body = msgspec.json.encode(ErrorReply(ErrorDetail(kind, str(error.detail))))
    return _json(error.status_code, body, error.headers)


def _json(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(body, status, headers, "application/json")


# --- a stream ---------------------------------------------------------------------------------

_CLOSE_SECONDS = 5.0  # how long a stream may take to end after it was cancelled
_GOODBYE_SECONDS = 1.0  # how long a client may take to read the last event
_KEEP_ALIVE = b": keep-alive\n\n"
_SHUTTING_DOWN = "the gateway is shutting down and ended the answer early"
_UNFINISHED = "the stream ended without an answer"
_BEGINNING: dict[str, Any] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),  # a reverse proxy must not buffer the events
    ],
}


class _ClientGone(Exception):
    """Raised when the client has disconnected."""


class _Stream:
    """One call: forwards a transport's events until they end or the client disconnects.

    One task reads the transport and writes to the client, another one watches the client. The first
    to end stops the other.
    """

    task: asyncio.Task[Any]

    def __init__(
        self,
        events: AsyncIterator[StreamEvent],
        signal: CancellationToken,
        limits: _Limits,
        fault: Callable[[BaseException], str],
    ) -> None:
        self._events = events
        self._signal = signal
        self._limits = limits
        self._fault = fault
        self._assembler = MessageAssembler()
        self._has_ended = False
        self._is_cut = False
        self._lock = asyncio.Lock()  # both tasks write: events and keep-alive comments
        self._is_writing = False
        self._time = asyncio.get_running_loop().time
        self._wrote_at = self._time()
        self._pumping: asyncio.Task[None] | None = None

    async def run(self, receive: Receive, send: Send) -> str:
        """Serve the client. Returns how the call ended, for the log."""
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        loop = asyncio.get_running_loop()
        self._pumping = loop.create_task(self._pump(send))
        watching = loop.create_task(self._watch(receive, send))
        try:
            await asyncio.wait({self._pumping, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            how = await self._end(self._pumping, watching, send)
        return how

    def cut_off(self) -> None:
        """End the stream early. The client gets an error event."""
        self._is_cut = True
        self._signal.cancel(_SHUTTING_DOWN)
        if self._pumping is not None:
            self._pumping.cancel()

    async def _pump(self, send: Send) -> None:
        try:
            await send(_BEGINNING)
            async for event in self._events:
                if self._signal.cancelled:
                    return
                await self._write(b"data: %b\n\n" % encode_event(event), send)
                if isinstance(event, Chunk):
                    self._assembler.feed(event.chunk)
                elif isinstance(event, (Done, Error)):
                    self._has_ended = True
                    return
        finally:
            if (close := getattr(self._events, "aclose", None)) is not None:
                await close()

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Send keep-alive comments until the client disconnects or stops reading; then return."""
        while True:
            limits = self._limits
            patience = limits.client_timeout if self._is_writing else limits.keep_alive
            try:
                async with asyncio.timeout_at(self._wrote_at + patience):
                    message = await receive()
            except TimeoutError:
                silent = self._time() - self._wrote_at
                if self._is_writing and silent >= limits.client_timeout:
                    logger.warning("dropped a client that did not read for %g s", silent)
                    return
                if not self._is_writing and silent >= limits.keep_alive:
                    async with asyncio.timeout(limits.client_timeout):
                        await self._write(_KEEP_ALIVE, send)
            else:
                if message["type"] == "http.disconnect":
                    return

    async def _write(self, data: bytes, send: Send, *, more: bool = True) -> None:
        async with self._lock:
            self._is_writing = True
            self._wrote_at = self._time()
            try:
                await send({"type": "http.response.body", "body": data, "more_body": more})
            except OSError as error:
                raise _ClientGone from error
            finally:
                self._is_writing = False
                self._wrote_at = self._time()

    async def _end(
        self, pumping: asyncio.Task[None], watching: asyncio.Task[None], send: Send
    ) -> str:
        """Stop both tasks and the call. Send the terminal event if the client is still there."""
        is_gone = watching.done()
        self._is_cut = self._is_cut or not (is_gone or pumping.done())
        self._signal.cancel("the call to the gateway has ended")
        pumping.cancel()
        watching.cancel()
        failures = await asyncio.gather(pumping, watching, return_exceptions=True)
        last = self._terminal_event(failures[0], is_gone=is_gone)
        if is_gone or isinstance(failures[0], _ClientGone):
            return "the client disconnected"
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS):
                if last is not None:
                    await self._write(b"data: %b\n\n" % encode_event(last), send)
                await self._write(b"", send, more=False)
        except (TimeoutError, _ClientGone):
            return "the client disconnected"
        return last.message if last is not None else "answered"

    def _terminal_event(self, failure: BaseException | None, *, is_gone: bool) -> Error | None:
        """Return the terminal event if the transport sent none. Logs the transport's exception."""
        is_fault = failure is not None and not isinstance(failure, _ClientGone)
        if isinstance(failure, asyncio.CancelledError):
            is_fault = not (self._is_cut or is_gone)
        if failure is not None and is_fault:
            kind, text = StreamErrorKind.FATAL, self._fault(failure)
        elif self._is_cut:
            kind, text = StreamErrorKind.TRANSIENT, _SHUTTING_DOWN
        else:
            kind, text = StreamErrorKind.EMPTY, _UNFINISHED
        if self._has_ended:
            return None
        partial = self._assembler.message(StopReason.ERROR, error_message=text)
        return Error(partial, kind, text)
