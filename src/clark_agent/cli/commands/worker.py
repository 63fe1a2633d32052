"""The commands ``worker`` and ``submit``: runs in a queue in PostgreSQL, with DBOS."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from clark_agent._extras import load_extra
from clark_agent._ids import random_id
from clark_agent.cli.app import examples, is_debugging
from clark_agent.cli.options import STORE_VARIABLE, is_postgres, open_postgres, without_secrets
from clark_agent.cli.own_agent import load_agents, load_deps
from clark_agent.cli.view import safe
from clark_agent.durable.dbos import connect, dbos_config, install
from clark_agent.errors import ConfigError
from clark_agent.run_log.postgres import PostgresStore

__all__ = ["submit", "worker"]

_STORE = click.option(
    "--store",
    "--log",
    "url",
    metavar="URL",
    envvar=STORE_VARIABLE,
    required=True,
    help="The database: postgresql://user@host/database. Default: CLARK_AGENT_STORE. Others can "
    "see a command line: put a password into that variable, PGPASSWORD or ~/.pgpass.",
)
_QUEUE = click.option(
    "--queue", metavar="NAME", default="agents", help="The name of the queue. Default: agents."
)
_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command(
    epilog=examples(
        "clark-agent worker --store postgresql://db/shop --agents shop.agents:support",
        "clark-agent worker --agents shop.agents:all_agents --concurrency 50 --per-tenant 5",
    )
)
@_STORE
@click.option(
    "-a",
    "--agents",
    "references",
    metavar="MODULE:NAME",
    multiple=True,
    required=True,
    help="An Agent with a name, a list of them, or a function that returns one of these. Can be "
    "given several times.",
)
@click.option(
    "--deps",
    metavar="MODULE:NAME",
    help="The dependencies for the agents, or a function that returns them.",
)
@_QUEUE
@click.option(
    "--concurrency",
    metavar="N",
    type=_COUNT,
    default=10,
    help="How many runs to work on at once. Default: 10.",
)
@click.option(
    "--per-tenant",
    metavar="N",
    type=_COUNT,
    help="How many of these may be of one tenant. Default: half of them.",
)
@click.option(
    "--lease",
    metavar="SECONDS",
    type=_SECONDS,
    default=15.0,
    help="How long a worker may be silent before others take up its runs. Default: 15.",
)
@click.option(
    "--poll",
    metavar="SECONDS",
    type=_SECONDS,
    default=0.5,
    help="How often to look into the queue. Default: 0.5.",
)
@click.option(
    "--sweep",
    metavar="SECONDS",
    type=_SECONDS,
    default=2.0,
    help="How often to look for timers and for runs of dead workers. Default: 2.",
)
@click.option(
    "--grace",
    metavar="SECONDS",
    type=_SECONDS,
    default=30.0,
    help="How long to wait for running tools when stopped. Default: 30.",
)
def worker(
    *,
    url: str,
    references: tuple[str, ...],
    deps: str | None,
    queue: str,
    concurrency: int,
    per_tenant: int | None,
    lease: float,
    poll: float,
    sweep: float,
    grace: float,
) -> int:
    """Work on the runs of a queue in PostgreSQL.

    Start as many workers as you like, on any machine. One line is printed for each run that is
    taken, ended, suspended or let go. If a worker dies, others take up its runs.

    SIGTERM and Ctrl-C let go of all runs: tools that have begun may end, and other workers take the
    runs up at once. A second signal exits immediately. Exit codes: 143 after SIGTERM, 130 after
    Ctrl-C.
    """
    dbos: Any = load_extra("dbos", "dbos", "the worker")
    agents = [agent for reference in references for agent in load_agents(reference)]
    found = None if deps is None else load_deps(deps)
    stopping = _Stopping()
    with _lines(), stopping:
        store = _open(url, lease)
        level = "INFO" if is_debugging() else "CRITICAL"
        dbos.DBOS(config={**dbos_config(store), "log_level": level})
        made = install(
            store,
            agents,
            queue=queue,
            concurrency=concurrency,
            per_tenant=per_tenant,
            poll=poll,
            sweep=sweep,
            deps={} if found is None else {str(agent.name): found for agent in agents},
        )
        dbos.DBOS.launch()
        names = ", ".join([str(agent.name) for agent in agents])
        _say(f"working on the queue {queue} at {without_secrets(url)}: {names}")
        number = stopping.wait()
        _say("stopping; a second signal exits at once")
        made.stop(grace)
        store.close()
        _say("stopped")
    return 128 + number


@click.command(
    epilog=examples(
        'clark-agent submit --store postgresql://db/shop --agent support "Refund order 7"',
        'clark-agent submit --agent support --id order-7 --tenant acme "Refund order 7"',
        "clark-agent follow --store postgresql://db/shop order-7",
    )
)
@click.argument("prompt", nargs=-1, required=True)
@_STORE
@click.option("--agent", metavar="NAME", required=True, help="The name of an agent of the workers.")
@click.option("--id", "run_id", metavar="ID", help="The id of the run. Default: a random one.")
@click.option("--tenant", metavar="NAME", help="Whose run it is, for fair shares.")
@_QUEUE
def submit(
    *,
    prompt: tuple[str, ...],
    url: str,
    agent: str,
    run_id: str | None,
    tenant: str | None,
    queue: str,
) -> None:
    """Submit a run to a queue in PostgreSQL.

    A worker runs the agent on PROMPT. The id of the run is printed; a second call with the same id
    and prompt has no effect.
    """
    given = random_id() if run_id is None else run_id
    load_extra("dbos", "dbos", "a queue of runs")
    store = _open(url)
    try:
        is_new = connect(store, queue=queue).submit(given, agent, " ".join(prompt), tenant=tenant)
    finally:
        store.close()
    if not is_new:
        click.echo("it was already submitted", err=True)
    click.echo(given)


def _open(url: str, lease: float = 15.0) -> PostgresStore:
    if not is_postgres(url):
        raise ConfigError("--store takes the URL of a database: postgresql://user@host/database")
    return open_postgres(url, lease=lease)


# --- signals and lines ----------------------------------------------------------------------------


class _Stopping:
    """Waits for a signal to stop. The second one exits at once."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._number = signal.SIGTERM
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self) -> int:
        """Return the signal."""
        self._came.wait()
        return self._number

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._came.is_set():
            os._exit(128 + number)
        self._number = signal.Signals(number)
        self._came.set()


@contextmanager
def _lines() -> Generator[None]:
    """Print what the worker reports, and warnings of the library."""
    handler = _Printer()
    ours, own = logging.getLogger("clark_agent"), logging.getLogger("clark_agent.durable.dbos")
    before = own.level, ours.propagate
    own.setLevel(logging.INFO)
    ours.propagate = is_debugging()
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        own.level, ours.propagate = before


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        self.setFormatter(_FORMAT)
        _write(safe(self.format(record)))


_FORMAT = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")


def _say(text: str) -> None:
    logging.getLogger("clark_agent.durable.dbos").info(text)


def _write(line: str) -> None:
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError:  # nobody reads it: the work goes on
        pass
