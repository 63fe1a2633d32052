"""The tables of a store of runs, and their migrations.

They are in a schema of their own. A DBA may create them beforehand with the text of `script`: a
store then needs no right to create anything.
"""

from __future__ import annotations

import psycopg
from psycopg import sql

from clark_agent.errors import RunStoreError

__all__ = ["VERSION", "migrate", "qualified", "script"]

VERSION = 2

_LOCK = 0x434C524B
"""The number of the advisory lock that is held during a migration."""

_FROM_0 = """
CREATE TABLE {s}.workers (
    worker uuid PRIMARY KEY,
    name text NOT NULL,
    lease_until timestamptz NOT NULL
);
COMMENT ON TABLE {s}.workers IS
    'Processes that write runs. A worker owns its runs until its lease is over.';
COMMENT ON COLUMN {s}.workers.name IS 'Host and process.';

CREATE TABLE {s}.runs (
    n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id text COLLATE "C" NOT NULL UNIQUE,
    parent_run_id text COLLATE "C",
    depth bigint NOT NULL DEFAULT 0,
    conversation_id text COLLATE "C",
    began_at bigint NOT NULL DEFAULT 0,
    first_seq bigint NOT NULL DEFAULT 0,
    last_seq bigint NOT NULL DEFAULT -1,
    last_at bigint NOT NULL DEFAULT 0,
    outcome text,
    version bigint NOT NULL DEFAULT 0,
    owner uuid,
    claim uuid,
    epoch bigint NOT NULL DEFAULT 0,
    indexed bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 70);
COMMENT ON TABLE {s}.runs IS 'One row for each run. Times are milliseconds since 1970.';
COMMENT ON COLUMN {s}.runs.last_seq IS 'Number of the last record; -1 before the first.';
COMMENT ON COLUMN {s}.runs.outcome IS
    'done, failed, suspended, ...; NULL while the run has not ended.';
COMMENT ON COLUMN {s}.runs.owner IS 'The worker that writes the run; NULL if none does.';
COMMENT ON COLUMN {s}.runs.claim IS
    'Who writes: a commit with another claim is refused. Changes with each takeover.';
COMMENT ON COLUMN {s}.runs.epoch IS 'How often the run was claimed.';
COMMENT ON COLUMN {s}.runs.indexed IS 'The first record that is not in the search index.';
CREATE INDEX runs_by_time ON {s}.runs (began_at DESC, run_id DESC);
CREATE INDEX runs_by_parent ON {s}.runs (parent_run_id, began_at)
    WHERE parent_run_id IS NOT NULL;
CREATE INDEX runs_by_conversation ON {s}.runs (conversation_id, began_at)
    WHERE conversation_id IS NOT NULL;
CREATE INDEX runs_open ON {s}.runs (n) WHERE outcome IS NULL;
CREATE INDEX runs_suspended ON {s}.runs (began_at DESC, run_id DESC)
    WHERE outcome = 'suspended';

CREATE TABLE {s}.records (
    n bigint NOT NULL,
    seq bigint NOT NULL,
    at bigint NOT NULL,
    kind text NOT NULL,
    data text NOT NULL,
    PRIMARY KEY (n, seq)
);
COMMENT ON TABLE {s}.records IS
    'The log of each run (runs.n), only ever appended to. The text of data has a checksum: do not '
    'change it.';

CREATE TABLE {s}.requests (
    n bigint NOT NULL,
    request_id text COLLATE "C" NOT NULL,
    root_run_id text COLLATE "C" NOT NULL,
    assignee text,
    asked_at bigint NOT NULL,
    due_at bigint,
    decided_at bigint,
    PRIMARY KEY (n, request_id)
);
COMMENT ON TABLE {s}.requests IS 'What suspended runs wait for, by run (runs.n).';
COMMENT ON COLUMN {s}.requests.root_run_id IS 'The outermost run, which is resumed.';
COMMENT ON COLUMN {s}.requests.due_at IS 'When it expires, or when the time has come.';
COMMENT ON COLUMN {s}.requests.decided_at IS 'NULL while it is open.';
CREATE INDEX requests_open ON {s}.requests (asked_at) WHERE decided_at IS NULL;
CREATE INDEX requests_by_assignee ON {s}.requests (assignee, asked_at)
    WHERE decided_at IS NULL AND assignee IS NOT NULL;
CREATE INDEX requests_due ON {s}.requests (due_at)
    WHERE decided_at IS NULL AND due_at IS NOT NULL;

CREATE TABLE {s}.mails (
    n bigint NOT NULL,
    place bigint NOT NULL,
    id text COLLATE "C" NOT NULL,
    data text NOT NULL,
    PRIMARY KEY (n, place),
    UNIQUE (n, id)
);
COMMENT ON TABLE {s}.mails IS 'The mailboxes of the runs (runs.n): steering, cancels, events.';

CREATE TABLE {s}.texts (
    n bigint NOT NULL,
    seq bigint NOT NULL,
    body text NOT NULL,
    words tsvector NOT NULL,
    PRIMARY KEY (n, seq)
);
COMMENT ON TABLE {s}.texts IS 'The search index, filled by searches.';
CREATE INDEX texts_words ON {s}.texts USING gin (words);

CREATE VIEW {s}.entries AS
    SELECT runs.run_id, records.seq, to_timestamp(records.at / 1000.0) AS at, records.kind,
        records.data
    FROM {s}.records JOIN {s}.runs USING (n);
COMMENT ON VIEW {s}.entries IS 'The records, with the ids of their runs.';
"""
_FROM_1 = """
CREATE TABLE {s}.kept (
    n bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    place bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (n, name, place)
);
COMMENT ON TABLE {s}.kept IS
    'Results of the runs (runs.n) that are too large for the model, in pieces.';
"""
_MIGRATIONS = (_FROM_0, _FROM_1)
"""The script from each version to the next; 0 is an empty schema."""


