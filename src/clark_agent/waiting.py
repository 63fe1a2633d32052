"""Requests that wait for a decision, and the decisions.

A run that cannot go on without a person, a time or an event from outside ends as ``suspended``, and
its log keeps what it waits for. Nothing runs meanwhile. `clark_agent.run_log.decide` records a
decision, and `clark_agent.run_log.resume` goes on, in any process.

- A hook that returns `Suspend` holds a call back: the request ``needs`` a permission.
- A tool that raises `clark_agent.ToolSuspended` has run: the request ``needs`` its result. The tool
  is not called again; the decision is the result. Unless it ``continues``: then it is called with
  what was given.

A request is about one call with exactly these arguments. Its id is the run, the turn, the position
of the call, and a digest of what was asked.
"""

from __future__ import annotations

from datetime import datetime
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from clark_agent.tools import ToolResult, tool_result

__all__ = [
    "Allow",
    "AnyDecision",
    "Decision",
    "Delivered",
    "Deny",
    "Elapsed",
    "Expired",
    "GiveArguments",
    "GiveResult",
    "Suspend",
    "Verdict",
    "WaitingRequest",
    "request_id_of",
    "run_of_request",
]


class Suspend(Struct, frozen=True):
    """Do not run the call yet: the run is suspended until the request is decided.

    Without ``until`` and ``event`` it waits for `clark_agent.run_log.decide` alone. That can decide
    the others too, before their time.
    """

    request: Any = None
    """What to show the person who decides, as JSON."""
    expires_in: float | None = None
    """Seconds after which the call is refused; None: it waits for ever."""
    until: datetime | int | None = None
    """It waits for this time (with a time zone, or in Unix milliseconds), and then goes on."""
    event: str | None = None
    """It waits for an event of this name; see `clark_agent.run_log.deliver`."""
    assignee: str | None = None
    """Who should decide: a user, a role, a queue. For the host; see
    `clark_agent.run_log.waiting_for`."""

    def __post_init__(self) -> None:
        seconds: Any = self.expires_in
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and isfinite(seconds) and seconds > 0):
            raise ValueError(f"expires_in must be more than 0 seconds or None, not {seconds!r}")
        _ = self.until_ms
        for name in ("event", "assignee"):
            value: Any = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"{name} must be a text or None, not {value!r}")

    @property
    def until_ms(self) -> int | None:
        """``until`` in Unix milliseconds."""
        until: Any = self.until
        if isinstance(until, datetime):
            if until.tzinfo is None:
                raise ValueError(f"until needs a time zone: {until!r}")
            return round(until.timestamp() * 1000)
        if until is None or (isinstance(until, int) and not isinstance(until, bool)):
            return until
        raise ValueError(f"until must be a datetime or Unix milliseconds, not {until!r}")


class WaitingRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that waits: who asks, about which call, and until when."""

    request_id: str
    run_id: str
    """The run whose call it is."""
    root_run_id: str
    """The outermost run above it, or that run itself. This is the one to resume."""
    conversation_id: str | None = None
    turn: int
    position: int
    """The position of the call in its message."""
    tool_call_id: str
    tool_name: str
    arguments: Any = None
    """All arguments, as the call would run, or ran, with them."""
    asked_by: str
    """The plugin that holds the call back, or the tool."""
    needs: Literal["permission", "result"]
    """``permission``: the call has not run. ``result``: it has, and waits for its result."""
    request: Any = None
    """What the plugin or the tool asks."""
    assignee: str | None = None
    asked_at: int
    expires_at: int | None = None
    """When it is refused unless it is decided, in Unix milliseconds."""
    until: int | None = None
    """When it goes on by itself, in Unix milliseconds."""
    event: str | None = None
    """The name of the event that it waits for."""
    continues: bool = False
    """Whether the tool is called again, with what was given instead of a result."""

    def overdue(self, now_ms: int) -> Expired | Elapsed | None:
        """What the time has decided, if it has. Of two times, the earlier one counts."""
        passed: list[Expired | Elapsed] = []
        if self.expires_at is not None and self.expires_at <= now_ms:
            passed.append(Expired(self.expires_at))
        if self.until is not None and self.until <= now_ms:
            passed.append(Elapsed(self.until))
        return min(passed, key=lambda each: each.at, default=None)


# --- decisions --------------------------------------------------------------------------------


class Decision(Struct, frozen=True, tag_field="decision"):
    """What a person can decide: `Allow`, `Deny`, `GiveArguments` or `GiveResult`."""


class _ByItself(Struct, frozen=True, tag_field="decision"):
    """How a request ends without a decision."""


class Allow(Decision, frozen=True, tag="allow"):
    """Run the call, with exactly the arguments of the request."""


class Deny(Decision, frozen=True, omit_defaults=True, tag="deny"):
    """Do not run the call. The model gets the reason as an error result."""

    reason: str | None = None


class GiveArguments(Decision, frozen=True, tag="give_arguments"):
    """Run the call, with exactly these arguments. The tool validates them."""

    args: Any


class GiveResult(Decision, frozen=True, tag="give_result"):
    """Do not run the call: this is its result. Any value that a tool may return."""

    if TYPE_CHECKING:
        result: Any
    else:
        result: ToolResult

    def __post_init__(self) -> None:
        force_setattr(self, "result", tool_result(self.result))


class Expired(_ByItself, frozen=True, tag="expired"):
    """It was not decided in time, and counts as refused."""

    at: int


class Elapsed(_ByItself, frozen=True, tag="elapsed"):
    """The time has come that it waited for."""

    at: int


class Delivered(_ByItself, frozen=True, omit_defaults=True, tag="delivered"):
    """The event has come that it waited for."""

    name: str
    payload: Any = None


AnyDecision: TypeAlias = Allow | Deny | GiveArguments | GiveResult
"""A decision, for reading it from JSON: ``msgspec.json.decode(body, type=AnyDecision)``."""

Verdict: TypeAlias = AnyDecision | Expired | Elapsed | Delivered
"""How a request ended."""


# --- ids --------------------------------------------------------------------------------------


def request_id_of(key: str, asked_by: str, tool_name: str, arguments: Any) -> str:
    """The id of a request about a call. ``key`` is the call's own: run, turn and position."""
    from hashlib import blake2b  # only runs that wait need it

    asked = [asked_by, tool_name, arguments]
    try:
        text = msgspec.json.encode(asked, order="deterministic")
    except (TypeError, ValueError, RecursionError):
        text = repr(asked).encode("utf-8", "replace")
    return f"{key}/{blake2b(text, digest_size=8).hexdigest()}"


def run_of_request(request_id: str) -> str:
    """The run that the id of a request names."""
    return request_id.rsplit("/", 3)[0]
