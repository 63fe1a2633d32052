"""One tool call: prepared, run, checked, ended.

    prepare    is it known, offered, well-formed and allowed? See `clark_agent.engine.prepare`
    run_call   the tool, which can be stopped
    end_call   the hooks after the call, then the event of its end

Whatever happens, a call gets exactly one result. That of a call that waits (see
`clark_agent.engine.suspension`) is a placeholder, which hooks and journal do not see. This file
knows one call and, through `Siblings`, the shared state of its batch; it does not know the order of
the calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from enum import Enum, auto
from inspect import isawaitable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._finished import FINISHED
from clark_agent._text import describe, message_of
from clark_agent.engine import runtime_results as results
from clark_agent.engine.hooks import call_hook
from clark_agent.engine.large_results import shortened
from clark_agent.engine.runtime_results import Made, RuntimeResult
from clark_agent.engine.supervised import as_coroutine
from clark_agent.engine.suspension import Wait, continued, suspend_after_run
from clark_agent.engine.tool_task import ToolLeftBehindError, ToolTask
from clark_agent.errors import (
    HookError,
    LoopError,
    ModelRetry,
    RunAborted,
    RunLetGo,
    RunLogError,
    RunStoppedByTool,
    ToolAborted,
    ToolContractError,
    ToolFatal,
    ToolSuspended,
)
from clark_agent.events import NotRun, ToolExecutionEnd, note_exception, note_not_run
from clark_agent.intake import accept_result, is_plain_result
from clark_agent.plugins.base import (
    AfterToolCallContext,
    AfterToolDecision,
)
from clark_agent.steering import SteerWhen
from clark_agent.tools import AgentTool, ToolContext, ToolResult
from clark_agent.tools.kept import KeptResult
from clark_agent.types import AssistantMessage, ToolCall

if TYPE_CHECKING:
    from clark_agent.engine.interrupts import Why
    from clark_agent.engine.resumption import EarlierWait
    from clark_agent.engine.run import Run

__all__ = [
    "Call",
    "CallAnswered",
    "CallState",
    "Siblings",
    "ask_if_it_happened",
    "check_again",
    "close_call",
    "end_call",
    "run_call",
]

logger = logging.getLogger(__name__)


class CallState(Enum):
    """The progress of a call."""

    WAITING = auto()
    """It has not run. It may still have a result: it was rejected, or a hook answered."""
    INTERRUPTED = auto()
    """Another process started it, and died."""
    RECALLED = auto()
    """Another process has run it, and its result is in the log."""
    UNRECORDED = auto()
    """Its child run could not be logged, so the log must not record its end."""
    SUSPENDED = auto()
    """It waits, and its result is a placeholder."""
    CHECKED = auto()
    """The hooks after the call have seen the result."""
    ENDED = auto()
    """The result is final, and listeners have it."""


_WAITING, _CHECKED = CallState.WAITING, CallState.CHECKED
_ENDED = CallState.ENDED
# Hooks and journal already have these results, or must not get them.
_NOT_OURS = (CallState.RECALLED, CallState.UNRECORDED, CallState.SUSPENDED)
# Hooks have seen these results, or must not see them.
_SEEN = (_CHECKED, *_NOT_OURS)
_INTERVENED = ("steered", "out_of_time")


class CallAnswered(Exception):
    """Raised instead of a result: the tool did not run to its end; this is the call's result."""

    def __init__(self, result: ToolResult, why: RuntimeResult) -> None:
        super().__init__(why.kind, why.reason)
        self.made: Made = (result, why)


# How a call can end whatever became of the runs that it has started.
_OVER_THOSE_BELOW = (
    asyncio.CancelledError,
    CallAnswered,
    ToolAborted,
    ToolFatal,
    ToolLeftBehindError,
    ToolSuspended,
)


