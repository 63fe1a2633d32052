"""Puts a message that came through Temporal into the mailbox of its run."""

from __future__ import annotations

from typing import Any

from clark_agent.durable._transfer import restored_messages
from clark_agent.run_log import mailbox
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog

__all__ = ["post"]


def post(store: RunStore | RunLog, given: dict[str, Any]) -> bool:
    """Post it. Returns whether it is new."""
    run_id, mail_id = given["run_id"], given["id"]
    match given["kind"]:
        case "steer":
            (message,) = restored_messages([given["message"]])
            return mailbox.steer(store, run_id, message, given["when"], id=mail_id)
        case "follow_up":
            (message,) = restored_messages([given["message"]])
            return mailbox.follow_up(store, run_id, message, id=mail_id)
        case "cancel":
            return mailbox.cancel(store, run_id, given["reason"], id=mail_id)
        case _:
            return mailbox.deliver(store, run_id, given["name"], given["payload"], id=mail_id)
