"""Results that the engine makes instead of a tool, and why. Pure functions on values."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from clark_agent.tools.base import ToolResult

__all__ = [
    "IN_RESULT",
    "Made",
    "RuntimeResult",
    "WaitReason",
    "aborted",
    "after_failed_sibling",
    "cut_off",
    "held_back",
    "not_alone",
    "over_cap",
    "stopped",
    "suspended",
    "uncertain",
    "unchecked",
    "withdrawn",
]


IN_RESULT = {"is_in_result": True}
"""The ``extra`` of a log record that says what the result of the call says too."""


class RuntimeResult(Struct, frozen=True, gc=False, omit_defaults=True):
    """Why the runtime made the result, not the tool."""

    kind: Literal["not_executed", "stopped", "uncertain", "unchecked"]
    """The tool has not run; it was stopped; it may or may not have run; or the run ended before the
    hooks had checked its result."""
    reason: str | None = None
    still_running: bool = False


Made: TypeAlias = tuple[ToolResult, RuntimeResult]
"""A result that the runtime made, and why."""


def _not_executed(reason: str, text: str) -> Made:
    details = {"kind": "tool_call_not_executed", "reason": reason}
    return ToolResult.error(text, details=details), RuntimeResult("not_executed", reason)


def cut_off() -> Made:
    """For a call of an answer that reached the output limit."""
    return _not_executed(
        "max_tokens",
        "The call was not run: the message was cut off at the output limit, and its arguments may "
        "be incomplete. Send the call again, shorter or on its own.",
    )


def aborted() -> Made:
    """For a call that had not started when the run was stopped."""
    return _not_executed("aborted", "The call was not run: the run was stopped before it started.")


def not_alone() -> Made:
    """For a final answer that came with other calls."""
    return _not_executed(
        "not_alone",
        "Not accepted: the final answer ends the work, so it must be the only call of a message. "
        "Look at the results of the other calls, then call this again, alone.",
    )


_HELD_BACK = {
    "steered": (
        "Not executed: the user intervened. See what they say next, then send this call again if "
        "it is still wanted."
    ),
    "out_of_time": "Not executed: the time for this run is over.",
}


def held_back(why: Literal["steered", "out_of_time"]) -> Made:
    """For a call before which the user steered, or time ran out."""
    return _not_executed(why, _HELD_BACK[why])


def after_failed_sibling() -> Made:
    """For a call after one whose failure makes it useless."""
    text = (
        "The call was not run: an earlier call of the same batch failed. Deal with that first, "
        "then send this call again if it is still wanted."
    )
    return ToolResult.error(text), RuntimeResult("not_executed", "sibling")


def over_cap(total: int, counted: int, cap: int) -> Made:
    """For a call over ``max_tool_calls_per_turn``."""
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


WaitReason: TypeAlias = Literal["permission", "result", "child", "held"]
"""What a call waits for: to be allowed, its result, the runs that it started, or the call before
it.
"""

_SUSPENDED = {
    "permission": "The call has not run: it waits for a decision.",
    "result": "The call waits for its result.",
    "child": "The call waits for the agent that it started, which waits for a decision.",
    "held": "The call has not run: an earlier call of the batch waits for a decision.",
}


def suspended(reason: WaitReason, run_id: str, request_id: str | None = None) -> ToolResult:
    """The placeholder in the transcript for a call that waits. It is not recorded."""
    details = {
        "kind": "suspended",
        "run_id": run_id,
        "request_id": request_id,
        "reason": reason,
    }
    return ToolResult.text(_SUSPENDED[reason], details=details)


def withdrawn() -> Made:
    """For a call that waited for its result when the run was stopped."""
    text = "The call had run and was waiting for its result when the run was stopped."
    details = {"kind": "tool_call_stopped", "reason": "aborted", "still_running": False}
    return ToolResult.error(text, details=details), RuntimeResult("stopped", "aborted")


def uncertain() -> Made:
    """For a call that had started when its process died."""
    text = (
        "The call had begun when the program was interrupted. It may or may not have happened: "
        "look before you send it again."
    )
    details = {"kind": "tool_call_uncertain", "reason": "interrupted"}
    return ToolResult.error(text, details=details), RuntimeResult("uncertain", "interrupted")


def unchecked() -> Made:
    """For a call whose result the hooks have not seen."""
    text = "The result was withheld: the run was stopped before the hooks had checked it."
    return ToolResult.error(text), RuntimeResult("unchecked")


def stopped(why: str | None, timeout: float | None = None, *, still_running: bool = False) -> Made:
    """For a call that was running when it was stopped; ``why`` is None if it cancelled itself."""
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
