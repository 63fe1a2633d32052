"""The tool calls of one answer: their order, their number, and whether they end the run.

    normalize   the policy may repair names and arguments
    cap         calls over ``max_tool_calls_per_turn`` are answered, not run
    run         all at once; or one after the other, if a tool or the config requires it
    vote        the run ends if every result that counts votes so

The loop opens a batch, awaits `Batch.execute`, and puts the results of its `BatchOutcome` into the
transcript. If anything is raised meanwhile (the run is cancelled, a tool ends it, the journal
fails), the batch is still open: `clark_agent.engine.lifecycle` then calls `Batch.settle`, which
stops what runs, gives every unfinished call a result that says so, and returns the outcome. So
every call gets exactly one result, and results enter the transcript together.

One call, and its shared state with its siblings, is `clark_agent.engine.call`:

    waiting ─→ checked by hooks ─→ ended
    interrupted   started by another process: run again if idempotent, else answered "uncertain"
    recalled      ended by another process: its result is kept
    suspended     waits for a decision: the batch ends with placeholders, and the run is suspended
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from clark_agent.config import ExecutionMode
from clark_agent.engine import runtime_results as results
from clark_agent.engine.call import (
    Call,
    CallState,
    Siblings,
    ask_if_it_happened,
    check_again,
    close_call,
    end_call,
    run_call,
)
from clark_agent.engine.prepare import accept, continue_agent, prepare
from clark_agent.engine.resumption import AfterAnswer, AfterBatch
from clark_agent.engine.run import Run
from clark_agent.engine.suspension import Wait, continue_call, hold
from clark_agent.engine.turn import ModelAnswer
from clark_agent.errors import HookError
from clark_agent.events import AgentEvent, ToolExecutionStart
from clark_agent.output import NO_OUTPUT
from clark_agent.tools import AgentTool
from clark_agent.types import AssistantMessage, StopReason, ToolCall, ToolResultMessage

__all__ = ["Batch", "BatchOutcome"]

logger = logging.getLogger(__name__)

# Globals of the module: cheaper than members of an enumeration, every turn.
_MAX_TOKENS = StopReason.MAX_TOKENS
_SEQUENTIAL = ExecutionMode.SEQUENTIAL
_ENDED, _INTERRUPTED, _RECALLED = CallState.ENDED, CallState.INTERRUPTED, CallState.RECALLED


class BatchOutcome(Struct, frozen=True):
    """The outcome of a batch."""

    results: list[ToolResultMessage]
    """One result for each call, in their order; those over the cap come last."""
    calls: Sequence[Call]
    """The call that each result answers."""
    is_recorded: bool
    """Whether the end of every call could be recorded. If not, neither is the end of the batch."""
    ends_run: bool = False
    """Whether all results that count vote to end the run."""
    output: Any = NO_OUTPUT
    """The run's answer, if the batch ends it with one."""
    waits: tuple[Wait, ...] = ()
    """What calls wait for. Their results are placeholders."""


