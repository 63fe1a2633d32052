"""Keeps the lease of a process, and hears what other processes announce.

One thread with one connection: it renews the lease three times as often as it would end, and
listens. When the lease has lapsed (the process was frozen, or the database was away), it checks
which runs were taken over, and tells their appenders.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from threading import Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg
from psycopg import sql

from clark_agent.errors import RunTakenOver
from clark_agent.run_log._postgres.connecting import Connector
from clark_agent.run_log._postgres.schema import qualified

if TYPE_CHECKING:
    from clark_agent.clock import Clock
    from clark_agent.run_log._postgres.writing import Appender

__all__ = ["ALIVE", "RELEASE", "Keeper"]

logger = logging.getLogger(__name__)

NOW = "coalesce(%(now)s::timestamptz, clock_timestamp())"
ALIVE = f"""
    EXISTS (SELECT FROM {{s}}.workers w WHERE w.worker = r.owner AND w.lease_until > {NOW})
"""
"""Whether a worker owns the run ``r``."""
# Two threads of a process renew its lease. The later statement may have the earlier time.
_REGISTER = f"""
    INSERT INTO {{s}}.workers AS w (worker, name, lease_until)
    VALUES (%(worker)s, %(name)s, {NOW} + %(lease)s)
    ON CONFLICT (worker) DO UPDATE SET lease_until = greatest(w.lease_until, excluded.lease_until)
"""
_RENEW = f"""
    UPDATE {{s}}.workers SET lease_until = greatest(lease_until, {NOW} + %(lease)s)
    WHERE worker = %(worker)s AND lease_until > {NOW}
"""
_TAKEN = """
    SELECT v.n FROM unnest(%s::bigint[], %s::uuid[]) AS v (n, claim)
    LEFT JOIN {s}.runs USING (n) WHERE runs.claim IS DISTINCT FROM v.claim
