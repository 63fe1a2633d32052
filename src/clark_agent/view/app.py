"""The page of runs as an ASGI app: `view_app`.

    from clark_agent.run_log import SqliteStore
    from clark_agent.view.app import view_app

    app = view_app(SqliteStore("runs.db"), token="…")      # uvicorn app:app
    # http://127.0.0.1:8000/?token=…

It only shows runs, unless ``can_write`` is set. What it leaves in a store then is what readers
leave: a search in a database completes its index, and while a run is followed, there may be a small
file for its deltas beside the log. `clark_agent.view.shapes` lists its addresses. Logs are read in
threads, and in pages; see `clark_agent.view.index`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from clark_agent._extras import load_extra
from clark_agent._ids import random_id
from clark_agent._text import describe
from clark_agent.errors import (
    AlreadyDecided,
    ClarkAgentError,
    ConfigError,
    DecisionNotApplicable,
    DecodeError,
    InvalidContinuationError,
    RequestExpired,
    RequestNotFound,
    RunBusy,
    RunNotFound,
    RunStoreError,
)
from clark_agent.prices import Price
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog, store_of
from clark_agent.view.actions import Actions, NotPossible
from clark_agent.view.agents import AgentRuns, RunAgents
from clark_agent.view.guard import Guard, OneTimeTokens, Refused
from clark_agent.view.page import CONTENT_TYPES, STATIC
from clark_agent.view.reading import MissingPart, Reading
from clark_agent.view.requests import TooLarge
from clark_agent.view.shapes import Cancel, Decide, Failure, ForkRun, Steer

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from clark_agent.agent import Agent

__all__ = ["View", "view_app"]

logger = logging.getLogger(__name__)

_MOST_BODY = 1 << 20
_MOST_STREAMS = 100
_T = TypeVar("_T")


def view_app(
    store: RunStore | RunLog,
    *,
    token: str | None,
    hosts: Collection[str] | None = (),
    can_write: bool = False,
    agent: Agent[Any, Any] | RunAgents | None = None,
    deps: Any = None,
    prices: Mapping[str, Price] | None = None,
    where: str = "",
    by: str | None = None,
) -> Starlette:
    """Create an ASGI app that shows the runs of a store.

    Args:
        store: Where the runs are.
        token: The secret that the first address must have, as ``?token=…``. None if the host that
            mounts the app checks who may use it.
        hosts: Names that the app answers under, besides ``localhost`` and addresses. None allows
            all: only behind a proxy that checks the name.
        can_write: Whether runs can be steered, cancelled and decided; and with an ``agent`` forked,
            resumed and replayed.
        agent: What runs these: an `Agent` with its ``deps``, or `RunAgents`.
        prices: Prices by model, before those of genai-prices.
        where: What to call the store.
        by: Who decides, as the log is to say.
    """
    load_extra("starlette", "view", "view_app()")
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Route

    if token is not None and len(token) < 16:
        raise ConfigError("view_app: token must have at least 16 characters")
    runs: Any = agent
    if agent is not None and not hasattr(agent, "for_run"):
        runs = AgentRuns(runs, deps=deps)
    csrf = secrets.token_urlsafe(24)
    view = View(
        store_of(store),
        runs,
        csrf=csrf if can_write else "",
        prices=dict(prices or {}),
        where=where,
        by=by,
    )
    reading = ("session", "runs", "waiting", "diff", "run", "turns", "items", "piece", "image")
    acting = ("steer", "cancel", "decide", "resume", "fork", "replay")

    def routes(names: Collection[str], method: str) -> list[Route]:
        return [
            Route(f"/api/{name}", _answering(getattr(view, name)), methods=[method])
            for name in names
        ]

    app = Starlette(
        routes=[
            Route("/", view.page),
            Route("/static/{name}", view.static),
            *routes((*reading, "request", "events"), "GET"),
            *routes(acting, "POST"),
        ],
        middleware=[
            Middleware(
                Guard, token=token, hosts=hosts, csrf=csrf, can_write=can_write, once=view.once
            )
        ],
        exception_handlers={404: _not_found, 405: _not_found, Exception: _fault},
        lifespan=view.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.view = view
    return app


# --- answers ----------------------------------------------------------------------------------

_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (RunNotFound, 404, "not_found"),
    (RequestNotFound, 404, "not_found"),
    (MissingPart, 404, "not_found"),
    (AlreadyDecided, 409, "already_decided"),
    (RequestExpired, 409, "expired"),
    (DecisionNotApplicable, 409, "not_applicable"),
    (RunBusy, 409, "busy"),
    (NotPossible, 409, "not_possible"),
    (InvalidContinuationError, 409, "not_possible"),
    (DecodeError, 422, "damaged"),
    (ConfigError, 400, "wrong"),
    (ValueError, 400, "wrong"),
    (TypeError, 400, "wrong"),
    (TooLarge, 413, "too_large"),
    (RunStoreError, 503, "store"),
    (ClarkAgentError, 500, "failed"),
)


def failure_of(error: Exception) -> tuple[int, Failure]:
    """Return the status and the body for an error. What is not expected is logged."""
    if isinstance(error, Refused):
        return error.status, error.failure
    for kind, status, word in _STATUS:
        if isinstance(error, kind):
            return status, Failure(word, str(error) or describe(error))
    incident = random_id()[:8]
    logger.error("the page of runs failed (%s)", incident, exc_info=error)
    return 500, Failure("fault", f"an internal error, logged as {incident}")


def _json(value: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _answering(call: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
    """Return an endpoint that answers with what a function returns, or with its error."""

    async def endpoint(request: Request) -> Response:
        from starlette.responses import Response

        try:
            found = await call(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            status, failure = failure_of(error)
            return _json(failure, status)
        return found if isinstance(found, Response) else _json(found)

    return endpoint


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    text = f"there is no {request.method} {request.url.path} here"
    return _json(Failure("not_found", text), status)


async def _fault(request: Request, error: Exception) -> Response:
    status, failure = failure_of(error)
    return _json(failure, status)


def _event_stream(frames: AsyncGenerator[bytes], held: ExitStack) -> Response:
    """Return an answer of server-sent events, at whose end ``held`` is closed: also if the client
    has left before the first one, and ``frames`` were never begun.
    """
    from starlette.responses import StreamingResponse

    class EventStream(StreamingResponse):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            with held:
                await super().__call__(scope, receive, send)

    headers = {"x-accel-buffering": "no"}
    return EventStream(frames, headers=headers, media_type="text/event-stream")


def _whole(request: Request, name: str, default: int | None, least: int, most: int) -> int | None:
    """Return a parameter that is a whole number. Raises `ValueError`."""
    given = request.query_params.get(name)
    if given is None or given == "":
        return default
    number = int(given) if given.isascii() and given.isdecimal() and len(given) < 19 else -1
    if not least <= number <= most:
        raise ValueError(f"{name} must be a number from {least} to {most}, not {given[:40]!r}")
    return number


_LARGEST = (1 << 53) - 1
"""The largest number that a script in a browser has exactly."""


def _number(request: Request, name: str, default: int, least: int = 0, most: int = _LARGEST) -> int:
    found = _whole(request, name, default, least, most)
    return default if found is None else found


def _optional(request: Request, name: str) -> int | None:
    return _whole(request, name, None, 0, _LARGEST)


def _run_id(request: Request) -> str:
    """Return the id of the run that a request is about. Raises `ValueError`."""
    found = request.query_params.get("run")
    if not found:
        raise ValueError("run must be the id of a run")
    return found


async def _body(request: Request, kind: type[_T]) -> _T:
    """Read a body that is JSON, and not too large."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise Refused(415, "wrong", "the body must be application/json")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _MOST_BODY:
            raise Refused(413, "too_large", f"the body is larger than {_MOST_BODY >> 20} MB")
    try:
        return msgspec.json.decode(bytes(data), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, "wrong", f"the body is not as expected: {error}") from None


