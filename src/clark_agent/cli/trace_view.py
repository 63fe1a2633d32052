"""The spans of a run in the terminal: a line for each, with its time, tokens and cost."""

from __future__ import annotations

import shutil

from clark_agent.cli.view import Screen, safe
from clark_agent.prices import Price
from clark_agent.run_log.span_tree import span_tree, tree_lines
from clark_agent.run_log.store import RunStore

__all__ = ["show_trace"]


def show_trace(screen: Screen, store: RunStore, run_id: str, *, price: Price | None = None) -> None:
    """Draw the spans of a logged run. In a narrow terminal the bars are left out."""
    width = shutil.get_terminal_size((100, 24)).columns
    root = span_tree(store, run_id, price=price)
    lines = tree_lines(root)
    if max(map(len, lines)) > width:
        lines = tree_lines(root, bar=0)
    for line in lines:
        screen.note(safe(line), "text")