"""
RELEASE = "UPDATE {s}.runs SET owner = NULL WHERE claim = ANY(%s)"
_RETIRE = "DELETE FROM {s}.workers WHERE worker = %s"
_FORGET_OLD = f"DELETE FROM {{s}}.workers WHERE lease_until < {NOW} - interval '1 day'"
_LONGEST_PAUSE = 2.0
_WARN_EVERY = 60.0


class Keeper:
    """Owns the lease and the listening connection of a process."""

    def __init__(self, connector: Connector, lease: float, clock: Clock | None) -> None:
        self._connector = connector
        self.lease = lease
        self._clock = clock
        self.worker: UUID = uuid4()
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self.channel = f"{connector.schema}_news"
        self.live_channel = f"{connector.schema}_live"
        self.is_listening = False
        self.on_news: Callable[[str], None] = lambda payload: None
        """Called in the thread with what was announced."""
        self.on_live: Callable[[str], None] = lambda payload: None
        self.on_connected: Callable[[], None] = lambda: None
        """Called in the thread when it listens, perhaps again: something may have been missed."""
        self._owned: dict[int, Appender] = {}
        self._by_id: dict[str, int] = {}
        self._lost: set[str] = set()
        """The runs that were taken over: nothing is started below them."""
        self._unreleased: set[UUID] = set()
        """The claims of runs that could not be given back when they were closed."""
        self._mail: set[int] = set()
        """The owned runs that may have messages which were not read."""
        self._lock = Lock()
        self._thread: Thread | None = None
        self._is_stopped = False
        self._registered_until = 0.0
        self._waker: socket.socket | None = None
        schema = connector.schema
        self._register, self._renew = qualified(_REGISTER, schema), qualified(_RENEW, schema)
        self._taken, self._retire = qualified(_TAKEN, schema), qualified(_RETIRE, schema)
        self._forget_old = qualified(_FORGET_OLD, schema)
        self._release = qualified(RELEASE, schema)

    def now(self) -> datetime | None:
        """The time of the injected clock; None: the database's."""
        if self._clock is None:
            return None
        return datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)

    def owns(self, appender: Appender) -> None:
        """Note that this process writes a run."""
        if appender.number is not None:
            self._mail.add(appender.number)
            self._lost.discard(appender.run_id)
            self._by_id[appender.run_id] = appender.number
            self._owned[appender.number] = appender

    def disowns(self, appender: Appender) -> None:
        """Note that it does not any more."""
        if appender.number is not None and self._owned.get(appender.number) is appender:
            del self._owned[appender.number]
            self._by_id.pop(appender.run_id, None)
            if appender.is_lost:
                self._lost.add(appender.run_id)
            self._mail.discard(appender.number)

    def owner_of(self, run_id: str) -> Appender | None:
        """The appender of a run that this process writes. Raises `RunTakenOver` if it was lost."""
        if run_id in self._lost:
            raise RunTakenOver(run_id)
        number = self._by_id.get(run_id)
        return None if number is None else self._owned.get(number)

    def release_later(self, claim: UUID) -> None:
        """Give a run back once the database is there."""
        self._unreleased.add(claim)
        with self._lock:
            if self._waker is not None:
                with suppress(OSError):
                    self._waker.send(b"r")

    def number_of(self, run_id: str) -> int | None:
        """The number of a run that this process writes."""
        return self._by_id.get(run_id)

    def note_mail(self, number: int) -> None:
        """Note that a message has come."""
        if number in self._owned:
            self._mail.add(number)

    def take_mail(self, number: int) -> bool:
        """Return whether a message may have come since the last call."""
        if number not in self._mail:
            return False
        self._mail.discard(number)
        return True

    def register(self, connection: psycopg.Connection) -> None:
        """Make sure that there is a lease. Called by the thread that claims runs."""
        self.start()
        if self._time() >= self._registered_until:
            connection.execute(self._register.encode(), self._values())
            self._registered_until = self._time() + self.lease / 2

    def _time(self) -> float:
        return time.monotonic() if self._clock is None else self._clock.now_ms() / 1000

    def _values(self) -> dict[str, Any]:
        lease = timedelta(seconds=self.lease)
        return {"worker": self.worker, "name": self._name, "lease": lease, "now": self.now()}

    # --- the thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self._thread is None and not self._is_stopped:
                self._waker, heard = socket.socketpair()
                self._thread = Thread(
                    target=self._work, args=(heard,), name="clark-agent-lease", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Give the lease up, and end the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._is_stopped = True
            waker, self._waker = self._waker, None
        if waker is not None:
            waker.close()  # the other end becomes readable
        if thread is not None and thread is not current_thread():
            thread.join()
        self._is_stopped = False

    def _work(self, heard: socket.socket) -> None:
        pause, warned = 0.05, float("-inf")
        while not self._is_stopped:
            try:
                with self._connector.connect() as connection:
                    pause = 0.05
                    self._listen(connection, heard)
            except Exception as error:
                if time.monotonic() > warned + _WARN_EVERY:
                    warned = time.monotonic()
                    logger.warning("the lease of this process cannot be renewed yet: %s", error)
            self.is_listening = False
            if not self._is_stopped:
                if select.select([heard], [], [], pause)[0]:
                    heard.recv(4096)  # otherwise the next pause would end at once
                pause = min(2 * pause, _LONGEST_PAUSE, self.lease / 6)
        heard.close()
        self._registered_until = 0.0

    def _listen(self, connection: psycopg.Connection, heard: socket.socket) -> None:
        for channel in (self.channel, self.live_channel):
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        connection.execute(self._forget_old.encode(), {"now": self.now()})
        self.beat(connection)
        self._mail.update(list(self._owned))
        self.is_listening = True
        self.on_connected()
        due = time.monotonic() + self.lease / 3
        while not self._is_stopped:
            for notify in connection.notifies(timeout=0):
                is_live = notify.channel == self.live_channel
                (self.on_live if is_live else self.on_news)(notify.payload)
            wait = due - time.monotonic()
            if wait <= 0:
                self.beat(connection)
                due = time.monotonic() + self.lease / 3
            else:
                readable = select.select([connection.fileno(), heard.fileno()], [], [], wait)[0]
                if heard.fileno() in readable and heard.recv(4096):
                    self._give_back(connection)
        with suppress(psycopg.Error):
            connection.execute(self._retire.encode(), (self.worker,))

    def _give_back(self, connection: psycopg.Connection) -> None:
        claims = list(self._unreleased)
        if claims:
            connection.execute(self._release.encode(), (claims,))
            self._unreleased.difference_update(claims)

    def beat(self, connection: psycopg.Connection) -> None:
        """Renew the lease. If it had lapsed, tell the appenders whose runs were taken over."""
        if connection.execute(self._renew.encode(), self._values()).rowcount == 0:
            connection.execute(self._register.encode(), self._values())
            owned = dict(self._owned)
            claims = [appender.claim for appender in owned.values()]
            for row in connection.execute(self._taken.encode(), ([*owned], claims)).fetchall():
                owned[row[0]].lose()
        self._give_back(connection)
        self._registered_until = self._time() + self.lease / 2
