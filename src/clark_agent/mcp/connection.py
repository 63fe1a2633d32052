"""Connection: one client of one server on one event loop, connected again whenever it is lost.

Everything of the SDK runs in tasks of this module, because its cancel scopes must be left in the
task that entered them, and the code that calls a tool may continue in another one:

- each connection lives in a task of its own (`_Life`), from connecting to closing
- each request runs in a task of its own; cancelling it cancels the request at the server and
  leaves the connection as it is

While the server is away, it is tried again after half a second, then after twice as long, and so
on; at once if something needs it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from contextvars import Context, ContextVar, copy_context
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from clark_agent._extras import load_extra
from clark_agent._text import describe
from clark_agent._threads import run_in_thread
from clark_agent.engine.supervised import is_cancelled
from clark_agent.errors import McpError
from clark_agent.mcp._sdk_log import is_ours
from clark_agent.mcp._stderr import StderrTail

if TYPE_CHECKING:
    from clark_agent.mcp._sdk import Client, Hooks
    from clark_agent.mcp.link import ServerLink
    from clark_agent.mcp.watching import ResourceUpdates

__all__ = ["Connection"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0
_LONGEST_DELAY_WHEN_NEEDED = 2.0
_STABLE_SECONDS = 10.0
_CLOSE_SECONDS = 3.0
"""How long a server at a URL has to say goodbye. The SDK limits it for a program."""
_LISTEN_AGAIN = 5.0
_LIST_SECONDS = 5.0
"""How long a turn waits for a list of tools that have changed."""
_LONGEST_LIST_DELAY = 300.0
_LONGEST_PAUSE = 600.0
"""How long a question stops the clocks of several requests, if it is not known whose it is."""


class Connection:
    """A connection that is made when it is first needed and kept until `close`."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._client: Client | None = None
        self._life: _Life | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._news: asyncio.Future[None] = self._loop.create_future()
        """Done when something changes: connected, failed, closed, a person is asked."""
        self._wake = asyncio.Event()
        self._waiting = 0
        self._flights: set[_Flight] = set()
        self._people = 0
        self._questions: set[_Question] = set()
        self._attempts = 0
        self._is_closed = False
        self._is_hopeless = False
        self._used_at = self._loop.time()
        self._idle: asyncio.TimerHandle | None = None
        self.watchers: set[ResourceUpdates] = set()
        """Who wants to know of updates of resources."""
        self.problem: McpError | None = None
        """Why the server is away, if it is."""
        self.is_stale = True
        """Whether the tools of the server have changed since they were listed."""
        self.list_problem: str | None = None
        """Why they have not been listed again, although they have changed."""
        self._listing: asyncio.Task[None] | None = None
        self._list_delay = _FIRST_DELAY
        self._list_at = 0.0

    # --- for users of the connection ----------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether it is connected."""
        return self._client is not None

    @property
    def was_tried(self) -> bool:
        """Whether an attempt to connect has ended, well or not."""
        return self._attempts > 0

    async def first_attempt(self) -> McpError | None:
        """Wait until it is connected, or has failed once. Returns why it has failed."""
        self._start()
        while self._client is None and not self._attempts and not self._is_closed:
            await asyncio.wait({self._news})
        self.use()
        return None if self._client is not None else self.problem

    async def connected(self) -> Client:
        """The client; if it is away, wait for it up to ``connect_timeout``. Raises `McpError`."""
        self._start()
        if self._client is None:
            self._wake.set()
        end = self._loop.time() + self._link.server.connect_timeout
        self._waiting += 1
        try:
            while self._client is None:
                if self._is_closed:
                    raise McpError(self._link.server.name, "the connection is closed")
                if self._is_hopeless:
                    raise self._unavailable()
                left = None if self._people else end - self._loop.time()
                if left is not None and left <= 0:
                    raise self._unavailable()
                await asyncio.wait({self._news}, timeout=left)
            return self._client
        finally:
            self._waiting -= 1

    async def changed(self, *, within: float) -> None:
        """Wait until something changes, at most so many seconds."""
        await asyncio.wait({self._news}, timeout=within)

    async def lost(self, client: Client, *, within: float | None = None) -> None:
        """Wait until this is no longer the client, at most so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._client is client and not self._is_closed:
                    await asyncio.wait({self._news})

    def _unavailable(self) -> McpError:
        """Another error each time: several tasks may raise it."""
        text = "it is not connected" if self.problem is None else self.problem.text
        return McpError(self._link.server.name, text)

    async def request(
        self, work: Callable[[Client], Coroutine[Any, Any, T]], *, within: float
    ) -> T:
        """Run the request in a task of its own, ``within`` so many seconds.

        Raises `McpError`, and nothing else.
        """
        try:
            return await self._request(work, within)
        except _NotDoneError:  # so it may be sent again
            try:
                return await self._request(work, within)
            except _NotDoneError as error:
                raise error.failure from None

    async def _request(self, work: Callable[[Client], Coroutine[Any, Any, T]], within: float) -> T:
        client = self._client
        if client is None:
            client = await self.connected()
        flight = _Flight(within)
        context = copy_context()
        context.run(_current.set, flight)
        context.run(is_ours.set, True)
        self._flights.add(flight)
        if self._people:
            flight.hold()
        flight.task = _start(self._loop, work(client), context)
        flight.start()
        self._used_at = self._loop.time()
        try:
            result: T = await flight.task
            return result
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            name = self._link.server.name
            if flight.timed_out:
                text = f"no answer within {within:g} seconds"
                raise McpError(name, text, kind="timeout") from None
            raise McpError(name, "the connection was closed", kind="connection_lost") from None
        except Exception as error:
            raise self._failure_of(error, client) from None
        finally:
            flight.hold()
            self._flights.discard(flight)
            for question in self._questions:
                question.is_over(flight)

    def _failure_of(self, error: Exception, client: Client) -> Exception:
        from clark_agent.mcp import _sdk

        life = self._life
        hooks = _sdk.Hooks() if life is None or life.hooks is None else life.hooks
        failure = _sdk.failure_of_request(self._link.server.name, error, hooks)
        text = self._link.redact(failure.text)
        failure = McpError(failure.server, text, kind=failure.kind, code=failure.code)
        is_gone = _sdk.is_gone(error, client, hooks)
        if not is_gone and not _sdk.was_not_sent(error):
            return failure
        if life is not None and self._client is client:  # else another request has noticed
            self._client = None
            life.stop()
        if is_gone:
            text = "the server forgets its sessions at once"
            failure = McpError(failure.server, text, kind="protocol_error")
        return _NotDoneError(failure)

    async def list_tools(self) -> tuple[list[Any], dict[str | None, str]]:
        """The tools of the server, and those that were left out with the reason."""

        async def work(client: Client) -> tuple[list[Any], dict[str | None, str]]:
            from clark_agent.mcp import _sdk

            life = self._life
            hooks = _sdk.Hooks() if life is None or life.hooks is None else life.hooks
            return await _sdk.list_tools(client, hooks)

        return await self.request(work, within=self._link.server.timeout)

    @property
    def may_list(self) -> bool:
        """Whether to list the tools now: not during a list, or soon after one has failed."""
        is_listing = self._listing is not None and not self._listing.done()
        return not is_listing and self._loop.time() >= self._list_at

    async def list_again(self, take: Callable[[list[Any], dict[str | None, str]], None]) -> None:
        """List the tools, and wait a moment for that. Raises nothing."""
        self.is_stale = False  # before the request: a change during it counts again
        listing = self._listing = self._loop.create_task(self._list_again(take))
        await asyncio.wait({listing}, timeout=_LIST_SECONDS)
        if not listing.done():
            self.list_problem = "its tools have changed, and it takes long to list them"

    async def _list_again(self, take: Callable[[list[Any], dict[str | None, str]], None]) -> None:
        client = self._client
        try:
            take(*await self.list_tools())
        except McpError as error:
            if self._client is not client or self._is_closed:
                return  # the next connection lists them
            self.is_stale = True
            self._list_at = self._loop.time() + self._list_delay
            self._list_delay = min(2 * self._list_delay, _LONGEST_LIST_DELAY)
            self.list_problem = f"its tools have changed, and it does not list them: {error.text}"
            logger.warning("%s; its tools stay as they were", error)
        else:
            self._has_listed()

    def _has_listed(self) -> None:
        self.list_problem = None
        self._list_at, self._list_delay = 0.0, _FIRST_DELAY

    async def close(self) -> None:
        """Close the connection, and wait until nothing is left of it."""
        self.begin_to_close()
        tasks = {task for task in (self._supervisor, self._listing) if task is not None}
        if tasks:
            await asyncio.wait(tasks)

    def begin_to_close(self) -> None:
        """Make it close by itself."""
        self._is_closed = True
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        for flight in self._flights:
            flight.task.cancel()
        if self._life is not None:
            self._life.stop()
        self._wake.set()
        self._tell()

    @property
    def is_closed(self) -> bool:
        """Whether it is closed for good."""
        return self._is_closed

    # --- questions to a person ----------------------------------------------------------------

    def asking(self) -> _Asking:
        """While the block runs, a person is asked: no timeout counts."""
        return _Asking(self)

    async def elicit(self, answer: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """The answer of a person. None if every request that could need it is over.

        The clocks of these requests stop. On current connections it is one; on older ones, each of
        those that are in progress now.
        """
        flight = _current.get()
        owners = {flight} if flight in self._flights else {*self._flights}
        task = self._loop.create_task(answer())
        question = _Question(task, owners)
        self._questions.add(question)
        try:
            if self._client is None:
                with self.asking():
                    return await task
            return await task
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return None
        finally:
            self._questions.discard(question)
            question.release()

    def _begin_asking(self) -> None:
        self._people += 1
        if self._people == 1:
            for flight in self._flights:
                flight.hold()
            if self._life is not None:
                self._life.pause_timer()
            self._tell()

    def _end_asking(self) -> None:
        self._people -= 1
        if not self._people:
            for flight in self._flights:
                flight.release()
            if self._life is not None:
                self._life.start_timer()
            self._tell()

    # --- its own life -------------------------------------------------------------------------

    def _start(self) -> None:
        if self._supervisor is None and not self._is_closed:
            self._supervisor = self._loop.create_task(
                self._supervise(), name=f"mcp {self._link.server.name}"
            )
            if not self._link.server.is_shared:
                self._watch_idleness()

    async def _supervise(self) -> None:
        delay = _FIRST_DELAY
        try:
            while not self._is_closed:
                life = self._life = _Life(self, self._link)
                lived = await life.end()
                self._client = None
                if not life.was_restarted and not self.is_closed:
                    self._failed(life.failure())
                    delay = _FIRST_DELAY if lived >= _STABLE_SECONDS else delay
                    if not life.was_up:  # else whatever needs it has come after the connection
                        self._wake.clear()
                    await self._pause(delay)
                    delay = min(2 * delay, _LONGEST_DELAY)
        finally:
            self._is_closed = True
            self._client = None
            if self._life is not None and not self._life.task.done():
                self._life.cancel()
                await asyncio.wait({self._life.task})
            self._tell()

    async def _pause(self, delay: float) -> None:
        """Wait until it is time for another attempt, or until something needs it."""
        if self._waiting:
            delay = min(delay, _LONGEST_DELAY_WHEN_NEEDED)
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._wake.wait()

    def came_up(self, client: Client, tools: list[Any], left_out: dict[str | None, str]) -> None:
        """The life is connected."""
        self._client = client
        self._wake.clear()
        self._attempts += 1
        self.problem = None
        self._is_hopeless = False
        self.is_stale = False
        self._has_listed()
        self._link.take_tools(tools, left_out)
        self._tell()

    def went_down(self) -> None:
        """The life has no connection any more, and is about to end."""
        self._client = None
        self._tell()

    def _failed(self, problem: McpError, *, is_hopeless: bool | None = None) -> None:
        self._attempts += 1
        self.problem = problem
        life = self._life
        if is_hopeless is None:
            is_hopeless = life is not None and life.is_hopeless
        self._is_hopeless = is_hopeless
        logger.info("%s", problem)
        self._tell()

    def gave_up(self, problem: McpError) -> None:
        """The time to connect is over. The life ends a little later."""
        self._failed(problem, is_hopeless=False)

    def tools_changed(self) -> None:
        """The server says that its tools have changed."""
        self.is_stale = True

    def resource_updated(self, uri: str) -> None:
        """The server says that a resource has changed."""
        for watcher in self.watchers:
            watcher.updated(uri)

    def _tell(self) -> None:
        news, self._news = self._news, self._loop.create_future()
        if not news.done():
            news.set_result(None)

    # --- idleness -----------------------------------------------------------------------------

    def use(self) -> None:
        """Count as used now."""
        self._used_at = self._loop.time()

    def _watch_idleness(self) -> None:
        if self._flights or self._waiting or self.watchers or not self._attempts:
            self.use()
        due = self._used_at + self._link.server.idle_seconds
        if self._loop.time() >= due:
            self._link.forget(self)
            self.begin_to_close()
            return
        self._idle = self._loop.call_at(due, self._watch_idleness)


if sys.version_info >= (3, 12):

    def _start(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], context: Context
    ) -> asyncio.Task[T]:
        """A task that has begun to work when this returns: a turn of the event loop less."""
        return asyncio.Task(work, loop=loop, context=context, eager_start=True)

else:

    def _start(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], context: Context
    ) -> asyncio.Task[T]:
        return loop.create_task(work, context=context)


class _NotDoneError(Exception):
    """The server has not carried out the request: it does not know the session any more, or was not
    reached. ``failure`` says so if it happens again.
    """

    def __init__(self, failure: McpError) -> None:
        super().__init__()
        self.failure = failure


class _Asking:
    """A block in which a person is asked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection._begin_asking()

    def __exit__(self, *error: object) -> None:
        self._connection._end_asking()


