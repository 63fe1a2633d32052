"""Calls that wait: how a request is made, and what its verdict does to the call.

    suspend_before_run   a hook holds the call back
    suspend_after_run    the tool has run, and its result comes later; or its child run waits
    hold                 a call before it waits, and calls run one after the other
    continue_call        another process takes the run up: the verdict takes effect

A request is bound to the call with exactly its arguments. If they are others when the call is about
to run, it is asked about again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, assert_never

from msgspec import Struct

from clark_agent.engine import runtime_results as results
from clark_agent.engine.runtime_results import WaitReason
from clark_agent.errors import ToolSuspended
from clark_agent.intake import accept_json
from clark_agent.tools.base import Continued, ToolResult
from clark_agent.tools.function import tool_result
from clark_agent.waiting import (
    Allow,
    Delivered,
    Deny,
    Elapsed,
    Expired,
    GiveArguments,
    GiveResult,
    Suspend,
    Verdict,
    WaitingRequest,
    request_id_of,
)

if TYPE_CHECKING:
    from clark_agent.engine.call import Call
    from clark_agent.engine.resumption import AskedEarlier, EarlierWait
    from clark_agent.engine.run import Run

__all__ = [
    "ChildSuspended",
    "Wait",
    "allow_given",
    "continue_call",
    "continued",
    "given_arguments",
    "hold",
    "may_run",
    "suspend_after_run",
    "suspend_before_run",
]

logger = logging.getLogger(__name__)

_NO_LOG = (
    "The call was not run: it has to wait for a decision, and this run cannot wait. Go on without "
    "it."
)


class Wait(Struct, frozen=True):
    """What a call waits for."""

    reason: WaitReason
    request: WaitingRequest | None = None
    child_run_ids: tuple[str, ...] = ()
    below: tuple[WaitingRequest, ...] = ()
    """The requests of these child runs."""

    @property
    def has_run(self) -> bool:
        """Whether the tool was called."""
        return self.reason in ("result", "child")

    @property
    def requests(self) -> tuple[WaitingRequest, ...]:
        """Everything that it waits for."""
        return self.below if self.request is None else (self.request,)


class ChildSuspended(ToolSuspended):
    """A run that the call has started waits. Raised through the tool."""

    def __init__(self, run_ids: tuple[str, ...], waiting: tuple[WaitingRequest, ...]) -> None:
        super().__init__()
        self.run_ids = run_ids
        self.waiting = waiting


# --- waiting ------------------------------------------------------------------------------------


def suspend_before_run(run: Run, call: Call, asked_by: str, wanted: Suspend) -> None:
    """Let the call wait for a permission, unless it has it for exactly these arguments."""
    if may_run(run, call, asked_by):
        return
    if not run.can_wait:
        logger.warning("the plugin %r suspends a run that cannot wait: %s", asked_by, _why(run))
        details = {"kind": "tool_call_not_executed", "reason": "cannot_wait"}
        call.decided(asked_by, "suspend")
        call.result = ToolResult.error(_NO_LOG, details=details)
        return
    _suspend(run, call, "permission", asked_by, wanted)


def suspend_after_run(run: Run, call: Call, error: ToolSuspended) -> None:
    """Let the call wait for its result, or for the runs that it has started."""
    if isinstance(error, ChildSuspended):
        wait = Wait("child", child_run_ids=error.run_ids, below=error.waiting)
        call.suspend(wait, results.suspended("child", run.identify().run_id))
        run.journal.call_suspended(call)
        return
    assert call.tool is not None
    if not run.can_wait:
        name = call.tool.name
        logger.warning("the tool %r suspends a run that cannot wait: %s", name, _why(run))
        details = {"kind": "tool_call_stopped", "reason": "cannot_wait", "still_running": False}
        call.result = ToolResult.error(
            "The result of the call would come later, and this run cannot wait for it.",
            details=details,
        )
        return
    try:
        wanted = Suspend(error.request, error.expires_in, error.until, error.event, error.assignee)
    except ValueError as invalid:
        text = "a bug in the tool %r: %s"
        logger.error(text, call.tool.name, invalid, extra=results.IN_RESULT)
        call.exception = error
        call.result = ToolResult.error(f"The tool is broken: {invalid}")
        return
    _suspend(run, call, "result", call.tool.name, wanted, continues=error.continues)


def _why(run: Run) -> str:
    """Why a run cannot wait."""
    if not run.journal.can_wait:
        return "it has no log"
    return "the tool that has started it is neither idempotent nor runs just this agent"


def _suspend(
    run: Run, call: Call, needs: Any, asked_by: str, wanted: Suspend, *, continues: bool = False
) -> None:
    identity, now = run.identify(), run.clock.now_ms()
    expires = None if wanted.expires_in is None else now + round(wanted.expires_in * 1000)
    request = WaitingRequest(
        request_id=_request_id(run, call, asked_by, continues=continues),
        run_id=identity.run_id,
        root_run_id=run.lineage.root().identify().run_id,
        conversation_id=identity.conversation_id,
        turn=run.turns,
        position=call.position,
        tool_call_id=call.call.id,
        tool_name=call.call.name,
        arguments=call.args,
        asked_by=asked_by,
        needs=needs,
        request=accept_json(wanted.request, f"the request of {asked_by!r}"),
        assignee=wanted.assignee,
        asked_at=now,
        expires_at=expires,
        until=wanted.until_ms,
        event=wanted.event,
        continues=continues,
    )
    _wait_for(run, call, request)
    run.journal.call_suspended(call)


def _wait_for(run: Run, call: Call, request: WaitingRequest) -> None:
    run_id = run.identify().run_id
    placeholder = results.suspended(request.needs, run_id, request.request_id)
    call.suspend(Wait(request.needs, request), placeholder)


def hold(run: Run, call: Call) -> None:
    """Do not run the call before the one that waits."""
    call.suspend(Wait("held"), results.suspended("held", run.identify().run_id))


# --- verdicts -----------------------------------------------------------------------------------


def continue_call(run: Run, call: Call, earlier: EarlierWait) -> None:
    """Continue a call that another process has suspended: with its verdict, or still waiting."""
    call.earlier = earlier
    call.decisions = list(earlier.decisions)
    last = earlier.asked[-1]
    call.args = last.request.arguments
    if last.verdict is None:
        _wait_for(run, call, last.request)
        return
    call.result = _result(last)
    if call.result is None:
        call.decisions = []  # the hooks before it are asked again
        return
    by = {} if last.by is None else {"by": last.by}
    call.decided(last.request.asked_by, str(last.verdict.__struct_config__.tag), **by)
    if continued(call) is not None:
        call.result = None


def _result(asked: AskedEarlier) -> ToolResult | None:
    """The result that a verdict gives; None if the call is to run."""
    needs_result = asked.request.needs == "result"
    verdict = asked.verdict
    match verdict:
        case Allow() | GiveArguments():
            return None
        case Elapsed():
            return ToolResult.text("The time has come.") if needs_result else None
        case Delivered(payload=payload):
            return tool_result(payload) if needs_result else None
        case GiveResult(result):
            given: ToolResult = result
            return given
        case Deny(reason):
            return _refused("denied", _denial(reason), needs_result=needs_result)
        case Expired():
            text = "the request was not decided in time, and has expired."
            return _refused("expired", text, needs_result=needs_result)
        case None:
            raise AssertionError("the request is open")
        case _:
            assert_never(verdict)


def continued(call: Call) -> Continued | None:
    """What a tool is given that goes on; None if the call is not about to go on."""
    asked = () if call.earlier is None else call.earlier.asked
    if not asked or not asked[-1].request.continues:
        return None
    given = (
        None
        if asked[-1].verdict is None or isinstance(asked[-1].verdict, (Deny, Expired))
        else _result(asked[-1])
    )
    return None if given is None else Continued(asked[-1].request.request, given)


def _denial(reason: str | None) -> str:
    said = (reason or "").strip()
    return f"it was refused: {said}" if said else "it was refused. Do not send it again as it is."


def _refused(reason: str, text: str, *, needs_result: bool) -> ToolResult:
    if needs_result:
        details = {"kind": "tool_call_refused", "reason": reason}
        return ToolResult.error(f"The call has no result: {text}", details=details)
    details = {"kind": "tool_call_not_executed", "reason": reason}
    return ToolResult.error(f"The call was not run: {text}", details=details)


def given_arguments(call: Call) -> GiveArguments | None:
    """The newest arguments that were given instead of the model's."""
    for asked in reversed(() if call.earlier is None else call.earlier.asked):
        if isinstance(asked.verdict, GiveArguments):
            return asked.verdict
    return None