class Call(Struct, eq=False):
    """A tool call on its way through a batch."""

    call: ToolCall
    tool: AgentTool | None
    args: Any
    """The arguments as hooks see them."""
    position: int
    """The position of the call in the message."""
    repaired_name: str | None = None
    """The repaired name of the tool, if the policy changed it."""
    input: Any = None
    """The arguments as the tool has validated them."""
    state: CallState = _WAITING
    result: ToolResult | None = None
    by_runtime: RuntimeResult | None = None
    """Why the result is the runtime's own, if it is."""
    stopped: str | None = None
    """Why it was not started, or was stopped while it ran."""
    decisions: list[dict[str, Any]] = []
    """Which plugins affected it, and how."""
    given: ToolResult | None = None
    """The tool's own result, if hooks have changed it."""
    kept: KeptResult | None = None
    """What of the result is in the log beside the records, because it is too large."""
    raised: Literal["fatal", "aborted"] | None = None
    """Whether the tool has ended the run."""
    raised_text: str | None = None
    """The message of that exception."""
    hook_raised: tuple[str, str] | None = None
    """The type and the text of the exception for which it was not run."""
    exception: Exception | None = None
    """The exception of the tool, or of its check of the arguments."""
    returned_at: tuple[int, int] | None = None
    """The position of the journal when the tool returned, if that does not follow from the rest."""
    is_announced: bool = False
    """Whether the journal has that the tool starts, and it has not started yet."""
    has_begun: bool = False
    """Whether the tool was started in this process."""
    has_run: bool = False
    """Whether the tool ran and returned the result, which hooks may have changed."""
    wait: Wait | None = None
    """What it waits for."""
    earlier: EarlierWait | None = None
    """What was asked about it and decided, before this process took the run up."""
    allowed: tuple[str, ...] = ()
    """The ids of requests that given arguments answer."""
    was_checked: bool = False
    """Whether another process has started it, so that the hooks before the call have seen it."""

    def answer(self, made: Made) -> None:
        """Set a result that the runtime made."""
        self.result, self.by_runtime = made

    def hold_back(self, why: Literal["steered", "out_of_time"]) -> None:
        """Do not run it: the user steered, or time ran out."""
        if self.state is not CallState.INTERRUPTED:
            self.answer(results.held_back(why))
        else:  # an agent that waited was not cut off
            self.answer(results.stopped(why) if self.was_checked else results.uncertain())
        self.stopped = why

    def suspend(self, wait: Wait, result: ToolResult) -> None:
        """Let it wait, with a placeholder as its result."""
        self.wait, self.result, self.state = wait, result, CallState.SUSPENDED

    def withdraw(self) -> None:
        """Do not wait any more: the run is over."""
        has_run = self.wait is not None and self.wait.has_run
        self.wait = None
        self.answer(results.withdrawn() if has_run else results.aborted())

    def decided(self, plugin: str, decision: str, **more: Any) -> None:
        """Record the decision of a plugin about the call."""
        self.decisions.append({"plugin": plugin, "decision": decision, **more})

    @property
    def fails_siblings(self) -> bool:
        """Whether its failure makes the other calls of the batch useless."""
        return (
            self.tool is not None
            and self.tool.aborts_siblings_on_error
            and self.result is not None
            and self.result.is_error
            and self.stopped not in _INTERVENED
        )


