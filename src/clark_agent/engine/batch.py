"""A batch of tool calls: prepare → execute → finalize, and the vote on whether the run ends.

    prepare    in the order of the calls; see `clark_agent.preparation`
    execute    all at once, or one after the other when a tool or the config says so
    finalize   hooks after the call, on every outcome; the end event as each call is done

Every call gets exactly one result, whatever happens to the batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable
from types import CoroutineType
from typing import Any, TypeAlias

from msgspec.structs import replace

from clark_agent._finished import FINISHED
from clark_agent._text import describe, message_of
from clark_agent.config import ExecutionMode
from clark_agent.errors import (
    HookError,
    LoopError,
    RunAborted,
    RunLogError,
    ToolAborted,
    ToolContractError,
    ToolFatal,
    ToolFatalError,
)
from clark_agent.events import ToolExecutionEnd, ToolExecutionStart, note_exception
from clark_agent.hooks import call_hook
from clark_agent.intake import accept_result, is_plain_result
from clark_agent.plugin import AfterToolCallContext, AfterToolDecision
from clark_agent.preparation import PendingCall, accept, prepare
from clark_agent.run_log.log import RunWriter
from clark_agent.run_log.records import RuntimeResult, ToolEnded, ToolStarted
from clark_agent.run_state import Run
from clark_agent.steering import SteerWhen
from clark_agent.supervised import as_coroutine
from clark_agent.tool_run import ToolLeftBehindError, ToolRun
from clark_agent.tools import AgentTool, ToolContext, ToolResult
from clark_agent.turn import ModelAnswer
from clark_agent.types import AssistantMessage, StopReason, ToolCall, ToolResultMessage

__all__ = ["Batch"]

_MAX_TOKENS = StopReason.MAX_TOKENS  # a name of this module is found faster than a member

logger = logging.getLogger(__name__)


class Batch:
    """The tool calls of one answer."""

    _over_cap: Sequence[PendingCall] = ()
    _failure: LoopError | None = None
    _stopped: str | None = None
    _sibling_failed = False
    _exit: BaseException | None = None
    """What tells the interpreter to stop, raised by one of the calls."""

    def __init__(
        self,
        run: Run,
        message: AssistantMessage,
        calls: Sequence[ToolCall],
        earlier: Mapping[int, ToolResult | None] | None = None,
    ) -> None:
        """``earlier`` is what another process has left of the batch: the results that it has, and
        the calls (None) that had begun without one.
        """
        self._run = run
        self._asked_by = message
        self._given = calls
        self._earlier = earlier
        # As the model named them, for a batch that is settled before it is executed.
        self._calls = self._ready = self._pending(calls)
        self._running: dict[PendingCall, ToolRun] = {}
        self._tasks: dict[PendingCall, asyncio.Task[None]] = {}

    def results(self) -> list[ToolResultMessage]:
        """One message per call, in their order; those over the cap come last."""
        now_ms = self._run.clock.now_ms
        messages: list[ToolResultMessage] = []
        for pending in (*self._ready, *self._over_cap):
            call, result = pending.call, pending.result
            assert result is not None
            messages.append(
                ToolResultMessage(
                    call.id,
                    call.name,
                    result.content,
                    result.is_error,
                    result.narration,
                    result.details,
                    now_ms(),
                )
            )
        return messages

    def terminates(self) -> bool:
        """Whether the batch ends the run: all counted results vote so, and there is one."""
        if self._over_cap:
            return False
        voted = False
        for pending in self._calls:
            if pending.tool is None or pending.tool.counts_toward_termination_vote:
                voted = True
                if pending.result is None or not pending.result.terminate:
                    return False
        return voted

    def output(self) -> Any:
        """What the last tool that takes the run's answer was run with."""
        for pending in reversed(self._calls):
            if pending.has_run and pending.tool is not None and pending.tool.takes_output:
                return pending.tool.output(pending.input)
        return None

    def execute(self, answer: ModelAnswer) -> Awaitable[None]:
        """Run the calls. Raises `ToolFatalError` or `RunAborted` when a tool says so."""
        self._run.check_cancelled()
        self._normalize()
        if self._earlier:
            self._take_over(self._earlier)
        if self._asked_by.stop_reason is _MAX_TOKENS:
            for pending in self._calls:
                pending.answer_ourselves(_not_executed("max_tokens", _CUT_OFF))
            return self._finalize_all()
        if self._run.config.max_tool_calls_per_turn is not None:
            self._apply_cap(self._run.config.max_tool_calls_per_turn)
        if len(self._calls) > 1:
            self._refuse_answers_in_company()
        if len(self._ready) <= 1 or self._is_sequential():
            return self._one_by_one(answer)
        return self._all_at_once(answer)

    async def settle(self) -> list[ToolResultMessage]:
        """The batch was interrupted: stop what runs, end every call, give all results."""
        self.stop("aborted")
        await self._tasks_done()
        if self._earlier:  # it has not come to that
            with suppress(HookError):
                self._normalize()
            self._take_over(self._earlier)
        for pending in (*self._ready, *self._over_cap):
            if not pending.ended:
                await self._run.emit_closing(self._end(pending))
        return self.results()

    def stop(self, why: str, *, but: PendingCall | None = None) -> None:
        """Make every call that runs end, except one, and start no other."""
        self._stopped = why
        for tool_run in tuple(self._running.values()):
            tool_run.stop(why)
        for pending, task in self._tasks.items():
            if pending not in self._running and pending is not but:  # in a hook, or not begun
                task.cancel()

    def recall(self) -> bool:
        """Know the results of a batch that another process has ended; whether it ends the run."""
        self._normalize()
        self._take_over(self._earlier or {})
        if self._run.config.max_tool_calls_per_turn is not None:
            self._apply_cap(self._run.config.max_tool_calls_per_turn)
        return self.terminates()

    def _pending(self, calls: Sequence[ToolCall]) -> list[PendingCall]:
        find = self._run.registry.find
        return [
            PendingCall(call, find(call.name), call.arguments, position)
            for position, call in enumerate(calls)
        ]

    def _normalize(self) -> None:
        """Take the policy's repairs to the names and arguments of the calls."""
        protocol, calls = self._run.config.protocol, self._given
        try:
            named = protocol.normalize_tool_calls(calls, self._run.registry)
            if named is calls:
                return
            if [call.id for call in named] != [call.id for call in calls]:
                raise ValueError(
                    "normalize_tool_calls must return the same calls in the same order"
                )
        except Exception as error:
            raise HookError("protocol policy", protocol.name, error) from error
        self._calls = self._ready = self._pending(named)

    def _take_over(self, earlier: Mapping[int, ToolResult | None]) -> None:
        """Give the calls that another process has run their results. None is run twice, unless its
        tool says that this does no harm.
        """
        for position, result in earlier.items():
            pending = self._calls[position]
            tool = pending.tool
            pending.has_begun = result is None
            if result is not None:
                pending.result = result
                pending.was_logged = True
                self._sibling_failed = self._sibling_failed or _fails_siblings(pending)
                if tool is not None and tool.takes_output:
                    pending.has_run = accept(tool, pending, pending.call.arguments) is None
            elif tool is None or not tool.idempotent:
                pending.answer_ourselves(_uncertain())
        self._earlier = None

    # --- one after the other, or all at once ----------------------------------------------------

    def _apply_cap(self, cap: int) -> None:
        """Tell the calls that may run from those over the cap, which get their result now."""
        counted = [pending for pending in self._calls if _takes_a_slot(pending.tool)]
        self._over_cap = counted[cap:]
        for pending in self._over_cap:
            pending.answer_ourselves(_over_cap(len(self._calls), len(counted), cap))
        over = set(map(id, self._over_cap))
        self._ready = [pending for pending in self._calls if id(pending) not in over]

    def _refuse_answers_in_company(self) -> None:
        """The run's answer cannot end it beside calls that want it to go on: it must come alone."""
        voting = [p for p in self._calls if p.tool is None or p.tool.counts_toward_termination_vote]
        for pending in voting:
            if len(voting) > 1 and pending.tool is not None and pending.tool.takes_output:
                pending.answer_ourselves(_not_executed("not_alone", _NOT_ALONE))

    def _is_sequential(self) -> bool:
        return self._run.config.default_execution_mode is ExecutionMode.SEQUENTIAL or any(
            pending.tool is not None and pending.tool.requires_exclusive_sandbox
            for pending in self._ready
        )

    async def _one_by_one(self, answer: ModelAnswer) -> None:
        run = self._run
        previous: PendingCall | None = None
        for pending in self._ready:
            if previous is not None:
                await run.pace.pause_if_due()
                run.check_cancelled()
                self._sibling_failed = self._sibling_failed or _fails_siblings(previous)
            if (
                pending.was_logged
                or (pending.has_begun and pending.result is not None)
                or (run.can_intervene and self._is_held_back(pending))
            ):
                pass
            elif self._sibling_failed:
                pending.answer_ourselves(_SIBLING_FAILED_BEFORE)
            elif pending.result is None:
                await prepare(run, answer, pending)
                if pending.result is None:
                    call = pending.call
                    await run.emit(ToolExecutionStart(call.id, call.name, call.arguments))
                    await self._call(pending, alone=True)
            await self._finalize(pending)
            if self._failure is not None:
                raise self._failure
            previous = pending
        if self._over_cap:
            await self._finalize_all()
        if self._stopped is not None:
            run.check_cancelled()

    async def _all_at_once(self, answer: ModelAnswer) -> None:
        for pending in self._ready:
            if pending.result is not None or self._is_held_back(pending):
                continue
            await self._run.pace.pause_if_due()
            await prepare(self._run, answer, pending)
            if pending.result is None:
                call = pending.call
                await self._run.emit(ToolExecutionStart(call.id, call.name, call.arguments))
        to_run: list[PendingCall] = []
        for pending in self._ready:
            if pending.result is None:
                to_run.append(pending)
            else:
                await self._finalize(pending)
        if len(to_run) == 1:
            await self._call(to_run[0], alone=True)
        elif to_run:
            await self._call_in_tasks(to_run)
        await self._finalize_all()

    async def _finalize_all(self) -> None:
        """Let all calls end that have not, and the run if one of them says so."""
        for pending in (*self._ready, *self._over_cap):
            if not pending.ended:
                await self._finalize(pending)
        if self._failure is not None:
            raise self._failure

    async def _call_in_tasks(self, to_run: Sequence[PendingCall]) -> None:
        create_task = asyncio.get_running_loop().create_task
        self._take_interrupts()
        try:
            # Known one by one: where tasks are eager, a call may stop the others before the next
            # has a task.
            for pending in to_run:
                self._tasks[pending] = create_task(self._call_and_finalize(pending))
            await asyncio.wait(self._tasks.values())
        finally:
            self._give_back_interrupts()
        if self._exit is not None:
            raise self._exit
        for task in self._tasks.values():
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        self._run.check_cancelled()

    async def _call_and_finalize(self, pending: PendingCall) -> None:
        try:
            await self._call(pending)
            await self._finalize(pending)
        except (KeyboardInterrupt, SystemExit) as stop:
            # Out of a task it would stop the event loop with the run still open. The run's own task
            # raises it, once all is closed.
            self._exit = self._exit or stop
            self.stop("aborted")
            return
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
        for pending, tool_run in tuple(self._running.items()):
            if tool_run.stopped is None:
                pending.was_intervened = True
                tool_run.stop(why)

    def _is_held_back(self, pending: PendingCall) -> bool:
        """Whether somebody has intervened before the call was run; then it has its result."""
        why = self._run.intervention(SteerWhen.BEFORE_NEXT_TOOL)
        if why is not None:
            held = _uncertain() if pending.has_begun else _not_executed(why, _HELD_BACK[why])
            pending.answer_ourselves(held)
            pending.was_intervened = True
            self._run.passes()
        return why is not None

    async def _tasks_done(self) -> None:
        """Wait for the tasks of the batch. Each of them ends within the grace."""
        while waiting := [task for task in self._tasks.values() if not task.done()]:
            try:
                await asyncio.wait(waiting)
            except asyncio.CancelledError:
                logger.debug("cancelled again while the calls of a batch were being stopped")

    # --- one call -------------------------------------------------------------------------------

    async def _call(self, pending: PendingCall, *, alone: bool = False) -> None:
        """Run the tool; the call has its result after this, unless the run is over.

        A call that runs ``alone``, in the run's own task, takes the run's interrupts.
        """
        if self._comes_too_late(pending):
            return
        run, call, tool = self._run, pending.call, pending.tool
        assert tool is not None
        if run.log is not None:
            run.log.write(
                ToolStarted(
                    position=pending.position,
                    tool_call_id=call.id,
                    tool_name=call.name,
                    arguments=None if pending.args is call.arguments else pending.args,
                ),
                hand_on=False,
            )
            waiting = run.log.barrier()
            if waiting is not FINISHED:
                await waiting
                if self._comes_too_late(pending):
                    return
        context = ToolContext(tool_call_id=call.id, tool_name=call.name, run=run)
        context.position = pending.position
        tool_run: ToolRun | None = None
        cancelled: asyncio.CancelledError | None = None
        timeout = run.config.tool_timeout if tool.timeout is None else tool.timeout
        due = None if timeout is None else run.loop.time() + timeout  # the first step included
        try:
            coroutine: Any = tool.execute(pending.input, context)
            if type(coroutine) is not CoroutineType:
                coroutine = as_coroutine(_awaitable(tool, coroutine))
            try:
                awaited = coroutine.send(None)
            except StopIteration as done:  # it had nothing to wait for
                result = done.value
            except GeneratorExit as error:
                raise RuntimeError("GeneratorExit was raised") from error
            else:
                tool_run = self._running[pending] = ToolRun(
                    coroutine,
                    awaited,
                    context,
                    grace=run.grace,
                    cancelling=run.scope.expected if alone else 0,
                    in_thread=tool.runs_in_thread,
                )
                if due is not None:
                    tool_run.stop_at(due, "timeout")
                if alone:
                    self._take_interrupts()
                result = await tool_run
            if context.failure_below is not None:
                raise context.failure_below
            if not is_plain_result(result):
                result = accept_result(result, f"the tool {tool.name!r}")
            pending.result = result
            pending.has_run = True
            if run.log is not None:
                if not alone and run.hooks.after_tool_call:
                    pending.returned = run.log.place
                if run.replays is not None:
                    pending.by_runtime = run.replays.by_runtime(pending.position)
        except (Exception, asyncio.CancelledError) as error:
            self._give_error(pending, tool, error, tool_run)
            cancelled = error if isinstance(error, asyncio.CancelledError) else None
        except BaseException:  # the interpreter is told to stop
            pending.answer_ourselves(_stopped("aborted", None))
            raise
        finally:
            context.settle(drop=not pending.was_intervened)
            if tool_run is not None:
                del self._running[pending]
                if alone:
                    self._give_back_interrupts()
        if tool_run is not None and tool_run.cancelled_from_outside:
            raise cancelled or asyncio.CancelledError

    def _is_over(self, pending: PendingCall) -> bool:
        """Whether the run is. Who notices stops all other calls here and now: where they are does
        not depend on when the event loop comes round.
        """
        if self._stopped is None and self._run.is_cancelled():
            self.stop("aborted", but=pending)
        return self._stopped is not None

    def _comes_too_late(self, pending: PendingCall) -> bool:
        """Whether the call must not start any more; then it has its result."""
        if self._stopped is not None or (self._run.is_cancelled() and self._is_over(pending)):
            pending.answer_ourselves(_not_executed("aborted", _NOT_STARTED))
        elif self._run.can_intervene and self._is_held_back(pending):
            pass
        elif self._sibling_failed:
            pending.answer_ourselves(_stopped("sibling", None))
        return pending.result is not None

    def _timeout(self, tool: AgentTool) -> float | None:
        return self._run.config.tool_timeout if tool.timeout is None else tool.timeout

    def _give_error(
        self,
        pending: PendingCall,
        tool: AgentTool,
        error: Exception | asyncio.CancelledError,
        tool_run: ToolRun | None,
    ) -> None:
        """The result of a call whose tool gave none."""
        why = None if tool_run is None else tool_run.stopped
        if isinstance(error, asyncio.CancelledError) and tool_run is not None:
            why = "aborted" if tool_run.cancelled_from_outside else why
        if why is not None and self._run.replays is not None:
            why = self._run.replays.why_stopped(pending.position, why)
        match error:
            case ToolLeftBehindError():
                logger.warning("the tool %r did not stop and was left behind", tool.name)
                result = _stopped(why, self._timeout(tool), still_running=True)
                pending.answer_ourselves(result)
            case asyncio.CancelledError():
                left = why is not None and tool.runs_in_thread
                if left:
                    logger.warning("the thread of the tool %r was left behind", tool.name)
                result = _stopped(why, self._timeout(tool), still_running=left)
                pending.answer_ourselves(result)
            case ToolAborted():
                text = message_of(error)
                self._fail(RunAborted(f"the tool {tool.name!r} aborted it: {text}"), error)
                pending.result = ToolResult.error(f"The tool aborted the run: {text}")
                pending.raised, pending.raised_text = "aborted", text
            case ToolFatal():
                text = message_of(error)
                self._fail(ToolFatalError(tool.name, text), error)
                pending.result = ToolResult.error(f"The tool ended the run: {text}")
                pending.raised, pending.raised_text = "fatal", text
            case RunLogError():  # of a child: what happens below is not written down any more
                self._fail(RunLogError(f"in the tool {tool.name!r}: {error}"), error)
                pending.result = ToolResult.error(f"The run was stopped: {error}")
                pending.was_logged = pending.is_unresolved = True
            case ToolContractError():
                logger.error("a bug in the tool %r: %s", tool.name, error, exc_info=error)
                pending.exception = error
                pending.result = ToolResult.error(
                    f"The tool is broken: {message_of(error)}",
                    details={"kind": "tool_contract_error", "tool": tool.name},
                )
            case _:
                logger.warning("the tool %r failed", tool.name, exc_info=error)
                pending.exception = error
                pending.result = ToolResult.error(describe(error))

    def _fail(self, failure: LoopError, cause: BaseException) -> None:
        """The run cannot go on. The first reason counts."""
        if self._failure is None:
            failure.__cause__ = cause
            self._failure = failure

    def _finalize(self, pending: PendingCall) -> Awaitable[None]:
        """Let the hooks see the outcome, and tell that the call is over."""
        if self._run.hooks.after_tool_call and not pending.was_logged:
            return self._finalize_with_hooks(pending)
        return self._run.emit(self._end(pending))

    async def _finalize_with_hooks(self, pending: PendingCall) -> None:
        if not self._is_over(pending):
            await self._ask_hooks(pending)
        await self._run.emit(self._end(pending))

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
            if pending.exception is not None:
                note_exception(context, pending.exception)
            try:
                decision = await call_hook(self._run, hook, context)
                pending.result = _changed(result, decision)
                if pending.result is not result and pending.given is None:
                    pending.given = result
            except Exception as error:
                logger.exception("the hook %r failed; the result becomes an error", hook.name)
                pending.decided(hook.name, "failed")
                pending.given = pending.given or result
                pending.result = ToolResult.error(
                    f"The result was withheld: the hook {hook.name!r} that checks it raised "
                    + describe(error)
                )
            else:
                if pending.result is not result:
                    pending.decided(hook.name, "change")
        pending.checked = True

    def _end(self, pending: PendingCall) -> ToolExecutionEnd:
        """The call is over: its result stays as it is from now on. The event that says so."""
        result = pending.result
        if result is None:
            not_run = _not_executed("aborted", _NOT_STARTED)
            pending.answer_ourselves(_uncertain() if pending.has_begun else not_run)
            result = pending.result
        elif self._run.hooks.after_tool_call and not (
            pending.checked or pending.was_logged or pending.by_runtime is not None
        ):
            pending.answer_ourselves((ToolResult.error(_UNCHECKED), RuntimeResult("unchecked")))
            result = pending.result
        assert result is not None
        if pending.decisions:
            pending.given = pending.given or result
            result = _with_decisions(result, pending.decisions)
        pending.result = result
        if self._run.log is not None and not pending.was_logged:
            self._log_end(self._run.log, pending, result)
        pending.ended = True  # only now: if it could not be written the call has not ended
        event = ToolExecutionEnd(pending.call.id, pending.call.name, result, result.is_error)
        if pending.exception is not None:
            note_exception(event, pending.exception)
        return event

    def _log_end(self, log: RunWriter, pending: PendingCall, result: ToolResult) -> None:
        call, position = pending.call, pending.position
        name = None if call.name == self._given[position].name else call.name
        log.write(
            ToolEnded(
                position=position,
                tool_call_id=call.id,
                tool_name=name,
                result=result,
                given=pending.given,
                by_runtime=pending.by_runtime,
                raised=pending.raised,
                raised_text=pending.raised_text,
                hook_raised=pending.hook_raised,
                decisions=tuple(pending.decisions),
            ),
            returned=pending.returned,
        )

    @property
    def is_resolved(self) -> bool:
        """Whether the log may say how every call has ended."""
        return not any(pending.is_unresolved for pending in self._calls)

    def positions(self) -> tuple[int, ...]:
        """Which calls the results answer, in the order of the results."""
        return tuple([pending.position for pending in (*self._ready, *self._over_cap)])


