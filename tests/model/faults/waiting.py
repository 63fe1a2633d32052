"""Faults of runs that wait: suspension, requests and decisions."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

import clark_agent as ca
from clark_agent import run_log as logs
from clark_agent.run_log.records import Record, RequestDecided
from tests.model.faults.base import Fault, breaks, change_records

SUSPENDING = "tests/run_log/test_suspending.py::{}"
APPROVAL = "tests/toolkit/test_approval.py::{}"


# --- suspension -------------------------------------------------------------------------------


@breaks(
    "a call that waits is run",
    SUSPENDING.format("test_a_call_that_waits_passes_no_hook_has_no_vote_and_stops_no_sibling"),
)
def _(fault: Fault) -> None:
    def allowed(decision: Any) -> Any:
        if not isinstance(decision, ca.Suspend):
            return decision
        fault.fired += 1
        return None

    async def when_done(decision: Any) -> Any:
        return allowed(await decision)

    def change(hook_of: Any) -> Any:
        def unheeded(plugin: Any, method: str) -> Any:
            hook = hook_of(plugin, method)
            if method != "on_before_tool_call":
                return hook
            if hook.is_async:
                return replace(hook, call=lambda *args: when_done(hook.call(*args)))
            return replace(hook, call=lambda *args: allowed(hook.call(*args)))

        return unheeded

    fault.wrap("hook", change)


@breaks(
    "a suspended run says that it is done",
    SUSPENDING.format("test_the_result_says_what_waits_as_json"),
)
def _(fault: Fault) -> None:
    def change(field: Any) -> Any:
        def done(result: ca.RunResult) -> ca.LoopOutcome:
            outcome: ca.LoopOutcome = field.__get__(result)
            if outcome is not ca.LoopOutcome.SUSPENDED:
                return outcome
            fault.fired += 1
            return ca.LoopOutcome.DONE

        return property(done)

    fault.wrap("a result says how the run ended", change)


# --- decisions --------------------------------------------------------------------------------


@breaks("the last decision counts", SUSPENDING.format("test_the_first_decision_counts"))
def _(fault: Fault) -> None:
    """The earlier decision is taken out of the log, if it is the last record."""

    def change(decide: Any) -> Any:
        async def decide_again(store: Any, run_id: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return await decide(store, run_id, *args, **kwargs)
            except logs.AlreadyDecided:
                *earlier, last = store.load(run_id).records
                if not isinstance(last.entry, RequestDecided):
                    raise
                fault.fired += 1
                store.cut(run_id, len(earlier))
                return await decide(store, run_id, *args, **kwargs)

        return decide_again

    fault.wrap("decision", change)


def allow_instead(fault: Fault, kind: type) -> None:
    """Have resumed runs read `Allow` for decisions of this kind."""

    def change(record: Record) -> Record:
        entry = record.entry
        if not isinstance(entry, RequestDecided) or not isinstance(entry.decision, kind):
            return record
        return replace(record, entry=replace(entry, decision=logs.Allow()))

    change_records(fault, lambda records: map(change, records))


@breaks("a denied call is run", SUSPENDING.format("test_a_denial_holds_even_if_the_gate_is_gone"))
def _(fault: Fault) -> None:
    allow_instead(fault, logs.Deny)


@breaks(
    "the changed arguments are not the ones that run",
    SUSPENDING.format("test_arguments_that_do_not_fit_are_an_error_result"),
)
def _(fault: Fault) -> None:
    allow_instead(fault, logs.GiveArguments)


@breaks(
    "a permission is for any arguments",
    SUSPENDING.format("test_a_request_about_other_arguments_is_another_request"),
)
def _(fault: Fault) -> None:
    def change(request_id_of: Any) -> Any:
        def of_any(key: str, asked_by: str, tool_name: str, arguments: Any) -> Any:
            fault.fired += 1
            return request_id_of(key, asked_by, tool_name, None)

        return of_any

    fault.wrap("request id", change)


@breaks(
    "a decision counts after the time is over",
    SUSPENDING.format("test_expiry_is_recorded_and_is_a_refusal_that_says_so"),
)
def _(fault: Fault) -> None:
    def change(overdue: Any) -> Any:
        def never(self: logs.WaitingRequest, now_ms: int) -> None:
            fault.fired += overdue(self, now_ms) is not None

        return never

    fault.wrap("time of a request", change)


@breaks(
    "an event that is delivered twice counts twice",
    "tests/run_log/test_stores.py::test_a_store_in_memory_keeps_the_rules",
)
def _(fault: Fault) -> None:
    def change(post: Any) -> Any:
        def post_again(self: logs.MemoryStore, run_id: str, mail: logs.Mail) -> Any:
            if post(self, run_id, mail):
                return True
            fault.fired += 1
            return post(self, run_id, replace(mail, id=f"{mail.id}, delivered again"))

        return post_again

    fault.wrap("store puts into a mailbox", change)


# --- approvals --------------------------------------------------------------------------------


@breaks(
    "a call is changed after a person has approved it",
    APPROVAL.format("test_what_is_asked_about_is_what_plugins_have_made_of_it"),
)
def _(fault: Fault) -> None:
    """The gate asks when it is its turn in the list of plugins."""

    def change(_: Any) -> Any:
        def is_interactive(gate: object) -> bool:
            fault.fired += 1
            return False

        return property(is_interactive)

    fault.wrap("gate comes last", change)


@breaks(
    "a person sees a part of the call",
    APPROVAL.format("test_a_long_call_has_its_arguments_below_each_other"),
)
def _(fault: Fault) -> None:
    def change(text: Any) -> Any:
        def part(request: Any) -> str:
            whole: str = text.__get__(request)
            fault.fired += len(whole) > 40
            return whole[:40]

        return property(part)

    fault.wrap("person sees a call", change)