def allow_given(run: Run, call: Call) -> None:
    """Note that the given arguments, as the tool has accepted them, are allowed."""
    assert call.earlier is not None
    asked = [a for a in call.earlier.asked if isinstance(a.verdict, GiveArguments)][-1]
    who = asked.request.asked_by
    call.allowed = (*call.allowed, _request_id(run, call, who))
    more = {} if asked.by is None else {"by": asked.by}
    call.decided(who, "give_arguments", args=call.args, **more)


def may_run(run: Run, call: Call, asked_by: str) -> bool:
    """Whether exactly this call was allowed, when this plugin asked about it."""
    request_id = _request_id(run, call, asked_by)
    if request_id in call.allowed:
        return True
    asked = () if call.earlier is None else call.earlier.asked
    return any(a.request.request_id == request_id and _allows(a.verdict) for a in asked)


def _allows(verdict: Verdict | None) -> bool:
    return isinstance(verdict, (Allow, Elapsed, Delivered))


def _request_id(run: Run, call: Call, asked_by: str, *, continues: bool = False) -> str:
    key = f"{run.identify().run_id}/{run.turns}/{call.position}"
    arguments = call.args
    if continues:  # the same call may ask several times
        asked = () if call.earlier is None else call.earlier.asked
        arguments = [arguments, len(asked)]
    return request_id_of(key, asked_by, call.call.name, arguments)
