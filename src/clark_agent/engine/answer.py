"""The model's answer while it is being streamed: begun, and then kept or discarded."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from clark_agent.clock import Clock
from clark_agent.engine.brackets import Brackets
from clark_agent.engine.journal import Journal
from clark_agent.engine.transcript import Transcript
from clark_agent.events import MessageDiscarded
from clark_agent.intake import accept_chunks
from clark_agent.stream import MessageAssembler, StreamChunk
from clark_agent.types import AssistantMessage, StopReason

__all__ = ["EMPTY", "OpenAnswer"]

EMPTY = AssistantMessage((), StopReason.OTHER)


class OpenAnswer:
    """One for each run, used again for each answer."""

    is_open = False
    """Whether the model has begun to answer and not ended."""
    placeholder = EMPTY
    """The placeholder that announced the answer."""
    details: Any = None
    """Details of the call from the transport."""
    was_announced = True
    """Whether the transport has sent `Start`."""
    failure: tuple[str, str, BaseException | None] | None = None
    """How the stream failed: the kind, the text, and the exception if there was one."""

    def __init__(self, brackets: Brackets, transcript: Transcript, journal: Journal) -> None:
        self._brackets = brackets
        self._transcript = transcript
        self._journal = journal
        self._clock: Clock = journal.clock
        self.chunks: list[StreamChunk] = []
        """The chunks so far."""

    def begin(self, placeholder: AssistantMessage, details: Any = None) -> Awaitable[None]:
        """Announce that the model begins to answer."""
        self.placeholder = placeholder
        self.is_open = self.was_announced = True
        self.details = details
        self.chunks = []
        return self._brackets.begin_message(placeholder, details)

    def keep(self, message: AssistantMessage) -> Awaitable[None]:
        """Add the complete answer to the transcript."""
        if not self.is_open:
            return self._without_start(message, None)
        self._journal.answered(self, message)  # if this fails, the answer is still open
        self.is_open = False
        brackets = self._brackets
        brackets.answer = message
        self._transcript.add_answer(message)
        return brackets.end_message(message)

    async def discard(self, message: AssistantMessage, reason: str) -> None:
        """End an answer that does not enter the transcript."""
        if not self.is_open:
            await self._without_start(message, reason)
            return
        self._drop(message, reason)
        await self._brackets.end_message(message)
        self._brackets.discarding = None
        await self._brackets.send(MessageDiscarded(reason))

    def cut_off(self, message: AssistantMessage) -> None:
        """End the answer with the run, with what was received of it."""
        self._drop(message, str(message.stop_reason))

    def _drop(self, message: AssistantMessage, reason: str) -> None:
        self._journal.answered(self, message, reason)
        self.is_open = False
        self._brackets.discarding = reason
        self._brackets.discarded = message

    async def _without_start(self, message: AssistantMessage, discard: str | None) -> None:
        """Announce an answer whose transport did not send `Start`."""
        begun = self.begin(message)
        self.was_announced = False
        await begun
        if discard is None:
            await self.keep(message)
        else:
            await self.discard(message, discard)

    def so_far(self, why: str, stop_reason: StopReason = StopReason.ABORTED) -> AssistantMessage:
        """An answer that was interrupted, or never began, with what was streamed of it."""
        now = self._clock.now_ms()
        if not self.is_open:
            return AssistantMessage((), stop_reason, why, now)
        if not self.chunks:
            start = self.placeholder
            return AssistantMessage(
                start.content, stop_reason, why, now, annotations=start.annotations
            )
        with suppress(TypeError):  # the answer ends at the first invalid chunk
            accept_chunks(self.chunks)
        assembler = MessageAssembler(self._clock.new_id)
        for chunk in self.chunks:
            assembler.feed(chunk)
        return assembler.message(stop_reason, error_message=why, timestamp=now)
