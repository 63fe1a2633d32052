"""The loop: turns until the model is done, then follow-ups, until there are none.

    begin
    repeat:
        while the model has something to answer, or messages wait:
            turn: the messages, the model's answer, its tool calls
        follow-ups? If there are none: end

`run` and `run_continue` are functions over values. The state of a run is
`clark_agent.engine.run.Run`. `clark_agent.engine.lifecycle` begins and ends it: an exception here
goes through `finish`, which closes what is open. One answer of the model is
`clark_agent.engine.turn`, its tool calls are `clark_agent.engine.batch`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from enum import Enum, auto
from typing import Any, assert_never

from msgspec.structs import replace

from clark_agent.cancellation import CancellationToken
from clark_agent.config import LoopConfig
from clark_agent.engine.arguments import check_arguments, check_continuation, prompt_messages
from clark_agent.engine.batch import Batch, BatchOutcome
from clark_agent.engine.fallback import Deliver, FallbackDecision, Nudge, PlainTextFallback
from clark_agent.engine.goal import REJECTED, Goal
from clark_agent.engine.hooks import poll
from clark_agent.engine.lifecycle import begin, finish
from clark_agent.engine.prepare import ask_policy
from clark_agent.engine.resumption import (
    AfterAnswer,
    AfterBatch,
    FinalAnswer,
    NewTurn,
    Resumption,
    Where,
)
from clark_agent.engine.run import Run
from clark_agent.engine.tool_refresh import check_waiting_calls, refresh_tools
from clark_agent.engine.turn import ModelAnswer, ask_model
from clark_agent.errors import (
    EmptyOutcomeError,
    LoopError,
    ModelRetry,
    RunAborted,
    StreamError,
    failure_of,
)
from clark_agent.events import EventSink
from clark_agent.output import NO_OUTPUT
from clark_agent.plugins.base import ToolGateContext
from clark_agent.protocol import PLAIN_TEXT_RECOVERY, PlainTextRecoveryContext
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.stream import StreamErrorKind
from clark_agent.tracing import follow
from clark_agent.types import (
    AgentContext,
    AgentMessage,
    AssistantMessage,
    StopReason,
    SystemMessage,
    TextContent,
    ToolResultMessage,
)

__all__ = ["run", "run_continue", "start"]

FALLBACK_ID = "plain_text_terminal_fallback_"


async def run(
    prompts: str | AgentMessage | Iterable[AgentMessage],
    context: AgentContext,
    config: LoopConfig,
    signal: CancellationToken | None = None,
    *,
    deps: Any = None,
) -> RunResult:
    """Run the agent with the prompts, to the end.

    Tools and hooks get ``deps`` as ``ctx.deps``.

    Raises a `LoopError`, which carries what the run had, if the run fails.
    """
    check_arguments(context, config, signal)
    return await start(prompts, context, config, signal, deps=deps)


async def run_continue(
    context: AgentContext,
    config: LoopConfig,
    signal: CancellationToken | None = None,
    *,
    deps: Any = None,
) -> RunResult:
    """Run the agent on a transcript that already awaits an answer."""
    check_arguments(context, config, signal)
    check_continuation(context)
    return await start((), context, config, signal, deps=deps)


async def start(
    prompts: str | AgentMessage | Iterable[AgentMessage],
    context: AgentContext,
    config: LoopConfig,
    signal: CancellationToken | None = None,
    *,
    sink: EventSink | None = None,
    parent: Run | None = None,
    call_id: str | None = None,
    call_place: tuple[int, int, int] | None = None,
    resumption: Resumption | None = None,
    deps: Any = None,
    can_wait: bool = True,
) -> RunResult:
    """Run the agent: with a second sink, as a child of another run, or from where another process
    has stopped. Then the result, or the error, has the messages from before too.
    """
    messages = prompt_messages(prompts, config)
    token = signal or CancellationToken()
    run = Run(
        context,
        config,
        token,
        sink=sink,
        parent=parent,
        call_id=call_id,
        call_place=call_place,
        resumption=resumption,
        deps=deps,
        can_wait=can_wait,
    )
    finishing = finish(run, _loop(run, messages, resumption))
    if run.trace is not None:
        finishing = follow(run.trace, finishing)
    if resumption is None:
        return await finishing
    earlier = resumption.messages
    try:
        result = await finishing
    except BaseException as error:
        if (failure := failure_of(error)) is not None:
            failure.messages = (*earlier, *failure.messages)
        raise
    return replace(result, messages=(*earlier, *result.messages))


class NextStep(Enum):
    """What to do after a turn."""

    ASK = auto()
    """Call the model: it has results to answer, or another attempt to make."""
    STOP = auto()
    """The model has stopped. Steering or a follow-up may start it again."""
    END = auto()
    """The run is over: no source of messages is polled any more. Only a message that another
    process has accepted and not delivered still gets a turn."""
    SUSPEND = auto()
    """Calls wait for a decision: the run ends for now."""


# Globals of the module: cheaper than members of an enumeration, every turn.
_ASK, _STOP, _END, _SUSPEND = NextStep
_FAILED = (StopReason.ABORTED, StopReason.ERROR)


async def _loop(
    run: Run, prompts: Sequence[AgentMessage], resumption: Resumption | None
) -> LoopOutcome:
    """The double loop."""
    inbox, interrupts, hooks, pace = run.inbox, run.interrupts, run.hooks, run.pace
    fallback = PlainTextFallback(run.config)
    if resumption is not None and run.config.source_hook is not None:
        await refresh_tools(run, run.config.source_hook, resumption.turns)
        check_waiting_calls(run, resumption)
    await begin(run, prompts, resumption)
    step = _ASK
    if resumption is not None:
        earlier = resumption.messages
        ask_policy(run, lambda: fallback.restore(earlier))
        step = await _resume_at(run, resumption.where, fallback)
        if step is _SUSPEND:
            return LoopOutcome.SUSPENDED
    if step is not _END and hooks.steering:
        await poll(run, hooks.steering, inbox.pending)
    while True:
        while step is _ASK or inbox.pending:  # messages that wait get a turn, whatever the step
            await pace.pause_if_due()
            interrupts.check()
            if run.is_capped and run.at_cap():
                break
            step = await _turn(run, fallback)
            if step is _SUSPEND:
                return LoopOutcome.SUSPENDED
            if step is not _END and hooks.steering:
                await poll(run, hooks.steering, inbox.pending)
        _check_empty_outcomes(run.config, fallback)
        if step is _END:
            return _outcome(run, unfinished=False)
        if hooks.follow_up:
            await poll(run, hooks.follow_up, inbox.follow_ups)
        follow_ups, inbox.follow_ups = inbox.follow_ups, []
        if run.is_capped and run.at_cap():
            unfinished = step is _ASK or bool(inbox.pending) or bool(follow_ups)
            await _append_follow_ups(run, follow_ups)
            return _outcome(run, unfinished=unfinished)
        if not follow_ups and not inbox.pending:
            return _outcome(run, unfinished=False)
        inbox.promote(follow_ups)
        step = _ASK


async def _resume_at(run: Run, where: Where, fallback: PlainTextFallback) -> NextStep:
    """Continue where another process has stopped.

    `begin` has restored the transcript and opened a turn, the first of this process: the next one
    to run uses it, and a run that is over ends it.
    """
    match where:
        case NewTurn():  # no answer is outstanding
            return _ASK
        case FinalAnswer():  # only the end is missing
            return _END
        case AfterBatch():  # the results are in the transcript: only vote
            outcome = Batch.resumed(run, where).recall_vote()
            run.output = outcome.output
            return _END if outcome.ends_run else _ASK
        case AfterAnswer(message, offered):  # not all its calls have results
            gate_context = ToolGateContext(
                run.turns - 1,
                run.transcript.view(),
                run.config.conversation_id,
                run.registry.names,
                run.deps,
            )
            return await _act_on(run, ModelAnswer(message, gate_context, offered), fallback)
        case _:
            assert_never(where)


async def _turn(run: Run, fallback: PlainTextFallback) -> NextStep:
    """Run a turn: waiting messages, the model's answer, its tool calls. Return the next step."""
    run.turns += 1
    if run.inbox.pending or run.spending.meters:
        await _begin_turn_with_messages(run)
    else:
        await run.brackets.begin_turn()
    if run.config.source_hook is not None:
        await refresh_tools(run, run.config.source_hook, run.turns)
    answer = await ask_model(run)
    if answer is None:  # it was interrupted and discarded
        await run.brackets.end_turn()
        return _ASK
    return await _act_on(run, answer, fallback)


