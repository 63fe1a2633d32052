"""Follows a run from anywhere: the events so far, then those to come.

    async for followed in follow(store, run_id, after=last_id):
        show(followed.event)

The events come from the log (see `clark_agent.run_log.event_stream`), so they are the same in every
process, whoever runs the run, and each has a position that stays valid: the number of its record,
and its own number in it. A reader that was cut off continues behind the last event it has.

With ``RunLog(store, live=True)``, deltas of the answer that is being streamed come in between,
after a ``message_start`` of their own. They have no position, may be missing, and are superseded by
the ``message_start`` and ``message_end`` that follow from the log, or by another attempt.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from math import inf, isfinite
from typing import Any, TypeAlias

from msgspec import Struct

from clark_agent.errors import DecodeError
from clark_agent.events import AgentEvent, MessageStart, MessageUpdate, public_event
from clark_agent.messages.wire import decode_json, encode_json
from clark_agent.run_log._reading import in_background, is_remote
from clark_agent.run_log.event_stream import EventStream
from clark_agent.run_log.records import (
    Entry,
    Record,
    RequestDecided,
    RunEnded,
    RunFailed,
    RunSuspended,
)
from clark_agent.run_log.store import RunStore, RunTail
from clark_agent.run_log.writer import RunLog, store_of

__all__ = ["FollowedEvent", "LiveDelta", "follow", "sse"]


class FollowedEvent(Struct, frozen=True):
    """An event of a run, and its position."""

    seq: int
    """The number of its record; for a delta, of the last record before it."""
    index: int
    """Its number among the events of the record; for a delta, that of the last event before it."""
    event: AgentEvent
    is_live: bool = False
    """Whether it is a delta, or the start before it, which are not in the log."""

    @property
    def id(self) -> str | None:
        """Its position, as `follow` takes it; None for a delta."""
        return None if self.is_live else f"{self.seq}.{self.index}"


_Position: TypeAlias = tuple[int, float]
"""The number of a record, and that of an event in it."""
_BEGINNING: _Position = (-1, inf)
_POSITION = re.compile(r"(\d{1,18})(?:\.(\d{1,18}))?", re.ASCII)
_LONGEST_WAIT = 60.0
_MOST_DELTAS = 2000


def follow(
    store: RunStore | RunLog,
    run_id: str,
    *,
    after: int | str | None = None,
    until_suspended: bool = False,
) -> AsyncGenerator[FollowedEvent]:
    """Return the events of a run from a position on: those in the log, then those to come.

    ``after`` is None for the beginning, the number of a record (everything behind it), or the id of
    an event: ``"12.3"``. The events end with the run. While the run is suspended, or its process is
    dead, they go on as soon as it is resumed; with ``until_suspended``, they end when it is
    suspended.

    Raises `ValueError` for an invalid position, and at the first step `RunNotFound`; later
    `LogDamaged`.
    """
    position = _position(after)
    return _events(_follow(store_of(store), run_id, position, None, until_suspended))


def sse(
    store: RunStore | RunLog,
    run_id: str,
    *,
    after: int | str | None = None,
    public: bool = True,
    heartbeat: float | None = 15.0,
    until_suspended: bool = False,
) -> AsyncGenerator[bytes]:
    """Return the events of a run as server-sent events, for the body of a response of the type
    ``text/event-stream``.

    ``after`` is the value of the header ``Last-Event-ID``, or None; see `follow`. Each event is
    JSON, as `clark_agent.events.public_event` shows it; with ``public=False``, all of it. An event
    that is not public only moves the position. While nothing happens, a comment is sent every
    ``heartbeat`` seconds, so that proxies keep the connection, and the server notices when the
    client has gone.
    """
    seconds: Any = heartbeat
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and isfinite(seconds) and seconds > 0):
        raise ValueError(f"heartbeat must be more than 0 seconds or None, not {heartbeat!r}")
    position = _position(None if after == "" else after)
    followed = _follow(store_of(store), run_id, position, heartbeat, until_suspended)
    return _frames(followed, public=public)


def _position(after: Any) -> _Position:
    if after is None:
        return _BEGINNING
    if isinstance(after, int) and not isinstance(after, bool):
        return after, inf
    found = _POSITION.fullmatch(after) if isinstance(after, str) else None
    if found is None:
        raise ValueError(
            f"invalid position {after!r}: use the number of a record, or the id of an event, such "
            "as '12.3'"
        )
    return int(found[1]), inf if found[2] is None else int(found[2])


# --- the events -------------------------------------------------------------------------------


async def _follow(
    store: RunStore,
    run_id: str,
    after: _Position,
    heartbeat: float | None,
    until_suspended: bool,
) -> AsyncGenerator[FollowedEvent | None]:
    """Yield the events; None after each ``heartbeat`` without one."""
    clock = asyncio.get_running_loop().time
    tail = await in_background(store, lambda: store.tail(run_id))
    try:
        following = _Following(tail, after)
        if is_remote(store):
            await tail.wait(0)  # which reads, in a thread
        quiet_since = clock()
        while True:
            for followed in following.read():
                yield followed
                quiet_since = clock()
            if following.has_more:
                await asyncio.sleep(0)
                continue
            if isinstance(following.last, _SUSPENDED if until_suspended else _ENDED):
                return
            wait = _LONGEST_WAIT
            if heartbeat is not None:
                wait = quiet_since + heartbeat - clock()
                if wait <= 0:
                    yield None
                    quiet_since = clock()
                    wait = heartbeat
            await tail.wait(min(wait, _LONGEST_WAIT))
    finally:
        tail.close()


_ENDED = (RunEnded, RunFailed)
_SUSPENDED = (*_ENDED, RunSuspended, RequestDecided)


class _Following:
    """Reads a tail, and turns what it reads into events behind a position."""

    def __init__(self, tail: RunTail, after: _Position) -> None:
        self._tail = tail
        self._after = after
        self._stream = EventStream()
        self._at: tuple[int, int] = (-1, -1)
        """The position of the last event."""
        self._seq = -1
        """The number of the last record."""
        self._waiting: deque[LiveDelta] = deque(maxlen=_MOST_DELTAS)
        """Deltas behind records that were not read yet."""
        self._streamed = -1
        """The number of the record before the answer whose deltas have begun."""
        self.last: Entry | None = None
        self.has_more = True
        """Whether the last call has read records, so that there may be more."""

    def read(self) -> Iterator[FollowedEvent]:
        """Return what is new.

        The deltas are read first, so that one is dropped if its message is already in the log. One
        that is ahead of the log waits for the records before it.
        """
        live = self._tail.read_live()
        records = self._tail.read()
        self.has_more = bool(records)
        for record in records:
            yield from self._recorded(record)
        for data in live:
            with suppress(DecodeError):  # a part of one, if they came too fast
                self._waiting.append(decode_json(data, LiveDelta))
        while self._waiting and self._waiting[0].seq <= self._seq + 1:
            delta = self._waiting.popleft()
            if delta.seq > self._seq and (self._seq, inf) >= self._after:
                if delta.seq != self._streamed:
                    self._streamed = delta.seq
                    start = MessageStart(delta.event.partial)
                    yield FollowedEvent(*self._at, start, is_live=True)
                yield FollowedEvent(*self._at, delta.event, is_live=True)

    def _recorded(self, record: Record) -> Iterator[FollowedEvent]:
        self._seq, self.last = record.seq, record.entry
        for index, event in enumerate(self._stream.take(record)):
            self._at = record.seq, index
            if self._at > self._after:
                yield FollowedEvent(record.seq, index, event)


class LiveDelta(Struct, frozen=True):
    """What the writer of a run publishes; see `clark_agent.run_log.writer.LiveEvent`."""

    seq: int
    event: MessageUpdate


async def _events(
    followed: AsyncGenerator[FollowedEvent | None],
) -> AsyncGenerator[FollowedEvent]:
    async with aclosing(followed):
        async for each in followed:
            if each is not None:
                yield each


async def _frames(
    followed: AsyncGenerator[FollowedEvent | None], *, public: bool
) -> AsyncGenerator[bytes]:
    async with aclosing(followed):
        async for each in followed:
            if each is None:
                yield b":\n\n"
                continue
            shown = public_event(each.event) if public else each.event
            place = b"" if each.id is None else b"id: %b\n" % each.id.encode()
            data = b"" if shown is None else b"data: %b\n" % encode_json(shown)
            if place or data:
                yield place + data + b"\n"
