"""The events of a run, and the sinks that receive them.

Events are observations; a listener cannot change a run through them. Their order is a grammar
(see `AgentEvent`). A sink is any callable that takes an event, plain or async; the loop awaits it,
so a slow listener slows the run instead of missing events.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.stream import ReasoningDetailsChunk, StreamChunk, ToolSchema
from clark_agent.tools import ToolResult
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    ReasoningDetailsContent,
    RunIdentity,
    SystemMessage,
    ToolResultMessage,
    Usage,
)

__all__ = [
    "AgentEnd",
    "AgentEvent",
    "AgentStart",
    "ChannelSink",
    "ChildRunEvent",
    "ConsultationEnd",
    "ConsultationStart",
    "ContextTransformApplied",
    "EventSink",
    "FanOutSink",
    "MessageDiscarded",
    "MessageEnd",
    "MessageStart",
    "MessageUpdate",
    "NotRun",
    "OutputTokensEscalation",
    "ProviderRequestPrepared",
    "RequestDelayed",
    "RunIdentified",
    "ToolExecutionEnd",
    "ToolExecutionStart",
    "ToolExecutionUpdate",
    "ToolGateApplied",
    "ToolGateConflictResolved",
    "TurnEnd",
    "TurnStart",
    "public_event",
    "public_events",
]

logger = logging.getLogger(__name__)


# --- the events -------------------------------------------------------------------------------


class _Event(Struct, frozen=True, tag_field="type"):
    """Base of all events."""

    @property
    def type(self) -> str:
        """The type of the event, as in the JSON."""
        return str(self.__struct_config__.tag)


class AgentStart(_Event, frozen=True, tag="agent_start"):
    """A run begins."""


class RunIdentified(_Event, frozen=True, tag="run_identified"):
    """The identity of the run; follows `AgentStart` if the context has one."""

    identity: RunIdentity


class AgentEnd(_Event, frozen=True, tag="agent_end"):
    """The run is over, successful or not. Carries the messages of this run."""

    messages: Sequence[AgentMessage]


class TurnStart(_Event, frozen=True, tag="turn_start"):
    """A turn begins: one answer of the model and its tool calls."""


class TurnEnd(_Event, frozen=True, tag="turn_end"):
    """The turn is over: its answer, and the results in the order of the calls."""

    message: AgentMessage
    tool_results: Sequence[ToolResultMessage]


class MessageStart(_Event, frozen=True, omit_defaults=True, tag="message_start"):
    """A message begins. An assistant message is still a placeholder here.

    ``details`` has the transport's details of the call, if any, such as that a fallback model was
    used.
    """

    message: AgentMessage
    details: Any = None


class MessageUpdate(_Event, frozen=True, tag="message_update"):
    """A delta of the assistant message. ``partial`` is the placeholder of its start, unchanged."""

    partial: AssistantMessage
    chunk: StreamChunk


class MessageEnd(_Event, frozen=True, tag="message_end"):
    """The message is complete."""

    message: AgentMessage


class MessageDiscarded(_Event, frozen=True, tag="message_discarded"):
    """The assistant message that has just ended does not enter the transcript."""

    reason: str


class ToolExecutionStart(_Event, frozen=True, tag="tool_execution_start"):
    """The tool is about to run: the call was found, allowed and valid."""

    tool_call_id: str
    tool_name: str
    args: Any


class ToolExecutionUpdate(_Event, frozen=True, tag="tool_execution_update"):
    """A running tool reports progress."""

    tool_call_id: str
    tool_name: str
    partial: ToolResult


class ToolExecutionEnd(_Event, frozen=True, dict=True, tag="tool_execution_end"):
    """The call has its result. A call that was rejected has no start, only this."""

    tool_call_id: str
    tool_name: str
    result: ToolResult
    is_error: bool

    @property
    def exception(self) -> Exception | None:
        """The exception of the tool, if any. Not a field: not compared, recorded or replayed."""
        raised: Exception | None = self.__dict__.get("_exception")
        return raised

    @property
    def not_run(self) -> NotRun | None:
        """Why the tool did not run in this process; None if it did. Not a field either."""
        why: NotRun | None = self.__dict__.get("_not_run")
        return why


class NotRun(Struct, frozen=True):
    """Why a call has a result although its tool did not run in this process."""

    why: str
    """``answered`` by a hook or a decision, ``suspended``, ``restored`` from the log of another
    process; or, if the call was rejected, the reason: ``unknown_tool``, ``hidden``,
    ``invalid_arguments``, ``blocked``, ``denied``, ``steered``, …"""
    tool: str | None
    """The name of the tool; None if there is none of that name."""


def note_not_run(event: ToolExecutionEnd, why: NotRun) -> None:
    """Set why the tool did not run."""
    vars(event)["_not_run"] = why


def note_exception(holder: Struct, error: Exception) -> None:
    """Set the exception of a struct that has the property ``exception``."""
    vars(holder)["_exception"] = error


class ChildRunEvent(_Event, frozen=True, tag="child_run_event"):
    """An event of a run that a tool has started, or of one further below; see ``identity``."""

    identity: RunIdentity
    tool_call_id: str
    """The call in its parent run that started it."""
    event: AgentEvent


class OutputTokensEscalation(_Event, frozen=True, tag="output_tokens_escalation"):
    """A cut-off answer was discarded; it is requested again with a larger cap."""

    attempt: int
    prev_cap: int
    new_cap: int


class ConsultationStart(_Event, frozen=True, tag="consultation_start"):
    """A plugin asks a model beside the turn, for example for a summary."""

    iteration: int
    plugin: str


class ConsultationEnd(_Event, frozen=True, omit_defaults=True, tag="consultation_end"):
    """The model has answered, or has not."""

    iteration: int
    plugin: str
    usage: Usage | None = None
    error: str | None = None
    """The kind of the failure: a `clark_agent.stream.StreamErrorKind`, or ``timeout``."""


class ContextTransformApplied(_Event, frozen=True, tag="context_transform_applied"):
    """A plugin has transformed the messages for the model."""

    iteration: int
    plugin: str
    before: Sequence[AgentMessage]
    after: Sequence[AgentMessage]


class ToolGateApplied(_Event, frozen=True, tag="tool_gate_applied"):
    """What one gate allows for the next call, sorted; None: it does not narrow."""

    iteration: int
    plugin: str
    allow: Sequence[str] | None


class ToolGateConflictResolved(_Event, frozen=True, tag="tool_gate_conflict_resolved"):
    """The gates together left no tool, so one of them (or none) was chosen."""

    iteration: int
    plugins: Sequence[str]
    chosen_plugin: str | None
    allow: Sequence[str]
    reason: str


class ProviderRequestPrepared(_Event, frozen=True, tag="provider_request_prepared"):
    """The exact request to the model."""

    iteration: int
    model_id: str | None
    system_prompt: str
    messages: Sequence[AgentMessage]
    tools: Sequence[ToolSchema]
    temperature: float | None
    max_output_tokens: int | None


class RequestDelayed(_Event, frozen=True, tag="request_delayed"):
    """The transport waits before it sends the request, or sends it again; see
    `clark_agent.stream.Waiting`. It is not recorded: a replay does not wait.
    """

    seconds: float | None
    """It waits at least this long. None: it is not known how long."""
    reason: str


AgentEvent: TypeAlias = (
    AgentStart
    | RunIdentified
    | AgentEnd
    | TurnStart
    | TurnEnd
    | MessageStart
    | MessageUpdate
    | MessageEnd
    | MessageDiscarded
    | ToolExecutionStart
    | ToolExecutionUpdate
    | ToolExecutionEnd
    | ChildRunEvent
    | OutputTokensEscalation
    | ConsultationStart
    | ConsultationEnd
    | ContextTransformApplied
    | ToolGateApplied
    | ToolGateConflictResolved
    | ProviderRequestPrepared
    | RequestDelayed
)
"""Everything that happens in a run, by ``type``. In order::

    agent_start [run_identified] turn_start (message_start message_end)*prompts
    turn := [turn_start, except the first] (message_start message_end)*steering
            additions attempt+
            tool events: start? (update | child_run_event)* end per call, interleaved in a
            parallel batch
            (message_start message_end)*results and runtime notes
            turn_end
    additions := ([consultation_start consultation_end] (message_start message_end)*)*, by plugins
    attempt := context_transform_applied* tool_gate_applied* [tool_gate_conflict_resolved]
            provider_request_prepared request_delayed*
            message_start message_update* message_end
            and, if the loop retries: message_discarded
            [output_tokens_escalation | context_transform_applied by the overflow recovery or
            repair_history | additions after a request that was too large]
    (message_start message_end)*follow-up notes at the cap
    agent_end

