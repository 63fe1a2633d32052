"""The spans of a run in the terminal: a line for each, with its time, tokens and cost."""

from __future__ import annotations

import shutil

from clark_agent.cli.view import Screen, one_line
from clark_agent.prices import Price
from clark_agent.run_log.span_tree import intact_tree, tree_lines
from clark_agent.run_log.store import RunStore

__all__ = ["show_trace"]


def show_trace(screen: Screen, store: RunStore, run_id: str, *, price: Price | None = None) -> None:
    """Draw the spans of a logged run, as wide as the terminal. In a file nothing is cut. Damage to
    its log or to that of a child run is reported below.
    """
    width = shutil.get_terminal_size((0, 0)).columns or None
    tree, damage = intact_tree(store, run_id, price)
    for line in tree_lines(tree, width=width):
        screen.note(line, "text")
    for error in damage:
        screen.note(one_line(str(error), 400), "error")
