"""What a worker does for the workflow of a run."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from inspect import isawaitable
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from clark_agent.agent import Agent
from clark_agent.cancellation import LET_GO, CancellationToken
from clark_agent.durable._temporal.names import ADVANCE, CANCELLED, DECIDE, REMOTE, SEND, SETTLE
from clark_agent.durable._temporal.posting import post
from clark_agent.durable._temporal.remote import RemoteAgentTool
from clark_agent.durable._transfer import (
    carried_error,
    carried_result,
    fits,
    plain,
    restored_messages,
)
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
)
from clark_agent.messages.wire import decode_json, encode_json
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.run_log.advance import advance
from clark_agent.run_log.fold import fold
from clark_agent.run_log.recorded import recorded_end
from clark_agent.run_log.requests import decide
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog, store_of
from clark_agent.sub_agents import child_answer, child_failure
from clark_agent.tools import ToolResult
from clark_agent.waiting import AnyDecision, GiveResult, WaitingRequest

__all__ = ["Activities"]

_AT_ONCE = timedelta(milliseconds=10)
_BUSY = timedelta(seconds=1)


class Activities:
    """What a worker does for a workflow. Arguments and results are JSON."""

    def __init__(
        self, store: RunStore | RunLog, agents: dict[str, Agent[Any, Any]], deps: Any
    ) -> None:
        self._store = store
        self._agents = agents
        self._deps = deps

    @activity.defn(name=ADVANCE)
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

    @activity.defn(name=DECIDE)
    async def decide(self, given: dict[str, Any]) -> bool:
        """Record a decision. Returns whether the run can go on."""
        decision: AnyDecision = decode_json(encode_json(given["decision"]), AnyDecision)
        try:
            return not await decide(
                self._store, given["run_id"], given["request_id"], decision, by=given["by"]
            )
        except (RequestError, RunBusy, RunNotFound, DecodeError) as error:
            raise _failure(error, is_final=True) from error

    @activity.defn(name=SEND)
    async def send(self, given: dict[str, Any]) -> bool:
        """Put a message into the mailbox of a run. Returns whether it is new."""
        try:
            return await asyncio.to_thread(post, self._store, given)
        except (RunNotFound, InvalidContinuationError, DecodeError) as error:
            raise _failure(error, is_final=True) from error

    @activity.defn(name=SETTLE)
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
                token.cancel(CANCELLED if _is_cancelled_for_good() else LET_GO)
            if shutdown.done():
                waited_for.discard(shutdown)
                token.cancel(LET_GO)
    finally:
        shutdown.cancel()


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
            if isinstance(r.request, dict) and r.request.get("kind") == REMOTE
        ],
    }
