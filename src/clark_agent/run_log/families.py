"""Which run started which.

A child run is one deeper than its parent (`clark_agent.RunIdentity.child_of`). A log that was
written or copied by hand may name any parent, also the run itself. So a run counts as below another
only if it is deeper, and whatever follows parents or children comes to an end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clark_agent.run_log.store import RunSummary
from clark_agent.types import RunIdentity

__all__ = ["is_below", "outermost", "parent_in"]


def is_below(run: RunSummary | RunIdentity, above: RunSummary | RunIdentity) -> bool:
    """Return whether a run can be below another, which it names as its parent."""
    return run.depth > above.depth


def parent_in(runs: Mapping[str, RunSummary], run: RunSummary) -> RunSummary | None:
    """Return the run that started a run; None if no run has, or it is not among ``runs``."""
    above = runs.get(run.parent_run_id or "")
    return above if above is not None and is_below(run, above) else None


def outermost(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Return those of all runs of a store that no other of them has started, in their order."""
    by_id = {run.run_id: run for run in runs}
    return [run for run in runs if parent_in(by_id, run) is None]
