"""current_time: returns the time in a time zone that the model chooses.

The time comes from a `clark_agent.clock.Clock`, the system clock by default. It is not the clock of
the run: the run log records the tool's result, and a replay uses that result without a clock.

Zones are IANA names, in any case and with spaces for underscores, or offsets such as ``+05:30``.
The names come from the operating system, or from the package ``tzdata`` where it has none, as on
Windows. UTC, offsets and the local zone work without either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, available_timezones

from clark_agent.clock import Clock, SystemClock
from clark_agent.errors import ConfigError
from clark_agent.tools import AgentTool, ToolResult, tool

__all__ = ["current_time_tool"]

_UTC_NAMES = frozenset({"utc", "gmt", "z", "zulu", "etc/utc"})
_OFFSET = re.compile(r"(?:utc|gmt)?\s*([+-])([0-9]{1,2})(?::?([0-5][0-9]))?", re.IGNORECASE)
_SUGGESTIONS = 5


def current_time_tool(
    clock: Clock | None = None, *, default_timezone: str | None = None
) -> AgentTool:
    """Make the tool ``current_time``. ``default_timezone`` defaults to the zone of the machine.

    Raises `ConfigError` if the default zone is unknown.
    """
    source = SystemClock() if clock is None else clock
    if default_timezone is not None and not isinstance(_zone(default_timezone), tzinfo):
        raise ConfigError(f"current_time_tool: {_unknown(default_timezone)}")

    # Not async, because time zones are read from files.
    @tool(idempotent=True, reads_only=True)
    def current_time(timezone: str | None = None) -> ToolResult:
        """Tell the current date and time, with the day of the week.

        Args:
            timezone: An IANA name such as "Europe/Lisbon", an offset such as "+05:30", or "UTC";
                leave it out for the user's own.
        """
        wanted = (timezone or "").strip() or default_timezone
        zone = None if wanted is None else _zone(wanted)
        if wanted is not None and zone is None:
            return ToolResult.error(_unknown(wanted))
        moment = datetime.fromtimestamp(source.now_ms() / 1000, UTC).astimezone(zone)
        return ToolResult.text(_describe(moment))

    return current_time


def _describe(moment: datetime) -> str:
    """For example ``2026-02-11T14:03:22+01:00, Wednesday (Europe/Berlin, CET)``."""
    zone, short = getattr(moment.tzinfo, "key", None), moment.tzname()
    names = [name for name in dict.fromkeys((zone, short)) if name]
    stamp = moment.isoformat(timespec="seconds")
    return f"{stamp}, {_DAYS[moment.weekday()]} ({', '.join(names)})"


# Not strftime, which uses the locale of the machine.
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _zone(name: str) -> tzinfo | None:
    """Return the zone with this name, or None."""
    name = name.strip()
    if name.lower() in _UTC_NAMES:
        return UTC
    if offset := _OFFSET.fullmatch(name):
        return _fixed(*offset.groups(default="0"))
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown; not a name; a folder, or unreadable
        pass
    wanted = name.lower().replace(" ", "_")
    exact = [known for known in available_timezones() if known.lower() == wanted]
    return ZoneInfo(exact[0]) if exact else None


def _fixed(sign: str, hours: str, minutes: str) -> tzinfo | None:
    offset = timedelta(hours=int(hours), minutes=int(minutes))
    if offset > timedelta(hours=14):  # no place on earth has a larger offset
        return None
    return timezone(-offset if sign == "-" else offset)


def _unknown(name: str) -> str:
    zones, quoted = available_timezones(), repr(name[:60])
    if not zones:
        return (
            f"The time zone {quoted} cannot be looked up: this system has no time zone data "
            "(pip install tzdata). Use 'UTC' or an offset such as '+01:00'."
        )
    near = ", ".join(_near(name[:60], zones))
    hint = f"Did you mean {near}?" if near else "Use an IANA name such as 'Europe/Lisbon'."
    return f"Unknown time zone {quoted}. {hint} 'UTC' and offsets such as '+01:00' do as well."


def _near(name: str, zones: Iterable[str]) -> list[str]:
    """Return the zones with this place name, then those with a similar spelling."""
    from difflib import get_close_matches  # only needed for mistakes

    wanted = name.lower().replace(" ", "_")
    place = wanted.rpartition("/")[2]
    proper = sorted([zone for zone in zones if "/" in zone and not zone.startswith("Etc/")])
    same = [zone for zone in proper if zone.lower().rpartition("/")[2] == place]
    by_place = {zone.lower().rpartition("/")[2]: zone for zone in reversed(proper)}
    by_name = {zone.lower(): zone for zone in proper}
    alike = [by_place[match] for match in get_close_matches(place, by_place, _SUGGESTIONS, 0.75)]
    alike += [by_name[match] for match in get_close_matches(wanted, by_name, _SUGGESTIONS, 0.75)]
    return list(dict.fromkeys(same + alike))[:_SUGGESTIONS]
