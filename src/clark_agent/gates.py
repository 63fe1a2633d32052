"""What several tool gates allow together. Pure functions on their decisions.

Gates intersect. A gate that suppresses advisory gates removes those of lower priority. If no tool
is left, the conflict is resolved, so that the model is never called without tools: among the
non-empty lists the one with the highest priority wins, then the shorter one, then the name that
sorts first; if all are empty, nothing is narrowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

__all__ = ["GateConflict", "GateDecision", "compose_gates"]


class GateDecision(Struct, frozen=True):
    """The decision of one gate that narrows, for this call."""

    plugin: str
    allow: frozenset[str]
    priority: int = 0
    is_advisory: bool = False
    suppresses_advisory: bool = False


class GateConflict(Struct, frozen=True):
    """The gates that together left no tool, and how that was resolved."""

    plugins: tuple[str, ...]
    chosen_plugin: str | None
    allow: frozenset[str]
    reason: str


def compose_gates(
    decisions: Sequence[GateDecision],
) -> tuple[frozenset[str] | None, GateConflict | None]:
    """The tools that are left (None: all of them), and the conflict if there was one."""
    if not decisions:
        return None, None
    active = _unsilenced(decisions)
    allow = frozenset.intersection(*[decision.allow for decision in active])
    if allow:
        return allow, None
    conflict = _repair(active)
    return conflict.allow or None, conflict


def _unsilenced(decisions: Sequence[GateDecision]) -> list[GateDecision]:
    suppressors = [d.priority for d in decisions if d.suppresses_advisory]
    if not suppressors:
        return list(decisions)
    bar = max(suppressors)
    return [d for d in decisions if not (d.is_advisory and d.priority < bar)]


def _repair(active: Sequence[GateDecision]) -> GateConflict:
    plugins = tuple([d.plugin for d in active])
    candidates = [d for d in active if d.allow]
    if not candidates:
        reason = "every gate allows nothing, so nothing is narrowed"
        return GateConflict(plugins, None, frozenset(), reason)
    chosen = min(candidates, key=lambda d: (-d.priority, len(d.allow), d.plugin))
    reason = f"no tool passes all gates; {chosen.plugin!r} decides (priority {chosen.priority})"
    return GateConflict(plugins, chosen.plugin, chosen.allow, reason)
