"""What one run knows while it goes on: its transcript, its open brackets, its listeners.

Whatever ends a run early ends it through `Run.close`, which closes every bracket that is open. For
that to work each step marks what it is about to do before it awaits anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from clark_agent.cancel_scope import CancelScope
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.emitter import Emitter
from clark_agent.errors import LoopError, RunAborted
from clark_agent.events import (
    AgentEnd,
    AgentEvent,
    AgentStart,
    MessageDiscarded,
    MessageEnd,
    MessageStart,
    RunIdentified,
    TurnEnd,
    TurnStart,
)
from clark_agent.plugin import TransformContext
from clark_agent.stream import MessageAssembler, StreamChunk
from clark_agent.tokens import CachingEstimator
from clark_agent.transcript import MessageLog, checked_messages
from clark_agent.types import (
    AgentContext,
    AgentMessage,
    AssistantBlock,
    AssistantMessage,
    StopReason,
    ToolResultMessage,
    Usage,
)

__all__ = ["Run"]

logger = logging.getLogger(__name__)


class OpenBatch(Protocol):
    """A tool batch whose calls are not all answered yet."""

    async def settle(self) -> list[ToolResultMessage]:
        """Stop what runs, end every call, and give all results."""
        ...


class Run:
    """The state of one run. Made by `clark_agent.loop`, used by it and by the two modules below."""

    __slots__ = (
        "_announcing",
        "_begun",
        "_discard",
        "_discarded",
        "_ended",
        "_estimated",
        "_estimated_count",
        "_estimator",
        "_open",
        "_streaming",
        "_turn_due",
        "_turn_open",
        "batch",
        "chunks",
        "clock",
        "config",
        "emit",
        "emitter",
        "follow_ups",
        "hooks",
        "identity",
        "iterations",
        "last_usage",
        "messages",
        "pending",
        "registry",
        "scope",
        "signal",
        "system_prompt",
        "transcript",
        "turn_message",
        "turn_results",
        "undelivered",
        "usage",
    )

    def __init__(
        self, context: AgentContext, config: LoopConfig, signal: CancellationToken
    ) -> None:
        self.scope = CancelScope(signal)
        self.config = config
        self.hooks = config.hooks.for_run()
        self.registry = config.registry
        self.clock = config.clock
        self.signal = signal
        self.system_prompt = context.system_prompt
        self.identity = context.identity
        self.emitter = Emitter(config.event_sink, self.hooks.event_observer, config.hook_timeout)
        self.emit = self.emitter.emit

        self.transcript = MessageLog(context.messages)
        """What the model sees, before the transforms."""
        self.messages = MessageLog()
        """What this run has added to it."""
        self.usage = Usage()
        self.last_usage = _last_usage(context.messages)
        self.iterations = 0
        """How many turns have begun."""
        self.pending: list[AgentMessage] = []
        """Messages for the next turn."""
        self.follow_ups: list[AgentMessage] = []
        """What follow-up sources have given, before it is decided what becomes of it."""
        self.undelivered: list[AgentMessage] = []
        self.batch: OpenBatch | None = None
        self.chunks: list[StreamChunk] = []
        """What has been streamed of the open answer."""
        self.turn_message: AssistantMessage | None = None
        self.turn_results: list[ToolResultMessage] = []

        self._announcing: deque[AgentMessage] = deque()
        self._open: AgentMessage | None = None
        self._streaming = False
        self._discard: str | None = None
        self._discarded: AssistantMessage | None = None
        self._begun = False
        self._turn_due = False
        self._turn_open = False
        self._ended = False
        self._estimator = CachingEstimator(config.token_estimator)
        self._estimated = 0
        self._estimated_count = 0

    # --- the transcript -----------------------------------------------------------------------

    async def add(self, messages: Iterable[AgentMessage]) -> None:
        """Append messages to the transcript and tell of each."""
        self._append(messages)
        await self._announce()

    def _append(self, messages: Iterable[AgentMessage]) -> None:
        for message in messages:
            self.transcript.append(message)
            self.messages.append(message)
            self._announcing.append(message)

    async def _announce(self) -> None:
        while self._announcing:
            message = self._open = self._announcing.popleft()
            await self.emit(MessageStart, message)
            self._open = None
            await self.emit(MessageEnd, message)

    def replace_transcript(self, messages: Iterable[AgentMessage]) -> None:
        """Go on with another transcript. The messages of the run stay as they are."""
        self.transcript = MessageLog(messages)
        self.last_usage = _last_usage(self.transcript)
        self._estimated = self._estimated_count = 0

    def transform_context(self, iteration: int) -> TransformContext:
        """What transforms and the overflow recovery are told."""
        for index in range(self._estimated_count, len(self.transcript)):
            self._estimated += self._estimator.estimate_message(self.transcript[index])
        self._estimated_count = len(self.transcript)
        return TransformContext(
            self.signal,
            self.config.model_id or "",
            iteration,
            self.last_usage,
            self._estimator,
            self._estimated,
            self.registry,
        )

    @property
    def at_cap(self) -> bool:
        """Whether no turn is left."""
        cap = self.config.max_iterations
        return cap is not None and self.iterations >= cap

    # --- brackets -----------------------------------------------------------------------------

    async def begin(self, prompts: Iterable[AgentMessage]) -> None:
        """Open the run and its first turn."""
        self._append(checked_messages(prompts))
        self._begun = self._turn_due = True
        await self.emit(AgentStart)
        if self.identity is not None:
            await self.emit(RunIdentified, self.identity)
        self._turn_due, self._turn_open = False, True
        await self.emit(TurnStart)
        await self._announce()

    async def begin_turn(self) -> int:
        """Open a turn (the first is open already), put pending messages first; its number."""
        self.iterations += 1
        self.turn_message = None
        self.turn_results = []
        self._discarded = None
        if not self._turn_open:
            self._turn_open = True
            await self.emit(TurnStart)
        pending, self.pending = self.pending, []
        await self.add(pending)
        return self.iterations - 1

    async def begin_answer(self, placeholder: AssistantMessage) -> None:
        """The model has begun to answer."""
        self._open = placeholder
        self._streaming = True
        self.chunks = []
        await self.emit(MessageStart, placeholder)

    async def end_answer(self, message: AssistantMessage, *, discard: str | None = None) -> None:
        """The model's message is whole. It enters the transcript unless there is a reason not to.

        A transport that did not announce the message is made up for.
        """
        if not self._streaming:
            await self.begin_answer(message)
        self._open = None
        self._streaming = False
        self._discard = discard
        if message.usage is not None:
            self.usage += message.usage
        self._discarded = None if discard is None else message
        if discard is None:
            self.turn_message = message
            self.transcript.append(message)
            self.messages.append(message)
            self.last_usage = message.usage or self.last_usage
        await self.emit(MessageEnd, message)
        if discard is not None:
            self._discard = None
            await self.emit(MessageDiscarded, discard)

    async def end_turn(self) -> None:
        """Close the turn."""
        message = self.turn_message
        assert message is not None
        self._turn_open = False
        await self.emit(TurnEnd, message, tuple(self.turn_results))

    async def end(self) -> None:
        """Close the run."""
        self._ended = True
        await self.emit(AgentEnd, self.messages.view())

    # --- the end of a run that fails ------------------------------------------------------------

    @property
    def is_cancelled(self) -> bool:
        """Whether the run was cancelled, by its token or by its task."""
        return self.signal.cancelled or self.scope.cancelled_from_outside

    def check_cancelled(self) -> None:
        """Raise if the run was cancelled, also when somebody has swallowed that."""
        if self.scope.cancelled_from_outside:
            raise asyncio.CancelledError
        if self.signal.cancelled:
            raise RunAborted(self.signal.reason)

    def failed_message(self, error: BaseException) -> AssistantMessage:
        """The assistant message for one that did not come, with what has been streamed of it."""
        aborted = isinstance(error, (RunAborted, asyncio.CancelledError))
        return AssistantMessage(
            self._streamed(),
            StopReason.ABORTED if aborted else StopReason.ERROR,
            "the run was aborted" if aborted else str(error),
            self.clock.now_ms(),
        )

    def _streamed(self) -> tuple[AssistantBlock, ...]:
        if not self._streaming or not isinstance(self._open, AssistantMessage):
            return ()
        if not self.chunks:
            return self._open.content
        assembler = MessageAssembler(self.clock.new_id)
        for chunk in self.chunks:
            assembler.feed(chunk)
        return assembler.message().content

    async def close(self, error: BaseException) -> AssistantMessage | None:
        """Close whatever is open, in order; return the message that was cut off, if one was.

        A cancellation that arrives meanwhile ends at most the listener that it hits. Once the run
        is cancelled listeners have no more than ``cancel_grace`` for all that is left.
        """
        cut_off: AssistantMessage | None = None
        if not self._begun:
            return None
        if self._turn_due:
            self._turn_due, self._turn_open = False, True
            await self.emit_closing(TurnStart)
        if self._open is not None:
            message = self._open
            if self._streaming:
                message = cut_off = self.failed_message(error)
                self._streaming = False
                self._discard = str(message.stop_reason)
            self._open = None
            await self.emit_closing(MessageEnd, message)
        if self._discard is not None:
            reason, self._discard = self._discard, None
            await self.emit_closing(MessageDiscarded, reason)
        while self._announcing:
            message = self._announcing.popleft()
            await self.emit_closing(MessageStart, message)
            await self.emit_closing(MessageEnd, message)
        await self._close_turn(error, cut_off)
        if not self._ended:
            self._ended = True
            await self.emit_closing(AgentEnd, self.messages.view())
        return cut_off

    @property
    def has_unanswered_calls(self) -> bool:
        """Whether the turn's answer asks for tools and no batch has begun to answer it."""
        return (
            self.batch is None
            and self._turn_open
            and self.turn_message is not None
            and bool(self.turn_message.tool_calls)
            and not self.turn_results
        )

    async def _close_turn(self, error: BaseException, cut_off: AssistantMessage | None) -> None:
        if self.batch is not None:
            batch, self.batch = self.batch, None
            self.turn_results = await batch.settle()
            if self.emitter.deadline is not None:  # the tools have had their grace first
                self._limit_listeners()
            for result in self.turn_results:
                self.transcript.append(result)
                self.messages.append(result)
                await self.emit_closing(MessageStart, result)
                await self.emit_closing(MessageEnd, result)
        if self._turn_open:
            self._turn_open = False
            message = self.turn_message or cut_off or self._discarded or self.failed_message(error)
            await self.emit_closing(TurnEnd, message, tuple(self.turn_results))

    async def emit_closing(self, kind: type[AgentEvent], *fields: Any) -> None:
        """Emit an event that closes a bracket, also when the run is cancelled once more."""
        if self.is_cancelled and self.emitter.deadline is None:
            self._limit_listeners()
        try:
            await self.emit(kind, *fields)
        except asyncio.CancelledError:
            logger.debug("cancelled again while the run was being closed")

    def _limit_listeners(self) -> None:
        """From now on listeners have ``cancel_grace`` together, so that none can hold the run."""
        self.emitter.deadline = asyncio.get_running_loop().time() + self.config.cancel_grace

    def carry(self, error: LoopError, partial: AssistantMessage | None = None) -> None:
        """Put on an error what the run had, so that nothing is lost with it."""
        error.messages = tuple(self.messages)
        if self.iterations:
            error.turn = self.iterations
            error.add_note(f"In turn {self.iterations} of the run.")
        error.partial = error.partial or partial or self._discarded
        error.usage = self.usage
        error.undelivered = (*self.undelivered, *self.pending, *self.follow_ups)


def _last_usage(messages: Iterable[AgentMessage]) -> Usage | None:
    for message in reversed(tuple(messages)):
        if isinstance(message, AssistantMessage) and message.usage is not None:
            return message.usage
    return None
