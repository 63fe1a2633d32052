"""A batch of tool calls: prepare → execute → finalize, and the vote on whether the run ends.

    prepare    in the order of the calls; see `clark_agent.preparation`
    execute    all at once, or one after the other when a tool or the config says so
    finalize   hooks after the call, on every outcome; the end event as each call is done

Every call gets exactly one result, whatever happens to the batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any

from msgspec.structs import replace

from clark_agent.cancellation import CancellationToken
from clark_agent.config import ExecutionMode
from clark_agent.errors import (
    HookError,
    LoopError,
    RunAborted,
    ToolAborted,
    ToolFatal,
    ToolFatalError,
)
from clark_agent.events import ToolExecutionEnd, ToolExecutionStart, ToolExecutionUpdate
from clark_agent.hooks import call_hook
from clark_agent.plugin import AfterToolCallContext, AfterToolDecision
from clark_agent.preparation import PendingCall, ask_policy, prepare
from clark_agent.run_state import Run
from clark_agent.steering import SteerWhen
from clark_agent.tool_run import ToolLeftBehindError, ToolRun
from clark_agent.tools import AgentTool, ToolContext, ToolResult
from clark_agent.turn import ModelAnswer
from clark_agent.types import AssistantMessage, StopReason, ToolCall, ToolResultMessage

__all__ = ["Batch"]

logger = logging.getLogger(__name__)


class Batch:
    """The tool calls of one answer."""

    def __init__(self, run: Run, message: AssistantMessage) -> None:
        self._run = run
        self._asked_by = message
        # As the model named them, for a batch that is settled before it is executed.
        self._calls = self._pending(message.tool_calls)
        self._ready, self._over_cap = self._calls, list[PendingCall]()
        self._running: dict[PendingCall, ToolRun] = {}
        self._tasks: dict[PendingCall, asyncio.Task[None]] = {}
        self._failure: LoopError | None = None
        self._stopped: str | None = None
        self._sibling_failed = False

    @property
    def results(self) -> list[ToolResultMessage]:
        """One message per call, in their order; those over the cap come last."""
        return [self._message(pending) for pending in (*self._ready, *self._over_cap)]

    @property
    def terminates(self) -> bool:
        """Whether the batch ends the run: all counted results vote so, and there is one."""
        if self._over_cap:
            return False
        votes = [
            pending.result is not None and pending.result.terminate
            for pending in self._calls
            if pending.tool is None or pending.tool.counts_toward_termination_vote
        ]
        return bool(votes) and all(votes)

    @property
    def output(self) -> Any:
        """What the last call was given whose tool takes the run's answer."""
        for pending in reversed(self._calls):
            if pending.tool is not None and pending.tool.takes_output:
                return pending.tool.output(pending.input)
        return None

    async def execute(self, answer: ModelAnswer) -> None:
        """Run the calls. Raises `ToolFatalError` or `RunAborted` when a tool says so."""
        self._calls = self._pending(self._normalized())
        self._ready, self._over_cap = self._split()
        if self._is_cut_off():
            for pending in self._calls:
                pending.answer_ourselves(_not_executed("max_tokens", _CUT_OFF))
        elif self._is_sequential():
            await self._one_by_one(answer)
        else:
            await self._all_at_once(answer)
        for pending in (*self._ready, *self._over_cap):
            if not pending.ended:
                await self._finalize(pending)
        if self._failure is not None:
            raise self._failure

    async def settle(self) -> list[ToolResultMessage]:
        """The batch was interrupted: stop what runs, end every call, give all results."""
        self.stop("aborted")
        await self._tasks_done()
        for pending in (*self._ready, *self._over_cap):
            if not pending.ended:
                await self._run.emit_closing(*self._end(pending))
        return self.results

    def stop(self, why: str) -> None:
        """Make every call that runs end, and start no other."""
        self._stopped = why
        for tool_run in tuple(self._running.values()):
            tool_run.stop(why)
        for pending, task in self._tasks.items():
            if pending not in self._running:  # in a hook, or not begun
                task.cancel()

    def _pending(self, calls: Sequence[ToolCall]) -> list[PendingCall]:
        return [PendingCall(call, self._run.registry.get(call.name)) for call in calls]

    def _normalized(self) -> Sequence[ToolCall]:
        """The calls with the policy's repairs to their names and arguments."""
        run, calls = self._run, self._asked_by.tool_calls
        protocol = run.config.protocol
        named = ask_policy(run, lambda: protocol.normalize_tool_calls(calls, run.registry))
        if [call.id for call in named] != [call.id for call in calls]:
            error = ValueError("normalize_tool_calls must return the same calls in the same order")
            raise HookError("protocol policy", protocol.name, error)
        return tuple(named)

    # --- one after the other, or all at once ----------------------------------------------------

    def _split(self) -> tuple[list[PendingCall], list[PendingCall]]:
        """The calls that may run, and those over the cap, which have their result already."""
        cap = self._run.config.max_tool_calls_per_turn
        counted = [pending for pending in self._calls if _takes_a_slot(pending.tool)]
        if cap is None or len(counted) <= cap or self._is_cut_off():
            return self._calls, []
        over_cap = counted[cap:]
        for pending in over_cap:
            pending.answer_ourselves(_over_cap(len(self._calls), len(counted), cap))
        return [pending for pending in self._calls if pending.result is None], over_cap

    def _is_cut_off(self) -> bool:
        return self._asked_by.stop_reason is StopReason.MAX_TOKENS

    def _is_sequential(self) -> bool:
        return self._run.config.default_execution_mode is ExecutionMode.SEQUENTIAL or any(
            pending.tool is not None and pending.tool.requires_exclusive_sandbox
            for pending in self._ready
        )

    async def _one_by_one(self, answer: ModelAnswer) -> None:
        skip = False
        for pending in self._ready:
            if skip:
                pending.answer_ourselves(ToolResult.error(_SIBLING_FAILED_BEFORE))
            elif not self._is_held_back(pending):
                self._run.check_cancelled()
                await prepare(self._run, answer, pending)
                if pending.result is None:
                    await self._start(pending)
                    await self._call_here(pending)
            await self._finalize(pending)
            if self._failure is not None:
                raise self._failure
            skip = skip or _fails_siblings(pending)

    async def _all_at_once(self, answer: ModelAnswer) -> None:
        for pending in self._ready:
            if self._is_held_back(pending):
                continue
            await prepare(self._run, answer, pending)
            if pending.result is None:
                await self._start(pending)
        to_run: list[PendingCall] = []
        for pending in self._ready:
            if pending.result is None:
                to_run.append(pending)
            else:
                await self._finalize(pending)
        if len(to_run) == 1:
            await self._call_here(to_run[0])
        elif to_run:
            await self._call_in_tasks(to_run)

    async def _call_here(self, pending: PendingCall) -> None:
        self._take_interrupts()
        try:
            await self._call(pending)
        finally:
            self._give_back_interrupts()

    async def _call_in_tasks(self, to_run: Sequence[PendingCall]) -> None:
        create_task = asyncio.get_running_loop().create_task
        self._tasks = {pending: create_task(self._call_and_finalize(pending)) for pending in to_run}
        self._take_interrupts()
        try:
            await asyncio.wait(self._tasks.values())
        finally:
            self._give_back_interrupts()
        for task in self._tasks.values():
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _call_and_finalize(self, pending: PendingCall) -> None:
        await self._call(pending)
        await self._finalize(pending)
        if self._failure is not None:
            self.stop("aborted")
        elif _fails_siblings(pending):
            self._sibling_failed = True
            for tool_run in tuple(self._running.values()):
                tool_run.stop("sibling")

    def _take_interrupts(self) -> None:
        """Whoever interrupts the run now stops the calls, each in its own way."""
        self._run.scope.interrupt = self._abort
        self._run.break_off = self._break_off

    def _give_back_interrupts(self) -> None:
        self._run.scope.interrupt = self._run.break_off = None

    def _abort(self) -> None:
        self.stop("aborted")

    def _break_off(self) -> None:
        """Somebody has intervened: the calls that run end, and the run goes on."""
        why = self._run.intervention(SteerWhen.NOW) or "steered"
        for tool_run in tuple(self._running.values()):
            tool_run.stop(why)

    def _is_held_back(self, pending: PendingCall) -> bool:
        """Whether somebody has intervened before the call was run; then it has its result."""
        why = self._run.intervention(SteerWhen.BEFORE_NEXT_TOOL)
        if why is not None:
            pending.answer_ourselves(_not_executed(why, _HELD_BACK[why]))
        return why is not None

    async def _tasks_done(self) -> None:
        """Wait for the tasks of the batch. Each of them ends within the grace."""
        while waiting := [task for task in self._tasks.values() if not task.done()]:
            try:
                await asyncio.wait(waiting)
            except asyncio.CancelledError:
                logger.debug("cancelled again while the calls of a batch were being stopped")

    # --- one call -------------------------------------------------------------------------------

    async def _start(self, pending: PendingCall) -> None:
        pending.started = True
        call = pending.call
        await self._run.emit(ToolExecutionStart, call.id, call.name, call.arguments)

    async def _call(self, pending: PendingCall) -> None:
        """Run the tool; the call has its result after this, unless the run is over."""
        if self._stopped is not None or self._run.is_cancelled:
            pending.answer_ourselves(_not_executed("aborted", _NOT_STARTED))
            return
        if self._sibling_failed:
            pending.answer_ourselves(_stopped("sibling", None))
            return
        if self._is_held_back(pending):
            return
        assert pending.tool is not None
        await self._run_tool(pending, pending.tool)

    async def _run_tool(self, pending: PendingCall, tool: AgentTool) -> None:
        config = self._run.config
        token = self._run.signal.child()
        context = self._context(pending, token)
        tool_run = ToolRun(
            _execute(tool, pending.input, context),
            token,
            grace=self._run.grace,
            in_thread=tool.runs_in_thread,
        )
        timeout = config.tool_timeout if tool.timeout is None else tool.timeout
        if timeout is not None:
            tool_run.stop_after(timeout, "timeout")
        self._running[pending] = tool_run
        cancelled: asyncio.CancelledError | None = None
        try:
            pending.result = await tool_run
        except ToolLeftBehindError:
            logger.warning("the tool %r did not stop and was left behind", tool.name)
            pending.answer_ourselves(_stopped(tool_run.stopped, timeout, still_running=True))
        except asyncio.CancelledError as error:
            cancelled = error
            why = "aborted" if tool_run.cancelled_from_outside else tool_run.stopped
            left = why is not None and tool.runs_in_thread
            if left:
                logger.warning("the thread of the tool %r was left behind", tool.name)
            pending.answer_ourselves(_stopped(why, timeout, still_running=left))
        except ToolAborted as error:
            self._fail(RunAborted(f"the tool {tool.name!r} aborted it: {error}"), error)
            pending.result = ToolResult.error(f"The tool aborted the run: {error}")
        except ToolFatal as error:
            self._fail(ToolFatalError(tool.name, str(error)), error)
            pending.result = ToolResult.error(f"The tool ended the run: {error}")
        except Exception as error:
            pending.result = ToolResult.error(f"{type(error).__name__}: {error}")
        finally:
            context.settle()
            del self._running[pending]
        if tool_run.cancelled_from_outside:
            raise cancelled or asyncio.CancelledError

    def _fail(self, failure: LoopError, cause: BaseException) -> None:
        """The run cannot go on. The first reason counts."""
        if self._failure is None:
            failure.__cause__ = cause
            self._failure = failure

    def _context(self, pending: PendingCall, token: CancellationToken) -> ToolContext:
        call, run = pending.call, self._run

        def emit(partial: ToolResult) -> Awaitable[None]:
            return run.emit(ToolExecutionUpdate, call.id, call.name, partial)

        listened = run.emitter.listeners(ToolExecutionUpdate)
        return ToolContext(
            tool_call_id=call.id,
            tool_name=call.name,
            signal=token,
            emit=emit if listened else None,
            run=run,
        )

    async def _finalize(self, pending: PendingCall) -> None:
        """Let the hooks see the outcome, and tell that the call is over."""
        is_over = self._stopped is not None or self._run.is_cancelled
        if self._run.hooks.after_tool_call and not is_over:
            await self._ask_hooks(pending)
        await self._run.emit(*self._end(pending))

    async def _ask_hooks(self, pending: PendingCall) -> None:
        for hook in self._run.hooks.after_tool_call:
            result = pending.result
            assert result is not None
            context = AfterToolCallContext(
                self._asked_by,
                pending.call,
                pending.args,
                result,
                result.is_error,
                self._run.transcript.view(),
                pending.tool,
            )
            try:
                decision = await call_hook(self._run, hook, context)
                pending.result = _changed(result, decision)
            except Exception as error:
                logger.exception("the hook %r failed; the result becomes an error", hook.name)
                pending.decided(hook.name, "failed")
                pending.result = ToolResult.error(
                    f"The result was withheld: the hook {hook.name!r} that checks it raised "
                    f"{type(error).__name__}: {error}"
                )
            else:
                if pending.result is not result:
                    pending.decided(hook.name, "change")
        pending.checked = True

    def _end(self, pending: PendingCall) -> tuple[Any, ...]:
        """Mark the call as over; the event that says so."""
        pending.ended = True
        if pending.result is None:
            pending.result = _not_executed("aborted", _NOT_STARTED)
        elif self._run.hooks.after_tool_call and not (pending.checked or pending.is_ours):
            pending.result = ToolResult.error(_UNCHECKED)
        result = pending.outcome()
        return ToolExecutionEnd, pending.call.id, pending.call.name, result, result.is_error

    def _message(self, pending: PendingCall) -> ToolResultMessage:
        result = pending.outcome()
        return ToolResultMessage(
            pending.call.id,
            pending.call.name,
            result.content,
            result.is_error,
            result.narration,
            result.details,
            self._run.clock.now_ms(),
        )


