"""The calls of clients that are under way: progress, questions, and how they end.

A call runs in a task of its own. A request of a client is connected to it while it waits for the
result. Older versions of the protocol let a server ask in the middle of a request. Since 2026-07-28
the request ends with the question instead, and the client sends it again with the answer: the call
waits between the two, and is cancelled if no answer comes in time.

`current_call` finds the call that a tool or a hook belongs to. Nothing here knows agents or tools.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from clark_agent.cancellation import LET_GO, CancellationToken
from clark_agent.mcp.serving_content import Outcome, to_protocol
from clark_agent.toolkit.ask import OneAtATime
from clark_agent.tools import ToolResult

if TYPE_CHECKING:
    import mcp_types as types
    from mcp.server import ServerRequestContext

__all__ = ["CallOver", "Calls", "ServedCall", "current_call"]

logger = logging.getLogger(__name__)

_PROGRESS_KEPT = 64
_LONGEST_PROGRESS = 1000
_CANCELLED = "cancelled by the client"
_STOPPING = "the server is stopping"
_UNANSWERED = "the client has not answered a question in time"


class CallOver(Exception):
    """A question cannot be asked, because the call has ended."""


current_call: ContextVar[ServedCall | None] = ContextVar("current_call", default=None)
"""The call that the running code belongs to."""


class _Question:
    """A form that the client shows to its user."""

    def __init__(self, message: str, schema: dict[str, Any]) -> None:
        self.message = message
        self.schema = schema
        self.answer: asyncio.Future[types.ElicitResult] = asyncio.get_running_loop().create_future()


class ServedCall:
    """One call of a client, however many requests it takes."""

    def __init__(self, *, question_timeout: float, can_be_resumed: bool = False) -> None:
        self.token = CancellationToken()
        """Cancelled when the call must end."""
        self.notes: list[str] = []
        """Added to the result: what the owner of the client should know."""
        self.line = OneAtATime()
        """The line of its questions: the users of other clients have their own."""
        self.has_begun = False
        """Whether it has had its turn. Before, it is cancelled without ceremony."""
        self.can_be_resumed = can_be_resumed
        """Whether another process can continue it when this one stops."""
        self._question_timeout = question_timeout
        self._task: asyncio.Task[Outcome] | None = None
        self._request: ServerRequestContext[Any] | None = None
        self._questions: dict[str, _Question] = {}
        self._asked = 0
        self._progress: deque[tuple[int, str]] = deque(maxlen=_PROGRESS_KEPT)
        self._progress_number = 0
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, work: Callable[[ServedCall], Awaitable[Outcome]]) -> None:
        """Start the work, in a task in which `current_call` is this call."""

        async def run() -> Outcome:
            current_call.set(self)
            try:
                return await work(self)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.exception("a call failed unexpectedly")
                text = f"The server failed ({type(error).__name__}). Its log has the details."
                return Outcome(ToolResult.error(text))

        self._task = asyncio.create_task(run())
        self._task.add_done_callback(lambda _: self._news.set())

    @property
    def task(self) -> asyncio.Task[Outcome]:
        """The task of the work."""
        assert self._task is not None
        return self._task

    # --- for the work ---------------------------------------------------------------------------

    def report(self, text: str) -> None:
        """Send progress to the client. If it is slow, the oldest progress is dropped."""
        self._progress_number += 1
        short = text if len(text) <= _LONGEST_PROGRESS else text[:_LONGEST_PROGRESS] + "…"
        self._progress.append((self._progress_number, short))
        self._news.set()

    @property
    def can_ask(self) -> bool:
        """Whether the client can show a form to its user."""
        request = self._request
        capabilities = None if request is None else request.session.client_capabilities
        elicitation = None if capabilities is None else capabilities.elicitation
        if request is None or elicitation is None:
            return False
        if elicitation.form is None and elicitation.url is not None:
            return False
        return _is_modern(request) or request.session.can_send_request

    async def ask(self, message: str, schema: dict[str, Any]) -> types.ElicitResult:
        """Show a form to the user of the client, and return the answer.

        Raises `CallOver`, and what the SDK raises if the connection is lost.
        """
        request = self._request
        if request is not None and not _is_modern(request):
            return await self._ask_in_request(request, message, schema)
        if self.token.cancelled:
            raise CallOver(self.token.reason or "the call is over")
        self._asked += 1
        key, question = f"question-{self._asked}", _Question(message, schema)
        self._questions[key] = question
        self._news.set()
        try:
            return await question.answer
        finally:
            self._questions.pop(key, None)

    async def _ask_in_request(
        self, request: ServerRequestContext[Any], message: str, schema: dict[str, Any]
    ) -> types.ElicitResult:
        # Over HTTP, nothing tells that the client is gone.
        limit = None if request.request is None else self._question_timeout
        try:
            async with asyncio.timeout(limit):
                return await request.session.elicit_form(message, schema, request.request_id)
        except TimeoutError:
            self.cancel(_UNANSWERED)
            raise CallOver(_UNANSWERED) from None

    # --- for requests ---------------------------------------------------------------------------

    def answer(self, responses: Mapping[str, Any] | None) -> None:
        """Take the client's answers. A question without one is asked again."""
        import mcp_types as types

        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for key, response in (responses or {}).items():
            question = self._questions.pop(key, None)
            if question is None or question.answer.done():
                continue
            if isinstance(response, types.ElicitResult):
                question.answer.set_result(response)
            else:
                question.answer.set_result(types.ElicitResult(action="cancel"))

    async def serve(
        self, request: ServerRequestContext[Any], park: Callable[[ServedCall], str]
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Wait for the result, or for questions to the client. Cancelling it cancels the call."""
        self._request = request
        try:
            while True:
                await self._send_progress(request)
                if self.task.done():
                    break
                if self._questions:
                    return self._ask_in_result(park)
                await self._news.wait()
                self._news.clear()
        except asyncio.CancelledError:
            await self.stop(_CANCELLED)
            raise
        if self.task.cancelled():
            reason = self.token.reason or "cancelled"
            return to_protocol(Outcome(ToolResult.error(f"The call was not run: {reason}.")))
        return to_protocol(self.task.result(), notes=self.notes)

    def _ask_in_result(self, park: Callable[[ServedCall], str]) -> types.InputRequiredResult:
        import mcp_types as types

        asked: dict[str, Any] = {
            key: types.ElicitRequest(
                params=types.ElicitRequestFormParams(
                    message=question.message, requested_schema=question.schema
                )
            )
            for key, question in self._questions.items()
        }
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._question_timeout, self.cancel, _UNANSWERED)
        return types.InputRequiredResult(input_requests=asked, request_state=park(self))

    async def _send_progress(self, request: ServerRequestContext[Any]) -> None:
        while self._progress:
            number, text = self._progress.popleft()
            await request.session.report_progress(float(number), None, text)

    # --- the end --------------------------------------------------------------------------------

    def cancel(self, reason: str) -> None:
        """Make the call end. The first reason counts."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.token.cancel(reason)
        if not self.has_begun:
            self.task.cancel()
        for question in self._questions.values():
            if not question.answer.done():
                question.answer.set_exception(CallOver(reason))

    async def stop(self, reason: str) -> None:
        """Make the call end, and wait for that even if the caller is cancelled."""
        import anyio

        self.cancel(reason)
        # The loop ends a cancelled run within its grace.
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.exception()  # nobody waits for it


def _is_modern(request: ServerRequestContext[Any]) -> bool:
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    return request.protocol_version in MODERN_PROTOCOL_VERSIONS


class Calls:
    """The calls of one server that are under way."""

    def __init__(self, *, question_timeout: float) -> None:
        self._question_timeout = question_timeout
        self._all: set[ServedCall] = set()
        self._parked: dict[str, ServedCall] = {}
        self._is_stopping = False
        self._alone = _Alone()

    def start(
        self,
        work: Callable[[ServedCall], Awaitable[Outcome]],
        *,
        alone: bool = False,
        can_be_resumed: bool = False,
    ) -> ServedCall:
        """Start a call. With ``alone``, it waits until no other runs, and others wait for it."""
        call = ServedCall(question_timeout=self._question_timeout, can_be_resumed=can_be_resumed)

        async def in_turn(call: ServedCall) -> Outcome:
            async with self._alone.turn(alone=alone):
                call.has_begun = True
                return await work(call)

        self._all.add(call)
        call.start(in_turn)
        call.task.add_done_callback(lambda _: self._all.discard(call))
        if self._is_stopping:
            call.cancel(_STOPPING)
        return call

    def take(self, state: str) -> ServedCall | None:
        """Return the call that waits for the answers of this request."""
        return self._parked.pop(state, None)

    def park(self, call: ServedCall) -> str:
        """Keep a call until its client comes back, and return how it finds it."""
        state = secrets.token_urlsafe(32)
        self._parked[state] = call
        call.task.add_done_callback(lambda _: self._parked.pop(state, None))
        return state

    def stop(self) -> None:
        """Make all calls end, and those that come later. Runs with a log are let go."""
        self._is_stopping = True
        for call in tuple(self._all):
            call.cancel(LET_GO if call.can_be_resumed else _STOPPING)

    async def aclose(self) -> None:
        """Make all calls end, and wait for that."""
        self.stop()
        for call in tuple(self._all):
            await call.stop(_STOPPING)


class _Alone:
    """Lets calls run side by side, except those that must run alone. First come, first served."""

    def __init__(self) -> None:
        self._running = 0
        self._is_alone = False
        self._line: deque[tuple[bool, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def turn(self, *, alone: bool) -> AsyncGenerator[None]:
        if self._line or not self._fits(alone):
            await self._wait(alone)
        else:
            self._enter(alone)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, alone: bool) -> None:
        mine = (alone, asyncio.get_running_loop().create_future())
        self._line.append(mine)
        try:
            await mine[1]
        except BaseException:
            if mine in self._line:
                self._line.remove(mine)
                self._admit()
            else:  # the turn came at the same moment
                self._leave()
            raise

    def _fits(self, alone: bool) -> bool:
        return not self._running if alone else not self._is_alone

    def _enter(self, alone: bool) -> None:
        self._running += 1
        self._is_alone = alone

    def _leave(self) -> None:
        self._running -= 1
        self._is_alone = False
        self._admit()

    def _admit(self) -> None:
        while self._line and self._fits(self._line[0][0]):
            alone, waiting = self._line.popleft()
            self._enter(alone)
            if not waiting.done():
                waiting.set_result(None)
