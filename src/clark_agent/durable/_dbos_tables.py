"""What a queue of runs has in the database, beside the tables of DBOS.

``dbos_runs`` has what was submitted: a wake-up, in however many weeks, finds agent and tenant
there. ``dbos_workers`` says which workers live, and ``dbos_sweeps`` when the last sweep was. All
times are those of the database.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from clark_agent._extras import load_extra
from clark_agent._ids import random_id
from clark_agent.clock import now_ms
from clark_agent.errors import ConfigError
from clark_agent.run_log.writer import RunLog, store_of

if TYPE_CHECKING:
    from psycopg import Connection

    from clark_agent.run_log.postgres import PostgresStore

__all__ = [
    "DBOS_SCHEMA",
    "WORKFLOW",
    "QueuedRun",
    "Submitted",
    "Tables",
    "ids_of",
    "postgres_of",
    "run_of",
]

DBOS_SCHEMA = "dbos"
"""The schema of the tables of DBOS, by default."""
WORKFLOW = "clark_agent."
"""What the name of the workflow begins with; the name of the queue follows."""
_IDS = "clark_agent:"

_CREATE = (
    "SELECT pg_advisory_xact_lock(hashtextextended('clark_agent.durable.dbos', 0))",
    "CREATE SCHEMA IF NOT EXISTS {schema}",
    """CREATE TABLE IF NOT EXISTS {schema}.dbos_runs (
        run_id text PRIMARY KEY,
        queue text NOT NULL,
        agent text NOT NULL,
        tenant text NOT NULL,
        prompts text NOT NULL,
        submitted_at timestamptz NOT NULL DEFAULT now()
    )""",
    """CREATE TABLE IF NOT EXISTS {schema}.dbos_workers (
        executor_id text PRIMARY KEY,
        queue text NOT NULL,
        seen_at timestamptz NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS {schema}.dbos_sweeps (
        queue text PRIMARY KEY,
        swept_at timestamptz NOT NULL
    )""",
)
_EXIST = "SELECT to_regclass(%s) IS NOT NULL"
_HAS_DBOS = """
    SELECT count(*) > 0 FROM pg_proc JOIN pg_namespace n ON n.oid = pronamespace
    WHERE n.nspname = %s AND proname = 'enqueue_workflow'
    AND 'delay_until_epoch_ms' = ANY (proargnames)
"""
"""While another process creates the tables, the function has fewer parameters at first."""
_HAS_QUEUE = "SELECT count(*) > 0 FROM {dbos}.queues WHERE name = %s"
_SUBMIT = """
    INSERT INTO {schema}.dbos_runs (run_id, queue, agent, tenant, prompts)
    VALUES (%s, %s, %s, %s, %s) ON CONFLICT (run_id) DO NOTHING RETURNING run_id
"""
_FIND = "SELECT queue, agent, tenant, prompts FROM {schema}.dbos_runs WHERE run_id = %s"
_SUBMITTED = "SELECT run_id FROM {schema}.dbos_runs WHERE queue = %s AND run_id = ANY(%s)"
_ACTIVE = r"""
    SELECT regexp_replace(workflow_uuid, '^' || {ids} || '(.*):[^:]*$', '\1')
    FROM {dbos}.workflow_status
    WHERE workflow_uuid LIKE {ids} || '%%' AND status IN ('ENQUEUED', 'DELAYED', 'PENDING')
"""
"""The runs with a workflow that has not ended."""
_IS_ACTIVE = f"SELECT %s IN ({_ACTIVE})"
_QUEUED = rf"""
    SELECT run_id, agent, tenant, queue FROM {{schema}}.dbos_runs AS submitted
    WHERE queue = coalesce(%(queue)s, queue) AND run_id = coalesce(%(run_id)s, run_id)
    AND run_id IN ({_ACTIVE} AND queue_name = coalesce(%(queue)s, queue_name))
    AND NOT EXISTS (
        SELECT 1 FROM {{schema}}.runs AS begun
        WHERE begun.run_id = replace(submitted.run_id, E'\\', E'\\\\')
    ) ORDER BY submitted_at, run_id
"""
"""Without those whose log was removed: they have no workflow any more."""
_ENQUEUE = """
    SELECT {dbos}.enqueue_workflow(
        workflow_name => {workflow} || queue,
        queue_name => queue,
        positional_args => ARRAY[to_json(run_id), to_json(%s::int)],
        workflow_id => %s,
        queue_partition_key => tenant,
        delay_until_epoch_ms => %s
    ) FROM {schema}.dbos_runs WHERE run_id = %s
"""
_BEAT = """
    INSERT INTO {schema}.dbos_workers (executor_id, queue, seen_at) VALUES (%s, %s, now())
    ON CONFLICT (executor_id) DO UPDATE SET seen_at = now()
"""
_LIVING = """
    SELECT executor_id FROM {schema}.dbos_workers
    WHERE seen_at > now() - make_interval(secs => %s)
"""
_LEAVE = """
    DELETE FROM {schema}.dbos_workers
    WHERE executor_id = %s OR seen_at < now() - interval '1 day'
"""
_CLAIM_SWEEP = """
    INSERT INTO {schema}.dbos_sweeps AS last (queue, swept_at) VALUES (%s, now())
    ON CONFLICT (queue) DO UPDATE SET swept_at = now()
    WHERE last.swept_at < now() - make_interval(secs => %s) RETURNING queue
"""


class Submitted(Struct, frozen=True):
    """A run that was submitted."""

    queue: str
    agent: str
    tenant: str
    prompts: str
    """The messages, as JSON."""


class QueuedRun(Struct, frozen=True):
    """A run that was submitted and has not begun."""

    run_id: str
    agent: str
    tenant: str
    queue: str


class Tables:
    """Reads and writes the tables of all queues in a database."""

    def __init__(self, store: PostgresStore, dbos_schema: str) -> None:
        self._store = store
        self._sql = load_extra("psycopg.sql", "dbos", "a queue of runs")
        self._tuple_row = load_extra("psycopg.rows", "dbos", "a queue of runs").tuple_row
        self._dbos_schema = dbos_schema
        self._names = {
            "schema": self._sql.Identifier(store.schema),
            "dbos": self._sql.Identifier(dbos_schema),
            "workflow": self._sql.Literal(WORKFLOW),
            "ids": self._sql.Literal(_IDS),
        }

    @contextmanager
    def transaction(self) -> Generator[Connection[Any]]:
        """Return a connection in a transaction."""
        with self._store.connection() as connection, connection.transaction():
            yield connection

    # --- the tables themselves ---

    def exist(self) -> bool:
        """Return whether there are queues in this database."""
        name = self._sql.Identifier(self._store.schema, "dbos_sweeps").as_string(None)
        return bool(self._one(_EXIST, (name,)))

    def create(self) -> None:
        """Create what is missing, but not the tables of DBOS."""
        with self.transaction() as connection:
            for statement in _CREATE:
                self._all(connection, statement)

    def has_dbos(self) -> bool:
        """Return whether DBOS has its tables."""
        return bool(self._one(_HAS_DBOS, (self._dbos_schema,)))

    def has_queue(self, queue: str) -> bool:
        """Return whether DBOS has a queue of this name in this database."""
        return bool(self._one(_HAS_QUEUE, (queue,)))

    # --- runs ---

    def submit(self, connection: Connection[Any], run_id: str, wanted: Submitted) -> bool:
        """Note a run. Return whether it is new."""
        values = (run_id, wanted.queue, wanted.agent, wanted.tenant, wanted.prompts)
        return bool(self._all(connection, _SUBMIT, values))

    def find(self, run_id: str, connection: Connection[Any] | None = None) -> Submitted | None:
        """Return a run that was submitted."""
        if connection is None:
            with self.transaction() as own:
                return self.find(run_id, own)
        found = self._all(connection, _FIND, (run_id,))
        return Submitted(*found[0]) if found else None

    def submitted(self, queue: str, run_ids: Sequence[str]) -> list[str]:
        """Return those of these runs that belong to the queue."""
        with self.transaction() as connection:
            return [row[0] for row in self._all(connection, _SUBMITTED, (queue, list(run_ids)))]

    def queued(self, *, queue: str | None = None, run_id: str | None = None) -> list[QueuedRun]:
        """Return the runs that were submitted and have not begun, the oldest first; those of a
        queue, or one of them.
        """
        values = {"queue": queue, "run_id": run_id}
        with self.transaction() as connection:
            return [QueuedRun(*row) for row in self._all(connection, _QUEUED, values)]

    def is_active(self, run_id: str) -> bool:
        """Return whether a run has a workflow that has not ended."""
        return bool(self._one(_IS_ACTIVE, (run_id,)))

    def enqueue(
        self,
        connection: Connection[Any],
        run_id: str,
        part: str,
        *,
        attempt: int = 0,
        delay: float = 0,
    ) -> bool:
        """Enqueue a workflow for a run, in a transaction of the caller. Return False if the run was
        not submitted.
        """
        due = now_ms() + round(delay * 1000) if delay else None
        values = (attempt, f"{ids_of(run_id)}{part}", due, run_id)
        return bool(self._all(connection, _ENQUEUE, values))

    def wake(self, connection: Connection[Any], run_id: str) -> bool:
        """Enqueue a workflow of its own for a run."""
        return self.enqueue(connection, run_id, random_id())

    def on_wake(self, connection: Connection[Any], run_id: str) -> None:
        """Wake a run that was decided about, if it was submitted: see `PostgresStore.on_wake`."""
        self.wake(connection, run_id)

    # --- workers ---

    def beat(self, executor_id: str, queue: str) -> None:
        """Note that a worker lives."""
        self._do(_BEAT, (executor_id, queue))

    def living(self, seconds: float) -> set[str]:
        """Return the workers that were heard of in the last seconds."""
        with self.transaction() as connection:
            return {row[0] for row in self._all(connection, _LIVING, (seconds,))}

    def leave(self, executor_id: str) -> None:
        """Note that a worker has stopped, and forget those that were last seen long ago."""
        self._do(_LEAVE, (executor_id,))

    def claim_sweep(self, queue: str, seconds: float) -> bool:
        """Return True if there was no sweep for so long: then the caller is the one to do it."""
        return self._one(_CLAIM_SWEEP, (queue, seconds)) is not None

    # --- statements ---

    def _do(self, statement: str, values: Sequence[Any]) -> None:
        with self.transaction() as connection:
            self._all(connection, statement, values)

    def _one(self, statement: str, values: Sequence[Any]) -> Any:
        with self.transaction() as connection:
            found = self._all(connection, statement, values)
        return found[0][0] if found else None

    def _all(
        self,
        connection: Connection[Any],
        statement: str,
        values: Sequence[Any] | Mapping[str, Any] = (),
    ) -> list[tuple[Any, ...]]:
        cursor = connection.cursor(row_factory=self._tuple_row)
        cursor.execute(self._sql.SQL(statement).format(**self._names), values)
        return list(cursor.fetchall()) if cursor.description else []


def ids_of(run_id: str) -> str:
    """Return what the ids of all workflows of a run begin with. The rest has no colon."""
    return f"{_IDS}{run_id}:"


def run_of(workflow_id: str) -> str:
    """Return the run that a workflow is for."""
    return workflow_id.removeprefix(_IDS).rpartition(":")[0]


def postgres_of(given: PostgresStore | RunLog) -> PostgresStore:
    """Return the store. Raises `ConfigError` if it is of another kind."""
    store: Any = store_of(given)
    if not hasattr(store, "on_wake"):
        raise ConfigError(f"a queue of runs needs a PostgresStore, not {type(store).__name__}")
    return cast("PostgresStore", store)