def qualified(text: str, schema: str) -> str:
    """Return a statement with the schema in place of ``{s}``."""
    return text.replace("{s}", sql.Identifier(schema).as_string(None))


def script(schema: str, since: int = 0) -> str:
    """Return the statements that create the tables, or bring them up to date."""
    parts = [
        f"-- PostgreSQL, schema {schema}, version {since} to {VERSION}",
        *(["CREATE SCHEMA IF NOT EXISTS {s};"] if since == 0 else []),
        "CREATE TABLE IF NOT EXISTS {s}.schema_version (version bigint NOT NULL);",
        *_MIGRATIONS[since:],
        "DELETE FROM {s}.schema_version;",
        f"INSERT INTO {{s}}.schema_version VALUES ({VERSION});",
    ]
    return qualified("\n".join(parts), schema)


def migrate(connection: psycopg.Connection, schema: str) -> None:
    """Create or upgrade the tables. If several processes do this at once, one does it."""
    if _version_of(connection, schema) == VERSION:
        return
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        version = _version_of(connection, schema)
        if version > VERSION:
            raise RunStoreError(
                f"the schema {schema!r} was made by a newer version of this package: its tables "
                f"have version {version}, and this one knows up to {VERSION}"
            )
        if version < VERSION:
            encoding = connection.execute("SHOW server_encoding").fetchone()
            if encoding is None or encoding[0] != "UTF8":
                raise RunStoreError(f"the database must have the encoding UTF8, not {encoding}")
            connection.execute(script(schema, version).encode())


_HAS_TABLES = """
    SELECT 1 FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace s ON s.oid = relnamespace
    WHERE nspname = %s AND relname = 'schema_version'
"""


def _version_of(connection: psycopg.Connection, schema: str) -> int:
    # Not with to_regclass, which may not see what another process has just created.
    found = connection.execute(_HAS_TABLES, (schema,)).fetchone()
    if found is None:
        return 0
    statement = qualified("SELECT version FROM {s}.schema_version", schema)
    row = connection.execute(statement.encode()).fetchone()
    return 0 if row is None else int(row[0])
