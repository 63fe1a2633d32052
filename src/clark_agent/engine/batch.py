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
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from clark_agent.config import ExecutionMode
from clark_agent.engine import runtime_results as results
from clark_agent.engine.call import Call, CallState, Siblings, close_call, end_call, run_call
from clark_agent.engine.prepare import accept, prepare
from clark_agent.engine.resumption import EarlierResults
from clark_agent.engine.run import Run
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


class Batch:
    """The calls of one answer."""

    _over_cap: Sequence[Call] = ()
    _exit_request: BaseException | None = None
    """A KeyboardInterrupt or SystemExit from one of the calls."""

    def __init__(
        self,
        run: Run,
        message: AssistantMessage,
        wanted: Sequence[ToolCall],
        earlier: EarlierResults | None = None,
        arguments: Mapping[int, Any] | None = None,
    ) -> None:
        """``earlier`` has the calls that another process has started or finished."""
        self._run = run
        self._message = message
        self._wanted = wanted
        self._earlier = earlier
        self._rewritten = arguments or {}
        # As the model named them, for a batch that is settled before it is run.
        self._calls = self._ready = self._make_calls(wanted)
        self._siblings = Siblings(run)

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
        if self._earlier:
            self._restore(self._earlier)
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
        if self._earlier:  # interrupted before `execute` has restored them
            with suppress(HookError):
                self._normalize()
            self._restore(self._earlier)
        for call in (*self._ready, *self._over_cap):
            if call.state is not _ENDED:
                await emit(close_call(self._run, call))
        return self._outcome(votes=False)

    def recall_vote(self) -> BatchOutcome:
        """The vote of a batch that another process ended. Its results are in the transcript."""
        self._normalize()
        self._restore(self._earlier or {})
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

    def _restore(self, earlier: EarlierResults) -> None:
        """Restore the results of calls that another process has run. None is run twice, unless its
        tool is idempotent.
        """
        for position, result in earlier.items():
            call = self._calls[position]
            tool = call.tool
            if result is not None:
                call.result, call.state = result, _RECALLED
                self._siblings.failed = self._siblings.failed or call.fails_siblings
                if tool is not None and tool.is_final_answer:
                    arguments = self._rewritten.get(position, call.call.arguments)
                    call.has_run = accept(tool, call, arguments) is None
            else:
                call.state = _INTERRUPTED
                if tool is None or not tool.idempotent:
                    call.answer(results.uncertain())
        self._earlier = None

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
        for call in self._ready:
            if previous is not None:
                await run.pace.pause_if_due()
                run.interrupts.check()
                siblings.failed = siblings.failed or previous.fails_siblings
            if siblings.failed or run.interrupts.can_intervene:
                self._hold_back(call)
            if call.result is None:
                await prepare(run, answer, call)
                if call.result is None:
                    tool_call = call.call
                    await run.emit(
                        ToolExecutionStart(tool_call.id, tool_call.name, tool_call.arguments)
                    )
                    await run_call(run, siblings, call, alone=True)
            await end_call(run, siblings, self._message, call)
            if siblings.failure is not None:
                raise siblings.failure
            previous = call
        if self._over_cap:
            await self._end_all()
        if siblings.stopped:
            run.interrupts.check()

    def _hold_back(self, call: Call) -> None:
        """Answer a call that must not run because of what happened before it.

        A result from another process is kept.
        """
        if call.state is _RECALLED or (call.state is _INTERRUPTED and call.result is not None):
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
            else:
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
        """End all calls that have not ended, and the run if one of their tools requires it."""
        for call in (*self._ready, *self._over_cap):
            if call.state is not _ENDED:
                await end_call(self._run, self._siblings, self._message, call)
        if self._siblings.failure is not None:
            raise self._siblings.failure

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
        for call in calls:
            wanted, result = call.call, call.result
            assert result is not None
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