async def _begin_turn_with_messages(run: Run) -> None:
    """Open a turn, and add the messages that wait for it."""
    run.spending.begin_turn()
    await run.brackets.begin_turn()
    messages, purposes, receipts = run.inbox.take()
    if "budget" not in run.purposes and (warning := run.spending.warning()) is not None:
        messages.append(warning)
        purposes.append("budget")
    run.purposes.update(purposes)
    if messages:
        run.journal.added("turn", messages, purposes, receipts)
    run.inbox.delivered(run.turns)
    await _add(run, messages)


async def _act_on(run: Run, answer: ModelAnswer, fallback: PlainTextFallback) -> NextStep:
    """Run the tool calls of an answer, or decide about an answer without any; end the turn."""
    message = answer.message
    if message.stop_reason in _FAILED:
        raise _reported_failure(message)
    batch = run.batch  # there is one if the run was resumed inside it
    if batch is None and (calls := message.tool_calls):
        batch = run.batch = Batch(run, message, calls)
    if batch is not None:
        outcome = await batch.execute(answer)
        if fallback.stops:
            fallback.reset()
        results = outcome.results
        if outcome.waits:
            return await _suspend(run, outcome)
        run.journal.batch_ended(outcome.calls, results)  # if this fails, the batch is still open
        run.batch, run.brackets.results = None, results
        await _add(run, results)
        step = _ASK
        if outcome.ends_run:
            step, run.output = _END, outcome.output
        elif run.goal is not None:
            run.goal.check_batch(results)
    else:
        run.interrupts.check()
        if run.goal is None:
            step = await _after_plain_text(run, answer, fallback)
        else:
            step = await _after_output(run, run.goal, message)
    await run.brackets.end_turn()
    return step