class _Flight:
    """A request in progress, with a clock that stops while something holds it."""

    __slots__ = ("_holds", "_left", "_timer", "task", "timed_out")

    def __init__(self, timeout: float) -> None:
        self.task: asyncio.Task[Any]
        self._holds = 1
        self._left = timeout
        self._timer: asyncio.TimerHandle | None = None
        self.timed_out = False

    def start(self) -> None:
        self.release()

    def release(self) -> None:
        self._holds -= 1
        if not self._holds:
            self._timer = self.task.get_loop().call_later(self._left, self._expire)

    def hold(self) -> None:
        self._holds += 1
        if self._timer is not None:
            self._timer.cancel()
            self._left = max(0.0, self._timer.when() - self.task.get_loop().time())
            self._timer = None

    def _expire(self) -> None:
        self.timed_out = True
        self.task.cancel()


_current: ContextVar[_Flight | None] = ContextVar("clark_agent_mcp_request", default=None)
"""The request that the running task works for."""


class _Question:
    """A question of a server, and the requests that it may belong to."""

    def __init__(self, task: asyncio.Task[Any], owners: set[_Flight]) -> None:
        self._task = task
        self._owners = owners
        self._held = tuple(owners)
        for flight in self._held:
            flight.hold()
        self._bound: asyncio.TimerHandle | None = None
        if len(owners) > 1:
            self._bound = task.get_loop().call_later(_LONGEST_PAUSE, self.release)

    def is_over(self, flight: _Flight) -> None:
        """A request has ended. If none is left that could need the answer, nor is the question."""
        self._owners.discard(flight)
        if not self._owners:
            self._task.cancel()

    def release(self) -> None:
        """Let the clocks go on."""
        held, self._held = self._held, ()
        for flight in held:
            flight.release()
        if self._bound is not None:
            self._bound.cancel()