# --- decisions on values ----------------------------------------------------------------------

_CUT_OFF = (
    "The call was not run: the message was cut off at the output limit, and its arguments may be "
    "incomplete. Send the call again, shorter or on its own."
)
_UNCHECKED = "The result was withheld: the run was stopped before the hooks had checked it."
_NOT_STARTED = "The call was not run: the run was stopped before it started."
_NOT_ALONE = (
    "Not accepted: the final answer ends the work, so it must be the only call of a message. Look "
    "at the results of the other calls, then call this again, alone."
)
_HELD_BACK = {
    "steered": (
        "Not executed: the user intervened. See what they say next, then send this call again if "
        "it is still wanted."
    ),
    "out_of_time": "Not executed: the time for this run is over.",
}
_SIBLING_FAILED_BEFORE = (
    ToolResult.error(
        "The call was not run: an earlier call of the same batch failed. Deal with that first, "
        "then send this call again if it is still wanted."
    ),
    RuntimeResult("not_executed", "sibling"),
)

_Made: TypeAlias = tuple[ToolResult, RuntimeResult]
"""A result of the runtime's own, and why it is."""


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
        and not pending.was_intervened
    )


def _over_cap(total: int, counted: int, cap: int) -> _Made:
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
    why = RuntimeResult("not_executed", "max_tool_calls_per_turn")
    return ToolResult.error(text, details=details), why