async def _suspend(run: Run, outcome: BatchOutcome) -> NextStep:
    """End the turn, and the run for now. In the journal the batch stays open."""
    run.interrupts.check()  # a run that is cancelled does not wait
    results = outcome.results
    run.journal.suspended(run, outcome.calls, results)
    run.batch, run.brackets.results = None, results
    run.waiting = tuple([request for wait in outcome.waits for request in wait.requests])
    await _add(run, results)
    await run.brackets.end_turn()
    return _SUSPEND


def _reported_failure(message: AssistantMessage) -> LoopError:
    """The error for a message that ended with a failure, which the transport did not report."""
    if message.stop_reason is StopReason.ABORTED:
        return RunAborted(message.error_message)
    text = message.error_message or "the message ended with an error"
    return StreamError(StreamErrorKind.TRANSIENT, text)


async def _after_output(run: Run, goal: Goal, message: AssistantMessage) -> NextStep:
    """The model has stopped: take its answer as the output, or let it try again."""
    try:
        run.output = await goal.accept(message, run.host_context())
    except ModelRetry as retry:
        run.output = NO_OUTPUT
        await _say(run, SystemMessage(str(retry), run.clock.now_ms()), REJECTED)
        return _ASK
    return _STOP


# --- an answer without tool calls -----------------------------------------------------------------


async def _after_plain_text(run: Run, answer: ModelAnswer, fallback: PlainTextFallback) -> NextStep:
    """Handle an answer in plain text: nudge the model, deliver the text, or accept the stop."""
    decision: FallbackDecision
    decision = ask_policy(run, lambda: fallback.decide(answer.message, answer.allowlist))
    match decision:
        case Nudge():
            await _say(run, _nudge(run), "nudge")
            return _ASK
        case Deliver(text):
            fallback.reset()
            result = _delivered(run, text)
            run.brackets.results = (result,)
            await _say(run, result, "final_answer")
            return _END
        case None:
            return _STOP
        case _:
            assert_never(decision)


def _nudge(run: Run) -> SystemMessage:
    config = run.config
    context = PlainTextRecoveryContext(
        run.transcript.view(),
        run.turns - 1,
        run.registry.names,
        config.plain_text_terminal_fallback_tool,
    )
    text = ask_policy(run, lambda: config.protocol.plain_text_recovery_prompt(context))
    return SystemMessage(text or PLAIN_TEXT_RECOVERY, run.clock.now_ms())


def _delivered(run: Run, text: str) -> ToolResultMessage:
    tool = run.config.plain_text_terminal_fallback_tool
    assert tool is not None
    return ToolResultMessage(
        FALLBACK_ID + run.clock.new_id(),
        tool,
        (TextContent(text),),
        narration="Took the model's plain text for its final answer.",
        timestamp=run.clock.now_ms(),
    )


# --- messages of the loop's own -------------------------------------------------------------------


def _add(run: Run, messages: Sequence[AgentMessage]) -> Awaitable[None]:
    """Append messages to the transcript. Awaiting it waits for the listeners."""
    run.transcript.add(messages)
    return run.brackets.announce(messages)


def _say(run: Run, message: AgentMessage, purpose: str) -> Awaitable[None]:
    """Append a message of the loop itself."""
    run.journal.added("loop", [message], [purpose])
    return _add(run, [message])


def _append_follow_ups(run: Run, messages: Sequence[AgentMessage]) -> Awaitable[None]:
    """Append follow-ups that no turn is left to answer."""
    if messages:
        receipts = run.inbox.follow_up_receipts()
        run.journal.added("follow_up", messages, ["follow_up"] * len(messages), receipts)
    run.inbox.appended()
    return _add(run, messages)


def _check_empty_outcomes(config: LoopConfig, fallback: PlainTextFallback) -> None:
    budget = config.empty_outcome_retry_budget
    if budget is not None and fallback.stops > budget:
        raise EmptyOutcomeError(budget, fallback.stops)


def _outcome(run: Run, *, unfinished: bool) -> LoopOutcome:
    if unfinished:
        cap = run.config.max_iterations
        hit_cap = cap is not None and run.turns >= cap
        return LoopOutcome.HIT_MAX_ITERATIONS if hit_cap else LoopOutcome.OUT_OF_BUDGET
    was_warned = not run.purposes.isdisjoint(("wrap_up", "budget"))
    return LoopOutcome.WRAPPED_UP if was_warned else LoopOutcome.DONE
