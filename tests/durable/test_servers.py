"""The servers of the tests: real ones, which survive a restart and nobody who started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.durable import servers

pytestmark = pytest.mark.slow

STARTS = """
import sys
from tests.durable import servers
with getattr(servers, sys.argv[1])() as server:
    print(server.folder, server.port, server.guard, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["postgres", "temporal"])
@pytest.mark.parametrize("killed", ["tests", "guard"])
def test_a_server_ends_with_those_who_started_it(kind: str, killed: str) -> None:
    _programs(kind)
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, kind],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as starter:
        assert starter.stdout is not None
        folder, port, guard = starter.stdout.readline().split()
        assert _is_open(int(port))
        if killed == "guard":
            os.kill(int(guard), signal.SIGKILL)
        else:
            starter.kill()
            _until(lambda: not Path(folder).exists())
        _until(lambda: not _is_open(int(port)))
        starter.communicate()  # it ends with its input, if it has not been killed
        assert not Path(folder).exists()


def test_what_is_committed_survives_a_crash_of_the_server() -> None:
    _programs("postgres")
    with servers.postgres() as server:
        url = server.create_database("one")
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
        server.restart("immediate")
        assert server.url_of("one") == url
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT n FROM kept").fetchall() == [(7,)]
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
        server.drop_database("one")
    assert not server.folder.exists()
    assert not _is_open(server.port)


def test_each_test_has_a_database_of_its_own(
    postgres_url: str, postgres_server: servers.Postgres
) -> None:
    other = postgres_server.create_database()
    assert other != postgres_url
    with psycopg.connect(postgres_url) as first, psycopg.connect(other) as second:
        first.execute("CREATE TABLE here ()")
        tables = "SELECT 1 FROM pg_tables WHERE tablename = 'here'"
        assert second.execute(tables).fetchall() == []


def _programs(kind: str) -> None:
    try:
        servers.postgres_programs() if kind == "postgres" else servers.temporal_program()
    except servers.Missing as missing:
        pytest.skip(str(missing))


def _is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
