"""How a run begins and how it ends, whatever happens in between.

    begin    the journal, then agent_start, the first turn, the prompts
    finish   the result; or, if anything was raised: close what is open, then the error

Every failure goes through `finish`: brackets are closed, calls get their results, and the error
carries the state of the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

from clark_agent._text import describe
from clark_agent.engine.batch import Batch
from clark_agent.engine.brackets import NEW, TURN
from clark_agent.engine.goal import Goal
from clark_agent.engine.resumption import AfterAnswer, Resumption
from clark_agent.engine.run import Run
from clark_agent.errors import ConfigError, LoopError, RunAborted, RunLetGo, RunLogError
from clark_agent.events import AgentEnd, AgentEvent, AgentStart, RunIdentified, TurnEnd, TurnStart
from clark_agent.output import NO_OUTPUT
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.types import AgentMessage, AssistantMessage

__all__ = ["begin", "finish"]

logger = logging.getLogger(__name__)


async def begin(
    run: Run, prompts: Sequence[AgentMessage], resumption: Resumption | None = None
) -> None:
    """Open the run and its first turn; restore the state of other processes if it is resumed."""
    brackets, journal, inbox = run.brackets, run.journal, run.inbox
    inbox.watch()
    if resumption is None:
        journal.began(run, prompts)
        run.transcript.add(prompts)
    else:
        inbox.restore(resumption.waiting)
        # First: the run may be cancelled at once, and must know what it has spent and what is open.
        run.spending.restore(resumption.costs, resumption.costs_below, resumption.worked_ms)
        journal.resumed(run, resumption)
        prompts = _reopen(run, resumption)
    inbox.note_waiting()
    brackets.entered(prompts)
    await journal.barrier()
    await brackets.send(AgentStart())
    if run.lineage.given is not None:
        await brackets.send(RunIdentified(run.lineage.given))
    await brackets.send(TurnStart())
    await brackets.announce(prompts)
    if resumption is not None:
        run.restore(resumption)


def _reopen(run: Run, resumption: Resumption) -> Sequence[AgentMessage]:
    """Restore the newest answer and its batch, if not all its calls have results. Return what to
    announce.
    """
    run.turns = resumption.turns
    where = resumption.where
    if not isinstance(where, AfterAnswer):
        return ()
    if where.message.tool_calls:
        run.batch = Batch.resumed(run, where)
    run.brackets.answer = where.message
    run.transcript.add_answer(where.message)  # the journal has it
    return (where.message,)


async def finish(run: Run, work: Awaitable[LoopOutcome]) -> RunResult:
    """Await the work of the run, and close it.

    Raises a `LoopError`, or an exception that must not be swallowed, with the `LoopError` as its
    cause.
    """
    with run.interrupts:
        try:
            outcome = await work
            is_over = outcome is not LoopOutcome.SUSPENDED
            if run.goal is not None and run.output is NO_OUTPUT and is_over:
                run.output = _without_output(run, run.goal, outcome)
            await _end(run)
            return await _result(run, outcome)
        except BaseException as error:
            if isinstance(error, GeneratorExit) and not run.interrupts.is_running():
                raise  # garbage collected after its event loop: nothing can be awaited
            ending = await _fail(run, error)
            raise ending from ending.__cause__
        finally:
            run.hooks.end_run()
            run.journal.close()


def _without_output(run: Run, goal: Goal, outcome: LoopOutcome) -> str:
    """The last text, if that is what the run must return. Raises `OutputError` otherwise."""
    if not goal.output.is_text or goal.output.validators:
        raise goal.missing(outcome)
    said = [m for m in run.transcript.added if isinstance(m, AssistantMessage)]
    return said[-1].plain_text if said else ""


async def _end(run: Run) -> None:
    """Close a run that has come to its end."""
    if run.brackets.phase is TURN:  # there was no budget for the first turn
        await run.brackets.send(TurnEnd(run.answer.so_far("there is no budget for a turn"), ()))
    await run.brackets.send(AgentEnd(run.transcript.added.view()))


async def _result(run: Run, outcome: LoopOutcome) -> RunResult:
    spending = run.spending
    limit = spending.limit if outcome is LoopOutcome.OUT_OF_BUDGET else None
    is_suspended = outcome is LoopOutcome.SUSPENDED  # the journal has that since it was decided
    if not is_suspended:
        run.journal.ended(run, outcome, limit)
    await run.journal.barrier()
    return RunResult(
        messages=tuple(run.transcript.added),
        outcome=outcome,
        usage=spending.usage,
        undelivered=run.inbox.close(is_kept=is_suspended),
        output=None if run.output is NO_OUTPUT else run.output,
        limit=limit,
        spent=spending.spent(),
        tree_usage=spending.tree_usage,
        bill=spending.bill(),
        waiting=run.waiting,
    )


# --- the end of a run that fails ----------------------------------------------------------------


async def _fail(run: Run, error: BaseException) -> BaseException:
    """Close what is open. Return what to raise."""
    if isinstance(error, ConfigError) and not run.brackets.has_begun:
        run.inbox.close()
        return error  # nothing has happened
    failure = _failure(error, run)
    if is_let_go := isinstance(failure, RunLetGo):
        run.journal.let_go()
    is_cancelled = run.interrupts.is_cancelled()
    if isinstance(failure, RunAborted) and not isinstance(error, Exception):
        run.interrupts.note_cancelled()
    run.journal.closing()
    run.interrupts.closing()
    closing = _Closing(run)
    partial: AssistantMessage | None = None
    try:
        partial = await closing.close(error)
    except Exception:  # the error must carry the state of the run, whatever fails here
        logger.exception("the run could not be closed in order")
    _carry(run, failure, partial)
    run.journal.failed(failure)
    is_cancelled = is_cancelled or run.interrupts.is_cancelled()
    await run.journal.settle(run.config.cancel_grace, is_cancelled=is_cancelled)
    failure.undelivered = run.inbox.close(is_kept=is_let_go and run.journal.can_wait)
    return _ending(closing.exit or error, failure, run)


def _failure(error: BaseException, run: Run) -> LoopError:
    """The error that carries the state of the run."""
    if isinstance(error, RunLogError | RunLetGo):
        return error
    if run.interrupts.is_let_go:
        failure: LoopError = RunLetGo()
        failure.__cause__ = error
        return failure
    if isinstance(error, LoopError):
        return error
    if not isinstance(error, (Exception, GeneratorExit)):
        return RunAborted(run.signal.reason)
    failure = LoopError(f"the run failed unexpectedly: {describe(error)}")
    failure.__cause__ = error
    return failure


def _carry(run: Run, error: LoopError, partial: AssistantMessage | None) -> None:
    """Add the state of the run to an error, so that nothing is lost."""
    error.messages = tuple(run.transcript.added)
    if run.turns:
        error.turn = run.turns
        error.add_note(f"In turn {run.turns} of the run.")
    error.partial = error.partial or partial or run.brackets.discarded
    error.usage = run.spending.usage
    error.tree_usage = run.spending.tree_usage
    error.bill = run.spending.bill()
    error.undelivered = run.inbox.undelivered()


def _ending(error: BaseException, failure: LoopError, run: Run) -> BaseException:
    """What to raise: the failure, or an exception that is not ours, with the failure as cause."""
    from_outside = run.interrupts.cancelled_from_outside
    by_token = run.signal.cancelled and not from_outside
    if isinstance(error, asyncio.CancelledError) and not by_token:
        ending: BaseException = error
    elif isinstance(error, Exception) and from_outside:
        ending = asyncio.CancelledError()
    elif isinstance(error, (Exception, asyncio.CancelledError, GeneratorExit)):
        return failure
    else:  # KeyboardInterrupt, SystemExit
        ending = error
    ending.__cause__ = failure
    return ending


class _Closing:
    """Closes what a failed run has open.

    A cancellation that arrives meanwhile ends at most the listener that it hits. Once the run is
    cancelled, the listeners have ``cancel_grace`` for all remaining events together.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.exit: BaseException | None = None
        """A KeyboardInterrupt or SystemExit that a listener raised."""

    async def close(self, error: BaseException) -> AssistantMessage | None:
        """Close everything, in order. Return the answer that was cut off, if one was."""
        run, brackets = self._run, self._run.brackets
        if brackets.phase is NEW:
            if not brackets.has_begun or isinstance(error, RunLogError):
                return None
            await self.emit(AgentStart())
            if run.lineage.given is not None:
                await self.emit(RunIdentified(run.lineage.given))
        cut_off: AssistantMessage | None = None
        if run.answer.is_open:
            cut_off = run.failed_answer(error)
            run.spending.spend(cut_off)
            run.answer.cut_off(cut_off)
        for event in brackets.close_messages(cut_off):
            await self.emit(event)
        if brackets.has_unanswered_calls or run.batch is not None:
            await self._close_batch()
        messages = run.transcript.added.view()
        for event in brackets.close_run(lambda: run.failed_answer(error), messages):
            await self.emit(event)
        return cut_off

    async def _close_batch(self) -> None:
        run, brackets = self._run, self._run.brackets
        batch, run.batch = run.batch, None
        if batch is None:  # the run has failed before one was made
            assert brackets.answer is not None
            batch = Batch(run, brackets.answer, brackets.answer.tool_calls)
        outcome = await batch.settle(self.emit)
        brackets.results = outcome.results
        if outcome.is_recorded:
            run.journal.batch_ended(outcome.calls, outcome.results)
        if run.emitter.deadline is not None:  # the tools had their grace first
            self._limit_listeners()
        run.transcript.add(outcome.results)
        brackets.entered(outcome.results)
        for event in brackets.close_messages(None):
            await self.emit(event)

    async def emit(self, event: AgentEvent) -> None:
        """Emit an event that closes a bracket, even if the run is cancelled again."""
        run = self._run
        if run.interrupts.is_cancelled() and run.emitter.deadline is None:
            self._limit_listeners()
        try:
            await run.brackets.send(event)
        except asyncio.CancelledError:
            logger.debug("cancelled again while the run was being closed")
        except (Exception, GeneratorExit):
            raise
        except BaseException as stop:  # the rest is still closed
            self.exit = self.exit or stop

    def _limit_listeners(self) -> None:
        """From now on listeners have ``cancel_grace`` together, so that none can block the run."""
        run = self._run
        run.emitter.deadline = run.loop.time() + run.config.cancel_grace
