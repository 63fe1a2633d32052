"""The loop: turns until the model is done, follow-ups until there are none.

    begin
    while follow-ups:
        while there are tool calls to answer, or steering:
            turn: steering, the model's answer, its tool calls
        follow-ups?
    end

`run` and `run_continue` are functions; what a run knows lives in `clark_agent.run_state.Run` and
ends with it. One model call is `clark_agent.turn`, one tool batch `clark_agent.execution`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from enum import Enum, StrEnum, auto
from typing import Any

from msgspec import Struct

from clark_agent._text import describe, well_formed
from clark_agent.budget import BudgetLimit, Spent
from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.errors import (
    ConfigError,
    EmptyOutcomeError,
    InvalidContinuationError,
    LoopError,
    RunAborted,
    RunLogError,
    StreamError,
)
from clark_agent.events import EventSink
from clark_agent.execution import Batch
from clark_agent.fallback import Deliver, Nudge, PlainTextFallback
from clark_agent.hooks import poll
from clark_agent.intake import accept_messages
from clark_agent.plugin import ToolGateContext
from clark_agent.preparation import ask_policy
from clark_agent.protocol import PLAIN_TEXT_RECOVERY, PlainTextRecoveryContext
from clark_agent.run_log.records import RunEnded, RunFailed
from clark_agent.run_state import ReplayScript, Resumption, Run
from clark_agent.stream import StreamErrorKind
from clark_agent.turn import ModelAnswer, ask_model
from clark_agent.types import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    StopReason,
    SystemMessage,
    TextContent,
    ToolResultMessage,
    Usage,
    UserMessage,
)

__all__ = ["LoopOutcome", "RunResult", "run", "run_continue"]

FALLBACK_ID = "plain_text_terminal_fallback_"

logger = logging.getLogger(__name__)


class LoopOutcome(StrEnum):
    """How a run ended that did not fail."""

    DONE = "done"
    """The model was done, or a tool batch voted to end."""
    WRAPPED_UP = "wrapped_up"
    """The model closed cleanly after it was told that its turns run out."""
    HIT_MAX_ITERATIONS = "hit_max_iterations"
    """The turns ran out while there was more to do."""
    OUT_OF_BUDGET = "out_of_budget"
    """The budget ran out while there was more to do; ``RunResult.limit`` says what of it."""

    @property
    def is_complete(self) -> bool:
        """Whether the model came to an end of its own."""
        return self in (LoopOutcome.DONE, LoopOutcome.WRAPPED_UP)


class RunResult(Struct, frozen=True):
    """What a run has brought: its own messages, not the whole transcript."""

    messages: tuple[AgentMessage, ...]
    outcome: LoopOutcome
    usage: Usage = Usage()
    """The tokens of all calls to the model, those asked again included."""
    undelivered: tuple[AgentMessage, ...] = ()
    """Steering that was accepted and came too late."""
    output: Any = None
    """The answer that a `finish_tool` was called with, as the type it was made for."""
    limit: BudgetLimit | None = None
    """What of the budget ran out, if that ended the run."""
    spent: Spent | None = None
    """What was spent of the budget, by this run and all that share it."""
    tree_usage: Usage = Usage()
    """The tokens of this run and of its child runs."""

    @property
    def text(self) -> str:
        """What the model said last."""
        for message in reversed(self.messages):
            if isinstance(message, AssistantMessage):
                return message.plain_text
        return ""


async def run(
    prompts: str | AgentMessage | Iterable[AgentMessage],
    context: AgentContext,
    config: LoopConfig,
    signal: CancellationToken | None = None,
) -> RunResult:
    """Give the prompts to the agent and run it to the end.

    Raises a `LoopError`, which carries what the run had, when there is no end to be had.
    """
    check_arguments(context, config, signal)
    return await start(prompts, context, config, signal)


async def run_continue(
    context: AgentContext, config: LoopConfig, signal: CancellationToken | None = None
) -> RunResult:
    """Run the agent on a transcript that waits for its answer already."""
    check_arguments(context, config, signal)
    check_continuation(context)
    return await start((), context, config, signal)


def prompt_messages(
    prompts: str | AgentMessage | Iterable[AgentMessage], config: LoopConfig
) -> Sequence[AgentMessage]:
    """The prompts as messages. Raises `TypeError` for what is none, `ConfigError` for a blank."""
    if isinstance(prompts, str):
        if not prompts.strip():
            raise ConfigError(
                "the prompt is blank: say what the agent should do. To go on with the transcript, "
                "call run_continue, or send() of a Conversation without a prompt"
            )
        return (UserMessage(well_formed(prompts), timestamp=config.clock.now_ms()),)
    given = prompts if isinstance(prompts, Iterable) else (prompts,)
    if not isinstance(given, Sequence):
        try:
            given = tuple(given)
        except Exception as error:
            text = f"the prompts could not be read: {describe(error)}"
            raise LoopError(text) from error
    try:
        return accept_messages(given)
    except TypeError as error:
        raise TypeError(
            f"prompts must be a text, a message or several messages: {error}. Write "
            "UserMessage('...') for each of several texts"
        ) from None


def check_continuation(context: AgentContext) -> None:
    """Raise `InvalidContinuationError` unless the transcript waits for an answer."""
    if not context.messages:
        raise InvalidContinuationError("there is nothing to continue: the context has no messages")
    if isinstance(context.messages[-1], AssistantMessage):
        raise InvalidContinuationError(
            "the transcript ends with the assistant's own message; add one for it to answer"
        )


def check_arguments(context: object, config: object, signal: object = None) -> None:
    """Raise `TypeError` for what is no context, no config or no token."""
    if not isinstance(context, AgentContext):
        raise TypeError(f"the context must be an AgentContext, not {type(context).__name__}")
    if not isinstance(config, LoopConfig):
        raise TypeError(f"the config must be a LoopConfig, not {type(config).__name__}")
    if signal is not None and not isinstance(signal, CancellationToken):
        raise TypeError(f"the signal must be a CancellationToken, not {type(signal).__name__}")


async def start(
    prompts: str | AgentMessage | Iterable[AgentMessage],
    context: AgentContext,
    config: LoopConfig,
    signal: CancellationToken | None = None,
    *,
    sink: EventSink | None = None,
    parent: Run | None = None,
    call_id: str | None = None,
    resumption: Resumption | None = None,
    replays: ReplayScript | None = None,
) -> RunResult:
    """Run the agent, with a sink besides the config's, or as the child of another run."""
    messages = prompt_messages(prompts, config)
    token = signal or CancellationToken()
    state = Run(context, config, token, sink=sink, parent=parent, call_id=call_id)
    state.resumption = resumption
    if replays is not None:
        state.replay_from(replays)
    with state.scope:
        try:
            outcome = await _run(state, messages)
            await state.end()
            return await _result(state, outcome)
        except BaseException as error:
            if isinstance(error, GeneratorExit) and not state.scope.is_running():
                raise  # thrown away by an event loop that is gone: nothing can be awaited
            failure = _failure(error, state)
            is_cancelled = state.is_cancelled() or not isinstance(error, Exception)
            if isinstance(failure, RunAborted) and is_cancelled:
                state.note_cancelled()
            if state.has_unanswered_calls and state.turn_message is not None:
                calls, earlier = state.turn_message.tool_calls, None
                if resumption is not None and resumption.answer is state.turn_message:
                    earlier = resumption.calls
                state.batch = Batch(state, state.turn_message, calls, earlier)
            if state.log is not None:
                state.log.is_closing = True
            state.carry(failure, await _closed(state, error))
            if state.log is not None:
                # A run that ended because of its log, or of one below, has not ended there: what is
                # written can be resumed.
                if not state.log.has_ended and not isinstance(failure, RunLogError):
                    state.log.write(_failed(failure))
                await state.log.settle(config.cancel_grace if state.is_cancelled() else None)
            ending = _ending(state.exit or error, failure, state)
            raise ending from ending.__cause__
        finally:
            state.hooks.end_run()
            if state.log is not None:
                state.log.close()