Brackets close whatever happens.
"""


# --- public events ----------------------------------------------------------------------------


def public_event(event: AgentEvent) -> AgentEvent | None:
    """The event in a form that is safe to show to users; None if it must not be shown.

    Removed are requests and their changes (with the system prompt, the schemas and the transcript),
    system messages, the ``details`` of results and messages (except those of a call that waits),
    and the structured reasoning that only the provider can read. Texts of the user and the model,
    arguments and results of tools, and the host's own messages stay.
    """
    match event:
        case (
            ProviderRequestPrepared()
            | ContextTransformApplied()
            | ToolGateApplied()
            | ToolGateConflictResolved()
            | OutputTokensEscalation()
        ):
            return None
        case MessageStart(message) | MessageEnd(message):
            public = _public_message(message)
            return None if public is None else type(event)(public)
        case MessageUpdate(chunk=chunk):  # the partial is a placeholder, without any content
            return None if isinstance(chunk, ReasoningDetailsChunk) else event
        case TurnEnd(message, results):
            public_results = [replace(r, details=_public_details(r.details)) for r in results]
            return TurnEnd(_public_message(message) or message, public_results)
        case AgentEnd(messages):
            public_messages = [_public_message(message) for message in messages]
            return AgentEnd([message for message in public_messages if message is not None])
        case ToolExecutionUpdate(partial=result):
            return replace(event, partial=replace(result, details=None))
        case ToolExecutionEnd(result=result):
            public_result = replace(result, details=_public_details(result.details))
            return replace(event, result=public_result)
        case ChildRunEvent(event=below):
            public_below = public_event(below)
            return None if public_below is None else replace(event, event=public_below)
        case _:
            return event


async def public_events(events: AsyncIterable[AgentEvent]) -> AsyncIterator[AgentEvent]:
    """The events of a run that users may see, each in the form of `public_event`::

    async for event in public_events(stream):
        await websocket.send(encode_json(event).decode())
    """
    async for event in events:
        if (public := public_event(event)) is not None:
            yield public


def _public_details(details: Any) -> Any:
    """The details of a call that waits, which say so; None for all others."""
    is_waiting = isinstance(details, dict) and details.get("kind") == "suspended"
    return details if is_waiting else None


def _public_message(message: AgentMessage) -> AgentMessage | None:
    match message:
        case SystemMessage():
            return None
        case ToolResultMessage():
            return replace(message, details=_public_details(message.details))
        case AssistantMessage(content):
            kept = [block for block in content if not isinstance(block, ReasoningDetailsContent)]
            return message if len(kept) == len(content) else replace(message, content=tuple(kept))
        case _:
            return message


# --- sinks ------------------------------------------------------------------------------------

EventSink: TypeAlias = Callable[[AgentEvent], Awaitable[None] | None]
"""Where a run's events go.