# --- decisions on values ----------------------------------------------------------------------

_CUT_OFF = (
    "The call was not run: the message was cut off at the output limit, and its arguments may be "
    "incomplete. Send the call again, shorter or on its own."
)
_UNCHECKED = "The result was withheld: the run was stopped before the hooks had checked it."
_NOT_STARTED = "The call was not run: the run was stopped before it started."
_HELD_BACK = {
    "steered": (
        "Not executed: the user intervened. See what they say next, then send this call again if "
        "it is still wanted."
    ),
    "out_of_time": "Not executed: the time for this run is over.",
}
_SIBLING_FAILED_BEFORE = (
    "The call was not run: an earlier call of the same batch failed. Deal with that first, then "
    "send this call again if it is still wanted."
)


def _takes_a_slot(tool: AgentTool | None) -> bool:
    """Whether a call counts against the cap. One that names no tool does no work and does not."""
    return (
        tool is not None and tool.counts_toward_tool_call_limit and not tool.parallel_safe_per_turn
    )


def _fails_siblings(pending: PendingCall) -> bool:
    return (
        pending.tool is not None
        and pending.tool.aborts_siblings_on_error
        and pending.result is not None
        and pending.result.is_error
    )


def _over_cap(total: int, counted: int, cap: int) -> ToolResult:
    calls = f"{counted} calls that count, of {total}" if counted != total else f"{total} calls"
    details = {
        "kind": "tool_call_not_executed",
        "reason": "max_tool_calls_per_turn",
        "total_tool_calls": total,
        "limit_counted_tool_calls": counted,
        "max_executed": cap,
    }
    text = (
        f"The call was not run: the message has {calls}, and one turn runs the first {cap}. "
        "Send this call again in a later turn if it is still wanted."
    )
    return ToolResult.error(text, details=details)


