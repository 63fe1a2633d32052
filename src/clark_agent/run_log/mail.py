"""Messages from other processes to a run: what its mailbox holds.

A mailbox belongs to a run, and its store keeps it beside the log. Messages stay in it. The log
records the ids of those that the run has taken, so each has its effect exactly once.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from clark_agent.types import AgentMessage

__all__ = ["Mail"]


class Mail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message in a mailbox."""

    id: str
    """Unique in the mailbox. The second message with an id is not kept."""
    kind: Literal["steer", "follow_up", "cancel", "event"]
    at: int
    """When it was sent, in Unix milliseconds."""
    message: AgentMessage | None = None
    """For ``steer`` and ``follow_up``."""
    when: str | None = None
    """For ``steer``: a `clark_agent.steering.SteerWhen`."""
    reason: str | None = None
    """For ``cancel``."""
    name: str | None = None
    """For ``event``: its name."""
    payload: Any = None
    """For ``event``: JSON."""
