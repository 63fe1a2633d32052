"""What plugins add before a request, and the models that they ask for it, beside the turn.

`add_before_request` calls the hooks. `ModelAsker` is their `ask_model`: it sends one request, reads
the answer, and records it. The question never enters the transcript.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._text import describe, well_formed
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.effects import Effects
from clark_agent.engine.hooks import call_hook
from clark_agent.engine.pace import Pace
from clark_agent.engine.reading import close_stream
from clark_agent.engine.run import Run
from clark_agent.engine.supervised import Supervised, is_cancelled
from clark_agent.errors import RunLetGo, RunLogError, StreamError
from clark_agent.events import ConsultationEnd, ConsultationStart
from clark_agent.intake import accept_answer, accept_messages
from clark_agent.messages.tokens import estimate_messages
from clark_agent.plugins.base import (
    BeforeRequestContext,
    Question,
    TransformContext,
    plugin_name,
)
from clark_agent.plugins.hooks import Hook, Hooks
from clark_agent.prices import ModelRef
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    Start,
    StreamErrorKind,
    StreamFn,
    StreamRequest,
    ToolSchema,
    Waiting,
)
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    StopReason,
    SystemMessage,
    UserMessage,
)

__all__ = [
    "TIMEOUT",
    "Asking",
    "Consultation",
    "add_before_request",
    "answered",
    "first_request",
    "transformer",
]

logger = logging.getLogger(__name__)

TIMEOUT = "timeout"
"""The kind of the failure of a model that did not answer in time."""

_EMPTY = AssistantMessage((), StopReason.ERROR)
_PASSING = (Start, Chunk, Waiting)


class Consultation(Struct, frozen=True):
    """A request of a plugin to a model, and the answer."""

    plugin: str
    turn: int
    request: StreamRequest
    message: AssistantMessage = _EMPTY
    """The answer. If it failed, what was received."""
    error: str | None = None
    """The kind of the failure."""
    error_text: str | None = None
    model: ModelRef | None = None
    """The model, if it is not that of the run."""

    def answer(self) -> AssistantMessage:
        """Return the answer, or raise the failure."""
        if self.error is None:
            return self.message
        text = self.error_text or ""
        if self.error == TIMEOUT:
            raise TimeoutError(text)
        raise StreamError(StreamErrorKind(self.error), text)


async def add_before_request(run: Run, iteration: int, overflow: str | None = None) -> bool:
    """Let the plugins append messages to the transcript. Return whether one did.

    ``overflow`` is what the provider said if it has rejected a request of this turn as too large.
    """
    has_added = False
    done = run.lineage.resumption
    for hook in run.hooks.before_request:
        if done is not None and overflow is None and done.has_added(hook.name, run.turns):
            continue  # another process has begun the turn
        asker = ModelAsker(run, hook, iteration)
        try:
            context = _context(run, iteration, overflow, asker)
            messages = _accepted(await call_hook(run, hook, context, pausing=asker))
        except (RunLogError, RunLetGo):
            raise
        except Exception:
            logger.exception("the hook %r failed; it adds no message", hook.name)
            continue
        finally:
            asker.is_open = False
        if messages:
            await _append(run, hook, messages)
            has_added = True
    run.interrupts.check()
    return has_added


def _context(
    run: Run, iteration: int, overflow: str | None, asker: ModelAsker
) -> BeforeRequestContext[Any]:
    window: Any = getattr(run.config.stream, "context_window", None)
    is_known = isinstance(window, int) and not isinstance(window, bool) and window > 0
    return BeforeRequestContext(
        signal=run.signal,
        run_id=run.identify().run_id,
        model=run.config.model_ref,
        context_window=window if is_known else None,
        iteration=iteration,
        messages=run.transcript.view(),
        system_prompt=run.system_prompt,
        estimator=run.transcript.estimator,
        tools=run.registry,
        overflow=overflow,
        has_requested=run.requested is not None,
        asker=asker,
        transformer=transformer(run.config, asker.plugin, run.transform_context(iteration)),
        deps=run.deps,
    )


def transformer(
    config: LoopConfig, plugin: str, context: TransformContext
) -> Callable[[Sequence[AgentMessage]], Awaitable[Sequence[AgentMessage]]] | None:
    """Applies the transforms of all plugins but one. None if there are no others.

    What a plugin keeps about the transcript of the run must not change, so each application has
    instances of its own.
    """
    names = {hook.name for hook in config.hooks.context_transform} - {plugin}
    if not names:
        return None

    async def transformed(messages: Sequence[AgentMessage]) -> Sequence[AgentMessage]:
        others = [each for each in config.hooks.plugins if plugin_name(each) in names]
        size = estimate_messages(context.estimator, messages)
        about = replace(context, estimated_tokens=size, last_provider_usage=None)
        for hook in Hooks.of(others).for_run().context_transform:
            try:
                if hook.should_transform is None or hook.should_transform(messages, about):
                    edited = hook.transform.call(messages, about)
                    edited = await edited if isawaitable(edited) else edited
                    messages = accept_messages(edited, known=messages)
            except Exception:
                text = "the transform %r failed before a question; the messages stay as they were"
                logger.exception(text, hook.name)
        return messages

    return transformed


def _accepted(returned: Any) -> Sequence[AgentMessage]:
    messages = () if returned is None else accept_messages(returned)
    for message in messages:
        if not isinstance(message, (UserMessage, SystemMessage, CustomMessage)):
            raise TypeError(
                "before_request can add messages of the user, of the system and of the host, not "
                f"a {type(message).__name__}"
            )
    return messages


async def _append(run: Run, hook: Hook, messages: Sequence[AgentMessage]) -> None:
    now = run.clock.now_ms()
    messages = [m if m.timestamp is not None else replace(m, timestamp=now) for m in messages]
    purpose = hook.purpose or "before_request"
    run.purposes.add(purpose)
    purposes, place = [purpose] * len(messages), (run.turns, hook.name)
    run.journal.added("loop", messages, purposes, before_request=place)
    run.transcript.add(messages)
    await run.brackets.announce(messages)


class ModelAsker:
    """`BeforeRequestContext.ask_model` of one call of a hook."""

    def __init__(self, run: Run, hook: Hook, iteration: int) -> None:
        self._run = run
        self.plugin = hook.name
        self._iteration = iteration
        self.is_open = True
        """Whether the hook is still running."""
        self.deadline: asyncio.Timeout | None = None
        """The end of ``hook_timeout``, which is put off while a model is asked."""
        self._is_asking = False

    async def __call__(self, question: Question) -> AssistantMessage:
        """Ask, once: see `BeforeRequestContext.ask_model`."""
        run, stream = self._run, question.stream
        if not self.is_open or self._is_asking:
            raise RuntimeError("ask_model is for one question at a time, while its hook runs")
        request = _request(run, question)
        earlier = run.journal.consulted_before(self.plugin, request)
        if earlier is not None:
            return earlier.answer()
        model = None if stream is None else ModelRef.of(None, stream)
        asked = Consultation(self.plugin, run.turns, request, model=model)
        self._is_asking = True
        try:
            with _Paused(self.deadline):
                done = await self._ask(asked, stream or run.config.stream, question.max_seconds)
        finally:
            self._is_asking = False
        return done.answer()

    async def _ask(self, asked: Consultation, stream: StreamFn, seconds: float) -> Consultation:
        run = self._run
        run.brackets.consultation = began = ConsultationStart(self._iteration, self.plugin)
        await run.brackets.send(began)
        left = [s for meter in run.spending.meters if (s := meter.seconds_left()) is not None]
        done = await answered(run, stream, asked, max(0.0, min([seconds, *left])))
        if not self.is_open:  # the run has left the hook behind
            raise asyncio.CancelledError
        run.journal.consulted(done)
        run.spending.spend_aside(done.message, done.model, done.request.messages)
        usage = done.message.usage
        await run.brackets.send(ConsultationEnd(self._iteration, self.plugin, usage, done.error))
        return done


def _request(run: Run, question: Question) -> StreamRequest:
    """The newest request of the run, continued with what came since; or one of its own."""
    if question.is_continued and question.messages is None and run.requested is not None:
        newest, length = run.requested
        since, prompt = run.transcript.view()[length:], UserMessage(question.prompt)
        messages = (*newest.messages, *since, prompt)
        request = replace(newest, messages=messages, force_tool_call=False, output_schema=None)
        if question.max_output_tokens is not None:
            request = replace(request, max_output_tokens=question.max_output_tokens)
        return request
    tools = run.registry.schemas if run.requested is None else run.requested[0].tools
    return first_request(run.config, question, run.system_prompt, tools, run.transcript.view())


def first_request(
    config: LoopConfig,
    question: Question,
    system_prompt: str,
    tools: Sequence[ToolSchema],
    transcript: Sequence[AgentMessage],
) -> StreamRequest:
    """The request for a question if there is none to continue."""
    is_continued = question.is_continued
    before = question.messages
    if before is None:
        before = transcript if is_continued else ()
    cap = question.max_output_tokens
    return StreamRequest(
        system_prompt=system_prompt if is_continued else question.system_prompt or "",
        messages=(*before, UserMessage(question.prompt)),
        tools=tools if is_continued else (),
        temperature=config.temperature if is_continued else None,
        max_output_tokens=config.max_output_tokens if cap is None and is_continued else cap,
        reasoning=config.reasoning,
        provider_extras=config.provider_extras if is_continued else None,
    )


class Asking(Protocol):
    """The part of a run that asks a model."""

    effects: Effects
    signal: CancellationToken
    pace: Pace

    @property
    def grace(self) -> float:
        """How long a cancelled transport has to stop."""
        ...


async def answered(
    run: Asking, stream: StreamFn, asked: Consultation, seconds: float
) -> Consultation:
    """Send the request, and read the answer. Only a cancellation raises."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            events = run.effects.consult_model(stream, asked.request, run.signal)
            work = Supervised(_read(run, events), grace=run.grace, what="the transport")
            result: AssistantMessage | Error = await work
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        if isinstance(error, TimeoutError):
            text = str(error)
            if deadline.expired():
                text = f"the model did not answer within {seconds:g} seconds"
            return replace(asked, error=TIMEOUT, error_text=text)
        text = f"the transport raised {describe(error)}"
        return replace(asked, error=str(StreamErrorKind.FATAL), error_text=text)
    if isinstance(result, AssistantMessage):
        return replace(asked, message=result)
    try:
        kind, partial = StreamErrorKind(result.kind), accept_answer(result.partial)
    except (TypeError, ValueError):
        kind, partial = StreamErrorKind.FATAL, _EMPTY
    text = well_formed(str(result.message))
    return replace(asked, message=partial, error=str(kind), error_text=text)


async def _read(run: Asking, events: AsyncIterable[Any]) -> AssistantMessage | Error:
    """The answer, or how the stream failed."""
    try:
        async for event in events:
            kind = type(event)
            if kind is Done:
                return accept_answer(event.message)
            if kind is Error:
                return event  # type: ignore[no-any-return]
            if kind not in _PASSING:
                raise TypeError(f"a transport must yield Start, Chunk, Done or Error: {event!r}")
            await run.pace.pause_if_due()
    finally:
        await close_stream(run, events)
    return Error(_EMPTY, StreamErrorKind.EMPTY, "the stream ended without an answer")


class _Paused:
    """Puts a deadline off while it is entered."""

    def __init__(self, deadline: asyncio.Timeout | None) -> None:
        self._deadline = deadline
        self._left: float | None = None

    def __enter__(self) -> None:
        deadline = self._deadline
        if deadline is not None and not deadline.expired() and (when := deadline.when()):
            self._left = when - asyncio.get_running_loop().time()
            deadline.reschedule(None)

    def __exit__(self, *_: object) -> None:
        deadline = self._deadline
        if self._left is not None and deadline is not None and not deadline.expired():
            deadline.reschedule(asyncio.get_running_loop().time() + self._left)