def _not_executed(reason: str, text: str) -> ToolResult:
    details = {"kind": "tool_call_not_executed", "reason": reason}
    return ToolResult.error(text, details=details)


def _stopped(why: str | None, timeout: float | None, *, still_running: bool = False) -> ToolResult:
    """The result of a call that was running when it was stopped."""
    match why:
        case "sibling":
            text = "The call was stopped because another call of the same batch failed."
            return ToolResult.error(
                text, details={"still_running": True} if still_running else None
            )
        case "timeout":
            text = f"The call took longer than {timeout} seconds and was stopped."
        case "steered":
            text = "The call was running when the user intervened, and was stopped."
        case "out_of_time":
            text = "The call was running when the time for this run was over, and was stopped."
        case None:
            text = "The tool cancelled itself."
        case _:
            text = "The call was running when the run was stopped."
    if still_running:
        text += " It did not react and may still be running."
    details = {
        "kind": "tool_call_stopped",
        "reason": why or "cancelled_itself",
        "still_running": still_running,
    }
    return ToolResult.error(text, details=details)


async def _execute(tool: AgentTool, value: Any, context: ToolContext) -> ToolResult:
    """The tool's result. What it raises before there is anything to await is raised in here too."""
    result: object = await tool.execute(value, context)
    if not isinstance(result, ToolResult):
        raise TypeError(f"execute must return a ToolResult, not {type(result).__name__}")
    return result


def _changed(result: ToolResult, decision: object) -> ToolResult:
    """The result as an after-hook wants it: first its own, then the flags."""
    if decision is None:
        return result
    if not isinstance(decision, AfterToolDecision):
        raise TypeError(f"on_after_tool_call returned {decision!r}, which is no decision")
    changed: object = result if decision.result is None else decision.result
    if not isinstance(changed, ToolResult):
        raise TypeError(f"an AfterToolDecision holds a ToolResult, not {changed!r}")
    if decision.mark_error is not None and decision.mark_error is not changed.is_error:
        changed = replace(changed, is_error=decision.mark_error)
    if decision.terminate is not None and decision.terminate is not changed.terminate:
        changed = replace(changed, terminate=decision.terminate)
    return changed