async def _closed(state: Run, error: BaseException) -> AssistantMessage | None:
    """Close what is open; the message that was cut off. The error carries what the run had,
    whatever goes wrong here.
    """
    try:
        return await state.close(error)
    except Exception:
        logger.exception("the run could not be closed in order")
        return None


async def _result(state: Run, outcome: LoopOutcome) -> RunResult:
    limit = state.limit if outcome is LoopOutcome.OUT_OF_BUDGET else None
    if state.log is not None:
        state.log.write(
            RunEnded(
                outcome=str(outcome),
                usage=state.usage,
                tree_usage=state.tree_usage,
                limit=None if limit is None else str(limit),
            ),
            ends_turn=True,
        )
        state.log.has_ended = True
        await state.log.barrier()
    return RunResult(
        messages=tuple(state.messages),
        outcome=outcome,
        usage=state.usage,
        undelivered=state.leave(),
        output=state.output,
        limit=limit,
        spent=state.meters[0].spent() if state.meters else None,
        tree_usage=state.tree_usage,
    )


def _failed(failure: LoopError) -> RunFailed:
    return RunFailed(
        error=type(failure).__name__,
        text=str(failure),
        reason=failure.reason if isinstance(failure, RunAborted) else None,
        usage=failure.usage,
        tree_usage=failure.tree_usage,
        partial=failure.partial,
        undelivered=failure.undelivered,
    )