class Siblings:
    """The shared state of the calls of one batch, and the ways to stop them.

    `interrupt`      the run is interrupted while tools run: steering and time stop the tools, a
                     cancellation stops everything
    `stop`           the run is over: end what runs, and start nothing
    `stop_useless`   a call has failed, and the others are useless without it
    """

    stopped = False
    """Whether the run is over: no call starts any more."""
    failed = False
    """Whether a call has failed, and the others are useless without it."""
    failure: LoopError | None = None
    """Why the run must end."""
    is_recorded = True
    """Whether the journal may record the end of all calls."""

    tasks: Mapping[Call, asyncio.Task[None]] = {}
    """The calls that run beside others."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.running: dict[Call, ToolTask] = {}
        """The tools that wait for something."""

    def interrupt(self, why: Why) -> None:
        """The handler of interrupts while tools run."""
        if why == "aborted":
            self.stop()
            return
        for call, task in tuple(self.running.items()):
            if task.stopped is None:
                call.stopped = why
                task.stop(why)

    def stop(self, *, but: Call | None = None) -> None:
        """End every call, except one, and start no other: the run is over."""
        self.stopped = True
        for task in tuple(self.running.values()):
            task.stop("aborted")
        for call, own in self.tasks.items():
            if call not in self.running and call is not but:  # in a hook, or not started
                own.cancel()

    def stop_useless(self) -> None:
        """Stop the other calls after one has failed that they depend on."""
        self.failed = True
        for task in tuple(self.running.values()):
            task.stop("sibling")

    def is_over(self, noticed_by: Call) -> bool:
        """Whether the run is over. The call that notices stops all others immediately, so that
        their progress does not depend on the timing of the event loop.
        """
        if not self.stopped and self._run.interrupts.is_cancelled(noticed_by.position):
            self.stop(but=noticed_by)
        return self.stopped

    def end_run(self, failure: LoopError, cause: BaseException) -> None:
        """End the run with this failure. The first one counts."""
        if self.failure is None:
            failure.__cause__ = None if cause is failure else cause
            self.failure = failure

    def comes_too_late(self, call: Call) -> bool:
        """Whether a call must not start any more; then it gets its result here."""
        interrupts = self._run.interrupts
        if not (
            self.stopped
            or self.failed
            or interrupts.can_intervene
            or interrupts.is_cancelled(call.position)
        ):
            return False
        if self.is_over(call):
            call.answer(results.aborted())
        elif not self.hold_back_if_due(call) and self.failed:
            call.answer(results.stopped("sibling"))
        return call.result is not None

    def hold_back_if_due(self, call: Call) -> bool:
        """Answer the call without running it if the user steered or time ran out. Return whether
        that was so.
        """
        why = self._run.interrupts.due(SteerWhen.BEFORE_NEXT_TOOL)
        if why is None:
            return False
        call.hold_back(why)
        self._run.journal.decided()
        return True


# --- the tool -----------------------------------------------------------------------------------


async def run_call(run: Run, siblings: Siblings, call: Call, *, alone: bool = False) -> None:
    """Run the tool. Afterwards the call has its result, unless the run is over.

    A call that runs ``alone``, in the run's own task, handles the run's interrupts.
    """
    if siblings.comes_too_late(call):
        return
    waiting = run.journal.tool_started(call)
    if waiting is not FINISHED:
        call.is_announced = True
        await waiting
        if siblings.comes_too_late(call):
            return
        call.is_announced = False
    wanted, tool = call.call, call.tool
    assert tool is not None
    context = ToolContext(tool_call_id=wanted.id, tool_name=wanted.name, run=run)
    context.position, context.turn = call.position, run.turns
    if call.earlier is not None:
        context.continued = continued(call)
    task: ToolTask | None = None
    cancelled: asyncio.CancelledError | None = None
    timeout = run.config.tool_timeout if tool.timeout is None else tool.timeout
    due = None if timeout is None else run.loop.time() + timeout  # the first step included
    call.has_begun = True
    try:
        work: Any = run.effects.run_tool(tool, call.input, context)
        if type(work) is not CoroutineType:
            work = as_coroutine(_awaitable(tool, work))
        try:
            awaited = work.send(None)
        except StopIteration as done:  # it had nothing to wait for
            result = done.value
        except GeneratorExit as error:
            raise RuntimeError("GeneratorExit was raised") from error
        else:
            task = ToolTask(
                work,
                awaited,
                context,
                grace=run.grace,
                cancelling=run.interrupts.expected if alone else 0,
                in_thread=tool.runs_in_thread,
            )
            if due is not None:
                task.stop_at(due, "timeout")
            result = await _supervise(run, siblings, call, task, alone=alone)
        if context.failure_below is not None:
            raise context.failure_below
        if result is not context.plain_result and not is_plain_result(result):
            result = accept_result(result, f"the tool {tool.name!r}")
        call.result, call.has_run = result, True
    except (Exception, asyncio.CancelledError) as error:
        below = context.failure_below
        if below is None or isinstance(error, _OVER_THOSE_BELOW):
            _give_error(run, siblings, call, error, task)
        else:  # the tool may have wrapped it
            _give_error(run, siblings, call, below, task)
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
    except BaseException:  # KeyboardInterrupt, SystemExit
        call.answer(results.stopped("aborted"))
        raise
    finally:
        if call.stopped is None:
            context.settle()
        else:
            context.settle(drop=call.stopped not in _INTERVENED)
    if not alone and run.hooks.after_tool_call:
        call.returned_at = run.journal.place
    if task is not None and task.cancelled_from_outside:
        raise cancelled or asyncio.CancelledError


async def _supervise(
    run: Run, siblings: Siblings, call: Call, task: ToolTask, *, alone: bool
) -> Any:
    """Wait for a tool that did not return at its first step."""
    siblings.running[call] = task
    if alone:
        run.interrupts.handler = siblings.interrupt
    try:
        return await task
    finally:
        del siblings.running[call]
        if alone:
            run.interrupts.handler = None


def _timeout(run: Run, tool: AgentTool) -> float | None:
    return run.config.tool_timeout if tool.timeout is None else tool.timeout


def _awaitable(tool: AgentTool, work: Any) -> Awaitable[Any]:
    """What ``execute`` returned, if it can be awaited."""
    if isawaitable(work):
        return work
    raise ToolContractError(
        f"execute of the tool {tool.name!r} must be an 'async def', and returned "
        f"{type(work).__name__}"
    )


def _give_error(
    run: Run,
    siblings: Siblings,
    call: Call,
    error: Exception | asyncio.CancelledError,
    task: ToolTask | None,
) -> None:
    """Set the error result of a call whose tool did not return one."""
    assert call.tool is not None
    name = call.tool.name
    match error:
        case CallAnswered():
            call.answer(error.made)
        case ToolLeftBehindError():
            logger.warning("the tool %r did not stop and was left behind", name)
            why = None if task is None else task.stopped
            call.answer(results.stopped(why, _timeout(run, call.tool), still_running=True))
        case asyncio.CancelledError():
            why = None if task is None else task.why
            is_left = why is not None and call.tool.runs_in_thread
            if is_left:
                logger.warning("the thread of the tool %r was left behind", name)
            call.answer(results.stopped(why, _timeout(run, call.tool), still_running=is_left))
        case ToolSuspended():
            suspend_after_run(run, call, error)
        case ToolAborted():
            call.raised, call.raised_text = "aborted", message_of(error)
            siblings.end_run(RunAborted(f"the tool {name!r} aborted it: {call.raised_text}"), error)
            call.result = ToolResult.error(f"The tool aborted the run: {call.raised_text}")
        case ToolFatal():
            call.raised, call.raised_text = "fatal", message_of(error)
            siblings.end_run(RunStoppedByTool(name, call.raised_text), error)
            call.result = ToolResult.error(f"The tool ended the run: {call.raised_text}")
        case RunLogError() | RunLetGo():  # of a child run, which is not logged any more
            is_log = isinstance(error, RunLogError)
            ending = RunLogError(f"in the tool {name!r}: {error}") if is_log else error
            siblings.end_run(ending, error)
            call.result = ToolResult.error(f"The run was stopped: {error}")
            call.state, siblings.is_recorded = CallState.UNRECORDED, False
        case HookError(__cause__=Exception() as cause) if call.tool.is_final_answer:
            siblings.end_run(error, cause)  # an output validator failed
            call.result = ToolResult.error(f"The run was stopped: {error}")
        case ModelRetry():
            call.exception = error
            call.result = ToolResult.error(message_of(error))
        case ToolContractError():
            logger.error(
                "a bug in the tool %r: %s", name, error, exc_info=error, extra=results.IN_RESULT
            )
            call.exception = error
            details = {"kind": "tool_contract_error", "tool": name}
            text = f"The tool is broken: {message_of(error)}"
            call.result = ToolResult.error(text, details=details)
        case _:
            logger.warning("the tool %r failed", name, exc_info=error, extra=results.IN_RESULT)
            call.exception = error
            call.result = ToolResult.error(describe(error))


async def ask_if_it_happened(run: Run, call: Call) -> None:
    """Give an interrupted call its result: the tool's, if it knows that the call has happened."""
    tool = call.tool
    assert tool is not None
    key = f"{run.identify().run_id}/{run.turns}/{call.position}"
    try:
        async with asyncio.timeout(_timeout(run, tool)):
            answer: Any = tool.did_it_happen(key)
            if isawaitable(answer):
                answer = await answer
        if answer is not None:
            answer = accept_result(answer, f"did_it_happen of the tool {tool.name!r}")
    except Exception:
        logger.exception("the tool %r could not say whether a call has happened", tool.name)
        answer = None
    if answer is None:
        call.answer(results.uncertain())
    else:
        call.result, call.has_run = answer, True


