"""The spans of a run in the terminal: a line for each, with its time, tokens and cost."""

from __future__ import annotations

import shutil

from clark_agent.cli.view import Screen
from clark_agent.prices import Price
from clark_agent.run_log.span_tree import span_tree, tree_lines
from clark_agent.run_log.store import RunStore

__all__ = ["show_trace"]


def show_trace(screen: Screen, store: RunStore, run_id: str, *, price: Price | None = None) -> None:
    """Draw the spans of a logged run, as wide as the terminal. In a file nothing is cut."""
    width = shutil.get_terminal_size((0, 0)).columns or None
    for line in tree_lines(span_tree(store, run_id, price=price), width=width):
        screen.note(line, "text")