def _failure(error: BaseException, state: Run) -> LoopError:
    """The error that carries what the run had."""
    if isinstance(error, LoopError):
        return error
    if not isinstance(error, (Exception, GeneratorExit)):
        return RunAborted(state.abort_reason)
    failure = LoopError(f"the run failed unexpectedly: {describe(error)}")
    failure.__cause__ = error
    return failure


def _ending(error: BaseException, failure: LoopError, state: Run) -> BaseException:
    """What the caller gets: the failure, or what is not ours to end, with the failure as cause."""
    by_token = state.signal.cancelled and not state.scope.cancelled_from_outside
    if isinstance(error, asyncio.CancelledError) and not by_token:
        ending: BaseException = error
    elif isinstance(error, Exception) and state.scope.cancelled_from_outside:
        ending = asyncio.CancelledError()
    elif isinstance(error, (Exception, asyncio.CancelledError, GeneratorExit)):
        return failure
    else:  # the interpreter is told to stop
        ending = error
    ending.__cause__ = failure
    return ending


async def _run(state: Run, prompts: Sequence[AgentMessage]) -> LoopOutcome:
    config = state.config
    fallback = PlainTextFallback(config)
    await state.begin(prompts)
    first, resumption = _Then.ANSWER, state.resumption
    if resumption is not None:
        state.restore(resumption)
        ask_policy(state, lambda: fallback.restore(resumption.messages))
        first = await _resume(state, resumption, fallback)
    if first is not _Then.END:
        await poll(state, state.hooks.steering, state.pending)
    while True:
        then, first = first, _Then.ANSWER
        while then is _ANSWER or state.pending:
            await state.pace.pause_if_due()
            state.check_cancelled()
            if state.at_cap():
                break
            then = await _turn(state, fallback)
            if then is not _Then.END and state.hooks.steering:
                await poll(state, state.hooks.steering, state.pending)
        _check_empty_outcomes(config, fallback)
        if then is _Then.END:
            return _outcome(state, unfinished=False)
        await poll(state, state.hooks.follow_up, state.follow_ups)
        follow_ups, state.follow_ups = state.follow_ups, []
        if state.at_cap():
            unfinished = then is _Then.ANSWER or bool(state.pending) or bool(follow_ups)
            await state.add_follow_ups(follow_ups)
            return _outcome(state, unfinished=unfinished)
        if not follow_ups:
            return _outcome(state, unfinished=False)
        state.pend(follow_ups)


async def _resume(state: Run, resumption: Resumption, fallback: PlainTextFallback) -> _Then:
    """Go on where the log ends: within a batch, behind a last word, or before the next answer."""
    if resumption.was_delivered:
        return _Then.END
    if (message := resumption.ended) is not None:
        batch = Batch(state, message, message.tool_calls, resumption.calls)
        if not batch.recall():
            return _Then.ANSWER
        state.output = batch.output()
        return _Then.END
    message = resumption.answer
    if message is None:
        return _Then.ANSWER
    await state.tell_again(message)
    gates = ToolGateContext(
        state.iterations - 1,
        state.transcript.view(),
        state.config.conversation_id,
        state.registry.names,
    )
    answer = ModelAnswer(message, gates, resumption.offered)
    if message.tool_calls:
        batch = Batch(state, message, message.tool_calls, resumption.calls)
        return await _finish_turn(state, answer, fallback, batch)
    return await _finish_turn(state, answer, fallback, None)


