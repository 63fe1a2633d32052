"""What stores share that read rows, and reading from stores that may have to wait for a network,
without blocking the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from clark_agent.errors import DecodeError
from clark_agent.messages.wire import decode_json
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.pages import LogPage, LogPlace
from clark_agent.run_log.reader import LogReader
from clark_agent.run_log.records import Record
from clark_agent.run_log.store import RunStore

__all__ = [
    "caught",
    "in_background",
    "is_remote",
    "last_of_rows",
    "mailbox_of",
    "may_have_mail",
    "page_of_rows",
]

_T = TypeVar("_T")


def is_remote(store: RunStore) -> bool:
    """Return whether reading from the store may wait for a network."""
    return bool(getattr(store, "is_remote", False))


def may_have_mail(store: RunStore, run_id: str) -> bool:
    """Return whether the mailbox of a run is worth reading, as far as a remote store knows."""
    has_mail = getattr(store, "has_mail", None)
    return has_mail is None or bool(has_mail(run_id))


async def in_background(store: RunStore, read: Callable[[], _T]) -> _T:
    """Call what reads from a store: in a thread, if the store is remote."""
    return await asyncio.to_thread(read) if is_remote(store) else read()


async def mailbox_of(store: RunStore, run_id: str) -> Sequence[Mail] | Exception | None:
    """Return what is in the mailbox of a run that is about to be continued, or why it cannot be
    read. None if the store is not remote: then it is read when the run begins.
    """
    if not is_remote(store):
        return None
    return await asyncio.to_thread(caught, lambda: store.mail(run_id))


def caught(call: Callable[[], _T]) -> _T | Exception:
    """Return what it returns, or raises."""
    try:
        return call()
    except Exception as error:
        return error


def page_of_rows(
    run_id: str,
    place: LogPlace,
    rows: Iterable[tuple[int, bytes]],
    last: int | None,
    records: int,
    size: int,
) -> LogPage:
    """Return a page of rows behind a place: their numbers and JSON. ``last`` is the number of the
    last record of the run. No more rows are taken than are needed.
    """
    reader, taken, read, seq = LogReader(run_id, "record {}", after=place), 0, 0, place.seq
    for seq, data in rows:
        reader.take(data, seq, number=seq)
        taken, read = taken + 1, read + len(data)
        if reader.is_damaged() or taken == records or read >= size:
            break
    is_end = last is None or seq >= last or not taken
    if is_end and not reader.is_damaged():
        reader.expect_end(last)
    found = reader.intact()
    return LogPage(
        records=found,
        end=LogPlace.behind(found[-1]) if found else place,
        is_end=is_end or reader.is_damaged(),
        problem=reader.problem,
        bytes_read=read,
    )


def last_of_rows(rows: Iterable[bytes], size: int) -> list[Record]:
    """Return the records of rows, which come in reverse: about so many bytes."""
    found: list[Record] = []
    read = 0
    for data in rows:
        with suppress(DecodeError):
            found.append(decode_json(data, Record))
        read += len(data)
        if read >= size:
            break
    found.reverse()
    return found
