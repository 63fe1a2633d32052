"""Runs agents on DBOS: a queue, workers that fail over, timers, and fair shares for tenants, with
nothing but Postgres.

    store = PostgresStore(url)

    # a worker
    DBOS(config=dbos_config(store))
    worker = install(store, [support], queue="agents")
    DBOS.launch()

    # anywhere else, such as a web server
    runs = connect(store, queue="agents")
    runs.submit("order-7", "support", "Refund order 7", tenant="acme")
    await decide(store, run_id, request_id, Allow())  # the run goes on

DBOS delivers the id of a run to a worker, at least once, and the worker calls
`clark_agent.run_log.advance`. What has happened stands in the log of the run, and its lease lets
one worker at a time continue it. So the workflows of DBOS have no steps, and it does not matter if
one is executed twice.

A workflow ends when the run has ended or is suspended. A decision enqueues the next one, in the
transaction that records the decision; so there is never one without the other. Each wake-up is a
workflow of its own: two decisions about two child runs change nothing in the log of the outermost
run, and one of two equal ids would be lost. A wake-up that comes too early, or twice, does nothing.

Every worker shows that it lives, in a table in the schema of the store. A few times a minute one of
them takes up what others have left: workflows of workers that do not live any more, runs that
nobody works on, and suspended runs whose time has come.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec.structs import replace

from clark_agent._extras import load_extra
from clark_agent._ids import random_id
from clark_agent._text import describe, well_formed
from clark_agent.agent import Agent
from clark_agent.cancellation import LET_GO, CancellationToken
from clark_agent.clock import SystemClock
from clark_agent.config import LoopConfig
from clark_agent.durable._dbos_tables import (
    DBOS_SCHEMA,
    WORKFLOW,
    QueuedRun,
    Submitted,
    Tables,
    ids_of,
    postgres_of,
    run_of,
)
from clark_agent.durable._never_begun import record_abort
from clark_agent.engine.arguments import prompt_messages
from clark_agent.errors import ConfigError, DecodeError, RunBusy, RunExists, RunLetGo, RunNotFound
from clark_agent.messages.wire import decode_json, encode_json
from clark_agent.result import LoopOutcome, RunResult
from clark_agent.run_log.advance import advance
from clark_agent.run_log.fold import fold
from clark_agent.run_log.follow import follow
from clark_agent.run_log.fork import usage_of
from clark_agent.run_log.mailbox import cancel
from clark_agent.run_log.recorded import end_of, suspended_result
from clark_agent.run_log.records import RunFailed, RunSuspended
from clark_agent.run_log.requests import open_requests, waiting_for
from clark_agent.run_log.resume import config_with_log
from clark_agent.run_log.writer import RunLog
from clark_agent.running import Prompts
from clark_agent.types import AgentMessage

if TYPE_CHECKING:
    from dbos import DBOSConfig
    from psycopg import Connection

    from clark_agent.run_log.postgres import PostgresStore

__all__ = ["QueuedRun", "RunQueue", "Worker", "attach", "connect", "dbos_config", "install"]

logger = logging.getLogger(__name__)

_O = TypeVar("_O")
_D = TypeVar("_D")

_NO_TENANT = "default"
_ACTIVE = ["ENQUEUED", "DELAYED", "PENDING"]
_AT_ONCE = 100
"""How many runs are asked for with one statement."""
_LONGEST_DELAY = 600.0
"""The maximum number of seconds until a run is tried again that could not be worked on."""
_PATIENCE = 60.0
"""How many seconds to wait for the first record of a run that a worker has taken."""


def dbos_config(
    store: PostgresStore | RunLog,
    *,
    name: str = "clark-agent",
    version: str = "1",
    executor_id: str | None = None,
) -> DBOSConfig:
    """Return a config for ``DBOS(config=…)``: the database of the store, an executor id that no
    other process has, and a fixed version.

    DBOS leaves the workflows of one version to workers of that version, and by default each change
    of the code is another one. These workflows have no steps that could differ, so the version only
    has to change if agents of the new code must not continue runs of the old one.
    """
    made = executor_id or f"{socket.gethostname()}-{os.getpid()}-{random_id()[:8]}"
    return {
        "name": name,
        "system_database_url": _dbos_url(postgres_of(store)),
        "application_version": version,
        "executor_id": made,
    }


def connect(
    store: PostgresStore | RunLog, *, queue: str = "agents", dbos_schema: str = DBOS_SCHEMA
) -> RunQueue:
    """Return the queue, for a process that runs nothing. Sets ``store.on_wake``: from then on,
    decisions and events wake the runs that were submitted.

    Creates tables in the schema of the store, and those of DBOS, if they are missing. Raises
    `ConfigError` if the store is not a `PostgresStore` or the extra is not installed.
    """
    return RunQueue(store, queue, dbos_schema)


def attach(store: PostgresStore | RunLog, *, dbos_schema: str = DBOS_SCHEMA) -> bool:
    """Let decisions and events wake the runs of queues, like `connect`, if there are queues in this
    database. Return whether there are. Creates nothing.
    """
    postgres = postgres_of(store)
    tables = Tables(postgres, dbos_schema)
    if not tables.exist():
        return False
    postgres.on_wake = tables.on_wake
    return True


def install(
    store: PostgresStore | RunLog,
    agents: Sequence[Agent[Any, Any]],
    *,
    queue: str = "agents",
    concurrency: int = 10,
    per_tenant: int | None = None,
    per_tenant_total: int | None = None,
    poll: float = 0.5,
    sweep: float = 2.0,
    deps: Mapping[str, Any] | None = None,
    dbos_schema: str = DBOS_SCHEMA,
) -> Worker:
    """Make this process a worker of a queue. Call it before ``DBOS.launch()``.

    The limits and ``poll`` are settings of the queue, which the database keeps: those of the worker
    that was started last count for all.

    Args:
        store: Where the runs are logged. DBOS must use the same database: see `dbos_config`.
        agents: Those that runs are submitted for, by their names.
        queue: The name of the queue.
        concurrency: How many runs this worker has at once.
        per_tenant: How many of these may belong to one tenant; by default half of them. The others
            are there for other tenants, however much this one has submitted.
        per_tenant_total: How many runs of one tenant all workers together may have at once.
        poll: Seconds between two looks into the queue.
        sweep: Seconds between two sweeps of all workers together: for timers, and for runs of dead
            workers. A worker is dead if it has not been heard of for the ``lease`` of the store.
        deps: The dependencies of agents that need some, by the name of the agent.
        dbos_schema: The schema of the tables of DBOS, if it is not the default.

    Raises `ConfigError` for invalid settings, for agents without a name or with the same one, and
    for what `connect` rejects.
    """
    return Worker(
        store,
        agents,
        queue=queue,
        concurrency=concurrency,
        per_tenant=per_tenant,
        per_tenant_total=per_tenant_total,
        poll=poll,
        sweep=sweep,
        deps=deps or {},
        dbos_schema=dbos_schema,
    )


# --- the queue ------------------------------------------------------------------------------------


class RunQueue:
    """A queue of runs in a database. Made by `connect`."""

    def __init__(self, store: PostgresStore | RunLog, queue: str, dbos_schema: str) -> None:
        if not queue or queue.startswith("_dbos_"):
            raise ConfigError(f"invalid name of a queue: {queue!r}")
        self.queue = queue
        self._given, self._store = store, postgres_of(store)
        self._dbos: Any = load_extra("dbos", "dbos", "a queue of runs")
        self._tables = tables = Tables(self._store, dbos_schema)
        if not tables.has_dbos():
            self._dbos.DBOS.migrate(_dbos_url(self._store), schema=dbos_schema)
        if not tables.exist():
            tables.create()
        self._store.on_wake = tables.on_wake

    def submit(
        self,
        run_id: str,
        agent: Agent[Any, Any] | str,
        prompts: Prompts,
        *,
        tenant: str | None = None,
        connection: Connection[Any] | None = None,
    ) -> bool:
        """Submit a run. Return whether it is new: with the same agent and prompts, a second call
        has no effect.

        ``agent`` is an agent of the workers, or its name. Runs of different tenants do not wait for
        each other: see `install`. With ``connection``, the run is submitted in a transaction of the
        caller, and only if it commits.

        A plain function that writes to the database; in an async server, call it in a thread.
        Raises `RunExists` if there is a run with this id and another agent or other prompts.
        """
        name = agent if isinstance(agent, str) else _name_of(agent)
        for what, text in (("id of a run", run_id), ("name of an agent", name), ("tenant", tenant)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"the {what} must be a text, not {type(text).__name__}")
            if text is not None and (not text.strip() or "\0" in text):
                raise ConfigError(f"invalid {what}: {text!r}")
        wanted = Submitted(self.queue, name, tenant or _NO_TENANT, _encoded(prompts))
        has_begun = self._has_begun(run_id)
        if connection is not None:
            return self._submit(connection, run_id, wanted, has_begun)
        with self._tables.transaction() as own:
            return self._submit(own, run_id, wanted, has_begun)

    def _submit(
        self, connection: Connection[Any], run_id: str, wanted: Submitted, has_begun: bool
    ) -> bool:
        if not self._tables.submit(connection, run_id, wanted):
            found = self._tables.find(run_id, connection)
            if found is None or found.prompts != wanted.prompts:
                raise RunExists(run_id, f"run {run_id!r} already exists, with other prompts")
            if (found.agent, found.queue) != (wanted.agent, wanted.queue):
                text = f"run {run_id!r} already exists, for {found.agent!r} in {found.queue!r}"
                raise RunExists(run_id, text)
            return False
        if has_begun:
            raise RunExists(run_id, f"run {run_id!r} already exists, and was not submitted")
        return self._tables.enqueue(connection, run_id, "begin")

    def _has_begun(self, run_id: str) -> bool:
        try:
            self._store.tail(run_id).close()
        except RunNotFound:
            return False
        return True

    def queued(self) -> list[QueuedRun]:
        """Return the runs of the queue that were submitted and have not begun, the oldest first.

        They have no log yet, so the store does not list them.
        """
        return self._tables.queued(queue=self.queue)

    def cancel(self, run_id: str, reason: str | None = None) -> None:
        """Cancel a run in any state. It ends with `RunAborted` and this reason.

        A run that has not begun gets a log that says so, and never begins. Otherwise this is
        `clark_agent.run_log.cancel`. Like `submit`, it is a plain function that writes to the
        database. Raises `RunNotFound`, and `InvalidContinuationError` for a run that has ended.
        """
        until = time.monotonic() + _PATIENCE
        is_active = True
        while True:
            try:
                cancel(self._store, run_id, reason)
                return
            except RunNotFound:
                if self._abort(run_id, reason):
                    return
                if not is_active or time.monotonic() > until:
                    raise
            # If a worker has it, its first record comes soon. If not, it may be there by now.
            is_active = self._tables.is_active(run_id)
            time.sleep(0.02)

    def _abort(self, run_id: str, reason: str | None) -> bool:
        """End a run that has not begun. Return False if it has, or was not submitted."""
        row = self._tables.find(run_id)
        if row is None or not self._tables.queued(run_id=run_id):
            return False
        prompts = decode_json(row.prompts, list[AgentMessage])
        try:
            record_abort(self._store, run_id, prompts, reason and well_formed(reason))
        except RunExists:
            return False
        return True

    def wake(self, run_id: str) -> bool:
        """Let a worker look at a run again. Return False if it was never submitted.

        A decision and an event do this by themselves. It is harmless at any time.
        """
        with self._tables.transaction() as connection:
            return self._tables.wake(connection, run_id)

    async def result(self, run_id: str, agent: Agent[_O, _D]) -> RunResult[_O]:
        """Wait until a run has ended or is suspended, and return its result.

        Raises its error if it has failed, and `RunNotFound` if it was not submitted.
        """
        config, _ = config_with_log(agent.config, self._given)
        while True:
            last = await self._followed(run_id)
            found = await asyncio.to_thread(self._result, run_id, config)
            if isinstance(found, Exception):
                raise found
            if found is not None:
                return cast("RunResult[_O]", found)
            tail = self._store.tail(run_id, after=last)  # decided: it goes on soon
            try:
                while not tail.read():
                    await tail.wait(1.0)
            finally:
                tail.close()

    async def _followed(self, run_id: str) -> int:
        """Wait until a run has ended or is suspended. Return the number of the last event."""
        pause = 0.02
        while True:
            last = -1
            try:
                async with aclosing(follow(self._store, run_id, until_suspended=True)) as events:
                    async for each in events:
                        last = each.seq
                return last
            except RunNotFound:
                if await asyncio.to_thread(self._tables.find, run_id) is None:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _result(self, run_id: str, config: LoopConfig) -> RunResult | Exception | None:
        """Return how a run has ended or what it waits for; None if it waits for nothing."""
        folded = fold(self._store.load(run_id))
        found = end_of(self._store, folded, config)
        if found is not None or not isinstance(folded.ending, RunSuspended):
            return found
        waiting = open_requests(self._store, folded, config.clock.now_ms())
        if not waiting:
            return None
        return suspended_result(folded, usage_of(self._store, run_id), config, waiting)


# --- the worker -----------------------------------------------------------------------------------


class Worker(RunQueue):
    """A process that works on the runs of a queue. Made by `install`.

    The runs have an event loop of their own, in a thread, so that nothing else in the process stops
    them by accident.
    """

    def __init__(
        self,
        store: PostgresStore | RunLog,
        agents: Sequence[Agent[Any, Any]],
        *,
        queue: str,
        concurrency: int,
        per_tenant: int | None,
        per_tenant_total: int | None,
        poll: float,
        sweep: float,
        deps: Mapping[str, Any],
        dbos_schema: str,
    ) -> None:
        share = max(1, concurrency // 2) if per_tenant is None else per_tenant
        if per_tenant is None and per_tenant_total is not None:
            share = min(share, per_tenant_total)
        _check_limits(concurrency, share, per_tenant_total, poll, sweep)
        self._agents = _by_name(agents)
        for name, agent in self._agents.items():
            config_with_log(agent.config, store)
            agent.check_deps(deps.get(name))
        if unknown := sorted(set(deps) - self._agents.keys()):
            raise ConfigError(f"deps are for an agent that there is not: {', '.join(unknown)}")
        super().__init__(store, queue, dbos_schema)
        self._dbos_schema = dbos_schema
        self._deps = deps
        self._limits = {
            "worker_concurrency": concurrency,
            "partition_worker_concurrency": share,
            "partition_concurrency": per_tenant_total,
            "polling_interval_sec": poll,
        }
        self._sweep_every = sweep
        self._patience = float(self._store.lease)
        self._beat_every = min(sweep, self._patience / 3)
        self._executor_id = ""
        self._executed: dict[CancellationToken, str] = {}
        """The workflows that this worker executes, by the token of each."""
        self._unknown: set[str] = set()
        """Those that are said to be executed here, and were not when it was last checked."""
        self._failed_at = float("-inf")
        """When the database was last away: the others could not show that they live, either."""
        self._is_stopping = threading.Event()
        self._is_idle = threading.Condition()
        self._loop = asyncio.new_event_loop()
        for target, name in ((self._run_loop, "runs"), (self._watch, "watch")):
            threading.Thread(target=target, name=f"clark-agent-{name}", daemon=True).start()

        async def run(run_id: str, attempt: int) -> dict[str, Any]:
            return await self._deliver(run_id, attempt)

        self._dbos.DBOS.workflow(name=f"{WORKFLOW}{queue}", max_recovery_attempts=None)(run)

    def stop(self, grace: float = 30.0) -> None:
        """Let go of all runs, stop DBOS, and give the runs back to the queue, where other workers
        take them up at once. Call it on SIGTERM.

        A tool that has begun has the ``cancel_grace`` of its agent to end. If it takes longer than
        ``grace`` seconds in all, the run is taken up as if this process had died.
        """
        if self._is_stopping.is_set():
            return
        self._is_stopping.set()
        for token in list(self._executed):
            token.cancel(LET_GO)
        with self._is_idle:
            self._is_idle.wait_for(lambda: not self._executed, grace)
        self._dbos.DBOS.destroy()
        try:
            if self._executor_id:
                self._give_back()
        except Exception as error:  # the database is away: others notice that this worker is gone
            logger.warning("the runs cannot be given back: %s", _brief(error))
        self._loop.call_soon_threadsafe(self._loop.stop)

    # --- one run ---

    async def _deliver(self, run_id: str, attempt: int) -> dict[str, Any]:
        """The body of the workflow, on the event loop of DBOS."""
        token, workflow_id = CancellationToken(), str(self._dbos.DBOS.workflow_id)
        self._executed[token] = workflow_id
        work = self._work(run_id, attempt, workflow_id, token)
        waiting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        try:
            done = await asyncio.shield(waiting)
        except asyncio.CancelledError:  # DBOS stops; that must not abort the run
            token.cancel(LET_GO)
            await asyncio.wait([waiting])
            raise
        finally:
            with self._is_idle:
                del self._executed[token]
                self._is_idle.notify_all()
        if done is None:  # it stays as it is until DBOS stops here: then others take it up
            await asyncio.Event().wait()
            raise AssertionError
        return done

    async def _work(
        self, run_id: str, attempt: int, workflow_id: str, token: CancellationToken
    ) -> dict[str, Any] | None:
        """Work on a run until it ends or is suspended. Return None if it is let go."""
        logger.info("run %s: taken", run_id)
        began = time.monotonic()
        pause = 0.02
        while not (token.cancelled or self._is_stopping.is_set()):
            try:
                row = await asyncio.to_thread(self._tables.find, run_id)
                if (done := await self._advance(run_id, row, token)) is not None:
                    return done
            except RunLetGo:  # by this worker, or the lease was lost
                pass
            except RunBusy:
                # So long that it is neither a decision nor the lease of a dead worker.
                is_long = time.monotonic() - began > 2 * self._patience
                if is_long and not await self._is_responsible(run_id, workflow_id):
                    logger.info("run %s: left to another worker", run_id)
                    return _outcome(run_id, "busy")
            except RunExists as error:  # begun by others, with other prompts
                logger.error("run %s: rejected: %s", run_id, error)
                return _outcome(run_id, "rejected", error)
            except Exception as error:
                if (failure := await self._failure(run_id, error)) is not None:
                    logger.info("run %s: failed: %s", run_id, describe(error))
                    return failure
                if await self._postpone(run_id, attempt, error):
                    return _outcome(run_id, "postponed", error)
            await self._pause(pause, token)
            pause = min(2 * pause, self._patience / 3)
        logger.info("run %s: let go", run_id)
        return None

    async def _advance(
        self, run_id: str, row: Submitted | None, token: CancellationToken
    ) -> dict[str, Any] | None:
        """Return how far the run is; None if it is suspended, and waits for nothing any more."""
        agent = None if row is None else self._agents.get(row.agent)
        if row is None or agent is None:
            name = None if row is None else row.agent
            raise ConfigError(f"no agent {name!r} in this worker")
        prompts = decode_json(row.prompts, list[AgentMessage])
        deps = self._deps.get(row.agent)
        result = await advance(self._given, run_id, agent, prompts, token.child(), deps=deps)
        if result.outcome is not LoopOutcome.SUSPENDED:
            logger.info("run %s: ended (%s)", run_id, result.outcome)
            return _outcome(run_id, str(result.outcome))
        clock = agent.config.clock
        if not await asyncio.to_thread(waiting_for, self._store, run_id, clock=clock):
            return None  # it was decided meanwhile
        logger.info("run %s: suspended", run_id)
        return _outcome(run_id, str(result.outcome))

    async def _failure(self, run_id: str, error: Exception) -> dict[str, Any] | None:
        """Return the outcome if the log says that the run has failed."""
        try:
            folded = fold(await asyncio.to_thread(self._store.load, run_id))
        except Exception:  # not begun, damaged, or the database is away
            return None
        return _outcome(run_id, "failed", error) if isinstance(folded.ending, RunFailed) else None

    async def _postpone(self, run_id: str, attempt: int, error: Exception) -> bool:
        """Enqueue the run for later. Return False if that is not possible either."""
        delay = min(2.0 ** min(attempt, 30), _LONGEST_DELAY)
        try:
            await asyncio.to_thread(self._enqueue_again, run_id, attempt + 1, delay)
        except Exception:  # the database is away, which others report
            return False
        text = "run %s: cannot be worked on, next attempt in %.0f s: %s"
        logger.warning(text, run_id, delay, _brief(error))
        return True

    def _enqueue_again(self, run_id: str, attempt: int, delay: float) -> None:
        with self._tables.transaction() as connection:
            part = random_id()
            self._tables.enqueue(connection, run_id, part, attempt=attempt, delay=delay)

    async def _pause(self, seconds: float, token: CancellationToken) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(token.wait(), seconds)

    async def _is_responsible(self, run_id: str, workflow_id: str) -> bool:
        """Return whether this worker has to wait for a run that others work on.

        Of several workflows of a run, the oldest is responsible. The others need not wait: when it
        has suspended the run, it looks once more whether there is something to do. If this worker
        was frozen, its workflow may be executed by another one by now.
        """
        try:
            active = await asyncio.to_thread(self._active, [run_id])
        except Exception as error:
            logger.warning("run %s: its workflows cannot be listed: %s", run_id, _brief(error))
            return True
        pending = [each for each in active if each.status == "PENDING"]
        first = min(pending, key=lambda each: (each.created_at, each.workflow_id), default=None)
        return first is None or (first.workflow_id, first.executor_id) == (
            workflow_id,
            self._executor_id,
        )

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    # --- all runs ---

    def _watch(self) -> None:
        """Show that this worker lives, and take up what others have left."""
        if not self._register():
            return
        said, checked = "", time.monotonic()
        while True:
            try:
                if not self._shows_life():
                    return
                if self._tables.claim_sweep(self.queue, 0.9 * self._sweep_every):
                    if time.monotonic() - self._failed_at > self._patience:
                        self._take_over()
                    self._wake_ready()
                if time.monotonic() - checked > self._patience:
                    self._check_executed()
                    checked = time.monotonic()
                said = ""
            except Exception as error:
                if self._is_stopping.is_set():
                    return
                if (text := _brief(error)) != said:
                    said = text
                    logger.warning("the queue %s cannot be watched: %s", self.queue, text)
            if self._is_stopping.wait(self._beat_every):
                return

    def _shows_life(self) -> bool:
        """Show that this worker lives. Return False if DBOS was destroyed, without `stop`."""
        try:
            if _is_launched(self._dbos):
                self._tables.beat(self._executor_id, self.queue)
                return True
            self._tables.leave(self._executor_id)
        except Exception:
            self._failed_at = time.monotonic()
            raise
        return False

    def _register(self) -> bool:
        """Wait for the launch of DBOS, and register the queue. Return False if it is stopped."""
        failures = 0
        while not self._is_stopping.wait(0.05):
            try:
                if not _is_launched(self._dbos):
                    continue
                self._executor_id = str(self._dbos.DBOS.executor_id)
                self._tables.beat(self._executor_id, self.queue)
                self._dbos.DBOS.register_queue(self.queue, **self._limits)
                self._check()
                return True
            except Exception as error:
                failures += 1  # the first ones may be those of a launch that is under way
                if failures == 20:
                    text = "the queue %s cannot be registered: %s"
                    logger.warning(text, self.queue, _brief(error))
        return False

    def _check(self) -> None:
        if not self._tables.has_queue(self.queue):
            raise ConfigError(
                "DBOS uses another database than the store: DBOS(config=dbos_config(store))"
            )
        if self._executor_id == "local":
            logger.warning(
                "DBOS has the executor id 'local', and several workers need different ones: "
                "DBOS(config=dbos_config(store))"
            )

    def _take_over(self) -> None:
        """Enqueue again the workflows of workers that are gone."""
        living = self._tables.living(self._patience)
        left = [each.workflow_id for each in self._pending() if each.executor_id not in living]
        if left:
            logger.info("taken over from workers that are gone: %s", ", ".join(map(run_of, left)))
            self._dbos.DBOS.resume_workflows(left, queue_name=self.queue)

    def _wake_ready(self) -> None:
        """Wake the runs that nobody works on, and suspended ones whose time has come."""
        found = [*self._store.abandoned(), *self._due()]
        for start in range(0, len(found), _AT_ONCE):
            self._wake_all(found[start : start + _AT_ONCE])

    def _check_executed(self) -> None:
        """Enqueue again what DBOS has assigned to this worker and does not execute: the connection
        was lost just then.
        """
        executed = set(self._executed.values())
        found = {each.workflow_id for each in self._pending(executor_id=self._executor_id)}
        lost = sorted((found - executed) & self._unknown)  # one that ends now is found once
        self._unknown = found - executed
        if lost:
            logger.info("assigned, but not executed: %s", ", ".join(map(run_of, lost)))
            self._dbos.DBOS.resume_workflows(lost, queue_name=self.queue)

    def _due(self) -> list[str]:
        """Return the suspended runs that wait for nothing any more."""
        return [run_id for run_id in self._store.due() if not self._waits(run_id)]

    def _waits(self, run_id: str) -> bool:
        try:
            return bool(waiting_for(self._store, run_id))
        except (RunNotFound, DecodeError) as error:  # one damaged log must not stop the others
            logger.warning("the suspended run %s cannot be read: %s", run_id, error)
            return True

    def _wake_all(self, run_ids: Sequence[str]) -> None:
        """Wake those of the runs that belong to this queue and have no workflow."""
        known = self._tables.submitted(self.queue, run_ids)
        active = {run_of(each.workflow_id) for each in self._active(known)} if known else set()
        for run_id in known:
            if run_id not in active:
                self.wake(run_id)

    def _active(self, run_ids: Sequence[str]) -> list[Any]:
        """Return the workflows of these runs that have not ended."""
        found = self._dbos.DBOS.list_workflows(
            workflow_id_prefix=[ids_of(run_id) for run_id in run_ids],
            status=_ACTIVE,
            load_input=False,
            load_output=False,
        )
        return [workflow for workflow in found if run_of(workflow.workflow_id) in run_ids]

    def _pending(self, client: Any = None, **options: Any) -> list[Any]:
        """Return the workflows of this queue that are executed, or were when a worker died."""
        found: list[Any] = (client or self._dbos.DBOS).list_workflows(
            name=f"{WORKFLOW}{self.queue}",
            status="PENDING",
            load_input=False,
            load_output=False,
            **options,
        )
        return found

    def _give_back(self) -> None:
        """Enqueue again what this worker has not finished."""
        client = self._dbos.DBOSClient(
            system_database_url=_dbos_url(self._store),
            dbos_system_schema=self._dbos_schema,
            retry_connection_errors=False,
        )
        try:
            left = self._pending(client, executor_id=self._executor_id)
            if left:
                ids = [workflow.workflow_id for workflow in left]
                client.resume_workflows(ids, queue_name=self.queue)
        finally:
            client.destroy()
        self._tables.leave(self._executor_id)


# --- what they share ------------------------------------------------------------------------------


def _dbos_url(store: PostgresStore) -> str:
    scheme, separator, rest = store.url.partition("://")
    if not separator:
        raise ConfigError("DBOS needs a URL, such as postgresql://user@host/database")
    return f"{'postgresql' if scheme == 'postgres' else scheme}{separator}{rest}"


def _is_launched(dbos: Any) -> bool:
    """Return whether DBOS runs in this process."""
    try:
        dbos.DBOS.list_queues()
    except dbos.error.DBOSException:  # it does not exist, or has no connection yet
        return False
    return True


def _brief(error: Exception) -> str:
    return describe(error).partition("\n")[0]


def _encoded(prompts: Prompts) -> str:
    config = cast("LoopConfig", SimpleNamespace(clock=SystemClock()))  # all that is asked for
    messages = prompt_messages(prompts, config)
    if not messages:
        raise ConfigError("a run needs at least one prompt")
    return encode_json([replace(message, timestamp=None) for message in messages]).decode()


def _name_of(agent: Agent[Any, Any]) -> str:
    if not isinstance(agent, Agent):
        raise TypeError(f"a queue needs an Agent, not {type(agent).__name__}")
    if not agent.name:
        raise ConfigError("an agent of a queue needs a name: Agent(..., name='support')")
    return agent.name


def _by_name(agents: Sequence[Agent[Any, Any]]) -> dict[str, Agent[Any, Any]]:
    named: dict[str, Agent[Any, Any]] = {}
    for agent in agents:
        name = _name_of(agent)
        if name in named:
            raise ConfigError(f"two agents of the queue have the name {name!r}")
        named[name] = agent
    if not named:
        raise ConfigError("a worker needs at least one agent")
    return named


def _check_limits(
    concurrency: int, share: int, total: int | None, poll: float, sweep: float
) -> None:
    for name, value in (("concurrency", concurrency), ("per_tenant", share)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if share > concurrency:
        raise ConfigError(f"per_tenant ({share}) must not exceed concurrency ({concurrency})")
    if total is not None and total < share:
        raise ConfigError(f"per_tenant_total ({total}) must be at least per_tenant ({share})")
    for name, seconds in (("poll", poll), ("sweep", sweep)):
        if not seconds > 0:
            raise ConfigError(f"{name} must be more than 0 seconds, not {seconds}")


def _outcome(run_id: str, outcome: str, error: Exception | None = None) -> dict[str, Any]:
    """Return what DBOS keeps of a workflow. Everything else is in the log of the run."""
    found: dict[str, Any] = {"run_id": run_id, "outcome": outcome}
    return found if error is None else {**found, "error": describe(error)}
