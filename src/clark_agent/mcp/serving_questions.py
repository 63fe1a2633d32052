"""Questions to the user of an MCP client, by elicitation: approvals and answers.

The functions made here find the call that they are asked in by themselves, so one agent can serve
any number of clients. Outside a call of an MCP client nobody is there to ask.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from clark_agent.mcp.serving_calls import CallOver, ServedCall, current_call
from clark_agent.toolkit.approval import Approval, ApprovalRequest, Denied
from clark_agent.toolkit.ask import OneAtATime

if TYPE_CHECKING:
    import mcp_types as types

__all__ = ["elicited_answer", "elicited_approval"]

_CANNOT_ASK = (
    "Note: the server wanted to ask its user, and this MCP client does not support elicitation, so "
    "what needs an answer or an approval was refused."
)


def elicited_approval() -> Callable[[ApprovalRequest], Awaitable[Approval | Denied]]:
    """Make an ``ask`` function for an `ApprovalGate` that asks the user of the MCP client::

        Agent(model, tools=[deploy], plugins=[ApprovalGate(elicited_approval())])

    If the client cannot ask, or outside a call of a client, the call that needs approval is
    refused. A user who declines or dismisses the question refuses it too.
    """
    return _Approval()


class _Eliciting:
    """Asks the user of the client of the current call."""

    def line(self) -> OneAtATime:
        """Each call has its own line: one user who does not answer must not stop all others."""
        call = current_call.get()
        return OneAtATime() if call is None else call.line


class _Approval(_Eliciting):
    async def __call__(self, request: ApprovalRequest) -> Approval | Denied:
        answer = await _ask(f"Allow this call?\n{request.text}", _APPROVAL)
        content: dict[str, Any] = dict(answer.content or {})
        if answer.action != "accept":
            return Approval.NO
        reason = str(content.get("reason") or "").strip()
        decision = content.get("decision")
        if decision in (Approval.ONCE, Approval.ALWAYS):
            return Approval(decision)
        if decision == Approval.NEVER and not reason:
            return Approval.NEVER
        return Denied(reason) if reason else Approval.NO


_APPROVAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "decision": {
            "type": "string",
            "title": "Decision",
            "description": "Run this call once, always run this tool in this task, do not run this "
            "call, or never run this tool in this task.",
            "enum": [str(answer) for answer in Approval],
        },
        "reason": {
            "type": "string",
            "title": "Reason",
            "description": "If the call should not run: what to do instead.",
        },
    },
    "required": ["decision"],
}


def elicited_answer() -> Callable[[str, Sequence[str]], Awaitable[str]]:
    """Make an ``ask`` function for `clark_agent.toolkit.ask_user_tool` that asks the user of the
    MCP client.
    """
    return _Answer()


class _Answer(_Eliciting):
    async def __call__(self, question: str, choices: Sequence[str]) -> str:
        field: dict[str, Any] = {"type": "string", "title": "Answer"}
        if choices:
            field["description"] = "For example: " + "; ".join(choices)
        schema = {"type": "object", "properties": {"answer": field}, "required": ["answer"]}
        answer = await _ask(question, schema)
        if answer.action != "accept":
            return ""
        return str((answer.content or {}).get("answer") or "")


async def _ask(message: str, schema: dict[str, Any]) -> types.ElicitResult:
    """Show a form to the user. Raises `EOFError`, which means that nobody is there."""
    call: ServedCall | None = current_call.get()
    if call is None:
        raise EOFError("not in a call of an MCP client")
    if not call.can_ask:
        if _CANNOT_ASK not in call.notes:
            call.notes.append(_CANNOT_ASK)
        raise EOFError("the MCP client does not support elicitation")
    try:
        return await call.ask(message, schema)
    except CallOver as error:
        raise EOFError(str(error)) from None
