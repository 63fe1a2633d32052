"""Runs in Temporal: workers on any machine, and a handle to each run.

A worker:

    worker = Worker(client, task_queue="agents", plugins=[ClarkPlugin(store, agents=[support])])

A caller, such as a web server:

    run = await start(client, support, "Refund order 7", id="order-7", task_queue="agents")
    result = await run.result()

A run is a workflow with the same id. The workflow has one activity, which calls
`clark_agent.run_log.advance`. The log is the journal, so the history of the workflow stays small,
whatever the run does, and a deploy may change agents in the middle of runs. While the run is
suspended, no activity runs: the workflow waits for a decision, an event or a time.

- If a worker dies, the run is resumed by another one, when the heartbeat timeout is over.
- If a worker is shut down (``Worker.shutdown``, which a host calls on SIGTERM), it lets its runs
  go, and others resume them at once. A frozen worker that goes on too late lets its runs go too.
- A run that has failed is not repeated. What another deploy or a database that comes back can cure
  (an agent or a tool is missing, the store cannot be reached) is tried again for ever, at most once
  a minute. `RunHandle.problem` says what is wrong.
- If a workflow is cancelled, its run is aborted. If it is terminated, its run is left as it is, and
  goes on when it is started again.

A decision that was recorded with `clark_agent.run_log.decide`, without a handle, is found when the
workflow polls: after a minute, then after two, four, … up to an hour. `RunHandle.wake`, or the
signal ``wake`` to the workflow, makes it look at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from inspect import isawaitable
from math import isfinite
from typing import Any, Generic, NoReturn, TypeVar

import msgspec
from msgspec.structs import replace

from clark_agent._extras import load_extra
from clark_agent._ids import random_id
from clark_agent._typing import OutputT_co
from clark_agent.agent import Agent
from clark_agent.cancellation import LET_GO, CancellationToken
from clark_agent.clock import now_ms
from clark_agent.durable._transfer import (
    carried_error,
    carried_messages,
    carried_result,
    fits,
    plain,
    restored_error,
    restored_messages,
    restored_result,
)
from clark_agent.engine.arguments import prompt_messages
from clark_agent.errors import (
    AlreadyDecided,
    ClarkAgentError,
    ConfigError,
    DecodeError,
    InvalidContinuationError,
    LoopError,
    RequestError,
    RequestExpired,
    RequestNotFound,
    RunAborted,
    RunBusy,
    RunExists,
    RunLetGo,
    RunLogError,
    RunNotFound,
    ToolSuspended,
)
from clark_agent.messages.wire import decode_json, encode_json
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.run_log import mailbox
from clark_agent.run_log.advance import advance
from clark_agent.run_log.fold import fold
from clark_agent.run_log.follow import FollowedEvent, follow
from clark_agent.run_log.recorded import recorded_end
from clark_agent.run_log.requests import decide, waiting_for
from clark_agent.run_log.resume import config_with_log
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog, store_of
from clark_agent.running import Prompts
from clark_agent.steering import SteerWhen, When, message_from
from clark_agent.sub_agents import child_answer, child_failure
from clark_agent.tools import FunctionTool, ToolContext, ToolResult
from clark_agent.types import AgentMessage
from clark_agent.waiting import AnyDecision, Decision, GiveResult, WaitingRequest

load_extra("temporalio", "temporal", "clark_agent.durable.temporal")

from temporalio import activity, workflow  # noqa: E402
from temporalio.client import (  # noqa: E402
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
)
from temporalio.common import (  # noqa: E402
    RetryPolicy,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import (  # noqa: E402
    ActivityError,
    ApplicationError,
    ApplicationErrorCategory,
    CancelledError,
    ChildWorkflowError,
    WorkflowAlreadyStartedError,
)
from temporalio.plugin import SimplePlugin  # noqa: E402
from temporalio.service import RPCError, RPCStatusCode  # noqa: E402

__all__ = [
    "ClarkPlugin",
    "ClarkRun",
    "RemoteAgentTool",
    "RunHandle",
    "handle",
    "remote_agent_tool",
    "start",
]

_O = TypeVar("_O")

_WORKFLOW = "ClarkRun"
_ADVANCE = "clark_agent_advance"
_DECIDE = "clark_agent_decide"
_SEND = "clark_agent_send"
_SETTLE = "clark_agent_settle"

_MEMO = "clark_agent"
_REMOTE = "temporal_agent"
"""The kind of request that waits for a run on another task queue."""
_LONGEST_RUN = timedelta(days=3650)
_LONGEST_POLL = 3600.0
_SHORT = timedelta(minutes=1)
_AT_ONCE = timedelta(milliseconds=10)
_BUSY = timedelta(seconds=1)


# --- the worker -----------------------------------------------------------------------------------


class ClarkPlugin(SimplePlugin):
    """Makes a Temporal worker run agents, which are found by their names.

    ``deps`` are the dependencies of the tools, or a function, plain or async, of the id of the run
    that returns them. All workers of a task queue use the same store.

    A worker needs a slot for each run that it works on (``max_concurrent_activities``), and none
    for those that are suspended. A tool that blocks the event loop for longer than the heartbeat
    timeout loses its run.

    Raises `ConfigError` if an agent has no name, two have the same, or one logs to another store.
    """

    def __init__(
        self,
        store: RunStore | RunLog,
        agents: Iterable[Agent[Any, Any]],
        *,
        deps: Any = None,
    ) -> None:
        found: dict[str, Agent[Any, Any]] = {}
        for agent in agents:
            name = _name_of(agent)
            if name in found:
                raise ConfigError(f"two agents have the name {name!r}: give each its own name")
            config_with_log(agent.config, store)
            found[name] = agent
        made = _Activities(store, found, deps)
        super().__init__(
            "clark_agent.ClarkPlugin",
            workflows=[ClarkRun],
            activities=[made.advance, made.decide, made.send, made.settle],
        )


def _name_of(agent: Any) -> str:
    if not isinstance(agent, Agent):
        raise ConfigError(f"an Agent is needed, not {type(agent).__name__}")
    if agent.name is None:
        raise ConfigError("the agent has no name, and workers find agents by it: Agent(name=...)")
    return agent.name


class _Activities:
    """What a worker does for a workflow. Arguments and results are JSON."""

    def __init__(
        self, store: RunStore | RunLog, agents: dict[str, Agent[Any, Any]], deps: Any
    ) -> None:
        self._store = store
        self._agents = agents
        self._deps = deps

    @activity.defn(name=_ADVANCE)
    async def advance(self, given: dict[str, Any]) -> dict[str, Any]:
        """Begin or continue a run until it ends or is suspended."""
        token = CancellationToken()
        run = asyncio.create_task(self._advance(given, token))
        await _keep_alive(run, token)
        try:
            return run.result()
        except (LoopError, RunBusy, RunExists, RunNotFound, DecodeError) as error:
            raise _failure(error) from error

    async def _advance(self, given: dict[str, Any], token: CancellationToken) -> dict[str, Any]:
        run_id, agent = given["run_id"], self._agent(given["agent"])
        prompts = None if given["prompts"] is None else restored_messages(given["prompts"])
        deps = self._deps(run_id) if callable(self._deps) else self._deps
        if isawaitable(deps):
            deps = await deps
        result = await advance(self._store, run_id, agent, prompts, token, deps=deps)
        if result.outcome is LoopOutcome.SUSPENDED:
            return _suspended(result.waiting, agent.config.clock.now_ms())
        folded = fold(await asyncio.to_thread(store_of(self._store).load, run_id))
        return {"ended": carried_result(result, folded, agent.config)}

    @activity.defn(name=_DECIDE)
    async def decide(self, given: dict[str, Any]) -> bool:
        """Record a decision. Returns whether the run can go on."""
        decision: AnyDecision = decode_json(encode_json(given["decision"]), AnyDecision)
        try:
            return not await decide(
                self._store, given["run_id"], given["request_id"], decision, by=given["by"]
            )
        except (RequestError, RunBusy, RunNotFound, DecodeError) as error:
            raise _failure(error, is_final=True) from error

    @activity.defn(name=_SEND)
    async def send(self, given: dict[str, Any]) -> bool:
        """Put a message into the mailbox of a run. Returns whether it is new."""
        try:
            return await asyncio.to_thread(_post, self._store, given)
        except (RunNotFound, InvalidContinuationError, DecodeError) as error:
            raise _failure(error, is_final=True) from error

    @activity.defn(name=_SETTLE)
    async def settle(self, given: dict[str, Any]) -> dict[str, bool]:
        """Give a call the result of the run on another task queue that it waits for."""
        agent = self._remote(given["agent"])
        result: ToolResult | None = None
        with suppress(RunNotFound):
            _, ended = await asyncio.to_thread(
                recorded_end, self._store, given["child"], agent.config
            )
            if isinstance(ended, RunResult):
                result = child_answer(ended)
            elif ended is not None:
                result = child_failure(ended)
        if result is None and given["failure"] is None:
            return {"is_settled": False, "is_ready": False}
        if result is None:
            result = ToolResult.error(f"The agent did not end well: {given['failure']}")
        decision, by = GiveResult(result), given["child"]
        try:
            still = await decide(self._store, given["run_id"], given["request"], decision, by=by)
        except (AlreadyDecided, RequestExpired, RequestNotFound):
            return {"is_settled": True, "is_ready": True}
        return {"is_settled": True, "is_ready": not still}

    def _agent(self, name: str) -> Agent[Any, Any]:
        agent = self._agents.get(name)
        if agent is None:
            known = ", ".join(sorted(self._agents)) or "none"
            raise ConfigError(
                f"this worker has no agent {name!r} (it has {known}): add it to "
                "ClarkPlugin(agents=...), or use another task queue"
            )
        return agent

    def _remote(self, name: str) -> Agent[Any, Any]:
        """Return an agent that runs on another task queue."""
        for agent in self._agents.values():
            for each in agent.config.registry.values():
                if isinstance(each, RemoteAgentTool) and each.agent.name == name:
                    return each.agent
        return self._agent(name)


async def _keep_alive(run: asyncio.Task[Any], token: CancellationToken) -> None:
    """Wait for a run and send heartbeats. If the activity is to stop, the run is aborted if the
    workflow says so, and otherwise let go: then this worker shuts down, or has lost the run.
    """
    timeout = activity.info().heartbeat_timeout or timedelta(seconds=15)
    shutdown = asyncio.create_task(activity.wait_for_worker_shutdown())
    waited_for: set[asyncio.Task[Any]] = {run, shutdown}
    try:
        while not run.done():
            activity.heartbeat()
            try:
                await asyncio.wait(
                    waited_for,
                    timeout=timeout.total_seconds() / 5,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            except asyncio.CancelledError:
                token.cancel(_CANCELLED if _is_cancelled_for_good() else LET_GO)
            if shutdown.done():
                waited_for.discard(shutdown)
                token.cancel(LET_GO)
    finally:
        shutdown.cancel()


_CANCELLED = "the workflow was cancelled"


def _is_cancelled_for_good() -> bool:
    details = activity.cancellation_details()
    return (
        details is not None
        and details.cancel_requested
        and not (details.timed_out or details.not_found or details.worker_shutdown)
    )


def _failure(error: ClarkAgentError, *, is_final: bool | None = None) -> ApplicationError:
    """Return what Temporal gets for an error, and whether it may repeat the activity."""
    delay: timedelta | None = None
    if isinstance(error, RunLetGo):
        delay = _AT_ONCE
    elif isinstance(error, RunBusy):
        delay = _BUSY
    if is_final is None:
        is_final = not isinstance(error, (RunLetGo, RunBusy, RunLogError))
    is_usual = isinstance(error, (RunLetGo, RunAborted)) or not isinstance(error, LoopError)
    kinds = ApplicationErrorCategory  # what is usual is not a warning in the log of the worker
    category = kinds.BENIGN if is_usual else kinds.UNSPECIFIED
    carried = carried_error(error)
    return ApplicationError(
        carried["text"][:10_000],
        carried,
        type=type(error).__name__,
        non_retryable=is_final,
        next_retry_delay=delay,
        category=category,
    )


def _suspended(waiting: tuple[WaitingRequest, ...], now: int) -> dict[str, Any]:
    """Return what the workflow needs to know about a run that waits."""
    times = [at for r in waiting for at in (r.expires_at, r.until) if at is not None]
    return {
        # Not the time itself: the clocks of workers and of the server may differ.
        "due_in": max(0, min(times) - now) / 1000 if times else None,
        "waiting": plain(waiting) if fits(waiting) else None,
        "children": [
            {**r.request, "request": r.request_id, "child": r.request_id.rpartition("/")[0]}
            for r in waiting
            if isinstance(r.request, dict) and r.request.get("kind") == _REMOTE
        ],
    }


def _post(store: RunStore | RunLog, given: dict[str, Any]) -> bool:
    run_id, mail_id = given["run_id"], given["id"]
    match given["kind"]:
        case "steer":
            (message,) = restored_messages([given["message"]])
            return mailbox.steer(store, run_id, message, given["when"], id=mail_id)
        case "follow_up":
            (message,) = restored_messages([given["message"]])
            return mailbox.follow_up(store, run_id, message, id=mail_id)
        case "cancel":
            return mailbox.cancel(store, run_id, given["reason"], id=mail_id)
        case _:
            return mailbox.deliver(store, run_id, given["name"], given["payload"], id=mail_id)


# --- the workflow ---------------------------------------------------------------------------------

# Workflows that wait for weeks are replayed with newer versions of this code. A change to the order
# of activities, timers and child workflows needs `workflow.patched`.


@workflow.defn(name=_WORKFLOW, sandboxed=False)
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
            _ADVANCE,
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
            await _act(_SEND, {"kind": "cancel", "reason": _CANCELLED, "id": f"cancel {run}"})
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
                _WORKFLOW,
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
            settled = await _act(_SETTLE, {**asked, "failure": failure}, limit=None)
            if settled["is_settled"]:
                break
            await workflow.sleep(5)
        self._is_awake = self._is_awake or settled["is_ready"]

    # --- messages ---------------------------------------------------------------------------------

    @workflow.update(name="decide")
    async def decide(self, given: dict[str, Any]) -> None:
        """Record a decision."""
        try:
            is_ready = await _act(_DECIDE, given)
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
                is_new = bool(await _act(_SEND, given))
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


# --- callers --------------------------------------------------------------------------------------


async def start(
    client: Client,
    agent: Agent[_O, Any],
    prompts: Prompts,
    *,
    id: str,  # noqa: A002
    task_queue: str,
    store: RunStore | RunLog | None = None,
    heartbeat: float = 15.0,
    poll: float | None = 60.0,
) -> RunHandle[_O]:
    """Start a run and return a handle to it. ``id`` is the id of the run and of its workflow.

    Starting a run again returns a handle to the first one, also if that has ended or failed. Only a
    workflow that was terminated, or ran out of the time that the server allows, is started anew:
    then the run goes on. Raises `RunExists` if the id belongs to a run of another agent, or with
    other prompts.

    ``store`` is for the handle, see `RunHandle`. A worker that sends nothing for ``heartbeat``
    seconds has lost the run. A suspended run looks for decisions that were made without a handle
    after ``poll`` seconds, then after twice as long, up to an hour; None: never.
    """
    _check_seconds("heartbeat", heartbeat)
    if poll is not None:
        _check_seconds("poll", poll)
    run = handle(client, agent, id, store=store)
    messages = prompt_messages(prompts, agent.config)
    given = {
        "agent": agent.name,
        "prompts": carried_messages(messages),
        "heartbeat": heartbeat,
        "poll": poll,
    }
    if not fits(given, 2_000_000):
        raise ConfigError("the prompts are too large for Temporal, which allows 2 MB")
    memo = {"agent": agent.name, "prompts": _digest(messages)}

    async def begin(reuse: WorkflowIDReusePolicy, conflict: WorkflowIDConflictPolicy) -> None:
        await client.start_workflow(
            _WORKFLOW,
            given,
            id=id,
            task_queue=task_queue,
            id_reuse_policy=reuse,
            id_conflict_policy=conflict,
            memo={_MEMO: memo},
            static_summary=f"{agent.name}: a run of clark-agent",
        )

    try:
        await begin(WorkflowIDReusePolicy.REJECT_DUPLICATE, WorkflowIDConflictPolicy.FAIL)
    except WorkflowAlreadyStartedError:
        found = await run.workflow.describe()
        if await found.memo_value(_MEMO, None) != memo:
            raise RunExists(
                id, f"run {id!r} already exists, of another agent or with other prompts"
            ) from None
        if found.status in (WorkflowExecutionStatus.TERMINATED, WorkflowExecutionStatus.TIMED_OUT):
            await begin(
                WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
                WorkflowIDConflictPolicy.USE_EXISTING,
            )
    return run


def _check_seconds(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be more than 0 seconds, not {value!r}")


def _digest(messages: Iterable[AgentMessage]) -> str:
    """Return what is equal for equal prompts, whenever they were made."""
    timeless = [plain(replace(message, timestamp=None)) for message in messages]
    text = msgspec.json.encode(timeless, order="deterministic")
    return blake2b(text, digest_size=16).hexdigest()


def handle(
    client: Client,
    agent: Agent[_O, Any],
    id: str,  # noqa: A002
    *,
    store: RunStore | RunLog | None = None,
) -> RunHandle[_O]:
    """Return a handle to a run that was started with `start`, in this or another process."""
    _name_of(agent)
    if not id:
        raise ConfigError(f"a run needs an id, not {id!r}")
    return RunHandle(client, agent, id, store)


class RunHandle(Generic[OutputT_co]):
    """A run in Temporal. Any process with a client can have one; see `start` and `handle`.

    Messages and decisions go through the workflow, so a worker must be running. Without a
    ``store``, the result goes through Temporal too. With one, the handle reads the log: the result
    has all messages, `waiting` sees decisions that were made without a handle, and `events` can be
    followed.

    Temporal takes at most 2,000 messages and decisions while a run is not suspended. A caller that
    sends more uses the functions of `clark_agent.run_log` with the store, and `wake`.

    Every method raises `RunNotFound` if the workflow does not exist.
    """

    def __init__(
        self,
        client: Client,
        agent: Agent[OutputT_co, Any],
        run_id: str,
        store: RunStore | RunLog | None = None,
    ) -> None:
        self.id = run_id
        self._agent = agent
        self._store = store
        self.workflow: WorkflowHandle[Any, Any] = client.get_workflow_handle(run_id)
        """Temporal's own handle."""

    def __repr__(self) -> str:
        return f"<RunHandle {self.id}>"

    async def result(self) -> RunResult[OutputT_co]:
        """Wait until the run has ended, and return its result. While it is suspended, this waits.

        Without a store, the only message of the result is the model's last text, and a result of
        more than a megabyte raises `ConfigError`: it is in the store. Raises the `LoopError` that
        ended the run (without a store, it has no messages), `RunAborted` if the workflow was
        cancelled, and Temporal's ``WorkflowFailureError`` if it was terminated.
        """
        try:
            carried = await self.workflow.result()
        except WorkflowFailureError as failure:
            raise await self._error_of(failure) from failure
        except RPCError as error:
            raise _not_found(error, self.id) from error
        if self._store is not None:
            ended = await self._recorded(self._store)
            if isinstance(ended, RunResult):
                return ended
        return restored_result(carried, self.id, self._agent.config)

    async def _error_of(self, failure: WorkflowFailureError) -> Exception:
        error: Exception | None
        if isinstance(failure.cause, CancelledError):
            error = RunAborted(_CANCELLED)
        else:
            error = _restored(failure.cause)
        if isinstance(error, LoopError) and self._store is not None:
            with suppress(RunNotFound):
                recorded = await self._recorded(self._store)
                if isinstance(recorded, LoopError):
                    for name in ("messages", "partial", "usage", "tree_usage", "undelivered"):
                        setattr(error, name, getattr(recorded, name))
        return failure if error is None else error

    async def _recorded(self, store: RunStore | RunLog) -> RunResult[Any] | LoopError | None:
        _, ended = await asyncio.to_thread(recorded_end, store, self.id, self._agent.config)
        return ended

    # --- messages ---------------------------------------------------------------------------------

    async def steer(
        self,
        message: AgentMessage | str,
        when: When = SteerWhen.AFTER_BATCH,
        *,
        id: str | None = None,  # noqa: A002
    ) -> bool:
        """Send a message to the model; see `clark_agent.run_log.steer`."""
        if when not in tuple(SteerWhen):
            raise ValueError(f"when must be one of {', '.join(SteerWhen)}, not {when!r}")
        sent = plain(message_from(message))
        return await self._send(id, {"kind": "steer", "message": sent, "when": str(when)})

    async def follow_up(
        self,
        message: AgentMessage | str,
        *,
        id: str | None = None,  # noqa: A002
    ) -> bool:
        """Start the agent again with a message, after it has stopped by itself; see
        `clark_agent.run_log.follow_up`.
        """
        return await self._send(id, {"kind": "follow_up", "message": plain(message_from(message))})

    async def cancel(
        self,
        reason: str | None = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> bool:
        """Abort the run, also while it is suspended: it ends with `RunAborted` and this reason."""
        return await self._send(id, {"kind": "cancel", "reason": reason})

    async def deliver(
        self,
        name: str,
        payload: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> bool:
        """Send an event, and continue the run if it waits for it; see
        `clark_agent.run_log.deliver`.
        """
        if not name:
            raise ValueError("an event needs a name")
        return await self._send(id, {"kind": "event", "name": name, "payload": plain(payload)})

    async def _send(self, mail_id: str | None, given: dict[str, Any]) -> bool:
        """Send a message and return whether it is new; False for an id that was sent before.

        Raises `InvalidContinuationError` if the run has ended.
        """
        given["id"] = random_id() if mail_id is None else mail_id
        try:
            return bool(await self._update("send", given))
        except _HasEnded:
            if self._store is not None:
                posted = {**given, "run_id": self.id}
                return await asyncio.to_thread(_post, self._store, posted)
            raise InvalidContinuationError(f"the run {self.id!r} has ended") from None

    # --- decisions --------------------------------------------------------------------------------

    async def waiting(self) -> tuple[WaitingRequest, ...]:
        """Return the open requests of the run and its child runs.

        Without a store, they are those that the workflow knows of, and if they are more than a
        megabyte, this raises `ConfigError`.
        """
        if self._store is not None:
            try:
                return tuple(await asyncio.to_thread(waiting_for, self._store, self.id))
            except RunNotFound:
                return ()
        try:
            known = await self.workflow.query("waiting")
        except RPCError as error:
            raise _not_found(error, self.id) from error
        if known is None:
            raise ConfigError(
                f"the requests of the run {self.id!r} are too large to be carried by the engine: "
                "give this handle the store too (store=...)"
            )
        requests: tuple[WaitingRequest, ...] = decode_json(
            encode_json(known), tuple[WaitingRequest, ...]
        )
        now = now_ms()
        return tuple([request for request in requests if request.overdue(now) is None])

    async def decide(self, request_id: str, decision: Decision, *, by: str | None = None) -> None:
        """Record a decision and who made it, and continue the run if nothing else is open.

        Raises what `clark_agent.run_log.decide` raises. If the run has ended meanwhile and the
        handle has no store, that is always `RequestNotFound`.
        """
        if not isinstance(decision, Decision):
            raise TypeError(f"a decision is Allow(), Deny(...), …, not {decision!r}")
        given = {"request_id": request_id, "decision": plain(decision), "by": by}
        try:
            await self._update("decide", given)
        except _HasEnded:
            if self._store is None:
                raise RequestNotFound(request_id, self.id) from None
            await decide(self._store, self.id, request_id, decision, by=by)

    async def wake(self) -> None:
        """Make the run look for decisions and events that were recorded without a handle."""
        try:
            await self.workflow.signal("wake")
        except RPCError as error:
            with suppress(_HasEnded):
                await self._raise(error)

    # --- what happens -----------------------------------------------------------------------------

    async def events(self, *, after: int | str | None = None) -> AsyncGenerator[FollowedEvent]:
        """The events of the run, those so far and those to come; see `clark_agent.run_log.follow`.

        Raises `ConfigError` if the handle has no store: the events are in the log.
        """
        if self._store is None:
            raise ConfigError(
                "the events of a run are in its log: give this handle the store (store=...)"
            )
        while True:
            try:
                async for event in follow(self._store, self.id, after=after):
                    yield event
                return
            except RunNotFound:  # no worker has begun it yet
                if (await self._describe()).status is not WorkflowExecutionStatus.RUNNING:
                    raise
                await asyncio.sleep(0.2)

    async def problem(self) -> str | None:
        """Return why the run does not go on although it is tried again and again: an agent or a
        tool is missing, or the store cannot be reached. None if all is well, or it has ended.
        """
        described = await self._describe()
        for pending in described.raw_description.pending_activities:
            if pending.activity_type.name == _ADVANCE and pending.HasField("last_failure"):
                kind = pending.last_failure.application_failure_info.type
                if kind not in (RunLetGo.__name__, RunBusy.__name__):
                    return f"{kind}: {pending.last_failure.message}".removeprefix(": ")
        return None

    # --- talking to Temporal ----------------------------------------------------------------------

    async def _update(self, name: str, given: dict[str, Any]) -> Any:
        try:
            return await self.workflow.execute_update(name, given)
        except WorkflowUpdateFailedError as failure:
            error = _restored(failure.cause)
            if error is None:
                raise
            raise error from failure
        except RPCError as error:
            await self._raise(error)

    async def _raise(self, error: RPCError) -> NoReturn:
        """Raise `_HasEnded` if the workflow has ended, or what the error means otherwise."""
        if error.status is RPCStatusCode.NOT_FOUND:
            status = (await self._describe()).status
            if status is not WorkflowExecutionStatus.RUNNING:
                raise _HasEnded from error
        raise error

    async def _describe(self) -> WorkflowExecutionDescription:
        try:
            return await self.workflow.describe()
        except RPCError as error:
            raise _not_found(error, self.id) from error


class _HasEnded(Exception):
    """The workflow has ended, and takes nothing any more."""


def _not_found(error: RPCError, run_id: str) -> Exception:
    return RunNotFound(run_id) if error.status is RPCStatusCode.NOT_FOUND else error


def _restored(cause: BaseException | None) -> ClarkAgentError | None:
    if isinstance(cause, ApplicationError) and cause.details:
        return restored_error(cause.type, cause.details[0])
    return None


# --- agents on other task queues ------------------------------------------------------------------


class RemoteAgentTool(FunctionTool[..., Any]):
    """See `remote_agent_tool`."""

    agent: Agent[Any, Any]


def remote_agent_tool(
    name: str,
    description: str,
    agent: Agent[Any, Any],
    *,
    task_queue: str,
    expires_in: float | None = None,
) -> RemoteAgentTool:
    """A tool that gives a task to an agent whose workers poll another task queue.

    The run of that agent is a workflow of its own, with the id ``run/turn/position`` of the call.
    The run that asks is suspended until it has ended, so it holds no worker. If the other run is
    suspended too, decide its requests with a handle to it. It has its own budget, and its tokens
    are in the details of the result, not in the ``tree_usage`` of the run that asks; if that is
    aborted, so is it. All workers use the same store.
    """
    agent_name = _name_of(agent)
    if not task_queue:
        raise ConfigError(f"remote_agent_tool: task_queue must be a text, not {task_queue!r}")

    async def ask(task: str, ctx: ToolContext) -> ToolResult:
        """Give a task to an agent.

        Args:
            task: What to do, with all that is needed to do it. Nothing else is known there.
        """
        raise ToolSuspended(
            {
                "kind": _REMOTE,
                "agent": agent_name,
                "task_queue": task_queue,
                "prompts": carried_messages(prompt_messages(task, agent.config)),
            },
            expires_in=expires_in,
        )

    made = RemoteAgentTool(ask, name=name, description=description)
    made.agent = agent
    made.idempotent = True
    return made
