"""Other ways to run: as a stream of events, and without async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from signal import SIGINT, default_int_handler, getsignal
from signal import signal as set_signal
from threading import Thread, current_thread, main_thread
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias

from clark_agent._threads import has_running_loop
from clark_agent._typing import OutputT_co
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.engine.arguments import check_arguments, check_continuation, prompt_messages
from clark_agent.engine.loop import start
from clark_agent.errors import LoopError, RunAborted, failure_of
from clark_agent.events import AgentEvent, ChannelSink, EventSink, MessageStart, MessageUpdate
from clark_agent.output import Output
from clark_agent.partial import PartialOutput
from clark_agent.result import RunResult
from clark_agent.stream import TextChunk
from clark_agent.types import AgentContext, AgentMessage

__all__ = ["RunStream", "run_sync", "stream_run"]

Prompts: TypeAlias = str | AgentMessage | Iterable[AgentMessage]

Starter: TypeAlias = Callable[[EventSink, CancellationToken], Coroutine[Any, Any, RunResult]]
"""Starts a run that sends its events to the sink."""


def stream_run(
    prompts: Prompts | None,
    context: AgentContext,
    config: LoopConfig,
    signal: CancellationToken | None = None,
    *,
    deps: Any = None,
    max_buffered: int = 256,
) -> RunStream:
    """The events of a run, to iterate over; without prompts the context is continued::

        async with stream_run("Hello", context, config) as events:
            async for event in events:
                ...
        print(events.result.text)

    The iteration ends with the run, and raises what the run raises. At most ``max_buffered`` events
    wait for the reader, then the run does; leaving the block cancels it and waits until it is over.
    """
    check_arguments(context, config, signal)
    messages = _messages(prompts, context, config)

    def starter(sink: EventSink, token: CancellationToken) -> Coroutine[Any, Any, RunResult]:
        return start(messages, context, config, token, sink=sink, deps=deps)

    return RunStream(starter, signal, max_buffered, output=config.output)


def _messages(
    prompts: Prompts | None, context: AgentContext, config: LoopConfig
) -> str | Sequence[AgentMessage]:
    """The prompts, checked; none when the context is to be continued."""
    if prompts is None:
        check_continuation(context)
        return ()
    return prompts if isinstance(prompts, str) else prompt_messages(prompts, config)


class RunStream(Generic[OutputT_co]):
    """A run as a context manager and iterator over its events. Made by `stream_run`."""

    def __init__(
        self,
        starter: Starter,
        signal: CancellationToken | None = None,
        max_buffered: int = 256,
        *,
        output: Output[Any] | None = None,
    ) -> None:
        self._starter = starter
        self._output = output
        self._token = CancellationToken() if signal is None else signal.child()
        self._sink = ChannelSink(max_buffered)
        self._task: asyncio.Task[RunResult] | None = None

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise RuntimeError("a RunStream can be entered only once; call stream_run again")
        self._task = asyncio.create_task(self._starter(self._sink, self._token))
        self._task.add_done_callback(lambda _: self._sink.close())
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AgentEvent:
        task = self._entered()
        with suppress(StopAsyncIteration):
            return await self._sink.__anext__()
        # Cancelling the reader must not cancel the run halfway; leaving the block does.
        await asyncio.shield(task)
        raise StopAsyncIteration

    async def text_stream(self) -> AsyncIterator[str]:
        """The text of the answers, delta by delta; without reasoning, calls and child runs.

        An answer that is discarded and asked for again is not taken back; see the events
        ``message_discarded`` for that.
        """
        async for event in self:
            if isinstance(event, MessageUpdate) and isinstance(event.chunk, TextChunk):
                yield event.chunk.delta

    async def partial_outputs(self) -> AsyncIterator[Any]:
        """The output while it streams: JSON values that grow, not yet checked against the type.

        Text, if the output is text. Raises `ConfigError` if jiter is not installed; see
        `clark_agent.partial`.
        """
        partial, last = PartialOutput(self._output), None
        async for event in self:
            if isinstance(event, MessageStart):
                partial.begin()
            elif isinstance(event, MessageUpdate):
                value = partial.feed(event.chunk)
                if value is not None and value != last:
                    last = value
                    yield value

    @property
    def result(self) -> RunResult[OutputT_co]:
        """The result of the run. Raises what the run raised, and if it is not over."""
        task = self._entered()
        if not task.done():
            raise RuntimeError("the run is not over: iterate to the end first")
        return task.result()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task = self._entered()
        self._sink.close()
        self._token.cancel("the stream was left")
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as again:
                cancelled = again
                task.cancel()
        if not task.cancelled():
            task.exception()  # has been raised to the reader, or is on its way from `result`
        if cancelled is not None:
            raise cancelled

    def _entered(self) -> asyncio.Task[RunResult]:
        if self._task is None:
            raise RuntimeError("use 'async with stream_run(...) as events'")
        return self._task


def run_sync(
    prompts: Prompts | None,
    context: AgentContext,
    config: LoopConfig,
    signal: CancellationToken | None = None,
    *,
    deps: Any = None,
) -> RunResult:
    """`run` for code that is not async: scripts, and notebooks too. Without prompts it continues.

    Where an event loop runs already, as in a notebook, the run has a thread and a loop of its own.
    Ctrl-C stops the run cleanly and raises ``KeyboardInterrupt`` when it is over, whose
    ``__cause__`` carries the state of the run; a second one does not wait, and has no cause.
    """
    check_arguments(context, config, signal)
    messages = _messages(prompts, context, config)

    def starter(token: CancellationToken) -> Coroutine[Any, Any, RunResult]:
        return start(messages, context, config, token, deps=deps)

    return wait_for(starter, signal)


def wait_for(
    starter: Callable[[CancellationToken], Coroutine[Any, Any, RunResult]],
    signal: CancellationToken | None,
) -> RunResult:
    """Start a run and wait for it, as `run_sync` does."""
    token = CancellationToken() if signal is None else signal.child()
    failure: LoopError | None = None

    async def main() -> RunResult:
        nonlocal failure
        try:
            return await starter(token)
        except BaseException as error:
            failure = failure_of(error)
            raise

    with _CtrlC(token) as ctrl_c:
        try:
            return _on_a_thread(main) if has_running_loop() else _here(main, ctrl_c)
        except RunAborted:
            if not ctrl_c.pressed:
                raise
        except (KeyboardInterrupt, SystemExit) as stop:
            raise stop from failure
    raise KeyboardInterrupt from failure


class _CtrlC:
    """While it is entered, the first Ctrl-C cancels the token, and the second raises.

    Not in a thread, which gets no signals, and not if the program has its own handler.
    """

    def __init__(self, token: CancellationToken) -> None:
        self._token = token
        self._previous: Any = None
        self.pressed = False
        self.pressed_again = False

    def __enter__(self) -> Self:
        if current_thread() is main_thread() and _is_pythons_own(getsignal(SIGINT)):
            self._previous = set_signal(SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            set_signal(SIGINT, self._previous)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.pressed:
            self.pressed_again = True
            raise KeyboardInterrupt
        self.pressed = True
        self._token.cancel("interrupted")


def _is_pythons_own(handler: Any) -> bool:
    """Whether it is the interpreter's, or the one that ``asyncio.run`` puts in its place."""
    owner = getattr(getattr(handler, "func", None), "__self__", None)
    return handler is default_int_handler or isinstance(owner, asyncio.Runner)


def _here(main: Callable[[], Coroutine[Any, Any, RunResult]], ctrl_c: _CtrlC) -> RunResult:
    runner, is_over = asyncio.Runner(), False

    async def noted() -> RunResult:
        nonlocal is_over
        try:
            return await main()
        finally:
            is_over = True

    try:
        return runner.run(noted())
    finally:
        if is_over or not ctrl_c.pressed_again:
            runner.close()  # a run that is not over is cancelled, and closes what it has open
        else:  # closing it would wait for something that does not stop
            runner.get_loop().set_exception_handler(lambda *_: None)
            asyncio.set_event_loop(None)
            _abandoned.append(runner)


_abandoned: list[asyncio.Runner] = []
"""Kept, so that they are not torn down before the interpreter."""


def _on_a_thread(main: Callable[[], Coroutine[Any, Any, RunResult]]) -> RunResult:
    outcome: Future[RunResult] = Future()
    context = copy_context()

    def work() -> None:
        try:
            outcome.set_result(context.run(asyncio.run, main()))
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=work, name="clark_agent.run_sync", daemon=True).start()
    return outcome.result()