# --- the end of a call --------------------------------------------------------------------------


def end_call(
    run: Run, siblings: Siblings, asked_by: AssistantMessage, call: Call
) -> Awaitable[None]:
    """Pass the result to the hooks, and emit the end of the call."""
    if run.hooks.after_tool_call and call.state not in _NOT_OURS:
        return _check_and_end(run, siblings, asked_by, call)
    return run.emit(close_call(run, call))


async def _check_and_end(
    run: Run, siblings: Siblings, asked_by: AssistantMessage, call: Call
) -> None:
    has_result = call.by_runtime is None  # which must not be lost if the run is let go
    if not siblings.is_over(call) or (has_result and run.interrupts.is_let_go):
        await _ask_hooks(run, asked_by, call)
    await run.emit(close_call(run, call))


async def _ask_hooks(run: Run, asked_by: AssistantMessage, call: Call) -> None:
    for hook in run.hooks.after_tool_call:
        result = call.result
        assert result is not None
        context = AfterToolCallContext(
            asked_by,
            call.call,
            call.args,
            result,
            result.is_error,
            run.transcript.view(),
            call.tool,
            run.deps,
        )
        if call.exception is not None:
            note_exception(context, call.exception)
        try:
            call.result = _changed(result, await call_hook(run, hook, context))
        except Exception as error:
            text = "the hook %r failed; the result becomes an error"
            logger.exception(text, hook.name, extra=results.IN_RESULT)
            call.decided(hook.name, "failed")
            call.result = ToolResult.error(
                f"The result was withheld: the hook {hook.name!r} that checks it raised "
                + describe(error)
            )
        else:
            if call.result is not result:
                call.decided(hook.name, "change")
        if call.result is not result and call.given is None:
            call.given = result
    call.state = _CHECKED


