"""The first turn of a run offers the opening tools, as far as they exist."""

from __future__ import annotations

import pytest

from clark_agent.errors import ConfigError
from clark_agent.plugins import OpeningGate
from clark_agent.plugins.hooks import Hooks
from tests.plugins.support import at_turn


def test_the_first_turn_is_narrowed_and_no_other() -> None:
    gate = OpeningGate(["plan", "ask"])
    offered = [gate.next_turn_tool_allowlist(at_turn(n, "plan", "go", "ask")) for n in range(3)]
    assert offered == [{"plan", "ask"}, None, None]


def test_it_keeps_no_state() -> None:
    gate = OpeningGate(["plan"])
    assert gate.next_turn_tool_allowlist(at_turn(1, "plan")) is None
    for _ in range(2):
        assert gate.next_turn_tool_allowlist(at_turn(0, "plan", "go")) == frozenset({"plan"})
    hooks = Hooks.of([gate])
    assert hooks.for_run() is hooks


def test_tools_that_are_not_registered_are_left_out() -> None:
    gate = OpeningGate(name for name in ("plan", "ask"))
    assert gate.next_turn_tool_allowlist(at_turn(0, "go", "ask")) == frozenset({"ask"})
    assert gate.next_turn_tool_allowlist(at_turn(0, "go")) == frozenset()
    assert OpeningGate([]).next_turn_tool_allowlist(at_turn(0, "go")) == frozenset()


def test_it_is_a_required_gate_of_common_rank() -> None:
    hooks = Hooks.of([OpeningGate(["plan"])])
    assert hooks.names["tool_gate"] == ("opening_gate",)
    (gate,) = hooks.tool_gate
    assert (gate.priority, gate.is_advisory, gate.suppresses_advisory) == (0, False, None)


def test_one_string_is_not_a_list_of_names() -> None:
    with pytest.raises(ConfigError, match=r"\['plan'\]"):
        OpeningGate("plan")
