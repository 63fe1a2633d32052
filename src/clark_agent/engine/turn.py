"""One answer of the model: transforms → gates → request → stream, and again when it must be.

attempt := transforms, gates, request, stream
answer  := attempt, asked again while
             nothing came              up to 3 times, a little later each time
             the connection broke      once, with a note and less thinking
             it was cut off            with a larger cap, as the recovery allows
             the transcript is too big with a smaller one, as the recovery allows
             calls and results differ  once, with a repaired transcript
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence
from inspect import isawaitable
from typing import Any, NoReturn, assert_never

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._finished import FINISHED
from clark_agent._text import describe, well_formed
from clark_agent.cancel_scope import is_cancelled
from clark_agent.errors import ContextOverflowError, HookError, RunAborted, StreamError
from clark_agent.events import (
    ContextTransformApplied,
    MessageUpdate,
    OutputTokensEscalation,
    ProviderRequestPrepared,
    ToolGateApplied,
    ToolGateConflictResolved,
)
from clark_agent.gates import GateDecision, compose_gates
from clark_agent.history import repair_history
from clark_agent.hooks import call_hook
from clark_agent.intake import (
    accept_answer,
    accept_chunk,
    accept_chunks,
    accept_json,
    accept_messages,
    is_plain_answer,
)
from clark_agent.plugin import GateHook, ToolGateContext
from clark_agent.protocol import ZERO_OUTPUT_RECOVERY
from clark_agent.run_state import Run
from clark_agent.steering import SteerWhen
from clark_agent.stream import (
    Chunk,
    Done,
    Error,
    ReasoningEffort,
    Start,
    StreamErrorKind,
    StreamRequest,
    TextChunk,
    ToolSchema,
)
from clark_agent.supervised import Supervised, as_coroutine
from clark_agent.tokens import estimate_messages
from clark_agent.types import AgentMessage, AssistantMessage, StopReason, SystemMessage

__all__ = ["ModelAnswer", "ask_model"]

logger = logging.getLogger(__name__)

_MAX_TOKENS = StopReason.MAX_TOKENS  # a name of this module is found faster than a member

# After so many deltas others may run, if it is time.
_CHUNKS_BETWEEN_PAUSES = 64

_EMPTY_ATTEMPTS = 3
_EMPTY_DELAY = 0.25
_ZERO_OUTPUT_DELAY = 0.5

_BROKEN_OFF = {
    "steered": "the user intervened",
    "out_of_time": "the time for the run is over",
}


class ModelAnswer(Struct, frozen=True):
    """What the model said, and under which conditions it was asked."""

    message: AssistantMessage
    gate_context: ToolGateContext | None
    """What the gates were told, if there are any."""
    allowlist: frozenset[str] | None
    """The tools that it was offered; None: all."""


class _Failure(Struct, frozen=True):
    """The stream ended without an answer."""

    message: AssistantMessage
    kind: StreamErrorKind
    text: str
    cause: BaseException | None = None
    raised: BaseException | None = None
    """What the transport raised, if that is how it failed."""


class _Attempts(Struct):
    """How a turn's request differs from the first, and how often it was made for which reason."""

    cap: int | None
    reasoning: ReasoningEffort
    note: SystemMessage | None = None
    empty: int = 0
    escalations: int = 0
    overflows: int = 0
    is_repaired: bool = False


async def ask_model(run: Run, iteration: int) -> ModelAnswer | None:
    """The model's answer for this turn, in the transcript when this returns; None: broken off.

    Raises `StreamError` or `RunAborted` when there is none to be had.
    """
    config, hooks = run.config, run.hooks
    attempts = _Attempts(config.max_output_tokens, config.reasoning)
    attempt = 0
    while True:
        messages: Sequence[AgentMessage]
        messages = run.transcript.view(() if attempts.note is None else (attempts.note,))
        if hooks.context_transform:
            messages = await _transformed(run, iteration, messages)
            if attempts.is_repaired:  # a transform may be what has parted calls and results
                messages = await _repaired(run, iteration, messages)
        tools: Sequence[ToolSchema] = run.registry.schemas
        gate_context: ToolGateContext | None = None
        allowlist: frozenset[str] | None = None
        if hooks.tool_gate:
            tools, gate_context, allowlist = await _gated(run, iteration, messages)
        request = _request(run, messages, tools, attempts)
        if run.log is not None:  # first: so the log knows all that the event tells
            attempt += 1
            run.log.asked(request, run.iterations, attempt)
        await run.emit(
            ProviderRequestPrepared(
                iteration,
                config.model_id,
                run.system_prompt,
                messages,
                tools,
                config.temperature,
                attempts.cap,
            )
        )
        outcome = await _stream(run, request)
        if type(outcome) is AssistantMessage:
            if run.meters or outcome.usage is not None:
                run.spend(outcome)
            if outcome.stop_reason is _MAX_TOKENS and await _escalate(run, outcome, attempts):
                continue
            await run.end_answer(outcome)
            return ModelAnswer(outcome, gate_context, allowlist)
        if not isinstance(outcome, _Failure):
            await _break_off(run)
            return None
        if not await _asks_again(run, iteration, outcome, attempts):
            return None