class _Then(Enum):
    """What a turn leaves to be done."""

    ANSWER = auto()
    """The model has results to answer."""
    STOP = auto()
    """It has stopped. Steering or a follow-up may start it again."""
    END = auto()
    """The run is over; nobody is asked any more."""


# A name of the module is found faster than a member of an enumeration.
_ANSWER = _Then.ANSWER
_ABORTED, _ERROR = StopReason.ABORTED, StopReason.ERROR


async def _turn(state: Run, fallback: PlainTextFallback) -> _Then:
    """Steering, the model's answer, its tool calls; and what comes then."""
    await state.begin_turn()
    answer = await ask_model(state, state.iterations - 1)
    if answer is None:
        await state.end_turn()
        return _Then.ANSWER
    message = answer.message
    if message.stop_reason is _ABORTED or message.stop_reason is _ERROR:
        raise _reported_failure(message)
    calls = message.tool_calls
    batch = Batch(state, message, calls) if calls else None
    return await _finish_turn(state, answer, fallback, batch)


async def _finish_turn(
    state: Run, answer: ModelAnswer, fallback: PlainTextFallback, batch: Batch | None
) -> _Then:
    """The tool calls of an answer, or what becomes of one without; and what comes then."""
    if batch is not None:
        state.batch = batch
        await batch.execute(answer)
        if fallback.stops:
            fallback.reset()
        await state.add_results(batch)
        then = _ANSWER
        if batch.terminates():
            then, state.output = _Then.END, batch.output()
    else:
        state.check_cancelled()
        then = await _without_tools(state, answer, fallback)
    await state.end_turn()
    return then


def _reported_failure(message: AssistantMessage) -> LoopError:
    """A transport may close a message with an error instead of reporting one."""
    if message.stop_reason is StopReason.ABORTED:
        return RunAborted(message.error_message)
    text = message.error_message or "the message ended with an error"
    return StreamError(StreamErrorKind.TRANSIENT, text)


async def _without_tools(state: Run, answer: ModelAnswer, fallback: PlainTextFallback) -> _Then:
    """The model has stopped in plain text: nudge it, deliver the text, or leave it at that."""
    decision = ask_policy(state, lambda: fallback.decide(answer.message, answer.allowlist))
    match decision:
        case Nudge():
            await state.say(_nudge(state, answer), "nudge")
            return _Then.ANSWER
        case Deliver(text):
            fallback.reset()
            result = _delivered(state, text)
            state.turn_results = [result]
            await state.say(result, "final_answer")
            return _Then.END
        case _:
            return _Then.STOP


def _nudge(state: Run, answer: ModelAnswer) -> SystemMessage:
    config = state.config
    context = PlainTextRecoveryContext(
        state.transcript.view(),
        state.iterations - 1,
        state.registry.names,
        config.plain_text_terminal_fallback_tool,
    )
    text = ask_policy(state, lambda: config.protocol.plain_text_recovery_prompt(context))
    return SystemMessage(text or PLAIN_TEXT_RECOVERY, state.clock.now_ms())


def _delivered(state: Run, text: str) -> ToolResultMessage:
    tool = state.config.plain_text_terminal_fallback_tool
    assert tool is not None
    return ToolResultMessage(
        FALLBACK_ID + state.clock.new_id(),
        tool,
        (TextContent(text),),
        narration="Took the model's plain text for its final answer.",
        timestamp=state.clock.now_ms(),
    )


def _check_empty_outcomes(config: LoopConfig, fallback: PlainTextFallback) -> None:
    budget = config.empty_outcome_retry_budget
    if budget is not None and fallback.stops > budget:
        raise EmptyOutcomeError(budget, fallback.stops)


def _outcome(state: Run, *, unfinished: bool) -> LoopOutcome:
    if unfinished:
        cap = state.config.max_iterations
        hit_cap = cap is not None and state.iterations >= cap
        return LoopOutcome.HIT_MAX_ITERATIONS if hit_cap else LoopOutcome.OUT_OF_BUDGET
    was_warned = not state.told.isdisjoint(("wrap_up", "budget"))
    return LoopOutcome.WRAPPED_UP if was_warned else LoopOutcome.DONE