class _Nothing(msgspec.Struct):
    """A body without fields."""


# --- endpoints --------------------------------------------------------------------------------


class View:
    """The state of an app made by `view_app`; it is ``app.state.view``."""

    def __init__(
        self,
        store: RunStore,
        agents: RunAgents | None,
        *,
        csrf: str,
        prices: dict[str, Price],
        where: str,
        by: str | None,
    ) -> None:
        self.actions = Actions(store, agents, by=by)
        self.reading = Reading(store, prices=prices)
        self._agents = agents
        self._csrf = csrf
        self._where = where
        self._closing = asyncio.Event()
        self._refresh_ms = 4_000
        self.once = OneTimeTokens()
        self._streams = 0
        self._files = {
            path.name: (path, CONTENT_TYPES[path.suffix])
            for path in STATIC.iterdir()
            if path.suffix in CONTENT_TYPES
        }

    def close(self) -> None:
        """End the streams, so that the server can end. Call it on the loop."""
        self._closing.set()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        """Load prices while the page opens, and let runs go at the end."""
        self._closing = asyncio.Event()
        self.reading.prepare()
        yield
        self.close()
        await self.reading.close()
        await self.actions.close()

    # --- the page -------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return await self._file("index.html")

    async def static(self, request: Request) -> Response:
        """Its scripts and styles."""
        return await self._file(request.path_params["name"])

    async def _file(self, name: str) -> Response:
        from starlette.responses import Response

        if name not in self._files:
            return _json(Failure("not_found", f"there is no file {name!r}"), 404)
        path, kind = self._files[name]
        data = await asyncio.to_thread(path.read_bytes)
        return Response(data, headers={"content-type": kind})

    async def session(self, request: Request) -> Any:
        """What this server is and may do."""
        agents = self._agents
        return self.reading.session(
            where=self._where,
            csrf=self._csrf,
            can_run=bool(self._csrf) and self.actions.can_run,
            can_replay=bool(self._csrf) and agents is not None,
            agent=None if agents is None else agents.agent,
            model=None if agents is None else agents.model,
            refresh_ms=self._refresh_ms,
        )

    # --- reading --------------------------------------------------------------------------------

    async def runs(self, request: Request) -> Any:
        """The list of runs."""
        given = request.query_params
        return await self.reading.runs(
            q=given.get("q", "")[:1000],
            status=given.get("status") or None,
            model=given.get("model") or None,
            agent=given.get("agent") or None,
            parent=given.get("parent") or None,
            all=given.get("all") == "1",
            after=given.get("after") or None,
            limit=_number(request, "limit", 50, 1, 200),
        )

    async def run(self, request: Request) -> Any:
        """The head of a run."""
        return await self.reading.run(_run_id(request))

    async def turns(self, request: Request) -> Any:
        """The overview of a run."""
        first = _number(request, "from", 1)
        limit = _number(request, "limit", 500, 1, 1000)
        return await self.reading.turns(_run_id(request), first, limit)

    async def items(self, request: Request) -> Any:
        """A page of the timeline."""
        return await self.reading.items(
            _run_id(request),
            start=_optional(request, "from"),
            before=_optional(request, "before"),
            turn=_optional(request, "turn"),
            limit=_number(request, "limit", 100, 1, 500),
        )

    async def piece(self, request: Request) -> Any:
        """More of a text."""
        return await self.reading.piece(
            _run_id(request),
            at=_number(request, "at", 0),
            path=request.query_params.get("path", "")[:500],
            start=_number(request, "start", 0),
            length=_number(request, "length", 1 << 16, 1, 1 << 18),
        )

    async def image(self, request: Request) -> Any:
        """An image."""
        from starlette.responses import Response

        kind, data = await self.reading.image(
            _run_id(request),
            at=_number(request, "at", 0),
            path=request.query_params.get("path", "")[:500],
        )
        return Response(data, headers={"content-type": kind})

    async def request(self, request: Request) -> Any:
        """What the model saw."""
        run_id, turn = _run_id(request), _optional(request, "turn")
        if turn is None:
            raise ValueError("turn must be the number of a turn")
        return await self.reading.request(
            run_id,
            turn,
            attempt=_optional(request, "attempt"),
            first=_optional(request, "from"),
            limit=_number(request, "limit", 100, 1, 500),
            force=request.query_params.get("force") == "1",
        )

    async def waiting(self, request: Request) -> Any:
        """All open requests."""
        return await self.reading.waiting()

    async def diff(self, request: Request) -> Any:
        """Two runs side by side."""
        given = request.query_params
        if not (given.get("a") and given.get("b")):
            raise ValueError("a and b must be the ids of runs")
        return await self.reading.diff(
            given["a"],
            given["b"],
            start=_optional(request, "from"),
            limit=_number(request, "limit", 100, 1, 500),
            force=given.get("force") == "1",
        )

    async def events(self, request: Request) -> Any:
        """A run as it goes on."""
        last = request.headers.get("last-event-id") or request.query_params.get("after")
        after = -1
        if last not in (None, "", "-1"):
            assert last is not None
            if not (last.isascii() and last.isdecimal() and len(last) < 19):
                raise ValueError(f"after must be the number of a record, not {last[:40]!r}")
            after = int(last)
        with ExitStack() as held:
            held.enter_context(self._one_stream())
            frames = await self.reading.follow(_run_id(request), after, self._closing, held)
            return _event_stream(frames, held.pop_all())

    @contextmanager
    def _one_stream(self) -> Generator[None]:
        if self._streams >= _MOST_STREAMS:
            raise Refused(503, "too_many", "too many runs are followed at once")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    # --- acting ---------------------------------------------------------------------------------

    async def steer(self, request: Request) -> Any:
        """Send a message to a run."""
        given = await _body(request, Steer)
        return await self.actions.steer(_run_id(request), given)

    async def cancel(self, request: Request) -> Any:
        """End a run."""
        given = await _body(request, Cancel)
        return await self.actions.cancel(_run_id(request), given)

    async def decide(self, request: Request) -> Any:
        """Decide a request."""
        given = await _body(request, Decide)
        return await self.actions.decide(_run_id(request), given)

    async def resume(self, request: Request) -> Any:
        """Go on with a run."""
        await _body(request, _Nothing)
        return await self.actions.resume(_run_id(request))

    async def fork(self, request: Request) -> Any:
        """Start a new run from a turn of another."""
        given = await _body(request, ForkRun)
        return await self.actions.fork(_run_id(request), given)

    async def replay(self, request: Request) -> Any:
        """Replay a run."""
        await _body(request, _Nothing)
        return await self.actions.replay(_run_id(request))