Contract: may be plain or async; an exception is logged and the run continues.
"""


class FanOutSink:
    """Sends every event to several sinks in order, even if one of them raises."""

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = sinks

    async def __call__(self, event: AgentEvent) -> None:
        """Send the event to the sinks."""
        for sink in self._sinks:
            try:
                if isawaitable(pending := sink(event)):
                    await pending
            except Exception:
                logger.exception("an event sink raised; the event still goes to the others")


class ChannelSink:
    """A sink to iterate over from another task.

    ``async for event in channel`` ends with the run that it began with; a new loop continues with
    the next run. At most ``max_buffered`` events wait, then the run waits for the reader. A reader
    that stops early must close the channel (a context manager does that): a closed channel drops
    all events, so the run continues.
    """

    def __init__(self, max_buffered: int = 256) -> None:
        size: Any = max_buffered
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"max_buffered must be at least 1, not {max_buffered!r}")
        self._max_buffered = max_buffered
        self._buffer: deque[AgentEvent] = deque()
        self._room = asyncio.Event()
        self._ready = asyncio.Event()
        self._closed = False
        self._open_runs = 0
        self._run_ended = False

    async def __call__(self, event: AgentEvent) -> None:
        """Buffer an event; waits while the buffer is full."""
        while len(self._buffer) >= self._max_buffered and not self._closed:
            self._room.clear()
            await self._room.wait()
        if not self._closed:
            self._buffer.append(event)
            self._ready.set()

    def close(self) -> None:
        """Drop further events. A reader still gets the buffered ones."""
        self._closed = True
        self._room.set()
        self._ready.set()

    def __enter__(self) -> ChannelSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> ChannelSink:
        self._run_ended = False
        return self

    async def __anext__(self) -> AgentEvent:
        if self._run_ended:
            raise StopAsyncIteration
        while not self._buffer:
            if self._closed:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        event = self._buffer.popleft()
        self._room.set()
        if isinstance(event, AgentStart):
            self._open_runs += 1
        elif isinstance(event, AgentEnd):
            self._open_runs = max(0, self._open_runs - 1)
            self._run_ended = self._open_runs == 0
        return event