def _request(
    run: Run, messages: Sequence[AgentMessage], tools: Sequence[ToolSchema], attempts: _Attempts
) -> StreamRequest:
    config = run.config
    return StreamRequest(
        system_prompt=run.system_prompt,
        messages=messages,
        tools=tools,
        temperature=config.temperature,
        max_output_tokens=attempts.cap,
        reasoning=attempts.reasoning,
        provider_extras=config.provider_extras,
        force_tool_call=config.force_tool_call,
    )


# --- what the model will see ------------------------------------------------------------------


async def _transformed(
    run: Run, iteration: int, messages: Sequence[AgentMessage]
) -> Sequence[AgentMessage]:
    context = run.transform_context(iteration)
    for hook in run.hooks.context_transform:
        before = messages
        try:
            if hook.should_transform is not None and not hook.should_transform(messages, context):
                continue
            edited = await call_hook(run, hook.transform, messages, context)
            messages = accept_messages(edited, known=messages)
        except ContextOverflowError:  # there is no smaller request, and this one is too large
            raise
        except Exception:
            logger.exception("the transform %r failed; the messages stay as they were", hook.name)
        if run.log is not None:
            run.log.edited(hook.name, before, messages)
        await run.emit(ContextTransformApplied(iteration, hook.name, before, messages))
    return messages


async def _gated(
    run: Run, iteration: int, messages: Sequence[AgentMessage]
) -> tuple[Sequence[ToolSchema], ToolGateContext, frozenset[str] | None]:
    """The tools to offer, what the gates were told, and what they allow together."""
    registry = run.registry
    context = ToolGateContext(iteration, messages, run.config.conversation_id, registry.names)
    allowlist = await _allowlist(run, context)
    if allowlist is None:
        return registry.schemas, context, None
    tools = tuple([schema for schema in registry.schemas if schema.name in allowlist])
    return tools, context, allowlist


async def _allowlist(run: Run, context: ToolGateContext) -> frozenset[str] | None:
    decisions: list[GateDecision] = []
    for gate in run.hooks.tool_gate:
        allow = await _ask_gate(run, gate, context)
        shown = None if allow is None else tuple(sorted(allow.allow))
        if run.log is not None:
            run.log.gated(gate.name, shown)
        await run.emit(ToolGateApplied(context.iteration, gate.name, shown))
        if allow is not None:
            decisions.append(allow)
    allowlist, conflict = compose_gates(decisions)
    if conflict is not None:
        await run.emit(
            ToolGateConflictResolved(
                context.iteration,
                conflict.plugins,
                conflict.chosen_plugin,
                tuple(sorted(conflict.allow)),
                conflict.reason,
            )
        )
    return allowlist


async def _ask_gate(run: Run, gate: GateHook, context: ToolGateContext) -> GateDecision | None:
    try:
        allow = await call_hook(run, gate.allowlist, context)
        if allow is None:
            return None
        suppresses = gate.suppresses_advisory
        return GateDecision(
            gate.name,
            _names(allow),
            gate.priority,
            gate.is_advisory,
            suppresses is not None and suppresses(context),
        )
    except Exception as error:
        if gate.is_advisory:
            logger.exception("the advisory gate %r failed; it is ignored", gate.name)
            return None
        raise HookError("gate", gate.name, error) from error


