"""Converts logs of version 1 to version 2, without the checksums.

Version 1 had no fields for why a message was added, why the runtime made a result, and what was
raised. Only this module derives them, from the texts that the runtime used then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from clark_agent.protocol import BUDGET_WRAP_UP, WRAP_UP
from clark_agent.run_log.records import (
    Answered,
    Entry,
    Interrupt,
    MessagesAdded,
    Purpose,
    Record,
    RunBegan,
    RunFailed,
    RuntimeResult,
    SteeringAccepted,
    ToolEnded,
)
from clark_agent.tools.base import ToolResult
from clark_agent.types import AgentMessage, StopReason, SystemMessage, ToolResultMessage

__all__ = ["Upgrade", "upgraded"]


class Upgrade:
    """Adds the fields that version 1 lacks to the records of one log, which it gets in order. Newer
    records are unchanged.
    """

    def __init__(self) -> None:
        self._warns = False
        self._follow_ups: set[int] = set()
        self._before: Entry | None = None
        self._is_first = True
        self._is_stopped = False

    def take(self, record: Record) -> Record:
        """Return the next record with these fields."""
        entry = record.entry
        if self._is_first:
            began = entry
            self._warns = isinstance(began, RunBegan) and "graceful_turn_limit" in began.plugins
            self._is_first = False
        if isinstance(entry, SteeringAccepted) and entry.when == "follow_up":
            self._follow_ups.add(entry.number)
        if record.v != 1:
            return record
        is_follow_up = bool(self._follow_ups.intersection(getattr(entry, "steering", ())))
        warning = "wrap_up" if self._warns else "budget"
        entry = _upgraded(entry, warning, is_follow_up=is_follow_up)
        record = record if entry is record.entry else replace(record, entry=entry)
        before, self._before = self._before, entry
        match entry:
            case Answered() | RunBegan():
                self._is_stopped = False
            case ToolEnded(raised=str()):
                self._is_stopped = True  # by the tool itself
            case _:
                if not self._is_stopped and before is not None and _is_cancelled(before, entry):
                    self._is_stopped = True
                    record = replace(record, interrupts=(Interrupt(0, "cancelled"),))
        return record


def upgraded(records: Iterable[Record]) -> list[Record]:
    """Add the fields that version 1 lacks to the records of a log."""
    return list(map(Upgrade().take, records))


def _is_cancelled(before: Entry, entry: Entry) -> bool:
    """Return whether the run was cancelled between two records, while no tool was running."""
    match entry:
        case RunFailed(error="RunAborted"):
            if isinstance(before, Answered):
                stop_reason = before.message.stop_reason
                return before.discarded is None and stop_reason is not StopReason.ABORTED
            return True
        case ToolEnded(by_runtime=RuntimeResult(kind="not_executed", reason="aborted")):
            return isinstance(before, (Answered, ToolEnded))
        case _:
            return False


def _upgraded(entry: Entry, warning: Purpose, *, is_follow_up: bool) -> Entry:
    match entry:
        case MessagesAdded(messages=messages, source=source):
            other: Purpose = "follow_up" if is_follow_up else "steering"
            usual: dict[str, Purpose] = {"turn": other, "follow_up": "follow_up", "loop": "nudge"}
            purposes = [_purpose(m, warning, usual[source]) for m in messages]
            return replace(entry, purposes=tuple(purposes))
        case Answered(error_text=str() as text):
            found = re.fullmatch(r"the transport raised (\w+): (.*)", text, re.DOTALL)
            if found is not None and found[2] == (entry.message.error_message or ""):
                return replace(entry, raised=(found[1], found[2]))
        case ToolEnded():
            return replace(entry, **dict(_derived(entry)))
        case RunFailed(error="ToolFatalError"):
            return replace(entry, error="RunStoppedByTool")
        case _:
            pass
    return entry


def _purpose(message: AgentMessage, warning: Purpose, usual: Purpose) -> Purpose:
    if isinstance(message, ToolResultMessage):
        return "final_answer" if usual == "nudge" else usual
    if isinstance(message, SystemMessage):
        if message.content == WRAP_UP:
            return warning
        if message.content in BUDGET_WRAP_UP.values():
            return "budget"
    return usual


_RAISED = {"fatal": "The tool ended the run: ", "aborted": "The tool aborted the run: "}


def _derived(entry: ToolEnded) -> Iterator[tuple[str, Any]]:
    result = entry.given or entry.result
    text = result.plain_text
    if (why := _by_runtime(result, text)) is not None:
        yield "by_runtime", why
    if entry.raised is not None:
        yield "raised_text", text.removeprefix(_RAISED[entry.raised])
    if any(decided.get("decision") == "failed" for decided in entry.decisions):
        found = re.search(r"^The call was not run: .* raised (\w+): (.*)", text, re.DOTALL)
        if found is not None:
            yield "hook_raised", (found[1], found[2])


def _by_runtime(result: ToolResult, text: str) -> RuntimeResult | None:
    details: Any = result.details if isinstance(result.details, dict) else {}
    kind, reason = str(details.get("kind")).removeprefix("tool_call_"), details.get("reason")
    still_running = details.get("still_running") is True
    if kind in ("not_executed", "stopped", "uncertain") and isinstance(reason, str):
        return RuntimeResult(kind, reason, still_running)  # type: ignore[arg-type]
    if text.startswith("The call was stopped because another call of the same batch failed."):
        return RuntimeResult("stopped", "sibling", still_running)
    if text.startswith("The call was not run: an earlier call of the same batch failed."):
        return RuntimeResult("not_executed", "sibling")
    if text.startswith("The result was withheld: the run was stopped before"):
        return RuntimeResult("unchecked")
    return None