class _Life:
    """One attempt to connect and, if it succeeds, the connection until it ends.

    Its task is cancelled at most once: a second time would interrupt the SDK while it ends the
    server's process.
    """

    def __init__(self, connection: Connection, link: ServerLink) -> None:
        self._connection = connection
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._left = link.server.connect_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._is_connecting = True
        self._is_stopped = False
        self._is_late = False
        self._is_cancelled = False
        self._up_at: float | None = None
        self._error: BaseException | None = None
        self._stderr: StderrTail | None = None
        self.hooks: Hooks | None = None
        self.is_hopeless = False
        """Whether it would fail in the same way at once."""
        self.was_restarted = False
        self.task = self._loop.create_task(self._run(), name=f"mcp {link.server.name} connection")
        self.start_timer()

    async def end(self) -> float:
        """Wait for the end. Returns how many seconds it was connected."""
        await asyncio.wait({self.task})
        self.pause_timer()
        if not self.task.cancelled():
            self._error = self.task.exception()
        if self._stderr is not None:
            self._stderr.close_writer()
            if self._up_at is None:
                await run_in_thread(self._stderr.join, 0.5)
        return 0.0 if self._up_at is None else self._loop.time() - self._up_at

    @property
    def was_up(self) -> bool:
        """Whether it was connected."""
        return self._up_at is not None

    def stop(self) -> None:
        """Make it end."""
        self.pause_timer()
        if self._up_at is None:
            self.cancel()
            return
        if not self._is_stopped:
            self._is_stopped = self.was_restarted = True
            self._over.set()
            if self._link.server.url is not None:
                self._loop.call_later(_CLOSE_SECONDS, self.cancel)

    def cancel(self) -> None:
        """Make it end now."""
        if not self._is_cancelled and not self.task.done() and not self.task.cancelling():
            self._is_cancelled = True
            self.task.cancel()

    def start_timer(self) -> None:
        """Let the time to connect pass."""
        if self._is_connecting and self._timer is None:
            self._timer = self._loop.call_later(self._left, self._give_up)

    def pause_timer(self) -> None:
        """Stop the clock of connecting."""
        if self._timer is not None:
            self._timer.cancel()
            self._left = max(0.0, self._timer.when() - self._loop.time())
            self._timer = None

    def _give_up(self) -> None:
        self._is_late = True
        self._connection.gave_up(self.failure())
        self.cancel()

    def failure(self) -> McpError:
        """Why it has ended, and the last lines of the server's stderr."""
        server = self._link.server
        if self._is_late:
            text = (
                f"no connection within {server.connect_timeout:g} seconds; check that "
                f"{server.address} is an MCP server, or raise connect_timeout"
            )
            if self.hooks is not None and self.hooks.noise is not None:
                text += f" (it has sent something else: {self.hooks.noise})"
        elif self._error is not None and self.hooks is not None:
            from clark_agent.mcp import _sdk

            leaf = _sdk.leaf_of(self._error)
            text = _sdk.explain(server, leaf, self.hooks)
            self.is_hopeless = self._up_at is None and isinstance(leaf, (OSError, ValueError))
            self.is_hopeless = self.is_hopeless and server.command is not None
        elif self._error is not None:
            text = describe(self._error)
        else:
            text = "the connection has ended"
        lines = () if self._stderr is None else self._stderr.lines
        if lines:
            text += ". Its last lines on stderr:\n" + "\n".join(lines)
        return McpError(server.name, self._link.redact(text))

    async def _run(self) -> None:
        await _load_sdk()
        from clark_agent.mcp import _sdk

        server = self._link.server
        hooks = self.hooks = _sdk.Hooks()
        hooks.on_end = self._ended
        hooks.on_tools_changed = self._connection.tools_changed
        hooks.on_resource_updated = self._connection.resource_updated
        hooks.redact = self._link.redact
        hooks.elicit = self._link.elicitation_callback(self._connection)
        if server.command is not None:
            self._stderr = StderrTail(server.name)
            hooks.stderr = self._stderr.writer
        auth = self._link.make_auth(self._connection)
        client = _sdk.open_client(server, self._link.headers, auth=auth, hooks=hooks)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(client)
            await _sdk.set_log_level(client, server.log_level)
            tools, left_out = await _sdk.list_tools(client, hooks)
            if self._is_late or self._over.is_set():
                return
            self.pause_timer()
            self._is_connecting = False
            hooks.is_up = True
            self._up_at = self._loop.time()
            self._connection.came_up(client, tools, left_out)
            listening = self._loop.create_task(self._listen(client))
            stack.push_async_callback(_end_task, listening)
            await self._over.wait()
            self._connection.went_down()

    def _ended(self) -> None:
        if self._up_at is not None:
            self._connection.went_down()
        self._over.set()

    async def _listen(self, client: Client) -> None:
        from clark_agent.mcp import _sdk

        while not self._over.is_set():
            try:
                await _sdk.listen_for_tools(client, self._connection.tools_changed)
                return
            except Exception as error:
                logger.debug("mcp server %r: not listening: %r", self._link.server.name, error)
                if type(error).__name__ != "SubscriptionLost":
                    return
            await asyncio.sleep(_LISTEN_AGAIN)
            self._connection.tools_changed()  # whatever was missed in the meantime


async def _end_task(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


_loaded = False


async def _load_sdk() -> None:
    """Import the SDK in a thread: it takes long enough for the event loop to notice."""
    global _loaded
    if not _loaded:
        load: Callable[[], Any] = _import_sdk
        await run_in_thread(load)
        _loaded = True


def _import_sdk() -> None:
    load_extra("mcp", "mcp", "McpTools")
    import_module("clark_agent.mcp._sdk")
