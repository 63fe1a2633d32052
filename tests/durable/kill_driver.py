"""Workers of many runs, killed at any moment: ``python -m tests.durable.kill_driver``.

This process starts workers and a decider (`tests.durable.fleet`), submits runs, and kills workers
with SIGKILL, or stops them with SIGSTOP for longer than a lease lasts, so that they wake up as
zombies whose runs belong to others. Others take their places until all runs have ended. Then it
looks at everything (`tests.durable.fleet_checks`).

``--drain`` asks each worker in turn to leave with SIGTERM instead: then no call is uncertain.
``--stop-postgres`` crashes the database when the first run has ended, and starts it again later.
Several engines are driven at the same time.

The runs and the order of the blows follow from ``--seed``; when they fall does not. If something is
wrong, the folder with the files of the workers and a dump of the database is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.durable import fleet, servers
from tests.durable.fleet import ENGINES, STORES, Owners, Settings, engine_of, run_ids
from tests.durable.fleet_checks import Blow, Found, check_fleet, check_replays
from tests.run_log.crash_driver import Probe
from tests.run_log.waiting_driver import Effects

_REPLAYED = 200
"""How many runs are replayed at the end."""
_TOO_MANY = 10
"""How many processes may fail before it is not worth to go on."""
_LAST = 10
"""A worker is busy if it wrote one of the last so many lines about runs."""
_WAVE = 50
"""How many runs are submitted at once."""


class Workers:
    """The processes of a fleet: forks of one that has imported everything."""

    def __init__(self, settings: Settings, count: int) -> None:
        self._settings = settings
        self._forks = multiprocessing.get_context("forkserver")
        modules = ["fleet_checks", "servers", f"{settings.engine}_engine"]
        preload = [f"tests.durable.{module}" for module in modules]
        self._forks.set_forkserver_preload([*preload, "clark_agent.run_log.postgres"])
        self._numbers = iter(range(10**6))
        self._left: list[BaseProcess] = []
        """Those that were told to leave, or sleep."""
        self.count = count
        self.running: list[BaseProcess] = []
        self.decider = self.start("decider")
        self.fill()

    def start(self, role: str) -> BaseProcess:
        log = self._settings.path / f"{role}-{next(self._numbers)}.log"
        process = self._forks.Process(target=fleet.live, args=(role, self._settings, log))
        process.start()
        return process

    def fill(self) -> None:
        while len(self.running) < self.count:
            self.running.append(self.start("worker"))

    def strike(self, victim: BaseProcess, how: signal.Signals) -> Blow:
        """Send a signal to a worker, and note when. It does not count as running any more."""
        blow = Blow(time.time_ns() // 1_000_000, pid_of(victim), how.name)
        os.kill(blow.process, how)
        self.running.remove(victim)
        self._left.append(victim)
        return blow

    def failures(self) -> list[str]:
        """Processes that ended though nobody killed them."""
        gone = [p for p in [*self.running, *self._left, self.decider] if p.exitcode is not None]
        self.running = [process for process in self.running if process not in gone]
        self._left = [process for process in self._left if process not in gone]
        failed = [p for p in gone if (p.exitcode or 0) > 0]
        return [f"process {p.pid} ended with {p.exitcode}" for p in failed]

    def end(self) -> None:
        for process in [*self.running, *self._left, self.decider]:
            process.kill()
            process.join()


def pid_of(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


class Drive:
    """One fleet from its start to the end of all runs."""

    def __init__(self, given: argparse.Namespace, settings: Settings, postgres: Any) -> None:
        self._given = given
        self._settings = settings
        self._postgres: servers.Postgres | None = postgres
        self._rng = random.Random(given.seed)
        places = [self._rng.randrange(1, given.runs) for _ in range(given.blows or 0)]
        self._places = None if given.blows is None else sorted(places)
        """How many runs have ended when each blow falls; None if they fall after some time."""
        self._next_blow = 0.0
        self.blows: list[Blow] = []
        self.failures: list[str] = []
        self.count: Counter[str] = Counter()
        self._runs = run_ids(given.runs)
        self._began = 0.0

    async def live(self) -> None:
        workers = Workers(self._settings, self._given.workers)
        zombies: list[asyncio.Task[None]] = []
        submitting = asyncio.create_task(self._submit())
        self._began = time.monotonic()
        try:
            async with asyncio.timeout(self._given.seconds):
                crashes = self._given.stop_postgres
                while (left := await self._unfinished()) or not all(z.done() for z in zombies):
                    self.failures += workers.failures()
                    if len(self.failures) > _TOO_MANY:
                        break
                    if submitting.done():
                        submitting.result()  # raises what has gone wrong
                    workers.fill()
                    ended = len(self._runs) - len(left)
                    if crashes and ended:
                        crashes = False
                        zombies.append(asyncio.create_task(self._crash_postgres()))
                    if left and ended and self._is_time_for_a_blow(ended):
                        zombies += self._strike(workers)
                    await asyncio.sleep(0.1)
                await submitting
        except TimeoutError:
            left = await self._unfinished()
            self.failures.append(f"{len(left)} runs did not end in time: {left[:5]}")
        finally:
            for task in (submitting, *zombies):
                task.cancel()
            await asyncio.gather(submitting, *zombies, return_exceptions=True)
            self.failures += workers.failures()
            workers.end()

    async def _submit(self) -> None:
        engine = engine_of(self._settings)
        for first in range(0, len(self._runs), _WAVE):
            await engine.submit(self._runs[first : first + _WAVE])

    def _is_time_for_a_blow(self, ended: int) -> bool:
        if self._places is not None:
            left = self._places[len(self.blows) :]
            return bool(left) and ended >= left[0]
        now = time.monotonic()
        if now < self._next_blow or now - self._began > 0.6 * self._given.seconds:
            return False
        self._next_blow = now + self._rng.expovariate(1 / self._given.every)
        return True

    def _strike(self, workers: Workers) -> list[asyncio.Task[None]]:
        """Strike a worker, if there is one that works."""
        last = Owners(self._settings.path / "owners").read()[-_LAST:]
        busy = {process for _, process, _ in last}
        victims = [process for process in workers.running if process.pid in busy]
        if not victims:
            return []
        victim = victims[0] if self._given.drain else self._rng.choice(victims)
        how = signal.SIGTERM if self._given.drain else signal.SIGKILL
        if how is signal.SIGKILL and self._has_leases and len(self.blows) % 2:
            how = signal.SIGSTOP
        self.blows.append(workers.strike(victim, how))
        self.count[how.name] += 1
        return [asyncio.create_task(self._wake(victim))] if how is signal.SIGSTOP else []

    @property
    def _has_leases(self) -> bool:
        """Whether others take the runs of a worker that sleeps. A lock of a file stays with it."""
        return self._settings.store == "postgres"

    async def _wake(self, victim: BaseProcess) -> None:
        """Wake a worker when its leases are over, and give it time to notice what it has lost."""
        await asyncio.sleep(self._settings.lease * (1.2 + self._rng.random()))
        os.kill(pid_of(victim), signal.SIGCONT)
        await asyncio.sleep(self._settings.lease)
        victim.terminate()
        while victim.exitcode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def _crash_postgres(self) -> None:
        """Crash the database, and start it again when all leases are over."""
        assert self._postgres is not None, "--stop-postgres needs a PostgreSQL of its own"
        await asyncio.to_thread(self._postgres.stop, "immediate")
        self.count["crashes"] += 1
        await asyncio.sleep(1.2 * self._settings.lease)
        await asyncio.to_thread(self._postgres.start)

    async def _unfinished(self) -> list[str]:
        try:
            ended = await asyncio.to_thread(self._ended)
        except Exception:  # the database may be away
            return self._runs
        return [run_id for run_id in self._runs if run_id not in ended]

    def _ended(self) -> set[str]:
        return {each.run_id for each in self._look().runs(outcome="done")}

    def _look(self) -> Any:
        if not hasattr(self, "_store"):
            self._store = self._settings.open_store()
        return self._store

    def check(self) -> Found:
        folder, store = self._settings.path, self._look()
        effects = Effects(folder / "effects", Probe(None)).read()
        owners = Owners(folder / "owners").read()
        found = check_fleet(store, self._runs, effects, owners, self.blows, folder)
        if not found.problems:
            replays = check_replays(store, self._runs[:_REPLAYED], folder)
            found.problems += asyncio.run(replays)
        found.problems[:0] = self.failures
        if self._given.drain and found.uncertain:
            found.problems.append(
                f"{found.uncertain} calls are uncertain, though nobody was killed"
            )
        return found


def drive(engine: str, given: argparse.Namespace, folder: Path) -> int:
    """Live, check, and print what came of it. The number of problems."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        postgres, url, address = None, "", given.address
        if given.store == "postgres":
            if not given.url:
                postgres = stack.enter_context(servers.postgres())
            server = given.url if postgres is None else postgres.url
            url = servers.create_database(server, folder.name)
        if engine == "temporal" and not address:
            address = stack.enter_context(servers.temporal()).address
        settings = Settings(
            engine=engine,
            store=given.store,
            folder=str(folder),
            url=url,
            address=address,
            lease=given.lease,
            pace=given.pace,
        )
        drive = Drive(given, settings, postgres)
        asyncio.run(drive.live())
        lived = time.monotonic() - began
        found = drive.check()
        if found.problems and url:
            servers.dump(url, folder / "database.sql")
    gaps = found.gaps or [0]
    said = {
        "runs": given.runs,
        "problems": len(found.problems),
        "uncertain": found.uncertain,
        **{name.lower(): number for name, number in sorted(drive.count.items())},
        "gaps": len(found.gaps),
        "gap_p50_ms": gaps[len(gaps) // 2],
        "gap_p99_ms": gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)],
        "seconds": round(lived),
        "seconds_with_checks": round(time.monotonic() - began),
    }
    print(f"{engine} {given.store}", *[f"{name}={value}" for name, value in said.items()])
    for problem in found.problems[:50]:
        print(problem, file=sys.stderr)
    return len(found.problems)


