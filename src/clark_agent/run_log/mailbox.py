"""Sends messages to a run from anywhere: another process, another machine, a web server.

    steer(store, run_id, "Use the other account.", "before_next_tool")
    follow_up(store, run_id, "And in French?")
    cancel(store, run_id, "the user has left")
    deliver(store, run_id, "paid", {"amount": 12})

A message goes into the mailbox of the run, which its store keeps. A run that is logged there looks
into it several times a second (`RunLog.mail_every`). It records a message before the message has an
effect, so that each has its effect exactly once, whatever crashes. If no process works on the run,
because it is suspended or its process has died, the message waits until the run is resumed.

These functions return whether the message is new. If a caller repeats a call with the same ``id``,
because it does not know whether the first one succeeded, the second has no effect. They raise
`RunNotFound`, and `InvalidContinuationError` for a run that has ended. If a run ends before it has
taken a message, the message stays unread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from clark_agent._ids import random_id
from clark_agent._text import well_formed
from clark_agent.clock import now_ms
from clark_agent.errors import InvalidContinuationError
from clark_agent.intake import accept_json
from clark_agent.run_log.fold import FoldedRun, fold
from clark_agent.run_log.mail import Mail
from clark_agent.run_log.reader import SUSPENDED, outcome_of
from clark_agent.run_log.requests import open_requests
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog, encode_entry, store_of
from clark_agent.steering import SteerWhen, When, message_from
from clark_agent.types import AgentMessage

__all__ = ["cancel", "deliver", "follow_up", "steer"]


def steer(
    store: RunStore | RunLog,
    run_id: str,
    message: AgentMessage | str,
    when: When = SteerWhen.AFTER_BATCH,
    *,
    id: str | None = None,  # noqa: A002
) -> bool:
    """Send a message to the model of a run; ``when`` is how soon it is delivered."""
    choices = tuple(SteerWhen)
    if when not in choices:
        raise ValueError(f"when must be one of {', '.join(choices)}, not {when!r}")
    mail = Mail(
        id=_id(id), kind="steer", at=now_ms(), message=message_from(message), when=str(when)
    )
    return _post(store, run_id, mail)


def follow_up(
    store: RunStore | RunLog,
    run_id: str,
    message: AgentMessage | str,
    *,
    id: str | None = None,  # noqa: A002
) -> bool:
    """Start the agent again with a message, after it has stopped by itself."""
    mail = Mail(id=_id(id), kind="follow_up", at=now_ms(), message=message_from(message))
    return _post(store, run_id, mail)


def cancel(
    store: RunStore | RunLog,
    run_id: str,
    reason: str | None = None,
    *,
    id: str | None = None,  # noqa: A002
) -> bool:
    """Abort a run: it ends with `RunAborted` and this reason."""
    text = None if reason is None else _text("reason", reason)
    return _post(store, run_id, Mail(id=_id(id), kind="cancel", at=now_ms(), reason=text))


def deliver(
    store: RunStore | RunLog,
    run_id: str,
    name: str,
    payload: Any = None,
    *,
    id: str | None = None,  # noqa: A002
) -> bool:
    """Send an event to a run: a request that waits for an event of this name, in the run or in a
    child run, is decided with it when the run is resumed. The ``payload`` is JSON.

    If nothing waits for the event yet, the run itself gets it as soon as it does.
    """
    if not _text("name", name):
        raise ValueError("an event needs a name")
    payload = msgspec.json.decode(encode_entry(accept_json(payload, "the payload of an event")))
    mail = Mail(id=_id(id), kind="event", at=now_ms(), name=name, payload=payload)
    run_store = store_of(store)
    folded = _find(run_store, run_id, mail)
    if folded is None:
        return False
    waiting = open_requests(run_store, folded, mail.at)
    target = next((request.run_id for request in waiting if request.event == name), run_id)
    # In this order: an equal call at the same time has the same target, or is seen here.
    if any(_has(run_store, each, mail.id) for each in _tree(run_store, run_id)):
        return False
    return run_store.post(target, mail)


def _tree(store: RunStore, run_id: str) -> Iterator[str]:
    """Yield a run and all runs below it."""
    seen: set[str] = set()
    left = [run_id]
    while left:
        each = left.pop()
        if each not in seen:  # a log made by hand may name any parent
            seen.add(each)
            yield each
            left += [run.run_id for run in store.runs(parent_run_id=each)]


def _has(store: RunStore, run_id: str, mail_id: str) -> bool:
    return any(mail.id == mail_id for mail in store.mail(run_id))


def _id(given: str | None) -> str:
    if given is None:
        return random_id()
    if not _text("id", given):
        raise ValueError("the id of a message must not be empty")
    return well_formed(given)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, not {type(value).__name__}")
    return well_formed(value)


def _post(given: RunStore | RunLog, run_id: str, mail: Mail) -> bool:
    store = store_of(given)
    return _find(store, run_id, mail) is not None and store.post(run_id, mail)


def _find(store: RunStore, run_id: str, mail: Mail) -> FoldedRun | None:
    """Return the run; None if it has ended and had the message before. Raises
    `InvalidContinuationError` if it has ended without it.
    """
    folded = fold(store.load(_text("run_id", run_id)))
    outcome = None if folded.ending is None else outcome_of(folded.ending)
    if outcome in (None, SUSPENDED):
        return folded
    if any(_has(store, each, mail.id) for each in _tree(store, run_id)):
        return None
    raise InvalidContinuationError(f"the run {run_id!r} has ended ({outcome})")
