"""One answer of the model: additions → transforms → gates → request → stream, retried if needed.

additions             plugins append messages, for which they may ask a model:
                      `clark_agent.engine.consult`
prepare the request   transforms edit the messages, gates narrow the tools
the attempt           `clark_agent.engine.reading` reads one stream
retry                 `clark_agent.engine.retry` decides, this file does it
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from inspect import isawaitable
from typing import Any, assert_never

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.engine.consult import add_before_request
from clark_agent.engine.hooks import call_hook
from clark_agent.engine.reading import StreamFailure, read_answer
from clark_agent.engine.retry import (
    AskAgain,
    Attempts,
    GiveUp,
    Repair,
    Shrink,
    TooLarge,
    after_failure,
    with_larger_cap,
)
from clark_agent.engine.run import Run
from clark_agent.engine.supervised import Supervised, as_coroutine
from clark_agent.errors import ContextOverflowError, HookError
from clark_agent.events import (
    ContextTransformApplied,
    OutputTokensEscalation,
    ProviderRequestPrepared,
    ToolGateApplied,
    ToolGateConflictResolved,
)
from clark_agent.gates import GateDecision, compose_gates
from clark_agent.history import repair_history
from clark_agent.intake import accept_messages
from clark_agent.messages.tokens import estimate_messages
from clark_agent.plugins.base import ToolGateContext
from clark_agent.plugins.hooks import GateHook
from clark_agent.steering import SteerWhen
from clark_agent.stream import StreamRequest, ToolSchema
from clark_agent.types import AgentMessage, AssistantMessage, StopReason

__all__ = ["ModelAnswer", "ask_model"]

logger = logging.getLogger(__name__)

_MAX_TOKENS = StopReason.MAX_TOKENS  # cheaper than a member of an enumeration

_ADDITIONS = 3
"""How often plugins may make a request of one turn smaller by what they add."""

_INTERRUPTED = {
    "steered": "the user intervened",
    "out_of_time": "the time for the run is over",
}


class ModelAnswer(Struct, frozen=True):
    """The answer of the model, and the conditions of its request."""

    message: AssistantMessage
    gate_context: ToolGateContext | None
    """The context of the gates, if there are any."""
    allowlist: frozenset[str] | None
    """The offered tools; None: all."""


async def ask_model(run: Run) -> ModelAnswer | None:
    """The model's answer for this turn, which is in the transcript when this returns.

    None: the run continues without an answer, because the user steered, or time or budget ran out.
    Raises `StreamError` or `RunAborted` when the stream fails for good.
    """
    config, hooks, iteration = run.config, run.hooks, run.turns - 1
    attempts = Attempts(config.max_output_tokens, config.reasoning)
    if hooks.before_request:
        await add_before_request(run, iteration)
    while True:
        messages: Sequence[AgentMessage]
        if attempts.note is None:
            messages = run.transcript.view()
        else:
            messages = run.transcript.view((attempts.note,))
        if hooks.context_transform:
            messages = await _transform(run, iteration, messages)
            if attempts.is_repaired:  # a transform may have separated calls and results
                messages = await _repair(run, iteration, messages)
        if attempts.too_large is not None:
            attempts.too_large.check(estimate_messages(run.transcript.estimator, messages))
        tools: Sequence[ToolSchema] = run.registry.schemas
        gate_context: ToolGateContext | None = None
        allowlist: frozenset[str] | None = None
        if hooks.tool_gate:
            tools, gate_context, allowlist = await _gate_tools(run, iteration, messages)
        request = StreamRequest(
            system_prompt=run.system_prompt,
            messages=messages,
            tools=tools,
            temperature=config.temperature,
            max_output_tokens=attempts.cap,
            reasoning=attempts.reasoning,
            provider_extras=config.provider_extras,
            force_tool_call=config.forces_tool_call,
            output_schema=config.output_schema,
        )
        run.requested = request, len(run.transcript)
        run.journal.asked(request, run.turns)  # before the event, so no listener is ahead of it
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
        outcome = await read_answer(run, request)
        if isinstance(outcome, AssistantMessage):
            if run.spending.meters or outcome.usage is not None:
                run.spending.spend(outcome)
            if outcome.stop_reason is _MAX_TOKENS:
                larger = await _escalate(run, outcome, attempts)
                if larger is not None:
                    attempts = larger
                    continue
            await run.answer.keep(outcome)
            return ModelAnswer(outcome, gate_context, allowlist)
        if outcome is None:  # the user steered, or time ran out
            await _discard_partial(run)
            return None
        again = await _recover(run, iteration, outcome, attempts)
        if again is None:
            return None
        attempts = again


# --- what the model will see ------------------------------------------------------------------


async def _transform(
    run: Run, iteration: int, messages: Sequence[AgentMessage]
) -> Sequence[AgentMessage]:
    context = run.transform_context(iteration)
    for hook in run.hooks.context_transform:
        before = messages
        try:
            if hook.should_transform is not None and not hook.should_transform(messages, context):
                run.journal.edited(hook.name, messages, messages)  # it may have edited before
                continue
            edited = await call_hook(run, hook.transform, messages, context)
            messages = accept_messages(edited, known=messages)
        except ContextOverflowError:  # the request is too large and cannot be made smaller
            raise
        except Exception:
            logger.exception("the transform %r failed; the messages stay as they were", hook.name)
        run.journal.edited(hook.name, before, messages)
        await run.emit(ContextTransformApplied(iteration, hook.name, before, messages))
    return messages


async def _gate_tools(
    run: Run, iteration: int, messages: Sequence[AgentMessage]
) -> tuple[Sequence[ToolSchema], ToolGateContext, frozenset[str] | None]:
    """The tools to offer, the context of the gates, and their combined allowlist."""
    registry = run.registry
    context = ToolGateContext(
        iteration, messages, run.config.conversation_id, registry.names, run.deps
    )
    allowlist = await _allowlist(run, context)
    if allowlist is None:
        return registry.schemas, context, None
    tools = tuple([schema for schema in registry.schemas if schema.name in allowlist])
    return tools, context, allowlist


async def _allowlist(run: Run, context: ToolGateContext) -> frozenset[str] | None:
    decisions: list[GateDecision] = []
    for gate in run.hooks.tool_gate:
        decision = await _ask_gate(run, gate, context)
        shown = None if decision is None else tuple(sorted(decision.allow))
        run.journal.gated(gate.name, shown)
        await run.emit(ToolGateApplied(context.iteration, gate.name, shown))
        if decision is not None:
            decisions.append(decision)
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
        raise TypeError(f"a gate must return a set of names or None, not {allow!r}")
    return frozenset(allow)


# --- asking again -----------------------------------------------------------------------------


async def _discard_partial(run: Run) -> None:
    """Discard the received part of an answer, because the user steered or time ran out."""
    why = run.interrupts.due(SteerWhen.NOW) or "steered"
    message = run.answer.so_far(_INTERRUPTED[why])
    run.spending.spend(message)
    await run.answer.discard(message, why)


async def _escalate(run: Run, message: AssistantMessage, attempts: Attempts) -> Attempts | None:
    """Request an answer that was cut off again, with a larger cap. None: it stays cut off."""
    larger = with_larger_cap(attempts, run.config)
    if larger is None or larger.cap is None or attempts.cap is None:
        return None
    if run.spending.limit is not None:
        return None
    await run.answer.discard(message, "truncated")
    await run.emit(OutputTokensEscalation(larger.escalations, attempts.cap, larger.cap))
    return larger


async def _recover(
    run: Run, iteration: int, failure: StreamFailure, attempts: Attempts
) -> Attempts | None:
    """Prepare the next attempt after a failed stream. None: there is no budget for it."""
    run.spending.spend(failure.message)
    run.answer.failure = (str(failure.kind), failure.text, failure.raised)
    out_of_budget = run.spending.limit is not None
    reason = "out_of_budget" if out_of_budget else str(failure.kind)
    await run.answer.discard(failure.message, reason)
    run.interrupts.check()  # a cancellation may be why the stream failed
    if out_of_budget:
        return None
    decision = after_failure(failure, attempts, run.config, run.clock.now_ms)
    match decision:
        case AskAgain():
            await run.clock.sleep(decision.delay)
        case Shrink():
            return await _make_room(run, iteration, failure, decision)
        case Repair():
            before = run.transcript.view()
            after = await _repair(run, iteration, before, is_lasting=True)
            if after is not before:
                run.replace_transcript(after)
        case GiveUp():
            raise decision.error
        case _:
            assert_never(decision)
    run.interrupts.check()
    return decision.attempts


async def _make_room(run: Run, iteration: int, failure: StreamFailure, shrink: Shrink) -> Attempts:
    """Let the plugins, or else the recovery, make a request smaller that was too large. Raises what
    it said if they do not.
    """
    attempts, error = shrink.attempts, shrink.otherwise.error
    assert run.requested is not None
    sent = estimate_messages(run.transcript.estimator, run.requested[0].messages)
    may_add = run.hooks.before_request and attempts.overflows <= _ADDITIONS
    if may_add and await add_before_request(run, iteration, failure.text):
        attempts = replace(attempts, too_large=TooLarge(sent, error))
    elif not await _shrink(run, iteration, attempts.overflows - 1):
        raise error
    run.interrupts.check()
    return attempts


async def _shrink(run: Run, iteration: int, times: int) -> bool:
    """Let the recovery make the transcript smaller. False: it was not allowed to, or did not."""
    recovery = run.config.overflow_recovery
    if recovery is None:
        recovery = run.hooks.recovery
    if recovery is None or times >= getattr(recovery, "max_attempts", 1):
        return False
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
        run.journal.edited(name, before, after, is_lasting=True)
        await run.emit(ContextTransformApplied(iteration, name, before, after))
        run.replace_transcript(after)
    return smaller


async def _repair(
    run: Run, iteration: int, messages: Sequence[AgentMessage], *, is_lasting: bool = False
) -> Sequence[AgentMessage]:
    """The messages with exactly one result per call, in its place; unchanged if they are valid."""
    repaired = repair_history(messages)
    if not repaired.changes:
        return messages
    name, after = repair_history.__name__, repaired.messages
    logger.warning(
        "the provider rejected the history of tool calls; repairs: %d", len(repaired.changes)
    )
    run.journal.edited(name, messages, after, is_lasting=is_lasting)
    await run.emit(ContextTransformApplied(iteration, name, messages, after))
    return after