async def check_again(run: Run, asked_by: AssistantMessage, call: Call) -> None:
    """Pass a result to the hooks once more whose check was interrupted, because the run was let go:
    the process that continues the run needs it. They have the grace of the run for that.
    """
    is_real = call.result is not None and call.by_runtime is None and call.state not in _SEEN
    if not (is_real and run.hooks.after_tool_call):
        return
    if call.given is not None:
        call.result, call.given = call.given, None
        call.decisions = [each for each in call.decisions if each["decision"] != "change"]
    with suppress(TimeoutError):
        async with asyncio.timeout(run.grace):
            await _ask_hooks(run, asked_by, call)


def _changed(result: ToolResult, decision: object) -> ToolResult:
    """The result after an after-hook: first its own result, then the flags."""
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


def close_call(run: Run, call: Call) -> ToolExecutionEnd:
    """Set the final result of the call, and return the event of its end."""
    if call.result is None:
        if call.state is not CallState.INTERRUPTED:
            call.answer(results.aborted())
        else:  # an agent that waited was not cut off
            call.answer(results.withdrawn() if call.was_checked else results.uncertain())
    elif run.hooks.after_tool_call and call.by_runtime is None and call.state not in _SEEN:
        call.answer(results.unchecked())
    result = call.result
    assert result is not None
    not_run = None if call.has_begun else _not_run(call)
    if call.decisions and call.wait is None:
        call.given = call.given or result
        call.result = result = _with_decisions(result, call.decisions)
    if call.state not in _NOT_OURS:
        large = run.hooks.large_results
        if large is not None and (result.details is not None or not large.fits(result, call.tool)):
            call.result = result = shortened(run, large, call, result)
        run.journal.tool_ended(call, result)
    call.state = _ENDED  # only now: if it could not be recorded, the call has not ended
    tool_call = call.call
    event = ToolExecutionEnd(tool_call.id, tool_call.name, result, result.is_error)
    if call.exception is not None:
        note_exception(event, call.exception)
    if not_run is not None:
        note_not_run(event, not_run)
    return event


# What became of a call by the decisions that give it a result.
_DECIDED = {
    "answer": "answered",
    "give_result": "answered",
    "delivered": "answered",
    "elapsed": "answered",
    "block": "blocked",
    "deny": "denied",
    "expired": "expired",
    "suspend": "cannot_wait",
}


def _not_run(call: Call) -> NotRun:
    """Why the tool did not run: see `NotRun.why`."""
    decided = [_DECIDED[d["decision"]] for d in call.decisions if d["decision"] in _DECIDED]
    first = call.given or call.result
    details = None if first is None else first.details
    if call.wait is not None:
        why = "suspended"
    elif call.state is CallState.RECALLED or call.has_run:
        why = "restored"
    elif call.by_runtime is not None:
        why = call.by_runtime.reason or call.by_runtime.kind
    elif call.hook_raised is not None:
        why = "hook_failed"
    elif decided:
        why = decided[-1]
    elif call.tool is None:
        why = "unknown_tool"
    elif call.exception is not None or details == {"kind": "tool_argument_validation"}:
        why = "invalid_arguments"
    else:
        why = "hidden"
    return NotRun(why, None if call.tool is None else call.tool.name)


def _with_decisions(result: ToolResult, decisions: list[dict[str, Any]]) -> ToolResult:
    """The result, with the decisions of plugins in its details.

    Details that are not an object belong to the host and stay unchanged.
    """
    details = result.details
    if not (details is None or isinstance(details, dict)):
        return result
    return replace(result, details={**(details or {}), "decided_by": decisions})
