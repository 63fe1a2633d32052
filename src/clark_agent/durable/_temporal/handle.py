"""How a caller starts a run, and talks to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from hashlib import blake2b
from math import isfinite
from typing import Any, Generic, NoReturn, TypeVar

import msgspec
from msgspec.structs import replace
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
)
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, CancelledError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from clark_agent._ids import random_id
from clark_agent._typing import OutputT_co
from clark_agent.agent import Agent
from clark_agent.clock import now_ms
from clark_agent.durable._temporal.names import ADVANCE, CANCELLED, WORKFLOW, name_of
from clark_agent.durable._temporal.posting import post
from clark_agent.durable._transfer import (
    carried_messages,
    fits,
    plain,
    restored_error,
    restored_result,
)
from clark_agent.engine.arguments import prompt_messages
from clark_agent.errors import (
    ClarkAgentError,
    ConfigError,
    InvalidContinuationError,
    LoopError,
    RequestNotFound,
    RunAborted,
    RunBusy,
    RunExists,
    RunLetGo,
    RunNotFound,
)
from clark_agent.messages.wire import decode_json, encode_json
from clark_agent.result import RunResult
from clark_agent.run_log.follow import FollowedEvent, follow
from clark_agent.run_log.recorded import recorded_end
from clark_agent.run_log.requests import decide, waiting_for
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog
from clark_agent.running import Prompts
from clark_agent.steering import SteerWhen, When, message_from
from clark_agent.types import AgentMessage
from clark_agent.waiting import Decision, WaitingRequest

__all__ = ["RunHandle", "handle", "start"]

_O = TypeVar("_O")

_MEMO = "clark_agent"


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
            WORKFLOW,
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
    name_of(agent)
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
            error = RunAborted(CANCELLED)
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
                return await asyncio.to_thread(post, self._store, posted)
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
            if pending.activity_type.name == ADVANCE and pending.HasField("last_failure"):
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