def _names(allow: Any) -> frozenset[str]:
    is_names = (
        isinstance(allow, Iterable)
        and not isinstance(allow, str)
        and all(isinstance(name, str) for name in allow)
    )
    if not is_names:
        raise TypeError(f"a gate returns a set of names or None, not {allow!r}")
    return frozenset(allow)


# --- the stream -------------------------------------------------------------------------------


class _Reading:
    """The reading of one stream. Calling it breaks the reading off; a listener at work goes on."""

    is_due = False
    """Whether somebody has intervened."""
    is_over = False
    """Whether nothing counts that still comes: the stream may have been left behind."""
    was_cancelled = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self.emit: Callable[[MessageUpdate], Awaitable[None]] = run.emitter.emit

    def __call__(self) -> None:
        self.is_due = True
        if not self.was_cancelled and not self._run.emitter.is_sending:
            self.was_cancelled = True
            self._run.scope.cancel_task()

    def end(self) -> None:
        """The stream is over, one way or another; the task goes on."""
        self.is_over = True
        self.emit = _not_told
        if self._run.break_off is self:
            self._run.break_off = None
            if self.was_cancelled:
                self._run.scope.take_back()


def _not_told(event: MessageUpdate) -> Awaitable[None]:
    return FINISHED


async def _stream(run: Run, request: StreamRequest) -> AssistantMessage | _Failure | None:
    """The final message, or why there is none. None: somebody has intervened."""
    reading = _Reading(run)
    if run.can_intervene:
        if run.intervention(SteerWhen.NOW) is not None:
            return None
        run.break_off = reading
    try:
        events = run.config.stream(request, run.signal)
        if not hasattr(type(events), "__aiter__"):
            raise _no_transport(events)
        work = _read(run, events, reading)
        try:
            awaited = work.send(None)
        except StopIteration as done:  # it had nothing to wait for
            outcome: AssistantMessage | _Failure | None = done.value
        else:
            outcome = await Supervised(work, awaited, grace=run.grace, what="the transport")
        if reading.is_due and isinstance(outcome, _Failure):
            return None
        return outcome
    except (Exception, asyncio.CancelledError) as error:
        reading.end()
        if reading.was_cancelled and not run.is_cancelled():
            return None
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        return _Failure(
            run.failed_message(error),
            StreamErrorKind.FATAL,
            f"the transport raised {describe(error)}",
            error,
            error,
        )


def _no_transport(returned: object) -> TypeError:
    if isinstance(returned, Coroutine):
        returned.close()  # nobody will await it
    kind = type(returned).__name__
    return TypeError(f"a transport is an async generator, and this one has returned a {kind}")


async def _read(
    run: Run, events: AsyncIterable[Any], reading: _Reading
) -> AssistantMessage | _Failure | None:
    """Read to the end, or until somebody intervenes. Chunks before `Start` are ignored.

    A chunk is checked before anybody hears of it: if nobody listens, together with its neighbours.
    """
    placeholder: AssistantMessage | None = None
    tells_deltas = run.tells_deltas
    keep = run.chunks.append
    until_pause = _CHUNKS_BETWEEN_PAUSES
    try:
        async for event in events:
            kind = type(event)
            if kind is Chunk:
                if placeholder is None:
                    await run.pace.pause_if_due()
                    continue
                chunk = event.chunk
                if tells_deltas:
                    if type(chunk) is not TextChunk or type(chunk.delta) is not str:
                        chunk = accept_chunk(chunk)
                    keep(chunk)
                    await reading.emit(MessageUpdate(placeholder, chunk))
                else:
                    keep(chunk)
                until_pause -= 1
                if not until_pause:
                    until_pause = _CHUNKS_BETWEEN_PAUSES
                    await run.pace.pause_if_due()
            elif reading.is_over:
                break
            elif kind is Start:
                if placeholder is None:
                    placeholder, details = event.partial, event.details
                    if type(placeholder) is not AssistantMessage or placeholder.content:
                        placeholder = accept_answer(placeholder)
                    if details is not None:
                        details = accept_json(details, "Start.details")
                    await run.begin_answer(placeholder, details)
                    keep = run.chunks.append
                else:
                    await run.pace.pause_if_due()
            elif kind is Done:
                if run.chunks and not tells_deltas:
                    accept_chunks(run.chunks)
                message = event.message
                return message if is_plain_answer(message) else accept_answer(message)
            elif kind is Error:
                accept_chunks(run.chunks)
                return _failed(run, event)
            else:
                raise TypeError(f"a transport yields Start, Chunk, Done and Error, not {event!r}")
            if reading.is_due:
                break
        accept_chunks(run.chunks)
    except GeneratorExit as error:
        if not run.scope.is_running():
            raise
        raise RuntimeError("GeneratorExit was raised") from error
    finally:
        reading.end()
        if (close := getattr(events, "aclose", None)) is not None:
            closing = _begin_to_close(close)
            if closing is not None:
                await _finish_closing(run, *closing)
    if reading.is_due:
        return None
    message = AssistantMessage(
        (), StopReason.ERROR, "the stream ended without an answer", run.clock.now_ms()
    )
    return _Failure(message, StreamErrorKind.EMPTY, "the stream ended without an answer")


