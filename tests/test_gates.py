"""Gates intersect, suppressors silence, and an empty composition is repaired."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clark_agent.gates import GateConflict, GateDecision, compose_gates

TOOLS = ("read", "write", "ask", "done")


@st.composite
def _decisions(draw: st.DrawFn) -> list[GateDecision]:
    names = draw(st.permutations(["a", "b", "c", "d", "e"]))
    return [
        GateDecision(
            name,
            draw(st.frozensets(st.sampled_from(TOOLS), max_size=3)),
            priority=draw(st.integers(-1, 2)),
            is_advisory=draw(st.booleans()),
            suppresses_advisory=draw(st.booleans()),
        )
        for name in names[: draw(st.integers(0, 5))]
    ]


# --- the rules again, one sentence of the specification at a time ---------------------------------


def is_silenced(gate: GateDecision, gates: Sequence[GateDecision]) -> bool:
    if not gate.is_advisory:
        return False
    highest: int | None = None
    for other in gates:
        if other.suppresses_advisory and (highest is None or other.priority > highest):
            highest = other.priority
    return highest is not None and gate.priority < highest


def stronger(a: GateDecision, b: GateDecision) -> int:
    """Negative when ``a`` wins a conflict against ``b``."""
    if a.priority != b.priority:
        return b.priority - a.priority
    if len(a.allow) != len(b.allow):
        return len(a.allow) - len(b.allow)
    return -1 if a.plugin < b.plugin else 1


@given(_decisions())
def test_composition_follows_the_rules(gates: list[GateDecision]) -> None:
    allow, conflict = compose_gates(gates)
    if not gates:
        assert (allow, conflict) == (None, None)
        return
    heard = [gate for gate in gates if not is_silenced(gate, gates)]
    passing = frozenset([tool for tool in TOOLS if all(tool in gate.allow for gate in heard)])
    if passing:
        assert (allow, conflict) == (passing, None)
        return
    assert conflict is not None
    assert conflict.plugins == tuple(gate.plugin for gate in heard)
    willing = sorted([gate for gate in heard if gate.allow], key=cmp_to_key(stronger))
    if willing:
        assert conflict.chosen_plugin == willing[0].plugin
        assert allow == conflict.allow == willing[0].allow
    else:
        assert conflict.chosen_plugin is None
        assert conflict.allow == frozenset()
        assert allow is None


@given(_decisions())
def test_there_are_always_tools_left(gates: list[GateDecision]) -> None:
    allow, _ = compose_gates(gates)
    assert allow is None or allow


@given(_decisions().flatmap(lambda gates: st.tuples(st.just(gates), st.permutations(gates))))
def test_the_order_of_gates_decides_only_how_a_conflict_lists_them(
    orders: tuple[list[GateDecision], list[GateDecision]],
) -> None:
    gates, shuffled = orders
    allow, conflict = compose_gates(gates)
    other_allow, other = compose_gates(shuffled)
    assert allow == other_allow
    assert (conflict is None) == (other is None)
    if conflict is not None and other is not None:
        assert conflict.chosen_plugin == other.chosen_plugin
        assert set(conflict.plugins) == set(other.plugins)


# --- examples -------------------------------------------------------------------------------------


def gate(
    name: str, *allow: str, priority: int = 0, advisory: bool = False, suppresses: bool = False
) -> GateDecision:
    return GateDecision(name, frozenset(allow), priority, advisory, suppresses)


def only(*tools: str) -> frozenset[str]:
    return frozenset(tools)


def test_no_gates_do_not_narrow() -> None:
    assert compose_gates([]) == (None, None)


def test_gates_intersect() -> None:
    gates = [gate("a", "read", "write"), gate("b", "write", "ask"), gate("c", "write")]
    assert compose_gates(gates) == (only("write"), None)


def chosen(*gates: GateDecision) -> tuple[str | None, frozenset[str] | None]:
    allow, conflict = compose_gates(gates)
    assert conflict is not None
    return conflict.chosen_plugin, allow


@pytest.mark.parametrize(
    ("gates", "winner"),
    [
        ([gate("a", "read"), gate("b", "write", "ask", priority=1)], "b"),
        ([gate("a", "read", "ask"), gate("b", "write")], "b"),
        ([gate("b", "read"), gate("a", "write")], "a"),
        ([gate("a", priority=9), gate("b", "write", "ask", priority=-1)], "b"),
        ([gate("a", "read", priority=-2), gate("b", "write", "ask", priority=-1)], "b"),
    ],
    ids=["priority", "fewer tools", "name", "an empty list never wins", "below zero"],
)
def test_who_wins_a_conflict(gates: list[GateDecision], winner: str) -> None:
    allow = next(g.allow for g in gates if g.plugin == winner)
    assert chosen(*gates) == (winner, allow)
    assert chosen(*reversed(gates)) == (winner, allow)


def test_a_single_empty_gate_is_a_conflict_and_narrows_nothing() -> None:
    allow, conflict = compose_gates([gate("a")])
    assert allow is None
    assert isinstance(conflict, GateConflict)
    assert (conflict.plugins, conflict.chosen_plugin, conflict.allow) == (("a",), None, frozenset())
    assert conflict.reason


def test_a_conflict_lists_empty_gates_and_not_the_silenced() -> None:
    _, conflict = compose_gates(
        [
            gate("empty"),
            gate("silenced", "read", advisory=True),
            gate("loud", "write", priority=1, suppresses=True),
        ]
    )
    assert conflict is not None
    assert conflict.plugins == ("empty", "loud")
    assert conflict.chosen_plugin == "loud"
    assert "loud" in conflict.reason


@pytest.mark.parametrize(
    ("priority", "heard"), [(0, False), (1, True), (2, True)], ids=["below", "equal", "above"]
)
def test_only_advice_strictly_below_the_suppressor_is_silenced(priority: int, heard: bool) -> None:
    allow, _ = compose_gates(
        [
            gate("advice", "read", priority=priority, advisory=True),
            gate("loud", "read", "write", priority=1, suppresses=True),
        ]
    )
    assert allow == (only("read") if heard else only("read", "write"))


def test_required_gates_are_never_silenced() -> None:
    allow, _ = compose_gates(
        [gate("boundary", "read"), gate("loud", "read", "write", priority=9, suppresses=True)]
    )
    assert allow == only("read")


def test_the_highest_of_several_suppressors_sets_the_bar() -> None:
    allow, _ = compose_gates(
        [
            gate("low", "read", "write", priority=1, suppresses=True),
            gate("advice", "read", priority=2, advisory=True),
            gate("high", "read", "write", priority=3, suppresses=True),
        ]
    )
    assert allow == only("read", "write")


def test_an_advisory_suppressor_can_be_silenced_by_a_higher_one() -> None:
    allow, _ = compose_gates(
        [
            gate("low", "read", advisory=True, suppresses=True),
            gate("high", "write", priority=1, advisory=True, suppresses=True),
        ]
    )
    assert allow == only("write")
