"""ask_user: lets the model ask the person a question.

The host supplies the function that reaches the person. An ``async def`` is awaited and is cancelled
with the call. A plain ``def`` runs in its own thread, where it may block. If the call is cancelled,
the thread is abandoned and its answer dropped.

The model always gets a result and continues, even if there is no ``ask`` function, if it fails, if
the answer does not arrive in time, or if it is blank.

With `SUSPEND` instead of a function, the run is suspended, and `clark_agent.run_log.decide` with
``GiveResult(answer)`` answers, at any time and from any process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from inspect import isawaitable, iscoroutinefunction, signature
from threading import Lock
from typing import Any, Final, TypeAlias, TypeVar

from clark_agent._threads import run_in_thread
from clark_agent.cancellation import CancellationToken
from clark_agent.engine.supervised import is_cancelled
from clark_agent.errors import ConfigError, ToolExecutionError, ToolSuspended
from clark_agent.tools import AgentTool, ToolHistoryPolicy, ToolResult, tool

__all__ = [
    "SUSPEND",
    "AskUser",
    "NobodyThere",
    "OneAtATime",
    "Suspended",
    "ask_user_tool",
    "check_asking",
    "line_of",
    "put_to",
    "unless_stopped",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

AskUser: TypeAlias = Callable[[str, Sequence[str]], Awaitable[str] | str]
"""Asks a question, with suggested answers (empty if there are none), and returns the answer.

Contract: an ``async def`` ends when it is cancelled. An exception or None counts as no answer.
"""


class Suspended(Enum):
    """The type of `SUSPEND`."""

    SUSPEND = "suspend"


SUSPEND: Final = Suspended.SUSPEND
"""Instead of an ``ask`` function: suspend the run until the question is decided."""

_GO_ON = "Go on by yourself: take the most sensible assumption, and say in the end what it was."


def ask_user_tool(
    ask: AskUser | Suspended | None,
    *,
    timeout: float | None = None,
    assignee: str | None = None,
) -> AgentTool:
    """Make the tool ``ask_user``. Without ``ask``, calls return an error that says to continue.
    With `SUSPEND` the run waits; ``assignee`` is then who should answer.

    ``ask(question, choices)`` asks the question and returns the answer; it may be async. The model
    suggests the ``choices``, often none. Concurrent questions are asked one after the other.
    ``timeout`` is in seconds for each question.
    """
    check_asking("ask_user_tool", ask, timeout, "question", "choices")
    if assignee is not None and ask is not SUSPEND:
        raise ConfigError("ask_user_tool: assignee needs SUSPEND: ask_user_tool(SUSPEND, ...)")
    line = line_of(ask)

    # If the program dies while it waits, the answer is lost. Asking again does no harm.
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
            return ToolResult.error(f"No user is available to ask. {_GO_ON}")
        offered = tuple([choice.strip() for choice in choices or () if choice.strip()])
        if ask is SUSPEND:
            asked = {"kind": "question", "question": question.strip(), "choices": list(offered)}
            raise ToolSuspended(asked, expires_in=timeout, assignee=assignee)
        try:
            async with line().turn(), asyncio.timeout(timeout):
                answer: Any = await put_to(ask, question.strip(), offered)
        except TimeoutError:
            return ToolResult.error(f"The user has not answered in time. {_GO_ON}")
        except NobodyThere:
            return ToolResult.error(f"No user is available to answer. {_GO_ON}")
        except Exception as error:
            logger.exception("asking the user failed")
            why = f"{type(error).__name__}: {error}"
            return ToolResult.error(f"The question could not be put to the user ({why}). {_GO_ON}")
        if answer is None or not str(answer).strip():
            return ToolResult.text(f"The user gave no answer. {_GO_ON}")
        return ToolResult.text(str(answer).strip())

    ask_user.history_policy = ToolHistoryPolicy(keeps_result=True)
    return ask_user


# --- shared by everything that asks a person --------------------------------------------------


def check_asking(owner: str, ask: object, timeout: object, *parameters: str) -> None:
    """Raise `ConfigError` if ``ask`` does not take these parameters or the timeout is invalid.

    A builtin without a signature is accepted as it is.
    """
    if ask is not None and ask is not SUSPEND:
        if not callable(ask):
            raise ConfigError(f"{owner}: ask must be a function, SUSPEND or None, not {ask!r}")
        try:
            signature(ask).bind(*parameters)
        except TypeError:
            raise ConfigError(
                f"{owner}: ask must accept ({', '.join(parameters)}), not {signature(ask)}"
            ) from None
        except ValueError:
            pass
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):  # type: ignore[operator]
        raise ConfigError(f"{owner}: timeout must be more than 0 seconds or None, not {timeout!r}")


class NobodyThere(Exception):
    """The question was withdrawn, or the terminal is at its end."""


async def put_to(ask: Callable[..., Any], *question: object) -> Any:
    """Return the answer of ``ask``, which is awaited if it is async and else runs in a thread.

    Raises `NobodyThere`, and whatever ``ask`` raises.
    """
    try:
        if iscoroutinefunction(ask) or iscoroutinefunction(getattr(ask, "__call__", None)):  # noqa: B004
            return await ask(*question)
        answer = await run_in_thread(ask, *question)
        return await answer if isawaitable(answer) else answer
    except EOFError as error:
        raise NobodyThere("the input has ended") from error
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise NobodyThere("the question was withdrawn") from error  # cancelled from within ``ask``


async def unless_stopped(asking: Coroutine[Any, Any, T], signal: CancellationToken) -> T:
    """Return the result of ``asking``. Cancel it as soon as the signal is cancelled.

    Then raises `ToolExecutionError`.
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
    """A first-come, first-served lock across event loops and threads."""

    def __init__(self) -> None:
        self._lock = Lock()  # only held briefly, never while waiting for a person
        self._is_taken = False
        self._line: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Wait for the turn, and keep it while the block runs."""
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
            except RuntimeError:  # its event loop is closed, so the waiting task is gone
                continue
            return


def line_of(ask: object) -> Callable[[], OneAtATime]:
    """Return the function that says where a question has to queue, when it is asked.

    An ``ask`` that reaches several people has its own: a method ``line()``.
    """
    own: Callable[[], OneAtATime] | None = getattr(ask, "line", None)
    if own is not None:
        return own
    line = OneAtATime()
    return lambda: line


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