def drive_together(engines: Sequence[str]) -> int:
    """Run this driver once for each engine, all at the same time. How many have failed."""
    with servers.postgres() as postgres:
        command = [sys.executable, "-m", "tests.durable.kill_driver", *sys.argv[1:]]
        more = [("--engine", engine, "--url", postgres.url) for engine in engines]
        drivers = [subprocess.Popen([*command, *each]) for each in more]
        return sum(driver.wait() != 0 for driver in drivers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--engine", choices=ENGINES, nargs="+", default=["store"])
    parser.add_argument("--store", choices=STORES, default="postgres")
    parser.add_argument("--url", default="", help="a PostgreSQL to use instead of a new one")
    parser.add_argument("--address", default="", help="a Temporal to use instead of a new one")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lease", type=float, default=3.0)
    parser.add_argument("--blows", type=int, help="how many, from the first run to the last")
    parser.add_argument(
        "--every", type=float, default=1.0, help="without --blows: seconds between them"
    )
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of an answer or a tool")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drain", action="store_true", help="SIGTERM, instead of killing")
    parser.add_argument("--stop-postgres", action="store_true")
    given = parser.parse_args()
    if given.runs < 2:
        parser.error("--runs must be 2 or more: a blow falls between the first and the last")
    if given.stop_postgres and (given.url or given.store != "postgres" or len(given.engine) > 1):
        parser.error("--stop-postgres crashes a server of its own, for one engine")
    if len(given.engine) > 1:
        sys.exit(drive_together(given.engine))
    folder = Path(tempfile.mkdtemp(prefix="fleet-"))
    if drive(given.engine[0], given, folder):
        print(f"kept: {folder}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
