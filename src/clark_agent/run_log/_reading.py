"""Reading from stores that may have to wait for a network, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from clark_agent.run_log.mail import Mail
from clark_agent.run_log.store import RunStore

__all__ = ["caught", "in_background", "is_remote", "mailbox_of", "may_have_mail"]

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
