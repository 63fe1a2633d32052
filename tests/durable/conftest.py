"""One server of each kind for all tests of a process, and a database of its own for each test."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

from tests.durable import servers
from tests.selection import slow_fixture


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect the event loops and connections that DBOS leaves open when it is destroyed, here and
    not in a test of something else.
    """
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
@slow_fixture
def postgres_server() -> Iterator[servers.Postgres]:
    """A running PostgreSQL. Skips where it is not installed; an error if it does not start."""
    try:
        servers.postgres_programs()
    except servers.Missing as missing:
        pytest.skip(str(missing))
    with servers.postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: servers.Postgres) -> str:
    """The URL of an empty database."""
    return postgres_server.create_database()


@pytest.fixture(scope="session")
@slow_fixture
def temporal_server() -> Iterator[servers.Temporal]:
    """A running Temporal. Skips where it is not installed; an error if it does not start."""
    try:
        servers.temporal_program()
    except servers.Missing as missing:
        pytest.skip(str(missing))
    with servers.temporal() as server:
        yield server


@pytest.fixture
def temporal_address(temporal_server: servers.Temporal) -> str:
    """Where Temporal listens. All tests share its namespace: use workflow ids of your own."""
    return temporal_server.address
