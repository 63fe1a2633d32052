"""Starts a run from the middle of another, and computes the cost of runs."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.errors import InvalidContinuationError
from clark_agent.prices import ModelRef, ModelUsage
from clark_agent.run_log.families import is_below
from clark_agent.run_log.fold import FoldedRun, fold
from clark_agent.run_log.prefix import prefix_of
from clark_agent.run_log.reader import outcome_of
from clark_agent.run_log.records import Answered, Consulted, Record, RunResumed, ToolStarted
from clark_agent.run_log.store import LoadedRun, RunStore, RunSummary
from clark_agent.run_log.writer import RunLog, store_of
from clark_agent.types import AgentContext, RunIdentity, Usage

__all__ = [
    "RunUsage",
    "children_of",
    "fork",
    "runs_below_at",
    "taken_up_at",
    "usage_of",
    "usage_tree",
]


def fork(
    store: RunStore | RunLog,
    run_id: str,
    *,
    turn: int | None = None,
    before: int | None = None,
) -> AgentContext:
    """Return a context for a new run, with the history of another up to the end of a turn.

    Without a turn it ends with the last complete one; 0 is before the first. With ``before``,
    records from that number on are ignored, so that the intact part of a damaged log can be
    continued. The new run gets a new identity in the same conversation. Raises
    `InvalidContinuationError` for a turn that the run does not have.
    """
    loaded = store_of(store).load(run_id)
    if before is not None:
        loaded = LoadedRun(
            run_id,
            tuple([record for record in loaded.records if record.seq < before]),
            tuple([problem for problem in loaded.problems if problem.seq < before]),
        )
    folded = fold(loaded)
    ends = [len(folded.began.prompts), *folded.turn_ends]
    if folded.ended is not None and len(folded.turn_ends) < folded.asked:
        ends.append(len(folded.messages))  # only the first record of the next turn is missing
    if turn is None:
        turn = len(ends) - 1
    if isinstance(turn, bool) or not 0 <= turn < len(ends):
        raise InvalidContinuationError(
            f"the run {run_id!r} has {len(ends) - 1} complete turns; cannot fork at turn {turn!r}"
        )
    kept = folded.messages[: ends[turn]]
    identity = folded.began.identity
    return AgentContext(
        folded.began.system_prompt,
        (*folded.began.history, *kept),
        RunIdentity.root(conversation_id=identity.conversation_id),
    )


class RunUsage(Struct, frozen=True, kw_only=True):
    """The cost of a run and of the runs below it."""

    run_id: str
    outcome: str | None
    """None if it has not ended."""
    model: ModelRef
    by_model: tuple[ModelUsage, ...]
    """Its own tokens by model: first its own model, then others that its plugins asked."""
    usage: Usage
    """Its own tokens."""
    tree_usage: Usage
    """Including the runs below."""
    turns: int
    model_calls: int
    """Including retries, and the questions of plugins."""
    tool_calls: int
    milliseconds: int
    """How long processes worked on it: from the first record of each to its last."""
    prefix_reuse: float | None = None
    """The share of what could repeat in its requests that was the same in the next request; None
    if there was one request. See `clark_agent.run_log.prefix`. Computed by `usage_tree` alone.
    """
    children: tuple[RunUsage, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self, 0))


def usage_tree(store: RunStore | RunLog, run_id: str) -> RunUsage:
    """Return tokens, calls, time and `prefix_reuse` of a run and of all runs below it."""
    return usage_of(store_of(store), run_id, checks_prefix=True)


def usage_of(
    store: RunStore, run_id: str, end: int | None = None, *, checks_prefix: bool = False
) -> RunUsage:
    """Like `usage_tree`. If ``end`` is given, it is the index of a ``run_resumed``: count what was
    spent before that process took the run up.
    """
    loaded = store.load(run_id)
    below: Container[str] | None = None
    first = 0
    if end is not None:
        resumed = loaded.records[end]
        first, below = resumed.seq, runs_below_at(store, run_id, resumed)
        loaded = replace(loaded, records=loaded.records[:end])
    folded = fold(loaded)
    entries = [record.entry for record in loaded.records]
    found = sorted(children_of(store, loaded, folded), key=lambda run: run.began_at)
    counted = [run.run_id for run in found if below is None or run.run_id in below]
    children = tuple(
        [usage_of(store, child, taken_up_at(store, child, first)) for child in counted]
        if end is not None
        else [usage_of(store, child, checks_prefix=checks_prefix) for child in counted]
    )
    parts = [(folded.began.model_ref, folded.usage), *folded.aside.items()]
    by_model = tuple([ModelUsage(model, usage) for model, usage in parts])
    total = own = sum([part.usage for part in by_model], Usage())
    for child in children:
        total += child.tree_usage
    return RunUsage(
        run_id=run_id,
        outcome=None if folded.ending is None else outcome_of(folded.ending),
        model=folded.began.model_ref,
        by_model=by_model,
        usage=own,
        tree_usage=total,
        turns=folded.turns,
        model_calls=sum(isinstance(entry, (Answered, Consulted)) for entry in entries),
        tool_calls=sum(isinstance(entry, ToolStarted) for entry in entries),
        milliseconds=folded.worked_ms,
        prefix_reuse=_prefix_reuse(loaded) if checks_prefix else None,
        children=children,
    )


def _prefix_reuse(loaded: LoadedRun) -> float | None:
    report = prefix_of(loaded)
    return report.reuse if len(report.requests) > 1 else None


def children_of(store: RunStore, loaded: LoadedRun, folded: FoldedRun) -> Sequence[RunSummary]:
    """Return the direct child runs. A run that ended without creating an id has none."""
    if folded.ending is None or any(record.ids or _has_below(record) for record in loaded.records):
        found = store.runs(parent_run_id=loaded.run_id)
        return [run for run in found if is_below(run, folded.began.identity)]
    return ()


def taken_up_at(store: RunStore, run_id: str, first: int) -> int | None:
    """Return the index of the record with which a child run was taken up, by a process whose first
    record in the log of the parent has this number, or a later process; None if it was not.
    """
    for index, record in enumerate(store.load(run_id).records):
        entry = record.entry
        if isinstance(entry, RunResumed) and entry.within is not None and entry.within >= first:
            return index
    return None


def runs_below_at(store: RunStore, run_id: str, resumed: Record) -> frozenset[str]:
    """Return the direct child runs that existed when a process took the run up."""
    if resumed.v == 1:  # which does not record it
        runs = store.runs(parent_run_id=run_id)
        return frozenset([run.run_id for run in runs if run.began_at < resumed.at])
    assert isinstance(resumed.entry, RunResumed)
    return frozenset(resumed.entry.below)


def _has_below(record: Record) -> bool:
    return isinstance(record.entry, RunResumed) and bool(record.entry.below)


def _lines(run: RunUsage, depth: int) -> list[str]:
    usage: Any = run.usage
    cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    line = (
        f"{'  ' * depth}{run.run_id}  {run.outcome or 'not ended'}  "
        f"{usage.input_tokens + cached:,} in, {usage.output_tokens:,} out, "
        f"{run.model_calls} model calls, {run.tool_calls} tool calls, "
        f"{run.milliseconds / 1000:.1f} s"
    )
    if run.prefix_reuse is not None:
        line += f", {run.prefix_reuse:.1%} of the prefix kept"
    return [line, *[text for child in run.children for text in _lines(child, depth + 1)]]