class Batch:
    """The calls of one answer."""

    _over_cap: Sequence[Call] = ()
    _exit_request: BaseException | None = None
    """A KeyboardInterrupt or SystemExit from one of the calls."""
    _earlier: AfterAnswer | AfterBatch | None = None
    """What another process has done in the batch, until it is restored."""

    def __init__(
        self,
        run: Run,
        message: AssistantMessage,
        wanted: Sequence[ToolCall],
    ) -> None:
        self._run = run
        self._message = message
        self._wanted = wanted
        # As the model named them, for a batch that is settled before it is run.
        self._calls = self._ready = self._make_calls(wanted)
        self._siblings = Siblings(run)

    @classmethod
    def resumed(cls, run: Run, earlier: AfterAnswer | AfterBatch) -> Batch:
        """The batch that another process has begun."""
        batch = cls(run, earlier.message, earlier.message.tool_calls)
        batch._earlier = earlier
        return batch

    def _make_calls(self, wanted: Sequence[ToolCall]) -> list[Call]:
        find = self._run.registry.find
        return [
            Call(call, find(call.name), call.arguments, position)
            for position, call in enumerate(wanted)
        ]

    # --- from the outside -----------------------------------------------------------------------

    async def execute(self, answer: ModelAnswer) -> BatchOutcome:
        """Run the calls. Raises `RunStoppedByTool` or `RunAborted` if a tool ends the run."""
        run = self._run
        run.interrupts.check()
        self._normalize()
        if self._earlier is not None:
            await self._restore(self._earlier)
        if self._message.stop_reason is _MAX_TOKENS:
            for call in self._calls:
                call.answer(results.cut_off())
            await self._end_all()
            return self._outcome()
        if run.config.max_tool_calls_per_turn is not None:
            self._apply_cap(run.config.max_tool_calls_per_turn)
        if len(self._calls) > 1:
            self._reject_final_answer_with_other_calls()
        if len(self._ready) > 1 and not self._is_sequential():
            await self._all_at_once(answer)
        else:
            await self._one_by_one(answer)
        return self._outcome()

    async def settle(self, emit: Callable[[AgentEvent], Awaitable[None]]) -> BatchOutcome:
        """End an interrupted batch: stop what runs and end every call.

        ``emit`` must continue even if the run is cancelled again.
        """
        self._siblings.stop()
        await self._tasks_done()
        if self._earlier is not None:  # interrupted before `execute` has restored it
            with suppress(HookError):
                self._normalize()
            self._recall(self._earlier)
        for call in (*self._ready, *self._over_cap):
            if call.wait is not None and not self._run.interrupts.is_let_go:
                is_known = call.state is _ENDED
                call.withdraw()
                call.state = CallState.WAITING
                if is_known:  # listeners have seen its end, and the journal has not
                    close_call(self._run, call)
            if call.state is not _ENDED:
                if self._run.interrupts.is_let_go:
                    await check_again(self._run, self._message, call)
                await emit(close_call(self._run, call))
        return self._outcome(votes=False)

    def recall_vote(self) -> BatchOutcome:
        """The vote of a batch that another process ended. Its results are in the transcript."""
        self._normalize()
        assert self._earlier is not None
        self._recall(self._earlier)
        if self._run.config.max_tool_calls_per_turn is not None:
            self._apply_cap(self._run.config.max_tool_calls_per_turn)
        ends_run = self._ends_run()
        return BatchOutcome([], (), True, ends_run, self._output() if ends_run else NO_OUTPUT)

    # --- which calls, and in which order --------------------------------------------------------

    def _normalize(self) -> None:
        """Let the policy repair the names and arguments of the calls."""
        protocol, wanted = self._run.config.protocol, self._wanted
        try:
            repaired = protocol.normalize_tool_calls(wanted, self._run.registry)
            if repaired is wanted:
                return
            if [call.id for call in repaired] != [call.id for call in wanted]:
                raise ValueError(
                    "normalize_tool_calls must return the same calls in the same order"
                )
        except Exception as error:
            raise HookError("protocol policy", protocol.name, error) from error
        self._calls = self._ready = self._make_calls(repaired)
        for call, given in zip(self._calls, wanted, strict=True):
            call.repaired_name = None if call.call.name == given.name else call.call.name

    async def _restore(self, earlier: AfterAnswer | AfterBatch) -> None:
        """Restore the calls that another process has run, started or suspended.

        None is run twice, unless its tool is idempotent. An agent continues where it was. A tool
        that knows whether a call has happened is asked.
        """
        self._recall(earlier, ask=True)
        for call in self._calls:
            if call.state is not _INTERRUPTED or call.result is not None or call.was_checked:
                continue
            assert call.tool is not None
            if not call.tool.idempotent:
                await ask_if_it_happened(self._run, call)

    def _recall(self, earlier: AfterAnswer | AfterBatch, *, ask: bool = False) -> None:
        """Restore what the log has. With ``ask``, tools are asked about calls that had started."""
        self._earlier = None
        for position, result in earlier.calls.items():
            call = self._calls[position]
            tool = call.tool
            arguments = earlier.arguments.get(position, call.call.arguments)
            if result is not None:
                call.result, call.state = result, _RECALLED
                self._siblings.failed = self._siblings.failed or call.fails_siblings
                if tool is not None and tool.is_final_answer:
                    call.has_run = accept(tool, call, arguments) is None
            else:
                call.state = _INTERRUPTED
                if tool is not None and tool.runs_agent and self._run.continues_agent(call.call.id):
                    continue_agent(call, tool, arguments)
                elif tool is None or not (tool.idempotent or ask):
                    call.answer(results.uncertain())
                elif tool.idempotent:  # it runs again, and what was decided about it still holds
                    call.earlier = earlier.acted_on.get(position)
        for position, wait in earlier.waits.items():
            call = self._calls[position]
            if wait.asked:
                continue_call(self._run, call, wait)
            elif call.tool is not None:  # it waits for its child runs
                call.state = _INTERRUPTED
                arguments = earlier.arguments.get(position, call.call.arguments)
                continue_agent(call, call.tool, arguments)

    def _apply_cap(self, cap: int) -> None:
        """Separate the calls that may run from those over the cap, and answer the latter."""
        counted = [call for call in self._calls if _takes_a_slot(call.tool)]
        self._over_cap = counted[cap:]
        for call in self._over_cap:
            call.answer(results.over_cap(len(self._calls), len(counted), cap))
        over = set(map(id, self._over_cap))
        self._ready = [call for call in self._calls if id(call) not in over]

    def _reject_final_answer_with_other_calls(self) -> None:
        """Reject a final answer beside other calls: their results would not reach the model."""
        voting = [c for c in self._calls if c.tool is None or c.tool.counts_toward_termination_vote]
        for call in voting:
            if len(voting) > 1 and call.tool is not None and call.tool.is_final_answer:
                call.answer(results.not_alone())

    def _is_sequential(self) -> bool:
        return self._run.config.default_execution_mode is _SEQUENTIAL or any(
            call.tool is not None and call.tool.requires_exclusive_sandbox for call in self._ready
        )

    async def _one_by_one(self, answer: ModelAnswer) -> None:
        run, siblings = self._run, self._siblings
        previous: Call | None = None
        is_waiting = False
        for call in self._ready:
            if previous is not None:
                await run.pace.pause_if_due()
                run.interrupts.check()
                siblings.failed = siblings.failed or previous.fails_siblings
            if siblings.failed or run.interrupts.can_intervene:
                self._hold_back(call)
            if call.result is None:
                if is_waiting:
                    hold(run, call)
                    continue
                await prepare(run, answer, call)
                if call.result is None:
                    tool_call = call.call
                    await run.emit(
                        ToolExecutionStart(tool_call.id, tool_call.name, tool_call.arguments)
                    )
                    await run_call(run, siblings, call, alone=True)
            if call.wait is not None:
                is_waiting = True
                continue
            await end_call(run, siblings, self._message, call)
            if siblings.failure is not None:
                raise siblings.failure
            previous = call
        if self._over_cap or is_waiting:
            await self._end_all()
        if siblings.stopped:
            run.interrupts.check()

    def _hold_back(self, call: Call) -> None:
        """Answer a call that must not run because of what happened before it.

        A result from another process is kept.
        """
        if call.state is _RECALLED or (call.state is _INTERRUPTED and call.result is not None):
            return
        if call.wait is not None or (call.earlier is not None and call.result is not None):
            return
        if not self._siblings.hold_back_if_due(call) and self._siblings.failed:
            call.answer(results.after_failed_sibling())

    async def _all_at_once(self, answer: ModelAnswer) -> None:
        run, siblings = self._run, self._siblings
        for call in self._ready:
            if call.result is not None or siblings.hold_back_if_due(call):
                continue
            await run.pace.pause_if_due()
            await prepare(run, answer, call)
            if call.result is None:
                tool_call = call.call
                await run.emit(
                    ToolExecutionStart(tool_call.id, tool_call.name, tool_call.arguments)
                )
        to_run: list[Call] = []
        for call in self._ready:
            if call.result is None:
                to_run.append(call)
            elif call.wait is None:  # a call that waits ends last: it may still be withdrawn
                await end_call(run, siblings, self._message, call)
        if len(to_run) == 1:
            await run_call(run, siblings, to_run[0], alone=True)
        elif to_run:
            await self._run_in_tasks(to_run)
        await self._end_all()

    async def _run_in_tasks(self, to_run: Sequence[Call]) -> None:
        run = self._run
        tasks: dict[Call, asyncio.Task[None]] = {}
        self._siblings.tasks = tasks
        run.interrupts.handler = self._siblings.interrupt
        try:
            # Added one by one: with eager tasks, a call may stop the others before the next has a
            # task.
            for call in to_run:
                tasks[call] = run.loop.create_task(self._run_and_end(call))
            await asyncio.wait(tasks.values())
        finally:
            run.interrupts.handler = None
        if self._exit_request is not None:
            raise self._exit_request
        for task in tasks.values():
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        run.interrupts.check()

    async def _run_and_end(self, call: Call) -> None:
        siblings = self._siblings
        try:
            await run_call(self._run, siblings, call)
            if call.wait is None:
                await end_call(self._run, siblings, self._message, call)
        except (KeyboardInterrupt, SystemExit) as stop:
            # Raised from this task it would stop the event loop with the run still open. The run's
            # own task raises it once everything is closed.
            self._exit_request = self._exit_request or stop
            siblings.stop()
            return
        if siblings.failure is not None:
            siblings.stop()
        elif call.fails_siblings:
            siblings.stop_useless()

    async def _end_all(self) -> None:
        """End all calls that have not ended, and the run if one of their tools requires it. Those
        that wait end last.
        """
        waiting: list[Call] = []
        for call in (*self._ready, *self._over_cap):
            if call.state is not _ENDED:
                if call.wait is not None:
                    waiting.append(call)
                else:
                    await end_call(self._run, self._siblings, self._message, call)
        if waiting:
            self._withdraw_useless(waiting)
            for call in waiting:
                await end_call(self._run, self._siblings, self._message, call)
        if self._siblings.failure is not None:
            raise self._siblings.failure

    def _withdraw_useless(self, waiting: Iterable[Call]) -> None:
        """Do not ask about calls that must not run any more, because another call has failed."""
        if self._siblings.failed or any(call.fails_siblings for call in self._ready):
            for call in waiting:
                wait = call.wait
                if wait is not None and wait.reason != "result":
                    call.wait, call.state = None, CallState.WAITING
                    has_run = wait.has_run
                    call.answer(
                        results.stopped("sibling") if has_run else results.after_failed_sibling()
                    )

    async def _tasks_done(self) -> None:
        """Wait for the tasks of the batch. Each of them ends within the grace."""
        while waiting := [task for task in self._siblings.tasks.values() if not task.done()]:
            try:
                await asyncio.wait(waiting)
            except asyncio.CancelledError:
                logger.debug("cancelled again while the calls of a batch were being stopped")

    # --- the outcome ----------------------------------------------------------------------------

    def _outcome(self, *, votes: bool = True) -> BatchOutcome:
        calls = [*self._ready, *self._over_cap] if self._over_cap else self._ready
        now_ms = self._run.clock.now_ms
        messages: list[ToolResultMessage] = []
        waits: tuple[Wait, ...] = ()
        for call in calls:
            wanted, result = call.call, call.result
            assert result is not None
            if call.wait is not None:
                waits = (*waits, call.wait)
            messages.append(
                ToolResultMessage(
                    wanted.id,
                    wanted.name,
                    result.content,
                    result.is_error,
                    result.narration,
                    result.details,
                    now_ms(),
                )
            )
        recorded = self._siblings.is_recorded
        if waits:
            return BatchOutcome(messages, calls, recorded, waits=waits)
        if votes and self._ends_run():
            return BatchOutcome(messages, calls, recorded, True, self._output())
        return BatchOutcome(messages, calls, recorded)

    def _ends_run(self) -> bool:
        """Whether all results that count vote to end the run, and at least one does."""
        if self._over_cap:
            return False
        voted = False
        for call in self._calls:
            if call.tool is None or call.tool.counts_toward_termination_vote:
                voted = True
                if call.result is None or not call.result.terminate:
                    return False
        return voted

    def _output(self) -> Any:
        """The run's answer: the arguments of the last call of a final-answer tool."""
        for call in reversed(self._calls):
            if call.has_run and call.tool is not None and call.tool.is_final_answer:
                return call.tool.output(call.input)
        return NO_OUTPUT


def _takes_a_slot(tool: AgentTool | None) -> bool:
    """Whether a call counts toward the cap. A call of an unknown tool does not."""
    return (
        tool is not None and tool.counts_toward_tool_call_limit and not tool.parallel_safe_per_turn
    )