def _begin_to_close(close: Callable[[], Any]) -> tuple[Any, Any] | None:
    """Close the transport's stream; what is left of that, if it has to be waited for."""
    try:
        work = close()
        try:
            begin = work.send
        except AttributeError:
            work = as_coroutine(work)
            begin = work.send
        return work, begin(None)
    except StopIteration:
        return None
    except Exception:
        logger.exception("the transport failed to close its stream")
        return None


async def _finish_closing(run: Run, work: Any, awaited: Any) -> None:
    """Wait until the stream is closed, no longer than for a tool that was cancelled."""
    closing = _Closing(work, awaited, grace=run.grace)
    closing.leave_after(run.grace)
    try:
        await closing
    except Exception:
        logger.exception("the transport failed to close its stream")


class _Closing(Supervised):
    """The closing of a stream. It has no longer than a tool that was cancelled."""

    def _raise_left_behind(self) -> NoReturn:
        raise TimeoutError("it did not end in time, and was left behind")


def _failed(run: Run, event: Error) -> _Failure:
    """The failure that the transport reports, with as much of the answer as there is."""
    said: Any = event.message
    text = well_formed(said if isinstance(said, str) else repr(said))
    try:
        kind = StreamErrorKind(event.kind)
    except ValueError:
        kind, text = StreamErrorKind.FATAL, f"{text} (of the unknown kind {event.kind!r})"
    try:
        partial = accept_answer(event.partial)
    except TypeError as error:
        logger.warning("the transport's Error.partial is ignored: %s", error)
        partial = run.unanswered(text)
    message = replace(
        partial,
        stop_reason=StopReason.ABORTED if kind is StreamErrorKind.ABORTED else StopReason.ERROR,
        error_message=text,
        timestamp=run.clock.now_ms(),
    )
    cause = event.cause if isinstance(event.cause, BaseException) else None
    return _Failure(message, kind, text, cause)


# --- asking again -----------------------------------------------------------------------------


async def _escalate(run: Run, message: AssistantMessage, attempts: _Attempts) -> bool:
    """Prepare to ask for a cut-off answer again with a larger cap. False: it stays cut off."""
    recovery, cap = run.config.max_output_tokens_recovery, attempts.cap
    if recovery is None or cap is None or attempts.escalations >= recovery.max_attempts:
        return False
    if run.limit is not None:
        return False
    new_cap = recovery.next_cap(cap, attempts.escalations)
    if new_cap is None:
        return False
    await run.discard_answer(message, "truncated")
    attempts.escalations += 1
    attempts.cap = new_cap
    await run.emit(OutputTokensEscalation(attempts.escalations, cap, new_cap))
    return True


async def _break_off(run: Run) -> None:
    """Somebody has intervened: what came of the answer is thrown away."""
    why = run.intervention(SteerWhen.NOW) or "steered"
    message = run.unanswered(_BROKEN_OFF[why])
    run.spend(message)
    await run.discard_answer(message, why)


async def _asks_again(run: Run, iteration: int, failure: _Failure, attempts: _Attempts) -> bool:
    """Prepare the next attempt after a failed one. False: there is no budget for it."""
    run.spend(failure.message)
    run.failure = (str(failure.kind), failure.text, failure.raised)
    is_last = run.limit is not None
    reason = "out_of_budget" if is_last else str(failure.kind)
    await run.discard_answer(failure.message, reason)
    run.check_cancelled()  # which may be why the stream failed
    if not is_last:
        await _recover(run, iteration, failure, attempts)
    return not is_last


