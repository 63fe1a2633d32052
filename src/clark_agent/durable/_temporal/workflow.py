"""The workflow of a run.

Workflows that wait for weeks are replayed with newer versions of this code. A change to the order
of activities, timers and child workflows needs `workflow.patched`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    WorkflowAlreadyStartedError,
)

from clark_agent.durable._temporal.names import ADVANCE, CANCELLED, DECIDE, SEND, SETTLE, WORKFLOW
from clark_agent.errors import AlreadyDecided, InvalidContinuationError, RunAborted, RunNotFound
from clark_agent.messages.wire import decode_json, encode_json
from clark_agent.waiting import AnyDecision

__all__ = ["ClarkRun"]

_LONGEST_RUN = timedelta(days=3650)
_LONGEST_POLL = 3600.0
_SHORT = timedelta(minutes=1)


@workflow.defn(name=WORKFLOW, sandboxed=False)
class ClarkRun:
    """The workflow of a run: it continues the run whenever nothing holds it up. `start` starts it,
    and `RunHandle` talks to it.
    """

    @workflow.init
    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._poll: float | None = given["poll"]
        self._is_awake = False
        """Whether to continue the run at once."""
        self._is_cancelled = False
        self._waiting: list[Any] | None = []
        self._children: dict[str, asyncio.Task[None]] = {}

    @workflow.run
    async def run(self, given: dict[str, Any]) -> dict[str, Any]:
        """Continue the run until it has ended."""
        try:
            ended = await self._run(given)
        except ActivityError as error:
            await self._finish()
            if self._is_cancelled and _type_of(error) == RunAborted.__name__:
                raise asyncio.CancelledError from None
            _raise_cause(error)
        await self._finish()
        return ended

    async def _finish(self) -> None:
        """Let those finish who have sent something. Being cancelled now changes nothing."""
        self._waiting = []
        with suppress(asyncio.CancelledError):
            await workflow.wait_condition(workflow.all_handlers_finished)

    async def _run(self, given: dict[str, Any]) -> dict[str, Any]:
        prompts, pause = given["prompts"], self._poll
        while True:
            self._is_awake = False
            report = await self._advance(prompts)
            if report is None:  # cancelled before a worker had it
                continue
            if "ended" in report:
                ended: dict[str, Any] = report["ended"]
                return ended
            prompts = None  # the log has them
            self._waiting = report["waiting"]
            self._run_children(report["children"])
            due: float | None = report["due_in"]
            times = [each for each in (due, pause) if each is not None]
            try:
                if workflow.info().is_continue_as_new_suggested() and not self._children:
                    await workflow.wait_condition(workflow.all_handlers_finished)
                    workflow.continue_as_new({**given, "prompts": None})
                await workflow.wait_condition(
                    lambda: self._is_awake, timeout=min(times) + 0.02 if times else None
                )
                pause = self._poll
            except TimeoutError:
                if pause is not None and (due is None or pause < due):
                    pause = min(pause * 2, max(_LONGEST_POLL, pause))
            except asyncio.CancelledError:
                await self._abort()

    async def _advance(self, prompts: list[Any] | None) -> dict[str, Any] | None:
        """Run the activity. If the workflow is cancelled, the run is aborted; returns None if no
        worker had it just then.
        """
        running = workflow.start_activity(
            ADVANCE,
            {
                "run_id": workflow.info().workflow_id,
                "agent": self._given["agent"],
                "prompts": prompts,
            },
            result_type=dict[str, Any],
            start_to_close_timeout=_LONGEST_RUN,
            heartbeat_timeout=timedelta(seconds=self._given["heartbeat"]),
            retry_policy=RetryPolicy(maximum_interval=timedelta(minutes=1)),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        try:
            report: dict[str, Any] = await asyncio.shield(running)
        except asyncio.CancelledError:
            # The mailbox is faster than heartbeats are, and reaches a run that no worker has.
            await self._abort()
            running.cancel()
            try:
                report = await running
            except ActivityError as error:
                if isinstance(error.cause, ApplicationError) and error.cause.non_retryable:
                    raise
                return None
        return report

    async def _abort(self) -> None:
        """Cancel the run for good, as the workflow was."""
        self._is_cancelled = True
        run = workflow.info().run_id
        try:
            await _act(SEND, {"kind": "cancel", "reason": CANCELLED, "id": f"cancel {run}"})
        except ApplicationError as error:
            if error.type == RunNotFound.__name__:  # it has never begun
                raise asyncio.CancelledError from None
            if error.type != InvalidContinuationError.__name__:  # it has just ended
                raise

    # --- runs on other task queues ----------------------------------------------------------------

    def _run_children(self, asked: list[dict[str, Any]]) -> None:
        """Start the runs that calls wait for, and cancel those that no call waits for any more."""
        wanted = {each["request"]: each for each in asked}
        for request, task in list(self._children.items()):
            if request not in wanted:
                task.cancel()
                del self._children[request]
        for request, each in wanted.items():
            if request not in self._children:
                self._children[request] = asyncio.create_task(self._run_child(each))

    async def _run_child(self, asked: dict[str, Any]) -> None:
        failure: str | None = None
        try:
            await workflow.execute_child_workflow(
                WORKFLOW,
                {**self._given, "agent": asked["agent"], "prompts": asked["prompts"]},
                id=asked["child"],
                task_queue=asked["task_queue"],
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                cancellation_type=workflow.ChildWorkflowCancellationType.TRY_CANCEL,
            )
        except WorkflowAlreadyStartedError:
            pass  # by a workflow of this id that was terminated
        except ChildWorkflowError as error:
            failure = str(error.cause or error)
        while True:
            settled = await _act(SETTLE, {**asked, "failure": failure}, limit=None)
            if settled["is_settled"]:
                break
            await workflow.sleep(5)
        self._is_awake = self._is_awake or settled["is_ready"]

    # --- messages ---------------------------------------------------------------------------------

    @workflow.update(name="decide")
    async def decide(self, given: dict[str, Any]) -> None:
        """Record a decision."""
        try:
            is_ready = await _act(DECIDE, given)
        except ApplicationError as error:
            # Perhaps by this very update, in a worker that has died since.
            self._is_awake = self._is_awake or error.type == AlreadyDecided.__name__
            raise
        if self._waiting is not None:
            request = given["request_id"]
            self._waiting = [each for each in self._waiting if each["request_id"] != request]
        self._is_awake = self._is_awake or is_ready

    @decide.validator
    def _check_decision(self, given: dict[str, Any]) -> None:
        decode_json(encode_json(given["decision"]), AnyDecision)

    @workflow.update(name="send")
    async def send(self, given: dict[str, Any]) -> bool:
        """Put a message into the mailbox of the run."""
        pauses = [0.1, 0.3, 1, 3, 10, 30]
        is_new: bool | None = None
        while is_new is None:
            try:
                is_new = bool(await _act(SEND, given))
            except ApplicationError as error:
                if error.type != RunNotFound.__name__ or not pauses:
                    raise
                await workflow.sleep(pauses.pop(0))  # a worker will begin the run
        self._is_awake = self._is_awake or given["kind"] in ("cancel", "event")
        return is_new

    @workflow.signal(name="wake")
    def wake(self) -> None:
        """Look whether the run can go on."""
        self._is_awake = True

    @workflow.query(name="waiting")
    def waiting(self) -> list[Any] | None:
        """Return what the run waits for, as far as the workflow knows; None: it is too large."""
        return self._waiting


async def _act(name: str, given: dict[str, Any], *, limit: timedelta | None = _SHORT) -> Any:
    """Run a short activity, and raise what it raises. It is a local one: it needs no slot beside
    the runs of the worker, and little history.
    """
    try:
        return await workflow.execute_local_activity(
            name,
            {**given, "run_id": workflow.info().workflow_id},
            start_to_close_timeout=timedelta(seconds=30),
            schedule_to_close_timeout=limit,
            retry_policy=RetryPolicy(
                initial_interval=timedelta(milliseconds=100), maximum_interval=timedelta(minutes=1)
            ),
            local_retry_threshold=timedelta(seconds=2),
        )
    except ActivityError as error:
        _raise_cause(error)


def _type_of(error: ActivityError) -> str | None:
    return error.cause.type if isinstance(error.cause, ApplicationError) else None


def _raise_cause(error: ActivityError) -> NoReturn:
    """Raise what an activity has raised."""
    if isinstance(error.cause, ApplicationError):
        cause = error.cause
        raise ApplicationError(
            cause.message, *cause.details, type=cause.type, non_retryable=True
        ) from None
    raise error
