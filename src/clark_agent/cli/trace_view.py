"""The spans of a run in the terminal: a line for each, with its time, tokens and cost."""

from __future__ import annotations

import shutil

from clark_agent.cli.view import Screen, safe
from clark_agent.prices import Price
from clark_agent.run_log.span_tree import BAR, LoggedSpan, span_tree, tree_lines
from clark_agent.run_log.store import RunStore

__all__ = ["lines_within", "show_trace"]

_SHORTEST_BAR = 8


def show_trace(screen: Screen, store: RunStore, run_id: str, *, price: Price | None = None) -> None:
    """Draw the spans of a logged run."""
    width = shutil.get_terminal_size((100, 24)).columns
    for line in lines_within(width, span_tree(store, run_id, price=price)):
        screen.note(safe(line), "text")


def lines_within(width: int, root: LoggedSpan) -> list[str]:
    """The lines of the tree. In a narrow terminal the bars are shorter, or left out."""
    lines = tree_lines(root)
    excess = max(map(len, lines)) - width
    if excess <= 0:
        return lines
    return tree_lines(root, bar=BAR - excess if BAR - excess >= _SHORTEST_BAR else 0)