async def _recover(run: Run, iteration: int, failure: _Failure, attempts: _Attempts) -> None:
    """Prepare the next attempt after a failed one, or raise when there is to be none."""
    match failure.kind:
        case StreamErrorKind.EMPTY if attempts.empty + 1 < _EMPTY_ATTEMPTS:
            attempts.empty += 1
            await run.clock.sleep(_EMPTY_DELAY * attempts.empty)
        case StreamErrorKind.ZERO_OUTPUT_TRANSPORT if attempts.note is None:
            attempts.note = SystemMessage(ZERO_OUTPUT_RECOVERY, run.clock.now_ms())
            attempts.reasoning = _less_thinking(attempts.reasoning)
            await run.clock.sleep(_ZERO_OUTPUT_DELAY)
        case StreamErrorKind.CONTEXT_OVERFLOW if await _shrink(run, iteration, attempts):
            # The recovery starts the turn's request afresh.
            attempts.cap, attempts.reasoning = run.config.max_output_tokens, run.config.reasoning
            attempts.note, attempts.is_repaired = None, False
            attempts.empty = attempts.escalations = 0
        case StreamErrorKind.INCONSISTENT_TOOL_HISTORY if not attempts.is_repaired:
            attempts.is_repaired = True
            before = run.transcript.view()
            after = await _repaired(run, iteration, before, is_lasting=True)
            if after is not before:
                run.replace_transcript(after)
        case StreamErrorKind.EMPTY:
            text = f"no answer in {_EMPTY_ATTEMPTS} attempts; the last: {failure.text}"
            raise _with_partial(StreamError(failure.kind, text), failure)
        case StreamErrorKind.ABORTED:
            raise _with_partial(RunAborted(failure.text), failure)
        case _:
            raise _with_partial(StreamError(failure.kind, failure.text), failure)
    run.check_cancelled()


def _with_partial(error: StreamError | RunAborted, failure: _Failure) -> StreamError | RunAborted:
    error.partial = failure.message
    error.__cause__ = failure.cause
    return error


def _less_thinking(effort: ReasoningEffort) -> ReasoningEffort:
    match effort:
        case ReasoningEffort.MEDIUM | ReasoningEffort.HIGH | ReasoningEffort.XHIGH:
            return ReasoningEffort.MINIMAL
        case ReasoningEffort.NONE | ReasoningEffort.MINIMAL | ReasoningEffort.LOW:
            return effort
        case _:
            assert_never(effort)


async def _shrink(run: Run, iteration: int, attempts: _Attempts) -> bool:
    """Let the recovery make the transcript smaller. False: it may not, or it did not."""
    recovery = run.config.overflow_recovery
    if recovery is None:
        recovery = run.hooks.recovery
    if recovery is None or attempts.overflows >= getattr(recovery, "max_attempts", 1):
        return False
    attempts.overflows += 1
    context = run.transform_context(iteration)
    before = run.transcript.view()
    name = getattr(recovery, "name", type(recovery).__name__)
    try:
        after: Any = recovery.recover(before, context)
        if isawaitable(after):
            what = f"the overflow recovery {name!r}"
            after = await Supervised(as_coroutine(after), grace=run.grace, what=what)
        after = accept_messages(after, known=before)
        smaller = estimate_messages(context.estimator, after) < context.estimated_tokens
    except Exception as error:
        raise HookError("overflow recovery", name, error) from error
    if smaller:
        if run.log is not None:
            run.log.edited(name, before, after, is_lasting=True)
        await run.emit(ContextTransformApplied(iteration, name, before, after))
        run.replace_transcript(after)
    return smaller


async def _repaired(
    run: Run, iteration: int, messages: Sequence[AgentMessage], *, is_lasting: bool = False
) -> Sequence[AgentMessage]:
    """The messages with every call answered once, in its place; themselves if they are so."""
    repaired = repair_history(messages)
    if not repaired.changes:
        return messages
    name, after = repair_history.__name__, repaired.messages
    logger.warning(
        "the provider refused the history of tool calls: %d repairs", len(repaired.changes)
    )
    if run.log is not None:
        run.log.edited(name, messages, after, is_lasting=is_lasting)
    await run.emit(ContextTransformApplied(iteration, name, messages, after))
    return after