def _uncertain() -> _Made:
    """The result of a call that had begun when its process died."""
    text = (
        "The call had begun when the program was interrupted. It may or may not have happened: "
        "look before you send it again."
    )
    details = {"kind": "tool_call_uncertain", "reason": "interrupted"}
    return ToolResult.error(text, details=details), RuntimeResult("uncertain", "interrupted")


def _not_executed(reason: str, text: str) -> _Made:
    details = {"kind": "tool_call_not_executed", "reason": reason}
    return ToolResult.error(text, details=details), RuntimeResult("not_executed", reason)


def _stopped(why: str | None, timeout: float | None, *, still_running: bool = False) -> _Made:
    """The result of a call that was running when it was stopped."""
    made = RuntimeResult("stopped", why or "cancelled_itself", still_running)
    match why:
        case "sibling":
            text = "The call was stopped because another call of the same batch failed."
            details: Any = {"still_running": True} if still_running else None
            return ToolResult.error(text, details=details), made
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
    return ToolResult.error(text, details=details), made


def _awaitable(tool: AgentTool, work: Any) -> Awaitable[Any]:
    """What ``execute`` returned, if it can be awaited."""
    if isawaitable(work):
        return work
    raise ToolContractError(
        f"execute of the tool {tool.name!r} must be an 'async def', and returned "
        f"{type(work).__name__}"
    )


def _with_decisions(result: ToolResult, decisions: list[dict[str, Any]]) -> ToolResult:
    """The result, with those who had a hand in it named in the details.

    Details that are no object belong to the host alone and stay as they are.
    """
    details = result.details
    if not (details is None or isinstance(details, dict)):
        return result
    return replace(result, details={**(details or {}), "decided_by": decisions})


def _changed(result: ToolResult, decision: object) -> ToolResult:
    """The result as an after-hook wants it: first its own, then the flags."""
    if decision is None:
        return result
    if not isinstance(decision, AfterToolDecision):
        raise TypeError(
            f"on_after_tool_call must return an AfterToolDecision or None; got {decision!r}"
        )
    changed = result
    if decision.result is not None:
        changed = accept_result(decision.result, "AfterToolDecision.result")
    if decision.mark_error is not None and decision.mark_error is not changed.is_error:
        changed = replace(changed, is_error=decision.mark_error)
    if decision.terminate is not None and decision.terminate is not changed.terminate:
        changed = replace(changed, terminate=decision.terminate)
    return changed
