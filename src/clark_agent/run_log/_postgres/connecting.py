"""Connections to the database: how they are opened, and which failures are worth a retry."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore

import psycopg
from psycopg import conninfo, errors

from clark_agent.errors import ConfigError, RunStoreError
from clark_agent.run_log._postgres.schema import migrate

__all__ = [
    "Connector",
    "Pool",
    "from_column",
    "is_passing",
    "shown_url",
    "store_error",
    "to_column",
]

_DEFAULTS = {
    "connect_timeout": "10",
    "application_name": "clark-agent",
    # A server that vanishes without a word is noticed.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}


class Pool:
    """Lends connections. A thread that needs one opens it, and so gets its error at once."""

    def __init__(self, connector: Connector, size: int) -> None:
        self._connector = connector
        self._free = BoundedSemaphore(size)
        self._idle: list[psycopg.Connection] = []

    @contextmanager
    def connection(self) -> Generator[psycopg.Connection]:
        """Yield a connection for this thread alone, in autocommit mode. Raises errors of the
        driver.
        """
        with self._free:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connector.connect()
            try:
                yield connection
            finally:
                if connection.closed or connection.info.transaction_status:
                    connection.close()
                else:
                    self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()


class Connector:
    """Opens connections, the first of which creates or upgrades the tables."""

    def __init__(self, url: str, schema: str) -> None:
        try:
            given = {key: str(value) for key, value in conninfo.conninfo_to_dict(url).items()}
        except psycopg.ProgrammingError:
            raise _invalid() from None  # the message of the driver may repeat the password
        if url.partition("://")[2].partition("/")[0].count("@") > 1:
            raise _invalid("; an @ in the password is written %40")
        self.conninfo = conninfo.make_conninfo(**{**_DEFAULTS, **given})
        self.schema = schema
        self._is_ready = False

    def connect(self) -> psycopg.Connection:
        """Open a connection in autocommit mode."""
        connection = psycopg.connect(self.conninfo, autocommit=True)
        try:
            if not self._is_ready:
                migrate(connection, self.schema)
                self._is_ready = True
        except BaseException:
            connection.close()
            raise
        return connection


def _invalid(hint: str = "") -> ConfigError:
    return ConfigError(
        "PostgresStore: this is not a valid connection string, such as "
        f"'postgresql://user:password@host:5432/database'{hint}"
    )


def shown_url(url: str) -> str:
    """Return a connection string without its password."""
    try:
        parts = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return "postgresql://…"
    host, port = parts.get("host") or "localhost", parts.get("port")
    user = f"{parts['user']}@" if parts.get("user") else ""
    return f"postgresql://{user}{host}{f':{port}' if port else ''}/{parts.get('dbname') or ''}"


def is_passing(error: Exception) -> bool:
    """Return whether it may work soon: the server is away, restarts, fails over or is full."""
    kinds = (psycopg.OperationalError, psycopg.InterfaceError, errors.ReadOnlySqlTransaction)
    return isinstance(error, kinds) and not isinstance(error, errors.InvalidPassword)


def store_error(error: Exception, run_id: str | None = None) -> RunStoreError:
    """Return what to raise for an error of the driver."""
    lines = str(error).strip().splitlines()
    text = f"PostgreSQL: {lines[0] if lines else type(error).__name__}"
    if isinstance(error, errors.InsufficientPrivilege):
        text += (
            ". What to do: have the tables created by a role that may do so (`schema_script`), and "
            "grant this one USAGE on the schema and SELECT, INSERT, UPDATE, DELETE on its tables"
        )
    made = RunStoreError(text, run_id)
    made.__cause__ = error
    return made


def to_column(text: str) -> str:
    """Return a text as a column can hold it: NUL is escaped, and therefore so is a backslash."""
    if "\0" in text or "\\" in text:
        return text.replace("\\", "\\\\").replace("\0", "\\0")
    return text


def from_column(text: str) -> str:
    """Return what `to_column` was called with."""
    if "\\" not in text:
        return text
    return "\\".join([part.replace("\\0", "\0") for part in text.split("\\\\")])
