"""ask_user: a question for the person, whose answer the model gets.

How a person is reached is the host's affair: it gives a function. An ``async def`` is awaited and
is cancelled with the call; a plain ``def`` runs in a thread of its own, where it may block, and a
thread that still waits when the call is cancelled is left to itself and its answer is dropped.

Whatever goes wrong the model gets a result and goes on: with nobody to ask, a question that cannot
be put, nobody who answers in time, or an answer that is blank.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from inspect import isawaitable, iscoroutinefunction, signature
from threading import Lock
from typing import Any, TypeAlias, TypeVar

from clark_agent._threads import run_in_thread
from clark_agent.cancellation import CancellationToken
from clark_agent.engine.supervised import is_cancelled
from clark_agent.errors import ConfigError, ToolExecutionError
from clark_agent.tools import AgentTool, ToolResult, tool

__all__ = [
    "AskUser",
    "NobodyThere",
    "OneAtATime",
    "ask_user_tool",
    "check_asking",
    "put_to",
    "unless_stopped",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

AskUser: TypeAlias = Callable[[str, Sequence[str]], Awaitable[str] | str]
"""Puts a question, with the answers to choose from (none: any), and returns what the person says.

Contract: an ``async def`` ends when it is cancelled. An exception, and None, count as no answer.
"""

_GO_ON = "Go on by yourself: take the most sensible assumption, and say in the end what it was."


def ask_user_tool(ask: AskUser | None, *, timeout: float | None = None) -> AgentTool:
    """The tool ``ask_user``. Without ``ask`` there is nobody, and the model is told to go on.

    ``ask(question, choices)`` puts the question and returns the answer; it may be async. The model
    suggests the ``choices``, often none.
    Several questions at once are put one after the other. ``timeout`` is in seconds for each.
    """
    check_asking("ask_user_tool", ask, timeout, "question", "choices")
    one_at_a_time = OneAtATime()

    # If the program dies while it waits, the answer is lost: to ask again does no harm.
    @tool(idempotent=True, reads_only=True)
    async def ask_user(question: str, choices: list[str] | None = None) -> ToolResult:
        """Ask the user a question and wait for the answer.

        For what only the user can know or decide. Ask one thing at a time, and nothing that can be
        found out otherwise.

        Args:
            question: The question, complete in itself: the user may not see what came before.
            choices: Answers to choose from, if there are only a few; the user may still say
                something else.
        """
        if not question.strip():
            return ToolResult.error("The question is blank: say what you want to know.")
        if ask is None:
            return ToolResult.error(f"There is nobody to ask. {_GO_ON}")
        offered = tuple([choice.strip() for choice in choices or () if choice.strip()])
        try:
            async with one_at_a_time.turn(), asyncio.timeout(timeout):
                answer: Any = await put_to(ask, question.strip(), offered)
        except TimeoutError:
            return ToolResult.error(f"The user has not answered in time. {_GO_ON}")
        except NobodyThere:
            return ToolResult.error(f"Nobody is there to answer. {_GO_ON}")
        except Exception as error:
            logger.exception("the question could not be put to the user")
            why = f"{type(error).__name__}: {error}"
            return ToolResult.error(f"The question could not be put to the user ({why}). {_GO_ON}")
        if answer is None or not str(answer).strip():
            return ToolResult.text(f"The user gave no answer. {_GO_ON}")
        return ToolResult.text(str(answer).strip())

    return ask_user


# --- what all have in common that ask a person ------------------------------------------------


def check_asking(owner: str, ask: object, timeout: object, *parameters: str) -> None:
    """Refuse what cannot ask with these parameters, and a time that is none. Raises `ConfigError`.

    A builtin without a signature is taken at its word.
    """
    if ask is not None:
        if not callable(ask):
            raise ConfigError(f"{owner}: ask must be a function, or None for nobody, not {ask!r}")
        try:
            signature(ask).bind(*parameters)
        except TypeError:
            raise ConfigError(
                f"{owner}: ask{signature(ask)} cannot be called: it takes ({', '.join(parameters)})"
            ) from None
        except ValueError:
            pass
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):  # type: ignore[operator]
        raise ConfigError(f"{owner}: timeout must be more than 0 seconds or None, not {timeout!r}")


class NobodyThere(Exception):
    """The question was put and withdrawn, or there is nobody behind the terminal."""


async def put_to(ask: Callable[..., Any], *question: object) -> Any:
    """What ``ask`` answers: awaited if it is async, in a thread otherwise.

    Raises `NobodyThere`, and what ``ask`` raises.
    """
    try:
        if iscoroutinefunction(ask) or iscoroutinefunction(getattr(ask, "__call__", None)):  # noqa: B004
            return await ask(*question)
        answer = await run_in_thread(ask, *question)
        return await answer if isawaitable(answer) else answer
    except EOFError as error:
        raise NobodyThere("nobody is there") from error
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise NobodyThere("the question was withdrawn") from error  # by the one who puts it


async def unless_stopped(asking: Coroutine[Any, Any, T], signal: CancellationToken) -> T:
    """What ``asking`` returns; when the signal is cancelled it is cancelled at once.

    Raises `ToolExecutionError` then.
    """
    task, loop = asyncio.ensure_future(asking), asyncio.get_running_loop()
    subscription = signal.subscribe(lambda: loop.call_soon_threadsafe(task.cancel))
    try:
        return await task
    except asyncio.CancelledError:
        if is_cancelled() or not signal.cancelled:
            raise
        raise ToolExecutionError("stopped before anybody had answered") from None
    finally:
        subscription.close()


class OneAtATime:
    """Lets one through at a time, in the order of their coming, on all event loops and threads."""

    def __init__(self) -> None:
        self._lock = Lock()  # held for a moment only: nobody waits for a person with it
        self._is_taken = False
        self._line: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Wait for the turn, and have it while the block runs."""
        await self._wait()
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            mine = asyncio.get_running_loop().create_future()
            self._line.append(mine)
        try:
            await mine
        except BaseException:
            with self._lock:
                was_waiting = mine in self._line
                if was_waiting:
                    self._line.remove(mine)
            if not was_waiting:  # the turn came at the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while True:
            with self._lock:
                if not self._line:
                    self._is_taken = False
                    return
                first = self._line.popleft()
            try:
                first.get_loop().call_soon_threadsafe(_wake, first)
            except RuntimeError:  # its event loop is closed, and nobody waits there any more
                continue
            return


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
